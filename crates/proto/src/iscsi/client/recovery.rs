//! Error recovery below the session: retransmission of damaged PDUs and replacement of lost
//! connections (RFC 7143 §7).
//!
//! Level 1: a data segment with a wrong digest is dropped. A SNACK requests Data-In again from the
//! first missing PDU; later Data-In of the command is dropped until it arrives. R2Ts and statuses
//! are requested in the same way. For damaged data-out the target sends another R2T, or rejects the
//! command, which is then sent again with its CmdSN.
//!
//! Level 2: a lost connection is replaced by one that logs in with its CID. The target's ExpCmdSN
//! shows which commands it has received: their tasks are reassigned one after the other, the others
//! are sent again. If that fails, the session ends, and the I/O is replayed in a new one.

use super::connection::{ConnectionPhase, InitiatorConnection};
use super::full::{FullFeatureSession, SERIAL_HALF};
use super::immediate::REASSIGN_TAG;
use super::receive::error;
use super::statuses::StatusArrival;
use crate::driver::session::ProtocolError;
use crate::iscsi::login::initiator::InitiatorLoginResult;
use crate::scsi::initiator::DataTransfer;
use crate::slots::SlotKey;
use blockmux_wire::iscsi::scsi::{
    DataIn, FLAG_STATUS, Function, FunctionResponse, SnackRequest, SnackType, TaskManagementFunctionRequest,
    TaskManagementFunctionResponse,
};
use blockmux_wire::iscsi::session::NopIn;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, transmute_ref};

impl FullFeatureSession {
    /// Records a StatSN; returns whether its PDU is to be processed.
    #[inline]
    pub(super) fn on_status(
        &mut self,
        connection: &mut InitiatorConnection,
        stat_sn: u32,
    ) -> Result<bool, ProtocolError> {
        if self.negotiated.level == 0 {
            connection.statuses.acknowledge(stat_sn);
            return Ok(true);
        }
        match connection.statuses.on_status(stat_sn) {
            StatusArrival::New => Ok(true),
            StatusArrival::Gap { first, count } => {
                self.request_status(connection, first, count);
                Ok(true)
            }
            StatusArrival::Duplicate => Ok(false),
            StatusArrival::TooManyMissing => Err(TOO_MANY_MISSING),
        }
    }

    /// Processes the StatSN of a PDU without a status: all smaller StatSNs must have arrived.
    pub(super) fn on_next_status(
        &mut self,
        connection: &mut InitiatorConnection,
        stat_sn: u32,
    ) -> Result<(), ProtocolError> {
        let count = stat_sn.wrapping_sub(connection.statuses.next());
        if self.negotiated.level == 0 || count == 0 || count >= SERIAL_HALF {
            return Ok(());
        }
        let first = connection.statuses.next();
        if !connection.statuses.miss(stat_sn.wrapping_sub(1)) {
            return Err(TOO_MANY_MISSING);
        }
        self.request_status(connection, first, count);
        Ok(())
    }

    /// Handles a PDU with a wrong data digest. At level 0 it ends the session.
    #[cold]
    pub(super) fn on_damaged(
        &mut self,
        connection: &mut InitiatorConnection,
        bhs: &Bhs,
    ) -> Result<(), ProtocolError> {
        if self.negotiated.level == 0 {
            return Err(error("sent a data segment with a wrong digest", "RFC 7143 §7.8"));
        }
        let common: &NopIn = transmute_ref!(bhs);
        let stat_sn = common.stat_sn.get();
        match bhs.opcode() {
            IscsiOpcode::DATA_IN => {
                let data_in: &DataIn = transmute_ref!(bhs);
                if data_in.flags & FLAG_STATUS != 0 && !connection.statuses.miss(stat_sn) {
                    return Err(TOO_MANY_MISSING);
                }
                if let Some(key) = self.find(connection, data_in.initiator_task_tag.get()) {
                    self.request_data(connection, key, data_in.data_sn.get(), true);
                }
            }
            // A ping of the target has no status and need not be answered.
            IscsiOpcode::NOP_IN if common.initiator_task_tag.get() == RESERVED_TAG => {}
            _ => {
                if !connection.statuses.miss(stat_sn) {
                    return Err(TOO_MANY_MISSING);
                }
                self.request_status(connection, stat_sn, 1);
            }
        }
        Ok(())
    }

    /// Requests missing Data-In or R2T PDUs before `number`, once. With `is_damaged`, PDU `number`
    /// itself was damaged and is requested again. Duplicates are ignored.
    pub(super) fn request_data(
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
        if is_old || (progress.requested_from == Some(expected) && !(is_damaged && number == expected)) {
            return;
        }
        progress.requested_from = Some(expected);
        // A run length of 0 requests everything from there on.
        send_snack(connection, SnackType::DATA_R2T, lun, key.short(), RESERVED_TAG, (expected, 0));
    }

    /// Drops a Data-In out of order. If an earlier one is missing, all from that one on are
    /// requested again, and the status with the last of them.
    #[cold]
    pub(super) fn on_unexpected_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        data_in: &DataIn,
    ) -> Result<Option<SlotKey>, ProtocolError> {
        let number = data_in.data_sn.get();
        let expected = self.queue.transport(key).map_or(number, |(progress, _)| progress.data_sn);
        let is_early = number.wrapping_sub(expected) < SERIAL_HALF;
        if is_early && data_in.flags & FLAG_STATUS != 0 && !connection.statuses.miss(data_in.stat_sn.get()) {
            return Err(TOO_MANY_MISSING);
        }
        self.request_data(connection, key, number, false);
        Ok(None)
    }

    /// Whether all Data-In PDUs of a command have arrived, given the count in its response. If not,
    /// the response is requested again later.
    pub(super) fn has_all_data(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        stat_sn: u32,
        count: u32,
    ) -> bool {
        let Some((progress, DataTransfer::In(_))) = self.queue.transport(key) else { return true };
        let missing = count.wrapping_sub(progress.data_sn);
        if self.negotiated.level == 0 || missing == 0 || missing >= SERIAL_HALF {
            return true;
        }
        progress.early_response = Some((count, stat_sn));
        // The StatSN was just recorded, so there is room to mark it as missing.
        connection.statuses.miss(stat_sn);
        self.request_data(connection, key, count.wrapping_sub(1), false);
        false
    }

    /// After a Data-In: requests the response that arrived too early, if this was the last Data-In.
    #[inline]
    pub(super) fn after_data(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some((progress, _)) = self.queue.transport(key) else { return };
        if let Some((count, stat_sn)) = progress.early_response
            && count == progress.data_sn
        {
            progress.early_response = None;
            self.request_status(connection, stat_sn, 1);
        }
    }

    /// Answers a Data-In that requests an acknowledgement (RFC 7143 §11.7.2).
    pub(super) fn acknowledge_data(
        &mut self,
        connection: &mut InitiatorConnection,
        data_in: &DataIn,
        next: u32,
    ) {
        let tag = data_in.target_transfer_tag.get();
        send_snack(connection, SnackType::DATA_ACK, data_in.lun, RESERVED_TAG, tag, (next, 0));
    }

    fn request_status(&mut self, connection: &mut InitiatorConnection, first: u32, count: u32) {
        send_snack(connection, SnackType::STATUS, [0; 8], RESERVED_TAG, RESERVED_TAG, (first, count));
    }

    /// Requests missing StatSNs a second time; an error if they were requested twice.
    pub(super) fn request_missing_again(
        &mut self,
        connection: &mut InitiatorConnection,
    ) -> Result<(), ProtocolError> {
        let overdue = connection
            .statuses
            .on_tick()
            .map_err(|()| error("did not retransmit within 10 seconds", "RFC 7143 §7.9, Sequence Errors"))?;
        let overdue = overdue.to_vec();
        for stat_sn in overdue {
            self.request_status(connection, stat_sn, 1);
        }
        Ok(())
    }

    /// Sends a command again, with its CmdSN, whose immediate data was damaged.
    #[cold]
    pub(super) fn on_rejected(
        &mut self,
        connection: &mut InitiatorConnection,
        header: &[u8],
    ) -> Result<(), ProtocolError> {
        let Ok((bhs, _)) = Bhs::read_from_prefix(header) else { return Ok(()) };
        if self.negotiated.level > 0
            && bhs.opcode() == IscsiOpcode::SCSI_COMMAND
            && let Some(key) = self.find(connection, bhs.initiator_task_tag.get())
        {
            self.count_resend(key)?;
            self.resend_command(connection, key);
        }
        Ok(())
    }

    /// Counts what the target makes this side send again: it could ask for more than it reads.
    #[cold]
    pub(super) fn count_resend(&mut self, key: SlotKey) -> Result<(), ProtocolError> {
        let Some((progress, _)) = self.queue.transport(key) else { return Ok(()) };
        progress.resends = progress.resends.saturating_add(1);
        if progress.resends <= MAX_RESENDS { Ok(()) } else { Err(TOO_MANY_RESENDS) }
    }

    /// Handles a lost or failed connection; returns whether the session continues.
    pub(super) fn on_connection_lost(
        &mut self,
        connection: &mut InitiatorConnection,
        others_are_open: bool,
        now: Instant,
    ) -> bool {
        if !self.may_send() {
            return false;
        }
        self.aborts.forget(connection.cid.into());
        if connection.is_connected() {
            // While the session stops, no connection is replaced: another session replays the I/O.
            let has_use = self.may_add_connections() && (others_are_open || !self.queue.is_empty());
            connection.recovery.losses = connection.recovery.losses.saturating_add(1);
            let is_possible = self.negotiated.level == 2 && has_use && !self.negotiated.retain.is_zero();
            if !is_possible || connection.recovery.losses > MAX_LOSSES || self.is_beyond_recovery {
                return false;
            }
            let (wait, retain) = match self.announced_loss.take() {
                Some(loss) if loss.cid == connection.cid => (loss.wait, loss.retain),
                _ => (self.negotiated.wait, self.negotiated.retain),
            };
            let at = now.checked_add(wait).unwrap_or(now);
            connection.recovery.by = at.checked_add(retain);
            connection.schedule_replacement(at);
            return true;
        }
        match connection.recovery.by {
            Some(by)
                if now >= by
                    || !self.may_add_connections()
                    || matches!(connection.phase, ConnectionPhase::Over) =>
            {
                false
            }
            Some(_) => {
                connection.schedule_replacement(now.checked_add(RECONNECT_DELAY).unwrap_or(now));
                true
            }
            // The session continues with one connection less.
            None => {
                connection.phase = ConnectionPhase::Over;
                connection.sender.clear();
                true
            }
        }
    }

    /// Adds a connection that has logged in, as a new one or as a replacement.
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
        // Commands that the target has not received, in the order of CmdSN; the others have smaller
        // CmdSNs.
        keys.sort_unstable_by_key(|(ahead, _)| *ahead);
        for (_, key) in keys.iter().filter(|(ahead, _)| *ahead < SERIAL_HALF) {
            self.resend_command(connection, *key);
        }
        let has = keys.iter().filter(|(ahead, _)| *ahead >= SERIAL_HALF).map(|(_, key)| *key);
        connection.phase = ConnectionPhase::Reassigning(has.collect());
        self.reassign_next(connection);
    }

    /// Requests the reassignment of the next task.
    fn reassign_next(&mut self, connection: &mut InitiatorConnection) {
        let ConnectionPhase::Reassigning(tasks) = &mut connection.phase else { return };
        let Some(&key) = tasks.front() else {
            connection.phase = ConnectionPhase::Open;
            return;
        };
        let Some((progress, transfer)) = self.queue.transport(key) else { return };
        progress.requested_from = None;
        progress.early_response = None;
        progress.is_reassigned = true;
        let data_sn = if matches!(transfer, DataTransfer::In(_)) { progress.data_sn } else { 0 };
        let ref_cmd_sn = progress.cmd_sn;
        let request = TaskManagementFunctionRequest {
            initiator_task_tag: (key.short() | REASSIGN_TAG).into(),
            referenced_task_tag: key.short().into(),
            ref_cmd_sn: ref_cmd_sn.into(),
            exp_data_sn: data_sn.into(),
            ..self.numbers(connection).task_management(Function::TASK_REASSIGN, self.lun)
        };
        connection.sender.push(transmute_ref!(&request), &[]);
    }

    /// Processes a TASK REASSIGN response.
    pub(super) fn on_reassigned(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TaskManagementFunctionResponse,
    ) -> Result<(), ProtocolError> {
        let tag = response.initiator_task_tag.get();
        let ConnectionPhase::Reassigning(tasks) = &mut connection.phase else {
            return Err(error("answered a task management request that was not sent", "RFC 7143 §11.6"));
        };
        if tasks.front().is_none_or(|key| key.short() | REASSIGN_TAG != tag) {
            return Err(error("answered another task management request than was sent", "RFC 7143 §11.6"));
        }
        if FunctionResponse(response.response) != FunctionResponse::FUNCTION_COMPLETE {
            // Not a violation, but a session cannot continue without one of its tasks.
            self.is_beyond_recovery = true;
            return Err(error("refused to reassign a task to the replacement connection", "RFC 7143 §7.2.2"));
        }
        tasks.pop_front();
        self.reassign_next(connection);
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
    connection.count_reply();
    connection.sender.push(transmute_ref!(&snack), &[]);
}

const TOO_MANY_MISSING: ProtocolError = ProtocolError {
    what: "skipped more statuses than can be requested again",
    reference: "RFC 7143 §4.2.2.2",
};

const TOO_MANY_RESENDS: ProtocolError = ProtocolError {
    what: "rejected or requested the data of a command again more than 16 times",
    reference: "this client's limit",
};

/// How often a command or its data is sent again at a target's request.
const MAX_RESENDS: u32 = 16;
/// Maximum number of consecutive connection losses without a completed command.
const MAX_LOSSES: u32 = 3;
/// Delay between attempts to reconnect.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
