//! One core: a thread that runs its tasks to completion and shares nothing.
//!
//! A [`Task`] runs when it was woken. After activity, tasks that poll a socket stay *hot*: the
//! reactor runs them repeatedly and they try the socket directly, so that a round trip needs no
//! sleep and no wake-up. A task without work for the spin time is *parked*: it arms a wake-up in
//! the ring. When no task is hot the core sleeps in the ring; an idle core uses no CPU time.
//! [`PollPolicy`] sets the spin time.

mod core;
mod cross_thread_waker;
mod inbox;
mod readiness;
mod stats;
mod task;

pub use self::core::EngineCore;
pub(crate) use cross_thread_waker::cross_thread_waker;
pub use inbox::{CoreMessage, Inbox};
pub(crate) use readiness::WakeOnEvent;
pub use stats::CoreStats;
pub use task::{Progress, Task};

use crate::core::ring::Ring;
use crate::sys::memory::trim_heap;
use blockmux_volume::Core;
use std::io;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

/// When an idle core goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// After this long without activity, or up to 200 us if that would have avoided recent sleeps;
    /// at once if another thread waits for the CPU.
    Adaptive(Duration),
    /// Never: uses a whole CPU and has the lowest latency.
    Always,
    /// At once.
    Never,
}

impl PollPolicy {
    /// The adaptive policy with its initial spin time.
    pub const ADAPTIVE: PollPolicy = PollPolicy::Adaptive(Duration::from_micros(50));

    /// The policy's name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PollPolicy::Adaptive(_) => "adaptive",
            PollPolicy::Always => "always",
            PollPolicy::Never => "never",
        }
    }
}

/// A core and its loop.
pub struct Reactor {
    core: Rc<EngineCore>,
    hot: Vec<HotTask>,
    /// How long to poll before sleeping.
    spin: Duration,
    /// When to yield the CPU next.
    next_yield: Instant,
    /// When to trim the heap after a burst.
    trim_at: Option<Instant>,
}

struct HotTask {
    id: u64,
    last_active: Instant,
}

impl Reactor {
    /// A core on the calling thread, with at most `pool_limit_bytes` of buffers, and its inbox.
    ///
    /// # Errors
    /// If the kernel refuses an io_uring.
    pub fn new(policy: PollPolicy, pool_limit_bytes: usize) -> io::Result<(Reactor, Inbox)> {
        let core = EngineCore::new(Ring::new()?, policy, pool_limit_bytes);
        let inbox = inbox::open(&core)?;
        core.set_inbox(inbox.clone());
        let (spin, next_yield) = (shortest_spin(policy), Instant::now());
        Ok((Reactor { core, hot: Vec::new(), spin, next_yield, trim_at: None }, inbox))
    }

    /// The tasks' view of this core.
    #[must_use]
    pub fn core(&self) -> &Rc<EngineCore> {
        &self.core
    }

    /// Runs until [`EngineCore::end`].
    ///
    /// # Errors
    /// If the ring fails.
    pub fn run(&mut self) -> io::Result<()> {
        let mut last_active = Instant::now();
        let mut turns: u32 = 0;
        while !self.core.ended.get() {
            let now = Instant::now();
            let active = self.turn(now);
            if active {
                last_active = now;
            }
            self.core.stats.count_turn(active);
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS_PER_REPORT) {
                self.report_buffers();
            }
            // Tasks that keep waking each other may have pushed ring entries, which must not wait
            // for ever.
            if !self.core.ready.is_empty() && !turns.is_multiple_of(MAX_TURNS_UNSUBMITTED) {
                continue;
            }
            if (active && self.core.policy != PollPolicy::Never)
                || self.keeps_awake(now.duration_since(last_active))
            {
                self.core.ring.submit()?;
                if !active && self.yields_cpu(now) {
                    self.spin = shortest_spin(self.core.policy);
                    self.sleep(Instant::now())?;
                }
            } else {
                // Sleeps even right after activity: an entry that has completed ends the sleep at
                // once.
                self.sleep(now)?;
                self.adapt_spin(|| now.elapsed());
            }
        }
        Ok(())
    }

    /// Spins longer if that would have avoided a sleep of this length. A peer that works on a long
    /// batch causes such sleeps: without longer spins the two sides would sleep alternately, and
    /// each batch would also cost a wake-up.
    fn adapt_spin(&mut self, slept: impl FnOnce() -> Duration) {
        // Other policies do not need the time, so the clock is not read.
        if let PollPolicy::Adaptive(shortest) = self.core.policy {
            self.spin = if slept() < MAX_SPIN { (self.spin * 2).min(MAX_SPIN) } else { shortest };
        }
    }

    /// While idle, yields the CPU to other runnable threads every [`YIELD_EVERY`]; returns whether
    /// there were any. They may be what this core waits for: its client, or another core.
    fn yields_cpu(&mut self, now: Instant) -> bool {
        if now < self.next_yield || !matches!(self.core.policy, PollPolicy::Adaptive(_)) {
            return false;
        }
        thread::yield_now();
        let back = Instant::now();
        self.next_yield = back + YIELD_EVERY;
        back.duration_since(now) > SHORTEST_YIELD
    }

    /// Runs until `done`, sleeping only when nothing is ready: for tests.
    ///
    /// # Errors
    /// If the ring fails.
    pub fn run_until(&mut self, mut done: impl FnMut() -> bool) -> io::Result<()> {
        while !done() {
            let now = Instant::now();
            if self.turn(now) {
                self.core.ring.submit()?;
            } else {
                self.sleep(now)?;
            }
        }
        Ok(())
    }

    /// One round: completions, deadlines, ready tasks, hot tasks. Returns whether anything
    /// happened.
    #[inline]
    fn turn(&mut self, now: Instant) -> bool {
        let mut active = self.core.ring.reap() > 0;
        self.core.timers.fire(now);
        // Only tasks that are ready now: those they wake run in the next round, after the ring was
        // polled.
        for _ in 0..self.core.ready.len() {
            let Some(id) = self.core.ready.pop() else { break };
            active = true;
            self.run_woken(id, now);
        }
        active | self.run_hot(now)
    }

    fn run_woken(&mut self, id: u64, now: Instant) {
        let Some((progress, is_polled, was_hot)) = self.core.run_task(id) else { return };
        if !is_polled {
            if progress == Progress::More {
                self.core.wake_task(id);
            }
            return;
        }
        match self.core.policy {
            PollPolicy::Never if progress == Progress::More => self.core.wake_task(id),
            PollPolicy::Never => self.core.park_task(id),
            _ if was_hot => {}
            _ => self.hot.push(HotTask { id, last_active: now }),
        }
    }

    #[inline]
    fn run_hot(&mut self, now: Instant) -> bool {
        if self.core.policy == PollPolicy::Never {
            return false;
        }
        let spin = self.spin;
        let (core, mut active) = (&self.core, false);
        self.hot.retain_mut(|hot| match core.run_task(hot.id) {
            None => false,
            Some((Progress::More | Progress::Drained, ..)) => {
                (active, hot.last_active) = (true, now);
                true
            }
            Some(_) if now.duration_since(hot.last_active) < spin => true,
            Some(_) => {
                core.park_task(hot.id);
                false
            }
        });
        active
    }

    /// Trims the heap some time after a burst, when no other burst has followed; returns the next
    /// check.
    fn trim_when_due(&mut self, now: Instant) -> Option<Instant> {
        let pool = self.core.pool();
        if !pool.should_trim() {
            return None;
        }
        let due = *self.trim_at.get_or_insert(now + TRIM_AFTER);
        if now < due {
            return Some(due);
        }
        self.trim_at = None;
        pool.note_trimmed();
        trim_heap();
        None
    }

    fn report_buffers(&self) {
        let pool = self.core.pool();
        self.core.stats.set_buffers(pool.out_bytes(), pool.limit_bytes());
    }

    fn keeps_awake(&self, idle: Duration) -> bool {
        match self.core.policy {
            PollPolicy::Always => true,
            PollPolicy::Adaptive(_) => idle < self.spin,
            PollPolicy::Never => !self.core.ready.is_empty() || self.core.ended.get(),
        }
    }

    fn sleep(&mut self, now: Instant) -> io::Result<()> {
        for hot in self.hot.drain(..) {
            self.core.park_task(hot.id);
        }
        if !self.core.ready.is_empty() {
            return Ok(());
        }
        self.core.stats.count_sleep();
        self.report_buffers();
        let trim_at = self.trim_when_due(now);
        let wake_at = [self.core.timers.next(), trim_at].into_iter().flatten().min();
        self.core.ring.submit_and_wait(wake_at.map(|when| when.saturating_duration_since(now)))
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Breaks the reference cycle between core and tasks.
        self.core.drop_tasks();
    }
}

/// The initial spin time.
fn shortest_spin(policy: PollPolicy) -> Duration {
    match policy {
        PollPolicy::Adaptive(spin) => spin,
        PollPolicy::Always => HOT_WHEN_ALWAYS,
        PollPolicy::Never => Duration::ZERO,
    }
}

/// Longest spin of an adaptive core: somewhat more than a batch at depth 32 takes, and equal to
/// KVM's default halt polling for a guest.
const MAX_SPIN: Duration = Duration::from_micros(200);
/// Interval of yields while an adaptive core spins; a yield costs a fiftieth of it if no
/// thread is runnable.
const YIELD_EVERY: Duration = Duration::from_micros(10);
/// A yield that returns sooner than this has run no other thread.
const SHORTEST_YIELD: Duration = Duration::from_micros(20);
/// Maximum number of turns that ring entries wait while tasks wake each other.
const MAX_TURNS_UNSUBMITTED: u32 = 4;
/// Turns after which a core that does not sleep reports its buffers.
const TURNS_PER_REPORT: u32 = 4096;
/// With [`PollPolicy::Always`] the core spins on, but arms wake-ups for sockets idle for this long.
const HOT_WHEN_ALWAYS: Duration = Duration::from_millis(10);

/// Delay from a burst to trimming the heap: a burst that follows sooner reuses the memory.
const TRIM_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;
    use blockmux_volume::Waker;
    use std::cell::{Cell, RefCell};
    use std::rc::Weak;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Countdown(Rc<Cell<u32>>);
    impl Task for Countdown {
        fn run(&mut self) -> Progress {
            self.0.set(self.0.get() - 1);
            if self.0.get() == 0 { Progress::Done } else { Progress::More }
        }
    }

    #[test]
    fn a_task_runs_until_it_is_done() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let left = Rc::new(Cell::new(5));
        reactor.core().spawn(|_| Countdown(left.clone()));
        let core = reactor.core().clone();
        reactor.run_until(|| left.get() == 0).unwrap();
        assert_eq!(core.live_tasks(), 1);
    }

    /// Records its turns, and has more to do after each.
    struct Busy(u32, Rc<RefCell<Vec<u32>>>, bool);
    impl Task for Busy {
        fn run(&mut self) -> Progress {
            self.1.borrow_mut().push(self.0);
            Progress::More
        }

        fn is_polled(&self) -> bool {
            self.2
        }
    }

    #[test]
    fn tasks_that_always_have_more_to_do_take_turns() {
        for policy in [PollPolicy::Never, PollPolicy::ADAPTIVE, PollPolicy::Always] {
            for is_polled in [false, true] {
                let (mut reactor, _inbox) = Reactor::new(policy, 1 << 20).unwrap();
                let turns = Rc::new(RefCell::new(Vec::new()));
                for number in 0..4 {
                    reactor.core().spawn(|_| Busy(number, turns.clone(), is_polled));
                }
                reactor.run_until(|| turns.borrow().len() > 100).unwrap();
                // The first turn is for the initial wake-up.
                let rounds = turns.borrow()[4..].chunks_exact(4).map(<[u32]>::to_vec).collect::<Vec<_>>();
                assert!(rounds.iter().all(|round| *round == [0, 1, 2, 3]), "{policy:?}: {rounds:?}");
            }
        }
    }

    #[test]
    fn another_thread_reaches_a_sleeping_core_under_every_policy() {
        for policy in [PollPolicy::Never, PollPolicy::ADAPTIVE, PollPolicy::Always] {
            let (mut reactor, inbox) = Reactor::new(policy, 1 << 20).unwrap();
            let sender = std::thread::spawn(move || inbox.send(|core| core.end()));
            reactor.run().unwrap();
            sender.join().unwrap();
        }
    }

    #[test]
    fn an_adaptive_core_spins_longer_while_that_would_have_avoided_its_sleeps() {
        let us = Duration::from_micros;
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::ADAPTIVE, 1 << 20).unwrap();
        let shortest = reactor.spin;
        let mut spins = Vec::new();
        for slept in [10, 10, 10, 10, 10_000] {
            reactor.adapt_spin(|| us(slept));
            spins.push(reactor.spin);
        }
        assert_eq!(spins, [2 * shortest, MAX_SPIN, MAX_SPIN, MAX_SPIN, shortest]);
        for policy in [PollPolicy::Never, PollPolicy::Always] {
            let (mut reactor, _inbox) = Reactor::new(policy, 1 << 20).unwrap();
            let before = reactor.spin;
            reactor.adapt_spin(|| us(10));
            assert_eq!(reactor.spin, before);
        }
    }

    #[test]
    fn an_adaptive_core_yields_the_cpu_when_another_thread_is_runnable() {
        // The second thread inherits the pinning and is always runnable.
        sys::pin_thread(0).unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let until = is_done.clone();
        let other = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let (mut adaptive, _inbox) = Reactor::new(PollPolicy::ADAPTIVE, 1 << 20).unwrap();
        while !adaptive.yields_cpu(Instant::now()) {}
        for policy in [PollPolicy::Always, PollPolicy::Never] {
            let (mut reactor, _inbox) = Reactor::new(policy, 1 << 20).unwrap();
            assert!((0..100_000).all(|_| !reactor.yields_cpu(Instant::now())), "{policy:?}");
        }
        is_done.store(true, Ordering::Relaxed);
        other.join().unwrap();
    }

    #[test]
    fn a_deadline_wakes_a_sleeping_core() {
        struct Sleeper(Rc<Cell<u32>>, Weak<EngineCore>, Waker);
        impl Task for Sleeper {
            fn run(&mut self) -> Progress {
                self.0.set(self.0.get() + 1);
                if let Some(core) = self.1.upgrade() {
                    core.wake_at(core.now() + Duration::from_millis(1), &self.2);
                }
                Progress::Idle
            }
        }
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let (runs, core) = (Rc::new(Cell::new(0)), reactor.core().this.clone());
        reactor.core().spawn(|waker| Sleeper(runs.clone(), core, waker.clone()));
        reactor.run_until(|| runs.get() == 3).unwrap();
    }
}
