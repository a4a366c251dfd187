//! NBD: who serves it, who asks, and what the comparison is to come to.
//!
//! Every server listens on TCP loopback and serves one export of the same size in memory: its own, or the one file in
//! memory that the servers of files share. Options are the programs' defaults but for what that takes. So Blockmux runs
//! a core for each processor that it may use, as it does by default; bound to one processor as all servers are, that is
//! one core.

use super::client::{Client, Fio, Generator, QemuImg, SLEEPING, SPINNING};
use super::figures::{Row, Rows};
use super::goals::{Bound, Goal};
use super::matrix::{Cell, Rw};
use super::plan::Protocol;
use super::server::{Place, Program, Server};
use anyhow::Result;
use std::fs;
use std::process::Command;

/// NBD over TCP.
pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    url: |port| format!("nbd://127.0.0.1:{port}/{EXPORT}"),
    servers: SERVERS,
    clients: || {
        let engine = |url: &str| vec!["--ioengine=nbd".to_owned(), format!("--uri={url}")];
        let clients: Vec<Box<dyn Client>> =
            vec![Box::new(Generator), Box::new(Fio { engine }), Box::new(QemuImg)];
        clients
    },
    goals,
};

const SERVERS: &[Server] = &[
    blockmux(BLOCKMUX, "adaptive", |place, command| serve(place, command, "adaptive")),
    Server {
        is_for_generator: true,
        ..blockmux(ALWAYS, "always", |place, command| serve(place, command, "always"))
    },
    Server {
        is_for_generator: true,
        ..blockmux(NEVER, "never", |place, command| serve(place, command, "never"))
    },
    Server { has_own_memory: true, ..peer(NBDKIT, "nbdkit", nbdkit) },
    Server { is_daemon: true, ..peer("nbd-server", "nbd-server", nbd_server) },
    peer("qemu-nbd", "qemu-utils", qemu_nbd),
    peer("qemu-storage-daemon", "qemu-system-common", qemu_storage_daemon),
];

type Arguments = fn(&Place, &mut Command) -> Result<()>;

const fn blockmux(name: &'static str, poll: &'static str, arguments: Arguments) -> Server {
    Server {
        name,
        program: Program::Blockmux,
        arguments,
        has_own_memory: true,
        is_daemon: false,
        generator_poll: poll,
        is_for_generator: false,
    }
}

const fn peer(name: &'static str, package: &'static str, arguments: Arguments) -> Server {
    Server {
        name,
        program: Program::Peer(name, package),
        arguments,
        has_own_memory: false,
        is_daemon: false,
        generator_poll: "adaptive",
        is_for_generator: false,
    }
}

fn serve(place: &Place, command: &mut Command, poll: &str) -> Result<()> {
    command.arg("serve").arg(format!("{EXPORT}=mem:{}", place.size));
    command.arg("--nbd").arg(format!("127.0.0.1:{}", place.port)).args(["--poll", poll]);
    if poll == "always" {
        // Each core takes a whole processor: one is for the client.
        command.args(["--cores", "1"]);
    }
    Ok(())
}

fn nbdkit(place: &Place, command: &mut Command) -> Result<()> {
    command.args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &place.port.to_string()]);
    command.args(["memory", &place.size.to_string()]);
    Ok(())
}

fn nbd_server(place: &Place, command: &mut Command) -> Result<()> {
    let config = place.dir.join("config");
    let (port, file) = (place.port, place.file.display());
    let text = format!(
        "[generic]\nlistenaddr = 127.0.0.1\nport = {port}\n[{EXPORT}]\nexportname = {file}\nflush = true\nfua = true\n"
    );
    fs::write(&config, text)?;
    // In the foreground (-d) it would serve one client and end.
    command.arg("-C").arg(config).arg("-p").arg(place.dir.join("pid"));
    Ok(())
}

fn qemu_nbd(place: &Place, command: &mut Command) -> Result<()> {
    command.args(["--bind=127.0.0.1", &format!("--port={}", place.port), "--persistent"]);
    command.args([&format!("--shared={MOST_CONNECTIONS}"), &format!("--export-name={EXPORT}")]);
    // The file is locked for one server only, and they take turns.
    command
        .arg("--image-opts")
        .arg(format!("driver=raw,file.driver=file,file.locking=off,file.filename={}", place.file.display()));
    Ok(())
}

fn qemu_storage_daemon(place: &Place, command: &mut Command) -> Result<()> {
    let file = place.file.display();
    command
        .arg("--blockdev")
        .arg(format!("driver=file,node-name={EXPORT},filename={file},locking=off"))
        .arg("--nbd-server")
        .arg(format!(
            "addr.type=inet,addr.host=127.0.0.1,addr.port={},max-connections={MOST_CONNECTIONS}",
            place.port
        ))
        .arg("--export")
        .arg(format!("type=nbd,id=export,node-name={EXPORT},name={EXPORT},writable=on"));
    Ok(())
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let peers: Vec<&str> = SERVERS
        .iter()
        .filter(|server| server.program != Program::Blockmux)
        .map(|server| server.name)
        .collect();
    [deep_goals(rows, &peers), large_goals(rows, &peers), latency_goals(rows)].concat()
}

/// 4 KiB at depth 32.
fn deep_goals(rows: &Rows, peers: &[&str]) -> Vec<Goal> {
    let mut goals = Vec::new();
    for (rw, numjobs) in [(Rw::RandRead, 1), (Rw::RandRead, 4), (Rw::RandWrite, 1), (Rw::RandWrite, 4)] {
        let cell = Cell::new(rw, 4 << 10, 32, numjobs);
        let iops = |server| rows.iops(OURS, server, cell);
        let cpu = |server| rows.get(OURS, server, cell)?.median(|sample| sample.server_us);
        let mut add = |what: &str, bound, ours, theirs| {
            goals.push(Goal::ratio(format!("{}: {what}", cell.short()), bound, ours, theirs));
        };
        add("IOPS, of nbdkit", Bound::AtLeast(4.0), iops(BLOCKMUX), iops(NBDKIT));
        add("server CPU per I/O, of nbdkit", Bound::AtMost(0.25), cpu(BLOCKMUX), cpu(NBDKIT));
        add("always, of spinning ceiling", Bound::AtLeast(0.85), iops(ALWAYS), iops(SPINNING));
        add("never, of sleeping ceiling", Bound::AtLeast(0.9), iops(NEVER), iops(SLEEPING));
        add(
            "fio, of best peer",
            Bound::AtLeast(1.3),
            rows.iops(FIO, BLOCKMUX, cell),
            rows.best(FIO, peers, cell),
        );
    }
    goals
}

fn large_goals(rows: &Rows, peers: &[&str]) -> Vec<Goal> {
    let cell = Cell::new(Rw::Read, 1 << 20, 8, 1);
    let goal = |client| {
        let what = format!("{}: {client}, of best peer", cell.short());
        let (ours, best) = (rows.iops(client, BLOCKMUX, cell), rows.best(client, peers, cell));
        Goal::ratio(what, Bound::AtLeast(1.0), ours, best)
    };
    [OURS, FIO, "qemu-img"].map(goal).to_vec()
}

/// Latency of single I/O: both sides polling as the ceiling's do.
fn latency_goals(rows: &Rows) -> Vec<Goal> {
    let mut goals = Vec::new();
    for rw in [Rw::RandRead, Rw::RandWrite] {
        let cell = Cell::new(rw, 4 << 10, 1, 1);
        let latency = |row: Option<&Row>| row?.median(|sample| sample.mean_us);
        for (poll, server, ceiling) in [("always", ALWAYS, SPINNING), ("never", NEVER, SLEEPING)] {
            let what = format!("{}: latency, {poll}, of {ceiling}", cell.short());
            let of = |name| latency(rows.get(OURS, name, cell));
            goals.push(Goal::ratio(what, Bound::AtMost(1.1), of(server), of(ceiling)));
        }
    }
    goals
}

const EXPORT: &str = "disk0";
const MOST_CONNECTIONS: u32 = 16;
const OURS: &str = "blockmux";
const FIO: &str = "fio";
const BLOCKMUX: &str = "blockmux";
const ALWAYS: &str = "blockmux-always";
const NEVER: &str = "blockmux-never";
const NBDKIT: &str = "nbdkit";

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::*;
    use std::path::Path;

    #[test]
    fn the_goals_hold_the_right_rows_against_each_other() {
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
    fn every_server_is_told_the_port() {
        let dir = tempfile::tempdir().unwrap();
        for server in SERVERS {
            let place =
                Place { dir: dir.path().to_owned(), file: Path::new("disk.img"), port: 34567, size: 1 << 30 };
            let mut command = Command::new("server");
            (server.arguments)(&place, &mut command).unwrap();
            let config = fs::read_to_string(dir.path().join("config")).unwrap_or_default();
            assert!(format!("{command:?}{config}").contains("34567"), "{}", server.name);
        }
    }

    #[test]
    fn only_policies_other_than_the_default_are_for_our_generator_alone() {
        let alone: Vec<_> =
            SERVERS.iter().filter(|server| server.is_for_generator).map(|server| server.name).collect();
        assert_eq!(alone, [ALWAYS, NEVER]);
    }
}
