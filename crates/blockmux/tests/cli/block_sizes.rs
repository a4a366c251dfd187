//! Block sizes: 512n, 512e and 4Kn disks, over every protocol and for every kind of volume.

use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::program::{PATTERNS, blockmux, has, qemu_io, succeed, text};
use crate::raw_client::{READ, RawClient, TRIM, WRITE_ZEROES};
use crate::raw_iscsi::{GOOD, RawIscsi};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

const LISTENERS: [&str; 6] = ["--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0", "--srp", "127.0.0.1:0"];
const SCHEMES: [&str; 6] = ["nbd+unix", "iscsi", "iser", "nvme+tcp", "nvme+rdma", "srp"];
/// Parameters of a volume, its logical block size, and its physical block size, in bytes.
const DISKS: [(&str, u64, u64); 4] = [
    ("block_size=4096", 4096, 4096),
    ("block_size=512&physical_block_size=4096", 512, 4096),
    ("block_size=512&physical_block_size=512", 512, 512),
    ("block_size=4k&physical_block_size=16k", 4096, 16384),
];

fn info(volume: &str) -> Value {
    let output = blockmux(["info", "--json", volume]);
    assert_eq!(output.status.code(), Some(0), "{volume}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn serve(volumes: &[&str]) -> Daemon {
    Daemon::serve(&[volumes, &LISTENERS].concat())
}

fn refusal(args: &[&str]) -> String {
    let output = blockmux(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn every_protocol_reports_the_same_block_sizes() {
    for (options, logical, physical) in DISKS {
        let daemon = serve(&[&format!("mem:16m?{options}")]);
        for scheme in SCHEMES {
            let url = daemon.urls_of(scheme).remove(0);
            let info = info(&url);
            let told = match scheme {
                "nbd+unix" => [&info["block_size"]["minimum"], &info["block_size"]["preferred"]],
                _ => [&info["logical_block"], &info["physical_block"]],
            };
            assert_eq!(told, [&json!(logical), &json!(physical)], "{options} over {scheme}: {info}");
            // Every protocol has these keys, as a local volume has.
            for (key, expected) in [
                ("volume", json!(url)),
                ("logical_block", json!(logical)),
                ("physical_block", json!(physical)),
                ("preferred_block", json!(physical)),
                ("volatile", json!(false)),
                ("read_only", json!(false)),
            ] {
                assert_eq!(info[key], expected, "{key} of {options} over {scheme}: {info}");
            }
            assert!(info["write_cache"].is_boolean() && info["protocol"].is_string(), "{info}");
            assert_eq!(info["size"], 16 << 20, "{options} over {scheme}");
        }
    }
}

#[test]
fn programs_see_the_block_sizes() {
    if !has("nbdinfo") || !has("iscsi-readcapacity16") {
        return;
    }
    for (options, logical, physical) in DISKS {
        let daemon = serve(&[&format!("mem:16m?{options}")]);
        let told = succeed(Command::new("nbdinfo").args(["--json", &daemon.url()]));
        let told: Value = serde_json::from_str(&told).unwrap();
        let export = &told["exports"][0];
        assert_eq!(
            (&export["block_size_minimum"], &export["block_size_preferred"]),
            (&json!(logical), &json!(physical)),
            "{options}"
        );
        let url = daemon.urls_of("iscsi").remove(0);
        let capacity = succeed(Command::new("iscsi-readcapacity16").arg(&url));
        let exponent = (physical / logical).ilog2();
        for line in [
            format!("RETURNED LOGICAL BLOCK ADDRESS:{}\n", (16 << 20) / logical - 1),
            format!("LOGICAL BLOCK LENGTH IN BYTES:{logical}\n"),
            format!("LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT:{exponent}\n"),
            "LOWEST ALIGNED LOGICAL BLOCK ADDRESS:0\n".to_owned(),
            format!("Total size:{}\n", 16 << 20),
        ] {
            assert!(capacity.contains(&line), "{options}: {line}{capacity}");
        }
        let limits = succeed(Command::new("iscsi-inq").args(["-e", "1", "-c", "176", &url]));
        let granularity = format!("optimal transfer length granularity:{}\n", physical / logical);
        assert!(limits.contains(&granularity), "{options}: {limits}");
    }
}

#[test]
fn every_kind_of_volume_has_the_blocks_that_it_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    fs::write(&file, vec![1; 1 << 20]).unwrap();
    let file = file.display();
    let below = Daemon::serve(&["mem:1m"]);
    let blocks = "block_size=4096";
    for volume in [
        format!("mem:1m?populate=off&{blocks}"),
        format!("null:1m?{blocks}"),
        format!("file:{file}?{blocks}"),
        format!("file:{file}?readonly=on&direct=off&{blocks}"),
        format!("slice:64k,512k:file:{file}?{blocks}"),
        format!("stripe:64k:mem:1m?{blocks},mem:1m"),
        format!("delay:1ms:mem:1m?{blocks}"),
        format!("fault:every=3:mem:1m?{blocks}"),
        format!("rate:iops=5:mem:1m?{blocks}"),
        format!("log:-:mem:1m?{blocks}"),
        format!("log:-:{}&{blocks}", below.url()),
    ] {
        let info = info(&volume);
        assert_eq!(info["logical_block"], 4096, "{volume}: {info}");
        assert!(info["physical_block"].as_u64() >= Some(4096), "{volume}: {info}");
    }
    let remote = format!("{}&block_size=4k&physical_block_size=8k", below.url());
    let info = info(&remote);
    let presented = json!({ "size": 1 << 20, "logical_block": 4096, "physical_block": 8192 });
    assert_eq!((&info["block_size"]["minimum"], &info["presented"]), (&json!(512), &presented));
    let shown = text(&blockmux(["info", &*remote]).stdout);
    assert!(shown.contains("presented    logical 4096, physical 8192"), "{shown}");
    let shown = text(&blockmux(["info", "mem:1m?block_size=4k"]).stdout);
    assert!(shown.contains("blocks       logical 4096, physical 4096, preferred 4096"), "{shown}");
}

#[test]
fn a_remote_volume_keeps_its_blocks_and_takes_larger_ones() {
    let below = serve(&["a=mem:16m?block_size=4096", "b=mem:16m"]);
    for scheme in ["nbd+unix", "iscsi", "nvme+tcp"] {
        let [own, small] = [0, 1].map(|nth| below.urls_of(scheme).remove(nth));
        let and = if small.contains('?') { '&' } else { '?' };
        for volume in [own.clone(), format!("{small}{and}block_size=4096")] {
            let gateway = serve(&[&volume]);
            for scheme in ["iscsi", "nvme+tcp"] {
                let info = info(&gateway.urls_of(scheme)[0]);
                assert_eq!(
                    (&info["logical_block"], &info["size"]),
                    (&json!(4096), &json!(16 << 20)),
                    "{volume}"
                );
            }
            if has("qemu-io") {
                succeed(&mut qemu_io(&gateway.url(), &PATTERNS));
            }
        }
        let and = if own.contains('?') { '&' } else { '?' };
        let said = refusal(&["info", &format!("{own}{and}block_size=512")]);
        assert!(
            said.contains(
                "block_size=512 is less than the volume's own block size of 4096 bytes; write block_size=4096"
            ),
            "{said}"
        );
    }
}

#[test]
fn programs_write_and_read_large_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("file:{}?size=16m&block_size=4096", directory.path().join("disk").display());
    for volume in ["mem:16m?block_size=4096", &file] {
        let daemon = serve(&[volume]);
        if has("qemu-io") {
            succeed(&mut qemu_io(&daemon.url(), &PATTERNS));
        }
        if has("fio") {
            let mut fio = Command::new("fio");
            // fio writes the state of its verification to the current directory.
            fio.current_dir(directory.path()).args([
                "--name=a",
                "--ioengine=nbd",
                "--rw=randrw",
                "--bs=4k",
                "--size=16m",
                "--verify=crc32c",
            ]);
            succeed(fio.arg("--iodepth=8").arg(format!("--uri={}", daemon.url())));
        }
        let source = directory.path().join("source");
        fs::write(&source, (0..16_u32 << 18).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
        for scheme in SCHEMES {
            let (from, to) = (format!("file:{}", source.display()), daemon.urls_of(scheme).remove(0));
            let copied = blockmux(["copy", "--overwrite", "--verify", &from, &to]);
            assert!(copied.status.success(), "{scheme}: {}", text(&copied.stderr));
        }
    }
}

#[test]
fn a_part_of_a_block_is_refused() {
    const INVALID: u32 = 22;
    let daemon = serve(&["mem:16m?block_size=4096"]);
    let mut nbd = RawClient::respecting_sizes(&daemon.socket());
    for (command, offset, len) in
        [(READ, 512, 4096), (READ, 0, 512), (TRIM, 0, 4608), (WRITE_ZEROES, 512, 512)]
    {
        assert_eq!(nbd.simple(command, 0, offset, len), INVALID, "command {command} at {offset}");
    }
    assert_eq!(nbd.write(0, 512, &[1; 4096]), INVALID);
    assert_eq!(nbd.write(0, 4096, &[1; 4096]), 0);
    assert_eq!(nbd.read(4096, 4096), [1; 4096]);
    // SCSI counts blocks, so half a block of data is not a block.
    let mut scsi = RawIscsi::login(&daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    let (status, data) = scsi.run(&[0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[], 4096);
    assert_eq!((status, data.len(), data.iter().all(|&byte| byte == 1)), (GOOD, 4096, true));
}

#[test]
fn a_volume_is_whole_blocks() {
    let said = refusal(&["info", "mem:5000?block_size=4096"]);
    assert!(said.contains("is not a multiple of the block size, 4096 bytes; use 8192"), "{said}");
    let said = refusal(&["info", "null:512?block_size=4k"]);
    assert!(said.contains("is smaller than one block; use at least 4096"), "{said}");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.img");
    let said = refusal(&["info", &format!("file:{}?size=5000&block_size=4096", file.display())]);
    assert!(said.contains("does not exist") || said.contains("whole number of 4096-byte blocks"), "{said}");
    fs::write(&file, vec![1; 5000]).unwrap();
    let output = blockmux(["info", "--json", &format!("file:{}?block_size=4096", file.display())]);
    let info: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["size"], 8192);
    assert!(text(&output.stderr).contains("it reads as 8192 with zeroes at the end"));
    // A remote volume is not padded with zeroes at its end.
    let below = Daemon::serve(&["mem:9k"]);
    let output = blockmux(["info", "--json", &format!("{}&block_size=4096", below.url())]);
    let info: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&info["size"], &info["presented"]["size"]), (&json!(9216), &json!(8192)));
    assert!(text(&output.stderr).contains("the first 8192 are used"), "{}", text(&output.stderr));
}

#[test]
fn a_resize_is_a_multiple_of_the_block_size() {
    let controlled = Controlled::serve(&["a=mem:8m?block_size=4096"]);
    let refused = controlled.ctl(&["resize", "a", "4608"]);
    assert!(text(&refused.stderr).contains("multiple of the block size, 4096"), "{}", text(&refused.stderr));
    controlled.said(&["resize", "a", "16m"]);
    let exported = controlled.said(&["export"]);
    assert!(exported.contains("spec = \"mem:16m?block_size=4k\""), "{exported}");
}
