//! Reservations of volumes: between protocols, and across a restart.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, text};
use crate::raw_client::{self, RawClient, TRIM};
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RESERVATION_CONFLICT, RawIscsi};
use rustix::process::Signal;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

pub(crate) const REGISTER: u8 = 0;
pub(crate) const RESERVE: u8 = 1;
pub(crate) const EXCLUSIVE_ACCESS: u8 = 3;
const WRITE_EXCLUSIVE: u8 = 1;
pub(crate) const APTPL: u8 = 1;
pub(crate) const READ_KEYS: u8 = 0;
const READ_RESERVATION: u8 = 1;
pub(crate) const NAMES: [&str; 2] = ["iqn.2026-11.i:a", "iqn.2026-11.i:b"];

/// A daemon that serves a file. A RAM volume would lose its data, and its reservations, when the
/// daemon ends.
struct Fenced {
    daemon: Daemon,
    spec: String,
    _disk: TempDir,
}

impl Fenced {
    fn serve(more: &[&str]) -> Fenced {
        let disk = tempfile::tempdir().unwrap();
        let spec = format!("file:{}?size=8m", disk.path().join("disk.img").display());
        let daemon = Daemon::serve(&[&[spec.as_str(), "--iscsi", "127.0.0.1:0"], more].concat());
        Fenced { daemon, spec, _disk: disk }
    }

    /// Kills the daemon, as by a power loss, and restarts it.
    fn restart(&mut self) {
        self.daemon.signal(Signal::KILL);
        self.daemon.wait();
        self.daemon.start_again(&[&self.spec, "--iscsi", "127.0.0.1:0"]);
    }
}

fn login(daemon: &Daemon, name: &str) -> RawIscsi {
    RawIscsi::login(&daemon.urls_of("iscsi")[0], name)
}

/// The one file in which the daemon keeps reservations.
fn kept(daemon: &Daemon) -> Option<PathBuf> {
    let state = fs::read_dir(daemon.directory.path().join("state/blockmux")).ok()?;
    let mut files = state.map(|entry| entry.unwrap().path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "reservations"))
}

#[test]
fn a_reservation_of_an_initiator_excludes_nbd_clients_until_it_is_released() {
    let Fenced { mut daemon, _disk, .. } = Fenced::serve(&[]);
    let (mut scsi, mut nbd) = (login(&daemon, NAMES[0]), RawClient::connect(&daemon.socket()));
    assert_eq!(scsi.reserve_out(REGISTER, 0, [0, 7], 0), GOOD);
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    assert_eq!(scsi.reserve_out(RESERVE, WRITE_EXCLUSIVE, [7, 0], 0), GOOD);
    assert_eq!((nbd.write(0, 0, &[2; 512]), nbd.simple(TRIM, 0, 0, 512)), (EPERM, EPERM));
    assert_eq!(nbd.simple(raw_client::WRITE_ZEROES, 0, 0, 512), EPERM);
    assert_eq!(nbd.read(0, 512), [1; 512]);
    assert_eq!(scsi.reserve_out(REGISTER, 0, [7, 0], 0), GOOD);
    assert_eq!(nbd.write(0, 0, &[2; 512]), 0);
    assert!(kept(&daemon).is_none(), "nobody asked for that");
    daemon.signal(Signal::TERM);
    let mut said = String::new();
    daemon.stderr.read_to_string(&mut said).unwrap();
    let lines: Vec<_> = said.lines().filter(|line| line.contains("refused")).collect();
    let [line] = lines[..] else { panic!("expected one line: {said}") };
    assert!(
        line.contains(
            "disk0: requests are refused: an initiator has reserved the volume protocol=\"nbd\" peer="
        ),
        "{line}"
    );
}

#[test]
fn an_aptpl_reservation_survives_a_kill_of_the_daemon() {
    let mut fenced = Fenced::serve(&[]);
    let mut a = login(&fenced.daemon, NAMES[0]);
    assert_eq!(a.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    assert_eq!(a.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), GOOD);
    fenced.restart();
    let daemon = &fenced.daemon;
    // SPC-5 §5.13.1: PRGENERATION restarts at 0, everything else is preserved.
    let (mut a, mut b) = (login(daemon, NAMES[0]), login(daemon, NAMES[1]));
    assert_eq!(b.reserve_in(READ_KEYS), [0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7]);
    let held = b.reserve_in(READ_RESERVATION);
    assert_eq!(
        (held[..8].to_vec(), held[15], held[21]),
        (vec![0, 0, 0, 0, 0, 0, 0, 16], 7, EXCLUSIVE_ACCESS)
    );
    assert_eq!((a.access(), b.access()), ([GOOD; 2], [RESERVATION_CONFLICT; 2]));
    let mut nbd = RawClient::connect(&daemon.socket());
    assert_eq!((nbd.simple(raw_client::READ, 0, 0, 512), nbd.write(0, 0, &[0; 512])), (EPERM, EPERM));
    // A registration without APTPL does not survive the next restart.
    assert_eq!(a.reserve_out(REGISTER, 0, [7, 8], 0), GOOD);
    assert!(kept(daemon).is_none());
    assert_eq!(b.access(), [RESERVATION_CONFLICT; 2]);
    fenced.restart();
    let daemon = &fenced.daemon;
    let mut b = login(daemon, NAMES[1]);
    assert_eq!(b.reserve_in(READ_KEYS), [0; 8]);
    assert_eq!(b.access(), [GOOD; 2]);
}

#[test]
fn a_volume_with_unreadable_reservations_is_not_exported() {
    let Fenced { mut daemon, spec, _disk } = Fenced::serve(&[]);
    assert_eq!(login(&daemon, NAMES[0]).reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    let file = kept(&daemon).unwrap();
    daemon.signal(Signal::KILL);
    daemon.wait();
    let content = fs::read(&file).unwrap();
    let version = content.len() - kept_image_len(&content) + 7;
    for (at, expected) in [(content.len() - 1, "is damaged at byte 12"), (version, "is of version ")] {
        let mut content = content.clone();
        content[at] ^= 2;
        fs::write(&file, content).unwrap();
        let mut serve = Command::new(BLOCKMUX);
        serve.args(["serve", &spec, "--nbd", "127.0.0.1:0", "--run", "true", "--state"]);
        let output = serve.arg(file.parent().unwrap()).output().unwrap();
        let said = text(&output.stderr);
        assert!(said.contains(expected), "{said}");
    }
}

/// Length of the data after the identity in the state file.
fn kept_image_len(content: &[u8]) -> usize {
    content.len() - 2 - usize::from(u16::from_be_bytes([content[0], content[1]]))
}

#[test]
fn aptpl_is_refused_without_a_state_directory() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    fs::create_dir(&state).unwrap();
    let Fenced { daemon, .. } = &Fenced::serve(&["--state", state.to_str().unwrap()]);
    // From here on the state directory cannot be written.
    fs::remove_dir_all(&state).unwrap();
    fs::write(&state, "").unwrap();
    let mut a = login(daemon, NAMES[0]);
    assert_eq!(a.reserve_out(REGISTER, 0, [0, 7], APTPL), CHECK_CONDITION);
    assert_eq!(a.reserve_in(READ_KEYS).len(), 8, "the failed command has changed nothing");
    assert_eq!(a.reserve_out(REGISTER, 0, [0, 7], 0), GOOD);
}

const EPERM: u32 = 1;
