//! Both sides of each stream protocol, for tests: targets of exports, and dialers of them.
#![allow(dead_code, reason = "a test program uses only some of them")]

pub(crate) mod iscsi;
pub(crate) mod iser;
pub(crate) mod nbd;
pub(crate) mod nvme;
pub(crate) mod srp;

use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::fabric::{Fabric, Setup};
use blockmux_engine::net::socket::Address;
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::serve::moves::ArrivedConnection;
use blockmux_engine::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_engine::sim::{SimCore, World};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::rdma::Endpoint;
use blockmux_volume::{Core, Pool, Volume};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Software iWARP of an initiator; if `is_plain`, it has learnt to begin with RFC 5044.
pub(crate) fn iwarp(has_crc: bool, is_plain: bool) -> IwarpFabric {
    let fabric = IwarpFabric::new(has_crc);
    if is_plain {
        let (receives, receive_len, sends) = (1, 64, 1);
        let endpoint = Endpoint {
            receives,
            receive_len,
            sends,
            reads: 0,
            regions: 0,
            private_data: Vec::new(),
            without_invalidation: None,
        };
        let (pool, now) = (Pool::new(1 << 20), Instant::now());
        let unanswered = fabric
            .connect(&endpoint, Setup { pool, seed: [0; 32], transport: TransportInfo::default(), now });
        assert!(fabric.retries(&unanswered));
    }
    // Another path than the one that has learnt it.
    fabric.clone()
}

/// A volume as the only export, `disk0`.
pub(crate) fn disk0(volume: Arc<dyn Volume>) -> Exports {
    Exports::new(vec![export("disk0", volume)])
}

pub(crate) fn export(name: &str, volume: Arc<dyn Volume>) -> Export {
    Export { name: name.to_owned(), description: String::new(), read_only: false, volume }
}

/// The address of a simulated target.
pub(crate) fn address() -> Address {
    Address::Unix("/target".into())
}

/// Serves connections to `address` on a simulated core, each with a session that `sessions` makes;
/// returns the count of open connections.
pub(crate) fn listen<S: StreamSession + TargetLifecycle + 'static>(
    world: &World,
    core: &Rc<SimCore>,
    address: &Address,
    exports: &Exports,
    sessions: impl Fn(Pool, Instant) -> S + 'static,
) -> ConnectionLimit {
    let (limit, exports) = (ConnectionLimit::new(usize::MAX), exports.clone());
    let permits = limit.clone();
    world.net().listen(core, address, move |core, stream| {
        let pool = core.pool().for_peer();
        let session = sessions(pool.clone(), core.now());
        let permit = permits.permit().expect("there is no limit");
        let session = NewSession { session, pool, exports: exports.clone() };
        TargetTask::spawn(core, ArrivedConnection::new(stream, permit), session, StreamOptions::default());
    });
    limit
}
