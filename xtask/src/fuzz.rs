//! Fuzzing with libFuzzer if a nightly toolchain and a C++ compiler are installed, otherwise with a
//! mutator on the stable toolchain.

use crate::process::{cargo, find, output, succeed, target_directory};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Fuzzes `target`, or every target for an equal share of `seconds`. Returns a line for each.
///
/// # Errors
/// If the properties of some targets did not hold, each with its output, or the fuzzer cannot be
/// built.
pub(crate) fn run(root: &Path, seconds: u64, target: Option<&str>) -> Result<Vec<String>> {
    let targets = chosen(targets(root)?, target)?;
    let share = (seconds / targets.len().max(1) as u64).max(1);
    let fuzzer = Fuzzer::build(root)?;
    let (mut lines, mut failures) = (Vec::new(), Vec::new());
    for target in &targets {
        match fuzzer.run(root, target, share) {
            Ok(line) => lines.push(line),
            Err(failure) => failures.push(format!("{failure:#}")),
        }
    }
    if failures.is_empty() { Ok(lines) } else { bail!("{}", failures.join("\n\n")) }
}

/// The names of all targets. Each has a corpus, which a test of `fuzz/targets` checks.
fn targets(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("fuzz/corpus")).context("fuzz/corpus")? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn chosen(targets: Vec<String>, name: Option<&str>) -> Result<Vec<String>> {
    match name {
        None => Ok(targets),
        Some(wanted) if targets.iter().any(|target| target == wanted) => Ok(vec![wanted.to_owned()]),
        Some(wanted) => bail!("there is no fuzz target {wanted}; known are {}", targets.join(", ")),
    }
}

enum Fuzzer {
    /// The program of `fuzz/`.
    LibFuzzer(PathBuf),
    /// The program of `fuzz/targets/`, and the reason why libFuzzer cannot be used.
    Smoke(PathBuf, &'static str),
}

impl Fuzzer {
    fn build(root: &Path) -> Result<Fuzzer> {
        match obstacle() {
            None => Ok(Fuzzer::LibFuzzer(build_libfuzzer(root)?)),
            Some(why) => Ok(Fuzzer::Smoke(build_smoke(root)?, why)),
        }
    }

    fn run(&self, root: &Path, target: &str, seconds: u64) -> Result<String> {
        let fuzz = root.join("fuzz");
        let (seeds, artifacts) = (fuzz.join("corpus").join(target), fuzz.join("artifacts").join(target));
        let new = fuzz.join("corpus-new").join(target);
        fs::create_dir_all(&artifacts)?;
        fs::create_dir_all(&new)?;
        match self {
            Fuzzer::LibFuzzer(program) => {
                let output = output(
                    Command::new(program)
                        .env("FUZZ_TARGET", target)
                        .arg(format!("-max_total_time={seconds}"))
                        .arg(format!("-artifact_prefix={}/", artifacts.display()))
                        .arg(format!("-rss_limit_mb={}", MAX_MEMORY_MIB + own_peak_mib()))
                        .args(LIMITS)
                        .args([new, seeds]),
                )?;
                if !output.success {
                    bail!("fuzz target {target}:\n{}", output.text.trim_end());
                }
                Ok(format!("fuzz {target}: {} in {seconds} s, libFuzzer", executed(&output.text)))
            }
            Fuzzer::Smoke(program, why) => {
                let mut command = Command::new(program);
                let said = succeed(command.arg(target).arg(seconds.to_string()).arg(seeds).arg(artifacts))?;
                Ok(format!("fuzz {} in {seconds} s, random mutation ({why})", said.trim_end()))
            }
        }
    }
}

/// The reason why libFuzzer cannot be built here, if there is one.
fn obstacle() -> Option<&'static str> {
    let toolchains = succeed(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    if !toolchains.lines().any(|line| line.starts_with("nightly")) {
        Some("no nightly toolchain")
    } else if ["c++", "g++", "clang++"].into_iter().all(|compiler| find(compiler).is_none()) {
        Some("no C++ compiler")
    } else {
        None
    }
}

/// Builds as cargo-fuzz does, so that cargo-fuzz is not needed.
fn build_libfuzzer(root: &Path) -> Result<PathBuf> {
    let host = succeed(Command::new("rustup").args(["run", "nightly", "rustc", "--print", "host-tuple"]))?;
    let host = host.trim();
    let directory = root.join("fuzz");
    succeed(
        Command::new("rustup")
            .args(["run", "nightly", "cargo", "build", "--release", "--bin", "libfuzzer", "--target", host])
            .current_dir(&directory)
            .env("CARGO_TARGET_DIR", directory.join("target"))
            .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f")),
    )
    .context("building fuzz/ with the nightly toolchain")?;
    Ok(directory.join("target").join(host).join("release/libfuzzer"))
}

fn build_smoke(root: &Path) -> Result<PathBuf> {
    succeed(&mut cargo(root, "build --package blockmux-fuzz-targets --bin smoke"))?;
    Ok(target_directory(root).join("debug/smoke"))
}

/// Number of inputs that libFuzzer has run, from its output.
fn executed(text: &str) -> String {
    let runs = text.lines().rev().find_map(|line| line.strip_prefix("Done ")?.split(' ').next());
    format!("{} inputs", runs.unwrap_or("unknown"))
}

/// Compiler flags for libFuzzer's coverage, and for AddressSanitizer, which checks unsafe code.
const FLAGS: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "-Ccodegen-units=1",
    "-Zsanitizer=address",
    "--cfg=fuzzing",
];

/// Limits of time in seconds and of memory in MiB for one input. An input that exceeds them has
/// found a bug, because a peer's bytes must neither hang a session nor make it allocate without
/// bound. The time limit is generous, because the machine may be busy.
const LIMITS: &[&str] = &["-timeout=30", "-malloc_limit_mb=64", "-max_len=4096", "-print_final_stats=0"];
const MAX_MEMORY_MIB: u64 = 1024;

/// Peak memory of this program, in MiB. libFuzzer checks its own peak (`ru_maxrss`), which in Linux
/// begins with that of the parent process, and an earlier step may have used much memory.
fn own_peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib =
        peak.and_then(|peak| peak.trim().strip_suffix(" kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.unwrap_or_default() / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_memory_of_this_program_is_above_zero() {
        assert!((1..1 << 20).contains(&own_peak_mib()), "{}", own_peak_mib());
    }

    #[test]
    fn the_error_about_an_unknown_target_lists_the_known_ones() {
        let targets = || vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(chosen(targets(), None).unwrap(), targets());
        assert_eq!(chosen(targets(), Some("b")).unwrap(), ["b"]);
        let error = chosen(targets(), Some("c")).unwrap_err();
        assert_eq!(error.to_string(), "there is no fuzz target c; known are a, b");
    }

    #[test]
    fn the_count_of_inputs_is_read_from_libfuzzers_last_line() {
        assert_eq!(executed("INFO: x\nDone 4711 runs in 5 second(s)\n"), "4711 inputs");
    }
}
