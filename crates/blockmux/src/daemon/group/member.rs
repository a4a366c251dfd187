//! The member: started when the daemon serves, and stopped before it ends.

use super::config::GroupConfig;
use crate::process::privileges;
use blockmux_engine::group::{FindVolume, GroupDriver, GroupOptions, GroupStatus, TurnVolumes, connect_to};
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Command, Refusal, Settings};
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The daemon as a member of its group, while it serves.
#[derive(Default)]
pub(in crate::daemon) struct GroupSlot(Mutex<Option<Arc<GroupMember>>>);

/// A member of a group, which runs until it leaves.
pub(in crate::daemon) struct GroupMember {
    pub(super) config: GroupConfig,
    pub(super) driver: GroupDriver,
    news: MemberNews,
}

/// What wakes the thread that adds volumes.
#[derive(Default)]
struct MemberNews {
    told: Mutex<Told>,
    changed: Condvar,
}

#[derive(Default)]
struct Told {
    /// The config may have other volumes.
    has_changed: bool,
    is_leaving: bool,
}

impl MemberNews {
    fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until the config has changed or the member leaves, at most for `limit` if there is
    /// one. Returns whether the member stays.
    fn wait(&self, limit: Option<Duration>) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |told: &mut Told| !told.has_changed && !told.is_leaving;
        let mut told = match limit {
            Some(limit) => {
                let waited = self.changed.wait_timeout_while(told, limit, is_old);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait_while(told, is_old).unwrap_or_else(PoisonError::into_inner),
        };
        told.has_changed = false;
        !told.is_leaving
    }
}

impl GroupSlot {
    /// The member, also while it leaves; `None` if the daemon is in no group.
    pub(in crate::daemon) fn get(&self) -> Option<Arc<GroupMember>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives the daemon's volumes to other members, or to nobody if there are none, and ends being
    /// a member. Waits for that for [`LEAVE_LIMIT`] and some seconds at most; what is left then is
    /// standby at once, and others take it over.
    pub(in crate::daemon) fn leave(&self) {
        if let Some(member) = self.get() {
            member.leave();
        }
    }

    /// Tells the member that the config may have other volumes.
    pub(in crate::daemon) fn config_changed(&self) {
        if let Some(member) = self.get() {
            member.news.tell(|told| told.has_changed = true);
        }
    }

    /// The daemon is this member from now on.
    pub(in crate::daemon) fn set(&self, member: Arc<GroupMember>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(member);
        self.config_changed();
    }
}

/// The volumes of the daemon, as the member needs them.
pub(in crate::daemon) struct ServedVolumes {
    /// Finds a volume of the group by its name.
    pub(in crate::daemon) find: FindVolume,
    /// The names of those that the config has, each with its image; `None` if the daemon ends.
    pub(in crate::daemon) list: ListVolumes,
    /// By which their images are opened.
    pub(in crate::daemon) client: Arc<MemberClient>,
}

type ListVolumes = Box<dyn Fn() -> Option<Vec<(String, String)>> + Send>;

impl GroupMember {
    /// Starts to be a member.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(in crate::daemon) fn start(
        config: &GroupConfig,
        served: ServedVolumes,
    ) -> io::Result<Arc<GroupMember>> {
        let options = GroupOptions {
            name: config.member.clone(),
            address: config.address.clone(),
            pool: config.pool.clone(),
            namespace: config.namespace.clone(),
            object: config.object(),
            settings: Settings::default(),
        };
        let ServedVolumes { find, list, client } = served;
        let connect = connect_to(config.cluster(), privileges::keep_only_reading);
        let driver = GroupDriver::start(options, connect, Box::new(TurnVolumes::new(find, client)))?;
        let news = MemberNews::default();
        let member = Arc::new(GroupMember { config: config.clone(), driver, news });
        let own = member.clone();
        thread::Builder::new().name("group add".to_owned()).spawn(move || own.add_volumes(&list))?;
        Ok(member)
    }

    /// What the member knows of its group.
    pub(super) fn status(&self) -> Arc<GroupStatus> {
        self.driver.status()
    }

    /// Adds the daemon's volumes to the group, each once after it is in the config: one that an
    /// operator removes from the group does not come back while the daemon runs.
    fn add_volumes(&self, list: &ListVolumes) {
        let mut added = BTreeSet::new();
        loop {
            let Some(volumes) = list() else { return };
            added.retain(|volume| volumes.contains(volume));
            let new: Vec<_> = volumes.iter().filter(|volume| !added.contains(*volume)).cloned().collect();
            if !new.is_empty() && self.status().incarnation.is_some() {
                added.extend(self.add(new));
            }
            // Nothing says when it belongs to the group.
            let is_done = volumes.iter().all(|volume| added.contains(volume));
            if !self.news.wait((!is_done).then_some(RETRY)) {
                return;
            }
        }
    }

    /// Adds volumes; returns those that need not be added again.
    fn add(&self, volumes: Vec<(String, String)>) -> Vec<(String, String)> {
        match self.command_add(&volumes) {
            Ok(()) => return volumes,
            Err(Refusal::NotMember | Refusal::Unconfirmed) => return Vec::new(),
            Err(_) => {}
        }
        // Some are refused, and the others must not wait for them.
        let mut done = Vec::new();
        for volume in volumes {
            match self.command_add(std::slice::from_ref(&volume)) {
                Err(Refusal::NotMember | Refusal::Unconfirmed) => continue,
                Err(refusal) => warn!("group: `{}` is not added to the group: {refusal}", volume.0),
                Ok(()) => {}
            }
            done.push(volume);
        }
        done
    }

    fn command_add(&self, volumes: &[(String, String)]) -> Result<(), Refusal> {
        let volumes = volumes.iter().map(|(name, image)| ConfiguredVolume::new(name, image)).collect();
        self.driver.command(Command::Add { volumes })
    }

    fn leave(&self) {
        self.news.tell(|told| told.is_leaving = true);
        let member = self.config.member.clone();
        if self.status().incarnation.is_some() {
            info!("group: leaving; other gateways take the volumes over");
            if let Err(error) = self.driver.command(Command::Leave { member: member.clone() }) {
                warn!("group: {error}");
            }
            let end = Instant::now() + LEAVE_LIMIT;
            while !self.has_left() && Instant::now() < end {
                thread::park_timeout(Duration::from_millis(10));
            }
            match self.has_left() {
                // It has no volumes, so nobody is fenced.
                true => drop(self.driver.last_command(Command::Fence { member })),
                false => {
                    warn!("group: the volumes have not moved in time, and other gateways take them over")
                }
            }
        }
        self.driver.end();
    }

    /// Whether the group knows that the member leaves, and it has no volumes.
    fn has_left(&self) -> bool {
        let status = self.status();
        let (Some(table), Some(own)) = (&status.table, status.incarnation) else { return true };
        let owns = table.volumes().iter().any(|volume| volume.place.owner() == Some(own));
        !owns && table.up(own).is_none_or(|member| member.is_leaving)
    }
}

/// Time for the volumes to move to other members when the daemon stops.
const LEAVE_LIMIT: Duration = Duration::from_secs(20);
/// Time after which volumes that were not added are added again.
const RETRY: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_has_left_is_still_told_of() {
        let config =
            "name = 'gw'\nmember = 'a'\naddress = '192.0.2.1'\npool = 'rbd'\nconf = '/dev/null/conf'";
        let config: GroupConfig = toml::from_str(config).unwrap();
        let find: FindVolume = Arc::new(|_| None);
        let served = ServedVolumes { find, list: Box::new(|| Some(Vec::new())), client: Arc::default() };
        let slot = GroupSlot::default();
        slot.set(GroupMember::start(&config, served).unwrap());
        slot.leave();
        let left = slot.get().unwrap();
        assert_eq!(left.cluster_status().member, "a");
        assert_eq!(left.driver.command(Command::Drain { member: "a".to_owned() }), Err(Refusal::NotMember));
    }

    #[test]
    fn volumes_are_looked_for_when_the_config_has_changed_until_the_member_leaves() {
        let news = MemberNews::default();
        news.tell(|told| told.has_changed = true);
        assert!(news.wait(None));
        assert!(news.wait(Some(Duration::ZERO)), "nothing has changed");
        thread::scope(|scope| {
            let waits = scope.spawn(|| news.wait(None));
            news.tell(|told| told.is_leaving = true);
            assert!(!waits.join().unwrap());
        });
        news.tell(|told| told.has_changed = true);
        assert!(!news.wait(None), "it leaves");
    }
}
