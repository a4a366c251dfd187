//! Frames between a session and its driver: what came, and what is to go.
//!
//! A frame here is what follows the Ethernet header, which is the driver's. Received frames lie in
//! a [`Chunk`], so that payload is lent on from there; sent ones have a short head by value and
//! payload by reference, as in [`crate::outbox`].

use blockmux_volume::{Chunk, Seg, SgList};
pub use blockmux_wire::ethernet::{EtherType, Mac};
use std::collections::VecDeque;

/// A network interface: its place among those of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// What a network interface is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePortInfo {
    /// Its own address.
    pub mac: Mac,
    /// The most bytes behind the Ethernet header.
    pub mtu: u32,
    /// How many of the largest frames can wait to be received before further ones are lost.
    pub buffers: u32,
    /// Whether frames can be sent now.
    pub is_up: bool,
}

/// Somebody at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Station {
    /// On our side.
    pub port: PortId,
    /// On theirs.
    pub mac: Mac,
}

/// A frame that came: the first bytes of what is unread in a chunk. Shorter frames than the link
/// has may have zeroes behind them.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    /// Who sent it, or says so.
    pub from: Station,
    chunk: &'a Chunk,
    len: usize,
}

impl<'a> Frame<'a> {
    /// The first `len` unread bytes of `chunk`, or fewer if there are fewer.
    #[must_use]
    pub fn new(from: Station, chunk: &'a Chunk, len: usize) -> Frame<'a> {
        Frame { from, chunk, len: len.min(chunk.unread().len()) }
    }

    /// All of it.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.chunk.unread().get(..self.len).unwrap_or_default()
    }

    /// Lends `len` bytes at `offset`, which stay valid after the frame; `None` if it has no such
    /// bytes.
    #[inline]
    #[must_use]
    pub fn lend(&self, offset: usize, len: usize) -> Option<Seg> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.chunk.lend(offset, len))
    }
}

/// A frame to send.
#[derive(Debug)]
pub struct OutFrame {
    /// To whom.
    pub to: Station,
    head: [u8; MAX_HEAD],
    head_len: u8,
    /// What follows the head.
    pub payload: SgList,
}

impl OutFrame {
    /// What it begins with.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &[u8] {
        self.head.get(..usize::from(self.head_len)).unwrap_or_default()
    }

    /// In bytes, without the Ethernet header.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.head_len).saturating_add(self.payload.len())
    }

    /// Whether it has no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of its bytes: for tests and drivers without gathering.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = self.head().to_vec();
        bytes.extend(self.payload.to_vec());
        bytes
    }
}

/// The longest head, in bytes.
pub const MAX_HEAD: usize = 32;

/// A queue of frames to send. Nothing is allocated once it has seen its usual depth.
#[derive(Default)]
pub struct FrameOutbox(VecDeque<OutFrame>);

impl FrameOutbox {
    /// Appends a frame.
    ///
    /// # Panics
    /// If the head is longer than [`MAX_HEAD`].
    #[inline]
    pub fn push(&mut self, to: Station, head: &[u8], payload: SgList) {
        let mut bytes = [0; MAX_HEAD];
        bytes.get_mut(..head.len()).expect("heads are short").copy_from_slice(head);
        self.0.push_back(OutFrame { to, head: bytes, head_len: head.len() as u8, payload });
    }

    /// The frames in order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &OutFrame> {
        self.0.iter()
    }

    /// The next frame.
    #[inline]
    #[must_use]
    pub fn front(&self) -> Option<&OutFrame> {
        self.0.front()
    }

    /// Removes the next frame.
    #[inline]
    pub fn pop(&mut self) -> Option<OutFrame> {
        self.0.pop_front()
    }

    /// How many wait.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops the frames that are not to be sent any more.
    pub fn retain(&mut self, is_kept: impl FnMut(&OutFrame) -> bool) {
        self.0.retain(is_kept);
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_lends_its_own_bytes_and_no_others() {
        let chunk = Chunk::from_slice(b"headpayload, and the next frame");
        let from = Station { port: PortId(0), mac: Mac::default() };
        let frame = Frame::new(from, &chunk, 11);
        assert_eq!(frame.bytes(), b"headpayload");
        assert_eq!(frame.lend(4, 7).unwrap().to_vec(), b"payload");
        assert!(frame.lend(4, 8).is_none() && frame.lend(usize::MAX, 1).is_none());
    }

    #[test]
    fn a_frame_is_sent_as_its_head_and_its_payload() {
        let mut outbox = FrameOutbox::default();
        let to = Station { port: PortId(1), mac: Mac::BROADCAST };
        outbox.push(to, b"head", SgList::one(Seg::from_slice(b"payload")));
        let frame = outbox.pop().unwrap();
        assert_eq!((frame.to, frame.len(), frame.to_vec()), (to, 11, b"headpayload".to_vec()));
        assert!(outbox.is_empty());
    }
}
