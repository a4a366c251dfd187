//! The login of a channel: its request is answered at once, and takes effect once the connection is
//! established.
//!
//! ```text
//!   Requested ──▶ check ──▶ accept, with what the login is going to do
//!   Connected ──▶ replace other channels ──▶ wait until they are closed ──▶ open
//! ```
//! The request may come from anybody who claims the address of another initiator: over RoCEv2 it
//! is one datagram. So it takes nothing from other channels before its sender has shown that it
//! receives what is sent to this address (decision 102). Messages that arrive before the channel is
//! open wait; there are no more of them than receive buffers.

use super::SrpTargetSession;
use crate::driver::audit_event::{AuditEvent, Login};
use crate::driver::session::ProtocolError;
use crate::rdma::cm::OtherProtocol;
use crate::rdma::target_mover::READS;
use crate::rdma::target_phase::TargetPhase;
use crate::scsi::task_set::TaskSet;
use crate::scsi::{DeviceServer, ItNexus, OpenNexus};
use crate::srp::login::{self, CheckedLogin, LoginRefusal};
use crate::srp::node::{ChannelPlace, LoginEffect};
use blockmux_wire::srp::{LoginRejectReason, LogoutReason};
use std::time::{Duration, Instant};

/// A login that was accepted and has not taken effect.
pub(super) struct PendingLogin {
    /// The login request; it is checked again each time, because the configuration may change.
    private_data: Vec<u8>,
    /// Its place among the channels of the nexus, once the connection is established.
    place: Option<ChannelPlace>,
    /// Time of the next attempt to open the channel.
    look_at: Instant,
}

impl PendingLogin {
    /// When to try again to open the channel; `None` until the connection is established.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.place.as_ref().map(|_| self.look_at)
    }
}

impl SrpTargetSession {
    /// Decides whether to accept a connection request. The initiator supports `reads` RDMA Reads
    /// of its memory at a time.
    pub(super) fn on_requested(&mut self, private_data: Vec<u8>, reads: u32) -> Result<(), ProtocolError> {
        if let Some(other @ OtherProtocol::NvmeRdma) = OtherProtocol::of(&private_data) {
            self.reject(other.rejection());
            return Err(login_error("asked for NVMe/RDMA at a port that serves SRP"));
        }
        self.mover.max_reads = reads.min(READS);
        match self.check_login(&private_data) {
            Ok((login, effect)) => {
                let response = login.response(effect == LoginEffect::Replaces, effect == LoginEffect::Joins);
                self.phase = TargetPhase::Accepting { receives: 0, private_data: response };
                self.login = Some(PendingLogin { private_data, place: None, look_at: self.now });
                Ok(())
            }
            Err(refusal) => {
                self.reject(refusal.reject());
                Err(self.on_refused(&refusal, &private_data))
            }
        }
    }

    /// Checks a login request; returns also what it is going to do to the other channels.
    fn check_login(&self, private_data: &[u8]) -> Result<(CheckedLogin, LoginEffect), LoginRefusal> {
        let login = CheckedLogin::read(private_data, &self.node, self.client)?;
        if self.is_ending {
            let reason = LoginRejectReason::INSUFFICIENT_RESOURCES;
            return Err(login.refuse(reason, "asked to log in while the target stops"));
        }
        if self.mover.max_reads == 0 {
            let reason = LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL;
            return Err(login.refuse(reason, "does not support RDMA Reads, which transfer data-out"));
        }
        let effect = self.node.channels.effect(login.nexus, &login.units, login.is_single_channel);
        if effect == LoginEffect::Refused { Err(too_many_channels(&login)) } else { Ok((login, effect)) }
    }

    /// The connection is established: the login takes effect.
    pub(super) fn on_connected(&mut self) -> Result<(), ProtocolError> {
        self.deadline = self.now.checked_add(CHANNEL_TIMEOUT).unwrap_or(self.now);
        self.log_in()
    }

    /// Continues a login whose time has come.
    ///
    /// # Errors
    /// If it took too long.
    pub(super) fn continue_login(&mut self) -> Result<(), ProtocolError> {
        match &self.login {
            Some(PendingLogin { place: Some(_), look_at, .. }) if *look_at <= self.now => self.log_in(),
            Some(PendingLogin { place: Some(_), .. }) => Ok(()),
            None if !matches!(self.phase, TargetPhase::Listening) => Ok(()),
            _ if self.now < self.deadline => Ok(()),
            _ => Err(login_error("did not log in within 30 seconds")),
        }
    }

    /// Opens the channel of the pending login, or has it wait until those that it replaces are
    /// closed.
    fn log_in(&mut self) -> Result<(), ProtocolError> {
        let Some(mut login) = self.login.take() else { return Ok(()) };
        match self.open_channel(&mut login) {
            Ok(true) => Ok(()),
            Ok(false) => {
                login.look_at = self.now.checked_add(CHANNEL_POLL).unwrap_or(self.now);
                self.login = Some(login);
                Ok(())
            }
            Err(refusal) => {
                self.end(Some(LogoutReason::UNSPECIFIED));
                Err(self.on_refused(&refusal, &login.private_data))
            }
        }
    }

    /// Enters the channel among those of its nexus, and opens it. Returns `false` if other channels
    /// have to end first.
    fn open_channel(&mut self, pending: &mut PendingLogin) -> Result<bool, LoginRefusal> {
        let login = CheckedLogin::read(&pending.private_data, &self.node, self.client)?;
        // The access list may have changed since.
        let entered = pending.place.take().filter(|place| place.sees(&login.units));
        let enter = || {
            let (channels, hang_up) = (&self.node.channels, self.hang_up.clone());
            channels.enter(login.nexus, &login.units, login.is_single_channel, hang_up)
        };
        let Some(place) = entered.or_else(enter) else { return Err(too_many_channels(&login)) };
        let (initiator, target) = login.nexus;
        let identity = || ItNexus::srp(&initiator.0, login.target.port.clone());
        let Some(nexus) = place.open(|| OpenNexus::new(&login.units, identity())) else {
            if self.now >= self.deadline {
                let reason = LoginRejectReason::INSUFFICIENT_RESOURCES;
                let what = "logged in while I/O of its other channels did not end within 15 seconds";
                return Err(login.refuse(reason, what));
            }
            pending.place = Some(place);
            return Ok(false);
        };
        self.tasks = TaskSet::new(Some(DeviceServer::of_nexus(nexus)));
        self.place = Some(place);
        self.immediate_offset = login.immediate_offset;
        self.events.push(AuditEvent::Login(login_of((initiator.to_string(), target.to_string()))));
        Ok(true)
    }

    fn reject(&mut self, private_data: Vec<u8>) {
        self.phase = TargetPhase::Rejecting(private_data);
        self.is_ending = true;
    }

    /// Reports a refused login to the log, and returns its error.
    fn on_refused(&mut self, refusal: &LoginRefusal, private_data: &[u8]) -> ProtocolError {
        let error = login_error(refusal.what);
        let names = login::named(private_data)
            .map(|(initiator, target)| (initiator.to_string(), target.to_string()))
            .unwrap_or_default();
        self.events.push(AuditEvent::refused_by(&error, login_of(names)));
        error
    }
}

fn too_many_channels(login: &CheckedLogin) -> LoginRefusal {
    login.refuse(LoginRejectReason::CHANNEL_LIMIT_REACHED, "has as many channels as it may have")
}

/// The login for the log, of an initiator port at a target port. SRP has no authentication.
fn login_of((initiator, target): (String, String)) -> Login {
    Login { protocol: NAME, initiator, target, is_authenticated: false }
}

/// A protocol error that cites the section on logins.
fn login_error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6.2" }
}

const NAME: &str = "srp";
/// Time limit of the wait for other channels to end.
const CHANNEL_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval at which a login checks whether the channels that it replaces are closed.
const CHANNEL_POLL: Duration = Duration::from_millis(10);
