//! virtio 1.2: split virtqueues, block devices, and vhost-user, by which a front end (a hypervisor)
//! shares its virtqueues with a back end.
//!
//! Numbers of virtio are little-endian; those of vhost-user have the machine's own byte order.

pub mod blk;
pub mod ring;
pub mod vhost_user;

bitflags::bitflags! {
    /// Features that a device offers and a driver accepts: of all devices, and of block devices
    /// (sections 5.2.3 and 6).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// `seg_max` is valid.
        const BLK_SEG_MAX = 1 << 2;
        /// The device refuses writes.
        const BLK_RO = 1 << 5;
        /// `blk_size` is valid.
        const BLK_BLK_SIZE = 1 << 6;
        /// The device has a write cache, and flushes it on request.
        const BLK_FLUSH = 1 << 9;
        /// The topology is valid.
        const BLK_TOPOLOGY = 1 << 10;
        /// The device has `num_queues` queues.
        const BLK_MQ = 1 << 12;
        /// The device takes discards.
        const BLK_DISCARD = 1 << 13;
        /// The device takes write zeroes.
        const BLK_WRITE_ZEROES = 1 << 14;
        /// A descriptor may name a table of descriptors.
        const RING_INDIRECT_DESC = 1 << 28;
        /// Each side says at which index it wants to be notified.
        const RING_EVENT_IDX = 1 << 29;
        /// Of vhost-user, not of a device: the back end has protocol features.
        const VHOST_USER_PROTOCOL_FEATURES = 1 << 30;
        /// The device follows version 1 of the standard.
        const VERSION_1 = 1 << 32;
    }
}
