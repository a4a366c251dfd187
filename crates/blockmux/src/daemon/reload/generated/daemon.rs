//! A daemon within the test: its config file, its cores and its control server, without the API.
//! What it serves is looked at by the initiators of all protocols.

use super::config::{CHAP_NAME, GUIDS, HOSTS, INITIATORS, check_files, own_ip, write_files};
use crate::api::ApiError;
use crate::api::fragment::FragmentContent;
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::attach::own_io::by_this_program;
use crate::daemon::config_audit::Caller;
use crate::daemon::control::{ConnectionLimits, ControlServer};
use crate::daemon::disks::{DiskServer, Disks};
use crate::daemon::inherited::InheritedListeners;
use crate::daemon::reload::model::Model;
use crate::daemon::reload::{Reloader, wait};
use crate::daemon::secrets::Secrets;
use crate::daemon::setup::Setup;
use crate::daemon::{ServeArgs, listen, start_cores};
use crate::failure::Failure;
use crate::protocol::policy::PolicyListener;
use crate::protocol::{DiscoveredExport, Frontends, reach};
use blockmux_engine::serve::listener::ConnectionLimit;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// The directory of a config file, and an IP address of its own.
pub(super) struct TestPlace {
    files: TempDir,
    ip: String,
    /// Clients look at what its daemons serve.
    has_clients: bool,
}

impl TestPlace {
    pub(super) fn new() -> TestPlace {
        let place = TestPlace { files: tempfile::tempdir().unwrap(), ip: own_ip(), has_clients: true };
        write_files(place.files.path());
        place
    }

    /// Sets whether clients look at what its daemons serve.
    pub(super) fn with_clients(self, has_clients: bool) -> TestPlace {
        TestPlace { has_clients, ..self }
    }

    pub(super) fn ip(&self) -> &str {
        &self.ip
    }

    pub(super) fn directory(&self) -> String {
        self.files.path().display().to_string()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    pub(super) fn write(&self, config: &str) {
        fs::write(self.path("b.toml"), config).unwrap();
    }

    /// The config file as it is.
    pub(super) fn text(&self) -> String {
        fs::read_to_string(self.path("b.toml")).unwrap()
    }

    fn args(&self) -> ServeArgs {
        ServeArgs { config: Some(self.path("b.toml")), ..ServeArgs::empty(Frontends::default()) }
    }

    /// Checks the config file as `blockmux check` does.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let mut setup = Setup::gather(self.args(), &InheritedListeners::default())?;
        let places = listen::places(&setup, None)?;
        setup.settle_policy(places)
    }

    /// The model of the config file.
    pub(super) fn model(&self) -> Result<Model, Failure> {
        Setup::gather(self.args(), &InheritedListeners::default()).map(|setup| Model::of(&setup))
    }

    /// Starts a daemon with the config file.
    pub(super) fn start(&self) -> Result<TestDaemon, Failure> {
        let inherited = InheritedListeners::default();
        let mut setup = Setup::gather(self.args(), &inherited)?;
        let bind = |place| listen::bind(place, setup.congestion.as_ref(), None);
        let bound = listen::places(&setup, None)?.into_iter().map(bind);
        let bound = bound.collect::<Result<Vec<_>, _>>()?;
        setup.settle_policy(bound.iter().map(|bound| bound.listener.clone()).collect())?;
        let exports = setup.open(&Arc::default(), BTreeMap::new(), Default::default())?;
        let limit = ConnectionLimit::new(setup.max_connections);
        let connection_limits = Arc::new(ConnectionLimits::new(limit));
        connection_limits.set_timeouts(setup.login_timeout, setup.idle_timeout);
        let cores = Arc::new(start_cores(&setup, POOL, false)?);
        let args = (self.args(), inherited);
        let disks = Arc::new(Disks::new(None, by_this_program(), true, None));
        let server = DiskServer { cores: cores.clone(), exports: exports.clone() };
        setup
            .attachments
            .iter()
            .try_for_each(|asked| disks.attach(&server, asked).map(drop))
            .map_err(Failure::request)?;
        let served = (cores, disks);
        let reloader = Reloader::start(
            args,
            &setup,
            &exports,
            &connection_limits,
            served,
            (bound, None),
            &Arc::default(),
        )?;
        let reloader = Arc::new(reloader);
        let control = ControlServer {
            exports,
            connection_limits,
            live_protocols: reloader.live_protocols.clone(),
            cores: reloader.cores().stats(),
            opener: reloader.opener.clone(),
            frontends: reloader.frontends.clone(),
            policy: setup.policy.clone(),
            secrets: Secrets::below(None),
            reloader,
        };
        Ok(TestDaemon { control, files: self.files.path().to_owned(), has_clients: self.has_clients })
    }

    /// Checks that no data was lost and nothing left behind.
    pub(super) fn check_files(&self) {
        check_files(self.files.path());
    }
}

/// A running daemon.
pub(super) struct TestDaemon {
    pub(super) control: ControlServer,
    files: PathBuf,
    has_clients: bool,
}

impl TestDaemon {
    /// The plan of a reload.
    pub(super) fn plan(&self) -> Result<PlanReport, ApiError> {
        self.control.reloader.diff()
    }

    pub(super) fn reload(&self) -> Result<PlanReport, ApiError> {
        self.control.reloader.reload(&CALLER, &|_| {})
    }

    /// Executes a command that changes something.
    pub(super) fn change(&self, request: &Request) -> Answer {
        self.control.change(request, &CALLER, &|_| {})
    }

    /// The running config as the text of a file.
    pub(super) fn exported(&self) -> String {
        self.control.reloader.running_text()
    }

    /// The desired config as the text of a file.
    pub(super) fn desired(&self) -> String {
        match self.control.reloader.export(false) {
            (FragmentContent::Toml(text), _) => text,
            (FragmentContent::Json(_), _) => panic!("an export has the form that was asked for"),
        }
    }

    /// What the daemon serves, as its control server and its clients see it. Volumes are in no
    /// order: those of a start are in that of the config, others in that in which they were added.
    pub(super) fn snapshot(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let Answer::Status(status) = self.control.answer(&Request::Status) else {
            panic!("a status is no other answer");
        };
        let idle = self.control.connection_limits.idle_timeout();
        all.insert("limits".to_owned(), format!("{} {idle:?}", status.max_connections));
        for disk in status.attachments {
            all.insert(
                format!("disk {}", disk.volume),
                format!("{} {:?} {}", disk.state, disk.via, disk.read_only),
            );
        }
        let policy = &self.control.policy;
        for volume in status.volumes {
            let (id, export) = self.control.exports.find(&volume.name).unwrap();
            let state = self.control.exports.volume_state(id).unwrap();
            let spec = self
                .control
                .reloader
                .config
                .get()
                .running
                .volume(&volume.name)
                .map(|own| own.entry.spec.to_string());
            let is_random = spec.iter().any(|spec| spec.contains("mem:") || spec.contains("null:"));
            let uuid = state.uuid().filter(|_| !is_random);
            let places = policy.listeners();
            let at = places.iter().filter(|at| policy.serves(at.protocol, &at.place, &volume.name));
            let mut at: Vec<_> = at.map(|at| format!("{} {}", at.protocol.name, at.place)).collect();
            at.sort();
            let mut targets: Vec<_> = self.targets_of(&volume.name);
            targets.sort();
            let unit = state.unit_identity();
            let own = format!(
                "{spec:?} {:?} {:?} {:?} {uuid:?} {unit:?} {:?} {:?} {:?} {at:?} {targets:?} {:?}",
                export.description,
                export.read_only,
                export.volume.info(),
                state.target_name(),
                state.limiter().limits(),
                policy.networks_of(&volume.name),
                (volume.size, volume.read_only, volume.allow)
            );
            all.insert(format!("volume {}", volume.name), own);
        }
        for listener in policy.listeners() {
            all.insert(
                format!("{} at {}", listener.protocol.name, listener.place),
                format!("{:?} {:?}", listener.volumes, listener.networks),
            );
            for url in self.urls(&listener).into_iter().filter(|_| self.has_clients) {
                all.insert(url.clone(), discovered(&url));
            }
        }
        // The daemon notices later than a client that its session has ended, and keeps what
        // sessions use.
        let sessions = self.control.connection_limits.limit.sessions();
        wait(TIMEOUT, || sessions.list().is_empty());
        all
    }

    /// The targets with a volume, and what everybody can do there.
    fn targets_of(&self, volume: &str) -> Vec<String> {
        let Some((id, _)) = self.control.exports.find(volume) else { return Vec::new() };
        let served = self.control.live_protocols.get();
        let all =
            served.iter().flat_map(|(_, live)| live.targets_by_volume().remove(&id).unwrap_or_default());
        all.map(|access| format!("{} {:?} {:?}", access.target, access.public, access.networks)).collect()
    }

    /// URLs at which different clients discover what a listener has for them.
    fn urls(&self, listener: &PolicyListener) -> Vec<String> {
        let (at, name) = (listener.place.to_string(), listener.protocol.name);
        let secret = |name: &str| self.files.join(name).display().to_string();
        match name {
            "nbd" => match at.strip_prefix("unix:") {
                Some(path) => vec![format!("nbd+unix:///?socket={path}")],
                None => vec![format!("nbd://{at}")],
            },
            "iscsi" => {
                let chap = format!("{CHAP_NAME}@{at}?secret_file={}&initiator=", secret("chap.secret"));
                let [first, second] = INITIATORS;
                vec![
                    format!("iscsi://{chap}{first}"),
                    format!("iscsi://{at}?initiator={second}"),
                    format!("iscsi://{at}?initiator=iqn.2026-11.test:unknown"),
                ]
            }
            "iser" => vec![format!("iser://{at}?initiator={}", INITIATORS[1])],
            "nvme-tcp" => {
                let [first, second] = HOSTS;
                vec![
                    format!("nvme+tcp://{at}?hostnqn={first}&dhchap_secret_file={}", secret("host.secret")),
                    format!("nvme+tcp://{at}?hostnqn={second}"),
                ]
            }
            "srp" => {
                let (served, mut urls) = (self.control.live_protocols.get(), Vec::new());
                for (_, live) in served.iter().filter(|(protocol, _)| protocol.name == "srp") {
                    for access in live.targets_by_volume().into_values().flatten() {
                        urls.extend(
                            GUIDS.map(|guid| format!("srp://{at}/{}/0?initiator={guid}", access.target)),
                        );
                    }
                }
                urls
            }
            _ => Vec::new(),
        }
    }

    /// Ends the daemon as a signal does.
    pub(super) fn stop(self) {
        let (cores, exports) = (self.control.reloader.cores().clone(), self.control.exports.clone());
        drop(self);
        assert!(cores.finish(TIMEOUT, || {}), "the tasks end");
        assert_eq!(cores.end(TIMEOUT), 0);
        drop((cores, exports));
    }
}

/// What a client discovers, in no order.
fn discovered(url: &str) -> String {
    match reach::of_url(url).and_then(|remote| remote.discover()) {
        Ok(found) => {
            let line = |export: &DiscoveredExport| {
                format!("{} {} {:?}", export.url, export.description, export.size)
            };
            let mut lines: Vec<_> = found.exports.iter().map(line).collect();
            lines.sort();
            lines.join("\n")
        }
        Err(failure) => failure.to_string(),
    }
}

const CALLER: Caller = Caller::Signal("a test");
/// Time for the cores to end.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of the buffers of a core, in bytes.
const POOL: usize = 64 << 20;
