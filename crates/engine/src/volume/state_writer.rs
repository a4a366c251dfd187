//! Proposals of a shared state, committed one after the other by a thread.
//!
//! ```text
//!   propose ──▶ queue ──▶ thread ──▶ StateStore::commit ──▶ outcome
//! ```
//! The owner of the state asks for outcomes on a core, so the queue's lock is never held during a
//! commit.

use blockmux_proto::volume_state::{Commit, SharedState, StateGeneration};
use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};
use tracing::warn;

/// Where a state is stored. Its calls may block.
pub trait StateStore: Send + Sync + 'static {
    /// What it holds between two commits, such as a lock.
    type Held: Default + Send;
    /// Why nothing was stored.
    type Error: Display;

    /// Replaces the stored image if that is what the proposal expects.
    fn commit(&self, held: &mut Self::Held, proposal: &Proposal) -> Result<Commit, Self::Error>;

    /// What the store is called in messages.
    fn name(&self) -> String;
}

/// A change of a state.
pub struct Proposal {
    /// The generation that is to be replaced.
    pub(super) expected: StateGeneration,
    /// The generation that the image gets.
    pub(super) generation: StateGeneration,
    pub(super) image: Vec<u8>,
}

/// The proposals of one owner to a store.
pub struct StateWriter<S: StateStore> {
    pub(super) shared: Arc<WriterShared<S>>,
}

/// What a writer shares with its thread.
pub(super) struct WriterShared<S: StateStore> {
    pub(super) store: S,
    state: Mutex<WriterState<S::Held>>,
    changed: Condvar,
}

pub(super) struct WriterState<H> {
    /// The greatest generation so far.
    last: u64,
    pub(super) queue: VecDeque<Proposal>,
    /// The last decided generation.
    decided: u64,
    /// Proposals that were not committed, the latest [`MAX_REJECTED`].
    rejected: VecDeque<(StateGeneration, Commit)>,
    has_writer: bool,
    is_over: bool,
    /// Taken while the thread commits.
    pub(super) held: H,
}

impl<S: StateStore> StateWriter<S> {
    /// A writer for a state whose stored generation is `stored`; it starts no thread before the
    /// first proposal.
    pub(super) fn new(store: S, held: S::Held, stored: StateGeneration) -> StateWriter<S> {
        let (last, decided) = (stored.0, stored.0);
        let (queue, rejected) = (VecDeque::new(), VecDeque::new());
        let (has_writer, is_over) = (false, false);
        let state = WriterState { last, queue, decided, rejected, has_writer, is_over, held };
        StateWriter {
            shared: Arc::new(WriterShared { store, state: Mutex::new(state), changed: Condvar::new() }),
        }
    }

    /// What the store is called in messages: the path of a file, or the name of an object.
    #[must_use]
    pub fn name(&self) -> String {
        self.shared.store.name()
    }
}

impl<S: StateStore> SharedState for StateWriter<S> {
    fn propose(&self, expected: StateGeneration, image: &[u8]) -> StateGeneration {
        let mut state = self.shared.state();
        state.last = generation_after(state.last);
        let generation = StateGeneration(state.last);
        state.queue.push_back(Proposal { expected, generation, image: image.to_vec() });
        if !state.has_writer {
            let shared = self.shared.clone();
            match thread::Builder::new().name("state".to_owned()).spawn(move || shared.commit_all()) {
                Ok(_) => state.has_writer = true,
                Err(error) => {
                    warn!("{}: cannot be saved: {error}", self.shared.store.name());
                    state.queue.clear();
                    state.decide(generation, Commit::Failed);
                }
            }
        }
        self.shared.changed.notify_one();
        generation
    }

    fn outcome(&self, proposal: StateGeneration) -> Option<Commit> {
        let state = self.shared.state();
        let rejected = state.rejected.iter().find(|(generation, _)| *generation == proposal);
        let is_decided = proposal.0 <= state.decided;
        rejected.map(|(_, outcome)| outcome.clone()).or(is_decided.then_some(Commit::Committed))
    }
}

impl<S: StateStore> Drop for StateWriter<S> {
    /// Ends the thread without waiting for it: a core may drop the writer, and a commit may hang.
    /// What the store holds is released now, or after the last commit.
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.is_over = true;
        if state.queue.is_empty() {
            state.held = S::Held::default();
        }
        self.shared.changed.notify_one();
    }
}

impl<H> WriterState<H> {
    fn decide(&mut self, generation: StateGeneration, outcome: Commit) {
        self.decided = generation.0;
        if let Commit::Stale(stored) = &outcome {
            self.last = self.last.max(stored.generation.0);
        }
        if outcome != Commit::Committed {
            self.rejected.truncate(MAX_REJECTED - 1);
            self.rejected.push_front((generation, outcome));
        }
    }
}

impl<S: StateStore> WriterShared<S> {
    pub(super) fn state(&self) -> MutexGuard<'_, WriterState<S::Held>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of the thread.
    fn commit_all(&self) {
        let mut state = self.state();
        loop {
            if let Some(proposal) = state.queue.pop_front() {
                let mut held = std::mem::take(&mut state.held);
                drop(state);
                let outcome = self.store.commit(&mut held, &proposal).unwrap_or_else(|error| {
                    warn!("not saved: {error}");
                    Commit::Failed
                });
                state = self.state();
                state.held = held;
                state.decide(proposal.generation, outcome);
            } else if state.is_over {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// A generation that no other process chooses, too: a proposal may build on one that was refused,
/// and must not be taken to build on what another process has stored.
fn generation_after(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
    now.max(last.saturating_add(1))
}

/// The number of remembered proposals that were not committed; owners ask for their outcomes soon.
const MAX_REJECTED: usize = 64;
