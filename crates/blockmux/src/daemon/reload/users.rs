//! The sessions that use volumes.

use super::commands::lost_defaults;
use super::model::Model;
use super::plan::{Schema, describe_session};
use super::{Reloader, RunningConfig};
use crate::api::plan::{PlanReport, PlannedChange};
use crate::daemon::setup::Setup;
use blockmux_engine::serve::sessions::{Draining, SessionInfo, Sessions};
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::volume_state::ServingState;
use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

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

/// Asks sessions to end whose targets have volumes now that fence them.
pub(super) fn end_fenced_sessions(reloader: &Reloader) {
    let users = OnceCell::new();
    let targets = |volume: &str| users.get_or_init(|| VolumeUsers::new(reloader)).named_by_sessions(volume);
    // They may connect again at once, and are served then.
    drop(drain_fenced(&reloader.exports, reloader.connection_limits.limit.sessions(), targets));
    reloader.cores.wake_all();
}

/// Asks the sessions to end that an active volume fences. Its targets may have it only now, and
/// sessions that began before it was active last would find a path that always fails. `targets`
/// returns the names that sessions of a volume have.
fn drain_fenced(
    exports: &Exports,
    sessions: &Sessions,
    targets: impl Fn(&str) -> BTreeSet<String>,
) -> Vec<Draining> {
    let drain = |(id, export): (VolumeId, Arc<Export>)| {
        let in_turns = exports.volume_state(id).filter(|state| state.ownership().is_some());
        let state = in_turns.filter(|state| state.serving() == ServingState::Active)?;
        Some(sessions.drain_fenced(FENCED, &state, &targets(&export.name)))
    };
    exports.iter().filter_map(drain).collect()
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

/// Why a session ended whose volume is served by another daemon, or was meanwhile, for the log.
pub(in crate::daemon) const FENCED: &str = "the volume was fenced";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turns_storage::TestStorage;
    use blockmux_engine::volume::turns::{self, TurnChange};
    use blockmux_proto::driver::audit_event::Login;
    use blockmux_proto::volume_state::Epoch;
    use std::convert::Infallible;

    #[test]
    fn sessions_end_whose_target_has_an_active_volume_that_fences_them() {
        let (_storage, state) = TestStorage::standby();
        let (name, volume) = ("disk".to_owned(), state.volume().clone());
        let export = Export { name, description: String::new(), read_only: false, volume };
        let (exports, sessions) = (Exports::with_states(vec![(export, state.clone())]), Sessions::default());
        let begin = |target: &str| {
            let login = Login { target: target.to_owned(), ..Login::default() };
            sessions.begin(login, "peer", Epoch::current())
        };
        let ends = || {
            let targets = |volume: &str| BTreeSet::from([format!("target of {volume}")]);
            let all = drain_fenced(&exports, &sessions, targets);
            all.iter().map(|draining| draining.left().len()).collect::<Vec<_>>()
        };
        let activate = || turns::activate(&state, false, || (), |_| Ok::<_, Infallible>(()));
        assert_eq!(activate(), Ok(TurnChange::Done));
        let _early = begin("target of disk");
        let _of_another = begin("another target");
        assert_eq!(ends(), [0]);
        assert!(state.lose());
        let _later = begin("target of disk");
        assert!(ends().is_empty(), "the next activation ends them");
        assert_eq!(activate(), Ok(TurnChange::EndsSessions));
        assert_eq!(ends(), [1]);
    }
}
