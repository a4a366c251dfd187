//! Connections with TLS, whose records are processed by the library or by the kernel (kTLS).

use super::{Broken, CHUNK, Connection, SENDS_PER_TURN, SHORT_CHUNK};
use crate::carrier::Carrier;
use crate::carrier::tls::Received;
#[cfg(test)]
use crate::carrier::tls::Secure;
use crate::net::host::{ByteStream, Host};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{BYTES_BEFORE_TLS, StreamSession};
use blockmux_tls::TlsError;
use std::io;
use tracing::debug;

impl<H: Host> Connection<H> {
    /// Closes the connection for every owner, after a TLS close_notify if possible.
    pub fn close(&mut self) {
        if let Some(secure) = &mut self.secure {
            secure.close(&mut self.stream);
        }
        self.stream.close();
    }

    /// Starts TLS, because the session demands it; returns whether it has not begun before.
    ///
    /// # Errors
    /// If unread plaintext is left, or the connection has no TLS credentials.
    #[cold]
    pub(super) fn start_tls(&mut self) -> Result<bool, Broken> {
        let Some(secure) = &mut self.secure else { return Err(NO_CREDENTIALS.into()) };
        let begins = secure.start();
        if begins && self.chunk.as_ref().is_some_and(|chunk| !chunk.unread().is_empty()) {
            return Err(BYTES_BEFORE_TLS.into());
        }
        Ok(begins)
    }

    /// Sends once, as plaintext or through kTLS.
    #[inline]
    pub(super) fn send_once(&mut self, outbox: &mut Outbox) -> Result<usize, Broken> {
        let Some(secure) = &mut self.secure else { return Ok(self.stream.send(outbox)?) };
        secure.before_sending(&mut self.stream)?;
        let sent = self.stream.send(outbox)?;
        secure.on_sent(sent);
        Ok(sent)
    }

    /// TLS state and the underlying stream.
    #[cfg(test)]
    pub(crate) fn secure(&mut self) -> (Option<&mut Secure>, &mut H::Stream) {
        (self.secure.as_deref_mut(), &mut self.stream)
    }

    /// Sends the session's output through TLS. It stays in the outbox until its records are sent.
    #[cold]
    pub(super) fn send_secured<S: StreamSession>(&mut self, session: &mut S) -> Result<bool, Broken> {
        let mut any = false;
        for _ in 0..SENDS_PER_TURN {
            let Some(secure) = &mut self.secure else { return Ok(any) };
            // The last bytes of the handshake may have just been sent.
            if any && secure.hand_over(&mut self.stream)? {
                return self.send(session).map(|_| true);
            }
            secure.encrypt_front(session.outbox())?;
            if secure.outgoing().is_empty() {
                break;
            }
            match self.stream.send(secure.outgoing()) {
                Ok(sent) => {
                    any = true;
                    self.transferred_bytes += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
            secure.sent(session.outbox());
        }
        self.wants_output = self.secure.as_ref().is_some_and(|secure| secure.wants_output(session.outbox()));
        Ok(any)
    }

    /// Handles a failed receive. kTLS fails a plain receive if the next record is not data.
    #[cold]
    pub(super) fn on_receive_error(&mut self, error: io::Error) -> Result<Option<bool>, Broken> {
        let Some(secure) = &mut self.secure else { return Err(error.into()) };
        if secure.on_receive_error(&mut self.stream, error)? {
            self.has_ended = true;
            return Ok(None);
        }
        Ok(Some(true))
    }

    /// Receives through TLS. Placed payload is copied from the chunk, too.
    #[cold]
    pub(super) fn receive_secured<S: StreamSession>(
        &mut self,
        session: &mut S,
        wanted: usize,
    ) -> Result<Option<bool>, Broken> {
        self.make_room(wanted, if self.pool().is_short() { SHORT_CHUNK } else { CHUNK });
        let (Some(secure), Some(chunk)) = (&mut self.secure, &mut self.chunk) else { return Ok(None) };
        let asked = chunk.room();
        let result = secure.receive(&mut self.stream, chunk, self.core.pool());
        let is_computing = secure.is_computing();
        let negotiated = secure.is_unreported().then(|| secure.negotiated());
        if let (Some(by), Some(negotiated)) = (secure.take_peer(), negotiated) {
            debug!(peer = self.stream.peer(), "TLS is established: {negotiated}");
            session.on_secured(by, self.core.now())?;
        }
        if is_computing {
            // A connection that is closed meanwhile must not keep its place among the helpers'
            // jobs.
            (self.wants_input, self.is_blocked) = (false, true);
            self.check_end()?;
        }
        match result {
            Ok(Received::Bytes(0)) => {
                self.has_ended = true;
                Ok(None)
            }
            Ok(Received::Bytes(given)) => {
                self.transferred_bytes += given as u64;
                Ok(Some(given == asked))
            }
            Ok(Received::Plain) => {
                self.secure = None;
                Ok(Some(true))
            }
            Err(Broken::Socket(error))
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// An internal error: a session demands TLS only on a connection that has credentials.
const NO_CREDENTIALS: TlsError = TlsError::Internal("this connection has no TLS credentials");

impl<H: Host> Drop for Connection<H> {
    fn drop(&mut self) {
        if let Some(secure) = &mut self.secure {
            secure.close(&mut self.stream);
        }
    }
}
