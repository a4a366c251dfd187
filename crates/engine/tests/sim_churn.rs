//! Ended sessions leave nothing behind. The test counts allocations over rounds of connections to
//! targets whose shared state, node and volume, remains. Cores live for one round, because a
//! simulated core keeps an entry for each task.

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod sides;

use blockmux_engine::remote::{Dialer, RemoteVolume};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_volume::{Core, Io, MemVolume, Op, Pool, ReadyList, Tag, Volume};
use sides::iscsi::{self, IscsiDialer};
use sides::nbd::{self, NbdDialer};
use sides::{address, disk0, listen, nvme};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Makes this many connections, reads once over each and closes it, and runs until all deadlines
/// have passed; returns the number of live allocations then.
fn round<D: Dialer, S: StreamSession + TargetLifecycle + 'static>(
    dial: &impl Fn() -> D,
    exports: &Exports,
    session: &Rc<impl Fn(Pool, Instant) -> S + 'static>,
) -> i64 {
    let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
    let (clients, target) = (world.add_core(16 << 20), world.add_core(16 << 20));
    let (session, info) = (session.clone(), exports.iter().next().unwrap().1.volume.info());
    let limit = listen(&world, &target, &address(), exports, move |pool, now| session(pool, now));
    for _ in 0..CONNECTIONS {
        let volume = RemoteVolume::<_, SimCore>::new(dial(), info.clone(), 1, Duration::from_secs(5));
        let core: Rc<dyn Core> = clients.clone();
        let mut channel = volume.open(&core, 4, ReadyList::new().waker(0)).unwrap();
        channel.submit(Io::new(Tag(1), Op::Read, 0, 4096));
        channel.kick();
        world.run_for(Duration::from_secs(1)).unwrap();
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert!(done.len() == 1 && done[0].result.is_ok());
    }
    world.run_for(Duration::from_secs(300)).unwrap();
    assert_eq!(limit.open(), 0);
    drop((clients, target, limit));
    drop(world);
    counting::live()
}

fn leaves_nothing<D: Dialer, S: StreamSession + TargetLifecycle + 'static>(
    name: &str,
    dial: impl Fn() -> D,
    exports: &Exports,
    session: impl Fn(Pool, Instant) -> S + 'static,
) {
    let session = Rc::new(session);
    // Tables of shared state first grow to their usual size.
    let first = (0..3).map(|_| round(&dial, exports, &session)).last();
    let last = (0..3).map(|_| round(&dial, exports, &session)).last();
    assert_eq!(
        first, last,
        "{name}: live allocations after {CONNECTIONS} connections in each of three rounds"
    );
}

#[test]
fn ended_sessions_of_every_protocol_leave_no_allocation() {
    let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
    let exports = disk0(volume);
    let dial = || NbdDialer::new(&address(), NbdFeatures::default(), None);
    leaves_nothing("NBD", dial, &exports, nbd::sessions(&exports));
    let dial = || IscsiDialer::new(&address(), "disk0", default_proposal());
    leaves_nothing("iSCSI", dial, &exports, iscsi::sessions(&exports));
    let dial = || nvme::dialer(nvme::endpoint(&[address()]));
    leaves_nothing("NVMe/TCP", dial, &exports, nvme::sessions(&exports));
}

const CONNECTIONS: usize = 20;
