//! Mounting and unmounting a file system of FUSE: by system calls with the privilege for it, else
//! by `fusermount3`, which is installed with the privilege and gives it to everybody.

use super::mount_point::{MountId, MountPoint};
use crate::attach::is_installed;
use crate::attach::program::{ProgramError, RunningProgram};
use crate::attach::wait::wait_for;
use blockmux_proto::fuse::MAX_BYTES;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use rustix::process::{getgid, getuid};
use rustix::thread::{CapabilitySet, capabilities};
use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
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
    #[error("{} is a mount point already; name another directory with --directory, or another file with --name", .0.display())]
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
    /// The mount is not on top where it was made.
    #[error("a mount that was moved, or is covered by another one, at {}", .0.display())]
    Covered(PathBuf),
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

/// Mounts a file system; returns the device with its requests, which does not block, and which
/// mount it is.
pub(super) fn mount_at(point: &MountPoint, users: Users) -> Result<(OwnedFd, MountId), FuseError> {
    let (device, mount) = match has_privilege() {
        true => mount_by_call(point, users)?,
        false => mount_by_helper(point, users)?,
    };
    rustix::io::ioctl_fionbio(&device, true).map_err(|error| FuseError::Unusable(error.into()))?;
    Ok((device, mount))
}

/// Mounts by descriptors: whatever has the path of the mount point by now, the file system is
/// mounted on the directory that was examined.
fn mount_by_call(point: &MountPoint, users: Users) -> Result<(OwnedFd, MountId), FuseError> {
    let failed = |error: Errno| refused(&point.path(), error);
    let directory = open_directory(point)?;
    let device = open_device()?;
    let context = fsopen(FUSE, FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
    let fd = device.as_raw_fd().to_string();
    let (uid, gid) = (getuid().as_raw().to_string(), getgid().as_raw().to_string());
    let max_read = MAX_READ.to_string();
    let parameters =
        [("source", NAME), ("subtype", NAME), ("rootmode", "40000"), ("max_read", max_read.as_str())];
    let of_process = [("fd", fd.as_str()), ("user_id", &uid), ("group_id", &gid)];
    for (key, value) in parameters.into_iter().chain(of_process) {
        fsconfig_set_string(&context, key, value).map_err(failed)?;
    }
    for &option in flags(users) {
        fsconfig_set_flag(&context, option).map_err(failed)?;
    }
    fsconfig_create(&context).map_err(failed)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed)?;
    let id = MountId::of(&mount).map_err(|error| refused(&point.path(), error))?;
    let by_descriptors = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&mount, "", &directory, "", by_descriptors).map_err(failed)?;
    Ok((device, id))
}

/// The helper mounts the file system, and sends the device through a socket.
fn mount_by_helper(point: &MountPoint, users: Users) -> Result<(OwnedFd, MountId), FuseError> {
    open_directory(point)?;
    let mount_point = &point.path();
    let failed = |error: Errno| refused(mount_point, error);
    let (own, its) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None).map_err(failed)?;
    fcntl_setfd(&own, FdFlags::CLOEXEC).map_err(failed)?;
    let options =
        format!("fsname={NAME},subtype={NAME},nosuid,nodev,max_read={MAX_READ},{}", flags(users).join(","));
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
    let device = received.ok_or_else(|| refused(mount_point, "fusermount3 has sent no device"))?;
    match point.mounted() {
        Ok(Some(mount)) if is_ours(mount) => Ok((device, mount)),
        _ => Err(refused(mount_point, "fusermount3 has mounted it elsewhere")),
    }
}

/// Options without a value.
fn flags(users: Users) -> &'static [&'static str] {
    match users {
        Users::Owner => &["default_permissions"],
        Users::Everybody => &["default_permissions", "allow_other"],
    }
}

/// Opens the directory to mount on; for a helper, to see that it is one.
fn open_directory(point: &MountPoint) -> Result<OwnedFd, FuseError> {
    point.open(OFlags::PATH).map_err(|error| FuseError::MountPoint { mount_point: point.path(), error })
}

/// Unmounts this mount, and nothing else that may be there. With `is_lazy` also one that is in
/// use, which then disappears for new users. A mount that is nowhere to be seen counts as
/// unmounted: its device tells when the file system ends.
pub(super) fn unmount_from(point: &MountPoint, mount: MountId, is_lazy: bool) -> Result<(), FuseError> {
    if point.mounted().ok().flatten() != Some(mount) {
        return match mount.entry() {
            Some(entry) => Err(FuseError::Covered(entry.place.into())),
            None => Ok(()),
        };
    }
    let mount_point = point.path();
    if !has_privilege() {
        let mut command = Command::new(HELPER);
        command.args(if is_lazy { &["-u", "-z", "--"][..] } else { &["-u", "--"] }).arg(&mount_point);
        return match run_helper(command, &mount_point, || ()) {
            Err(_) if mount.entry().is_none() => Ok(()),
            Err(FuseError::Refused { why, .. }) if why.contains("busy") => Err(FuseError::Busy(mount_point)),
            done => done,
        };
    }
    let lazily = if is_lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match unmount(point.safe_path(), lazily | UnmountFlags::NOFOLLOW) {
        // Somebody else has unmounted it.
        Err(Errno::INVAL | Errno::NOENT) | Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(FuseError::Busy(mount_point)),
        Err(error) => Err(refused(&mount_point, error)),
    }
}

/// Runs the helper; `started` is called once it has what it inherits.
fn run_helper(mut command: Command, mount_point: &Path, started: impl FnOnce()) -> Result<(), FuseError> {
    let helper = RunningProgram::start(&mut command);
    started();
    match helper.and_then(|helper| helper.wait(|_| ())) {
        Ok(_) => Ok(()),
        Err(ProgramError::NotRun { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            Err(FuseError::NoHelper)
        }
        Err(error) => Err(refused(mount_point, error)),
    }
}

/// Unmounts file systems of ours whose processes have ended. A directory, or nothing, is left.
///
/// # Errors
/// If something else is mounted there, or its process still runs.
pub(super) fn clear_dead(point: &MountPoint) -> Result<(), FuseError> {
    let mounted =
        || point.mounted().map_err(|error| FuseError::MountPoint { mount_point: point.path(), error });
    for _ in 0..MAX_STACKED {
        let Some(mount) = mounted()? else { return Ok(()) };
        if !is_dead(point, mount) {
            break;
        }
        unmount_from(point, mount, true)?;
    }
    Err(FuseError::IsMounted(point.path()))
}

/// Whether this mount is of a file system of ours.
pub(super) fn is_ours(mount: MountId) -> bool {
    mount.entry().is_some_and(|entry| entry.file_system == FILE_SYSTEM)
}

/// Whether this mount, which is on top there, is one of ours whose process has ended. A process
/// that does not answer has not.
pub(super) fn is_dead(point: &MountPoint, mount: MountId) -> bool {
    let Ok(point) = point.try_clone() else { return false };
    if !is_ours(mount) {
        return false;
    }
    // Only a request tells, and a process that is stopped lets it wait. Attributes may be cached;
    // opening is not.
    let is_gone = move || match point.open(OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Some(true),
        // The kernel has just noticed that the process has ended.
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
        _ => Some(false),
    };
    let (sender, answer) = mpsc::channel();
    // Nobody listens any longer if it has taken too long.
    let ask = move || sender.send(wait_for(ENDS, is_gone).unwrap_or(false)).unwrap_or_default();
    let asked = thread::Builder::new().name("probe".to_owned()).spawn(ask);
    asked.is_ok() && answer.recv_timeout(ANSWERS).unwrap_or(false)
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

/// The longest read, which `FUSE_INIT` only says in pages, and not to kernels before Linux 4.20.
const MAX_READ: u32 = MAX_BYTES;
const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// Source of our mounts.
const NAME: &str = "blockmux";
/// Linux's name of the driver.
const FUSE: &str = "fuse";
/// Type of our mounts.
const FILE_SYSTEM: &str = "fuse.blockmux";
/// The time in which the kernel notices that a process has ended.
const ENDS: Duration = Duration::from_secs(2);
/// The time in which a process answers that is not stopped.
const ANSWERS: Duration = Duration::from_secs(3);
/// Maximum number of dead mounts at a place that are unmounted.
const MAX_STACKED: usize = 64;
