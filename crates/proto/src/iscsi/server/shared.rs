//! What the connections of a session share: its name, its nexus, its command numbers and its tasks;
//! and what they leave for each other.
//!
//! All connections of a session live on one core, and each has its driver there. What a driver has
//! begun it has to end: I/O completes to the connection that submitted it, and only that connection
//! frees the places of its tasks. So where one connection does something to another's task, it
//! marks the task and leaves a [`Mail`] for that connection, which is woken for it.

use super::connection_table::Adopted;
use super::early::Early;
use super::full::WINDOW;
use super::retained::SentStatus;
use super::sequence::CommandWindow;
use super::tasks::Tasks;
use crate::iscsi::login::failure::{LoginFailure, no_such_session, too_many_connections};
use crate::iscsi::login::invitation::Invitation;
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::login::target::{Session, TargetLoginResult};
use crate::iscsi::name::Name;
use crate::iscsi::node::IscsiNode;
use crate::iscsi::sessions::Membership;
use crate::scsi::task_set::{TaskEvent, TaskSet};
use crate::scsi::{DeviceServer, Nexus};
use blockmux_volume::Waker;
use std::collections::VecDeque;
use std::sync::Arc;

/// A session without its connections.
pub(super) struct SharedSession {
    pub(super) node: Arc<IscsiNode>,
    pub(super) kind: Session,
    pub(super) initiator: Name,
    /// What the leading connection agreed on.
    parameters: OperationalParameters,
    pub(super) window: CommandWindow,
    pub(super) early: Early,
    /// Without a device server in a discovery session.
    pub(super) tasks: Tasks,
    /// Tasks that came with the I bit.
    pub(super) immediate: usize,
    /// Answers to commands of connections that have failed.
    parked: Vec<Parked>,
    connections: Vec<ConnectionEntry>,
    last_key: u32,
    /// No connection is added any more.
    is_over: bool,
    /// Nor here, and nothing is done, but the nexus lasts.
    is_retained: bool,
    /// The last to go: by then nothing of this session reaches a volume any more. `None` in a
    /// discovery session.
    pub(super) membership: Option<Membership>,
}

/// A connection as the others see it.
struct ConnectionEntry {
    key: u32,
    cid: u16,
    waker: Waker,
    events: VecDeque<ConnectionEvent>,
    /// It was woken, and has not looked.
    is_called: bool,
    /// It has been told to end, or ends by itself.
    is_ending: bool,
    /// It has no socket any more.
    is_failed: bool,
}

/// An answer that waits for TASK REASSIGN.
struct Parked {
    owner: u32,
    outcome: SentStatus,
}

/// What one connection leaves for another.
pub(super) enum ConnectionEvent {
    /// What became of a task or a task management function.
    Task(TaskEvent),
    /// Leave your tasks to others. Whoever wants to know is told by the task tag of its request.
    Fail(Option<(u32, u32)>),
    /// Another connection has taken a task.
    Adopted(Adopted),
    /// The connection with this CID was lost.
    Lost(u16),
    /// End. Whoever wants to know is told by the task tag of its request.
    End(Option<(u32, u32)>),
    /// The connection that a request with this tag logs out is closed.
    LoggedOut(u32),
}

impl SharedSession {
    /// What a login through the portal group `group_tag` agreed on.
    pub(super) fn new(
        node: Arc<IscsiNode>,
        group_tag: u16,
        established: &mut TargetLoginResult,
    ) -> SharedSession {
        let server = match &established.session {
            Session::Discovery => None,
            Session::Normal { target, access } => {
                let port = target.port(access, group_tag);
                let nexus = Nexus::iscsi(established.initiator.as_str(), established.isid, port);
                Some(DeviceServer::new(access.target.clone(), nexus))
            }
        };
        SharedSession {
            node,
            kind: established.session.clone(),
            initiator: established.initiator.clone(),
            parameters: established.parameters,
            window: CommandWindow::new(established.cmd_sn, WINDOW),
            early: Early::default(),
            tasks: TaskSet::new(server),
            immediate: 0,
            parked: Vec::new(),
            connections: Vec::new(),
            last_key: 0,
            is_over: false,
            is_retained: false,
            membership: established.membership.take(),
        }
    }

    /// What a login has to know that adds a connection; `None` if none can be added.
    pub(super) fn invitation(&self) -> Option<Invitation> {
        let membership = self.membership.as_ref().filter(|_| !self.is_over && !self.is_retained)?;
        Some(Invitation {
            name: membership.name().clone(),
            tsih: membership.tsih(),
            parameters: self.parameters,
            exp_cmd_sn: self.window.exp_cmd_sn(),
            max_cmd_sn: self.window.max_cmd_sn(),
        })
    }

    /// Whether a connection with this CID may be added now. One with the same CID is told to end
    /// (RFC 7143 §6.3.4), and until it has, the answer is not yet.
    pub(super) fn admit(&mut self, cid: u16) -> Result<bool, LoginFailure> {
        if self.is_unwanted() {
            return Err(no_such_session());
        }
        if let Some(old) = self.connections.iter().find(|link| link.cid == cid && !link.is_failed) {
            let key = old.key;
            if self.parameters.get(OperationalKey::ErrorRecoveryLevel) > 1 && !old.is_ending {
                self.post(key, ConnectionEvent::Fail(None));
            } else {
                self.tell_to_end(key, None);
            }
            return Ok(false);
        }
        let active = self.connections.iter().filter(|link| !link.is_failed).count();
        if active >= self.max_connections() {
            return Err(too_many_connections());
        }
        Ok(true)
    }

    /// Adds a connection; returns its key.
    pub(super) fn add_link(&mut self, established: &mut TargetLoginResult, waker: &Waker) -> u32 {
        self.last_key = self.last_key.wrapping_add(1);
        let key = self.last_key;
        if let (Some(membership), Some(hang_up)) = (&self.membership, established.hang_up.take()) {
            membership.add_connection(key, hang_up);
        }
        self.connections.push(ConnectionEntry {
            key,
            cid: established.cid,
            waker: waker.clone(),
            events: VecDeque::new(),
            is_called: false,
            is_ending: false,
            is_failed: false,
        });
        key
    }

    /// A connection is gone.
    pub(super) fn remove_link(&mut self, key: u32) {
        self.connections.retain(|link| link.key != key);
        if self.connections.is_empty() {
            self.note_over();
        }
        if let Some(membership) = &self.membership {
            membership.remove_connection(key);
        }
    }

    /// A connection will be gone soon.
    pub(super) fn is_ending(&mut self, key: u32) {
        self.link(key).into_iter().for_each(|link| link.is_ending = true);
    }

    /// The connection with that CID; one that has failed only if there is no other.
    pub(super) fn key_of(&self, cid: u16) -> Option<u32> {
        let named = self.connections.iter().filter(|link| link.cid == cid && !link.is_ending);
        named.min_by_key(|link| link.is_failed).map(|link| link.key)
    }

    pub(super) fn has_link(&self, key: u32) -> bool {
        self.connections.iter().any(|link| link.key == key)
    }

    /// Whether a connection has no socket any more, and its tasks are for others to take.
    pub(super) fn has_failed(&self, key: u32) -> bool {
        self.connections.iter().any(|link| link.key == key && link.is_failed && !link.is_ending)
    }

    /// Whether the session has a connection that works.
    pub(super) fn is_active(&self) -> bool {
        self.connections.iter().any(|link| !link.is_failed && !link.is_ending)
    }

    /// Whether another session of that name waits for this one's end.
    pub(super) fn is_unwanted(&self) -> bool {
        self.is_over || self.membership.is_none() || self.is_replaced()
    }

    /// Whether a later login of its initiator takes this session's place.
    pub(super) fn is_replaced(&self) -> bool {
        self.membership.as_ref().is_some_and(Membership::is_unwanted)
    }

    /// Whether there is no other connection.
    pub(super) fn is_alone(&self, key: u32) -> bool {
        self.tasks.server.is_some() && self.connections.iter().all(|link| link.key == key || link.is_ending)
    }

    /// The only connection is lost, and nothing goes on but the nexus.
    pub(super) fn retain(&mut self, key: u32) {
        self.is_retained = true;
        self.on_failed(key);
    }

    /// A connection has failed. If too many have, the oldest is given up.
    pub(super) fn on_failed(&mut self, key: u32) {
        self.link(key).into_iter().for_each(|link| link.is_failed = true);
        if let Some(membership) = &self.membership {
            membership.remove_connection(key);
        }
        let failed: Vec<u32> = self
            .connections
            .iter()
            .filter(|link| link.is_failed && !link.is_ending)
            .map(|link| link.key)
            .collect();
        if failed.len() > self.max_connections()
            && let Some(oldest) = failed.first()
        {
            self.tell_to_end(*oldest, None);
        }
    }

    /// Has another connection tell the initiator that the one with this CID was lost.
    pub(super) fn announce_loss(&mut self, cid: u16) {
        let active =
            self.connections.iter().find(|link| !link.is_failed && !link.is_ending).map(|link| link.key);
        if let Some(other) = active {
            self.post(other, ConnectionEvent::Lost(cid));
        }
    }

    /// Keeps an answer for TASK REASSIGN.
    pub(super) fn park(&mut self, owner: u32, outcome: SentStatus) {
        self.parked.push(Parked { owner, outcome });
    }

    /// The answer to the command of that tag.
    pub(super) fn take_parked(&mut self, itt: u32) -> Option<SentStatus> {
        let at = self.parked.iter().position(|parked| parked.outcome.expected.itt == itt)?;
        Some(self.parked.swap_remove(at).outcome)
    }

    /// Forgets the answer to the command of that tag.
    #[inline]
    pub(super) fn forget_answer(&mut self, itt: u32) {
        if !self.parked.is_empty() {
            self.parked.retain(|parked| parked.outcome.expected.itt != itt);
        }
    }

    /// Forgets what a connection has left.
    pub(super) fn forget_parked(&mut self, owner: u32) {
        self.parked.retain(|parked| parked.owner != owner);
    }

    pub(super) fn has_parked(&self, owner: u32) -> bool {
        self.parked.iter().any(|parked| parked.owner == owner)
    }

    fn max_connections(&self) -> usize {
        self.parameters.get(OperationalKey::MaxConnections) as usize
    }

    /// Has a connection take a turn.
    pub(super) fn call(&mut self, key: u32) {
        if let Some(link) = self.link(key)
            && !std::mem::replace(&mut link.is_called, true)
        {
            link.waker.wake();
        }
    }

    /// Leaves something for a connection.
    pub(super) fn post(&mut self, key: u32, mail: ConnectionEvent) {
        if let Some(link) = self.link(key) {
            link.events.push_back(mail);
            self.call(key);
        }
    }

    /// Tells a connection to end, once.
    pub(super) fn tell_to_end(&mut self, key: u32, reply: Option<(u32, u32)>) {
        if let Some(link) = self.link(key).filter(|link| !link.is_ending) {
            link.is_ending = true;
            self.post(key, ConnectionEvent::End(reply));
        }
    }

    /// The session is over: no connection is added, and all but `key` are told to end.
    pub(super) fn end(&mut self, key: u32) {
        self.note_over();
        let others = self.connections.iter().map(|link| link.key).filter(|other| *other != key);
        for other in others.collect::<Vec<_>>() {
            self.tell_to_end(other, None);
        }
    }

    fn note_over(&mut self) {
        if !std::mem::replace(&mut self.is_over, true)
            && let Some(membership) = &self.membership
        {
            membership.end();
        }
    }

    /// Whether a connection was called since it looked last.
    #[inline]
    pub(super) fn was_called(&mut self, key: u32) -> bool {
        self.link(key).is_some_and(|link| std::mem::take(&mut link.is_called))
    }

    /// The next that was left for a connection.
    pub(super) fn next_event(&mut self, key: u32) -> Option<ConnectionEvent> {
        self.link(key)?.events.pop_front()
    }

    #[inline]
    fn link(&mut self, key: u32) -> Option<&mut ConnectionEntry> {
        self.connections.iter_mut().find(|link| link.key == key)
    }
}
