//! Attaching the disk, while the main thread handles signals: the first read and mount(8) wait for
//! a volume that may not answer.

use super::AttachEvent;
use crate::failure::Failure;
use blockmux_engine::attach::AttachedDisk;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_volume::Spec;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use tracing::{debug, warn};

/// Calls `attach`, which does its I/O by `io`, on a thread of its own, and waits for its end. A
/// signal aborts `io` and removes what has been attached; a second one does not wait for that.
///
/// # Errors
/// Those of `attach`, or if a signal has come.
pub(super) fn attach(
    spec: &Spec,
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
                remove(attached);
                return Err(Failure::run(format!(
                    "{spec}: a signal has ended the process before it was attached"
                )));
            }
            (AttachEvent::Signal, Some(io)) => {
                warn!("{spec}: a signal gives up attaching it");
                // Removing a disk may take long.
                start("abort", move || io.abort())?;
            }
            (AttachEvent::Signal, None) => {
                return Err(Failure::run(format!(
                    "{spec}: the kernel does not end attaching it; `blockmux attach --forget` removes a disk that stays"
                )));
            }
            // There is no disk and no command yet.
            (AttachEvent::CommandEnded(_) | AttachEvent::Removed(_) | AttachEvent::Gone, own) => io = own,
        }
    }
    Err(Failure::run(format!("{spec}: the thread that attaches has ended")))
}

/// Removes a disk that was attached when the signal had come.
fn remove(attached: Result<Arc<dyn AttachedDisk>, Failure>) {
    match attached.map(|disk| disk.detach_by_force()) {
        Ok(removed) => removed.unwrap_or_else(|error| warn!("{error}")),
        Err(failure) => debug!("{failure}"),
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    started.map(drop).map_err(|error| Failure::run(format!("cannot start a thread: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::fake::{self, FakeDisk};
    use blockmux_engine::attach::DiskOptions;
    use std::sync::mpsc;

    fn disk() -> Arc<dyn AttachedDisk> {
        let options = DiskOptions {
            queues: 1,
            depth: 1,
            data: None,
            read_only: false,
            name: None,
            io: OwnIo::default(),
        };
        Arc::new(FakeDisk::attach("disk", options).unwrap())
    }

    #[test]
    fn a_disk_that_is_attached_is_returned() {
        let (sender, events) = mpsc::channel();
        let spec = "null:1m".parse().unwrap();
        let attached = attach(&spec, || Ok(disk()), OwnIo::default(), &sender, &events).unwrap();
        assert!(!fake::state(&attached.path()).is_removed);
        let refuse = || Err(Failure::request("no disk"));
        let failure = attach(&spec, refuse, OwnIo::default(), &sender, &events).err().unwrap();
        assert_eq!(failure.to_string(), "no disk");
    }

    #[test]
    fn a_signal_gives_up_what_hangs_and_removes_what_was_attached() {
        let (sender, events) = mpsc::channel();
        let spec = "null:1m".parse().unwrap();
        let (io, (abort, aborted)) = (OwnIo::default(), mpsc::channel());
        io.on_abort(Box::new(move || abort.send(()).unwrap()));
        let (late, signal) = (disk(), sender.clone());
        let path = late.path();
        // It ends only by the abort.
        let hang = move || {
            signal.send(AttachEvent::Signal).unwrap();
            aborted.recv().map(|()| late).map_err(Failure::run)
        };
        let failure = attach(&spec, hang, io, &sender, &events).err().unwrap();
        assert!(failure.to_string().contains("before it was attached"), "{failure}");
        assert!(fake::state(&path).was_forced);
    }

    #[test]
    fn a_second_signal_waits_for_nothing() {
        let (sender, events) = mpsc::channel();
        let spec = "null:1m".parse().unwrap();
        let (never, waits) = mpsc::channel::<()>();
        let signal = sender.clone();
        let hang = move || {
            signal.send(AttachEvent::Signal).unwrap();
            signal.send(AttachEvent::Signal).unwrap();
            waits.recv().map(|()| disk()).map_err(Failure::run)
        };
        let failure = attach(&spec, hang, OwnIo::default(), &sender, &events).err().unwrap();
        assert!(failure.to_string().contains("does not end attaching it"), "{failure}");
        drop(never);
    }
}
