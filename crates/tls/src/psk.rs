//! Pre-shared keys (RFC 8446 §4.2.11), which are for TLS 1.3 only.

use super::{TlsError, builder, hello, ours, shown};
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
    /// What both sides call it; everybody sees that.
    pub identity: Vec<u8>,
    /// The key, of at least 16 bytes.
    pub secret: Zeroizing<Vec<u8>>,
    /// The hash function of its cipher suite.
    pub hash: Hash,
}

/// A hash function, and with it a cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// `TLS_AES_128_GCM_SHA256`.
    Sha256,
    /// `TLS_AES_256_GCM_SHA384`.
    Sha384,
}

/// Finds a server's key by its identity.
pub type Lookup = Arc<dyn Fn(&[u8]) -> Option<Psk> + Send + Sync>;

/// What a client has offered to a server.
pub(crate) struct Offer {
    lookup: Lookup,
    /// The identity of the first key, for messages.
    pub(crate) first: Option<String>,
    /// The identity of the first key that is known.
    pub(crate) known: Option<String>,
}

impl Offer {
    pub(crate) fn new(lookup: &Lookup) -> Offer {
        Offer { lookup: lookup.clone(), first: None, known: None }
    }
}

/// Takes the keys that a client offers and that are known.
struct TakeOffer;

impl ClientHelloCallback for TakeOffer {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let message = connection.client_hello()?.raw_message()?;
        let offered = hello::identities(&message);
        let Some(offer) = connection.application_context_mut::<Offer>() else { return Ok(None) };
        offer.first = offered.first().map(|identity| shown(identity));
        let known: Vec<Psk> = offered.iter().filter_map(|identity| (offer.lookup)(identity)).collect();
        offer.known = known.first().map(|key| shown(&key.identity));
        for key in &known {
            let key = library_psk(key).map_err(|error| Error::application(Box::new(error)))?;
            connection.append_psk(&key)?;
        }
        Ok(None)
    }
}

/// The configuration of every client with pre-shared keys.
pub(crate) fn client_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    CONFIG.get_or_init(|| builder(POLICY)?.build().map_err(|error| ours(&error))).clone()
}

/// The configuration of every server with pre-shared keys.
pub(crate) fn server_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = || {
        let mut builder = builder(POLICY)?;
        builder.set_client_hello_callback(TakeOffer).map_err(|error| ours(&error))?;
        builder.build().map_err(|error| ours(&error))
    };
    CONFIG.get_or_init(make).clone()
}

/// The identity of the key that both sides have, if they agreed on one.
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
    make().map_err(|error| ours(&error))
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk {}", shown(&self.identity))
    }
}

/// TLS 1.3 alone, with the elliptic curves that everybody has.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";
