//! CPU use of other programs during a measurement, which distorts results.

use super::group::{TICKS_PER_S, parse_stat};
use anyhow::{Context, Result};
use std::fs;
use std::time::{Duration, Instant};

/// CPU time of the machine up to some moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    at: Instant,
    /// CPU time of all processes, including time stolen by a hypervisor.
    all_ticks: u64,
    /// CPU time of this process and of its children that have ended.
    own_ticks: u64,
}

impl Load {
    /// Samples the CPU time.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub(crate) fn now() -> Result<Load> {
        let own = parse_stat(&fs::read_to_string("/proc/self/stat")?).context("/proc/self/stat")?;
        Ok(Load {
            at: Instant::now(),
            all_ticks: parse_all(&fs::read_to_string("/proc/stat")?).context("/proc/stat")?,
            own_ticks: own.own_ticks + own.reaped_ticks,
        })
    }

    /// CPUs that other programs have used since: 0.5 is half of one. `server` is the CPU time of
    /// measured programs that are not children of this process.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub(crate) fn others_since(&self, server: Duration) -> Result<f64> {
        let now = Load::now()?;
        let seconds = |after: u64, before: u64| after.saturating_sub(before) as f64 / TICKS_PER_S as f64;
        let ours_s = seconds(now.own_ticks, self.own_ticks) + server.as_secs_f64();
        let others_s = seconds(now.all_ticks, self.all_ticks) - ours_s;
        Ok((others_s / (now.at - self.at).as_secs_f64()).max(0.0))
    }
}

/// User, nice, system and stolen time of all CPUs; see proc(5). Interrupts are excluded, because
/// most are for our own traffic.
fn parse_all(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some([0, 1, 2, 7].iter().filter_map(|&nth: &usize| fields.get(nth)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_and_waiting_is_not() {
        let stat = "cpu  100 20 3 5000 6000 7000 8000 4 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(parse_all(stat), Some(127));
        assert_eq!(parse_all("intr 5"), None);
    }

    #[test]
    fn own_cpu_time_is_not_counted_as_that_of_others() {
        let before = Load { at: Instant::now(), all_ticks: 0, own_ticks: 0 };
        assert!(before.others_since(Duration::from_secs(1 << 40)).unwrap() == 0.0);
        assert!(before.others_since(Duration::ZERO).unwrap() > 0.0);
    }
}
