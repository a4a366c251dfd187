//! Suppression of repeated log lines.
//!
//! Peers or a failing device can cause thousands of similar lines per second, which would fill the
//! disk. Lines that differ only in the peer's port or in the offset on a volume are similar: a few
//! are written, and the rest within some seconds are counted.
//!
//! Places are counted for each [`LineClass`], so that refused peers cannot displace the line of a
//! login. Once many addresses have places, further ones share one with their network, then with a
//! larger network, then with all addresses. See
//! `docs/decisions/0074-log-lines-are-limited-by-event.md`.

use super::record::{LineClass, Record};
use blockmux_engine::net::zone;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The lines of the last seconds.
#[derive(Default)]
pub(super) struct Repeats {
    classes: [ClassLines; LineClass::ALL.len()],
}

/// The lines of one class.
#[derive(Default)]
struct ClassLines {
    /// Similar lines, by the width of the network whose addresses share a place.
    places: [HashMap<(String, Source), LineCount>; LEVELS.len()],
    /// Lines that found no place.
    others: Option<LineCount>,
    /// When lines of this class were first written in this window, and how many.
    written: Option<(Instant, u32)>,
}

/// The number of similar lines.
struct LineCount {
    since: Instant,
    lines: u32,
    written: u32,
    /// The line that counts those that are left out, without their number.
    summary: Record,
}

/// The addresses that share a place.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Source {
    /// The line has no peer.
    NoPeer,
    /// A network, or one address if the length is that of an address.
    Network(IpAddr, u8),
    /// A peer without an IP address: a MAC address, or a process of this machine.
    Named(String),
    Everyone,
}

impl Repeats {
    /// Counts a line, and returns whether to write it.
    pub(super) fn admits(&mut self, line: &Record, now: Instant) -> bool {
        let class = line.class();
        let limits = class.limits();
        let Some(lines) = self.classes.get_mut(class as usize) else { return true };
        let all_written = lines.written.map_or(0, |(_, written)| written);
        let count = lines.place(line, limits.places, now);
        count.lines = count.lines.saturating_add(1);
        let is_admitted = count.written < limits.alike && all_written < limits.written;
        if is_admitted {
            count.written += 1;
            lines.written.get_or_insert((now, 0)).1 += 1;
        }
        is_admitted
    }

    /// Removes kinds of lines whose window has expired. Returns a line for each kind of which lines
    /// were suppressed, with their number.
    pub(super) fn left_out(&mut self, now: Instant) -> Vec<Record> {
        let has_expired = |since: Instant| now.saturating_duration_since(since) >= WINDOW;
        let mut summaries = Vec::new();
        let mut is_over = |count: &LineCount| {
            let more = count.lines - count.written;
            if has_expired(count.since) && more > 0 {
                summaries.push(count.summary.counting(more, WINDOW));
            }
            has_expired(count.since)
        };
        for class in &mut self.classes {
            class.places.iter_mut().for_each(|places| places.retain(|_, count| !is_over(count)));
            class.others.take_if(|count| is_over(count));
            class.written.take_if(|(since, _)| has_expired(*since));
        }
        summaries
    }

    /// Whether nothing is counted; otherwise `left_out` must be called later.
    pub(super) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| {
            class.written.is_none() && class.others.is_none() && class.places.iter().all(HashMap::is_empty)
        })
    }
}

impl ClassLines {
    /// The count of the lines that are similar to this one.
    fn place(&mut self, line: &Record, max_places: usize, now: Instant) -> &mut LineCount {
        let source = line.peer().map_or(Source::NoPeer, Source::of);
        let mut key = (line.kind(), source);
        let has_place =
            |(places, max): (&HashMap<_, _>, usize), key: &_| places.len() < max || places.contains_key(key);
        let mut width = 0;
        while let Some((places, level)) = self.places.get(width).zip(LEVELS.get(width)) {
            key.1 = key.1.within(level);
            if has_place((places, level.max_places.min(max_places)), &key) {
                break;
            }
            width += 1;
        }
        let begin = |summary| LineCount { since: now, lines: 0, written: 0, summary };
        match self.places.get_mut(width) {
            Some(places) => {
                let summary = || line.summary(Some(&*key.1.to_string()).filter(|source| !source.is_empty()));
                places.entry(key.clone()).or_insert_with(|| begin(summary()))
            }
            None => self.others.get_or_insert_with(|| begin(Record::warning(OTHERS.to_owned()))),
        }
    }
}

impl Source {
    /// The source of a line about this peer, whose port does not matter.
    fn of(peer: &str) -> Source {
        zone::ip_in(peer).map_or_else(
            || Source::Named(peer.to_owned()),
            |ip| {
                let ip = ip.to_canonical();
                Source::Network(ip, if ip.is_ipv4() { 32 } else { 128 })
            },
        )
    }

    /// The wider source at this level that includes this one.
    fn within(&self, level: &Level) -> Source {
        match self {
            Source::Network(IpAddr::V4(ip), len) if level.v4_bits > 0 => {
                let len = level.v4_bits.min(*len);
                let mask = u32::MAX << (32 - u32::from(len));
                Source::Network(Ipv4Addr::from_bits(ip.to_bits() & mask).into(), len)
            }
            Source::Network(IpAddr::V6(ip), len) if level.v6_bits > 0 => {
                let len = level.v6_bits.min(*len);
                let mask = u128::MAX << (128 - u32::from(len));
                Source::Network(Ipv6Addr::from_bits(ip.to_bits() & mask).into(), len)
            }
            Source::Named(_) if level.v4_bits == 32 => self.clone(),
            Source::NoPeer => Source::NoPeer,
            Source::Network(..) | Source::Named(_) | Source::Everyone => Source::Everyone,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::NoPeer => Ok(()),
            Source::Network(ip @ IpAddr::V4(_), 32) | Source::Network(ip, 128) => write!(f, "{ip}"),
            Source::Network(ip, len) => write!(f, "{ip}/{len}"),
            Source::Named(name) => f.write_str(name),
            Source::Everyone => f.write_str("other addresses"),
        }
    }
}

/// Limits of one class of lines within [`WINDOW`].
struct Limits {
    /// The maximum number of similar lines that are written.
    alike: u32,
    /// The maximum number of lines that are written.
    written: u32,
    /// The number of kinds of lines of single addresses.
    places: usize,
}

impl LineClass {
    fn limits(self) -> Limits {
        match self {
            // Enough for all logins after a restart.
            LineClass::Session => Limits { alike: 1000, written: u32::MAX, places: 1024 },
            // With the lines that count the rest, this is less than 10,000 in 30 s, above which
            // journald drops lines of all classes.
            LineClass::Peer => Limits { alike: MAX_ALIKE, written: 1000, places: 512 },
            LineClass::Other => Limits { alike: MAX_ALIKE, written: 4096, places: 4096 },
        }
    }
}

/// How wide the network is whose addresses share a place, and the number of these places.
struct Level {
    v4_bits: u8,
    v6_bits: u8,
    max_places: usize,
}

/// The levels, from one address to all. Those of the first are limited by [`Limits::places`].
const LEVELS: [Level; 4] = [
    Level { v4_bits: 32, v6_bits: 128, max_places: usize::MAX },
    // A network of a site: a host can choose any address in a /64.
    Level { v4_bits: 24, v6_bits: 64, max_places: 256 },
    Level { v4_bits: 16, v6_bits: 48, max_places: 128 },
    Level { v4_bits: 0, v6_bits: 0, max_places: 128 },
];
/// The line that counts all kinds of lines that found no place.
const OTHERS: &str = "lines of other kinds are left out";
/// The maximum number of similar lines within [`WINDOW`].
const MAX_ALIKE: u32 = 5;
/// The time for which lines are counted.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::log::record::tests::line;

    /// A refusal of a peer at this address.
    fn refused(peer: &str) -> Record {
        line("WARN", "login refused: peer may not", &[("protocol", "iscsi"), ("peer", peer)])
    }

    /// A login from this address.
    fn login(peer: &str) -> Record {
        let fields = [("protocol", "iscsi"), ("peer", peer), ("initiator", "iqn.x:a"), ("target", "iqn.x:t")];
        line("INFO", "login", &fields)
    }

    fn texts(records: Vec<Record>) -> Vec<String> {
        let mut texts: Vec<_> = records.iter().map(Record::text).collect();
        texts.sort();
        texts
    }

    /// An address for each number, each in a network of its own.
    fn far_address(nth: usize) -> String {
        format!("{}.{}.7.1:1", 1 + nth / 256, nth % 256)
    }

    #[test]
    fn a_few_lines_that_differ_only_in_the_port_are_written_and_the_rest_is_counted() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut is_written =
            |at: &str, now| repeats.admits(&line("WARN", "closing: peer did: wrong", &[("peer", at)]), now);
        let written = (0..1000).filter(|port| is_written(&format!("127.0.0.1:{port}"), now)).count();
        assert_eq!(written, 5);
        assert!(is_written("127.0.0.2:1", now));
        assert!(repeats.admits(&line("INFO", "serving", &[]), now));
        assert_eq!(repeats.left_out(now), []);
        let expected = " WARN closing: peer did: wrong: 995 more like this in 10 seconds peer=\"127.0.0.1\"";
        assert_eq!(texts(repeats.left_out(now + WINDOW)), [expected]);
        assert!(repeats.is_empty());
        assert!(repeats.admits(&line("WARN", "closing: peer did: wrong", &[("peer", "127.0.0.1:1")]), now));
    }

    #[test]
    fn logins_are_written_but_refusals_of_one_address_are_counted() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut written = |level: &str, what: &str| {
            let line = |nth: u32| {
                let (peer, name) = (format!("127.0.0.1:{nth}"), format!("iqn.x:{nth}"));
                line(level, what, &[("protocol", "iscsi"), ("peer", &peer), ("initiator", &name)])
            };
            (0..100).filter(|&nth| repeats.admits(&line(nth), now)).count()
        };
        assert_eq!((written("INFO", "login"), written("INFO", "logout: done")), (100, 100));
        assert_eq!(written("WARN", "connection lost: gone"), 100);
        assert_eq!(written("WARN", "login refused: peer may not"), 5);
    }

    #[test]
    fn a_login_has_its_line_beside_refusals_of_any_number_of_addresses() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let written = (0..20_000).filter(|&nth| repeats.admits(&refused(&far_address(nth)), now)).count();
        assert_eq!(written, 512 + 256 + 128 + 5);
        assert!(repeats.admits(&login("192.0.2.1:5"), now));
        let change = line("INFO", "config changed", &[("protocol", "api"), ("peer", "process 7")]);
        assert!(repeats.admits(&change, now));
        assert!(repeats.admits(&line("ERROR", "/a: read failed", &[]), now), "lines without a peer");
    }

    #[test]
    fn a_login_has_its_line_beside_refused_reservations_of_any_number_of_units() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for lun in 0..20_000 {
            let what = format!("reservation change refused: LUN {lun}: RESERVE");
            repeats.admits(&line("WARN", &what, &[("peer", "192.0.2.1:5")]), now);
        }
        assert!(repeats.admits(&login("192.0.2.2:5"), now));
        let change = line("INFO", "config changed", &[("protocol", "api"), ("peer", "process 7")]);
        assert!(repeats.admits(&change, now));
    }

    #[test]
    fn every_refusal_is_written_or_counted() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let lines = 20_000;
        let written = (0..lines).filter(|&nth| repeats.admits(&refused(&far_address(nth)), now)).count();
        let counted = |text: &String| {
            let (before, _) = text.split_once(" more like this").unwrap();
            before.rsplit(' ').next().unwrap().parse::<usize>().unwrap()
        };
        let left_out = texts(repeats.left_out(now + WINDOW));
        assert_eq!(written + left_out.iter().map(counted).sum::<usize>(), lines);
    }

    #[test]
    fn addresses_share_the_place_of_their_network_once_there_are_many() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for nth in 0..512 {
            repeats.admits(&refused(&far_address(nth)), now);
        }
        for host in 0..100 {
            repeats.admits(&refused(&format!("192.0.2.{host}:1")), now);
            repeats.admits(&refused(&format!("[2001:db8:0:1::{host:x}]:1")), now);
        }
        let expected = ["192.0.2.0/24", "2001:db8:0:1::/64"].map(|network| {
            format!(
                " WARN login refused: peer may not: 95 more like this in 10 seconds \
                 protocol=\"iscsi\" peer=\"{network}\""
            )
        });
        assert_eq!(texts(repeats.left_out(now + WINDOW)), expected);
    }

    #[test]
    fn the_number_of_places_is_limited() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for nth in 0..10_000 {
            let peer = [("peer", &*far_address(nth))];
            repeats.admits(&line("WARN", &format!("closing: peer did: {nth}"), &peer), now);
            repeats.admits(&line("INFO", &format!("config changed: {nth}"), &peer), now);
            repeats.admits(&line("WARN", &format!("it failed: {nth}"), &[]), now);
        }
        let places: usize = repeats.classes.iter().flat_map(|class| &class.places).map(HashMap::len).sum();
        assert_eq!(places, 1024 + 512 + 4096 + 3 * 512);
    }

    #[test]
    fn discovery_sessions_of_an_address_do_not_displace_its_logins() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let discovery = [("protocol", "iscsi"), ("peer", "192.0.2.1:5"), ("target", "discovery")];
        let written = (0..5000).filter(|_| repeats.admits(&line("INFO", "login", &discovery), now)).count();
        assert_eq!(written, 1000);
        assert!(repeats.admits(&login("192.0.2.1:5"), now));
    }

    #[test]
    fn lines_that_differ_only_in_the_offset_are_repeats() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut written = |what: &str| {
            let line =
                |at: u32| line("WARN", &format!("/a: {what} failed: why"), &[("offset", &at.to_string())]);
            (0..1000).filter(|&at| repeats.admits(&line(at), now)).count()
        };
        assert_eq!((written("read"), written("write")), (5, 5));
        let expected = ["read", "write"]
            .map(|what| format!(" WARN /a: {what} failed: why: 995 more like this in 10 seconds"));
        assert_eq!(texts(repeats.left_out(now + WINDOW)), expected);
    }
}
