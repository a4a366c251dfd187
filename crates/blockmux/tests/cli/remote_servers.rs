//! Our initiator against standard servers.

use crate::program::{BLOCKMUX, blockmux, half_empty_file, has, succeed, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier};

fn described(url: &str) -> Value {
    let output = blockmux(["info", "--json", url]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn copies_there_and_back(url: &str, directory: &Path, size: usize) {
    let source = half_empty_file(directory, size);
    let back = directory.join("back.img");
    let file = |path: &Path| format!("file:{}", path.display());
    succeed(Command::new(BLOCKMUX).args(["copy", "--verify", &file(&source), url]));
    succeed(Command::new(BLOCKMUX).args(["copy", "--verify", url, &file(&back)]));
    assert_eq!(std::fs::read(back).unwrap(), std::fs::read(source).unwrap());
}

#[test]
fn nbdkit_is_described_and_copied_to_and_from() {
    if !has("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let socket = directory.path().join("socket");
    // In the background it returns when it listens.
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["-U"]).arg(&socket).arg("-P").arg(&pid_file).args(["-e", "a", "memory", "8m"]);
    succeed(&mut nbdkit);
    let _ended = EndedByPidFile(&pid_file);
    let url = format!("nbd+unix:///a?socket={}", socket.display());
    let info = described(&url);
    assert_eq!((&info["size"], &info["headers"]), (&(8 << 20).into(), &"structured".into()));
    copies_there_and_back(&url, directory.path(), 8 << 20);
}

#[test]
fn qemu_nbd_is_described_and_copied_to_and_from() {
    if !has("qemu-nbd") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (pid_file, socket) = (directory.path().join("pid"), directory.path().join("socket"));
    let disk = directory.path().join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    let mut qemu_nbd = Command::new("qemu-nbd");
    qemu_nbd.args([
        "--fork",
        "--persistent",
        "--shared=0",
        "--export-name=a",
        "--discard=unmap",
        "--format=raw",
    ]);
    qemu_nbd.arg("--socket").arg(&socket).arg("--pid-file").arg(&pid_file).arg(&disk);
    // It holds on to its output, so a pipe would never end.
    assert!(qemu_nbd.status().unwrap().success());
    let _ended = EndedByPidFile(&pid_file);
    let url = format!("nbd+unix:///a?socket={}", socket.display());
    assert_eq!(described(&url)["size"], 8 << 20);
    let found = blockmux(["discover", &url]);
    assert!(text(&found.stdout).starts_with(&format!("{url}  8 MiB")), "{}", text(&found.stdout));
    copies_there_and_back(&url, directory.path(), 8 << 20);
}

/// A server of two exports that tells the size of neither before it was asked for both.
fn answer_when_both_are_asked_for(mut socket: UnixStream, both: &Barrier) {
    socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    socket.read_exact(&mut [0; 4]).unwrap();
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        let (option, len) = (head[8..12].to_vec(), u32::from_be_bytes(head[12..].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).unwrap();
        let reply = |rep: u32, data: &[u8]| {
            let (rep, len) = (rep.to_be_bytes(), (data.len() as u32).to_be_bytes());
            [b"\0\x03\xe8\x89\x04\x55\x65\xa9", &option[..], &rep, &len, data].concat()
        };
        let (ack, unsupported) = (reply(1, b""), reply(1 << 31 | 1, b""));
        let answer = match option[3] {
            3 => [reply(2, b"\0\0\0\x01a"), reply(2, b"\0\0\0\x01b"), ack].concat(),
            6 => {
                both.wait();
                // NBD_INFO_EXPORT: 1 MiB, NBD_FLAG_HAS_FLAGS.
                [reply(3, b"\0\0\0\0\0\0\0\x10\0\0\0\x01"), ack].concat()
            }
            _ => unsupported,
        };
        // It may have heard enough.
        let _ = socket.write_all(&answer);
    }
}

#[test]
fn a_slow_servers_exports_are_asked_for_at_the_same_time() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let both = Arc::new(Barrier::new(2));
        for socket in listener.incoming() {
            let both = both.clone();
            std::thread::spawn(move || answer_when_both_are_asked_for(socket.unwrap(), &both));
        }
    });
    let found = blockmux(["discover", &format!("nbd+unix:///?socket={}", socket.display())]);
    let url = |name| format!("nbd+unix:///{name}?socket={}  1 MiB\n", socket.display());
    assert_eq!(text(&found.stdout), [url("a"), url("b")].concat());
}

/// Ends a daemon that this test has started.
struct EndedByPidFile<'a>(&'a Path);

impl Drop for EndedByPidFile<'_> {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(self.0).ok().and_then(|text| text.trim().parse().ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}
