//! The API's OpenAPI document, as programs of others read it: a validator, a generator of requests,
//! and a generator of clients. They are in Python, and `cargo xtask install-peers` installs them.

use crate::api::{TOKEN, Tcp, write_token};
use crate::program::{blockmux, succeed, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of a program of the Python packages: in the directory that a variable names, or else in
/// the virtual environment of `cargo xtask install-peers`.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn python_program(name: &str) -> Option<PathBuf> {
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

#[test]
fn a_generated_client_reads_and_changes_what_its_token_permits() {
    let Some(generator) = python_program("openapi-python-client") else { return };
    let files = tempfile::tempdir().unwrap();
    let reader = "token-of-a-client-that-reads";
    let entry = "[[api_token]]\nname = 'reader'\ntoken_file = 'api.token'\nrole = 'read'\n";
    write_token(files.path(), reader);
    let config = files.path().join("roles.toml");
    fs::write(&config, entry).unwrap();
    let args = ["--config", config.to_str().unwrap()];
    let tcp = Tcp::serve(&[&["a=mem:1m", "--iscsi", "127.0.0.1:0"], &args[..]].concat());
    let (document, _) = document_of(&tcp);
    let settings = files.path().join("generator.yaml");
    // The metrics are text, and the generated code need not be formatted.
    let metrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let overrides = format!(
        "post_hooks: []\ncontent_type_overrides:\n  \"{metrics}\": text/plain\n  \"application/toml\": \
         application/octet-stream\n"
    );
    fs::write(&settings, overrides).unwrap();
    succeed(
        Command::new(&generator)
            .args(["generate", "--meta", "none", "--fail-on-warning", "--path"])
            .args([&document, Path::new("--config"), &settings, Path::new("--output-path")])
            .arg(files.path().join("blockmux_client")),
    );
    let script = files.path().join("script.py");
    fs::write(&script, SCRIPT).unwrap();
    let python = generator.with_file_name("python3");
    let said = Command::new(python).arg(script).args([&tcp.url(), TOKEN, reader]).output().unwrap();
    let (output, errors) = (text(&said.stdout), text(&said.stderr));
    assert!(said.status.success() && output == "every call was as expected\n", "{output}{errors}");
}

/// Calls the generated client: its types and its paths are those of the document.
const SCRIPT: &str = r#"
import sys
from blockmux_client import AuthenticatedClient, Client
from blockmux_client.api.actions import actions
from blockmux_client.api.config import apply, export
from blockmux_client.api.daemon import healthz, metrics, readyz, status, version
from blockmux_client.api.targets import attach, detach
from blockmux_client.api.volumes import add, limit, remove, resize, volume, volumes
from blockmux_client.models import (
    ActionStatus, Added, AddVolume, ApplyJsonBody, Attached, AttachVolume, DaemonStage, ErrorBody, ErrorCode, LimitVolume,
    Message, Resized, ResizeVolume,
)

url, token, reading_token = sys.argv[1:]
anyone = Client(base_url=url)
admin = AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)
reader = AuthenticatedClient(base_url=url, token=reading_token, raise_on_unexpected_status=True)

assert healthz.sync(client=anyone).state == readyz.sync(client=anyone).state == DaemonStage.SERVING
assert version.sync(client=anyone).name == "blockmux"
assert status.sync(client=anyone).error.code == ErrorCode.UNAUTHORIZED

assert [one.name for one in volumes.sync(client=reader)] == ["a"]
refused = resize.sync_detailed("a", client=reader, body=ResizeVolume(size=2 << 20))
assert refused.status_code == 403 and refused.parsed.error.code == ErrorCode.FORBIDDEN
assert "role operate" in refused.parsed.error.message, refused.parsed.error.message

added = add.sync(client=admin, body=AddVolume(volume="b=mem:1m", description="by Python"))
assert isinstance(added, Added) and added.name == "b" and len(added.urls) >= 2, added
resized = resize.sync("b", client=admin, body=ResizeVolume(size=2 << 20))
assert isinstance(resized, Resized) and resized.size == 2 << 20, resized
limits = LimitVolume.from_dict({"limits": {"iops": 500}})
assert isinstance(limit.sync("b", client=admin, body=limits), Message)
changed = volume.sync("b", client=reader)
assert (changed.size, changed.limits.iops) == (2 << 20, 500), changed
target = "iqn.2026-11.blockmux:a"
attached = attach.sync(target, client=admin, body=AttachVolume(volume="b", number=5))
assert isinstance(attached, Attached) and attached.number == 5, attached
assert isinstance(detach.sync(target, 5, client=admin), Message)
assert isinstance(remove.sync("b", client=admin), Message)
missing = volume.sync("b", client=reader)
assert isinstance(missing, ErrorBody) and missing.error.code == ErrorCode.NOT_FOUND, missing

known = actions.sync(client=reader)
assert [one.action.split()[0] for one in known] == ["add", "resize", "limit", "attach", "detach", "remove"]
assert all(isinstance(one, ActionStatus) and one.state == "done" for one in known), known
config = export.sync(client=reader).additional_properties
assert config["volume"] == [{"name": "a", "spec": "mem:1m"}], config
part = ApplyJsonBody.from_dict({"volume": [{"name": "c", "spec": "mem:1m"}]})
assert apply.sync(client=admin, body=part, dry_run=True).applied is False
assert [one.path for one in apply.sync(client=admin, body=part).changes] == [["volume", "c"]]
assert len(export.sync(client=reader).additional_properties["volume"]) == 2
assert "blockmux_volume" in metrics.sync(client=reader)
print("every call was as expected")
"#;
