//! Over RDMA: what moves the data of commands in the place of Data-In and R2T (RFC 5047).
//!
//! ```text
//!   Get_Data: RDMA Read ──▶ `gets` ───┐
//!                                     ├─▶ queue pair
//!   Put_Data: RDMA Write, then Send ──▶ the sender's messages: the response with its data-in
//! ```
//! The data of a read goes right before its response, and the queue pair keeps the order of what it
//! is given. So an initiator can end the first of many commands, and send the next, while the data
//! of the others is on its way. A read of the initiator's memory is as long as the round of its
//! command.

use crate::rdma::{QueuePair, Remote, Stag, WorkId};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::iscsi::FLAG_FINAL;
use blockmux_wire::iscsi::scsi::{FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iser::ControlHeader;
use std::collections::VecDeque;

/// Memory that the initiator has opened for a command: name and begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Remotes {
    /// For its data-in.
    read: Option<(u32, u64)>,
    /// With its data-out.
    write: Option<(u32, u64)>,
    /// The offset of the data-out that was asked for first.
    first: Option<u32>,
}

/// Moves the data of one connection's commands.
pub(super) struct TargetDatamover {
    /// Data-out to read.
    gets: VecDeque<Get>,
    /// Reads that are on their way, and how many there may be.
    reading: u32,
    /// Of the PDU that is looked at.
    arriving: Remotes,
    /// By the slot of the task.
    remotes: Vec<Remotes>,
    /// The initiator takes messages that close its memory.
    invalidates: bool,
    /// What a write's header names begins behind the data that comes unasked.
    is_solicited_only: bool,
    /// Data-in that was not given to the queue pair, or comes back from it, in bytes.
    unsent: usize,
    /// What the queue pair has not sent, in bytes.
    waiting: usize,
}

struct Get {
    id: WorkId,
    place: Seg,
    remote: Remote,
}

/// What a piece of work was, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// A message.
    Message,
    /// So many bytes of data-in.
    Put(u32),
    /// Data-out, that an R2T of this tag would have asked for.
    Got(u32),
}

impl From<&ControlHeader> for Remotes {
    fn from(header: &ControlHeader) -> Remotes {
        Remotes { read: header.read(), write: header.write(), first: None }
    }
}

impl From<WorkId> for Moved {
    fn from(id: WorkId) -> Moved {
        let value = id.0 as u32;
        match id.0 >> u32::BITS {
            PUT => Moved::Put(value),
            GET => Moved::Got(value),
            _ => Moved::Message,
        }
    }
}

impl TargetDatamover {
    pub(super) fn new(invalidates: bool, is_solicited_only: bool) -> TargetDatamover {
        TargetDatamover {
            gets: VecDeque::new(),
            reading: 0,
            arriving: Remotes::default(),
            remotes: Vec::new(),
            invalidates,
            is_solicited_only,
            unsent: 0,
            waiting: 0,
        }
    }

    /// A PDU with that memory is looked at.
    #[inline]
    pub(super) fn arrive(&mut self, remotes: Remotes) {
        self.arriving = remotes;
    }

    pub(super) fn arriving(&self) -> Remotes {
        self.arriving
    }

    /// Whether the PDU that is looked at names memory for all data of its command that does not
    /// come unasked.
    pub(super) fn reaches_data_of(&self, command: &ScsiCommand, first_burst: u32) -> bool {
        let expected = command.expected_data_transfer_length.get();
        let unasked = match command.flags & FLAG_FINAL {
            0 => first_burst,
            _ => command.data_segment_length.get(),
        };
        let needs_write = command.flags & FLAG_WRITE != 0 && expected > unasked;
        let needs_read = command.flags & FLAG_READ != 0 && command.flags & FLAG_WRITE == 0 && expected > 0;
        (!needs_write || self.arriving.write.is_some()) && (!needs_read || self.arriving.read.is_some())
    }

    /// The PDU that is looked at is the command of that task.
    #[inline]
    pub(super) fn assign(&mut self, slot: usize) {
        if self.remotes.len() <= slot {
            self.remotes.resize(slot.saturating_add(1), Remotes::default());
        }
        if let Some(remotes) = self.remotes.get_mut(slot) {
            *remotes = std::mem::take(&mut self.arriving);
        }
    }

    /// What goes with the response to a task whose data-in are the first `len` bytes of `data`: the
    /// write before it, and the memory that it closes.
    #[inline]
    pub(super) fn put(
        &mut self,
        slot: usize,
        data: SgList,
        len: usize,
    ) -> (Option<(SgList, Remote)>, Option<Stag>) {
        let remotes = self.remotes.get(slot).copied().unwrap_or_default();
        let data_in = remotes.read.filter(|_| len > 0).map(|(stag, address)| {
            let local = if len == data.len() { data } else { data.slice(0, len) };
            self.unsent = self.unsent.saturating_add(len);
            (local, Remote { stag: Stag(stag), address, len: len as u32 }) // at most the expected length
        });
        let named = remotes.read.or(remotes.write).filter(|_| self.invalidates);
        (data_in, named.map(|(stag, _)| Stag(stag)))
    }

    /// Asks for data-out of a task: from `offset` on, as much as `place` holds. `tag` is what it is
    /// known by.
    pub(super) fn get(&mut self, slot: usize, tag: u32, place: Seg, offset: u32) {
        let Some(remotes) = self.remotes.get_mut(slot) else { return };
        let Some((stag, base)) = remotes.write else { return };
        let first = *remotes.first.get_or_insert(offset);
        let begin = if self.is_solicited_only { first } else { 0 };
        let address = base.wrapping_add(offset.saturating_sub(begin).into());
        let remote = Remote { stag: Stag(stag), address, len: place.len() as u32 };
        let id = WorkId(GET << u32::BITS | u64::from(tag));
        self.gets.push_back(Get { id, place, remote });
    }

    /// Has data-out read, as far as there is room; whether any was.
    #[inline]
    pub(super) fn read_data(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.gets.len();
        while queue_pair.room() > 0
            && let Some(Get { id, place, remote }) = self.gets.pop_front()
        {
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(id, SgList::one(place), remote);
        }
        self.gets.len() < before
    }

    /// Whether a read is on its way.
    pub(super) fn is_reading(&self) -> bool {
        self.reading > 0
    }

    /// A read is over.
    #[inline]
    pub(super) fn has_read(&mut self) {
        self.reading = self.reading.saturating_sub(1);
    }

    /// Has data-in written; the queue pair has room for it.
    #[inline]
    pub(super) fn write_data(&mut self, queue_pair: &mut impl QueuePair, local: &SgList, remote: Remote) {
        if !queue_pair.write(WorkId(PUT << u32::BITS | u64::from(remote.len)), local, remote) {
            self.unsent = self.unsent.saturating_sub(local.len());
        }
    }

    /// The queue pair has so many bytes that have not left.
    #[inline]
    pub(super) fn wait_for(&mut self, bytes: usize) {
        self.waiting = bytes;
    }

    /// The connection is gone: takes out a read that was not given to the queue pair, and returns
    /// its tag.
    pub(super) fn abandon(&mut self) -> Option<u32> {
        self.gets.pop_front().map(|get| get.id.0 as u32)
    }

    /// Data-in has left.
    #[inline]
    pub(super) fn sent(&mut self, len: u32) {
        self.unsent = self.unsent.saturating_sub(len as usize);
    }

    /// Data-in that has not left, in bytes.
    #[inline]
    pub(super) fn unsent(&self) -> usize {
        self.unsent.saturating_add(self.waiting)
    }
}

/// The high half of a number: data-in.
const PUT: u64 = 1;
/// The high half of a number: data-out.
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

    fn with(remotes: Remotes) -> TargetDatamover {
        let mut mover = TargetDatamover::new(true, true);
        mover.arrive(remotes);
        mover
    }

    const READ: Remotes = Remotes { read: Some((1, 100)), write: None, first: None };
    const WRITE: Remotes = Remotes { read: None, write: Some((2, 100)), first: None };

    #[test]
    fn memory_is_wanted_for_what_does_not_come_unasked() {
        let (reads, writes) = (FLAG_FINAL | FLAG_READ, FLAG_FINAL | FLAG_WRITE);
        let nothing = Remotes::default();
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
        for (nth, (remotes, command, expected)) in cases.into_iter().enumerate() {
            assert_eq!(with(remotes).reaches_data_of(&command, 8192), expected, "case {nth}");
        }
    }

    #[test]
    fn what_is_asked_for_lies_behind_what_came_unasked() {
        for (is_solicited_only, addresses) in [(true, [100, 104]), (false, [108, 112])] {
            let mut mover = TargetDatamover::new(true, is_solicited_only);
            mover.arrive(WRITE);
            mover.assign(3);
            mover.get(3, 7, Seg::from_slice(&[0; 4]), 8);
            mover.get(3, 8, Seg::from_slice(&[0; 4]), 12);
            let mut queue = Recorder { room: 1, ..Recorder::default() };
            assert!(mover.read_data(&mut queue) && !mover.read_data(&mut queue));
            queue.room = 2;
            assert!(mover.read_data(&mut queue));
            assert!(!mover.read_data(&mut queue) && queue.works.len() == 2);
            let found = [(); 2].map(|()| match queue.works.pop_front() {
                Some(WorkRequest::Read { id, remote, .. }) => (Moved::from(id), remote.address),
                other => panic!("{other:?}"),
            });
            assert_eq!(found, [(Moved::Got(7), addresses[0]), (Moved::Got(8), addresses[1])]);
        }
    }

    #[test]
    fn a_response_closes_what_its_command_has_named() {
        let data = SgList::one(Seg::from_slice(b"abcdef"));
        for invalidates in [true, false] {
            let mut mover = TargetDatamover::new(invalidates, true);
            let mut closed = Vec::new();
            for (slot, remotes) in [READ, WRITE, Remotes::default()].into_iter().enumerate() {
                mover.arrive(remotes);
                mover.assign(slot);
                let (data_in, closes) = mover.put(slot, data.clone(), if slot == 0 { 4 } else { 0 });
                assert_eq!(data_in.is_some(), slot == 0);
                closed.push(closes.map(|stag| stag.0));
                if let Some((local, remote)) = data_in {
                    let mut queue = Recorder { room: 1, ..Recorder::default() };
                    mover.write_data(&mut queue, &local, remote);
                    let Some(WorkRequest::Write { id, local, remote }) = queue.works.pop_front() else {
                        panic!()
                    };
                    let written = (Moved::from(id), local.to_vec(), remote.len);
                    assert_eq!(written, (Moved::Put(4), b"abcd".to_vec(), 4));
                }
            }
            assert_eq!(mover.unsent(), 4);
            mover.sent(4);
            assert_eq!(mover.unsent(), 0);
            assert_eq!(closed, if invalidates { [Some(1), Some(2), None] } else { [None; 3] });
        }
    }

    /// Carries out the first so many writes while it is asked.
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
    fn data_that_comes_back_as_nothing_counts_as_long_as_the_queue_pair_has_it() {
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
        assert_eq!((queue.written.len(), mover.unsent()), (2, 3), "it is to come back");
        mover.sent(3);
        assert_eq!(mover.unsent(), 0);
    }

    #[test]
    fn a_read_that_was_not_given_to_the_queue_pair_is_taken_out() {
        let mut mover = with(WRITE);
        mover.assign(1);
        mover.get(1, 7, Seg::from_slice(&[0; 4]), 0);
        assert_eq!([mover.abandon(), mover.abandon()], [Some(7), None]);
    }
}
