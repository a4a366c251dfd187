//! Volumes: the interface to storage that targets, commands and the lab use.
//!
//! All cores share a [`Volume`]; each core opens its own [`Channel`] to it, submits [`Io`] and
//! collects exactly one [`Completion`] for each. An initiator is a volume, and so is a stripe of
//! volumes or a volume with an injected fault: they are interchangeable.
//!
//! | kind | data is in | type | a flush | grows, shrinks |
//! |---|---|---|---|---|
//! | `mem:` | pages of this process | [`MemVolume`] | nothing to do | yes |
//! | `null:` | nowhere | [`NullVolume`] | nothing to do | no |
//! | `file:` | a file | `FileVolume` of the engine | fsync | yes |
//! | `block:` | a block device | `FileVolume` of the engine | fsync | follows the device |
//! | `slice:` | a part of another volume | [`SliceVolume`] | the volume's | within it |
//! | `stripe:` | chunks of other volumes | [`StripeVolume`] | each member's | no |
//! | `delay:`, `fault:`, `rate:`, `log:` | the volume below | [`DelayVolume`], [`FaultVolume`], [`RateVolume`], [`LogVolume`] | the volume's | with it |
//! | `vhost-user:` | a back end | `VhostUserVolume` of the engine | the back end's | follows it |
//! | `rbd:` | an image of Ceph RBD | `RbdVolume` of the engine | the image's cache, if it has one | yes, and follows it |
//! | a URL | another server | `RemoteVolume`, `AoeVolume` of the engine | the protocol's | follows the server |
//!
//! This crate makes no operating-system calls; unsafe code is in [`buf`] alone.

mod account;
mod block_sizes;
pub mod buf;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod crc32c;
mod delay;
mod fault;
mod io;
mod kind;
mod limiter;
mod log;
mod mem;
mod null;
mod pool;
pub mod random;
mod rate;
mod ready;
mod registration;
mod sg_list;
mod slab;
mod slice;
mod snapshots;
pub mod spec;
mod stripe;
pub mod text;
mod throttle;
pub mod units;
mod volume;

pub use account::{PeerAccount, peer_network};
pub use block_sizes::{BlockSizes, SmallBlock};
pub use buf::{Chunk, Memory, Pages, RegisteredPart, Seg};
pub use crc32c::Crc32c;
pub use delay::{DelayVolume, Delays};
pub use fault::{Fault, FaultEffect, FaultVolume, FaultWhen};
pub use io::{Completion, Extent, Io, IoError, Op, Output, Tag};
pub use kind::{OpKind, OpSet};
pub use limiter::{BURSTS, Cost, DEFAULT_BURST, Limit, Limiter, Limits, VolumeLimits};
pub use log::{LogEvent, LogRecord, LogSink, LogVolume};
pub use mem::MemVolume;
pub use null::NullVolume;
pub use pool::{Pool, SHORT_PAYLOAD, bytes_from_system};
pub use rate::RateVolume;
pub use ready::{ReadyList, Waker};
pub use registration::{LocalKey, ProtectionDomain, RegistrationError};
pub use sg_list::SgList;
pub use slab::Slab;
pub use slice::{SliceError, SliceVolume};
pub use snapshots::{SnapshotError, SnapshotInfo, Snapshots};
pub use spec::{Spec, SpecError};
pub use stripe::{DEFAULT_CHUNK, MAX_MEMBERS, StripeError, StripeVolume, range_on_member};
pub use throttle::Throttle;
pub use volume::{
    Beyond, Channel, Core, LinkCounts, MAX_TRANSFER, MemoryAlignment, Populated, Resize, ResizeError, Volume,
    VolumeInfo,
};
