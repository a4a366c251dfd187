//! Stream sockets: addresses, connecting, listening.

use crate::net::zone;
use crate::sys;
use crate::sys::congestion::Congestion;
use crate::sys::safe_path::{self, SafePath};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Address that a stream socket listens on or connects to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix domain socket; a path that begins with NUL is in the abstract name space.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => f.pad(&zone::lasting_text(address)),
            Address::Unix(path) => match path.as_os_str().as_bytes().strip_prefix(b"\0") {
                // As `ss` and `netstat` show it.
                Some(name) => write!(f, "unix:@{}", name.escape_ascii()),
                None => write!(f, "unix:{}", path.display()),
            },
        }
    }
}

impl Address {
    /// The address that `named` means in an answer to a connection to this one.
    #[must_use]
    pub fn complete(&self, named: SocketAddr) -> SocketAddr {
        match self {
            Address::Tcp(asked) => zone::complete(named, asked),
            Address::Unix(_) => named,
        }
    }

    fn to_sock_addr(&self) -> io::Result<SockAddr> {
        match self {
            Address::Tcp(address) => Ok((*address).into()),
            Address::Unix(path) => SockAddr::unix(path),
        }
    }

    /// The path of a Unix socket's file, where no other user can lead root elsewhere.
    fn anchor(&self) -> io::Result<Option<SafePath>> {
        match self {
            Address::Unix(path) if !path.as_os_str().as_bytes().starts_with(b"\0") => {
                safe_path::anchor(path).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn socket(&self) -> io::Result<Socket> {
        let domain = match self {
            Address::Tcp(address) => Domain::for_address(*address),
            Address::Unix(_) => Domain::UNIX,
        };
        Socket::new(domain, Type::STREAM.nonblocking().cloexec(), None)
    }

    fn socket_with(&self, congestion: Option<&Congestion>) -> io::Result<Socket> {
        let socket = self.socket()?;
        if let (Address::Tcp(_), Some(congestion)) = (self, congestion) {
            congestion.set_for(&socket)?;
        }
        Ok(socket)
    }
}

/// A non-blocking stream socket that is connected or connecting.
pub struct Stream {
    /// Shared with handles that may shut the connection down.
    pub(super) socket: Arc<Socket>,
    pub(super) peer: Arc<str>,
}

impl Stream {
    /// Starts to connect; `ByteStream::connect_result` has the result once the socket is writable.
    ///
    /// # Errors
    /// If it fails at once.
    pub fn connect(address: &Address) -> io::Result<Stream> {
        Stream::connect_with(address, None)
    }

    /// Starts to connect; over TCP with this congestion control.
    ///
    /// # Errors
    /// If it fails at once, or the congestion control may not be used.
    pub fn connect_with(address: &Address, congestion: Option<&Congestion>) -> io::Result<Stream> {
        let socket = address.socket_with(congestion)?;
        match socket.connect(&address.to_sock_addr()?) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let tcp_peer = match address {
            Address::Tcp(address) => Some(address.ip()),
            Address::Unix(_) => None,
        };
        prepare(&socket, tcp_peer)?;
        if tcp_peer.is_some() {
            // A server may wait for ever, but an initiator must notice that its target is gone.
            socket.set_tcp_user_timeout(Some(ANSWER_TIMEOUT))?;
        }
        Ok(Stream { socket: Arc::new(socket), peer: address.to_string().into() })
    }

    /// A stream over an accepted socket.
    ///
    /// # Errors
    /// If the peer has disconnected already.
    pub fn accepted(socket: Socket, peer: &SockAddr) -> io::Result<Stream> {
        let tcp_peer = peer.as_socket().map(|address| address.ip());
        let peer = match peer.as_socket() {
            Some(address) => Address::Tcp(address).to_string(),
            None => match sys::peer_process(socket.as_raw_fd()) {
                Some(process) => format!("unix socket of process {process}"),
                None => "unix socket".to_owned(),
            },
        };
        socket.set_nonblocking(true)?;
        prepare(&socket, tcp_peer)?;
        Ok(Stream { socket: Arc::new(socket), peer: peer.into() })
    }

    /// A connected socket that another process has handed over.
    ///
    /// # Errors
    /// If it is no longer connected.
    pub fn handed_over(socket: OwnedFd) -> io::Result<Stream> {
        let socket = Socket::from(socket);
        let peer = socket.peer_addr()?;
        Stream::accepted(socket, &peer)
    }

    /// Whether the peer is on this machine and the congestion control paces segments, which slows
    /// down deep queues.
    #[must_use]
    pub fn paces_here(&self) -> bool {
        peer_address(&self.socket).is_some_and(|peer| paces_to(&self.socket, peer.ip()))
    }

    /// TCP's maximum segment size in bytes; `None` for a Unix socket.
    #[must_use]
    pub fn segment_len(&self) -> Option<usize> {
        let peer = peer_address(&self.socket)?;
        if local_address(&self.socket).is_some_and(|local| local.ip() == peer.ip()) {
            // TCP_MAXSEG reports half of the window while that is small, as at first.
            return Some(LOOPBACK_SEGMENT);
        }
        self.socket.tcp_mss().ok().and_then(|bytes| usize::try_from(bytes).ok())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A listening socket. A Unix socket's file is removed with it.
pub struct Listener {
    socket: Socket,
    address: Address,
    /// Identity of the Unix socket's file; `None` if the file is not this listener's.
    file: Option<FileId>,
    /// Another process owns the Unix socket's file now.
    is_handed_over: Arc<AtomicBool>,
}

/// A second handle to a listening socket, to pass it to another process.
pub struct ListenerHandle {
    socket: OwnedFd,
    owns_file: bool,
    is_handed_over: Arc<AtomicBool>,
}

impl ListenerHandle {
    /// Whether the listener removes a Unix socket's file when it is dropped.
    #[must_use]
    pub fn owns_file(&self) -> bool {
        self.owns_file
    }

    /// Makes the process that gets the socket the owner of the file.
    pub fn leave_file(&self) {
        self.is_handed_over.store(true, Ordering::Relaxed);
    }

    /// Makes this process the owner of the file.
    pub fn own_file(&self) {
        self.is_handed_over.store(false, Ordering::Relaxed);
    }
}

impl AsFd for ListenerHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Device and inode.
type FileId = (u64, u64);

impl Listener {
    /// Listens at `asked`; with TCP port 0 the system chooses a port, see [`Listener::address`]. A
    /// Unix socket file without a listener is replaced.
    ///
    /// # Errors
    /// If the address is in use, not permitted or not local.
    pub fn bind(asked: &Address) -> io::Result<Listener> {
        Listener::bind_with(asked, None)
    }

    /// Listens at `asked`; TCP connections get this congestion control.
    ///
    /// # Errors
    /// As for [`Listener::bind`], or if the congestion control may not be used.
    pub fn bind_with(asked: &Address, congestion: Option<&Congestion>) -> io::Result<Listener> {
        let socket = asked.socket_with(congestion)?;
        match asked {
            Address::Tcp(tcp) => {
                socket.set_reuse_address(true)?;
                if tcp.is_ipv6() {
                    socket.set_only_v6(true)?;
                }
            }
            Address::Unix(_) => {}
        }
        let anchor = asked.anchor()?;
        let place =
            anchor.as_ref().map_or_else(|| asked.clone(), |at| Address::Unix(at.as_path().to_owned()));
        if let Some(path) =
            anchor.as_ref().map(SafePath::as_path).filter(|path| is_stale_socket(&place, path))
        {
            std::fs::remove_file(path)?;
        }
        socket.bind(&place.to_sock_addr()?)?;
        let (address, file) = match asked {
            Address::Tcp(_) => (socket.local_addr()?.as_socket().map(Address::Tcp), None),
            Address::Unix(_) => (None, anchor.as_ref().and_then(|at| file_at(at.as_path()))),
        };
        let address = address.unwrap_or_else(|| asked.clone());
        // From here on the file of a Unix socket is removed with it.
        let listener = Listener { socket, address, file, is_handed_over: Arc::default() };
        listener.socket.listen(BACKLOG)?;
        Ok(listener)
    }

    /// Takes over a listening socket of another process. The file of a Unix socket is kept when the
    /// listener is dropped.
    ///
    /// # Errors
    /// If it is not a listening stream socket of TCP or the Unix domain.
    pub fn inherited(socket: OwnedFd) -> io::Result<Listener> {
        let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
        let socket = Socket::from(socket);
        if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
            return Err(refused("it is not a listening stream socket"));
        }
        socket.set_nonblocking(true)?;
        let local = socket.local_addr()?;
        let address = match (local.as_socket(), local.as_pathname(), local.as_abstract_namespace()) {
            (Some(tcp), _, _) => Address::Tcp(tcp),
            (_, Some(path), _) => Address::Unix(path.to_owned()),
            (_, _, Some(name)) => Address::Unix(OsStr::from_bytes(&[b"\0", name].concat()).into()),
            _ => return Err(refused("it has no address")),
        };
        Ok(Listener { socket, address, file: None, is_handed_over: Arc::default() })
    }

    /// Takes over a listening Unix socket of another process, with its file at `path`. The file is
    /// removed when the listener is dropped, but only after [`ListenerHandle::own_file`].
    ///
    /// # Errors
    /// As for [`Listener::inherited`].
    pub fn inherited_with_file(socket: OwnedFd, path: &Path) -> io::Result<Listener> {
        let mut listener = Listener::inherited(socket)?;
        if let Address::Unix(own) = &mut listener.address {
            // Its address may lead through a descriptor of that process.
            path.clone_into(own);
            listener.file = safe_path::anchor(path).ok().and_then(|at| file_at(at.as_path()));
            listener.is_handed_over.store(true, Ordering::Relaxed);
        }
        Ok(listener)
    }

    /// A second handle to the socket.
    ///
    /// # Errors
    /// If the process cannot open another file descriptor.
    pub fn handle(&self) -> io::Result<ListenerHandle> {
        Ok(ListenerHandle {
            socket: self.socket.as_fd().try_clone_to_owned()?,
            owns_file: self.file.is_some(),
            is_handed_over: self.is_handed_over.clone(),
        })
    }

    /// The address with the actual port.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts a connection; `WouldBlock` if there is none.
    ///
    /// # Errors
    /// As `accept(2)`.
    pub fn accept(&self) -> io::Result<Stream> {
        let (socket, peer) = self.socket.accept()?;
        Stream::accepted(socket, &peer)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file may be gone. A file that another process has put in its place is kept.
        let is_ours = self.file.is_some() && !self.is_handed_over.load(Ordering::Relaxed);
        if let Some(at) = self.address.anchor().ok().flatten().filter(|_| is_ours)
            && file_at(at.as_path()) == self.file
        {
            let _ = std::fs::remove_file(at.as_path());
        }
    }
}

/// Whether the file is a socket without a listener. Nothing else is ever replaced.
fn is_stale_socket(address: &Address, path: &Path) -> bool {
    // Non-blocking, because a listener may be slow to accept.
    let connect = || address.socket()?.connect(&address.to_sock_addr()?);
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
        && connect().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Device and inode of the socket file at `path`.
fn file_at(path: &Path) -> Option<FileId> {
    let found = std::fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket());
    found.map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Sets the options of a connection's socket. `tcp_peer` is the peer's address, `None` for a Unix
/// socket.
fn prepare(socket: &Socket, tcp_peer: Option<IpAddr>) -> io::Result<()> {
    if let Some(peer) = tcp_peer {
        // A reply must not wait for the next one (proto.md, "Protocol phases").
        socket.set_tcp_nodelay(true)?;
        // Detects a dead peer within minutes.
        let keepalive =
            socket2::TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
        SockRef::from(socket).set_tcp_keepalive(&keepalive)?;
        if paces_to(socket, peer) {
            // The kernel doubles the value.
            let _ = socket.set_send_buffer_size(PACED_BUFFER / 2);
        }
    } else {
        // The default of Unix sockets holds one 128 KiB message; two large replies keep both sides
        // busy.
        let _ = socket.set_send_buffer_size(UNIX_BUFFER);
    }
    Ok(())
}

/// The address of this side; `None` for a Unix socket.
pub(super) fn local_address(socket: &Socket) -> Option<SocketAddr> {
    socket.local_addr().ok()?.as_socket()
}

/// The peer's address; `None` for a Unix socket.
pub(super) fn peer_address(socket: &Socket) -> Option<SocketAddr> {
    socket.peer_addr().ok()?.as_socket()
}

fn paces_to(socket: &Socket, peer: IpAddr) -> bool {
    local_address(socket).is_some_and(|local| local.ip() == peer)
        && Congestion::of(socket).is_some_and(|congestion| congestion.paces())
}

const BACKLOG: i32 = 1024;
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How long sent data may stay unacknowledged; the kernel's default is a quarter of an hour.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
const UNIX_BUFFER: usize = 1 << 20;
/// Send buffer of a pacing sender on loopback, in bytes. A larger one is slower: see decision 36.
pub const PACED_BUFFER: usize = 1 << 20;
/// Maximum segment size on loopback, in bytes: the MTU of 65,536 bytes without the headers of IPv6
/// and of TCP with timestamps.
const LOOPBACK_SEGMENT: usize = 65_536 - 40 - 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::host::{ByteStream, NetworkStream, StreamEnd};
    use blockmux_volume::{Chunk, Memory};
    use std::net::Shutdown;

    #[test]
    fn a_stale_unix_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Unix(dir.path().join("socket"));
        // As after a kill: the file exists, the socket does not.
        drop(std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap());
        let _live = Listener::bind(&address).unwrap();
        assert_eq!(Listener::bind(&address).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_listener_of_another_process_is_taken_over_with_its_address_and_its_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let unix = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = tcp.local_addr().unwrap();
        let inherited = Listener::inherited(tcp.into()).unwrap();
        assert_eq!(*inherited.address(), Address::Tcp(at));
        let _client = std::net::TcpStream::connect(at).unwrap();
        assert!(inherited.accept().is_ok());
        let inherited = Listener::inherited(unix.into()).unwrap();
        assert_eq!(*inherited.address(), Address::Unix(path.clone()));
        assert_eq!(inherited.accept().err().unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(inherited);
        assert!(path.exists());
        let connected = std::os::unix::net::UnixStream::pair().unwrap().0;
        assert!(Listener::inherited(connected.into()).is_err());
    }

    #[test]
    fn the_file_of_a_socket_belongs_to_the_process_that_has_it_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let first = Listener::bind(&Address::Unix(path.clone())).unwrap();
        let handle = first.handle().unwrap();
        assert!(handle.owns_file());
        let second =
            Listener::inherited_with_file(handle.as_fd().try_clone_to_owned().unwrap(), &path).unwrap();
        handle.leave_file();
        second.handle().unwrap().own_file();
        drop((first, handle));
        let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let stream = second.accept().unwrap();
        let moved = Stream::handed_over(stream.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(moved.peer().starts_with("unix socket"));
        drop((stream, moved, client));
        drop(second);
        assert!(!path.exists());
        let first = Listener::bind(&Address::Unix(path.clone())).unwrap();
        let fd = first.as_fd().try_clone_to_owned().unwrap();
        drop(Listener::inherited_with_file(fd, &path).unwrap());
        assert!(path.exists(), "the new process has not made itself the owner");
    }

    #[test]
    fn a_connection_that_was_shut_down_has_ended_for_both_sides() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let Address::Tcp(address) = *listener.address() else { panic!("it listens on TCP") };
        let mut peer = std::net::TcpStream::connect(address).unwrap();
        let stream = listener.accept().unwrap();
        assert_eq!(stream.local_address(), Some(address));
        assert_eq!(stream.ended(), StreamEnd::Not);
        peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.ended(), StreamEnd::Input);
        let hang_up = stream.hang_up();
        std::thread::spawn(move || hang_up()).join().unwrap();
        assert_eq!(io::Read::read(&mut peer, &mut [0]).unwrap(), 0);
        assert_eq!(stream.ended(), StreamEnd::Both);
        let mut chunk = Chunk::new(Memory::from_heap(4096));
        assert_eq!(sys::recv_chunk(stream.as_fd().as_raw_fd(), &mut chunk, 1).unwrap(), 0);
    }

    #[test]
    fn a_pacing_socket_on_loopback_has_a_small_send_buffer() {
        let any_port = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let ends = |name: &str| {
            let congestion: Congestion = name.parse().unwrap();
            let listener = Listener::bind_with(&any_port, Some(&congestion)).ok()?;
            let client = Stream::connect_with(listener.address(), Some(&congestion)).unwrap();
            Some([listener.accept().unwrap(), client])
        };
        // Every kernel has `reno`, and every user may choose it.
        assert!(
            ends("reno").unwrap().iter().all(|end| end.socket.send_buffer_size().unwrap() != PACED_BUFFER)
        );
        let Some(paced) = ends("bbr") else {
            println!("skipped: the kernel has no bbr, or does not permit it to all users");
            return;
        };
        for end in paced {
            assert_eq!(end.socket.send_buffer_size().unwrap(), PACED_BUFFER);
        }
    }

    #[test]
    fn a_listener_that_does_not_accept_is_live_too() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Unix(dir.path().join("socket"));
        let live = Listener::bind(&address).unwrap();
        live.socket.listen(0).unwrap();
        let _waiting: Vec<_> = (0..2).map(|_| Stream::connect(&address)).collect();
        assert_eq!(Listener::bind(&address).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_socket_file_that_has_replaced_ours_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = Address::Unix(path.clone());
        let first = Listener::bind(&address).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::bind(&address).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(Listener::bind(&Address::Unix(path.clone())).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }
}
