//! Task management functions that wait for the tasks that they aborted.

/// The functions of one nexus that wait.
#[derive(Default)]
pub(super) struct Functions([Option<PendingReset>; MAX_FUNCTIONS]);

/// One of them.
#[derive(Clone, Copy)]
struct PendingReset {
    done: FunctionDone,
    /// Tasks whose I/O has not completed, and volumes where others' has not.
    left: usize,
    /// The driver that brought it; `None` if that is over.
    requester: Option<u32>,
}

/// A function that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FunctionDone {
    /// The initiator's tag of the function.
    pub(crate) tag: u32,
    /// It was a reset that ends the session.
    pub(crate) ends_session: bool,
}

impl Functions {
    /// A place that no function has.
    pub(super) fn free(&self) -> Option<usize> {
        self.0.iter().position(Option::is_none)
    }

    /// Has a function wait until so many tasks and volumes are done with.
    pub(super) fn wait(&mut self, place: usize, done: FunctionDone, left: usize, requester: u32) {
        if let Some(place) = self.0.get_mut(place) {
            *place = Some(PendingReset { done, left, requester: Some(requester) });
        }
    }

    /// One of what a function waits for is done with; returns the function and who brought it once
    /// that was the last.
    pub(super) fn count(&mut self, place: usize) -> Option<(u32, FunctionDone)> {
        let place = self.0.get_mut(place)?;
        let waiting = place.as_mut()?;
        waiting.left = waiting.left.saturating_sub(1);
        if waiting.left > 0 {
            return None;
        }
        let PendingReset { done, requester, .. } = place.take()?;
        Some((requester?, done))
    }

    /// What a driver has asked for is done in silence.
    pub(super) fn forget(&mut self, owner: u32) {
        let of_it = |waiting: &&mut PendingReset| waiting.requester == Some(owner);
        self.0.iter_mut().flatten().filter(of_it).for_each(|waiting| waiting.requester = None);
    }
}

/// Functions that wait at a time; more are refused.
const MAX_FUNCTIONS: usize = 16;
