//! A record of the log, and its formats: text, JSON, and the protocol of systemd's journal.

use crate::output::{printable, printable_json, shortened};
use blockmux_engine::serve::audit::UNAUTHENTICATED;
use jiff::Timestamp;
use serde_json::{Map, Value};
use std::fmt::{Debug, Write};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// A JSON object on one line.
    Json,
    /// The native protocol of systemd's journal, with a field for each value.
    Journald,
}

/// The content of an event, without its time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    level: Level,
    /// Area of the log; `None` for events that belong to no area.
    area: Option<&'static str>,
    /// It is a line of the audit log about a peer that has not proved who it is.
    is_unauthenticated: bool,
    message: String,
    fields: Vec<(&'static str, Value)>,
}

/// What a record is about: the limits of each class are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineClass {
    /// A login, a logout, a lost connection, or a change of the config.
    Session,
    /// A change of a reservation, which an initiator can repeat as often as it likes.
    Reservation,
    /// A login, a logout, a lost connection, or a change of a reservation, of a peer that has not
    /// proved who it is: discovery, or a target that requires no authentication.
    OpenSession,
    /// Something else that a peer caused, such as a refused login.
    Peer,
    /// An event of the daemon or of a volume.
    Other,
}

impl LineClass {
    pub(super) const ALL: [LineClass; 5] = [
        LineClass::Session,
        LineClass::Reservation,
        LineClass::OpenSession,
        LineClass::Peer,
        LineClass::Other,
    ];
}

impl Record {
    /// The record of a tracing event.
    pub(super) fn of(event: &Event<'_>, area: Option<&'static str>) -> Record {
        let (level, is_unauthenticated) =
            (*event.metadata().level(), event.metadata().target() == UNAUTHENTICATED);
        let mut record =
            Record { level, area, is_unauthenticated, message: String::new(), fields: Vec::new() };
        event.record(&mut record);
        record
    }

    /// A warning of the log itself.
    pub(super) fn warning(message: String) -> Record {
        let (level, area, fields) = (Level::WARN, None, Vec::new());
        Record { level, area, is_unauthenticated: false, message, fields }
    }

    /// The class whose limits apply to this record. The audit log has what succeeded as `info`.
    pub(super) fn class(&self) -> LineClass {
        let is_done = self.level == Level::INFO || self.message.starts_with(CONNECTION_LOST);
        match self.peer() {
            _ if self.is_unauthenticated && is_done => LineClass::OpenSession,
            _ if self.area == Some(AUDIT) && is_done => match self.message.starts_with(RESERVATION_CHANGED) {
                true => LineClass::Reservation,
                false => LineClass::Session,
            },
            Some(_) => LineClass::Peer,
            None => LineClass::Other,
        }
    }

    /// The peer's address, and its port if it has one.
    pub(super) fn peer(&self) -> Option<&str> {
        self.fields.iter().find(|(name, _)| *name == PEER)?.1.as_str()
    }

    /// The name that the initiator has given itself.
    pub(super) fn initiator(&self) -> Option<&str> {
        self.fields.iter().find(|(name, _)| *name == INITIATOR)?.1.as_str()
    }

    /// What similar records share besides the peer's address, as text.
    pub(super) fn kind(&self) -> String {
        self.summary(None).text()
    }

    /// The record for all similar records: without the offset on a volume and without names that
    /// the peer chooses, but with the target of a session, which exists; `source` replaces the
    /// peer.
    pub(super) fn summary(&self, source: Option<&str>) -> Record {
        let is_session =
            matches!(self.class(), LineClass::Session | LineClass::Reservation | LineClass::OpenSession);
        let is_varying = |name: &str| name == PEER || name == OFFSET;
        let begin = self.fields.iter().position(|(name, _)| is_varying(name)).unwrap_or(self.fields.len());
        let (shared, rest) = self.fields.split_at(begin);
        let target = rest.iter().filter(|(name, _)| is_session && *name == TARGET);
        let mut fields = shared.to_vec();
        fields.extend(source.map(|source| (PEER, source.into())));
        fields.extend(target.cloned());
        Record { message: shortened(&self.message).into(), fields, ..*self }
    }

    /// This record with the field of a peer, if there is one.
    pub(super) fn about_peer(mut self, peer: Option<&str>) -> Record {
        self.fields.extend(peer.map(|peer| (PEER, peer.into())));
        self
    }

    /// The record that counts records like this one.
    pub(super) fn counting(&self, more: u32, window: Duration) -> Record {
        let message = format!("{}: {more} more like this in {} seconds", self.message, window.as_secs());
        Record { message, ..self.clone() }
    }

    /// `LEVEL message name=value ...`. Strings are quoted and escaped, so that a peer's text cannot
    /// pass for another field or line.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{:>5} {}", self.level, printable(&self.message));
        for (name, value) in &self.fields {
            let _ = match value {
                Value::String(string) => write!(text, " {name}={}", printable(&format!("{string:?}"))),
                value => write!(text, " {name}={value}"),
            };
        }
        text
    }

    /// The record in a format, without a line end.
    pub(super) fn written(&self, format: LogFormat, time: Option<Timestamp>, is_coloured: bool) -> String {
        match format {
            LogFormat::Text => {
                let time = time.map_or_else(String::new, |time| format!("{time:.3} "));
                let text = self.text();
                match self.colour().filter(|_| is_coloured) {
                    // The level is the first word, right-aligned in five columns.
                    Some(colour) => {
                        let (level, rest) = text.split_at(LEVEL_LEN);
                        format!("{time}\x1b[{colour}m{level}\x1b[0m{rest}")
                    }
                    None => time + &text,
                }
            }
            LogFormat::Json => printable_json(&self.json(time).to_string()).into_owned(),
            LogFormat::Journald => self.journal_entry(),
        }
    }

    fn json(&self, time: Option<Timestamp>) -> Value {
        let mut object = Map::new();
        if let Some(time) = time {
            object.insert("time".to_owned(), format!("{time:.3}").into());
        }
        object.insert("level".to_owned(), self.level.as_str().to_ascii_lowercase().into());
        if let Some(area) = self.area {
            object.insert("area".to_owned(), area.into());
        }
        object.insert("message".to_owned(), self.message.as_str().into());
        object.extend(self.fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        Value::Object(object)
    }

    /// `FIELD=value` lines of the journal's native protocol. Line ends in values are escaped,
    /// because they would require the binary form.
    fn journal_entry(&self) -> String {
        let priority = match self.level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut entry = format!("PRIORITY={priority}\nSYSLOG_IDENTIFIER=blockmux\n");
        let mut field = |name: &str, value: &str| {
            entry += &format!("{}={}\n", name.to_ascii_uppercase(), printable(value));
        };
        field("message", self.text().trim_start().split_once(' ').map_or("", |(_, message)| message));
        if let Some(area) = self.area {
            field("blockmux_area", area);
        }
        for (name, value) in &self.fields {
            let name = format!("blockmux_{name}");
            match value {
                Value::String(string) => field(&name, string),
                value => field(&name, &value.to_string()),
            }
        }
        entry
    }

    fn colour(&self) -> Option<u8> {
        match self.level {
            Level::ERROR => Some(31),
            Level::WARN => Some(33),
            Level::INFO => Some(32),
            Level::DEBUG => Some(34),
            Level::TRACE => None,
        }
    }

    fn add(&mut self, field: &Field, value: Value) {
        match field.name() {
            MESSAGE => self.message = value.as_str().map_or_else(|| value.to_string(), str::to_owned),
            name => self.fields.push((name, value)),
        }
    }
}

impl Visit for Record {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }
}

/// The audit log's area.
const AUDIT: &str = "audit";
/// The beginning of the audit log's warnings about peers that have logged in. Other warnings, such
/// as refused changes of reservations, are as frequent as the peer likes.
const CONNECTION_LOST: &str = "connection lost: ";
/// The beginning of the audit log's lines about changes of reservations.
const RESERVATION_CHANGED: &str = "reservation changed: ";
/// The field with the peer's address.
const PEER: &str = "peer";
/// The field with the initiator's name.
const INITIATOR: &str = "initiator";
/// The field with the offset on a volume.
const OFFSET: &str = "offset";
/// The field with the name of an export, target, subsystem or disk.
const TARGET: &str = "target";
/// Name of the field in which tracing passes the text of an event.
const MESSAGE: &str = "message";
/// Width of the level in a line of text, in columns.
const LEVEL_LEN: usize = 5;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A record of the audit log.
    pub(in crate::process::log) fn line(
        level: &str,
        message: &str,
        fields: &[(&'static str, &str)],
    ) -> Record {
        let fields = fields.iter().map(|&(name, value)| (name, value.into())).collect();
        let (level, area, message) = (level.parse().unwrap(), Some(AUDIT), message.to_owned());
        Record { level, area, is_unauthenticated: false, message, fields }
    }

    /// A record of the audit log about a peer that has not proved who it is.
    pub(in crate::process::log) fn open_line(message: &str, fields: &[(&'static str, &str)]) -> Record {
        Record { is_unauthenticated: true, ..line("INFO", message, fields) }
    }

    fn login() -> Record {
        let fields = vec![("protocol", "nbd".into()), ("peer", "127.0.0.1:9".into()), ("offset", 512.into())];
        let (level, area, message) = (Level::INFO, Some(AUDIT), "login".to_owned());
        Record { level, area, is_unauthenticated: false, message, fields }
    }

    #[test]
    fn a_record_is_a_line_a_json_object_or_journal_fields() {
        let record = login();
        assert_eq!(record.text(), " INFO login protocol=\"nbd\" peer=\"127.0.0.1:9\" offset=512");
        let time = "2026-11-25T10:00:00Z".parse().ok();
        assert_eq!(
            record.written(LogFormat::Json, time, false),
            r#"{"time":"2026-11-25T10:00:00.000Z","level":"info","area":"audit","message":"login","protocol":"nbd","peer":"127.0.0.1:9","offset":512}"#
        );
        assert_eq!(
            record.written(LogFormat::Journald, time, false),
            "PRIORITY=6\nSYSLOG_IDENTIFIER=blockmux\n\
             MESSAGE=login protocol=\"nbd\" peer=\"127.0.0.1:9\" offset=512\n\
             BLOCKMUX_AREA=audit\nBLOCKMUX_PROTOCOL=nbd\nBLOCKMUX_PEER=127.0.0.1:9\nBLOCKMUX_OFFSET=512\n"
        );
    }

    #[test]
    fn text_of_a_peer_cannot_start_a_new_line_or_field() {
        let mut record = login();
        record.message = "closing: it said\nPRIORITY=0".to_owned();
        record.fields = vec![("initiator", "a\" peer=\"1.2.3.4:5\nX=y".into())];
        assert_eq!(
            record.text(),
            r#" INFO closing: it said\nPRIORITY=0 initiator="a\" peer=\"1.2.3.4:5\nX=y""#
        );
        assert_eq!(record.json(None)["initiator"], "a\" peer=\"1.2.3.4:5\nX=y");
        let entry = record.written(LogFormat::Journald, None, false);
        let names: Vec<_> = entry.lines().map(|line| line.split('=').next().unwrap()).collect();
        let expected = ["PRIORITY", "SYSLOG_IDENTIFIER", "MESSAGE", "BLOCKMUX_AREA", "BLOCKMUX_INITIATOR"];
        assert_eq!(names, expected);
    }

    #[test]
    fn text_of_a_peer_cannot_hide_or_reorder_in_any_format() {
        let mut record = login();
        record.message = "closing: \u{202e}".to_owned();
        record.fields = vec![("initiator", "a\u{200b}\u{3164}".into())];
        for format in [LogFormat::Text, LogFormat::Json, LogFormat::Journald] {
            let written = record.written(format, None, false);
            let is_ours = |c| c == '\n' || !blockmux_volume::text::is_unprintable(c);
            assert!(written.chars().all(is_ours) && written.contains("202e"), "{written:?}");
        }
    }
}
