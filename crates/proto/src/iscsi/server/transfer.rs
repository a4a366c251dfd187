//! Data-out of one command: received, expected and still to be requested (RFC 7143 §11.7, §11.8).
//!
//! ```text
//!   0 ─ immediate ─ unsolicited ─┤ R2T 0 ├─ R2T 1 ─┤ ... │ end of the round │ data beyond the command
//!                                ▲                 ▲
//!                               next             granted
//! ```
//! Data arrives strictly in order (DataPDUInOrder and DataSequenceInOrder are Yes). A *round* is
//! the data that the device server requests at once, mostly the whole length. Data beyond it is
//! received and dropped.
//!
//! A sequence is *lost* (RFC 7143 §7.9) if one of its PDUs did not arrive intact. The rest of the
//! sequence is dropped; when it has ended, everything from the first lost byte on is requested
//! again. Only one R2T is outstanding then (RFC 7143 §13.19).

use blockmux_volume::{Seg, SgList};
use blockmux_wire::iscsi::RESERVED_TAG;

/// Data-out of a command.
#[derive(Debug, Default)]
pub(super) struct DataOutTransfer {
    /// Begin and end of the round, in bytes.
    begin: u32,
    end: u32,
    /// Offset of the next expected byte.
    next: u32,
    /// End of the unsolicited data, in bytes; `None` when it is complete.
    unsolicited_end: Option<u32>,
    /// Offset of the next byte to request.
    next_r2t_offset: u32,
    /// End of the current sequence, in bytes.
    burst_end: u32,
    /// Maximum length of a sequence, in bytes.
    max_burst: u32,
    /// Number of R2Ts sent, and of R2Ts whose data has arrived.
    pub(super) r2t_sent: u32,
    r2t_done: u32,
    data_sn: u32,
    /// Memory of the round, from `begin` on.
    memory: Option<Seg>,
    /// Allocation order of the memory, for fairness.
    pub(super) allocation_order: u64,
    /// Immediate data from byte 0 on, borrowed from the receive buffer.
    borrowed: Option<Seg>,
    /// The current sequence is lost; its remaining data is dropped.
    is_lost: bool,
    /// Number of lost sequences.
    losses: u32,
    /// The latest R2T.
    latest: R2tGrant,
    /// Progress at the last stall check, and how many checks found none.
    last_progress: Option<(u32, u32)>,
    stalls: u32,
}

/// An R2T to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct R2tGrant {
    pub(super) r2t_sn: u32,
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// Data-out that violates the negotiated parameters or the R2Ts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataOutMismatch {
    /// Unsolicited data that was not negotiated.
    Unexpected,
    /// Too much, too little, or out of order.
    WrongAmount,
}

impl DataOutTransfer {
    /// Data-out of a command with `immediate` bytes of immediate data. With `continues`,
    /// unsolicited Data-Out PDUs follow, up to `max_unsolicited` bytes in all.
    #[inline]
    pub(super) fn new(immediate: u32, continues: bool, max_unsolicited: u32) -> DataOutTransfer {
        let unsolicited_end = match (immediate, continues) {
            (0, false) => None,
            (_, false) => Some(immediate),
            (_, true) => Some(max_unsolicited.max(immediate)),
        };
        DataOutTransfer { unsolicited_end, ..DataOutTransfer::default() }
    }

    /// Starts a round: the device server requests the next `len` bytes.
    pub(super) fn begin_round(&mut self, len: u32) {
        self.begin = self.end;
        self.end = self.begin.saturating_add(len);
        self.memory = None;
    }

    /// Length of the round, in bytes.
    pub(super) fn round_len(&self) -> usize {
        self.end.saturating_sub(self.begin) as usize
    }

    /// Whether a sequence is incomplete.
    pub(super) fn is_open(&self) -> bool {
        self.unsolicited_end.is_some() || self.r2t_sent != self.r2t_done
    }

    /// Whether the round's data has arrived and no unsolicited data follows.
    pub(super) fn is_complete(&self) -> bool {
        !self.is_open() && self.next >= self.end
    }

    /// Whether the transfer cannot continue without an R2T.
    pub(super) fn needs_r2t(&self) -> bool {
        !self.is_open() && self.next < self.end
    }

    pub(super) fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Sets the round's memory and copies borrowed data there.
    pub(super) fn set_memory(&mut self, memory: Seg) {
        if let Some(borrowed) = self.borrowed.take() {
            let (from, to) = (self.begin as usize, borrowed.len().min(self.end as usize));
            if let Some(len) = to.checked_sub(from) {
                borrowed.slice(from, len).copy_to_seg(&memory);
            }
        }
        self.memory = Some(memory);
    }

    /// The next R2T, if one may be sent: `max_burst` limits its length in bytes, `max_outstanding`
    /// the number of outstanding R2Ts.
    pub(super) fn next_r2t(&mut self, max_burst: u32, max_outstanding: u32) -> Option<R2tGrant> {
        let outstanding = self.r2t_sent.wrapping_sub(self.r2t_done);
        if self.unsolicited_end.is_some() || outstanding >= max_outstanding {
            return None;
        }
        self.next_r2t_offset = self.next_r2t_offset.max(self.next);
        self.max_burst = max_burst;
        let len = self.end.checked_sub(self.next_r2t_offset).filter(|&len| len > 0)?.min(max_burst);
        let next_r2t = R2tGrant { r2t_sn: self.r2t_sent, offset: self.next_r2t_offset, len };
        self.next_r2t_offset = self.next_r2t_offset.saturating_add(len);
        if outstanding == 0 {
            self.burst_end = self.next_r2t_offset;
        }
        self.r2t_sent = self.r2t_sent.wrapping_add(1);
        self.latest = next_r2t;
        Some(next_r2t)
    }

    /// R2TSN of the R2T whose data arrives now.
    pub(super) fn current_r2t(&self) -> u32 {
        self.r2t_done
    }

    /// Whether an R2T is outstanding.
    pub(super) fn has_outstanding_r2t(&self) -> bool {
        self.r2t_sent != self.r2t_done
    }

    /// Checks the header of a Data-Out PDU.
    pub(super) fn check(&self, ttt: u32, data_sn: u32, offset: u32, len: u32) -> Result<(), DataOutMismatch> {
        let end = if ttt == RESERVED_TAG {
            self.unsolicited_end.ok_or(DataOutMismatch::Unexpected)?
        } else {
            self.burst_end
        };
        let fits = offset == self.next && offset.checked_add(len).is_some_and(|last| last <= end);
        if fits && data_sn == self.data_sn { Ok(()) } else { Err(DataOutMismatch::WrongAmount) }
    }

    /// Whether a Data-Out PDU that fails [`DataOutTransfer::check`] follows a gap: PDUs before it
    /// were lost.
    pub(super) fn is_gap(&self, data_sn: u32, offset: u32) -> bool {
        self.is_open() && data_sn > self.data_sn && offset > self.next
    }

    /// Whether the current sequence is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether an earlier sequence was lost.
    pub(super) fn has_lost(&self) -> bool {
        self.losses > 0
    }

    /// Marks the current sequence as lost.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Counts a PDU of a lost sequence. With `is_final` the sequence is over and its data is
    /// requested again; returns `false` after too many losses.
    pub(super) fn skip(&mut self, is_final: bool) -> bool {
        if !is_final {
            return true;
        }
        self.interrupt();
        self.losses = self.losses.saturating_add(1);
        self.losses <= MAX_LOSSES
    }

    /// The connection was lost: requested data no longer arrives.
    pub(super) fn interrupt(&mut self) {
        self.is_lost = false;
        self.unsolicited_end = None;
        self.r2t_done = self.r2t_sent;
        (self.data_sn, self.next_r2t_offset) = (0, self.next);
    }

    /// On another connection, the initiator expects this R2TSN next unless it is 0; it has not seen
    /// later R2Ts. RFC 7143 §11.5.6 does not mention R2Ts; Linux's target interprets the number
    /// this way.
    pub(super) fn resume_at(&mut self, r2t_sn: u32) {
        if (1..=self.r2t_sent).contains(&r2t_sn) {
            (self.r2t_sent, self.r2t_done) = (r2t_sn, r2t_sn);
        }
    }

    /// Whether nothing has arrived for two checks. The open sequence then counts as lost.
    pub(super) fn is_stalled(&mut self) -> bool {
        let now = Some((self.next, self.r2t_sent));
        if !self.is_open() || std::mem::replace(&mut self.last_progress, now) != now {
            self.stalls = 0;
            return false;
        }
        self.stalls = self.stalls.saturating_add(1);
        self.stalls > 1
    }

    /// The R2T with this number, if its data has not arrived.
    pub(super) fn outstanding(&self, r2t_sn: u32) -> Option<R2tGrant> {
        let is_open = self.r2t_sent != self.r2t_done;
        (is_open && self.latest.r2t_sn == r2t_sn).then_some(self.latest)
    }

    /// The part of `len` bytes at `offset` that belongs to the round: its offset in the round's
    /// memory and its length.
    pub(super) fn overlap(&self, offset: u32, len: usize) -> (usize, usize) {
        let end = offset.saturating_add(len as u32).min(self.end);
        (offset.saturating_sub(self.begin) as usize, end.saturating_sub(offset.max(self.begin)) as usize)
    }

    /// Memory for the bytes of [`DataOutTransfer::overlap`] at `offset`.
    pub(super) fn place(&self, offset: u32, len: usize) -> Option<Seg> {
        let (at, overlap) = self.overlap(offset, len);
        let memory = self.memory.as_ref()?;
        at.checked_add(overlap).filter(|&end| end <= memory.len())?;
        Some(memory.slice(at, overlap))
    }

    /// Stores a segment at `offset` that is in the receive buffer; returns `false` if it needs
    /// memory first.
    pub(super) fn put(&mut self, offset: u32, segment: &Seg) -> bool {
        let (_, overlap) = self.overlap(offset, segment.len());
        if overlap == 0 {
            return true;
        }
        if let Some(place) = self.place(offset, segment.len()) {
            segment.slice(0, overlap).copy_to_seg(&place);
            return true;
        }
        let is_first = offset == 0 && self.borrowed.is_none();
        if is_first {
            self.borrowed = Some(segment.clone());
        }
        is_first
    }

    /// Advances by `len` bytes that were stored; with `is_final` their sequence ends.
    pub(super) fn advance(&mut self, len: u32, is_final: bool) -> Result<(), DataOutMismatch> {
        self.next = self.next.saturating_add(len);
        self.data_sn = self.data_sn.wrapping_add(1);
        if self.unsolicited_end.is_some() {
            if is_final {
                self.unsolicited_end = None;
                self.data_sn = 0;
            }
            return Ok(());
        }
        if is_final != (self.next == self.burst_end) {
            self.close_sequence(is_final);
            return Err(DataOutMismatch::WrongAmount);
        }
        self.close_sequence(is_final);
        Ok(())
    }

    /// Advances by immediate data. It has no DataSN: Data-Out PDUs count from 0.
    pub(super) fn advance_immediate(&mut self, len: u32, is_final: bool) {
        self.next = len;
        if is_final {
            self.unsolicited_end = None;
        }
    }

    /// Counts data of a command that has failed.
    pub(super) fn discard(&mut self, is_final: bool) {
        if self.unsolicited_end.is_some() {
            if is_final {
                self.unsolicited_end = None;
            }
        } else {
            self.close_sequence(is_final);
        }
    }

    /// Takes the round's data: borrowed from the receive buffer if it arrived in one piece, else
    /// from the round's memory.
    pub(super) fn take_data(&mut self) -> Option<SgList> {
        let (begin, len) = (self.begin as usize, self.round_len());
        if let Some(memory) = self.memory.take() {
            return Some(memory.slice(0, len.min(memory.len())).into());
        }
        let borrowed = self.borrowed.as_ref().filter(|borrowed| borrowed.len() >= self.end as usize)?;
        let data = borrowed.slice(begin, len).into();
        if borrowed.len() == self.end as usize {
            self.borrowed = None;
        }
        Some(data)
    }

    fn close_sequence(&mut self, is_final: bool) {
        if is_final && self.r2t_sent != self.r2t_done {
            self.r2t_done = self.r2t_done.wrapping_add(1);
            self.data_sn = 0;
            self.burst_end = self.burst_end.saturating_add(self.max_burst).min(self.next_r2t_offset);
        }
    }
}

/// Lost sequences after which a command fails, because the path is broken.
const MAX_LOSSES: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Chunk;

    const TTT: u32 = 1;

    #[test]
    fn only_immediate_data_is_borrowed() {
        let mut transfer = DataOutTransfer::new(4, false, 64);
        transfer.begin_round(4);
        assert!(transfer.is_open() && !transfer.needs_r2t());
        assert!(transfer.put(0, &Chunk::from_slice(b"abcd").slice(0, 4)));
        transfer.advance_immediate(4, true);
        assert!(transfer.is_complete());
        let data = transfer.take_data().unwrap();
        assert_eq!((data.to_vec(), data.segs()[0].is_writable()), (b"abcd".to_vec(), false));
    }

    #[test]
    fn missing_data_is_requested_in_bursts() {
        let mut transfer = DataOutTransfer::new(4, false, 64);
        transfer.begin_round(11);
        assert!(transfer.put(0, &Seg::from_slice(b"abcd")));
        transfer.advance_immediate(4, true);
        assert!(transfer.needs_r2t());
        transfer.set_memory(Seg::from_slice(&[0; 11]));
        assert_eq!(transfer.next_r2t(3, 2), Some(R2tGrant { r2t_sn: 0, offset: 4, len: 3 }));
        assert_eq!(transfer.next_r2t(3, 2), Some(R2tGrant { r2t_sn: 1, offset: 7, len: 3 }));
        assert_eq!(transfer.next_r2t(3, 2), None);
        assert_eq!(transfer.check(TTT, 0, 4, 2), Ok(()));
        assert!(transfer.put(4, &Seg::from_slice(b"ef")));
        assert_eq!(transfer.advance(2, false), Ok(()));
        assert_eq!(transfer.check(TTT, 0, 6, 1), Err(DataOutMismatch::WrongAmount), "DataSN");
        assert_eq!(transfer.check(TTT, 1, 6, 2), Err(DataOutMismatch::WrongAmount), "beyond the burst");
        assert_eq!(transfer.check(TTT, 1, 6, 1), Ok(()));
        assert!(transfer.put(6, &Seg::from_slice(b"g")));
        assert_eq!(transfer.advance(1, true), Ok(()));
        assert_eq!((transfer.current_r2t(), transfer.check(TTT, 0, 7, 3)), (1, Ok(())));
        assert_eq!(transfer.next_r2t(3, 2), Some(R2tGrant { r2t_sn: 2, offset: 10, len: 1 }));
        assert!(transfer.put(7, &Seg::from_slice(b"hij")));
        assert_eq!(transfer.advance(3, true), Ok(()));
        assert!(transfer.put(10, &Seg::from_slice(b"k")));
        assert_eq!(transfer.advance(1, true), Ok(()));
        assert!(transfer.is_complete());
        assert_eq!(transfer.take_data().unwrap().to_vec(), b"abcdefghijk");
    }

    #[test]
    fn several_bursts_can_be_outstanding() {
        let mut transfer = DataOutTransfer::default();
        transfer.begin_round(10);
        transfer.set_memory(Seg::from_slice(&[0; 10]));
        let offsets: Vec<_> =
            std::iter::from_fn(|| transfer.next_r2t(3, 4)).map(|next_r2t| next_r2t.offset).collect();
        assert_eq!(offsets, [0, 3, 6, 9]);
        for (offset, len) in [(0, 3), (3, 3), (6, 3), (9, 1)] {
            assert_eq!(transfer.check(TTT, 0, offset, len), Ok(()));
            assert_eq!(transfer.advance(len, true), Ok(()));
        }
        assert!(transfer.is_complete());
    }

    #[test]
    fn a_burst_that_ends_early_or_not_at_all_is_rejected() {
        for (len, is_final) in [(2, true), (3, false)] {
            let mut transfer = DataOutTransfer::default();
            transfer.begin_round(3);
            transfer.set_memory(Seg::from_slice(&[0; 3]));
            assert!(transfer.next_r2t(64, 1).is_some());
            assert_eq!(transfer.advance(len, is_final), Err(DataOutMismatch::WrongAmount));
        }
    }

    #[test]
    fn unsolicited_data_keeps_to_the_first_burst() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(8);
        assert_eq!(transfer.next_r2t(64, 1), None);
        assert_eq!(transfer.check(RESERVED_TAG, 0, 0, 5), Err(DataOutMismatch::WrongAmount));
        assert_eq!(transfer.check(RESERVED_TAG, 0, 0, 4), Ok(()));
        assert_eq!(transfer.advance(4, true), Ok(()));
        assert_eq!(transfer.check(RESERVED_TAG, 0, 4, 1), Err(DataOutMismatch::Unexpected));
        assert!(transfer.needs_r2t());
    }

    #[test]
    fn data_beyond_the_command_is_dropped() {
        let mut transfer = DataOutTransfer::new(6, false, 64);
        transfer.begin_round(4);
        transfer.set_memory(Seg::from_slice(&[0; 4]));
        assert_eq!((transfer.overlap(0, 6), transfer.overlap(4, 2).1), ((0, 4), 0));
        assert!(transfer.put(0, &Seg::from_slice(b"abcdef")));
        transfer.advance_immediate(6, true);
        assert!(transfer.is_complete());
        assert_eq!(transfer.take_data().unwrap().to_vec(), b"abcd");
    }

    #[test]
    fn immediate_data_serves_several_rounds() {
        let mut transfer = DataOutTransfer::new(6, false, 64);
        transfer.begin_round(2);
        assert!(transfer.put(0, &Seg::from_slice(b"abcdef")));
        transfer.advance_immediate(6, true);
        assert_eq!(transfer.take_data().unwrap().to_vec(), b"ab");
        transfer.begin_round(4);
        assert!(transfer.is_complete());
        assert_eq!(transfer.take_data().unwrap().to_vec(), b"cdef");
    }

    #[test]
    fn a_lost_sequence_is_requested_again_from_its_first_lost_byte() {
        let mut transfer = DataOutTransfer::default();
        transfer.begin_round(8);
        transfer.set_memory(Seg::from_slice(&[0; 8]));
        assert_eq!(transfer.next_r2t(6, 1), Some(R2tGrant { r2t_sn: 0, offset: 0, len: 6 }));
        assert_eq!(transfer.advance(2, false), Ok(()));
        assert!(transfer.is_gap(2, 4) && !transfer.is_gap(1, 4) && !transfer.is_gap(2, 2));
        transfer.lose();
        assert!(transfer.is_lost() && transfer.skip(false) && transfer.is_open());
        assert!(transfer.skip(true) && !transfer.is_lost());
        assert_eq!(transfer.outstanding(0), None);
        let again = R2tGrant { r2t_sn: 1, offset: 2, len: 6 };
        assert_eq!((transfer.next_r2t(6, 1), transfer.outstanding(1)), (Some(again), Some(again)));
        assert_eq!(transfer.check(TTT, 0, 2, 6), Ok(()));
        assert_eq!(transfer.advance(6, true), Ok(()));
        assert!(transfer.is_complete());
    }

    #[test]
    fn a_transfer_fails_after_too_many_lost_sequences() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(4);
        for _ in 0..MAX_LOSSES {
            transfer.lose();
            assert!(transfer.skip(true));
            assert_eq!(transfer.next_r2t(4, 1).map(|next_r2t| next_r2t.offset), Some(0));
        }
        transfer.lose();
        assert!(!transfer.skip(true));
    }

    #[test]
    fn a_transfer_is_stalled_after_two_checks_without_progress() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(4);
        assert_eq!([(); 3].map(|()| transfer.is_stalled()), [false, false, true]);
        assert_eq!(transfer.advance(1, false), Ok(()));
        assert!(!transfer.is_stalled());
        transfer.skip(true);
        assert_eq!([(); 3].map(|()| transfer.is_stalled()), [false; 3], "no data was requested");
    }
}
