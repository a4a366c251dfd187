//! TLS of NBD: the settings of `serve`, and the files of pre-shared keys.

use crate::access::{certificates, secret};
use crate::failure::Failure;
use blockmux_engine::carrier::tls::{ClientCredentials, ClientTls, Psk, PskFile, ServerCredentials};
use blockmux_engine::protocol::nbd::target::NbdServerTls;
use blockmux_proto::nbd::server::{NbdTls, TlsMode};
use blockmux_proto::nbd::uri::{NbdServer, NbdUri, TlsFiles, UriTls};
use clap::ValueEnum;
use serde::Deserialize;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// TLS settings of the command line; the config file has the same names.
#[derive(Clone, Debug, Default, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TlsSettings {
    /// Whether NBD clients use TLS: off, on (optional) or require [default: require with
    /// certificates or keys, else off]
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    nbd_tls: Option<TlsUse>,
    /// Directory with ca-cert.pem, server-cert.pem and server-key.pem; repeatable, chosen by SNI
    #[arg(long = "nbd-tls-certs", alias = "nbd-tls-certificates", value_name = "DIR")]
    nbd_tls_certificates: Vec<PathBuf>,
    /// File of pre-shared keys, as psktool writes it
    #[arg(long, value_name = "FILE")]
    nbd_tls_psk: Option<PathBuf>,
    // Hidden, because the long option name would double the length of the help page.
    /// Whether NBD clients must show a certificate that ca-cert.pem has signed
    #[arg(long, value_name = "BOOL", hide = true)]
    nbd_tls_verify_peer: Option<bool>,
    /// Allow only NBD clients whose certificate has this subject, as CN=host; repeatable
    #[arg(long, value_name = "DN")]
    nbd_tls_subject: Vec<String>,
    #[arg(skip)]
    nbd_ktls: Option<bool>,
}

/// Whether NBD clients use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TlsUse {
    Off,
    On,
    Require,
}

/// The keys in the config file.
pub(super) const KEYS: [&str; 6] =
    ["nbd_tls", "nbd_tls_certificates", "nbd_tls_psk", "nbd_tls_verify_peer", "nbd_tls_subject", "nbd_ktls"];

impl TlsSettings {
    /// Adds the settings of the config file; those of the command line have priority. Relative
    /// paths are below `directory`.
    pub(super) fn add(&mut self, written: TlsSettings, directory: &Path) {
        self.nbd_tls = self.nbd_tls.or(written.nbd_tls);
        self.nbd_tls_verify_peer = self.nbd_tls_verify_peer.or(written.nbd_tls_verify_peer);
        self.nbd_ktls = self.nbd_ktls.or(written.nbd_ktls);
        if self.nbd_tls_certificates.is_empty() && self.nbd_tls_psk.is_none() {
            let below = |path: PathBuf| directory.join(path);
            self.nbd_tls_certificates = written.nbd_tls_certificates.into_iter().map(below).collect();
            self.nbd_tls_psk = written.nbd_tls_psk.map(below);
        }
        if self.nbd_tls_subject.is_empty() {
            self.nbd_tls_subject = written.nbd_tls_subject;
        }
    }

    /// Whether any setting is given.
    pub(super) fn is_set(&self) -> bool {
        let TlsSettings {
            nbd_tls,
            nbd_tls_certificates,
            nbd_tls_psk,
            nbd_tls_verify_peer,
            nbd_tls_subject,
            nbd_ktls,
        } = self;
        nbd_tls.is_some()
            || nbd_tls_verify_peer.is_some()
            || nbd_ktls.is_some()
            || nbd_tls_psk.is_some()
            || !nbd_tls_certificates.is_empty()
            || !nbd_tls_subject.is_empty()
    }

    fn mode(&self) -> TlsMode {
        let has_credentials = self.nbd_tls_psk.is_some() || !self.nbd_tls_certificates.is_empty();
        match self.nbd_tls {
            None if has_credentials => TlsMode::Required,
            None | Some(TlsUse::Off) => TlsMode::Off,
            Some(TlsUse::On) => TlsMode::Optional,
            Some(TlsUse::Require) => TlsMode::Required,
        }
    }

    /// Whether clients must show a certificate.
    fn verifies_clients(&self) -> bool {
        self.nbd_tls_verify_peer.unwrap_or(true)
    }

    /// Whether clients must authenticate.
    pub(super) fn is_restricted(&self) -> bool {
        self.mode() == TlsMode::Required && (self.nbd_tls_psk.is_some() || self.verifies_clients())
    }

    /// Reads the files of credentials; `None` without TLS.
    ///
    /// # Errors
    /// If settings contradict each other or a file is invalid; the message says what to do.
    pub(super) fn load(&self) -> Result<Option<NbdServerTls>, Failure> {
        let wrong = |what: &str| Err(Failure::request(format!("TLS of NBD: {what}")));
        let mode = self.mode();
        let uses_psk = self.nbd_tls_psk.is_some();
        let has_subjects = !self.nbd_tls_subject.is_empty();
        match (uses_psk, self.nbd_tls_certificates.is_empty()) {
            (true, false) => {
                return wrong("nbd_tls_psk and nbd_tls_certificates exclude each other; remove one");
            }
            (false, true) if mode != TlsMode::Off || has_subjects || self.nbd_tls_verify_peer.is_some() => {
                return wrong(
                    "there are no credentials; add nbd_tls_certificates = \"DIR\" or nbd_tls_psk = \"FILE\"",
                );
            }
            _ => {}
        }
        if has_subjects && (uses_psk || !self.verifies_clients()) {
            return wrong(
                "nbd_tls_subject requires client certificates; remove it, or remove nbd_tls_psk or \
                 nbd_tls_verify_peer = false",
            );
        }
        if mode == TlsMode::Off {
            return Ok(None);
        }
        if has_subjects && mode == TlsMode::Optional {
            return wrong("nbd_tls_subject has no effect with nbd_tls = \"on\"; set nbd_tls = \"require\"");
        }
        certificates::check_subjects("nbd_tls_subject", &self.nbd_tls_subject)?;
        let credentials = match &self.nbd_tls_psk {
            Some(file) => server_keys(file)?,
            None => ServerCredentials::Certificates(certificates::of_server(
                &self.nbd_tls_certificates,
                self.verifies_clients(),
            )?),
        };
        let subjects = has_subjects.then(|| Arc::new(self.nbd_tls_subject.iter().cloned().collect()));
        let policy = NbdTls { mode, subjects };
        Ok(Some(NbdServerTls { credentials, policy, ktls: self.nbd_ktls.unwrap_or(true) }))
    }

    /// The TLS part of URLs for clients on this machine.
    pub(super) fn of_client(&self) -> UriTls {
        let credentials = match &self.nbd_tls_psk {
            Some(file) => TlsFiles::Psk { file: file.clone(), username: first_user(file) },
            None => TlsFiles::Certificates(self.nbd_tls_certificates.first().map(|own| {
                let is_usable = !self.verifies_clients() || own.join("client-cert.pem").exists();
                if is_usable { own.clone() } else { CLIENT_DIRECTORY.into() }
            })),
        };
        UriTls { credentials, hostname: None, verify_peer: true, ktls: true }
    }

    /// Makes all paths absolute.
    pub(super) fn make_absolute(&mut self) {
        for path in self.nbd_tls_certificates.iter_mut().chain(&mut self.nbd_tls_psk) {
            *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone());
        }
    }
}

/// The TLS part of URLs for clients on other machines: their files have other paths.
pub(super) fn of_other_machine(own: UriTls) -> UriTls {
    let credentials = match own.credentials {
        TlsFiles::Psk { username, .. } => TlsFiles::Psk { file: CLIENT_KEYS.into(), username },
        TlsFiles::Certificates(own) => TlsFiles::Certificates(own.map(|_| CLIENT_DIRECTORY.into())),
    };
    UriTls { credentials, ..own }
}

/// Stands for the client's directory of certificates if the server's has none for a client, or the
/// client is on another machine.
pub(super) const CLIENT_DIRECTORY: &str = "CLIENT_CERTIFICATES";
/// Stands for the file of keys of a client on another machine.
pub(super) const CLIENT_KEYS: &str = "CLIENT_KEYS/keys.psk";

/// The first user in a file of pre-shared keys.
fn first_user(file: &Path) -> Option<String> {
    let keys = read_keys(file).ok()?;
    let first = keys.iter().next()?;
    String::from_utf8(first.identity.clone()).ok()
}

fn server_keys(file: &Path) -> Result<ServerCredentials, Failure> {
    let keys = read_keys(file)?;
    Ok(ServerCredentials::Psks(Arc::new(move |user| keys.find(user).cloned())))
}

/// TLS for connections to the server of a URL; `None` if the URL requests none.
pub(super) fn of_uri(uri: &NbdUri) -> Result<Option<ClientTls>, Failure> {
    let Some(tls) = &uri.tls else { return Ok(None) };
    let credentials = match &tls.credentials {
        TlsFiles::Psk { file, username } => {
            ClientCredentials::Psks([client_key(file, username.as_deref())?].into())
        }
        TlsFiles::Certificates(directory) => {
            let host = match (&tls.hostname, &uri.server) {
                (Some(hostname), _) => hostname,
                (None, NbdServer::Tcp((host, _))) => host,
                (None, NbdServer::Unix(_)) => OF_UNIX_SOCKETS,
            };
            ClientCredentials::Certificates(certificates::of_client(
                directory.as_deref(),
                host,
                tls.verify_peer,
            )?)
        }
    };
    Ok(Some(ClientTls { credentials, ktls: tls.ktls, is_on_demand: true }))
}

/// The key of a user in a file of pre-shared keys.
fn client_key(file: &Path, username: Option<&str>) -> Result<Psk, Failure> {
    let keys = read_keys(file)?;
    let wrong = |what: String| Failure::request(format!("TLS key file {}: {what}", file.display()));
    let user = match (username, keys.iter().len()) {
        (Some(user), _) => user.to_owned(),
        (None, 1) => return keys.iter().next().cloned().ok_or_else(|| wrong("has no key".to_owned())),
        // The NBD URI specification defines the local user's name as the default.
        (None, _) => ["LOGNAME", "USER"].iter().find_map(|name| env::var(name).ok()).unwrap_or_default(),
    };
    let key = keys.find(user.as_bytes()).cloned();
    key.ok_or_else(|| {
        wrong(format!("has no key for user {user:?}; give the user as nbds://USER@host/export"))
    })
}

fn read_keys(file: &Path) -> Result<PskFile, Failure> {
    secret::read_all("TLS key file", file, PskFile::parse)
}

/// The host name in the certificate of a server at a Unix socket.
const OF_UNIX_SOCKETS: &str = "localhost";

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> TlsSettings {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn credentials_require_tls_by_default() {
        for (text, mode, is_restricted) in [
            ("", TlsMode::Off, false),
            ("nbd_tls_psk = 'k'", TlsMode::Required, true),
            ("nbd_tls_psk = 'k'\nnbd_tls = 'on'", TlsMode::Optional, false),
            ("nbd_tls_psk = 'k'\nnbd_tls = 'off'", TlsMode::Off, false),
            ("nbd_tls_certificates = ['d']", TlsMode::Required, true),
            ("nbd_tls_certificates = ['d']\nnbd_tls_verify_peer = false", TlsMode::Required, false),
            ("nbd_tls_certificates = ['d']\nnbd_tls = 'require'", TlsMode::Required, true),
        ] {
            let settings = settings(text);
            assert_eq!((settings.mode(), settings.is_restricted()), (mode, is_restricted), "{text}");
            assert_eq!(settings.is_set(), !text.is_empty());
        }
    }

    #[test]
    fn urls_for_other_machines_name_no_file_of_this_one() {
        for (text, expected) in [
            ("nbd_tls_certificates = ['/etc/server']\nnbd_tls_verify_peer = false", CLIENT_DIRECTORY),
            ("nbd_tls_psk = '/etc/server/keys.psk'", CLIENT_KEYS),
        ] {
            let files = |tls: UriTls| match tls.credentials {
                TlsFiles::Psk { file, .. } => file,
                TlsFiles::Certificates(directory) => directory.unwrap(),
            };
            let own = settings(text).of_client();
            assert!(files(own.clone()).starts_with("/etc/server"), "{text}");
            assert_eq!(files(of_other_machine(own)), Path::new(expected));
        }
    }

    #[test]
    fn contradictory_settings_are_refused_with_advice() {
        for (text, expected) in [
            ("nbd_tls = 'require'", "there are no credentials; add nbd_tls_certificates"),
            ("nbd_tls_subject = ['CN=a']", "there are no credentials"),
            ("nbd_tls_psk = 'k'\nnbd_tls_certificates = ['d']", "exclude each other"),
            ("nbd_tls_psk = 'k'\nnbd_tls_subject = ['CN=a']", "requires client certificates"),
            (
                "nbd_tls_certificates = ['d']\nnbd_tls_verify_peer = false\nnbd_tls_subject = ['CN=a']",
                "requires client certificates",
            ),
            (
                "nbd_tls = 'on'\nnbd_tls_certificates = ['d']\nnbd_tls_subject = ['CN=a']",
                "has no effect with nbd_tls = \"on\"",
            ),
            (
                "nbd_tls_certificates = ['d']\nnbd_tls_subject = ['cn = a']",
                "nbd_tls_subject: `cn = a` matches no certificate; write `CN=a`",
            ),
            ("nbd_tls_psk = '/does/not/exist'", "TLS key file /does/not/exist: "),
            (
                "nbd_tls_certificates = ['/does/not/exist']",
                "TLS certificate /does/not/exist/server-cert.pem: ",
            ),
        ] {
            let error = settings(text).load().map(drop).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(settings("nbd_tls = 'off'").load().unwrap().is_none());
    }

    #[test]
    fn the_command_line_has_priority() {
        let mut said = settings("nbd_tls = 'on'\nnbd_tls_psk = 'own'");
        let written = settings("nbd_tls = 'off'\nnbd_tls_certificates = ['d']\nnbd_ktls = false");
        said.add(written, Path::new("/etc"));
        assert_eq!((said.mode(), said.nbd_ktls), (TlsMode::Optional, Some(false)));
        assert_eq!(said.nbd_tls_psk.as_deref(), Some(Path::new("own")));
        assert!(said.nbd_tls_certificates.is_empty());
        let mut said = TlsSettings::default();
        said.add(settings("nbd_tls_certificates = ['d']"), Path::new("/etc"));
        assert_eq!(said.nbd_tls_certificates, [Path::new("/etc/d")]);
    }
}
