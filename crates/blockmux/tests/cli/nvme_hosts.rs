//! Adding and removing hosts of a running subsystem, with their secrets and keys.

use crate::daemon::Daemon;
use crate::program::{blockmux, text, without_notes};
use crate::raw_nvme::RawNvme;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const HOST: &str = "nqn.2026-11.test:host.of.ours";
const OTHER: &str = "nqn.2026-11.test:host.of.others";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
/// As nvme-cli makes them.
const SECRET: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const CTRL_SECRET: &str = "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:";

fn key_file(directory: &Path, name: &str, key: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, key).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// What a command of `ctl` says, and whether it did it.
fn ctl(socket: &str, args: &[&str]) -> (bool, String) {
    let output = blockmux([&["ctl", socket], args].concat());
    (output.status.success(), text(&output.stdout) + &without_notes(&output.stderr))
}

#[test]
fn a_host_and_its_keys_are_added_and_removed_at_run_time() {
    let files = tempfile::tempdir().unwrap();
    let config = files.path().join("blockmux.toml");
    fs::write(
        &config,
        format!(
            "nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = 'disk'\nspec = 'mem:16m'\n\
             [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'disk' }}\nhosts = []\n"
        ),
    )
    .unwrap();
    let socket = format!("unix:{}", files.path().join("control").display());
    let daemon = Daemon::serve_only(&["--config", config.to_str().unwrap(), "--control", &socket]);
    let url = daemon.nvme_place();
    let own = key_file(files.path(), "own", SECRET);
    let plain = format!("{url}?hostnqn={OTHER}");
    let proving = format!("{url}?hostnqn={HOST}&dhchap_secret_file={}", own.display());
    let info = |url: &str| {
        let output = blockmux(["info", url]);
        if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
    };
    assert!(info(&plain).is_err(), "nobody may connect yet");

    // A host without keys; removing it ends its controller.
    assert_eq!(ctl(&socket, &["add-host", SUBSYSTEM, OTHER]), (true, String::new()));
    info(&plain).unwrap();
    let [mut admin, mut queue] = RawNvme::controller(&url, OTHER);
    assert_eq!(queue.write(0, &[1; 4096], false), 0);
    assert_eq!(ctl(&socket, &["remove-host", SUBSYSTEM, OTHER]), (true, String::new()));
    assert_eq!((admin.status(), queue.status()), (None, None), "both connections end");
    assert!(info(&plain).is_err());
    let (is_done, said) = ctl(&socket, &["remove-host", SUBSYSTEM, OTHER]);
    assert!(!is_done && said.contains("no host has the name"), "{said}");

    // A host that must authenticate, with a secret file that changes.
    let secret = key_file(files.path(), "host", SECRET).display().to_string();
    let add = ["add-host", SUBSYSTEM, HOST, "--dhchap-secret-file", &secret];
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).unwrap();
    let (is_done, said) = ctl(&socket, &add);
    assert!(!is_done && said.contains("others can read or write it; run chmod 600"), "{said}");
    assert!(info(&proving).is_err());
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(ctl(&socket, &add), (true, String::new()));
    info(&proving).unwrap();
    assert!(info(&format!("{url}?hostnqn={HOST}")).is_err(), "without a secret");
    key_file(files.path(), "host", CTRL_SECRET);
    info(&proving).unwrap();
    assert_eq!(
        ctl(&socket, &["read-keys", SUBSYSTEM]),
        (true, "reloaded the key files of 1 host\n".to_owned())
    );
    assert!(info(&proving).is_err(), "by the secret from before");
    key_file(files.path(), "own", CTRL_SECRET);
    info(&proving).unwrap();
    key_file(files.path(), "host", "no secret at all");
    let (is_done, said) = ctl(&socket, &["read-keys", SUBSYSTEM, HOST]);
    assert!(!is_done && said.contains("is not DHHC-1"), "{said}");
    info(&proving).unwrap();

    // The first host with a TLS key.
    let key = key_file(files.path(), "key", KEY).display().to_string();
    assert_eq!(ctl(&socket, &["add-host", SUBSYSTEM, OTHER, "--tls-key-file", &key]), (true, String::new()));
    info(&format!("{plain}&tls_key_file={key}")).unwrap();
    assert!(info(&plain).is_err(), "in the clear");
    assert_eq!(ctl(&socket, &["remove-host", SUBSYSTEM, OTHER]), (true, String::new()));
    assert!(info(&format!("{plain}&tls_key_file={key}")).is_err());
}

#[test]
fn a_flood_of_unauthenticated_hosts_does_not_exclude_authenticated_ones() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let files = tempfile::tempdir().unwrap();
    let secret = key_file(files.path(), "host", SECRET).display().to_string();
    let config = files.path().join("blockmux.toml");
    fs::write(
        &config,
        format!(
            "nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = 'disk'\nspec = 'mem:16m'\n\
             [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'disk' }}\nhosts = ['{OTHER}']\n\
             [[nvme_subsystem.host]]\nhostnqn = '{HOST}'\ndhchap_secret_file = '{secret}'\n"
        ),
    )
    .unwrap();
    let daemon = Daemon::serve_only(&["--config", config.to_str().unwrap()]);
    let url = daemon.nvme_place();
    let proving = format!("{url}?hostnqn={HOST}&dhchap_secret_file={secret}");
    let [_admin, mut early] = RawNvme::controller(&url, OTHER);
    let before = daemon.resident();
    // More than the limits of controllers of a host and of unauthenticated connections.
    let mut flood = Vec::new();
    for wave in [700, 700] {
        flood.extend((0..wave).map(|_| RawNvme::admin(&url, HOST).unwrap()));
        let output = blockmux(["info", &proving]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(early.write(0, &[1; 4096], false), 0);
        let [_admin, mut late] = RawNvme::controller(&url, OTHER);
        assert_eq!(late.write(4096, &[1; 4096], false), 0);
    }
    assert_eq!(flood.first_mut().unwrap().status(), None, "the oldest had to make way");
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes for {} connections", flood.len());
}
