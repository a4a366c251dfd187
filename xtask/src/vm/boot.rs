//! A disk that a guest's firmware boots from: GRUB, and a file system with the kernel and the
//! guest's image.
//!
//! Everything is written into a file, without root and without mounting it:
//!
//! ```text
//!   sector 0            GRUB's first stage and the partition table
//!   sectors 1 to 2047   GRUB: drivers for disk, partition and file system, and what to load
//!   the partition       ext2: /vmlinuz and /image.cpio.gz
//! ```

use super::kernel::Kernel;
use crate::process::{find, succeed};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// What such a disk needs and this machine lacks.
pub(crate) fn missing() -> Option<&'static str> {
    let is_missing = |program: &&str| find(program).is_none();
    let program = ["grub-mkimage", "mke2fs"].into_iter().find(is_missing);
    program.or_else(|| (!Path::new(FIRST_STAGE).exists()).then_some(FIRST_STAGE))
}

/// Writes a disk with a kernel that gets these parameters, and with the guest's image.
///
/// # Errors
/// If a program fails, or nothing can be written.
pub(crate) fn build(kernel: &Kernel, image: &Path, parameters: &str, disk: &Path) -> Result<()> {
    let directory = tempfile::tempdir_in(disk.parent().context("the disk's path has no directory")?)?;
    let (files, loader) = (directory.path().join("files"), directory.path().join("loader"));
    fs::create_dir(&files)?;
    fs::copy(&kernel.image, files.join("vmlinuz")).context("the kernel")?;
    // The emulated firmware reads some MB/s, and the kernel decompresses more.
    let compressed = files.join("image.cpio.gz");
    let mut gzip = Command::new("busybox");
    gzip.args(["gzip", "-c"]).arg(image).stdout(File::create(&compressed)?);
    ensure!(gzip.status()?.success(), "busybox cannot compress {}", image.display());
    let used = fs::metadata(&compressed)?.len() + fs::metadata(&kernel.image)?.len();
    let sectors = ((used + SPARE) >> 20 << 20) / SECTOR;
    let whole = OpenOptions::new().write(true).create_new(true).open(disk);
    let whole = whole.with_context(|| disk.display().to_string())?;
    whole.set_len((FIRST_SECTOR + sectors) * SECTOR)?;
    succeed(
        Command::new("mke2fs")
            .args(["-F", "-q", "-t", "ext2", "-b", "4096", "-E"])
            .arg(format!("offset={}", FIRST_SECTOR * SECTOR))
            .arg("-d")
            .args([&files, disk])
            .arg(format!("{}k", sectors * SECTOR / 1024)),
    )?;
    let commands = directory.path().join("commands");
    let text = format!("set root=(hd0,msdos1)\nlinux /vmlinuz {parameters}\ninitrd /image.cpio.gz\nboot\n");
    fs::write(&commands, text)?;
    succeed(
        Command::new("grub-mkimage")
            .args(["--format=i386-pc", "--prefix=/", "--config"])
            .arg(&commands)
            .arg("--output")
            .arg(&loader)
            .args(["biosdisk", "part_msdos", "ext2", "linux"]),
    )?;
    let (first_stage, loader) = (fs::read(FIRST_STAGE).context(FIRST_STAGE)?, fs::read(&loader)?);
    let room = (FIRST_SECTOR - 1) * SECTOR;
    ensure!(loader.len() as u64 <= room, "GRUB has {} bytes and there is room for {room}", loader.len());
    whole.write_all_at(first_stage.get(..CODE_LEN).context(FIRST_STAGE)?, 0)?;
    whole.write_all_at(&partition_table(sectors), TABLE_AT)?;
    whole.write_all_at(&loader, SECTOR)?;
    Ok(())
}

/// The partition table with its signature: one active partition of Linux.
fn partition_table(sectors: u64) -> Vec<u8> {
    let (first, count) = (FIRST_SECTOR as u32, sectors as u32);
    // Cylinders, heads and sectors are beyond their range, so the numbers of sectors hold.
    let before = [0x80, 0xfe, 0xff, 0xff, 0x83, 0xfe, 0xff, 0xff];
    let mut table = [&before[..], &first.to_le_bytes(), &count.to_le_bytes()].concat();
    table.resize(4 * 16, 0);
    table.extend([0x55, 0xaa]);
    table
}

/// GRUB's first stage, which loads what begins at sector 1.
const FIRST_STAGE: &str = "/usr/lib/grub/i386-pc/boot.img";
/// Length of its code, which is followed by the signature of the disk and the partition table.
const CODE_LEN: usize = 440;
const TABLE_AT: u64 = 446;
const SECTOR: u64 = 512;
/// The partition's first sector.
const FIRST_SECTOR: u64 = 2048;
/// Room for the file system itself and for what the guest writes.
const SPARE: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_one_active_partition_and_the_signature_of_a_boot_sector() {
        let table = partition_table(0x1234);
        assert_eq!(table.len() as u64 + TABLE_AT, SECTOR);
        assert_eq!((table[0], table[4], &table[64..]), (0x80, 0x83, &[0x55, 0xaa][..]));
        assert_eq!((&table[8..12], &table[12..16]), (&[0, 8, 0, 0][..], &[0x34, 0x12, 0, 0][..]));
        assert!(table[16..64].iter().all(|byte| *byte == 0));
    }
}
