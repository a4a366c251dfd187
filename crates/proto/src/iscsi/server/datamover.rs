//! Data transfer over RDMA instead of Data-In and R2T PDUs (RFC 5047).
//!
//! ```text
//!   Get_Data: RDMA Read ──▶ `pending_reads` ──────────────────────┐
//!                                                                 ├─▶ queue pair
//!   Put_Data: RDMA Write, then Send ──▶ the sender's messages: ───┘
//!                                       the response with its data-in
//! ```
//! The data of a read precedes its response, and the queue pair preserves order. So the initiator
//! can receive the first of many responses, and send the next command, while the data of the others
//! is in flight. One RDMA Read fetches a whole round of data-out.

use crate::rdma::{QueuePair, Remote, Stag, WorkId};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::iscsi::FLAG_FINAL;
use blockmux_wire::iscsi::scsi::{FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iser::ControlHeader;
use std::collections::VecDeque;

/// Buffers that the initiator advertised for a command: STag and base offset each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RemoteBuffers {
    /// Buffer for data-in.
    read: Option<(u32, u64)>,
    /// Buffer with data-out.
    write: Option<(u32, u64)>,
    /// Offset of the first requested data-out byte.
    first: Option<u32>,
}

/// Transfers the data of one connection's commands.
pub(super) struct TargetDatamover {
    /// RDMA Reads to post.
    pending_reads: VecDeque<PendingRead>,
    /// Number of RDMA Reads in flight.
    reading: u32,
    /// Buffers of the current PDU.
    current_buffers: RemoteBuffers,
    /// Buffers of the tasks, by slot.
    buffers: Vec<RemoteBuffers>,
    /// The initiator accepts Send with Invalidate.
    invalidates: bool,
    /// The advertised write buffer begins after the unsolicited data.
    is_solicited_only: bool,
    /// Data-in that was not posted, or whose completion is outstanding, in bytes.
    unsent: usize,
    /// Unsent bytes in the queue pair.
    waiting: usize,
}

struct PendingRead {
    id: WorkId,
    local: Seg,
    remote: Remote,
}

/// A completed work request, decoded from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CompletedWork {
    /// A message.
    Message,
    /// An RDMA Write of this many bytes.
    Put(u32),
    /// The RDMA Read of the R2T with this target transfer tag.
    Got(u32),
}

impl From<&ControlHeader> for RemoteBuffers {
    fn from(header: &ControlHeader) -> RemoteBuffers {
        RemoteBuffers { read: header.read(), write: header.write(), first: None }
    }
}

impl From<WorkId> for CompletedWork {
    fn from(id: WorkId) -> CompletedWork {
        let value = id.0 as u32;
        match id.0 >> u32::BITS {
            PUT => CompletedWork::Put(value),
            GET => CompletedWork::Got(value),
            _ => CompletedWork::Message,
        }
    }
}

impl TargetDatamover {
    pub(super) fn new(invalidates: bool, is_solicited_only: bool) -> TargetDatamover {
        TargetDatamover {
            pending_reads: VecDeque::new(),
            reading: 0,
            current_buffers: RemoteBuffers::default(),
            buffers: Vec::new(),
            invalidates,
            is_solicited_only,
            unsent: 0,
            waiting: 0,
        }
    }

    /// Sets the buffers of the PDU that is processed next.
    #[inline]
    pub(super) fn set_current(&mut self, buffers: RemoteBuffers) {
        self.current_buffers = buffers;
    }

    pub(super) fn current_buffers(&self) -> RemoteBuffers {
        self.current_buffers
    }

    /// Whether the current PDU advertises buffers for all solicited data of its command.
    pub(super) fn covers_data_of(&self, command: &ScsiCommand, first_burst: u32) -> bool {
        let expected = command.expected_data_transfer_length.get();
        let unsolicited = match command.flags & FLAG_FINAL {
            0 => first_burst,
            _ => command.data_segment_length.get(),
        };
        let needs_write = command.flags & FLAG_WRITE != 0 && expected > unsolicited;
        let needs_read = command.flags & FLAG_READ != 0 && command.flags & FLAG_WRITE == 0 && expected > 0;
        (!needs_write || self.current_buffers.write.is_some())
            && (!needs_read || self.current_buffers.read.is_some())
    }

    /// Assigns the buffers of the current PDU to a task.
    #[inline]
    pub(super) fn assign(&mut self, slot: usize) {
        if self.buffers.len() <= slot {
            self.buffers.resize(slot.saturating_add(1), RemoteBuffers::default());
        }
        if let Some(buffers) = self.buffers.get_mut(slot) {
            *buffers = std::mem::take(&mut self.current_buffers);
        }
    }

    /// The RDMA Write before a response and the STag that the response invalidates. The data-in are
    /// the first `len` bytes of `data`.
    #[inline]
    pub(super) fn put(
        &mut self,
        slot: usize,
        data: SgList,
        len: usize,
    ) -> (Option<(SgList, Remote)>, Option<Stag>) {
        let buffers = self.buffers.get(slot).copied().unwrap_or_default();
        let data_in = buffers.read.filter(|_| len > 0).map(|(stag, address)| {
            let local = if len == data.len() { data } else { data.slice(0, len) };
            self.unsent = self.unsent.saturating_add(len);
            (local, Remote { stag: Stag(stag), address, len: len as u32 })
        });
        let to_invalidate = buffers.read.or(buffers.write).filter(|_| self.invalidates);
        (data_in, to_invalidate.map(|(stag, _)| Stag(stag)))
    }

    /// Queues an RDMA Read of a task's data-out at `offset` into `local`. `tag` identifies it on
    /// completion.
    pub(super) fn get(&mut self, slot: usize, tag: u32, local: Seg, offset: u32) {
        let Some(buffers) = self.buffers.get_mut(slot) else { return };
        let Some((stag, base)) = buffers.write else { return };
        let first = *buffers.first.get_or_insert(offset);
        let begin = if self.is_solicited_only { first } else { 0 };
        let address = base.wrapping_add(offset.saturating_sub(begin).into());
        let remote = Remote { stag: Stag(stag), address, len: local.len() as u32 };
        let id = WorkId(GET << u32::BITS | u64::from(tag));
        self.pending_reads.push_back(PendingRead { id, local, remote });
    }

    /// Posts queued RDMA Reads while there is room; returns whether any was posted.
    #[inline]
    pub(super) fn read_data(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.pending_reads.len();
        while queue_pair.room() > 0
            && let Some(PendingRead { id, local, remote }) = self.pending_reads.pop_front()
        {
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(id, SgList::one(local), remote);
        }
        self.pending_reads.len() < before
    }

    /// Whether an RDMA Read is in flight.
    pub(super) fn is_reading(&self) -> bool {
        self.reading > 0
    }

    /// Called when an RDMA Read has completed.
    #[inline]
    pub(super) fn on_read(&mut self) {
        self.reading = self.reading.saturating_sub(1);
    }

    /// Posts an RDMA Write; the queue pair has room for it.
    #[inline]
    pub(super) fn write_data(&mut self, queue_pair: &mut impl QueuePair, local: &SgList, remote: Remote) {
        if !queue_pair.write(WorkId(PUT << u32::BITS | u64::from(remote.len)), local, remote) {
            self.unsent = self.unsent.saturating_sub(local.len());
        }
    }

    /// Sets the number of unsent bytes in the queue pair.
    #[inline]
    pub(super) fn wait_for(&mut self, bytes: usize) {
        self.waiting = bytes;
    }

    /// After the end of the connection: removes a queued RDMA Read and returns its tag.
    pub(super) fn abandon(&mut self) -> Option<u32> {
        self.pending_reads.pop_front().map(|get| get.id.0 as u32)
    }

    /// Called when an RDMA Write of `len` bytes has completed.
    #[inline]
    pub(super) fn sent(&mut self, len: u32) {
        self.unsent = self.unsent.saturating_sub(len as usize);
    }

    /// Data-in that was not sent, in bytes.
    #[inline]
    pub(super) fn unsent(&self) -> usize {
        self.unsent.saturating_add(self.waiting)
    }
}

/// High half of the work request number of an RDMA Write.
const PUT: u64 = 1;
/// High half of the work request number of an RDMA Read.
const GET: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::testing::Recorder;
    use crate::rdma::{MESSAGE, WorkRequest};
    use zerocopy::FromZeros;

    fn command(flags: u8, expected: u32, immediate: u32) -> ScsiCommand {
        let mut command = ScsiCommand::new_zeroed();
        command.flags = flags;
        command.expected_data_transfer_length = expected.into();
        command.data_segment_length = blockmux_wire::iscsi::U24::new(immediate);
        command
    }

    fn with(buffers: RemoteBuffers) -> TargetDatamover {
        let mut mover = TargetDatamover::new(true, true);
        mover.set_current(buffers);
        mover
    }

    const READ: RemoteBuffers = RemoteBuffers { read: Some((1, 100)), write: None, first: None };
    const WRITE: RemoteBuffers = RemoteBuffers { read: None, write: Some((2, 100)), first: None };

    #[test]
    fn buffers_are_required_for_solicited_data() {
        let (reads, writes) = (FLAG_FINAL | FLAG_READ, FLAG_FINAL | FLAG_WRITE);
        let nothing = RemoteBuffers::default();
        let cases = [
            (nothing, command(FLAG_FINAL, 0, 0), true),
            (nothing, command(reads, 512, 0), false),
            (nothing, command(reads, 0, 0), true),
            (READ, command(reads, 512, 0), true),
            (WRITE, command(reads, 512, 0), false),
            (nothing, command(writes, 512, 512), true),
            (nothing, command(writes, 512, 511), false),
            (READ, command(writes, 512, 0), false),
            (WRITE, command(writes, 512, 0), true),
            (nothing, command(FLAG_WRITE, 8192, 0), true),
            (nothing, command(FLAG_WRITE, 8193, 0), false),
        ];
        for (nth, (buffers, command, expected)) in cases.into_iter().enumerate() {
            assert_eq!(with(buffers).covers_data_of(&command, 8192), expected, "case {nth}");
        }
    }

    #[test]
    fn solicited_data_follows_unsolicited_data_in_the_buffer() {
        for (is_solicited_only, addresses) in [(true, [100, 104]), (false, [108, 112])] {
            let mut mover = TargetDatamover::new(true, is_solicited_only);
            mover.set_current(WRITE);
            mover.assign(3);
            mover.get(3, 7, Seg::from_slice(&[0; 4]), 8);
            mover.get(3, 8, Seg::from_slice(&[0; 4]), 12);
            let mut queue = Recorder { room: 1, ..Recorder::default() };
            assert!(mover.read_data(&mut queue) && !mover.read_data(&mut queue));
            queue.room = 2;
            assert!(mover.read_data(&mut queue));
            assert!(!mover.read_data(&mut queue) && queue.works.len() == 2);
            let found = [(); 2].map(|()| match queue.works.pop_front() {
                Some(WorkRequest::Read { id, remote, .. }) => (CompletedWork::from(id), remote.address),
                other => panic!("{other:?}"),
            });
            assert_eq!(found, [(CompletedWork::Got(7), addresses[0]), (CompletedWork::Got(8), addresses[1])]);
        }
    }

    #[test]
    fn a_response_invalidates_the_buffer_of_its_command() {
        let data = SgList::one(Seg::from_slice(b"abcdef"));
        for invalidates in [true, false] {
            let mut mover = TargetDatamover::new(invalidates, true);
            let mut invalidated = Vec::new();
            for (slot, buffers) in [READ, WRITE, RemoteBuffers::default()].into_iter().enumerate() {
                mover.set_current(buffers);
                mover.assign(slot);
                let (data_in, invalidates) = mover.put(slot, data.clone(), if slot == 0 { 4 } else { 0 });
                assert_eq!(data_in.is_some(), slot == 0);
                invalidated.push(invalidates.map(|stag| stag.0));
                if let Some((local, remote)) = data_in {
                    let mut queue = Recorder { room: 1, ..Recorder::default() };
                    mover.write_data(&mut queue, &local, remote);
                    let Some(WorkRequest::Write { id, local, remote }) = queue.works.pop_front() else {
                        panic!()
                    };
                    let written = (CompletedWork::from(id), local.to_vec(), remote.len);
                    assert_eq!(written, (CompletedWork::Put(4), b"abcd".to_vec(), 4));
                }
            }
            assert_eq!(mover.unsent(), 4);
            mover.sent(4);
            assert_eq!(mover.unsent(), 0);
            assert_eq!(invalidated, if invalidates { [Some(1), Some(2), None] } else { [None; 3] });
        }
    }

    /// Completes the first `left` writes immediately.
    struct Queue {
        left: u32,
        written: Vec<(Vec<u8>, Remote)>,
    }

    impl QueuePair for Queue {
        fn room(&self) -> usize {
            1
        }

        fn post(&mut self, work: WorkRequest) {
            panic!("{work:?}");
        }

        fn write(&mut self, id: WorkId, local: &SgList, remote: Remote) -> bool {
            assert_ne!(id, MESSAGE);
            self.written.push((local.to_vec(), remote));
            self.left = self.left.saturating_sub(1);
            self.left == 0
        }
    }

    #[test]
    fn written_data_counts_until_the_queue_pair_has_sent_it() {
        let (mut mover, mut queue) = (with(READ), Queue { left: 2, written: Vec::new() });
        mover.assign(0);
        let puts = [4, 3].map(|len| mover.put(0, SgList::one(Seg::from_slice(b"abcdef")), len).0.unwrap());
        assert_eq!(mover.unsent(), 7);
        mover.write_data(&mut queue, &puts[0].0, puts[0].1);
        let remote = Remote { stag: Stag(1), address: 100, len: 4 };
        assert_eq!(queue.written, [(b"abcd".to_vec(), remote)]);
        mover.wait_for(5);
        assert_eq!(mover.unsent(), 3 + 5);
        mover.write_data(&mut queue, &puts[1].0, puts[1].1);
        mover.wait_for(0);
        assert_eq!((queue.written.len(), mover.unsent()), (2, 3), "the second write is incomplete");
        mover.sent(3);
        assert_eq!(mover.unsent(), 0);
    }

    #[test]
    fn an_rdma_read_that_was_not_posted_can_be_removed() {
        let mut mover = with(WRITE);
        mover.assign(1);
        mover.get(1, 7, Seg::from_slice(&[0; 4]), 0);
        assert_eq!([mover.abandon(), mover.abandon()], [Some(7), None]);
    }
}
