//! Certificates (X.509): what each side shows, and how it checks the peer's.
//!
//! The library checks a chain up to a trusted authority, its time and its intended use. A client
//! also checks that the certificate is for the host that it meant to reach ([`ExpectedHost`]). The
//! subject of a peer's certificate is given as RFC 4514 writes it, for allow-lists and logs.

use super::{TlsError, builder, ours, pipe};
use s2n_tls::callbacks::VerifyHostNameCallback;
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{ClientAuthType, Mode};
use s2n_tls::error::Error;
use std::fmt;
use std::net::IpAddr;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use zeroize::Zeroizing;

/// A certificate, those of the authorities between it and the trusted one, and its private key, in
/// PEM.
pub struct CertifiedKey {
    /// The certificate first.
    pub chain: Vec<u8>,
    /// The private key.
    pub key: Zeroizing<Vec<u8>>,
}

/// Whose signature a client accepts under the server's certificate.
pub enum Trust {
    /// The authorities that this system trusts.
    System,
    /// These authorities, in PEM.
    Authorities(Vec<u8>),
    /// Anybody's: the server is not authenticated at all.
    Anybody,
}

/// A server's certificates; a clone is another handle.
#[derive(Clone)]
pub struct ServerCertificates(Config);

/// A client's trust and certificate; a clone is another handle.
#[derive(Clone)]
pub struct ClientCertificates {
    config: Config,
    /// For the extension `server_name`, which has no addresses (RFC 6066 §3).
    server_name: Option<String>,
}

impl ServerCertificates {
    /// A server that shows `own`. With several, the client's `server_name` chooses, and the first
    /// is for those that name no host. With `client_authorities`, each client must show a
    /// certificate that one of them has signed; they are in PEM.
    ///
    /// # Errors
    /// If a certificate or key cannot be used.
    pub fn new(
        own: &[CertifiedKey],
        client_authorities: Option<&[u8]>,
    ) -> Result<ServerCertificates, TlsError> {
        let mut builder = builder(POLICY)?;
        let chains = own.iter().map(chain).collect::<Result<Vec<_>, _>>()?;
        let default = chains.first().cloned();
        for chain in chains {
            builder.load_chain(chain).map_err(|error| unusable(&error))?;
        }
        builder.set_default_chains(default).map_err(|error| unusable(&error))?;
        if let Some(authorities) = client_authorities {
            builder.trust_pem(authorities).map_err(|error| unusable(&error))?;
            builder
                .set_client_auth_type(ClientAuthType::Required)
                .and_then(|builder| builder.set_verify_host_callback(AnyName))
                .map_err(|error| ours(&error))?;
        }
        Ok(ServerCertificates(builder.build().map_err(|error| unusable(&error))?))
    }

    pub(crate) fn config(&self) -> Config {
        self.0.clone()
    }
}

impl ClientCertificates {
    /// A client of the server that is called `host`, a DNS name or an IP address. It shows `own` if
    /// the server asks for a certificate.
    ///
    /// # Errors
    /// If a certificate or key cannot be used.
    pub fn new(
        trust: &Trust,
        own: Option<&CertifiedKey>,
        host: &str,
    ) -> Result<ClientCertificates, TlsError> {
        let mut builder = builder(POLICY)?;
        match trust {
            Trust::System => builder.with_system_certs(true).map_err(|error| ours(&error))?,
            Trust::Authorities(pem) => builder.trust_pem(pem).map_err(|error| unusable(&error))?,
            Trust::Anybody => pipe::disable_verification(&mut builder).map_err(|error| ours(&error))?,
        };
        let expected = ExpectedHost::new(host);
        let server_name = match &expected {
            ExpectedHost::Name(name) => Some(name.clone()),
            ExpectedHost::Address(_) => None,
        };
        builder.set_verify_host_callback(expected).map_err(|error| ours(&error))?;
        if let Some(own) = own {
            builder.load_chain(chain(own)?).map_err(|error| unusable(&error))?;
            builder.set_client_auth_type(ClientAuthType::Optional).map_err(|error| ours(&error))?;
        }
        Ok(ClientCertificates { config: builder.build().map_err(|error| unusable(&error))?, server_name })
    }

    pub(crate) fn config(&self) -> Config {
        self.config.clone()
    }

    pub(crate) fn server_name(&self) -> Option<&str> {
        self.server_name.as_deref()
    }
}

impl fmt::Debug for ClientCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificates").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

/// The host that a client meant to reach.
#[derive(Debug, PartialEq, Eq)]
enum ExpectedHost {
    /// In lower case, without a dot at its end.
    Name(String),
    Address(IpAddr),
}

impl ExpectedHost {
    fn new(host: &str) -> ExpectedHost {
        // A link-local address may have a zone, of which no certificate knows.
        let address = host.split_once('%').map_or(host, |(address, _)| address);
        match address.parse() {
            Ok(address) => ExpectedHost::Address(address),
            Err(_) => ExpectedHost::Name(host.trim_end_matches('.').to_ascii_lowercase()),
        }
    }
}

impl VerifyHostNameCallback for ExpectedHost {
    /// Is asked for each name of the certificate. A `*` stands for one whole label, the first (RFC
    /// 6125 §6.4.3).
    fn verify_host_name(&self, name: &str) -> bool {
        match self {
            ExpectedHost::Address(address) => name.parse() == Ok(*address),
            ExpectedHost::Name(expected) => match name.strip_prefix("*.") {
                None => name.eq_ignore_ascii_case(expected),
                Some(parent) => expected.split_once('.').is_some_and(|(label, rest)| {
                    !label.is_empty() && parent.contains('.') && rest.eq_ignore_ascii_case(parent)
                }),
            },
        }
    }
}

/// A server does not care which host a client's certificate is for.
struct AnyName;

impl VerifyHostNameCallback for AnyName {
    fn verify_host_name(&self, _name: &str) -> bool {
        true
    }
}

fn chain(own: &CertifiedKey) -> Result<s2n_tls::cert_chain::CertificateChain<'static>, TlsError> {
    let mut builder = s2n_tls::cert_chain::Builder::new().map_err(|error| ours(&error))?;
    builder.load_pem(&own.chain, &own.key).map_err(|error| unusable(&error))?;
    builder.build().map_err(|error| unusable(&error))
}

/// The subject of the peer's certificate, if it has shown one.
///
/// # Errors
/// If the certificate cannot be read.
pub(crate) fn subject(connection: &Connection, mode: Mode) -> Result<Option<String>, TlsError> {
    if mode == Mode::Server && !connection.client_cert_used() {
        return Ok(None);
    }
    const UNREADABLE: TlsError = TlsError::Certificate("it cannot be read");
    let Ok(chain) = connection.peer_cert_chain() else {
        // Without verification the library keeps no chain.
        return Ok(None);
    };
    let first = chain.iter().next().ok_or(UNREADABLE)?.map_err(|_| UNREADABLE)?;
    let certificate = first.der().map_err(|_| UNREADABLE)?;
    let certificate = Certificate::from_der(certificate).map_err(|_| UNREADABLE)?;
    Ok(Some(certificate.tbs_certificate().subject().to_string()))
}

/// What the library's error of that name says of the peer's certificate, if it is about that.
pub(crate) fn refusal(name: &str) -> Option<TlsError> {
    Some(TlsError::Certificate(match name {
        "S2N_ERR_MISSING_CLIENT_CERT" | "S2N_ERR_NO_CERT_FOUND" => return Some(TlsError::NoCertificate),
        "S2N_ERR_CERT_UNTRUSTED" => "no authority that is trusted here has signed it",
        "S2N_ERR_CERT_INVALID_HOSTNAME" => "it is for another host name",
        "S2N_ERR_CERT_REVOKED" => "it was revoked",
        "S2N_ERR_CERT_NOT_YET_VALID" => "it is not valid yet; check the clocks",
        "S2N_ERR_CERT_EXPIRED" => "it has expired",
        "S2N_ERR_CERT_TYPE_UNSUPPORTED" => "its kind of key is not supported",
        "S2N_ERR_CERT_MAX_CHAIN_DEPTH_EXCEEDED" => "its chain is too long",
        "S2N_ERR_CERT_INTENT_INVALID" => "it is not for this use (extended key usage)",
        "S2N_ERR_CERT_INVALID"
        | "S2N_ERR_CERT_REJECTED"
        | "S2N_ERR_CERT_UNHANDLED_CRITICAL_EXTENSION"
        | "S2N_ERR_DECODE_CERTIFICATE"
        | "S2N_ERR_SECURITY_POLICY_INCOMPATIBLE_CERT" => "it is malformed or of a kind that is not accepted",
        _ => return None,
    }))
}

/// Our own files cannot be used.
fn unusable(error: &Error) -> TlsError {
    TlsError::Credentials(match error.name() {
        "S2N_ERR_KEY_MISMATCH" => "the private key belongs to another certificate",
        "S2N_ERR_INVALID_PEM" | "S2N_ERR_NO_CERTIFICATE_IN_PEM" | "S2N_ERR_DECODE_CERTIFICATE" => {
            "a file is no certificate or key in PEM"
        }
        "S2N_ERR_DECODE_PRIVATE_KEY" => {
            "the private key cannot be read; it must be in PEM, without a password"
        }
        _ => error.message(),
    })
}

/// TLS 1.3, and 1.2 for peers without it (proto.md, "TLS versions", asks for 1.2).
const POLICY: &str = "20240503";

#[cfg(test)]
mod tests;
