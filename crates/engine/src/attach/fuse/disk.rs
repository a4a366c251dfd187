//! The life of mounted volumes: mounted, read for the first time, unmounted.
//!
//! A killed process leaves a dead mount, which fails every access, so nothing can go on with it.
//! The next `attach` removes it and mounts the volumes again.

use super::fuse_task::{FuseDevice, FuseOrders, FuseTask};
use super::mount::{self, FuseError, Users};
use crate::attach::notice::Notice;
use crate::attach::own_io::OwnIo;
use crate::attach::wait::wait_for;
use crate::attach::{AttachError, AttachedAs, AttachedDisk, DetachError};
use crate::core::cores::Cores;
use crate::core::reactor::{EngineCore, Inbox, WakeOnEvent};
use crate::serve::audit::AUDIT;
use crate::serve::channels::Channels;
use crate::sys::become_io_flusher;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::fuse::{FileAccess, FuseFile, FuseLimits, FuseQueue};
use blockmux_proto::volume_state::{Origin, SizeWatch};
use blockmux_volume::VolumeInfo;
use rustix::param::page_size;
use rustix::process::{getgid, getuid};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};
use tracing::{debug, info, warn};

/// Where and how volumes are mounted.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// The directory of the files. It is made if it does not exist.
    pub mount_point: PathBuf,
    /// Name of the file of each volume.
    pub files: Vec<String>,
    /// Whether other users may use the files, as far as their permissions allow.
    pub allow_other: bool,
    /// Refuse writes, also if a volume is writable.
    pub read_only: bool,
    /// Maximum number of requests in flight.
    pub depth: u16,
    /// What reads and flushes the files for the process that serves it.
    pub io: OwnIo,
}

/// Mounted volumes.
pub struct FuseDisk {
    mount_point: PathBuf,
    files: Vec<PathBuf>,
    /// The mount point was made for this mount.
    is_own_directory: bool,
    orders: Arc<FuseOrders>,
    core: Inbox,
    removal: Arc<Notice>,
    /// What reads and flushes the files.
    io: OwnIo,
    /// Tell the task of new sizes.
    _size_watches: Vec<SizeWatch>,
}

impl FuseDisk {
    /// Mounts volumes of `exports`, and serves them on the first of `cores`. Returns when the files
    /// can be read.
    ///
    /// # Errors
    /// If the volumes cannot be mounted; nothing is left behind then.
    pub fn attach(
        cores: &Cores,
        exports: &Exports,
        volumes: &[VolumeId],
        options: &FuseOptions,
    ) -> Result<FuseDisk, AttachError> {
        let mount_point = options.mount_point.clone();
        mount::clear_dead(&mount_point)?;
        let is_own_directory = make_directory(&mount_point)
            .map_err(|error| FuseError::MountPoint { mount_point: mount_point.clone(), error })?;
        let inbox = cores.inboxes().into_iter().next();
        let core = inbox.ok_or_else(|| AttachError::Queue(io::ErrorKind::NotFound.into()))?;
        let orders = Arc::<FuseOrders>::default();
        let watch = |volume: &VolumeId| {
            let (orders, core) = (orders.clone(), core.clone());
            let tell = move |_| {
                orders.has_new_size.store(true, Ordering::Release);
                core.send(|core| core.wake_all());
            };
            Some(SizeWatch::begin(&*exports.volume_state(*volume)?, tell))
        };
        let size_watches = volumes.iter().filter_map(watch).collect();
        let disk = FuseDisk {
            files: options.files.iter().map(|file| mount_point.join(file)).collect(),
            mount_point,
            is_own_directory,
            orders,
            core,
            removal: Arc::default(),
            io: options.io.clone(),
            _size_watches: size_watches,
        };
        let users = if options.allow_other { Users::Everybody } else { Users::Owner };
        let begun = mount::mount_at(&disk.mount_point, users).map_err(AttachError::from);
        let begun = begun.and_then(|device| {
            disk.serve(device, (cores, exports, volumes), options).map_err(AttachError::Queue)?;
            let mut all = disk.files.iter().zip(volumes);
            all.try_for_each(|(file, volume)| disk.read_first_block(file, exports, *volume))
        });
        match begun {
            Ok(()) => {
                for (file, volume) in disk.files.iter().zip(volumes) {
                    let name = exports.get(*volume).map_or_else(String::new, |export| export.name.clone());
                    let file = file.display();
                    info!(target: AUDIT, protocol = PROTOCOL, disk = %file, volume = name, "attached: {:?}", AttachedAs::New);
                }
                Ok(disk)
            }
            Err(error) => {
                disk.give_up().unwrap_or_else(|error| debug!("{error}"));
                Err(error)
            }
        }
    }

    /// Starts the task of the file system.
    fn serve(
        &self,
        device: OwnedFd,
        (cores, exports, volumes): (&Cores, &Exports, &[VolumeId]),
        options: &FuseOptions,
    ) -> io::Result<()> {
        let (exports, orders, removal) = (exports.clone(), self.orders.clone(), self.removal.clone());
        let origin = self.origin();
        let time_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let access = FileAccess { uid: getuid().as_raw(), gid: getgid().as_raw(), time_s };
        let named: Vec<_> = options.files.iter().cloned().zip(volumes.iter().copied()).collect();
        let limits = FuseLimits { depth: options.depth, page_size: page_size() as u32 };
        let read_only = options.read_only;
        let spawn = move |core: &Rc<EngineCore>| {
            if let Err(error) = become_io_flusher() {
                debug!("memory of a core may wait for the file system: {error}");
            }
            let removed = || io::Error::from(io::ErrorKind::NotFound);
            let file = |(name, volume)| {
                let info = exports.get(volume)?.info();
                let info = VolumeInfo { read_only: info.read_only || read_only, ..info };
                Some(FuseFile { name, volume, info })
            };
            let files: Option<Vec<_>> = named.into_iter().map(file).collect();
            let queue = FuseQueue::new(&exports, files.ok_or_else(removed)?, access, limits);
            let queue = queue.ok_or_else(removed)?;
            core.spawn(|waker| {
                let readiness = WakeOnEvent::new(waker);
                let registration = core.register(readiness.clone());
                let port = FuseDevice::new(device, (readiness, registration));
                let channels = Channels::new(exports, core.clone(), waker.clone(), origin);
                let served = (queue, channels);
                FuseTask::new(port, served, (core.clone(), waker), orders, move || removal.give())
            });
            Ok(())
        };
        cores.ask(0, spawn).unwrap_or_else(|| Err(io::Error::other("it has ended")))
    }

    fn read_first_block(&self, file: &Path, exports: &Exports, volume: VolumeId) -> Result<(), AttachError> {
        let block = exports.get(volume).map_or(512, |export| export.volume.info().logical_block);
        let read = self.io.read(file, block as usize);
        read.map_err(|error| AttachError::FirstRead { node: file.to_owned(), error })
    }

    fn flush(&self, file: &Path) -> Result<(), DetachError> {
        // It is closed again before the file system is unmounted.
        match self.io.hold(file).and_then(|mut file| file.flush()) {
            // Somebody else has unmounted it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(|error| DetachError::Flush { node: file.to_owned(), error }),
        }
    }

    /// Ends the file system, although it is in use, and unmounts it.
    fn give_up(&self) -> Result<(), FuseError> {
        self.orders.fails.store(true, Ordering::Relaxed);
        self.core.send(|core| core.wake_all());
        let unmounted = mount::unmount_from(&self.mount_point, true);
        self.remove_directory();
        unmounted
    }

    fn remove_directory(&self) {
        if self.is_own_directory
            && let Err(error) = fs::remove_dir(&self.mount_point)
        {
            warn!("{}: {error}", self.mount_point.display());
        }
    }

    fn note_detached(&self, what: &str) {
        info!(target: AUDIT, protocol = PROTOCOL, disk = %self.path().display(), "{what}");
    }
}

impl AttachedDisk for FuseDisk {
    /// The file, or the directory of several.
    fn path(&self) -> PathBuf {
        match &self.files[..] {
            [file] => file.clone(),
            _ => self.mount_point.clone(),
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.clone()
    }

    fn attached_as(&self) -> AttachedAs {
        AttachedAs::New
    }

    fn origin(&self) -> Origin {
        Origin { protocol: PROTOCOL, listener: self.mount_point.display().to_string().into() }
    }

    /// The mount of a process that has ended fails every access.
    fn outlives_process(&self) -> bool {
        false
    }

    /// A file that a program has open is noticed when the file system is unmounted.
    fn check_unused(&self) -> Result<(), DetachError> {
        let used = self.files.iter().map(|file| (file, mount::loop_devices(file)));
        match used.into_iter().find(|(_, users)| !users.is_empty()) {
            None => Ok(()),
            Some((file, users)) => Err(DetachError::Open { file: file.clone(), users }),
        }
    }

    /// Nothing waits for the next process.
    fn leave(&self) {}

    fn detach(&self) -> Result<(), DetachError> {
        self.files.iter().try_for_each(|file| self.flush(file))?;
        let unmount = || match mount::unmount_from(&self.mount_point, false) {
            // A program may be about to close it.
            Err(FuseError::Busy(_)) => None,
            done => Some(done),
        };
        let unmounted = wait_for(CLOSES, unmount);
        let loop_devices = || self.files.iter().flat_map(|file| mount::loop_devices(file)).collect();
        let open = || DetachError::Open { file: self.path(), users: loop_devices() };
        unmounted.ok_or_else(open)??;
        self.remove_directory();
        self.note_detached("detached");
        Ok(())
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.give_up()?;
        self.note_detached("detached by force");
        Ok(())
    }

    fn when_removed(&self, tell: Box<dyn FnOnce() + Send>) {
        self.removal.on_given(tell);
    }
}

/// Removes a mount that a process that has ended has left; `place` is the mount point or its file.
///
/// # Errors
/// If there is none.
pub fn forget(place: &Path) -> Result<(), AttachError> {
    let found = [Some(place), place.parent()].into_iter().flatten().find(|place| mount::is_dead(place));
    let error = io::Error::new(io::ErrorKind::NotFound, "no mount that a process has left");
    let mount_point = place.to_owned();
    let found = found.ok_or(FuseError::Refused { mount_point, why: error.to_string() })?;
    Ok(mount::unmount_from(found, true)?)
}

/// Makes a directory unless it exists; returns whether it did.
fn make_directory(directory: &Path) -> io::Result<bool> {
    if fs::metadata(directory).is_ok_and(|found| found.is_dir()) {
        return Ok(false);
    }
    fs::create_dir_all(directory).map(|()| true)
}

const PROTOCOL: &str = "fuse";
/// The time in which a program closes a file that it uses briefly.
const CLOSES: Duration = Duration::from_secs(1);
