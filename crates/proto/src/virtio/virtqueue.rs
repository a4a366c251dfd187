//! The device's side of a split virtqueue (virtio 1.2, section 2.7).

use super::memory::GuestMemory;
use blockmux_volume::Seg;
use blockmux_wire::virtio::ring::{
    AVAIL_ELEMENT, Desc, RING_ELEMENTS, RING_FLAGS, RING_IDX, USED_ELEMENT, VIRTQ_AVAIL_F_NO_INTERRUPT,
    VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, VIRTQ_USED_F_NO_NOTIFY, avail_ring_len,
    desc_table_len, used_ring_len,
};
use std::sync::atomic::{Ordering, fence};

/// Where a virtqueue is.
#[derive(Clone)]
pub struct RingAreas {
    /// The descriptor table.
    pub desc: Seg,
    /// The available ring.
    pub avail: Seg,
    /// The used ring.
    pub used: Seg,
}

impl RingAreas {
    /// The areas of a queue of `size` at these addresses of the front end.
    ///
    /// # Errors
    /// If the size is not a power of two, an area is not in the memory, or it is misaligned.
    pub fn of_user(
        memory: &GuestMemory,
        size: u16,
        (desc, avail, used): (u64, u64, u64),
    ) -> Result<RingAreas, RingError> {
        if !size.is_power_of_two() {
            return Err(RingError::Size(size));
        }
        let area = |addr, len, align| {
            let area = memory.of_user(addr, len).filter(|area| area.is_aligned_to(align));
            area.ok_or(RingError::Area(addr))
        };
        Ok(RingAreas {
            desc: area(desc, desc_table_len(size), 16)?,
            avail: area(avail, avail_ring_len(size), 2)?,
            used: area(used, used_ring_len(size), 4)?,
        })
    }
}

/// Why a virtqueue makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Its size is not a power of two.
    #[error("its size, {0}, is not a power of two")]
    Size(u16),
    /// An area is not in the guest's memory, or is misaligned.
    #[error("the address {0:#x} is not in the guest's memory, or is misaligned")]
    Area(u64),
    /// The driver has made more descriptors available than there are.
    #[error("{0} descriptors are available, more than it has")]
    TooManyAvailable(u16),
    /// A descriptor does not exist.
    #[error("there is no descriptor {0}")]
    NoDescriptor(u16),
    /// A descriptor is available that the device has not returned.
    #[error("descriptor {0} is available twice")]
    Twice(u16),
    /// A chain is longer than the queue allows, or has a cycle.
    #[error("a chain has more than {0} descriptors")]
    LongChain(u32),
    /// A table of descriptors makes no sense.
    #[error("an indirect table of {0} bytes is not in the guest's memory, or makes no sense")]
    BadTable(u32),
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buffer {
    /// The guest's address.
    pub(super) addr: u64,
    /// Length in bytes.
    pub(super) len: u32,
    /// The device writes it; otherwise it reads it.
    pub(super) is_written: bool,
}

/// A virtqueue.
pub(super) struct Virtqueue {
    areas: RingAreas,
    size: u16,
    has_event_idx: bool,
    /// The next element of the available ring.
    next_avail: u16,
    /// `idx` of the available ring when it was last read.
    avail_idx: u16,
    /// The next element of the used ring.
    next_used: u16,
    /// `idx` of the used ring.
    used_idx: u16,
    /// Whether the driver is asked for notifications.
    wants_kicks: bool,
}

impl Virtqueue {
    /// A queue of `size`, a power of two, that continues at `next_avail`. It asks for
    /// notifications.
    pub(super) fn new(areas: RingAreas, size: u16, next_avail: u16, has_event_idx: bool) -> Virtqueue {
        let used_idx = areas.used.load_u16(RING_IDX);
        let mut queue = Virtqueue {
            areas,
            size,
            has_event_idx,
            next_avail,
            avail_idx: next_avail,
            next_used: used_idx,
            used_idx,
            wants_kicks: false,
        };
        queue.ask_for_kicks();
        queue
    }

    /// The size.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// The areas are mapped elsewhere.
    pub(super) fn set_areas(&mut self, areas: RingAreas) {
        self.areas = areas;
    }

    /// The index at which the available ring continues.
    pub(super) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// `idx` of the used ring.
    pub(super) fn used_idx(&self) -> u16 {
        self.used_idx
    }

    /// The first descriptor of the next chain; `None` if none is available.
    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<u16>, RingError> {
        if self.next_avail == self.avail_idx {
            self.avail_idx = self.areas.avail.load_u16(RING_IDX);
            let available = self.avail_idx.wrapping_sub(self.next_avail);
            if available == 0 {
                return Ok(None);
            }
            if available > self.size {
                self.avail_idx = self.next_avail;
                return Err(RingError::TooManyAvailable(available));
            }
        }
        let at = RING_ELEMENTS.wrapping_add(self.slot(self.next_avail).wrapping_mul(AVAIL_ELEMENT));
        let head = self.areas.avail.load_u16(at);
        if head >= self.size {
            return Err(RingError::NoDescriptor(head));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Passes each buffer of a chain to `each`, and each only once, however long the chain is.
    #[inline]
    pub(super) fn walk(
        &self,
        memory: &GuestMemory,
        head: u16,
        mut each: impl FnMut(Buffer) -> Result<(), RingError>,
    ) -> Result<(), RingError> {
        let (table, mut index, mut left) = (&self.areas.desc, head, u32::from(self.size));
        loop {
            if index >= self.size {
                return Err(RingError::NoDescriptor(index));
            }
            let desc = load_desc(table, index);
            if desc.has(VIRTQ_DESC_F_INDIRECT) {
                return walk_table(memory, &desc, each);
            }
            each(buffer(&desc))?;
            left = left.saturating_sub(1);
            if !desc.has(VIRTQ_DESC_F_NEXT) {
                return Ok(());
            }
            if left == 0 {
                return Err(RingError::LongChain(self.size.into()));
            }
            index = desc.next.get();
        }
    }

    /// Returns a chain, in which `len` bytes were written. The driver sees it after
    /// [`Virtqueue::publish`].
    #[inline]
    pub(super) fn push_used(&mut self, head: u16, len: u32) {
        let at = RING_ELEMENTS.wrapping_add(self.slot(self.next_used).wrapping_mul(USED_ELEMENT));
        self.areas.used.store_u32(at, head.into());
        self.areas.used.store_u32(at.wrapping_add(4), len);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Shows returned chains to the driver; returns whether it wants a notification.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.used_idx, self.next_used);
        self.used_idx = new;
        self.areas.used.store_u16(RING_IDX, new);
        // The driver writes what it wants before it looks at the index.
        fence(Ordering::SeqCst);
        if !self.has_event_idx {
            return self.areas.avail.load_u16(RING_FLAGS) & VIRTQ_AVAIL_F_NO_INTERRUPT == 0;
        }
        let at = RING_ELEMENTS.wrapping_add(usize::from(self.size).wrapping_mul(AVAIL_ELEMENT));
        let event = self.areas.avail.load_u16(at);
        // Section 2.7.7.2: whether the index has passed the event.
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Asks the driver for a notification when it makes a chain available; returns whether one is
    /// available already, for which none may come.
    pub(super) fn ask_for_kicks(&mut self) -> bool {
        self.wants_kicks = true;
        if self.has_event_idx {
            self.areas.used.store_u16(self.avail_event(), self.next_avail);
        } else {
            self.areas.used.store_u16(RING_FLAGS, 0);
        }
        // The driver looks at what the device wants after it has written the index.
        fence(Ordering::SeqCst);
        self.areas.avail.load_u16(RING_IDX) != self.next_avail
    }

    /// Tells the driver that the device looks at the ring itself.
    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        if std::mem::replace(&mut self.wants_kicks, false) {
            if self.has_event_idx {
                // The driver reaches that index last.
                let passed = self.next_avail.wrapping_sub(1);
                self.areas.used.store_u16(self.avail_event(), passed);
            } else {
                self.areas.used.store_u16(RING_FLAGS, VIRTQ_USED_F_NO_NOTIFY);
            }
        }
    }

    fn avail_event(&self) -> usize {
        RING_ELEMENTS.wrapping_add(usize::from(self.size).wrapping_mul(USED_ELEMENT))
    }

    /// The element of either ring for an index.
    #[inline]
    fn slot(&self, index: u16) -> usize {
        usize::from(index & self.size.wrapping_sub(1))
    }
}

/// Passes the buffers of an indirect table, whose descriptors may be anywhere in it, to `each`.
#[inline]
fn walk_table(
    memory: &GuestMemory,
    desc: &Desc,
    mut each: impl FnMut(Buffer) -> Result<(), RingError>,
) -> Result<(), RingError> {
    let len = desc.len.get();
    let bad = RingError::BadTable(len);
    let count = len / DESC_LEN;
    let is_whole = len.is_multiple_of(DESC_LEN);
    if !is_whole || count == 0 || count > MAX_CHAIN || desc.has(VIRTQ_DESC_F_NEXT) {
        return Err(bad);
    }
    let table = memory.first_part(desc.addr.get(), len).filter(|table| table.len() == len as usize);
    let table = table.ok_or(bad)?;
    let mut index = 0_u16;
    for _ in 0..count {
        if u32::from(index) >= count {
            return Err(RingError::NoDescriptor(index));
        }
        let desc = load_desc(&table, index);
        if desc.has(VIRTQ_DESC_F_INDIRECT) {
            return Err(bad);
        }
        each(buffer(&desc))?;
        if !desc.has(VIRTQ_DESC_F_NEXT) {
            return Ok(());
        }
        index = desc.next.get();
    }
    Err(RingError::LongChain(count))
}

/// A copy of a descriptor, which is within the table.
#[inline]
fn load_desc(table: &Seg, index: u16) -> Desc {
    table.read_at(usize::from(index).wrapping_mul(size_of::<Desc>()))
}

#[inline]
fn buffer(desc: &Desc) -> Buffer {
    Buffer { addr: desc.addr.get(), len: desc.len.get(), is_written: desc.has(VIRTQ_DESC_F_WRITE) }
}

/// Largest number of descriptors of an indirect table: as many buffers as one call of the system
/// takes.
const MAX_CHAIN: u32 = 1024;
/// Length of a descriptor in bytes.
const DESC_LEN: u32 = size_of::<Desc>() as u32;
