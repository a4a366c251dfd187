//! Runs a session on an ordinary thread over a blocking socket, for login and discovery.

use crate::carrier::connection::Broken;
use crate::carrier::tls::Secure;
use crate::core::reactor::EngineCore;
use crate::net::host::Host;
use crate::net::login_stream::LoginStream;
use crate::net::socket::Address;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{
    BYTES_BEFORE_TLS, Demand, MAX_DEMAND, StreamConnections, StreamSession, Timed,
};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_tls::TlsError;
use blockmux_volume::{Chunk, Memory};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use tracing::warn;

/// Why a volume cannot be reached; `R` is the protocol's refusal.
#[derive(Debug, thiserror::Error)]
pub enum BlockingConnectError<R> {
    /// The connection failed or was lost.
    #[error("{address}: {broken}")]
    Broken {
        /// The server's address.
        address: Address,
        /// The error.
        broken: Broken,
    },
    /// The server refused.
    #[error("{address}: {refused}")]
    Refused {
        /// The server's address.
        address: Address,
        /// The refusal.
        refused: R,
    },
    /// The server closed the connection or timed out without an answer.
    #[error("{address}: server closed the connection before it described the volume")]
    Silent {
        /// The server's address.
        address: Address,
    },
}

impl<R> BlockingConnectError<R> {
    pub(crate) fn broken(address: &Address, broken: impl Into<Broken>) -> BlockingConnectError<R> {
        BlockingConnectError::Broken { address: address.clone(), broken: broken.into() }
    }

    pub(crate) fn refused(address: &Address, refused: R) -> BlockingConnectError<R> {
        BlockingConnectError::Refused { address: address.clone(), refused }
    }

    pub(crate) fn silent(address: &Address) -> BlockingConnectError<R> {
        BlockingConnectError::Silent { address: address.clone() }
    }

    /// Whether the cause is on this machine, and the error says what to do.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, BlockingConnectError::Broken { broken, .. } if broken.is_local())
    }

    /// Whether a later attempt may succeed; `is_retryable` decides for refusals.
    pub(crate) fn is_retryable(&self, is_retryable: impl FnOnce(&R) -> bool) -> bool {
        match self {
            BlockingConnectError::Refused { refused, .. } => is_retryable(refused),
            BlockingConnectError::Broken { .. } | BlockingConnectError::Silent { .. } => true,
        }
    }
}

/// Connects by `H` and runs a session that `open` makes, and others on further connections as long
/// as the peer closes the connection and `retries` is true.
pub(crate) fn run_retried<H: Host, S>(
    address: &Address,
    open: impl Fn(TransportInfo) -> S,
    run: impl Fn(LoginConnection<'_>, &mut S) -> Result<(), Broken>,
    retries: impl Fn(&S) -> bool,
) -> (S, Result<(), Broken>) {
    loop {
        let (session, ran) = match LoginConnection::open::<H>(address, CONNECT_TIMEOUT) {
            Ok(connection) => {
                let mut session = open(connection.stream.transport());
                let ran = run(connection, &mut session);
                (session, ran)
            }
            Err(broken) => (open(TransportInfo::default()), Err(broken)),
        };
        if !has_hung_up(&ran) || !retries(&session) {
            return (session, ran);
        }
    }
}

/// Whether the peer closed the connection or may have closed it; `false` if it was silent.
fn has_hung_up(ran: &Result<(), Broken>) -> bool {
    match ran {
        Ok(()) | Err(Broken::Protocol(_)) => true,
        Err(Broken::Socket(error)) => {
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        }
        Err(Broken::Tls(_) | Broken::Keys(_) | Broken::Evicted(_) | Broken::SessionEnded(_)) => false,
    }
}

/// The first successful result, or else the first error.
pub(crate) fn first_answer<T, E>(mut answers: impl Iterator<Item = Result<T, E>>) -> Option<Result<T, E>> {
    let first = answers.next()?;
    Some(first.or_else(|error| answers.find_map(Result::ok).ok_or(error)))
}

/// A session that is driven over one stream.
pub trait SingleStream {
    /// The stream session.
    fn stream(&mut self) -> impl StreamSession;
}

impl<S: StreamSession> SingleStream for S {
    fn stream(&mut self) -> impl StreamSession {
        self
    }
}

/// A session that may have several connections, of which only the first is used.
pub struct FirstConnection<'a, S>(pub &'a mut S);

impl<S: StreamConnections> SingleStream for FirstConnection<'_, S> {
    fn stream(&mut self) -> impl StreamSession {
        self.0.connection(0)
    }
}

/// Timeouts of a login.
#[derive(Clone, Copy, Debug)]
pub struct LoginTimeouts {
    /// Timeout of the whole login.
    pub total: Duration,
    /// Timeout of the server's first byte, for protocols in which the server speaks first, and the
    /// explanation for a server that sends none.
    pub greeting: Option<(Duration, &'static str)>,
}

impl From<Duration> for LoginTimeouts {
    fn from(total: Duration) -> LoginTimeouts {
        LoginTimeouts { total, greeting: None }
    }
}

/// A connection for a login on an ordinary thread.
pub(crate) struct LoginConnection<'a> {
    address: &'a Address,
    stream: Box<dyn LoginStream>,
}

impl<'a> LoginConnection<'a> {
    fn open<H: Host>(address: &'a Address, timeout: Duration) -> Result<LoginConnection<'a>, Broken> {
        let stream = H::log_in(address, timeout);
        let stream = stream.map_err(|error| explained(error.into(), timeout, false))?;
        Ok(LoginConnection { address, stream })
    }

    /// Runs `session` until `done` returns true or the session is over, with TLS if `secure` is
    /// given: from the beginning, or when the session demands it.
    ///
    /// # Errors
    /// If the target closes the connection, exceeds a timeout or breaks the protocol, or the TLS
    /// handshake fails.
    pub(crate) fn run<S: SingleStream>(
        mut self,
        secure: Option<Secure>,
        session: &mut S,
        timeouts: impl Into<LoginTimeouts>,
        done: impl FnMut(&S) -> bool,
    ) -> Result<(), Broken> {
        let timeouts = timeouts.into();
        let mut is_answering = false;
        let ran = run(&mut self, secure, session, timeouts, done, &mut is_answering);
        if !self.stream.tells_end() {
            let mut stream = session.stream();
            let _ = stream.on_end(Instant::now());
            let _ = self.stream.send(stream.outbox());
        }
        ran.map_err(|broken| explained(broken, timeouts.total, is_answering))
    }
}

/// Explains a timeout. A blocking socket reports it as this error. That of the greeting has a
/// message.
fn explained(broken: Broken, timeout: Duration, is_answering: bool) -> Broken {
    match broken {
        Broken::Socket(error) if is_timeout(&error) && error.get_ref().is_none() => {
            let seconds = timeout.as_secs();
            let words = if is_answering {
                format!("its answer did not end within {seconds} s")
            } else {
                format!("no answer within {seconds} s")
            };
            Broken::Socket(io::Error::new(ErrorKind::TimedOut, words))
        }
        broken => broken,
    }
}

/// Connects over TCP or to a Unix socket, and runs `session` until `done` returns true or it is
/// over, with TLS if `secure` is given: from the beginning, or when the session demands it.
///
/// # Errors
/// If the target cannot be reached, closes the connection, exceeds a timeout or breaks the
/// protocol, or the TLS handshake fails.
pub fn run_session<S: SingleStream>(
    address: &Address,
    secure: Option<Secure>,
    session: &mut S,
    timeouts: impl Into<LoginTimeouts>,
    done: impl FnMut(&S) -> bool,
) -> Result<(), Broken> {
    let timeouts = timeouts.into();
    LoginConnection::open::<EngineCore>(address, timeouts.total)?.run(secure, session, timeouts, done)
}

fn run<S: SingleStream>(
    LoginConnection { address, stream: socket }: &mut LoginConnection<'_>,
    mut secure: Option<Secure>,
    session: &mut S,
    LoginTimeouts { total, greeting }: LoginTimeouts,
    mut done: impl FnMut(&S) -> bool,
    is_answering: &mut bool,
) -> Result<(), Broken> {
    let deadline = Instant::now() + total;
    let mut greeting_due = greeting.map(|(timeout, explanation)| (Instant::now() + timeout, explanation));
    let mut notice = greeting.is_none().then(|| Instant::now() + SILENCE);
    let mut chunk = Chunk::new(Memory::from_heap(2 * MAX_DEMAND));
    let mut placed = 0;
    loop {
        let now = Instant::now();
        let mut stream = session.stream();
        if stream.poll_timeout().is_some_and(|due| now >= due) {
            stream.on_timeout(now)?;
        }
        stream.on_send(|| now);
        if !stream.outbox().is_empty() {
            *is_answering = false;
        }
        let sent = send(socket.as_mut(), &mut secure, stream.outbox());
        drop(stream);
        // A target that has answered everything may close before it receives the logout.
        if done(session) {
            return Ok(());
        }
        sent?;
        let mut stream = session.stream();
        match stream.demand() {
            Demand::Bytes(wanted) if chunk.unread().len() >= wanted => {
                let parsed = stream.on_bytes(&chunk, Instant::now())?;
                chunk.take(parsed);
            }
            Demand::Place(list) if placed == list.len() => {
                placed = 0;
                stream.on_placed(Instant::now())?;
            }
            Demand::Place(list) if !chunk.unread().is_empty() => {
                let part_len = chunk.unread().len().min(list.len() - placed);
                list.slice(placed, part_len).copy_from(&chunk.unread()[..part_len]);
                chunk.take(part_len);
                placed += part_len;
            }
            Demand::StartTls if start_tls(secure.as_mut(), &chunk)? => {}
            Demand::Bytes(_) | Demand::Place(_) | Demand::StartTls => {
                let due = stream.poll_timeout().map_or(deadline, |due| due.min(deadline));
                let due = notice.map_or(due, |notice| due.min(notice));
                let due = greeting_due.map_or(due, |(greeting, _)| due.min(greeting));
                let unread = chunk.unread().len();
                if !receive(socket.as_mut(), &mut secure, &mut chunk, (due, deadline))? {
                    return stream.on_end(Instant::now()).map_err(Broken::from);
                }
                if let Some(by) = secure.as_mut().and_then(Secure::take_peer) {
                    stream.on_secured(by, Instant::now())?;
                }
                let has_received = chunk.unread().len() > unread;
                *is_answering |= has_received;
                greeting_due = greeting_due.filter(|_| !has_received);
                if let Some((due, explanation)) = greeting_due
                    && Instant::now() >= due
                {
                    let seconds = greeting.map_or(0, |(timeout, _)| timeout.as_secs());
                    let message = format!("the server sent nothing within {seconds} s; {explanation}");
                    return Err(io::Error::new(ErrorKind::TimedOut, message).into());
                }
                if *is_answering {
                    notice = None;
                } else if notice.take_if(|notice| Instant::now() >= *notice).is_some() {
                    let (state, reason) = socket.silence();
                    warn!("{address} {state}; waiting up to {} s; {reason}", total.as_secs());
                }
            }
            Demand::Close => return Ok(()),
            Demand::Nothing => return Err(io::Error::other("the login session waits for nothing").into()),
        }
        if Instant::now() >= deadline {
            return Err(io::Error::from(ErrorKind::TimedOut).into());
        }
    }
}

/// Starts TLS, which the session demands; `false` if it has started already.
fn start_tls(secure: Option<&mut Secure>, chunk: &Chunk) -> Result<bool, Broken> {
    let secure = secure.ok_or(TlsError::Internal("this connection has no TLS credentials"))?;
    let has_started = secure.start();
    if has_started && !chunk.unread().is_empty() {
        return Err(BYTES_BEFORE_TLS.into());
    }
    Ok(has_started)
}

/// Sends the whole outbox, or with TLS as much as can be encrypted now.
fn send(
    socket: &mut dyn LoginStream,
    secure: &mut Option<Secure>,
    outbox: &mut Outbox,
) -> Result<(), Broken> {
    let Some(secure) = secure.as_mut().filter(|secure| !secure.is_plain()) else {
        return Ok(socket.send(outbox)?);
    };
    if !secure.is_open() {
        secure.take(&[], &mut Chunk::new(Memory::from_heap(1)))?;
    }
    loop {
        secure.encrypt_front(outbox)?;
        if secure.outgoing().is_empty() {
            return Ok(());
        }
        socket.write_all(&secure.outgoing().take_bytes())?;
        secure.sent(outbox);
    }
}

/// Receives once, or waits until `due`; `false` if the target has closed its side.
fn receive(
    socket: &mut dyn LoginStream,
    secure: &mut Option<Secure>,
    chunk: &mut Chunk,
    (due, deadline): (Instant, Instant),
) -> Result<bool, Broken> {
    if chunk.room() < MAX_DEMAND && !chunk.compact() {
        let mut fresh = Chunk::new(Memory::from_heap(chunk.capacity()));
        fresh.extend(chunk.unread());
        *chunk = fresh;
    }
    socket.set_read_timeout(due.saturating_duration_since(Instant::now()).max(SHORTEST_WAIT))?;
    let mut records = [0; MAX_RECORDS];
    let secure = secure.as_mut().filter(|secure| !secure.is_plain());
    let result = match secure {
        None => socket.read(chunk.spare()),
        // At most as many bytes as there is room for their plaintext.
        Some(_) => socket.read(&mut records),
    };
    match (result, secure) {
        (Ok(0), Some(secure)) if !secure.is_open() => Err(TlsError::Disconnected.into()),
        (Ok(received), Some(secure)) => {
            let result = secure.take(&records[..received], chunk);
            let sent = socket.write_all(&secure.outgoing().take_bytes());
            result?;
            sent?;
            Ok(received > 0 && !secure.has_ended())
        }
        (Ok(received), None) => {
            chunk.fill(received);
            Ok(received > 0)
        }
        // Completions of an io_uring that this thread used earlier may interrupt the call.
        (Err(error), _) if error.kind() == ErrorKind::Interrupted => Ok(true),
        // The session's own deadline has come, not the timeout.
        (Err(error), _) if is_timeout(&error) && due < deadline => Ok(true),
        (Err(error), _) => Err(error.into()),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Timeout of connecting, as that of most logins.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may be silent before that is logged.
const SILENCE: Duration = Duration::from_secs(2);
/// Bytes of TLS records received at once.
const MAX_RECORDS: usize = 16 << 10;
/// A zero timeout would mean no timeout.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::nbd::initiator::{NbdConnectError, describe};
    use blockmux_proto::nbd::client::{
        NbdFeatures, NbdHandshakeRefusal, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
    };
    use blockmux_volume::Pool;
    use socket2::{Domain, SockAddr, Socket, Type};
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn connecting_to_a_server_that_does_not_accept_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        // Fills the backlog of one.
        let _first = UnixStream::connect(&path).unwrap();
        let config = NbdInitiatorConfig {
            export: String::new(),
            mode: NbdSessionMode::Info,
            features: NbdFeatures::default(),
        };
        let mut session = NbdInitiatorSession::new(config, Pool::new(1 << 20), Instant::now());
        let timeout = Duration::from_millis(10);
        let error = run_session(&Address::Unix(path), None, &mut session, timeout, |_| false).unwrap_err();
        assert_eq!(error.to_string(), "connection failed: no answer within 0 s");
    }

    #[test]
    fn a_server_that_sends_no_greeting_is_explained() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // Connections are established, but nobody serves them.
        let _listener = UnixListener::bind(&path).unwrap();
        let config = NbdInitiatorConfig {
            export: String::new(),
            mode: NbdSessionMode::Info,
            features: NbdFeatures::default(),
        };
        let mut session = NbdInitiatorSession::new(config, Pool::new(1 << 20), Instant::now());
        let greeting = Some((Duration::from_millis(10), "it speaks another protocol"));
        let timeouts = LoginTimeouts { total: Duration::from_secs(60), greeting };
        let error = run_session(&Address::Unix(path), None, &mut session, timeouts, |_| false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "connection failed: the server sent nothing within 0 s; it speaks another protocol"
        );
    }

    #[test]
    fn the_reply_of_a_server_that_closes_at_once_is_processed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
            // Client flags, and an option without data.
            let mut option = [0; 20];
            socket.read_exact(&mut option).unwrap();
            // From now on, writing to the socket fails.
            socket.shutdown(Shutdown::Read).unwrap();
            let tls_required = [b"\0\x03\xe8\x89\x04\x55\x65\xa9", &option[12..16], b"\x80\0\0\x05\0\0\0\0"];
            socket.write_all(&tls_required.concat()).unwrap();
        });
        let error = describe(&Address::Unix(path), None, "").unwrap_err();
        assert!(
            matches!(
                &error,
                NbdConnectError::Refused { refused: NbdHandshakeRefusal::TlsRequired { .. }, .. }
            ),
            "{error}"
        );
        server.join().unwrap();
    }
}
