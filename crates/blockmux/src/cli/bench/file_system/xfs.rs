//! XFS on a disk, and bonnie++ on it.

use super::page_cache::PageCacheLimit;
use super::programs::Programs;
use blockmux_engine::attach::program;
use blockmux_lab::bonnie::BonnieRates;
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use tracing::warn;

/// A new file system, mounted until it is dropped.
pub(super) struct MountedXfs<'a> {
    directory: &'a Path,
    is_mounted: bool,
}

impl<'a> MountedXfs<'a> {
    /// Makes a file system on the disk at `node`, and mounts it. The disk's blocks stay in memory:
    /// they are not discarded.
    ///
    /// # Errors
    /// What failed, as one line.
    pub(super) fn make(
        programs: &Programs,
        node: &Path,
        directory: &'a Path,
    ) -> Result<MountedXfs<'a>, String> {
        let mut make = Command::new(MKFS);
        programs.run(make.args(["-q", "-f", "-K", "-b", "size=4096"]).arg(node))?;
        programs.run(Command::new("mount").args(["-t", "xfs"]).arg(node).arg(directory))?;
        Ok(MountedXfs { directory, is_mounted: true })
    }

    /// Runs bonnie++ with `bytes` of data, a whole number of MiB. Its files are dropped from the
    /// page cache between its tests, as if they were larger than memory.
    ///
    /// # Errors
    /// If it fails, or prints what is not known.
    pub(super) fn bonnie(
        &self,
        programs: &Programs,
        limit: Option<&PageCacheLimit>,
        bytes: u64,
    ) -> Result<BonnieRates, String> {
        let mut bonnie = Command::new(BONNIE);
        bonnie.arg("-d").arg(self.directory).args(ARGUMENTS).args(["-s", &(bytes >> 20).to_string()]);
        let limit_it = |process| {
            if let Some(Err(why)) = limit.map(|limit| limit.add(process)) {
                warn!("page cache: {why}");
            }
        };
        let drop_files_after_test = |said: &str| {
            // The test has flushed them. Data of the next one may already be on its way.
            if said.contains(TEST_IS_DONE) {
                drop_from_page_cache(self.directory).unwrap_or_else(|error| warn!("page cache: {error}"));
            }
        };
        let printed = programs.run_and_listen(&mut bonnie, limit_it, drop_files_after_test)?;
        BonnieRates::parse(&printed).map_err(|why| format!("{BONNIE}: {why}"))
    }

    /// Unmounts it.
    ///
    /// # Errors
    /// If it is in use, or what was not written cannot be written.
    pub(super) fn unmount(mut self) -> Result<(), String> {
        program::run(Command::new("umount").arg(self.directory)).map_err(|error| error.to_string())?;
        self.is_mounted = false;
        Ok(())
    }
}

impl Drop for MountedXfs<'_> {
    fn drop(&mut self) {
        let mut unmount = Command::new("umount");
        if self.is_mounted
            && let Err(said) = program::run(unmount.arg("-l").arg(self.directory))
        {
            warn!("{said}");
        }
    }
}

/// Drops the pages of all files in a directory that have no changes.
fn drop_from_page_cache(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        fadvise(File::open(entry?.path())?, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// The version of bonnie++, as "2.00a"; empty if it does not say.
pub(super) fn bonnie_version() -> String {
    // Without arguments that it knows, it prints its usage with its version, and fails.
    let said = program::run(Command::new(BONNIE).arg("-?")).unwrap_or_else(|error| error.to_string());
    version_in(&said).unwrap_or_default().to_owned()
}

fn version_in(usage: &str) -> Option<&str> {
    usage.split("Version: ").nth(1)?.split_whitespace().next()
}

pub(super) const MKFS: &str = "mkfs.xfs";
pub(super) const BONNIE: &str = "bonnie++";
/// Like the study, without tests of single characters (`-f`); without tests of many files (`-n 0`).
/// The checks that the data is twice the memory are off (`-r 0`): the page cache is limited.
const ARGUMENTS: [&str; 7] = ["-f", "-n", "0", "-r", "0", "-u", "root"];
/// What it says on standard error after each test.
const TEST_IS_DONE: &str = "done\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_what_the_usage_ends_with() {
        assert_eq!(version_in("bonnie++: Version: 2.00a"), Some("2.00a"));
        assert_eq!(version_in("usage: bonnie++ [-d scratch-dir]"), None);
    }

    #[test]
    fn files_are_dropped_and_keep_their_content() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("Bonnie.1");
        fs::write(&file, [7; 9000]).unwrap();
        drop_from_page_cache(directory.path()).unwrap();
        assert_eq!(fs::read(&file).unwrap(), [7; 9000]);
        assert!(drop_from_page_cache(&file).is_err(), "no directory");
    }
}
