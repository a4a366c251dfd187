//! Runs work of logical units that belongs to no session ([`BackgroundWork`]) on a core.
//!
//! A unit calls back when it has such work; a task is then started, which ends when the work is
//! done.

use crate::core::reactor::{EngineCore, Inbox, Progress, Task};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::scsi::{self, BackgroundWork, LogicalUnit, MAX_LUN, UnitChange, UnitSource};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Waker};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Registers the callbacks of all units of a transport, once there is a core for their work.
pub(crate) struct Background {
    source: Arc<dyn UnitSource>,
    exports: Exports,
    begun: OnceLock<()>,
}

impl Background {
    pub(crate) fn new(source: Arc<dyn UnitSource>, exports: &Exports) -> Background {
        Background { source, exports: exports.clone(), begun: OnceLock::new() }
    }

    /// Runs the work on `core`, unless another core does so already.
    pub(crate) fn begin_on(&self, core: &Rc<EngineCore>) {
        self.begun.get_or_init(|| {
            let is_called = Arc::new(AtomicBool::new(false));
            let watched = Watched {
                units: Arc::new(scsi::ScsiTarget::new("", Vec::new())),
                exports: self.exports.clone(),
                inbox: core.inbox().clone(),
                is_called,
            };
            let later = watched.clone();
            self.source.watch_units(Box::new(move |change| match change {
                UnitChange::Added(volume, unit) => later.watch(volume, unit),
                UnitChange::Removed(gone) => drop(later.units.remove(|_, volume| volume == gone)),
            }));
            for (volume, unit) in self.source.units() {
                watched.watch(volume, &unit);
            }
        });
    }
}

/// The units that have a callback, and what the callback needs.
#[derive(Clone)]
struct Watched {
    /// Every unit once, by any of its LUNs.
    units: Arc<scsi::ScsiTarget>,
    exports: Exports,
    inbox: Inbox,
    is_called: Arc<AtomicBool>,
}

impl Watched {
    fn watch(&self, volume: VolumeId, unit: &Arc<LogicalUnit>) {
        // A volume has one unit, so the volume's index can serve as LUN.
        let Some(number) = u16::try_from(volume.0).ok().filter(|number| *number <= MAX_LUN) else { return };
        self.units.add(number, volume, unit.clone());
        let Watched { exports, inbox, is_called, .. } = self.clone();
        // Weak, because the unit owns this callback and would keep itself alive.
        let units = Arc::downgrade(&self.units);
        unit.on_background(move || {
            if is_called.swap(true, Ordering::AcqRel) {
                return;
            }
            let Some(units) = units.upgrade() else { return };
            let (exports, is_called) = (exports.clone(), is_called.clone());
            inbox.send(move |core| {
                // A later callback means that there is new work to check for.
                is_called.store(false, Ordering::Release);
                if !core.is_stopping() {
                    BackgroundTask::spawn(core, units, exports);
                }
            });
        });
    }
}

/// Runs background work until there is none.
struct BackgroundTask {
    /// Declared first, so that it is dropped before the channels.
    work: BackgroundWork,
    exports: Exports,
    channels: Vec<(VolumeId, Box<dyn Channel>)>,
    done: Vec<Completion>,
    core: Rc<EngineCore>,
    waker: Waker,
}

impl BackgroundTask {
    fn spawn(core: &Rc<EngineCore>, units: Arc<scsi::ScsiTarget>, exports: Exports) {
        core.spawn(|waker| BackgroundTask {
            work: BackgroundWork::new(units, core.now()),
            exports,
            channels: Vec::new(),
            done: Vec::with_capacity(1),
            core: core.clone(),
            waker: waker.clone(),
        });
    }

    fn submit(&mut self, volume: VolumeId, io: Io) {
        let tag = io.tag;
        match self.channel(volume) {
            Ok(channel) => {
                channel.submit(io);
                channel.kick();
            }
            Err(error) => self.done.push(Completion { tag, result: Err(error) }),
        }
    }

    fn channel(&mut self, volume: VolumeId) -> Result<&mut Box<dyn Channel>, IoError> {
        // A volume that was removed cannot be reached.
        let export = self.exports.get(volume).ok_or(IoError::PathLost)?;
        if let Some(at) = self.channels.iter().position(|(id, _)| *id == volume) {
            return Ok(&mut self.channels[at].1);
        }
        let core: Rc<dyn Core> = self.core.clone();
        self.channels.push((volume, export.volume.open(&core, 1, self.waker.clone())?));
        Ok(&mut self.channels.last_mut().ok_or(IoError::PathLost)?.1)
    }
}

impl Task for BackgroundTask {
    fn run(&mut self) -> Progress {
        if self.core.is_stopping() {
            return Progress::Done;
        }
        let now = self.core.now();
        while self.work.on_turn(now) {
            while let Some((volume, io)) = self.work.poll_io() {
                self.submit(volume, io);
            }
            self.channels.iter_mut().for_each(|(_, channel)| channel.poll(&mut self.done));
            let Some(done) = self.done.pop() else {
                if let Some(at) = self.work.poll_timeout() {
                    self.core.wake_at(at, &self.waker);
                }
                return Progress::Idle;
            };
            self.work.on_io(done, now);
        }
        Progress::Done
    }
}
