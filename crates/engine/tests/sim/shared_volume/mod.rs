//! Four clients over iSCSI and NVMe/TCP share a volume with a limit: they lose connections, preempt
//! each other, and compare and write the same blocks, while writes are throttled, in flight or
//! orphaned. [`checker`] says what must hold.

mod checker;
mod client;
mod iscsi;
mod nvme;
mod wire;

use crate::seeds::{self, ms};
use crate::sides::{self, disk0, listen};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{BLOCK, CrashVolume, NetworkConditions, SimNet, World};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_volume::{
    Channel, Completion, Core, Io, IoError, Limit, Limits, Op, Volume, VolumeInfo, VolumeLimits, Waker,
};
use checker::{BURST, Checker, Counts, Stamp, WRITES_PER_S};
use client::{BLOCKS, CLIENTS, Client, Step};
use iscsi::IscsiLink;
use nvme::NvmeLink;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

/// A volume that tells the checker of each write that begins.
struct Observed {
    below: Arc<CrashVolume>,
    checker: Arc<Mutex<Checker>>,
}

struct ObservedChannel {
    below: Box<dyn Channel>,
    core: Rc<dyn Core>,
    checker: Arc<Mutex<Checker>>,
}

impl Volume for Observed {
    fn info(&self) -> VolumeInfo {
        self.below.info()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let below = self.below.open(core, depth, waker)?;
        Ok(Box::new(ObservedChannel { below, core: core.clone(), checker: self.checker.clone() }))
    }
}

impl Channel for ObservedChannel {
    fn submit(&mut self, io: Io) {
        if let (Op::Write { .. }, Some(data)) = (io.op, &io.data) {
            self.checker.lock().unwrap().on_begin(Stamp::of(&data.to_vec()), self.core.now());
        }
        self.below.submit(io);
    }

    fn kick(&mut self) {
        self.below.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.below.poll(done);
    }
}

/// What a run did, and how many of its writes were throttled.
fn run(seed: u64) -> Result<(Counts, u64), String> {
    let conditions = NetworkConditions { breaks_within: Some(60_000), ..NetworkConditions::FAIR };
    let mut world = World::new(SimNet::new(seed, conditions));
    let checker = Arc::new(Mutex::new(Checker::new(CLIENTS, BLOCKS)));
    let observer = checker.clone();
    let observer = move |block, bytes: &[u8]| observer.lock().unwrap().on_executed(block, Stamp::of(bytes));
    let below = Arc::new(CrashVolume::new(BLOCKS, ms(20), 0, seed, Box::new(observer)));
    let exports = disk0(Arc::new(Observed { below: below.clone(), checker: checker.clone() }));
    limit_writes(&exports);
    let cores = [(); 3].map(|()| world.add_core(16 << 20));
    let [over_iscsi, over_nvme] = ["/iscsi", "/nvme"].map(|path| Address::Unix(path.into()));
    listen(&world, &cores[0], &over_iscsi, &exports, sides::iscsi::sessions(&exports));
    listen(&world, &cores[1], &over_nvme, &exports, sides::nvme::sessions(&exports));
    let mut clients: Vec<Box<dyn Step>> = Vec::new();
    for number in 0..CLIENTS {
        let seed = seed << 8 | number as u64;
        clients.push(if number % 2 == 0 {
            Box::new(Client::<IscsiLink>::new(number, (&cores[2], over_iscsi.clone()), &checker, seed))
        } else {
            Box::new(Client::<NvmeLink>::new(number, (&cores[2], over_nvme.clone()), &checker, seed))
        });
    }
    let failed = |what: &dyn ToString| format!("seed {seed}: {}", what.to_string());
    let fault = || checker.lock().unwrap().first_fault().map_or(Ok(()), |fault| Err(failed(fault)));
    let mut steps = 0;
    while !clients.iter().all(|client| client.is_done()) {
        world.run_for(ms(1)).map_err(|hang| failed(&hang))?;
        clients.iter_mut().for_each(|client| client.step());
        fault()?;
        steps += 1;
        if steps > 60_000 {
            return Err(failed(&"some request was not answered within a minute"));
        }
    }
    let throttled = exports.volume_state(VolumeId(0)).expect("it is served").traffic().throttled;
    clients.iter_mut().for_each(|client| client.close());
    cores.iter().for_each(|core| core.stop());
    let is_over = || cores.iter().all(|core| core.is_idle() && core.pool().out_bytes() == 0);
    world.run_until(ms(60_000), is_over).map_err(|hang| failed(&hang))?;
    for block in 0..BLOCKS {
        checker.lock().unwrap().on_end(block, Stamp::of(&below.content(block)));
    }
    fault()?;
    let counts = checker.lock().unwrap().counts;
    Ok((counts, throttled))
}

fn limit_writes(exports: &Exports) {
    let write = Limit { iops: NonZeroU64::new(WRITES_PER_S), bytes_per_s: None };
    let volume = Limits { write, burst: BURST, ..Limits::default() };
    let limits = VolumeLimits { volume, ..VolumeLimits::default() };
    exports.volume_state(VolumeId(0)).expect("it is served").limiter().set_limits(limits);
}

#[test]
fn limits_lost_connections_preemptions_and_compares_hold_together() {
    let runs = seeds::run_each(20, run);
    let sum = |count: fn(&Counts) -> u64| runs.iter().map(|(counts, _)| count(counts)).sum::<u64>();
    let counts = [
        sum(|counts| counts.executed),
        sum(|counts| counts.compared),
        sum(|counts| counts.miscompared),
        sum(|counts| counts.conflicts),
        sum(|counts| counts.preempted),
        sum(|counts| counts.logins),
        sum(|counts| counts.orphaned),
        runs.iter().map(|(_, throttled)| throttled).sum(),
    ];
    assert!(seeds::is_one() || counts.iter().all(|count| *count > 20), "{counts:?}");
}

#[test]
fn a_shared_volume_has_the_same_history_with_the_same_seed() {
    assert_eq!(run(3), run(3));
}

const _: () = assert!(BLOCK == 512, "the clients address blocks of the volume");
