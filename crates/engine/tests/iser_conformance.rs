//! The volume conformance suite over iSER on iWARP: the portal serves iSCSI, too, and a remote
//! volume is on the test's core.

mod conforms;
mod first_revision;
mod sides;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::iscsi::initiator::{
    Datamover, IscsiEndpoint, OverTcp, connect, discover, luns,
};
use blockmux_engine::protocol::iscsi::target;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::scsi::Lun;
use blockmux_volume::{MemVolume, Volume};
use conforms::{conforms, disk_and_frozen};
use sides::iscsi::{node, target_name};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Serves one volume, also as `frozen`, which refuses writes, until it is dropped.
struct Target {
    address: Address,
    _cores: Cores,
}

impl Target {
    fn serve() -> Target {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(SIZE));
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let address = listener.address().clone();
        let config = CoresConfig { policy: PollPolicy::Never, count: 2, ..CoresConfig::default() };
        let (cores, limit) = (Cores::start(&config).unwrap(), ConnectionLimit::new(64));
        let exports = disk_and_frozen(&volume);
        let (serve, inboxes) = (target::serve(&node(&exports), &exports, 1), cores.inboxes());
        cores.inboxes()[0].send(move |core| ListenerTask::spawn(core, listener, inboxes, serve, limit));
        Target { address, _cores: cores }
    }

    fn endpoint(&self, export: &str, proposal: OperationalParameters, connections: u32) -> IscsiEndpoint {
        IscsiEndpoint {
            address: self.address.clone(),
            further: Vec::new(),
            initiator: initiator(),
            target: target_name(export),
            lun: Lun::new(0),
            chap: None,
            current_chap: None,
            proposal,
            connections,
            reconnect_timeout: TIMEOUT,
            timeout: Some(TIMEOUT),
        }
    }

    fn volume(&self, export: &str, proposal: OperationalParameters, over: impl Datamover) -> Arc<dyn Volume> {
        Arc::new(connect(self.endpoint(export, proposal, 2), over).unwrap())
    }

    /// Runs the suite with these parameters proposed.
    fn conforms(&self, proposal: OperationalParameters, over: impl Datamover) {
        conforms(self.volume("disk", proposal, over.clone()), Some(self.volume("frozen", proposal, over)));
    }
}

fn initiator() -> Name {
    Name::new("iqn.2026-11.i:me").unwrap()
}

#[test]
fn a_ram_volume_conforms_over_iser() {
    Target::serve().conforms(default_proposal(), IwarpFabric::default());
}

#[test]
fn a_ram_volume_conforms_over_iser_with_crcs() {
    Target::serve().conforms(default_proposal(), IwarpFabric::new(true));
}

#[test]
fn a_ram_volume_conforms_with_rdma_reads_for_all_write_data() {
    let proposal =
        default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0);
    Target::serve().conforms(proposal, IwarpFabric::default());
}

#[test]
fn a_portal_of_iscsi_lists_its_targets_and_their_units_over_iser() {
    let target = Target::serve();
    let over = IwarpFabric::default();
    let (found, left_out) = discover(&target.address, &initiator(), None, &over).unwrap();
    let names: Vec<_> = found.iter().map(|target| target.name.as_str()).collect();
    assert_eq!((names, left_out), (vec!["iqn.2026-11.t:disk", "iqn.2026-11.t:frozen"], 0));
    let endpoint = IscsiEndpoint { lun: Lun::new(9), ..target.endpoint("disk", default_proposal(), 1) };
    assert_eq!(luns(&endpoint, &over).unwrap(), [Lun::new(0)]);
}

#[test]
fn one_port_serves_iscsi_and_iser() {
    let target = Target::serve();
    let over_tcp = target.volume("disk", default_proposal(), OverTcp);
    let over_rdma = target.volume("frozen", default_proposal(), IwarpFabric::default());
    conforms(over_tcp, Some(over_rdma));
    let over_rdma = target.volume("disk", default_proposal(), IwarpFabric::default());
    let over_tcp = target.volume("frozen", default_proposal(), OverTcp);
    conforms(over_rdma, Some(over_tcp));
}

#[test]
fn a_target_that_supports_only_mpa_revision_1_is_reached_by_it() {
    let target = Target::serve();
    let Address::Tcp(address) = target.address else { panic!("it listens on TCP") };
    let (address, over) = (first_revision::before(address), IwarpFabric::default());
    let (found, _) = discover(&address, &initiator(), None, &over).unwrap();
    assert_eq!(found.len(), 2);
    let volume = |export| {
        let endpoint =
            IscsiEndpoint { address: address.clone(), ..target.endpoint(export, default_proposal(), 1) };
        let volume: Arc<dyn Volume> = Arc::new(connect(endpoint, over.clone()).unwrap());
        volume
    };
    conforms(volume("disk"), Some(volume("frozen")));
}

#[test]
fn a_connection_that_begins_with_neither_protocol_is_closed() {
    let target = Target::serve();
    let Address::Tcp(address) = target.address else { panic!("it listens on TCP") };
    for begin in [&b""[..], b"MPA", b"MPA ID Req Fram3\x10\x02\0\0", b"MPA ID Req Frame\xff\xff\xff\xff"] {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.write_all(begin).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        // The connection may also be reset.
        let _ = socket.read_to_end(&mut rest);
        assert_eq!(rest, b"");
    }
}

const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
