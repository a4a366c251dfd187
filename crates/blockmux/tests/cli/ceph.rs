//! Images of Ceph through the program, on a real cluster, which `make test-cluster` starts.

mod group;
mod owner;
mod serving;

use crate::ceph_cluster::TestImage;
use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::examples::pages;
use crate::program::{BLOCKMUX, PATTERNS, blockmux, has, qemu_io, succeed, text};
use crate::raw_client::{FUA, RawClient};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

impl TestImage {
    fn spec(&self) -> String {
        format!("rbd:rbd/{}?conf={}", self.name, self.conf.display())
    }

    /// The image by QEMU's own driver.
    fn of_qemu(&self) -> String {
        format!("rbd:rbd/{}:conf={}", self.name, self.conf.display())
    }

    /// The whole content, as Ceph's own program reads it.
    fn content(&self, directory: &Path) -> Vec<u8> {
        let file = directory.join("exported");
        let _ = fs::remove_file(&file);
        self.rbd(&["export", "--no-progress", &self.name, file.to_str().unwrap()]);
        fs::read(file).unwrap()
    }

    /// Writes by a client with both paths to a target while `moves` runs; then the image has all
    /// that was written last.
    fn write_by_both_paths(&self, scheme: &str, urls: &[String; 2], moves: impl FnOnce()) {
        let [(one, rest), (two, same)] = urls.each_ref().map(|url| {
            url.strip_prefix(scheme).unwrap().strip_prefix("://").unwrap().split_once('/').unwrap()
        });
        assert_eq!(rest, same, "it is the same target");
        let client = Daemon::serve(&[&format!("{scheme}://{one},{two}/{rest}")]);
        let is_over = AtomicBool::new(false);
        let written = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut nbd = RawClient::connect(&client.socket());
                let mut written = 0_u64;
                while !is_over.load(Ordering::Relaxed) {
                    written += 1;
                    let block = [written as u8; 4096];
                    assert_eq!(nbd.write(0, written % 512 * 4096, &block), 0, "{scheme}: write {written}");
                    assert_eq!(nbd.read(written % 512 * 4096, 4096), block, "{scheme}: write {written}");
                }
                written
            });
            moves();
            is_over.store(true, Ordering::Relaxed);
            writer.join().unwrap()
        });
        let content = self.content(client.directory.path());
        for nth in written.saturating_sub(511).max(1)..=written {
            let at = (nth % 512 * 4096) as usize;
            assert!(content[at..at + 4096].iter().all(|byte| *byte == nth as u8), "{scheme}: write {nth}");
        }
    }
}

#[test]
fn an_image_is_the_same_over_nbd_and_iscsi_and_by_qemus_own_driver() {
    let Some(image) = TestImage::new("exported", &["--size", "16M"]) else { return };
    if !["qemu-io", "qemu-img"].into_iter().all(has) {
        return;
    }
    let daemon = Daemon::serve(&[&image.spec(), "--iscsi", "127.0.0.1:0"]);
    let iscsi = daemon.urls_of("iscsi").remove(0);
    for url in [daemon.url(), iscsi] {
        let said = text(&qemu_io(&url, &PATTERNS).output().unwrap().stdout);
        assert!(!said.contains("failed") && said.contains("8 MiB"), "{url}: {said}");
        succeed(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &url, &image.of_qemu()]));
    }
    let mut client = RawClient::connect(&daemon.socket());
    let content = image.content(daemon.directory.path());
    assert!(client.read(0, content.len()) == content);
    assert!(content[4 << 20..12 << 20].iter().all(|byte| *byte == 3));
}

#[test]
fn stable_writes_to_an_image_survive_a_kill_of_the_daemon() {
    let Some(image) = TestImage::new("killed", &["--size", "16M"]) else { return };
    let mut daemon = Daemon::serve(&[&image.spec()]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert_eq!(client.write(FUA, 8192, &[2; 4096]), 0);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let content = image.content(daemon.directory.path());
    assert_eq!((&content[..4096], &content[8192..12288]), (&[1; 4096][..], &[2; 4096][..]));
    // The next daemon writes although the first one has not given up the lock.
    daemon.start_again(&[&image.spec()]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.write(0, 0, &[3; 4096]), 0);
    assert_eq!(client.read(0, 4096), [3; 4096]);
}

#[test]
fn an_image_that_is_resized_elsewhere_is_noticed_and_one_in_use_is_not_removed() {
    let Some(image) = TestImage::new("resized", &["--size", "16M"]) else { return };
    let controlled = Controlled::serve(&[&format!("disk={}", image.spec())]);
    image.rbd(&["resize", "--no-progress", "--size", "32M", &image.name]);
    let size = |bytes: u64| controlled.status()["volumes"][0]["size"] == bytes;
    eventually("the daemon notices the size", || size(32 << 20));
    controlled.said(&["resize", "disk", "48m"]);
    assert!(image.rbd(&["info", &image.name]).contains("size 48 MiB"));
    let refused = image.rbd_fails(&["rm", "--no-progress", &image.name]);
    assert!(refused.contains("image still has watchers"), "{refused}");
    controlled.said(&["remove", "disk"]);
    // Closed in the background.
    eventually("the image is closed", || !image.rbd(&["status", &image.name]).contains("watcher="));
    image.rbd(&["rm", "--no-progress", &image.name]);
    let said = controlled.refusal(&["add", &format!("disk={}", image.spec())]);
    assert!(said.contains(&format!("there is no image {} in rbd", image.name)), "{said}");
    // With another connection, which the daemon makes after it has denied itself system calls.
    image.rbd(&["create", "--size", "16M", &image.name]);
    controlled.said(&["add", &format!("disk={}", image.spec())]);
    eventually("it is served again", || size(16 << 20));
}

#[test]
fn a_daemon_whose_client_was_blocklisted_serves_the_image_again_once_it_is_added_again() {
    let Some(image) = TestImage::new("blocklisted", &["--size", "16M"]) else { return };
    let volume = format!("disk={}", image.spec());
    let controlled = Controlled::serve(&[&volume]);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    image.blocklist(&image.watcher());
    // The storage daemons learn of it one after the other.
    let last = (0..10_000).map(|_| client.write(0, 0, &[2; 4096])).find(|errno| *errno != 0);
    assert!(last.is_some(), "the client is not fenced");
    let said = controlled.refusal(&["remove", "disk", "--force"]);
    assert!(said.contains("the change is made, but disk: the last flush failed: fenced"), "{said}");
    controlled.said(&["add", &volume]);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(client.write(0, 0, &[3; 4096]), 0);
    assert_eq!(image.content(controlled.directory.path())[..4096], [3; 4096]);
}

#[test]
fn a_storage_daemon_that_is_killed_loses_nothing() {
    let Some(image) = TestImage::new("outage", &["--size", "16M"]) else { return };
    let daemon = Daemon::serve(&[&image.spec()]);
    let mut client = RawClient::connect(&daemon.socket());
    let round = |client: &mut RawClient, round: u8| {
        for at in 0..16_u64 {
            let block = [round ^ at as u8; 64 << 10];
            assert_eq!(client.write(0, at << 20, &block), 0);
        }
    };
    round(&mut client, 0x10);
    image.osd("kill", "1");
    round(&mut client, 0x20);
    image.osd("start", "1");
    round(&mut client, 0x30);
    image.osd("kill", "2");
    for at in 0..16_u64 {
        assert!(client.read(at << 20, 64 << 10).iter().all(|byte| *byte == 0x30 ^ at as u8));
    }
    image.osd("start", "2");
    let content = image.content(daemon.directory.path());
    assert!((0..16).all(|at| content[at << 20..][..64 << 10].iter().all(|byte| *byte == 0x30 ^ at as u8)));
}

#[test]
fn what_info_and_check_say_of_an_image() {
    let Some(image) = TestImage::new("info", &["--size", "16M"]) else { return };
    let said = blockmux(["info", "--json", &image.spec()]);
    let info: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!((&info["size"], &info["write_cache"]), (&(16 << 20).into(), &false.into()), "{info}");
    assert_eq!((&info["read_only"], &info["volatile"]), (&false.into(), &false.into()), "{info}");
    let place = tempfile::tempdir().unwrap();
    let config = place.path().join("b.toml");
    fs::write(&config, format!("[[volume]]\nname = 'a'\nspec = '{}'\n", image.spec())).unwrap();
    succeed(Command::new(BLOCKMUX).arg("check").arg(&config));
    let none = format!("rbd:rbd/none?conf={}", image.conf.display());
    let refused = blockmux(["info", &none]);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(
        text(&refused.stderr),
        format!("blockmux: {none}: there is no image none in rbd; list images with 'rbd ls rbd'\n")
    );
}

#[test]
fn snapshots_are_created_listed_served_protected_and_deleted() {
    let Some(image) = TestImage::new("snapshots", &["--size", "16M"]) else { return };
    let mut controlled = Controlled::serve(&[&format!("disk={}", image.spec())]);
    let mut client = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(controlled.said(&["snapshot", "list", "disk"]), "no snapshots\n");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert!(controlled.said(&["snapshot", "create", "disk", "a day"]).starts_with("a day  16 MiB, 20"));
    assert_eq!(client.write(0, 0, &[2; 4096]), 0);
    let refused = controlled.refusal(&["snapshot", "create", "disk", "a day"]);
    assert!(refused.contains("disk: there is a snapshot `a day` already; choose another"), "{refused}");
    let refused = controlled.refusal(&["snapshot", "create", "disk", "a@b"]);
    assert!(refused.contains("`a@b` is no name for a snapshot; write"), "{refused}");
    let line = controlled.daemon.log_line("create snapshot disk@a day");
    assert!(line.ends_with("changes=\"+ snapshot disk@a day\""), "{line}");

    // A slice of it uses it, too.
    let spec = image.spec().replacen('?', "@a day?", 1);
    controlled.said(&["add", &format!("then={spec}")]);
    controlled.said(&["add", &format!("part=slice:1m,1m:{spec}")]);
    let then = format!("nbd+unix:///then?socket={}", controlled.daemon.socket().display());
    let copy = controlled.directory.path().join("copy");
    succeed(Command::new(BLOCKMUX).args(["copy", &then, &format!("file:{}", copy.display())]));
    assert_eq!((&fs::read(copy).unwrap()[..4096], client.read(0, 4096)), (&[1; 4096][..], vec![2; 4096]));
    let list: serde_json::Value =
        serde_json::from_str(&controlled.said(&["snapshot", "list", "disk", "--json"])).unwrap();
    assert_eq!((&list[0]["name"], &list[0]["size"]), (&"a day".into(), &(16 << 20).into()), "{list}");
    assert_eq!(list[0]["protected"], false, "{list}");
    assert_eq!(list[0]["volumes"], serde_json::json!(["then", "part"]), "{list}");
    let refused = controlled.refusal(&["snapshot", "delete", "disk", "a day"]);
    assert!(
        refused.contains("disk: snapshot `a day` is served as volume then, part; remove that"),
        "{refused}"
    );
    let refused = controlled.refusal(&["snapshot", "list", "then"]);
    assert!(refused.contains("then: its kind has no snapshots"), "{refused}");
    controlled.said(&["remove", "part"]);
    controlled.said(&["remove", "then"]);

    // Twice is as once.
    for (command, is_protected) in [("protect", true), ("protect", true), ("unprotect", false)] {
        controlled.said(&["snapshot", command, "disk", "a day"]);
        let list = controlled.said(&["snapshot", "list", "disk"]);
        assert_eq!(list.contains(", protected"), is_protected, "{list}");
        if is_protected {
            let refused = controlled.refusal(&["snapshot", "delete", "disk", "a day"]);
            assert!(refused.contains("disk: snapshot `a day` is protected; 'blockmux ctl"), "{refused}");
        }
    }
    controlled.said(&["snapshot", "unprotect", "disk", "a day"]);
    controlled.said(&["snapshot", "delete", "disk", "a day"]);
    assert_eq!(image.rbd(&["snap", "ls", &image.name]), "");
    for command in ["delete", "protect"] {
        let refused = controlled.refusal(&["snapshot", command, "disk", "a day"]);
        assert!(
            refused.contains("disk: there is no snapshot `a day`; 'blockmux ctl snapshot list'"),
            "{refused}"
        );
    }
    let read_only = Controlled::serve(&[&format!("disk={}&readonly=on", image.spec())]);
    let refused = read_only.refusal(&["snapshot", "create", "disk", "b"]);
    assert!(refused.contains("disk: is opened read-only, so that its snapshots stay"), "{refused}");
}

#[test]
fn the_commands_of_the_guide_work() {
    let Some(image) = TestImage::new("guide", &["--size", "16M"]) else { return };
    if !has("qemu-img") {
        return;
    }
    let pages = pages();
    let guide = pages.iter().find(|page| page.name.ends_with("guides/ceph.md")).unwrap();
    let (configs, blocks): (Vec<_>, Vec<_>) =
        guide.blocks().into_iter().partition(|block| block.language == "toml");
    let lines: Vec<&str> = blocks.into_iter().flat_map(|block| block.lines).collect();
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("disk.img"), vec![9; 1 << 20]).unwrap();
    let etc = format!("{}/", image.conf.parent().unwrap().display());
    let commands: Vec<_> = lines.iter().filter(|line| !line.starts_with("apt ")).collect();
    assert!(commands.len() > 8, "{commands:?}");
    assert_eq!(configs.len(), 2, "those of a gateway, by hand and in a group");
    let own_conf = format!("id=blockmux&conf={}", image.conf.display());
    let own_key = format!("id = \"blockmux\"\nconf = '{}'", image.conf.display());
    let config = |nth: usize| {
        let path = place.path().join(format!("gateway-{nth}.toml"));
        let text = configs[nth].lines.join("\n").replace("control = \"unix:control\"", "");
        fs::write(&path, text.replace("id=blockmux", &own_conf).replace("id = \"blockmux\"", &own_key))
            .unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (by_hand, in_group) = (config(0), config(1));
    // The arguments of the daemon that the guide's reader has now, and the daemon.
    let mut running: Option<(Vec<String>, Controlled)> = None;
    for line in commands {
        let line = line.replace("/etc/ceph/", &etc);
        let own = line.strip_prefix("blockmux ").map(|words| format!("{BLOCKMUX} {words}"));
        let mut shell = Command::new("sh");
        if line.starts_with("blockmux ctl ") {
            // The daemon of the guide's reader serves the image as `disk`.
            let spec = format!("disk=rbd:rbd/disk?{own_conf}");
            let arguments: Vec<_> = match () {
                () if line.contains("activate") => vec!["--config".to_owned(), by_hand.clone()],
                () if line.contains("cluster") => vec!["--config".to_owned(), in_group.clone()],
                () => vec![spec],
            };
            if running.as_ref().is_none_or(|(own, _)| *own != arguments) {
                // Two daemons of one host do not share an image.
                drop(running.take());
                let controlled = Controlled::serve(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
                if line.contains("cluster") {
                    let joined = || controlled.said(&["cluster", "status", "--json"]).contains("\"active\"");
                    eventually("the group serves the volume", joined);
                }
                running = Some((arguments, controlled));
            }
            let socket = running.as_ref().map(|(_, controlled)| controlled.socket()).unwrap();
            shell.env("BLOCKMUX_CONTROL", format!("unix:{}", socket.display()));
        }
        if line.starts_with("blockmux serve ") {
            // Two daemons of one host do not share an image.
            drop(running.take());
        }
        let line = own.unwrap_or(line);
        shell.args(["-ec", &line]).current_dir(place.path()).env("CEPH_CONF", &image.conf);
        succeed(&mut shell);
    }
    let copy = fs::read(place.path().join("monday.img")).unwrap();
    assert_eq!(copy.len(), 1 << 30);
    assert!(copy[..1 << 20].iter().all(|byte| *byte == 9) && copy[1 << 20..].iter().all(|byte| *byte == 0));
}
