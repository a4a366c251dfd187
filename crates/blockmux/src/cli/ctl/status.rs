//! `blockmux ctl status`: a table of the volumes, or all about one of them. `--watch` repeats the
//! table, with rates.

use super::sessions::{name_lines, traffic_lines};
use super::{actions, attachments};
use crate::api::client::Client;
use crate::api::request::{Answer, Request};
use crate::api::status::{ProtocolStatus, ReservationStatus, Status, ThrottleStatus, VolumeStatus};
use crate::failure::Failure;
use crate::output::{both_sizes, printable};
use crate::process::stdout::{print, print_json, print_json_while_open, print_while_open};
use crate::protocol::by_name;
use blockmux_volume::units::human_size;
use std::collections::HashMap;
use std::io::IsTerminal;
use std::thread;
use std::time::{Duration, Instant};

/// Arguments of `blockmux ctl status`.
#[derive(clap::Args)]
pub(super) struct StatusArgs {
    /// Only volumes whose names contain this; the whole name of a volume shows all about it
    #[arg(value_name = "VOLUME")]
    filter: Option<String>,
    /// Repeat the table each second, or each SECONDS, with reads (r/s) and writes (w/s) per second
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    watch: Option<u64>,
}

/// Prints the state of the daemon, once or until nobody reads it.
///
/// # Errors
/// If the daemon does not answer, or no volume has such a name.
pub(super) fn run(client: &Client, args: &StatusArgs, is_json: bool) -> Result<(), Failure> {
    let mut before: Option<(Instant, Status)> = None;
    loop {
        let (at, status) = (Instant::now(), chosen(ask(client)?, args.filter.as_deref()));
        if let (Some(filter), None, []) = (&args.filter, args.watch, &status.volumes[..]) {
            return Err(Failure::run(format!(
                "no volume has `{filter}` in its name; `blockmux ctl status` lists all"
            )));
        }
        let Some(seconds) = args.watch else {
            return if is_json { print_json(&status) } else { print(text(&status, args)) };
        };
        let is_read = if is_json {
            print_json_while_open(&status)?
        } else {
            let rates =
                before.as_ref().map(|(then, before)| StatusRates::new(before, at.duration_since(*then)));
            let clear = if std::io::stdout().is_terminal() { CLEAR_SCREEN } else { "" };
            print_while_open(format_args!("{clear}{}", table(&status, &StatusColumns::Rates(rates))))?
        };
        if !is_read {
            return Ok(());
        }
        before = Some((at, status));
        thread::park_timeout(Duration::from_secs(seconds));
    }
}

fn ask(client: &Client) -> Result<Status, Failure> {
    match actions::ask(client, &Request::Status)? {
        Answer::Status(status) => Ok(status),
        Answer::Failed(error) => Err(error.into()),
        _ => Err(Failure::run("unexpected answer from the daemon; it may have another version")),
    }
}

/// The status with only the volumes that the filter chooses.
fn chosen(mut status: Status, filter: Option<&str>) -> Status {
    if let Some(filter) = filter {
        let is_exact = status.volumes.iter().any(|volume| volume.name == filter);
        let matches = |name: &str| if is_exact { name == filter } else { name.contains(filter) };
        status.volumes.retain(|volume| matches(&volume.name));
        status.attachments.retain(|disk| matches(&disk.volume));
    }
    status
}

fn text(status: &Status, args: &StatusArgs) -> String {
    match &status.volumes[..] {
        [volume] if args.filter.as_ref() == Some(&volume.name) => details(volume, status).join("\n"),
        _ => table(status, &StatusColumns::Counters),
    }
}

/// What the columns of reads and writes show.
enum StatusColumns<'a> {
    /// Numbers since the volume was exported.
    Counters,
    /// Numbers per second; `None` until there are two answers.
    Rates(Option<StatusRates<'a>>),
}

/// The difference to an earlier answer.
struct StatusRates<'a> {
    /// The volumes of the earlier answer.
    before: HashMap<&'a str, &'a VolumeStatus>,
    elapsed: Duration,
}

impl<'a> StatusRates<'a> {
    fn new(before: &'a Status, elapsed: Duration) -> StatusRates<'a> {
        let before = before.volumes.iter().map(|volume| (volume.name.as_str(), volume)).collect();
        StatusRates { before, elapsed }
    }

    /// Reads and writes per second of a volume; `None` if it is new, or was exported anew.
    fn of(&self, volume: &VolumeStatus) -> Option<[u64; 2]> {
        let before = self.before.get(volume.name.as_str())?;
        let per_second = |now: u64, before: u64| {
            let done = now.checked_sub(before)? as f64;
            Some((done / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)).round() as u64)
        };
        let (now, before) = (&volume.traffic, &before.traffic);
        Some([per_second(now.reads, before.reads)?, per_second(now.writes, before.writes)?])
    }
}

/// Connections of the daemon, and a line for each volume.
fn table(status: &Status, columns: &StatusColumns<'_>) -> String {
    let used = status.protocols.iter().filter(|protocol| protocol.connections > 0);
    let used: Vec<_> =
        used.map(|ProtocolStatus { name, connections }| format!("{name} {connections}")).collect();
    let colon = if used.is_empty() { "" } else { ": " };
    let total = format!("{} of {}", status.connections, status.max_connections);
    let mut lines = vec![format!("connections  {total}{colon}{}", used.join(", "))];
    lines.extend(lost_connections("", status.orphaned_connections));
    let names = match columns {
        StatusColumns::Counters => ["READS", "WRITES"],
        StatusColumns::Rates(_) => ["r/s", "w/s"],
    };
    let rows: Vec<_> = status.volumes.iter().map(|volume| cells(volume, columns)).collect();
    let widest = |column: fn(&StatusRow) -> &str| rows.iter().map(|row| column(row).chars().count()).max();
    let protocols = widest(|row| &row.protocols).unwrap_or(0).clamp(PROTOCOLS.len(), MAX_PROTOCOLS);
    let fits = WIDTH - VALUES_WIDTH - protocols;
    let name = widest(|row| &row.name).unwrap_or(0).clamp(VOLUME.len(), fits);
    if rows.is_empty() {
        lines.push("no volumes".to_owned());
        return lines.join("\n");
    }
    let values = |[size, mode, users, reads, writes, failed]: [&str; 6], protocols: &str| {
        format!("{size:>8}  {mode:<2}  {users:>5}  {reads:>6}  {writes:>6}  {failed:>6}  {protocols}")
    };
    let head = values(["SIZE", "RW", "CONNS", names[0], names[1], "FAILED"], PROTOCOLS);
    lines.push(format!("{VOLUME:<name$}  {head}"));
    for (row, volume) in rows.iter().zip(&status.volumes) {
        let own = values(row.values.each_ref().map(String::as_str), &row.protocols);
        // As df does: the values of a long name follow on a line of their own.
        if row.name.chars().count() > name {
            lines.extend([row.name.clone(), format!("{:name$}  {own}", "")]);
        } else {
            lines.push(format!("{:<name$}  {own}", row.name));
        }
        lines.extend(wrapped(&notes(volume, status)));
    }
    lines.join("\n")
}

/// The text of a row of the table.
struct StatusRow {
    name: String,
    /// Size, access, connections, reads, writes and failed requests.
    values: [String; 6],
    protocols: String,
}

fn cells(volume: &VolumeStatus, columns: &StatusColumns<'_>) -> StatusRow {
    let traffic = &volume.traffic;
    let [reads, writes] = match columns {
        StatusColumns::Counters => [traffic.reads, traffic.writes].map(short_count),
        StatusColumns::Rates(rates) => match rates.as_ref().and_then(|rates| rates.of(volume)) {
            Some(rates) => rates.map(short_count),
            None => ["-", "-"].map(str::to_owned),
        },
    };
    let mode = if volume.read_only { "ro" } else { "rw" }.to_owned();
    let counts = [volume.users, traffic.failed].map(short_count);
    let [users, failed] = counts;
    // A protocol over RDMA is served wherever the one over TCP is.
    let all = &volume.protocols;
    let is_implied = |name: &String| {
        let served_with = by_name(name).and_then(|protocol| protocol.served_with);
        served_with.is_some_and(|other| all.iter().any(|name| name == other))
    };
    let shown: Vec<_> = all.iter().filter(|name| !is_implied(name)).map(String::as_str).collect();
    let protocols = if shown.is_empty() { "-".to_owned() } else { shown.join(",") };
    StatusRow {
        name: printable(&volume.name).to_string(),
        values: [human_size(volume.size), mode, users, reads, writes, failed],
        protocols,
    }
}

/// What an administrator wants to know of a volume besides the columns.
fn notes(volume: &VolumeStatus, status: &Status) -> Vec<String> {
    let mut notes = Vec::new();
    if volume.orphaned_connections > 0 {
        notes.push(format!("{} lost connections with I/O", volume.orphaned_connections));
    }
    let pending = volume.throttled.as_ref().map_or(0, |ThrottleStatus { pending, .. }| *pending);
    if pending > 0 {
        notes.push(format!("limits throttle {pending} requests"));
    }
    if volume.reservation.as_ref().is_some_and(|now| now.reserved) {
        notes.push("reserved".to_owned());
    }
    let disks = status.attachments.iter().filter(|disk| disk.volume == volume.name);
    notes.extend(disks.map(|disk| match &disk.device {
        Some(device) => format!("disk {}", printable(device)),
        None => format!("disk {}", disk.state),
    }));
    let populating = volume.populated.as_ref().filter(|now| now.bytes < now.of);
    notes.extend(
        populating.map(|now| format!("populated {} of {}", human_size(now.bytes), human_size(now.of))),
    );
    notes
}

/// Indented lines of at most [`WIDTH`] columns, if the parts are not longer.
fn wrapped(parts: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 2 + part.chars().count() <= WIDTH => {
                line.push_str(", ");
                line.push_str(part);
            }
            _ => lines.push(format!("  {part}")),
        }
    }
    lines
}

/// A number in at most six columns.
fn short_count(count: u64) -> String {
    const UNITS: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    if count < 100_000 {
        return count.to_string();
    }
    let (mut value, mut unit) = (count as f64 / 1000.0, 0);
    while value >= 999.5 {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    let decimals = if value < 99.95 { 1 } else { 0 };
    format!("{value:.decimals$}{}", UNITS.get(unit).unwrap_or(&"?"))
}

/// All about one volume.
fn details(volume: &VolumeStatus, status: &Status) -> Vec<String> {
    let read_only = if volume.read_only { "  read-only" } else { "" };
    let mut lines = vec![format!("{}  {}{read_only}", printable(&volume.name), both_sizes(volume.size))];
    let protocols = if volume.protocols.is_empty() { "none".to_owned() } else { volume.protocols.join(", ") };
    lines.push(format!("  protocols    {protocols}"));
    lines.extend(volume.targets.iter().flat_map(|target| name_lines("target", target, LABEL)));
    lines.push(format!("  connections  {}", volume.users));
    if !volume.allow.is_empty() {
        lines.push(format!("  allow        {}", printable(&volume.allow.join(", "))));
    }
    lines.extend(lost_connections("  ", volume.orphaned_connections));
    let disks = status.attachments.iter().filter(|disk| disk.volume == volume.name);
    lines.extend(disks.map(|disk| format!("  disk         {}", attachments::text(disk))));
    lines.extend(traffic_lines(&volume.traffic, LABEL));
    let limits = [("limits", &volume.limits), ("each client", &volume.client_limits)];
    let limits = limits.into_iter().filter_map(|(label, limits)| Some((label, limits.as_ref()?)));
    lines.extend(limits.map(|(label, limits)| format!("  {label:<11}  {}", limits.text())));
    lines.extend(volume.throttled.as_ref().map(|ThrottleStatus { pending, requests, seconds }| {
        format!("  throttled    {requests} requests for {seconds:.1} s, {pending} of them now")
    }));
    if let Some(ReservationStatus { registrants, reserved }) = &volume.reservation {
        let held = if *reserved { ", reserved" } else { "" };
        lines.push(format!("  registered   {registrants}{held}"));
    }
    lines.extend(volume.serving.iter().map(|serving| format!("  serving      {}", printable(serving))));
    lines.extend(volume.reconnects.map(|reconnects| format!("  reconnects   {reconnects}")));
    let populated = volume.populated.as_ref();
    lines.extend(
        populated.map(|now| format!("  populated    {} of {}", human_size(now.bytes), human_size(now.of))),
    );
    lines
}

/// A line about lost connections whose I/O has not ended; `None` if there are none.
fn lost_connections(indent: &str, count: usize) -> Option<String> {
    (count > 0).then(|| format!("{indent}lost         {count}, with I/O that has not ended"))
}

const VOLUME: &str = "VOLUME";
const PROTOCOLS: &str = "PROTOCOLS";
/// Maximum length of a line, in characters.
const WIDTH: usize = 80;
/// Width of the columns between the name and the protocols, with the gaps around them.
const VALUES_WIDTH: usize = 2 + 8 + 2 + 2 + 2 + 5 + 2 + 6 + 2 + 6 + 2 + 6 + 2;
/// Maximum width of the protocols for which names make room; all of them fit.
const MAX_PROTOCOLS: usize = "nbd,iscsi,nvme-tcp,srp,aoe".len();
/// Column at which the values of a volume's details begin.
const LABEL: usize = 15;
/// Clears a terminal and moves to its upper left corner.
const CLEAR_SCREEN: &str = "\x1b[H\x1b[2J";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn volume(name: &str, reads: u64) -> Value {
        json!({"name": name, "size": 1_u64 << 30, "read_only": false, "users": 2, "orphaned_connections": 0,
            "protocols": ["nbd", "iscsi", "iser", "nvme-tcp", "nvme-rdma", "srp", "aoe"],
            "targets": [format!("iqn.2026-11.blockmux:{}", "x".repeat(200))],
            "reads": reads, "read_bytes": 0, "writes": u64::MAX, "written_bytes": 0, "others": 0, "failed": 123_456})
    }

    fn status(volumes: &[Value]) -> Status {
        let mut status = json!({"connections": 3, "max_connections": 4096, "orphaned_connections": 0,
            "protocols": [{"name": "nbd", "connections": 1}, {"name": "iscsi", "connections": 0}],
            "volumes": volumes});
        status["attachments"] = json!([{"volume": "a", "state": "attached", "device": "/dev/ublkb0", "via": "ublk",
            "read_only": false, "recovered": false, "reads": 0, "read_bytes": 0, "writes": 0, "written_bytes": 0,
            "others": 0, "failed": 0}]);
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn a_table_has_at_most_80_columns_whatever_the_names_are() {
        let mut busy = volume("a", 99_999);
        busy["orphaned_connections"] = json!(7);
        busy["throttled"] = json!({"pending": 1234, "requests": 5678, "seconds": 0.5});
        busy["reservation"] = json!({"registrants": 1, "reserved": true});
        busy["populated"] = json!({"bytes": 5, "of": 1000});
        let all = status(&[busy, volume("vm-100-disk-0-production", 3), volume("b", 0)]);
        let said = table(&all, &StatusColumns::Counters);
        assert!(said.lines().all(|line| line.chars().count() <= WIDTH), "{said}");
        let mut lines = said.lines();
        assert_eq!(lines.next(), Some("connections  3 of 4096: nbd 1"));
        assert!(lines.next().unwrap().starts_with("VOLUME "), "{said}");
        let row = lines.next().unwrap();
        let words: Vec<_> = row.split_whitespace().collect();
        let expected = ["a", "1", "GiB", "rw", "2", "99999", "18.4E", "123k", "nbd,iscsi,nvme-tcp,srp,aoe"];
        assert_eq!(words, expected);
        assert_eq!(
            lines.next(),
            Some("  7 lost connections with I/O, limits throttle 1234 requests, reserved")
        );
        assert_eq!(lines.next(), Some("  disk /dev/ublkb0, populated 5 B of 1000 B"));
        assert_eq!(lines.next(), Some("vm-100-disk-0-production"));
        assert!(lines.next().unwrap().starts_with("   "), "{said}");
    }

    #[test]
    fn rates_are_those_between_two_answers() {
        let (before, now) = (status(&[volume("a", 100)]), status(&[volume("a", 300), volume("new", 5)]));
        let rates = StatusRates::new(&before, Duration::from_secs(2));
        assert_eq!(rates.of(&now.volumes[0]), Some([100, 0]));
        assert_eq!(rates.of(&now.volumes[1]), None);
        let again = StatusRates::new(&now, Duration::from_secs(1));
        assert_eq!(again.of(&before.volumes[0]), None, "the volume was exported anew");
        let said = table(&now, &StatusColumns::Rates(Some(rates)));
        assert!(said.contains("r/s") && said.contains("     100       0 "), "{said}");
    }

    #[test]
    fn a_filter_chooses_a_name_or_all_names_with_a_text() {
        let all = || status(&[volume("a", 0), volume("ab", 0), volume("c", 0)]);
        let names = |filter| {
            let status = chosen(all(), filter);
            status.volumes.iter().map(|volume| volume.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["a", "ab", "c"]);
        assert_eq!(names(Some("a")), ["a"]);
        assert_eq!(names(Some("b")), ["ab"]);
        assert!(names(Some("x")).is_empty());
    }

    #[test]
    fn the_details_of_a_volume_have_at_most_80_columns() {
        let all = status(&[volume("a", 12)]);
        let lines = details(&all.volumes[0], &all);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{lines:#?}");
        assert_eq!(lines[1], "  protocols    nbd, iscsi, iser, nvme-tcp, nvme-rdma, srp, aoe");
        assert!(lines[2].starts_with("  target       iqn.2026-11.blockmux:xxx"), "{lines:#?}");
        assert!(lines.contains(&"  reads        12 (0 B)".to_owned()), "{lines:#?}");
    }

    #[test]
    fn counts_have_at_most_six_columns() {
        for (count, expected) in [
            (0, "0"),
            (99_999, "99999"),
            (100_000, "100k"),
            (999_499, "999k"),
            (999_500, "1.0M"),
            (12_345_678, "12.3M"),
        ] {
            assert_eq!(short_count(count), expected);
        }
    }
}
