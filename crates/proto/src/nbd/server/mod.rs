//! The NBD target: one session for one client's connection.
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
//! [`TargetSession`] only passes on what it is told to the phase that it is in. A handshake ends in
//! `terms`: the export, the form of messages, and whether block status can be asked. In
//! transmission, `request` turns bytes into an operation or a refusal, `pending` remembers it while
//! the volume works, `reply` turns its result into bytes.
//!
//! What bounds a session: 1,000 options, and 4 for each export, of 64 KiB each and 30 seconds for a
//! handshake; in transmission 1,024 requests and 64 MiB of data and block status in flight, and 1
//! MiB of replies without data that the client leaves unread. Beyond those it is not listened to.
//! Memory for long writes comes from the core's pool; when that is empty, the session asks again at
//! each of its completions and, through [`Timed`], after pauses that grow from 1 to 128 ms.
//!
//! A client cannot register for reservations: one that somebody else holds keeps its writes out, or
//! its reads as well, with `NBD_EPERM`. Requests on a range that a SCSI command has for itself wait
//! until that is over.
//!
//! With [`TargetSession::with_tls`] a client may or must upgrade its connection to TLS, which its
//! driver does ([`Demand::StartTls`]).
//!
//! The extension `EXTENDED_HEADERS` is that of the protocol document's branch
//! `extension-ext-header`.

mod handshake;
mod option;
mod pending;
mod reply;
mod request;
mod terms;
mod tls;
mod transmission;

#[cfg(test)]
mod tests;

use crate::event::{AuditEvent, AuditEvents, Login};
use crate::exports::{Exports, VolumeId};
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError, SecuredBy, SessionStage, StreamSession, Target, Timed};
use crate::volume_state::Admission;
use blockmux_volume::{Chunk, Completion, Io, Pool, Tag, Waker};
use handshake::{AfterHandshake, ServerHandshake};
use std::time::Instant;
pub use tls::{NbdTls, TlsMode};
use transmission::ServerTransmission;

/// A client's session with an NBD target.
pub struct TargetSession {
    phase: Phase,
    outbox: Outbox,
    pool: Pool,
    events: AuditEvents,
}

#[expect(clippy::large_enum_variant, reason = "a session spends its life in the larger one")]
enum Phase {
    Handshake(ServerHandshake),
    Transmission(ServerTransmission),
    /// The handshake ended without transmission.
    Closing,
}

impl TargetSession {
    /// A session for a client that has just connected; its greeting waits in the outbox.
    ///
    /// `pool` is the core's, for the payload of long writes. The client has 30 seconds from `now`
    /// on to choose an export.
    #[must_use]
    pub fn new(exports: Exports, pool: Pool, now: Instant) -> TargetSession {
        let mut outbox = Outbox::default();
        let phase = Phase::Handshake(ServerHandshake::new(exports, now, &mut outbox));
        TargetSession { phase, outbox, pool, events: AuditEvents::default() }
    }

    /// Offers TLS to the client, or requires it.
    #[must_use]
    pub fn with_tls(mut self, tls: NbdTls) -> TargetSession {
        if let Phase::Handshake(handshake) = &mut self.phase {
            handshake.set_tls(tls);
        }
        self
    }
}

impl Timed for TargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Handshake(handshake) => Some(handshake.deadline()),
            Phase::Transmission(transmission) => transmission.poll_timeout(),
            Phase::Closing => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            Phase::Handshake(handshake) if now >= handshake.deadline() => Err(ProtocolError {
                what: "did not finish its handshake within 30 seconds",
                reference: "proto.md, \"Termination of the session during option haggling\"",
            }),
            Phase::Handshake(_) | Phase::Closing => Ok(()),
            Phase::Transmission(transmission) => {
                transmission.on_timeout(now, &mut self.outbox);
                Ok(())
            }
        }
    }
}

impl StreamSession for TargetSession {
    fn demand(&self) -> Demand {
        match &self.phase {
            Phase::Handshake(handshake) => handshake.demand(&self.outbox),
            Phase::Transmission(transmission) => transmission.demand(&self.outbox),
            Phase::Closing => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        let mut taken = 0;
        if let Phase::Handshake(handshake) = &mut self.phase {
            let next;
            let step = handshake.on_bytes(input.unread(), &mut self.outbox);
            if let Some((export, reason)) = handshake.take_refusal() {
                let login = login(handshake.client(), export);
                self.events.push(AuditEvent::Refused { login, reason });
            }
            (taken, next) = step?;
            match next {
                Some(AfterHandshake::Transmit(terms)) => {
                    let Some(served) = handshake.served(&terms) else {
                        self.phase = Phase::Closing;
                        return Ok(taken);
                    };
                    self.events.push(AuditEvent::Login(login(handshake.client(), handshake.name_of(&terms))));
                    let transmission =
                        ServerTransmission::new(terms, Admission::new(&served, None), self.pool.clone(), now);
                    self.phase = Phase::Transmission(transmission);
                }
                Some(AfterHandshake::Close) => self.phase = Phase::Closing,
                None => {}
            }
        }
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.on_bytes(input, taken, now, &mut self.outbox),
            Phase::Handshake(_) | Phase::Closing => Ok(taken),
        }
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        if let Phase::Handshake(handshake) = &mut self.phase
            && let Some(reason) = handshake.on_secured(by)
        {
            let login = login(handshake.client(), String::new());
            self.events.push(AuditEvent::Refused { login, reason: reason.into() });
        }
        Ok(())
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.on_placed(&mut self.outbox);
        }
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let in_between = match &mut self.phase {
            Phase::Transmission(transmission) => return transmission.on_end(),
            Phase::Handshake(handshake) => handshake.is_between_messages(),
            Phase::Closing => true,
        };
        self.phase = Phase::Closing;
        if in_between {
            return Ok(());
        }
        Err(ProtocolError {
            what: "left in the middle of an option",
            reference: "proto.md, \"Newstyle negotiation\"",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Target for TargetSession {
    fn depth(&self) -> u32 {
        transmission::DEPTH
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.poll_io(),
            Phase::Handshake(_) | Phase::Closing => None,
        }
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        None
    }

    fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

    /// A client should send `NBD_CMD_DISC` first, but many that are killed or done do not, and
    /// nothing that was answered is lost.
    fn is_close_a_logout(&self) -> bool {
        true
    }

    #[inline]
    fn on_turn(&mut self, _now: Instant) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.take_memory();
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.on_io(done, now, &mut self.outbox);
        }
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop().or_else(|| match &mut self.phase {
            Phase::Transmission(transmission) => transmission.poll_event(),
            Phase::Handshake(_) | Phase::Closing => None,
        })
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match self.phase {
            Phase::Transmission(_) => SessionStage::Established,
            Phase::Handshake(_) | Phase::Closing => SessionStage::Handshake,
        }
    }

    fn owed(&self) -> Option<u64> {
        None
    }

    fn on_stop(&mut self, _now: Instant) {
        match &mut self.phase {
            Phase::Handshake(handshake) => handshake.on_stop(),
            Phase::Transmission(transmission) => transmission.on_stop(),
            Phase::Closing => {}
        }
    }
}

/// Clients of NBD have no names but those by which TLS authenticates them.
fn login(client: &str, export: String) -> Login {
    Login { protocol: "nbd", initiator: client.to_owned(), target: export }
}
