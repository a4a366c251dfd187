//! FUSE, Linux's driver of file systems in user space: `linux/fuse.h`.
//!
//! A request is an [`InHeader`], the structure of its operation, and names or data. A reply is an
//! [`OutHeader`] and the structure of the operation, or data. Numbers have the machine's own byte
//! order. No structure here has padding.

use crate::layout::native_layout;
use crate::open_enum::open_enum;

native_layout! {
    /// The start of a request (`struct fuse_in_header`).
    pub struct InHeader(40) {
        /// Length of the request in bytes.
        pub len: u32,
        /// An [`Opcode`].
        pub opcode: u32,
        /// Identifies the request; its reply repeats it.
        pub unique: u64,
        /// The inode.
        pub nodeid: u64,
        /// User ID of the requesting process.
        pub uid: u32,
        /// Group ID of the requesting process.
        pub gid: u32,
        /// Process ID of the requesting process.
        pub pid: u32,
        /// Length of extensions, in units of 8 bytes.
        pub total_extlen: u16,
        pub padding: u16 = 0,
    }
}

open_enum! {
    /// Operation of a request (`enum fuse_opcode`).
    pub enum Opcode(u32) {
        /// Find a name in a directory.
        FUSE_LOOKUP = 1,
        /// The kernel no longer knows an inode; there is no reply.
        FUSE_FORGET = 2,
        /// Attributes of an inode.
        FUSE_GETATTR = 3,
        /// Change attributes of an inode.
        FUSE_SETATTR = 4,
        /// Make a symbolic link.
        FUSE_SYMLINK = 6,
        /// Make a node.
        FUSE_MKNOD = 8,
        /// Make a directory.
        FUSE_MKDIR = 9,
        /// Remove a file.
        FUSE_UNLINK = 10,
        /// Remove a directory.
        FUSE_RMDIR = 11,
        /// Rename.
        FUSE_RENAME = 12,
        /// Make a hard link.
        FUSE_LINK = 13,
        /// Open a file.
        FUSE_OPEN = 14,
        /// Read.
        FUSE_READ = 15,
        /// Write.
        FUSE_WRITE = 16,
        /// Sizes of the file system.
        FUSE_STATFS = 17,
        /// The last descriptor of an open file was closed.
        FUSE_RELEASE = 18,
        /// Flush a file.
        FUSE_FSYNC = 20,
        /// A descriptor of an open file was closed.
        FUSE_FLUSH = 25,
        /// The first request: versions and features.
        FUSE_INIT = 26,
        /// Open a directory.
        FUSE_OPENDIR = 27,
        /// Entries of a directory.
        FUSE_READDIR = 28,
        /// The last descriptor of an open directory was closed.
        FUSE_RELEASEDIR = 29,
        /// Flush a directory.
        FUSE_FSYNCDIR = 30,
        /// Create and open a file.
        FUSE_CREATE = 35,
        /// The process that waits for a request got a signal.
        FUSE_INTERRUPT = 36,
        /// The kernel no longer knows some inodes; there is no reply.
        FUSE_BATCH_FORGET = 42,
        /// Allocate, zero or punch a range.
        FUSE_FALLOCATE = 43,
        /// Rename, with flags.
        FUSE_RENAME2 = 45,
        /// Make a file without a name.
        FUSE_TMPFILE = 51,
    }
}

native_layout! {
    /// The start of a reply (`struct fuse_out_header`).
    pub struct OutHeader(16) {
        /// Length of the reply in bytes.
        pub len: u32,
        /// 0, or an error number, negative.
        pub error: i32,
        /// Of the request.
        pub unique: u64,
    }
}

bitflags::bitflags! {
    /// Features of the kernel and the server (`FUSE_*` of `FUSE_INIT`); the upper half is `flags2`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// Reads may be in flight at the same time.
        const ASYNC_READ = 1 << 0;
        /// Writes may be longer than a page.
        const BIG_WRITES = 1 << 5;
        /// Direct I/O may be asynchronous.
        const ASYNC_DIO = 1 << 15;
        /// `max_pages` is set.
        const MAX_PAGES = 1 << 22;
        /// `flags2` is there.
        const INIT_EXT = 1 << 30;
        /// Files with [`FOPEN_DIRECT_IO`] may be mapped shared.
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
    }
}

native_layout! {
    /// The first request (`struct fuse_init_in`), without `flags2` and what follows it.
    pub struct InitIn(16) {
        /// Version of the protocol.
        pub major: u32,
        /// Minor version of the protocol.
        pub minor: u32,
        /// Longest read-ahead in bytes.
        pub max_readahead: u32,
        /// The lower half of [`Features`].
        pub flags: u32,
    }

    /// The reply to the first request (`struct fuse_init_out`).
    pub struct InitOut(64) {
        /// Version of the protocol.
        pub major: u32,
        /// Minor version of the protocol.
        pub minor: u32,
        /// Longest read-ahead in bytes.
        pub max_readahead: u32,
        /// The lower half of [`Features`].
        pub flags: u32,
        /// Maximum number of requests in flight that no process waits for.
        pub max_background: u16,
        /// Number of those from which on the kernel considers the file system congested.
        pub congestion_threshold: u16,
        /// Length of the longest write in bytes.
        pub max_write: u32,
        /// Granularity of time stamps in nanoseconds.
        pub time_gran: u32,
        /// Maximum number of pages of a request.
        pub max_pages: u16,
        /// Alignment of mappings of DAX.
        pub map_alignment: u16,
        /// The upper half of [`Features`].
        pub flags2: u32,
        pub unused: [u32; 7] = 0,
    }

    /// Attributes of an inode (`struct fuse_attr`).
    pub struct Attr(88) {
        /// Its number.
        pub ino: u64,
        /// Size in bytes.
        pub size: u64,
        /// Allocated space in units of 512 bytes.
        pub blocks: u64,
        /// Time of the last access, in seconds after 1970.
        pub atime: u64,
        /// Time of the last change of data, in seconds after 1970.
        pub mtime: u64,
        /// Time of the last change of attributes, in seconds after 1970.
        pub ctime: u64,
        /// The part of `atime` below a second, in nanoseconds.
        pub atimensec: u32,
        /// The part of `mtime` below a second, in nanoseconds.
        pub mtimensec: u32,
        /// The part of `ctime` below a second, in nanoseconds.
        pub ctimensec: u32,
        /// Type and permissions.
        pub mode: u32,
        /// Number of links.
        pub nlink: u32,
        /// User ID of the owner.
        pub uid: u32,
        /// Group ID of the owner.
        pub gid: u32,
        /// Number of the device that it is a node of.
        pub rdev: u32,
        /// Preferred length of I/O in bytes.
        pub blksize: u32,
        pub flags: u32 = 0,
    }

    /// The reply to [`Opcode::FUSE_LOOKUP`] (`struct fuse_entry_out`).
    pub struct EntryOut(128) {
        /// The inode.
        pub nodeid: u64,
        /// Generation of the inode.
        pub generation: u64,
        /// How long the kernel may keep the name, in seconds.
        pub entry_valid: u64,
        /// How long the kernel may keep the attributes, in seconds.
        pub attr_valid: u64,
        /// The part of `entry_valid` below a second, in nanoseconds.
        pub entry_valid_nsec: u32,
        /// The part of `attr_valid` below a second, in nanoseconds.
        pub attr_valid_nsec: u32,
        /// The attributes.
        pub attr: Attr,
    }

    /// The reply to [`Opcode::FUSE_GETATTR`] and [`Opcode::FUSE_SETATTR`] (`struct fuse_attr_out`).
    pub struct AttrOut(104) {
        /// How long the kernel may keep the attributes, in seconds.
        pub attr_valid: u64,
        /// The part of `attr_valid` below a second, in nanoseconds.
        pub attr_valid_nsec: u32,
        pub dummy: u32 = 0,
        /// The attributes.
        pub attr: Attr,
    }

    /// The start of [`Opcode::FUSE_SETATTR`] (`struct fuse_setattr_in`), without times and owners.
    pub struct SetattrIn(24) {
        /// The attributes to set: flags `FATTR_*`.
        pub valid: u32,
        pub padding: u32 = 0,
        /// Handle of the open file, with [`FATTR_FH`].
        pub fh: u64,
        /// Size in bytes.
        pub size: u64,
    }

    /// The request [`Opcode::FUSE_OPEN`] (`struct fuse_open_in`).
    pub struct OpenIn(8) {
        /// Flags of open(2).
        pub flags: u32,
        /// Flags of the kernel.
        pub open_flags: u32,
    }

    /// The reply to [`Opcode::FUSE_OPEN`] and [`Opcode::FUSE_OPENDIR`] (`struct fuse_open_out`).
    pub struct OpenOut(16) {
        /// The server's handle.
        pub fh: u64,
        /// Flags `FOPEN_*`.
        pub open_flags: u32,
        pub padding: u32 = 0,
    }

    /// The request [`Opcode::FUSE_READ`], [`Opcode::FUSE_READDIR`] or [`Opcode::FUSE_WRITE`]
    /// (`struct fuse_read_in` and `struct fuse_write_in`, which are alike). The data of a write
    /// follows.
    pub struct RangeIn(40) {
        /// Handle of the open file.
        pub fh: u64,
        /// Offset in bytes.
        pub offset: u64,
        /// Length in bytes.
        pub size: u32,
        /// Flags of the kernel.
        pub kernel_flags: u32,
        /// Owner of locks.
        pub lock_owner: u64,
        /// Flags of open(2).
        pub flags: u32,
        pub padding: u32 = 0,
    }

    /// The reply to [`Opcode::FUSE_WRITE`] (`struct fuse_write_out`).
    pub struct WriteOut(8) {
        /// Number of bytes.
        pub size: u32,
        pub padding: u32 = 0,
    }

    /// The start of [`Opcode::FUSE_FLUSH`] and [`Opcode::FUSE_FSYNC`].
    pub struct HandleIn(8) {
        /// Handle of the open file.
        pub fh: u64,
    }

    /// The request [`Opcode::FUSE_FALLOCATE`] (`struct fuse_fallocate_in`).
    pub struct FallocateIn(32) {
        /// Handle of the open file.
        pub fh: u64,
        /// Offset in bytes.
        pub offset: u64,
        /// Length in bytes.
        pub length: u64,
        /// Flags of fallocate(2).
        pub mode: u32,
        pub padding: u32 = 0,
    }

    /// The reply to [`Opcode::FUSE_STATFS`] (`struct fuse_kstatfs`).
    pub struct StatfsOut(80) {
        /// Size in units of `frsize`.
        pub blocks: u64,
        /// Free space in units of `frsize`.
        pub bfree: u64,
        /// Free space for everybody in units of `frsize`.
        pub bavail: u64,
        /// Number of files.
        pub files: u64,
        /// Number of files that can be created.
        pub ffree: u64,
        /// Preferred length of I/O in bytes.
        pub bsize: u32,
        /// Length of the longest name in bytes.
        pub namelen: u32,
        /// Unit of the sizes in bytes.
        pub frsize: u32,
        pub padding: u32 = 0,
        pub spare: [u32; 6] = 0,
    }

    /// A notification [`FUSE_NOTIFY_INVAL_INODE`] (`struct fuse_notify_inval_inode_out`): what the
    /// kernel keeps of an inode has changed.
    pub struct InvalInodeOut(24) {
        /// The inode.
        pub ino: u64,
        /// Offset of the changed data in bytes; negative: only attributes have changed.
        pub off: i64,
        /// Length of the changed data in bytes.
        pub len: i64,
    }

    /// The start of an entry of a directory (`struct fuse_dirent`). The name follows, and zeroes up
    /// to a multiple of 8 bytes.
    pub struct Dirent(24) {
        /// The inode.
        pub ino: u64,
        /// Offset of the next entry.
        pub off: u64,
        /// Length of the name in bytes.
        pub namelen: u32,
        /// Type of the inode: bits 12 to 15 of its mode.
        pub kind: u32,
    }
}

/// Version of the protocol.
pub const FUSE_KERNEL_VERSION: u32 = 7;
/// The first minor version with [`Features::DIRECT_IO_ALLOW_MMAP`] (Linux 6.6).
pub const FUSE_MINOR_VERSION: u32 = 39;
/// The first minor version whose [`InitOut`] has 64 bytes (Linux 3.15).
pub const FUSE_OLDEST_MINOR_VERSION: u32 = 23;
/// In [`OutHeader::error`] of a message that answers no request: an [`InvalInodeOut`] follows.
pub const FUSE_NOTIFY_INVAL_INODE: i32 = 2;
/// The inode of the root directory.
pub const FUSE_ROOT_ID: u64 = 1;

/// The size is to be set.
pub const FATTR_SIZE: u32 = 1 << 3;
/// The permissions are to be set.
pub const FATTR_MODE: u32 = 1 << 0;
/// The owner is to be set.
pub const FATTR_UID: u32 = 1 << 1;
/// The group is to be set.
pub const FATTR_GID: u32 = 1 << 2;
/// The request names a handle.
pub const FATTR_FH: u32 = 1 << 6;

/// Reads and writes bypass the page cache.
pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// Direct writes may be in flight at the same time.
pub const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    // The bytes that a C program with the header of Linux 6.1 prints.

    #[test]
    fn a_write_has_the_layout_of_the_header() {
        let mut bytes = [0; 80];
        bytes[..41].copy_from_slice(&[
            0x50, 0x10, 0, 0, 0x10, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 2, 0, 0, 0, 0, 0, 0,
            0, // to nodeid
            0xe8, 3, 0, 0, 0x64, 0, 0, 0, 0xe1, 0x10, 0, 0, 0, 0, 0, 0, 1,
        ]);
        bytes[49] = 0x10;
        bytes[57] = 0x10;
        bytes[72..74].copy_from_slice(&[0, 0x10]);
        let (header, rest) = InHeader::read_from_prefix(&bytes).unwrap();
        assert_eq!((header.len, Opcode(header.opcode)), (4176, Opcode::FUSE_WRITE));
        assert_eq!((header.unique, header.nodeid), (0x0102_0304_0506_0708, 2));
        assert_eq!((header.uid, header.gid, header.pid), (1000, 100, 4321));
        let range = RangeIn::read_from_bytes(rest).unwrap();
        assert_eq!((range.fh, range.offset, range.size, range.flags), (1, 4096, 4096, 0x1000));
    }

    #[test]
    fn replies_have_the_layout_of_the_header() {
        let attr = Attr { ino: 2, size: 0x1122, mode: 0o100_644, nlink: 1, blksize: 4096, ..Attr::default() };
        let entry = EntryOut { nodeid: 2, attr_valid: 3, attr, ..EntryOut::default() };
        let mut bytes = [0; 128];
        bytes[0] = 2;
        bytes[24] = 3;
        bytes[40] = 2;
        bytes[48..50].copy_from_slice(&[0x22, 0x11]);
        bytes[100..105].copy_from_slice(&[0xa4, 0x81, 0, 0, 1]);
        bytes[120..122].copy_from_slice(&[0, 0x10]);
        assert_eq!(entry.as_bytes(), bytes);
        let init = InitOut {
            major: 7,
            minor: 39,
            max_background: 0x102,
            congestion_threshold: 0x304,
            max_write: 1 << 20,
            max_pages: 256,
            flags2: 0x10,
            ..InitOut::default()
        };
        let mut bytes = [0; 64];
        bytes[0] = 7;
        bytes[4] = 39;
        bytes[16..23].copy_from_slice(&[2, 1, 4, 3, 0, 0, 0x10]);
        bytes[28..34].copy_from_slice(&[0, 1, 0, 0, 0x10, 0]);
        assert_eq!(init.as_bytes(), bytes);
    }
}
