//! The sessions that use volumes.

use super::commands::lost_defaults;
use super::model::Model;
use super::plan::{Schema, describe_session};
use super::{Reloader, RunningConfig};
use crate::api::plan::{PlanReport, PlannedChange};
use crate::daemon::setup::Setup;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::{Exports, VolumeId};
use std::collections::{BTreeSet, HashMap};

/// The sessions, and the targets that those of each volume name, as they are when this is made.
pub(in crate::daemon) struct VolumeUsers {
    exports: Exports,
    pub(super) sessions: Vec<SessionInfo>,
    /// The indexes of the sessions of each target.
    by_target: HashMap<String, Vec<usize>>,
    targets: HashMap<VolumeId, BTreeSet<String>>,
}

impl VolumeUsers {
    pub(in crate::daemon) fn new(reloader: &Reloader) -> VolumeUsers {
        let sessions = reloader.connection_limits.limit.sessions().list();
        let mut by_target: HashMap<String, Vec<usize>> = HashMap::new();
        for (at, session) in sessions.iter().enumerate() {
            by_target.entry(session.login.target.clone()).or_default().push(at);
        }
        let mut targets: HashMap<VolumeId, BTreeSet<String>> = HashMap::new();
        let served = reloader.live_protocols.get();
        for (volume, target) in served.iter().flat_map(|(_, live)| live.session_targets()) {
            targets.entry(volume).or_default().insert(target);
        }
        VolumeUsers { exports: reloader.exports.clone(), sessions, by_target, targets }
    }

    /// The sessions that can use a volume, for messages.
    pub(in crate::daemon) fn of(&self, volume: &str) -> Vec<String> {
        let names = self.named_by_sessions(volume);
        let all = names.iter().filter_map(|name| self.by_target.get(name)).flatten();
        // Each session names one target.
        let all: BTreeSet<usize> = all.copied().collect();
        all.into_iter().filter_map(|at| self.sessions.get(at)).map(describe_session).collect()
    }

    /// The targets that sessions of a volume name.
    pub(in crate::daemon) fn named_by_sessions(&self, volume: &str) -> BTreeSet<String> {
        // Sessions of NBD name the export.
        self.targets_of(volume).into_iter().flatten().cloned().chain([volume.to_owned()]).collect()
    }

    /// Whether sessions of a volume name this target.
    pub(super) fn names(&self, volume: &str, target: &str) -> bool {
        self.targets_of(volume).is_some_and(|own| own.contains(target))
    }

    fn targets_of(&self, volume: &str) -> Option<&BTreeSet<String>> {
        self.targets.get(&self.exports.find(volume)?.0)
    }
}

/// The targets whose units change although the config says the same about them: they keep their
/// units, but with other identifiers, or are default targets that a new config has no longer.
pub(super) fn with_hidden_losses(
    reloader: &Reloader,
    config: &RunningConfig,
    setup: &Setup,
    desired: &Model,
) -> BTreeSet<String> {
    let served = reloader.live_protocols.get();
    let renamed = served.iter().filter_map(|(protocol, live)| {
        Some(live.targets_with_other_identities(setup.frontends.of(protocol)?))
    });
    renamed.flatten().chain(lost_defaults(reloader, config, desired)).collect()
}

/// Lists the sessions of targets with hidden losses beside a change of the target, or else of
/// another one, which has led to that.
pub(super) fn report_hidden_losses(
    reloader: &Reloader,
    schema: &Schema,
    targets: &BTreeSet<String>,
    report: &mut PlanReport,
) {
    for target in targets {
        let mut users = reloader.sessions_with(|own| own == target);
        let known = |user: &String| report.changes.iter().any(|change| change.affected.contains(user));
        users.retain(|user| !known(user));
        let is_of_targets =
            |change: &PlannedChange| change.path.first().is_some_and(|list| schema.target(list).is_some());
        let places = [
            report.changes.iter().position(|change| change.path.get(1) == Some(target)),
            report.changes.iter().position(is_of_targets),
        ];
        let at = places.into_iter().flatten().next().unwrap_or(0);
        report.changes.get_mut(at).into_iter().for_each(|change| change.affected.append(&mut users));
    }
}
