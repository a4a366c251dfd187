//! Ended sessions leave nothing behind. The test counts allocations over rounds of connections to
//! targets whose shared state, node and volume, remains. Cores live for one round, because a
//! simulated core keeps an entry for each task.

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod iscsi_dialer;
mod iscsi_names;
mod iscsi_sides;
mod nbd_dialer;
mod nvme_sides;

use blockmux_engine::net::socket::Address;
use blockmux_engine::remote::{Dialer, RemoteVolume};
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::serve::moves::ArrivedConnection;
use blockmux_engine::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_proto::{iscsi, nbd, nvme_tcp};
use blockmux_volume::{Core, Io, MemVolume, Op, Pool, ReadyList, Tag, Volume};
use iscsi_dialer::IscsiDialer;
use nbd_dialer::NbdDialer;
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
    let limit = ConnectionLimit::new(usize::MAX);
    let (permits, exports, session) = (limit.clone(), exports.clone(), session.clone());
    let info = exports.iter().next().unwrap().1.volume.info();
    world.net().listen(&target, &address(), move |core, stream| {
        let pool = core.pool().for_peer();
        let session = session(pool.clone(), core.now());
        let session = NewSession { session, pool, exports: exports.clone() };
        TargetTask::spawn(
            core,
            ArrivedConnection::new(stream, permits.permit().unwrap()),
            session,
            StreamOptions::default(),
        );
    });
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
    let export = Export { name: "disk0".to_owned(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let shared = exports.clone();
    let dial = || NbdDialer::new(&address(), NbdFeatures::default(), None);
    leaves_nothing("NBD", dial, &exports, move |pool, now| {
        nbd::server::NbdTargetSession::new(shared.clone(), pool, now)
    });
    let node = iscsi_sides::node(&exports);
    let dial = || IscsiDialer::new(&address(), "disk0", default_proposal());
    leaves_nothing("iSCSI", dial, &exports, move |pool, now| {
        iscsi::server::IscsiTargetSession::new(node.clone(), 1, pool, [3; 32], now)
    });
    let (node, _subsystem) = nvme_sides::node(&exports);
    let dial = || nvme_sides::dialer(nvme_sides::endpoint(&[address()]));
    leaves_nothing("NVMe/TCP", dial, &exports, move |pool, now| {
        nvme_tcp::server::NvmeTcpTargetSession::new(node.clone(), pool, now).at_port(1)
    });
}

fn address() -> Address {
    Address::Unix("/target".into())
}

const CONNECTIONS: usize = 20;
