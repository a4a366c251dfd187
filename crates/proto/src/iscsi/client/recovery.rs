//! Below the end of a session: what came damaged is asked for again, and connections that are lost
//! are replaced (RFC 7143 §7).
//!
//! Level 1. A data segment with a wrong digest is dropped. Data-In is asked for again from the
//! first PDU that is missing on, and until that comes everything later of its command is dropped as
//! well; R2Ts likewise. A status is asked for by its number. What we sent and came damaged, the
//! target asks for with another R2T, or it rejects the command, which then goes out once more with
//! the number that it had.
//!
//! Level 2. A connection that is lost is dialled again and logs in with its own number, which ends
//! the one before. The target's ExpCmdSN then tells which commands it has: it is asked to move
//! their tasks to the new connection, one after the other; what it does not have is sent again.
//! Where that fails the session is over, and another one replays.

use super::connection::{ConnectionPhase, InitiatorConnection};
use super::full::{FullFeatureSession, SERIAL_HALF};
use super::immediate::MOVE_TAG;
use super::receive::error;
use super::statuses::StatusArrival;
use crate::iscsi::login::initiator::InitiatorLoginResult;
use crate::scsi::initiator::DataTransfer;
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_wire::iscsi::scsi::{
    DataIn, FLAG_STATUS, Function, FunctionResponse, SnackRequest, SnackType, TaskManagementRequest,
    TaskManagementResponse,
};
use blockmux_wire::iscsi::session::NopIn;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, transmute_ref};

impl FullFeatureSession {
    /// A status has come; whether to look at it.
    #[inline]
    pub(super) fn on_status(
        &mut self,
        connection: &mut InitiatorConnection,
        stat_sn: u32,
    ) -> Result<bool, ProtocolError> {
        if self.terms.level == 0 {
            connection.statuses.acknowledge(stat_sn);
            return Ok(true);
        }
        match connection.statuses.on_status(stat_sn) {
            StatusArrival::Fresh => Ok(true),
            StatusArrival::Gap { first, count } => {
                self.ask_for_status(connection, first, count);
                Ok(true)
            }
            StatusArrival::Again => Ok(false),
            StatusArrival::TooFar => Err(TOO_FAR),
        }
    }

    /// What the target says of its numbers where it sends no status: then all before have to be
    /// here.
    pub(super) fn on_next_status(
        &mut self,
        connection: &mut InitiatorConnection,
        stat_sn: u32,
    ) -> Result<(), ProtocolError> {
        let count = stat_sn.wrapping_sub(connection.statuses.next());
        if self.terms.level == 0 || count == 0 || count >= SERIAL_HALF {
            return Ok(());
        }
        let first = connection.statuses.next();
        if !connection.statuses.miss(stat_sn.wrapping_sub(1)) {
            return Err(TOO_FAR);
        }
        self.ask_for_status(connection, first, count);
        Ok(())
    }

    /// A PDU came whose data segment has a wrong digest. At level 0 that is the end of the session.
    #[cold]
    pub(super) fn on_damaged(
        &mut self,
        connection: &mut InitiatorConnection,
        bhs: &Bhs,
    ) -> Result<(), ProtocolError> {
        if self.terms.level == 0 {
            return Err(error("sent a data segment whose digest is wrong", "RFC 7143 §7.8"));
        }
        let common: &NopIn = transmute_ref!(bhs);
        let stat_sn = common.stat_sn.get();
        match bhs.opcode() {
            IscsiOpcode::DATA_IN => {
                let data_in: &DataIn = transmute_ref!(bhs);
                if data_in.flags & FLAG_STATUS != 0 && !connection.statuses.miss(stat_sn) {
                    return Err(TOO_FAR);
                }
                if let Some(key) = self.find(connection, data_in.initiator_task_tag.get()) {
                    self.ask_for_data(connection, key, data_in.data_sn.get(), true);
                }
            }
            // The target's ping has no status, and need not be answered.
            IscsiOpcode::NOP_IN if common.initiator_task_tag.get() == RESERVED_TAG => {}
            _ => {
                if !connection.statuses.miss(stat_sn) {
                    return Err(TOO_FAR);
                }
                self.ask_for_status(connection, stat_sn, 1);
            }
        }
        Ok(())
    }

    /// A Data-In or R2T with this number cannot be taken, for one before it, or it itself, is
    /// missing: asks for what is missing, once, or again if `is_damaged` says that it came damaged
    /// once more. What came before is dropped without a word.
    pub(super) fn ask_for_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        number: u32,
        is_damaged: bool,
    ) {
        let lun = self.lun.0.to_be_bytes();
        let Some((progress, transfer)) = self.queue.transport(key) else { return };
        let expected = match transfer {
            DataTransfer::In(_) => progress.data_sn,
            _ => progress.r2t_sn,
        };
        let is_old = number.wrapping_sub(expected) >= SERIAL_HALF;
        if is_old || (progress.asked_from == Some(expected) && !(is_damaged && number == expected)) {
            return;
        }
        progress.asked_from = Some(expected);
        // A run of no length is all there is from there on.
        send_snack(connection, SnackType::DATA_R2T, lun, key.short(), RESERVED_TAG, (expected, 0));
    }

    /// A Data-In that is not the next of its command is dropped. If one before it is missing, all
    /// from that on come again, and with the last of them its status.
    #[cold]
    pub(super) fn on_other_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        data_in: &DataIn,
    ) -> Result<Option<SlotKey>, ProtocolError> {
        let number = data_in.data_sn.get();
        let expected = self.queue.transport(key).map_or(number, |(progress, _)| progress.data_sn);
        let is_early = number.wrapping_sub(expected) < SERIAL_HALF;
        if is_early && data_in.flags & FLAG_STATUS != 0 && !connection.statuses.miss(data_in.stat_sn.get()) {
            return Err(TOO_FAR);
        }
        self.ask_for_data(connection, key, number, false);
        Ok(None)
    }

    /// A response says how many Data-In its command had: whether they are all here. If not, it is
    /// asked for again when they are.
    pub(super) fn has_all_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        stat_sn: u32,
        count: u32,
    ) -> bool {
        let Some((progress, DataTransfer::In(_))) = self.queue.transport(key) else { return true };
        let missing = count.wrapping_sub(progress.data_sn);
        if self.terms.level == 0 || missing == 0 || missing >= SERIAL_HALF {
            return true;
        }
        progress.held = Some((count, stat_sn));
        // It has just been counted, so there is room to miss it.
        connection.statuses.miss(stat_sn);
        self.ask_for_data(connection, key, count.wrapping_sub(1), false);
        false
    }

    /// A Data-In was taken: asks for the response that came too early, when it was the last.
    #[inline]
    pub(super) fn after_data(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some((progress, _)) = self.queue.transport(key) else { return };
        if let Some((count, stat_sn)) = progress.held
            && count == progress.data_sn
        {
            progress.held = None;
            self.ask_for_status(connection, stat_sn, 1);
        }
    }

    /// The target wants to know how far its data has come (RFC 7143 §11.7.2).
    pub(super) fn acknowledge_data(
        &mut self,
        connection: &mut InitiatorConnection,
        data_in: &DataIn,
        next: u32,
    ) {
        let tag = data_in.target_transfer_tag.get();
        send_snack(connection, SnackType::DATA_ACK, data_in.lun, RESERVED_TAG, tag, (next, 0));
    }

    fn ask_for_status(&mut self, connection: &mut InitiatorConnection, first: u32, count: u32) {
        send_snack(connection, SnackType::STATUS, [0; 8], RESERVED_TAG, RESERVED_TAG, (first, count));
    }

    /// A while has passed: what is still missing is asked for once more, and then no more.
    pub(super) fn ask_again(&mut self, connection: &mut InitiatorConnection) -> Result<(), ProtocolError> {
        let overdue = connection.statuses.on_tick().map_err(|()| {
            error("did not send again within 10 seconds what was asked for", "RFC 7143 §7.9, Sequence Errors")
        })?;
        let overdue = overdue.to_vec();
        for stat_sn in overdue {
            self.ask_for_status(connection, stat_sn, 1);
        }
        Ok(())
    }

    /// The target did not take a command because its data came damaged: sends it again, with its
    /// number.
    #[cold]
    pub(super) fn on_rejected(&mut self, connection: &mut InitiatorConnection, header: &[u8]) {
        let Ok((bhs, _)) = Bhs::read_from_prefix(header) else { return };
        if self.terms.level > 0
            && bhs.opcode() == IscsiOpcode::SCSI_COMMAND
            && let Some(key) = self.find(connection, bhs.initiator_task_tag.get())
        {
            self.send_again(connection, key);
        }
    }

    /// A connection is gone, or could not be had: whether the session goes on.
    pub(super) fn lose(
        &mut self,
        connection: &mut InitiatorConnection,
        others_are_open: bool,
        now: Instant,
    ) -> bool {
        if !self.may_send() {
            return false;
        }
        self.forget_aborts(connection);
        if connection.is_connected() {
            // A session that is ending does not wait for a connection: another session replays.
            let has_use = self.is_used() && (others_are_open || !self.queue.is_empty());
            connection.recovery.losses = connection.recovery.losses.saturating_add(1);
            let is_possible = self.terms.level == 2 && has_use && !self.terms.retain.is_zero();
            if !is_possible || connection.recovery.losses > MAX_LOSSES || self.is_beyond_recovery {
                return false;
            }
            let (wait, retain) = match self.announced_loss.take() {
                Some(loss) if loss.cid == connection.cid => (loss.wait, loss.retain),
                _ => (self.terms.wait, self.terms.retain),
            };
            let at = now.checked_add(wait).unwrap_or(now);
            connection.recovery.by = at.checked_add(retain);
            connection.want(at);
            return true;
        }
        match connection.recovery.by {
            Some(by) if now >= by || !self.is_used() || matches!(connection.phase, ConnectionPhase::Over) => {
                false
            }
            Some(_) => {
                connection.want(now.checked_add(PAUSE).unwrap_or(now));
                true
            }
            // One connection less.
            None => {
                connection.phase = ConnectionPhase::Over;
                connection.sender.clear();
                true
            }
        }
    }

    /// A connection has logged in, for the first time or in the place of another one.
    pub(super) fn join(&mut self, connection: &mut InitiatorConnection, established: &InitiatorLoginResult) {
        let InitiatorLoginResult { parameters, exp_cmd_sn, max_cmd_sn, exp_stat_sn, .. } = established;
        connection.open(parameters, *exp_stat_sn, self.now());
        self.on_numbers(*exp_cmd_sn, *max_cmd_sn);
        if connection.recovery.by.take().is_none() {
            return;
        }
        let cid = connection.cid;
        let mut keys: Vec<(u32, SlotKey)> = Vec::new();
        for key in self.queue.keys_of(|progress| progress.cid == cid) {
            let Some((progress, _)) = self.queue.transport(key) else { continue };
            keys.push((progress.cmd_sn.wrapping_sub(*exp_cmd_sn), key));
        }
        // What the target does not have, in the order of its numbers; the numbers of the others lie
        // before.
        keys.sort_unstable_by_key(|(ahead, _)| *ahead);
        for (_, key) in keys.iter().filter(|(ahead, _)| *ahead < SERIAL_HALF) {
            self.send_again(connection, *key);
        }
        let has = keys.iter().filter(|(ahead, _)| *ahead >= SERIAL_HALF).map(|(_, key)| *key);
        connection.phase = ConnectionPhase::Moving(has.collect());
        self.move_next(connection);
    }

    /// Asks for the next task to be moved here.
    fn move_next(&mut self, connection: &mut InitiatorConnection) {
        let ConnectionPhase::Moving(tasks) = &mut connection.phase else { return };
        let Some(&key) = tasks.front() else {
            connection.phase = ConnectionPhase::Open;
            return;
        };
        let Some((progress, transfer)) = self.queue.transport(key) else { return };
        progress.asked_from = None;
        progress.held = None;
        progress.is_moved = true;
        let data_sn = if matches!(transfer, DataTransfer::In(_)) { progress.data_sn } else { 0 };
        let ref_cmd_sn = progress.cmd_sn;
        let request = TaskManagementRequest {
            initiator_task_tag: (key.short() | MOVE_TAG).into(),
            referenced_task_tag: key.short().into(),
            ref_cmd_sn: ref_cmd_sn.into(),
            exp_data_sn: data_sn.into(),
            ..self.numbers(connection).task_management(Function::TASK_REASSIGN, self.lun)
        };
        connection.sender.push(transmute_ref!(&request), &[]);
    }

    /// The target has moved a task, or not.
    pub(super) fn on_moved(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TaskManagementResponse,
    ) -> Result<(), ProtocolError> {
        let tag = response.initiator_task_tag.get();
        let ConnectionPhase::Moving(tasks) = &mut connection.phase else {
            return Err(error("answered a task management request that was not sent", "RFC 7143 §11.6"));
        };
        if tasks.front().is_none_or(|key| key.short() | MOVE_TAG != tag) {
            return Err(error("answered another task management request than was sent", "RFC 7143 §11.6"));
        }
        if FunctionResponse(response.response) != FunctionResponse::FUNCTION_COMPLETE {
            // It is no fault of the target's, but a session that lacks a task cannot go on.
            self.is_beyond_recovery = true;
            return Err(error(
                "does not move a task to the connection that took another one's place",
                "RFC 7143 §7.2.2",
            ));
        }
        tasks.pop_front();
        self.move_next(connection);
        Ok(())
    }
}

fn send_snack(
    connection: &mut InitiatorConnection,
    kind: SnackType,
    lun: [u8; 8],
    task_tag: u32,
    transfer_tag: u32,
    (first, count): (u32, u32),
) {
    let snack = SnackRequest {
        opcode: IscsiOpcode::SNACK_REQUEST.0,
        snack_type: FLAG_FINAL | kind.0,
        lun,
        initiator_task_tag: task_tag.into(),
        target_transfer_tag: transfer_tag.into(),
        exp_stat_sn: connection.statuses.expected().into(),
        beg_run: first.into(),
        run_length: count.into(),
        ..FromZeros::new_zeroed()
    };
    connection.sender.push(transmute_ref!(&snack), &[]);
}

const TOO_FAR: ProtocolError = ProtocolError {
    what: "skipped more statuses than can be asked for again",
    reference: "RFC 7143 §4.2.2.2",
};

/// Connections that may be lost one after the other without a command that completes.
const MAX_LOSSES: u32 = 3;
/// Between two attempts to connect again.
const PAUSE: Duration = Duration::from_millis(100);
