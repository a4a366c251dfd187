//! ATA over Ethernet: Blockmux compared with vblade over a veth pair between two network
//! namespaces, at MTUs of 1500 and 9000.
//!
//! AoE has no ports, so the port of a [`ServerParameters`] is a shelf here. vblade gets more
//! buffers than its default, because a window of 32 needs as many. The ceiling is `frame_echo`, an
//! example of the crate `lab`.

use super::client::{Client, Generator};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::{Cell, Rw};
use super::network::VETH;
use super::ours::{self, BLOCKMUX, CellGoals, EXPORT};
use super::plan::Protocol;
use super::server::{Server, ServerParameters, peer};
use anyhow::Result;
use std::process::Command;

/// AoE over a veth pair.
pub(crate) const AOE: Protocol = Protocol {
    name: "aoe",
    servers: SERVERS,
    clients: || {
        let clients: Vec<Box<dyn Client>> = vec![Box::new(Generator)];
        clients
    },
    cells,
    mtus: &[1500, 9000],
    goals,
};

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    peer(VBLADE, "vblade", url, vblade),
];

fn url(port: u16) -> String {
    format!("aoe://{VETH}/e{port}.0")
}

fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    command.arg("serve").arg(format!("{EXPORT}=mem:{}", place.size)).args(["--aoe", VETH]);
    command.args(["--aoe-shelf", &place.port.to_string(), "--poll", place.poll]);
    if place.poll == "always" {
        // One CPU is left for the client, as over TCP.
        command.args(["--cores", "1"]);
    }
    Ok(())
}

fn vblade(place: &ServerParameters, command: &mut Command) -> Result<()> {
    command.args(["-b", "128", &place.port.to_string(), "0", VETH]).arg(place.file);
    Ok(())
}

fn cells(is_quick: bool) -> Vec<Cell> {
    let shapes = [
        (Rw::RandRead, 4 << 10),
        (Rw::RandWrite, 4 << 10),
        (Rw::RandRead, 64 << 10),
        (Rw::RandWrite, 64 << 10),
        (Rw::Read, 1 << 20),
        (Rw::Write, 1 << 20),
    ];
    let depths: &[u32] = if is_quick { &[32] } else { &[1, 16, 32] };
    shapes
        .into_iter()
        .flat_map(|(rw, bs)| depths.iter().map(move |&depth| Cell::new(rw, bs, depth, 1)))
        .collect()
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let small = |cell: &Cell| cell.bs == 4 << 10 && cell.iodepth == 32;
    let of = |cell: Cell| {
        let mut goals = CellGoals::new(rows, cell);
        goals.add("IOPS relative to vblade", Bound::AtLeast(4.0), goals.iops(BLOCKMUX), goals.iops(VBLADE));
        goals.add(
            "server CPU per I/O relative to vblade",
            Bound::AtMost(0.25),
            goals.cpu(BLOCKMUX),
            goals.cpu(VBLADE),
        );
        goals.add_shares_of_ceilings();
        goals.all()
    };
    cells(true).into_iter().filter(small).flat_map(of).collect()
}

/// Goals for small frames relative to large ones: data for each second of the server's CPU time.
pub(crate) fn across_mtus(small: &Rows, large: &Rows) -> Vec<Goal> {
    let of = |cell: Cell| {
        let data = |rows: &Rows| CellGoals::new(rows, cell).cpu(BLOCKMUX).map(|us| 1.0 / us);
        let what = format!("{}: data per server CPU second, MTU 1500 relative to 9000", cell.short());
        Goal::ratio(what, Bound::AtLeast(0.5), data(small), data(large))
    };
    cells(true).into_iter().filter(|cell| cell.bs > 4 << 10).map(of).collect()
}

const VBLADE: &str = "vblade";

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::*;
    use std::path::Path;

    #[test]
    fn the_port_of_a_place_is_a_shelf() {
        for server in SERVERS {
            let place = ServerParameters {
                dir: "/".into(),
                file: Path::new("f"),
                port: 34567,
                size: 1 << 20,
                poll: server.poll,
            };
            let mut command = Command::new("server");
            (server.arguments)(&place, &mut command).unwrap();
            assert!(format!("{command:?}").contains("\"34567\""), "{}", server.name);
            assert_eq!((server.url)(34567), "aoe://veth/e34567.0");
        }
    }

    #[test]
    fn small_frames_are_compared_with_large_ones_by_the_servers_cpu_time() {
        let rows = |server_us| {
            let mut rows = Rows::default();
            let cell = Cell::new(Rw::Read, 1 << 20, 32, 1);
            let sample = Sample { iops: 1.0, server_us: Some(server_us), ..Sample::default() };
            rows.add("blockmux", BLOCKMUX, cell, sample);
            rows
        };
        let found: Vec<_> =
            across_mtus(&rows(500.0), &rows(200.0)).iter().filter_map(|goal| goal.found).collect();
        assert_eq!(found, [0.4]);
    }
}
