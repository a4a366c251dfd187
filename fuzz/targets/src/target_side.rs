//! Driver of a target session over a byte stream with a hostile peer, and with volumes that fail
//! when the input requests it. Each protocol checks what its session sends.

use crate::choices::Choices;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession};
use blockmux_proto::driver::target::{IoSource, TargetLifecycle};
use blockmux_proto::exports::Exports;
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// The checks of a protocol for its target.
pub(crate) trait ProtocolChecks {
    /// The clock is advanced to deadlines within this time only.
    const NEAR: Duration;
    /// The session's documented maximum outbox, plus one item of each kind, in bytes.
    const MAX_OUTBOX: usize;
    /// The session's documented maximum data in flight, rounded up to whole buffers, plus copies
    /// for digests, in bytes.
    const MAX_POOLED: usize;

    /// The maximum number of bytes to send for this choice of the input: all, or none.
    fn room(choice: u8) -> usize {
        if choice < 192 { usize::MAX } else { 0 }
    }

    /// Checks what the session has sent.
    fn on_sent(&mut self, sent: &Sent<'_>);

    /// Checks the end state, with nothing in flight.
    fn on_quiet(&self);

    /// Handles a choice of the input: an event at the target outside the connection.
    fn on_choice(&mut self, _choice: u8) {}
}

/// Bytes that a session has sent, and the peer's bytes that it had consumed by then.
pub(crate) struct Sent<'a> {
    /// The bytes, which may end within a message.
    pub(crate) bytes: &'a [u8],
    /// The consumed part of the peer's stream.
    pub(crate) taken: &'a [u8],
    /// Whether the peer violated the protocol in this part.
    pub(crate) is_broken: bool,
}

/// A session with its driver and volumes.
pub(crate) struct TargetRun<'a, S, J> {
    choices: Choices<'a>,
    session: S,
    checks: J,
    served: Served,
    wire: Wire,
    pool: Pool,
    now: Instant,
    /// Whether the peer violated the protocol.
    is_broken: bool,
    /// Whether nothing more is received: the peer violated the protocol or has disconnected.
    is_over: bool,
}

impl<'a, S: StreamSession + IoSource + TargetLifecycle, J: ProtocolChecks> TargetRun<'a, S, J> {
    /// Creates a peer that sends `stream` to a session, which was created at `now` with `pool`.
    pub(crate) fn new(
        (choices, stream): (Choices<'a>, Vec<u8>),
        (session, exports): (S, Exports),
        checks: J,
        pool: Pool,
        now: Instant,
    ) -> TargetRun<'a, S, J> {
        let served = Served::open(exports, &pool, session.depth());
        let wire = Wire::new(stream);
        TargetRun { choices, session, checks, served, wire, pool, now, is_broken: false, is_over: false }
    }

    /// Drives the session through the complete input.
    pub(crate) fn drive(mut self) {
        for _ in 0..MAX_TURNS {
            if !self.turn() || self.choices.are_used_up() {
                break;
            }
        }
        self.finish();
    }

    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.receive();
        moved |= self.served.poll_io(&mut self.session);
        moved |= self.served.complete_some(&mut self.session, &mut self.choices);
        let room = J::room(self.choices.byte());
        moved |= self.send(room);
        match self.choices.byte() {
            255 => self.session.on_stop(Instant::now()),
            254 => self.leave(),
            choice => self.checks.on_choice(choice),
        }
        moved | self.pass_time()
    }

    fn receive(&mut self) -> bool {
        if self.is_over {
            return false;
        }
        let result = self.wire.turn(&mut self.session, &mut self.choices);
        result.unwrap_or_else(|error| {
            self.on_error(&error);
            true
        })
    }

    fn on_error(&mut self, error: &ProtocolError) {
        let text = error.to_string();
        assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
        (self.is_broken, self.is_over) = (true, true);
    }

    /// Closes the peer's side.
    fn leave(&mut self) {
        if self.is_over {
            return;
        }
        self.is_over = true;
        if let Err(error) = self.session.on_end(Instant::now()) {
            self.on_error(&error);
        }
        assert!(matches!(self.session.demand(), Demand::Close));
    }

    /// Sends at most `room` bytes.
    fn send(&mut self, room: usize) -> bool {
        let outbox = self.session.outbox();
        assert!(outbox.len() <= J::MAX_OUTBOX, "{} bytes are queued", outbox.len());
        let bytes = if room >= outbox.len() { outbox.take_bytes() } else { first_bytes(outbox, room) };
        let taken = if self.is_broken { self.wire.shown() } else { self.wire.taken() };
        self.checks.on_sent(&Sent { bytes: &bytes, taken, is_broken: self.is_broken });
        assert!(self.pool.out_bytes() <= J::MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Advances the clock to the session's next deadline if that is near: not to the deadline of a
    /// login or of a ping.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_broken && when < self.now + J::NEAR => {
                self.now = when.max(self.now);
                if let Err(error) = self.session.on_timeout(self.now) {
                    self.on_error(&error);
                }
                !matches!(self.session.demand(), Demand::Nothing)
            }
            _ => false,
        }
    }

    /// Completes everything in flight.
    fn finish(mut self) {
        let mut moved = true;
        while moved {
            moved = self.receive() | self.served.poll_io(&mut self.session);
            self.served.complete_all(&mut self.session, &mut self.choices);
            moved |= self.send(usize::MAX);
            moved |= self.pass_time();
        }
        let is_stuck = matches!(self.session.demand(), Demand::Nothing);
        assert!(self.is_over || !is_stuck, "the session waits, and nothing is left that could wake it");
        self.checks.on_quiet();
        self.leave();
        self.send(usize::MAX);
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

/// Consumes `len` bytes, like a socket whose buffer is then full.
fn first_bytes(outbox: &mut Outbox, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for piece in outbox.pieces() {
        let left = len - bytes.len();
        match piece {
            OutboxPiece::Head(head) => bytes.extend(&head[..left.min(head.len())]),
            OutboxPiece::Payload(seg) => bytes.extend(seg.slice(0, left.min(seg.len())).to_vec()),
        }
        if bytes.len() == len {
            break;
        }
    }
    outbox.consume(bytes.len());
    bytes
}

const MAX_TURNS: usize = 1000;
