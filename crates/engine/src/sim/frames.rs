//! Simulation of ATA over Ethernet, from a seed to a result: the engine's tasks on a [`SimLan`].

use super::client::Plan;
use super::conditions::NetworkConditions;
use super::core::{SimCore, World};
use super::disk::SimDisk;
use super::lan::{LanConditions, SimLan};
use super::net::SimNet;
use crate::net::frames::Share;
use crate::protocol::aoe::volume::AoeVolume;
use crate::serve::frame_target::FrameTargetTask;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::disks::AoeDisks;
use blockmux_proto::aoe::server::AoeTargetSession;
use blockmux_proto::aoe::unit::{AoeUnit, DiskSettings};
use blockmux_proto::exports::VolumeId;
use blockmux_volume::{Core, Volume};
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Parameters of a simulation; equal scenarios run identically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameScenario {
    /// Seed of all random numbers.
    pub seed: u64,
    /// The network.
    pub conditions: LanConditions,
    /// Size of the volume, in blocks of [`super::BLOCK`] bytes.
    pub blocks: u64,
    /// Requests of the client.
    pub requests: u32,
    /// Requests in flight.
    pub depth: u32,
    /// The longest request, in blocks.
    pub max_blocks: u64,
    /// Interfaces of each side.
    pub ports: usize,
    /// Longest delay of the volume.
    pub volume_delay: Duration,
    /// Repeated faults, if any.
    pub fault: Option<FrameFault>,
    /// Target and initiator share a CPU, alternating in time slices of this length.
    pub turns: Option<Duration>,
}

/// Repeated faults, with the longest time between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// The target is stopped in an orderly way and restarted.
    TargetRestarts(Duration),
    /// All links go down and up.
    LinksDown(Duration),
}

/// Result of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOutcome {
    /// Virtual time.
    pub took: Duration,
    /// Frames sent.
    pub frames: u64,
    /// Number of faults.
    pub faults: u32,
}

impl FrameScenario {
    /// A default scenario without faults.
    #[must_use]
    pub fn new(seed: u64) -> FrameScenario {
        FrameScenario {
            seed,
            conditions: LanConditions::FAIR,
            blocks: 64,
            requests: 200,
            depth: 8,
            max_blocks: 8,
            ports: 1,
            volume_delay: Duration::ZERO,
            fault: None,
            turns: None,
        }
    }

    /// Runs the simulation.
    ///
    /// # Errors
    /// If a request did not complete exactly once with the right result, a write was done again
    /// after a newer one, a block has wrong content, memory leaks, or the simulation does not end.
    pub fn run(&self) -> Result<FrameOutcome, String> {
        self.run_out().map_err(|what| format!("seed {}: {what}\nin {self:?}", self.seed))
    }

    fn run_out(&self) -> Result<FrameOutcome, String> {
        let mut run = FrameRun::new(self);
        run.start_target();
        let finished = run.start_client();
        let mut faults = 0;
        while !finished.get()
            && let Some(turn) = self.turns
        {
            run.take_turns(turn)?;
        }
        while !finished.get() {
            let Some(fault) = self.fault else {
                run.run_until(|| finished.get())?;
                break;
            };
            let (FrameFault::TargetRestarts(most) | FrameFault::LinksDown(most)) = fault;
            run.pass(most)?;
            if finished.get() {
                break;
            }
            faults += 1;
            if matches!(fault, FrameFault::LinksDown(_)) {
                run.lan.set_up(false);
                run.pass(most)?;
                run.lan.set_up(true);
            } else {
                run.stop_target()?;
                run.pass(most)?;
                run.start_target();
            }
        }
        let initiator = run.initiator.clone();
        run.run_until(|| initiator.is_idle())?;
        run.stop_target()?;
        run.check_result()?;
        let took = run.world.net().now() - run.began;
        Ok(FrameOutcome { took, frames: run.lan.sent(), faults })
    }
}

struct FrameRun {
    scenario: FrameScenario,
    world: World,
    lan: SimLan,
    began: Instant,
    disk: SimDisk,
    initiator: Rc<SimCore>,
    targets: Vec<Rc<SimCore>>,
}

impl FrameRun {
    fn new(scenario: &FrameScenario) -> FrameRun {
        let mut world = World::new(SimNet::new(scenario.seed, NetworkConditions::FAIR));
        let lan = SimLan::new(scenario.conditions);
        let initiator = world.add_core(64 << 20);
        initiator.join(&lan);
        FrameRun {
            scenario: *scenario,
            began: world.net().now(),
            world,
            lan,
            disk: SimDisk::new(scenario.seed, scenario.blocks, scenario.volume_delay, 0),
            initiator,
            targets: Vec::new(),
        }
    }

    fn interfaces(&self) -> Vec<String> {
        (0..self.scenario.ports).map(|at| format!("sim{at}")).collect()
    }

    fn start_client(&self) -> Rc<Cell<bool>> {
        let scenario = &self.scenario;
        let remote: AoeVolume<SimCore> =
            AoeVolume::new(self.interfaces(), ADDRESS, self.disk.volume.info(), TIMEOUT);
        let plan = Plan {
            requests: scenario.requests,
            depth: scenario.depth,
            max_blocks: scenario.max_blocks,
            allows_medium_errors: false,
            allows_path_lost: false,
        };
        self.disk.start_client(&self.initiator, &remote, plan)
    }

    fn start_target(&mut self) {
        let core = self.world.add_core(64 << 20);
        core.join(&self.lan);
        let unit = AoeUnit::new(ADDRESS, VolumeId(0), DiskSettings::default(), None);
        let session = AoeTargetSession::new(self.disk.exports.clone(), AoeDisks::everywhere(vec![unit]));
        FrameTargetTask::spawn(
            &core,
            &self.interfaces(),
            Share::ALL,
            session,
            self.disk.exports.clone(),
            Default::default(),
        )
        .expect("the segment has a port for everybody");
        self.targets.push(core);
    }

    /// Suspends the initiator while the target runs, then the other way round.
    fn take_turns(&self, turn: Duration) -> Result<(), String> {
        for has_initiator in [false, true] {
            self.initiator.set_waiting(!has_initiator);
            self.targets.iter().for_each(|target| target.set_waiting(has_initiator));
            self.world.run_for(turn).map_err(|hang| hang.to_string())?;
        }
        self.targets.iter().for_each(|target| target.set_waiting(false));
        Ok(())
    }

    fn stop_target(&mut self) -> Result<(), String> {
        self.targets.iter().for_each(|target| target.stop());
        self.run_until(|| self.targets.iter().all(|target| target.is_idle()))?;
        for target in self.targets.drain(..) {
            if target.pool().out_bytes() > 0 {
                return Err("the target has not freed its buffers".to_owned());
            }
            self.world.remove_core(&target);
        }
        Ok(())
    }

    fn check_result(&self) -> Result<(), String> {
        if self.initiator.pool().out_bytes() > 0 {
            return Err("the initiator has not freed its buffers".to_owned());
        }
        match self.disk.check_result()? {
            // A restarted target does not know which writes its predecessor has executed.
            stale if stale > 0 && self.scenario.fault.is_none() => {
                Err(format!("{stale} writes were done after they had been acknowledged"))
            }
            _ => Ok(()),
        }
    }

    fn run_until(&self, done: impl FnMut() -> bool) -> Result<(), String> {
        self.world.run_until(LIMIT, done).map_err(|hang| hang.to_string())
    }

    /// Lets a random time up to `most` pass.
    fn pass(&self, most: Duration) -> Result<(), String> {
        self.world.run_for(self.world.net().up_to(most)).map_err(|hang| hang.to_string())
    }
}

const ADDRESS: AoeAddress = AoeAddress { shelf: 7, slot: 0 };
/// Longer than any fault.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Virtual time limit of any part of a simulation.
const LIMIT: Duration = Duration::from_secs(600);
