//! Secrets in URLs: they are in no message, no log and no action, whether or not the URL can be
//! parsed.

use crate::api::{TOML, ask, ask_as};
use crate::control::Controlled;
use crate::program::blockmux;
use rustix::process::Signal;
use serde_json::json;
use std::fs;
use std::io::Read;

/// A secret in each form of URL, mostly of a port at which nobody listens. Each has `SECRET` or a
/// part of it in its secret.
const URLS: [&str; 20] = [
    "iscsi://u%SECRET@127.0.0.1:1/iqn.2026-11.a:a/0",
    "iscsi://u%SE/CR@ET@127.0.0.1:1/iqn.2026-11.a:a/0",
    "iscsi://u%SECRET@127.0.0.1:port/iqn.2026-11.a:a/0",
    "iscsi://u%SECRET@127.0.0.1:1/not a name/0",
    "iscsi://u%25SE%43RET@127.0.0.1:1/iqn.2026-11.a:a/x",
    "iscsi://u%SECRET",
    "iscsi:/u%SECRET@127.0.0.1",
    "iscsi://u%SE?CRET@127.0.0.1/iqn.2026-11.a:a/0",
    "ISER://u%SECRET@127.0.0.1:1/iqn.2026-11.a:a/0?wrong=1",
    "nbd://u:SECRET@127.0.0.1:1/a",
    "nbds://u:SECRET@127.0.0.1:1/a?tls-psk-file=/nowhere/SEE",
    "nbd://u:SE/CRET@127.0.0.1/a",
    "nvme+tcp://u:SECRET@127.0.0.1:1/nqn.2026-11.a:a/1",
    "nvme+tcp://127.0.0.1:1/nqn.2026-11.a:a/1?dhchap_secret=SECRET",
    "nvme+rdma://u%SECRET@127.0.0.1:1/nqn.2026-11.a:a/1",
    "srp://u:SECRET@127.0.0.1:1/0/0",
    "aoe://u:SECRET@nowhere/e1.1",
    "ftp://u:SECRET@127.0.0.1/a",
    "stripe:[iscsi://u%SECRET@127.0.0.1:1/iqn.2026-11.a:a/0,nbd://u:SECRET@127.0.0.1:1/a",
    "delay:1x:iscsi://u%SE,CRET@127.0.0.1:1/iqn.2026-11.a:a/0",
];

/// Checks that a text is there and has no part of a secret.
fn check(what: &str, text: &str) {
    assert!(!text.trim().is_empty(), "{what}");
    for part in ["SECRET", "CRET", "SE/", "CR@", "SE%"] {
        assert!(!text.contains(part), "{what}: {text}");
    }
}

#[test]
fn no_message_of_a_command_has_the_secret_of_a_url() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    for url in URLS {
        fs::write(&config, format!("[[volume]]\nname = 'a'\nspec = '{url}'\n")).unwrap();
        let config = config.to_str().unwrap();
        let named = format!("x={url}");
        for args in [
            &["-vv", "info", url][..],
            &["-vv", "discover", url],
            &["-vv", "reset", url],
            &["-vv", "copy", url, "mem:1m"],
            &["-vv", "bench", &named, "--runtime=1"],
            &["-vv", "serve", &named, "--nbd", "127.0.0.1:0"],
            &["-vv", "serve", "--config", config, "--nbd", "127.0.0.1:0"],
            &["info", "mem:1m", url],
            &["ctl", "unix:/nowhere/control", "resize", "a", url],
            &["bench", "mem:1m", "--bs", url],
        ] {
            let output = blockmux(args);
            assert!(!output.status.success(), "{args:?}");
            check(&format!("{args:?}"), &format!("{output:?}"));
        }
    }
}

#[test]
fn no_action_error_or_log_of_a_daemon_has_the_secret_of_a_url() {
    let mut controlled = Controlled::serve(&["a=mem:1m", "-vv"]);
    let socket = controlled.socket();
    for url in URLS {
        let body = json!({ "volume": format!("x={url}") }).to_string();
        let (status, answer) = ask(&socket, "POST", "/v1/volumes", "", &body);
        assert!(status >= 400, "{url}: {answer}");
        check(url, &answer.to_string());
        let body = json!({ "volume": "x=mem:1m", "read_only": url }).to_string();
        check(url, &ask(&socket, "POST", "/v1/volumes", "", &body).1.to_string());
        let fragment = format!("[[volume]]\nname = 'x'\nspec = '{url}'\n");
        let apply = "/v1/config/apply?path=/f.toml";
        check(url, &ask_as(TOML, &socket, ("POST", apply), "", &fragment).1.to_string());
        let body = json!({ "volume": [{ "name": "x", "spec": url }] }).to_string();
        check(url, &ask(&socket, "POST", "/v1/config/apply", "", &body).1.to_string());
        check(url, &controlled.refusal(&["remove", url]));
    }
    let (_, actions) = ask(&socket, "GET", "/v1/actions", "", "");
    assert!(actions.as_array().unwrap().len() >= URLS.len(), "{actions}");
    check("actions", &actions.to_string());
    controlled.daemon.signal(Signal::TERM);
    let mut log = String::new();
    controlled.daemon.stderr.read_to_string(&mut log).unwrap();
    assert!(log.contains("config change refused: add x="), "{log}");
    check("log", &log);
}
