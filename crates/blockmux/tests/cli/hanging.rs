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
use std::thread;
use tempfile::TempDir;

/// A process with a lease of a file; the lease ends with it.
pub(crate) struct Lease {
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
    pub(crate) fn of_new(path: &Path) -> Option<Lease> {
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
    pub(crate) fn wait_until_wanted(&mut self) {
        self.wait_for("wanted\n");
    }

    pub(crate) fn wait_for(&mut self, expected: &str) {
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

/// A mounted file system (FUSE) with a file `disk.img` of 1 MiB, whose server does not answer the
/// calls that [`HangingFileSystem::hang`] names, until it names others or this is dropped.
pub(crate) struct HangingFileSystem {
    server: Child,
    path: PathBuf,
    /// The names of the calls that hang now (`hang`), and of those that did (`hung`).
    names: TempDir,
}

const FUSE_SERVER: &str = "
import ctypes, os, select, struct, sys
mounted, hang, hung = sys.argv[1:]
fuse = os.open('/dev/fuse', os.O_RDWR)
options = 'fd=%d,rootmode=40000,user_id=%d,group_id=%d' % (fuse, os.getuid(), os.getgid())
if ctypes.CDLL(None).mount(b'hanging', mounted.encode(), b'fuse', 0, options.encode()) != 0:
    sys.exit('mount')
calls = {1: 'lookup', 3: 'getattr', 4: 'setattr', 14: 'open', 15: 'read', 16: 'write', 17: 'statfs',
         18: 'release', 20: 'fsync', 25: 'flush', 27: 'opendir', 28: 'readdir', 29: 'releasedir', 35: 'create'}
files = {2: bytearray(1 << 20)}
names = {b'disk.img': 2}
waiting = []
def answer(unique, data=b'', error=0):
    try:
        os.write(fuse, struct.pack('<IiQ', 16 + len(data), -error, unique) + data)
    except OSError:
        pass
def attributes(node):
    size, mode = (4096, 0o40755) if node == 1 else (len(files[node]), 0o100600)
    owner = os.getuid(), os.getgid()
    return struct.pack('<QQQ24xIIIIIIIII', node, size, size // 512, 0, 0, 0, mode, 1, *owner, 0, 4096) + bytes(4)
def entry(node):
    return struct.pack('<QQQQII', node, 0, 0, 0, 0, 0) + attributes(node)
while True:
    words = open(hang).read().split()
    ready = [one for one in waiting if calls.get(one[0]) not in words and 'all' not in words]
    if ready:
        waiting.remove(ready[0])
        call, unique, node, body = ready[0]
    elif select.select([fuse], [], [], 0.02)[0]:
        request = os.read(fuse, 1 << 20)
        _, call, unique, node = struct.unpack('<IIQQ', request[:24])
        body = request[40:]
        if call != 26 and (calls.get(call) in words or 'all' in words):
            waiting.append((call, unique, node, body))
            print(calls.get(call), file=open(hung, 'a'))
            continue
    else:
        continue
    name = calls.get(call)
    if call == 26:
        answer(unique, struct.pack('<IIIIHHIIHHI', 7, 31, 0, 1 << 5, 12, 10, 1 << 17, 1, 0, 0, 0) + bytes(28))
        print('mounted', flush=True)
    elif name == 'lookup':
        known = names.get(body.rstrip(b'\\0'))
        answer(unique, entry(known)) if known else answer(unique, error=2)
    elif name == 'getattr':
        answer(unique, struct.pack('<QII', 0, 0, 0) + attributes(node))
    elif name == 'setattr':
        if struct.unpack('<I', body[:4])[0] & 8:
            size, = struct.unpack('<Q', body[16:24])
            files[node] = (files[node] + bytes(size))[:size]
        answer(unique, struct.pack('<QII', 0, 0, 0) + attributes(node))
    elif name in ('open', 'opendir'):
        answer(unique, struct.pack('<QII', node, 0, 0))
    elif name == 'create':
        node = names[body[16:].rstrip(b'\\0')] = max(files) + 1
        files[node] = bytearray()
        answer(unique, entry(node) + struct.pack('<QII', node, 0, 0))
    elif name == 'read':
        offset, size = struct.unpack('<QI', body[8:20])
        answer(unique, bytes(files[node][offset:offset + size]))
    elif name == 'write':
        offset, size = struct.unpack('<QI', body[8:20])
        files[node][offset:offset + size] = body[40:40 + size]
        answer(unique, struct.pack('<II', size, 0))
    elif name == 'statfs':
        answer(unique, struct.pack('<5Q4I', 1 << 20, 1 << 20, 1 << 20, 99, 99, 4096, 255, 4096, 0) + bytes(24))
    elif name:
        answer(unique)
    elif call not in (2, 36, 42):
        answer(unique, error=38)
";

impl HangingFileSystem {
    /// Mounts it at a directory; `None`, with a printed reason, where that is impossible.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    pub(crate) fn mount(path: &Path) -> Option<HangingFileSystem> {
        if !has("python3") {
            return None;
        }
        let names = tempfile::tempdir().unwrap();
        let [hang, hung] = ["hang", "hung"].map(|name| names.path().join(name));
        [&hang, &hung].iter().for_each(|path| fs::write(path, "").unwrap());
        let mut server = Command::new("python3");
        let server = server.args(["-c", FUSE_SERVER]).args([path, &hang, &hung]);
        let mut server = server.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            println!("skipped: FUSE cannot be mounted here");
            server.wait().unwrap();
            return None;
        }
        Some(HangingFileSystem { server, path: path.to_owned(), names })
    }

    /// From now on these calls hang, and those that hung before and are not named are answered.
    pub(crate) fn hang(&self, calls: &str) {
        let next = self.names.path().join("next");
        fs::write(&next, calls).unwrap();
        fs::rename(next, self.names.path().join("hang")).unwrap();
    }

    /// Waits until a call has hung so many times.
    pub(crate) fn wait_until_hung(&self, call: &str, times: usize) {
        let hung = || fs::read_to_string(self.names.path().join("hung")).unwrap();
        eventually(call, || hung().lines().filter(|line| *line == call).count() >= times);
    }
}

impl Drop for HangingFileSystem {
    fn drop(&mut self) {
        // Calls that hang fail when the server has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

/// A daemon that serves a volume without data, and a file whose file system hangs on demand.
struct OnHanging {
    // Dropped first, so that the daemon can end.
    file_system: HangingFileSystem,
    served: Configured,
}

impl OnHanging {
    /// Its config; `more` follows the volumes.
    fn config(listeners: &str, more: &str) -> String {
        format!("cores = 1\nnbd = [{listeners}]\n[[volume]]\nname = 'a'\nspec = 'null:1m'\n{more}")
    }

    fn serve(listeners: &str) -> Option<OnHanging> {
        let files = tempfile::tempdir().unwrap();
        let mounted = files.path().join("mounted");
        fs::create_dir(&mounted).unwrap();
        let file_system = HangingFileSystem::mount(&mounted)?;
        let served = Configured::serve_in(files, &OnHanging::config(listeners, ON_HANGING));
        Some(OnHanging { file_system, served })
    }

    /// Checks that other changes are made while the one whose text begins with `begin` runs.
    fn others_change_during(&self, begin: &str) {
        let socket = self.served.socket("control");
        query_all(&socket);
        self.served.said(&["add", "other=mem:1m"]);
        self.served.said(&["limit", "other", "iops=100"]);
        assert_eq!(action(&socket, begin).as_deref(), Some("running"));
    }
}

const ON_HANGING: &str = "[[volume]]\nname = 'f'\nspec = 'file:mounted/disk.img'\n";

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
    let reasons = ["the daemon stops", "the daemon is stopping", "cannot reach the daemon"];
    assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
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
    // The name is that of the volume which is open first.
    controlled.said(&["add", "far=mem:1m"]);
    let twice = controlled.refusal(&["add", "far=mem:1m"]);
    assert!(twice.contains("a volume with the name `far` exists already"), "{twice}");
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
    let reloading = start(&socket, &["reload"]);
    lease.wait_until_wanted();
    // A signal must not make the main thread hang either.
    served.daemon.signal(Signal::HUP);
    query_all(&socket);
    let (status, diff) = ask(&socket, "GET", "/v1/config/diff", "", "");
    let expected = format!("+ volume c: file:{}", leased.display());
    assert_eq!((status, &diff["changes"][0]["change"]), (200, &expected.into()));
    served.said(&["limit", "b", "iops=100"]);
    served.said(&["add", "d=mem:1m"]);
    let fragment = served.socket("fragment.toml");
    fs::write(&fragment, "[[volume]]\nname = 'e'\nspec = 'mem:1m'\n").unwrap();
    for command in [&["reload"][..], &["apply", fragment.to_str().unwrap()]] {
        let output = served.ctl(command);
        let (said, file) = (text(&output.stderr), served.config_path());
        assert_eq!(output.status.code(), Some(1), "{said}");
        let begin = format!("blockmux: a reload of {} from uid ", file.display());
        let opening = format!(" has been opening file:{} (volume `c`) for ", leased.display());
        assert!(said.starts_with(&begin) && said.contains(&opening), "{said}");
        assert!(said.ends_with(" s; try again when it is done\n"), "{said}");
    }
    // A save needs no turn to reload.
    served.write(&config(""));
    assert_eq!(served.said(&["save"]), "2 changes saved\n");
    assert_eq!(action(&socket, "reload").as_deref(), Some("running"));
    served.daemon.signal(Signal::TERM);
    assert!(served.daemon.wait().success());
    fails_by_the_stop(reloading);
    let records = fs::read_to_string(log).unwrap();
    assert!(records.lines().any(|line| line.contains(" flush ") && !line.contains("submitted")), "{records}");
    drop(lease);
}

#[test]
fn a_signal_during_a_reload_that_hangs_is_remembered_with_one_line_of_the_log() {
    let files = tempfile::tempdir().unwrap();
    let Some(mut lease) = Lease::of_new(&files.path().join("leased.img")) else { return };
    let volume = |name: &str, spec: &str| format!("[[volume]]\nname = '{name}'\nspec = '{spec}'\n");
    let config = |more: &str| format!("nbd = ['unix:a.sock']\n{}{more}", volume("a", "null:1m"));
    let mut served = Configured::serve_in(files, &config(""));
    let socket = served.socket("control");
    served.write(&config(&volume("c", "file:leased.img")));
    let reloading = start(&socket, &["reload"]);
    lease.wait_until_wanted();
    served.write(&config(&volume("d", "mem:1m")));
    for _ in 0..3 {
        served.daemon.signal(Signal::HUP);
        query_all(&socket);
    }
    drop(lease);
    assert!(text(&reloading.wait_with_output().unwrap().stdout).contains("+ volume c: "));
    let (mut log, done) = (String::new(), "config changed: reload protocol=\"api\" peer=\"SIGHUP\"");
    while !log.contains(done) {
        assert_ne!(served.daemon.stderr.read_line(&mut log).unwrap(), 0, "{log}");
    }
    let line = "SIGHUP: the config will be reloaded later, because a reload of ";
    assert_eq!(log.matches(line).count(), 1, "{log}");
    assert!(log.contains("- volume c; + volume d: mem:1m"), "{log}");
}

#[test]
fn a_path_that_does_not_answer_is_named_by_diff_and_check() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    hanging.file_system.hang("all");
    let dead = hanging.served.socket("mounted/disk.img");
    let expected = format!("volume `f`: {} does not answer", dead.display());
    let said = hanging.served.said(&["diff"]);
    assert!(said.starts_with(&format!("no changes\nwarning: {expected}")), "{said}");
    let mut check = Command::new(BLOCKMUX);
    let check = check.arg("check").arg(hanging.served.config_path());
    let mut check = check.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(check.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&expected), "{line}");
    // A thread in such a call keeps the process from ending.
    hanging.file_system.hang("");
    assert!(ended(&mut check).success());
}

#[test]
fn any_number_of_diffs_and_a_save_that_hang_delay_no_query() {
    let files = tempfile::tempdir().unwrap();
    let mounted = files.path().join("mounted");
    fs::create_dir(&mounted).unwrap();
    let config = "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let served = Configured::serve_in(files, config);
    let socket = served.socket("control");
    let Some(file_system) = HangingFileSystem::mount(&mounted) else { return };
    file_system.hang("all");
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
    let config = ask(&socket, "GET", "/v1/config", "", "").1;
    let names: Vec<_> = config["volume"].as_array().unwrap().iter().map(|own| own["name"].clone()).collect();
    assert!(names.contains(&"slow".into()), "it is the config before: {config}");
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

#[test]
fn a_removal_that_hangs_in_fstat_delays_no_other_change() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let socket = hanging.served.socket("control");
    hanging.file_system.hang("getattr");
    // The daemon looks at its files by itself, too.
    hanging.file_system.wait_until_hung("getattr", 1);
    let removing = start(&socket, &["remove", "f"]);
    hanging.file_system.wait_until_hung("getattr", 2);
    hanging.others_change_during("remove f");
    hanging.file_system.hang("");
    assert!(removing.wait_with_output().unwrap().status.success());
}

#[test]
fn a_reload_whose_last_flush_hangs_delays_no_other_change() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let socket = hanging.served.socket("control");
    hanging.file_system.hang("fsync");
    hanging.served.write(&OnHanging::config("'unix:a.sock'", ""));
    let reloading = start(&socket, &["reload"]);
    hanging.file_system.wait_until_hung("fsync", 1);
    hanging.others_change_during("reload");
    // The next reload does not wait either.
    assert!(hanging.served.said(&["reload"]).contains("- volume other"));
    hanging.file_system.hang("");
    assert!(reloading.wait_with_output().unwrap().status.success());
}

#[test]
fn a_core_that_hangs_in_open_delays_no_change_of_the_listeners() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock?volumes=f'") else { return };
    hanging.file_system.hang("open");
    let socket = hanging.served.socket("a.sock");
    let reading = thread::spawn(move || RawClient::connect(&socket).read(0, 512));
    hanging.file_system.wait_until_hung("open", 1);
    let listeners = "'unix:a.sock?volumes=f', 'unix:b.sock?volumes=a'";
    hanging.served.write(&OnHanging::config(listeners, ON_HANGING));
    hanging.served.said(&["reload"]);
    hanging.served.said(&["add", "other=mem:1m"]);
    hanging.file_system.hang("");
    assert_eq!(reading.join().unwrap(), [0; 512]);
    assert_eq!(hanging.served.nbd("b.sock").read(0, 512), [0; 512]);
}

#[test]
fn a_slice_that_hangs_delays_no_slice_of_another_file() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let socket = hanging.served.socket("control");
    let slice = |name: &str| {
        format!(
            "{name}=slice:0,512k:file:{}?size=1m",
            hanging.served.socket(&format!("{name}.img")).display()
        )
    };
    hanging.file_system.hang("create");
    let adding = start(&socket, &["add", &slice("h").replace("h.img", "mounted/h.img")]);
    hanging.file_system.wait_until_hung("create", 1);
    hanging.served.said(&["add", &slice("g")]);
    assert_eq!(action(&socket, "add h").as_deref(), Some("running"));
    hanging.file_system.hang("");
    assert!(adding.wait_with_output().unwrap().status.success());
    // Further slices share the open file.
    let rest = slice("g").replace("g=slice:0,512k", "rest=slice:512k");
    hanging.served.said(&["add", &rest]);
}

#[test]
fn a_path_that_hangs_keeps_no_other_deletion_from_being_noticed() {
    let Some(mut hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let other = hanging.served.socket("other.img");
    hanging.served.said(&["add", &format!("other=file:{}?size=1m", other.display())]);
    hanging.file_system.hang("getattr");
    hanging.file_system.wait_until_hung("getattr", 1);
    fs::remove_file(&other).unwrap();
    hanging.served.daemon.wait_for_line("other.img: was deleted or renamed");
}

#[test]
fn a_resize_that_hangs_in_ftruncate_says_that_it_may_still_happen() {
    let Some(mut hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    hanging.file_system.hang("setattr");
    let resizing = start(&hanging.served.socket("control"), &["resize", "f", "512k", "--shrink"]);
    hanging.file_system.wait_until_hung("setattr", 1);
    hanging.served.daemon.signal(Signal::TERM);
    hanging.served.daemon.wait_for_line(
        "resizing volume `f`: the daemon stops before it is done, and the change may still happen",
    );
    fails_by_the_stop(resizing);
}

#[test]
fn a_takeover_whose_flush_hangs_does_not_delay_a_signal() {
    let Some(mut hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let control = format!("unix:{}", hanging.served.socket("control").display());
    hanging.served.said(&["log", "control=info"]);
    hanging.file_system.hang("fsync");
    let mut next = Command::new(BLOCKMUX);
    next.args(["serve", "--control", &control, "--takeover", &control, "--config"]);
    next.arg(hanging.served.config_path()).stdout(Stdio::null()).stderr(Stdio::null());
    next.env("XDG_STATE_HOME", hanging.served.daemon.directory.path().join("state"));
    let mut next = next.spawn().unwrap();
    hanging.file_system.wait_until_hung("fsync", 1);
    hanging.served.daemon.signal(Signal::TERM);
    let mut line = String::new();
    while !line.contains("stopping; ") {
        line.clear();
        assert_ne!(hanging.served.daemon.stderr.read_line(&mut line).unwrap(), 0);
        assert!(!line.contains("a takeover was refused"), "the flush was waited for");
    }
    drop(hanging);
    assert!(!ended(&mut next).success());
}

#[test]
fn an_edit_that_hangs_in_open_is_refused_if_a_session_has_begun_meanwhile() {
    let files = tempfile::tempdir().unwrap();
    let leased = files.path().join("leased.img");
    let Some(mut lease) = Lease::of_new(&leased) else { return };
    let served = Configured::serve_in(files, &OnHanging::config("'unix:a.sock'", ""));
    let socket = served.socket("control");
    let spec = format!("spec=file:{}", leased.display());
    let change = ["set", "volume", "a", &spec];
    let changing = start(&socket, &change);
    lease.wait_until_wanted();
    let mut client = served.nbd("a.sock");
    let sessions = || ask(&socket, "GET", "/v1/sessions", "", "").1.as_array().unwrap().len();
    eventually("the session is listed", || sessions() == 1);
    drop(lease);
    let changed = changing.wait_with_output().unwrap();
    let said = text(&changed.stderr);
    assert!(!changed.status.success() && said.contains("is in use by nbd client "), "{said}");
    assert!(said.contains("disconnect them, or change it with --force"), "{said}");
    assert_eq!(client.read(0, 512), [0; 512], "it keeps its volume");
    drop(client);
    eventually("the session has ended", || sessions() == 0);
    assert!(served.said(&change).contains("~ volume a: spec"), "the file is not open any longer");
}

#[test]
fn a_command_that_was_overtaken_keeps_what_it_has_opened() {
    let Some(hanging) = OnHanging::serve("'unix:a.sock'") else { return };
    let socket = hanging.served.socket("control");
    let path = hanging.served.socket("mounted/g.img");
    hanging.file_system.hang("create");
    let adding = start(&socket, &["add", &format!("g=file:{}?size=1m", path.display())]);
    hanging.file_system.wait_until_hung("create", 1);
    hanging.others_change_during("add g");
    // To close the file and to open it again would hang.
    hanging.file_system.hang("open release");
    let added = adding.wait_with_output().unwrap();
    hanging.file_system.hang("");
    assert!(added.status.success(), "{}", text(&added.stderr));
}
