//! Data transfer over RDMA instead of Data-In and R2T PDUs (RFC 5047).
//!
//! Get_Data queues an RDMA Read of the buffer that a command advertised, one for a whole round of
//! data-out. Put_Data adds the RDMA Write of the data-in to the response in the sender's messages.
//! [`TargetMover`] posts both.

use crate::rdma::target_mover::TargetMover;
use crate::rdma::{Remote, Stag};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::iscsi::FLAG_FINAL;
use blockmux_wire::iscsi::scsi::{FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iser::ControlHeader;

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
    /// Posts the transfers. The task of an RDMA Read is the target transfer tag of its R2T.
    pub(super) transfers: TargetMover,
    /// Buffers of the current PDU.
    pub(super) current_buffers: RemoteBuffers,
    /// Buffers of the tasks, by slot.
    buffers: Vec<RemoteBuffers>,
    /// The initiator accepts Send with Invalidate.
    invalidates: bool,
    /// The advertised write buffer begins after the unsolicited data.
    is_solicited_only: bool,
}

/// An initiator over RDMA, as its connection request describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RdmaPeer {
    /// It accepts Send with Invalidate.
    pub(super) invalidates: bool,
    /// The RDMA Reads of its memory that it supports at a time.
    pub(super) reads: u32,
}

impl From<&ControlHeader> for RemoteBuffers {
    fn from(header: &ControlHeader) -> RemoteBuffers {
        RemoteBuffers { read: header.read(), write: header.write(), first: None }
    }
}

impl TargetDatamover {
    pub(super) fn new(peer: RdmaPeer, is_solicited_only: bool) -> TargetDatamover {
        TargetDatamover {
            transfers: TargetMover::new(peer.reads),
            current_buffers: RemoteBuffers::default(),
            buffers: Vec::new(),
            invalidates: peer.invalidates,
            is_solicited_only,
        }
    }

    /// Sets the buffers of the PDU that is processed next.
    #[inline]
    pub(super) fn set_current(&mut self, buffers: RemoteBuffers) {
        self.current_buffers = buffers;
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
            self.transfers.add_unsent(len);
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
        self.transfers.read(tag, local, remote);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::sender::Sender;
    use crate::rdma::WorkRequest;
    use crate::rdma::testing::Recorder;
    use zerocopy::FromZeros;

    fn command(flags: u8, expected: u32, immediate: u32) -> ScsiCommand {
        let mut command = ScsiCommand::new_zeroed();
        command.flags = flags;
        command.expected_data_transfer_length = expected.into();
        command.data_segment_length = blockmux_wire::iscsi::U24::new(immediate);
        command
    }

    fn with(buffers: RemoteBuffers) -> TargetDatamover {
        let mut mover = TargetDatamover::new(peer(true), true);
        mover.set_current(buffers);
        mover
    }

    fn peer(invalidates: bool) -> RdmaPeer {
        RdmaPeer { invalidates, reads: 2 }
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
            let mut mover = TargetDatamover::new(peer(true), is_solicited_only);
            mover.set_current(WRITE);
            mover.assign(3);
            mover.get(3, 7, Seg::from_slice(&[0; 4]), 8);
            mover.get(3, 8, Seg::from_slice(&[0; 4]), 12);
            let mut queue = Recorder { room: 3, ..Recorder::default() };
            assert!(mover.transfers.transmit(&mut queue, Sender::new(true).messages().unwrap(), |_| true));
            let found = [(); 2].map(|()| match queue.works.pop_front() {
                Some(WorkRequest::Read { id, remote, .. }) => (mover.transfers.on_done(id), remote.address),
                other => panic!("{other:?}"),
            });
            assert_eq!(found, [(Some(7), addresses[0]), (Some(8), addresses[1])]);
        }
    }

    #[test]
    fn a_response_invalidates_the_buffer_of_its_command() {
        let data = SgList::one(Seg::from_slice(b"abcdef"));
        for invalidates in [true, false] {
            let mut mover = TargetDatamover::new(peer(invalidates), true);
            let mut invalidated = Vec::new();
            for (slot, buffers) in [READ, WRITE, RemoteBuffers::default()].into_iter().enumerate() {
                mover.set_current(buffers);
                mover.assign(slot);
                let (data_in, invalidates) = mover.put(slot, data.clone(), if slot == 0 { 4 } else { 0 });
                assert_eq!(data_in.is_some(), slot == 0);
                invalidated.push(invalidates.map(|stag| stag.0));
                if let Some((local, remote)) = data_in {
                    assert_eq!((local.to_vec(), remote.len), (b"abcd".to_vec(), 4));
                }
            }
            assert_eq!(mover.transfers.unsent(), 4);
            assert_eq!(invalidated, if invalidates { [Some(1), Some(2), None] } else { [None; 3] });
        }
    }
}
