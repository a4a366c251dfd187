//! Image files that are shared with QEMU's programs.

use crate::daemon::Daemon;
use crate::program::{blockmux, ended, has, qemu_io, succeed, text};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// qemu-nbd on a file; stopped when it is dropped.
struct QemuNbd(Child);

impl QemuNbd {
    fn start(directory: &Path, args: &[&str], file: &str) -> QemuNbd {
        let socket = directory.join("q.sock");
        let mut command = Command::new("qemu-nbd");
        let child = command.args(["-t", "-f", "raw", "-k"]).arg(&socket).args(args).arg(file).spawn();
        let mut program = QemuNbd(child.unwrap());
        let end = Instant::now() + Duration::from_secs(30);
        while !socket.exists() {
            assert!(program.0.try_wait().unwrap().is_none(), "qemu-nbd has ended");
            assert!(Instant::now() < end, "qemu-nbd has no socket after 30 s");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        program
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        ended(&mut self.0);
    }
}

fn refused(output: &Output, expected: &str) {
    let said = text(&output.stderr);
    assert!(said.contains(expected) && said.contains("disk.img"), "{said}");
    assert_ne!(output.status.code(), Some(0));
}

#[test]
fn qemu_cannot_write_an_exported_file_and_can_read_a_read_only_one() {
    if !has("qemu-io") || !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img").display().to_string();
    let spec = format!("file:{file}?size=1m");
    let write = || qemu_io(&file, &["write -P 1 0 4k"]).output().unwrap();
    let served = Daemon::serve(&[&spec]);
    refused(&write(), "Failed to get");
    let info = || Command::new("qemu-img").args(["info", &file]).output().unwrap();
    assert!(info().status.success(), "a reader may open the exported file");
    drop(served);
    let _reader = Daemon::serve(&[&spec, "--read-only"]);
    assert!(info().status.success());
    assert!(write().status.success(), "a file that Blockmux exports read-only may be written by others");
}

#[test]
fn a_file_that_qemu_has_open_cannot_be_exported_writable() {
    if !has("qemu-nbd") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    std::fs::write(&file, [0; 1 << 20]).unwrap();
    let file = file.display().to_string();
    let spec = format!("file:{file}");
    // QEMU's lock for reading excludes writers.
    for args in [&[][..], &["-r"]] {
        let other = QemuNbd::start(directory.path(), args, &file);
        let output = blockmux(["serve", &spec, "--nbd", "127.0.0.1:0"]);
        refused(&output, &format!("is locked by process {} (qemu-nbd); stop that program", other.0.id()));
        Daemon::serve(&[&spec, "--read-only"]);
        let _ = std::fs::remove_file(directory.path().join("q.sock"));
    }
    Daemon::serve(&[&spec]);
}

#[test]
fn a_disk_image_is_refused_with_the_way_to_export_it() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for format in ["qcow2", "vmdk", "vdi", "vhdx", "qed", "parallels", "vpc"] {
        let file = directory.path().join(format!("a {format}"));
        succeed(Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&file).arg("16m"));
        let file = file.display().to_string();
        let spec = format!("file:{file}");
        let output = blockmux(["serve", &spec, "--nbd", "127.0.0.1:0"]);
        let said = text(&output.stderr);
        let expected = format!("{spec}: is a {format} image");
        let line = format!("`qemu-nbd -t -f {format} -k /run/qemu-nbd.sock '{file}'`");
        assert!(said.contains(&expected) && said.contains(&line), "{said}");
        assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)));
        Daemon::serve(&[&format!("{spec}?format=raw")]);
    }
}

#[test]
fn a_client_that_writes_an_image_header_does_not_prevent_the_next_export() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name).display().to_string();
    let (file, copy, state) = (place("disk"), place("copy"), place("state"));
    fs::write(&file, vec![0; 1 << 20]).unwrap();
    let serve = |file: &str, option: &str| {
        blockmux([
            "serve",
            &format!("file:{file}{option}"),
            "--nbd",
            ":0",
            "--state",
            &state,
            "--run",
            "true",
        ])
    };
    // A read-only volume is not recorded.
    assert!(serve(&file, "?readonly=on").status.success());
    assert!(!fs::exists(&state).unwrap());
    assert!(serve(&file, "").status.success());
    File::options().write(true).open(&file).unwrap().write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    fs::copy(&file, &copy).unwrap();
    let again = serve(&file, "");
    let said = text(&again.stderr);
    assert!(again.status.success() && said.contains("begins like a qcow2 image, but did not"), "{said}");
    for option in ["", "?format=raw", ""] {
        let output = serve(&copy, option);
        let hint = text(&output.stderr).contains("?format=raw")
            && text(&output.stderr).contains("a client may have");
        assert_eq!(hint, option.is_empty());
        assert_eq!(output.status.success(), !option.is_empty(), "{}", text(&output.stderr));
    }
}

#[test]
fn two_volumes_of_one_file_cause_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("file:{}", directory.path().join("disk").display());
    let volumes = [format!("a={file}?size=1m"), format!("b={file}?readonly=on")];
    let output = blockmux(["serve", &volumes[0], &volumes[1], "--nbd", ":0", "--run", "true"]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("`b` and `a` export the same data"), "{said}");
}

#[test]
fn a_deleted_or_replaced_file_causes_a_warning_and_is_closed_when_its_volume_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name).display().to_string();
    let (deleted, replaced, added) = (place("deleted"), place("replaced"), place("added"));
    let control = format!("unix:{}", place("control"));
    let spec = |file: &str| format!("file:{file}?size=1m");
    let mut daemon = Daemon::serve(&[&spec(&deleted), &spec(&replaced), "--control", &control]);
    let ctl = |args: &[&str]| {
        let output = blockmux([&["ctl", &*control], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    fs::remove_file(&deleted).unwrap();
    daemon.wait_for_line(&format!("{deleted}: was deleted or renamed: clients still"));
    fs::write(place("new"), [1; 512]).unwrap();
    fs::rename(place("new"), &replaced).unwrap();
    daemon.wait_for_line(&format!("{replaced}: names another file now: clients still"));
    // The volume can be added again, which its lock would prevent if the file were still open.
    let late = format!("late={}", spec(&added));
    ctl(&["add", &late]);
    ctl(&["remove", "late"]);
    ctl(&["add", &late]);
    fs::remove_file(&added).unwrap();
    daemon.wait_for_line(&format!("{added}: was deleted or renamed: clients still"));
}
