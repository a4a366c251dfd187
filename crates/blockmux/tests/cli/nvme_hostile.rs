//! Hostile NVMe/TCP hosts and failing environments: their effect on others is limited.

use crate::daemon::Daemon;
use crate::raw_nvme::{ENTRIES, RawNvme};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};
use std::path::Path;
use std::thread;

fn serve(volume: &str, more: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::serve(&[&[volume, "--nvme-tcp", "127.0.0.1:0"], more].concat());
    let url = daemon.urls_of("nvme+tcp").remove(0);
    (daemon, url)
}

fn file_volume(directory: &Path) -> String {
    format!("file:{}?size=8m", directory.join("disk.img").display())
}

#[test]
fn a_flood_of_connect_commands_does_not_exclude_other_hosts() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let (daemon, url) = serve("a=mem:8m", &[]);
    let [_admin, mut early] = RawNvme::controller(&url, "nqn.2026-11.test:early");
    let before = daemon.resident();
    let mut flood = Vec::new();
    let refused = loop {
        match RawNvme::admin(&url, "nqn.2026-11.test:greedy") {
            Ok(queue) => flood.push(queue),
            Err(status) => break status,
        }
    };
    assert_eq!((flood.len(), refused), (512, CONTROLLER_BUSY));
    let [_admin, mut late] = RawNvme::controller(&url, "nqn.2026-11.test:late");
    for queue in [&mut early, &mut late] {
        assert_eq!(queue.write(0, &[1; 4096], false), 0);
    }
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[test]
fn missing_write_data_delays_other_hosts_only_for_a_limited_time() {
    let (daemon, url) = serve("a=mem:8m", &["--cores", "1"]);
    let [_admin, mut early] = RawNvme::controller(&url, "nqn.2026-11.test:early");
    assert_eq!(early.write(0, &[1; 1 << 20], false), 0);
    let before = daemon.resident();
    let mut silent: Vec<_> = (0..24).map(|_| RawNvme::controller(&url, "nqn.2026-11.test:silent")).collect();
    for [_, queue] in &mut silent {
        (1..ENTRIES).for_each(|_| queue.begin_write(0, 1 << 20, &[], false));
    }
    // A later host is served, so all earlier ones have been processed.
    let [_admin, mut late] = RawNvme::controller(&url, "nqn.2026-11.test:late");
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for data that did not come");
    for queue in [&mut early, &mut late] {
        for len in [4096, 64 << 10, 1 << 20] {
            assert_eq!(queue.write(0, &vec![2; len], false), 0, "{len} bytes");
        }
    }
}

#[test]
fn fua_writes_survive_a_kill_of_the_daemon_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let (mut daemon, url) = serve(&file_volume(directory.path()), &["--cores", "2"]);
    // Each host writes numbers to its own 1 MiB, block by block in each round.
    let hosts = (0..4_u64).map(|nth| {
        let url = url.clone();
        thread::spawn(move || {
            let [_admin, mut queue] = RawNvme::controller(&url, &format!("nqn.2026-11.test:{nth}"));
            let mut acknowledged = vec![0_u64; 256];
            for number in 1_u64.. {
                let block = (number * 7 % 256) as usize;
                let data = number.to_le_bytes().repeat(512);
                queue.begin_write((nth << 20) + block as u64 * 4096, 4096, &data, true);
                match queue.status() {
                    Some(status) => assert_eq!(status, 0),
                    None => break,
                }
                acknowledged[block] = number;
            }
            acknowledged
        })
    });
    let hosts: Vec<_> = hosts.collect();
    let [_admin, mut watcher] = RawNvme::controller(&url, "nqn.2026-11.test:watcher");
    (0..500).for_each(|_| assert_eq!(watcher.write(7 << 20, &[0; 512], true), 0));
    daemon.signal(Signal::KILL);
    daemon.wait();
    let content = std::fs::read(directory.path().join("disk.img")).unwrap();
    for (nth, host) in hosts.into_iter().enumerate() {
        let acknowledged = host.join().unwrap();
        assert!(acknowledged.iter().any(|number| *number > 0), "host {nth} wrote nothing");
        for (block, number) in acknowledged.iter().enumerate().filter(|(_, number)| **number > 0) {
            let at = (nth << 20) + block * 4096;
            let found = u64::from_le_bytes(content[at..at + 8].try_into().unwrap());
            // One more write may have been in flight.
            assert!(found >= *number, "host {nth}, block {block}: {found}, and {number} was acknowledged");
        }
    }
}

#[test]
fn a_full_disk_fails_only_writes() {
    let directory = tempfile::tempdir().unwrap();
    let (daemon, url) = serve(&file_volume(directory.path()), &[]);
    let limit = Rlimit { current: Some(1 << 20), ..getrlimit(Resource::Fsize) };
    prlimit(Some(daemon.pid()), Resource::Fsize, limit).unwrap();
    let [_admin, mut queue] = RawNvme::controller(&url, "nqn.2026-11.test:host");
    for len in [4096, 64 << 10] {
        assert_eq!(queue.write(2 << 20, &vec![1; len], true), CAPACITY_EXCEEDED);
        assert_eq!(queue.write(0, &vec![1; len], true), 0);
    }
    let content = std::fs::read(directory.path().join("disk.img")).unwrap();
    assert_eq!((content[0], content[2 << 20]), (1, 0));
}

/// Connect Controller Busy, of command specific status.
const CONTROLLER_BUSY: u16 = 0x181;
const CAPACITY_EXCEEDED: u16 = 0x81;
