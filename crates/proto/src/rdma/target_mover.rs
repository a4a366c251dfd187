//! What a target transfers over one queue pair: RDMA Reads of the peer's memory, and messages after
//! the RDMA Writes of their data.
//!
//! ```text
//!   read ──▶ `reads` ──▶ RDMA Read, no more at a time than the peer supports ──on_done──▶ its task
//!   messages ──▶ RDMA Write of the data ──▶ Send
//! ```
//! The queue pair preserves the order, so the peer has the data before the message. It can receive
//! the first of many messages, and send its next request, while the data of the others is in
//! flight. Small data of several messages comes before all of them: over UDP, packets of one length
//! leave in one system call.

use super::progress_watchdog::ProgressWatchdog;
use super::{Endpoint, QueuePair, Remote, WorkId};
use blockmux_volume::{Seg, SgList};
use std::collections::VecDeque;
use std::time::Instant;

/// A message to the peer, with the data to write to the peer's memory before it.
pub(crate) trait TargetMessage {
    /// The next part of the data that was not written.
    fn next_write(&mut self) -> Option<(SgList, Remote)>;

    /// Sends the message.
    fn send(&self, queue_pair: &mut impl QueuePair);
}

/// The transfers of one queue pair.
pub(crate) struct TargetMover {
    /// RDMA Reads to post.
    reads: VecDeque<PendingRead>,
    /// Number of posted RDMA Reads.
    reading: u32,
    /// Most RDMA Reads that may be posted: [`READS`], or fewer if the peer supports fewer.
    pub(crate) max_reads: u32,
    /// Data of queued messages and of posted RDMA Writes, in bytes.
    unsent: usize,
    /// Further data that the queue pair has not sent yet, in bytes.
    queue_pair_unsent: usize,
    watchdog: ProgressWatchdog,
}

struct PendingRead {
    task: u32,
    local: Seg,
    remote: Remote,
}

impl Default for TargetMover {
    fn default() -> TargetMover {
        TargetMover::new(READS)
    }
}

impl TargetMover {
    pub(crate) fn new(max_reads: u32) -> TargetMover {
        TargetMover {
            reads: VecDeque::new(),
            reading: 0,
            max_reads,
            unsent: 0,
            queue_pair_unsent: 0,
            watchdog: ProgressWatchdog::default(),
        }
    }

    /// Queues an RDMA Read for a task.
    pub(crate) fn read(&mut self, task: u32, local: Seg, remote: Remote) {
        self.reads.push_back(PendingRead { task, local, remote });
    }

    /// Counts the data of a queued message as unsent.
    #[inline]
    pub(crate) fn add_unsent(&mut self, len: usize) {
        self.unsent = self.unsent.saturating_add(len);
    }

    /// Data that was not sent, in bytes.
    #[inline]
    pub(crate) fn unsent(&self) -> usize {
        self.unsent.saturating_add(self.queue_pair_unsent)
    }

    /// Posts RDMA Reads, and the messages that `admits` allows, while the queue pair has room.
    /// Returns whether anything was posted.
    #[inline]
    pub(crate) fn transmit<M: TargetMessage>(
        &mut self,
        queue_pair: &mut impl QueuePair,
        messages: &mut VecDeque<M>,
        mut admits: impl FnMut(&M) -> bool,
    ) -> bool {
        let mut has_moved = false;
        // The queue pair would delay further reads, and the messages posted behind them.
        while self.reading < self.max_reads
            && queue_pair.room() > 0
            && let Some(PendingRead { task, local, remote }) = self.reads.pop_front()
        {
            has_moved = true;
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(WorkId(READ << u32::BITS | u64::from(task)), SgList::one(local), remote);
        }
        while !messages.is_empty() && self.transmit_batch(queue_pair, messages, &mut admits) {
            has_moved = true;
        }
        self.queue_pair_unsent = queue_pair.unsent();
        has_moved
    }

    /// Posts the data of some messages, and then the messages, while the queue pair has room.
    /// Returns whether anything was posted.
    #[inline]
    fn transmit_batch<M: TargetMessage>(
        &mut self,
        queue_pair: &mut impl QueuePair,
        messages: &mut VecDeque<M>,
        admits: &mut impl FnMut(&M) -> bool,
    ) -> bool {
        // Each message whose data is posted needs room, too.
        let (mut written, mut len, mut has_moved) = (0, 0_usize, false);
        while len < BATCH_LEN
            && queue_pair.room() > written
            && let Some(message) = messages.get_mut(written)
            && admits(message)
        {
            let Some((local, remote)) = message.next_write() else {
                written = written.saturating_add(1);
                continue;
            };
            has_moved = true;
            let here = local.len();
            len = len.saturating_add(here);
            let id = WorkId(WRITE << u32::BITS | here as u64);
            if !queue_pair.write(id, local, remote) {
                self.unsent = self.unsent.saturating_sub(here);
            }
        }
        messages.range(..written).for_each(|message| message.send(queue_pair));
        // Dropped where they are: a message moved out of the queue is copied.
        drop(messages.drain(..written));
        has_moved || written > 0
    }

    /// Handles a completed work request. Returns the task if it was an RDMA Read.
    #[inline]
    pub(crate) fn on_done(&mut self, id: WorkId) -> Option<u32> {
        let low = id.0 as u32;
        match id.0 >> u32::BITS {
            WRITE => self.unsent = self.unsent.saturating_sub(low as usize),
            READ => {
                self.reading = self.reading.saturating_sub(1);
                self.watchdog.on_progress();
                return Some(low);
            }
            _ => {}
        }
        None
    }

    /// After the end of the connection: drops an RDMA Read that was not posted, and returns its
    /// task.
    pub(crate) fn abandon_read(&mut self) -> Option<u32> {
        self.reads.pop_front().map(|read| read.task)
    }

    /// Whether no RDMA Read is queued or posted.
    pub(crate) fn is_idle(&self) -> bool {
        self.reading == 0 && self.reads.is_empty()
    }

    /// Whether an RDMA Read is posted.
    pub(crate) fn is_reading(&self) -> bool {
        self.reading > 0
    }

    /// Time of the next call of [`TargetMover::is_stuck`], while an RDMA Read is posted.
    pub(crate) fn check_at(&self, now: Instant) -> Option<Instant> {
        self.is_reading().then(|| self.watchdog.check_at(now))
    }

    /// Whether RDMA Reads are posted and none has completed for a minute. Memory that they write to
    /// cannot be freed before they complete.
    pub(crate) fn is_stuck(&mut self, now: Instant) -> bool {
        self.is_reading() && self.watchdog.is_stuck(now)
    }
}

/// The requirements of a target for its queue pair. It registers no memory.
pub(crate) fn endpoint(receives: u32, receive_len: u32, sends: u32) -> Endpoint {
    let reads = READS;
    Endpoint {
        receives,
        receive_len,
        sends,
        reads,
        regions: 0,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// High half of the `WorkId` of an RDMA Read; the low half is its task.
const READ: u64 = 1;
/// High half of the `WorkId` of an RDMA Write; the low half is its length in bytes.
const WRITE: u64 = 2;
/// With so much data, in bytes, a batch of messages is complete.
const BATCH_LEN: usize = 60 << 10;
/// Most RDMA Reads in flight.
pub(crate) const READS: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::testing::Recorder;
    use crate::rdma::{MESSAGE, Stag, WorkRequest};

    /// A message with the lengths of its writes.
    struct Message(Vec<usize>);

    impl TargetMessage for Message {
        fn next_write(&mut self) -> Option<(SgList, Remote)> {
            let len = self.0.pop()?;
            Some((SgList::one(Seg::from_slice(&vec![7; len])), remote(len)))
        }

        fn send(&self, queue_pair: &mut impl QueuePair) {
            queue_pair.send(b"message", &SgList::default(), None);
        }
    }

    fn remote(len: usize) -> Remote {
        Remote { stag: Stag(1), address: 100, len: len as u32 }
    }

    fn read(mover: &mut TargetMover, task: u32) {
        mover.read(task, Seg::from_slice(&[0; 4]), remote(4));
    }

    /// The tasks of the RDMA Reads that are posted, and the identifiers of these.
    fn reads(mover: &mut TargetMover, room: usize) -> Vec<(u32, WorkId)> {
        let mut queue = Recorder { room, ..Recorder::default() };
        mover.transmit(&mut queue, &mut VecDeque::<Message>::new(), |_| true);
        let task = |work: &WorkRequest| match work {
            WorkRequest::Read { id, .. } => (id.0 as u32, *id),
            other => panic!("{other:?}"),
        };
        queue.works.iter().map(task).collect()
    }

    #[test]
    fn no_more_rdma_reads_are_posted_than_the_peer_supports() {
        let mut mover = TargetMover::new(2);
        (5..9).for_each(|task| read(&mut mover, task));
        assert_eq!(reads(&mut mover, 1).len(), 1);
        let posted = reads(&mut mover, 9);
        assert_eq!((posted[0].0, posted.len()), (6, 1));
        assert!(reads(&mut mover, 9).is_empty());
        assert_eq!(mover.on_done(posted[0].1), Some(6));
        assert_eq!(reads(&mut mover, 9)[0].0, 7);
        assert!(mover.is_reading() && !mover.is_idle());
    }

    #[test]
    fn an_rdma_read_that_was_not_posted_can_be_abandoned() {
        let mut mover = TargetMover::default();
        read(&mut mover, 7);
        assert_eq!([mover.abandon_read(), mover.abandon_read()], [Some(7), None]);
        assert!(mover.is_idle());
    }

    #[test]
    fn a_message_is_sent_after_its_writes_in_the_room_that_there_is() {
        let mut messages = VecDeque::from([Message(vec![2, 3]), Message(vec![]), Message(vec![1])]);
        let (mut mover, mut posted) = (TargetMover::default(), Vec::new());
        mover.add_unsent(6);
        let mut is_last = false;
        for _ in 0..8 {
            let mut queue = Recorder { room: 1, ..Recorder::default() };
            let has_posted = mover.transmit(&mut queue, &mut messages, |_| !is_last);
            assert_eq!((has_posted, queue.works.len()), (!is_last, usize::from(!is_last)));
            for work in queue.works {
                posted.push(match work {
                    WorkRequest::Write { id, local, .. } => {
                        assert_eq!(mover.on_done(id), None);
                        local.len()
                    }
                    WorkRequest::Send { id, .. } => {
                        assert_eq!(mover.on_done(id), None);
                        0
                    }
                    other => panic!("{other:?}"),
                });
            }
            is_last = posted.len() == 4;
        }
        assert_eq!((posted, mover.unsent()), (vec![3, 2, 0, 0], 1));
        let mut queue = Recorder { room: 9, ..Recorder::default() };
        assert!(mover.transmit(&mut queue, &mut messages, |_| true) && messages.is_empty());
        assert!(matches!(
            queue.works.make_contiguous(),
            [WorkRequest::Write { .. }, WorkRequest::Send { .. }]
        ));
    }

    /// Completes the second write immediately, and has sent all but `unsent` bytes.
    struct Queue {
        written: Vec<(Vec<u8>, Remote)>,
        unsent: usize,
    }

    impl QueuePair for Queue {
        fn room(&self) -> usize {
            1
        }

        fn unsent(&self) -> usize {
            self.unsent
        }

        fn post(&mut self, work: WorkRequest) {
            assert!(matches!(work, WorkRequest::Send { .. }), "{work:?}");
        }

        fn write(&mut self, id: WorkId, local: SgList, remote: Remote) -> bool {
            assert_ne!(id, MESSAGE);
            self.written.push((local.to_vec(), remote));
            self.written.len() == 1
        }
    }

    #[test]
    fn written_data_counts_until_the_queue_pair_has_sent_it() {
        let (mut mover, mut queue) = (TargetMover::default(), Queue { written: Vec::new(), unsent: 5 });
        mover.add_unsent(4 + 3);
        mover.transmit(&mut queue, &mut VecDeque::from([Message(vec![4])]), |_| true);
        assert_eq!(queue.written, [(vec![7; 4], remote(4))]);
        assert_eq!(mover.unsent(), 4 + 3 + 5, "the first write is incomplete");
        mover.transmit(&mut queue, &mut VecDeque::from([Message(vec![3])]), |_| true);
        assert_eq!(mover.unsent(), 4 + 5);
        queue.unsent = 0;
        mover.transmit(&mut queue, &mut VecDeque::<Message>::new(), |_| true);
        mover.on_done(WorkId(WRITE << u32::BITS | 4));
        assert_eq!((queue.written.len(), mover.unsent()), (2, 0));
    }
}
