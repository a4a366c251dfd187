//! Accepts connections over RDMA devices.

use super::VerbsFabric;
use super::host::VerbsHost;
use super::queues::explained;
use crate::core::reactor::{EngineCore, Inbox, Progress, Task};
use crate::fabric::FabricListener;
use crate::net::host::{Host, SocketWatch};
use crate::serve::listener::{ConnectionLimit, ListenerEnd, Serve};
use crate::sys;
use blockmux_verbs::connection::{IncomingConnection, Listener};
use blockmux_verbs::error::VerbsError;
use blockmux_verbs::survey::{has_device_with_tcp_ports, obstacle_at};
use blockmux_volume::{Core, Waker};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tracing::warn;

/// An address of RDMA devices at which this process can listen.
pub struct VerbsListener(SocketAddr);

impl FabricListener for VerbsListener {
    type Fabric = VerbsFabric;

    /// Checks that this process can listen at an IP address, or at all of them, as far as that
    /// shows without opening a device. A core does so: the kernel takes commands of RDMA only from
    /// threads with the credentials of the one that opened the device, and this thread may drop its
    /// privileges later.
    ///
    /// # Errors
    /// If rdma-core is not installed, or no device has the address.
    fn bind(address: SocketAddr) -> io::Result<VerbsListener> {
        match obstacle_at(address.ip()) {
            Some(obstacle) => Err(io::Error::other(obstacle)),
            None => Ok(VerbsListener(address)),
        }
    }

    fn takes_tcp_port(&self) -> bool {
        sys::interface_with(self.0.ip()).is_some_and(has_device_with_tcp_ports)
    }

    /// # Errors
    /// If the port is in use, or a device cannot be opened.
    fn accept(
        self,
        core: &Rc<EngineCore>,
        end: ListenerEnd,
        cores: Vec<Inbox>,
        serve: Serve<VerbsHost>,
        limit: ConnectionLimit,
    ) -> io::Result<()> {
        let address = self.0;
        let listener = Some(Listener::bind(address).map_err(explained)?);
        core.spawn(|waker| VerbsListenerTask {
            address,
            listener,
            end,
            cores,
            next_core: 0,
            serve,
            limit,
            passed: Arc::default(),
            watch: core.watch(waker),
            waker: waker.clone(),
            core: core.clone(),
        });
        Ok(())
    }
}

/// Passes connections to cores in turn.
struct VerbsListenerTask {
    address: SocketAddr,
    /// `None` while its device is removed.
    listener: Option<Listener>,
    end: ListenerEnd,
    cores: Vec<Inbox>,
    next_core: usize,
    serve: Serve<VerbsHost>,
    limit: ConnectionLimit,
    /// Connections on their way to a core.
    passed: Arc<AtomicUsize>,
    watch: SocketWatch,
    waker: Waker,
    core: Rc<EngineCore>,
}

impl VerbsListenerTask {
    /// The listener; tries to listen again if its device was removed, and later once more.
    fn listener(&mut self) -> Option<&Listener> {
        if self.listener.is_none() {
            match Listener::bind(self.address) {
                Ok(listener) => {
                    warn!(listener = %self.address, "listening again: an RDMA device has the address");
                    self.listener = Some(listener);
                }
                Err(_) => self.core.wake_at(self.core.now() + RETRY, &self.waker),
            }
        }
        self.listener.as_ref()
    }

    /// Nothing can be accepted until a device has the address again.
    fn on_removed(&mut self) {
        warn!(
            listener = %self.address,
            "the RDMA device was removed: no connections are accepted until one has the address again"
        );
        self.listener = None;
    }

    /// Passes a connection on. One that is not passed is rejected when it is dropped.
    fn pass(&mut self, incoming: IncomingConnection) {
        let Some(peer) = incoming.peer_address() else { return };
        if !self.limit.accepts((Some(peer.ip()), &peer.to_string()))
            || self.passed.load(Ordering::Relaxed) >= MAX_PASSED
        {
            return;
        }
        self.next_core = self.next_core.wrapping_add(1);
        let Some(core) = self.cores.get(self.next_core % self.cores.len().max(1)) else { return };
        self.passed.fetch_add(1, Ordering::Relaxed);
        let (passed, serve, limit) = (self.passed.clone(), self.serve.clone(), self.limit.clone());
        core.send(move |core| {
            passed.fetch_sub(1, Ordering::Relaxed);
            let host = VerbsHost::on(core);
            let Some(stream) = host.accept(incoming) else { return };
            if let Some(permit) = limit.admit_or_log(&stream) {
                serve(&host, stream, permit);
            }
        });
    }
}

impl Task for VerbsListenerTask {
    fn run(&mut self) -> Progress {
        if self.end.is_due() || self.core.is_stopping() {
            return Progress::Done;
        }
        let Some(listener) = self.listener() else { return Progress::Idle };
        match listener.accept() {
            Ok(Some(incoming)) => {
                self.pass(incoming);
                return Progress::More;
            }
            Ok(None) => {}
            Err(VerbsError::Removed) => {
                self.on_removed();
                return Progress::More;
            }
            // The request is rejected, and the next may find room.
            Err(error) => warn!("a connection over an RDMA device is refused: {error}"),
        }
        if let Some(listener) = &self.listener {
            self.watch.wake_when(&listener.as_fd(), libc::POLLIN);
        }
        Progress::Idle
    }
}

/// Connections of one listener that may be on their way to cores.
const MAX_PASSED: usize = 64;
/// How often to look for a removed device.
const RETRY: Duration = Duration::from_secs(5);
