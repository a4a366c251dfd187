//! A core's buffers, allocated by size and returned by dropping them.
//!
//! Sizes are powers of two from 4 KiB to [`MAX_TRANSFER`], page-aligned for direct I/O. Returned
//! buffers are cached for reuse, up to a limit. Buffers in use count against the pool's limit,
//! which bounds the memory that all peers of a core can make it hold.
//!
//! A peer decides how long its payload buffers are in use: it may send the rest of a write, or read
//! its data, as late as it likes. So each peer has an account ([`Pool::for_peer`]), and its share
//! depends on the free memory, on the memory that it holds and on the data that it has transferred
//! (`docs/decisions/0033-fair-shares-of-buffers.md`):
//!
//! ```text
//!   0                          3/8                        3/4            limit
//!   │ any peer                  │ peers that move data     │ receive buffers │
//! ```
//! The last quarter lets connections always receive, so they notice when their peer has
//! disconnected.

use crate::account::PeerAccount;
use crate::buf::Memory;
use crate::volume::MAX_TRANSFER;
use core::net::IpAddr;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A core's buffers; a clone is another handle to the same pool and account.
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
    /// The account charged for payload; `None` if it belongs to no peer.
    account: Option<Rc<PeerAccount>>,
}

pub(crate) type PoolHandle = Weak<Inner>;

pub(crate) struct Inner {
    free: [RefCell<Vec<Memory>>; CLASSES],
    out_bytes: Cell<usize>,
    /// Bytes of buffers in use for payload.
    payload_out_bytes: Cell<usize>,
    /// The account charged for payload that belongs to no peer.
    unowned_account: Rc<PeerAccount>,
    /// Bytes of returned buffers kept for reuse.
    cached_bytes: Cell<usize>,
    /// Bytes returned to the heap since it was last trimmed.
    freed_bytes: Cell<usize>,
    limit_bytes: usize,
    /// Peers that wait for memory, each once, by buffer size.
    waiting: [RefCell<Waiting>; CLASSES],
    /// Number of peers that wait.
    waiting_count: Cell<usize>,
    /// Number of times that a peer started to wait.
    tickets: Cell<u64>,
    /// Bytes reserved for peers that were woken.
    reserved_bytes: Cell<usize>,
    /// Whether the next returned buffer is offered to the newest peer first.
    favours_newest: Cell<bool>,
    /// Peers that hold memory without transferring data; some may have resumed since.
    stalled: RefCell<Vec<Rc<PeerAccount>>>,
    /// Those of evicted peers.
    evicted_networks: RefCell<BTreeSet<IpAddr>>,
}

/// Peers that wait for buffers of one size.
#[derive(Default)]
struct Waiting {
    peers: BTreeMap<Ticket, Rc<PeerAccount>>,
    /// The ticket from which the round-robin continues.
    last_checked: Ticket,
}

/// Rank of a waiting peer: whether no peer at its address was evicted; whether it had transferred
/// all data that it was granted buffers for; and when it started to wait.
type Ticket = (bool, bool, u64);

impl Waiting {
    /// The newest peer of the highest rank, or the next one round-robin.
    fn next(&mut self, newest: bool) -> Option<(Ticket, Rc<PeerAccount>)> {
        if newest {
            return self.peers.last_key_value().map(|(ticket, account)| (*ticket, account.clone()));
        }
        let after = self.peers.range((Bound::Excluded(self.last_checked), Bound::Unbounded)).next();
        let (ticket, account) = after.or_else(|| self.peers.first_key_value())?;
        self.last_checked = *ticket;
        Some((*ticket, account.clone()))
    }
}

/// Whether payload may be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Granted,
    /// No, until other peers return buffers.
    Full,
    /// No, until this peer returns buffers.
    OverShare,
}

/// Bytes that all pools of this process have from the system: buffers in use and kept for reuse.
#[must_use]
pub fn bytes_from_system() -> usize {
    FROM_SYSTEM_BYTES.load(Ordering::Relaxed)
}

/// Changes only when a pool grows or shrinks, not with each allocation.
static FROM_SYSTEM_BYTES: AtomicUsize = AtomicUsize::new(0);

impl Pool {
    /// A pool with at most `limit_bytes` in use.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Pool {
        let inner = Inner {
            free: std::array::from_fn(|_| RefCell::new(Vec::new())),
            out_bytes: Cell::new(0),
            payload_out_bytes: Cell::new(0),
            unowned_account: Rc::default(),
            cached_bytes: Cell::new(0),
            freed_bytes: Cell::new(0),
            limit_bytes,
            waiting: std::array::from_fn(|_| RefCell::default()),
            waiting_count: Cell::new(0),
            tickets: Cell::new(0),
            reserved_bytes: Cell::new(0),
            favours_newest: Cell::new(false),
            stalled: RefCell::default(),
            evicted_networks: RefCell::default(),
        };
        Pool { inner: Rc::new(inner), account: None }
    }

    /// A handle for a new peer, with its own account.
    #[must_use]
    pub fn for_peer(&self) -> Pool {
        self.for_peer_at(None)
    }

    /// A handle for a new peer at that address, with its own account.
    #[must_use]
    pub fn for_peer_at(&self, address: Option<IpAddr>) -> Pool {
        Pool { inner: self.inner.clone(), account: Some(Rc::new(PeerAccount::of_peer_at(address))) }
    }

    /// The account of this handle's peer.
    #[inline]
    #[must_use]
    pub fn account(&self) -> Option<&PeerAccount> {
        self.account.as_deref()
    }

    /// A buffer of at least `len` bytes with undefined content. `None` when the pool's limit is
    /// reached: retry after I/O has completed. For data of requests use [`Pool::take_payload`].
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take(&self, len: usize) -> Option<Memory> {
        self.take_class(class_of(len))
    }

    /// A buffer for the data of a request. `None` when payload, or this handle's peer, has used its
    /// share.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take_payload(&self, len: usize) -> Option<Memory> {
        let class = class_of(len);
        let size = size_of_class(class);
        if self.inner.admits(self.account(), size) != Admission::Granted {
            return None;
        }
        let memory = self.take_class(class)?;
        let account = self.account.as_ref().unwrap_or(&self.inner.unowned_account);
        account.add(size);
        account.note_granted(len);
        if size >= account.reserved_bytes.get() {
            self.inner.end_promise(account);
        }
        memory.charge(Some(account.clone()));
        self.inner.payload_out_bytes.set(self.inner.payload_out_bytes.get() + size);
        Some(memory)
    }

    /// A buffer for the data of a request that can wait. If there is none, the peer is woken when
    /// there may be one, and peers that hold buffers without transferring data are disconnected.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take_payload_or_wait(&self, len: usize) -> Option<Memory> {
        let memory = self.take_payload(len);
        if memory.is_none() {
            self.wait(size_of_class(class_of(len)));
        }
        memory
    }

    #[cold]
    fn wait(&self, size: usize) {
        let Some(account) = &self.account else { return };
        self.inner.end_promise(account);
        if account.is_closed() {
            return;
        }
        account.wait_for(size);
        if self.inner.admits(Some(account), size) == Admission::OverShare {
            // The peer itself holds what it waits for.
            return;
        }
        if !account.is_queued.replace(true) {
            let number = self.inner.tickets.get() + 1;
            self.inner.tickets.set(number);
            let is_suspect = account
                .network
                .is_some_and(|network| self.inner.evicted_networks.borrow().contains(&network));
            let ticket = (!is_suspect, account.has_taken_all(), number);
            self.inner.waiting[class_of(size)].borrow_mut().peers.insert(ticket, account.clone());
            self.inner.waiting_count.set(self.inner.waiting_count.get() + 1);
        }
        self.inner.evict_stalled();
    }

    /// Ends the turn of this handle's peer: memory that was reserved for it and not allocated
    /// becomes free.
    #[inline]
    pub fn end_turn(&self) {
        if let Some(account) = self.account().filter(|account| account.reserved_bytes.get() > 0) {
            let unused = account.reserved_bytes.get();
            self.inner.end_promise(account);
            self.inner.wake_waiting(unused);
        }
    }

    /// Records that this handle's peer holds buffers without transferring data. The peer is
    /// disconnected when others wait for that memory, the largest such peer first, and has no
    /// credit until it transfers data again.
    pub fn note_stalled(&self) {
        let Some(account) = &self.account else { return };
        let mut stalled = self.inner.stalled.borrow_mut();
        if !stalled.iter().any(|other| Rc::ptr_eq(other, account)) {
            stalled.push(account.clone());
        }
        drop(stalled);
        account.stall();
        self.inner.evict_stalled();
    }

    /// Whether [`Pool::take_payload`] of `len` bytes can succeed, now or later.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[must_use]
    pub fn could_hold(&self, len: usize) -> bool {
        let limit = self.inner.limit_bytes;
        let most = if len > SHORT_PAYLOAD { limit / 2 } else { limit - limit / 4 };
        size_of_class(class_of(len)) <= most
    }

    /// Bytes of payload that one peer should have in flight, unless a single request is larger. One
    /// peer with this share cannot exhaust the pool.
    #[inline]
    #[must_use]
    pub fn peer_share(&self) -> usize {
        self.inner.limit_bytes / 8
    }

    /// Whether the next long payload may have to wait, so that peers should hold only little
    /// memory.
    #[inline]
    #[must_use]
    pub fn is_short(&self) -> bool {
        let most = self.inner.payload_bytes();
        self.inner.free_bytes() <= most / 2 + (most / 4).min(MAX_TRANSFER as usize)
    }

    #[inline]
    fn take_class(&self, class: usize) -> Option<Memory> {
        let (inner, size) = (&self.inner, size_of_class(class));
        // The limit may be `usize::MAX`.
        let out = inner.out_bytes.get().checked_add(size)?;
        if out > inner.limit_bytes {
            return None;
        }
        let free = inner.free[class].borrow_mut().pop();
        let memory = match free {
            Some(memory) => {
                inner.cached_bytes.set(inner.cached_bytes.get() - size);
                memory
            }
            // The system may have less memory than the limit. That is not fatal: other buffers will
            // be returned.
            None => {
                let memory = Memory::for_pool(size, Rc::downgrade(inner))?;
                FROM_SYSTEM_BYTES.fetch_add(size, Ordering::Relaxed);
                memory
            }
        };
        inner.out_bytes.set(out);
        Some(memory)
    }

    /// Bytes in use now.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.inner.out_bytes.get()
    }

    /// Whether so much was returned to the heap since [`Pool::note_trimmed`] that the heap should
    /// be trimmed.
    #[inline]
    #[must_use]
    pub fn should_trim(&self) -> bool {
        self.inner.freed_bytes.get() >= TRIM_BYTES
    }

    /// Records that the heap was trimmed.
    pub fn note_trimmed(&self) {
        self.inner.freed_bytes.set(0);
    }

    /// The limit of bytes in use.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.inner.limit_bytes
    }
}

impl Inner {
    /// Payload's share of the pool, in bytes.
    #[inline]
    fn payload_bytes(&self) -> usize {
        self.limit_bytes - self.limit_bytes / 4
    }

    /// The free part of payload's share. Receive buffers are not counted: peers that wait for
    /// payload allocate and return them in each turn.
    #[inline]
    fn free_bytes(&self) -> usize {
        self.payload_bytes().saturating_sub(self.payload_out_bytes.get())
    }

    /// Whether the free memory suffices to allocate a buffer of `size` bytes to the peer of
    /// `account`.
    #[inline]
    fn admits(&self, account: Option<&PeerAccount>, size: usize) -> Admission {
        let own = account.map_or(0, |account| account.reserved_bytes.get());
        let reserved = self.reserved_bytes.get() - own;
        let (most, free) = (self.payload_bytes(), self.free_bytes().saturating_sub(reserved));
        if headroom(size, most) > free {
            return Admission::Full;
        }
        let Some(account) = account else { return Admission::Granted };
        let held = account.held_bytes();
        let after = held + size;
        // A second buffer is granted only if others could still get one of this size.
        if held > 0 && after + size > free {
            return if held >= most / 8 { Admission::OverShare } else { Admission::Full };
        }
        if after <= account.credit_bytes() {
            return Admission::Granted;
        }
        let plenty = if size > LONG_PAYLOAD { most / 8 } else { most / 4 };
        if free > most - plenty && !self.waits_for_less_than(size) {
            return Admission::Granted;
        }
        if held > 0 && after > SHORT_PAYLOAD {
            return Admission::OverShare;
        }
        let left_to_proven = if size <= TINY_PAYLOAD && after <= 4 * TINY_PAYLOAD {
            most / 8
        } else if size <= LONG_PAYLOAD {
            most / 2 + size.saturating_mul(4).min(most / 8)
        } else {
            return Admission::Full;
        };
        if free - size >= left_to_proven { Admission::Granted } else { Admission::Full }
    }

    /// Releases the memory that was reserved for that peer.
    fn end_promise(&self, account: &PeerAccount) {
        let reserved = account.reserved_bytes.replace(0);
        self.reserved_bytes.set(self.reserved_bytes.get() - reserved);
    }

    /// Whether a peer waits for a smaller buffer.
    fn waits_for_less_than(&self, size: usize) -> bool {
        let is_less = |account: &Rc<PeerAccount>| (1..size).contains(&account.requested_bytes());
        self.waiting_count.get() > 0
            && self.waiting[..class_of(size)].iter().any(|class| class.borrow().peers.values().any(is_less))
    }

    /// Wakes peers that can allocate now that a buffer of `size` bytes was returned, those with the
    /// smallest request first. Among peers that wait for the same size, the newest of the highest
    /// rank and the next one round-robin are tried first alternately. So many older peers that
    /// transfer nothing cannot block new ones, and many new ones cannot block those that have
    /// waited long.
    #[cold]
    fn wake_waiting(&self, size: usize) {
        let mut left = size;
        for class in &self.waiting {
            let checks = class.borrow().peers.len().min(CHECKS_PER_BUFFER);
            for nth in 0..checks {
                let is_newest = nth == 0 && self.favours_newest.get();
                let next = class.borrow_mut().next(is_newest);
                let Some((ticket, account)) = next else { break };
                let wanted = account.requested_bytes();
                if wanted > 0 && self.admits(Some(&account), wanted) == Admission::Full {
                    continue;
                }
                class.borrow_mut().peers.remove(&ticket);
                account.is_queued.set(false);
                self.waiting_count.set(self.waiting_count.get() - 1);
                if wanted > 0 {
                    self.favours_newest.set(!is_newest);
                    // The memory is reserved, so that another peer that retries at the same time
                    // cannot take it. The waiting request may also have ended.
                    account.reserved_bytes.set(wanted);
                    self.reserved_bytes.set(self.reserved_bytes.get() + wanted);
                    account.stop_waiting();
                    account.wake();
                }
                left = left.saturating_sub(wanted);
                if left == 0 {
                    return;
                }
            }
        }
    }

    /// Evicts peers that hold buffers without transferring data, the largest first, until there
    /// would be enough memory for the waiting peers.
    #[cold]
    fn evict_stalled(&self) {
        let mut stalled = self.stalled.borrow_mut();
        stalled.retain(|account| account.is_stalled() && !account.is_evicted() && !account.is_closed());
        if stalled.is_empty() {
            return;
        }
        let mut wanted: usize = 0;
        for class in &self.waiting {
            let waits = class
                .borrow()
                .peers
                .values()
                .filter(|account| !account.is_stalled())
                .map(|it| it.requested_bytes())
                .sum();
            wanted = wanted.saturating_add(waits);
        }
        stalled.sort_unstable_by_key(|account| account.held_bytes());
        while wanted > 0
            && let Some(account) = stalled.pop()
        {
            wanted = wanted.saturating_sub(account.held_bytes());
            account.evict();
            account.network.into_iter().for_each(|network| self.record_eviction(network));
        }
    }

    /// Ranks peers of that network after others, including peers that already wait.
    fn record_eviction(&self, network: IpAddr) {
        let mut evicted_networks = self.evicted_networks.borrow_mut();
        if evicted_networks.len() >= MAX_EVICTED_NETWORKS {
            evicted_networks.clear();
        }
        if !evicted_networks.insert(network) {
            return;
        }
        for class in &self.waiting {
            let peers = &mut class.borrow_mut().peers;
            let ranked = std::mem::take(peers).into_iter().map(|((is_free, has_taken, number), account)| {
                ((is_free && account.network != Some(network), has_taken, number), account)
            });
            peers.extend(ranked);
        }
    }

    /// Returns a buffer; called when its last handle is dropped.
    pub(crate) fn put(&self, memory: Memory) {
        let size = memory.len();
        let class = class_of(size);
        self.out_bytes.set(self.out_bytes.get() - size);
        let account = memory.charge(None);
        if let Some(account) = &account {
            account.remove(size);
            self.payload_out_bytes.set(self.payload_out_bytes.get() - size);
        }
        let cached = self.cached_bytes.get() + size;
        if cached <= KEEP_BYTES {
            self.cached_bytes.set(cached);
            self.free[class].borrow_mut().push(memory);
        } else {
            self.freed_bytes.set(self.freed_bytes.get().saturating_add(size));
            FROM_SYSTEM_BYTES.fetch_sub(size, Ordering::Relaxed);
            memory.leave_pool();
        }
        if account.is_some() && self.waiting_count.get() > 0 {
            self.wake_waiting(size);
        }
    }
}

/// Bytes that must be free to allocate a buffer of `size` bytes, if all payload together may use
/// `most` bytes: four times the size, so that long payload leaves room for shorter payload; for the
/// longest, half of the rest.
#[inline]
fn headroom(size: usize, most: usize) -> usize {
    size.saturating_mul(4).min(size + most.saturating_sub(size) / 2)
}

fn class_of(len: usize) -> usize {
    assert!(len <= MAX_TRANSFER as usize, "a buffer of {len} bytes");
    let bits = len.max(SMALLEST).next_power_of_two().trailing_zeros();
    (bits - SMALLEST.trailing_zeros()) as usize
}

fn size_of_class(class: usize) -> usize {
    SMALLEST << class
}

/// Bytes of payload that a peer may have in flight when buffers are short.
pub const SHORT_PAYLOAD: usize = 256 << 10;
/// Payload up to this size is granted to every peer while memory is left, so that a new peer can
/// show that it transfers data.
const TINY_PAYLOAD: usize = 16 << 10;
/// Longer payload of a peer that has transferred nothing waits until memory is plentiful.
const LONG_PAYLOAD: usize = 1 << 20;
/// Maximum number of waiting peers of each size to which one returned buffer is offered.
const CHECKS_PER_BUFFER: usize = 16;

/// Maximum number of networks of evicted peers that are remembered.
const MAX_EVICTED_NETWORKS: usize = 1024;

const SMALLEST: usize = 4096;
const CLASSES: usize = (MAX_TRANSFER.trailing_zeros() - SMALLEST.trailing_zeros() + 1) as usize;
/// Bytes kept for reuse: 128 buffers of 256 KiB. The rest of a burst goes back to the heap.
const KEEP_BYTES: usize = 32 << 20;
/// Free bytes that a heap may keep without being trimmed.
const TRIM_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ready::ReadyList;

    #[test]
    fn a_dropped_buffer_is_reused() {
        let pool = Pool::new(1 << 20);
        let first = pool.take(5000).unwrap();
        let address = first.seg(0, 1).as_ptr();
        assert_eq!((first.len(), pool.out_bytes()), (8192, 8192));
        drop(first);
        assert_eq!(pool.out_bytes(), 0);
        assert_eq!(pool.take(8192).unwrap().seg(0, 1).as_ptr(), address);
    }

    #[test]
    fn the_limit_holds() {
        let pool = Pool::new(8192);
        let first = pool.take(4096).unwrap();
        let _second = pool.take(1).unwrap();
        assert!(pool.take(1).is_none());
        drop(first);
        assert!(pool.take(1).is_some());
    }

    /// Allocates all available buffers of `len` bytes.
    fn take_all(pool: &Pool, len: usize) -> Vec<Memory> {
        std::iter::from_fn(|| pool.take_payload(len)).collect()
    }

    #[test]
    fn payload_leaves_room_for_receive_buffers_and_long_payload_for_short() {
        let pool = Pool::new(8 << 20);
        assert!(!pool.is_short());
        let mut buffers = Vec::new();
        for (len, left) in [(4 << 20, 2048 << 10), (256 << 10, 768 << 10), (16 << 10, 48 << 10)] {
            buffers.extend(take_all(&pool, len));
            assert_eq!((6 << 20) - pool.out_bytes(), left, "after buffers of {len}");
        }
        assert!(pool.is_short());
        assert!(pool.take_payload(4096).is_some());
        assert!(pool.take(SHORT_PAYLOAD).is_some(), "a receive buffer");
        drop(buffers);
        assert!(pool.could_hold(4 << 20) && !pool.could_hold((4 << 20) + 1));
        assert_eq!(pool.peer_share(), 1 << 20);
        assert!(Pool::new(usize::MAX).take_payload(1 << 20).is_some());
    }

    #[test]
    fn peers_that_have_transferred_nothing_leave_half_to_those_that_have() {
        let pool = Pool::new(64 << 20);
        for len in [1 << 20, 256 << 10, 64 << 10, 4096] {
            let new: Vec<_> = (0..1000).map(|_| pool.for_peer()).collect();
            let taken: Vec<_> = new.iter().map(|peer| take_all(peer, len)).collect();
            let proven = pool.for_peer();
            proven.account().unwrap().set_moved(2 << 20);
            assert!(proven.take_payload(1 << 20).is_some(), "beside buffers of {len}");
            drop(taken);
        }
        assert_eq!(pool.out_bytes(), 0);
    }

    #[test]
    fn when_buffers_are_short_a_new_peer_may_hold_as_much_as_it_has_transferred() {
        let pool = Pool::new(64 << 20);
        let _others: Vec<_> = (0..4).map(|_| pool.take_payload(4 << 20).unwrap()).collect();
        let new = pool.for_peer();
        let mut held = take_all(&new, 64 << 10);
        assert_eq!(new.account().unwrap().held_bytes(), SHORT_PAYLOAD);
        new.account().unwrap().set_moved(512 << 10);
        held.extend(take_all(&new, 64 << 10));
        assert_eq!(new.account().unwrap().held_bytes(), 512 << 10);
        drop(held);
        assert_eq!(new.account().unwrap().held_bytes(), 0);
        // It has transferred nothing since it stalled.
        new.note_stalled();
        assert_eq!(new.account().unwrap().credit_bytes(), 0);
    }

    #[test]
    fn throttled_peers_leave_half_to_others_whatever_they_have_transferred() {
        let pool = Pool::new(64 << 20);
        let throttled: Vec<_> = (0..100).map(|_| pool.for_peer()).collect();
        for account in throttled.iter().filter_map(Pool::account) {
            account.set_moved(u64::MAX);
            account.note_throttled(4096);
        }
        let _held: Vec<_> = throttled.iter().map(|peer| take_all(peer, 256 << 10)).collect();
        assert!(pool.out_bytes() <= 24 << 20, "{}", pool.out_bytes());
        let released = &throttled[0];
        assert!(released.take_payload(256 << 10).is_none());
        released.account().unwrap().note_released(4096);
        assert!(released.take_payload(256 << 10).is_some());
    }

    #[test]
    fn no_peer_gets_more_than_remains_for_others() {
        let pool = Pool::new(64 << 20);
        let peer = pool.for_peer();
        peer.account().unwrap().set_moved(u64::MAX);
        let _held = take_all(&peer, 1 << 20);
        assert_eq!(peer.account().unwrap().held_bytes(), 24 << 20);
    }

    #[test]
    fn a_waiting_peer_is_woken_when_enough_memory_is_returned() {
        let (pool, ready) = (Pool::new(8 << 20), ReadyList::new());
        let mut held = take_all(&pool, 1 << 20);
        let peer = pool.for_peer();
        peer.account().unwrap().set_waker(&ready.waker(7));
        assert!(peer.take_payload_or_wait(2 << 20).is_none());
        assert!(peer.account().unwrap().is_waiting());
        while ready.is_empty() {
            assert!(peer.take_payload(2 << 20).is_none(), "it was not woken");
            held.pop();
        }
        assert_eq!(ready.pop(), Some(7));
        let taken = peer.take_payload_or_wait(2 << 20);
        assert!(taken.is_some() && !peer.account().unwrap().is_waiting());
        held.clear();
        assert!(ready.is_empty(), "it waits no more");
    }

    #[test]
    fn a_smaller_buffer_does_not_end_a_wait_and_closed_peers_delay_nobody() {
        let (pool, ready) = (Pool::new(16 << 20), ReadyList::new());
        let others: Vec<_> = (0..100).map(|_| pool.for_peer()).collect();
        let held = take_all(&pool, 1 << 20);
        for other in &others {
            assert!(other.take_payload_or_wait(1 << 20).is_none());
        }
        let peer = pool.for_peer();
        peer.account().unwrap().set_waker(&ready.waker(7));
        assert!(peer.take_payload_or_wait(1 << 20).is_none());
        assert!(peer.take_payload(4096).is_some());
        assert!(peer.account().unwrap().is_waiting(), "for more than it got");
        // The other peers disconnect, but stay in the list until they are woken.
        others.iter().for_each(|other| other.account().unwrap().close());
        drop(held);
        assert_eq!(ready.pop(), Some(7));
        assert!(!peer.account().unwrap().is_waiting());
    }

    #[test]
    fn a_waiting_peer_is_not_woken_by_its_own_receive_buffer() {
        let (pool, ready) = (Pool::new(8 << 20), ReadyList::new());
        let peer = pool.for_peer();
        peer.account().unwrap().set_waker(&ready.waker(7));
        let mut held = take_all(&pool, 64 << 10);
        assert!(peer.take_payload_or_wait(1 << 20).is_none());
        drop(peer.take(SHORT_PAYLOAD).unwrap());
        assert!(ready.is_empty());
        while ready.is_empty() {
            held.pop();
        }
        let receiving = peer.take(SHORT_PAYLOAD).unwrap();
        assert!(peer.take_payload_or_wait(1 << 20).is_some());
        drop(receiving);
    }

    #[test]
    fn the_newest_and_oldest_waiting_peers_alternate_and_get_reserved_memory() {
        let (pool, ready) = (Pool::new(64 << 20), ReadyList::new());
        let mut held = take_all(&pool, 64 << 10);
        let peers: Vec<_> = (0..6).map(|_| pool.for_peer()).collect();
        for (peer, number) in peers.iter().zip(0..) {
            peer.account().unwrap().set_waker(&ready.waker(number));
            assert!(peer.take_payload_or_wait(1 << 20).is_none());
        }
        let (mut woken, mut taken) = (Vec::new(), Vec::new());
        while woken.len() < 4 {
            held.pop();
            let Some(number) = ready.pop() else { continue };
            woken.push(number);
            let others = peers.iter().zip(0..).filter(|(_, other)| *other != number);
            for (other, _) in others {
                assert!(other.take_payload_or_wait(1 << 20).is_none(), "{number} was woken");
            }
            taken.push(peers[number as usize].take_payload_or_wait(1 << 20).unwrap());
        }
        assert_eq!(woken, [0, 5, 1, 4]);
        // The next peer no longer needs the memory.
        while ready.is_empty() {
            held.pop();
        }
        assert_eq!(ready.pop(), Some(2));
        peers[2].end_turn();
        assert_eq!(ready.pop(), Some(3));
    }

    #[test]
    fn peers_at_the_address_of_an_evicted_peer_wait_for_others() {
        let (pool, ready) = (Pool::new(64 << 20), ReadyList::new());
        let [bad, good]: [IpAddr; 2] = ["2001:db8::1", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        let mut held = take_all(&pool, 64 << 10);
        let stalled = pool.for_peer_at(Some(bad));
        held.extend(stalled.take_payload(16 << 10));
        stalled.note_stalled();
        let same_network: IpAddr = "2001:db8::2".parse().unwrap();
        let peers =
            [same_network, good, same_network, same_network].map(|address| pool.for_peer_at(Some(address)));
        for (peer, number) in peers.iter().zip(0..) {
            peer.account().unwrap().set_waker(&ready.waker(number));
            assert!(peer.take_payload_or_wait(1 << 20).is_none());
        }
        assert!(stalled.account().unwrap().is_evicted());
        let woken = std::iter::from_fn(|| {
            while ready.is_empty() && held.pop().is_some() {}
            ready.pop()
        });
        let first: Vec<_> = woken.take(2).collect();
        assert_eq!(first, [0, 1], "the longest waiting peer, and the newest at another address");
    }

    #[test]
    fn the_largest_stalled_peers_are_evicted_until_enough_memory_is_free() {
        let pool = Pool::new(64 << 20);
        let peers: Vec<_> = (0..4).map(|_| pool.for_peer()).collect();
        let lens = [1 << 20, 8 << 20, 2 << 20, 4 << 20];
        peers.iter().for_each(|peer| peer.account().unwrap().set_moved(8 << 20));
        let held: Vec<_> =
            peers.iter().zip(lens).map(|(peer, len)| peer.take_payload(len).unwrap()).collect();
        let evicted = || {
            let all = peers.iter().map(|peer| peer.account().unwrap().is_evicted());
            all.collect::<Vec<_>>()
        };
        // The largest peer transfers data, and no peer waits for the memory of the others yet.
        for nth in [0, 2, 3] {
            peers[nth].note_stalled();
        }
        assert_eq!(evicted(), [false; 4]);
        let _rest = take_all(&pool, 64 << 10);
        let waits = pool.for_peer();
        assert!(waits.take_payload_or_wait(1 << 20).is_none());
        assert_eq!(evicted(), [false, false, false, true]);
        drop(held);
        // A peer that transfers data again is not evicted.
        peers[2].account().unwrap().resume();
        let greedy = pool.for_peer();
        assert!(greedy.take_payload_or_wait(32 << 20).is_none());
        assert_eq!(evicted(), [true, false, false, true]);
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = Pool::new(8192);
        let seg = pool.take(4096).unwrap().seg(0, 4);
        drop(pool);
        seg.copy_from(b"late");
        assert_eq!(seg.to_vec(), b"late");
    }

    #[test]
    fn an_allocation_that_the_system_refuses_fails() {
        assert!(Memory::for_pool(1 << 60, Weak::new()).is_none());
        assert!(Memory::for_pool(4096, Weak::new()).is_some());
    }

    #[test]
    fn the_cache_of_returned_buffers_is_limited() {
        let pool = Pool::new(usize::MAX);
        let all: Vec<_> = (0..3).map(|_| pool.take(MAX_TRANSFER as usize).unwrap()).collect();
        drop(all);
        assert_eq!(pool.inner.free[CLASSES - 1].borrow().len(), 1);
        assert_eq!(pool.out_bytes(), 0);
        assert!(pool.should_trim());
        pool.note_trimmed();
        drop(pool.take(4096));
        assert!(!pool.should_trim());
        assert_eq!(pool.inner.free[0].borrow().len(), 0, "of all sizes together");
        drop((pool.take(MAX_TRANSFER as usize), pool.take(4096)));
        assert_eq!(pool.inner.cached_bytes.get(), MAX_TRANSFER as usize);
    }
}
