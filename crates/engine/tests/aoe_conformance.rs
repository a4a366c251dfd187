//! The volume conformance suite over AoE: a target on its own cores, and a remote disk on the
//! test's core, both on the loopback interface of a private network namespace.

mod conforms;
mod own_network;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::protocol::aoe::{AoeEndpoint, Share, connect, serve};
use blockmux_engine::serve::sessions::Sessions;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::disks::AoeDisks;
use blockmux_proto::aoe::unit::{AoeUnit, DiskSettings};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{MemVolume, Volume};
use conforms::conforms;
use own_network::is_in_own_network;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Runs the suite. An AoE disk cannot report that it is read-only; only a refused write shows it.
fn conforms_over_frames(volume: Arc<dyn Volume>) {
    let (name, description) = ("disk".to_owned(), String::new());
    let exports = Exports::new(vec![Export { name, description, read_only: false, volume }]);
    let address = AoeAddress { shelf: 0, slot: 0 };
    let units = exports.iter().map(|(id, _)| AoeUnit::new(address, id, DiskSettings::default(), None));
    let disks = AoeDisks::everywhere(units.collect());
    let cores = Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() }).unwrap();
    let (sender, served) = mpsc::channel();
    cores.inboxes()[0].send(move |core| {
        let result = serve(core, &[LOOPBACK.to_owned()], Share::ALL, exports, disks, Sessions::default());
        sender.send(result).unwrap();
    });
    served.recv().unwrap().unwrap();
    let endpoint = AoeEndpoint { interfaces: vec![LOOPBACK.to_owned()], address, timeout: TIMEOUT };
    conforms(Arc::new(connect(endpoint).unwrap()), None);
}

#[test]
fn a_ram_volume_conforms_over_long_frames() {
    if is_in_own_network("a_ram_volume_conforms_over_long_frames", "ip link set lo mtu 9000 up") {
        conforms_over_frames(Arc::new(MemVolume::new(SIZE)));
    }
}

#[test]
fn a_ram_volume_conforms_over_frames_of_two_sectors() {
    if is_in_own_network("a_ram_volume_conforms_over_frames_of_two_sectors", "ip link set lo mtu 1500 up") {
        conforms_over_frames(Arc::new(MemVolume::new(SIZE)));
    }
}

const LOOPBACK: &str = "lo";
const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
