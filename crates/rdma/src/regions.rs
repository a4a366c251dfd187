//! Registered memory of one connection: which peer may do what, where, and by which name.
//!
//! Each connection has its own table, which is its protection domain: a name that another
//! connection was given means nothing here. Names and addresses follow from a secret seed and tell
//! nothing about each other or about memory (RFC 5042), so that a peer knows only those that it was
//! told.
//!
//! A name is a random number, and its low bits are its place in a sparse table. A place that is
//! taken makes for another draw, so that looking up is one step, and a name comes again only after
//! its place was given to others.

use blockmux_proto::rdma::{Remote, RemoteRights, Stag};
use blockmux_volume::{Seg, SgList, Slab};
use sha2::{Digest, Sha256};

/// Where the names of a connection's memory come from: random numbers that no peer knows.
pub type Seed = [u8; 32];

/// Why a peer does not get at memory, in the words of RFC 5040 (remote protection errors) and RFC
/// 5041 (tagged buffer errors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No memory has this name, or none any more; with RFC 5040's "not associated", for names of
    /// another connection.
    #[error("an invalid steering tag")]
    InvalidStag,
    /// Not all of the range lies within the memory.
    #[error("a base or bounds violation")]
    Bounds,
    /// It was granted for something else.
    #[error("an access rights violation")]
    Access,
    /// The range goes beyond the largest tagged offset.
    #[error("a tagged offset wrap")]
    Wrap,
    /// What a message was to close is not open.
    #[error("a steering tag that cannot be invalidated")]
    CannotInvalidate,
}

/// Why memory cannot be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unregistrable {
    /// As many registrations as there may be are open.
    #[error("too many registrations are open")]
    Full,
    /// It has 4 GiB or more.
    #[error("it is too long")]
    TooLong,
    /// The peer is to write what nobody may write.
    #[error("it may not be written")]
    ReadOnly,
}

/// The memory that one connection's peer may use.
///
/// Nothing is allocated for a registration once as many were open at a time, except for lists of
/// several pieces.
pub struct Regions {
    /// By the low bits of the name. Empty until the first registration.
    places: Vec<Place>,
    regions: Slab<Region>,
    max: u32,
    random: Random,
}

#[derive(Clone, Copy)]
struct Place {
    /// The name that was here last.
    stag: u32,
    /// Where the memory is, or [`CLOSED`].
    region: u32,
}

struct Region {
    memory: SgList,
    address: u64,
    len: u32,
    access: RemoteRights,
}

impl Regions {
    /// A table without memory, for at most `max` registrations at a time and no more than
    /// [`MAX_REGIONS`].
    #[must_use]
    pub fn new(max: u32, seed: Seed) -> Regions {
        Regions {
            places: Vec::new(),
            regions: Slab::default(),
            max: max.min(MAX_REGIONS),
            random: Random { seed, turn: 0, drawn: [0; 8], left: 0 },
        }
    }

    /// How many registrations are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.regions.len()
    }

    /// Opens `memory` to the peer, under a new name and at a new address.
    ///
    /// # Errors
    /// If it cannot be granted.
    pub fn register(&mut self, mut memory: SgList, access: RemoteRights) -> Result<Remote, Unregistrable> {
        self.take(&mut memory, access)
    }

    /// Grants the peer access to memory and takes it out of `memory`; what cannot be granted is
    /// left to the caller.
    ///
    /// # Errors
    /// If it cannot be granted.
    pub fn take(&mut self, memory: &mut SgList, access: RemoteRights) -> Result<Remote, Unregistrable> {
        if self.regions.len() >= self.max as usize {
            return Err(Unregistrable::Full);
        }
        let len = u32::try_from(memory.len()).map_err(|_| Unregistrable::TooLong)?;
        if access == RemoteRights::RemoteWrite && !memory.segs().iter().all(Seg::is_writable) {
            return Err(Unregistrable::ReadOnly);
        }
        if self.places.is_empty() {
            let places = (self.max as usize).saturating_mul(PLACES_PER_REGION).next_power_of_two();
            self.places = vec![Place { stag: 0, region: CLOSED }; places];
        }
        let stag = self.draw();
        let address = self.random.address();
        if let Some(place) = place(&mut self.places, stag) {
            let region = Region { memory: std::mem::take(memory), address, len, access };
            // At most MAX_REGIONS.
            *place = Place { stag, region: self.regions.insert(region) as u32 };
        }
        Ok(Remote { stag: Stag(stag), address, len })
    }

    /// Closes memory, if it is open; returns what was.
    #[inline]
    pub fn close(&mut self, stag: Stag) -> Option<SgList> {
        let place = place(&mut self.places, stag.0).filter(|place| place.names(stag))?;
        let region = std::mem::replace(&mut place.region, CLOSED);
        self.regions.remove(region as usize).map(|was| was.memory)
    }

    /// Closes memory because a message of the peer says so.
    ///
    /// # Errors
    /// If it is not open.
    #[inline]
    pub fn invalidate(&mut self, stag: Stag) -> Result<(), Refusal> {
        self.close(stag).map(|_| ()).ok_or(Refusal::CannotInvalidate)
    }

    /// Closes everything.
    pub fn close_all(&mut self) {
        self.places.iter_mut().for_each(|place| place.region = CLOSED);
        self.regions.clear();
    }

    /// The memory of `len` bytes at `address` of what is called `stag`, for a peer that wants to do
    /// `access` there.
    ///
    /// # Errors
    /// If that was not granted. A range of no bytes needs a grant too; where a protocol asks for
    /// none, it asks nothing here.
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

    /// Copies `bytes` to `address` of what is called `stag`, for a peer that writes there.
    ///
    /// # Errors
    /// If that was not granted; then nothing was copied.
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

    /// Whether [`Regions::look_up`] would answer memory.
    ///
    /// # Errors
    /// If that was not granted.
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

    /// The registration, and where in it the range begins.
    #[inline]
    fn check(
        &self,
        stag: Stag,
        address: u64,
        len: u32,
        access: RemoteRights,
    ) -> Result<(&Region, usize), Refusal> {
        let region = self
            .places
            .get(place_of(self.places.len(), stag.0))
            .filter(|place| place.names(stag))
            .and_then(|place| self.regions.get(place.region as usize))
            .ok_or(Refusal::InvalidStag)?;
        if region.access != access {
            return Err(Refusal::Access);
        }
        let end = address.checked_add(len.into()).ok_or(Refusal::Wrap)?;
        let offset = address.checked_sub(region.address).ok_or(Refusal::Bounds)?;
        // An address plus a length of 32 bits, of those that are drawn, does not wrap.
        if end > region.address.saturating_add(region.len.into()) {
            return Err(Refusal::Bounds);
        }
        let offset = usize::try_from(offset).map_err(|_| Refusal::Bounds)?;
        Ok((region, offset))
    }

    /// A name whose place is free, other than the last one there.
    fn draw(&mut self) -> u32 {
        loop {
            let stag = self.random.next();
            // Names of 0 are for a side's own use in the verbs, and stand for "none" on the wire of
            // some.
            let is_free = self
                .places
                .get(place_of(self.places.len(), stag))
                .is_some_and(|place| place.region == CLOSED && place.stag != stag);
            if is_free && stag != 0 {
                return stag;
            }
        }
    }
}

impl Place {
    #[inline]
    fn names(&self, stag: Stag) -> bool {
        self.stag == stag.0 && self.region != CLOSED
    }
}

#[inline]
fn place_of(places: usize, stag: u32) -> usize {
    stag as usize & places.saturating_sub(1)
}

#[inline]
fn place(places: &mut [Place], stag: u32) -> Option<&mut Place> {
    let at = place_of(places.len(), stag);
    places.get_mut(at)
}

/// Random numbers that nobody foresees who does not know the seed: SHA-256 of it and a count, eight
/// at a time.
struct Random {
    seed: Seed,
    turn: u64,
    drawn: [u32; 8],
    left: usize,
}

impl Random {
    #[inline]
    fn next(&mut self) -> u32 {
        if self.left == 0 {
            self.fill();
        }
        self.left = self.left.saturating_sub(1);
        self.drawn.get(self.left).copied().unwrap_or_default()
    }

    fn fill(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        let block = Sha256::new().chain_update(self.seed).chain_update(self.turn.to_le_bytes()).finalize();
        let (words, _) = block.as_chunks::<4>();
        for (drawn, word) in self.drawn.iter_mut().zip(words) {
            *drawn = u32::from_le_bytes(*word);
        }
        self.left = self.drawn.len();
    }

    /// A multiple of 4096 below 2^44: no length of 32 bits wraps it, and addresses look like
    /// addresses.
    #[inline]
    fn address(&mut self) -> u64 {
        u64::from(self.next()) << 12
    }
}

/// The most registrations that one connection may have open.
pub const MAX_REGIONS: u32 = 1 << 16;
/// The table is sparse: three draws out of four, or more, find a free place.
const PLACES_PER_REGION: usize = 4;
/// In the place of a region where there is none.
const CLOSED: u32 = u32::MAX;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
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
    fn a_range_of_granted_memory_is_found_wherever_it_lies() {
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
    fn what_is_written_lies_where_it_was_to_and_nothing_else_has_changed() {
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
    fn everything_else_is_refused_for_its_own_reason() {
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
    fn what_was_closed_is_gone_whoever_closed_it() {
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
        assert!(regions.register(memory(1), RemoteRights::RemoteRead).is_ok(), "and may begin anew");
    }

    #[test]
    fn memory_is_let_go_of_when_it_is_closed() {
        let mut regions = Regions::new(1, SEED);
        let chunk = blockmux_volume::Chunk::from_slice(b"abc");
        let remote = regions.register(SgList::one(chunk.lend(0, 3)), RemoteRights::RemoteRead).unwrap();
        let mut chunk = chunk;
        chunk.take(3);
        assert!(!chunk.is_idle());
        regions.close(remote.stag);
        assert!(chunk.is_idle());
    }

    #[test]
    fn only_so_much_is_registered_and_only_what_can_be_granted() {
        let mut regions = Regions::new(2, SEED);
        let first = regions.register(memory(1), RemoteRights::RemoteRead).unwrap();
        let lent = SgList::one(blockmux_volume::Chunk::from_slice(b"abc").lend(0, 3));
        let refused = regions.register(lent.clone(), RemoteRights::RemoteWrite);
        assert_eq!(refused.unwrap_err(), Unregistrable::ReadOnly);
        regions.register(lent, RemoteRights::RemoteRead).unwrap();
        assert_eq!(regions.register(memory(1), RemoteRights::RemoteRead).unwrap_err(), Unregistrable::Full);
        regions.close(first.stag);
        assert!(regions.register(memory(0), RemoteRights::RemoteRead).is_ok());
        assert_eq!(regions.open(), 2);
        let mut none = Regions::new(0, SEED);
        assert_eq!(none.register(memory(1), RemoteRights::RemoteRead).unwrap_err(), Unregistrable::Full);
    }

    #[test]
    fn names_do_not_come_again_and_follow_from_the_seed_alone() {
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
        assert!(distinct.len() > 19_990, "of numbers of 32 bits, hardly two are the same");
        assert!(names([8; 32]).iter().filter(|name| distinct.contains(name)).count() < 5);
        assert!(first.windows(2).all(|pair| pair[0] != pair[1]));
        // Every bit is as often set as not.
        for bit in 0..32 {
            let set = first.iter().filter(|name| **name >> bit & 1 == 1).count();
            assert!((9_000..11_000).contains(&set), "bit {bit} is set in {set}");
        }
    }
}
