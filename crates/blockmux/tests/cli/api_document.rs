//! The API's OpenAPI document, as programs of others read it: a validator, a generator of requests,
//! and a generator of clients. They are in Python, and `cargo xtask install-peers` installs them.

use crate::api::{TOKEN, Tcp};
use crate::program::{blockmux, succeed};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of a program of the Python packages: in the directory that a variable names, or else in
/// the virtual environment of `cargo xtask install-peers`.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn python_program(name: &str) -> Option<PathBuf> {
    let of_peers = || {
        let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home)?;
        Some(cache.join("blockmux/python/bin"))
    };
    let directory = std::env::var_os("BLOCKMUX_PYTHON").map(PathBuf::from).or_else(of_peers);
    let program = directory.map(|directory| directory.join(name)).filter(|program| program.exists());
    if program.is_none() {
        println!("skipped: no {name}; run cargo xtask install-peers");
    }
    program
}

/// A daemon with all protocols whose paths differ.
fn serve() -> Tcp {
    Tcp::serve(&["a=mem:1m", "b=mem:1m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"])
}

/// Writes the document of a daemon into its directory; returns the path of the file, and the number
/// of operations.
fn document_of(tcp: &Tcp) -> (PathBuf, usize) {
    let document = tcp.get("/openapi.json");
    let parsed: Value = serde_json::from_str(&document).unwrap();
    let paths = parsed["paths"].as_object().unwrap();
    let file = tcp.daemon.directory.path().join("openapi.json");
    fs::write(&file, document).unwrap();
    (file, paths.values().map(|methods| methods.as_object().unwrap().len()).sum())
}

#[test]
fn openapi_spec_validator_accepts_the_document() {
    let Some(validator) = python_program("openapi-spec-validator") else { return };
    let tcp = serve();
    let (document, _) = document_of(&tcp);
    let said = succeed(Command::new(&validator).arg(&document));
    assert!(said.trim_end().ends_with(": OK"), "{said}");
    // It would refuse another one.
    let flawed = fs::read_to_string(&document).unwrap().replacen("\"description\":", "\"descriptions\":", 40);
    fs::write(&document, flawed).unwrap();
    assert!(!Command::new(&validator).arg(&document).output().unwrap().status.success());
}

#[test]
fn schemathesis_finds_no_response_that_the_document_does_not_describe() {
    let Some(schemathesis) = python_program("schemathesis") else { return };
    let tcp = serve();
    let (_, operations) = document_of(&tcp);
    let said = succeed(
        Command::new(schemathesis)
            .args(["run", &format!("{}/openapi.json", tcp.url())])
            .args(["--header", &format!("Authorization: Bearer {TOKEN}")])
            .args(["--checks", "all", "--exclude-checks", "positive_data_acceptance"])
            .args(["--max-examples", "12", "--seed", "21", "--warnings", "off"])
            .args(["--suppress-health-check", "all", "--no-color"])
            .current_dir(tcp.daemon.directory.path()),
    );
    assert!(said.contains(&format!("Tested: {operations}\n")) && said.contains("No issues found"), "{said}");
    // The daemon still responds.
    let token_file = tcp.token_file.display().to_string();
    assert!(blockmux(["ctl", &tcp.url(), "--token-file", &token_file, "status"]).status.success());
}
