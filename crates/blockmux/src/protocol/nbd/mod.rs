//! NBD, as the commands know it.

mod remote;
mod tls;

use super::frontend::{Frontend, Live, Portal, Service, VolumeNames, Way};
use super::policy::{ListenerAddress, Policy};
use super::{Carrier, KeyError, Protocol};
use crate::failure::Failure;
use crate::output::shell_word;
use blockmux_engine::listener::Serve;
use blockmux_engine::nbd::{self, NbdServerTls};
use blockmux_engine::sessions::SessionInfo;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::exports::{ExportAccess, Exports};
use blockmux_proto::nbd::server::TlsMode;
use blockmux_proto::nbd::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, NbdServer, NbdUri, TlsFiles, UriTls};
use blockmux_wire::nbd::{NBD_DEFAULT_PORT, NBD_MAX_MINIMUM_BLOCK, NBD_MAX_STRING};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use serde::Deserialize;
use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tls::TlsSettings;
use toml::de::Deserializer;

pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    title: "NBD",
    carrier: Carrier::Stream,
    is_unasked: true,
    listener_help: ["ADDR|unix:PATH", "Serve NBD at ADDR; repeatable [default: 127.0.0.1:10809]"],
    port: NBD_DEFAULT_PORT,
    schemes: &[
        ("nbd", Transport::Tcp),
        ("nbd+unix", Transport::Unix),
        ("nbds", Transport::Tcp),
        ("nbds+unix", Transport::Unix),
    ],
    unspoken_schemes: &[],
    url_forms: &["nbd://host/export", "nbds://host/export", "nbd+unix:///export?socket=PATH"],
    max_description: NBD_MAX_STRING,
    max_logical_block: NBD_MAX_MINIMUM_BLOCK,
    // Extended headers: request; reply with the offset of its data; request; reply without data.
    shape: MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 },
    frontend: || Box::<Nbd>::default(),
    remote: remote::of_url,
    served_with: None,
};

/// Every volume is an export.
#[derive(Default)]
struct Nbd {
    settings: TlsSettings,
    /// What the settings lead to, once the files are read.
    tls: Option<NbdServerTls>,
}

/// A client finds what is there when it connects.
struct LiveNbd {
    exports: Exports,
    policy: Policy,
    /// What new connections are asked for.
    tls: Arc<RwLock<Option<NbdServerTls>>>,
    state: Mutex<State>,
}

/// What follows the config.
#[derive(Default)]
struct State {
    /// Clients have to prove who they are.
    is_restricted: bool,
    /// They had not to before the config was followed.
    asks_more: bool,
}

impl Live for LiveNbd {
    fn serve(&self, place: &ListenerAddress) -> Serve {
        let (policy, place) = (self.policy.clone(), place.clone());
        let (exports, tls) = (self.exports.clone(), self.tls.clone());
        Arc::new(move |core, stream, permit| {
            let (policy, place, client) = (policy.clone(), place.clone(), stream.peer_ip());
            let access = move |volume: &str| match policy.serves(&NBD, &place, volume) {
                true if policy.networks_of(volume).admits(client) => ExportAccess::Offered,
                true => ExportAccess::Refused,
                false => ExportAccess::Hidden,
            };
            let exports = exports.offering(access);
            let tls = tls.read().unwrap_or_else(PoisonError::into_inner).clone();
            nbd::serve(exports, tls)(core, stream, permit);
        })
    }

    fn follow(&self, desired: &dyn Frontend, _service: &Service<'_>) {
        let Some(own) = desired.as_any().downcast_ref::<Nbd>() else { return };
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = own.tls.clone();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_restricted = own.restricts_exports();
        *state = State { asks_more: is_restricted && !state.is_restricted, is_restricted };
    }

    fn keeps(&self, session: &SessionInfo) -> bool {
        if self.state.lock().unwrap_or_else(PoisonError::into_inner).asks_more {
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
        // Whoever copies a URL may be in another directory.
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
        self.settings.is_said()
    }

    fn check(&mut self, _: &[&str]) -> Result<(), String> {
        self.tls = self.settings.load().map_err(|failure| failure.to_string())?;
        Ok(())
    }

    fn restricts_exports(&self) -> bool {
        self.settings.is_restricted()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn Live>>, Failure> {
        let (exports, policy) = (service.exports.clone(), service.policy.clone());
        let live = LiveNbd { exports, policy, tls: Arc::default(), state: Mutex::default() };
        live.follow(self, service);
        Ok(Some(Box::new(live)))
    }

    fn ways(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<Way> {
        let Some(address) = portal.reached_at.socket() else { return Vec::new() };
        let by_tls = self.tls.as_ref().map(|_| way(address, &named.export, Some(self.settings.of_client())));
        let is_required = self.tls.as_ref().is_some_and(|tls| tls.policy.mode == TlsMode::Required);
        let plain = (!is_required).then(|| way(address, &named.export, None));
        by_tls.into_iter().chain(plain).collect()
    }
}

fn way(address: &Address, name: &str, tls: Option<UriTls>) -> Way {
    let server = match address {
        Address::Unix(path) => NbdServer::Unix(path.clone()),
        Address::Tcp(address) => NbdServer::Tcp((address.ip().to_string(), address.port())),
    };
    let export = name.to_owned();
    let (reconnect, timeout) = (DEFAULT_RECONNECT, DEFAULT_TIMEOUT);
    let uri = NbdUri { server, export, tls, connections: None, reconnect, timeout };
    match &uri.tls {
        None => Way {
            url: uri.to_string(),
            commands: commands(&uri).into(),
            variables: vec![("nbd", old_qemu(&uri))],
        },
        Some(tls) => Way { url: uri.to_string(), commands: tls_commands(&uri, tls), variables: Vec::new() },
    }
}

/// The commands of clients with TLS that have credentials in the same places.
fn tls_commands(uri: &NbdUri, tls: &UriTls) -> Vec<String> {
    let mut commands = vec![format!("nbdinfo {}", shell_word(&uri.to_string()))];
    // QEMU takes a directory, with the names of files that it expects.
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
    commands
}

fn commands(uri: &NbdUri) -> [String; 3] {
    let (url, name) = (uri.to_string(), shell_word(&uri.export));
    let place = match &uri.server {
        NbdServer::Tcp((host, port)) => format!("{host} {port}"),
        NbdServer::Unix(path) => format!("-unix {}", shell_word(&path.to_string_lossy())),
    };
    [
        format!("nbdinfo {}", shell_word(&url)),
        format!("qemu-img info {}", shell_word(&url)),
        format!("nbd-client {place} /dev/nbd0 -N {name} {FOR_LOST_CONNECTIONS}"),
    ]
}

/// As QEMU wrote it before there were URLs, and as nbdkit hands it to its own commands.
fn old_qemu(uri: &NbdUri) -> String {
    match &uri.server {
        NbdServer::Tcp((host, port)) if host.contains(':') => {
            format!("nbd:[{host}]:{port}:exportname={}", uri.export)
        }
        NbdServer::Tcp((host, port)) => format!("nbd:{host}:{port}:exportname={}", uri.export),
        NbdServer::Unix(path) => format!("nbd:unix:{}:exportname={}", path.display(), uri.export),
    }
}

/// When a connection breaks, the kernel sends its requests again by another one, but only after the
/// time-out, which is 30 s unless told otherwise. No option makes new connections after a restart:
/// see docs/guides/nbd.md.
const FOR_LOST_CONNECTIONS: &str = "-connections 4 -timeout 10";
