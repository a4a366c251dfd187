//! Opens the volumes at the start, and attaches those that are disks of this machine. A path, a
//! server or the kernel may hang, so a signal ends the daemon meanwhile.

use super::api::Probes;
use super::disks::{DiskServer, Disks};
use super::inherited::InheritedListeners;
use super::opening::KnownVolumes;
use super::setup::Setup;
use super::takeover::Takeover;
use super::{DaemonEvent, GRACE};
use crate::failure::Failure;
use crate::volume_kinds::flush;
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_proto::exports::Exports;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// The events of a daemon that opens its volumes.
pub(super) struct Opening<'a> {
    pub(super) events: &'a Receiver<DaemonEvent>,
    pub(super) sender: &'a Sender<DaemonEvent>,
}

impl Opening<'_> {
    /// Opens all volumes, those of a takeover when the daemon has released them. Probes are
    /// answered meanwhile, from when the daemon before this one does not answer them. `None` if a
    /// signal came first: then threads that hang are left behind.
    ///
    /// # Errors
    /// If a volume cannot be opened or exported, the takeover fails, or probes cannot be answered.
    pub(super) fn open(
        &self,
        (setup, member): (&Arc<Setup>, &Arc<MemberClient>),
        takeover: Option<&mut Takeover>,
        inherited: &mut InheritedListeners,
        start_probes: impl FnOnce() -> Result<Probes, Failure>,
    ) -> Result<Option<(Exports, Probes)>, Failure> {
        let (own, of_group) = (setup.clone(), member.clone());
        let Some(takeover) = takeover else {
            let probes = start_probes()?;
            let open = move || {
                own.check_files()?;
                own.open(&of_group, BTreeMap::new(), KnownVolumes::default())
            };
            let exports = self.unless_stopped(open)?;
            return Ok(exports.map(|exports| (exports, probes)));
        };
        takeover.check(setup)?;
        let theirs = takeover.names();
        let open_new = move || {
            own.check_files()?;
            own.open_some(&of_group, |name| !theirs.contains(name))
        };
        let new = self.unless_stopped(open_new)?;
        let Some(new) = new else { return Ok(None) };
        takeover.wait_for_release(inherited)?;
        let probes = start_probes()?;
        inherited.close_offered();
        let (own, of_group, known) = (setup.clone(), member.clone(), takeover.known_volumes());
        let exports = self.unless_stopped(move || own.open(&of_group, new, known))?;
        exports.iter().try_for_each(|exports| takeover.restore(exports))?;
        Ok(exports.map(|exports| (exports, probes)))
    }

    /// Attaches the volumes of all attachments; returns whether no signal came first.
    ///
    /// # Errors
    /// If one cannot be attached. Then, or after a signal, the others are detached.
    pub(super) fn attach(
        &self,
        setup: &Arc<Setup>,
        disks: &Arc<Disks>,
        server: &DiskServer,
    ) -> Result<bool, Failure> {
        let (own, its_disks, its_server) = (setup.clone(), disks.clone(), server.clone());
        let attach = move || {
            own.attachments.iter().try_for_each(|asked| {
                let attached = its_disks.attach(&its_server, asked).map(drop);
                attached.map_err(|error| own.located(Failure::request(error)))
            })
        };
        let attached = self.unless_stopped(attach);
        if let Ok(Some(())) = attached {
            return Ok(true);
        }
        // A disk of a process that has ended may have users, which write.
        disks.end();
        server.cores.finish(GRACE, || {});
        let flushed = flush::all(&server.exports);
        attached.map(|_| false).and_then(|attached| flushed.map(|()| attached))
    }

    /// Runs `work` on a thread of its own; `None` if a signal asks the daemon to stop first.
    fn unless_stopped<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<Option<T>, Failure> {
        let (result_sender, result) = mpsc::channel();
        // The receiver is gone if a signal came first.
        let run = move || drop(result_sender.send(work()));
        let started = thread::Builder::new().name("opening".to_owned()).spawn(run);
        let thread = started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
        let mut reloads = false;
        loop {
            match result.recv_timeout(POLL) {
                Ok(done) => {
                    // The thread has capabilities that this one is about to drop.
                    let _ = thread.join();
                    // The config may have changed since it was read.
                    if reloads {
                        let _ = self.sender.send(DaemonEvent::Reload);
                    }
                    return done.map(Some);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run("the start failed; the log has the reason"));
                }
                Err(RecvTimeoutError::Timeout) => match self.events.try_recv() {
                    Ok(DaemonEvent::Signal) => return Ok(None),
                    Ok(DaemonEvent::Reload) => reloads = true,
                    _ => {}
                },
            }
        }
    }
}

/// Interval of checks for signals.
const POLL: Duration = Duration::from_millis(20);
