//! `blockmux attach`, and attachments of a daemon, on a machine without the ublk driver.
//! `tests/vm/attach.sh` and `attach-service.sh` attach disks.

use crate::control::Controlled;
use crate::program::{BLOCKMUX, blockmux, text};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

/// Whether the driver is there, so that this machine shows nothing here.
#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn has_driver() -> bool {
    let has = Path::new("/dev/ublk-control").exists();
    if has {
        println!("skipped: this machine has the ublk driver");
    }
    has
}

#[test]
fn without_the_driver_attach_says_how_to_load_it_and_creates_no_file() {
    if has_driver() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    let output = blockmux(["attach", "--via", "ublk", &format!("file:{}?size=1m", image.display())]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("load the driver with `modprobe ublk_drv`") && said.lines().count() == 1, "{said}");
    assert!(!image.exists());
}

#[test]
fn probe_says_why_a_way_is_missing() {
    if has_driver() {
        return;
    }
    let output = blockmux(["attach", "--probe", "--json"]);
    let found: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let way = &found["ways"][0];
    assert_eq!((&way["name"], &way["usable"]), (&"ublk".into(), &false.into()));
    assert!(way["why_not"].as_str().unwrap().contains("modprobe ublk_drv"), "{way}");
    let [own @ .., last] = found["ways"].as_array().unwrap().as_slice() else { panic!("{found}") };
    assert_eq!((&last["name"], &last["usable"]), (&"vhost-user".into(), &true.into()));
    let is_any_usable = own.iter().any(|way| way["usable"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!is_any_usable)));
}

#[test]
fn a_mount_without_a_block_device_says_why_each_way_to_one_is_missing() {
    if has_driver() || Path::new("/dev/nbd0").exists() {
        return;
    }
    let output = blockmux(["attach", "mem:1m", "--mount", "/mnt"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("--mount needs a block device: ") && said.contains("ublk (/dev/ublk-control"),
        "{said}"
    );
    assert!(said.contains("; nbd (") && !said.contains("fuse (") && said.lines().count() == 1, "{said}");
}

#[test]
fn no_core_and_too_many_of_them_are_refused_in_words_that_fit() {
    for (cores, expected) in [
        ("0", "--cores 0: write a whole number from 1 on"),
        ("99999999999999999999", "--cores 99999999999999999999: is too large"),
        ("x", "--cores x: is not a whole number"),
    ] {
        let said = text(&blockmux(["attach", "mem:1m", "--cores", cores]).stderr);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_volume_is_named_unless_nothing_is_attached() {
    for (words, expected) in [
        (&["attach"][..], "<VOLUME>"),
        (&["attach", "mem:1m", "--probe"][..], "--probe"),
        (&["attach", "--forget", "/dev/ublkb0", "--run", "true"][..], "--forget"),
    ] {
        let output = blockmux(words);
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_daemon_whose_disk_cannot_be_attached_does_not_start_and_names_the_line() {
    if has_driver() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    let text_of = |volume: &str| {
        format!(
            "nbd = ['unix:n']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[attachment]]\nvolume = '{volume}'\n\
             via = 'ublk'\n"
        )
    };
    let run = |command: &[&str], volume: &str| {
        fs::write(&config, text_of(volume)).unwrap();
        let output = blockmux([command, &[config.to_str().unwrap()]].concat());
        (output.status.code(), text(&output.stderr))
    };
    let (status, said) = run(&["check"], "a");
    assert_eq!((status, said.as_str()), (Some(0), ""));
    fs::write(&config, text_of("a").replace("'ublk'", "'fuse'")).unwrap();
    let output = blockmux(["check", config.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("b.toml:5: attachment `a`: "), "{said}");
    assert!(said.contains("start it with --keep-privileges"), "{said}");
    let (status, said) = run(&["check"], "b");
    assert!(
        status == Some(2) && said.contains("b.toml:6: attachment `b`: no volume has this name"),
        "{said}"
    );
    let (status, said) = run(&["serve", "--config"], "a");
    assert!(status == Some(2) && said.contains("b.toml:5: attachment `a`: /dev/ublk-control"), "{said}");
    assert!(said.contains("modprobe ublk_drv"), "{said}");
}

#[test]
fn a_command_that_cannot_attach_a_disk_changes_nothing() {
    if has_driver() {
        return;
    }
    let controlled = Controlled::serve(&["a=mem:1m"]);
    let said = controlled.refusal(&["attach-disk", "a", "--via", "ublk"]);
    assert!(
        said.contains("attachment `a`: /dev/ublk-control") && said.contains("modprobe ublk_drv"),
        "{said}"
    );
    let said = controlled.refusal(&["attach-disk", "b"]);
    assert!(said.contains("no volume has the name `b`; choose one of a"), "{said}");
    let said = controlled.refusal(&["detach-disk", "a"]);
    assert!(said.contains("a: is not attached as a disk"), "{said}");
    assert_eq!(controlled.status()["attachments"], Value::Array(Vec::new()));
    assert!(!controlled.said(&["export"]).contains("attachment"));
}

/// Asks a process, which starts others, for one that reads and flushes a disk; returns its socket.
fn ask_for_disk_io(starter: &UnixStream, disk: &Path) -> BufReader<UnixStream> {
    let (socket, its) = UnixStream::pair().unwrap();
    let path = disk.as_os_str().as_bytes();
    let message = [&(path.len() as u16).to_ne_bytes(), path].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let (mut control, fds) = (SendAncillaryBuffer::new(&mut space), [its.as_fd()]);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(starter, &[IoSlice::new(&message)], &mut control, SendFlags::empty()).unwrap();
    BufReader::new(socket)
}

#[test]
fn the_processes_that_read_and_flush_disks_end_with_the_one_that_serves_them_and_not_by_a_signal() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    fs::write(&disk, [0; 4096]).unwrap();
    let (socket, its) = UnixStream::pair().unwrap();
    let mut command = Command::new(BLOCKMUX);
    let mut starter = command.arg("disk-io").stdin(OwnedFd::from(its)).spawn().unwrap();
    let ask = |io: &mut BufReader<UnixStream>, request: &str| {
        writeln!(io.get_mut(), "{request}").unwrap();
        let mut answer = String::new();
        io.read_line(&mut answer).unwrap();
        answer
    };
    let mut first = ask_for_disk_io(&socket, &disk);
    assert_eq!(
        ["read 512", "hold", "flush", "read 8192"].map(|request| ask(&mut first, request)),
        ["0\n", "0\n", "0\n", "5\n"]
    );
    // As a service manager stops a service.
    kill_process(Pid::from_child(&starter), Signal::TERM).unwrap();
    let mut second = ask_for_disk_io(&socket, Path::new("/no/such/disk"));
    assert_eq!(ask(&mut second, "hold"), "2\n");
    let status = fs::read_to_string(format!("/proc/{}/status", starter.id())).unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap().trim();
    let capabilities = u64::from_str_radix(capabilities, 16).unwrap();
    assert_eq!(capabilities & !2, 0, "no capability but CAP_DAC_OVERRIDE");
    drop(socket);
    assert!(starter.wait().unwrap().success());
    assert_eq!(ask(&mut first, "flush"), "0\n", "the disk is held until its own socket is closed");
    first.get_ref().shutdown(Shutdown::Write).unwrap();
    assert_eq!(first.read_line(&mut String::new()).unwrap(), 0);
}
