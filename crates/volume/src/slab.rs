//! A table of requests in flight.

/// A table that gives each value an index, often used as tag. Indices are reused, so the table
/// grows to the largest number of values ever in it and then allocates no more.
pub struct Slab<T> {
    /// The length is the largest number of values so far, so that the rest of the capacity is never
    /// touched.
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// An empty table that does not allocate until it holds more than `capacity` values.
    #[must_use]
    pub fn with_capacity(capacity: u32) -> Slab<T> {
        let capacity = capacity as usize;
        Slab { slots: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Inserts at a free index; the caller limits the number of values to less than 2^32.
    #[inline]
    pub fn insert(&mut self, value: T) -> usize {
        self.insert_with(|| value)
    }

    /// Inserts the value that `make` returns, which is built where it stays: a large one is not
    /// moved.
    #[inline]
    pub fn insert_with(&mut self, make: impl FnOnce() -> T) -> usize {
        let index = match self.free.pop() {
            Some(index) => index as usize,
            None => self.add_slot(),
        };
        // The only place that writes the value. The compiler knows that no other is dropped there,
        // nor this one elsewhere: else it would be built on the stack and copied.
        if let Some(free @ None) = self.slots.get_mut(index) {
            std::mem::forget(free.replace(make()));
        }
        index
    }

    /// Adds a free index.
    #[cold]
    #[inline(never)]
    fn add_slot(&mut self) -> usize {
        if self.slots.capacity() == 0 {
            // Not four at once: values may be large, and most connections idle.
            self.slots.reserve_exact(1);
        }
        self.slots.push(None);
        self.slots.len() - 1
    }

    /// The value at an index.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&T> {
        self.slots.get(index)?.as_ref()
    }

    /// The value at an index, mutable.
    #[inline]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// Removes a value from its index.
    #[inline]
    pub fn remove(&mut self, index: usize) -> Option<T> {
        let slot = self.slots.get_mut(index).filter(|slot| slot.is_some())?;
        self.free.push(index as u32);
        // Moved once, as nothing happens between here and the caller.
        slot.take()
    }

    /// Drops a value in place, to avoid moving a large one.
    #[inline]
    pub fn discard(&mut self, index: usize) {
        if let Some(taken) = self.slots.get_mut(index).filter(|taken| taken.is_some()) {
            *taken = None;
            self.free.push(index as u32);
        }
    }

    /// Number of values.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether the table is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of indices, used or free: all are below this.
    #[inline]
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Indices and values. Scans all indices, so it is for rare operations such as cancelling.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, value)| Some((index, value.as_ref()?)))
    }

    /// All values, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }

    /// Empties the table.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.free.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_reused_after_its_value_is_removed() {
        let mut slab = Slab::with_capacity(2);
        let (first, second) = (slab.insert('a'), slab.insert('b'));
        assert_ne!(first, second);
        assert_eq!(slab.iter().find(|(_, value)| **value == 'b'), Some((second, &'b')));
        assert_eq!((slab.remove(first), slab.remove(first)), (Some('a'), None));
        assert_eq!((slab.len(), slab.slots()), (1, 2));
        slab.discard(first);
        assert_eq!(slab.insert('c'), first);
        assert_eq!((slab.get(first), slab.get(second), slab.get(7)), (Some(&'c'), Some(&'b'), None));
        slab.discard(second);
        assert!(slab.get_mut(second).is_none() && slab.len() == 1);
        assert_eq!(slab.insert('d'), second);
        slab.iter_mut().for_each(|value| value.make_ascii_uppercase());
        assert_eq!(slab.get(first), Some(&'C'));
        slab.clear();
        assert!(slab.is_empty() && slab.insert('e') == 0);
    }
}
