//! Command numbering: ExpCmdSN, MaxCmdSN and the window between them (RFC 7143 §4.2.2.1).
//!
//! The numbers belong to the session; its connections share them. A command ahead of ExpCmdSN waits
//! in `early`.

/// The command window of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandWindow {
    exp_cmd_sn: u32,
    /// Number of further commands that the window admits.
    free: u32,
}

/// The result of checking a request's CmdSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmdSnCheck {
    /// The request is next in order, or immediate.
    Now,
    /// The CmdSN is outside the window; the PDU is dropped silently.
    Ignored,
    /// Requests before this one are missing.
    Early,
}

impl CommandWindow {
    /// Creates a window of `size` commands that begins at `cmd_sn`.
    pub(super) fn new(cmd_sn: u32, size: u32) -> CommandWindow {
        CommandWindow { exp_cmd_sn: cmd_sn, free: size }
    }

    #[inline]
    pub(super) fn exp_cmd_sn(self) -> u32 {
        self.exp_cmd_sn
    }

    /// MaxCmdSN; ExpCmdSN − 1 while the window is closed.
    #[inline]
    pub(super) fn max_cmd_sn(self) -> u32 {
        self.exp_cmd_sn.wrapping_add(self.free).wrapping_sub(1)
    }

    /// Checks the CmdSN of a request.
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

    /// Advances ExpCmdSN: the expected request was received, or counts as received.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.exp_cmd_sn = self.exp_cmd_sn.wrapping_add(1);
    }

    /// Whether a command with this CmdSN has not arrived but still may.
    pub(super) fn is_ahead(self, cmd_sn: u32) -> bool {
        cmd_sn.wrapping_sub(self.exp_cmd_sn) < self.free
    }

    /// Occupies a place in the window until the command's response; MaxCmdSN does not move.
    #[inline]
    pub(super) fn occupy(&mut self) {
        self.free = self.free.saturating_sub(1);
    }

    /// Frees a place in the window.
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
    fn only_the_next_command_executes_now() {
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
