//! NVMe/RDMA: host queues, controller queues and a volume, over the in-memory provider.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]
#![allow(clippy::unwrap_used, reason = "a test")]

mod loopback_target;

use blockmux_proto::driver::session::{Connections, Control, Initiator};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::fabrics::host::{AdminConfig, ControllerQuery, Names, QueueConfig};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_rdma::client::{NvmeRdmaAdminSession, NvmeRdmaQueueSession};
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::rdma::{Endpoint, RdmaConnections, RdmaSession};
use blockmux_rdma::Driven;
use blockmux_rdma::loopback::Loopback;
use blockmux_volume::{Io, IoError, MemVolume, Op, Output, Pool, Seg, SgList, Tag};
use loopback_target::LoopbackTarget;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 8 << 20;

/// A controller's queue.
type ControllerEnd = LoopbackTarget<NvmeRdmaTargetSession>;

struct ServedSubsystem {
    node: Arc<NvmeNode>,
    exports: Exports,
}

impl ServedSubsystem {
    fn new(in_capsule: usize) -> ServedSubsystem {
        let volume = Arc::new(MemVolume::new(SIZE));
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let served = exports.volume_state(VolumeId(0)).unwrap().clone();
        let namespace = Namespace::new(1, VolumeId(0), served, false, VolumeUuid::of_texts(&["a"]));
        let subsystem = Subsystem::new(nqn("nqn.2026-11.test:disk"), "machine", vec![namespace], Vec::new());
        let ports = vec![FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
        let node = NvmeNode::new(vec![Arc::new(subsystem)], ports, "machine").with_in_capsule(in_capsule);
        ServedSubsystem { node: Arc::new(node), exports }
    }

    /// Creates a connection for a host's endpoint: the controller's end, and the host's.
    fn connect(&self, endpoint: &Endpoint) -> (ControllerEnd, Loopback) {
        let session = NvmeRdmaTargetSession::new(self.node.clone(), Pool::new(512 << 20), Instant::now());
        LoopbackTarget::connect(endpoint, session, &self.exports)
    }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

fn names() -> Names {
    Names { host: nqn("nqn.2026-11.test:host"), host_id: [7; 16], subsystem: nqn("nqn.2026-11.test:disk") }
}

/// A host with its admin queue and I/O queues, and the controller's ends of them.
struct TestHost {
    admin: Driven<Loopback, NvmeRdmaAdminSession>,
    queues: Driven<Loopback, NvmeRdmaQueueSession>,
    admin_server: ControllerEnd,
    servers: Rc<RefCell<Vec<ControllerEnd>>>,
    tag: u64,
}

impl TestHost {
    fn new(served: ServedSubsystem, queues: u16, entries: u16) -> TestHost {
        let now = Instant::now();
        let config = AdminConfig {
            names: names(),
            credentials: None,
            queues,
            query: ControllerQuery::Use(1),
            keep_alive: Duration::ZERO,
        };
        let admin = NvmeRdmaAdminSession::new(config, (), Pool::new(1 << 20), now);
        let (mut admin_server, end) = served.connect(&admin.endpoint());
        let mut admin = Driven::new(admin, end, now);
        while admin.pump() | admin_server.pump() {}
        assert!(admin.is_ready(), "{:?}, {:?}", admin.session().refused(), admin.broken());
        let config = QueueConfig {
            names: names(),
            credentials: None,
            controller: admin.session().controller().unwrap().clone(),
            namespace: admin.session().namespaces()[0].clone(),
            queues,
            entries,
        };
        let session = NvmeRdmaQueueSession::new(config, (), Pool::new(16 << 20), now);
        let (server, end) = served.connect(&RdmaConnections::endpoint(&session));
        let servers = Rc::new(RefCell::new(vec![server]));
        let further = servers.clone();
        let session = Driven::new(session, end, now).with_further(move |endpoint, _, _| {
            let (server, end) = served.connect(endpoint);
            further.borrow_mut().push(server);
            end
        });
        let mut host = TestHost { admin, queues: session, admin_server, servers, tag: 0 };
        host.run();
        while let Some((connection, now)) = host.queues.poll_connect() {
            host.queues.on_connected(connection, &TransportInfo::default(), now);
            host.run();
        }
        assert!(host.queues.is_ready() && host.servers.borrow().len() == usize::from(queues));
        host
    }

    fn run(&mut self) {
        loop {
            let mut servers = self.servers.borrow_mut();
            let pumped = servers.iter_mut().fold(false, |moved, server| moved | server.pump());
            let count = servers.len();
            drop(servers);
            let moved = (0..count).fold(pumped, |moved, at| moved | self.queues.pump_connection(at));
            if !(moved | self.admin.pump() | self.admin_server.pump()) {
                return;
            }
        }
    }

    fn call(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Result<Output, IoError> {
        self.tag += 1;
        self.queues.submit(Io { tag: Tag(self.tag), op, offset, len, data });
        self.run();
        let done = self.queues.poll_done().expect("it has completed");
        assert_eq!(done.tag, Tag(self.tag));
        done.result
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

fn list(bytes: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(bytes))
}

#[test]
fn written_data_is_read_at_every_length() {
    for in_capsule in [0, 4096, 8192] {
        let mut host = TestHost::new(ServedSubsystem::new(in_capsule), 1, 64);
        for blocks in [1, 2, 8, 9, 17, 128, 2048, 6001] {
            let data = pattern(blocks * 512);
            let len = data.len() as u64;
            host.call(Op::Write { fua: true }, 512, len, Some(list(&data))).unwrap();
            let read = host.call(Op::Read, 512, len, None).unwrap().into_data();
            assert!(read.to_vec() == data, "{in_capsule}, {blocks} blocks");
            let own = list(&vec![0; data.len()]);
            host.call(Op::Read, 512, len, Some(own.clone())).unwrap();
            assert!(own.to_vec() == data, "straight into the caller's memory");
        }
        host.call(Op::Flush, 0, 0, None).unwrap();
    }
}

#[test]
fn segmented_buffers_are_transferred_directly() {
    let mut host = TestHost::new(ServedSubsystem::new(8192), 1, 64);
    let pieces = |bytes: &[u8]| {
        let mut list = SgList::default();
        bytes.chunks(7168).for_each(|piece| list.push(Seg::from_slice(piece)));
        list
    };
    let data = pattern(96 << 10);
    host.call(Op::Write { fua: false }, 4096, data.len() as u64, Some(pieces(&data))).unwrap();
    let own = pieces(&vec![0; data.len()]);
    host.call(Op::Read, 4096, data.len() as u64, Some(own.clone())).unwrap();
    assert!(own.to_vec() == data);
}

#[test]
fn many_commands_on_many_queues_complete_once_each() {
    let mut host = TestHost::new(ServedSubsystem::new(4096), 3, 16);
    for round in 0..20 {
        let count = 100;
        for at in 0..count {
            let data = list(&vec![round as u8 ^ at as u8; 16 << 10]);
            let op = Op::Write { fua: false };
            let (offset, len) = (at * (16 << 10), 16 << 10);
            host.queues.submit(Io { tag: Tag(at), op, offset, len, data: Some(data) });
        }
        host.run();
        let mut done: Vec<u64> = std::iter::from_fn(|| host.queues.poll_done())
            .map(|done| done.result.map(|_| done.tag.0).unwrap())
            .collect();
        done.sort_unstable();
        assert_eq!(done, (0..count).collect::<Vec<_>>());
        let read = host.call(Op::Read, 7 * (16 << 10), 512, None).unwrap().into_data();
        assert_eq!(read.to_vec(), vec![round as u8 ^ 7; 512]);
    }
}

#[test]
fn a_stopped_session_ends_on_both_sides() {
    let mut host = TestHost::new(ServedSubsystem::new(8192), 2, 16);
    Initiator::on_stop(&mut host.queues);
    host.run();
    Control::on_stop(&mut host.admin);
    host.run();
    assert!(host.queues.session().is_over() && host.admin.session().is_over());
    assert!(host.queues.broken().is_none() && host.admin.broken().is_none());
    assert!(host.admin_server.driven.broken().is_none());
}

#[test]
fn a_queue_lost_at_any_point_returns_its_commands() {
    for pieces in 0..24 {
        let mut host = TestHost::new(ServedSubsystem::new(4096), 1, 16);
        host.queues.queue_pair().break_after(pieces);
        for at in 0..4 {
            let data = Some(list(&vec![at as u8; 8192]));
            let (op, offset) = (Op::Write { fua: false }, at * 8192);
            host.queues.submit(Io { tag: Tag(at), op, offset, len: 8192, data });
        }
        host.run();
        let done = std::iter::from_fn(|| host.queues.poll_done()).count();
        let back = host.queues.take_unfinished();
        assert_eq!(done + back.len(), 4, "after {pieces}");
        assert!(back.iter().all(|io| io.data.as_ref().unwrap().len() == 8192));
    }
}
