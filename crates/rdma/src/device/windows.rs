//! Memory windows of a connection: which are bound to which memory.

use blockmux_proto::rdma::{Remote, RemoteRights, Stag};
use blockmux_volume::{Memory, Seg, SgList};
use std::collections::BTreeMap;

/// The windows of one queue pair.
#[derive(Default)]
pub(super) struct Windows {
    windows: Vec<MemoryWindow>,
    /// Numbers of windows that are not in use.
    free: Vec<u32>,
    /// Numbers by the upper 24 bits of keys, which a window keeps.
    by_index: BTreeMap<u32, u32>,
}

struct MemoryWindow {
    /// The key that it has, or had last.
    key: u32,
    opened: Option<OpenMemory>,
    /// The key that this side has closed last. Until then the peer may have invalidated it, and
    /// the message that did so may be reported afterwards.
    closed: Option<u32>,
}

/// Memory that a peer may reach.
struct OpenMemory {
    /// The session's memory.
    local: SgList,
    /// A copy in one piece, if the session's is not.
    copy: Option<Seg>,
    access: RemoteRights,
    /// The peer's access ends: the key is no longer the session's.
    is_closing: bool,
}

/// A window to bind.
pub(super) struct Binding {
    pub(super) window: u32,
    pub(super) key: u32,
    pub(super) memory: Seg,
    pub(super) remote: Remote,
}

impl Windows {
    /// Windows with these keys, none of which is in use.
    pub(super) fn new(keys: impl Iterator<Item = u32>) -> Windows {
        let windows: Vec<_> = keys.map(|key| MemoryWindow { key, opened: None, closed: None }).collect();
        let numbers = (0_u32..).zip(&windows);
        let by_index = numbers.map(|(number, window)| (window.key >> 8, number)).collect();
        let free = (0..u32::try_from(windows.len()).unwrap_or(u32::MAX)).rev().collect();
        Windows { windows, free, by_index }
    }

    /// Opens memory by a window; `None` if all are in use, which leaves `local` in place.
    pub(super) fn open(&mut self, local: &mut SgList, access: RemoteRights) -> Option<Binding> {
        let number = self.free.pop()?;
        let window = self.windows.get_mut(usize::try_from(number).ok()?)?;
        let local = std::mem::take(local);
        // A window is bound to one piece of memory, and RAM volumes are not registered.
        let (memory, copy) = match local.segs() {
            [whole] if whole.is_private() => (whole.clone(), None),
            _ => {
                let copy = Memory::from_heap(local.len()).seg(0, local.len());
                if access == RemoteRights::RemoteRead {
                    local.copy_to_list(&SgList::one(copy.clone()));
                }
                (copy.clone(), Some(copy))
            }
        };
        window.key = next_key(window.key);
        let address = memory.as_ptr().addr() as u64;
        let remote = Remote { stag: Stag(window.key), address, len: u32::try_from(memory.len()).ok()? };
        window.opened = Some(OpenMemory { local, copy, access, is_closing: false });
        Some(Binding { window: number, key: window.key, memory, remote })
    }

    /// The peer has invalidated a key; `false` if no memory is open by it, nor was until this side
    /// closed it.
    pub(super) fn on_invalidated(&mut self, key: u32) -> bool {
        let Some(number) = self.number(key) else {
            let mut closed = self.windows.iter_mut().map(|window| &mut window.closed);
            return closed.any(|closed| closed.take_if(|closed| *closed == key).is_some());
        };
        // One that this side closes, too, is in use until that is done.
        if self.opened(number).is_some_and(|opened| !opened.is_closing) {
            self.free_window(number);
        }
        true
    }

    /// Begins to close a window, and returns its number; `None` if no memory is open by that key.
    pub(super) fn close(&mut self, stag: Stag) -> Option<u32> {
        let number = self.number(stag.0)?;
        let opened = self.opened(number).filter(|opened| !opened.is_closing)?;
        opened.is_closing = true;
        // What arrives from now on is not the session's.
        opened.copy_back();
        Some(number)
    }

    /// A window that was being closed is free, and has a new key.
    pub(super) fn on_closed(&mut self, number: u32, key: u32) {
        self.free_window(number);
        let window = usize::try_from(number).ok().and_then(|number| self.windows.get_mut(number));
        if let Some(window) = window {
            self.by_index.remove(&(window.key >> 8));
            self.by_index.insert(key >> 8, number);
            window.closed = Some(window.key);
            window.key = key;
        }
    }

    /// Closes all, because the queue pair is destroyed.
    pub(super) fn close_all(&mut self) {
        *self = Windows::default();
    }

    fn number(&self, key: u32) -> Option<u32> {
        let number = *self.by_index.get(&(key >> 8))?;
        let window = self.windows.get(usize::try_from(number).ok()?)?;
        (window.key == key && window.opened.is_some()).then_some(number)
    }

    fn opened(&mut self, number: u32) -> Option<&mut OpenMemory> {
        self.windows.get_mut(usize::try_from(number).ok()?)?.opened.as_mut()
    }

    fn free_window(&mut self, number: u32) {
        let window = usize::try_from(number).ok().and_then(|number| self.windows.get_mut(number));
        let Some(mut opened) = window.and_then(|window| window.opened.take()) else { return };
        if !opened.is_closing {
            opened.copy_back();
        }
        self.free.push(number);
    }
}

impl OpenMemory {
    /// Gives the session what the peer has written.
    fn copy_back(&mut self) {
        if let (Some(copy), RemoteRights::RemoteWrite) = (self.copy.take(), self.access) {
            SgList::one(copy).copy_to_list(&self.local);
        }
    }
}

/// The key of the next use: other low 8 bits, which belong to this side.
fn next_key(key: u32) -> u32 {
    key & !0xff | key.wrapping_add(1) & 0xff
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(count: u32) -> Windows {
        Windows::new((1..=count).map(|index| index << 8 | 0xff))
    }

    fn memory(pieces: &[&[u8]]) -> SgList {
        let mut list = SgList::default();
        pieces.iter().for_each(|piece| list.push(Seg::from_slice(piece)));
        list
    }

    #[test]
    fn a_window_has_another_key_with_each_use() {
        let mut windows = windows(1);
        let mut keys = Vec::new();
        for _ in 0..3 {
            let binding = windows.open(&mut memory(&[b"data"]), RemoteRights::RemoteRead).unwrap();
            assert!(windows.open(&mut memory(&[b"more"]), RemoteRights::RemoteRead).is_none());
            keys.push(binding.key);
            assert!(windows.on_invalidated(binding.key));
            assert!(!windows.on_invalidated(binding.key), "it is closed");
        }
        assert_eq!(keys, [0x100, 0x101, 0x102]);
    }

    #[test]
    fn a_window_that_is_being_closed_is_not_free() {
        let mut windows = windows(1);
        let binding = windows.open(&mut memory(&[b"data"]), RemoteRights::RemoteRead).unwrap();
        assert_eq!(windows.close(Stag(binding.key)), Some(binding.window));
        assert_eq!(windows.close(Stag(binding.key)), None);
        let mut waiting = memory(&[b"more"]);
        assert!(windows.open(&mut waiting, RemoteRights::RemoteRead).is_none());
        assert_eq!(waiting.to_vec(), b"more");
        // The peer has invalidated it meanwhile.
        assert!(windows.on_invalidated(binding.key));
        assert!(windows.open(&mut waiting, RemoteRights::RemoteRead).is_none());
        windows.on_closed(binding.window, 0x700);
        let binding = windows.open(&mut waiting, RemoteRights::RemoteRead).unwrap();
        assert_eq!(binding.key, 0x701);
        assert!(windows.on_invalidated(0x701));
    }

    #[test]
    fn an_invalidation_may_be_reported_once_after_its_window_was_closed() {
        let mut windows = windows(2);
        let other = windows.open(&mut memory(&[b"other"]), RemoteRights::RemoteRead).unwrap();
        let binding = windows.open(&mut memory(&[b"data"]), RemoteRights::RemoteRead).unwrap();
        assert_eq!(windows.close(Stag(binding.key)), Some(binding.window));
        windows.on_closed(binding.window, 0x700);
        let next = windows.open(&mut memory(&[b"more"]), RemoteRights::RemoteRead).unwrap();
        assert_eq!((next.window, next.key), (binding.window, 0x701));
        assert!(windows.on_invalidated(binding.key));
        assert!(!windows.on_invalidated(binding.key), "it was reported");
        assert!(!windows.on_invalidated(0x700), "nothing was open by it");
        for open in [other, next] {
            assert_eq!(windows.close(Stag(open.key)), Some(open.window), "others stay open");
        }
    }

    #[test]
    fn scattered_memory_is_opened_as_a_copy() {
        let mut windows = windows(2);
        let read = windows.open(&mut memory(&[b"ab", b"cde"]), RemoteRights::RemoteRead).unwrap();
        assert_eq!((read.memory.to_vec(), read.remote.len), (b"abcde".to_vec(), 5));
        let target = memory(&[b"--", b"---"]);
        let write = windows.open(&mut target.clone(), RemoteRights::RemoteWrite).unwrap();
        write.memory.copy_from(b"vwxyz");
        assert_eq!(target.to_vec(), b"-----");
        assert!(windows.on_invalidated(write.key));
        assert_eq!(target.to_vec(), b"vwxyz");
        let write = windows.open(&mut target.clone(), RemoteRights::RemoteWrite).unwrap();
        write.memory.copy_from(b"12345");
        let number = windows.close(Stag(write.key)).unwrap();
        write.memory.copy_from(b"later");
        windows.on_closed(number, write.key);
        assert_eq!(target.to_vec(), b"12345");
    }
}
