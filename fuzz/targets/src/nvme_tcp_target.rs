//! A hostile host against the NVMe/TCP target, with volumes that fail, and a namespace that comes and goes, when the input
//! says so.

use crate::choices::Choices;
use crate::served::Served;
use crate::wire::Wire;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvmeof::node::{Node, Port};
use blockmux_proto::nvmeof::tcp::target::TargetSession;
use blockmux_proto::session::{Demand, StreamSession, Target, Timed};
use blockmux_volume::{Chunk, MemVolume, Pool};
use blockmux_wire::nvmeof::tcp::{CommonHeader, PduType};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Reads `data` as choices and a host's stream. With an odd first choice, another connection has made controller 1
/// before, so that the stream may connect an I/O queue.
pub(crate) fn nvme_tcp_target(data: &[u8]) {
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
    /// Keeps controller 1.
    _admin: Option<TargetSession>,
    /// Where namespace 1 comes and goes.
    subsystem: Arc<Subsystem>,
    first: Namespace,
    served: Served,
    wire: Wire,
    pool: Pool,
    now: Instant,
    /// What was sent, as far as it is not a whole PDU.
    sent: Vec<u8>,
    /// Nothing more is received: the host broke the protocol, or has left.
    is_over: bool,
}

impl Run<'_> {
    fn new(mut choices: Choices<'_>, stream: Vec<u8>) -> Run<'_> {
        let exports = exports();
        let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 4 << 20]));
        let now = Instant::now();
        let node = node(&exports);
        let admin = (choices.byte() & 1 == 1).then(|| {
            let mut admin = TargetSession::new(node.clone(), pool.clone(), now);
            admin.on_bytes(&Chunk::from_slice(ADMIN)).expect("it is what a host sends");
            admin.outbox().clear();
            admin
        });
        let subsystem = node.subsystems().remove(0);
        let first = namespace(&exports, VolumeId(0));
        let session = TargetSession::new(node, pool.clone(), now);
        Run {
            subsystem,
            first,
            choices,
            served: Served::open(exports, &pool, session.depth()),
            session,
            _admin: admin,
            wire: Wire::new(stream),
            pool,
            now,
            sent: Vec::new(),
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
            253 => drop(self.subsystem.detach(|namespace| namespace.nsid == self.first.nsid)),
            // Unless it is there.
            252 => drop(self.subsystem.attach(self.first.clone(), None)),
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

    /// The host closes its side.
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
        self.sent.extend(&bytes);
        self.check_sent();
        assert!(self.pool.out_bytes() <= MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        !bytes.is_empty()
    }

    /// Whole PDUs of a controller's kinds, whose lengths are right.
    fn check_sent(&mut self) {
        while let Ok((common, _)) = CommonHeader::read_from_prefix(&self.sent) {
            let kind = PduType(common.pdu_type);
            let is_controllers = matches!(
                kind,
                PduType::IC_RESP
                    | PduType::CAPSULE_RESP
                    | PduType::C2H_DATA
                    | PduType::R2T
                    | PduType::C2H_TERM_REQ
            );
            let len = common.plen.get() as usize;
            assert!(is_controllers && len >= common.hlen.into() && common.pdo % 4 == 0, "{common:?}");
            if len > self.sent.len() {
                return;
            }
            self.sent.drain(..len);
        }
    }

    /// Moves the clock to the session's next deadline if that is near: not to that of connecting.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_over && when < self.now + Duration::from_millis(100) => {
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
        assert!(self.sent.is_empty(), "{} bytes of a PDU were sent and no more", self.sent.len());
        self.leave();
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

fn node(exports: &Exports) -> Arc<Node> {
    let namespaces = exports.iter().map(|(id, _)| namespace(exports, id));
    let nqn = Nqn::new("nqn.t").expect("it is a name");
    let subsystem = Arc::new(Subsystem::new(nqn, "", namespaces.collect(), Vec::new()));
    let ports = vec![Port { id: 1, address: ([192, 0, 2, 1], 4420).into() }];
    Arc::new(Node::new(vec![subsystem], ports, ""))
}

/// The volume as the namespace of the next number.
fn namespace(exports: &Exports, volume: VolumeId) -> Namespace {
    let (export, served) = exports.get(volume).zip(exports.served(volume)).expect("it is in the list");
    Namespace::new(volume.0 + 1, volume, served, export.read_only, (&export.name, ""))
}

fn exports() -> Exports {
    let export = |name: &str| Export {
        name: name.into(),
        description: String::new(),
        read_only: name == "disk1",
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    Exports::new(vec![export("disk0"), export("disk1")])
}

/// ICReq, Connect of an admin queue of `nqn.t` by host `nqn.h` with the identifier 1, and CC with EN.
const ADMIN: &[u8] = include_bytes!("nvme_tcp_admin.bin");
/// Of each RAM volume, in bytes: the longest command fits.
const SIZE: u64 = 2 << 20;
/// What the session promises, and one more of everything.
const MAX_OUTBOX: usize = (64 << 20) + (2 << 20);
/// In bytes: what the session promises, rounded up to whole buffers, and copies for digests.
const MAX_POOLED: usize = 256 << 20;
const MAX_TURNS: usize = 1000;
