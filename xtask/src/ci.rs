//! Continuous integration: a list of steps, one line for each, and what the tests said at the end.

use crate::process::{cargo, output, succeed};
use crate::{fuzz, tidy, vm};
use anyhow::{Result, bail};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Runs every step, the ones after a failure too: one run shows all there is to mend.
///
/// # Errors
/// If a step failed.
pub(crate) fn run(root: &Path) -> Result<()> {
    let (started, mut failed, mut remarks) = (Instant::now(), Vec::new(), Vec::new());
    for step in STEPS {
        print!("{:<10}", step.name);
        std::io::stdout().flush()?;
        let began = Instant::now();
        let outcome = (step.run)(root);
        let seconds = began.elapsed().as_secs_f64();
        match outcome {
            Ok(lines) => {
                println!("ok      {seconds:6.1} s");
                remarks.extend(lines);
            }
            Err(error) => {
                println!("FAILED  {seconds:6.1} s   run again: {}\n{error:#}\n", step.again);
                failed.push(step.name);
            }
        }
    }
    // What the tests said comes last.
    remarks.sort_by_key(|line: &String| line.starts_with(RESULT));
    println!();
    remarks.iter().for_each(|line| println!("{line}"));
    let seconds = started.elapsed().as_secs_f64();
    if !failed.is_empty() {
        bail!("{} of {} steps failed: {} ({seconds:.0} s)", failed.len(), STEPS.len(), failed.join(", "));
    }
    println!("\nall {} steps ok ({seconds:.0} s)", STEPS.len());
    Ok(())
}

struct Step {
    name: &'static str,
    /// What a developer types to run this step alone.
    again: &'static str,
    /// Does it, and returns lines for the end of the report.
    run: fn(&Path) -> Result<Vec<String>>,
}

const STEPS: &[Step] = &[
    Step { name: "format", again: "make fmt", run: format },
    Step { name: "clippy", again: "cargo clippy --workspace --all-targets -- -D warnings", run: clippy },
    Step { name: "tidy", again: "cargo xtask tidy", run: tidy },
    Step { name: "tests", again: "cargo test --workspace", run: tests },
    Step { name: "docs", again: "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --workspace", run: docs },
    Step {
        name: "fuzz",
        again: "cargo xtask fuzz --seconds 30",
        run: |root| fuzz::run(root, FUZZ_SECONDS, None),
    },
    Step { name: "kernel", again: "cargo xtask vm iscsi", run: kernel },
];

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
    let findings = tidy::check(&tidy::Tree::read(root)?);
    if !findings.is_empty() {
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        bail!("{}", lines.join("\n"));
    }
    Ok(Vec::new())
}

fn tests(root: &Path) -> Result<Vec<String>> {
    // Shows what passing tests print, too: that is where a skipped one says why.
    let output = output(&mut cargo(root, "test --workspace --no-fail-fast -- --show-output"))?;
    if !output.success {
        bail!("{}", output.text);
    }
    Ok(summary(&output.text))
}

fn docs(root: &Path) -> Result<Vec<String>> {
    succeed(cargo(root, "doc --quiet --no-deps --workspace").env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Vec::new())
}

/// The summary line of every test program that had tests, in cargo's own words, and why tests were skipped: a test
/// that cannot run prints one line, which begins with [`SKIPPED`].
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
