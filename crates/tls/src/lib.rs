//! TLS 1.3 with external pre-shared keys (RFC 8446), without sockets: bytes in and bytes out.
//!
//! ```text
//!   socket ──records──▶ Tls::receive ──plain bytes──▶ session
//!   socket ◀─output──── Tls::send    ◀─plain bytes─── session
//! ```
//! Whoever drives a [`Tls`] shows it what came from the peer, takes what is to be sent from
//! [`Tls::output`], and bounds the time of the handshake; the handshake's memory is bounded here
//! ([`MAX_HANDSHAKE`]). Only keys count: there are no certificates, no resumption and no early
//! data, every handshake has a Diffie-Hellman exchange (`psk_dhe_ke`), and the cipher suites are
//! `TLS_AES_128_GCM_SHA256` and `TLS_AES_256_GCM_SHA384`, as the key's hash function has it.
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
pub use records::{HEADER_LEN, MOST_PLAIN, OVERHEAD, Records};
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

/// One side of a connection.
pub struct Tls {
    pipe: Pipe,
    mode: Mode,
    state: TlsState,
    /// Bytes of the peer's that the handshake has taken.
    handshake: usize,
    /// Which key both sides have.
    identity: Vec<u8>,
}

/// What a call of [`Tls::receive`] has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Bytes of the input that it took.
    pub taken: usize,
    /// Plain bytes that it gave.
    pub given: usize,
}

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
enum TlsState {
    Handshake,
    Open,
    /// The peer sends nothing any more.
    Ended,
    Failed,
}

impl Tls {
    /// A client that has these keys, the one that it likes best first.
    ///
    /// # Errors
    /// If the keys cannot be used.
    pub fn client(keys: &[Psk]) -> Result<Tls, TlsError> {
        let mut connection = connection(Mode::Client, client_config()?)?;
        for key in keys {
            connection.append_psk(&library_psk(key)?).map_err(|error| ours(&error))?;
        }
        Tls::new(connection, Mode::Client)
    }

    /// A server that finds its keys by `lookup`.
    ///
    /// # Errors
    /// If the library fails.
    pub fn server(lookup: &Lookup) -> Result<Tls, TlsError> {
        let mut connection = connection(Mode::Server, server_config()?)?;
        connection.set_application_context(OfferedKeys { lookup: lookup.clone(), first: None, known: None });
        Tls::new(connection, Mode::Server)
    }

    fn new(connection: Connection, mode: Mode) -> Result<Tls, TlsError> {
        let pipe = Pipe::new(connection).map_err(|error| ours(&error))?;
        Ok(Tls { pipe, mode, state: TlsState::Handshake, handshake: 0, identity: Vec::new() })
    }

    /// Whether it is the client's side.
    #[must_use]
    pub fn is_client(&self) -> bool {
        self.mode == Mode::Client
    }

    /// Whether the handshake is done, so that there are plain bytes.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, TlsState::Open | TlsState::Ended)
    }

    /// Whether the peer has said that it sends nothing any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == TlsState::Ended
    }

    /// The identity of the key that both sides have, once the handshake is done.
    #[must_use]
    pub fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// Goes on with what came from the peer, which may be nothing: a client begins so. It takes
    /// what it can use, and once it is open gives as many plain bytes as `plain` has room for; with
    /// room left, all of the input is taken.
    ///
    /// # Errors
    /// If it cannot go on. What [`Tls::output`] holds is worth sending still: it says why.
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
                    return Err(self.fail(TlsError::Broken("its handshake is too long")));
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
    pub fn resume(&mut self, exported: &ExportedKeys) -> Result<(), TlsError> {
        self.resume_from(&exported.state)
    }

    fn resume_from(&mut self, state: &[u8]) -> Result<(), TlsError> {
        let config = if self.is_client() { client_config() } else { server_config() };
        let resumed = config.and_then(|config| {
            let mut connection = connection(self.mode, config)?;
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

    /// The handshake is done: looks what has become of it.
    fn open(&mut self) -> Result<(), TlsError> {
        let connection = self.pipe.connection();
        let len = connection.negotiated_psk_identity_length().unwrap_or(0);
        let mut identity = vec![0; len];
        let is_agreed = len > 0 && connection.negotiated_psk_identity(&mut identity).is_ok();
        let is_usable = connection.cipher_suite().is_ok_and(|suite| SUITES.contains(&suite));
        if !is_agreed || !is_usable {
            return Err(self.fail(TlsError::Broken("it wants no pre-shared key, or another cipher suite")));
        }
        (self.identity, self.state) = (identity, TlsState::Open);
        Ok(())
    }

    fn fail(&mut self, why: TlsError) -> TlsError {
        self.state = TlsState::Failed;
        why
    }

    /// What the library's error means. If nobody knows the keys yet, the peer is told in plain
    /// words what is wrong.
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
            // The library is as brief about a wrong proof of the key, or one by another hash
            // function, as about a wrong message.
            (
                Some(OfferedKeys { known: Some(known), .. }),
                "S2N_ERR_BAD_PSK_BINDER" | "S2N_ERR_BAD_MESSAGE" | "S2N_ERR_SAFETY",
            ) if !has_answered => TlsError::WrongKey(known.clone()),
            (Some(OfferedKeys { first: None, .. }), "S2N_ERR_CIPHER_NOT_SUPPORTED") => TlsError::NoIdentity,
            _ if error.kind() == ErrorType::ProtocolError => TlsError::Broken(error.message()),
            _ => TlsError::Ours(error.message()),
        };
        if is_server && !has_answered {
            self.pipe.output().extend_from_slice(&alert::record(&why));
        } else {
            let _ = self.pipe.with_input(&[], |connection| connection.poll_shutdown_send().is_ready());
        }
        why
    }
}

/// What a client has offered to a server.
struct OfferedKeys {
    lookup: Lookup,
    /// The identity of the first key, for messages.
    first: Option<String>,
    /// That of the first that is known.
    known: Option<String>,
}

/// Takes the keys that a client offers and that are known.
struct SelectOfferedKeys;

impl ClientHelloCallback for SelectOfferedKeys {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let message = connection.client_hello()?.raw_message()?;
        let offered = hello::identities(&message);
        let Some(offer) = connection.application_context_mut::<OfferedKeys>() else { return Ok(None) };
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

fn client_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    CONFIG.get_or_init(|| builder()?.build().map_err(|error| ours(&error))).clone()
}

fn server_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = || {
        let mut builder = builder()?;
        builder.set_client_hello_callback(SelectOfferedKeys).map_err(|error| ours(&error))?;
        builder.build().map_err(|error| ours(&error))
    };
    CONFIG.get_or_init(make).clone()
}

fn builder() -> Result<Builder, TlsError> {
    let mut builder = Builder::new();
    let set = |builder: &mut Builder| -> Result<(), Error> {
        builder.with_system_certs(false)?.set_security_policy(&Policy::from_version(POLICY)?)?;
        // What a key's check takes tells nothing of the key, so that nobody has to wait before he
        // says that it failed.
        builder.set_max_blinding_delay(0)?;
        builder.set_serialization_version(SerializationVersion::V1)?;
        Ok(())
    };
    set(&mut builder).map_err(|error| ours(&error))?;
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
    make().map_err(|error| ours(&error))
}

fn ours(error: &Error) -> TlsError {
    TlsError::Ours(error.message())
}

/// A peer's words, fit for a log.
fn shown(identity: &[u8]) -> String {
    let text = String::from_utf8_lossy(identity);
    text.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk {}", shown(&self.identity))
    }
}

/// Of what the peer sends before the handshake is done, in bytes.
pub const MAX_HANDSHAKE: usize = 64 << 10;
/// As the library calls them.
const SUITES: [&str; 2] = ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"];
/// TLS 1.3 alone, with the elliptic curves that everybody has.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";
/// Of an identity, in characters.
const MAX_SHOWN: usize = 512;

#[cfg(test)]
mod tests;
