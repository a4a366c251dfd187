//! A hostile server against the NBD initiator: every request comes to one end, and one only.

use crate::choices::Choices;
use crate::nbd_client_stream::{ClientStream, Limits};
use crate::wire::Wire;
use blockmux_proto::nbd::initiator::{Config, Features, Headers, InitiatorSession, Mode};
use blockmux_proto::session::{Demand, Initiator, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Completion, Io, Op, Output, Pool, Seg, SgList, Tag};
use std::collections::HashMap;
use std::time::Instant;

/// Reads `data` as choices and a server's stream.
pub(crate) fn nbd_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let config = Config {
        export: "x".into(),
        mode: choices.of(&[Mode::Go, Mode::Go, Mode::Info, Mode::List]),
        features: choices.of(&FEATURES),
    };
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 64 << 20, 16 << 10]));
    let mut run = Run {
        session: InitiatorSession::new(config, pool.clone(), Instant::now()),
        choices,
        wire: Wire::new(stream),
        pool,
        in_flight: HashMap::new(),
        next_tag: 0,
        submitted_bytes: 0,
        stream: ClientStream::default(),
        is_over: false,
    };
    let mut quiet_turns = 0;
    for _ in 0..MAX_TURNS {
        quiet_turns = if run.turn() { 0 } else { quiet_turns + 1 };
        if quiet_turns == 2 {
            break;
        }
    }
    run.finish();
}

struct Run<'a> {
    choices: Choices<'a>,
    session: InitiatorSession,
    wire: Wire,
    pool: Pool,
    /// Submitted and not completed.
    in_flight: HashMap<Tag, Io>,
    next_tag: u64,
    /// Of writes, so that one input does not take seconds.
    submitted_bytes: u64,
    stream: ClientStream,
    is_over: bool,
}

impl Run<'_> {
    /// Some of what a driver does; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.submit();
        moved |= self.send();
        moved |= !self.is_over && self.receive();
        moved |= self.poll_done();
        if self.choices.byte() == 255 {
            self.session.on_stop();
        }
        moved
    }

    fn receive(&mut self) -> bool {
        match self.wire.turn(&mut self.session, &mut self.choices) {
            Ok(moved) => moved,
            Err(error) => self.on_error(error),
        }
    }

    fn on_error(&mut self, error: ProtocolError) -> bool {
        let text = error.to_string();
        assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
        self.is_over = true;
        true
    }

    /// Submits what the choices say, at most a few at once.
    fn submit(&mut self) -> bool {
        if !self.session.is_ready() || self.is_over {
            assert!(self.session.is_ready() || self.session.room() == 0);
            return false;
        }
        let before = self.next_tag;
        for _ in 0..self.choices.below(4) {
            if self.session.room() == 0 || self.next_tag >= MAX_REQUESTS {
                break;
            }
            let io = self.request();
            let former = self.in_flight.insert(io.tag, io.clone());
            assert!(former.is_none());
            self.session.submit(io);
        }
        self.next_tag > before
    }

    /// A request that fits the volume, mostly.
    fn request(&mut self) -> Io {
        let info = self.session.volume_info().expect("a session that is ready knows its volume");
        let (fua, flag) = (self.choices.byte() & 1 != 0, self.choices.byte());
        let op = match self.choices.below(12) {
            0..=4 => Op::Read,
            5..=6 => Op::Write { fua },
            7 => Op::Flush,
            8 => Op::WriteZeroes { fua, may_unmap: flag & 1 != 0, only_fast: flag & 2 != 0 },
            9 => Op::Discard { fua },
            10 => Op::Prefetch,
            _ => Op::BlockStatus,
        };
        let block = u64::from(info.logical_block);
        let mut offset = u64::from(self.choices.byte() & 15) * block;
        let mut len = match self.choices.byte() {
            0..=159 => block,
            byte @ 160..=223 => block * u64::from(byte - 160),
            byte @ 224..=251 => block * 16 * u64::from(byte - 224),
            252 => info.size.saturating_sub(offset),
            253 => 32 << 20,
            254 => 1,
            _ => u64::MAX,
        };
        if op == Op::Flush {
            (offset, len) = (0, 0);
        }
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let mut io = Io::new(tag, op, offset, len);
        let wants_data = matches!(op, Op::Write { .. }) || op == Op::Read && flag & 4 != 0;
        if wants_data && info.check(&Io { op: Op::Read, ..io.clone() }).is_ok() {
            self.submitted_bytes += len;
            let len = if self.submitted_bytes <= MAX_SUBMITTED { len as usize } else { 0 };
            let mut data = SgList::default();
            // In two pieces, so that they have to be told apart.
            for part in [len / 3, len - len / 3] {
                if part > 0 {
                    data.push(Seg::from_slice(&vec![flag; part]));
                }
            }
            io.data = Some(data);
        }
        io
    }

    fn send(&mut self) -> bool {
        let bytes = self.session.outbox().take_bytes();
        let limits = self.session.export().map(|export| {
            let info = export.volume_info();
            Limits {
                size: info.size,
                block: info.logical_block.into(),
                max_payload: export.max_payload().into(),
                is_extended: export.headers == Headers::Extended,
                flags: export.flags.0,
            }
        });
        self.stream.on_sent(&bytes, limits.as_ref());
        !bytes.is_empty()
    }

    fn poll_done(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.session.poll_done() {
            any = true;
            let io = self.in_flight.remove(&done.tag).expect("what completes is in flight");
            check(&io, &done);
        }
        let held: usize = self.in_flight.values().filter(|io| io.op == Op::Read).map(buffer_len).sum();
        assert!(self.pool.out_bytes() <= held, "{} bytes for {held}", self.pool.out_bytes());
        any
    }

    /// The server leaves, or the connection is given up.
    fn finish(mut self) {
        let leaves = !self.is_over && self.wire.is_drained() && self.choices.byte() < 128;
        if leaves && let Err(error) = self.session.on_end() {
            self.on_error(error);
        }
        self.send();
        self.stream.on_quiet();
        self.poll_done();
        if self.session.is_over() {
            assert!(matches!(self.session.demand(), Demand::Close) && self.session.room() == 0);
        }
        if let Some(refused) = self.session.refused() {
            assert!(!refused.to_string().contains('\n'));
        }
        assert!(self.session.exports().len() <= 10_000);
        let is_handshaking = !self.session.is_ready() && !self.session.is_over();
        assert_eq!(self.session.poll_timeout().is_some(), is_handshaking);
        let unfinished = self.session.take_unfinished();
        assert!(unfinished.is_sorted_by_key(|io| io.tag), "what is taken back is oldest first");
        for io in unfinished {
            let submitted = self.in_flight.remove(&io.tag).expect("what is taken back is in flight");
            assert_eq!((io.op, io.offset, io.len), (submitted.op, submitted.offset, submitted.len));
            assert_eq!(io.data.map(|data| data.len()), submitted.data.map(|data| data.len()));
        }
        assert!(self.in_flight.is_empty(), "lost: {:?}", self.in_flight);
        assert!(self.session.poll_done().is_none() && self.session.take_unfinished().is_empty());
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

/// Whether a completion brings what its request asked for.
fn check(io: &Io, done: &Completion) {
    match (io.op, &done.result) {
        (_, Err(_)) => {}
        (Op::Read, Ok(Output::Data(data))) => {
            assert_eq!(data.len() as u64, io.len);
            if let Some(own) = &io.data {
                let address = |list: &SgList| list.segs().first().map(Seg::as_ptr);
                assert_eq!(address(data), address(own), "a read went elsewhere");
            }
        }
        (Op::BlockStatus, Ok(Output::Extents(extents))) => {
            assert_eq!(extents.is_empty(), io.len == 0);
            assert!(extents.iter().all(|extent| extent.len > 0));
            assert!(extents.iter().map(|extent| extent.len).sum::<u64>() <= io.len);
        }
        (op, Ok(output)) => {
            assert!(matches!(output, Output::Nothing) && !matches!(op, Op::Read | Op::BlockStatus), "{op:?}");
        }
    }
}

/// What a pool's buffer for this read counts.
fn buffer_len(io: &Io) -> usize {
    if io.data.is_none() && io.len <= 32 << 20 { (io.len as usize).max(4096).next_power_of_two() } else { 0 }
}

const FEATURES: [Features; 4] = [
    Features { extended_headers: true, structured_replies: true },
    Features { extended_headers: false, structured_replies: true },
    Features { extended_headers: false, structured_replies: false },
    Features { extended_headers: true, structured_replies: false },
];

const MAX_TURNS: usize = 4000;
const MAX_REQUESTS: u64 = 64;
/// In bytes.
const MAX_SUBMITTED: u64 = 1 << 20;
