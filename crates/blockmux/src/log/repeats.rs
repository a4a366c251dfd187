//! Suppression of repeated log lines.
//!
//! A peer or a failing device can cause thousands of similar lines per second, which would fill the
//! disk. Lines that differ only in the peer's port or in the offset on a volume are similar: a few
//! are written, and the rest within some seconds are counted.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The lines of the last seconds.
#[derive(Default)]
pub(crate) struct Repeats {
    alike: HashMap<Vec<u8>, Count>,
}

struct Count {
    since: Instant,
    lines: u32,
    /// The maximum number of these lines that are written.
    max: u32,
}

impl Repeats {
    /// Counts a line, and returns whether to write it.
    pub(crate) fn admits(&mut self, line: &[u8], now: Instant) -> bool {
        if self.alike.len() >= MAX_KINDS && !self.alike.contains_key(kind_of(line)) {
            // All further kinds share one count, because many addresses could fill the disk as
            // well.
            let count = self.alike.entry(OTHERS.to_vec()).or_insert(Count { since: now, lines: 0, max: 0 });
            count.lines = count.lines.saturating_add(1);
            return false;
        }
        let max = if is_session(line) { MAX_SESSIONS } else { MAX_ALIKE };
        let count = self.alike.entry(kind_of(line).to_vec()).or_insert(Count { since: now, lines: 0, max });
        count.lines = count.lines.saturating_add(1);
        count.lines <= count.max
    }

    /// Removes kinds of lines whose window has expired. Returns a line for each kind of which lines
    /// were suppressed, with their number.
    pub(crate) fn left_out(&mut self, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        self.alike.retain(|line, count| {
            let is_over = now.saturating_duration_since(count.since) >= WINDOW;
            if is_over && count.lines > count.max {
                let more = count.lines - count.max;
                let line = String::from_utf8_lossy(line).trim_end().to_owned();
                let quote = if line.contains("peer=\"") { "\"" } else { "" };
                lines.push(format!("{line}{quote}: {more} more like this in {} seconds\n", WINDOW.as_secs()));
            }
            !is_over
        });
        lines
    }

    /// Whether nothing is counted; otherwise `left_out` must be called later.
    pub(crate) fn is_empty(&self) -> bool {
        self.alike.is_empty()
    }
}

/// The part of a line that similar lines share: up to the peer's port or the offset on a volume, or
/// the complete line.
fn kind_of(line: &[u8]) -> &[u8] {
    if let Some(begin) = line.windows(PLACE.len()).rposition(|window| window == PLACE) {
        return line.get(..begin).unwrap_or(line);
    }
    let Some(begin) = line.windows(PEER.len()).position(|window| window == PEER) else { return line };
    let (_, rest) = line.split_at(begin + PEER.len());
    // The peer controls the text after the address.
    let address = rest.split(|&byte| byte == b'"').next().unwrap_or(rest);
    let port = address.iter().rposition(|&byte| byte == b':').unwrap_or(address.len());
    line.get(..begin + PEER.len() + port).unwrap_or(line)
}

/// Whether the line is about the start or end of a session, which should all be logged.
fn is_session(line: &[u8]) -> bool {
    let begins = |word: &[u8]| line.windows(word.len()).take(LEVEL_LEN).any(|window| window == word);
    SESSION.iter().any(|word| begins(word)) && !begins(b" login refused")
}

/// Beginnings of lines about sessions, after the level and its colours.
const SESSION: [&[u8]; 4] = [b" login ", b" logout: ", b" connection lost: ", b" reservation change"];
/// The maximum length of the level with its colours, in bytes.
const LEVEL_LEN: usize = 24;
/// The maximum number of similar lines about sessions within [`WINDOW`]: enough for all logins
/// after a restart.
const MAX_SESSIONS: u32 = 1000;
/// The line that counts all kinds of lines beyond [`MAX_KINDS`].
const OTHERS: &[u8] = b" WARN lines of other kinds are left out";

/// The field of a line with the peer.
const PEER: &[u8] = b"peer=\"";
/// The field of a line with the offset on a volume.
const PLACE: &[u8] = b" offset=";
/// The maximum number of similar lines within [`WINDOW`].
const MAX_ALIKE: u32 = 5;
const MAX_KINDS: usize = 4096;
/// The time for which lines are counted.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_lines_that_differ_only_in_the_port_are_written_and_the_rest_is_counted() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let line = |port: u32| format!(" WARN closing: peer did: wrong peer=\"127.0.0.1:{port}\"\n");
        let written = (0..1000).filter(|&port| repeats.admits(line(port).as_bytes(), now)).count();
        assert_eq!(written, 5);
        assert!(repeats.admits(b" WARN closing: peer did: wrong peer=\"127.0.0.2:1\"\n", now));
        assert!(repeats.admits(b" INFO serving\n", now));
        assert!(repeats.left_out(now).is_empty());
        let expected =
            " WARN closing: peer did: wrong peer=\"127.0.0.1\": 995 more like this in 10 seconds\n";
        assert_eq!(repeats.left_out(now + WINDOW), [expected]);
        assert!(repeats.is_empty());
        assert!(repeats.admits(line(1).as_bytes(), now + WINDOW));
    }

    #[test]
    fn logins_are_written_but_refusals_of_one_address_are_counted() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut written = |what: &str| {
            let line = |nth: u32| {
                let initiator = format!("iqn.x:{nth} peer=\\\"1.1.1.{nth}:1");
                format!(
                    " WARN {what} protocol=\"iscsi\" peer=\"127.0.0.1:{nth}\" initiator=\"{initiator}\"\n"
                )
            };
            (0..100).filter(|&nth| repeats.admits(line(nth).as_bytes(), now)).count()
        };
        assert_eq!(
            (written("login"), written("logout: done"), written("connection lost: gone")),
            (100, 100, 100)
        );
        assert_eq!(written("login refused: peer may not"), 5);
    }

    #[test]
    fn the_number_of_lines_is_limited_for_many_addresses() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let line = |nth: usize| format!(" WARN login refused peer=\"10.{}.{}.1:1\"\n", nth >> 8, nth & 255);
        let written = (0..10_000).filter(|&nth| repeats.admits(line(nth).as_bytes(), now)).count();
        assert_eq!(written, MAX_KINDS);
        let left_out = repeats.left_out(now + WINDOW);
        assert_eq!(
            left_out,
            [" WARN lines of other kinds are left out: 5904 more like this in 10 seconds\n"]
        );
    }

    #[test]
    fn lines_that_differ_only_in_the_offset_are_repeats() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let line =
            |what: &str, at: u32| format!(" WARN /a: {what} has failed: why offset={at} length={at}\n");
        let mut written =
            |what| (0..1000).filter(|&at| repeats.admits(line(what, at).as_bytes(), now)).count();
        assert_eq!((written("a read"), written("a write")), (5, 5));
        let mut left_out = repeats.left_out(now + WINDOW);
        left_out.sort();
        let expected = ["a read", "a write"]
            .map(|what| format!(" WARN /a: {what} has failed: why: 995 more like this in 10 seconds\n"));
        assert_eq!(left_out, expected);
    }
}
