//! What `log:` writes down.
//!
//! A thread of its own writes: a disk that is busy, or a reader who takes a breath, must not hold
//! up a core. Records that find no room are counted, and the count stands where they would have.

use crate::failure::Failure;
use crate::privileges;
use blockmux_volume::{LogRecord, LogSink};
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TryRecvError};
use std::thread::{self, JoinHandle};
use tracing::warn;

/// Writes a line for each record to `target`. When the sink is dropped, all have been written.
pub(crate) fn to(target: impl Write + Send + 'static) -> Result<Arc<dyn LogSink>, Failure> {
    let (queue, records) = mpsc::sync_channel(QUEUE_RECORDS);
    let left_out = Arc::new(AtomicU64::new(0));
    let counted = left_out.clone();
    let write = move || {
        privileges::give_up_all();
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
        // It has nothing to say but what it has written.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A log that cannot be written must not fail the I/O that it is about; it is said once.
fn write_out(records: &Receiver<LogRecord>, left_out: &AtomicU64, mut target: impl Write) {
    let mut is_told = false;
    let mut tell = |written: std::io::Result<()>| {
        if let Err(error) = written
            && !std::mem::replace(&mut is_told, true)
        {
            warn!("the log of a volume cannot be written, and lacks lines from here on: {error}");
        }
    };
    loop {
        let next = match records.try_recv() {
            Err(TryRecvError::Empty) => {
                // Nothing stays behind while nothing happens.
                tell(target.flush());
                records.recv().map_err(|_| TryRecvError::Disconnected)
            }
            next => next,
        };
        let missing = left_out.swap(0, Ordering::Relaxed);
        if missing > 0 {
            tell(writeln!(target, "{missing} records are left out: they came faster than they were written"));
        }
        let Ok(record) = next else { break };
        tell(writeln!(target, "{record}"));
    }
    tell(target.flush());
}

/// Two of each request of many clients at a time, and some MiB.
const QUEUE_RECORDS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{LogEvent, Op, Tag};
    use std::sync::Mutex;
    use std::time::Instant;

    /// Holds up whoever writes until it is let go.
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
    fn records_that_find_no_room_are_counted_and_nobody_waits() {
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
