//! TLS with pre-shared keys or certificates (RFC 8446), without sockets: bytes in and bytes out.
//!
//! ```text
//!   socket ──records──▶ Tls::receive ──plain bytes──▶ session
//!   socket ◀─output──── Tls::send    ◀─plain bytes─── session
//! ```
//! Whoever drives a [`Tls`] shows it what came from the peer, takes what is to be sent from
//! [`Tls::output`], and bounds the time of the handshake; the handshake's memory is bounded here
//! ([`MAX_HANDSHAKE`]). There is no resumption and no early data, every handshake has a
//! Diffie-Hellman exchange, and every cipher is AES-GCM.
//!
//! A connection has credentials of one kind. Pre-shared keys (`psk.rs`) are for TLS 1.3 only, with
//! the cipher suite that has the key's hash function. Certificates (`certificates.rs`) are for TLS
//! 1.3, and for 1.2 where the peer has nothing newer. A server may require a certificate of each
//! client.
//!
//! A server looks up the keys that a client offers when it has its ClientHello (`hello.rs`), so
//! that it may have any number of them. Who offers none that it knows hears `unknown_psk_identity`,
//! and who has another key of that name `decrypt_error`.
//!
//! Once the handshake is done, the keys can be given up, so that somebody else, as a system's
//! kernel, makes and opens the records ([`Tls::export`], `keys.rs`); what is left to do then,
//! `messages.rs` helps with.
//!
//! The protocol itself is s2n-tls's, in C; decision 21 says why. Unsafe code, which is what lies
//! between it and us, is in `pipe.rs` alone.

mod alert;
mod certificates;
mod hello;
mod keys;
mod messages;
mod pipe;
mod psk;
mod psk_file;
mod records;

pub use certificates::{CertifiedKey, ClientCertificates, ServerCertificates, Trust};
pub use keys::{Exported, IV_LEN, RecordKeys, TrafficSecret};
pub use messages::{ALERT, APPLICATION_DATA, HANDSHAKE, Messages, OUR_CLOSE_NOTIFY, OUR_KEY_UPDATE, Told};
use pipe::Pipe;
pub use psk::{Hash, Lookup, Psk};
use psk::{Offer, library_psk};
pub use psk_file::{PskFile, PskFileError};
pub use records::{HEADER_LEN, MOST_PLAIN, OVERHEAD, Records};
use s2n_tls::config::{Builder, Config};
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, SerializationVersion, Version};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::security::Policy;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// One side of a connection.
pub struct Tls {
    pipe: Pipe,
    mode: Mode,
    state: State,
    /// The library's configuration, with the credentials.
    config: Config,
    kind: CredentialKind,
    /// Bytes of the peer's that the handshake has taken.
    handshake: usize,
    peer: TlsPeer,
}

/// What a client authenticates with, and how it authenticates the server.
#[derive(Clone, Debug)]
pub enum ClientCredentials {
    /// Pre-shared keys, the preferred one first.
    Psks(Arc<[Psk]>),
    /// A certificate of the server, and perhaps one of the client.
    Certificates(ClientCertificates),
}

/// What a server authenticates with, and how it authenticates clients.
#[derive(Clone)]
pub enum ServerCredentials {
    /// Pre-shared keys, found by the identities that a client offers.
    Psks(Lookup),
    /// A certificate of the server, and perhaps one of each client.
    Certificates(ServerCertificates),
}

/// The kind of a connection's credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CredentialKind {
    Psk,
    Certificate,
}

/// How the peer has authenticated itself in the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsPeer {
    /// By the pre-shared key of this identity.
    Psk(Vec<u8>),
    /// By the certificate with this subject, as RFC 4514 writes it: `CN=backup,O=Example`.
    Certificate(String),
    /// Not at all: a client that was not asked for a certificate.
    Anonymous,
}

/// What a call of [`Tls::receive`] has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of the input that it took.
    pub taken: usize,
    /// Plain bytes that it gave.
    pub given: usize,
}

/// Why there is no secure connection, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The server has none of the keys that the client has offered.
    #[error("has offered TLS keys that are not known here: {0}")]
    UnknownIdentity(String),
    /// The client has offered no key at all.
    #[error("has offered no TLS key")]
    NoIdentity,
    /// Both sides know a key of that name, and not the same one.
    #[error("has another TLS key than the one that is here called {0}")]
    WrongKey(String),
    /// The peer's certificate is not accepted.
    #[error("has a certificate that is not accepted: {0}")]
    Certificate(&'static str),
    /// A client has sent no certificate.
    #[error("has sent no certificate, which is required here")]
    NoCertificate,
    /// Our own certificates or keys cannot be used.
    #[error("{0}")]
    Credentials(&'static str),
    /// The peer has closed the connection, and takes nothing any more.
    #[error("has closed the connection")]
    Closed,
    /// The other side has ended the handshake, or the connection, with an alert.
    #[error("has ended TLS with the alert {name}{hint}")]
    Alert {
        /// As RFC 8446 calls it.
        name: String,
        /// What it is likely to mean.
        hint: &'static str,
    },
    /// It should have come by TLS.
    #[error("has come without TLS, which is required here")]
    Plain,
    /// The stream has ended before the handshake.
    #[error("has left in the middle of the TLS handshake")]
    Left,
    /// What came is no TLS, or not as it should be.
    #[error("has broken TLS: {0}")]
    Broken(&'static str),
    /// A record that has no place here, or a message.
    #[error("has sent a message of TLS that has no place here")]
    Unexpected,
    /// A record was changed on its way, or is protected by another key.
    #[error("has sent a record of TLS that is not protected by its key")]
    Unprotected,
    /// A record that is longer than one may be.
    #[error("has sent a record of TLS that is too long")]
    TooLong,
    /// It is not the peer's fault.
    #[error("cannot be spoken to by TLS: {0}")]
    Ours(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Handshake,
    Open,
    /// The peer sends nothing any more.
    Ended,
    Failed,
}

impl Tls {
    /// A client with these credentials.
    ///
    /// # Errors
    /// If the credentials cannot be used.
    pub fn client(credentials: &ClientCredentials) -> Result<Tls, TlsError> {
        match credentials {
            ClientCredentials::Psks(keys) => {
                let config = psk::client_config()?;
                let mut connection = connection(Mode::Client, config.clone())?;
                for key in &**keys {
                    connection.append_psk(&library_psk(key)?).map_err(|error| ours(&error))?;
                }
                Tls::new(connection, Mode::Client, config, CredentialKind::Psk)
            }
            ClientCredentials::Certificates(certificates) => {
                let config = certificates.config();
                let mut connection = connection(Mode::Client, config.clone())?;
                if let Some(name) = certificates.server_name() {
                    connection.set_server_name(name).map_err(|error| ours(&error))?;
                }
                Tls::new(connection, Mode::Client, config, CredentialKind::Certificate)
            }
        }
    }

    /// A server with these credentials.
    ///
    /// # Errors
    /// If the library fails.
    pub fn server(credentials: &ServerCredentials) -> Result<Tls, TlsError> {
        match credentials {
            ServerCredentials::Psks(lookup) => {
                let config = psk::server_config()?;
                let mut connection = connection(Mode::Server, config.clone())?;
                connection.set_application_context(Offer::new(lookup));
                Tls::new(connection, Mode::Server, config, CredentialKind::Psk)
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
        let pipe = Pipe::new(connection).map_err(|error| ours(&error))?;
        let (state, peer) = (State::Handshake, TlsPeer::Anonymous);
        Ok(Tls { pipe, mode, state, config, kind, handshake: 0, peer })
    }

    /// Whether it is the client's side.
    #[must_use]
    pub fn is_client(&self) -> bool {
        self.mode == Mode::Client
    }

    /// Whether the handshake is done, so that there are plain bytes.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open | State::Ended)
    }

    /// Whether the peer has said that it sends nothing any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// How the peer has authenticated itself, once the handshake is done.
    #[must_use]
    pub fn peer(&self) -> &TlsPeer {
        &self.peer
    }

    /// The version and the cipher suite, for logs, once the handshake is done.
    pub fn negotiated(&mut self) -> String {
        let connection = self.pipe.connection();
        let version = match connection.actual_protocol_version() {
            Ok(Version::TLS13) => "TLS 1.3",
            Ok(Version::TLS12) => "TLS 1.2",
            _ => "TLS",
        };
        format!("{version}, {}", connection.cipher_suite().unwrap_or_default())
    }

    /// Whether [`Tls::export`] can ever give up the keys, once the handshake is done: those of TLS
    /// 1.2 it cannot.
    pub fn can_export(&mut self) -> bool {
        self.pipe.connection().actual_protocol_version().is_ok_and(|version| version == Version::TLS13)
    }

    /// Goes on with what came from the peer, which may be nothing: a client begins so. It takes
    /// what it can use, and once it is open gives as many plain bytes as `plain` has room for; with
    /// room left, all of the input is taken.
    ///
    /// # Errors
    /// If it cannot go on. What [`Tls::output`] holds is worth sending still: it says why.
    pub fn receive(&mut self, input: &[u8], plain: &mut [u8]) -> Result<Moved, TlsError> {
        let mut moved = Moved::default();
        if self.state == State::Handshake {
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
                    return Err(self.fail(TlsError::Broken("its handshake is too long")));
                }
                Ok(false) => return Ok(moved),
                Err(error) => return Err(self.reason(&error)),
            }
        }
        while self.state == State::Open && moved.given < plain.len() {
            let (result, taken) = self.pipe.with_input(&input[moved.taken..], |connection| {
                connection.poll_recv(&mut plain[moved.given..])
            });
            moved.taken += taken;
            match result {
                Poll::Ready(Ok(0)) => self.state = State::Ended,
                Poll::Ready(Ok(given)) => moved.given += given,
                Poll::Pending => break,
                Poll::Ready(Err(error)) => return Err(self.reason(&error)),
            }
        }
        Ok(moved)
    }

    /// Encrypts all of `plain`; only once it is open.
    ///
    /// # Errors
    /// If it cannot go on.
    pub fn send(&mut self, mut plain: &[u8]) -> Result<(), TlsError> {
        while !plain.is_empty() {
            let (result, _) = self.pipe.with_input(&[], |connection| connection.poll_send(plain));
            match result {
                Poll::Ready(Ok(sent)) => plain = &plain[sent..],
                Poll::Ready(Err(error)) => return Err(self.reason(&error)),
                // The output takes everything.
                Poll::Pending => return Err(self.fail(TlsError::Ours("it does not take what is to be sent"))),
            }
        }
        Ok(())
    }

    /// Says that nothing more will be sent.
    pub fn close(&mut self) {
        if self.is_open() {
            // It is as good as gone.
            let _ = self.pipe.with_input(&[], |connection| connection.poll_shutdown_send().is_ready());
        }
    }

    /// What is to be sent to the peer; whoever has sent it clears it.
    pub fn output(&mut self) -> &mut Vec<u8> {
        self.pipe.output()
    }

    /// Gives up the keys, so that somebody else goes on: at a border between records in both
    /// directions, with all of [`Tls::output`] sent. It can do nothing any more then, but
    /// [`Tls::resume`] with them. `None`: it cannot give them up now, and has not.
    pub fn export(&mut self) -> Option<Exported> {
        if self.state != State::Open || !self.output().is_empty() || !self.can_export() {
            return None;
        }
        let connection = self.pipe.connection();
        let mut state = vec![0; connection.serialization_length().ok()?];
        connection.serialize(&mut state).ok()?;
        match Exported::read(state, self.is_client()) {
            Ok(exported) => Some(exported),
            Err(state) => {
                // Another version of the library may write in another form, which it reads itself.
                let _ = self.resume_from(&state);
                None
            }
        }
    }

    /// Goes on with what was given up, of which nothing was used.
    ///
    /// # Errors
    /// If the library does not take it.
    pub fn resume(&mut self, exported: &Exported) -> Result<(), TlsError> {
        self.resume_from(&exported.state)
    }

    fn resume_from(&mut self, state: &[u8]) -> Result<(), TlsError> {
        let resumed = connection(self.mode, self.config.clone()).and_then(|mut connection| {
            connection.deserialize(state).map_err(|error| ours(&error))?;
            Pipe::new(connection).map_err(|error| ours(&error))
        });
        match resumed {
            Ok(pipe) => self.pipe = pipe,
            Err(why) => return Err(self.fail(why)),
        }
        Ok(())
    }

    /// Gives back memory that an idle connection does not need.
    pub fn shrink(&mut self) {
        // Half a record is kept.
        let _ = self.pipe.connection().release_buffers();
    }

    /// The handshake is done: checks what was negotiated.
    fn open(&mut self) -> Result<(), TlsError> {
        let connection = self.pipe.connection();
        if !connection.cipher_suite().is_ok_and(|suite| SUITES.contains(&suite)) {
            return Err(self.fail(TlsError::Broken("it wants another cipher suite")));
        }
        self.peer = match self.kind {
            CredentialKind::Psk => match psk::negotiated(connection) {
                Some(identity) => TlsPeer::Psk(identity),
                None => return Err(self.fail(TlsError::Broken("it wants no pre-shared key"))),
            },
            CredentialKind::Certificate => match certificates::subject(connection, self.mode) {
                Ok(Some(subject)) => TlsPeer::Certificate(subject),
                Ok(None) => TlsPeer::Anonymous,
                Err(why) => return Err(self.fail(why)),
            },
        };
        self.state = State::Open;
        Ok(())
    }

    fn fail(&mut self, why: TlsError) -> TlsError {
        self.state = State::Failed;
        why
    }

    /// What the library's error means. If nobody knows the keys yet, the peer is told in plain
    /// words what is wrong.
    fn reason(&mut self, error: &Error) -> TlsError {
        let was_open = self.is_open();
        self.state = State::Failed;
        let has_answered = was_open || !self.pipe.has_sent_nothing();
        let connection = self.pipe.connection();
        let offer = connection.application_context::<Offer>();
        let is_server = self.mode == Mode::Server;
        if was_open && error.kind() == ErrorType::ConnectionClosed {
            return TlsError::Closed;
        }
        if error.kind() == ErrorType::Alert || (error.kind() == ErrorType::ConnectionClosed && !is_server) {
            return alert::received(connection.alert(), was_open, self.kind);
        }
        let why = match (offer, error.name()) {
            (Some(Offer { first: Some(first), known: None, .. }), _) => {
                TlsError::UnknownIdentity(first.clone())
            }
            // The library is as brief about a wrong proof of the key, or one by another hash
            // function, as about a wrong message.
            (
                Some(Offer { known: Some(known), .. }),
                "S2N_ERR_BAD_PSK_BINDER" | "S2N_ERR_BAD_MESSAGE" | "S2N_ERR_SAFETY",
            ) if !has_answered => TlsError::WrongKey(known.clone()),
            (
                Some(Offer { first: None, .. }),
                "S2N_ERR_CIPHER_NOT_SUPPORTED" | "S2N_ERR_NO_VALID_SIGNATURE_SCHEME",
            ) => TlsError::NoIdentity,
            (_, name) => match certificates::refusal(name) {
                Some(_) if self.kind == CredentialKind::Psk => {
                    TlsError::Certificate("a pre-shared key is expected here")
                }
                Some(refusal) => refusal,
                None if error.kind() == ErrorType::ConnectionClosed => TlsError::Left,
                None if error.kind() == ErrorType::ProtocolError => TlsError::Broken(error.message()),
                None => TlsError::Ours(error.message()),
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
        // The library wants one where a callback may have to wait; ours never does.
        connection.set_waker(Some(Waker::noop()))?;
        Ok(())
    };
    set(&mut connection).map_err(|error| ours(&error))?;
    Ok(connection)
}

fn builder(policy: &str) -> Result<Builder, TlsError> {
    let mut builder = Builder::new();
    let set = |builder: &mut Builder| -> Result<(), Error> {
        builder.with_system_certs(false)?.set_security_policy(&Policy::from_version(policy)?)?;
        // What a key's check takes tells nothing of the key, so that nobody has to wait before he
        // says that it failed.
        builder.set_max_blinding_delay(0)?;
        builder.set_serialization_version(SerializationVersion::V1)?;
        Ok(())
    };
    set(&mut builder).map_err(|error| ours(&error))?;
    Ok(builder)
}

fn ours(error: &Error) -> TlsError {
    TlsError::Ours(error.message())
}

/// A peer's words, fit for a log.
fn shown(identity: &[u8]) -> String {
    let text = String::from_utf8_lossy(identity);
    text.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}

/// Of what the peer sends before the handshake is done, in bytes.
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
/// Of an identity, in characters.
const MAX_SHOWN: usize = 512;

#[cfg(test)]
pub(crate) mod tests;
