//! `blockmux rdma` on this machine, whatever RDMA it has.

use crate::program::{blockmux, text};
use serde_json::Value;
use std::fs;

/// What the command prints with these options.
fn rdma(options: &[&str]) -> String {
    let output = blockmux([&["rdma"], options].concat());
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    text(&output.stdout)
}

/// The names of the kernel's devices, sorted.
fn kernel_devices() -> Vec<String> {
    let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn rdma_lists_fabrics_devices_and_obstacles_in_80_columns() {
    let said = rdma(&[]);
    let wide: Vec<_> = said.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(wide.is_empty(), "{wide:#?}");
    assert!(said.contains("\n  iwarp      works: "), "{said}");
    let found: Value = serde_json::from_str(&rdma(&["--json"])).unwrap();
    let fabrics = found["fabrics"].as_array().unwrap();
    let names: Vec<_> = fabrics.iter().map(|fabric| fabric["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["iwarp", "roce", "verbs"]);
    for fabric in fabrics {
        let [state, reason] = ["state", "reason"].map(|key| fabric[key].as_str());
        assert_eq!(fabric["available"] == true, state == Some("works"), "{fabric}");
        assert!(fabric["available"] == true || reason.is_some_and(|why| why.contains("; ")), "{fabric}");
    }
    // Without a device it is no fabric that works.
    assert!(fabrics[2]["available"] == false || !kernel_devices().is_empty(), "{found}");
    let devices = found["devices"].as_array().unwrap();
    let listed: Vec<_> = devices.iter().map(|device| device["name"].as_str().unwrap()).collect();
    assert_eq!(listed, kernel_devices());
    let all: Vec<&str> =
        found["obstacles"].as_array().unwrap().iter().map(|obstacle| obstacle.as_str().unwrap()).collect();
    let reasons = fabrics.iter().filter_map(|fabric| fabric["reason"].as_str());
    assert!(reasons.into_iter().all(|reason| all.contains(&reason)), "{found}");
    assert_eq!(all.len(), said.lines().filter(|line| line.starts_with("  - ")).count(), "{found}\n{said}");
    // A machine without devices is told why. Messages may be on several lines.
    let obstacles = found["obstacles"].as_array().unwrap().iter();
    let obstacles =
        obstacles.chain(devices.iter().flat_map(|device| device["obstacles"].as_array().unwrap()));
    let obstacles: Vec<_> = obstacles.map(|obstacle| obstacle.as_str().unwrap()).collect();
    let in_one_line = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(obstacles.iter().all(|obstacle| in_one_line.contains(obstacle)), "{said}");
    assert!(obstacles.iter().all(|obstacle| obstacle.contains(';')), "{obstacles:?}");
    assert_eq!(said.contains("\nDevices\n  none\n"), listed.is_empty());
    assert!(!(listed.is_empty() && obstacles.is_empty()), "{said}");
}

/// With a device, `tests/vm/verbs-storage.sh` has both sides.
#[test]
fn without_a_device_both_sides_say_what_to_do() {
    if !kernel_devices().is_empty() {
        return println!("skipped: this machine has RDMA devices");
    }
    let listener = ["serve", "mem:1m", "--iscsi", "127.0.0.1:0?rdma=verbs"];
    let of_listener = text(&blockmux(listener).stderr);
    let (_, reason) = of_listener.split_once("for RDMA devices: ").unwrap();
    let initiators = [
        "iser://127.0.0.1:1/iqn.2026-11.blockmux:none/0?rdma=verbs&reconnect=0",
        "srp://127.0.0.1:1/0x11111111111111112222222222222222/0?rdma=verbs&reconnect=0",
        "nvme+rdma://127.0.0.1:1/nqn.2026-11.blockmux:none/1?rdma=verbs&ctrl_loss_tmo=0",
    ];
    let commands = initiators.map(|url| vec!["info", url]);
    for words in commands.into_iter().chain([listener.to_vec()]) {
        let output = blockmux(&words);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{words:?}: {said}");
        let has_advice = said.contains("; install rdma-core") || said.contains("see `blockmux rdma`");
        assert!(has_advice, "{words:?}: {said}");
        // The cause is here, so nothing is said of the target.
        assert!(said.ends_with(reason) && !said.contains("listens there"), "{words:?}: {said}");
    }
}

#[test]
fn verbs_is_refused_where_it_has_no_meaning() {
    let refuses = |words: &[&str], why: &str| {
        let output = blockmux(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(why), "{words:?}: {}", text(&output.stderr));
    };
    refuses(&["serve", "mem:1m", "--nbd", "127.0.0.1:0?rdma=verbs"], "no form over RDMA; remove rdma=verbs");
    refuses(&["serve", "mem:1m", "--iscsi", "unix:/x?rdma=verbs"], "RDMA needs an IP address");
    refuses(&["serve", "mem:1m", "--iscsi", "127.0.0.1:0?rdma=verbs&rdma=roce"], "repeats a parameter");
    refuses(&["info", "iser://h?rdma=verbs&crc=on"], "RDMA devices have their own CRC");
}
