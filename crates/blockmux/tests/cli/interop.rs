//! Standard NBD clients with the NBD server.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, PATTERNS, half_empty_file, has, qemu_io, succeed, text};
use serde_json::Value;
use std::process::Command;

#[test]
fn nbdinfo_describes_exports() {
    if !has("nbdinfo") {
        return;
    }
    let daemon = Daemon::serve(&["a=mem:64m", "b=null:1g"]);
    let info: Value =
        serde_json::from_str(&succeed(Command::new("nbdinfo").args(["--json", &daemon.url()]))).unwrap();
    let export = &info["exports"][0];
    assert_eq!((&export["export-name"], &export["export-size"]), (&"a".into(), &(64 << 20).into()));
    for can in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_fast_zero",
        "can_cache",
        "can_multi_conn",
        "can_df",
    ] {
        assert_eq!(export[can], Value::Bool(true), "{can}");
    }
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    let list: Value =
        serde_json::from_str(&succeed(Command::new("nbdinfo").args(["--list", "--json", &daemon.url()])))
            .unwrap();
    assert_eq!(list["exports"].as_array().unwrap().len(), 2);
}

#[test]
fn nbdinfo_maps_data_and_holes() {
    if !has("nbdinfo") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 4 << 20);
    let daemon = Daemon::serve(&[&format!("file:{}", source.display())]);
    let map: Value =
        serde_json::from_str(&succeed(Command::new("nbdinfo").args(["--map", "--json", &daemon.url()])))
            .unwrap();
    let types: Vec<_> =
        map.as_array().unwrap().iter().map(|extent| extent["type"].as_u64().unwrap()).collect();
    assert_eq!(types, [0, 3, 0, 3]);
}

#[test]
fn nbdcopy_copies_in_both_directions() {
    if !has("nbdcopy") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 16 << 20);
    let back = directory.path().join("back.img");
    let daemon = Daemon::serve(&["mem:16m"]);
    succeed(Command::new("nbdcopy").arg("--flush").arg(&source).arg(daemon.url()));
    succeed(Command::new("nbdcopy").arg(daemon.url()).arg(&back));
    assert_eq!(std::fs::read(back).unwrap(), std::fs::read(source).unwrap());
}

#[test]
fn libnbds_programs_start_the_server_that_they_use() {
    if !has("nbdinfo") || !has("nbdcopy") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 4 << 20);
    let served = format!("file:{}", source.display());
    let own = |client: &str, before: &[&str], after: &[&str]| {
        let mut command = Command::new(client);
        command.args(before).args(["[", BLOCKMUX, "serve", &served, "]"]).args(after);
        command.env("XDG_STATE_HOME", directory.path()).output().unwrap()
    };
    let info = own("nbdinfo", &["--json"], &[]);
    assert!(info.status.success(), "{}", text(&info.stderr));
    // Nothing of ours is between the lines of the client.
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["exports"][0]["export-size"], 4 << 20);
    let copied = own("nbdcopy", &[], &["-"]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    assert!(copied.stdout == std::fs::read(source).unwrap(), "{} bytes", copied.stdout.len());
}

#[test]
fn nbdsh_uses_every_command() {
    if !has("nbdsh") {
        return;
    }
    let daemon = Daemon::serve(&["mem:1m"]);
    let script = r#"
import errno
h.pwrite(b"x" * 4096, 4096, nbd.CMD_FLAG_FUA)
assert h.pread(4096, 4096) == b"x" * 4096
parts = []
h.pread_structured(8192, 0, lambda part, offset, *_: parts.append((offset, bytes(part))), nbd.CMD_FLAG_DF)
assert parts == [(0, bytes(4096) + b"x" * 4096)], "one piece"
h.flush()
h.cache(4096, 0)
h.zero(2048, 4096, nbd.CMD_FLAG_NO_HOLE)
h.zero(2048, 6144, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(4096, 4096) == bytes(4096)
h.trim(4096, 4096)
def refused(call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        return error.errnum
    raise AssertionError("not refused")
h.set_strict_mode(0)
assert refused(h.pread, 4096, 1 << 20) == errno.EINVAL
assert refused(h.pwrite, bytes(4096), 1 << 20) == errno.ENOSPC
assert refused(h.pwrite, bytes(511), 0) == errno.EINVAL
assert h.pread(512, 0) == bytes(512), "it goes on after errors"
"#;
    let mut nbdsh = Command::new("nbdsh");
    // The nbd module is installed for the system's Python, which may not be the first in PATH.
    nbdsh.env("PATH", "/usr/bin:/bin");
    succeed(nbdsh.args(["--uri", &daemon.url(), "-c", script]));
}

#[test]
fn qemu_img_converts_and_compares() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 16 << 20);
    let daemon = Daemon::serve(&["mem:16m"]);
    let info = succeed(Command::new("qemu-img").args(["info", &daemon.url()]));
    assert!(info.contains("(16777216 bytes)"), "{info}");
    let formats = ["-n", "-f", "raw", "-O", "raw"];
    succeed(Command::new("qemu-img").arg("convert").args(formats).arg(&source).arg(daemon.url()));
    let formats = ["-f", "raw", "-F", "raw"];
    succeed(Command::new("qemu-img").arg("compare").args(formats).arg(&source).arg(daemon.url()));
    let map = succeed(Command::new("qemu-img").args(["map", "--output=json", "-f", "raw", &daemon.url()]));
    let map: Value = serde_json::from_str(&map).unwrap();
    let zeroes: Vec<_> = map.as_array().unwrap().iter().map(|extent| extent["zero"] == true).collect();
    assert_eq!(zeroes, [false, true, false, true]);
}

#[test]
fn qemu_io_verifies_patterns() {
    if !has("qemu-io") {
        return;
    }
    let daemon = Daemon::serve(&["mem:16m"]);
    let said = succeed(&mut qemu_io(&daemon.url(), &PATTERNS));
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn fio_verifies_its_writes() {
    if !has("fio") {
        return;
    }
    let daemon = Daemon::serve(&["mem:16m"]);
    let uri = format!("--uri={}", daemon.url());
    for rw in ["--rw=randwrite", "--rw=write", "--rw=randrw"] {
        let job = ["--name=job", "--ioengine=nbd", &uri, rw, "--bs=4k,4k", "--iodepth=32", "--size=16m"];
        let verify = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--output-format=json"];
        let said = succeed(Command::new("fio").args(job).args(verify).current_dir(daemon.directory.path()));
        // Other lines may precede the object.
        let result: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
        assert_eq!(result["jobs"][0]["error"], 0, "{rw}");
        assert!(result["jobs"][0]["read"]["total_ios"].as_u64().unwrap() > 0, "{rw}: it read back");
    }
}
