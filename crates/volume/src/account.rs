//! What one peer holds of a core's buffers, and how fast it gives them back: the basis of fair
//! shares (`docs/decisions/0033-fair-shares-of-buffers.md`).

use crate::ready::Waker;
use core::net::{IpAddr, Ipv6Addr};
use std::cell::{Cell, RefCell};

/// One peer's account with the pool of the core that serves it.
#[derive(Default)]
pub struct PeerAccount {
    /// Where the peer comes from, if that is an address: of IPv6, the network.
    pub(crate) origin: Option<IpAddr>,
    /// Bytes of payload buffers that the peer's requests hold.
    held_bytes: Cell<usize>,
    /// Bytes of payload that its requests were ever given buffers for.
    granted_bytes: Cell<u64>,
    /// Bytes that the peer has sent or acknowledged, when its connection was last asked.
    moved_bytes: Cell<u64>,
    /// As many had moved when it last stalled.
    moved_before_bytes: Cell<u64>,
    /// The buffer that it waits for, in bytes; 0 if it waits for none.
    wanted_bytes: Cell<usize>,
    /// It was woken for a buffer of so many bytes, which is kept for it until its turn ends.
    pub(crate) promised_bytes: Cell<usize>,
    pub(crate) is_queued: Cell<bool>,
    is_stalled: Cell<bool>,
    is_evicted: Cell<bool>,
    is_closed: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl PeerAccount {
    /// Of a peer that has come from that address.
    pub(crate) fn of_peer_at(address: Option<IpAddr>) -> PeerAccount {
        let origin = address.map(|address| match address {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        });
        PeerAccount { origin, ..PeerAccount::default() }
    }

    /// Bytes of payload buffers that the peer's requests hold.
    #[inline]
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// What the peer has shown to move: it may hold as much, also when buffers are short.
    #[must_use]
    pub fn credit_bytes(&self) -> usize {
        let moved = self.moved_bytes.get().saturating_sub(self.moved_before_bytes.get());
        usize::try_from(moved).unwrap_or(usize::MAX)
    }

    /// Whether the peer has sent or acknowledged as much as its requests were ever given buffers
    /// for: what the kernel keeps for a peer that reads nothing is not taken.
    pub(crate) fn has_taken_all(&self) -> bool {
        self.granted_bytes.get() <= self.moved_bytes.get()
    }

    #[inline]
    pub(crate) fn note_granted(&self, bytes: usize) {
        self.granted_bytes.set(self.granted_bytes.get().saturating_add(bytes as u64));
    }

    /// Notes how many bytes the peer has sent or acknowledged since it connected.
    pub fn set_moved(&self, bytes: u64) {
        self.moved_bytes.set(bytes.max(self.moved_bytes.get()));
    }

    /// Whether one of the peer's requests was refused memory and waits for it.
    #[inline]
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.wanted_bytes.get() > 0
    }

    /// Whether the peer holds buffers and moves nothing.
    #[inline]
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.is_stalled.get()
    }

    /// The peer moves again.
    pub fn resume(&self) {
        self.is_stalled.set(false);
    }

    /// Whether the connection is to be closed for the memory that it holds.
    #[inline]
    #[must_use]
    pub fn is_evicted(&self) -> bool {
        self.is_evicted.get()
    }

    /// The peer is gone: what waits for memory on its behalf is to fail.
    pub fn close(&self) {
        self.is_closed.set(true);
        self.stop_waiting();
    }

    /// Whether the peer is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.get()
    }

    /// Wakes `waker` when memory that the peer waits for may be there, or when its connection is to
    /// be closed.
    pub fn set_waker(&self, waker: &Waker) {
        *self.waker.borrow_mut() = Some(waker.clone());
    }

    pub(crate) fn wake(&self) {
        self.waker.borrow().iter().for_each(Waker::wake);
    }

    #[inline]
    pub(crate) fn add(&self, bytes: usize) {
        self.held_bytes.set(self.held_bytes.get() + bytes);
        if bytes >= self.wanted_bytes.get() {
            self.stop_waiting();
        }
    }

    #[inline]
    pub(crate) fn remove(&self, bytes: usize) {
        self.held_bytes.set(self.held_bytes.get() - bytes);
    }

    pub(crate) fn wanted_bytes(&self) -> usize {
        self.wanted_bytes.get()
    }

    pub(crate) fn wait_for(&self, bytes: usize) {
        self.wanted_bytes.set(bytes);
    }

    #[inline]
    pub(crate) fn stop_waiting(&self) {
        self.wanted_bytes.set(0);
    }

    /// From here on it has moved nothing.
    pub(crate) fn stall(&self) {
        self.is_stalled.set(true);
        self.moved_before_bytes.set(self.moved_bytes.get());
    }

    pub(crate) fn evict(&self) {
        self.is_evicted.set(true);
        self.wake();
    }
}
