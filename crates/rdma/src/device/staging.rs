//! Memory that a confined connection exposes to its peer: buffers of its own, which data is copied
//! to and from.
//!
//! ```text
//!   open ──┬─ a buffer is free ──copy──▶ its key ──close──copy back──▶ free
//!          └─ none: grow ──WorkVerb::Expose──▶ owner ──DeviceEvent::Exposed──▶ free
//! ```
//! A buffer stays exposed while it is free, and when it is used again: then no call of the device
//! is needed. It has only ever held data of this connection. The one that was free for longest is
//! used next.

use blockmux_proto::rdma::{Remote, RemoteRights, Stag};
use blockmux_volume::{Memory, Seg, SgList};
use std::collections::{BTreeMap, VecDeque};

/// The buffers of one connection.
pub(super) struct Staging {
    /// By their numbers.
    buffers: Vec<Option<StagingBuffer>>,
    /// Numbers of free buffers by their length, and of vacant places.
    free: BTreeMap<usize, VecDeque<u32>>,
    vacant: Vec<u32>,
    /// Numbers by keys.
    by_key: BTreeMap<u32, u32>,
    /// Number of buffers in use, and how many may be.
    in_use: usize,
    most: usize,
    /// Bytes of all buffers.
    bytes: usize,
    /// A buffer has no key yet.
    is_growing: bool,
}

struct StagingBuffer {
    memory: Seg,
    key: u32,
    opened: Option<StagedMemory>,
}

/// Memory whose bytes are in a buffer.
struct StagedMemory {
    local: SgList,
    access: RemoteRights,
}

/// A new buffer for the peer, and others that make room for it.
pub(super) struct Growth {
    pub(super) retired: Vec<u32>,
    pub(super) number: u32,
    pub(super) memory: Seg,
}

impl Staging {
    /// None so far; up to `most` are in use at a time.
    pub(super) fn new(most: u32) -> Staging {
        Staging {
            buffers: Vec::new(),
            free: BTreeMap::new(),
            vacant: Vec::new(),
            by_key: BTreeMap::new(),
            in_use: 0,
            most: usize::try_from(most).unwrap_or(usize::MAX),
            bytes: 0,
            is_growing: false,
        }
    }

    /// Opens memory by a buffer; `None` if none is free, which leaves `local` in place.
    pub(super) fn open(&mut self, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        let len = u32::try_from(local.len()).ok()?;
        if self.in_use >= self.most {
            return None;
        }
        let number = self.free.get_mut(&buffer_len(local.len()))?.pop_front()?;
        let buffer = self.buffer(number)?;
        let local = std::mem::take(local);
        if access == RemoteRights::RemoteRead {
            local.copy_to_list(&SgList::one(buffer.memory.slice(0, local.len())));
        }
        let address = buffer.memory.as_ptr().addr() as u64;
        let remote = Remote { stag: Stag(buffer.key), address, len };
        buffer.opened = Some(StagedMemory { local, access });
        self.in_use = self.in_use.saturating_add(1);
        Some(remote)
    }

    /// A buffer for memory of this length, to be exposed. `None` if it would be of no use: as many
    /// as may be are in use, or the last one has no key yet.
    pub(super) fn grow(&mut self, len: usize) -> Option<Growth> {
        if self.is_growing || self.in_use >= self.most {
            return None;
        }
        let len = buffer_len(len);
        let mut retired = Vec::new();
        while self.bytes.saturating_add(len) > MAX_BYTES
            && let Some(number) = self.free.values_mut().rev().find_map(VecDeque::pop_front)
        {
            self.retire(number);
            retired.push(number);
        }
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => {
                self.buffers.push(None);
                u32::try_from(self.buffers.len()).ok()?.checked_sub(1)?
            }
        };
        // The heap's is zeroed, so it holds nothing of others.
        let memory = Memory::from_heap(len).seg(0, len);
        let buffer = StagingBuffer { memory: memory.clone(), key: 0, opened: None };
        *self.buffers.get_mut(usize::try_from(number).ok()?)? = Some(buffer);
        self.bytes = self.bytes.saturating_add(len);
        self.is_growing = true;
        Some(Growth { retired, number, memory })
    }

    /// The new buffer is exposed, by this key.
    pub(super) fn on_exposed(&mut self, number: u32, key: u32) {
        let Some(buffer) = self.buffer(number) else { return };
        buffer.key = key;
        let len = buffer.memory.len();
        self.by_key.insert(key, number);
        self.free.entry(len).or_default().push_back(number);
        self.is_growing = false;
    }

    /// The peer has invalidated a key, by which no peer is to be given memory again: returns the
    /// number of its buffer, which is retired; `None` if no memory is open by that key.
    pub(super) fn on_invalidated(&mut self, key: u32) -> Option<u32> {
        let number = self.end(key)?;
        self.retire(number);
        Some(number)
    }

    /// Gives the session what the peer has written to its memory, whose buffer is free then.
    pub(super) fn close(&mut self, stag: Stag) {
        let Some(number) = self.end(stag.0) else { return };
        let Some(buffer) = self.buffer(number) else { return };
        let len = buffer.memory.len();
        self.free.entry(len).or_default().push_back(number);
    }

    /// Drops all, because the connection is over.
    pub(super) fn close_all(&mut self) {
        *self = Staging::new(0);
    }

    /// The memory that is open by a key is no longer; returns the number of its buffer.
    fn end(&mut self, key: u32) -> Option<u32> {
        let number = *self.by_key.get(&key)?;
        let buffer = self.buffer(number)?;
        let StagedMemory { local, access } = buffer.opened.take()?;
        if access == RemoteRights::RemoteWrite {
            SgList::one(buffer.memory.slice(0, local.len())).copy_to_list(&local);
        }
        self.in_use = self.in_use.saturating_sub(1);
        Some(number)
    }

    /// Drops a buffer that is not in use. The owner keeps it until it is told.
    fn retire(&mut self, number: u32) {
        let place = usize::try_from(number).ok().and_then(|number| self.buffers.get_mut(number));
        let Some(buffer) = place.and_then(Option::take) else { return };
        self.by_key.remove(&buffer.key);
        self.bytes = self.bytes.saturating_sub(buffer.memory.len());
        self.vacant.push(number);
    }

    fn buffer(&mut self, number: u32) -> Option<&mut StagingBuffer> {
        self.buffers.get_mut(usize::try_from(number).ok()?)?.as_mut()
    }
}

/// Buffers have few lengths, so that they fit again.
fn buffer_len(len: usize) -> usize {
    len.next_power_of_two().max(MIN_LEN)
}

/// The shortest buffer.
const MIN_LEN: usize = 4096;
/// Bytes of all buffers beyond which free ones are dropped.
const MAX_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(pieces: &[&[u8]]) -> SgList {
        let mut list = SgList::default();
        pieces.iter().for_each(|piece| list.push(Seg::from_slice(piece)));
        list
    }

    /// Adds a buffer, with the given key.
    fn add(staging: &mut Staging, len: usize, key: u32) -> Growth {
        let growth = staging.grow(len).expect("it may grow");
        assert!(staging.grow(len).is_none(), "it is growing");
        staging.on_exposed(growth.number, key);
        growth
    }

    #[test]
    fn memory_is_copied_to_the_peers_buffer_and_back() {
        let mut staging = Staging::new(4);
        let mut list = memory(&[b"ab", b"cde"]);
        assert!(staging.open(&mut list, RemoteRights::RemoteRead).is_none());
        assert_eq!(list.to_vec(), b"abcde", "it is left in place");
        let exposed = add(&mut staging, list.len(), 7).memory;
        assert_eq!(exposed.len(), MIN_LEN);
        let remote = staging.open(&mut list, RemoteRights::RemoteRead).unwrap();
        assert_eq!((remote.stag, remote.len), (Stag(7), 5));
        assert_eq!(remote.address, exposed.as_ptr().addr() as u64);
        assert_eq!(exposed.slice(0, 5).to_vec(), b"abcde");
        staging.close(Stag(7));
        let target = memory(&[b"---", b"--"]);
        staging.open(&mut target.clone(), RemoteRights::RemoteWrite).unwrap();
        exposed.copy_from(b"vwxyz");
        assert_eq!(target.to_vec(), b"-----");
        staging.close(Stag(7));
        assert_eq!(target.to_vec(), b"vwxyz");
        // What comes later is not the session's.
        exposed.copy_from(b"later");
        staging.close(Stag(7));
        assert_eq!(target.to_vec(), b"vwxyz");
    }

    #[test]
    fn the_buffer_that_was_free_for_longest_is_used_next() {
        let mut staging = Staging::new(4);
        for key in [1, 2, 3] {
            add(&mut staging, 1, key);
        }
        let mut keys = Vec::new();
        for _ in 0..4 {
            let remote = staging.open(&mut memory(&[b"x"]), RemoteRights::RemoteRead).unwrap();
            staging.close(remote.stag);
            keys.push(remote.stag.0);
        }
        assert_eq!(keys, [1, 2, 3, 1]);
    }

    #[test]
    fn an_invalidated_key_is_not_used_again() {
        let mut staging = Staging::new(4);
        let growth = add(&mut staging, 1, 9);
        assert_eq!(staging.on_invalidated(9), None, "no memory is open by it");
        let target = memory(&[b"-"]);
        staging.open(&mut target.clone(), RemoteRights::RemoteWrite).unwrap();
        growth.memory.copy_from(b"w");
        assert_eq!(staging.on_invalidated(9), Some(growth.number));
        assert_eq!(target.to_vec(), b"w");
        assert!(staging.open(&mut target.clone(), RemoteRights::RemoteRead).is_none());
        assert_eq!(add(&mut staging, 1, 10).number, growth.number, "its place is used again");
    }

    #[test]
    fn as_many_are_in_use_as_may_be_and_free_ones_are_dropped_for_others() {
        let mut staging = Staging::new(2);
        for key in [1, 2] {
            add(&mut staging, MAX_BYTES / 2, key);
        }
        let mut list = memory(&[b"x"]);
        let growth = add(&mut staging, 1, 3);
        assert_eq!(growth.retired, [0], "the longest that was free");
        staging.open(&mut list, RemoteRights::RemoteRead).unwrap();
        let mut whole = SgList::one(Memory::from_heap(MAX_BYTES / 2).seg(0, MAX_BYTES / 2));
        staging.open(&mut whole, RemoteRights::RemoteRead).unwrap();
        assert!(staging.grow(1).is_none(), "two are in use");
        staging.close(Stag(3));
        // Buffers in use are not dropped, however long they are.
        let growth = add(&mut staging, MAX_BYTES, 4);
        assert_eq!((growth.memory.len(), growth.retired.len()), (MAX_BYTES, 1));
        staging.close_all();
        assert!(staging.grow(1).is_none());
    }
}
