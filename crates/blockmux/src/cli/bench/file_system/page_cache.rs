//! A limit of the page cache of one program, by the memory controller of a control group of version
//! 2. A program above this limit (`memory.high`) waits until its pages are written and freed. Hard
//! limits, as of version 1, kill it if its disk is slow.
//!
//! The group is removed when the limit is dropped, which works once the program has ended; the
//! kernel then keeps what it still has in the page cache.

use std::fs;
use std::path::{Path, PathBuf};

/// A control group whose memory is limited.
pub(super) struct PageCacheLimit {
    group: PathBuf,
    /// In bytes.
    pub(super) bytes: u64,
}

impl PageCacheLimit {
    /// Makes a group with a limit of `bytes`, which includes the memory of the program itself.
    ///
    /// # Errors
    /// If that is not possible here: why, as half a sentence.
    pub(super) fn new(bytes: u64) -> Result<PageCacheLimit, String> {
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        PageCacheLimit::below(Path::new("/sys/fs/cgroup"), &membership, bytes)
    }

    fn below(root: &Path, membership: &str, bytes: u64) -> Result<PageCacheLimit, String> {
        let parent =
            place(root, membership).ok_or("no control group of version 2 has the memory controller")?;
        let group = parent.join(format!("blockmux-bench-{}", std::process::id()));
        let failed = |error| format!("{}: {error}", group.display());
        fs::create_dir(&group).map_err(failed)?;
        let made = PageCacheLimit { group: group.clone(), bytes };
        fs::write(group.join(LIMIT), bytes.to_string()).map_err(failed)?;
        Ok(made)
    }

    /// Limits a process that has just begun.
    ///
    /// # Errors
    /// If it cannot enter the group.
    pub(super) fn add(&self, process: u32) -> Result<(), String> {
        let file = self.group.join("cgroup.procs");
        fs::write(&file, process.to_string()).map_err(|error| format!("{}: {error}", file.display()))
    }
}

impl Drop for PageCacheLimit {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.group) {
            tracing::warn!("{}: cannot remove this control group: {error}", self.group.display());
        }
    }
}

/// Where a group with a limit of memory can be made, as `membership`, the text of
/// `/proc/PID/cgroup`, says.
///
/// A group with processes cannot have groups with limits below it, so this is the nearest one above
/// the process's own that gives its children the controller.
fn place(root: &Path, membership: &str) -> Option<PathBuf> {
    let own = membership.lines().find_map(|line| line.strip_prefix("0::"))?;
    let gives_memory = |group: &&Path| {
        let given = fs::read_to_string(root.join(group).join("cgroup.subtree_control"));
        given.is_ok_and(|given| given.split_whitespace().any(|name| name == "memory"))
    };
    let parent = Path::new(own.trim_start_matches('/')).ancestors().find(gives_memory)?;
    Some(root.join(parent))
}

const LIMIT: &str = "memory.high";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_made_where_the_system_gives_memory_to_groups() {
        let place_of = |files: &[(&str, &str)], membership: &str| {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            let parent = place(root.path(), membership)?;
            Some(parent.strip_prefix(root.path()).unwrap().display().to_string())
        };
        let session = "0::/user.slice/session.scope\n";
        let of_systemd = [
            ("user.slice/cgroup.subtree_control", "cpu memory pids\n"),
            ("cgroup.subtree_control", "memory\n"),
        ];
        assert_eq!(place_of(&of_systemd, session), Some("user.slice".to_owned()));
        assert_eq!(place_of(&of_systemd[1..], session), Some(String::new()));
        assert_eq!(place_of(&[("cgroup.subtree_control", "cpu\n")], session), None);
        assert_eq!(place_of(&of_systemd, "4:memory:/x/y\n"), None, "version 1 alone");
        assert_eq!(place_of(&of_systemd, ""), None);
    }

    #[test]
    fn a_process_is_limited_as_the_group_is() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.subtree_control"), "memory").unwrap();
        let limit = PageCacheLimit::below(root.path(), "0::/\n", 7 << 20).unwrap();
        limit.add(4711).unwrap();
        for (file, text) in [("memory.high", "7340032"), ("cgroup.procs", "4711")] {
            let file = limit.group.join(file);
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            // A real group has no files that keep it.
            fs::remove_file(file).unwrap();
        }
        let group = limit.group.clone();
        drop(limit);
        assert!(!group.exists());
    }
}
