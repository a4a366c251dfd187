//! The output of guest and host in one file, with timestamps in seconds.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

pub(crate) struct Log {
    file: Mutex<File>,
    started: Instant,
}

impl Log {
    /// Creates the log at `path`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Log> {
        let file = File::create(path).with_context(|| path.display().to_string())?;
        Ok(Log { file: Mutex::new(file), started: Instant::now() })
    }

    /// Adds output of `who`. A write error does not fail the test.
    pub(crate) fn add(&self, who: &str, text: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        if let Ok(mut file) = self.file.lock() {
            for line in text.lines() {
                let _ = writeln!(file, "{seconds:7.2} {who:<8} {line}");
            }
        }
    }
}

/// The last lines of the log at `path`.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn tail(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(TAIL_LINES);
    Ok(lines.get(first..).unwrap_or_default().join("\n"))
}

const TAIL_LINES: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_has_the_last_lines_with_their_sources() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let log = Log::create(&path).unwrap();
        log.add("guest", "first");
        log.add("daemon", &"line\n".repeat(TAIL_LINES - 1));
        log.add("guest", "last");
        let tail = tail(&path).unwrap();
        assert_eq!(tail.lines().count(), TAIL_LINES);
        assert!(!tail.contains("first") && tail.ends_with("guest    last"), "{tail}");
    }
}
