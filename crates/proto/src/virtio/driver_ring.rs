//! The driver's side of a split virtqueue (virtio 1.2, section 2.7).

use super::virtqueue::{Buffer, RingAreas};
use super::wire::ring::{
    AVAIL_ELEMENT, Desc, RING_ELEMENTS, RING_FLAGS, RING_IDX, USED_ELEMENT, VIRTQ_AVAIL_F_NO_INTERRUPT,
    VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, VIRTQ_USED_F_NO_NOTIFY, avail_ring_len,
    desc_table_len, used_ring_len,
};
use blockmux_volume::Seg;
use std::sync::atomic::{Ordering, fence};
use zerocopy::IntoBytes;

/// A virtqueue as its driver sees it. The driver chooses descriptors itself: one that is available
/// must not be used again until the device has returned it.
pub(super) struct DriverRing {
    areas: RingAreas,
    size: u16,
    has_event_idx: bool,
    /// `idx` of the available ring.
    avail_idx: u16,
    /// `idx` of the available ring when the device was last notified.
    notified_idx: u16,
    /// The next element of the used ring.
    next_used: u16,
    /// Whether the device is asked for notifications.
    wants_calls: bool,
}

impl DriverRing {
    /// A queue of `size`, a power of two, in memory of [`ring_len`] bytes that is aligned to 16;
    /// the memory is cleared.
    pub(super) fn new(memory: &Seg, size: u16, has_event_idx: bool) -> DriverRing {
        memory.fill_zero();
        let areas = ring_areas(memory, size);
        DriverRing {
            areas,
            size,
            has_event_idx,
            avail_idx: 0,
            notified_idx: 0,
            next_used: 0,
            wants_calls: true,
        }
    }

    /// Writes a chain to consecutive descriptors.
    pub(super) fn write_chain(&self, first: u16, buffers: &[Buffer]) {
        write_descs(&self.areas.desc, first, buffers);
    }

    /// Writes a descriptor of the table of descriptors of `len` bytes at `addr`.
    pub(super) fn write_indirect(&self, at: u16, addr: u64, len: u32) {
        let desc =
            Desc { addr: addr.into(), len: len.into(), flags: VIRTQ_DESC_F_INDIRECT.into(), next: 0.into() };
        write_desc(&self.areas.desc, at, &desc);
    }

    /// Makes a chain available after the next [`DriverRing::publish`].
    #[inline]
    pub(super) fn push(&mut self, head: u16) {
        let at = usize::from(self.avail_idx & self.size.wrapping_sub(1)).wrapping_mul(AVAIL_ELEMENT);
        self.areas.avail.store_u16(RING_ELEMENTS.wrapping_add(at), head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// Shows chains to the device; returns whether it wants a notification.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.notified_idx, self.avail_idx);
        self.notified_idx = new;
        if old == new {
            return false;
        }
        self.areas.avail.store_u16(RING_IDX, new);
        fence(Ordering::SeqCst);
        if !self.has_event_idx {
            return self.areas.used.load_u16(RING_FLAGS) & VIRTQ_USED_F_NO_NOTIFY == 0;
        }
        let at = RING_ELEMENTS.wrapping_add(usize::from(self.size).wrapping_mul(USED_ELEMENT));
        let event = self.areas.used.load_u16(at);
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// The next chain that the device has returned: its first descriptor and the number of bytes
    /// written, as the device says.
    #[inline]
    pub(super) fn pop_used(&mut self) -> Option<(u32, u32)> {
        if self.areas.used.load_u16(RING_IDX) == self.next_used {
            return None;
        }
        let at = usize::from(self.next_used & self.size.wrapping_sub(1)).wrapping_mul(USED_ELEMENT);
        let at = RING_ELEMENTS.wrapping_add(at);
        self.next_used = self.next_used.wrapping_add(1);
        Some((self.areas.used.load_u32(at), self.areas.used.load_u32(at.wrapping_add(4))))
    }

    /// Tells the device that the driver looks at the ring itself.
    #[inline]
    pub(super) fn suppress_calls(&mut self) {
        if std::mem::replace(&mut self.wants_calls, false) {
            if self.has_event_idx {
                // The device reaches that index last.
                self.areas.avail.store_u16(self.used_event(), self.next_used.wrapping_sub(1));
            } else {
                self.areas.avail.store_u16(RING_FLAGS, VIRTQ_AVAIL_F_NO_INTERRUPT);
            }
        }
    }

    fn used_event(&self) -> usize {
        RING_ELEMENTS.wrapping_add(usize::from(self.size).wrapping_mul(AVAIL_ELEMENT))
    }

    /// Asks the device for a notification of the next chain that it returns; returns whether one is
    /// there already.
    pub(super) fn ask_for_calls(&mut self) -> bool {
        self.wants_calls = true;
        if self.has_event_idx {
            self.areas.avail.store_u16(self.used_event(), self.next_used);
        } else {
            self.areas.avail.store_u16(RING_FLAGS, 0);
        }
        fence(Ordering::SeqCst);
        self.areas.used.load_u16(RING_IDX) != self.next_used
    }
}

/// Writes a chain to consecutive descriptors of a table.
pub(super) fn write_descs(table: &Seg, first: u16, buffers: &[Buffer]) {
    let mut index = first;
    let mut left = buffers.len();
    for buffer in buffers {
        left = left.saturating_sub(1);
        let next = if left > 0 { VIRTQ_DESC_F_NEXT } else { 0 };
        let written = if buffer.is_written { VIRTQ_DESC_F_WRITE } else { 0 };
        let following = index.wrapping_add(1);
        let desc = Desc {
            addr: buffer.addr.into(),
            len: buffer.len.into(),
            flags: (next | written).into(),
            next: following.into(),
        };
        write_desc(table, index, &desc);
        index = following;
    }
}

fn write_desc(table: &Seg, index: u16, desc: &Desc) {
    let at = usize::from(index).wrapping_mul(size_of::<Desc>());
    table.slice(at, size_of::<Desc>()).copy_from(desc.as_bytes());
}

/// The areas of a queue in memory of [`ring_len`] bytes.
pub(super) fn ring_areas(memory: &Seg, size: u16) -> RingAreas {
    let (avail, used) = ring_offsets(size);
    RingAreas {
        desc: memory.slice(0, desc_table_len(size)),
        avail: memory.slice(avail, avail_ring_len(size)),
        used: memory.slice(used, used_ring_len(size)),
    }
}

/// Offsets of the available and the used ring behind the descriptor table.
pub(super) fn ring_offsets(size: u16) -> (usize, usize) {
    let avail = desc_table_len(size);
    (avail, avail.saturating_add(avail_ring_len(size)).next_multiple_of(64))
}

/// Length of a queue of `size` in bytes.
pub(super) fn ring_len(size: u16) -> usize {
    ring_offsets(size).1.saturating_add(used_ring_len(size)).next_multiple_of(64)
}
