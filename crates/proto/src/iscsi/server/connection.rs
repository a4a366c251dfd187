//! One connection of a session: its frame, its numbers of answers, and what it owes to the driver.

use super::connection_table::LogoutProgress;
use super::datamover::TargetDatamover;
use super::full::{PAYLOAD_IN_FLIGHT, PING_INTERVAL};
use super::negotiation::Negotiation;
use super::receive::{AwaitedIscsiPdu, DataSegment};
use super::replies::ResponseSender;
use crate::backoff::Backoff;
use crate::event::AuditEvents;
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::login::target::TargetLoginResult;
use crate::iscsi::sender::Sender;
use crate::scsi::task_set::TaskQueue;
use crate::session::Demand;
use blockmux_volume::{Memory, Pool, SHORT_PAYLOAD, Seg};
use blockmux_wire::iscsi::BHS_LEN;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Instant;

/// A connection in full feature phase.
pub(super) struct Connection {
    /// Tells it from the session's other connections, those of the past included.
    pub(super) key: u32,
    pub(super) cid: u16,
    pub(super) parameters: OperationalParameters,
    /// ErrorRecoveryLevel.
    pub(super) level: u32,
    pub(super) replies: ResponseSender,
    pub(super) negotiation: Negotiation,
    pub(super) events: AuditEvents,
    /// What its tasks want of volumes.
    pub(super) queue: TaskQueue,
    /// Writes that wait for memory before they can ask for data, oldest first.
    pub(super) grants: VecDeque<usize>,
    /// Tasks that are this connection's.
    pub(super) live: usize,
    /// Data-in that tasks may bring, in bytes.
    pub(super) reading: usize,
    /// Memory that data-out was given, in bytes.
    pub(super) granted: usize,
    /// How often a round of data-out was given memory.
    pub(super) given: u64,
    pub(super) pool: Pool,
    pub(super) awaiting: AwaitedIscsiPdu,
    /// Additional header segments of a PDU that is taken whole, and its data if that was placed.
    pub(super) gathering: (SmallVec<[u8; 16]>, Option<Seg>),
    /// When to look for data that does not come.
    pub(super) look_at: Instant,
    /// A request that was held is next, but there was no room for its data-in.
    pub(super) is_held_up: bool,
    /// Data-in of the command that waits for room, in bytes; 0 if none does.
    pub(super) waits_for: usize,
    /// The target stops: nothing is accepted any more, and what is in flight ends.
    pub(super) logout: LogoutProgress,
    /// Logged out, reset, or lost.
    pub(super) is_over: bool,
    /// It has no socket any more, and its tasks stay.
    pub(super) is_failed: bool,
    /// For so long; `None` until somebody says what time it is.
    pub(super) lingers_until: Option<Instant>,
    /// The session knows it no more.
    pub(super) has_left: bool,
    /// The connection, by key, that brought the request to log this one out, and that request's
    /// tag.
    pub(super) tells_end_to: Option<(u32, u32)>,
    pub(super) keep_alive: NopPing,
    /// When to ask the pool and waiting tasks again, apart from each completion.
    pub(super) retry: Backoff,
    /// When the latest call came.
    pub(super) now: Instant,
    /// The address that the initiator has connected to.
    pub(super) local_ip: String,
}

/// Pings an initiator that has been silent (RFC 7143 §11.19).
pub(super) struct NopPing {
    pub(super) next_tick: Instant,
    /// Something has come since the last tick.
    pub(super) heard: bool,
    /// A ping is unanswered.
    pub(super) pinged: bool,
}

impl Connection {
    /// What a login agreed on.
    pub(super) fn new(
        key: u32,
        established: &TargetLoginResult,
        local_ip: String,
        pool: Pool,
        sender: Sender,
        now: Instant,
    ) -> Connection {
        let TargetLoginResult { cid, parameters, operational, stat_sn, .. } = established;
        Connection {
            key,
            cid: *cid,
            level: parameters.get(OperationalKey::ErrorRecoveryLevel),
            replies: ResponseSender::new(parameters, *stat_sn, pool.clone(), sender),
            parameters: *parameters,
            negotiation: Negotiation::new(operational.clone()),
            events: AuditEvents::default(),
            queue: TaskQueue::default(),
            grants: VecDeque::new(),
            live: 0,
            reading: 0,
            granted: 0,
            given: 0,
            pool,
            awaiting: AwaitedIscsiPdu::Head(BHS_LEN),
            gathering: (SmallVec::new(), None),
            look_at: now,
            is_held_up: false,
            waits_for: 0,
            logout: LogoutProgress::default(),
            is_over: false,
            is_failed: false,
            lingers_until: None,
            has_left: false,
            tells_end_to: None,
            keep_alive: NopPing {
                next_tick: now.checked_add(PING_INTERVAL).unwrap_or(now),
                heard: false,
                pinged: false,
            },
            retry: Backoff::new(now),
            now,
            local_ip,
        }
    }

    pub(super) fn demand(&self) -> Demand {
        if self.is_closed() || (self.logout == LogoutProgress::Dropping && self.live == 0) {
            return Demand::Close;
        }
        match &self.awaiting {
            AwaitedIscsiPdu::Head(len) if self.has_room(self.waits_for) => Demand::Bytes(*len),
            AwaitedIscsiPdu::Head(_) | AwaitedIscsiPdu::Memory(_) => Demand::Nothing,
            AwaitedIscsiPdu::Segment(segment) => Demand::Bytes(self.segment_len(segment)),
            AwaitedIscsiPdu::Place { buffer_is_empty: false, .. } => Demand::Bytes(1),
            AwaitedIscsiPdu::Place { place, filled, .. } => {
                Demand::Place(place.slice(*filled, place.len().saturating_sub(*filled)).into())
            }
            AwaitedIscsiPdu::Tail { excess, segment, .. } => match excess {
                0 => Demand::Bytes(self.replies.digests().tail_len(segment.len)),
                _ => Demand::Bytes(1),
            },
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let retries = matches!(self.awaiting, AwaitedIscsiPdu::Memory(_))
            || !self.grants.is_empty()
            || self.queue.is_waiting()
            || self.is_held_up;
        let paused = self.queue.pause_ends();
        let retry = retries.then_some(self.retry.at());
        if self.is_failed {
            return [paused, retry, Some(self.look_at)].into_iter().flatten().min();
        }
        let look = (self.level > 0 && self.live > 0).then_some(self.look_at);
        [paused, retry, look, self.logs_out_at()]
            .into_iter()
            .flatten()
            .chain([self.keep_alive.next_tick])
            .min()
    }

    /// Whether a command with that much data-in may be taken now. What waits here waits for reads
    /// to be answered and sent, which needs nothing more from the initiator than that it reads.
    #[inline]
    pub(super) fn has_room(&self, data_in: usize) -> bool {
        let unsent = self.replies.mover.as_ref().map_or(0, TargetDatamover::unsent);
        let payload = self.reading.saturating_add(self.replies.sender.len()).saturating_add(unsent);
        self.replies.has_room() && (payload == 0 || payload.saturating_add(data_in) <= self.share())
    }

    /// How much payload may be in flight beside what is the only one.
    #[inline]
    pub(super) fn share(&self) -> usize {
        let share = PAYLOAD_IN_FLIGHT.min(self.pool.peer_share());
        if self.pool.is_short() { share.min(SHORT_PAYLOAD) } else { share }
    }

    /// Whether `len` more bytes of data-out would be more than the connection's share, beside what
    /// it has asked for.
    pub(super) fn exceeds_share(&self, len: usize) -> bool {
        self.granted > 0 && self.granted.saturating_add(len) > self.share()
    }

    /// Of a data segment with padding and digest, in bytes.
    #[inline]
    pub(super) fn segment_len(&self, segment: &DataSegment) -> usize {
        segment.len.saturating_add(self.replies.digests().tail_len(segment.len))
    }

    /// Nothing is received or sent any more.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.is_over || self.is_failed
    }

    /// Memory for what must be kept, of the pool or, when that is empty, of the heap.
    pub(super) fn take_or_make(&self, len: usize) -> Seg {
        self.pool.take(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len)
    }
}
