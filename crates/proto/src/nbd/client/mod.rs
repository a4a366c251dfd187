//! The NBD client: accesses one export of a server.
//!
//! ```text
//!   Handshake ──GO acknowledged──▶ Transmission ──on_stop, nothing in flight──▶ over
//!        └──── refused, or the export is described or listed ──────────────────▶ over
//! ```
//! [`crate::driver::session`] describes how a driver uses [`NbdInitiatorSession`]. When the session
//! is over, its demand is [`Demand::Close`], and [`NbdInitiatorSession::refusal`] says whether the
//! server refused it.

mod export;
mod extents;
mod handshake;
mod head;
mod option;
mod refusal;
mod reply;
mod request;
mod transmission;

#[cfg(test)]
mod tests;

pub use super::HeaderFormat;
pub use crate::initiator::command_queue::DEPTH;
pub use blockmux_wire::nbd::handshake::TransmissionFlags;
pub use export::{BlockSize, ExportInfo, ListedExport};
pub use refusal::NbdHandshakeRefusal;

use crate::driver::outbox::Outbox;
use crate::driver::session::{
    Connections, Demand, Initiator, Overdue, PathRank, ProtocolError, SecuredBy, StreamConnections,
    StreamSession, Timed,
};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool};
use handshake::{ClientHandshake, HandshakeEnd};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use transmission::ClientTransmission;

/// Parameters of a session with a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdInitiatorConfig {
    /// The export's name, at most 4096 bytes; empty for the server's default.
    pub export: String,
    /// Purpose of the session.
    pub mode: NbdSessionMode,
    /// Optional features to negotiate.
    pub features: NbdFeatures,
}

/// Purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdSessionMode {
    /// Read and write the export.
    Go,
    /// Get the description of the export, then disconnect.
    Info,
    /// List all exports, then disconnect.
    List,
}

/// Optional features, which are used if the server offers them; all by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdFeatures {
    /// Extended headers: 64-bit lengths and reply heads of a fixed size.
    pub extended_headers: bool,
    /// Structured replies, if extended headers are not available.
    pub structured_replies: bool,
}

impl Default for NbdFeatures {
    fn default() -> NbdFeatures {
        NbdFeatures { extended_headers: true, structured_replies: true }
    }
}

/// Session with a server over one connection, from the greeting on.
pub struct NbdInitiatorSession {
    phase: NbdInitiatorPhase,
    outbox: Outbox,
    pool: Pool,
    /// Deadline of the handshake.
    deadline: Instant,
    /// Number of contiguous bytes that the handshake needs next.
    need: usize,
    is_stopping: bool,
    export: Option<ExportInfo>,
    exports: Vec<ListedExport>,
    left_out: u64,
    refusal: Option<NbdHandshakeRefusal>,
    /// Completions of I/O that was submitted outside the transmission phase.
    failed: VecDeque<Completion>,
}

enum NbdInitiatorPhase {
    Handshake(Box<ClientHandshake>),
    Transmission(Box<ClientTransmission>),
    Over,
}

impl NbdInitiatorSession {
    /// A session on a new connection. `pool` provides memory for reads that bring no buffer and
    /// whose data cannot be borrowed from the receive buffer.
    #[must_use]
    pub fn new(config: NbdInitiatorConfig, pool: Pool, now: Instant) -> NbdInitiatorSession {
        let handshake = ClientHandshake::new(config);
        NbdInitiatorSession {
            need: handshake.need(),
            phase: NbdInitiatorPhase::Handshake(Box::new(handshake)),
            outbox: Outbox::default(),
            pool,
            deadline: now.checked_add(HANDSHAKE_TIMEOUT).unwrap_or(now),
            is_stopping: false,
            export: None,
            exports: Vec::new(),
            left_out: 0,
            refusal: None,
            failed: VecDeque::new(),
        }
    }

    /// Requires TLS, whose handshake the driver performs ([`Demand::StartTls`]).
    #[must_use]
    pub fn with_tls(mut self) -> NbdInitiatorSession {
        if let NbdInitiatorPhase::Handshake(handshake) = &mut self.phase {
            handshake.require_tls();
        }
        self
    }

    /// The export, once the server has described it.
    #[must_use]
    pub fn export(&self) -> Option<&ExportInfo> {
        self.export.as_ref()
    }

    /// The exports that [`NbdSessionMode::List`] found, at most 10,000.
    #[must_use]
    pub fn exports(&self) -> &[ListedExport] {
        &self.exports
    }

    /// The number of exports that the server listed beyond [`NbdInitiatorSession::exports`].
    #[must_use]
    pub fn exports_left_out(&self) -> u64 {
        self.left_out
    }

    /// The reason for which the server refused the session, if it did.
    #[must_use]
    pub fn refusal(&self) -> Option<&NbdHandshakeRefusal> {
        self.refusal.as_ref()
    }

    /// Whether the session has ended: it is complete, refused or stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.phase {
            NbdInitiatorPhase::Handshake(_) => false,
            NbdInitiatorPhase::Transmission(transmission) => transmission.is_disconnected(),
            NbdInitiatorPhase::Over => true,
        }
    }

    /// Handles the handshake messages in `bytes`; returns the number of bytes consumed.
    fn on_handshake_bytes(&mut self, bytes: &[u8]) -> Result<usize, ProtocolError> {
        let mut at = 0_usize;
        while let NbdInitiatorPhase::Handshake(handshake) = &mut self.phase {
            let rest = bytes.get(at..).unwrap_or_default();
            match handshake.on_bytes(rest, &mut self.outbox)? {
                handshake::HandshakeProgress::Took(len) => at = at.saturating_add(len),
                handshake::HandshakeProgress::Incomplete(need) => {
                    self.need = need;
                    break;
                }
                handshake::HandshakeProgress::Over(len, end) => {
                    at = at.saturating_add(len);
                    self.end_handshake(end);
                }
            }
        }
        Ok(at)
    }

    fn end_handshake(&mut self, end: HandshakeEnd) {
        self.phase = NbdInitiatorPhase::Over;
        match end {
            HandshakeEnd::Transmission(export, allocation) => {
                let mut transmission = ClientTransmission::new(&export, allocation, self.pool.clone());
                if self.is_stopping {
                    transmission.stop(&mut self.outbox);
                }
                self.phase = NbdInitiatorPhase::Transmission(Box::new(transmission));
                self.export = Some(export);
            }
            HandshakeEnd::Described(export) => self.export = Some(export),
            HandshakeEnd::Listed(list) => (self.exports, self.left_out) = (list.exports, list.left_out),
            HandshakeEnd::Refused(refusal) => self.refusal = Some(refusal),
            HandshakeEnd::Stopped => {}
        }
    }
}

impl Timed for NbdInitiatorSession {
    fn poll_timeout(&self) -> Option<Instant> {
        matches!(self.phase, NbdInitiatorPhase::Handshake(_)).then_some(self.deadline)
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if matches!(self.phase, NbdInitiatorPhase::Handshake(_)) && now >= self.deadline {
            return Err(ProtocolError {
                what: "did not finish the handshake within 30 seconds",
                reference: "proto.md, \"Handshake\"",
            });
        }
        Ok(())
    }
}

impl StreamSession for NbdInitiatorSession {
    #[inline]
    fn demand(&self) -> Demand {
        match &self.phase {
            NbdInitiatorPhase::Handshake(handshake) if handshake.awaits_tls() => Demand::StartTls,
            NbdInitiatorPhase::Handshake(_) => Demand::Bytes(self.need),
            NbdInitiatorPhase::Transmission(transmission) if transmission.is_disconnected() => Demand::Close,
            NbdInitiatorPhase::Transmission(transmission) => match transmission.reading.place() {
                Some(target) => Demand::Place(target.clone()),
                None => Demand::Bytes(transmission.need),
            },
            NbdInitiatorPhase::Over => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        let mut at = 0;
        if let NbdInitiatorPhase::Handshake(_) = self.phase {
            at = self.on_handshake_bytes(input.unread())?;
        }
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => {
                transmission.on_bytes(input, at, &mut self.outbox)
            }
            NbdInitiatorPhase::Handshake(_) => Ok(at),
            // Bytes after the end of the session are ignored.
            NbdInitiatorPhase::Over => Ok(input.unread().len()),
        }
    }

    fn on_secured(&mut self, _by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        if let NbdInitiatorPhase::Handshake(handshake) = &mut self.phase {
            let end = handshake.on_secured(&mut self.outbox);
            self.need = handshake.need();
            if let Some(end) = end {
                self.end_handshake(end);
            }
        }
        Ok(())
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.on_placed(&mut self.outbox),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => Ok(()),
        }
    }

    /// Without a request in flight the server may close the connection, for example when it shuts
    /// down. The driver reconnects unless it has requested the end.
    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            NbdInitiatorPhase::Handshake(handshake) => {
                let end = handshake.on_end()?;
                self.end_handshake(end);
                Ok(())
            }
            NbdInitiatorPhase::Transmission(transmission) if !transmission.is_idle() => Err(ProtocolError {
                what: "closed the connection with requests in flight",
                reference: "proto.md, \"Terminating the transmission phase\"",
            }),
            NbdInitiatorPhase::Transmission(_) | NbdInitiatorPhase::Over => Ok(()),
        }
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Initiator for NbdInitiatorSession {
    fn is_ready(&self) -> bool {
        matches!(self.phase, NbdInitiatorPhase::Transmission(_))
    }

    #[inline]
    fn room(&self) -> usize {
        match &self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.room(),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => 0,
        }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.submit(io, &mut self.outbox),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => {
                self.failed.push_back(Completion { tag: io.tag, result: Err(IoError::PathLost) });
            }
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.poll_done(),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => self.failed.pop_front(),
        }
    }

    fn poll_returned(&mut self) -> Option<Io> {
        None
    }

    /// Completions that were not polled yet are not included.
    ///
    /// A request that the server refused because it is shutting down counts as unfinished, so that
    /// the next session repeats it, unless [`Initiator::on_stop`] was called.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.outbox.clear();
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.take_unfinished(),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => Vec::new(),
        }
    }

    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    fn resize(&mut self, _size: u64) {}

    #[inline]
    fn path_rank(&self) -> PathRank {
        PathRank::Best
    }

    fn on_stop(&mut self) {
        self.is_stopping = true;
        match &mut self.phase {
            NbdInitiatorPhase::Handshake(handshake) => handshake.stop(),
            NbdInitiatorPhase::Transmission(transmission) => transmission.stop(&mut self.outbox),
            NbdInitiatorPhase::Over => {}
        }
    }
}

impl Overdue for NbdInitiatorSession {
    fn tick(&mut self) -> u32 {
        match &mut self.phase {
            NbdInitiatorPhase::Transmission(transmission) => transmission.tick(),
            NbdInitiatorPhase::Handshake(_) | NbdInitiatorPhase::Over => 0,
        }
    }

    /// NBD has no way to abort a request.
    fn abort_overdue(&mut self, _looks: u32) -> Option<&'static str> {
        None
    }
}

impl Connections for NbdInitiatorSession {}

impl StreamConnections for NbdInitiatorSession {
    #[inline]
    fn connection(&mut self, _connection: usize) -> impl StreamSession {
        self
    }
}

/// Timeout of the complete handshake, during which some servers open the exported device.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
