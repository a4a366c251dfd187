//! The state of a memory window, which the device, the peer and this side change.
//!
//! A peer's invalidation may be polled before the completion of the bind, since messages and work
//! complete apart. It shows that the bind was executed, so the window can be bound again at once.
//! Binds are counted until their completions are polled: a completion says nothing of the window
//! while a later bind is in the queue, and until then the window is not freed.

/// What has become of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowState {
    /// Binds in the queue: those whose completions were not polled.
    binds: u32,
    /// It was bound, and is not known to be invalid since.
    is_open: bool,
    /// It is to be closed as soon as no bind is in the queue.
    is_closing: bool,
}

/// What is to be done with a window.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowStep {
    Nothing,
    /// It is closed, which is to be reported.
    Report,
    /// It is to be freed, and the one in its place to be reported. No bind is in the queue.
    Replace,
}

impl WindowState {
    /// Whether it can be bound.
    pub(crate) fn is_free(self) -> bool {
        !self.is_open
    }

    /// A bind was posted.
    pub(crate) fn on_bind(&mut self) {
        self.binds = self.binds.saturating_add(1);
        self.is_open = true;
    }

    /// A bind has been executed.
    pub(crate) fn on_bound(&mut self) -> WindowStep {
        self.binds = self.binds.saturating_sub(1);
        if self.binds == 0 && self.is_closing { WindowStep::Replace } else { WindowStep::Nothing }
    }

    /// The peer has invalidated it.
    pub(crate) fn on_invalidated(&mut self) -> WindowStep {
        self.is_open = false;
        if std::mem::take(&mut self.is_closing) { WindowStep::Report } else { WindowStep::Nothing }
    }

    /// This side closes it.
    pub(crate) fn close(&mut self) -> WindowStep {
        if !self.is_open {
            return WindowStep::Report;
        }
        self.is_closing = self.binds > 0;
        if self.is_closing { WindowStep::Nothing } else { WindowStep::Replace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_is_bound_again_is_not_freed_by_the_completion_of_its_first_bind() {
        let mut window = WindowState::default();
        window.on_bind();
        assert_eq!(window.on_invalidated(), WindowStep::Nothing);
        assert!(window.is_free());
        window.on_bind();
        assert_eq!(window.on_bound(), WindowStep::Nothing, "of the first bind");
        assert_eq!(window.close(), WindowStep::Nothing, "the second is in the queue");
        assert_eq!(window.on_bound(), WindowStep::Replace);
    }

    #[test]
    fn a_window_that_the_peer_invalidates_while_it_is_closed_is_reported_once() {
        let mut window = WindowState::default();
        window.on_bind();
        assert_eq!(window.close(), WindowStep::Nothing);
        assert_eq!(window.on_invalidated(), WindowStep::Report);
        assert_eq!(window.on_bound(), WindowStep::Nothing);
        assert_eq!(window, WindowState::default());
    }

    /// What the session and the device know of a window.
    #[derive(Clone, Copy, Default)]
    struct Model {
        state: WindowState,
        /// Binds whose completions were not polled.
        queued: u32,
        /// The peer can invalidate it.
        is_valid: bool,
        /// The session has registered memory by it.
        is_used: bool,
        /// The session waits for it to be closed.
        is_awaited: bool,
    }

    impl Model {
        fn take(&mut self, step: WindowStep) {
            if step == WindowStep::Nothing {
                return;
            }
            assert!(self.is_awaited, "only what the session closes is reported, and once");
            (self.is_awaited, self.is_used) = (false, false);
            match step {
                WindowStep::Replace => {
                    assert_eq!(self.queued, 0, "it is freed with a bind in the queue");
                    assert!(self.is_valid);
                    (self.state, self.is_valid) = (WindowState::default(), false);
                }
                _ => assert!(!self.is_valid, "the peer still reaches it"),
            }
            assert!(self.state.is_free());
        }

        /// Tries all that can happen next, and what can follow.
        fn explore(self, depth: u32) {
            let mut end = self;
            while end.queued > 0 {
                end.complete();
            }
            assert!(!end.is_awaited, "it is never closed");
            if depth == 0 {
                return;
            }
            let mut next = self;
            if !self.is_used {
                assert!(next.state.is_free());
                next.state.on_bind();
                (next.queued, next.is_valid, next.is_used) = (self.queued + 1, true, true);
                next.explore(depth - 1);
            }
            next = self;
            if self.queued > 0 {
                next.complete();
                next.explore(depth - 1);
            }
            next = self;
            if self.is_valid {
                next.is_valid = false;
                let step = next.state.on_invalidated();
                next.take(step);
                // The session may have asked to close it before it learns of the invalidation.
                next.explore(depth - 1);
                next.is_used = next.is_awaited;
                next.explore(depth - 1);
            }
            next = self;
            if self.is_used && !self.is_awaited {
                next.is_awaited = true;
                let step = next.state.close();
                next.take(step);
                next.explore(depth - 1);
            }
        }

        fn complete(&mut self) {
            self.queued -= 1;
            let step = self.state.on_bound();
            self.take(step);
        }
    }

    #[test]
    fn in_every_order_a_window_is_closed_once_and_freed_without_a_bind_in_the_queue() {
        Model::default().explore(9);
    }
}
