//! Full feature phase: processes PDUs and delivers requests in the order of CmdSN (RFC 7143 §4.2,
//! §11).
//!
//! `receive` parses headers and data segments from the stream or from iSER messages and passes each
//! header to this module. Commands are executed in `command`; NOP-Out, text and logout requests
//! here. Requests ahead of ExpCmdSN wait in `early`; the connection that received them delivers
//! them once the gap is filled. `connection_table` describes how a connection ends.

use super::connection::{ConnectionAddresses, TargetConnection};
use super::datamover::TargetDatamover;
use super::early::{NextRequest, WholePdu};
use super::local::LocalSessions;
use super::receive::{AwaitedIscsiPdu, DataSegment, SegmentPurpose};
use super::sequence::CmdSnCheck;
use super::shared::{ConnectionEvent, SharedSession};
use crate::driver::audit_event::AuditEvent;
use crate::driver::session::ProtocolError;
use crate::exports::VolumeId;
use crate::iscsi::login::operational::OperationalKey;
use crate::iscsi::login::target::TargetLoginResult;
use crate::iscsi::node::IscsiNode;
use crate::iscsi::pdu::IscsiHeader;
use crate::iscsi::sender::Sender;
use crate::rdma::target_mover::TargetMover;
use crate::scsi::task_set::TaskRouter;
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool, Seg, Waker};
use blockmux_wire::iscsi::scsi::{FLAG_READ, FunctionResponse, ScsiCommand};
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{Bhs, IscsiOpcode, RESERVED_TAG};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// A connection in full feature phase and the session state that it shares with other connections.
pub(super) struct FullFeatureConnection {
    pub(super) connection: TargetConnection,
    pub(super) shared: Rc<RefCell<SharedSession>>,
}

/// Mutable access to a connection and its session, for the duration of one call from the driver.
pub(super) struct ConnectionTurn<'a> {
    pub(super) session: &'a mut SharedSession,
    pub(super) connection: &'a mut TargetConnection,
}

impl Drop for FullFeatureConnection {
    /// Removes the connection from its session, even if the driver stopped early.
    fn drop(&mut self) {
        self.turn(|turn| {
            turn.end();
            turn.abandon();
        });
    }
}

/// Resources that a connection keeps when it enters full feature phase.
pub(super) struct ConnectionResources {
    pub(super) node: Arc<IscsiNode>,
    pub(super) addresses: ConnectionAddresses,
    pub(super) local: Rc<LocalSessions>,
    pub(super) pool: Pool,
    /// Wakes the driver of this connection.
    pub(super) waker: Waker,
    pub(super) sender: Sender,
}

impl FullFeatureConnection {
    /// Creates a session with this connection as its leading connection.
    pub(super) fn lead(
        with: ConnectionResources,
        mut established: TargetLoginResult,
        now: Instant,
    ) -> FullFeatureConnection {
        let session = SharedSession::new(with.node.clone(), &mut established);
        let tsih = session.registration.as_ref().map(|registration| registration.tsih);
        let shared = Rc::new(RefCell::new(session));
        if let Some(tsih) = tsih {
            with.local.add(&with.node, tsih, &shared);
        }
        FullFeatureConnection::join(with, &shared, established, now)
    }

    /// Adds a connection to a session. The caller has checked [`SharedSession::admit`].
    pub(super) fn join(
        with: ConnectionResources,
        shared: &Rc<RefCell<SharedSession>>,
        mut established: TargetLoginResult,
        now: Instant,
    ) -> FullFeatureConnection {
        let key = shared.borrow_mut().add_connection(&mut established, &with.waker);
        let connection =
            TargetConnection::new(key, &established, with.addresses, with.pool, with.sender, now);
        FullFeatureConnection { connection, shared: shared.clone() }
    }

    #[inline]
    pub(super) fn sender(&mut self) -> &mut Sender {
        &mut self.connection.replies.sender
    }

    /// Sets the current time; called at the start of each driver call.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        self.connection.now = now;
    }

    /// The initiator closed its side of the stream. A logout should come first, but killed
    /// initiators send none. At a PDU boundary no response is lost.
    pub(super) fn on_end(&mut self) -> Result<(), ProtocolError> {
        let was_between = matches!(self.connection.awaiting, AwaitedIscsiPdu::Head(_));
        if !self.connection.is_over && self.shared.borrow().is_replaced() {
            let reason = "another login of this initiator took the session's place";
            self.connection.events.push(AuditEvent::Logout { reason });
        }
        self.turn(|turn| turn.lose_connection());
        match was_between {
            true => Ok(()),
            false => Err(ProtocolError {
                what: "closed the connection inside a PDU's data segment",
                reference: "RFC 7143 §11.2",
            }),
        }
    }

    /// Whether work remains after the connection failed.
    pub(super) fn lingers(&self) -> bool {
        self.connection.is_failed && !self.connection.is_over
    }

    /// Sets the current time, and changes the connection and its session.
    #[inline]
    pub(super) fn turn_at<T>(&mut self, now: Instant, act: impl FnOnce(&mut ConnectionTurn<'_>) -> T) -> T {
        self.set_now(now);
        self.turn(act)
    }

    #[inline]
    pub(super) fn turn<T>(&mut self, act: impl FnOnce(&mut ConnectionTurn<'_>) -> T) -> T {
        let session = &mut *self.shared.borrow_mut();
        let mut turn = ConnectionTurn { session, connection: &mut self.connection };
        let result = act(&mut turn);
        if turn.connection.is_over {
            turn.leave();
        }
        result
    }

    /// Switches the connection to RDMA data transfer.
    pub(super) fn set_mover(&mut self, mover: TargetDatamover) {
        self.connection.replies.mover = Some(mover);
    }

    /// Whether ended or aborted tasks wait for RDMA Reads of the initiator's memory.
    pub(super) fn waits_for_reads(&self) -> bool {
        let connection = &self.connection;
        connection.is_closed()
            || connection.logout.has_begun()
            || self.shared.borrow().tasks.has_aborted_without_io(connection.key)
    }

    #[inline]
    pub(super) fn transfers(&mut self) -> Option<&mut TargetMover> {
        self.connection.replies.mover.as_mut().map(|datamover| &mut datamover.transfers)
    }
}

impl ConnectionTurn<'_> {
    /// Consumes complete PDUs from `at` on; returns the offset of the first unread byte.
    #[inline]
    pub(super) fn on_bytes(&mut self, input: &Chunk, mut at: usize) -> Result<usize, ProtocolError> {
        self.connection.keep_alive.has_received = true;
        self.connection.retry.reset(self.connection.now);
        while !self.connection.is_closed()
            && let Some(taken) = self.step(input, at)?
        {
            at = at.saturating_add(taken);
            if !self.session.early.is_empty() {
                self.deliver_early();
            }
        }
        Ok(at)
    }

    pub(super) fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if let AwaitedIscsiPdu::Memory(segment) = self.connection.awaiting
            && self.connection.queue.is_idle()
            && self.connection.data_out_memory > 0
            && !self.take_memory()
            && (self.connection.retry.is_longest() || self.waits_for_itself(segment))
        {
            // Memory of this connection is reserved for data that arrives after this segment, so
            // waiting could last forever.
            self.refuse_busy(segment);
        }
        self.connection.retry.on_try(now);
        self.resume();
        self.resume_paused();
        if self.connection.is_failed {
            self.linger(now);
            return Ok(());
        }
        self.check_logout_deadline(now);
        if self.connection.level > 0 && now >= self.connection.next_check {
            self.connection.next_check = now.checked_add(CHECK_INTERVAL).unwrap_or(now);
            self.recover_stalled();
        }
        if now < self.connection.keep_alive.next_tick {
            return Ok(());
        }
        self.connection.keep_alive.next_tick = now.checked_add(PING_INTERVAL).unwrap_or(now);
        if std::mem::take(&mut self.connection.keep_alive.has_received) {
            self.connection.keep_alive.is_ping_pending = false;
        } else if std::mem::replace(&mut self.connection.keep_alive.is_ping_pending, true) {
            return Err(ProtocolError {
                what: "did not answer a ping within a minute",
                reference: "RFC 7143 §11.19, NOP-In",
            });
        } else {
            self.connection.replies.nop_in_ping(self.session.window, PING_TAG);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn on_io(&mut self, done: Completion) {
        self.connection.retry.reset(self.connection.now);
        self.on_volume_io(done);
        self.resume();
    }

    #[inline]
    pub(super) fn begin(
        &mut self,
        volume: VolumeId,
        io: &Io,
        is_late: bool,
    ) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.begin_io(volume, io, is_late);
        if matches!(admitted, Err(NotAdmitted::Denied(_))) {
            self.resume();
        }
        admitted
    }

    /// Continues tasks that wait for memory or for other tasks: a completion may have freed both.
    #[inline]
    fn resume(&mut self) {
        if self.connection.queue.is_waiting() {
            self.resume_waiting();
        }
        if !self.connection.memory_waiters.is_empty() {
            self.resume_memory_waiters();
        }
        if matches!(self.connection.awaiting, AwaitedIscsiPdu::Memory(_)) {
            self.take_memory();
        }
        if self.connection.is_delivery_blocked {
            self.deliver_early();
        }
    }

    /// Rejects a PDU.
    #[cold]
    pub(super) fn reject(&mut self, reason: RejectReason, bhs: &Bhs) {
        self.connection.replies.reject(self.session.window, reason, bhs);
    }

    /// Sends a task management function response.
    pub(super) fn respond(&mut self, itt: u32, response: FunctionResponse) {
        self.connection.replies.management(self.session.window, itt, response);
    }

    /// Processes a header; returns what its data segment is for.
    #[inline]
    pub(super) fn on_head(
        &mut self,
        head: &IscsiHeader,
        ahs: &[u8],
    ) -> Result<SegmentPurpose, ProtocolError> {
        let (bhs, opcode) = (&head.bhs, head.bhs.opcode());
        // CmdSN and ExpStatSN have the same offsets in all request PDUs; only some have a CmdSN.
        let command: &ScsiCommand = transmute_ref!(bhs);
        if self.connection.level > 0 {
            self.connection.replies.acknowledge(command.exp_stat_sn.get());
        }
        match opcode {
            IscsiOpcode::DATA_OUT => return Ok(self.on_data_out_head(bhs)),
            IscsiOpcode::SCSI_COMMAND
            | IscsiOpcode::NOP_OUT
            | IscsiOpcode::TASK_MANAGEMENT_REQUEST
            | IscsiOpcode::TEXT_REQUEST
            | IscsiOpcode::LOGOUT_REQUEST => {}
            IscsiOpcode::SNACK_REQUEST if self.connection.level > 0 => {
                self.on_snack(bhs);
                return Ok(SegmentPurpose::Discard);
            }
            _ => {
                let reason = match opcode {
                    IscsiOpcode::SNACK_REQUEST => RejectReason::SNACK_REJECT,
                    IscsiOpcode::LOGIN_REQUEST => RejectReason::PROTOCOL_ERROR,
                    _ => RejectReason::COMMAND_NOT_SUPPORTED,
                };
                self.reject(reason, bhs);
                return Ok(SegmentPurpose::Discard);
            }
        }
        match self.session.window.admission(command.cmd_sn.get(), bhs.is_immediate()) {
            CmdSnCheck::Ignored => return Ok(SegmentPurpose::Discard),
            CmdSnCheck::Early if !self.may_fill_gaps() => {
                return Err(ProtocolError {
                    what: "left a gap in CmdSN on the session's only connection",
                    reference: "RFC 7143 §4.2.2.1",
                });
            }
            CmdSnCheck::Now if !self.is_checked_whole(head.data_len) => {}
            CmdSnCheck::Early | CmdSnCheck::Now => {
                self.connection.gathering.0 = SmallVec::from_slice(ahs);
                return Ok(SegmentPurpose::WholePdu);
            }
        }
        if !bhs.is_immediate() {
            self.session.window.advance();
        }
        if opcode == IscsiOpcode::SCSI_COMMAND {
            return Ok(self.on_command(command, bhs, ahs));
        }
        Ok(SegmentPurpose::TextOrNop)
    }

    /// Processes a Data-Out header. Data of a command that waits in `early` is held with it.
    #[inline]
    pub(super) fn on_data_out_head(&mut self, bhs: &Bhs) -> SegmentPurpose {
        let (key, itt) = (self.connection.key, bhs.initiator_task_tag.get());
        if !self.session.early.is_empty() && self.session.early.has_command(key, itt) {
            self.connection.gathering.0 = SmallVec::new();
            return SegmentPurpose::WholePdu;
        }
        self.on_data_out(bhs)
    }

    /// Whether the requests missing before a CmdSN may still arrive. On a session's only connection
    /// without error recovery they never do.
    pub(super) fn may_fill_gaps(&self) -> bool {
        self.connection.level > 0 || self.connection.parameters.get(OperationalKey::MaxConnections) > 1
    }

    /// Whether a request executes only after its data digest was checked. From error recovery level
    /// 1 on, a request with a wrong data digest counts as not received and is sent again (RFC 7143
    /// §7.8).
    #[inline]
    pub(super) fn is_checked_whole(&self, data_len: usize) -> bool {
        self.connection.level > 0 && data_len > 0 && self.connection.replies.digests().data
    }

    /// Whether the initiator sends a damaged PDU again by itself. For Data-Out the target requests
    /// the data again. At level 0 nothing is sent again, and a request with a CmdSN must fail in
    /// its turn, or those after it would wait forever.
    #[inline]
    pub(super) fn is_retransmitted(&self, bhs: &Bhs) -> bool {
        self.connection.level > 0 && bhs.opcode() != IscsiOpcode::DATA_OUT
    }

    /// Processes a request whose header, AHS and data have all arrived.
    pub(super) fn on_whole_pdu(&mut self, bhs: Bhs, data: Option<Seg>, digest_ok: bool) {
        let ahs = std::mem::take(&mut self.connection.gathering.0);
        let (is_immediate, key) = (bhs.is_immediate(), self.connection.key);
        let buffers =
            self.connection.replies.mover.as_ref().map(|mover| mover.current_buffers).unwrap_or_default();
        let whole = WholePdu { bhs, ahs, data, digest_ok, buffers };
        if bhs.opcode() == IscsiOpcode::DATA_OUT {
            let whole = self.with_own_data(whole);
            return self.session.early.add_data(key, whole);
        }
        if !digest_ok && self.is_retransmitted(&bhs) {
            return;
        }
        let command: &ScsiCommand = transmute_ref!(&bhs);
        let cmd_sn = command.cmd_sn.get();
        match self.session.window.admission(cmd_sn, is_immediate) {
            CmdSnCheck::Ignored => {}
            CmdSnCheck::Early => {
                let whole = self.with_own_data(whole);
                self.session.early.hold(cmd_sn, key, whole);
            }
            CmdSnCheck::Now => {
                if !is_immediate {
                    self.session.window.advance();
                }
                self.execute(whole);
            }
        }
    }

    /// Delivers held requests while the next one belongs to this connection and there is room for
    /// its data-in. Never within a data segment: a held task management function could abort the
    /// task that receives it.
    pub(super) fn deliver_early(&mut self) {
        if !matches!(self.connection.awaiting, AwaitedIscsiPdu::Head(_)) {
            return;
        }
        self.connection.is_delivery_blocked = false;
        while !self.connection.is_closed()
            && let Some(next) = self.session.early.next(self.session.window.exp_cmd_sn())
        {
            match next {
                NextRequest::Held(owner, _) if owner != self.connection.key => {
                    return self.session.wake(owner);
                }
                NextRequest::Held(_, bhs) if !self.connection.has_room(data_in_of(&bhs)) => {
                    self.connection.is_delivery_blocked = true;
                    return;
                }
                NextRequest::Canceled | NextRequest::Held(..) => {}
            }
            let taken = self.session.early.take(self.session.window.exp_cmd_sn());
            self.session.window.advance();
            if let Some((request, data)) = taken {
                self.execute(request);
                data.into_iter().for_each(|data| self.execute(data));
            }
        }
    }

    /// Executes a request or Data-Out that is complete in memory.
    fn execute(&mut self, whole: WholePdu) {
        let WholePdu { bhs, ahs, data, digest_ok, buffers } = whole;
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.set_current(buffers);
        }
        let purpose = match bhs.opcode() {
            IscsiOpcode::SCSI_COMMAND => self.on_command(transmute_ref!(&bhs), &bhs, &ahs),
            IscsiOpcode::DATA_OUT => self.on_data_out(&bhs),
            _ if !digest_ok => return self.reject(RejectReason::DATA_DIGEST_ERROR, &bhs),
            _ => return self.on_text_or_nop(&bhs, &data.map(|data| data.to_vec()).unwrap_or_default()),
        };
        let len = bhs.data_segment_length.get() as usize;
        self.conclude(DataSegment { bhs, len, purpose }, data, digest_ok);
    }

    /// Copies borrowed data to memory of its own, because the receive buffer is reused.
    fn with_own_data(&self, mut whole: WholePdu) -> WholePdu {
        let is_message = self.connection.replies.mover.is_some();
        if let Some(borrowed) = whole.data.take_if(|data| is_message || !data.is_writable()) {
            let memory = self.connection.take_or_allocate(borrowed.len());
            borrowed.copy_to_seg(&memory);
            whole.data = Some(memory);
        }
        whole
    }

    fn on_text(&mut self, bhs: &Bhs, data: &[u8]) {
        let request: &TextRequest = transmute_ref!(bhs);
        let TargetConnection { negotiation, replies, addresses, .. } = &mut *self.connection;
        match negotiation.answer(request, data, self.session, addresses) {
            Ok(answer) => {
                replies.set_max_segment(negotiation.max_segment());
                replies.text(self.session.window, request.initiator_task_tag.get(), &answer);
            }
            Err(reason) => self.reject(reason, bhs),
        }
    }

    /// Processes a request other than a SCSI command, with all its data.
    pub(super) fn on_text_or_nop(&mut self, bhs: &Bhs, data: &[u8]) {
        match bhs.opcode() {
            IscsiOpcode::NOP_OUT => self.on_nop(bhs, data),
            IscsiOpcode::TEXT_REQUEST => self.on_text(bhs, data),
            IscsiOpcode::LOGOUT_REQUEST => self.on_logout(bhs),
            _ => self.on_task_management(bhs),
        }
    }

    /// Answers a ping. The reply to a ping of the target needs no action.
    fn on_nop(&mut self, bhs: &Bhs, data: &[u8]) {
        let itt = bhs.initiator_task_tag.get();
        if itt != RESERVED_TAG {
            self.connection.replies.nop_in_reply(self.session.window, itt, bhs.lun, data);
        } else if !bhs.is_immediate() {
            // RFC 7143 §11.18.1: a NOP-Out without a task tag must be immediate.
            self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
        }
    }

    fn on_logout(&mut self, bhs: &Bhs) {
        let request: &LogoutRequest = transmute_ref!(bhs);
        let itt = request.initiator_task_tag.get();
        let result = match LogoutReasonCode(request.reason & REASON_MASK) {
            LogoutReasonCode::CLOSE_SESSION => {
                self.end_session();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReasonCode::CLOSE_CONNECTION if request.cid.get() == self.connection.cid => {
                self.end();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReasonCode::CLOSE_CONNECTION => match self.session.key_of(request.cid.get()) {
                // The response is sent when that connection has closed.
                Some(key) => return self.session.request_end(key, Some((self.connection.key, itt))),
                None => LogoutResult::CID_NOT_FOUND,
            },
            LogoutReasonCode::REMOVE_CONNECTION_FOR_RECOVERY if self.connection.level < 2 => {
                LogoutResult::CONNECTION_RECOVERY_NOT_SUPPORTED
            }
            LogoutReasonCode::REMOVE_CONNECTION_FOR_RECOVERY => {
                match self.session.key_of(request.cid.get()) {
                    Some(key) if key == self.connection.key => {
                        // The logout response is the last PDU on this connection.
                        self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY);
                        return self.fail_connection(None);
                    }
                    Some(key) if self.session.has_failed(key) => LogoutResult::CLOSED_SUCCESSFULLY,
                    Some(key) => {
                        return self
                            .session
                            .post(key, ConnectionEvent::Fail(Some((self.connection.key, itt))));
                    }
                    None => LogoutResult::CID_NOT_FOUND,
                }
            }
            _ => {
                return self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
            }
        };
        self.log_out(itt, result);
    }

    /// Sends a logout response.
    pub(super) fn log_out(&mut self, itt: u32, result: LogoutResult) {
        let reason = match result {
            LogoutResult::CLOSED_SUCCESSFULLY => "the initiator logged out",
            _ => "the initiator's logout failed",
        };
        if self.connection.is_over {
            self.connection.events.push(AuditEvent::Logout { reason });
        }
        let session_times = self.session_times();
        self.connection.replies.logout(self.session.window, itt, result, session_times);
    }

    /// DefaultTime2Wait and DefaultTime2Retain, in seconds.
    pub(super) fn session_times(&self) -> (u16, u16) {
        let seconds = |key| u16::try_from(self.connection.parameters.get(key)).unwrap_or(u16::MAX);
        (seconds(OperationalKey::DefaultTime2Wait), seconds(OperationalKey::DefaultTime2Retain))
    }
}

/// Upper bound of the data-in that a request produces, in bytes.
#[inline]
pub(super) fn data_in_of(bhs: &Bhs) -> usize {
    let command: &ScsiCommand = transmute_ref!(bhs);
    if bhs.opcode() == IscsiOpcode::SNACK_REQUEST {
        // A SNACK may resend everything, so it waits until all other data has been sent.
        return PAYLOAD_IN_FLIGHT;
    }
    if bhs.opcode() == IscsiOpcode::SCSI_COMMAND && bhs.flags & FLAG_READ != 0 {
        return super::command::bounded(command.expected_data_transfer_length.get());
    }
    0
}

/// Maximum number of non-immediate commands in flight.
pub(super) const WINDOW: u32 = 256;

/// Maximum number of immediate commands in flight, in addition to [`WINDOW`].
pub(super) const MAX_IMMEDIATE: usize = 16;

/// Maximum data-in of one session, in bytes, including unsent data; also the maximum memory for
/// data-out. Larger than any single command.
pub(super) const PAYLOAD_IN_FLIGHT: usize = 64 << 20;

/// Interval between checks for missing data-out. The target requests data again if nothing arrived
/// during two intervals.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Time without traffic after which the target pings the initiator, and then the time limit for the
/// reply. A minute, because initiators in libraries answer only while the program calls them. An
/// initiator that lost its connection logs in again without waiting for this.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(60);

/// Target transfer tag of pings. One is enough because only one ping is outstanding at a time.
const PING_TAG: u32 = 0x8000_0000;
