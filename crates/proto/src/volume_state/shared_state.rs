//! State that outlives the process: an image, and its generation.
//!
//! A change is proposed with the generation that it was made from. The store commits it, or rejects
//! it because another process, or another change, has come before. So what is stored is never
//! overwritten by somebody who has not seen it (decision 92).

use std::fmt;

/// Stores an image, for one owner in this process.
///
/// The owner proposes an image, asks for the outcome, and acts on the change only once it is
/// committed. Proposals are decided in their order. No call blocks: `propose` only starts to store.
/// Any core may call both.
pub trait SharedState: Send + Sync {
    /// Proposes to replace the image of the generation `expected`: that of the loaded state, of an
    /// earlier proposal, or of [`Commit::Stale`]. Returns the generation that the image gets. An
    /// empty image removes the state.
    fn propose(&self, expected: StateGeneration, image: &[u8]) -> StateGeneration;

    /// What has become of a proposal; `None` while it is undecided. The owner asks before it
    /// proposes more than a few others.
    fn outcome(&self, proposal: StateGeneration) -> Option<Commit>;
}

/// Identifies one version of a state; later ones are greater, with gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StateGeneration(pub u64);

/// A version of a state; by default the one that is not stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredState {
    /// Its generation.
    pub generation: StateGeneration,
    /// The owner's data; empty if nothing is stored.
    pub image: Vec<u8>,
}

/// Outcome of a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The image is on stable storage.
    Committed,
    /// The expected generation is not the stored one: nothing was changed. The owner makes its
    /// change again, from this state.
    Stale(StoredState),
    /// Storing has failed. Whether the next start loads the image is unknown until the next commit.
    Failed,
}

impl fmt::Debug for dyn SharedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedState")
    }
}
