//! Behaviour of initiators when an iSCSI target stops.

use crate::daemon::Daemon;
use crate::iscsi_interop::has_qemu_iscsi;
use crate::program::{BLOCKMUX, text};
use crate::raw_iscsi::RawIscsi;
use rustix::process::Signal;
use std::process::{Command, Stdio};

/// AsyncEvent of RFC 7143 §11.9.1.
const LOGOUT_REQUEST: u8 = 1;
const SESSION_DROP: u8 = 3;

/// A daemon with a session.
fn with_session() -> (Daemon, RawIscsi) {
    let daemon = Daemon::serve(&["mem:8m", "--iscsi", "127.0.0.1:0"]);
    let session = RawIscsi::login(&daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    (daemon, session)
}

#[test]
fn an_initiator_that_logs_out_on_request_ends_in_order() {
    let (mut daemon, mut session) = with_session();
    daemon.signal(Signal::TERM);
    assert_eq!(session.event(), (LOGOUT_REQUEST, 1));
    assert_eq!(session.log_out(), 0);
    assert!(session.is_closed());
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn an_initiator_that_does_not_log_out_is_notified_and_dropped() {
    let (mut daemon, mut session) = with_session();
    daemon.signal(Signal::TERM);
    assert_eq!(session.event(), (LOGOUT_REQUEST, 1));
    assert_eq!(session.event().0, SESSION_DROP);
    assert!(session.is_closed());
    assert_eq!(daemon.wait().code(), Some(0));
}

/// Starts the command of `begin` for a URL, stops the daemon of the URL and starts it again. The
/// command must succeed. Returns the content of the disk.
fn goes_on(begin: impl Fn(&str) -> Command) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk.img");
    // Slow enough that the command is not done at the signal, which the second wait proves.
    let volume = format!("log:-:delay:5ms:file:{}?size=8m", disk.display());
    let mut daemon = Daemon::serve(&[&volume, "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iscsi").remove(0);
    let address = url.split('/').nth(2).unwrap().to_owned();
    let client = begin(&url).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..20 {
        daemon.wait_for_line(" write ");
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    daemon.start_again(&[&volume, "--iscsi", &address]);
    daemon.wait_for_line(" write ");
    let output = client.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    std::fs::read(&disk).unwrap()
}

#[test]
fn the_initiator_continues_when_the_target_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source.img");
    let bytes: Vec<u8> = (0..8_u32 << 20).map(|at| (at % 251) as u8 ^ (at >> 12) as u8 | 1).collect();
    std::fs::write(&source, &bytes).unwrap();
    let written = goes_on(|url| {
        let mut copy = Command::new(BLOCKMUX);
        copy.args(["copy", "--overwrite", "--verify", "--bs", "64k", "--iodepth", "8"]);
        copy.arg(format!("file:{}", source.display())).arg(url);
        copy
    });
    assert!(written == bytes);
}

#[test]
fn libiscsi_logs_out_and_continues_when_the_target_is_back() {
    if !has_qemu_iscsi() {
        return;
    }
    let written = goes_on(|url| {
        let mut bench = Command::new("qemu-img");
        bench.args(["bench", "-w", "-t", "none", "-f", "raw", "-c", "512", "-d", "8", "-s", "16k"]);
        bench.args(["--pattern=90", url]);
        bench
    });
    assert!(written.iter().all(|&byte| byte == 90));
}
