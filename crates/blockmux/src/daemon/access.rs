//! What clients of the API over TCP need: a token, a certificate, or both.

use crate::access::{certificates, secret};
use crate::cli::ctl::api_token;
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::address::{ApiListener, is_local};
use blockmux_engine::carrier::tls::{ServerCertificates, TlsPeer};
use blockmux_engine::net::socket::Address;
use std::collections::BTreeSet;
use std::path::PathBuf;
use zeroize::Zeroizing;

/// Settings of the API over TCP; the config file has the same names.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ApiAccess {
    /// File with the token of --api's clients
    #[arg(long, value_name = "FILE")]
    pub(super) api_token_file: Option<PathBuf>,
    /// Serve the API over https: directory with server-cert.pem and server-key.pem, and with
    /// ca-cert.pem for client certificates, which replace the token
    #[arg(long = "api-tls-certs", alias = "api-tls-certificates", value_name = "DIR")]
    pub(super) api_tls_certificates: Option<PathBuf>,
    /// Allow only API clients whose certificate has this subject, as CN=admin; repeatable
    #[arg(long, value_name = "DN")]
    pub(super) api_tls_subject: Vec<String>,
}

/// The credentials of the API over TCP. Two are equal if clients need the same.
#[derive(PartialEq)]
pub(super) struct RequiredCredentials {
    /// The bearer token (RFC 6750) that each request must have.
    pub(super) token: Option<Zeroizing<String>>,
    pub(super) tls: Option<RequiredTls>,
}

/// TLS of the API.
#[derive(PartialEq)]
pub(super) struct RequiredTls {
    pub(super) certificates: ServerCertificates,
    /// The subjects of the certificates of clients, if not all are allowed.
    subjects: Option<BTreeSet<String>>,
}

/// The address of the API over TCP.
///
/// # Errors
/// If it is not an address of TCP, or its name cannot be resolved.
pub(super) fn tcp_address(listener: &ApiListener) -> Result<Address, Failure> {
    match listener.address.resolve(DEFAULT_PORT)? {
        ListenerAddress::Socket(address @ Address::Tcp(_)) => Ok(address),
        _ => Err(Failure::request("--api: write host:port; --control takes unix:PATH")),
    }
}

/// What to warn of if machines that are not named can connect without encryption.
pub(super) fn plain_warning(listener: &ApiListener, credentials: &RequiredCredentials) -> Option<String> {
    let address = tcp_address(listener).ok()?;
    let is_open = credentials.tls.is_none() && !is_local(&address) && listener.networks.is_everyone();
    is_open.then(|| {
        format!(
            "{address}: the API and its token are not encrypted; add --api-tls-certs, or make it reachable from \
             trusted networks only"
        )
    })
}

impl ApiAccess {
    /// Adds the settings of the config file; those of the command line have priority.
    pub(super) fn or(self, written: ApiAccess) -> ApiAccess {
        let has_subjects = !self.api_tls_subject.is_empty();
        ApiAccess {
            api_token_file: self.api_token_file.or(written.api_token_file),
            api_tls_certificates: self.api_tls_certificates.or(written.api_tls_certificates),
            api_tls_subject: if has_subjects { self.api_tls_subject } else { written.api_tls_subject },
        }
    }

    /// Checks that no setting is given without a TCP address of the API.
    ///
    /// # Errors
    /// If one is; the message says what to write.
    pub(super) fn check_unused(&self) -> Result<(), Failure> {
        let ApiAccess { api_token_file, api_tls_certificates, api_tls_subject } = self;
        let given = [
            (TOKEN_FILE, api_token_file.is_some()),
            (TLS_CERTIFICATES, api_tls_certificates.is_some()),
            (TLS_SUBJECT, !api_tls_subject.is_empty()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((key, _)) => Err(Failure::request(format!(
                "{key} has no effect, because the API is not served over TCP; add api = \"HOST:PORT\", or remove {key}"
            ))),
        }
    }

    /// Reads the token and the certificates.
    ///
    /// # Errors
    /// If clients would need neither, or a file cannot be used.
    pub(super) fn load(&self) -> Result<RequiredCredentials, Failure> {
        let token = self.api_token_file.as_deref();
        let token = token.map(|file| secret::read("--api-token-file", file, api_token)).transpose()?;
        let has_subjects = !self.api_tls_subject.is_empty();
        let Some(directory) = &self.api_tls_certificates else {
            if has_subjects {
                return Err(Failure::request(
                    "api_tls_subject requires https; add api_tls_certificates = \"DIR\"",
                ));
            }
            if token.is_none() {
                return Err(Failure::request(WITHOUT_CREDENTIALS));
            }
            return Ok(RequiredCredentials { token, tls: None });
        };
        certificates::check_subjects("api_tls_subject", &self.api_tls_subject)?;
        let verifies_clients = token.is_none() || has_subjects;
        let certificates = certificates::of_server(std::slice::from_ref(directory), verifies_clients);
        let certificates =
            certificates.map_err(|failure| Failure::request(format!("api_tls_certificates: {failure}")))?;
        let subjects = has_subjects.then(|| self.api_tls_subject.iter().cloned().collect());
        Ok(RequiredCredentials { token, tls: Some(RequiredTls { certificates, subjects }) })
    }
}

impl RequiredCredentials {
    /// The keys of the config whose files have another content than those of `before`.
    pub(super) fn renewed_files(&self, before: &RequiredCredentials) -> Vec<&'static str> {
        let certificates = |own: &RequiredCredentials| own.tls.as_ref().map(|tls| tls.certificates.clone());
        let renewed = [
            (TOKEN_FILE, self.token != before.token),
            (TLS_CERTIFICATES, certificates(self) != certificates(before)),
        ];
        renewed.into_iter().filter(|(_, is_renewed)| *is_renewed).map(|(key, _)| key).collect()
    }
}

impl RequiredTls {
    /// Why a client may send no request; `None` if it may.
    pub(super) fn refusal(&self, peer: &TlsPeer) -> Option<String> {
        let subjects = self.subjects.as_ref()?;
        match peer {
            TlsPeer::Certificate(subject) if subjects.contains(subject) => None,
            TlsPeer::Certificate(subject) => {
                Some(format!("the API does not allow the certificate `{subject}`; add it to api_tls_subject"))
            }
            _ => Some("the API requires a certificate; send one".to_owned()),
        }
    }
}

/// The keys of [`ApiAccess`] in a config file.
pub(super) const ACCESS_KEYS: [&str; 3] = [TOKEN_FILE, TLS_CERTIFICATES, TLS_SUBJECT];
const TOKEN_FILE: &str = "api_token_file";
const TLS_CERTIFICATES: &str = "api_tls_certificates";
const TLS_SUBJECT: &str = "api_tls_subject";

/// Default port of `--api`.
const DEFAULT_PORT: u16 = 9810;
const WITHOUT_CREDENTIALS: &str = "--api: without a token, every client that can connect could control this daemon; run \
    `(umask 077; openssl rand -hex 32 > api.token)` and add --api-token-file api.token, or add --api-tls-certs for \
    client certificates";

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn clients_need_a_token_or_a_certificate() {
        let load = |access: ApiAccess| access.load().map(drop).unwrap_err().to_string();
        assert!(load(ApiAccess::default()).contains("without a token, every client that can connect"));
        let subject = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        assert!(load(subject).contains("api_tls_subject requires https; add api_tls_certificates"));
        for (subject, expected) in [
            ("", "api_tls_subject: `` is not a subject of a certificate; write it as in RFC 4514"),
            ("admin", "is not a subject of a certificate; write it as in RFC 4514, such as CN=NAME"),
            ("cn = admin", "api_tls_subject: `cn = admin` matches no certificate; write `CN=admin`"),
        ] {
            let said = load(ApiAccess {
                api_tls_certificates: Some("/nowhere".into()),
                api_tls_subject: vec!["CN=a".to_owned(), subject.to_owned()],
                ..ApiAccess::default()
            });
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn an_open_listener_without_encryption_is_warned_of() {
        let plain = RequiredCredentials { token: Some(Zeroizing::new("t".to_owned())), tls: None };
        let warned = |listener: &str| plain_warning(&listener.parse().unwrap(), &plain);
        assert!(warned("0.0.0.0:9810").unwrap().starts_with("0.0.0.0:9810: the API and its token"));
        assert_eq!((warned("127.0.0.1:9810"), warned("0.0.0.0:9810?allow=192.0.2.0/24")), (None, None));
    }

    #[test]
    fn settings_without_a_tcp_address_are_refused() {
        let refused = |access: ApiAccess| access.check_unused().unwrap_err().to_string();
        let token = ApiAccess { api_token_file: Some("t".into()), ..ApiAccess::default() };
        let certificates = ApiAccess { api_tls_certificates: Some("d".into()), ..ApiAccess::default() };
        let subject = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        for (access, key) in
            [(token, "api_token_file"), (certificates, "api_tls_certificates"), (subject, "api_tls_subject")]
        {
            let said = refused(access);
            assert!(
                said.starts_with(&format!("{key} has no effect")) && said.contains("add api = "),
                "{said}"
            );
        }
        ApiAccess::default().check_unused().unwrap();
    }

    #[test]
    fn the_command_line_has_priority() {
        let said = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        let written = ApiAccess {
            api_token_file: Some("t".into()),
            api_tls_certificates: Some("d".into()),
            api_tls_subject: vec!["CN=b".to_owned()],
        };
        let both = said.or(written);
        assert_eq!(both.api_tls_subject, ["CN=a"]);
        assert_eq!(both.api_tls_certificates.as_deref(), Some(Path::new("d")));
    }
}
