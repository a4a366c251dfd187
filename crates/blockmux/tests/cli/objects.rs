//! Objects of the running config: `ctl list`, `show`, `add`, `set` and `remove`, and their
//! resources in the API.

use crate::api::{TOML, ask, ask_as};
use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use crate::raw_client::RawClient;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Stdio;

const TARGET: &str = "iqn.2026-11.test:t";
const SUBSYSTEM: &str = "nqn.2026-11.test:s";
const PORT: &str = "0x11111111111111112222222222222201";

/// A daemon with nothing but a control socket in its config file.
fn empty() -> Controlled {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("c.toml");
    let socket = directory.path().join("control");
    let state = directory.path().join("state");
    fs::create_dir(&state).unwrap();
    let text = format!("control = 'unix:{}'\nstate = '{}'\n", socket.display(), state.display());
    fs::write(&config, text).unwrap();
    let daemon = Daemon::serve_only(&["--config", config.to_str().unwrap()]);
    Controlled { daemon, directory }
}

/// An address of loopback for the listeners of one test.
fn own_ip() -> String {
    let pid = std::process::id();
    Ipv4Addr::new(127, 90, (pid >> 8) as u8, (pid as u8).max(1)).to_string()
}

#[test]
fn a_daemon_that_starts_with_nothing_gets_every_kind_of_object_and_saves_it() {
    let daemon = empty();
    let ip = own_ip();
    let at = |port: u16| format!("{ip}:{port}");
    let image = daemon.directory.path().join("image");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let image = format!("spec=file:{}", image.display());
    let secret = daemon.directory.path().join("secret");
    fs::write(&secret, "a secret of sixteen bytes\n").unwrap();
    fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let secret = format!("secret_file={}", secret.display());
    let words = |line: &str| -> Vec<String> { line.split(' ').map(str::to_owned).collect() };
    for line in [
        format!("add nbd {} allow=[\"127.0.0.0/8\"]", at(10809)),
        format!("add iscsi {}", at(3260)),
        format!("add nvme-tcp {}", at(4420)),
        format!("add srp {}", at(5555)),
        format!("add volume disk {image} protocols=[\"nbd\",\"iscsi\",\"nvme_tcp\",\"srp\"] limits.iops=500"),
        "add volume ram spec=mem:1m protocols=[\"iscsi\"]".to_owned(),
        format!("add iscsi-target {TARGET} TargetAlias=disks"),
        format!("add iscsi-target {TARGET} luns 0 volume=disk"),
        format!("add iscsi-target {TARGET} luns 3 volume=ram read_only=true"),
        format!("add iscsi-target {TARGET} acl iqn.2026-11.test:i CHAP_N=i {secret}"),
        format!("add nvme-subsystem {SUBSYSTEM}"),
        format!("add nvme-subsystem {SUBSYSTEM} namespaces 1 volume=disk"),
        format!("add nvme-subsystem {SUBSYSTEM} host nqn.2026-11.test:h"),
        format!("add nvme-subsystem {SUBSYSTEM} ana_group 2 namespaces=[1] states={{}}"),
        format!("add srp-target {PORT}"),
        format!("add srp-target {PORT} luns 0 volume=disk"),
        "set daemon settings max_connections=77".to_owned(),
        "set volume disk limits.iops=null limits.bandwidth=10m description=disk".to_owned(),
    ] {
        let words = words(&line);
        daemon.said(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let shown = |words: &[&str]| -> Value {
        serde_json::from_str(&daemon.said(&[&["--json", "show"], words].concat())).unwrap()
    };
    assert_eq!(shown(&["iscsi_target", TARGET, "luns", "3"]), json!({"volume": "ram", "read_only": true}));
    assert_eq!(shown(&["volume", "disk"])["limits"], json!({"bandwidth": "10m"}));
    assert_eq!(
        shown(&["nbd", &at(10809)]),
        json!({"address": at(10809), "allow": ["127.0.0.0/8"]}),
        "a listener is an object with its parameters"
    );
    let names = |words: &[&str]| -> Vec<String> {
        let list = daemon.said(&[&["list"], words].concat());
        list.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
    };
    assert_eq!(names(&["volume"]), ["disk", "ram"]);
    assert_eq!(names(&["volume", "--filter", "ra"]), ["ram"]);
    assert_eq!(names(&["iscsi_target", TARGET, "luns"]), ["0", "3"]);
    assert_eq!(names(&["nvme_subsystem", SUBSYSTEM, "host"]), ["nqn.2026-11.test:h"]);
    let exported = daemon.said(&["export"]);
    daemon.said(&["save"]);
    let config = daemon.directory.path().join("c.toml");
    let Controlled { daemon: first, directory } = daemon;
    drop(first);
    let again = Controlled { daemon: Daemon::serve_only(&["--config", config.to_str().unwrap()]), directory };
    assert_eq!(again.said(&["export"]), exported, "a start with what was saved has the same config");
    for line in [
        format!("remove iscsi-target {TARGET} acl iqn.2026-11.test:i --force"),
        format!("remove iscsi-target {TARGET}"),
        format!("remove nvme-subsystem {SUBSYSTEM} --force"),
        format!("remove srp-target {PORT}"),
        "remove volume disk".to_owned(),
        "remove volume ram".to_owned(),
        format!("remove srp {}", at(5555)),
    ] {
        let words = words(&line);
        again.said(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let left: Vec<String> =
        again.said(&["list"]).lines().filter(|line| !line.ends_with(" 0")).map(str::to_owned).collect();
    let kinds: Vec<_> = left.iter().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(kinds, ["daemon", "iscsi", "nbd", "nvme_tcp"], "{left:?}");
    again.said(&["save"]);
}

/// The status, the ETag and the body of a response.
fn answer(socket: &Path, method: &str, path: &str, headers: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    ask(socket, method, path, headers, &body)
}

#[test]
fn objects_are_resources_with_tags_that_keep_changes_from_being_lost() {
    let daemon = Controlled::serve(&["root=mem:1m"]);
    let socket = daemon.socket();
    let root = "/v1/objects/volume/root";
    let call = |method, path: &str, headers: &str, body: Value| answer(&socket, method, path, headers, &body);
    let (status, object) = call("GET", root, "", Value::Null);
    assert_eq!((status, &object), (200, &json!({"name": "root", "spec": "mem:1m"})));
    let tag = tag_of(&socket, root);
    let json_body = "Content-Type: application/json\r\n";
    let (status, done) = call("PUT", root, json_body, json!({"spec": "mem:1m", "description": "one"}));
    assert_eq!((status, &done["applied"]), (200, &json!(true)));
    assert_eq!(
        done["changes"][0],
        json!({"change": "+ volume root: description added: \"one\"", "path": ["volume", "root", "description"],
            "after": "one", "affected": []})
    );
    let (status, done) = call("PUT", root, json_body, json!({"spec": "mem:1m", "description": "one"}));
    assert_eq!((status, &done["changes"]), (200, &json!([])), "PUT is idempotent");
    let stale = format!("{json_body}If-Match: {tag}\r\n");
    let (status, error) = call("PATCH", root, &stale, json!({"description": "two"}));
    assert_eq!((status, &error["error"]["code"]), (412, &json!("precondition_failed")));
    let fresh = format!("{json_body}If-Match: \"x\", {}\r\n", tag_of(&socket, root));
    assert_eq!(call("PATCH", root, &fresh, json!({"description": null})).0, 200);
    assert_eq!(call("GET", root, "", Value::Null).1, object);
    let new = format!("{json_body}If-None-Match: *\r\n");
    assert_eq!(call("PUT", root, &new, json!({"spec": "mem:2m"})).0, 412);
    assert_eq!(call("PUT", "/v1/objects/volume/more", &new, json!({"spec": "mem:2m"})).0, 201);
    for headers in [
        format!("{json_body}If-Match: \u{e9}\r\n"),
        format!("{json_body}If-Match: \"x\"\r\nIf-None-Match: *\r\n"),
        format!("{json_body}If-None-Match: \"x\", {}\r\n", tag_of(&socket, root)),
    ] {
        assert_eq!(call("PATCH", root, &headers, json!({"description": "x"})).0, 412, "{headers}");
    }
    let (status, planned) = call("DELETE", "/v1/objects/volume/more?dry_run=true", "", Value::Null);
    assert_eq!((status, &planned["applied"]), (200, &json!(false)));
    let (_, list) = call("GET", "/v1/objects/volume?limit=1", "", Value::Null);
    assert_eq!((&list["items"][0]["name"], &list["next"]), (&json!("more"), &json!("more")));
    let (_, list) = call("GET", "/v1/objects/volume?after=more", "", Value::Null);
    assert_eq!((&list["items"][0]["name"], &list["next"]), (&json!("root"), &Value::Null));
    assert_eq!(call("DELETE", "/v1/objects/volume/more", "", Value::Null).0, 200);
    for (method, path, body, expected) in [
        ("GET", "/v1/objects/nothing", Value::Null, 404),
        ("GET", "/v1/objects/volume/nothing", Value::Null, 404),
        ("GET", "/v1/objects/volume?limit=x", Value::Null, 400),
        ("GET", "/v1/objects/volume?x=y", Value::Null, 400),
        ("PATCH", "/v1/objects/volume/nothing", json!({"description": "x"}), 404),
        ("PUT", "/v1/objects/volume/new", json!({"spec": "mem:1m", "key": 1}), 422),
        ("PUT", "/v1/objects/volume/new", json!({"name": "other", "spec": "mem:1m"}), 422),
        ("PUT", "/v1/objects/iscsi_target/iqn.a/luns/0", json!({"volume": "root"}), 404),
        ("DELETE", "/v1/objects/daemon/settings", Value::Null, 422),
        ("PUT", "/v1/objects/nbd/127.0.0.1:1", json!({"volumes": ["a&allow=::1"]}), 422),
        ("PUT", "/v1/objects/volume/new", json!({"spec": "null:1m", "limits": {"iops": 1u64 << 63}}), 422),
    ] {
        assert_eq!(call(method, path, json_body, body).0, expected, "{method} {path}");
    }
}

/// The ETag of an object, as `curl` shows it.
fn tag_of(socket: &Path, path: &str) -> String {
    let mut curl = std::process::Command::new("curl");
    curl.args(["--silent", "--include", "--unix-socket"]).arg(socket);
    let output = curl.arg(format!("http://localhost{path}")).output().unwrap();
    let head = text(&output.stdout);
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: "));
    tag.unwrap_or_else(|| panic!("no ETag: {head}")).to_owned()
}

#[test]
fn a_host_gets_another_disk_only_by_force() {
    let daemon = empty();
    let (ip, other) = (own_ip(), "nqn.2026-11.test:other");
    for line in [
        format!("add nvme-tcp {ip}:4430"),
        "add volume disk spec=mem:1m".to_owned(),
        format!("add nvme-subsystem {SUBSYSTEM}"),
        format!("add nvme-subsystem {SUBSYSTEM} namespaces 1 volume=disk"),
        format!("add nvme-subsystem {other}"),
        format!("add nvme-subsystem {other} namespaces 1 volume=disk"),
    ] {
        daemon.said(&line.split(' ').collect::<Vec<_>>());
    }
    let host = Daemon::serve(&[&format!("nvme+tcp://{ip}:4430/{other}")]);
    let mut client = RawClient::connect(&host.socket());
    assert_eq!(client.read(0, 512), [0; 512]);
    for removal in [
        &["remove", "nvme-subsystem", SUBSYSTEM][..],
        &["remove", "nvme-subsystem", SUBSYSTEM, "namespaces", "1"],
    ] {
        // The namespace of the other subsystem would get the UUID of the volume.
        let refusal = daemon.refusal(removal);
        assert!(refusal.contains("is in use by nvme") && refusal.contains("--force"), "{refusal}");
    }
    let removal = ["remove", "nvme-subsystem", SUBSYSTEM, "--force"];
    let planned = daemon.said(&[&removal[..], &["--dry-run"]].concat());
    for (said, verb) in [(planned, "affects"), (daemon.said(&removal), "affected")] {
        let lines: Vec<_> = said.lines().filter(|line| line.ends_with(&format!(", of {other}"))).collect();
        let is_listed = |line: &&str| line.starts_with(&format!("    {verb} nvme-tcp "));
        assert!(!lines.is_empty() && lines.iter().all(is_listed), "{said}");
    }
}

#[test]
fn what_sessions_use_is_removed_only_by_force_and_what_is_refused_changes_nothing() {
    let mut daemon = Controlled::serve(&["root=mem:1m", "other=mem:1m"]);
    let mut client = RawClient::connect(&daemon.daemon.socket());
    assert_eq!(client.read(0, 512), [0; 512]);
    let refusal = daemon.refusal(&["remove", "volume", "root"]);
    assert!(
        refusal.contains("volume root: is in use by nbd client") && refusal.contains("--force"),
        "{refusal}"
    );
    assert_eq!(client.read(0, 512), [0; 512]);
    let planned = daemon.said(&["remove", "volume", "root", "--dry-run"]);
    assert!(planned.starts_with("- volume root\n    affects nbd client"), "{planned}");
    daemon.said(&["remove", "volume", "root", "--force"]);
    assert!(daemon.refusal(&["show", "volume", "root"]).contains("volume root: does not exist"));
    let refusal = daemon.refusal(&["set", "volume", "other", "spec=file:/nowhere/x"]);
    assert!(refusal.contains("/nowhere/x"), "{refusal}");
    daemon.daemon.wait_for_line("config changed: remove volume root");
    let line = daemon.daemon.wait_for_line("config change refused: set volume other");
    assert!(line.contains("uid ") && line.contains("/nowhere/x"), "{line}");
    let later = daemon.said(&["set", "daemon", "settings", "cores=1"]);
    assert!(later.contains("takes effect at the next start"), "{later}");
    assert!(daemon.said(&["show", "daemon", "settings"]).contains("cores = 1"));
}

#[test]
fn the_last_entry_of_those_who_have_access_and_the_last_way_to_the_daemon_stay() {
    let daemon = empty();
    let ip = own_ip().replacen("127.90", "127.92", 1);
    daemon.said(&["add", "iscsi", &format!("{ip}:3260")]);
    daemon.said(&["add", "nvme-tcp", &format!("{ip}:4420")]);
    daemon.said(&["add", "volume", "disk", "spec=mem:1m", "protocols=[\"iscsi\",\"nvme_tcp\"]"]);
    let acl = "acl=[{\"InitiatorName\":\"iqn.a\"}]";
    daemon.said(&["add", "iscsi-target", TARGET, "luns={\"0\":\"disk\"}", acl]);
    let hosts = "hosts=[\"nqn.h\"]";
    daemon.said(&["add", "nvme-subsystem", SUBSYSTEM, "namespaces={\"1\":\"disk\"}", hosts]);
    let url = format!("iscsi://{ip}:3260/{TARGET}/0?initiator=iqn.b");
    for words in [
        &["remove", "iscsi-target", TARGET, "acl", "iqn.a"][..],
        &["set", "iscsi-target", TARGET, "acl=null"],
        &["remove", "nvme-subsystem", SUBSYSTEM, "hosts", "nqn.h"],
    ] {
        let refusal = daemon.refusal(words);
        assert!(refusal.contains("everybody would have access") && refusal.contains("--force"), "{refusal}");
        assert!(!blockmux(["info", &url]).status.success());
    }
    daemon.said(&["set", "iscsi-target", TARGET, "acl=null", "allow=[]"]);
    assert!(!blockmux(["info", &url]).status.success());
    let refusal = daemon.refusal(&["set", "daemon", "settings", "control=null"]);
    assert!(refusal.contains("no command reaches the daemon after its next start"), "{refusal}");
}

#[test]
fn words_that_are_no_object_are_refused_with_what_to_write() {
    let daemon = Controlled::serve(&["root=mem:1m"]);
    for (words, expected) in [
        (&["set", "volume", "root", "description"][..], "`description`: write KEY=VALUE"),
        (&["add", "volume", "x", "spec=mem:1m", "--read-only"], "write KEY=VALUE"),
        (&["add", "x=mem:1m", "--dry-run"], "--dry-run is for objects"),
        (&["list", "nothing"], "choose one of volume, attachment"),
        (&["list", "iscsi_target", "iqn.a", "nothing"], "choose one of acl, luns"),
    ] {
        let output = daemon.ctl(words);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{words:?}: {said}");
    }
    let help = text(&blockmux(["ctl", "unix:/x", "add", "--help"]).stdout);
    assert!(help.contains("KIND NAME [KEY=VALUE]"), "{help}");
}

/// Gives a command of `ctl` a text at its standard input.
fn said_with(daemon: &Controlled, words: &[&str], input: &str) -> String {
    let mut ctl = std::process::Command::new(BLOCKMUX);
    ctl.args(["ctl", &format!("unix:{}", daemon.socket().display())]).args(words);
    let mut ctl = ctl.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    ctl.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = ctl.wait_with_output().unwrap();
    assert!(output.status.success(), "{words:?}");
    text(&output.stdout)
}

#[test]
fn a_secret_is_written_used_replaced_and_removed_and_never_shown() {
    let daemon = empty();
    let ip = own_ip().replacen("127.90", "127.91", 1);
    let at = format!("{ip}:3260");
    daemon.said(&["add", "iscsi", &at]);
    daemon.said(&["add", "volume", "disk", "spec=mem:1m", "protocols=[\"iscsi\"]"]);
    daemon.said(&["add", "iscsi-target", TARGET, "luns={\"0\":\"disk\"}"]);
    let written = said_with(&daemon, &["add", "secret", "host1"], "the first secret\n");
    let path = written.split_whitespace().nth(1).unwrap().to_owned();
    daemon.said(&[
        "add",
        "iscsi-target",
        TARGET,
        "acl",
        "iqn.2026-11.test:i",
        "CHAP_N=host1",
        "secret_file=secret:host1",
    ]);
    let refusal =
        daemon.refusal(&["add", "iscsi-target", TARGET, "acl", "x", "CHAP_N=x", "secret_file=secret:no"]);
    assert!(refusal.contains("/secrets/no: No such file or directory"), "{refusal}");
    let file = daemon.directory.path().join("own.secret");
    let login = |secret: &str| {
        fs::write(&file, secret).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let url = format!(
            "iscsi://host1@{at}/{TARGET}/0?initiator=iqn.2026-11.test:i&secret_file={}",
            file.display()
        );
        blockmux(["info", &url]).status.success()
    };
    assert!(login("the first secret") && !login("another secret!!"));
    let listed = daemon.said(&["list", "secret"]);
    assert!(
        listed.contains("used by iscsi_target iqn.2026-11.test:t acl iqn.2026-11.test:i secret_file"),
        "{listed}"
    );
    // What its users would refuse is not written.
    let (status, _) = ask(
        &daemon.socket(),
        "PUT",
        "/v1/secrets/host1",
        "Content-Type: application/json\r\n",
        "{\"value\": \"short\"}",
    );
    assert!(status == 422 && login("the first secret"));
    said_with(&daemon, &["set", "secret", "host1"], "another secret!!");
    assert!(!login("the first secret") && login("another secret!!"));
    let refusal = daemon.refusal(&["remove", "secret", "host1"]);
    assert!(refusal.contains("is used by iscsi_target"), "{refusal}");
    // A config file has the name, too.
    daemon.said(&["save"]);
    let config = daemon.directory.path().join("c.toml");
    assert!(fs::read_to_string(&config).unwrap().contains("secret_file = \"secret:host1\""));
    assert!(blockmux([Path::new("check"), &config]).status.success());
    let forced = daemon.ctl(&["remove", "secret", "host1", "--force"]);
    let note = text(&forced.stderr);
    assert!(forced.status.success() && note.contains("secret_file still names it"), "{note}");
    let refusal = daemon.refusal(&["set", "volume", "disk", "description=x"]);
    assert!(refusal.contains("/secrets/host1: No such file or directory"), "{refusal}");
    said_with(&daemon, &["add", "secret", "host1"], "another secret!!");
    daemon.said(&["set", "volume", "disk", "description=x"]);
    let output = daemon.ctl(&["show", "secret", "host1"]);
    assert!(!output.status.success() && text(&output.stderr).contains("secrets are never shown"));
    let refusal = daemon.refusal(&["remove", "iscsi-target", TARGET]);
    assert!(refusal.contains("everybody would have access"), "{refusal}");
    daemon.said(&["remove", "iscsi-target", TARGET, "--force"]);
    daemon.said(&["remove", "secret", "host1"]);
    assert!(!Path::new(&path).exists());
    let (status, error) = ask(
        &daemon.socket(),
        "PUT",
        "/v1/secrets/..%2Fescape",
        "Content-Type: application/json\r\n",
        "{\"value\": \"a secret of the test\"}",
    );
    assert!(status == 422 && !error.to_string().contains("a secret of the test"), "{error}");
}

#[test]
fn one_session_is_disconnected_by_its_address() {
    let mut daemon = Controlled::serve(&["root=mem:1m"]);
    let mut client = RawClient::connect(&daemon.daemon.socket());
    assert_eq!(client.read(0, 512), [0; 512]);
    let sessions: Value = serde_json::from_str(&daemon.said(&["sessions", "--json"])).unwrap();
    let address = sessions[0]["address"].as_str().unwrap();
    let said = daemon.said(&["disconnect", address]);
    assert!(said.starts_with("disconnected nbd client unix socket of process"), "{said}");
    daemon.daemon.wait_for_line("config changed: disconnect unix socket");
    assert_eq!(daemon.said(&["sessions", "--json"]).trim(), "[]");
    assert!(daemon.refusal(&["disconnect", address]).contains("no session has the address"));
}

#[test]
fn commands_without_an_address_are_for_the_daemon_of_the_environment() {
    let daemon = Controlled::serve(&["root=mem:1m"]);
    let ctl = |address: &str, words: &[&str]| {
        let mut ctl = std::process::Command::new(BLOCKMUX);
        ctl.arg("ctl").args(words).env("BLOCKMUX_CONTROL", address).env_remove("XDG_RUNTIME_DIR");
        ctl.output().unwrap()
    };
    let socket = format!("unix:{}", daemon.socket().display());
    let limit = |words: &[&str]| text(&ctl(&socket, &[&["limit", "root"], words].concat()).stdout);
    assert_eq!(limit(&[]), "all clients  none\neach client  none\n");
    limit(&["iops=500"]);
    assert_eq!(limit(&[]), "all clients  iops=500\neach client  none\n");
    let shown: Value = serde_json::from_str(&limit(&["--json"])).unwrap();
    assert_eq!(shown, json!({"limits": {"iops": 500}, "client_limits": null}));
    let wrong = ctl("http://x", &["status"]);
    assert!(text(&wrong.stderr).contains("BLOCKMUX_CONTROL=http://x: write the daemon's address"));
}

#[test]
fn an_apply_removes_what_its_lists_lack_if_it_is_asked_to_and_diff_says_by_its_status() {
    let daemon = empty();
    let fragment = daemon.directory.path().join("part.toml");
    let fragment_path = fragment.to_str().unwrap().to_owned();
    let volumes = |names: &[&str]| {
        let text: String =
            names.iter().map(|name| format!("[[volume]]\nname = '{name}'\nspec = 'null:1m'\n")).collect();
        fs::write(&fragment, text).unwrap();
    };
    let names = || -> Vec<String> {
        let list = daemon.said(&["list", "volume"]);
        list.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
    };
    volumes(&["a", "b"]);
    daemon.said(&["apply", &fragment_path]);
    volumes(&["b", "c"]);
    daemon.said(&["apply", &fragment_path]);
    assert_eq!(names(), ["a", "b", "c"]);
    assert_eq!(daemon.ctl(&["diff", "--exit-code"]).status.code(), Some(1));
    daemon.said(&["apply", "--prune", &fragment_path]);
    assert_eq!(names(), ["b", "c"]);
    daemon.said(&["save"]);
    assert_eq!(daemon.ctl(&["diff", "--exit-code"]).status.code(), Some(0));
}

#[test]
fn a_config_is_read_and_applied_as_json_or_toml_with_its_tag() {
    let daemon = empty();
    let socket = daemon.socket();
    let apply = |query: &str, headers: &str, body: &Value| {
        ask(&socket, "POST", &format!("/v1/config/apply{query}"), headers, &body.to_string())
    };
    let config = || ask(&socket, "GET", "/v1/config", "", "").1;
    let tag = || {
        let (_, head) = ask_with_head(&socket, "/v1/config");
        head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned()
    };
    let (before, old) = (config(), tag());
    let part = json!({
        "volume": [{ "name": "a", "spec": "mem:1m" }, { "name": "b", "spec": "mem:2m", "description": "\"x\"" }],
        "iscsi_target": [{ "TargetName": TARGET, "luns": { "0": "a" } }],
    });
    let (status, planned) = apply("?dry_run=true", "", &part);
    assert_eq!((status, &planned["applied"]), (200, &json!(false)));
    assert_eq!((config(), tag()), (before.clone(), old.clone()), "a dry run changes nothing");
    let matches = format!("If-Match: {old}\r\n");
    let (status, done) = apply("", &matches, &part);
    assert_eq!((status, &done["changes"]), (200, &planned["changes"]), "{done}");
    let now = config();
    assert_eq!((&now["volume"], &now["iscsi_target"]), (&part["volume"], &part["iscsi_target"]));
    assert_ne!(tag(), old);
    let (status, refused) = apply("", &matches, &json!({ "volume": [{ "name": "c", "spec": "mem:1m" }] }));
    assert_eq!((status, &refused["error"]["code"]), (412, &json!("precondition_failed")));
    assert_eq!(config(), now);
    // What was read can be applied, and then nothing changes.
    let (status, same) = apply("?prune=true", &format!("If-Match: {}\r\n", tag()), &now);
    assert_eq!((status, &same["changes"]), (200, &json!([])), "{same}");
    let (status, done) = apply("?prune=true", "", &json!({ "volume": [{ "name": "a" , "spec": "mem:1m" }] }));
    assert_eq!((status, done["changes"].as_array().unwrap().len()), (200, 1), "{done}");
    // The same as TOML.
    let (status, text) = ask_as("", &socket, ("GET", "/v1/config"), "Accept: application/toml\r\n", "");
    assert_eq!((status, text.as_str()), (200, daemon.said(&["export"]).as_str()));
    assert!(text.contains(&format!("TargetName = \"{TARGET}\"")), "{text}");
    let (status, same) = ask_as(TOML, &socket, ("POST", "/v1/config/apply?path=/etc/b.toml"), "", &text);
    assert!(status == 200 && same.contains("\"changes\":[]"), "{same}");
    let shown: Value = serde_json::from_str(&daemon.said(&["export", "--json"])).unwrap();
    assert_eq!(shown, config());
    for (kind, query, body, expected) in [
        ("text/plain", "", "a", 415),
        ("application/json", "", "[]", 422),
        ("application/json", "", "{", 400),
        ("application/json", "", "{\"nothing\": 1}", 422),
        ("application/json", "", "{\"volume\": [{\"name\": \"a\", \"spec\": null}]}", 422),
        ("application/json", "?force=true", "{}", 400),
        ("application/json", "?prune=yes", "{}", 400),
        (TOML, "", "volume = 1", 422),
        (TOML, "", "[[volume]]\nspec = 'mem:1m'", 422),
    ] {
        let path = format!("/v1/config/apply{query}");
        let (status, said) = ask_as(kind, &socket, ("POST", &path), "", body);
        assert_eq!(status, expected, "{kind} {query} {body}: {said}");
    }
    let wrong = ask_as(TOML, &socket, ("POST", "/v1/config/apply?path=/etc/b.toml"), "", "\nvolume = 1").1;
    assert!(wrong.contains("/etc/b.toml:2: "), "{wrong}");
}

#[test]
fn a_fragment_of_json_is_applied_by_ctl_and_planned_without_a_change() {
    let daemon = empty();
    let fragment = daemon.directory.path().join("part.json");
    fs::write(&fragment, json!({ "volume": [{ "name": "a", "spec": "null:1m" }] }).to_string()).unwrap();
    let apply = |more: &[&str]| daemon.said(&[&["apply", fragment.to_str().unwrap()], more].concat());
    assert!(apply(&["--dry-run"]).contains("+ volume a: null:1m"));
    assert!(!daemon.said(&["export"]).contains("null:1m"));
    assert!(apply(&[]).contains("+ volume a: null:1m"));
    assert!(daemon.said(&["export"]).contains("null:1m"));
    // A change that waits for the next start is part of the config.
    daemon.said(&["set", "daemon", "settings", "cores=1"]);
    assert!(daemon.said(&["export"]).contains("cores = 1"));
    fs::write(&fragment, "{ \"volume\": ").unwrap();
    let said = text(&daemon.ctl(&["apply", fragment.to_str().unwrap()]).stderr);
    assert!(said.contains("part.json: EOF while parsing"), "{said}");
}

/// The response to a GET and its head.
fn ask_with_head(socket: &Path, path: &str) -> (String, String) {
    use std::io::Read;
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (body.to_owned(), head.to_owned())
}
