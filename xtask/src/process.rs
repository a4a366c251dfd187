//! Runs other programs, printing their output only if they fail.

use anyhow::{Context, Result, bail};
use std::io::{PipeReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

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
    let (mut child, mut reader) = start(command)?;
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    let success = child.wait()?.success();
    Ok(Output { text: String::from_utf8_lossy(&bytes).into_owned(), success })
}

/// Starts `command` without input; both output streams go to the pipe.
fn start(command: &mut Command) -> Result<(Child, PipeReader)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let started = command.spawn();
    // `command` holds the pipe's write end, which must be closed for the reader to see the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let child = started.with_context(|| format!("cannot run {}", command.get_program().display()))?;
    Ok((child, reader))
}

/// Runs `command` for at most `limit`, and returns its output when it has ended, although
/// processes that it has left behind may still have its output open.
///
/// Success is that the command succeeded and left no such process. Otherwise the end of the text
/// says what happened.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn output_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let (mut child, reader) = start(command)?;
    let said = Arc::new(Mutex::default());
    let copied = {
        let said = Arc::clone(&said);
        thread::spawn(move || copy(reader, &said))
    };
    let status = wait_until(limit, || child.try_wait().transpose()).transpose()?;
    let left = wait_until(CLOSES, || copied.is_finished().then_some(())).is_none();
    let bytes = said.lock().unwrap_or_else(PoisonError::into_inner);
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    match status {
        None => {
            // It cannot be killed while the kernel waits for something on its behalf.
            child.kill()?;
            text += &format!("\nkilled, because it had not ended after {} s\n", limit.as_secs());
        }
        Some(_) if left => text += "\nprocesses that it has started still have its output open\n",
        Some(_) => {}
    }
    Ok(Output { text, success: status.is_some_and(|status: ExitStatus| status.success()) && !left })
}

/// Copies all that a program prints, so that what it has printed is known before it ends.
fn copy(mut reader: PipeReader, said: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 1 << 16];
    while let Ok(len @ 1..) = reader.read(&mut buffer) {
        said.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&buffer[..len]);
    }
}

/// Asks again and again, for at most `limit`, until there is an answer.
fn wait_until<T>(limit: Duration, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        match answer() {
            Some(answer) => return Some(answer),
            None if Instant::now() >= deadline => return None,
            None => thread::park_timeout(Duration::from_millis(20)),
        }
    }
}

/// The time in which the processes that a program has started end after it.
const CLOSES: Duration = Duration::from_secs(5);

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
    fn a_program_that_does_not_end_is_killed_and_its_output_is_known() {
        let output = output_within(&mut shell("echo one; exec sleep 1000"), Duration::from_secs(1)).unwrap();
        assert_eq!(output.text, "one\n\nkilled, because it had not ended after 1 s\n");
        assert!(!output.success);
    }

    #[test]
    fn a_process_that_a_program_leaves_behind_is_a_failure_that_nobody_waits_for() {
        let long = Duration::from_secs(1000);
        let output = output_within(&mut shell("echo one; exec sleep 30 &"), long).unwrap();
        let expected = "one\n\nprocesses that it has started still have its output open\n";
        assert_eq!((output.text.as_str(), output.success), (expected, false));
        let output = output_within(&mut shell("echo two"), long).unwrap();
        assert_eq!((output.text.as_str(), output.success), ("two\n", true));
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
