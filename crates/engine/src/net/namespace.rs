//! Network namespaces (`network_namespaces(7)`) for measuring and testing over private interfaces.
//!
//! A namespace has no name. It exists as long as its descriptor is open or a thread is in it, so
//! that it and its interfaces disappear with the process, however that ends.

use crate::sys;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// A network namespace; a clone is another handle to it.
#[derive(Clone, Debug)]
pub struct Network(Arc<OwnedFd>);

impl Network {
    /// Creates a namespace. The calling thread stays in its own.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_ADMIN`.
    pub fn new() -> io::Result<Network> {
        on_a_thread(|| {
            sys::unshare_network()?;
            Network::current()
        })?
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub fn current() -> io::Result<Network> {
        Ok(Network(Arc::new(File::open("/proc/thread-self/ns/net")?.into())))
    }

    /// Moves the calling thread into the namespace for good. A socket belongs to the namespace in
    /// which it is created; new threads and programs inherit that of the thread that starts them.
    ///
    /// # Errors
    /// As `setns(2)`.
    pub fn enter(&self) -> io::Result<()> {
        sys::enter_network(&self.0)
    }

    /// Runs `work` in the namespace, on a thread of its own, while the caller waits.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| self.enter().map(|()| work()))?
    }

    /// A path for other programs to enter the namespace, valid while this handle exists.
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
    fn only_the_given_work_runs_in_the_namespace() {
        let original = own();
        let network = match Network::new() {
            Ok(network) => network,
            Err(error) => return println!("skipped: cannot create a network namespace: {error}"),
        };
        let new = network.within(own).unwrap();
        assert_ne!(new, original);
        assert_eq!(std::fs::read_link(network.path()).unwrap(), new);
        assert_eq!(own(), original);
        assert_eq!(Network::current().unwrap().within(own).unwrap(), original);
        // A new namespace's loopback interface is down.
        let listened = network.within(|| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            std::net::TcpStream::connect(listener.local_addr()?)
        });
        assert!(listened.unwrap().is_err());
    }
}
