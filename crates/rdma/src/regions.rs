//! Registered memory of one connection: its steering tags, its ranges, and the access rights of the
//! peer.
//!
//! Each connection has its own table, which is its protection domain: a steering tag of another
//! connection is invalid here. Tags and addresses are derived from a secret seed, so that they
//! reveal nothing about each other or about memory (RFC 5042), and a peer knows only those that it
//! was given.
//!
//! A tag is a random number whose low bits are its slot in a sparse table, so that a look-up is one
//! step. A tag whose slot is taken is drawn again. A tag is not reused before its slot has held
//! another one.

use crate::unpredictable::UnpredictableNumbers;
use blockmux_proto::rdma::{Remote, RemoteRights, Stag};
use blockmux_volume::{SgList, Slab};

/// Secret seed of a connection's steering tags: random bytes that no peer knows.
pub type Seed = [u8; 32];

/// Reason for refusing an access of the peer, in the terms of RFC 5040 (remote protection errors)
/// and RFC 5041 (tagged buffer errors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The steering tag is not valid, or no longer valid. This includes tags of another connection,
    /// which RFC 5040 calls "not associated".
    #[error("an invalid steering tag")]
    InvalidStag,
    /// The range is not within the registered memory.
    #[error("a base or bounds violation")]
    Bounds,
    /// The registration has other access rights.
    #[error("an access rights violation")]
    Access,
    /// The range exceeds the largest tagged offset.
    #[error("a tagged offset wrap")]
    Wrap,
    /// A Send with Invalidate names a tag that is not valid.
    #[error("a steering tag that cannot be invalidated")]
    CannotInvalidate,
}

/// Reason for refusing to register memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The maximum number of registrations exists already.
    #[error("too many registrations")]
    Full,
    /// The memory has 4 GiB or more.
    #[error("the memory has 4 GiB or more")]
    TooLong,
    /// Remote write access was requested for read-only memory.
    #[error("the memory is read-only")]
    ReadOnly,
}

/// The registrations of one connection.
///
/// A registration allocates nothing if as many registrations have existed before, except for lists
/// of several segments.
pub struct Regions {
    /// Indexed by the low bits of the tag. Empty until the first registration.
    slots: Vec<StagSlot>,
    regions: Slab<Region>,
    max: u32,
    random: UnpredictableNumbers,
}

#[derive(Clone, Copy)]
struct StagSlot {
    /// The last tag in this slot.
    stag: u32,
    /// Index into `regions`, or [`CLOSED`].
    region: u32,
}

struct Region {
    memory: SgList,
    address: u64,
    len: u32,
    access: RemoteRights,
}

impl Regions {
    /// Creates an empty table for at most `max` registrations at a time, and no more than
    /// [`MAX_REGIONS`].
    #[must_use]
    pub fn new(max: u32, seed: Seed) -> Regions {
        Regions {
            slots: Vec::new(),
            regions: Slab::default(),
            max: max.min(MAX_REGIONS),
            random: UnpredictableNumbers::new(seed),
        }
    }

    /// Number of registrations.
    #[must_use]
    pub fn open(&self) -> usize {
        self.regions.len()
    }

    /// Registers `memory` under a new tag and at a new address.
    ///
    /// # Errors
    /// If there are too many registrations, or the memory is too long or not writable.
    pub fn register(&mut self, mut memory: SgList, access: RemoteRights) -> Result<Remote, RegisterError> {
        self.take(&mut memory, access)
    }

    /// Registers `memory` and takes it out of the caller's list; on an error the list is unchanged.
    ///
    /// # Errors
    /// If there are too many registrations, or the memory is too long or not writable.
    pub fn take(&mut self, memory: &mut SgList, access: RemoteRights) -> Result<Remote, RegisterError> {
        if self.regions.len() >= self.max as usize {
            return Err(RegisterError::Full);
        }
        let len = u32::try_from(memory.len()).map_err(|_| RegisterError::TooLong)?;
        if access == RemoteRights::RemoteWrite && !memory.is_writable() {
            return Err(RegisterError::ReadOnly);
        }
        if self.slots.is_empty() {
            let slots = (self.max as usize).saturating_mul(SLOTS_PER_REGION).next_power_of_two();
            self.slots = vec![StagSlot { stag: 0, region: CLOSED }; slots];
        }
        let stag = self.draw();
        // A multiple of 4096 below 2^44: a 32-bit length cannot wrap it, and it looks like a page
        // address.
        let address = u64::from(self.random.next()) << 12;
        if let Some(slot) = slot(&mut self.slots, stag) {
            let region = Region { memory: std::mem::take(memory), address, len, access };
            // At most MAX_REGIONS.
            *slot = StagSlot { stag, region: self.regions.insert(region) as u32 };
        }
        Ok(Remote { stag: Stag(stag), address, len })
    }

    /// Invalidates a tag, and returns its memory if the tag was valid.
    #[inline]
    pub fn close(&mut self, stag: Stag) -> Option<SgList> {
        let slot = slot(&mut self.slots, stag.0).filter(|slot| slot.holds(stag))?;
        let region = std::mem::replace(&mut slot.region, CLOSED);
        self.regions.remove(region as usize).map(|was| was.memory)
    }

    /// Invalidates a tag for a Send with Invalidate of the peer.
    ///
    /// # Errors
    /// If the tag is not valid.
    #[inline]
    pub fn invalidate(&mut self, stag: Stag) -> Result<(), Refusal> {
        self.close(stag).map(|_| ()).ok_or(Refusal::CannotInvalidate)
    }

    /// Invalidates all tags.
    pub fn close_all(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.region = CLOSED);
        self.regions.clear();
    }

    /// The `len` bytes at `address` of the memory registered as `stag`, for an access of the peer.
    ///
    /// # Errors
    /// If the access was not granted. An empty range needs a grant too; a protocol that requires
    /// none does not call this.
    #[inline]
    pub fn look_up(
        &self,
        stag: Stag,
        address: u64,
        len: u32,
        access: RemoteRights,
    ) -> Result<SgList, Refusal> {
        let (region, offset) = self.check(stag, address, len, access)?;
        if offset == 0 && len == region.len {
            return Ok(region.memory.clone());
        }
        Ok(region.memory.slice(offset, len as usize))
    }

    /// Copies `bytes` to `address` of the memory registered as `stag`, for a write of the peer.
    ///
    /// # Errors
    /// If the write was not granted; nothing was copied then.
    #[inline]
    pub fn write(&self, stag: Stag, address: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let len = u32::try_from(bytes.len()).map_err(|_| Refusal::Bounds)?;
        let (region, offset) = self.check(stag, address, len, RemoteRights::RemoteWrite)?;
        match offset {
            0 => region.memory.copy_from(bytes),
            _ => region.memory.slice(offset, bytes.len()).copy_from(bytes),
        }
        Ok(())
    }

    /// Checks an access without returning the memory.
    ///
    /// # Errors
    /// If the access was not granted.
    #[inline]
    pub fn check_grant(
        &self,
        stag: Stag,
        address: u64,
        len: u32,
        access: RemoteRights,
    ) -> Result<(), Refusal> {
        self.check(stag, address, len, access).map(|_| ())
    }

    /// The registration, and the offset of the range in it.
    #[inline]
    fn check(
        &self,
        stag: Stag,
        address: u64,
        len: u32,
        access: RemoteRights,
    ) -> Result<(&Region, usize), Refusal> {
        let region = self
            .slots
            .get(slot_index(self.slots.len(), stag.0))
            .filter(|slot| slot.holds(stag))
            .and_then(|slot| self.regions.get(slot.region as usize))
            .ok_or(Refusal::InvalidStag)?;
        if region.access != access {
            return Err(Refusal::Access);
        }
        let end = address.checked_add(len.into()).ok_or(Refusal::Wrap)?;
        let offset = address.checked_sub(region.address).ok_or(Refusal::Bounds)?;
        // Addresses are below 2^44, so that adding a 32-bit length cannot wrap.
        if end > region.address.saturating_add(region.len.into()) {
            return Err(Refusal::Bounds);
        }
        let offset = usize::try_from(offset).map_err(|_| Refusal::Bounds)?;
        Ok((region, offset))
    }

    /// Draws a tag with a free slot, other than the last tag of that slot.
    fn draw(&mut self) -> u32 {
        loop {
            let stag = self.random.next();
            // Tag 0 is reserved in the verbs, and means "none" in some wire formats.
            let is_free = self
                .slots
                .get(slot_index(self.slots.len(), stag))
                .is_some_and(|slot| slot.region == CLOSED && slot.stag != stag);
            if is_free && stag != 0 {
                return stag;
            }
        }
    }
}

impl StagSlot {
    #[inline]
    fn holds(&self, stag: Stag) -> bool {
        self.stag == stag.0 && self.region != CLOSED
    }
}

#[inline]
fn slot_index(slots: usize, stag: u32) -> usize {
    stag as usize & slots.saturating_sub(1)
}

#[inline]
fn slot(slots: &mut [StagSlot], stag: u32) -> Option<&mut StagSlot> {
    let at = slot_index(slots.len(), stag);
    slots.get_mut(at)
}

/// Most registrations of one connection.
pub const MAX_REGIONS: u32 = 1 << 16;
/// The table is sparse, so that at least three of four draws find a free slot.
const SLOTS_PER_REGION: usize = 4;
/// Marks a slot without a registration.
const CLOSED: u32 = u32::MAX;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use blockmux_volume::Seg;
    use std::collections::HashSet;

    const SEED: Seed = [7; 32];

    fn memory(len: usize) -> SgList {
        let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        SgList::one(Seg::from_slice(&bytes))
    }

    fn pieces(lens: &[usize]) -> SgList {
        let whole = Seg::from_slice(&memory(lens.iter().sum()).to_vec());
        let starts = lens.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len)));
        starts.zip(lens).fold(SgList::default(), |mut list, (at, len)| {
            list.push(whole.slice(at, *len));
            list
        })
    }

    #[test]
    fn a_range_of_registered_memory_is_found_at_any_offset() {
        let mut regions = Regions::new(4, SEED);
        let remote = regions.register(pieces(&[3, 1, 60]), RemoteRights::RemoteRead).unwrap();
        assert_eq!(remote.len, 64);
        for (at, len) in [(0, 64), (0, 1), (2, 3), (4, 60), (63, 1), (64, 0), (0, 0)] {
            let found =
                regions.look_up(remote.stag, remote.address + at, len, RemoteRights::RemoteRead).unwrap();
            assert_eq!(found.to_vec(), (at..at + u64::from(len)).map(|at| at as u8).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_write_changes_its_range_and_nothing_else() {
        let mut regions = Regions::new(4, SEED);
        let list = pieces(&[3, 1, 60]);
        let remote = regions.register(list.clone(), RemoteRights::RemoteWrite).unwrap();
        let mut expected = list.to_vec();
        for (at, len) in [(0, 64), (0, 2), (2, 3), (40, 24), (64, 0)] {
            let bytes = vec![at as u8 | 0x80; len];
            regions.write(remote.stag, remote.address + at as u64, &bytes).unwrap();
            expected[at..at + len].copy_from_slice(&bytes);
            assert_eq!(list.to_vec(), expected, "{len} bytes at {at}");
        }
        for (at, len) in [(0, 65), (1, 64), (64, 1)] {
            let refused = regions.write(remote.stag, remote.address + at, &vec![0; len]);
            assert_eq!((refused, list.to_vec()), (Err(Refusal::Bounds), expected.clone()));
        }
        let read_only = regions.register(list, RemoteRights::RemoteRead).unwrap();
        assert_eq!(regions.write(read_only.stag, read_only.address, &[0]), Err(Refusal::Access));
    }

    #[test]
    fn each_invalid_access_is_refused_with_its_own_reason() {
        let mut regions = Regions::new(4, SEED);
        let none = regions.look_up(Stag(1), 0, 1, RemoteRights::RemoteRead);
        assert_eq!(none.unwrap_err(), Refusal::InvalidStag, "nothing was ever registered");
        let Remote { stag, address, len } = regions.register(memory(64), RemoteRights::RemoteRead).unwrap();
        let mut elsewhere = Regions::new(4, [8; 32]);
        let foreign = elsewhere.register(memory(64), RemoteRights::RemoteRead).unwrap();
        let cases = [
            (stag, address, len, RemoteRights::RemoteWrite, Refusal::Access),
            (stag, address, len + 1, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, address + 1, len, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, address + 65, 0, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, address - 1, 1, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, address, u32::MAX, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, 0, 1, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, u64::MAX, 0, RemoteRights::RemoteRead, Refusal::Bounds),
            (stag, u64::MAX, 1, RemoteRights::RemoteRead, Refusal::Wrap),
            (stag, u64::MAX - 5, 64, RemoteRights::RemoteRead, Refusal::Wrap),
            (Stag(stag.0 ^ 1 << 31), address, len, RemoteRights::RemoteRead, Refusal::InvalidStag),
            (Stag(stag.0 ^ 1), address, len, RemoteRights::RemoteRead, Refusal::InvalidStag),
            (foreign.stag, foreign.address, len, RemoteRights::RemoteRead, Refusal::InvalidStag),
            (Stag(0), address, len, RemoteRights::RemoteRead, Refusal::InvalidStag),
        ];
        for (stag, address, len, access, refusal) in cases {
            let found = regions.look_up(stag, address, len, access).map(|list| list.len());
            assert_eq!(found, Err(refusal), "{stag:?} {address:x} {len} {access:?}");
            assert_eq!(regions.check_grant(stag, address, len, access), Err(refusal));
        }
    }

    #[test]
    fn an_invalidated_tag_is_refused_whichever_side_invalidated_it() {
        let mut regions = Regions::new(4, SEED);
        let [first, second, third] =
            [1, 2, 3].map(|len| regions.register(memory(len), RemoteRights::RemoteWrite).unwrap());
        assert_eq!(regions.close(first.stag).map(|list| list.len()), Some(1));
        assert!(regions.close(first.stag).is_none());
        assert_eq!(regions.invalidate(second.stag), Ok(()));
        assert_eq!(regions.invalidate(second.stag), Err(Refusal::CannotInvalidate));
        for gone in [first, second] {
            let found = regions.look_up(gone.stag, gone.address, 1, RemoteRights::RemoteWrite);
            assert_eq!(found.unwrap_err(), Refusal::InvalidStag);
        }
        assert!(regions.look_up(third.stag, third.address, 3, RemoteRights::RemoteWrite).is_ok());
        regions.close_all();
        let found = regions.look_up(third.stag, third.address, 3, RemoteRights::RemoteWrite);
        assert_eq!((found.unwrap_err(), regions.open()), (Refusal::InvalidStag, 0));
        assert!(regions.register(memory(1), RemoteRights::RemoteRead).is_ok(), "the table is usable again");
    }

    #[test]
    fn memory_is_released_when_its_tag_is_invalidated() {
        let mut regions = Regions::new(1, SEED);
        let chunk = blockmux_volume::Chunk::from_slice(b"abc");
        let remote = regions.register(SgList::one(chunk.slice(0, 3)), RemoteRights::RemoteRead).unwrap();
        let mut chunk = chunk;
        chunk.take(3);
        assert!(!chunk.is_idle());
        regions.close(remote.stag);
        assert!(chunk.is_idle());
    }

    #[test]
    fn registrations_are_bounded_and_read_only_memory_is_not_registered_for_writes() {
        let mut regions = Regions::new(2, SEED);
        let first = regions.register(memory(1), RemoteRights::RemoteRead).unwrap();
        let lent = SgList::one(blockmux_volume::Chunk::from_slice(b"abc").slice(0, 3));
        let refused = regions.register(lent.clone(), RemoteRights::RemoteWrite);
        assert_eq!(refused.unwrap_err(), RegisterError::ReadOnly);
        regions.register(lent, RemoteRights::RemoteRead).unwrap();
        assert_eq!(regions.register(memory(1), RemoteRights::RemoteRead).unwrap_err(), RegisterError::Full);
        regions.close(first.stag);
        assert!(regions.register(memory(0), RemoteRights::RemoteRead).is_ok());
        assert_eq!(regions.open(), 2);
        let mut none = Regions::new(0, SEED);
        assert_eq!(none.register(memory(1), RemoteRights::RemoteRead).unwrap_err(), RegisterError::Full);
    }

    #[test]
    fn tags_are_not_reused_and_follow_from_the_seed_alone() {
        let names = |seed: Seed| {
            let mut regions = Regions::new(3, seed);
            let mut open = Vec::new();
            (0..20_000)
                .map(|_| {
                    if open.len() == 3 {
                        regions.close(open.remove(0)).unwrap();
                    }
                    let remote = regions.register(memory(1), RemoteRights::RemoteRead).unwrap();
                    open.push(remote.stag);
                    assert!(remote.address.is_multiple_of(4096));
                    remote.stag.0
                })
                .collect::<Vec<_>>()
        };
        let first = names(SEED);
        assert_eq!(first, names(SEED));
        let distinct: HashSet<_> = first.iter().collect();
        assert!(distinct.len() > 19_990, "random numbers of 32 bits rarely repeat");
        assert!(names([8; 32]).iter().filter(|name| distinct.contains(name)).count() < 5);
        assert!(first.windows(2).all(|pair| pair[0] != pair[1]));
        // Every bit is set in about half of the tags.
        for bit in 0..32 {
            let set = first.iter().filter(|name| **name >> bit & 1 == 1).count();
            assert!((9_000..11_000).contains(&set), "bit {bit} is set in {set}");
        }
    }
}
