//! Suppression of repeated log lines.
//!
//! Peers or a failing device can cause thousands of similar lines per second, which would fill the
//! disk. Lines that differ only in the peer's port or in the offset on a volume are similar: a few
//! are written, and the rest within some seconds are counted.
//!
//! Places are counted for each [`LineClass`], so that refused peers cannot displace the line of a
//! login. One source has only some of the places and lines of its class, and the first line of a
//! place is always written. Once many addresses have places, further ones share one with their
//! network, then with a larger network, then with all addresses.
//! See `docs/decisions/0074-log-lines-are-limited-by-event.md`.

use super::record::{LineClass, Record};
use blockmux_engine::net::zone;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The lines of the last seconds.
#[derive(Default)]
pub(super) struct Repeats {
    classes: [ClassLines; LineClass::ALL.len()],
    /// Hashes the names of initiators.
    hasher: RandomState,
}

/// The lines of one class.
#[derive(Default)]
struct ClassLines {
    /// Similar lines, by the width of the network whose addresses share a place.
    places: [LinePlaces; LEVELS.len()],
    /// Lines that found no place.
    others: Option<LineCount>,
    written: WrittenLines,
}

/// Similar lines, by their source and by what they share.
#[derive(Default)]
struct LinePlaces {
    sources: HashMap<Source, SourceLines>,
    /// The number of places of all sources.
    len: usize,
}

/// The lines of one source.
#[derive(Default)]
struct SourceLines {
    kinds: HashMap<String, LineCount>,
    written: WrittenLines,
}

/// When lines were first written in this window, and how many.
#[derive(Default)]
struct WrittenLines(Option<(Instant, u32)>);

/// The number of similar lines.
struct LineCount {
    since: Instant,
    lines: u32,
    written: u32,
    /// The maximum number of lines that are written, apart from those of new initiators.
    alike: u32,
    /// Hashes of the initiators' names of which a line was written.
    initiators: Vec<u64>,
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
        let initiator = line.initiator().map(|name| self.hasher.hash_one(name));
        let (count, of_source) = place(&mut lines.places, &mut lines.others, line, &limits, now);
        count.lines = count.lines.saturating_add(1);
        let is_new = count.initiators.len() < limits.initiators
            && initiator.is_some_and(|name| !count.initiators.contains(&name));
        let is_within = lines.written.number() < limits.written
            && of_source.as_ref().is_none_or(|written| written.number() < limits.of_source);
        let is_admitted = count.written == 0 || (is_new || count.written < count.alike) && is_within;
        if is_admitted {
            count.written += 1;
            count.initiators.extend(initiator.filter(|_| is_new));
            lines.written.add(now);
            if let Some(written) = of_source {
                written.add(now);
            }
        }
        is_admitted
    }

    /// Removes kinds of lines whose window has expired. Returns a line for each kind of which lines
    /// were suppressed, with their number.
    pub(super) fn left_out(&mut self, now: Instant) -> Vec<Record> {
        let mut summaries = Vec::new();
        let mut is_over = |count: &LineCount| {
            let more = count.lines - count.written;
            if has_expired(count.since, now) && more > 0 {
                summaries.push(count.summary.counting(more, WINDOW));
            }
            has_expired(count.since, now)
        };
        for class in &mut self.classes {
            class.places.iter_mut().for_each(|places| places.retain(now, |count| !is_over(count)));
            class.others.take_if(|count| is_over(count));
            class.written.expire(now);
        }
        summaries
    }

    /// Whether nothing is counted; otherwise `left_out` must be called later.
    pub(super) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| {
            class.written.0.is_none()
                && class.others.is_none()
                && class.places.iter().all(|places| places.len == 0)
        })
    }
}

/// The count of the lines that are similar to this one, and the lines written of its source.
fn place<'a>(
    levels: &'a mut [LinePlaces],
    others: &'a mut Option<LineCount>,
    line: &Record,
    limits: &Limits,
    now: Instant,
) -> (&'a mut LineCount, Option<&'a mut WrittenLines>) {
    let (kind, mut source) = (line.kind(), line.peer().map_or(Source::NoPeer, Source::of));
    for (places, level) in levels.iter_mut().zip(&LEVELS) {
        source = source.within(level);
        let is_other = places.has_too_many(&kind, &source);
        let kind = if is_other { OTHERS } else { &kind };
        let has_place = places.sources.get(&source).is_some_and(|lines| lines.kinds.contains_key(kind));
        if has_place || places.len < level.max_places.min(limits.places) {
            places.len += usize::from(!has_place);
            let name = Some(source.to_string()).filter(|name| !name.is_empty());
            let begin = || match is_other {
                true => LineCount::of_others(name.as_deref(), limits.of_source, now),
                false => LineCount::new(line.summary(name.as_deref()), limits.alike, now),
            };
            let lines = places.sources.entry(source).or_default();
            return (lines.kinds.entry(kind.to_owned()).or_insert_with(begin), Some(&mut lines.written));
        }
    }
    (others.get_or_insert_with(|| LineCount::of_others(None, limits.alike, now)), None)
}

impl LineCount {
    fn new(summary: Record, alike: u32, now: Instant) -> LineCount {
        LineCount { since: now, lines: 0, written: 0, alike, initiators: Vec::new(), summary }
    }

    /// Counts lines of all other kinds of a source.
    fn of_others(source: Option<&str>, alike: u32, now: Instant) -> LineCount {
        LineCount::new(Record::warning(OTHERS.to_owned()).about_peer(source), alike, now)
    }
}

impl WrittenLines {
    fn number(&self) -> u32 {
        self.0.map_or(0, |(_, written)| written)
    }

    fn add(&mut self, now: Instant) {
        self.0.get_or_insert((now, 0)).1 += 1;
    }

    fn expire(&mut self, now: Instant) {
        self.0.take_if(|(since, _)| has_expired(*since, now));
    }
}

fn has_expired(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= WINDOW
}

impl LinePlaces {
    /// Whether the source has as many places as one may have, and none for this kind of lines.
    fn has_too_many(&self, kind: &str, source: &Source) -> bool {
        let is_bounded = !matches!(source, Source::NoPeer | Source::Everyone);
        let kinds = self.sources.get(source).filter(|_| is_bounded).map(|lines| &lines.kinds);
        kinds.is_some_and(|kinds| kinds.len() >= MAX_KINDS_OF_SOURCE && !kinds.contains_key(kind))
    }

    fn retain(&mut self, now: Instant, mut stays: impl FnMut(&LineCount) -> bool) {
        self.sources.retain(|_, lines| {
            lines.written.expire(now);
            lines.kinds.retain(|_, count| stays(count));
            !lines.kinds.is_empty()
        });
        self.len = self.sources.values().map(|lines| lines.kinds.len()).sum();
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
            Source::Network(ip @ IpAddr::V4(_), 32) => write!(f, "{ip}"),
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
    /// The maximum number of initiators of which one similar line each is written beyond that.
    initiators: usize,
    /// The maximum number of lines of one source that are written, apart from the first of each
    /// kind.
    of_source: u32,
    /// The maximum number of lines that are written, apart from the first of each kind and source.
    written: u32,
    /// The number of kinds of lines of single addresses.
    places: usize,
}

impl LineClass {
    fn limits(self) -> Limits {
        match self {
            // Enough for all logins after a restart.
            LineClass::Session => {
                Limits { alike: 1000, initiators: 0, of_source: 1000, written: u32::MAX, places: 1024 }
            }
            // A node of a cluster registers and reserves on 64 LUNs.
            LineClass::Reservation => {
                Limits { alike: 50, initiators: 0, of_source: 250, written: u32::MAX, places: 1024 }
            }
            // The connections of one client, and the clients behind one address.
            LineClass::OpenSession => {
                Limits { alike: 16, initiators: 64, of_source: 160, written: 2000, places: 1024 }
            }
            LineClass::Peer => {
                Limits { alike: MAX_ALIKE, initiators: 0, of_source: 80, written: 1000, places: 512 }
            }
            LineClass::Other => {
                Limits { alike: MAX_ALIKE, initiators: 0, of_source: u32::MAX, written: 4096, places: 4096 }
            }
        }
    }
}

/// How wide the network is whose addresses share a place, and the number of these places.
struct Level {
    v4_bits: u8,
    v6_bits: u8,
    max_places: usize,
}

/// The levels, from one host to all. Those of the first are limited by [`Limits::places`].
const LEVELS: [Level; 4] = [
    // A host can choose any address in a /64, as in `blockmux_volume::peer_network`.
    Level { v4_bits: 32, v6_bits: 64, max_places: usize::MAX },
    // A network of a site.
    Level { v4_bits: 24, v6_bits: 56, max_places: 256 },
    Level { v4_bits: 16, v6_bits: 48, max_places: 128 },
    Level { v4_bits: 0, v6_bits: 0, max_places: 128 },
];
/// The line that counts all kinds of lines that found no place.
const OTHERS: &str = "lines of other kinds are left out";
/// The maximum number of places of one address or network, apart from the one for all other lines.
const MAX_KINDS_OF_SOURCE: usize = 64;
/// The maximum number of similar lines within [`WINDOW`].
const MAX_ALIKE: u32 = 5;
/// The time for which lines are counted.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::log::record::tests::{line, open_line};

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
            repeats.admits(&refused(&format!("[2001:db8:0:1{host:02x}::1]:1")), now);
        }
        let expected = ["192.0.2.0/24", "2001:db8:0:100::/56"].map(|network| {
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
        let places: usize =
            repeats.classes.iter().flat_map(|class| &class.places).map(|places| places.len).sum();
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

    /// What an initiator without authentication at this address causes.
    fn open(what: &str, peer: &str, initiator: &str, target: &str) -> Record {
        let fields = [("protocol", "iscsi"), ("peer", peer), ("initiator", initiator), ("target", target)];
        open_line(what, &fields)
    }

    #[test]
    fn of_sessions_without_authentication_a_few_of_each_address_and_one_of_each_initiator_are_written() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for what in ["login", "logout: done"] {
            let mut written = |names: u32, peer: &str| {
                let line = |nth: u32| open(what, peer, &format!("iqn.x:{}", nth % names), "discovery");
                (0..5000).filter(|&nth| repeats.admits(&line(nth), now)).count()
            };
            assert_eq!((written(1, "192.0.2.1:5"), written(5000, "192.0.2.2:5")), (16, 64));
            assert_eq!(written(20, "192.0.2.3:5"), 20);
        }
        assert!(repeats.admits(&open("login", "192.0.2.1:6", "iqn.y:a", "discovery"), now));
        assert!(repeats.admits(&open("login", "192.0.2.2:6", "iqn.y:a", "iqn.y:t"), now));
        let left_out = texts(repeats.left_out(now + WINDOW));
        let expected = " INFO login: 4984 more like this in 10 seconds protocol=\"iscsi\" peer=\"192.0.2.1\" target=\"discovery\"";
        assert!(left_out.iter().any(|line| line == expected), "{left_out:#?}");
    }

    #[test]
    fn sessions_without_authentication_displace_no_line_of_others() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let many = |repeats: &mut Repeats| {
            let line =
                |nth: usize| open("login", &far_address(nth % 20_000), &format!("iqn.x:{nth}"), "iqn.x:t");
            (0..40_000).filter(|&nth| repeats.admits(&line(nth), now)).count()
        };
        assert_eq!(many(&mut repeats), 2000);
        assert!(repeats.admits(&login("192.0.2.1:5"), now), "an authenticated session");
        assert!(repeats.admits(&refused("192.0.2.2:5"), now));
    }

    #[test]
    fn one_address_leaves_places_for_others_whatever_it_does() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut written = 0;
        for lun in 0..20_000 {
            let what = format!("reservation changed: LUN {lun}: REGISTER");
            written += u32::from(repeats.admits(&open(&what, "192.0.2.1:5", "iqn.x:a", "iqn.x:t"), now));
            let refused = line("WARN", &format!("login refused: {lun}"), &[("peer", "192.0.2.1:5")]);
            repeats.admits(&refused, now);
        }
        assert_eq!(written, 160);
        for nth in 0..400 {
            let peer = far_address(nth);
            assert!(repeats.admits(&open("login", &peer, "iqn.x:b", "iqn.x:t"), now));
            assert!(repeats.admits(&refused(&peer), now));
        }
        let left_out = texts(repeats.left_out(now + WINDOW));
        let expected =
            " WARN lines of other kinds are left out: 19920 more like this in 10 seconds peer=\"192.0.2.1\"";
        assert!(left_out.iter().any(|line| line == expected), "{left_out:#?}");
    }

    #[test]
    fn the_initiators_of_one_address_leave_lines_for_others() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let many = |repeats: &mut Repeats, peer: &str| {
            let line = |nth: u32| {
                let (name, target) = (format!("iqn.x:{nth}"), format!("iqn.x:t{}", nth / 82));
                [open("login", peer, &name, &target), open("logout: done", peer, &name, &target)]
            };
            (0..16 * 82).flat_map(line).filter(|line| repeats.admits(line, now)).count()
        };
        assert_eq!(many(&mut repeats, "127.0.0.9:1"), 160 + 28, "and the first to each target");
        for host in 10..30 {
            assert!(many(&mut repeats, &format!("127.0.0.{host}:1")) >= 32);
        }
        assert!(repeats.admits(&open("login", "127.0.0.50:1", "iqn.x:b", "iqn.x:t0"), now));
    }

    #[test]
    fn the_refusals_of_one_address_leave_lines_for_others() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let many = |repeats: &mut Repeats, peer: &str| {
            let line = |nth: u32| line("WARN", &format!("login refused: {}", nth / 150), &[("peer", peer)]);
            (0..3000).filter(|&nth| repeats.admits(&line(nth), now)).count()
        };
        assert_eq!(many(&mut repeats, "127.0.0.9:1"), 80 + 4, "and the first of each kind");
        for host in 10..30 {
            many(&mut repeats, &format!("127.0.0.{host}:1"));
        }
        assert!(repeats.admits(&refused("127.0.0.50:1"), now));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_are_one_source() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let login = |nth: u32| {
            open("login", &format!("[2001:db8:0:1::{nth:x}]:1"), &format!("iqn.x:{nth}"), "iqn.x:t")
        };
        assert_eq!((0..20_000).filter(|&nth| repeats.admits(&login(nth), now)).count(), 64);
        assert!(repeats.admits(&open("login", "[2001:db8:0:2::1]:1", "iqn.x:b", "iqn.x:t"), now));
        let expected = " INFO login: 19936 more like this in 10 seconds protocol=\"iscsi\" \
                        peer=\"2001:db8:0:1::/64\" target=\"iqn.x:t\"";
        assert_eq!(texts(repeats.left_out(now + WINDOW)), [expected]);
    }

    #[test]
    fn an_authenticated_address_causes_a_limited_number_of_lines() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let register = |nth: u32, peer: &str| {
            let what = format!("reservation changed: LUN {}: REGISTER AND IGNORE EXISTING KEY", nth % 64);
            line("INFO", &what, &[("protocol", "iscsi"), ("peer", peer), ("target", "iqn.x:t")])
        };
        let written = (0..20_000).filter(|&nth| repeats.admits(&register(nth, "192.0.2.1:5"), now)).count();
        assert_eq!(written, 250);
        assert!((0..250).all(|nth| repeats.admits(&register(nth, "192.0.2.2:5"), now)), "another address");
        let login = |nth: u32| {
            let target = format!("iqn.x:t{}", nth % 64);
            line("INFO", "login", &[("protocol", "iscsi"), ("peer", "192.0.2.1:5"), ("target", &target)])
        };
        assert_eq!((0..20_000).filter(|&nth| repeats.admits(&login(nth), now)).count(), 1000);
        let left_out = texts(repeats.left_out(now + WINDOW));
        assert_eq!(left_out.len(), 2 * 64, "a line with the number of each kind: {left_out:#?}");
    }

    #[test]
    fn one_change_of_a_reservation_is_written_fifty_times() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let change = line("INFO", "reservation changed: LUN 1: RESERVE", &[("peer", "192.0.2.1:5")]);
        assert_eq!((0..1000).filter(|_| repeats.admits(&change, now)).count(), 50);
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
