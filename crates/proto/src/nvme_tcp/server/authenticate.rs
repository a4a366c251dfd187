//! Authentication Send and Receive, which carry the messages of in-band authentication (Base 2.0 §6).

use super::TargetSession;
use super::execute::is_from_transport;
use crate::fabrics::controller::connect::Queue;
use crate::nvme::Outcome;
use crate::nvme::auth::MAX_MESSAGE;
use blockmux_volume::{Seg, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::status::Status;
use blockmux_wire::nvmeof::auth::{SECURITY_PROTOCOL_NVME, message_len, security_protocol};

impl TargetSession {
    /// How long a message of the host's is, in bytes, or may be that it is to get.
    pub(super) fn message_len(&self, sqe: &Sqe) -> Result<usize, Status> {
        let len = message_len(sqe) as usize;
        let is_known = self.authenticator.is_some() && security_protocol(sqe) == SECURITY_PROTOCOL_NVME;
        if !is_known || len == 0 || len > MAX_MESSAGE {
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        Ok(len)
    }

    /// The host has sent a message. What is wrong with it is in the next one of ours.
    pub(super) fn on_message(&mut self, data: &SgList) -> Outcome {
        let Some(authenticator) = &mut self.authenticator else {
            return Outcome::failure(Status::INVALID_FIELD_IN_COMMAND);
        };
        authenticator.on_message(&data.to_vec());
        self.clock.prove_by = None;
        self.look_at_authenticator();
        Outcome::success(0)
    }

    /// The host asks for our next message. It gets as many bytes as it asks for.
    pub(super) fn next_message(&mut self, sqe: &Sqe) -> Outcome {
        let room = sqe.dptr.length.get() as usize;
        let len = match self.message_len(sqe) {
            Ok(len) if is_from_transport(sqe) && room == len => len,
            Ok(_) => return Outcome::failure(Status::DATA_SGL_LENGTH_INVALID),
            Err(status) => return Outcome::failure(status),
        };
        let Some(mut message) = self.authenticator.as_mut().and_then(|it| it.message(len)) else {
            return Outcome::failure(Status::INVALID_FIELD_IN_COMMAND);
        };
        message.resize(len, 0);
        self.look_at_authenticator();
        Outcome::data(Seg::from_slice(&message).into(), 0)
    }

    /// From now on the controller is one of those that the host may have.
    fn proved(&mut self) {
        if let Some(Queue::Admin(admin)) = &self.queue
            && !admin.place.prove()
        {
            self.stopping = true;
        }
    }

    /// Who has failed to prove itself leaves, with its last answer; who has proved itself is one of many no more.
    fn look_at_authenticator(&mut self) {
        let Some(authenticator) = &mut self.authenticator else { return };
        if let Some(key) = authenticator.take_generated()
            && let Some(Queue::Admin(admin)) = &self.queue
        {
            // The latest time that this session has heard of, so that the key does not last too long.
            let now = self.clock.retry_at;
            self.node.keyring().insert(&key, &admin.host.nqn, &admin.subsystem.nqn, now);
        }
        if authenticator.has_failed() {
            self.stopping = true;
        }
        if authenticator.is_done() {
            self.permit = None;
            self.proved();
        }
    }
}
