//! Full feature phase: the state of a session, its window of commands, what it sends, its deadlines
//! and its end.

use super::abort::Aborts;
use super::burst::Burst;
use super::config::BurstSize;
use super::connection::{InitiatorConnection, PING_INTERVAL};
use super::datamover::Exposure;
use super::immediate::{Numbers, PING_TAG};
use super::receive::error;
use super::{LATE, UnitInfo, UnitRefused};
use crate::iscsi::login::initiator::InitiatorLoginResult;
use crate::iscsi::login::operational::{OperationalKey as Name, OperationalParameters};
use crate::rdma::{Remote, RemoteRights, Stag, WorkId};
use crate::scsi::Lun;
use crate::scsi::initiator::{DataTransfer, QueueTimers, ScsiQueue, ScsiRequest};
use crate::session::{Demand, ProtocolError};
use crate::slots::SlotKey;
use blockmux_volume::{Completion, Io, Pool, SgList};
use blockmux_wire::iscsi::scsi::{ATTR_SIMPLE, DataOut, FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iscsi::session::{LogoutResponse, LogoutResult, NopIn};
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24};
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// A session in full feature phase.
pub(super) struct FullFeatureSession {
    pub(super) lun: Lun,
    pub(super) queue: ScsiQueue<CommandTransfer>,
    pub(super) terms: SessionParameters,
    pub(super) pool: Pool,
    pub(super) cmd_sn: u32,
    pub(super) max_cmd_sn: u32,
    pub(super) burst: Burst,
    /// The target has refused to go on with a task.
    pub(super) is_beyond_recovery: bool,
    /// What the target has said of a connection that we have not lost, as far as we know.
    pub(super) announced_loss: Option<AnnouncedLoss>,
    /// How long the target wants to be waited for before the session is taken up again; `None`: as
    /// login agreed on.
    pub(super) announced_wait: Option<Duration>,
    pub(super) aborts: Aborts,
    ending: LogoutState,
    refused: Option<UnitRefused>,
    /// When the unit has to be known.
    deadline: Instant,
    timers: Timers,
}

/// What the first login agreed on for all connections.
#[derive(Clone, Copy)]
pub(super) struct SessionParameters {
    pub(super) immediate_data: bool,
    pub(super) initial_r2t: bool,
    /// In bytes.
    pub(super) first_burst: u32,
    pub(super) max_burst: u32,
    /// Of error recovery.
    pub(super) level: u32,
    /// Between the loss of a connection and the next.
    pub(super) wait: Duration,
    /// How long the target keeps the tasks of a connection that was lost.
    pub(super) retain: Duration,
}

/// A connection that is lost, as the target has it (RFC 7143 §11.9).
#[derive(Clone, Copy)]
pub(super) struct AnnouncedLoss {
    pub(super) cid: u16,
    /// Until the next may take its place.
    pub(super) wait: Duration,
    /// How long the target keeps its tasks from then on.
    pub(super) retain: Duration,
}

/// How far a command's data has moved, and where.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CommandTransfer {
    /// The connection that it belongs to.
    pub(super) cid: u16,
    /// Its number.
    pub(super) cmd_sn: u32,
    /// The next byte of data-in, or the first of data-out that was neither sent nor asked for.
    pub(super) next: u32,
    /// Of the next Data-In.
    pub(super) data_sn: u32,
    /// Of the next R2T.
    pub(super) r2t_sn: u32,
    /// From there on Data-In or R2Ts were asked for again.
    pub(super) asked_from: Option<u32>,
    /// Its response came before its data: how many Data-In there are, and the response's number.
    pub(super) held: Option<(u32, u32)>,
    /// It has just moved to another connection: the target may begin anew with its R2Ts.
    pub(super) is_moved: bool,
    /// Over RDMA: whether the target reaches its memory.
    pub(super) exposure: Exposure,
}

/// How far the session has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LogoutState {
    No,
    /// The target asked for a logout: what was not sent is kept for another session.
    ByTarget,
    /// Our side is stopping: what was submitted completes here.
    ByUs,
    /// The logout request is out, nothing may follow.
    LoggingOut,
    /// It was answered, or the session was given up.
    Over,
}

struct Timers {
    /// When the latest call came.
    now: Instant,
    queue: QueueTimers,
    /// The target waits for a logout until then, if it has asked for one.
    leave_by: Option<Instant>,
    /// Over RDMA, after the logout: when to disconnect if the target has not.
    disconnect_at: Option<Instant>,
}

impl FullFeatureSession {
    pub(super) fn new(
        (lun, burst): (Lun, BurstSize),
        established: &InitiatorLoginResult,
        pool: Pool,
        (now, deadline): (Instant, Instant),
    ) -> FullFeatureSession {
        let InitiatorLoginResult { parameters, cmd_sn, max_cmd_sn, .. } = *established;
        FullFeatureSession {
            lun,
            queue: ScsiQueue::new(lun, pool.clone()),
            terms: SessionParameters::new(&parameters),
            pool,
            cmd_sn,
            max_cmd_sn,
            burst: Burst::first(burst),
            is_beyond_recovery: false,
            announced_loss: None,
            announced_wait: None,
            aborts: Aborts::default(),
            ending: LogoutState::No,
            refused: None,
            deadline,
            timers: Timers { now, queue: QueueTimers::new(now), leave_by: None, disconnect_at: None },
        }
    }

    /// What the bring-up has found, or why it failed.
    #[inline]
    pub(super) fn bring_up(&self) -> (Option<&UnitInfo>, Option<UnitRefused>) {
        (self.queue.unit(), self.refused.clone())
    }

    pub(super) fn luns(&self) -> &[Lun] {
        self.queue.luns()
    }

    pub(super) fn is_over(&self) -> bool {
        self.ending == LogoutState::Over
    }

    /// When the latest call came.
    pub(super) fn now(&self) -> Instant {
        self.timers.now
    }

    /// Something comes in.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        self.timers.now = now;
    }

    #[inline]
    pub(super) fn demand(&self, connection: &InitiatorConnection) -> Demand {
        if self.ending == LogoutState::Over {
            return Demand::Close;
        }
        if connection.is_flooded() {
            return Demand::Nothing;
        }
        connection.reading.demand(connection.terms.digests)
    }

    /// The target has closed its side of the only connection; whether it may.
    pub(super) fn on_end(&mut self, connection: &InitiatorConnection) -> bool {
        let is_allowed = self.queue.is_quiet() && connection.reading.is_between_pdus();
        self.ending = LogoutState::Over;
        is_allowed
    }

    #[inline]
    pub(super) fn room(&self) -> usize {
        if self.ending != LogoutState::No {
            return 0;
        }
        let window = self.window().saturating_sub(self.queue.unsent());
        self.queue.room().min(window)
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io, connections: &mut [InitiatorConnection]) {
        self.queue.submit(io);
        self.send_commands(connections);
    }

    #[inline]
    pub(super) fn poll_done(&mut self) -> Option<Completion> {
        self.queue.poll_done()
    }

    pub(super) fn take_unfinished(&mut self) -> Vec<Io> {
        self.ending = LogoutState::Over;
        self.queue.take_unfinished()
    }

    /// Ends softly once everything is complete; before the unit is known, at once.
    pub(super) fn stop(&mut self, connections: &mut [InitiatorConnection]) {
        if matches!(self.ending, LogoutState::No | LogoutState::ByTarget) {
            self.ending = LogoutState::ByUs;
            self.queue.close();
            // What was kept for another session has none to come.
            self.queue.undrain();
            if self.queue.unit().is_none() {
                self.queue.drain();
            }
        }
        self.advance(connections);
    }

    /// The target wants the session to end: what is under way ends here, but for what takes longer
    /// than the target gives us.
    pub(super) fn leave(&mut self, within: Option<Duration>) {
        if self.ending == LogoutState::No {
            self.ending = LogoutState::ByTarget;
            self.queue.drain();
        }
        if let Some(within) = within {
            // What is left of it is for the way there.
            let within = within.saturating_sub(within.checked_div(4).unwrap_or(within));
            self.timers.leave_by = self.timers.leave_by.or_else(|| self.timers.now.checked_add(within));
        }
    }

    /// The logout was answered. Whether the target could tidy up is its own affair: the connection
    /// ends. If it could not, it says how long to leave it alone.
    pub(super) fn on_logged_out(&mut self, response: &LogoutResponse) -> Result<(), ProtocolError> {
        if self.ending != LogoutState::LoggingOut {
            return Err(error("answered a logout that was not asked for", "RFC 7143 §11.15"));
        }
        let wait = match LogoutResult(response.response) {
            LogoutResult::CLOSED_SUCCESSFULLY | LogoutResult::CID_NOT_FOUND => Duration::ZERO,
            _ => Duration::from_secs(response.time2wait.get().into()),
        };
        self.announced_wait = Some(wait);
        self.ending = LogoutState::Over;
        self.timers.disconnect_at = self.timers.now.checked_add(DISCONNECT_TIMEOUT);
        Ok(())
    }

    /// Over RDMA: whether the target is given time to disconnect first. Its Logout Response is here
    /// before its provider has reported the send as complete, and Linux's isert takes a connection
    /// that ends in between for an error.
    pub(super) fn awaits_disconnect(&self) -> bool {
        self.timers.disconnect_at.is_some_and(|at| self.timers.now < at)
    }

    /// How long to wait before the login of another session, which ends this one if it has not
    /// ended (RFC 7143 §7.5, §13.15).
    pub(super) fn time2wait(&self) -> Duration {
        self.announced_wait.unwrap_or(self.terms.wait)
    }

    /// The unit turned out to be none for us.
    pub(super) fn refuse(&mut self, refused: UnitRefused) {
        self.refused.get_or_insert(refused);
    }

    /// Sends what may be sent, and logs out when it is time.
    #[inline]
    pub(super) fn advance(&mut self, connections: &mut [InitiatorConnection]) {
        if self.queue.is_strange() {
            // A new session asks what it is now.
            self.leave(None);
        }
        self.advance_aborts(connections);
        self.send_commands(connections);
        self.timers.queue.on_command(&self.queue, self.timers.now);
        let is_due = match self.ending {
            LogoutState::No | LogoutState::LoggingOut | LogoutState::Over => false,
            LogoutState::ByTarget => self.queue.is_quiet() || self.is_leave_over(),
            LogoutState::ByUs if self.queue.unit().is_none() => self.queue.is_quiet(),
            LogoutState::ByUs => self.queue.is_empty() || self.is_leave_over(),
        };
        if is_due && let Some(connection) = connections.iter_mut().find(|connection| connection.is_open()) {
            self.send_logout(connection);
            self.ending = LogoutState::LoggingOut;
        }
    }

    /// Whether the target has waited for a logout as long as it said.
    fn is_leave_over(&self) -> bool {
        self.timers.leave_by.is_some_and(|by| self.timers.now >= by)
    }

    /// Whether commands may be sent at all.
    #[inline]
    pub(super) fn may_send(&self) -> bool {
        !matches!(self.ending, LogoutState::LoggingOut | LogoutState::Over)
    }

    /// Whether a connection that is lost can be replaced.
    pub(super) fn recovers_connections(&self) -> bool {
        self.terms.level == 2
    }

    /// Whether more connections would be of use.
    pub(super) fn is_used(&self) -> bool {
        self.ending == LogoutState::No && self.queue.unit().is_some()
    }

    /// How many more commands the target takes (RFC 7143 §4.2.2.1).
    #[inline]
    fn window(&self) -> usize {
        let left = self.max_cmd_sn.wrapping_sub(self.cmd_sn).wrapping_add(1);
        if left > SERIAL_HALF { 0 } else { left as usize }
    }

    /// Takes the numbers that every PDU of a target has.
    #[inline]
    pub(super) fn on_numbers(&mut self, exp_cmd_sn: u32, max_cmd_sn: u32) {
        // One less than ExpCmdSN is a closed window; less than that says nothing.
        let is_sane = max_cmd_sn.wrapping_sub(exp_cmd_sn).wrapping_add(1) <= SERIAL_HALF;
        let is_newer = max_cmd_sn.wrapping_sub(self.max_cmd_sn) <= SERIAL_HALF;
        if is_sane && is_newer {
            self.max_cmd_sn = max_cmd_sn;
        }
    }

    /// The task that the target names on this connection, if it is one of its tasks.
    #[inline]
    pub(super) fn find(&mut self, connection: &InitiatorConnection, tag: u32) -> Option<SlotKey> {
        let key = self.queue.find(tag)?;
        let (progress, _) = self.queue.transport(key)?;
        (progress.cid == connection.cid).then_some(key)
    }

    /// Whether the unit has to be known by the deadline. A reset may take longer.
    fn is_bound(&self) -> bool {
        self.queue.unit().is_none() && !self.aborts.holds_commands()
    }

    pub(super) fn poll_timeout(&self, connection: &InitiatorConnection) -> Option<Instant> {
        if self.ending == LogoutState::Over {
            return self.timers.disconnect_at.filter(|_| self.awaits_disconnect());
        }
        let mut next = connection.ticks.next;
        if self.is_bound() {
            next = next.min(self.deadline);
        }
        next = next.min(self.timers.queue.poll(&self.queue).unwrap_or(next));
        if !self.is_leave_over() {
            next = next.min(self.timers.leave_by.unwrap_or(next));
        }
        Some(next)
    }

    /// Some time has passed, for the session.
    pub(super) fn on_timeout(
        &mut self,
        now: Instant,
        connections: &mut [InitiatorConnection],
    ) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if self.is_bound() && now >= self.deadline {
            return Err(LATE);
        }
        self.timers.queue.on_timeout(&mut self.queue, now);
        self.advance(connections);
        Ok(())
    }

    /// Some time has passed, for one connection.
    pub(super) fn on_tick(
        &mut self,
        now: Instant,
        connection: &mut InitiatorConnection,
    ) -> Result<(), ProtocolError> {
        if now < connection.ticks.next {
            return Ok(());
        }
        connection.ticks.next = now.checked_add(PING_INTERVAL).unwrap_or(now);
        self.ask_again(connection)?;
        if std::mem::take(&mut connection.ticks.heard) {
            connection.ticks.pinged = false;
        } else if std::mem::replace(&mut connection.ticks.pinged, true) || !self.may_send() {
            return Err(ProtocolError {
                what: "did not answer within 10 seconds",
                reference: "RFC 7143 §11.18, NOP-Out",
            });
        } else {
            self.send_ping(connection);
        }
        Ok(())
    }

    /// Sends commands as long as there are some and the window is open. They all are numbered in
    /// one sequence, by which the target puts them in order again (RFC 7143 §4.2.2.1).
    #[inline]
    pub(super) fn send_commands(&mut self, connections: &mut [InitiatorConnection]) {
        while self.may_send()
            && !self.aborts.holds_commands()
            && self.window() > 0
            && let Some(burst) = self.burst.next(connections)
            && let Some(connection) = connections.get_mut(burst.connection)
            && let Some(request) = self.queue.next()
        {
            self.burst = burst;
            let cmd_sn = self.cmd_sn;
            self.cmd_sn = cmd_sn.wrapping_add(1);
            connection.in_flight = connection.in_flight.saturating_add(1);
            self.burst.count(&request.transfer);
            self.send_command(connection, &request, cmd_sn);
        }
    }

    /// Sends a command once more, as if for the first time, but with the number that it has (RFC
    /// 7143 §7.2.1).
    pub(super) fn send_again(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some(request) = self.queue.request(key) else { return };
        let Some((progress, _)) = self.queue.transport(key) else { return };
        let cmd_sn = progress.cmd_sn;
        *progress = CommandTransfer::default();
        self.send_command(connection, &request, cmd_sn);
    }

    /// Sends a command with the data that may go with it unasked (RFC 7143, data transfer
    /// overview).
    #[inline]
    fn send_command(&mut self, connection: &mut InitiatorConnection, request: &ScsiRequest, cmd_sn: u32) {
        let (mut flags, mut expected, mut immediate, mut unsolicited) = (FLAG_FINAL | ATTR_SIMPLE, 0, 0, 0);
        match request.transfer {
            DataTransfer::Nothing => {}
            DataTransfer::In(len) => {
                flags |= FLAG_READ;
                expected = len;
            }
            DataTransfer::Out(len) => {
                flags |= FLAG_WRITE;
                expected = len;
                let first = len.min(self.terms.first_burst);
                if self.terms.immediate_data {
                    immediate = first.min(connection.terms.max_send_segment);
                }
                if connection.mover.is_some() {
                    // All at once or nothing: what is left is one read of the target's, with a part
                    // or without.
                    immediate = if immediate == len { len } else { 0 };
                    unsolicited = immediate;
                } else {
                    unsolicited = if self.terms.initial_r2t { immediate } else { first };
                }
                if unsolicited > immediate {
                    flags &= !FLAG_FINAL;
                }
            }
        }
        if let Some((progress, _)) = self.queue.transport(request.key) {
            (progress.cid, progress.cmd_sn, progress.next) = (connection.cid, cmd_sn, unsolicited);
        }
        let tag = request.key.short();
        let command = ScsiCommand {
            opcode: IscsiOpcode::SCSI_COMMAND.0,
            flags,
            reserved: 0,
            priority: 0,
            total_ahs_length: 0,
            data_segment_length: U24::new(immediate),
            lun: self.lun.0.to_be_bytes(),
            initiator_task_tag: tag.into(),
            expected_data_transfer_length: expected.into(),
            cmd_sn: cmd_sn.into(),
            exp_stat_sn: connection.statuses.expected().into(),
            cdb: request.command,
        };
        if connection.mover.is_some() {
            return self.send_over_rdma(connection, request, command, immediate);
        }
        if immediate > 0 {
            self.send_data(connection, request.key, transmute_ref!(&command), 0, immediate);
        } else {
            connection.sender.push(transmute_ref!(&command), &[]);
        }
        if unsolicited > immediate {
            self.send_sequence(connection, request.key, RESERVED_TAG, immediate, unsolicited);
        }
    }

    /// Queues a command; its data goes with it if it is `immediate`, else the target fetches or
    /// brings it.
    #[inline]
    fn send_over_rdma(
        &mut self,
        connection: &mut InitiatorConnection,
        request: &ScsiRequest,
        command: ScsiCommand,
        immediate: u32,
    ) {
        let (mut payload, mut memory) = (SgList::default(), None);
        match request.transfer {
            DataTransfer::In(len) if len > 0 => {
                let place = self.queue.data_in(request.key).map(|(list, base)| part(list, base, len));
                memory = place.map(|place| (place, RemoteRights::RemoteWrite));
            }
            DataTransfer::Out(len) if len > 0 => {
                let data = self.queue.data_out(request.key).map(|(list, base)| part(list, base, len));
                match immediate {
                    0 => memory = data.map(|data| (data, RemoteRights::RemoteRead)),
                    _ => payload = data.unwrap_or_default(),
                }
            }
            DataTransfer::Nothing | DataTransfer::In(_) | DataTransfer::Out(_) => {}
        }
        if let Some(mover) = &mut connection.mover {
            mover.push(request.key, command, payload, memory);
        }
    }

    /// A command's memory is open.
    #[inline]
    pub(super) fn on_registered(&mut self, connection: &mut InitiatorConnection, id: WorkId, remote: Remote) {
        let key = connection.mover.as_mut().and_then(|mover| mover.on_registered(id, remote));
        if let Some(key) = key {
            self.on_opened(key, remote.stag);
        }
    }

    /// A command's memory is open under this name.
    #[inline]
    pub(super) fn on_opened(&mut self, key: SlotKey, stag: Stag) {
        if let Some((progress, _)) = self.queue.transport(key) {
            progress.exposure = Exposure::Open(stag);
        }
    }

    /// Sends the data-out from `from` up to `end` as one sequence of Data-Out PDUs.
    #[inline]
    pub(super) fn send_sequence(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        target_transfer_tag: u32,
        from: u32,
        end: u32,
    ) {
        let (mut at, mut data_sn) = (from, 0_u32);
        while at < end {
            let len = end.saturating_sub(at).min(connection.terms.max_send_segment);
            let next = at.saturating_add(len);
            let data_out = DataOut {
                opcode: IscsiOpcode::DATA_OUT.0,
                flags: if next == end { FLAG_FINAL } else { 0 },
                reserved: [0; 2],
                total_ahs_length: 0,
                data_segment_length: U24::new(len),
                lun: self.lun.0.to_be_bytes(),
                initiator_task_tag: key.short().into(),
                target_transfer_tag: target_transfer_tag.into(),
                reserved_cmd_sn: [0; 4],
                exp_stat_sn: connection.statuses.expected().into(),
                reserved_end: [0; 4],
                data_sn: data_sn.into(),
                buffer_offset: at.into(),
                reserved_last: [0; 4],
            };
            self.send_data(connection, key, transmute_ref!(&data_out), at, len);
            (at, data_sn) = (next, data_sn.wrapping_add(1));
        }
    }

    /// A header with a part of a command's data-out, by reference.
    #[inline]
    fn send_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        header: &Bhs,
        from: u32,
        len: u32,
    ) {
        let nothing = SgList::default();
        let (data, base) = self.queue.data_out(key).unwrap_or((&nothing, 0));
        let range = (base.saturating_add(from as usize), len as usize);
        connection.sender.push_borrowed(&self.pool, header, data, range);
    }

    /// Asks a silent target whether it is there.
    fn send_ping(&self, connection: &mut InitiatorConnection) {
        let nop = self.numbers(connection).nop_out(PING_TAG, RESERVED_TAG, self.lun.0.to_be_bytes());
        connection.sender.push(transmute_ref!(&nop), &[]);
    }

    /// Answers the target's ping; what data it has need not come back.
    pub(super) fn send_pong(&mut self, connection: &mut InitiatorConnection, ping: &NopIn) {
        if self.may_send() {
            connection.pongs = connection.pongs.saturating_add(1);
            let nop =
                self.numbers(connection).nop_out(RESERVED_TAG, ping.target_transfer_tag.get(), ping.lun);
            connection.sender.push(transmute_ref!(&nop), &[]);
        }
    }

    /// Ends the session in order, and with it all its connections.
    fn send_logout(&self, connection: &mut InitiatorConnection) {
        let logout = self.numbers(connection).logout();
        connection.sender.push(transmute_ref!(&logout), &[]);
    }

    pub(super) fn numbers(&self, connection: &InitiatorConnection) -> Numbers {
        Numbers { cmd_sn: self.cmd_sn, exp_stat_sn: connection.statuses.expected() }
    }
}

impl SessionParameters {
    fn new(parameters: &OperationalParameters) -> SessionParameters {
        let seconds = |key| Duration::from_secs(parameters.get(key).into());
        SessionParameters {
            immediate_data: parameters.is_on(Name::ImmediateData),
            initial_r2t: parameters.is_on(Name::InitialR2T),
            first_burst: parameters.get(Name::FirstBurstLength),
            max_burst: parameters.get(Name::MaxBurstLength),
            level: parameters.get(Name::ErrorRecoveryLevel),
            wait: seconds(Name::DefaultTime2Wait),
            retain: seconds(Name::DefaultTime2Retain),
        }
    }
}

/// `len` bytes at `base` of a list.
fn part(list: &SgList, base: usize, len: u32) -> SgList {
    let len = len as usize;
    if base == 0 && list.len() == len { list.clone() } else { list.slice(base, len) }
}

/// Serial numbers further apart than this are behind each other (RFC 1982).
pub(super) const SERIAL_HALF: u32 = 1 << 31;

/// How long a target may take to disconnect after the logout.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers to pings that may wait to be sent; then nothing more is received.
pub(super) const MAX_PONGS: u32 = 256;
