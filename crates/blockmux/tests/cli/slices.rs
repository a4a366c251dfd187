//! Slices: several volumes in one file, device or remote volume.

use crate::api::ask;
use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::program::{PATTERNS, blockmux, has, qemu_io, succeed, text};
use crate::raw_client::{FUA, RawClient, TRIM, WRITE_ZEROES};
use crate::raw_iscsi::{GOOD, RawIscsi};
use crate::reload::Configured;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const INITIATOR: &str = "iqn.2026-11.i:a";

fn file_of(directory: &Path, mib: u64) -> String {
    let path = directory.join("disk.img");
    fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
    path.display().to_string()
}

/// Exit status and messages of a daemon that serves these volumes and ends at once.
fn says(volumes: &[&str]) -> (Option<i32>, String) {
    let args = [&["serve"], volumes, &["--nbd", "127.0.0.1:0", "--run", "true"]].concat();
    let output = blockmux(args);
    (output.status.code(), text(&output.stderr))
}

fn connect(daemon: &Daemon, export: &str) -> RawClient {
    // The default export is the first volume. For other volumes the daemon needs a separate
    // listener.
    assert_eq!(export, daemon.json["exports"][0]["name"]);
    RawClient::connect(&daemon.socket())
}

#[test]
fn two_slices_of_a_file_are_two_disks_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let volumes = [format!("a=slice:1m,2m:file:{file}"), format!("b=slice:3m:file:{file}")];
    let daemon = Daemon::serve(&[volumes[0].as_str(), &volumes[1], "--iscsi", "127.0.0.1:0"]);
    let mut a = connect(&daemon, "a");
    assert_eq!(a.write(FUA, 0, &[1; 4096]), 0);
    assert_eq!(a.write(0, 2 * MIB - 4096, &[2; 4096]), 0);
    assert_eq!(a.simple(WRITE_ZEROES, 0, 2 * MIB - 512, 512), 0);
    assert_eq!(a.simple(TRIM, 0, 64 << 10, 64 << 10), 0);
    assert_ne!(a.write(0, 2 * MIB - 512, &[9; 1024]), 0, "it ends there");
    let urls = daemon.urls_of("iscsi");
    let mut b = RawIscsi::login(&urls[1], INITIATOR);
    assert_eq!(b.run(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[3; 512], 0).0, GOOD);
    let (status, capacity) = b.run(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
    assert_eq!((status, &capacity[..4]), (GOOD, &((5 * MIB / 512 - 1) as u32).to_be_bytes()[..]));
    let whole = fs::File::open(&file).unwrap();
    let at = |offset: u64| {
        let mut bytes = [0; 512];
        whole.read_exact_at(&mut bytes, offset).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "at {offset}");
        bytes[0]
    };
    assert_eq!([at(MIB - 512), at(MIB), at(3 * MIB - 1024), at(3 * MIB - 512), at(3 * MIB)], [0, 1, 2, 0, 3]);
    // Hosts can tell the two slices and the whole file apart.
    let serial = |url: &String| RawIscsi::login(url, INITIATOR).inquiry_page(0x80);
    assert_ne!(serial(&urls[0]), serial(&urls[1]));
    drop(daemon);
    let whole = Daemon::serve(&[&format!("a=file:{file}"), "--iscsi", "127.0.0.1:0"]);
    let third = serial(&whole.urls_of("iscsi")[0]);
    drop(whole);
    let slice = Daemon::serve(&[&format!("a=slice:0:file:{file}"), "--iscsi", "127.0.0.1:0"]);
    assert_ne!(serial(&slice.urls_of("iscsi")[0]), third);
}

#[test]
fn a_slice_is_the_same_disk_after_a_restart_and_with_another_length() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let serial = |slice: &str| {
        let daemon = Daemon::serve(&[&format!("a={slice}:file:{file}"), "--iscsi", "127.0.0.1:0"]);
        RawIscsi::login(&daemon.urls_of("iscsi")[0], INITIATOR).inquiry_page(0x80)
    };
    let first = serial("slice:1m,1m");
    assert_eq!((serial("slice:1m,1m"), serial("slice:1m,4m")), (first.clone(), first.clone()));
    assert_ne!(serial("slice:2m,1m"), first);
}

#[test]
fn a_reservation_applies_to_one_slice() {
    const CONFLICT: u8 = 0x18;
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let volumes = [format!("a=slice:0,2m:file:{file}"), format!("b=slice:2m,2m:file:{file}")];
    let daemon = Daemon::serve(&[volumes[0].as_str(), &volumes[1], "--iscsi", "127.0.0.1:0"]);
    let urls = daemon.urls_of("iscsi");
    let mut owner = RawIscsi::login(&urls[0], INITIATOR);
    // REGISTER, then RESERVE for exclusive access.
    assert_eq!(owner.reserve_out(0, 0, [0, 7], 0), GOOD);
    assert_eq!(owner.reserve_out(1, 3, [7, 0], 0), GOOD);
    let mut others = [0, 1].map(|nth: usize| RawIscsi::login(&urls[nth], "iqn.2026-11.i:b"));
    assert_eq!(others[0].access(), [CONFLICT; 2]);
    assert_eq!(others[1].access(), [GOOD; 2]);
}

#[test]
fn slices_that_overlap_are_warned_of_and_others_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let overlap = |a: &str, b: &str| {
        let (status, said) = says(&[&format!("a={a}:file:{file}"), &format!("b={b}:file:{file}")]);
        assert_eq!(status, Some(0), "{said}");
        said.contains("`b` and `a` overlap: reservations and access control of one do not apply")
    };
    assert!(!overlap("slice:0,1m", "slice:1m,1m"));
    assert!(overlap("slice:0,1m", "slice:512k,1m"));
    assert!(overlap("slice:0,8m", "slice:1m,1m"));
    assert!(overlap("slice:0,2m", "slice:512:slice:1m,8k"));
    let whole = format!("b=file:{file}?readonly=on");
    let (status, said) = says(&[&format!("a=slice:1m,1m:file:{file}"), &whole]);
    assert!(
        status == Some(0) && (said.contains("`b` and `a` overlap") || said.contains("`a` and `b` overlap")),
        "{said}"
    );
    // Another path, or a stripe, refers to the same file.
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let link = link.display();
    let (status, said) = says(&[
        &format!("a=slice:0,64k:stripe:64k:file:{file},mem:8m"),
        &format!("b=slice:32k,1m:file:{link}"),
    ]);
    assert!(status == Some(0) && said.contains("overlap:"), "{said}");
}

#[test]
fn slices_of_one_file_must_have_the_same_options() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let (status, said) =
        says(&[&format!("a=slice:0,1m:file:{file}"), &format!("b=slice:1m,1m:file:{file}?direct=off")]);
    assert_eq!(status, Some(2), "{said}");
    assert!(
        said.contains("volumes `a` and `b` are slices of ") && said.contains("use the same options"),
        "{said}"
    );
    // Only the file system tells that it is the same file.
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let linked = format!("b=slice:1m,1m:file:{}?direct=off", link.display());
    let (status, said) = says(&[&format!("a=slice:0,1m:file:{file}"), &linked]);
    assert_eq!(status, Some(2), "{said}");
    assert!(
        said.contains("are slices of one file with different paths or options")
            && said.contains("use the same"),
        "{said}"
    );
    // The lock excludes a second program.
    let _daemon = Daemon::serve(&[&format!("slice:0,1m:file:{file}")]);
    let (status, said) = says(&[&format!("slice:1m,1m:file:{file}")]);
    assert!(status == Some(2) && said.contains("is locked by process "), "{said}");
}

#[test]
fn a_slice_does_not_grow_over_data_of_another_volume_unless_both_are_meant_to_share_it() {
    let config = |len: &str, more: [&str; 2]| {
        format!(
            "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'slice:0,{len}:file:disk.img'\n{}\n[[volume]]\n\
             name = 'b'\nspec = 'slice:2m,1m:file:disk.img'\n{}\n",
            more[0], more[1]
        )
    };
    let files = tempfile::tempdir().unwrap();
    file_of(files.path(), 8);
    let served = Configured::serve_in(files, &config("1m", ["", ""]));
    let size = || served.status()["volumes"][0]["size"].as_u64();
    served.said(&["resize", "a", "2m"]);
    assert_eq!(size(), Some(2 * MIB));
    let expected = "volume `a`: would grow over data of `b`, which has a part of the same file or device; ";
    let refused = |output: std::process::Output| {
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{said}");
        assert_eq!(size(), Some(2 * MIB));
    };
    refused(served.ctl(&["resize", "a", "2560k"]));
    let disk = served.socket("disk.img").display().to_string();
    refused(served.ctl(&["set", "volume", "a", &format!("spec=slice:0,2560k:file:{disk}")]));
    let (status, said) = ask(
        &served.socket("control"),
        "POST",
        "/v1/volumes/a/resize",
        "",
        &json!({ "size": 3 * MIB }).to_string(),
    );
    assert_eq!((status, &said["error"]["code"]), (409, &json!("conflict")), "{said}");
    // Also if one change removes the other volume, which is served until then.
    let alone = config("3m", ["", ""]).split_once("[[volume]]\nname = 'b'").unwrap().0.to_owned();
    for new in [config("3m", ["", ""]), config("3m", ["shared = true", ""]), alone] {
        served.write(&new);
        refused(served.ctl(&["reload"]));
    }
    // Before anything else is done.
    let new = "[[volume]]\nname = 'c'\nspec = 'file:new.img?size=1m'\n";
    served.write(&(config("3m", ["", ""]) + new));
    refused(served.ctl(&["reload"]));
    assert!(!served.socket("new.img").exists(), "no volume is opened for a change that is refused");
    served.reload(&config("3m", ["shared = true", "shared = true"]));
    assert_eq!(size(), Some(3 * MIB));
    // Those that overlap by config continue to.
    served.reload(&config("3m", ["", ""]));
    served.said(&["resize", "a", "4m"]);
    served.said(&["remove", "b"]);
    served.said(&["resize", "a", "5m"]);
}

#[test]
fn a_file_that_two_volumes_would_write_to_is_refused_by_check_and_by_a_start() {
    let directory = tempfile::tempdir().unwrap();
    file_of(directory.path(), 8);
    std::os::unix::fs::symlink(directory.path().join("disk.img"), directory.path().join("link")).unwrap();
    let config = directory.path().join("b.toml");
    let said = |specs: [&str; 2]| {
        let volume = |(name, spec): (&str, &str)| format!("[[volume]]\nname = '{name}'\nspec = '{spec}'\n");
        let volumes: String = ["a", "b"].into_iter().zip(specs).map(volume).collect();
        fs::write(&config, format!("nbd = ['unix:n.sock']\n{volumes}")).unwrap();
        let config = config.to_str().unwrap();
        let [checked, served] =
            [&["check", config][..], &["serve", "--config", config, "--run", "true"]].map(blockmux);
        assert_eq!(checked.status.code(), served.status.code(), "{specs:?}");
        match checked.status.success() {
            true => String::new(),
            false => {
                assert_eq!(text(&checked.stderr), text(&served.stderr), "the same words");
                text(&checked.stderr)
            }
        }
    };
    for specs in [["file:disk.img", "file:link"], ["slice:0,1m:file:disk.img", "file:link"]] {
        let said = said(specs);
        assert!(said.contains("b.toml:2: volumes `a` and `b` both write to "), "{said}");
    }
    assert_eq!(said(["slice:0,1m:file:disk.img", "slice:1m,1m:file:link"]), "");
    assert_eq!(said(["file:disk.img", "file:link?readonly=on"]), "");
    assert!(said(["file:new.img?size=1m", "file:new.img?size=1m"]).contains("both write to "));
    assert!(!directory.path().join("new.img").exists(), "nothing is created");
}

#[test]
fn an_invalid_slice_is_refused_with_advice() {
    for (spec, expected) in [
        (
            "slice:1m:mem:1m",
            "slice:1m:mem:1m: begins at byte 1048576, but its volume has only 1048576 bytes; write a lower",
        ),
        ("slice:512k,1m:mem:1m", "write a length of at most 524288, or leave it out to use the rest"),
        (
            "slice:100:mem:1m",
            "offset 100 is not a multiple of its volume's block size of 512 bytes; write 512",
        ),
        (
            "slice:4k,5k:mem:1m?block_size=4096",
            "length 5120 is not a multiple of its volume's block size of 4096",
        ),
    ] {
        let output = blockmux(["info", spec]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(expected), "{spec}: {said}");
    }
}

#[test]
fn a_slice_is_resized_within_its_file_and_the_last_one_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 8);
    let volumes = [format!("a=slice:1m,1m:file:{file}"), format!("b=slice:4m:file:{file}")];
    let controlled = Controlled::serve(&[&volumes[0], &volumes[1]]);
    let sizes = || {
        let status = controlled.status();
        let volumes = status["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["size"].as_u64().unwrap() / MIB).collect::<Vec<_>>()
    };
    controlled.said(&["resize", "a", "2m"]);
    assert_eq!(sizes(), [2, 4]);
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(nbd.write(0, 2 * MIB - 512, &[5; 512]), 0);
    let exported = controlled.said(&["export"]);
    assert!(exported.contains(&format!("spec = \"slice:1m,2m:file:{file}\"")), "{exported}");
    // The rest of a file is resized with the file.
    controlled.said(&["resize", "b", "8m"]);
    assert_eq!((sizes(), fs::metadata(&file).unwrap().len()), (vec![2, 8], 12 * MIB));
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(16 * MIB).unwrap();
    controlled.said(&["resize", "b"]);
    assert_eq!(sizes(), [2, 12]);
    let refused = controlled.refusal(&["resize", "a", "4m"]);
    assert!(refused.contains("`a`: would grow over data of `b`"), "{refused}");
    controlled.said(&["remove", "b"]);
    let refused = controlled.refusal(&["resize", "a", "20m"]);
    assert!(refused.contains("it can have at most 15728640 bytes"), "{refused}");
    controlled.said(&["resize", "a", "15m"]);
}

#[test]
fn slices_of_a_remote_volume_are_served_unless_they_overlap() {
    let below = Daemon::serve(&["mem:16m"]);
    let url = below.url();
    let volumes = [format!("a=slice:0,8m:{url}"), format!("b=slice:8m:{url}")];
    let daemon = Daemon::serve(&[&volumes[0], &volumes[1]]);
    let mut nbd = connect(&daemon, "a");
    assert_eq!(nbd.write(0, 8 * MIB - 512, &[5; 512]), 0);
    assert_eq!(RawClient::connect(&below.socket()).read(8 * MIB - 512, 512), [5; 512]);
    drop((nbd, daemon));
    let (status, said) = says(&[&volumes[0], &format!("b=slice:4m:{url}")]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("`b`: this process already uses the same data"), "{said}");
}

#[test]
fn programs_use_a_slice() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_of(directory.path(), 64);
    let slice = format!("slice:4m,16m:file:{file}");
    let daemon = Daemon::serve(&[&slice, "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"]);
    if has("qemu-io") {
        succeed(&mut qemu_io(&daemon.url(), &PATTERNS));
    }
    if has("nbdinfo") {
        let map = succeed(Command::new("nbdinfo").args(["--map", "--json", &daemon.url()]));
        let map: Value = serde_json::from_str(&map).unwrap();
        let lens = map.as_array().unwrap().iter().map(|extent| extent["length"].as_u64().unwrap());
        assert_eq!(lens.sum::<u64>(), 16 * MIB, "{map}");
    }
    let source = directory.path().join("source");
    fs::write(&source, (0..4_u32 << 20).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
    for scheme in ["nbd+unix", "iscsi", "nvme+tcp"] {
        let (from, to) = (format!("file:{}", source.display()), daemon.urls_of(scheme).remove(0));
        let copied = blockmux(["copy", "--overwrite", "--verify", &from, &to]);
        assert!(copied.status.success(), "{scheme}: {}", text(&copied.stderr));
    }
    drop(daemon);
    let bytes = fs::read(&file).unwrap();
    assert!(bytes[4 << 20..20 << 20] == fs::read(&source).unwrap());
    assert!(bytes[..4 << 20].iter().chain(&bytes[20 << 20..]).all(|byte| *byte == 0), "nothing beside it");
    // A copy within one file, of parts that do not overlap.
    let [from, to] = ["slice:4m,16m", "slice:32m,16m"].map(|slice| format!("{slice}:file:{file}"));
    let copied = blockmux(["copy", "--overwrite", "--verify", &from, &to]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let refused = blockmux(["copy", "--overwrite", &*from, &format!("slice:8m,16m:file:{file}")]);
    assert!(text(&refused.stderr).contains("source and destination overlap"), "{}", text(&refused.stderr));
}
