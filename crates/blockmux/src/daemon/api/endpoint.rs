//! The listeners of the API, and the access check of each.

use super::REQUEST_TIMEOUT;
use super::tls::TlsStream;
use crate::api::{ControlPath, check_peer, tls_error};
use crate::daemon::access::{RequiredCredentials, RequiredTls, plain_warning, tcp_address};
use crate::daemon::config_audit::Caller;
use crate::daemon::inherited::InheritedListeners;
use crate::daemon::offer::{API, CONTROL, ListenerOffer, OfferedListener};
use crate::daemon::role::Role;
use crate::failure::Failure;
use crate::protocol::address::ApiListener;
use blockmux_engine::carrier::tls::TlsPeer;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::net::zone;
use blockmux_engine::serve::audit::AUDIT;
use blockmux_engine::sys::safe_path;
use blockmux_proto::names::networks::AllowedNetworks;
use rustix::fd::AsFd;
use rustix::fs::Mode;
use rustix::process::{geteuid, umask};
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time;
use tracing::warn;

/// A listener of the API.
pub(in crate::daemon) struct Endpoint {
    pub(super) listener: Listener,
    /// The configured address; its port may be 0.
    asked: String,
    pub(super) guard: Arc<Guard>,
}

/// The access check of an endpoint.
pub(super) enum Guard {
    /// Allows processes of the daemon's user and of root.
    Owner,
    /// Allows clients in these networks that have the current credentials.
    Network(AllowedNetworks, CurrentCredentials),
}

/// The credentials that clients need now. A reload replaces them.
pub(in crate::daemon) type CurrentCredentials = watch::Receiver<Arc<RequiredCredentials>>;

/// A client of the API.
pub(super) struct ApiPeer {
    /// For the log.
    pub(super) caller: Caller,
    /// Its role, which its token may lower.
    pub(super) role: Role,
    /// What it needed when it connected. Its connection ends when they are replaced. `None` at the
    /// Unix socket.
    pub(super) credentials: Option<Arc<RequiredCredentials>>,
    /// Why its requests are refused, if they are.
    pub(super) refusal: Option<String>,
}

/// A listener of the API's asynchronous runtime.
pub(super) enum AnyListener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// A new connection of an API client.
pub(super) enum AcceptedStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A connection of an API client that was admitted, with TLS or without.
pub(super) type AnyStream = Box<dyn ApiStream>;

/// What a connection of an API client does.
pub(super) trait ApiStream: AsyncRead + AsyncWrite + AsFd + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + AsFd + Send + Unpin> ApiStream for T {}

impl Endpoint {
    /// The URL of a TCP endpoint; `None` for a Unix socket.
    pub(in crate::daemon) fn url(&self) -> Option<String> {
        match self.listener.address() {
            Address::Tcp(address) => {
                let scheme = if self.guard.has_tls() { "https" } else { "http" };
                Some(format!("{scheme}://{}:{}/", zone::url_host(address), address.port()))
            }
            Address::Unix(_) => None,
        }
    }

    /// The listener and its socket, for a process that takes over.
    ///
    /// # Errors
    /// If the file descriptor cannot be duplicated.
    pub(in crate::daemon) fn offer(&self) -> Result<OfferedListener, Failure> {
        let handle = self.listener.handle().map_err(|error| {
            Failure::run(format!("{}: {error}; raise the limit of open files", self.listener.address()))
        })?;
        let kind = match *self.guard {
            Guard::Owner => CONTROL,
            Guard::Network(..) => API,
        };
        let (asked, owns_file) = (self.asked.clone(), handle.owns_file());
        let offer = ListenerOffer { kind: kind.to_owned(), asked, owns_file, manager_name: None };
        Ok((offer, Arc::new(handle)))
    }
}

/// Listens on a Unix socket in a directory that no other user can write to.
///
/// # Errors
/// If other users can write to the directory, or the socket cannot be bound.
pub(in crate::daemon) fn bind_control(
    path: &ControlPath,
    inherited: &mut InheritedListeners,
) -> Result<Endpoint, Failure> {
    let path = &path.0;
    let asked = path.display().to_string();
    let cannot = |reason: &str| {
        Failure::request(format!("cannot serve the API at {}: {reason}; check --control", path.display()))
    };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let in_directory = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::request(format!(
            "cannot serve the API at {}: its directory does not exist; `mkdir -p -m 700 {}` makes it",
            path.display(),
            parent.display()
        )),
        _ => cannot(&format!("its directory: {error}")),
    };
    let directory = safe_path::stat(parent).map_err(in_directory)?;
    let is_ours = directory.st_uid == geteuid().as_raw() || directory.st_uid == ROOT;
    if !is_ours || directory.st_mode & OTHERS_WRITE != 0 {
        return Err(cannot("other users can write to its directory; use a private one (chmod 700)"));
    }
    if safe_path::anchor(path).map_err(in_directory)?.is_foreign() {
        return Err(cannot("another user owns a directory above it; use one below directories of root's"));
    }
    if let Some(listener) = inherited.take_offered(CONTROL, &asked) {
        return Ok(Endpoint { listener, asked, guard: Arc::new(Guard::Owner) });
    }
    // The umask keeps other users from connecting before the permissions are set.
    let before = umask(Mode::from_raw_mode(0o177));
    let bound = Listener::bind(&Address::Unix(path.clone()));
    umask(before);
    let listener = bound.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => cannot("the path is already in use"),
        _ => cannot(&error.to_string()),
    })?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|error| cannot(&error.to_string()))?;
    Ok(Endpoint { listener, asked, guard: Arc::new(Guard::Owner) })
}

/// Listens on a TCP address for clients with these credentials.
///
/// # Errors
/// If the address cannot be bound.
pub(in crate::daemon) fn bind_tcp(
    listener: &ApiListener,
    credentials: CurrentCredentials,
    inherited: &mut InheritedListeners,
) -> Result<Endpoint, Failure> {
    let address = tcp_address(listener)?;
    let networks = &listener.networks;
    if let Some(warning) = plain_warning(listener, &credentials.borrow()) {
        warn!("{warning}");
    }
    let asked = address.to_string();
    let bound = match inherited.take_offered(API, &asked) {
        Some(listener) => Ok(listener),
        None => Listener::bind(&address),
    };
    let listener = bound.map_err(|error| {
        Failure::request(format!("cannot serve the API at {address}: {error}; check --api"))
    })?;
    let guard = Arc::new(Guard::Network(networks.clone(), credentials));
    Ok(Endpoint { listener, asked, guard })
}

impl Guard {
    fn has_tls(&self) -> bool {
        match self {
            Guard::Owner => false,
            Guard::Network(_, credentials) => credentials.borrow().tls.is_some(),
        }
    }

    /// Checks the peer of a new connection, and completes the TLS handshake if there is TLS.
    /// Returns the stream, the peer, and what tells when other credentials replace those that the
    /// peer was checked with.
    ///
    /// # Errors
    /// If the peer is not allowed to connect, or the handshake fails.
    pub(super) async fn admit(
        &self,
        stream: AcceptedStream,
    ) -> io::Result<(AnyStream, ApiPeer, Option<CurrentCredentials>)> {
        let caller = self.check(&stream)?;
        let mut current = match self {
            Guard::Owner => {
                let peer = ApiPeer { caller, role: Role::Administer, credentials: None, refusal: None };
                return Ok((stream.into_any(), peer, None));
            }
            Guard::Network(_, current) => current.clone(),
        };
        let credentials = current.borrow_and_update().clone();
        let (stream, caller, granted) = match (&credentials.tls, stream, caller) {
            (Some(tls), AcceptedStream::Tcp(socket), Caller::Client { address, .. }) => {
                let stream = accept_tls(tls, socket, &address).await?;
                let granted = tls.role(stream.peer());
                let subject = match stream.peer() {
                    TlsPeer::Certificate(subject) => Some(subject.clone()),
                    _ => None,
                };
                let stream: AnyStream = Box::new(stream);
                (stream, Caller::Client { address, subject, token: None }, granted)
            }
            (_, stream, caller) => (stream.into_any(), caller, Ok(Role::Administer)),
        };
        // A refused client gets no role.
        let (role, refusal) = granted.map_or_else(|why| (Role::Read, Some(why)), |role| (role, None));
        Ok((stream, ApiPeer { caller, role, credentials: Some(credentials), refusal }, Some(current)))
    }

    /// Checks where a connection comes from; returns the peer for the log.
    fn check(&self, stream: &AcceptedStream) -> io::Result<Caller> {
        match (self, stream) {
            (Guard::Owner, AcceptedStream::Unix(stream)) => {
                check_peer(stream)?;
                let peer = stream.peer_cred()?;
                Ok(Caller::Process { uid: peer.uid(), pid: peer.pid() })
            }
            (Guard::Network(networks, _), AcceptedStream::Tcp(stream)) => {
                let address = stream.peer_addr()?;
                let peer = Address::Tcp(address);
                if networks.admits(Some(address.ip())) {
                    return Ok(Caller::Client { address: peer.to_string(), subject: None, token: None });
                }
                let reason = "the `allow` list of the API does not have this address";
                warn!(target: AUDIT, protocol = "api", %peer, "connection refused: {reason}");
                Err(io::ErrorKind::PermissionDenied.into())
            }
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}

/// Completes the TLS handshake with a client; `name` is for the log.
async fn accept_tls(tls: &RequiredTls, socket: TcpStream, name: &str) -> io::Result<TlsStream> {
    let accepted = time::timeout(REQUEST_TIMEOUT, TlsStream::accept(socket, &tls.certificates)).await?;
    accepted.inspect_err(|error| {
        if let Some(why) = tls_error(error) {
            warn!(target: AUDIT, protocol = "api", peer = %name, "connection refused: the peer {why}");
        }
    })
}

impl fmt::Display for ApiPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.caller.fmt(f)
    }
}

impl AcceptedStream {
    /// The client's address; `None` for a Unix socket.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        match self {
            AcceptedStream::Tcp(stream) => stream.peer_addr().ok().map(|peer| peer.ip()),
            AcceptedStream::Unix(_) => None,
        }
    }

    fn into_any(self) -> AnyStream {
        match self {
            AcceptedStream::Unix(stream) => Box::new(stream),
            AcceptedStream::Tcp(stream) => Box::new(stream),
        }
    }
}

impl AnyListener {
    /// Duplicates a listener for the API's runtime.
    ///
    /// # Errors
    /// If the file descriptor cannot be duplicated.
    pub(super) fn of(listener: &Listener) -> io::Result<AnyListener> {
        let socket = listener.as_fd().try_clone_to_owned()?;
        Ok(match listener.address() {
            Address::Unix(_) => AnyListener::Unix(UnixListener::from_std(socket.into())?),
            Address::Tcp(_) => AnyListener::Tcp(TcpListener::from_std(socket.into())?),
        })
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// The errors of accept(2).
    pub(super) async fn accept(&self) -> io::Result<AcceptedStream> {
        match self {
            AnyListener::Unix(listener) => Ok(AcceptedStream::Unix(listener.accept().await?.0)),
            AnyListener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(AcceptedStream::Tcp(stream))
            }
        }
    }
}

const ROOT: u32 = 0;
/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;
