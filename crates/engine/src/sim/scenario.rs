//! Simulation of a stream protocol, from a seed to a result.

use super::client::Plan;
use super::conditions::NetworkConditions;
use super::core::{SimCore, World};
use super::disk::SimDisk;
use super::net::SimNet;
use super::tls::SystemTls;
use crate::carrier::tls::Secure;
use crate::net::socket::Address;
use crate::remote::{Dialer, RemoteVolume};
use crate::serve::listener::ConnectionLimit;
use crate::serve::moves::ArrivedConnection;
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_volume::{Core, Pool, ReadyList, Volume};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Both sides of a protocol.
pub trait Protocol {
    /// The target's session.
    type Target: StreamSession + TargetLifecycle + 'static;
    /// The dialer of the initiator's sessions.
    type Dialer: Dialer;

    /// Makes the sessions of a target that serves `exports`, and of its later instances.
    fn sessions(&self, exports: &Exports) -> TargetSessions<Self::Target>;

    /// TLS of the connection, if any.
    fn secure(&self) -> Option<Secure> {
        None
    }

    /// A dialer of the first export at `address`.
    fn dialer(&self, address: &Address) -> Self::Dialer;
}

/// Makes a session for an initiator that has just connected.
pub type TargetSessions<S> = Rc<dyn Fn(Pool, Instant) -> S>;

/// Parameters of a simulation; equal scenarios run identically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// Seed of all random numbers.
    pub seed: u64,
    /// The network.
    pub conditions: NetworkConditions,
    /// TLS support of the simulated kernels.
    pub system_tls: SystemTls,
    /// Size of the volume, in blocks of [`super::BLOCK`] bytes.
    pub blocks: u64,
    /// Requests of the client.
    pub requests: u32,
    /// Requests in flight.
    pub depth: u32,
    /// The longest request, in blocks.
    pub max_blocks: u64,
    /// Connections between initiator and target.
    pub connections: u32,
    /// Longest delay of the volume.
    pub volume_delay: Duration,
    /// Rate of injected medium errors.
    pub medium_errors_per_million: u32,
    /// Restarts or crashes of the target, if any.
    pub outage: Option<Outage>,
    /// Reconnect timeout of the initiator; requests may fail only if the target is down for longer.
    pub reconnect_timeout: Duration,
    /// Limit of each side's buffers, in bytes.
    pub pool_bytes: usize,
    /// Whether a replayed write may be executed once more after it was acknowledged. That happens
    /// when a connection breaks while its target still has work queued, and no session can prevent
    /// it.
    pub allows_stale_writes: bool,
}

/// Repeated outages of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    /// Longest time between two outages.
    pub every: Duration,
    /// Longest outage.
    pub lasts: Duration,
    /// The target crashes; otherwise it is stopped in an orderly way.
    pub is_crash: bool,
}

/// Result of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScenarioOutcome {
    /// Virtual time.
    pub took: Duration,
    /// Connections opened.
    pub connections: u64,
    /// Connections that broke at random.
    pub breaks: u64,
    /// Outages of the target.
    pub outages: u32,
    /// See [`Scenario::allows_stale_writes`].
    pub stale_writes: u64,
    /// TLS keys that the simulated kernels have accepted.
    pub tls_keys: u64,
}

/// A fault, with the scenario that found it.
#[derive(Debug)]
pub struct ScenarioFailure {
    /// The scenario that was run.
    pub scenario: Scenario,
    /// What was found.
    pub what: String,
}

impl fmt::Display for ScenarioFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\nin {:?}", self.scenario.seed, self.what, self.scenario)
    }
}

impl std::error::Error for ScenarioFailure {}

impl Scenario {
    /// A default scenario without faults: one connection, eight requests in flight.
    #[must_use]
    pub fn new(seed: u64) -> Scenario {
        Scenario {
            seed,
            conditions: NetworkConditions::FAIR,
            system_tls: SystemTls::None,
            blocks: 64,
            requests: 200,
            depth: 8,
            max_blocks: 8,
            connections: 1,
            volume_delay: Duration::ZERO,
            medium_errors_per_million: 0,
            outage: None,
            reconnect_timeout: Duration::from_secs(3600),
            pool_bytes: 64 << 20,
            allows_stale_writes: false,
        }
    }

    /// Runs the simulation.
    ///
    /// # Errors
    /// If a request did not complete exactly once with the right result, a block has wrong content,
    /// memory leaks, or the simulation does not end.
    pub fn run<P: Protocol + 'static>(&self, protocol: P) -> Result<ScenarioOutcome, Box<ScenarioFailure>> {
        let failed = |what: String| Box::new(ScenarioFailure { scenario: *self, what });
        let mut run = ScenarioRun::new(self, Rc::new(protocol));
        run.run_out().map_err(failed)?;
        let stale_writes = run.disk.check_result().map_err(failed)?;
        if stale_writes > 0 && !self.allows_stale_writes {
            return Err(failed(format!("{stale_writes} writes were done after they had been acknowledged")));
        }
        let (connections, breaks) = run.world.net().connections();
        let took = run.world.net().now() - run.began;
        let tls_keys = run.world.net().tls_keys();
        Ok(ScenarioOutcome { took, connections, breaks, outages: run.outages, stale_writes, tls_keys })
    }
}

/// A running simulation.
struct ScenarioRun<P: Protocol> {
    scenario: Scenario,
    protocol: Rc<P>,
    sessions: TargetSessions<P::Target>,
    world: World,
    began: Instant,
    disk: SimDisk,
    address: Address,
    initiator: Rc<SimCore>,
    /// Successive instances of the target; the last one may be running.
    targets: Vec<Rc<SimCore>>,
    outages: u32,
}

impl<P: Protocol + 'static> ScenarioRun<P> {
    fn new(scenario: &Scenario, protocol: Rc<P>) -> ScenarioRun<P> {
        let mut world = World::new(SimNet::new(scenario.seed, scenario.conditions));
        world.net().set_system_tls(scenario.system_tls);
        let disk = SimDisk::new(
            scenario.seed,
            scenario.blocks,
            scenario.volume_delay,
            scenario.medium_errors_per_million,
        );
        ScenarioRun {
            scenario: *scenario,
            sessions: protocol.sessions(&disk.exports),
            protocol,
            began: world.net().now(),
            initiator: world.add_core(scenario.pool_bytes),
            world,
            disk,
            address: Address::Unix("simulated".into()),
            targets: Vec::new(),
            outages: 0,
        }
    }

    fn run_out(&mut self) -> Result<(), String> {
        self.start_target();
        let finished = self.start_client();
        while !finished.get() {
            let Some(outage) = self.scenario.outage else {
                self.run_until(|| finished.get())?;
                break;
            };
            let calm = self.world.net().up_to(outage.every);
            self.run_until_or(calm, || finished.get())?;
            if !finished.get() {
                self.run_outage(outage)?;
            }
        }
        let initiator = self.initiator.clone();
        self.run_until(|| initiator.is_idle())?;
        self.stop_target()?;
        self.check_memory()
    }

    fn start_client(&self) -> Rc<Cell<bool>> {
        let scenario = &self.scenario;
        let remote = RemoteVolume::<P::Dialer, SimCore>::new(
            self.protocol.dialer(&self.address),
            self.disk.volume.info(),
            scenario.connections,
            scenario.reconnect_timeout,
        );
        let plan = Plan {
            requests: scenario.requests,
            depth: scenario.depth,
            max_blocks: scenario.max_blocks,
            allows_medium_errors: scenario.medium_errors_per_million > 0,
            allows_path_lost: scenario.outage.is_some_and(|outage| outage.lasts > scenario.reconnect_timeout),
        };
        self.disk.start_client(&self.initiator, &remote, plan)
    }

    fn start_target(&mut self) {
        let core = self.world.add_core(self.scenario.pool_bytes);
        let exports = self.disk.exports.clone();
        let (protocol, sessions) = (self.protocol.clone(), self.sessions.clone());
        let limit = ConnectionLimit::new(usize::MAX);
        self.world.net().listen(&core, &self.address, move |core, stream| {
            let pool = core.pool().for_peer();
            let session = sessions(pool.clone(), core.now());
            let Some(permit) = limit.permit() else { return };
            let arrival = ArrivedConnection::new(stream, permit);
            let session = NewSession { session, pool, exports: exports.clone() };
            let options = StreamOptions { secure: protocol.secure(), elsewhere: None };
            TargetTask::spawn(core, arrival, session, options);
        });
        self.targets.push(core);
    }

    fn run_outage(&mut self, outage: Outage) -> Result<(), String> {
        self.outages += 1;
        if outage.is_crash {
            self.targets.iter().for_each(|target| target.kill());
            self.disk.volume.crash();
            self.disk.ledger().on_crash();
        } else {
            self.stop_target()?;
        }
        let away = self.world.net().up_to(outage.lasts);
        self.world.run_for(away).map_err(|hang| hang.to_string())?;
        self.drop_ended_targets();
        self.start_target();
        Ok(())
    }

    fn stop_target(&self) -> Result<(), String> {
        self.targets.iter().for_each(|target| target.stop());
        self.run_until(|| self.targets.iter().all(|target| target.is_idle()))
    }

    /// Drops instances that have ended without leaks; there may be thousands.
    fn drop_ended_targets(&mut self) {
        let world = &mut self.world;
        self.targets.retain(|target| {
            let is_dead = target.is_idle() && target.pool().out_bytes() == 0;
            if is_dead {
                world.remove_core(target);
            }
            !is_dead
        });
    }

    fn check_memory(&self) -> Result<(), String> {
        for (name, core) in [("initiator", &self.initiator)]
            .into_iter()
            .chain(self.targets.iter().map(|target| ("target", target)))
        {
            match core.pool().out_bytes() {
                0 => {}
                bytes => return Err(format!("the {name} has not freed {bytes} bytes of buffers")),
            }
        }
        Ok(())
    }

    fn run_until(&self, done: impl FnMut() -> bool) -> Result<(), String> {
        self.world.run_until(LIMIT, done).map_err(|hang| hang.to_string())
    }

    /// Runs until `done`, or until `time` is over.
    fn run_until_or(&self, time: Duration, mut done: impl FnMut() -> bool) -> Result<(), String> {
        let alarm = ReadyList::new();
        self.world.net().wake_at(self.world.net().now() + time, &alarm.waker(0));
        self.run_until(|| done() || !alarm.is_empty())
    }
}

/// Virtual time limit of any part of a simulation; more is a hang.
const LIMIT: Duration = Duration::from_secs(24 * 3600);
