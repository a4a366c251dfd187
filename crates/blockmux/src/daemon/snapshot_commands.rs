//! Commands of the control API about the snapshots of a volume. They run without the right to
//! change the daemon, because the storage may not answer.

use super::blocking_work::{Awaited, BlockingWork};
use super::config_audit::{self, Caller};
use crate::api::status::SnapshotStatus;
use crate::api::{ApiError, ErrorCode};
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::{StaysActive, VolumeState};
use blockmux_volume::{SnapshotError, SnapshotInfo, Snapshots, Volume};
use jiff::Timestamp;
use std::sync::Arc;

/// A volume whose snapshots are listed or changed. Changes return their effect in the words of a
/// plan.
pub(super) struct SnapshottedVolume<'a> {
    pub(super) name: &'a str,
    pub(super) state: Arc<VolumeState>,
    pub(super) exports: &'a Exports,
    pub(super) blocking: &'a BlockingWork,
}

impl SnapshottedVolume<'_> {
    /// The snapshots, oldest first.
    pub(super) fn list(&self) -> Result<Vec<SnapshotStatus>, ApiError> {
        let (name, state) = (self.name.to_owned(), self.state.clone());
        let list = move || {
            let listed = snapshots_of(&name, &**state.volume())?.list();
            listed.map_err(|error| refusal(&name, &error))
        };
        let listed = self.blocking.run(self.name, list)??;
        Ok(listed.into_iter().map(|snapshot| status_of(self.exports, snapshot)).collect())
    }

    /// Creates a snapshot.
    pub(super) fn create(
        &self,
        snapshot: &str,
        caller: &Caller,
    ) -> Result<(SnapshotStatus, String), ApiError> {
        let (own, effect) = (snapshot.to_owned(), format!("+ snapshot {}@{snapshot}", self.name));
        let create = move |volume: &str, snapshots: &dyn Snapshots| {
            snapshots.create(&own).map_err(|error| refusal(volume, &error))
        };
        let created = self.change(&effect, caller, create)?;
        Ok((status_of(self.exports, created), effect))
    }

    /// Deletes a snapshot that no volume of this daemon serves.
    pub(super) fn delete(&self, snapshot: &str, caller: &Caller) -> Result<String, ApiError> {
        let (own, effect) = (snapshot.to_owned(), format!("- snapshot {}@{snapshot}", self.name));
        let exports = self.exports.clone();
        let delete = move |volume: &str, snapshots: &dyn Snapshots| {
            let all = snapshots.list().map_err(|error| refusal(volume, &error))?;
            let found = all.iter().find(|snapshot| snapshot.name == own);
            let served = found.map(|snapshot| served_by(&exports, snapshot)).unwrap_or_default();
            if !served.is_empty() {
                let text = format!(
                    "{volume}: snapshot `{own}` is served as volume {}; remove that first",
                    served.join(", ")
                );
                return Err(ApiError::new(ErrorCode::Conflict, text));
            }
            snapshots.delete(&own).map_err(|error| refusal(volume, &error))
        };
        self.change(&effect, caller, delete)?;
        Ok(effect)
    }

    /// Protects a snapshot from being deleted, or ends that.
    pub(super) fn protect(
        &self,
        snapshot: &str,
        is_protected: bool,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        let own = snapshot.to_owned();
        let effect = format!("~ snapshot {}@{snapshot}: protected: {is_protected}", self.name);
        let protect = move |volume: &str, snapshots: &dyn Snapshots| {
            snapshots.protect(&own, is_protected).map_err(|error| refusal(volume, &error))
        };
        self.change(&effect, caller, protect)?;
        Ok(effect)
    }

    /// Makes a change, whose effect is `effect`. One that was given up and happens nevertheless is
    /// logged then.
    fn change<T: Send + 'static>(
        &self,
        effect: &str,
        caller: &Caller,
        change: impl FnOnce(&str, &dyn Snapshots) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (name, state) = (self.name.to_owned(), self.state.clone());
        let work = move |awaited: &Awaited| {
            let snapshots = snapshots_of(&name, &**state.volume())?;
            let _stays_active = stay_active(&name, &state)?;
            awaited.begin()?;
            change(&name, snapshots)
        };
        let (caller, effects) = (caller.clone(), [effect.to_owned()]);
        let late = move |done: Result<T, ApiError>| {
            let done = done.as_ref().map(|_| &effects[..]);
            config_audit::log(&caller, "a change of snapshots, given up before", done);
        };
        self.blocking.run_change(self.name, work, late)?
    }
}

fn snapshots_of<'a>(name: &str, volume: &'a dyn Volume) -> Result<&'a dyn Snapshots, ApiError> {
    let text = || format!("{name}: its kind has no snapshots; images of Ceph (rbd:POOL/IMAGE) have them");
    volume.snapshots().ok_or_else(|| ApiError::new(ErrorCode::Conflict, text()))
}

/// Refuses changes of a standby volume, which would take the ownership from its owner, and keeps an
/// active one from becoming standby meanwhile.
fn stay_active<'a>(name: &str, state: &'a VolumeState) -> Result<StaysActive<'a>, ApiError> {
    let text =
        || format!("{name}: is not served by this daemon now; change its snapshots where it is active");
    state.stay_active().ok_or_else(|| ApiError::new(ErrorCode::Conflict, text()))
}

fn status_of(exports: &Exports, snapshot: SnapshotInfo) -> SnapshotStatus {
    let volumes = served_by(exports, &snapshot);
    let SnapshotInfo { name, size, created, is_protected, .. } = snapshot;
    let created = created.and_then(|time| Timestamp::try_from(time).ok());
    let created = created.map(|time| format!("{time:.0}"));
    SnapshotStatus { name, size, created, protected: is_protected, volumes }
}

/// The volumes that serve a snapshot.
fn served_by(exports: &Exports, snapshot: &SnapshotInfo) -> Vec<String> {
    let all = exports.iter().filter(|(id, _)| {
        let state = exports.volume_state(*id);
        state.is_some_and(|state| state.volume().snapshots_in_use().contains(&snapshot.identity))
    });
    all.map(|(_, export)| export.name.clone()).collect()
}

fn refusal(volume: &str, error: &SnapshotError) -> ApiError {
    let code = match error {
        SnapshotError::BadName { .. } => ErrorCode::Invalid,
        SnapshotError::NotFound(_) => ErrorCode::NotFound,
        SnapshotError::Exists(_)
        | SnapshotError::Protected(_)
        | SnapshotError::HasClones(_)
        | SnapshotError::ReadOnly
        | SnapshotError::CannotProtect => ErrorCode::Conflict,
        SnapshotError::Storage { .. } => ErrorCode::Failed,
    };
    ApiError::new(code, format!("{volume}: {error}"))
}
