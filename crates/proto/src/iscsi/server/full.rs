//! Full feature phase: a connection's turn with its session, and requests in the order of CmdSN
//! (RFC 7143 §4.2, §11).
//!
//! `receive` takes headers and data segments from the stream or from messages, and brings each
//! header here. What is next in order is done: commands in `command`, pings, text and logout here.
//! What came before its turn waits in `early`, and is delivered by the connection that brought it
//! when the gap is filled. `links` is how a connection ends.

use super::connection::Connection;
use super::datamover::TargetDatamover;
use super::early::{NextRequest, Whole};
use super::local::LocalSessions;
use super::receive::{AwaitedIscsiPdu, DataSegment, SegmentPurpose};
use super::sequence::CmdSnCheck;
use super::shared::{ConnectionEvent, SharedSession};
use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::iscsi::login::operational::OperationalKey;
use crate::iscsi::login::target::TargetLoginResult;
use crate::iscsi::node::IscsiNode;
use crate::iscsi::pdu::IscsiHeader;
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::Membership;
use crate::scsi::task_set::TaskRouter;
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Completion, Io, Pool, Seg, Tag, Waker};
use blockmux_wire::iscsi::scsi::{FLAG_READ, FunctionResponse, ScsiCommand};
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{Bhs, IscsiOpcode, RESERVED_TAG};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// One connection in full feature phase, and the session that it shares with others.
pub(super) struct FullFeatureConnection {
    pub(super) connection: Connection,
    pub(super) shared: Rc<RefCell<SharedSession>>,
}

/// A connection's turn with its session: everything that happens, happens in one.
pub(super) struct ConnectionTurn<'a> {
    pub(super) session: &'a mut SharedSession,
    pub(super) connection: &'a mut Connection,
}

impl Drop for FullFeatureConnection {
    /// A driver that has ended early leaves nothing in the session.
    fn drop(&mut self) {
        self.turn(|turn| {
            turn.end();
            turn.abandon();
        });
    }
}

/// What a connection brings along into full feature phase.
pub(super) struct Surroundings {
    pub(super) node: Arc<IscsiNode>,
    pub(super) group_tag: u16,
    /// The address that the initiator has connected to.
    pub(super) local_ip: String,
    pub(super) local: Rc<LocalSessions>,
    pub(super) pool: Pool,
    /// Has the connection's driver take a turn.
    pub(super) waker: Waker,
    pub(super) sender: Sender,
}

impl FullFeatureConnection {
    /// The leading connection of a session that begins.
    pub(super) fn lead(
        with: Surroundings,
        mut established: TargetLoginResult,
        now: Instant,
    ) -> FullFeatureConnection {
        let session = SharedSession::new(with.node.clone(), with.group_tag, &mut established);
        let tsih = session.membership.as_ref().map(Membership::tsih);
        let shared = Rc::new(RefCell::new(session));
        if let Some(tsih) = tsih {
            with.local.add(&with.node, tsih, &shared);
        }
        FullFeatureConnection::join(with, &shared, established, now)
    }

    /// A connection of a session; [`Shared::admit`] has just said that it may be added.
    pub(super) fn join(
        with: Surroundings,
        shared: &Rc<RefCell<SharedSession>>,
        mut established: TargetLoginResult,
        now: Instant,
    ) -> FullFeatureConnection {
        let key = shared.borrow_mut().add_link(&mut established, &with.waker);
        let connection = Connection::new(key, &established, with.local_ip, with.pool, with.sender, now);
        FullFeatureConnection { connection, shared: shared.clone() }
    }

    /// The oldest data-out that memory waits for.
    pub(super) fn owed(&self) -> Option<u64> {
        self.shared.borrow().tasks.owed(self.connection.key)
    }

    #[inline]
    pub(super) fn sender(&mut self) -> &mut Sender {
        &mut self.connection.replies.sender
    }

    /// Something comes in.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        self.connection.now = now;
    }

    pub(super) fn demand(&self) -> Demand {
        self.connection.demand()
    }

    /// Takes every whole message from `at` on; returns where it stopped.
    #[inline]
    pub(super) fn on_bytes(&mut self, input: &Chunk, at: usize) -> Result<usize, ProtocolError> {
        self.turn(|turn| turn.on_bytes(input, at))
    }

    /// The memory of [`Demand::Place`] is full.
    pub(super) fn on_placed(&mut self) {
        self.turn(|turn| {
            turn.on_placed();
            turn.deliver_early();
        });
    }

    /// The initiator has closed its side. It should have logged out, but killed ones do not;
    /// between PDUs nothing that was answered is lost.
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
                what: "left in the middle of a PDU's data segment",
                reference: "RFC 7143 §11.2",
            }),
        }
    }

    /// The target stops: see `links`.
    pub(super) fn on_stop(&mut self) {
        self.turn(|turn| turn.on_stop());
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.connection.poll_timeout()
    }

    pub(super) fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.turn(|turn| turn.on_timeout(now))
    }

    #[inline]
    pub(super) fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.connection.queue.poll_io()
    }

    #[inline]
    pub(super) fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.connection.queue.poll_cancel()
    }

    #[inline]
    pub(super) fn on_io(&mut self, done: Completion) {
        self.turn(|turn| turn.on_io(done));
    }

    #[inline]
    pub(super) fn poll_event(&mut self) -> Option<AuditEvent> {
        self.connection.events.pop()
    }

    /// Whether there is more to do although the connection is over.
    pub(super) fn lingers(&self) -> bool {
        self.connection.is_failed && !self.connection.is_over
    }

    /// A turn of the driver begins.
    #[inline]
    pub(super) fn on_turn(&mut self) {
        self.turn(|turn| turn.on_turn());
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

    /// The connection is a queue pair.
    pub(super) fn set_mover(&mut self, mover: TargetDatamover) {
        self.connection.replies.mover = Some(mover);
    }

    /// Whether tasks that are over, or are to be soon, wait for data to be read from the
    /// initiator's memory.
    pub(super) fn wants_reads_over(&self) -> bool {
        let connection = &self.connection;
        connection.is_closed()
            || connection.logout.has_begun()
            || self.shared.borrow().tasks.has_aborted_without_io(connection.key)
    }

    #[inline]
    pub(super) fn mover(&mut self) -> Option<&mut TargetDatamover> {
        self.connection.replies.mover.as_mut()
    }
}

impl ConnectionTurn<'_> {
    /// Takes every whole message from `at` on; returns where it stopped.
    #[inline]
    pub(super) fn on_bytes(&mut self, input: &Chunk, mut at: usize) -> Result<usize, ProtocolError> {
        self.connection.keep_alive.heard = true;
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
            && self.connection.granted > 0
            && !self.take_memory()
            && (self.connection.retry.is_longest() || self.waits_for_itself(segment))
        {
            // Memory of this connection is held for data that comes behind this: it must not wait
            // without an end.
            self.refuse_busy(segment);
        }
        self.connection.retry.on_try(now);
        self.resume();
        self.resume_paused();
        if self.connection.is_failed {
            self.linger(now);
            return Ok(());
        }
        self.part(now);
        if self.connection.level > 0 && now >= self.connection.look_at {
            self.connection.look_at = now.checked_add(LOOK_INTERVAL).unwrap_or(now);
            self.recover_stalled();
        }
        if now < self.connection.keep_alive.next_tick {
            return Ok(());
        }
        self.connection.keep_alive.next_tick = now.checked_add(PING_INTERVAL).unwrap_or(now);
        if std::mem::take(&mut self.connection.keep_alive.heard) {
            self.connection.keep_alive.pinged = false;
        } else if std::mem::replace(&mut self.connection.keep_alive.pinged, true) {
            return Err(ProtocolError {
                what: "did not answer a ping within a minute",
                reference: "RFC 7143 §11.19, NOP-In",
            });
        } else {
            self.connection.replies.ping(self.session.window, PING_TAG);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn on_io(&mut self, done: Completion) {
        self.connection.retry.reset(self.connection.now);
        self.on_volume_io(done);
        self.resume();
    }

    /// Goes on with what waits for memory or for other tasks: a completion may have freed both.
    #[inline]
    fn resume(&mut self) {
        if self.connection.queue.is_waiting() {
            self.resume_waiting();
        }
        if !self.connection.grants.is_empty() {
            self.resume_grants();
        }
        if matches!(self.connection.awaiting, AwaitedIscsiPdu::Memory(_)) {
            self.take_memory();
        }
        if self.connection.is_held_up {
            self.deliver_early();
        }
    }

    /// Refuses a PDU.
    #[cold]
    pub(super) fn reject(&mut self, reason: RejectReason, bhs: &Bhs) {
        self.connection.replies.reject(self.session.window, reason, bhs);
    }

    /// Answers a task management function.
    pub(super) fn respond(&mut self, itt: u32, response: FunctionResponse) {
        self.connection.replies.management(self.session.window, itt, response);
    }

    /// Acts on a header; says whom its data is for.
    #[inline]
    pub(super) fn on_head(
        &mut self,
        head: &IscsiHeader,
        ahs: &[u8],
    ) -> Result<SegmentPurpose, ProtocolError> {
        let (bhs, opcode) = (&head.bhs, head.bhs.opcode());
        // CmdSN and ExpStatSN lie at the same places in all of them; only some have a CmdSN.
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
                return Ok(SegmentPurpose::Nothing);
            }
            _ => {
                let reason = match opcode {
                    IscsiOpcode::SNACK_REQUEST => RejectReason::SNACK_REJECT,
                    IscsiOpcode::LOGIN_REQUEST => RejectReason::PROTOCOL_ERROR,
                    _ => RejectReason::COMMAND_NOT_SUPPORTED,
                };
                self.reject(reason, bhs);
                return Ok(SegmentPurpose::Nothing);
            }
        }
        match self.session.window.admission(command.cmd_sn.get(), bhs.is_immediate()) {
            CmdSnCheck::Ignored => return Ok(SegmentPurpose::Nothing),
            CmdSnCheck::Early if !self.may_fill_gaps() => {
                return Err(ProtocolError {
                    what: "left a gap in CmdSN on the session's only connection",
                    reference: "RFC 7143 §4.2.2.1",
                });
            }
            CmdSnCheck::Now if !self.is_checked_whole(head.data_len) => {}
            CmdSnCheck::Early | CmdSnCheck::Now => {
                self.connection.gathering.0 = SmallVec::from_slice(ahs);
                return Ok(SegmentPurpose::Whole);
            }
        }
        if !bhs.is_immediate() {
            self.session.window.advance();
        }
        if opcode == IscsiOpcode::SCSI_COMMAND {
            return Ok(self.on_command(command, bhs, ahs));
        }
        Ok(SegmentPurpose::Talk)
    }

    /// Data of a command that waits for its turn waits with it.
    #[inline]
    pub(super) fn on_data_out_head(&mut self, bhs: &Bhs) -> SegmentPurpose {
        let (key, itt) = (self.connection.key, bhs.initiator_task_tag.get());
        if !self.session.early.is_empty() && self.session.early.has_command(key, itt) {
            self.connection.gathering.0 = SmallVec::new();
            return SegmentPurpose::Whole;
        }
        self.on_data_out(bhs)
    }

    /// Whether what is missing before a command may come still. On the only connection, and without
    /// recovery, it never will.
    pub(super) fn may_fill_gaps(&self) -> bool {
        self.connection.level > 0 || self.connection.parameters.get(OperationalKey::MaxConnections) > 1
    }

    /// From error recovery level 1 on, a request whose data has a wrong digest is as if it had
    /// never come, and is sent again (RFC 7143 §7.8): it is acted upon only when its data is here.
    #[inline]
    pub(super) fn is_checked_whole(&self, data_len: usize) -> bool {
        self.connection.level > 0 && data_len > 0 && self.connection.replies.digests().data
    }

    /// Whether a PDU whose data is damaged is sent again by itself. Data is asked for again; at
    /// level 0 nothing comes again, and what has a number must take its turn to fail, or those
    /// behind it would wait for ever.
    #[inline]
    pub(super) fn comes_again(&self, bhs: &Bhs) -> bool {
        self.connection.level > 0 && bhs.opcode() != IscsiOpcode::DATA_OUT
    }

    /// A request has come with all its data.
    pub(super) fn on_whole(&mut self, bhs: Bhs, data: Option<Seg>, is_good: bool) {
        let ahs = std::mem::take(&mut self.connection.gathering.0);
        let (is_immediate, key) = (bhs.is_immediate(), self.connection.key);
        let remotes =
            self.connection.replies.mover.as_ref().map(TargetDatamover::arriving).unwrap_or_default();
        let whole = Whole { bhs, ahs, data, is_good, remotes };
        if bhs.opcode() == IscsiOpcode::DATA_OUT {
            let whole = self.own(whole);
            return self.session.early.add_data(key, whole);
        }
        if !is_good && self.comes_again(&bhs) {
            return;
        }
        let command: &ScsiCommand = transmute_ref!(&bhs);
        let cmd_sn = command.cmd_sn.get();
        match self.session.window.admission(cmd_sn, is_immediate) {
            CmdSnCheck::Ignored => {}
            CmdSnCheck::Early => {
                let whole = self.own(whole);
                self.session.early.hold(cmd_sn, key, whole);
            }
            CmdSnCheck::Now => {
                if !is_immediate {
                    self.session.window.advance();
                }
                self.carry_out(whole);
            }
        }
    }

    /// Delivers requests that were held, as long as it is this connection's turn and there is room
    /// for their data-in. Not within a data segment, lest a function that was held aborts the task
    /// whose data comes.
    pub(super) fn deliver_early(&mut self) {
        if !matches!(self.connection.awaiting, AwaitedIscsiPdu::Head(_)) {
            return;
        }
        self.connection.is_held_up = false;
        while !self.connection.is_closed()
            && let Some(next) = self.session.early.next(self.session.window.exp_cmd_sn())
        {
            match next {
                NextRequest::Of(owner, _) if owner != self.connection.key => return self.session.call(owner),
                NextRequest::Of(_, bhs) if !self.connection.has_room(data_in_of(&bhs)) => {
                    self.connection.is_held_up = true;
                    return;
                }
                NextRequest::Nobody | NextRequest::Of(..) => {}
            }
            let taken = self.session.early.take(self.session.window.exp_cmd_sn());
            self.session.window.advance();
            if let Some((request, data)) = taken {
                self.carry_out(request);
                data.into_iter().for_each(|data| self.carry_out(data));
            }
        }
    }

    /// Does what a request or data asks for that is here whole.
    fn carry_out(&mut self, whole: Whole) {
        let Whole { bhs, ahs, data, is_good, remotes } = whole;
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.arrive(remotes);
        }
        let purpose = match bhs.opcode() {
            IscsiOpcode::SCSI_COMMAND => self.on_command(transmute_ref!(&bhs), &bhs, &ahs),
            IscsiOpcode::DATA_OUT => self.on_data_out(&bhs),
            _ if !is_good => return self.reject(RejectReason::DATA_DIGEST_ERROR, &bhs),
            _ => return self.on_text_or_nop(&bhs, &data.map(|data| data.to_vec()).unwrap_or_default()),
        };
        let len = bhs.data_segment_length.get() as usize;
        self.conclude(DataSegment { bhs, len, purpose }, data, is_good);
    }

    /// Copies the data to memory of its own: the receive buffer is for what comes next.
    fn own(&self, mut whole: Whole) -> Whole {
        let is_message = self.connection.replies.mover.is_some();
        if let Some(lent) = whole.data.take_if(|data| is_message || !data.is_writable()) {
            let memory = self.connection.take_or_make(lent.len());
            lent.copy_to_seg(&memory);
            whole.data = Some(memory);
        }
        whole
    }

    fn on_text(&mut self, bhs: &Bhs, data: &[u8]) {
        let request: &TextRequest = transmute_ref!(bhs);
        let Connection { negotiation, replies, local_ip, .. } = &mut *self.connection;
        match negotiation.answer(request, data, self.session, local_ip) {
            Ok(answer) => {
                replies.set_max_segment(negotiation.max_segment());
                replies.text(self.session.window, request.initiator_task_tag.get(), &answer);
            }
            Err(reason) => self.reject(reason, bhs),
        }
    }

    /// A request other than a command, with all its data.
    pub(super) fn on_text_or_nop(&mut self, bhs: &Bhs, data: &[u8]) {
        match bhs.opcode() {
            IscsiOpcode::NOP_OUT => self.on_nop(bhs, data),
            IscsiOpcode::TEXT_REQUEST => self.on_text(bhs, data),
            IscsiOpcode::LOGOUT_REQUEST => self.on_logout(bhs),
            _ => self.on_management(bhs),
        }
    }

    /// A ping, or the answer to one; that anything came is all that the latter says.
    fn on_nop(&mut self, bhs: &Bhs, data: &[u8]) {
        let itt = bhs.initiator_task_tag.get();
        if itt != RESERVED_TAG {
            self.connection.replies.pong(self.session.window, itt, bhs.lun, data);
        } else if !bhs.is_immediate() {
            // RFC 7143 §11.18.1: without a tag it must be immediate.
            self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
        }
    }

    fn on_logout(&mut self, bhs: &Bhs) {
        let request: &LogoutRequest = transmute_ref!(bhs);
        let itt = request.initiator_task_tag.get();
        let result = match LogoutReason(request.reason & REASON_MASK) {
            LogoutReason::CLOSE_SESSION => {
                self.end_session();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReason::CLOSE_CONNECTION if request.cid.get() == self.connection.cid => {
                self.end();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReason::CLOSE_CONNECTION => match self.session.key_of(request.cid.get()) {
                // It is answered when that connection is closed.
                Some(key) => return self.session.tell_to_end(key, Some((self.connection.key, itt))),
                None => LogoutResult::CID_NOT_FOUND,
            },
            LogoutReason::REMOVE_CONNECTION_FOR_RECOVERY if self.connection.level < 2 => {
                LogoutResult::CONNECTION_RECOVERY_NOT_SUPPORTED
            }
            LogoutReason::REMOVE_CONNECTION_FOR_RECOVERY => match self.session.key_of(request.cid.get()) {
                Some(key) if key == self.connection.key => {
                    // Its own answer is the last that is sent on it.
                    self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY);
                    return self.fail_connection(None);
                }
                Some(key) if self.session.has_failed(key) => LogoutResult::CLOSED_SUCCESSFULLY,
                Some(key) => {
                    return self.session.post(key, ConnectionEvent::Fail(Some((self.connection.key, itt))));
                }
                None => LogoutResult::CID_NOT_FOUND,
            },
            _ => {
                return self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
            }
        };
        self.log_out(itt, result);
    }

    /// Answers a logout request.
    pub(super) fn log_out(&mut self, itt: u32, result: LogoutResult) {
        let reason = match result {
            LogoutResult::CLOSED_SUCCESSFULLY => "the initiator logged out",
            _ => "the initiator's logout failed",
        };
        if self.connection.is_over {
            self.connection.events.push(AuditEvent::Logout { reason });
        }
        let times = self.times();
        self.connection.replies.logout(self.session.window, itt, result, times);
    }

    /// DefaultTime2Wait and DefaultTime2Retain, in seconds.
    pub(super) fn times(&self) -> (u16, u16) {
        let seconds = |key| u16::try_from(self.connection.parameters.get(key)).unwrap_or(u16::MAX);
        (seconds(OperationalKey::DefaultTime2Wait), seconds(OperationalKey::DefaultTime2Retain))
    }
}

/// The data-in that a command may bring, in bytes.
#[inline]
pub(super) fn data_in_of(bhs: &Bhs) -> usize {
    let command: &ScsiCommand = transmute_ref!(bhs);
    if bhs.opcode() == IscsiOpcode::SNACK_REQUEST {
        // As much as there is: it waits until everything else was sent.
        return PAYLOAD_IN_FLIGHT;
    }
    if bhs.opcode() == IscsiOpcode::SCSI_COMMAND && bhs.flags & FLAG_READ != 0 {
        return super::command::bounded(command.expected_data_transfer_length.get());
    }
    0
}

/// Commands that an initiator may have under way without the I bit.
pub(super) const WINDOW: u32 = 256;

/// Commands with the I bit under way beside them.
pub(super) const MAX_IMMEDIATE: usize = 16;

/// The most data-in of one session, in bytes, what waits to be sent included; and the same of
/// data-out for which memory was taken. Above any one command's.
pub(super) const PAYLOAD_IN_FLIGHT: usize = 64 << 20;

/// How often to look for data that was asked for and does not come: it is asked for again when
/// nothing has come from one look to the next but one.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How long an initiator may be silent before it is pinged, and then until it is given up. Programs
/// with an initiator in them that answers only when it is called sleep for up to a minute; and an
/// initiator that has lost its connection does not wait for this, but logs in again.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The transfer tag of a ping. One is enough: there is only one at a time.
const PING_TAG: u32 = 0x8000_0000;
