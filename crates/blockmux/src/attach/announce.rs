//! What `attach` tells about a disk when it is ready.

use super::AttachArgs;
use super::way::Way;
use crate::output::{both_sizes, printable};
use blockmux_engine::attach::{AttachedAs, AttachedDisk};
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::VolumeInfo;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// A disk that is ready.
pub(super) struct DiskAnnouncement {
    device: String,
    /// `/dev/blockmux/NAME`, if it has a name.
    link: Option<String>,
    mounted_at: Option<String>,
    way: Way,
    is_recovered: bool,
    volumes: Vec<AnnouncedVolume>,
}

/// A volume of the disk; files in one directory have one each.
struct AnnouncedVolume {
    path: String,
    volume: String,
    size: u64,
    logical_block: u32,
    read_only: bool,
}

impl DiskAnnouncement {
    pub(super) fn new(
        args: &AttachArgs,
        exports: &Exports,
        way: Way,
        disk: &dyn AttachedDisk,
    ) -> DiskAnnouncement {
        let volume = |(path, (_, export)): (PathBuf, (VolumeId, Arc<Export>))| {
            let VolumeInfo { size, logical_block, read_only, .. } = export.info();
            let (path, volume) = (path.display().to_string(), export.name.clone());
            AnnouncedVolume { path, volume, size, logical_block, read_only }
        };
        DiskAnnouncement {
            device: disk.path().display().to_string(),
            link: args
                .name
                .as_ref()
                .filter(|_| way != Way::Fuse)
                .map(|name| name.link().display().to_string()),
            mounted_at: args.mount.as_ref().map(|directory| directory.display().to_string()),
            way,
            is_recovered: disk.attached_as() == AttachedAs::Recovered,
            volumes: disk.paths().into_iter().zip(exports.iter()).map(volume).collect(),
        }
    }

    /// One line for each volume, which begins with its path.
    pub(super) fn text(&self) -> String {
        let lines = self.volumes.iter().map(|volume| self.line(volume));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn line(&self, own: &AnnouncedVolume) -> String {
        let AnnouncedVolume { path, volume, size, logical_block, read_only } = own;
        let (volume, size, way) = (printable(volume), both_sizes(*size), self.way.name());
        let access = if *read_only { ", read-only" } else { "" };
        let mounted =
            self.mounted_at.as_ref().map_or_else(String::new, |place| format!(", mounted at {place}"));
        let recovered = if self.is_recovered { ", recovered" } else { "" };
        format!("{path}  {volume}: {size}, blocks of {logical_block}{access}, by {way}{mounted}{recovered}")
    }

    /// One JSON object: with the properties of its volume, or with a list of several.
    pub(super) fn json(&self) -> Value {
        let mut object = json!({
            self.way.path_is(): self.device,
            "link": self.link,
            "mounted_at": self.mounted_at,
            "via": self.way.name(),
            "recovered": self.is_recovered,
        });
        match &self.volumes[..] {
            [volume] => volume.properties().into_iter().for_each(|(key, value)| object[key] = value),
            several => {
                let file = |volume: &AnnouncedVolume| {
                    let mut file: Map<String, Value> = volume.properties().into_iter().collect();
                    file.insert("path".to_owned(), volume.path.clone().into());
                    Value::Object(file)
                };
                object["files"] = several.iter().map(file).collect();
            }
        }
        object
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

impl AnnouncedVolume {
    fn properties(&self) -> [(String, Value); 4] {
        let AnnouncedVolume { volume, size, logical_block, read_only, .. } = self;
        let all: [(&str, Value); 4] = [
            ("volume", volume.clone().into()),
            ("size", (*size).into()),
            ("logical_block", (*logical_block).into()),
            ("read_only", (*read_only).into()),
        ];
        all.map(|(key, value)| (key.to_owned(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(path: &str, read_only: bool) -> AnnouncedVolume {
        let (path, volume) = (path.to_owned(), "mem:1g".to_owned());
        AnnouncedVolume { path, volume, size: 1 << 30, logical_block: 512, read_only }
    }

    fn announcement() -> DiskAnnouncement {
        DiskAnnouncement {
            device: "/dev/ublkb0".to_owned(),
            link: None,
            mounted_at: None,
            way: Way::Ublk,
            is_recovered: true,
            volumes: vec![volume("/dev/ublkb0", false)],
        }
    }

    #[test]
    fn the_line_begins_with_the_path_of_the_disk() {
        let text = announcement().text();
        assert!(text.starts_with("/dev/ublkb0  mem:1g: "), "{text}");
        assert!(text.ends_with(", blocks of 512, by ublk, recovered"), "{text}");
        let volumes = vec![volume("/dev/ublkb0", true)];
        let text = DiskAnnouncement { volumes, is_recovered: false, ..announcement() }.text();
        assert!(text.ends_with(", blocks of 512, read-only, by ublk"), "{text}");
        let text = DiskAnnouncement { mounted_at: Some("/mnt".to_owned()), ..announcement() }.text();
        assert!(text.ends_with(", by ublk, mounted at /mnt, recovered"), "{text}");
    }

    #[test]
    fn files_of_one_directory_have_a_line_and_an_object_each() {
        let volumes = vec![volume("/mnt/a", false), volume("/mnt/b", true)];
        let directory = DiskAnnouncement {
            device: "/mnt".to_owned(),
            way: Way::Fuse,
            is_recovered: false,
            volumes,
            ..announcement()
        };
        let text = directory.text();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("/mnt/a  mem:1g") && lines[1].starts_with("/mnt/b  mem:1g"), "{text}");
        let object = directory.json();
        assert_eq!((&object["device"], object.get("volume")), (&"/mnt".into(), None));
        assert_eq!(
            (&object["files"][0]["path"], &object["files"][1]["read_only"]),
            (&"/mnt/a".into(), &true.into())
        );
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
        assert_eq!((&object["volume"], &object["size"]), (&"mem:1g".into(), &(1 << 30).into()));
        let disk =
            DiskAnnouncement { device: "/run/a.sock".to_owned(), way: Way::VhostUser, ..announcement() };
        assert!(disk.environment().contains(&("BLOCKMUX_SOCKET".to_owned(), "/run/a.sock".to_owned())));
        assert_eq!(disk.json()["socket"], "/run/a.sock");
    }
}
