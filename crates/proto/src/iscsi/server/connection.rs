//! State of one connection in full feature phase.

use super::connection_table::LogoutProgress;
use super::full::{PAYLOAD_IN_FLIGHT, PING_INTERVAL};
use super::negotiation::TextNegotiation;
use super::receive::{AwaitedIscsiPdu, DataSegment};
use super::replies::ResponseSender;
use crate::driver::audit_event::AuditEvents;
use crate::driver::backoff::Backoff;
use crate::driver::session::Demand;
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::login::target::TargetLoginResult;
use crate::iscsi::sender::Sender;
use crate::scsi::task_set::TaskQueue;
use blockmux_volume::{Memory, Pool, SHORT_PAYLOAD, Seg};
use blockmux_wire::iscsi::BHS_LEN;
use core::net::{IpAddr, SocketAddr};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Instant;

/// A connection in full feature phase.
pub(super) struct TargetConnection {
    /// Identifies the connection within its session; never reused.
    pub(super) key: u32,
    pub(super) cid: u16,
    pub(super) parameters: OperationalParameters,
    /// ErrorRecoveryLevel.
    pub(super) level: u32,
    pub(super) replies: ResponseSender,
    pub(super) negotiation: TextNegotiation,
    pub(super) events: AuditEvents,
    /// I/O requests of this connection's tasks to volumes.
    pub(super) queue: TaskQueue,
    /// Slots of writes that wait for memory before their R2T, oldest first.
    pub(super) memory_waiters: VecDeque<usize>,
    /// Number of tasks that are allegiant to this connection.
    pub(super) task_count: usize,
    /// Maximum data-in of those tasks, in bytes.
    pub(super) data_in_expected: usize,
    /// Memory allocated for their data-out, in bytes.
    pub(super) data_out_memory: usize,
    /// Number of data-out allocations so far; orders them by age.
    pub(super) allocation_order: u64,
    pub(super) pool: Pool,
    pub(super) awaiting: AwaitedIscsiPdu,
    /// AHS of a PDU that is received completely before it executes, and its data if received in
    /// place.
    pub(super) gathering: (SmallVec<[u8; 16]>, Option<Seg>),
    /// Next check for missing data-out, or for the end of a failed connection.
    pub(super) next_check: Instant,
    /// Delivery of an early request waits for room for its data-in.
    pub(super) is_delivery_blocked: bool,
    /// Data-in of the command that waits for room, in bytes; 0 if none waits.
    pub(super) blocked_data_in: usize,
    /// Progress of an orderly stop of the target.
    pub(super) logout: LogoutProgress,
    /// The connection was logged out, reset or lost.
    pub(super) is_over: bool,
    /// The connection lost its socket and its tasks remain (error recovery level 2).
    pub(super) is_failed: bool,
    /// Deadline of a failed connection; `None` until the first timeout call.
    pub(super) lingers_until: Option<Instant>,
    /// The session has removed this connection.
    pub(super) has_left: bool,
    /// Key of the connection that requested the logout of this one, and that request's task tag.
    pub(super) logout_requester: Option<(u32, u32)>,
    pub(super) keep_alive: NopPing,
    /// Retry times for memory and for waiting tasks, in addition to each completion.
    pub(super) retry: Backoff,
    /// Time of the latest call.
    pub(super) now: Instant,
    pub(super) addresses: ConnectionAddresses,
}

/// Both ends of a connection.
#[derive(Default)]
pub(super) struct ConnectionAddresses {
    /// Address that the initiator connected to; `None` if it is no IP address.
    pub(super) local: Option<SocketAddr>,
    /// IP address of the initiator; `None` if it has none.
    pub(super) client: Option<IpAddr>,
}

/// Pings an initiator that sends nothing (RFC 7143 §11.19).
pub(super) struct NopPing {
    pub(super) next_tick: Instant,
    /// Something was received since the last tick.
    pub(super) has_received: bool,
    /// A ping is unanswered.
    pub(super) is_ping_pending: bool,
}

impl TargetConnection {
    /// Creates the connection with the parameters that its login negotiated.
    pub(super) fn new(
        key: u32,
        established: &TargetLoginResult,
        addresses: ConnectionAddresses,
        pool: Pool,
        sender: Sender,
        now: Instant,
    ) -> TargetConnection {
        let TargetLoginResult { cid, parameters, operational, stat_sn, .. } = established;
        TargetConnection {
            key,
            cid: *cid,
            level: parameters.get(OperationalKey::ErrorRecoveryLevel),
            replies: ResponseSender::new(parameters, *stat_sn, pool.clone(), sender),
            parameters: *parameters,
            negotiation: TextNegotiation::new(operational.clone()),
            events: AuditEvents::default(),
            queue: TaskQueue::default(),
            memory_waiters: VecDeque::new(),
            task_count: 0,
            data_in_expected: 0,
            data_out_memory: 0,
            allocation_order: 0,
            pool,
            awaiting: AwaitedIscsiPdu::Head(BHS_LEN),
            gathering: (SmallVec::new(), None),
            next_check: now,
            is_delivery_blocked: false,
            blocked_data_in: 0,
            logout: LogoutProgress::default(),
            is_over: false,
            is_failed: false,
            lingers_until: None,
            has_left: false,
            logout_requester: None,
            keep_alive: NopPing {
                next_tick: now.checked_add(PING_INTERVAL).unwrap_or(now),
                has_received: false,
                is_ping_pending: false,
            },
            retry: Backoff::new(now),
            now,
            addresses,
        }
    }

    pub(super) fn demand(&self) -> Demand {
        if self.is_closed() || (self.logout == LogoutProgress::Dropping && self.task_count == 0) {
            return Demand::Close;
        }
        match &self.awaiting {
            AwaitedIscsiPdu::Head(len) if self.has_room(self.blocked_data_in) => Demand::Bytes(*len),
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
            || !self.memory_waiters.is_empty()
            || self.queue.is_waiting()
            || self.is_delivery_blocked;
        let paused = self.queue.pause_ends();
        let retry = retries.then_some(self.retry.at());
        if self.is_failed {
            return [paused, retry, Some(self.next_check)].into_iter().flatten().min();
        }
        let timeout_check = (self.level > 0 && self.task_count > 0).then_some(self.next_check);
        [paused, retry, timeout_check, self.logs_out_at()]
            .into_iter()
            .flatten()
            .chain([self.keep_alive.next_tick])
            .min()
    }

    /// Whether a command with `data_in` bytes of data-in may start now. The wait ends
    /// when earlier data-in was sent, which needs no further PDU from the initiator.
    #[inline]
    pub(super) fn has_room(&self, data_in: usize) -> bool {
        let unsent = self.replies.mover.as_ref().map_or(0, |datamover| datamover.transfers.unsent());
        let payload = self.data_in_expected.saturating_add(self.replies.sender.len()).saturating_add(unsent);
        self.replies.has_room() && (payload == 0 || payload.saturating_add(data_in) <= self.share())
    }

    /// Maximum payload in flight if there is more than one transfer, in bytes.
    #[inline]
    pub(super) fn share(&self) -> usize {
        let share = PAYLOAD_IN_FLIGHT.min(self.pool.peer_share());
        if self.pool.is_short() { share.min(SHORT_PAYLOAD) } else { share }
    }

    /// Whether `len` more bytes of data-out exceed the connection's share. A connection without
    /// data-out in flight always gets its first allocation.
    pub(super) fn exceeds_share(&self, len: usize) -> bool {
        self.data_out_memory > 0 && self.data_out_memory.saturating_add(len) > self.share()
    }

    /// Length of a data segment with padding and digest, in bytes.
    #[inline]
    pub(super) fn segment_len(&self, segment: &DataSegment) -> usize {
        segment.len.saturating_add(self.replies.digests().tail_len(segment.len))
    }

    /// Whether receiving and sending have stopped.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.is_over || self.is_failed
    }

    /// Allocates memory from the pool, or from the heap if the pool is empty.
    pub(super) fn take_or_allocate(&self, len: usize) -> Seg {
        self.pool.take(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len)
    }
}
