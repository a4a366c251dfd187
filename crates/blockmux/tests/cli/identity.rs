//! Identity of volumes: initiators can tell two disks apart, and recognize a disk after a restart.

use crate::daemon::Daemon;
use crate::program::{blockmux, succeed, text};
use crate::raw_iscsi::RawIscsi;
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const PORTS: [&str; 4] = ["--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"];

/// A UUID that no concurrent run of these tests uses; each test has its own number.
fn uuid(number: u16) -> String {
    format!("6f9a4c2e-1d3b-4f5a-{number:04x}-{:012x}", std::process::id())
}

fn serve(args: &[&str]) -> Daemon {
    Daemon::serve(&[args, &PORTS].concat())
}

fn info(url: &str) -> Value {
    let output = blockmux(["info", "--json", url]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The identifiers of the first volume, except names.
fn identifiers(daemon: &Daemon) -> Vec<(&'static str, String)> {
    let [iscsi, nvme] = ["iscsi", "nvme+tcp"].map(|scheme| info(&daemon.urls_of(scheme)[0]));
    let unit = RawIscsi::login(&daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a").inquiry_page(0x83);
    // The page has a length; designators of port and target follow those of the unit.
    let of_unit = unit.iter().map(|byte| format!("{byte:02x}")).skip(4).take(12 + 44).collect();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    vec![
        ("iSCSI serial number", text(&iscsi["serial"])),
        ("NAA designator", text(&iscsi["designator"])),
        ("page 83h", of_unit),
        ("NVMe serial number", text(&nvme["serial"])),
        ("NGUID and UUID", text(&nvme["identity"])),
    ]
}

/// The target and the subsystem of the first volume.
fn names(daemon: &Daemon) -> [String; 2] {
    let [iscsi, nvme] = ["iscsi", "nvme+tcp"].map(|scheme| info(&daemon.urls_of(scheme)[0]));
    [&iscsi["target"], &nvme["subsystem"]].map(|name| name.as_str().unwrap().to_owned())
}

fn assert_all_differ(one: &Daemon, other: &Daemon) {
    for (own, others) in identifiers(one).iter().zip(&identifiers(other)) {
        assert_ne!(own, others);
    }
}

#[test]
fn two_daemons_have_no_identifiers_in_common() {
    let [one, other] = [(); 2].map(|()| serve(&["mem:1m"]));
    assert_all_differ(&one, &other);
    for (own, others) in names(&one).iter().zip(&names(&other)) {
        assert!(own != others && own.contains(".blockmux:disk0."), "{own} {others}");
    }
    assert!(one.url().starts_with("nbd+unix:///disk0?"), "an NBD URL has no UUID in its name");
}

#[test]
fn configured_names_are_equal_in_two_daemons_but_their_disks_differ() {
    let [one, other] = [(); 2].map(|()| serve(&["vm1=mem:1m"]));
    assert_all_differ(&one, &other);
    let expected = ["iqn.2026-11.blockmux:vm1", "nqn.2026-11.blockmux:vm1"];
    assert_eq!((names(&one), names(&other)), (expected.map(str::to_owned), expected.map(str::to_owned)));
}

#[test]
fn after_a_restart_a_ram_volume_is_another_disk_and_a_file_is_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("file:{}?size=1m", directory.path().join("disk.img").display());
    for (spec, is_same) in [("mem:1m", false), (&file, true)] {
        let mut daemon = serve(&[spec]);
        let before = (identifiers(&daemon), names(&daemon));
        daemon.signal(Signal::KILL);
        daemon.wait();
        daemon.start_again(&[&[spec][..], &PORTS].concat());
        assert_eq!((identifiers(&daemon), names(&daemon)) == before, is_same, "{spec}");
    }
}

#[test]
fn a_copy_of_a_file_is_another_disk_and_a_moved_file_is_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let first = serve(&[&format!("a=file:{}?size=1m", path("a"))]);
    let before = identifiers(&first);
    succeed(Command::new("cp").args(["-a", &path("a"), &path("copy")]));
    let copy = serve(&[&format!("a=file:{}", path("copy"))]);
    assert_all_differ(&first, &copy);
    drop((first, copy));
    std::fs::rename(path("a"), path("moved")).unwrap();
    let moved = serve(&[&format!("delay:0s:file:{}", path("moved"))]);
    // The serial number of a subsystem also depends on its name.
    let is_the_volume_s = |(what, _): &&(&str, String)| *what != "NVMe serial number";
    let [before, after] = [before, identifiers(&moved)];
    assert!(before.iter().filter(is_the_volume_s).eq(after.iter().filter(is_the_volume_s)));
}

/// A config file with one volume; `more` are further lines of its table.
fn config(directory: &Path, spec: &str, more: &str) -> String {
    let path = directory.join("blockmux.toml");
    std::fs::write(&path, format!("[[volume]]\nname = 'a'\nspec = '{spec}'\n{more}")).unwrap();
    path.display().to_string()
}

#[test]
fn the_configured_uuid_is_used_by_every_protocol() {
    let directory = tempfile::tempdir().unwrap();
    let uuid = uuid(1);
    let given = config(directory.path(), "mem:1m", &format!("uuid = '{uuid}'"));
    let args = ["--config", &given];
    let mut daemon = serve(&args);
    let nvme = info(&daemon.urls_of("nvme+tcp")[0]);
    assert_eq!(nvme["identity"], format!("uuid.{uuid}"));
    let before = identifiers(&daemon);
    let refused = blockmux([&["serve", "--nbd", "127.0.0.1:0"][..], &args].concat());
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2));
    assert!(said.contains(&format!("already exports a volume with the UUID {uuid}")), "{said}");
    daemon.signal(Signal::KILL);
    daemon.wait();
    let shared = config(directory.path(), "mem:1m", &format!("uuid = '{uuid}'\nshared = true"));
    let [one, other] = [(); 2].map(|()| serve(&["--config", &shared]));
    assert_eq!((identifiers(&one), identifiers(&other)), (before.clone(), before));
    let ids = [one, other].map(|daemon| info(&daemon.urls_of("nvme+tcp")[0])["cntlid"].clone());
    assert_ne!(ids[0], ids[1], "hosts would treat two controllers with one number as one");
}

#[test]
fn data_that_another_daemon_exports_is_exported_again_only_on_request() {
    let origin = Daemon::serve(&["mem:1m"]);
    let url = origin.url();
    let gateway = serve(&[&url]);
    // Another URL may refer to the same volume.
    for spec in [url.clone(), format!("stripe:[{url}&reconnect=5s]")] {
        let refused = blockmux(["serve", &spec, "--nbd", "127.0.0.1:0"]);
        let said = text(&refused.stderr);
        let expected = format!("process {} already uses the same data", gateway.pid());
        assert!(said.contains(&expected) && said.contains("shared = true"), "{said}");
        assert_eq!(refused.status.code(), Some(2));
    }
    let reader = serve(&[&url, "--read-only"]);
    let shared = serve(&["--config", &config(origin.directory.path(), &url, "shared = true")]);
    drop((gateway, reader, shared));
    serve(&[&url]);
}

#[test]
fn a_remote_volume_has_its_own_identity_which_survives_a_restart() {
    let origin = serve(&["mem:1m"]);
    let mut seen = identifiers(&origin);
    for url in [origin.url(), origin.urls_of("iscsi").remove(0), origin.urls_of("nvme+tcp").remove(0)] {
        let [first, second] = [(); 2].map(|()| identifiers(&serve(&[&url])));
        assert_eq!(first, second);
        assert!(first.iter().all(|identifier| !seen.contains(identifier)), "{url}");
        seen.extend(first);
    }
}

#[test]
fn a_volume_in_two_subsystems_has_two_namespaces() {
    let directory = tempfile::tempdir().unwrap();
    let subsystem = |nqn: &str, namespaces: &str| {
        format!("[[nvme_subsystem]]\nnqn = '{nqn}'\nnamespaces = {{ {namespaces} }}\n")
    };
    let more = format!(
        "uuid = '{}'\n[[volume]]\nname = 'b'\nspec = 'mem:1m'\n{}{}",
        uuid(2),
        subsystem("nqn.2026-11.test:one", "1 = 'a', 2 = 'b'"),
        subsystem("nqn.2026-11.test:two", "1 = 'a'")
    );
    let daemon = serve(&["--config", &config(directory.path(), "mem:1m", &more)]);
    let mut all: Vec<_> =
        daemon.urls_of("nvme+tcp").iter().map(|url| info(url)["identity"].to_string()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 3);
}
