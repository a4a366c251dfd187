//! Disks of virtual machines: volumes as virtio block devices, by vhost-user.
//!
//! A front end (QEMU, cloud-hypervisor, SPDK) connects to a Unix socket, hands over descriptors of
//! the guest's memory, and says where its virtqueues are. From then on the guest and the queues'
//! tasks talk through that memory, and the socket is only used for changes.
//!
//! ```text
//!   front end ══socket══▶ FrontEndSession ──starts, changes, stops──▶ QueueState, for each queue
//!       guest ═══════════ virtqueues in shared memory ══════════▶ BlkQueue ──▶ Channels ──▶ volume
//! ```
//! The thread of the socket may block; tasks never do. The guest is not trusted. The front end is
//! trusted with the volume, but not with this process: it owns the files of the memory.

mod disk;
mod held_connection;
mod message_socket;
mod queue_task;
mod session;
mod shared;
mod unnotified;
mod vring;

pub use disk::VhostUserDisk;
