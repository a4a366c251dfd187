//! A list in the order of additions whose entries are found by name without a search.

use std::collections::BTreeMap;

/// Values with unique names. Adding, finding and removing one takes logarithmic time.
#[derive(Clone)]
pub struct NamedList<N, T> {
    /// The place of each name in `values`.
    places: BTreeMap<N, u64>,
    /// In the order of their addition.
    values: BTreeMap<u64, T>,
    /// The place of the next addition.
    next: u64,
}

impl<N, T> Default for NamedList<N, T> {
    fn default() -> NamedList<N, T> {
        NamedList { places: BTreeMap::new(), values: BTreeMap::new(), next: 0 }
    }
}

impl<N: Ord, T> NamedList<N, T> {
    /// Adds a value behind the others; returns whether its name was free. A value whose name is in
    /// use is dropped.
    pub fn add(&mut self, name: N, value: T) -> bool {
        let is_free = !self.places.contains_key(&name);
        if is_free {
            self.set(name, value);
        }
        is_free
    }

    /// Adds a value behind the others, or replaces the one with its name in its place.
    pub fn set(&mut self, name: N, value: T) {
        let place = *self.places.entry(name).or_insert(self.next);
        self.values.insert(place, value);
        self.next = self.next.max(place.saturating_add(1));
    }

    /// Removes the value with this name.
    pub fn remove(&mut self, name: &N) -> Option<T> {
        self.values.remove(&self.places.remove(name)?)
    }

    /// The value with this name.
    #[must_use]
    pub fn get(&self, name: &N) -> Option<&T> {
        self.values.get(self.places.get(name)?)
    }

    /// All values, in order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.values.values()
    }
}

impl<N: Ord, T> FromIterator<(N, T)> for NamedList<N, T> {
    fn from_iter<I: IntoIterator<Item = (N, T)>>(all: I) -> NamedList<N, T> {
        let mut list = NamedList::default();
        for (name, value) in all {
            list.add(name, value);
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_in_the_order_of_their_addition() {
        let mut list: NamedList<&str, u8> = [("b", 1), ("a", 2), ("c", 3), ("a", 9)].into_iter().collect();
        assert!(!list.add("b", 9) && list.values().eq(&[1, 2, 3]));
        list.set("a", 4);
        assert!(list.get(&"a") == Some(&4) && list.values().eq(&[1, 4, 3]), "in its place");
        assert_eq!((list.remove(&"b"), list.remove(&"b"), list.get(&"b")), (Some(1), None, None));
        assert!(list.add("b", 5) && list.values().eq(&[4, 3, 5]), "behind the others");
    }
}
