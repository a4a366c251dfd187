//! Announcements by multicast DNS, as dig hears them, in a network namespace with one interface.

use crate::program::{BLOCKMUX, has, text};
use std::fs;
use std::process::Command;

/// Makes the network, then runs the script `$1` with `$2`, the program.
const ENTER: &str = r#"
    set -e
    ip link set lo up
    ip link add eth0 type veth peer name eth1
    ip addr add 192.0.2.1/24 dev eth0
    ip link set eth0 up
    ip link set eth1 up
    exec sh -ec "$1" sh "$2"
"#;

/// Asks for the services of each type, with a reload in between that announces nothing.
const SCRIPT: &str = r#"
    mkfifo ready
    "$1" serve --quiet --config mdns.toml > ready & daemon=$!
    trap 'kill $daemon' EXIT
    read ready < ready
    ask() { dig +time=1 +tries="$1" -p 5353 @192.0.2.1 "$2" "$3"; }
    for kind in _nvme-disc _iscsi _nbd _srp; do ask 5 $kind._tcp.local ptr > $kind || true; done
    name=$(grep -o '[^[:space:]]*\._nvme-disc\._tcp\.local\.$' _nvme-disc | head -n 1)
    ask 5 "$name" srv > srv
    ask 5 "$name" txt > txt
    ask 5 blockmux-192-0-2-1.local a > address
    sed -i 's/mdns = true/mdns = false/' mdns.toml
    "$1" ctl unix:control reload > reload
    ask 1 _nvme-disc._tcp.local ptr > withdrawn || true
"#;

const CONFIG: &str = r#"
nbd = ["127.0.0.1:10809", "unix:nbd.sock"]
iscsi = ["192.0.2.1"]
nvme_tcp = ["192.0.2.1:4421"]
control = "unix:control"
mdns = true
[[volume]]
name = "a"
spec = "mem:1m"
"#;

#[test]
fn dig_finds_the_listeners_that_others_reach_until_a_reload_withdraws_them() {
    if !["unshare", "ip", "dig"].into_iter().all(has) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("mdns.toml"), CONFIG).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", ENTER, "sh", SCRIPT, BLOCKMUX]);
    let ran = command.current_dir(directory.path()).env("XDG_STATE_HOME", "state").output().unwrap();
    if text(&ran.stderr).contains("unshare failed") {
        return println!("skipped: no namespaces: {}", text(&ran.stderr));
    }
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let said = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
    let has_answer = |name: &str| said(name).contains("ANSWER SECTION");
    assert!(has_answer("_nvme-disc") && has_answer("_iscsi"), "{}", said("_iscsi"));
    assert!(!has_answer("_nbd"), "only this machine reaches it: {}", said("_nbd"));
    assert!(!has_answer("_srp"), "nobody serves it");
    assert!(said("srv").contains(" 4421 blockmux-192-0-2-1.local."), "{}", said("srv"));
    assert!(said("address").contains("192.0.2.1\n"), "{}", said("address"));
    let txt = said("txt");
    assert!(txt.contains("\"p=tcp\" \"nqn=nqn.2014-08.org.nvmexpress.discovery\""), "{txt}");
    assert!(!has_answer("withdrawn"), "{}", said("withdrawn"));
}
