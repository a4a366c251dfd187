//! Target and host of NVMe over TCP and RDMA: a node that serves an export as namespace 1, and
//! endpoints and dialers for it.

use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nvme::initiator::{NvmeCarrier, NvmeDialer, NvmeEndpoint, NvmeOverTcp};
use blockmux_engine::remote::Policy;
use blockmux_proto::driver::session::{Demand, StreamSession};
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::ana::AnaGroup;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_tcp::client::{
    AdminConfig, ControllerQuery, Digests, Names, NamespaceInfo, NvmeTcpAdminSession,
};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_volume::{Chunk, MemVolume, Pool};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The ANA group of the namespace.
pub(crate) const GROUP: u32 = 1;

/// The first export as namespace 1 of a subsystem with two ports.
pub(crate) fn node(exports: &Exports) -> (Arc<NvmeNode>, Arc<Subsystem>) {
    let (id, export) = exports.iter().next().expect("there is an export");
    let volume_state = exports.volume_state(id).expect("it is served").clone();
    let namespace =
        Namespace::new(1, id, volume_state, export.read_only, VolumeUuid::of_texts(&[&export.name]));
    let subsystem = Subsystem::new(nqn(SUBSYSTEM), "machine", vec![namespace], Vec::new());
    let groups = vec![AnaGroup { id: GROUP, namespaces: vec![1], states: BTreeMap::new() }];
    let subsystem = Arc::new(subsystem.with_ana(groups, &[1, 2]));
    let ports = [1, 2].map(|id| FabricsPort::new(id, "0.0.0.0:4420".parse().expect("a valid address")));
    (Arc::new(NvmeNode::new(vec![subsystem.clone()], ports.into(), "machine")), subsystem)
}

/// Makes a target's sessions over TCP.
pub(crate) fn sessions(exports: &Exports) -> impl Fn(Pool, Instant) -> NvmeTcpTargetSession + use<> {
    let (node, _) = node(exports);
    move |pool, now| NvmeTcpTargetSession::new(node.clone(), pool, now).at_port(1)
}

/// An endpoint of the namespace at one address or several.
pub(crate) fn endpoint(addresses: &[Address]) -> NvmeEndpoint {
    endpoint_over(NvmeOverTcp::default(), addresses)
}

/// An endpoint of the namespace over TCP or RDMA.
pub(crate) fn endpoint_over<C>(over: C, addresses: &[Address]) -> NvmeEndpoint<C> {
    let (address, further) = addresses.split_first().expect("there is a path");
    NvmeEndpoint {
        tls_key: None,
        tls_identity: None,
        identity_order: Arc::default(),
        ktls: true,
        generated_keys: None,
        address: address.clone(),
        further: further.to_vec(),
        policy: Policy::RoundRobin,
        names: names(),
        secrets: None,
        nsid: 1,
        over,
        entries: 64,
        keep_alive: Duration::from_secs(5),
        queues: 1,
        reconnect_timeout: Duration::from_secs(5),
        timeout: None,
    }
}

/// A dialer of the namespace, which checks at each connect that it is the namespace of an export
/// named `disk0`.
pub(crate) fn dialer<C: NvmeCarrier>(endpoint: NvmeEndpoint<C>) -> NvmeDialer<C> {
    let (name, description) = ("disk0".to_owned(), String::new());
    let volume = Arc::new(MemVolume::new(1 << 20));
    let (node, _) = node(&Exports::new(vec![Export { name, description, read_only: false, volume }]));
    let first = NamespaceInfo { write_cache: true, ..described(&node) };
    NvmeDialer::of(endpoint, first).expect("the system has random numbers")
}

/// The namespace as a host sees it, queried without a network.
fn described(node: &Arc<NvmeNode>) -> NamespaceInfo {
    let now = Instant::now();
    let config = AdminConfig {
        names: names(),
        credentials: None,
        queues: 1,
        query: ControllerQuery::Namespace(1),
        keep_alive: Duration::ZERO,
    };
    let mut host = NvmeTcpAdminSession::new(config, Digests::default(), Pool::new(1 << 20), now);
    let mut target = NvmeTcpTargetSession::new(node.clone(), Pool::new(1 << 20), now).at_port(1);
    while !host.is_over() {
        let sent = host.outbox().take_bytes();
        show(&mut target, &sent);
        let answer = target.outbox().take_bytes();
        assert!(!(sent.is_empty() && answer.is_empty()), "neither side sends anything");
        show(&mut host, &answer);
    }
    host.namespaces()[0].clone()
}

/// Passes all bytes to the session.
fn show(session: &mut impl StreamSession, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match session.demand() {
            Demand::Bytes(_) => {
                let parsed = session
                    .on_bytes(&Chunk::from_slice(bytes), Instant::now())
                    .expect("it keeps to the protocol");
                bytes = &bytes[parsed..];
            }
            Demand::Place(list) => {
                let (data, rest) = bytes.split_at(list.len());
                list.copy_from(data);
                session.on_placed(Instant::now()).expect("it keeps to the protocol");
                bytes = rest;
            }
            Demand::StartTls | Demand::Nothing | Demand::Close => return,
        }
    }
}

pub(crate) fn names() -> Names {
    Names { host: nqn("nqn.2026-11.test:host"), host_id: [7; 16], subsystem: nqn(SUBSYSTEM) }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).expect("a valid NQN")
}

const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
