//! The traits [`Volume`], [`Channel`] and [`Core`].

use crate::io::{Completion, Io, IoError, Op};
use crate::pool::Pool;
use crate::ready::Waker;
use crate::snapshots::Snapshots;
use std::any::Any;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// Maximum length of one read or write, in bytes. Every volume accepts it, and splits a request if
/// the layer below accepts less. No protocol advertises a larger maximum.
pub const MAX_TRANSFER: u32 = 32 << 20;

/// Properties of a volume. Durability flags of all protocols are derived from it, never configured
/// separately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Size in bytes, a whole number of logical blocks.
    pub size: u64,
    /// Logical block in bytes, a power of two. Offsets and lengths are multiples of it.
    pub logical_block: u32,
    /// Physical block in bytes; a power of two, at least `logical_block`. The storage reads and
    /// rewrites a whole physical block for a write to a part of it.
    pub physical_block: u32,
    /// Preferred block in bytes; a power of two, at least `physical_block`. Requests of this size
    /// and alignment are efficient.
    pub preferred_block: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// A power failure before a flush may lose completed writes. `false`: a flush does not make
    /// completed writes any safer.
    pub write_cache: bool,
    /// The content is lost with the process, despite flushes.
    pub volatile: bool,
    /// Discards work in units of this many bytes; 0: they do nothing.
    pub discard_granularity: u32,
    /// [`Op::WriteZeroes`] with `only_fast` can succeed.
    pub fast_zeroes: bool,
    /// A flush on one channel covers writes completed on all.
    pub shared_flush: bool,
    /// Reads without a buffer are zero-copy.
    pub lends_reads: bool,
    /// Data of reads and writes may be a buffer that is registered with the core's ring
    /// ([`crate::Memory::registered`]), in memory that is so aligned. `None`: the volume needs
    /// bytes, and such a request fails with [`IoError::Unsupported`].
    pub registered_alignment: Option<MemoryAlignment>,
    /// The storage compares and writes ranges that lie within one aligned unit of this many bytes,
    /// a power of two, in one step for all of its clients ([`Op::CompareAndWrite`]); 0: none.
    pub compare_and_write_unit: u32,
    /// The storage has spinning disks.
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
            preferred_block: 4096,
            read_only: false,
            write_cache: false,
            volatile: false,
            discard_granularity: 0,
            fast_zeroes: false,
            shared_flush: true,
            lends_reads: false,
            registered_alignment: None,
            compare_and_write_unit: 0,
            rotational: false,
        }
    }

    /// Whether the storage itself compares and writes this range, in bytes.
    #[must_use]
    pub fn compares(&self, offset: u64, len: u64) -> bool {
        let unit = u64::from(self.compare_and_write_unit);
        unit > 0 && len > 0 && offset.checked_rem(unit).is_some_and(|at| len <= unit - at)
    }

    /// Checks whether the request fits this volume; every channel calls this first.
    ///
    /// # Errors
    /// The error for the completion if it does not fit.
    #[inline]
    pub fn check(&self, io: &Io) -> Result<(), IoError> {
        self.check_within(io, self.size)
    }

    /// Checks whether the request would fit this volume if it had `size` bytes.
    ///
    /// # Errors
    /// As for [`VolumeInfo::check`].
    #[inline]
    pub fn check_within(&self, io: &Io, size: u64) -> Result<(), IoError> {
        if matches!(io.op, Op::Flush) {
            return Ok(());
        }
        if self.read_only && io.op.is_write() {
            return Err(IoError::ReadOnly);
        }
        if io.offset.checked_add(io.len).is_none_or(|end| end > size) {
            return Err(IoError::OutOfRange);
        }
        if (io.offset | io.len) & u64::from(self.logical_block - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        match (io.op, &io.data) {
            (Op::Read, None) if io.len <= MAX_TRANSFER.into() => Ok(()),
            (Op::Read | Op::Write { .. }, Some(data))
                if io.len <= MAX_TRANSFER.into() && data.len() as u64 == io.len =>
            {
                let is_refused = self.registered_alignment.is_none() && io.is_in_registered_buffer();
                if is_refused { Err(IoError::Unsupported) } else { Ok(()) }
            }
            (Op::Read | Op::Write { .. }, _) => Err(IoError::BadLength),
            (Op::CompareAndWrite { .. }, _) => self.check_compare_and_write(io),
            _ => Ok(()),
        }
    }

    #[cold]
    fn check_compare_and_write(&self, io: &Io) -> Result<(), IoError> {
        if !self.compares(io.offset, io.len) || io.is_in_registered_buffer() {
            return Err(IoError::Unsupported);
        }
        let data_fits = io.data.as_ref().is_some_and(|data| data.len() as u64 == io.len * 2);
        if data_fits { Ok(()) } else { Err(IoError::BadLength) }
    }
}

/// An alignment of memory addresses, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryAlignment(
    /// Its logarithm to base 2, and one more.
    NonZeroU8,
);

impl MemoryAlignment {
    /// An alignment to `bytes`, or to the next greater power of two.
    #[must_use]
    pub fn of(bytes: u32) -> MemoryAlignment {
        let shift = u32::BITS - bytes.saturating_sub(1).leading_zeros();
        MemoryAlignment(NonZeroU8::MIN.saturating_add(shift.min(u32::BITS - 1) as u8))
    }

    /// The alignment in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        1 << (self.0.get() - 1)
    }

    /// The bits of an address that are 0.
    #[must_use]
    pub fn mask(self) -> u32 {
        self.bytes() - 1
    }
}

/// The new size of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// This many bytes.
    Bytes {
        /// The new size in bytes.
        size: u64,
        /// What happens if the volume is larger than that.
        beyond: Beyond,
    },
    /// The current size of the storage below.
    Own,
}

/// What happens to the data beyond the end of a volume that becomes smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// The resize is refused.
    Refuse,
    /// The storage keeps the data, and the volume no longer reaches it. A volume in RAM loses it.
    /// This undoes a growth.
    Keep,
    /// It is lost, because the user has asked for that.
    Discard,
}

impl Resize {
    /// A size of at least the current one.
    #[must_use]
    pub fn grow(size: u64) -> Resize {
        Resize::Bytes { size, beyond: Beyond::Refuse }
    }

    /// Any size; data beyond a smaller one is lost.
    #[must_use]
    pub fn discard_beyond(size: u64) -> Resize {
        Resize::Bytes { size, beyond: Beyond::Discard }
    }
}

impl Beyond {
    /// Checks a new size against the current one, both in bytes. Every volume that can be resized
    /// calls this first.
    ///
    /// # Errors
    /// If data would be lost that must be kept.
    pub fn check(self, now: u64, size: u64) -> Result<(), ResizeError> {
        match self {
            Beyond::Refuse if size < now => Err(ResizeError::WouldLose { now, size }),
            _ => Ok(()),
        }
    }
}

/// Why a volume cannot be resized, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The volume's size is fixed.
    #[error("cannot be resized: its size is that of the volumes below it, or fixed in its spec")]
    Fixed,
    /// The size is 0, or not a whole number of blocks.
    #[error("{size} bytes is not a positive multiple of the block size, {block}; round it")]
    BadSize {
        /// Requested size in bytes.
        size: u64,
        /// Size of a block, in bytes.
        block: u32,
    },
    /// The size exceeds the volume's maximum.
    #[error("it can have at most {most} bytes; choose a smaller size, or serve a larger volume")]
    TooLarge {
        /// Maximum size in bytes.
        most: u64,
    },
    /// Another process serves the volume.
    #[error("is not served by this daemon now; resize it where it is active")]
    NotServed,
    /// The volume is read-only.
    #[error("is opened read-only; leave out the size to query its current size")]
    ReadOnly,
    /// Data would be lost, and the user has not asked for that.
    #[error(
        "has {now} bytes, of which the last {} would be lost with a size of {size}; to discard them, use \
         'blockmux ctl resize --shrink'; to keep them, give at least the present size",
        now - size
    )]
    WouldLose {
        /// Current size in bytes.
        now: u64,
        /// Requested size in bytes; it is smaller.
        size: u64,
    },
    /// A system call failed.
    #[error("cannot {action} it: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Progress of populating the memory of a RAM volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Populated {
    /// Bytes populated so far.
    pub bytes: u64,
    /// Bytes to populate: the volume, or as much as memory allows.
    pub of: u64,
}

/// Counters of a remote volume's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Sessions opened to replace a lost one.
    pub reconnects: u64,
}

/// A linear array of blocks; shared by all cores.
///
/// A decorator returns the volume below it as [`Volume::inner`], whose answers are then the
/// defaults. If it delays requests or changes their data, its `registered_alignment` is `None`.
pub trait Volume: Send + Sync {
    /// The volume's current properties; the size may change over time.
    fn info(&self) -> VolumeInfo;

    /// The volume that a decorator wraps.
    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    /// Queries the size from the storage below, such as a block device that was resized, and
    /// returns it in bytes; [`Volume::info`] then reports it, too. May block, so cores do not call
    /// it; the server of the volume calls it periodically.
    fn refresh_size(&self) -> u64 {
        self.inner().map_or_else(|| self.info().size, Volume::refresh_size)
    }

    /// Resizes the volume and returns the new size in bytes. Later I/O is checked against the new
    /// size. A smaller size is refused unless the caller says what becomes of the data beyond it.
    /// Discarded data reads as zeroes if the volume grows again, except for concurrent writes. Does
    /// not notify users; the server does. Calls must not overlap. May block, so cores do not call
    /// it.
    ///
    /// # Errors
    /// If the volume cannot have that size; its size is then unchanged.
    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        match (self.inner(), to) {
            (Some(inner), _) => inner.resize(to),
            (None, Resize::Own) => Ok(self.refresh_size()),
            (None, Resize::Bytes { .. }) => Err(ResizeError::Fixed),
        }
    }

    /// The volume's snapshots; `None` if its storage has none.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.inner()?.snapshots()
    }

    /// The snapshots whose data the volume has, itself or in volumes below it, by their identities
    /// ([`crate::SnapshotInfo::identity`]).
    fn snapshots_in_use(&self) -> Vec<String> {
        self.inner().map(Volume::snapshots_in_use).unwrap_or_default()
    }

    /// A remote server's identifier of the data, the same over every path, such as an NGUID or an
    /// NAA designator; `None` if the server reports none, for local volumes and for decorators.
    fn designator(&self) -> Option<&str> {
        None
    }

    /// Opens this core's queue to the volume.
    ///
    /// `depth` is the maximum number of requests that the caller has in flight on the channel, so
    /// queues cannot overflow. `waker` is woken when [`Channel::poll`] has completions that did not
    /// occur within [`Channel::submit`] or [`Channel::kick`].
    ///
    /// # Errors
    /// If the volume cannot be reached or this core cannot drive it.
    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError>;

    /// Progress of populating the volume's memory; `None` if there is none to populate.
    fn populated(&self) -> Option<Populated> {
        self.inner()?.populated()
    }

    /// Counters of the volume's connections; `None` for a local volume.
    fn links(&self) -> Option<LinkCounts> {
        self.inner()?.links()
    }

    /// The path of a file below that was deleted while the volume is open. Its data is lost when
    /// the volume is closed. May block, so cores do not call it.
    fn deleted_file(&self) -> Option<PathBuf> {
        self.inner()?.deleted_file()
    }

    /// The path of a file or device below that leads to something else now, or nowhere. May block
    /// in the path, so cores do not call it.
    fn lost_path(&self) -> Option<PathBuf> {
        self.inner()?.lost_path()
    }

    /// Registers a callback for size changes, called from any thread. A volume of fixed size may
    /// ignore it.
    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_resize(call);
        }
    }
}

/// One core's queue to a volume: never blocks, and not `Send` by design.
///
/// I/O in flight is unordered. A flush covers the writes that completed before it was submitted.
/// Each submitted I/O completes exactly once, even if cancelled, and owns its memory until then.
/// Dropping a channel abandons what is in flight without completions; its memory stays valid as
/// long as the kernel may access it.
///
/// # Who checks ranges
/// A channel checks every request against the volume's current size, alignment, length and write
/// protection ([`VolumeInfo::check`]) and fails an invalid one: the size may have changed since the
/// request was made, so nobody above can do it for the channel. Protocols check earlier, because
/// each has errors of its own for it. Decorators, slices and stripes may rely on the check of what
/// is below them, except for what they change: a slice adds its offset, so it checks against its
/// own length first.
pub trait Channel {
    /// Takes a request; an invalid one completes with an error.
    fn submit(&mut self, io: Io);

    /// Starts everything submitted since the last call, with one doorbell or system call.
    fn kick(&mut self) {}

    /// Appends completions since the last call.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Cancels a request, best effort; it completes in any case.
    fn cancel(&mut self, _tag: crate::Tag) {}
}

/// Services of a core. The engine's is based on io_uring; the simulator's on a seed.
pub trait Core {
    /// The time, virtual under the simulator.
    fn now(&self) -> Instant;

    /// This core's buffers.
    fn pool(&self) -> &Pool;

    /// Wakes `waker` once at `when` or soon after.
    fn wake_at(&self, when: Instant, waker: &Waker);

    /// Downcasting, for volumes that need one type of core.
    fn as_any(&self) -> &dyn Any;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, Seg, SgList, Tag};

    fn io(op: Op, offset: u64, len: u64, data_len: Option<usize>) -> Io {
        let data = data_len.map(|len| SgList::one(Seg::from_slice(&vec![0; len])));
        Io { tag: Tag(0), op, offset, len, data }
    }

    #[test]
    fn an_invalid_request_has_a_specific_error() {
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

    #[test]
    fn a_range_is_compared_within_one_unit_with_data_of_twice_its_length() {
        let info = VolumeInfo { compare_and_write_unit: 4096, ..VolumeInfo::new(8192) };
        let compare = |offset, len, data_len| {
            info.check(&io(Op::CompareAndWrite { fua: false }, offset, len, data_len))
        };
        assert_eq!(compare(0, 4096, Some(8192)), Ok(()));
        assert_eq!(compare(7680, 512, Some(1024)), Ok(()));
        assert_eq!(compare(3584, 1024, Some(2048)), Err(IoError::Unsupported));
        assert_eq!(compare(0, 8192, Some(16_384)), Err(IoError::Unsupported));
        assert_eq!(compare(0, 512, Some(512)), Err(IoError::BadLength));
        assert_eq!(compare(0, 512, None), Err(IoError::BadLength));
        assert_eq!(compare(8192, 512, Some(1024)), Err(IoError::OutOfRange));
        let none = VolumeInfo::new(8192);
        let refused = none.check(&io(Op::CompareAndWrite { fua: false }, 0, 512, Some(1024)));
        assert_eq!(refused, Err(IoError::Unsupported));
    }

    #[test]
    fn an_alignment_is_a_power_of_two() {
        for (bytes, aligned) in [(0, 1), (1, 1), (2, 2), (3, 4), (512, 512), (4095, 4096), (1 << 31, 1 << 31)]
        {
            assert_eq!(MemoryAlignment::of(bytes).bytes(), aligned);
        }
        assert_eq!(MemoryAlignment::of(u32::MAX).bytes(), 1 << 31);
        assert_eq!((MemoryAlignment::of(1).mask(), MemoryAlignment::of(512).mask()), (0, 511));
        assert!(MemoryAlignment::of(4) < MemoryAlignment::of(512));
    }

    #[test]
    fn only_a_volume_that_says_so_takes_registered_buffers() {
        let data = SgList::one(Memory::registered(0, 1 << 20).seg(0, 512));
        for op in [Op::Read, Op::Write { fua: false }] {
            let io = Io { tag: Tag(0), op, offset: 0, len: 512, data: Some(data.clone()) };
            assert_eq!(VolumeInfo::new(8192).check(&io), Err(IoError::Unsupported));
            let registered_alignment = Some(MemoryAlignment::of(1));
            let takes = VolumeInfo { registered_alignment, ..VolumeInfo::new(8192) };
            assert_eq!(takes.check(&io), Ok(()));
        }
    }
}
