//! The suite of all volumes over iSCSI: a target on a core of its own, and a remote volume on the test's core.

mod conforms;
mod iscsi_sides;

use blockmux_engine::blocking::run_session;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::file::{FileOptions, FileVolume};
use blockmux_engine::initiator::RemoteVolume;
use blockmux_engine::initiator::iscsi::{Endpoint, connect, discover, luns};
use blockmux_engine::iscsi;
use blockmux_engine::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::socket::{Address, Listener};
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::initiator::{InitiatorSession, Mode, wishes};
use blockmux_proto::iscsi::login::operational::{CRC32C, Key, Parameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::scsi::Lun;
use blockmux_volume::{MemVolume, Pool, Volume};
use conforms::conforms;
use iscsi_sides::{IscsiDialer, node, target_name};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Serves one volume, also as `frozen`, which refuses writes; it ends when dropped.
struct Target {
    address: Address,
    _cores: Cores,
}

impl Target {
    fn serve(volume: Arc<dyn Volume>) -> Target {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let address = listener.address().clone();
        let cores =
            Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() }).unwrap();
        let exports = [("disk", false), ("frozen", true)].map(|(name, read_only)| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only,
            volume: volume.clone(),
        });
        let exports = Exports::new(exports.into());
        let (serve, inboxes) = (iscsi::serve(&node(&exports), &exports, 1), cores.inboxes());
        cores.inboxes()[0].send(move |core| {
            ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(64));
        });
        Target { address, _cores: cores }
    }

    /// Runs the suite with these wishes.
    fn conforms(&self, wishes: Parameters, connections: u32) {
        let [volume, read_only] = ["disk", "frozen"].map(|export| -> Arc<dyn Volume> {
            let dialer = IscsiDialer { address: self.address.clone(), export, wishes };
            let mut session = dialer.log_in(Mode::Describe, u32::MAX, &Pool::new(1 << 20), Instant::now());
            run_session(&self.address, &mut session, PATIENCE, InitiatorSession::is_over).unwrap();
            let info = session.volume_info().unwrap();
            Arc::new(RemoteVolume::<_>::new(dialer, info, connections, PATIENCE))
        });
        conforms(volume, read_only);
    }
}

fn ram() -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(SIZE))
}

#[test]
fn a_ram_volume_conforms_over_one_session() {
    Target::serve(ram()).conforms(wishes(), 1);
}

#[test]
fn a_ram_volume_conforms_over_three_sessions_with_digests() {
    let digests = wishes().with(Key::HeaderDigest, CRC32C).with(Key::DataDigest, CRC32C);
    Target::serve(ram()).conforms(digests, 3);
}

#[test]
fn a_ram_volume_conforms_when_every_write_is_asked_for_and_cut_small() {
    let slow = wishes()
        .with(Key::InitialR2T, 1)
        .with(Key::ImmediateData, 0)
        .with(Key::FirstBurstLength, 64 << 10)
        .with(Key::MaxBurstLength, 64 << 10)
        .with(Key::MaxRecvDataSegmentLength, 8 << 10);
    Target::serve(ram()).conforms(slow, 1);
}

#[test]
fn a_file_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions { size: Some(SIZE), create: true, ..FileOptions::default() };
    let file = FileVolume::open(folder.path().join("disk"), options).unwrap();
    Target::serve(Arc::new(file)).conforms(wishes(), 2);
}

#[test]
fn what_an_endpoint_names_is_found_and_conforms() {
    let target = Target::serve(ram());
    let initiator = Name::new("iqn.2026-11.i:me").unwrap();
    let (found, left_out) = discover(&target.address, &initiator, None).unwrap();
    let names: Vec<_> = found.iter().map(|target| target.name.as_str()).collect();
    assert_eq!((names, left_out), (vec!["iqn.2026-11.t:disk", "iqn.2026-11.t:frozen"], 0));
    let endpoint = |export| Endpoint {
        address: target.address.clone(),
        initiator: initiator.clone(),
        target: target_name(export),
        lun: Lun::new(0),
        chap: None,
        wishes: wishes(),
        connections: 2,
        patience: PATIENCE,
    };
    assert_eq!(luns(&Endpoint { lun: Lun::new(9), ..endpoint("disk") }).unwrap(), [Lun::new(0)]);
    let [volume, read_only] =
        ["disk", "frozen"].map(|export| -> Arc<dyn Volume> { Arc::new(connect(endpoint(export)).unwrap()) });
    conforms(volume, read_only);
}

const PATIENCE: Duration = Duration::from_secs(30);
/// Room for the largest transfer and more.
const SIZE: u64 = 40 << 20;
