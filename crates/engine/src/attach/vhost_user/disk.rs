//! A volume that front ends may connect to, one after the other.

use super::message_socket::ReceiveError;
use super::session::{FrontEndSession, SessionError};
use super::shared::{DiskShared, FrontEndProcess, MAX_DISK_MAPPINGS};
use crate::attach::{AttachError, AttachedDisk, DetachError, DiskOptions};
use crate::core::cores::Cores;
use crate::net::socket::{Address, Listener};
use crate::serve::audit::AUDIT;
use crate::sys::lost_memory::{MappingQuota, MemoryLoss};
use crate::sys::peer_process;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::volume_state::{Origin, SizeWatch};
use blockmux_volume::VolumeInfo;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use tracing::{info, warn};

/// A volume as the disk of virtual machines, at a Unix socket. Dropping it leaves the socket to the
/// end of the process.
pub struct VhostUserDisk {
    shared: Arc<DiskShared>,
    /// Wakes the thread of the socket.
    wake: Arc<OwnedFd>,
    /// The volume keeps its data when the process ends.
    keeps_data: bool,
    _size_watch: Option<SizeWatch>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl VhostUserDisk {
    /// Listens at `path`, and serves a volume of `exports` on `cores` to whoever connects. A socket
    /// without a listener is replaced.
    ///
    /// # Errors
    /// If the volume has gone, or the socket cannot be made.
    pub fn attach(
        cores: &Cores,
        exports: &Exports,
        volume: VolumeId,
        options: DiskOptions,
        path: &Path,
    ) -> Result<VhostUserDisk, AttachError> {
        let failed = |error| AttachError::Socket { path: path.to_owned(), error };
        let listener = Listener::bind(&Address::Unix(path.to_owned())).map_err(failed)?;
        let gone = || AttachError::Queue(io::ErrorKind::NotFound.into());
        let export = exports.get(volume).ok_or_else(gone)?;
        let info = export.volume.info();
        let shared = Arc::new(DiskShared {
            path: path.to_owned(),
            exports: exports.clone(),
            volume,
            info: VolumeInfo { read_only: info.read_only || export.read_only || options.read_only, ..info },
            serial: options.data.map_or_else(String::new, |data| format!("{data:016x}")),
            cores: cores.inboxes(),
            is_stopping: AtomicBool::new(false),
            has_new_size: AtomicBool::new(false),
            is_forced: AtomicBool::new(false),
            front_end: Mutex::default(),
            mappings: MappingQuota::new(MAX_DISK_MAPPINGS),
        });
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|error| failed(error.into()))?);
        let size_watch = exports.volume_state(volume).map(|volume_state| {
            let (shared, wake) = (shared.clone(), wake.clone());
            SizeWatch::begin(&volume_state, move |_| {
                shared.has_new_size.store(true, Ordering::Relaxed);
                signal(&wake);
            })
        });
        let (served, own) = (shared.clone(), wake.clone());
        let serve = move || {
            served.serve(&listener, &own);
            // The socket is free before the volume is.
            drop(listener);
        };
        let thread = thread::Builder::new().name("vhost-user".to_owned()).spawn(serve).map_err(failed)?;
        let (disk, name) = (path.display(), &export.name);
        info!(target: AUDIT, protocol = "vhost-user", %disk, volume = name, "attached");
        let thread = Mutex::new(Some(thread));
        Ok(VhostUserDisk {
            shared,
            wake,
            keeps_data: options.data.is_some(),
            _size_watch: size_watch,
            thread,
        })
    }

    /// Lets the thread of the socket end, which closes it: its requests in flight are answered,
    /// unless they are abandoned.
    fn begin_to_end(&self) {
        self.shared.is_stopping.store(true, Ordering::Relaxed);
        signal(&self.wake);
    }

    /// Ends the thread of the socket, and waits for it.
    fn end(&self, what: &str) {
        self.begin_to_end();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            if thread.join().is_err() {
                warn!("{}: the thread of the socket has panicked", self.shared.path.display());
            }
            info!(target: AUDIT, protocol = "vhost-user", disk = %self.shared.path.display(), "{what}");
        }
    }
}

impl AttachedDisk for VhostUserDisk {
    fn path(&self) -> PathBuf {
        self.shared.path.clone()
    }

    fn origin(&self) -> Origin {
        self.shared.origin()
    }

    /// The front end keeps requests that were not answered, and waits for the next process.
    fn outlives_process(&self) -> bool {
        self.keeps_data
    }

    fn check_unused(&self) -> Result<(), DetachError> {
        match self.shared.front_end() {
            Some(FrontEndProcess { id }) => {
                Err(DetachError::Connected { socket: self.shared.path.clone(), id })
            }
            None => Ok(()),
        }
    }

    fn leave(&self) {
        self.begin_to_end();
    }

    fn detach(&self) -> Result<(), DetachError> {
        if !self.shared.is_stopping.load(Ordering::Relaxed) {
            self.check_unused()?;
        }
        self.end("detached");
        Ok(())
    }

    /// The front end keeps the requests that were not answered for the next back end.
    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.shared.is_forced.store(true, Ordering::Relaxed);
        self.end("detached by force");
        Ok(())
    }
}

/// What the thread of the socket waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SocketEvent {
    /// A front end connects, or sends a message.
    Readable,
    /// The disk is to end.
    Stop,
    /// The volume may have another size.
    Size,
    /// The guest's memory is lost.
    MemoryLost,
    /// A message that has begun was not complete in time.
    Overdue,
}

impl DiskShared {
    /// Serves one front end after the other until the disk is to end.
    fn serve(&self, listener: &Listener, wake: &Arc<OwnedFd>) {
        loop {
            match self.wait(listener, wake, None, None) {
                SocketEvent::Readable => match listener.accept() {
                    Ok(stream) => {
                        let process = peer_process(stream.as_fd().as_raw_fd());
                        self.set_front_end(Some(FrontEndProcess { id: process }));
                        let socket = stream.as_fd().try_clone_to_owned().map(UnixStream::from);
                        match socket {
                            Ok(socket) => {
                                let session = FrontEndSession::new(self, socket, wake);
                                self.serve_front_end(session, process, wake);
                            }
                            Err(error) => warn!("{}: a connection fails: {error}", self.path.display()),
                        }
                        self.set_front_end(None);
                    }
                    Err(error) => {
                        warn!("{}: cannot accept a connection: {error}", self.path.display());
                        // It still waits, as for descriptors, of which there may be too few.
                        let _ = poll(&mut [PollFd::new(wake, PollFlags::IN)], Some(&ACCEPT_RETRY));
                        let _ = read(wake, &mut [0; 8]);
                    }
                },
                SocketEvent::Size | SocketEvent::MemoryLost | SocketEvent::Overdue => {}
                SocketEvent::Stop => return,
            }
        }
    }

    fn serve_front_end(&self, mut session: FrontEndSession<'_>, process: Option<u32>, wake: &OwnedFd) {
        let disk = self.path.display();
        let process = process.unwrap_or_default();
        info!(target: AUDIT, protocol = "vhost-user", %disk, process, "front end connected");
        let error = loop {
            let event = self.wait(&session.socket, wake, Some(&session.loss), session.deadline());
            let handled = match event {
                SocketEvent::Readable => session.handle_message(),
                SocketEvent::MemoryLost => Err(SessionError::MemoryLost),
                SocketEvent::Overdue => Err(ReceiveError::Overdue.into()),
                SocketEvent::Stop => return session.stop(),
                SocketEvent::Size => {
                    session.tell_size();
                    Ok(())
                }
            };
            if let Err(error) = handled {
                break error;
            }
        };
        session.lose();
        match error {
            SessionError::Receive(ReceiveError::Closed) => {
                info!(target: AUDIT, protocol = "vhost-user", %disk, process, "front end disconnected");
            }
            error => warn!("{disk}: the front end, process {process}, is disconnected: {error}"),
        }
    }

    /// Waits for a descriptor, the end, a loss of memory, or a deadline.
    fn wait(
        &self,
        readable: &impl AsFd,
        wake: &OwnedFd,
        loss: Option<&MemoryLoss>,
        deadline: Option<Instant>,
    ) -> SocketEvent {
        loop {
            if self.is_stopping.load(Ordering::Relaxed) {
                return SocketEvent::Stop;
            }
            if self.has_new_size.swap(false, Ordering::Relaxed) {
                return SocketEvent::Size;
            }
            if loss.is_some_and(MemoryLoss::is_lost) {
                return SocketEvent::MemoryLost;
            }
            let mut fds = [PollFd::new(readable, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Err(Errno::INTR) => {}
                Ok(0) => return SocketEvent::Overdue,
                Err(error) => {
                    warn!("{}: cannot wait: {error}", self.path.display());
                    return SocketEvent::Stop;
                }
                Ok(_) if !fds[0].revents().is_empty() => return SocketEvent::Readable,
                Ok(_) => {
                    let _ = read(wake, &mut [0; 8]);
                }
            }
        }
    }
}

/// The pause after a connection that cannot be accepted.
const ACCEPT_RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Wakes the thread of the socket.
fn signal(wake: &OwnedFd) {
    // The write fails only if the counter is full, and then it is readable anyway.
    let _ = write(wake, &1_u64.to_ne_bytes());
}
