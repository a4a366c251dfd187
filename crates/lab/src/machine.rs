//! Description of the machine, from `/proc` and the process.
//!
//! A report must not fail if something cannot be determined: it is then "unknown" or 0.

use crate::result::Machine;
use crate::result::UNKNOWN;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_volume::text::replaced;
use std::fs;
use std::thread::available_parallelism;

impl Machine {
    /// This machine; `congestion` replaces the system's default.
    #[must_use]
    pub fn here(congestion: Option<&Congestion>) -> Machine {
        let congestion = congestion.cloned().or_else(Congestion::system_default);
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let device_tree = text("/proc/device-tree/model");
        Machine {
            cpu: cpu_model(&text("/proc/cpuinfo"), &device_tree).unwrap_or_else(unknown),
            // The CPUs that the process may use: affinity and cgroup quota count.
            cores: available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
            kernel: kernel_release(&text("/proc/sys/kernel/osrelease")).unwrap_or_else(unknown),
            memory_bytes: memory_bytes(&text("/proc/meminfo")).unwrap_or(0),
            congestion: congestion.map_or_else(unknown, |congestion| congestion.to_string()),
        }
    }
}

/// The CPU model from `/proc/cpuinfo`, or else the board's from the device tree, because 64-bit Arm
/// CPUs report only part numbers.
fn cpu_model(cpuinfo: &str, device_tree: &str) -> Option<String> {
    let field = |names: &[&str]| {
        cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            names.contains(&name.trim()).then(|| tidy(value))?
        })
    };
    field(&["model name", "cpu model"])
        .or_else(|| tidy(device_tree.trim_matches('\0')))
        .or_else(|| field(&["Model", "Hardware", "uarch", "cpu", "Processor"]))
        .or_else(|| field(&["CPU part"]).map(|part| format!("Arm, part {part}")))
}

fn kernel_release(osrelease: &str) -> Option<String> {
    tidy(osrelease)
}

fn memory_bytes(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// One line without runs of spaces or control characters; `None` if nothing is left.
fn tidy(text: &str) -> Option<String> {
    let line = replaced(text, ' ');
    let words: Vec<&str> = line.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

fn unknown() -> String {
    UNKNOWN.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_x86_cpu_has_its_model_name() {
        let cpuinfo = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Intel(R) Xeon(R)   CPU @ 2.20GHz\n\nprocessor\t: 1\n";
        assert_eq!(cpu_model(cpuinfo, "").unwrap(), "Intel(R) Xeon(R) CPU @ 2.20GHz");
    }

    #[test]
    fn an_arm_board_is_named_by_its_device_tree_or_its_part() {
        let cpuinfo = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(cpu_model(cpuinfo, "Some Board 4\0").unwrap(), "Some Board 4");
        assert_eq!(cpu_model(cpuinfo, "").unwrap(), "Arm, part 0xd0c");
    }

    #[test]
    fn a_machine_without_cpuinfo_has_no_model() {
        assert_eq!(cpu_model("", ""), None);
        assert_eq!(cpu_model("model name\t: \n", "\0"), None);
        assert_eq!(kernel_release("\n"), None);
    }

    #[test]
    fn memory_is_in_bytes() {
        assert_eq!(memory_bytes("MemTotal:        8123456 kB\nMemFree: 1 kB\n"), Some(8_123_456 * 1024));
        assert_eq!(memory_bytes("MemTotal: lots kB\n"), None);
        assert_eq!(memory_bytes("MemTotal: 18446744073709551615 kB\n"), None);
    }

    #[test]
    fn this_machine_has_a_core_and_a_kernel() {
        let here = Machine::here(None);
        assert!(here.cores >= 1 && !here.kernel.is_empty() && !here.cpu.is_empty());
        assert_ne!(here.congestion, UNKNOWN);
        let asked = "other".parse().unwrap();
        assert_eq!(Machine::here(Some(&asked)).congestion, "other");
    }
}
