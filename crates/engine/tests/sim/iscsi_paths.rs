//! Several paths to one iSCSI unit: what requests do when a path is lost, or not accessible for a
//! while.

use crate::sides::iscsi::{IscsiDialer, target_name};
use crate::sides::listen;
use crate::two_paths::{
    Client, Paths, RECONNECT_TIMEOUT, SIZE, Slow, address, check_loss_of_both_paths, check_loss_of_one_path,
};
use blockmux_engine::remote::{self, Dialer, Opening, RemoteVolume};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::driver::session::{NoControl, RetryRules};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, default_proposal};
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::scsi::{LogicalUnit, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_volume::{Core, IoError, ReadyList, Volume, VolumeInfo};
use blockmux_wire::scsi::alua::AccessState;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Connects to one target at two portals.
struct TwoPaths(IscsiDialer);

impl Dialer for TwoPaths {
    type Session = IscsiInitiatorSession;
    type Control = NoControl;

    fn paths(&self) -> &remote::Paths {
        self.0.paths()
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> IscsiInitiatorSession {
        self.0.session(opening).with_retries(RetryRules { has_other_paths: true, ..RetryRules::default() })
    }

    fn check(&self, session: &IscsiInitiatorSession) -> Result<(), String> {
        self.0.check(session)
    }

    fn refusal(&self, session: &IscsiInitiatorSession) -> Option<String> {
        self.0.refusal(session)
    }
}

/// One target with two portals, each on a core of its own, and a client.
struct TwoPortals {
    node: Arc<IscsiNode>,
    unit: Arc<LogicalUnit>,
    exports: [Exports; 2],
    cores: [Rc<SimCore>; 2],
    client: Client,
}

impl TwoPortals {
    fn new(seed: u64) -> TwoPortals {
        let Slow { volume: below, exports, counts, .. } = Slow::new(Duration::ZERO);
        let unit = LogicalUnit::new(UnitIdentity::of("disk0"), below);
        let (id, _) = exports[0].iter().next().unwrap();
        let name = target_name("disk0");
        let port =
            |group| TargetPort { relative_id: group, group, name: format!("{name},t,0x{group:04x}").into() };
        let view = ScsiTarget::new(name.as_str(), vec![port(1), port(2)]).with_unit(0, id, unit.clone());
        let access = IscsiAccess { initiator: None, chap: None, target: Arc::new(view) };
        let portals = [1, 2].map(|number| Portal {
            address: "192.0.2.1:3260".parse().unwrap(),
            listener: number,
            group_tag: number,
        });
        let node =
            Arc::new(IscsiNode::new(vec![TargetNode::new(name.clone(), portals.into(), vec![access])]));
        let mut world = World::new(SimNet::new(seed, NetworkConditions::FAIR));
        let cores = [0, 1].map(|_| world.add_core(16 << 20));
        let core: Rc<dyn Core> = world.add_core(16 << 20);
        let mut dialer = IscsiDialer::new(&address(0), "disk0", default_proposal());
        dialer.paths.addresses.push(address(1));
        let dialer = TwoPaths(dialer);
        let info = VolumeInfo { lends_reads: true, ..VolumeInfo::new(SIZE) };
        let volume = RemoteVolume::<_, SimCore>::new(dialer, info, 1, RECONNECT_TIMEOUT);
        let channel = volume.open(&core, 64, ReadyList::new().waker(0)).unwrap();
        let client = Client { world, channel, counts };
        let mut paths = TwoPortals { node, unit, exports, cores, client };
        (0..2).for_each(|path| paths.start(path));
        paths.client.run(1000);
        paths
    }
}

impl Paths for TwoPortals {
    fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    fn start(&mut self, path: usize) {
        let core = self.client.world.add_core(16 << 20);
        let node = self.node.clone();
        listen(&self.client.world, &core, &address(path), &self.exports[path], move |pool, now| {
            IscsiTargetSession::new(node.clone(), path as u16 + 1, pool, [3; 32], now)
        });
        self.cores[path] = core;
    }

    fn kill(&mut self, path: usize) {
        self.cores[path].kill();
    }
}

#[test]
fn requests_of_a_lost_path_continue_on_the_other_until_it_is_restored() {
    check_loss_of_one_path(TwoPortals::new);
}

#[test]
fn without_a_path_requests_fail_after_the_timeout_and_later_ones_use_the_first_restored_path() {
    check_loss_of_both_paths(TwoPortals::new(1));
}

#[test]
fn the_preferred_path_is_used_and_an_inaccessible_one_is_not() {
    let mut paths = TwoPortals::new(1);
    paths.unit.set_access_state(2, AccessState::ACTIVE_NON_OPTIMIZED);
    // The first command over each path gets the unit attention, and then the state is queried.
    paths.client.write(1);
    paths.client.expect_success();
    paths.client.run(2000);
    paths.client.counts();
    paths.client.write(2);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [32, 0]);
    paths.unit.set_access_state(1, AccessState::STANDBY);
    paths.client.write(3);
    paths.client.expect_success();
    paths.client.holds(3);
    paths.client.counts();
    paths.unit.set_access_state(2, AccessState::UNAVAILABLE);
    paths.unit.set_access_state(1, AccessState::ACTIVE_OPTIMIZED);
    paths.client.run(3000);
    paths.client.write(4);
    paths.client.run(2000);
    paths.client.expect_success();
    paths.client.holds(4);
    assert!(paths.client.counts()[0] >= 64);
}

#[test]
fn requests_wait_for_an_accessible_path_and_fail_after_the_timeout() {
    let mut paths = TwoPortals::new(1);
    for group in [1, 2] {
        paths.unit.set_access_state(group, AccessState::STANDBY);
    }
    paths.client.write(1);
    assert_eq!(paths.client.ended(), []);
    paths.unit.set_access_state(2, AccessState::ACTIVE_OPTIMIZED);
    paths.client.run(2000);
    paths.client.expect_success();
    paths.client.holds(1);
    paths.unit.set_access_state(2, AccessState::UNAVAILABLE);
    paths.client.write(2);
    assert_eq!(paths.client.ended(), []);
    paths.client.run(10_000);
    assert_eq!(paths.client.ended(), vec![Err(IoError::PathLost); 32]);
}

#[test]
fn a_path_in_standby_at_login_is_used_once_it_is_active() {
    let mut paths = TwoPortals::new(1);
    paths.kill(1);
    paths.client.run(1000);
    paths.unit.set_access_state(2, AccessState::STANDBY);
    paths.start(1);
    paths.client.run(10_000);
    paths.client.counts();
    paths.client.write(1);
    paths.client.expect_success();
    assert_eq!(paths.client.counts(), [32, 0]);
    // The target fails over: the path that was in standby is the only usable one.
    paths.unit.set_access_state(2, AccessState::ACTIVE_OPTIMIZED);
    paths.unit.set_access_state(1, AccessState::STANDBY);
    paths.client.write(2);
    let done: Vec<_> = (0..4).flat_map(|_| paths.client.ended()).collect();
    assert_eq!(done, vec![Ok(()); 32]);
    paths.client.holds(2);
    assert!(paths.client.counts()[1] >= 32);
}
