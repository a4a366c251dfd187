//! NVMe/TCP from the command line: namespaces are described, discovered, copied and measured;
//! hostile hosts do not affect others.

use crate::daemon::Daemon;
use crate::program::{blockmux, half_empty_file, text};
use crate::raw_iscsi::{GOOD, RawIscsi};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Output;

const ARGS: [&str; 5] = ["a=mem:8m", "--nvme-tcp", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"];

fn url(daemon: &Daemon) -> String {
    daemon.urls_of("nvme+tcp").remove(0)
}

/// Standard output of a successful command.
fn said(output: &Output) -> String {
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    text(&output.stdout)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&said(&blockmux(args))).unwrap()
}

#[test]
fn a_subsystem_is_described_and_discovered() {
    let daemon = Daemon::serve(&ARGS);
    let url = url(&daemon);
    let told = json(&["info", "--json", &url]);
    assert_eq!((told["protocol"].as_str(), told["size"].as_u64()), (Some("nvme-tcp"), Some(8 << 20)));
    let server = url.split('/').take(3).collect::<Vec<_>>().join("/");
    let found = json(&["discover", "--json", &server]);
    assert_eq!(found["exports"][0]["url"], *url);
    // Missing namespaces and subsystems.
    for (wrong, said) in [("/1", "/7"), (":a/1", ":b/1")] {
        let output = blockmux(["info", &url.replace(wrong, said)]);
        assert!(!output.status.success() && !output.stderr.is_empty(), "{said}");
    }
}

/// Serves a volume with this name, and referrals to these addresses.
fn refers(volume: &str, to: &[&str]) -> Daemon {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("referrals.toml");
    let mut written = format!("nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = '{volume}'\nspec = 'mem:1m'\n");
    for address in to {
        let (ip, port) = address.rsplit_once(':').unwrap();
        written += &format!("[[nvme_discovery.referral]]\ntraddr = '{ip}'\ntrsvcid = {port}\n");
    }
    std::fs::write(&config, written).unwrap();
    Daemon::serve(&["--config", &config.display().to_string()])
}

#[test]
fn discovery_follows_referrals_and_skips_those_that_do_not_answer() {
    let listener = |daemon: &Daemon| url(daemon).split('/').nth(2).unwrap().to_owned();
    let last = refers("last", &[]);
    let middle = refers("middle", &[&listener(&last), "127.0.0.1:1"]);
    let first = refers("first", &[&listener(&middle), &listener(&last)]);
    let output = blockmux(["discover", "--json", &format!("nvme+tcp://{}", listener(&first))]);
    let (told, warned) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{warned}");
    let found: Value = serde_json::from_str(&told).unwrap();
    let exports = found["exports"].as_array().unwrap();
    let urls: Vec<&str> = exports.iter().map(|export| export["url"].as_str().unwrap()).collect();
    assert_eq!(urls, [url(&first), url(&middle), url(&last)]);
    assert!(exports.iter().all(|export| export["size"] == 1 << 20), "{told}");
    assert_eq!(warned.lines().count(), 1, "{warned}");
    assert!(warned.contains("referral") && warned.contains("127.0.0.1:1"), "{warned}");
}

#[test]
fn discovery_lists_subsystems_at_other_addresses_without_querying_them() {
    let daemon = Daemon::serve(&["a=mem:8m", "--nvme-tcp", "127.0.0.1:0", "--nvme-tcp", "127.0.0.2:0"]);
    let urls = daemon.urls_of("nvme+tcp");
    let server = urls[0].split('/').take(3).collect::<Vec<_>>().join("/");
    let listed = said(&blockmux(["discover", &server]));
    let line = |url: &str| listed.lines().find_map(|line| line.strip_prefix(url)).unwrap_or_default();
    assert!(line(&urls[0]).starts_with("  8 MiB  "), "{listed}");
    assert_eq!(line(&urls[1]), "  at another address, which was not queried", "{listed}");
}

#[test]
fn data_copied_to_a_namespace_and_back_is_unchanged_with_and_without_digests() {
    let daemon = Daemon::serve(&ARGS);
    let directory = tempfile::tempdir().unwrap();
    let source = format!("file:{}", half_empty_file(directory.path(), 8 << 20).display());
    for (nth, parameters) in ["", "?hdr_digest=on&data_digest=on"].into_iter().enumerate() {
        let there = format!("{}{parameters}", url(&daemon));
        let back = directory.path().join(format!("back{nth}"));
        let back_spec = format!("file:{}", back.display());
        said(&blockmux(["copy", "--overwrite", "--verify", &source, &there]));
        said(&blockmux(["copy", "--overwrite", "--verify", &there, &back_spec]));
        assert!(std::fs::read(&back).unwrap() == std::fs::read(&source["file:".len()..]).unwrap());
    }
}

#[test]
fn a_scsi_reservation_prevents_writes_of_nvme_hosts() {
    let daemon = Daemon::serve(&ARGS);
    let directory = tempfile::tempdir().unwrap();
    let source = format!("file:{}", half_empty_file(directory.path(), 8 << 20).display());
    let mut scsi = RawIscsi::login(&daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    assert_eq!(scsi.reserve_out(0, 0, [0, 7], 0), GOOD);
    assert_eq!(scsi.reserve_out(1, 1, [7, 0], 0), GOOD);
    let refused = blockmux(["copy", "--overwrite", &source, &url(&daemon)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("reserv"), "{}", text(&refused.stderr));
    assert_eq!(scsi.reserve_out(0, 0, [7, 0], 0), GOOD);
    said(&blockmux(["copy", "--overwrite", "--verify", &source, &url(&daemon)]));
}

#[test]
fn hostile_hosts_do_not_affect_others() {
    let daemon = Daemon::serve(&ARGS);
    let url = url(&daemon);
    let address = url.split('/').nth(2).unwrap().to_owned();
    let begin = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(&address).unwrap();
        // The target may close the connection before it has received them.
        let _ = socket.write_all(bytes);
        socket
    };
    // ICReq: 128 bytes, no digests, MAXR2T 0.
    let mut ic_req = [0; 128];
    ic_req[..8].copy_from_slice(&[0, 0, 128, 0, 128, 0, 0, 0]);
    let mut too_long = ic_req;
    too_long[4..8].copy_from_slice(&[0xff; 4]);
    let stalled: Vec<TcpStream> = (0..100).flat_map(|_| [begin(&ic_req[..60]), begin(&ic_req)]).collect();
    let mut liar = begin(&too_long);
    let mut answer = Vec::new();
    liar.read_to_end(&mut answer).unwrap();
    assert_eq!((answer[0], answer[8]), (3, 1), "C2HTermReq: an invalid PDU header field");
    // A capsule with a data length of 4 GiB, on an initialized connection.
    let mut capsule = begin(&[&ic_req[..], &[4, 0, 72, 72, 0, 0, 0, 0xff], &[0; 64]].concat());
    let mut answer = Vec::new();
    capsule.read_to_end(&mut answer).unwrap();
    assert_eq!(answer[128], 3, "C2HTermReq");
    let before = daemon.resident();
    assert_eq!(json(&["info", "--json", &url])["size"], 8 << 20);
    assert!(daemon.resident() < before + (64 << 20));
    drop(stalled);
}
