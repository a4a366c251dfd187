//! A client of the shared volume: random requests, preemptions of others, and lost connections.

use super::checker::{Checker, Moment, Stamp};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::SimCore;
use blockmux_volume::Core;
use blockmux_volume::random::SplitMix;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A connection of a client, over any protocol, to the volume and all that it needs.
pub(super) trait Link: Sized {
    /// Begins to connect and to log in.
    ///
    /// # Errors
    /// If nothing listens there.
    fn connect(core: &Rc<SimCore>, address: &Address, client: usize) -> io::Result<Self>;

    /// Whether a preemption, which aborts or not, waits for the I/O of the preempted client.
    fn drains(aborts: bool) -> bool;

    /// Whether the login is complete.
    fn is_ready(&self) -> bool;

    /// Sends a request; no other with this tag is in flight.
    fn send(&mut self, tag: u16, request: &Request);

    /// Sends and receives what is possible now; returns the replies, by tag.
    ///
    /// # Errors
    /// If the connection is lost.
    fn poll(&mut self) -> io::Result<Vec<(u16, Reply)>>;

    fn close(&mut self);
}

#[derive(Clone)]
pub(super) enum Request {
    Read {
        block: u64,
    },
    Write {
        block: u64,
        data: Vec<u8>,
    },
    CompareAndWrite {
        block: u64,
        expected: Vec<u8>,
        data: Vec<u8>,
    },
    /// Registers the client's key, whether or not it is registered.
    Register,
    /// Makes a reservation for all registrants.
    Reserve,
    /// Preempts the key of a client.
    Preempt {
        victim: usize,
        aborts: bool,
    },
}

#[derive(Debug)]
pub(super) enum Reply {
    Good(Vec<u8>),
    Miscompare,
    /// RESERVATION CONFLICT.
    Conflict,
    /// It was not carried out for another reason.
    Refused,
    /// It may have been carried out.
    Unknown,
}

/// A request in flight.
struct Sent {
    request: Request,
    since: Moment,
    /// Of [`Request::Preempt`].
    registrations: Option<u64>,
}

pub(super) struct Client<L> {
    number: usize,
    core: Rc<SimCore>,
    address: Address,
    checker: Arc<Mutex<Checker>>,
    random: SplitMix,
    link: Option<L>,
    is_logged_in: bool,
    connects_at: Instant,
    login: u64,
    in_flight: HashMap<u16, Sent>,
    last_tag: u16,
    is_registered: bool,
    /// The latest content that the client has read of each block.
    seen: HashMap<u64, Vec<u8>>,
    /// Number of requests to send.
    pub(super) left: u32,
}

/// A client over any protocol.
pub(super) trait Step {
    fn step(&mut self);
    /// Whether all requests are sent, and have replies.
    fn is_done(&self) -> bool;
    fn close(&mut self);
}

impl<L: Link> Client<L> {
    pub(super) fn new(
        number: usize,
        (core, address): (&Rc<SimCore>, Address),
        checker: &Arc<Mutex<Checker>>,
        seed: u64,
    ) -> Client<L> {
        Client {
            number,
            core: core.clone(),
            address,
            checker: checker.clone(),
            random: SplitMix::new(seed),
            link: None,
            is_logged_in: false,
            connects_at: core.now(),
            login: 0,
            in_flight: HashMap::new(),
            last_tag: 0,
            is_registered: false,
            seen: HashMap::new(),
            left: REQUESTS,
        }
    }

    fn checker(&self) -> MutexGuard<'_, Checker> {
        self.checker.lock().unwrap()
    }

    fn lose(&mut self) {
        self.close();
        let writes =
            |sent: &Sent| matches!(sent.request, Request::Write { .. } | Request::CompareAndWrite { .. });
        let orphaned = self.in_flight.values().any(writes);
        self.checker().counts.orphaned += u64::from(orphaned);
        self.in_flight.clear();
        self.is_logged_in = false;
        // The target has noticed the loss by then.
        self.connects_at = self.core.now() + Duration::from_millis(5 + self.random.below(40));
    }

    fn send(&mut self, request: Request) {
        self.last_tag = self.last_tag % 0x7000 + 1;
        let registrations = match &request {
            Request::Register => {
                self.checker().on_registering(self.number);
                None
            }
            Request::Preempt { victim, .. } => self.checker().preempting(*victim),
            _ => None,
        };
        let since = self.checker().now();
        self.link.iter_mut().for_each(|link| link.send(self.last_tag, &request));
        self.in_flight.insert(self.last_tag, Sent { request, since, registrations });
    }

    fn stamp(&mut self, expected: Option<u64>) -> Stamp {
        let (client, login) = (self.number as u64, self.login);
        Stamp { id: self.random.next() | 1, client, login, expected }
    }

    fn send_any(&mut self) {
        self.left = self.left.saturating_sub(1);
        let block = self.random.below(BLOCKS);
        let request = match self.random.below(100) {
            0..30 => Request::Read { block },
            30..60 => Request::Write { block, data: self.stamp(None).block() },
            60..95 => {
                let Some(expected) = self.seen.get(&block).cloned() else {
                    return self.send(Request::Read { block });
                };
                let data = self.stamp(Some(Stamp::of(&expected).id)).block();
                Request::CompareAndWrite { block, expected, data }
            }
            95..98 => {
                let victim = (self.number + 1 + self.random.below(CLIENTS as u64 - 1) as usize) % CLIENTS;
                Request::Preempt { victim, aborts: self.random.below(2) == 0 }
            }
            _ => return self.lose(),
        };
        self.send(request);
    }

    fn on_reply(&mut self, sent: Sent, reply: Reply) {
        let mut checker = self.checker.lock().unwrap();
        let is_refused = matches!(reply, Reply::Conflict | Reply::Refused);
        let is_write = matches!(sent.request, Request::Write { .. } | Request::CompareAndWrite { .. });
        if is_write && matches!(reply, Reply::Conflict) {
            checker.counts.conflicts += 1;
            self.is_registered = false;
        }
        match (sent.request, reply) {
            (Request::Read { block }, Reply::Good(data)) => {
                checker.on_read(block, Stamp::of(&data), sent.since);
                self.seen.insert(block, data);
            }
            (
                Request::Write { block, data } | Request::CompareAndWrite { block, data, .. },
                Reply::Good(_),
            ) => {
                checker.on_written(Stamp::of(&data));
                self.seen.insert(block, data);
            }
            (Request::Write { data, .. } | Request::CompareAndWrite { data, .. }, _) if is_refused => {
                checker.on_refused(Stamp::of(&data));
            }
            (Request::CompareAndWrite { block, data, .. }, Reply::Miscompare) => {
                self.seen.remove(&block);
                checker.on_miscompare(block, Stamp::of(&data), sent.since);
            }
            (Request::Register, reply) => {
                checker.on_registered(self.number);
                self.is_registered = matches!(reply, Reply::Good(_));
            }
            (Request::Preempt { victim, aborts }, Reply::Good(_)) => {
                let drains = L::drains(aborts);
                sent.registrations.into_iter().for_each(|count| checker.on_preempted(victim, count, drains));
            }
            (Request::Read { .. }, reply @ (Reply::Conflict | Reply::Miscompare)) => {
                checker.fault(format!("a read was answered with {reply:?}"));
            }
            _ => {}
        }
    }
}

impl<L: Link> Step for Client<L> {
    fn step(&mut self) {
        let Some(link) = &mut self.link else {
            if self.core.now() >= self.connects_at && self.left > 0 {
                self.link = L::connect(&self.core, &self.address, self.number).ok();
            }
            return;
        };
        let Ok(replies) = link.poll() else { return self.lose() };
        if !self.is_logged_in && link.is_ready() {
            (self.is_logged_in, self.is_registered) = (true, false);
            self.login += 1;
            self.checker().on_login(self.number, self.login);
        }
        for (tag, reply) in replies {
            if let Some(sent) = self.in_flight.remove(&tag) {
                self.on_reply(sent, reply);
            }
        }
        while self.is_logged_in && self.left > 0 && self.in_flight.len() < DEPTH {
            let is_registering =
                self.in_flight.values().any(|sent| matches!(sent.request, Request::Register));
            if !self.is_registered && !is_registering && self.random.below(3) == 0 {
                self.send(Request::Register);
                self.send(Request::Reserve);
            } else {
                self.send_any();
            }
        }
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.in_flight.is_empty()
    }

    fn close(&mut self) {
        self.link.take().into_iter().for_each(|mut link| link.close());
    }
}

/// The reservation key of a client.
pub(super) fn key_of(client: usize) -> u64 {
    client as u64 + 1
}

pub(super) const CLIENTS: usize = 4;
pub(super) const BLOCKS: u64 = 8;
const DEPTH: usize = 6;
const REQUESTS: u32 = 300;
