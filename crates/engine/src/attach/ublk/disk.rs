//! The life of a disk: added or taken over, started, and removed.
//!
//! The kernel keeps a disk when its server ends without removing it, and with it the requests that
//! were not answered (user recovery). The device has a number of its server's choice: here it
//! identifies the volume's data, so that the next process that attaches the volume finds the disk
//! without a state file, and nobody attaches a volume twice.

use super::control::{ControlError, SHORT, UblkControl, is_users};
use super::kernel::QueueRing;
use super::node::{char_node, devices, disk_node};
use super::queue_task::{QueueOrder, QueueTask, QueueVolume};
use super::size::SizeFollower;
use crate::attach::name;
use crate::attach::node;
use crate::attach::own_io::{HeldDisk, OwnIo};
use crate::attach::removal::Removal;
use crate::attach::wait::wait_for;
use crate::attach::{AttachError, AttachedAs, AttachedDisk, DetachError, DiskOptions};
use crate::core::cores::Cores;
use crate::core::reactor::Inbox;
use crate::serve::audit::AUDIT;
use crate::sys::become_io_flusher;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::ublk::wire::{ANY_DEVICE, ControlOp, DevInfo, DevState, Features, Params};
use blockmux_proto::ublk::{MAX_BYTES, aligns_for, describes, disk_params};
use blockmux_proto::volume_state::Origin;
use blockmux_volume::VolumeInfo;
use rustix::param::page_size;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tracing::{debug, info, warn};

/// A disk of the driver.
pub struct UblkDisk {
    device: Device,
    attached_as: AttachedAs,
    /// Taken when the disk is removed.
    size: Mutex<Option<SizeFollower>>,
    outlives_process: bool,
}

/// A device of the driver that this process serves.
struct Device {
    control: UblkControl,
    id: u32,
    /// What its queues are to do.
    order: Arc<QueueOrder>,
    /// The driver can change the size of a disk.
    can_resize: bool,
    cores: Vec<Inbox>,
    /// What reads and flushes it.
    io: OwnIo,
    removal: Removal,
}

impl UblkDisk {
    /// Attaches a volume of `exports`, and serves it on `cores`. If a process that has ended had
    /// attached the same data, its disk goes on. Returns when the disk can be read.
    ///
    /// # Errors
    /// If the volume cannot be attached; nothing is left behind then, except a disk of a process
    /// that has ended. A first read that fails is no error for such a disk.
    pub fn attach(
        cores: &Cores,
        exports: &Exports,
        volume: VolumeId,
        options: DiskOptions,
    ) -> Result<UblkDisk, AttachError> {
        let control = UblkControl::open()?;
        let features = control.features()?;
        let can_resize = features.contains(Features::UPDATE_SIZE);
        let gone = || AttachError::Queue(io::ErrorKind::NotFound.into());
        let export = exports.get(volume).ok_or_else(gone)?;
        let volume_state = exports.volume_state(volume).ok_or_else(gone)?;
        let info = volume_state.volume().info();
        let registers = features.contains(Features::AUTO_BUF_REG);
        let info = VolumeInfo {
            read_only: info.read_only || export.read_only || options.read_only,
            registered_alignment: info.registered_alignment.filter(|_| registers),
            ..info
        };
        let new = || {
            let device = new_device(&options, can_resize, info.registered_alignment.is_some());
            match control.add(device) {
                // Users without privileges may have devices with fewer features.
                Err(error) if error.errno() == Some(libc::EPERM) && options.may_be_unprivileged => {
                    control.add(of_user(device))
                }
                done => done,
            }
        };
        let params = disk_params(&info, page_size() as u32)?;
        let (left, attached_as) = match options.data {
            Some(data) => match left_by_another(&control, data)? {
                Some(left) => (left, AttachedAs::Recovered),
                None => (new()?, AttachedAs::New),
            },
            None => (new()?, AttachedAs::New),
        };
        let (id, order, io) = (left.dev_id, Arc::default(), options.io.clone());
        let (cores_of_queues, removal) = (cores.inboxes(), Removal::default());
        let control = control.for_device(&left);
        let device = Device { control, id, order, can_resize, cores: cores_of_queues, io, removal };
        let served = Served { cores, exports, volume, info: &info };
        let named = name::publish(options.name.as_ref(), attached_as, &device.node());
        let begun = named.and_then(|()| match attached_as {
            AttachedAs::New => device.start(&left, &params, served),
            AttachedAs::Recovered => device.recover(&left, &params, served),
        });
        let begun = begun.and_then(|sectors| {
            let read = device.read_first_block(info.logical_block as usize);
            attached_as.settle(&device.node(), read)?;
            Ok(SizeFollower::begin(&device.control, device.id, sectors, &volume_state, can_resize))
        });
        match begun {
            Ok(size) => {
                let (disk, name) = (device.node(), served.name());
                if let Some(name) = &options.name {
                    name.appear(&disk);
                }
                let disk = disk.display();
                info!(target: AUDIT, protocol = "ublk", %disk, volume = name, "attached: {attached_as:?}");
                let outlives_process = recovers(&left);
                Ok(UblkDisk { device, attached_as, size: Mutex::new(Some(size)), outlives_process })
            }
            Err(error) => {
                match attached_as {
                    AttachedAs::New => {
                        device.order(QueueOrder::fail);
                        device.remove().unwrap_or_else(|error| warn!("{}: {error}", device.node().display()));
                    }
                    // Queues that were started would keep it from the next attempt.
                    AttachedAs::Recovered => device.order(QueueOrder::leave),
                }
                Err(error)
            }
        }
    }

    /// Follows the volume's size no longer, because the disk is going away.
    fn keep_size(&self) {
        *self.size.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn note_detached(&self, what: &str) {
        let disk = self.device.node();
        info!(target: AUDIT, protocol = "ublk", disk = %disk.display(), "{what}");
    }
}

impl AttachedDisk for UblkDisk {
    fn path(&self) -> PathBuf {
        self.device.node()
    }

    fn attached_as(&self) -> AttachedAs {
        self.attached_as
    }

    fn origin(&self) -> Origin {
        self.device.origin()
    }

    fn outlives_process(&self) -> bool {
        self.outlives_process
    }

    fn check_unused(&self) -> Result<(), DetachError> {
        self.device.hold_unused().map(drop)
    }

    fn leave(&self) {
        self.keep_size();
        self.device.order(QueueOrder::leave);
        self.device.io.leave();
    }

    fn detach(&self) -> Result<(), DetachError> {
        if self.device.removal.is_done() {
            return Ok(());
        }
        let mut disk = self.device.hold_unused()?;
        disk.flush().map_err(|error| DetachError::Flush { node: self.path(), error })?;
        // Nobody can mount it while it is held, and the flush has written all pages.
        self.keep_size();
        self.device.removal.once(|| {
            self.device.stop()?;
            drop(disk);
            self.device.delete()
        })?;
        self.note_detached("detached");
        Ok(())
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.device.order(QueueOrder::fail);
        self.keep_size();
        self.device.remove()?;
        self.note_detached("detached by force");
        Ok(())
    }
}

/// Removes a disk that a process that has ended has left. Requests that wait fail.
///
/// # Errors
/// If it is no disk of the driver, its process still runs, or the kernel does not remove it.
pub fn forget(node: &Path) -> Result<(), AttachError> {
    let control = UblkControl::open()?;
    let id = device_of(node)?;
    let info = control.info(id)?;
    if DevState(info.state) == DevState::LIVE {
        return Err(AttachError::InUse { node: node.to_owned(), process: info.ublksrv_pid });
    }
    let control = control.for_device(&info);
    let (order, io, removal) = (Arc::default(), OwnIo::default(), Removal::default());
    Ok(Device { control, id, order, can_resize: false, cores: Vec::new(), io, removal }.remove()?)
}

/// The disk of this data that a process that has ended has left, if there is one.
#[must_use]
pub fn disk_of(data: NonZeroU64) -> Option<PathBuf> {
    let control = UblkControl::open().ok()?;
    left_by_another(&control, data).ok()?.map(|left| disk_node(left.dev_id))
}

/// User and group of the owner of a disk or its server's node; `None` if it is root's.
///
/// # Errors
/// If it is no disk of the driver.
pub fn owner(node: &Path) -> Result<Option<(u32, u32)>, AttachError> {
    let info = UblkControl::open()?.info(device_of(node)?)?;
    Ok(is_users(&info).then_some((info.owner_uid, info.owner_gid)))
}

/// The device of a disk or its server's node.
fn device_of(node: &Path) -> Result<u32, AttachError> {
    let id = devices().into_iter().find(|id| disk_node(*id) == node || char_node(*id) == node);
    id.ok_or_else(|| AttachError::Node { node: node.to_owned(), error: io::ErrorKind::NotFound.into() })
}

/// What a disk serves, and where.
#[derive(Clone, Copy)]
struct Served<'a> {
    cores: &'a Cores,
    exports: &'a Exports,
    volume: VolumeId,
    /// What the disk may use of it.
    info: &'a VolumeInfo,
}

impl Served<'_> {
    fn name(&self) -> String {
        self.exports.get(self.volume).map_or_else(String::new, |export| export.name.clone())
    }
}

impl Device {
    fn node(&self) -> PathBuf {
        disk_node(self.id)
    }

    fn origin(&self) -> Origin {
        Origin { protocol: "ublk", listener: self.node().display().to_string().into() }
    }

    /// Gives a new device its disk; returns its size in sectors.
    fn start(&self, info: &DevInfo, params: &Params, served: Served<'_>) -> Result<u64, AttachError> {
        // The start would wait for a volume that does not answer the reads of the partition table.
        let (order, cores) = (self.order.clone(), self.cores.clone());
        self.io.on_abort(Box::new(move || give_order(QueueOrder::fail, &order, &cores)));
        // The driver takes commands from a user only once the user may use the node.
        let device = self.open_node()?;
        self.control.set_params(self.id, params)?;
        self.serve(&device, info, params, served)?;
        // The kernel reads the partition table meanwhile.
        self.control.command(ControlOp::START_DEV, self.id, own_process(), START)?;
        Ok(params.basic.dev_sectors)
    }

    /// Continues with the disk of a process that has ended; returns its size in sectors.
    fn recover(&self, info: &DevInfo, params: &Params, served: Served<'_>) -> Result<u64, AttachError> {
        let disk = self.control.params(self.id)?;
        if !describes(&disk, params, self.can_resize) {
            return Err(AttachError::Changed { node: self.node() });
        }
        let begin = || self.control.command(ControlOp::START_USER_RECOVERY, self.id, 0, SHORT);
        let begun = wait_for(RELEASES, || match begin() {
            // The kernel has not finished with the process.
            Err(error) if error.errno() == Some(libc::EBUSY) => None,
            // A process that took the disk over has ended before it served.
            Err(error) if error.errno() == Some(libc::EINVAL) => Some(Ok(())),
            done => Some(done),
        });
        begun.unwrap_or_else(begin)?;
        self.serve(&self.open_node()?, info, &disk, served)?;
        self.control.command(ControlOp::END_USER_RECOVERY, self.id, own_process(), SHORT)?;
        Ok(disk.basic.dev_sectors)
    }

    /// Opens the node through which a server gets requests, which only one process may have open.
    fn open_node(&self) -> Result<Arc<File>, AttachError> {
        let node = char_node(self.id);
        let opened = node::open_when_there(&node);
        Ok(Arc::new(opened.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => AttachError::NotOwned { node },
            _ => AttachError::Node { node, error },
        })?))
    }

    /// Starts the tasks of all queues of a device with these properties and parameters.
    fn serve(
        &self,
        device: &Arc<File>,
        info: &DevInfo,
        params: &Params,
        served: Served<'_>,
    ) -> Result<(), AttachError> {
        let features = Features::from_bits_retain(info.flags);
        let takes_registered = features.contains(Features::AUTO_BUF_REG) && aligns_for(params, served.info);
        (0..info.nr_hw_queues).try_for_each(|queue| {
            let serves = QueueVolume {
                exports: served.exports.clone(),
                volume: served.volume,
                read_only: served.info.read_only,
                takes_registered,
                origin: self.origin(),
            };
            let numbers = (queue, info.queue_depth);
            self.serve_queue(device, numbers, features, serves, served.cores).map_err(AttachError::Queue)
        })
    }

    fn serve_queue(
        &self,
        device: &Arc<File>,
        (queue, depth): (u16, u16),
        features: Features,
        serves: QueueVolume,
        cores: &Cores,
    ) -> io::Result<()> {
        let (device, order) = (device.clone(), self.order.clone());
        let nth = usize::from(queue) % cores.count().max(1);
        let spawned = cores.ask(nth, move |core| {
            if let Err(error) = become_io_flusher() {
                debug!("memory of a core may wait for the disk: {error}");
            }
            core.try_spawn(|waker| {
                let port = QueueRing::open(core, &device, (queue, depth), features, waker)?;
                let task = QueueTask::new(port, depth, serves, (core.clone(), waker), order);
                task.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
            })
        });
        spawned.unwrap_or_else(|| Err(io::Error::other("it has ended")))
    }

    fn read_first_block(&self, block: usize) -> Result<(), AttachError> {
        let node = self.node();
        node::read_first_block(&self.io, &node, block).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => AttachError::Node { node, error },
            io::ErrorKind::PermissionDenied => AttachError::NotOwned { node },
            _ => AttachError::FirstRead { node, error },
        })
    }

    /// Opens the disk exclusively.
    ///
    /// # Errors
    /// If it is in use.
    fn hold_unused(&self) -> Result<HeldDisk, DetachError> {
        node::hold_unused(&self.io, self.node())
    }

    /// Gives an order to all queues.
    fn order(&self, give: fn(&QueueOrder)) {
        give_order(give, &self.order, &self.cores);
    }

    fn remove(&self) -> Result<(), ControlError> {
        self.removal.once(|| {
            self.stop()?;
            self.delete()
        })
    }

    fn stop(&self) -> Result<(), ControlError> {
        self.control.command(ControlOp::STOP_DEV, self.id, 0, STOP)
    }

    /// Deletes the device. Programs may have the disk open; it goes when they close it.
    fn delete(&self) -> Result<(), ControlError> {
        name::withdraw(&self.node());
        match self.control.command(ControlOp::DEL_DEV_ASYNC, self.id, 0, SHORT) {
            // Before Linux 6.9, and for devices of users.
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                self.control.command(ControlOp::DEL_DEV, self.id, 0, SHORT)
            }
            done => done,
        }
    }
}

fn give_order(give: fn(&QueueOrder), order: &QueueOrder, cores: &[Inbox]) {
    give(order);
    for core in cores {
        core.send(|core| core.wake_all());
    }
}

/// The properties of a new device, which may have its pages registered with rings.
fn new_device(options: &DiskOptions, can_resize: bool, registers: bool) -> DevInfo {
    let recovery = Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE;
    let recovery = if options.data.is_some() { recovery } else { Features::empty() };
    let resize = if can_resize { Features::UPDATE_SIZE } else { Features::empty() };
    let registered = if registers { Features::AUTO_BUF_REG } else { Features::empty() };
    DevInfo {
        nr_hw_queues: options.queues,
        queue_depth: options.depth,
        max_io_buf_bytes: MAX_BYTES,
        dev_id: ANY_DEVICE,
        ublksrv_pid: -1,
        flags: (Features::USER_COPY | Features::CMD_IOCTL_ENCODE | recovery | resize | registered).bits(),
        ublksrv_flags: options.data.map_or(0, NonZeroU64::get),
        ..DevInfo::default()
    }
}

/// The properties of a new device like this one for a user without privileges. The driver copies
/// its data, so that the user reads no memory of the kernel, and removes it when the process ends.
fn of_user(device: DevInfo) -> DevInfo {
    let kept =
        Features::from_bits_retain(device.flags) & (Features::CMD_IOCTL_ENCODE | Features::UPDATE_SIZE);
    let flags = kept | Features::UNPRIVILEGED_DEV | Features::NEED_GET_DATA;
    DevInfo { flags: flags.bits(), ..device }
}

/// Whether the disk of a device outlives the process that serves it.
fn recovers(info: &DevInfo) -> bool {
    Features::from_bits_retain(info.flags).contains(Features::USER_RECOVERY)
}

/// The device that a process that has ended had made for this data. Devices that never had a disk
/// are removed.
fn left_by_another(control: &UblkControl, data: NonZeroU64) -> Result<Option<DevInfo>, AttachError> {
    let is_ours = |info: &DevInfo| (recovers(info) || is_users(info)) && info.ublksrv_flags == data.get();
    for id in devices() {
        // A device may be removed meanwhile.
        let Ok(info) = control.info(id) else { continue };
        if !is_ours(&info) {
            continue;
        }
        let settled = |info: &DevInfo| DevState(info.state) != DevState::LIVE;
        // The kernel may not have noticed yet that the process has ended.
        let info = wait_for(RELEASES, || control.info(id).ok().filter(settled)).unwrap_or(info);
        match DevState(info.state) {
            DevState::QUIESCED => return Ok(Some(info)),
            DevState::DEAD if File::open(char_node(id)).is_ok() => {
                let removed = control.clone().for_device(&info).command(ControlOp::DEL_DEV, id, 0, SHORT);
                removed.unwrap_or_else(|error| debug!("{}: {error}", char_node(id).display()));
            }
            _ => return Err(AttachError::InUse { node: disk_node(id), process: info.ublksrv_pid }),
        }
    }
    Ok(None)
}

fn own_process() -> u64 {
    std::process::id().into()
}

/// Timeout of the start, during which the kernel reads the partition table.
const START: Duration = Duration::from_secs(60);
/// Timeout of the removal, which waits for requests in flight.
const STOP: Duration = Duration::from_secs(120);
/// The time in which the kernel notices that a process has ended.
const RELEASES: Duration = Duration::from_secs(2);
