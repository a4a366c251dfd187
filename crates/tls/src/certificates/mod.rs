//! Certificates (X.509): ours, and the checks of the peer's.
//!
//! The library checks a chain up to a trusted authority, its validity period and its extended key
//! usage. A client also checks that the certificate is for the intended host ([`ExpectedHost`]).
//! The subject of a peer's certificate, as in RFC 4514, serves allow-lists and logs.

use super::{TlsError, builder, internal, pipe};
use aws_lc_rs::digest::{Context, SHA256};
use s2n_tls::callbacks::VerifyHostNameCallback;
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{ClientAuthType, Mode};
use s2n_tls::error::Error;
use std::fmt;
use std::net::IpAddr;
use x509_cert::Certificate;
use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::der::Decode;
use zeroize::Zeroizing;

/// A certificate, its intermediate certificates and its private key, in PEM.
pub struct CertifiedKey {
    /// The certificate, followed by its intermediate certificates.
    pub chain: Vec<u8>,
    /// The private key.
    pub key: Zeroizing<Vec<u8>>,
}

/// Authorities that a client trusts to sign server certificates.
pub enum Trust {
    /// The authorities that this system trusts.
    System,
    /// These authorities, in PEM.
    Authorities(Vec<u8>),
    /// Any certificate: the server is not authenticated.
    Anybody,
}

/// A server's certificates; a clone is another handle. Two are equal if they were created from the
/// same bytes.
#[derive(Clone)]
pub struct ServerCertificates {
    config: Config,
    /// SHA-256 of what they were created from.
    digest: [u8; 32],
}

/// A client's trust and certificate; a clone is another handle.
#[derive(Clone)]
pub struct ClientCertificates {
    config: Config,
    /// Value of the extension `server_name`, which has no IP addresses (RFC 6066 §3).
    server_name: Option<String>,
}

impl ServerCertificates {
    /// Creates the configuration of a server with the certificates `own`. The client's
    /// `server_name` selects one; the first serves clients that send no name. With
    /// `client_authorities` (PEM), each client must present a certificate that one of them signed.
    ///
    /// # Errors
    /// [`TlsError::Credentials`] if a certificate or key is unusable.
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
                .map_err(|error| internal(&error))?;
        }
        let parts = own.iter().flat_map(|own| [&own.chain[..], &own.key[..]]).chain(client_authorities);
        let digest = digest_of(parts.collect());
        Ok(ServerCertificates { config: builder.build().map_err(|error| unusable(&error))?, digest })
    }

    pub(crate) fn config(&self) -> Config {
        self.config.clone()
    }
}

impl PartialEq for ServerCertificates {
    fn eq(&self, other: &ServerCertificates) -> bool {
        self.digest == other.digest
    }
}

impl ClientCertificates {
    /// Creates the configuration of a client of the server `host`, a DNS name or an IP address. The
    /// client presents `own` if the server requests a certificate.
    ///
    /// # Errors
    /// [`TlsError::Credentials`] if a certificate or key is unusable.
    pub fn new(
        trust: &Trust,
        own: Option<&CertifiedKey>,
        host: &str,
    ) -> Result<ClientCertificates, TlsError> {
        let mut builder = builder(POLICY)?;
        match trust {
            Trust::System => builder.with_system_certs(true).map_err(|error| internal(&error))?,
            Trust::Authorities(pem) => builder.trust_pem(pem).map_err(|error| unusable(&error))?,
            Trust::Anybody => pipe::disable_verification(&mut builder).map_err(|error| internal(&error))?,
        };
        let expected = ExpectedHost::new(host);
        let server_name = match &expected {
            ExpectedHost::Name(name) => Some(name.clone()),
            ExpectedHost::Address(_) => None,
        };
        builder.set_verify_host_callback(expected).map_err(|error| internal(&error))?;
        if let Some(own) = own {
            builder.load_chain(chain(own)?).map_err(|error| unusable(&error))?;
            builder.set_client_auth_type(ClientAuthType::Optional).map_err(|error| internal(&error))?;
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

/// The host that a client connects to.
#[derive(Debug, PartialEq, Eq)]
enum ExpectedHost {
    /// A DNS name in lower case, without a final dot.
    Name(String),
    Address(IpAddr),
}

impl ExpectedHost {
    fn new(host: &str) -> ExpectedHost {
        // A link-local address may have a zone, which certificates never have.
        let address = host.split_once('%').map_or(host, |(address, _)| address);
        match address.parse() {
            Ok(address) => ExpectedHost::Address(address),
            Err(_) => ExpectedHost::Name(host.trim_end_matches('.').to_ascii_lowercase()),
        }
    }
}

impl VerifyHostNameCallback for ExpectedHost {
    /// Compares a name of the certificate; the library calls this for each. A `*` stands for the
    /// whole first label (RFC 6125 §6.4.3).
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

/// A server accepts client certificates for any host.
struct AnyName;

impl VerifyHostNameCallback for AnyName {
    fn verify_host_name(&self, _name: &str) -> bool {
        true
    }
}

fn chain(own: &CertifiedKey) -> Result<s2n_tls::cert_chain::CertificateChain<'static>, TlsError> {
    let mut builder = s2n_tls::cert_chain::Builder::new().map_err(|error| internal(&error))?;
    builder.load_pem(&own.chain, &own.key).map_err(|error| unusable(&error))?;
    builder.build().map_err(|error| unusable(&error))
}

fn digest_of(parts: Vec<&[u8]>) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    context.update(&parts.len().to_be_bytes());
    for part in parts {
        context.update(&part.len().to_be_bytes());
        context.update(part);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

/// Returns the subject of the peer's certificate, if it presented one.
///
/// # Errors
/// [`TlsError::Certificate`] if the certificate cannot be parsed.
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

/// The form in which [`TlsPeer::Certificate`](super::TlsPeer::Certificate) has a subject that is
/// written as in RFC 4514; the types of its attributes may have any case, and spaces around them.
/// `None` if the text is not a subject.
///
/// The order of the attributes stays.
pub fn canonical_subject(text: &str) -> Option<String> {
    let mut canonical = String::with_capacity(text.len());
    for attribute in unescaped_parts(text) {
        let separator = attribute.chars().next().filter(|first| SEPARATORS.contains(first));
        canonical.extend(separator);
        let attribute = &attribute[separator.map_or(0, char::len_utf8)..];
        let (key, value) = attribute.split_once('=')?;
        let (key, value) = (key.trim(), trim_unescaped(value));
        let parse = |text: String| text.parse::<AttributeTypeAndValue>().ok();
        canonical.push_str(&match value.strip_prefix('#') {
            Some(_) => parse(format!("{key}={value}"))?.to_string(),
            None => {
                // An example value of each type, because a type may restrict its values.
                let example = parse(format!("{key}=0"))?.to_string();
                match example.strip_suffix('0').filter(|key| key.ends_with('=')) {
                    Some(key) => {
                        key.to_owned() + parse(format!("CN={value}"))?.to_string().strip_prefix("CN=")?
                    }
                    // A type without a known name has its value in hexadecimal.
                    None => parse(format!("{key}={value}"))?.to_string(),
                }
            }
        });
    }
    (!canonical.is_empty()).then_some(canonical)
}

/// Splits before each separator of attributes that is not escaped.
fn unescaped_parts(text: &str) -> Vec<&str> {
    let (mut parts, mut begin, mut is_escaped) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        if SEPARATORS.contains(&c) && !is_escaped {
            parts.push(&text[begin..at]);
            begin = at;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    parts.push(&text[begin..]);
    parts
}

/// The value without the spaces around it, unless the last one is escaped.
fn trim_unescaped(value: &str) -> &str {
    let trimmed = value.trim_matches(' ');
    let backslashes = trimmed.len() - trimmed.trim_end_matches('\\').len();
    match backslashes % 2 {
        1 => value.trim_start_matches(' ').get(..trimmed.len() + 1).unwrap_or(trimmed),
        _ => trimmed,
    }
}

/// Separators of the attributes of a subject.
const SEPARATORS: [char; 2] = [',', '+'];

/// Translates the name of a library error about the peer's certificate; `None` for other errors.
pub(crate) fn refusal(name: &str) -> Option<TlsError> {
    Some(TlsError::Certificate(match name {
        "S2N_ERR_MISSING_CLIENT_CERT" | "S2N_ERR_NO_CERT_FOUND" => return Some(TlsError::NoCertificate),
        "S2N_ERR_CERT_UNTRUSTED" => "no authority that is trusted here signed it",
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

/// Translates the library's error about our own certificate or key.
fn unusable(error: &Error) -> TlsError {
    TlsError::Credentials(match error.name() {
        "S2N_ERR_KEY_MISMATCH" => "the private key belongs to another certificate",
        "S2N_ERR_INVALID_PEM" | "S2N_ERR_NO_CERTIFICATE_IN_PEM" | "S2N_ERR_DECODE_CERTIFICATE" => {
            "a file is not a certificate or key in PEM"
        }
        "S2N_ERR_DECODE_PRIVATE_KEY" => {
            "the private key cannot be read; it must be in PEM, without a password"
        }
        _ => error.message(),
    })
}

/// A policy of the library: TLS 1.3, and 1.2 for peers without it (proto.md, "TLS versions",
/// requires 1.2).
const POLICY: &str = "20240503";

#[cfg(test)]
mod tests;
