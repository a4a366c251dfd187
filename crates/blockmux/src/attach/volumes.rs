//! The volumes of `attach`: opened, claimed, and served as exports without a name of their own.

use super::AttachArgs;
use super::way::{Way, check_not_left};
use crate::data::claim::{Claim, ClaimPurpose};
use crate::data::key::DataKey;
use crate::failure::Failure;
use crate::volume_kinds::open::{self, Access, Opened, Populate, Use};
use crate::volume_kinds::sizes::can_change_externally;
use blockmux_engine::attach::AttachedDisk;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::Spec;
use std::num::NonZeroU64;

/// Volumes that are open, and this process's to write.
pub(super) struct OpenVolumes {
    pub(super) exports: Exports,
    /// Identifies the data of a volume that is attached alone; `None` if it is lost with the
    /// process.
    pub(super) data: Option<NonZeroU64>,
    /// Somebody else may change a size.
    pub(super) can_change_externally: bool,
    /// In the order of the volumes; `None` for one that is not written, or shared.
    claims: Vec<Option<Claim>>,
}

impl OpenVolumes {
    /// Opens all volumes of the command.
    ///
    /// # Errors
    /// If one cannot be opened, is empty, or is another process's to write, also if that has ended
    /// and left its disk by another way than `way`.
    pub(super) fn open(args: &AttachArgs, way: Way) -> Result<OpenVolumes, Failure> {
        let (mut exports, mut claims, mut data) = (Vec::new(), Vec::new(), None);
        for spec in &args.volumes {
            let opened = open_volume(spec, args.read_only)?;
            claims.push(claim(args, spec, &opened)?);
            opened.own(spec)?;
            data = opened.data.as_ref().and_then(DataKey::disk_number);
            if !args.shared && !args.read_only {
                check_not_left(way, data).map_err(|error| Failure::request(format!("{spec}: {error}")))?;
            }
            exports.push(Export {
                name: spec.to_string(),
                description: String::new(),
                read_only: args.read_only || opened.volume.info().read_only,
                volume: opened.volume,
            });
        }
        Ok(OpenVolumes {
            exports: Exports::new(exports),
            data,
            can_change_externally: args.volumes.iter().any(can_change_externally),
            claims,
        })
    }

    pub(super) fn ids(&self) -> Vec<VolumeId> {
        self.exports.iter().map(|(volume, _)| volume).collect()
    }

    /// Tells other processes where the volumes are attached.
    pub(super) fn announce(&mut self, disk: &dyn AttachedDisk) {
        for (claim, path) in self.claims.iter_mut().zip(disk.paths()) {
            claim.iter_mut().for_each(|claim| claim.announce(&path));
        }
    }
}

fn open_volume(spec: &Spec, read_only: bool) -> Result<Opened, Failure> {
    let access = if read_only { Access::Read } else { Access::Either };
    let opened = open::open(spec, Use { populate: Populate::Behind, ..Use::briefly(access) })?;
    match opened.volume.info().size {
        0 => Err(Failure::request(format!("{spec}: is empty; attach a volume with at least one block"))),
        _ => Ok(opened),
    }
}

/// Claims the data of a volume that the disk may write.
fn claim(args: &AttachArgs, spec: &Spec, opened: &Opened) -> Result<Option<Claim>, Failure> {
    let writes = !args.shared && !args.read_only && !opened.volume.info().read_only;
    writes.then(|| Claim::take(&spec.to_string(), ClaimPurpose::Attachment, &opened.remote)).transpose()
}
