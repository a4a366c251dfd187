//! `blockmux ctl snapshot`: the snapshots of a volume.

use crate::api::request::Request;
use crate::api::status::SnapshotStatus;
use crate::output::printable;
use blockmux_volume::units::human_size;

/// What to do with the snapshots of a volume.
#[derive(clap::Subcommand)]
pub(super) enum SnapshotCommand {
    /// Create a snapshot; it has all writes that are stable by now
    Create(SnapshotArgs),
    /// List the snapshots of a volume, oldest first, with the volumes that serve them
    List {
        /// Name of the volume
        volume: String,
    },
    /// Delete a snapshot that is not protected and that no volume serves
    Delete(SnapshotArgs),
    /// Protect a snapshot from being deleted
    Protect(SnapshotArgs),
    /// Permit to delete a snapshot that is protected
    Unprotect(SnapshotArgs),
}

/// A snapshot.
#[derive(clap::Args)]
pub(super) struct SnapshotArgs {
    /// Name of the volume
    volume: String,
    /// Name of the snapshot
    name: String,
}

impl SnapshotCommand {
    /// The request to the daemon.
    pub(super) fn request(self) -> Request {
        let protect = |SnapshotArgs { volume, name }: SnapshotArgs, protected| Request::ProtectSnapshot {
            volume,
            name,
            protected,
        };
        match self {
            SnapshotCommand::List { volume } => Request::Snapshots { volume },
            SnapshotCommand::Create(SnapshotArgs { volume, name }) => {
                Request::CreateSnapshot { volume, name }
            }
            SnapshotCommand::Delete(SnapshotArgs { volume, name }) => {
                Request::DeleteSnapshot { volume, name }
            }
            SnapshotCommand::Protect(of) => protect(of, true),
            SnapshotCommand::Unprotect(of) => protect(of, false),
        }
    }
}

/// Text for people: a line for each snapshot.
pub(super) fn text(all: &[SnapshotStatus]) -> String {
    if all.is_empty() {
        return "no snapshots".to_owned();
    }
    let names: Vec<_> = all.iter().map(|snapshot| printable(&snapshot.name).to_string()).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let line = |(snapshot, name): (&SnapshotStatus, &String)| {
        let SnapshotStatus { size, created, protected, volumes, .. } = snapshot;
        let mut notes = vec![human_size(*size)];
        notes.extend(created.iter().map(|time| printable(time).to_string()));
        notes.extend((*protected == Some(true)).then(|| "protected".to_owned()));
        notes.extend(volumes.iter().map(|volume| format!("served as {}", printable(volume))));
        format!("{name:<width$}  {}", notes.join(", "))
    };
    all.iter().zip(&names).map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_one_line_with_who_serves_it() {
        let snapshot = |name: &str, protected, volumes: &[&str]| SnapshotStatus {
            name: name.to_owned(),
            size: 1 << 30,
            created: Some("2026-11-30T12:00:00Z".to_owned()),
            protected,
            volumes: volumes.iter().map(|name| (*name).to_owned()).collect(),
        };
        let all = [snapshot("monday", Some(true), &["old", "older"]), snapshot("t", None, &[])];
        let lines = [
            "monday  1 GiB, 2026-11-30T12:00:00Z, protected, served as old, served as older",
            "t       1 GiB, 2026-11-30T12:00:00Z",
        ];
        assert_eq!(text(&all), lines.join("\n"));
        assert_eq!(text(&[]), "no snapshots");
    }
}
