//! A volume that logs its requests.

use crate::io::{Completion, Io, IoError, Op, Tag};
use crate::kind::OpKind;
use crate::ready::Waker;
use crate::slab::Slab;
use crate::volume::{Channel, Core, Volume, VolumeInfo};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// One event of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// Number of the channel: they count from 0 in the order in which they were opened.
    pub channel: u32,
    /// The submitter's tag.
    pub tag: Tag,
    /// The operation.
    pub op: Op,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Time of the event on the core's clock.
    pub at: Instant,
    /// The event.
    pub event: LogEvent,
}

/// An event of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// It was submitted.
    Submitted,
    /// It was cancelled.
    Cancelled,
    /// It completed.
    Completed {
        /// Time since it was submitted.
        took: Duration,
        /// The error, if it failed.
        error: Option<IoError>,
    },
}

/// Receives records. Every core calls it between I/O, so it must not block: it may count, or append
/// to a buffer that another thread writes.
pub trait LogSink: Send + Sync {
    /// Receives one record.
    fn record(&self, record: &LogRecord);
}

impl<F: Fn(&LogRecord) + Send + Sync> LogSink for F {
    fn record(&self, record: &LogRecord) {
        self(record);
    }
}

/// One line without a time of day, such as `0 write 4096+512 fua tag 17 failed after 20us: medium
/// error`.
impl fmt::Display for LogRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.channel, OpKind::of(self.op).name())?;
        if self.op != Op::Flush {
            write!(f, " {}+{}", self.offset, self.len)?;
        }
        let (fua, may_unmap, only_fast) = match self.op {
            Op::Write { fua } | Op::Discard { fua } | Op::CompareAndWrite { fua } => (fua, false, false),
            Op::WriteZeroes { fua, may_unmap, only_fast } => (fua, may_unmap, only_fast),
            _ => (false, false, false),
        };
        for (flag, name) in [(fua, " fua"), (may_unmap, " may-unmap"), (only_fast, " only-fast")] {
            f.write_str(if flag { name } else { "" })?;
        }
        write!(f, " tag {} ", self.tag.0)?;
        match self.event {
            LogEvent::Submitted => f.write_str("submitted"),
            LogEvent::Cancelled => f.write_str("cancelled"),
            LogEvent::Completed { took, error: None } => write!(f, "done after {}us", took.as_micros()),
            LogEvent::Completed { took, error: Some(error) } => {
                write!(f, "failed after {}us: {error}", took.as_micros())
            }
        }
    }
}

/// Logs every request and completion of a volume.
pub struct LogVolume {
    inner: Arc<dyn Volume>,
    sink: Arc<dyn LogSink>,
    opened: AtomicU32,
}

impl LogVolume {
    /// Logs the requests of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Volume>, sink: Arc<dyn LogSink>) -> LogVolume {
        LogVolume { inner, sink, opened: AtomicU32::new(0) }
    }
}

impl Volume for LogVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { registered_alignment: None, ..self.inner.info() }
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(LogChannel {
            inner: self.inner.open(core, depth, waker)?,
            sink: self.sink.clone(),
            core: core.clone(),
            channel: self.opened.fetch_add(1, Ordering::Relaxed),
            in_flight: Slab::with_capacity(depth),
        }))
    }
}

struct LogChannel {
    inner: Box<dyn Channel>,
    sink: Arc<dyn LogSink>,
    core: Rc<dyn Core>,
    channel: u32,
    /// The record of each submission; the index is the tag in `inner`.
    in_flight: Slab<LogRecord>,
}

impl Channel for LogChannel {
    fn submit(&mut self, io: Io) {
        let Io { tag, op, offset, len, .. } = io;
        let at = self.core.now();
        let record =
            LogRecord { channel: self.channel, tag, op, offset, len, at, event: LogEvent::Submitted };
        self.sink.record(&record);
        let tag = Tag(self.in_flight.insert(record) as u64);
        self.inner.submit(Io { tag, ..io });
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let first = done.len();
        self.inner.poll(done);
        if done.len() == first {
            return;
        }
        let now = self.core.now();
        for done in &mut done[first..] {
            let submitted = self.in_flight.remove(done.tag.0 as usize).expect("a request completes once");
            done.tag = submitted.tag;
            let took = now.saturating_duration_since(submitted.at);
            let error = done.result.as_ref().err().copied();
            self.sink.record(&LogRecord { at: now, event: LogEvent::Completed { took, error }, ..submitted });
        }
    }

    fn cancel(&mut self, tag: Tag) {
        if let Some((below, record)) = self.in_flight.iter().find(|(_, record)| record.tag == tag) {
            self.sink.record(&LogRecord { at: self.core.now(), event: LogEvent::Cancelled, ..*record });
            self.inner.cancel(Tag(below as u64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness, TestCore};
    use crate::{DelayVolume, Delays, Fault, FaultEffect, FaultVolume, MemVolume};
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_logged_volume_conforms_and_every_request_has_two_records() {
        let balance = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let counters = balance.clone();
        let sink = move |record: &LogRecord| match record.event {
            LogEvent::Submitted => drop(counters[0].fetch_add(1, Ordering::Relaxed)),
            LogEvent::Completed { .. } => drop(counters[1].fetch_add(1, Ordering::Relaxed)),
            LogEvent::Cancelled => {}
        };
        let volume = LogVolume::new(Arc::new(MemVolume::new(40 << 20)), Arc::new(sink));
        let mut harness = Harness::on_test_core(Arc::new(volume));
        let mut client = harness.client(4).unwrap();
        client.write(0, &[1; 4096]).unwrap();
        client.read(0, 4096).unwrap();
        drop(client);
        let counts = || balance.each_ref().map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counts(), [2, 2]);
        conformance::run(&mut harness);
        assert!(counts()[0] > 1000);
    }

    #[test]
    fn records_are_formatted_as_lines() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = lines.clone();
        let sink = move |record: &LogRecord| written.lock().unwrap().push(record.to_string());
        let fault = Fault { offset: 8192, size: Some(512), effect: FaultEffect::Stuck, ..Fault::default() };
        let below = FaultVolume::new(Arc::new(MemVolume::new(1 << 20)), fault);
        let delays = Delays { write: Duration::from_micros(20), ..Delays::default() };
        let below = DelayVolume::new(Arc::new(below), delays);
        let volume = LogVolume::new(Arc::new(below), Arc::new(sink));
        let core = TestCore::new();
        let mut channel = volume.open(&core.as_core(), 4, core.ready().waker(0)).unwrap();
        let mut done = Vec::new();
        let zeroes = Op::WriteZeroes { fua: true, may_unmap: true, only_fast: false };
        channel.submit(Io::new(Tag(17), zeroes, 1 << 20, 512));
        channel.submit(Io::new(Tag(1 << 40), Op::Read, 8192, 512));
        channel.kick();
        assert!(core.jump());
        channel.poll(&mut done);
        channel.cancel(Tag(1 << 40));
        channel.cancel(Tag(99));
        channel.poll(&mut done);
        assert_eq!(done.iter().map(|done| done.tag.0).collect::<Vec<_>>(), [17, 1 << 40]);
        let expected = [
            "0 zeroes 1048576+512 fua may-unmap tag 17 submitted",
            "0 read 8192+512 tag 1099511627776 submitted",
            "0 zeroes 1048576+512 fua may-unmap tag 17 failed after 20us: outside the volume",
            "0 read 8192+512 tag 1099511627776 cancelled",
            "0 read 8192+512 tag 1099511627776 failed after 20us: aborted",
        ];
        assert_eq!(*lines.lock().unwrap(), expected);
    }
}
