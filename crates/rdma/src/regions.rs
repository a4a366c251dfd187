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
//!
//! A registration may have no memory of its own until the peer writes to it: a single write of all
//! of it is then borrowed from the receive buffer instead of copied.

use crate::unpredictable::UnpredictableNumbers;
use blockmux_proto::rdma::{Remote, RemoteRights, Stag};
use blockmux_volume::{Memory, Seg, SgList, Slab};

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
    memory: RegionMemory,
    address: u64,
    len: u32,
    access: RemoteRights,
}

enum RegionMemory {
    /// Memory of the session.
    Given(SgList),
    /// What the peer has written to a registration without memory, in its whole length. `None`
    /// before the first write.
    Written(Option<Seg>),
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
        self.check_count()?;
        let len = u32::try_from(memory.len()).map_err(|_| RegisterError::TooLong)?;
        if access == RemoteRights::RemoteWrite && !memory.is_writable() {
            return Err(RegisterError::ReadOnly);
        }
        Ok(self.insert(RegionMemory::Given(std::mem::take(memory)), len, access))
    }

    /// Registers `len` bytes without memory, for writes of the peer. [`Regions::invalidate`]
    /// returns what was written.
    ///
    /// # Errors
    /// If there are too many registrations.
    #[inline]
    pub fn register_unbacked(&mut self, len: u32) -> Result<Remote, RegisterError> {
        self.check_count()?;
        Ok(self.insert(RegionMemory::Written(None), len, RemoteRights::RemoteWrite))
    }

    #[inline]
    fn check_count(&self) -> Result<(), RegisterError> {
        if self.regions.len() < self.max as usize { Ok(()) } else { Err(RegisterError::Full) }
    }

    #[inline]
    fn insert(&mut self, memory: RegionMemory, len: u32, access: RemoteRights) -> Remote {
        if self.slots.is_empty() {
            let slots = (self.max as usize).saturating_mul(SLOTS_PER_REGION).next_power_of_two();
            self.slots = vec![StagSlot { stag: 0, region: CLOSED }; slots];
        }
        let stag = self.draw();
        // A multiple of 4096 below 2^44: a 32-bit length cannot wrap it, and it looks like a page
        // address.
        let address = u64::from(self.random.next()) << 12;
        if let Some(slot) = slot(&mut self.slots, stag) {
            // At most MAX_REGIONS.
            let region = self.regions.insert(Region { memory, address, len, access }) as u32;
            *slot = StagSlot { stag, region };
        }
        Remote { stag: Stag(stag), address, len }
    }

    /// Invalidates a tag. Returns what the peer has written to a registration without memory, in
    /// its whole length; what was not written is zero.
    ///
    /// # Errors
    /// If the tag is not valid.
    #[inline]
    pub fn invalidate(&mut self, stag: Stag) -> Result<Option<Seg>, Refusal> {
        let slot =
            slot(&mut self.slots, stag.0).filter(|slot| slot.holds(stag)).ok_or(Refusal::CannotInvalidate)?;
        let region = std::mem::replace(&mut slot.region, CLOSED);
        let region = self.regions.remove(region as usize).ok_or(Refusal::CannotInvalidate)?;
        Ok(match region.memory {
            RegionMemory::Given(_) => None,
            RegionMemory::Written(None) => Some(zeroes(region.len)),
            RegionMemory::Written(written) => written,
        })
    }

    /// Invalidates all tags.
    pub fn close_all(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.region = CLOSED);
        self.regions.clear();
    }

    /// The `len` bytes at `address` of the memory registered as `stag`, for an RDMA Read of the
    /// peer.
    ///
    /// # Errors
    /// If the access was not granted. An empty range needs a grant too; a protocol that requires
    /// none does not call this.
    #[inline]
    pub fn look_up(&self, stag: Stag, address: u64, len: u32) -> Result<SgList, Refusal> {
        let at = self.check(stag, address, len, RemoteRights::RemoteRead)?;
        // A registration without memory is for writes only.
        let memory = self.regions.get(at.region).and_then(|region| match &region.memory {
            RegionMemory::Given(memory) => Some(memory.clone()),
            RegionMemory::Written(_) => None,
        });
        Ok(at.part_of(memory.ok_or(Refusal::Access)?, len))
    }

    /// The `len` bytes at `address` of the memory registered as `stag`, for a write of the peer
    /// that is received directly into its place.
    ///
    /// # Errors
    /// As [`Regions::look_up`].
    #[inline]
    pub fn place(&mut self, stag: Stag, address: u64, len: u32) -> Result<SgList, Refusal> {
        let at = self.check(stag, address, len, RemoteRights::RemoteWrite)?;
        let region = self.regions.get_mut(at.region).ok_or(Refusal::InvalidStag)?;
        let memory = match &mut region.memory {
            RegionMemory::Given(memory) => memory.clone(),
            RegionMemory::Written(written) => SgList::one(make_writable(written, region.len).clone()),
        };
        Ok(at.part_of(memory, len))
    }

    /// Stores `bytes` at `address` of the memory registered as `stag`, for a write of the peer.
    /// `borrow` returns the bytes in the receive buffer; a registration without memory keeps that
    /// if the write is all of it.
    ///
    /// # Errors
    /// If the write was not granted; nothing was stored then.
    #[inline]
    pub fn write(
        &mut self,
        stag: Stag,
        address: u64,
        bytes: &[u8],
        borrow: impl FnOnce() -> Seg,
    ) -> Result<(), Refusal> {
        let len = u32::try_from(bytes.len()).map_err(|_| Refusal::Bounds)?;
        let at = self.check(stag, address, len, RemoteRights::RemoteWrite)?;
        let region = self.regions.get_mut(at.region).ok_or(Refusal::InvalidStag)?;
        match &mut region.memory {
            RegionMemory::Given(memory) if at.offset == 0 => memory.copy_from(bytes),
            RegionMemory::Given(memory) => memory.slice(at.offset, bytes.len()).copy_from(bytes),
            RegionMemory::Written(written) if len == region.len => *written = Some(borrow()),
            RegionMemory::Written(written) => {
                make_writable(written, region.len).slice(at.offset, bytes.len()).copy_from(bytes);
            }
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

    /// Finds the range.
    #[inline]
    fn check(
        &self,
        stag: Stag,
        address: u64,
        len: u32,
        access: RemoteRights,
    ) -> Result<RegionRange, Refusal> {
        let slot = self
            .slots
            .get(slot_index(self.slots.len(), stag.0))
            .filter(|slot| slot.holds(stag))
            .ok_or(Refusal::InvalidStag)?;
        let at = slot.region as usize;
        let region = self.regions.get(at).ok_or(Refusal::InvalidStag)?;
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
        Ok(RegionRange { region: at, offset, is_whole: len == region.len })
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

/// A range of a registration that the peer may access.
struct RegionRange {
    /// Index into `regions`.
    region: usize,
    /// Offset in the registration, in bytes.
    offset: usize,
    is_whole: bool,
}

impl RegionRange {
    /// The range of the registration's memory; it has `len` bytes.
    #[inline]
    fn part_of(&self, memory: SgList, len: u32) -> SgList {
        if self.is_whole { memory } else { memory.slice(self.offset, len as usize) }
    }
}

/// Memory of `len` bytes for a part of the data, with what was written before. A peer that writes
/// to a registration without memory in parts, or repeatedly, causes a copy, and an allocation.
#[cold]
fn make_writable(written: &mut Option<Seg>, len: u32) -> &Seg {
    let seg = written.get_or_insert_with(|| zeroes(len));
    if !seg.is_writable() {
        let copy = zeroes(len);
        seg.copy_to_seg(&copy);
        *seg = copy;
    }
    seg
}

#[cold]
fn zeroes(len: u32) -> Seg {
    Memory::from_heap(len as usize).seg(0, len as usize)
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
            let found = regions.look_up(remote.stag, remote.address + at, len).unwrap();
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
            regions.write(remote.stag, remote.address + at as u64, &bytes, || unreachable!()).unwrap();
            expected[at..at + len].copy_from_slice(&bytes);
            assert_eq!(list.to_vec(), expected, "{len} bytes at {at}");
        }
        for (at, len) in [(0, 65), (1, 64), (64, 1)] {
            let refused = regions.write(remote.stag, remote.address + at, &vec![0; len], || unreachable!());
            assert_eq!((refused, list.to_vec()), (Err(Refusal::Bounds), expected.clone()));
        }
        let read_only = regions.register(list, RemoteRights::RemoteRead).unwrap();
        let refused = regions.write(read_only.stag, read_only.address, &[0], || unreachable!());
        assert_eq!(refused, Err(Refusal::Access));
    }

    #[test]
    fn each_invalid_access_is_refused_with_its_own_reason() {
        let mut regions = Regions::new(4, SEED);
        let none = regions.look_up(Stag(1), 0, 1);
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
            let found = match access {
                RemoteRights::RemoteRead => regions.look_up(stag, address, len),
                RemoteRights::RemoteWrite => regions.place(stag, address, len),
            };
            let found = found.map(|list| list.len());
            assert_eq!(found, Err(refusal), "{stag:?} {address:x} {len} {access:?}");
            assert_eq!(regions.check_grant(stag, address, len, access), Err(refusal));
        }
    }

    #[test]
    fn an_invalidated_tag_is_refused_whichever_side_invalidated_it() {
        let mut regions = Regions::new(4, SEED);
        let [first, second, third] =
            [1, 2, 3].map(|len| regions.register(memory(len), RemoteRights::RemoteWrite).unwrap());
        for stag in [first.stag, second.stag] {
            assert!(regions.invalidate(stag).unwrap().is_none(), "it had memory");
            assert_eq!(regions.invalidate(stag).err(), Some(Refusal::CannotInvalidate));
        }
        for gone in [first, second] {
            let found = regions.place(gone.stag, gone.address, 1);
            assert_eq!(found.unwrap_err(), Refusal::InvalidStag);
        }
        assert!(regions.place(third.stag, third.address, 3).is_ok());
        regions.close_all();
        let found = regions.place(third.stag, third.address, 3);
        assert_eq!((found.unwrap_err(), regions.regions.len()), (Refusal::InvalidStag, 0));
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
        regions.invalidate(remote.stag).unwrap();
        assert!(chunk.is_idle());
    }

    /// Writes the bytes as they lie in a receive buffer; returns where they lie if they were
    /// borrowed.
    fn receive(regions: &mut Regions, remote: Remote, at: u64, bytes: &[u8]) -> Option<*const u8> {
        let chunk = blockmux_volume::Chunk::from_slice(bytes);
        let mut borrowed = None;
        let borrow = || {
            let seg = chunk.slice(0, bytes.len());
            borrowed = Some(seg.as_ptr().cast_const());
            seg
        };
        regions.write(remote.stag, remote.address + at, bytes, borrow).unwrap();
        borrowed
    }

    #[test]
    fn one_write_of_everything_to_a_registration_without_memory_is_borrowed() {
        let mut regions = Regions::new(4, SEED);
        let remote = regions.register_unbacked(4).unwrap();
        let borrowed = receive(&mut regions, remote, 0, b"abcd");
        let written = regions.invalidate(remote.stag).unwrap().unwrap();
        assert_eq!((written.to_vec(), written.is_writable()), (b"abcd".to_vec(), false));
        assert_eq!(borrowed, Some(written.as_ptr().cast_const()));
    }

    #[test]
    fn other_writes_to_a_registration_without_memory_are_copied_over_zeroes() {
        type Writes<'a> = &'a [(u64, &'a [u8])];
        let cases: [(Writes<'_>, &[u8]); 6] = [
            (&[], b"\0\0\0\0"),
            (&[(1, b"b")], b"\0b\0\0"),
            (&[(2, b"cd"), (0, b"ab")], b"abcd"),
            (&[(0, b"abcd"), (1, b"BC")], b"aBCd"),
            (&[(3, b"x"), (0, b"abcd")], b"abcd"),
            (&[(0, b"abcd"), (0, b"ABCD")], b"ABCD"),
        ];
        for (writes, expected) in cases {
            let mut regions = Regions::new(4, SEED);
            let remote = regions.register_unbacked(4).unwrap();
            for (at, bytes) in writes {
                receive(&mut regions, remote, *at, bytes);
            }
            let written = regions.invalidate(remote.stag).unwrap().unwrap();
            assert_eq!(written.to_vec(), expected, "{writes:?}");
        }
    }

    #[test]
    fn a_write_to_a_registration_without_memory_may_be_received_into_its_place() {
        let mut regions = Regions::new(4, SEED);
        let remote = regions.register_unbacked(4).unwrap();
        receive(&mut regions, remote, 0, b"abcd");
        regions.place(remote.stag, remote.address + 1, 2).unwrap().copy_from(b"BC");
        assert_eq!(regions.place(remote.stag, remote.address + 1, 4).unwrap_err(), Refusal::Bounds);
        assert_eq!(regions.look_up(remote.stag, remote.address, 1).unwrap_err(), Refusal::Access);
        assert_eq!(regions.invalidate(remote.stag).unwrap().unwrap().to_vec(), b"aBCd");
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
        regions.invalidate(first.stag).unwrap();
        assert!(regions.register(memory(0), RemoteRights::RemoteRead).is_ok());
        assert_eq!(regions.regions.len(), 2);
        assert_eq!(regions.register_unbacked(1).unwrap_err(), RegisterError::Full);
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
                        regions.invalidate(open.remove(0)).unwrap();
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
