//! What a daemon that stops waits for, and what it does not wait for any longer.

use blockmux_engine::listener::ConnectionLimit;
use blockmux_proto::exports::Exports;
use std::time::Duration;

/// What is said when it begins to stop.
pub(super) fn beginning(limit: &ConnectionLimit, grace: Duration) -> String {
    let waited_for = match (limit.open(), limit.orphaned()) {
        (0, 0) => return "stopping; no connection is open".to_owned(),
        (open, 0) => connections(open),
        (0, left) => of_gone(left),
        (open, left) => format!("{}, and {}", connections(open), of_gone(left)),
    };
    format!("stopping; what is in flight has {} s to end, that of {waited_for}", grace.as_secs())
}

/// What is said when its time is over, and not everything has come to its end.
pub(super) fn end(limit: &ConnectionLimit, exports: &Exports, grace: Duration) -> String {
    let busy = exports.iter().filter_map(|(id, export)| {
        let served = exports.volume_state(id)?;
        (!served.settling().is_over()).then(|| export.name.clone())
    });
    in_words(limit.open(), limit.orphaned(), &busy.collect::<Vec<_>>(), grace.as_secs())
}

fn in_words(open: usize, left: usize, busy: &[String], seconds: u64) -> String {
    let mut causes = Vec::new();
    if !busy.is_empty() {
        causes.push(format!("I/O on {}", busy.join(", ")));
    }
    if left > 0 {
        causes.push(format!("I/O of {}", of_gone(left)));
    }
    match (open, causes.is_empty()) {
        (0, false) => {}
        // Sessions with servers of remote volumes, as it may be.
        (0, true) => causes.push("something, but no connection is open".to_owned()),
        (_, false) => causes.push(format!("{}, to be cut", connections(open))),
        (_, true) => {
            causes.push(format!("{} that did not take all answers, to be cut", connections(open)));
        }
    }
    format!("not at its end within {seconds} s: {}", causes.join("; "))
}

fn connections(number: usize) -> String {
    format!("{number} {}", if number == 1 { "connection" } else { "connections" })
}

fn of_gone(number: usize) -> String {
    format!("{} that {} gone", connections(number), if number == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_what_is_waited_for() {
        let grace = Duration::from_secs(10);
        let limit = ConnectionLimit::new(4);
        assert_eq!(beginning(&limit, grace), "stopping; no connection is open");
        let mut permits: Vec<_> = (0..3).map(|_| limit.permit()).collect();
        assert_eq!(
            beginning(&limit, grace),
            "stopping; what is in flight has 10 s to end, that of 3 connections"
        );
        permits.iter_mut().take(1).flatten().for_each(blockmux_engine::listener::Permit::leave);
        assert_eq!(
            beginning(&limit, grace),
            "stopping; what is in flight has 10 s to end, that of 2 connections, and 1 connection that is gone"
        );
    }

    #[test]
    fn it_is_said_what_has_not_ended() {
        let (none, busy) = ([], ["a".to_owned(), "b".to_owned()]);
        let table: [(usize, usize, &[String], &str); 5] = [
            (3, 0, &none, "3 connections that did not take all answers, to be cut"),
            (1, 0, &busy, "I/O on a, b; 1 connection, to be cut"),
            (0, 2, &busy, "I/O on a, b; I/O of 2 connections that are gone"),
            (1, 1, &busy, "I/O on a, b; I/O of 1 connection that is gone; 1 connection, to be cut"),
            (0, 0, &none, "something, but no connection is open"),
        ];
        for (open, left, busy, expected) in table {
            assert_eq!(in_words(open, left, busy, 10), format!("not at its end within 10 s: {expected}"));
        }
    }
}
