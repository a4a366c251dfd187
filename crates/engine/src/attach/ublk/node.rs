//! The nodes of the driver's devices in `/dev`.

use std::fs;
use std::path::PathBuf;

/// The node through which a server gets requests.
pub(super) fn char_node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// The node of the disk.
pub(super) fn disk_node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// The numbers of all devices of the driver.
pub(super) fn devices() -> Vec<u32> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("ublkc").and_then(|number| number.parse().ok());
    let mut devices: Vec<u32> =
        entries.filter_map(|entry| number(&entry.file_name().to_string_lossy())).collect();
    devices.sort_unstable();
    devices
}
