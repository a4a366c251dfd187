//! A target that does not answer: it is reported once, and if there is a timeout, the connection is
//! closed.

use crate::sides::iscsi::{self, IscsiDialer};
use crate::sides::iser::{self, IserDialer};
use crate::sides::nbd::{self, NbdDialer};
use crate::sides::{address, disk0, listen, nvme, srp};
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::protocol::nvme::initiator::NvmeEndpoint;
use blockmux_engine::protocol::srp::initiator::SrpDialer;
use blockmux_engine::remote::{Dialer, RemoteVolume};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_proto::srp::client::UnitInfo;
use blockmux_rdma::iwarp::IwarpConfig;
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, Limit, Limits, MemVolume, Memory, Op, Pool,
    RateVolume, ReadyList, SgList, Tag, Volume, VolumeInfo, Waker,
};
use std::cell::RefCell;
use std::fmt::{self, Write};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Metadata, Subscriber, span};

const SIZE: u64 = 1 << 20;
const SPAN: Option<Duration> = Some(Duration::from_secs(30));

#[test]
fn a_silent_target_is_reported_once_and_kept_if_there_is_no_timeout() {
    let mut scene = Scene::new(Delays { read: Duration::from_secs(600), ..Delays::default() }, None);
    // No answer is pending on an idle connection.
    scene.run_for(300);
    assert_eq!(scene.log(), "");
    scene.submit(1, Op::Read);
    scene.run_for(590);
    assert_eq!(scene.log().matches("no answer for 60 s, 1 requests wait").count(), 1);
    scene.run_for(30);
    let done = scene.done();
    assert!(done.len() == 1 && done[0].result.is_ok(), "{done:?}");
    assert_eq!(scene.log().lines().count(), 1, "{}", scene.log());
    assert_eq!(scene.connections(), 1, "the connection stays open");
}

#[test]
fn a_request_that_no_connection_answers_fails_and_others_do_not() {
    let mut scene = Scene::new(Delays { write: Duration::from_secs(6000), ..Delays::default() }, SPAN);
    scene.submit(1, Op::Write { fua: false });
    // Replies to other requests do not count for this one.
    for second in 2..40 {
        scene.submit(second, Op::Read);
        scene.run_for(1);
    }
    assert!(scene.done().iter().all(|done| done.tag != Tag(1) && done.result.is_ok()));
    assert_eq!(scene.connections(), 2);
    scene.run_for(120);
    let done = scene.done();
    assert!(matches!(done[..], [Completion { tag: Tag(1), result: Err(IoError::PathLost) }]), "{done:?}");
    let log = scene.log();
    assert!(log.contains("connection lost (no answer within 30 s); trying again"), "{log}");
    assert!(
        log.contains("1 requests fail: no answer within 30 s, and none over new connections for 60 s"),
        "{log}"
    );
    // After that request has failed, other requests succeed.
    scene.submit(50, Op::Read);
    scene.run_for(1);
    assert!(matches!(scene.done()[..], [Completion { tag: Tag(50), result: Ok(_) }]));
}

#[test]
fn a_flush_may_take_four_times_the_timeout_and_a_queue_the_timeout_per_request() {
    let flush = Duration::from_secs(119);
    let mut scene = Scene::new(Delays { flush, ..Delays::default() }, SPAN);
    scene.submit(1, Op::Flush);
    scene.run_for(120);
    assert_eq!((scene.done().len(), scene.connections()), (1, 1));
    // The target executes them one at a time for 20 s each, so the last takes 80 s.
    let mut scene = Scene::one_at_a_time(Duration::from_secs(20), SPAN);
    (1..=4).for_each(|tag| scene.submit(tag, Op::Read));
    scene.run_for(82);
    assert_eq!((scene.done().len(), scene.connections()), (4, 1));
}

/// A volume whose reads never complete.
fn stuck() -> Arc<DelayVolume> {
    let delays = Delays { read: Duration::from_secs(6000), ..Delays::default() };
    Arc::new(DelayVolume::new(Arc::new(MemVolume::new(SIZE)), delays))
}

fn over_iscsi(volume: Arc<dyn Volume>) -> Scene {
    over_iscsi_with(volume, default_proposal())
}

fn over_iser(volume: Arc<dyn Volume>) -> Scene {
    let dialer = IserDialer::new(&address(), "disk0", default_proposal(), IwarpConfig::default());
    Scene::over(volume, iser::sessions, dialer)
}

fn over_iscsi_with(volume: Arc<dyn Volume>, proposal: OperationalParameters) -> Scene {
    Scene::over(volume, iscsi::sessions, IscsiDialer::new(&address(), "disk0", proposal))
}

#[test]
fn requests_aborted_by_an_iscsi_target_are_sent_again_over_the_same_connection() {
    aborted_requests_are_sent_again(over_iscsi(stuck()));
}

#[test]
fn requests_aborted_by_an_iser_target_are_sent_again_over_the_same_connection() {
    aborted_requests_are_sent_again(over_iser(stuck()));
}

fn aborted_requests_are_sent_again(mut scene: Scene) {
    (1..=20).for_each(|tag| scene.submit(tag, Op::Read));
    for second in 100..140 {
        scene.submit(second, Op::Write { fua: false });
        scene.run_for(1);
    }
    let done = scene.done();
    assert!(done.len() == 40 && done.iter().all(|done| done.result.is_ok()), "{done:?}");
    let log = scene.log();
    assert!(log.contains("no answer within 30 s; the target is asked to abort pending commands"), "{log}");
    // All of them have waited for the same time, and none waits for another.
    scene.run_for(90);
    let done = scene.done();
    assert!(done.iter().all(|done| matches!(done.result, Err(IoError::PathLost))), "{done:?}");
    assert_eq!((done.len(), scene.connections()), (20, 1));
    let log = scene.log();
    assert!(log.contains(" requests fail: retried for 60 s without success"), "{log}");
    scene.submit(1, Op::Write { fua: false });
    scene.run_for(1);
    assert!(matches!(scene.done()[..], [Completion { tag: Tag(1), result: Ok(_) }]));
}

/// The first reads take `time` and cannot be aborted; everything else completes at once.
struct Stubborn {
    memory: Arc<MemVolume>,
    /// Number of slow reads to come.
    reads: Arc<AtomicUsize>,
    time: Duration,
}

struct StubbornChannel {
    quick: Box<dyn Channel>,
    slow: Box<dyn Channel>,
    reads: Arc<AtomicUsize>,
}

impl Volume for Stubborn {
    fn info(&self) -> VolumeInfo {
        self.memory.info()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let slow = DelayVolume::new(self.memory.clone(), Delays { read: self.time, ..Delays::default() });
        let (quick, slow) = (self.memory.open(core, depth, waker.clone())?, slow.open(core, depth, waker)?);
        Ok(Box::new(StubbornChannel { quick, slow, reads: self.reads.clone() }))
    }
}

impl Channel for StubbornChannel {
    fn submit(&mut self, io: Io) {
        let left = self.reads.load(Ordering::Relaxed);
        if io.op != Op::Read || left == 0 {
            return self.quick.submit(io);
        }
        self.reads.store(left - 1, Ordering::Relaxed);
        self.slow.submit(io);
    }

    fn kick(&mut self) {
        self.quick.kick();
        self.slow.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.quick.poll(done);
        self.slow.poll(done);
    }
}

#[test]
fn requests_that_cannot_be_aborted_are_ended_by_a_reset_over_the_same_connection() {
    escalates(over_iscsi);
}

#[test]
fn requests_that_cannot_be_aborted_over_iser_are_ended_by_a_reset() {
    escalates(over_iser);
}

fn escalates(over: impl Fn(Arc<dyn Volume>) -> Scene) {
    // Each longer time needs one more step: the target is asked to reset the unit, then itself;
    // then the connection is closed.
    let steps = [(43, 0, 1), (50, 1, 1), (56, 2, 1), (75, 2, 2)];
    for (seconds, resets, connections) in steps {
        let volume = Stubborn {
            memory: Arc::new(MemVolume::new(SIZE)),
            reads: Arc::new(AtomicUsize::new(4)),
            time: Duration::from_secs(seconds),
        };
        let mut scene = over(Arc::new(volume));
        (1..=4).for_each(|tag| scene.submit(tag, Op::Read));
        scene.run_for(31);
        // A later request completes at once or, if a reset aborts it, after the reset.
        scene.submit(5, Op::Write { fua: false });
        scene.run_for(89);
        let mut done: Vec<_> =
            scene.done().into_iter().map(|done| (done.tag.0, done.result.is_ok())).collect();
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3, 4, 5].map(|tag| (tag, true)), "{seconds} s");
        let log = scene.log();
        let steps = ["abort pending commands", "reset the logical unit", "reset itself"];
        let asked = steps.map(|step| log.matches(&format!("the target is asked to {step}")).count());
        assert_eq!(asked, [1, usize::from(resets > 0), usize::from(resets > 1)], "{seconds} s: {log}");
        assert_eq!(scene.connections(), connections, "{seconds} s: {log}");
    }
}

#[test]
fn a_new_session_begins_after_time2wait() {
    let volume = Stubborn {
        memory: Arc::new(MemVolume::new(SIZE)),
        reads: Arc::new(AtomicUsize::new(1)),
        time: Duration::from_secs(75),
    };
    let mut scene =
        over_iscsi_with(Arc::new(volume), default_proposal().with(OperationalKey::DefaultTime2Wait, 30));
    scene.submit(1, Op::Read);
    // The connection is closed after a minute.
    scene.run_for(85);
    assert!(scene.log().contains("connection lost"));
    assert_eq!((scene.connections(), scene.done().len()), (1, 0));
    scene.run_for(15);
    assert_eq!((scene.connections(), scene.done().len()), (2, 1));
}

#[test]
fn over_nvme_a_request_without_an_answer_fails() {
    let endpoint = NvmeEndpoint { timeout: SPAN, ..nvme::endpoint(&[address()]) };
    let mut scene = Scene::over(stuck(), nvme::sessions, nvme::dialer(endpoint));
    scene.submit(1, Op::Read);
    scene.run_for(36);
    assert!(scene.done().is_empty());
    scene.run_for(240);
    let done = scene.done();
    assert!(matches!(done[..], [Completion { tag: Tag(1), result: Err(IoError::PathLost) }]), "{done:?}");
}

#[test]
fn requests_to_a_target_that_accepts_connections_and_is_silent_fail_after_the_reconnect_time() {
    let (proposal, config) = (default_proposal(), IwarpConfig::default());
    fails_in_time(|| NbdDialer::new(&address(), NbdFeatures::default(), SPAN));
    fails_in_time(|| IscsiDialer::new(&address(), "disk0", proposal));
    fails_in_time(|| IserDialer::new(&address(), "disk0", proposal, config.clone()));
    fails_in_time(|| {
        let endpoint = srp::endpoint(&address(), 0, IwarpFabric::default());
        SrpDialer::of(endpoint, UnitInfo::default()).unwrap()
    });
    fails_in_time(|| nvme::dialer(nvme::endpoint(&[address()])));
    fails_in_time(|| {
        let over = IwarpFabric::default();
        nvme::dialer(nvme::endpoint_over(over, &[address()]))
    });
}

/// The login times of the sessions, of which the shortest is 20 s, do not prolong the time.
fn fails_in_time<D: Dialer>(dialer: impl Fn() -> D) {
    for (seconds, last) in [(0, 2), (5, 5), (15, 15)] {
        let name = std::any::type_name::<D>();
        let mut scene = Scene::mute(dialer(), Duration::from_secs(seconds));
        scene.submit(1, Op::Read);
        scene.run_for(last - 1);
        assert!(scene.done().is_empty(), "{name}, {seconds} s");
        scene.run_for(2);
        let done = scene.done();
        let is_failed = matches!(done[..], [Completion { tag: Tag(1), result: Err(IoError::PathLost) }]);
        assert!(is_failed, "{name}, {seconds} s: {done:?}");
        let log = scene.log();
        let warning = "volume is out of reach: target accepted the connection and did not complete the \
                       login in time\n";
        assert_eq!(log, warning, "{name}, {seconds} s");
    }
}

/// A channel to a slow target, and the warnings that were logged.
struct Scene {
    log: Arc<Mutex<String>>,
    _guard: DefaultGuard,
    world: World,
    channel: Box<dyn Channel>,
}

impl Scene {
    fn new(delays: Delays, timeout: Option<Duration>) -> Scene {
        Scene::of(Arc::new(DelayVolume::new(Arc::new(MemVolume::new(SIZE)), delays)), timeout)
    }

    /// A target that executes one request at a time.
    fn one_at_a_time(time: Duration, timeout: Option<Duration>) -> Scene {
        let read = Limit { bytes_per_s: NonZeroU64::new(4096 / time.as_secs()), ..Limit::default() };
        let volume = RateVolume::new(Arc::new(MemVolume::new(SIZE)), Limits { read, ..Limits::default() });
        Scene::of(Arc::new(volume), timeout)
    }

    fn of(volume: Arc<dyn Volume>, timeout: Option<Duration>) -> Scene {
        let dialer = NbdDialer::new(&address(), NbdFeatures::default(), timeout);
        Scene::over(volume, nbd::sessions, dialer)
    }

    fn over<S: StreamSession + TargetLifecycle + 'static, F: Fn(Pool, Instant) -> S + 'static>(
        volume: Arc<dyn Volume>,
        sessions: impl FnOnce(&Exports) -> F,
        dialer: impl Dialer,
    ) -> Scene {
        let exports = disk0(volume);
        let serve = |world: &World, core: &_| {
            listen(world, core, &address(), &exports, sessions(&exports));
        };
        Scene::at(serve, dialer, Duration::from_secs(60))
    }

    /// A target that accepts connections and sends nothing.
    fn mute(dialer: impl Dialer, reconnect_timeout: Duration) -> Scene {
        let serve = |world: &World, core: &_| {
            let streams = RefCell::new(Vec::new());
            world.net().listen(core, &address(), move |_, stream| streams.borrow_mut().push(stream));
        };
        Scene::at(serve, dialer, reconnect_timeout)
    }

    fn at(
        serve: impl FnOnce(&World, &Rc<SimCore>),
        dialer: impl Dialer,
        reconnect_timeout: Duration,
    ) -> Scene {
        let log = Arc::new(Mutex::new(String::new()));
        let guard = tracing::subscriber::set_default(Warnings(log.clone()));
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (client, target) = (world.add_core(16 << 20), world.add_core(16 << 20));
        serve(&world, &target);
        let volume = RemoteVolume::<_, SimCore>::new(dialer, VolumeInfo::new(SIZE), 1, reconnect_timeout);
        let (core, ready): (Rc<dyn Core>, _) = (client, ReadyList::new());
        let channel = volume.open(&core, 64, ready.waker(0)).unwrap();
        Scene { log, _guard: guard, world, channel }
    }

    fn submit(&mut self, tag: u64, op: Op) {
        let len = if op == Op::Flush { 0 } else { 4096 };
        let data = matches!(op, Op::Write { .. }).then(|| SgList::one(Memory::from_heap(4096).seg(0, 4096)));
        self.channel.submit(Io { data, ..Io::new(Tag(tag), op, 0, len) });
        self.channel.kick();
    }

    fn run_for(&mut self, seconds: u64) {
        self.world.run_for(Duration::from_secs(seconds)).unwrap();
    }

    fn done(&mut self) -> Vec<Completion> {
        let mut done = Vec::new();
        self.channel.poll(&mut done);
        done
    }

    fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Number of connections made so far.
    fn connections(&self) -> u64 {
        self.world.net().connections().0
    }
}

/// Collects warnings, one per line.
struct Warnings(Arc<Mutex<String>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut log = self.0.lock().expect("no panic while it is locked");
        event.record(&mut Line(&mut log));
        log.push('\n');
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("a string takes all");
        }
    }
}
