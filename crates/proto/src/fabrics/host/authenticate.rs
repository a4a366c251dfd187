//! Authentication of one queue, as alternating Authentication Send and Receive commands.

use super::command;
use super::{Names, NvmeRefused};
use crate::initiator::command_queue::DataTransfer;
use crate::nvme::auth::MAX_MESSAGE;
use crate::nvme::auth::host::{AuthFailure, AuthStep, Concatenation, HostAuthenticator, HostCredentials};
use crate::nvme::auth::psk::InputPsk;
use blockmux_volume::{Memory, Seg, SgList};
use blockmux_wire::nvme::{Cqe, Sqe};
use blockmux_wire::nvmeof::fabrics::{AUTHREQ_ASCR, AUTHREQ_ATR, FabricsType};

/// The authentication of a queue.
pub(super) struct QueueAuthentication(HostAuthenticator);

/// The authentication that the completion of Connect requires, if any. A discovery controller need
/// not authenticate: it only names addresses, and the controllers there have to.
pub(super) fn required_authentication(
    connect_result: u64,
    credentials: Option<&HostCredentials>,
    names: &Names,
    is_discovery: bool,
) -> Result<Option<Box<QueueAuthentication>>, NvmeRefused> {
    let is_asked = connect_result as u32 & (AUTHREQ_ATR | AUTHREQ_ASCR) != 0;
    match credentials {
        None if is_asked => Err(NvmeRefused::Authentication),
        Some(credentials) if is_asked => {
            let applicant = HostAuthenticator::new(credentials.clone(), &names.host, &names.subsystem);
            Ok(Some(Box::new(QueueAuthentication(applicant))))
        }
        // The PSK of the connection has authenticated both sides already.
        Some(credentials) if credentials.concatenation == Concatenation::Done => Ok(None),
        Some(credentials) if credentials.concatenation == Concatenation::Due => {
            Err(NvmeRefused::unchallenged(AuthFailure::NoSecureChannel))
        }
        // Without this check, an attacker between host and controller could clear the flag.
        Some(credentials) if credentials.secrets.controller.is_some() && !is_discovery => {
            Err(NvmeRefused::unchallenged(AuthFailure::NotRequired))
        }
        _ => Ok(None),
    }
}

impl QueueAuthentication {
    /// The next command, its data transfer, and the memory for that, if authentication is not
    /// finished. Does not change the state.
    pub(super) fn next_command(&self) -> Option<(Sqe, DataTransfer, SgList)> {
        match self.0.turn() {
            AuthStep::Send(message) => {
                let len = message.len() as u32; // checked: at most MAX_MESSAGE
                let sqe = command::authentication(FabricsType::AUTHENTICATION_SEND, len);
                Some((sqe, DataTransfer::Out(len), SgList::one(Seg::from_slice(message))))
            }
            AuthStep::Receive => {
                let len = MAX_MESSAGE as u32;
                let sqe = command::authentication(FabricsType::AUTHENTICATION_RECEIVE, len);
                let memory = Memory::from_heap(MAX_MESSAGE).seg(0, MAX_MESSAGE);
                Some((sqe, DataTransfer::In(len), SgList::one(memory)))
            }
            AuthStep::Over(_) => None,
        }
    }

    /// The failure that the end of the connection means.
    pub(super) fn on_lost(&self) -> NvmeRefused {
        self.failed(self.0.failure().unwrap_or(AuthFailure::Closed))
    }

    fn failed(&self, failure: AuthFailure) -> NvmeRefused {
        NvmeRefused::AuthFailed { failure, algorithms: self.0.algorithms() }
    }

    /// The generated PSK, if one was requested.
    pub(super) fn generated(&self) -> Option<&InputPsk> {
        self.0.generated()
    }

    /// Handles a completion, with its data if there is any. Returns whether authentication is
    /// finished and successful.
    pub(super) fn on_answer(&mut self, cqe: &Cqe, data: &[u8]) -> Result<bool, NvmeRefused> {
        let is_sending = matches!(self.0.turn(), AuthStep::Send(_));
        let is_good = cqe.status.is_success();
        match is_sending {
            true => self.0.on_sent(),
            false if is_good => self.0.on_message(data),
            false => {}
        }
        match self.0.turn() {
            // The reason of the failure says more than the status of the command that reported it.
            AuthStep::Over(Err(unproved)) => Err(self.failed(unproved)),
            _ if !is_good => {
                let what = if is_sending { "Authentication Send" } else { "Authentication Receive" };
                Err(NvmeRefused::Command { what, status: cqe.status })
            }
            AuthStep::Over(Ok(())) => Ok(true),
            AuthStep::Send(_) | AuthStep::Receive => Ok(false),
        }
    }
}
