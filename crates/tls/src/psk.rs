//! Pre-shared keys (RFC 8446 §4.2.11), which are for TLS 1.3 only.

use super::{TlsError, builder, escaped, hello, internal};
use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::PskHmac;
use s2n_tls::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use zeroize::Zeroizing;

/// A pre-shared key.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    /// The identity, which both sides know; it is sent unencrypted.
    pub identity: Vec<u8>,
    /// The key; it has at least 16 bytes.
    pub secret: Zeroizing<Vec<u8>>,
    /// Hash function of the key's cipher suite.
    pub hash: Hash,
}

/// A hash function and the cipher suite that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// `TLS_AES_128_GCM_SHA256`.
    Sha256,
    /// `TLS_AES_256_GCM_SHA384`.
    Sha384,
}

/// Finds a server's key by its identity.
pub type Lookup = Arc<dyn Fn(&[u8]) -> Option<Psk> + Send + Sync>;

/// Says what may explain that the key of an identity was refused, for the server's log.
pub type Explain = Arc<dyn Fn(&[u8]) -> String + Send + Sync>;

/// A server's lookup and the identities that the client offered, for messages.
pub(crate) struct OfferedKeys {
    lookup: Lookup,
    explain: Option<Explain>,
    /// The first identity offered.
    pub(crate) first: Option<Vec<u8>>,
    /// The first identity that the server knows.
    pub(crate) known: Option<Vec<u8>>,
}

impl OfferedKeys {
    pub(crate) fn new(lookup: &Lookup, explain: Option<&Explain>) -> OfferedKeys {
        OfferedKeys { lookup: lookup.clone(), explain: explain.cloned(), first: None, known: None }
    }

    /// An identity whose key was refused, and what may explain it.
    pub(crate) fn refused(&self, identity: &[u8]) -> String {
        let name = escaped(identity);
        match &self.explain {
            Some(explain) => format!("{name}: {}", explain(identity)),
            None => name,
        }
    }
}

/// Adds the known keys among those that a client offers.
struct SelectOfferedKeys;

impl ClientHelloCallback for SelectOfferedKeys {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let message = connection.client_hello()?.raw_message()?;
        let offered = hello::identities(&message);
        let Some(offer) = connection.application_context_mut::<OfferedKeys>() else { return Ok(None) };
        offer.first = offered.first().map(|identity| identity.to_vec());
        let known: Vec<Psk> = offered.iter().filter_map(|identity| (offer.lookup)(identity)).collect();
        offer.known = known.first().map(|key| key.identity.clone());
        for key in &known {
            let key = library_psk(key).map_err(|error| Error::application(Box::new(error)))?;
            connection.append_psk(&key)?;
        }
        Ok(None)
    }
}

/// The configuration of a client with these pre-shared keys. A server of OpenSSL chooses the cipher
/// suite before the key, by the client's preference, and passes over keys of another suite.
pub(crate) fn client_config(keys: &[Psk]) -> Result<Config, TlsError> {
    static ANY: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    static ONLY_SHA_384: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = |policy| builder(policy)?.build().map_err(|error| internal(&error));
    match keys.iter().all(|key| key.hash == Hash::Sha384) {
        true => ONLY_SHA_384.get_or_init(|| make(POLICY_SHA_384)).clone(),
        false => ANY.get_or_init(|| make(POLICY)).clone(),
    }
}

/// The configuration of every server with pre-shared keys.
pub(crate) fn server_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = || {
        let mut builder = builder(POLICY)?;
        builder.set_client_hello_callback(SelectOfferedKeys).map_err(|error| internal(&error))?;
        builder.build().map_err(|error| internal(&error))
    };
    CONFIG.get_or_init(make).clone()
}

/// The identity of the negotiated key, if any.
pub(crate) fn negotiated(connection: &Connection) -> Option<Vec<u8>> {
    let len = connection.negotiated_psk_identity_length().unwrap_or(0);
    let mut identity = vec![0; len];
    (len > 0 && connection.negotiated_psk_identity(&mut identity).is_ok()).then_some(identity)
}

pub(crate) fn library_psk(key: &Psk) -> Result<s2n_tls::psk::Psk, TlsError> {
    let make = || {
        let mut psk = s2n_tls::psk::Psk::builder()?;
        let hmac = match key.hash {
            Hash::Sha256 => PskHmac::SHA256,
            Hash::Sha384 => PskHmac::SHA384,
        };
        psk.set_identity(&key.identity)?.set_secret(&key.secret)?.set_hmac(hmac)?;
        psk.build()
    };
    make().map_err(|error| internal(&error))
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk {}", escaped(&self.identity))
    }
}

/// A policy of the library: TLS 1.3 only, with the common elliptic curves.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";
/// A policy of the library: TLS 1.3 with `TLS_AES_256_GCM_SHA384` and the curve P-384 only.
const POLICY_SHA_384: &str = "20250414";
