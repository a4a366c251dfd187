//! Who is at the other end of a Unix socket.

use rustix::fd::AsFd;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use std::io;

/// Checks that the process at the other end is ours or root's.
///
/// # Errors
/// If it is not, or the system does not say.
pub(crate) fn check_peer(stream: impl AsFd) -> io::Result<()> {
    let peer = socket_peercred(stream.as_fd())?;
    if peer.uid == geteuid() || peer.uid.is_root() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other end belongs to another user"))
}
