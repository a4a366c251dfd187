//! What `attach` tells about a disk when it is ready.

use super::AttachArgs;
use super::way::Way;
use crate::output::{both_sizes, printable};
use blockmux_engine::attach::{AttachedAs, AttachedDisk};
use blockmux_volume::{Spec, VolumeInfo};
use serde_json::{Value, json};

/// A disk that is ready.
pub(super) struct DiskAnnouncement {
    device: String,
    /// `/dev/blockmux/NAME`, if it has a name.
    link: Option<String>,
    mounted_at: Option<String>,
    volume: String,
    way: Way,
    size: u64,
    logical_block: u32,
    read_only: bool,
    is_recovered: bool,
}

impl DiskAnnouncement {
    pub(super) fn new(
        args: &AttachArgs,
        spec: &Spec,
        info: &VolumeInfo,
        way: Way,
        disk: &dyn AttachedDisk,
    ) -> DiskAnnouncement {
        DiskAnnouncement {
            device: disk.path().display().to_string(),
            link: args
                .name
                .as_ref()
                .filter(|_| way != Way::Fuse)
                .map(|name| name.link().display().to_string()),
            mounted_at: args.mount.as_ref().map(|directory| directory.display().to_string()),
            volume: spec.to_string(),
            way,
            size: info.size,
            logical_block: info.logical_block,
            read_only: info.read_only,
            is_recovered: disk.attached_as() == AttachedAs::Recovered,
        }
    }

    /// One line that begins with the path of the disk.
    pub(super) fn text(&self) -> String {
        let DiskAnnouncement { device, volume, logical_block, .. } = self;
        let (volume, size, way) = (printable(volume), both_sizes(self.size), self.way.name());
        let access = if self.read_only { ", read-only" } else { "" };
        let mounted =
            self.mounted_at.as_ref().map_or_else(String::new, |place| format!(", mounted at {place}"));
        let recovered = if self.is_recovered { ", recovered" } else { "" };
        format!("{device}  {volume}: {size}, blocks of {logical_block}{access}, by {way}{mounted}{recovered}")
    }

    /// One JSON object.
    pub(super) fn json(&self) -> Value {
        json!({
            self.way.path_is(): self.device,
            "link": self.link,
            "mounted_at": self.mounted_at,
            "volume": self.volume,
            "via": self.way.name(),
            "size": self.size,
            "logical_block": self.logical_block,
            "read_only": self.read_only,
            "recovered": self.is_recovered,
        })
    }

    /// Environment variables for the command of `--run`.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let path = self.way.path_is();
        let path = [format!("BLOCKMUX_{}", path.to_uppercase()), path.to_owned()];
        let path = path.map(|name| (name, Some(&self.device)));
        let mount = ["BLOCKMUX_MOUNT", "mount"].map(|name| (name.to_owned(), self.mounted_at.as_ref()));
        let variables = path.into_iter().chain(mount);
        variables.filter_map(|(name, value)| Some((name, value?.clone()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement() -> DiskAnnouncement {
        DiskAnnouncement {
            device: "/dev/ublkb0".to_owned(),
            link: None,
            mounted_at: None,
            volume: "mem:1g".to_owned(),
            way: Way::Ublk,
            size: 1 << 30,
            logical_block: 512,
            read_only: false,
            is_recovered: true,
        }
    }

    #[test]
    fn the_line_begins_with_the_path_of_the_disk() {
        let text = announcement().text();
        assert!(text.starts_with("/dev/ublkb0  mem:1g: "), "{text}");
        assert!(text.ends_with(", blocks of 512, by ublk, recovered"), "{text}");
        let text = DiskAnnouncement { read_only: true, is_recovered: false, ..announcement() }.text();
        assert!(text.ends_with(", blocks of 512, read-only, by ublk"), "{text}");
        let text = DiskAnnouncement { mounted_at: Some("/mnt".to_owned()), ..announcement() }.text();
        assert!(text.ends_with(", by ublk, mounted at /mnt, recovered"), "{text}");
    }

    #[test]
    fn a_command_finds_the_disk_in_its_environment_and_a_program_in_json() {
        let environment = announcement().environment();
        assert!(environment.contains(&("device".to_owned(), "/dev/ublkb0".to_owned())));
        assert!(environment.iter().all(|(name, _)| name != "mount"));
        let mounted = DiskAnnouncement { mounted_at: Some("/mnt".to_owned()), ..announcement() };
        assert!(mounted.environment().contains(&("mount".to_owned(), "/mnt".to_owned())));
        let object = announcement().json();
        assert_eq!((&object["device"], &object["recovered"]), (&"/dev/ublkb0".into(), &true.into()));
        let disk =
            DiskAnnouncement { device: "/run/a.sock".to_owned(), way: Way::VhostUser, ..announcement() };
        assert!(disk.environment().contains(&("BLOCKMUX_SOCKET".to_owned(), "/run/a.sock".to_owned())));
        assert_eq!(disk.json()["socket"], "/run/a.sock");
    }
}
