//! `blockmux ctl sessions`: logged-in sessions and their I/O counters.

use crate::api::status::{SessionStatus, TrafficStatus};
use crate::output::printable;
use blockmux_volume::units::human_size;

/// Text for people: a block for each initiator of a target from one machine, with the sums of its
/// connections.
pub(super) fn text(sessions: Vec<SessionStatus>) -> String {
    let mut blocks: Vec<(SessionStatus, u64)> = Vec::new();
    for session in sessions {
        let found = blocks.iter_mut().find(|(block, _)| is_same_initiator(block, &session));
        match found {
            Some((block, connections)) => {
                block.traffic.add(&session.traffic);
                *connections += 1;
            }
            None => blocks.push((session, 1)),
        }
    }
    if blocks.is_empty() {
        return "no session is logged in".to_owned();
    }
    blocks.iter().map(block_text).collect::<Vec<_>>().join("\n")
}

fn block_text((session, connections): &(SessionStatus, u64)) -> String {
    let SessionStatus { protocol, address, since, .. } = session;
    let many = if *connections == 1 { String::new() } else { format!("  {connections} connections") };
    let mut lines =
        vec![format!("{protocol}  {}{many}", printable(address)), format!("  since      {since}")];
    lines.extend(name_lines("initiator", &session.initiator, LABEL));
    lines.extend(name_lines("target", &session.target, LABEL));
    lines.extend(traffic_lines(&session.traffic, LABEL));
    lines.join("\n")
}

/// A name on lines of at most 80 columns, which begins at column `at`; no line if it is empty.
pub(super) fn name_lines(label: &str, name: &str, at: usize) -> Vec<String> {
    let letters: Vec<char> = printable(name).chars().collect();
    let pieces = letters.chunks(80 - at).enumerate();
    let line = |(nth, piece): (usize, &[char])| {
        let label = if nth == 0 { format!("  {label}") } else { String::new() };
        format!("{label:<at$}{}", piece.iter().collect::<String>())
    };
    pieces.map(line).collect()
}

/// A line for each counter; values begin at column `at`.
pub(super) fn traffic_lines(traffic: &TrafficStatus, at: usize) -> [String; 4] {
    let moved = |count: u64, bytes: u64| format!("{count} ({})", human_size(bytes));
    [
        ("reads", moved(traffic.reads, traffic.read_bytes)),
        ("writes", moved(traffic.writes, traffic.written_bytes)),
        ("others", traffic.others.to_string()),
        ("failed", traffic.failed.to_string()),
    ]
    .map(|(label, value)| format!("{:<at$}{value}", format!("  {label}")))
}

/// Whether two connections belong to one initiator of one target at one address.
fn is_same_initiator(one: &SessionStatus, other: &SessionStatus) -> bool {
    let who = |session: &SessionStatus| {
        let ip = session.address.rsplit_once(':').map_or(&*session.address, |(ip, _)| ip).to_owned();
        (session.protocol.clone(), session.initiator.clone(), session.target.clone(), ip)
    };
    // Clients without names cannot be recognized.
    !one.initiator.is_empty() && who(one) == who(other)
}

/// Column at which values begin.
const LABEL: usize = 13;

#[cfg(test)]
mod tests {
    use super::*;

    fn session(initiator: &str, port: u16) -> SessionStatus {
        SessionStatus {
            protocol: "nvme-tcp".to_owned(),
            initiator: initiator.to_owned(),
            target: "nqn.2026-11.blockmux:disk0".to_owned(),
            address: format!("192.0.2.7:{port}"),
            since: "2026-11-23T03:34:22Z".to_owned(),
            traffic: TrafficStatus { reads: 3, read_bytes: 4096, others: 1, ..TrafficStatus::default() },
        }
    }

    #[test]
    fn connections_of_one_initiator_are_one_block_of_80_columns() {
        let long = format!("nqn.2014-08.org.nvmexpress:{}", "x".repeat(196));
        let said = text(vec![session(&long, 1), session(&long, 2), session("other", 3)]);
        assert!(said.lines().all(|line| line.chars().count() <= 80), "{said}");
        assert!(
            said.starts_with("nvme-tcp  192.0.2.7:1  2 connections\n  since      2026-11-23T03:34:22Z\n")
        );
        assert!(said.contains("  reads      6 (8 KiB)\n"), "{said}");
        assert_eq!(said.matches("nvme-tcp").count(), 2, "{said}");
        assert_eq!(text(Vec::new()), "no session is logged in");
    }
}
