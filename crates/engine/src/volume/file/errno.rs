//! Mapping of system errors to volume errors.

use blockmux_volume::IoError;

/// Maps an errno to a volume's error.
pub(super) fn io_error(errno: i32) -> IoError {
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoError::NoSpace,
        libc::EROFS | libc::EPERM | libc::EACCES | libc::ETXTBSY => IoError::ReadOnly,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => IoError::Unsupported,
        libc::ENOMEM | libc::ENOBUFS => IoError::NoMemory,
        libc::ECANCELED => IoError::Aborted,
        // EIO, ENODEV, EREMOTEIO, EBADMSG and other errors of the device: the request itself was
        // checked.
        _ => IoError::Medium,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_maps_to_its_io_error() {
        let table = [
            (libc::ENOSPC, IoError::NoSpace),
            (libc::EDQUOT, IoError::NoSpace),
            (libc::EFBIG, IoError::NoSpace),
            (libc::EROFS, IoError::ReadOnly),
            (libc::EPERM, IoError::ReadOnly),
            (libc::EACCES, IoError::ReadOnly),
            (libc::ETXTBSY, IoError::ReadOnly),
            (libc::EOPNOTSUPP, IoError::Unsupported),
            (libc::ENOSYS, IoError::Unsupported),
            (libc::ENOTTY, IoError::Unsupported),
            (libc::ENOMEM, IoError::NoMemory),
            (libc::ENOBUFS, IoError::NoMemory),
            (libc::ECANCELED, IoError::Aborted),
            (libc::EIO, IoError::Medium),
            (libc::ENODEV, IoError::Medium),
            (libc::EINVAL, IoError::Medium),
        ];
        for (errno, meaning) in table {
            assert_eq!(io_error(errno), meaning, "errno {errno}");
        }
    }
}
