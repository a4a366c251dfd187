//! libiscsi's whole test suite against our target: SCSI commands and the protocol, judged by others.
//!
//! A test of the suite that finds something missing skips itself and passes. Which may do that is listed here.

use crate::daemon::Daemon;
use crate::program::{has, text};
use std::process::Command;

/// Tests that skip something which this target, or this run, does not have; and what that is.
const MAY_SKIP: &[(&str, &str)] = &[];

/// Long enough that an overwriting SANITIZE is still under way when the suite looks, which is after 3 s and more.
const VOLUME: &str = "mem:1g";

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
    // The suite offers header digests and leaves it to the target. Its library knows data digests only lately.
    let target = "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:digests'\nluns = { 3 = 'disk0' }\n\
                  HeaderDigest = 'CRC32C'\n";
    std::fs::write(&config, target).unwrap();
    let daemon = Daemon::serve(&[VOLUME, "--iscsi", "127.0.0.1:0", "--config", config.to_str().unwrap()]);
    run(&format!("{}?data_digest=crc32c", daemon.urls_of("iscsi")[0]));
}

/// Runs the suite, and its tests of several paths again with two.
fn run(url: &str) {
    check("ALL", &[url], LEAST, MAY_SKIP);
    check("ALL.MultipathIO", &[url, url], 4, &[]);
}

fn check(which: &str, urls: &[&str], least: usize, may_skip: &[(&str, &str)]) {
    let mut suite = Command::new("timeout");
    suite.args(["900", "iscsi-test-cu", "--dataloss", "--allow-sanitize", "--test", which]).args(urls);
    let output = suite.output().unwrap();
    let said = text(&output.stdout);
    let tests = tests(&said);
    let failed: Vec<_> = tests.iter().filter(|test| test.failed).collect();
    assert!(failed.is_empty(), "{} of {} tests failed:\n{failed:#?}", failed.len(), tests.len());
    let [ran, passed] =
        summary(&said).unwrap_or_else(|| panic!("no summary: {said}{}", text(&output.stderr)));
    assert_eq!((ran, passed), (tests.len(), tests.len()));
    assert!(ran >= least, "only {ran} tests ran");
    let skipped: Vec<_> = tests.iter().filter(|test| !test.skipped.is_empty()).collect();
    let expected = |name: &str| may_skip.iter().any(|(may, _)| *may == name);
    let unexpected: Vec<_> = skipped.iter().filter(|test| !expected(&test.name)).collect();
    assert!(unexpected.is_empty(), "skipped: {unexpected:#?}");
}

/// One test of the suite.
#[derive(Debug)]
struct Test {
    /// Suite and test.
    name: String,
    failed: bool,
    /// Lines about what it skipped.
    skipped: Vec<String>,
    /// Shown when it has failed.
    said: Vec<String>,
}

/// Every test in what the suite has said.
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

/// How many tests ran and how many passed, by the suite's own count.
fn summary(said: &str) -> Option<[usize; 2]> {
    let line = said.lines().find_map(|line| line.trim().strip_prefix("tests "))?;
    let mut counts = line.split_whitespace().map(str::parse);
    let (_, ran, passed) = (counts.next()?, counts.next()?.ok()?, counts.next()?.ok()?);
    Some([ran, passed])
}

/// Of Debian 12's libiscsi 1.19; later ones have more.
const LEAST: usize = 200;
