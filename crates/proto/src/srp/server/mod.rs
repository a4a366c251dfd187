//! The SRP target: one session for one RDMA channel of an initiator port.
//!
//! ```text
//!   Requested ──▶ reject or accept; Connected ──▶ wait for other channels to end ──▶ open
//!   Received ──▶ task set ──fetch──▶ `mover` ──work──▶ RDMA Read ──Done──▶ task set
//!                   └──────complete──▶ `answers` ──work──▶ RDMA Write, Receive, Send
//! ```
//! *Credits.* The initiator has `REQUEST_LIMIT` credits. Each request consumes one, and its
//! response returns it, together with the credits of requests that ended without a response. If no
//! response is due, SRP_CRED_REQ returns them. If an initiator sends more requests than it has
//! credits, there is no receive buffer for them, and its queue pair ends.
//!
//! *Bounds.* In addition to the credits: `PAYLOAD_IN_FLIGHT` bytes of data-in, beyond which
//! commands (but not task management) wait in `inbox`; memory for data-out from the core's pool;
//! 16 task management functions; 64 channels of an I_T nexus.
//!
//! An initiator that gives wrong lengths or keys loses its own connection: the provider on either
//! side refuses the access.

mod channel_login;
mod tasks;
#[cfg(test)]
mod tests;

use super::information_unit::RemoteRanges;
use super::login::{MAX_IU_LEN, REQUEST_LIMIT};
use super::node::{ChannelPlace, SrpNode};
use crate::driver::audit_event::{AuditEvent, AuditEvents};
use crate::driver::session::{HangUp, ProtocolError, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::VolumeId;
use crate::rdma::progress_watchdog::{ProgressWatchdog, READ_STALLED};
use crate::rdma::target_mover::{TargetMessage, TargetMover, endpoint};
use crate::rdma::target_phase::TargetPhase;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, Remote, WorkError, WorkId};
use crate::scsi::task_set::{TaskQueue, TaskRouter, TaskSet};
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Completion, Io, IoError, Pool, Seg, SgList, Tag, Waker};
use blockmux_wire::srp::{LogoutReason, SrpOpcode, TargetNotice, TaskManagementRequest};
use channel_login::PendingLogin;
use core::net::IpAddr;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tasks::SrpTransfer;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// One RDMA channel of an initiator port to an SRP target port.
pub struct SrpTargetSession {
    node: Arc<SrpNode>,
    pool: Pool,
    hang_up: HangUp,
    /// The initiator's IP address; `None` if it has none.
    client: Option<IpAddr>,
    phase: TargetPhase,
    /// The login that was accepted and has not taken effect.
    login: Option<PendingLogin>,
    /// Time by which the login, or its wait for other channels to end, has to be over.
    deadline: Instant,
    now: Instant,
    tasks: TaskSet<SrpTransfer>,
    queue: TaskQueue,
    /// Offset of immediate data in an information unit, if the login negotiated immediate data.
    immediate_offset: Option<usize>,
    /// Its place among the channels of its nexus, once the login has taken effect.
    place: Option<ChannelPlace>,
    /// The task set's tag of the latest request. SRP's tags have 64 bits, the task set's 32.
    last_tag: u32,
    /// Task management functions in progress: the task set's tag and SRP's tag of each.
    functions: Vec<(u32, u64)>,
    /// Commands that wait until less data-in is in flight, or all messages until the login takes
    /// effect.
    inbox: VecDeque<Seg>,
    /// Tasks that wait for memory, oldest first.
    grants: VecDeque<usize>,
    mover: TargetMover,
    /// Observes whether the initiator receives the rest of the output of a channel that is closing.
    end_watchdog: ProgressWatchdog,
    /// Number of times that a task has got memory for data-out.
    allocations: u64,
    /// Responses to send, oldest first.
    answers: VecDeque<Answer>,
    /// Data-in that the commands in progress may produce, in bytes.
    expected: usize,
    /// Number of receive buffers to post with the next message.
    receives: u32,
    /// Credits to return: requests that have ended and that no message has acknowledged yet.
    credits: u32,
    /// Whether an SRP_CRED_REQ has no answer yet.
    is_credit_sent: bool,
    /// Protocol violation by a request of `inbox`; the next event returns it.
    violation: Option<ProtocolError>,
    /// Whether the channel is closing: no further request is accepted, and the connection ends once
    /// all tasks have ended and all answers are sent.
    is_ending: bool,
    events: AuditEvents,
}

/// A message for the initiator, and the data-in to write before it.
struct Answer {
    data: AnswerData,
    message: SmallVec<[u8; 128]>,
    /// Receive buffers to post before it: the initiator may send its next request as soon as it has
    /// this response.
    receives: u32,
}

/// Data-in and its destination in the initiator's memory. It is cut into the ranges of the
/// destination as these are posted.
#[derive(Default)]
struct AnswerData {
    data: SgList,
    /// The destination, at least as long as the data.
    ranges: RemoteRanges,
    /// Number of ranges that were posted.
    next: usize,
    /// Number of bytes that were posted.
    written: usize,
}

impl TargetMessage for Answer {
    #[inline]
    fn next_write(&mut self) -> Option<(SgList, Remote)> {
        self.data.next_write()
    }

    #[inline]
    fn send(&self, queue_pair: &mut impl QueuePair) {
        queue_pair.receive(self.receives);
        queue_pair.send(&self.message, &SgList::default(), None);
    }
}

impl AnswerData {
    /// The next RDMA Write to post: data, and the range for it.
    #[inline]
    fn next_write(&mut self) -> Option<(SgList, Remote)> {
        let left = self.data.len().saturating_sub(self.written);
        let range = self.ranges.get(self.next).filter(|_| left > 0)?;
        let len = left.min(range.len as usize);
        // Most data has one range, and a slice costs a reference count.
        let is_all = self.written == 0 && len == left;
        let local = if is_all { std::mem::take(&mut self.data) } else { self.data.slice(self.written, len) };
        self.next = self.next.saturating_add(1);
        self.written = self.written.saturating_add(len);
        Some((local, Remote { len: len as u32, ..*range })) // at most `range.len`
    }
}

impl SrpTargetSession {
    /// Creates a session for an initiator that has just connected; `hang_up` disconnects it. `pool`
    /// is the core's pool, for data-out. The initiator has 30 seconds from `now` to log in.
    #[must_use]
    pub fn new(node: Arc<SrpNode>, pool: Pool, hang_up: HangUp, now: Instant) -> SrpTargetSession {
        SrpTargetSession {
            node,
            pool,
            hang_up,
            client: None,
            phase: TargetPhase::Listening,
            login: None,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            now,
            tasks: TaskSet::new(None),
            queue: TaskQueue::default(),
            immediate_offset: None,
            place: None,
            last_tag: 0,
            functions: Vec::new(),
            inbox: VecDeque::new(),
            grants: VecDeque::new(),
            mover: TargetMover::default(),
            end_watchdog: ProgressWatchdog::default(),
            allocations: 0,
            answers: VecDeque::new(),
            expected: 0,
            receives: 0,
            credits: 0,
            is_credit_sent: false,
            violation: None,
            is_ending: false,
            events: AuditEvents::default(),
        }
    }

    /// Sets the initiator's IP address, which target ports check against their networks. Without
    /// it, the initiator counts as one without an address, which all networks admit.
    #[must_use]
    pub fn with_client(self, client: Option<IpAddr>) -> SrpTargetSession {
        SrpTargetSession { client, ..self }
    }

    /// Handles a message from the initiator.
    #[inline]
    fn on_message(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        self.receives = self.receives.saturating_add(1);
        if message.is_empty() {
            return Err(violation("sent an empty message"));
        }
        match opcode(message) {
            SrpOpcode::COMMAND => self.on_command(message)?,
            SrpOpcode::TASK_MANAGEMENT => {
                let bytes = message.to_vec();
                let (request, _) = TaskManagementRequest::read_from_prefix(&bytes)
                    .map_err(|_| violation("sent a task management request that is too short"))?;
                self.on_management(&request);
            }
            SrpOpcode::INITIATOR_LOGOUT => {
                self.events.push(AuditEvent::Logout { reason: "the initiator logged out" });
                self.end(None);
            }
            SrpOpcode::CREDIT_RESPONSE => self.is_credit_sent = false,
            SrpOpcode::AER_RESPONSE => {}
            _ => {
                self.end(Some(LogoutReason::INVALID_OPCODE));
                return Err(violation("sent an information unit with an unknown opcode"));
            }
        }
        Ok(())
    }

    /// Begins to close the channel: accepts no further request and aborts all tasks. With a
    /// `reason`, it sends SRP_T_LOGOUT.
    fn end(&mut self, reason: Option<LogoutReason>) {
        if std::mem::replace(&mut self.is_ending, true) {
            return;
        }
        self.login = None;
        if let Some(reason) = reason {
            let logout = TargetNotice {
                opcode: SrpOpcode::TARGET_LOGOUT.0,
                value: reason.0.into(),
                ..TargetNotice::new_zeroed()
            };
            self.send(&[logout.as_bytes()], AnswerData::default());
        }
        self.abort_all();
    }

    fn abort_all(&mut self) {
        self.inbox.clear();
        self.functions.clear();
        self.forget_functions();
        let waiting = std::mem::take(&mut self.grants);
        self.abort_tasks(|_| true, None);
        drop(waiting);
    }

    /// Drops all work that was not posted, because the connection is lost.
    fn on_disconnected(&mut self) {
        self.phase = TargetPhase::Over;
        self.answers.clear();
        self.end(None);
        while let Some(slot) = self.mover.abandon_read() {
            self.on_read(slot as usize, false);
        }
        self.answers.clear();
        self.leave_if_idle();
    }

    /// Whether no task has I/O or RDMA Reads in flight.
    fn is_idle(&self) -> bool {
        self.queue.is_idle() && self.mover.is_idle()
    }

    /// Whether the channel is closing, and only the initiator can delay that: by not receiving the
    /// rest of the output.
    fn awaits_end(&self) -> bool {
        self.is_ending && !self.mover.is_reading() && self.queue.is_idle()
    }

    /// Leaves the nexus once the channel is closed and has no I/O in flight.
    fn leave_if_idle(&mut self) {
        if matches!(self.phase, TargetPhase::Over) && self.is_idle() {
            self.place = None;
        }
    }

    /// Whether a request may be handled now.
    fn has_room(&self) -> bool {
        let is_open = self.login.is_none() && !self.is_ending;
        is_open && self.expected.saturating_add(self.mover.unsent()) < PAYLOAD_IN_FLIGHT
    }

    /// Handles the waiting requests that can be handled now; returns whether there were any.
    fn take_inbox(&mut self) -> bool {
        let mut has_moved = false;
        while self.has_room()
            && let Some(message) = self.inbox.pop_front()
        {
            has_moved = true;
            if let Err(error) = self.on_message(&message) {
                self.violation = Some(error);
                self.end(None);
            }
        }
        has_moved
    }

    /// Posts as much as the queue pair has room for; returns whether it posted anything.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if self.credits > 0 && self.answers.is_empty() && !self.is_credit_sent && !self.is_ending {
            self.is_credit_sent = true;
            let notice = TargetNotice {
                opcode: SrpOpcode::CREDIT_REQUEST.0,
                value: std::mem::take(&mut self.credits).into(),
                ..TargetNotice::new_zeroed()
            };
            self.send(&[notice.as_bytes()], AnswerData::default());
        }
        self.mover.transmit(queue_pair, &mut self.answers, |_| true)
    }
}

impl RdmaSession for SrpTargetSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(REQUEST_LIMIT.saturating_add(UNCREDITED), MAX_IU_LEN, SENDS)
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        match event {
            Event::Requested { private_data, reads } => self.on_requested(private_data, reads)?,
            Event::Received { .. } if self.is_ending => {}
            Event::Received { message, .. } => {
                let is_urgent = opcode(&message) != SrpOpcode::COMMAND && self.login.is_none();
                if (self.inbox.is_empty() && self.has_room()) || is_urgent {
                    self.on_message(&message)?;
                } else {
                    // The message is copied, because it may share its receive buffer with others.
                    self.inbox.push_back(Seg::from_slice(&message.to_vec()));
                }
            }
            Event::Done { id, result } => self.on_done(id, result),
            Event::Disconnected | Event::Refused { .. } => self.on_disconnected(),
            Event::Connected { .. } => self.on_connected()?,
            Event::Registered { .. } => {}
        }
        self.violation.take().map_or(Ok(()), Err)
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if !self.phase.is_open() {
            return self.phase.answer(queue_pair, self.is_ending);
        }
        let has_moved = self.take_inbox() | self.transmit(queue_pair);
        if has_moved {
            self.end_watchdog.on_progress();
        }
        if self.is_ending && self.answers.is_empty() && self.is_idle() {
            self.phase.disconnect(queue_pair);
            return true;
        }
        has_moved
    }
}

impl SrpTargetSession {
    #[inline]
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        self.end_watchdog.on_progress();
        if let Some(slot) = self.mover.on_done(id) {
            self.on_read(slot as usize, result.is_ok());
            self.leave_if_idle();
        }
    }
}

impl Timed for SrpTargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        let again = |pause: Duration| self.now.checked_add(pause);
        match &self.login {
            Some(login) => Some(login.look_at().unwrap_or(self.deadline)),
            None if matches!(self.phase, TargetPhase::Listening) => Some(self.deadline),
            None if self.violation.is_some() || self.queue.has_io() => Some(self.now),
            None => {
                let retry = if self.queue.is_waiting() { again(TASK_RETRY) } else { None };
                let check = self.mover.check_at(self.now);
                let end = self.awaits_end().then(|| self.end_watchdog.check_at(self.now));
                retry.into_iter().chain(self.queue.pause_ends()).chain(check).chain(end).min()
            }
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        self.continue_login()?;
        if self.mover.is_stuck(now) && (self.is_ending || self.tasks.has_aborted_without_io(tasks::OWNER)) {
            return Err(READ_STALLED);
        }
        if self.awaits_end() && self.end_watchdog.is_stuck(now) {
            return Err(ProtocolError {
                what: "did not receive the rest of its responses within a minute after the channel ended",
                reference: "this server's limit",
            });
        }
        self.resume();
        self.violation.take().map_or(Ok(()), Err)
    }
}

impl SrpTargetSession {
    /// Continues the tasks that wait for I/O, memory or time.
    fn resume(&mut self) {
        if self.queue.is_waiting() {
            self.resume_waiting();
        }
        if self.queue.pause_ends().is_some() {
            self.resume_paused();
        }
        self.resume_grants();
    }
}

impl IoSource for SrpTargetSession {
    fn depth(&self) -> u32 {
        // Each receive buffer may hold a command, even without a credit.
        REQUEST_LIMIT.saturating_add(UNCREDITED)
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.queue.poll_io()
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.queue.poll_cancel()
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        self.now = now;
        self.end_watchdog.on_progress();
        self.on_volume_io(done);
        self.resume();
        self.leave_if_idle();
    }

    fn charge(&mut self, io: &Io) -> Charge {
        self.tasks.charge(io)
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.begin_io(volume, io, is_late);
        if matches!(admitted, Err(NotAdmitted::Denied(_))) {
            self.resume();
            self.leave_if_idle();
        }
        admitted
    }
}

impl TargetLifecycle for SrpTargetSession {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn on_start(&mut self, _waker: &Waker, now: Instant) {
        self.now = now;
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.now = now;
        self.resume();
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        // A login that has not taken effect has no device server.
        if self.tasks.server.is_some() { SessionStage::Established } else { SessionStage::Handshake }
    }

    fn owed(&self) -> Option<u64> {
        self.oldest_fetch()
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop()
    }

    fn on_stop(&mut self, now: Instant) {
        self.now = now;
        match self.phase {
            TargetPhase::Open => self.end(Some(LogoutReason::UNSPECIFIED)),
            _ => (self.is_ending, self.login) = (true, None),
        }
    }
}

/// The opcode of a message, 0 if it is empty.
#[inline]
fn opcode(message: &Seg) -> SrpOpcode {
    let mut opcode = [0];
    if !message.is_empty() {
        message.slice(0, 1).copy_to(&mut opcode);
    }
    SrpOpcode(opcode[0])
}

fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6" }
}

/// Most sends, reads and writes that are posted at a time.
const SENDS: u32 = 256;
/// Receive buffers for messages that consume no credit: SRP_CRED_RSP and SRP_I_LOGOUT.
const UNCREDITED: u32 = 8;
/// Most data-in of one channel in bytes, including data that waits to be sent.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;
/// Time limit of a connection request.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a task that waits for other tasks is retried.
const TASK_RETRY: Duration = Duration::from_millis(1);
