//! SRP sessions of both sides over the in-memory provider: the channels of initiator and target,
//! and a volume.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]
#![allow(clippy::unwrap_used, reason = "a test")]

mod loopback_target;

use blockmux_proto::driver::session::{Connections, Initiator, StreamConnections, Timed};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::rdma::{Endpoint, RdmaConnections};
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_proto::srp::client::{SrpInitiatorConfig, SrpInitiatorSession, SrpSessionMode};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig, SETUP_TIMEOUT};
use blockmux_rdma::loopback::Loopback;
use blockmux_volume::{Io, IoError, MemVolume, Op, Output, Pool, Seg, SgList, Tag};
use loopback_target::LoopbackTarget;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

const SIZE: u64 = 8 << 20;
const TARGET: SrpPortId = SrpPortId([2; 16]);

/// A channel at the target.
type Server = LoopbackTarget<SrpTargetSession>;

struct Served {
    node: Arc<SrpNode>,
    exports: Exports,
}

impl Served {
    fn new() -> Served {
        let volume = Arc::new(MemVolume::new(SIZE));
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let unit = LogicalUnit::new(UnitIdentity::of("a"), exports.get(VolumeId(0)).unwrap().volume.clone());
        let port = TargetPort { relative_id: 1, group: 1, name: TARGET.name_string().into() };
        let units = ScsiTarget::new(&TARGET.name_string(), vec![port.clone()]);
        let target = Arc::new(units.with_unit(0, VolumeId(0), unit));
        let access = vec![SrpAccess { initiator: None, target }];
        Served {
            node: Arc::new(SrpNode::new(vec![SrpTarget {
                id: TARGET,
                port,
                access,
                networks: AllowedNetworks::default(),
            }])),
            exports,
        }
    }

    /// Creates a connection for an initiator's endpoint: the target's end, and the initiator's.
    fn connect(&self, endpoint: &Endpoint) -> (Server, Loopback) {
        let now = Instant::now();
        let session = SrpTargetSession::new(self.node.clone(), Pool::new(512 << 20), Arc::new(|| {}), now);
        LoopbackTarget::connect(endpoint, session, &self.exports)
    }
}

/// An initiator with its channels, and their target ends.
struct Host {
    session: Driven<Loopback, SrpInitiatorSession>,
    servers: Rc<RefCell<Vec<Server>>>,
}

impl Host {
    fn new(channels: u32) -> Host {
        let (served, now) = (Served::new(), Instant::now());
        let config = SrpInitiatorConfig {
            initiator: SrpPortId([1; 16]),
            target: TARGET,
            lun: Lun::new(0),
            mode: SrpSessionMode::Use,
            channels,
            immediate_data: true,
        };
        let session = SrpInitiatorSession::new(config, Pool::new(16 << 20), now);
        let (server, end) = served.connect(&RdmaConnections::endpoint(&session));
        let servers = Rc::new(RefCell::new(vec![server]));
        let further = servers.clone();
        let session = Driven::new(session, end, now).with_further(move |endpoint, _, _| {
            let (server, end) = served.connect(endpoint);
            further.borrow_mut().push(server);
            end
        });
        let mut host = Host { session, servers };
        host.run();
        while let Some((connection, now)) = host.session.poll_connect() {
            host.session.on_connected(connection, &TransportInfo::default(), now);
            host.run();
        }
        assert!(host.session.is_ready() && host.servers.borrow().len() == channels as usize);
        host
    }

    fn run(&mut self) {
        loop {
            let mut servers = self.servers.borrow_mut();
            let pumped = servers.iter_mut().fold(false, |moved, server| moved | server.pump());
            let count = servers.len();
            drop(servers);
            if !(0..count).fold(pumped, |moved, at| moved | self.session.pump_connection(at)) {
                return;
            }
        }
    }

    fn write(&mut self, tag: u64, offset: u64, data: &[u8]) {
        let (op, data) = (Op::Write { fua: false }, SgList::one(Seg::from_slice(data)));
        self.session.submit(Io { tag: Tag(tag), op, offset, len: data.len() as u64, data: Some(data) });
    }

    fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        self.session.submit(Io { tag: Tag(1 << 32), op: Op::Read, offset, len, data: None });
        self.run();
        self.session
            .poll_done()
            .expect("it has completed")
            .result
            .map(|done: Output| done.into_data().to_vec())
    }
}

#[test]
fn commands_on_several_channels_complete_once_each() {
    let mut host = Host::new(3);
    // 126 commands of each channel; the others are reserved for task management.
    assert_eq!(host.session.room(), 3 * 126);
    for round in 0..10 {
        for at in 0..200 {
            host.write(at, at * 16_384, &[round as u8 ^ at as u8; 16_384]);
        }
        host.run();
        let mut done: Vec<u64> = std::iter::from_fn(|| host.session.poll_done())
            .map(|done| done.result.map(|_| done.tag.0).unwrap())
            .collect();
        done.sort_unstable();
        assert_eq!(done, (0..200).collect::<Vec<_>>());
        assert_eq!(host.read(7 * 16_384, 512).unwrap(), vec![round as u8 ^ 7; 512]);
    }
    assert!((0..3).all(|channel| !host.session.is_awaited(channel)));
}

#[test]
fn a_target_that_does_not_answer_the_connection_request_is_reported_as_that() {
    let now = Instant::now();
    let config = SrpInitiatorConfig {
        initiator: SrpPortId([1; 16]),
        target: TARGET,
        lun: Lun::new(0),
        mode: SrpSessionMode::Use,
        channels: 1,
        immediate_data: true,
    };
    let pool = Pool::new(16 << 20);
    let session = SrpInitiatorSession::new(config, pool.clone(), now);
    let endpoint = RdmaConnections::endpoint(&session);
    let queue_pair = Iwarp::active(&endpoint, IwarpConfig::default(), pool, [8; 32], now);
    let mut driven = Driven::new(session, queue_pair, now);
    let mut stream = driven.connection(0);
    let late = stream.on_timeout(now + SETUP_TIMEOUT).unwrap_err();
    assert_eq!(late.what, "did not answer the connection request within 20 seconds");
}

#[test]
fn a_lost_channel_ends_the_session() {
    let mut host = Host::new(2);
    assert!(!host.session.on_lost(1, Instant::now()));
    host.write(1, 0, &[5; 4096]);
    assert_eq!(host.session.take_unfinished().len(), 1);
}

#[test]
fn a_session_that_stops_logs_out_on_every_channel() {
    let mut host = Host::new(3);
    Initiator::on_stop(&mut host.session);
    host.run();
    assert!(host.session.session().is_over() && host.session.broken().is_none());
    assert!(host.servers.borrow().iter().all(|server| server.driven.broken().is_none()));
}

#[test]
fn a_channel_lost_at_any_point_returns_its_commands() {
    for pieces in 0..24 {
        let mut host = Host::new(1);
        host.session.queue_pair().break_after(pieces);
        for at in 0..4 {
            host.write(at, at * 16_384, &[at as u8; 16_384]);
        }
        host.run();
        let done = std::iter::from_fn(|| host.session.poll_done()).count();
        let back = host.session.take_unfinished();
        assert_eq!(done + back.len(), 4, "after {pieces}");
        assert!(back.iter().all(|io| io.data.as_ref().unwrap().len() == 16_384));
    }
}
