//! Accepts connections over RDMA devices.

use crate::core::reactor::{EngineCore, Inbox, Progress, Task};
use crate::net::host::{ByteStream, Host, NetworkStream, SocketWatch};
use crate::net::verbs::{VerbsHost, explained};
use crate::serve::listener::{ConnectionLimit, ListenerEnd, Serve};
use blockmux_verbs::connection::{IncomingConnection, Listener};
use blockmux_verbs::survey::obstacle_at;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tracing::warn;

/// An address of RDMA devices at which this process can listen.
pub struct VerbsListener(SocketAddr);

impl VerbsListener {
    /// Checks that this process can listen at an IP address, or at all of them, as far as that
    /// shows without opening a device. A core does so: the kernel takes commands of RDMA only from
    /// threads with the credentials of the one that opened the device, and this thread may drop its
    /// privileges later.
    ///
    /// # Errors
    /// If rdma-core is not installed, or no device has the address.
    pub fn bind(address: SocketAddr) -> io::Result<VerbsListener> {
        match obstacle_at(address.ip()) {
            Some(obstacle) => Err(io::Error::other(obstacle)),
            None => Ok(VerbsListener(address)),
        }
    }
}

/// Passes connections to cores in turn.
pub struct VerbsListenerTask {
    listener: Listener,
    end: ListenerEnd,
    cores: Vec<Inbox>,
    next_core: usize,
    serve: Serve<VerbsHost>,
    limit: ConnectionLimit,
    /// Connections on their way to a core.
    passed: Arc<AtomicUsize>,
    watch: SocketWatch,
    core: Rc<EngineCore>,
}

impl VerbsListenerTask {
    /// Accepts on `core`, which is the calling thread's, until the core stops or
    /// [`ListenerEnd::end`] is called.
    ///
    /// # Errors
    /// If the port is in use, or a device cannot be opened.
    pub fn spawn_until(
        core: &Rc<EngineCore>,
        (listener, end): (VerbsListener, ListenerEnd),
        cores: Vec<Inbox>,
        serve: Serve<VerbsHost>,
        limit: ConnectionLimit,
    ) -> io::Result<()> {
        let listener = Listener::bind(listener.0).map_err(explained)?;
        core.spawn(|waker| VerbsListenerTask {
            listener,
            end,
            cores,
            next_core: 0,
            serve,
            limit,
            passed: Arc::default(),
            watch: core.watch(waker),
            core: core.clone(),
        });
        Ok(())
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
            let hang_up = stream.hang_up();
            if let Some(permit) = limit.admit_or_log((stream.peer_ip(), stream.peer()), move || hang_up()) {
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
        match self.listener.accept() {
            Ok(Some(incoming)) => {
                self.pass(incoming);
                return Progress::More;
            }
            Ok(None) => {}
            // The request is rejected, and the next may find room.
            Err(error) => warn!("a connection over an RDMA device is refused: {error}"),
        }
        self.watch.wake_when(&self.listener.as_fd(), libc::POLLIN);
        Progress::Idle
    }
}

/// Connections of one listener that may be on their way to cores.
const MAX_PASSED: usize = 64;
