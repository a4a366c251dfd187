//! The sink of `log:` volumes.
//!
//! A separate thread writes, because a busy disk or a slow reader must not block a core. Records
//! that do not fit the queue are counted, and the count is written in their place.

use crate::failure::Failure;
use crate::privileges;
use blockmux_volume::{LogRecord, LogSink};
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TryRecvError};
use std::thread::{self, JoinHandle};
use tracing::warn;

/// A sink that writes a line for each record to `target`. Dropping it waits until all are written.
pub(crate) fn to(target: impl Write + Send + 'static) -> Result<Arc<dyn LogSink>, Failure> {
    let (queue, records) = mpsc::sync_channel(QUEUE_RECORDS);
    let left_out = Arc::new(AtomicU64::new(0));
    let counted = left_out.clone();
    let write = move || {
        privileges::drop_all_capabilities();
        write_out(&records, &counted, BufWriter::new(target));
    };
    let thread = thread::Builder::new().name("records".to_owned()).spawn(write);
    let thread = thread.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(Arc::new(Records { queue: Some(queue), left_out, thread: Some(thread) }))
}

struct Records {
    queue: Option<SyncSender<LogRecord>>,
    left_out: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
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
        // The thread returns nothing.
        let _ = self.thread.take().map(JoinHandle::join);
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

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{LogEvent, Op, Tag};
    use std::sync::Mutex;
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
        let missing = text.lines().filter_map(|line| line.split_once(" records are left out"));
        let missing: u64 = missing.map(|(count, _)| count.parse::<u64>().unwrap()).sum();
        let lines = text.lines().filter(|line| line.ends_with(" submitted")).count() as u64;
        assert_eq!(missing + lines, all);
        assert!(missing > 0 && text.starts_with("0 flush tag 0 submitted\n"), "{missing} are missing");
    }
}
