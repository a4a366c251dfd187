//! One peer's account with a core's buffer pool: what it holds, and how much data it has
//! transferred. This is the basis of fair shares (`docs/decisions/0033-fair-shares-of-buffers.md`).

use crate::ready::Waker;
use core::net::{IpAddr, Ipv6Addr};
use std::cell::{Cell, RefCell};

/// One peer's account with the pool of the core that serves it.
#[derive(Default)]
pub struct PeerAccount {
    /// The peer's [`peer_network`].
    pub(crate) network: Option<IpAddr>,
    /// Bytes of payload buffers that the peer's requests hold.
    held_bytes: Cell<usize>,
    /// Total bytes of payload buffers ever granted to its requests.
    granted_bytes: Cell<u64>,
    /// Bytes that the peer has sent or acknowledged, as of the last query of its connection.
    moved_bytes: Cell<u64>,
    /// `moved_bytes` when the peer last stalled.
    moved_before_bytes: Cell<u64>,
    /// Size of the buffer that the peer waits for, in bytes; 0: none.
    wanted_bytes: Cell<usize>,
    /// Size of the buffer reserved for the peer, in bytes: the peer was woken to allocate it, and
    /// its turn has not ended.
    pub(crate) reserved_bytes: Cell<usize>,
    pub(crate) is_queued: Cell<bool>,
    /// Bytes of data of its writes that the limits of a volume hold back.
    throttled_bytes: Cell<usize>,
    is_stalled: Cell<bool>,
    is_evicted: Cell<bool>,
    is_closed: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// The addresses that count as one peer: an IPv4 address, or an IPv6 network of 64 bits, in which a
/// host can choose any address.
#[must_use]
pub fn peer_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

impl PeerAccount {
    /// An account of a peer at that address.
    pub(crate) fn of_peer_at(address: Option<IpAddr>) -> PeerAccount {
        PeerAccount { network: address.map(peer_network), ..PeerAccount::default() }
    }

    /// Bytes of payload buffers that the peer's requests hold.
    #[inline]
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// Bytes transferred since the peer last stalled: it may hold as much even when buffers are
    /// short. 0 while its writes are throttled: their buffers stay in use however fast it is.
    #[must_use]
    pub fn credit_bytes(&self) -> usize {
        if self.throttled_bytes.get() > 0 {
            return 0;
        }
        let moved = self.moved_bytes.get().saturating_sub(self.moved_before_bytes.get());
        usize::try_from(moved).unwrap_or(usize::MAX)
    }

    /// Whether the peer has sent or acknowledged all data for which its requests were ever granted
    /// buffers. Replies in the socket's send buffer do not count.
    pub(crate) fn has_taken_all(&self) -> bool {
        self.granted_bytes.get() <= self.moved_bytes.get()
    }

    #[inline]
    pub(crate) fn note_granted(&self, bytes: usize) {
        self.granted_bytes.set(self.granted_bytes.get().saturating_add(bytes as u64));
    }

    /// Sets the number of bytes that the peer has sent or acknowledged since it connected.
    pub fn set_moved(&self, bytes: u64) {
        self.moved_bytes.set(bytes.max(self.moved_bytes.get()));
    }

    /// The limits of a volume hold back a write of the peer with this much data, until
    /// [`PeerAccount::note_released`].
    pub fn note_throttled(&self, bytes: usize) {
        self.throttled_bytes.set(self.throttled_bytes.get().saturating_add(bytes));
    }

    /// A write with this much data that was held back is over or goes on.
    pub fn note_released(&self, bytes: usize) {
        self.throttled_bytes.set(self.throttled_bytes.get().saturating_sub(bytes));
    }

    /// Bytes of payload buffers that the peer itself causes to be held: without those of throttled
    /// writes.
    #[must_use]
    pub fn caused_bytes(&self) -> usize {
        self.held_bytes.get().saturating_sub(self.throttled_bytes.get())
    }

    /// Whether one of the peer's requests waits for memory.
    #[inline]
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.wanted_bytes.get() > 0
    }

    /// Whether the peer holds buffers without transferring data.
    #[inline]
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.is_stalled.get()
    }

    /// Records that the peer transfers data again.
    pub fn resume(&self) {
        self.is_stalled.set(false);
    }

    /// Whether the connection must be closed because of the memory that it holds.
    #[inline]
    #[must_use]
    pub fn is_evicted(&self) -> bool {
        self.is_evicted.get()
    }

    /// Records that the peer has disconnected: its requests that wait for memory fail.
    pub fn close(&self) {
        self.is_closed.set(true);
        self.stop_waiting();
    }

    /// Whether the peer has disconnected.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.get()
    }

    /// Wakes `waker` when the peer should retry an allocation, or when its connection must be
    /// closed.
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

    pub(crate) fn requested_bytes(&self) -> usize {
        self.wanted_bytes.get()
    }

    pub(crate) fn wait_for(&self, bytes: usize) {
        self.wanted_bytes.set(bytes);
    }

    #[inline]
    pub(crate) fn stop_waiting(&self) {
        self.wanted_bytes.set(0);
    }

    /// Records that the peer is stalled, and starts to count its progress anew.
    pub(crate) fn stall(&self) {
        self.is_stalled.set(true);
        self.moved_before_bytes.set(self.moved_bytes.get());
    }

    pub(crate) fn evict(&self) {
        self.is_evicted.set(true);
        self.wake();
    }
}
