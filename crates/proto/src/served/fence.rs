//! What a client may do that has no name to register by, an NBD connection or whoever uses an AoE target, or one name for
//! all that it does: an NVMe host.

use super::{Access, Lane, Passage, Registrant, Served};
use blockmux_volume::Op;
use std::rc::Rc;
use std::sync::Arc;

/// A client's way to a volume: asks reservations and locked ranges before each I/O, without a lock.
pub(crate) struct Fence {
    served: Arc<Served>,
    lane: Rc<Lane>,
    /// The client's name, if it has one.
    who: Option<Registrant>,
    /// The generation that `access` was made of.
    seen: u64,
    access: Access,
    /// The generation of the last complaint.
    complained_of: Option<u64>,
}

impl Fence {
    pub(crate) fn new(served: &Arc<Served>) -> Fence {
        Fence::of(served, None)
    }

    /// The same for a client that may be registered.
    pub(crate) fn of(served: &Arc<Served>, who: Option<Registrant>) -> Fence {
        let mut fence = Fence {
            served: served.clone(),
            lane: Lane::new(served),
            who,
            seen: 0,
            access: Access::ALL,
            complained_of: None,
        };
        fence.refresh();
        fence
    }

    /// Whether reservations let the client do this, and nothing else keeps everybody out. A flush is for what was written
    /// before, and does nobody harm.
    #[inline]
    pub(crate) fn admits(&mut self, op: Op) -> bool {
        let access = self.access();
        op == Op::Flush || if op.is_write() { access.writes } else { access.reads }
    }

    /// What reservations let the client do. Without a registration, whatever anybody reserves keeps it out.
    #[inline]
    pub(crate) fn access(&mut self) -> Access {
        if self.served.generation() != self.seen {
            self.refresh();
        }
        self.access
    }

    /// Why the client is kept out, for the log of who serves the volume; once for each change of what keeps it out.
    #[cold]
    pub(crate) fn complaint(&mut self) -> Option<&'static str> {
        if self.complained_of.replace(self.seen) == Some(self.seen) {
            return None;
        }
        Some(self.served.look(|table| {
            if table.is_retired {
                "the volume is not served any more"
            } else if table.is_closed {
                "all that is on the volume is being destroyed"
            } else {
                "an initiator has reserved the volume"
            }
        }))
    }

    /// Lets an I/O begin within a range that the client has locked.
    pub(super) fn pass_locked(&self, offset: u64, len: u64, changes: bool) -> Passage {
        self.lane.pass_locked(offset, len, changes)
    }

    /// The same as [`Fence::pass`] for who asks what is allowed once the I/O is counted.
    #[inline]
    pub(super) fn count(&self, offset: u64, len: u64, changes: bool) -> Option<Passage> {
        self.lane.pass(offset, len, changes)
    }

    /// Lets an I/O on the range begin that changes it or does not, unless a byte of it is locked, or the table has
    /// changed since the I/O was admitted. Ask again for both from [`Fence::admits`] on.
    #[inline]
    pub(crate) fn pass(&self, offset: u64, len: u64, changes: bool) -> Option<Passage> {
        let passage = self.lane.pass(offset, len, changes)?;
        // Once it is counted: who changes the table and then waits for what was admitted before (`Drain`) sees it, or it
        // sees the change.
        (self.served.generation() == self.seen).then_some(passage)
    }

    #[cold]
    fn refresh(&mut self) {
        // Before the look: a change in between is looked at once more.
        self.seen = self.served.generation();
        self.access = self.served.look(|table| match table.reserved_by {
            Some(_) => Access::NONE,
            None if table.is_closed || table.is_retired => Access::NONE,
            None => table.reservations.access(self.who.as_ref()),
        });
    }
}
