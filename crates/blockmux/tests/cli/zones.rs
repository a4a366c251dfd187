//! Link-local addresses, which belong to an interface, and the addresses in answers of servers.
//!
//! The tests need root and `ip` for a network namespace of their own.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, has, succeed, text};
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A network namespace with the links `zone0`, which has the addresses fe80::1, fe80::2 and
/// 192.0.2.1, and `zone2`, which has fe80::1 and fe80::3.
struct Links(String);

impl Links {
    /// `None`, with a printed reason, if it cannot be created.
    fn new() -> Option<Links> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !has("ip") {
            return None;
        }
        let name = format!("blockmux-{}-z{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let made = Command::new("ip").args(["netns", "add", &name]).output().unwrap();
        if !made.status.success() {
            skip(&text(&made.stderr));
            return None;
        }
        let links = Links(name);
        for command in [
            "link set lo up",
            "link add zone0 type veth peer name zone1",
            "link set zone1 up",
            "link set zone0 up",
            "addr add fe80::1/64 dev zone0 nodad",
            "addr add fe80::2/64 dev zone0 nodad",
            "addr add 192.0.2.1/24 dev zone0",
            "link add zone2 type veth peer name zone3",
            "link set zone3 up",
            "link set zone2 up",
            "addr add fe80::1/64 dev zone2 nodad",
            "addr add fe80::3/64 dev zone2 nodad",
        ] {
            let ran = Command::new("ip").args(["-n", &links.0]).args(command.split(' ')).output().unwrap();
            if !ran.status.success() {
                skip(&format!("ip {command}: {}", text(&ran.stderr)));
                return None;
            }
        }
        Some(links)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]);
        command
    }

    fn blockmux(&self, args: &[&str]) -> Output {
        self.command(BLOCKMUX).args(args).output().unwrap()
    }

    /// Output of the program.
    fn says(&self, args: &[&str]) -> String {
        succeed(self.command(BLOCKMUX).args(args))
    }

    fn info(&self, url: &str) -> Value {
        serde_json::from_str(&self.says(&["info", "--json", url])).unwrap()
    }

    /// Serves with this config file.
    fn serve(&self, args: &[&str], config: &str) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blockmux.toml");
        std::fs::write(&path, config).unwrap();
        let mut command = self.command(BLOCKMUX);
        command.args(["serve", "--json", "--config"]).arg(&path).args(args);
        command.env("XDG_STATE_HOME", directory.path().join("state"));
        Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn skip(why: &str) {
    println!("skipped: {why}");
}

/// The URL of the portal of another URL, and its port.
fn portal(url: &str) -> (String, String) {
    let place = url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    let port = place.rsplit_once(':').unwrap().1.to_owned();
    (place, port)
}

#[test]
fn a_link_local_listener_is_announced_discovered_and_used_with_its_zone() {
    let Some(links) = Links::new() else { return };
    let at = "[fe80::1%zone0]:0";
    let listeners = ["--nbd", at, "--iscsi", at, "--nvme-tcp", at, "--srp", at];
    let daemon = links.serve(&[&["a=mem:1m"][..], &listeners].concat(), "");
    for scheme in ["nbd", "iscsi", "nvme+tcp", "srp", "iser", "nvme+rdma"] {
        let url = daemon.urls_of(scheme).remove(0);
        assert!(url.starts_with(&format!("{scheme}://[fe80::1%25zone0]:")), "{url}");
        let described = links.info(&url);
        assert_eq!(described["size"], 1 << 20, "{url}");
        // A URL with the zone as people write it is the same.
        assert_eq!(links.info(&url.replacen("%25", "%", 1))["size"], 1 << 20);
        let other = links.blockmux(&["info", &url.replacen("zone0", "zone9", 1)]);
        assert!(text(&other.stderr).contains("cannot find host `fe80::1%zone9`"), "{url}");
        let none = links.blockmux(&["info", &url.replacen("%25zone0", "", 1)]);
        assert!(text(&none.stderr).contains("name the interface, as in [fe80::1%25eth0]"));
    }
    for scheme in ["iscsi", "nvme+tcp"] {
        let url = daemon.urls_of(scheme).remove(0);
        let found = links.says(&["discover", &portal(&url).0]);
        assert!(found.contains("[fe80::1%25zone0]:") && found.contains("  1 MiB"), "{found}");
        let printed = found.split(' ').next().unwrap();
        assert_eq!(links.info(printed)["size"], 1 << 20, "{printed}");
    }
    let unknown = links.blockmux(&["serve", "mem:1m", "--nbd", "[fe80::1]:0"]);
    assert!(text(&unknown.stderr).contains("name the interface, as in [fe80::1%eth0]:0"));
}

#[test]
fn another_portal_of_an_answer_is_on_the_link_of_the_connection() {
    let Some(links) = Links::new() else { return };
    for (option, scheme) in [("--iscsi", "iscsi"), ("--nvme-tcp", "nvme+tcp")] {
        // Only the second listener leads to the volume.
        let listeners = [option, "[fe80::2%zone0]:0?volumes=b", option, "[fe80::1%zone0]:0?volumes=a,b"];
        let daemon = links.serve(&[&["a=mem:1m", "b=mem:2m"][..], &listeners].concat(), "");
        let urls = daemon.urls_of(scheme);
        let [a, b] =
            ["a", "b"].map(|name| urls.iter().find(|url| url.contains(&format!(":{name}/"))).unwrap());
        assert!(a.contains("fe80::1%25zone0") && b.contains("fe80::2%25zone0"), "{a} {b}");
        // With `paths=all` the target's other portal is a path, too.
        assert_eq!(links.info(&format!("{b}?paths=all"))["size"], 2 << 20);
        let found = links.says(&["discover", &portal(b).0]);
        for printed in found.lines().map(|line| line.split(' ').next().unwrap()) {
            assert!(printed.contains("%25zone0]"), "{found}");
            links.info(printed);
        }
        assert!(found.contains("fe80::2%25zone0"), "{found}");
    }
}

#[test]
fn a_redirect_without_a_zone_or_address_is_completed_from_the_connection() {
    let Some(links) = Links::new() else { return };
    let target = |name: &str, more: &str| {
        format!("[[iscsi_target]]\nTargetName = 'iqn.2026-11.t:{name}'\nluns = {{ 0 = 'a' }}\n{more}\n")
    };
    let there = links.serve(&["a=mem:3m", "--iscsi", "[fe80::1%zone0]:0"], &target("m", ""));
    let port = portal(&there.urls_of("iscsi")[0]).1;
    for (from, address) in [("fe80::2", "[fe80::1]"), ("fe80::1", "0.0.0.0"), ("fe80::1", "[::]")] {
        for kind in ["temporary", "permanent"] {
            let more = format!("redirect = '{address}:{port}'\nredirect_kind = '{kind}'");
            let config = target("m", &more) + &target("stays", "");
            let here = links.serve(&["a=mem:1m", "--iscsi", &format!("[{from}%zone0]:0")], &config);
            let url = format!("{}/iqn.2026-11.t:m/0", portal(&here.urls_of("iscsi")[0]).0);
            assert_eq!(links.info(&url)["size"], 3 << 20, "{address} {kind}");
            links.says(&["copy", &url, "mem:3m"]);
        }
    }
}

#[test]
fn a_referral_without_a_zone_is_on_the_link_of_the_connection() {
    let Some(links) = Links::new() else { return };
    let there = links.serve(&["a=mem:3m", "--nvme-tcp", "[fe80::1%zone0]:0"], "");
    let port = portal(&there.urls_of("nvme+tcp")[0]).1;
    let config = format!("[[nvme_discovery.referral]]\ntraddr = 'fe80::1'\ntrsvcid = {port}\n");
    let here = links.serve(&["b=mem:1m", "--nvme-tcp", "[fe80::2%zone0]:0"], &config);
    let found = links.says(&["discover", &portal(&here.urls_of("nvme+tcp")[0]).0]);
    let expected = format!("nvme+tcp://[fe80::1%25zone0]:{port}/");
    let referred =
        found.lines().find(|line| line.starts_with(&expected)).unwrap_or_else(|| panic!("{found}"));
    assert!(referred.contains("  3 MiB"), "{referred}");
    links.info(referred.split(' ').next().unwrap());
}

#[test]
fn an_answer_names_no_address_of_another_link() {
    let Some(links) = Links::new() else { return };
    for (option, scheme) in [("--iscsi", "iscsi"), ("--nvme-tcp", "nvme+tcp")] {
        let places = ["[fe80::1%zone0]:0", "[fe80::1%zone2]:0", "[fe80::3%zone2]:0", "192.0.2.1:0"];
        let listeners = places.map(|place| [option, place]).concat();
        let daemon = links.serve(&[&["a=mem:1m"][..], &listeners].concat(), "");
        for url in daemon.urls_of(scheme) {
            let found = links.says(&["discover", &portal(&url).0]);
            let is_told = |part: &str| found.contains(part) || scheme == "iscsi";
            match url.split_once("%25").map(|(_, rest)| rest.starts_with("zone0")) {
                Some(true) => assert!(is_told("fe80::1%25zone0") && !found.contains("fe80::3"), "{found}"),
                Some(false) => assert!(is_told("fe80::3%25zone2") && !found.contains("zone0"), "{found}"),
                None => assert!(found.contains("192.0.2.1") && !found.contains("fe80"), "{found}"),
            }
            for printed in found.lines().map(|line| line.split(' ').next().unwrap()) {
                links.info(printed);
            }
            let copied = links.blockmux(&["copy", &format!("{url}?paths=all"), "mem:1m"]);
            let said = text(&copied.stderr);
            assert!(copied.status.success() && !said.contains("cannot be used"), "{url}: {said}");
        }
    }
}

#[test]
fn messages_name_the_interface_of_an_address() {
    let Some(links) = Links::new() else { return };
    let mut daemon = links.serve(&["-v", "a=mem:1m", "--iscsi", "[fe80::1%zone0]:0"], "");
    daemon.wait_for_line("[fe80::1%zone0]:");
    links.info(&daemon.urls_of("iscsi")[0]);
    daemon.wait_for_line("peer=\"[fe80::1%zone0]:");
    let refused = links.blockmux(&["info", "nbd://[fe80::1%25zone0]:9/a"]);
    assert!(text(&refused.stderr).contains(" [fe80::1%zone0]:9: "), "{}", text(&refused.stderr));
}
