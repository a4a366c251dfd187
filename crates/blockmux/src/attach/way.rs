//! The ways to attach a volume, best first.

use blockmux_engine::attach::ublk::{self, UblkDisk};
use blockmux_engine::attach::{AttachError, AttachedDisk, DiskOptions};
use blockmux_engine::core::cores::Cores;
use blockmux_proto::exports::{Exports, VolumeId};
use serde::{Deserialize, Serialize};

/// A way to attach a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// A block device by ublk, Linux's driver of block devices in user space.
    Ublk,
    /// No disk at all.
    #[cfg(test)]
    #[value(skip)]
    Fake,
}

impl Way {
    /// Every way, best first.
    pub(super) const ALL: [Way; 1] = [Way::Ublk];

    /// Its name, as for `--via`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Ublk => "ublk",
            #[cfg(test)]
            Way::Fake => "fake",
        }
    }

    /// Whether this machine has it.
    ///
    /// # Errors
    /// If not; the error says why, and what to do.
    pub(crate) fn probe(self) -> Result<(), AttachError> {
        match self {
            Way::Ublk => ublk::driver_features().map(drop)?,
            #[cfg(test)]
            Way::Fake => {}
        }
        Ok(())
    }

    /// The best way that this machine has.
    ///
    /// # Errors
    /// If it has none: why it lacks the best.
    pub(crate) fn best() -> Result<Way, AttachError> {
        let mut why_not = None;
        for way in Way::ALL {
            match way.probe() {
                Ok(()) => return Ok(way),
                Err(error) => why_not = why_not.or(Some(error)),
            }
        }
        why_not.map_or(Ok(Way::Ublk), Err)
    }

    /// The way that is asked for, if this machine has it, or the best.
    ///
    /// # Errors
    /// If it lacks that one, or has none.
    pub(crate) fn choose(via: Option<Way>) -> Result<Way, AttachError> {
        match via {
            Some(way) => way.probe().map(|()| way),
            None => Way::best(),
        }
    }

    /// Attaches a volume of `exports`, served on `cores`; returns when the disk can be read.
    ///
    /// # Errors
    /// If it cannot be attached.
    pub(crate) fn attach(
        self,
        cores: &Cores,
        exports: &Exports,
        volume: VolumeId,
        options: DiskOptions,
    ) -> Result<Box<dyn AttachedDisk>, AttachError> {
        Ok(match self {
            Way::Ublk => Box::new(UblkDisk::attach(cores, exports, volume, options)?),
            #[cfg(test)]
            Way::Fake => {
                let name = exports.get(volume).map(|export| export.name.clone()).unwrap_or_default();
                Box::new(super::fake::FakeDisk::attach(&name, options)?)
            }
        })
    }
}
