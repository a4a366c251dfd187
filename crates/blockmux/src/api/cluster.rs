//! What is told of a group of gateways, and what operators change.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// A group of gateways, as the daemon that was asked knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ClusterStatus {
    /// Name of the group.
    #[schema(example = "gw")]
    pub(crate) group: String,
    /// The member that was asked.
    #[schema(example = "a")]
    pub(crate) member: String,
    /// Whether it belongs to the group now.
    pub(crate) joined: bool,
    /// The member that decides, as far as this one knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) decides: Option<String>,
    /// What went wrong last, until the cluster was reached again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
    /// The members, by name.
    pub(crate) members: Vec<ClusterMember>,
    /// The volumes, by name.
    pub(crate) volumes: Vec<ClusterVolume>,
    /// Clients that the cluster has to refuse before any volume starts.
    pub(crate) to_fence: Vec<String>,
}

/// A member of a group of gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ClusterMember {
    /// Its name.
    #[schema(example = "a")]
    pub(crate) name: String,
    /// Its address, as its config says.
    #[schema(example = "192.0.2.1")]
    pub(crate) address: String,
    /// "up", "silent" (up, but not heard), "leaving" or "down".
    #[schema(example = "up")]
    pub(crate) state: String,
    /// Whether an operator moves its volumes away.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) drained: bool,
    /// Number of volumes that it serves, or is to serve.
    pub(crate) volumes: usize,
    /// The client of the cluster that it is, or was last.
    #[schema(example = "192.0.2.1:0/3141592653")]
    pub(crate) client: String,
}

/// A volume of a group of gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ClusterVolume {
    /// Its name.
    #[schema(example = "disk")]
    pub(crate) name: String,
    /// Its image.
    #[schema(example = "rbd/disk")]
    pub(crate) image: String,
    /// "active", "starting", "moving", or "free": served by nobody.
    #[schema(example = "active")]
    pub(crate) state: String,
    /// The member that serves it, or is to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) member: Option<String>,
    /// The member that it moves to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
    /// The member that an operator has chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinned: Option<String>,
    /// Whether it is being removed from the group.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) removed: bool,
}

/// A volume, and the member that is to serve it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MoveVolume {
    /// The volume.
    #[schema(example = "disk")]
    pub(crate) volume: String,
    /// The member; by default any, so that all have as many volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) member: Option<String>,
}

/// A member of the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedMember {
    /// Its name; by default the member that is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) member: Option<String>,
}

/// The member of the group to fence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FencedMember {
    /// Its name.
    #[schema(example = "a")]
    pub(crate) member: String,
}

/// The volume to remove from the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemovedVolume {
    /// Its name.
    #[schema(example = "disk")]
    pub(crate) volume: String,
}

/// A change of a group of gateways that an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClusterChange {
    /// Have a member serve a volume.
    Move(MoveVolume),
    /// Move the volumes of a member away.
    Drain(NamedMember),
    /// Let a member have volumes again.
    Undrain(NamedMember),
    /// Cut a member from the cluster.
    Fence(FencedMember),
    /// Serve a volume no longer.
    Remove(RemovedVolume),
}

impl fmt::Display for ClusterChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |member: &NamedMember| member.member.clone().unwrap_or_else(|| "this gateway".to_owned());
        match self {
            ClusterChange::Move(MoveVolume { volume, member }) => {
                write!(f, "cluster: move {volume} to {}", member.as_deref().unwrap_or("any gateway"))
            }
            ClusterChange::Drain(member) => write!(f, "cluster: drain {}", named(member)),
            ClusterChange::Undrain(member) => write!(f, "cluster: undrain {}", named(member)),
            ClusterChange::Fence(FencedMember { member }) => write!(f, "cluster: fence {member}"),
            ClusterChange::Remove(RemovedVolume { volume }) => write!(f, "cluster: remove {volume}"),
        }
    }
}
