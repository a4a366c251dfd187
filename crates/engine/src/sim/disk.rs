//! The object of a simulation: a volume that may crash, the ledger that checks it, and the client.

use super::client::{Client, Plan};
use super::core::SimCore;
use super::crash::CrashVolume;
use super::ledger::Ledger;
use crate::net::host::Host;
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{Core, Volume};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The only volume of a target, named `disk0`.
pub(super) struct SimDisk {
    pub(super) volume: Arc<CrashVolume>,
    pub(super) exports: Exports,
    ledger: Arc<Mutex<Ledger>>,
    blocks: u64,
    seed: u64,
}

impl SimDisk {
    /// A disk whose random numbers all follow from `seed`; an I/O takes at most `delay`.
    pub(super) fn new(seed: u64, blocks: u64, delay: Duration, medium_errors_per_million: u32) -> SimDisk {
        let ledger = Arc::new(Mutex::new(Ledger::new(blocks)));
        let observed = ledger.clone();
        let observer = Box::new(move |block, bytes: &[u8]| lock(&observed).on_executed(block, bytes));
        let volume = Arc::new(CrashVolume::new(blocks, delay, medium_errors_per_million, seed ^ 1, observer));
        let (name, description) = ("disk0".to_owned(), String::new());
        let export = Export { name, description, read_only: false, volume: volume.clone() };
        SimDisk { volume, exports: Exports::new(vec![export]), ledger, blocks, seed }
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    /// Runs a client with this plan on `core`, using `remote`; sets the returned cell when it has
    /// finished.
    pub(super) fn start_client(&self, core: &Rc<SimCore>, remote: &dyn Volume, plan: Plan) -> Rc<Cell<bool>> {
        let finished = Rc::new(Cell::new(false));
        let any_core: Rc<dyn Core> = core.clone();
        core.spawn(|waker| {
            let channel = remote.open(&any_core, plan.depth, waker.clone());
            let channel = channel.expect("a remote volume opens on its own kind of host");
            Client::new(core, channel, self.ledger.clone(), plan, self.seed ^ 2, finished.clone())
        });
        finished
    }

    /// Checks every block at the end: returns the first fault, or the number of writes done again
    /// after they were acknowledged.
    pub(super) fn check_result(&self) -> Result<u64, String> {
        let mut ledger = self.ledger();
        for block in 0..self.blocks {
            let content = self.volume.content(block);
            ledger.check("volume", block, &content);
        }
        ledger.first_fault().map_or(Ok(ledger.stale_writes()), |fault| Err(fault.to_owned()))
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}
