//! Waiting for connections that are ready, by epoll or by polling.

use super::Variant;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::{Errno, Result};
use rustix::time::Timespec;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Waits for one thread's connections. When spinning, all of them always count as ready.
pub(super) struct Waiter {
    /// `None` when spinning.
    epoll: Option<OwnedFd>,
    events: Vec<Event>,
    connections: Vec<WaiterState>,
}

#[derive(Clone, Copy)]
struct WaiterState {
    is_ready: bool,
    /// No more events will come; it stays ready until its end has been received.
    has_ended: bool,
    wants_output: bool,
}

impl Waiter {
    pub(super) fn new(variant: Variant, sockets: &[OwnedFd]) -> Result<Waiter> {
        let epoll = match variant {
            Variant::Spinning => None,
            Variant::Sleeping => Some(epoll::create(CreateFlags::CLOEXEC)?),
        };
        if let Some(epoll) = &epoll {
            for (index, socket) in sockets.iter().enumerate() {
                epoll::add(epoll, socket, EventData::new_u64(index as u64), INPUT)?;
            }
        }
        let state = WaiterState { is_ready: true, has_ended: false, wants_output: false };
        Ok(Waiter { epoll, events: Vec::with_capacity(EVENTS), connections: vec![state; sockets.len()] })
    }

    /// Sleeps until a connection is ready or for `timeout`. Returns at once if one is ready.
    #[inline]
    pub(super) fn wait(&mut self, timeout: Option<Duration>) -> Result<()> {
        let Some(epoll) = &self.epoll else { return Ok(()) };
        let timeout = if self.connections.iter().any(|state| state.is_ready) {
            Some(Timespec::default())
        } else {
            timeout
                .map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() })
        };
        self.events.clear();
        match epoll::wait(epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        for event in &self.events {
            // Copied, because the struct is packed.
            let (flags, index) = (event.flags, event.data.u64() as usize);
            let state = &mut self.connections[index];
            state.is_ready = true;
            state.has_ended |= flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn is_ready(&self, index: usize) -> bool {
        self.connections[index].is_ready
    }

    /// Called after each turn: whether the socket may hold more input, and whether output waits for
    /// room.
    ///
    /// Events are edge-triggered, so remaining work must be remembered here. EPOLLOUT is requested
    /// only when needed: Unix sockets report every message that the peer takes.
    #[inline]
    pub(super) fn turned(&mut self, index: usize, socket: &OwnedFd, more: bool, blocked: bool) -> Result<()> {
        let Some(epoll) = &self.epoll else { return Ok(()) };
        let state = &mut self.connections[index];
        state.is_ready = more || state.has_ended;
        if state.wants_output != blocked {
            state.wants_output = blocked;
            let flags = if blocked { INPUT | EventFlags::OUT } else { INPUT };
            epoll::modify(epoll, socket, EventData::new_u64(index as u64), flags)?;
        }
        Ok(())
    }

    /// Removes a connection whose socket is about to be closed.
    pub(super) fn forget(&mut self, index: usize) {
        self.connections[index].is_ready = false;
    }
}

const INPUT: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);
/// Events of one call; the next call returns more.
const EVENTS: usize = 64;
