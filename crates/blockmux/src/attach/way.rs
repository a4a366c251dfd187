//! The ways to attach a volume, best first.

use super::file;
use blockmux_engine::attach::fuse::{self, FuseDisk, FuseOptions};
use blockmux_engine::attach::nbd::{self, NbdDisk};
use blockmux_engine::attach::ublk::{self, UblkDisk};
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::attach::{AttachError, AttachedDisk, DiskOptions};
use blockmux_engine::core::cores::Cores;
use blockmux_proto::exports::{Exports, VolumeId};
use serde::{Deserialize, Serialize};
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use tracing::info;

/// A way to attach a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// A block device by ublk, Linux's driver of block devices in user space.
    Ublk,
    /// A block device by the kernel's NBD client.
    Nbd,
    /// A file in a file system of FUSE.
    Fuse,
    /// A disk of a virtual machine by vhost-user-blk, at a Unix socket.
    VhostUser,
    /// No disk at all.
    #[cfg(test)]
    #[value(skip)]
    Fake,
}

/// A way with its options.
pub(crate) enum WayOptions {
    Ublk(DiskOptions),
    Nbd(DiskOptions),
    Fuse(FuseOptions),
    /// With the socket.
    VhostUser(DiskOptions, PathBuf),
    #[cfg(test)]
    Fake(DiskOptions),
}

impl Way {
    /// The number of cores that can serve a disk, of `available` ones.
    pub(crate) fn cores(self, available: usize) -> usize {
        if self == Way::Fuse { 1 } else { available }
    }

    /// Every way to a disk of this machine, best first.
    pub(super) const ALL: [Way; 3] = [Way::Ublk, Way::Nbd, Way::Fuse];

    /// Its name, as for `--via`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Ublk => "ublk",
            Way::Nbd => "nbd",
            Way::Fuse => "fuse",
            Way::VhostUser => "vhost-user",
            #[cfg(test)]
            Way::Fake => "fake",
        }
    }

    /// What the path of its disks is.
    pub(crate) fn path_is(self) -> &'static str {
        match self {
            Way::VhostUser => "socket",
            _ => "device",
        }
    }

    /// Whether users of a disk wait by themselves for the next process that attaches its volume, so
    /// that a signal leaves the disk to them.
    pub(super) fn users_wait(self) -> bool {
        self == Way::VhostUser
    }

    /// Whether it mounts a file system of this machine.
    pub(crate) fn mounts(self) -> bool {
        self == Way::Fuse
    }

    /// Whether this machine has it.
    ///
    /// # Errors
    /// If not; the error says why, and what to do.
    pub(crate) fn probe(self) -> Result<(), AttachError> {
        match self {
            Way::Ublk => ublk::driver_features().map(drop)?,
            Way::Nbd => nbd::probe()?,
            Way::Fuse => fuse::probe()?,
            Way::VhostUser => {}
            #[cfg(test)]
            Way::Fake => {}
        }
        Ok(())
    }

    /// The best way that this machine has, of those that are wanted; logs why it lacks better ones.
    ///
    /// # Errors
    /// If it has none: why it lacks each.
    fn best(wanted: WantedWays) -> Result<Way, WayError> {
        let mut why_not = Vec::new();
        for way in Way::ALL.into_iter().filter(|way| wanted == WantedWays::All || !way.mounts()) {
            match way.probe() {
                Ok(()) => return Ok(way),
                Err(error) => {
                    info!("{}: {error}", way.name());
                    why_not.push(format!("{} ({error})", way.name()));
                }
            }
        }
        Err(WayError::None { wanted, why_not })
    }

    /// The way that is asked for, if this machine has it, or the best of those that are wanted.
    ///
    /// # Errors
    /// If it lacks that one, or has none.
    pub(crate) fn choose(via: Option<Way>, wanted: WantedWays) -> Result<Way, WayError> {
        match via {
            Some(way) => Ok(way.probe().map(|()| way)?),
            None => Way::best(wanted),
        }
    }
}

/// The ways of which the best is chosen, if none is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WantedWays {
    All,
    /// Those that make a block device, and do not mount a file system of this machine.
    BlockDevices,
}

/// Why no way can be chosen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WayError {
    /// The machine lacks the one that is asked for.
    #[error(transparent)]
    Asked(#[from] AttachError),
    /// It has none.
    #[error("this machine has no way to make {}: {}", wanted.make(), why_not.join("; "))]
    None {
        wanted: WantedWays,
        /// Each way, and why it is missing.
        why_not: Vec<String>,
    },
}

impl WantedWays {
    fn make(self) -> &'static str {
        match self {
            WantedWays::All => "a disk or a file",
            WantedWays::BlockDevices => "a block device",
        }
    }
}

/// Checks that no process that has ended has left a disk of this data by another way than this one:
/// what its users have written waits there for the next process.
///
/// # Errors
/// If one has; the error says what to do.
pub(crate) fn check_not_left(way: Way, data: Option<NonZeroU64>) -> Result<(), LeftByOtherWay> {
    let Some(data) = data else { return Ok(()) };
    let disks = [(Way::Ublk, ublk::disk_of as fn(NonZeroU64) -> Option<PathBuf>), (Way::Nbd, nbd::disk_of)];
    let mut others = disks.into_iter().filter(|(other, _)| *other != way);
    match others.find_map(|(way, disk_of)| Some((way, disk_of(data)?))) {
        Some((way, disk)) => Err(LeftByOtherWay { way, disk }),
        None => Ok(()),
    }
}

/// A process that has ended has left a disk of the same data.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} is a disk of the same data, which a process that has ended has left; go on with it by --via {}, or remove it \
     with `blockmux attach --forget {}`",
    disk.display(),
    way.name(),
    disk.display()
)]
pub(crate) struct LeftByOtherWay {
    way: Way,
    disk: PathBuf,
}

/// Removes a disk that a process that has ended has left.
///
/// # Errors
/// If there is none, or it cannot be removed.
pub(super) fn forget(disk: &Path) -> Result<(), AttachError> {
    let disk = without_link(disk, Path::new("/dev"));
    match way_of(&disk) {
        Way::Nbd => nbd::forget(&disk),
        Way::Ublk => ublk::forget(&disk),
        _ => fuse::forget(&disk),
    }
}

/// The disk that a link such as `/dev/blockmux/NAME` leads to, if it is below `nodes`: a file
/// elsewhere is not looked at, because its file system may not answer.
fn without_link(disk: &Path, nodes: &Path) -> PathBuf {
    let is_link = disk.starts_with(nodes) && disk.is_symlink();
    let target = if is_link { disk.canonicalize().ok() } else { None };
    target.unwrap_or_else(|| disk.to_owned())
}

/// The way by which a disk with this path was attached.
fn way_of(disk: &Path) -> Way {
    match disk.strip_prefix("/dev") {
        Ok(name) if name.to_string_lossy().starts_with("nbd") => Way::Nbd,
        Ok(_) => Way::Ublk,
        Err(_) => Way::Fuse,
    }
}

impl WayOptions {
    /// A way with the options of a daemon's disk, which is one of this volume.
    ///
    /// # Errors
    /// What it needs beyond them.
    pub(crate) fn plain(
        way: Way,
        disk: DiskOptions,
        socket: Option<PathBuf>,
        volume: &str,
    ) -> Result<WayOptions, &'static str> {
        match way {
            Way::Ublk => Ok(WayOptions::Ublk(disk)),
            Way::Nbd => Ok(WayOptions::Nbd(disk)),
            Way::Fuse => file::plain_options(&disk, volume)
                .map(WayOptions::Fuse)
                .ok_or("there is no directory for its file; set XDG_RUNTIME_DIR to one"),
            Way::VhostUser => socket
                .map(|socket| WayOptions::VhostUser(disk, socket))
                .ok_or("vhost-user needs a socket; name one"),
            #[cfg(test)]
            Way::Fake => Ok(WayOptions::Fake(disk)),
        }
    }

    /// Attaches a volume of `exports`, served on `cores`; with FUSE several, in the order of the
    /// files. Returns when the disk can be read.
    ///
    /// # Errors
    /// If it cannot be attached.
    pub(crate) fn attach(
        self,
        cores: &Cores,
        exports: &Exports,
        volumes: &[VolumeId],
    ) -> Result<Box<dyn AttachedDisk>, AttachError> {
        let none = || AttachError::Queue(io::ErrorKind::NotFound.into());
        let volume = volumes.first().copied().ok_or_else(none)?;
        Ok(match self {
            WayOptions::Ublk(disk) => Box::new(UblkDisk::attach(cores, exports, volume, disk)?),
            WayOptions::Nbd(disk) => Box::new(NbdDisk::attach(cores, exports, volume, disk)?),
            WayOptions::Fuse(file) => Box::new(FuseDisk::attach(cores, exports, volumes, &file)?),
            WayOptions::VhostUser(disk, socket) => {
                Box::new(VhostUserDisk::attach(cores, exports, volume, disk, &socket)?)
            }
            #[cfg(test)]
            WayOptions::Fake(disk) => {
                let name = exports.get(volume).map(|export| export.name.clone()).unwrap_or_default();
                Box::new(super::fake::FakeDisk::attach(&name, disk)?)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_left_is_known_by_its_path_or_its_name() {
        for (path, way) in [("/dev/ublkb0", Way::Ublk), ("/dev/nbd7", Way::Nbd), ("/run/files/x", Way::Fuse)]
        {
            assert_eq!(without_link(Path::new(path), Path::new("/dev")), Path::new(path));
            assert_eq!(way_of(Path::new(path)), way);
        }
        // As udev's link `/dev/blockmux/data`; this machine may have no disk of ours.
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("data");
        std::os::unix::fs::symlink("/dev/null", &name).unwrap();
        assert_eq!(without_link(&name, folder.path()), Path::new("/dev/null"));
        assert_eq!(without_link(&name, Path::new("/dev")), name);
    }
}
