//! The program with generated configs: a reload leads from any config to any other one, and what
//! initiators see then is what they see after a start. Most pairs of configs are tested without
//! the program, in `daemon/reload/generated`.

#[path = "../../src/daemon/reload/generated/config.rs"]
mod config;

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use crate::raw_iscsi::{GOOD, RawIscsi};
use crate::raw_nvme::RawNvme;
use blockmux_volume::random::SplitMix;
use config::{Genome, HOSTS, INITIATORS, check_files, own_ip, seeds, write_files};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A config file in a directory with all that configs name, and configs for it.
struct Place {
    files: TempDir,
    ip: String,
    random: SplitMix,
    genome: Genome,
}

impl Place {
    fn new(seed: u64) -> Place {
        let (files, mut random) = (tempfile::tempdir().unwrap(), SplitMix::new(seed));
        write_files(files.path());
        let genome = Genome::new(&mut random);
        Place { files, ip: own_ip(), random, genome }
    }

    fn config_path(&self) -> PathBuf {
        self.files.path().join("b.toml")
    }

    fn write(&self, config: &str) {
        fs::write(self.config_path(), config).unwrap();
    }

    /// Writes the next config that is valid.
    fn write_next(&mut self) -> String {
        for _ in 0..MAX_DRAWS {
            let changes = 1 + self.random.below(20);
            let genome = self.genome.changed(&mut self.random, changes);
            let text = genome.text(&self.ip);
            self.write(&text);
            if blockmux(["check".as_ref(), self.config_path().as_os_str()]).status.success() {
                self.genome = genome;
                return text;
            }
        }
        panic!("no config of {MAX_DRAWS} is valid");
    }

    fn start(&self) -> Daemon {
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "--json", "--config"]).arg(self.config_path());
        command.args(["--control", &self.control()]).stdout(Stdio::piped()).stderr(Stdio::piped());
        Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command)
    }

    fn control(&self) -> String {
        format!("unix:{}", self.files.path().join("control").display())
    }

    fn ctl(&self, args: &[&str]) -> Output {
        blockmux([&["ctl", &self.control()], args].concat())
    }

    fn said(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What initiators of iSCSI and hosts of NVMe/TCP see of the targets that configs have, at each
    /// listener.
    fn seen(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for port in [3260, 3261] {
            let address = format!("{}:{port}", self.ip);
            if TcpStream::connect(&address).is_err() {
                all.insert(address, "no listener".to_owned());
                continue;
            }
            for (target, initiator) in
                ["t0", "t1"].iter().flat_map(|target| INITIATORS.map(|own| (target, own)))
            {
                let name = format!("iqn.2026-11.test:{target}");
                let seen = match RawIscsi::try_login(&address, &name, initiator) {
                    Ok(mut session) => units(&mut session),
                    Err(status) => format!("refused: {status:?}"),
                };
                all.insert(format!("{address} {name} {initiator}"), seen);
            }
        }
        for port in [4420, 4421] {
            let address = format!("{}:{port}", self.ip);
            if TcpStream::connect(&address).is_err() {
                all.insert(address, "no listener".to_owned());
                continue;
            }
            for (subsystem, host) in ["s0", "s1"].iter().flat_map(|name| HOSTS.map(|own| (name, own))) {
                let url = format!("nvme+tcp://{address}/nqn.2026-11.test:{subsystem}/1");
                let seen = match RawNvme::enabled(&url, host) {
                    Ok(mut admin) => namespaces(&mut admin),
                    Err(status) => format!("refused: {status:#x}"),
                };
                all.insert(format!("{url} {host}"), seen);
            }
        }
        all
    }
}

/// The logical units of a session: number, peripheral qualifier, RMB, readiness in the state of
/// the session's port, size and write protection.
fn units(session: &mut RawIscsi) -> String {
    let (status, list) = session.run(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0], &[], 1024);
    assert_eq!(status, GOOD);
    let mut seen = String::new();
    for entry in list[8..].chunks(8) {
        session.lun = entry[1];
        let (_, inquiry) = session.run(&[0x12, 0, 0, 0, 36, 0], &[], 36);
        // Unit attentions come first.
        let is_ready = (0..8).any(|_| session.run(&[0; 6], &[], 0).0 == GOOD);
        let (_, capacity) = session.run(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], &[], 32);
        let (_, mode) = session.run(&[0x1a, 8, 0x0a, 0, 64, 0], &[], 64);
        let lun = entry[1];
        seen += &format!("{lun} {:x?} {is_ready} {capacity:x?} {:x?}\n", &inquiry[..2], mode.get(2));
    }
    seen
}

/// The model number of a controller, and its serial number if that is configured; the size, the
/// ANA group and the EUI64 of each namespace; and the state of each ANA group.
fn namespaces(admin: &mut RawNvme) -> String {
    let controller = admin.admin_read(IDENTIFY, 0, 1).unwrap();
    let serial = text(&controller[4..24]);
    let serial = if serial.starts_with("471") { &serial } else { "derived" };
    let mut seen = format!("{serial} {}\n", text(&controller[24..64]));
    let list = admin.admin_read(IDENTIFY, 0, 2).unwrap();
    let nsids = list.chunks(4).map(|nsid| u32::from_le_bytes(nsid.try_into().unwrap()));
    for nsid in nsids.take_while(|nsid| *nsid > 0) {
        let own = admin.admin_read(IDENTIFY, nsid, 0).unwrap();
        seen += &format!("{nsid} {:x?} {:x?} {:x?}\n", &own[..8], &own[92..96], &own[120..128]);
    }
    let Ok(log) = admin.admin_read(GET_LOG_PAGE, u32::MAX, ANA_LOG) else { return seen };
    let mut rest = &log[16..];
    for _ in 0..u16::from_le_bytes([log[8], log[9]]) {
        let [group, count] = [&rest[..4], &rest[4..8]].map(|own| u32::from_le_bytes(own.try_into().unwrap()));
        let (state, end) = (rest[16], 32 + 4 * count as usize);
        seen += &format!("group {group} is {state}: {:x?}\n", &rest[32..end]);
        rest = &rest[end..];
    }
    seen
}

#[test]
fn initiators_see_the_same_after_a_reload_as_after_a_start() {
    for seed in seeds(5) {
        let mut place = Place::new(seed);
        place.write_next();
        let mut daemon = place.start();
        for _ in 0..CHANGES {
            let before = (place.said(&["export"]), place.seen());
            let config = place.write_next();
            let what = format!("BLOCKMUX_CONFIG_SEEDS={seed}..{}\n{}---\n{config}", seed + 1, before.0);
            let planned = place.said(&["diff"]);
            let reloaded = place.ctl(&["reload"]);
            let said = text(&reloaded.stdout) + &text(&reloaded.stderr);
            assert_eq!(planned.contains("; refused: "), !reloaded.status.success(), "{planned}{said}{what}");
            let now = (place.said(&["export"]), place.seen());
            if !reloaded.status.success() {
                assert_eq!(now, before, "a refused reload has changed something: {said}{what}");
            }
            let is_whole = reloaded.status.success() && !planned.contains("at the next start");
            // What is desired can be loaded again, and then only waits for the start as before.
            place.write(&now.0);
            let waiting = place.said(&["diff"]);
            let waits = waiting.starts_with("takes effect at the next start:\n");
            assert!(waits || waiting == "no changes\n", "{waiting}{what}");
            if is_whole {
                place.write(&config);
                assert_eq!(place.said(&["diff"]), "no changes\n", "{what}");
            }
            daemon.signal(Signal::TERM);
            assert!(daemon.wait().success());
            daemon = place.start();
            let started = (place.said(&["export"]), place.seen());
            assert_eq!(started.0, now.0, "a start differs: {said}{what}");
            if !waits {
                assert_eq!(started.1, now.1, "a start differs: {said}{what}");
            }
            check_files(place.files.path());
        }
    }
}

/// NVMe: Identify and Get Log Page, and the ANA log page with 4 KiB.
const IDENTIFY: u8 = 6;
const GET_LOG_PAGE: u8 = 2;
const ANA_LOG: u32 = 0x0c | 1023 << 16;
/// Number of changes with each seed.
const CHANGES: usize = 2;
/// Number of configs that are drawn until one is valid.
const MAX_DRAWS: usize = 30;
