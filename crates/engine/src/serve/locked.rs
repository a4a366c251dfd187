//! Requests of one session to one volume whose range another user of the volume has locked.
//!
//! They wait for their turn among those of all sessions ([`RangeWait`]), which wakes the session
//! from any thread. A request that has locked its range waits for I/O that began before, which
//! wakes nobody: it is tried every [`RETRY`].

use crate::core::reactor::{EngineCore, cross_thread_waker};
use blockmux_proto::volume_state::{NotAdmitted, RangeWait, VolumeState, WakeWaiting};
use blockmux_volume::{Core, Io, IoError, Tag, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(crate) struct LockedIo {
    /// The oldest first.
    waiting: Vec<WaitingIo>,
    /// Wakes the session from any thread; `None` before the first request, and in the simulator,
    /// which has no other threads.
    wake: Option<WakeWaiting>,
    /// A request may have its turn.
    is_woken: Arc<AtomicBool>,
    /// The pending wake-up for the next try.
    armed: Option<Instant>,
    core: Rc<dyn Core>,
    waker: Waker,
}

struct WaitingIo {
    io: Io,
    /// `None` once it has locked its range, and if too many wait for ranges of the volume.
    turn: Option<RangeWait>,
}

impl LockedIo {
    pub(crate) fn new(core: Rc<dyn Core>, waker: Waker) -> LockedIo {
        LockedIo { waiting: Vec::new(), wake: None, is_woken: Arc::default(), armed: None, core, waker }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether requests are to be tried now.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        !self.is_empty()
            && (self.is_woken.load(Ordering::Acquire) || self.armed.is_some_and(|armed| armed <= now))
    }

    /// Begins to try all requests, if they are to be tried now. A wake-up from now on is for the
    /// next time.
    pub(crate) fn begin_tries(&mut self, now: Instant) -> bool {
        let is_woken = self.is_woken.swap(false, Ordering::AcqRel);
        let is_late = self.armed.take_if(|armed| *armed <= now).is_some();
        !self.is_empty() && (is_woken || is_late)
    }

    /// Lets requests be tried in the next turn.
    pub(crate) fn wake(&self) {
        self.is_woken.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Lets a request wait that was not admitted, for the reason `why`.
    #[cold]
    pub(crate) fn push(&mut self, io: Io, volume_state: &Arc<VolumeState>, why: NotAdmitted<IoError>) {
        let turn = if let NotAdmitted::Locked(needed) = why {
            if self.wake.is_none() {
                let core = EngineCore::from_core(&self.core);
                self.wake = core.map(|core| -> WakeWaiting {
                    let (is_woken, wake) = (self.is_woken.clone(), cross_thread_waker(&core, &self.waker));
                    Arc::new(move || {
                        is_woken.store(true, Ordering::Release);
                        wake();
                    })
                });
            }
            let wake = self.wake.clone().unwrap_or_else(|| Arc::new(|| ()));
            RangeWait::new(volume_state, needed, wake)
        } else {
            None
        };
        self.waiting.push(WaitingIo { io, turn });
        // The range may have been unlocked meanwhile.
        self.wake();
    }

    /// Tries to begin the request at this place, if there is one. Until it is its turn, its range
    /// counts as locked.
    pub(crate) fn try_begin(
        &mut self,
        at: usize,
        begin: impl FnOnce(&Io) -> Result<(), NotAdmitted<IoError>>,
    ) -> Option<Result<(), NotAdmitted<IoError>>> {
        let WaitingIo { io, turn } = self.waiting.get_mut(at)?;
        let tried = match turn {
            Some(turn) => {
                turn.try_begin(|| begin(io)).unwrap_or_else(|| Err(NotAdmitted::Locked(turn.needed())))
            }
            None => begin(io),
        };
        if tried == Err(NotAdmitted::Draining) {
            *turn = None;
        }
        Some(tried)
    }

    /// Removes the request at this place.
    pub(crate) fn remove(&mut self, at: usize) -> Option<Io> {
        (at < self.waiting.len()).then(|| self.waiting.remove(at).io)
    }

    /// Removes the request with this tag.
    pub(crate) fn take(&mut self, tag: Tag) -> Option<Io> {
        self.remove(self.waiting.iter().position(|waiting| waiting.io.tag == tag)?)
    }

    /// Requests a wake-up for the next try, unless one is pending or nothing needs it.
    pub(crate) fn arm(&mut self) {
        let polls = self.waiting.iter().any(|waiting| waiting.turn.is_none() || self.wake.is_none());
        let now = self.core.now();
        if polls && self.armed.is_none_or(|armed| armed <= now) {
            let at = now + RETRY;
            self.core.wake_at(at, &self.waker);
            self.armed = Some(at);
        }
    }
}

/// How often a request is tried that nobody wakes.
const RETRY: Duration = Duration::from_millis(1);
