//! Translation between a volume's errors and NBD's error values (proto.md, "Error values"), in both
//! directions.

use blockmux_volume::{IoError, Op};
use blockmux_wire::nbd::transmission::Errno;

/// The error value with which a target reports that `op` failed with `error`.
pub(crate) fn from_io_error(error: IoError, op: Op) -> Errno {
    match (error, op) {
        (IoError::OutOfRange, Op::Write { .. } | Op::WriteZeroes { .. }) => Errno::NBD_ENOSPC,
        // Only a fast zero may answer ENOTSUP ("Request types", NBD_CMD_WRITE_ZEROES).
        (IoError::Unsupported, Op::WriteZeroes { only_fast: true, .. }) => Errno::NBD_ENOTSUP,
        (IoError::OutOfRange | IoError::Misaligned | IoError::BadLength | IoError::Unsupported, _) => {
            Errno::NBD_EINVAL
        }
        (IoError::ReadOnly | IoError::Reserved, _) => Errno::NBD_EPERM,
        (IoError::NoSpace, _) => Errno::NBD_ENOSPC,
        (IoError::NoMemory, _) => Errno::NBD_ENOMEM,
        (IoError::ShuttingDown | IoError::Fenced, _) => Errno::NBD_ESHUTDOWN,
        (IoError::Medium | IoError::PathLost | IoError::Aborted, _) => Errno::NBD_EIO,
    }
}

/// The I/O error for an error value of a server; `errno` is not 0.
///
/// The initiator checks range, alignment and length before it sends a request, so `NBD_EINVAL` can
/// only mean that the server does not support the operation. Unknown values count as `NBD_EINVAL`,
/// as the document requires. The initiator sends no writes to a read-only export, so `NBD_EPERM`
/// means that a reservation excludes it.
pub(crate) fn to_io_error(errno: Errno) -> IoError {
    match errno {
        Errno::NBD_EPERM => IoError::Reserved,
        Errno::NBD_EIO => IoError::Medium,
        Errno::NBD_ENOMEM => IoError::NoMemory,
        Errno::NBD_ENOSPC => IoError::NoSpace,
        Errno::NBD_EOVERFLOW => IoError::BadLength,
        Errno::NBD_ESHUTDOWN => IoError::ShuttingDown,
        _ => IoError::Unsupported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Op = Op::Write { fua: false };
    const ZERO: Op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
    const FAST_ZERO: Op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    const TRIM: Op = Op::Discard { fua: false };

    #[test]
    fn every_volume_error_has_its_errno() {
        let table = [
            (IoError::OutOfRange, Op::Read, Errno::NBD_EINVAL),
            (IoError::OutOfRange, WRITE, Errno::NBD_ENOSPC),
            (IoError::OutOfRange, ZERO, Errno::NBD_ENOSPC),
            (IoError::OutOfRange, TRIM, Errno::NBD_EINVAL),
            (IoError::OutOfRange, Op::Prefetch, Errno::NBD_EINVAL),
            (IoError::OutOfRange, Op::BlockStatus, Errno::NBD_EINVAL),
            (IoError::Misaligned, Op::Read, Errno::NBD_EINVAL),
            (IoError::BadLength, WRITE, Errno::NBD_EINVAL),
            (IoError::ReadOnly, TRIM, Errno::NBD_EPERM),
            (IoError::Reserved, Op::Read, Errno::NBD_EPERM),
            (IoError::Unsupported, ZERO, Errno::NBD_EINVAL),
            (IoError::Unsupported, FAST_ZERO, Errno::NBD_ENOTSUP),
            (IoError::Unsupported, TRIM, Errno::NBD_EINVAL),
            (IoError::NoSpace, WRITE, Errno::NBD_ENOSPC),
            (IoError::Medium, Op::Flush, Errno::NBD_EIO),
            (IoError::NoMemory, Op::Read, Errno::NBD_ENOMEM),
            (IoError::PathLost, Op::Read, Errno::NBD_EIO),
            (IoError::Aborted, Op::Read, Errno::NBD_EIO),
            (IoError::ShuttingDown, Op::Read, Errno::NBD_ESHUTDOWN),
            (IoError::Fenced, WRITE, Errno::NBD_ESHUTDOWN),
        ];
        for (error, op, errno) in table {
            assert_eq!(from_io_error(error, op), errno, "{error:?} of {op:?}");
        }
    }

    #[test]
    fn every_errno_has_its_volume_error() {
        let table = [
            (Errno::NBD_EPERM, IoError::Reserved),
            (Errno::NBD_EIO, IoError::Medium),
            (Errno::NBD_ENOMEM, IoError::NoMemory),
            (Errno::NBD_EINVAL, IoError::Unsupported),
            (Errno::NBD_ENOSPC, IoError::NoSpace),
            (Errno::NBD_EOVERFLOW, IoError::BadLength),
            (Errno::NBD_ENOTSUP, IoError::Unsupported),
            (Errno::NBD_ESHUTDOWN, IoError::ShuttingDown),
            (Errno(4711), IoError::Unsupported),
        ];
        for (errno, error) in table {
            assert_eq!(to_io_error(errno), error, "{errno:?}");
        }
    }
}
