//! Hostile peers and failing environments: their cost for the daemon and for clients is limited.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, end_by, text};
use crate::raw_client::{FUA, READ, RawClient, WRITE};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;
use tempfile::TempDir;

#[test]
fn a_write_without_data_reserves_no_memory() {
    let daemon = Daemon::serve(&["mem:64m", "--cores", "1"]);
    // Buffers of completed writes are returned and do not hide the measurement.
    for _ in 0..4 {
        assert_eq!(RawClient::connect(&daemon.socket()).write(0, 0, &vec![1; 16 << 20]), 0);
    }
    let before = daemon.resident();
    let mut clients: Vec<_> = (0..16).map(|_| RawClient::connect(&daemon.socket())).collect();
    for (nth, client) in clients.iter_mut().enumerate() {
        client.request(WRITE, 0, 0, if nth % 2 == 0 { 32 << 20 } else { 12 << 20 });
        client.send(&[7; 1000]);
    }
    // A later client is served, so all earlier ones have been processed.
    assert_eq!(RawClient::connect(&daemon.socket()).write(0, 0, &[1; 512]), 0);
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for 16 kB");
}

#[test]
fn a_disconnect_within_a_request_header_is_logged() {
    let mut daemon = Daemon::serve(&["mem:1m"]);
    RawClient::connect(&daemon.socket()).send(&[0x25, 0x60, 0x95, 0x13, 0]);
    daemon.wait_for_line("connection lost: peer closed the connection in the middle of a message");
}

#[test]
fn a_lack_of_file_descriptors_is_logged_once() {
    let mut daemon = Daemon::serve(&["delay:500ms:mem:1m", "--cores", "1"]);
    let mut first = RawClient::connect(&daemon.socket());
    let limit = getrlimit(Resource::Nofile);
    prlimit(Some(daemon.pid()), Resource::Nofile, Rlimit { current: Some(64), ..limit }).unwrap();
    let crowd: Vec<_> = (0..100).map(|_| UnixStream::connect(daemon.socket()).unwrap()).collect();
    daemon.wait_for_line("cannot accept for now: Too many open files");
    // This takes as long as several attempts to accept.
    assert_eq!(first.write(0, 0, &[1; 512]), 0);
    drop(crowd);
    assert_eq!(RawClient::connect(&daemon.socket()).read(0, 512), [1; 512]);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let mut rest = String::new();
    daemon.stderr.read_to_string(&mut rest).unwrap();
    // The lack may recur while clients disconnect, but is not logged at each attempt, 20 per
    // second.
    assert!(rest.matches("cannot accept").count() <= 3, "{rest}");
}

#[test]
fn connections_are_refused_before_the_limit_of_address_space_is_reached() {
    let mut daemon = Daemon::serve(&["mem:1m", "--cores", "1"]);
    let mut first = RawClient::connect(&daemon.socket());
    assert_eq!(first.write(0, 0, &[1; 512]), 0);
    let mapped = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid().as_raw_nonzero())).unwrap();
    let mapped = mapped.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let limit = Rlimit { current: Some(mapped + (16 << 20)), ..getrlimit(Resource::As) };
    prlimit(Some(daemon.pid()), Resource::As, limit).unwrap();
    let crowd: Vec<_> = (0..100).map(|_| UnixStream::connect(daemon.socket()).unwrap()).collect();
    daemon.wait_for_line("MiB of address space are left; raise its limit (RLIMIT_AS)");
    drop(crowd);
    assert_eq!(first.read(0, 512), [1; 512]);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
}

#[test]
fn mapped_memory_is_not_counted_twice_under_an_address_space_limit() {
    // A RAM volume takes most of the address space.
    for (limit_kib, is_enough) in [(1_600_000, true), (1_100_000, false)] {
        let serve = format!("ulimit -v {limit_kib}; exec {BLOCKMUX} serve mem:1g --cores 1 --run true");
        let output = Command::new("sh").arg("-c").arg(serve).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(if is_enough { 0 } else { 2 }), "{limit_kib}: {said}");
        assert_eq!(said.contains("RLIMIT_AS") && said.contains("raise the limit"), !is_enough, "{said}");
    }
}

#[test]
fn buffers_of_clients_that_do_not_read_leave_address_space_for_new_ones() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("socket"));
    std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let (disk, listener) = (disk.display(), socket.display());
    let serve =
        format!("ulimit -v 400000; exec {BLOCKMUX} serve --json file:{disk} --cores 1 --nbd unix:{listener}");
    let mut command = Command::new("sh");
    command.arg("-c").arg(serve).stdout(Stdio::piped()).stderr(Stdio::piped());
    let daemon = Daemon::spawn_in(directory, &mut command);
    let hogs: Vec<_> = (0..8)
        .map(|_| {
            let mut hog = RawClient::connect(&socket);
            for _ in 0..4 {
                hog.request(READ, 0, 0, 32 << 20);
            }
            hog
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(RawClient::connect(&socket).read(0, 1 << 20), vec![0; 1 << 20]);
    }
    drop((hogs, daemon));
}

#[test]
fn a_line_of_the_log_is_written_in_one_piece() {
    // One write is one datagram.
    let (log, stderr) = std::os::unix::net::UnixDatagram::pair().unwrap();
    log.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "mem:1m", "--cores", "1", "--nbd", "127.0.0.1:0"]);
    let stderr = Stdio::from(std::os::fd::OwnedFd::from(stderr));
    let mut child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
    let mut line = [0; 4096];
    let count = log.recv(&mut line).unwrap();
    let line = text(&line[..count]);
    end_by(&mut child, Signal::TERM);
    assert!(line.contains("Z  WARN not served: ") && line.ends_with('\n'), "{line:?}");
}

#[test]
fn a_log_that_is_not_read_or_closed_does_not_block_clients() {
    for is_closed in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (log, stderr) = std::io::pipe().unwrap();
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "mem:1m", "--cores", "1", "--nbd"]).arg(format!("unix:{}", path.display()));
        let mut child = command.stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        // Only the child has the other end.
        drop(command);
        BufReader::new(child.stdout.take().unwrap()).lines().find(|line| line.as_ref().unwrap() == "ready");
        let log = (!is_closed).then_some(log);
        let mut other = RawClient::connect(&path);
        // The messages of so many clients do not fit into the pipe.
        for _ in 0..2000 {
            let mut socket = UnixStream::connect(&path).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = socket.write_all(b"GET / HTTP/1.1\r\n\r\n");
            let _ = socket.read_to_end(&mut Vec::new());
            assert_eq!(other.write(0, 0, &[1; 512]), 0);
        }
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
        if let Some(mut log) = log {
            let mut said = String::new();
            log.read_to_string(&mut said).unwrap();
            assert!(said.contains("client flag that was not offered"), "{said}");
        }
    }
}

#[test]
fn a_write_beyond_the_file_size_limit_fails_and_the_daemon_continues() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let daemon = Daemon::serve(&[&format!("file:{}", path.display())]);
    let limit = Rlimit { current: Some(1 << 20), ..getrlimit(Resource::Fsize) };
    prlimit(Some(daemon.pid()), Resource::Fsize, limit).unwrap();
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(FUA, 2 << 20, &[1; 4096]), ENOSPC);
    assert_eq!(client.write(FUA, 0, &[1; 4096]), 0);
    assert_eq!(client.read(2 << 20, 512), [0; 512]);
}

#[test]
fn an_endless_config_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("long");
    std::fs::File::create(&long).unwrap().set_len(1 << 40).unwrap();
    for (path, reason) in [
        (long.to_str().unwrap(), "all files together are longer than 4 MiB"),
        ("/dev/zero", "is not a regular file; give a regular file"),
    ] {
        let output = blockmux(["serve", "--config", path]);
        let expected = format!("blockmux: cannot read config file {path}: {reason}; check its path\n");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(2), expected));
    }
}

#[test]
fn a_copy_of_a_file_to_itself_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (file, link) = (directory.path().join("disk"), directory.path().join("link"));
    std::fs::write(&file, [7; 4096]).unwrap();
    std::fs::hard_link(&file, &link).unwrap();
    let [file, link] = [file, link].map(|path| format!("file:{}", path.display()));
    let output = blockmux(["copy", "--overwrite", &file, &link]);
    let expected =
        format!("blockmux: {file}: source and destination are the same; give another destination\n");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(2), expected));
}

#[test]
fn a_server_that_breaks_every_session_is_abandoned_with_the_reason() {
    // A reply without a request.
    let server =
        Server::start(1 << 20, |socket, _| socket.write_all(b"\x67\x44\x66\x98\0\0\0\0wrong in").is_ok());
    let output = server.copied();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("volume is out of reach: peer "), "{}", text(&output.stderr));
}

#[test]
fn a_server_that_disconnects_at_every_request_is_abandoned() {
    let output = Server::start(1 << 20, |_, _| false).copied();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("volume is out of reach: "), "{}", text(&output.stderr));
}

#[test]
fn sessions_with_changed_or_refused_exports_are_closed_in_order() {
    for is_refused in [false, true] {
        let ((tell, told), asked) = (mpsc::channel(), Arc::new(AtomicU64::new(0)));
        let server = Server::listen(move |mut socket| {
            // The query reports 1 MiB; the next connection finds another size or is refused.
            let mib = 1 + asked.fetch_add(1, Ordering::Relaxed).min(1);
            let info = [&[0, 0][..], &(mib << 20).to_be_bytes(), &[0, 1]].concat();
            let is_told = converse(&mut socket, |option| match option {
                7 if is_refused => Some(vec![(1 << 31 | 2, vec![])]),
                6 | 7 => Some(vec![(3, info.clone()), (1, vec![])]),
                _ => Some(vec![(1 << 31 | 1, vec![])]),
            });
            if is_told {
                let mut message = Vec::new();
                let _ = socket.read_to_end(&mut message);
                tell.send(message).unwrap();
            }
        });
        assert_eq!(server.copied().status.code(), Some(1));
        let message = told.recv_timeout(Duration::from_secs(10)).unwrap();
        let expected = if is_refused { OPT_ABORT } else { CMD_DISC };
        assert_eq!(message.get(..expected.len()), Some(expected));
    }
}

#[test]
fn a_copy_closes_every_connection_in_order_even_during_the_handshake() {
    let ((tell, told), asked) = (mpsc::channel(), Arc::new(AtomicU64::new(0)));
    let (begun, over) = (asked.clone(), Arc::new((Mutex::new(false), Condvar::new())));
    let server = Server::listen(move |mut socket| {
        let nth = asked.fetch_add(1, Ordering::Relaxed);
        // With NBD_FLAG_CAN_MULTI_CONN.
        let info = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &[1, 1]].concat();
        let is_told = converse(&mut socket, |option| {
            // The first connection queries, the second copies, the others stay in their handshake.
            if nth > 1 {
                drop(over.1.wait_while(over.0.lock().unwrap(), |over| !*over));
            }
            match option {
                2 => tell.send(()).unwrap(),
                6 | 7 => return Some(vec![(3, info.clone()), (1, vec![])]),
                _ => {}
            }
            Some(vec![(1 << 31 | 1, vec![])])
        });
        let mut head = [0; 28];
        while is_told && socket.read_exact(&mut head).is_ok() {
            if head.starts_with(CMD_DISC) {
                *over.0.lock().unwrap() = true;
                over.1.notify_all();
                return tell.send(()).unwrap();
            }
            socket.write_all(&reply_of_sevens(&head)).unwrap();
        }
    });
    assert_eq!(server.copied().status.code(), Some(0));
    for _ in 0..begun.load(Ordering::Relaxed) {
        told.recv_timeout(Duration::from_secs(10)).expect("a good-bye on every connection");
    }
}

#[test]
fn a_partial_last_block_of_a_server_is_left_out_with_a_warning() {
    let server = Server::listen(|mut socket| {
        let info = [&[0, 0][..], &(2_u64 * 4096 + 1000).to_be_bytes(), &[0, 1]].concat();
        let sizes = b"\0\x03\0\0\x10\0\0\0\x10\0\x02\0\0\0";
        let is_told = converse(&mut socket, |option| match option {
            6 | 7 => Some(vec![(3, info.clone()), (3, sizes.to_vec()), (1, vec![])]),
            _ => Some(vec![(1 << 31 | 1, vec![])]),
        });
        let mut head = [0; 28];
        while is_told && socket.read_exact(&mut head).is_ok() && !head.starts_with(CMD_DISC) {
            socket.write_all(&reply_of_sevens(&head)).unwrap();
        }
    });
    let output = server.copied();
    assert_eq!(output.status.code(), Some(0));
    let expected = "its last 1000 bytes are not a whole block of 4096 bytes and are left out";
    assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
}

/// libnbd returned such sizes as negative numbers (CVE-2023-5215).
#[test]
fn impossible_sizes_are_reported_and_not_copied() {
    for size in [0, 1 << 63, u64::MAX] {
        let server = Server::start(size, |_, _| false);
        let output = server.copied();
        assert_eq!(output.status.code(), Some(2));
        let expected = format!("has {size} bytes; copy a volume of 1 to 9223372036854775296 bytes\n");
        assert!(text(&output.stderr).ends_with(&expected), "{}", text(&output.stderr));
    }
}

#[test]
fn a_server_that_stops_answering_is_not_queried_for_every_export() {
    let server = Server::silent_after_a_list_of(40);
    let output = blockmux(["discover", &server.url]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout).lines().filter(|line| line.ends_with("size unknown")).count(), 40);
    assert!(text(&output.stderr).contains("24 exports were not queried"), "{}", text(&output.stderr));
}

#[test]
fn an_unresponsive_or_slow_server_is_abandoned_with_one_message() {
    let drip = |socket: &mut UnixStream, head: &[u8; 28]| {
        let reply = reply_of_sevens(head);
        reply.iter().all(|byte| {
            std::thread::park_timeout(Duration::from_millis(20));
            socket.write_all(&[*byte]).is_ok()
        })
    };
    for server in [Server::start(1 << 20, |_, _| true), Server::start(1 << 20, drip)] {
        let server = server.patient_for("300ms");
        let output = server.copied();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let fails = " requests fail: no answer within 300 ms, and none over new connections for 200 ms";
        assert!(said.lines().filter(|line| line.contains(fails)).count() >= 1, "{said}");
        let lines = said.lines().filter(|line| !line.contains(" requests fail: "));
        let lines: Vec<_> =
            lines.filter(|line| !line.contains("(no answer within 300 ms); trying")).collect();
        assert!(matches!(lines[..], [line] if line.contains(": cannot read ")), "{said}");
    }
}

#[test]
fn a_bench_reports_a_lost_connection() {
    let came = Arc::new(AtomicU64::new(0));
    // The first connection queries the export. One of the next two is closed during the run, and
    // later connections are refused.
    let server = Server::listen(move |mut socket| {
        let nth = came.fetch_add(1, Ordering::Relaxed);
        let info = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &[1, 1]].concat();
        let is_told = nth < 3
            && converse(&mut socket, |option| match option {
                6 | 7 => Some(vec![(3, info.clone()), (1, vec![])]),
                _ => Some(vec![(1 << 31 | 1, vec![])]),
            });
        let (mut head, mut left) = ([0; 28], if nth == 2 { 100 } else { u64::MAX });
        while is_told && left > 0 && socket.read_exact(&mut head).is_ok() && !head.starts_with(CMD_DISC) {
            socket.write_all(&reply_of_sevens(&head)).unwrap();
            left -= 1;
        }
    });
    let url = format!("{}&connections=2", server.url);
    let report = server.directory.path().join("report");
    let options = "--rw randread --iodepth 4 --runs 1 --runtime 1 --no_ceiling --report".split(' ');
    let output = std::process::Command::new(BLOCKMUX)
        .args(["bench", &url])
        .args(options)
        .arg(&report)
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("a connection was lost and could not be restored"), "{said}");
    assert!(said.contains("blockmux: a connection was lost in one run; the warnings above"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    assert!(report.join("bench.json").is_file(), "the report has the measured values");
}

#[test]
fn an_endless_export_description_is_reported() {
    let server = Server::listen(|mut socket| {
        converse(&mut socket, |option| -> Option<Box<dyn Iterator<Item = _>>> {
            match option {
                6 => Some(Box::new(std::iter::repeat((3, vec![0, 99])))),
                _ => Some(Box::new(std::iter::once((1 << 31 | 1, vec![])))),
            }
        });
    });
    let output = blockmux(["info", &server.url]);
    let said = text(&output.stderr);
    assert!(said.contains("its answer did not end within 10 s"), "{said}");
    assert_eq!(output.status.code(), Some(2));
}

/// A server of one export whose reaction to requests the test defines.
struct Server {
    url: String,
    directory: TempDir,
}

impl Server {
    /// Passes the head of each request to `on_request`, which returns whether to keep the
    /// connection.
    fn start(size: u64, on_request: fn(&mut UnixStream, &[u8; 28]) -> bool) -> Server {
        Server::listen(move |mut socket| {
            let info = [&[0, 0][..], &size.to_be_bytes(), &[0, 1]].concat();
            let is_told = converse(&mut socket, |option| match option {
                6 | 7 => Some(vec![(3, info.clone()), (1, vec![])]),
                _ => Some(vec![(1 << 31 | 1, vec![])]),
            });
            let mut head = [0; 28];
            while is_told && socket.read_exact(&mut head).is_ok() && on_request(&mut socket, &head) {}
        })
    }

    fn silent_after_a_list_of(exports: u32) -> Server {
        Server::listen(move |mut socket| {
            converse(&mut socket, |option| match option {
                3 => {
                    let names = (0..exports)
                        .map(|nth| (2, [&[0, 0, 0, 2][..], format!("{nth:02}").as_bytes()].concat()));
                    Some(names.chain([(1, vec![])]).collect::<Vec<_>>())
                }
                _ => None,
            });
        })
    }

    fn listen(serve: impl Fn(UnixStream) + Clone + Send + 'static) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket: PathBuf = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let serve = serve.clone();
                std::thread::spawn(move || serve(socket.unwrap()));
            }
        });
        let url = format!("nbd+unix:///?socket={}&reconnect=200ms", socket.display());
        Server { url, directory }
    }

    /// URL of the server with a timeout.
    fn patient_for(mut self, time: &str) -> Server {
        self.url.push_str(&format!("&timeout={time}"));
        self
    }

    /// Output of copying the export to a new file.
    fn copied(&self) -> Output {
        let file = format!("file:{}", self.directory.path().join("copy").display());
        std::process::Command::new(BLOCKMUX).args(["copy", "--overwrite", &self.url, &file]).output().unwrap()
    }
}

/// Runs the handshake. `answer` returns the replies to an option, or `None` to send none. Returns
/// whether `NBD_OPT_GO` was answered.
fn converse<R>(socket: &mut UnixStream, answer: impl Fn(u8) -> Option<R>) -> bool
where
    R: IntoIterator<Item = (u32, Vec<u8>)>,
{
    if socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").is_err() || socket.read_exact(&mut [0; 4]).is_err() {
        return false;
    }
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        let (option, len) = (&head[8..12], u32::from_be_bytes(head[12..].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).unwrap();
        for (rep, data) in answer(option[3]).into_iter().flatten() {
            let (rep, len) = (rep.to_be_bytes(), (data.len() as u32).to_be_bytes());
            let reply = [b"\0\x03\xe8\x89\x04\x55\x65\xa9", option, &rep, &len, &data].concat();
            if socket.write_all(&reply).is_err() {
                // The client has disconnected.
                break;
            }
        }
        if option[3] == 7 {
            return true;
        }
    }
    false
}

/// A simple reply to a read, with the data 7, 7, ...
fn reply_of_sevens(head: &[u8; 28]) -> Vec<u8> {
    let len = u32::from_be_bytes(head[24..].try_into().unwrap());
    [b"\x67\x44\x66\x98\0\0\0\0", &head[8..16], &vec![7; len as usize]].concat()
}

/// The end of a session by a client: `NBD_OPT_ABORT`, and the head of `NBD_CMD_DISC` up to the
/// cookie.
const OPT_ABORT: &[u8] = b"IHAVEOPT\0\0\0\x02\0\0\0\0";
const CMD_DISC: &[u8] = b"\x25\x60\x95\x13\0\0\0\x02";

/// `NBD_ENOSPC`.
const ENOSPC: u32 = 28;
