//! Session state that connections share: name, nexus, command numbers and tasks; and the events
//! that they send to each other.
//!
//! All connections of a session live on one core, each with its own driver. I/O completes at the
//! connection that submitted it, and only that connection frees the slots of its tasks. A
//! connection that changes a task of another one marks the task, posts a [`ConnectionEvent`] and
//! wakes the other connection.

use super::connection_table::ReassignedTask;
use super::early::EarlyRequests;
use super::full::WINDOW;
use super::retained::SentResponse;
use super::sequence::CommandWindow;
use super::tasks::Tasks;
use crate::exports::VolumeId;
use crate::iscsi::login::failure::{LoginFailure, no_such_session, too_many_connections};
use crate::iscsi::login::joinable::JoinableSession;
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::login::target::{TargetLoginResult, TargetSessionKind};
use crate::iscsi::name::Name;
use crate::iscsi::node::IscsiNode;
use crate::iscsi::sessions::SessionRegistration;
use crate::scsi::task_set::{TaskEvent, TaskSet};
use crate::scsi::{DeviceServer, ItNexus};
use blockmux_volume::Waker;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// State of a session, without its connections.
pub(super) struct SharedSession {
    pub(super) node: Arc<IscsiNode>,
    pub(super) kind: TargetSessionKind,
    pub(super) initiator: Name,
    /// Parameters negotiated by the leading connection.
    parameters: OperationalParameters,
    pub(super) window: CommandWindow,
    pub(super) early: EarlyRequests,
    /// Tasks of the session; without a device server in a discovery session.
    pub(super) tasks: Tasks,
    /// Number of immediate commands.
    pub(super) immediate: usize,
    /// Responses to commands of failed connections.
    parked: Vec<ParkedResponse>,
    connections: Vec<ConnectionEntry>,
    last_key: u32,
    /// No further connection is added.
    is_over: bool,
    /// The last connection was lost; only the nexus remains, and no connection is added.
    is_retained: bool,
    /// Registration of the session, dropped last, when none of its I/O can reach a volume.
    /// `None` in a discovery session.
    pub(super) registration: Option<SessionRegistration>,
}

/// A connection in the session's connection table.
struct ConnectionEntry {
    key: u32,
    cid: u16,
    waker: Waker,
    events: VecDeque<ConnectionEvent>,
    /// The connection was woken and has not run since.
    is_woken: bool,
    /// The connection was asked to end, or ends by itself.
    is_ending: bool,
    /// The connection has lost its socket.
    is_failed: bool,
}

/// A response that waits for TASK REASSIGN.
struct ParkedResponse {
    owner: u32,
    sent: SentResponse,
}

/// An event from one connection to another.
pub(super) enum ConnectionEvent {
    /// A task or task management function changed.
    Task(TaskEvent),
    /// Fail, and leave the tasks to others. The requester, if any, is answered by its task tag.
    Fail(Option<(u32, u32)>),
    /// Another connection has taken over a task.
    ReassignedTask(ReassignedTask),
    /// The connection with this CID was lost.
    Lost(u16),
    /// End. The requester, if any, is answered by its task tag.
    End(Option<(u32, u32)>),
    /// The connection that this task tag logged out has closed.
    LoggedOut(u32),
}

impl SharedSession {
    /// Creates a session from its leading login.
    pub(super) fn new(node: Arc<IscsiNode>, established: &mut TargetLoginResult) -> SharedSession {
        let server = match &established.session {
            TargetSessionKind::Discovery => None,
            TargetSessionKind::Normal { target, access, group_tag } => {
                let port = target.port(access, *group_tag);
                let nexus = ItNexus::iscsi(established.initiator.prepared(), established.isid, port);
                Some(DeviceServer::new(access.target.clone(), nexus))
            }
        };
        SharedSession {
            node,
            kind: established.session.clone(),
            initiator: established.initiator.clone(),
            parameters: established.parameters,
            window: CommandWindow::new(established.cmd_sn, WINDOW),
            early: EarlyRequests::default(),
            tasks: TaskSet::new(server),
            immediate: 0,
            parked: Vec::new(),
            connections: Vec::new(),
            last_key: 0,
            is_over: false,
            is_retained: false,
            registration: established.registration.take(),
        }
    }

    /// Data for the login of a further connection; `None` if none can be added.
    pub(super) fn joinable(&self) -> Option<JoinableSession> {
        let registration = self.registration.as_ref().filter(|_| !self.is_over && !self.is_retained)?;
        Some(JoinableSession {
            name: registration.name.clone(),
            tsih: registration.tsih,
            parameters: self.parameters,
            exp_cmd_sn: self.window.exp_cmd_sn(),
            max_cmd_sn: self.window.max_cmd_sn(),
        })
    }

    /// Whether a connection with this CID may be added now. An older one with the same CID is asked
    /// to end (RFC 7143 §6.3.4); until then the result is `false`.
    pub(super) fn admit(&mut self, cid: u16) -> Result<bool, LoginFailure> {
        if self.must_end() {
            return Err(no_such_session());
        }
        if let Some(old) = self.connections.iter().find(|entry| entry.cid == cid && !entry.is_failed) {
            let key = old.key;
            if self.parameters.get(OperationalKey::ErrorRecoveryLevel) > 1 && !old.is_ending {
                self.post(key, ConnectionEvent::Fail(None));
            } else {
                self.request_end(key, None);
            }
            return Ok(false);
        }
        let active = self.connections.iter().filter(|entry| !entry.is_failed).count();
        if active >= self.max_connections() {
            return Err(too_many_connections());
        }
        Ok(true)
    }

    /// Adds a connection; returns its key.
    pub(super) fn add_connection(&mut self, established: &mut TargetLoginResult, waker: &Waker) -> u32 {
        self.last_key = self.last_key.wrapping_add(1);
        let key = self.last_key;
        if let (Some(registration), Some(hang_up)) = (&self.registration, established.hang_up.take()) {
            registration.add_connection(key, hang_up);
        }
        self.connections.push(ConnectionEntry {
            key,
            cid: established.cid,
            waker: waker.clone(),
            events: VecDeque::new(),
            is_woken: false,
            is_ending: false,
            is_failed: false,
        });
        key
    }

    /// Removes a connection.
    pub(super) fn remove_connection(&mut self, key: u32) {
        self.connections.retain(|entry| entry.key != key);
        if self.connections.is_empty() {
            self.mark_over();
        }
        if let Some(registration) = &self.registration {
            registration.remove_connection(key);
        }
    }

    /// Marks a connection as ending.
    pub(super) fn mark_ending(&mut self, key: u32) {
        self.entry(key).into_iter().for_each(|entry| entry.is_ending = true);
    }

    /// The connection with this CID; a failed one only if there is no other.
    pub(super) fn key_of(&self, cid: u16) -> Option<u32> {
        let named = self.connections.iter().filter(|entry| entry.cid == cid && !entry.is_ending);
        named.min_by_key(|entry| entry.is_failed).map(|entry| entry.key)
    }

    pub(super) fn has_connection(&self, key: u32) -> bool {
        self.connections.iter().any(|entry| entry.key == key)
    }

    /// Whether a connection has failed and others may take over its tasks.
    pub(super) fn has_failed(&self, key: u32) -> bool {
        self.connections.iter().any(|entry| entry.key == key && entry.is_failed && !entry.is_ending)
    }

    /// Whether the session has a connection with a socket.
    pub(super) fn is_active(&self) -> bool {
        self.connections.iter().any(|entry| !entry.is_failed && !entry.is_ending)
    }

    /// Whether the session is over or must end for another login.
    pub(super) fn must_end(&self) -> bool {
        self.is_over || self.registration.is_none() || self.is_replaced()
    }

    /// Whether a later login of the initiator reinstates this session.
    pub(super) fn is_replaced(&self) -> bool {
        self.registration.as_ref().is_some_and(SessionRegistration::is_replaced)
    }

    /// Whether this initiator sees every logical unit that the target has for any initiator.
    pub(super) fn sees_all_units(&self) -> bool {
        let TargetSessionKind::Normal { target, access, .. } = &self.kind else { return false };
        // The target may have got further initiators or units since the login.
        let current = self.node.targets.find(&target.name);
        let views = &current.as_ref().unwrap_or(target).access;
        let own: HashSet<VolumeId> = access.target.units().map(|(_, volume, _)| volume).collect();
        views.iter().flat_map(|view| view.target.units()).all(|(_, volume, _)| own.contains(&volume))
    }

    /// Whether the session has no other connection.
    pub(super) fn is_only_connection(&self, key: u32) -> bool {
        self.tasks.server.is_some()
            && self.connections.iter().all(|entry| entry.key == key || entry.is_ending)
    }

    /// Retains the session's nexus after the loss of its only connection.
    pub(super) fn retain(&mut self, key: u32) {
        self.is_retained = true;
        self.on_failed(key);
    }

    /// Marks a connection as failed. Above the limit, the oldest failed connection ends.
    pub(super) fn on_failed(&mut self, key: u32) {
        self.entry(key).into_iter().for_each(|entry| entry.is_failed = true);
        if let Some(registration) = &self.registration {
            registration.remove_connection(key);
        }
        let failed: Vec<u32> = self
            .connections
            .iter()
            .filter(|entry| entry.is_failed && !entry.is_ending)
            .map(|entry| entry.key)
            .collect();
        if failed.len() > self.max_connections()
            && let Some(oldest) = failed.first()
        {
            self.request_end(*oldest, None);
        }
    }

    /// Asks another connection to report the loss of the one with this CID.
    pub(super) fn announce_loss(&mut self, cid: u16) {
        let active =
            self.connections.iter().find(|entry| !entry.is_failed && !entry.is_ending).map(|entry| entry.key);
        if let Some(other) = active {
            self.post(other, ConnectionEvent::Lost(cid));
        }
    }

    /// Parks a response for TASK REASSIGN.
    pub(super) fn park(&mut self, owner: u32, sent: SentResponse) {
        self.parked.push(ParkedResponse { owner, sent });
    }

    /// Takes the parked response with this task tag.
    pub(super) fn take_parked(&mut self, itt: u32) -> Option<SentResponse> {
        let at = self.parked.iter().position(|parked| parked.sent.expected.itt == itt)?;
        Some(self.parked.swap_remove(at).sent)
    }

    /// Drops the parked response with this task tag.
    #[inline]
    pub(super) fn forget_answer(&mut self, itt: u32) {
        if !self.parked.is_empty() {
            self.parked.retain(|parked| parked.sent.expected.itt != itt);
        }
    }

    /// Drops the parked responses of a connection.
    pub(super) fn forget_parked(&mut self, owner: u32) {
        self.parked.retain(|parked| parked.owner != owner);
    }

    pub(super) fn has_parked(&self, owner: u32) -> bool {
        self.parked.iter().any(|parked| parked.owner == owner)
    }

    fn max_connections(&self) -> usize {
        self.parameters.get(OperationalKey::MaxConnections) as usize
    }

    /// Wakes the driver of a connection.
    pub(super) fn wake(&mut self, key: u32) {
        if let Some(entry) = self.entry(key)
            && !std::mem::replace(&mut entry.is_woken, true)
        {
            entry.waker.wake();
        }
    }

    /// Posts an event to a connection and wakes it.
    pub(super) fn post(&mut self, key: u32, event: ConnectionEvent) {
        if let Some(entry) = self.entry(key) {
            entry.events.push_back(event);
            self.wake(key);
        }
    }

    /// Asks a connection to end, once. `requester` is answered when it has closed.
    pub(super) fn request_end(&mut self, key: u32, requester: Option<(u32, u32)>) {
        if let Some(entry) = self.entry(key).filter(|entry| !entry.is_ending) {
            entry.is_ending = true;
            self.post(key, ConnectionEvent::End(requester));
        }
    }

    /// Ends the session: no connection is added, and all connections but `key` are asked to end.
    pub(super) fn end(&mut self, key: u32) {
        self.mark_over();
        let others = self.connections.iter().map(|entry| entry.key).filter(|other| *other != key);
        for other in others.collect::<Vec<_>>() {
            self.request_end(other, None);
        }
    }

    fn mark_over(&mut self) {
        if !std::mem::replace(&mut self.is_over, true)
            && let Some(registration) = &self.registration
        {
            registration.end();
        }
    }

    /// Whether a connection was woken since its last call.
    #[inline]
    pub(super) fn take_wakeup(&mut self, key: u32) -> bool {
        self.entry(key).is_some_and(|entry| std::mem::take(&mut entry.is_woken))
    }

    /// The next event for a connection.
    pub(super) fn next_event(&mut self, key: u32) -> Option<ConnectionEvent> {
        self.entry(key)?.events.pop_front()
    }

    #[inline]
    fn entry(&mut self, key: u32) -> Option<&mut ConnectionEntry> {
        self.connections.iter_mut().find(|entry| entry.key == key)
    }
}
