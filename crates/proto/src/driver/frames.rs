//! Received and outgoing frames, between a session and its driver.
//!
//! A frame here begins after the Ethernet header, which belongs to the driver. A received frame is
//! in a [`Chunk`], from which its payload can be borrowed. An outgoing frame has a short head by
//! value and payload by reference, as in [`crate::driver::outbox`].

use blockmux_volume::{Chunk, Seg, SgList};
pub use blockmux_wire::ethernet::{EtherType, Mac};
use std::collections::VecDeque;

/// Identifies a network interface of a session: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// Properties of a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePortInfo {
    /// MAC address.
    pub mac: Mac,
    /// The maximum length of a frame after the Ethernet header, in bytes.
    pub mtu: u32,
    /// The number of maximum-size frames that the receive ring holds.
    pub buffers: u32,
    /// Whether the link is up.
    pub is_up: bool,
}

/// A station: a peer's MAC address at one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Station {
    /// The local port.
    pub port: PortId,
    /// The peer's MAC address.
    pub mac: Mac,
}

/// A received frame: the first unread bytes of a chunk. The link may pad a short frame with zeroes.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    /// The sender according to the frame, which is not authenticated.
    pub from: Station,
    chunk: &'a Chunk,
    len: usize,
}

impl<'a> Frame<'a> {
    /// A frame of the first `len` unread bytes of `chunk`, or fewer if there are fewer.
    #[must_use]
    pub fn new(from: Station, chunk: &'a Chunk, len: usize) -> Frame<'a> {
        Frame { from, chunk, len: len.min(chunk.unread().len()) }
    }

    /// The bytes of the frame.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.chunk.unread().get(..self.len).unwrap_or_default()
    }

    /// Borrows `len` bytes at `offset`, which stay valid after the frame is dropped; `None` if they
    /// are outside the frame.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Seg> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.chunk.slice(offset, len))
    }
}

/// A frame to send.
#[derive(Debug)]
pub struct OutFrame {
    /// The receiver.
    pub to: Station,
    head: [u8; MAX_HEAD],
    head_len: u8,
    /// The payload, after the head.
    pub payload: SgList,
}

impl OutFrame {
    /// A frame with this head and payload.
    ///
    /// # Panics
    /// If the head is longer than [`MAX_HEAD`].
    #[inline]
    #[must_use]
    pub fn new(to: Station, head: &[u8], payload: SgList) -> OutFrame {
        let mut bytes = [0; MAX_HEAD];
        bytes.get_mut(..head.len()).expect("heads are short").copy_from_slice(head);
        OutFrame { to, head: bytes, head_len: head.len() as u8, payload }
    }

    /// The head.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &[u8] {
        self.head.get(..usize::from(self.head_len)).unwrap_or_default()
    }

    /// Length in bytes, without the Ethernet header.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.head_len).saturating_add(self.payload.len())
    }

    /// Whether the frame is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of its bytes, for tests and drivers without gather I/O.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = self.head().to_vec();
        bytes.extend(self.payload.to_vec());
        bytes
    }
}

/// The maximum length of a head, in bytes.
pub const MAX_HEAD: usize = 32;

/// A queue of outgoing frames. It allocates nothing once it has reached its usual depth.
pub type FrameOutbox = VecDeque<OutFrame>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_borrows_only_its_own_bytes() {
        let chunk = Chunk::from_slice(b"headpayload, and the next frame");
        let from = Station { port: PortId(0), mac: Mac::default() };
        let frame = Frame::new(from, &chunk, 11);
        assert_eq!(frame.bytes(), b"headpayload");
        assert_eq!(frame.slice(4, 7).unwrap().to_vec(), b"payload");
        assert!(frame.slice(4, 8).is_none() && frame.slice(usize::MAX, 1).is_none());
    }

    #[test]
    fn a_frame_is_sent_as_its_head_and_its_payload() {
        let mut outbox = FrameOutbox::default();
        let to = Station { port: PortId(1), mac: Mac::BROADCAST };
        outbox.push_back(OutFrame::new(to, b"head", SgList::one(Seg::from_slice(b"payload"))));
        let frame = outbox.pop_front().unwrap();
        assert_eq!((frame.to, frame.len(), frame.to_vec()), (to, 11, b"headpayload".to_vec()));
        assert!(outbox.is_empty());
    }
}
