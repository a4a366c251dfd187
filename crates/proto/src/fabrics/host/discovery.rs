//! Reads the discovery log page in parts (Base 2.0 §5.16.1.23).

use super::info::text;
use crate::nvme::nqn::Nqn;
use blockmux_wire::nvmeof::fabrics::{DISCOVERY_ENTRY_LEN, DiscoveryEntry, DiscoveryHeader};
use zerocopy::FromBytes;

/// An entry of the discovery log page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSubsystem {
    /// NQN of the subsystem; `None` if it is empty, too long or not UTF-8.
    pub nqn: Option<Nqn>,
    /// TRTYPE: 1 is RDMA, 3 is TCP.
    pub transport: u8,
    /// SUBTYPE: 1 is a referral, 2 a subsystem with namespaces, 3 the current discovery subsystem.
    pub kind: u8,
    /// TRADDR: the address.
    pub address: String,
    /// TRSVCID: for TCP, the port.
    pub service: String,
    /// Whether TLS is required.
    pub needs_tls: bool,
}

/// A log page that is being read.
#[derive(Default)]
pub(super) struct DiscoveryLogReader {
    generation: u64,
    records: u64,
    /// Index of the next entry; `None` before the header was read.
    next: Option<u64>,
    found: Vec<FoundSubsystem>,
    restarts: u32,
}

/// What follows a part of the page.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DiscoveryNext {
    More,
    Whole,
    /// The page changed during each read.
    Unstable,
}

impl DiscoveryLogReader {
    /// Offset and length of the next part, in bytes.
    pub(super) fn piece(&self) -> (u64, u32) {
        let entry = DISCOVERY_ENTRY_LEN as u64;
        match self.next {
            None => (0, DISCOVERY_ENTRY_LEN as u32),
            // The header is read again, to detect changes.
            Some(next) if next >= self.wanted() => (0, DISCOVERY_ENTRY_LEN as u32),
            Some(next) => {
                let count = self.wanted().saturating_sub(next).min(ENTRIES_AT_ONCE);
                (next.saturating_add(1).saturating_mul(entry), count.saturating_mul(entry) as u32)
            }
        }
    }

    /// Handles a part of the page.
    pub(super) fn on_piece(&mut self, data: &[u8]) -> DiscoveryNext {
        match self.next {
            None => self.begin(data),
            Some(next) if next >= self.wanted() => {
                let is_same = DiscoveryHeader::read_from_bytes(data)
                    .is_ok_and(|header| header.genctr.get() == self.generation);
                if is_same {
                    return DiscoveryNext::Whole;
                }
                self.restarts = self.restarts.saturating_add(1);
                if self.restarts >= MAX_RESTARTS { DiscoveryNext::Unstable } else { self.begin(data) }
            }
            Some(next) => {
                let mut count = 0;
                for entry in data.chunks_exact(DISCOVERY_ENTRY_LEN) {
                    if let Ok(entry) = DiscoveryEntry::ref_from_bytes(entry) {
                        self.found.push(found(entry));
                    }
                    count = u64::saturating_add(count, 1);
                }
                self.next = Some(next.saturating_add(count.max(1)));
                DiscoveryNext::More
            }
        }
    }

    /// The entries, and the number of entries beyond [`MAX_ENTRIES`].
    pub(super) fn into_found(self) -> (Vec<FoundSubsystem>, u64) {
        let left_out = self.records.saturating_sub(MAX_ENTRIES);
        (self.found, left_out)
    }

    fn begin(&mut self, data: &[u8]) -> DiscoveryNext {
        let Ok(header) = DiscoveryHeader::ref_from_bytes(data) else { return DiscoveryNext::Unstable };
        (self.generation, self.records) = (header.genctr.get(), header.numrec.get());
        self.found.clear();
        self.next = Some(0);
        if self.records == 0 { DiscoveryNext::Whole } else { DiscoveryNext::More }
    }

    fn wanted(&self) -> u64 {
        self.records.min(MAX_ENTRIES)
    }
}

fn found(entry: &DiscoveryEntry) -> FoundSubsystem {
    FoundSubsystem {
        nqn: Nqn::of_field(&entry.subnqn),
        transport: entry.trtype,
        kind: entry.subtype,
        address: text(&entry.traddr),
        service: text(&entry.trsvcid),
        needs_tls: entry.treq & TREQ_SECURE == TREQ_REQUIRED,
    }
}

/// Mask of the secure channel field in TREQ.
const TREQ_SECURE: u8 = 3;
/// Value of the secure channel field: required.
const TREQ_REQUIRED: u8 = 1;
/// Most entries that are retained.
const MAX_ENTRIES: u64 = 10_000;
/// Entries read by one command: every controller supports 4 KiB.
const ENTRIES_AT_ONCE: u64 = 4;
/// Most restarts after the page has changed.
const MAX_RESTARTS: u32 = 8;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use zerocopy::{FromZeros, IntoBytes};

    fn header(generation: u64, records: u64) -> Vec<u8> {
        let head = DiscoveryHeader {
            genctr: generation.into(),
            numrec: records.into(),
            ..DiscoveryHeader::new_zeroed()
        };
        head.as_bytes().to_vec()
    }

    fn entries(count: usize) -> Vec<u8> {
        let mut entry = DiscoveryEntry { trtype: 3, subtype: 2, treq: 1, ..DiscoveryEntry::new_zeroed() };
        entry.subnqn[..5].copy_from_slice(b"nqn.a");
        entry.traddr = [b' '; 256];
        entry.traddr[..7].copy_from_slice(b"::1\0\x07\xff ");
        entry.as_bytes().repeat(count)
    }

    #[test]
    fn a_log_is_read_in_parts_and_its_header_again_at_the_end() {
        let mut reader = DiscoveryLogReader::default();
        assert_eq!(reader.piece(), (0, 1024));
        assert_eq!(reader.on_piece(&header(7, 5)), DiscoveryNext::More);
        assert_eq!(reader.piece(), (1024, 4096));
        assert_eq!(reader.on_piece(&entries(4)), DiscoveryNext::More);
        assert_eq!(reader.piece(), (5 * 1024, 1024));
        assert_eq!(reader.on_piece(&entries(1)), DiscoveryNext::More);
        assert_eq!(reader.piece(), (0, 1024));
        assert_eq!(reader.on_piece(&header(7, 5)), DiscoveryNext::Whole);
        let (found, left_out) = reader.into_found();
        assert_eq!((found.len(), left_out), (5, 0));
        assert_eq!((&found[0].nqn, found[0].address.as_str()), (&Nqn::new("nqn.a"), "::1"));
        assert!(found[0].needs_tls);
    }

    #[test]
    fn names_are_those_that_the_controller_sent() {
        let name = |bytes: &[u8]| {
            let mut entry = DiscoveryEntry::new_zeroed();
            entry.subnqn[..bytes.len()].copy_from_slice(bytes);
            found(&entry).nqn
        };
        for text in ["blktests-subsystem-1", "NQN.2026-11.test:A b", "nqn.\u{e4}\n "] {
            assert_eq!(name(text.as_bytes()).unwrap().as_str(), text);
        }
        for unusable in [&b""[..], b"nqn.\xff", &[b'x'; 224], &[b'x'; 256]] {
            assert_eq!(name(unusable), None);
        }
    }

    #[test]
    fn a_log_that_changes_is_read_again_a_limited_number_of_times() {
        let mut reader = DiscoveryLogReader::default();
        let mut next = DiscoveryNext::More;
        for generation in 0..100 {
            next = reader.on_piece(&header(generation, 1));
            if next != DiscoveryNext::More {
                break;
            }
            assert_eq!(reader.on_piece(&entries(1)), DiscoveryNext::More);
        }
        assert_eq!(next, DiscoveryNext::Unstable);
    }

    #[test]
    fn a_log_of_any_length_costs_bounded_memory() {
        let mut reader = DiscoveryLogReader::default();
        reader.on_piece(&header(0, u64::MAX));
        let mut pieces = 0;
        while reader.piece().0 > 0 {
            reader.on_piece(&entries(4));
            pieces += 1;
        }
        assert_eq!(pieces, 2500);
        assert_eq!(reader.on_piece(&header(0, u64::MAX)), DiscoveryNext::Whole);
        assert_eq!(
            reader.into_found(),
            (vec![found(DiscoveryEntry::ref_from_bytes(&entries(1)).unwrap()); 10_000], u64::MAX - 10_000)
        );
    }
}
