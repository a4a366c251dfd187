//! `blockmux attach` on a machine without the ublk driver. `tests/vm/attach.sh` attaches disks.

use crate::program::{blockmux, text};
use serde_json::Value;
use std::path::Path;

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
    let output = blockmux(["attach", &format!("file:{}?size=1m", image.display())]);
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
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let way = &found["ways"][0];
    assert_eq!((&way["name"], &way["usable"]), (&"ublk".into(), &false.into()));
    assert!(way["why_not"].as_str().unwrap().contains("modprobe ublk_drv"), "{way}");
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
