//! `/healthz` and `/readyz` are answered while a daemon starts, stops and is taken over, also while
//! a path of a volume hangs.

use crate::api::{ask, exchange, write_token};
use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::hanging::{HangingFileSystem, Lease};
use crate::program::{BLOCKMUX, blockmux, ended, text};
use crate::raw_client::{READ, RawClient};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

#[test]
fn a_daemon_that_hangs_in_open_at_its_start_answers_probes_and_then_serves() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let Some(mut lease) = Lease::of_new(&path("leased.img")) else { return };
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "--json", &format!("file:{}", path("leased.img").display())]);
    command.args(["--nbd", &format!("unix:{}", path("nbd.sock").display())]);
    command.args(["--control", &format!("unix:{}", path("control").display())]);
    let mut daemon = command.stdout(Stdio::piped()).spawn().unwrap();
    lease.wait_until_wanted();
    let get = |path: &str| ask(&directory.path().join("control"), "GET", path, "", "");
    let starting = json!({ "error": {
        "code": "unavailable", "message": "the daemon is starting", "hint": "try again later"
    } });
    assert_eq!(get("/healthz"), (200, json!({ "state": "starting" })));
    assert_eq!(get("/readyz"), (503, starting.clone()));
    assert_eq!(get("/v1/version").0, 200);
    assert_eq!(get("/v1/status"), (503, starting));
    let control = format!("unix:{}", path("control").display());
    let said = text(&blockmux(["ctl", &control, "status"]).stderr);
    assert!(said.contains("the daemon is starting; try again later"), "{said}");
    drop(lease);
    let mut ready = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.contains("nbd.sock"), "{ready}");
    assert_eq!(get("/readyz"), (200, json!({ "state": "serving" })));
    kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
    assert!(ended(&mut daemon).success());
    assert!(!path("control").exists(), "the socket is removed");
}

#[test]
fn a_daemon_that_waits_for_io_in_flight_at_its_end_answers_probes() {
    let controlled = Controlled::serve(&["delay:1h:null:1m"]);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    client.request(READ, 0, 0, 512);
    let get = |path: &str| ask(&controlled.socket(), "GET", path, "", "");
    let in_flight = || get("/v1/volumes/disk0").1["users"] == json!(1);
    eventually("the volume is in use", in_flight);
    controlled.daemon.signal(Signal::TERM);
    // The API has ended when it says so about a path of its own.
    eventually("the daemon stops", || get("/v1/status").0 == 503);
    assert_eq!(get("/healthz"), (200, json!({ "state": "stopping" })));
    let (status, said) = get("/readyz");
    assert_eq!((status, &said["error"]["message"]), (503, &json!("the daemon is stopping")));
}

/// A daemon that can be taken over, with its control socket and its TCP listener of the API.
struct Taken {
    directory: TempDir,
    token: String,
    daemon: Daemon,
}

impl Taken {
    /// Serves volumes, in which `DIR` stands for the directory.
    fn serve(directory: TempDir, volumes: &[&str]) -> Taken {
        let token = write_token(directory.path(), "token-of-the-administrator");
        let daemon = Daemon::of_child(Taken::start(directory.path(), &token, volumes));
        Taken { directory, token, daemon }
    }

    fn start(directory: &Path, token: &str, volumes: &[&str]) -> Child {
        let socket = |name: &str| format!("unix:{}", directory.join(name).display());
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "--json", "--log", "control=info", "--nbd", &socket("nbd")]);
        command.args(["--control", &socket("control"), "--takeover", &socket("control")]);
        command.args(["--api", "127.0.0.1:0", "--api-token-file", token]);
        command.args(volumes.iter().map(|volume| volume.replace("DIR", &directory.display().to_string())));
        command.env("XDG_STATE_HOME", directory.join("state"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Starts a process that takes over.
    fn next(&self, volumes: &[&str]) -> Child {
        Taken::start(self.directory.path(), &self.token, volumes)
    }

    fn api(&self) -> String {
        let url = self.daemon.json["api"].as_str().unwrap();
        url.trim_start_matches("http://").trim_end_matches('/').to_owned()
    }

    /// Asks for a path without credentials at both listeners of the API.
    fn probes(&self, path: &str) -> [Probe; 2] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let control = UnixStream::connect(self.directory.path().join("control")).unwrap();
        let tcp = TcpStream::connect(self.api()).unwrap();
        let both: [Box<dyn ReadWrite>; 2] = [Box::new(control), Box::new(tcp)];
        both.map(|mut stream| {
            stream.write_all(request.as_bytes()).unwrap();
            Probe(stream)
        })
    }

    /// Checks what both listeners answer at `/healthz` and `/readyz`.
    fn says(&self, state: &str, is_ready: u16) {
        for probe in self.probes("/healthz") {
            assert_eq!(probe.answer(), (200, json!({ "state": state })));
        }
        for probe in self.probes("/readyz") {
            assert_eq!(probe.answer().0, is_ready, "{state}");
        }
    }
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

/// A request whose response has not been read.
struct Probe(Box<dyn ReadWrite>);

impl Probe {
    fn answer(self) -> (u16, Value) {
        let (status, body) = exchange(self.0, b"");
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }
}

#[test]
fn probes_are_answered_by_the_daemon_while_the_process_that_takes_over_opens_a_new_volume() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mut lease) = Lease::of_new(&directory.path().join("leased.img")) else { return };
    let mut taken = Taken::serve(directory, &["a=file:DIR/a.img?size=1m"]);
    let next = taken.next(&["a=file:DIR/a.img?size=1m", "b=file:DIR/leased.img"]);
    lease.wait_until_wanted();
    taken.says("serving", 200);
    drop(lease);
    let mut before = std::mem::replace(&mut taken.daemon, Daemon::of_child(next));
    taken.says("serving", 200);
    assert!(before.wait().success());
    taken.says("serving", 200);
}

/// A file system at `mounted` in a new directory; `None`, with a printed reason, where that is
/// impossible.
fn hanging_file_system() -> Option<(HangingFileSystem, TempDir)> {
    let directory = tempfile::tempdir().unwrap();
    let mounted = directory.path().join("mounted");
    fs::create_dir(&mounted).unwrap();
    Some((HangingFileSystem::mount(&mounted)?, directory))
}

#[test]
fn probes_are_answered_while_the_process_that_takes_over_opens_what_the_daemon_has_released() {
    let Some((file_system, directory)) = hanging_file_system() else { return };
    // The daemon need not flush it, so only the new process opens it again.
    let volumes = ["a=file:DIR/mounted/disk.img?readonly=on"];
    let mut taken = Taken::serve(directory, &volumes);
    file_system.hang("open");
    let next = taken.next(&volumes);
    file_system.wait_until_hung("open", 1);
    taken.says("starting", 503);
    file_system.hang("");
    let mut before = std::mem::replace(&mut taken.daemon, Daemon::of_child(next));
    taken.says("serving", 200);
    assert!(before.wait().success());
}

#[test]
fn probes_are_answered_while_the_last_flush_of_a_daemon_hangs() {
    let Some((file_system, directory)) = hanging_file_system() else { return };
    let mut taken = Taken::serve(directory, &["a=file:DIR/mounted/disk.img"]);
    file_system.hang("fsync");
    taken.daemon.signal(Signal::TERM);
    file_system.wait_until_hung("fsync", 1);
    taken.says("stopping", 503);
    file_system.hang("");
    assert!(taken.daemon.wait().success());
}
