//! CPU time of threads, split into user and system time, and of the whole machine.
//!
//! The total is the thread's CPU clock, exact to the nanosecond. The kernel reports the split only
//! in ticks of 10 ms (`/proc/thread-self/stat`), so the parts are estimated as shares of the total,
//! with an error of a few percent over a second.
//!
//! The machine's busy time is the elapsed time of its CPUs without that in which they were idle, as
//! the kernel measures it (`/proc/stat`). It includes interrupts and kernel threads, whose work no
//! process is charged for.

use rustix::time::{ClockId, clock_gettime};
use std::ops::Add;
use std::time::{Duration, Instant};

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

/// Time in which this machine's CPUs were not busy, up to a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineCpu {
    at: Instant,
    cpus: u32,
    /// Sum over the CPUs, without work or taken by the hypervisor.
    not_busy: Duration,
}

impl MachineCpu {
    /// The state now; `None` if the kernel does not tell it.
    pub(crate) fn now() -> Option<MachineCpu> {
        let (at, stat) = (Instant::now(), std::fs::read_to_string("/proc/stat").ok()?);
        let (cpus, ticks) = not_busy_ticks(&stat)?;
        let per_second = rustix::param::clock_ticks_per_second();
        Some(MachineCpu { at, cpus, not_busy: Duration::from_millis(ticks * 1000 / per_second.max(1)) })
    }

    /// CPU time of the machine since `earlier`, in nanoseconds.
    pub(crate) fn since(self, earlier: MachineCpu) -> u64 {
        let all = self.at.duration_since(earlier.at) * self.cpus.min(earlier.cpus);
        all.saturating_sub(self.not_busy.saturating_sub(earlier.not_busy)).as_nanos() as u64
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

/// Number of CPUs in `/proc/stat`, and the ticks of all in which they were idle, waited for I/O or
/// were taken by the hypervisor: columns 4, 5 and 8.
fn not_busy_ticks(stat: &str) -> Option<(u32, u64)> {
    let is_cpu = |line: &&str| line.starts_with("cpu");
    let mut lines = stat.lines().take_while(is_cpu);
    let columns = lines.next()?.split_ascii_whitespace().collect::<Vec<_>>();
    let ticks = [4, 5, 8].map(|at| columns.get(at).and_then(|ticks| ticks.parse::<u64>().ok()));
    let cpus = u32::try_from(lines.count()).ok().filter(|&cpus| cpus > 0)?;
    Some((cpus, ticks[0]? + ticks[1]? + ticks[2].unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_busy_when_its_cpus_are_neither_idle_nor_taken() {
        let stat = "cpu  1 2 3 400 50 6 7 8 9 10\ncpu0 0 0 0 0\ncpu1 0 0 0 0\nintr 1\n";
        assert_eq!(not_busy_ticks(stat), Some((2, 458)));
        assert_eq!(not_busy_ticks("intr 1\ncpu 1 2 3 4 5\n"), None);
        let at = Instant::now();
        let state = |ms, idle_ms| MachineCpu {
            at: at + Duration::from_millis(ms),
            cpus: 2,
            not_busy: Duration::from_millis(idle_ms),
        };
        assert_eq!(state(1000, 5500).since(state(0, 4000)), 500_000_000);
        assert_eq!(state(10, 5500).since(state(0, 4000)), 0, "a tick is longer than the period");
    }

    #[test]
    fn work_of_this_thread_is_work_of_the_machine() {
        let before = MachineCpu::now().unwrap();
        let own = CpuTime::of_this_thread();
        while CpuTime::of_this_thread().since(own).cpu_ns < 200_000_000 {
            std::hint::spin_loop();
        }
        let busy_ns = MachineCpu::now().unwrap().since(before);
        // The kernel counts in ticks of 10 ms on each CPU.
        assert!(busy_ns > 150_000_000, "{busy_ns}");
    }

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
