//! Carries a session to its peer: over a byte stream, with or without TLS, or by whatever else
//! implements [`Carrier`].

pub mod blocking;
mod broken;
pub mod connection;
pub mod tls;

use crate::net::host::Host;
use connection::{Broken, Inflow};
use std::sync::Arc;

/// Carries a target's session `S` to its peer. [`connection::Connection`] does so over a byte
/// stream; a queue pair that is not over a stream is another implementation.
///
/// In each turn, the owner calls [`Carrier::check_deadline`], [`Carrier::receive`], moves the
/// session's I/O, and calls [`Carrier::send`] and [`Carrier::check_new_deadline`]. It calls
/// [`Carrier::park`] before it waits to be woken. After an error it calls [`Carrier::end`] and
/// receives nothing more.
pub trait Carrier<S> {
    /// The core that runs the carrier.
    type Host: Host;
    /// What another core or process needs to continue the connection.
    type Handle: 'static;

    /// Receives, and passes what has arrived to the session.
    ///
    /// # Errors
    /// If the connection is lost or the peer violated the protocol. The session may have an error
    /// message to send.
    fn receive(&mut self, session: &mut S) -> Result<Inflow, Broken>;

    /// Sends what the session has to send, as far as there is room; returns whether anything was
    /// sent.
    ///
    /// # Errors
    /// If the connection is lost.
    fn send(&mut self, session: &mut S) -> Result<bool, Broken>;

    /// Runs the session's deadline when it has passed, and arms the next one.
    ///
    /// # Errors
    /// If the peer missed the deadline.
    fn check_deadline(&mut self, session: &mut S) -> Result<(), Broken>;

    /// Calls [`Carrier::check_deadline`] if the session has set a new deadline.
    ///
    /// # Errors
    /// If the peer missed the deadline.
    fn check_new_deadline(&mut self, session: &mut S) -> Result<(), Broken>;

    /// Arms the wake-ups that the connection needs.
    fn park(&mut self);

    /// Tells the session that the connection has ended.
    fn end(&mut self, session: &mut S);

    /// Closes the connection for every owner.
    fn close(&mut self);

    /// What another owner needs to continue the connection, and the bytes that were received but
    /// not parsed.
    fn hand_over(&mut self) -> (Self::Handle, Vec<u8>);

    /// What the session waits for.
    fn awaits(&self, session: &S) -> Awaited;

    /// Whether the session has output that is not sent.
    fn has_output(&self, session: &mut S) -> bool;

    /// Drops the session's output, because nobody receives it.
    fn drop_output(&mut self, session: &mut S);

    /// Frees memory that only a handshake needs.
    fn end_handshake(&mut self, session: &mut S);

    /// The peer's address, for messages.
    fn peer(&self) -> Arc<str>;

    /// Whether the peer has closed its side while the session does not take the remaining input.
    fn is_abandoned(&self) -> bool;

    /// Whether the connection is encrypted with keys that stay in this process.
    fn is_secured(&self) -> bool;

    /// Bytes received and sent; costs no system call.
    fn transferred_bytes(&self) -> u64;

    /// Bytes that the peer has sent and acknowledged; may cost a system call.
    fn moved_bytes(&self) -> u64;
}

/// What a session waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// It takes no input now.
    Nothing,
    /// The next message.
    Message,
    /// The rest of a message, for which it may hold buffers.
    Rest,
    /// It has stopped taking input: the end of the connection.
    End,
}
