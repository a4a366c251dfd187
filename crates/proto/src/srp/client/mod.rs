//! The SRP initiator: reaches one logical unit of a target port by one RDMA channel or several.
//!
//! ```text
//!   command ──▶ channel ──work──▶ register its memory ──▶ Send: SRP_CMD [, immediate data]
//!   Received: SRP_RSP ──▶ invalidate the memory's key ──▶ done
//! ```
//! The login is the private data of the connection request, so a channel is logged in as soon as
//! its queue pair is connected. The target reads and writes the caller's memory directly. The
//! memory is registered before the command is sent, and an I/O completes only once its key has been
//! invalidated. [`crate::scsi::initiator`] builds the commands and interprets their results.
//!
//! # Channels
//! The first channel logs in with single-channel operation: before the target accepts it, it ends
//! all channels of an earlier session of this initiator port, so that no late write of that session
//! can follow. The other channels log in once the logical unit is known. If the target accepts
//! fewer channels, the session uses those that it accepts. If a channel is lost later, the session
//! ends with all its channels, and the driver replays its I/O in a new session.
//!
//! # Bounds
//! Login and bring-up may take 30 seconds. A session has at most 1,024 I/O, of four commands each.
//! A channel has at most `MAX_COMMANDS` commands in flight, or as many as the target grants; two of
//! these credits are reserved for task management (`abort`). There is one receive buffer for each
//! command, and `UNSOLICITED` more for requests of the target.

mod abort;
mod channel;
mod login;
mod response;
#[cfg(test)]
mod tests;
mod user;

use super::node::SrpPortId;
use crate::driver::session::{ProtocolError, RetryRules, Timed};
use crate::initiator::command_memory::CommandMemory;
use crate::rdma::exposure::{CommandData, EndedCommand, WrongResponse};
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Stag};
use crate::scsi::Lun;
use crate::scsi::initiator::{ScsiQueue, ScsiQueueTimers, ScsiRequest};
use crate::slots::SlotKey;
use abort::SrpAbortLadder;
use blockmux_volume::{Pool, Seg};
use blockmux_wire::srp::{AsynchronousEvent, SrpCommand, SrpHeader, SrpOpcode, SrpResponse, TargetNotice};
use channel::{InitiatorChannelPhase, RdmaChannel, SrpCommandState};
use response::{CommandOutcome, read};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

pub use crate::scsi::initiator::{SenseCode, UnitInfo, UnitRefused};
pub use blockmux_wire::srp::{LoginRejectReason, ResponseCode, TaskManagementFunction};
pub use login::SrpRefused;

/// The logical unit to connect to, and the options of the session.
#[derive(Clone, Debug)]
pub struct SrpInitiatorConfig {
    /// The initiator port. A later session with the same initiator port ends this one.
    pub initiator: SrpPortId,
    /// The target port.
    pub target: SrpPortId,
    /// The logical unit of the target port.
    pub lun: Lun,
    /// The purpose of the session.
    pub mode: SrpSessionMode,
    /// Number of RDMA channels to open, at least one.
    pub channels: u32,
    /// Whether to ask for immediate data (SRP2).
    pub immediate_data: bool,
}

/// The purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrpSessionMode {
    /// Reads and writes the logical unit.
    Use,
    /// Reads all information about the logical unit, then logs out.
    Describe,
    /// Sends this task management function and logs out, without any command to the logical unit.
    Manage(TaskManagementFunction),
}

/// One session with a target port.
pub struct SrpInitiatorSession {
    config: SrpInitiatorConfig,
    queue: ScsiQueue<SrpCommandState>,
    /// The first channel is the one that begins the session.
    channels: Vec<RdmaChannel>,
    /// Index of the channel that got the latest command, and how many further commands of the
    /// batch go to it.
    latest: (usize, u32),
    aborts: SrpAbortLadder,
    /// Number of task management functions sent so far, of which their tags are made.
    functions: u16,
    timers: ScsiQueueTimers,
    ending: Ending,
    refused: Option<SrpRefused>,
    /// Time by which the logical unit has to be known.
    deadline: Instant,
    now: Instant,
}

/// Progress of a session towards its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// Commands that were sent complete in this session; the others wait for the next session.
    Leaving,
    /// The user stops the session: all submitted I/O completes in it.
    Stopping,
    /// No more commands are sent, and the channels close.
    Over,
}

impl SrpInitiatorSession {
    /// Creates a session for a new connection. Reads without a buffer take memory from `pool`.
    #[must_use]
    pub fn new(config: SrpInitiatorConfig, pool: Pool, now: Instant) -> SrpInitiatorSession {
        let deadline = now.checked_add(LOGIN_TIMEOUT).unwrap_or(now);
        let mut queue = ScsiQueue::new(config.lun, pool);
        if matches!(config.mode, SrpSessionMode::Manage(_)) {
            // The logical unit may not respond at all, so it gets no commands.
            queue.drain();
        }
        SrpInitiatorSession {
            config,
            queue,
            channels: vec![RdmaChannel::new(InitiatorChannelPhase::Connecting, deadline)],
            latest: (0, 0),
            aborts: SrpAbortLadder::default(),
            functions: 0,
            timers: ScsiQueueTimers::new(now),
            ending: Ending::No,
            refused: None,
            deadline,
            now,
        }
    }

    /// Sets how I/O is retried that this target port cannot execute now.
    #[must_use]
    pub fn with_retries(mut self, retries: RetryRules) -> SrpInitiatorSession {
        self.queue.retries = retries;
        self
    }

    /// The logical unit, once it is known.
    #[must_use]
    pub fn unit(&self) -> Option<&UnitInfo> {
        self.queue.unit()
    }

    /// The logical units that the target port reports, at most 256. They are known even if the
    /// requested one does not exist.
    #[must_use]
    pub fn luns(&self) -> &[Lun] {
        self.queue.luns()
    }

    /// The reason for which the target refused the login or the logical unit cannot be used, if
    /// that happened.
    #[must_use]
    pub fn refused(&self) -> Option<&SrpRefused> {
        self.refused.as_ref()
    }

    /// Whether the session has ended: it has the requested information, was refused, or was
    /// stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ending == Ending::Over
    }

    /// The target's answer to the task management function of [`SrpSessionMode::Manage`]; `None`
    /// until it arrives.
    #[must_use]
    pub fn managed(&self) -> Option<ResponseCode> {
        self.aborts.response
    }

    /// Handles the connection of a channel, which is then logged in.
    fn on_connected(&mut self, index: usize, private_data: &[u8]) -> Result<(), ProtocolError> {
        let parameters = login::check_response(private_data, &self.config)?;
        if let Some(channel) = self.channels.get_mut(index) {
            channel.open(parameters);
        }
        if index == 0
            && let SrpSessionMode::Manage(function) = self.config.mode
        {
            self.manage(function);
        }
        self.advance();
        Ok(())
    }

    /// Handles a refused connection. Without its first channel the session ends; without another it
    /// continues.
    fn on_refused(&mut self, index: usize, private_data: &[u8]) -> Result<(), ProtocolError> {
        if let Some(channel) = self.channels.get_mut(index) {
            channel.clear();
        }
        let refused = login::check_reject(private_data)?;
        if index == 0 {
            self.refused = Some(refused);
            self.end();
        }
        Ok(())
    }

    /// Ends the session without the commands that were not sent: the next session sends them.
    fn end(&mut self) {
        self.ending = Ending::Over;
        self.channels.iter_mut().for_each(|channel| channel.commands.drop_unsent());
    }

    /// Handles the end of a channel. A target that is stopping ends it while no command is in
    /// flight, which is no error: the driver logs in again unless the user stopped the session.
    fn on_disconnected(&mut self, index: usize) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        let phase = std::mem::replace(&mut channel.phase, InitiatorChannelPhase::Over);
        if self.ending == Ending::Over || index > 0 && phase == InitiatorChannelPhase::Connecting {
            return Ok(());
        }
        self.end();
        if phase == InitiatorChannelPhase::Open && self.queue.is_idle() {
            return Ok(());
        }
        Err(violation("closed the connection in the middle of a login or of commands"))
    }

    /// Handles a message from the target.
    #[inline]
    fn on_message(
        &mut self,
        index: usize,
        message: &Seg,
        invalidated: Option<Stag>,
        written: Option<Seg>,
    ) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        channel.on_message();
        if self.ending == Ending::Over {
            // Messages after the end are ignored.
            return Ok(());
        }
        let opcode: u8 = read(message, 0)?;
        if SrpOpcode(opcode) == SrpOpcode::RESPONSE {
            let response: SrpResponse = read(message, 0)?;
            channel.grant(response.req_lim_delta.get())?;
            return match abort::is_function(response.tag.get()) {
                true => self.on_managed(index, &response, message),
                false => self.on_response(index, &response, message, invalidated, written),
            };
        }
        if invalidated.is_some() {
            return Err(WRONG_KEY);
        }
        self.on_request(index, SrpOpcode(opcode), message)
    }

    /// Handles a request of the target.
    #[cold]
    fn on_request(&mut self, index: usize, opcode: SrpOpcode, message: &Seg) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        match opcode {
            SrpOpcode::CREDIT_REQUEST => {
                let notice: TargetNotice = read(message, 0)?;
                channel.grant(notice.value.get())?;
                channel.push_answer(SrpOpcode::CREDIT_RESPONSE, notice.tag.get());
            }
            SrpOpcode::AER_REQUEST => {
                let event: AsynchronousEvent = read(message, 0)?;
                channel.grant(event.req_lim_delta.get())?;
                channel.push_answer(SrpOpcode::AER_RESPONSE, event.tag.get());
                let len = event.sense_data_len.get() as usize;
                if message.len() < size_of_val(&event).saturating_add(len) {
                    return Err(response::TOO_SHORT);
                }
                let sense = message.slice(size_of_val(&event), len).to_vec();
                // The event reports what a unit attention would report with the next command.
                if Lun(u64::from_be_bytes(event.lun)).names_same_unit(self.config.lun)
                    && let Some(code) = SenseCode::parse(&sense)
                {
                    self.queue.on_sense(code);
                }
            }
            SrpOpcode::TARGET_LOGOUT => {
                let _: TargetNotice = read(message, 0)?;
                // The target sends no more responses. A new session repeats the commands in flight.
                self.end();
            }
            _ => return Err(violation("sent an information unit with an unknown opcode")),
        }
        Ok(())
    }

    /// Handles a response to a command.
    #[inline]
    fn on_response(
        &mut self,
        index: usize,
        response: &SrpResponse,
        message: &Seg,
        invalidated: Option<Stag>,
        written: Option<Seg>,
    ) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        let key = u32::try_from(response.tag.get()).ok().and_then(|tag| self.queue.find(tag));
        let found = key.and_then(|key| Some((key, self.queue.transport(key)?)));
        let Some((key, (_, transfer))) = found.filter(|(_, (state, _))| state.channel == index) else {
            return Err(violation("answered a command that does not exist"));
        };
        let outcome = CommandOutcome::read(response, message, transfer)?;
        match channel.commands.on_response(key, invalidated) {
            Ok(None) => finish(&mut self.queue, &mut self.refused, key, written, &outcome),
            Ok(Some(stag)) => channel.commands.close(key, stag, Some(outcome)),
            Err(WrongResponse::OtherMemory) => return Err(WRONG_KEY),
            Err(WrongResponse::Unsent) => return Err(violation("answered a command that was not sent")),
            Err(WrongResponse::Repeated) => return Err(violation("answered a command twice")),
        }
        Ok(())
    }

    /// Sends the commands that may be sent, and logs out when the session is to end.
    #[inline]
    fn advance(&mut self) {
        if self.queue.has_unit_changed() && self.ending == Ending::No {
            // A new session reads the changed information about the unit.
            self.ending = Ending::Leaving;
            self.queue.drain();
        }
        self.advance_aborts();
        self.send_commands();
        self.timers.on_command(&self.queue, self.now);
        self.advance_bring_up();
        let is_due = match self.ending {
            Ending::No | Ending::Over => false,
            Ending::Leaving => self.queue.is_idle(),
            Ending::Stopping if self.unit().is_none() => self.queue.is_idle(),
            Ending::Stopping => self.queue.is_empty(),
        };
        if is_due {
            self.log_out();
        }
    }

    /// Stops a session that has the requested information or was refused, and opens further
    /// channels once the logical unit is known.
    #[inline]
    fn advance_bring_up(&mut self) {
        let is_finished = match self.config.mode {
            SrpSessionMode::Use => self.refused.is_some(),
            SrpSessionMode::Describe => self.refused.is_some() || self.unit().is_some(),
            SrpSessionMode::Manage(_) => self.managed().is_some(),
        };
        if is_finished {
            self.stop();
        }
        if self.channels.len() == 1 && self.config.channels > 1 && self.is_used() {
            let wanted = |_| RdmaChannel::new(InitiatorChannelPhase::Wanted, self.now);
            self.channels.extend((1..self.config.channels).map(wanted));
        }
    }

    /// Whether the session needs further channels.
    fn is_used(&self) -> bool {
        self.config.mode == SrpSessionMode::Use && self.ending == Ending::No && self.unit().is_some()
    }

    /// Ends the session once all I/O has completed, or at once while the logical unit is unknown.
    fn stop(&mut self) {
        if !matches!(self.ending, Ending::No | Ending::Leaving) {
            return;
        }
        self.ending = Ending::Stopping;
        self.queue.close();
        // No later session will take the commands that waited for one.
        self.queue.undrain();
        if self.queue.unit().is_none() {
            self.queue.drain();
        }
        self.send_commands();
    }

    /// Logs out of every channel. Linux's target does not answer a logout, so the session does not
    /// wait for an answer.
    fn log_out(&mut self) {
        self.ending = Ending::Over;
        let logout = SrpHeader { opcode: SrpOpcode::INITIATOR_LOGOUT.0, ..SrpHeader::default() };
        for channel in self.channels.iter_mut().filter(|channel| channel.has_credit()) {
            channel.push_request(logout.as_bytes());
        }
    }

    /// Sends commands while there are any and a channel has room.
    #[inline]
    fn send_commands(&mut self) {
        while self.ending != Ending::Over
            && !self.aborts.holds_commands()
            && let Some(index) = self.next_channel()
            && let Some(request) = self.queue.next()
        {
            let left = if index == self.latest.0 { self.latest.1 } else { 0 };
            self.latest = (index, left.checked_sub(1).unwrap_or(BATCH));
            self.send_command(index, &request);
        }
    }

    /// Index of the channel for the next command: the channel of the latest command for a batch,
    /// then the one with the fewest commands in flight.
    #[inline]
    fn next_channel(&self) -> Option<usize> {
        let (latest, left) = self.latest;
        let takes = |channel: &&RdmaChannel| channel.room() > 0;
        if (left > 0 || self.channels.len() == 1) && self.channels.get(latest).filter(takes).is_some() {
            return Some(latest);
        }
        let able = self.channels.iter().enumerate().filter(|(_, channel)| takes(channel));
        able.min_by_key(|(_, channel)| channel.commands.in_flight()).map(|(index, _)| index)
    }

    /// Queues a command. Short data-out is sent with it as immediate data; the target transfers all
    /// other data by RDMA.
    #[inline]
    fn send_command(&mut self, index: usize, request: &ScsiRequest) {
        let Some(channel) = self.channels.get_mut(index) else { return };
        let immediate = channel.max_immediate();
        let data = CommandData::new(request.key, request.transfer, &mut self.queue, immediate);
        let command = SrpCommand {
            opcode: SrpOpcode::COMMAND.0,
            tag: u64::from(request.key.short()).into(),
            lun: self.config.lun.0.to_be_bytes(),
            cdb: request.command,
            ..SrpCommand::default()
        };
        if let Some((state, _)) = self.queue.transport(request.key) {
            state.channel = index;
        }
        channel.push(request.key, command, data);
    }

    /// Whether the deadline for login and bring-up applies. A reset may take longer.
    fn is_bound(&self) -> bool {
        self.unit().is_none() && !self.aborts.holds_commands() && self.ending != Ending::Over
    }
}

/// The driver's view of one channel of a session.
struct SessionChannel<'a> {
    session: &'a mut SrpInitiatorSession,
    index: usize,
}

impl RdmaConnections for SrpInitiatorSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(login::request(&self.config, true))
    }

    #[inline]
    fn connection(&mut self, index: usize) -> impl RdmaSession {
        SessionChannel { session: self, index }
    }
}

impl RdmaSession for SessionChannel<'_> {
    fn endpoint(&self) -> Endpoint {
        endpoint(login::request(&self.session.config, self.index == 0))
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        let SessionChannel { session, index } = self;
        session.now = now;
        match event {
            Event::Received { message, invalidated, written } => {
                session.on_message(*index, &message, invalidated, written)?;
                session.advance();
            }
            Event::Registered { id, remote } => {
                if let Some(channel) = session.channels.get_mut(*index) {
                    channel.commands.on_registered(id, remote);
                }
            }
            Event::Connected { private_data } => session.on_connected(*index, &private_data)?,
            Event::Refused { private_data } => session.on_refused(*index, &private_data)?,
            Event::Disconnected => session.on_disconnected(*index)?,
            // Failed work ends the connection, and `Disconnected` reports that.
            Event::Requested { .. } | Event::Done { .. } => {}
        }
        Ok(())
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let has_ended = self.end_closed(queue_pair);
        let session = &mut *self.session;
        let Some(channel) = session.channels.get_mut(self.index) else { return false };
        let mut has_moved = has_ended;
        if channel.is_open() {
            has_moved |= channel.give_receives(queue_pair);
            has_moved |= channel.commands.send(queue_pair, u32::MAX, &mut session.queue);
            has_moved |= channel.send_messages(queue_pair);
        }
        let is_ending = session.ending == Ending::Over
            && match channel.phase {
                InitiatorChannelPhase::Connecting => true,
                InitiatorChannelPhase::Open => channel.is_settled(),
                InitiatorChannelPhase::Wanted | InitiatorChannelPhase::Over => false,
            };
        if is_ending {
            channel.phase = InitiatorChannelPhase::Over;
            queue_pair.disconnect();
            return true;
        }
        has_moved
    }
}

impl SessionChannel<'_> {
    /// Invalidates the keys of commands that have ended, and completes these commands. Returns
    /// whether there were any.
    #[inline]
    fn end_closed(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let SessionChannel { session, index } = self;
        let mut has_any = false;
        while let Some(channel) = session.channels.get_mut(*index)
            && let Some(EndedCommand { key, response, written }) =
                channel.commands.invalidate_next(queue_pair)
        {
            has_any = true;
            match response {
                Some(outcome) => finish(&mut session.queue, &mut session.refused, key, written, &outcome),
                None => session.queue.abort(key),
            }
        }
        if has_any {
            session.advance();
        }
        has_any
    }
}

impl Timed for SessionChannel<'_> {
    fn poll_timeout(&self) -> Option<Instant> {
        let session = &*self.session;
        if session.ending == Ending::Over {
            return None;
        }
        let channel = session.channels.get(self.index)?;
        if self.index > 0 {
            return (channel.phase == InitiatorChannelPhase::Connecting).then_some(channel.deadline);
        }
        let deadline = session.is_bound().then_some(session.deadline);
        deadline.into_iter().chain(session.timers.poll(&session.queue)).min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let session = &mut *self.session;
        session.now = now;
        if self.index > 0 {
            let is_late = |channel: &RdmaChannel| {
                channel.phase == InitiatorChannelPhase::Connecting && now >= channel.deadline
            };
            return if session.channels.get(self.index).is_some_and(is_late) { Err(LATE) } else { Ok(()) };
        }
        if session.is_bound() && now >= session.deadline {
            return Err(LATE);
        }
        session.timers.on_timeout(&mut session.queue, now);
        session.advance();
        Ok(())
    }
}

/// Completes a command in the SCSI queue, with the data of a read without memory.
#[inline]
fn finish(
    queue: &mut ScsiQueue<SrpCommandState>,
    refused: &mut Option<SrpRefused>,
    key: SlotKey,
    written: Option<Seg>,
    outcome: &CommandOutcome,
) {
    if let Some(data) = written {
        queue.attach_borrowed(key, data);
    }
    if let Err(unit) = queue.finish(key, outcome.as_scsi()) {
        refused.get_or_insert(SrpRefused::Unit(unit));
    }
}

/// The requirements of one channel for its queue pair.
fn endpoint(private_data: Vec<u8>) -> Endpoint {
    Endpoint {
        receives: MAX_COMMANDS.saturating_add(UNSOLICITED),
        receive_len: RECEIVE_LEN,
        sends: MAX_COMMANDS.saturating_add(UNSOLICITED),
        reads: READS,
        regions: MAX_COMMANDS,
        private_data,
        without_invalidation: None,
    }
}

const fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6" }
}

const WRONG_KEY: ProtocolError = violation("invalidated a key of another command than the one it answered");

const LATE: ProtocolError = violation("did not finish login and bring-up within 30 seconds");

/// Most commands in flight on one channel.
const MAX_COMMANDS: u32 = 256;
/// Receive buffers for requests of the target: SRP_CRED_REQ, SRP_AER_REQ, SRP_T_LOGOUT.
const UNSOLICITED: u32 = 16;
/// The longest message of a target, in bytes: a response with the longest sense data.
const RECEIVE_LEN: u32 = 512;
/// Most RDMA Reads that the target may have in flight (IRD).
const READS: u32 = 32;
/// Commands that go to one channel before the session chooses a channel again.
const BATCH: u32 = 8;
/// Time limit of login and bring-up.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
