//! iSCSI: servers, clients and goals of the comparison.
//!
//! Every server listens on TCP loopback and has one target with one disk of the same size in
//! memory: its own memory, or a file in memory that tgtd and istgt share. All other options are the
//! programs' defaults, except istgt's queue, which is as deep as the deepest cell. A login at istgt
//! takes about a second, which our generator counts as measured time. So runs with istgt must take
//! several seconds, and even then its figures are too low.
//!
//! Each connection of a cell is its own session. In addition to the three polling policies there
//! are three rows of Blockmux, measured only by our own generator, because no other client supports
//! all of them: `blockmux-digests` with header and data digests, `blockmux-mcs` with four
//! connections in each session (MC/S), and `blockmux-nbd`, which serves NBD, so that the target's
//! CPU times over iSCSI and NBD come from one run.

use super::client::{Client, Generator, IscsiPerf, QemuImg};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::{self, Cell, Rw, deep};
use super::nbd;
use super::ours::{self, BLOCKMUX, CellGoals, EXPORT};
use super::plan::Protocol;
use super::server::{ProgramOrigin, Server, ServerParameters, peer};
use anyhow::Result;
use std::fs;
use std::path::Path;
use std::process::Command;

/// iSCSI over TCP.
pub(crate) const ISCSI: Protocol = Protocol {
    name: "iscsi",
    servers: SERVERS,
    clients: || {
        let clients: Vec<Box<dyn Client>> = vec![Box::new(Generator), Box::new(IscsiPerf), Box::new(QemuImg)];
        clients
    },
    cells: matrix::cells,
    mtus: &[],
    goals,
};

const SERVERS: &[Server] = &[
    ours::adaptive(lun_0, serve),
    ours::always(lun_0, serve),
    ours::never(lun_0, serve),
    Server {
        name: DIGESTS,
        is_for_generator: true,
        ..ours::adaptive(|port| lun_0(port) + "?header_digest=on&data_digest=on", serve)
    },
    Server {
        name: MCS,
        is_for_generator: true,
        ..ours::adaptive(|port| lun_0(port) + "?connections=1&max_connections=4", serve)
    },
    Server { name: OVER_NBD, is_for_generator: true, ..ours::adaptive(nbd::url, nbd::serve) },
    // LUN 0 of tgtd is its controller.
    Server { set_up: set_up_tgtd, ..peer(TGTD, "tgt", |port| lun(port, 1), tgtd) },
    peer("istgt", "istgt", lun_0, istgt),
];

/// URL of the logical unit that Blockmux serves.
pub(crate) fn lun_0(port: u16) -> String {
    lun(port, 0)
}

fn lun(port: u16, lun: u8) -> String {
    format!("iscsi://127.0.0.1:{port}/{NODE_BASE}:{EXPORT}/{lun}")
}

fn serve(place: &ServerParameters, command: &mut Command) -> Result<()> {
    ours::serve(place, command, "--iscsi")
}

fn tgtd(place: &ServerParameters, command: &mut Command) -> Result<()> {
    command.env(CONTROL_VARIABLE, place.dir.join(CONTROL_SOCKET));
    command.args(["--foreground", "--iscsi", &format!("portal=127.0.0.1:{}", place.port)]);
    Ok(())
}

/// Commands that create tgtd's target, because tgtd starts without one.
fn set_up_tgtd(place: &ServerParameters) -> Result<Vec<Command>> {
    let tgtadm = ProgramOrigin::Peer("tgtadm", "tgt").find(Path::new(""))?;
    let command = |words: &str| {
        let mut command = Command::new(&tgtadm);
        command.env(CONTROL_VARIABLE, place.dir.join(CONTROL_SOCKET));
        command.args(["--lld", "iscsi", "--tid", "1"]).args(words.split(' '));
        command
    };
    let target = command(&format!("--op new --mode target --targetname {NODE_BASE}:{EXPORT}"));
    let mut disk = command("--op new --mode logicalunit --lun 1 --bstype rdwr --backing-store");
    disk.arg(place.file);
    let everybody = command("--op bind --mode target --initiator-address ALL");
    Ok(vec![target, disk, everybody])
}

fn istgt(place: &ServerParameters, command: &mut Command) -> Result<()> {
    let config = place.dir.join("config");
    let (port, dir, file) = (place.port, place.dir.display(), place.file.display());
    let mib = place.size >> 20;
    // istgt needs a control port; the same port of another loopback address is usually free.
    let text = format!(
        "[Global]\nNodeBase \"{NODE_BASE}\"\nPidFile {dir}/pid\nMediaDirectory {dir}\nDiscoveryAuthMethod None\n\
         [UnitControl]\nAuthMethod None\nPortal UC1 127.0.0.2:{port}\nNetmask 127.0.0.1\n\
         [PortalGroup1]\nPortal DA1 127.0.0.1:{port}\n\
         [InitiatorGroup1]\nInitiatorName \"ALL\"\nNetmask 127.0.0.1\n\
         [LogicalUnit1]\nTargetName {EXPORT}\nMapping PortalGroup1 InitiatorGroup1\nAuthMethod None\n\
         UnitType Disk\nQueueDepth {MAX_DEPTH}\nLUN0 Storage {file} {mib}MB\n"
    );
    fs::write(&config, text)?;
    command.arg("-D").arg("-c").arg(config);
    Ok(())
}

fn goals(rows: &Rows) -> Vec<Goal> {
    let deep = deep().into_iter().flat_map(|cell| deep_goals(rows, cell));
    deep.chain([Rw::RandRead, Rw::RandWrite].into_iter().flat_map(|rw| wider_goals(rows, rw))).collect()
}

/// Goals for 4 KiB at depth 32.
fn deep_goals(rows: &Rows, cell: Cell) -> Vec<Goal> {
    let mut goals = CellGoals::new(rows, cell);
    goals.add("IOPS relative to tgtd", Bound::AtLeast(12.0), goals.iops(BLOCKMUX), goals.iops(TGTD));
    goals.add_shares_of_ceilings();
    goals.add(
        "server CPU per I/O relative to NBD's",
        Bound::AtMost(1.15),
        goals.cpu(BLOCKMUX),
        goals.cpu(OVER_NBD),
    );
    goals.add("digests relative to none", Bound::AtLeast(0.7), goals.iops(DIGESTS), goals.iops(BLOCKMUX));
    goals.all()
}

/// Goals for more I/O in flight than 32: a session must not become slower.
fn wider_goals(rows: &Rows, rw: Rw) -> Vec<Goal> {
    let narrow = CellGoals::new(rows, Cell::new(rw, 4 << 10, 32, 1)).iops(BLOCKMUX);
    let wide = [(BLOCKMUX, 128, 1), (BLOCKMUX, 32, 4), (BLOCKMUX, 128, 4), (MCS, 32, 1), (MCS, 128, 1)];
    let goals = wide.map(|(server, iodepth, numjobs)| {
        let mut goals = CellGoals::new(rows, Cell::new(rw, 4 << 10, iodepth, numjobs));
        let what = if server == MCS {
            "4 connections, IOPS relative to one at qd32"
        } else {
            "IOPS relative to qd32"
        };
        goals.add(what, Bound::AtLeast(1.0), goals.iops(server), narrow);
        goals.all()
    });
    goals.concat()
}

const DIGESTS: &str = "blockmux-digests";
const MCS: &str = "blockmux-mcs";
const OVER_NBD: &str = "blockmux-nbd";
const TGTD: &str = "tgtd";
/// Prefix of Blockmux's default target names.
const NODE_BASE: &str = "iqn.2026-11.blockmux";
/// Environment variable for the control socket of tgtd and tgtadm, so that another tgtd on the
/// machine is not affected.
const CONTROL_VARIABLE: &str = "TGT_IPC_SOCKET";
/// File name of the control socket, in the server's directory.
const CONTROL_SOCKET: &str = "control";
const MAX_DEPTH: u32 = 128;

#[cfg(test)]
mod tests {
    use super::super::client::{SLEEPING, SPINNING};
    use super::super::figures::Sample;
    use super::super::matrix::whole;
    use super::super::ours::{ALWAYS, NEVER};
    use super::*;

    #[test]
    fn the_goals_compare_the_right_rows() {
        let mut rows = Rows::default();
        let cell = Cell::new(Rw::RandWrite, 4 << 10, 32, 1);
        let mut add = |server, cell, iops, server_us| {
            let sample = Sample { iops, server_us: Some(server_us), ..Sample::default() };
            rows.add(Generator.name(), server, cell, sample);
        };
        for (server, iops, server_us) in [
            (BLOCKMUX, 600.0, 2.5),
            (ALWAYS, 800.0, 9.0),
            (NEVER, 450.0, 9.0),
            (DIGESTS, 450.0, 9.0),
            (OVER_NBD, 700.0, 2.0),
            (TGTD, 40.0, 25.0),
            (SPINNING, 1000.0, 9.0),
            (SLEEPING, 500.0, 9.0),
        ] {
            add(server, cell, iops, server_us);
        }
        add(BLOCKMUX, Cell { iodepth: 128, ..cell }, 900.0, 9.0);
        add(BLOCKMUX, Cell { numjobs: 4, ..cell }, 300.0, 9.0);
        add(MCS, cell, 660.0, 9.0);
        let found: Vec<_> =
            goals(&rows).iter().filter_map(|goal| Some((goal.found?, goal.is_reached()?))).collect();
        let (of_one, of_qd32) = (
            [(15.0, true), (0.8, false), (0.9, true), (1.25, false), (0.75, true)],
            [(1.5, true), (0.5, false), (1.1, true)],
        );
        assert_eq!(found, [&of_one[..], &of_qd32].concat());
    }

    #[test]
    fn no_cell_is_deeper_than_istgts_queue() {
        assert_eq!(whole().iter().map(|cell| cell.iodepth).max(), Some(MAX_DEPTH));
    }
}
