//! iSER over iWARP: Blockmux compared with its own iSCSI, and the goals of that comparison.
//!
//! No other program supports iSER without an RDMA device. So the peers are `blockmux-iscsi`, the
//! same volume over plain TCP, which alternates with iSER in one run, and the ceilings.
//! `blockmux-crc` has CRC32C on its frames; the others have none. Our own generator measures all of
//! them.

use super::client::{Client, Generator};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::iscsi;
use super::matrix::{Cell, Rw, deep};
use super::ours::{self, BLOCKMUX, CellGoals};
use super::plan::Protocol;
use super::server::{Server, ServerParameters};
use anyhow::Result;
use std::process::Command;

/// iSCSI over RDMA.
pub(crate) const ISER: Protocol = Protocol::of_our_own("iser", SERVERS, goals);

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    Server { name: CRC, is_for_generator: true, ..ours::adaptive(|port| url(port) + "&crc=on", serve) },
    Server { name: OVER_TCP, is_for_generator: true, ..ours::adaptive(iscsi::lun_0, serve) },
];

/// Serves iSCSI, and with it iSER, which every iSCSI port serves.
pub(super) fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    ours::serve(place, command, "--iser")
}

pub(super) fn url(port: u16) -> String {
    iscsi::lun_0(port).replace("iscsi://", "iser://") + "?rdma=iwarp"
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let small = deep().into_iter().flat_map(|cell| over_tcp(rows, cell, 1.0));
    let large = LARGE.into_iter().flat_map(|cell| over_tcp(rows, cell, 1.1));
    let single = [Rw::RandRead, Rw::RandWrite].into_iter().map(|rw| latency(rows, rw));
    small.chain(large).chain(single).collect()
}

/// Goals for IOPS relative to iSCSI over TCP, and with CRCs relative to none.
fn over_tcp(rows: &Rows, cell: Cell, least: f64) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    goals.add("IOPS relative to iSCSI's", Bound::AtLeast(least), goals.iops(BLOCKMUX), goals.iops(OVER_TCP));
    goals.add("CRCs relative to none", Bound::AtLeast(0.85), goals.iops(CRC), goals.iops(BLOCKMUX));
    goals.all()
}

/// Goal for mean latency at depth 1.
fn latency(rows: &Rows, rw: Rw) -> Goal {
    let cell = Cell::new(rw, 4 << 10, 1, 1);
    let of = |server| rows.get(Generator.name(), server, cell)?.median(|sample| sample.mean_us);
    let what = format!("{}: latency relative to iSCSI's", cell.short());
    Goal::ratio(what, Bound::AtMost(1.15), of(BLOCKMUX), of(OVER_TCP))
}

const CRC: &str = "blockmux-crc";
const OVER_TCP: &str = "blockmux-iscsi";
pub(super) const LARGE: [Cell; 4] = [
    Cell::new(Rw::RandRead, 64 << 10, 32, 1),
    Cell::new(Rw::RandWrite, 64 << 10, 32, 1),
    Cell::new(Rw::Read, 1 << 20, 8, 1),
    Cell::new(Rw::Write, 1 << 20, 8, 1),
];

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::super::matrix::whole;
    use super::*;

    #[test]
    fn iser_is_compared_with_iscsi_and_crcs_with_none() {
        let mut rows = Rows::default();
        let mut add = |server, cell, iops, mean_us| {
            let sample = Sample { iops, mean_us: Some(mean_us), ..Sample::default() };
            rows.add(Generator.name(), server, cell, sample);
        };
        let [small, single] = [32, 1].map(|iodepth| Cell::new(Rw::RandWrite, 4 << 10, iodepth, 1));
        for (server, iops) in [(BLOCKMUX, 500.0), (OVER_TCP, 400.0), (CRC, 400.0)] {
            add(server, small, iops, 1.0);
            add(server, LARGE[3], iops, 1.0);
        }
        add(BLOCKMUX, single, 1.0, 24.0);
        add(OVER_TCP, single, 1.0, 20.0);
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        assert_eq!(found, [(1.25, true), (0.8, false), (1.25, true), (0.8, false), (1.2, false)]);
    }

    #[test]
    fn the_goals_are_about_cells_that_are_measured() {
        assert!(LARGE.iter().all(|cell| whole().contains(cell)));
    }

    #[test]
    fn both_urls_name_the_same_unit() {
        assert_eq!(url(7), "iser://127.0.0.1:7/iqn.2026-11.blockmux:disk0/0?rdma=iwarp");
        assert_eq!((SERVERS[4].url)(7), "iscsi://127.0.0.1:7/iqn.2026-11.blockmux:disk0/0");
    }
}
