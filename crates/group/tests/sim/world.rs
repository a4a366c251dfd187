//! One run: what a seed decides, what breaks when, and what must hold at the end.

use super::Variant;
use super::cluster::{BLOCKS, Cluster};
use super::gateway::{Gateway, Input};
use super::initiator::{Initiator, Reply};
use super::net::{Happening, Net};
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Command, CommandId, Place, Settings};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// What breaks, or is repaired.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    Stop(usize),
    GoOn(usize),
    Crash(usize),
    Start(usize),
    CutFromCluster(usize),
    Repair(usize),
    CutFromInitiators(usize),
    Reconnect(usize),
    Deafen(usize, usize),
    Undeafen,
    BreakWatch(usize),
    Command(Command),
    /// Everything is repaired, and nothing breaks from now on.
    Heal,
}

/// How much happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) acknowledged: u64,
    pub(crate) moves: u64,
    pub(crate) fences: u64,
    /// Time from the repair until every volume was served, in milliseconds.
    pub(crate) served_after: u64,
    /// Time until they were evenly spread, after operators have taken back what they had decided.
    pub(crate) even_after: u64,
}

/// Why a run has failed, and what happened in it.
pub(crate) struct Failure {
    pub(crate) seed: u64,
    pub(crate) what: String,
    pub(crate) trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.trace.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        let Failure { seed, what, .. } = self;
        write!(f, "{what}\n{}={seed}..{} runs it alone", super::SEEDS, seed + 1)
    }
}

pub(crate) struct World {
    seed: u64,
    net: Net,
    cluster: Cluster,
    gateways: Vec<Gateway>,
    initiators: Vec<Initiator>,
    processes: u64,
    commands: VecDeque<(CommandId, Command)>,
    last_command: u64,
    healed_at: Option<u64>,
    /// The time of the last command to a gateway.
    asked_at: u64,
    undone_at: Option<u64>,
    served_at: Option<u64>,
    settled: Option<Settled>,
}

/// Runs a seed; a failure has its trace.
pub(crate) fn run(seed: u64, variant: Variant) -> Result<Counts, Failure> {
    let first = World::new(seed, variant, false).run();
    first.map_err(|failure| World::new(seed, variant, true).run().err().unwrap_or(failure))
}

impl World {
    fn new(seed: u64, variant: Variant, is_traced: bool) -> World {
        let mut net = Net::new(seed, is_traced);
        let gateways = 2 + net.random.below(3) as usize;
        let volumes = 1 + net.random.below(6) as usize;
        World {
            seed,
            cluster: Cluster::new(volumes, variant),
            gateways: (0..gateways).map(|number| Gateway::new(number, variant)).collect(),
            initiators: (0..volumes * BLOCKS).map(Initiator::new).collect(),
            processes: 0,
            commands: VecDeque::new(),
            last_command: 0,
            healed_at: None,
            asked_at: 0,
            undone_at: None,
            served_at: None,
            settled: None,
            net,
        }
    }

    fn run(mut self) -> Result<Counts, Failure> {
        let volumes: Vec<ConfiguredVolume> = (0..self.cluster.images.len())
            .map(|volume| ConfiguredVolume::new(&format!("v{volume}"), "image"))
            .collect();
        self.command(Command::Configure { version: 1, volumes });
        for gateway in 0..self.gateways.len() {
            let delay = self.net.random.below(2000);
            self.net.after(delay, Happening::Fault(Fault::Start(gateway)));
        }
        for initiator in 0..self.initiators.len() {
            self.net.after(0, Happening::Initiator { initiator, reply: Reply::Timer(0) });
        }
        self.net.after(100, Happening::Operator);
        self.plan_faults();
        while let Some(happening) = self.net.next() {
            let looks = matches!(happening, Happening::Operator);
            self.step(happening);
            if let Some(what) = self.violation() {
                return Err(self.failure(what));
            }
            match if looks { self.is_done() } else { Ok(None) } {
                Ok(Some(counts)) => return Ok(counts),
                Ok(None) => {}
                Err(what) => return Err(self.failure(what)),
            }
        }
        Err(self.failure("nothing happens any longer".to_owned()))
    }

    fn violation(&mut self) -> Option<String> {
        let gateways = self.gateways.iter_mut().map(|gateway| &mut gateway.violation);
        let initiators = self.initiators.iter_mut().map(|initiator| &mut initiator.violation);
        let cluster = [&mut self.cluster.violation].into_iter();
        cluster.chain(gateways).chain(initiators).find_map(Option::take)
    }

    fn failure(self, what: String) -> Failure {
        Failure { seed: self.seed, what, trace: self.net.trace() }
    }

    /// One seed in eight has no faults.
    fn is_calm(&self) -> bool {
        self.seed.is_multiple_of(8)
    }

    /// Draws what breaks in the first part of the run.
    fn plan_faults(&mut self) {
        if self.is_calm() {
            self.net.is_calm = true;
            return self.net.after(CALM_TIME, Happening::Fault(Fault::Heal));
        }
        let mut at = 1000;
        while at < FAULT_TIME {
            let (fault, repair) = self.draw_fault();
            let length = if self.net.random.below(3) == 0 { 8000 } else { 1500 };
            let until = at + self.net.random.below(length);
            self.net.after(at, Happening::Fault(fault));
            if let Some(repair) = repair {
                self.net.after(until, Happening::Fault(repair));
            }
            if self.net.random.below(5) == 0 {
                self.plan_tour(at);
            }
            at += self.net.random.below(1500);
        }
        self.net.after(FAULT_TIME, Happening::Fault(Fault::Heal));
    }

    /// Draws a volume that an operator moves to a gateway, to another one, and back, while
    /// initiators do not reach the first one.
    fn plan_tour(&mut self, from: u64) {
        let there = self.net.random.below(self.gateways.len() as u64) as usize;
        let elsewhere = (there + 1) % self.gateways.len();
        let volume = format!("v{}", self.net.random.below(self.cluster.images.len() as u64));
        for (at, gateway) in [(from, there), (from + 2000, elsewhere), (from + 3500, there)] {
            let pin = Command::Pin { volume: volume.clone(), member: name(gateway).to_owned() };
            self.net.after(at, Happening::Fault(Fault::Command(pin)));
        }
        self.net.after(from + 1900, Happening::Fault(Fault::CutFromInitiators(there)));
        self.net.after(from + 2600, Happening::Fault(Fault::Reconnect(there)));
    }

    fn draw_fault(&mut self) -> (Fault, Option<Fault>) {
        let gateways = self.gateways.len() as u64;
        let one = self.net.random.below(gateways) as usize;
        let other = (one + 1 + self.net.random.below(gateways - 1) as usize) % self.gateways.len();
        match self.net.random.below(12) {
            0 | 1 => (Fault::Stop(one), Some(Fault::GoOn(one))),
            2 | 3 => (Fault::Crash(one), Some(Fault::Start(one))),
            4 | 5 => (Fault::CutFromCluster(one), Some(Fault::Repair(one))),
            6 | 7 => (Fault::CutFromInitiators(one), Some(Fault::Reconnect(one))),
            8 => (Fault::Deafen(one, other), Some(Fault::Undeafen)),
            9 => (Fault::BreakWatch(one), None),
            _ => (Fault::Command(self.draw_command(name(one))), None),
        }
    }

    fn draw_command(&mut self, member: &str) -> Command {
        let volume = format!("v{}", self.net.random.below(self.cluster.images.len() as u64));
        let member = member.to_owned();
        match self.net.random.below(9) {
            0..=2 => Command::Pin { volume, member },
            3 => Command::Unpin { volume },
            4 => Command::Drain { member },
            5 | 6 => Command::Resume { member },
            7 => Command::Leave { member },
            _ => Command::Fence { member },
        }
    }

    fn command(&mut self, command: Command) {
        self.last_command += 1;
        self.commands.push_back((CommandId(self.last_command), command));
    }

    fn step(&mut self, happening: Happening) {
        match happening {
            Happening::Gateway { gateway, process, ref input } => {
                let is_answer = matches!(input, Input::Answer { .. });
                if process == 0
                    || self.gateways[gateway].process != process
                    || (is_answer && !self.net.arrives(gateway, &happening))
                {
                    return;
                }
                self.gateways[gateway].receive(&mut self.net, input.clone());
            }
            Happening::Cluster(ref packet) => {
                if self.net.arrives(packet.gateway, &happening) {
                    self.cluster.on_packet(&mut self.net, packet);
                }
            }
            Happening::Map { osd, epoch } => self.cluster.on_map(osd, epoch),
            Happening::Initiator { initiator, reply } => {
                let processes: Vec<u64> = self.gateways.iter().map(|gateway| gateway.process).collect();
                self.initiators[initiator].receive(&mut self.net, reply, &self.cluster, &processes);
            }
            Happening::Fault(fault) => self.on_fault(fault),
            Happening::Operator => self.operate(),
        }
    }

    fn on_fault(&mut self, fault: Fault) {
        if self.healed_at.is_some() {
            return;
        }
        self.net.note(|| format!("fault: {fault:?}"));
        match fault {
            Fault::Stop(gateway) => self.gateways[gateway].is_stopped = true,
            Fault::GoOn(gateway) => self.gateways[gateway].go_on(&mut self.net),
            Fault::Crash(gateway) => self.gateways[gateway].crash(&mut self.net),
            Fault::Start(gateway) => self.start(gateway),
            Fault::CutFromCluster(gateway) => {
                self.net.cut_from_cluster.insert(gateway);
            }
            Fault::Repair(gateway) => self.net.repair(gateway),
            Fault::CutFromInitiators(gateway) => {
                self.net.cut_from_initiators.insert(gateway);
            }
            Fault::Reconnect(gateway) => {
                self.net.cut_from_initiators.remove(&gateway);
            }
            Fault::Deafen(from, to) => {
                self.net.deaf.insert((from, to));
            }
            Fault::Undeafen => self.net.deaf.clear(),
            Fault::BreakWatch(gateway) => self.break_watch(gateway),
            Fault::Command(command) => self.command(command),
            Fault::Heal => self.heal(),
        }
    }

    fn start(&mut self, gateway: usize) {
        if self.gateways[gateway].process == 0 {
            self.processes += 1;
            self.gateways[gateway].start(&mut self.net, self.processes);
        }
    }

    fn break_watch(&mut self, gateway: usize) {
        self.cluster.break_watch(gateway);
        if self.net.random.below(2) == 0 {
            return;
        }
        let process = self.gateways[gateway].process;
        let delay = self.net.random.below(3000);
        self.net.after(delay, Happening::Gateway { gateway, process, input: Input::WatchLost });
    }

    fn heal(&mut self) {
        for gateway in 0..self.gateways.len() {
            self.start(gateway);
            self.gateways[gateway].go_on(&mut self.net);
            self.net.repair(gateway);
        }
        self.net.cut_from_initiators.clear();
        self.net.deaf.clear();
        self.net.is_calm = true;
        self.commands.retain(|(_, command)| matches!(command, Command::Configure { .. }));
        self.healed_at = Some(self.net.now);
    }

    /// Takes back what operators have decided, once no gateway does an earlier command.
    fn undo(&mut self) {
        for volume in 0..self.cluster.images.len() {
            self.command(Command::Unpin { volume: format!("v{volume}") });
        }
        for gateway in 0..self.gateways.len() {
            self.command(Command::Resume { member: name(gateway).to_owned() });
        }
        self.undone_at = Some(self.net.now);
    }

    /// Gives the first command to some gateway, and again until one of them has answered.
    fn operate(&mut self) {
        let answers = self.gateways.iter_mut().flat_map(|gateway| gateway.answers.drain(..));
        let first = self.commands.front().map(|(id, _)| *id);
        let mut is_answered = false;
        for (id, result) in answers {
            is_answered |= Some(id) == first && result != Err(blockmux_group::Refusal::NotMember);
        }
        if is_answered {
            self.commands.pop_front();
        }
        self.net.after(100, Happening::Operator);
        let is_late = self.net.now >= self.asked_at + LATE_COMMANDS;
        if self.healed_at.is_some() && self.undone_at.is_none() && self.commands.is_empty() && is_late {
            self.undo();
        }
        let gateway = self.net.random.below(self.gateways.len() as u64) as usize;
        if let Some((id, command)) = self.commands.front().cloned() {
            self.asked_at = self.net.now;
            let (process, input) = (self.gateways[gateway].process, Input::Command(id, command));
            self.net.after(1, Happening::Gateway { gateway, process, input });
        }
    }

    /// After the repair everything is served and even within a limit. Then nothing moves, and every
    /// initiator goes on.
    fn is_done(&mut self) -> Result<Option<Counts>, String> {
        let Some(healed_at) = self.healed_at else { return Ok(None) };
        if let Some(settled) = &self.settled {
            if self.net.now < settled.at + QUIET_TIME {
                return Ok(None);
            }
            let is_stuck = |(at, initiator): (usize, &Initiator)| {
                (initiator.acknowledged <= settled.acknowledged[at]).then_some(at)
            };
            if let Some(at) = self.initiators.iter().enumerate().find_map(is_stuck) {
                return Err(format!("initiator {at} does not go on"));
            }
            if self.is_calm() && settled.fences > 0 {
                return Err("a client is fenced although nothing breaks".to_owned());
            }
            if (self.cluster.moves, self.cluster.fences) != (settled.moves, settled.fences) {
                return Err("volumes move, or clients are fenced, although nothing breaks".to_owned());
            }
            return Ok(Some(Counts {
                acknowledged: self.initiators.iter().map(|initiator| initiator.acknowledged).sum(),
                moves: settled.moves,
                fences: settled.fences,
                served_after: settled.served_at - healed_at,
                even_after: settled.at.saturating_sub(self.undone_at.unwrap_or(healed_at)),
            }));
        }
        if self.net.now >= healed_at + LIMIT {
            let table = self.cluster.table();
            return Err(format!("not settled {LIMIT} ms after everything was repaired: {table:#?}"));
        }
        let loads = self.loads();
        self.served_at = self.served_at.or(loads.as_ref().map(|_| self.net.now));
        let is_even = loads.is_some_and(|loads| {
            loads.iter().max().zip(loads.iter().min()).is_some_and(|(most, fewest)| most - fewest <= 1)
        });
        if is_even && self.undone_at.is_some() && self.commands.is_empty() {
            self.net.note(|| "settled".to_owned());
            let acknowledged = self.initiators.iter().map(|initiator| initiator.acknowledged).collect();
            let (moves, fences) = (self.cluster.moves, self.cluster.fences);
            self.settled = Some(Settled {
                at: self.net.now,
                served_at: self.served_at.unwrap_or(self.net.now),
                moves,
                fences,
                acknowledged,
            });
        }
        Ok(None)
    }

    /// The number of volumes of each gateway, if every volume is active at its owner and nobody is
    /// to be fenced.
    fn loads(&self) -> Option<Vec<u64>> {
        let table = self.cluster.table().filter(|table| table.to_fence().is_empty())?;
        let mut loads = vec![0; self.gateways.len()];
        for (volume, record) in table.volumes().iter().enumerate() {
            let Place::Active(owner) = record.place else { return None };
            let owner = self.gateways.iter().position(|gateway| gateway.incarnation() == Some(owner));
            let owner = owner.filter(|at| self.gateways[*at].serves(volume, record.epoch))?;
            loads[owner] += 1;
        }
        (table.volumes().len() == self.cluster.images.len()).then_some(loads)
    }
}

/// The state when everything was served and even.
struct Settled {
    at: u64,
    served_at: u64,
    moves: u64,
    fences: u64,
    acknowledged: Vec<u64>,
}

pub(crate) fn name(gateway: usize) -> &'static str {
    ["a", "b", "c", "d"][gateway]
}

/// Shorter times than a group has, so that more happens in a run.
pub(crate) fn settings() -> Settings {
    Settings {
        beat_every: Duration::from_millis(100),
        read_every: Duration::from_millis(1000),
        suspect_after: 6,
        isolated_after: Duration::from_millis(2500),
        stable_after: 10,
        forgive_after: 200,
        move_every: Duration::from_millis(500),
        retry_every: Duration::from_millis(200),
    }
}

/// Time in which things break, in milliseconds.
const FAULT_TIME: u64 = 15_000;
const CALM_TIME: u64 = 1000;
/// Time after the repair until everything is served and even. A member with as many failures as
/// count needs 160 beats of up to 190 ms until it is given a volume.
const LIMIT: u64 = 60_000;
const QUIET_TIME: u64 = 8000;
/// Time after which a gateway does no command that it was given, on its slowest clock.
const LATE_COMMANDS: u64 = 6500;
