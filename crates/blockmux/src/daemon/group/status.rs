//! What is told of the group, and what operators change.

use super::member::GroupMember;
use crate::api::cluster::{
    ClusterChange, ClusterMember, ClusterStatus, ClusterVolume, FencedMember, MoveVolume, NamedMember,
    RemovedVolume,
};
use crate::api::{ApiError, ErrorCode};
use blockmux_engine::group::GroupStatus;
use blockmux_group::table::{MemberRecord, VolumeRecord};
use blockmux_group::{Command, Decision, Incarnation, Place, Refusal, Table};

impl GroupMember {
    /// What the member knows of its group. Waits for nothing.
    pub(in crate::daemon) fn cluster_status(&self) -> ClusterStatus {
        let status = self.status();
        let table = status.table.as_ref();
        let name_of = |own: Incarnation| table?.up(own).map(|member| member.name.clone());
        let up = table.map(Table::seniority).unwrap_or_default();
        let decides = up.into_iter().find(|own| !status.suspected.contains(own)).and_then(name_of);
        let volumes = table.map(Table::volumes).unwrap_or_default();
        let members = table.map(Table::members).unwrap_or_default();
        ClusterStatus {
            group: self.config.group().to_owned(),
            member: self.config.member.clone(),
            joined: status.incarnation.is_some(),
            decides: decides.filter(|_| status.incarnation.is_some()),
            problem: status.problem.clone(),
            members: members.iter().map(|own| member_status(own, volumes, &status)).collect(),
            volumes: volumes.iter().map(|own| volume_status(own, name_of)).collect(),
            to_fence: table.iter().flat_map(|table| table.to_fence()).map(ToString::to_string).collect(),
        }
    }

    /// Changes the group as an operator wants, and waits for some seconds until it has changed.
    /// Returns what to say. Moves of volumes follow later.
    ///
    /// # Errors
    /// If it is refused, or nobody knows whether it was done.
    pub(in crate::daemon) fn change(&self, change: &ClusterChange) -> Result<String, ApiError> {
        let named =
            |member: &NamedMember| member.member.clone().unwrap_or_else(|| self.config.member.clone());
        let (command, said) = match change {
            ClusterChange::Move(MoveVolume { volume, member: Some(member) }) => {
                let command = Command::Pin { volume: volume.clone(), member: member.clone() };
                (command, format!("{volume} moves to {member}, and stays there while {member} is up"))
            }
            ClusterChange::Move(MoveVolume { volume, member: None }) => {
                (Command::Unpin { volume: volume.clone() }, format!("any gateway may serve {volume}"))
            }
            ClusterChange::Drain(member) => {
                let member = named(member);
                let said = format!("the volumes of {member} move to other gateways");
                (Command::Drain { member }, said)
            }
            ClusterChange::Undrain(member) => {
                let member = named(member);
                let said = format!("{member} may serve volumes again");
                (Command::Resume { member }, said)
            }
            ClusterChange::Fence(FencedMember { member }) => {
                let said = format!("the cluster refuses {member}, and others take its volumes over");
                (Command::Fence { member: member.clone() }, said)
            }
            ClusterChange::Remove(RemovedVolume { volume }) => {
                (Command::Retire { volume: volume.clone() }, format!("{volume} is removed from the group"))
            }
        };
        self.driver.command(command).map(|()| said).map_err(refusal)
    }
}

fn member_status(member: &MemberRecord, volumes: &[VolumeRecord], status: &GroupStatus) -> ClusterMember {
    let own = member.incarnation;
    let state = match member {
        MemberRecord { is_up: false, .. } => "down",
        MemberRecord { is_leaving: true, .. } => "leaving",
        _ if status.suspected.contains(&own) => "silent",
        _ => "up",
    };
    let is_own = |volume: &&VolumeRecord| member.is_up && volume.place.owner() == Some(own);
    ClusterMember {
        name: member.name.clone(),
        address: member.address.clone(),
        state: state.to_owned(),
        drained: member.is_draining,
        volumes: volumes.iter().filter(is_own).count(),
        client: member.client.to_string(),
    }
}

fn volume_status(volume: &VolumeRecord, name_of: impl Fn(Incarnation) -> Option<String>) -> ClusterVolume {
    let (state, next) = match volume.place {
        Place::Free => ("free", None),
        Place::Starting(_) => ("starting", None),
        Place::Active(_) => ("active", None),
        Place::Leaving { to, .. } => ("moving", to),
    };
    let pinned = match &volume.decision {
        Decision::Pinned(member) => Some(member.clone()),
        Decision::Spread | Decision::Retired => None,
    };
    ClusterVolume {
        name: volume.name.clone(),
        image: volume.image.clone(),
        state: state.to_owned(),
        member: volume.place.owner().and_then(&name_of),
        next: next.and_then(&name_of),
        pinned,
        removed: volume.decision == Decision::Retired,
    }
}

fn refusal(refusal: Refusal) -> ApiError {
    let code = match &refusal {
        Refusal::UnknownMember(_) | Refusal::UnknownVolume(_) => ErrorCode::NotFound,
        Refusal::NotMember => ErrorCode::Unavailable,
        Refusal::Unconfirmed => ErrorCode::Failed,
        _ => ErrorCode::Conflict,
    };
    ApiError::new(code, refusal.to_string())
}
