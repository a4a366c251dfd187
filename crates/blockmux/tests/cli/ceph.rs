//! Images of Ceph through the program, on a real cluster, which `make test-cluster` starts.

use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::examples::pages;
use crate::program::{BLOCKMUX, PATTERNS, blockmux, has, qemu_io, succeed, text};
use crate::raw_client::{FUA, RawClient};
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An image of a test; it stays until the whole cluster is thrown away.
struct TestImage {
    conf: PathBuf,
    name: String,
}

impl TestImage {
    /// An image of 16 MiB; `None`, with a note, if there is no cluster.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    fn new(name: &str) -> Option<TestImage> {
        let Some(conf) = std::env::var_os("BLOCKMUX_CEPH_CONF") else {
            println!("skipped: no Ceph cluster; 'make test-cluster' starts one");
            return None;
        };
        let image = TestImage { conf: conf.into(), name: format!("{name}-{}", std::process::id()) };
        image.rbd(&["create", "--size", "16M", &image.name]);
        Some(image)
    }

    fn run_rbd(&self, arguments: &[&str]) -> Output {
        Command::new("rbd").arg("--conf").arg(&self.conf).args(arguments).output().unwrap()
    }

    fn rbd(&self, arguments: &[&str]) -> String {
        let output = self.run_rbd(arguments);
        assert!(output.status.success(), "rbd {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

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

    /// What `tests/ceph/cluster.sh` does to one storage daemon.
    fn osd(&self, action: &str, number: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ceph/cluster.sh");
        succeed(Command::new("bash").arg(script).arg(action).arg(self.conf.parent().unwrap()).arg(number));
    }
}

#[test]
fn an_image_is_the_same_over_nbd_and_iscsi_and_by_qemus_own_driver() {
    let Some(image) = TestImage::new("exported") else { return };
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
    let Some(image) = TestImage::new("killed") else { return };
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
    let Some(image) = TestImage::new("resized") else { return };
    let controlled = Controlled::serve(&[&format!("disk={}", image.spec())]);
    image.rbd(&["resize", "--no-progress", "--size", "32M", &image.name]);
    let size = |bytes: u64| controlled.status()["volumes"][0]["size"] == bytes;
    eventually("the daemon notices the size", || size(32 << 20));
    controlled.said(&["resize", "disk", "48m"]);
    assert!(image.rbd(&["info", &image.name]).contains("size 48 MiB"));
    let refused = image.run_rbd(&["rm", "--no-progress", &image.name]);
    assert!(text(&refused.stderr).contains("image still has watchers"), "{}", text(&refused.stderr));
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
fn a_storage_daemon_that_is_killed_loses_nothing() {
    let Some(image) = TestImage::new("outage") else { return };
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
    let Some(image) = TestImage::new("info") else { return };
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
fn the_commands_of_the_guide_work() {
    let Some(image) = TestImage::new("guide") else { return };
    if !has("qemu-img") {
        return;
    }
    let pages = pages();
    let guide = pages.iter().find(|page| page.name.ends_with("guides/ceph.md")).unwrap();
    let lines: Vec<&str> = guide.blocks().into_iter().flat_map(|block| block.lines).collect();
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("disk.img"), vec![9; 1 << 20]).unwrap();
    let etc = format!("{}/", image.conf.parent().unwrap().display());
    let commands: Vec<_> = lines.iter().filter(|line| !line.starts_with("apt ")).collect();
    assert!(commands.len() > 6, "{commands:?}");
    for line in commands {
        let line = line.replace("/etc/ceph/", &etc);
        let own = line.strip_prefix("blockmux ").map(|words| format!("{BLOCKMUX} {words}"));
        let line = own.unwrap_or(line);
        let mut shell = Command::new("sh");
        shell.args(["-ec", &line]).current_dir(place.path()).env("CEPH_CONF", &image.conf);
        succeed(&mut shell);
    }
    let copy = fs::read(place.path().join("monday.img")).unwrap();
    assert_eq!(copy.len(), 1 << 30);
    assert!(copy[..1 << 20].iter().all(|byte| *byte == 9) && copy[1 << 20..].iter().all(|byte| *byte == 0));
}
