//! The daemon's side of a takeover: it offers its listeners and volumes, and releases them when the
//! new process is ready.

use super::wire::{Offer, SessionOffer, TakeoverConnection, TakeoverMessage};
use crate::daemon::DaemonEvent;
use crate::daemon::offer::{DaemonOffer, OfferedListener};
use crate::daemon::reload::Reloader;
use crate::failure::Failure;
use crate::volume_kinds::flush;
use blockmux_engine::net::socket::ListenerHandle;
use blockmux_engine::serve::handover::SessionHandover;
use blockmux_engine::volume::rbd::wait_until_closed;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::{StateGeneration, VolumeState};
use blockmux_volume::Volume;
use rustix::fd::AsFd;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Answers processes that want to take over, one at a time.
pub(in crate::daemon) struct TakeoverServer {
    reloader: Arc<Reloader>,
    /// The API's listeners.
    endpoints: Vec<OfferedListener>,
    /// Directory of persistent reservations.
    state: Option<PathBuf>,
    events: Sender<DaemonEvent>,
    is_busy: Arc<AtomicBool>,
}

/// A process that is ready to take over.
pub(in crate::daemon) struct Handover {
    connection: TakeoverConnection,
    /// The listeners that were sent to the new process.
    handles: Vec<Arc<ListenerHandle>>,
    /// The running config at the time of the offer, as a config file.
    offered: String,
    _busy: Busy,
}

/// Marks a takeover in progress; dropping it allows the next one.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl TakeoverServer {
    /// Offers the volumes and listeners of `reloader`, and the API's listeners.
    pub(in crate::daemon) fn new(
        reloader: Arc<Reloader>,
        endpoints: Vec<OfferedListener>,
        state: Option<PathBuf>,
        events: Sender<DaemonEvent>,
    ) -> TakeoverServer {
        TakeoverServer { reloader, endpoints, state, events, is_busy: Arc::default() }
    }

    /// Sends the offer to the process at the other end of `stream`. A new thread waits until that
    /// process is ready and then sends [`DaemonEvent::HandOver`].
    pub(in crate::daemon) fn offer(&self, stream: UnixStream) {
        let connection = match TakeoverConnection::new(stream) {
            Ok(connection) => connection,
            Err(error) => {
                return warn!("a takeover failed before it began: {error}; this daemon continues to serve");
            }
        };
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return refuse(&connection, "another process is taking over; try again when it has ended");
        }
        let busy = Busy(self.is_busy.clone());
        let DaemonOffer { mut listeners, volumes, attachments, text } = match self.reloader.offer() {
            Ok(offered) => offered,
            Err(reason) => return refuse(&connection, &reason),
        };
        listeners.extend(self.endpoints.iter().cloned());
        let offer = Offer { volumes, attachments, state: self.state.clone() };
        let (events, reloader) = (self.events.clone(), self.reloader.clone());
        let negotiate = move || match wait_until_ready(&connection, &listeners, offer) {
            Ok(()) => {
                // Files may have been moved since the offer.
                if let Err(reason) = reloader.check_paths() {
                    return refuse(&connection, &reason);
                }
                // A flush while clients are still served makes the last one short. It may hang, and
                // the main thread handles signals meanwhile.
                if let Err(failure) = flush::all(&reloader.exports) {
                    return refuse(&connection, &failure.to_string());
                }
                let handles = listeners.into_iter().map(|(_, handle)| handle).collect();
                let handover = Handover { connection, handles, offered: text, _busy: busy };
                // The daemon may be stopping.
                let _ = events.send(DaemonEvent::HandOver(Box::new(handover)));
            }
            Err(error) => warn!("the takeover failed: {error}; this daemon continues to serve"),
        };
        if let Err(error) = thread::Builder::new().name("takeover".to_owned()).spawn(negotiate) {
            warn!("cannot start a thread for a takeover: {error}");
        }
    }
}

/// Sends the offer and waits until the new process is ready.
fn wait_until_ready(
    connection: &TakeoverConnection,
    listeners: &[OfferedListener],
    offer: Offer,
) -> io::Result<()> {
    for (listener, handle) in listeners {
        connection.send_with(&TakeoverMessage::Listener(listener.clone()), &[], Some(handle.as_fd()))?;
    }
    connection.send(&TakeoverMessage::Offer(offer))?;
    match connection.receive(Some(PREPARE_TIME))?.message {
        TakeoverMessage::Ready => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the new process sent an unexpected message")),
    }
}

fn refuse(connection: &TakeoverConnection, reason: &str) {
    warn!("a takeover was refused: {reason}");
    // The new process may have ended.
    let _ = connection.send(&TakeoverMessage::Refused { reason: reason.to_owned() });
}

impl Handover {
    /// Checks that the config has not changed since the offer, that nothing hangs that uses the
    /// volumes, and that no NBD connection uses TLS: such a client does not reconnect, and its
    /// session cannot be handed over. `None` if a check fails: the new process is refused, and the
    /// daemon continues to serve.
    pub(in crate::daemon) fn accepted(
        self: Box<Self>,
        reloader: &Reloader,
        has_command: bool,
    ) -> Option<Box<Handover>> {
        let session_handover = reloader.connection_limits.limit.session_handover();
        let reason = match (reloader.under_way(), session_handover.secured()) {
            _ if has_command => "the daemon serves a command (--run)".to_owned(),
            (Some(work), _) => format!("{work}; try again when it is done"),
            (None, 0) if reloader.running_text() == self.offered => {
                info!("another process takes over");
                return Some(self);
            }
            (None, 0) => "the daemon's config has changed since the takeover began; try again".to_owned(),
            (None, number) => {
                let connections = if number == 1 { "connection uses" } else { "connections use" };
                format!(
                    "{number} NBD {connections} TLS, and cannot be handed over; disconnect those clients ('ctl \
                     sessions' lists them), or restart the daemon"
                )
            }
        };
        refuse(&self.connection, &reason);
        None
    }

    /// Starts the handover. From here on only the new process can serve.
    pub(in crate::daemon) fn begin(&self, session_handover: &SessionHandover) {
        session_handover.request();
        self.handles.iter().for_each(|handle| handle.leave_file());
    }

    /// Tells the new process that the volumes cannot be released.
    pub(in crate::daemon) fn fail(&self, failure: &Failure) {
        // The new process may have ended.
        let _ = self.connection.send(&TakeoverMessage::Failed { reason: failure.to_string() });
    }

    /// Closes the volumes and sends reservations and sessions to the new process. Returns when the
    /// new process serves.
    ///
    /// # Errors
    /// If a volume is still in use after `closed_within`, or the new process fails.
    pub(in crate::daemon) fn release(
        &self,
        exports: Exports,
        session_handover: &SessionHandover,
        closed_within: Duration,
    ) -> Result<(), Failure> {
        let all = exports.iter().filter_map(|(id, export)| {
            let served = exports.volume_state(id)?;
            let users = (Arc::downgrade(&served), Arc::downgrade(&export.volume));
            let generations = served.ownership().map(|_| {
                let all = served.served_generations();
                all.into_iter().map(|StateGeneration(generation)| generation).collect()
            });
            let message = TakeoverMessage::Volume { name: export.name.clone(), generations };
            Some((export.name.clone(), message, served.reservations_snapshot(), users))
        });
        let all: Vec<_> = all.collect();
        drop(exports);
        let is_used = |(served, volume): &(Weak<VolumeState>, Weak<dyn Volume>)| {
            served.strong_count() > 0 || volume.strong_count() > 0
        };
        let is_open = || all.iter().find(|(.., users)| is_used(users));
        let end = Instant::now() + closed_within;
        while is_open().is_some() && Instant::now() < end {
            thread::park_timeout(Duration::from_millis(1));
        }
        if let Some((name, ..)) = is_open() {
            return Err(Failure::run(format!(
                "{name}: still in use by this process; start the daemon again"
            )));
        }
        // Images of Ceph are closed by threads of their own. While one is open, it has its lock,
        // for which the new process waits in vain later.
        wait_until_closed(end.saturating_duration_since(Instant::now()));
        let gone = |error: io::Error| {
            Failure::run(format!(
                "the new process has ended or is stuck ({error}), and nothing is served; start the daemon again"
            ))
        };
        for (_, message, snapshot, _) in &all {
            self.connection.send_with(message, snapshot, None).map_err(gone)?;
        }
        for handed_over in session_handover.take() {
            let offer = SessionOffer {
                protocol: handed_over.protocol.to_owned(),
                listener: handed_over.listener,
                peer: handed_over.peer,
                state_len: handed_over.state.len(),
            };
            let attachment = [handed_over.state, handed_over.unread].concat();
            let message = TakeoverMessage::Session(offer);
            self.connection
                .send_with(&message, &attachment, Some(handed_over.stream.as_fd()))
                .map_err(gone)?;
        }
        self.connection.send(&TakeoverMessage::Released).map_err(gone)?;
        match self.connection.receive(Some(START_TIME)).map_err(gone)?.message {
            TakeoverMessage::Serving => {
                info!("the new process serves; this one ends");
                Ok(())
            }
            _ => Err(gone(io::ErrorKind::InvalidData.into())),
        }
    }
}

/// Time for the new process to check its config and to open volumes that this one does not have.
const PREPARE_TIME: Duration = Duration::from_secs(60);
/// Time for the new process to open the released volumes.
const START_TIME: Duration = Duration::from_secs(60);
