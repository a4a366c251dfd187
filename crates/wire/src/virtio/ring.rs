//! Split virtqueues (section 2.7): a descriptor table, an available ring that the driver writes,
//! and a used ring that the device writes, all in memory that both share.
//!
//! ```text
//!   descriptor table   size × 16 bytes
//!   available ring     flags, idx, ring[size], used_event       2 bytes each
//!   used ring          flags, idx 2 bytes each, ring[size] 8 bytes each, avail_event 2 bytes
//! ```

use crate::layout::native_layout;
use zerocopy::little_endian::{U16, U32, U64};

native_layout! {
    /// A descriptor (`struct virtq_desc`).
    pub struct Desc(16) {
        /// Guest address of the buffer.
        pub addr: U64,
        /// Length of the buffer in bytes.
        pub len: U32,
        /// `VIRTQ_DESC_F_*`.
        pub flags: U16,
        /// The next descriptor of the chain.
        pub next: U16,
    }
}

impl Desc {
    /// Whether a flag is set.
    #[must_use]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags.get() & flag != 0
    }
}

/// The chain goes on at `next`.
pub const VIRTQ_DESC_F_NEXT: u16 = 1;
/// The device writes the buffer; otherwise it reads it.
pub const VIRTQ_DESC_F_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const VIRTQ_DESC_F_INDIRECT: u16 = 4;

/// In the flags of the available ring: the driver wants no notifications.
pub const VIRTQ_AVAIL_F_NO_INTERRUPT: u16 = 1;
/// In the flags of the used ring: the device wants no notifications.
pub const VIRTQ_USED_F_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in either ring.
pub const RING_FLAGS: usize = 0;
/// Offset of `idx` in either ring.
pub const RING_IDX: usize = 2;
/// Offset of the first element in either ring.
pub const RING_ELEMENTS: usize = 4;
/// Length of an element of the available ring.
pub const AVAIL_ELEMENT: usize = 2;
/// Length of an element of the used ring: index and length, 4 bytes each.
pub const USED_ELEMENT: usize = 8;

/// Length of the descriptor table in bytes.
#[must_use]
pub const fn desc_table_len(size: u16) -> usize {
    size as usize * size_of::<Desc>()
}

/// Length of the available ring in bytes, with `used_event`.
#[must_use]
pub const fn avail_ring_len(size: u16) -> usize {
    RING_ELEMENTS + size as usize * AVAIL_ELEMENT + 2
}

/// Length of the used ring in bytes, with `avail_event`.
#[must_use]
pub const fn used_ring_len(size: u16) -> usize {
    RING_ELEMENTS + size as usize * USED_ELEMENT + 2
}

/// Largest size of a split virtqueue.
pub const MAX_QUEUE_SIZE: u16 = 32_768;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn areas_have_the_lengths_of_the_standard() {
        // Section 2.7: 16 × size, 6 + 2 × size, 6 + 8 × size.
        assert_eq!((desc_table_len(256), avail_ring_len(256), used_ring_len(256)), (4096, 518, 2054));
    }

    #[test]
    fn a_descriptor_has_the_layout_of_the_standard() {
        let desc = Desc { addr: 0x1122.into(), len: 512.into(), flags: 3.into(), next: 7.into() };
        let bytes = [0x22, 0x11, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 3, 0, 7, 0];
        assert_eq!(desc.as_bytes(), bytes);
        assert!(
            desc.has(VIRTQ_DESC_F_NEXT) && desc.has(VIRTQ_DESC_F_WRITE) && !desc.has(VIRTQ_DESC_F_INDIRECT)
        );
    }
}
