//! ATA over Ethernet between two network namespaces: initiator and target with each other, and the
//! initiator with vblade.
//!
//! The tests need root. Without it, or without `ip`, every test here prints a line that begins with
//! `skipped: ` and ends.

use crate::control::eventually;
use crate::program::{BLOCKMUX, end_by, half_empty_file, has, succeed, text, unignore_signals};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two network namespaces and a veth pair between them; the interface is called `veth` in both.
struct VethNamespaces {
    target: String,
    initiator: String,
}

impl VethNamespaces {
    /// `None`, with a printed reason, if it cannot be created.
    fn new(mtu: u32) -> Option<VethNamespaces> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !has("ip") {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skip("network namespaces need root");
            return None;
        }
        let (own, nth) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let [target, initiator] = ["t", "i"].map(|side| format!("blockmux-{own}-{nth}{side}"));
        for name in [&target, &initiator] {
            let made = Command::new("ip").args(["netns", "add", name]).output().unwrap();
            if !made.status.success() {
                skip(&format!("cannot create network namespaces here: {}", text(&made.stderr)));
                return None;
            }
        }
        let veth = VethNamespaces { target, initiator };
        let add =
            ["-n", &veth.target, "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns"];
        let added = Command::new("ip").args(add).arg(&veth.initiator).output().unwrap();
        if !added.status.success() {
            skip(&format!("no veth here: {}", text(&added.stderr)));
            return None;
        }
        for name in [&veth.target, &veth.initiator] {
            succeed(Command::new("ip").args(["-n", name, "link", "set", "lo", "up"]));
            veth.ip(name, &["mtu", &mtu.to_string(), "up"]);
        }
        Some(veth)
    }

    fn ip(&self, name: &str, set: &[&str]) {
        succeed(Command::new("ip").args(["-n", name, "link", "set", "veth"]).args(set));
    }

    /// Adds a second veth pair, with interfaces called `spare`.
    fn add_spare(&self) {
        let add =
            ["-n", &self.target, "link", "add", "spare", "type", "veth", "peer", "name", "spare", "netns"];
        succeed(Command::new("ip").args(add).arg(&self.initiator));
        for name in [&self.target, &self.initiator] {
            succeed(Command::new("ip").args(["-n", name, "link", "set", "spare", "up"]));
        }
    }

    /// A command that runs a program in the target's namespace.
    fn at_target(&self, program: &str) -> Command {
        within(&self.target, program)
    }

    /// Runs blockmux in the initiator's namespace.
    fn blockmux(&self, args: &[&str]) -> Output {
        within(&self.initiator, BLOCKMUX).args(args).output().unwrap()
    }

    /// Output of discovery, which waits for answers for one second. On a busy machine none may
    /// arrive in that time, so it is repeated.
    fn discovers(&self) -> String {
        let mut attempts = (0..10).map(|_| self.says(&["discover", "aoe://veth"]));
        attempts.find(|found| !found.is_empty()).expect("nobody answers")
    }

    /// Output of the program.
    fn says(&self, args: &[&str]) -> String {
        succeed(within(&self.initiator, BLOCKMUX).args(args))
    }

    fn serve(&self, args: &[&str]) -> Server {
        let mut command = self.at_target(BLOCKMUX);
        Server::start(command.args(["serve", "--json"]).args(args))
    }
}

impl Drop for VethNamespaces {
    fn drop(&mut self) {
        for name in [&self.target, &self.initiator] {
            // It may not have been created.
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn skip(why: &str) {
    println!("skipped: {why}");
}

fn within(namespace: &str, program: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, program]);
    command
}

/// A program in a namespace, killed when dropped. `ip netns exec` is replaced by the program, so
/// the child process is the program.
struct Server {
    child: Child,
    ready: String,
}

impl Server {
    /// Waits for the first line of output.
    fn start(command: &mut Command) -> Server {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        if ready.is_empty() {
            let mut error = String::new();
            child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            panic!("did not start: {error}");
        }
        Server { child, ready }
    }

    fn urls(&self) -> Vec<String> {
        let json: Value = serde_json::from_str(&self.ready).unwrap();
        let exports = json["exports"].as_array().unwrap().iter();
        exports
            .flat_map(|export| export["urls"].as_array().unwrap())
            .map(|url| url.as_str().unwrap().to_owned())
            .collect()
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies a file to the disk and back, and compares both.
fn copies_there_and_back(veth: &VethNamespaces, url: &str, directory: &Path, len: usize) {
    let source = half_empty_file(directory, len);
    let spec = format!("file:{}", source.display());
    let copied = directory.join("copied");
    let back = format!("file:{}", copied.display());
    veth.says(&["copy", "--overwrite", &spec, url]);
    std::fs::write(&copied, "").unwrap();
    std::fs::File::options().write(true).open(&copied).unwrap().set_len(len as u64).unwrap();
    veth.says(&["copy", "--overwrite", url, &back]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&copied).unwrap(), "{url}");
}

#[test]
fn the_initiator_uses_a_disk_of_vblade() {
    if !has("vblade") {
        return;
    }
    for mtu in [1500, 9000] {
        let Some(veth) = VethNamespaces::new(mtu) else { return };
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        std::fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
        let mut vblade = veth.at_target("vblade");
        let mut child = vblade
            .args(["3", "1", "veth"])
            .arg(&disk)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let info: Value = serde_json::from_str(&veth.says(&["info", "--json", "aoe://veth/e3.1"])).unwrap();
        assert_eq!((info["size"].as_u64(), info["disk"].as_str()), (Some(8 << 20), Some("e3.1")), "{info}");
        let sectors = if mtu == 1500 { 2 } else { 17 };
        assert_eq!(info["stations"][0]["sectors"].as_u64(), Some(sectors), "{info}");
        let found = veth.discovers();
        assert!(found.contains("aoe://veth/e3.1") && found.contains("8 MiB"), "{found}");
        copies_there_and_back(&veth, "aoe://veth/e3.1", directory.path(), 8 << 20);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn initiator_and_target_work_at_every_mtu() {
    for mtu in [1500, 4132, 4608, 9000] {
        let Some(veth) = VethNamespaces::new(mtu) else { return };
        let server = veth.serve(&["a=mem:8m", "b=mem:1g", "--aoe", "veth", "--aoe-shelf", "7"]);
        assert_eq!(server.urls(), ["aoe://veth/e7.0", "aoe://veth/e7.1"]);
        let found = veth.discovers();
        assert_eq!(found.lines().count(), 2, "{found}");
        assert!(found.contains("aoe://veth/e7.1  1 GiB"), "{found}");
        let directory = tempfile::tempdir().unwrap();
        copies_there_and_back(&veth, "aoe://veth/e7.0", directory.path(), 8 << 20);
        server.stop();
    }
}

#[test]
fn volumes_with_disk_names_are_in_any_shelf() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    let server = veth.serve(&["e7.3=mem:8m", "e900.254=mem:4m", "plain=mem:2m", "--aoe", "veth"]);
    let urls = ["aoe://veth/e7.3", "aoe://veth/e900.254", "aoe://veth/e0.2"];
    assert_eq!(server.urls(), urls);
    let found = veth.discovers();
    assert!(found.lines().count() == 3 && urls.iter().all(|url| found.contains(url)), "{found}");
    let directory = tempfile::tempdir().unwrap();
    copies_there_and_back(&veth, urls[1], directory.path(), 4 << 20);
    server.stop();
    let refused = veth.blockmux(&["serve", "a=mem:1m", "e0.0=mem:1m", "--aoe", "veth"]);
    assert!(text(&refused.stderr).contains("two volumes are disk e0.0"), "{}", text(&refused.stderr));
    let refused = veth.blockmux(&["serve", "mem:1m?block_size=4096", "--aoe", "veth"]);
    let said = text(&refused.stderr);
    assert!(
        said.contains(
            "has blocks of 4096 bytes, but ATA over Ethernet supports at most 512; leave `aoe` out"
        ),
        "{said}"
    );
    // A volume that AoE does not serve may have larger blocks.
    let config = directory.path().join("blockmux.toml");
    let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m?block_size=4096'\nprotocols = ['nbd']\n";
    let small = "[[volume]]\nname = 'b'\nspec = 'mem:1m'\n";
    let listeners = "aoe = ['veth']\nnbd = ['unix:nbd.sock']\n";
    std::fs::write(&config, format!("{listeners}{volume}{small}")).unwrap();
    let server = veth.serve(&["--config", &config.display().to_string()]);
    assert_eq!(server.urls().iter().filter(|url| url.starts_with("aoe:")).count(), 1);
    server.stop();
}

#[test]
fn several_interfaces_are_paths_while_one_of_them_is_up() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    veth.add_spare();
    let server = veth.serve(&["mem:8m", "--aoe", "veth", "--aoe", "spare"]);
    let stations = || {
        let info = veth.says(&["info", "--json", "aoe://veth,spare/e0.0"]);
        let info: Value = serde_json::from_str(&info).unwrap();
        info["stations"].as_array().unwrap().len()
    };
    // On a busy machine the second station may answer too late to be listed.
    assert!((0..100).any(|_| stations() == 2), "one of them never answers");
    let directory = tempfile::tempdir().unwrap();
    copies_there_and_back(&veth, "aoe://veth,spare/e0.0", directory.path(), 8 << 20);
    veth.ip(&veth.initiator, &["down"]);
    assert_eq!(stations(), 1);
    copies_there_and_back(&veth, "aoe://veth,spare/e0.0", directory.path(), 8 << 20);
    server.stop();
}

#[test]
fn disks_of_one_interface_are_served_by_several_cores() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    let disks = ["a=mem:4m", "b=mem:4m", "c=mem:4m", "d=mem:4m"];
    let server = veth.serve(&[&disks[..], &["--aoe", "veth", "--cores", "2"]].concat());
    let found = veth.discovers();
    assert_eq!(found.lines().count(), 4, "each of them once: {found}");
    let directory = tempfile::tempdir().unwrap();
    // Neighbouring slots are served by different cores.
    for slot in 0..4 {
        copies_there_and_back(&veth, &format!("aoe://veth/e0.{slot}"), directory.path(), 4 << 20);
    }
    server.stop();
}

#[test]
fn frames_follow_a_changed_mtu_of_an_interface() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    let server = veth.serve(&["mem:8m", "--aoe", "veth"]);
    let directory = tempfile::tempdir().unwrap();
    for (mtu, sectors) in [("9000", 17), ("1500", 2), ("4608", 8)] {
        for name in [&veth.target, &veth.initiator] {
            veth.ip(name, &["mtu", mtu]);
        }
        let info = || veth.says(&["info", "--json", "aoe://veth/e0.0"]);
        let now = || serde_json::from_str::<Value>(&info()).unwrap()["stations"][0]["sectors"].as_u64();
        assert!((0..1000).any(|_| now() == Some(sectors)), "it never has {sectors} at {mtu}");
        copies_there_and_back(&veth, "aoe://veth/e0.0", directory.path(), 8 << 20);
    }
    server.stop();
}

#[test]
fn a_limit_of_each_client_holds_one_station_and_neither_another_one_nor_another_disk() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    veth.add_spare();
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("control").display());
    let disks = ["a=mem:1k", "b=mem:1k", "--aoe", "veth", "--aoe", "spare", "--control", &socket];
    let server = veth.serve(&disks);
    let ctl = |args: &[&str]| succeed(Command::new(BLOCKMUX).args(["ctl", &socket, "--json"]).args(args));
    let held = || {
        let status: Value = serde_json::from_str(&ctl(&["status"])).unwrap();
        [0, 1].map(|nth| status["volumes"][nth]["throttled"]["pending"].as_u64().unwrap_or(0))
    };
    ctl(&["limit", "a", "--client", "bandwidth=1"]);
    // One request starts, and the next one would wait for minutes. With larger frames an initiator
    // would begin with reads that test whether they pass.
    veth.says(&["copy", "--overwrite", "aoe://veth/e0.0", "null:1k"]);
    let mut second = within(&veth.initiator, BLOCKMUX);
    let mut second = second
        .args(["copy", "--overwrite", "aoe://veth/e0.0", "null:1k"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("a request of this station is held", || held()[0] > 0);
    veth.says(&["copy", "--overwrite", "aoe://spare/e0.0", "null:1k"]);
    veth.says(&["copy", "--overwrite", "aoe://veth/e0.1", "null:1k"]);
    assert!(held()[0] > 0 && held()[1] == 0, "{:?}", held());
    ctl(&["limit", "a", "--client", "none"]);
    assert!(second.wait().unwrap().success());
    server.stop();
}

#[test]
fn the_disks_follow_the_config_while_the_daemon_runs() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (config, control) = (path("b.toml"), format!("unix:{}", path("control")));
    let write = |volumes: &str| {
        let text = format!("aoe = ['veth']\nnbd = ['unix:n.sock']\n{volumes}");
        std::fs::write(&config, text).unwrap();
    };
    let volume = |name: &str, rest: &str| format!("[[volume]]\nname = '{name}'\nspec = 'mem:1m'\n{rest}");
    let (both, keep) = (volume("a", "") + &volume("keep", ""), volume("keep", ""));
    write(&both);
    let server = veth.serve(&["--config", &config, "--control", &control]);
    let ctl = |args: &[&str]| Command::new(BLOCKMUX).args(["ctl", &control]).args(args).output().unwrap();
    let said = |args: &[&str]| succeed(Command::new(BLOCKMUX).args(["ctl", &control]).args(args));
    // The disks are served once, however often the config is loaded.
    for nth in 0..2 {
        write(&(both.clone() + &volume(&format!("x{nth}"), "protocols = ['nbd']\n")));
        said(&["reload"]);
    }
    std::fs::write(path("source"), [7; 1 << 16]).unwrap();
    let source = format!("file:{}", path("source"));
    let copy = || veth.blockmux(&["copy", "--overwrite", &source, "aoe://veth/e0.0"]);
    assert!(copy().status.success());
    let status: Value = serde_json::from_str(&said(&["status", "--json"])).unwrap();
    assert_eq!(status["volumes"][0]["written_bytes"], 1 << 16, "{status}");
    // Its stations use the volume.
    write(&keep);
    let planned = said(&["diff"]);
    assert!(planned.contains("    affects aoe ") && planned.contains(", of e0.0\n"), "{planned}");
    let refused = ctl(&["remove", "a"]);
    assert!(text(&refused.stderr).contains("a: is in use by aoe "), "{refused:?}");
    assert!(text(&ctl(&["reload"]).stderr).contains("; it is in use by aoe "));
    // Withdrawn, and served again.
    write(&(volume("a", "protocols = ['nbd']\n") + &keep));
    assert!(!said(&["reload"]).contains("at the next start"));
    assert_eq!(said(&["sessions"]).matches("e0.0").count(), 0);
    assert!(text(&copy().stderr).contains("no disk e0.0 answers"));
    write(&both);
    said(&["reload"]);
    assert!(copy().status.success());
    // A new volume is served if its name is a disk address; others wait, and so do interfaces.
    assert!(said(&["add", "e5.1=mem:1m"]).contains("aoe://veth/e5.1"));
    veth.says(&["info", "aoe://veth/e5.1"]);
    said(&["save"]);
    let saved = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, saved + &volume("e5.2", "") + &volume("new", "")).unwrap();
    let report = said(&["reload"]);
    let waits = "takes effect at the next start:\n  + volume new: aoe\n";
    assert!(report.contains(waits) && !report.contains("+ volume e5.2: aoe"), "{report}");
    veth.says(&["info", "aoe://veth/e5.2"]);
    // An address belongs to one volume until the daemon stops. The first one of the config would
    // have it after a start.
    said(&["remove", "a", "--force"]);
    let refused = ctl(&["add", "e0.0=mem:1m"]);
    assert!(text(&refused.stderr).contains("two volumes are disk e0.0"), "{refused:?}");
    assert!(text(&copy().stderr).contains("no disk e0.0 answers"));
    server.stop();
}

#[test]
fn a_disk_can_be_measured_and_exported_again() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    let _server = veth.serve(&["mem:64m", "--aoe", "veth"]);
    let options = ["--rw", "randrw", "--bs", "4k", "--iodepth", "16", "--runtime", "1", "--json"];
    let directory = tempfile::tempdir().unwrap();
    let mut bench = within(&veth.initiator, BLOCKMUX);
    // The bench writes its results to the current directory.
    bench.current_dir(directory.path()).args(["bench", "aoe://veth/e0.0"]).args(options);
    let json = succeed(&mut bench);
    assert!(json.contains("\"aoe\""), "{json}");
    let gateway = "blockmux-gateway";
    let command = format!("{BLOCKMUX} info $BLOCKMUX_URL");
    let info = veth.says(&["serve", &format!("{gateway}=aoe://veth/e0.0"), "--run", &command]);
    assert!(info.contains("64 MiB"), "{info}");
}

#[test]
fn aoe_works_over_loopback() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    let server = veth.serve(&["mem:8m", "--aoe", "lo"]);
    let info = succeed(veth.at_target(BLOCKMUX).args(["info", "aoe://lo/e0.0"]));
    assert!(info.contains("8 MiB"), "{info}");
    server.stop();
}

#[test]
fn a_missing_disk_and_a_missing_interface_are_reported() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    let nobody = veth.blockmux(&["info", "aoe://veth/e9.9"]);
    assert!(text(&nobody.stderr).contains("no disk e9.9 answers at veth"), "{}", text(&nobody.stderr));
    let nowhere = veth.blockmux(&["info", "aoe://none/e9.9"]);
    assert!(text(&nowhere.stderr).contains("interface none: "), "{}", text(&nowhere.stderr));
    let refused = veth.blockmux(&["serve", "mem:1m", "--aoe", "none"]);
    assert!(text(&refused.stderr).contains("`ip link` lists"), "{}", text(&refused.stderr));
    veth.ip(&veth.initiator, &["down"]);
    let down = veth.blockmux(&["info", "aoe://veth/e9.9"]);
    assert!(text(&down.stderr).contains("bring it up"), "{}", text(&down.stderr));
}

#[test]
fn a_missing_capability_is_reported() {
    if !has("setpriv") {
        return;
    }
    let Some(veth) = VethNamespaces::new(1500) else { return };
    for args in [&["serve", "mem:1m", "--aoe", "veth"][..], &["info", "aoe://veth/e0.0"]] {
        let mut command = within(&veth.initiator, "setpriv");
        command.args(["--bounding-set=-net_raw", BLOCKMUX]).args(args);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains("raw frames need CAP_NET_RAW"), "{}", text(&output.stderr));
    }
    // Without raw frames the capability is not needed.
    let mut command = within(&veth.initiator, "setpriv");
    succeed(command.args(["--bounding-set=-net_raw", BLOCKMUX, "serve", "mem:1m", "--run", "true"]));
}

#[test]
fn io_continues_after_the_interface_was_down_and_after_the_target_restarted() {
    let Some(veth) = VethNamespaces::new(9000) else { return };
    let directory = tempfile::tempdir().unwrap();
    let (source, disk) = (half_empty_file(directory.path(), 32 << 20), directory.path().join("disk"));
    std::fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let (from, spec) = (format!("file:{}", source.display()), format!("file:{}", disk.display()));
    let server = veth.serve(&[&spec, "--aoe", "veth"]);
    let mut copy = within(&veth.initiator, BLOCKMUX);
    let mut copy =
        copy.args(["copy", "--overwrite", &from, "aoe://veth/e0.0"]).stdout(Stdio::null()).spawn().unwrap();
    for name in [&veth.target, &veth.initiator] {
        veth.ip(name, &["down"]);
        veth.ip(name, &["up"]);
    }
    server.stop();
    let server = veth.serve(&[&spec, "--aoe", "veth"]);
    assert!(copy.wait().unwrap().success());
    server.stop();
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&disk).unwrap());
}

#[test]
fn a_network_that_loses_frames_loses_no_data() {
    if !has("tc") {
        return;
    }
    for percent in ["1%", "5%", "20%"] {
        let Some(veth) = VethNamespaces::new(9000) else { return };
        for name in [&veth.target, &veth.initiator] {
            let netem =
                ["qdisc", "add", "dev", "veth", "root", "netem", "loss", percent, "duplicate", percent];
            let made = Command::new("tc").args(["-n", name]).args(netem).output().unwrap();
            if !made.status.success() {
                skip(&format!("the kernel has no netem: {}", text(&made.stderr)));
                return;
            }
        }
        let server = veth.serve(&["mem:4m", "--aoe", "veth"]);
        let directory = tempfile::tempdir().unwrap();
        copies_there_and_back(&veth, "aoe://veth/e0.0", directory.path(), 4 << 20);
        server.stop();
    }
}

#[test]
fn tshark_decodes_all_frames_without_marking_one_malformed() {
    if !has("tshark") {
        return;
    }
    unignore_signals();
    for mtu in [1500, 9000] {
        let Some(veth) = VethNamespaces::new(mtu) else { return };
        let directory = tempfile::tempdir().unwrap();
        let capture = directory.path().join("aoe.pcap");
        let server = veth.serve(&["a=mem:8m", "b=mem:8m", "--aoe", "veth", "--aoe-shelf", "7"]);
        let mut tshark = within(&veth.initiator, "tshark");
        tshark.args(["-q", "-l", "-P", "-i", "veth", "-f", "ether proto 0x88a2", "-w"]).arg(&capture);
        let mut tshark = tshark.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut seen = BufReader::new(tshark.stdout.take().unwrap());
        // It prints a line once it captures.
        let looks = std::thread::scope(|scope| {
            let first = scope.spawn(|| seen.read_line(&mut String::new()).unwrap());
            while !first.is_finished() {
                veth.discovers();
            }
            first.join().unwrap()
        });
        assert!(looks > 0, "it sees nothing");
        std::thread::spawn(move || std::io::copy(&mut seen, &mut std::io::sink()));
        copies_there_and_back(&veth, "aoe://veth/e7.0", directory.path(), 8 << 20);
        end_by(&mut tshark, Signal::INT);
        server.stop();
        let decoded = |filter: &str| {
            succeed(Command::new("tshark").arg("-r").arg(&capture).args(["-Y", filter])).lines().count()
        };
        assert!(decoded("aoe.cmd == 0 && aoe.response == 1") > 100 && decoded("aoe.cmd == 1") > 0);
        assert_eq!(decoded("_ws.malformed || !aoe"), 0, "malformed at an MTU of {mtu}");
    }
}

#[test]
fn a_disk_is_served_again_after_capabilities_are_dropped() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    let directory = tempfile::tempdir().unwrap();
    let server = veth.serve(&["mem:1m", "--aoe", "veth"]);
    veth.discovers();
    let socket = directory.path().join("socket");
    let listener = format!("unix:{}", socket.display());
    let mut command = within(&veth.initiator, BLOCKMUX);
    let gateway = Server::start(command.args(["serve", "--json", "aoe://veth/e0.0", "--nbd", &listener]));
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.child.id())).unwrap();
    assert!(status.contains("CapPrm:\t0000000000002000"), "CAP_NET_RAW alone: {status}");
    let to = format!("file:{}?size=1m", directory.path().join("copied").display());
    succeed(Command::new(BLOCKMUX).args([
        "copy",
        "--overwrite",
        &format!("nbd+unix:///disk0?socket={}", socket.display()),
        &to,
    ]));
    gateway.stop();
    server.stop();
}

#[test]
fn a_host_is_listed_as_a_session_with_its_counters_from_its_first_command_on() {
    let Some(veth) = VethNamespaces::new(1500) else { return };
    let directory = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", directory.path().join("control").display());
    let server = veth.serve(&["mem:1m", "--aoe", "veth", "--control", &control]);
    veth.discovers();
    let to = format!("file:{}?size=1m", directory.path().join("copied").display());
    veth.says(&["copy", "--overwrite", "aoe://veth/e0.0", &to]);
    let listed = succeed(Command::new(BLOCKMUX).args(["ctl", &control, "sessions", "--json"]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let link = ["netns", "exec", &veth.initiator, "cat", "/sys/class/net/veth/address"];
    let mac = succeed(Command::new("ip").args(link));
    let all = listed.as_array().unwrap();
    assert_eq!(all.len(), 1, "{listed}");
    let one = &all[0];
    assert_eq!((&one["protocol"], &one["target"]), (&"aoe".into(), &"e0.0".into()), "{listed}");
    assert_eq!((&one["initiator"], &one["address"]), (&mac.trim().into(), &mac.trim().into()), "{listed}");
    assert!(one["read_bytes"].as_u64() >= Some(1 << 20), "{listed}");
    server.stop();
}
