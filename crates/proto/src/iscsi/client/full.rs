//! Full feature phase of a session: command window, sending, deadlines and logout.

use super::abort::IscsiAbortLadder;
use super::burst::CommandBurst;
use super::config::BurstSize;
use super::connection::{InitiatorConnection, PING_INTERVAL};
use super::immediate::{PING_TAG, RequestNumbers};
use super::receive::error;
use super::{LOGIN_TIMED_OUT, UnitInfo, UnitRefused};
use crate::driver::session::{Demand, ProtocolError};
use crate::initiator::command_memory::CommandMemory;
use crate::iscsi::login::initiator::InitiatorLoginResult;
use crate::iscsi::login::operational::{OperationalKey as Name, OperationalParameters};
use crate::rdma::exposure::CommandData;
use crate::scsi::Lun;
use crate::scsi::initiator::{DataTransfer, ScsiQueue, ScsiQueueTimers, ScsiRequest};
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
    pub(super) negotiated: SessionParameters,
    pub(super) pool: Pool,
    pub(super) cmd_sn: u32,
    pub(super) max_cmd_sn: u32,
    pub(super) burst: CommandBurst,
    /// The target refused to reassign a task.
    pub(super) is_beyond_recovery: bool,
    /// A connection loss that the target announced and this side has not noticed yet.
    pub(super) announced_loss: Option<AnnouncedLoss>,
    /// Time2Wait from the target before the next session; `None` if the negotiated value applies.
    pub(super) announced_wait: Option<Duration>,
    pub(super) aborts: IscsiAbortLadder,
    ending: LogoutState,
    refused: Option<UnitRefused>,
    /// Deadline of the bring-up.
    deadline: Instant,
    timers: Timers,
}

/// Session-wide parameters from the first login.
#[derive(Clone, Copy)]
pub(super) struct SessionParameters {
    pub(super) immediate_data: bool,
    pub(super) initial_r2t: bool,
    /// FirstBurstLength, in bytes.
    pub(super) first_burst: u32,
    pub(super) max_burst: u32,
    /// ErrorRecoveryLevel.
    pub(super) level: u32,
    /// DefaultTime2Wait: time between the loss of a connection and its replacement.
    pub(super) wait: Duration,
    /// DefaultTime2Retain: how long the target retains the tasks of a lost connection.
    pub(super) retain: Duration,
}

/// A connection loss announced by the target (RFC 7143 §11.9).
#[derive(Clone, Copy)]
pub(super) struct AnnouncedLoss {
    pub(super) cid: u16,
    /// Time before a replacement may log in.
    pub(super) wait: Duration,
    /// Time that the target then retains the connection's tasks.
    pub(super) retain: Duration,
}

/// Data transfer state of a command.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CommandTransfer {
    /// CID of the connection that the command is allegiant to.
    pub(super) cid: u16,
    /// CmdSN of the command.
    pub(super) cmd_sn: u32,
    /// Offset of the next data-in byte, or of the first data-out byte that was neither sent nor
    /// requested.
    pub(super) next: u32,
    /// DataSN of the next Data-In.
    pub(super) data_sn: u32,
    /// R2TSN of the next R2T.
    pub(super) r2t_sn: u32,
    /// DataSN or R2TSN from which retransmission was requested.
    pub(super) requested_from: Option<u32>,
    /// The response arrived before all data: number of Data-In PDUs and StatSN of the response.
    pub(super) early_response: Option<(u32, u32)>,
    /// The command was just reassigned: the target may restart its R2TSN.
    pub(super) is_reassigned: bool,
    /// How often the target rejected the command, or requested data that was sent already.
    pub(super) resends: u32,
}

/// Progress of the session's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LogoutState {
    No,
    /// The target requested a logout: unsent requests are left for another session.
    ByTarget,
    /// The user stopped the session: submitted requests complete here.
    ByUs,
    /// The logout request was sent; nothing may follow it.
    LoggingOut,
    /// The logout was answered, or the session was abandoned.
    Over,
}

struct Timers {
    /// Time of the latest call.
    now: Instant,
    queue: ScsiQueueTimers,
    /// Deadline for the logout that the target requested, if it did.
    logout_by: Option<Instant>,
    /// Over RDMA: deadline after the logout for the target to disconnect.
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
            negotiated: SessionParameters::new(&parameters),
            pool,
            cmd_sn,
            max_cmd_sn,
            burst: CommandBurst::first(burst),
            is_beyond_recovery: false,
            announced_loss: None,
            announced_wait: None,
            aborts: IscsiAbortLadder::default(),
            ending: LogoutState::No,
            refused: None,
            deadline,
            timers: Timers { now, queue: ScsiQueueTimers::new(now), logout_by: None, disconnect_at: None },
        }
    }

    /// The result of the bring-up: the unit or the reason of the failure.
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

    /// Time of the latest call.
    pub(super) fn now(&self) -> Instant {
        self.timers.now
    }

    /// Sets the current time; called at the start of each driver call.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        self.timers.now = now;
    }

    #[inline]
    pub(super) fn demand(&self, connection: &InitiatorConnection) -> Demand {
        if self.ending == LogoutState::Over {
            return Demand::Close;
        }
        if connection.has_unsent_replies() {
            return Demand::Nothing;
        }
        connection.stream_state.demand(connection.negotiated.digests)
    }

    /// The target closed the only connection; returns whether it may.
    pub(super) fn on_end(&mut self, connection: &InitiatorConnection) -> bool {
        let is_allowed = self.queue.is_idle() && connection.stream_state.is_between_pdus();
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

    /// Starts an orderly stop: logs out when all requests are complete, or at once before the unit
    /// is known.
    pub(super) fn stop(&mut self, connections: &mut [InitiatorConnection]) {
        if matches!(self.ending, LogoutState::No | LogoutState::ByTarget) {
            self.ending = LogoutState::ByUs;
            self.queue.close();
            // No other session will take over the requests that were left for one.
            self.queue.undrain();
            if self.queue.unit().is_none() {
                self.queue.drain();
            }
        }
        self.advance(connections);
    }

    /// The target requested the end of the session: requests in flight complete within its time
    /// limit.
    pub(super) fn on_end_requested(&mut self, within: Option<Duration>) {
        if self.ending == LogoutState::No {
            self.ending = LogoutState::ByTarget;
            self.queue.drain();
        }
        if let Some(within) = within {
            // Leave a quarter of the time for the logout itself.
            let within = within.saturating_sub(within.checked_div(4).unwrap_or(within));
            self.timers.logout_by = self.timers.logout_by.or_else(|| self.timers.now.checked_add(within));
        }
    }

    /// Processes the logout response. The session ends even if the target reports a failed cleanup;
    /// it then states how long to wait before the next login.
    pub(super) fn on_logged_out(&mut self, response: &LogoutResponse) -> Result<(), ProtocolError> {
        if self.ending != LogoutState::LoggingOut {
            return Err(error("answered a logout that was not requested", "RFC 7143 §11.15"));
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

    /// Over RDMA: whether the target still has time to disconnect first. Linux's isert reports an
    /// error if the connection ends before the send of its Logout Response has completed.
    pub(super) fn awaits_disconnect(&self) -> bool {
        self.timers.disconnect_at.is_some_and(|at| self.timers.now < at)
    }

    /// Time to wait before the login of the next session, which reinstates this one if it has not
    /// ended (RFC 7143 §7.5, §13.15).
    pub(super) fn time2wait(&self) -> Duration {
        self.announced_wait.unwrap_or(self.negotiated.wait)
    }

    /// Records why the unit cannot be used.
    pub(super) fn refuse(&mut self, refused: UnitRefused) {
        self.refused.get_or_insert(refused);
    }

    /// Sends what may be sent, and logs out when it is time.
    #[inline]
    pub(super) fn advance(&mut self, connections: &mut [InitiatorConnection]) {
        if self.queue.has_unit_changed() {
            // The unit has changed; a new session identifies it again.
            self.on_end_requested(None);
        }
        self.advance_aborts(connections);
        self.send_commands(connections);
        self.timers.queue.on_command(&self.queue, self.timers.now);
        let is_due = match self.ending {
            LogoutState::No | LogoutState::LoggingOut | LogoutState::Over => false,
            LogoutState::ByTarget => self.queue.is_idle() || self.is_logout_overdue(),
            LogoutState::ByUs if self.queue.unit().is_none() => self.queue.is_idle(),
            LogoutState::ByUs => self.queue.is_empty() || self.is_logout_overdue(),
        };
        if is_due && let Some(connection) = connections.iter_mut().find(|connection| connection.is_open()) {
            self.send_logout(connection);
            self.ending = LogoutState::LoggingOut;
        }
    }

    /// Whether the target's time limit for a logout has passed.
    fn is_logout_overdue(&self) -> bool {
        self.timers.logout_by.is_some_and(|by| self.timers.now >= by)
    }

    /// Whether commands may be sent.
    #[inline]
    pub(super) fn may_send(&self) -> bool {
        !matches!(self.ending, LogoutState::LoggingOut | LogoutState::Over)
    }

    /// Whether a lost connection can be replaced.
    pub(super) fn recovers_connections(&self) -> bool {
        self.negotiated.level == 2
    }

    /// Whether further connections are useful.
    pub(super) fn may_add_connections(&self) -> bool {
        self.ending == LogoutState::No && self.queue.unit().is_some()
    }

    /// Free part of the command window (RFC 7143 §4.2.2.1).
    #[inline]
    fn window(&self) -> usize {
        let left = self.max_cmd_sn.wrapping_sub(self.cmd_sn).wrapping_add(1);
        if left > SERIAL_HALF { 0 } else { left as usize }
    }

    /// Processes ExpCmdSN and MaxCmdSN, which all PDUs of a target carry.
    #[inline]
    pub(super) fn on_numbers(&mut self, exp_cmd_sn: u32, max_cmd_sn: u32) {
        // MaxCmdSN of ExpCmdSN − 1 is a closed window; smaller values are ignored.
        let is_sane = max_cmd_sn.wrapping_sub(exp_cmd_sn).wrapping_add(1) <= SERIAL_HALF;
        let is_newer = max_cmd_sn.wrapping_sub(self.max_cmd_sn) <= SERIAL_HALF;
        if is_sane && is_newer {
            self.max_cmd_sn = max_cmd_sn;
        }
    }

    /// The task with this tag, if it is allegiant to this connection.
    #[inline]
    pub(super) fn find(&mut self, connection: &InitiatorConnection, tag: u32) -> Option<SlotKey> {
        let key = self.queue.find(tag)?;
        let (progress, _) = self.queue.transport(key)?;
        (progress.cid == connection.cid).then_some(key)
    }

    /// Whether the bring-up deadline applies. A reset may take longer.
    fn is_bound(&self) -> bool {
        self.queue.unit().is_none() && !self.aborts.holds_commands()
    }

    pub(super) fn poll_timeout(&self, connection: &InitiatorConnection) -> Option<Instant> {
        if self.ending == LogoutState::Over {
            return self.timers.disconnect_at.filter(|_| self.awaits_disconnect());
        }
        let mut next = connection.keep_alive.next;
        if self.is_bound() {
            next = next.min(self.deadline);
        }
        next = next.min(self.timers.queue.poll(&self.queue).unwrap_or(next));
        if !self.is_logout_overdue() {
            next = next.min(self.timers.logout_by.unwrap_or(next));
        }
        Some(next)
    }

    /// Handles the timeouts of the session.
    pub(super) fn on_timeout(
        &mut self,
        now: Instant,
        connections: &mut [InitiatorConnection],
    ) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if self.is_bound() && now >= self.deadline {
            return Err(LOGIN_TIMED_OUT);
        }
        self.timers.queue.on_timeout(&mut self.queue, now);
        self.advance(connections);
        Ok(())
    }

    /// Handles the timeouts of one connection.
    pub(super) fn on_tick(
        &mut self,
        now: Instant,
        connection: &mut InitiatorConnection,
    ) -> Result<(), ProtocolError> {
        if now < connection.keep_alive.next {
            return Ok(());
        }
        connection.keep_alive.next = now.checked_add(PING_INTERVAL).unwrap_or(now);
        self.request_missing_again(connection)?;
        if std::mem::take(&mut connection.keep_alive.has_received) {
            connection.keep_alive.is_ping_pending = false;
        } else if std::mem::replace(&mut connection.keep_alive.is_ping_pending, true) || !self.may_send() {
            return Err(ProtocolError {
                what: "did not answer within 10 seconds",
                reference: "RFC 7143 §11.18, NOP-Out",
            });
        } else {
            self.send_ping(connection);
        }
        Ok(())
    }

    /// The memory of the commands.
    #[inline]
    pub(super) fn memory(&mut self) -> &mut impl CommandMemory {
        &mut self.queue
    }

    /// Sends commands while the window is open. All share one CmdSN sequence, by which the target
    /// orders them (RFC 7143 §4.2.2.1).
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

    /// Sends a command again unchanged, with its original CmdSN (RFC 7143 §7.2.1).
    pub(super) fn resend_command(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some(request) = self.queue.request(key) else { return };
        let Some((progress, _)) = self.queue.transport(key) else { return };
        let cmd_sn = progress.cmd_sn;
        *progress = CommandTransfer { resends: progress.resends, ..CommandTransfer::default() };
        self.send_command(connection, &request, cmd_sn);
    }

    /// Sends a command with its immediate and unsolicited data (RFC 7143, data transfer overview).
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
                let first = len.min(self.negotiated.first_burst);
                if self.negotiated.immediate_data {
                    immediate = first.min(connection.negotiated.max_send_segment);
                }
                if connection.mover.is_some() {
                    // All or nothing: the target needs an RDMA Read for the rest anyway.
                    immediate = if immediate == len { len } else { 0 };
                    unsolicited = immediate;
                } else {
                    unsolicited = if self.negotiated.initial_r2t { immediate } else { first };
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
        if let Some(mover) = &mut connection.mover {
            let data = CommandData::new(request.key, request.transfer, &mut self.queue, immediate);
            return mover.commands.push(request.key, command, data);
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

    /// Sends the data-out from `from` to `end` as one sequence of Data-Out PDUs.
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
            let len = end.saturating_sub(at).min(connection.negotiated.max_send_segment);
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

    /// Sends a header with a part of a command's data-out, without copying.
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

    /// Pings a silent target.
    fn send_ping(&self, connection: &mut InitiatorConnection) {
        let nop = self.numbers(connection).nop_out(PING_TAG, RESERVED_TAG, self.lun.0.to_be_bytes());
        connection.sender.push(transmute_ref!(&nop), &[]);
    }

    /// Answers a ping of the target; its ping data need not be returned.
    pub(super) fn send_ping_reply(&mut self, connection: &mut InitiatorConnection, ping: &NopIn) {
        if self.may_send() {
            connection.count_reply();
            let nop =
                self.numbers(connection).nop_out(RESERVED_TAG, ping.target_transfer_tag.get(), ping.lun);
            connection.sender.push(transmute_ref!(&nop), &[]);
        }
    }

    /// Sends the logout request, which closes the session with all its connections.
    fn send_logout(&self, connection: &mut InitiatorConnection) {
        let logout = self.numbers(connection).logout();
        connection.sender.push(transmute_ref!(&logout), &[]);
    }

    pub(super) fn numbers(&self, connection: &InitiatorConnection) -> RequestNumbers {
        RequestNumbers { cmd_sn: self.cmd_sn, exp_stat_sn: connection.statuses.expected() }
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

/// Half of the serial number space (RFC 1982): larger distances count as behind.
pub(super) const SERIAL_HALF: u32 = 1 << 31;

/// Time limit for the target to disconnect after the logout.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of unsent PDUs that the target asked for; above it nothing is received.
pub(super) const MAX_UNSENT_REPLIES: u32 = 256;
