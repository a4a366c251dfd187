//! The life of mounted volumes: mounted, read for the first time, unmounted.
//!
//! A killed process leaves a dead mount, which fails every access, so nothing can go on with it.
//! The next `attach` removes it and mounts the volumes again.

use super::fuse_task::{FuseDevice, FuseOrders, FuseTask};
use super::mount::{self, FuseError, Users};
use super::mount_point::{MountEntry, MountId, MountPoint};
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
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf, absolute};
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
    mount_point: MountPoint,
    mount: MountId,
    /// The names of the files.
    names: Vec<String>,
    /// Where the mount point was when it was mounted, for messages.
    directory: PathBuf,
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
        let cannot_use = |error| FuseError::MountPoint { mount_point: options.mount_point.clone(), error };
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
        let mount_point = MountPoint::with_directories_above(&options.mount_point).map_err(cannot_use)?;
        mount::clear_dead(&mount_point)?;
        let is_own_directory = mount_point.make().map_err(cannot_use)?;
        if !is_own_directory && !mount_point.is_empty().map_err(cannot_use)? {
            return Err(cannot_use(io::Error::other("it has files, which would be hidden")).into());
        }
        let users = if options.allow_other { Users::Everybody } else { Users::Owner };
        let (device, mount) = mount::mount_at(&mount_point, users).inspect_err(|_| {
            if is_own_directory {
                remove(&mount_point);
            }
        })?;
        let disk = FuseDisk {
            directory: mount_point.path(),
            names: options.files.clone(),
            mount_point,
            mount,
            is_own_directory,
            orders,
            core,
            removal: Arc::default(),
            io: options.io.clone(),
            _size_watches: size_watches,
        };
        let begun = disk.serve(device, (cores, exports, volumes), options).map_err(AttachError::Queue);
        let begun = begun.and_then(|()| {
            let mut all = disk.names.iter().zip(volumes);
            all.try_for_each(|(name, volume)| disk.read_first_block(name, exports, *volume))
        });
        match begun {
            Ok(()) => {
                for (file, volume) in disk.paths().iter().zip(volumes) {
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

    fn read_first_block(&self, name: &str, exports: &Exports, volume: VolumeId) -> Result<(), AttachError> {
        let block = exports.get(volume).map_or(512, |export| export.volume.info().logical_block);
        let read = self.io.read(&self.now(name), block as usize);
        read.map_err(|error| AttachError::FirstRead { node: self.directory.join(name), error })
    }

    /// Ends the file system, although it is in use, and unmounts it.
    fn give_up(&self) -> Result<(), FuseError> {
        self.orders.fails.store(true, Ordering::Relaxed);
        self.core.send(|core| core.wake_all());
        let unmounted = mount::unmount_from(&self.mount_point, self.mount, true);
        self.remove_directory();
        unmounted
    }

    /// Flushes and unmounts the file system, and waits for its end.
    ///
    /// Only the device tells that it has ended. It goes on without a mount that this process could
    /// find: where a file is open after `umount -l`, in another mount namespace, as a bind mount.
    fn unmount_unused(&self) -> Result<(), DetachError> {
        if self.removal.is_given() {
            return Ok(());
        }
        let parts = self.mount.other_entries().into_iter().filter(MountEntry::is_of_part);
        let parts: Vec<String> = parts.map(|entry| format!("the mount at {}", entry.place)).collect();
        if !parts.is_empty() {
            return Err(self.open_by([self.loop_devices(), parts].concat()));
        }
        self.flush()?;
        let unmount = || match mount::unmount_from(&self.mount_point, self.mount, false) {
            // A program may be about to close it.
            Err(FuseError::Busy(_)) => None,
            done => Some(done),
        };
        match wait_for(CLOSES, unmount) {
            None => return Err(self.open_by(self.loop_devices())),
            Some(Err(error @ FuseError::Covered(_))) => return Err(self.open_by(vec![error.to_string()])),
            Some(unmounted) => unmounted?,
        }
        self.wait_for_end().ok_or_else(|| self.open_by(self.loop_devices()))
    }

    /// Flushes the files, with what programs have mapped of them, if they can be reached. They are
    /// closed again before the file system is unmounted.
    fn flush(&self) -> Result<(), DetachError> {
        if self.mount_point.mounted().ok().flatten() != Some(self.mount) {
            return Ok(());
        }
        self.names.iter().try_for_each(|name| {
            let flushed = self.io.hold(&self.now(name)).and_then(|mut file| file.flush());
            flushed.map_err(|error| {
                if matches!(error.kind(), io::ErrorKind::NotConnected | io::ErrorKind::ConnectionAborted) {
                    // The kernel has ended the file system, and the core is about to notice.
                    self.wait_for_end();
                }
                DetachError::Flush { node: self.directory.join(name), error }
            })
        })
    }

    /// Waits until the kernel has ended the file system; `None` if it has not in time.
    fn wait_for_end(&self) -> Option<()> {
        wait_for(CLOSES, || self.removal.is_given().then_some(()))
    }

    /// Where a file is now.
    fn now(&self, name: &str) -> PathBuf {
        self.mount_point.path().join(name)
    }

    /// The loop devices over the files.
    fn loop_devices(&self) -> Vec<String> {
        self.names.iter().flat_map(|name| mount::loop_devices(&self.now(name))).collect()
    }

    fn open_by(&self, users: Vec<String>) -> DetachError {
        DetachError::Open { file: self.path(), users }
    }

    fn remove_directory(&self) {
        if self.is_own_directory {
            remove(&self.mount_point);
        }
    }

    fn note_detached(&self, what: &str) {
        info!(target: AUDIT, protocol = PROTOCOL, disk = %self.path().display(), "{what}");
    }
}

impl AttachedDisk for FuseDisk {
    /// The file, or the directory of several.
    fn path(&self) -> PathBuf {
        match &self.names[..] {
            [name] => self.directory.join(name),
            _ => self.directory.clone(),
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.names.iter().map(|name| self.directory.join(name)).collect()
    }

    fn origin(&self) -> Origin {
        Origin { protocol: PROTOCOL, listener: self.directory.display().to_string().into() }
    }

    /// The mount of a process that has ended fails every access, so nothing waits for the next one.
    fn outlives_process(&self) -> bool {
        false
    }

    /// A file that a program has open is noticed when the file system is unmounted.
    fn check_unused(&self) -> Result<(), DetachError> {
        match self.loop_devices() {
            users if users.is_empty() => Ok(()),
            users => Err(self.open_by(users)),
        }
    }

    fn detach(&self) -> Result<(), DetachError> {
        let unmounted = self.unmount_unused();
        if !self.removal.is_given() {
            unmounted?;
        }
        // Somebody may have ended the file system only. What its users have written is with the
        // volumes. The next process may have mounted one there, with the same numbers.
        if mount::is_dead(&self.mount_point, self.mount) {
            mount::unmount_from(&self.mount_point, self.mount, true)?;
        }
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
    let place = absolute(place).unwrap_or_else(|_| place.to_owned());
    let refused = |why: &str| FuseError::Refused { mount_point: place.clone(), why: why.to_owned() }.into();
    // A path to the file of a mount must not be followed: its process may not answer.
    for candidate in [place.parent(), Some(place.as_path())].into_iter().flatten() {
        let Ok(mount_point) = MountPoint::at(candidate) else { continue };
        let Some(mount) = mount_point.mounted().ok().flatten().filter(|mount| mount::is_ours(*mount)) else {
            continue;
        };
        return match mount::is_dead(&mount_point, mount) {
            true => Ok(mount::unmount_from(&mount_point, mount, true)?),
            false => Err(refused("its process runs")),
        };
    }
    Err(refused("no mount that a process has left"))
}

fn remove(directory: &MountPoint) {
    directory.remove().unwrap_or_else(|error| warn!("{}: {error}", directory.path().display()));
}

const PROTOCOL: &str = "fuse";
/// The time in which a program closes a file that it uses briefly.
const CLOSES: Duration = Duration::from_secs(1);
