//! Tracks the bytes of a transfer that have arrived or were requested; each byte may do so once
//! (NBD: proto.md, "Request types", `NBD_CMD_READ`; NVMe/TCP: TCP Transport 1.0 §3.3.2).

use smallvec::SmallVec;

/// Byte ranges relative to the request's offset, sorted and not adjacent.
#[derive(Default)]
pub(crate) struct Coverage(SmallVec<[(u32, u32); 2]>);

/// Reason for which a range is invalid.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RangeError {
    /// Some of its bytes had arrived before.
    Overlap,
    /// It would result in more than [`MAX_RANGES`] ranges.
    TooScattered,
}

impl Coverage {
    /// Whether nothing has arrived.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of a request of `len` bytes has arrived.
    #[inline]
    pub(crate) fn is_whole(&self, len: u64) -> bool {
        matches!(self.0.as_slice(), [(0, end)] if u64::from(*end) == len)
    }

    /// Adds bytes `start..end`, at least one.
    #[inline]
    pub(crate) fn add(&mut self, start: u32, end: u32) -> Result<(), RangeError> {
        if self.0.is_empty() {
            self.0.push((start, end));
            return Ok(());
        }
        let place = self.0.partition_point(|range| range.1 <= start);
        // Ranges before `place` end at or before `start`; the range at `place` ends after it.
        if self.0.get(place).is_some_and(|next| next.0 < end) {
            return Err(RangeError::Overlap);
        }
        let before = place.checked_sub(1);
        let joins_before = before.and_then(|at| self.0.get(at)).is_some_and(|range| range.1 == start);
        let joins_next = self.0.get(place).is_some_and(|range| range.0 == end);
        match (joins_before, joins_next) {
            (true, true) => {
                let (_, next_end) = self.0.remove(place);
                self.set_end(before, next_end);
            }
            (true, false) => self.set_end(before, end),
            (false, true) => {
                if let Some(next) = self.0.get_mut(place) {
                    next.0 = start;
                }
            }
            (false, false) if self.0.len() >= MAX_RANGES => return Err(RangeError::TooScattered),
            (false, false) => self.0.insert(place, (start, end)),
        }
        Ok(())
    }

    fn set_end(&mut self, at: Option<usize>, end: u32) {
        if let Some(range) = at.and_then(|at| self.0.get_mut(at)) {
            range.1 = end;
        }
    }
}

/// The maximum number of ranges. A server that sends its chunks in order needs one.
const MAX_RANGES: usize = 4096;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn too_many_gaps_are_refused() {
        let mut coverage = Coverage::default();
        for n in 0..MAX_RANGES as u32 {
            assert_eq!(coverage.add(2 * n, 2 * n + 1), Ok(()));
        }
        assert_eq!(coverage.add(u32::MAX - 1, u32::MAX), Err(RangeError::TooScattered));
        assert_eq!(coverage.add(1, 2), Ok(()), "filling a gap makes room");
    }

    proptest! {
        #[test]
        fn coverage_agrees_with_a_set_of_bytes(ranges in prop::collection::vec((0u32..64, 1u32..16), 0..40)) {
            let mut coverage = Coverage::default();
            let mut model = [false; 80];
            for (start, len) in ranges {
                let range = start as usize..(start + len) as usize;
                let overlaps = model[range.clone()].contains(&true);
                prop_assert_eq!(coverage.add(start, start + len).is_err(), overlaps);
                if !overlaps {
                    model[range].fill(true);
                }
                let whole = model[..64].iter().all(|&b| b) && !model[64..].contains(&true);
                prop_assert_eq!(coverage.is_whole(64), whole);
            }
        }
    }
}
