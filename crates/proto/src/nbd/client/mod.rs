//! The NBD client: reaches one export of a server.
//!
//! ```text
//!   Handshake ──GO acknowledged──▶ Transmission ──on_stop, nothing in flight──▶ over
//!        └──── refused, or all was told that was asked for ────────────────────▶ over
//! ```
//! [`InitiatorSession`] is driven as [`crate::session`] says. When it is over, its demand is
//! [`Demand::Close`]; then [`InitiatorSession::refused`] says whether the server would not have us.

mod export;
mod extents;
mod handshake;
mod head;
mod option;
mod refused;
mod reply;
mod request;
mod transmission;

#[cfg(test)]
mod tests;

pub use crate::io_queue::DEPTH;
pub use blockmux_wire::nbd::handshake::TransmissionFlags;
pub use export::{BlockSize, ExportInfo, Headers, ListedExport};
pub use refused::NbdRefused;

use crate::outbox::Outbox;
use crate::session::{
    Connections, Demand, Initiator, Overdue, PathRank, ProtocolError, SecuredBy, StreamConnections,
    StreamSession, Timed,
};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool, VolumeInfo};
use handshake::{ClientHandshake, HandshakeEnd};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use transmission::ClientTransmission;

/// What to ask a server for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The export's name, at most 4096 bytes; empty for the server's default.
    pub export: String,
    /// What for.
    pub mode: Mode,
    /// What to offer.
    pub features: Features,
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To read and write the export.
    Go,
    /// To learn everything about the export, and leave.
    Info,
    /// To list all exports, and leave.
    List,
}

/// What to negotiate where the server can; everything by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// 64-bit lengths and fixed-size reply heads.
    pub extended_headers: bool,
    /// Structured replies, where extended headers are not to be had.
    pub structured_replies: bool,
}

impl Default for Features {
    fn default() -> Features {
        Features { extended_headers: true, structured_replies: true }
    }
}

/// One connection to a server, from its greeting on.
pub struct InitiatorSession {
    phase: Phase,
    outbox: Outbox,
    pool: Pool,
    /// When the handshake has to be over.
    deadline: Instant,
    /// Bytes in one piece that the handshake needs to go on.
    need: usize,
    is_stopping: bool,
    export: Option<ExportInfo>,
    exports: Vec<ListedExport>,
    left_out: u64,
    refused: Option<NbdRefused>,
    /// What was submitted without a transmission phase to do it.
    failed: VecDeque<Completion>,
}

enum Phase {
    Handshake(Box<ClientHandshake>),
    Transmission(Box<ClientTransmission>),
    Over,
}

impl InitiatorSession {
    /// A session on a fresh connection; reads without a buffer take memory from `pool` where
    /// nothing can be lent.
    #[must_use]
    pub fn new(config: Config, pool: Pool, now: Instant) -> InitiatorSession {
        let handshake = ClientHandshake::new(config);
        InitiatorSession {
            need: handshake.need(),
            phase: Phase::Handshake(Box::new(handshake)),
            outbox: Outbox::default(),
            pool,
            deadline: now.checked_add(HANDSHAKE_TIMEOUT).unwrap_or(now),
            is_stopping: false,
            export: None,
            exports: Vec::new(),
            left_out: 0,
            refused: None,
            failed: VecDeque::new(),
        }
    }

    /// Asks the server for nothing without TLS, which the driver makes ([`Demand::StartTls`]).
    #[must_use]
    pub fn with_tls(mut self) -> InitiatorSession {
        if let Phase::Handshake(handshake) = &mut self.phase {
            handshake.require_tls();
        }
        self
    }

    /// The export, once the server has described it.
    #[must_use]
    pub fn export(&self) -> Option<&ExportInfo> {
        self.export.as_ref()
    }

    /// The export as a volume, once the server has described it.
    #[must_use]
    pub fn volume_info(&self) -> Option<VolumeInfo> {
        self.export.as_ref().map(ExportInfo::volume_info)
    }

    /// What [`Mode::List`] found, at most 10,000 exports.
    #[must_use]
    pub fn exports(&self) -> &[ListedExport] {
        &self.exports
    }

    /// How many more exports the server listed than [`InitiatorSession::exports`] holds.
    #[must_use]
    pub fn exports_left_out(&self) -> u64 {
        self.left_out
    }

    /// Why the server would not do what was asked, if it would not.
    #[must_use]
    pub fn refused(&self) -> Option<&NbdRefused> {
        self.refused.as_ref()
    }

    /// Whether the session has come to its end: everything asked for was told, or refused, or it
    /// was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.phase {
            Phase::Handshake(_) => false,
            Phase::Transmission(transmission) => transmission.is_disconnected(),
            Phase::Over => true,
        }
    }

    /// Takes handshake messages from `bytes` until there are no more or it is over; returns how
    /// many bytes.
    fn on_handshake_bytes(&mut self, bytes: &[u8]) -> Result<usize, ProtocolError> {
        let mut at = 0_usize;
        while let Phase::Handshake(handshake) = &mut self.phase {
            let rest = bytes.get(at..).unwrap_or_default();
            match handshake.on_bytes(rest, &mut self.outbox)? {
                handshake::HandshakeProgress::Took(len) => at = at.saturating_add(len),
                handshake::HandshakeProgress::Needs(need) => {
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
        self.phase = Phase::Over;
        match end {
            HandshakeEnd::Transmission(export, allocation) => {
                let mut transmission = ClientTransmission::new(&export, allocation, self.pool.clone());
                if self.is_stopping {
                    transmission.stop(&mut self.outbox);
                }
                self.phase = Phase::Transmission(Box::new(transmission));
                self.export = Some(export);
            }
            HandshakeEnd::Described(export) => self.export = Some(export),
            HandshakeEnd::Listed(list) => (self.exports, self.left_out) = (list.exports, list.left_out),
            HandshakeEnd::Refused(refused) => self.refused = Some(refused),
            HandshakeEnd::Stopped => {}
        }
    }
}

impl Timed for InitiatorSession {
    fn poll_timeout(&self) -> Option<Instant> {
        matches!(self.phase, Phase::Handshake(_)).then_some(self.deadline)
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if matches!(self.phase, Phase::Handshake(_)) && now >= self.deadline {
            return Err(ProtocolError {
                what: "did not finish the handshake within 30 seconds",
                reference: "proto.md, \"Handshake\"",
            });
        }
        Ok(())
    }
}

impl StreamSession for InitiatorSession {
    #[inline]
    fn demand(&self) -> Demand {
        match &self.phase {
            Phase::Handshake(handshake) if handshake.awaits_tls() => Demand::StartTls,
            Phase::Handshake(_) => Demand::Bytes(self.need),
            Phase::Transmission(transmission) if transmission.is_disconnected() => Demand::Close,
            Phase::Transmission(transmission) => match transmission.reading.place() {
                Some(target) => Demand::Place(target.clone()),
                None => Demand::Bytes(transmission.need),
            },
            Phase::Over => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        let mut at = 0;
        if let Phase::Handshake(_) = self.phase {
            at = self.on_handshake_bytes(input.unread())?;
        }
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.on_bytes(input, at, &mut self.outbox),
            Phase::Handshake(_) => Ok(at),
            // What comes after the end is of no interest.
            Phase::Over => Ok(input.unread().len()),
        }
    }

    fn on_secured(&mut self, _by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        if let Phase::Handshake(handshake) = &mut self.phase {
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
            Phase::Transmission(transmission) => transmission.on_placed(&mut self.outbox),
            Phase::Handshake(_) | Phase::Over => Ok(()),
        }
    }

    /// Without a request in flight the server may leave, as one does that is shut down; the driver,
    /// who knows whether it had asked for the end, reconnects.
    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            Phase::Handshake(handshake) => {
                let end = handshake.on_end()?;
                self.end_handshake(end);
                Ok(())
            }
            Phase::Transmission(transmission) if !transmission.is_idle() => Err(ProtocolError {
                what: "closed the connection with requests in flight",
                reference: "proto.md, \"Terminating the transmission phase\"",
            }),
            Phase::Transmission(_) | Phase::Over => Ok(()),
        }
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Initiator for InitiatorSession {
    fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Transmission(_))
    }

    #[inline]
    fn room(&self) -> usize {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.room(),
            Phase::Handshake(_) | Phase::Over => 0,
        }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.submit(io, &mut self.outbox),
            Phase::Handshake(_) | Phase::Over => {
                self.failed.push_back(Completion { tag: io.tag, result: Err(IoError::PathLost) });
            }
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.poll_done(),
            Phase::Handshake(_) | Phase::Over => self.failed.pop_front(),
        }
    }

    fn poll_returned(&mut self) -> Option<Io> {
        None
    }

    /// What has completed and was not polled yet is not among them.
    ///
    /// A request that the server refused because it is shutting down counts as not completed,
    /// unless [`Initiator::on_stop`] was called: it is meant for the next session.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.outbox.clear();
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.take_unfinished(),
            Phase::Handshake(_) | Phase::Over => Vec::new(),
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
            Phase::Handshake(handshake) => handshake.stop(),
            Phase::Transmission(transmission) => transmission.stop(&mut self.outbox),
            Phase::Over => {}
        }
    }
}

impl Overdue for InitiatorSession {
    fn look(&mut self) -> u32 {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.look(),
            Phase::Handshake(_) | Phase::Over => 0,
        }
    }

    /// NBD has no way to abort a request.
    fn abort_overdue(&mut self, _looks: u32) -> Option<&'static str> {
        None
    }
}

impl Connections for InitiatorSession {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        None
    }

    fn on_connected(&mut self, _connection: usize, _now: Instant) {}

    fn on_lost(&mut self, _connection: usize, _now: Instant) -> bool {
        false
    }

    #[inline]
    fn latest(&self) -> usize {
        0
    }

    #[inline]
    fn is_awaited(&self, _connection: usize) -> bool {
        true
    }

    fn reconnects_after(&self) -> Duration {
        Duration::ZERO
    }
}

impl StreamConnections for InitiatorSession {
    #[inline]
    fn connection(&mut self, _connection: usize) -> impl StreamSession {
        self
    }
}

/// For the whole handshake: some servers open what they export only when asked for it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
