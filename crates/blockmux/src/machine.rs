//! The machine, as far as limits are taken from it.

use blockmux_engine::sys::address_space_left;
use std::fs;
use std::path::Path;

/// What of main memory this process may use, in bytes: less than there is in a container; with a limit of its own, what is
/// left of that.
pub(crate) fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    let installed = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    let of_groups = group_limit(Path::new("/sys/fs/cgroup"), &read(Path::new("/proc/self/cgroup")));
    let of_process = address_space_left();
    [of_groups, of_process].into_iter().flatten().fold(installed, u64::min)
}

/// The least limit of the control groups that `membership`, a file `/proc/PID/cgroup`, names, and of those above them.
/// In a container its own group may be the topmost that is to be seen.
fn group_limit(root: &Path, membership: &str) -> Option<u64> {
    let groups = membership.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let group = Path::new(group.trim_start_matches('/'));
        match controllers {
            "" => Some((root.to_owned(), group, "memory.max")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some((root.join("memory"), group, "memory.limit_in_bytes"))
            }
            _ => None,
        }
    });
    let limits = groups.flat_map(|(root, group, file)| {
        let places: Vec<_> = group.ancestors().map(|group| root.join(group).join(file)).collect();
        places.into_iter().filter_map(|place| read(&place).trim().parse().ok())
    });
    limits.min()
}

/// A file of the system's; empty if there is none.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// What tells this machine from others: two of them that serve a volume of one name must not look like two paths to one
/// volume, which some initiators would then use as that. Empty if it has none.
pub(crate) fn machine_id() -> String {
    read(Path::new("/etc/machine-id")).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_above_counts() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        let set = |path: &str, limit: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, limit).unwrap();
        };
        assert_eq!(group_limit(root, "0::/a/b\n"), None);
        set("a/b/memory.max", "max\n");
        assert_eq!(group_limit(root, "0::/a/b\n"), None);
        set("a/memory.max", "268435456\n");
        assert_eq!(group_limit(root, "0::/a/b\n"), Some(256 << 20));
        let old = "5:cpu,cpuacct:/x\n4:memory:/x\n0::/a/b\n";
        set("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(group_limit(root, old), Some(256 << 20));
        set("memory/memory.limit_in_bytes", "1000\n");
        assert_eq!(group_limit(root, old), Some(1000));
    }
}
