//! Resource use of this process, from `/proc`.

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::sync::OnceLock;

/// Resource use of the process, with the metrics that Prometheus client libraries have; a value
/// that is not available is 0.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    /// In bytes.
    pub(super) resident: f64,
    /// In bytes.
    pub(super) virtual_memory: f64,
    pub(super) open_files: f64,
    /// Limit of open files.
    pub(super) max_files: f64,
    pub(super) threads: f64,
    /// Start time, in seconds since the Unix epoch.
    pub(super) started: f64,
}

impl Process {
    /// Reads the current values.
    pub(super) fn read() -> Process {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The name is in parentheses and may contain any character. The field behind it is field 3
        // of proc_pid_stat(5).
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
            max_files: getrlimit(Resource::Nofile).current.unwrap_or(0) as f64,
            threads: field(20),
            started: boot_seconds() + field(22) / ticks,
        }
    }
}

/// Boot time of the system, in seconds since the Unix epoch.
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
    fn all_values_are_read() {
        let Process { resident, virtual_memory, open_files, max_files, threads, started, .. } =
            Process::read();
        assert!(resident > 65536.0 && virtual_memory >= resident, "{resident} {virtual_memory}");
        assert!(open_files >= 3.0 && max_files >= open_files && threads >= 1.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(started > 1e9 && started <= now + 2.0, "{started}");
    }
}
