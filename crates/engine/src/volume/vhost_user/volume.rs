//! The volume, and the thread that keeps it connected.

use super::back_end::{BackEnd, BackEndError, MEMORY_ADDR};
use super::channel::VhostUserChannel;
use super::core_queue::{CoreQueue, RunningDriver};
use super::outage::Outage;
use super::state::{DiskState, OpenDisk, QueueUser, VhostUserOptions, lock};
use crate::core::reactor::EngineCore;
use crate::remote::check_unchanged;
use crate::sys::shared_event::SharedEvent;
use crate::sys::shared_memory::new_shared;
use crate::volume::core_queues::CoreQueues;
use blockmux_proto::virtio::BlkDriver;
use blockmux_volume::{Channel, Core, IoError, LinkCounts, Memory, Volume, VolumeInfo, Waker};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::read;
use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};

/// The block device of a vhost-user back end.
pub struct VhostUserVolume {
    disk: Arc<OpenDisk>,
}

impl VhostUserVolume {
    /// Connects to the back end that listens at `path`.
    ///
    /// # Errors
    /// If the back end cannot be used.
    pub fn open(path: &Path, options: VhostUserOptions) -> Result<VhostUserVolume, BackEndError> {
        let back_end = BackEnd::connect(path, options.request_timeout)?;
        let state = Arc::new(DiskState::new(path, &back_end, options)?);
        let served = state.clone();
        let run = move || served.serve(back_end);
        thread::Builder::new().name("vhost-user".to_owned()).spawn(run).map_err(BackEndError::Memory)?;
        Ok(VhostUserVolume { disk: Arc::new(OpenDisk(state)) })
    }
}

impl Volume for VhostUserVolume {
    fn info(&self) -> VolumeInfo {
        self.disk.0.info()
    }

    fn links(&self) -> Option<LinkCounts> {
        Some(LinkCounts { reconnects: self.disk.0.reconnects.load(Ordering::Relaxed) })
    }

    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        lock(&self.disk.0.listeners).push(call);
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let core = EngineCore::from_core(core).ok_or(IoError::Unsupported)?;
        let queue = self.disk.0.queue_of(&core)?;
        Ok(Box::new(VhostUserChannel::new(&self.disk, queue, depth, waker)))
    }
}

/// How far a connection has come.
#[derive(Default)]
struct ConnectionProgress {
    /// It is not the first one.
    is_again: bool,
    /// All queues were started.
    is_started: bool,
}

impl DiskState {
    /// The queue of a core; its first channel makes it.
    fn queue_of(self: &Arc<DiskState>, core: &Rc<EngineCore>) -> Result<Rc<RefCell<CoreQueue>>, IoError> {
        let queues = core.local(CoreQueues::<CoreQueue>::default);
        if let Some(queue) = queues.find(self.id) {
            return Ok(queue);
        }
        let (taken, most) = {
            let mut queues = lock(&self.queues);
            (queues.take(core.inbox()), queues.most)
        };
        let Some(number) = taken else {
            let path = self.path.display();
            warn!(
                "vhost-user:{path}: the back end has {most} virtqueues, and each core needs one; give it more \
                 (num-queues), or use fewer cores"
            );
            return Err(IoError::Unsupported);
        };
        let queue = CoreQueue::spawn(core, self.clone(), number);
        queues.add(self.id, &queue);
        self.wake();
        Ok(queue)
    }

    /// Keeps the volume connected until it is closed. Requests fail after the timeout, but the back
    /// end may still come back.
    fn serve(&self, back_end: BackEnd) {
        let (mut outage, mut progress) = (Outage::begin(), ConnectionProgress::default());
        let mut lost = self.use_back_end(back_end, &mut progress);
        loop {
            let is_waited_for = Arc::new(AtomicBool::new(false));
            let waits = is_waited_for.clone();
            self.on_queues(move |queue| {
                queue.remove();
                waits.fetch_or(queue.has_requests(), Ordering::Relaxed);
            });
            if self.is_closed.load(Ordering::Relaxed) {
                break;
            }
            let has_answered = self.has_answered.swap(false, Ordering::Relaxed);
            let was_idle = progress.is_started && !is_waited_for.load(Ordering::Relaxed);
            if has_answered || was_idle {
                outage = Outage::begin();
            }
            if let Err(error) = lost {
                self.on_loss(&error, &mut outage);
            }
            self.pause(outage.next_pause());
            if self.is_closed.load(Ordering::Relaxed) {
                break;
            }
            outage.was_tried = true;
            progress = ConnectionProgress { is_again: true, is_started: false };
            lost = self.connect_again().and_then(|back_end| self.use_back_end(back_end, &mut progress));
        }
        self.on_queues(CoreQueue::end);
    }

    /// The back end is lost, or cannot be used again.
    fn on_loss(&self, error: &BackEndError, outage: &mut Outage) {
        let path = self.path.display();
        if outage.exceeds(self.reconnect_timeout) {
            if !std::mem::replace(&mut outage.has_failed, true) {
                warn!("vhost-user:{path}: {error}; requests fail from now on");
            }
            self.on_queues(CoreQueue::fail);
        } else if !outage.was_tried {
            warn!("vhost-user:{path}: {error}; connecting again");
        }
    }

    /// Serves all queues by a back end, until it is lost or the volume is closed.
    fn use_back_end(
        &self,
        mut back_end: BackEnd,
        progress: &mut ConnectionProgress,
    ) -> Result<(), BackEndError> {
        // Cores that come later have their place already.
        let len = BlkDriver::MEMORY_LEN * lock(&self.queues).most;
        let (file, pages) = new_shared("blockmux-vhost-user", len).map_err(BackEndError::Memory)?;
        back_end.share(&file, len)?;
        // It was about the last connection.
        drop(self.take_complaint());
        if progress.is_again {
            self.reconnects.fetch_add(1, Ordering::Relaxed);
            info!("vhost-user:{}: connected again", self.path.display());
        }
        // The number of the user for whom each virtqueue was started.
        let mut started: Vec<Option<u64>> = Vec::new();
        loop {
            let users = lock(&self.queues).users.clone();
            started.resize(users.len(), None);
            for (index, user) in users.into_iter().enumerate() {
                let Some(QueueUser { number, core }) = user else { continue };
                if started[index] == Some(number) {
                    continue;
                }
                if started[index].take().is_some() {
                    // Its memory is used anew.
                    back_end.stop_queue(index)?;
                }
                let event = || {
                    let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                    made.map_err(|error| BackEndError::Memory(error.into()))
                };
                let shared = |event: &OwnedFd| {
                    event.try_clone().and_then(SharedEvent::new).map_err(BackEndError::Memory)
                };
                let (kick, call) = (event()?, event()?);
                let (own_call, kick_event) = (shared(&call)?, shared(&kick)?);
                let sender = || kick_event.sender().map_err(BackEndError::Memory);
                let (own_kick, mut late_kick) = (sender()?, sender()?);
                let at = index * BlkDriver::MEMORY_LEN;
                let (pages, disk, id) = (pages.clone(), back_end.disk.clone(), self.id);
                // The rings are cleared before the back end looks at them.
                let addr = MEMORY_ADDR + at as u64;
                let made = core.ask(move |core| {
                    let memory = Memory::from_pages(&pages).seg(at, BlkDriver::MEMORY_LEN);
                    let driver = BlkDriver::new(disk, &memory, addr, core.pool().clone());
                    let queue = core.local(CoreQueues::<CoreQueue>::default).find(id);
                    let queue = queue.filter(|queue| queue.borrow().number == number);
                    let running = RunningDriver::new(driver, own_kick, own_call);
                    queue.map(|queue| queue.borrow_mut().install(running))
                });
                if made.flatten().is_none() {
                    // The core has ended meanwhile.
                    continue;
                }
                back_end.start_queue(index, addr, &kick, &call)?;
                // It may have been notified before it knew how.
                late_kick.signal();
                started[index] = Some(number);
            }
            progress.is_started = true;
            self.wait(&mut back_end, None)?;
            if self.is_closed.load(Ordering::Relaxed) {
                return self.stop_queues(&back_end, &started);
            }
        }
    }

    /// Stops the queues of cores that have not ended, because the volume is closed. Those of others
    /// hold no request, and without a message the back end sees an orderly end of the connection,
    /// even if this process ends at once.
    fn stop_queues(&self, back_end: &BackEnd, started: &[Option<u64>]) -> Result<(), BackEndError> {
        let users = lock(&self.queues).users.clone();
        let queues = users.iter().map(|user| user.as_ref().map(|user| user.number)).zip(started).enumerate();
        let mut running = queues.filter(|(_, (user, begun))| user.is_some() && user == *begun);
        running.try_for_each(|(index, _)| back_end.stop_queue(index))
    }

    /// Waits for so long, or until the volume is used on another core, or is closed.
    fn pause(&self, pause: Duration) {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        // An error ends the pause early.
        let _ = poll(&mut fds, Timespec::try_from(pause).ok().as_ref());
        let _ = read(&self.wake, &mut [0; 8]);
    }

    /// Connects to the same device again.
    fn connect_again(&self) -> Result<BackEnd, BackEndError> {
        let back_end = BackEnd::connect(&self.path, self.request_timeout)?;
        let unchanged = check_unchanged(&self.info(), &back_end.disk.info, 1);
        let usable = unchanged.and_then(|()| self.take_queues(back_end.queues));
        usable.map(|()| back_end).map_err(BackEndError::Changed)
    }

    /// Takes the number of virtqueues of a back end; refuses it if the cores use more already.
    fn take_queues(&self, found: usize) -> Result<(), String> {
        lock(&self.queues)
            .reconnect(found)
            .map_err(|used| format!("it has {found} virtqueues now, and {used} cores use one each"))
    }

    /// Waits until the volume is used on another core, or is closed, or the back end does anything.
    fn wait(&self, back_end: &mut BackEnd, timeout: Option<&Timespec>) -> Result<(), BackEndError> {
        let requests = back_end.requests.as_ref().unwrap_or(&back_end.socket);
        let fds = &mut [
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::new(&back_end.socket, PollFlags::IN),
            PollFd::new(requests, PollFlags::IN),
        ];
        poll(fds, timeout).map_err(|error| BackEndError::Lost(error.into())).or_else(
            |error| match error {
                BackEndError::Lost(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
                error => Err(error),
            },
        )?;
        let [_, socket, requests] = fds.each_ref().map(|fd| !fd.revents().is_empty());
        // Cleared before the complaint is looked for, so that a later one wakes again.
        let _ = read(&self.wake, &mut [0; 8]);
        if let Some(complaint) = self.take_complaint() {
            return Err(complaint);
        }
        if socket {
            // It sends nothing without having been asked.
            return Err(BackEndError::Lost(io::ErrorKind::ConnectionReset.into()));
        }
        if requests && back_end.handle_request()? {
            back_end.read_config()?;
            self.take_size(back_end.disk.info.size);
        }
        Ok(())
    }

    fn take_size(&self, size: u64) {
        // Whoever sees the new size can use it.
        self.on_queues(move |queue| queue.resize(size));
        let was = self.size.swap(size, Ordering::Relaxed);
        if was != size {
            info!("vhost-user:{}: has {size} bytes now, and had {was}", self.path.display());
            lock(&self.listeners).iter().for_each(|call| call());
        }
    }

    /// Changes the queues of all cores, and waits for that.
    fn on_queues(&self, change: impl Fn(&mut CoreQueue) + Clone + Send + 'static) {
        // Not locked meanwhile: a core that is asked may be about to take a virtqueue.
        let users = lock(&self.queues).users.clone();
        for QueueUser { core, .. } in users.into_iter().flatten() {
            let (id, change) = (self.id, change.clone());
            core.ask(move |core| {
                if let Some(queue) = core.local(CoreQueues::<CoreQueue>::default).find(id) {
                    change(&mut queue.borrow_mut());
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::vhost_user::VhostUserDisk;
    use crate::attach::{DiskOptions, own_io::OwnIo};
    use crate::core::cores::{Cores, CoresConfig};
    use blockmux_proto::exports::{Export, Exports};
    use blockmux_volume::MemVolume;

    #[test]
    fn cores_are_asked_without_the_lock_that_they_need() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let cores = Cores::start(&CoresConfig::default()).unwrap();
        let volume = Arc::new(MemVolume::new(1 << 20));
        let (name, description) = ("disk".to_owned(), String::new());
        let exports = Exports::new(vec![Export { name, description, read_only: false, volume }]);
        let (id, _) = exports.find("disk").unwrap();
        let (name, io) = (None, OwnIo::default());
        let may_be_unprivileged = false;
        let options =
            DiskOptions { queues: 1, depth: 8, data: None, read_only: false, name, io, may_be_unprivileged };
        let _disk = VhostUserDisk::attach(&cores, &exports, id, options, &path).unwrap();
        let reconnect_timeout = Duration::MAX;
        let options = VhostUserOptions { read_only: false, reconnect_timeout, request_timeout: None };
        let volume = VhostUserVolume::open(&path, options).unwrap();
        let state = volume.disk.0.clone();
        let used = state.clone();
        cores.ask(0, move |core| used.queue_of(core).map(drop)).unwrap().unwrap();
        let (is_free, queues) = (Arc::new(AtomicBool::new(false)), state.clone());
        let found = is_free.clone();
        state.on_queues(move |_| {
            // The thread of the volume may have it for a moment, but does not keep it.
            drop(lock(&queues.queues));
            found.store(true, Ordering::Relaxed);
        });
        assert!(is_free.load(Ordering::Relaxed));
    }
}
