//! The final flush of volumes: writes that clients made are stable before the daemon ends.

use crate::failure::Failure;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::reactor::{EngineCore, PollPolicy, Progress, Task};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Op, Tag, Volume};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Flushes all volumes in parallel.
///
/// # Errors
/// If a flush fails or times out; the message names each of these volumes.
pub(super) fn all(exports: &Exports) -> Result<(), Failure> {
    each(&exports.iter().map(|(_, export)| export).collect::<Vec<_>>())
}

/// Flushes the given volumes in parallel, except read-only ones.
///
/// # Errors
/// If a flush fails or times out; the message names each of these volumes.
pub(super) fn each(exports: &[Arc<Export>]) -> Result<(), Failure> {
    let cores = Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() })
        .map_err(|error| Failure::run(format!("cannot flush the volumes: {error}")))?;
    let written = exports.iter().filter(|export| !export.volume.info().read_only);
    let started: Vec<_> = written.map(|export| (export, start(&cores, &export.volume))).collect();
    let failed = started.into_iter().filter_map(|(export, result)| flush_error(export, &result));
    let failed: Vec<_> = failed.collect();
    // Stopping the cores logs out of remote volumes.
    cores.stop(LOGOUT_TIMEOUT);
    if failed.is_empty() { Ok(()) } else { Err(Failure::run(failed.join("; "))) }
}

fn start(cores: &Cores, volume: &Arc<dyn Volume>) -> mpsc::Receiver<Result<(), IoError>> {
    let (sender, receiver) = mpsc::channel();
    let volume = volume.clone();
    // If the core has ended, the sender is dropped and the receiver reports it.
    let _ = cores.ask(0, move |core| {
        if let Err(error) = spawn(core, &volume, &sender) {
            let _ = sender.send(Err(error));
        }
    });
    receiver
}

fn spawn(
    core: &Rc<EngineCore>,
    volume: &Arc<dyn Volume>,
    result: &mpsc::Sender<Result<(), IoError>>,
) -> Result<(), IoError> {
    core.try_spawn(|waker| {
        let shared: Rc<dyn Core> = core.clone();
        let mut channel = volume.open(&shared, 1, waker.clone())?;
        channel.submit(Io::new(Tag(0), Op::Flush, 0, 0));
        Ok(Flush { channel, done: Vec::with_capacity(1), result: result.clone() })
    })
}

/// Waits for the result of a flush; returns the message if it failed.
fn flush_error(export: &Export, result: &mpsc::Receiver<Result<(), IoError>>) -> Option<String> {
    let reason = match result.recv_timeout(TIMEOUT) {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs()),
    };
    Some(format!("{}: the last flush failed: {reason}; its last writes may be lost", export.name))
}

struct Flush {
    channel: Box<dyn Channel>,
    done: Vec<Completion>,
    result: mpsc::Sender<Result<(), IoError>>,
}

impl Task for Flush {
    fn run(&mut self) -> Progress {
        self.channel.kick();
        self.channel.poll(&mut self.done);
        let Some(completion) = self.done.pop() else { return Progress::Idle };
        // The receiver is gone after the timeout.
        let _ = self.result.send(completion.result.map(|_| ()));
        Progress::Done
    }
}

/// Time for logouts from the servers of remote volumes.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for each volume's final flush.
const TIMEOUT: Duration = Duration::from_secs(60);
