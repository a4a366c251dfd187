//! Work that has not come back, in the order in which it was posted.
//!
//! ```text
//!   queue ──▶ current ──▶ sending ──▶ Done, once all of it is sent
//!         └──▶ reads, at most ORD ──▶ Done, once all data is there
//! ```
//! Each has a number of its own, so that those of `sending` and `reads` can be flushed in the order
//! of posting.

use blockmux_proto::rdma::{Event, MessageHead, Remote, Stag, WorkError, WorkId};
use blockmux_volume::SgList;
use std::collections::VecDeque;

/// What moves bytes.
pub(super) enum Transfer {
    Send { head: MessageHead, payload: SgList, invalidate: Option<Stag>, is_solicited: bool },
    Read { local: SgList, remote: Remote },
    Write { local: SgList, remote: Remote },
}

/// A read that the peer is to answer.
pub(super) struct Reading {
    turn: u64,
    /// None for an RTR message.
    id: Option<WorkId>,
    pub(super) msn: u32,
    /// Under which name the answer comes.
    pub(super) sink: u32,
    pub(super) local: SgList,
    pub(super) len: u32,
    /// How much has come.
    pub(super) filled: u32,
}

#[derive(Default)]
pub(super) struct Pending {
    turns: u64,
    queue: VecDeque<(Posted, Transfer)>,
    /// A send or write that is being cut into FPDUs.
    current: Option<Posted>,
    sending: VecDeque<(Posted, u64)>,
    reads: VecDeque<Reading>,
    /// The read among them that the peer has refused.
    refused: Option<u64>,
}

#[derive(Clone, Copy)]
struct Posted {
    turn: u64,
    id: WorkId,
}

impl Pending {
    /// How much has not come back.
    #[inline]
    pub(super) fn len(&self) -> usize {
        let begun = usize::from(self.current.is_some()).saturating_add(self.sending.len());
        let is_rtr = self.reads.front().is_some_and(|reading| reading.id.is_none());
        let reads = self.reads.len().saturating_sub(is_rtr.into());
        self.queue.len().saturating_add(begun).saturating_add(reads)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    pub(super) fn post(&mut self, id: WorkId, transfer: Transfer) {
        self.turns = self.turns.wrapping_add(1);
        self.queue.push_back((Posted { turn: self.turns, id }, transfer));
    }

    /// Whether whatever is posted now is the next to begin.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.queue.is_empty() && self.current.is_none()
    }

    /// A send or write is in the outbox that nobody had posted before; it is done once so many
    /// bytes are sent.
    #[inline]
    pub(super) fn post_sending(&mut self, id: WorkId, end: u64) {
        self.turns = self.turns.wrapping_add(1);
        self.sending.push_back((Posted { turn: self.turns, id }, end));
    }

    /// The next transfer, unless it is a read and `reads` are on their way.
    #[inline]
    pub(super) fn begin(&mut self, reads: u32) -> Option<Transfer> {
        let (posted, transfer) = self.queue.front()?;
        let is_read = matches!(transfer, Transfer::Read { .. });
        if is_read && self.reads.len() >= reads as usize {
            return None;
        }
        if is_read {
            let (turn, id) = (posted.turn, Some(posted.id));
            let nothing = SgList::default();
            self.reads.push_back(Reading { turn, id, msn: 0, sink: 0, local: nothing, len: 0, filled: 0 });
        } else {
            self.current = Some(*posted);
        }
        self.queue.pop_front().map(|(_, transfer)| transfer)
    }

    /// Says of the read that has just begun where its data goes.
    #[inline]
    pub(super) fn await_read(&mut self, msn: u32, sink: u32, local: SgList, len: u32) {
        if let Some(reading) = self.reads.back_mut() {
            (reading.msn, reading.sink, reading.local, reading.len) = (msn, sink, local, len);
        }
    }

    /// Begins a read of nothing that nobody posted.
    pub(super) fn begin_rtr(&mut self) {
        let local = SgList::default();
        self.reads.push_back(Reading { turn: 0, id: None, msn: 0, sink: 0, local, len: 0, filled: 0 });
    }

    /// All FPDUs of the current send or write are in the outbox; it is done once so many bytes are
    /// sent.
    #[inline]
    pub(super) fn end_current(&mut self, end: u64) {
        if let Some(posted) = self.current.take() {
            self.sending.push_back((posted, end));
        }
    }

    /// The next send or write that is done when `sent` bytes are sent.
    #[inline]
    pub(super) fn pop_sent(&mut self, sent: u64) -> Option<WorkId> {
        if self.sending.front()?.1 > sent {
            return None;
        }
        self.sending.pop_front().map(|(posted, _)| posted.id)
    }

    /// The read whose answer comes next.
    #[inline]
    pub(super) fn reading(&mut self) -> Option<&mut Reading> {
        self.reads.front_mut()
    }

    /// All data of that read is there.
    #[inline]
    pub(super) fn pop_read(&mut self) -> Option<WorkId> {
        self.reads.pop_front()?.id
    }

    /// The peer refuses a read: this one, or the oldest.
    pub(super) fn refuse(&mut self, msn: Option<u32>) {
        let is_it = |reading: &&Reading| msn.is_none_or(|msn| msn == reading.msn);
        self.refused = self.reads.iter().find(is_it).map(|reading| reading.turn);
    }

    /// Everything comes back undone.
    pub(super) fn flush(&mut self, events: &mut VecDeque<Event>) {
        let mut come_back = |id, result| events.push_back(Event::Done { id, result: Err(result) });
        let mut reads = self.reads.drain(..).peekable();
        let begun = self.sending.drain(..).map(|(posted, _)| posted).chain(self.current.take());
        let mut rest = |turn: u64, come_back: &mut dyn FnMut(WorkId, WorkError)| {
            while let Some(reading) = reads.next_if(|reading| reading.turn < turn) {
                let is_refused = self.refused == Some(reading.turn);
                let error = if is_refused { WorkError::RemoteAccess } else { WorkError::Flushed };
                if let Some(id) = reading.id {
                    come_back(id, error);
                }
            }
        };
        for posted in begun {
            rest(posted.turn, &mut come_back);
            come_back(posted.id, WorkError::Flushed);
        }
        rest(u64::MAX, &mut come_back);
        for (posted, _) in self.queue.drain(..) {
            come_back(posted.id, WorkError::Flushed);
        }
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    fn read() -> Transfer {
        let remote = Remote { stag: Stag(1), address: 0, len: 0 };
        Transfer::Read { local: SgList::default(), remote }
    }

    fn write() -> Transfer {
        let remote = Remote { stag: Stag(1), address: 0, len: 0 };
        Transfer::Write { local: SgList::default(), remote }
    }

    fn flushed(mut pending: Pending) -> Vec<(u64, WorkError)> {
        let mut events = VecDeque::new();
        pending.flush(&mut events);
        assert!(pending.is_empty());
        let work = |event| match event {
            Event::Done { id, result: Err(error) } => (id.0, error),
            other => panic!("{other:?}"),
        };
        events.into_iter().map(work).collect()
    }

    #[test]
    fn what_is_flushed_comes_back_in_the_order_in_which_it_was_posted() {
        let mut pending = Pending::default();
        let work = [write(), read(), write(), read(), write(), write()];
        work.into_iter().zip(1..).for_each(|(transfer, id)| pending.post(WorkId(id), transfer));
        for msn in 1..6 {
            let is_read = matches!(pending.begin(2), Some(Transfer::Read { .. }));
            if is_read { pending.await_read(msn, 0, SgList::default(), 0) } else { pending.end_current(9) }
        }
        assert_eq!(pending.len(), 6);
        pending.refuse(Some(4));
        let expected = [1, 2, 3, 4, 5, 6]
            .map(|id| (id, if id == 4 { WorkError::RemoteAccess } else { WorkError::Flushed }));
        assert_eq!(flushed(pending), expected);
    }

    #[test]
    fn a_read_too_many_waits_and_all_behind_it() {
        let mut pending = Pending::default();
        [read(), read(), write()].into_iter().for_each(|transfer| pending.post(WorkId(0), transfer));
        assert!(pending.begin(1).is_some());
        assert!(pending.begin(1).is_none());
        assert_eq!(pending.pop_read(), Some(WorkId(0)));
        assert!(matches!(pending.begin(1), Some(Transfer::Read { .. })));
        assert!(matches!(pending.begin(1), Some(Transfer::Write { .. })));
    }

    #[test]
    fn work_is_done_when_all_of_it_is_sent() {
        let mut pending = Pending::default();
        for (id, end) in [(1, 10), (2, 10), (3, 20)] {
            pending.post(WorkId(id), write());
            pending.begin(0);
            pending.end_current(end);
        }
        assert_eq!(pending.pop_sent(9), None);
        assert_eq!(pending.pop_sent(19), Some(WorkId(1)));
        assert_eq!(pending.pop_sent(19), Some(WorkId(2)));
        assert_eq!((pending.pop_sent(19), pending.len()), (None, 1));
    }
}
