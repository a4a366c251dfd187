//! One volume of a daemon over NBD, iSCSI and NVMe/TCP at once: all of them see the same data and
//! the same size.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, succeed};
use crate::raw_iscsi::RawIscsi;
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const SCHEMES: [&str; 3] = ["nbd+unix", "iscsi", "nvme+tcp"];
const LISTENERS: [&str; 4] = ["--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"];
const SIZE: usize = 4 << 20;

/// The volume's URL over each protocol.
fn urls(daemon: &Daemon) -> [String; 3] {
    SCHEMES.map(|scheme| daemon.urls_of(scheme).remove(0))
}

fn blockmux(args: &[&str]) -> String {
    succeed(Command::new(BLOCKMUX).args(args))
}

/// Data that differs for each number.
fn content(number: usize) -> Vec<u8> {
    (0..SIZE).map(|at| (at / 512 * 7 + at + number * 31) as u8).collect()
}

#[test]
fn data_written_over_one_protocol_is_read_over_the_others() {
    let daemon = Daemon::serve(&[&["a=mem:4m"], &LISTENERS[..]].concat());
    let (urls, directory) = (urls(&daemon), tempfile::tempdir().unwrap());
    for (number, to) in urls.iter().enumerate() {
        let source = directory.path().join("source");
        fs::write(&source, content(number)).unwrap();
        blockmux(&["copy", "--overwrite", &format!("file:{}", source.display()), to]);
        for (nth, from) in urls.iter().enumerate() {
            let back = directory.path().join(format!("back{number}{nth}"));
            blockmux(&["copy", "--overwrite", from, &format!("file:{}", back.display())]);
            assert!(fs::read(back).unwrap() == content(number), "written to {to}, read from {from}");
        }
    }
}

#[test]
fn concurrent_verified_writes_over_three_protocols_do_not_interfere() {
    // Each protocol writes a third of the volume.
    let daemon = Daemon::serve(&[&["a=mem:48m"], &LISTENERS[..]].concat());
    let directory = tempfile::tempdir().unwrap();
    let benches: Vec<_> = urls(&daemon)
        .iter()
        .enumerate()
        .map(|(nth, url)| {
            let mut bench = Command::new(BLOCKMUX);
            bench.current_dir(directory.path()).args(["bench", url, "--no_ceiling", "--runs", "1"]);
            let place = [format!("--offset={}m", nth * 16), "--size=16m".to_owned()];
            bench.args(place).args(["--rw", "randwrite", "--bs", "8k", "--iodepth", "8"]);
            bench.args(["--verify", "crc32c", "--runtime", "1"]);
            std::thread::spawn(move || bench.output().unwrap())
        })
        .collect();
    for bench in benches {
        let output = bench.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_resize_is_reported_over_all_three_protocols() {
    let control = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", control.path().join("control").display());
    let there = Daemon::serve(&[&["a=mem:8m", "--control", &socket], &LISTENERS[..]].concat());
    let [nbd, iscsi, nvme] = urls(&there);
    // Blockmux initiators that stay connected, in a gateway.
    let gateways = [format!("scsi={iscsi}"), format!("nvme={nvme}")];
    let here = Daemon::serve(&[gateways[0].as_str(), &gateways[1], "--iscsi", "127.0.0.1:0"]);
    let own = here.urls_of("iscsi");
    let mut hosts: Vec<_> = own.iter().map(|url| RawIscsi::login(url, "iqn.2026-11.i:a")).collect();
    for mib in [16_u64, 4] {
        blockmux(&["ctl", &socket, "resize", "a", &format!("{mib}m"), "--shrink"]);
        // NBD has no notification; new connections see the size.
        for url in [&nbd, &iscsi, &nvme] {
            assert_eq!(size(url), mib << 20, "{url}");
        }
        for (host, url) in hosts.iter_mut().zip(&own) {
            let end = Instant::now() + Duration::from_secs(30);
            while size(url) != mib << 20 {
                assert!(Instant::now() < end, "{url} never has {mib} MiB");
                // Reads the first block: an iSCSI target reports the change with the next command.
                host.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512);
            }
        }
    }
}

fn size(url: &str) -> u64 {
    let info: Value = serde_json::from_str(&blockmux(&["info", "--json", url])).unwrap();
    info["size"].as_u64().unwrap()
}
