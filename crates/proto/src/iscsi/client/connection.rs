//! State of one connection of a session.

use super::datamover::{InitiatorDatamover, MAX_COMMANDS};
use super::full::MAX_UNSENT_REPLIES;
use super::login::LoginExchange;
use super::receive::{IscsiStreamState, TextExchange};
use super::statuses::ReceivedStatuses;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::operational::{OperationalKey as Name, OperationalParameters};
use crate::iscsi::sender::Sender;
use crate::slots::SlotKey;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One connection of a session.
pub(super) struct InitiatorConnection {
    /// Connection ID (CID), also the position in the session.
    pub(super) cid: u16,
    pub(super) phase: ConnectionPhase,
    pub(super) sender: Sender,
    pub(super) negotiated: ConnectionParameters,
    pub(super) stream_state: IscsiStreamState,
    pub(super) statuses: ReceivedStatuses,
    /// Number of queued ping replies, SNACKs and text requests since the sender was last empty.
    pub(super) unsent_replies: u32,
    /// The text negotiation in progress, if any.
    pub(super) text_exchange: Option<Box<TextExchange>>,
    /// Number of commands in flight that are allegiant to this connection.
    pub(super) in_flight: u32,
    pub(super) recovery: ConnectionRecovery,
    pub(super) keep_alive: KeepAliveState,
    /// Over RDMA: registers memory for the target instead of Data-In and R2T PDUs.
    pub(super) mover: Option<Box<InitiatorDatamover>>,
}

/// Phase of a connection.
pub(super) enum ConnectionPhase {
    /// The driver should connect at this time.
    Scheduled {
        at: Instant,
    },
    /// The driver is connecting.
    Connecting,
    Login(Box<LoginExchange>),
    Open,
    /// The connection replaces a lost one, whose tasks are being reassigned one after the other.
    Reassigning(VecDeque<SlotKey>),
    /// The connection has ended for good.
    Over,
}

/// Parameters that the login negotiated for this connection.
#[derive(Clone, Copy)]
pub(super) struct ConnectionParameters {
    pub(super) digests: IscsiDigests,
    pub(super) max_send_segment: u32,
    pub(super) max_receive_segment: usize,
}

/// Recovery of a lost connection.
#[derive(Default)]
pub(super) struct ConnectionRecovery {
    /// Deadline for the replacement; `None` if no connection was lost.
    pub(super) by: Option<Instant>,
    /// Number of losses since the last completed command.
    pub(super) losses: u32,
}

/// Keep-alive state of a connection.
pub(super) struct KeepAliveState {
    pub(super) next: Instant,
    /// Something was received since the last tick.
    pub(super) has_received: bool,
    /// A ping is unanswered.
    pub(super) is_ping_pending: bool,
}

impl InitiatorConnection {
    pub(super) fn new(
        cid: u16,
        phase: ConnectionPhase,
        is_over_rdma: bool,
        now: Instant,
    ) -> InitiatorConnection {
        InitiatorConnection {
            cid,
            phase,
            sender: Sender::new(is_over_rdma),
            negotiated: ConnectionParameters::new(&OperationalParameters::standard()),
            stream_state: IscsiStreamState::HEAD,
            statuses: ReceivedStatuses::from(0),
            unsent_replies: 0,
            text_exchange: None,
            in_flight: 0,
            recovery: ConnectionRecovery::default(),
            keep_alive: KeepAliveState::from(now),
            mover: is_over_rdma.then(Box::default),
        }
    }

    /// Whether a receive buffer is available for the response to another command.
    #[inline]
    pub(super) fn has_credit(&self) -> bool {
        self.mover.is_none() || self.in_flight < MAX_COMMANDS
    }

    /// Counts a PDU that the target can cause without end.
    #[inline]
    pub(super) fn count_reply(&mut self) {
        self.unsent_replies = self.unsent_replies.saturating_add(1);
    }

    /// Whether too many of these PDUs are unsent.
    #[inline]
    pub(super) fn has_unsent_replies(&self) -> bool {
        self.unsent_replies >= MAX_UNSENT_REPLIES && !self.sender.is_empty()
    }

    /// Whether commands may be sent on it.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Open)
    }

    /// Whether it is in full feature phase.
    #[inline]
    pub(super) fn is_connected(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Open | ConnectionPhase::Reassigning(_))
    }

    /// Enters full feature phase.
    pub(super) fn open(&mut self, parameters: &OperationalParameters, exp_stat_sn: u32, now: Instant) {
        self.phase = ConnectionPhase::Open;
        self.negotiated = ConnectionParameters::new(parameters);
        self.sender.set_digests(self.negotiated.digests);
        self.stream_state = IscsiStreamState::HEAD;
        self.statuses = ReceivedStatuses::from(exp_stat_sn);
        (self.unsent_replies, self.text_exchange) = (0, None);
        self.keep_alive = KeepAliveState::from(now);
    }

    /// The connection was lost and is to be replaced at time `at`.
    pub(super) fn schedule_replacement(&mut self, at: Instant) {
        self.phase = ConnectionPhase::Scheduled { at };
        self.sender.clear();
        self.stream_state = IscsiStreamState::HEAD;
    }
}

impl ConnectionParameters {
    fn new(parameters: &OperationalParameters) -> ConnectionParameters {
        ConnectionParameters {
            digests: IscsiDigests::of(parameters),
            max_send_segment: parameters.max_send_data_segment_length() as u32,
            max_receive_segment: parameters.get(Name::MaxRecvDataSegmentLength) as usize,
        }
    }
}

impl KeepAliveState {
    fn from(now: Instant) -> KeepAliveState {
        KeepAliveState {
            next: now.checked_add(PING_INTERVAL).unwrap_or(now),
            has_received: true,
            is_ping_pending: false,
        }
    }
}

/// Time without traffic before a ping, and then the time limit for the reply.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(10);
