//! Flushes and FUA writes reach the device: a block device counts its flushes.

use crate::daemon::Daemon;
use crate::program::has;
use crate::raw_client::{FLUSH, FUA, RawClient, TRIM, WRITE_ZEROES};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A loop device over a file in a RAM file system: no other program causes flushes, and no disk is
/// worn.
struct LoopDevice {
    path: PathBuf,
    /// Unmounted on drop.
    ram: TempDir,
    mounted: Vec<PathBuf>,
}

impl LoopDevice {
    /// `None`, with a printed reason, if it cannot be created.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    fn new() -> Option<LoopDevice> {
        let ram = tempfile::tempdir().unwrap();
        let mut device = LoopDevice { path: PathBuf::new(), ram, mounted: Vec::new() };
        let made = device.mount(&["-t", "tmpfs", "-o", "size=96m", "tmpfs"], device.ram.path().into())
            && device.attach();
        if !made {
            println!("skipped: flushes of a device: only root may make a loop device");
        }
        made.then_some(device)
    }

    fn attach(&mut self) -> bool {
        let file = self.ram.path().join("disk");
        std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else { return false };
        self.path = String::from_utf8(output.stdout).unwrap().trim().into();
        true
    }

    fn mount(&mut self, args: &[&str], place: PathBuf) -> bool {
        let output = Command::new("mount").args(args).arg(&place).output();
        let is_mounted = output.is_ok_and(|output| output.status.success());
        if is_mounted {
            self.mounted.push(place);
        }
        is_mounted
    }

    /// A directory of an ext4 file system on the device that writes nothing by itself during a
    /// test.
    fn ext4(&mut self) -> PathBuf {
        let lazy = "lazy_itable_init=0,lazy_journal_init=0";
        let mkfs = Command::new("mkfs.ext4").args(["-q", "-E", lazy]).arg(&self.path).status();
        assert!(mkfs.unwrap().success());
        let folder = self.ram.path().join("mounted");
        std::fs::create_dir(&folder).unwrap();
        let device = self.path.to_str().unwrap().to_owned();
        assert!(self.mount(&["-o", "commit=3600", &device], folder.clone()));
        folder
    }

    /// Flushes that the device has completed (`Documentation/block/stat.rst` of the kernel).
    fn flushes(&self) -> u64 {
        let name = self.path.file_name().unwrap();
        let stat = std::fs::read_to_string(Path::new("/sys/block").join(name).join("stat")).unwrap();
        stat.split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut mounted = self.mounted.split_off(0).into_iter();
        let ram = mounted.next();
        for place in mounted {
            let _ = Command::new("umount").arg("--lazy").arg(place).output();
        }
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
        if let Some(ram) = ram {
            let _ = Command::new("umount").arg("--lazy").arg(ram).output();
        }
    }
}

/// Serves `volume` and counts the device's flushes around each kind of request.
fn flushes_reach(device: &LoopDevice, volume: &str) {
    let daemon = Daemon::serve(&[volume]);
    let (mut writer, mut flusher) =
        (RawClient::connect(&daemon.socket()), RawClient::connect(&daemon.socket()));
    // Allocates the file's space before the flushes are counted.
    assert_eq!(writer.write(0, 0, &vec![1; 4 << 20]), 0);
    assert_eq!(flusher.simple(FLUSH, 0, 0, 0), 0);
    for round in 0..5 {
        let before = device.flushes();
        for nth in 0..20 {
            assert_eq!(writer.write(0, nth * 4096, &[round; 4096]), 0);
        }
        assert_eq!(device.flushes(), before, "{volume}: plain writes flush nothing");
        assert_eq!(flusher.simple(FLUSH, 0, 0, 0), 0);
        let flushed = device.flushes();
        assert!(flushed > before, "{volume}: a flush of another connection's writes reaches the device");
        assert_eq!(writer.write(FUA, 4096, &[round; 4096]), 0);
        let forced = device.flushes();
        assert!(forced > flushed, "{volume}: a write with FUA reaches the device");
        assert_eq!(writer.simple(WRITE_ZEROES, FUA, 65536, 4096), 0);
        let zeroed = device.flushes();
        assert!(zeroed > forced, "{volume}: zeroes with FUA reach the device");
        assert_eq!(writer.simple(TRIM, FUA, 1 << 20, 65536), 0);
        assert!(device.flushes() > zeroed, "{volume}: a trim with FUA reaches the device");
        assert_eq!(writer.simple(FLUSH, 0, 0, 0), 0);
    }
}

#[test]
fn flushes_and_fua_writes_flush_a_block_device_and_plain_writes_do_not() {
    for direct in ["on", "off"] {
        let Some(device) = LoopDevice::new() else { return };
        flushes_reach(&device, &format!("block:{}?direct={direct}", device.path.display()));
    }
}

#[test]
fn flushes_and_fua_writes_of_a_file_flush_the_device_below_and_plain_writes_do_not() {
    if !has("mkfs.ext4") {
        return;
    }
    for direct in ["on", "off"] {
        let Some(mut device) = LoopDevice::new() else { return };
        let file = device.ext4().join("disk.img");
        flushes_reach(&device, &format!("file:{}?size=8m&direct={direct}", file.display()));
    }
}
