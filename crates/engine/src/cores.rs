//! The process's cores: one thread with a reactor each, reached from other threads by an inbox.

use crate::congestion::Congestion;
use crate::reactor::{CoreStats, EngineCore, Inbox, PollPolicy, Reactor};
use crate::sys;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
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
}

impl Default for CoresConfig {
    fn default() -> CoresConfig {
        CoresConfig {
            count: 1,
            pin_from: None,
            policy: PollPolicy::ADAPTIVE,
            pool_limit_bytes: 1 << 30,
            congestion: None,
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
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Cores {
    /// Starts the threads.
    ///
    /// # Errors
    /// If a thread or ring cannot be created, or a thread cannot be pinned.
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
        let (sender, receiver) = mpsc::channel();
        self.threads.get(nth)?.inbox.send(move |core| {
            // The receiver may be gone.
            let _ = sender.send(ask(core));
        });
        receiver.recv().ok()
    }

    /// Wakes every task of every core, so that each notices requests of other threads.
    pub fn wake_all(&self) {
        for thread in &self.threads {
            thread.inbox.send(|core| core.wake_all());
        }
    }

    /// CPU time that all cores have used.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        (0..self.count()).filter_map(|nth| self.ask(nth, |_| sys::thread_cpu_time())).sum()
    }

    /// Asks every task to finish, waits at most `grace`, then ends the cores. Returns whether all
    /// tasks had finished.
    pub fn stop(self, grace: Duration) -> bool {
        self.stop_or(grace, || {})
    }

    /// Stops as [`Cores::stop`] does, but calls `late` before it ends tasks that have not finished.
    pub fn stop_or(self, grace: Duration, late: impl FnOnce()) -> bool {
        for thread in &self.threads {
            thread.inbox.send(|core| core.stop());
        }
        let deadline = Instant::now() + grace;
        loop {
            // One task remains on every core: its inbox.
            let busy = (0..self.count())
                .filter_map(|nth| self.ask(nth, |core| core.live_tasks()))
                .any(|live| live > 1);
            if !busy {
                return true;
            }
            if Instant::now() >= deadline {
                late();
                return false;
            }
            std::thread::park_timeout(STOP_POLL);
        }
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        for thread in &self.threads {
            thread.inbox.send(|core| core.end());
        }
        for thread in &mut self.threads {
            match thread.thread.take().map(JoinHandle::join) {
                Some(Err(_)) => tracing::error!("a core has panicked"),
                Some(Ok(Err(error))) => tracing::error!("a core's io_uring failed: {error}"),
                Some(Ok(Ok(()))) | None => {}
            }
        }
    }
}

fn start_one(config: &CoresConfig, nth: usize) -> io::Result<CoreThread> {
    let (sender, receiver) = mpsc::channel();
    let (policy, pool_limit_bytes) = (config.policy, config.pool_limit_bytes);
    let congestion = config.congestion.clone();
    let pin = config.pin_from.map(|first| first + nth);
    let thread = std::thread::Builder::new().name(format!("core{nth}")).spawn(move || {
        let started = pin.map_or(Ok(0), sys::pin_thread).and_then(|_| Reactor::new(policy, pool_limit_bytes));
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
    Ok(CoreThread { inbox, stats, thread: Some(thread) })
}

/// Interval at which stopping polls for finished tasks.
const STOP_POLL: Duration = Duration::from_millis(5);
