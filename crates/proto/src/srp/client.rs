//! The SRP initiator: reaches one logical unit of a target port by one RDMA channel or several.
//!
//! ```text
//!   command ──▶ channel ──work──▶ register its memory ──▶ Send: SRP_CMD [, immediate data]
//!   Received: SRP_RSP ──▶ invalidate the memory's key ──▶ done
//! ```
//! The login is the private data of the connection, so a channel whose queue pair is connected is
//! logged in. Data goes straight from and into the caller's memory, which the target reaches from
//! before the command is sent until its response, and no longer: an I/O completes only once its key
//! is invalidated. [`crate::scsi::initiator`] has the commands and their meaning.
//!
//! # Channels
//! The first channel logs in with single-channel operation: the target ends what an earlier session
//! of this initiator port has left before it accepts, so that no write of that one comes late. The
//! others join it once the unit is known. A target that accepts fewer channels is used by those
//! that it accepts; if one is lost later, the session is over with all its channels, and the driver
//! replays its I/O by another one.
//!
//! # Bounds
//! 30 seconds for login and bring-up; 1024 I/O, four commands each; `MAX_COMMANDS` of a channel, or
//! as many as the target grants, of which two are kept for task management (`abort`). There is a
//! receive buffer for each command, and `UNASKED` for what the target asks by itself.

mod abort;
mod channel;
mod login;
mod response;
#[cfg(test)]
mod tests;
mod user;

use super::node::SrpPortId;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, RemoteRights, Stag};
use crate::scsi::Lun;
use crate::scsi::initiator::{DataTransfer, ScsiQueue, ScsiQueueTimers, ScsiRequest};
use crate::session::{ProtocolError, Timed};
use crate::slots::SlotKey;
use abort::Aborts;
use blockmux_volume::{Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::srp::{AsynchronousEvent, SrpCommand, SrpHeader, SrpOpcode, SrpResponse, TargetNotice};
use channel::{AfterClose, Channel, ChannelPhase, CommandData, CommandState, Exposure, buffer_format};
use response::{CommandOutcome, read};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

pub use crate::scsi::initiator::{SenseCode, UnitInfo, UnitRefused};
pub use blockmux_wire::srp::{LoginRejectReason, ResponseCode, TaskManagementFunction};
pub use login::SrpRefused;

/// What to reach, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// The initiator port. Another session with the same ends this one.
    pub initiator: SrpPortId,
    /// The target port.
    pub target: SrpPortId,
    /// Which of its logical units.
    pub lun: Lun,
    /// What for.
    pub mode: Mode,
    /// RDMA channels to have, at least one.
    pub channels: u32,
    /// Whether to ask for immediate data (SRP2).
    pub immediate_data: bool,
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To read and write the unit.
    Use,
    /// To learn everything about the unit, and leave.
    Describe,
    /// To have the target do this, and leave without a look at the unit.
    Manage(TaskManagementFunction),
}

/// One session with a target port.
pub struct InitiatorSession {
    config: Config,
    queue: ScsiQueue<CommandState>,
    /// The first is the one that begins the session.
    channels: Vec<Channel>,
    /// The channel of the latest command, and how many of a batch it still takes.
    latest: (usize, u32),
    aborts: Aborts,
    timers: ScsiQueueTimers,
    ending: Ending,
    refused: Option<SrpRefused>,
    /// When the unit has to be known.
    deadline: Instant,
    now: Instant,
}

/// How far the session has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// What was sent ends here, the rest is kept for another session.
    Leaving,
    /// Our side is stopping: what was submitted completes here.
    Stopping,
    /// Nothing is sent any more, and the channels end.
    Over,
}

impl InitiatorSession {
    /// A session on a fresh connection. Reads without a buffer take memory from `pool`.
    #[must_use]
    pub fn new(config: Config, pool: Pool, now: Instant) -> InitiatorSession {
        let deadline = now.checked_add(LOGIN_TIMEOUT).unwrap_or(now);
        let mut queue = ScsiQueue::new(config.lun, pool);
        if matches!(config.mode, Mode::Manage(_)) {
            // Nothing is asked of the unit, which may owe answers to everybody.
            queue.drain();
        }
        InitiatorSession {
            config,
            queue,
            channels: vec![Channel::new(ChannelPhase::Connecting, deadline)],
            latest: (0, 0),
            aborts: Aborts::default(),
            timers: ScsiQueueTimers::new(now),
            ending: Ending::No,
            refused: None,
            deadline,
            now,
        }
    }

    /// Says that other sessions lead to the unit as well: what a target port does not do now is
    /// handed back ([`Initiator::poll_returned`](crate::session::Initiator::poll_returned)).
    #[must_use]
    pub fn with_other_paths(mut self) -> InitiatorSession {
        self.queue.set_other_paths();
        self
    }

    /// The logical unit, once it is known.
    #[must_use]
    pub fn unit(&self) -> Option<&UnitInfo> {
        self.queue.unit()
    }

    /// The logical unit as a volume, once it is known.
    #[must_use]
    pub fn volume_info(&self) -> Option<VolumeInfo> {
        self.unit().map(UnitInfo::volume_info)
    }

    /// The logical units that the target port listed, at most 256; known even where the one that
    /// was asked for is not there.
    #[must_use]
    pub fn luns(&self) -> &[Lun] {
        self.queue.luns()
    }

    /// Why the session does not do what was asked, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&SrpRefused> {
        self.refused.as_ref()
    }

    /// Whether the session has come to its end: everything asked for was told, or refused, or it
    /// was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ending == Ending::Over
    }

    /// How the target has answered what a session of [`Mode::Manage`] asks for, once it has.
    #[must_use]
    pub fn managed(&self) -> Option<ResponseCode> {
        self.aborts.answer()
    }

    /// A channel is connected, and so logged in.
    fn on_connected(&mut self, index: usize, private_data: &[u8]) -> Result<(), ProtocolError> {
        let terms = login::check_response(private_data, &self.config)?;
        if let Some(channel) = self.channels.get_mut(index) {
            channel.open(terms);
        }
        if index == 0
            && let Mode::Manage(function) = self.config.mode
        {
            self.manage(function);
        }
        self.advance();
        Ok(())
    }

    /// A connection was refused. The session goes on without a further channel.
    fn on_refused(&mut self, index: usize, private_data: &[u8]) -> Result<(), ProtocolError> {
        if let Some(channel) = self.channels.get_mut(index) {
            channel.clear();
        }
        let refused = login::check_reject(private_data)?;
        if index == 0 {
            self.refused = Some(refused);
            self.ending = Ending::Over;
        }
        Ok(())
    }

    /// A channel is gone. The target may end it while no command is under way, as one does that is
    /// stopped; the driver knows whether that was asked for, and logs in again.
    fn on_disconnected(&mut self, index: usize) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        let phase = std::mem::replace(&mut channel.phase, ChannelPhase::Over);
        if self.ending == Ending::Over || index > 0 && phase == ChannelPhase::Connecting {
            return Ok(());
        }
        self.ending = Ending::Over;
        if phase == ChannelPhase::Open && self.queue.is_idle() {
            return Ok(());
        }
        Err(violation("closed the connection in the middle of a login or of commands"))
    }

    /// A message from the target.
    #[inline]
    fn on_message(
        &mut self,
        index: usize,
        message: &Seg,
        invalidated: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        channel.on_message();
        if self.ending == Ending::Over {
            // What comes after the end is of no interest.
            return Ok(());
        }
        let opcode: u8 = read(message, 0)?;
        if SrpOpcode(opcode) == SrpOpcode::RESPONSE {
            let response: SrpResponse = read(message, 0)?;
            channel.grant(response.req_lim_delta.get())?;
            return match abort::is_function(response.tag.get()) {
                true => self.on_managed(index, &response, message),
                false => self.on_response(index, &response, message, invalidated),
            };
        }
        if invalidated.is_some() {
            return Err(WRONG_KEY);
        }
        self.on_request(index, SrpOpcode(opcode), message)
    }

    /// A request of the target.
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
                // It says what a unit attention would say with the next command.
                if Lun(u64::from_be_bytes(event.lun)).names_same_unit(self.config.lun)
                    && let Some(code) = SenseCode::parse(&sense)
                {
                    self.queue.on_sense(code);
                }
            }
            SrpOpcode::TARGET_LOGOUT => {
                let _: TargetNotice = read(message, 0)?;
                // It answers nothing any more. What is under way is done again by another session.
                self.ending = Ending::Over;
            }
            _ => return Err(violation("sent an information unit of an unknown kind")),
        }
        Ok(())
    }

    /// A response to a command.
    #[inline]
    fn on_response(
        &mut self,
        index: usize,
        response: &SrpResponse,
        message: &Seg,
        invalidated: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        let Some(channel) = self.channels.get_mut(index) else { return Ok(()) };
        let key = u32::try_from(response.tag.get()).ok().and_then(|tag| self.queue.find(tag));
        let found = key.and_then(|key| Some((key, self.queue.transport(key)?)));
        let Some((key, (state, transfer))) = found.filter(|(_, (state, _))| state.channel == index) else {
            if channel.stale > 0 && invalidated.is_none() {
                channel.stale = channel.stale.saturating_sub(1);
                return Ok(());
            }
            return Err(violation("answered a command that is not there"));
        };
        let outcome = CommandOutcome::read(response, message, transfer)?;
        match (state.exposure, invalidated) {
            (Exposure::Sent(open), invalidated) if open == invalidated => {}
            (Exposure::Sent(Some(stag)), None) => {
                state.exposure = Exposure::Closing;
                channel.close(stag, AfterClose::Finish(key, outcome));
                return Ok(());
            }
            (Exposure::Sent(_), _) => return Err(WRONG_KEY),
            (Exposure::No, _) => return Err(violation("answered a command that was not sent")),
            (Exposure::Closing, _) => return Err(violation("answered a command twice")),
        }
        channel.end_command();
        finish(&mut self.queue, &mut self.refused, key, &outcome);
        Ok(())
    }

    /// Sends what may be sent, and logs out when it is time.
    #[inline]
    fn advance(&mut self) {
        if self.queue.has_unit_changed() && self.ending == Ending::No {
            // A new session asks what the unit is now.
            self.ending = Ending::Leaving;
            self.queue.drain();
        }
        self.advance_aborts();
        self.send_commands();
        self.timers.on_command(&self.queue, self.now);
        self.look_at_unit();
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

    /// Notes what the bring-up has come to.
    #[inline]
    fn look_at_unit(&mut self) {
        let has_told = match self.config.mode {
            Mode::Use => self.refused.is_some(),
            Mode::Describe => self.refused.is_some() || self.unit().is_some(),
            Mode::Manage(_) => self.managed().is_some(),
        };
        if has_told {
            self.stop();
        }
        if self.channels.len() == 1 && self.config.channels > 1 && self.is_used() {
            let wanted = |_| Channel::new(ChannelPhase::Wanted, self.now);
            self.channels.extend((1..self.config.channels).map(wanted));
        }
    }

    /// Whether further channels are of use.
    fn is_used(&self) -> bool {
        self.config.mode == Mode::Use && self.ending == Ending::No && self.unit().is_some()
    }

    /// Ends softly once everything is complete; before the unit is known, at once.
    fn stop(&mut self) {
        if !matches!(self.ending, Ending::No | Ending::Leaving) {
            return;
        }
        self.ending = Ending::Stopping;
        self.queue.close();
        // What was kept for another session has none to come.
        self.queue.undrain();
        if self.queue.unit().is_none() {
            self.queue.drain();
        }
        self.send_commands();
    }

    /// Ends every channel in order. Linux's target does not answer a logout, so nothing waits for
    /// that.
    fn log_out(&mut self) {
        self.ending = Ending::Over;
        let logout = SrpHeader { opcode: SrpOpcode::INITIATOR_LOGOUT.0, ..SrpHeader::default() };
        for channel in self.channels.iter_mut().filter(|channel| channel.has_credit()) {
            channel.push_request(logout.as_bytes());
        }
    }

    /// Sends commands as long as there are some and a channel has room.
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

    /// The channel of the next command: that of the latest for a batch, then the one with the least
    /// to do.
    #[inline]
    fn next_channel(&self) -> Option<usize> {
        let (latest, left) = self.latest;
        let takes = |channel: &&Channel| channel.room() > 0;
        if (left > 0 || self.channels.len() == 1) && self.channels.get(latest).filter(takes).is_some() {
            return Some(latest);
        }
        let able = self.channels.iter().enumerate().filter(|(_, channel)| takes(channel));
        able.min_by_key(|(_, channel)| channel.in_flight).map(|(index, _)| index)
    }

    /// Queues a command; short data goes with it, the target fetches or brings all other.
    #[inline]
    fn send_command(&mut self, index: usize, request: &ScsiRequest) {
        let Some(channel) = self.channels.get_mut(index) else { return };
        let data = match request.transfer {
            DataTransfer::Nothing | DataTransfer::In(0) | DataTransfer::Out(0) => CommandData::None,
            DataTransfer::In(len) => {
                let place = part(self.queue.data_in(request.key), len);
                CommandData::Closed(place, RemoteRights::RemoteWrite)
            }
            DataTransfer::Out(len) => {
                let data = part(self.queue.data_out(request.key), len);
                match len <= channel.most_immediate() {
                    true => CommandData::Immediate(data),
                    false => CommandData::Closed(data, RemoteRights::RemoteRead),
                }
            }
        };
        let command = SrpCommand {
            opcode: SrpOpcode::COMMAND.0,
            buf_fmt: buffer_format(&data),
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

    /// Whether the unit has to be known by the deadline. A reset may take longer.
    fn is_bound(&self) -> bool {
        self.unit().is_none() && !self.aborts.holds_commands() && self.ending != Ending::Over
    }
}

/// One channel of a session, as its driver has it.
struct SessionChannel<'a> {
    session: &'a mut InitiatorSession,
    index: usize,
}

impl RdmaConnections for InitiatorSession {
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
            Event::Received { message, invalidated } => {
                session.on_message(*index, &message, invalidated)?;
                session.advance();
            }
            Event::Registered { id, remote } => {
                if let Some(channel) = session.channels.get_mut(*index) {
                    channel.on_registered(id, remote);
                }
            }
            Event::Connected { private_data } => session.on_connected(*index, &private_data)?,
            Event::Refused { private_data } => session.on_refused(*index, &private_data)?,
            Event::Disconnected => session.on_disconnected(*index)?,
            // Work that fails ends the connection, which is told by itself.
            Event::Requested { .. } | Event::Done { .. } => {}
        }
        Ok(())
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let has_ended = self.end_closed(queue_pair);
        let InitiatorSession { queue, channels, ending, .. } = &mut *self.session;
        let Some(channel) = channels.get_mut(self.index) else { return false };
        let mut has_moved = has_ended;
        if channel.is_open() {
            has_moved |= channel.give_receives(queue_pair);
            loop {
                let (moved, sent) = channel.send_next(queue_pair);
                has_moved |= moved;
                if let Some((state, stag)) =
                    sent.and_then(|(key, stag)| Some((queue.transport(key)?.0, stag)))
                {
                    state.exposure = Exposure::Sent(stag);
                }
                if !moved || sent.is_none() {
                    break;
                }
            }
            has_moved |= channel.send_messages(queue_pair);
        }
        let is_ending = *ending == Ending::Over
            && match channel.phase {
                ChannelPhase::Connecting => true,
                ChannelPhase::Open => channel.is_settled(),
                ChannelPhase::Wanted | ChannelPhase::Over => false,
            };
        if is_ending {
            channel.phase = ChannelPhase::Over;
            queue_pair.disconnect();
            return true;
        }
        has_moved
    }
}

impl SessionChannel<'_> {
    /// Closes memory whose command has ended, and ends those commands; whether there were any.
    #[inline]
    fn end_closed(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let SessionChannel { session, index } = self;
        let mut has_any = false;
        while let Some(channel) = session.channels.get_mut(*index)
            && let Some(then) = channel.close_next(queue_pair)
        {
            has_any = true;
            channel.end_command();
            match then {
                AfterClose::Finish(key, outcome) => {
                    finish(&mut session.queue, &mut session.refused, key, &outcome);
                }
                AfterClose::Abort(key) => session.queue.abort(key),
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
            return (channel.phase == ChannelPhase::Connecting).then_some(channel.deadline);
        }
        let deadline = session.is_bound().then_some(session.deadline);
        deadline.into_iter().chain(session.timers.poll(&session.queue)).min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let session = &mut *self.session;
        session.now = now;
        if self.index > 0 {
            let is_late =
                |channel: &Channel| channel.phase == ChannelPhase::Connecting && now >= channel.deadline;
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

/// A command has ended.
#[inline]
fn finish(
    queue: &mut ScsiQueue<CommandState>,
    refused: &mut Option<SrpRefused>,
    key: SlotKey,
    outcome: &CommandOutcome,
) {
    if let Err(unit) = queue.finish(key, outcome.as_scsi()) {
        refused.get_or_insert(SrpRefused::Unit(unit));
    }
}

/// The first `len` bytes of a command's data, which begins somewhere in a list.
#[inline]
fn part(data: Option<(&SgList, usize)>, len: u32) -> SgList {
    let len = len as usize;
    match data {
        Some((list, 0)) if list.len() == len => list.clone(),
        Some((list, base)) => list.slice(base, len),
        None => SgList::default(),
    }
}

/// What a channel needs.
fn endpoint(private_data: Vec<u8>) -> Endpoint {
    Endpoint {
        receives: MAX_COMMANDS.saturating_add(UNASKED),
        receive_len: RECEIVE_LEN,
        sends: MAX_COMMANDS.saturating_add(UNASKED),
        reads: READS,
        regions: MAX_COMMANDS,
        private_data,
    }
}

const fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6" }
}

const WRONG_KEY: ProtocolError = violation("invalidated a key that is not of the command that it answered");

const LATE: ProtocolError = violation("did not finish login and bring-up within 30 seconds");

/// Commands of one channel under way at a time.
const MAX_COMMANDS: u32 = 256;
/// Receive buffers for what the target asks by itself: SRP_CRED_REQ, SRP_AER_REQ, SRP_T_LOGOUT.
const UNASKED: u32 = 16;
/// The longest message of a target, in bytes: a response with all its sense data.
const RECEIVE_LEN: u32 = 512;
/// RDMA Reads that the target may have on their way.
const READS: u32 = 32;
/// Commands that go on one channel before another one is thought of.
const BATCH: u32 = 8;
/// How long login and bring-up may take.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
