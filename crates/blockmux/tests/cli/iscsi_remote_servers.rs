//! The iSCSI initiator with standard targets.

use crate::program::{BLOCKMUX, blockmux, half_empty_file, has, text};
use serde_json::Value;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A target that runs in the background; killed when dropped.
struct Server {
    directory: TempDir,
    process: Child,
    port: u16,
}

impl Server {
    /// tgtd with one target, whose LUN 1 is a disk of [`SIZE`] bytes.
    fn tgtd() -> Server {
        let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
        std::fs::File::create(directory.path().join("disk.img")).unwrap().set_len(SIZE as u64).unwrap();
        let process = start_tgtd(directory.path(), port);
        let server = Server { directory, process, port };
        server.set_up_tgtd();
        server
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Restarts tgtd on the same port with the same disk.
    fn restart_tgtd(&mut self) {
        self.process = start_tgtd(self.directory.path(), self.port);
        self.set_up_tgtd();
    }

    fn set_up_tgtd(&self) {
        self.wait_for(|server| server.tgtadm(&["--op", "show", "--mode", "sys"]).is_ok());
        let disk = self.path("disk.img");
        for args in [
            &["--op", "new", "--mode", "target", "--tid", "1", "-T", TARGET][..],
            &[
                "--op",
                "new",
                "--mode",
                "logicalunit",
                "--tid",
                "1",
                "--lun",
                "1",
                "-b",
                disk.to_str().unwrap(),
            ],
            &["--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"],
        ] {
            self.tgtadm(args).unwrap();
        }
    }

    /// istgt with one target, whose LUN 0 is a disk of [`SIZE`] bytes; with CHAP if `auth` is set.
    fn istgt(auth: &str) -> Server {
        let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
        let place = directory.path().display();
        let (control, mib) = (free_port(), SIZE >> 20);
        let config = format!(
            "[Global]\nNodeBase \"iqn.2026-11.t\"\nPidFile {place}/pid\nAuthFile {place}/auth\n\
             MediaDirectory {place}\nTimeout 30\nNopInInterval 20\nDiscoveryAuthMethod Auto\nMaxSessions 16\n\
             MaxConnections 4\nMaxR2T 32\nMaxOutstandingR2T 16\nFirstBurstLength 65536\nMaxBurstLength 262144\n\
             MaxRecvDataSegmentLength 65536\n[UnitControl]\nAuthMethod Auto\nPortal UC1 127.0.0.1:{control}\n\
             Netmask 127.0.0.1\n[PortalGroup1]\nPortal DA1 127.0.0.1:{port}\n[InitiatorGroup1]\n\
             InitiatorName \"ALL\"\nNetmask 127.0.0.1\n[LogicalUnit1]\nTargetName disk\n\
             Mapping PortalGroup1 InitiatorGroup1\nAuthMethod {auth}\nAuthGroup AuthGroup1\nUseDigest Auto\n\
             UnitType Disk\nQueueDepth 32\nLUN0 Storage {place}/disk.img {mib}MB\n"
        );
        std::fs::write(directory.path().join("config"), config).unwrap();
        let users = format!("[AuthGroup1]\nAuth \"user\" \"{SECRET}\" \"target\" \"{TARGETS_SECRET}\"\n");
        private_file(directory.path(), "auth", &users);
        let mut istgt = Command::new("istgt");
        istgt.arg("-D").arg("-c").arg(directory.path().join("config"));
        let process = istgt.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Server { directory, process, port };
        server.wait_for(|server| TcpStream::connect(("127.0.0.1", server.port)).is_ok());
        server
    }

    fn wait_for(&self, is_there: impl Fn(&Server) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !is_there(self) {
            assert!(Instant::now() < end, "the target does not listen");
            std::thread::yield_now();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Sends a management command to tgtd.
    fn tgtadm(&self, args: &[&str]) -> Result<(), String> {
        let mut tgtadm = Command::new("tgtadm");
        tgtadm.env("TGT_IPC_SOCKET", self.path("control")).args(["--lld", "iscsi"]).args(args);
        let output = tgtadm.output().unwrap();
        if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
    }

    fn portal(&self) -> String {
        format!("iscsi://127.0.0.1:{}", self.port)
    }

    fn url(&self, lun: u16) -> String {
        format!("{}/{TARGET}/{lun}", self.portal())
    }

    /// The URL of a unit with the initiator's secret; with `mutual` also with that of the target.
    fn url_with_secrets(&self, lun: u16, secret: &str, mutual: Option<&str>) -> String {
        let own = private_file(self.directory.path(), "secret", secret);
        let url =
            format!("iscsi://user@127.0.0.1:{}/{TARGET}/{lun}?secret_file={}", self.port, own.display());
        match mutual {
            None => url,
            Some(secret) => {
                let theirs = private_file(self.directory.path(), "targets-secret", secret);
                format!("{url}&mutual_user=target&mutual_secret_file={}", theirs.display())
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_tgtd(directory: &Path, port: u16) -> Child {
    let mut tgtd = Command::new("tgtd");
    tgtd.arg("-f").arg("--iscsi").arg(format!("portal=127.0.0.1:{port}"));
    tgtd.env("TGT_IPC_SOCKET", directory.join("control"));
    tgtd.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A port that was free a moment ago. These targets cannot let the system choose one.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn private_file(directory: &Path, name: &str, content: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// Standard error without the warning about a slow target. istgt may take longer than the two
/// seconds after which Blockmux warns.
fn complaints(output: &Output) -> String {
    let said = text(&output.stderr);
    said.split_inclusive('\n').filter(|line| !line.contains("sends nothing; waiting")).collect()
}

fn described(url: &str) -> Value {
    let output = blockmux(["info", "--json", url]);
    assert_eq!((output.status.code(), complaints(&output)), (Some(0), String::new()));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The message about a URL that cannot be used.
fn refused(url: &str) -> String {
    let output = blockmux(["info", url]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    let said = complaints(&output);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!said.contains(SECRET) && !said.contains(TARGETS_SECRET), "{said}");
    said
}

fn copies_there_and_back(server: &Server, url: &str) {
    let source = half_empty_file(server.directory.path(), SIZE);
    let back = server.path("back.img");
    let _ = std::fs::remove_file(&back);
    let file = |path: &Path| format!("file:{}", path.display());
    for (from, to) in [(file(&source), url.to_owned()), (url.to_owned(), file(&back))] {
        let output = blockmux(["copy", "--overwrite", "--verify", &from, &to]);
        assert_eq!((output.status.code(), complaints(&output)), (Some(0), String::new()), "{from} to {to}");
    }
    assert!(std::fs::read(back).unwrap() == std::fs::read(source).unwrap());
}

fn with(url: &str, parameters: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}{parameters}")
}

#[test]
fn tgtd_is_discovered_described_and_copied_to_and_from() {
    if !has("tgtd") {
        return;
    }
    let server = Server::tgtd();
    let url = server.url(1);
    let found = blockmux(["discover", &server.portal()]);
    assert_eq!(text(&found.stdout), format!("{url}  8 MiB  IET VIRTUAL-DISK\n"));
    let info = described(&url);
    assert_eq!((&info["size"], &info["read_only"]), (&SIZE.into(), &false.into()));
    assert_eq!(info["initial_r2t"], true);
    copies_there_and_back(&server, &url);
    // Unsolicited data, and several sessions.
    for (name, value) in [("InitialR2T", "No"), ("ImmediateData", "No"), ("FirstBurstLength", "16384")] {
        server
            .tgtadm(&["--op", "update", "--mode", "target", "--tid", "1", "--name", name, "--value", value])
            .unwrap();
    }
    let info = described(&url);
    assert_eq!((&info["initial_r2t"], &info["immediate_data"]), (&false.into(), &false.into()));
    copies_there_and_back(&server, &with(&url, "connections=3"));
    let said = refused(&server.url(0));
    assert!(said.contains("logical unit 0 is not a disk: its device type is 0x0c"), "{said}");
    let said = refused(&server.url(7));
    assert!(said.contains("target has no logical unit 7"), "{said}");
    let said = refused(&format!("{}/iqn.2026-11.t:other/1", server.portal()));
    assert!(said.contains("target refused the login: not found"), "{said}");
}

#[test]
fn names_of_tgtd_are_sent_as_they_are() {
    if !has("tgtd") {
        return;
    }
    // tgtd compares names byte for byte.
    let (target, initiator) = ("iqn.2026-11.T:Disk-A", "iqn.2026-11.T:Me");
    let server = Server::tgtd();
    let disk = server.path("disk.img");
    let disk = disk.to_str().unwrap();
    for (tid, name, of) in [("2", target, ["-Q", initiator]), ("3", "blktests-subsystem-1", ["-I", "ALL"])] {
        let of_target = ["--mode", "target", "--tid", tid];
        server.tgtadm(&[&["--op", "new"], &of_target[..], &["-T", name]].concat()).unwrap();
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", tid, "--lun", "1", "-b", disk];
        server.tgtadm(&unit).unwrap();
        server.tgtadm(&[&["--op", "bind"], &of_target[..], &of].concat()).unwrap();
    }
    let portal = server.portal();
    let found = blockmux(["discover", &format!("{portal}?initiator={initiator}")]);
    let warning = text(&found.stderr);
    assert!(warning.contains("`blktests-subsystem-1`: the name does not begin with iqn."), "{warning}");
    let found = text(&found.stdout);
    for name in [target, "blktests-subsystem-1", TARGET] {
        assert!(
            found.contains(&format!("{portal}/{name}/1?initiator={initiator}  8 MiB")),
            "{name}: {found}"
        );
    }
    let url = format!("{portal}/{target}/1");
    assert_eq!(described(&with(&url, &format!("initiator={initiator}")))["target"], target);
    refused(&url);
    refused(&with(&url, &format!("initiator={}", initiator.to_lowercase())));
}

#[test]
fn mutual_chap_and_digests_work_with_tgtd() {
    if !has("tgtd") {
        return;
    }
    let server = Server::tgtd();
    for (user, secret, direction) in [("user", SECRET, &[][..]), ("target", TARGETS_SECRET, &["--outgoing"])]
    {
        server.tgtadm(&["--op", "new", "--mode", "account", "--user", user, "--password", secret]).unwrap();
        let bind = ["--op", "bind", "--mode", "account", "--tid", "1", "--user", user];
        server.tgtadm(&[&bind[..], direction].concat()).unwrap();
    }
    let said = refused(&server.url(1));
    assert!(said.contains("give a user, as user@host"), "{said}");
    let said = refused(&server.url_with_secrets(1, "another-secret", None));
    assert!(said.contains("authentication failure; check the user and the secret"), "{said}");
    let said = refused(&server.url_with_secrets(1, SECRET, Some("another-secret")));
    assert!(
        said.contains("target failed mutual authentication: its CHAP response is wrong or missing"),
        "{said}"
    );
    let url = server.url_with_secrets(1, SECRET, Some(TARGETS_SECRET));
    // Its discovery does not authenticate.
    described(&with(&url, "paths=all"));
    let said = refused(&with(&url, "header_digest=on"));
    assert!(said.contains("did not agree to a digest that this initiator requires"), "{said}");
    for name in ["HeaderDigest", "DataDigest"] {
        let update =
            ["--op", "update", "--mode", "target", "--tid", "1", "--name", name, "--value", "None,CRC32C"];
        server.tgtadm(&update).unwrap();
    }
    let url = with(&url, "header_digest=on&data_digest=on&connections=2");
    let info = described(&url);
    assert_eq!((&info["header_digest"], &info["data_digest"]), (&true.into(), &true.into()));
    copies_there_and_back(&server, &url);
}

#[test]
fn a_password_in_a_url_is_used_and_never_shown() {
    if !has("tgtd") {
        return;
    }
    let server = Server::tgtd();
    server.tgtadm(&["--op", "new", "--mode", "account", "--user", "user", "--password", SECRET]).unwrap();
    server.tgtadm(&["--op", "bind", "--mode", "account", "--tid", "1", "--user", "user"]).unwrap();
    let url = format!("iscsi://user%{SECRET}@127.0.0.1:{}/{TARGET}/1", server.port);
    let report = server.path("report");
    let report = report.to_str().unwrap();
    let short =
        ["--runtime", "0.05", "--runs", "1", "--no_ceiling", "--rw", "randread", "-v", "--report", report];
    for args in [
        &["info", &url][..],
        &["info", "--json", &url],
        &["discover", &url],
        &["copy", "--overwrite", "-v", &url, "mem:8m"],
        &["copy", "--overwrite", &format!("delay:1us:{url}"), "mem:1m"],
        &[&["bench", &url][..], &short].concat(),
    ] {
        let output = blockmux(args);
        let said = text(&output.stdout) + &text(&output.stderr);
        let too_small = args.contains(&"mem:1m");
        assert_eq!(output.status.success(), !too_small, "{said}");
        assert!(!said.contains(SECRET), "{args:?}: {said}");
    }
    for name in ["bench.json", "bench.html"] {
        let written = std::fs::read_to_string(server.path("report").join(name)).unwrap();
        assert!(!written.contains(SECRET), "{name}");
    }
}

#[test]
fn istgt_is_discovered_described_and_copied_to_and_from() {
    if !has("istgt") {
        return;
    }
    let server = Server::istgt("Auto");
    let url = server.url(0);
    let found = blockmux(["discover", &server.portal()]);
    assert_eq!(text(&found.stdout), format!("{url}  8 MiB  FreeBSD iSCSI DISK\n"));
    assert_eq!(described(&url)["size"], SIZE);
    copies_there_and_back(&server, &url);
    copies_there_and_back(&server, &with(&url, "header_digest=on&data_digest=on&connections=3"));
}

/// Output of `blockmux reset`; `Err` with the message if it fails.
fn reset(url: &str, what: &str) -> Result<String, String> {
    let output = blockmux(["reset", url, what]);
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn reset_functions_work_with_tgtd() {
    if !has("tgtd") {
        return;
    }
    let server = Server::tgtd();
    let url = server.url(1);
    assert_eq!(reset(&url, "lun").unwrap(), "the logical unit is reset\n");
    assert_eq!(reset(&url, "abort-task-set").unwrap(), "the commands of this session are aborted\n");
    for what in ["target", "clear-task-set", "cold"] {
        let said = reset(&url, what).unwrap_err();
        assert!(said.contains("the target did not reset: it does not support the function"), "{said}");
    }
    copies_there_and_back(&server, &url);
}

#[test]
fn reset_functions_work_with_istgt() {
    if !has("istgt") {
        return;
    }
    let server = Server::istgt("Auto");
    let url = server.url(0);
    assert_eq!(reset(&url, "lun").unwrap(), "the logical unit is reset\n");
    assert_eq!(reset(&url, "target").unwrap(), "the target is reset\n");
    assert_eq!(reset(&url, "clear-task-set").unwrap(), "the commands of all sessions are aborted\n");
    assert_eq!(reset(&url, "abort-task-set").unwrap(), "the commands of this session are aborted\n");
    assert_eq!(reset(&url, "cold").unwrap(), "the target is reset and all its sessions are closed\n");
    copies_there_and_back(&server, &url);
}

#[test]
fn several_connections_of_a_session_work_with_istgt() {
    if !has("istgt") {
        return;
    }
    let server = Server::istgt("Auto");
    let url = with(&server.url(0), "header_digest=on&data_digest=on&max_connections=3");
    assert_eq!(described(&url)["max_connections"], 3);
    copies_there_and_back(&server, &url);
    let url = with(&url, "error_recovery_level=2");
    assert_eq!(described(&url)["error_recovery_level"], 0, "istgt has no error recovery");
    copies_there_and_back(&server, &url);
}

#[test]
fn io_continues_without_a_portal_that_does_not_answer() {
    if !has("tgtd") {
        return;
    }
    let server = Server::tgtd();
    let nobody = free_port();
    for portals in [
        format!("127.0.0.1:{nobody},127.0.0.1:{}", server.port),
        format!("127.0.0.1:{},127.0.0.1:{nobody}", server.port),
    ] {
        let url = format!("iscsi://{portals}/{TARGET}/1");
        let source = half_empty_file(server.directory.path(), SIZE);
        let output =
            blockmux(["copy", "--overwrite", "--verify", &format!("file:{}", source.display()), &url]);
        let said = text(&output.stderr);
        assert!(output.status.success() && said.contains("a path cannot be used"), "{said}");
        assert_eq!(described(&url)["size"], SIZE);
    }
}

#[test]
fn mutual_chap_works_with_istgt() {
    if !has("istgt") {
        return;
    }
    let server = Server::istgt("CHAP Mutual");
    let said = refused(&server.url(0));
    assert!(said.contains("give a user, as user@host"), "{said}");
    let said = refused(&server.url_with_secrets(0, SECRET, Some("another-secret")));
    assert!(
        said.contains("target failed mutual authentication: its CHAP response is wrong or missing"),
        "{said}"
    );
    copies_there_and_back(&server, &server.url_with_secrets(0, SECRET, Some(TARGETS_SECRET)));
}

#[test]
fn a_copy_continues_after_the_target_was_killed_and_restarted() {
    if !has("tgtd") {
        return;
    }
    let mut server = Server::tgtd();
    let source = half_empty_file(server.directory.path(), SIZE);
    // Slow enough that the copy is in progress while the target is down.
    let from = format!("rate:bw=512k:file:{}", source.display());
    let url = with(&server.url(1), "reconnect=30s");
    let mut copy = Command::new(BLOCKMUX);
    let mut copy = copy
        .args(["copy", "--overwrite", &from, &url])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let disk = server.path("disk.img");
    server.wait_for(|_| std::fs::read(&disk).is_ok_and(|disk| disk[0] != 0));
    server.kill();
    assert!(copy.try_wait().unwrap().is_none(), "the copy is still in progress");
    server.restart_tgtd();
    assert!(copy.try_wait().unwrap().is_none(), "the copy must be in progress during the restart");
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(std::fs::read(disk).unwrap() == std::fs::read(source).unwrap());
}

const TARGET: &str = "iqn.2026-11.t:disk";
const SIZE: usize = 8 << 20;
/// The maximum length for istgt.
const SECRET: &str = "our-secret-1234";
const TARGETS_SECRET: &str = "its-secret-5678";
