//! `serve --takeover`: a new process takes over from a running daemon, and clients notice no more
//! than a pause.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, ended, has, text};
use crate::raw_client::{RawClient, WRITE};
use crate::raw_iscsi::{GOOD, RESERVATION_CONFLICT, RawIscsi};
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A running daemon and the directory with its sockets and files.
struct Place {
    daemon: Daemon,
    files: TempDir,
    args: Vec<String>,
}

impl Place {
    /// Starts a daemon with these arguments; `DIR` in them stands for the place's directory.
    fn serve(args: &[&str]) -> Place {
        let files = tempfile::tempdir().unwrap();
        let args = at(files.path(), args);
        let daemon = start(files.path(), &args);
        Place { daemon, files, args }
    }

    /// Starts a daemon with a config file, in which `DIR` stands for the place's directory.
    fn serve_config(config: &str) -> Place {
        let files = tempfile::tempdir().unwrap();
        let directory = files.path().display().to_string();
        fs::write(files.path().join("b.toml"), config.replace("DIR", &directory)).unwrap();
        let args = at(files.path(), &["--config", "DIR/b.toml"]);
        let daemon = start(files.path(), &args);
        Place { daemon, files, args }
    }

    /// Starts a process that takes over; returns the daemon that served before.
    fn take_over(&mut self) -> Daemon {
        let next = start(self.files.path(), &self.args);
        std::mem::replace(&mut self.daemon, next)
    }

    /// Runs a process with other arguments that tries to take over; returns its output.
    fn try_to_take_over(&self, args: &[&str]) -> Output {
        command(self.files.path(), &at(self.files.path(), args)).output().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    fn nbd(&self) -> RawClient {
        RawClient::connect(&self.path("nbd"))
    }

    fn iscsi(&self, nth: usize, initiator: &str) -> RawIscsi {
        RawIscsi::login(&self.daemon.urls_of("iscsi")[nth], initiator)
    }

    fn ctl(&self, args: &[&str]) -> Output {
        let control = format!("unix:{}", self.path("control").display());
        blockmux([&["ctl", &control], args].concat())
    }
}

/// Replaces `DIR` in the arguments by the directory.
fn at(directory: &Path, args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| arg.replace("DIR", &directory.display().to_string())).collect()
}

/// The command of a daemon that takes over from the daemon in this directory, if there is one.
fn command(directory: &Path, args: &[String]) -> Command {
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "--json", "--log", "control=info"]).args(at(
        directory,
        &["--control", "unix:DIR/control", "--takeover", "unix:DIR/control", "--nbd", "unix:DIR/nbd"],
    ));
    command.args(args).env("XDG_STATE_HOME", directory.join("state"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(directory: &Path, args: &[String]) -> Daemon {
    Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command(directory, args))
}

/// The daemon's log from now until it ends.
fn rest_of(daemon: &mut Daemon) -> String {
    let mut said = String::new();
    daemon.stderr.read_to_string(&mut said).unwrap();
    said
}

/// Creates a file of `mib` MiB in which all blocks differ; returns its content.
fn full_file(path: &Path, mib: usize) -> Vec<u8> {
    let words = (1..=(mib as u64) << 17).map(|nth| nth.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    fs::write(path, &bytes).unwrap();
    bytes
}

/// A volume that logs its writes and is so slow that a copy still runs after two takeovers. The
/// next line of the log proves that.
const SLOW: &str = "a=log:-:delay:0s,100ms:file:DIR/disk.img?size=24m";

/// Copies to a volume over a protocol while two other processes take over.
fn writes_go_on(listener: &str, scheme: &str) {
    let place = Place::serve(&[listener, "127.0.0.1:0", SLOW]);
    let url = place.daemon.urls_of(scheme).remove(0);
    copy_goes_on(place, &url, |daemon| {
        assert_eq!(daemon.urls_of(scheme)[0], url, "the listener is the same");
    });
}

/// Copies to a volume while two other processes take over.
fn copy_goes_on(mut place: Place, url: &str, check: impl Fn(&Daemon)) {
    let bytes = full_file(&place.path("source.img"), 24);
    let mut copy = Command::new(BLOCKMUX);
    copy.args(["copy", "--overwrite", "--verify", "--bs", "64k", "--iodepth", "8"]);
    copy.arg(format!("file:{}", place.path("source.img").display())).arg(url);
    let copy = copy.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..2 {
        place.daemon.wait_for_line(" write ");
        let mut before = place.take_over();
        let said = rest_of(&mut before);
        assert_eq!(before.wait().code(), Some(0), "{said}");
        check(&place.daemon);
    }
    place.daemon.wait_for_line(" write ");
    let output = copy.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let is_expected = |line: &str| line.contains("trying again") || line.ends_with("; connecting again");
    assert!(said.lines().all(is_expected), "{said}");
    assert!(fs::read(place.path("disk.img")).unwrap() == bytes);
}

#[test]
fn an_iscsi_initiator_continues_after_a_takeover() {
    writes_go_on("--iscsi", "iscsi");
}

#[test]
fn an_nvme_host_continues_after_a_takeover() {
    writes_go_on("--nvme-tcp", "nvme+tcp");
}

#[test]
fn the_disk_of_a_virtual_machine_continues_after_a_takeover() {
    let (name, spec) = SLOW.split_once('=').unwrap();
    let place = Place::serve_config(&format!(
        "[[volume]]\nname = '{name}'\nspec = '{spec}'\n[[attachment]]\nvolume = '{name}'\nsocket = 'DIR/disk'\n"
    ));
    let disk = format!("vhost-user:{}", place.path("disk").display());
    copy_goes_on(place, &disk, |_| ());
}

#[test]
fn an_nbd_client_that_does_not_reconnect_continues_after_a_takeover() {
    if !has("nbdcopy") {
        return;
    }
    let mut place = Place::serve(&[SLOW]);
    let bytes = full_file(&place.path("source.img"), 24);
    let url = format!("nbd+unix:///a?socket={}", place.path("nbd").display());
    let mut copy = Command::new("nbdcopy");
    copy.args(["--connections=2", "--requests=4", "--request-size=65536", "--flush"]);
    let copy = copy.arg(place.path("source.img")).arg(&url).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..2 {
        place.daemon.wait_for_line(" write ");
        let mut before = place.take_over();
        let said = rest_of(&mut before);
        assert_eq!(before.wait().code(), Some(0), "{said}");
        let lines =
            said.lines().filter(|line| line.contains("logout: another process continues the session"));
        assert_eq!(lines.count(), 2, "{said}");
    }
    place.daemon.wait_for_line(" write ");
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read(place.path("disk.img")).unwrap() == bytes);
}

#[test]
fn nbd_requests_are_answered_by_one_of_the_processes_during_a_takeover() {
    let mut place = Place::serve(&["a=log:-:delay:0s,300ms:file:DIR/disk.img?size=1m"]);
    let mut client = place.nbd();
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    client.request(WRITE, 0, 4096, 4096);
    client.send(&[2; 4096]);
    place.daemon.wait_for_line(" write ");
    place.daemon.wait_for_line(" write ");
    let next = command(place.files.path(), &place.args).spawn().unwrap();
    place.daemon.wait_for_line("another process takes over");
    // Either the first process reads this request and answers it, or the second process does both.
    client.request(WRITE, 0, 8192, 4096);
    client.send(&[3; 2048]);
    client.send(&[3; 2048]);
    let mut before = std::mem::replace(&mut place.daemon, Daemon::of_child(next));
    assert_eq!(before.wait().code(), Some(0));
    assert_eq!(client.reply(), 0);
    assert_eq!(client.reply(), 0);
    let content = client.read(0, 16384);
    assert!(
        [1, 2, 3, 0].iter().zip(content.chunks(4096)).all(|(byte, part)| part.iter().all(|own| own == byte))
    );
    assert_eq!(place.nbd().read(4096, 512), [2; 512], "new clients are served, too");
    let sessions = text(&place.ctl(&["sessions"]).stdout);
    assert!(sessions.contains("nbd"), "{sessions}");
    place.daemon.signal(Signal::TERM);
    assert!(place.daemon.wait().success());
    assert!(
        !place.path("nbd").exists() && !place.path("control").exists(),
        "the last process removes its sockets"
    );
}

#[test]
fn reservations_and_identities_survive_a_takeover_without_aptpl() {
    let volumes = ["--iscsi", "127.0.0.1:0", "a=file:DIR/disk.img?size=8m", "b=null:1g"];
    let mut place = Place::serve(&volumes);
    let holder = "iqn.2026-11.i:a";
    let ids = |place: &Place| [0, 1].map(|nth| place.iscsi(nth, "iqn.2026-11.i:c").inquiry_page(0x83));
    let (mut scsi, before) = (place.iscsi(0, holder), ids(&place));
    assert_eq!(scsi.reserve_out(REGISTER, 0, [0, 7], 0), GOOD);
    assert_eq!(scsi.reserve_out(RESERVE, WRITE_EXCLUSIVE, [7, 0], 0), GOOD);
    let keys = scsi.reserve_in(READ_KEYS);
    let mut nbd = place.nbd();
    assert_eq!(nbd.write(0, 0, &[1; 512]), EPERM);
    // The test logs out when the target requests it, as initiators do.
    let logs_out = std::thread::spawn(move || {
        scsi.event();
        scsi.log_out()
    });
    let mut old = place.take_over();
    assert!(old.wait().success());
    logs_out.join().unwrap();
    assert_eq!(ids(&place), before);
    let mut again = place.iscsi(0, holder);
    assert_eq!(again.reserve_in(READ_KEYS), keys, "with the generation");
    let mut other = place.iscsi(0, "iqn.2026-11.i:b");
    assert_eq!(other.run(&write_10(), &[2; 512], 0).0, RESERVATION_CONFLICT);
    assert_eq!(nbd.write(0, 0, &[1; 512]), EPERM);
    assert_eq!(again.reserve_out(REGISTER, 0, [7, 0], 0), GOOD);
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
}

#[test]
fn a_refused_takeover_names_the_reason_and_the_daemon_continues() {
    let a = "a=file:DIR/a.img?size=1m";
    let place = Place::serve(&[a]);
    let mut client = place.nbd();
    let mut goes_on = |args: &[&str], code: i32, reason: &str| {
        let output = place.try_to_take_over(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(reason), "{said}");
        assert_eq!(client.write(0, 0, &[1; 512]), 0);
        assert_eq!(place.nbd().read(0, 512), [1; 512]);
        assert!(place.ctl(&["status"]).status.success());
    };
    goes_on(&["b=file:DIR/b.img?size=1m"], 2, "the daemon serves `a`, and this config does not");
    goes_on(&["a=file:DIR/a.img"], 2, "/a.img?size=1m for the daemon, and file:");
    goes_on(&[a, "--state", "DIR/elsewhere"], 2, "use the same --state");
    goes_on(&[a, "b=file:DIR/nowhere/b.img"], 2, "/nowhere/b.img: does not exist");
    goes_on(&[a, "--iscsi", "192.0.2.77:3260"], 2, "cannot listen on 192.0.2.77:3260");
    goes_on(&[a, "--cores", "1000"], 2, "1000 cores are too many");
    let added = format!("c=file:{}?size=1m", place.path("c.img").display());
    assert!(place.ctl(&["add", &added]).status.success());
    goes_on(&[a], 2, "the config file does not have the changes that 'ctl' has made");

    let place = Place::serve(&["a=mem:1m"]);
    let refused = place.try_to_take_over(&["a=mem:1m"]);
    let said = text(&refused.stderr);
    assert!(said.contains("`a` (mem:1m) is in RAM and would lose its data"), "{said}");
    assert_eq!(place.nbd().read(0, 512), [0; 512]);
}

#[test]
fn a_takeover_is_refused_while_nbd_clients_use_tls() {
    let files = tempfile::tempdir().unwrap();
    let keys = files.path().join("keys.psk");
    fs::write(&keys, format!("alice:{}\n", "5a".repeat(32))).unwrap();
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
    let args = ["a=file:DIR/a.img?size=1m", "--nbd-tls-psk", &keys.display().to_string()];
    let mut place = Place::serve(&args);
    let (socket, keys) = (place.path("nbd"), keys.display());
    let url = format!("nbds+unix://alice@/a?socket={}&tls-psk-file={keys}", socket.display());
    let gateway = Daemon::serve(&[&url]);
    let mut client = RawClient::connect(&gateway.socket());
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    let refused = place.try_to_take_over(&args);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(
        said.contains(" TLS, and cannot be handed over") && said.contains("disconnect those clients"),
        "{said}"
    );
    assert_eq!(client.write(0, 0, &[2; 512]), 0);
    drop((client, gateway));
    while !text(&place.ctl(&["status"]).stdout).starts_with("connections  0 ") {}
    let mut before = place.take_over();
    assert!(before.wait().success());
    let output = blockmux(["info", &url]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// The test's end of a takeover, in place of a new process.
struct Successor(UnixStream);

impl Successor {
    /// Requests a takeover from the daemon.
    fn ask(place: &Place) -> Successor {
        let mut stream = UnixStream::connect(place.path("control")).unwrap();
        stream
            .write_all(request("Connection: upgrade\r\nUpgrade: blockmux-takeover/1\r\n").as_bytes())
            .unwrap();
        let mut line = String::new();
        BufReader::with_capacity(1, &stream).read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 101 "), "{line}");
        Successor(stream)
    }

    /// Receives messages up to and including the offer.
    fn sees_the_offer(&mut self) {
        let mut seen = Vec::new();
        while !seen.windows(b"\"message\":\"offer\"".len()).any(|part| part == b"\"message\":\"offer\"") {
            let mut byte = [0];
            assert_eq!(self.0.read(&mut byte).unwrap(), 1);
            seen.extend(byte);
        }
    }

    /// Sends `Ready`.
    fn is_ready(&mut self) {
        let ready = br#"{"message":"ready"}"#;
        self.0.write_all(&[&(ready.len() as u32).to_be_bytes()[..], &[0; 4], ready].concat()).unwrap();
    }
}

fn request(headers: &str) -> String {
    format!("POST /v1/takeover HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: 0\r\n\r\n")
}

#[test]
fn a_new_process_that_ends_before_ready_takes_nothing_over() {
    let mut place = Place::serve(&["a=file:DIR/a.img?size=1m"]);
    let mut client = place.nbd();
    for nth in 0..3 {
        let mut successor = Successor::ask(&place);
        match nth {
            0 => {}
            1 => successor.sees_the_offer(),
            _ => {
                successor.sees_the_offer();
                let refused = place.try_to_take_over(&["a=file:DIR/a.img?size=1m"]);
                let said = text(&refused.stderr);
                assert!(
                    said.contains("another process is taking over") && said.contains("try again"),
                    "{said}"
                );
                place.daemon.wait_for_line("a takeover was refused");
                successor.0.write_all(b"no message of ours").unwrap();
            }
        }
        drop(successor);
        place.daemon.wait_for_line("this daemon continues to serve");
        assert_eq!(client.write(0, 0, &[1; 512]), 0);
        assert_eq!(place.nbd().read(0, 512), [1; 512]);
    }
    let mut before = place.take_over();
    assert!(before.wait().success());
    assert_eq!(client.read(0, 512), [1; 512]);
}

#[test]
fn a_new_process_that_ends_after_ready_leaves_nothing_served_and_nothing_lost() {
    let mut place = Place::serve(&["a=file:DIR/a.img?size=1m"]);
    let mut client = place.nbd();
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    let mut successor = Successor::ask(&place);
    successor.sees_the_offer();
    successor.is_ready();
    drop(successor);
    assert!(client.is_closed());
    place.daemon.wait_for_line("has ended or is stuck");
    assert_eq!(place.daemon.wait().code(), Some(1));
    let mut before = place.take_over();
    before.wait();
    assert_eq!(place.nbd().read(0, 512), [1; 512]);
}

#[test]
fn a_daemon_that_is_killed_before_it_has_released_its_volumes_is_not_taken_over() {
    let args = ["a=fault:op=write,error=stuck:file:DIR/a.img?size=1m"];
    let mut place = Place::serve(&args);
    let mut client = place.nbd();
    client.request(WRITE, 0, 0, 512);
    client.send(&[1; 512]);
    let mut next = command(place.files.path(), &place.args).spawn().unwrap();
    place.daemon.wait_for_line("another process takes over");
    assert!(next.try_wait().unwrap().is_none(), "a write may still reach the file");
    place.daemon.signal(Signal::KILL);
    let mut said = String::new();
    next.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(ended(&mut next).code(), Some(2), "{said}");
    assert!(said.contains("the daemon has ended before it released its volumes"), "{said}");
}

#[test]
fn a_takeover_is_possible_only_at_the_control_socket() {
    let files = tempfile::tempdir().unwrap();
    let token = files.path().join("token");
    fs::write(&token, "secret-token-of-a-test-0123456789").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let token = token.display().to_string();
    let place =
        Place::serve(&["a=file:DIR/a.img?size=1m", "--api", "127.0.0.1:0", "--api-token-file", &token]);
    let answer = |mut stream: Box<dyn ReadWrite>, headers: &str| {
        stream.write_all(request(headers).as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    };
    let control = || Box::new(UnixStream::connect(place.path("control")).unwrap());
    let upgrade = "Connection: upgrade\r\nUpgrade: blockmux-takeover/1\r\n";
    assert!(answer(control(), "").starts_with("HTTP/1.1 422 "));
    let other = "Connection: upgrade\r\nUpgrade: blockmux-takeover/99\r\n";
    assert!(answer(control(), other).starts_with("HTTP/1.1 422 "));
    let api = place.daemon.json["api"].as_str().unwrap();
    let api =
        || Box::new(TcpStream::connect(api.trim_start_matches("http://").trim_end_matches('/')).unwrap());
    assert!(answer(api(), upgrade).starts_with("HTTP/1.1 401 "));
    let authorized = format!("{upgrade}Authorization: Bearer secret-token-of-a-test-0123456789\r\n");
    assert!(answer(api(), &authorized).starts_with("HTTP/1.1 409 "));
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

#[test]
fn the_api_is_taken_over_and_a_new_volume_and_a_new_listener_are_served() {
    let mut place = Place::serve(&["a=file:DIR/a.img?size=1m", "--iscsi", "127.0.0.1:0"]);
    let more = ["a=file:DIR/a.img?size=1m", "b=file:DIR/b.img?size=2m", "--nvme-tcp", "127.0.0.1:0"];
    place.args = at(place.files.path(), &more);
    let gone = place.daemon.urls_of("iscsi");
    let mut before = place.take_over();
    assert!(before.wait().success());
    let status = text(&place.ctl(&["status"]).stdout);
    assert!(status.lines().any(|line| line.starts_with("b ") && line.contains("  2 MiB  ")), "{status}");
    assert_eq!(place.daemon.urls_of("nvme+tcp").len(), 2);
    assert!(!blockmux(["info", &gone[0]]).status.success(), "that listener is not in the new config");
    let output = blockmux(["info", &place.daemon.urls_of("nvme+tcp")[1]]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn write_10() -> [u8; 10] {
    [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0]
}

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const WRITE_EXCLUSIVE: u8 = 1;
const READ_KEYS: u8 = 0;
const EPERM: u32 = 1;
