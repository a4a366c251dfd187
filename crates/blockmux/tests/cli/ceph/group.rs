//! Gateways of a group: daemons that share images, and decide among themselves who serves each.

use super::TestImage;
use crate::api::exchange;
use crate::control::{Controlled, within};
use crate::daemon::Daemon;
use crate::fencing::{APTPL, EXCLUSIVE_ACCESS, NAMES, READ_KEYS, REGISTER, RESERVE};
use crate::program::text;
use crate::raw_iscsi::{GOOD, RESERVATION_CONFLICT, RawIscsi};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

/// A gateway with two volumes, `v0` and `v1`, in one target and one subsystem.
struct Gateway {
    controlled: Controlled,
    name: &'static str,
    arguments: Vec<String>,
}

impl Gateway {
    /// Starts the gateway of this name. `shared` lets several of them run on this machine, as on
    /// several.
    fn start(images: &[TestImage; 2], name: &'static str) -> Gateway {
        let config = images[0].conf.with_file_name(format!("{}-{name}.toml", images[0].name));
        let [v0, v1] = images.each_ref().map(|image| format!("{}&exclusive=group", image.spec()));
        let (group, conf) = (&images[0].name, images[0].conf.display());
        let content = format!(
            "[group]\nname = '{group}'\nmember = '{name}'\naddress = '{name}.example'\npool = 'rbd'\nconf = '{conf}'\n\
             [[volume]]\nname = 'v0'\nspec = '{v0}'\nshared = true\n\
             [[volume]]\nname = 'v1'\nspec = '{v1}'\nshared = true\n\
             [[iscsi_target]]\nTargetName = 'iqn.2026-11.t:gateways'\nluns = {{ 0 = 'v0', 1 = 'v1' }}\n\
             [[nvme_subsystem]]\nnqn = 'nqn.2026-11.t:gateways'\nnamespaces = {{ 1 = 'v0', 2 = 'v1' }}\n"
        );
        fs::write(&config, content).unwrap();
        let config = config.to_str().unwrap();
        let arguments = ["--config", config, "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"];
        let arguments = arguments.map(str::to_owned).to_vec();
        let controlled = Controlled::serve(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        Gateway { controlled, name, arguments }
    }

    fn start_again(&mut self) {
        let control = format!("unix:{}", self.controlled.socket().display());
        let own = self.arguments.iter().map(String::as_str);
        let arguments: Vec<_> = ["--control", &control].into_iter().chain(own).collect();
        self.controlled.daemon.start_again(&arguments);
    }

    fn group(&self) -> Value {
        serde_json::from_str(&self.controlled.said(&["cluster", "status", "--json"])).unwrap()
    }

    /// Who serves a volume, as the group's table says.
    fn owner(&self, volume: usize) -> Option<String> {
        let volume = &self.group()["volumes"][volume];
        (volume["state"] == "active").then(|| volume["member"].as_str().unwrap().to_owned())
    }

    /// Whether it serves as many volumes, as it says itself.
    fn serves(&self, count: usize) -> bool {
        let status = self.controlled.status();
        let volumes = status["volumes"].as_array().unwrap().iter();
        volumes.filter(|volume| volume["serving"] == "active").count() == count
    }

    fn url(&self, scheme: &str) -> String {
        self.controlled.daemon.urls_of(scheme).remove(0)
    }
}

/// What the cluster says of the clients that it refuses. The word was another one before Ceph 16.
fn blocklist(image: &TestImage) -> String {
    let list =
        |word: &str| Command::new("ceph").arg("--conf").arg(&image.conf).args(["osd", word, "ls"]).output();
    let lists = ["blocklist", "blacklist"].map(|word| list(word).unwrap());
    text(&lists.iter().find(|output| output.status.success()).expect("it is told").stdout)
}

/// Asks until it is so; fails after two minutes.
fn at_last(what: &str, is_so: impl Fn() -> bool) {
    within(Duration::from_secs(120), what, is_so);
}

fn images(name: &str) -> Option<[TestImage; 2]> {
    let one = TestImage::new(name, &["--size", "16M"])?;
    Some([one, TestImage::new(&format!("{name}-1"), &["--size", "16M"])?])
}

/// Moves the first volume between the gateways while a client with both paths writes.
fn move_while_writing(image: &TestImage, gateways: [&Gateway; 2], scheme: &str) {
    image.write_by_both_paths(scheme, &gateways.map(|gateway| gateway.url(scheme)), || {
        for gateway in gateways.repeat(2) {
            let said = gateway.controlled.said(&["cluster", "move", "v0", gateway.name]);
            assert!(said.contains(&format!("v0 moves to {}", gateway.name)), "{said}");
            at_last("it moves", || gateway.owner(0).as_deref() == Some(gateway.name));
        }
    });
}

#[test]
fn gateways_share_volumes_which_move_while_clients_write() {
    let Some(images) = images("gateways") else { return };
    let (a, b) = (Gateway::start(&images, "a"), Gateway::start(&images, "b"));
    at_last("one each", || a.serves(1) && b.serves(1));
    at_last("the group knows", || a.owner(0).is_some() && a.owner(1).is_some());
    assert_ne!(a.owner(0), a.owner(1));
    let refused = a.controlled.refusal(&["activate", "v0"]);
    assert!(refused.contains("use 'blockmux ctl cluster move v0 MEMBER'"), "{refused}");
    let refused = a.controlled.refusal(&["cluster", "move", "v0", "c"]);
    assert!(refused.contains("the group has no member 'c'"), "{refused}");
    for scheme in ["nvme+tcp", "iscsi"] {
        move_while_writing(&images[0], [&a, &b], scheme);
    }
    let stream = UnixStream::connect(a.controlled.socket()).unwrap();
    let (_, metrics) = exchange(stream, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
        line.parse::<f64>().unwrap()
    };
    let values = ["joined", "members_up", "volumes"].map(|name| value(&format!("blockmux_group_{name}")));
    assert_eq!(values, [1.0, 2.0, 2.0]);
    a.controlled.said(&["cluster", "move", "v0"]);
    a.controlled.said(&["cluster", "drain"]);
    at_last("the other one serves both", || a.serves(0) && b.serves(2));
    a.controlled.said(&["cluster", "undrain", "a"]);
    at_last("one each", || a.serves(1) && b.serves(1));
    let (of_a, of_b) = (a.group(), b.group());
    assert_eq!((&of_a["to_fence"], &of_a["members"]), (&Value::Array(Vec::new()), &of_b["members"]));
    let said = a.controlled.said(&["cluster", "status"]);
    assert!(said.contains("a  up, 1 volume, at a.example"), "{said}");
}

#[test]
fn a_killed_gateway_loses_its_volumes_with_their_reservations_and_gets_some_back() {
    let Some(images) = images("gateway-killed") else { return };
    let mut gateways = [Gateway::start(&images, "a"), Gateway::start(&images, "b")];
    at_last("one each", || gateways.iter().all(|gateway| gateway.serves(1)));
    at_last("the group knows", || gateways[0].owner(0).is_some());
    if gateways[0].owner(0).as_deref() == Some("b") {
        gateways.reverse();
    }
    let [dead, other] = &mut gateways;
    let mut session = RawIscsi::login(&dead.url("iscsi"), NAMES[0]);
    assert_eq!(session.access(), [GOOD; 2]);
    assert_eq!(session.reserve_out(REGISTER, 0, [0, 7], APTPL), GOOD);
    assert_eq!(session.reserve_out(RESERVE, EXCLUSIVE_ACCESS, [7, 0], 0), GOOD);
    dead.controlled.daemon.signal(Signal::KILL);
    dead.controlled.daemon.wait();
    at_last("the other one serves both", || other.serves(2));
    let mut there = RawIscsi::login(&other.url("iscsi"), NAMES[0]);
    assert_eq!(there.reserve_in(READ_KEYS)[8..], [0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(there.access(), [GOOD; 2]);
    assert_eq!(RawIscsi::login(&other.url("iscsi"), NAMES[1]).access(), [RESERVATION_CONFLICT; 2]);
    dead.start_again();
    at_last("one each", || dead.serves(1) && other.serves(1));
    // One that stops gives its volumes away first, so nobody is fenced.
    let client = |gateway: &Gateway| {
        let group = gateway.group();
        let members = group["members"].as_array().unwrap();
        let own = members.iter().find(|member| member["name"] == gateway.name).unwrap();
        own["client"].as_str().unwrap().to_owned()
    };
    let last = client(dead);
    dead.controlled.daemon.signal(Signal::TERM);
    assert!(dead.controlled.daemon.wait().success());
    at_last("the other one serves both", || other.serves(2));
    assert!(!blocklist(&images[0]).contains(&last), "{last}");
    let group = other.group();
    let state = |name: &str| {
        let members = group["members"].as_array().unwrap();
        members.iter().find(|member| member["name"] == name).unwrap()["state"].clone()
    };
    assert_eq!((state(dead.name), state(other.name)), ("down".into(), "up".into()));
}

#[test]
fn a_new_process_of_a_gateway_continues_with_its_volumes() {
    let Some(images) = images("gateway-next") else { return };
    let mut first = Gateway::start(&images, "a");
    at_last("it serves both", || first.serves(2));
    let control = format!("unix:{}", first.controlled.socket().display());
    let state = first.controlled.daemon.directory.path().join("state/blockmux");
    let own = first.arguments.iter().map(String::as_str);
    let new = ["--control", &control, "--takeover", &control, "--state", state.to_str().unwrap()];
    let arguments: Vec<_> = new.into_iter().chain(own).collect();
    let next = Daemon::serve_only(&arguments);
    assert!(first.controlled.daemon.wait().success());
    at_last("it serves both", || first.serves(2));
    assert_eq!(RawIscsi::login(&next.urls_of("iscsi")[0], NAMES[0]).access(), [GOOD; 2]);
    assert_eq!(first.group()["members"][0]["state"], "up");
}
