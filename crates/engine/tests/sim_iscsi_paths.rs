//! Several paths to one iSCSI unit: what becomes of requests when one is lost, or is none for a while.

#[allow(dead_code, reason = "the node of these tests has two portal groups")]
mod iscsi_dialer;
mod iscsi_names;

use blockmux_engine::initiator::{Dialer, RemoteVolume};
use blockmux_engine::listener::ConnectionLimit;
use blockmux_engine::sim::{SimCore, SimNet, Weather, World};
use blockmux_engine::socket::Address;
use blockmux_engine::target::TargetTask;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::initiator::{InitiatorSession, Mode, wishes};
use blockmux_proto::iscsi::node::{Access, Node, Portal, TargetNode};
use blockmux_proto::iscsi::target::TargetSession;
use blockmux_proto::scsi::{Identity, LogicalUnit, Target, TargetPort};
use blockmux_proto::session::NoControl;
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Op, Pool, ReadyList, Seg, SgList,
    Tag, Volume, VolumeInfo, Waker,
};
use blockmux_wire::scsi::alua::AccessState;
use iscsi_dialer::IscsiDialer;
use iscsi_names::target_name;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SIZE: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(5);

/// Dials one target by two portals.
struct TwoPaths([IscsiDialer; 2]);

impl Dialer for TwoPaths {
    type Session = InitiatorSession;
    type Control = NoControl;

    fn address(&self) -> &Address {
        &self.0[0].address
    }

    fn paths(&self) -> usize {
        2
    }

    fn path(&self, path: usize) -> &Address {
        &self.0[path].address
    }

    fn session(
        &self,
        link: u32,
        _control: Option<&NoControl>,
        pool: &Pool,
        now: Instant,
    ) -> InitiatorSession {
        self.0[0].log_in(Mode::Use, link, pool, now).with_other_paths()
    }

    fn check(&self, session: &InitiatorSession) -> Result<(), String> {
        self.0[0].check(session)
    }

    fn refusal(&self, session: &InitiatorSession) -> Option<String> {
        self.0[0].refusal(session)
    }
}

/// A volume as one portal sees it: counts what is read and written through it.
struct Counted {
    below: Arc<dyn Volume>,
    count: Arc<AtomicUsize>,
}

struct CountedChannel {
    below: Box<dyn Channel>,
    count: Arc<AtomicUsize>,
}

impl Volume for Counted {
    fn info(&self) -> VolumeInfo {
        self.below.info()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let below = self.below.open(core, depth, waker)?;
        Ok(Box::new(CountedChannel { below, count: self.count.clone() }))
    }
}

impl Channel for CountedChannel {
    fn submit(&mut self, io: Io) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.below.submit(io);
    }

    fn kick(&mut self) {
        self.below.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.below.poll(done);
    }
}

/// One target behind two portals, each on a core of its own, and a client.
struct Paths {
    world: World,
    node: Arc<Node>,
    unit: Arc<LogicalUnit>,
    exports: [Exports; 2],
    counts: [Arc<AtomicUsize>; 2],
    cores: [Rc<SimCore>; 2],
    channel: Box<dyn Channel>,
}

fn address(path: usize) -> Address {
    Address::Unix(format!("/path{path}").into())
}

impl Paths {
    fn new(seed: u64) -> Paths {
        let slow =
            Delays { read: Duration::from_millis(2), write: Duration::from_millis(2), ..Delays::default() };
        let below: Arc<dyn Volume> = Arc::new(DelayVolume::new(Arc::new(MemVolume::new(SIZE)), slow));
        let counts = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
        let exports = counts.each_ref().map(|count| {
            let volume = Arc::new(Counted { below: below.clone(), count: count.clone() });
            let (name, description) = ("disk0".to_owned(), String::new());
            Exports::new(vec![Export { name, description, read_only: false, volume }])
        });
        let unit = LogicalUnit::new(Identity::of("disk0"), below);
        let (id, _) = exports[0].iter().next().unwrap();
        let name = target_name("disk0");
        let port =
            |group| TargetPort { relative_id: group, group, name: format!("{name},t,0x{group:04x}").into() };
        let view = Target::new(name.as_str(), vec![port(1), port(2)]).with_unit(0, id, unit.clone());
        let access = Access { initiator: None, chap: None, target: Arc::new(view) };
        let portals = [1, 2].map(|group_tag| Portal { address: "192.0.2.1:3260".to_owned(), group_tag });
        let node = Arc::new(Node::new(vec![TargetNode::new(name.clone(), portals.into(), vec![access])]));
        let mut world = World::new(SimNet::new(seed, Weather::FAIR));
        let cores = [0, 1].map(|_| world.add_core(16 << 20));
        let core: Rc<dyn Core> = world.add_core(16 << 20);
        let dialer = TwoPaths([0, 1].map(|path| IscsiDialer::new(&address(path), "disk0", wishes())));
        let info = VolumeInfo { lends_reads: true, ..VolumeInfo::new(SIZE) };
        let volume = RemoteVolume::<_, SimCore>::new(dialer, info, 1, PATIENCE);
        let channel = volume.open(&core, 64, ReadyList::new().waker(0)).unwrap();
        let mut paths = Paths { world, node, unit, exports, counts, cores, channel };
        (0..2).for_each(|path| paths.start(path));
        paths.run(1000);
        paths
    }

    fn start(&mut self, path: usize) {
        let core = self.world.add_core(16 << 20);
        let (node, exports) = (self.node.clone(), self.exports[path].clone());
        let limit = ConnectionLimit::new(usize::MAX);
        self.world.net().listen(&core, &address(path), move |core, stream| {
            let group_tag = path as u16 + 1;
            let session =
                TargetSession::new(node.clone(), group_tag, core.pool().clone(), [3; 32], core.now());
            let permit = limit.permit().expect("there is no limit");
            TargetTask::spawn(core, stream, session, exports.clone(), permit);
        });
        self.cores[path] = core;
    }

    fn kill(&mut self, path: usize) {
        self.cores[path].kill();
    }

    fn run(&mut self, ms: u64) {
        self.world.run_for(Duration::from_millis(ms)).unwrap();
    }

    /// Submits a write of `value` to each of 32 blocks.
    fn write(&mut self, value: u8) {
        for block in 0..32_u64 {
            let data = Some(SgList::one(Seg::from_slice(&[value; 4096])));
            let op = Op::Write { fua: false };
            self.channel.submit(Io { tag: Tag(block), op, offset: block * 4096, len: 4096, data });
        }
        self.channel.kick();
    }

    /// How requests have ended since the last call; each tag once.
    fn ended(&mut self) -> Vec<Result<(), IoError>> {
        let mut done = Vec::new();
        // What has to go by another path is sent there by whoever polls.
        for _ in 0..20 {
            self.channel.poll(&mut done);
            self.channel.kick();
            self.run(50);
        }
        let mut tags: Vec<_> = done.iter().map(|done| done.tag.0).collect();
        tags.sort_unstable();
        assert!(tags.windows(2).all(|pair| pair[0] < pair[1]), "a request completes once");
        done.into_iter().map(|done| done.result.map(|_| ())).collect()
    }

    fn all_end_well(&mut self) {
        assert_eq!(self.ended(), vec![Ok(()); 32]);
    }

    /// That every block has been written last with `value`.
    fn holds(&mut self, value: u8) {
        for block in 0..32 {
            self.channel.submit(Io::new(Tag(block), Op::Read, block * 4096, 4096));
        }
        self.channel.kick();
        let mut done = Vec::new();
        for _ in 0..20 {
            self.run(50);
            self.channel.poll(&mut done);
            self.channel.kick();
        }
        assert_eq!(done.len(), 32);
        for done in done {
            assert!(done.result.unwrap().into_data().to_vec() == [value; 4096]);
        }
    }

    /// What went through each portal since the last call.
    fn counts(&self) -> [usize; 2] {
        self.counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed))
    }
}

#[test]
fn what_was_under_way_by_a_lost_path_goes_on_by_the_other_and_it_is_used_again_when_it_is_back() {
    for seed in 0..20 {
        let mut paths = Paths::new(seed);
        paths.write(1);
        paths.all_end_well();
        let [first, second] = paths.counts();
        assert!(first == 16 && second == 16, "{first} and {second}: in turn");
        paths.write(2);
        paths.run(seed % 3);
        paths.kill(0);
        paths.all_end_well();
        paths.holds(2);
        paths.counts();
        paths.write(3);
        paths.all_end_well();
        assert_eq!(paths.counts(), [0, 32]);
        paths.start(0);
        paths.run(10_000);
        paths.write(4);
        paths.run(1);
        paths.kill(1);
        paths.all_end_well();
        paths.holds(4);
        assert!(paths.counts()[0] > 0);
    }
}

#[test]
fn when_no_path_is_left_requests_fail_after_patience_and_later_ones_find_the_first_that_is_back() {
    let mut paths = Paths::new(1);
    paths.kill(0);
    paths.kill(1);
    paths.write(1);
    assert_eq!(paths.ended(), []);
    paths.run(12_000);
    assert_eq!(paths.ended(), vec![Err(IoError::PathLost); 32]);
    paths.start(1);
    paths.write(2);
    paths.run(5000);
    paths.all_end_well();
    paths.holds(2);
}

#[test]
fn the_path_that_the_target_prefers_is_used_and_one_that_is_none_just_now_is_not() {
    let mut paths = Paths::new(1);
    paths.unit.set_access_state(2, AccessState::ACTIVE_NON_OPTIMIZED);
    // The first command by each path meets the attention, and then the state is asked for.
    paths.write(1);
    paths.all_end_well();
    paths.run(2000);
    paths.counts();
    paths.write(2);
    paths.all_end_well();
    assert_eq!(paths.counts(), [32, 0]);
    paths.unit.set_access_state(1, AccessState::STANDBY);
    paths.write(3);
    paths.all_end_well();
    paths.holds(3);
    paths.counts();
    paths.unit.set_access_state(2, AccessState::UNAVAILABLE);
    paths.unit.set_access_state(1, AccessState::ACTIVE_OPTIMIZED);
    paths.run(3000);
    paths.write(4);
    paths.run(2000);
    paths.all_end_well();
    paths.holds(4);
    assert!(paths.counts()[0] >= 64);
}

#[test]
fn what_waits_for_a_path_to_become_one_is_done_then_or_fails_after_patience() {
    let mut paths = Paths::new(1);
    for group in [1, 2] {
        paths.unit.set_access_state(group, AccessState::STANDBY);
    }
    paths.write(1);
    assert_eq!(paths.ended(), []);
    paths.unit.set_access_state(2, AccessState::ACTIVE_OPTIMIZED);
    paths.run(2000);
    paths.all_end_well();
    paths.holds(1);
    paths.unit.set_access_state(2, AccessState::UNAVAILABLE);
    paths.write(2);
    assert_eq!(paths.ended(), []);
    paths.run(10_000);
    assert_eq!(paths.ended(), vec![Err(IoError::PathLost); 32]);
}

#[test]
fn a_path_that_is_in_standby_at_log_in_is_used_once_it_is_active() {
    let mut paths = Paths::new(1);
    paths.kill(1);
    paths.run(1000);
    paths.unit.set_access_state(2, AccessState::STANDBY);
    paths.start(1);
    paths.run(10_000);
    paths.counts();
    paths.write(1);
    paths.all_end_well();
    assert_eq!(paths.counts(), [32, 0]);
    // The target changes over, and the path that was no use is the only one that is.
    paths.unit.set_access_state(2, AccessState::ACTIVE_OPTIMIZED);
    paths.unit.set_access_state(1, AccessState::STANDBY);
    paths.write(2);
    let done: Vec<_> = (0..4).flat_map(|_| paths.ended()).collect();
    assert_eq!(done, vec![Ok(()); 32]);
    paths.holds(2);
    assert!(paths.counts()[1] >= 32);
}
