//! NBD: its properties, its frontend for `serve`, and its URLs.

mod remote;
mod tls;

use super::address::{ListenerAddress, is_local};
use super::frontend::{
    ConnectInfo, Frontend, HandedSession, LiveFrontend, Portal, Resume, Service, VolumeNames,
};
use super::policy::Policy;
use super::{Carrier, KeyError, Protocol, ServiceType};
use crate::failure::Failure;
use crate::output::shell_word;
use blockmux_engine::net::host::NetworkStream;
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_engine::protocol::nbd::target::{self, NbdServerTls};
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::exports::{ExportAccess, ExportSelection, Exports};
use blockmux_proto::nbd::server::TlsMode;
use blockmux_proto::nbd::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, NbdServer, NbdUri, TlsFiles, UriTls};
use blockmux_wire::nbd::{NBD_DEFAULT_PORT, NBD_MAX_MINIMUM_BLOCK, NBD_MAX_STRING};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use serde::Deserialize;
use std::any::Any;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tls::{CLIENT_DIRECTORY, CLIENT_KEYS, TlsSettings};
use toml::de::Deserializer;

pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    title: "NBD",
    carrier: Carrier::Stream,
    is_default: true,
    has_rdma: false,
    is_over_rdma: false,
    listener_help: ["ADDR|unix:PATH", "Serve NBD at ADDR; repeatable [default: 127.0.0.1:10809]"],
    port: NBD_DEFAULT_PORT,
    schemes: &[
        ("nbd", Transport::Tcp),
        ("nbd+unix", Transport::Unix),
        ("nbds", Transport::Tcp),
        ("nbds+unix", Transport::Unix),
    ],
    unsupported_schemes: &[],
    url_forms: &["nbd://host/export", "nbds://host/export", "nbd+unix:///export?socket=PATH"],
    max_description: NBD_MAX_STRING,
    max_logical_block: NBD_MAX_MINIMUM_BLOCK,
    // Extended headers: request; reply with the offset of its data; request; reply without data.
    shape: MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 },
    frontend: || Box::<Nbd>::default(),
    remote: remote::of_url,
    served_with: None,
    service_type: Some(ServiceType { name: "_nbd._tcp", properties: &[] }),
};

/// The frontend of NBD. Every volume is an export.
#[derive(Default)]
struct Nbd {
    settings: TlsSettings,
    /// TLS with the loaded credentials; `None` before [`Frontend::check`] and without TLS.
    tls: Option<NbdServerTls>,
    /// TLS of a client on this machine.
    client_tls: Option<UriTls>,
}

/// The running frontend. Clients see the exports that exist when they connect.
struct LiveNbd {
    exports: Exports,
    policy: Policy,
    /// TLS of new connections.
    tls: Arc<RwLock<Option<NbdServerTls>>>,
    state: Mutex<NbdState>,
}

/// The parts of the state that depend on the config.
#[derive(Default)]
struct NbdState {
    /// Clients must authenticate.
    is_restricted: bool,
    /// Clients did not have to authenticate before the last change of the config.
    is_newly_restricted: bool,
}

/// Selects the exports of a listener for a client.
struct ClientExports {
    policy: Policy,
    place: ListenerAddress,
    /// The client's IP address.
    client: Option<IpAddr>,
}

/// The exports of a listener for a client with this IP address.
fn exports_for(
    exports: &Exports,
    policy: &Policy,
    place: &ListenerAddress,
    client: Option<IpAddr>,
) -> Exports {
    exports.offering(ClientExports { policy: policy.clone(), place: place.clone(), client })
}

impl ExportSelection for ClientExports {
    fn access(&self, volume: &str) -> ExportAccess {
        match self.policy.serves(&NBD, &self.place, volume) {
            true if self.policy.networks_of(volume).admits(self.client) => ExportAccess::Offered,
            true => ExportAccess::Refused,
            false => ExportAccess::Hidden,
        }
    }

    fn why_hidden(&self, volume: &str) -> Option<String> {
        self.policy.why_not(&NBD, &self.place, volume)
    }
}

impl LiveFrontend for LiveNbd {
    fn serve(&self, place: &ListenerAddress) -> Serve {
        let (exports, policy, place) = (self.exports.clone(), self.policy.clone(), place.clone());
        let tls = self.tls.clone();
        Arc::new(move |core, stream, permit| {
            let exports = exports_for(&exports, &policy, &place, stream.peer_ip());
            let tls = tls.read().unwrap_or_else(PoisonError::into_inner).clone();
            target::serve(exports, tls)(core, stream, permit);
        })
    }

    fn resume(&self, place: &ListenerAddress) -> Option<Resume> {
        let (exports, policy, place) = (self.exports.clone(), self.policy.clone(), place.clone());
        let tls = self.tls.read().unwrap_or_else(PoisonError::into_inner);
        // Handed-over sessions have no TLS, so they cannot continue if TLS is required now.
        if tls.as_ref().is_some_and(|tls| tls.policy.mode == TlsMode::Required) {
            return None;
        }
        Some(Box::new(move |core, HandedSession { stream, unread, state, .. }, permit| {
            let exports = exports_for(&exports, &policy, &place, stream.peer_ip());
            target::resume(core, &exports, (stream, unread, &state), permit);
        }))
    }

    fn reconfigure(&self, desired: &dyn Frontend, _service: &Service<'_>) {
        let Some(own) = (desired as &dyn Any).downcast_ref::<Nbd>() else { return };
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = own.tls.clone();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_restricted = own.restricts_exports();
        *state = NbdState { is_newly_restricted: is_restricted && !state.is_restricted, is_restricted };
    }

    fn may_continue(&self, session: &SessionInfo) -> bool {
        if self.state.lock().unwrap_or_else(PoisonError::into_inner).is_newly_restricted {
            return false;
        }
        let listeners = self.policy.listeners();
        let own = listeners.iter().find(|own| own.place.to_string() == session.listener);
        let networks = self.policy.networks_of(&session.login.target);
        networks.admits(session.peer_ip())
            && own.is_some_and(|own| self.policy.serves(&NBD, &own.place, &session.login.target))
    }
}

impl Frontend for Nbd {
    fn options(&self, command: Command) -> Command {
        TlsSettings::augment_args(command)
    }

    fn take_options(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.settings = TlsSettings::from_arg_matches(matches)?;
        // An announced URL may be used in another directory.
        self.settings.make_absolute();
        Ok(())
    }

    fn keys(&self) -> &'static [&'static str] {
        &tls::KEYS
    }

    fn take_keys(&mut self, written: Deserializer<'_>, directory: &Path) -> Result<(), KeyError> {
        self.settings.add(TlsSettings::deserialize(written)?, directory);
        Ok(())
    }

    fn is_configured(&self) -> bool {
        self.settings.is_set()
    }

    fn check(&mut self, _: &[&str]) -> Result<(), String> {
        self.tls = self.settings.load().map_err(|failure| failure.to_string())?;
        self.client_tls = self.tls.as_ref().map(|_| self.settings.of_client());
        Ok(())
    }

    fn restricts_exports(&self) -> bool {
        self.settings.is_restricted()
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        let (exports, policy) = (service.exports.clone(), service.policy.clone());
        let live = LiveNbd { exports, policy, tls: Arc::default(), state: Mutex::default() };
        live.reconfigure(self, service);
        Ok(Some(Box::new(live)))
    }

    fn connect_info(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo> {
        let Some(address) = portal.reached_at.socket() else { return Vec::new() };
        let client_tls = self.client_tls.clone();
        // Other machines have no files of this one.
        let client_tls =
            client_tls.map(|tls| if is_local(address) { tls } else { tls::of_other_machine(tls) });
        let with_tls = client_tls.map(|tls| connect_info(address, named, Some(tls)));
        let is_required = self.tls.as_ref().is_some_and(|tls| tls.policy.mode == TlsMode::Required);
        let plain = (!is_required).then(|| connect_info(address, named, None));
        with_tls.into_iter().chain(plain).collect()
    }
}

/// URL and client commands for an export, with or without TLS.
fn connect_info(address: &Address, named: &VolumeNames, tls: Option<UriTls>) -> ConnectInfo {
    let server = match address {
        Address::Unix(path) => NbdServer::Unix(path.clone()),
        Address::Tcp(address) => NbdServer::Tcp((zone::host_text(address), address.port())),
    };
    let export = named.export.clone();
    let (reconnect, timeout) = (DEFAULT_RECONNECT, DEFAULT_TIMEOUT);
    let uri = NbdUri { server, export, tls, connections: None, reconnect, timeout };
    match &uri.tls {
        None => ConnectInfo {
            url: uri.to_string(),
            commands: commands(&uri, named.block_len).into(),
            variables: vec![("nbd", qemu_filename(&uri))],
            ..ConnectInfo::default()
        },
        Some(tls) => {
            ConnectInfo { url: uri.to_string(), commands: tls_commands(&uri, tls), ..ConnectInfo::default() }
        }
    }
}

/// Commands of clients with TLS, with the client's credentials in the same directory or file.
fn tls_commands(uri: &NbdUri, tls: &UriTls) -> Vec<String> {
    let mut commands = vec![format!("nbdinfo {}", shell_word(&uri.to_string()))];
    // QEMU expects a directory with fixed file names.
    let object = match &tls.credentials {
        TlsFiles::Certificates(Some(directory)) => {
            Some(format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", directory.display()))
        }
        TlsFiles::Psk { file, username: Some(user) } if file.ends_with("keys.psk") => {
            let directory = file.parent().map(PathBuf::from).unwrap_or_default();
            Some(format!("tls-creds-psk,id=tls0,endpoint=client,username={user},dir={}", directory.display()))
        }
        _ => None,
    };
    if let Some(object) = object {
        let place = match &uri.server {
            NbdServer::Tcp((host, port)) => format!("host={host},port={port}"),
            NbdServer::Unix(path) => format!("path={},tls-hostname=localhost", path.display()),
        };
        let image = format!("driver=nbd,{place},export={},tls-creds=tls0", uri.export);
        commands.push(format!(
            "qemu-img info --object {} --image-opts {}",
            shell_word(&object),
            shell_word(&image)
        ));
    }
    if matches!(&tls.credentials, TlsFiles::Certificates(Some(directory)) if directory == CLIENT_DIRECTORY) {
        commands.push(format!(
            "# {CLIENT_DIRECTORY}: a directory of the client with ca-cert.pem, client-cert.pem and client-key.pem"
        ));
    }
    if matches!(&tls.credentials, TlsFiles::Psk { file, .. } if file == Path::new(CLIENT_KEYS)) {
        commands.push(format!("# {CLIENT_KEYS}: a file of the client with its line of the keys"));
    }
    commands
}

fn commands(uri: &NbdUri, block_len: u32) -> [String; 3] {
    let (url, name) = (uri.to_string(), shell_word(&uri.export));
    let place = match &uri.server {
        NbdServer::Tcp((host, port)) => format!("{host} {port}"),
        NbdServer::Unix(path) => format!("-unix {}", shell_word(&path.to_string_lossy())),
    };
    // nbd-client does not ask the server for it.
    let block_size = if block_len > 512 { format!(" -block-size {block_len}") } else { String::new() };
    [
        format!("nbdinfo {}", shell_word(&url)),
        format!("qemu-img info {}", shell_word(&url)),
        format!("nbd-client {place} /dev/nbd0 -N {name}{block_size} {FOR_LOST_CONNECTIONS}"),
    ]
}

/// QEMU's file name syntax from before NBD URIs, which nbdkit passes to its `--run` command.
fn qemu_filename(uri: &NbdUri) -> String {
    match &uri.server {
        NbdServer::Tcp((host, port)) if host.contains(':') => {
            format!("nbd:[{host}]:{port}:exportname={}", uri.export)
        }
        NbdServer::Tcp((host, port)) => format!("nbd:{host}:{port}:exportname={}", uri.export),
        NbdServer::Unix(path) => format!("nbd:unix:{}:exportname={}", path.display(), uri.export),
    }
}

/// Options that let the kernel survive a lost connection: it sends the requests again on another
/// connection, but only after the timeout, which is 30 s by default. No option makes it reconnect
/// after a restart of the server, see docs/guides/nbd.md.
const FOR_LOST_CONNECTIONS: &str = "-connections 4 -timeout 10";
