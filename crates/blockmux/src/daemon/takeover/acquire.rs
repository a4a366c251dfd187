//! The new process of a takeover: it receives listeners, sessions and reservations from the daemon.

use super::wire::{Offer, PATH, Received, SessionOffer, TakeoverConnection, TakeoverMessage, UPGRADE};
use crate::api::client::{ApiCredentials, CallError, Client};
use crate::api::{ApiAddress, ControlPath};
use crate::daemon::config::current_directory;
use crate::daemon::inherited::InheritedListeners;
use crate::daemon::offer::ListenerOffer;
use crate::daemon::opening::KnownVolumes;
use crate::daemon::reload::Reloader;
use crate::daemon::setup::Setup;
use crate::daemon::state::KnownTurn;
use crate::data::part::DataPart;
use crate::failure::Failure;
use crate::process::privileges::ServiceUser;
use crate::protocol::frontend::HandedSession;
use blockmux_engine::net::host::ByteStream;
use blockmux_engine::net::socket::{Listener, ListenerHandle, Stream};
use blockmux_proto::exports::Exports;
use rustix::fd::OwnedFd;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;
use tracing::{info, warn};

/// A takeover in progress, on the side of the new process.
pub(in crate::daemon) struct Takeover {
    connection: TakeoverConnection,
    offer: Offer,
    /// The daemon runs as this user or as root.
    is_trusted: bool,
    /// Unix listeners whose socket files this process removes at its end, once the daemon has
    /// released its volumes.
    files: Vec<(ListenerOffer, ListenerHandle)>,
    reservations: BTreeMap<String, Vec<u8>>,
    /// The images that one daemon owns at a time, by the name of the volume.
    turns: BTreeMap<String, KnownTurn>,
    sessions: Vec<HandedSession>,
}

impl Takeover {
    /// Requests the listeners of the daemon that has the control socket `path` and adds them to
    /// `inherited`; `None` if no daemon listens there.
    ///
    /// # Errors
    /// If the daemon does not answer, runs as a user other than this one, `user` or root, or
    /// refuses.
    pub(in crate::daemon) fn ask(
        path: &ControlPath,
        user: Option<&ServiceUser>,
        inherited: &mut InheritedListeners,
    ) -> Result<Option<Takeover>, Failure> {
        let client = Client::new(ApiAddress::Unix(path.clone()), ApiCredentials::default());
        let stream = match client.upgrade(PATH, UPGRADE) {
            Ok(Some(stream)) => stream,
            Ok(None) => {
                info!(
                    "--takeover {}: no daemon listens there; starting without a takeover",
                    path.0.display()
                );
                return Ok(None);
            }
            Err(CallError::NoAnswer(failure)) => return Err(failure),
            Err(CallError::Refused(error)) => {
                return Err(Failure::request(format!("--takeover {}: {error}", path.0.display())));
            }
        };
        let cannot = |what: String| Failure::request(format!("--takeover {}: {what}", path.0.display()));
        let peer = socket_peercred(&stream).map_err(|error| cannot(error.to_string()))?.uid;
        let is_ours = peer == geteuid() || peer.is_root();
        if !is_ours && user.is_none_or(|user| user.uid != peer.as_raw()) {
            return Err(cannot(
                "the daemon runs as another user; run this command as that user, or with --user".to_owned(),
            ));
        }
        let lost =
            |error: io::Error| cannot(format!("the daemon has ended or is stuck ({error}); see its log"));
        let connection = TakeoverConnection::new(stream).map_err(lost)?;
        let mut files = Vec::new();
        loop {
            let Received { message, socket, .. } = connection.receive(Some(OFFER_TIME)).map_err(lost)?;
            match (message, socket) {
                (TakeoverMessage::Listener(offered), Some(socket)) => {
                    let unusable = |error: io::Error| cannot(format!("{}: {error}", offered.asked));
                    let listener = inherit(&offered, socket, &mut files).map_err(unusable)?;
                    inherited.offer(offered.kind, offered.asked, offered.manager_name, listener);
                }
                (TakeoverMessage::Offer(offer), _) => {
                    return Ok(Some(Takeover {
                        connection,
                        offer,
                        is_trusted: is_ours,
                        files,
                        reservations: BTreeMap::new(),
                        turns: BTreeMap::new(),
                        sessions: Vec::new(),
                    }));
                }
                (TakeoverMessage::Refused { reason }, _) => return Err(cannot(reason)),
                _ => return Err(lost(io::ErrorKind::InvalidData.into())),
            }
        }
    }

    /// The names of the daemon's volumes.
    pub(in crate::daemon) fn names(&self) -> BTreeSet<String> {
        self.offer.volumes.iter().map(|volume| volume.name.clone()).collect()
    }

    /// Checks that this process would serve every volume of the daemon, with the same spec and
    /// data, attach the same disks, and use the same directory of reservations.
    ///
    /// # Errors
    /// Names the first difference and what to change.
    pub(in crate::daemon) fn check(&self, setup: &Setup) -> Result<(), Failure> {
        for offered in &self.offer.volumes {
            let name = &offered.name;
            let Some(named) = setup.volumes.iter().find(|named| named.name == *name) else {
                return Err(Failure::request(format!(
                    "--takeover: the daemon serves `{name}`, and this config does not; add the volume here, or remove \
                     it from the daemon first ('ctl remove', then 'ctl save')"
                )));
            };
            let spec = named.entry.spec.clone().below(&current_directory()).to_string();
            if spec != offered.spec || DataPart::keys_of_spec(&named.entry.spec) != offered.data {
                return Err(Failure::request(format!(
                    "--takeover: `{name}` is {} for the daemon, and {spec} here; use the same spec, or restart the \
                     daemon instead",
                    offered.spec
                )));
            }
        }
        let is_attached = |volume: &String| setup.attachments.iter().any(|asked| asked.volume == *volume);
        if let Some(volume) = self.offer.attachments.iter().find(|volume| !is_attached(volume)) {
            return Err(Failure::request(format!(
                "--takeover: the daemon has attached `{volume}` as a disk, which this config does not; add an \
                 [[attachment]] here, or detach the disk first ('ctl detach-disk', then 'ctl save')"
            )));
        }
        if self.offer.state != setup.state {
            let shown = |path: &Option<std::path::PathBuf>| match path {
                Some(path) => path.display().to_string(),
                None => "none".to_owned(),
            };
            return Err(Failure::request(format!(
                "--takeover: the daemon keeps reservations in {}, and this config in {}; use the same --state",
                shown(&self.offer.state),
                shown(&setup.state)
            )));
        }
        Ok(())
    }

    /// Tells the daemon to release its volumes and waits until it has closed them; receives its
    /// sessions and reservations. `inherited` has the listeners that this process did not take.
    ///
    /// # Errors
    /// If the daemon refuses, fails or ends.
    pub(in crate::daemon) fn wait_for_release(
        &mut self,
        inherited: &InheritedListeners,
    ) -> Result<(), Failure> {
        let cannot = |what: String| Failure::request(format!("--takeover: {what}"));
        let lost = |error: io::Error| {
            cannot(format!(
                "the daemon has ended before it released its volumes ({error}); run this command again"
            ))
        };
        self.connection.send(&TakeoverMessage::Ready).map_err(lost)?;
        loop {
            let Received { message, attachment, socket } =
                self.connection.receive(Some(RELEASE_TIME)).map_err(lost)?;
            match (message, socket) {
                (TakeoverMessage::Volume { name, generations: None }, _) => {
                    self.reservations.insert(name, attachment);
                }
                (TakeoverMessage::Volume { name, generations: Some(generations) }, _) => {
                    self.turns.insert(name, KnownTurn { generations, reservations: attachment });
                }
                (
                    TakeoverMessage::Session(SessionOffer { protocol, listener, peer, state_len }),
                    Some(socket),
                ) => {
                    let mut state = attachment;
                    let unread = state.split_off(state_len.min(state.len()));
                    match Stream::handed_over(socket) {
                        Ok(stream) => {
                            self.sessions.push(HandedSession { protocol, listener, stream, unread, state });
                        }
                        // For example because the client has disconnected.
                        Err(error) => info!("{peer}: the session cannot continue: {error}"),
                    }
                }
                (TakeoverMessage::Released, _) => break,
                (TakeoverMessage::Refused { reason } | TakeoverMessage::Failed { reason }, _) => {
                    return Err(cannot(reason));
                }
                _ => return Err(lost(io::ErrorKind::InvalidData.into())),
            }
        }
        for (offered, file) in self.files.drain(..) {
            // Root removes no file at a path that only the daemon's user has named.
            if self.is_trusted || !inherited.is_offered(&offered.kind, &offered.asked) {
                file.own_file();
            }
        }
        Ok(())
    }

    /// The daemon's volumes, once it has released them: this process must report the same UUIDs to
    /// initiators, and serve the images that the daemon has served.
    pub(in crate::daemon) fn known_volumes(&mut self) -> KnownVolumes {
        let all = self.offer.volumes.iter();
        let uuids = all.filter_map(|volume| Some((volume.name.clone(), volume.uuid.as_ref()?.parse().ok()?)));
        KnownVolumes { uuids: uuids.collect(), turns: std::mem::take(&mut self.turns) }
    }

    /// Restores the daemon's persistent reservations, but not those of images that one daemon owns
    /// at a time, which are restored as these are opened.
    ///
    /// # Errors
    /// If they cannot be parsed. Without them, initiators that a reservation excludes would have
    /// access.
    pub(in crate::daemon) fn restore(&mut self, exports: &Exports) -> Result<(), Failure> {
        for (name, snapshot) in std::mem::take(&mut self.reservations) {
            let served = exports.find(&name).and_then(|(id, _)| exports.volume_state(id));
            served.map_or(Ok(()), |served| served.restore_reservations(&snapshot)).map_err(|error| {
                Failure::request(format!("--takeover: the daemon's reservation data of `{name}` {error}"))
            })?;
        }
        Ok(())
    }

    /// Continues the sessions that the daemon handed over.
    pub(in crate::daemon) fn resume(&mut self, reloader: &Reloader) {
        for session in self.sessions.drain(..) {
            let peer = session.stream.peer().to_owned();
            if let Err(reason) = reloader.resume(session) {
                warn!("{peer}: the session was handed over but cannot continue, and is closed: {reason}");
            }
        }
    }

    /// Tells the daemon that this process serves, and waits until the daemon has ended.
    pub(in crate::daemon) fn end(self) {
        if let Err(error) = self.connection.send(&TakeoverMessage::Serving) {
            warn!("cannot tell the old daemon to end: {error}; if it still runs, stop it");
        }
        self.connection.wait_for_end(END_TIME);
    }
}

/// The listener of an offered socket. A Unix listener with a file is added to `files`.
fn inherit(
    offered: &ListenerOffer,
    socket: OwnedFd,
    files: &mut Vec<(ListenerOffer, ListenerHandle)>,
) -> io::Result<Listener> {
    // The service manager owns the files of its sockets.
    if !offered.owns_file || offered.manager_name.is_some() {
        return Listener::inherited(socket);
    }
    let path = offered.asked.strip_prefix("unix:").unwrap_or(&offered.asked);
    let listener = Listener::inherited_with_file(socket, Path::new(path))?;
    files.push((offered.clone(), listener.handle()?));
    Ok(listener)
}

/// Timeout of the daemon's offer.
const OFFER_TIME: Duration = Duration::from_secs(60);
/// Time for the daemon to end its sessions and to flush and close its volumes.
const RELEASE_TIME: Duration = Duration::from_secs(300);
/// Time for the daemon to end after [`TakeoverMessage::Serving`].
const END_TIME: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::offer::CONTROL;
    use std::os::unix::net::{UnixListener, UnixStream};

    /// Receives the offer of a socket that this process did not ask for, and its release; returns
    /// whether the socket's file is still there.
    fn keeps_file(is_trusted: bool) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = UnixListener::bind(&path).unwrap();
        let offered = ListenerOffer {
            kind: CONTROL.to_owned(),
            asked: path.display().to_string(),
            owns_file: true,
            manager_name: None,
        };
        let (mut inherited, mut files) = (InheritedListeners::default(), Vec::new());
        let listener = inherit(&offered, socket.into(), &mut files).unwrap();
        inherited.offer(offered.kind, offered.asked, None, listener);
        let (one, other) = UnixStream::pair().unwrap();
        let (connection, daemon) =
            (TakeoverConnection::new(one).unwrap(), TakeoverConnection::new(other).unwrap());
        daemon.send(&TakeoverMessage::Released).unwrap();
        let offer = Offer { volumes: Vec::new(), attachments: Vec::new(), state: None };
        let (reservations, turns, sessions) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let mut takeover = Takeover { connection, offer, is_trusted, files, reservations, turns, sessions };
        takeover.wait_for_release(&inherited).unwrap();
        inherited.close_offered();
        path.exists()
    }

    #[test]
    fn a_daemon_of_another_user_cannot_make_root_remove_a_file() {
        assert!(keeps_file(false));
        assert!(!keeps_file(true), "a daemon of this user leaves its files to this process");
    }
}
