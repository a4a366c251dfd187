//! Attaching the disk, while the main thread handles signals: the first read and mount(8) wait for
//! a volume that may not answer.

use super::AttachEvent;
use super::detach::Removed;
use crate::failure::Failure;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::{AttachedAs, AttachedDisk};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// Calls `attach`, which does its I/O by `io`, on a thread of its own, and waits for its end. A
/// signal aborts `io`. A disk that was attached nevertheless is detached if it is new and not in
/// use, and otherwise stays; a second signal does not wait for that.
///
/// # Errors
/// Those of `attach`, or if a signal has come.
pub(super) fn attach(
    volume: &str,
    attach: impl FnOnce() -> Result<Arc<dyn AttachedDisk>, Failure> + Send + 'static,
    io: OwnIo,
    sender: &Sender<AttachEvent>,
    events: &Receiver<AttachEvent>,
) -> Result<Arc<dyn AttachedDisk>, Failure> {
    let attached = sender.clone();
    // The receiver is gone if the process ends for another reason.
    start("attach", move || attached.send(AttachEvent::Attached(attach())).unwrap_or_default())?;
    let mut io = Some(io);
    for event in events {
        match (event, io.take()) {
            (AttachEvent::Attached(attached), Some(_)) => return attached,
            (AttachEvent::Attached(attached), None) => {
                return Err(Failure::run(format!("{volume}: {}", give_up(attached, sender, events)?)));
            }
            (AttachEvent::Signal, Some(io)) => {
                warn!("{volume}: a signal gives up attaching it");
                // Removing a disk may take long.
                start("abort", move || io.abort())?;
            }
            (AttachEvent::Signal, None) => {
                return Err(Failure::run(format!(
                    "{volume}: the kernel does not end attaching it; `blockmux attach --forget` removes a disk that stays"
                )));
            }
            // There is no disk and no command yet.
            (AttachEvent::CommandEnded(_) | AttachEvent::Removed(_) | AttachEvent::Gone, own) => io = own,
        }
    }
    Err(Failure::run(format!("{volume}: the thread that attaches has ended")))
}

/// Gives up a disk that was attached when a signal had come; returns what to tell. It is never
/// removed by force: others may use it, those of one that was recovered since long ago.
fn give_up(
    attached: Result<Arc<dyn AttachedDisk>, Failure>,
    sender: &Sender<AttachEvent>,
    events: &Receiver<AttachEvent>,
) -> Result<String, Failure> {
    let ended = "a signal has ended the process before it was attached".to_owned();
    let disk = match attached {
        Ok(disk) => disk,
        Err(failure) => {
            debug!("{failure}");
            return Ok(ended);
        }
    };
    let why = match disk.attached_as() {
        AttachedAs::Recovered => "another process has left it".to_owned(),
        AttachedAs::New => match detach(&disk, sender, events)? {
            None => return Ok(ended),
            Some(why) => why,
        },
    };
    disk.leave();
    let node = disk.path();
    let node = node.display();
    Ok(match disk.outlives_process() {
        true => format!(
            "a signal has ended the process, and {node} stays, because {why}; attach the volume again to go on with it, or \
             remove it with `blockmux attach --forget {node}`"
        ),
        false => format!("a signal has ended the process, and {node} ends with it ({why})"),
    })
}

/// Detaches a disk unless somebody uses it; returns why it stays.
fn detach(
    disk: &Arc<dyn AttachedDisk>,
    sender: &Sender<AttachEvent>,
    events: &Receiver<AttachEvent>,
) -> Result<Option<String>, Failure> {
    let (own, removed) = (disk.clone(), sender.clone());
    let detach = move || removed.send(AttachEvent::Removed(Removed::once(own.detach()))).unwrap_or_default();
    start("detach", detach)?;
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    loop {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(AttachEvent::Removed(Removed { result, .. })) => {
                return Ok(result.err().map(|error| error.to_string()));
            }
            Ok(AttachEvent::Signal) | Err(_) => return Ok(Some("its flush waits for the volume".to_owned())),
            Ok(AttachEvent::Attached(_) | AttachEvent::CommandEnded(_) | AttachEvent::Gone) => {}
        }
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    started.map(drop).map_err(|error| Failure::run(format!("cannot start a thread: {error}")))
}

/// Time for the flush of a disk that is given up.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::fake::{self, FakeDisk, FakeState};
    use blockmux_engine::attach::DiskOptions;
    use std::num::NonZeroU64;
    use std::sync::mpsc;

    fn fake_disk() -> FakeDisk {
        let options = DiskOptions {
            queues: 1,
            depth: 1,
            data: NonZeroU64::new(1),
            read_only: false,
            name: None,
            io: OwnIo::default(),
            may_be_unprivileged: false,
        };
        FakeDisk::attach("disk", options).unwrap()
    }

    fn disk() -> Arc<dyn AttachedDisk> {
        Arc::new(fake_disk())
    }

    /// What is told, and what has become of the disk, if a signal comes while it is attached.
    fn after_a_signal(disk: FakeDisk, is_used: bool) -> (String, FakeState) {
        let (sender, events) = mpsc::channel();
        let (io, (abort, aborted)) = (OwnIo::default(), mpsc::channel());
        io.on_abort(Box::new(move || abort.send(()).unwrap()));
        let (path, signal) = (disk.path(), sender.clone());
        fake::set_used(&path, is_used);
        let late: Arc<dyn AttachedDisk> = Arc::new(disk);
        // It ends only by the abort.
        let hang = move || {
            signal.send(AttachEvent::Signal).unwrap();
            aborted.recv().map(|()| late).map_err(Failure::run)
        };
        let failure = attach("null:1m", hang, io, &sender, &events).err().unwrap();
        (failure.to_string(), fake::state(&path))
    }

    #[test]
    fn a_disk_that_is_attached_is_returned() {
        let (sender, events) = mpsc::channel();
        let attached = attach("null:1m", || Ok(disk()), OwnIo::default(), &sender, &events).unwrap();
        assert!(!fake::state(&attached.path()).is_removed);
        let refuse = || Err(Failure::request("no disk"));
        let failure = attach("null:1m", refuse, OwnIo::default(), &sender, &events).err().unwrap();
        assert_eq!(failure.to_string(), "no disk");
    }

    #[test]
    fn a_signal_gives_up_what_hangs_and_detaches_a_new_disk() {
        let (said, state) = after_a_signal(fake_disk(), false);
        assert!(said.contains("before it was attached"), "{said}");
        assert_eq!(state, FakeState { is_removed: true, ..FakeState::default() });
    }

    #[test]
    fn a_signal_leaves_a_disk_that_somebody_uses_or_that_another_process_has_left() {
        let left = FakeState { is_left: true, ..FakeState::default() };
        let (said, state) = after_a_signal(fake_disk(), true);
        assert!(said.contains("is in use at /mnt; unmount it first; attach the volume again"), "{said}");
        assert_eq!(state, FakeState { is_used: true, ..left });
        let (said, state) = after_a_signal(fake_disk().recovered(), false);
        assert!(said.contains("because another process has left it; attach"), "{said}");
        assert_eq!(state, left);
    }

    #[test]
    fn a_second_signal_waits_for_nothing() {
        let (sender, events) = mpsc::channel();
        let (never, waits) = mpsc::channel::<()>();
        let signal = sender.clone();
        let hang = move || {
            signal.send(AttachEvent::Signal).unwrap();
            signal.send(AttachEvent::Signal).unwrap();
            waits.recv().map(|()| disk()).map_err(Failure::run)
        };
        let failure = attach("null:1m", hang, OwnIo::default(), &sender, &events).err().unwrap();
        assert!(failure.to_string().contains("does not end attaching it"), "{failure}");
        drop(never);
    }
}
