//! The log on standard error.
//!
//! A separate thread writes it, because a slow reader must not block a core, and peers can cause
//! many lines. Lines that do not fit the queue are counted instead.

use crate::privileges;
use crate::repeats::{Repeats, WINDOW};
use jiff::Timestamp;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError};
use std::time::{Duration, Instant};
use std::{io, thread};

/// Queues complete lines without blocking; clones share the queue.
#[derive(Clone)]
pub(crate) struct Log {
    queue: SyncSender<Message>,
    left_out: Arc<AtomicU64>,
    has_time: bool,
}

enum Message {
    /// A line with its time.
    Line(Vec<u8>, Option<Timestamp>),
    /// A request to confirm that all lines before it are written.
    End(Sender<()>),
}

impl Log {
    /// Starts the thread. With `has_time`, each line begins with its time in UTC (RFC 3339).
    pub(crate) fn start(has_time: bool) -> io::Result<Log> {
        let (queue, messages) = mpsc::sync_channel(QUEUE_LINES);
        let left_out = Arc::new(AtomicU64::new(0));
        let counted = left_out.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            privileges::give_up_all();
            write_out(&messages, &counted, has_time);
        })?;
        Ok(Log { queue, left_out, has_time })
    }

    /// Waits until all lines are written, at most [`TIMEOUT`].
    pub(crate) fn finish(&self) {
        let (sender, receiver) = mpsc::channel();
        let end = Instant::now() + TIMEOUT;
        let mut message = Message::End(sender);
        while let Err(TrySendError::Full(back)) = self.queue.try_send(message) {
            if Instant::now() >= end {
                return;
            }
            message = back;
            thread::park_timeout(PAUSE);
        }
        let _ = receiver.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let time = self.has_time.then(Timestamp::now);
        if self.queue.try_send(Message::Line(line.to_vec(), time)).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_out(messages: &Receiver<Message>, left_out: &AtomicU64, has_time: bool) {
    let is_terminal = io::stderr().is_terminal();
    let mut repeats = Repeats::default();
    loop {
        let message = match repeats.is_empty() {
            true => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => messages.recv_timeout(WINDOW),
        };
        let (is_end, now) = (matches!(message, Ok(Message::End(_))), Instant::now());
        for line in repeats.left_out(if is_end { now + WINDOW } else { now }) {
            let _ = write_line(is_terminal, line.as_bytes(), has_time.then(Timestamp::now));
        }
        let message = match message {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let missing = left_out.swap(0, Ordering::Relaxed);
        if missing > 0 {
            let text = format!(" WARN {missing} lines are left out: they came faster than they were read\n");
            let _ = write_line(is_terminal, text.as_bytes(), has_time.then(Timestamp::now));
        }
        // A failure to write the log cannot be reported.
        let _ = match message {
            Message::Line(line, _) if !repeats.admits(&line, now) => Ok(()),
            Message::Line(line, time) => write_line(is_terminal, &line, time),
            Message::End(done) => done.send(()).map_err(io::Error::other),
        };
    }
}

/// Writes a line. On a terminal it replaces a progress bar, which is then drawn again below it. It
/// uses one system call, because standard output may be the same file.
fn write_line(is_terminal: bool, line: &[u8], time: Option<Timestamp>) -> io::Result<()> {
    let clear = if is_terminal { "\r\x1b[K" } else { "" };
    // A short level is preceded by a space.
    let time = time.map_or_else(String::new, |time| format!("{time:.3} "));
    io::stderr().write_all(&[clear.as_bytes(), time.as_bytes(), line].concat())
}

/// The maximum number of queued lines.
const QUEUE_LINES: usize = 1024;
/// Timeout for the last lines.
const TIMEOUT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);
