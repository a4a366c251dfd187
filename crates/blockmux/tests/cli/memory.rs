//! Memory use of an idle daemon.

use crate::daemon::Daemon;
use crate::raw_client::{READ, RawClient};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[test]
fn an_idle_daemon_is_small_and_so_are_a_thousand_idle_connections() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    if limit.maximum.is_some_and(|maximum| maximum < 2 * CONNECTIONS as u64) {
        println!("skipped: not enough open files allowed for {CONNECTIONS} connections");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for volume in [
        "mem:1g?populate=off".to_owned(),
        file(&directory),
        format!("stripe:1m:mem:1g?populate=off,{}", file(&directory)),
    ] {
        let daemon = Daemon::serve(&[&volume]);
        let idle = daemon.resident();
        assert!(idle < IDLE_LIMIT, "{volume}: {idle} bytes when idle");
        let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| RawClient::connect(&daemon.socket())).collect();
        for client in &mut clients {
            assert_eq!(client.read(0, 4096), [0; 4096]);
        }
        let more = daemon.resident() - idle;
        println!("{volume}: idle {} KiB, {CONNECTIONS} connections {} KiB more", idle >> 10, more >> 10);
        assert!(more < CONNECTIONS_LIMIT, "{volume}: {more} bytes more with {CONNECTIONS} connections");
    }
}

#[test]
fn memory_of_a_burst_of_short_reads_is_returned_to_the_system() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::serve(&[&file(&directory), "--cores", "1"]);
    let idle = daemon.resident();
    let mut clients: Vec<_> = (0..64).map(|_| RawClient::connect(&daemon.socket())).collect();
    for client in &mut clients {
        (0..1024).for_each(|nth| client.request(READ, 0, nth * 4096, 4096));
    }
    // No client has read the data yet.
    while daemon.resident() - idle < BURST {
        pause();
    }
    for client in &mut clients {
        for _ in 0..1024 {
            assert_eq!(client.reply(), 0);
            client.take(4096);
        }
    }
    let end = Instant::now() + Duration::from_secs(20);
    while daemon.resident() - idle > BURST / 2 {
        assert!(Instant::now() < end, "{} bytes are kept", daemon.resident() - idle);
        pause();
    }
}

/// A volume of 1 GiB without data.
fn file(directory: &TempDir) -> String {
    format!("file:{}?size=1g", directory.path().join("disk").display())
}

fn pause() {
    std::thread::park_timeout(Duration::from_millis(20));
}

const CONNECTIONS: usize = 1000;
const IDLE_LIMIT: u64 = 6 << 20;
const CONNECTIONS_LIMIT: u64 = 64 << 20;
/// Memory in the daemon after 1024 reads of each of 64 clients, in bytes.
const BURST: u64 = 256 << 20;
