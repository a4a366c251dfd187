//! Listeners that tell clients another address than their own.

use crate::program::{BLOCKMUX, blockmux, has, text};
use crate::reload::Configured;
use std::fs;
use std::process::Command;

const TARGET: &str = "iqn.2026-11.blockmux:a";
const SUBSYSTEM: &str = "nqn.2026-11.blockmux:a";

/// Makes a network behind NAT, then runs the script `$1` with `$2`, the program. Its listeners have
/// 10.0.0.1, to which clients have no route: they use ports of 203.0.113.7.
const ENTER: &str = r#"
    set -e
    ip link set lo up
    ip addr add 10.0.0.1/32 dev lo
    unshare --net sleep 600 & client=$!
    trap 'kill $client' EXIT
    until [ "$(readlink /proc/$client/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do :; done
    ip link add eth0 type veth peer name eth0 netns $client
    ip addr add 203.0.113.7/24 dev eth0
    ip link set eth0 up
    nsenter --target $client --net sh -ec '
        ip link set lo up
        ip addr add 203.0.113.2/24 dev eth0
        ip link set eth0 up'
    nft -f nat || { echo 'no NAT here'; exit 3; }
    client=$client sh -ec "$1" sh "$2"
"#;

/// The NAT of [`ENTER`].
const NAT: &str = "
table ip blockmux {
    chain prerouting {
        type nat hook prerouting priority dstnat;
        ip daddr 203.0.113.7 tcp dport 13260 dnat to 10.0.0.1:3260
        ip daddr 203.0.113.7 tcp dport 14420 dnat to 10.0.0.1:4420
    }
}
";

/// What a client finds by discovery, first of listeners that advertise nothing.
const SCRIPT: &str = r#"
    mkfifo ready
    "$1" serve --quiet --config nat.toml > ready & daemon=$!
    trap 'kill $daemon' EXIT
    read ready < ready
    outside() { timeout -s KILL 20 nsenter --target $client --net "$@"; }
    outside iscsi-ls iscsi://203.0.113.7:13260 > own 2>&1 || true
    cp advertised.toml nat.toml
    "$1" ctl unix:control reload
    outside iscsi-ls -s iscsi://203.0.113.7:13260 > iscsi
    outside "$1" discover nvme+tcp://203.0.113.7:14420 > nvme
    outside "$1" copy --overwrite file:image nvme+tcp://203.0.113.7:14420/nqn.2026-11.blockmux:a/1
    outside "$1" copy --overwrite iscsi://203.0.113.7:13260/iqn.2026-11.blockmux:a/0 file:back
"#;

const CONFIG: &str = r#"
iscsi = ["10.0.0.1"]
nvme_tcp = ["10.0.0.1"]
control = "unix:control"
[[volume]]
name = "a"
spec = "mem:1m"
"#;

#[test]
fn clients_outside_of_a_nat_find_and_use_targets_by_discovery() {
    if !["unshare", "nsenter", "ip", "nft", "iscsi-ls"].into_iter().all(has) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| fs::write(directory.path().join(name), content).unwrap();
    write("nat", NAT.as_bytes());
    let image: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[at as usize % 3]).collect();
    write("image", &image);
    write("nat.toml", CONFIG.as_bytes());
    let mut advertised = CONFIG.to_owned();
    for (key, port) in [("iscsi", 13260), ("nvme_tcp", 14420)] {
        let own = format!("{key} = [\"10.0.0.1");
        advertised = advertised.replace(&own, &format!("{own}?advertise=203.0.113.7:{port}"));
    }
    write("advertised.toml", advertised.as_bytes());
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", ENTER, "sh", SCRIPT, BLOCKMUX]);
    let ran = command.current_dir(directory.path()).env("XDG_STATE_HOME", "state").output().unwrap();
    for reason in ["unshare failed", "no NAT here"] {
        if (text(&ran.stdout) + &text(&ran.stderr)).contains(reason) {
            return println!("skipped: discovery behind NAT: {reason}: {}", text(&ran.stderr));
        }
    }
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let said = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
    assert!(
        said("own").contains("10.0.0.1:3260"),
        "the address that nobody outside reaches: {}",
        said("own")
    );
    let found = said("iscsi");
    assert!(found.contains(&format!("Target:{TARGET} Portal:203.0.113.7:13260,1")), "{found}");
    assert!(found.contains("Lun:0"), "a session with the address that discovery told: {found}");
    assert!(said("nvme").contains(&format!("nvme+tcp://203.0.113.7:14420/{SUBSYSTEM}")), "{}", said("nvme"));
    assert!(fs::read(directory.path().join("back")).unwrap() == image);
}

#[test]
fn a_reload_changes_the_address_that_clients_are_told() {
    let config = |parameters: &str| {
        format!(
            "iscsi = ['127.0.0.1:0{parameters}']\nnvme_tcp = ['127.0.0.1:0{parameters}']\n\
             [[volume]]\nname = 'a'\nspec = 'mem:1m'\n"
        )
    };
    let served = Configured::serve(&config(""));
    let server = |scheme: &str| {
        let url = served.daemon.urls_of(scheme).remove(0);
        url[..url.rfind("/iqn.").or(url.rfind("/nqn.")).unwrap()].to_owned()
    };
    for scheme in ["iscsi", "nvme+tcp"] {
        let own = server(scheme);
        assert!(discovered(&own).contains(&own), "{own}");
        served.reload(&config("?advertise=203.0.113.7:99"));
        assert!(discovered(&own).contains(&format!("{scheme}://203.0.113.7:99/")), "{own}");
        let port = own.rsplit(':').next().unwrap();
        served.reload(&config("?advertise=203.0.113.7"));
        assert!(discovered(&own).contains(&format!("{scheme}://203.0.113.7:{port}/")), "its own port");
        served.reload(&config(""));
    }
    served.reload(&config("?advertise=203.0.113.7:99"));
    let shown = served.ctl(&["show", "iscsi", "127.0.0.1:0"]);
    assert!(text(&shown.stdout).contains("advertise = \"203.0.113.7:99\""), "{}", text(&shown.stdout));
}

#[test]
fn a_name_that_nobody_has_cannot_be_advertised_and_the_message_says_so() {
    let config = |parameters: &str| {
        format!("iscsi = ['127.0.0.1:0{parameters}']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n")
    };
    let served = Configured::serve(&config(""));
    served.write(&config("?advertise=no-such-host.invalid"));
    let file = served.config_path().display().to_string();
    for output in [blockmux(["check", &file]), served.ctl(&["reload"])] {
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{said}");
        assert!(
            said.contains("127.0.0.1:")
                && said.contains(": advertise: cannot find host `no-such-host.invalid`"),
            "{said}"
        );
        assert!(
            said.contains("; correct the name, or write the IP address that clients connect to"),
            "{said}"
        );
    }
}

/// What `blockmux discover` finds at a server.
fn discovered(url: &str) -> String {
    let found = blockmux(["discover", url]);
    assert!(found.status.success(), "{}", text(&found.stderr));
    text(&found.stdout)
}
