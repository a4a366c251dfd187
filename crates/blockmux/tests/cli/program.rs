//! Runs blockmux and other programs.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const BLOCKMUX: &str = env!("CARGO_BIN_EXE_blockmux");

/// Runs `blockmux` to its end.
pub(crate) fn blockmux<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(BLOCKMUX);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    kill_if_it_hangs(&child);
    child.wait_with_output().unwrap()
}

/// Standard output of a run of `blockmux`, which must succeed.
pub(crate) fn succeeds(words: &[&str]) -> String {
    let output = blockmux(words);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Kills a program that runs for longer than any test, so that a test that reads from it or waits
/// for it sees its end: that test fails and says where, and the others go on.
pub(crate) fn kill_if_it_hangs(child: &Child) {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    thread::spawn(move || {
        let mut fds = [PollFd::new(&process, PollFlags::IN)];
        let limit = Timespec { tv_sec: 600, tv_nsec: 0 };
        if poll(&mut fds, Some(&limit)).unwrap() == 0 {
            // It may have ended.
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    });
}

/// Stops a program, and waits until all of its threads have stopped: until then they may answer.
pub(crate) fn stop(child: &Child) {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped(), "it has ended: {status:?}");
}

/// Programs that are started from now on begin with default signal dispositions. `nohup`, and
/// shells for background jobs, start the tests with ignored signals. An ignored signal is
/// inherited, a signal with a handler is not.
pub(crate) fn unignore_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM] {
            let always = Arc::new(AtomicBool::new(true));
            signal_hook::flag::register_conditional_default(signal.as_raw(), always).unwrap();
        }
    });
}

/// Sends a signal to a program, and waits for its end.
pub(crate) fn end_by(child: &mut Child, signal: Signal) -> ExitStatus {
    kill_process(Pid::from_child(child), signal).unwrap();
    ended(child)
}

/// Waits for the end of a program that was asked to end.
pub(crate) fn ended(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("process {} was asked to end, and is still there a minute later", child.id());
        }
        std::thread::yield_now();
    }
}

/// Standard output of a program, which must succeed.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The output of a `ctl` command without the note that a change is not in the config file.
pub(crate) fn without_notes(bytes: &[u8]) -> String {
    let text = text(bytes);
    let lines = text.lines().filter(|line| !line.contains("this change is not in the config file"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Whether a program is installed; if not, prints that the test is skipped.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn has(program: &str) -> bool {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&places).any(|place| place.join(program).is_file());
    if !found {
        println!("skipped: no {program}");
    }
    found
}

/// A qemu-io command without QEMU's cache.
pub(crate) fn qemu_io(url: &str, commands: &[&str]) -> Command {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw", "-t", "none"]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    qemu_io.arg(url);
    qemu_io
}

/// Commands of qemu-io that write to a volume of 16 MiB in every form and verify the data.
pub(crate) const PATTERNS: [&str; 15] = [
    "write -P 0xab 64k 1m",
    "write -f -P 0xcd 1088k 4k",
    "write -z -u 128k 64k",
    "discard 256k 64k",
    "flush",
    "read -P 0xab 64k 64k",
    "read -P 0 128k 64k",
    "read -P 0xcd 1088k 4k",
    "aio_write -P 1 2m 1m",
    "aio_write -P 2 3m 1m",
    "aio_flush",
    "read -P 1 2m 1m",
    "read -P 2 3m 1m",
    "write -P 3 4m 8m",
    "read -P 3 4m 8m",
];

/// A file of `len` bytes with data in its first and third quarter, different in each block, and
/// holes elsewhere.
pub(crate) fn half_empty_file(directory: &Path, len: usize) -> PathBuf {
    let mut bytes = vec![0; len];
    for (nth, block) in bytes.chunks_mut(512).enumerate() {
        let quarter = nth * 512 * 4 / len;
        if quarter.is_multiple_of(2) {
            block
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = (nth * 7 + at * 3 + nth / 256 + 1) as u8);
        }
    }
    let path = directory.join("source.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(len as u64).unwrap();
    for nth in [0, 2] {
        let at = nth * len / 4;
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes[at..at + len / 4], at as u64).unwrap();
    }
    path
}
