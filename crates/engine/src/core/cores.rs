//! The process's cores: one thread with a reactor each, reached from other threads by an inbox.

use crate::core::reactor::{CoreStats, EngineCore, Inbox, PollPolicy, Reactor};
use crate::sys;
use crate::sys::congestion::Congestion;
use std::io;
use std::rc::Rc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How cores are started.
#[derive(Clone, Debug)]
pub struct CoresConfig {
    /// Number of cores.
    pub count: usize,
    /// Index, among the CPUs that the process may use, of the first core's CPU; the other cores use
    /// the CPUs that follow. `None`: threads are not pinned.
    pub pin_from: Option<usize>,
    /// When an idle core goes to sleep.
    pub policy: PollPolicy,
    /// Limit of each core's buffers, in bytes.
    pub pool_limit_bytes: usize,
    /// Congestion control of outgoing TCP connections; `None`: the system's. Listeners set their
    /// own.
    pub congestion: Option<Congestion>,
    /// What each core's thread does before its first task.
    pub begin: Option<fn(&EngineCore) -> io::Result<()>>,
}

impl Default for CoresConfig {
    fn default() -> CoresConfig {
        CoresConfig {
            count: 1,
            pin_from: None,
            policy: PollPolicy::ADAPTIVE,
            pool_limit_bytes: 1 << 30,
            congestion: None,
            begin: None,
        }
    }
}

/// Running cores. Dropping it ends them at once; [`Cores::stop`] does so gracefully.
pub struct Cores {
    threads: Vec<CoreThread>,
}

struct CoreThread {
    inbox: Inbox,
    stats: Arc<CoreStats>,
    /// `None` after [`Cores::end`].
    thread: Mutex<Option<CoreHandle>>,
}

type CoreHandle = JoinHandle<io::Result<()>>;

impl Cores {
    /// Starts the threads.
    ///
    /// # Errors
    /// If a thread or ring cannot be created, a thread cannot be pinned, or `begin` fails.
    pub fn start(config: &CoresConfig) -> io::Result<Cores> {
        let threads = (0..config.count).map(|nth| start_one(config, nth)).collect::<io::Result<Vec<_>>>()?;
        Ok(Cores { threads })
    }

    /// Number of cores.
    #[must_use]
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Inboxes of all cores, in order.
    #[must_use]
    pub fn inboxes(&self) -> Vec<Inbox> {
        self.threads.iter().map(|thread| thread.inbox.clone()).collect()
    }

    /// The counters of all cores, in order.
    #[must_use]
    pub fn stats(&self) -> Vec<Arc<CoreStats>> {
        self.threads.iter().map(|thread| thread.stats.clone()).collect()
    }

    /// Runs `ask` on core `nth` and waits for the result; `None` if the core has ended.
    pub fn ask<T: Send + 'static>(
        &self,
        nth: usize,
        ask: impl FnOnce(&Rc<EngineCore>) -> T + Send + 'static,
    ) -> Option<T> {
        self.threads.get(nth)?.inbox.ask(ask)
    }

    /// Wakes every task of every core, so that each notices requests of other threads.
    pub fn wake_all(&self) {
        for thread in &self.threads {
            thread.inbox.send(|core| core.wake_all());
        }
    }

    /// Asks every task to finish, waits at most `grace`, then ends the cores. Returns whether all
    /// tasks had finished.
    pub fn stop(self, grace: Duration) -> bool {
        self.finish(grace, || {})
    }

    /// Asks every task to finish and waits at most `grace`, then calls `late` if some have not.
    /// Returns whether all tasks have finished. A core that hangs in a system call does not delay
    /// this. The cores still run; [`Cores::end`] ends them.
    pub fn finish(&self, grace: Duration, late: impl FnOnce()) -> bool {
        for thread in &self.threads {
            thread.inbox.send(|core| core.stop());
        }
        let deadline = Instant::now() + grace;
        while self.threads.iter().any(|thread| thread.is_busy(deadline)) {
            if Instant::now() >= deadline {
                late();
                return false;
            }
            std::thread::park_timeout(STOP_POLL);
        }
        true
    }

    /// Ends the cores with their tasks, and waits at most `timeout` for their threads. Returns the
    /// number of cores that hang in a system call; their threads end with the process.
    pub fn end(&self, timeout: Duration) -> usize {
        for thread in &self.threads {
            thread.inbox.send(|core| core.end());
        }
        let deadline = Instant::now() + timeout;
        let mut left: Vec<_> = self.threads.iter().filter_map(|thread| thread.handle().take()).collect();
        loop {
            let (ended, running): (Vec<_>, Vec<_>) = left.into_iter().partition(CoreHandle::is_finished);
            ended.into_iter().for_each(join);
            if running.is_empty() || Instant::now() >= deadline {
                return running.len();
            }
            left = running;
            std::thread::park_timeout(STOP_POLL);
        }
    }
}

impl CoreThread {
    /// Whether the core has tasks that have not finished, or does not answer until `deadline`.
    fn is_busy(&self, deadline: Instant) -> bool {
        let (sender, receiver) = mpsc::channel();
        self.inbox.send(move |core| {
            // The receiver may be gone.
            let _ = sender.send(core.live_tasks());
        });
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            // One task remains on every core: its inbox.
            Ok(live) => live > 1,
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    fn handle(&self) -> MutexGuard<'_, Option<CoreHandle>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        for thread in &self.threads {
            thread.inbox.send(|core| core.end());
        }
        self.threads.iter().filter_map(|thread| thread.handle().take()).for_each(join);
    }
}

fn join(handle: CoreHandle) {
    match handle.join() {
        Err(_) => tracing::error!("a core has panicked"),
        Ok(Err(error)) => tracing::error!("a core's io_uring failed: {error}"),
        Ok(Ok(())) => {}
    }
}

fn start_one(config: &CoresConfig, nth: usize) -> io::Result<CoreThread> {
    let (sender, receiver) = mpsc::channel();
    let (policy, pool_limit_bytes, begin) = (config.policy, config.pool_limit_bytes, config.begin);
    let congestion = config.congestion.clone();
    let pin = config.pin_from.map(|first| first + nth);
    let thread = std::thread::Builder::new().name(format!("core{nth}")).spawn(move || {
        let started = pin.map_or(Ok(0), sys::pin_thread).and_then(|_| Reactor::new(policy, pool_limit_bytes));
        let started = started.and_then(|(reactor, inbox)| {
            begin.map_or(Ok(()), |begin| begin(reactor.core()))?;
            Ok((reactor, inbox))
        });
        match started {
            Ok((mut reactor, inbox)) => {
                if let Some(congestion) = congestion {
                    reactor.core().set_congestion(congestion);
                }
                let _ = sender.send(Ok((inbox, reactor.core().stats().clone())));
                reactor.run()
            }
            Err(error) => {
                let _ = sender.send(Err(error));
                Ok(())
            }
        }
    })?;
    let (inbox, stats) = receiver.recv().map_err(|_| io::Error::other("a core did not start"))??;
    Ok(CoreThread { inbox, stats, thread: Mutex::new(Some(thread)) })
}

/// Interval at which stopping polls for finished tasks.
const STOP_POLL: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_begins_before_it_runs_tasks_or_does_not_start() {
        let config = CoresConfig { begin: Some(EngineCore::keep_credentials), ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        assert!(cores.ask(0, |core| core.kept_credentials().is_some()).unwrap());
        let refuses = |_: &EngineCore| Err(io::ErrorKind::PermissionDenied.into());
        let refused = Cores::start(&CoresConfig { begin: Some(refuses), ..CoresConfig::default() });
        assert_eq!(refused.err().unwrap().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_core_that_hangs_does_not_keep_the_others_from_finishing_and_ending() {
        let cores = Cores::start(&CoresConfig { count: 2, ..CoresConfig::default() }).unwrap();
        let (release, hangs) = mpsc::channel::<()>();
        cores.inboxes()[0].send(move |_| {
            let _ = hangs.recv();
        });
        let mut is_late = false;
        assert!(!cores.finish(Duration::from_millis(20), || is_late = true));
        assert!(is_late);
        assert_eq!(cores.end(Duration::from_millis(20)), 1);
        assert_eq!(cores.ask(1, |_| ()), None, "the other core has ended");
        // A drop does not wait for the core that hangs: only then is it released.
        drop(cores);
        drop(release);
    }
}
