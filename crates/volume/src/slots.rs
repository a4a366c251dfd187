//! What a channel remembers of its I/O in flight.

use crate::io::Tag;

/// A table whose index is the tag below. It has room for the channel's depth from the start, so that a request
/// allocates nothing.
pub(crate) struct Slots<T> {
    /// As many as were ever in use at a time, so that the memory of the others is not touched.
    slots: Vec<Option<T>>,
    free: Vec<u32>,
    depth: u32,
}

impl<T> Slots<T> {
    pub(crate) fn new(depth: u32) -> Slots<T> {
        Slots { slots: Vec::with_capacity(depth as usize), free: Vec::with_capacity(depth as usize), depth }
    }

    #[inline]
    pub(crate) fn insert(&mut self, value: T) -> Tag {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = self.slots.len() as u32;
            assert!(
                index < self.depth,
                "no more I/O in flight than the depth that the channel was opened with"
            );
            self.slots.push(None);
            index
        });
        self.slots[index as usize] = Some(value);
        Tag(index.into())
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, tag: Tag) -> &mut T {
        self.slots[tag.0 as usize].as_mut().expect("the tag is in flight")
    }

    #[inline]
    pub(crate) fn remove(&mut self, tag: Tag) -> T {
        let value = self.slots[tag.0 as usize].take().expect("a request completes once");
        self.free.push(tag.0 as u32);
        value
    }

    /// The first that `is_it`; looks at all, so for rare things like cancelling.
    pub(crate) fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<Tag> {
        let index = self.slots.iter().position(|slot| slot.as_ref().is_some_and(&is_it))?;
        Some(Tag(index as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_after_its_value_left() {
        let mut slots = Slots::new(2);
        let (first, second) = (slots.insert('a'), slots.insert('b'));
        assert_ne!(first, second);
        assert_eq!(slots.find(|&value| value == 'b'), Some(second));
        assert_eq!(slots.remove(first), 'a');
        assert_eq!(slots.insert('c'), first);
        assert_eq!(slots.find(|&value| value == 'a'), None);
        assert_eq!(*slots.get_mut(first), 'c');
    }
}
