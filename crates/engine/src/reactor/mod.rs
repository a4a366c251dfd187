//! One core: a thread that runs its tasks to completion and shares nothing.
//!
//! A [`Task`] is run when it was woken. After activity, tasks that look at a socket stay *hot*: the
//! reactor runs them over and over, and they try the socket directly, so that a round trip needs no
//! sleep and no wake-up. A task that found nothing for the spin time is *parked*: it asks the ring
//! to be told. When nothing is hot the core sleeps in the ring, and an idle core uses no processor
//! time at all. [`PollPolicy`] sets the spin time.

mod core;
mod cross_thread_waker;
mod inbox;
mod readiness;
mod task;

pub use self::core::EngineCore;
pub(crate) use cross_thread_waker::cross_thread_waker;
pub use inbox::{Inbox, Message};
pub(crate) use readiness::WakeOnEvent;
pub use task::{Progress, Task};

use crate::memory::trim_heap;
use crate::ring::Ring;
use blockmux_volume::Core;
use std::io;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

/// When a core that has nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// After this long without activity, or after up to 200 us as long as that would have saved
    /// sleeps; at once where others wait for the processor.
    Adaptive(Duration),
    /// Never: it takes a whole processor and answers fastest.
    Always,
    /// At once.
    Never,
}

impl PollPolicy {
    /// The adaptive policy with the spin time that it begins with.
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
    hot: Vec<Hot>,
    /// How long to look for work before sleeping.
    spin: Duration,
    /// When to ask again whether others want the processor.
    makes_way_at: Instant,
    /// When the heap is to give back what a burst took.
    trim_at: Option<Instant>,
}

struct Hot {
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
        let (spin, makes_way_at) = (shortest_spin(policy), Instant::now());
        Ok((Reactor { core, hot: Vec::new(), spin, makes_way_at, trim_at: None }, inbox))
    }

    /// What runs on this core.
    #[must_use]
    pub fn core(&self) -> &Rc<EngineCore> {
        &self.core
    }

    /// Runs until [`EngineCore::end`].
    ///
    /// # Errors
    /// If the ring breaks.
    pub fn run(&mut self) -> io::Result<()> {
        let mut last_active = Instant::now();
        let mut turns: u32 = 0;
        while !self.core.ended.get() {
            let now = Instant::now();
            let active = self.turn(now);
            if active {
                last_active = now;
            }
            turns = turns.wrapping_add(1);
            // What woke up meanwhile may have more for the ring; it need not wait for that for
            // ever.
            if !self.core.ready.is_empty() && !turns.is_multiple_of(MOST_TURNS_UNSUBMITTED) {
                continue;
            }
            if (active && self.core.policy != PollPolicy::Never)
                || self.keeps_awake(now.duration_since(last_active))
            {
                self.core.ring.submit()?;
                if !active && self.makes_way(now) {
                    self.spin = shortest_spin(self.core.policy);
                    self.sleep(Instant::now())?;
                }
            } else {
                // Also straight after activity: what is finished already ends the sleep at once.
                self.sleep(now)?;
                self.learn(|| now.elapsed());
            }
        }
        Ok(())
    }

    /// Spins longer if that would have saved a sleep of that length, as peers that work on a long
    /// batch make them. Two sides that each wait for the other's batch otherwise sleep in turn, and
    /// a batch that has to wake somebody takes longer still.
    fn learn(&mut self, slept: impl FnOnce() -> Duration) {
        // No other policy has a use for another look at the clock.
        if let PollPolicy::Adaptive(shortest) = self.core.policy {
            self.spin = if slept() < LONGEST_SPIN { (self.spin * 2).min(LONGEST_SPIN) } else { shortest };
        }
    }

    /// Now and then while nothing happens, lets others have the processor that wait for it; whether
    /// there were any. They may be what this core waits for, its client or another core, and are
    /// worth more than its spinning if not.
    fn makes_way(&mut self, now: Instant) -> bool {
        if now < self.makes_way_at || !matches!(self.core.policy, PollPolicy::Adaptive(_)) {
            return false;
        }
        thread::yield_now();
        let back = Instant::now();
        self.makes_way_at = back + MAKES_WAY_EVERY;
        back.duration_since(now) > NOBODY_WAITED
    }

    /// Runs whatever is ready once, without sleeping unless nothing is: for tests that wait for
    /// something.
    ///
    /// # Errors
    /// If the ring breaks.
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

    /// One round: completions, deadlines, ready tasks, hot tasks. Answers whether anything
    /// happened.
    #[inline]
    fn turn(&mut self, now: Instant) -> bool {
        let mut active = self.core.ring.reap() > 0;
        self.core.timers.fire(now);
        // Only those that are ready now: what they wake runs in the next round, after the ring had
        // its turn.
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
            _ => self.hot.push(Hot { id, last_active: now }),
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

    /// Trims the heap some time after a burst; answers when to look again. Soon after it, the next
    /// may come.
    fn trim_when_due(&mut self, now: Instant) -> Option<Instant> {
        let pool = self.core.pool();
        if !pool.has_shed_much() {
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
        let trim_at = self.trim_when_due(now);
        let wake_at = [self.core.timers.next(), trim_at].into_iter().flatten().min();
        self.core.ring.submit_and_wait(wake_at.map(|when| when.saturating_duration_since(now)))
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks hold the core and the core holds tasks: this is where the circle is cut.
        self.core.drop_tasks();
    }
}

/// How long tasks stay hot, and a core that sleeps at all awake, before anything is known of the
/// load.
fn shortest_spin(policy: PollPolicy) -> Duration {
    match policy {
        PollPolicy::Adaptive(spin) => spin,
        PollPolicy::Always => HOT_WHEN_ALWAYS,
        PollPolicy::Never => Duration::ZERO,
    }
}

/// The most that an adaptive core spins: what a batch at depth 32 takes with some to spare, and as
/// long as KVM's halt polling spins for a guest.
const LONGEST_SPIN: Duration = Duration::from_micros(200);
/// While an adaptive core spins; a call takes a fiftieth of that if nobody waits.
const MAKES_WAY_EVERY: Duration = Duration::from_micros(10);
/// If so, a call takes less than that.
const NOBODY_WAITED: Duration = Duration::from_micros(20);
/// How long an entry for the ring may wait while tasks wake each other, in turns.
const MOST_TURNS_UNSUBMITTED: u32 = 4;
/// With [`PollPolicy::Always`] the core spins on, but asks the ring about sockets that were silent
/// for this long.
const HOT_WHEN_ALWAYS: Duration = Duration::from_millis(10);

/// Bursts that follow each other more closely use the same memory.
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

    /// Notes its turns, and has more to do after each.
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
                // The first turn is the one for which they were woken.
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
    fn an_adaptive_core_spins_longer_as_long_as_that_would_have_saved_its_sleeps() {
        let us = Duration::from_micros;
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::ADAPTIVE, 1 << 20).unwrap();
        let shortest = reactor.spin;
        let mut spins = Vec::new();
        for slept in [10, 10, 10, 10, 10_000] {
            reactor.learn(|| us(slept));
            spins.push(reactor.spin);
        }
        assert_eq!(spins, [2 * shortest, LONGEST_SPIN, LONGEST_SPIN, LONGEST_SPIN, shortest]);
        for policy in [PollPolicy::Never, PollPolicy::Always] {
            let (mut reactor, _inbox) = Reactor::new(policy, 1 << 20).unwrap();
            let before = reactor.spin;
            reactor.learn(|| us(10));
            assert_eq!(reactor.spin, before);
        }
    }

    #[test]
    fn an_adaptive_core_makes_way_for_whoever_waits_for_its_processor() {
        // Threads inherit it. The other one always wants the processor.
        sys::pin_thread(0).unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let until = is_done.clone();
        let other = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let (mut adaptive, _inbox) = Reactor::new(PollPolicy::ADAPTIVE, 1 << 20).unwrap();
        while !adaptive.makes_way(Instant::now()) {}
        for policy in [PollPolicy::Always, PollPolicy::Never] {
            let (mut reactor, _inbox) = Reactor::new(policy, 1 << 20).unwrap();
            assert!((0..100_000).all(|_| !reactor.makes_way(Instant::now())), "{policy:?}");
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
