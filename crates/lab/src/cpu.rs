//! CPU time of threads, split into user and system time.
//!
//! The total is the thread's CPU clock, exact to the nanosecond. The kernel reports the split only
//! in ticks of 10 ms (`/proc/thread-self/stat`), so the parts are estimated as shares of the total,
//! with an error of a few percent over a second.

use rustix::time::{ClockId, clock_gettime};
use std::ops::Add;
use std::time::Duration;

/// CPU time of threads since their start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuTime {
    total: Duration,
    user_ticks: u64,
    system_ticks: u64,
}

/// CPU time of threads in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuUsage {
    /// User and system time.
    pub(crate) cpu_ns: u64,
    /// System time; `None` if the period was too short to measure it.
    pub(crate) system_ns: Option<u64>,
}

impl CpuTime {
    /// CPU time of the calling thread.
    pub(crate) fn of_this_thread() -> CpuTime {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let total = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
        let (user_ticks, system_ticks) = ticks(&stat).unwrap_or((0, 0));
        CpuTime { total, user_ticks, system_ticks }
    }

    /// CPU time since `earlier`.
    pub(crate) fn since(self, earlier: CpuTime) -> CpuUsage {
        let cpu_ns = self.total.saturating_sub(earlier.total).as_nanos() as u64;
        let user = self.user_ticks.saturating_sub(earlier.user_ticks);
        let system = self.system_ticks.saturating_sub(earlier.system_ticks);
        let share = |ticks: u64| (u128::from(cpu_ns) * u128::from(system) / u128::from(ticks)) as u64;
        CpuUsage { cpu_ns, system_ns: (user + system > 0).then(|| share(user + system)) }
    }
}

impl Add for CpuTime {
    type Output = CpuTime;

    fn add(self, other: CpuTime) -> CpuTime {
        CpuTime {
            total: self.total + other.total,
            user_ticks: self.user_ticks + other.user_ticks,
            system_ticks: self.system_ticks + other.system_ticks,
        }
    }
}

/// `utime` and `stime`, fields 14 and 15; field 2 is a name in parentheses that may contain
/// anything.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut fields = behind_name.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_found_after_a_name_with_spaces_and_parentheses() {
        let stat = "42 (a ) b (c) R 1 2 3 0 -1 64 5 6 7 8 130 17 0 0 20 0 3 0 99";
        assert_eq!(ticks(stat), Some((130, 17)));
        assert_eq!(ticks(""), None);
        assert_eq!(ticks("42 (a) R 1 2 3"), None);
    }

    #[test]
    fn system_time_is_a_share_of_the_exact_total() {
        let at = |total_ms, user_ticks, system_ticks| CpuTime {
            total: Duration::from_millis(total_ms),
            user_ticks,
            system_ticks,
        };
        let used = (at(500, 20, 40) + at(500, 10, 20)).since(at(100, 0, 0));
        assert_eq!(used, CpuUsage { cpu_ns: 900_000_000, system_ns: Some(600_000_000) });
        assert_eq!(at(5, 1, 1).since(at(1, 1, 1)), CpuUsage { cpu_ns: 4_000_000, system_ns: None });
    }

    #[test]
    fn a_thread_that_only_calculates_is_mostly_in_user_time() {
        let before = CpuTime::of_this_thread();
        let mut number = 1_u64;
        while CpuTime::of_this_thread().since(before).cpu_ns < 200_000_000 {
            number = std::hint::black_box(
                (0..1_000_000).fold(number, |number, step| number.wrapping_mul(3) ^ step),
            );
        }
        let used = CpuTime::of_this_thread().since(before);
        assert!(used.system_ns.unwrap() < used.cpu_ns / 2, "{used:?}");
    }
}
