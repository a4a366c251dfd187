//! A channel's user that checks the channel's contract.

use super::{CaseResult, CoreTurn, fail};
use crate::buf::Seg;
use crate::io::{Completion, Io, IoError, Op, Output, Tag};
use crate::ready::ReadyList;
use crate::sg_list::SgList;
use crate::volume::{Channel, Core, Volume};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a volume does not conform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// One channel with its wakers; checks that each tag completes once and that waiting ends.
pub struct Client<'a> {
    channel: Box<dyn Channel>,
    depth: u32,
    turn: CoreTurn<'a>,
    /// Only the channel's waker is on this list.
    woken: Rc<ReadyList>,
    /// Something was submitted or cancelled since the last poll.
    called: bool,
    in_flight: HashMap<Tag, Op>,
    arrived: VecDeque<Completion>,
    polled: Vec<Completion>,
}

impl<'a> Client<'a> {
    pub(super) fn open(
        core: &Rc<dyn Core>,
        volume: &Arc<dyn Volume>,
        depth: u32,
        turn: CoreTurn<'a>,
    ) -> CaseResult<Client<'a>> {
        let woken = ReadyList::new();
        let channel = volume
            .open(core, depth, woken.waker(0))
            .map_err(|error| Failure(format!("does not open: {error}")))?;
        Ok(Client {
            channel,
            depth,
            turn,
            woken,
            called: false,
            in_flight: HashMap::new(),
            arrived: VecDeque::new(),
            polled: Vec::new(),
        })
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight.len() as u32
    }

    pub(super) fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Submits a request; it starts with the next wait.
    ///
    /// # Panics
    /// If the test itself violates the rules of tags and depth.
    pub fn submit(&mut self, io: Io) {
        assert!(self.in_flight() < self.depth, "the test submits more than the depth");
        assert!(self.in_flight.insert(io.tag, io.op).is_none(), "the test uses a tag twice");
        self.channel.submit(io);
        self.called = true;
    }

    /// Cancels a request.
    pub fn cancel(&mut self, tag: Tag) {
        self.channel.kick();
        self.channel.cancel(tag);
    }

    /// Waits for any completion.
    ///
    /// # Errors
    /// If there is none, or its tag is not in flight.
    pub fn wait(&mut self) -> Result<Completion, Failure> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(done) = self.arrived.pop_front() {
                return Ok(done);
            }
            if self.called {
                self.channel.kick();
            }
            if std::mem::take(&mut self.called) || self.woken.pop().is_some() {
                self.poll()?;
                continue;
            }
            let may_continue = (self.turn.borrow_mut())();
            if (!may_continue && self.woken.is_empty()) || Instant::now() > deadline {
                return fail!(
                    "these requests never complete, or complete without waking the waker: {:?}",
                    self.in_flight
                );
            }
        }
    }

    /// Waits for everything in flight.
    ///
    /// # Errors
    /// As [`Client::wait`].
    pub fn wait_all(&mut self) -> Result<Vec<Completion>, Failure> {
        let count = self.in_flight.len() + self.arrived.len();
        (0..count).map(|_| self.wait()).collect()
    }

    /// Executes one request, while nothing else is in flight, and returns its result.
    ///
    /// # Errors
    /// If it does not complete.
    pub fn call(&mut self, io: Io) -> Result<Result<Output, IoError>, Failure> {
        assert!(
            self.in_flight.is_empty() && self.arrived.is_empty(),
            "the test has other requests in flight"
        );
        self.submit(io);
        Ok(self.wait()?.result)
    }

    /// Executes one request that must succeed.
    ///
    /// # Errors
    /// If the request fails.
    pub fn done(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Result<Output, Failure> {
        let result = self.call(Io { tag: Tag(TAG), op, offset, len, data })?;
        result.map_err(|error| Failure(format!("{op:?} of {len} bytes at {offset} failed: {error}")))
    }

    /// Writes `data` from contiguous memory.
    ///
    /// # Errors
    /// If it fails.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        let list = SgList::one(Seg::from_slice(data));
        self.done(Op::Write { fua: false }, offset, data.len() as u64, Some(list)).map(drop)
    }

    /// Reads without a buffer.
    ///
    /// # Errors
    /// If it fails or returns another length.
    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, Failure> {
        data_of(self.done(Op::Read, offset, len, None)?, len)
    }

    /// Polls for completions, as after a wake-up.
    fn poll(&mut self) -> CaseResult {
        self.channel.poll(&mut self.polled);
        for done in self.polled.drain(..) {
            if self.in_flight.remove(&done.tag).is_none() {
                return fail!("{:?} completed but is not in flight", done.tag);
            }
            self.arrived.push_back(done);
        }
        Ok(())
    }

    /// Polls once more: nothing may complete when nothing is in flight.
    pub(super) fn expect_no_completion(&mut self) -> CaseResult {
        for _ in 0..4 {
            (self.turn.borrow_mut())();
            self.poll()?;
        }
        if self.arrived.is_empty() { Ok(()) } else { fail!("there are more completions than requests") }
    }

    /// Starts submitted requests without waiting.
    pub(super) fn start(&mut self) {
        self.channel.kick();
    }

    /// Runs the reactor briefly.
    pub(super) fn turn(&mut self) {
        (self.turn.borrow_mut())();
    }
}

/// The data that a read returned.
pub(super) fn data_of(output: Output, len: u64) -> CaseResult<Vec<u8>> {
    let Output::Data(list) = output else { return fail!("a read returned {output:?}") };
    if list.len() as u64 == len {
        Ok(list.to_vec())
    } else {
        fail!("a read of {len} bytes returned {}", list.len())
    }
}

/// Tag of a single request; not a small index, because submitters choose tags freely.
const TAG: u64 = 0xfeed_0000_0000_0007;
/// Timeout that turns a hang into a message; a working volume never takes this long.
const TIMEOUT: Duration = Duration::from_secs(60);
