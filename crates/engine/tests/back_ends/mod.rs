//! Disks of one volume, at sockets that front ends connect to.

use blockmux_engine::attach::DiskOptions;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::volume::vhost_user::{BackEndError, VhostUserOptions, VhostUserVolume};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::Volume;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// Disks of one volume at two sockets, the second one read-only.
pub(crate) struct BackEnds {
    cores: Cores,
    pub(crate) exports: Exports,
    folder: TempDir,
}

impl BackEnds {
    pub(crate) fn of(volume: Arc<dyn Volume>) -> BackEnds {
        let config = CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() };
        let exports = [("disk", false), ("frozen", true)].map(|(name, read_only)| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only,
            volume: volume.clone(),
        });
        BackEnds {
            cores: Cores::start(&config).unwrap(),
            exports: Exports::new(exports.into()),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Serves the volume `name` at the socket of this name.
    pub(crate) fn attach(&self, name: &str) -> VhostUserDisk {
        let (volume, _) = self.exports.find(name).unwrap();
        VhostUserDisk::attach(&self.cores, &self.exports, volume, disk_options(), &self.path(name)).unwrap()
    }

    /// A volume over the disk `name`.
    pub(crate) fn open(
        &self,
        name: &str,
        reconnect_timeout: Duration,
    ) -> Result<VhostUserVolume, BackEndError> {
        VhostUserVolume::open(&self.path(name), options(reconnect_timeout))
    }
}

/// A disk with one queue, for tests.
pub(crate) fn disk_options() -> DiskOptions {
    DiskOptions {
        queues: 1,
        depth: 128,
        data: None,
        read_only: false,
        name: None,
        io: OwnIo::default(),
        may_be_unprivileged: false,
    }
}

pub(crate) fn options(reconnect_timeout: Duration) -> VhostUserOptions {
    VhostUserOptions { read_only: false, reconnect_timeout, request_timeout: None }
}

/// A time that no test waits for.
pub(crate) const LONG: Duration = Duration::from_secs(600);
