//! SRP over iWARP: Blockmux compared with its own iSER, iSCSI and NVMe/TCP, and the goals of that
//! comparison.
//!
//! No other program serves SRP without an RDMA device, so the peers are the protocols that share
//! its layers: iSER has the same queue pairs and the same commands. All of them alternate in one
//! run, measured with our own generator.

use super::client::{Client, Generator};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::{Cell, Rw, deep};
use super::ours::{self, BLOCKMUX, CellGoals, EXPORT};
use super::plan::Protocol;
use super::server::{Server, ServerParameters};
use super::{iscsi, iser, nvme};
use anyhow::{Context, Result};
use std::fs;
use std::process::Command;

/// SRP over RDMA.
pub(crate) const SRP: Protocol = Protocol::of_our_own("srp", SERVERS, goals);

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    Server { name: ISER, is_for_generator: true, ..ours::adaptive(iser::url, iser::serve) },
    Server { name: ISCSI, is_for_generator: true, ..ours::adaptive(iscsi::lun_0, iser::serve) },
    Server { name: NVME_TCP, is_for_generator: true, ..ours::adaptive(nvme::url, nvme::serve) },
];

/// Serves with a config file, because the identifier of a default target port depends on the
/// machine.
fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    let config = place.dir.join("srp.toml");
    let content = format!(
        "[[volume]]\nname = '{EXPORT}'\nspec = 'mem:{}'\n[[srp_target]]\nport_id = '{TARGET}'\n\
         luns = {{ 0 = '{EXPORT}' }}\n",
        place.size
    );
    fs::write(&config, content).with_context(|| config.display().to_string())?;
    command.arg("serve").arg("--config").arg(config);
    ours::listen(place, command, "--srp");
    Ok(())
}

fn url(port: u16) -> String {
    format!("srp://127.0.0.1:{port}/{TARGET}/0?rdma=iwarp")
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let small = deep().into_iter().flat_map(|cell| beside(rows, cell, "iSER", ISER, 0.95));
    let large = iser::LARGE.into_iter().flat_map(|cell| beside(rows, cell, "NVMe/TCP", NVME_TCP, 1.0));
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

const TARGET: &str = "0x11111111111111112222222222222222";
const ISER: &str = "blockmux-iser";
const ISCSI: &str = "blockmux-iscsi";
const NVME_TCP: &str = "blockmux-nvme-tcp";

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::*;

    #[test]
    fn small_io_is_compared_with_iser_and_large_io_with_nvme_tcp() {
        let mut rows = Rows::default();
        let mut add = |server, cell, iops, mean_us| {
            let sample = Sample { iops, mean_us: Some(mean_us), ..Sample::default() };
            rows.add(Generator.name(), server, cell, sample);
        };
        let [small, single] = [32, 1].map(|iodepth| Cell::new(Rw::RandRead, 4 << 10, iodepth, 1));
        for (server, iops) in [(BLOCKMUX, 490.0), (ISER, 500.0), (ISCSI, 900.0), (NVME_TCP, 400.0)] {
            add(server, small, iops, 1.0);
            add(server, iser::LARGE[0], iops, 1.0);
        }
        add(BLOCKMUX, single, 1.0, 24.0);
        add(ISER, single, 1.0, 20.0);
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        assert_eq!(found, [(0.98, true), (1.225, true), (1.2, false)]);
    }

    #[test]
    fn each_server_has_a_url_of_its_protocol() {
        let urls: Vec<String> = SERVERS[2..].iter().map(|server| (server.url)(7)).collect();
        assert_eq!(urls[0], format!("srp://127.0.0.1:7/{TARGET}/0?rdma=iwarp"));
        let schemes: Vec<&str> = urls.iter().map(|url| url.split("://").next().unwrap()).collect();
        assert_eq!(schemes, ["srp", "iser", "iscsi", "nvme+tcp"]);
    }
}
