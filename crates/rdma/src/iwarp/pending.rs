//! Work that has not completed, in the order of posting.
//!
//! ```text
//!   queue ──▶ current ──▶ sending ──▶ Done, once all of it is sent
//!         └──▶ reads, at most ORD ──▶ Done, once all data is there
//! ```
//! Each piece of work has a sequence number, so that the entries of `sending` and `reads` can be
//! flushed in the order of posting.

use blockmux_proto::rdma::{Event, MessageHead, Remote, Stag, WorkError, WorkId};
use blockmux_volume::SgList;
use std::collections::VecDeque;

/// Work that transfers bytes.
pub(super) enum PostedTransfer {
    Send { head: MessageHead, payload: SgList, invalidate: Option<Stag>, is_solicited: bool },
    Read { local: SgList, remote: Remote },
    Write { local: SgList, remote: Remote },
}

/// An RDMA Read that the peer has not answered completely.
pub(super) struct OutstandingRead {
    sequence: u64,
    /// `None` for an RTR message.
    id: Option<WorkId>,
    pub(super) msn: u32,
    /// The sink STag: the tag in the headers of the response.
    pub(super) sink: u32,
    pub(super) local: SgList,
    pub(super) len: u32,
    /// Bytes received so far.
    pub(super) filled: u32,
}

#[derive(Default)]
pub(super) struct PendingWork {
    sequence: u64,
    queue: VecDeque<(PostedWork, PostedTransfer)>,
    /// The send or write that is being split into FPDUs.
    current: Option<PostedWork>,
    sending: VecDeque<(PostedWork, u64)>,
    reads: VecDeque<OutstandingRead>,
    /// Sequence number of the read that the peer has refused.
    refused: Option<u64>,
}

#[derive(Clone, Copy)]
struct PostedWork {
    sequence: u64,
    id: WorkId,
}

impl PendingWork {
    /// Number of sends, reads and writes that have not completed.
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
    pub(super) fn post(&mut self, id: WorkId, transfer: PostedTransfer) {
        self.sequence = self.sequence.wrapping_add(1);
        self.queue.push_back((PostedWork { sequence: self.sequence, id }, transfer));
    }

    /// Whether newly posted work would be the next to begin.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.queue.is_empty() && self.current.is_none()
    }

    /// Records a send or write that went into the outbox without being queued. It completes once
    /// `end` bytes have left the outbox.
    #[inline]
    pub(super) fn post_transmitted(&mut self, id: WorkId, end: u64) {
        self.sequence = self.sequence.wrapping_add(1);
        self.sending.push_back((PostedWork { sequence: self.sequence, id }, end));
    }

    /// Begins the next transfer, unless it is a read and `reads` are in flight.
    #[inline]
    pub(super) fn begin(&mut self, reads: u32) -> Option<PostedTransfer> {
        let (posted, transfer) = self.queue.front()?;
        let is_read = matches!(transfer, PostedTransfer::Read { .. });
        if is_read && self.reads.len() >= reads as usize {
            return None;
        }
        if is_read {
            let (sequence, id) = (posted.sequence, Some(posted.id));
            let nothing = SgList::default();
            self.reads.push_back(OutstandingRead {
                sequence,
                id,
                msn: 0,
                sink: 0,
                local: nothing,
                len: 0,
                filled: 0,
            });
        } else {
            self.current = Some(*posted);
        }
        self.queue.pop_front().map(|(_, transfer)| transfer)
    }

    /// Sets the sink of the read that has just begun.
    #[inline]
    pub(super) fn await_read(&mut self, msn: u32, sink: u32, local: SgList, len: u32) {
        if let Some(reading) = self.reads.back_mut() {
            (reading.msn, reading.sink, reading.local, reading.len) = (msn, sink, local, len);
        }
    }

    /// Begins the zero-length read of an RTR message.
    pub(super) fn begin_rtr(&mut self) {
        let local = SgList::default();
        self.reads.push_back(OutstandingRead {
            sequence: 0,
            id: None,
            msn: 0,
            sink: 0,
            local,
            len: 0,
            filled: 0,
        });
    }

    /// Moves the current send or write to `sending`: all its FPDUs are in the outbox, and it
    /// completes once `end` bytes have left the outbox.
    #[inline]
    pub(super) fn finish_current(&mut self, end: u64) {
        if let Some(posted) = self.current.take() {
            self.sending.push_back((posted, end));
        }
    }

    /// Returns the next send or write that is complete once `sent` bytes have left the outbox.
    #[inline]
    pub(super) fn pop_sent(&mut self, sent: u64) -> Option<WorkId> {
        if self.sending.front()?.1 > sent {
            return None;
        }
        self.sending.pop_front().map(|(posted, _)| posted.id)
    }

    /// The read whose response comes next.
    #[inline]
    pub(super) fn reading(&mut self) -> Option<&mut OutstandingRead> {
        self.reads.front_mut()
    }

    /// Completes the oldest read, of which all data has arrived.
    #[inline]
    pub(super) fn pop_read(&mut self) -> Option<WorkId> {
        self.reads.pop_front()?.id
    }

    /// Records that the peer refused a read: the one with this MSN, or the oldest.
    pub(super) fn refuse(&mut self, msn: Option<u32>) {
        let is_it = |reading: &&OutstandingRead| msn.is_none_or(|msn| msn == reading.msn);
        self.refused = self.reads.iter().find(is_it).map(|reading| reading.sequence);
    }

    /// Completes all remaining work as flushed.
    pub(super) fn flush(&mut self, events: &mut VecDeque<Event>) {
        let mut complete = |id, result| events.push_back(Event::Done { id, result: Err(result) });
        let mut reads = self.reads.drain(..).peekable();
        let begun = self.sending.drain(..).map(|(posted, _)| posted).chain(self.current.take());
        let mut rest = |sequence: u64, complete: &mut dyn FnMut(WorkId, WorkError)| {
            while let Some(reading) = reads.next_if(|reading| reading.sequence < sequence) {
                let is_refused = self.refused == Some(reading.sequence);
                let error = if is_refused { WorkError::RemoteAccess } else { WorkError::Flushed };
                if let Some(id) = reading.id {
                    complete(id, error);
                }
            }
        };
        for posted in begun {
            rest(posted.sequence, &mut complete);
            complete(posted.id, WorkError::Flushed);
        }
        rest(u64::MAX, &mut complete);
        for (posted, _) in self.queue.drain(..) {
            complete(posted.id, WorkError::Flushed);
        }
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    fn read() -> PostedTransfer {
        let remote = Remote { stag: Stag(1), address: 0, len: 0 };
        PostedTransfer::Read { local: SgList::default(), remote }
    }

    fn write() -> PostedTransfer {
        let remote = Remote { stag: Stag(1), address: 0, len: 0 };
        PostedTransfer::Write { local: SgList::default(), remote }
    }

    fn flushed(mut pending: PendingWork) -> Vec<(u64, WorkError)> {
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
    fn flushed_work_completes_in_the_order_of_posting() {
        let mut pending = PendingWork::default();
        let work = [write(), read(), write(), read(), write(), write()];
        work.into_iter().zip(1..).for_each(|(transfer, id)| pending.post(WorkId(id), transfer));
        for msn in 1..6 {
            let is_read = matches!(pending.begin(2), Some(PostedTransfer::Read { .. }));
            if is_read { pending.await_read(msn, 0, SgList::default(), 0) } else { pending.finish_current(9) }
        }
        assert_eq!(pending.len(), 6);
        pending.refuse(Some(4));
        let expected = [1, 2, 3, 4, 5, 6]
            .map(|id| (id, if id == 4 { WorkError::RemoteAccess } else { WorkError::Flushed }));
        assert_eq!(flushed(pending), expected);
    }

    #[test]
    fn a_read_beyond_the_limit_waits_and_all_work_behind_it_too() {
        let mut pending = PendingWork::default();
        [read(), read(), write()].into_iter().for_each(|transfer| pending.post(WorkId(0), transfer));
        assert!(pending.begin(1).is_some());
        assert!(pending.begin(1).is_none());
        assert_eq!(pending.pop_read(), Some(WorkId(0)));
        assert!(matches!(pending.begin(1), Some(PostedTransfer::Read { .. })));
        assert!(matches!(pending.begin(1), Some(PostedTransfer::Write { .. })));
    }

    #[test]
    fn work_is_done_when_all_of_it_is_sent() {
        let mut pending = PendingWork::default();
        for (id, end) in [(1, 10), (2, 10), (3, 20)] {
            pending.post(WorkId(id), write());
            pending.begin(0);
            pending.finish_current(end);
        }
        assert_eq!(pending.pop_sent(9), None);
        assert_eq!(pending.pop_sent(19), Some(WorkId(1)));
        assert_eq!(pending.pop_sent(19), Some(WorkId(2)));
        assert_eq!((pending.pop_sent(19), pending.len()), (None, 1));
    }
}
