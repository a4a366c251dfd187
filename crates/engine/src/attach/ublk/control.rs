//! Control commands of the ublk driver, each with a timeout.
//!
//! A command may hang for ever, uninterruptibly: some kernels hang in `ADD_DEV`, and `STOP_DEV`
//! waits for requests in flight. So a thread executes them, and whoever waits for it does not wait
//! for ever.

use super::kernel::ControlRing;
use super::node::char_node;
use blockmux_proto::ublk::wire::{ANY_DEVICE, ControlOp, CtrlCmd, DevInfo, Features, NO_QUEUE, Params};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tracing::warn;
use zerocopy::{FromBytes, IntoBytes};

/// Why a control command failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The driver is not there.
    #[error(
        "{CONTROL} does not exist; load the driver with `modprobe ublk_drv` (Linux 6.5 or newer with \
         CONFIG_BLK_DEV_UBLK)"
    )]
    NoDriver,
    /// The user may not use the driver.
    #[error(
        "cannot use {CONTROL}: {0}; run as root, or let users attach with the lines for users in \
         90-blockmux.rules of udev"
    )]
    NotPermitted(io::Error),
    /// The driver cannot be opened, or executes no commands.
    #[error("cannot use {CONTROL}: {0}; run as root, and permit io_uring")]
    Unusable(io::Error),
    /// The driver lacks a feature.
    #[error(
        "the kernel's ublk driver cannot copy data for its server (UBLK_F_USER_COPY); use Linux 6.5 or newer"
    )]
    TooOld,
    /// The driver refused the command.
    #[error("the kernel refuses {}: {error}", op.name().unwrap_or("a command"))]
    Refused {
        /// The command.
        op: ControlOp,
        /// The error of the driver.
        error: io::Error,
    },
    /// The command has not ended in time.
    #[error("{} hangs in the kernel for more than {} s; see its log", op.name().unwrap_or("a command"), timeout.as_secs())]
    Hangs {
        /// The command.
        op: ControlOp,
        /// The time that it was given.
        timeout: Duration,
    },
}

impl ControlError {
    /// The driver's error number, if it has refused the command.
    pub(super) fn errno(&self) -> Option<i32> {
        match self {
            ControlError::Refused { error, .. } => error.raw_os_error(),
            _ => None,
        }
    }
}

/// The features of the kernel's driver, if attaching with it is possible.
///
/// # Errors
/// If it is not; the error says why.
pub fn driver_features() -> Result<Features, ControlError> {
    UblkControl::open()?.features()
}

/// The driver's control device, and the thread that waits for it.
#[derive(Clone)]
pub(super) struct UblkControl {
    jobs: mpsc::Sender<ControlJob>,
    /// Its commands concern the device of a user, and name its node.
    names_node: bool,
}

/// Gives the result of a command to its caller, unless that has timed out: both meet, so that no
/// result is lost between them.
type ResultSender = mpsc::SyncSender<io::Result<Vec<u8>>>;

struct ControlJob {
    op: ControlOp,
    command: CtrlCmd,
    buffer: Vec<u8>,
    /// `None`: nobody waits for it.
    result: Option<ResultSender>,
}

impl UblkControl {
    /// Opens the control device.
    ///
    /// # Errors
    /// If the driver is not there, or may not be used.
    pub(super) fn open() -> Result<UblkControl, ControlError> {
        let control = File::options().read(true).write(true).open(CONTROL);
        let control = control.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ControlError::NoDriver,
            io::ErrorKind::PermissionDenied => ControlError::NotPermitted(error),
            _ => ControlError::Unusable(error),
        })?;
        let mut ring = ControlRing::new(control).map_err(ControlError::Unusable)?;
        let (sender, jobs) = mpsc::channel::<ControlJob>();
        let run = move || {
            for ControlJob { op, command, buffer, result } in jobs {
                let done = ring.execute(op, command, buffer);
                let is_broken = done.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Other);
                match (result, done) {
                    (Some(result), done) => {
                        if let Some(id) = give(op, &result, done) {
                            warn!("/dev/ublkc{id} was added too late, and is removed");
                            let command = CtrlCmd { dev_id: id, queue_id: NO_QUEUE, ..CtrlCmd::default() };
                            let removed = ring.execute(ControlOp::DEL_DEV, command, Vec::new());
                            removed.map_or_else(|error| warn!("/dev/ublkc{id}: {error}"), drop);
                        }
                    }
                    (None, Ok(_)) => {}
                    (None, Err(error)) => warn!("{}", ControlError::Refused { op, error }),
                }
                if is_broken {
                    return;
                }
            }
        };
        thread::Builder::new().name("ublk".to_owned()).spawn(run).map_err(ControlError::Unusable)?;
        Ok(UblkControl { jobs: sender, names_node: false })
    }

    /// For commands to this device, which is a user's or root's.
    pub(super) fn for_device(self, info: &DevInfo) -> UblkControl {
        UblkControl { names_node: is_users(info), ..self }
    }

    /// The features of the driver.
    ///
    /// # Errors
    /// If it lacks one that attaching needs, or is too old to tell.
    pub(super) fn features(&self) -> Result<Features, ControlError> {
        let buffer = self.execute(ControlOp::GET_FEATURES, (ANY_DEVICE, 0), vec![0; 8], SHORT);
        let buffer = buffer.map_err(|error| match error.errno() {
            Some(libc::EPERM) => error,
            Some(_) => ControlError::TooOld,
            None => error,
        })?;
        let features = u64::read_from_bytes(&buffer).unwrap_or_default();
        let features = Features::from_bits_retain(features);
        if features.contains(Features::USER_COPY) { Ok(features) } else { Err(ControlError::TooOld) }
    }

    /// Adds a device; returns its properties, with its number.
    pub(super) fn add(&self, info: DevInfo) -> Result<DevInfo, ControlError> {
        self.execute(ControlOp::ADD_DEV, (info.dev_id, 0), info.as_bytes().to_vec(), SHORT).map(parse)
    }

    /// The properties of a device, which is root's, or a user's who may use it.
    pub(super) fn info(&self, id: u32) -> Result<DevInfo, ControlError> {
        let buffer = vec![0; size_of::<DevInfo>()];
        let naming = UblkControl { names_node: true, ..self.clone() };
        naming.execute(ControlOp::GET_DEV_INFO2, (id, 0), buffer, SHORT).map(parse)
    }

    /// The parameters of a device.
    pub(super) fn params(&self, id: u32) -> Result<Params, ControlError> {
        let wanted = Params { len: size_of::<Params>() as u32, ..Params::default() };
        let buffer = wanted.as_bytes().to_vec();
        self.execute(ControlOp::GET_PARAMS, (id, 0), buffer, SHORT).map(parse)
    }

    /// Sets the parameters of a device that has no disk.
    pub(super) fn set_params(&self, id: u32, params: &Params) -> Result<(), ControlError> {
        let buffer = params.as_bytes().to_vec();
        self.execute(ControlOp::SET_PARAMS, (id, 0), buffer, SHORT).map(drop)
    }

    /// Executes a command without a buffer; `data` is its number.
    pub(super) fn command(
        &self,
        op: ControlOp,
        id: u32,
        data: u64,
        timeout: Duration,
    ) -> Result<(), ControlError> {
        self.execute(op, (id, data), Vec::new(), timeout).map(drop)
    }

    /// Executes a command without a buffer, and does not wait for it.
    pub(super) fn send(&self, op: ControlOp, dev_id: u32, data: u64) {
        let (command, buffer) = self.complete(op, (dev_id, data), Vec::new());
        // If the thread has ended, its last command has told why.
        let _ = self.jobs.send(ControlJob { op, command, buffer, result: None });
    }

    /// A command with its buffer, which begins with the path of the node if the command names it.
    fn complete(&self, op: ControlOp, (dev_id, data): (u32, u64), buffer: Vec<u8>) -> (CtrlCmd, Vec<u8>) {
        let command = CtrlCmd { dev_id, queue_id: NO_QUEUE, data, ..CtrlCmd::default() };
        if !self.names_node || matches!(op, ControlOp::ADD_DEV | ControlOp::GET_FEATURES) {
            return (command, buffer);
        }
        let mut path = char_node(dev_id).into_os_string().into_vec();
        path.push(0);
        // Whole words, because structures follow.
        path.resize(path.len().next_multiple_of(8), 0);
        let command = CtrlCmd { dev_path_len: path.len() as u16, ..command };
        path.extend(buffer);
        (command, path)
    }

    fn execute(
        &self,
        op: ControlOp,
        (dev_id, data): (u32, u64),
        buffer: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<u8>, ControlError> {
        let (command, buffer) = self.complete(op, (dev_id, data), buffer);
        let named = usize::from(command.dev_path_len);
        let (result, done) = mpsc::sync_channel(0);
        let ended = || ControlError::Unusable(io::Error::other("its io_uring has failed"));
        self.jobs.send(ControlJob { op, command, buffer, result: Some(result) }).map_err(|_| ended())?;
        match done.recv_timeout(timeout) {
            Ok(done) => done
                .map(|mut buffer| buffer.split_off(named))
                .map_err(|error| ControlError::Refused { op, error }),
            Err(RecvTimeoutError::Timeout) => Err(ControlError::Hangs { op, timeout }),
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }
}

/// Gives the result of a command to its caller; returns the device that it has added, if the caller
/// waits no longer.
fn give(op: ControlOp, result: &ResultSender, done: io::Result<Vec<u8>>) -> Option<u32> {
    let mpsc::SendError(unwanted) = result.send(done).err()?;
    let added = unwanted.ok().filter(|_| op == ControlOp::ADD_DEV)?;
    Some(parse::<DevInfo>(added).dev_id)
}

/// Whether a device is that of a user without privileges.
pub(super) fn is_users(info: &DevInfo) -> bool {
    Features::from_bits_retain(info.flags).contains(Features::UNPRIVILEGED_DEV)
}

/// The structure in a buffer that has its length.
fn parse<T: FromBytes + Default>(buffer: Vec<u8>) -> T {
    T::read_from_bytes(&buffer).unwrap_or_default()
}

const CONTROL: &str = "/dev/ublk-control";
/// Timeout of commands that wait for nobody.
pub(super) const SHORT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_added_after_the_timeout_is_found() {
        let added = || Ok(DevInfo { dev_id: 7, ..DevInfo::default() }.as_bytes().to_vec());
        let (result, done) = mpsc::sync_channel(0);
        let given = thread::scope(|scope| {
            let giver = scope.spawn(|| give(ControlOp::ADD_DEV, &result, added()));
            assert!(done.recv().unwrap().is_ok());
            giver.join().unwrap()
        });
        assert_eq!(given, None, "its caller has it");
        drop(done);
        assert_eq!(give(ControlOp::ADD_DEV, &result, added()), Some(7));
        assert_eq!(give(ControlOp::GET_DEV_INFO, &result, added()), None);
        assert_eq!(give(ControlOp::ADD_DEV, &result, Err(io::ErrorKind::OutOfMemory.into())), None);
    }
}
