//! What an idle daemon holds.

use crate::daemon::Daemon;
use crate::raw_client::RawClient;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn an_idle_daemon_is_small_and_so_are_a_thousand_idle_connections() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    if limit.maximum.is_some_and(|maximum| maximum < 2 * CONNECTIONS as u64) {
        println!("skipped: not enough open files allowed for {CONNECTIONS} connections");
        return;
    }
    let daemon = Daemon::serve(&["mem:1g"]);
    let idle = daemon.resident();
    assert!(idle < IDLE_LIMIT, "{idle} bytes when idle");
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| RawClient::connect(&daemon.socket())).collect();
    for client in &mut clients {
        assert_eq!(client.read(0, 4096), [0; 4096]);
    }
    let more = daemon.resident() - idle;
    println!("idle {} KiB, {CONNECTIONS} connections {} KiB more", idle >> 10, more >> 10);
    assert!(more < CONNECTIONS_LIMIT, "{more} bytes more with {CONNECTIONS} connections");
}

const CONNECTIONS: usize = 1000;
const IDLE_LIMIT: u64 = 20 << 20;
const CONNECTIONS_LIMIT: u64 = 64 << 20;
