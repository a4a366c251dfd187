//! A volume of the daemon, as its group needs it.

use crate::daemon::serving_commands::OwnedVolume;
use blockmux_engine::group::MemberVolume;
use blockmux_engine::volume::turns::{self, TurnChange, TurnError};
use blockmux_proto::volume_state::VolumeState;
use std::sync::Arc;

/// A volume whose sessions end as with the commands that make volumes active and standby.
pub(super) struct GatewayVolume {
    pub(super) owned: OwnedVolume,
    pub(super) image: String,
}

impl MemberVolume for GatewayVolume {
    fn image(&self) -> &str {
        &self.image
    }

    fn state(&self) -> &Arc<VolumeState> {
        &self.owned.state
    }

    fn activate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>> {
        let begin = |_| {
            begin()?;
            self.owned.end_fenced();
            Ok(())
        };
        let done = turns::activate(&self.owned.state, false, &self.owned.wake, begin)?;
        // A connection may have begun before and have logged in since.
        self.owned.end_fenced();
        Ok(done)
    }

    fn deactivate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>> {
        let paused = || {
            (self.owned.wake)();
            Ok(())
        };
        let done = turns::deactivate(&self.owned.state, begin, paused)?;
        if done == TurnChange::Done {
            // They may connect again at once; what is left of them is closed by the next activation.
            drop(self.owned.drain_fenced());
        }
        Ok(done)
    }
}
