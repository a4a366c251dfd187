//! The disks of a daemon's machine in `blockmux ctl status`.

use super::TrafficStatus;
use crate::output::printable;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A volume that is attached as a disk of the daemon's machine, and the disk's I/O counters.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AttachmentStatus {
    pub(crate) volume: String,
    /// `attaching`, `attached`, `detaching` or `failed`.
    pub(crate) state: String,
    /// Path of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "/dev/ublkb0")]
    pub(crate) device: Option<String>,
    /// How it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "ublk")]
    pub(crate) via: Option<String>,
    pub(crate) read_only: bool,
    /// An earlier process had left the disk, and its requests have gone on.
    pub(crate) recovered: bool,
    /// Why it is not attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
}

impl AttachmentStatus {
    /// One line for people.
    pub(crate) fn text(&self) -> String {
        let AttachmentStatus { state, device, via, error, .. } = self;
        let (Some(device), Some(via)) = (device, via) else {
            let why = error.iter().map(|why| format!(": {}", printable(why)));
            return format!("{state}{}", why.collect::<String>());
        };
        let notes = [
            (state != "attached", state.as_str()),
            (self.read_only, "read-only"),
            (self.recovered, "recovered"),
        ];
        let notes = notes.iter().filter(|(holds, _)| *holds).map(|(_, note)| format!(", {note}"));
        let requests = self.traffic.requests();
        format!("{} by {via}{}, {requests} requests", printable(device), notes.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_one_line() {
        let disk = AttachmentStatus {
            volume: "a".to_owned(),
            state: "attached".to_owned(),
            device: Some("/dev/ublkb0".to_owned()),
            via: Some("ublk".to_owned()),
            read_only: true,
            recovered: false,
            error: None,
            traffic: TrafficStatus { reads: 3, ..TrafficStatus::default() },
        };
        assert_eq!(disk.text(), "/dev/ublkb0 by ublk, read-only, 3 requests");
        let (device, error) = (None, Some("no driver".to_owned()));
        let failed = AttachmentStatus { state: "failed".to_owned(), device, error, ..disk };
        assert_eq!(failed.text(), "failed: no driver");
    }
}
