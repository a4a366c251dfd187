//! TLS 1.3 with external pre-shared keys (RFC 8446), without sockets: bytes in and bytes out.
//!
//! ```text
//!   socket ──records──▶ Tls::receive ──plain bytes──▶ session
//!   socket ◀─output──── Tls::send    ◀─plain bytes─── session
//! ```
//! The caller passes the peer's bytes to [`Tls::receive`], sends the bytes of [`Tls::output`], and
//! bounds the time of the handshake; this crate bounds the handshake's memory ([`MAX_HANDSHAKE`]).
//! Pre-shared keys are the only authentication: there are no certificates, no resumption and no
//! early data. Every handshake has a Diffie-Hellman exchange (`psk_dhe_ke`). The cipher suites are
//! `TLS_AES_128_GCM_SHA256` and `TLS_AES_256_GCM_SHA384`; the key's hash function selects one.
//!
//! A server looks up the identities of a client's ClientHello (`hello.rs`) as they arrive, so the
//! number of its keys is not limited. It answers `unknown_psk_identity` if it knows none of them,
//! and `decrypt_error` if the client has a different key of the same identity.
//!
//! Once the handshake is done, [`Tls::export`] can hand the keys to another record layer, such as
//! the kernel's (`keys.rs`). `messages.rs` reads the alerts and handshake messages that the caller
//! receives then.
//!
//! The protocol implementation is s2n-tls, in C (decision 21). Only `pipe.rs`, the interface to it,
//! has unsafe code.

mod alert;
mod hello;
mod keys;
mod messages;
mod pipe;
mod records;

pub use keys::{ExportedKeys, IV_LEN, RecordKeys, TrafficSecret};
pub use messages::{
    ALERT, APPLICATION_DATA, HANDSHAKE, OUR_CLOSE_NOTIFY, OUR_KEY_UPDATE, PostHandshakeAction,
    PostHandshakeMessages,
};
use pipe::Pipe;
pub use records::{HEADER_LEN, MAX_PLAINTEXT, OVERHEAD, Records};
use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::{Builder, Config};
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, PskHmac, SerializationVersion};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::security::Policy;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use zeroize::Zeroizing;

/// One side of a TLS connection.
pub struct Tls {
    pipe: Pipe,
    mode: Mode,
    state: TlsState,
    /// Number of bytes of the peer that the handshake consumed.
    handshake: usize,
    /// Identity of the negotiated key; empty during the handshake.
    identity: Vec<u8>,
}

/// Numbers of bytes that a call of [`Tls::receive`] consumed and returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Bytes of the input that it consumed.
    pub taken: usize,
    /// Plain bytes that it wrote.
    pub given: usize,
}

/// A pre-shared key.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    /// The identity, which both sides know; it crosses the network in the clear.
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

/// Why a TLS connection failed. The message's subject is the peer: write the peer's name before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The server knows none of the identities that the client offered; the value is the first one.
    #[error("offered TLS keys that are unknown here: {0}")]
    UnknownIdentity(String),
    /// The client offered no pre-shared key.
    #[error("offered no TLS key")]
    NoIdentity,
    /// Both sides know a key of this identity, but not the same one.
    #[error("has a TLS key different from ours named {0}")]
    WrongKey(String),
    /// The peer ended the handshake or the connection with an alert.
    #[error("ended TLS with the alert {name}{hint}")]
    Alert {
        /// Name of the alert in RFC 8446 §6.
        name: String,
        /// Likely cause, or empty.
        hint: &'static str,
    },
    /// The peer's first bytes are not TLS, where TLS is required.
    #[error("connected without TLS, which is required here")]
    NotTls,
    /// The peer closed the connection before the handshake was done.
    #[error("closed the connection during the TLS handshake")]
    Disconnected,
    /// The peer's bytes violate TLS; the value says how.
    #[error("violated TLS: {0}")]
    Malformed(&'static str),
    /// The peer sent a record or a handshake message that is unexpected in this state.
    #[error("sent an unexpected TLS message")]
    Unexpected,
    /// A record's authentication failed: it was changed in transit, or protected by another key.
    #[error("sent a TLS record that fails authentication")]
    Unprotected,
    /// A record exceeds the maximum length.
    #[error("sent a TLS record that is too long")]
    TooLong,
    /// The failure is local; the value is the library's message.
    #[error("cannot be reached over TLS: {0}")]
    Internal(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TlsState {
    Handshake,
    Open,
    /// The peer sent close_notify.
    Ended,
    Failed,
}

impl Tls {
    /// Creates a client that offers these keys, in order of preference.
    ///
    /// # Errors
    /// [`TlsError::Internal`] if the library refuses a key.
    pub fn client(keys: &[Psk]) -> Result<Tls, TlsError> {
        let mut connection = connection(Mode::Client, client_config()?)?;
        for key in keys {
            connection.append_psk(&library_psk(key)?).map_err(|error| internal(&error))?;
        }
        Tls::new(connection, Mode::Client)
    }

    /// Creates a server that finds its keys by `lookup`.
    ///
    /// # Errors
    /// [`TlsError::Internal`] if the library fails.
    pub fn server(lookup: &Lookup) -> Result<Tls, TlsError> {
        let mut connection = connection(Mode::Server, server_config()?)?;
        connection.set_application_context(OfferedKeys { lookup: lookup.clone(), first: None, known: None });
        Tls::new(connection, Mode::Server)
    }

    fn new(connection: Connection, mode: Mode) -> Result<Tls, TlsError> {
        let pipe = Pipe::new(connection).map_err(|error| internal(&error))?;
        Ok(Tls { pipe, mode, state: TlsState::Handshake, handshake: 0, identity: Vec::new() })
    }

    /// Whether this is the client's side.
    #[must_use]
    pub fn is_client(&self) -> bool {
        self.mode == Mode::Client
    }

    /// Whether the handshake is done.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, TlsState::Open | TlsState::Ended)
    }

    /// Whether the peer sent close_notify.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == TlsState::Ended
    }

    /// The identity of the negotiated key; empty until the handshake is done.
    #[must_use]
    pub fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// Processes bytes from the peer. A client starts its handshake with an empty `input`. Once the
    /// handshake is done, it decrypts into `plain` until that is full; while `plain` has room, it
    /// consumes all of `input`.
    ///
    /// # Errors
    /// Any [`TlsError`]; the connection is unusable then. [`Tls::output`] holds the alert, if any:
    /// send it before closing.
    pub fn receive(&mut self, input: &[u8], plain: &mut [u8]) -> Result<ReceivedBytes, TlsError> {
        let mut moved = ReceivedBytes::default();
        if self.state == TlsState::Handshake {
            let (result, taken) =
                self.pipe.with_input(input, |connection| match connection.poll_negotiate() {
                    Poll::Ready(result) => result.map(|_| true),
                    Poll::Pending => Ok(false),
                });
            moved.taken = taken;
            self.handshake += taken;
            match result {
                Ok(true) => self.open()?,
                Ok(false) if self.handshake > MAX_HANDSHAKE => {
                    return Err(self.fail(TlsError::Malformed("the handshake is too long")));
                }
                Ok(false) => return Ok(moved),
                Err(error) => return Err(self.reason(&error)),
            }
        }
        while self.state == TlsState::Open && moved.given < plain.len() {
            let (result, taken) = self.pipe.with_input(&input[moved.taken..], |connection| {
                connection.poll_recv(&mut plain[moved.given..])
            });
            moved.taken += taken;
            match result {
                Poll::Ready(Ok(0)) => self.state = TlsState::Ended,
                Poll::Ready(Ok(given)) => moved.given += given,
                Poll::Pending => break,
                Poll::Ready(Err(error)) => return Err(self.reason(&error)),
            }
        }
        Ok(moved)
    }

    /// Encrypts all of `plain` into [`Tls::output`]. Call it only once the handshake is done.
    ///
    /// # Errors
    /// Any [`TlsError`]; the connection is unusable then.
    pub fn send(&mut self, mut plain: &[u8]) -> Result<(), TlsError> {
        while !plain.is_empty() {
            let (result, _) = self.pipe.with_input(&[], |connection| connection.poll_send(plain));
            match result {
                Poll::Ready(Ok(sent)) => plain = &plain[sent..],
                Poll::Ready(Err(error)) => return Err(self.reason(&error)),
                // `send` in pipe.rs accepts everything.
                Poll::Pending => {
                    return Err(self.fail(TlsError::Internal("the library does not accept data to send")));
                }
            }
        }
        Ok(())
    }

    /// Sends close_notify: no data follows.
    pub fn close(&mut self) {
        if self.is_open() {
            // The connection ends either way, so a failure does not matter.
            let _ = self.pipe.with_input(&[], |connection| connection.poll_shutdown_send().is_ready());
        }
    }

    /// Bytes to send to the peer; the caller clears them once sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        self.pipe.output()
    }

    /// Exports the keys to another record layer. This needs a record boundary in both directions
    /// and an empty [`Tls::output`]; otherwise it returns `None` and changes nothing. After an
    /// export only [`Tls::resume`] is allowed.
    pub fn export(&mut self) -> Option<ExportedKeys> {
        if self.state != TlsState::Open || !self.output().is_empty() {
            return None;
        }
        let connection = self.pipe.connection();
        let mut state = vec![0; connection.serialization_length().ok()?];
        connection.serialize(&mut state).ok()?;
        match ExportedKeys::read(state, self.is_client()) {
            Ok(exported) => Some(exported),
            Err(state) => {
                // Another version of the library may serialize in another form, but it reads its
                // own.
                let _ = self.resume_from(&state);
                None
            }
        }
    }

    /// Takes exported keys back, provided that no record was sealed or opened with them.
    ///
    /// # Errors
    /// [`TlsError::Internal`] if the library refuses the keys.
    pub fn resume(&mut self, exported: &ExportedKeys) -> Result<(), TlsError> {
        self.resume_from(&exported.state)
    }

    fn resume_from(&mut self, state: &[u8]) -> Result<(), TlsError> {
        let config = if self.is_client() { client_config() } else { server_config() };
        let resumed = config.and_then(|config| {
            let mut connection = connection(self.mode, config)?;
            connection.deserialize(state).map_err(|error| internal(&error))?;
            Pipe::new(connection).map_err(|error| internal(&error))
        });
        match resumed {
            Ok(pipe) => self.pipe = pipe,
            Err(why) => return Err(self.fail(why)),
        }
        Ok(())
    }

    /// Frees memory that an idle connection does not need.
    pub fn shrink(&mut self) {
        // The library keeps a buffer that holds a partial record.
        let _ = self.pipe.connection().release_buffers();
    }

    /// Ends the handshake: checks that it negotiated a pre-shared key and one of [`SUITES`].
    fn open(&mut self) -> Result<(), TlsError> {
        let connection = self.pipe.connection();
        let len = connection.negotiated_psk_identity_length().unwrap_or(0);
        let mut identity = vec![0; len];
        let is_agreed = len > 0 && connection.negotiated_psk_identity(&mut identity).is_ok();
        let is_usable = connection.cipher_suite().is_ok_and(|suite| SUITES.contains(&suite));
        if !is_agreed || !is_usable {
            return Err(
                self.fail(TlsError::Malformed("it negotiated no pre-shared key, or another cipher suite"))
            );
        }
        (self.identity, self.state) = (identity, TlsState::Open);
        Ok(())
    }

    fn fail(&mut self, why: TlsError) -> TlsError {
        self.state = TlsState::Failed;
        why
    }

    /// Translates the library's error. A server that has not sent anything yet sends an unprotected
    /// alert that names the cause.
    fn reason(&mut self, error: &Error) -> TlsError {
        let was_open = self.is_open();
        self.state = TlsState::Failed;
        let has_answered = was_open || !self.pipe.has_sent_nothing();
        let connection = self.pipe.connection();
        let offer = connection.application_context::<OfferedKeys>();
        let is_server = self.mode == Mode::Server;
        if error.kind() == ErrorType::Alert || (error.kind() == ErrorType::ConnectionClosed && !is_server) {
            return alert::received(connection.alert(), was_open);
        }
        let why = match (offer, error.name()) {
            (Some(OfferedKeys { first: Some(first), known: None, .. }), _) => {
                TlsError::UnknownIdentity(first.clone())
            }
            // The library reports a wrong binder, or one of another hash function, as a malformed
            // message.
            (
                Some(OfferedKeys { known: Some(known), .. }),
                "S2N_ERR_BAD_PSK_BINDER" | "S2N_ERR_BAD_MESSAGE" | "S2N_ERR_SAFETY",
            ) if !has_answered => TlsError::WrongKey(known.clone()),
            (Some(OfferedKeys { first: None, .. }), "S2N_ERR_CIPHER_NOT_SUPPORTED") => TlsError::NoIdentity,
            _ if error.kind() == ErrorType::ProtocolError => TlsError::Malformed(error.message()),
            _ => TlsError::Internal(error.message()),
        };
        if is_server && !has_answered {
            self.pipe.output().extend_from_slice(&alert::record(&why));
        } else {
            let _ = self.pipe.with_input(&[], |connection| connection.poll_shutdown_send().is_ready());
        }
        why
    }
}

/// A server's lookup and the identities that the client offered, for messages.
struct OfferedKeys {
    lookup: Lookup,
    /// The first identity offered.
    first: Option<String>,
    /// The first identity that the server knows.
    known: Option<String>,
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
        offer.first = offered.first().map(|identity| escaped(identity));
        let known: Vec<Psk> = offered.iter().filter_map(|identity| (offer.lookup)(identity)).collect();
        offer.known = known.first().map(|key| escaped(&key.identity));
        for key in &known {
            let key = library_psk(key).map_err(|error| Error::application(Box::new(error)))?;
            connection.append_psk(&key)?;
        }
        Ok(None)
    }
}

fn connection(mode: Mode, config: Config) -> Result<Connection, TlsError> {
    let mut connection = Connection::new(mode);
    let set = |connection: &mut Connection| -> Result<(), Error> {
        connection.set_config(config)?.set_blinding(Blinding::SelfService)?.prefer_throughput()?;
        // The library needs a waker where a callback may wait; ours never does.
        connection.set_waker(Some(Waker::noop()))?;
        Ok(())
    };
    set(&mut connection).map_err(|error| internal(&error))?;
    Ok(connection)
}

fn client_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    CONFIG.get_or_init(|| builder()?.build().map_err(|error| internal(&error))).clone()
}

fn server_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = || {
        let mut builder = builder()?;
        builder.set_client_hello_callback(SelectOfferedKeys).map_err(|error| internal(&error))?;
        builder.build().map_err(|error| internal(&error))
    };
    CONFIG.get_or_init(make).clone()
}

fn builder() -> Result<Builder, TlsError> {
    let mut builder = Builder::new();
    let set = |builder: &mut Builder| -> Result<(), Error> {
        builder.with_system_certs(false)?.set_security_policy(&Policy::from_version(POLICY)?)?;
        // The library need not delay its errors against timing attacks: the time of a binder's
        // check does not depend on the key.
        builder.set_max_blinding_delay(0)?;
        builder.set_serialization_version(SerializationVersion::V1)?;
        Ok(())
    };
    set(&mut builder).map_err(|error| internal(&error))?;
    Ok(builder)
}

fn library_psk(key: &Psk) -> Result<s2n_tls::psk::Psk, TlsError> {
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

fn internal(error: &Error) -> TlsError {
    TlsError::Internal(error.message())
}

/// Escapes and shortens an identity for a log.
fn escaped(identity: &[u8]) -> String {
    let text = String::from_utf8_lossy(identity);
    text.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk {}", escaped(&self.identity))
    }
}

/// Maximum number of bytes that a peer may send before the handshake is done.
pub const MAX_HANDSHAKE: usize = 64 << 10;
/// The cipher suites, by the library's names.
const SUITES: [&str; 2] = ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"];
/// A policy of the library: TLS 1.3 only, with the common elliptic curves.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";
/// Maximum length of an identity in a message, in characters.
const MAX_SHOWN: usize = 512;

#[cfg(test)]
mod tests;
