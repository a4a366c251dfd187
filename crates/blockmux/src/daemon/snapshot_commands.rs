//! Commands of the control API about the snapshots of volumes. They run without the right to change
//! the daemon, because the storage may not answer.

use super::blocking_work::Awaited;
use super::config_audit::{self, Caller};
use super::control::{Changed, ControlServer};
use crate::api::request::Answer;
use crate::api::status::SnapshotStatus;
use crate::api::{ApiError, ErrorCode};
use blockmux_proto::exports::Exports;
use blockmux_volume::{SnapshotError, SnapshotInfo, Snapshots, Volume};
use jiff::Timestamp;

impl ControlServer {
    /// The snapshots of a volume, oldest first.
    pub(super) fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotStatus>, ApiError> {
        let (_, state) = self.find(volume)?;
        let own = volume.to_owned();
        let list = move || {
            let listed = snapshots_of(&own, &**state.volume())?.list();
            listed.map_err(|error| refusal(&own, &error))
        };
        let listed = self.reloader.blocking.run(volume, list)??;
        Ok(listed.into_iter().map(|snapshot| self.status_of(snapshot)).collect())
    }

    /// Creates a snapshot of a volume.
    pub(super) fn create_snapshot(
        &self,
        volume: &str,
        name: &str,
        caller: &Caller,
    ) -> Result<Changed, ApiError> {
        let (own, effect) = (name.to_owned(), format!("+ snapshot {volume}@{name}"));
        let create = move |volume: &str, snapshots: &dyn Snapshots| {
            snapshots.create(&own).map_err(|error| refusal(volume, &error))
        };
        let created = self.change_snapshot(volume, &effect, caller, create)?;
        Ok(Changed { answer: Answer::Snapshot(self.status_of(created)), effects: vec![effect] })
    }

    /// Deletes a snapshot that no volume of this daemon serves.
    pub(super) fn delete_snapshot(
        &self,
        volume: &str,
        name: &str,
        caller: &Caller,
    ) -> Result<Changed, ApiError> {
        let (own, effect) = (name.to_owned(), format!("- snapshot {volume}@{name}"));
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
        self.change_snapshot(volume, &effect, caller, delete)?;
        Ok(Changed { answer: Answer::Done, effects: vec![effect] })
    }

    /// Protects a snapshot from being deleted, or ends that.
    pub(super) fn protect_snapshot(
        &self,
        volume: &str,
        name: &str,
        is_protected: bool,
        caller: &Caller,
    ) -> Result<Changed, ApiError> {
        let own = name.to_owned();
        let effect = format!("~ snapshot {volume}@{name}: protected: {is_protected}");
        let protect = move |volume: &str, snapshots: &dyn Snapshots| {
            snapshots.protect(&own, is_protected).map_err(|error| refusal(volume, &error))
        };
        self.change_snapshot(volume, &effect, caller, protect)?;
        Ok(Changed { answer: Answer::Done, effects: vec![effect] })
    }

    /// Makes a change of a volume's snapshots, whose effect is `effect`. One that was given up and
    /// happens nevertheless is logged then.
    fn change_snapshot<T: Send + 'static>(
        &self,
        volume: &str,
        effect: &str,
        caller: &Caller,
        change: impl FnOnce(&str, &dyn Snapshots) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (_, state) = self.find(volume)?;
        let own = volume.to_owned();
        let work = move |awaited: &Awaited| {
            let snapshots = snapshots_of(&own, &**state.volume())?;
            awaited.begin()?;
            change(&own, snapshots)
        };
        let (caller, effects) = (caller.clone(), [effect.to_owned()]);
        let late = move |done: Result<T, ApiError>| {
            let done = done.as_ref().map(|_| &effects[..]);
            config_audit::log(&caller, "a change of snapshots, given up before", done);
        };
        self.reloader.blocking.run_change(volume, work, late)?
    }

    fn status_of(&self, snapshot: SnapshotInfo) -> SnapshotStatus {
        let volumes = served_by(&self.exports, &snapshot);
        let SnapshotInfo { name, size, created, is_protected, .. } = snapshot;
        let created = created.and_then(|time| Timestamp::try_from(time).ok());
        let created = created.map(|time| format!("{time:.0}"));
        SnapshotStatus { name, size, created, protected: is_protected, volumes }
    }
}

fn snapshots_of<'a>(name: &str, volume: &'a dyn Volume) -> Result<&'a dyn Snapshots, ApiError> {
    let text = || format!("{name}: its kind has no snapshots; images of Ceph (rbd:POOL/IMAGE) have them");
    volume.snapshots().ok_or_else(|| ApiError::new(ErrorCode::Conflict, text()))
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
