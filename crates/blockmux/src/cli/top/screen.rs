//! The screen of `blockmux top`.

use super::DaemonState;
use crate::api::history::{Rates, Series};
use crate::api::limits::LimitsBody;
use crate::api::status::{SessionStatus, ThrottleStatus, VolumeStatus};
use crate::output::printable;
use blockmux_volume::units::human_size;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};
use std::collections::HashMap;
use std::iter;

/// The shown data and the scroll position.
pub(super) struct View {
    address: String,
    state: DaemonState,
    /// Requests and bytes of each session at the previous refresh.
    before: HashMap<String, (u64, u64)>,
    /// Time since the previous refresh.
    seconds: f64,
    /// Error of the last refresh.
    failure: Option<String>,
    tab: Tab,
    /// Number of rows that are scrolled out at the top.
    above: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tab {
    Volumes,
    Sessions,
    Limits,
}

impl View {
    /// Creates the view with the data of the first refresh.
    pub(super) fn new(address: String, state: DaemonState) -> View {
        let (before, failure) = (HashMap::new(), None);
        View { address, state, before, seconds: 0.0, failure, tab: Tab::Volumes, above: 0 }
    }

    /// Shows the data of a new refresh.
    pub(super) fn update(&mut self, state: DaemonState) {
        self.before = self.state.sessions.iter().map(|session| (key(session), done(session))).collect();
        self.seconds = state.at.saturating_duration_since(self.state.at).as_secs_f64();
        self.state = state;
        self.failure = None;
    }

    /// Shows an error along with the data of the last successful refresh.
    pub(super) fn fail(&mut self, failure: String) {
        self.failure = Some(failure);
    }

    /// Handles a key: scrolls or switches the table.
    pub(super) fn on_key(&mut self, key: KeyCode) {
        let rows = match self.tab {
            Tab::Volumes => self.state.status.volumes.len(),
            Tab::Sessions => self.state.sessions.len(),
            Tab::Limits => self.limited().count(),
        };
        match key {
            KeyCode::Tab | KeyCode::BackTab => {
                self.tab = match (self.tab, key) {
                    (Tab::Volumes, KeyCode::Tab) | (Tab::Limits, KeyCode::BackTab) => Tab::Sessions,
                    (Tab::Sessions, KeyCode::Tab) | (Tab::Volumes, _) => Tab::Limits,
                    _ => Tab::Volumes,
                };
                self.above = 0;
            }
            KeyCode::Down => self.above = (self.above + 1).min(rows.saturating_sub(1)),
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::PageDown => self.above = (self.above + PAGE).min(rows.saturating_sub(1)),
            KeyCode::PageUp => self.above = self.above.saturating_sub(PAGE),
            KeyCode::Home => self.above = 0,
            _ => {}
        }
    }

    /// Draws the whole screen.
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(4),
            Constraint::Length(3),
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(1),
        ]);
        let [head, hour, tabs, table, foot] = areas.areas(frame.area());
        frame.render_widget(Paragraph::new(self.head()), head);
        self.draw_hour(frame, hour);
        frame.render_widget(Paragraph::new(self.tabs()), tabs);
        match self.tab {
            Tab::Volumes => self.draw_volumes(frame, table),
            Tab::Sessions => self.draw_sessions(frame, table),
            Tab::Limits => self.draw_limits(frame, table),
        }
        let keys = Line::from("Tab: volumes, sessions, limits   arrows: scroll   q: quit").style(SOFT);
        frame.render_widget(Paragraph::new(keys), foot);
    }

    fn head(&self) -> Vec<Line<'_>> {
        let DaemonState { status, history, .. } = &self.state;
        let now = &history.total.now;
        let state = match &self.failure {
            Some(failure) => Span::styled(printable(failure).to_string(), BAD),
            None => Span::styled(history.at.clone(), SOFT),
        };
        let protocols = status.protocols.iter().filter(|protocol| protocol.connections > 0);
        let protocols: Vec<_> =
            protocols.map(|protocol| format!("{} {}", protocol.name, protocol.connections)).collect();
        let failed: u64 = history.total.points.iter().map(|point| point.failed).sum();
        let failed = format!("failed in the last hour  {failed}");
        let orphaned = if status.orphaned_connections > 0 {
            format!("   lost with I/O in flight  {}", status.orphaned_connections)
        } else {
            String::new()
        };
        vec![
            Line::from(vec![Span::styled(format!("blockmux  {}  ", self.address), BOLD), state]),
            Line::from(format!(
                "requests/s  {:>9}   {} reads, {} writes, {} others",
                now.requests(),
                now.reads,
                now.writes,
                now.others
            )),
            Line::from(format!(
                "bytes/s     {:>9}   latency  {} median, {} 99%",
                human_size(now.read_bytes + now.written_bytes),
                micros(now.p50_us),
                micros(now.p99_us)
            )),
            Line::from(vec![
                Span::from(format!("connections {:>9}   {}   ", status.connections, protocols.join(", "))),
                Span::styled(
                    format!("{failed}{orphaned}"),
                    if status.orphaned_connections > 0 { BAD } else { SOFT },
                ),
            ]),
        ]
    }

    fn draw_hour(&self, frame: &mut Frame<'_>, area: Rect) {
        let [label, chart] = Layout::horizontal([Constraint::Length(12), Constraint::Min(10)]).areas(area);
        frame.render_widget(Paragraph::new("last hour\nrequests/s").style(SOFT), label);
        let points = &self.state.history.total.points;
        let columns = usize::from(chart.width).max(1);
        // A column shows the maximum of its points.
        let per_column = HOUR_POINTS.div_ceil(columns);
        let newest_first =
            points.rchunks(per_column).map(|chunk| chunk.iter().map(Rates::requests).max().unwrap_or(0));
        let mut values: Vec<u64> = newest_first.chain(iter::repeat(0)).take(columns).collect();
        values.reverse();
        frame.render_widget(Sparkline::default().data(values).style(Style::new().fg(Color::Cyan)), chart);
    }

    fn tabs(&self) -> Line<'_> {
        let DaemonState { status, sessions, .. } = &self.state;
        let title = |tab, text| Span::styled(text, if tab == self.tab { SELECTED } else { SOFT });
        Line::from(vec![
            title(Tab::Volumes, format!(" Volumes {} ", status.volumes.len())),
            Span::from(" "),
            title(Tab::Sessions, format!(" Sessions {} ", sessions.len())),
            Span::from(" "),
            title(Tab::Limits, format!(" Limits {} ", self.limited().count())),
        ])
    }

    /// The current rates of a volume, if it has its own series.
    fn rates(&self, volume: &VolumeStatus) -> Option<&Rates> {
        let mut all = self.state.history.volumes.iter();
        all.find(|series: &&Series| series.name == volume.name).map(|series| &series.now)
    }

    /// The volumes that have limits.
    fn limited(&self) -> impl Iterator<Item = &VolumeStatus> {
        let all = self.state.status.volumes.iter();
        all.filter(|volume| volume.limits.is_some() || volume.client_limits.is_some())
    }

    fn draw_volumes(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.state.status.volumes.iter().skip(self.above).map(|volume| {
            let now = self.rates(volume);
            let rate = |show: fn(&Rates) -> String| now.map_or("-".to_owned(), show);
            let reserved = volume.reservation.as_ref().is_some_and(|now| now.reserved);
            let mut state = Vec::new();
            state.extend(volume.read_only.then(|| "read-only".to_owned()));
            state.extend(reserved.then(|| "reserved".to_owned()));
            state.extend(
                Some(pending(volume))
                    .filter(|&count| count > 0)
                    .map(|count| format!("{count} throttled now")),
            );
            state.extend(
                (volume.orphaned_connections > 0).then(|| format!("{} lost", volume.orphaned_connections)),
            );
            let failed = volume.traffic.failed();
            Row::new(vec![
                Cell::from(printable(&volume.name).to_string()).style(BOLD),
                right(human_size(volume.size), 9),
                right(volume.users, 5),
                right(rate(|now| now.reads.to_string()), 8),
                right(rate(|now| now.writes.to_string()), 8),
                right(rate(|now| human_size(now.read_bytes)), 10),
                right(rate(|now| human_size(now.written_bytes)), 10),
                right(rate(|now| micros(now.p99_us)), 8),
                right(failed, 7).style(if failed > 0 { BAD } else { Style::new() }),
                Cell::from(state.join(" ")),
            ])
        });
        let widths = [
            Constraint::Min(8),
            Constraint::Length(9),
            Constraint::Length(5),
            Constraint::Length(8),
            Constraint::Length(8),
            Constraint::Length(10),
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(7),
            Constraint::Length(9),
        ];
        let head =
            ["volume", "size", "users", "reads/s", "writes/s", "read/s", "written/s", "99%", "failed", ""];
        let lens = [0, 9, 5, 8, 8, 10, 10, 8, 7, 0];
        frame.render_widget(Table::new(rows, widths).header(header(head, lens)), area);
    }

    fn draw_sessions(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.state.sessions.iter().skip(self.above).map(|session| {
            let (requests, bytes) = done(session);
            let rate =
                |now: u64, before: u64| (now.saturating_sub(before) as f64 / self.seconds).round() as u64;
            let before = self.before.get(&key(session)).filter(|_| self.seconds > 0.0);
            let rates = before.map(|before| (rate(requests, before.0), rate(bytes, before.1)));
            let (requests, bytes) = match rates {
                Some((requests, bytes)) => (requests.to_string(), human_size(bytes)),
                None => ("-".to_owned(), "-".to_owned()),
            };
            Row::new(vec![
                Cell::from(session.protocol.clone()).style(Style::new().fg(colour(&session.protocol))),
                Cell::from(printable(&session.address).to_string()),
                Cell::from(printable(&session.initiator).to_string()),
                Cell::from(printable(&session.target).to_string()),
                right(requests, 10),
                right(bytes, 10),
            ])
        });
        let widths = [
            Constraint::Length(9),
            Constraint::Length(21),
            Constraint::Fill(1),
            Constraint::Fill(1),
            Constraint::Length(10),
            Constraint::Length(10),
        ];
        let head = ["protocol", "from", "initiator", "target", "requests/s", "bytes/s"];
        frame.render_widget(Table::new(rows, widths).header(header(head, [0, 0, 0, 0, 10, 10])), area);
    }

    fn draw_limits(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.limited().skip(self.above).map(|volume| {
            let limits =
                |limits: &Option<LimitsBody>| limits.as_ref().map_or("-".to_owned(), LimitsBody::summary);
            let percent = self.rates(volume).and_then(Rates::throttled_percent);
            Row::new(vec![
                Cell::from(printable(&volume.name).to_string()).style(BOLD),
                Cell::from(limits(&volume.limits)),
                Cell::from(limits(&volume.client_limits)),
                right(pending(volume), 7),
                right(percent.map_or("-".to_owned(), |percent| format!("{percent}%")), 9),
            ])
        });
        let widths = [
            Constraint::Fill(1),
            Constraint::Fill(2),
            Constraint::Fill(2),
            Constraint::Length(7),
            Constraint::Length(9),
        ];
        let head = ["volume", "all clients", "each client", "pending", "throttled"];
        frame.render_widget(Table::new(rows, widths).header(header(head, [0, 0, 0, 7, 9])), area);
    }
}

fn header<const N: usize>(names: [&'static str; N], lens: [usize; N]) -> Row<'static> {
    let cells = names.into_iter().zip(lens).map(|(name, len)| right(name, len));
    Row::new(cells.collect::<Vec<_>>()).style(SOFT)
}

fn right(value: impl ToString, len: usize) -> Cell<'static> {
    Cell::from(format!("{:>len$}", value.to_string()))
}

/// Number of requests that limits throttle now.
fn pending(volume: &VolumeStatus) -> u64 {
    volume.throttled.as_ref().map_or(0, |ThrottleStatus { pending, .. }| *pending)
}

fn micros(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.0} us"),
        Some(us) if us < 1e6 => format!("{:.1} ms", us / 1e3),
        Some(us) => format!("{:.1} s", us / 1e6),
    }
}

fn key(session: &SessionStatus) -> String {
    let SessionStatus { protocol, initiator, target, address, since, .. } = session;
    [protocol, initiator, target, address, since].map(String::as_str).join("\n")
}

/// Numbers of requests and bytes of a session.
fn done(session: &SessionStatus) -> (u64, u64) {
    (session.traffic.requests(), session.traffic.bytes())
}

/// The colour of a protocol: the terminal colour that is closest to that of reports.
fn colour(protocol: &str) -> Color {
    match protocol {
        "nbd" => Color::LightBlue,
        "iscsi" => Color::LightRed,
        "nvme-tcp" => Color::LightGreen,
        "iser" => Color::Yellow,
        "srp" => Color::Magenta,
        "nvme-rdma" => Color::LightMagenta,
        "aoe" => Color::LightYellow,
        _ => Color::Gray,
    }
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const SOFT: Style = Style::new().fg(Color::DarkGray);
const BAD: Style = Style::new().fg(Color::Red);
const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);
/// Number of rows that Page Up and Page Down scroll.
const PAGE: usize = 10;
/// Number of points of an hour.
const HOUR_POINTS: usize = 360;

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;
    use std::time::{Duration, Instant};

    fn state(reads: u64, at: Instant) -> DaemonState {
        let rates = json!({"reads": 1200, "writes": 34, "others": 5, "read_bytes": 4_915_200, "written_bytes": 0,
            "failed": 1, "throttled": 310, "p50_us": 87.4, "p99_us": 2345.6});
        let volume = |name: &str| {
            json!({"name": name, "size": 1 << 30, "read_only": true, "users": 2, "orphaned_connections": 0, "reads": 9,
                "read_bytes": 0, "writes": 0, "written_bytes": 0, "others": 0, "failed": 3,
                "reservation": {"registrants": 1, "reserved": true}})
        };
        let names: Vec<String> = (0..30).map(|nth| format!("disk{nth}")).collect();
        let mut volumes: Vec<_> = names.iter().map(|name| volume(name)).collect();
        volumes[0]["limits"] = json!({"iops": 500, "bandwidth": 10 << 20});
        volumes[0]["throttled"] = json!({"pending": 3, "requests": 7, "seconds": 0.5});
        volumes[1]["client_limits"] = json!({"write_iops": 100});
        let session = json!({"protocol": "iscsi", "initiator": "iqn.2026-11.i:a", "target": "iqn.2026-11.t:a",
            "address": "192.0.2.7:4321", "since": "2026-11-23T03:34:22Z", "reads": reads, "read_bytes": reads * 4096,
            "writes": 0, "written_bytes": 0, "others": 0, "failed": 0});
        let series = json!({"name": "disk0", "now": rates, "points": [rates, rates]});
        DaemonState {
            status: serde_json::from_value(
                json!({"connections": 2, "max_connections": 4096, "orphaned_connections": 0,
                "protocols": [{"name": "iscsi", "connections": 2}, {"name": "nbd", "connections": 0}],
                "volumes": volumes}),
            )
            .unwrap(),
            sessions: serde_json::from_value(json!([session])).unwrap(),
            history: serde_json::from_value(json!({"at": "2026-11-23T03:35:00Z", "interval_seconds": 10,
                "total": series, "volumes": [series]}))
            .unwrap(),
            at,
        }
    }

    fn screen(view: &View, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 16)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let cells = terminal.backend().buffer().content();
        let line = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
        cells.chunks(width.into()).map(|row| line(row).trim_end().to_owned()).collect()
    }

    #[test]
    fn rates_volumes_and_sessions_are_shown_and_scroll() {
        let begun = Instant::now();
        let mut view = View::new("/run/control".to_owned(), state(100, begun));
        let lines = screen(&view, 100);
        assert_eq!(lines[0], "blockmux  /run/control  2026-11-23T03:35:00Z");
        assert_eq!(lines[1], "requests/s       1239   1200 reads, 34 writes, 5 others");
        assert_eq!(lines[2], "bytes/s      4.69 MiB   latency  87 us median, 2.3 ms 99%");
        assert_eq!(lines[3], "connections         2   iscsi 2   failed in the last hour  2");
        assert!(lines[4].starts_with("last hour   "), "{lines:#?}");
        assert!(lines[6].ends_with(" █"), "the last points share the column at the right edge: {lines:#?}");
        assert_eq!(lines[7], " Volumes 30   Sessions 1   Limits 2");
        assert!(
            lines[9].starts_with("disk0 ") && lines[9].contains("1200") && lines[9].contains("2.3 ms"),
            "{lines:#?}"
        );
        assert!(lines[9].ends_with("read-only") || lines[9].contains("read-only"), "{lines:#?}");
        assert!(lines[10].starts_with("disk1 ") && lines[10].contains("   -"), "{lines:#?}");
        view.on_key(KeyCode::PageDown);
        assert!(screen(&view, 100)[9].starts_with("disk10 "));
        view.on_key(KeyCode::Tab);
        assert!(screen(&view, 100)[9].starts_with("iscsi     192.0.2.7:4321"));
        view.update(state(400, begun + Duration::from_secs(2)));
        let line = &screen(&view, 100)[9];
        assert!(line.contains("iqn.2026-11.i:a") && line.ends_with("       150    600 KiB"), "{line}");
        view.fail("no answer".to_owned());
        assert_eq!(screen(&view, 100)[0], "blockmux  /run/control  no answer");
        view.on_key(KeyCode::Tab);
        let lines = screen(&view, 80);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[9]), "disk0 500 IOPS, 10 MiB/s - 3 25%");
        assert_eq!(words(&lines[10]), "disk1 - write 100 IOPS 0 -");
        assert_eq!(lines[11], "");
        view.on_key(KeyCode::BackTab);
        assert!(screen(&view, 80)[9].starts_with("iscsi "));
        // A narrow terminal loses columns only.
        assert_eq!(screen(&view, 40).len(), 16);
    }
}
