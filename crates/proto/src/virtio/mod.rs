//! virtio block devices whose virtqueues are in a guest's memory, without I/O of its own.
//!
//! [`BlkQueue`] is one queue of a device: the source of the I/O that a guest requests there. It is
//! one more client of the volume. The guest is not trusted: it may change its memory at any time,
//! so every word is read once, every address is checked against the regions of [`GuestMemory`], and
//! every chain is bounded. A queue whose rings make no sense stops and says so; a request that
//! makes no sense fails.
//!
//! ```text
//!   available ring ──▶ Virtqueue ──chain──▶ BlkQueue ──poll_io──▶ volume ──on_io──▶ used ring
//!                                              └── InflightRecord: what a next process goes on with
//! ```

mod blk_driver;
mod blk_queue;
mod config;
mod driver_ring;
mod inflight;
mod memory;
mod message;
mod virtqueue;

pub use blk_driver::{BlkDriver, RemoteDisk, RemoteDiskError};
pub use blk_queue::{BlkQueue, DeviceState, Notify};
pub use blockmux_wire::virtio as wire;
pub use config::{BlkDevice, MAX_SEGMENTS};
pub use inflight::InflightRecord;
pub use memory::{GuestMemory, GuestRegion};
pub use message::{
    FrontendMessage, MAX_PAYLOAD, MAX_QUEUES, MAX_REGIONS, MAX_SIZE, MessageError, VringFd, inflight_len,
    message, message_header,
};
pub use virtqueue::{RingAreas, RingError};
