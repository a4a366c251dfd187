//! SRP on RoCEv2 over a network that loses packets: see [`crate::scenarios`].
//!
//! The simulated streams carry records, and lose none. So the queue pair of each side drops some of
//! those that arrive.

use crate::scenarios::scenario_tests;
use crate::seeds;
use crate::sides::srp::{endpoint, node};
use crate::srp::AnyUnit;
use blockmux_engine::fabric::roce::RoceHost;
use blockmux_engine::fabric::{Fabric, Setup, StreamFabric};
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::srp::initiator::{SrpDialer, SrpEndpoint};
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, TargetSessions};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::{
    Endpoint, Event, QueuePair, RdmaSession, Remote, RemoteRights, WorkId, WorkRequest,
};
use blockmux_proto::srp::client::UnitInfo;
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_rdma::roce::record::{HEAD_LEN, RecordHead};
use blockmux_rdma::roce::records::RoceRecords;
use blockmux_rdma::{Caps, Driven, Fault, Provider};
use blockmux_volume::{Chunk, SgList};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// A queue pair that loses some of the records that arrive.
struct LossyRecords {
    inner: RoceRecords,
    /// Bytes still to come of the record that arrives, and whether they are lost.
    left: usize,
    is_lost: bool,
    random: u64,
    lost_per_thousand: u64,
}

impl LossyRecords {
    fn new(inner: RoceRecords, seed: u64, lost_per_thousand: u64) -> LossyRecords {
        LossyRecords { inner, left: 0, is_lost: false, random: seed | 1, lost_per_thousand }
    }

    fn loses_one(&mut self) -> bool {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % 1000 < self.lost_per_thousand
    }
}

impl Timed for LossyRecords {
    fn poll_timeout(&self) -> Option<Instant> {
        self.inner.poll_timeout()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.inner.on_timeout(now)
    }

    fn on_send(&mut self, now: impl FnOnce() -> Instant) {
        self.inner.on_send(now);
    }
}

impl StreamSession for LossyRecords {
    fn demand(&self) -> Demand {
        match self.inner.demand() {
            Demand::Bytes(_) if self.is_lost => Demand::Bytes(1),
            demand => demand,
        }
    }

    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        let unread = input.unread();
        if self.left == 0
            && let Some(head) = RecordHead::parse(unread)
        {
            self.left = HEAD_LEN + head.len as usize;
            self.is_lost = self.loses_one();
        }
        let taken =
            if self.is_lost { unread.len().min(self.left) } else { self.inner.on_bytes(input, now)? };
        self.left -= taken;
        self.is_lost &= self.left > 0;
        Ok(taken)
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.inner.on_placed(now)
    }

    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.inner.on_end(now)
    }

    fn outbox(&mut self) -> &mut Outbox {
        self.inner.outbox()
    }
}

impl QueuePair for LossyRecords {
    fn room(&self) -> usize {
        self.inner.room()
    }

    fn post(&mut self, work: WorkRequest) {
        self.inner.post(work);
    }

    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        self.inner.register(id, local, access)
    }
}

impl Provider for LossyRecords {
    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn poll(&mut self) -> Option<Event> {
        self.inner.poll()
    }

    fn fault(&self) -> Option<Fault> {
        self.inner.fault()
    }
}

/// RoCEv2 that loses packets on their way to the initiator.
#[derive(Clone)]
struct LossyFabric {
    seed: u64,
    lost_per_thousand: u64,
}

impl Fabric for LossyFabric {
    type QueuePair = LossyRecords;
    type Host = RoceHost;

    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> LossyRecords {
        let inner = RoceRecords::active(endpoint, setup.transport.flow, setup.pool, setup.seed, setup.now);
        LossyRecords::new(inner, self.seed, self.lost_per_thousand)
    }

    fn accept(endpoint: &Endpoint, setup: Setup) -> LossyRecords {
        let inner = RoceRecords::passive(endpoint, setup.transport.flow, setup.pool, setup.seed, setup.now);
        LossyRecords::new(inner, 0, 0)
    }
}

impl StreamFabric for LossyFabric {}

/// SRP over a network with these losses.
struct SrpOverRoce {
    over: LossyFabric,
    channels: u32,
}

impl Protocol for SrpOverRoce {
    type Target = Driven<LossyRecords, SrpTargetSession>;
    type Dialer = AnyUnit<LossyFabric>;

    fn sessions(&self, exports: &Exports) -> TargetSessions<Self::Target> {
        let (node, lost_per_thousand, seed) = (node(exports), self.over.lost_per_thousand, self.over.seed);
        Rc::new(move |pool, now| {
            let session = SrpTargetSession::new(node.clone(), pool.clone(), Arc::new(|| {}), now);
            let inner = RoceRecords::passive(&session.endpoint(), None, pool, [4; 32], now);
            Driven::new(session, LossyRecords::new(inner, seed ^ 0xb10c, lost_per_thousand), now)
        })
    }

    fn dialer(&self, address: &Address) -> AnyUnit<LossyFabric> {
        let endpoint = endpoint(address, 0, self.over.clone());
        let endpoint = SrpEndpoint { channels: self.channels, ..endpoint };
        AnyUnit(SrpDialer::of(endpoint, UnitInfo::default()).unwrap())
    }
}

/// Varies the number of channels.
fn protocol(seed: u64, lost_per_thousand: u64) -> SrpOverRoce {
    SrpOverRoce { over: LossyFabric { seed, lost_per_thousand }, channels: 1 + seed as u32 / 4 % 3 }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives, and
/// loses up to 2 % of all packets.
fn with_losses(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    let lost_per_thousand = |seed: u64| [0, 1, 5, 20][seed as usize % 4];
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed, lost_per_thousand(seed))))
}

/// [`with_losses`], without losses: a lost connection request is repeated after a second, and
/// these targets are restarted sooner.
fn without_losses(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed, 0)))
}

// A session has up to three channels.
scenario_tests! { with_losses:
    fn without_faults_everything_completes_and_nothing_is_lost(20, 4 * 3);
    fn a_network_that_splits_every_message_changes_nothing(12);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(40, 20);
    fn the_same_seed_gives_the_same_run();
}

scenario_tests! { without_losses:
    fn a_target_restart_is_transparent_to_the_client(12, 0);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(12, 0);
    fn all_faults_together_lose_nothing(24);
}
