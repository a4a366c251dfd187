//! RoCEv2 between two network namespaces, and within one: IPv6, listeners at all addresses, and
//! several cores.
//!
//! The tests need root. Without it, or without `ip`, every test here prints a line that begins with
//! `skipped: ` and ends.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, has, succeed, text};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two network namespaces and a cable between them. Its interface is called `roce` at both ends, so
/// that the zone of a link-local address is the same.
struct Cable {
    target: String,
    initiator: String,
}

/// The addresses of the target's end; those of the initiator's end are the next ones.
const IPV4: &str = "192.0.2.1";
const IPV6: &str = "2001:db8::1";

impl Cable {
    /// `None`, with a printed reason, if it cannot be created.
    fn new() -> Option<Cable> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !has("ip") {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skip("network namespaces need root");
            return None;
        }
        let (own, nth) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let [target, initiator] = ["t", "i"].map(|side| format!("blockmux-{own}-r{nth}{side}"));
        let cable = Cable { target, initiator };
        for name in [&cable.target, &cable.initiator] {
            let made = Command::new("ip").args(["netns", "add", name]).output().unwrap();
            if !made.status.success() {
                skip(&format!("cannot create network namespaces here: {}", text(&made.stderr)));
                return None;
            }
        }
        let add =
            ["-n", &cable.target, "link", "add", "roce", "type", "veth", "peer", "name", "roce", "netns"];
        let added = Command::new("ip").args(add).arg(&cable.initiator).output().unwrap();
        if !added.status.success() {
            skip(&format!("no veth here: {}", text(&added.stderr)));
            return None;
        }
        for (name, nth) in [(&cable.target, 1), (&cable.initiator, 2)] {
            let [ipv4, ipv6, local] =
                [format!("192.0.2.{nth}/24"), format!("2001:db8::{nth}/64"), format!("fe80::{nth}/64")];
            for set in [
                &["link", "set", "lo", "up"][..],
                &["link", "set", "roce", "up"],
                &["addr", "add", &ipv4, "dev", "roce"],
                &["addr", "add", &ipv6, "dev", "roce", "nodad"],
                &["addr", "add", &local, "dev", "roce", "nodad"],
            ] {
                succeed(Command::new("ip").args(["-n", name]).args(set));
            }
        }
        Some(cable)
    }

    /// Serves a volume on two cores, with all protocols at this address.
    fn serve(&self, address: &str) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let listener = format!("{address}:0?rdma=roce");
        let mut command = within(&self.target, BLOCKMUX);
        command.args(["serve", "--json", "--cores", "2", "a=mem:4m"]);
        command.args(["--iscsi", &listener, "--srp", &listener, "--nvme-tcp", &listener]);
        command.env("XDG_STATE_HOME", directory.path().join("state"));
        Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// Runs the program at the other end of the cable.
    fn says(&self, args: &[&str]) -> String {
        succeed(within(&self.initiator, BLOCKMUX).args(args))
    }

    /// Runs the program on the target's machine.
    fn beside_the_target(&self, args: &[&str]) -> Output {
        within(&self.target, BLOCKMUX).args(args).output().unwrap()
    }

    /// Checks that data which is copied to `url` comes back from it.
    fn copies(&self, url: &str, directory: &Path, seed: u32) {
        let path = |name: &str| directory.join(name).display().to_string();
        let words = (0..1_u32 << 20).map(|word| word.wrapping_mul(2_654_435_761) ^ seed);
        let content: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        std::fs::write(path("from"), &content).unwrap();
        let (from, to) = (format!("file:{}", path("from")), format!("file:{}?size=4m", path("to")));
        let options = ["copy", "--overwrite", "--bs", "64k", "--iodepth", "16"];
        self.says(&[&options[..], &[&from, url]].concat());
        self.says(&[&options[..], &[url, &to]].concat());
        assert!(std::fs::read(path("to")).unwrap() == content, "{url}");
        std::fs::remove_file(path("to")).unwrap();
    }
}

impl Drop for Cable {
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

/// The URLs of a volume over iWARP, and over RoCEv2.
fn urls(daemon: &Daemon) -> Vec<[String; 2]> {
    ["iser", "srp", "nvme+rdma"].map(|scheme| daemon.urls_of(scheme).try_into().unwrap()).into()
}

#[test]
fn data_is_copied_over_roce_to_listeners_at_one_address_and_at_all() {
    let Some(cable) = Cable::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (seed, (listens_at, reached_at)) in (1..).zip([
        (IPV4, IPV4),
        ("0.0.0.0", IPV4),
        (&format!("[{IPV6}]"), &format!("[{IPV6}]")),
        ("[::]", &format!("[{IPV6}]")),
        ("[fe80::1%roce]", "[fe80::1%25roce]"),
    ]) {
        let daemon = cable.serve(listens_at);
        for [_, roce] in urls(&daemon) {
            assert!(roce.contains(&format!("://{reached_at}:")), "{listens_at}: {roce}");
            cable.copies(&format!("{roce}&connections=4"), directory.path(), seed);
        }
    }
}

#[test]
fn cores_of_both_sides_have_connections_of_roce() {
    let Some(cable) = Cable::new() else { return };
    let daemon = cable.serve("0.0.0.0");
    for [_, roce] in urls(&daemon) {
        let load = ["--rw", "randwrite", "--bs", "4k", "--iodepth", "8", "--numjobs", "4"];
        let checks = ["--verify", "crc32c", "--runs", "1", "--no_ceiling"];
        let mut bench = within(&cable.initiator, BLOCKMUX);
        // It writes its report there.
        succeed(bench.current_dir(daemon.directory.path()).args(["bench", &roce]).args(load).args(checks));
    }
}

/// The target has the UDP port of its address, so an initiator beside it needs another address.
#[test]
fn an_initiator_beside_a_target_of_roce_takes_an_address_of_loopback_or_says_what_to_do() {
    let Some(cable) = Cable::new() else { return };
    for address in [IPV4, "127.0.0.1"] {
        let daemon = cable.serve(address);
        for [_, roce] in urls(&daemon) {
            let output = cable.beside_the_target(&["info", &roce]);
            assert_eq!(output.status.code(), Some(0), "{roce}: {}", text(&output.stderr));
        }
    }
    for address in ["0.0.0.0", &format!("[{IPV6}]"), "[::1]"] {
        let daemon = cable.serve(address);
        let [iwarp, roce] = urls(&daemon).remove(0);
        let output = cable.beside_the_target(&["info", &format!("{roce}&reconnect=0s")]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("connect with ?rdma=iwarp"), "{said}");
        let output = cable.beside_the_target(&["info", &iwarp]);
        assert_eq!(output.status.code(), Some(0), "{iwarp}: {}", text(&output.stderr));
    }
}

/// As with Linux's `rdma_rxe`, which has the port in the kernel.
#[test]
fn the_list_of_fabrics_says_whether_the_udp_port_can_be_used() {
    let Some(cable) = Cable::new() else { return };
    let roce = || {
        let said = cable.beside_the_target(&["rdma", "--json"]).stdout;
        let found: serde_json::Value = serde_json::from_slice(&said).unwrap();
        found["fabrics"].as_array().unwrap().iter().find(|fabric| fabric["name"] == "roce").unwrap().clone()
    };
    let cannot_listen = || {
        let listener = format!("{IPV4}?rdma=roce");
        let output = cable.beside_the_target(&["serve", "mem:1m", "--srp", &listener, "--run", "true"]);
        assert!(matches!(output.status.code(), Some(0 | 2)), "{}", text(&output.stderr));
        output.status.code() == Some(2)
    };
    assert_eq!(
        (roce()["state"].as_str(), roce()["reason"].as_str(), cannot_listen()),
        (Some("works"), None, false)
    );
    let everywhere = cable.serve("0.0.0.0");
    assert_eq!((roce()["state"].as_str(), cannot_listen()), (Some("port in use"), true));
    assert!(roce()["reason"].as_str().unwrap().contains("UDP port 4791 of all addresses; "), "{}", roce());
    drop(everywhere);
    let _at_one = cable.serve(IPV4);
    assert_eq!((roce()["state"].as_str(), cannot_listen()), (Some("works"), true));
    assert!(roce()["reason"].as_str().unwrap().contains("; listen at another address"), "{}", roce());
}
