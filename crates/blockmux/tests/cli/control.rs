//! Changes of a running daemon: `serve --control` and `blockmux ctl`. Their API is tested in
//! `api.rs`.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, has, succeed, text};
use crate::raw_client::{READ, RawClient};
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RawIscsi};
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A daemon, and the directory of its control socket.
pub(crate) struct Controlled {
    pub(crate) daemon: Daemon,
    pub(crate) directory: TempDir,
}

impl Controlled {
    pub(crate) fn serve(args: &[&str]) -> Controlled {
        let directory = tempfile::tempdir().unwrap();
        let socket = format!("unix:{}", directory.path().join("control").display());
        let daemon = Daemon::serve(&[&["--control", &socket], args].concat());
        Controlled { daemon, directory }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("control")
    }

    pub(crate) fn ctl(&self, args: &[&str]) -> Output {
        let socket = format!("unix:{}", self.socket().display());
        blockmux([&["ctl", &socket], args].concat())
    }

    /// Output of a command that succeeds.
    pub(crate) fn said(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Message of a command that fails.
    pub(crate) fn refusal(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output.stdout));
        text(&output.stderr)
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.said(&["status", "--json"])).unwrap()
    }

    fn login(&self) -> RawIscsi {
        RawIscsi::login(&self.daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a")
    }
}

/// The size in bytes by a READ CAPACITY (16).
fn capacity(scsi: &mut RawIscsi) -> u64 {
    let (status, data) = scsi.run(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], &[], 32);
    assert_eq!(status, GOOD);
    (u64::from_be_bytes(data[..8].try_into().unwrap()) + 1) * 512
}

/// Whether a READ (10) of the block succeeds.
fn can_read(scsi: &mut RawIscsi, block: u32) -> bool {
    let mut cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    cdb[2..6].copy_from_slice(&block.to_be_bytes());
    scsi.run(&cdb, &[], 512).0 == GOOD
}

/// Waits up to some seconds until `is_so` is true.
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    within(Duration::from_secs(30), what, is_so);
}

/// Waits until `is_so` is true; fails after the limit.
pub(crate) fn within(limit: Duration, what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + limit;
    while !is_so() {
        assert!(Instant::now() < end, "not within time: {what}");
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

#[test]
fn a_resize_of_a_ram_volume_is_reported_to_iscsi_initiators_and_new_clients() {
    let controlled = Controlled::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let mut scsi = controlled.login();
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(nbd.write(0, 0, &[5; 512]), 0);
    assert_eq!(nbd.write(0, 6 << 20, &[6; 512]), 0);
    assert_eq!(controlled.said(&["resize", "a", "16m"]), "a  16777216 (16 MiB)\n");
    // The unit attention is reported once, and the data stay.
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, GOOD);
    assert_eq!(capacity(&mut scsi), 16 << 20);
    assert!(can_read(&mut scsi, (16 << 11) - 1) && !can_read(&mut scsi, 16 << 11));
    assert_eq!(nbd.read(0, 512), [5; 512]);
    // Shrinking loses the data beyond the end.
    controlled.said(&["resize", "a", "4m", "--shrink"]);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!(capacity(&mut scsi), 4 << 20);
    assert!(!can_read(&mut scsi, 4 << 11));
    assert_ne!(nbd.write(0, 6 << 20, &[7; 512]), 0, "the block is beyond the new end");
    controlled.said(&["resize", "a", "8m"]);
    assert_eq!(nbd.read(6 << 20, 512), [0; 512]);
    assert_eq!(nbd.read(0, 512), [5; 512]);
    // An unchanged size is not reported.
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    controlled.said(&["resize", "a", "8m"]);
    controlled.said(&["resize", "a"]);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, GOOD);
}

#[test]
fn a_volume_whose_storage_has_no_snapshots_says_so() {
    let controlled = Controlled::serve(&["a=mem:1m", "b=rate:iops=1000:mem:1m"]);
    for volume in ["a", "b"] {
        let commands = [&["list", volume][..], &["create", volume, "s"], &["delete", volume, "s"]];
        for words in commands.into_iter().chain([&["protect", volume, "s"][..]]) {
            let said = controlled.refusal(&[&["snapshot"], words].concat());
            let expected =
                format!("{volume}: its kind has no snapshots; images of Ceph (rbd:POOL/IMAGE) have");
            assert!(said.contains(&expected), "{said}");
        }
    }
    let said = controlled.refusal(&["snapshot", "create", "c", "s"]);
    assert!(said.contains("no volume has the name `c`; choose one of a, b"), "{said}");
}

#[test]
fn standard_clients_see_the_new_size() {
    if !has("nbdinfo") || !has("iscsi-readcapacity16") {
        return;
    }
    let controlled = Controlled::serve(&["mem:8m", "--iscsi", "127.0.0.1:0"]);
    let url = controlled.daemon.urls_of("iscsi").remove(0);
    for mib in [24_u64, 3] {
        controlled.said(&["resize", "disk0", &format!("{mib}m"), "--shrink"]);
        let size = succeed(Command::new("nbdinfo").args(["--size", &controlled.daemon.url()]));
        assert_eq!(size.trim(), (mib << 20).to_string());
        let capacity = succeed(Command::new("iscsi-readcapacity16").arg(&url));
        assert!(capacity.contains(&format!("Total size:{}", mib << 20)), "{capacity}");
    }
}

#[test]
fn a_file_is_shortened_extended_and_its_size_refreshed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let len = || fs::metadata(&path).unwrap().len();
    let file = format!("a=file:{}?size=1m", path.display());
    let controlled = Controlled::serve(&[&file, "--iscsi", "127.0.0.1:0"]);
    let mut scsi = controlled.login();
    controlled.said(&["resize", "a", "2m"]);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!((len(), capacity(&mut scsi)), (2 << 20, 2 << 20));
    assert!(can_read(&mut scsi, (2 << 11) - 1));
    controlled.said(&["resize", "a", "512k", "--shrink"]);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!((len(), capacity(&mut scsi)), (512 << 10, 512 << 10));
    assert!(!can_read(&mut scsi, 1 << 10));
    // A size that changed outside is read again on request.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3 << 20).unwrap();
    assert_eq!(capacity(&mut scsi), 512 << 10);
    assert_eq!(controlled.said(&["resize", "a"]), "a  3145728 (3 MiB)\n");
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert!(can_read(&mut scsi, (3 << 11) - 1));
}

#[test]
fn an_impossible_resize_is_refused_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("frozen.img");
    fs::write(&path, [7; 4096]).unwrap();
    let frozen = format!("frozen=file:{}?readonly=on", path.display());
    let args = ["a=mem:1m", "null=null:1m", "striped=stripe:mem:1m,mem:1m", &frozen];
    let controlled = Controlled::serve(&args);
    for (name, size, expected) in [
        ("b", "1m", "no volume has the name `b`; choose one of a, null, striped, frozen"),
        ("a", "1000", "a: 1000 bytes is not a positive multiple of the block size, 512; round it"),
        ("a", "0", "a: 0 bytes is not a positive multiple of the block size, 512; round it"),
        ("a", "1e", "a: it can have at most"),
        ("a", "15e", "a: clients support at most 2^63 - 1 bytes; choose a smaller size"),
        (
            "null",
            "2m",
            "null: cannot be resized: its size is that of the volumes below it, or fixed in its spec",
        ),
        ("striped", "4m", "striped: cannot be resized: "),
        ("frozen", "8k", "frozen: is opened read-only"),
        (
            "a",
            "512k",
            "a: has 1048576 bytes, of which the last 524288 would be lost with a size of 524288; to discard",
        ),
    ] {
        let said = controlled.refusal(&["resize", name, size]);
        assert!(said.starts_with(&format!("blockmux: {expected}")), "{said}");
    }
    let sizes = controlled.status();
    let sizes: Vec<_> = sizes["volumes"].as_array().unwrap().iter().map(|volume| &volume["size"]).collect();
    assert_eq!(sizes, [1 << 20, 1 << 20, 2 << 20, 4096]);
    assert_eq!(fs::read(&path).unwrap(), [7; 4096]);
}

#[test]
fn the_status_counts_connections_and_io() {
    let controlled = Controlled::serve(&["a=mem:8m", "b=null:1g", "--read-only", "--iscsi", "127.0.0.1:0"]);
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    let mut scsi = controlled.login();
    assert_eq!(nbd.read(0, 4096), [0; 4096]);
    assert!(can_read(&mut scsi, 0));
    assert_eq!(scsi.run(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0).0, GOOD);
    let status = controlled.status();
    assert_eq!((&status["connections"], &status["max_connections"]), (&2.into(), &4096.into()));
    let protocols =
        serde_json::json!([{"name": "nbd", "connections": 1}, {"name": "iscsi", "connections": 1}]);
    assert_eq!(status["protocols"], protocols);
    let expected = serde_json::json!({
        "name": "a", "size": 8 << 20, "read_only": true, "protocols": ["nbd", "iscsi", "iser"],
        "targets": ["iqn.2026-11.blockmux:a"], "users": 2, "orphaned_connections": 0, "reads": 2, "read_bytes": 4096 + 512,
        "writes": 0, "written_bytes": 0, "others": 1, "failed": 0,
    });
    assert_eq!(status["volumes"][0], expected);
    assert_eq!(status["volumes"][1]["users"], 0);
    // Counters include connections that have ended.
    drop((nbd, scsi));
    eventually("their connections are orphaned", || controlled.status()["connections"] == 0);
    assert_eq!(
        (&controlled.status()["volumes"][0]["users"], &controlled.status()["volumes"][0]["reads"]),
        (&0.into(), &2.into())
    );
    let shown = controlled.said(&["status"]);
    let words: Vec<_> =
        shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let head = ["connections 0 of 4096", "VOLUME SIZE RW CONNS READS WRITES FAILED PROTOCOLS"];
    assert_eq!(words[..2], head);
    assert_eq!(words[2], "a 8 MiB ro 0 2 0 0 nbd,iscsi");
    let shown = controlled.said(&["status", "a"]);
    let head = "a  8388608 (8 MiB)  read-only\n  protocols    nbd, iscsi, iser\n  target       iqn.2026-11.blockmux:a\n";
    assert!(shown.starts_with(head), "{shown}");
    assert!(shown.contains("\n  reads        2 (4.50 KiB)\n"), "{shown}");
    assert!(!shown.contains("lost  "), "{shown}");
    let none = controlled.ctl(&["status", "x"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none.stderr).contains("no volume has `x` in its name; "), "{}", text(&none.stderr));
}

#[test]
fn the_status_is_watched_until_nobody_reads_it() {
    let controlled = Controlled::serve(&["a=mem:8m", "b=mem:8m?populate=off"]);
    let socket = format!("unix:{}", controlled.socket().display());
    for json in [false, true] {
        let mut command = Command::new(BLOCKMUX);
        command.args(["ctl", &socket, "status", "b", "--watch"]).args(json.then_some("--json"));
        let mut watching = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
        let mut next = || lines.next().unwrap().unwrap();
        if json {
            let first: Value = serde_json::from_str(&next()).unwrap();
            assert_eq!(first["volumes"].as_array().unwrap().len(), 1, "{first}");
            next();
        } else {
            assert!(next().starts_with("connections  "));
            assert!(next().contains("  r/s     w/s  "), "rates in place of counters");
            assert!(next().starts_with("b  "));
            assert!(next().starts_with("connections  "), "the next table");
        }
        drop(lines);
        assert!(watching.wait().unwrap().success(), "it ends when its reader has gone");
    }
}

#[test]
fn the_status_shows_how_much_ram_is_populated() {
    let controlled = Controlled::serve(&["a=mem:64m", "b=mem:64m?populate=off"]);
    let whole = serde_json::json!({"bytes": 64 << 20, "of": 64 << 20});
    eventually("it is populated", || controlled.status()["volumes"][0]["populated"] == whole);
    assert_eq!(controlled.status()["volumes"][1].get("populated"), None);
    assert!(controlled.said(&["status", "a"]).contains("  populated    64 MiB of 64 MiB"));
    controlled.said(&["add", "c=mem:8m"]);
    let whole = serde_json::json!({"bytes": 8 << 20, "of": 8 << 20});
    eventually("it is populated, too", || controlled.status()["volumes"][2]["populated"] == whole);
}

#[test]
fn the_status_counts_lost_connections_with_io_in_flight() {
    let controlled = Controlled::serve(&["fault:op=read,error=stuck:mem:8m", "b=mem:8m"]);
    let mut stays = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(stays.write(0, 0, &[1; 512]), 0);
    for _ in 0..2 {
        RawClient::connect(&controlled.daemon.socket()).request(READ, 0, 0, 512);
    }
    eventually("their connections are orphaned", || controlled.status()["orphaned_connections"] == 2);
    let status = controlled.status();
    let counts = |of: &Value| ["users", "orphaned_connections"].map(|key| of[key].as_u64().unwrap());
    assert_eq!(status["connections"], 1);
    assert_eq!((counts(&status["volumes"][0]), counts(&status["volumes"][1])), ([1, 2], [0, 0]));
    let shown = controlled.said(&["status"]);
    let head = "connections  1 of 4096: nbd 1\nlost         2, with I/O that has not ended\nVOLUME ";
    assert!(shown.starts_with(head), "{shown}");
    assert!(shown.contains("\n  2 lost connections with I/O\nb "), "{shown}");
    let shown = controlled.said(&["status", "disk0"]);
    let volume = "\n  connections  1\n  lost         2, with I/O that has not ended\n  reads        2 ";
    assert!(shown.contains(volume), "{shown}");
}

#[test]
fn a_changed_size_of_a_remote_volume_is_noticed() {
    let there = Controlled::serve(&["mem:8m", "--iscsi", "127.0.0.1:0"]);
    let here = Controlled::serve(&[&there.daemon.urls_of("iscsi")[0], "--iscsi", "127.0.0.1:0"]);
    let mut scsi = here.login();
    assert!(can_read(&mut scsi, 0));
    let said = here.refusal(&["resize", "disk0", "16m"]);
    assert!(
        said.contains(
            "disk0: cannot be resized: its size is that of the volumes below it, or fixed in its spec"
        ),
        "{said}"
    );
    there.said(&["resize", "disk0", "16m"]);
    // The next command gets a unit attention and is sent again.
    assert!(can_read(&mut scsi, 1));
    eventually("it has grown", || here.status()["volumes"][0]["size"] == 16 << 20);
    eventually("the initiator is told", || {
        let mut again = RawIscsi::login(&here.daemon.urls_of("iscsi")[0], "iqn.2026-11.i:b");
        capacity(&mut again) == 16 << 20
    });
}

#[test]
fn a_changed_size_of_a_block_device_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    fs::File::create(&file).unwrap().set_len(8 << 20).unwrap();
    let Some(device) = LoopDevice::over(&file, &[]) else { return };
    let controlled = Controlled::serve(&[&format!("block:{}", device.0), "--iscsi", "127.0.0.1:0"]);
    let mut scsi = controlled.login();
    assert_eq!(capacity(&mut scsi), 8 << 20);
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(16 << 20).unwrap();
    succeed(Command::new("losetup").args(["--set-capacity", &device.0]));
    eventually("it has grown", || controlled.status()["volumes"][0]["size"] == 16 << 20);
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!(capacity(&mut scsi), 16 << 20);
    assert!(can_read(&mut scsi, (16 << 11) - 1));
}

/// Detached when dropped.
pub(crate) struct LoopDevice(pub(crate) String);

impl LoopDevice {
    /// `None`, with a printed reason, if it cannot be created.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    pub(crate) fn over(file: &Path, options: &[&str]) -> Option<LoopDevice> {
        let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(file).output().ok();
        let made = output.filter(|output| output.status.success());
        if made.is_none() {
            println!("skipped: only root may make a loop device");
        }
        made.map(|output| LoopDevice(text(&output.stdout).trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn the_socket_is_private_and_is_removed_with_the_daemon() {
    let mut controlled = Controlled::serve(&["mem:1m"]);
    let mode = fs::metadata(controlled.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A silent client delays neither others for long nor the end of the daemon.
    let _silent = UnixStream::connect(controlled.socket()).unwrap();
    controlled.status();
    controlled.daemon.signal(Signal::TERM);
    assert!(controlled.daemon.wait().success());
    assert!(!controlled.socket().exists());
    let output = controlled.ctl(&["status"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("control: cannot reach the daemon: "), "{}", text(&output.stderr));
}

#[test]
fn a_socket_in_a_directory_that_others_can_write_to_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for mode in [0o770, 0o707, 0o1777] {
        fs::set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
        let path = format!("unix:{}/control", directory.path().display());
        let output = blockmux(["serve", "mem:1m", "--nbd", ":0", "--control", &path]);
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains("other users can write to its directory; use a private one"), "{said}");
    }
}

#[test]
fn a_config_file_can_set_the_control_socket() {
    let directory = tempfile::tempdir().unwrap();
    let (config, socket) = (directory.path().join("b.toml"), directory.path().join("control"));
    fs::write(&config, format!("control = 'unix:{}'\n", socket.display())).unwrap();
    let mut daemon = Daemon::serve(&["mem:1m", "--config", config.to_str().unwrap()]);
    succeed(Command::new(BLOCKMUX).arg("ctl").arg(&socket).args(["status", "--json"]));
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
}

#[test]
fn all_portals_of_an_iscsi_target_are_paths_on_request() {
    let listeners = ["--iscsi", "127.0.0.1:0", "--iscsi", "127.0.0.2:0", "--iscsi", "127.0.0.3:0"];
    let there = Controlled::serve(&[&["mem:16m"][..], &listeners].concat());
    let url = there.daemon.urls_of("iscsi").remove(0);
    for (parameter, paths) in [("", 1), ("?paths=all", 3)] {
        let here = Daemon::serve(&[&format!("{url}{parameter}")]);
        let mut nbd = RawClient::connect(&here.socket());
        assert_eq!(nbd.read(0, 4096), [0; 4096]);
        eventually("each path has a session", || there.status()["protocols"][1]["connections"] == paths);
        drop(here);
        eventually("their connections are orphaned", || there.status()["connections"] == 0);
    }
}

/// JSON output of `blockmux info` for a URL, or its error.
fn info(url: &str) -> Result<Value, String> {
    let output = blockmux(["info", "--json", url]);
    if !output.status.success() {
        return Err(text(&output.stderr));
    }
    Ok(serde_json::from_str(&text(&output.stdout)).unwrap())
}

/// Output of `blockmux discover`.
fn discovered(server: &str) -> String {
    let output = blockmux(["discover", "--json", server]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn an_added_volume_is_exported_over_every_protocol_until_it_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    let local = "127.0.0.1:0";
    let controlled = Controlled::serve(&["a=mem:8m", "--iscsi", local, "--nvme-tcp", local]);
    let volume = format!("b=file:{}?size=2m", image.display());
    let said = controlled.said(&["add", &volume]);
    let urls: Vec<&str> = said.lines().skip(1).map(|line| line.trim().trim_matches('\'')).collect();
    assert!(said.starts_with("b\n") && urls.len() >= 3, "{said}");
    let of = |scheme: &str| *urls.iter().find(|url| url.starts_with(scheme)).unwrap();
    for scheme in ["nbd", "iscsi", "nvme+tcp"] {
        assert_eq!(info(of(scheme)).unwrap()["size"], 2 << 20, "{scheme}");
    }
    let server = of("nvme+tcp").split('/').take(3).collect::<Vec<_>>().join("/");
    assert!(discovered(&server).contains("blockmux:b"));
    assert!(controlled.refusal(&["add", "b=mem:1m"]).contains("a volume with the name `b` exists already"));
    let added = controlled.ctl(&["add", "c=mem:1m", "--protocols", "nbd,aoe"]);
    assert!(added.status.success() && text(&added.stdout).contains("nbd"), "{added:?}");
    assert!(text(&added.stderr).contains("not exported over aoe: the daemon has no listener"), "{added:?}");
    controlled.said(&["remove", "c"]);
    let mut scsi = RawIscsi::login(of("iscsi"), "iqn.2026-11.i:a");
    assert!(can_read(&mut scsi, 0));
    let block = [3; 512];
    assert_eq!(scsi.run(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &block, 0).0, GOOD);
    let refused = controlled.refusal(&["remove", "b"]);
    assert!(refused.contains("b: is in use by iscsi iqn.2026-11.i:a at 127.0.0.1:"), "{refused}");
    assert!(refused.contains("remove it with --force"), "{refused}");
    assert!(can_read(&mut scsi, 0));
    controlled.said(&["remove", "b", "--force"]);
    assert_eq!(fs::read(&image).unwrap()[..512], block, "the write is in the file");
    assert_eq!(scsi.event().0, 1, "it is asked to log out");
    for scheme in ["nbd", "iscsi", "nvme+tcp"] {
        assert!(info(of(scheme)).is_err(), "{scheme}");
    }
    assert!(!discovered(&server).contains("blockmux:b"));
    assert!(controlled.refusal(&["remove", "b"]).contains("no volume has the name `b`; choose one of a"));
    // The name is free again, and the first volume is unchanged.
    assert!(controlled.said(&["add", "b=mem:1m", "--read-only"]).starts_with("b\n"));
    assert_eq!(info(of("nvme+tcp")).unwrap()["read_only"], true);
    assert!(can_read(&mut controlled.login(), 0));
    let names: Vec<Value> =
        controlled.status()["volumes"].as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn a_volume_that_is_removed_by_force_takes_its_sessions_with_it() {
    let controlled = Controlled::serve(&["a=mem:8m", "b=mem:1m"]);
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    let output = controlled.ctl(&["remove", "a", "--force"]);
    let said = text(&output.stderr);
    assert!(
        output.status.success() && said.contains("volume a: its 8388608 bytes in RAM are lost"),
        "{said}"
    );
    assert!(nbd.is_closed());
    assert!(controlled.status()["volumes"].as_array().unwrap().iter().all(|one| one["name"] == "b"));
}

#[test]
fn a_volume_without_a_name_gets_one_if_a_start_would_generate_another() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    fs::write(&config, "nbd = ['unix:b.sock']\n[[volume]]\nspec = 'mem:1m'\n").unwrap();
    let controlled = Controlled::serve(&["--config", &config.display().to_string()]);
    for size in ["2m", "3m"] {
        controlled.said(&["add", &format!("mem:{size}")]);
    }
    controlled.said(&["remove", "disk1"]);
    controlled.said(&["save"]);
    let saved = fs::read_to_string(&config).unwrap();
    assert!(saved.matches("name = ").count() == 1 && saved.contains("name = \"disk2\""), "{saved}");
    // Its default targets have another name then.
    let waits = "takes effect at the next start:\n  + volume disk2: name added\n";
    assert_eq!(controlled.said(&["diff"]), waits);
    // A change and its reversal leave nothing to save.
    controlled.said(&["limit", "disk2", "iops=5"]);
    controlled.said(&["limit", "disk2", "none"]);
    assert!(controlled.said(&["save"]).contains("nothing"));
}

#[test]
fn namespaces_and_logical_units_are_attached_and_detached() {
    let local = "127.0.0.1:0";
    let volumes = ["a=mem:8m", "b=mem:2m", "--iscsi", local, "--nvme-tcp", local];
    let controlled = Controlled::serve(&volumes);
    let nvme = controlled.daemon.urls_of("nvme+tcp").remove(0);
    let (nqn, iqn) = ("nqn.2026-11.blockmux:a", "iqn.2026-11.blockmux:a");
    assert_eq!(controlled.said(&["attach", "b", nqn]), format!("{nqn}  2\n"));
    let second = format!("{}/2", nvme.strip_suffix("/1").unwrap());
    assert_eq!(info(&second).unwrap()["size"], 2 << 20);
    assert!(controlled.refusal(&["attach", "b", nqn, "2"]).contains("there is a unit 2 already"));
    controlled.said(&["detach", nqn, "2"]);
    assert!(info(&second).unwrap_err().contains("there is no namespace 2"));
    assert!(controlled.refusal(&["detach", nqn, "2"]).contains("has no unit 2"));
    // iSCSI initiators get a unit attention.
    let mut scsi = controlled.login();
    assert!(can_read(&mut scsi, 0));
    // The targets are those by default: what a config with others would lack is in use.
    for edit in [&["detach", iqn, "0"][..], &["add", "iscsi_target", "iqn.2026-11.com.example:new"]] {
        let refused = controlled.refusal(edit);
        assert!(
            refused.contains("is in use by iscsi ") && refused.contains("--force"),
            "{edit:?}: {refused}"
        );
    }
    assert!(can_read(&mut scsi, 0));
    assert_eq!(controlled.said(&["attach", "b", iqn, "7"]), format!("{iqn}  7\n"));
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    let unit = controlled.daemon.urls_of("iscsi").remove(0).replace(":a/0", ":a/7");
    assert_eq!(info(&unit).unwrap()["size"], 2 << 20);
    let used = controlled.refusal(&["detach", iqn, "7"]);
    assert!(used.contains(&format!("{iqn} 7: is in use by iscsi ")) && used.contains("--force"), "{used}");
    // iSCSI names have no case.
    controlled.said(&["detach", &iqn.to_uppercase(), "7", "--force"]);
    assert_eq!(controlled.said(&["attach", "b", iqn, "--json"]), "{\"number\":1}\n");
    assert_eq!(controlled.said(&["detach", iqn, "1", "--force", "--json"]), "{}\n");
    assert!(info(&unit).is_err());
    assert!(controlled.refusal(&["attach", "b", "nqn.other"]).contains("`nqn.other`; choose one of "));
    assert!(controlled.refusal(&["ana", nqn, "1", "inaccessible"]).contains("has no ana_group 1"));
}

#[test]
fn an_ana_state_is_set_at_existing_listeners() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    let nqn = "nqn.2026-11.com.example:disk";
    let written = format!(
        "[[volume]]\nname = 'a'\nspec = 'mem:8m'\n[[nvme_subsystem]]\nnqn = '{nqn}'\n\
         namespaces = {{ 1 = 'a' }}\n[[nvme_subsystem.ana_group]]\nANAGRPID = 1\nnamespaces = [1]\nstates = {{}}\n\
         [[nvme_discovery.referral]]\ntraddr = '192.0.2.9'\n"
    );
    fs::write(&config, written).unwrap();
    let config = config.display().to_string();
    let controlled = Controlled::serve(&["--config", &config, "--nvme-tcp", "127.0.0.1:0"]);
    let listener = controlled.daemon.urls_of("nvme+tcp").remove(0);
    let listener = listener.split('/').nth(2).unwrap().to_owned();
    controlled.said(&["ana", nqn, "1", "inaccessible"]);
    controlled.said(&["ana", nqn, "1", "non-optimized", "--at", &listener]);
    assert!(controlled.refusal(&["ana", nqn, "2", "optimized"]).contains("has no ana_group 2"));
    let elsewhere = controlled.refusal(&["ana", nqn, "1", "optimized", "--at", "192.0.2.1:4420"]);
    assert!(elsewhere.contains(&format!("is not a listener; use one of {listener}")), "{elsewhere}");
    let wrong = controlled.ctl(&["ana", nqn, "1", "best"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("STATE best: not one of optimized, non-optimized, inaccessible"));
}

/// A target over a slow file, with a portal group for each of two listeners. The second group is in
/// standby.
fn two_portal_groups(directory: &Path) -> (Controlled, [String; 2]) {
    let config = directory.join("b.toml");
    let image = directory.join("disk.img");
    let written = format!(
        "iscsi = ['127.0.0.1:0', '127.0.0.2:0']\n[[volume]]\nname = 'a'\n\
         spec = 'delay:10ms:file:{}?size=8m'\n[[iscsi_target]]\nTargetName = '{IQN}'\nluns = {{ 0 = 'a' }}\n\
         access_states = {{ '127.0.0.2:0' = 'standby' }}\n",
        image.display()
    );
    fs::write(&config, written).unwrap();
    let controlled = Controlled::serve(&["--config", &config.display().to_string()]);
    let [first, second] = &controlled.daemon.urls_of("iscsi")[..] else { panic!("two listeners") };
    let urls = [first.clone(), second.clone()];
    (controlled, urls)
}

/// The listener of a URL.
fn listener(url: &str) -> &str {
    url.split('/').nth(2).unwrap()
}

/// The access state of each of two port groups in REPORT TARGET PORT GROUPS.
fn states(scsi: &mut RawIscsi) -> [u8; 2] {
    // Unit attentions are reported first.
    let answers = (0..8).map(|_| scsi.run(&[0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256));
    let (_, data) = answers.into_iter().find(|(status, _)| *status == GOOD).unwrap();
    assert_eq!(data.len(), 4 + 2 * 12);
    [data[4] & 0x0f, data[16] & 0x0f]
}

#[test]
fn portal_groups_have_the_access_states_of_the_config_and_then_of_ctl() {
    let directory = tempfile::tempdir().unwrap();
    let (controlled, urls) = two_portal_groups(directory.path());
    let [mut first, mut second] = urls.each_ref().map(|url| RawIscsi::login(url, "iqn.2026-11.i:a"));
    assert!(can_read(&mut first, 0) && !can_read(&mut second, 0));
    for scsi in [&mut first, &mut second] {
        assert_eq!(states(scsi), [0, 2]);
    }
    let second_at = listener(&urls[1]);
    controlled.said(&["alua", IQN, "active/non-optimized", "--at", second_at]);
    for scsi in [&mut first, &mut second] {
        assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "everybody is told");
        assert_eq!(states(scsi), [0, 1]);
        assert!(can_read(scsi, 0));
    }
    controlled.said(&["alua", IQN, "unavailable"]);
    for scsi in [&mut first, &mut second] {
        assert_eq!(states(scsi), [3, 3]);
        assert!(!can_read(scsi, 0) && !can_read(scsi, 0));
    }
    // An added unit has the access states of its target.
    controlled.said(&["add", "b=mem:1m"]);
    assert_eq!(controlled.said(&["attach", "b", IQN]), format!("{IQN}  1\n"));
    let of_second_unit = |url: &str| {
        let mut scsi = RawIscsi::login(&url.replace("/0", "/1"), "iqn.2026-11.i:b");
        scsi.lun = 1;
        let states = states(&mut scsi);
        (can_read(&mut scsi, 0), states)
    };
    assert_eq!(of_second_unit(&urls[0]), (false, [3, 3]));
    controlled.said(&["alua", IQN, "active/optimized", "--at", listener(&urls[0])]);
    assert_eq!(of_second_unit(&urls[0]), (true, [0, 3]));
    assert_eq!(of_second_unit(&urls[1]), (false, [0, 3]));
    let elsewhere = controlled.refusal(&["alua", IQN, "standby", "--at", "192.0.2.1:3260"]);
    assert!(
        elsewhere.contains(&format!("is not a listener; use one of {}", listener(&urls[0]))),
        "{elsewhere}"
    );
    assert!(
        controlled
            .refusal(&["ana", IQN, "1", "optimized"])
            .contains("belongs to iSCSI, which does not support this command")
    );
    assert_eq!(controlled.ctl(&["alua", IQN, "offline"]).status.code(), Some(2));
}

#[test]
fn listeners_of_one_portal_group_share_one_state() {
    let controlled = Controlled::serve(&["a=mem:1m", "--iscsi", "127.0.0.1:0", "--iscsi", "127.0.0.2:0"]);
    let urls = controlled.daemon.urls_of("iscsi");
    let (own, at) = ("iqn.2026-11.blockmux:a", listener(&urls[0]));
    let refusal = controlled.refusal(&["alua", own, "standby", "--at", at]);
    assert!(refusal.contains(&format!("{at} shares its portal group with other listeners")), "{refusal}");
    controlled.said(&["alua", own, "standby"]);
    assert!(urls.iter().all(|url| !can_read(&mut RawIscsi::login(url, "iqn.2026-11.i:a"), 0)));
}

#[test]
fn the_initiator_follows_access_states_between_portals_without_data_loss() {
    let directory = tempfile::tempdir().unwrap();
    let (controlled, urls) = two_portal_groups(directory.path());
    let source = directory.path().join("source.img");
    let bytes: Vec<u8> =
        (0..8_u32 << 18).flat_map(|nth| nth.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    fs::write(&source, &bytes).unwrap();
    let from = format!("file:{}", source.display());
    // At first the second portal accepts no writes, and no portal does during the whole copy.
    let to = format!("{}?paths=all", urls[1]);
    let mut copy = Command::new(BLOCKMUX);
    copy.args(["copy", "--overwrite", "--verify", "--bs", "64k", "--iodepth", "2", &from, &to]);
    let mut copy = copy.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut swaps = 0;
    while copy.try_wait().unwrap().is_none() {
        let (better, worse) = if swaps % 2 == 0 { (1, 0) } else { (0, 1) };
        controlled.said(&["alua", IQN, "active/optimized", "--at", listener(&urls[better])]);
        controlled.said(&["alua", IQN, "standby", "--at", listener(&urls[worse])]);
        swaps += 1;
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("copied and verified 8 MiB"), "{}", text(&output.stdout));
    assert!(swaps >= 3, "only {swaps} changes of state during the copy");
    assert!(fs::read(directory.path().join("disk.img")).unwrap() == bytes);
}

const IQN: &str = "iqn.2026-11.com.example:disk";

#[test]
fn a_reset_notifies_other_initiators_and_a_cold_reset_ends_their_sessions() {
    let controlled = Controlled::serve(&["a=mem:1m", "--iscsi", "127.0.0.1:0"]);
    let (url, mut scsi) = (controlled.daemon.urls_of("iscsi").remove(0), controlled.login());
    let over_rdma = controlled.daemon.urls_of("iser").remove(0);
    for (what, url, is_told) in [
        ("lun", &url, true),
        ("target", &over_rdma, true),
        ("abort-task-set", &url, false),
        ("clear-task-set", &over_rdma, false),
        ("target", &url, true),
    ] {
        assert!(can_read(&mut scsi, 0));
        succeed(Command::new(BLOCKMUX).args(["reset", url, what]));
        assert_eq!(scsi.run(&[0; 6], &[], 0).0 == CHECK_CONDITION, is_told, "{what}");
    }
    succeed(Command::new(BLOCKMUX).args(["reset", &url, "cold"]));
    assert!(scsi.is_closed());
    assert!(can_read(&mut controlled.login(), 0));
    let nowhere = blockmux(["reset", &url.replace("/0", "/7")]);
    assert!(text(&nowhere.stderr).contains("it has no such logical unit (LOGICAL_UNIT_RESET"));
    let nbd = blockmux(["reset", &controlled.daemon.url()]);
    assert!(text(&nbd.stderr).contains("only iSCSI, iSER and SRP logical units can be reset"));
    assert_eq!((nowhere.status.code(), nbd.status.code()), (Some(1), Some(2)));
}
