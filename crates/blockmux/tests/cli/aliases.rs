//! Devices over the file of a restricted volume, which would be a way around the restriction.
//!
//! The tests need root, and `losetup` or `dmsetup`. Without them they print a line that begins with
//! `skipped: ` and end.

use crate::daemon::Daemon;
use crate::privileges::is_root;
use crate::program::{BLOCKMUX, has, succeed, text, without_notes};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A command that undoes what a test has made.
struct Undo(Command);

impl Drop for Undo {
    fn drop(&mut self) {
        // The test has failed or ended; what is left does no harm.
        let _ = self.0.status();
    }
}

/// The config of a daemon with the image behind CHAP, and `alias` without.
fn config(files: &TempDir, alias: &str) -> String {
    let at = |name: &str| files.path().join(name).display().to_string();
    std::fs::write(at("secret"), "a secret of twelve").unwrap();
    std::fs::set_permissions(at("secret"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let content = format!(
        "iscsi = ['127.0.0.1:0']\nnbd = ['127.0.0.1:0']\n\
         [[volume]]\nname = 'vault'\nspec = 'file:{}'\nprotocols = ['iscsi']\n\
         [[volume]]\nname = 'alias'\nspec = '{alias}'\nprotocols = ['nbd']\n\
         [[iscsi_target]]\nTargetName = 'iqn.2026-11.t:t'\nluns = {{ 0 = 'vault' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{}'\n",
        at("image"),
        at("secret")
    );
    std::fs::write(at("blockmux.toml"), content).unwrap();
    at("blockmux.toml")
}

/// The message with which a daemon with that config refuses to start. A daemon that starts is
/// ended.
fn refusal(files: &TempDir, alias: &str) -> String {
    let serve = ["20", BLOCKMUX, "serve", "--quiet", "--config", &config(files, alias)];
    text(&Command::new("timeout").args(serve).output().unwrap().stderr)
}

/// A directory with an image of 1 MiB.
fn image() -> TempDir {
    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("image"), vec![1; 1 << 20]).unwrap();
    files
}

/// Makes a loop device over a file.
fn loop_over(file: &Path, more: &[&str]) -> (String, Undo) {
    let device = succeed(Command::new("losetup").args(["--find", "--show"]).args(more).arg(file));
    let device = device.trim().to_owned();
    let mut undo = Command::new("losetup");
    undo.args(["--detach", &device]);
    (device, Undo(undo))
}

fn assert_refused(said: &str, alias: &str) {
    assert!(
        said.contains("uses the same file or device as `") && said.contains("restricts access to `vault`"),
        "{alias}: {said}"
    );
}

#[test]
fn a_loop_device_or_a_mapped_device_over_the_image_of_a_restricted_volume_is_refused() {
    if !is_root() || !has("losetup") || !has("dmsetup") {
        return;
    }
    let files = image();
    let place: PathBuf = files.path().join("image");
    let (device, _undo) = loop_over(&place, &[]);
    assert_refused(&refusal(&files, &format!("block:{device}?readonly=on")), "a loop device");
    let (part, _undo_part) = loop_over(&place, &["--offset", "524288"]);
    assert_refused(&refusal(&files, &format!("block:{part}?readonly=on")), "a loop device over its end");
    let name = format!("blockmux-test-{}", std::process::id());
    let table = format!("0 1024 linear {device} 1024");
    let made = Command::new("dmsetup").args(["create", &name, "--table", &table]).output().unwrap();
    if !made.status.success() {
        assert!(without_notes(&made.stderr).contains("device-mapper"), "{made:?}");
        return;
    }
    let mut undo = Command::new("dmsetup");
    undo.args(["remove", &name]);
    let _undo_map = Undo(undo);
    let mapped = refusal(&files, &format!("block:/dev/mapper/{name}?readonly=on"));
    assert_refused(&mapped, "a mapped device over the loop device");
}

#[test]
fn a_second_name_of_the_image_of_a_restricted_volume_is_refused() {
    let files = image();
    std::fs::hard_link(files.path().join("image"), files.path().join("second")).unwrap();
    let second = format!("file:{}?readonly=on", files.path().join("second").display());
    assert_refused(&refusal(&files, &second), "a hard link");
}

#[test]
fn another_image_in_the_same_directory_is_served_beside_a_restricted_volume() {
    let files = image();
    std::fs::write(files.path().join("other"), vec![1; 1 << 20]).unwrap();
    let other = format!("file:{}?readonly=on", files.path().join("other").display());
    drop(Daemon::serve_only(&["--config", &config(&files, &other)]));
}
