//! What disks of the kernel have in common, of whichever driver.

use blockmux_volume::IoError;

/// The kernel has no disks with a volume's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("has blocks of {block} bytes, and the kernel's disks have {SECTOR} to {page}; use another volume")]
pub struct UnsupportedBlocks {
    /// The volume's logical block in bytes.
    pub block: u32,
    /// The largest logical block in bytes.
    pub page: u32,
}

/// Checks that the kernel has disks with logical blocks of this size, if `page` is its page size;
/// both in bytes.
///
/// # Errors
/// If it has none.
pub fn check_blocks(block: u32, page: u32) -> Result<(), UnsupportedBlocks> {
    if (SECTOR..=page).contains(&block) { Ok(()) } else { Err(UnsupportedBlocks { block, page }) }
}

/// The error number of a block device for an error of its volume. The block layer knows only some
/// numbers: the others become [`EIO`].
pub(crate) fn errno(error: IoError) -> i32 {
    match error {
        IoError::OutOfRange | IoError::ReadOnly | IoError::Aborted => EIO,
        IoError::Misaligned | IoError::BadLength => EINVAL,
        IoError::Unsupported => EOPNOTSUPP,
        IoError::Reserved => EBADE,
        IoError::NoSpace => ENOSPC,
        IoError::Medium => ENODATA,
        IoError::NoMemory => ENOMEM,
        IoError::PathLost | IoError::Fenced => ENOLINK,
        IoError::ShuttingDown => ENODEV,
    }
}

/// I/O error.
pub(crate) const EIO: i32 = 5;
/// No memory.
pub(crate) const ENOMEM: i32 = 12;
/// The device is offline.
pub(crate) const ENODEV: i32 = 19;
/// Invalid request.
pub(crate) const EINVAL: i32 = 22;
/// No space.
pub(crate) const ENOSPC: i32 = 28;
/// Reservation conflict.
pub(crate) const EBADE: i32 = 52;
/// Medium error.
pub(crate) const ENODATA: i32 = 61;
/// Lost path to the storage.
pub(crate) const ENOLINK: i32 = 67;
/// The device does not support the operation, and is not asked again.
pub(crate) const EOPNOTSUPP: i32 = 95;

/// The unit of sizes and addresses in the kernel, and its smallest block, in bytes.
pub const SECTOR: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_large_as_a_page_and_no_smaller_than_a_sector() {
        for block in [512, 1024, 4096] {
            assert_eq!(check_blocks(block, 4096), Ok(()));
        }
        for block in [1, 256, 8192] {
            assert_eq!(check_blocks(block, 4096), Err(UnsupportedBlocks { block, page: 4096 }));
        }
    }

    #[test]
    fn every_error_has_its_number() {
        let table = [
            (IoError::OutOfRange, 5),
            (IoError::Misaligned, 22),
            (IoError::BadLength, 22),
            (IoError::ReadOnly, 5),
            (IoError::Unsupported, 95),
            (IoError::Reserved, 52),
            (IoError::NoSpace, 28),
            (IoError::Medium, 61),
            (IoError::NoMemory, 12),
            (IoError::PathLost, 67),
            (IoError::Aborted, 5),
            (IoError::ShuttingDown, 19),
            (IoError::Fenced, 67),
        ];
        for (error, number) in table {
            assert_eq!(errno(error), number, "{error}");
        }
    }
}
