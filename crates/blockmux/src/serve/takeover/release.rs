//! The process that serves: what it offers to one that takes over, and how it lets go.

use super::wire::{Channel, Message, Offer, SessionOffer};
use crate::failure::Failure;
use crate::serve::offer::{Offered, OfferedListener};
use crate::serve::reload::Reloader;
use crate::serve::{DaemonEvent, flush};
use blockmux_engine::departures::Departures;
use blockmux_engine::socket::ListenerHandle;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::VolumeState;
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

/// Listens to processes that want to take over, one at a time.
pub(in crate::serve) struct Successors {
    reloader: Arc<Reloader>,
    /// Those of the API.
    endpoints: Vec<OfferedListener>,
    /// Directory of reservations.
    state: Option<PathBuf>,
    events: Sender<DaemonEvent>,
    is_busy: Arc<AtomicBool>,
}

/// A process that is ready to take over.
pub(in crate::serve) struct Handover {
    channel: Channel,
    /// Every listener that it has got.
    handles: Vec<Arc<ListenerHandle>>,
    /// What ran when it got them.
    offered: String,
    _busy: Busy,
}

/// One takeover goes on until it is dropped.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Successors {
    /// What `reloader` runs can be taken over, with the listeners of the API.
    pub(in crate::serve) fn new(
        reloader: Arc<Reloader>,
        endpoints: Vec<OfferedListener>,
        state: Option<PathBuf>,
        events: Sender<DaemonEvent>,
    ) -> Successors {
        Successors { reloader, endpoints, state, events, is_busy: Arc::default() }
    }

    /// Offers everything to a process that asks by this connection. A thread waits until that
    /// process is ready.
    pub(in crate::serve) fn offer(&self, stream: UnixStream) {
        let channel = match Channel::new(stream) {
            Ok(channel) => channel,
            Err(error) => return warn!("a takeover has ended before it began: {error}"),
        };
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return refuse(&channel, "another process is taking over; try again when it has ended");
        }
        let busy = Busy(self.is_busy.clone());
        let Offered { mut listeners, volumes, text } = match self.reloader.offer() {
            Ok(offered) => offered,
            Err(reason) => return refuse(&channel, &reason),
        };
        listeners.extend(self.endpoints.iter().cloned());
        let offer = Offer { volumes, state: self.state.clone() };
        let events = self.events.clone();
        let negotiate = move || match wait_until_ready(&channel, &listeners, offer) {
            Ok(()) => {
                let handles = listeners.into_iter().map(|(_, handle)| handle).collect();
                let handover = Handover { channel, handles, offered: text, _busy: busy };
                // The daemon may be stopping.
                let _ = events.send(DaemonEvent::HandOver(Box::new(handover)));
            }
            Err(error) => warn!("the process that wanted to take over does not: {error}; this one goes on"),
        };
        if let Err(error) = thread::Builder::new().name("takeover".to_owned()).spawn(negotiate) {
            warn!("cannot start a thread for a takeover: {error}");
        }
    }
}

/// Sends what is offered, and waits for the other process to be ready.
fn wait_until_ready(channel: &Channel, listeners: &[OfferedListener], offer: Offer) -> io::Result<()> {
    for (listener, handle) in listeners {
        channel.send_with(&Message::Listener(listener.clone()), &[], Some(handle.as_fd()))?;
    }
    channel.send(&Message::Offer(offer))?;
    match channel.receive(Some(PREPARE_TIME))?.message {
        Message::Ready => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it said something else than that it is ready")),
    }
}

fn refuse(channel: &Channel, reason: &str) {
    warn!("a takeover was refused: {reason}");
    // The other process may be gone.
    let _ = channel.send(&Message::Refused { reason: reason.to_owned() });
}

impl Handover {
    /// The handover, if nothing has changed since the other process began to prepare, and every
    /// session can be handed over or comes back by itself; else the daemon goes on.
    pub(in crate::serve) fn accepted(
        self: Box<Self>,
        reloader: &Reloader,
        has_command: bool,
    ) -> Option<Box<Handover>> {
        // While clients are still served; the last flush has little to do then.
        let flushed = flush::all(&reloader.exports);
        let departures = reloader.connection_limits.departures();
        let reason = match (flushed, departures.secured()) {
            (Err(failure), _) => failure.to_string(),
            _ if has_command => "the daemon serves a command (--run)".to_owned(),
            (Ok(()), 0) if reloader.export() == self.offered => {
                info!("another process takes over");
                return Some(self);
            }
            (Ok(()), 0) => "the daemon's config has changed meanwhile; try again".to_owned(),
            (Ok(()), number) => {
                let connections = if number == 1 { "connection uses" } else { "connections use" };
                format!(
                    "{number} NBD {connections} TLS, and cannot be handed over; disconnect those clients ('ctl \
                     sessions' lists them), or restart the daemon"
                )
            }
        };
        refuse(&self.channel, &reason);
        None
    }

    /// From here on only the other process can serve.
    pub(in crate::serve) fn begin(&self, departures: &Departures) {
        departures.ask();
        self.handles.iter().for_each(|handle| handle.leave_file());
    }

    /// Tells the other process that volumes cannot be released.
    pub(in crate::serve) fn fail(&self, failure: &Failure) {
        // It may be gone.
        let _ = self.channel.send(&Message::Failed { reason: failure.to_string() });
    }

    /// Closes the volumes, which nothing else uses any more, and hands over what the other process
    /// needs. Returns when that serves.
    ///
    /// # Errors
    /// If a volume is still in use, or the other process does not serve.
    pub(in crate::serve) fn release(
        &self,
        exports: Exports,
        departures: &Departures,
        closed_within: Duration,
    ) -> Result<(), Failure> {
        let all = exports.iter().filter_map(|(id, export)| {
            let served = exports.volume_state(id)?;
            let users = (Arc::downgrade(&served), Arc::downgrade(&export.volume));
            Some((export.name.clone(), served.reservations_snapshot(), users))
        });
        let all: Vec<_> = all.collect();
        drop(exports);
        let is_used = |(served, volume): &(Weak<VolumeState>, Weak<dyn Volume>)| {
            served.strong_count() > 0 || volume.strong_count() > 0
        };
        let is_open = || all.iter().find(|(_, _, users)| is_used(users));
        let end = Instant::now() + closed_within;
        while is_open().is_some() && Instant::now() < end {
            thread::park_timeout(Duration::from_millis(1));
        }
        if let Some((name, ..)) = is_open() {
            return Err(Failure::run(format!("{name}: is still in use in this process; start it again")));
        }
        let gone = |error: io::Error| {
            Failure::run(format!(
                "the process that was to take over has ended or is stuck ({error}), and nothing is served; start it again"
            ))
        };
        for (name, snapshot, ..) in &all {
            self.channel.send_with(&Message::Volume { name: name.clone() }, snapshot, None).map_err(gone)?;
        }
        for departed in departures.take() {
            let offer = SessionOffer {
                protocol: departed.protocol.to_owned(),
                listener: departed.listener,
                peer: departed.peer,
                state_len: departed.state.len(),
            };
            let attachment = [departed.state, departed.unread].concat();
            let message = Message::Session(offer);
            self.channel.send_with(&message, &attachment, Some(departed.stream.as_fd())).map_err(gone)?;
        }
        self.channel.send(&Message::Released).map_err(gone)?;
        match self.channel.receive(Some(START_TIME)).map_err(gone)?.message {
            Message::Serving => {
                info!("the process that has taken over serves; this one ends");
                Ok(())
            }
            _ => Err(gone(io::ErrorKind::InvalidData.into())),
        }
    }
}

/// How long the other process has to check its config and to open its new volumes.
const PREPARE_TIME: Duration = Duration::from_secs(60);
/// How long it has to open the volumes that were released.
const START_TIME: Duration = Duration::from_secs(60);
