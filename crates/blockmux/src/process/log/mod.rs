//! The log on standard error, or in systemd's journal.
//!
//! The thread that logs an event queues a [`Record`], and a separate thread writes it. A slow
//! reader of the log or peers that cause many lines must not block a core, so records that do not
//! fit into the queue are counted instead. Records about refused peers do not fit when the queue is
//! half full, so that they do not displace those about logins and changes; nor do those about
//! reservations and about peers without authentication when it is three quarters full.

pub(crate) mod levels;
mod record;
mod repeats;

use crate::output;
use crate::process::privileges;
use jiff::Timestamp;
pub(crate) use record::LogFormat;
use record::{LineClass, Record};
use repeats::{Repeats, WINDOW};
use std::io::{IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError};
use std::time::{Duration, Instant};
use std::{io, thread};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// A tracing layer that queues records without waiting. Clones share the queue.
#[derive(Clone)]
pub(crate) struct Log {
    queue: SyncSender<LogMessage>,
    counts: Arc<QueueCounts>,
    has_time: bool,
}

/// Numbers of records, shared with the writing thread.
#[derive(Default)]
struct QueueCounts {
    queued: AtomicUsize,
    /// Records that did not fit into the queue, by class.
    lost: [AtomicU64; LineClass::ALL.len()],
}

enum LogMessage {
    /// A record and the time of its event.
    Record(Record, Option<Timestamp>),
    /// Requests a reply when all earlier records are written.
    End(Sender<()>),
}

impl Log {
    /// Starts the writing thread. With `has_time` each record has its time as RFC 3339 in UTC; the
    /// journal adds its own.
    ///
    /// # Errors
    /// If the thread cannot be started, or the journal is not running.
    pub(crate) fn start(format: LogFormat, has_time: bool) -> io::Result<Log> {
        let (queue, messages) = mpsc::sync_channel(QUEUE_RECORDS);
        let counts = Arc::new(QueueCounts::default());
        let mut writer = Writer::open(format, has_time)?;
        let counted = counts.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            privileges::drop_all_capabilities();
            write_out(&messages, &counted, &mut writer);
        })?;
        Ok(Log { queue, counts, has_time })
    }

    /// Queues a record if its class still has a place.
    fn queue(&self, record: Record, time: Option<Timestamp>) {
        let class = record.class();
        if self.counts.begin(class) && self.queue.try_send(LogMessage::Record(record, time)).is_err() {
            self.counts.give_up(class);
        }
    }

    /// Waits up to [`LAST_RECORDS_TIMEOUT`] until all records have been written.
    pub(crate) fn finish(&self) {
        let (sender, receiver) = mpsc::channel();
        let end = Instant::now() + LAST_RECORDS_TIMEOUT;
        let mut message = LogMessage::End(sender);
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

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let record = Record::of(event, levels::area_of(event.metadata().target()));
        let time = self.has_time.then(Timestamp::now);
        self.queue(record, time);
    }
}

impl QueueCounts {
    /// Counts a record that is to be queued; returns whether records of its class still fit.
    fn begin(&self, class: LineClass) -> bool {
        let has_place = self.queued.fetch_add(1, Ordering::Relaxed) < class.max_queued();
        if !has_place {
            self.give_up(class);
        }
        has_place
    }

    /// Counts a record as lost that was to be queued.
    fn give_up(&self, class: LineClass) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
        if let Some(lost) = self.lost.get(class as usize) {
            lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Warnings about the records that were lost since the last call.
    fn warnings(&self) -> impl Iterator<Item = Record> {
        let lost = self.lost.iter().map(|lost| lost.swap(0, Ordering::Relaxed));
        LineClass::ALL.into_iter().zip(lost).filter(|(_, lost)| *lost > 0).map(|(class, lost)| {
            let about = class.about();
            Record::warning(format!("{lost} lines about {about} were dropped: the log is read too slowly"))
        })
    }
}

impl LineClass {
    /// The number of queued records above which further ones of this class are dropped.
    fn max_queued(self) -> usize {
        match self {
            LineClass::Session => QUEUE_RECORDS,
            LineClass::Reservation | LineClass::OpenSession | LineClass::Other => QUEUE_RECORDS * 3 / 4,
            LineClass::Peer => QUEUE_RECORDS / 2,
        }
    }

    /// The class in a message.
    fn about(self) -> &'static str {
        match self {
            LineClass::Session => "logins, logouts and changes",
            LineClass::Reservation => "changes of reservations",
            LineClass::OpenSession => "logins and logouts without authentication",
            LineClass::Peer => "refused peers",
            LineClass::Other => "the daemon and its volumes",
        }
    }
}

fn write_out(messages: &Receiver<LogMessage>, counts: &QueueCounts, writer: &mut Writer) {
    let mut repeats = Repeats::default();
    loop {
        let message = match repeats.is_empty() {
            true => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => messages.recv_timeout(WINDOW),
        };
        let (is_end, now) = (matches!(message, Ok(LogMessage::End(_))), Instant::now());
        for line in repeats.left_out(if is_end { now + WINDOW } else { now }) {
            writer.write_now(&line);
        }
        let message = match message {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        counts.warnings().for_each(|warning| writer.write_now(&warning));
        match message {
            LogMessage::Record(record, time) => {
                counts.queued.fetch_sub(1, Ordering::Relaxed);
                if repeats.admits(&record, now) {
                    writer.write(&record, time);
                }
            }
            LogMessage::End(done) => drop(done.send(())),
        }
    }
}

/// Destination and format of records.
struct Writer {
    format: LogFormat,
    has_time: bool,
    is_terminal: bool,
    is_coloured: bool,
    /// Connected to the journal's socket if records go there.
    journal: Option<UnixDatagram>,
}

impl Writer {
    fn open(format: LogFormat, has_time: bool) -> io::Result<Writer> {
        let journal = match format {
            LogFormat::Journald => {
                let socket = UnixDatagram::unbound()?;
                socket.connect(JOURNAL_SOCKET)?;
                Some(socket)
            }
            LogFormat::Text | LogFormat::Json => None,
        };
        let is_terminal = io::stderr().is_terminal();
        let is_coloured = is_terminal && output::may_colour();
        Ok(Writer { format, has_time, is_terminal, is_coloured, journal })
    }

    fn write_now(&mut self, record: &Record) {
        self.write(record, self.has_time.then(Timestamp::now));
    }

    /// Writes a record in one piece, because standard output may be the same file. On a terminal
    /// the line replaces a progress bar, which is drawn again below it. Errors are ignored, because
    /// they cannot be reported.
    fn write(&mut self, record: &Record, time: Option<Timestamp>) {
        let written = record.written(self.format, time, self.is_coloured);
        let _ = match &self.journal {
            Some(socket) => socket.send(written.as_bytes()).map(|_| ()),
            None => {
                let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
                io::stderr().write_all(format!("{clear}{written}\n").as_bytes())
            }
        };
    }
}

/// Socket of systemd's journal for its native protocol.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";
/// Maximum number of queued records; more than a busy daemon logs during a short pause of the
/// reader.
const QUEUE_RECORDS: usize = 1024;
/// Timeout for writing the last records at the end of the process.
const LAST_RECORDS_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of attempts to queue the last message.
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;
    use record::tests::line;

    #[test]
    fn a_login_has_a_place_in_a_queue_that_refusals_have_filled() {
        let (queue, messages) = mpsc::sync_channel(QUEUE_RECORDS);
        let log = Log { queue, counts: Arc::default(), has_time: false };
        let refused = line("WARN", "login refused: peer may not", &[("peer", "192.0.2.1:5")]);
        (0..5000).for_each(|_| log.queue(refused.clone(), None));
        let login = line("INFO", "login", &[("peer", "192.0.2.2:5")]);
        log.queue(login.clone(), None);
        let queued: Vec<_> = messages.try_iter().collect();
        assert!(matches!(queued.last(), Some(LogMessage::Record(last, _)) if *last == login));
        let warnings: Vec<_> = log.counts.warnings().map(|warning| warning.text()).collect();
        let dropped = 5000 - QUEUE_RECORDS / 2;
        let expected =
            format!(" WARN {dropped} lines about refused peers were dropped: the log is read too slowly");
        assert_eq!(warnings, [expected]);
    }
}
