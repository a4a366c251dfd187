//! Several paths to one NVMe namespace: what requests do when a path is lost, or not accessible for
//! a while.

use crate::sides::listen;
use crate::sides::nvme::{GROUP, dialer, endpoint, node};
use crate::two_paths::{
    Client, Paths, RECONNECT_TIMEOUT, SIZE, Slow, address, check_loss_of_both_paths, check_loss_of_one_path,
};
use blockmux_engine::protocol::nvme::initiator::NvmeEndpoint;
use blockmux_engine::remote::{Policy, RemoteVolume};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::nvme::subsystem::Subsystem;
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_volume::{Core, IoError, ReadyList, Volume, VolumeInfo};
use blockmux_wire::nvme::log::AnaState;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One subsystem with two ports, each on a core of its own, and a client.
struct TwoPorts {
    node: Arc<NvmeNode>,
    subsystem: Arc<Subsystem>,
    exports: [Exports; 2],
    cores: [Rc<SimCore>; 2],
    client: Client,
    loses: [Arc<AtomicBool>; 2],
}

impl TwoPorts {
    fn new(seed: u64, policy: Policy) -> TwoPorts {
        TwoPorts::unequal(seed, policy, Duration::ZERO)
    }

    /// Requests over the second port take this much longer.
    fn unequal(seed: u64, policy: Policy, longer: Duration) -> TwoPorts {
        let Slow { exports, counts, loses, .. } = Slow::new(longer);
        let (node, subsystem) = node(&exports[0]);
        let mut world = World::new(SimNet::new(seed, NetworkConditions::FAIR));
        let cores = [0, 1].map(|_| world.add_core(16 << 20));
        let core: Rc<dyn Core> = world.add_core(16 << 20);
        let dialer = dialer(NvmeEndpoint { policy, ..endpoint(&[address(0), address(1)]) });
        let info = VolumeInfo { lends_reads: true, ..VolumeInfo::new(SIZE) };
        let volume = RemoteVolume::<_, SimCore>::new(dialer, info, 1, RECONNECT_TIMEOUT);
        let channel = volume.open(&core, 64, ReadyList::new().waker(0)).unwrap();
        let client = Client { world, channel, counts };
        let mut paths = TwoPorts { node, subsystem, exports, cores, client, loses };
        (0..2).for_each(|path| paths.start(path));
        paths.client.run(1000);
        paths
    }

    fn set(&mut self, path: usize, state: AnaState) {
        self.subsystem.set_ana_state(GROUP, path as u16 + 1, state);
    }
}

impl Paths for TwoPorts {
    fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    fn start(&mut self, path: usize) {
        let core = self.client.world.add_core(16 << 20);
        let node = self.node.clone();
        listen(&self.client.world, &core, &address(path), &self.exports[path], move |pool, now| {
            NvmeTcpTargetSession::new(node.clone(), pool, now).at_port(path as u16 + 1)
        });
        self.cores[path] = core;
    }

    fn kill(&mut self, path: usize) {
        self.cores[path].kill();
    }
}

#[test]
fn requests_of_a_lost_path_continue_on_the_other_until_it_is_restored() {
    check_loss_of_one_path(|seed| TwoPorts::new(seed, Policy::RoundRobin));
}

#[test]
fn without_a_path_requests_fail_after_the_timeout_and_later_ones_use_the_first_restored_path() {
    check_loss_of_both_paths(TwoPorts::new(1, Policy::RoundRobin));
}

#[test]
fn the_optimized_path_is_used_first_and_ana_changes_are_followed() {
    let mut paths = TwoPorts::new(1, Policy::RoundRobin);
    paths.set(1, AnaState::NON_OPTIMIZED);
    paths.client.run(500);
    paths.client.write(1);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [32, 0]);
    paths.set(0, AnaState::INACCESSIBLE);
    paths.client.run(500);
    paths.client.write(2);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [0, 32], "the change was reported before any request");
    paths.set(0, AnaState::OPTIMIZED);
    paths.client.run(500);
    paths.client.write(3);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [32, 0]);
    paths.client.holds(3);
}

#[test]
fn requests_that_fail_with_an_unreported_ana_change_use_the_other_path() {
    for state in [AnaState::INACCESSIBLE, AnaState::CHANGE, AnaState::PERSISTENT_LOSS] {
        let mut paths = TwoPorts::new(1, Policy::RoundRobin);
        paths.set(0, state);
        paths.client.write(1);
        paths.client.expect_success();
        assert_eq!(paths.client.counts(), [0, 32]);
        paths.client.holds(1);
    }
}

#[test]
fn requests_wait_for_an_accessible_path_and_fail_after_the_timeout() {
    let mut paths = TwoPorts::new(1, Policy::RoundRobin);
    for path in [0, 1] {
        paths.set(path, AnaState::INACCESSIBLE);
    }
    paths.client.write(1);
    assert_eq!(paths.client.ended(), []);
    paths.set(1, AnaState::OPTIMIZED);
    paths.client.run(2000);
    paths.client.expect_success();
    paths.client.holds(1);
    paths.set(1, AnaState::INACCESSIBLE);
    paths.client.write(2);
    assert_eq!(paths.client.ended(), []);
    paths.client.run(10_000);
    assert_eq!(paths.client.ended(), vec![Err(IoError::PathLost); 32]);
}

#[test]
fn requests_that_fail_on_one_path_use_the_other_at_once_and_the_path_is_tried_again() {
    for seed in 0..10 {
        let mut paths = TwoPorts::new(seed, Policy::RoundRobin);
        paths.loses[0].store(true, Ordering::Relaxed);
        paths.client.write(1);
        paths.client.expect_success();
        paths.client.holds(1);
        let [lost, done] = paths.client.counts();
        assert!(lost >= 16 && done == 32 + 32, "{lost} were lost, and {done} done");
        paths.loses[0].store(false, Ordering::Relaxed);
        paths.client.run(2000);
        paths.client.write(2);
        paths.client.expect_success();
        assert_eq!(paths.client.counts(), [16, 16], "round-robin again");
        paths.client.holds(2);
    }
}

#[test]
fn requests_that_fail_on_all_paths_are_retried_slowly_and_fail_after_the_timeout() {
    let mut paths = TwoPorts::new(1, Policy::RoundRobin);
    paths.loses.iter().for_each(|loses| loses.store(true, Ordering::Relaxed));
    paths.client.write(1);
    assert_eq!(paths.client.ended(), []);
    let mut ended = Vec::new();
    for _ in 0..6 {
        ended.extend(paths.client.ended());
    }
    assert_eq!(ended, vec![Err(IoError::PathLost); 32]);
    let tries: usize = paths.client.counts().iter().sum();
    assert!(tries < 32 * 40, "{tries} tries of 32 writes in {RECONNECT_TIMEOUT:?}");
    paths.loses[1].store(false, Ordering::Relaxed);
    paths.client.run(2000);
    paths.client.write(2);
    paths.client.expect_success();
    paths.client.holds(2);
}

#[test]
fn requests_that_fail_on_the_only_path_are_retried_and_fail_after_the_timeout() {
    let mut paths = TwoPorts::new(1, Policy::RoundRobin);
    paths.kill(1);
    paths.client.run(1000);
    paths.client.counts();
    paths.loses[0].store(true, Ordering::Relaxed);
    paths.client.write(1);
    assert_eq!(paths.client.ended(), []);
    paths.loses[0].store(false, Ordering::Relaxed);
    paths.client.run(2000);
    paths.client.expect_success();
    paths.client.holds(1);
    paths.loses[0].store(true, Ordering::Relaxed);
    paths.client.write(2);
    let ended: Vec<_> = (0..7).flat_map(|_| paths.client.ended()).collect();
    assert_eq!(ended, vec![Err(IoError::PathLost); 32]);
    let tries = paths.client.counts()[0];
    assert!(tries < 32 * 25, "{tries} tries of 32 writes in {RECONNECT_TIMEOUT:?}");
}

#[test]
fn a_path_that_is_inaccessible_at_connect_is_used_once_it_is_optimized() {
    let mut paths = TwoPorts::new(1, Policy::RoundRobin);
    paths.kill(1);
    paths.client.run(1000);
    paths.set(1, AnaState::INACCESSIBLE);
    paths.start(1);
    paths.client.run(10_000);
    paths.client.counts();
    paths.client.write(1);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [32, 0]);
    paths.set(1, AnaState::OPTIMIZED);
    paths.set(0, AnaState::INACCESSIBLE);
    paths.client.write(2);
    let done: Vec<_> = (0..4).flat_map(|_| paths.client.ended()).collect();
    assert_eq!(done, vec![Ok(()); 32]);
    paths.client.holds(2);
    assert!(paths.client.counts()[1] >= 32);
}

#[test]
fn with_queue_depth_the_less_loaded_path_gets_more_requests() {
    for (policy, expected) in [(Policy::RoundRobin, [16, 16]), (Policy::QueueDepth, [24, 8])] {
        let mut paths = TwoPorts::unequal(1, policy, Duration::from_millis(500));
        paths.client.write(1);
        // The requests of the first path have completed, and those of the second one are all in
        // flight.
        paths.client.run(100);
        assert_eq!(paths.client.counts(), [16, 16]);
        assert_eq!(paths.client.polled(), 16);
        paths.client.write(2);
        paths.client.run(100);
        assert_eq!(paths.client.counts(), expected, "{policy:?}");
    }
}
