//! The machine, as far as limits are taken from it.

use rustix::process::{Resource, getrlimit};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;

/// What of main memory this process may use, in bytes: less than there is in a container, or with a limit of its own.
pub(crate) fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    let installed = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    let of_groups = group_limit(Path::new("/sys/fs/cgroup"), &read(Path::new("/proc/self/cgroup")));
    let of_process = getrlimit(Resource::As).current;
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

/// The addresses of this machine that others reach it by, the one of the default route first;
/// loopback and those of one link are left out.
pub(crate) fn own_addresses(is_v4: bool) -> Vec<IpAddr> {
    let mut all = if is_v4 {
        local_v4(&read(Path::new("/proc/net/fib_trie")))
    } else {
        local_v6(&read(Path::new("/proc/net/if_inet6")))
    };
    let first = towards_others(is_v4).filter(|first| all.contains(first));
    all.sort_by_key(|address| (Some(*address) != first, *address));
    all.dedup();
    all.truncate(MOST_ADDRESSES);
    all
}

/// The address that a packet to another network would have as its source; none is sent.
fn towards_others(is_v4: bool) -> Option<IpAddr> {
    // For documentation (RFC 5737, RFC 3849): nobody's.
    let (any, other) = if is_v4 { ("0.0.0.0:0", "203.0.113.1:9") } else { ("[::]:0", "[2001:db8::1]:9") };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(other).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// Local addresses of `/proc/net/fib_trie`: those above a line that says so.
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

/// The addresses of `/proc/net/if_inet6`, each 32 digits at the beginning of its line.
fn local_v6(list: &str) -> Vec<IpAddr> {
    let digits = list.lines().filter_map(|line| line.split_whitespace().next());
    let all = digits.filter_map(|digits| u128::from_str_radix(digits, 16).ok()).map(Ipv6Addr::from);
    let others = all.filter(|address| !address.is_loopback() && !address.is_unicast_link_local());
    others.map(IpAddr::from).collect()
}

/// A machine with more has them for its containers.
const MOST_ADDRESSES: usize = 8;

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
    fn addresses_are_read_as_the_kernel_prints_them() {
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
