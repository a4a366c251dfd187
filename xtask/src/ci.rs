//! Continuous integration: runs a list of steps, prints one line for each, and ends with the
//! summaries of the tests.
//!
//! ```text
//!   format ─▶ clippy ─▶ tidy ─▶ advisories ─▶ build ─┬▶ programs ───────────────┬▶ kernel
//!                                                    └▶ tests ─▶ docs ─▶ fuzz ──┘
//! ```
//! The tests in `programs` run `blockmux` with other programs and mostly wait for them, so steps
//! that use much CPU time run in parallel with them.

use crate::process::{Output, cargo, output, succeed};
use crate::programs::{self, TestProgram};
use crate::{fuzz, tidy, vm};
use anyhow::{Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs every step, also after a failure, so that one run shows all failures.
///
/// # Errors
/// If a step failed.
pub(crate) fn run(root: &Path) -> Result<()> {
    let report = Report::new();
    report.step("format", "make fmt", || format(root));
    report.step("clippy", "cargo clippy --workspace --all-targets -- -D warnings", || clippy(root));
    report.step("tidy", "cargo xtask tidy", || tidy(root));
    report.step("advisories", "cargo deny check advisories", || advisories(root));
    let mut built = Vec::new();
    report.step("build", "cargo test --workspace --no-run", || {
        built = programs::build(root)?;
        Ok(Vec::new())
    });
    let (waiting, working): (Vec<TestProgram>, Vec<TestProgram>) =
        built.into_iter().partition(|p| p.name == WAITING);
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

/// Results of the steps so far; steps may run in parallel.
struct Report {
    started: Instant,
    /// A line for each running step, if standard error is a terminal.
    under_way: MultiProgress,
    found: Mutex<CiReport>,
}

#[derive(Default)]
struct CiReport {
    steps: usize,
    /// Name and error of each failed step.
    failed: Vec<(&'static str, String)>,
    /// Lines for the end of the report.
    remarks: Vec<String>,
}

impl Report {
    fn new() -> Report {
        Report { started: Instant::now(), under_way: MultiProgress::new(), found: Mutex::default() }
    }

    /// Runs a step and prints its result. `again` is the command that runs only this step.
    fn step(&self, name: &'static str, again: &str, run: impl FnOnce() -> Result<Vec<String>>) {
        let line = self.under_way.add(ProgressBar::new_spinner().with_prefix(name));
        if let Ok(style) = ProgressStyle::with_template("{prefix:<11}{spinner} {elapsed}") {
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
                println!("{name:<11}ok      {seconds:6.1} s");
                found.remarks.extend(lines);
            }
            Err(error) => {
                let error = format!("{error:#}");
                println!("{name:<11}FAILED  {seconds:6.1} s   run again: {again}\n{error}\n");
                found.failed.push((name, error));
            }
        });
    }

    /// Prints the remarks, the ends of errors, and the overall result: whoever keeps only the last
    /// lines of a log sees why it failed.
    fn end(self) -> Result<()> {
        let CiReport { steps, failed, mut remarks } =
            self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The summaries of tests come last.
        remarks.sort_by_key(|line: &String| line.starts_with(RESULT));
        println!();
        remarks.iter().for_each(|line| println!("{line}"));
        let seconds = self.started.elapsed().as_secs_f64();
        if !failed.is_empty() {
            for (name, error) in &failed {
                println!("\n{name} FAILED; its last lines:\n{}", last_lines(error, LINES_OF_ERROR));
            }
            let names: Vec<&str> = failed.iter().map(|(name, _)| *name).collect();
            bail!("{} of {steps} steps failed: {} ({seconds:.0} s)", names.len(), names.join(", "));
        }
        println!("\nall {steps} steps ok ({seconds:.0} s)");
        Ok(())
    }
}

/// The last lines of a text, at most `most` of them.
fn last_lines(text: &str, most: usize) -> &str {
    let text = text.trim_end();
    text.rmatch_indices('\n').nth(most - 1).map_or(text, |(at, _)| &text[at + 1..])
}

/// Number of lines of a failed step that are repeated at the end.
const LINES_OF_ERROR: usize = 16;

/// The test program that tests whole programs.
const WAITING: &str = "cli";

/// Runs the tests with the Linux kernel that are part of every run: see
/// `docs/decisions/0023-ci-runs-one-linux-kernel-test.md`.
fn kernel(root: &Path) -> Result<Vec<String>> {
    vm::run(root, vm::Profile::Debug, &["iscsi".to_owned()], &mut |_| {})
}

/// Fuzzing time of all targets together, in seconds.
const FUZZ_SECONDS: u64 = 30;

fn format(root: &Path) -> Result<Vec<String>> {
    if let Some(skipped) = missing(root, "fmt", "rustfmt") {
        return Ok(vec![skipped]);
    }
    succeed(&mut cargo(root, "fmt --all --check"))?;
    succeed(&mut cargo(root, "fmt --manifest-path fuzz/Cargo.toml --check"))?;
    Ok(Vec::new())
}

/// A line if the toolchain lacks a component: Debian has no clippy for its current Rust.
fn missing(root: &Path, command: &str, component: &str) -> Option<String> {
    let found = succeed(&mut cargo(root, &format!("{command} --version")));
    found.is_err().then(|| {
        format!("{SKIPPED}cargo {command}, which this toolchain lacks; with rustup: rustup component add {component}")
    })
}

fn clippy(root: &Path) -> Result<Vec<String>> {
    if let Some(skipped) = missing(root, "clippy", "clippy") {
        return Ok(vec![skipped]);
    }
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

/// Looks the dependencies up in the database of security advisories, if `cargo deny` is installed
/// and the database can be reached.
fn advisories(root: &Path) -> Result<Vec<String>> {
    let Output { text, success } = output(&mut cargo(root, "deny check advisories"))?;
    match (success, why_unchecked(&text)) {
        (true, _) => Ok(Vec::new()),
        (false, Some(why)) => Ok(vec![format!("{SKIPPED}the check of security advisories: {why}")]),
        (false, None) => bail!("{}", text.trim_end()),
    }
}

/// Why `cargo deny` has not checked the dependencies; `None` if it has, and found something.
fn why_unchecked(text: &str) -> Option<&'static str> {
    [
        (
            "no such command: `deny`",
            "cargo-deny is not installed; 'cargo install --locked cargo-deny' does it",
        ),
        ("failed to fetch advisory database", "their database cannot be reached"),
    ]
    .into_iter()
    .find_map(|(part, why)| text.contains(part).then_some(why))
}

fn tests(root: &Path, programs: &[TestProgram]) -> Result<Vec<String>> {
    // Examples in the documentation run even after a failed program.
    let said = programs::run(programs);
    let examples = succeed(&mut cargo(root, "test --workspace --no-fail-fast --doc"));
    Ok(summary(&(said? + &examples?)))
}

fn docs(root: &Path) -> Result<Vec<String>> {
    succeed(cargo(root, "doc --quiet --no-deps --workspace").env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Vec::new())
}

/// Cargo's summary line of every test program that has tests, and the reasons of skipped tests: a
/// test that cannot run prints one line, which begins with [`SKIPPED`].
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
    fn advisories_are_skipped_only_if_they_cannot_be_looked_up() {
        assert!(
            why_unchecked("error: no such command: `deny`\n\nhelp: view all").unwrap().contains("install")
        );
        let unreachable = "[ERROR] failed to fetch advisory database https://github.com/rustsec/advisory-db";
        assert!(why_unchecked(unreachable).unwrap().contains("cannot be reached"));
        assert_eq!(why_unchecked("error[vulnerability]: Use after free\nadvisories FAILED"), None);
    }

    #[test]
    fn an_error_is_repeated_by_its_last_lines() {
        assert_eq!(last_lines("one", 2), "one");
        assert_eq!(last_lines("one\ntwo\n", 2), "one\ntwo");
        assert_eq!(last_lines("one\ntwo\nthree\n\n", 2), "two\nthree");
    }

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
