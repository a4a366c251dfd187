//! A hostile initiator against the iSCSI target, with volumes that fail when the input says so.

use crate::choices::Choices;
use crate::iscsi_target_stream::TargetStream;
use crate::wire::Wire;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::iscsi::login::chap::{Algorithm, Credentials, Secret};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Chap, Node, Portal, TargetNode};
use blockmux_proto::iscsi::target::TargetSession;
use blockmux_proto::scsi::{Identity, LogicalUnit, Target as ScsiTarget};
use blockmux_proto::session::{Demand, StreamSession, Target, Timed};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Completion, Io, IoError, MemVolume, Op, Output, Pool, Waker};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads `data` as choices and an initiator's stream.
pub(crate) fn iscsi_target(data: &[u8]) {
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
    exports: Exports,
    channels: Vec<Box<dyn Channel>>,
    wire: Wire,
    pool: Pool,
    now: Instant,
    /// Polled and not completed.
    in_flight: Vec<(VolumeId, Io)>,
    stream: TargetStream,
    /// How much more may be read, in bytes, so that one input does not take seconds.
    budget: u64,
    /// Nothing more is received: the initiator broke the protocol, or has left.
    is_over: bool,
}

impl Run<'_> {
    fn new(mut choices: Choices<'_>, stream: Vec<u8>) -> Run<'_> {
        let exports = exports();
        let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
        let core = TestCore::with_pool(&pool).as_core();
        let now = Instant::now();
        let session = TargetSession::new(node(&exports), 1, pool.clone(), [0; 32], now);
        let open = |export: &Export| {
            export.volume.open(&core, session.depth(), Waker::idle()).expect("a RAM volume opens")
        };
        Run {
            choices,
            channels: exports.iter().map(|(_, export)| open(export)).collect(),
            session,
            exports,
            wire: Wire::new(stream),
            pool,
            now,
            in_flight: Vec::new(),
            stream: TargetStream::default(),
            budget: READ_BUDGET,
            is_over: false,
        }
    }

    /// Some of what a driver does; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.receive();
        moved |= self.poll_io();
        let complete = match self.choices.byte() {
            0..=127 => self.in_flight.len(),
            byte => usize::from(byte) % 4,
        };
        for _ in 0..complete.min(self.in_flight.len()) {
            let at = self.choices.below(self.in_flight.len().min(256));
            self.complete(at);
            moved = true;
        }
        if self.choices.byte() < 192 {
            moved |= self.send();
        }
        match self.choices.byte() {
            255 => self.session.on_stop(),
            254 => self.leave(),
            _ => {}
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

    /// The initiator closes its side.
    fn leave(&mut self) {
        if !self.is_over {
            self.is_over = true;
            let _ = self.session.on_end();
            assert!(matches!(self.session.demand(), Demand::Close));
        }
    }

    fn poll_io(&mut self) -> bool {
        let before = self.in_flight.len();
        while let Some((volume, io)) = self.session.poll_io() {
            let export = self.exports.get(volume).expect("the volume exists");
            assert_eq!(export.volume.info().check(&io), Ok(()), "{io:?}");
            assert!(self.in_flight.iter().all(|(_, other)| other.tag != io.tag), "{io:?} has another's tag");
            self.in_flight.push((volume, io));
        }
        assert!(self.in_flight.len() <= self.session.depth() as usize);
        while let Some((volume, tag)) = self.session.poll_cancel() {
            let is_it = |(on, io): &(VolumeId, Io)| *on == volume && io.tag == tag;
            assert!(self.in_flight.iter().any(is_it), "{tag:?} is not in flight and to be cancelled");
        }
        self.in_flight.len() > before
    }

    /// Completes one I/O as its volume does, or as the input wants it to fail.
    fn complete(&mut self, at: usize) {
        let (volume, io) = self.in_flight.swap_remove(at);
        let tag = io.tag;
        let result = match self.choices.byte() {
            _ if io.op == Op::Read && io.len > self.budget => Err(IoError::NoMemory),
            240.. => Err(IoError::Medium),
            _ => {
                self.budget -= if io.op == Op::Read { io.len } else { 0 };
                let (channel, mut done) = (&mut self.channels[volume.0 as usize], Vec::new());
                channel.submit(io);
                channel.kick();
                channel.poll(&mut done);
                done.pop().map_or(Ok(Output::Nothing), |done: Completion| done.result)
            }
        };
        self.session.on_io(Completion { tag, result });
    }

    fn send(&mut self) -> bool {
        let outbox = self.session.outbox();
        assert!(outbox.len() <= MAX_OUTBOX, "{} bytes are queued", outbox.len());
        let bytes = outbox.take_bytes();
        self.stream.on_sent(&bytes);
        assert!(self.pool.out_bytes() <= MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Moves the clock to the session's next deadline if that is near: not to that of the login, or of a ping.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_over && when < self.now + Duration::from_secs(10) => {
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
            moved = self.receive() | self.poll_io();
            while !self.in_flight.is_empty() {
                self.complete(0);
            }
            moved |= self.send();
            moved |= self.pass_time();
        }
        let is_stuck = matches!(self.session.demand(), Demand::Nothing);
        assert!(self.is_over || !is_stuck, "waits for something that never comes");
        self.stream.on_quiet();
        self.leave();
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

/// An open target and one behind CHAP.
fn node(exports: &Exports) -> Arc<Node> {
    let chap = Chap {
        initiator: Credentials::new("user", Secret::new(b"initiator-secret").expect("it is short"))
            .expect("the name is short"),
        target: Credentials::new("target", Secret::new(b"target-secret").expect("it is short")),
        algorithms: Algorithm::ALL.to_vec(),
    };
    let target = |name: &str, chap| {
        let units = exports.iter().fold(ScsiTarget::new(name, Vec::new()), |target, (id, export)| {
            let unit = LogicalUnit::new(Identity::of(&export.name), export.volume.clone());
            target.with_unit(id.0 as u16, id, unit)
        });
        let access = Access { initiator: None, chap, target: Arc::new(units) };
        let portals = vec![Portal { address: "192.0.2.1:3260".into(), group_tag: 1 }];
        TargetNode::new(Name::new(name).expect("it is a name"), portals, vec![access])
    };
    Arc::new(Node::new(vec![target("iqn.2026-11.t:a", None), target("iqn.2026-11.t:b", Some(chap))]))
}

fn exports() -> Exports {
    let export = |name: &str| Export {
        name: name.into(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    Exports::new(vec![export("disk0"), export("disk1")])
}

/// Of each RAM volume, in bytes: long payload fits.
const SIZE: u64 = 512 << 10;
/// What the session promises, and one more of everything.
const MAX_OUTBOX: usize = (64 << 20) + (32 << 20) + (2 << 20);
/// In bytes: the data-out in flight that the session promises, rounded up to whole buffers, and copies for digests.
const MAX_POOLED: usize = 256 << 20;
/// In bytes: one read of full length.
const READ_BUDGET: u64 = 33 << 20;
const MAX_TURNS: usize = 1000;
