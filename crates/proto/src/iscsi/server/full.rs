//! Full feature phase: the frame of PDUs, and what holds a connection's parts together (RFC 7143 §4.2, §11).
//!
//! ```text
//!              ┌─────────────────── no data segment ────────────────────┐
//!              ▼                                                        │
//!   ┌──────▶ Head ──── a segment that is here, or short ──▶ Segment ────┤
//!   │          │ │                                                      ├─▶ the command, the text, the ping ...
//!   │          │ └─ long data-out ─▶ Memory ──▶ Place ──┐               │
//!   │          │                 (pool empty)           ▼               │
//!   │          └─ nobody wants it ────────────────────▶ Tail ───────────┘
//!   │                                      (excess, padding, digest)
//!   └── the next header
//! ```
//! A header is acted upon as soon as it is whole: a command begins before its immediate data has come, so that the
//! device server has said by then how much of it is wanted and where. Data-out that is wholly in the receive buffer is
//! lent from there to the volume if it is all that the command wants; else the command's data is gathered in memory
//! from the pool, and what has not come yet is received straight into it.
//!
//! `receive` is about data segments, `command` carries commands out, `transfer` keeps their data-out, `talk` answers everything else but task
//! management, which is in `manage`.

use super::connection::Connection;
use super::local::LocalSessions;
use super::receive::{Awaiting, LENT_PAYLOAD, Purpose, Segment, is_intact};
use super::sequence::Admission;
use super::shared::Shared;
use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::iscsi::login::operational::Key;
use crate::iscsi::login::target::Established;
use crate::iscsi::node::Node;
use crate::iscsi::pdu::{self, Head, Parsed};
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::Membership;
use crate::scsi::task_set::TaskRouter;
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Completion, Crc32c, Io, Pool, Tag, Waker};
use blockmux_wire::iscsi::scsi::{FLAG_READ, FunctionResponse, ScsiCommand};
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, Opcode};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// One connection in full feature phase, and the session that it shares with others.
pub(super) struct FullFeature {
    pub(super) connection: Connection,
    pub(super) shared: Rc<RefCell<Shared>>,
}

/// A connection's turn with its session: everything that happens, happens in one.
pub(super) struct Turn<'a> {
    pub(super) session: &'a mut Shared,
    pub(super) connection: &'a mut Connection,
}

impl Drop for FullFeature {
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
    pub(super) node: Arc<Node>,
    pub(super) group_tag: u16,
    /// The address that the initiator has connected to.
    pub(super) local_ip: String,
    pub(super) local: Rc<LocalSessions>,
    pub(super) pool: Pool,
    /// Has the connection's driver take a turn.
    pub(super) waker: Waker,
    pub(super) sender: Sender,
}

impl FullFeature {
    /// The leading connection of a session that begins.
    pub(super) fn lead(with: Surroundings, mut established: Established, now: Instant) -> FullFeature {
        let session = Shared::new(with.node.clone(), with.group_tag, &mut established);
        let tsih = session.membership.as_ref().map(Membership::tsih);
        let shared = Rc::new(RefCell::new(session));
        if let Some(tsih) = tsih {
            with.local.add(&with.node, tsih, &shared);
        }
        FullFeature::join(with, &shared, established, now)
    }

    /// A connection of a session; [`Shared::admit`] has just said that it may be added.
    pub(super) fn join(
        with: Surroundings,
        shared: &Rc<RefCell<Shared>>,
        mut established: Established,
        now: Instant,
    ) -> FullFeature {
        let key = shared.borrow_mut().add_link(&mut established, &with.waker);
        let connection = Connection::new(key, &established, with.local_ip, with.pool, with.sender, now);
        FullFeature { connection, shared: shared.clone() }
    }

    /// The oldest data-out that memory waits for.
    pub(super) fn owed(&self) -> Option<u64> {
        self.shared.borrow().tasks.owed(self.connection.key)
    }

    #[inline]
    pub(super) fn sender(&mut self) -> &mut Sender {
        &mut self.connection.replies.sender
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

    /// The initiator has closed its side. It should have logged out, but killed ones do not; between PDUs nothing that
    /// was answered is lost.
    pub(super) fn on_end(&mut self) -> Result<(), ProtocolError> {
        let was_between = matches!(self.connection.awaiting, Awaiting::Head(_));
        if !self.connection.is_over && self.shared.borrow().is_unwanted() {
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

    /// The target stops: see `parting`.
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
    pub(super) fn turn<T>(&mut self, act: impl FnOnce(&mut Turn<'_>) -> T) -> T {
        let session = &mut *self.shared.borrow_mut();
        let mut turn = Turn { session, connection: &mut self.connection };
        let result = act(&mut turn);
        if turn.connection.is_over {
            turn.leave();
        }
        result
    }
}

impl Turn<'_> {
    /// Takes every whole message from `at` on; returns where it stopped.
    #[inline]
    pub(super) fn on_bytes(&mut self, input: &Chunk, mut at: usize) -> Result<usize, ProtocolError> {
        self.connection.keep_alive.heard = true;
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
        self.connection.retry_at = now.checked_add(RETRY).unwrap_or(now);
        if let Awaiting::Memory(segment) = self.connection.awaiting
            && self.connection.queue.is_idle()
            && !self.take_memory()
        {
            // Nothing that this session does will free memory: the command may be tried again later.
            self.refuse_busy(segment);
        }
        self.resume();
        self.resume_paused(now);
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
        if matches!(self.connection.awaiting, Awaiting::Memory(_)) {
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

    /// One header, or a part of a segment; `None` if more bytes, room or memory are needed.
    #[inline]
    fn step(&mut self, input: &Chunk, at: usize) -> Result<Option<usize>, ProtocolError> {
        let unread = input.unread().get(at..).unwrap_or_default();
        match &mut self.connection.awaiting {
            Awaiting::Head(_) => self.step_head(input, at, unread),
            Awaiting::Segment(segment) => {
                let segment = *segment;
                let Some(whole) = unread.get(..self.connection.segment_len(&segment)) else {
                    return Ok(None);
                };
                self.connection.awaiting = Awaiting::Head(BHS_LEN);
                self.on_segment(segment, whole, input, at);
                Ok(Some(whole.len()))
            }
            Awaiting::Place { .. } => Ok(self.fill_place(unread)),
            Awaiting::Tail { .. } => Ok(self.step_tail(unread)),
            Awaiting::Memory(_) => Ok(None),
        }
    }

    /// A segment lies `whole` in the receive buffer, `at` there, with padding and digest.
    #[inline]
    fn on_segment(&mut self, segment: Segment, whole: &[u8], input: &Chunk, at: usize) {
        let is_good = !self.connection.replies.digests().data || is_intact(whole);
        if segment.purpose == Purpose::Talk && is_good {
            self.on_talk(&segment.bhs, whole.get(..segment.len).unwrap_or_default());
        } else {
            self.conclude(segment, Some(input.lend(at, segment.len)), is_good);
        }
    }

    #[inline]
    fn step_head(&mut self, input: &Chunk, at: usize, unread: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let head = match pdu::parse(unread, self.connection.replies.digests())? {
            Parsed::Needs(len) => {
                self.connection.awaiting = Awaiting::Head(len);
                return Ok(None);
            }
            Parsed::Head(head) => head,
        };
        let data_in = data_in_of(&head.bhs);
        if !self.connection.has_room(data_in) {
            (self.connection.waits_for, self.connection.awaiting) = (data_in, Awaiting::Head(head.len));
            return Ok(None);
        }
        self.connection.waits_for = 0;
        if let Awaiting::Head(need) = &mut self.connection.awaiting {
            *need = BHS_LEN;
        }
        if head.data_len > self.connection.parameters.get(Key::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above MaxRecvDataSegmentLength",
                reference: "RFC 7143 §13.12",
            });
        }
        let ahs = unread.get(BHS_LEN..BHS_LEN.saturating_add(head.bhs.ahs_len())).unwrap_or_default();
        let purpose = self.on_head(&head, ahs)?;
        let segment = Segment { bhs: head.bhs, len: head.data_len, purpose };
        let here = unread.len().saturating_sub(head.len);
        let whole = self.connection.segment_len(&segment);
        match purpose {
            Purpose::Talk if segment.len == 0 => self.on_talk(&head.bhs, &[]),
            _ if segment.len == 0 => self.conclude(segment, None, true),
            Purpose::Nothing => {
                self.connection.awaiting =
                    Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            Purpose::Talk if whole > here && segment.len > LENT_PAYLOAD => {
                self.reject(RejectReason::LONG_OPERATION_REJECT, &head.bhs);
                let segment = Segment { purpose: Purpose::Nothing, ..segment };
                self.connection.awaiting =
                    Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            Purpose::Data { .. } if whole > here && segment.len > LENT_PAYLOAD => {
                self.connection.awaiting = Awaiting::Memory(segment);
                self.take_memory();
            }
            Purpose::Whole if whole > here && segment.len > LENT_PAYLOAD => self.gather(segment),
            Purpose::Talk | Purpose::Data { .. } | Purpose::Whole => {
                let end = head.len.saturating_add(whole);
                if let Some(whole) = unread.get(head.len..end) {
                    self.on_segment(segment, whole, input, at.saturating_add(head.len));
                    return Ok(Some(end));
                }
                self.connection.awaiting = Awaiting::Segment(segment);
            }
        }
        Ok(Some(head.len))
    }

    /// Acts on a header; says whom its data is for.
    #[inline]
    pub(super) fn on_head(&mut self, head: &Head, ahs: &[u8]) -> Result<Purpose, ProtocolError> {
        let (bhs, opcode) = (&head.bhs, head.bhs.opcode());
        // CmdSN and ExpStatSN lie at the same places in all of them; only some have a CmdSN.
        let command: &ScsiCommand = transmute_ref!(bhs);
        if self.connection.level > 0 {
            self.connection.replies.acknowledge(command.exp_stat_sn.get());
        }
        match opcode {
            Opcode::DATA_OUT => return Ok(self.on_data_out_head(bhs)),
            Opcode::SCSI_COMMAND
            | Opcode::NOP_OUT
            | Opcode::TASK_MANAGEMENT_REQUEST
            | Opcode::TEXT_REQUEST
            | Opcode::LOGOUT_REQUEST => {}
            Opcode::SNACK_REQUEST if self.connection.level > 0 => {
                self.on_snack(bhs);
                return Ok(Purpose::Nothing);
            }
            _ => {
                let reason = match opcode {
                    Opcode::SNACK_REQUEST => RejectReason::SNACK_REJECT,
                    Opcode::LOGIN_REQUEST => RejectReason::PROTOCOL_ERROR,
                    _ => RejectReason::COMMAND_NOT_SUPPORTED,
                };
                self.reject(reason, bhs);
                return Ok(Purpose::Nothing);
            }
        }
        match self.session.window.admission(command.cmd_sn.get(), bhs.is_immediate()) {
            Admission::Ignored => return Ok(Purpose::Nothing),
            Admission::Early if !self.may_fill_gaps() => {
                return Err(ProtocolError {
                    what: "left a gap in CmdSN on the session's only connection",
                    reference: "RFC 7143 §4.2.2.1",
                });
            }
            Admission::Now if !self.is_checked_whole(head.data_len) => {}
            Admission::Early | Admission::Now => {
                self.connection.gathering.0 = SmallVec::from_slice(ahs);
                return Ok(Purpose::Whole);
            }
        }
        if !bhs.is_immediate() {
            self.session.window.advance();
        }
        if opcode == Opcode::SCSI_COMMAND {
            return Ok(self.on_command(command, bhs, ahs));
        }
        Ok(Purpose::Talk)
    }
}

/// The data-in that a command may bring, in bytes.
#[inline]
pub(super) fn data_in_of(bhs: &Bhs) -> usize {
    let command: &ScsiCommand = transmute_ref!(bhs);
    if bhs.opcode() == Opcode::SNACK_REQUEST {
        // As much as there is: it waits until everything else was sent.
        return PAYLOAD_IN_FLIGHT;
    }
    if bhs.opcode() == Opcode::SCSI_COMMAND && bhs.flags & FLAG_READ != 0 {
        return super::command::bounded(command.expected_data_transfer_length.get());
    }
    0
}

/// Commands that an initiator may have under way without the I bit.
pub(super) const WINDOW: u32 = 256;

/// Commands with the I bit under way beside them.
pub(super) const MAX_IMMEDIATE: usize = 16;

/// The most data-in of one session, in bytes, what waits to be sent included; and the same of data-out for which
/// memory was taken. Above any one command's.
pub(super) const PAYLOAD_IN_FLIGHT: usize = 64 << 20;

/// How often an empty pool and waiting tasks are asked again, apart from each completion.
const RETRY: Duration = Duration::from_millis(1);

/// How often to look for data that was asked for and does not come: it is asked for again when nothing has come from one
/// look to the next but one.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How long an initiator may be silent before it is pinged, and then until it is given up. Programs with an initiator
/// in them that answers only when it is called sleep for up to a minute; and an initiator that has lost its connection
/// does not wait for this, but logs in again.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The transfer tag of a ping. One is enough: there is only one at a time.
const PING_TAG: u32 = 0x8000_0000;
