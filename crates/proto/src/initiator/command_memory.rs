//! The memory of an initiator's commands, as a transport accesses it.

use crate::slots::SlotKey;
use blockmux_volume::{Seg, SgList};

/// The memory of the commands in flight.
pub trait CommandMemory {
    /// The data that a command sends: a list, and the offset of the command's data in it.
    fn data_out(&mut self, key: SlotKey) -> Option<(&SgList, usize)>;

    /// The destination of a command's data: a list, and the offset of the command's data in it. A
    /// short read without memory gets some.
    fn data_in(&mut self, key: SlotKey) -> Option<(&SgList, usize)>;

    /// Whether a read can borrow `len` bytes of received data: they are all of its data, and it has
    /// no memory.
    fn can_borrow(&mut self, key: SlotKey, len: usize) -> bool;

    /// Gives a read the borrowed data, if [`CommandMemory::can_borrow`] returned `true`.
    fn attach_borrowed(&mut self, key: SlotKey, data: Seg);
}
