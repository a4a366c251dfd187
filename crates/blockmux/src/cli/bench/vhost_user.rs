//! A volume that this process serves as the disk of a virtual machine, and accesses as its guest
//! would: without a guest, but over the same socket, memory and virtqueues.

use crate::failure::Failure;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::attach::{AttachedDisk, DiskOptions};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::volume::vhost_user::{VhostUserOptions, VhostUserVolume};
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::Volume;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// A disk at a socket in a directory that only this user can enter.
pub(super) struct ServedDisk {
    disk: VhostUserDisk,
    socket: PathBuf,
    _directory: TempDir,
}

impl ServedDisk {
    /// Serves a volume with `cores`.
    ///
    /// # Errors
    /// If there is no place for the socket, or it cannot be made.
    pub(super) fn attach(volume: &Arc<dyn Volume>, cores: &Cores) -> Result<ServedDisk, Failure> {
        let directory = tempfile::Builder::new().prefix("blockmux-bench").tempdir();
        let directory = directory
            .map_err(|error| Failure::run(format!("cannot make a directory for a socket: {error}")))?;
        let socket = directory.path().join("disk");
        let exports = Exports::new(vec![Export {
            name: VHOST_USER.to_owned(),
            description: String::new(),
            read_only: false,
            volume: volume.clone(),
        }]);
        let options = DiskOptions {
            queues: cores.count() as u16,
            depth: DEPTH,
            data: None,
            read_only: false,
            name: None,
            io: OwnIo::default(),
            may_be_unprivileged: false,
        };
        let disk = VhostUserDisk::attach(cores, &exports, VolumeId(0), options, &socket);
        Ok(ServedDisk { disk: disk.map_err(Failure::run)?, socket, _directory: directory })
    }

    /// Opens the disk as a volume.
    ///
    /// # Errors
    /// If it cannot be used.
    pub(super) fn open(&self) -> Result<Arc<dyn Volume>, Failure> {
        let options =
            VhostUserOptions { read_only: false, reconnect_timeout: RECONNECT, request_timeout: None };
        Ok(Arc::new(VhostUserVolume::open(&self.socket, options).map_err(Failure::run)?))
    }

    /// Ends the disk. A volume that is about to disconnect does not matter.
    ///
    /// # Errors
    /// If it cannot be ended.
    pub(super) fn detach(self) -> Result<(), Failure> {
        self.disk.leave();
        self.disk.detach().map_err(Failure::run)
    }
}

/// Its name in tables.
pub(super) const VHOST_USER: &str = "vhost-user";
/// Not used: the front end decides how many requests are in flight.
const DEPTH: u16 = 128;
/// A back end in this process that is lost does not come back.
const RECONNECT: Duration = Duration::ZERO;
