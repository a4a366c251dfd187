//! Continuous integration: a list of steps, one line for each, and what the tests said at the end.
//!
//! ```text
//!   format ─▶ clippy ─▶ tidy ─▶ build ─┬▶ programs ───────────────┬▶ kernel
//!                                      └▶ tests ─▶ docs ─▶ fuzz ──┘
//! ```
//! The tests in `programs` are of `blockmux` among other programs, and mostly wait for those: what
//! takes processors goes beside them.

use crate::process::{cargo, succeed};
use crate::programs::{self, Program};
use crate::{fuzz, tidy, vm};
use anyhow::{Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs every step, the ones after a failure too: one run shows all there is to mend.
///
/// # Errors
/// If a step failed.
pub(crate) fn run(root: &Path) -> Result<()> {
    let report = Report::new();
    report.step("format", "make fmt", || format(root));
    report.step("clippy", "cargo clippy --workspace --all-targets -- -D warnings", || clippy(root));
    report.step("tidy", "cargo xtask tidy", || tidy(root));
    let mut built = Vec::new();
    report.step("build", "cargo test --workspace --no-run", || {
        built = programs::build(root)?;
        Ok(Vec::new())
    });
    let (waiting, working): (Vec<Program>, Vec<Program>) = built.into_iter().partition(|p| p.name == WAITING);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            report.step("programs", "cargo test --test cli", || Ok(summary(&programs::run(&waiting)?)))
        });
        report.step("tests", "cargo test --workspace", || tests(root, &working));
        report.step("docs", "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --workspace", || docs(root));
        report.step("fuzz", "cargo xtask fuzz --seconds 30", || fuzz::run(root, FUZZ_SECONDS, None));
    });
    report.step("kernel", "cargo xtask vm iscsi", || kernel(root));
    report.end()
}

/// What has been found so far, of steps that may go beside each other.
struct Report {
    started: Instant,
    /// A line for each step under way, where standard error is a terminal.
    under_way: MultiProgress,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    steps: usize,
    failed: Vec<&'static str>,
    /// Lines for the end of the report.
    remarks: Vec<String>,
}

impl Report {
    fn new() -> Report {
        Report { started: Instant::now(), under_way: MultiProgress::new(), found: Mutex::default() }
    }

    /// Does a step and says how it went; `again` is what a developer types to do that step alone.
    fn step(&self, name: &'static str, again: &str, run: impl FnOnce() -> Result<Vec<String>>) {
        let line = self.under_way.add(ProgressBar::new_spinner().with_prefix(name));
        if let Ok(style) = ProgressStyle::with_template("{prefix:<10}{spinner} {elapsed}") {
            line.set_style(style);
        }
        line.enable_steady_tick(Duration::from_millis(200));
        let began = Instant::now();
        let outcome = run();
        let seconds = began.elapsed().as_secs_f64();
        line.finish_and_clear();
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.steps += 1;
        self.under_way.suspend(|| match outcome {
            Ok(lines) => {
                println!("{name:<10}ok      {seconds:6.1} s");
                found.remarks.extend(lines);
            }
            Err(error) => {
                println!("{name:<10}FAILED  {seconds:6.1} s   run again: {again}\n{error:#}\n");
                found.failed.push(name);
            }
        });
    }

    /// Prints what the steps left to be said.
    fn end(self) -> Result<()> {
        let Found { steps, failed, mut remarks } =
            self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        // What the tests said comes last.
        remarks.sort_by_key(|line: &String| line.starts_with(RESULT));
        println!();
        remarks.iter().for_each(|line| println!("{line}"));
        let seconds = self.started.elapsed().as_secs_f64();
        if !failed.is_empty() {
            bail!("{} of {steps} steps failed: {} ({seconds:.0} s)", failed.len(), failed.join(", "));
        }
        println!("\nall {steps} steps ok ({seconds:.0} s)");
        Ok(())
    }
}

/// The test program whose tests are of whole programs.
const WAITING: &str = "cli";

/// Of the tests with the Linux kernel the ones that have to hold each time: see
/// `docs/decisions/0023-one-script-of-the-kernels-in-ci.md`.
fn kernel(root: &Path) -> Result<Vec<String>> {
    vm::run(root, &["iscsi".to_owned()], &mut |_| {})
}

/// For all targets together.
const FUZZ_SECONDS: u64 = 30;

fn format(root: &Path) -> Result<Vec<String>> {
    succeed(&mut cargo(root, "fmt --all --check"))?;
    succeed(&mut cargo(root, "fmt --manifest-path fuzz/Cargo.toml --check"))?;
    Ok(Vec::new())
}

fn clippy(root: &Path) -> Result<Vec<String>> {
    succeed(&mut cargo(root, "clippy --quiet --workspace --all-targets -- -D warnings"))?;
    Ok(Vec::new())
}

fn tidy(root: &Path) -> Result<Vec<String>> {
    let findings = tidy::findings(root)?;
    if !findings.is_empty() {
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        bail!("{}", lines.join("\n"));
    }
    Ok(Vec::new())
}

fn tests(root: &Path, programs: &[Program]) -> Result<Vec<String>> {
    // Examples in the documentation are run though a program has failed.
    let said = programs::run(programs);
    let examples = succeed(&mut cargo(root, "test --workspace --no-fail-fast --doc"));
    Ok(summary(&(said? + &examples?)))
}

fn docs(root: &Path) -> Result<Vec<String>> {
    succeed(cargo(root, "doc --quiet --no-deps --workspace").env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Vec::new())
}

/// The summary line of every test program that had tests, in cargo's own words, and why tests were
/// skipped: a test that cannot run prints one line, which begins with [`SKIPPED`].
fn summary(text: &str) -> Vec<String> {
    let mut skipped: Vec<&str> = text.lines().filter(|line| line.starts_with(SKIPPED)).collect();
    skipped.sort_unstable();
    skipped.dedup();
    let results = text
        .lines()
        .filter(|line| line.starts_with(RESULT))
        .filter(|line| !line.contains(" 0 passed; 0 failed; 0 ignored;"));
    skipped.into_iter().chain(results).map(str::to_owned).collect()
}

const SKIPPED: &str = "skipped: ";
const RESULT: &str = "test result: ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_has_the_results_of_programs_with_tests_and_the_reasons_of_skipped_ones() {
        let text = "\
running 1 test
---- interop stdout ----
skipped: no nbdinfo
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
running 0 tests
test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let lines = summary(text);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0], "skipped: no nbdinfo");
        assert!(lines[1].starts_with("test result: ok. 1 passed; "));
    }
}
