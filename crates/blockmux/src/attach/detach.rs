//! Removing the disk, while the main thread handles further signals.

use super::AttachEvent;
use super::way::Way;
use crate::failure::Failure;
use blockmux_engine::attach::{AttachedDisk, DetachError};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use tracing::warn;

/// The result of an attempt to remove the disk.
pub(super) struct Removed {
    attempt: u32,
    pub(super) result: Result<(), DetachError>,
}

impl Removed {
    /// The result of the only attempt.
    pub(super) fn once(result: Result<(), DetachError>) -> Removed {
        Removed { attempt: 1, result }
    }
}

/// The attempts to remove a disk.
pub(super) struct Detaching {
    disk: Arc<dyn AttachedDisk>,
    way: Way,
    events: Sender<AttachEvent>,
    /// Number of attempts so far.
    attempts: u32,
    progress: DetachProgress,
    /// The disk was in use, or was not flushed.
    was_refused: bool,
    /// The user knows that the flush takes long.
    has_warned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DetachProgress {
    Attached,
    /// A thread flushes and removes the disk.
    Flushing,
    /// A thread removes the disk although it is in use.
    Forcing,
}

impl Detaching {
    pub(super) fn new(disk: Arc<dyn AttachedDisk>, way: Way, events: Sender<AttachEvent>) -> Detaching {
        let progress = DetachProgress::Attached;
        Detaching { disk, way, events, attempts: 0, progress, was_refused: false, has_warned: false }
    }

    /// Whether a flush is under way that the user may not know of.
    pub(super) fn is_silent(&self) -> bool {
        self.progress == DetachProgress::Flushing && !self.has_warned
    }

    /// Whether no attempt to remove the disk is under way.
    pub(super) fn is_attached(&self) -> bool {
        self.progress == DetachProgress::Attached
    }

    /// Tells that the flush takes long, and what to do.
    pub(super) fn warn_of_flush(&mut self) {
        let disk = self.disk.path();
        let disk = disk.display();
        warn!("{disk}: the flush waits for the volume; send another signal to remove the disk by force");
        self.has_warned = true;
    }

    /// Begins to remove the disk; by force if the last attempt has not ended.
    ///
    /// # Errors
    /// If an attempt by force has not ended either, or no thread can be started.
    pub(super) fn begin(&mut self) -> Result<(), Failure> {
        match self.progress {
            DetachProgress::Attached => {
                self.has_warned = false;
                self.attempt(DetachProgress::Flushing)
            }
            DetachProgress::Flushing => {
                warn!("{}: removing the disk by force", self.disk.path().display());
                self.attempt(DetachProgress::Forcing)
            }
            DetachProgress::Forcing => {
                let disk = self.disk.path();
                Err(Failure::run(format!(
                    "{}: the kernel does not remove the disk; once this process has ended, use `blockmux attach --forget \
                     {}`",
                    disk.display(),
                    disk.display()
                )))
            }
        }
    }

    /// Handles the end of an attempt; returns whether the disk is removed. A disk that is in use
    /// for the second time is removed by force.
    ///
    /// # Errors
    /// If the kernel does not remove the disk, or it was removed by force.
    pub(super) fn on_removed(&mut self, Removed { attempt, result }: Removed) -> Result<bool, Failure> {
        match result {
            Ok(()) if self.progress == DetachProgress::Forcing && attempt == self.attempts => {
                let disk = self.disk.path();
                Err(Failure::run(format!(
                    "{}: removed by force; what was not flushed is lost",
                    disk.display()
                )))
            }
            // A flush that others had given up has succeeded.
            Ok(()) => Ok(true),
            // A later attempt is under way.
            Err(_) if attempt != self.attempts => Ok(false),
            Err(
                error @ (DetachError::InUse { .. } | DetachError::Open { .. } | DetachError::Flush { .. }),
            ) => {
                if std::mem::replace(&mut self.was_refused, true) {
                    warn!("{error}; removing the disk by force");
                    self.attempt(DetachProgress::Forcing)?;
                } else {
                    warn!("{error}, and send the signal again; if that fails, the disk is removed by force");
                    self.progress = DetachProgress::Attached;
                }
                Ok(false)
            }
            Err(error) => Err(Failure::run(format!("{}: {error}", self.disk.path().display()))),
        }
    }

    fn attempt(&mut self, how: DetachProgress) -> Result<(), Failure> {
        self.progress = how;
        self.attempts += 1;
        let (disk, events, attempt) = (self.disk.clone(), self.events.clone(), self.attempts);
        if self.way.users_wait() {
            disk.leave();
        }
        let remove = move || {
            let result = match how {
                DetachProgress::Forcing => disk.detach_by_force(),
                _ => disk.detach(),
            };
            // The receiver is gone if the process ends for another reason.
            let _ = events.send(AttachEvent::Removed(Removed { attempt, result }));
        };
        let started = thread::Builder::new().name("detach".to_owned()).spawn(remove);
        started.map(drop).map_err(|error| Failure::run(format!("cannot start a thread: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::fake::FakeDisk;
    use blockmux_engine::attach::DiskOptions;
    use blockmux_engine::attach::own_io::OwnIo;
    use std::sync::mpsc;

    #[test]
    fn data_is_lost_only_if_the_disk_was_removed_without_a_flush() {
        let (read_only, name, io, may_be_unprivileged) = (false, None, OwnIo::default(), false);
        let options =
            DiskOptions { queues: 1, depth: 1, data: None, read_only, name, io, may_be_unprivileged };
        let disk = Arc::new(FakeDisk::attach("disk", options).unwrap());
        let (events, ended) = mpsc::channel();
        let mut detaching = Detaching::new(disk, Way::Fake, events);
        detaching.begin().unwrap();
        detaching.begin().unwrap();
        for _ in 0..2 {
            let Ok(AttachEvent::Removed(removed)) = ended.recv() else { panic!("no attempt has ended") };
            match removed.attempt {
                1 => assert!(detaching.on_removed(removed).unwrap(), "it was flushed"),
                _ => assert!(detaching.on_removed(removed).unwrap_err().to_string().contains("is lost")),
            }
        }
    }
}
