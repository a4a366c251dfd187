//! Clients survive restarts of a server and broken connections without errors.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use crate::proxy::{Cut, Proxy};
use rustix::process::Signal;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A file without holes, different in each block.
fn full_file(directory: &Path) -> PathBuf {
    let mut bytes = vec![0; SIZE];
    for (nth, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(nth as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    let path = directory.join("source.img");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn start_copy(from: &str, to: &str) -> Child {
    let mut command = Command::new(BLOCKMUX);
    command.args(["copy", "--overwrite", "--verify", "--bs", "64k", "--iodepth", "8", from, to]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn finish(copy: Child) {
    let output = copy.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.lines().all(|line| line.contains("trying again")), "{said}");
    assert!(text(&output.stdout).starts_with("copied and verified 8 MiB"), "{}", text(&output.stdout));
}

/// Starts a daemon over `disk`, waits for some I/O of `kind`, ends the daemon with `signal`, and
/// starts it again.
fn ends_and_comes_back(disk: &Path, signal: Signal, kind: &str, begin: impl Fn(&str) -> Child) {
    for connections in [1, 3] {
        // Slow enough that the copy is not done at the signal, which the second wait proves.
        let volume = format!("a=log:-:delay:5ms:file:{}?size=8m", disk.display());
        let mut daemon = Daemon::serve(&[&volume]);
        let copy = begin(&format!("{}&connections={connections}", daemon.url()));
        for _ in 0..20 {
            daemon.wait_for_line(kind);
        }
        daemon.signal(signal);
        let status = daemon.wait();
        assert_eq!(status.code(), (signal == Signal::TERM).then_some(0));
        daemon.start_again(&[&volume]);
        daemon.wait_for_line(kind);
        finish(copy);
    }
}

fn writes_survive(signal: Signal) {
    let directory = tempfile::tempdir().unwrap();
    let (source, disk) = (full_file(directory.path()), directory.path().join("disk.img"));
    let from = format!("file:{}", source.display());
    ends_and_comes_back(&disk, signal, " write ", |url| start_copy(&from, url));
    assert!(std::fs::read(&disk).unwrap() == std::fs::read(&source).unwrap());
}

fn reads_survive(signal: Signal) {
    let directory = tempfile::tempdir().unwrap();
    let (disk, back) = (full_file(directory.path()), directory.path().join("back.img"));
    let to = format!("file:{}", back.display());
    ends_and_comes_back(&disk, signal, " read ", |url| start_copy(url, &to));
    assert!(std::fs::read(&back).unwrap() == std::fs::read(&disk).unwrap());
}

#[test]
fn writes_continue_after_a_daemon_was_stopped_and_restarted() {
    writes_survive(Signal::TERM);
}

#[test]
fn writes_continue_after_a_daemon_was_killed_and_restarted() {
    writes_survive(Signal::KILL);
}

#[test]
fn reads_continue_after_a_daemon_was_stopped_and_restarted() {
    reads_survive(Signal::TERM);
}

#[test]
fn reads_continue_after_a_daemon_was_killed_and_restarted() {
    reads_survive(Signal::KILL);
}

/// A daemon and a proxy. The proxy does not cut the first connection, which queries the export.
fn behind_a_proxy(volume: &str, cuts: impl Iterator<Item = Cut>) -> (Daemon, Proxy, String) {
    let daemon = Daemon::serve(&[volume]);
    let path = daemon.directory.path().join("proxy");
    let cuts = std::iter::once(Cut::default()).chain(cuts).collect();
    let proxy = Proxy::start(UnixListener::bind(&path).unwrap(), daemon.socket(), cuts);
    (daemon, proxy, format!("nbd+unix:///?socket={}&connections=1", path.display()))
}

#[test]
fn a_connection_that_breaks_after_any_number_of_sent_bytes_is_reestablished() {
    let directory = tempfile::tempdir().unwrap();
    let (source, disk) = (full_file(directory.path()), directory.path().join("disk.img"));
    let cuts = PLACES.map(|bytes| Cut { to_server: Some(bytes), to_client: None });
    let (_daemon, proxy, url) = behind_a_proxy(&format!("file:{}?size=8m", disk.display()), cuts.into_iter());
    finish(start_copy(&format!("file:{}", source.display()), &url));
    assert_eq!(proxy.cuts_made(), PLACES.len());
    assert!(std::fs::read(disk).unwrap() == std::fs::read(source).unwrap());
}

#[test]
fn a_connection_that_breaks_after_any_number_of_received_bytes_is_reestablished() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, back) = (full_file(directory.path()), directory.path().join("back.img"));
    let cuts = PLACES.map(|bytes| Cut { to_server: None, to_client: Some(bytes) });
    let (_daemon, proxy, url) = behind_a_proxy(&format!("file:{}", disk.display()), cuts.into_iter());
    finish(start_copy(&url, &format!("file:{}", back.display())));
    assert_eq!(proxy.cuts_made(), PLACES.len());
    assert!(std::fs::read(back).unwrap() == std::fs::read(disk).unwrap());
}

#[test]
fn a_server_that_does_not_return_is_finally_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let source = full_file(directory.path());
    let mut daemon = Daemon::serve(&["log:-:delay:5ms:mem:8m"]);
    let url = format!("{}&reconnect=200ms", daemon.url());
    let copy = start_copy(&format!("file:{}", source.display()), &url);
    daemon.wait_for_line(" write ");
    daemon.signal(Signal::KILL);
    daemon.wait();
    let output = copy.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(said.ends_with("; the copy is not complete\n"), "{said}");
    assert!(said.contains(": cannot write 65536 bytes at offset "), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn all_requests_are_sent_over_the_connections_that_a_server_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let (source, disk) = (full_file(directory.path()), directory.path().join("disk.img"));
    // Two connections, because that of the query may not be closed yet.
    let volume = format!("file:{}?size=8m", disk.display());
    let daemon = Daemon::serve(&[&volume, "--max-connections", "2"]);
    finish(start_copy(&format!("file:{}", source.display()), &format!("{}&connections=16", daemon.url())));
    assert!(std::fs::read(disk).unwrap() == std::fs::read(source).unwrap());
}

#[test]
fn an_abstract_unix_socket_is_reached() {
    use std::os::linux::net::SocketAddrExt;
    let daemon = Daemon::serve(&["a=mem:1m"]);
    let name = format!("blockmux-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _proxy = Proxy::start(UnixListener::bind_addr(&address).unwrap(), daemon.socket(), Vec::new());
    let url = format!("nbd+unix:///a?socket=%00{name}");
    let info = blockmux(["info", "--json", &url]);
    assert_eq!((info.status.code(), text(&info.stderr)), (Some(0), String::new()));
    let copied = blockmux(["copy", "--overwrite", "--verify", "mem:1m", &url]);
    assert_eq!((copied.status.code(), text(&copied.stderr)), (Some(0), String::new()));
    let nobody = blockmux(["info", "nbd+unix:///?socket=%00blockmux-nobody"]);
    let expected = "blockmux: nbd+unix:///?socket=%00blockmux-nobody: unix:@blockmux-nobody: connection failed: \
                    Connection refused (os error 111); check that an NBD server listens there\n";
    assert_eq!((nobody.status.code(), text(&nobody.stderr).as_str()), (Some(2), expected));
}

const SIZE: usize = 8 << 20;
/// Numbers of bytes after which a connection is cut: in the greeting, between and in the options,
/// at the edges of a request, and in the middle of a payload.
const PLACES: [usize; 14] = [0, 1, 4, 17, 18, 40, 100, 200, 1000, 65_536, 65_600, 200_000, 500_001, 1 << 20];
