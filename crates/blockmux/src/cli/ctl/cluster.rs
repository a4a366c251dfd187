//! `blockmux ctl cluster`: the group of gateways that the daemon belongs to.

use crate::api::cluster::{
    ClusterChange, ClusterMember, ClusterStatus, ClusterVolume, FencedMember, MoveVolume, NamedMember,
    RemovedVolume,
};
use crate::api::request::Request;
use crate::output::printable;

/// What to do with the group of gateways.
#[derive(clap::Subcommand)]
pub(super) enum ClusterCommand {
    /// Show the gateways, and which of them serves each volume
    Status,
    /// Have a gateway serve a volume; I/O continues by the other path
    Move {
        /// Name of the volume
        volume: String,
        /// Name of the gateway [default: any, so that all have as many volumes]
        member: Option<String>,
    },
    /// Move the volumes of a gateway to others until it is undrained
    Drain {
        /// Name of the gateway [default: the one that is asked]
        member: Option<String>,
    },
    /// Let a gateway serve volumes again
    Undrain {
        /// Name of the gateway [default: the one that is asked]
        member: Option<String>,
    },
    /// Shut a gateway out of the cluster; others take its volumes over at once
    Fence {
        /// Name of the gateway
        member: String,
    },
    /// Remove a volume from the group; no gateway serves it any longer
    Remove {
        /// Name of the volume
        volume: String,
    },
}

impl ClusterCommand {
    /// The request to the daemon.
    pub(super) fn request(self) -> Request {
        Request::ClusterChange(match self {
            ClusterCommand::Status => return Request::Cluster,
            ClusterCommand::Move { volume, member } => ClusterChange::Move(MoveVolume { volume, member }),
            ClusterCommand::Drain { member } => ClusterChange::Drain(NamedMember { member }),
            ClusterCommand::Undrain { member } => ClusterChange::Undrain(NamedMember { member }),
            ClusterCommand::Fence { member } => ClusterChange::Fence(FencedMember { member }),
            ClusterCommand::Remove { volume } => ClusterChange::Remove(RemovedVolume { volume }),
        })
    }
}

/// Text for people: the group, then a line for each gateway, and one for each volume.
pub(super) fn text(status: &ClusterStatus) -> String {
    let ClusterStatus { group, member, joined, decides, problem, members, volumes, to_fence } = status;
    let mut first = format!("group {}, asked {}", printable(group), printable(member));
    match decides {
        Some(decides) => first += &format!(", {} decides", printable(decides)),
        None if !joined => first += ", which does not belong to it now",
        None => {}
    }
    let mut lines = vec![first];
    lines.extend(problem.iter().map(|problem| format!("problem: {}", printable(problem))));
    if !to_fence.is_empty() {
        lines.push(format!("to be fenced: {}", printable(&to_fence.join(", "))));
    }
    lines.extend(aligned(members.iter().map(|member| (member.name.as_str(), of_member(member)))));
    lines.extend(aligned(volumes.iter().map(|volume| (volume.name.as_str(), of_volume(volume)))));
    lines.join("\n")
}

fn aligned<'a>(rows: impl Iterator<Item = (&'a str, String)>) -> Vec<String> {
    let rows: Vec<_> = rows.map(|(name, what)| (printable(name).to_string(), what)).collect();
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(name, what)| format!("  {name:<width$}  {what}")).collect()
}

fn of_member(member: &ClusterMember) -> String {
    let ClusterMember { address, state, drained, volumes, .. } = member;
    let plural = if *volumes == 1 { "" } else { "s" };
    let drained = if *drained { ", drained" } else { "" };
    format!("{}{drained}, {volumes} volume{plural}, at {}", printable(state), printable(address))
}

fn of_volume(volume: &ClusterVolume) -> String {
    let ClusterVolume { image, state, member, next, pinned, removed, .. } = volume;
    let mut parts = vec![printable(state).to_string()];
    parts.extend(member.iter().map(|member| format!("on {}", printable(member))));
    parts.extend(next.iter().map(|next| format!("to {}", printable(next))));
    let mut text = parts.join(" ");
    text += &pinned.iter().map(|pinned| format!(", chosen for {}", printable(pinned))).collect::<String>();
    text += if *removed { ", being removed" } else { "" };
    format!("{text}, {}", printable(image))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_shown_with_its_gateways_and_volumes() {
        let member = |name: &str, state: &str, drained, volumes| ClusterMember {
            name: name.to_owned(),
            address: format!("{name}.example"),
            state: state.to_owned(),
            drained,
            volumes,
            client: "192.0.2.1:0/1".to_owned(),
        };
        let volume = |name: &str, state: &str, places: [Option<&str>; 3]| {
            let [member, next, pinned] = places.map(|name| name.map(str::to_owned));
            let (image, state, name) = (format!("rbd/{name}"), state.to_owned(), name.to_owned());
            ClusterVolume { image, state, member, next, pinned, removed: name == "old", name }
        };
        let status = ClusterStatus {
            group: "gw".to_owned(),
            member: "a".to_owned(),
            joined: true,
            decides: Some("b".to_owned()),
            problem: Some("no answer".to_owned()),
            members: vec![member("a", "up", true, 1), member("second", "silent", false, 2)],
            volumes: vec![
                volume("data", "active", [Some("a"), None, None]),
                volume("old", "free", [None; 3]),
                volume("root", "moving", [Some("second"), Some("a"), Some("a")]),
            ],
            to_fence: vec!["192.0.2.3:0/7".to_owned()],
        };
        let expected = [
            "group gw, asked a, b decides",
            "problem: no answer",
            "to be fenced: 192.0.2.3:0/7",
            "  a       up, drained, 1 volume, at a.example",
            "  second  silent, 2 volumes, at second.example",
            "  data  active on a, rbd/data",
            "  old   free, being removed, rbd/old",
            "  root  moving on second to a, chosen for a, rbd/root",
        ];
        assert_eq!(text(&status), expected.join("\n"));
        let apart = ClusterStatus { joined: false, decides: None, problem: None, ..status };
        assert!(text(&apart).starts_with("group gw, asked a, which does not belong to it now\n"));
    }
}
