//! The NBD initiator with standard servers.

use crate::program::{blockmux, half_empty_file, has, succeed, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A server that runs in the background; killed when dropped.
struct Server {
    directory: TempDir,
}

impl Server {
    fn new() -> Server {
        Server { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn url(&self) -> String {
        format!("nbd+unix:///a?socket={}", self.path("socket").display())
    }

    /// A file of zeroes to export.
    fn disk(&self) -> PathBuf {
        let disk = self.path("disk.img");
        std::fs::File::create(&disk).unwrap().set_len(SIZE as u64).unwrap();
        disk
    }

    /// Starts nbdkit with 8 MiB of memory and waits until it listens.
    fn nbdkit(args: &[&str]) -> Server {
        let server = Server::new();
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.arg("-U").arg(server.path("socket")).arg("-P").arg(server.path("pid"));
        // Filters and server options precede the plugin, its parameters follow.
        let (options, parameters): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| arg.starts_with('-'));
        succeed(nbdkit.args(["-e", "a"]).args(options).args(["memory", "8m"]).args(parameters));
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(self.path("pid")).ok().and_then(|text| text.trim().parse().ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

fn described(url: &str) -> Value {
    let output = blockmux(["info", "--json", url]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn file(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn copy(from: &str, to: &str) -> Output {
    blockmux(["copy", "--overwrite", "--verify", from, to])
}

fn copies_there_and_back(server: &Server) {
    let source = half_empty_file(server.directory.path(), SIZE);
    let back = server.path("back.img");
    for (from, to) in [(file(&source), server.url()), (server.url(), file(&back))] {
        let output = copy(&from, &to);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{from} to {to}");
    }
    assert!(std::fs::read(back).unwrap() == std::fs::read(source).unwrap());
}

#[test]
fn nbdkit_is_described_and_copied_to_and_from() {
    if !has("nbdkit") {
        return;
    }
    let server = Server::nbdkit(&[]);
    let info = described(&server.url());
    assert_eq!((&info["size"], &info["headers"]), (&SIZE.into(), &"structured".into()));
    copies_there_and_back(&server);
}

#[test]
fn a_server_with_few_features_is_copied_to_and_from() {
    if !has("nbdkit") {
        return;
    }
    let flag = |info: &Value, name: &str| info["flags"].as_array().unwrap().contains(&name.into());
    let simple = Server::nbdkit(&["--no-sr"]);
    assert_eq!(described(&simple.url())["headers"], "simple");
    let alone = Server::nbdkit(&["--filter=multi-conn", "multi-conn-mode=disable"]);
    assert!(!flag(&described(&alone.url()), "CAN_MULTI_CONN"));
    let without_zeroes = Server::nbdkit(&["--filter=nozero"]);
    assert!(!flag(&described(&without_zeroes.url()), "SEND_WRITE_ZEROES"));
    let limits = ["blocksize-minimum=4096", "blocksize-maximum=64k", "blocksize-error-policy=error"];
    let large_blocks = Server::nbdkit(&[&["--filter=blocksize-policy"], &limits[..]].concat());
    let sizes = &described(&large_blocks.url())["block_size"];
    assert_eq!((&sizes["minimum"], &sizes["maximum_payload"]), (&4096.into(), &65536.into()));
    let without_extents = Server::nbdkit(&["--filter=noextents"]);
    let slow = Server::nbdkit(&["--filter=delay", "rdelay=2ms", "wdelay=2ms"]);
    let one_by_one = Server::nbdkit(&["--filter=noparallel", "serialize=all-requests"]);
    for server in [simple, alone, without_zeroes, large_blocks, without_extents, slow, one_by_one] {
        copies_there_and_back(&server);
    }
}

#[test]
fn a_server_with_a_connection_limit_is_copied_to() {
    if !has("nbdkit") {
        return;
    }
    // Two connections, because that of the query may not be closed yet.
    let server = Server::nbdkit(&["--filter=limit", "limit=2"]);
    let source = half_empty_file(server.directory.path(), SIZE);
    let output = copy(&file(&source), &format!("{}&connections=8", server.url()));
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

#[test]
fn a_failing_disk_of_a_server_is_reported_with_the_offset() {
    if !has("nbdkit") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let trigger = place.path().join("fails");
    std::fs::write(&trigger, "").unwrap();
    // While this file exists, all requests fail.
    let when = format!("error-file={}", trigger.display());
    let server = Server::nbdkit(&["--filter=error", "error=EIO", "error-rate=100%", &when]);
    let output = copy(&server.url(), "null:8m");
    let said = text(&output.stderr);
    assert!(said.starts_with(&format!("blockmux: {}: cannot ", server.url())), "{said}");
    assert!(said.contains(" at offset ") && said.contains("medium error"), "{said}");
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(1)), "{said}");
}

#[test]
fn a_read_only_server_can_be_read_but_not_written() {
    if !has("nbdkit") {
        return;
    }
    let server = Server::nbdkit(&["-r"]);
    assert_eq!(described(&server.url())["read_only"], true);
    let refused = copy("mem:8m", &server.url());
    let expected = format!("blockmux: {}: is read-only; copy to a writable volume\n", server.url());
    assert_eq!((text(&refused.stderr), refused.status.code()), (expected, Some(2)));
    let output = copy(&server.url(), &file(&server.path("back.img")));
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    assert_eq!(std::fs::read(server.path("back.img")).unwrap(), vec![0; SIZE]);
}

#[test]
fn a_server_that_ends_with_its_first_client_is_reported_as_out_of_reach() {
    if !has("nbdkit") {
        return;
    }
    // The connection of the query is its first client.
    let server = Server::nbdkit(&["--filter=exitlast"]);
    let output = copy(&format!("{}&reconnect=100ms", server.url()), "mem:8m");
    let said = text(&output.stderr);
    assert!(said.contains("volume is out of reach: "), "{said}");
    assert!(said.ends_with("path to the volume is lost; the copy is not complete\n"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn qemu_nbd_is_described_and_copied_to_and_from() {
    if !has("qemu-nbd") {
        return;
    }
    let server = Server::new();
    let mut qemu_nbd = Command::new("qemu-nbd");
    qemu_nbd.args([
        "--fork",
        "--persistent",
        "--shared=0",
        "--export-name=a",
        "--discard=unmap",
        "--format=raw",
    ]);
    qemu_nbd.arg("--socket").arg(server.path("socket")).arg("--pid-file").arg(server.path("pid"));
    // qemu-nbd keeps its output open, so reading a pipe would not end.
    assert!(qemu_nbd.arg(server.disk()).status().unwrap().success());
    let url = server.url();
    assert_eq!(described(&url)["size"], SIZE);
    let found = blockmux(["discover", &url]);
    assert!(text(&found.stdout).starts_with(&format!("{url}  8 MiB")), "{}", text(&found.stdout));
    copies_there_and_back(&server);
}

#[test]
fn qemu_storage_daemon_is_described_and_copied_to_and_from() {
    if !has("qemu-storage-daemon") {
        return;
    }
    let server = Server::new();
    let mut daemon = Command::new("qemu-storage-daemon");
    daemon
        .arg("--blockdev")
        .arg(format!("driver=file,node-name=file,discard=unmap,filename={}", server.disk().display()));
    daemon.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", server.path("socket").display()));
    daemon.args(["--export", "type=nbd,id=export,node-name=file,name=a,writable=on"]);
    // The command returns when the daemon listens, and the daemon keeps its output open, so reading
    // a pipe would not end.
    daemon.arg("--pidfile").arg(server.path("pid")).arg("--daemonize");
    assert!(daemon.status().unwrap().success());
    let info = described(&server.url());
    assert_eq!((&info["size"], &info["headers"]), (&SIZE.into(), &"structured".into()));
    let found = blockmux(["discover", &server.url()]);
    assert!(text(&found.stdout).starts_with(&format!("{}  8 MiB", server.url())), "{}", text(&found.stdout));
    copies_there_and_back(&server);
}

#[test]
fn nbd_server_is_described_and_copied_to_and_from() {
    if !has("nbd-server") {
        return;
    }
    let server = Server::new();
    let (socket, disk) = (server.path("socket"), server.disk());
    let config = format!(
        "[generic]\nunixsock = {}\nallowlist = true\n[a]\nexportname = {}\nflush = true\nfua = true\ntrim = true\n",
        socket.display(),
        disk.display()
    );
    std::fs::write(server.path("config"), config).unwrap();
    let mut nbd_server = Command::new("nbd-server");
    nbd_server.arg("-C").arg(server.path("config")).arg("-p").arg(server.path("pid"));
    assert!(nbd_server.status().unwrap().success());
    // The daemon may start to listen after the command returns.
    let end = Instant::now() + Duration::from_secs(30);
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < end, "nbd-server does not listen");
        std::thread::yield_now();
    }
    let info = described(&server.url());
    assert_eq!((&info["size"], &info["headers"]), (&SIZE.into(), &"simple".into()));
    let found = blockmux(["discover", &server.url()]);
    assert!(text(&found.stdout).starts_with(&server.url()), "{}", text(&found.stdout));
    copies_there_and_back(&server);
}

/// A server of two exports that answers a query for one only when the other has been queried, too.
fn answer_when_both_are_asked_for(mut socket: UnixStream, both: &Barrier) {
    socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    socket.read_exact(&mut [0; 4]).unwrap();
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        let (option, len) = (head[8..12].to_vec(), u32::from_be_bytes(head[12..].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).unwrap();
        let reply = |rep: u32, data: &[u8]| {
            let (rep, len) = (rep.to_be_bytes(), (data.len() as u32).to_be_bytes());
            [b"\0\x03\xe8\x89\x04\x55\x65\xa9", &option[..], &rep, &len, data].concat()
        };
        let (ack, unsupported) = (reply(1, b""), reply(1 << 31 | 1, b""));
        let answer = match option[3] {
            3 => [reply(2, b"\0\0\0\x01a"), reply(2, b"\0\0\0\x01b"), ack].concat(),
            6 => {
                both.wait();
                // NBD_INFO_EXPORT: 1 MiB, NBD_FLAG_HAS_FLAGS.
                [reply(3, b"\0\0\0\0\0\0\0\x10\0\0\0\x01"), ack].concat()
            }
            _ => unsupported,
        };
        // The client may have disconnected.
        let _ = socket.write_all(&answer);
    }
}

#[test]
fn exports_of_a_slow_server_are_queried_in_parallel() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let both = Arc::new(Barrier::new(2));
        for socket in listener.incoming() {
            let both = both.clone();
            std::thread::spawn(move || answer_when_both_are_asked_for(socket.unwrap(), &both));
        }
    });
    let found = blockmux(["discover", &format!("nbd+unix:///?socket={}", socket.display())]);
    let url = |name| format!("nbd+unix:///{name}?socket={}  1 MiB\n", socket.display());
    assert_eq!(text(&found.stdout), [url("a"), url("b")].concat());
}

const SIZE: usize = 8 << 20;
