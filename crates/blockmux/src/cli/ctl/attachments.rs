//! The disks of a daemon's machine in `blockmux ctl status`.

use crate::api::status::AttachmentStatus;
use crate::output::printable;

/// One line for people.
pub(super) fn text(disk: &AttachmentStatus) -> String {
    let AttachmentStatus { state, device, via, error, .. } = disk;
    let (Some(device), Some(via)) = (device, via) else {
        let why = error.iter().map(|why| format!(": {}", printable(why)));
        return format!("{state}{}", why.collect::<String>());
    };
    let notes =
        [(state != "attached", state.as_str()), (disk.read_only, "read-only"), (disk.recovered, "recovered")];
    let notes = notes.iter().filter(|(holds, _)| *holds).map(|(_, note)| format!(", {note}"));
    let requests = disk.traffic.requests();
    format!("{} by {via}{}, {requests} requests", printable(device), notes.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::status::TrafficStatus;

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
        assert_eq!(text(&disk), "/dev/ublkb0 by ublk, read-only, 3 requests");
        let (device, error) = (None, Some("no driver".to_owned()));
        let failed = AttachmentStatus { state: "failed".to_owned(), device, error, ..disk };
        assert_eq!(text(&failed), "failed: no driver");
    }
}
