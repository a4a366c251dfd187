//! The volume conformance suite over AoE: a target on its own cores, and a remote disk on the
//! test's core, both on the loopback interface of a private network namespace.
//!
//! Each test runs itself again in such a namespace, which needs user namespaces or root. Without
//! both it prints a line that begins with `skipped: ` and ends.

mod conforms;

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
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Whether the test runs in its own network namespace, with this MTU. Otherwise the call has run it
/// there, or it was skipped.
#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn is_in_own_network(test: &str, mtu: u32) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let up = format!("ip link set lo mtu {mtu} up");
    let alone = |then: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", &format!("{up} && {then}"), "sh"]);
        command
    };
    if !alone("true").output().is_ok_and(|made| made.status.success()) {
        println!("skipped: cannot create a private network namespace");
        return false;
    }
    let own = std::env::current_exe().unwrap();
    let mut again = alone("exec \"$@\"");
    let status = again.arg(own).args(["--exact", test, "--nocapture"]).env(INSIDE, "1").status().unwrap();
    assert!(status.success(), "it failed in a network of its own");
    false
}

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
    if is_in_own_network("a_ram_volume_conforms_over_long_frames", 9000) {
        conforms_over_frames(Arc::new(MemVolume::new(SIZE)));
    }
}

#[test]
fn a_ram_volume_conforms_over_frames_of_two_sectors() {
    if is_in_own_network("a_ram_volume_conforms_over_frames_of_two_sectors", 1500) {
        conforms_over_frames(Arc::new(MemVolume::new(SIZE)));
    }
}

const LOOPBACK: &str = "lo";
/// Set in the process that runs in the namespace.
const INSIDE: &str = "BLOCKMUX_AOE_CONFORMANCE";
const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
