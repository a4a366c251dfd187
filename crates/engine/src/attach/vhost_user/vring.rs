//! A virtqueue as the front end describes it, piece by piece, and its queue once it is served.

use super::queue_task::{FrontEnd, NotStarted, QueueEvents, QueuePlace, RunningQueue, VringVolume};
use super::shared::DiskShared;
use crate::sys::shared_event::{EventSender, SharedEvent};
use blockmux_proto::virtio::wire::vhost_user::VringAddr;
use blockmux_proto::virtio::{DeviceState, GuestMemory, GuestRegion, InflightRecord, RingAreas, RingError};
use blockmux_volume::{Memory, Pages};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tracing::debug;

/// A region of the guest's memory, for all cores.
#[derive(Clone)]
pub(super) struct SharedRegion {
    pub(super) guest_addr: u64,
    pub(super) user_addr: u64,
    pub(super) pages: Arc<Pages>,
}

/// The records of requests in flight of all queues, for all cores.
#[derive(Clone)]
pub(super) struct SharedRecords {
    pub(super) pages: Arc<Pages>,
    /// The size of a queue for which each record has room.
    pub(super) queue_size: u16,
}

/// A core's view of the guest's memory.
fn memory_of(regions: &[SharedRegion]) -> GuestMemory {
    let region = |region: &SharedRegion| GuestRegion {
        guest_addr: region.guest_addr,
        user_addr: region.user_addr,
        memory: Memory::from_pages(&region.pages),
    };
    GuestMemory::new(regions.iter().map(region).collect())
}

fn areas_of(memory: &GuestMemory, size: u16, addr: &VringAddr) -> Result<RingAreas, RingError> {
    RingAreas::of_user(memory, size, (addr.descriptor, addr.available, addr.used))
}

/// What the queues of a device have in common.
pub(super) struct Machine<'a> {
    pub(super) shared: &'a DiskShared,
    pub(super) connection: &'a Arc<UnixStream>,
    pub(super) device: DeviceState,
    pub(super) regions: &'a [SharedRegion],
    pub(super) records: Option<&'a SharedRecords>,
    /// Queues are enabled from the start: the front end uses no protocol features.
    pub(super) is_enabled: bool,
}

/// A virtqueue takes requests.
pub(super) struct InUse;

/// A virtqueue of the front end.
#[derive(Default)]
pub(super) struct Vring {
    size: u16,
    addr: Option<VringAddr>,
    next_avail: u16,
    is_enabled: bool,
    /// The front end has said how it notifies, which starts the queue.
    is_started: bool,
    events: QueueEvents,
    running: Option<RunningQueue>,
}

/// What a front end says about a virtqueue before it is served.
pub(super) enum VringPart {
    Size(u16),
    Addr(VringAddr),
    /// The index at which it continues.
    Base(u16),
}

impl Vring {
    /// Takes a part of the description. It cannot change under a queue that takes requests. One
    /// that is disabled stops first: front ends that do not ask for the base begin anew after a
    /// reset of the guest in this way.
    ///
    /// # Errors
    /// If the queue takes requests.
    pub(super) fn describe(&mut self, part: VringPart, shared: &DiskShared) -> Result<(), InUse> {
        if self.running.is_some() {
            if self.is_enabled {
                return Err(InUse);
            }
            self.stop(shared);
        }
        match part {
            VringPart::Size(size) => self.size = size,
            VringPart::Addr(addr) => self.addr = Some(addr),
            VringPart::Base(next_avail) => self.next_avail = next_avail,
        }
        Ok(())
    }

    /// Serves the queue if it was described completely.
    ///
    /// # Errors
    /// If it is not in the guest's memory, or the volume was removed. It keeps its description.
    pub(super) fn start(&mut self, index: usize, machine: &Machine<'_>) -> io::Result<()> {
        let is_enabled = self.is_enabled || machine.is_enabled;
        let Some(addr) = self.addr.filter(|_| self.is_started && is_enabled && self.size > 0) else {
            return Ok(());
        };
        if self.running.is_some() {
            return Ok(());
        }
        let (size, regions, records) = (self.size, machine.regions.to_vec(), machine.records.cloned());
        let place = move || {
            let memory = memory_of(&regions);
            let areas = areas_of(&memory, size, &addr)?;
            let record = records.and_then(|records| {
                let memory = Memory::from_pages(&records.pages);
                InflightRecord::of_queue(&memory.seg(0, memory.len()), index, records.queue_size, size)
            });
            Ok(QueuePlace { memory, areas, record })
        };
        let DiskShared { exports, volume, .. } = machine.shared;
        let serves =
            VringVolume { exports: exports.clone(), volume: *volume, origin: machine.shared.origin() };
        let events = std::mem::take(&mut self.events);
        let core = machine.shared.core(index);
        let front_end = FrontEnd { events, connection: machine.connection.clone() };
        let at = (size, self.next_avail);
        let running = RunningQueue::start(core, serves, machine.device, at, front_end, place);
        let running = running.map_err(|NotStarted { error, events }| {
            self.events = *events;
            error
        })?;
        running.change(|queue| queue.enable(true));
        debug!("virtqueue {index} of {size} begins at {}", self.next_avail);
        (self.running, self.is_enabled) = (Some(running), true);
        Ok(())
    }

    /// Whether the queue is served.
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Stops the queue; returns the index at which it continues.
    pub(super) fn stop(&mut self, shared: &DiskShared) -> u16 {
        if let Some(running) = self.running.take() {
            self.next_avail = running.stop(&shared.is_forced).unwrap_or(self.next_avail);
        }
        (self.is_started, self.events) = (false, QueueEvents::default());
        self.next_avail
    }

    /// Ends the queue without answers.
    pub(super) fn lose(&mut self, shared: &DiskShared) {
        if let Some(running) = self.running.take() {
            running.lose(&shared.is_forced);
        }
    }

    /// Enables or disables the queue.
    pub(super) fn enable(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
        if let Some(running) = &self.running {
            running.change(move |queue| queue.enable(is_enabled));
        }
    }

    /// The guest's memory has changed.
    ///
    /// # Errors
    /// If the queue is not in it.
    pub(super) fn set_memory(&self, regions: &[SharedRegion]) -> Result<(), RingError> {
        let (Some(running), Some(addr)) = (&self.running, self.addr) else { return Ok(()) };
        let (regions, size) = (regions.to_vec(), self.size);
        let changed = running.change(move |queue| {
            let memory = memory_of(&regions);
            let areas = areas_of(&memory, size, &addr)?;
            queue.set_memory(memory, areas);
            Ok(())
        });
        changed.unwrap_or(Ok(()))
    }

    /// The guest notifies by this event descriptor, or not at all.
    pub(super) fn set_kick(&mut self, kick: Option<SharedEvent>) {
        self.is_started = true;
        match &self.running {
            Some(running) => drop(running.change(|queue| queue.set_kick(kick))),
            None => self.events.kick = kick,
        }
    }

    /// The guest's driver is notified by this event descriptor.
    pub(super) fn set_call(&mut self, call: Option<EventSender>) {
        match &self.running {
            Some(running) => drop(running.change(|queue| queue.set_call(call))),
            None => self.events.call = call,
        }
    }

    /// The front end is notified of errors by this event descriptor.
    pub(super) fn set_error(&mut self, error: Option<SharedEvent>) {
        match &self.running {
            Some(running) => drop(running.change(|queue| queue.set_error(error))),
            None => self.events.error = error,
        }
    }
}
