//! What a server's error value means for a request: the one table of this side (proto.md, "Error values").

use blockmux_volume::IoError;
use blockmux_wire::nbd::transmission::Errno;

/// Translates an error value that is not 0.
///
/// Range, alignment and length were checked before the request was sent, so what is left of `NBD_EINVAL` is that
/// the server cannot do it. A value that the protocol does not have counts as `NBD_EINVAL`, as it asks for.
pub(super) fn io_error(errno: Errno) -> IoError {
    match errno {
        Errno::NBD_EPERM => IoError::ReadOnly,
        Errno::NBD_EIO => IoError::Medium,
        Errno::NBD_ENOMEM => IoError::NoMemory,
        Errno::NBD_ENOSPC => IoError::NoSpace,
        Errno::NBD_EOVERFLOW => IoError::BadLength,
        Errno::NBD_ESHUTDOWN => IoError::ShuttingDown,
        // NBD_EINVAL, NBD_ENOTSUP and whatever is unknown.
        _ => IoError::Unsupported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_value_has_its_meaning_and_unknown_ones_count_as_invalid() {
        let table = [
            (1, IoError::ReadOnly),
            (5, IoError::Medium),
            (12, IoError::NoMemory),
            (22, IoError::Unsupported),
            (28, IoError::NoSpace),
            (75, IoError::BadLength),
            (95, IoError::Unsupported),
            (108, IoError::ShuttingDown),
            (9, IoError::Unsupported),
            (u32::MAX, IoError::Unsupported),
        ];
        for (errno, expected) in table {
            assert_eq!(io_error(Errno(errno)), expected, "{errno}");
        }
    }
}
