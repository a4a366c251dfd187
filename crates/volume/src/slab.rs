//! A table of what is in flight.

/// A table that gives each value a place, which is often its tag. Places are used again, so that it
/// grows to the most that was ever in it and then allocates no more.
pub struct Slab<T> {
    /// As many as were ever in use at a time, so that the memory of the others is not touched.
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// An empty table that allocates nothing before more than `capacity` values are in it.
    #[must_use]
    pub fn with_capacity(capacity: u32) -> Slab<T> {
        let capacity = capacity as usize;
        Slab { places: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Takes a free place, or makes one; the caller bounds how many are taken, below 2^32.
    #[inline]
    pub fn insert(&mut self, value: T) -> usize {
        if let Some(place) = self.free.pop()
            && let Some(free) = self.places.get_mut(place as usize)
        {
            *free = Some(value);
            return place as usize;
        }
        self.places.push(Some(value));
        self.places.len() - 1
    }

    /// What is in a place.
    #[inline]
    #[must_use]
    pub fn get(&self, place: usize) -> Option<&T> {
        self.places.get(place)?.as_ref()
    }

    /// What is in a place, to be changed.
    #[inline]
    pub fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.places.get_mut(place)?.as_mut()
    }

    /// Takes a value out of its place.
    #[inline]
    pub fn remove(&mut self, place: usize) -> Option<T> {
        let value = self.places.get_mut(place)?.take()?;
        self.free.push(place as u32);
        Some(value)
    }

    /// Drops a value where it is, if it is too large to be moved for nothing.
    #[inline]
    pub fn discard(&mut self, place: usize) {
        if let Some(taken) = self.places.get_mut(place).filter(|taken| taken.is_some()) {
            *taken = None;
            self.free.push(place as u32);
        }
    }

    /// How many values there are.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether there is none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many places there are, taken or free: all are below.
    #[inline]
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Places and values. It looks at all places, so it is for rare things like cancelling.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.places.iter().enumerate().filter_map(|(place, value)| Some((place, value.as_ref()?)))
    }

    /// All values, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }

    /// Empties the table.
    pub fn clear(&mut self) {
        self.places.clear();
        self.free.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_used_again_after_its_value_left() {
        let mut slab = Slab::with_capacity(2);
        let (first, second) = (slab.insert('a'), slab.insert('b'));
        assert_ne!(first, second);
        assert_eq!(slab.iter().find(|(_, value)| **value == 'b'), Some((second, &'b')));
        assert_eq!((slab.remove(first), slab.remove(first)), (Some('a'), None));
        assert_eq!((slab.len(), slab.places()), (1, 2));
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
