//! The connections of one session: its first, which the link has dialled, and those that it asks
//! for later.

use super::missing;
use crate::connection::{Broken, Connection, Inflow};
use crate::host::{ByteStream, Host};
use crate::socket::Address;
use blockmux_proto::session::{StreamConnections, StreamSession};
use blockmux_tls::Psk;
use blockmux_volume::Waker;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::info;

/// The connections of one session, each in the place of its number.
pub(super) struct ConnectionSet<H: Host> {
    slots: Vec<Slot<H>>,
    /// In how many turns connections on which nothing is due are not looked at.
    unlooked: u32,
    /// ConnectionSet whose connection was lost, and that have no other yet.
    missing: Vec<usize>,
}

enum Slot<H: Host> {
    /// The session has no use for it, now or any more.
    Absent,
    /// To be dialled.
    Waiting {
        until: Instant,
    },
    Connecting {
        connection: Connection<H>,
        until: Instant,
    },
    Open(Connection<H>),
}

/// What dialling needs.
pub(super) struct Dial<'a, H: Host> {
    pub(super) core: &'a Rc<H>,
    pub(super) waker: &'a Waker,
    pub(super) address: &'a Address,
    /// The keys that every connection is secured with, and whether by the kernel where it can.
    pub(super) tls: (Option<&'a [Psk]>, bool),
}

impl<H: Host> ConnectionSet<H> {
    pub(super) fn new(first: Connection<H>) -> ConnectionSet<H> {
        ConnectionSet { slots: vec![Slot::Open(first)], unlooked: 0, missing: Vec::new() }
    }

    /// Calls deadlines and receives, once for each connection on which something is due; and after
    /// a sleep, as well as now and then, for the others: to look costs a system call.
    ///
    /// # Errors
    /// If a connection is lost without which the session does not go on.
    #[inline]
    pub(super) fn receive(
        &mut self,
        session: &mut impl StreamConnections,
        dial: &Dial<'_, H>,
    ) -> Result<Inflow, Broken> {
        let mut all = Inflow::Empty;
        let looks_at_all = self.unlooked == 0;
        self.unlooked = self.unlooked.checked_sub(1).unwrap_or(UNLOOKED);
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let Slot::Open(connection) = slot else { continue };
            if !looks_at_all && !session.is_awaited(number) {
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
                    // What it has to say yet is said, as far as that goes.
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

    /// Sends what every connection's outbox holds; answers whether any went.
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
            let Slot::Open(connection) = slot else { continue };
            let sent = connection.send(&mut session.connection(number));
            match sent {
                Ok(has_sent) => any |= has_sent,
                Err(broken) if !session.on_lost(number, dial.core.now()) => return Err(broken),
                Err(broken) => slot.forget(dial, number, &broken, &mut self.missing),
            }
        }
        Ok(any)
    }

    /// Sends what can be sent at once; whether something is left for the task to sort out.
    #[inline]
    pub(super) fn send_now(&mut self, session: &mut impl StreamConnections) -> Option<bool> {
        let (mut had_any, mut is_stuck) = (false, false);
        for (number, slot) in in_order(&mut self.slots, session.latest()) {
            let Slot::Open(connection) = slot else { continue };
            let mut stream = session.connection(number);
            if stream.outbox().is_empty() {
                continue;
            }
            had_any = true;
            is_stuck |= connection.send(&mut stream).is_err() || !stream.outbox().is_empty();
        }
        had_any.then_some(is_stuck)
    }

    /// Dials what the session asks for, and looks after what is being dialled; whether something
    /// has come of it.
    ///
    /// # Errors
    /// If a connection cannot be had without which the session does not go on.
    #[inline]
    pub(super) fn dial(
        &mut self,
        session: &mut impl StreamConnections,
        dial: &Dial<'_, H>,
    ) -> Result<bool, Broken> {
        while let Some((number, until)) = session.poll_connect() {
            if self.slots.len() <= number {
                self.slots.resize_with(number + 1, || Slot::Absent);
            }
            self.slots[number] = Slot::Waiting { until };
            dial.core.wake_at(until, dial.waker);
        }
        let mut is_changed = false;
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if matches!(slot, Slot::Open(_) | Slot::Absent) {
                continue;
            }
            match slot.advance(dial) {
                Ok(false) => {}
                Ok(true) => {
                    if let Some(at) = self.missing.iter().position(|missing| *missing == number) {
                        self.missing.swap_remove(at);
                        missing::take(1);
                    }
                    session.on_connected(number, dial.core.now());
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

    /// The session is over, and with it what it had lost before.
    pub(super) fn end(self) {
        missing::take(self.missing.len() as u32);
    }

    /// Asks for whatever the connections wait for.
    #[inline]
    pub(super) fn park(&mut self) {
        self.unlooked = 0;
        for slot in &mut self.slots {
            match slot {
                Slot::Open(connection) => connection.park(),
                Slot::Connecting { connection, .. } => connection.park_connecting(),
                Slot::Absent | Slot::Waiting { .. } => {}
            }
        }
    }
}

impl<H: Host> Slot<H> {
    /// The connection is gone, and the session goes on.
    fn forget(
        &mut self,
        dial: &Dial<'_, H>,
        number: usize,
        reason: &dyn std::fmt::Display,
        missing: &mut Vec<usize>,
    ) {
        if matches!(self, Slot::Open(_)) {
            missing.push(number);
            missing::add(1);
        }
        info!(target = %dial.address, "connection {number} of the session is lost ({reason}); it goes on");
        *self = Slot::Absent;
        dial.waker.wake();
    }

    /// One step towards a connection; whether it is there.
    fn advance(&mut self, dial: &Dial<'_, H>) -> Result<bool, Broken> {
        let now = dial.core.now();
        match self {
            Slot::Waiting { until } if *until > now => Ok(false),
            Slot::Waiting { .. } => {
                let (keys, ktls) = dial.tls;
                let secure = super::secure(keys, ktls)?;
                let stream = dial.core.connect(dial.address)?;
                let until = now + CONNECT_TIMEOUT;
                dial.core.wake_at(until, dial.waker);
                let connection = Connection::new(stream, dial.core, dial.waker).secured(secure);
                *self = Slot::Connecting { connection, until };
                self.advance(dial)
            }
            Slot::Connecting { connection, until } => match connection.stream().connect_result() {
                None if *until > now => Ok(false),
                None => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
                Some(Err(error)) => Err(error.into()),
                Some(Ok(())) => {
                    if let Slot::Connecting { connection, .. } = std::mem::replace(self, Slot::Absent) {
                        *self = Slot::Open(connection);
                    }
                    Ok(true)
                }
            },
            Slot::Open(_) | Slot::Absent => Ok(false),
        }
    }
}

/// All connections with their places, the one with the latest requests at the end.
#[inline]
fn in_order<H: Host>(slots: &mut [Slot<H>], latest: usize) -> impl Iterator<Item = (usize, &mut Slot<H>)> {
    let first = (latest + 1).min(slots.len());
    let (up_to_latest, behind) = slots.split_at_mut(first);
    (first..).zip(behind).chain(up_to_latest.iter_mut().enumerate())
}

/// What came over several connections, taken together.
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

/// Turns of a core that is awake in which connections without anything due are not looked at.
const UNLOOKED: u32 = 15;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
