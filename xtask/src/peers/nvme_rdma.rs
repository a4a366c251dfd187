//! NVMe/RDMA over iWARP: Blockmux compared with its own iSER, iSCSI and NVMe/TCP, and the goals of
//! that comparison.
//!
//! No other program serves NVMe/RDMA without an RDMA device, so the peers are the protocols that
//! share its layers: iSER has the same queue pairs, NVMe/TCP the same controller. All of them
//! alternate in one run, measured with our own generator.

use super::client::{Client, Generator};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::{Cell, Rw, deep};
use super::ours::{self, BLOCKMUX, CellGoals};
use super::plan::Protocol;
use super::server::{Server, ServerParameters};
use super::{iscsi, iser, nvme};
use anyhow::Result;
use std::process::Command;

/// NVMe over RDMA.
pub(crate) const NVME_RDMA: Protocol = Protocol::of_our_own("nvme-rdma", SERVERS, goals);

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    Server { name: ISER, is_for_generator: true, ..ours::adaptive(iser::url, iser::serve) },
    Server { name: ISCSI, is_for_generator: true, ..ours::adaptive(iscsi::lun_0, iser::serve) },
    Server { name: OVER_TCP, is_for_generator: true, ..ours::adaptive(nvme::url, serve) },
];

/// Serves NVMe/TCP, and with it NVMe/RDMA, which every NVMe/TCP port serves.
fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    ours::serve(place, command, "--nvme-rdma")
}

fn url(port: u16) -> String {
    nvme::url(port).replace("nvme+tcp://", "nvme+rdma://") + "?rdma=iwarp"
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let small = deep().into_iter().flat_map(|cell| beside(rows, cell, "iSER", ISER, 0.95));
    let large = LARGE.into_iter().flat_map(|cell| beside(rows, cell, "NVMe/TCP", OVER_TCP, 1.0));
    let single = [Rw::RandRead, Rw::RandWrite].into_iter().map(|rw| latency(rows, rw));
    small.chain(large).chain(single).collect()
}

fn beside(rows: &Rows, cell: Cell, title: &str, server: &str, least: f64) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    let (ours, theirs) = (goals.iops(BLOCKMUX), goals.iops(server));
    goals.add(&format!("IOPS relative to {title}'s"), Bound::AtLeast(least), ours, theirs);
    goals.all()
}

/// Goal for mean latency at depth 1.
fn latency(rows: &Rows, rw: Rw) -> Goal {
    let cell = Cell::new(rw, 4 << 10, 1, 1);
    let of = |server| rows.get(Generator.name(), server, cell)?.median(|sample| sample.mean_us);
    let what = format!("{}: latency relative to iSER's", cell.short());
    Goal::ratio(what, Bound::AtMost(1.1), of(BLOCKMUX), of(ISER))
}

const ISER: &str = "blockmux-iser";
const ISCSI: &str = "blockmux-iscsi";
const OVER_TCP: &str = "blockmux-nvme-tcp";
const LARGE: [Cell; 4] = iser::LARGE;

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::super::matrix::whole;
    use super::*;

    #[test]
    fn small_io_is_compared_with_iser_and_large_io_with_nvme_tcp() {
        let mut rows = Rows::default();
        let mut add = |server, cell, iops, mean_us| {
            let sample = Sample { iops, mean_us: Some(mean_us), ..Sample::default() };
            rows.add(Generator.name(), server, cell, sample);
        };
        let [small, single] = [32, 1].map(|iodepth| Cell::new(Rw::RandWrite, 4 << 10, iodepth, 1));
        for (server, iops) in [(BLOCKMUX, 480.0), (ISER, 500.0), (ISCSI, 900.0), (OVER_TCP, 600.0)] {
            add(server, small, iops, 1.0);
            add(server, LARGE[3], iops, 1.0);
        }
        add(BLOCKMUX, single, 1.0, 24.0);
        add(ISER, single, 1.0, 20.0);
        add(OVER_TCP, single, 1.0, 10.0);
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        assert_eq!(found, [(0.96, true), (0.8, false), (1.2, false)]);
    }

    #[test]
    fn the_goals_are_about_cells_that_are_measured() {
        assert!(LARGE.iter().chain(&deep()).all(|cell| whole().contains(cell)));
    }

    #[test]
    fn each_server_has_a_url_of_its_protocol() {
        let urls: Vec<String> = SERVERS[2..].iter().map(|server| (server.url)(7)).collect();
        assert_eq!(
            urls,
            [
                "nvme+rdma://127.0.0.1:7/nqn.2026-11.blockmux:disk0/1?rdma=iwarp",
                "iser://127.0.0.1:7/iqn.2026-11.blockmux:disk0/0?rdma=iwarp",
                "iscsi://127.0.0.1:7/iqn.2026-11.blockmux:disk0/0",
                "nvme+tcp://127.0.0.1:7/nqn.2026-11.blockmux:disk0/1",
            ]
        );
    }
}
