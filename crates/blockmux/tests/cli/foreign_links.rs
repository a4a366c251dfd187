//! Links that the service user makes below its own directories, which root meets when it starts a
//! daemon with `--user`.
//!
//! The tests need root, and the user `nobody`. Without root, every test here prints a line that
//! begins with `skipped: ` and ends.

use crate::daemon::Daemon;
use crate::privileges::is_root;
use crate::program::{BLOCKMUX, blockmux, text};
use rustix::fs::{Mode, chmod};
use std::fs;
use std::os::unix::fs::{MetadataExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A directory of root's that is `victim`, and one of the service user, `home`.
struct Place(TempDir);

impl Place {
    fn new() -> Option<Place> {
        if !is_root() {
            return None;
        }
        let place = Place(tempfile::tempdir().unwrap());
        chmod(place.0.path(), Mode::from_raw_mode(0o755)).unwrap();
        for name in ["victim", "home"] {
            fs::create_dir(place.at(name)).unwrap();
        }
        fs::write(place.at("victim/secret"), "of root alone").unwrap();
        chmod(place.at("victim/secret"), Mode::RUSR | Mode::WUSR).unwrap();
        give(&place.at("home"));
        Some(place)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Makes a link of the service user.
    fn link(&self, name: &str, target: &str) {
        symlink(self.at(target), self.at(name)).unwrap();
        give(&self.at(name));
    }

    /// The message with which `serve` refuses to start as the service user. A daemon that starts is
    /// ended.
    fn refused(&self, args: &[&str]) -> String {
        let listener = format!("unix:{}", self.at("socket").display());
        let serve = ["20", BLOCKMUX, "serve", "--user", "nobody", "--nbd", &listener];
        let mut command = Command::new("timeout");
        // A daemon that starts would get the state directory of the user who runs the tests.
        command.args(serve).args(args).env("XDG_STATE_HOME", self.at("state_home"));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        text(&output.stderr)
    }

    /// What the victim's directory has, with the owners.
    fn victim(&self) -> Vec<(String, u32)> {
        let entries = fs::read_dir(self.at("victim")).unwrap().map(Result::unwrap);
        let mut all: Vec<_> = entries
            .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().uid()))
            .collect();
        all.sort();
        all
    }
}

fn give(path: &Path) {
    lchown(path, Some(NOBODY), Some(NOBODY)).unwrap();
}

fn untouched() -> Vec<(String, u32)> {
    vec![("secret".to_owned(), 0)]
}

const NOBODY: u32 = 65534;
const NOT_FOLLOWED: &str = "root does not follow a link of another user";

#[test]
fn a_state_directory_that_is_a_link_of_the_service_user_gives_it_no_file_of_roots() {
    let Some(place) = Place::new() else { return };
    place.link("home/state", "victim");
    let state = place.at("home/state").display().to_string();
    let said = place.refused(&["--state", &state, "mem:1m"]);
    assert!(said.contains(&state) && said.contains(NOT_FOLLOWED), "{said}");
    assert_eq!(place.victim(), untouched());
}

#[test]
fn a_dangling_link_in_the_state_directory_creates_nothing() {
    let Some(place) = Place::new() else { return };
    fs::create_dir(place.at("home/state")).unwrap();
    give(&place.at("home/state"));
    let state = place.at("home/state").display().to_string();
    let volume = format!("file:{}?size=1m", place.at("disk.img").display());
    let serve = || drop(Daemon::serve(&["--user", "nobody", "--state", &state, &volume]));
    serve();
    let mut notes = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path());
    let note = notes.find(|path| path.extension().is_some_and(|name| name == "raw")).unwrap();
    assert_eq!(fs::metadata(&note).unwrap().uid(), NOBODY, "the service user owns what root made for it");
    fs::remove_file(&note).unwrap();
    symlink(place.at("victim/made"), &note).unwrap();
    give(&note);
    serve();
    assert_eq!(place.victim(), untouched());
}

#[test]
fn a_state_directory_may_have_the_volumes_that_are_served() {
    let Some(place) = Place::new() else { return };
    fs::create_dir(place.at("state")).unwrap();
    let state = place.at("state").display().to_string();
    let volume = format!("delay:1us:file:{state}/disk.img?size=1m");
    for _ in 0..2 {
        drop(Daemon::serve(&["--user", "nobody", "--state", &state, &volume]));
    }
    let owner = |name: &str| fs::metadata(place.at(name)).unwrap().uid();
    assert_eq!((owner("state"), owner("state/disk.img")), (NOBODY, 0));
}

#[test]
fn a_directory_of_roots_with_other_files_does_not_go_to_the_service_user() {
    let Some(place) = Place::new() else { return };
    fs::create_dir(place.at("etc")).unwrap();
    fs::write(place.at("etc/volume-x.reservations"), "").unwrap();
    fs::write(place.at("etc/shadow"), "").unwrap();
    let state = place.at("etc").display().to_string();
    let said = place.refused(&["--state", &state, "mem:1m"]);
    assert!(said.contains("etc/shadow: is not the saved state of a volume or disk"), "{said}");
    for name in ["etc", "etc/shadow", "etc/volume-x.reservations"] {
        assert_eq!(fs::metadata(place.at(name)).unwrap().uid(), 0, "{name}");
    }
}

#[test]
fn a_state_directory_of_roots_and_its_files_go_to_the_service_user() {
    let Some(place) = Place::new() else { return };
    fs::create_dir(place.at("state")).unwrap();
    fs::write(place.at("state/volume-x.reservations"), "").unwrap();
    fs::hard_link(place.at("victim/secret"), place.at("state/volume-y.reservations")).unwrap();
    symlink(place.at("victim/secret"), place.at("state/volume-z.lock")).unwrap();
    let state = place.at("state").display().to_string();
    drop(Daemon::serve(&["--user", "nobody", "--state", &state, "mem:1m"]));
    let owner = |name: &str| fs::symlink_metadata(place.at(name)).unwrap().uid();
    assert_eq!((owner("state"), owner("state/volume-x.reservations")), (NOBODY, NOBODY));
    assert_eq!(owner("state/volume-z.lock"), 0, "it is no file of the state");
    assert_eq!(place.victim(), untouched());
}

#[test]
fn volumes_logs_and_secrets_are_not_read_or_written_through_links_of_the_service_user() {
    let Some(place) = Place::new() else { return };
    fs::write(place.at("victim/secret"), vec![b'x'; 1 << 20]).unwrap();
    place.link("home/image", "victim/secret");
    place.link("home/log", "victim/log");
    fs::hard_link(place.at("victim/secret"), place.at("home/second")).unwrap();
    let at = |name: &str| place.at(name).display().to_string();
    for args in [
        &[format!("file:{}", at("home/image")).as_str()][..],
        &[&format!("file:{}?readonly=on", at("home/image"))],
        &[&format!("file:{}", at("home/second"))],
        &[&format!("log:{}:mem:1m", at("home/log"))],
        &["mem:1m", "--api", "127.0.0.1:0", "--api-token-file", &at("home/image")],
        &["mem:1m", "--config", &at("home/image")],
    ] {
        let said = place.refused(args);
        assert!(said.contains(NOT_FOLLOWED), "{args:?}: {said}");
    }
    assert_eq!(place.victim(), untouched());
    assert_eq!(fs::read(place.at("victim/secret")).unwrap(), vec![b'x'; 1 << 20]);
}

#[test]
fn a_volume_behind_a_link_of_the_service_user_to_its_own_file_is_served() {
    let Some(place) = Place::new() else { return };
    fs::write(place.at("home/image"), vec![1; 1 << 20]).unwrap();
    give(&place.at("home/image"));
    place.link("home/link", "home/image");
    let daemon = Daemon::serve(&[&format!("file:{}", place.at("home/link").display())]);
    assert!(blockmux(["info", &daemon.url()]).status.success());
}

#[test]
fn no_socket_is_made_where_a_link_of_the_service_user_leads() {
    let Some(place) = Place::new() else { return };
    place.link("home/run", "victim");
    let socket = format!("unix:{}", place.at("home/run/nbd.sock").display());
    let said = place.refused(&["mem:1m", "--nbd", &socket]);
    assert!(said.contains(NOT_FOLLOWED), "{said}");
    let said = place.refused(&["mem:1m", "--control", &socket]);
    assert!(said.contains("check --control"), "{said}");
    assert_eq!(place.victim(), untouched());
}

#[test]
fn a_socket_below_a_directory_of_the_service_user_is_served_and_removed() {
    let Some(place) = Place::new() else { return };
    let path = place.at("home/nbd.sock");
    let socket = format!("unix:{}", path.display());
    // Otherwise only the service user may remove it.
    let mut daemon = Daemon::serve(&["mem:1m", "--keep-privileges", "--nbd", &socket]);
    let url = format!("nbd+unix:///disk0?socket={}", path.display());
    assert!(blockmux(["info", &url]).status.success());
    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.wait().success());
    assert!(!path.exists());
}
