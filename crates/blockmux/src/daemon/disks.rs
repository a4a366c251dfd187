//! The disks that the daemon has attached (`[[attachment]]`).
//!
//! Attaching and detaching may hang, in the kernel or because a volume does not answer. No lock is
//! held meanwhile: the entry of the volume says what is under way. Callers run both as work that
//! may block (`blocking_work.rs`).

use crate::api::bodies::Attachment;
use crate::api::status::AttachmentStatus;
use crate::api::{ApiError, ErrorCode};
use crate::attach::way::{self, WantedWays, Way, WayOptions};
use crate::failure::Failure;
use crate::process::privileges::{PrivilegedThread, has_capability, has_dropped};
use blockmux_engine::attach::own_io::{IoProcesses, OwnIo};
use blockmux_engine::attach::{AttachError, AttachedAs, AttachedDisk, DetachError, DiskOptions};
use blockmux_engine::core::cores::Cores;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::{VolumeState, VolumeTraffic};
use rustix::thread::CapabilitySet;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The attached disks, by the names of their volumes.
pub(super) struct Disks {
    entries: Mutex<BTreeMap<String, DiskEntry>>,
    /// The daemon stops, or leaves its disks to another process.
    has_ended: AtomicBool,
    /// Has the capabilities for attaching, which other threads have dropped. `None` if they have
    /// not.
    privileged: Option<PrivilegedThread>,
    /// Read and flush the disks.
    io: IoProcesses,
    /// The daemon does not deny itself to mount file systems.
    may_mount: bool,
    /// Called with the cores of the first disk, if the daemon has prepared itself for none.
    on_first: Mutex<Option<fn(&Cores)>>,
}

/// What serves the disks.
#[derive(Clone)]
pub(super) struct DiskServer {
    pub(super) cores: Arc<Cores>,
    pub(super) exports: Exports,
}

struct DiskEntry {
    asked: Attachment,
    state: DiskState,
}

enum DiskState {
    /// Its first read is given up by this.
    Attaching(OwnIo),
    Attached(VolumeDisk),
    /// It is being removed, or it is removed and the running config has not forgotten it yet.
    Detaching(VolumeDisk),
    /// It could not be attached; the next reload tries again.
    Failed(String),
}

/// The disk of a volume.
#[derive(Clone)]
struct VolumeDisk {
    disk: Arc<dyn AttachedDisk>,
    way: Way,
    read_only: bool,
    volume_state: Weak<VolumeState>,
}

/// An attachment, for people.
pub(super) struct DiskInfo {
    pub(super) volume: String,
    pub(super) read_only: bool,
    /// In a word.
    pub(super) state: &'static str,
    /// Why it is not attached.
    pub(super) error: Option<String>,
    /// Absent while it is not attached.
    pub(super) device: Option<DeviceInfo>,
}

impl DiskInfo {
    /// The status for the API.
    pub(super) fn into_status(self) -> AttachmentStatus {
        let DiskInfo { volume, read_only, state, error, device } = self;
        AttachmentStatus {
            volume,
            state: state.to_owned(),
            device: device.as_ref().map(|own| own.path.display().to_string()),
            via: device.as_ref().map(|own| own.way.name().to_owned()),
            read_only,
            recovered: device.as_ref().is_some_and(|own| own.is_recovered),
            error,
            traffic: device.map(|own| own.traffic).unwrap_or_default().into(),
        }
    }
}

/// The device of an attachment.
pub(super) struct DeviceInfo {
    pub(super) path: PathBuf,
    pub(super) way: Way,
    pub(super) is_recovered: bool,
    pub(super) traffic: VolumeTraffic,
}

impl Disks {
    /// No disk yet; `privileged` attaches and detaches them, if threads of others may not, and `io`
    /// reads and flushes them. `on_first` prepares cores that serve for their first disk.
    pub(super) fn new(
        privileged: Option<PrivilegedThread>,
        io: IoProcesses,
        may_mount: bool,
        on_first: Option<fn(&Cores)>,
    ) -> Disks {
        let (entries, has_ended) = (Mutex::default(), AtomicBool::new(false));
        Disks { entries, has_ended, privileged, io, may_mount, on_first: Mutex::new(on_first) }
    }

    /// Checks that the machine has the way of an attachment.
    ///
    /// # Errors
    /// If not; the message says what to do.
    pub(super) fn probe(&self, asked: &Attachment) -> Result<(), Failure> {
        let (own, may_mount) = (asked.clone(), self.may_mount);
        self.run(move || choose(&own, may_mount).map(drop)).flatten()
    }

    /// Attaches a volume; returns its device.
    ///
    /// # Errors
    /// If it is attached already or cannot be attached. Then nothing has changed.
    pub(super) fn attach(&self, server: &DiskServer, asked: &Attachment) -> Result<PathBuf, ApiError> {
        let volume = &asked.volume;
        asked.check().map_err(ApiError::invalid)?;
        check_mounts(asked, self.may_mount).map_err(ApiError::invalid)?;
        let (io, may_mount) = (OwnIo::by(&self.io), self.may_mount);
        let failed_before = {
            let mut entries = self.lock();
            check_free(&entries, volume)?;
            let entry = DiskEntry { asked: asked.clone(), state: DiskState::Attaching(io.clone()) };
            entries.insert(volume.clone(), entry)
        };
        let (cores, needs_privileges) = (server.cores.clone(), asked.needs_privileges());
        let (server, own) = (server.clone(), asked.clone());
        let attached = match needs_privileges {
            true => self.run(move || attach(&server, &own, io, may_mount)).flatten(),
            // The thread of the socket would have the capabilities, too.
            false => attach(&server, &own, io, may_mount),
        };
        if needs_privileges && attached.is_ok() {
            let on_first = self.on_first.lock().unwrap_or_else(PoisonError::into_inner).take();
            on_first.into_iter().for_each(|prepare| prepare(&cores));
        }
        let mut entries = self.lock();
        match attached {
            Ok(disk) if self.has_ended.load(Ordering::Relaxed) => {
                entries.remove(volume);
                drop(entries);
                self.abandon(volume, &disk, "the daemon stopped before it was attached");
                Err(ApiError::failed(about(volume, "the daemon stops")))
            }
            Ok(disk) => {
                let device = disk.disk.path();
                let entry = DiskEntry { asked: asked.clone(), state: DiskState::Attached(disk) };
                entries.insert(volume.clone(), entry);
                Ok(device)
            }
            Err(failure) => {
                entries.remove(volume);
                entries.extend(failed_before.map(|entry| (volume.clone(), entry)));
                Err(failure.into())
            }
        }
    }

    /// Attaches a volume for a change, which may yet be refused.
    ///
    /// # Errors
    /// The errors of [`Disks::attach`].
    pub(super) fn attach_new(
        self: &Arc<Disks>,
        server: &DiskServer,
        asked: Attachment,
    ) -> Result<NewDisk, ApiError> {
        self.attach(server, &asked)?;
        let disk = self.lock().get(&asked.volume).and_then(|entry| entry.state.disk().cloned());
        let server = server.clone();
        Ok(NewDisk { disks: self.clone(), server, asked, disk: disk.map(|own| own.disk) })
    }

    /// Checks that a volume can be attached as far as its disk is concerned.
    ///
    /// # Errors
    /// If it has one, or one that is being attached or detached.
    pub(super) fn check_free(&self, volume: &str) -> Result<(), ApiError> {
        check_free(&self.lock(), volume)
    }

    /// Attaches all volumes of a config that are not attached; returns what failed. `status` shows
    /// that, and the next reload tries again.
    pub(super) fn attach_missing(&self, server: &DiskServer, all: &[Attachment]) -> Vec<String> {
        all.iter().filter_map(|asked| self.attach_if_missing(server, asked).err()).collect()
    }

    fn attach_if_missing(&self, server: &DiskServer, asked: &Attachment) -> Result<(), String> {
        let is_there = |entry: &DiskEntry| !matches!(entry.state, DiskState::Failed(_));
        if self.lock().get(&asked.volume).is_some_and(is_there) {
            return Ok(());
        }
        self.attach(server, asked).map(drop).map_err(|error| {
            let why = error.to_string();
            self.note_failure(asked, &why);
            why
        })
    }

    /// Shows why a volume is not attached, unless a command attaches it meanwhile.
    fn note_failure(&self, asked: &Attachment, why: &str) {
        let failed = || DiskEntry { asked: asked.clone(), state: DiskState::Failed(why.to_owned()) };
        self.lock().entry(asked.volume.clone()).or_insert_with(failed);
    }

    /// Checks that the disk of a volume, if it has one, can be detached.
    ///
    /// # Errors
    /// If it is in use, or it is being attached or detached.
    pub(super) fn check_unused(&self, volume: &str) -> Result<(), ApiError> {
        let disk = match self.lock().get(volume).map(|entry| &entry.state) {
            None | Some(DiskState::Failed(_)) => return Ok(()),
            Some(DiskState::Attached(own)) => own.disk.clone(),
            Some(state) => return Err(state.is_busy(volume)),
        };
        self.run(move || disk.check_unused())?.map_err(|error| cannot_detach(volume, &error))
    }

    /// Detaches the disks that volumes have. Dropping the result attaches them again.
    ///
    /// # Errors
    /// If one cannot be detached; then all stay attached.
    pub(super) fn detach_all(
        self: &Arc<Disks>,
        server: &DiskServer,
        volumes: &[String],
        force: bool,
    ) -> Result<DetachedDisks, ApiError> {
        let (disks, server) = (self.clone(), server.clone());
        let mut detached = DetachedDisks { disks, server, volumes: Vec::new() };
        for volume in volumes.iter().filter(|volume| self.has(volume)) {
            self.detach(volume, force)?;
            detached.volumes.push(volume.clone());
        }
        Ok(detached)
    }

    /// Detaches the disk of a volume, if it has one. Its entry stays until [`Disks::forget`].
    ///
    /// # Errors
    /// If it is in use and `force` is not given, or it cannot be detached. Then it stays attached.
    fn detach(&self, volume: &str, force: bool) -> Result<(), ApiError> {
        let Some(own) = self.begin_detach(volume, force)? else { return Ok(()) };
        let disk = own.disk.clone();
        let remove = move || if force { disk.detach_by_force() } else { disk.detach() };
        let detached = self.run(remove)?;
        detached.map_err(|error| {
            let mut entries = self.lock();
            // It may have been removed by force meanwhile.
            if let Some(DiskEntry { state, .. }) = entries.get_mut(volume)
                && state.disk().is_some_and(|now| Arc::ptr_eq(&now.disk, &own.disk))
            {
                *state = DiskState::Attached(own);
            }
            cannot_detach(volume, &error)
        })
    }

    /// Marks a disk as one that is being detached; `None` if there is none.
    fn begin_detach(&self, volume: &str, force: bool) -> Result<Option<VolumeDisk>, ApiError> {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(volume) else { return Ok(None) };
        let own = match &entry.state {
            DiskState::Failed(_) => return Ok(None),
            DiskState::Attached(own) => own.clone(),
            // The flush may wait for a volume that does not answer.
            DiskState::Detaching(own) if force => own.clone(),
            state => return Err(state.is_busy(volume)),
        };
        entry.state = DiskState::Detaching(own.clone());
        Ok(Some(own))
    }

    /// Forgets a disk that was detached, or one that could not be attached.
    fn forget(&self, volume: &str) {
        let mut entries = self.lock();
        let is_gone = |state: &DiskState| matches!(state, DiskState::Detaching(_) | DiskState::Failed(_));
        if entries.get(volume).is_some_and(|entry| is_gone(&entry.state)) {
            entries.remove(volume);
        }
    }

    /// The device of an attached volume.
    ///
    /// # Errors
    /// If it has none, or none any longer.
    pub(super) fn device_of(&self, volume: &str) -> Result<PathBuf, ApiError> {
        let disk = self.lock().get(volume).and_then(|entry| entry.state.disk().map(|own| own.disk.clone()));
        let gone =
            || ApiError::from(format!("{volume}: was removed or replaced at the same time; try again"));
        disk.map(|disk| disk.path()).ok_or_else(gone)
    }

    /// Whether the volume has an attachment, perhaps one that failed or is under way.
    fn has(&self, volume: &str) -> bool {
        self.lock().contains_key(volume)
    }

    /// All attachments, for people.
    pub(super) fn list(&self) -> Vec<DiskInfo> {
        let entries = self.lock();
        let info = |(volume, DiskEntry { asked, state }): (&String, &DiskEntry)| DiskInfo {
            volume: volume.clone(),
            read_only: state.disk().map_or(asked.read_only, |own| own.read_only),
            state: state.word(),
            error: match state {
                DiskState::Failed(why) => Some(why.clone()),
                _ => None,
            },
            device: state.disk().map(VolumeDisk::info),
        };
        entries.iter().map(info).collect()
    }

    /// Detaches all disks, because the daemon stops. One that is in use or cannot be flushed is
    /// left to the next process. If it would not outlive this process, it is removed by force: the
    /// daemon's stop ends its volume for everybody, as for clients over a network.
    pub(super) fn end(&self) {
        let (sender, ended) = mpsc::channel();
        let mut left = self.take_all();
        for (volume, own) in &left {
            let (sender, volume, disk) = (sender.clone(), volume.clone(), own.disk.clone());
            // The receiver is gone if the flush takes too long.
            self.start(move || drop(sender.send((volume, disk.detach()))));
        }
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        while !left.is_empty() {
            let Ok((volume, result)) = ended.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            else {
                break;
            };
            if let (Some(own), Err(error)) = (left.remove(&volume), result) {
                self.abandon(&volume, &own, &error.to_string());
            }
        }
        for (volume, own) in &left {
            self.abandon(volume, own, "its flush waits for the volume");
        }
    }

    /// The volumes whose disks a process that takes over continues with.
    ///
    /// # Errors
    /// Says which disk cannot be handed over, and what to do.
    pub(super) fn offer(&self) -> Result<Vec<String>, String> {
        let disk = |(volume, entry): (&String, &DiskEntry)| match &entry.state {
            DiskState::Failed(_) => None,
            DiskState::Attached(own) if own.disk.outlives_process() => Some(Ok(volume.clone())),
            DiskState::Attached(own) => Some(Err(format!(
                "the disk {} of `{volume}` would end with this process; detach it first ('ctl detach-disk')",
                own.disk.path().display(),
            ))),
            state => Some(Err(state.is_busy(volume).to_string())),
        };
        self.lock().iter().filter_map(disk).collect()
    }

    /// Lets all disks wait for the process that takes over.
    pub(super) fn leave(&self) {
        for (volume, own) in self.take_all() {
            own.disk.leave();
            info!("{volume}: {} waits for the new process", own.disk.path().display());
        }
    }

    /// Gives a disk up that cannot be detached.
    fn abandon(&self, volume: &str, own: &VolumeDisk, why: &str) {
        let disk = own.disk.path();
        let disk = disk.display();
        if own.disk.outlives_process() {
            own.disk.leave();
            warn!("{volume}: {disk} stays, and its requests wait until the volume is attached again ({why})");
            return;
        }
        warn!("{volume}: {disk} is removed by force, because it would end with the daemon ({why})");
        let (sender, removed) = mpsc::channel();
        let own = own.disk.clone();
        self.start(move || drop(sender.send(own.detach_by_force())));
        match removed.recv_timeout(FORCE_TIMEOUT) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!("{volume}: {error}"),
            Err(_) => warn!("{volume}: the kernel does not remove {disk}"),
        }
    }

    /// Takes all disks, and gives up those that are being attached.
    fn take_all(&self) -> BTreeMap<String, VolumeDisk> {
        let all = {
            let mut entries = self.lock();
            self.has_ended.store(true, Ordering::Relaxed);
            std::mem::take(&mut *entries)
        };
        for entry in all.values() {
            if let DiskState::Attaching(io) = &entry.state {
                io.abort();
            }
        }
        let attached = |(volume, entry): (String, DiskEntry)| Some((volume, entry.state.disk()?.clone()));
        all.into_iter().filter_map(attached).collect()
    }

    /// Runs work with the capabilities that it needs, and waits for it.
    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
        if self.privileged.is_none() {
            return Ok(work());
        }
        let (sender, result) = mpsc::channel();
        self.start(move || drop(sender.send(work())));
        result
            .recv()
            .map_err(|_| Failure::run("a thread for disks has ended; the daemon's log has the reason"))
    }

    /// Starts a thread with the capabilities that its work needs.
    fn start(&self, work: impl FnOnce() + Send + 'static) {
        match &self.privileged {
            Some(privileged) => privileged.start(Box::new(work)),
            // Without a thread, the caller that waits for the work notices that it has ended.
            None => drop(thread::Builder::new().name("disks".to_owned()).spawn(work)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DiskEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the disks when it is dropped, unless they are left to another process before.
pub(super) struct EndingDisks {
    disks: Arc<Disks>,
    /// The flushes of the disks need their cores.
    _server: DiskServer,
}

impl EndingDisks {
    pub(super) fn new(disks: &Arc<Disks>, server: DiskServer) -> EndingDisks {
        EndingDisks { disks: disks.clone(), _server: server }
    }
}

impl Drop for EndingDisks {
    fn drop(&mut self) {
        self.disks.end();
    }
}

/// Disks that were detached. Dropping it attaches them again, which may block.
pub(super) struct DetachedDisks {
    disks: Arc<Disks>,
    server: DiskServer,
    volumes: Vec<String>,
}

impl DetachedDisks {
    /// Lets the disks stay detached, and forgets them.
    pub(super) fn keep(mut self) {
        self.volumes.drain(..).for_each(|volume| self.disks.forget(&volume));
    }
}

impl Drop for DetachedDisks {
    fn drop(&mut self) {
        for volume in self.volumes.drain(..) {
            let asked = self.disks.lock().get(&volume).map(|entry| entry.asked.clone());
            self.disks.forget(&volume);
            let failed =
                asked.into_iter().flat_map(|asked| self.disks.attach_missing(&self.server, &[asked]));
            failed.for_each(|why| warn!("{why}; reload the config to try again"));
        }
    }
}

/// A disk that was attached for a change. Dropping it detaches it again, also if a program has
/// opened it meanwhile: the command that attached it has failed.
pub(super) struct NewDisk {
    disks: Arc<Disks>,
    server: DiskServer,
    pub(super) asked: Attachment,
    /// `None` if it stays, or is gone.
    disk: Option<Arc<dyn AttachedDisk>>,
}

impl NewDisk {
    /// Lets the disk stay attached.
    pub(super) fn keep(mut self) {
        self.disk = None;
    }

    /// Whether it is still the disk of the volume with its name.
    pub(super) fn is_there(&self) -> bool {
        let exports = &self.server.exports;
        let served = exports.find(&self.asked.volume).and_then(|(id, _)| exports.volume_state(id));
        let entries = self.disks.lock();
        let own = entries.get(&self.asked.volume).and_then(|entry| entry.state.disk());
        let is_it = |own: &VolumeDisk| {
            let volume_state = own.volume_state.upgrade();
            self.disk.as_ref().is_some_and(|disk| Arc::ptr_eq(disk, &own.disk))
                && volume_state.zip(served).is_some_and(|(own, served)| Arc::ptr_eq(&own, &served))
        };
        own.is_some_and(is_it)
    }
}

impl Drop for NewDisk {
    fn drop(&mut self) {
        let Some(disk) = self.disk.take() else { return };
        let volume = &self.asked.volume;
        let is_own = self
            .disks
            .lock()
            .get(volume)
            .is_some_and(|entry| entry.state.disk().is_some_and(|own| Arc::ptr_eq(&own.disk, &disk)));
        if is_own {
            warn!("{volume}: is detached again, because the change that attached it was not made");
            let detached = self.disks.detach_all(&self.server, slice::from_ref(volume), true);
            detached.map_or_else(|error| warn!("{error}"), DetachedDisks::keep);
        }
    }
}

/// Checks that a volume has no disk, and none that is being attached or detached.
fn check_free(entries: &BTreeMap<String, DiskEntry>, volume: &str) -> Result<(), ApiError> {
    match entries.get(volume).map(|entry| &entry.state) {
        None | Some(DiskState::Failed(_)) => Ok(()),
        Some(DiskState::Attached(own)) => {
            let device = own.disk.path();
            let text = format!("attachment `{volume}`: is there already, as {}", device.display());
            Err(ApiError::new(ErrorCode::Conflict, text))
        }
        Some(state) => Err(state.is_busy(volume)),
    }
}

impl DiskState {
    fn disk(&self) -> Option<&VolumeDisk> {
        match self {
            DiskState::Attached(own) | DiskState::Detaching(own) => Some(own),
            DiskState::Attaching(_) | DiskState::Failed(_) => None,
        }
    }

    fn word(&self) -> &'static str {
        match self {
            DiskState::Attaching(_) => "attaching",
            DiskState::Attached(_) => "attached",
            DiskState::Detaching(_) => "detaching",
            DiskState::Failed(_) => "failed",
        }
    }

    fn is_busy(&self, volume: &str) -> ApiError {
        let text = format!("attachment `{volume}`: another command is {} it; try again later", self.word());
        ApiError::new(ErrorCode::Busy, text)
    }
}

impl VolumeDisk {
    fn info(&self) -> DeviceInfo {
        let (path, way, origin) = (self.disk.path(), self.way, self.disk.origin());
        let origins = self.volume_state.upgrade().map(|own| own.traffic_by_origin()).unwrap_or_default();
        let own = origins.iter().filter(|one| one.origin == origin);
        DeviceInfo {
            traffic: own.fold(VolumeTraffic::default(), |sum, one| sum.plus(one.traffic)),
            is_recovered: self.disk.attached_as() == AttachedAs::Recovered,
            path,
            way,
        }
    }
}

fn attach(
    server: &DiskServer,
    asked: &Attachment,
    io: OwnIo,
    may_mount: bool,
) -> Result<VolumeDisk, Failure> {
    let Attachment { volume, socket, name, read_only, .. } = asked;
    let DiskServer { cores, exports } = server;
    let found = exports.find(volume).and_then(|(id, export)| Some((id, export, exports.volume_state(id)?)));
    let (id, export, volume_state) = found.ok_or_else(|| about(volume, "the volume is removed"))?;
    let info = volume_state.volume().info();
    if info.size == 0 {
        return Err(about(volume, "the volume is empty; attach one with at least one block"));
    }
    let read_only = *read_only || export.read_only || info.read_only;
    let data = volume_state.disk_number();
    // A serving daemon is not to end because a request takes long.
    let (queues, name, may_be_unprivileged) = (cores.count() as u16, name.clone(), false);
    let options = DiskOptions { queues, depth: DEPTH, data, read_only, name, io, may_be_unprivileged };
    let way = choose(asked, may_mount)?;
    if !read_only {
        way::check_not_left(way, data).map_err(|error| about(volume, error))?;
    }
    let options =
        WayOptions::plain(way, options, socket.clone(), volume).map_err(|error| about(volume, error))?;
    let disk = options.attach(cores, exports, &[id]).map_err(|error| match error {
        // The path is the user's.
        AttachError::Socket { .. } => about(volume, error),
        error => Failure::run(about(volume, error)),
    })?;
    Ok(VolumeDisk { disk: disk.into(), way, read_only, volume_state: Arc::downgrade(&volume_state) })
}

/// Checks that a daemon that may not mount file systems does not have to.
///
/// # Errors
/// If it has to; the message says what to do.
pub(super) fn check_mounts(asked: &Attachment, may_mount: bool) -> Result<(), Failure> {
    match asked.via() {
        Some(way) if way.mounts() && !may_mount => Err(about(&asked.volume, MAY_NOT_MOUNT)),
        _ => Ok(()),
    }
}

/// The way to attach a volume that this machine has, and a daemon may use.
fn choose(asked: &Attachment, may_mount: bool) -> Result<Way, Failure> {
    check_mounts(asked, may_mount)?;
    let advice = match has_dropped(CapabilitySet::SYS_ADMIN) && !has_capability(CapabilitySet::SYS_ADMIN) {
        true => LACKS_PRIVILEGES,
        false => "",
    };
    let wanted = if may_mount { WantedWays::All } else { WantedWays::BlockDevices };
    Way::choose(asked.via(), wanted).map_err(|error| about(&asked.volume, format!("{error}{advice}")))
}

/// A failure of an attachment, whose entry in the config the message names.
fn about(volume: &str, what: impl std::fmt::Display) -> Failure {
    Failure::request(format!("attachment `{volume}`: {what}"))
}

/// The refusal to detach a disk that is in use, for a command that can force it.
pub(super) fn or_by_force(error: ApiError) -> ApiError {
    match error.code {
        ErrorCode::Conflict => {
            let text = format!("{error}, or use --force (API: ?force=true), which makes its users' I/O fail");
            ApiError::new(error.code, text)
        }
        _ => error,
    }
}

fn cannot_detach(volume: &str, error: &DetachError) -> ApiError {
    let code = match error {
        DetachError::InUse { .. } | DetachError::Open { .. } | DetachError::Connected { .. } => {
            ErrorCode::Conflict
        }
        _ => ErrorCode::Failed,
    };
    ApiError::new(code, format!("attachment `{volume}`: {error}"))
}

/// The advice for a daemon that did not expect to attach a disk.
const LACKS_PRIVILEGES: &str = "; the daemon dropped the required capabilities when it started: restart it with \
                                --keep-privileges, or with an [[attachment]] in its config";
/// The advice for fuse, in a daemon that has installed its filter of system calls.
const MAY_NOT_MOUNT: &str = "a serving daemon denies itself to mount file systems, as fuse needs: start it with \
                             --keep-privileges, or use `blockmux attach --via fuse`";
/// Maximum number of requests in flight on each queue of a disk.
const DEPTH: u16 = 128;
/// Time for the last flush of all disks when the daemon stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the kernel to remove a disk by force.
const FORCE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::fake::{self, FakeState};
    use crate::attach::own_io::by_this_program;
    use crate::daemon::config::VolumeEntry;
    use crate::daemon::opening::{KnownVolumes, NamedVolume, VolumeOpener};
    use crate::protocol::policy::Policy;
    use crate::volume_kinds::open::Populate;
    use blockmux_engine::core::cores::CoresConfig;
    use blockmux_proto::volume_state::{Meter, Origin};
    use std::cell::Cell;

    /// Volumes `a` and `b` in files, `m` and `broken` in RAM, and no disk.
    struct Attached {
        disks: Arc<Disks>,
        server: DiskServer,
        _files: tempfile::TempDir,
    }

    impl Attached {
        fn new(volumes: &[&str]) -> Attached {
            let files = tempfile::tempdir().unwrap();
            let opener = VolumeOpener {
                protocols: Vec::new(),
                may_grow: false,
                policy: Policy::default(),
                state: None,
                known: KnownVolumes::default(),
                member: Arc::default(),
            };
            let open = |text: &str| {
                let path = files.path().join(text);
                let spec = match text {
                    "a" | "b" => format!("{text}=file:{}?size=1m", path.display()),
                    name => format!("{name}=mem:1m"),
                };
                let entry: VolumeEntry = spec.parse().unwrap();
                opener.open(&NamedVolume { name: text.to_owned(), entry }, Populate::Not).unwrap()
            };
            let exports =
                Exports::with_states(["a", "b", "m", "broken"].map(open).into_iter().collect::<Vec<_>>());
            let cores = Arc::new(Cores::start(&CoresConfig::default()).unwrap());
            let (disks, server) = (
                Arc::new(Disks::new(None, by_this_program(), true, Some(count_first))),
                DiskServer { cores, exports },
            );
            volumes.iter().for_each(|volume| drop(disks.attach(&server, &asked(volume)).unwrap()));
            Attached { disks, server, _files: files }
        }

        fn path(&self, volume: &str) -> Option<PathBuf> {
            self.disks.list().into_iter().find(|disk| disk.volume == volume)?.device.map(|own| own.path)
        }

        fn detach(&self, volumes: &[&str], force: bool) -> Result<DetachedDisks, ApiError> {
            let volumes: Vec<_> = volumes.iter().map(|volume| (*volume).to_owned()).collect();
            self.disks.detach_all(&self.server, &volumes, force)
        }
    }

    thread_local! {
        static FIRST_DISKS: Cell<u32> = const { Cell::new(0) };
    }

    fn count_first(_: &Cores) {
        FIRST_DISKS.set(FIRST_DISKS.get() + 1);
    }

    fn asked(volume: &str) -> Attachment {
        Attachment {
            volume: volume.to_owned(),
            via: Some(Way::Fake),
            socket: None,
            name: None,
            read_only: false,
        }
    }

    #[test]
    fn a_volume_is_attached_once_until_it_is_detached() {
        let attached = Attached::new(&["a"]);
        let error = attached.disks.attach(&attached.server, &asked("a")).unwrap_err();
        assert!(error.to_string().starts_with("attachment `a`: is there already, as /dev/fake"), "{error}");
        let path = attached.path("a").unwrap();
        attached.detach(&["a"], false).unwrap().keep();
        assert!(fake::state(&path).is_removed && attached.disks.list().is_empty());
        attached.disks.attach(&attached.server, &asked("a")).unwrap();
        let error = attached.disks.attach(&attached.server, &asked("broken")).unwrap_err();
        assert!(error.message.starts_with("attachment `broken`: a core cannot serve"), "{error}");
        assert_eq!(attached.disks.list().len(), 1);
    }

    #[test]
    fn the_first_disk_of_a_daemon_that_serves_prepares_its_cores_once() {
        let attached = Attached::new(&[]);
        attached.disks.attach(&attached.server, &asked("broken")).unwrap_err();
        assert_eq!(FIRST_DISKS.get(), 0);
        for _ in 0..2 {
            attached.disks.attach(&attached.server, &asked("a")).unwrap();
            assert_eq!(FIRST_DISKS.get(), 1);
            attached.detach(&["a"], false).unwrap().keep();
        }
    }

    #[test]
    fn a_disk_in_use_is_detached_by_force_only_and_the_others_with_it_are_attached_again() {
        let attached = Attached::new(&["a", "b"]);
        let [first, used] = ["a", "b"].map(|volume| attached.path(volume).unwrap());
        fake::set_used(&used, true);
        let error = attached.detach(&["a", "b"], false).err().unwrap();
        assert_eq!(error.code, ErrorCode::Conflict);
        assert!(error.message.ends_with("is in use at /mnt"), "{error}");
        assert!(attached.disks.check_unused("b").is_err() && attached.disks.check_unused("a").is_ok());
        assert!(fake::state(&first).is_removed && attached.path("a").is_some_and(|again| again != first));
        assert_eq!(attached.path("b"), Some(used.clone()));
        attached.detach(&["b"], true).unwrap().keep();
        assert!(fake::state(&used).was_forced && attached.path("b").is_none());
    }

    #[test]
    fn a_volume_that_cannot_be_attached_is_shown_and_tried_again() {
        let attached = Attached::new(&["a"]);
        let all = [asked("a"), asked("broken")];
        for _ in 0..2 {
            assert_eq!(attached.disks.attach_missing(&attached.server, &all).len(), 1);
        }
        let broken = attached.disks.list().into_iter().find(|disk| disk.volume == "broken").unwrap();
        assert!(broken.state == "failed" && broken.error.is_some() && broken.device.is_none());
        assert_eq!(attached.disks.offer(), Ok(vec!["a".to_owned()]));
        attached.detach(&["broken"], false).unwrap().keep();
        assert_eq!(attached.disks.list().len(), 1);
    }

    #[test]
    fn a_disk_that_a_command_attaches_during_a_reload_is_not_lost() {
        let attached = Attached::new(&["a"]);
        let path = attached.path("a").unwrap();
        // The reload saw no disk, and its own attempt was refused.
        let refused = attached.disks.attach(&attached.server, &asked("a")).unwrap_err();
        attached.disks.note_failure(&asked("a"), &refused.to_string());
        assert_eq!(attached.path("a"), Some(path));
        assert_eq!(attached.disks.attach_missing(&attached.server, &[asked("a")]), [""; 0]);
        attached.disks.note_failure(&asked("b"), "no");
        assert_eq!(attached.disks.list().last().unwrap().error.as_deref(), Some("no"));
    }

    #[test]
    fn a_stop_leaves_disks_in_use_to_the_next_process_and_removes_the_others() {
        let attached = Attached::new(&["a", "b", "m"]);
        let paths = ["a", "b", "m"].map(|volume| attached.path(volume).unwrap());
        let offer = attached.disks.offer().unwrap_err();
        assert!(offer.contains("of `m` would end with this process; detach it first"), "{offer}");
        paths[1..].iter().for_each(|path| fake::set_used(path, true));
        drop(EndingDisks::new(&attached.disks, attached.server.clone()));
        let removed = FakeState { is_removed: true, ..FakeState::default() };
        assert_eq!(fake::state(&paths[0]), removed);
        assert_eq!(
            fake::state(&paths[1]),
            FakeState { is_used: true, is_left: true, ..FakeState::default() }
        );
        assert_eq!(fake::state(&paths[2]), FakeState { is_used: true, was_forced: true, ..removed });
    }

    #[test]
    fn the_counters_of_a_disk_are_those_of_its_origin_which_need_not_be_its_path() {
        let attached = Attached::new(&["a"]);
        let (id, _) = attached.server.exports.find("a").unwrap();
        let volume_state = attached.server.exports.volume_state(id).unwrap();
        let origin = |listener: &str| Origin { protocol: "fake", listener: listener.into() };
        let _users = ["nobody", "another"].map(|listener| Meter::new(&volume_state, origin(listener)));
        let listed = attached.disks.list();
        assert_eq!(listed[0].device.as_ref().unwrap().traffic.users, 1);
    }

    #[test]
    fn a_disk_that_is_attached_when_all_have_ended_is_not_kept() {
        let attached = Attached::new(&["a"]);
        attached.disks.end();
        let error = attached.disks.attach(&attached.server, &asked("b")).unwrap_err();
        assert!(error.to_string().ends_with("attachment `b`: the daemon stops"), "{error}");
        assert!(attached.disks.list().is_empty());
    }

    #[test]
    fn a_disk_of_a_change_that_was_not_made_is_detached_again() {
        let attached = Attached::new(&[]);
        let new = |volume| attached.disks.attach_new(&attached.server, asked(volume)).unwrap();
        let disk = new("a");
        let path = attached.path("a").unwrap();
        fake::set_used(&path, true);
        assert!(disk.is_there());
        drop(disk);
        assert!(fake::state(&path).was_forced && attached.path("a").is_none());
        // Another command has detached it and attached it anew.
        let disk = new("a");
        attached.detach(&["a"], false).unwrap().keep();
        assert!(!disk.is_there());
        new("a").keep();
        assert!(!disk.is_there());
        drop(disk);
        assert!(attached.path("a").is_some());
        // Another volume has the name.
        let disk = new("b");
        drop(attached.server.exports.remove("b"));
        assert!(!disk.is_there());
    }
}
