//! The daemon as a gateway of its group: its volumes become active and standby as the group
//! decides.

use super::group::{GroupConfig, GroupMember, ServedVolumes};
use super::reload::Reloader;
use super::reload::group_volumes::{group_volumes, image_of_volume, owned_volume};
use super::serving_commands::OwnedVolume;
use crate::failure::Failure;
use blockmux_engine::group::{FindVolume, MemberVolume};
use blockmux_engine::volume::turns::{self, TurnChange, TurnError};
use blockmux_proto::volume_state::VolumeState;
use std::sync::{Arc, Weak};

/// Makes the daemon a member of its group, if it has one. It joins when it has a connection of its
/// own; the cluster was there when the images were opened.
///
/// # Errors
/// If no thread can be started.
pub(super) fn start(config: Option<&GroupConfig>, reloader: &Arc<Reloader>) -> Result<(), Failure> {
    let Some(config) = config else { return Ok(()) };
    // It does not keep what the daemon serves.
    let served = Arc::downgrade(reloader);
    let find = find_in(&served);
    let list = Box::new(move || served.upgrade().map(|reloader| group_volumes(&reloader)));
    let volumes = ServedVolumes { find, list, client: reloader.member.clone() };
    let member = GroupMember::start(config, volumes);
    let member = member.map_err(|error| Failure::run(format!("group: cannot start a thread: {error}")))?;
    reloader.group.set(member);
    Ok(())
}

fn find_in(served: &Weak<Reloader>) -> FindVolume {
    let served = served.clone();
    Arc::new(move |name| {
        let reloader = served.upgrade()?;
        let image = image_of_volume(&reloader, name)?;
        let owned = owned_volume(&reloader, name, reloader.state_of(name)?);
        Some(Box::new(GatewayVolume { owned, image }) as Box<dyn MemberVolume>)
    })
}

/// A volume whose sessions end as with the commands that make volumes active and standby.
struct GatewayVolume {
    owned: OwnedVolume,
    image: String,
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
            // They may connect again at once; the next activation closes what is left of them.
            drop(self.owned.drain_fenced());
        }
        Ok(done)
    }

    fn end_fenced(self: Box<Self>) {
        self.owned.let_go();
    }
}
