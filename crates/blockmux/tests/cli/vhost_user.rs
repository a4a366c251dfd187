//! Disks of virtual machines, and back ends of others as volumes. `tests/vm/vhost-user.sh` has a
//! virtual machine.

use crate::program::{BLOCKMUX, blockmux, ended, has, succeed, text};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A directory with a file of 4 MiB that differs in every block.
fn with_source() -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let bytes: Vec<u8> = (0..4_u32 << 20).map(|at| (at / 512 * 7 + at) as u8).collect();
    fs::write(&source, bytes).unwrap();
    (directory, source.display().to_string())
}

fn path(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).display().to_string()
}

#[test]
fn an_attached_volume_is_copied_and_measured_over_its_socket() {
    let (directory, source) = with_source();
    let [socket, copy, report] = ["disk", "copy", "report"].map(|name| path(&directory, name));
    let commands = format!(
        "{BLOCKMUX} copy file:{source} vhost-user:$socket --verify --overwrite && {BLOCKMUX} copy vhost-user:$socket \
         file:{copy} --verify && {BLOCKMUX} bench vhost-user:$socket --rw randrw --bs 4k --runtime 100ms --ramp_time 0 \
         --report {report}"
    );
    succeed(Command::new(BLOCKMUX).args(["attach", "mem:4m", "--socket", &socket, "--run", &commands]));
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
    assert!(!Path::new(&socket).exists());
}

#[test]
fn a_socket_is_announced_and_is_only_for_vhost_user() {
    let directory = tempfile::tempdir().unwrap();
    let socket = path(&directory, "disk");
    let said = succeed(Command::new(BLOCKMUX).args([
        "attach",
        "mem:1m",
        "--read-only",
        "--via",
        "vhost-user",
        "--socket",
        &socket,
        "--run",
        &format!("{BLOCKMUX} info vhost-user:$BLOCKMUX_SOCKET --json"),
    ]));
    let info: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&info["size"], &info["logical_block"]), (&(1 << 20).into(), &512.into()), "{info}");
    for (words, expected) in [
        (&["attach", "mem:1m", "--via", "vhost-user"][..], "--socket"),
        (&["attach", "mem:1m", "--via", "ublk", "--socket", "a"][..], "--socket is for --via vhost-user"),
        (&["attach", "mem:1m", "--socket", "/nowhere/a"][..], "cannot listen at /nowhere/a"),
        (&["info", "vhost-user:/nowhere/a"][..], "is the back end running?"),
    ] {
        let output = blockmux(words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

/// QEMU's storage daemon with an export.
struct StorageDaemon(Child);

impl StorageDaemon {
    fn export(image: &str, socket: &str) -> StorageDaemon {
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.arg("--blockdev").arg(format!("file,node-name=disk,filename={image}"));
        daemon.arg("--export").arg(format!(
            "vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={socket},num-queues=4,writable=on"
        ));
        let daemon = StorageDaemon(daemon.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        while !Path::new(socket).exists() {
            assert!(Instant::now() < deadline, "qemu-storage-daemon does not listen");
            std::thread::yield_now();
        }
        daemon
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        ended(&mut self.0);
    }
}

#[test]
fn an_export_of_qemus_storage_daemon_is_a_volume() {
    if !has("qemu-storage-daemon") {
        return;
    }
    let (directory, source) = with_source();
    let (image, socket, copy) =
        (path(&directory, "image"), path(&directory, "disk"), path(&directory, "copy"));
    fs::write(&image, vec![0; 4 << 20]).unwrap();
    let _daemon = StorageDaemon::export(&image, &socket);
    let volume = format!("vhost-user:{socket}");
    succeed(Command::new(BLOCKMUX).args([
        "copy",
        &format!("file:{source}"),
        &volume,
        "--verify",
        "--overwrite",
    ]));
    assert!(fs::read(&source).unwrap() == fs::read(&image).unwrap());
    succeed(Command::new(BLOCKMUX).args(["copy", &volume, &format!("file:{copy}"), "--verify"]));
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
}
