//! The sink of `log:` volumes.
//!
//! A separate thread writes, because a busy disk or a slow reader must not block a core. Records
//! that do not fit the queue are counted, and the count is written in their place.

use crate::failure::Failure;
use crate::process::privileges;
use blockmux_volume::{LogRecord, LogSink};
use std::io::{BufWriter, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use tracing::warn;

/// A sink that writes a line for each record to `target`. Dropping it waits until all are written,
/// at most for [`LAST_RECORDS_TIMEOUT`].
pub(crate) fn to(target: impl Write + Send + 'static) -> Result<Arc<dyn LogSink>, Failure> {
    let (queue, records) = mpsc::sync_channel(QUEUE_RECORDS);
    let left_out = Arc::new(AtomicU64::new(0));
    let counted = left_out.clone();
    let (ending, ended) = mpsc::channel();
    let write = move || {
        privileges::drop_all_capabilities();
        write_out(&records, &counted, BufWriter::new(target));
        drop(ending);
    };
    let thread = thread::Builder::new().name("records".to_owned()).spawn(write);
    thread.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(Arc::new(Records { queue: Some(queue), left_out, ended: Mutex::new(ended) }))
}

struct Records {
    queue: Option<SyncSender<LogRecord>>,
    left_out: Arc<AtomicU64>,
    /// Disconnected when all records have been written.
    ended: Mutex<Receiver<()>>,
}

impl LogSink for Records {
    fn record(&self, record: &LogRecord) {
        if self.queue.as_ref().is_none_or(|queue| queue.try_send(*record).is_err()) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.queue.take();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(LAST_RECORDS_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            // For example a pipe that nobody reads, or a network file system without its server.
            let seconds = LAST_RECORDS_TIMEOUT.as_secs();
            warn!("the last records of a `log:` volume could not be written within {seconds} s");
        }
    }
}

/// Writes records until the sink is dropped. An error is reported once and does not fail the I/O.
fn write_out(records: &Receiver<LogRecord>, left_out: &AtomicU64, mut target: impl Write) {
    let mut is_reported = false;
    let mut tell = |written: std::io::Result<()>| {
        if let Err(error) = written
            && !std::mem::replace(&mut is_reported, true)
        {
            warn!("the log of a volume cannot be written, and lacks lines from here on: {error}");
        }
    };
    loop {
        let next = match records.try_recv() {
            Err(TryRecvError::Empty) => {
                // Flush when the queue is empty.
                tell(target.flush());
                records.recv().map_err(|_| TryRecvError::Disconnected)
            }
            next => next,
        };
        let missing = left_out.swap(0, Ordering::Relaxed);
        if missing > 0 {
            tell(writeln!(
                target,
                "{missing} records were dropped: they came faster than they could be written"
            ));
        }
        let Ok(record) = next else { break };
        tell(writeln!(target, "{record}"));
    }
    tell(target.flush());
}

/// The maximum number of queued records, some MiB: two for each request of many clients.
const QUEUE_RECORDS: usize = 1 << 16;
/// Time for the last records when the volume is closed.
const LAST_RECORDS_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{LogEvent, Op, Tag};
    use std::time::Instant;

    /// A writer that blocks until it is released.
    #[derive(Clone)]
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            drop(self.0.lock().unwrap());
            Ok(())
        }
    }

    #[test]
    fn records_beyond_the_queue_are_counted_without_waiting() {
        let written = Slow(Arc::default());
        let sink = to(written.clone()).unwrap();
        let record = |nth| LogRecord {
            channel: 0,
            tag: Tag(nth),
            op: Op::Flush,
            offset: 0,
            len: 0,
            at: Instant::now(),
            event: LogEvent::Submitted,
        };
        let held = written.0.lock().unwrap();
        let all = 2 * QUEUE_RECORDS as u64;
        (0..all).for_each(|nth| sink.record(&record(nth)));
        drop(held);
        drop(sink);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let missing = text.lines().filter_map(|line| line.split_once(" records were dropped"));
        let missing: u64 = missing.map(|(count, _)| count.parse::<u64>().unwrap()).sum();
        let lines = text.lines().filter(|line| line.ends_with(" submitted")).count() as u64;
        assert_eq!(missing + lines, all);
        assert!(missing > 0 && text.starts_with("0 flush tag 0 submitted\n"), "{missing} are missing");
    }

    #[test]
    fn a_log_that_cannot_be_written_does_not_keep_its_volume_open() {
        let written = Slow(Arc::default());
        let held = written.0.lock().unwrap();
        drop(to(written.clone()).unwrap());
        // Only now can the log be written.
        drop(held);
    }
}
