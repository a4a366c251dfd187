//! Which entries of a ring's table of registered buffers are in use.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// The entries of a table.
pub(super) struct BufferTable {
    len: u16,
    /// Ranges in use, in order.
    used: RefCell<Vec<Range<u16>>>,
}

/// Consecutive entries of a ring's table of registered buffers. Dropping it lets others use them.
pub struct BufferEntries {
    table: Rc<BufferTable>,
    range: Range<u16>,
}

impl BufferTable {
    /// A table of `len` entries that nobody uses.
    pub(super) fn new(len: u16) -> Rc<BufferTable> {
        Rc::new(BufferTable { len, used: RefCell::default() })
    }

    /// The first `count` consecutive entries that are free; `None` if there are not so many.
    pub(super) fn reserve(self: &Rc<BufferTable>, count: u16) -> Option<BufferEntries> {
        let mut used = self.used.borrow_mut();
        let (mut start, mut at) = (0, used.len());
        for (index, range) in used.iter().enumerate() {
            if range.start - start >= count {
                at = index;
                break;
            }
            start = range.end;
        }
        let end = start.checked_add(count).filter(|end| *end <= self.len)?;
        used.insert(at, start..end);
        Some(BufferEntries { table: self.clone(), range: start..end })
    }
}

impl BufferEntries {
    /// Index of the entry with this number among them.
    #[must_use]
    pub fn index(&self, nth: u16) -> Option<u16> {
        self.range.start.checked_add(nth).filter(|index| *index < self.range.end)
    }
}

impl Drop for BufferEntries {
    fn drop(&mut self) {
        self.table.used.borrow_mut().retain(|range| *range != self.range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_used_by_one_owner_and_again_when_it_is_gone() {
        let table = BufferTable::new(10);
        let first = table.reserve(4).unwrap();
        let second = table.reserve(4).unwrap();
        assert_eq!((first.index(3), first.index(4), second.index(0)), (Some(3), None, Some(4)));
        assert!(table.reserve(3).is_none());
        drop(first);
        let third = table.reserve(3).unwrap();
        assert_eq!(third.index(0), Some(0));
        let fourth = table.reserve(2).unwrap();
        assert_eq!(fourth.index(1), Some(9));
        assert_eq!(table.reserve(1).unwrap().index(0), Some(3));
        assert!(table.reserve(u16::MAX).is_none());
    }
}
