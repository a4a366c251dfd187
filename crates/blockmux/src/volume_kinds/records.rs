//! The sink of `log:` volumes.
//!
//! A separate thread writes, because a busy disk or a slow reader must not block a core. Records
//! that do not fit the queue are counted, and the count is written in their place.

use crate::failure::Failure;
use crate::process::privileges;
use blockmux_volume::{LogRecord, LogSink};
use std::io::{BufWriter, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;

/// A sink that writes a line for each record to `target`. Dropping it waits until all are written,
/// at most for [`LAST_RECORDS_TIMEOUT`].
pub(crate) fn to(target: impl Write + Send + 'static) -> Result<Arc<dyn LogSink>, Failure> {
    Ok(Arc::new(Records::with_queue(QUEUE_RECORDS, target)?))
}

/// Waits until the records so far are written, also those of volumes that something still has open
/// when the process ends; at most for [`LAST_RECORDS_TIMEOUT`].
pub(crate) fn wait_until_written() {
    let (mark, written) = mpsc::channel();
    for queue in lock(&QUEUES).iter().filter_map(Weak::upgrade) {
        // One that is full is not read either.
        let _ = queue.try_send(Queued::Mark(mark.clone()));
    }
    drop(mark);
    warn_if_late(&written);
}

/// The queues of all sinks.
static QUEUES: Mutex<Vec<Weak<SyncSender<Queued>>>> = Mutex::new(Vec::new());

struct Records {
    queue: Option<Arc<SyncSender<Queued>>>,
    left_out: Arc<AtomicU64>,
    /// Disconnected when all records have been written.
    ended: Mutex<Receiver<()>>,
}

enum Queued {
    /// A record, and how many before it did not fit the queue.
    Record { left_out: u64, record: LogRecord },
    /// Dropped when everything before it has been written.
    Mark(Sender<()>),
}

impl Records {
    fn with_queue(len: usize, target: impl Write + Send + 'static) -> Result<Self, Failure> {
        let (queue, records) = mpsc::sync_channel(len);
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
        let queue = Arc::new(queue);
        let mut queues = lock(&QUEUES);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(Self { queue: Some(queue), left_out, ended: Mutex::new(ended) })
    }
}

impl LogSink for Records {
    fn record(&self, record: &LogRecord) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let queued = Queued::Record { left_out, record: *record };
        if self.queue.as_ref().is_none_or(|queue| queue.try_send(queued).is_err()) {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.queue.take();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        warn_if_late(ended);
    }
}

/// Waits until the channel is disconnected, at most for [`LAST_RECORDS_TIMEOUT`].
fn warn_if_late(written: &Receiver<()>) {
    if written.recv_timeout(LAST_RECORDS_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
        // For example a pipe that nobody reads, or a network file system without its server.
        let seconds = LAST_RECORDS_TIMEOUT.as_secs();
        warn!("the last records of a `log:` volume could not be written within {seconds} s");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes records until the sink is dropped. An error is reported once and does not fail the I/O.
fn write_out(records: &Receiver<Queued>, left_out_last: &AtomicU64, mut target: impl Write) {
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
        match next {
            Ok(Queued::Record { left_out, record }) => {
                tell(write_left_out(&mut target, left_out));
                tell(writeln!(target, "{record}"));
            }
            Ok(Queued::Mark(_mark)) => tell(target.flush()),
            Err(_) => break,
        }
    }
    tell(write_left_out(&mut target, left_out_last.load(Ordering::Relaxed)));
    tell(target.flush());
}

fn write_left_out(target: &mut impl Write, count: u64) -> std::io::Result<()> {
    if count == 0 {
        return Ok(());
    }
    writeln!(target, "{count} records were dropped: they came faster than they could be written")
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

    /// A writer that blocks until it is released, and reports that it is about to.
    struct Slow {
        written: Arc<Mutex<Vec<u8>>>,
        flushes: mpsc::Sender<()>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.written.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            let _ = self.flushes.send(());
            drop(self.written.lock().unwrap());
            Ok(())
        }
    }

    fn flush_submitted(nth: u64) -> LogRecord {
        LogRecord {
            channel: 0,
            tag: Tag(nth),
            op: Op::Flush,
            offset: 0,
            len: 0,
            at: Instant::now(),
            event: LogEvent::Submitted,
        }
    }

    #[test]
    fn records_of_a_volume_that_stays_open_are_written_when_the_process_ends() {
        let written: Arc<Mutex<Vec<u8>>> = Arc::default();
        let sink = to(Slow { written: written.clone(), flushes: mpsc::channel().0 }).unwrap();
        for nth in 0..100 {
            sink.record(&flush_submitted(nth));
            wait_until_written();
            let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
            assert!(text.ends_with(&format!("0 flush tag {nth} submitted\n")), "{text}");
        }
    }

    #[test]
    fn records_beyond_the_queue_are_counted_without_waiting() {
        let written: Arc<Mutex<Vec<u8>>> = Arc::default();
        let held = written.lock().unwrap();
        let (flushes, flushed) = mpsc::channel();
        let sink = Records::with_queue(3, Slow { written: written.clone(), flushes }).unwrap();
        // The queue is empty, and from here on nobody takes a record out of it.
        flushed.recv().unwrap();
        (0..10).for_each(|nth| sink.record(&flush_submitted(nth)));
        drop(held);
        drop(sink);
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let submitted = (0..3).map(|nth| format!("0 flush tag {nth} submitted\n"));
        let dropped = "7 records were dropped: they came faster than they could be written\n";
        assert_eq!(text, submitted.collect::<String>() + dropped);
    }

    #[test]
    fn a_log_that_cannot_be_written_does_not_keep_its_volume_open() {
        let written: Arc<Mutex<Vec<u8>>> = Arc::default();
        let held = written.lock().unwrap();
        drop(to(Slow { written: written.clone(), flushes: mpsc::channel().0 }).unwrap());
        // Only now can the log be written.
        drop(held);
    }
}
