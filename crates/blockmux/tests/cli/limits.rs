//! `limits` and `client_limits` of volumes. Times are only compared with what a limit permits: a
//! transfer cannot be faster, however slow the machine is.

use crate::allow::{connect_from, server};
use crate::api::{ask, exchange};
use crate::control::{Controlled, eventually};
use crate::program::{blockmux, has, succeed, text};
use crate::raw_client::{DISC, FLUSH, READ, RawClient, WRITE};
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RESERVATION_CONFLICT, RawIscsi, TASK_ABORTED};
use crate::raw_nvme::RawNvme;
use crate::reload::Configured;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

const HOST: &str = "nqn.2026-11.test:host.of.ours";
const EPERM: u32 = 1;
const NVME_RESERVATION_CONFLICT: u16 = 0x83;

/// A volume over NBD with these keys.
fn config(keys: &str) -> String {
    format!("nbd = ['127.0.0.1:0', 'unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n{keys}")
}

/// Runs `transfer` and checks that it took as long as `amount` takes at `per_second`, apart from
/// the `ahead` that may start before.
fn takes_time(amount: u64, ahead: u64, per_second: u64, transfer: impl FnOnce()) {
    let begun = Instant::now();
    transfer();
    let least = Duration::from_secs_f64((amount - ahead) as f64 / per_second as f64);
    assert!(begun.elapsed() >= least, "took {:?}, not {least:?}", begun.elapsed());
}

fn pending(status: &Value) -> u64 {
    status["volumes"][0]["throttled"]["pending"].as_u64().unwrap_or(0)
}

#[test]
fn a_limit_of_iops_bounds_raw_clients_of_nbd_iscsi_and_nvme_and_is_removed_while_they_are_connected() {
    let controlled = Controlled::serve(&["mem:8m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    let mut iscsi = RawIscsi::login(&controlled.daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    let [_admin, mut nvme] = RawNvme::controller(&controlled.daemon.nvme_place(), HOST);
    let mut requests = |count: u64| {
        for _ in 0..count {
            assert_eq!(nbd.read(0, 512), [0; 512]);
            assert_eq!(iscsi.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512).0, GOOD);
            assert_eq!(nvme.write(0, &[0; 4096], false), 0);
        }
    };
    requests(1);
    assert_eq!(controlled.said(&["limit", "disk0", "iops=50"]), "");
    // A burst is half a request, and one more starts on credit.
    takes_time(30, 2, 50, || requests(10));
    let status = controlled.status();
    assert_eq!(status["volumes"][0]["limits"], json!({ "iops": 50 }));
    assert!(status["volumes"][0]["throttled"]["requests"].as_u64().unwrap() > 0, "{status}");
    assert_eq!(pending(&status), 0);
    controlled.said(&["limit", "disk0", "none"]);
    requests(100);
    let after = controlled.status();
    assert_eq!(after["volumes"][0]["limits"], Value::Null);
    assert_eq!(after["volumes"][0]["throttled"], status["volumes"][0]["throttled"]);
}

#[test]
fn a_limit_of_bandwidth_bounds_initiators_of_every_protocol_and_others_programs() {
    let listeners = ["--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0", "--srp", "127.0.0.1:0"];
    let controlled = Controlled::serve(&[&["mem:2m"], &listeners[..]].concat());
    // Zeroes would not be transferred.
    let content = controlled.directory.path().join("content");
    fs::write(&content, vec![7; 2 << 20]).unwrap();
    let socket = format!("nbd+unix:///disk0?socket={}", controlled.daemon.socket().display());
    assert!(
        blockmux(["copy", "--overwrite", &format!("file:{}", content.display()), &socket]).status.success()
    );
    controlled.said(&["limit", "disk0", "read_bandwidth=4m"]);
    // A burst is 40 KiB, and one request starts on credit.
    let (size, ahead, rate) = (2 << 20, 512 << 10, 4 << 20);
    let mut urls = vec![socket];
    for scheme in ["iscsi", "iser", "nvme+tcp", "nvme+rdma", "srp"] {
        urls.extend(controlled.daemon.urls_of(scheme).into_iter().take(1));
    }
    assert_eq!(urls.len(), 6, "{urls:?}");
    for url in &urls {
        takes_time(size, ahead, rate, || {
            let output = blockmux(["copy", "--overwrite", "--bs", "64k", "--iodepth", "4", url, "null:2m"]);
            assert!(output.status.success(), "{url}: {}", text(&output.stderr));
        });
    }
    if has("nbdcopy") {
        takes_time(size, ahead, rate, || {
            succeed(Command::new("nbdcopy").args([
                "--request-size=65536",
                "--requests=4",
                "--connections=1",
                &urls[0],
                "null:",
            ]));
        });
    }
    if has("fio") {
        // Writes have no limit of their own; together with reads they get one.
        controlled.said(&["limit", "disk0", "bandwidth=4m"]);
        let url = format!("--uri={}", urls[0]);
        takes_time(size, ahead, rate, || {
            succeed(Command::new("fio").args([
                "--name=limited",
                "--ioengine=nbd",
                &url,
                "--rw=randrw",
                "--bs=64k",
                "--iodepth=4",
                "--size=2m",
            ]));
        });
    }
}

#[test]
fn a_changed_limit_releases_throttled_requests_and_a_flush_passes_them() {
    let served = Configured::serve(&config("limits = { bandwidth = 1 }\n"));
    let mut client = served.nbd("a.sock");
    // The first one starts, and the others would wait for minutes.
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    for offset in [512, 1024] {
        client.request(WRITE, 0, offset, 512);
        client.send(&[2; 512]);
    }
    let mut reader = served.nbd("a.sock");
    assert_eq!(reader.simple(FLUSH, 0, 0, 0), 0, "a flush waits for no throttled write");
    reader.request(READ, 0, 0, 512);
    eventually("three requests are throttled", || pending(&served.status()) == 3);
    assert_eq!(served.reload(&config("")), "- volume a: limits: bandwidth removed\n");
    assert_eq!([client.reply(), client.reply(), reader.reply()], [0; 3]);
    assert_eq!(reader.take(512), [1; 512]);
    assert_eq!(reader.read(512, 1024), [2; 1024]);
}

#[test]
fn throttled_requests_of_a_client_that_vanishes_are_never_executed() {
    let served = Configured::serve(&config("limits = { bandwidth = 1 }\n"));
    let hold = |offset| {
        let mut client = served.nbd("a.sock");
        client.request(WRITE, 0, offset, 512);
        client.send(&[7; 512]);
        client
    };
    let mut first = served.nbd("a.sock");
    assert_eq!(first.write(0, 0, &[1; 512]), 0);
    let (vanishing, mut leaving) = (hold(512), hold(1024));
    eventually("both writes are throttled", || pending(&served.status()) == 2);
    drop(vanishing);
    leaving.request(DISC, 0, 0, 0);
    drop(leaving);
    eventually("one is aborted", || pending(&served.status()) == 1);
    served.said(&["limit", "a", "none"]);
    eventually("the other one is executed", || served.nbd("a.sock").read(1024, 512) == [7; 512]);
    assert_eq!(first.read(512, 512), [0; 512]);
}

#[test]
fn commands_that_exclude_others_wait_for_no_throttled_request_and_exclude_it() {
    let controlled = Controlled::serve(&["mem:8m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    let url = &controlled.daemon.urls_of("iscsi")[0];
    let mut holder = RawIscsi::login(url, "iqn.2026-11.i:holder");
    let (mut kept, mut reset) =
        (RawIscsi::login(url, "iqn.2026-11.i:kept"), RawIscsi::login(url, "iqn.2026-11.i:reset"));
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    let [_admin, mut nvme] = RawNvme::controller(&controlled.daemon.nvme_place(), HOST);
    controlled.said(&["limit", "disk0", "--client", "write_bandwidth=1"]);
    let write = |lba: u8| [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    // The first write of a client starts on credit, and the second one would wait for minutes.
    assert_eq!(nbd.write(0, 0, &[0; 512]), 0);
    assert_eq!(nvme.write(0, &[0; 512], false), 0);
    assert_eq!([&mut kept, &mut reset].map(|session| session.run(&write(0), &[0; 512], 0).0), [GOOD; 2]);
    nbd.request(WRITE, 0, 4096, 512);
    nbd.send(&[1; 512]);
    nvme.begin_write(4096, 512, &[2; 512], false);
    reset.begin(&write(8), &[3; 512], 0);
    eventually("three writes are throttled", || pending(&controlled.status()) == 3);
    assert_eq!(holder.reset_unit(), 0);
    assert_eq!(kept.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "of the reset");
    kept.begin(&write(8), &[4; 512], 0);
    eventually("a write that began after the reset is throttled, too", || pending(&controlled.status()) == 4);
    let mut compare_and_write = [0; 16];
    (compare_and_write[0], compare_and_write[13]) = (0x89, 1);
    assert_eq!(holder.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "of the reset");
    assert_eq!(holder.run(&compare_and_write, &[[0; 512], [5; 512]].concat(), 0).0, GOOD);
    assert_eq!(holder.reserve_out(0, 0, [0, 7], 0), GOOD);
    assert_eq!(holder.reserve_out(1, 3, [7, 0], 0), GOOD, "exclusive access");
    assert_eq!(pending(&controlled.status()), 4);
    controlled.said(&["limit", "disk0", "--client", "none"]);
    assert_eq!((nbd.reply(), nvme.status()), (EPERM, Some(NVME_RESERVATION_CONFLICT)));
    assert_eq!((kept.end().0, reset.end().0), (RESERVATION_CONFLICT, TASK_ABORTED));
    assert_eq!(holder.reserve_out(2, 3, [7, 0], 0), GOOD, "released");
    assert_eq!((nbd.read(0, 512), nbd.read(4096, 512)), (vec![5; 512], vec![0; 512]));
}

#[test]
fn removing_a_volume_or_stopping_does_not_wait_for_throttled_requests() {
    let mut controlled = Controlled::serve(&["a=mem:8m", "b=mem:8m", "--nbd", "127.0.0.1:0"]);
    let url = controlled.daemon.urls_of("nbd").remove(0);
    let connect = |name: &str| RawClient::with_export(TcpStream::connect(server(&url)).unwrap(), name);
    let [mut removed, mut stopped] = ["a", "b"].map(|name| {
        controlled.said(&["limit", name, "bandwidth=1"]);
        let mut client = connect(name);
        assert_eq!(client.write(0, 0, &[1; 512]), 0);
        client.request(WRITE, 0, 512, 512);
        client.send(&[2; 512]);
        client
    });
    let all_pending = || {
        let volumes = controlled.status()["volumes"].clone();
        [0, 1].iter().all(|nth| volumes[nth]["throttled"]["pending"] == json!(1))
    };
    eventually("a write of each is throttled", all_pending);
    controlled.said(&["remove", "a", "--force"]);
    assert_eq!(removed.reply(), 0, "it was in flight when the volume was removed");
    controlled.daemon.signal(Signal::TERM);
    assert_eq!(stopped.reply(), 0);
    assert!(stopped.is_closed());
    assert!(controlled.daemon.wait().success());
}

#[test]
fn each_client_has_its_own_limit_and_its_connections_share_it() {
    let served = Configured::serve(&config("client_limits = { bandwidth = 1 }\n"));
    let address = server(&served.daemon.urls_of("nbd")[0]);
    let connect = |last| RawClient::over(connect_from([127, 0, 0, last], address));
    let (mut first, mut second, mut other) = (connect(1), connect(1), connect(2));
    assert_eq!(first.write(0, 0, &[1; 512]), 0);
    second.request(READ, 0, 0, 512);
    eventually("the client's other connection waits", || pending(&served.status()) == 1);
    assert_eq!(other.write(0, 0, &[1; 512]), 0, "another client has a limit of its own");
    other.request(READ, 0, 0, 512);
    eventually("it waits, too", || pending(&served.status()) == 2);
    served.said(&["limit", "a", "--client", "none"]);
    assert_eq!((second.reply(), other.reply()), (0, 0));
    assert_eq!((second.take(512), other.take(512)), (vec![1; 512], vec![1; 512]));
}

#[test]
fn limits_are_shown_planned_exported_saved_and_checked() {
    let served = Configured::serve(&config("limits = { iops = 500 }\n"));
    let ask = |method: &str, path: &str, body: &str| ask(&served.socket("control"), method, path, "", body);
    served.write(&config("limits = { iops = 600, burst = '2s' }\n[volume.client_limits]\nread_iops = 7\n"));
    let planned = "+ volume a: client_limits: read_iops added: 7\n+ volume a: limits: burst added: \"2s\"\n\
                   ~ volume a: limits: iops: 500 -> 600\n";
    assert_eq!(served.said(&["diff"]), planned);
    assert_eq!(served.said(&["reload"]), planned);
    let volume = || served.status()["volumes"][0].clone();
    assert_eq!(volume()["limits"], json!({ "iops": 600, "burst_ms": 2000 }));
    assert_eq!(volume()["client_limits"], json!({ "read_iops": 7 }));
    let status = served.said(&["status", "a"]);
    assert!(status.contains("  limits       iops=600,burst=2s\n"), "{status}");
    assert!(status.contains("  each client  read_iops=7\n"), "{status}");
    // Over the API, limits that are left out stay.
    let (code, answer) = ask("POST", "/v1/volumes/a/limits", r#"{"limits": {"write_bandwidth": 4096}}"#);
    assert_eq!(code, 200, "{answer}");
    assert_eq!(volume()["limits"], json!({ "write_bandwidth": 4096 }));
    assert_eq!(volume()["client_limits"], json!({ "read_iops": 7 }));
    let exported = served.said(&["export"]);
    assert!(exported.contains("[volume.limits]\nwrite_bandwidth = \"4k\"\n"), "{exported}");
    assert!(exported.contains("[volume.client_limits]\nread_iops = 7\n"), "{exported}");
    assert!(served.said(&["save"]).contains(" changes saved"));
    assert_eq!(served.said(&["diff"]), "no changes\n");
    for (path, body, expected) in [
        ("/v1/volumes/b/limits", "{}", 404),
        ("/v1/volumes/a/limits", r#"{"limits": {"iops": 0}}"#, 422),
        ("/v1/volumes/a/limits", r#"{"limits": {"burst_ms": 0}}"#, 422),
        ("/v1/volumes/a/limits", r#"{"limit": {}}"#, 422),
        ("/v1/volumes/a/limits", r#"{"limits": {"iops": 1, "iops": 2}}"#, 422),
        ("/v1/volumes/a/limits", r#"{"limits": [500]}"#, 422),
        ("/v1/volumes/a/limits", "[null, null]", 422),
    ] {
        assert_eq!(ask("POST", path, body).0, expected, "{path} {body}");
    }
    served.write(&config("limits = { iops = 600, bandwidth = 'fast' }\n"));
    let output = served.ctl(&["reload"]);
    let refusal = text(&output.stderr);
    assert!(!output.status.success() && refusal.contains("b.toml:5: "), "{refusal}");
    assert!(refusal.contains("`fast` is not a size"), "{refusal}");
    assert_eq!(volume()["limits"], json!({ "write_bandwidth": 4096 }), "nothing has changed");
}

#[test]
fn a_volume_is_added_with_limits() {
    let served = Configured::serve(&config(""));
    served.said(&["add", "b=mem:8m", "--limits", "bandwidth=1,burst=20ms", "--client-limits", "iops=500"]);
    let volume = || served.status()["volumes"][1].clone();
    assert_eq!(volume()["limits"], json!({ "bandwidth": 1, "burst_ms": 20 }));
    assert_eq!(volume()["client_limits"], json!({ "iops": 500 }));
    let mut client = RawClient::with_export(UnixStream::connect(served.socket("a.sock")).unwrap(), "b");
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    client.request(READ, 0, 0, 512);
    eventually("it is throttled", || volume()["throttled"]["pending"] == 1);
    assert!(served.said(&["save"]).contains(" changes saved"));
    let saved = fs::read_to_string(served.socket("b.toml")).unwrap();
    assert!(saved.contains("client_limits") && saved.contains("iops = 500"), "{saved}");
    // An invalid limit leaves nothing behind.
    let body = r#"{"volume": "c=mem:1m", "client_limits": {"burst_ms": 0}}"#;
    let (code, answer) = ask(&served.socket("control"), "POST", "/v1/volumes", "", body);
    assert_eq!((code, served.status()["volumes"].as_array().unwrap().len()), (422, 2), "{answer}");
    let output = served.ctl(&["add", "c=mem:1m", "--limits", "iops=1,iops=2"]);
    assert!(text(&output.stderr).contains("`iops` is given twice"), "{}", text(&output.stderr));
}

#[test]
fn a_fragment_changes_the_limits_of_a_volume_and_keeps_the_rest() {
    let served = Configured::serve(&config("description = 'x'\nlimits = { iops = 500 }\n"));
    let mut client = served.nbd("a.sock");
    let fragment = served.socket("part.toml");
    fs::write(&fragment, "[[volume]]\nname = 'a'\nlimits = { write_iops = 7 }\n").unwrap();
    let done = served.said(&["apply", fragment.to_str().unwrap()]);
    assert_eq!(done, "+ volume a: limits: write_iops added: 7\n");
    assert_eq!(served.status()["volumes"][0]["limits"], json!({ "iops": 500, "write_iops": 7 }));
    assert!(served.said(&["export"]).contains("description = \"x\""));
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn throttling_is_visible_in_the_metrics() {
    let controlled = Controlled::serve(&["a=mem:8m"]);
    controlled.said(&["limit", "a", "bandwidth=1"]);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    client.request(READ, 0, 0, 512);
    eventually("a request is throttled", || pending(&controlled.status()) == 1);
    let value = |name: &str| {
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let (_, text) = exchange(UnixStream::connect(controlled.socket()).unwrap(), request);
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{volume=\"a\"}} ")));
        line.unwrap_or_else(|| panic!("{name} is missing:\n{text}")).parse::<f64>().unwrap()
    };
    assert_eq!(value("blockmux_volume_throttled_requests_pending"), 1.0);
    controlled.said(&["limit", "a", "none"]);
    assert_eq!(client.reply(), 0);
    assert_eq!(value("blockmux_volume_throttled_requests_pending"), 0.0);
    assert_eq!(value("blockmux_volume_throttled_requests_total"), 1.0);
    assert!(value("blockmux_volume_throttled_seconds_total") > 0.0);
}
