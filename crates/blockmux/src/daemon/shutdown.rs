//! Log messages of a daemon that stops: the connections that it waits for, and those that have not
//! ended at the timeout.

use crate::volume_kinds::records;
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_proto::exports::Exports;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tracing::warn;

/// The message at the beginning of the shutdown.
pub(super) fn started(limit: &ConnectionLimit, grace: Duration) -> String {
    let waited_for = match (limit.open(), limit.orphaned()) {
        (0, 0) => return "stopping; no connection is open".to_owned(),
        (open, 0) => connections(open),
        (0, orphaned) => lost_connections(orphaned),
        (open, orphaned) => format!("{} and {}", connections(open), lost_connections(orphaned)),
    };
    format!("stopping; waiting up to {} s for I/O in flight of {waited_for}", grace.as_secs())
}

/// The message at the timeout, with the connections and the I/O that have not ended.
pub(super) fn overdue(limit: &ConnectionLimit, exports: &Exports, grace: Duration) -> String {
    let busy = exports.iter().filter_map(|(id, export)| {
        let volume_state = exports.volume_state(id)?;
        (!volume_state.settling().is_over()).then(|| export.name.clone())
    });
    overdue_message(limit.open(), limit.orphaned(), &busy.collect::<Vec<_>>(), grace.as_secs())
}

/// Closes all volumes. A close may hang as an open does, for example on a network file system
/// without its server; then the end of the process closes the file.
pub(super) fn close(exports: Exports) {
    let (closing, closed) = mpsc::channel::<()>();
    let close = move || {
        drop(exports);
        drop(closing);
    };
    let is_late = thread::Builder::new().name("close".to_owned()).spawn(close).is_ok()
        && closed.recv_timeout(CLOSE_TIMEOUT) == Err(RecvTimeoutError::Timeout);
    if is_late {
        warn!("a volume could not be closed within {} s", CLOSE_TIMEOUT.as_secs());
    }
    // A change that hangs may still have volumes open.
    records::wait_until_written();
}

fn overdue_message(open: usize, orphaned: usize, busy: &[String], seconds: u64) -> String {
    let mut causes = Vec::new();
    if !busy.is_empty() {
        causes.push(format!("I/O on {}", busy.join(", ")));
    }
    if orphaned > 0 {
        causes.push(format!("I/O of {}", lost_connections(orphaned)));
    }
    match (open, causes.is_empty()) {
        (0, false) => {}
        // For example a logout from the server of a remote volume.
        (0, true) => causes.push("a task without a connection".to_owned()),
        (_, false) => causes.push(format!("{}, closed now", connections(open))),
        (_, true) => {
            causes.push(format!("{} that did not receive all replies, closed now", connections(open)));
        }
    }
    format!("not ended within {seconds} s: {}", causes.join("; "))
}

fn connections(number: usize) -> String {
    format!("{number} {}", if number == 1 { "connection" } else { "connections" })
}

fn lost_connections(number: usize) -> String {
    format!("{number} lost {}", if number == 1 { "connection" } else { "connections" })
}

/// Time for closing all volumes. The last records of a `log:` volume take up to 2 s.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_counts_open_and_lost_connections() {
        let grace = Duration::from_secs(10);
        let limit = ConnectionLimit::new(4);
        assert_eq!(started(&limit, grace), "stopping; no connection is open");
        let mut permits: Vec<_> = (0..3).map(|_| limit.permit()).collect();
        assert_eq!(started(&limit, grace), "stopping; waiting up to 10 s for I/O in flight of 3 connections");
        permits.iter_mut().take(1).flatten().for_each(blockmux_engine::serve::listener::Permit::orphan);
        assert_eq!(
            started(&limit, grace),
            "stopping; waiting up to 10 s for I/O in flight of 2 connections and 1 lost connection"
        );
    }

    #[test]
    fn the_second_message_lists_what_has_not_ended() {
        let (none, busy) = ([], ["a".to_owned(), "b".to_owned()]);
        let table: [(usize, usize, &[String], &str); 5] = [
            (3, 0, &none, "3 connections that did not receive all replies, closed now"),
            (1, 0, &busy, "I/O on a, b; 1 connection, closed now"),
            (0, 2, &busy, "I/O on a, b; I/O of 2 lost connections"),
            (1, 1, &busy, "I/O on a, b; I/O of 1 lost connection; 1 connection, closed now"),
            (0, 0, &none, "a task without a connection"),
        ];
        for (open, orphaned, busy, expected) in table {
            let message = overdue_message(open, orphaned, busy, 10);
            assert_eq!(message, format!("not ended within 10 s: {expected}"));
        }
    }
}
