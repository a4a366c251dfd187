//! Runs other programs, printing their output only if they fail.

use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program's output, both streams in order, and whether it succeeded.
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) success: bool,
}

/// Runs `command` to completion.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let (mut reader, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let started = command.spawn();
    // `command` holds the pipe's write end, which must be closed for the reader to see the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = started.with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    let success = child.wait()?.success();
    Ok(Output { text: String::from_utf8_lossy(&bytes).into_owned(), success })
}

/// Runs `command` to completion and returns its output.
///
/// # Errors
/// If it cannot be started or fails; the error contains its output.
pub(crate) fn succeed(command: &mut Command) -> Result<String> {
    let output = output(command)?;
    if !output.success {
        bail!("{}", output.text.trim_end());
    }
    Ok(output.text)
}

/// A cargo command in the repository, with its arguments in one string.
pub(crate) fn cargo(root: &Path, arguments: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(arguments.split_whitespace());
    command
}

/// Cargo's target directory.
pub(crate) fn target_directory(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The path of a program, including administrators' directories, if it is installed.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(administrators)
        .map(|directory| directory.join(program))
        .find(|p| p.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_arrive_in_order() {
        let output = output(&mut shell("echo one; echo two >&2; echo three")).unwrap();
        assert_eq!((output.text.as_str(), output.success), ("one\ntwo\nthree\n", true));
    }

    #[test]
    fn the_error_of_a_failed_program_has_its_output() {
        let error = succeed(&mut shell("echo because; exit 3")).unwrap_err();
        assert_eq!(error.to_string(), "because");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error = succeed(&mut Command::new("no-such-program")).unwrap_err();
        assert_eq!(error.to_string(), "cannot run no-such-program");
        assert_eq!(find("no-such-program"), None);
        assert!(find("sh").is_some());
    }
}
