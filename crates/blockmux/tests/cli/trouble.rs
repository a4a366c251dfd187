//! Failing devices and clients that violate the protocol: errors are reported, and other clients
//! are not affected.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, has, qemu_io, succeed, text};
use crate::raw_client::{READ, RawClient, WRITE};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

/// A volume whose fifth to eighth block of 4 KiB cannot be read or written.
const BAD: &str = "fault:op=read+write+zeroes,offset=16k,size=16k:mem:1m";

#[test]
fn nbdsh_gets_an_error_for_a_bad_block_and_can_continue() {
    if !has("nbdsh") {
        return;
    }
    let daemon = Daemon::serve(&[BAD]);
    let mut other = RawClient::connect(&daemon.socket());
    let script = r#"
import errno
def failed(call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        return error.errnum
    raise AssertionError("did not fail")
for _ in range(3):
    assert failed(h.pread, 4096, 16384) == errno.EIO
    assert failed(h.pwrite, bytes(4096), 28672) == errno.EIO
    assert failed(h.pwrite, bytes(65536), 0, nbd.CMD_FLAG_FUA) == errno.EIO
    assert failed(h.zero, 512, 20480) == errno.EIO
    h.pwrite(b"a" * 16384, 0)
    h.pwrite(b"b" * 4096, 32768)
    assert h.pread(16384, 0) == b"a" * 16384
    assert h.pread(4096, 32768) == b"b" * 4096
    h.flush()
"#;
    let mut nbdsh = Command::new("nbdsh");
    // The nbd module is installed for the system's Python, which may not be the first in PATH.
    nbdsh.env("PATH", "/usr/bin:/bin");
    succeed(nbdsh.args(["--uri", &daemon.url(), "-c", script]));
    assert_eq!(other.read(0, 16384), [b'a'; 16384]);
    other.request(WRITE, 0, 16384, 512);
    other.send(&[1; 512]);
    assert_eq!(other.reply(), EIO);
    assert_eq!(other.read(32768, 4096), [b'b'; 4096]);
}

#[test]
fn qemu_io_gets_an_error_for_a_bad_block_and_can_continue() {
    if !has("qemu-io") {
        return;
    }
    let daemon = Daemon::serve(&[BAD]);
    let commands =
        ["write -P 7 0 16k", "read 20k 4k", "write 16k 4k", "read -P 7 0 16k", "read -P 0 32k 64k"];
    let output = qemu_io(&daemon.url(), &commands).output().unwrap();
    let said = text(&output.stdout);
    let failures: Vec<_> = said.lines().filter(|line| line.contains("failed")).collect();
    assert_eq!(failures, ["read failed: Input/output error", "write failed: Input/output error"], "{said}");
    assert_eq!(said.matches("\nread 16384/16384 bytes at offset 0\n").count(), 1, "{said}");
    assert_eq!(said.matches("\nread 65536/65536 bytes at offset 32768\n").count(), 1, "{said}");
}

#[test]
fn a_device_error_is_logged_with_its_offset_and_repeats_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let mut daemon = Daemon::serve(&[&format!("file:{}?size=1m", path.display())]);
    let mut client = RawClient::connect(&daemon.socket());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(64 << 10).unwrap();
    for nth in 0..100 {
        assert_eq!(client.simple(READ, 0, (128 << 10) + nth * 4096, 4096), EIO);
    }
    daemon.signal(Signal::TERM);
    let mut said = String::new();
    daemon.stderr.read_to_string(&mut said).unwrap();
    let failed = format!(" WARN {}: read failed: another program has truncated the file", path.display());
    let lines: Vec<_> = said.lines().filter_map(|line| line.find(&failed).map(|at| &line[at..])).collect();
    assert_eq!(lines.len(), 6, "{said}");
    assert_eq!(lines[0], format!("{failed} offset=131072 length=4096"));
    assert_eq!(lines[5], format!("{failed}: 95 more like this in 10 seconds"));
    assert_eq!(daemon.wait().code(), Some(0));
}

/// Bytes that a client sends in the transmission phase, and the message about them.
const BREACHES: [(&[u8], &str); 3] = [
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "wrong magic number"),
    // A write of 128 MiB.
    (
        b"\x25\x60\x95\x13\0\0\0\x01\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0\x08\0\0\0",
        "more payload than the advertised maximum",
    ),
    // A write of 512 bytes that ends after the first four.
    (
        b"\x25\x60\x95\x13\0\0\0\x01\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0\0\0\x02\0data",
        "in the middle of a request's payload",
    ),
];

#[test]
fn a_malformed_request_is_logged_with_peer_and_rule_and_affects_no_other_connection() {
    let mut daemon = Daemon::serve(&["mem:1m", "--nbd", "127.0.0.1:0"]);
    let url = daemon.json["exports"][0]["urls"][1].as_str().unwrap().to_owned();
    let server = url.strip_prefix("nbd://").unwrap().strip_suffix("/disk0").unwrap();
    let server: SocketAddr = server.parse().unwrap();
    let mut other = RawClient::connect(&daemon.socket());
    let mut expected = Vec::new();
    for (bytes, rule) in BREACHES {
        let mut socket = TcpStream::connect(server).unwrap();
        let _client = RawClient::over(socket.try_clone().unwrap());
        socket.write_all(bytes).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        // Waits until the server has closed the connection.
        let _ = socket.read_to_end(&mut Vec::new());
        expected.push((socket.local_addr().unwrap().to_string(), rule));
        assert_eq!(other.write(0, 0, &[1; 512]), 0);
        assert_eq!(other.read(0, 512), [1; 512]);
    }
    // A peer that is not an NBD client.
    let mut socket = TcpStream::connect(server).unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let _ = socket.read_to_end(&mut Vec::new());
    expected.push((socket.local_addr().unwrap().to_string(), "client flag that was not offered"));
    let mut client = RawClient::connect(&daemon.socket());
    client.send(BREACHES[0].0);
    assert!(client.is_closed());
    expected.push((format!("unix socket of process {}", std::process::id()), BREACHES[0].1));
    daemon.signal(Signal::TERM);
    let mut said = String::new();
    daemon.stderr.read_to_string(&mut said).unwrap();
    let lines: Vec<_> = said.lines().filter(|line| line.contains(" WARN ")).collect();
    assert_eq!(lines.len(), expected.len(), "{said}");
    for (peer, rule) in expected {
        let found = lines.iter().filter(|line| line.contains(&peer) && line.contains(rule)).count();
        assert_eq!(found, 1, "{peer} {rule}: {said}");
    }
    assert_eq!(daemon.wait().code(), Some(0));
}

/// `NBD_EIO`.
const EIO: u32 = 5;

/// QEMU accepted any number of them (CVE-2024-7409).
#[test]
fn new_clients_are_served_despite_hundreds_of_unfinished_handshakes() {
    let daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    let of = |scheme: &str| daemon.urls_of(scheme).remove(0);
    let half_a_login = [&[0x43, 0x87][..], &[0; 40]].concat();
    let ways: [(&str, &[u8]); 5] = [
        ("iscsi", b""),
        ("iscsi", &half_a_login),
        ("iser", b"MPA ID Req Frame"),
        ("iser", b"MPA ID Req Frame\x10\x02\0\x04\x80\x20\x80\x20"),
        ("nvme+tcp", b"\0\0\x80\0\x80\0\0\0"),
    ];
    for (scheme, beginning) in ways {
        let url = of(scheme);
        let place: SocketAddr = url.split('/').nth(2).unwrap().parse().unwrap();
        let open = || {
            let mut socket = TcpStream::connect(place).unwrap();
            // The server may have closed the first of them already.
            let _ = socket.write_all(beginning);
            socket
        };
        let held: Vec<TcpStream> = (0..600).map(|_| open()).collect();
        for _ in 0..3 {
            succeed(Command::new(BLOCKMUX).args(["info", &url]));
        }
        drop(held);
    }
}
