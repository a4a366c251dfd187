//! Only a command that says so makes a volume smaller or drops data (decision 65).

use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::program::{blockmux, text};
use crate::raw_client::{RawClient, TRIM};
use crate::reload::{Configured, UNCHANGED};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

fn len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// Specs of volumes over a file, each with two sizes of the volume.
fn specs(file: &str) -> Vec<[String; 2]> {
    let sizes = |spec: &str| ["4m", "1m"].map(|size| spec.replace("SIZE", size).replace("FILE", file));
    let slice = ["4100k", "1028k"].map(|size| format!("slice:4k:file:{file}?size={size}"));
    [
        "file:FILE?size=SIZE",
        "delay:1us:file:FILE?size=SIZE",
        "rate:iops=1000:log:-:file:FILE?size=SIZE",
        "slice:0:file:FILE?size=SIZE",
        "slice:1m,SIZE:file:FILE?size=8m",
    ]
    .into_iter()
    .map(sizes)
    .chain([slice])
    .collect()
}

#[test]
fn nothing_but_a_resize_with_shrink_makes_a_file_shorter() {
    for nth in 0..specs("").len() {
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("disk.img");
        let [large, small] = specs(&path.display().to_string()).swap_remove(nth);
        let config = |spec: &str| format!("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = '{spec}'\n");
        let mut served = Configured::serve_in(files, &config(&large));
        let before = len(&path);
        let mut client = served.nbd("a.sock");
        assert_eq!(client.write(0, 4 * MIB - 512, &[7; 512]), 0);
        served.write(&config(&small));
        let planned = served.said(&["diff"]);
        let loss = "has 4194304 bytes, of which the last 3145728 would be lost with a size of 1048576";
        assert!(planned.contains(&format!("; refused: {loss}; to discard them, use ")), "{planned}");
        assert!(planned.contains("\n    affects nbd client ") && planned.contains(" of a\n"), "{planned}");
        let refused = |args: &[&str]| {
            let output = served.ctl(args);
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(1) && said.contains(loss), "{args:?}: {said}");
        };
        refused(&["reload"]);
        let fragment = served.socket("part.toml");
        fs::write(&fragment, format!("[[volume]]\nname = 'a'\nspec = '{small}'\n")).unwrap();
        refused(&["apply", &fragment.display().to_string()]);
        refused(&["resize", "a", "1m"]);
        served.daemon.signal(Signal::HUP);
        served.daemon.wait_for_line("the config was not reloaded and nothing has changed: ");
        assert_eq!((len(&path), client.read(4 * MIB - 512, 512)), (before, vec![7; 512]), "{large}");
        // A command that says so.
        assert_eq!(served.said(&["resize", "a", "1m", "--shrink"]), "a  1048576 (1 MiB)\n");
        assert_ne!(client.write(0, 4 * MIB - 512, &[7; 512]), 0, "it is beyond the end");
        assert_eq!(served.said(&["reload"]), UNCHANGED, "{large}");
    }
}

#[test]
fn a_volume_that_is_shortened_takes_no_data_from_others_in_its_file() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("disk.img");
    fs::write(&path, vec![7; 8 << 20]).unwrap();
    let file = path.display();
    let config = format!(
        "nbd = ['unix:a.sock']\n\
         [[volume]]\nname = 'a'\nspec = 'slice:1m:file:{file}'\n\
         [[volume]]\nname = 'b'\nspec = 'slice:6m,1m:file:{file}'\n\
         [[volume]]\nname = 'c'\nspec = 'delay:1us:slice:0,2m:file:{file}'\n"
    );
    let served = Configured::serve_in(files, &config);
    // The first cuts all of `b`, the second a part of it.
    for size in ["4m", "5632k"] {
        let output = served.ctl(&["resize", "a", size, "--shrink"]);
        let cut = "volume `a`: the end of its file would be cut off, which `b` uses, too";
        assert!(output.status.code() == Some(1) && text(&output.stderr).contains(cut), "{output:?}");
        assert_eq!(len(&path), 8 * MIB);
    }
    // What is behind `b` belongs to `a` alone.
    assert_eq!(served.said(&["resize", "a", "6m", "--shrink"]), "a  6291456 (6 MiB)\n");
    assert_eq!(len(&path), 7 * MIB);
    // A slice with a length leaves the file as it is.
    assert_eq!(served.said(&["resize", "c", "1m", "--shrink"]), "c  1048576 (1 MiB)\n");
    assert_eq!(len(&path), 7 * MIB);
    served.said(&["remove", "b"]);
    assert_eq!(served.said(&["resize", "a", "4m", "--shrink"]), "a  4194304 (4 MiB)\n");
    assert_eq!(len(&path), 5 * MIB);
}

#[test]
fn a_ram_volume_is_not_shortened_by_a_reload() {
    let config = |size: &str| format!("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:{size}'\n");
    let served = Configured::serve(&config("4m"));
    let mut client = served.nbd("a.sock");
    assert_eq!(client.write(0, 3 * MIB, &[7; 512]), 0);
    served.write(&config("1m"));
    let output = served.ctl(&["reload"]);
    assert!(text(&output.stderr).contains("of which the last 3145728 would be lost"), "{output:?}");
    assert_eq!(client.read(3 * MIB, 512), [7; 512]);
}

#[test]
fn a_ram_volume_that_was_written_or_is_in_use_is_neither_removed_nor_replaced_by_a_reload() {
    for (before, after) in [
        ("mem:4m", "mem:1m?populate=off"),
        ("mem:4m", "mem:4m?populate=off"),
        ("mem:4m", "null:4m"),
        ("stripe:64k:mem:4m,mem:4m", "stripe:64k:mem:1m,mem:1m"),
        ("slice:1m,1m:mem:4m", "slice:2m,1m:mem:4m"),
        ("delay:1us:mem:4m", "delay:2us:mem:4m"),
        ("rate:iops=10000:mem:4m", "rate:iops=20000:mem:4m"),
        ("log:-:mem:4m", "mem:4m"),
        ("mem:4m", ""),
    ] {
        let config = |spec: &str| {
            let volume = match spec {
                "" => String::new(),
                spec => format!("[[volume]]\nname = 'a'\nspec = '{spec}'\n"),
            };
            format!("nbd = ['unix:a.sock?volumes=a']\n{volume}[[volume]]\nname = 'b'\nspec = 'null:1m'\n")
        };
        let served = Configured::serve(&config(before));
        // Nobody needs it yet.
        let other = config("mem:8m?populate=off");
        served.reload(&other);
        served.reload(&config(before));
        let mut client = served.nbd("a.sock");
        assert_eq!(client.write(0, 0, &[7; 512]), 0);
        served.write(&config(after));
        let loss = " bytes are in RAM and would be lost; ";
        let planned = served.said(&["diff"]);
        assert!(planned.contains("; refused: its ") && planned.contains(loss), "{planned}");
        assert!(planned.contains("\n    affects nbd client ") && planned.contains(" of a\n"), "{planned}");
        let refused = || {
            let output = served.ctl(&["reload"]);
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(1) && said.contains(loss), "{before} {after}: {said}");
            said
        };
        assert!(refused().contains("; it is in use by nbd client "));
        assert_eq!(client.read(0, 512), [7; 512], "{before} {after}");
        // Also when the client is gone: its data is needed.
        drop(client);
        eventually("the client is gone", || !refused().contains("; it is in use by "));
        // A command that says so.
        served.said(&["remove", "a", "--force"]);
        served.said(&["reload"]);
        assert_eq!(served.said(&["reload"]), UNCHANGED, "{before} {after}");
    }
}

#[test]
fn a_reload_that_fails_after_a_growth_keeps_the_file_as_long_as_it_was() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("disk.img");
    fs::write(&path, vec![7; 4 << 20]).unwrap();
    let config = |size: &str, other: &str| {
        format!(
            "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'file:disk.img?size={size}'\n\
             [[volume]]\nname = 'b'\nspec = 'mem:{other}'\n"
        )
    };
    let served = Configured::serve_in(files, &config("1m", "1m"));
    // `a` grows to the whole file, then `b` cannot grow as much.
    served.write(&config("4m", "1e"));
    let output = served.ctl(&["reload"]);
    assert!(text(&output.stderr).contains("volume `b`: it can have at most "), "{output:?}");
    assert_eq!(served.status()["volumes"][0]["size"], MIB);
    assert!(fs::read(&path).unwrap() == [7; 4 << 20], "the file has lost bytes");
    served.reload(&config("4m", "2m"));
    assert_eq!(served.nbd("a.sock").read(3 * MIB, 512), [7; 512]);
}

#[test]
fn a_start_serves_the_beginning_of_a_longer_file_and_check_names_the_rest() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("disk.img");
    fs::write(&path, vec![7; 4 << 20]).unwrap();
    let config = "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'slice:0:file:disk.img?size=1m'\n";
    let mut served = Configured::serve_in(files, config);
    let rest = "has 4194304 bytes, of which only the first 1048576 are used";
    served.daemon.wait_for_line(rest);
    let output = blockmux(["check", &served.socket("b.toml").display().to_string()]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("volume `a`: file:") && said.contains(rest), "{said}");
    drop(served.nbd("a.sock"));
    assert_eq!(len(&path), 4 * MIB);
}

#[test]
fn a_volume_whose_file_was_deleted_is_kept_until_the_daemon_stops() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("disk.img");
    let config = |spec: &str| {
        format!(
            "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = '{spec}'\n[[volume]]\nname = 'b'\nspec = 'null:1m'\n"
        )
    };
    let deleted = "file:disk.img?size=4m";
    let served = Configured::serve_in(files, &config(deleted));
    let mut client = served.nbd("a.sock");
    assert_eq!(client.write(0, 0, &[7; 512]), 0);
    fs::remove_file(&path).unwrap();
    let refused = |args: &[&str]| {
        let output = served.ctl(args);
        let said = text(&output.stderr);
        let what =
            "disk.img was deleted while it is served, and its data is lost when the volume is closed; ";
        assert!(output.status.code() == Some(1) && said.contains(what), "{args:?}: {said}");
    };
    let removed = "nbd = ['unix:a.sock']\n[[volume]]\nname = 'b'\nspec = 'null:1m'\n";
    for other in [config("mem:4m"), config("file:disk.img?size=4m&direct=off"), removed.to_owned()] {
        served.write(&other);
        refused(&["reload"]);
    }
    refused(&["remove", "a"]);
    assert!(!path.exists(), "no empty file takes its place");
    assert_eq!(client.read(0, 512), [7; 512]);
    // The data can be copied from the daemon.
    let from = format!("nbd+unix:///a?socket={}", served.socket("a.sock").display());
    let back = format!("file:{}", served.socket("back.img").display());
    assert!(blockmux(["copy", &from, &back]).status.success());
    assert_eq!(fs::read(served.socket("back.img")).unwrap()[..512], [7; 512]);
}

#[test]
fn a_detach_waits_for_discards_in_flight() {
    let args = ["a=fault:op=discard,error=stuck:mem:8m", "--iscsi", "127.0.0.1:0"];
    let mut controlled = Controlled::serve(&args);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    // The discard never completes, so the detach gives up waiting and says so.
    client.request(TRIM, 0, 0, 4096);
    assert_eq!(client.read(0, 512), [0; 512], "the read was received after the discard");
    controlled.said(&["detach", "iqn.2026-11.blockmux:a", "0"]);
    controlled.daemon.wait_for_line("I/O that was in flight when it was detached has not ended after 10 s");
}

#[test]
fn a_daemon_whose_file_was_deleted_renamed_or_replaced_is_not_taken_over() {
    type Move = fn(&Path) -> std::io::Result<()>;
    let cases: [(&str, Move); 3] = [
        ("disk.img was deleted while it is served", |path| fs::remove_file(path)),
        ("disk.img no longer leads to what is served, and the new process would serve other data", |path| {
            fs::rename(path, path.with_extension("old"))
        }),
        ("disk.img no longer leads to what is served, and the new process would serve other data", |path| {
            fs::rename(path, path.with_extension("old"))?;
            fs::write(path, vec![9; 4 << 20])
        }),
    ];
    for (what, change) in cases {
        let files = tempfile::tempdir().unwrap();
        let (path, control) = (files.path().join("disk.img"), files.path().join("control"));
        let spec = format!("a=file:{}?size=4m", path.display());
        let control = format!("unix:{}", control.display());
        let daemon = Daemon::serve(&[&spec, "--control", &control]);
        let mut client = RawClient::connect(&daemon.socket());
        assert_eq!(client.write(0, 0, &[7; 512]), 0);
        change(&path).unwrap();
        let exists = path.exists();
        let mut successor = Command::new(crate::program::BLOCKMUX);
        successor.args(["serve", &spec, "--nbd", &format!("unix:{}", daemon.socket().display())]);
        let output = successor.args(["--control", &control, "--takeover", &control]).output().unwrap();
        let said = text(&output.stderr);
        assert!(said.contains(what), "{what}: {said}");
        assert!(!output.status.success() && path.exists() == exists, "{what}");
        assert_eq!(client.read(0, 512), [7; 512], "{what}");
    }
}
