//! The NBD target: one session for each connection of a client.
//!
//! ```text
//!             ┌──────────────┐  NBD_OPT_GO, NBD_OPT_EXPORT_NAME  ┌────────────────┐
//!   new ────▶ │  Handshake   │ ────────────────────────────────▶ │  Transmission  │
//!             │ handshake.rs │                                   │transmission.rs │
//!             └──────────────┘                                   └────────────────┘
//!                     │ NBD_OPT_ABORT                                     │ NBD_CMD_DISC,
//!                     ▼                                                   ▼ stopped and nothing in flight
//!                  Closing ──────────────▶ Demand::Close ◀────────────────┘
//! ```
//! [`NbdTargetSession`] forwards every call to the current phase. A handshake results in `params`:
//! the export, the header format, whether block status is available, and whether the client has to
//! respect the block sizes. In the transmission phase, `request` parses and checks, `pending` holds
//! the requests in flight, and `reply` writes the replies. `crate::multi_step` and `long_write` do
//! what the volume cannot do in one I/O, see
//! `docs/decisions/0083-nbd-clients-that-did-not-ask-need-no-block-size.md`.
//!
//! Limits of a session: 1,000 options plus 4 for each export, 64 KiB of data for each, and 30
//! seconds for the handshake; then 1,024 requests in flight, 64 MiB of their data and block status,
//! and 1 MiB of unsent replies without data. At a limit, the session reads nothing more from the
//! client. Memory for long writes comes from the core's pool. When the pool is empty, the session
//! retries at each completion and, through [`Timed`], after a backoff of 1 to 128 ms.
//!
//! NBD has no registrations: while an initiator of another protocol holds a reservation, the writes
//! of NBD clients fail with `NBD_EPERM`, and with exclusive access their reads as well. Requests on
//! a range that a command of any protocol has locked wait until it is unlocked.
//!
//! `EXTENDED_HEADERS` is implemented as in the branch `extension-ext-header` of the protocol's
//! document.

mod handover;
mod handshake;
mod long_write;
mod option;
mod params;
mod pending;
mod reply;
mod request;
mod tls;
mod transmission;

#[cfg(test)]
mod tests;

use crate::driver::audit_event::{AuditEvent, AuditEvents, Login};
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, SecuredBy, StreamSession, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::{Export, Exports, VolumeId};
use crate::nbd::HeaderFormat;
use crate::volume_state::{Admission, Epoch, NotAdmitted};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool, Tag, Waker};
use blockmux_wire::nbd::handshake::TransmissionFlags;
pub use handover::NbdResumeError;
use handshake::{AfterHandshake, ServerHandshake};
use params::ServerParams;
use std::time::Instant;
pub use tls::{NbdTls, TlsMode};
use transmission::ServerTransmission;

/// Session of an NBD target with one client.
pub struct NbdTargetSession {
    phase: NbdTargetPhase,
    outbox: Outbox,
    pool: Pool,
    events: AuditEvents,
    /// Name of the export that the client chose; empty during the handshake.
    export: String,
}

enum NbdTargetPhase {
    Handshake(ServerHandshake),
    Transmission(ServerTransmission),
    /// The handshake ended without transmission.
    Closing,
}

impl NbdTargetSession {
    /// A session for a new connection; its greeting is in the outbox.
    ///
    /// `pool` is the core's pool, for the payloads of long writes. The client has 30 seconds from
    /// `now` to choose an export.
    #[must_use]
    pub fn new(exports: Exports, pool: Pool, now: Instant) -> NbdTargetSession {
        let mut outbox = Outbox::default();
        let phase = NbdTargetPhase::Handshake(ServerHandshake::new(exports, now, &mut outbox));
        NbdTargetSession { phase, outbox, pool, events: AuditEvents::default(), export: String::new() }
    }

    /// A session without a handshake, for a client of this machine that was told the export's size,
    /// block and [`transmission_flags`] in another way. `None` if the volume was removed.
    #[must_use]
    pub fn negotiated(
        exports: &Exports,
        volume: VolumeId,
        pool: Pool,
        now: Instant,
    ) -> Option<NbdTargetSession> {
        let (export, volume_state) = (exports.get(volume)?, exports.volume_state(volume)?);
        let params = ServerParams::new(volume, &export, HeaderFormat::Simple, false, true);
        let admission = Admission::new(&volume_state, None, Epoch::current());
        let transmission = ServerTransmission::new(params, admission, pool.clone(), now);
        let phase = NbdTargetPhase::Transmission(transmission);
        let mut events = AuditEvents::default();
        events.push(AuditEvent::Login(login("", export.name.clone())));
        Some(NbdTargetSession { phase, outbox: Outbox::default(), pool, events, export: export.name.clone() })
    }

    /// Continues a session that another process has handed over, see
    /// [`NbdTargetSession::hand_over`].
    ///
    /// # Errors
    /// If the export is missing or its advertised properties have changed, if the volume has fenced
    /// the session, or if the state was written by another version.
    pub fn resumed(
        exports: &Exports,
        pool: Pool,
        now: Instant,
        state: &[u8],
    ) -> Result<NbdTargetSession, NbdResumeError> {
        let (params, export) = handover::decode(state, exports)?;
        let volume_state = exports.volume_state(params.volume).ok_or(NbdResumeError::NoExport)?;
        if volume_state.fences(Epoch::HANDED_OVER) {
            return Err(NbdResumeError::Fenced);
        }
        let admission = Admission::new(&volume_state, None, Epoch::HANDED_OVER);
        let phase =
            NbdTargetPhase::Transmission(ServerTransmission::new(params, admission, pool.clone(), now));
        let mut events = AuditEvents::default();
        events.push(AuditEvent::Login(login("", export.clone())));
        Ok(NbdTargetSession { phase, outbox: Outbox::default(), pool, events, export })
    }

    /// Prepares for another process to continue this session: no further request is taken from the
    /// connection once the transmission phase has begun. Returns the session's state as soon as
    /// every request that was taken is answered and sent; until then `None`, and the call is
    /// repeated. Not for a client that uses TLS.
    #[must_use]
    pub fn hand_over(&mut self) -> Option<Vec<u8>> {
        let NbdTargetPhase::Transmission(transmission) = &mut self.phase else { return None };
        transmission.pause();
        let is_idle = transmission.is_idle() && self.outbox.is_empty();
        is_idle.then(|| {
            let is_fenced = transmission.is_fenced();
            handover::encode(&transmission.params, &self.export, is_fenced)
        })
    }

    /// Offers TLS to the client, or requires it.
    #[must_use]
    pub fn with_tls(mut self, tls: NbdTls) -> NbdTargetSession {
        if let NbdTargetPhase::Handshake(handshake) = &mut self.phase {
            handshake.set_tls(tls);
        }
        self
    }
}

impl Timed for NbdTargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            NbdTargetPhase::Handshake(handshake) => Some(handshake.deadline),
            NbdTargetPhase::Transmission(transmission) => transmission.poll_timeout(),
            NbdTargetPhase::Closing => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            NbdTargetPhase::Handshake(handshake) if now >= handshake.deadline => Err(ProtocolError {
                what: "did not finish its handshake within 30 seconds",
                reference: "proto.md, \"Termination of the session during option haggling\"",
            }),
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => Ok(()),
            NbdTargetPhase::Transmission(transmission) => {
                transmission.on_timeout(now);
                Ok(())
            }
        }
    }
}

impl StreamSession for NbdTargetSession {
    fn demand(&self) -> Demand {
        match &self.phase {
            NbdTargetPhase::Handshake(handshake) => handshake.demand(&self.outbox),
            NbdTargetPhase::Transmission(transmission) => transmission.demand(&self.outbox),
            NbdTargetPhase::Closing => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        let mut taken = 0;
        if let NbdTargetPhase::Handshake(handshake) = &mut self.phase {
            let next;
            // Before the handshake finds that this process serves the volume.
            let epoch = Epoch::current();
            let step = handshake.on_bytes(input.unread(), &mut self.outbox);
            if let Some((export, reason)) = handshake.refusal.take() {
                let login = login(handshake.client(), export);
                self.events.push(AuditEvent::Refused { login, reason });
            }
            (taken, next) = step?;
            match next {
                Some(AfterHandshake::Transmit(params)) => {
                    let Some(volume_state) = handshake.volume_state(&params) else {
                        self.phase = NbdTargetPhase::Closing;
                        return Ok(taken);
                    };
                    self.export = handshake.name_of(&params);
                    self.events.push(AuditEvent::Login(login(handshake.client(), self.export.clone())));
                    let transmission = ServerTransmission::new(
                        params,
                        Admission::new(&volume_state, None, epoch),
                        self.pool.clone(),
                        now,
                    );
                    self.phase = NbdTargetPhase::Transmission(transmission);
                }
                Some(AfterHandshake::Close) => self.phase = NbdTargetPhase::Closing,
                None => {}
            }
        }
        match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => {
                transmission.on_bytes(input, taken, now, &mut self.outbox)
            }
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => Ok(taken),
        }
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        if let NbdTargetPhase::Handshake(handshake) = &mut self.phase
            && let Some(reason) = handshake.on_secured(by)
        {
            let login = login(handshake.client(), String::new());
            self.events.push(AuditEvent::Refused { login, reason: reason.into() });
        }
        Ok(())
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        if let NbdTargetPhase::Transmission(transmission) = &mut self.phase {
            transmission.on_placed(&mut self.outbox);
        }
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let in_between = match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => return transmission.on_end(),
            NbdTargetPhase::Handshake(handshake) => handshake.is_between_messages(),
            NbdTargetPhase::Closing => true,
        };
        self.phase = NbdTargetPhase::Closing;
        if in_between {
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection in the middle of an option",
            reference: "proto.md, \"Newstyle negotiation\"",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl IoSource for NbdTargetSession {
    fn depth(&self) -> u32 {
        transmission::DEPTH
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => transmission.poll_io(),
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => None,
        }
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        None
    }

    fn charge(&mut self, io: &Io) -> Charge {
        match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => transmission.charge(io),
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => Charge { cost: None, station: None },
        }
    }

    #[inline]
    fn begin(&mut self, _volume: VolumeId, io: &Io, _is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => transmission.begin(io, &mut self.outbox),
            _ => Err(NotAdmitted::Denied(IoError::Aborted)),
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        if let NbdTargetPhase::Transmission(transmission) = &mut self.phase {
            transmission.on_io(done, now, &mut self.outbox);
        }
    }
}

impl TargetLifecycle for NbdTargetSession {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

    /// A client should send `NBD_CMD_DISC` before it closes, but many do not, and nothing that was
    /// answered is lost.
    fn is_close_a_logout(&self) -> bool {
        true
    }

    #[inline]
    fn on_turn(&mut self, _now: Instant) {
        if let NbdTargetPhase::Transmission(transmission) = &mut self.phase {
            transmission.take_memory();
        }
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop().or_else(|| match &mut self.phase {
            NbdTargetPhase::Transmission(transmission) => transmission.poll_event(),
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => None,
        })
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match self.phase {
            NbdTargetPhase::Transmission(_) => SessionStage::Established,
            NbdTargetPhase::Handshake(_) | NbdTargetPhase::Closing => SessionStage::Handshake,
        }
    }

    fn owed(&self) -> Option<u64> {
        None
    }

    fn on_stop(&mut self, _now: Instant) {
        match &mut self.phase {
            NbdTargetPhase::Handshake(handshake) => handshake.on_stop(),
            NbdTargetPhase::Transmission(transmission) => transmission.on_stop(),
            NbdTargetPhase::Closing => {}
        }
    }
}

/// The transmission flags of an export for a client that uses simple replies.
#[must_use]
pub fn transmission_flags(volume: VolumeId, export: &Export) -> TransmissionFlags {
    ServerParams::new(volume, export, HeaderFormat::Simple, false, true).transmission_flags()
}

/// The login for the log; an NBD client has no name unless TLS authenticates it.
fn login(client: &str, export: String) -> Login {
    let is_authenticated = !client.is_empty();
    Login { protocol: "nbd", initiator: client.to_owned(), target: export, is_authenticated }
}
