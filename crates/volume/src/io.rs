//! A request to a volume, and its completion.

use crate::buf::Seg;
use crate::sg_list::SgList;

/// Identifies a request, chosen by the submitter; unique among its requests in flight on one
/// channel.
///
/// It is the submitter's own slot number and never a peer's ITT, CID or cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read `len` bytes.
    Read,
    /// Write `len` bytes.
    Write {
        /// Force unit access: complete only once the data is on stable storage.
        fua: bool,
    },
    /// Make all writes stable that completed before this request was submitted, on any channel. Has
    /// no range.
    Flush,
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Force unit access, as for a write.
        fua: bool,
        /// The blocks may be deallocated; otherwise they stay provisioned.
        may_unmap: bool,
        /// Fail with [`IoError::Unsupported`], changing nothing, rather than write zeroes block by
        /// block.
        only_fast: bool,
    },
    /// The content is no longer needed; what the range reads as afterwards is undefined.
    Discard {
        /// Force unit access, as for a write.
        fua: bool,
    },
    /// Write the second half of the data if the range equals the first half, in one step for all
    /// clients of the storage. Completes with [`Output::Differs`] or [`Output::NotCompared`] if it
    /// has not written. Only for ranges that [`crate::VolumeInfo::compares`].
    CompareAndWrite {
        /// Force unit access, as for a write.
        fua: bool,
    },
    /// A hint that the range will be read soon.
    Prefetch,
    /// Query which parts of the range are allocated; completes with [`Output::Extents`].
    BlockStatus,
}

impl Op {
    /// Whether the operation changes the volume's content.
    #[inline]
    #[must_use]
    pub fn is_write(self) -> bool {
        matches!(
            self,
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } | Op::CompareAndWrite { .. }
        )
    }

    /// Whether the operation transfers data, so that [`crate::MAX_TRANSFER`] limits its length.
    #[must_use]
    pub fn moves_data(self) -> bool {
        matches!(self, Op::Read | Op::Write { .. })
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct Io {
    /// Returned in the completion.
    pub tag: Tag,
    /// The operation.
    pub op: Op,
    /// Offset in bytes, a whole number of logical blocks.
    pub offset: u64,
    /// Length in bytes, a whole number of logical blocks; 0 for a flush.
    pub len: u64,
    /// Write data, or the buffer of a read, `len` bytes; of a compare and write twice that. A read
    /// with `None` gets memory of the volume (zero-copy) or of the core's pool. All of it or
    /// nothing is in a registered buffer, which only some volumes take
    /// ([`crate::VolumeInfo::registered_alignment`]).
    pub data: Option<SgList>,
}

impl Io {
    /// A request without data: a flush, a discard, or a read without a buffer.
    #[must_use]
    pub fn new(tag: Tag, op: Op, offset: u64, len: u64) -> Io {
        Io { tag, op, offset, len, data: None }
    }

    /// Whether the data is in a buffer that is registered with the core's ring.
    #[inline]
    #[must_use]
    pub fn is_in_registered_buffer(&self) -> bool {
        let first = self.data.as_ref().and_then(|data| data.segs().first());
        first.is_some_and(Seg::is_registered)
    }

    /// The result of a request of length 0.
    #[must_use]
    pub fn into_empty_output(self) -> Output {
        match self.op {
            Op::Read => Output::Data(self.data.unwrap_or_default()),
            Op::BlockStatus => Output::Extents(Vec::new()),
            _ => Output::Nothing,
        }
    }
}

/// A run of blocks with the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Length in bytes, not 0.
    pub len: u64,
    /// The blocks are not allocated: a write may need new space.
    pub hole: bool,
    /// The blocks read as zeroes; `false` means not known.
    pub zero: bool,
}

impl Extent {
    /// An extent of `len` bytes, not 0, with data or of unknown state.
    #[must_use]
    pub fn data(len: u64) -> Extent {
        Extent { len, hole: false, zero: false }
    }
}

/// The result of a successful request.
#[derive(Clone, Debug, Default)]
pub enum Output {
    /// No output: the result of a write, a flush, a discard or a hint.
    #[default]
    Nothing,
    /// The data of a read, `len` bytes: the request's own list, or memory borrowed until it is
    /// dropped. A concurrent write may change borrowed memory, so copy it before computing a
    /// digest.
    Data(SgList),
    /// Consecutive extents from the request's offset on, at least one; together they may cover less
    /// than requested, never more.
    Extents(Vec<Extent>),
    /// A compare and write has found a difference, first at this byte of the range, and has not
    /// written.
    Differs(u64),
    /// The storage cannot compare and write here: nothing has happened, and the caller reads,
    /// compares and writes.
    NotCompared,
}

impl Output {
    /// The data of a read; nothing for other requests.
    #[must_use]
    pub fn into_data(self) -> SgList {
        match self {
            Output::Data(data) => data,
            _ => SgList::default(),
        }
    }
}

/// The completion of a request. Each submitted [`Io`] has exactly one; the order is arbitrary.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: Tag,
    /// The output, or the error.
    pub result: Result<Output, IoError>,
}

/// Why a request failed. Each protocol maps this in exactly one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum IoError {
    /// The range does not lie within the volume.
    #[error("outside the volume")]
    OutOfRange,
    /// Offset or length is not a whole number of blocks.
    #[error("not a whole number of blocks")]
    Misaligned,
    /// More data than [`crate::MAX_TRANSFER`], or a list whose length differs from the request's.
    #[error("transfer is too large or its buffer has another length")]
    BadLength,
    /// The volume cannot be written.
    #[error("volume is read-only")]
    ReadOnly,
    /// The volume does not support this, or cannot do it fast.
    #[error("operation not supported")]
    Unsupported,
    /// The volume is reserved by another initiator.
    #[error("reserved by another initiator")]
    Reserved,
    /// The storage below is full.
    #[error("no space left")]
    NoSpace,
    /// The device failed.
    #[error("medium error")]
    Medium,
    /// No memory for the request.
    #[error("out of memory")]
    NoMemory,
    /// The connection to a remote volume is lost for good.
    #[error("path to the volume is lost")]
    PathLost,
    /// The request was cancelled.
    #[error("aborted")]
    Aborted,
    /// The server is shutting down.
    #[error("shutting down")]
    ShuttingDown,
    /// The server may no longer use the volume on behalf of this client, because others may have
    /// taken over. The client may use another path, or connect again.
    #[error("fenced")]
    Fenced,
}
