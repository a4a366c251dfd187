//! NBD: servers, clients and goals of the comparison.
//!
//! Every server listens on TCP loopback and serves one export of the same size in memory: its own
//! memory, or a file in memory that all servers of files share. All other options are the programs'
//! defaults. So Blockmux runs one core for each CPU that it may use, which is one core if servers
//! are pinned to one CPU.

use super::client::{Client, Fio, Generator, QemuImg, SLEEPING, SPINNING};
use super::figures::{Row, Rows};
use super::goals::{Bound, Goal};
use super::matrix::{self, Cell, Rw, deep};
use super::ours::{self, ALWAYS, BLOCKMUX, CellGoals, EXPORT, NEVER};
use super::plan::Protocol;
use super::server::{ProgramOrigin, Server, ServerParameters, peer};
use anyhow::Result;
use std::fs;
use std::process::Command;

/// NBD over TCP.
pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    servers: SERVERS,
    clients: || {
        let engine = |url: &str| vec!["--ioengine=nbd".to_owned(), format!("--uri={url}")];
        let clients: Vec<Box<dyn Client>> =
            vec![Box::new(Generator), Box::new(Fio { engine }), Box::new(QemuImg)];
        clients
    },
    cells: matrix::cells,
    mtus: &[],
    goals,
};

const SERVERS: &[Server] = &[
    ours::adaptive(url, serve),
    ours::always(url, serve),
    ours::never(url, serve),
    Server { has_own_memory: true, ..peer(NBDKIT, "nbdkit", url, nbdkit) },
    Server { is_daemon: true, ..peer("nbd-server", "nbd-server", url, nbd_server) },
    peer("qemu-nbd", "qemu-utils", url, qemu_nbd),
    peer("qemu-storage-daemon", "qemu-system-common", url, qemu_storage_daemon),
];

/// The URL of the volume that Blockmux and its peers serve.
pub(crate) fn url(port: u16) -> String {
    format!("nbd://127.0.0.1:{port}/{EXPORT}")
}

/// Blockmux serves its volume over NBD.
pub(crate) fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    ours::serve(place, command, "--nbd")
}

fn nbdkit(place: &ServerParameters, command: &mut Command) -> Result<()> {
    command.args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &place.port.to_string()]);
    command.args(["memory", &place.size.to_string()]);
    Ok(())
}

fn nbd_server(place: &ServerParameters, command: &mut Command) -> Result<()> {
    let config = place.dir.join("config");
    let (port, file) = (place.port, place.file.display());
    let text = format!(
        "[generic]\nlistenaddr = 127.0.0.1\nport = {port}\n[{EXPORT}]\nexportname = {file}\nflush = true\nfua = true\n"
    );
    fs::write(&config, text)?;
    // In the foreground (-d), nbd-server ends after one client.
    command.arg("-C").arg(config).arg("-p").arg(place.dir.join("pid"));
    Ok(())
}

fn qemu_nbd(place: &ServerParameters, command: &mut Command) -> Result<()> {
    command.args(["--bind=127.0.0.1", &format!("--port={}", place.port), "--persistent"]);
    command.args([&format!("--shared={MAX_CONNECTIONS}"), &format!("--export-name={EXPORT}")]);
    // Servers lock the file, but only one of them runs at a time.
    command
        .arg("--image-opts")
        .arg(format!("driver=raw,file.driver=file,file.locking=off,file.filename={}", place.file.display()));
    Ok(())
}

fn qemu_storage_daemon(place: &ServerParameters, command: &mut Command) -> Result<()> {
    let file = place.file.display();
    command
        .arg("--blockdev")
        .arg(format!("driver=file,node-name={EXPORT},filename={file},locking=off"))
        .arg("--nbd-server")
        .arg(format!(
            "addr.type=inet,addr.host=127.0.0.1,addr.port={},max-connections={MAX_CONNECTIONS}",
            place.port
        ))
        .arg("--export")
        .arg(format!("type=nbd,id=export,node-name={EXPORT},name={EXPORT},writable=on"));
    Ok(())
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let peers: Vec<&str> = SERVERS
        .iter()
        .filter(|server| server.program != ProgramOrigin::Blockmux)
        .map(|server| server.name)
        .collect();
    let deep: Vec<Goal> = deep().into_iter().flat_map(|cell| deep_goals(rows, &peers, cell)).collect();
    [deep, large_goals(rows, &peers), latency_goals(rows)].concat()
}

/// Goals for 4 KiB at depth 32.
fn deep_goals(rows: &Rows, peers: &[&str], cell: Cell) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    goals.add("IOPS relative to nbdkit", Bound::AtLeast(4.0), goals.iops(BLOCKMUX), goals.iops(NBDKIT));
    goals.add(
        "server CPU per I/O relative to nbdkit",
        Bound::AtMost(0.25),
        goals.cpu(BLOCKMUX),
        goals.cpu(NBDKIT),
    );
    goals.add_shares_of_ceilings();
    let (ours, best) = (rows.iops(FIO, BLOCKMUX, cell), rows.best(FIO, peers, cell));
    goals.add("fio, relative to best peer", Bound::AtLeast(1.3), ours, best);
    goals.all()
}

fn large_goals(rows: &Rows, peers: &[&str]) -> Vec<Goal> {
    let cell = Cell::new(Rw::Read, 1 << 20, 8, 1);
    let goal = |client| {
        let what = format!("{}: {client}, relative to best peer", cell.short());
        let (ours, best) = (rows.iops(client, BLOCKMUX, cell), rows.best(client, peers, cell));
        Goal::ratio(what, Bound::AtLeast(1.0), ours, best)
    };
    [OURS, FIO, "qemu-img"].map(goal).to_vec()
}

/// Goals for latency at depth 1, with the same polling policy as the ceiling.
fn latency_goals(rows: &Rows) -> Vec<Goal> {
    let mut goals = Vec::new();
    for rw in [Rw::RandRead, Rw::RandWrite] {
        let cell = Cell::new(rw, 4 << 10, 1, 1);
        let latency = |row: Option<&Row>| row?.median(|sample| sample.mean_us);
        for (poll, server, ceiling) in [("always", ALWAYS, SPINNING), ("never", NEVER, SLEEPING)] {
            let what = format!("{}: latency, {poll}, relative to {ceiling}", cell.short());
            let of = |name| latency(rows.get(OURS, name, cell));
            goals.push(Goal::ratio(what, Bound::AtMost(1.1), of(server), of(ceiling)));
        }
    }
    goals
}

const MAX_CONNECTIONS: u32 = 16;
const OURS: &str = "blockmux";
const FIO: &str = "fio";
const NBDKIT: &str = "nbdkit";

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::*;

    #[test]
    fn the_goals_compare_the_right_rows() {
        let mut rows = Rows::default();
        let deep = Cell::new(Rw::RandRead, 4 << 10, 32, 1);
        for (client, server, iops, server_us) in [
            (OURS, BLOCKMUX, 900.0, 1.0),
            (OURS, ALWAYS, 950.0, 1.0),
            (OURS, NEVER, 600.0, 1.0),
            (OURS, NBDKIT, 100.0, 8.0),
            (OURS, SPINNING, 1000.0, 1.0),
            (OURS, SLEEPING, 800.0, 1.0),
            (FIO, BLOCKMUX, 150.0, 1.0),
            (FIO, "nbd-server", 60.0, 9.0),
            (FIO, "qemu-nbd", 100.0, 9.0),
        ] {
            rows.add(client, server, deep, Sample { iops, server_us: Some(server_us), ..Sample::default() });
        }
        let one = Cell { iodepth: 1, ..deep };
        for (server, mean_us) in [(ALWAYS, 11.0), (SPINNING, 10.0)] {
            rows.add(OURS, server, one, Sample { iops: 1.0, mean_us: Some(mean_us), ..Sample::default() });
        }
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        let expected = [(9.0, true), (0.125, true), (0.95, true), (0.75, false), (1.5, true), (1.1, true)];
        assert_eq!(found, expected);
    }

    #[test]
    fn only_policies_other_than_the_default_are_limited_to_our_generator() {
        let alone: Vec<_> =
            SERVERS.iter().filter(|server| server.is_for_generator).map(|server| server.name).collect();
        assert_eq!(alone, [ALWAYS, NEVER]);
    }
}
