//! The driver of a target session over a byte stream whose peer is hostile, with volumes that fail
//! when the input says so. What a session may say is the protocol's own to judge.

use crate::choices::Choices;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::exports::Exports;
use blockmux_proto::outbox::{Outbox, OutboxPiece};
use blockmux_proto::session::{Demand, ProtocolError, StreamSession, Target};
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// What a protocol knows of its target.
pub(crate) trait Judge {
    /// Deadlines within this are near: the clock is moved to them, and to no others.
    const NEAR: Duration;
    /// What a session promises to have queued at most, and one more of everything, in bytes.
    const MAX_OUTBOX: usize;
    /// The data in flight that it promises, rounded up to whole buffers, and copies for digests, in
    /// bytes.
    const MAX_POOLED: usize;

    /// How many bytes are sent at most where the input has chosen this: all, or none.
    fn room(choice: u8) -> usize {
        if choice < 192 { usize::MAX } else { 0 }
    }

    /// The session has sent something.
    fn on_sent(&mut self, sent: &Sent<'_>);

    /// Nothing is under way any more.
    fn on_quiet(&self);

    /// The input has chosen this: something may happen to the target beside its connection.
    fn on_choice(&mut self, _choice: u8) {}
}

/// What a session has sent, and how far it had come by then with what its peer has.
pub(crate) struct Sent<'a> {
    /// It may end in the middle of a message.
    pub(crate) bytes: &'a [u8],
    /// Of the peer's stream, from its beginning.
    pub(crate) taken: &'a [u8],
    /// The peer broke the protocol somewhere in that.
    pub(crate) is_broken: bool,
}

/// A session and what it works with.
pub(crate) struct Run<'a, S, J> {
    choices: Choices<'a>,
    session: S,
    judge: J,
    served: Served,
    wire: Wire,
    pool: Pool,
    now: Instant,
    /// The peer broke the protocol.
    is_broken: bool,
    /// Nothing more is received: the peer broke the protocol, or has left.
    is_over: bool,
}

impl<'a, S: StreamSession + Target, J: Judge> Run<'a, S, J> {
    /// A peer that sends `stream` to a session that was made at `now` with `pool`.
    pub(crate) fn new(
        (choices, stream): (Choices<'a>, Vec<u8>),
        (session, exports): (S, Exports),
        judge: J,
        pool: Pool,
        now: Instant,
    ) -> Run<'a, S, J> {
        let served = Served::open(exports, &pool, session.depth());
        let wire = Wire::new(stream);
        Run { choices, session, judge, served, wire, pool, now, is_broken: false, is_over: false }
    }

    /// Takes the session through all of it.
    pub(crate) fn drive(mut self) {
        for _ in 0..MAX_TURNS {
            if !self.turn() || self.choices.are_used_up() {
                break;
            }
        }
        self.finish();
    }

    /// Some of what a driver does; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.receive();
        moved |= self.served.poll_io(&mut self.session);
        moved |= self.served.complete_some(&mut self.session, &mut self.choices);
        let room = J::room(self.choices.byte());
        moved |= self.send(room);
        match self.choices.byte() {
            255 => self.session.on_stop(Instant::now()),
            254 => self.leave(),
            choice => self.judge.on_choice(choice),
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

    /// The peer closes its side.
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

    /// Sends at most so many bytes.
    fn send(&mut self, room: usize) -> bool {
        let outbox = self.session.outbox();
        assert!(outbox.len() <= J::MAX_OUTBOX, "{} bytes are queued", outbox.len());
        let bytes = if room >= outbox.len() { outbox.take_bytes() } else { first_bytes(outbox, room) };
        let taken = if self.is_broken { self.wire.shown() } else { self.wire.taken() };
        self.judge.on_sent(&Sent { bytes: &bytes, taken, is_broken: self.is_broken });
        assert!(self.pool.out_bytes() <= J::MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Moves the clock to the session's next deadline if that is near: not to that of a login or of
    /// a ping.
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

    /// Lets everything that began come to its end.
    fn finish(mut self) {
        let mut moved = true;
        while moved {
            moved = self.receive() | self.served.poll_io(&mut self.session);
            self.served.complete_all(&mut self.session, &mut self.choices);
            moved |= self.send(usize::MAX);
            moved |= self.pass_time();
        }
        let is_stuck = matches!(self.session.demand(), Demand::Nothing);
        assert!(self.is_over || !is_stuck, "waits for something that never comes");
        self.judge.on_quiet();
        self.leave();
        self.send(usize::MAX);
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

/// Takes `len` bytes, as a socket that is full after them.
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
