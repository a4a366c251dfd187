//! An image that two daemons serve in turns.

use super::TestImage;
use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::fencing::{APTPL, EXCLUSIVE_ACCESS, NAMES, READ_KEYS, REGISTER, RESERVE};
use crate::program::{BLOCKMUX, blockmux, succeed, text};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RESERVATION_CONFLICT, RawIscsi};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::process::Command;

impl TestImage {
    /// A daemon that exports it as `disk`, standby at first. `shared` lets two of them run on this
    /// machine, as on two.
    fn standby(&self, host: &str) -> Controlled {
        let config = self.standby_config(host);
        Controlled::serve(&["--config", &config, "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"])
    }

    fn standby_config(&self, host: &str) -> String {
        let config = self.conf.with_file_name(format!("{}-{host}.toml", self.name));
        let spec = self.standby_spec();
        fs::write(&config, format!("[[volume]]\nname = 'disk'\nspec = '{spec}'\nshared = true\n")).unwrap();
        config.to_str().unwrap().to_owned()
    }

    fn standby_spec(&self) -> String {
        format!("{}&exclusive=standby", self.spec())
    }
}

fn serving(daemon: &Controlled) -> Value {
    daemon.status()["volumes"][0]["serving"].clone()
}

/// A session through one daemon, and what its target port group is.
fn login(daemon: &Controlled, nth: usize) -> RawIscsi {
    RawIscsi::login(&daemon.daemon.urls_of("iscsi")[0], NAMES[nth])
}

/// ASYMMETRIC ACCESS STATE of the only target port group.
fn alua_state(session: &mut RawIscsi) -> u8 {
    let (status, groups) = session.run(&[0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(status, GOOD);
    groups[4]
}

/// Receives the unit attention of a changed state.
fn take_attention(session: &mut RawIscsi) {
    assert_eq!(session.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
}

/// READ KEYS of one registration with key 7.
const KEY_7: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 7];
const OPTIMIZED: u8 = 0;
const STANDBY: u8 = 2;

#[test]
fn a_volume_moves_between_daemons_with_its_reservations() {
    let Some(image) = TestImage::new("moved-on", &["--size", "16M"]) else { return };
    let (first, second) = (image.standby("first"), image.standby("second"));
    assert_eq!((serving(&first), serving(&second)), ("standby".into(), "standby".into()));
    let [mut a, mut b] = [0, 1].map(|nth| login(&first, nth));
    let mut there = login(&second, 0);
    assert_eq!(a.inquiry_page(0x83), there.inquiry_page(0x83), "it is the same disk");
    assert_eq!((alua_state(&mut a), a.access()), (STANDBY, [CHECK_CONDITION; 2]));
    let nbd = blockmux(["info", &format!("nbd+unix:///disk?socket={}", first.daemon.socket().display())]);
    assert!(text(&nbd.stderr).contains("another server serves the export now"), "{}", text(&nbd.stderr));
    assert_eq!(first.said(&["deactivate", "disk"]).trim(), "disk is standby already");
    assert_eq!(first.said(&["activate", "disk"]).trim(), "disk is active");
    assert_eq!(first.said(&["activate", "disk", "--take"]).trim(), "disk is active already");
    assert_eq!(serving(&first), "active");
    let refused = second.refusal(&["activate", "disk"]);
    assert!(refused.contains("disk: acquiring the image: another client owns the image"), "{refused}");
    [&mut a, &mut b].into_iter().for_each(take_attention);
    assert_eq!((alua_state(&mut a), a.access()), (OPTIMIZED, [GOOD; 2]));
    let mut nbd = RawClient::connect(&first.daemon.socket());
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    // A registration without APTPL, which a restart would lose.
    assert_eq!(a.reserve_out(REGISTER, 0, [0, 7], 0), GOOD);
    assert_eq!(a.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), GOOD);
    assert_eq!(b.access(), [RESERVATION_CONFLICT; 2]);
    assert_eq!(first.said(&["deactivate", "disk"]).trim(), "disk is standby");
    assert_eq!(second.said(&["activate", "disk"]).trim(), "disk is active");
    assert!(nbd.is_closed(), "what it has sent may be out of date when the volume is back");
    let [mut a, mut b] = [0, 1].map(|nth| login(&first, nth));
    assert_eq!((alua_state(&mut a), a.access()), (STANDBY, [CHECK_CONDITION; 2]));
    assert_eq!(b.access(), [CHECK_CONDITION; 2], "no conflict keeps it from the other path");
    take_attention(&mut there);
    assert_eq!(there.reserve_in(READ_KEYS)[8..], KEY_7);
    // Both daemons call their port the same, so the nexus is the same.
    assert_eq!(there.access(), [GOOD; 2]);
    assert_eq!(login(&second, 1).access(), [RESERVATION_CONFLICT; 2]);
    assert_eq!(there.reserve_out(REGISTER, 0, [7, 0], APTPL), GOOD);
    second.said(&["deactivate", "disk"]);
    first.said(&["activate", "disk"]);
    take_attention(&mut b);
    assert_eq!(b.access(), [GOOD; 2], "it has begun since the volume was active");
    assert_eq!(RawClient::connect(&first.daemon.socket()).write(0, 0, &[2; 512]), 0);
    assert_eq!(image.content(first.directory.path())[..512], [2; 512]);
}

#[test]
fn clients_with_two_paths_write_without_an_error_while_a_volume_moves() {
    let Some(image) = TestImage::new("paths", &["--size", "16M"]) else { return };
    let gateways = [image.standby("one"), image.standby("two")];
    gateways[0].said(&["activate", "disk"]);
    for scheme in ["nvme+tcp", "iscsi"] {
        let urls = gateways.each_ref().map(|gateway| gateway.daemon.urls_of(scheme).remove(0));
        image.write_by_both_paths(scheme, &urls, || {
            for (from, to) in [(0, 1), (1, 0)].repeat(3) {
                gateways[from].said(&["deactivate", "disk"]);
                gateways[to].said(&["activate", "disk"]);
                assert_eq!(
                    (serving(&gateways[from]), serving(&gateways[to])),
                    ("standby".into(), "active".into())
                );
            }
        });
    }
}

#[test]
fn a_stopped_daemon_whose_volume_was_taken_writes_nothing_and_becomes_standby() {
    let Some(image) = TestImage::new("taken", &["--size", "16M"]) else { return };
    let (mut first, second) = (image.standby("first"), image.standby("second"));
    first.said(&["activate", "disk"]);
    let mut nbd = RawClient::connect(&first.daemon.socket());
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    let mut session = login(&first, 0);
    assert_eq!(session.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    first.daemon.stop();
    // What the client sends now is in the socket.
    nbd.request(1, 0, 0, 512);
    nbd.send(&[2; 512]);
    assert_eq!(second.said(&["activate", "disk", "--take"]).trim(), "disk is active");
    let mut there = RawClient::connect(&second.daemon.socket());
    assert_eq!(there.write(0, 0, &[3; 512]), 0);
    first.daemon.signal(Signal::CONT);
    assert_eq!(nbd.reply(), ESHUTDOWN);
    assert!(first.daemon.wait_for_line("another client has taken the image").contains("`disk`"));
    eventually("it is standby", || serving(&first) == "standby");
    assert!(first.said(&["status", "disk"]).contains("serving      standby"));
    assert_eq!(nbd.write(0, 0, &[4; 512]), ESHUTDOWN);
    take_attention(&mut session);
    assert_eq!((alua_state(&mut session), session.access()), (STANDBY, [CHECK_CONDITION; 2]));
    assert_eq!(there.read(0, 512), [3; 512]);
    // It serves the volume again, with another connection to the cluster.
    assert!(first.refusal(&["activate", "disk"]).contains("another client owns the image"));
    second.said(&["deactivate", "disk"]);
    assert_eq!(first.said(&["activate", "disk"]).trim(), "disk is active");
    let mut again = RawClient::connect(&first.daemon.socket());
    assert_eq!((again.read(0, 512), again.write(0, 0, &[5; 512])), (vec![3; 512], 0));
    assert!(nbd.is_closed(), "what it has sent before may be sent elsewhere by now");
    assert_eq!(login(&first, 0).reserve_in(READ_KEYS)[8..], KEY_7);
    assert_eq!(image.content(first.directory.path())[..512], [5; 512]);
}

#[test]
fn a_daemon_that_does_not_know_that_its_volume_was_taken_reports_no_keys() {
    let Some(image) = TestImage::new("unnoticed", &["--size", "16M"]) else { return };
    let (first, second) = (image.standby("first"), image.standby("second"));
    first.said(&["activate", "disk"]);
    let mut session = login(&first, 0);
    assert_eq!(session.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    assert_eq!(session.reserve_in(READ_KEYS)[8..], KEY_7);
    second.said(&["activate", "disk", "--take"]);
    let mut there = login(&second, 0);
    assert_eq!(there.reserve_out(REGISTER, 0, [7, 8], APTPL), GOOD);
    let read_keys = [0x5e, READ_KEYS, 0, 0, 0, 0, 0, 1, 0, 0];
    assert_eq!(session.run(&read_keys, &[], 256).0, CHECK_CONDITION, "they are of before");
    eventually("it is standby", || serving(&first) == "standby");
}

#[test]
fn a_killed_daemon_loses_its_volume_to_one_that_takes_it() {
    let Some(image) = TestImage::new("killed-owner", &["--size", "16M"]) else { return };
    let (mut first, second) = (image.standby("first"), image.standby("second"));
    first.said(&["activate", "disk"]);
    first.daemon.signal(Signal::KILL);
    first.daemon.wait();
    assert_eq!(second.said(&["activate", "disk", "--take"]).trim(), "disk is active");
    assert_eq!(RawClient::connect(&second.daemon.socket()).write(0, 0, &[1; 512]), 0);
}

#[test]
fn a_daemon_that_takes_over_from_another_is_active_or_standby_as_that() {
    let Some(image) = TestImage::new("handed-on", &["--size", "16M"]) else { return };
    let place = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", place.path().join("control").display());
    let (config, state) = (image.standby_config("host"), place.path().join("state"));
    let socket = place.path().join("nbd");
    let nbd = format!("unix:{}", socket.display());
    let own = ["--config", &config, "--iscsi", "127.0.0.1:0", "--nbd", &nbd, "--control", &control];
    let arguments = [&own[..], &["--state", state.to_str().unwrap()]].concat();
    let ctl = |command: &str| succeed(Command::new(BLOCKMUX).args(["ctl", &control, command, "disk"]));
    let access = |daemon: &Daemon| RawIscsi::login(&daemon.urls_of("iscsi")[0], NAMES[0]).access();
    let take_over = |mut before: Daemon| {
        let after = Daemon::serve_only(&[&arguments[..], &["--takeover", &control]].concat());
        assert!(before.wait().success());
        after
    };
    let first = Daemon::serve_only(&arguments);
    ctl("activate");
    let second = take_over(first);
    assert_eq!(access(&second), [GOOD; 2]);
    ctl("deactivate");
    let third = take_over(second);
    assert_eq!(access(&third), [CHECK_CONDITION; 2]);
    ctl("activate");
    assert_eq!(access(&third), [GOOD; 2]);
    // A client that does not reconnect goes on, as nobody else has served the image.
    let mut nbd = RawClient::connect(&socket);
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    let fourth = take_over(third);
    assert_eq!((nbd.write(0, 0, &[2; 512]), access(&fourth)), (0, [GOOD; 2]));
    // Somebody has begun a turn that this daemon knows nothing of.
    image.begin_another_turn();
    let fifth = take_over(fourth);
    assert!(nbd.is_closed(), "what it has sent may be out of date");
    assert_eq!(access(&fifth), [CHECK_CONDITION; 2]);
    ctl("activate");
    assert_eq!(access(&fifth), [GOOD; 2]);
}

#[test]
fn a_target_that_gets_an_active_volume_ends_the_sessions_that_the_volume_fences() {
    let Some(image) = TestImage::new("attached-later", &["--size", "16M"]) else { return };
    let config = image.standby_config("host");
    let volumes = fs::read_to_string(&config).unwrap() + "[[volume]]\nname = 'other'\nspec = 'mem:16m'\n";
    let write = |luns: &str| {
        let name = "iqn.2026-11.com.example:t";
        let target = format!("[[iscsi_target]]\nTargetName = '{name}'\nluns = {{ {luns} }}\n");
        fs::write(&config, format!("{volumes}{target}")).unwrap();
    };
    write("1 = 'other'");
    let daemon = Controlled::serve(&["--config", &config, "--iscsi", "127.0.0.1:0"]);
    let mut early = login(&daemon, 0);
    daemon.said(&["activate", "disk"]);
    daemon.said(&["deactivate", "disk"]);
    daemon.said(&["activate", "disk"]);
    write("0 = 'disk', 1 = 'other'");
    daemon.said(&["reload"]);
    assert_eq!(early.event().0, 1, "it is asked to log out, because its path to the volume fails");
    assert_eq!(login(&daemon, 0).access(), [GOOD; 2]);
}

#[test]
fn an_image_that_aoe_exports_is_not_moved() {
    let Some(image) = TestImage::new("sessionless", &["--size", "16M"]) else { return };
    let config = image.standby_config("host");
    let write = |exclusive: &str, protocols: &str| {
        let spec = format!("{}&exclusive={exclusive}", image.spec());
        let volume = format!("[[volume]]\nname = 'disk'\nspec = '{spec}'\nprotocols = [{protocols}]\n");
        fs::write(&config, volume).unwrap();
    };
    let serve = || Controlled::serve(&["--config", &config, "--iscsi", "127.0.0.1:0", "--aoe", "lo"]);
    write("standby", "'iscsi'");
    let daemon = serve();
    write("standby", "'iscsi', 'aoe'");
    let refused = daemon.refusal(&["reload"]);
    assert!(refused.contains("Ethernet has no sessions that could end"), "{refused}");
    drop(daemon);
    write("on", "'iscsi', 'aoe'");
    let daemon = serve();
    let refused = daemon.refusal(&["deactivate", "disk"]);
    assert!(refused.contains("disk: AoE exports it, which has no sessions that could end"), "{refused}");
    assert_eq!((serving(&daemon), login(&daemon, 0).access()), ("active".into(), [GOOD; 2]));
    write("on", "'iscsi'");
    daemon.said(&["reload"]);
    eventually("AoE exports it no longer", || daemon.ctl(&["deactivate", "disk"]).status.success());
}

#[test]
fn only_a_daemon_has_an_image_that_is_standby() {
    let Some(image) = TestImage::new("copied", &["--size", "16M"]) else { return };
    let refused = blockmux(["copy", "null:16m", &image.standby_spec()]);
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("exclusive=standby is for daemons"), "{said}");
}

const ESHUTDOWN: u32 = 108;
