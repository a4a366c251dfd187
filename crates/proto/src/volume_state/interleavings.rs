//! Runs a small program of threads in every interleaving, over atomics and a mutex that let other
//! threads run before each access.
//!
//! Interleavings that lead to one state continue alike, so the search leaves each state once. A
//! state is the memory, and what each thread remembers: the results of its accesses since it began,
//! or of its [`call`]s. A thread does nothing else that depends on the interleaving, so this
//! determines what it does next. So 7,809 states stand for the 2.6 billion interleavings of the
//! largest test of
//! `model`. States are compared by hashes of 64 bits.
//!
//! All accesses are in one order, whatever `Ordering` they ask for.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner, thread};
use std::cell::RefCell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::{Add, Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{self, Arc, LockResult, PoisonError};

/// Runs the threads in every interleaving on what `new` makes, and then `end`.
pub(super) fn in_every_interleaving<S: Send + Sync + 'static, const N: usize>(
    new: fn() -> S,
    threads: [fn(&S); N],
    end: fn(&S),
) {
    Runner::new(EveryState::default(), Config::new()).run(move || {
        let shared = Arc::new(new());
        let all = threads.map(|run| {
            let shared = shared.clone();
            thread::spawn(move || {
                // Which program it runs.
                remember(with_state(|state| state.running));
                run(&shared);
                forget();
            })
        });
        all.into_iter().for_each(|thread| thread.join().unwrap());
        end(&shared);
    });
}

/// Runs a call of which the thread remembers only the result: it must change no variable of the
/// thread.
pub(super) fn call<R: Hash>(call: impl FnOnce() -> R) -> R {
    let before = with_state(|state| *state.memory_of_running());
    let result = call();
    with_state(|state| *state.memory_of_running() = before);
    remember(("returned", &result));
    result
}

/// A step without an access.
pub(super) fn pause() {
    let_others_run();
    remember("it has paused");
}

pub(super) type AtomicBool = Atomic<bool>;
pub(super) type AtomicU32 = Atomic<u32>;
pub(super) type AtomicU64 = Atomic<u64>;
pub(super) type AtomicUsize = Atomic<usize>;

/// An atomic variable.
pub(super) struct Atomic<T> {
    value: sync::Mutex<T>,
    location: usize,
}

impl<T: Copy + Hash> Atomic<T> {
    pub(super) fn new(value: T) -> Atomic<T> {
        Atomic { location: new_location(value), value: sync::Mutex::new(value) }
    }

    pub(super) fn load(&self, _: Ordering) -> T {
        self.access(|value| *value)
    }

    pub(super) fn store(&self, new: T, _: Ordering) {
        self.access(|value| *value = new);
    }

    fn access<R: Hash>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        let_others_run();
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        let result = access(&mut value);
        with_state(|state| state.contents[self.location] = hash(*value));
        remember(&result);
        result
    }
}

impl<T: Copy + Hash + Add<Output = T>> Atomic<T> {
    pub(super) fn fetch_add(&self, by: T, _: Ordering) -> T {
        self.access(|value| std::mem::replace(value, *value + by))
    }
}

impl<T: Copy + Hash + Default> Default for Atomic<T> {
    fn default() -> Atomic<T> {
        Atomic::new(T::default())
    }
}

/// A mutex.
pub(super) struct Mutex<T> {
    value: sync::Mutex<T>,
    location: usize,
}

/// Unlocks a mutex when dropped.
pub(super) struct MutexGuard<'a, T: Hash> {
    value: sync::MutexGuard<'a, T>,
    location: usize,
}

impl<T: Hash> Mutex<T> {
    pub(super) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let location = self.location;
        with_state(|state| state.waits_for.push((state.running, location)));
        let_others_run();
        let contents = with_state(|state| {
            state.waits_for.retain(|(thread, _)| *thread != state.running);
            state.locked.push(location);
            state.contents[location]
        });
        remember(contents);
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { value, location })
    }
}

impl<T: Default + Hash> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        let value = T::default();
        Mutex { location: new_location(&value), value: sync::Mutex::new(value) }
    }
}

impl<T: Hash> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Hash> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Hash> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        with_state(|state| {
            state.locked.retain(|location| *location != self.location);
            state.contents[self.location] = hash(&*self.value);
        });
    }
}

/// The state of a program.
#[derive(Default)]
struct State {
    /// A hash of the contents of each variable, indexed by its location.
    contents: Vec<u64>,
    /// A hash of what each thread remembers, indexed by its task.
    memories: Vec<u64>,
    /// The mutexes that are locked, by their locations.
    locked: Vec<usize>,
    /// The threads that wait for a mutex, and which.
    waits_for: Vec<(usize, usize)>,
    running: usize,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn with_state<R>(access: impl FnOnce(&mut State) -> R) -> R {
    STATE.with_borrow_mut(access)
}

fn new_location(contents: impl Hash) -> usize {
    with_state(|state| {
        state.contents.push(hash(contents));
        state.contents.len() - 1
    })
}

/// The thread has ended: it is the same whatever it has done.
fn forget() {
    with_state(|state| *state.memory_of_running() = 1);
}

fn let_others_run() {
    thread::yield_now();
}

/// Each step of a thread is remembered, so that it leads to another state.
fn remember(result: impl Hash) {
    with_state(|state| {
        let memory = state.memory_of_running();
        *memory = hash((*memory, hash(result)));
    });
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl State {
    fn memory_of_running(&mut self) -> &mut u64 {
        if self.memories.len() <= self.running {
            self.memories.resize(self.running + 1, 0);
        }
        &mut self.memories[self.running]
    }

    fn may_run(&self, thread: usize) -> bool {
        let waits_for = self.waits_for.iter().find(|(waiting, _)| *waiting == thread);
        waits_for.is_none_or(|(_, mutex)| !self.locked.contains(mutex))
    }

    /// Whether the thread's next step concerns no other: the main thread only starts others and
    /// waits for them, and others have yet to begin.
    fn concerns_no_other(&self, thread: usize) -> bool {
        thread == MAIN || self.memories.get(thread).is_none_or(|memory| *memory == 0)
    }
}

const MAIN: usize = 0;

/// Runs a program from each state with each thread that may run next, depth first.
#[derive(Default)]
struct EveryState {
    /// Hashes of the states that were reached.
    reached: HashSet<u64>,
    /// The steps of this run up to a state that was reached before, or of the last run.
    steps: Vec<Step>,
    /// Number of steps of this run.
    done: usize,
    has_begun: bool,
}

/// The thread that continues from a state, and those that will in later runs.
struct Step {
    thread: TaskId,
    others: Vec<TaskId>,
}

impl EveryState {
    /// The first step from a state that is new, or in which the threads have no choice; `None` if
    /// it was reached before.
    fn first_step(&mut self, runnable: &[&Task]) -> Option<Step> {
        with_state(|state| {
            let may_run = |id: &TaskId| state.may_run(usize::from(*id));
            let mut ready: Vec<TaskId> = runnable.iter().map(|task| task.id()).filter(may_run).collect();
            let silent = ready.iter().position(|id| state.concerns_no_other(usize::from(*id)));
            assert!(!ready.is_empty(), "the threads wait for each other");
            let thread = ready.swap_remove(silent.unwrap_or(0));
            if silent.is_some() || ready.is_empty() {
                return Some(Step { thread, others: Vec::new() });
            }
            let is_new = self.reached.insert(hash((&state.contents, &state.memories)));
            is_new.then_some(Step { thread, others: ready })
        })
    }
}

impl Scheduler for EveryState {
    fn new_execution(&mut self) -> Option<Schedule> {
        if std::mem::replace(&mut self.has_begun, true) {
            while self.steps.last()?.others.is_empty() {
                self.steps.pop();
            }
            let last = self.steps.last_mut()?;
            last.thread = last.others.pop()?;
        }
        self.done = 0;
        with_state(|state| *state = State::default());
        Some(Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], _: Option<TaskId>, _: bool) -> Option<TaskId> {
        let is_at_end = self.done == self.steps.len();
        if is_at_end && let Some(step) = self.first_step(runnable) {
            self.steps.push(step);
        }
        let next = match self.steps.get(self.done) {
            Some(step) => step.thread,
            // The rest is known, and the run only has to end.
            None => with_state(|state| {
                let may_run = |task: &&&Task| state.may_run(usize::from(task.id()));
                runnable.iter().find(may_run).expect("the threads wait for each other").id()
            }),
        };
        self.done += 1;
        with_state(|state| state.running = usize::from(next));
        Some(next)
    }

    fn next_u64(&mut self) -> u64 {
        unreachable!("programs use no random numbers")
    }
}
