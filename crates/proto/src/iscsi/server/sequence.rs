//! Command numbering: ExpCmdSN, MaxCmdSN and the window between them (RFC 7143 §4.2.2.1).
//!
//! This is the session's, whose connections share it. A command that came early waits for those
//! before it: see `early`.

/// Where a session is in its commands.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandWindow {
    exp_cmd_sn: u32,
    /// How many more commands there is room for.
    free: u32,
}

/// What becomes of a request by its CmdSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmdSnCheck {
    /// It is the next, or asked for immediate delivery.
    Now,
    /// Outside the window: as if it had never come.
    Ignored,
    /// Others before it are missing.
    Early,
}

impl CommandWindow {
    /// A window of `size` commands that begins at `cmd_sn`.
    pub(super) fn new(cmd_sn: u32, size: u32) -> CommandWindow {
        CommandWindow { exp_cmd_sn: cmd_sn, free: size }
    }

    #[inline]
    pub(super) fn exp_cmd_sn(self) -> u32 {
        self.exp_cmd_sn
    }

    /// One less than ExpCmdSN when there is no room.
    #[inline]
    pub(super) fn max_cmd_sn(self) -> u32 {
        self.exp_cmd_sn.wrapping_add(self.free).wrapping_sub(1)
    }

    /// What becomes of a request.
    #[inline]
    pub(super) fn admission(self, cmd_sn: u32, is_immediate: bool) -> CmdSnCheck {
        let ahead = cmd_sn.wrapping_sub(self.exp_cmd_sn);
        if is_immediate || (ahead == 0 && self.free > 0) {
            CmdSnCheck::Now
        } else if ahead >= self.free {
            CmdSnCheck::Ignored
        } else {
            CmdSnCheck::Early
        }
    }

    /// The request with the number that was expected is done, or counts as done.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.exp_cmd_sn = self.exp_cmd_sn.wrapping_add(1);
    }

    /// Whether a command with that number has not come yet, but may.
    pub(super) fn is_ahead(self, cmd_sn: u32) -> bool {
        cmd_sn.wrapping_sub(self.exp_cmd_sn) < self.free
    }

    /// A command that was admitted takes a place until it is answered; MaxCmdSN stays where it was.
    #[inline]
    pub(super) fn occupy(&mut self) {
        self.free = self.free.saturating_sub(1);
    }

    /// Its place is free again.
    #[inline]
    pub(super) fn release(&mut self) {
        self.free = self.free.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CommandWindow {
        fn admit(&mut self, cmd_sn: u32, is_immediate: bool) -> CmdSnCheck {
            let admission = self.admission(cmd_sn, is_immediate);
            if admission == CmdSnCheck::Now && !is_immediate {
                self.advance();
            }
            admission
        }
    }

    #[test]
    fn only_the_next_command_is_done_now() {
        let mut window = CommandWindow::new(u32::MAX, 4);
        assert_eq!(window.max_cmd_sn(), 2);
        assert_eq!(window.admit(u32::MAX - 1, false), CmdSnCheck::Ignored);
        assert_eq!(window.admit(3, false), CmdSnCheck::Ignored);
        assert_eq!(window.admit(2, false), CmdSnCheck::Early);
        assert_eq!(window.admit(u32::MAX, false), CmdSnCheck::Now);
        assert_eq!((window.exp_cmd_sn(), window.admit(0, false)), (0, CmdSnCheck::Now));
    }

    #[test]
    fn immediate_requests_do_not_count() {
        let mut window = CommandWindow::new(7, 4);
        assert_eq!(window.admit(7, true), CmdSnCheck::Now);
        assert_eq!(window.admit(7, false), CmdSnCheck::Now);
    }

    #[test]
    fn max_cmd_sn_moves_only_when_a_command_is_answered() {
        let mut window = CommandWindow::new(1, 2);
        for sn in [1, 2] {
            assert_eq!(window.admit(sn, false), CmdSnCheck::Now);
            window.occupy();
            assert_eq!(window.max_cmd_sn(), 2);
        }
        assert_eq!(window.admit(3, false), CmdSnCheck::Ignored);
        window.release();
        assert_eq!((window.max_cmd_sn(), window.admit(3, false)), (3, CmdSnCheck::Now));
    }
}
