//! What iSCSI keeps of each task, and the names that its initiator has for it.

use super::transfer::DataOutTransfer;
use crate::scsi::task_set::TaskSet;
pub(super) use crate::scsi::task_set::{TaskEntry, TaskState};

/// The tasks of a session. The owner of a task is the connection that it is allegiant to (RFC 7143,
/// command connection allegiance).
pub(super) type Tasks = TaskSet<TaskTransfer>;

/// How far one command's data has come.
pub(super) struct TaskTransfer {
    /// The initiator's room for data-in, in bytes; `None`: it reads nothing.
    pub(super) data_in: Option<u32>,
    /// The initiator's data-out, in bytes; `None`: it writes nothing.
    pub(super) data_out: Option<u32>,
    /// It came with the I bit, and so outside the window.
    pub(super) is_immediate: bool,
    pub(super) transfer: DataOutTransfer,
    /// Memory that its data-out was given, in bytes.
    pub(super) memory: usize,
}

impl Tasks {
    /// The oldest data-out of a connection's tasks that memory waits for.
    pub(super) fn owed(&self, owner: u32) -> Option<u64> {
        let transfers = self.fetching(owner).map(|entry| &entry.progress.transfer);
        transfers.filter(|transfer| transfer.has_memory()).map(|transfer| transfer.given).min()
    }

    /// The target transfer tag of a task's R2T: never reserved, because a slot has few bits.
    #[inline]
    pub(super) fn transfer_tag(&self, slot: usize, r2t_sn: u32) -> u32 {
        u32::from(self.generation(slot)) << 24 | (r2t_sn & 0xff) << 16 | (slot as u32 & 0x7fff)
    }

    /// The slot that a target transfer tag names.
    #[inline]
    pub(super) fn slot_of(ttt: u32) -> usize {
        (ttt & 0x7fff) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::Lun;

    #[test]
    fn a_slot_that_is_used_again_has_other_transfer_tags() {
        let mut tasks = Tasks::new(None);
        let tag = |tasks: &mut Tasks| {
            let progress = TaskTransfer {
                data_in: None,
                data_out: None,
                is_immediate: false,
                transfer: DataOutTransfer::default(),
                memory: 0,
            };
            let slot = tasks.insert(TaskEntry::new(1, 1, Lun::new(0), progress));
            let tag = tasks.transfer_tag(slot, 0);
            assert_eq!(Tasks::slot_of(tag), slot);
            tasks.remove(slot);
            (slot, tag)
        };
        let (first, second) = (tag(&mut tasks), tag(&mut tasks));
        assert_eq!(first.0, second.0);
        assert_ne!(first.1, second.1);
    }
}
