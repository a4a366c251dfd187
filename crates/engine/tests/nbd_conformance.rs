//! The volume conformance suite over NBD: a target on a core of its own, and a remote volume on the
//! test's core.

mod conforms;

use blockmux_engine::carrier::blocking::run_session;
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::nbd::initiator::{self, NbdEndpoint};
use blockmux_engine::protocol::nbd::target;
use blockmux_engine::remote::{Dialer, Opening, Paths, RemoteVolume};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::volume::file::{FileOptions, FileVolume};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::client::{
    HeaderFormat, NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
};
use blockmux_volume::{Limit, Limits, MemVolume, Pool, Volume, VolumeInfo, VolumeLimits};
use conforms::{conforms, disk_and_frozen};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Serves one volume, also as `frozen`, which refuses writes, until it is dropped.
struct Target {
    address: Address,
    _cores: Cores,
    _folder: TempDir,
}

impl Target {
    fn on_unix_socket(volume: Arc<dyn Volume>) -> Target {
        Target::with_limits(volume, VolumeLimits::default())
    }

    fn with_limits(volume: Arc<dyn Volume>, limits: VolumeLimits) -> Target {
        let exports = disk_and_frozen(&volume);
        let (disk, _) = exports.find("disk").unwrap();
        exports.volume_state(disk).unwrap().limiter().set_limits(limits);
        Target::serve(exports, |folder| Address::Unix(folder.join("socket")))
    }

    fn on_tcp(volume: Arc<dyn Volume>) -> Target {
        Target::serve(disk_and_frozen(&volume), |_| Address::Tcp(([127, 0, 0, 1], 0).into()))
    }

    fn serve(exports: Exports, place: impl FnOnce(&Path) -> Address) -> Target {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&place(folder.path())).unwrap();
        let address = listener.address().clone();
        let cores =
            Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() }).unwrap();
        let (serve, inboxes) = (target::serve(exports, None), cores.inboxes());
        cores.inboxes()[0].send(move |core| {
            ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(64));
        });
        Target { address, _cores: cores, _folder: folder }
    }
}

/// Accesses an export with one form of messages, whatever else the target offers.
struct FormDialer {
    paths: Paths,
    export: &'static str,
    form: HeaderFormat,
}

impl FormDialer {
    fn log_in(&self, mode: NbdSessionMode, pool: &Pool, now: Instant) -> NbdInitiatorSession {
        let features = NbdFeatures {
            extended_headers: self.form == HeaderFormat::Extended,
            structured_replies: self.form == HeaderFormat::Structured,
        };
        let config = NbdInitiatorConfig { export: self.export.to_owned(), mode, features };
        NbdInitiatorSession::new(config, pool.clone(), now)
    }

    fn ask(&self) -> VolumeInfo {
        let mut session = self.log_in(NbdSessionMode::Info, &Pool::new(1 << 20), Instant::now());
        run_session(&self.paths.addresses[0], None, &mut session, TIMEOUT, NbdInitiatorSession::is_over)
            .unwrap();
        session.export().unwrap().volume_info()
    }
}

impl Dialer for FormDialer {
    type Session = NbdInitiatorSession;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> NbdInitiatorSession {
        let (pool, now) = (opening.pool, opening.now);
        self.log_in(NbdSessionMode::Go, pool, now)
    }

    fn check(&self, session: &NbdInitiatorSession) -> Result<(), String> {
        let found = session.export().map(|export| export.headers);
        if found == Some(self.form) { Ok(()) } else { Err(format!("{found:?} and not {:?}", self.form)) }
    }

    fn refusal(&self, session: &NbdInitiatorSession) -> Option<String> {
        session.refusal().map(ToString::to_string)
    }
}

/// Runs the suite with every form of messages.
fn conforms_in_every_form(target: &Target, connections: u32) {
    for form in [HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended] {
        let [volume, read_only] = ["disk", "frozen"].map(|export| -> Arc<dyn Volume> {
            let dialer = FormDialer { paths: Paths::to(&target.address), export, form };
            let info = dialer.ask();
            assert!(info.shared_flush, "several connections may be used together");
            Arc::new(RemoteVolume::<_>::new(dialer, info, connections, TIMEOUT))
        });
        conforms(volume, Some(read_only));
    }
}

fn ram() -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(SIZE))
}

#[test]
fn a_ram_volume_conforms_over_one_connection_in_every_form() {
    conforms_in_every_form(&Target::on_unix_socket(ram()), 1);
}

#[test]
fn a_ram_volume_conforms_over_three_connections_in_every_form() {
    conforms_in_every_form(&Target::on_unix_socket(ram()), 3);
}

#[test]
fn a_file_conforms_over_one_connection_and_over_three_in_every_form() {
    for connections in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let options = FileOptions { size: Some(SIZE), create: true, ..FileOptions::default() };
        let file = FileVolume::open(folder.path().join("disk"), options).unwrap();
        conforms_in_every_form(&Target::on_unix_socket(Arc::new(file)), connections);
    }
}

#[test]
fn a_ram_volume_with_limits_conforms_over_two_connections_in_every_form() {
    let limit = |iops, bytes_per_s| Limits {
        total: Limit { iops: NonZeroU64::new(iops), bytes_per_s: NonZeroU64::new(bytes_per_s) },
        ..Limits::default()
    };
    let limits = VolumeLimits { volume: limit(20_000, 0), client: limit(0, 1 << 30) };
    conforms_in_every_form(&Target::with_limits(ram(), limits), 2);
}

#[test]
fn an_export_named_by_a_url_conforms_over_tcp() {
    let target = Target::on_tcp(ram());
    let [volume, read_only] = ["disk", "frozen"].map(|export| -> Arc<dyn Volume> {
        let (address, export) = (target.address.clone(), export.to_owned());
        Arc::new(
            initiator::connect(NbdEndpoint {
                tls: None,
                address,
                export,
                connections: 2,
                reconnect_timeout: TIMEOUT,
                timeout: Some(TIMEOUT),
            })
            .unwrap(),
        )
    });
    conforms(volume, Some(read_only));
}

const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
