//! A table with generation-tagged keys: the key of a removed entry is never valid again.

/// A table of entries in flight. It grows to its maximum occupancy and then allocates no more.
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// Number of entries ever inserted.
    born: u64,
    /// The oldest entry of each kind at the last call of [`Slots::tick`].
    seen: [Seen; 2],
}

/// The oldest entry of a kind.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Its sequence number, from 1; 0: there was none.
    born: u64,
    /// Number of consecutive calls that have found it again.
    again: u32,
    /// The latest sequence number when it was first found.
    youngest: u64,
}

struct Slot<T> {
    /// Number of uses of this slot; part of the key.
    generation: u32,
    /// Sequence number of its entry, from 1.
    born: u64,
    value: Option<T>,
}

/// Key of one entry: `generation << 32 | index`. NBD uses it as the cookie of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKey(pub(super) u64);

impl<T> Default for Slots<T> {
    fn default() -> Slots<T> {
        Slots { slots: Vec::new(), free: Vec::new(), born: 0, seen: Default::default() }
    }
}

impl<T> Slots<T> {
    /// Inserts an entry. The caller limits the number of entries.
    #[inline]
    pub(crate) fn insert(&mut self, value: T) -> SlotKey {
        self.insert_with(|| value)
    }

    /// Inserts the entry that `make` returns, which is built where it stays.
    #[inline]
    pub(crate) fn insert_with(&mut self, make: impl FnOnce() -> T) -> SlotKey {
        self.born = self.born.wrapping_add(1);
        let index = self.free.pop().unwrap_or_else(|| self.add_slot());
        // The only place that writes the value. The compiler knows that no other is dropped there,
        // nor this one elsewhere: else it would be built on the stack and copied.
        if let Some(Slot { generation, born, value: free @ None }) = self.slots.get_mut(index as usize) {
            *generation = generation.wrapping_add(1);
            *born = self.born;
            std::mem::forget(free.replace(make()));
            return SlotKey::new(*generation, index);
        }
        debug_assert!(false, "slot {index} is not free");
        SlotKey::new(0, index)
    }

    /// Adds a free slot; returns its index.
    #[cold]
    #[inline(never)]
    fn add_slot(&mut self) -> u32 {
        self.slots.push(Slot { generation: 0, born: 0, value: None });
        self.slots.len().saturating_sub(1) as u32
    }

    /// The entry with this key, if it still exists.
    #[inline]
    pub(crate) fn get_mut(&mut self, key: SlotKey) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.index())?;
        if slot.generation != key.generation() {
            return None;
        }
        slot.value.as_mut()
    }

    /// Removes an entry; its key is never valid again.
    #[inline]
    pub(crate) fn remove(&mut self, key: SlotKey) -> Option<T> {
        let slot = self.slots.get_mut(key.index())?;
        if slot.generation != key.generation() || slot.value.is_none() {
            return None;
        }
        self.free.push(key.index() as u32);
        // Moved once, as nothing happens between here and the caller.
        slot.value.take()
    }

    /// Drops an entry in place.
    #[inline]
    pub(crate) fn discard(&mut self, key: SlotKey) {
        if let Some(slot) = self.slots.get_mut(key.index())
            && slot.generation == key.generation()
            && slot.value.is_some()
        {
            slot.value = None;
            self.free.push(key.index() as u32);
        }
    }

    /// The key with this 32-bit form, if its entry still exists. Unique in a table of at most
    /// 65,535 slots.
    #[inline]
    pub(crate) fn find(&self, short: u32) -> Option<SlotKey> {
        let index = short & u32::from(u16::MAX);
        let slot = self.slots.get(index as usize)?;
        let key = SlotKey::new(slot.generation, index);
        (slot.value.is_some() && key.short() == short).then_some(key)
    }

    /// The key with this 16-bit form, if its entry still exists. Unique in a table of at most 1,024
    /// slots.
    #[inline]
    pub(crate) fn find_narrow(&self, narrow: u16) -> Option<SlotKey> {
        let index = u32::from(narrow & NARROW_INDEX);
        let slot = self.slots.get(index as usize)?;
        let key = SlotKey::new(slot.generation, index);
        (slot.value.is_some() && key.narrow() == narrow).then_some(key)
    }

    /// The number of entries.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    /// Whether the table is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of values for which `is_meant` returns true.
    pub(crate) fn count_of(&self, is_meant: impl Fn(&T) -> bool) -> usize {
        self.slots.iter().filter_map(|slot| slot.value.as_ref()).filter(|value| is_meant(value)).count()
    }

    /// The keys of all entries for which `is_meant` returns true, unordered.
    pub(crate) fn keys_of(&self, is_meant: impl Fn(&T) -> bool) -> Vec<SlotKey> {
        (0..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.value.as_ref().is_some_and(&is_meant))
            .map(|(index, slot)| SlotKey::new(slot.generation, index))
            .collect()
    }

    /// Finds the oldest entry. Returns the number of consecutive calls that have found the same one
    /// again. Entries for which `is_long` returns true may take longer: only every [`LONG`]th call
    /// counts for them.
    pub(crate) fn tick(&mut self, is_long: impl Fn(&T) -> bool) -> u32 {
        let mut oldest = [0; 2];
        for slot in &self.slots {
            let Some(value) = &slot.value else { continue };
            let [short, long] = &mut oldest;
            let oldest = if is_long(value) { long } else { short };
            if *oldest == 0 || slot.born < *oldest {
                *oldest = slot.born;
            }
        }
        for (seen, born) in self.seen.iter_mut().zip(oldest) {
            let is_same = born != 0 && seen.born == born;
            *seen = match is_same {
                true => Seen { again: seen.again.saturating_add(1), ..*seen },
                false => Seen { born, again: 0, youngest: self.born },
            };
        }
        let [short, long] = self.seen;
        short.again.max(long.again / LONG)
    }

    /// If at least `ticks` consecutive calls of [`Slots::tick`] have found the same oldest entry:
    /// this one and all others that existed at the first of those calls, oldest first.
    pub(crate) fn overdue(&self, ticks: u32, is_long: impl Fn(&T) -> bool) -> Vec<SlotKey> {
        let [short, long] = self.seen;
        let mut overdue = Vec::new();
        for (index, slot) in (0..).zip(&self.slots) {
            let Some(value) = &slot.value else { continue };
            let (seen, again) = if is_long(value) { (long, long.again / LONG) } else { (short, short.again) };
            if again >= ticks && slot.born <= seen.youngest {
                overdue.push((slot.born, SlotKey::new(slot.generation, index)));
            }
        }
        overdue.sort_unstable_by_key(|(born, _)| *born);
        overdue.into_iter().map(|(_, key)| key).collect()
    }

    /// Resets the counts of [`Slots::tick`].
    pub(crate) fn reset_ticks(&mut self) {
        self.seen = Default::default();
    }

    /// Removes and returns all entries.
    pub(crate) fn take_all(&mut self) -> Vec<T> {
        let keys = self.keys_of(|_| true);
        keys.into_iter().filter_map(|key| self.remove(key)).collect()
    }
}

impl SlotKey {
    fn new(generation: u32, index: u32) -> SlotKey {
        SlotKey(u64::from(generation) << 32 | u64::from(index))
    }

    /// The 32-bit form, for protocols with 32-bit tags: the low halves of generation and index.
    #[inline]
    pub(crate) fn short(self) -> u32 {
        self.generation() << 16 | (self.0 & u64::from(u16::MAX)) as u32
    }

    /// The 16-bit form: ten bits of the index, six of the generation.
    #[inline]
    pub(crate) fn narrow(self) -> u16 {
        (self.generation() as u16) << NARROW_INDEX.count_ones() | self.0 as u16 & NARROW_INDEX
    }

    /// The index of the entry, which later entries reuse.
    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Number of calls of [`Slots::tick`] that count as one for entries that may take longer.
pub(crate) const LONG: u32 = 4;
/// Mask of the index in the 16-bit form.
const NARROW_INDEX: u16 = (1 << 10) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_16_bits_is_valid_for_only_one_occupant() {
        let mut slots = Slots::default();
        let keys: Vec<_> = (0..1024).map(|n| slots.insert(n)).collect();
        assert!(keys.iter().all(|key| slots.find_narrow(key.narrow()) == Some(*key)));
        slots.remove(keys[1023]);
        assert_eq!(slots.find_narrow(keys[1023].narrow()), None);
        let again = slots.insert(0);
        assert_eq!(slots.find_narrow(keys[1023].narrow()), None);
        assert_eq!(slots.find_narrow(again.narrow()), Some(again));
    }

    #[test]
    fn a_key_is_valid_for_only_one_occupant() {
        let mut slots = Slots::default();
        let first = slots.insert('a');
        assert_eq!(slots.get_mut(first), Some(&mut 'a'));
        assert_eq!((slots.remove(first), slots.remove(first)), (Some('a'), None));
        slots.discard(first);
        assert_eq!(slots.len(), 0);
        let again = slots.insert('c');
        slots.discard(again);
        slots.discard(again);
        assert!(slots.get_mut(again).is_none() && slots.is_empty());
        let second = slots.insert('b');
        assert_eq!(second.index(), first.index());
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.get_mut(second), Some(&mut 'b'));
        assert_eq!(slots.get_mut(SlotKey(0)), None);
        assert_eq!(slots.get_mut(SlotKey(u64::MAX)), None);
        assert_eq!((slots.find(second.short()), slots.find(first.short())), (Some(second), None));
        assert_eq!(slots.find(u32::MAX), None);
    }

    #[test]
    fn ticks_count_for_how_long_the_same_entry_has_been_the_oldest() {
        let mut slots = Slots::default();
        let tick = |slots: &mut Slots<char>| slots.tick(|value| value.is_uppercase());
        assert_eq!((tick(&mut slots), tick(&mut slots)), (0, 0));
        let (first, second) = (slots.insert('a'), slots.insert('b'));
        assert_eq!([tick(&mut slots), tick(&mut slots), tick(&mut slots)], [0, 1, 2]);
        // The entry that reuses the slot of the oldest is the youngest.
        slots.remove(first);
        slots.insert('c');
        assert_eq!([tick(&mut slots), tick(&mut slots)], [0, 1]);
        slots.remove(second);
        slots.reset_ticks();
        assert_eq!([tick(&mut slots), tick(&mut slots)], [0, 1]);
        slots.take_all();
        slots.insert('X');
        let ticks: Vec<_> = (0..10).map(|_| tick(&mut slots)).collect();
        assert_eq!(ticks, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn overdue_is_who_was_here_when_the_oldest_was_found_first() {
        let mut slots = Slots::default();
        let (long, late) = (slots.insert('L'), slots.insert('b'));
        let gone = slots.insert('c');
        let is_long = |value: &char| value.is_uppercase();
        slots.tick(is_long);
        slots.remove(gone);
        slots.insert('d');
        slots.tick(is_long);
        assert!(slots.overdue(2, is_long).is_empty());
        slots.tick(is_long);
        assert_eq!(slots.overdue(2, is_long), [late]);
        for _ in 0..6 {
            slots.tick(is_long);
        }
        assert_eq!(slots.overdue(2, is_long), [long, late]);
    }

    #[test]
    fn taking_all_leaves_nothing() {
        let mut slots = Slots::default();
        let keys: Vec<_> = (0..5).map(|n| slots.insert(n)).collect();
        slots.remove(keys[2]);
        assert_eq!(slots.keys_of(|n| *n > 2), keys[3..]);
        assert_eq!(slots.take_all(), [0, 1, 3, 4]);
        assert!(slots.is_empty());
    }
}
