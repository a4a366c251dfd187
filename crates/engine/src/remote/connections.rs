//! The connections of one session: the link makes the first, and the session requests the others.

use super::missing;
use crate::carrier::Carrier;
use crate::carrier::connection::{Broken, Connection, Inflow};
use crate::carrier::tls::ClientTls;
use crate::net::host::{ByteStream, Host};
use crate::net::socket::Address;
use blockmux_proto::driver::session::{StreamConnections, StreamSession};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_volume::Waker;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::info;

/// The connections of one session, indexed by connection number.
pub(super) struct ConnectionSet<H: Host> {
    slots: Vec<ConnectionSlot<H>>,
    /// Consecutive turns in which idle connections were not polled.
    skipped_turns: u32,
    /// Numbers of connections that were lost and are not restored.
    missing: Vec<usize>,
}

enum ConnectionSlot<H: Host> {
    /// The session does not need it, or no longer.
    Absent,
    /// To be connected.
    Waiting {
        until: Instant,
    },
    Connecting {
        connection: Connection<H>,
        until: Instant,
    },
    Open(Connection<H>),
}

/// Parameters of a connection attempt.
pub(super) struct Dial<'a, H: Host> {
    pub(super) core: &'a Rc<H>,
    pub(super) waker: &'a Waker,
    pub(super) address: &'a Address,
    /// TLS of all connections.
    pub(super) tls: Option<&'a ClientTls>,
}

impl<H: Host> ConnectionSet<H> {
    pub(super) fn new(first: Connection<H>) -> ConnectionSet<H> {
        ConnectionSet { slots: vec![ConnectionSlot::Open(first)], skipped_turns: 0, missing: Vec::new() }
    }

    /// Runs deadlines and receives on each connection that has something due. Idle connections,
    /// which would cost a system call each, are polled after a sleep and every few turns.
    ///
    /// # Errors
    /// If a connection is lost that the session cannot do without.
    #[inline]
    pub(super) fn receive(
        &mut self,
        session: &mut impl StreamConnections,
        dial: &Dial<'_, H>,
    ) -> Result<Inflow, Broken> {
        let mut all = Inflow::Empty;
        let polls_all = self.skipped_turns == 0;
        self.skipped_turns = self.skipped_turns.checked_sub(1).unwrap_or(MAX_SKIPPED_TURNS);
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let ConnectionSlot::Open(connection) = slot else { continue };
            if !polls_all && !session.is_awaited(number) {
                continue;
            }
            let mut stream = session.connection(number);
            let received =
                connection.check_deadline(&mut stream).and_then(|()| connection.receive(&mut stream));
            drop(stream);
            match received {
                Ok(Inflow::Finished) if !session.on_lost(number, dial.core.now()) => {
                    return Ok(Inflow::Finished);
                }
                Ok(Inflow::Finished) => slot.forget(dial, number, &"the target closed it", &mut self.missing),
                Ok(inflow) => all = merged(all, inflow),
                Err(broken) => {
                    // Sends the rest of the output as far as possible.
                    let _ = connection.send(&mut session.connection(number));
                    if !session.on_lost(number, dial.core.now()) {
                        return Err(broken);
                    }
                    slot.forget(dial, number, &broken, &mut self.missing);
                }
            }
        }
        Ok(all)
    }

    /// Sends every connection's outbox; returns whether anything was sent.
    ///
    /// # Errors
    /// As for [`ConnectionSet::receive`].
    #[inline]
    pub(super) fn send(
        &mut self,
        session: &mut impl StreamConnections,
        dial: &Dial<'_, H>,
    ) -> Result<bool, Broken> {
        let mut any = false;
        for (number, slot) in in_order(&mut self.slots, session.latest()) {
            let ConnectionSlot::Open(connection) = slot else { continue };
            let mut stream = session.connection(number);
            // What was received may have set a new deadline, also for an idle connection.
            let sent = connection
                .send(&mut stream)
                .and_then(|sent| connection.check_new_deadline(&mut stream).map(|()| sent));
            drop(stream);
            match sent {
                Ok(has_sent) => any |= has_sent,
                Err(broken) if !session.on_lost(number, dial.core.now()) => return Err(broken),
                Err(broken) => slot.forget(dial, number, &broken, &mut self.missing),
            }
        }
        Ok(any)
    }

    /// Sends what fits now; returns whether the task must handle the rest.
    #[inline]
    pub(super) fn send_now(&mut self, session: &mut impl StreamConnections) -> Option<bool> {
        let (mut had_any, mut is_stuck) = (false, false);
        for (number, slot) in in_order(&mut self.slots, session.latest()) {
            let ConnectionSlot::Open(connection) = slot else { continue };
            let mut stream = session.connection(number);
            if !connection.has_output(&mut stream) {
                continue;
            }
            had_any = true;
            is_stuck |= connection.send(&mut stream).is_err() || !stream.outbox().is_empty();
        }
        had_any.then_some(is_stuck)
    }

    /// Starts the connections that the session requests and advances those in progress; returns
    /// whether anything changed.
    ///
    /// # Errors
    /// If a connection cannot be made that the session cannot do without.
    #[inline]
    pub(super) fn dial(
        &mut self,
        session: &mut impl StreamConnections,
        dial: &Dial<'_, H>,
    ) -> Result<bool, Broken> {
        while let Some((number, until)) = session.poll_connect() {
            if self.slots.len() <= number {
                self.slots.resize_with(number + 1, || ConnectionSlot::Absent);
            }
            self.slots[number] = ConnectionSlot::Waiting { until };
            dial.core.wake_at(until, dial.waker);
        }
        let mut is_changed = false;
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if matches!(slot, ConnectionSlot::Open(_) | ConnectionSlot::Absent) {
                continue;
            }
            match slot.advance(dial) {
                Ok(false) => {}
                Ok(true) => {
                    let transport = slot.transport();
                    if let Some(at) = self.missing.iter().position(|missing| *missing == number) {
                        self.missing.swap_remove(at);
                        missing::take(1);
                    }
                    session.on_connected(number, &transport, dial.core.now());
                    is_changed = true;
                }
                Err(broken) => {
                    if !session.on_lost(number, dial.core.now()) {
                        return Err(broken);
                    }
                    slot.forget(dial, number, &broken, &mut self.missing);
                    is_changed = true;
                }
            }
        }
        Ok(is_changed)
    }

    /// Tells the target that the session's connections are closed, where closing them does not.
    pub(super) fn say_goodbye(&mut self, session: &mut impl StreamConnections) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if let ConnectionSlot::Open(connection) = slot {
                connection.say_goodbye(&mut session.connection(number));
            }
        }
    }

    /// Ends the session's connections, and removes those that it was missing from the count.
    pub(super) fn end(self) {
        missing::take(self.missing.len() as u32);
    }

    /// Arms the wake-ups that the connections need.
    #[inline]
    pub(super) fn park(&mut self) {
        self.skipped_turns = 0;
        for slot in &mut self.slots {
            match slot {
                ConnectionSlot::Open(connection) => connection.park(),
                ConnectionSlot::Connecting { connection, .. } => connection.park_connecting(),
                ConnectionSlot::Absent | ConnectionSlot::Waiting { .. } => {}
            }
        }
    }
}

impl<H: Host> ConnectionSlot<H> {
    /// Forgets a connection that is lost; the session continues.
    fn forget(
        &mut self,
        dial: &Dial<'_, H>,
        number: usize,
        reason: &dyn std::fmt::Display,
        missing: &mut Vec<usize>,
    ) {
        if matches!(self, ConnectionSlot::Open(_)) {
            missing.push(number);
            missing::add(1);
        }
        info!(target = %dial.address, "connection {number} of the session is lost ({reason}); the session continues");
        *self = ConnectionSlot::Absent;
        dial.waker.wake();
    }

    /// Properties of an open connection.
    fn transport(&self) -> TransportInfo {
        match self {
            ConnectionSlot::Open(connection) => connection.stream().transport(),
            _ => TransportInfo::default(),
        }
    }

    /// Advances one connection attempt; returns whether it is established.
    fn advance(&mut self, dial: &Dial<'_, H>) -> Result<bool, Broken> {
        let now = dial.core.now();
        match self {
            ConnectionSlot::Waiting { until } if *until > now => Ok(false),
            ConnectionSlot::Waiting { .. } => {
                let secure = super::secure(dial.tls)?;
                let stream = dial.core.connect(dial.address)?;
                let until = now + CONNECT_TIMEOUT;
                dial.core.wake_at(until, dial.waker);
                let connection = Connection::new(stream, dial.core, dial.waker).secured(secure);
                *self = ConnectionSlot::Connecting { connection, until };
                self.advance(dial)
            }
            ConnectionSlot::Connecting { connection, until } => match connection.stream().connect_result() {
                None if *until > now => Ok(false),
                None => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
                Some(Err(error)) => Err(error.into()),
                Some(Ok(())) => {
                    if let ConnectionSlot::Connecting { connection, .. } =
                        std::mem::replace(self, ConnectionSlot::Absent)
                    {
                        *self = ConnectionSlot::Open(connection);
                    }
                    Ok(true)
                }
            },
            ConnectionSlot::Open(_) | ConnectionSlot::Absent => Ok(false),
        }
    }
}

/// All connections with their numbers, the one with the latest requests last.
#[inline]
fn in_order<H: Host>(
    slots: &mut [ConnectionSlot<H>],
    latest: usize,
) -> impl Iterator<Item = (usize, &mut ConnectionSlot<H>)> {
    let first = (latest + 1).min(slots.len());
    let (up_to_latest, behind) = slots.split_at_mut(first);
    (first..).zip(behind).chain(up_to_latest.iter_mut().enumerate())
}

/// Combines the receive results of two connections.
#[inline]
fn merged(one: Inflow, other: Inflow) -> Inflow {
    let rank = |inflow| match inflow {
        Inflow::Empty | Inflow::Blocked => 0,
        Inflow::Drained => 1,
        Inflow::More => 2,
        Inflow::Finished => 3,
    };
    if rank(other) > rank(one) { other } else { one }
}

/// Maximum number of consecutive turns of a busy core without polling idle connections.
const MAX_SKIPPED_TURNS: u32 = 15;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
