//! Threads for computations that peers cause before they are authenticated, such as
//! Diffie-Hellman exchanges and signatures, which would delay the I/O of everybody else on a core.
//!
//! Few threads of low priority take the jobs of all addresses in turn, one of each, so that a peer
//! with many connections delays only itself. See
//! `docs/decisions/0075-public-key-work-runs-on-helper-threads.md`.

use crate::sys;
use blockmux_proto::driver::computation::{Job, RunJob};
use blockmux_volume::peer_network;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use tracing::warn;

/// Records the CPUs that the helpers may use, which are those of the calling thread. Call it from a
/// thread that is not pinned to one of them.
pub fn prepare() {
    CPUS.get_or_init(|| sys::allowed_cpus().unwrap_or_default());
}

/// Runs the jobs of sessions with this peer.
#[must_use]
pub fn for_peer(peer: Option<IpAddr>) -> RunJob {
    let source = JobSource::of(peer);
    Arc::new(move |job| {
        let mut queue = queue();
        queue.push(source, job);
        queue.start_thread();
        drop(queue);
        READY.notify_one();
    })
}

/// The peers that share a turn. `None` are those of Unix sockets.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct JobSource(Option<IpAddr>);

impl JobSource {
    fn of(peer: Option<IpAddr>) -> JobSource {
        JobSource(peer.map(peer_network))
    }
}

/// Jobs that no thread has taken yet.
#[derive(Default)]
struct JobQueue {
    jobs: HashMap<JobSource, VecDeque<Job>>,
    /// The sources with jobs, in the order of their turns.
    turns: VecDeque<JobSource>,
    threads: usize,
    idle_threads: usize,
}

impl JobQueue {
    /// Queues a job. If its source has too many, it is dropped, and its session waits until its
    /// deadline.
    fn push(&mut self, source: JobSource, job: Job) {
        if self.turns.len() >= MAX_SOURCES && !self.jobs.contains_key(&source) {
            return;
        }
        let jobs = self.jobs.entry(source).or_default();
        if jobs.len() >= MAX_JOBS {
            // Those of connections that have ended meanwhile.
            jobs.retain(Job::is_wanted);
        }
        if jobs.len() >= MAX_JOBS {
            return;
        }
        if jobs.is_empty() && !self.turns.contains(&source) {
            self.turns.push_back(source);
        }
        jobs.push_back(job);
    }

    /// The next job that a session still waits for.
    fn pop(&mut self) -> Option<Job> {
        while let Some(source) = self.turns.pop_front() {
            let Some(jobs) = self.jobs.get_mut(&source) else { continue };
            let job = jobs.pop_front();
            if jobs.is_empty() {
                self.jobs.remove(&source);
            } else {
                self.turns.push_back(source);
            }
            if let Some(job) = job.filter(Job::is_wanted) {
                return Some(job);
            }
        }
        None
    }

    /// Starts another thread if all are busy and there may be more.
    fn start_thread(&mut self) {
        if self.idle_threads > 0 || self.threads >= max_threads() || self.turns.is_empty() {
            return;
        }
        match thread::Builder::new().name("handshake".to_owned()).spawn(run_thread) {
            Ok(_) => self.threads += 1,
            Err(error) if self.threads == 0 => {
                warn!("cannot start a thread for handshakes: {error}; raise the limit of processes");
            }
            Err(_) => {}
        }
    }
}

fn run_thread() {
    if let Err(error) = sys::use_low_priority(CPUS.get().map_or(&[], Vec::as_slice)) {
        warn!("cannot lower the priority of a thread for handshakes: {error}");
    }
    let mut jobs = queue();
    loop {
        if let Some(job) = jobs.pop() {
            drop(jobs);
            // A thread that ended would be missing for ever. The session waits until its deadline.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| job.run()));
            jobs = queue();
            continue;
        }
        jobs.idle_threads += 1;
        jobs = READY.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        jobs.idle_threads -= 1;
    }
}

fn queue() -> MutexGuard<'static, JobQueue> {
    QUEUE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of threads: one for four CPUs. The calling thread may be pinned to one of them.
fn max_threads() -> usize {
    (CPUS.get().map_or(1, Vec::len) / 4).clamp(1, MAX_THREADS)
}

static QUEUE: OnceLock<Mutex<JobQueue>> = OnceLock::new();
static READY: Condvar = Condvar::new();
static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
const MAX_THREADS: usize = 8;
/// Maximum number of queued jobs of one source: more than its connections that may be in a
/// handshake.
const MAX_JOBS: usize = 1024;
/// Maximum number of sources with queued jobs.
const MAX_SOURCES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::driver::computation::{Computation, Helpers};
    use std::sync::mpsc;

    /// A job that sends this number when it runs, and its computation.
    fn job(number: u32, sender: &mpsc::Sender<u32>) -> (Job, Computation<()>) {
        let slot = Arc::new(Mutex::new(None));
        let (taken, sender) = (slot.clone(), sender.clone());
        let run: RunJob = Arc::new(move |job| *taken.lock().unwrap() = Some(job));
        let helpers = Helpers { run, notify: Arc::new(|| ()) };
        let computation = Computation::start(Some(&helpers), move || sender.send(number).unwrap());
        let job = slot.lock().unwrap().take().unwrap();
        (job, computation)
    }

    fn source(last: u8) -> JobSource {
        JobSource::of(Some([192, 0, 2, last].into()))
    }

    fn numbers(mut queue: JobQueue, received: &mpsc::Receiver<u32>) -> Vec<u32> {
        while let Some(job) = queue.pop() {
            job.run();
        }
        received.try_iter().collect()
    }

    #[test]
    fn addresses_take_turns_however_many_jobs_one_has() {
        let (sender, received) = mpsc::channel();
        let (mut queue, mut kept) = (JobQueue::default(), Vec::new());
        for number in 0..5 {
            let (job, computation) = job(number, &sender);
            queue.push(source(1), job);
            kept.push(computation);
        }
        for number in [10, 11] {
            let (job, computation) = job(number, &sender);
            queue.push(source(2), job);
            kept.push(computation);
        }
        assert_eq!(numbers(queue, &received), [0, 10, 1, 11, 2, 3, 4]);
    }

    #[test]
    fn jobs_of_ended_sessions_give_way_and_others_are_limited() {
        let (sender, received) = mpsc::channel();
        let (mut queue, mut kept) = (JobQueue::default(), Vec::new());
        for number in 0..MAX_JOBS as u32 {
            queue.push(source(1), job(number, &sender).0);
        }
        for number in 0..2 * MAX_JOBS as u32 {
            let (job, computation) = job(number, &sender);
            queue.push(source(1), job);
            kept.push(computation);
        }
        assert_eq!(queue.jobs[&source(1)].len(), MAX_JOBS);
        assert_eq!(numbers(queue, &received), (0..MAX_JOBS as u32).collect::<Vec<_>>());
    }

    #[test]
    fn addresses_of_one_ipv6_network_share_a_turn() {
        let of = |text: &str| JobSource::of(Some(text.parse().unwrap()));
        assert!(of("2001:db8::1") == of("2001:db8::ffff:2"));
        assert!(of("2001:db8::1") != of("2001:db8:0:1::1"));
        assert!(of("::ffff:192.0.2.1") == source(1));
    }

    #[test]
    fn a_computation_that_panics_ends_no_thread() {
        let (sender, received) = mpsc::channel();
        let notify = Arc::new(move || sender.send(()).unwrap());
        let helpers = Helpers { run: for_peer(None), notify };
        let panics: Vec<_> = (0..=MAX_THREADS)
            .map(|_| Computation::start(Some(&helpers), || -> u8 { panic!("as asked") }))
            .collect();
        let mut computation = Computation::start(Some(&helpers), || 7);
        received.recv().unwrap();
        assert_eq!(computation.take(), Some(7));
        drop(panics);
    }

    #[test]
    fn a_thread_computes_and_notifies() {
        let (sender, received) = mpsc::channel();
        let notify = Arc::new(move || sender.send(()).unwrap());
        let helpers = Helpers { run: for_peer(None), notify };
        let mut computation = Computation::start(Some(&helpers), || thread::current().id());
        received.recv().unwrap();
        assert_ne!(computation.take(), Some(thread::current().id()));
    }
}
