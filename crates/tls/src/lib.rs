//! TLS with pre-shared keys or certificates (RFC 8446), without sockets: bytes in and bytes out.
//!
//! ```text
//!   socket ──records──▶ Tls::receive ──plain bytes──▶ session
//!   socket ◀─output──── Tls::send    ◀─plain bytes─── session
//! ```
//! The caller passes the peer's bytes to [`Tls::receive`], sends the bytes of [`Tls::output`], and
//! bounds the time of the handshake; this crate bounds the handshake's memory ([`MAX_HANDSHAKE`]).
//! There is no resumption and no early data, every handshake has a Diffie-Hellman exchange, and
//! every cipher is AES-GCM.
//!
//! A connection has credentials of one kind. Pre-shared keys (`psk.rs`) are for TLS 1.3 only; the
//! key's hash function selects the cipher suite. Certificates (`certificates.rs`) are for TLS 1.3,
//! and for TLS 1.2 if the peer does not support 1.3. A server may require client certificates.
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
mod certificates;
mod hello;
mod keys;
mod messages;
mod pipe;
mod psk;
mod psk_file;
mod records;

pub use certificates::{CertifiedKey, ClientCertificates, ServerCertificates, Trust, canonical_subject};
pub use keys::{ExportedKeys, IV_LEN, RecordKeys, TrafficSecret};
pub use messages::{
    ALERT, APPLICATION_DATA, HANDSHAKE, OUR_CLOSE_NOTIFY, OUR_KEY_UPDATE, PostHandshakeAction,
    PostHandshakeMessages,
};
use pipe::Pipe;
pub use psk::{Explain, Hash, Lookup, Psk};
use psk::{OfferedKeys, library_psk};
pub use psk_file::{PskFile, PskFileError};
pub use records::{HEADER_LEN, MAX_PLAINTEXT, OVERHEAD, Records};
use s2n_tls::config::{Builder, Config};
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, SerializationVersion, Version};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::security::Policy;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// One side of a TLS connection.
pub struct Tls {
    pipe: Pipe,
    mode: Mode,
    state: TlsState,
    /// The library's configuration, with the credentials.
    config: Config,
    kind: CredentialKind,
    /// Number of bytes of the peer that the handshake consumed.
    handshake: usize,
    peer: TlsPeer,
}

/// A client's credentials, and how it authenticates the server.
#[derive(Clone, Debug)]
pub enum ClientCredentials {
    /// Pre-shared keys, the preferred one first.
    Psks(Arc<[Psk]>),
    /// Certificates: of the server, and optionally of the client.
    Certificates(ClientCertificates),
}

/// A server's credentials, and how it authenticates clients.
#[derive(Clone)]
pub enum ServerCredentials {
    /// Pre-shared keys, found by the identities that a client offers.
    Psks(Lookup),
    /// Pre-shared keys whose identities have a meaning: the error of a refused one explains it.
    ExplainedPsks(Lookup, Explain),
    /// Certificates: of the server, and optionally of each client.
    Certificates(ServerCertificates),
}

/// The kind of a connection's credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CredentialKind {
    Psk,
    Certificate,
}

/// How the peer authenticated itself in the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsPeer {
    /// By the pre-shared key of this identity.
    Psk(Vec<u8>),
    /// By the certificate with this subject, as RFC 4514 writes it: `CN=backup,O=Example`.
    Certificate(String),
    /// Not at all: a client of which no certificate was requested, or an unverified server.
    Anonymous,
}

/// Numbers of bytes that a call of [`Tls::receive`] consumed and returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Bytes of the input that it consumed.
    pub taken: usize,
    /// Plain bytes that it wrote.
    pub given: usize,
}

/// Why a TLS connection failed. The message's subject is the peer: write the peer's name before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The server knows none of the identities that the client offered; the value is the first one,
    /// and what may explain it.
    #[error("offered TLS keys that are unknown here: {0}")]
    UnknownIdentity(String),
    /// The client offered no pre-shared key.
    #[error("offered no TLS key")]
    NoIdentity,
    /// Both sides know a key of this identity, but not the same one; with what may explain it.
    #[error("has a TLS key different from ours named {0}")]
    WrongKey(String),
    /// The peer's certificate was refused; the value says why.
    #[error("has a certificate that is not accepted: {0}")]
    Certificate(&'static str),
    /// A client sent no certificate, where one is required.
    #[error("sent no certificate, which is required here")]
    NoCertificate,
    /// Our own certificate or key is unusable; the value is the whole message, without a peer.
    #[error("{0}")]
    Credentials(&'static str),
    /// The peer closed the connection and receives nothing.
    #[error("closed the connection")]
    Closed,
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
    /// Creates a client with these credentials.
    ///
    /// # Errors
    /// [`TlsError::Internal`] if the library refuses the credentials.
    pub fn client(credentials: &ClientCredentials) -> Result<Tls, TlsError> {
        match credentials {
            ClientCredentials::Psks(keys) => {
                let config = psk::client_config(keys)?;
                let mut connection = connection(Mode::Client, config.clone())?;
                for key in &**keys {
                    connection.append_psk(&library_psk(key)?).map_err(|error| internal(&error))?;
                }
                Tls::new(connection, Mode::Client, config, CredentialKind::Psk)
            }
            ClientCredentials::Certificates(certificates) => {
                let config = certificates.config();
                let mut connection = connection(Mode::Client, config.clone())?;
                if let Some(name) = certificates.server_name() {
                    connection.set_server_name(name).map_err(|error| internal(&error))?;
                }
                Tls::new(connection, Mode::Client, config, CredentialKind::Certificate)
            }
        }
    }

    /// Creates a server with these credentials.
    ///
    /// # Errors
    /// [`TlsError::Internal`] if the library fails.
    pub fn server(credentials: &ServerCredentials) -> Result<Tls, TlsError> {
        let with_keys = |offered: OfferedKeys| {
            let config = psk::server_config()?;
            let mut connection = connection(Mode::Server, config.clone())?;
            connection.set_application_context(offered);
            Tls::new(connection, Mode::Server, config, CredentialKind::Psk)
        };
        match credentials {
            ServerCredentials::Psks(lookup) => with_keys(OfferedKeys::new(lookup, None)),
            ServerCredentials::ExplainedPsks(lookup, explain) => {
                with_keys(OfferedKeys::new(lookup, Some(explain)))
            }
            ServerCredentials::Certificates(certificates) => {
                let config = certificates.config();
                let connection = connection(Mode::Server, config.clone())?;
                Tls::new(connection, Mode::Server, config, CredentialKind::Certificate)
            }
        }
    }

    fn new(
        connection: Connection,
        mode: Mode,
        config: Config,
        kind: CredentialKind,
    ) -> Result<Tls, TlsError> {
        let pipe = Pipe::new(connection).map_err(|error| internal(&error))?;
        let (state, peer) = (TlsState::Handshake, TlsPeer::Anonymous);
        Ok(Tls { pipe, mode, state, config, kind, handshake: 0, peer })
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

    /// How the peer authenticated itself; [`TlsPeer::Anonymous`] until the handshake is done.
    #[must_use]
    pub fn peer(&self) -> &TlsPeer {
        &self.peer
    }

    /// The version and the cipher suite for logs, once the handshake is done.
    pub fn negotiated(&mut self) -> String {
        let connection = self.pipe.connection();
        let version = match connection.actual_protocol_version() {
            Ok(Version::TLS13) => "TLS 1.3",
            Ok(Version::TLS12) => "TLS 1.2",
            _ => "TLS",
        };
        format!("{version}, {}", connection.cipher_suite().unwrap_or_default())
    }

    /// Whether [`Tls::export`] supports this connection, once the handshake is done: it exports
    /// keys of TLS 1.3 only.
    pub fn can_export(&mut self) -> bool {
        self.pipe.connection().actual_protocol_version().is_ok_and(|version| version == Version::TLS13)
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
        if self.state != TlsState::Open || !self.output().is_empty() || !self.can_export() {
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
        let resumed = connection(self.mode, self.config.clone()).and_then(|mut connection| {
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

    /// Ends the handshake: checks the negotiated cipher suite and the peer's credentials.
    fn open(&mut self) -> Result<(), TlsError> {
        let connection = self.pipe.connection();
        if !connection.cipher_suite().is_ok_and(|suite| SUITES.contains(&suite)) {
            return Err(self.fail(TlsError::Malformed("it negotiated a cipher suite that is not allowed")));
        }
        self.peer = match self.kind {
            CredentialKind::Psk => match psk::negotiated(connection) {
                Some(identity) => TlsPeer::Psk(identity),
                None => return Err(self.fail(TlsError::Malformed("it negotiated no pre-shared key"))),
            },
            CredentialKind::Certificate => match certificates::subject(connection, self.mode) {
                Ok(Some(subject)) => TlsPeer::Certificate(subject),
                Ok(None) => TlsPeer::Anonymous,
                Err(why) => return Err(self.fail(why)),
            },
        };
        self.state = TlsState::Open;
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
        if was_open && error.kind() == ErrorType::ConnectionClosed {
            return TlsError::Closed;
        }
        if error.kind() == ErrorType::Alert || (error.kind() == ErrorType::ConnectionClosed && !is_server) {
            return alert::received(connection.alert(), was_open, self.kind);
        }
        let why = match (offer, error.name()) {
            (Some(offered @ OfferedKeys { first: Some(first), known: None, .. }), _) => {
                TlsError::UnknownIdentity(offered.refused(first))
            }
            // The library reports a wrong binder, or one of another hash function, as a malformed
            // message.
            (
                Some(offered @ OfferedKeys { known: Some(known), .. }),
                "S2N_ERR_BAD_PSK_BINDER" | "S2N_ERR_BAD_MESSAGE" | "S2N_ERR_SAFETY",
            ) if !has_answered => TlsError::WrongKey(offered.refused(known)),
            (
                Some(OfferedKeys { first: None, .. }),
                "S2N_ERR_CIPHER_NOT_SUPPORTED" | "S2N_ERR_NO_VALID_SIGNATURE_SCHEME",
            ) => TlsError::NoIdentity,
            (_, name) => match certificates::refusal(name) {
                Some(_) if self.kind == CredentialKind::Psk => {
                    TlsError::Certificate("a pre-shared key is expected here")
                }
                Some(refusal) => refusal,
                None if error.kind() == ErrorType::ConnectionClosed => TlsError::Disconnected,
                None if error.kind() == ErrorType::ProtocolError => TlsError::Malformed(error.message()),
                None => TlsError::Internal(error.message()),
            },
        };
        if is_server && !has_answered {
            self.pipe.output().extend_from_slice(&alert::record(&why));
        } else {
            let _ = self.pipe.with_input(&[], |connection| connection.poll_shutdown_send().is_ready());
        }
        why
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

fn builder(policy: &str) -> Result<Builder, TlsError> {
    let mut builder = Builder::new();
    let set = |builder: &mut Builder| -> Result<(), Error> {
        builder.with_system_certs(false)?.set_security_policy(&Policy::from_version(policy)?)?;
        // The library need not delay its errors against timing attacks: the time of a binder's
        // check does not depend on the key.
        builder.set_max_blinding_delay(0)?;
        builder.set_serialization_version(SerializationVersion::V1)?;
        Ok(())
    };
    set(&mut builder).map_err(|error| internal(&error))?;
    Ok(builder)
}

fn internal(error: &Error) -> TlsError {
    TlsError::Internal(error.message())
}

/// Escapes and shortens an identity for a log.
fn escaped(identity: &[u8]) -> String {
    let text = String::from_utf8_lossy(identity);
    text.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}

/// Maximum number of bytes that a peer may send before the handshake is done.
pub const MAX_HANDSHAKE: usize = 64 << 10;
/// The library's names of the cipher suites that are accepted: AES-GCM after a Diffie-Hellman
/// exchange.
const SUITES: [&str; 6] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES256-GCM-SHA384",
];
/// Maximum length of an identity in a message, in characters.
const MAX_SHOWN: usize = 512;

#[cfg(test)]
pub(crate) mod tests;
