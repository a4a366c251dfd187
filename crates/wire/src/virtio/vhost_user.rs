//! vhost-user (`docs/interop/vhost-user.rst` of QEMU): messages between a front end, which has the
//! guest's memory and virtqueues, and a back end, which serves them.
//!
//! A message is a [`MessageHeader`] and a payload; file descriptors travel beside it (SCM_RIGHTS).
//! Numbers have the machine's own byte order.

use crate::layout::native_layout;
use crate::open_enum::open_enum;

native_layout! {
    /// The start of a message.
    pub struct MessageHeader(12) {
        /// A [`FrontendRequest`] or a [`BackendRequest`].
        pub request: u32,
        /// The version in the lowest 2 bits, [`MESSAGE_F_REPLY`] and [`MESSAGE_F_NEED_REPLY`].
        pub flags: u32,
        /// Length of the payload in bytes.
        pub size: u32,
    }
}

/// The version of the protocol.
pub const MESSAGE_VERSION: u32 = 1;
/// Bits of the version in the flags.
pub const MESSAGE_VERSION_MASK: u32 = 3;
/// The message is a reply.
pub const MESSAGE_F_REPLY: u32 = 1 << 2;
/// The sender wants a reply, also to a request that has none of its own.
pub const MESSAGE_F_NEED_REPLY: u32 = 1 << 3;

open_enum! {
    /// Requests of the front end (`VHOST_USER_*`).
    pub enum FrontendRequest(u32) {
        /// The features that the back end offers.
        GET_FEATURES = 1,
        /// The features that the guest's driver has accepted.
        SET_FEATURES = 2,
        /// A session begins.
        SET_OWNER = 3,
        /// Deprecated: the session ends.
        RESET_OWNER = 4,
        /// The guest's memory.
        SET_MEM_TABLE = 5,
        /// Memory in which the back end logs what it writes, for migration.
        SET_LOG_BASE = 6,
        /// A descriptor that tells of writes to the log.
        SET_LOG_FD = 7,
        /// The size of a virtqueue.
        SET_VRING_NUM = 8,
        /// Where a virtqueue is.
        SET_VRING_ADDR = 9,
        /// The index at which a virtqueue continues.
        SET_VRING_BASE = 10,
        /// Stops a virtqueue; the reply has the index at which it will continue.
        GET_VRING_BASE = 11,
        /// The event descriptor of notifications to the device.
        SET_VRING_KICK = 12,
        /// The event descriptor of notifications to the driver.
        SET_VRING_CALL = 13,
        /// The event descriptor of errors.
        SET_VRING_ERR = 14,
        /// The [`ProtocolFeatures`] that the back end has.
        GET_PROTOCOL_FEATURES = 15,
        /// Those that are used.
        SET_PROTOCOL_FEATURES = 16,
        /// The largest number of virtqueues.
        GET_QUEUE_NUM = 17,
        /// Enables or disables a virtqueue.
        SET_VRING_ENABLE = 18,
        /// The socket for requests of the back end.
        SET_BACKEND_REQ_FD = 21,
        /// Reads the configuration space.
        GET_CONFIG = 24,
        /// Writes the configuration space.
        SET_CONFIG = 25,
        /// New memory that records requests in flight.
        GET_INFLIGHT_FD = 31,
        /// The memory that records requests in flight.
        SET_INFLIGHT_FD = 32,
        /// Resets the device.
        RESET_DEVICE = 34,
        /// The largest number of memory regions.
        GET_MAX_MEM_SLOTS = 36,
        /// Adds a memory region.
        ADD_MEM_REG = 37,
        /// Removes a memory region.
        REM_MEM_REG = 38,
    }

    /// Requests of the back end (`VHOST_USER_BACKEND_*`).
    pub enum BackendRequest(u32) {
        /// The configuration space has changed.
        CONFIG_CHANGE_MSG = 2,
    }
}

bitflags::bitflags! {
    /// Parts of the protocol that both sides must have (`VHOST_USER_PROTOCOL_F_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ProtocolFeatures: u64 {
        /// Several virtqueues.
        const MQ = 1 << 0;
        /// Replies to requests that have none of their own.
        const REPLY_ACK = 1 << 3;
        /// Requests of the back end.
        const BACKEND_REQ = 1 << 5;
        /// The configuration space.
        const CONFIG = 1 << 9;
        /// Memory that records requests in flight.
        const INFLIGHT_SHMFD = 1 << 12;
        /// Resets.
        const RESET_DEVICE = 1 << 13;
        /// Memory regions are added and removed one by one.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
    }
}

native_layout! {
    /// A region of the guest's memory (`VhostUserMemoryRegion`).
    pub struct MemoryRegion(32) {
        /// The guest's address.
        pub guest_addr: u64,
        /// Length in bytes.
        pub size: u64,
        /// The front end's own address.
        pub user_addr: u64,
        /// Offset in the file.
        pub mmap_offset: u64,
    }

    /// The start of a memory table; [`MemoryRegion`]s follow.
    pub struct MemoryTableHeader(8) {
        /// Number of regions.
        pub num_regions: u32,
        pub padding: u32 = 0,
    }

    /// A region that is added or removed alone.
    pub struct SingleMemoryRegion(40) {
        pub padding: u64 = 0,
        /// The region.
        pub region: MemoryRegion,
    }

    /// A number of a virtqueue.
    pub struct VringState(8) {
        /// The virtqueue.
        pub index: u32,
        /// Its size, its next index, or whether it is enabled.
        pub num: u32,
    }

    /// Where a virtqueue is, in the front end's own addresses.
    pub struct VringAddr(40) {
        /// The virtqueue.
        pub index: u32,
        /// Whether writes to the used ring are logged.
        pub flags: u32,
        /// The descriptor table.
        pub descriptor: u64,
        /// The used ring.
        pub used: u64,
        /// The available ring.
        pub available: u64,
        /// Where writes to the used ring are logged.
        pub log: u64,
    }
}

/// In the number beside an event descriptor: there is none.
pub const VRING_NOFD: u64 = 1 << 8;
/// Bits of the virtqueue in that number.
pub const VRING_INDEX_MASK: u64 = 0xff;

native_layout! {
    /// The start of an access to the configuration space; its bytes follow.
    pub struct ConfigHeader(12) {
        /// Offset in bytes.
        pub offset: u32,
        /// Length in bytes.
        pub size: u32,
        /// Whether the write is part of a migration.
        pub flags: u32,
    }
}

/// Length of the longest access to the configuration space.
pub const MAX_CONFIG_LEN: usize = 256;

native_layout! {
    /// Memory that records requests in flight (`VhostUserInflight`).
    pub struct Inflight(24) {
        /// Length in bytes.
        pub mmap_size: u64,
        /// Offset in the file.
        pub mmap_offset: u64,
        /// Number of virtqueues.
        pub num_queues: u16,
        /// Size of each.
        pub queue_size: u16,
        /// Padding: 0.
        pub padding: u32,
    }
}

/// Length of [`Inflight`] in messages of front ends that pack it.
pub const INFLIGHT_PACKED_LEN: usize = 20;

/// The start of a virtqueue's record of requests in flight (`QueueRegionSplit`), by offsets.
pub mod inflight_region {
    /// Feature flags: 0.
    pub const FEATURES: usize = 0;
    /// [`CURRENT_VERSION`]; 0 if the record was not begun.
    pub const VERSION: usize = 8;
    /// Number of entries, which is the size of the virtqueue.
    pub const DESC_NUM: usize = 10;
    /// The first entry of the last batch.
    pub const LAST_BATCH_HEAD: usize = 12;
    /// The index of the used ring.
    pub const USED_IDX: usize = 14;
    /// The first entry.
    pub const ENTRIES: usize = 16;
    /// Length of an entry (`DescStateSplit`).
    pub const ENTRY: usize = 16;
    /// In an entry: whether it is in flight.
    pub const ENTRY_INFLIGHT: usize = 0;
    /// In an entry: the next one of its batch.
    pub const ENTRY_NEXT: usize = 6;
    /// In an entry: when it was fetched.
    pub const ENTRY_COUNTER: usize = 8;
    /// The version of this layout.
    pub const CURRENT_VERSION: u16 = 1;
    /// Alignment of each virtqueue's record.
    pub const ALIGNMENT: usize = 64;

    /// Length of a virtqueue's record in bytes.
    #[must_use]
    pub const fn len(queue_size: u16) -> usize {
        (ENTRIES + queue_size as usize * ENTRY).next_multiple_of(ALIGNMENT)
    }
}

/// Number of memory regions of a table.
pub const MAX_TABLE_REGIONS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_layout_of_the_specification() {
        let header = MessageHeader { request: FrontendRequest::SET_VRING_ADDR.0, flags: 9, size: 40 };
        assert_eq!(header.flags & MESSAGE_VERSION_MASK, MESSAGE_VERSION);
        assert_eq!(core::mem::offset_of!(VringAddr, available), 24);
        assert_eq!(core::mem::offset_of!(Inflight, queue_size), 18);
        assert_eq!(inflight_region::len(128), 2112);
    }
}
