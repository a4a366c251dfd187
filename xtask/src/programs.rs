//! The workspace's test programs: built by cargo, then run one after the other, as `cargo test`
//! does.

use crate::process::{cargo, output_within};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A test program of one cargo target.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestProgram {
    /// The target's name: that of the library or binary, or of the file in `tests/`.
    pub(crate) name: String,
    path: PathBuf,
    /// The package's directory, in which tests expect to run.
    directory: PathBuf,
}

/// Builds all test programs.
///
/// # Errors
/// If one does not compile; the error contains the compiler's output.
pub(crate) fn build(root: &Path) -> Result<Vec<TestProgram>> {
    // Human-readable messages go to standard error, JSON to standard output.
    let mut command =
        cargo(root, "test --quiet --workspace --no-run --message-format json-render-diagnostics");
    let output = command.output().context("cargo")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect())
}

/// The program in a line of cargo's JSON, if it is about one.
fn program(line: &str) -> Option<TestProgram> {
    let artifact: Value = serde_json::from_str(line).ok()?;
    if artifact["profile"]["test"] != true {
        return None;
    }
    Some(TestProgram {
        name: artifact["target"]["name"].as_str()?.to_owned(),
        path: artifact["executable"].as_str()?.into(),
        directory: Path::new(artifact["manifest_path"].as_str()?).parent()?.to_owned(),
    })
}

/// Runs all programs, even after a failure, and returns their output.
///
/// # Errors
/// If a test failed, with the output of the failed programs, or if there is no program.
pub(crate) fn run(programs: &[TestProgram]) -> Result<String> {
    if programs.is_empty() {
        bail!("cargo built no test program");
    }
    let (mut said, mut complaints) = (String::new(), String::new());
    for program in programs {
        // Prints the output of passing tests as well, because it has the reasons of skipped tests.
        let mut command = Command::new(&program.path);
        command.arg("--show-output").current_dir(&program.directory);
        let output = output_within(&mut command, LIMIT).with_context(|| program.name.clone())?;
        let text = format!("{}: {}", program.name, output.text);
        if output.success {
            said += &text;
        } else {
            complaints += &text;
            complaints.extend(without_end(&text).map(|test| format!("{test} has not ended\n")));
        }
    }
    if complaints.is_empty() { Ok(said) } else { bail!("{complaints}") }
}

/// The tests that the output of a test program names as running for long, but has no result of.
fn without_end(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("test ")?.split_once(" has been running"))
        .map(|(test, _)| test)
        .filter(|test| !text.contains(&format!("\ntest {test} ... ")))
}

/// The time in which a test program ends. One that hangs has to leave time to say which of its
/// tests has not ended, before somebody ends the whole run.
const LIMIT: Duration = Duration::from_secs(45 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_hang_are_named() {
        let said = "running 3 tests\ntest a ... ok\ntest b has been running for over 60 seconds\n\
                    test c has been running for over 60 seconds\ntest b ... ok\n";
        assert_eq!(without_end(said).collect::<Vec<_>>(), ["c"]);
    }

    #[test]
    fn only_test_programs_of_the_build_are_run() {
        let line = |is_test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/of/crates/a/Cargo.toml","target":{{"name":"b"}},
                "profile":{{"test":{is_test}}},"executable":{executable}}}"#
            )
        };
        let expected = TestProgram {
            name: "b".to_owned(),
            path: "/target/b-1".into(),
            directory: "/of/crates/a".into(),
        };
        assert_eq!(program(&line(true, r#""/target/b-1""#)), Some(expected));
        assert_eq!(program(&line(false, r#""/target/b-1""#)), None);
        assert_eq!(program(&line(true, "null")), None);
        assert_eq!(program("   Compiling b"), None);
    }
}
