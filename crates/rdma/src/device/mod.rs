//! A queue pair of an RDMA device, as a session over a stream of records.
//!
//! ```text
//!   device ──EventRecord──▶ DeviceQueuePair ──Event──▶ session
//!   device ◀──WorkRecord─── DeviceQueuePair ◀──calls── session
//! ```
//! The owner of the device's queues (`crates/engine/src/fabric/verbs`) posts what the records say,
//! and reports what has completed. So nothing here calls the device, and the engine's tasks drive
//! it as they drive the queue pairs in software. The owner keeps memory that the device uses; the
//! records pass it by reference.
//!
//! Memory is opened to the peer by memory windows, whose keys are known when the connection is
//! established. A window takes effect before any later message is sent. One that the session
//! invalidates is closed when the owner takes the record, at the end of the turn: until then the
//! peer can reach the memory, which is kept.
//!
//! A *confined* connection has no windows. It exposes buffers of its own to the peer instead, and
//! copies data there and back (`staging`). Decision 103 says which bytes a peer can reach.

pub mod records;
mod staging;
#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "a mistake fails the test")]
mod tests;
mod windows;

use crate::queue_pair::{Caps, Fault, Provider, Violation};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, MAX_DEMAND, ProtocolError, StreamSession, Timed};
use blockmux_proto::rdma::{
    Endpoint, Event, QueuePair, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::{Chunk, Seg, SgList};
use records::{
    DeviceEvent, DeviceFailure, DeviceQueues, DeviceRemote, EVENT_LEN, EventRecord, WorkRecord, WorkVerb,
};
use staging::{Growth, Staging};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use windows::{Binding, Windows};

/// One end of a connection over a device.
pub struct DeviceQueuePair {
    endpoint: Endpoint,
    state: DeviceState,
    outbox: Outbox,
    events: VecDeque<Event>,
    /// Sends, reads and writes in flight, in the order of posting. InfiniBand completes them in
    /// this order; siw completes sends and writes that were posted behind a read before it.
    pending: VecDeque<WorkId>,
    windows: Windows,
    /// If the connection is confined.
    staging: Option<Staging>,
    /// Registrations that wait for a connection, for a window, or for a buffer.
    waiting: VecDeque<(WorkId, SgList, RemoteRights)>,
    /// RDMA Reads that may be in flight.
    reads: u32,
    /// Receive buffers posted before there is a queue pair.
    receives: u32,
    /// Unread bytes that are needed next.
    wanted: usize,
    fault: Option<Fault>,
    now: Instant,
    /// When to notice that the connection is over, once it is.
    over_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceState {
    /// Active: the device is not known.
    Resolving,
    /// Passive: no request has arrived.
    Listening,
    /// Passive: the session has to accept or reject.
    Requested,
    /// The peer has to accept, or the device to establish the connection.
    Connecting,
    Connected,
    /// The session has asked to disconnect; its work is being done.
    Leaving,
    /// The connection is being ended.
    Disconnecting,
    Over,
}

impl DeviceQueuePair {
    /// The active side, which requests the connection.
    #[must_use]
    pub fn active(endpoint: &Endpoint, now: Instant) -> DeviceQueuePair {
        DeviceQueuePair::new(endpoint, DeviceState::Resolving, now)
    }

    /// The passive side. Its first record is the request.
    #[must_use]
    pub fn passive(endpoint: &Endpoint, now: Instant) -> DeviceQueuePair {
        DeviceQueuePair::new(endpoint, DeviceState::Listening, now)
    }

    fn new(endpoint: &Endpoint, state: DeviceState, now: Instant) -> DeviceQueuePair {
        DeviceQueuePair {
            endpoint: endpoint.clone(),
            state,
            outbox: Outbox::default(),
            events: VecDeque::new(),
            pending: VecDeque::new(),
            windows: Windows::default(),
            staging: None,
            waiting: VecDeque::new(),
            reads: endpoint.reads,
            receives: endpoint.receives,
            wanted: EVENT_LEN,
            fault: None,
            now,
            over_at: None,
        }
    }

    fn queues(&self, reads: u32) -> DeviceQueues {
        DeviceQueues {
            sends: self.endpoint.sends,
            receives: self.receives,
            receive_len: self.endpoint.receive_len,
            windows: self.regions(),
            reads,
        }
    }

    /// Registrations that may be valid.
    fn regions(&self) -> u32 {
        self.endpoint.regions.min(MAX_WINDOWS)
    }

    fn is_connected(&self) -> bool {
        matches!(self.state, DeviceState::Connected | DeviceState::Leaving)
    }

    fn push(&mut self, verb: WorkVerb, id: WorkId, bytes: &[u8], memory: &SgList) {
        // The session's limits keep both far below.
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        let memory_len = u32::try_from(memory.len()).unwrap_or(u32::MAX);
        let record = WorkRecord { verb, id: id.0, bytes: len, memory: memory_len };
        self.outbox.push_heads([&record.to_bytes(), bytes]);
        self.outbox.push_payload(memory);
    }

    /// Posts work that completes.
    fn begin(&mut self, verb: WorkVerb, id: WorkId, bytes: &[u8], memory: &SgList, is_possible: bool) {
        if self.state != DeviceState::Connected {
            return match self.state {
                DeviceState::Leaving | DeviceState::Disconnecting | DeviceState::Over => {
                    self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
                }
                _ => self.fail(id),
            };
        }
        if !is_possible || self.room() == 0 {
            return self.fail(id);
        }
        self.pending.push_back(id);
        self.push(verb, id, bytes, memory);
    }

    /// Fails work that cannot be done, which ends the connection.
    fn fail(&mut self, id: WorkId) {
        self.events.push_back(Event::Done { id, result: Err(WorkError::Local) });
        self.end(None);
    }

    fn open(&mut self, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        if let Some(staging) = &mut self.staging {
            let opened = staging.open(local, access);
            if opened.is_none()
                && let Some(Growth { retired, number, memory }) = staging.grow(local.len())
            {
                retired.into_iter().for_each(|number| self.conceal(number));
                self.push(WorkVerb::Expose { number }, WorkId(0), &[], &SgList::one(memory));
            }
            return opened;
        }
        let Binding { window, key, memory, remote } = self.windows.open(local, access)?;
        let is_write = access == RemoteRights::RemoteWrite;
        self.push(WorkVerb::Bind { window, key, is_write }, WorkId(0), &[], &SgList::one(memory));
        Some(remote)
    }

    fn conceal(&mut self, number: u32) {
        self.push(WorkVerb::Conceal { number }, WorkId(0), &[], &SgList::default());
    }

    /// Handles the invalidation of a key by the peer; `false` if no memory is open by it.
    fn on_invalidated(&mut self, key: u32) -> bool {
        let Some(staging) = &mut self.staging else { return self.windows.on_invalidated(key) };
        let retired = staging.on_invalidated(key);
        retired.into_iter().for_each(|number| self.conceal(number));
        retired.is_some()
    }

    fn confine(&mut self, is_confined: bool) {
        self.staging = is_confined.then(|| Staging::new(self.regions()));
    }

    /// Makes the registrations that a window or a buffer has become free for.
    fn open_waiting(&mut self) {
        while self.is_connected()
            && let Some((id, mut local, access)) = self.waiting.pop_front()
        {
            match self.open(&mut local, access) {
                Some(remote) => self.events.push_back(Event::Registered { id, remote }),
                None => return self.waiting.push_front((id, local, access)),
            }
        }
    }

    /// Handles an event with the bytes behind its record.
    fn on_event(&mut self, event: DeviceEvent, input: &Chunk, bytes: core::ops::Range<usize>) {
        let data = || input.unread().get(bytes.clone()).unwrap_or_default();
        match (event, self.state) {
            (_, DeviceState::Over) => {}
            (DeviceEvent::Resolved { is_confined }, DeviceState::Resolving) => {
                self.state = DeviceState::Connecting;
                self.confine(is_confined);
                let Endpoint { private_data, without_invalidation, .. } = &self.endpoint;
                let other = without_invalidation.as_ref().filter(|_| is_confined);
                let private_data = other.unwrap_or(private_data).clone();
                let queues = self.queues(self.reads);
                self.push(WorkVerb::Connect(queues), WorkId(0), &private_data, &SgList::default());
            }
            (DeviceEvent::Requested { reads, is_confined }, DeviceState::Listening) => {
                self.state = DeviceState::Requested;
                self.confine(is_confined);
                self.reads = self.endpoint.reads.min(reads);
                let (private_data, reads) = (data().to_vec(), self.reads);
                self.events.push_back(Event::Requested { private_data, reads });
            }
            (DeviceEvent::Connected { windows, reads }, DeviceState::Connecting) => {
                self.state = DeviceState::Connected;
                self.reads = self.reads.min(reads);
                let count = usize::try_from(windows).unwrap_or(0);
                let (keys, _) = data().as_chunks();
                self.windows = Windows::new(keys.iter().take(count).map(|key| u32::from_be_bytes(*key)));
                let private_data = data().get(count.saturating_mul(4)..).unwrap_or_default().to_vec();
                self.events.push_back(Event::Connected { private_data });
                self.open_waiting();
            }
            (DeviceEvent::Refused, DeviceState::Connecting) => {
                self.end(Some(Event::Refused { private_data: data().to_vec() }));
            }
            (DeviceEvent::Received { invalidated }, _) => {
                if invalidated.is_some_and(|key| !self.on_invalidated(key)) {
                    self.fault = self.fault.or(Some(Fault::Peer(Violation::Access)));
                    return self.end(None);
                }
                let message = match bytes.is_empty() {
                    true => Seg::from_slice(&[]),
                    false => input.slice(bytes.start, bytes.len()),
                };
                self.events.push_back(Event::Received {
                    message,
                    invalidated: invalidated.map(Stag),
                    written: None,
                });
                self.open_waiting();
            }
            (DeviceEvent::Done { id, result }, _) => self.on_done(WorkId(id), result),
            (DeviceEvent::Closed { window, key }, _) => {
                self.windows.on_closed(window, key);
                self.open_waiting();
            }
            (DeviceEvent::Exposed { number, key }, _) => {
                if let Some(staging) = &mut self.staging {
                    staging.on_exposed(number, key);
                }
                self.open_waiting();
            }
            (DeviceEvent::Broken(failure), _) => self.note_fault(failure),
            (
                DeviceEvent::Resolved { .. }
                | DeviceEvent::Requested { .. }
                | DeviceEvent::Connected { .. }
                | DeviceEvent::Refused,
                _,
            ) => {}
        }
    }

    fn on_done(&mut self, id: WorkId, result: Result<(), DeviceFailure>) {
        let Some(at) = self.pending.iter().position(|pending| *pending == id) else { return };
        if let Err(failure) = result {
            self.note_fault(failure);
        }
        self.pending.remove(at);
        let result = result.map_err(|failure| match failure {
            DeviceFailure::RemoteAccess => WorkError::RemoteAccess,
            DeviceFailure::Local => WorkError::Local,
            DeviceFailure::TooLong | DeviceFailure::NoReceive | DeviceFailure::Flushed => WorkError::Flushed,
        });
        self.events.push_back(Event::Done { id, result });
        self.check_leaving();
    }

    fn note_fault(&mut self, failure: DeviceFailure) {
        let fault = match failure {
            DeviceFailure::TooLong => Fault::Peer(Violation::TooLong),
            DeviceFailure::RemoteAccess => Fault::Ours(Violation::Access),
            DeviceFailure::NoReceive => Fault::Ours(Violation::NoReceive),
            DeviceFailure::Local | DeviceFailure::Flushed => return,
        };
        self.fault = self.fault.or(Some(fault));
    }

    /// Disconnects once all work is done.
    fn check_leaving(&mut self) {
        if self.state == DeviceState::Leaving && self.pending.is_empty() {
            self.state = DeviceState::Disconnecting;
            self.push(WorkVerb::Disconnect, WorkId(0), &[], &SgList::default());
        }
    }

    /// Flushes all work and reports the end: `last` if given, or [`Event::Disconnected`].
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.state, DeviceState::Over) == DeviceState::Over {
            return;
        }
        self.windows.close_all();
        self.staging.iter_mut().for_each(Staging::close_all);
        let registrations = self.waiting.drain(..).map(|(id, _, _)| id);
        let flushed = self.pending.drain(..).chain(registrations);
        self.events.extend(flushed.map(|id| Event::Done { id, result: Err(WorkError::Flushed) }));
        self.events.push_back(last.unwrap_or(Event::Disconnected));
        self.over_at = self.now.checked_add(NOTICE);
    }

    fn is_over(&self) -> bool {
        self.state == DeviceState::Over
    }
}

impl Timed for DeviceQueuePair {
    /// Only the end of a connection needs a time: it may come with a call of the session, after
    /// which nothing else would make the driver ask what is demanded.
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        self.over_at
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        self.over_at = None;
        Ok(())
    }

    #[inline]
    fn on_send(&mut self, now: impl FnOnce() -> Instant) {
        self.now = now();
    }
}

impl StreamSession for DeviceQueuePair {
    #[inline]
    fn demand(&self) -> Demand {
        // A rejection is handed over first.
        if self.is_over() && self.outbox.is_empty() { Demand::Close } else { Demand::Bytes(self.wanted) }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.now = now;
        self.wanted = EVENT_LEN;
        let Some(record) = EventRecord::from_bytes(input.unread()) else { return Ok(0) };
        let len = usize::try_from(record.bytes).unwrap_or(usize::MAX);
        let end = EVENT_LEN.saturating_add(len);
        if input.unread().len() < end {
            // The owner's buffers are as long as the endpoint says.
            self.wanted = end.min(MAX_DEMAND);
            return Ok(0);
        }
        self.on_event(record.event, input, EVENT_LEN..end);
        Ok(end)
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// The connection has ended, and all that has completed was reported.
    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        self.end(None);
        Ok(())
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl QueuePair for DeviceQueuePair {
    #[inline]
    fn room(&self) -> usize {
        match self.state {
            DeviceState::Connected => {
                usize::try_from(self.endpoint.sends).unwrap_or(0).saturating_sub(self.pending.len())
            }
            _ => 0,
        }
    }

    fn post(&mut self, work: WorkRequest) {
        match work {
            WorkRequest::Accept { private_data } if self.state == DeviceState::Requested => {
                self.state = DeviceState::Connecting;
                let queues = self.queues(self.reads);
                self.push(WorkVerb::Accept(queues), WorkId(0), &private_data, &SgList::default());
            }
            WorkRequest::Reject { private_data } if self.state == DeviceState::Requested => {
                self.push(WorkVerb::Reject, WorkId(0), &private_data, &SgList::default());
                self.end(None);
            }
            WorkRequest::Accept { .. } | WorkRequest::Reject { .. } => self.end(None),
            WorkRequest::Receive => self.receive(1),
            WorkRequest::Send { id, head, payload, invalidate, is_solicited } => {
                let verb = WorkVerb::Send { invalidate: invalidate.map(|stag| stag.0), is_solicited };
                let is_possible = u16::try_from(head.len()).is_ok();
                self.begin(verb, id, &head, &payload, is_possible);
            }
            WorkRequest::Read { id, local, remote } => {
                let is_possible = self.reads > 0 && remote.fills(&local);
                self.begin(WorkVerb::Read(remote_memory(remote)), id, &[], &local, is_possible);
            }
            WorkRequest::Write { id, local, remote } => {
                let is_possible = remote.has_room_for(&local);
                self.begin(WorkVerb::Write(remote_memory(remote)), id, &[], &local, is_possible);
            }
            WorkRequest::Register { id, mut local, access } => {
                if let Some(remote) = self.register(id, &mut local, access) {
                    self.events.push_back(Event::Registered { id, remote });
                }
            }
            WorkRequest::Invalidate { stag } => {
                if let Some(staging) = &mut self.staging {
                    staging.close(stag);
                    self.open_waiting();
                } else if let Some(window) = self.windows.close(stag) {
                    let verb = WorkVerb::Close { window };
                    self.push(verb, WorkId(0), &[], &SgList::default());
                }
            }
            WorkRequest::Disconnect => match self.state {
                DeviceState::Connected => {
                    self.state = DeviceState::Leaving;
                    self.check_leaving();
                }
                DeviceState::Leaving | DeviceState::Disconnecting => {}
                _ => self.end(None),
            },
        }
    }

    fn receive(&mut self, count: u32) {
        match self.state {
            // The queue pair is made with as many.
            DeviceState::Resolving | DeviceState::Listening | DeviceState::Requested => {
                self.receives = self.receives.saturating_add(count);
            }
            DeviceState::Over => {}
            _ => self.push(WorkVerb::Receive(count), WorkId(0), &[], &SgList::default()),
        }
    }

    fn is_invalidated_by_peers(&self) -> bool {
        self.staging.is_none()
    }

    fn send(&mut self, head: &[u8], payload: &SgList, invalidate: Option<Stag>) {
        let verb = WorkVerb::Send { invalidate: invalidate.map(|stag| stag.0), is_solicited: false };
        let is_possible = u16::try_from(head.len()).is_ok();
        self.begin(verb, blockmux_proto::rdma::MESSAGE, head, payload, is_possible);
    }

    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        if matches!(self.state, DeviceState::Disconnecting | DeviceState::Over) {
            self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
            return None;
        }
        let is_possible = !local.is_empty() && (access == RemoteRights::RemoteRead || local.is_writable());
        if !is_possible {
            self.fail(id);
            return None;
        }
        if self.is_connected()
            && self.waiting.is_empty()
            && let Some(remote) = self.open(local, access)
        {
            return Some(remote);
        }
        self.waiting.push_back((id, std::mem::take(local), access));
        None
    }
}

impl Provider for DeviceQueuePair {
    fn caps(&self) -> Caps {
        Caps {
            private_data: blockmux_proto::rdma::MAX_PRIVATE_DATA,
            max_transfer: MAX_TRANSFER,
            reads: self.reads,
            peer_reads: self.endpoint.reads,
            invalidates: true,
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn fault(&self) -> Option<Fault> {
        self.fault
    }
}

fn remote_memory(remote: Remote) -> DeviceRemote {
    DeviceRemote { address: remote.address, key: remote.stag.0 }
}

/// Windows of one connection; further registrations wait.
const MAX_WINDOWS: u32 = 1024;
/// The longest transfer of every device: that of rxe.
const MAX_TRANSFER: u32 = 8 << 20;
/// After the end of a connection, when its driver is woken.
const NOTICE: Duration = Duration::from_millis(1);
