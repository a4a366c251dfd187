//! What the system knows of this process.

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::sync::OnceLock;

/// Figures of the process, as Prometheus' clients name them; 0 where the system does not tell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    /// In bytes.
    pub(super) resident: f64,
    /// In bytes.
    pub(super) virtual_memory: f64,
    pub(super) open_files: f64,
    pub(super) most_files: f64,
    pub(super) threads: f64,
    /// In seconds since the Unix epoch.
    pub(super) started: f64,
}

impl Process {
    /// Reads them.
    pub(super) fn read() -> Process {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The fields after the name, which is in parentheses and may have any letters; the first
        // one of them is the third of proc(5).
        let fields: Vec<f64> = match stat.rsplit_once(')') {
            Some((_, rest)) => rest.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect(),
            None => Vec::new(),
        };
        let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0.0);
        let ticks = clock_ticks_per_second() as f64;
        let open_files = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        Process {
            cpu_seconds: (field(14) + field(15)) / ticks,
            resident: field(24) * page_size() as f64,
            virtual_memory: field(23),
            open_files: open_files as f64,
            most_files: getrlimit(Resource::Nofile).current.unwrap_or(0) as f64,
            threads: field(20),
            started: boot_seconds() + field(22) / ticks,
        }
    }
}

/// When the system started, in seconds since the Unix epoch.
fn boot_seconds() -> f64 {
    static BOOT: OnceLock<f64> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat.lines().find_map(|line| line.strip_prefix("btime "));
        line.and_then(|seconds| seconds.trim().parse().ok()).unwrap_or(0.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn the_system_tells_all_of_it() {
        let Process { resident, virtual_memory, open_files, most_files, threads, started, .. } =
            Process::read();
        assert!(resident > 65536.0 && virtual_memory >= resident, "{resident} {virtual_memory}");
        assert!(open_files >= 3.0 && most_files >= open_files && threads >= 1.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(started > 1e9 && started <= now + 2.0, "{started}");
    }
}
