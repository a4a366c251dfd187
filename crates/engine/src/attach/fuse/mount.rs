//! Mounting and unmounting a file system of FUSE: by system calls with the privilege for it, else
//! by `fusermount3`, which is installed with the privilege and gives it to everybody.

use crate::attach::is_installed;
use crate::attach::wait::wait_for;
use blockmux_proto::fuse::MAX_BYTES;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use rustix::process::{getgid, getuid};
use rustix::thread::{CapabilitySet, capabilities};
use std::ffi::CString;
use std::fs;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Why a file system cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// The driver is not there.
    #[error(
        "{DEVICE} does not exist; load the driver with `modprobe fuse`, or pass the device to the container"
    )]
    NoDriver,
    /// The driver cannot be used.
    #[error("cannot use {DEVICE}: {0}")]
    Unusable(io::Error),
    /// Neither the process nor a helper has the privilege to mount.
    #[error("mounting needs root or fusermount3; install it (package fuse3)")]
    NoHelper,
    /// The mount point cannot be used.
    #[error("{}: {error}; name another directory with --directory", mount_point.display())]
    MountPoint {
        /// The mount point.
        mount_point: PathBuf,
        /// What failed.
        error: io::Error,
    },
    /// Another file system is mounted there.
    #[error("{} is a mount point already; unmount it, or name another directory with --directory", .0.display())]
    IsMounted(PathBuf),
    /// The system call or the helper has failed.
    #[error("cannot mount or unmount {}: {why}", mount_point.display())]
    Refused {
        /// The mount point.
        mount_point: PathBuf,
        /// What failed.
        why: String,
    },
    /// The file system is in use.
    #[error("{} is in use", .0.display())]
    Busy(PathBuf),
}

/// Whether this machine lets this process mount file systems of FUSE.
///
/// # Errors
/// If not; the error says why.
pub fn probe() -> Result<(), FuseError> {
    open_device()?;
    if has_privilege() || is_installed(HELPER) { Ok(()) } else { Err(FuseError::NoHelper) }
}

/// Who may use a mounted file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Users {
    /// The user who has mounted it.
    Owner,
    /// Everybody, as the permissions of the files allow.
    Everybody,
}

/// Mounts a file system; returns the device with its requests, which does not block.
pub(super) fn mount_at(mount_point: &Path, users: Users) -> Result<OwnedFd, FuseError> {
    let device = match has_privilege() {
        true => mount_by_call(mount_point, users)?,
        false => mount_by_helper(mount_point, users)?,
    };
    rustix::io::ioctl_fionbio(&device, true).map_err(|error| FuseError::Unusable(error.into()))?;
    Ok(device)
}

fn mount_by_call(mount_point: &Path, users: Users) -> Result<OwnedFd, FuseError> {
    let device = open_device()?;
    let (fd, uid, gid) = (device.as_raw_fd(), getuid().as_raw(), getgid().as_raw());
    let options = format!("fd={fd},rootmode=40000,user_id={uid},group_id={gid},{}", options(users));
    let options = CString::new(options).unwrap_or_default();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount(NAME, mount_point, FILE_SYSTEM, flags, &*options).map_err(|error| refused(mount_point, error))?;
    Ok(device)
}

/// The helper mounts the file system, and sends the device through a socket.
fn mount_by_helper(mount_point: &Path, users: Users) -> Result<OwnedFd, FuseError> {
    let failed = |error: Errno| refused(mount_point, error);
    let (own, its) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None).map_err(failed)?;
    fcntl_setfd(&own, FdFlags::CLOEXEC).map_err(failed)?;
    let options = format!("fsname={NAME},subtype={NAME},nosuid,nodev,{}", options(users));
    let mut command = Command::new(HELPER);
    command.args(["-o", &options, "--"]).arg(mount_point);
    command.env("_FUSE_COMMFD", its.as_raw_fd().to_string());
    run_helper(command, mount_point, move || drop(its))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&own, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(failed)?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    received.ok_or_else(|| refused(mount_point, "fusermount3 has sent no device"))
}

/// Options of the file system. The longest read is that of `FUSE_INIT`, which only says it in
/// pages, and not to kernels before Linux 4.20.
fn options(users: Users) -> String {
    let of_users = match users {
        Users::Owner => "",
        Users::Everybody => ",allow_other",
    };
    format!("default_permissions,max_read={MAX_BYTES}{of_users}")
}

/// Unmounts a file system. With `is_lazy` also one that is in use, which then disappears for new
/// users.
pub(super) fn unmount_from(mount_point: &Path, is_lazy: bool) -> Result<(), FuseError> {
    if !has_privilege() {
        let mut command = Command::new(HELPER);
        command.args(if is_lazy { &["-u", "-z", "--"][..] } else { &["-u", "--"] }).arg(mount_point);
        let unmounted = run_helper(command, mount_point, || ());
        return match unmounted {
            Err(_) if !is_mounted(mount_point) => Ok(()),
            Err(FuseError::Refused { why, .. }) if why.contains("busy") => {
                Err(FuseError::Busy(mount_point.to_owned()))
            }
            done => done,
        };
    }
    let lazily = if is_lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match unmount(mount_point, lazily | UnmountFlags::NOFOLLOW) {
        // Somebody else has unmounted it.
        Err(Errno::INVAL | Errno::NOENT) | Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(FuseError::Busy(mount_point.to_owned())),
        Err(error) => Err(refused(mount_point, error)),
    }
}

fn run_helper(mut command: Command, mount_point: &Path, started: impl FnOnce()) -> Result<(), FuseError> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    started();
    let mut child = child.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FuseError::NoHelper,
        _ => refused(mount_point, error),
    })?;
    let mut said = String::new();
    let read = child.stderr.take().map_or(Ok(0), |mut stderr| stderr.read_to_string(&mut said));
    let ended = read.and_then(|_| child.wait()).map_err(|error| refused(mount_point, error))?;
    if ended.success() { Ok(()) } else { Err(refused(mount_point, said.trim())) }
}

/// Unmounts a file system of ours whose process has ended. A directory, or nothing, is left.
///
/// # Errors
/// If something else is mounted there, or its process still runs.
pub(super) fn clear_dead(mount_point: &Path) -> Result<(), FuseError> {
    if !is_mounted(mount_point) {
        return Ok(());
    }
    if is_dead(mount_point) {
        unmount_from(mount_point, true)
    } else {
        Err(FuseError::IsMounted(mount_point.to_owned()))
    }
}

/// Whether a file system of ours is mounted there, whose process has ended.
pub(super) fn is_dead(mount_point: &Path) -> bool {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    let is_ours = mounts_at(&mounts, mount_point).last() == Some(FILE_SYSTEM);
    // Attributes may be cached; opening is not.
    let is_gone = || match fs::read_dir(mount_point) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Some(true),
        // The kernel has just noticed that the process has ended.
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
        _ => Some(false),
    };
    is_ours && wait_for(ENDS, is_gone).unwrap_or(false)
}

fn is_mounted(mount_point: &Path) -> bool {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    mounts_at(&mounts, mount_point).next().is_some()
}

/// Types of the file systems that are mounted there, the last one on top of the others.
fn mounts_at<'a>(mounts: &'a str, mount_point: &Path) -> impl Iterator<Item = &'a str> {
    // The kernel writes blanks and backslashes as numbers.
    let place = mount_point.display().to_string().replace('\\', "\\134").replace(' ', "\\040");
    mounts.lines().filter_map(move |line| {
        let mut words = line.split(' ');
        (words.nth(1)? == place).then(|| words.next())?
    })
}

/// Loop devices on a file.
pub(super) fn loop_devices(file: &Path) -> Vec<String> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_on_file = |entry: &fs::DirEntry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file"));
        backing.is_ok_and(|backing| Path::new(backing.trim_end()) == file)
    };
    let name = |entry: fs::DirEntry| format!("/dev/{}", entry.file_name().to_string_lossy());
    entries.filter(is_on_file).map(name).collect()
}

fn open_device() -> Result<OwnedFd, FuseError> {
    open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|error| match error {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => FuseError::NoDriver,
        _ => FuseError::Unusable(error.into()),
    })
}

fn has_privilege() -> bool {
    capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_ADMIN))
}

fn refused(mount_point: &Path, why: impl ToString) -> FuseError {
    FuseError::Refused { mount_point: mount_point.to_owned(), why: why.to_string() }
}

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
const MOUNTS: &str = "/proc/self/mounts";
/// Source of our mounts.
const NAME: &str = "blockmux";
/// Type of our mounts.
const FILE_SYSTEM: &str = "fuse.blockmux";
/// The time in which the kernel notices that a process has ended.
const ENDS: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_is_on_top() {
        let mounts = "proc /proc proc rw 0 0\n/dev/sda1 /mnt ext4 rw 0 0\nblockmux /mnt fuse.blockmux rw 0 0\n\
                      blockmux /my\\040disks fuse.blockmux rw 0 0\n";
        let at = |place| mounts_at(mounts, Path::new(place)).collect::<Vec<_>>();
        assert_eq!(at("/mnt"), ["ext4", "fuse.blockmux"]);
        assert_eq!(at("/my disks"), ["fuse.blockmux"]);
        assert_eq!(at("/m"), [""; 0]);
    }
}
