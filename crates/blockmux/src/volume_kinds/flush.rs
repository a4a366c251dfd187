//! The final flush of volumes: writes that clients made are stable before the daemon ends.
//!
//! A volume is opened on the core that flushes it. Opening may hang in a system call and take the
//! core with it, for example on a network file system without its server. The volumes that wait for
//! that core are then flushed on further cores.

use crate::failure::Failure;
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::{EngineCore, PollPolicy, Progress, Task};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Op, Tag, Volume};
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Flushes all volumes in parallel.
///
/// # Errors
/// If a flush fails or times out; the message names each of these volumes.
pub(crate) fn all(exports: &Exports) -> Result<(), Failure> {
    each(&exports.iter().map(|(_, export)| export).collect::<Vec<_>>())
}

/// Flushes the given volumes in parallel, except read-only ones. Takes at most [`TIMEOUT`] and the
/// time of the logouts.
///
/// # Errors
/// If a flush fails or times out; the message names each of these volumes.
pub(crate) fn each(exports: &[Arc<Export>]) -> Result<(), Failure> {
    let written = exports.iter().filter(|export| !export.volume.info().read_only);
    let mut all: Vec<_> = written.map(|export| VolumeFlush::new(export.clone())).collect();
    let (deadline, (sender, results)) = (Instant::now() + TIMEOUT, mpsc::channel());
    let mut attempts: Vec<Cores> = Vec::new();
    while all.iter().any(|flush| flush.core.is_none()) {
        attempts.push(begin(&mut all, attempts.len(), &sender)?);
        wait(&mut all, &results, deadline);
    }
    for cores in attempts {
        // Stopping the cores logs out of remote volumes.
        cores.finish(LOGOUT_TIMEOUT, || {});
        cores.end(LOGOUT_TIMEOUT);
    }
    let failed: Vec<_> = all.iter().filter_map(VolumeFlush::error).collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::run(failed.join("; "))) }
}

/// The last flush of one volume.
struct VolumeFlush {
    export: Arc<Export>,
    /// The attempt, and the number of its core that flushes the volume.
    core: Option<(usize, usize)>,
    /// [`WAITING`], [`OPENING`] or [`OPENED`] on that core.
    progress: Arc<AtomicU8>,
    result: Option<Result<(), IoError>>,
}

/// The result of a flush, with the index of its volume.
type FlushResult = (usize, Result<(), IoError>);

impl VolumeFlush {
    fn new(export: Arc<Export>) -> VolumeFlush {
        VolumeFlush { export, core: None, progress: Arc::new(AtomicU8::new(WAITING)), result: None }
    }

    /// Whether the core is opening the volume.
    fn is_opening(&self) -> bool {
        self.progress.load(Ordering::Acquire) == OPENING
    }

    /// The message if the flush has failed.
    fn error(&self) -> Option<String> {
        let seconds = TIMEOUT.as_secs();
        let reason = match &self.result {
            Some(Ok(())) => return None,
            Some(Err(error)) => error.to_string(),
            None if self.is_opening() => format!("opening the volume again hangs for {seconds} s"),
            None => format!("no answer within {seconds} s"),
        };
        Some(format!("{}: the last flush failed: {reason}; its last writes may be lost", self.export.name))
    }
}

/// Starts to flush the volumes that have no core. Each attempt has twice as many cores as the one
/// before, because every volume that hangs takes one.
fn begin(
    all: &mut [VolumeFlush],
    attempt: usize,
    results: &mpsc::Sender<FlushResult>,
) -> Result<Cores, Failure> {
    let waiting = all.iter().filter(|flush| flush.core.is_none()).count();
    let count = waiting.min(1 << attempt.min(MAX_DOUBLINGS));
    let cores = Cores::start(&CoresConfig { count, policy: PollPolicy::Never, ..CoresConfig::default() })
        .map_err(|error| Failure::run(format!("cannot flush the volumes: {error}")))?;
    let inboxes = cores.inboxes();
    let waiting = all.iter_mut().enumerate().filter(|(_, flush)| flush.core.is_none());
    for ((at, flush), nth) in waiting.zip((0..count).cycle()) {
        (flush.core, flush.progress) = (Some((attempt, nth)), Arc::new(AtomicU8::new(WAITING)));
        let (volume, progress, results) =
            (flush.export.volume.clone(), flush.progress.clone(), results.clone());
        inboxes[nth].send(move |core| {
            progress.store(OPENING, Ordering::Release);
            let begun = spawn(core, &volume, (at, &results));
            progress.store(OPENED, Ordering::Release);
            if let Err(error) = begun {
                let _ = results.send((at, Err(error)));
            }
        });
    }
    Ok(cores)
}

/// Waits until all flushes have results, or until `deadline`. Returns early if cores hang: then the
/// other volumes of these cores have lost their core.
fn wait(all: &mut [VolumeFlush], results: &mpsc::Receiver<FlushResult>, deadline: Instant) {
    while all.iter().any(|flush| flush.result.is_none()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Ok((at, result)) = results.recv_timeout(left.min(OPEN_TIMEOUT)) {
            all[at].result.get_or_insert(result);
            continue;
        }
        if left.is_zero() {
            return;
        }
        let hanging = all.iter().filter(|flush| flush.result.is_none() && flush.is_opening());
        let hanging: Vec<_> = hanging.map(|flush| flush.core).collect();
        let is_behind = |flush: &&mut VolumeFlush| {
            flush.result.is_none() && !flush.is_opening() && hanging.contains(&flush.core)
        };
        let behind: Vec<_> = all.iter_mut().filter(is_behind).collect();
        if !behind.is_empty() {
            behind.into_iter().for_each(|flush| flush.core = None);
            return;
        }
    }
}

fn spawn(
    core: &Rc<EngineCore>,
    volume: &Arc<dyn Volume>,
    (at, results): (usize, &mpsc::Sender<FlushResult>),
) -> Result<(), IoError> {
    core.try_spawn(|waker| {
        let shared: Rc<dyn Core> = core.clone();
        let mut channel = volume.open(&shared, 1, waker.clone())?;
        channel.submit(Io::new(Tag(0), Op::Flush, 0, 0));
        Ok(Flush { channel, done: Vec::with_capacity(1), at, results: results.clone() })
    })
}

struct Flush {
    channel: Box<dyn Channel>,
    done: Vec<Completion>,
    at: usize,
    results: mpsc::Sender<FlushResult>,
}

impl Task for Flush {
    fn run(&mut self) -> Progress {
        self.channel.kick();
        self.channel.poll(&mut self.done);
        let Some(completion) = self.done.pop() else { return Progress::Idle };
        // The receiver is gone after the timeout.
        let _ = self.results.send((self.at, completion.result.map(|_| ())));
        Progress::Done
    }
}

/// The core has not come to the volume.
const WAITING: u8 = 0;
/// The core opens the volume.
const OPENING: u8 = 1;
/// The volume is open, or cannot be opened.
const OPENED: u8 = 2;

/// Time for logouts from the servers of remote volumes.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the final flushes of all volumes.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time without a result after which a core that opens a volume counts as hanging.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Limits the number of cores of an attempt to 64.
const MAX_DOUBLINGS: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{MemVolume, VolumeInfo, Waker};
    use std::sync::{Condvar, Mutex};

    /// A volume whose opening hangs until `wanted` other volumes have been opened.
    struct Gated {
        below: MemVolume,
        wanted: usize,
        opened: Arc<(Mutex<usize>, Condvar)>,
    }

    impl Volume for Gated {
        fn info(&self) -> VolumeInfo {
            self.below.info()
        }

        fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
            let (opened, changed) = &*self.opened;
            let mut opened = opened.lock().unwrap();
            while *opened < self.wanted {
                opened = changed.wait(opened).unwrap();
            }
            *opened += usize::from(self.wanted == 0);
            changed.notify_all();
            drop(opened);
            self.below.open(core, depth, waker)
        }
    }

    #[test]
    fn volumes_that_hang_when_they_are_opened_do_not_keep_others_from_their_last_flush() {
        let opened = Arc::new((Mutex::new(0), Condvar::new()));
        let exports = [2, 0, 2, 2, 0].into_iter().enumerate().map(|(at, wanted)| {
            let (below, opened) = (MemVolume::new(1 << 20), opened.clone());
            let volume = Arc::new(Gated { below, wanted, opened });
            Arc::new(Export { name: at.to_string(), description: String::new(), read_only: false, volume })
        });
        // The volumes that hang can be opened only after the others.
        each(&exports.collect::<Vec<_>>()).unwrap();
        assert!(*opened.0.lock().unwrap() >= 2);
    }
}
