//! A volume as a block device of this machine, attached in the best way that the machine has.

use super::programs::Programs;
use crate::attach::own_io;
use crate::attach::way::{Way, WayOptions};
use blockmux_engine::attach::fuse::FuseOptions;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::program;
use blockmux_engine::attach::{AttachedDisk, DiskOptions};
use blockmux_engine::core::cores::Cores;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::Volume;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// An attached volume, which is detached when it is dropped.
pub(super) struct AttachedVolume {
    disk: Arc<GuardedDisk>,
    /// Makes a block device of a file.
    loop_device: Option<LoopDevice>,
    /// The block device.
    pub(super) node: PathBuf,
}

/// A disk that is detached once, in order or by an interrupt.
struct GuardedDisk {
    disk: Box<dyn AttachedDisk>,
    is_detached: AtomicBool,
}

impl GuardedDisk {
    /// Detaches it in order. If that fails, it stays, and can be given up.
    fn detach(&self) -> Result<(), String> {
        if self.is_detached.load(Ordering::Acquire) {
            return Ok(());
        }
        self.disk.detach().map_err(|error| error.to_string())?;
        self.is_detached.store(true, Ordering::Release);
        Ok(())
    }

    /// Detaches it although it is in use.
    fn give_up(&self) {
        if !self.is_detached.swap(true, Ordering::AcqRel)
            && let Err(error) = self.disk.detach_by_force()
        {
            warn!("{}: {error}", self.disk.path().display());
        }
    }
}

impl AttachedVolume {
    /// Attaches `volume`, served on `cores`. `directory` does not exist, or is empty. An interrupt
    /// gives up the disk.
    ///
    /// # Errors
    /// What failed, as one line.
    pub(super) fn attach(
        way: Way,
        volume: Arc<dyn Volume>,
        cores: &Cores,
        directory: &Path,
        programs: &Programs,
    ) -> Result<AttachedVolume, String> {
        let read_only = volume.info().read_only;
        let export = Export { name: NAME.to_owned(), description: String::new(), read_only, volume };
        let exports = Exports::new(vec![export]);
        let (queues, mount_point) = (cores.count() as u16, directory.to_owned());
        let (files, allow_other) = (vec![NAME.to_owned()], false);
        let io = OwnIo::by(&own_io::by_this_program());
        let options = match way {
            Way::Fuse => {
                let file = FuseOptions { mount_point, files, allow_other, read_only, depth: DEPTH, io };
                Ok(WayOptions::Fuse(file))
            }
            _ => {
                let disk = DiskOptions {
                    queues,
                    depth: DEPTH,
                    data: None,
                    read_only,
                    name: None,
                    io,
                    may_be_unprivileged: false,
                };
                WayOptions::plain(way, disk, None, NAME)
            }
        };
        let options = options.map_err(|error| format!("{}: {error}", way.name()))?;
        let disk = options.attach(cores, &exports, &[VolumeId(0)]).map_err(|error| error.to_string())?;
        let (node, is_detached) = (disk.path(), AtomicBool::new(false));
        let disk = Arc::new(GuardedDisk { disk, is_detached });
        let of_interrupt = disk.clone();
        programs.use_disk(Some(Box::new(move || of_interrupt.give_up())));
        let mut attached = AttachedVolume { disk, loop_device: None, node };
        if way == Way::Fuse {
            let device = LoopDevice::over(&attached.node, programs)?;
            attached.node.clone_from(&device.node);
            attached.loop_device = Some(device);
        }
        Ok(attached)
    }

    /// Lets the kernel remove the loop device, if there is one, once the file system on it is
    /// unmounted: it is not left behind then even if this process is killed.
    pub(super) fn is_mounted_now(&mut self) {
        self.loop_device = None;
    }

    /// Detaches it.
    ///
    /// # Errors
    /// If it is in use, or cannot be flushed.
    pub(super) fn detach(mut self) -> Result<(), String> {
        self.loop_device = None;
        self.disk.detach()
    }
}

impl Drop for AttachedVolume {
    fn drop(&mut self) {
        self.loop_device = None;
        self.disk.give_up();
    }
}

/// What the disks of a way are called in reports.
pub(super) fn described(way: Way) -> String {
    match way {
        Way::Fuse => format!("{} and a loop device", way.name()),
        _ => way.name().to_owned(),
    }
}

/// A loop device, which is removed when this is dropped; one that is in use, by the kernel when it
/// is no longer.
struct LoopDevice {
    node: PathBuf,
}

impl LoopDevice {
    fn over(file: &Path, programs: &Programs) -> Result<LoopDevice, String> {
        let mut set_up = Command::new(LOSETUP);
        // The page cache of the file system is enough: the file has none.
        let printed = programs.run(set_up.args(["--find", "--show", "--direct-io=on"]).arg(file))?;
        Ok(LoopDevice { node: PathBuf::from(printed.trim()) })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(said) = program::run(Command::new(LOSETUP).arg("--detach").arg(&self.node)) {
            warn!("{said}");
        }
    }
}

pub(super) const LOSETUP: &str = "losetup";
/// Name of the volume, and of its file.
const NAME: &str = "stripe";
/// Requests in flight on each queue, as of `blockmux attach`.
const DEPTH: u16 = 128;
