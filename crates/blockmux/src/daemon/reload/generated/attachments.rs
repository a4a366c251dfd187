//! Attachments in reloads and in commands, with disks that are none.

use super::daemon::{TestDaemon, TestPlace};
use super::lines;
use crate::api::bodies::Attachment;
use crate::api::request::{Answer, Request};
use crate::attach::fake;
use crate::attach::way::Way;
use crate::daemon::config::current_directory;
use crate::daemon::reload::commands::edits_of;
use std::path::PathBuf;

const TWO: &str = "nbd = ['unix:n.sock']\n[[volume]]\nname = 'a'\nspec = 'file:a.img?size=1m'\n\
                   [[volume]]\nname = 'b'\nspec = 'file:b.img?size=1m'\n";

fn attachment(volume: &str) -> String {
    format!("[[attachment]]\nvolume = '{volume}'\nvia = 'fake'\n")
}

fn place(config: &str) -> TestPlace {
    let place = TestPlace::new();
    place.write(config);
    place
}

/// The volumes that are attached, each with its disk.
fn disks(daemon: &TestDaemon) -> Vec<(String, PathBuf)> {
    let all = daemon.control.reloader.disks.list();
    all.into_iter().filter_map(|disk| Some((disk.volume, disk.device?.path))).collect()
}

fn attach_disk(volume: &str) -> Request {
    Request::AttachDisk(Attachment {
        volume: volume.to_owned(),
        via: Some(Way::Fake),
        socket: None,
        name: None,
        read_only: false,
    })
}

fn detach_disk(volume: &str, force: bool) -> Request {
    Request::DetachDisk { volume: volume.to_owned(), force }
}

#[test]
fn a_reload_adds_removes_and_changes_attachments() {
    let place = place(&(TWO.to_owned() + &attachment("a")));
    let daemon = place.start().unwrap();
    let first = disks(&daemon);
    place.write(&(TWO.to_owned() + &attachment("a") + &attachment("b")));
    assert_eq!(lines(&daemon.reload().unwrap()), ["+ attachment b"]);
    assert!(disks(&daemon).len() == 2 && disks(&daemon)[0] == first[0], "the other disk stays");
    place.write(&(TWO.to_owned() + &attachment("b") + "read_only = true"));
    let expected = ["- attachment a", "+ attachment b: read_only added: true"];
    assert_eq!(lines(&daemon.reload().unwrap()), expected);
    assert!(fake::state(&first[0].1).is_removed);
    let all = daemon.control.reloader.disks.list();
    assert!(all.len() == 1 && all[0].read_only);
    assert_eq!(lines(&daemon.plan().unwrap()), [""; 0]);
    daemon.stop();
}

#[test]
fn a_reload_that_would_detach_a_disk_in_use_changes_nothing() {
    let place = place(&(TWO.to_owned() + &attachment("a") + &attachment("b")));
    let daemon = place.start().unwrap();
    let before = disks(&daemon);
    fake::set_used(&before[1].1, true);
    let (snapshot, other) = (daemon.snapshot(), TWO.replace("b.img", "c.img"));
    let without = TWO.split_once("[[volume]]\nname = 'b'").unwrap().0.to_owned();
    for config in [TWO.to_owned(), other + &attachment("b"), without] {
        place.write(&config);
        let warnings = daemon.plan().unwrap().warnings;
        assert!(warnings[0].starts_with("a reload is refused as long as attachment `b`: "), "{warnings:?}");
        let error = daemon.reload().unwrap_err().to_string();
        assert!(error.contains("attachment `b`: /dev/fake") && error.contains("in use at /mnt"), "{error}");
        assert_eq!((disks(&daemon), daemon.snapshot()), (before.clone(), snapshot.clone()));
    }
    fake::set_used(&before[1].1, false);
    daemon.reload().unwrap();
    assert_eq!(disks(&daemon), []);
    daemon.stop();
}

#[test]
fn the_disk_of_a_replaced_volume_is_attached_again_and_that_of_a_removed_one_is_not() {
    let place = place(&(TWO.to_owned() + &attachment("a") + &attachment("b")));
    let daemon = place.start().unwrap();
    let before = disks(&daemon);
    place.write(&(TWO.replace("a.img", "c.img") + &attachment("a") + &attachment("b")));
    daemon.reload().unwrap();
    let after = disks(&daemon);
    assert!(after[0].1 != before[0].1 && after[1] == before[1], "{after:?}");
    let removed = daemon.change(&Request::Remove { name: "a".to_owned(), force: false });
    assert!(!matches!(removed, Answer::Failed(_)), "nobody uses the disk: {removed:?}");
    assert_eq!(disks(&daemon), before[1..]);
    assert!(!daemon.exported().contains("volume = \"a\""), "{}", daemon.exported());
    daemon.stop();
}

#[test]
fn a_disk_that_cannot_be_attached_fails_the_change_that_names_it_and_the_next_one_tries_again() {
    let place = place(TWO);
    let daemon = place.start().unwrap();
    let broken = "[[volume]]\nname = 'broken'\nspec = 'null:1m'\n";
    place.write(&(TWO.to_owned() + broken + &attachment("broken")));
    let failed = daemon.reload().err().unwrap().to_string();
    assert!(failed.starts_with("the change is made, but attachment `broken`: "), "{failed}");
    let warnings = daemon.reload().unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].starts_with("attachment `broken`: "), "{warnings:?}");
    daemon.stop();
    let failure = place.start().err().unwrap().to_string();
    assert!(failure.contains("attachment `broken`: "), "{failure}");
}

#[test]
fn a_disk_of_an_open_volume_that_cannot_be_attached_leaves_all_as_it_is() {
    let broken = "[[volume]]\nname = 'broken'\nspec = 'null:1m'\n";
    let before = TWO.to_owned() + broken + &attachment("a");
    let place = place(&before);
    let daemon = place.start().unwrap();
    let (disks_before, snapshot) = (disks(&daemon), daemon.snapshot());
    // The disk of `a` would be detached, and that of `b` is attached first.
    let after = TWO.to_owned() + broken + &attachment("b") + &attachment("broken");
    place.write(&after);
    let failed = daemon.reload().unwrap_err().to_string();
    assert!(failed.contains("attachment `broken`: ") && !failed.contains("the change is made"), "{failed}");
    let Answer::Failed(failed) = daemon.change(&attach_disk("broken")) else { panic!("it is attached") };
    assert!(failed.message.starts_with("attachment `broken`: "), "{failed}");
    let after = disks(&daemon);
    assert!(after.len() == 1 && after[0].0 == "a", "it is attached again: {disks_before:?} {after:?}");
    assert_eq!(daemon.snapshot(), snapshot);
    assert!(!daemon.desired().contains("volume = \"broken\""), "{}", daemon.desired());
    daemon.stop();
}

#[test]
fn commands_attach_and_detach_and_a_save_writes_that_down() {
    let place = place(TWO);
    let daemon = place.start().unwrap();
    let failed = |request: &Request| match daemon.change(request) {
        Answer::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(failed(&attach_disk("c")).starts_with("no volume has the name `c`"));
    assert!(failed(&detach_disk("a", false)).starts_with("a: is not attached"));
    for volume in ["a", "b"] {
        assert!(matches!(daemon.change(&attach_disk(volume)), Answer::Noted { .. }));
    }
    assert!(failed(&attach_disk("a")).starts_with("attachment `a`: is there already"));
    let path = disks(&daemon)[0].1.clone();
    fake::set_used(&path, true);
    for request in [detach_disk("a", false), Request::Remove { name: "a".to_owned(), force: false }] {
        let said = failed(&request);
        assert!(said.contains("in use at /mnt; unmount it first, or use --force"), "{said}");
    }
    daemon.change(&detach_disk("a", true));
    assert!(fake::state(&path).was_forced);
    let saved = daemon.change(&Request::Save);
    assert!(matches!(saved, Answer::Message(_)), "{saved:?}");
    assert!(place.text().ends_with("[[attachment]]\nvolume = \"b\"\nvia = \"fake\"\n"), "{}", place.text());
    assert_eq!(lines(&daemon.plan().unwrap()), [""; 0]);
    place.write(TWO);
    daemon.reload().unwrap();
    assert_eq!(disks(&daemon), []);
    daemon.stop();
}

/// A command that another change has overtaken begins again: what it has attached itself is not in
/// its way.
#[test]
fn a_command_knows_its_attachment_in_the_config_by_a_relative_socket() {
    let place = TestPlace::new();
    let up = current_directory().components().skip(1).map(|_| "..").collect::<PathBuf>();
    let relative = up.join(place.directory().trim_start_matches('/')).join("disk");
    let socket = current_directory().join(&relative);
    place.write(&format!("{TWO}[[attachment]]\nvolume = 'a'\nsocket = '{}'\n", socket.display()));
    let daemon = place.start().unwrap();
    let reloader = &daemon.control.reloader;
    let is_known = |socket: PathBuf| {
        let (volume, name, socket) = ("a".to_owned(), None, Some(socket));
        let request = Request::AttachDisk(Attachment { volume, via: None, socket, name, read_only: false });
        edits_of(reloader, &reloader.config.get(), &request).is_ok()
    };
    assert!(is_known(socket) && is_known(relative));
    assert!(!is_known("another".into()), "the volume has a disk");
    reloader.disks.end();
    daemon.stop();
}
