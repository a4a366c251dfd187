//! The traits: [`Volume`], [`Channel`] and the [`Core`] that they run on.

use crate::io::{Completion, Io, IoError, Op};
use crate::pool::Pool;
use crate::ready::Waker;
use std::any::Any;
use std::rc::Rc;
use std::time::Instant;

/// The most data that one read or write moves, in bytes. Every volume takes this much and splits
/// inside where what lies below takes less; a protocol that advertises a maximum advertises at most
/// this.
pub const MAX_TRANSFER: u32 = 32 << 20;

/// What a volume is like. Durability bits of all protocols are derived from this and never
/// configured apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// In bytes, a whole number of logical blocks.
    pub size: u64,
    /// Bytes; a power of two. Offsets and lengths are multiples of this.
    pub logical_block: u32,
    /// Bytes; a power of two, at least `logical_block`. Requests of this size and alignment are
    /// efficient.
    pub physical_block: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// A completed write may be lost with the power until a flush; `false`: every completed write
    /// is as stable as it will get.
    pub write_cache: bool,
    /// The content is lost with the process, whatever is flushed.
    pub volatile: bool,
    /// Discards work in units of this many bytes; 0: they do nothing.
    pub discard_granularity: u32,
    /// [`Op::WriteZeroes`] with `only_fast` can succeed.
    pub fast_zeroes: bool,
    /// A flush on one channel covers writes completed on all.
    pub shared_flush: bool,
    /// Reads without a buffer get memory that costs no copy.
    pub lends_reads: bool,
    /// Spinning disks below.
    pub rotational: bool,
}

impl VolumeInfo {
    /// A writable volume of `size` bytes in 512-byte blocks without write cache; a starting point.
    #[must_use]
    pub fn new(size: u64) -> VolumeInfo {
        VolumeInfo {
            size,
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            write_cache: false,
            volatile: false,
            discard_granularity: 0,
            fast_zeroes: false,
            shared_flush: true,
            lends_reads: false,
            rotational: false,
        }
    }

    /// Whether the request fits this volume; every channel asks this first.
    ///
    /// # Errors
    /// What the completion must say if it does not.
    #[inline]
    pub fn check(&self, io: &Io) -> Result<(), IoError> {
        self.check_within(io, self.size)
    }

    /// Checks an I/O against another size of the volume, in bytes.
    ///
    /// # Errors
    /// As of [`VolumeInfo::check`].
    #[inline]
    pub fn check_within(&self, io: &Io, size: u64) -> Result<(), IoError> {
        if io.op == Op::Flush {
            return Ok(());
        }
        if io.op.is_write() && self.read_only {
            return Err(IoError::ReadOnly);
        }
        if io.offset.checked_add(io.len).is_none_or(|end| end > size) {
            return Err(IoError::OutOfRange);
        }
        if (io.offset | io.len) & u64::from(self.logical_block - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        if io.op.moves_data() {
            let data_fits = match &io.data {
                Some(data) => data.len() as u64 == io.len,
                None => io.op == Op::Read,
            };
            if io.len > MAX_TRANSFER.into() || !data_fits {
                return Err(IoError::BadLength);
            }
        }
        Ok(())
    }
}

/// How large a volume is to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// So many bytes.
    Bytes(u64),
    /// As large as what lies below is.
    Own,
}

/// Why a volume does not get another size, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// It is as large as what it is made of.
    #[error("cannot be resized: it is as large as what it is made of")]
    Fixed,
    /// Not a whole number of blocks, or none.
    #[error("{size} bytes are not one or more whole blocks of {block}; round them")]
    BadSize {
        /// In bytes, as asked for.
        size: u64,
        /// In bytes.
        block: u32,
    },
    /// More than there is room for.
    #[error("it can have at most {most} bytes; serve a larger one")]
    TooLarge {
        /// In bytes.
        most: u64,
    },
    /// Nothing of the volume may change.
    #[error("is opened read-only; leave the size out to have its own looked at again")]
    ReadOnly,
    /// The system refused.
    #[error("cannot {action} it: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The system's own word.
        source: std::io::Error,
    },
}

/// How far the memory of a RAM volume is populated, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Populated {
    /// Faulted in ahead of use until now.
    pub bytes: u64,
    /// What will be: the volume, or as much of it as memory allows.
    pub of: u64,
}

/// A linear array of blocks; shared by all cores.
pub trait Volume: Send + Sync {
    /// What the volume is like now; its size may change over time.
    fn info(&self) -> VolumeInfo;

    /// The size in bytes, looked at afresh where what lies below changes it by itself, as a block
    /// device does that was made larger: [`Volume::info`] says the same from then on. May wait for
    /// the system, so no core calls this; whoever serves the volume does from time to time.
    fn look_at_size(&self) -> u64 {
        self.info().size
    }

    /// Gives the volume another size; answers it, in bytes. I/O from then on is held against the
    /// new size, and what is beyond a smaller one is lost: it reads as zeroes should the volume
    /// grow again, but for what was being written there at that moment. Nobody is told, that is for
    /// who serves the volume. One call at a time; may wait for the system, so no core calls this.
    ///
    /// # Errors
    /// If the volume cannot have that size; then it has the one that it had.
    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        match to {
            Resize::Own => Ok(self.look_at_size()),
            Resize::Bytes(_) => Err(ResizeError::Fixed),
        }
    }

    /// What the server of a remote volume calls its data wherever they are reached, such as an
    /// NGUID or an NAA designator; `None` if it does not tell, and for all other volumes.
    fn designator(&self) -> Option<&str> {
        None
    }

    /// Opens this core's queue to the volume.
    ///
    /// `depth` is the most I/O that the caller will ever have in flight on the channel: no queue
    /// can overflow, so there is no "try again". `waker` is woken whenever [`Channel::poll`] has
    /// something new that did not come from within a call of [`Channel::submit`] or
    /// [`Channel::kick`].
    ///
    /// # Errors
    /// If the volume cannot be reached or this core cannot drive it.
    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError>;

    /// How far its memory is faulted in ahead of use; `None` if it has none for that.
    fn populated(&self) -> Option<Populated> {
        None
    }

    /// Has `call` called from now on, from any thread, whenever the size has become another. A
    /// volume that never changes its size need not keep it.
    fn on_resize(&self, _call: Box<dyn Fn() + Send + Sync>) {}
}

/// One core's queue to a volume: never blocks, never crosses threads (not `Send`, by design).
///
/// No order is promised between I/O in flight. A flush covers the writes that completed before it
/// was submitted. Each submitted I/O completes exactly once; a cancelled one too, and it owns its
/// memory until then. Dropping a channel abandons what is in flight: nobody is told, memory stays
/// valid as long as a kernel may write it.
pub trait Channel {
    /// Takes a request; what is wrong with it is said by its completion.
    fn submit(&mut self, io: Io);

    /// Starts everything submitted since the last call: one doorbell, one system call.
    fn kick(&mut self) {}

    /// Appends what has completed since the last call.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Asks for an early end; best effort, and the completion comes all the same.
    fn cancel(&mut self, _tag: crate::Tag) {}
}

/// What a core gives to what runs on it. The engine's is io_uring; the simulator's is seeded.
pub trait Core {
    /// The time, virtual under the simulator.
    fn now(&self) -> Instant;

    /// This core's buffers.
    fn pool(&self) -> &Pool;

    /// Wakes `waker` once at `when` or soon after.
    fn wake_at(&self, when: Instant, waker: &Waker);

    /// The core's own type, for volumes that belong to one engine.
    fn as_any(&self) -> &dyn Any;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Seg, SgList, Tag};

    fn io(op: Op, offset: u64, len: u64, data_len: Option<usize>) -> Io {
        let data = data_len.map(|len| SgList::one(Seg::from_slice(&vec![0; len])));
        Io { tag: Tag(0), op, offset, len, data }
    }

    #[test]
    fn a_request_that_does_not_fit_says_why() {
        let info = VolumeInfo::new(8192);
        let write = Op::Write { fua: false };
        assert_eq!(info.check(&io(Op::Read, 4096, 4096, None)), Ok(()));
        assert_eq!(info.check(&io(Op::Read, 4096, 4608, None)), Err(IoError::OutOfRange));
        assert_eq!(info.check(&io(Op::Read, u64::MAX - 511, 1024, None)), Err(IoError::OutOfRange));
        assert_eq!(info.check(&io(Op::Read, 1, 512, None)), Err(IoError::Misaligned));
        assert_eq!(info.check(&io(write, 0, 512, None)), Err(IoError::BadLength));
        assert_eq!(info.check(&io(write, 0, 512, Some(1024))), Err(IoError::BadLength));
        let frozen = VolumeInfo { read_only: true, ..info };
        assert_eq!(frozen.check(&io(write, 0, 512, Some(512))), Err(IoError::ReadOnly));
        assert_eq!(frozen.check(&io(Op::Flush, 0, 0, None)), Ok(()));
    }
}
