//! One connection of a session: its login, what is agreed on for it alone, and where in its streams
//! we are.

use super::datamover::{InitiatorDatamover, MAX_COMMANDS};
use super::full::MAX_PONGS;
use super::login::LoginPhase;
use super::receive::{IscsiStreamState, TextExchange};
use super::statuses::Statuses;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::operational::{OperationalKey as Name, OperationalParameters};
use crate::iscsi::sender::Sender;
use crate::slots::SlotKey;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One connection of a session.
pub(super) struct InitiatorConnection {
    /// Its number in the session, on the wire too (CID).
    pub(super) cid: u16,
    pub(super) phase: ConnectionPhase,
    pub(super) sender: Sender,
    pub(super) terms: ConnectionParameters,
    pub(super) reading: IscsiStreamState,
    pub(super) statuses: Statuses,
    /// Answers to the target's pings that may be unsent.
    pub(super) pongs: u32,
    /// What the target answers to a text request, if one is under way.
    pub(super) text_exchange: Option<Box<TextExchange>>,
    /// Commands under way that belong to it.
    pub(super) in_flight: u32,
    pub(super) recovery: Recovery,
    pub(super) ticks: Ticks,
    /// Over RDMA: what opens memory to the target in the place of Data-In and R2T.
    pub(super) mover: Option<Box<InitiatorDatamover>>,
}

/// How far a connection has come.
pub(super) enum ConnectionPhase {
    /// The driver is to connect then.
    Wanted {
        at: Instant,
    },
    /// The driver connects.
    Dialing,
    Login(Box<LoginPhase>),
    Open,
    /// It has taken the place of one that was lost, whose tasks move here one after the other.
    Moving(VecDeque<SlotKey>),
    /// There is none, and will be none.
    Over,
}

/// What login agreed on for one connection.
#[derive(Clone, Copy)]
pub(super) struct ConnectionParameters {
    pub(super) digests: IscsiDigests,
    pub(super) max_send_segment: u32,
    pub(super) max_receive_segment: usize,
}

/// How a connection that was lost is replaced.
#[derive(Default)]
pub(super) struct Recovery {
    /// Until when another one has to be there; `None`: none was lost.
    pub(super) by: Option<Instant>,
    /// How many were lost since a command has completed.
    pub(super) losses: u32,
}

/// Whether the target says anything.
pub(super) struct Ticks {
    pub(super) next: Instant,
    /// Something has come since the last tick.
    pub(super) heard: bool,
    /// A ping is unanswered.
    pub(super) pinged: bool,
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
            terms: ConnectionParameters::new(&OperationalParameters::standard()),
            reading: IscsiStreamState::HEAD,
            statuses: Statuses::from(0),
            pongs: 0,
            text_exchange: None,
            in_flight: 0,
            recovery: Recovery::default(),
            ticks: Ticks::from(now),
            mover: is_over_rdma.then(Box::default),
        }
    }

    /// Whether a response to one more command finds a receive buffer.
    #[inline]
    pub(super) fn has_credit(&self) -> bool {
        self.mover.is_none() || self.in_flight < MAX_COMMANDS
    }

    /// Whether the target has sent more pings than it takes answers.
    #[inline]
    pub(super) fn is_flooded(&self) -> bool {
        self.pongs >= MAX_PONGS && !self.sender.is_empty()
    }

    /// Whether commands may be sent on it.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Open)
    }

    /// Whether it is in full feature phase.
    #[inline]
    pub(super) fn is_connected(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Open | ConnectionPhase::Moving(_))
    }

    /// The login is over.
    pub(super) fn open(&mut self, parameters: &OperationalParameters, exp_stat_sn: u32, now: Instant) {
        self.phase = ConnectionPhase::Open;
        self.terms = ConnectionParameters::new(parameters);
        self.sender.set_digests(self.terms.digests);
        self.reading = IscsiStreamState::HEAD;
        self.statuses = Statuses::from(exp_stat_sn);
        (self.pongs, self.text_exchange) = (0, None);
        self.ticks = Ticks::from(now);
    }

    /// The connection is gone; another one is to take its place.
    pub(super) fn want(&mut self, at: Instant) {
        self.phase = ConnectionPhase::Wanted { at };
        self.sender.clear();
        self.reading = IscsiStreamState::HEAD;
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

impl Ticks {
    fn from(now: Instant) -> Ticks {
        Ticks { next: now.checked_add(PING_INTERVAL).unwrap_or(now), heard: true, pinged: false }
    }
}

/// How long a target may be silent before it is pinged, and then until it is given up.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(10);
