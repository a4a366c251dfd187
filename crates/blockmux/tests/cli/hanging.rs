//! Paths and servers that hang: commands, queries and the end of the daemon do not wait for them.
//!
//! A lease (fcntl(2), `F_SETLEASE`) makes open(2) of a regular file wait until its holder, another
//! process, gives it back: as a network file system without its server does.

use crate::api::ask;
use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, ended, has, text};
use crate::raw_client::{READ, RawClient};
use crate::reload::Configured;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A process with a lease of a file; the lease ends with it.
struct Lease {
    holder: Child,
    lines: BufReader<ChildStdout>,
}

const HOLDER: &str = "
import fcntl, signal, sys
file = open(sys.argv[1], 'r+')
signal.signal(signal.SIGIO, lambda *_: print('wanted', flush=True))
fcntl.fcntl(file, 1024, fcntl.F_WRLCK)
print('held', flush=True)
while True: signal.pause()
";

impl Lease {
    /// Creates a file of 1 MiB and takes its lease; `None`, with a printed reason, without Python.
    fn of_new(path: &Path) -> Option<Lease> {
        if !has("python3") {
            return None;
        }
        fs::write(path, [0; 1 << 20]).unwrap();
        let mut holder = Command::new("python3");
        let mut holder = holder.args(["-c", HOLDER]).arg(path).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(holder.stdout.take().unwrap());
        let mut lease = Lease { holder, lines };
        lease.wait_for("held\n");
        Some(lease)
    }

    /// Waits until another process hangs in open(2) of the file.
    fn wait_until_wanted(&mut self) {
        self.wait_for("wanted\n");
    }

    fn wait_for(&mut self, expected: &str) {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert_eq!(line, expected);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A mounted file system (FUSE) whose server answers nothing but the mount itself: every path in it
/// hangs until this is dropped.
struct SilentFileSystem {
    server: Child,
    path: PathBuf,
}

const SILENT_SERVER: &str = "
import ctypes, os, struct, sys
fuse = os.open('/dev/fuse', os.O_RDWR)
options = 'fd=%d,rootmode=40000,user_id=0,group_id=0' % fuse
if ctypes.CDLL(None).mount(b'silent', sys.argv[1].encode(), b'fuse', 0, options.encode()) != 0:
    sys.exit('mount')
while True:
    _, call, unique = struct.unpack('<IIQ', os.read(fuse, 1 << 18)[:16])
    if call == 26:
        started = struct.pack('<IIIIHHIIHHI', 7, 23, 0, 0, 12, 10, 1 << 17, 1, 0, 0, 0) + bytes(28)
        os.write(fuse, struct.pack('<IiQ', 16 + len(started), 0, unique) + started)
        print('mounted', flush=True)
";

impl SilentFileSystem {
    /// Mounts it at a directory; `None`, with a printed reason, where that is impossible.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    fn mount(path: &Path) -> Option<SilentFileSystem> {
        if !has("python3") {
            return None;
        }
        let mut server = Command::new("python3");
        let mut server = server.args(["-c", SILENT_SERVER]).arg(path).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            println!("skipped: FUSE cannot be mounted here");
            server.wait().unwrap();
            return None;
        }
        Some(SilentFileSystem { server, path: path.to_owned() })
    }
}

impl Drop for SilentFileSystem {
    fn drop(&mut self) {
        // Calls that hang fail when the server has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

/// Starts a `ctl` command that is expected to wait.
fn start(socket: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(BLOCKMUX);
    command.arg("ctl").arg(format!("unix:{}", socket.display())).args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Checks that a command has failed because the daemon has stopped: it was told so, or it can no
/// longer reach the daemon.
fn fails_by_the_stop(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.contains("the daemon stops") || said.contains("cannot reach the daemon"), "{said}");
}

/// Makes all queries, over HTTP, because `ctl` would wait as long as the daemon.
fn query_all(socket: &Path) {
    let paths = ["status", "sessions", "volumes", "config", "log", "actions", "history"];
    for path in paths {
        assert_eq!(ask(socket, "GET", &format!("/v1/{path}"), "", "").0, 200, "{path}");
    }
    assert_eq!(ask(socket, "GET", "/metrics", "", "").0, 200);
}

/// The state of the first action whose text begins with `begin`.
fn action(socket: &Path, begin: &str) -> Option<String> {
    let (_, actions) = ask(socket, "GET", "/v1/actions", "", "");
    let actions = actions.as_array().unwrap().iter();
    let mut meant = actions.filter(|action| action["action"].as_str().unwrap().starts_with(begin));
    meant.next().map(|action| action["state"].as_str().unwrap().to_owned())
}

#[test]
fn a_log_to_a_pipe_is_refused_at_the_start_and_by_add() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let volume = format!("log:{}:mem:1m", pipe.display());
    let refusal = format!("log:{}: is not a regular file; give a regular file", pipe.display());
    let output = blockmux(["serve", &volume, "--nbd", "127.0.0.1:0"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(2), format!("blockmux: {refusal}\n")));
    let controlled = Controlled::serve(&["a=mem:1m"]);
    assert!(controlled.refusal(&["add", &volume]).contains(&refusal));
    let null = controlled.refusal(&["add", "log:/dev/null:mem:1m"]);
    assert!(null.contains("log:/dev/null: is not a regular file"), "{null}");
}

#[test]
fn a_server_that_does_not_answer_delays_neither_other_commands_nor_the_end_of_the_daemon() {
    let mut controlled = Controlled::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let silent = controlled.directory.path().join("silent");
    let listener = UnixListener::bind(&silent).unwrap();
    let socket = controlled.socket();
    let url = format!("far=nbd+unix:///x?socket={}", silent.display());
    let adding = start(&socket, &["add", &url]);
    let (_connection, _) = listener.accept().unwrap();
    query_all(&socket);
    controlled.said(&["resize", "a", "16m"]);
    controlled.said(&["add", "b=mem:1m"]);
    controlled.said(&["limit", "a", "iops=100"]);
    controlled.said(&["attach", "b", "iqn.2026-11.blockmux:a", "5"]);
    controlled.said(&["detach", "iqn.2026-11.blockmux:a", "5"]);
    controlled.said(&["remove", "b"]);
    let twice = controlled.refusal(&["add", "far=mem:1m"]);
    assert!(twice.contains("a volume with the name `far` is being opened"), "{twice}");
    assert_eq!(action(&socket, "add far=").as_deref(), Some("running"));
    controlled.daemon.signal(Signal::TERM);
    assert!(controlled.daemon.wait().success());
    fails_by_the_stop(adding);
}

#[test]
fn a_reload_that_hangs_in_open_delays_neither_other_commands_nor_the_last_flush_of_other_volumes() {
    let files = tempfile::tempdir().unwrap();
    let (leased, log) = (files.path().join("leased.img"), files.path().join("b.log"));
    let Some(mut lease) = Lease::of_new(&leased) else { return };
    let config = |more: &str| {
        format!(
            "nbd = ['unix:a.sock']\n[[volume]]\nname = 'b'\nspec = 'log:b.log:file:b.img?size=1m'\n{more}"
        )
    };
    let mut served = Configured::serve_in(files, &config(""));
    let socket = served.socket("control");
    served.write(&config("[[volume]]\nname = 'c'\nspec = 'file:leased.img'\n"));
    // A signal must not make the main thread hang either.
    served.daemon.signal(Signal::HUP);
    lease.wait_until_wanted();
    let reloading = start(&socket, &["reload"]);
    eventually("the reload has begun", || action(&socket, "reload").is_some());
    query_all(&socket);
    let (status, diff) = ask(&socket, "GET", "/v1/config/diff", "", "");
    let expected = format!("+ volume c: file:{}", leased.display());
    assert_eq!((status, &diff["changes"][0]["change"]), (200, &expected.into()));
    served.said(&["limit", "b", "iops=100"]);
    served.said(&["add", "d=mem:1m"]);
    assert_eq!(action(&socket, "reload").as_deref(), Some("running"));
    served.daemon.signal(Signal::TERM);
    assert!(served.daemon.wait().success());
    fails_by_the_stop(reloading);
    let records = fs::read_to_string(log).unwrap();
    assert!(records.lines().any(|line| line.contains(" flush ") && !line.contains("submitted")), "{records}");
    drop(lease);
}

#[test]
fn any_number_of_diffs_and_a_save_that_hang_delay_no_query() {
    let files = tempfile::tempdir().unwrap();
    let mounted = files.path().join("mounted");
    fs::create_dir(&mounted).unwrap();
    let config = "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let served = Configured::serve_in(files, config);
    let socket = served.socket("control");
    let Some(file_system) = SilentFileSystem::mount(&mounted) else { return };
    served.write(&format!("include = ['mounted/*.toml']\n{config}"));
    let saving = start(&socket, &["save"]);
    eventually("the save has begun", || action(&socket, "save").is_some());
    let mut diffs: Vec<_> = (0..MANY).map(|_| start(&socket, &["diff"])).collect();
    // Those that may not hang are refused at once.
    while diffs.iter_mut().filter_map(|diff| diff.try_wait().unwrap()).count() < MANY - MAX_READINGS {
        query_all(&socket);
    }
    query_all(&socket);
    served.said(&["limit", "a", "iops=100"]);
    drop(file_system);
    let said = |child: Child| text(&child.wait_with_output().unwrap().stderr);
    assert!(said(saving).contains("mounted"));
    let busy = "16 requests read the config file already; try again later";
    let (busy, others): (Vec<_>, Vec<_>) = diffs.into_iter().map(said).partition(|said| said.contains(busy));
    assert_eq!((busy.len(), others.len()), (MANY - MAX_READINGS, MAX_READINGS), "{others:?}");
}

/// More than the API has threads.
const MANY: usize = 80;
/// The number of diffs that may read the config file at the same time.
const MAX_READINGS: usize = 16;

#[test]
fn a_signal_ends_a_daemon_that_hangs_in_open_at_its_start() {
    let directory = tempfile::tempdir().unwrap();
    let leased = directory.path().join("leased.img");
    let Some(mut lease) = Lease::of_new(&leased) else { return };
    let socket = directory.path().join("nbd.sock");
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "mem:1m", &format!("file:{}", leased.display())]);
    let mut daemon = command.args(["--nbd", &format!("unix:{}", socket.display())]).spawn().unwrap();
    lease.wait_until_wanted();
    kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
    assert!(ended(&mut daemon).success());
    assert!(!socket.exists(), "the socket is removed");
    drop(lease);
}

#[test]
fn queries_are_answered_while_a_reload_waits_for_io_in_flight() {
    let config = |limits: &str, more: &str| {
        format!(
            "nbd = ['unix:a.sock?volumes=slow,a']\n{more}[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{limits}"
        )
    };
    let slow = "[[volume]]\nname = 'slow'\nspec = 'delay:1h:null:1m'\n";
    let served = Configured::serve(&config("", slow));
    let socket = served.socket("control");
    let mut client = served.nbd("a.sock");
    client.request(READ, 0, 0, 512);
    served.write(&config("limits = { iops = 100 }\n", "").replace("slow,", ""));
    let mut reloading = start(&socket, &["reload"]);
    // The reload sets limits before it waits for I/O.
    let limits = || ask(&socket, "GET", "/v1/volumes/a", "", "").1["limits"].clone();
    eventually("the new config takes effect", || limits() != Value::Null);
    query_all(&socket);
    let config = ask(&socket, "GET", "/v1/config", "", "").1["text"].as_str().unwrap().to_owned();
    assert!(config.contains("name = \"slow\""), "it is the config before: {config}");
    assert_eq!(ask(&socket, "GET", "/v1/config/diff", "", "").0, 200);
    assert_eq!(action(&socket, "reload").as_deref(), Some("running"));
    // The read never completes.
    drop(served);
    reloading.wait().unwrap();
}

#[test]
fn a_log_that_nobody_reads_does_not_keep_the_daemon_from_ending() {
    let mut daemon = Daemon::serve(&["log:-:mem:1m"]);
    let mut client = RawClient::connect(&daemon.socket());
    // More records than a pipe holds.
    for _ in 0..4096 {
        assert_eq!(client.read(0, 512).len(), 512);
    }
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
}
