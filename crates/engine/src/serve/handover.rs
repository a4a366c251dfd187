//! Connections that move to another process, which takes over from this one.
//!
//! After [`SessionHandover::request`], a session whose peer would not reconnect by itself accepts
//! no further request. Once its requests are answered, its socket, its received but unparsed bytes
//! and its state move to the other process. Other sessions end as they do when the process stops.

use crate::net::socket::Stream;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The connections of this process that move to another one.
#[derive(Default)]
pub struct SessionHandover {
    is_requested: AtomicBool,
    /// Number of connections that should move and cannot, because they use TLS.
    secured: AtomicUsize,
    handed_over: Mutex<Vec<HandedOverConnection<OwnedFd>>>,
}

/// A connection that is ready for the other process. None of its requests is in flight.
pub struct HandedOverConnection<S> {
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

impl SessionHandover {
    /// Asks connections to move. Their tasks do so when they run next; see
    /// [`crate::core::cores::Cores::wake_all`].
    pub fn request(&self) {
        self.is_requested.store(true, Ordering::Relaxed);
    }

    /// Whether connections should move.
    #[inline]
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Relaxed)
    }

    /// Number of connections that cannot move because they use TLS, whose keys and record numbers
    /// stay in this process.
    #[must_use]
    pub fn secured(&self) -> usize {
        self.secured.load(Ordering::Relaxed)
    }

    /// Takes the connections that have become ready since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<HandedOverConnection<OwnedFd>> {
        std::mem::take(&mut *self.handed_over.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a connection for [`SessionHandover::take`].
    ///
    /// # Errors
    /// If the process cannot open another file descriptor. The connection is then closed.
    pub(crate) fn add(&self, handed_over: HandedOverConnection<Stream>) -> io::Result<()> {
        let HandedOverConnection { protocol, listener, peer, stream, unread, state } = handed_over;
        let stream = stream.as_fd().try_clone_to_owned()?;
        let handed_over = HandedOverConnection { protocol, listener, peer, stream, unread, state };
        self.handed_over.lock().unwrap_or_else(PoisonError::into_inner).push(handed_over);
        Ok(())
    }

    /// Counts a connection with TLS until the result is dropped.
    pub(crate) fn count_secured(self: &Arc<SessionHandover>) -> SecuredConnection {
        self.secured.fetch_add(1, Ordering::Relaxed);
        SecuredConnection(self.clone())
    }
}

/// One connection with TLS in the count of [`SessionHandover::secured`].
pub(crate) struct SecuredConnection(Arc<SessionHandover>);

impl Drop for SecuredConnection {
    fn drop(&mut self) {
        self.0.secured.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How long an unfinished handshake may continue after [`SessionHandover::request`]. A client that
/// is about to use a volume needs milliseconds.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(1);
