//! The CPUs of servers and clients, and a description of the machine.

use crate::process::find;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One CPU for servers and another for clients, so that neither takes time from the other.
#[derive(Clone, Debug)]
pub(crate) struct CpuSet {
    /// The CPU of servers and the CPU of clients; `None` if there is only one CPU or no `taskset`.
    pair: Option<(usize, usize)>,
    taskset: PathBuf,
}

/// The side of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Server,
    Client,
    /// A program that pins its own threads to both sides.
    Both,
}

impl CpuSet {
    /// A set that pins no program.
    pub(crate) fn unbound() -> CpuSet {
        CpuSet { pair: None, taskset: PathBuf::new() }
    }

    /// The first two CPUs that this process may use.
    ///
    /// # Errors
    /// If the system does not report them.
    pub(crate) fn here() -> Result<CpuSet> {
        let status = fs::read_to_string("/proc/self/status").context("cannot determine the CPUs")?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed = parse_list(list.unwrap_or_default());
        let taskset = find("taskset");
        let pair = match allowed[..] {
            [server, client, ..] if taskset.is_some() => Some((server, client)),
            _ => None,
        };
        Ok(CpuSet { pair, taskset: taskset.unwrap_or_default() })
    }

    /// A command that runs `program` on its side's CPU.
    pub(crate) fn command(&self, side: Side, program: &Path) -> Command {
        let Some((server, client)) = self.pair else { return Command::new(program) };
        let list = match side {
            Side::Server => server.to_string(),
            Side::Client => client.to_string(),
            Side::Both => format!("{server},{client}"),
        };
        let mut command = Command::new(&self.taskset);
        command.args(["-c", &list]).arg(program);
        command
    }

    /// How programs were pinned, as a sentence.
    pub(crate) fn words(&self) -> String {
        match self.pair {
            Some((server, client)) => {
                format!("Servers run on CPU {server}, clients on CPU {client}.")
            }
            None => "Servers and clients are not pinned to CPUs.".to_owned(),
        }
    }
}

/// CPU, memory, kernel and TCP congestion control in one line.
pub(crate) fn words() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let (cpuinfo, meminfo) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let kib = value(&meminfo, "MemTotal").trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let congestion = read("/proc/sys/net/ipv4/tcp_congestion_control");
    format!(
        "{}, {cpus} CPUs, {} GiB, Linux {}, {}",
        value(&cpuinfo, "model name"),
        kib.div_ceil(1 << 20),
        read("/proc/sys/kernel/osrelease").trim(),
        tcp(congestion.trim())
    )
}

/// The congestion control of all programs, and whether it distorts long I/O over loopback.
fn tcp(congestion: &str) -> String {
    let caution = if congestion.starts_with("bbr") { ", which paces over loopback" } else { "" };
    format!("TCP by {congestion}{caution}")
}

/// Parses `0-2,5`.
fn parse_list(text: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(parse_list("\t0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list("3"), [3]);
        assert!(parse_list("").is_empty());
    }

    #[test]
    fn a_pacing_congestion_control_is_marked() {
        assert_eq!(tcp("cubic"), "TCP by cubic");
        assert_eq!(tcp("bbr"), "TCP by bbr, which paces over loopback");
    }

    #[test]
    fn a_program_is_bound_to_its_side() {
        let bound = CpuSet { pair: Some((2, 5)), taskset: "taskset".into() };
        let words = |side| format!("{:?}", bound.command(side, Path::new("fio")));
        assert_eq!(words(Side::Server), r#""taskset" "-c" "2" "fio""#);
        assert_eq!(words(Side::Client), r#""taskset" "-c" "5" "fio""#);
        assert_eq!(words(Side::Both), r#""taskset" "-c" "2,5" "fio""#);
        let free = CpuSet::unbound();
        assert_eq!(format!("{:?}", free.command(Side::Client, Path::new("fio"))), r#""fio""#);
    }
}
