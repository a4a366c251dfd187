//! A remote disk over raw frames: a channel is an initiator session with its ports.
//!
//! There is no connection to lose. The session retransmits commands without a reply and fails those
//! that have waited too long, so a channel is only the session, its ports and a task that polls
//! them.

use crate::core::reactor::{EngineCore, Progress, Task};
use crate::net::frames::{FrameHost, FramePorts, QueueId, Side};
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::client::{AoeInitiatorConfig, AoeInitiatorSession};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Volume, VolumeInfo, Waker};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Duration;
use tracing::warn;

/// A disk that is reached through some interfaces.
pub struct AoeVolume<H: FrameHost = EngineCore> {
    interfaces: Vec<String>,
    address: AoeAddress,
    info: VolumeInfo,
    timeout: Duration,
    host: PhantomData<fn(&H)>,
}

impl<H: FrameHost> AoeVolume<H> {
    /// A disk at an address, with the properties `info`, reached through these interfaces. I/O
    /// fails when the disk has been silent for `timeout`.
    #[must_use]
    pub fn new(
        interfaces: Vec<String>,
        address: AoeAddress,
        info: VolumeInfo,
        timeout: Duration,
    ) -> AoeVolume<H> {
        AoeVolume { interfaces, address, info, timeout, host: PhantomData }
    }
}

impl<H: FrameHost> Volume for AoeVolume<H> {
    fn info(&self) -> VolumeInfo {
        self.info.clone()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let core = H::from_core(core).ok_or(IoError::Unsupported)?;
        let queue_id = core.queue_id(self.address).map_err(|error| {
            warn!(disk = %self.address, "cannot open another queue, because all queue ids are in use: {error}");
            IoError::PathLost
        })?;
        let mut made = None;
        core.try_spawn(|own| {
            let ports = FramePorts::open(&core, own, &self.interfaces, Side::Initiator { id: queue_id.id });
            let ports = ports.map_err(|(interface, error)| warn!(interface, "cannot be opened: {error}"))?;
            let QueueId { id, first, .. } = queue_id;
            let config = AoeInitiatorConfig { address: self.address, timeout: self.timeout, id, first };
            let link = Rc::new(RefCell::new(FrameLink {
                ports,
                _queue_id: queue_id,
                session: AoeInitiatorSession::new(config, core.pool().clone(), core.now()),
                first: self.info.clone(),
                core: core.clone(),
                waker: own.clone(),
                consumer: waker.clone(),
                done: Vec::with_capacity(depth as usize),
                is_parked: false,
                is_checked: false,
                is_closing: false,
            }));
            made = Some(link.clone());
            Ok::<_, ()>(link)
        });
        let link = made.ok_or(IoError::PathLost)?;
        Ok(Box::new(AoeChannel { info: self.info.clone(), link, done: Vec::new() }))
    }
}

struct AoeChannel<H: FrameHost> {
    info: VolumeInfo,
    link: Rc<RefCell<FrameLink<H>>>,
    /// Completions of invalid requests.
    done: Vec<Completion>,
}

struct FrameLink<H: FrameHost> {
    ports: FramePorts<H>,
    /// Keeps the id claimed while replies may arrive.
    _queue_id: QueueId,
    session: AoeInitiatorSession,
    /// Properties when the volume was opened.
    first: VolumeInfo,
    core: Rc<H>,
    waker: Waker,
    consumer: Waker,
    done: Vec<Completion>,
    is_parked: bool,
    is_checked: bool,
    is_closing: bool,
}

impl<H: FrameHost> Channel for AoeChannel<H> {
    #[inline]
    fn submit(&mut self, io: Io) {
        if let Err(error) = self.info.check(&io) {
            return self.done.push(Completion { tag: io.tag, result: Err(error) });
        }
        self.link.borrow_mut().session.submit(io);
    }

    #[inline]
    fn kick(&mut self) {
        let link = &mut *self.link.borrow_mut();
        let now = link.core.now();
        link.ports.send(&mut link.session, now);
        link.take_done();
        link.ports.arm(&link.session, now);
        // A spinning core polls for the reply itself; a full port is handled by the task.
        if link.ports.is_stuck() || (link.is_parked && link.core.spins()) {
            link.waker.wake();
        }
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        done.append(&mut self.link.borrow_mut().done);
    }
}

impl<H: FrameHost> Drop for AoeChannel<H> {
    fn drop(&mut self) {
        let mut link = self.link.borrow_mut();
        link.is_closing = true;
        link.waker.wake();
    }
}

impl<H: FrameHost> FrameLink<H> {
    fn take_done(&mut self) {
        while let Some(completion) = self.session.poll_done() {
            self.done.push(completion);
        }
    }

    /// Stops the session, with a warning, if the disk's size has changed: it may be another disk.
    fn check_disk(&mut self) {
        if self.is_checked || self.session.disk().is_none() {
            return;
        }
        self.is_checked = true;
        let is_same = self.session.volume_info().is_some_and(|now| now.size == self.first.size);
        if !is_same {
            warn!("the disk's size has changed since it was opened, so its I/O fails; open it again");
            self.session.on_stop();
        }
    }
}

impl<H: FrameHost> Task for FrameLink<H> {
    #[inline]
    fn run(&mut self) -> Progress {
        if self.is_closing {
            // There is no connection to close.
            return Progress::Done;
        }
        self.is_parked = false;
        let now = self.core.now();
        let received = self.ports.take_in(&mut self.session, now);
        self.check_disk();
        let sent = self.ports.send(&mut self.session, now);
        let before = self.done.len();
        self.take_done();
        if self.done.len() > before {
            self.consumer.wake();
        }
        self.ports.arm(&self.session, now);
        match received {
            Progress::Idle if sent => Progress::Drained,
            received => received,
        }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.is_parked = true;
        self.ports.park();
    }
}
