//! Where the source's data and zeroes are, in pieces.

use blockmux_volume::Extent;
use std::collections::VecDeque;

/// A part of the source that is copied in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// In bytes, a whole number of both sides' blocks.
    pub(super) offset: u64,
    /// In bytes; whole blocks, but for the end of the source.
    pub(super) len: u64,
    /// All zeroes, as the source says.
    pub(super) is_zero: bool,
}

/// Walks the source from its beginning to its end. What it asks for is asked of the source, one
/// question at a time.
pub(super) struct Map {
    /// Up to here the source has been asked, or need not be.
    at: u64,
    end: u64,
    block: u64,
    /// Known, and not yet taken.
    known: VecDeque<Segment>,
    is_asking: bool,
}

impl Map {
    /// Of a source of `end` bytes; segments are multiples of `block`.
    pub(super) fn new(end: u64, block: u64) -> Map {
        Map { at: 0, end, block, known: VecDeque::new(), is_asking: false }
    }

    /// The range to ask block status of now, if any.
    pub(super) fn question(&mut self) -> Option<(u64, u64)> {
        if self.is_asking || self.at == self.end || self.known.len() > LOW_WATER {
            return None;
        }
        self.is_asking = true;
        Some((self.at, (self.end - self.at).min(QUESTION)))
    }

    /// The answer.
    ///
    /// Zeroes are shrunk to whole blocks, and data grows as much. An answer that does not cover one
    /// block counts as data, so that every answer leads on.
    pub(super) fn on_extents(&mut self, extents: &[Extent]) {
        self.is_asking = false;
        let (mut from, mut known_to) = (self.at, self.at);
        for extent in extents {
            let start = from;
            from = from.saturating_add(extent.len).min(self.end);
            let (first, last) = (start.next_multiple_of(self.block), self.whole(from));
            if extent.zero && first < last {
                self.push(known_to, first, false);
                self.push(first, last, true);
                known_to = last;
            }
        }
        let last = self.whole(from).max(known_to);
        self.push(known_to, last, false);
        if last == self.at {
            let next = (self.at + self.block).min(self.end);
            self.push(last, next, false);
            self.at = next;
        } else {
            self.at = last;
        }
    }

    /// The source does not know: everything is data.
    pub(super) fn on_unknown(&mut self) {
        self.is_asking = false;
        self.push(self.at, self.end, false);
        self.at = self.end;
    }

    /// The next segment, at most `data_len` bytes of data or [`ZEROES`] of zeroes.
    pub(super) fn take(&mut self, data_len: u64) -> Option<Segment> {
        let front = self.known.front_mut()?;
        let most = if front.is_zero { ZEROES } else { data_len };
        if front.len <= most {
            return self.known.pop_front();
        }
        let taken = Segment { len: most, ..*front };
        (front.offset, front.len) = (front.offset + most, front.len - most);
        Some(taken)
    }

    /// Whether everything has been taken.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.at == self.end
    }

    /// Down to a whole block; the end is one.
    fn whole(&self, offset: u64) -> u64 {
        if offset == self.end { offset } else { offset / self.block * self.block }
    }

    fn push(&mut self, from: u64, to: u64, is_zero: bool) {
        if from == to {
            return;
        }
        match self.known.back_mut() {
            Some(last) if last.is_zero == is_zero && last.offset + last.len == from => last.len += to - from,
            _ => self.known.push_back(Segment { offset: from, len: to - from, is_zero }),
        }
    }
}

/// Fewer known segments than this, and the next question is asked.
const LOW_WATER: usize = 32;
/// The most asked about at a time, in bytes; a whole number of any blocks.
const QUESTION: u64 = 1 << 30;
/// The most zeroes made at a time, in bytes: progress stays visible.
const ZEROES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len: u64, zero: bool) -> Extent {
        Extent { len, hole: zero, zero }
    }

    fn all(map: &mut Map, data_len: u64) -> Vec<(u64, u64, bool)> {
        std::iter::from_fn(|| map.take(data_len)).map(|part| (part.offset, part.len, part.is_zero)).collect()
    }

    #[test]
    fn extents_become_pieces() {
        let mut map = Map::new(100 << 10, 512);
        assert_eq!(map.question(), Some((0, 100 << 10)));
        assert_eq!(map.question(), None, "one question at a time");
        map.on_extents(&[extent(10 << 10, false), extent(50 << 10, true)]);
        assert!(!map.is_empty());
        assert_eq!(map.question(), Some((60 << 10, 40 << 10)));
        map.on_extents(&[extent(40 << 10, false)]);
        let expected = [
            (0, 8 << 10, false),
            (8 << 10, 2 << 10, false),
            (10 << 10, 50 << 10, true),
            (60 << 10, 8 << 10, false),
        ];
        assert_eq!(all(&mut map, 8 << 10)[..4], expected);
        assert!(map.is_empty());
    }

    #[test]
    fn zeroes_shrink_to_whole_blocks_and_the_end_is_one() {
        let mut map = Map::new(10_000, 4096);
        map.question();
        map.on_extents(&[extent(1000, false), extent(9000, true)]);
        assert_eq!(all(&mut map, 1 << 20), [(0, 4096, false), (4096, 5904, true)]);
        assert!(map.is_empty());
    }

    #[test]
    fn an_answer_that_says_nothing_still_leads_on() {
        let mut map = Map::new(8192, 4096);
        map.question();
        map.on_extents(&[]);
        assert_eq!(map.question(), Some((4096, 4096)));
        map.on_extents(&[extent(100, true)]);
        assert_eq!(all(&mut map, 1 << 20), [(0, 8192, false)]);
        assert!(map.is_empty());
    }

    #[test]
    fn a_source_that_does_not_know_is_all_data() {
        let mut map = Map::new(5000, 512);
        map.question();
        map.on_unknown();
        assert_eq!(all(&mut map, 4096), [(0, 4096, false), (4096, 904, false)]);
        assert!(map.is_empty() && map.question().is_none());
    }

    #[test]
    fn the_segments_are_the_source_whatever_the_answers() {
        // A small generator is enough to mix lengths and kinds.
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let (end, block) = (next(100_000) + 1, 1 << next(13));
            let (mut map, mut reached) = (Map::new(end, block), 0);
            while !map.is_empty() {
                if map.question().is_some() {
                    let extents: Vec<_> = (0..next(4)).map(|_| extent(next(20_000), next(2) == 1)).collect();
                    map.on_extents(&extents);
                }
                while let Some(part) = map.take(block * 3) {
                    assert_eq!(part.offset, reached);
                    reached += part.len;
                    assert!(part.offset.is_multiple_of(block), "{part:?}");
                    assert!(part.len > 0 && (part.len.is_multiple_of(block) || reached == end), "{part:?}");
                }
            }
            assert_eq!(reached, end);
        }
    }
}
