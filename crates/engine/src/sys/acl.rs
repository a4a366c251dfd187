//! POSIX access control lists of files and directories (acl(5)), as the kernel returns them in an
//! extended attribute (`linux/posix_acl_xattr.h`).
//!
//! The mode of a file that has one shows the mask of the list as the permissions of the group, so
//! it does not tell what the group or anybody else is granted.

use rustix::fs::getxattr;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whom an entry of a list is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclSubject {
    /// The owner of the file.
    Owner,
    /// This user.
    User(u32),
    /// The group of the file.
    OwningGroup,
    /// This group.
    Group(u32),
    /// The maximum of what the entries for users and groups grant, except to the owner.
    Mask,
    /// Everybody else.
    Others,
}

/// An entry of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    /// Whom it is about.
    pub subject: AclSubject,
    /// As in a mode: 4 to read, 2 to write, 1 to execute.
    pub permissions: u32,
}

/// The list of an open file, also of one that is open with `O_PATH`; `None` if it has none.
///
/// # Errors
/// As `getxattr(2)`, or if the list is longer than `MAX_LEN` or has an unknown form.
pub fn of(file: impl AsFd) -> io::Result<Option<Vec<AclEntry>>> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let mut bytes = [0; MAX_LEN];
    match getxattr(path, "system.posix_acl_access", &mut bytes[..]) {
        Ok(len) => parse(&bytes[..len]).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn parse(bytes: &[u8]) -> Option<Vec<AclEntry>> {
    let entries = bytes.strip_prefix(&VERSION.to_le_bytes())?;
    let (entries, rest) = entries.as_chunks();
    let entry = |&[tag, _, permissions, _, id @ ..]: &[u8; 8]| {
        let id = u32::from_le_bytes(id);
        let subject = match tag {
            0x01 => AclSubject::Owner,
            0x02 => AclSubject::User(id),
            0x04 => AclSubject::OwningGroup,
            0x08 => AclSubject::Group(id),
            0x10 => AclSubject::Mask,
            0x20 => AclSubject::Others,
            _ => return None,
        };
        Some(AclEntry { subject, permissions: permissions.into() })
    };
    entries.iter().map(entry).collect::<Option<_>>().filter(|_| rest.is_empty())
}

/// Version of the attribute's form.
const VERSION: u32 = 2;
/// Maximum length of a list, in bytes: hundreds of entries.
const MAX_LEN: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_by_its_tags_and_an_unknown_form_is_refused() {
        let bytes = |entries: &[(u8, u8, u32)]| {
            let entries = entries
                .iter()
                .flat_map(|&(tag, permissions, id)| [[tag, 0, permissions, 0], id.to_le_bytes()].concat());
            VERSION.to_le_bytes().into_iter().chain(entries).collect::<Vec<_>>()
        };
        let whole = bytes(&[(1, 7, !0), (2, 6, 5), (4, 0, !0), (8, 4, 9), (16, 7, !0), (32, 1, !0)]);
        let expected = [
            (AclSubject::Owner, 7),
            (AclSubject::User(5), 6),
            (AclSubject::OwningGroup, 0),
            (AclSubject::Group(9), 4),
            (AclSubject::Mask, 7),
            (AclSubject::Others, 1),
        ];
        let expected = expected.map(|(subject, permissions)| AclEntry { subject, permissions });
        assert_eq!(parse(&whole).as_deref(), Some(&expected[..]));
        for wrong in [&whole[..whole.len() - 1], &whole[1..], &[], &bytes(&[(3, 7, 0)])] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        assert_eq!(of(tempfile::tempfile().unwrap()).unwrap(), None);
    }
}
