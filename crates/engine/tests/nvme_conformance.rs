//! The volume conformance suite over NVMe/TCP: a target on cores of its own, and a remote volume on
//! the test's core.

mod conforms;
mod first_revision;
mod sides;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::nvme::GeneratedKeys;
use blockmux_engine::protocol::nvme::initiator::{
    NvmeCarrier, NvmeEndpoint, NvmeOverTcp, connect, namespaces,
};
use blockmux_engine::protocol::nvme::target;
use blockmux_engine::remote::{CurrentSecrets, Policy};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::volume::file::{FileOptions, FileVolume};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode, SecureChannel};
use blockmux_proto::fabrics::keyring::Keyring;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
use blockmux_proto::nvme::auth::{DhChapSecret, DhGroup, HostSecrets};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_tcp::client::{Digests, Names};
use blockmux_volume::{MemVolume, Volume};
use conforms::{conforms, disk_and_frozen};
use sides::iwarp;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Serves one volume as namespace 1, and as namespace 2, which refuses writes, until it is dropped.
struct Target {
    address: Address,
    _cores: Cores,
}

impl Target {
    fn serve(volume: Arc<dyn Volume>) -> Target {
        Target::of(volume, None, |node| node)
    }

    fn of(
        volume: Arc<dyn Volume>,
        secrets: Option<HostSecrets>,
        with: impl FnOnce(NvmeNode) -> NvmeNode,
    ) -> Target {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let address = listener.address().clone();
        // The queues of a controller are on both cores.
        let config = CoresConfig { policy: PollPolicy::Never, count: 2, ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        let exports = disk_and_frozen(&volume);
        let namespaces = exports.iter().zip(1..).map(|((id, export), nsid)| {
            let served = exports.volume_state(id).unwrap().clone();
            Namespace::new(nsid, id, served, export.read_only, VolumeUuid::of_texts(&[&export.name]))
        });
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "machine", namespaces.collect(), Vec::new());
        let subsystem =
            subsystem.with_secrets(secrets.map(|secrets| (nqn(HOST), secrets)).into_iter().collect());
        let port = FabricsPort::new(1, "127.0.0.1:4420".parse().unwrap());
        let node = Arc::new(with(NvmeNode::new(vec![Arc::new(subsystem)], vec![port], "machine")));
        let (serve, inboxes) = (target::serve(&node, 1, &exports, true), cores.inboxes());
        cores.inboxes()[0].send(move |core| {
            ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(64));
        });
        Target { address, _cores: cores }
    }

    fn endpoint(&self) -> NvmeEndpoint {
        self.endpoint_over(NvmeOverTcp::default())
    }

    fn endpoint_over<C>(&self, over: C) -> NvmeEndpoint<C> {
        NvmeEndpoint {
            address: self.address.clone(),
            further: Vec::new(),
            policy: Policy::RoundRobin,
            names: Names { host: nqn(HOST), host_id: [7; 16], subsystem: nqn(SUBSYSTEM) },
            secrets: None,
            nsid: 1,
            over,
            entries: 128,
            keep_alive: Duration::from_secs(5),
            queues: 1,
            reconnect_timeout: TIMEOUT,
            timeout: Some(TIMEOUT),
            tls_key: None,
            tls_identity: None,
            identity_order: Arc::default(),
            ktls: true,
            generated_keys: None,
        }
    }
}

/// Runs the suite over this endpoint.
fn conforms_at<C: NvmeCarrier>(endpoint: &NvmeEndpoint<C>) {
    let [volume, read_only] = [1, 2].map(|nsid| -> Arc<dyn Volume> {
        Arc::new(connect(NvmeEndpoint { nsid, ..endpoint.clone() }).unwrap())
    });
    conforms(volume, Some(read_only));
}

fn ram() -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(SIZE))
}

/// The DH-HMAC-CHAP secrets of host and controller.
fn both_secrets() -> HostSecrets {
    let [host, controller] = [SECRET, CTRL_SECRET].map(|text| DhChapSecret::parse(text).unwrap());
    HostSecrets { host, controller: Some(controller), hash: None, group: Some(DhGroup::Ffdhe2048) }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

#[test]
fn a_ram_volume_conforms_over_one_queue() {
    conforms_at(&Target::serve(ram()).endpoint());
}

#[test]
fn a_ram_volume_conforms_over_three_queues_with_digests() {
    let target = Target::serve(ram());
    let digests = Digests { header: true, data: true };
    conforms_at(&NvmeEndpoint { over: NvmeOverTcp { digests }, queues: 3, ..target.endpoint() });
}

#[test]
fn a_ram_volume_conforms_over_a_queue_of_few_entries_and_without_data_in_capsules() {
    let target = Target::of(ram(), None, |node| node.with_in_capsule(0));
    conforms_at(&NvmeEndpoint { entries: 3, ..target.endpoint() });
}

#[test]
fn a_ram_volume_conforms_over_rdma() {
    for (has_crc, is_plain, in_capsule) in [(false, false, 8192), (true, true, 0)] {
        let target = Target::of(ram(), None, |node| node.with_in_capsule(in_capsule));
        let endpoint = target.endpoint_over(iwarp(has_crc, is_plain));
        conforms_at(&NvmeEndpoint { queues: 3, ..endpoint.clone() });
        conforms_at(&NvmeEndpoint { entries: 3, further: vec![target.address.clone()], ..endpoint });
    }
}

#[test]
fn a_ram_volume_conforms_over_rdma_with_authentication() {
    let target = Target::of(ram(), Some(both_secrets()), |node| node);
    let stranger = target.endpoint_over(IwarpFabric::default());
    let refused = connect(stranger.clone()).err().expect("the host is not authenticated").to_string();
    assert!(refused.contains("secret"), "{refused}");
    conforms_at(&NvmeEndpoint {
        secrets: Some(CurrentSecrets::fixed(both_secrets())),
        queues: 2,
        ..stranger
    });
}

#[test]
fn a_controller_that_supports_only_mpa_revision_1_is_reached_by_it() {
    let target = Target::serve(ram());
    let Address::Tcp(address) = target.address else { panic!("it listens on TCP") };
    let address = first_revision::before(address);
    let endpoint = NvmeEndpoint { address, ..target.endpoint_over(IwarpFabric::default()) };
    assert_eq!(namespaces(&endpoint).unwrap().1.len(), 2);
    conforms_at(&NvmeEndpoint { queues: 3, ..endpoint.clone() });
    conforms_at(&NvmeEndpoint { further: vec![endpoint.address.clone()], ..endpoint });
}

#[test]
fn a_file_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions { size: Some(SIZE), create: true, ..FileOptions::default() };
    let file = FileVolume::open(folder.path().join("disk"), options).unwrap();
    let target = Target::serve(Arc::new(file));
    conforms_at(&NvmeEndpoint { queues: 2, ..target.endpoint() });
}

#[test]
fn a_ram_volume_conforms_over_two_paths_and_over_tls() {
    let target = Target::serve(ram());
    conforms_at(&NvmeEndpoint { further: vec![target.address.clone()], ..target.endpoint() });
    let key = ConfiguredPsk::parse(KEY).unwrap();
    let keyring = Keyring::default();
    keyring.insert(&key.retained(&nqn(HOST)), &nqn(HOST), &nqn(SUBSYSTEM), Instant::now());
    let target = Target::of(ram(), None, |node| node.with_tls(Arc::new(keyring), SecureChannel::Required));
    conforms_at(&NvmeEndpoint { tls_key: Some(CurrentSecrets::fixed(key)), queues: 2, ..target.endpoint() });
}

#[test]
fn a_ram_volume_conforms_with_generated_tls_keys_that_its_channels_share() {
    let secrets = both_secrets();
    let tls = |node: NvmeNode| node.with_tls(Arc::default(), SecureChannel::NotRequired);
    let target = Target::of(ram(), Some(secrets.clone()), tls);
    let generated_keys = Some(Arc::new(GeneratedKeys::default()));
    let secrets = Some(CurrentSecrets::fixed(secrets));
    let further = vec![target.address.clone()];
    conforms_at(&NvmeEndpoint { secrets, generated_keys, further, queues: 2, ..target.endpoint() });
}

const HOST: &str = "nqn.2026-11.test:host";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
/// The key in libnvme's tests.
const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
/// Generated by nvme-cli.
const SECRET: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const CTRL_SECRET: &str = "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:";
const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
