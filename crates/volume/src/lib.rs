//! What a volume is: the only thing that targets, attachments and the lab know of storage.
//!
//! A [`Volume`] is shared by all cores; each core opens its own [`Channel`] to it, submits [`Io`] there and
//! collects exactly one [`Completion`] for each. An initiator is a volume, and so is a stripe of volumes or a
//! volume with a fault injected: whatever uses volumes works with all of them.
//!
//! This crate makes no operating-system calls; unsafe code is in [`buf`] alone.

pub mod buf;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod io;
mod mem;
mod null;
mod pool;
mod ready;
mod volume;

pub use buf::{Chunk, Memory, Pages, Seg, SgList};
pub use io::{Completion, Extent, Io, IoError, Op, Output, Tag};
pub use mem::MemVolume;
pub use null::NullVolume;
pub use pool::Pool;
pub use ready::{ReadyList, Waker};
pub use volume::{Channel, Core, MAX_TRANSFER, Volume, VolumeInfo};
