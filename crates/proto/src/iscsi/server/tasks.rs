//! Per-task state of iSCSI and target transfer tags.

use super::transfer::DataOutTransfer;
use crate::scsi::task_set::TaskSet;
pub(super) use crate::scsi::task_set::TaskState;

/// The tasks of a session. The owner of a task is the connection that it is allegiant to (RFC 7143,
/// connection allegiance).
pub(super) type Tasks = TaskSet<TaskTransfer>;

/// Data transfer state of one command.
pub(super) struct TaskTransfer {
    /// Expected data-in, in bytes; `None` if the command reads nothing.
    pub(super) data_in: Option<u32>,
    /// Expected data-out, in bytes; `None` if the command writes nothing.
    pub(super) data_out: Option<u32>,
    /// The command was immediate and occupies no place in the window.
    pub(super) is_immediate: bool,
    pub(super) transfer: DataOutTransfer,
    /// Memory allocated for its data-out, in bytes.
    pub(super) memory: usize,
}

impl Tasks {
    /// The oldest data-out allocation among the connection's tasks, by allocation order.
    pub(super) fn owed(&self, owner: u32) -> Option<u64> {
        let transfers = self.fetching(owner).map(|entry| &entry.progress.transfer);
        transfers.filter(|transfer| transfer.has_memory()).map(|transfer| transfer.allocation_order).min()
    }

    /// The target transfer tag of a task's R2T. It is never the reserved tag, because a slot has 15
    /// bits.
    #[inline]
    pub(super) fn transfer_tag(&self, slot: usize, r2t_sn: u32) -> u32 {
        u32::from(self.generation(slot)) << 24 | (r2t_sn & 0xff) << 16 | (slot as u32 & 0x7fff)
    }

    /// The task slot in a target transfer tag.
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
    fn a_reused_slot_has_other_transfer_tags() {
        let mut tasks = Tasks::new(None);
        let tag = |tasks: &mut Tasks| {
            let progress = TaskTransfer {
                data_in: None,
                data_out: None,
                is_immediate: false,
                transfer: DataOutTransfer::default(),
                memory: 0,
            };
            let slot = tasks.insert(1, 1, Lun::new(0), || progress);
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
