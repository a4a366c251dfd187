//! CPU use of an idle daemon.

use crate::daemon::Daemon;
use crate::raw_client::RawClient;
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn an_idle_daemon_uses_no_cpu_time_before_and_after_client_io() {
    for policy in ["adaptive", "never"] {
        let daemon = Daemon::serve(&["mem:16m", "--poll", policy]);
        assert_idle(&daemon, policy, "nobody has come yet");
        let mut client = RawClient::connect(&daemon.socket());
        for nth in 0..1000 {
            assert_eq!(client.write(0, nth * 4096, &[1; 4096]), 0);
            assert_eq!(client.read(nth * 4096, 4096), [1; 4096]);
        }
        assert_idle(&daemon, policy, "its client is silent");
        drop(client);
        assert_idle(&daemon, policy, "its client has left");
    }
}

/// Watches the daemon for a second.
fn assert_idle(daemon: &Daemon, policy: &str, when: &str) {
    let before = daemon.cpu_ticks();
    // Nothing is sent: this waits for one second.
    let (_sender, receiver) = mpsc::channel::<()>();
    assert!(receiver.recv_timeout(Duration::from_secs(1)).is_err());
    let used = daemon.cpu_ticks() - before;
    assert!(used <= 1, "{used} ticks in a second with --poll {policy} while {when}");
}
