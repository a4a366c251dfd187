//! Both sides of each stream protocol, for tests: targets of exports, and dialers of them.
#![allow(dead_code, reason = "a test program uses only some of them")]

pub(crate) mod iscsi;
pub(crate) mod iser;
pub(crate) mod nbd;
pub(crate) mod nvme;
pub(crate) mod srp;

use blockmux_engine::net::socket::Address;
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::serve::moves::ArrivedConnection;
use blockmux_engine::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_engine::sim::{SimCore, World};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{Core, Pool, Volume};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

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
