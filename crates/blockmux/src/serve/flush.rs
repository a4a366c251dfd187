//! The last flush: what clients wrote is stable before the daemon ends.

use crate::failure::Failure;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::reactor::{EngineCore, PollPolicy, Progress, Task};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Op, Tag, Volume};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Flushes every volume, all at the same time.
pub(super) fn all(exports: &Exports) -> Result<(), Failure> {
    each(&exports.iter().map(|(_, export)| export).collect::<Vec<_>>())
}

/// Flushes these volumes.
pub(super) fn each(exports: &[Arc<Export>]) -> Result<(), Failure> {
    let cores = Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() })
        .map_err(|error| Failure::run(format!("cannot flush the volumes: {error}")))?;
    let written = exports.iter().filter(|export| !export.volume.info().read_only);
    let started: Vec<_> = written.map(|export| (export, start(&cores, &export.volume))).collect();
    let failed = started.into_iter().filter_map(|(export, result)| why_not(export, &result));
    let failed: Vec<_> = failed.collect();
    // Servers of remote volumes are told good-bye, as their protocols want it.
    cores.stop(GOOD_BYE);
    if failed.is_empty() { Ok(()) } else { Err(Failure::run(failed.join("; "))) }
}

fn start(cores: &Cores, volume: &Arc<dyn Volume>) -> mpsc::Receiver<Result<(), IoError>> {
    let (sender, receiver) = mpsc::channel();
    let volume = volume.clone();
    // A core that has ended drops the sender, and the receiver tells.
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

fn why_not(export: &Export, result: &mpsc::Receiver<Result<(), IoError>>) -> Option<String> {
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
        // The daemon may have stopped waiting.
        let _ = self.result.send(completion.result.map(|_| ()));
        Progress::Done
    }
}

/// How long servers of remote volumes may take to let us go.
const GOOD_BYE: Duration = Duration::from_secs(1);
/// How long a volume has for its last flush.
const TIMEOUT: Duration = Duration::from_secs(60);
