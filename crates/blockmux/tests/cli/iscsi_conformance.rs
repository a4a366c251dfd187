//! libiscsi's test suite against the iSCSI target: SCSI commands and the protocol.
//!
//! A test of the suite skips itself, and passes, if the target lacks a feature. The tests that may
//! skip are listed here.

use crate::control::LoopDevice;
use crate::daemon::Daemon;
use crate::program::{has, text};
use std::process::Command;

/// Suites and tests that may skip something here, with the reason.
const MAY_SKIP: &[(&str, &str)] = &[
    // Tests that need other volumes; see `tests_for_other_volumes_than_ram_pass`.
    ("CompareAndWrite.InvalidDataOutSize", NO_LARGER_BLOCKS),
    ("WriteSame10.InvalidDataOutSize", NO_LARGER_BLOCKS),
    ("WriteSame16.InvalidDataOutSize", NO_LARGER_BLOCKS),
    ("WriteSame10.UnmapUnaligned", NO_LARGER_BLOCKS),
    ("WriteSame16.UnmapUnaligned", NO_LARGER_BLOCKS),
    ("PreventAllow", "RAM cannot be removed"),
    ("StartStopUnit.Simple", "RAM cannot be removed"),
    ("ReadOnly", "it is writable"),
    // `run` runs these tests again, with two paths.
    ("MultipathIO", "it has one path"),
    // Not supported: a cryptographic erase destroys the key of encrypted data, and our data is not
    // encrypted. A host expects that copies, such as those of a file system, become unreadable.
    ("Sanitize.CryptoErase", "no cryptographic erase"),
    ("Sanitize.Readonly", "no cryptographic erase; the rest runs"),
    ("Sanitize.Reservations", "no cryptographic erase; the rest runs"),
    // Without WSNZ, `UnmapUntilEnd` would send a block of FFh with UNMAP and 0 blocks, and expect
    // zeroes, so that a correct target would fail it. With WSNZ, ZeroBlocks skips.
    ("WriteSame10.ZeroBlocks", "VPD page B0h has WSNZ; only the refusal is tested"),
    ("WriteSame16.ZeroBlocks", "VPD page B0h has WSNZ; only the refusal is tested"),
];
const NO_LARGER_BLOCKS: &str = "its physical blocks are as large as its logical ones";

/// Tests that fail with blocks of 4096 bytes because of a mistake in the test, with the mistake.
const MAY_FAIL_WITH_4096: &[(&str, &str)] = &[
    ("ProutReserve.AccessEA", WRITES_512),
    ("ProutReserve.AccessWE", WRITES_512),
    ("ProutReserve.AccessEARO", WRITES_512),
    ("ProutReserve.AccessWERO", WRITES_512),
    ("ProutReserve.AccessEAAR", WRITES_512),
    ("ProutReserve.AccessWEAR", WRITES_512),
    ("WriteSame16.Unmap", "it writes 65,536 blocks with one WRITE(16), more than VPD page B0h allows"),
    ("Sanitize.Reset", "the disk is so small that SANITIZE ends before the test checks"),
];
const WRITES_512: &str = "it sends 512 bytes with a WRITE(10) of one block";

/// Arguments of `serve`, and suites with their minimum number of tests.
type Case<'a> = (&'a [&'a str], &'a [(&'a str, usize)]);

/// Large enough that an overwriting SANITIZE, at 128 MiB/s, is still in progress when the suite
/// checks for the last time: after sleeping for 4 s, five task management functions and a login,
/// which take seconds more beside other tests.
const VOLUME: &str = "mem:2g";

#[test]
fn every_test_passes() {
    if !has("iscsi-test-cu") {
        return;
    }
    let daemon = Daemon::serve(&[VOLUME, "--iscsi", "127.0.0.1:0"]);
    run(&daemon.urls_of("iscsi")[0]);
}

#[test]
fn every_test_passes_with_digests() {
    if !has("iscsi-test-cu") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("blockmux.toml");
    // The suite offers header digests; only recent versions of its library support data digests.
    let target = "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:digests'\nluns = { 3 = 'disk0' }\n\
                  HeaderDigest = 'CRC32C'\n";
    std::fs::write(&config, target).unwrap();
    // Only a core that never polls shows missing wake-ups.
    let config = ["--config", config.to_str().unwrap(), "--poll", "never"];
    let daemon = Daemon::serve(&[&[VOLUME, "--iscsi", "127.0.0.1:0"][..], &config].concat());
    let url = daemon.urls_of("iscsi").remove(0);
    // The rest of the URL is for the Blockmux initiator.
    let (plain, _) = url.split_once("?header_digest=on").unwrap();
    run(&format!("{plain}?data_digest=crc32c"));
}

#[test]
fn tests_for_other_volumes_than_ram_pass() {
    if !has("iscsi-test-cu") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("blockmux.toml");
    let target = "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:removable'\nluns = { 0 = 'disk0' }\n\
                  removable = true\n";
    std::fs::write(&config, target).unwrap();
    let file = format!("file:{}?size=64m", directory.path().join("disk.img").display());
    let zero_blocks = &MAY_SKIP[MAY_SKIP.len() - 2..];
    let cases: [Case<'_>; 3] = [
        (
            &["mem:64m", "--config", config.to_str().unwrap()],
            &[("ALL.PreventAllow", 8), ("ALL.StartStopUnit", 3), ("ALL.NoMedia", 1)],
        ),
        (&["mem:64m", "--read-only"], &[("ALL.ReadOnly", 1)]),
        // Logical blocks of 512 bytes in physical blocks of 4 KiB.
        (&[&file], &[("ALL.CompareAndWrite", 5), ("ALL.WriteSame10", 10), ("ALL.WriteSame16", 10)]),
    ];
    for (args, suites) in cases {
        let daemon = Daemon::serve(&[args, &["--iscsi", "127.0.0.1:0"]].concat());
        for (which, tests) in suites {
            check(which, &[&daemon.urls_of("iscsi")[0]], *tests, (zero_blocks, &[]));
        }
    }
}

#[test]
fn every_applicable_test_passes_on_a_block_device_with_4096_byte_blocks() {
    if !has("iscsi-test-cu") {
        return;
    }
    // 256 MiB, for a test that wants 65,536 blocks; most of them are never written.
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(256 << 20).unwrap();
    let Some(device) = LoopDevice::over(file.path(), &["--sector-size", "4096"]) else { return };
    let daemon = Daemon::serve(&[&format!("block:{}", device.0), "--iscsi", "127.0.0.1:0"]);
    let may_skip =
        [MAY_SKIP, &[("WriteAtomic16", "a device may lose its power in the middle of a write")]].concat();
    check("ALL", &[&daemon.urls_of("iscsi")[0]], MIN_TESTS, (&may_skip, MAY_FAIL_WITH_4096));
}

#[test]
fn every_applicable_test_passes_on_ram_with_4096_byte_blocks_and_on_a_slice() {
    if !has("iscsi-test-cu") {
        return;
    }
    for (volume, may_fail) in
        [("mem:1g?block_size=4096", MAY_FAIL_WITH_4096), ("slice:8m,2g:mem:3g", &[] as Reasons<'_>)]
    {
        let daemon = Daemon::serve(&[volume, "--iscsi", "127.0.0.1:0"]);
        check("ALL", &[&daemon.urls_of("iscsi")[0]], MIN_TESTS, (MAY_SKIP, may_fail));
    }
}

#[test]
fn tests_of_larger_physical_blocks_pass_on_ram_that_has_them() {
    if !has("iscsi-test-cu") {
        return;
    }
    let daemon =
        Daemon::serve(&["mem:64m?block_size=512&physical_block_size=4096", "--iscsi", "127.0.0.1:0"]);
    let zero_blocks = &MAY_SKIP[MAY_SKIP.len() - 2..];
    for (which, tests) in [("ALL.CompareAndWrite", 5), ("ALL.WriteSame10", 10), ("ALL.WriteSame16", 10)] {
        check(which, &[&daemon.urls_of("iscsi")[0]], tests, (zero_blocks, &[]));
    }
}

/// Runs the suite, then its tests of several paths with two paths.
fn run(url: &str) {
    check("ALL", &[url], MIN_TESTS, (MAY_SKIP, &[]));
    check("ALL.MultipathIO", &[url, url], 4, (&[], &[]));
}

/// Tests, each with a reason.
type Reasons<'a> = &'a [(&'a str, &'a str)];

fn check(which: &str, urls: &[&str], least: usize, (may_skip, may_fail): (Reasons<'_>, Reasons<'_>)) {
    let mut suite = Command::new("timeout");
    suite.args(["900", "iscsi-test-cu", "--dataloss", "--allow-sanitize", "--test", which]).args(urls);
    let output = suite.output().unwrap();
    let said = text(&output.stdout);
    let tests = tests(&said);
    let is_of = |name: &str, whole: &str| name == whole || name.starts_with(&format!("{whole}."));
    let is_known = |test: &&Test| may_fail.iter().any(|(may, _)| is_of(&test.name, may));
    let (known, failed): (Vec<_>, Vec<_>) = tests.iter().filter(|test| test.failed).partition(is_known);
    assert!(failed.is_empty(), "{} of {} tests failed:\n{failed:#?}", failed.len(), tests.len());
    let [ran, passed] =
        summary(&said).unwrap_or_else(|| panic!("no summary: {said}{}", text(&output.stderr)));
    assert_eq!((ran, passed), (tests.len(), tests.len() - known.len()));
    assert!(ran >= least, "only {ran} tests ran");
    let skipped: Vec<_> = tests.iter().filter(|test| !test.skipped.is_empty()).collect();
    let expected = |name: &str| may_skip.iter().any(|(may, _)| is_of(name, may));
    let unexpected: Vec<_> = skipped.iter().filter(|test| !expected(&test.name)).collect();
    assert!(unexpected.is_empty(), "skipped: {unexpected:#?}");
}

/// One test of the suite.
#[derive(Debug)]
struct Test {
    /// Suite and test.
    name: String,
    failed: bool,
    /// Lines about skipped tests.
    skipped: Vec<String>,
    /// Output, shown after a failure.
    said: Vec<String>,
}

/// Parses all tests from the suite's output.
fn tests(said: &str) -> Vec<Test> {
    let (mut suite, mut tests) = ("", Vec::<Test>::new());
    for line in said.lines().take_while(|line| !line.starts_with("Run Summary:")) {
        if let Some(name) = line.strip_prefix("Suite: ") {
            suite = name;
            continue;
        }
        if let Some(rest) = line.strip_prefix("  Test: ") {
            let name = rest.split(' ').next().unwrap_or_default();
            let name = format!("{suite}.{name}");
            tests.push(Test { name, failed: false, skipped: Vec::new(), said: Vec::new() });
        }
        if let Some(test) = tests.last_mut() {
            test.failed |= line.ends_with("FAILED");
            if line.contains("[SKIPPED]") {
                test.skipped.push(line.trim().to_owned());
            }
            test.said.push(line.to_owned());
        }
    }
    tests
}

/// Numbers of tests that ran and passed, as the suite counts them.
fn summary(said: &str) -> Option<[usize; 2]> {
    let line = said.lines().find_map(|line| line.trim().strip_prefix("tests "))?;
    let mut counts = line.split_whitespace().map(str::parse);
    let (_, ran, passed) = (counts.next()?, counts.next()?.ok()?, counts.next()?.ok()?);
    Some([ran, passed])
}

/// Number of tests of libiscsi 1.19 in Debian 12.
const MIN_TESTS: usize = 228;
