//! What a client may do that has no name to register by: an NBD connection, an NVMe queue, whoever uses an AoE target.

use super::{Access, Lane, Passage, Served};
use blockmux_volume::Op;
use std::rc::Rc;
use std::sync::Arc;

/// A client's way to a volume: asks reservations and locked ranges before each I/O, without a lock.
pub(crate) struct Fence {
    served: Arc<Served>,
    lane: Rc<Lane>,
    /// The generation that `access` was made of.
    seen: u64,
    access: Access,
}

impl Fence {
    pub(crate) fn new(served: &Arc<Served>) -> Fence {
        let mut fence =
            Fence { served: served.clone(), lane: Lane::new(served), seen: 0, access: Access::ALL };
        fence.refresh();
        fence
    }

    /// Whether reservations let the client do this. It holds no registration, and so whatever anybody reserves keeps it
    /// out. A flush is for what was written before, and does nobody harm.
    #[inline]
    pub(crate) fn admits(&mut self, op: Op) -> bool {
        if self.served.generation() != self.seen {
            self.refresh();
        }
        op == Op::Flush || if op.is_write() { self.access.writes } else { self.access.reads }
    }

    /// Lets an I/O on the range begin that changes it or does not, unless a byte of it is locked.
    #[inline]
    pub(crate) fn pass(&self, offset: u64, len: u64, changes: bool) -> Option<Passage> {
        self.lane.pass(offset, len, changes)
    }

    #[cold]
    fn refresh(&mut self) {
        // Before the look: a change in between is looked at once more.
        self.seen = self.served.generation();
        self.access = self.served.look(|table| match table.reserved_by {
            Some(_) => Access::NONE,
            None => table.reservations.access(None),
        });
    }
}
