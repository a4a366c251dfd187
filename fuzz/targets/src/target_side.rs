//! The driver of a target session whose peer is hostile, with volumes that fail when the input says so: iSCSI and
//! NVMe/TCP. What a session may say is the protocol's own to judge.

use crate::choices::Choices;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::exports::Exports;
use blockmux_proto::session::{Demand, StreamSession, Target};
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// What a protocol knows of its target.
pub(crate) trait Judge {
    /// Deadlines within this are near: the clock is moved to them, and to no others.
    const NEAR: Duration;
    /// What a session promises to have queued at most, and one more of everything, in bytes.
    const MAX_OUTBOX: usize;
    /// The data in flight that it promises, rounded up to whole buffers, and copies for digests, in bytes.
    const MAX_POOLED: usize;

    /// The session has sent this, which may end in the middle of a message.
    fn on_sent(&mut self, bytes: &[u8]);

    /// Nothing is under way any more.
    fn on_quiet(&self);

    /// The input has chosen this: something may happen to the target beside its connection.
    fn on_choice(&mut self, _choice: u8) {}
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
        Run { choices, session, judge, served, wire: Wire::new(stream), pool, now, is_over: false }
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
        if self.choices.byte() < 192 {
            moved |= self.send();
        }
        match self.choices.byte() {
            255 => self.session.on_stop(),
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
            let text = error.to_string();
            assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
            self.is_over = true;
            true
        })
    }

    /// The peer closes its side.
    fn leave(&mut self) {
        if !self.is_over {
            self.is_over = true;
            let _ = self.session.on_end();
            assert!(matches!(self.session.demand(), Demand::Close));
        }
    }

    fn send(&mut self) -> bool {
        let outbox = self.session.outbox();
        assert!(outbox.len() <= J::MAX_OUTBOX, "{} bytes are queued", outbox.len());
        let bytes = outbox.take_bytes();
        self.judge.on_sent(&bytes);
        assert!(self.pool.out_bytes() <= J::MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Moves the clock to the session's next deadline if that is near: not to that of a login or of a ping.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_over && when < self.now + J::NEAR => {
                self.now = when.max(self.now);
                self.is_over |= self.session.on_timeout(self.now).is_err();
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
            moved |= self.send();
            moved |= self.pass_time();
        }
        let is_stuck = matches!(self.session.demand(), Demand::Nothing);
        assert!(self.is_over || !is_stuck, "waits for something that never comes");
        self.judge.on_quiet();
        self.leave();
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

const MAX_TURNS: usize = 1000;
