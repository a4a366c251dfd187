//! The connection of an admin queue: it brings a controller up and holds the association.

use super::line::Line;
use super::{AdminConfig, Ask, ControllerInfo, Digests, FoundSubsystem, NamespaceInfo, Refused};
use crate::fabrics::host::Admin;
use crate::nvme::auth::psk::InputPsk;
use crate::outbox::Outbox;
use crate::session::{Control, Demand, PathRank, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Chunk, Pool};
use std::time::Instant;

/// One admin queue, over one connection, from its first byte on.
pub struct AdminSession {
    line: Line,
    outbox: Outbox,
    admin: Admin,
    ask: Ask,
    is_over: bool,
}

impl AdminSession {
    /// A session on a fresh connection.
    #[must_use]
    pub fn new(config: AdminConfig, digests: Digests, pool: Pool, now: Instant) -> AdminSession {
        let mut outbox = Outbox::default();
        let line = Line::new(digests, IN_CAPSULE, pool, &mut outbox);
        AdminSession { line, outbox, ask: config.ask, admin: Admin::new(config, now), is_over: false }
    }

    /// The controller, once it has told everything.
    #[must_use]
    pub fn controller(&self) -> Option<&ControllerInfo> {
        self.admin.is_known().then(|| self.admin.controller())
    }

    /// The namespaces that were asked for, once they are known; at most 1,024.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        self.admin.namespaces()
    }

    /// What the discovery log page has, at most 10,000 entries, and how many more there are.
    #[must_use]
    pub fn found(&self) -> (&[FoundSubsystem], u64) {
        self.admin.found()
    }

    /// Why the session does not do what was asked, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.admin.refused()
    }

    /// The key of TLS that was made, where one was to be: the session is over then, and another one is to begin on a
    /// connection that is secured with it.
    #[must_use]
    pub fn generated(&self) -> Option<&InputPsk> {
        self.admin.generated()
    }

    /// Whether the session has come to its end: everything asked for was told, or refused, or it was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Sends what may be sent, and ends when it is time.
    fn advance(&mut self) {
        if !self.line.is_open || self.is_over {
            return;
        }
        while let Some(request) = self.admin.next() {
            self.line.send_command(&request, &mut self.admin, &mut self.outbox);
        }
        let is_all = self.admin.is_known() && !matches!(self.ask, Ask::Use(_));
        if is_all || self.admin.refused().is_some() || self.admin.generated().is_some() {
            self.end();
        }
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.admin.shut_down();
        // Whether it is answered makes no difference to us.
        if self.line.is_open && self.admin.is_enabled() {
            let request = self.admin.last();
            self.line.send_command(&request, &mut self.admin, &mut self.outbox);
        }
    }
}

impl Timed for AdminSession {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over { None } else { self.admin.poll_timeout() }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if self.is_over {
            return Ok(());
        }
        self.admin.on_timeout(now)?;
        self.advance();
        Ok(())
    }
}

impl StreamSession for AdminSession {
    fn demand(&self) -> Demand {
        if self.is_over { Demand::Close } else { self.line.demand() }
    }

    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        if self.is_over {
            return Ok(input.unread().len());
        }
        let taken = self.line.on_bytes(input, &mut self.admin, &mut self.outbox)?;
        self.advance();
        Ok(taken)
    }

    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        let placed = self.line.placed(&mut self.admin);
        placed.map_err(|fault| self.line.terminate(fault, &mut self.outbox))?;
        self.advance();
        Ok(())
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        if self.is_over || (self.admin.is_known() && self.line.is_between_pdus()) {
            self.is_over = true;
            return Ok(());
        }
        self.admin.on_lost();
        Err(ProtocolError {
            what: "closed the connection of an admin queue that was being brought up",
            reference: "NVMe Base 2.0 §3.5, Controller Initialization",
        })
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Control for AdminSession {
    fn is_ready(&self) -> bool {
        self.admin.is_ready() && !self.is_over
    }

    fn poll_size(&mut self) -> Option<u64> {
        self.admin.poll_size()
    }

    fn poll_path_rank(&mut self) -> Option<PathRank> {
        self.admin.poll_rank()
    }

    fn look_at_path(&mut self) {
        self.admin.ask_for_access();
        self.advance();
    }

    fn on_stop(&mut self) {
        self.end();
    }
}

/// Data that every controller takes in a capsule of an admin queue, in bytes (TCP Transport 1.0 §3.3.1).
const IN_CAPSULE: u32 = 8192;
