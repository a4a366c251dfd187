//! A guest's memory, as one core sees it.

use blockmux_volume::{Memory, Seg};

/// A region of the guest's memory.
pub struct GuestRegion {
    /// The guest's address.
    pub guest_addr: u64,
    /// The front end's address.
    pub user_addr: u64,
    /// The memory.
    pub memory: Memory,
}

/// The regions of a guest's memory.
#[derive(Default)]
pub struct GuestMemory {
    regions: Vec<GuestRegion>,
}

impl GuestMemory {
    /// Memory of these regions.
    #[must_use]
    pub fn new(regions: Vec<GuestRegion>) -> GuestMemory {
        GuestMemory { regions }
    }

    /// The first part of the range at a guest's address that is in one region: the whole range,
    /// unless it continues in a region that follows. `None` if the address is in no region, or
    /// `len` is 0.
    #[inline]
    #[must_use]
    pub fn first_part(&self, addr: u64, len: u32) -> Option<Seg> {
        self.regions.iter().find_map(|region| first_part(&region.memory, region.guest_addr, addr, len))
    }

    /// The range at a front end's address; `None` if it is not within one region.
    #[must_use]
    pub fn of_user(&self, addr: u64, len: usize) -> Option<Seg> {
        let len = u32::try_from(len).ok()?;
        let part = |region: &GuestRegion| first_part(&region.memory, region.user_addr, addr, len);
        self.regions.iter().find_map(part).filter(|part| part.len() == len as usize)
    }
}

/// The part of the range `addr`, `len` that is in memory at `base`, if that has the first byte.
#[inline]
fn first_part(memory: &Memory, base: u64, addr: u64, len: u32) -> Option<Seg> {
    let offset = usize::try_from(addr.checked_sub(base)?).ok()?;
    let rest = memory.len().checked_sub(offset)?;
    let len = rest.min(len as usize);
    (len > 0).then(|| memory.seg(offset, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        let region = |guest_addr, user_addr| {
            let memory = Memory::from_heap(4096);
            memory.seg(0, 8).copy_from(&u64::to_le_bytes(guest_addr));
            GuestRegion { guest_addr, user_addr, memory }
        };
        GuestMemory::new(vec![region(0, 0x7000_0000), region(4096, 0x9000_0000), region(u64::MAX - 4095, 0)])
    }

    #[test]
    fn an_address_is_looked_up_in_all_regions() {
        let memory = memory();
        assert_eq!(memory.first_part(4096, 8).unwrap().load_u64(0), 4096);
        assert_eq!(memory.of_user(0x9000_0000, 8).unwrap().load_u64(0), 4096);
        assert!(memory.first_part(8192, 1).is_none() && memory.of_user(4096, 1).is_none());
        assert!(memory.first_part(0, 0).is_none());
    }

    #[test]
    fn a_range_ends_with_its_region() {
        let memory = memory();
        assert_eq!(memory.first_part(4000, 4096).unwrap().len(), 96);
        assert_eq!(memory.first_part(u64::MAX, u32::MAX).unwrap().len(), 1);
        assert!(memory.of_user(0x7000_0000, 4097).is_none());
        assert_eq!(memory.of_user(0x7000_0000, 4096).unwrap().len(), 4096);
    }
}
