//! A hostile initiator against the iSCSI target, with volumes that fail when the input says so.

use crate::choices::Choices;
use crate::iscsi_target_stream::TargetStream;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::login::chap::{Algorithm, Credentials, Secret};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Chap, Node, Portal, TargetNode};
use blockmux_proto::iscsi::target::TargetSession;
use blockmux_proto::scsi::{Identity, LogicalUnit, Target as ScsiTarget};
use blockmux_proto::session::{Demand, StreamSession, Target, Timed};
use blockmux_volume::{MemVolume, Pool};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads `data` as choices and an initiator's stream.
pub(crate) fn iscsi_target(data: &[u8]) {
    let (choices, stream) = Choices::split(data);
    drive(choices, stream);
}

/// Takes a target session through all that an initiator sends.
pub(crate) fn drive(choices: Choices<'_>, stream: Vec<u8>) {
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
    stream: TargetStream,
    /// Nothing more is received: the initiator broke the protocol, or has left.
    is_over: bool,
}

impl Run<'_> {
    fn new(mut choices: Choices<'_>, stream: Vec<u8>) -> Run<'_> {
        let exports = exports();
        let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
        let now = Instant::now();
        let session = TargetSession::new(node(&exports), 1, pool.clone(), [0; 32], now);
        Run {
            choices,
            served: Served::open(exports, &pool, session.depth()),
            session,
            wire: Wire::new(stream),
            pool,
            now,
            stream: TargetStream::default(),
            is_over: false,
        }
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
            moved = self.receive() | self.served.poll_io(&mut self.session);
            self.served.complete_all(&mut self.session, &mut self.choices);
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
pub(crate) fn node(exports: &Exports) -> Arc<Node> {
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

pub(crate) fn exports() -> Exports {
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
const MAX_TURNS: usize = 1000;
