//! A hostile client against the NBD target, with volumes that fail when the input says so.

use crate::choices::Choices;
use crate::nbd_server_stream::ServerStream;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::nbd::target::TargetSession;
use blockmux_proto::outbox::{Outbox, Piece};
use blockmux_proto::session::{Demand, ProtocolError, StreamSession, Target, Timed};
use blockmux_volume::{MemVolume, NullVolume, Pool, Volume};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Reads `data` as choices and a client's stream.
pub(crate) fn nbd_target(data: &[u8]) {
    let (choices, stream) = Choices::split(data);
    let mut run = Run::new(choices, stream);
    for _ in 0..MAX_TURNS {
        if !run.turn() || run.choices.are_used_up() {
            break;
        }
    }
    run.finish();
}

struct Run<'a> {
    choices: Choices<'a>,
    session: TargetSession,
    served: Served,
    wire: Wire,
    pool: Pool,
    now: Instant,
    stream: ServerStream,
    /// The client broke the protocol.
    is_broken: bool,
    /// Nothing more is received: the client broke the protocol, or has left.
    is_over: bool,
}

impl Run<'_> {
    fn new(mut choices: Choices<'_>, stream: Vec<u8>) -> Run<'_> {
        let exports = exports();
        let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
        let now = Instant::now();
        let session = TargetSession::new(exports.clone(), pool.clone(), now);
        Run {
            choices,
            served: Served::open(exports, &pool, session.depth()),
            session,
            wire: Wire::new(stream),
            pool,
            now,
            stream: ServerStream::default(),
            is_broken: false,
            is_over: false,
        }
    }

    /// Some of what a driver does; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.receive();
        moved |= self.served.poll_io(&mut self.session);
        moved |= self.served.complete_some(&mut self.session, &mut self.choices);
        let send = match self.choices.byte() {
            0..=127 => usize::MAX,
            byte => usize::from(byte - 128) << 5,
        };
        moved |= self.send(send);
        match self.choices.byte() {
            255 => self.session.on_stop(),
            254 if !self.is_over => self.leave(),
            _ => {}
        }
        moved | self.pass_time()
    }

    fn receive(&mut self) -> bool {
        if self.is_over {
            return false;
        }
        let result = self.wire.turn(&mut self.session, &mut self.choices);
        result.unwrap_or_else(|error| self.on_error(&error))
    }

    fn on_error(&mut self, error: &ProtocolError) -> bool {
        let text = error.to_string();
        assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
        (self.is_broken, self.is_over) = (true, true);
        true
    }

    /// The client closes its side.
    fn leave(&mut self) {
        self.is_over = true;
        if let Err(error) = self.session.on_end() {
            self.on_error(&error);
        } else {
            assert!(matches!(self.session.demand(), Demand::Close));
        }
    }

    /// Sends at most `len` bytes.
    fn send(&mut self, len: usize) -> bool {
        let outbox = self.session.outbox();
        assert!(outbox.len() <= MAX_OUTBOX, "{} bytes are queued", outbox.len());
        let bytes = if len >= outbox.len() { outbox.take_bytes() } else { first_bytes(outbox, len) };
        let taken = if self.is_broken { self.wire.shown() } else { self.wire.taken() };
        self.stream.on_sent(&bytes, taken, self.is_broken);
        assert!(self.pool.out_bytes() <= MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Moves the clock to the session's next deadline, unless that is the handshake's.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if when < self.now + Duration::from_secs(20) => {
                self.now = when.max(self.now);
                self.session.on_timeout(self.now).expect("no handshake is late");
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
        self.stream.on_quiet(self.is_broken);
        if !self.is_over && self.wire.is_drained() {
            self.leave();
            self.send(usize::MAX);
        }
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
            Piece::Head(head) => bytes.extend(&head[..left.min(head.len())]),
            Piece::Payload(seg) => bytes.extend(seg.slice(0, left.min(seg.len())).to_vec()),
        }
        if bytes.len() == len {
            break;
        }
    }
    outbox.consume(bytes.len());
    bytes
}

fn exports() -> Exports {
    let export = |name: &str, description: &str, read_only, volume: Arc<dyn Volume>| Export {
        name: name.into(),
        description: description.into(),
        read_only,
        volume,
    };
    Exports::new(vec![
        export("disk0", "a RAM disk", false, Arc::new(MemVolume::new(SIZE))),
        export("frozen", "", true, Arc::new(MemVolume::new(SIZE))),
        export("huge", "nothing of it is kept", false, HUGE.clone()),
    ])
}

/// Made once: its zeroes are many.
static HUGE: LazyLock<Arc<NullVolume>> = LazyLock::new(|| Arc::new(NullVolume::new(1 << 50)));

/// Of each RAM volume, in bytes: long payload fits.
const SIZE: u64 = 192 << 10;
/// What the session promises, and one more of everything.
const MAX_OUTBOX: usize = (64 << 20) + (32 << 20) + (2 << 20);
/// In bytes: the payload in flight that the session promises, rounded up to whole buffers.
const MAX_POOLED: usize = 128 << 20;
const MAX_TURNS: usize = 1000;
