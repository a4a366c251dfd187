//! What disks of the kernel have in common, of whichever driver.

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
}
