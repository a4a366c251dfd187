//! Durability of writes when a daemon or a client ends, gracefully or not.

use crate::daemon::Daemon;
use crate::raw_client::{FLUSH, FUA, RawClient, WRITE};
use rustix::process::Signal;
use std::path::Path;

fn file_volume(directory: &Path) -> String {
    format!("file:{}?size=1m", directory.join("disk.img").display())
}

#[test]
fn a_write_in_flight_completes_when_the_daemon_stops() {
    let directory = tempfile::tempdir().unwrap();
    let volume = format!("log:-:delay:0s,300ms:{}", file_volume(directory.path()));
    let mut daemon = Daemon::serve(&[&volume]);
    let mut client = RawClient::connect(&daemon.socket());
    client.request(WRITE, 0, 4096, 4096);
    client.send(&[5; 4096]);
    daemon.wait_for_line(" write ");
    daemon.signal(Signal::TERM);
    assert_eq!(client.reply(), 0);
    assert!(client.is_closed());
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(std::fs::read(directory.path().join("disk.img")).unwrap()[4096..8192], [5; 4096]);
}

#[test]
fn stable_writes_survive_a_kill_of_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::serve(&[&file_volume(directory.path())]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    client.request(FLUSH, 0, 0, 0);
    assert_eq!(client.reply(), 0);
    assert_eq!(client.write(FUA, 8192, &[2; 4096]), 0);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let content = std::fs::read(directory.path().join("disk.img")).unwrap();
    assert_eq!((&content[..4096], &content[8192..12288]), (&[1; 4096][..], &[2; 4096][..]));
}

#[test]
fn a_client_that_disconnects_during_a_write_changes_only_its_range() {
    let daemon = Daemon::serve(&["mem:1m"]);
    let mut other = RawClient::connect(&daemon.socket());
    assert_eq!(other.write(0, 0, &[1; 1 << 20]), 0);
    let mut client = RawClient::connect(&daemon.socket());
    client.request(WRITE, 0, 4096, 512 << 10);
    client.send(&[9; 100 << 10]);
    drop(client);
    let content = other.read(0, 1 << 20);
    let end = 4096 + (512 << 10);
    assert!(content[..4096].iter().chain(&content[end..]).all(|&byte| byte == 1));
    assert!(content[4096..end].iter().all(|byte| [1, 9].contains(byte)));
}

#[test]
fn a_failed_final_flush_determines_the_exit_status() {
    let mut daemon = Daemon::serve(&["fault:op=flush:mem:1m"]);
    daemon.signal(Signal::TERM);
    daemon.wait_for_line("disk0: the last flush failed: medium error");
    assert_eq!(daemon.wait().code(), Some(1));
}
