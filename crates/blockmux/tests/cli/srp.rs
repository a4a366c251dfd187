//! SRP over iWARP: target and initiator with each other, through every command.

use crate::copy_source::CopySource;
use crate::daemon::Daemon;
use crate::program::{blockmux, succeeds, text};
use serde_json::{Value, json};
use std::fs;

fn fails(words: &[&str]) -> String {
    let output = blockmux(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {}", text(&output.stderr));
    text(&output.stderr)
}

fn told(words: &[&str]) -> Value {
    serde_json::from_str(&succeeds(words)).unwrap()
}

/// A target port with two logical units, a second port that admits only one GUID, and a third port
/// that shows this GUID one of two units.
const CONFIG: &str = "
srp = ['127.0.0.1:0']
[[volume]]
name = 'a'
spec = 'mem:8m'
[[volume]]
name = 'b'
spec = 'mem:4m'
[[volume]]
name = 'c'
spec = 'mem:2m'
[[volume]]
name = 'd'
spec = 'mem:8m'
[[volume]]
name = 'e'
spec = 'mem:4m'
[[srp_target]]
port_id = '0x0123456789abcdef0123456789abcdef'
luns = { 0 = 'a', 300 = 'b' }
[[srp_target]]
port_id = '0x0123456789abcdef0123456789abcdee'
luns = { 1 = 'c' }
acl = [{ initiator_port = '0x00000000000000aa' }]
[[srp_target]]
port_id = '0x0123456789abcdef0123456789abcded'
luns = { 0 = 'd', 300 = 'e' }
acl = [{ initiator_port = '0x00000000000000aa', luns = [300] }, { initiator_port = '0x00000000000000bb' }]
";

fn serve_config() -> (tempfile::TempDir, Daemon) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blockmux.toml");
    fs::write(&path, CONFIG).unwrap();
    let daemon = Daemon::serve_only(&["--config", path.to_str().unwrap()]);
    (directory, daemon)
}

#[test]
fn a_target_port_is_described_and_its_units_are_listed() {
    let (_directory, daemon) = serve_config();
    let urls = daemon.urls_of("srp");
    let url = urls.iter().find(|url| url.contains("cdef/0")).unwrap();
    let info = told(&["info", "--json", url]);
    assert_eq!((&info["size"], &info["protocol"]), (&json!(8 << 20), &json!("srp")));
    let portal = &url[..url.find("/0x").unwrap()];
    let found = told(&["discover", "--json", url]);
    let units: Vec<_> = found["exports"].as_array().unwrap().iter().map(|export| &export["size"]).collect();
    assert_eq!(units, [&json!(8 << 20), &json!(4 << 20)], "{found}");
    let second = found["exports"][1]["url"].as_str().unwrap();
    assert!(second.ends_with("/300?rdma=iwarp"), "{second}");
    assert_eq!(told(&["info", "--json", second])["size"], json!(4 << 20));
    assert!(fails(&["discover", portal]).contains("SRP over RDMA/CM has no discovery"));
    let missing = fails(&["info", &url.replace("cdef/0", "cdef/5")]);
    assert!(missing.contains("blockmux discover"), "{missing}");
    let stranger = fails(&["info", &url.replace("cdef/0", "0000/0")]);
    assert!(stranger.contains("no such target port"), "{stranger}");
}

#[test]
fn a_port_of_another_protocol_is_reported_as_one_without_an_srp_target() {
    let daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    for scheme in ["iscsi", "nvme+tcp"] {
        let urls = daemon.urls_of(scheme);
        let host = urls[0].split('/').nth(2).unwrap();
        let refused = fails(&["info", &format!("srp://{host}/{}/0", "01".repeat(16))]);
        assert!(refused.contains("check that an SRP target listens there"), "{scheme}: {refused}");
    }
}

#[test]
fn the_rule_of_srp_daemon_is_a_note_and_no_command() {
    let daemon = Daemon::serve(&["mem:1m", "--srp", "127.0.0.1:0", "--srp", "127.0.0.2:0"]);
    let commands = daemon.json["exports"][0]["commands"].as_array().unwrap();
    let of_srp: Vec<&str> =
        commands.iter().filter_map(Value::as_str).filter(|it| it.contains("id_ext=")).collect();
    assert!(of_srp.len() == 2 && of_srp.iter().all(|it| it.starts_with("echo id_ext=")), "{commands:?}");
}

#[test]
fn a_target_port_admits_only_the_listed_guid() {
    let (_directory, daemon) = serve_config();
    let urls = daemon.urls_of("srp");
    let url = urls.iter().find(|url| url.contains("cdee/1")).unwrap();
    let refused = fails(&["info", url]);
    assert!(refused.contains("does not admit this initiator port"), "{refused}");
    succeeds(&["info", &format!("{url}&initiator=00000000000000aa")]);
}

#[test]
fn an_initiator_port_sees_only_the_luns_of_its_acl() {
    let (_directory, daemon) = serve_config();
    let urls = daemon.urls_of("srp");
    let url = urls.iter().find(|url| url.contains("cded/")).unwrap();
    let place = &url[..url.find("cded/").unwrap() + "cded/".len()];
    let with = |lun: u16, guid: &str| format!("{place}{lun}?rdma=iwarp&initiator={guid}");
    let sizes = |guid: &str| -> Vec<u64> {
        let found = told(&["discover", "--json", &with(0, guid)]);
        found["exports"].as_array().unwrap().iter().map(|export| export["size"].as_u64().unwrap()).collect()
    };
    let (masked, other) = ("00000000000000aa", "00000000000000bb");
    assert_eq!(sizes(other), [8 << 20, 4 << 20]);
    assert_eq!(sizes(masked), [4 << 20]);
    assert_eq!(told(&["info", "--json", &with(300, masked)])["size"], json!(4 << 20));
    let hidden = fails(&["info", &with(0, masked)]);
    assert!(hidden.contains("no logical unit 0"), "{hidden}");
    succeeds(&["info", &with(0, other)]);
}

#[test]
fn data_copied_over_several_channels_and_back_is_unchanged_with_and_without_crcs() {
    let source = CopySource::new(16, 1);
    let daemon = Daemon::serve(&["mem:16m", "--srp", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"]);
    let (srp, iscsi) = (&daemon.urls_of("srp")[0], &daemon.urls_of("iscsi")[0]);
    let several = format!("{srp}&crc=on&connections=4");
    let plain = format!("{srp}&immediate_data=off");
    for (there, back) in [(srp, iscsi), (&several, &plain), (&plain, &several), (iscsi, srp)] {
        source.survives_there_and_back(there, back, &["--verify"]);
    }
}

#[test]
fn a_unit_can_be_reset_and_a_target_cannot() {
    let daemon = Daemon::serve(&["mem:8m", "--srp", "127.0.0.1:0"]);
    let url = &daemon.urls_of("srp")[0];
    assert_eq!(succeeds(&["reset", url]), "the logical unit is reset\n");
    succeeds(&["reset", url, "clear-task-set"]);
    succeeds(&["reset", url, "abort-task-set"]);
    assert!(fails(&["reset", url, "target"]).contains("SRP can only reset a logical unit"));
}

#[test]
fn a_unit_is_measured_by_its_url() {
    let daemon = Daemon::serve(&["mem:8m", "--srp", "127.0.0.1:0"]);
    let report = daemon.directory.path().join("report");
    let job = ["--rw", "randread", "--runs", "1", "--runtime", "0.02", "--no_ceiling"];
    let place = ["bench", &daemon.urls_of("srp")[0], "--report", report.to_str().unwrap()];
    assert!(succeeds(&[&place[..], &job].concat()).contains("srp://"));
}

#[test]
fn a_remote_volume_over_srp_is_exported_again() {
    let first = Daemon::serve(&["a=mem:8m", "--srp", "127.0.0.1:0"]);
    let second = Daemon::serve(&[&format!("b={}", first.urls_of("srp")[0]), "--srp", "127.0.0.1:0"]);
    let info = told(&["info", "--json", &second.urls_of("srp")[0]]);
    assert_eq!((&info["size"], &info["protocol"]), (&json!(8 << 20), &json!("srp")));
}
