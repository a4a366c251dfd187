//! Detection of disk image formats by their magic numbers.

use blockmux_engine::sys::safe_path;
use rustix::fs::{Mode, OFlags};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// QEMU's name of the image format of a file or device; `None` if it has no known magic number or
/// cannot be read.
pub(crate) fn format_of(path: &Path) -> Option<&'static str> {
    let mut start = [0; START];
    // Reading a pipe would block.
    let metadata = path.metadata().ok()?;
    if !metadata.is_file() && !std::os::unix::fs::FileTypeExt::is_block_device(&metadata.file_type()) {
        return None;
    }
    let opened = safe_path::open(path, OFlags::RDONLY, Mode::empty());
    let count = opened.and_then(|file| file.read_at(&mut start, 0)).ok()?;
    name(&start[..count])
}

fn name(start: &[u8]) -> Option<&'static str> {
    let found = FORMATS
        .iter()
        .find(|(_, offset, magic)| start.get(*offset..).is_some_and(|rest| rest.starts_with(magic)));
    found.map(|&(name, ..)| name)
}

/// Image formats: QEMU's name, offset of the magic number in bytes, and the magic number.
const FORMATS: [(&str, usize, &[u8]); 12] = [
    ("qcow", 0, b"QFI\xfb\0\0\0\x01"),
    ("qcow2", 0, b"QFI\xfb\0\0\0\x02"),
    ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    ("vmdk", 0, b"# Disk DescriptorFile"),
    ("vdi", 64, b"\x7f\x10\xda\xbe"),
    ("vhdx", 0, b"vhdxfile"),
    ("vpc", 0, b"conectix"),
    ("qed", 0, b"QED\0"),
    ("parallels", 0, b"WithoutFreeSpace"),
    ("parallels", 0, b"WithouFreSpacExt"),
];
/// Number of bytes to read, which contain every magic number.
const START: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_detected_by_its_magic_and_a_raw_disk_has_none() {
        for (format, offset, magic) in FORMATS {
            let start = [vec![0; offset], magic.to_vec()].concat();
            assert_eq!(name(&start), Some(format));
            assert_eq!(name(&start[..start.len() - 1]), None);
        }
        let mut boot_sector = [0; START];
        boot_sector[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!((name(&boot_sector), name(b"")), (None, None));
    }
}
