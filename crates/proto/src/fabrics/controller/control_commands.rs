//! Commands other than I/O: admin commands, and the Fabrics commands Connect, Property Get and Set,
//! Disconnect, and Authentication Send and Receive (Base 2.0 §6).

use super::ControllerQueue;
use super::commands::CommandState;
use super::connect::{self, Connected, ConnectedQueue, NotConnected};
use super::discovery;
use super::keep_alive::KeepAlive;
use super::transport::FabricsTransport;
use crate::driver::audit_event::AuditEvent;
use crate::nvme::NvmeOutcome;
use crate::nvme::admin::AdminResult;
use crate::nvme::auth::MAX_MESSAGE;
use blockmux_volume::{Seg, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvmeof::auth::{SECURITY_PROTOCOL_NVME, message_len, security_protocol};
use blockmux_wire::nvmeof::fabrics::{
    ATTRIB_8_BYTES, AUTHREQ_ATR, CONNECT_DATA_LEN, Connect, FabricsType, PropertyCommand, fabrics_type,
};
use zerocopy::transmute_ref;

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Executes an admin command.
    pub(super) fn administer(&mut self, slot: usize, sqe: &Sqe, data: &SgList) {
        let Some(ConnectedQueue::Admin(admin)) = &mut self.queue else { return };
        let (node, connection, host) = (&self.node, &self.connection, admin.host.nqn.clone());
        let ends = (connection.local, connection.peer_ip);
        let log = || discovery::page(node, &host, ends, T::TRTYPE);
        let commands = &self.commands;
        let executed = admin.execute(sqe, data, slot, &|cid| commands.find(cid), &log);
        KeepAlive::set(&mut self.timers.keep_alive, admin.keep_alive(), self.timers.now);
        match executed {
            AdminResult::AwaitsEvent => self.commands.wait_for_event(slot),
            AdminResult::Waiting => {
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = CommandState::Other;
                }
            }
            AdminResult::Aborted(other) => {
                self.finish(other, NvmeOutcome::failure(NvmeStatus::COMMAND_ABORT_REQUESTED));
                self.finish(slot, NvmeOutcome::success(0));
            }
            AdminResult::Done(outcome) => {
                let room = T::descriptor(sqe);
                if outcome.data.is_empty() || outcome.data.len() <= room.len && room.is_at_host() {
                    self.finish(slot, outcome);
                } else {
                    self.finish(slot, NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID));
                }
            }
        }
        self.send_events();
    }

    /// Length of the host's data for a Fabrics command, in bytes.
    pub(super) fn fabrics_data_out(&self, sqe: &Sqe) -> Result<usize, NvmeStatus> {
        match fabrics_type(sqe) {
            FabricsType::CONNECT => Ok(CONNECT_DATA_LEN),
            FabricsType::AUTHENTICATION_SEND => self.message_len(sqe),
            _ => Ok(0),
        }
    }

    pub(super) fn on_fabrics(&mut self, slot: usize, sqe: &Sqe, data: SgList) {
        let is_authenticated = self.is_authenticated();
        let outcome = match (fabrics_type(sqe), &mut self.queue) {
            (FabricsType::CONNECT, None) => return self.connect(slot, sqe, data),
            (FabricsType::AUTHENTICATION_SEND, Some(_)) => {
                let outcome = self.on_message(&data);
                self.finish(slot, outcome);
                // A command that waits for the reply to an earlier message gets that to this one.
                return self.go_on_authenticating();
            }
            (FabricsType::AUTHENTICATION_RECEIVE, Some(_)) => match self.next_message(slot, sqe) {
                Some(outcome) => outcome,
                None => return,
            },
            (FabricsType::CONNECT, Some(_)) | (_, None) => {
                NvmeOutcome::failure(NvmeStatus::COMMAND_SEQUENCE_ERROR)
            }
            (_, Some(_)) if !is_authenticated => NvmeOutcome::failure(NvmeStatus::AUTHENTICATION_REQUIRED),
            (FabricsType::PROPERTY_GET, Some(ConnectedQueue::Admin(admin))) => {
                let get: &PropertyCommand = transmute_ref!(sqe);
                let is_long = get.attrib & 7 == ATTRIB_8_BYTES;
                let value = admin.properties.get(&admin.guard, get.ofst.get(), is_long);
                value.map_or_else(NvmeOutcome::failure, NvmeOutcome::success)
            }
            (FabricsType::PROPERTY_SET, Some(ConnectedQueue::Admin(admin))) => {
                let set: &PropertyCommand = transmute_ref!(sqe);
                let is_long = set.attrib & 7 == ATTRIB_8_BYTES;
                let done = admin.properties.set(&admin.guard, set.ofst.get(), is_long, set.value.get());
                if !admin.properties.is_ready() {
                    // A reset or shutdown ends Asynchronous Event Requests without completing them
                    // (Base 2.0 §5.2).
                    for event in admin.events.reset() {
                        self.commands.remove(event);
                    }
                }
                self.audit_property(set);
                done.map_or_else(NvmeOutcome::failure, |()| NvmeOutcome::success(0))
            }
            (FabricsType::DISCONNECT, Some(ConnectedQueue::Admin(_))) => {
                NvmeOutcome::failure(NvmeStatus::DISCONNECT_INVALID_QUEUE_TYPE)
            }
            (FabricsType::DISCONNECT, Some(ConnectedQueue::Io(_))) => {
                // The completion of Disconnect is the queue's last, after all outstanding commands;
                // then the connection ends.
                self.audit.push(AuditEvent::Logout { reason: "the host disconnected its queue" });
                self.stopping = true;
                self.end_fusing();
                self.wait(slot);
                return self.resume();
            }
            _ => NvmeOutcome::failure(NvmeStatus::INVALID_COMMAND_OPCODE),
        };
        self.finish(slot, outcome);
    }

    pub(super) fn connect(&mut self, slot: usize, sqe: &Sqe, data: SgList) {
        let command: &Connect = transmute_ref!(sqe);
        match connect::connect(&self.node, command, &data, &self.connection) {
            Ok(Connected { queue, events, authenticator, cntlid, size, has_flow_control }) => {
                if let ConnectedQueue::Admin(admin) = &queue {
                    KeepAlive::set(&mut self.timers.keep_alive, admin.keep_alive(), self.timers.now);
                }
                self.queue = Some(queue);
                self.events = events;
                self.authenticator = authenticator;
                self.timers.expect_message();
                if self.is_authenticated() {
                    self.connection.permit = None;
                    self.audit_login();
                }
                self.depth = size;
                self.sqhd = has_flow_control.then_some(0);
                let authreq = if self.is_authenticated() { 0 } else { AUTHREQ_ATR };
                self.finish(slot, NvmeOutcome::success(u64::from(u32::from(cntlid) | authreq)));
            }
            Err(NotConnected::Refused(outcome)) => {
                self.audit_refusal(&data, &outcome);
                self.finish(slot, outcome);
            }
            Err(NotConnected::Later) => {
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = CommandState::Connect;
                }
                self.connecting = Some((slot, data));
            }
        }
    }

    /// Length in bytes of an authentication message, or of the host's buffer for one.
    fn message_len(&self, sqe: &Sqe) -> Result<usize, NvmeStatus> {
        let len = message_len(sqe) as usize;
        let is_known = self.authenticator.is_some() && security_protocol(sqe) == SECURITY_PROTOCOL_NVME;
        if !is_known || len == 0 || len > MAX_MESSAGE {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        Ok(len)
    }

    /// Handles an authentication message of the host. A violation is reported in the next message
    /// to the host.
    fn on_message(&mut self, data: &SgList) -> NvmeOutcome {
        let (Some(authenticator), Some(queue)) = (&mut self.authenticator, &self.queue) else {
            return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        };
        authenticator.on_message(&data.to_vec(), || queue.subsystem().secrets_of(queue.host()));
        self.is_computing = authenticator.is_computing();
        self.timers.expect_message();
        self.after_message();
        NvmeOutcome::success(0)
    }

    /// Returns the next authentication message, padded to the length that the host asked for. While
    /// it is being computed, the command waits.
    fn next_message(&mut self, slot: usize, sqe: &Sqe) -> Option<NvmeOutcome> {
        let room = T::descriptor(sqe);
        let len = match self.message_len(sqe) {
            Ok(len) if room.is_at_host() && room.len == len => len,
            Ok(_) => return Some(NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID)),
            Err(status) => return Some(NvmeOutcome::failure(status)),
        };
        let authenticator = self.authenticator.as_mut()?;
        if authenticator.is_computing() {
            if self.receiving.is_some() {
                return Some(NvmeOutcome::failure(NvmeStatus::COMMAND_SEQUENCE_ERROR));
            }
            if let Some(entry) = self.commands.get_mut(slot) {
                entry.state = CommandState::Other;
            }
            self.receiving = Some(slot);
            return None;
        }
        let Some(mut message) = authenticator.message(len) else {
            return Some(NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND));
        };
        message.resize(len, 0);
        self.after_message();
        Some(NvmeOutcome::data(Seg::from_slice(&message).into(), 0))
    }

    /// Whether the queue is connected and its host authenticated.
    pub(super) fn is_usable(&self) -> bool {
        self.queue.is_some() && self.is_authenticated()
    }

    /// Whether the host is authenticated or does not have to be.
    #[inline]
    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticator.as_ref().is_none_or(|authenticator| authenticator.is_done())
    }

    /// Whether authentication is in progress.
    pub(super) fn is_authenticating(&self) -> bool {
        self.queue.is_some() && !self.is_authenticated()
    }

    /// Completes the command that waits for an authentication message, once that is computed.
    pub(super) fn go_on_authenticating(&mut self) {
        self.is_computing = self.authenticator.as_mut().is_some_and(|it| it.is_computing());
        if self.is_computing {
            return;
        }
        if let Some(slot) = self.receiving.take()
            && let Some(entry) = self.commands.get_mut(slot)
        {
            let sqe = entry.sqe;
            if let Some(outcome) = self.next_message(slot, &sqe) {
                self.finish(slot, outcome);
            }
        }
    }

    /// Handles the outcome of an authentication message: a host that failed loses its connection
    /// after the last completion; an authenticated host may have a controller.
    fn after_message(&mut self) {
        let (Some(authenticator), admin) = (&mut self.authenticator, self.queue.as_ref()) else { return };
        let admin = match admin {
            Some(ConnectedQueue::Admin(admin)) => Some(admin),
            _ => None,
        };
        if let (Some(key), Some(admin)) = (authenticator.take_generated(), admin) {
            self.node.keyring().insert(&key, &admin.host.nqn, &admin.subsystem.nqn, self.timers.now);
        }
        let (has_failed, is_done) = (authenticator.has_failed(), authenticator.is_done());
        self.stopping |= has_failed;
        let was_authenticated = self.connection.permit.is_none();
        let has_entered = is_done && self.enter_authenticated();
        match (has_failed, has_entered) {
            (true, _) => self.audit_failed_authentication(),
            (_, true) if !was_authenticated => self.audit_login(),
            _ => {}
        }
    }

    /// Whether the host has proved who it is, by DH-HMAC-CHAP or a TLS PSK.
    pub(super) fn has_proof(&self) -> bool {
        self.connection.secured.is_some()
            || self.authenticator.as_ref().is_some_and(|authenticator| authenticator.is_done())
    }

    /// Whether this is a discovery controller of a host that was not authenticated.
    pub(super) fn is_open_discovery(&self) -> bool {
        !self.has_proof() && self.queue.as_ref().is_some_and(|queue| queue.subsystem().is_discovery)
    }

    /// Gives an authenticated host the queue that it asked for in Connect, unless limits or another
    /// queue prevent that; then its connection ends. Returns whether the host has the queue.
    fn enter_authenticated(&mut self) -> bool {
        self.connection.permit = None;
        let has_entered = match &self.queue {
            Some(ConnectedQueue::Admin(admin)) => admin.guard.set_authenticated(),
            Some(ConnectedQueue::Claimed(claim)) => match claim.enter(&self.connection) {
                Ok((queue, events)) => {
                    (self.queue, self.events) = (Some(ConnectedQueue::Io(queue)), Some(events));
                    true
                }
                Err(_) => false,
            },
            Some(ConnectedQueue::Io(_)) | None => true,
        };
        if !has_entered {
            self.stopping = true;
            self.audit_not_entered();
        }
        has_entered
    }
}
