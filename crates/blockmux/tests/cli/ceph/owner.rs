//! Images that one daemon owns, and their reservations beside them.

use super::TestImage;
use crate::daemon::Daemon;
use crate::fencing::{APTPL, EXCLUSIVE_ACCESS, NAMES, READ_KEYS, REGISTER, RESERVE};
use crate::program::{BLOCKMUX, blockmux, succeed, text};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RESERVATION_CONFLICT, RawIscsi};
use rustix::process::Signal;
use std::fs;
use std::process::Command;
use tempfile::TempDir;

impl TestImage {
    fn owned(&self, exclusive: &str) -> String {
        format!("{}&exclusive={exclusive}", self.spec())
    }

    /// The arguments of a daemon that exports it as `disk`. `shared` lets two of them run on this
    /// machine, as on two.
    fn arguments(&self, exclusive: &str) -> [String; 4] {
        let config = self.conf.with_file_name(format!("{}-{exclusive}.toml", self.name));
        let spec = self.owned(exclusive);
        fs::write(&config, format!("[[volume]]\nname = 'disk'\nspec = '{spec}'\nshared = true\n")).unwrap();
        let config = config.to_str().unwrap();
        ["--config", config, "--iscsi", "127.0.0.1:0"].map(str::to_owned)
    }

    /// A daemon with a state directory of its own, as on another machine.
    fn serve(&self, exclusive: &str) -> Daemon {
        let arguments = self.arguments(exclusive);
        Daemon::serve(&arguments.each_ref().map(String::as_str))
    }

    /// What a daemon says that does not start.
    fn refusal(&self, exclusive: &str) -> String {
        let state = tempfile::tempdir().unwrap();
        let mut serve = Command::new(BLOCKMUX);
        serve.arg("serve").args(self.arguments(exclusive)).args(["--run", "true", "--state"]);
        let output = serve.arg(state.path()).output().unwrap();
        assert!(!output.status.success(), "{exclusive}");
        text(&output.stderr)
    }

    fn rados(&self, arguments: &[&str]) -> String {
        succeed(Command::new("rados").arg("--conf").arg(&self.conf).args(["-p", "rbd"]).args(arguments))
    }

    /// The name of the object with the reservations.
    fn object(&self) -> String {
        let info: serde_json::Value =
            serde_json::from_str(&self.rbd(&["info", "--format", "json", &self.name])).unwrap();
        format!("blockmux.state.{}", info["id"].as_str().unwrap())
    }

    /// The stored record.
    fn record(&self) -> Vec<u8> {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("record");
        self.rados(&["get", &self.object(), file.to_str().unwrap()]);
        fs::read(file).unwrap()
    }

    /// Changes the stored record.
    fn change_record(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("record");
        let mut record = self.record();
        change(&mut record);
        fs::write(&file, record).unwrap();
        self.rados(&["put", &self.object(), file.to_str().unwrap()]);
    }

    /// Stores the same again, as a daemon does that owns the image from now on.
    pub(super) fn begin_another_turn(&self) {
        let later = self.generation() + 1;
        self.change_record(|record| record[8..16].copy_from_slice(&later.to_be_bytes()));
    }

    /// The stored generation.
    fn generation(&self) -> u64 {
        u64::from_be_bytes(self.record()[8..16].try_into().unwrap())
    }
}

fn login(daemon: &Daemon, nth: usize) -> RawIscsi {
    RawIscsi::login(&daemon.urls_of("iscsi")[0], NAMES[nth])
}

/// The target's name and the unit's number.
fn unit(daemon: &Daemon) -> String {
    daemon.urls_of("iscsi")[0].splitn(4, '/').last().unwrap().to_owned()
}

/// Registers with a key that survives restarts, and reserves the unit for itself.
fn reserve(initiator: &mut RawIscsi) {
    assert_eq!(initiator.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    assert_eq!(initiator.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), GOOD);
}

fn kill(mut daemon: Daemon) {
    daemon.signal(Signal::KILL);
    daemon.wait();
}

fn has_state_files(directory: &TempDir) -> bool {
    fs::read_dir(directory.path().join("state/blockmux")).is_ok_and(|files| {
        files.flatten().any(|file| file.path().extension().is_some_and(|kind| kind == "reservations"))
    })
}

/// READ KEYS of one registration with key 7.
const KEY_7: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7];

#[test]
fn an_image_that_is_made_again_has_no_reservations_of_the_one_before() {
    let Some(image) = TestImage::new("made-again", &["--size", "16M"]) else { return };
    let first = image.serve("on");
    reserve(&mut login(&first, 0));
    drop(first);
    let left = image.object();
    image.rbd(&["rm", "--no-progress", &image.name]);
    image.rbd(&["create", "--size", "16M", &image.name]);
    let second = image.serve("on");
    let mut b = login(&second, 1);
    assert_eq!((b.reserve_in(READ_KEYS), b.access()), (vec![0; 8], [GOOD; 2]));
    assert_ne!(image.object(), left);
    image.rados(&["rm", &left]);
}

#[test]
fn a_daemon_elsewhere_continues_with_the_reservations_of_one_that_was_killed() {
    let Some(image) = TestImage::new("reserved", &["--size", "16M"]) else { return };
    let first = image.serve("on");
    reserve(&mut login(&first, 0));
    assert!(!has_state_files(&first.directory));
    let (before, serial) = (unit(&first), login(&first, 0).inquiry_page(0x83));
    kill(first);
    let generation = image.generation();
    let second = image.serve("take");
    assert!(image.generation() > generation, "what the first one may still store is stale");
    let (mut a, mut b) = (login(&second, 0), login(&second, 1));
    assert_eq!((unit(&second), a.inquiry_page(0x83)), (before, serial), "it is the same disk");
    assert_eq!(b.reserve_in(READ_KEYS), KEY_7);
    assert_eq!((a.access(), b.access()), ([GOOD; 2], [RESERVATION_CONFLICT; 2]));
    let mut nbd = RawClient::connect(&second.socket());
    assert_eq!(nbd.write(0, 0, &[0; 512]), EPERM);
    // The end of the last registration is stored, too.
    assert_eq!(a.reserve_out(REGISTER, 0, [7, 0], APTPL), GOOD);
    kill(second);
    let third = image.serve("take");
    let mut b = login(&third, 1);
    assert_eq!((b.reserve_in(READ_KEYS), b.access()), (vec![0; 8], [GOOD; 2]));
}

#[test]
fn of_two_daemons_one_owns_an_image_until_it_ends_or_is_shut_out() {
    let Some(image) = TestImage::new("owned", &["--size", "16M"]) else { return };
    let mut first = image.serve("on");
    assert_eq!(RawClient::connect(&first.socket()).write(0, 0, &[1; 512]), 0);
    let said = image.refusal("on");
    assert!(said.contains("another client owns the image: ") && said.contains("127.0.0.1:0/"), "{said}");
    first.signal(Signal::TERM);
    assert!(first.wait().success());
    let second = image.serve("on");
    let mut nbd = RawClient::connect(&second.socket());
    assert_eq!(nbd.read(0, 512), [1; 512]);
    let mut initiator = login(&second, 0);
    assert_eq!(initiator.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    let third = image.serve("take");
    // The second one notices it with its next request, and decides nothing alone.
    assert_eq!(initiator.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), CHECK_CONDITION);
    assert_eq!(nbd.write(0, 0, &[2; 512]), ESHUTDOWN);
    let mut initiator = login(&third, 1);
    assert_eq!(initiator.reserve_in(READ_KEYS), KEY_7);
    assert_eq!(RawClient::connect(&third.socket()).read(0, 512), [1; 512]);
}

#[test]
fn a_daemon_that_takes_over_from_another_owns_the_image_then() {
    let Some(image) = TestImage::new("handed", &["--size", "16M"]) else { return };
    let place = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", place.path().join("control").display());
    let disk = image.arguments("on");
    let state = place.path().join("state");
    let more = ["--control", &control, "--state", state.to_str().unwrap()];
    let arguments = [&disk.each_ref().map(String::as_str)[..], &more].concat();
    let mut first = Daemon::serve_only(&arguments);
    reserve(&mut login(&first, 0));
    let second = Daemon::serve_only(&[&arguments[..], &["--takeover", &control]].concat());
    assert!(first.wait().success());
    assert_eq!(
        (login(&second, 0).access(), login(&second, 1).access()),
        ([GOOD; 2], [RESERVATION_CONFLICT; 2])
    );
}

#[test]
fn a_command_that_was_decided_on_an_old_state_is_decided_again() {
    let Some(image) = TestImage::new("raced", &["--size", "16M"]) else { return };
    let daemon = image.serve("on");
    let (mut a, mut b) = (login(&daemon, 0), login(&daemon, 1));
    assert_eq!(a.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    // Another daemon has stored the same later.
    let later = image.generation() + (1 << 40);
    image.change_record(|record| record[8..16].copy_from_slice(&later.to_be_bytes()));
    assert_eq!(a.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), GOOD);
    assert!(image.generation() > later, "it was stored on top");
    assert_eq!(b.access(), [RESERVATION_CONFLICT; 2]);
    // Without a record there is no registration, of which the initiator is told.
    image.rados(&["rm", &image.object()]);
    assert_eq!(a.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), RESERVATION_CONFLICT);
    assert_eq!(a.access(), [CHECK_CONDITION, GOOD]);
    assert_eq!(b.reserve_out(REGISTER, 0, [0, 8], APTPL), GOOD);
    assert_eq!(b.reserve_in(READ_KEYS)[8..], 8_u64.to_be_bytes());
    assert_eq!(a.access(), [GOOD; 2]);
}

#[test]
fn an_image_with_reservations_that_cannot_be_read_is_not_exported() {
    let Some(image) = TestImage::new("corrupt", &["--size", "16M"]) else { return };
    let daemon = image.serve("on");
    let mut initiator = login(&daemon, 0);
    assert_eq!(initiator.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    let generation = image.generation();
    image.change_record(|record| record[7] = 9);
    assert_eq!(initiator.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), CHECK_CONDITION);
    kill(daemon);
    let object = image.object();
    let said = image.refusal("take");
    assert!(said.contains(&format!("reservations of `disk`: object {object} is of version 9")), "{said}");
    image.change_record(|record| {
        record[7] = 1;
        *record.last_mut().unwrap() ^= 1;
    });
    let said = image.refusal("take");
    assert!(said.contains(&format!("object {object} is not the stored state of this image")), "{said}");
    assert_eq!(image.generation(), generation, "nothing was stored over it");
}

#[test]
fn reservations_of_a_state_directory_move_beside_the_image_once() {
    let Some(image) = TestImage::new("moved", &["--size", "16M"]) else { return };
    let mut daemon = image.serve("off");
    reserve(&mut login(&daemon, 0));
    assert!(has_state_files(&daemon.directory));
    let stop = |daemon: &mut Daemon| {
        daemon.signal(Signal::TERM);
        assert!(daemon.wait().success());
    };
    stop(&mut daemon);
    let arguments = image.arguments("on");
    let arguments = arguments.each_ref().map(String::as_str);
    daemon.start_again(&arguments);
    let moved = daemon.wait_for_line("were moved from");
    assert!(moved.contains(&format!("to Ceph's object {}", image.object())), "{moved}");
    assert!(!has_state_files(&daemon.directory));
    assert_eq!(login(&daemon, 1).access(), [RESERVATION_CONFLICT; 2]);
    assert_eq!(login(&daemon, 0).access(), [GOOD; 2]);
    stop(&mut daemon);
    // A daemon that does not own the image would not know of changes.
    let said = image.refusal("off");
    assert!(said.contains("serve the image with exclusive=on"), "{said}");
    daemon.start_again(&arguments);
    assert_eq!(login(&daemon, 1).reserve_in(READ_KEYS), KEY_7);
}

#[test]
fn only_a_whole_image_with_a_lock_can_be_owned() {
    let refused = blockmux(["info", "slice:0,1m:rbd:rbd/none?exclusive=on"]);
    let said = text(&refused.stderr);
    assert!(said.contains("is exclusive, which only a whole image can be"), "{said}");
    let Some(image) = TestImage::new("lockless", &["--size", "16M"]) else { return };
    image.rbd(&["feature", "disable", &image.name, "fast-diff", "object-map", "exclusive-lock"]);
    let said = image.refusal("on");
    assert!(said.contains("'rbd feature enable IMAGE exclusive-lock'"), "{said}");
}

const EPERM: u32 = 1;
const ESHUTDOWN: u32 = 108;
