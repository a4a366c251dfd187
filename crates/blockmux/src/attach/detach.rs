//! Removing the disk, while the main thread handles further signals.

use super::AttachEvent;
use super::way::Way;
use crate::failure::Failure;
use blockmux_engine::attach::{AttachedDisk, DetachError};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{debug, warn};

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
    /// The disk was in use, or was not flushed. That is tried again.
    was_refused: bool,
    /// A signal demands the attempt that is under way; without one, the clock has begun it.
    is_demanded: bool,
    /// When the last signal came that demands an attempt.
    demanded_at: Option<Instant>,
    /// The disk was removed by somebody else while an attempt was under way.
    is_gone: bool,
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
        Detaching {
            disk,
            way,
            events,
            attempts: 0,
            progress,
            was_refused: false,
            is_demanded: false,
            demanded_at: None,
            is_gone: false,
            has_warned: false,
        }
    }

    /// The time after which [`Detaching::on_timeout`] is to be called, unless there is an event
    /// before.
    pub(super) fn timeout(&self) -> Option<Duration> {
        match self.progress {
            DetachProgress::Attached => self.was_refused.then_some(TRIES_AGAIN),
            DetachProgress::Flushing => (!self.has_warned).then_some(LONG_FLUSH),
            DetachProgress::Forcing => None,
        }
    }

    /// Warns of a flush that takes long, or tries again to remove the disk.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn on_timeout(&mut self) -> Result<(), Failure> {
        match self.progress {
            DetachProgress::Attached => self.attempt(DetachProgress::Flushing)?,
            DetachProgress::Flushing => self.warn_of_flush(),
            DetachProgress::Forcing => {}
        }
        Ok(())
    }

    /// The command that used the disk has ended, so the disk is removed as soon as nobody uses it.
    ///
    /// # Errors
    /// If it cannot be.
    pub(super) fn on_command_ended(&mut self) -> Result<(), Failure> {
        self.attempt_unless_under_way()
    }

    /// Handles the removal of the disk by another program.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn on_gone(&mut self) -> Result<(), Failure> {
        self.is_gone = true;
        self.attempt_unless_under_way()
    }

    /// Tries to remove the disk, which nobody has demanded by a signal.
    fn attempt_unless_under_way(&mut self) -> Result<(), Failure> {
        match self.progress {
            DetachProgress::Attached => {
                self.has_warned = false;
                self.attempt(DetachProgress::Flushing)
            }
            DetachProgress::Flushing | DetachProgress::Forcing => Ok(()),
        }
    }

    fn warn_of_flush(&mut self) {
        let disk = self.disk.path();
        let disk = disk.display();
        warn!("{disk}: the flush waits for the volume; send another signal to remove the disk by force");
        self.has_warned = true;
    }

    /// Begins to remove the disk; by force if the last attempt has not ended. A signal that comes
    /// with another one is not the answer to it: timeout(1) sends one to its child, and one to the
    /// group of both.
    ///
    /// # Errors
    /// If an attempt by force has not ended either, or no thread can be started.
    pub(super) fn begin(&mut self) -> Result<(), Failure> {
        match self.progress {
            DetachProgress::Attached => {
                self.has_warned = false;
                self.demand();
                self.attempt(DetachProgress::Flushing)
            }
            DetachProgress::Flushing if self.demanded_at.is_some_and(|at| at.elapsed() < SAME_DEMAND) => {
                Ok(())
            }
            // The disk may be in use no longer.
            DetachProgress::Flushing if !self.is_demanded && !self.has_warned => {
                self.demand();
                Ok(())
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

    fn demand(&mut self) {
        (self.is_demanded, self.demanded_at) = (true, Some(Instant::now()));
    }

    /// Handles the end of an attempt; returns whether the disk is removed. A disk that is in use
    /// at a second signal is removed by force.
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
                self.on_refused(&error)?;
                Ok(false)
            }
            // The mount is still there, and may be in use.
            Err(error @ DetachError::Fuse(_)) if self.progress == DetachProgress::Flushing => {
                self.on_refused(&error)?;
                Ok(false)
            }
            Err(error) => Err(Failure::run(format!("{}: {error}", self.disk.path().display()))),
        }
    }

    /// Handles a refused attempt.
    fn on_refused(&mut self, error: &DetachError) -> Result<(), Failure> {
        if std::mem::take(&mut self.is_gone) {
            // It was removed while the attempt was under way, which came too early.
            return self.attempt(DetachProgress::Flushing);
        }
        if std::mem::take(&mut self.is_demanded) && self.was_refused {
            warn!("{error}; removing the disk by force");
            return self.attempt(DetachProgress::Forcing);
        }
        self.progress = DetachProgress::Attached;
        if std::mem::replace(&mut self.was_refused, true) {
            debug!("{error}");
        } else {
            warn!("{error}; the disk is removed once that is done, and by force at another signal");
        }
        Ok(())
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

/// Signals within this time are one demand.
const SAME_DEMAND: Duration = Duration::from_millis(500);
/// A flush that takes longer is worth a message.
const LONG_FLUSH: Duration = Duration::from_secs(2);
/// Delay until a removal that was refused is tried again.
const TRIES_AGAIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::fake::FakeDisk;
    use blockmux_engine::attach::DiskOptions;
    use blockmux_engine::attach::fuse::FuseError;
    use blockmux_engine::attach::own_io::OwnIo;
    use blockmux_proto::volume_state::Origin;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{self, Receiver};

    /// A disk that cannot be unmounted so many times, unless by force.
    struct BusyDisk {
        refusals: AtomicU32,
    }

    impl AttachedDisk for BusyDisk {
        fn path(&self) -> PathBuf {
            PathBuf::from("/disk")
        }

        fn origin(&self) -> Origin {
            Origin { protocol: "busy", listener: "nobody".into() }
        }

        fn check_unused(&self) -> Result<(), DetachError> {
            Ok(())
        }

        fn detach(&self) -> Result<(), DetachError> {
            let one_less = |left: u32| left.checked_sub(1);
            match self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
                Ok(_) => Err(FuseError::NoHelper.into()),
                Err(_) => Ok(()),
            }
        }

        fn detach_by_force(&self) -> Result<(), DetachError> {
            Ok(())
        }
    }

    fn disk_that_refuses(times: u32) -> (Detaching, Receiver<AttachEvent>) {
        let (sender, events) = mpsc::channel();
        let disk = Arc::new(BusyDisk { refusals: AtomicU32::new(times) });
        (Detaching::new(disk, Way::Fuse, sender), events)
    }

    /// Waits for the end of an attempt, and handles it; whether the disk is removed.
    fn end_attempt(detaching: &mut Detaching, events: &Receiver<AttachEvent>) -> Result<bool, Failure> {
        let AttachEvent::Removed(removed) = events.recv().unwrap() else { panic!("no attempt has ended") };
        detaching.on_removed(removed)
    }

    #[test]
    fn data_is_lost_only_if_the_disk_was_removed_without_a_flush() {
        let (read_only, name, io, may_be_unprivileged) = (false, None, OwnIo::default(), false);
        let options =
            DiskOptions { queues: 1, depth: 1, data: None, read_only, name, io, may_be_unprivileged };
        let disk = Arc::new(FakeDisk::attach("disk", options).unwrap());
        let (events, ended) = mpsc::channel();
        let mut detaching = Detaching::new(disk, Way::Fake, events);
        detaching.begin().unwrap();
        detaching.demanded_at = None;
        detaching.begin().unwrap();
        for _ in 0..2 {
            let Ok(AttachEvent::Removed(removed)) = ended.recv() else { panic!("no attempt has ended") };
            match removed.attempt {
                1 => assert!(detaching.on_removed(removed).unwrap(), "it was flushed"),
                _ => assert!(detaching.on_removed(removed).unwrap_err().to_string().contains("is lost")),
            }
        }
    }

    #[test]
    fn a_second_signal_removes_a_disk_by_force_that_is_refused_again() {
        let (mut detaching, events) = disk_that_refuses(2);
        detaching.begin().unwrap();
        assert!(!end_attempt(&mut detaching, &events).unwrap());
        detaching.begin().unwrap();
        assert!(!end_attempt(&mut detaching, &events).unwrap());
        let failure = end_attempt(&mut detaching, &events).unwrap_err();
        assert!(failure.to_string().contains("removed by force"), "{failure}");
    }

    #[test]
    fn two_signals_at_once_are_one_demand() {
        let (mut detaching, events) = disk_that_refuses(0);
        detaching.begin().unwrap();
        detaching.begin().unwrap();
        assert!(end_attempt(&mut detaching, &events).unwrap());
        assert!(events.try_recv().is_err(), "nothing was forced");
    }

    #[test]
    fn a_removal_that_was_refused_is_tried_again_and_not_forced() {
        for begin in [Detaching::begin, Detaching::on_command_ended] {
            let (mut detaching, events) = disk_that_refuses(3);
            begin(&mut detaching).unwrap();
            for _ in 0..3 {
                assert!(!end_attempt(&mut detaching, &events).unwrap());
                assert_eq!(detaching.timeout(), Some(TRIES_AGAIN));
                detaching.on_timeout().unwrap();
            }
            assert!(end_attempt(&mut detaching, &events).unwrap());
        }
    }

    #[test]
    fn a_second_signal_waits_for_the_attempt_that_the_clock_has_begun() {
        for (refusals, is_removed) in [(1, true), (2, false)] {
            let (mut detaching, events) = disk_that_refuses(refusals);
            detaching.begin().unwrap();
            assert!(!end_attempt(&mut detaching, &events).unwrap());
            detaching.demanded_at = None;
            detaching.on_timeout().unwrap();
            detaching.begin().unwrap();
            assert_eq!(end_attempt(&mut detaching, &events).unwrap(), is_removed);
            let forced = (!is_removed).then(|| end_attempt(&mut detaching, &events).unwrap_err());
            assert_eq!(forced.is_some_and(|error| error.to_string().contains("by force")), !is_removed);
        }
    }

    #[test]
    fn the_end_of_the_command_does_not_force_an_attempt_that_is_under_way() {
        let (mut detaching, events) = disk_that_refuses(1);
        detaching.begin().unwrap();
        detaching.on_command_ended().unwrap();
        assert!(!end_attempt(&mut detaching, &events).unwrap());
        detaching.on_timeout().unwrap();
        assert!(end_attempt(&mut detaching, &events).unwrap());
    }

    #[test]
    fn a_disk_that_was_removed_during_an_attempt_that_came_too_early_needs_no_signal() {
        let (mut detaching, events) = disk_that_refuses(1);
        detaching.begin().unwrap();
        detaching.on_gone().unwrap();
        assert!(!end_attempt(&mut detaching, &events).unwrap());
        assert!(end_attempt(&mut detaching, &events).unwrap());
    }
}
