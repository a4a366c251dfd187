//! The fences of several volumes: one NVMe queue, or all who use an AoE target.

use super::{Access, Fence, Passage, Registrant, Served};
use crate::exports::VolumeId;
use blockmux_volume::Op;
use std::sync::Arc;

/// A session's way to its volumes.
pub(crate) struct Gate {
    fences: Vec<(VolumeId, Fence)>,
}

impl Gate {
    /// The way of `who`, or of somebody without a name.
    pub(crate) fn new<'a>(
        volumes: impl Iterator<Item = (VolumeId, &'a Arc<Served>)>,
        who: Option<&Registrant>,
    ) -> Gate {
        Gate { fences: volumes.map(|(volume, served)| (volume, Fence::of(served, who.cloned()))).collect() }
    }

    /// The same way to these volumes alone: others are left, and it begins to those that are new.
    pub(crate) fn lead_to<'a>(
        &mut self,
        volumes: impl Iterator<Item = (VolumeId, &'a Arc<Served>)>,
        who: Option<&Registrant>,
    ) {
        let mut before = std::mem::take(&mut self.fences);
        self.fences.extend(volumes.map(|(volume, served)| {
            let known = before.iter().position(|(id, _)| *id == volume);
            known.map_or_else(|| (volume, Fence::of(served, who.cloned())), |known| before.swap_remove(known))
        }));
    }

    /// Whether it leads to that volume.
    pub(crate) fn leads_to(&self, volume: VolumeId) -> bool {
        self.fences.iter().any(|(id, _)| *id == volume)
    }

    /// Whether reservations let the client do this.
    #[inline]
    pub(crate) fn admits(&mut self, volume: VolumeId, op: Op) -> bool {
        self.fence(volume).is_some_and(|fence| fence.admits(op))
    }

    /// What reservations let the client do.
    #[inline]
    pub(crate) fn access(&mut self, volume: VolumeId) -> Access {
        self.fence(volume).map_or(Access::NONE, Fence::access)
    }

    /// Lets an I/O begin within a range that the client has locked.
    pub(crate) fn pass_locked(
        &mut self,
        volume: VolumeId,
        op: Op,
        (offset, len): (u64, u64),
    ) -> Option<Passage> {
        self.fence(volume).map(|fence| fence.pass_locked(offset, len, op.is_write()))
    }

    /// Counts an I/O as in flight, unless a byte of its range is locked. It may begin if it is admitted after that: who
    /// changes the table and then waits for what was admitted before sees it, or it sees the change.
    #[inline]
    pub(crate) fn pass(&mut self, volume: VolumeId, op: Op, (offset, len): (u64, u64)) -> Option<Passage> {
        self.fence(volume)?.count(offset, len, op.is_write())
    }

    #[inline]
    fn fence(&mut self, volume: VolumeId) -> Option<&mut Fence> {
        self.fences.iter_mut().find(|(id, _)| *id == volume).map(|(_, fence)| fence)
    }
}
