//! Networks apart from the machine's own (`network_namespaces(7)`): for measuring and testing over
//! interfaces that nobody else uses.
//!
//! Such a network has no name. It lives for as long as somebody holds its descriptor or a thread is
//! in it, so that it and the interfaces in it are gone with the process, however that ends: nothing
//! is left to be cleaned up.

use crate::sys;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// A network; a clone is the same.
#[derive(Clone, Debug)]
pub struct Network(Arc<OwnedFd>);

impl Network {
    /// Makes one. The calling thread stays where it is.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_ADMIN`.
    pub fn new() -> io::Result<Network> {
        let made = on_a_thread(|| {
            sys::unshare_network()?;
            File::open("/proc/thread-self/ns/net")
        })??;
        Ok(Network(Arc::new(made.into())))
    }

    /// Puts the calling thread into it for good. Sockets belong to the network that they are made
    /// in, and threads and programs begin in that of the thread that starts them.
    ///
    /// # Errors
    /// As `setns(2)`.
    pub fn enter(&self) -> io::Result<()> {
        sys::enter_network(&self.0)
    }

    /// Runs something in it, on a thread of its own, while the caller waits.
    ///
    /// # Errors
    /// If it cannot be entered.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| self.enter().map(|()| work()))?
    }

    /// By which programs find it, for as long as it is held here.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("network".to_owned()).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| io::Error::other("a thread in another network has panicked"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    fn own() -> PathBuf {
        std::fs::read_link("/proc/thread-self/ns/net").unwrap()
    }

    #[test]
    fn what_is_done_within_is_done_there_and_nowhere_else() {
        let here = own();
        let network = match Network::new() {
            Ok(network) => network,
            Err(error) => return println!("skipped: no network of our own: {error}"),
        };
        let there = network.within(own).unwrap();
        assert_ne!(there, here);
        assert_eq!(std::fs::read_link(network.path()).unwrap(), there);
        assert_eq!(own(), here);
        // Its loopback interface is down.
        let listened = network.within(|| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            std::net::TcpStream::connect(listener.local_addr()?)
        });
        assert!(listened.unwrap().is_err());
    }
}
