//! `blockmux copy`: between every kind of volume.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, ended, half_empty_file, text, unignore_signals};
use crate::raw_client::RawClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Runs `blockmux copy` with further arguments; returns its standard output.
fn copy(from: &str, to: &str, more: &[&str]) -> String {
    let output = blockmux([&["copy", from, to], more].concat());
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{from} to {to}");
    text(&output.stdout)
}

fn file(directory: &TempDir, name: &str) -> String {
    format!("file:{}", directory.path().join(name).display())
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn a_file_copied_to_a_server_and_back_is_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 8 << 20);
    let daemon = Daemon::serve(&["mem:8m"]);
    let said = copy(&file(&directory, "source.img"), &daemon.url(), &["--verify"]);
    assert!(said.starts_with("copied and verified 8 MiB (4 MiB data, 4 MiB zeroes) in "), "{said}");
    copy(&daemon.url(), &file(&directory, "back.img"), &["--verify", "--bs", "64k", "--iodepth", "3"]);
    let back = directory.path().join("back.img");
    assert_eq!(content(&back), content(&source));
    let allocated = std::fs::metadata(&back).unwrap().blocks() * 512;
    assert!(allocated < 6 << 20, "{allocated} bytes are allocated: holes stay holes");
}

#[test]
fn a_partial_last_block_of_a_file_is_copied_and_padded() {
    let directory = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at / 7) as u8).collect();
    std::fs::write(directory.path().join("odd.img"), &bytes).unwrap();
    let output = blockmux(["copy", "--verify", &file(&directory, "odd.img"), &file(&directory, "even.img")]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains(
            "10000 bytes are not a multiple of the block size: it reads as 10240 with zeroes at the end"
        ),
        "{said}"
    );
    assert_eq!(content(&directory.path().join("even.img")), [bytes, vec![0; 240]].concat());
}

#[test]
fn zeroes_of_the_source_overwrite_data_of_the_destination() {
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 4 << 20);
    let daemon = Daemon::serve(&["mem:5m"]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(0, 0, &[0xff; 5 << 20]), 0);
    copy(&file(&directory, "source.img"), &daemon.url(), &["--verify", "--overwrite"]);
    assert_eq!(client.read(0, 4 << 20), content(&source));
    assert_eq!(client.read(4 << 20, 1 << 20), [0xff; 1 << 20], "data beyond the end of the source stays");
}

#[test]
fn a_destination_without_write_zeroes_gets_zeroes_as_data() {
    let directory = tempfile::tempdir().unwrap();
    half_empty_file(directory.path(), 4 << 20);
    let (source, target) = (file(&directory, "source.img"), directory.path().join("target.img"));
    std::fs::write(&target, vec![0xff; 4 << 20]).unwrap();
    let cannot = format!("fault:op=zeroes,error=unsupported:file:{}", target.display());
    copy(&source, &cannot, &["--verify", "--overwrite"]);
    assert_eq!(content(&target), content(&directory.path().join("source.img")));
}

#[test]
fn decorated_and_striped_volumes_are_copied() {
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 4 << 20);
    let [one, two] = ["one", "two"].map(|name| format!("{}?size=2m", file(&directory, name)));
    let stripe = format!("stripe:64k:{one},{two}");
    copy(&file(&directory, "source.img"), &stripe, &["--verify"]);
    let logged = format!("log:{}:{}", directory.path().join("log").display(), file(&directory, "back.img"));
    copy(&stripe, &logged, &["--verify"]);
    assert_eq!(content(&directory.path().join("back.img")), content(&source));
    assert!(text(&content(&directory.path().join("log"))).contains(" write "));
}

#[test]
fn a_failed_write_is_reported_with_its_offset() {
    let daemon = Daemon::serve(&["fault:op=write,offset=1m,size=4k:mem:4m"]);
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; 4 << 20]).unwrap();
    let from = file(&directory, "full.img");
    let output = blockmux(["copy", &from, &daemon.url(), "--iodepth", "1"]);
    let expected = format!(
        "blockmux: {}: cannot write 1048576 bytes at offset 1048576: medium error; the copy is not complete\n",
        daemon.url()
    );
    assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(1)));
}

/// nbdcopy went on after read errors (CVE-2022-0485).
#[test]
fn a_read_error_anywhere_in_the_source_fails_the_copy_and_names_its_offset() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; 4 << 20]).unwrap();
    let full = format!("{}?readonly=on", file(&directory, "full.img"));
    for bad in [0_u64, 2 << 20, (4 << 20) - 4096] {
        let faulty = format!("fault:op=read,offset={bad},size=4k:{full}");
        let daemon = Daemon::serve(&[&faulty, "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
        let remote = ["nbd+unix", "iscsi", "nvme+tcp"].map(|scheme| daemon.urls_of(scheme).remove(0));
        for from in remote.into_iter().chain([faulty]) {
            for more in [&[][..], &["--verify"]] {
                let to = file(&directory, "copy.img");
                let output = blockmux(
                    [&["copy", &from, &to, "--overwrite", "--bs", "64k", "--iodepth", "4"], more].concat(),
                );
                let said = text(&output.stderr);
                let failed =
                    format!("cannot read 65536 bytes at offset {}: medium error", bad / 65536 * 65536);
                assert!(said.ends_with(&format!(": {failed}; the copy is not complete\n")), "{said}");
                assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()));
            }
        }
    }
}

#[test]
fn a_read_error_anywhere_in_the_destination_fails_the_verification() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; 4 << 20]).unwrap();
    for bad in [0_u64, 2 << 20, (4 << 20) - 4096] {
        let faulty = format!("fault:op=read,offset={bad},size=4k:mem:4m");
        let daemon = Daemon::serve(&[&faulty, "--iscsi", "127.0.0.1:0"]);
        for to in [daemon.url(), daemon.urls_of("iscsi").remove(0), faulty] {
            let args = ["copy", &file(&directory, "full.img"), &to, "--verify", "--overwrite", "--bs", "64k"];
            let output = blockmux(args);
            let said = text(&output.stderr);
            let failed = format!("cannot read 65536 bytes at offset {}: medium error", bad / 65536 * 65536);
            assert!(said.contains(&format!(": {failed}; everything was copied, but not")), "{said}");
            assert_eq!(output.status.code(), Some(1));
        }
    }
}

#[test]
fn a_source_that_stays_busy_fails_the_copy() {
    let directory = tempfile::tempdir().unwrap();
    let busy = "fault:op=read+status,error=nomemory:mem:1m";
    let daemon = Daemon::serve(&[busy, "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    for (scheme, option) in
        [("nbd+unix", "reconnect=1s"), ("iscsi", "reconnect=1s"), ("nvme+tcp", "ctrl_loss_tmo=1")]
    {
        let url = daemon.urls_of(scheme).remove(0);
        let from = format!("{url}{}{option}", if url.contains('?') { '&' } else { '?' });
        let output = blockmux(["copy", &from, &file(&directory, "copy.img"), "--overwrite"]);
        let said = text(&output.stderr);
        assert!(said.contains(": cannot ") && said.contains(" at offset 0: "), "{said}");
        assert!(said.ends_with("; the copy is not complete\n"), "{said}");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()), "{scheme}");
    }
}

#[test]
fn a_destination_with_data_is_overwritten_only_on_request() {
    const SIZE: u64 = 5 << 20;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; SIZE as usize]).unwrap();
    let from = file(&directory, "full.img");
    // Of a destination without block status only the two ends of the range are looked at.
    for (at, nth) in [(0, 3), (SIZE - 512, 3), (3 << 20, 2)] {
        for scheme in &["nbd+unix", "iscsi", "nvme+tcp"][..nth] {
            let daemon = Daemon::serve(&["mem:6m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
            let to = &daemon.urls_of(scheme).remove(0);
            let mut client = RawClient::connect(&daemon.socket());
            assert_eq!(client.write(0, at, &[7; 512]), 0);
            let output = blockmux(["copy", &from, to]);
            let expected = format!(
                "blockmux: {to}: has data at offset {at}, and nothing was copied; to overwrite it, give --overwrite\n"
            );
            assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
            assert_eq!(client.read(at, 512), [7; 512]);
            copy(&from, to, &["--overwrite", "--verify"]);
        }
    }
    // The ends of this data are zeroes, and holes are known before it or only behind it.
    for begin in [1 << 20, 0] {
        let daemon = Daemon::serve(&["mem:6m"]);
        let mut client = RawClient::connect(&daemon.socket());
        let mut data = vec![0; 4 << 20];
        data[(2 << 20) - 512..][..512].fill(7);
        assert_eq!(client.write(0, begin, &data), 0);
        let output = blockmux(["copy", &from, &daemon.url()]);
        let expected = format!("has data at offset {}, and nothing was copied", begin + (2 << 20) - 512);
        assert!(text(&output.stderr).contains(&expected), "{}", text(&output.stderr));
    }
    // A copy overwrites nothing beyond the size of its source, and zeroes are no data.
    let daemon = Daemon::serve(&["mem:6m"]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(0, 0, &[0; 6 << 20]), 0);
    assert_eq!(client.write(0, SIZE, &[7; 512]), 0);
    copy(&from, &daemon.url(), &["--verify"]);
    assert_eq!(client.read(SIZE, 512), [7; 512]);
    std::fs::write(directory.path().join("zeroes.img"), vec![0; SIZE as usize]).unwrap();
    copy(&from, &file(&directory, "zeroes.img"), &["--verify"]);
    let mut mode = Command::new("stat");
    copy(&from, &file(&directory, "new.img"), &[]);
    let mode = mode.args(["-c", "%a"]).arg(directory.path().join("new.img")).output().unwrap();
    assert_eq!(text(&mode.stdout).trim(), "600", "a file that is created is private");
}

#[test]
fn an_interrupted_copy_is_reported_as_incomplete() {
    unignore_signals();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; 4 << 20]).unwrap();
    let (from, to) = (file(&directory, "full.img"), file(&directory, "copy.img"));
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut command = Command::new(BLOCKMUX);
        // Reads never complete; the log shows that they have started.
        command.args(["copy", &format!("log:-:fault:op=read,error=stuck:{from}"), &to]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains(" read ") {
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        stderr.read_to_string(&mut said).unwrap();
        assert!(
            said.ends_with(&format!("blockmux: {to}: interrupted; the copy is not complete\n")),
            "{said}"
        );
        assert_eq!(ended(&mut child).code(), Some(status));
    }
}

#[test]
fn a_copy_that_cannot_be_verified_is_reported_as_complete() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("full.img"), vec![1; 1 << 20]).unwrap();
    let (from, to) = (file(&directory, "full.img"), file(&directory, "copy.img"));
    let output = blockmux(["copy", "--verify", &from, &format!("fault:op=read:{to}")]);
    let said = text(&output.stderr);
    assert!(said.contains(": cannot read 1048576 bytes at offset 0: medium error; "), "{said}");
    assert!(said.ends_with("; everything was copied, but not everything was compared\n"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_difference_is_reported_with_its_offset() {
    // A null volume discards writes, which `--verify` must detect.
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = vec![0; 1 << 20];
    bytes[300_000] = 1;
    std::fs::write(directory.path().join("a.img"), bytes).unwrap();
    let output = blockmux(["copy", &file(&directory, "a.img"), "null:1m", "--verify"]);
    let said = text(&output.stderr);
    assert!(said.starts_with("blockmux: null:1m: differs from file:"), "{said}");
    assert!(said.contains(" at offset 300000; "), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_read_only_destination_is_refused() {
    let daemon = Daemon::serve(&["mem:1m", "--read-only"]);
    let output = blockmux(["copy", "mem:1m", &daemon.url()]);
    let expected = format!("blockmux: {}: is read-only; copy to a writable volume\n", daemon.url());
    assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
}

#[test]
fn a_large_hole_is_copied_as_a_hole() {
    let said = copy("mem:64g", "mem:65g", &["--verify"]);
    assert!(said.starts_with("copied and verified 64 GiB (0 B data, 64 GiB zeroes) in "), "{said}");
    let said: Value = serde_json::from_str(&copy("mem:64g", "mem:65g", &["--json"])).unwrap();
    assert_eq!((&said["zeroes"], &said["verified"]), (&json!(64_u64 << 30), &json!(false)));
}

#[test]
fn a_local_volume_is_described() {
    let output = blockmux(["info", "mem:1m"]);
    let expected = "mem:1m\n  size         1048576 (1 MiB)\n  access       read-write\n  blocks       logical 512, \
                    physical 512, preferred 4096\n  cache        none; the content is lost when the process ends\n";
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn a_volume_is_read_only_if_a_part_of_it_is() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("disk.img"), [0; 4096]).unwrap();
    let disk = file(&directory, "disk.img");
    let (open, frozen) = (Daemon::serve(&[&disk]), Daemon::serve(&["mem:1m", "--read-only"]));
    for (spec, expected) in [
        // A lock of a daemon does not make it read-only.
        (disk.clone(), false),
        (format!("{disk}?readonly=on"), true),
        (format!("delay:1ms:{disk}?readonly=on"), true),
        (format!("stripe:512:mem:4k,{disk}"), false),
        (format!("stripe:512:mem:4k,[{disk}?readonly=on]"), true),
        (open.url(), false),
        (frozen.url(), true),
        (format!("log:-:{}", frozen.url()), true),
    ] {
        let output = blockmux(["info", "--json", &spec]);
        assert_eq!(text(&output.stderr), "", "{spec}");
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(info["read_only"], expected, "{spec}");
        let access = if expected { "\n  access       read-only\n" } else { "\n  access       read-write\n" };
        let described = text(&blockmux(["info", &spec]).stdout);
        assert!(described.contains(access), "{described}");
    }
}
