//! Mapping of Ceph's errors to volume errors.

use blockmux_rbd::cluster::Cluster;
use blockmux_rbd::requests::RequestError;
use blockmux_volume::IoError;

/// Maps the error of a request. A client that the cluster has blocklisted gets another connection
/// for later images.
pub(super) fn io_error(error: RequestError, cluster: &Cluster) -> IoError {
    if is_blocklisted(error) {
        cluster.note_blocklisted();
    }
    meaning(error)
}

/// Whether this client does not have the lock of the image: another one does, or an administrator
/// has removed it.
pub(super) fn lacks_lock(error: RequestError) -> bool {
    matches!(error, RequestError::Errno(errno) if errno.0 == libc::EROFS)
}

fn is_blocklisted(error: RequestError) -> bool {
    matches!(error, RequestError::Errno(errno) if errno.0 == libc::ESHUTDOWN)
}

fn meaning(error: RequestError) -> IoError {
    let errno = match error {
        RequestError::Errno(errno) => errno,
        RequestError::BeyondEnd => return IoError::OutOfRange,
        // Only what compares differs, and is asked before.
        RequestError::Differs(_) => return IoError::Unsupported,
    };
    match errno.0 {
        // A pool with a quota, and a cluster that is full.
        libc::ENOSPC | libc::EDQUOT => IoError::NoSpace,
        // Another client holds the image's lock and does not give it up, or has taken over and had
        // the cluster blocklist this one. A volume that is read-only refuses writes itself.
        libc::EROFS | libc::ESHUTDOWN => IoError::Fenced,
        libc::EPERM | libc::EACCES => IoError::ReadOnly,
        libc::ETIMEDOUT | libc::ENOTCONN => IoError::PathLost,
        libc::EOPNOTSUPP => IoError::Unsupported,
        libc::ENOMEM => IoError::NoMemory,
        libc::ECANCELED => IoError::Aborted,
        // EIO, ENOENT of an image that was deleted, and others.
        _ => IoError::Medium,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_rbd::error::Errno;

    #[test]
    fn every_error_of_ceph_has_its_meaning() {
        let table = [
            (libc::ENOSPC, IoError::NoSpace),
            (libc::EDQUOT, IoError::NoSpace),
            (libc::EROFS, IoError::Fenced),
            (libc::ESHUTDOWN, IoError::Fenced),
            (libc::EPERM, IoError::ReadOnly),
            (libc::EACCES, IoError::ReadOnly),
            (libc::ETIMEDOUT, IoError::PathLost),
            (libc::ENOTCONN, IoError::PathLost),
            (libc::EOPNOTSUPP, IoError::Unsupported),
            (libc::ENOMEM, IoError::NoMemory),
            (libc::ECANCELED, IoError::Aborted),
            (libc::EIO, IoError::Medium),
            (libc::ENOENT, IoError::Medium),
        ];
        for (errno, expected) in table {
            assert_eq!(meaning(RequestError::Errno(Errno(errno))), expected, "errno {errno}");
        }
        assert_eq!(meaning(RequestError::BeyondEnd), IoError::OutOfRange);
        assert!(is_blocklisted(RequestError::Errno(Errno(libc::ESHUTDOWN))));
        assert!(!is_blocklisted(RequestError::Errno(Errno(libc::EROFS))));
        assert!(lacks_lock(RequestError::Errno(Errno(libc::EROFS))));
        assert!(!lacks_lock(RequestError::Errno(Errno(libc::ESHUTDOWN))));
    }
}
