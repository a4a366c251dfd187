//! One command's data-out: what has come, what may come, what is still to be asked for (RFC 7143
//! §11.7, §11.8).
//!
//! ```text
//!   0 ─ immediate ─ unsolicited ─┤ R2T 0 ├─ R2T 1 ─┤ ... │ end of the round │ what the command does not want
//!                                ▲                 ▲
//!                               next             granted
//! ```
//! Data comes strictly in order (DataPDUInOrder and DataSequenceInOrder are Yes). A *round* is what
//! the device server has asked for; mostly there is one, of the whole length. Data beyond it is
//! received and dropped.
//!
//! A *lost* sequence (RFC 7143 §7.9) is one of which a PDU did not come as it was sent. Because
//! data comes in order, what follows in it is dropped, too; when the sequence has ended, all from
//! the first lost byte on is asked for again. There is one R2T at a time then (RFC 7143 §13.19), so
//! that nothing else has been asked for meanwhile.

use blockmux_volume::{Seg, SgList};
use blockmux_wire::iscsi::RESERVED_TAG;

/// A command's data-out.
#[derive(Debug, Default)]
pub(super) struct DataOutTransfer {
    /// Where the round begins and ends, in bytes.
    begin: u32,
    end: u32,
    /// The next byte that is expected.
    next: u32,
    /// Unsolicited data is still to come, up to this byte.
    unsolicited_end: Option<u32>,
    /// The next byte to ask for.
    granted: u32,
    /// Where the sequence that comes now ends.
    burst_end: u32,
    /// The longest sequence, in bytes.
    max_burst: u32,
    /// R2Ts sent, and those whose data has come.
    r2t_sent: u32,
    r2t_done: u32,
    data_sn: u32,
    /// The round's memory, from `begin` on.
    memory: Option<Seg>,
    /// Tells what was given its memory earlier from what was later.
    pub(super) given: u64,
    /// Immediate data, from byte 0 on, as it lies in the receive buffer.
    held: Option<Seg>,
    /// What comes of this sequence is dropped.
    is_lost: bool,
    /// How many sequences were lost.
    losses: u32,
    /// The R2T whose data comes now.
    latest: Grant,
    /// How far the transfer was when it was last looked at, and how often it was no further.
    seen: Option<(u32, u32)>,
    stalls: u32,
}

/// An R2T to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) r2t_sn: u32,
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// Data that does not fit what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataOutMismatch {
    /// Unsolicited data that was not agreed on.
    Unexpected,
    /// Too much, too little, or out of order.
    WrongAmount,
}

impl DataOutTransfer {
    /// Data of a command with `immediate` bytes behind it and, if `goes_on`, more unasked; in all,
    /// the initiator may send up to `most` bytes so.
    pub(super) fn new(immediate: u32, goes_on: bool, most: u32) -> DataOutTransfer {
        let unsolicited_end = match (immediate, goes_on) {
            (0, false) => None,
            (_, false) => Some(immediate),
            (_, true) => Some(most.max(immediate)),
        };
        DataOutTransfer { unsolicited_end, ..DataOutTransfer::default() }
    }

    /// The device server asks for the next `len` bytes. They are behind what the last round had.
    pub(super) fn begin_round(&mut self, len: u32) {
        self.begin = self.end;
        self.end = self.begin.saturating_add(len);
        self.memory = None;
    }

    /// The round's length in bytes.
    pub(super) fn round_len(&self) -> usize {
        self.end.saturating_sub(self.begin) as usize
    }

    /// Whether a sequence has begun, or may, whose last PDU has not come.
    pub(super) fn is_open(&self) -> bool {
        self.unsolicited_end.is_some() || self.r2t_sent != self.r2t_done
    }

    /// Whether the round's data is there and nothing more comes unasked.
    pub(super) fn is_complete(&self) -> bool {
        !self.is_open() && self.next >= self.end
    }

    /// Whether an R2T has to be sent before anything more comes.
    pub(super) fn wants_grant(&self) -> bool {
        !self.is_open() && self.next < self.end
    }

    pub(super) fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Gives the round its memory; what is held moves there.
    pub(super) fn set_memory(&mut self, memory: Seg) {
        if let Some(held) = self.held.take() {
            let (from, to) = (self.begin as usize, held.len().min(self.end as usize));
            if let Some(len) = to.checked_sub(from) {
                held.slice(from, len).copy_to_seg(&memory);
            }
        }
        self.memory = Some(memory);
    }

    /// The next R2T, if one may be sent: sequences of at most `max_burst` bytes, `max_outstanding`
    /// at a time.
    pub(super) fn grant(&mut self, max_burst: u32, max_outstanding: u32) -> Option<Grant> {
        let outstanding = self.r2t_sent.wrapping_sub(self.r2t_done);
        if self.unsolicited_end.is_some() || outstanding >= max_outstanding {
            return None;
        }
        self.granted = self.granted.max(self.next);
        self.max_burst = max_burst;
        let len = self.end.checked_sub(self.granted).filter(|&len| len > 0)?.min(max_burst);
        let grant = Grant { r2t_sn: self.r2t_sent, offset: self.granted, len };
        self.granted = self.granted.saturating_add(len);
        if outstanding == 0 {
            self.burst_end = self.granted;
        }
        self.r2t_sent = self.r2t_sent.wrapping_add(1);
        self.latest = grant;
        Some(grant)
    }

    /// The number of the R2T whose data comes now.
    pub(super) fn current_r2t(&self) -> u32 {
        self.r2t_done
    }

    /// Whether data was asked for that has not come.
    pub(super) fn is_asked(&self) -> bool {
        self.r2t_sent != self.r2t_done
    }

    /// R2Ts sent so far.
    pub(super) fn r2t_count(&self) -> u32 {
        self.r2t_sent
    }

    /// Checks the header of a Data-Out before any of its data is looked at.
    pub(super) fn check(&self, ttt: u32, data_sn: u32, offset: u32, len: u32) -> Result<(), DataOutMismatch> {
        let end = if ttt == RESERVED_TAG {
            self.unsolicited_end.ok_or(DataOutMismatch::Unexpected)?
        } else {
            self.burst_end
        };
        let fits = offset == self.next && offset.checked_add(len).is_some_and(|last| last <= end);
        if fits && data_sn == self.data_sn { Ok(()) } else { Err(DataOutMismatch::WrongAmount) }
    }

    /// Whether a Data-Out that does not pass [`Transfer::check`] lies behind what it should have
    /// followed: what is missing in between was lost on its way.
    pub(super) fn is_gap(&self, data_sn: u32, offset: u32) -> bool {
        self.is_open() && data_sn > self.data_sn && offset > self.next
    }

    /// Whether what comes of this sequence is dropped.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether a sequence was lost before.
    pub(super) fn has_lost(&self) -> bool {
        self.losses > 0
    }

    /// A PDU of this sequence was lost.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// A PDU of a lost sequence has come. With `is_final` the sequence is over, and what was lost
    /// is asked for next: answers `false` if that has happened too often.
    pub(super) fn skip(&mut self, is_final: bool) -> bool {
        if !is_final {
            return true;
        }
        self.interrupt();
        self.losses = self.losses.saturating_add(1);
        self.losses <= MAX_LOSSES
    }

    /// The connection is lost: nothing of what was asked for comes any more.
    pub(super) fn interrupt(&mut self) {
        self.is_lost = false;
        self.unsolicited_end = None;
        self.r2t_done = self.r2t_sent;
        (self.data_sn, self.granted) = (0, self.next);
    }

    /// On another connection the initiator expects an R2T of this number next, unless it is 0;
    /// later ones it has never seen. RFC 7143 §11.5.6 says nothing of R2Ts, but Linux's target
    /// takes the number so.
    pub(super) fn resume_at(&mut self, r2t_sn: u32) {
        if (1..=self.r2t_sent).contains(&r2t_sn) {
            (self.r2t_sent, self.r2t_done) = (r2t_sn, r2t_sn);
        }
    }

    /// Looks whether anything has come since the last look but one. If not, the open sequence is
    /// lost as a whole.
    pub(super) fn is_stalled(&mut self) -> bool {
        let now = Some((self.next, self.r2t_sent));
        if !self.is_open() || std::mem::replace(&mut self.seen, now) != now {
            self.stalls = 0;
            return false;
        }
        self.stalls = self.stalls.saturating_add(1);
        self.stalls > 1
    }

    /// The R2T with that number, if its data has not come.
    pub(super) fn outstanding(&self, r2t_sn: u32) -> Option<Grant> {
        let is_open = self.r2t_sent != self.r2t_done;
        (is_open && self.latest.r2t_sn == r2t_sn).then_some(self.latest)
    }

    /// The part of `len` bytes at `offset` that the round wants: where it lies in the round's
    /// memory, and how much.
    pub(super) fn wanted(&self, offset: u32, len: usize) -> (usize, usize) {
        let end = offset.saturating_add(len as u32).min(self.end);
        (offset.saturating_sub(self.begin) as usize, end.saturating_sub(offset.max(self.begin)) as usize)
    }

    /// Memory for [`Transfer::wanted`] bytes at `offset`.
    pub(super) fn place(&self, offset: u32, len: usize) -> Option<Seg> {
        let (at, wanted) = self.wanted(offset, len);
        let memory = self.memory.as_ref()?;
        at.checked_add(wanted).filter(|&end| end <= memory.len())?;
        Some(memory.slice(at, wanted))
    }

    /// Takes a segment that lies in the receive buffer, at `offset`. Answers `false` if it needs
    /// memory first.
    pub(super) fn put(&mut self, offset: u32, segment: &Seg) -> bool {
        let (_, wanted) = self.wanted(offset, segment.len());
        if wanted == 0 {
            return true;
        }
        if let Some(place) = self.place(offset, segment.len()) {
            segment.slice(0, wanted).copy_to_seg(&place);
            return true;
        }
        let is_first = offset == 0 && self.held.is_none();
        if is_first {
            self.held = Some(segment.clone());
        }
        is_first
    }

    /// `len` bytes have come, and been put where they belong; with `is_final` they end their
    /// sequence.
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

    /// Immediate data is no Data-Out: those count from 0 behind it.
    pub(super) fn advance_immediate(&mut self, len: u32, is_final: bool) {
        self.next = len;
        if is_final {
            self.unsolicited_end = None;
        }
    }

    /// The command has failed: what still comes is only counted.
    pub(super) fn discard(&mut self, is_final: bool) {
        if self.unsolicited_end.is_some() {
            if is_final {
                self.unsolicited_end = None;
            }
        } else {
            self.close_sequence(is_final);
        }
    }

    /// The round's data: as it lies in the receive buffer if it came in one piece, else in its own
    /// memory.
    pub(super) fn take_data(&mut self) -> Option<SgList> {
        let (begin, len) = (self.begin as usize, self.round_len());
        if let Some(memory) = self.memory.take() {
            return Some(memory.slice(0, len.min(memory.len())).into());
        }
        let held = self.held.as_ref().filter(|held| held.len() >= self.end as usize)?;
        let data = held.slice(begin, len).into();
        if held.len() == self.end as usize {
            self.held = None;
        }
        Some(data)
    }

    fn close_sequence(&mut self, is_final: bool) {
        if is_final && self.r2t_sent != self.r2t_done {
            self.r2t_done = self.r2t_done.wrapping_add(1);
            self.data_sn = 0;
            self.burst_end = self.burst_end.saturating_add(self.max_burst).min(self.granted);
        }
    }
}

/// Sequences of one command that may be lost before it fails: a path that loses more is broken.
const MAX_LOSSES: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Chunk;

    const TTT: u32 = 1;

    #[test]
    fn immediate_data_alone_is_lent() {
        let mut transfer = DataOutTransfer::new(4, false, 64);
        transfer.begin_round(4);
        assert!(transfer.is_open() && !transfer.wants_grant());
        assert!(transfer.put(0, &Chunk::from_slice(b"abcd").lend(0, 4)));
        transfer.advance_immediate(4, true);
        assert!(transfer.is_complete());
        let data = transfer.take_data().unwrap();
        assert_eq!((data.to_vec(), data.segs()[0].is_writable()), (b"abcd".to_vec(), false));
    }

    #[test]
    fn what_is_missing_is_asked_for_in_bursts() {
        let mut transfer = DataOutTransfer::new(4, false, 64);
        transfer.begin_round(11);
        assert!(transfer.put(0, &Seg::from_slice(b"abcd")));
        transfer.advance_immediate(4, true);
        assert!(transfer.wants_grant());
        transfer.set_memory(Seg::from_slice(&[0; 11]));
        assert_eq!(transfer.grant(3, 2), Some(Grant { r2t_sn: 0, offset: 4, len: 3 }));
        assert_eq!(transfer.grant(3, 2), Some(Grant { r2t_sn: 1, offset: 7, len: 3 }));
        assert_eq!(transfer.grant(3, 2), None);
        assert_eq!(transfer.check(TTT, 0, 4, 2), Ok(()));
        assert!(transfer.put(4, &Seg::from_slice(b"ef")));
        assert_eq!(transfer.advance(2, false), Ok(()));
        assert_eq!(transfer.check(TTT, 0, 6, 1), Err(DataOutMismatch::WrongAmount), "DataSN");
        assert_eq!(transfer.check(TTT, 1, 6, 2), Err(DataOutMismatch::WrongAmount), "beyond the burst");
        assert_eq!(transfer.check(TTT, 1, 6, 1), Ok(()));
        assert!(transfer.put(6, &Seg::from_slice(b"g")));
        assert_eq!(transfer.advance(1, true), Ok(()));
        assert_eq!((transfer.current_r2t(), transfer.check(TTT, 0, 7, 3)), (1, Ok(())));
        assert_eq!(transfer.grant(3, 2), Some(Grant { r2t_sn: 2, offset: 10, len: 1 }));
        assert!(transfer.put(7, &Seg::from_slice(b"hij")));
        assert_eq!(transfer.advance(3, true), Ok(()));
        assert!(transfer.put(10, &Seg::from_slice(b"k")));
        assert_eq!(transfer.advance(1, true), Ok(()));
        assert!(transfer.is_complete());
        assert_eq!(transfer.take_data().unwrap().to_vec(), b"abcdefghijk");
    }

    #[test]
    fn several_bursts_can_be_under_way() {
        let mut transfer = DataOutTransfer::default();
        transfer.begin_round(10);
        transfer.set_memory(Seg::from_slice(&[0; 10]));
        let offsets: Vec<_> = std::iter::from_fn(|| transfer.grant(3, 4)).map(|grant| grant.offset).collect();
        assert_eq!(offsets, [0, 3, 6, 9]);
        for (offset, len) in [(0, 3), (3, 3), (6, 3), (9, 1)] {
            assert_eq!(transfer.check(TTT, 0, offset, len), Ok(()));
            assert_eq!(transfer.advance(len, true), Ok(()));
        }
        assert!(transfer.is_complete());
    }

    #[test]
    fn a_burst_that_ends_early_or_not_at_all_is_a_misfit() {
        for (len, is_final) in [(2, true), (3, false)] {
            let mut transfer = DataOutTransfer::default();
            transfer.begin_round(3);
            transfer.set_memory(Seg::from_slice(&[0; 3]));
            assert!(transfer.grant(64, 1).is_some());
            assert_eq!(transfer.advance(len, is_final), Err(DataOutMismatch::WrongAmount));
        }
    }

    #[test]
    fn unsolicited_data_keeps_to_the_first_burst() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(8);
        assert_eq!(transfer.grant(64, 1), None);
        assert_eq!(transfer.check(RESERVED_TAG, 0, 0, 5), Err(DataOutMismatch::WrongAmount));
        assert_eq!(transfer.check(RESERVED_TAG, 0, 0, 4), Ok(()));
        assert_eq!(transfer.advance(4, true), Ok(()));
        assert_eq!(transfer.check(RESERVED_TAG, 0, 4, 1), Err(DataOutMismatch::Unexpected));
        assert!(transfer.wants_grant());
    }

    #[test]
    fn data_that_the_command_does_not_want_is_dropped() {
        let mut transfer = DataOutTransfer::new(6, false, 64);
        transfer.begin_round(4);
        transfer.set_memory(Seg::from_slice(&[0; 4]));
        assert_eq!((transfer.wanted(0, 6), transfer.wanted(4, 2).1), ((0, 4), 0));
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
    fn a_lost_sequence_is_asked_for_again_from_where_it_broke() {
        let mut transfer = DataOutTransfer::default();
        transfer.begin_round(8);
        transfer.set_memory(Seg::from_slice(&[0; 8]));
        assert_eq!(transfer.grant(6, 1), Some(Grant { r2t_sn: 0, offset: 0, len: 6 }));
        assert_eq!(transfer.advance(2, false), Ok(()));
        assert!(transfer.is_gap(2, 4) && !transfer.is_gap(1, 4) && !transfer.is_gap(2, 2));
        transfer.lose();
        assert!(transfer.is_lost() && transfer.skip(false) && transfer.is_open());
        assert!(transfer.skip(true) && !transfer.is_lost());
        assert_eq!(transfer.outstanding(0), None);
        let again = Grant { r2t_sn: 1, offset: 2, len: 6 };
        assert_eq!((transfer.grant(6, 1), transfer.outstanding(1)), (Some(again), Some(again)));
        assert_eq!(transfer.check(TTT, 0, 2, 6), Ok(()));
        assert_eq!(transfer.advance(6, true), Ok(()));
        assert!(transfer.is_complete());
    }

    #[test]
    fn a_transfer_that_loses_everything_is_given_up() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(4);
        for _ in 0..MAX_LOSSES {
            transfer.lose();
            assert!(transfer.skip(true));
            assert_eq!(transfer.grant(4, 1).map(|grant| grant.offset), Some(0));
        }
        transfer.lose();
        assert!(!transfer.skip(true));
    }

    #[test]
    fn a_transfer_is_stalled_when_nothing_came_for_two_looks() {
        let mut transfer = DataOutTransfer::new(0, true, 4);
        transfer.begin_round(4);
        assert_eq!([(); 3].map(|()| transfer.is_stalled()), [false, false, true]);
        assert_eq!(transfer.advance(1, false), Ok(()));
        assert!(!transfer.is_stalled());
        transfer.skip(true);
        assert_eq!([(); 3].map(|()| transfer.is_stalled()), [false; 3], "nothing was asked for");
    }
}
