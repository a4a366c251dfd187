//! Properties of the machine: memory, addresses, identity.

use blockmux_engine::sys::address_space_left;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A figure of the system, read again after [`RECENT`]. Each volume that is opened asks for some,
/// and a reading opens a dozen files.
struct Recent(Mutex<Option<(Instant, u64)>>);

impl Recent {
    const fn new() -> Recent {
        Recent(Mutex::new(None))
    }

    fn get(&self, now: Instant, read: impl FnOnce() -> u64) -> u64 {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((at, figure)) if now.saturating_duration_since(at) < RECENT => figure,
            _ => last.insert((now, read())).1,
        }
    }
}

/// The main memory that this process may use, in bytes: that of the machine, or the lowest limit of
/// its control groups or of the process.
pub(crate) fn memory_bytes() -> u64 {
    static LAST: Recent = Recent::new();
    LAST.get(Instant::now(), read_memory_bytes)
}

fn read_memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    let installed = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    let of_groups = group_limit(Path::new("/sys/fs/cgroup"), &read(Path::new("/proc/self/cgroup")));
    let of_process = address_space_left();
    [of_groups, of_process].into_iter().flatten().fold(installed, u64::min)
}

/// The main memory that is available without reclaiming memory of other processes, in bytes.
pub(crate) fn available_memory_bytes() -> u64 {
    static LAST: Recent = Recent::new();
    LAST.get(Instant::now(), read_available_memory_bytes)
}

fn read_available_memory_bytes() -> u64 {
    let left = groups_left(Path::new("/sys/fs/cgroup"), &read(Path::new("/proc/self/cgroup")));
    let of_system = available_of(&read(Path::new("/proc/meminfo")));
    [left, of_system].into_iter().flatten().min().unwrap_or_else(memory_bytes)
}

fn available_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The least memory that the limits of the process's control groups leave.
fn groups_left(root: &Path, membership: &str) -> Option<u64> {
    let of_file = |file: &Path| read(file).trim().parse::<u64>().ok();
    let left = limit_files(root, membership).filter_map(|limit| {
        let used = match limit.file_name()?.to_str()? {
            "memory.max" => "memory.current",
            _ => "memory.usage_in_bytes",
        };
        let used = of_file(&limit.with_file_name(used))?;
        let used = used.saturating_sub(cached_of(&read(&limit.with_file_name("memory.stat"))));
        Some(of_file(&limit)?.saturating_sub(used))
    });
    left.min()
}

/// The page cache of a control group, in bytes: it counts as used but is reclaimable.
fn cached_of(stat: &str) -> u64 {
    let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    // In cgroup v1, the values without `total_` exclude child groups.
    let sum = |kind: &str| of(&format!("total_{kind} ")).or_else(|| of(&format!("{kind} "))).unwrap_or(0);
    sum("active_file").saturating_add(sum("inactive_file"))
}

/// The least limit of the control groups in `membership`, the text of `/proc/PID/cgroup`, and of
/// their parents. In a container, the process's own group may be the topmost visible one.
fn group_limit(root: &Path, membership: &str) -> Option<u64> {
    limit_files(root, membership).filter_map(|file| read(&file).trim().parse().ok()).min()
}

/// Paths of the limit files of these control groups and of their parents.
fn limit_files(root: &Path, membership: &str) -> impl Iterator<Item = PathBuf> {
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
    groups.flat_map(|(root, group, file)| {
        group.ancestors().map(|group| root.join(group).join(file)).collect::<Vec<_>>()
    })
}

/// The machine's addresses that other machines can reach, that of the default route first; without
/// loopback and link-local addresses.
pub(crate) fn own_addresses(is_v4: bool) -> Vec<IpAddr> {
    let mut all = if is_v4 {
        local_v4(&read(Path::new("/proc/net/fib_trie")))
    } else {
        local_v6(&read(Path::new("/proc/net/if_inet6")))
    };
    let first = towards_others(is_v4).filter(|first| all.contains(first));
    all.sort_by_key(|address| (Some(*address) != first, *address));
    all.dedup();
    all.truncate(MAX_ADDRESSES);
    all
}

/// The source address of packets to other networks. No packet is sent.
fn towards_others(is_v4: bool) -> Option<IpAddr> {
    // Addresses for documentation (RFC 5737, RFC 3849).
    let (any, other) = if is_v4 { ("0.0.0.0:0", "203.0.113.1:9") } else { ("[::]:0", "[2001:db8::1]:9") };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(other).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// Parses the local addresses of `/proc/net/fib_trie`: each is above a line with `host LOCAL`.
fn local_v4(trie: &str) -> Vec<IpAddr> {
    let mut found = Vec::new();
    let mut last = None;
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last.filter(|address| !address.is_loopback() && !address.is_link_local()));
        }
    }
    found.into_iter().map(IpAddr::from).collect()
}

/// Parses the addresses of `/proc/net/if_inet6`: 32 hexadecimal digits at the start of each line.
fn local_v6(list: &str) -> Vec<IpAddr> {
    let digits = list.lines().filter_map(|line| line.split_whitespace().next());
    let all = digits.filter_map(|digits| u128::from_str_radix(digits, 16).ok()).map(Ipv6Addr::from);
    let others = all.filter(|address| !address.is_loopback() && !address.is_unicast_link_local());
    others.map(IpAddr::from).collect()
}

/// The maximum number of addresses; a machine with more has them for its containers.
const MAX_ADDRESSES: usize = 8;
/// Age of a figure that still counts as current: in this time a core zeroes less than 1 GiB.
const RECENT: Duration = Duration::from_millis(100);

/// Reads a system file; empty if it does not exist.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The machine id; empty if there is none. It distinguishes volumes with the same name on several
/// machines, which some initiators would otherwise treat as two paths to one volume.
pub(crate) fn machine_id() -> String {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| read(Path::new("/etc/machine-id")).trim().to_owned()).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_read_again_when_it_is_old() {
        let (figure, now) = (Recent::new(), Instant::now());
        let mut readings = 0;
        let mut at = |now| {
            figure.get(now, || {
                readings += 1;
                readings
            })
        };
        assert_eq!([at(now), at(now), at(now + RECENT / 2)], [1, 1, 1]);
        assert_eq!([at(now + RECENT), at(now + RECENT)], [2, 2]);
    }

    #[test]
    fn addresses_are_parsed_from_the_kernels_format() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 192.0.2.0\n        \
                    /24 link UNICAST\n     |-- 192.0.2.2\n        /32 host LOCAL\n     |-- 192.0.2.255\n        \
                    /32 link BROADCAST\n     |-- 169.254.1.1\n        /32 host LOCAL\n";
        assert_eq!(local_v4(trie), ["192.0.2.2".parse::<IpAddr>().unwrap()]);
        let list = "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n\
                    00000000000000000000000000000001 01 80 10 80       lo\n\
                    20010db8000000000000000000000002 04 40 00 82     eth0\n";
        assert_eq!(local_v6(list), ["2001:db8::2".parse::<IpAddr>().unwrap()]);
        assert_eq!((local_v4("nonsense"), local_v6("nonsense")), (Vec::new(), Vec::new()));
    }

    #[test]
    fn the_lowest_limit_of_a_group_and_its_parents_applies() {
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

    #[test]
    fn used_memory_is_not_available() {
        let meminfo = "MemTotal:  24105 kB\nMemAvailable:   21417 kB\n";
        assert_eq!((available_of(meminfo), available_of("")), (Some(21417 << 10), None));
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("a/memory.max"), "5000\n").unwrap();
        assert_eq!(groups_left(root, "0::/a\n"), None, "without memory statistics");
        fs::write(root.join("a/memory.current"), "3000\n").unwrap();
        assert_eq!(groups_left(root, "0::/a\n"), Some(2000));
        fs::write(root.join("a/memory.stat"), "anon 5\ninactive_file 700\nactive_file 300\n").unwrap();
        assert_eq!(groups_left(root, "0::/a\n"), Some(3000), "the page cache is reclaimable");
        assert_eq!(cached_of("active_file 1\ntotal_inactive_file 20\ntotal_active_file 5\n"), 25);
        fs::write(root.join("a/memory.current"), "7000\n").unwrap();
        assert_eq!(groups_left(root, "0::/a\n"), Some(0));
    }
}
