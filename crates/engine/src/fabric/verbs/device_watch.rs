//! Watches the asynchronous events of devices, each by a task of the core that was first to use it.
//!
//! ```text
//!   VerbsStream ──join──▶ WatchedDevice ◀──events── DeviceWatchTask ──hang up──▶ VerbsStream
//! ```
//! Connections of all cores join. The task ends with the last of them.

use super::device_events::{DeviceEvents, DeviceNotice};
use super::signal::EndSignal;
use crate::core::reactor::{EngineCore, Progress, Task, cross_thread_waker};
use crate::net::host::{Host, SocketWatch};
use blockmux_proto::driver::session::ConnectionControl;
use blockmux_verbs::async_event::{AsyncEvent, DeviceHandle, QueueIdentity};
use blockmux_volume::{Core, Waker};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::warn;

/// A connection is watched until this is dropped.
pub(super) struct DeviceMembership {
    device: Arc<WatchedDevice>,
    number: u64,
}

struct WatchedDevice {
    handle: DeviceHandle,
    connections: Mutex<WatchedConnections>,
}

struct WatchedConnections {
    events: DeviceEvents,
    signals: BTreeMap<u64, EndSignal>,
    /// Wakes the task, if there is one.
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The devices of this process. Its connections keep each open as long as it runs.
static DEVICES: Mutex<Vec<Arc<WatchedDevice>>> = Mutex::new(Vec::new());

/// Has a connection end when its device says so.
pub(super) fn join(
    core: &Rc<EngineCore>,
    handle: DeviceHandle,
    identity: QueueIdentity,
    (signal, peer): (EndSignal, &str),
) -> DeviceMembership {
    let device = WatchedDevice::of(handle);
    let mut connections = device.lock();
    let number = connections.events.add(identity, peer);
    connections.signals.insert(number, signal);
    let is_watched = connections.wake.is_some();
    drop(connections);
    if !is_watched {
        core.spawn(|waker| DeviceWatchTask::new(core, device.clone(), waker));
    }
    DeviceMembership { device, number }
}

impl WatchedDevice {
    fn of(handle: DeviceHandle) -> Arc<WatchedDevice> {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.handle.is_of_same_device(&handle)) {
            return device.clone();
        }
        let events = DeviceEvents::new(handle.name());
        let connections = WatchedConnections { events, signals: BTreeMap::new(), wake: None };
        let device = Arc::new(WatchedDevice { handle, connections: Mutex::new(connections) });
        devices.push(device.clone());
        device
    }

    fn lock(&self) -> MutexGuard<'_, WatchedConnections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedConnections {
    fn act(&self, notice: &DeviceNotice) {
        warn!("{}", notice.text);
        let ended = notice.ended.iter().filter_map(|number| self.signals.get(number));
        ended.for_each(ConnectionControl::hang_up);
    }
}

impl Drop for DeviceMembership {
    fn drop(&mut self) {
        let mut connections = self.device.lock();
        connections.events.connections.remove(&self.number);
        connections.signals.remove(&self.number);
        if connections.events.connections.is_empty() {
            connections.wake.iter().for_each(|wake| wake());
        }
    }
}

struct DeviceWatchTask {
    device: Arc<WatchedDevice>,
    core: Rc<EngineCore>,
    waker: Waker,
    watch: SocketWatch,
    /// Another task was first, or this one has ended.
    is_needless: bool,
    /// The device has no more events.
    is_gone: bool,
}

impl DeviceWatchTask {
    fn new(core: &Rc<EngineCore>, device: Arc<WatchedDevice>, waker: &Waker) -> DeviceWatchTask {
        let mut connections = device.lock();
        let is_needless = connections.wake.is_some();
        if !is_needless {
            connections.wake = Some(cross_thread_waker(core, waker));
        }
        drop(connections);
        DeviceWatchTask {
            device,
            core: core.clone(),
            waker: waker.clone(),
            watch: core.watch(waker),
            is_needless,
            is_gone: false,
        }
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        if self.is_gone {
            return None;
        }
        self.device.handle.next_event().unwrap_or_else(|_| {
            self.is_gone = true;
            Some(AsyncEvent::DeviceFailed)
        })
    }
}

impl Drop for DeviceWatchTask {
    /// Its core has ended: the next connection has another task watch the device.
    fn drop(&mut self) {
        if !self.is_needless {
            self.device.lock().wake = None;
        }
    }
}

impl Task for DeviceWatchTask {
    fn run(&mut self) -> Progress {
        if self.is_needless {
            return Progress::Done;
        }
        let device = self.device.clone();
        let mut connections = device.lock();
        if connections.events.connections.is_empty() || self.core.is_stopping() {
            self.is_needless = true;
            connections.wake = None;
            return Progress::Done;
        }
        let now = self.core.now();
        while let Some(event) = self.next_event() {
            let notice = connections.events.on_event(event, now);
            notice.iter().for_each(|notice| connections.act(notice));
        }
        while let Some(notice) = connections.events.on_time(now) {
            connections.act(&notice);
        }
        connections.events.deadline().iter().for_each(|at| self.core.wake_at(*at, &self.waker));
        if !self.is_gone {
            self.watch.wake_when(&device.handle.as_fd(), libc::POLLIN);
        }
        Progress::Idle
    }
}
