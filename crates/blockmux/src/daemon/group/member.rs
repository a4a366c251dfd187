//! The member: started when the daemon serves, and stopped before it ends.

use super::config::GroupConfig;
use crate::process::privileges;
use blockmux_engine::group::{FindVolume, GroupDriver, GroupOptions, GroupStatus, TurnVolumes, connect_to};
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Command, Refusal, Settings};
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
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
    is_leaving: AtomicBool,
}

impl GroupSlot {
    /// The member; `None` if the daemon is in no group, or stops.
    pub(in crate::daemon) fn get(&self) -> Option<Arc<GroupMember>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives the daemon's volumes to other members, or to nobody if there are none, and ends being
    /// a member. Waits for that for [`LEAVE_LIMIT`] and some seconds at most; what is left then is
    /// standby at once, and others take it over.
    pub(in crate::daemon) fn leave(&self) {
        let member = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(member) = member {
            member.leave();
        }
    }

    /// The daemon is this member from now on.
    pub(in crate::daemon) fn set(&self, member: Arc<GroupMember>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(member);
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
        let is_leaving = AtomicBool::new(false);
        let member = Arc::new(GroupMember { config: config.clone(), driver, is_leaving });
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
        while !self.is_leaving.load(Ordering::SeqCst) {
            let Some(volumes) = list() else { return };
            added.retain(|volume| volumes.contains(volume));
            let new: Vec<_> = volumes.iter().filter(|volume| !added.contains(*volume)).cloned().collect();
            if !new.is_empty() && self.status().incarnation.is_some() {
                added.extend(self.add(new));
            }
            thread::park_timeout(LOOK_EVERY);
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
        self.is_leaving.store(true, Ordering::SeqCst);
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
/// Time between two looks whether the config has other volumes.
const LOOK_EVERY: Duration = Duration::from_millis(500);
