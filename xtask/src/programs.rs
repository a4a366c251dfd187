//! The workspace's test programs: built by cargo, then run one after the other, as `cargo test`
//! does.

use crate::process::{cargo, output};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        let output = output(&mut command).with_context(|| program.name.clone())?;
        let text = format!("{}: {}", program.name, output.text);
        if output.success { &mut said } else { &mut complaints }.push_str(&text);
    }
    if complaints.is_empty() { Ok(said) } else { bail!("{complaints}") }
}

#[cfg(test)]
mod tests {
    use super::*;

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
