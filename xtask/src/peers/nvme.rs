//! NVMe/TCP: Blockmux on both sides compared with the ceilings, and the goals of that comparison.
//!
//! No Debian package has a user-space target of NVMe/TCP. SPDK has one, which needs huge pages and
//! its own core. Its share of the spinning ceiling was measured once on a similar machine. The
//! goals for Blockmux with `--poll always` are these shares times 1.2, or times 1.1 for long reads.
//!
//! Each connection of a cell is an association with one I/O queue. `blockmux-digests` has header
//! and data digests.

use super::client::{Client, Generator, SPINNING};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::{self, Cell, Rw};
use super::ours::{self, ALWAYS, BLOCKMUX, CellGoals, EXPORT};
use super::plan::Protocol;
use super::server::{Server, ServerParameters};
use anyhow::Result;
use std::process::Command;

/// NVMe over TCP.
pub(crate) const NVME: Protocol = Protocol::of_our_own("nvme", SERVERS, goals);

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    Server {
        name: DIGESTS,
        is_for_generator: true,
        ..ours::adaptive(|port| url(port) + "?hdr_digest=on&data_digest=on", serve)
    },
];

pub(super) fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    ours::serve(place, command, "--nvme-tcp")
}

pub(super) fn url(port: u16) -> String {
    format!("nvme+tcp://127.0.0.1:{port}/nqn.2026-11.blockmux:{EXPORT}/1")
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let of_spdk = SPDK.iter().flat_map(|(cell, share, times)| beside_spdk(rows, *cell, share * times));
    let small = matrix::deep().into_iter().flat_map(|cell| deep_goals(rows, cell));
    let [read, write] = [Rw::RandRead, Rw::RandWrite].map(|rw| Cell::new(rw, 4 << 10, 32, 1));
    let wide = [read, write].into_iter().flat_map(|cell| wide_goals(rows, cell));
    of_spdk.chain(small).chain(wide).chain(latency(rows)).collect()
}

fn beside_spdk(rows: &Rows, cell: Cell, least: f64) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    let what = "always, relative to spinning ceiling, goal from SPDK's share";
    goals.add(what, Bound::AtLeast(least), goals.iops(ALWAYS), goals.iops(SPINNING));
    goals.all()
}

/// Goals for 4 KiB at depth 32.
fn deep_goals(rows: &Rows, cell: Cell) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    goals.add_shares_of_ceilings();
    goals.add("digests relative to none", Bound::AtLeast(0.7), goals.iops(DIGESTS), goals.iops(BLOCKMUX));
    goals.all()
}

/// Goals for four queues relative to one: they must not be slower.
fn wide_goals(rows: &Rows, cell: Cell) -> Vec<Goal> {
    let narrow = CellGoals::new(rows, cell).iops(BLOCKMUX);
    let mut goals = CellGoals::new(rows, Cell { numjobs: 4, ..cell });
    goals.add("IOPS relative to one queue's", Bound::AtLeast(1.0), goals.iops(BLOCKMUX), narrow);
    goals.all()
}

/// Goal for the latency of reads at depth 1 if both sides poll.
fn latency(rows: &Rows) -> Option<Goal> {
    let cell = Cell::new(Rw::RandRead, 4 << 10, 1, 1);
    let of = |server| rows.get(Generator.name(), server, cell)?.median(|sample| sample.mean_us);
    let what = format!("{}: always, latency relative to spinning ceiling's", cell.short());
    Some(Goal::ratio(what, Bound::AtMost(1.1), of(ALWAYS), of(SPINNING)))
}

const DIGESTS: &str = "blockmux-digests";
/// Shares of the spinning ceiling that SPDK's target reached with `spdk_nvme_perf`, and the factor
/// of the goal.
const SPDK: [(Cell, f64, f64); 5] = [
    (Cell::new(Rw::RandRead, 4 << 10, 1, 1), 0.79, 1.0),
    (Cell::new(Rw::RandRead, 4 << 10, 32, 1), 0.64, 1.2),
    (Cell::new(Rw::RandWrite, 4 << 10, 32, 1), 0.73, 1.2),
    (Cell::new(Rw::RandRead, 4 << 10, 128, 1), 0.62, 1.2),
    (Cell::new(Rw::Read, 1 << 20, 8, 1), 1.14, 1.1),
];

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::super::matrix::whole;
    use super::*;

    #[test]
    fn spinning_is_compared_with_spdks_share_and_digests_with_none() {
        let mut rows = Rows::default();
        let mut add = |server, cell, iops, mean_us| {
            let sample = Sample { iops, mean_us: Some(mean_us), ..Sample::default() };
            rows.add(Generator.name(), server, cell, sample);
        };
        let single = SPDK[0].0;
        add(ALWAYS, single, 90.0, 12.0);
        add(SPINNING, single, 100.0, 10.0);
        let deep = SPDK[1].0;
        for (server, iops) in [(BLOCKMUX, 600.0), (ALWAYS, 700.0), (SPINNING, 1000.0), (DIGESTS, 450.0)] {
            add(server, deep, iops, 1.0);
        }
        add(BLOCKMUX, Cell { numjobs: 4, ..deep }, 660.0, 1.0);
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        let (of_spdk, of_ceiling) = ([(0.9, true), (0.7, false)], [(0.7, false), (0.75, true)]);
        assert_eq!(found, [&of_spdk[..], &of_ceiling, &[(1.1, true), (1.2, false)]].concat());
    }

    #[test]
    fn the_goals_are_about_cells_that_are_measured() {
        assert!(SPDK.iter().all(|(cell, ..)| whole().contains(cell)));
    }
}
