//! Task management functions that wait for aborted tasks.

/// The pending functions of one nexus.
#[derive(Default)]
pub(super) struct PendingResets([Option<PendingReset>; MAX_FUNCTIONS]);

/// A pending function.
#[derive(Clone, Copy)]
struct PendingReset {
    done: FunctionDone,
    /// Number of tasks with I/O in flight, and of volumes with I/O of other nexuses in flight.
    remaining: usize,
    /// The driver that received it; `None` if that has ended.
    requester: Option<u32>,
}

/// A completed function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FunctionDone {
    /// The initiator's tag of the function.
    pub(crate) tag: u32,
    /// The function is a reset that ends the session.
    pub(crate) ends_session: bool,
}

impl PendingResets {
    /// A free place.
    pub(super) fn free(&self) -> Option<usize> {
        self.0.iter().position(Option::is_none)
    }

    /// Makes a function wait for `remaining` tasks and volumes.
    pub(super) fn wait(&mut self, place: usize, done: FunctionDone, remaining: usize, requester: u32) {
        if let Some(place) = self.0.get_mut(place) {
            *place = Some(PendingReset { done, remaining, requester: Some(requester) });
        }
    }

    /// Counts one of them as finished; after the last one, returns the function and the driver that
    /// received it.
    pub(super) fn count(&mut self, place: usize) -> Option<(u32, FunctionDone)> {
        let place = self.0.get_mut(place)?;
        let pending = place.as_mut()?;
        pending.remaining = pending.remaining.saturating_sub(1);
        if pending.remaining > 0 {
            return None;
        }
        let PendingReset { done, requester, .. } = place.take()?;
        Some((requester?, done))
    }

    /// Lets the functions of a driver complete without a response.
    pub(super) fn drop_requester(&mut self, owner: u32) {
        let of_it = |pending: &&mut PendingReset| pending.requester == Some(owner);
        self.0.iter_mut().flatten().filter(of_it).for_each(|pending| pending.requester = None);
    }
}

/// Maximum number of pending functions; further ones are rejected.
const MAX_FUNCTIONS: usize = 16;
