//! The directory and its files, as far as they need no I/O: names and attributes.

use super::reply::Errno;
use crate::exports::VolumeId;
use blockmux_volume::VolumeInfo;
use blockmux_wire::fuse::{
    Attr, AttrOut, Dirent, EntryOut, FATTR_FH, FATTR_GID, FATTR_MODE, FATTR_SIZE, FATTR_UID, FOPEN_DIRECT_IO,
    FOPEN_PARALLEL_DIRECT_WRITES, FUSE_ROOT_ID, OpenIn, OpenOut, SetattrIn, StatfsOut,
};
use std::time::Duration;
use zerocopy::IntoBytes;

/// A file of the directory.
#[derive(Clone, Debug)]
pub struct FuseFile {
    /// Its name.
    pub name: String,
    /// Its volume.
    pub volume: VolumeId,
    /// The properties of its volume.
    pub info: VolumeInfo,
}

/// Who owns the files.
#[derive(Clone, Copy, Debug)]
pub struct FileAccess {
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID of the owner.
    pub gid: u32,
    /// All their times, in seconds after 1970.
    pub time_s: u64,
}

/// The directory with its files.
pub(super) struct Directory {
    /// All files.
    pub(super) files: Vec<FuseFile>,
    access: FileAccess,
}

impl Directory {
    pub(super) fn new(files: Vec<FuseFile>, access: FileAccess) -> Directory {
        Directory { files, access }
    }

    /// The file with this number, and its index; `EISDIR` for the directory.
    #[inline]
    pub(super) fn file(&self, nodeid: u64) -> Result<(usize, &FuseFile), Errno> {
        let index = nodeid.checked_sub(FIRST_FILE_ID).and_then(|index| usize::try_from(index).ok());
        let index = index.ok_or(if nodeid == FUSE_ROOT_ID { Errno::EISDIR } else { Errno::ENOENT })?;
        Ok((index, self.files.get(index).ok_or(Errno::ENOENT)?))
    }

    /// A volume has another size; returns the number of its file.
    pub(super) fn set_size(&mut self, index: usize, size: u64) -> Option<u64> {
        self.files.get_mut(index)?.info.size = size;
        Some(file_id(index))
    }

    /// Finds a file by its name, which ends with a zero byte.
    pub(super) fn look_up(&self, name: &[u8]) -> Result<EntryOut, Errno> {
        let name = name.strip_suffix(&[0]).unwrap_or(name);
        let index = self.files.iter().position(|file| file.name.as_bytes() == name).ok_or(Errno::ENOENT)?;
        let nodeid = file_id(index);
        let attr = self.attributes(nodeid)?.attr;
        let (entry_valid, attr_valid) = (VALID.as_secs(), VALID.as_secs());
        Ok(EntryOut { nodeid, entry_valid, attr_valid, attr, ..EntryOut::default() })
    }

    /// Attributes of the directory or of a file.
    pub(super) fn attributes(&self, nodeid: u64) -> Result<AttrOut, Errno> {
        let (mode, nlink, size) = match self.file(nodeid) {
            Err(Errno::EISDIR) => (S_IFDIR | 0o555, 2, 0),
            Err(error) => return Err(error),
            Ok((_, file)) if file.info.read_only => (S_IFREG | 0o444, 1, file.info.size),
            Ok((_, file)) => (S_IFREG | 0o644, 1, file.info.size),
        };
        let FileAccess { uid, gid, time_s } = self.access;
        let attr = Attr {
            ino: nodeid,
            size,
            blocks: size.div_ceil(SECTOR.into()),
            atime: time_s,
            mtime: time_s,
            ctime: time_s,
            mode,
            nlink,
            uid,
            gid,
            blksize: PREFERRED_BYTES,
            ..Attr::default()
        };
        Ok(AttrOut { attr_valid: VALID.as_secs(), attr, ..AttrOut::default() })
    }

    /// Changes attributes: times are not kept, and the rest cannot be changed. `O_TRUNC` of open(2)
    /// is ignored, as for block devices, so that `cp` and `dd` write a volume.
    pub(super) fn set_attributes(&self, nodeid: u64, set: SetattrIn) -> Result<AttrOut, Errno> {
        let attributes = self.attributes(nodeid)?;
        let is_truncating_open = set.size == 0 && set.valid & FATTR_FH == 0;
        let keeps_size =
            set.valid & FATTR_SIZE == 0 || is_truncating_open || set.size == attributes.attr.size;
        match set.valid & (FATTR_MODE | FATTR_UID | FATTR_GID) {
            0 if keeps_size => Ok(attributes),
            _ => Err(Errno::EPERM),
        }
    }

    /// Opens a file. Its handle says whether it is open for writing.
    pub(super) fn open(&self, nodeid: u64, open: OpenIn) -> Result<OpenOut, Errno> {
        let (_, file) = self.file(nodeid)?;
        let writes = open.flags & O_ACCMODE != 0;
        if writes && file.info.read_only {
            return Err(Errno::EROFS);
        }
        let fh = if writes { WRITABLE_HANDLE } else { 0 };
        Ok(OpenOut { fh, open_flags: FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES, padding: 0 })
    }

    /// Entries of the directory from `offset` on, as many as `size` bytes hold.
    pub(super) fn entries(&self, offset: u64, size: u32) -> Vec<u8> {
        let dots = [(FUSE_ROOT_ID, ".", S_IFDIR), (FUSE_ROOT_ID, "..", S_IFDIR)];
        let files = self.files.iter().enumerate();
        let files = files.map(|(index, file)| (file_id(index), file.name.as_str(), S_IFREG));
        let mut bytes = Vec::new();
        let all = (1..).zip(dots.into_iter().chain(files));
        for (off, (ino, name, mode)) in all.skip_while(|(off, _)| *off <= offset) {
            let start = Dirent { ino, off, namelen: name.len() as u32, kind: mode >> 12 };
            let end = bytes.len().saturating_add(size_of::<Dirent>()).saturating_add(name.len());
            let end = end.next_multiple_of(8);
            if end > size as usize {
                break;
            }
            bytes.extend_from_slice(start.as_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.resize(end, 0);
        }
        bytes
    }

    /// Sizes of the file system; of a file, with the unit of its discards, which a loop device asks
    /// for.
    pub(super) fn statfs(&self, nodeid: u64) -> Result<StatfsOut, Errno> {
        let (size, unit) = match self.file(nodeid) {
            Err(Errno::EISDIR) => {
                (self.files.iter().map(|file| file.info.size).fold(0, u64::saturating_add), 0)
            }
            Err(error) => return Err(error),
            Ok((_, file)) => (file.info.size, file.info.discard_granularity.max(file.info.logical_block)),
        };
        Ok(StatfsOut {
            blocks: size.div_ceil(SECTOR.into()),
            files: self.files.len() as u64,
            bsize: unit.max(PAGE),
            namelen: MAX_NAME,
            frsize: SECTOR,
            ..StatfsOut::default()
        })
    }
}

fn file_id(index: usize) -> u64 {
    (index as u64).saturating_add(FIRST_FILE_ID)
}

/// Handle of a file that is open for writing.
pub(super) const WRITABLE_HANDLE: u64 = 1;
const FIRST_FILE_ID: u64 = FUSE_ROOT_ID + 1;
/// Names never change, and the kernel is told of new sizes.
const VALID: Duration = Duration::from_secs(3600);
/// Length of the longest name in bytes.
const MAX_NAME: u32 = 255;
const PREFERRED_BYTES: u32 = 128 << 10;
const SECTOR: u32 = 512;
const PAGE: u32 = 4096;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const O_ACCMODE: u32 = 3;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn directory() -> Directory {
        let info = VolumeInfo::new(1 << 20);
        let files = vec![
            FuseFile { name: "a".to_owned(), volume: VolumeId(0), info: info.clone() },
            FuseFile {
                name: "base.img".to_owned(),
                volume: VolumeId(1),
                info: VolumeInfo { read_only: true, discard_granularity: 65_536, ..info },
            },
        ];
        Directory::new(files, FileAccess { uid: 1000, gid: 100, time_s: 7 })
    }

    #[test]
    fn each_volume_is_a_file_of_its_size() {
        let directory = directory();
        let entry = directory.look_up(b"a\0").unwrap();
        assert_eq!((entry.nodeid, entry.attr.size, entry.attr.mode), (2, 1 << 20, 0o100_644));
        assert_eq!((entry.attr.uid, entry.attr.gid, entry.attr.mtime), (1000, 100, 7));
        let entry = directory.look_up(b"base.img\0").unwrap();
        assert_eq!((entry.nodeid, entry.attr.mode), (3, 0o100_444));
        assert_eq!(directory.look_up(b"b\0"), Err(Errno::ENOENT));
        assert_eq!(directory.attributes(1).unwrap().attr.mode, 0o040_555);
        assert_eq!(directory.attributes(4), Err(Errno::ENOENT));
        assert_eq!(directory.attributes(0), Err(Errno::ENOENT));
    }

    #[test]
    fn the_directory_lists_its_files_in_pieces() {
        let directory = directory();
        let mut names = Vec::new();
        let mut offset = 0;
        loop {
            let bytes = directory.entries(offset, 70);
            if bytes.is_empty() {
                break;
            }
            assert!(bytes.len() <= 70);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (entry, after) = Dirent::read_from_prefix(rest).unwrap();
                let len = entry.namelen as usize;
                names.push((entry.ino, String::from_utf8(after[..len].to_vec()).unwrap(), entry.kind));
                offset = entry.off;
                rest = &rest[(24 + len).next_multiple_of(8)..];
            }
        }
        let expected = [(1, ".", 4), (1, "..", 4), (2, "a", 8), (3, "base.img", 8)];
        assert_eq!(names, expected.map(|(ino, name, kind)| (ino, name.to_owned(), kind)));
    }

    #[test]
    fn a_volume_that_is_read_only_is_not_opened_for_writing() {
        let directory = directory();
        let open = |nodeid, flags| directory.open(nodeid, OpenIn { flags, open_flags: 0 });
        assert_eq!(open(2, 2).unwrap().fh, WRITABLE_HANDLE);
        assert_eq!(open(3, 0).unwrap().fh, 0);
        assert_eq!(open(3, 1), Err(Errno::EROFS));
        assert_eq!(open(1, 0), Err(Errno::EISDIR));
    }

    #[test]
    fn a_size_stays_and_a_truncating_open_is_ignored() {
        let directory = directory();
        let set = |valid, size| {
            let set = SetattrIn { valid, size, ..SetattrIn::default() };
            directory.set_attributes(2, set).map(|set| set.attr.size)
        };
        assert_eq!(set(FATTR_SIZE, 0), Ok(1 << 20));
        assert_eq!(set(FATTR_SIZE | FATTR_FH, 1 << 20), Ok(1 << 20));
        assert_eq!(set(FATTR_SIZE | FATTR_FH, 0), Err(Errno::EPERM));
        assert_eq!(set(FATTR_SIZE, 1 << 21), Err(Errno::EPERM));
        assert_eq!(set(FATTR_MODE, 0), Err(Errno::EPERM));
        assert_eq!(set(1 << 5, 0), Ok(1 << 20), "times are not kept");
    }

    #[test]
    fn a_file_has_the_unit_of_its_discards() {
        let directory = directory();
        let sizes = |nodeid| directory.statfs(nodeid).map(|sizes| (sizes.blocks, sizes.bsize));
        assert_eq!(sizes(2), Ok((2048, 4096)));
        assert_eq!(sizes(3), Ok((2048, 65_536)));
        assert_eq!(sizes(1), Ok((4096, 4096)));
    }
}
