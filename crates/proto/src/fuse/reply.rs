//! Replies, and the error numbers in them.

use crate::kernel_disk;
use blockmux_volume::{IoError, SgList};
use blockmux_wire::fuse::{EntryOut, FUSE_NOTIFY_INVAL_INODE, InvalInodeOut, OutHeader};
use zerocopy::{Immutable, IntoBytes};

/// The answer to a request, or a notification.
#[derive(Debug)]
pub struct FuseReply {
    head: [u8; MAX_HEAD],
    head_len: usize,
    /// The data of a read, which follows the head.
    pub data: Option<SgList>,
}

impl FuseReply {
    /// A success with a structure of at most the length of [`EntryOut`].
    #[inline]
    pub(super) fn with(unique: u64, body: &(impl IntoBytes + Immutable)) -> FuseReply {
        FuseReply::new(unique, 0, body.as_bytes(), None)
    }

    /// A success with data.
    #[inline]
    pub(super) fn data(unique: u64, data: SgList) -> FuseReply {
        FuseReply::new(unique, 0, &[], Some(data))
    }

    /// A success without anything.
    #[inline]
    pub(super) fn success(unique: u64) -> FuseReply {
        FuseReply::new(unique, 0, &[], None)
    }

    /// A failure.
    pub(super) fn failure(unique: u64, errno: Errno) -> FuseReply {
        FuseReply::new(unique, errno.0.saturating_neg(), &[], None)
    }

    /// A notification that the attributes of an inode have changed. It answers no request.
    pub(super) fn attributes_changed(ino: u64) -> FuseReply {
        let changed = InvalInodeOut { ino, off: -1, len: 0 };
        FuseReply::new(0, FUSE_NOTIFY_INVAL_INODE, changed.as_bytes(), None)
    }

    #[inline]
    fn new(unique: u64, error: i32, body: &[u8], data: Option<SgList>) -> FuseReply {
        let mut head = [0; MAX_HEAD];
        let head_len = size_of::<OutHeader>().saturating_add(body.len());
        let data_len = data.as_ref().map_or(0, SgList::len);
        let header = OutHeader { len: head_len.saturating_add(data_len) as u32, error, unique };
        for (to, from) in head.iter_mut().zip(header.as_bytes().iter().chain(body)) {
            *to = *from;
        }
        FuseReply { head, head_len, data }
    }

    /// The bytes before the data.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &[u8] {
        self.head.get(..self.head_len).unwrap_or_default()
    }
}

/// An error number of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) i32);

impl Errno {
    pub(super) const EPERM: Errno = Errno(1);
    pub(super) const ENOENT: Errno = Errno(2);
    pub(super) const EISDIR: Errno = Errno(21);
    pub(super) const EINVAL: Errno = Errno(kernel_disk::EINVAL);
    pub(super) const ENOSPC: Errno = Errno(kernel_disk::ENOSPC);
    pub(super) const EROFS: Errno = Errno(30);
    pub(super) const ENOSYS: Errno = Errno(38);
    pub(super) const EPROTO: Errno = Errno(71);
    pub(super) const EOPNOTSUPP: Errno = Errno(kernel_disk::EOPNOTSUPP);
}

/// The numbers are those of block devices, which a loop device on the file passes on, except for
/// what is special to files.
impl From<IoError> for Errno {
    fn from(error: IoError) -> Errno {
        match error {
            IoError::ReadOnly => Errno::EROFS,
            other => Errno(kernel_disk::errno(other)),
        }
    }
}

/// Length of the longest head in bytes.
const MAX_HEAD: usize = size_of::<OutHeader>() + size_of::<EntryOut>();

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Seg;
    use blockmux_wire::fuse::WriteOut;

    #[test]
    fn a_reply_counts_its_head_and_its_data() {
        let reply = FuseReply::with(0x0102, &WriteOut { size: 512, padding: 0 });
        assert_eq!(reply.head(), [24, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        let reply = FuseReply::data(1, Seg::from_slice(&[7; 512]).into());
        assert_eq!((reply.head().len(), &reply.head()[..2]), (16, &[0x10, 2][..]));
        let reply = FuseReply::failure(1, IoError::Medium.into());
        assert_eq!(reply.head()[..8], [16, 0, 0, 0, 0xc3, 0xff, 0xff, 0xff]);
    }

    /// As libfuse sends it.
    #[test]
    fn a_notification_has_a_code_in_place_of_an_error_and_answers_no_request() {
        let mut bytes = [0; 40];
        (bytes[0], bytes[4], bytes[16]) = (40, 2, 3);
        bytes[24..32].fill(0xff);
        assert_eq!(FuseReply::attributes_changed(3).head(), bytes);
    }

    #[test]
    fn a_file_differs_from_a_block_device_only_if_it_is_read_only() {
        assert_eq!(Errno::from(IoError::ReadOnly), Errno(30));
        assert_eq!(Errno::from(IoError::Unsupported), Errno(95));
    }
}
