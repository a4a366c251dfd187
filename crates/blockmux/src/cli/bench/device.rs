//! Disks of this machine that `--device` names, and what the kernel tells about their drivers.

use crate::failure::Failure;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use rustix::fs::{major, minor, statfs};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A disk in tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskLabel {
    /// Name and driver: "ublkb0 (ublk)".
    pub(super) name: String,
    /// The driver without details: "nvme" of "nvme, tcp".
    pub(super) driver: String,
}

/// A disk of this machine: a block device, or a file such as one on FUSE.
#[derive(Debug)]
pub(super) struct LocalDisk {
    /// The path, without symbolic links.
    pub(super) path: PathBuf,
    /// What opens it.
    pub(super) spec: Spec,
    /// Its driver, such as "ublk", or "nvme, tcp".
    driver: String,
    /// Whether the kernel refuses writes.
    pub(super) is_read_only: bool,
}

impl LocalDisk {
    /// The disk at a path.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn at(path: &Path) -> Result<LocalDisk, Failure> {
        let failed = |why: &str| Failure::request(format!("--device {}: {why}", path.display()));
        let found = path.canonicalize().and_then(|path| Ok((path.metadata()?, path)));
        let (metadata, path) = found.map_err(|error| failed(&format!("cannot find it: {error}")))?;
        if metadata.file_type().is_block_device() {
            return Ok(LocalDisk::of_device(path, &metadata));
        }
        if !metadata.is_file() {
            return Err(failed("is neither a block device nor a file; name one, such as /dev/nvme0n1"));
        }
        let is_fuse = statfs(&path).is_ok_and(|found| found.f_type as u64 == FUSE_SUPER_MAGIC);
        let file = FileSpec {
            path: path.clone(),
            size: None,
            mode: None,
            direct: None,
            read_only: false,
            is_raw: true,
            blocks: Default::default(),
        };
        let driver = if is_fuse { "fuse" } else { "file" }.to_owned();
        Ok(LocalDisk { path, spec: Spec::File(file), driver, is_read_only: metadata.mode() & 0o222 == 0 })
    }

    fn of_device(path: PathBuf, metadata: &Metadata) -> LocalDisk {
        let number = metadata.rdev();
        let node = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        let node = fs::canonicalize(node).unwrap_or_default();
        let block = BlockSpec {
            path: path.clone(),
            direct: None,
            read_only: false,
            is_raw: true,
            blocks: Default::default(),
        };
        let is_read_only = attribute(&node, "ro").is_some_and(|flag| flag == "1");
        LocalDisk { path, spec: Spec::Block(block), driver: driver_of(&node), is_read_only }
    }

    /// How tables show it.
    pub(super) fn label(&self) -> DiskLabel {
        let path = match self.spec {
            // Directories distinguish files more than names do.
            Spec::File(_) => self.path.as_path(),
            _ => self.path.strip_prefix("/dev").unwrap_or(&self.path),
        };
        DiskLabel {
            name: format!("{} ({})", path.display(), self.driver),
            driver: self.driver.split(',').next().unwrap_or_default().to_owned(),
        }
    }
}

/// The driver of the disk whose directory in sysfs this is; of a partition, that of its disk.
fn driver_of(node: &Path) -> String {
    let disk = if node.join("partition").exists() { node.parent().unwrap_or(node) } else { node };
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let behind = fs::read_link(disk.join("device/driver")).ok();
    let behind = behind.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
    if let Some(transport) = attribute(disk, "device/transport") {
        return format!("nvme, {transport}");
    }
    match behind.as_deref() {
        // The driver of SCSI disks says less than that of their host.
        Some("sd") => match host_driver(disk) {
            Some(host) => format!("sd, {host}"),
            None => "sd".to_owned(),
        },
        Some(driver) => driver.to_owned(),
        // A disk without hardware has its driver's name.
        None => match name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-') {
            "ublkb" => "ublk".to_owned(),
            prefix if prefix.starts_with("etherd") => "aoe".to_owned(),
            prefix => prefix.to_owned(),
        },
    }
}

/// The driver of the SCSI host of a disk: "iscsi_tcp", "ib_srp".
fn host_driver(disk: &Path) -> Option<String> {
    let device = fs::canonicalize(disk.join("device")).ok()?;
    let is_host = |directory: &&Path| {
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        name.strip_prefix("host").is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let host = device.ancestors().find(is_host)?;
    attribute(&host.join("scsi_host").join(host.file_name()?), "proc_name")
}

/// The content of a file in sysfs; `None` if there is none.
fn attribute(directory: &Path, name: &str) -> Option<String> {
    let content = fs::read_to_string(directory.join(name)).ok()?;
    let content = content.trim();
    (!content.is_empty()).then(|| content.to_owned())
}

/// `f_type` of FUSE file systems (`linux/magic.h`).
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn with_files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn a_disk_without_hardware_has_the_driver_of_its_name() {
        for (name, driver) in [
            ("ublkb0", "ublk"),
            ("nbd12", "nbd"),
            ("loop3", "loop"),
            ("dm-0", "dm"),
            ("zram0", "zram"),
            ("etherd!e1.1", "aoe"),
        ] {
            assert_eq!(driver_of(&Path::new("/sys/devices/virtual/block").join(name)), driver);
        }
    }

    #[test]
    fn disks_of_a_network_name_their_transport() {
        let root = with_files(&[
            ("nvme0n1/device/transport", "tcp\n"),
            ("nvme0n1/nvme0n1p1/partition", "1\n"),
            ("host2/scsi_host/host2/proc_name", "iscsi_tcp\n"),
            ("host2/target2:0:0/2:0:0:0/block/sda/ro", "0\n"),
            ("drivers/sd/bind", ""),
        ]);
        assert_eq!(driver_of(&root.path().join("nvme0n1")), "nvme, tcp");
        assert_eq!(driver_of(&root.path().join("nvme0n1/nvme0n1p1")), "nvme, tcp", "a partition");
        let scsi = root.path().join("host2/target2:0:0/2:0:0:0");
        symlink(root.path().join("drivers/sd"), scsi.join("driver")).unwrap();
        symlink(&scsi, scsi.join("block/sda/device")).unwrap();
        assert_eq!(driver_of(&scsi.join("block/sda")), "sd, iscsi_tcp");
    }

    #[test]
    fn a_file_is_named_with_its_path_and_other_files_are_refused() {
        let root = with_files(&[("disk", "")]);
        let path = root.path().join("disk");
        let disk = LocalDisk::at(&path).unwrap();
        let name = format!("{} (file)", path.display());
        assert_eq!(disk.label(), DiskLabel { name, driver: "file".to_owned() });
        let said = LocalDisk::at(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(said.starts_with("--device /dev/null: is neither a block device nor a file"), "{said}");
        let said = LocalDisk::at(&root.path().join("missing")).unwrap_err().to_string();
        assert!(said.contains("missing: cannot find it: "), "{said}");
    }
}
