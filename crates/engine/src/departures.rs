//! Connections that leave this process for the one that takes over from it.
//!
//! Once [`Departures::ask`] was called, a session whose peer would not connect again by itself
//! takes no further request, and leaves as soon as every request that it took is answered: its
//! socket, the bytes that were received and not parsed, and its state. Other sessions end as they
//! do when the process stops.

use crate::socket::Stream;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The connections of a process that leave it.
#[derive(Default)]
pub struct Departures {
    is_asked: AtomicBool,
    /// Connections with TLS of sessions that would have to leave.
    secured: AtomicUsize,
    departed: Mutex<Vec<DepartedConnection<OwnedFd>>>,
}

/// A connection that has left, between two requests of its session.
pub struct DepartedConnection<S> {
    /// Name of its protocol.
    pub protocol: &'static str,
    /// The listener that it came by.
    pub listener: String,
    /// The peer's address, for messages.
    pub peer: String,
    /// The socket.
    pub stream: S,
    /// Bytes that were received and not parsed.
    pub unread: Vec<u8>,
    /// The session's state, in its protocol's own form.
    pub state: Vec<u8>,
}

impl Departures {
    /// Asks connections to leave. Their tasks see it when they run next, see
    /// [`crate::cores::Cores::wake_all`].
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// Whether connections are to leave.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    /// How many connections cannot leave because they use TLS, whose keys and record numbers stay
    /// in this process.
    #[must_use]
    pub fn secured(&self) -> usize {
        self.secured.load(Ordering::Relaxed)
    }

    /// The connections that have left since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<DepartedConnection<OwnedFd>> {
        std::mem::take(&mut *self.departed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a connection for [`Departures::take`].
    ///
    /// # Errors
    /// If the process has no room for another file; the connection is closed then.
    pub(crate) fn add(&self, departed: DepartedConnection<Stream>) -> io::Result<()> {
        let DepartedConnection { protocol, listener, peer, stream, unread, state } = departed;
        let stream = stream.as_fd().try_clone_to_owned()?;
        let departed = DepartedConnection { protocol, listener, peer, stream, unread, state };
        self.departed.lock().unwrap_or_else(PoisonError::into_inner).push(departed);
        Ok(())
    }

    /// Counts a connection with TLS until the result is dropped.
    pub(crate) fn count_secured(self: &Arc<Departures>) -> SecuredConnection {
        self.secured.fetch_add(1, Ordering::Relaxed);
        SecuredConnection(self.clone())
    }
}

/// One connection with TLS in the count of [`Departures::secured`].
pub(crate) struct SecuredConnection(Arc<Departures>);

impl Drop for SecuredConnection {
    fn drop(&mut self) {
        self.0.secured.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How long a handshake may take to end once connections are to leave. A client that is about to
/// use a volume needs milliseconds.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(1);
