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

use super::receive::{Awaiting, LENT_PAYLOAD, Purpose, Segment, is_intact};
use super::replies::Replies;
use super::sequence::{Admission, CommandWindow};
use super::talk::Negotiation;
use super::tasks::{Pausing, TaskTable};
use crate::exports::VolumeId;
use crate::iscsi::digest::Crc;
use crate::iscsi::login::operational::{Key, Parameters};
use crate::iscsi::login::target::{Established, Session};
use crate::iscsi::name::Name;
use crate::iscsi::node::Node;
use crate::iscsi::pdu::{self, Head, Parsed};
use crate::iscsi::sessions::Membership;
use crate::outbox::Outbox;
use crate::scsi::{DeviceServer, Nexus, Response, Status};
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Completion, Io, Pool, SgList, Tag};
use blockmux_wire::iscsi::scsi::{FLAG_READ, ScsiCommand};
use blockmux_wire::iscsi::session::{AsyncEvent, RejectReason};
use blockmux_wire::iscsi::{BHS_LEN, Bhs, Opcode};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// One connection in full feature phase, which is also the whole session.
pub(super) struct FullFeature {
    pub(super) node: Arc<Node>,
    pub(super) session: Session,
    pub(super) initiator: Name,
    pub(super) cid: u16,
    pub(super) parameters: Parameters,
    /// `None` in a discovery session.
    pub(super) server: Option<DeviceServer>,
    pub(super) window: CommandWindow,
    pub(super) replies: Replies,
    pub(super) tasks: TaskTable,
    pub(super) negotiation: Negotiation,
    pub(super) management: super::manage::Functions,
    /// In flight, but not yet taken by the driver.
    pub(super) queue: VecDeque<(VolumeId, Io)>,
    /// In flight for nobody, and the driver does not know that yet.
    pub(super) cancels: VecDeque<(VolumeId, Tag)>,
    /// Writes that wait for memory before they can ask for data, oldest first.
    pub(super) grants: VecDeque<usize>,
    /// Tasks that wait for other tasks.
    pub(super) waiting: Vec<usize>,
    /// Tasks that leave the volume to others for a while.
    pub(super) pausing: Vec<Pausing>,
    /// Data-in that tasks may bring, in bytes.
    pub(super) reading: usize,
    /// Memory that data-out was given, in bytes.
    pub(super) granted: usize,
    /// I/O that has not completed.
    pub(super) in_flight: usize,
    pub(super) pool: Pool,
    pub(super) awaiting: Awaiting,
    /// Data-in of the command that waits for room, in bytes; 0 if none does.
    waits_for: usize,
    /// Nothing is accepted any more; what is in flight ends.
    pub(super) stopping: bool,
    /// Logged out, or reset.
    pub(super) is_over: bool,
    keep_alive: KeepAlive,
    /// When to ask the pool and waiting tasks again.
    retry_at: Instant,
    /// The address that the initiator has connected to.
    pub(super) local_ip: String,
    /// The last to go: by then nothing of this session reaches a volume any more.
    _membership: Option<Membership>,
}

/// Pings an initiator that has been silent (RFC 7143 §11.19).
struct KeepAlive {
    next_tick: Instant,
    /// Something has come since the last tick.
    heard: bool,
    /// A ping is unanswered.
    pinged: bool,
}

impl FullFeature {
    pub(super) fn new(
        node: Arc<Node>,
        (group_tag, local_ip): (u16, String),
        established: Established,
        pool: Pool,
        now: Instant,
    ) -> FullFeature {
        let Established {
            session,
            initiator,
            isid,
            cid,
            parameters,
            operational,
            stat_sn,
            cmd_sn,
            membership,
        } = established;
        let server = match &session {
            Session::Discovery => None,
            Session::Normal { target, access } => {
                let nexus = Nexus::iscsi(initiator.as_str(), isid, target.port(access, group_tag));
                Some(DeviceServer::new(access.target.clone(), nexus))
            }
        };
        FullFeature {
            node,
            session,
            initiator,
            cid,
            server,
            window: CommandWindow::new(cmd_sn, WINDOW),
            replies: Replies::new(&parameters, stat_sn, pool.clone()),
            parameters,
            tasks: TaskTable::default(),
            negotiation: Negotiation::new(operational),
            management: super::manage::Functions::default(),
            queue: VecDeque::new(),
            cancels: VecDeque::new(),
            grants: VecDeque::new(),
            waiting: Vec::new(),
            pausing: Vec::new(),
            reading: 0,
            granted: 0,
            in_flight: 0,
            pool,
            awaiting: Awaiting::Head(BHS_LEN),
            waits_for: 0,
            stopping: false,
            is_over: false,
            keep_alive: KeepAlive {
                next_tick: now.checked_add(PING_INTERVAL).unwrap_or(now),
                heard: false,
                pinged: false,
            },
            retry_at: now,
            local_ip,
            _membership: membership,
        }
    }

    pub(super) fn demand(&self, outbox: &Outbox) -> Demand {
        if self.is_over || (self.stopping && self.tasks.is_empty()) {
            return Demand::Close;
        }
        match &self.awaiting {
            Awaiting::Head(len) if self.has_room(self.waits_for, outbox) => Demand::Bytes(*len),
            Awaiting::Head(_) | Awaiting::Memory(_) => Demand::Nothing,
            Awaiting::Segment(segment) => Demand::Bytes(self.segment_len(segment)),
            Awaiting::Place { buffer_is_empty: false, .. } => Demand::Bytes(1),
            Awaiting::Place { place, filled, .. } => {
                Demand::Place(place.slice(*filled, place.len().saturating_sub(*filled)).into())
            }
            Awaiting::Tail { excess, segment, .. } => match excess {
                0 => Demand::Bytes(self.replies.digests().tail_len(segment.len)),
                _ => Demand::Bytes(1),
            },
        }
    }

    /// Takes every whole message from `at` on; returns where it stopped.
    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        input: &Chunk,
        mut at: usize,
        outbox: &mut Outbox,
    ) -> Result<usize, ProtocolError> {
        self.keep_alive.heard = true;
        while !self.is_over
            && let Some(taken) = self.step(input, at, outbox)?
        {
            at = at.saturating_add(taken);
        }
        Ok(at)
    }

    /// The initiator has closed its side. It should have logged out, but killed ones do not; between PDUs nothing that
    /// was answered is lost.
    pub(super) fn on_end(&mut self) -> Result<(), ProtocolError> {
        self.end();
        match self.awaiting {
            Awaiting::Head(_) => Ok(()),
            _ => Err(ProtocolError {
                what: "left in the middle of a PDU's data segment",
                reference: "RFC 7143 §11.2",
            }),
        }
    }

    /// Announces that the session will be dropped (RFC 7143 §11.9, AsyncEvent 3), and lets what is in flight end.
    pub(super) fn on_stop(&mut self, outbox: &mut Outbox) {
        if !std::mem::replace(&mut self.stopping, true) && !self.is_over {
            let (wait, retain) = self.times();
            self.replies.event(outbox, self.window, AsyncEvent::SESSION_DROP, [0, wait, retain]);
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let retries = matches!(self.awaiting, Awaiting::Memory(_))
            || !self.grants.is_empty()
            || !self.waiting.is_empty();
        let paused = self.pausing.iter().map(|pausing| pausing.until.unwrap_or(self.retry_at)).min();
        let retry = if retries { Some(self.retry_at) } else { None };
        [paused, retry].into_iter().flatten().chain([self.keep_alive.next_tick]).min()
    }

    pub(super) fn on_timeout(&mut self, now: Instant, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        self.retry_at = now.checked_add(RETRY).unwrap_or(now);
        if let Awaiting::Memory(segment) = self.awaiting
            && self.in_flight == 0
            && !self.take_memory()
        {
            // Nothing that this session does will free memory: the command may be tried again later.
            self.refuse_busy(segment);
        }
        self.resume(outbox);
        self.resume_pausing(now, outbox);
        if now < self.keep_alive.next_tick {
            return Ok(());
        }
        self.keep_alive.next_tick = now.checked_add(PING_INTERVAL).unwrap_or(now);
        if std::mem::take(&mut self.keep_alive.heard) {
            self.keep_alive.pinged = false;
        } else if std::mem::replace(&mut self.keep_alive.pinged, true) {
            return Err(ProtocolError {
                what: "did not answer a ping within a minute",
                reference: "RFC 7143 §11.19, NOP-In",
            });
        } else {
            self.replies.ping(outbox, self.window, PING_TAG);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.queue.pop_front()
    }

    #[inline]
    pub(super) fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    #[inline]
    pub(super) fn on_io(&mut self, done: Completion, outbox: &mut Outbox) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.on_completion(done, outbox);
        self.resume(outbox);
    }

    /// Goes on with what waits for memory or for other tasks: a completion may have freed both.
    #[inline]
    fn resume(&mut self, outbox: &mut Outbox) {
        if !self.waiting.is_empty() {
            self.resume_waiting(outbox);
        }
        if !self.grants.is_empty() {
            self.resume_grants(outbox);
        }
        if matches!(self.awaiting, Awaiting::Memory(_)) {
            self.take_memory();
        }
    }

    /// Whether a command with that much data-in may be taken now. What waits here waits for reads to be answered and
    /// sent, which needs nothing more from the initiator than that it reads.
    #[inline]
    fn has_room(&self, data_in: usize, outbox: &Outbox) -> bool {
        let payload = self.reading.saturating_add(outbox.len());
        self.replies.has_room(outbox)
            && (payload == 0 || payload.saturating_add(data_in) <= PAYLOAD_IN_FLIGHT)
    }

    /// Of a data segment with padding and digest, in bytes.
    #[inline]
    fn segment_len(&self, segment: &Segment) -> usize {
        segment.len.saturating_add(self.replies.digests().tail_len(segment.len))
    }

    /// One header, or a part of a segment; `None` if more bytes, room or memory are needed.
    #[inline]
    fn step(
        &mut self,
        input: &Chunk,
        at: usize,
        outbox: &mut Outbox,
    ) -> Result<Option<usize>, ProtocolError> {
        let unread = input.unread().get(at..).unwrap_or_default();
        match &mut self.awaiting {
            Awaiting::Head(_) => self.step_head(unread, outbox),
            Awaiting::Segment(segment) => {
                let segment = *segment;
                let len = self.segment_len(&segment);
                let Some(whole) = unread.get(..len) else { return Ok(None) };
                self.awaiting = Awaiting::Head(BHS_LEN);
                let is_good = !self.replies.digests().data || is_intact(whole);
                if segment.purpose == Purpose::Talk && is_good {
                    self.on_talk(&segment.bhs, whole.get(..segment.len).unwrap_or_default(), outbox);
                } else {
                    self.conclude(segment, Some(input.lend(at, segment.len)), is_good, outbox);
                }
                Ok(Some(len))
            }
            Awaiting::Place { .. } => Ok(self.fill_place(unread, outbox)),
            Awaiting::Tail { .. } => Ok(self.step_tail(unread, outbox)),
            Awaiting::Memory(_) => Ok(None),
        }
    }

    #[inline]
    fn step_head(&mut self, unread: &[u8], outbox: &mut Outbox) -> Result<Option<usize>, ProtocolError> {
        let head = match pdu::parse(unread, self.replies.digests())? {
            Parsed::Needs(len) => {
                self.awaiting = Awaiting::Head(len);
                return Ok(None);
            }
            Parsed::Head(head) => head,
        };
        let data_in = data_in_of(&head.bhs);
        if !self.has_room(data_in, outbox) {
            (self.waits_for, self.awaiting) = (data_in, Awaiting::Head(head.len));
            return Ok(None);
        }
        (self.waits_for, self.awaiting) = (0, Awaiting::Head(BHS_LEN));
        if head.data_len > self.parameters.get(Key::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above MaxRecvDataSegmentLength",
                reference: "RFC 7143 §13.12, §7.6",
            });
        }
        let ahs = unread.get(BHS_LEN..BHS_LEN.saturating_add(head.bhs.ahs_len())).unwrap_or_default();
        let purpose = self.on_head(&head, ahs, outbox)?;
        let segment = Segment { bhs: head.bhs, len: head.data_len, purpose };
        let here = unread.len().saturating_sub(head.len);
        let whole = self.segment_len(&segment);
        match purpose {
            Purpose::Talk if segment.len == 0 => self.on_talk(&head.bhs, &[], outbox),
            _ if segment.len == 0 => self.conclude(segment, None, true, outbox),
            Purpose::Nothing => {
                self.awaiting = Awaiting::Tail { segment, crc: Crc::default(), excess: segment.len };
            }
            Purpose::Talk if whole > here && segment.len > LENT_PAYLOAD => {
                self.replies.reject(outbox, self.window, RejectReason::LONG_OPERATION_REJECT, &head.bhs);
                let segment = Segment { purpose: Purpose::Nothing, ..segment };
                self.awaiting = Awaiting::Tail { segment, crc: Crc::default(), excess: segment.len };
            }
            Purpose::Data { .. } if whole > here && segment.len > LENT_PAYLOAD => {
                self.awaiting = Awaiting::Memory(segment);
                self.take_memory();
            }
            Purpose::Talk | Purpose::Data { .. } => self.awaiting = Awaiting::Segment(segment),
        }
        Ok(Some(head.len))
    }

    /// Acts on a header; says whom its data is for.
    #[inline]
    fn on_head(&mut self, head: &Head, ahs: &[u8], outbox: &mut Outbox) -> Result<Purpose, ProtocolError> {
        let opcode = head.bhs.opcode();
        match opcode {
            Opcode::DATA_OUT => return Ok(self.on_data_out(&head.bhs, outbox)),
            Opcode::SCSI_COMMAND
            | Opcode::NOP_OUT
            | Opcode::TASK_MANAGEMENT_REQUEST
            | Opcode::TEXT_REQUEST
            | Opcode::LOGOUT_REQUEST => {}
            _ => {
                let reason = match opcode {
                    Opcode::SNACK_REQUEST => RejectReason::SNACK_REJECT,
                    Opcode::LOGIN_REQUEST => RejectReason::PROTOCOL_ERROR,
                    _ => RejectReason::COMMAND_NOT_SUPPORTED,
                };
                self.replies.reject(outbox, self.window, reason, &head.bhs);
                return Ok(Purpose::Nothing);
            }
        }
        // CmdSN lies at the same place in all of them.
        let command: &ScsiCommand = transmute_ref!(&head.bhs);
        match self.window.admit(command.cmd_sn.get(), head.bhs.is_immediate()) {
            Admission::Ignored => return Ok(Purpose::Nothing),
            // On the only connection, and without recovery, what is missing will never come.
            Admission::Early => {
                return Err(ProtocolError {
                    what: "left a gap in CmdSN on the session's only connection",
                    reference: "RFC 7143 §4.2.2.1",
                });
            }
            Admission::Now => {}
        }
        if opcode == Opcode::SCSI_COMMAND {
            return Ok(self.on_command(command, &head.bhs, ahs, outbox));
        }
        Ok(Purpose::Talk)
    }
}

/// A bare status.
pub(super) fn status(status: Status) -> Response {
    Response { status, sense: None, data_in: SgList::default(), transfer_len: 0 }
}

/// The data-in that a command may bring, in bytes.
#[inline]
fn data_in_of(bhs: &Bhs) -> usize {
    let command: &ScsiCommand = transmute_ref!(bhs);
    if bhs.opcode() == Opcode::SCSI_COMMAND && bhs.flags & FLAG_READ != 0 {
        return super::command::bounded(command.expected_data_transfer_length.get());
    }
    0
}

/// Commands that an initiator may have under way without the I bit.
pub(super) const WINDOW: u32 = 256;

/// Commands with the I bit under way beside them.
pub(super) const MAX_IMMEDIATE: usize = 16;

/// The most data-in of one session, in bytes, what waits in its outbox included; and the same of data-out for which
/// memory was taken. Above any one command's.
pub(super) const PAYLOAD_IN_FLIGHT: usize = 64 << 20;

/// How often an empty pool and waiting tasks are asked again, apart from each completion.
const RETRY: Duration = Duration::from_millis(1);

/// How long an initiator may be silent before it is pinged, and then until it is given up. Programs with an initiator
/// in them that answers only when it is called sleep for up to a minute; and an initiator that has lost its connection
/// does not wait for this, but logs in again.
const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The transfer tag of a ping. One is enough: there is only one at a time.
const PING_TAG: u32 = 0x8000_0000;
