//! Commands of the control API that attach volumes as disks, and detach them.

use super::attachment::Attachment;
use super::blocking_work::Awaited;
use super::control::{Changed, ControlServer};
use super::disks::{DetachedDisks, or_by_force};
use crate::api::ApiError;
use crate::api::request::Answer;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::volume_state::VolumeState;
use std::sync::Arc;
use tracing::warn;

impl ControlServer {
    /// Attaches a volume as a disk, without the right to change the daemon, because that may hang.
    pub(super) fn attach_disk(&self, asked: Attachment) -> Result<Changed, ApiError> {
        let volume = &asked.volume;
        self.find(volume)?;
        let (disks, server, own) = (self.reloader.disks.clone(), self.reloader.disk_server(), asked.clone());
        let attach = move |awaited: &Awaited| {
            awaited.begin()?;
            disks.attach(&server, &own)
        };
        let (disks, server, own) = (self.reloader.disks.clone(), self.reloader.disk_server(), volume.clone());
        let late = move |attached: Result<_, ApiError>| {
            if attached.is_ok() {
                warn!("{own}: is detached again, because the command that attached it was given up");
                let detached = disks.detach_all(&server, &[own], false).map(DetachedDisks::keep);
                detached.unwrap_or_else(|error| warn!("{error}"));
            }
        };
        let what = format!("the disk of {volume}");
        let device = self.reloader.blocking.run_change(what, attach, late)??;
        let changing = self.reloader.begin_change();
        let is_its = |(_, state): (VolumeId, Arc<VolumeState>)| self.reloader.disks.is_of(volume, &state);
        if !self.find(volume).is_ok_and(is_its) {
            drop(changing);
            self.detach_disks(volume, true)?.keep();
            return Err(format!("{volume}: was removed or replaced at the same time; try again").into());
        }
        let device = device.display().to_string();
        let (effects, note) = self.reloader.record_attachment(&changing, volume, Some(&asked));
        Ok(Changed { answer: Answer::DiskAttached { device }.noted(note), effects })
    }

    /// Detaches the disk of a volume, and records it.
    pub(super) fn detach_disk(&self, volume: &str, force: bool) -> Result<Changed, ApiError> {
        if !self.reloader.disks.list().iter().any(|disk| disk.volume == volume) {
            self.find(volume)?;
            return Err(ApiError::not_found(format!("{volume}: is not attached as a disk")));
        }
        let detached = self.detach_disks(volume, force)?;
        let changing = self.reloader.begin_change();
        let (effects, note) = self.reloader.record_attachment(&changing, volume, None);
        detached.keep();
        Ok(Changed { answer: Answer::Done.noted(note), effects })
    }

    /// Detaches the disk of a volume, if it has one.
    pub(super) fn detach_disks(&self, volume: &str, force: bool) -> Result<DetachedDisks, ApiError> {
        let (disks, server, own) =
            (self.reloader.disks.clone(), self.reloader.disk_server(), [volume.to_owned()]);
        let detach = move |_: &Awaited| disks.detach_all(&server, &own, force);
        // A disk that is detached after all is attached again.
        let detached = self.reloader.blocking.run_change(format!("the disk of {volume}"), detach, drop)?;
        detached.map_err(|error| if force { error } else { or_by_force(error) })
    }
}
