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

    /// The client changes a range that it has locked.
    pub(crate) fn changes(&mut self, volume: VolumeId, (offset, len): (u64, u64)) {
        if let Some(fence) = self.fence(volume) {
            fence.changes(offset, len);
        }
    }

    /// Lets an I/O begin, unless a byte of its range is locked.
    #[inline]
    pub(crate) fn pass(&mut self, volume: VolumeId, op: Op, (offset, len): (u64, u64)) -> Option<Passage> {
        self.fence(volume)?.pass(offset, len, op.is_write())
    }

    #[inline]
    fn fence(&mut self, volume: VolumeId) -> Option<&mut Fence> {
        self.fences.iter_mut().find(|(id, _)| *id == volume).map(|(_, fence)| fence)
    }
}
