//! Access check of peers on Unix sockets.

use rustix::fd::AsFd;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use std::io;

/// Checks that the peer's process belongs to this user or to root.
///
/// # Errors
/// If it does not, or the system does not report it.
pub(crate) fn check_peer(stream: impl AsFd) -> io::Result<()> {
    let peer = socket_peercred(stream.as_fd())?;
    if peer.uid == geteuid() || peer.uid.is_root() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the peer belongs to another user"))
}
