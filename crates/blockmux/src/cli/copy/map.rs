//! The map of the source: ranges of data and of zeroes.

use blockmux_volume::Extent;
use std::collections::VecDeque;

/// A range of the source that is copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Offset in bytes, a multiple of both sides' blocks.
    pub(super) offset: u64,
    /// Length in bytes, a multiple of the blocks except at the end of the source.
    pub(super) len: u64,
    /// Whether the source reports zeroes.
    pub(super) is_zero: bool,
}

/// Iterates over the source from its start to its end, with one block status request at a time.
pub(super) struct Map {
    /// Offset up to which the map is known.
    at: u64,
    end: u64,
    block: u64,
    /// Known segments that are not taken yet.
    known: VecDeque<Segment>,
    is_querying: bool,
}

impl Map {
    /// The map of a source of `end` bytes; segments are multiples of `block`.
    pub(super) fn new(end: u64, block: u64) -> Map {
        Map { at: 0, end, block, known: VecDeque::new(), is_querying: false }
    }

    /// The range of the next block status request, if one is needed.
    pub(super) fn next_query(&mut self) -> Option<(u64, u64)> {
        if self.is_querying || self.at == self.end || self.known.len() > LOW_WATER {
            return None;
        }
        self.is_querying = true;
        Some((self.at, (self.end - self.at).min(MAX_QUERY)))
    }

    /// Handles the result of the request.
    ///
    /// Ranges of zeroes are rounded to whole blocks in favor of data. A result shorter than one
    /// block counts as data, so that every result makes progress.
    pub(super) fn on_extents(&mut self, extents: &[Extent]) {
        self.is_querying = false;
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

    /// Handles a failed request: the rest of the source counts as data.
    pub(super) fn on_unknown(&mut self) {
        self.is_querying = false;
        self.push(self.at, self.end, false);
        self.at = self.end;
    }

    /// The next segment, at most `data_len` bytes of data or [`MAX_ZEROES`] of zeroes.
    pub(super) fn take(&mut self, data_len: u64) -> Option<Segment> {
        let front = self.known.front_mut()?;
        let most = if front.is_zero { MAX_ZEROES } else { data_len };
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

    /// Rounds down to a block; the end of the source counts as a boundary.
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

/// The number of known segments below which the next request is sent.
const LOW_WATER: usize = 32;
/// The maximum length of a request, in bytes; a multiple of any block.
const MAX_QUERY: u64 = 1 << 30;
/// The maximum length of a segment of zeroes, in bytes, so that progress is visible.
const MAX_ZEROES: u64 = 64 << 20;

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
    fn extents_become_segments() {
        let mut map = Map::new(100 << 10, 512);
        assert_eq!(map.next_query(), Some((0, 100 << 10)));
        assert_eq!(map.next_query(), None, "one next_query at a time");
        map.on_extents(&[extent(10 << 10, false), extent(50 << 10, true)]);
        assert!(!map.is_empty());
        assert_eq!(map.next_query(), Some((60 << 10, 40 << 10)));
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
    fn zeroes_shrink_to_whole_blocks_and_the_end_counts_as_a_boundary() {
        let mut map = Map::new(10_000, 4096);
        map.next_query();
        map.on_extents(&[extent(1000, false), extent(9000, true)]);
        assert_eq!(all(&mut map, 1 << 20), [(0, 4096, false), (4096, 5904, true)]);
        assert!(map.is_empty());
    }

    #[test]
    fn an_empty_answer_makes_progress() {
        let mut map = Map::new(8192, 4096);
        map.next_query();
        map.on_extents(&[]);
        assert_eq!(map.next_query(), Some((4096, 4096)));
        map.on_extents(&[extent(100, true)]);
        assert_eq!(all(&mut map, 1 << 20), [(0, 8192, false)]);
        assert!(map.is_empty());
    }

    #[test]
    fn a_source_without_block_status_is_all_data() {
        let mut map = Map::new(5000, 512);
        map.next_query();
        map.on_unknown();
        assert_eq!(all(&mut map, 4096), [(0, 4096, false), (4096, 904, false)]);
        assert!(map.is_empty() && map.next_query().is_none());
    }

    #[test]
    fn the_segments_cover_the_source_for_any_answers() {
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
                if map.next_query().is_some() {
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
