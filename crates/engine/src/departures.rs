//! Connections that move to another process, which takes over from this one.
//!
//! After [`Departures::ask`], a session whose peer would not reconnect by itself accepts no further
//! request. Once its requests are answered, its socket, its received but unparsed bytes and its
//! state move to the other process. Other sessions end as they do when the process stops.

use crate::socket::Stream;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The connections of this process that move to another one.
#[derive(Default)]
pub struct Departures {
    is_asked: AtomicBool,
    /// Number of connections that should move and cannot, because they use TLS.
    secured: AtomicUsize,
    departed: Mutex<Vec<DepartedConnection<OwnedFd>>>,
}

/// A connection that is ready for the other process. None of its requests is in flight.
pub struct DepartedConnection<S> {
    /// Name of its protocol.
    pub protocol: &'static str,
    /// Address of the listener that accepted it.
    pub listener: String,
    /// The peer's address, for messages.
    pub peer: String,
    /// The socket.
    pub stream: S,
    /// Bytes received and not parsed.
    pub unread: Vec<u8>,
    /// The session's state, in its protocol's own format.
    pub state: Vec<u8>,
}

impl Departures {
    /// Asks connections to move. Their tasks do so when they run next; see
    /// [`crate::cores::Cores::wake_all`].
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// Whether connections should move.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    /// Number of connections that cannot move because they use TLS, whose keys and record numbers
    /// stay in this process.
    #[must_use]
    pub fn secured(&self) -> usize {
        self.secured.load(Ordering::Relaxed)
    }

    /// Takes the connections that have become ready since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<DepartedConnection<OwnedFd>> {
        std::mem::take(&mut *self.departed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a connection for [`Departures::take`].
    ///
    /// # Errors
    /// If the process cannot open another file descriptor. The connection is then closed.
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

/// How long an unfinished handshake may continue after [`Departures::ask`]. A client that is about
/// to use a volume needs milliseconds.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(1);
