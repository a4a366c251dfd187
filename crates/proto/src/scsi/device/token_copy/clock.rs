//! The seconds after which tokens expire, counted in the background as long as there are tokens.

use crate::scsi::device::task::{Action, Context, Failure, Outcome, Work};
use crate::scsi::device::unit::LogicalUnit;
use blockmux_volume::Output;
use std::sync::Arc;
use std::time::Duration;

/// Whether somebody counts the seconds of tokens, or has to.
#[derive(Default)]
pub(in crate::scsi) struct TokenClock {
    is_wanted: bool,
    is_driven: bool,
}

impl TokenClock {
    /// Whether it waits for someone to count.
    pub(in crate::scsi) fn is_abandoned(&self) -> bool {
        self.is_wanted && !self.is_driven
    }

    /// There are tokens; answers whether nobody counts.
    pub(super) fn begin(&mut self) -> bool {
        self.is_wanted = true;
        !self.is_driven
    }
}

/// Makes the task one that counts seconds as long as there are tokens.
pub(in crate::scsi) fn count_seconds(cx: &mut Context<'_>) -> Outcome {
    let claimed = cx.unit.unit.change(|state| {
        let claims = state.token_clock.is_abandoned();
        state.token_clock.is_driven |= claims;
        claims
    });
    if !claimed {
        return Ok(Action::good());
    }
    cx.work(Counting { unit: cx.unit.unit.clone() });
    Ok(Action::Pause(SECOND))
}

struct Counting {
    unit: Arc<LogicalUnit>,
}

impl Work for Counting {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> Outcome {
        Err(Failure::internal())
    }

    fn on_resume(&mut self, _cx: &mut Context<'_>) -> Outcome {
        // Within the lock of the state: who makes a token now finds that nobody counts, and sees to it.
        let goes_on = self.unit.change(|state| {
            let goes_on = self.unit.tokens.tick();
            state.token_clock.is_wanted = goes_on;
            goes_on
        });
        Ok(if goes_on { Action::Pause(SECOND) } else { Action::good() })
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let is_abandoned = self.unit.change(|state| {
            state.token_clock.is_driven = false;
            state.token_clock.is_wanted
        });
        if is_abandoned {
            self.unit.call_background();
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);
