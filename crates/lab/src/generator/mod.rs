//! The load generator: runs one job once, on any volume.
//!
//! Each worker is a task with a channel of its own; workers are distributed over the initiator's
//! cores. A worker keeps `iodepth` requests in flight, submits in batches as completions arrive,
//! and records the time of each: it allocates and locks nothing per I/O. The caller's thread only
//! starts and ends the measurement, and samples the CPU time of both sides at these moments.

mod worker;

use crate::cpu::{CpuTime, CpuUsage, MachineCpu};
use crate::histogram::Histogram;
use crate::job::{Job, Range};
use crate::job_error::JobError;
use crate::result::{Direction, Run};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::EngineCore;
use blockmux_volume::{IoError, Volume};
use std::ops::Add;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use worker::Worker;

/// Configuration of a run.
pub struct Bench<'a> {
    /// The job.
    pub job: &'a Job,
    /// The volume under load.
    pub volume: &'a Arc<dyn Volume>,
    /// Whether reads have their own buffers. A remote volume's payload is in memory once it is
    /// received, so a buffer would only add a copy that other initiators do not make. A local
    /// volume would let reads borrow its memory, and no data would be transferred at all.
    pub own_buffers: bool,
    /// The cores of the workers, round-robin.
    pub initiator: &'a Cores,
    /// The target's cores, if it is in this process.
    pub target: Option<&'a Cores>,
    /// Called a few times a second with the completed share of the run, 0 to 1.
    pub progress: &'a dyn Fn(f64),
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The job does not fit the volume.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The volume could not be opened.
    #[error("cannot open the volume: {0}")]
    Open(IoError),
    /// I/O in flight did not complete within this many seconds.
    #[error("I/O did not complete within {0} s after the run")]
    Stuck(u64),
    /// This many I/O failed while the volume was filled.
    #[error("{0} writes failed")]
    FillFailed(u64),
    /// A worker's core has ended.
    #[error("a core of the load generator has ended")]
    CoreEnded,
}

/// State shared by the calling thread and the workers.
struct Control {
    phase: AtomicU8,
    /// Workers without a first completion.
    waiting: AtomicU32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Ramp,
    Measure,
    Stop,
}

impl Control {
    fn set(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    #[inline]
    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Ramp,
            1 => Phase::Measure,
            _ => Phase::Stop,
        }
    }
}

/// One worker's part of the job.
struct Assignment {
    job: Job,
    nth: u32,
    range: Range,
    /// Number of passes over the range after which the worker ends.
    passes: Option<u64>,
    own_buffers: bool,
    control: Arc<Control>,
    result: mpsc::Sender<Result<WorkerResult, IoError>>,
}

type WorkerResults = mpsc::Receiver<Result<WorkerResult, IoError>>;

/// One worker's results.
#[derive(Default)]
struct WorkerResult {
    read: Counter,
    write: Counter,
    trim: Counter,
    errors: u64,
    verify_errors: u64,
    measured: Duration,
}

#[derive(Default)]
struct Counter {
    bytes: u64,
    latency: Histogram,
}

impl Bench<'_> {
    /// Runs the job once.
    ///
    /// # Errors
    /// If the job does not fit the volume, or the volume fails to open or to complete I/O. Failed
    /// I/O is counted.
    pub fn run(&self) -> Result<Run, RunError> {
        let (control, results) = self.start(None)?;
        wait_for_first_answers(&control);
        self.wait(Duration::from_millis(self.job.ramp_time_ms), 0);
        let (before, machine_before) = (self.cpu_times(), MachineCpu::now());
        control.set(Phase::Measure);
        self.wait(Duration::from_millis(self.job.runtime_ms), self.job.ramp_time_ms);
        control.set(Phase::Stop);
        let (after, machine_after) = (self.cpu_times(), MachineCpu::now());
        let total = self.collect(&results, DRAIN_TIMEOUT)?;
        let used = |side: usize| Some(after[side]?.since(before[side]?));
        let machine_cpu_ns = machine_after.zip(machine_before).map(|(after, before)| after.since(before));
        Ok(Run { machine_cpu_ns, ..total.into_run(used(0), used(1)) })
    }

    /// Writes the job's range exactly once, however long that takes, to prepare a volume.
    ///
    /// # Errors
    /// As [`Bench::run`], and if any I/O failed.
    pub fn fill(&self) -> Result<(), RunError> {
        let (control, results) = self.start(Some(1))?;
        control.set(Phase::Measure);
        let total = self.collect(&results, FILL_TIMEOUT)?;
        if total.errors > 0 { Err(RunError::FillFailed(total.errors)) } else { Ok(()) }
    }

    /// Starts the workers, in the ramp phase. With `passes` they stop by themselves after that many
    /// passes.
    fn start(&self, passes: Option<u64>) -> Result<(Arc<Control>, WorkerResults), RunError> {
        let info = self.volume.info();
        self.job.validate(info.size, info.logical_block)?;
        let ranges =
            (0..self.job.numjobs).map(|nth| self.job.range(info.size, nth)).collect::<Result<Vec<_>, _>>()?;
        let control = Arc::new(Control {
            phase: AtomicU8::new(Phase::Ramp as u8),
            waiting: AtomicU32::new(self.job.numjobs),
        });
        let (sender, results) = mpsc::channel();
        for (nth, range) in ranges.into_iter().enumerate() {
            let assignment = Assignment {
                job: self.job.clone(),
                nth: nth as u32,
                range,
                passes,
                own_buffers: self.own_buffers,
                control: control.clone(),
                result: sender.clone(),
            };
            self.start_worker(nth % self.initiator.count(), assignment)?;
        }
        Ok((control, results))
    }

    fn collect(&self, results: &WorkerResults, timeout: Duration) -> Result<WorkerResult, RunError> {
        let mut total = WorkerResult::default();
        for _ in 0..self.job.numjobs {
            let tally = results.recv_timeout(timeout).map_err(|error| match error {
                mpsc::RecvTimeoutError::Timeout => RunError::Stuck(timeout.as_secs()),
                mpsc::RecvTimeoutError::Disconnected => RunError::CoreEnded,
            })?;
            total.merge(&tally.map_err(RunError::Open)?);
        }
        Ok(total)
    }

    fn start_worker(&self, core: usize, assignment: Assignment) -> Result<(), RunError> {
        let volume = self.volume.clone();
        let start = move |core: &Rc<EngineCore>| {
            let result = assignment.result.clone();
            if let Err(error) = Worker::spawn(core, &volume, assignment) {
                // The caller receives the error instead of results, unless it has ended.
                let _ = result.send(Err(error));
            }
        };
        self.initiator.ask(core, start).ok_or(RunError::CoreEnded)
    }

    /// CPU time of target and initiator so far.
    fn cpu_times(&self) -> [Option<CpuTime>; 2] {
        let of = |cores: &Cores| {
            let times = (0..cores.count()).filter_map(|nth| cores.ask(nth, |_| CpuTime::of_this_thread()));
            times.fold(CpuTime::default(), CpuTime::add)
        };
        [self.target.map(of), Some(of(self.initiator))]
    }

    fn wait(&self, time: Duration, done_ms: u64) {
        let whole =
            Duration::from_millis(self.job.ramp_time_ms + self.job.runtime_ms).as_secs_f64().max(1e-9);
        let start = Instant::now();
        while let Some(left) = time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::park_timeout(left.min(PROGRESS_EVERY));
            (self.progress)((done_ms as f64 / 1e3 + start.elapsed().as_secs_f64()) / whole);
        }
    }
}

/// Waits until each worker has a completion, so that neither the measurement nor the ramp includes
/// logins.
fn wait_for_first_answers(control: &Control) {
    let end = Instant::now() + FIRST_COMPLETION_TIMEOUT;
    while control.waiting.load(Ordering::Acquire) > 0 && Instant::now() < end {
        std::thread::park_timeout(FIRST_ANSWER_PAUSE);
    }
}

impl WorkerResult {
    fn merge(&mut self, other: &WorkerResult) {
        for (mine, theirs) in
            [(&mut self.read, &other.read), (&mut self.write, &other.write), (&mut self.trim, &other.trim)]
        {
            mine.bytes += theirs.bytes;
            mine.latency.merge(&theirs.latency);
        }
        self.errors += other.errors;
        self.verify_errors += other.verify_errors;
        self.measured = self.measured.max(other.measured);
    }

    fn into_run(self, target: Option<CpuUsage>, initiator: Option<CpuUsage>) -> Run {
        let direction = |counter: &Counter| Direction {
            ios: counter.latency.count(),
            bytes: counter.bytes,
            latency: counter.latency.latency(),
        };
        Run {
            runtime_ns: self.measured.as_nanos() as u64,
            read: direction(&self.read),
            write: direction(&self.write),
            trim: direction(&self.trim),
            mixed: Direction::default(),
            errors: self.errors,
            verify_errors: self.verify_errors,
            target_cpu_ns: target.map(|used| used.cpu_ns),
            initiator_cpu_ns: initiator.map(|used| used.cpu_ns),
            target_system_ns: target.and_then(|used| used.system_ns),
            initiator_system_ns: initiator.and_then(|used| used.system_ns),
            machine_cpu_ns: None,
        }
    }
}

/// Longer than a remote volume retries by default.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);
/// A day, because a fill takes as long as it needs.
const FILL_TIMEOUT: Duration = Duration::from_secs(86_400);
/// Some targets take seconds for a login.
const FIRST_COMPLETION_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_ANSWER_PAUSE: Duration = Duration::from_millis(1);
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
