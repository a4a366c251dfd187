//! The outbox of a session: heads by value and payload by reference, sent with one gathering system
//! call.

use blockmux_volume::{Seg, SgList};
use std::collections::{VecDeque, vec_deque};

/// A queue of bytes to send: copies of short heads, and references to payload.
///
/// Consecutive heads are merged, so a batch of short replies is one contiguous piece. The queue
/// allocates nothing once it has reached its usual depth.
#[derive(Default)]
pub struct Outbox {
    /// The heads, valid up to `filled`; the rest is left from earlier use.
    heads: Vec<u8>,
    filled: usize,
    parts: VecDeque<OutboxPart>,
    /// Total number of bytes in all parts.
    len: usize,
}

/// A head with the payload after it: most replies are one part. Either may be missing.
#[derive(Debug)]
struct OutboxPart {
    /// The head: a range of `heads`, which begins where that of the part before it ends.
    start: usize,
    end: usize,
    payload: Option<Seg>,
}

/// A contiguous piece for the driver to send.
#[derive(Debug)]
pub enum OutboxPiece<'a> {
    /// Bytes that the outbox owns.
    Head(&'a [u8]),
    /// Referenced payload.
    Payload(&'a Seg),
}

impl Outbox {
    /// Appends a head.
    #[inline]
    pub fn push_head(&mut self, bytes: &[u8]) {
        match self.heads.get_mut(self.filled..self.filled.saturating_add(bytes.len())) {
            Some(place) => place.copy_from_slice(bytes),
            None => {
                self.heads.truncate(self.filled);
                self.heads.extend_from_slice(bytes);
            }
        }
        self.count_head(bytes.len());
    }

    /// Appends several slices as one head, and returns it. Callers know most lengths at compile
    /// time, so the copies need no calls.
    #[expect(clippy::inline_always, reason = "elsewhere the lengths are not known")]
    #[inline(always)]
    pub fn push_heads<const N: usize>(&mut self, parts: [&[u8]; N]) -> &[u8] {
        let len = parts.iter().fold(0, |len: usize, part| len.saturating_add(part.len()));
        let (start, end) = (self.filled, self.filled.saturating_add(len));
        if self.heads.len() < end {
            self.heads.resize(end, 0);
        }
        let mut place = self.heads.get_mut(start..end).unwrap_or_default();
        for part in parts {
            let Some((here, rest)) = place.split_at_mut_checked(part.len()) else { break };
            here.copy_from_slice(part);
            place = rest;
        }
        self.count_head(len);
        self.heads.get(start..end).unwrap_or_default()
    }

    /// Appends a copy of payload, as a head; returns it.
    #[inline]
    pub fn push_copy(&mut self, seg: &Seg) -> &[u8] {
        let (start, end) = (self.filled, self.filled.saturating_add(seg.len()));
        if self.heads.len() < end {
            self.heads.resize(end, 0);
        }
        if let Some(place) = self.heads.get_mut(start..end) {
            seg.copy_to(place);
        }
        self.count_head(seg.len());
        self.heads.get(start..end).unwrap_or_default()
    }

    /// Appends a head that `build` appends to the bytes before it; nothing if it returns `false`.
    #[inline]
    pub fn push_built(&mut self, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let start = self.filled;
        self.heads.truncate(start);
        let is_built = build(&mut self.heads);
        if is_built {
            self.count_head(self.heads.len().saturating_sub(start));
        }
        is_built
    }

    /// Appends payload by reference, which is held until it is sent.
    #[inline]
    pub fn push_payload(&mut self, data: &SgList) {
        data.segs().iter().for_each(|seg| self.push_seg(seg.clone()));
    }

    /// Appends payload that nobody else needs.
    #[inline]
    pub fn take_payload(&mut self, data: SgList) {
        match data.into_one() {
            Ok(seg) => self.push_seg(seg),
            Err(data) => self.push_payload(&data),
        }
    }

    /// Appends `len` bytes at `offset` of payload, truncated at its end.
    #[inline]
    pub fn push_part(&mut self, data: &SgList, offset: usize, len: usize) {
        let (mut skip, mut left) = (offset, len);
        for seg in data.segs() {
            let here = seg.len().saturating_sub(skip).min(left);
            if here > 0 {
                self.push_seg(seg.slice(skip, here));
            }
            skip = skip.saturating_sub(seg.len());
            left = left.saturating_sub(here);
        }
    }

    /// Appends one piece of payload.
    #[inline]
    pub fn push_seg(&mut self, seg: Seg) {
        if !seg.is_empty() {
            self.len = self.len.wrapping_add(seg.len());
            match self.parts.back_mut() {
                Some(OutboxPart { payload: payload @ None, .. }) => *payload = Some(seg),
                _ => self.push_part_of((self.filled, self.filled), Some(seg)),
            }
        }
    }

    /// Number of bytes to send.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to send.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces in order.
    #[inline]
    pub fn pieces(&self) -> impl Iterator<Item = OutboxPiece<'_>> {
        OutboxPieces { heads: &self.heads, parts: self.parts.iter(), payload: None }
    }

    /// The first piece, if it is a head, to complete it where it is.
    #[inline]
    pub fn head_mut(&mut self) -> Option<&mut [u8]> {
        let OutboxPart { start, end, .. } = self.parts.front().filter(|part| part.start < part.end)?;
        self.heads.get_mut(*start..*end)
    }

    /// Removes the first `sent` bytes.
    #[inline]
    pub fn consume(&mut self, mut sent: usize) {
        debug_assert!(sent <= self.len);
        self.len = self.len.saturating_sub(sent);
        while let Some(part) = self.parts.front_mut() {
            let head_len = part.end.saturating_sub(part.start);
            if sent < head_len {
                part.start = part.start.saturating_add(sent);
                break;
            }
            sent = sent.saturating_sub(head_len);
            part.start = part.end;
            if let Some(seg) = &mut part.payload {
                if sent < seg.len() {
                    *seg = seg.slice(sent, seg.len().saturating_sub(sent));
                    break;
                }
                sent = sent.saturating_sub(seg.len());
            }
            self.parts.pop_front();
        }
        self.reclaim_heads();
    }

    /// Removes and returns all bytes, for tests and drivers without gather I/O.
    #[must_use]
    pub fn take_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        for piece in self.pieces() {
            match piece {
                OutboxPiece::Head(head) => bytes.extend_from_slice(head),
                OutboxPiece::Payload(seg) => bytes.extend(seg.to_vec()),
            }
        }
        self.consume(bytes.len());
        bytes
    }

    /// Frees the memory of an empty outbox, which a connection that idles does not need.
    pub fn release(&mut self) {
        if self.is_empty() {
            *self = Outbox::default();
        }
    }

    /// Drops everything, because the connection is closed.
    pub fn clear(&mut self) {
        self.filled = 0;
        self.parts.clear();
        self.len = 0;
    }

    /// Records that `len` bytes were added to the heads.
    #[inline]
    fn count_head(&mut self, len: usize) {
        let start = self.filled;
        let end = start.saturating_add(len);
        self.filled = end;
        self.len = self.len.wrapping_add(len);
        match self.parts.back_mut() {
            Some(OutboxPart { end: last, payload: None, .. }) => *last = end,
            _ => self.push_part_of((start, end), None),
        }
    }

    #[inline]
    fn push_part_of(&mut self, (start, end): (usize, usize), payload: Option<Seg>) {
        if self.parts.capacity() == 0 {
            self.reserve_first();
        }
        self.parts.push_back(OutboxPart { start, end, payload });
    }

    /// Not four parts at once, as a queue takes by itself: most connections idle.
    #[cold]
    #[inline(never)]
    fn reserve_first(&mut self) {
        self.parts.reserve_exact(1);
    }

    /// Reuses the space of sent heads. It moves the unsent rest only when that is amortized.
    #[inline]
    fn reclaim_heads(&mut self) {
        let Some(&OutboxPart { start: unsent, .. }) = self.parts.front() else {
            self.filled = 0;
            return;
        };
        // At most as many bytes are moved as were sent since the last move.
        if unsent < HEADS_BEFORE_MOVE.max(self.filled.saturating_sub(unsent)) {
            return;
        }
        self.heads.copy_within(unsent..self.filled, 0);
        self.filled = self.filled.saturating_sub(unsent);
        for OutboxPart { start, end, .. } in &mut self.parts {
            *start = start.saturating_sub(unsent);
            *end = end.saturating_sub(unsent);
        }
    }
}

/// The pieces of all parts, without empty heads.
struct OutboxPieces<'a> {
    heads: &'a [u8],
    parts: vec_deque::Iter<'a, OutboxPart>,
    /// The payload of the part whose head was returned.
    payload: Option<&'a Seg>,
}

impl<'a> Iterator for OutboxPieces<'a> {
    type Item = OutboxPiece<'a>;

    #[inline]
    fn next(&mut self) -> Option<OutboxPiece<'a>> {
        if let Some(seg) = self.payload.take() {
            return Some(OutboxPiece::Payload(seg));
        }
        let OutboxPart { start, end, payload } = self.parts.next()?;
        if start == end {
            // Only the last part may be empty.
            return payload.as_ref().map(OutboxPiece::Payload);
        }
        self.payload = payload.as_ref();
        Some(OutboxPiece::Head(self.heads.get(*start..*end).unwrap_or_default()))
    }
}

/// The minimum number of sent bytes before the unsent rest is moved.
const HEADS_BEFORE_MOVE: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_follow_each_other_are_one_piece() {
        let mut outbox = Outbox::default();
        outbox.push_head(b"ab");
        outbox.push_head(b"cd");
        outbox.push_payload(&SgList::one(Seg::from_slice(b"payload")));
        outbox.push_head(b"ef");
        assert_eq!((outbox.pieces().count(), outbox.len()), (3, 13));
        assert_eq!(outbox.take_bytes(), b"abcdpayloadef");
        assert!(outbox.is_empty());
    }

    #[test]
    fn copied_payload_is_a_readable_head() {
        let mut outbox = Outbox::default();
        outbox.push_head(b"ab");
        assert_eq!(outbox.push_copy(&Seg::from_slice(b"cde")), b"cde");
        assert_eq!((outbox.pieces().count(), outbox.len()), (1, 5));
        assert_eq!(outbox.take_bytes(), b"abcde");
    }

    #[test]
    fn data_in_several_pieces_becomes_one_head() {
        let mut outbox = Outbox::default();
        for round in 0..3 {
            outbox.push_head(b"ab");
            assert_eq!(outbox.push_heads([b"cd", b"", b"efg"]), b"cdefg");
            assert_eq!((outbox.pieces().count(), outbox.len()), (1, 7));
            assert_eq!(outbox.take_bytes(), b"abcdefg", "{round}");
        }
        assert!(outbox.push_heads([b"", b""]).is_empty());
    }

    #[test]
    fn any_number_of_bytes_can_be_sent_at_a_time() {
        for step in 1..8 {
            let mut outbox = Outbox::default();
            let (mut expected, mut sent) = (Vec::new(), Vec::new());
            for round in 0..5000u32 {
                outbox.push_head(&round.to_be_bytes());
                outbox.push_seg(Seg::from_slice(b"xyz"));
                expected.extend(round.to_be_bytes());
                expected.extend(b"xyz");
                let bytes: Vec<u8> = outbox
                    .pieces()
                    .flat_map(|piece| match piece {
                        OutboxPiece::Head(head) => head.to_vec(),
                        OutboxPiece::Payload(seg) => seg.to_vec(),
                    })
                    .take(step)
                    .collect();
                outbox.consume(bytes.len());
                sent.extend(bytes);
            }
            sent.extend(outbox.take_bytes());
            assert!(sent == expected, "step {step}");
        }
    }
}
