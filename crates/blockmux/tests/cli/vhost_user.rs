//! Disks of virtual machines, and back ends of others as volumes. `tests/vm/vhost-user.sh` has a
//! virtual machine.

use crate::api::ask;
use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, ended, has, kill_if_it_hangs, stop, succeed, text};
use crate::raw_client::{READ, RawClient};
use crate::spdk::Spdk;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A directory with a file of 4 MiB that differs in every block.
fn with_source() -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let bytes: Vec<u8> = (0..4_u32 << 20).map(|at| (at / 512 * 7 + at) as u8).collect();
    fs::write(&source, bytes).unwrap();
    (directory, source.display().to_string())
}

fn path(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).display().to_string()
}

#[test]
fn an_attached_volume_is_copied_and_measured_over_its_socket() {
    let (directory, source) = with_source();
    let [socket, copy, report] = ["disk", "copy", "report"].map(|name| path(&directory, name));
    let commands = format!(
        "{BLOCKMUX} copy file:{source} vhost-user:$socket --verify --overwrite && {BLOCKMUX} copy vhost-user:$socket \
         file:{copy} --verify && {BLOCKMUX} bench vhost-user:$socket --rw randrw --bs 4k --runtime 100ms --ramp_time 0 \
         --report {report}"
    );
    succeed(Command::new(BLOCKMUX).args(["attach", "mem:4m", "--socket", &socket, "--run", &commands]));
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
    assert!(!Path::new(&socket).exists());
}

#[test]
fn a_socket_is_announced_and_is_only_for_vhost_user() {
    let directory = tempfile::tempdir().unwrap();
    let socket = path(&directory, "disk");
    let said = succeed(Command::new(BLOCKMUX).args([
        "attach",
        "mem:1m",
        "--read-only",
        "--via",
        "vhost-user",
        "--socket",
        &socket,
        "--run",
        &format!("{BLOCKMUX} info vhost-user:$BLOCKMUX_SOCKET --json"),
    ]));
    let info: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&info["size"], &info["logical_block"]), (&(1 << 20).into(), &512.into()), "{info}");
    for (words, expected) in [
        (&["attach", "mem:1m", "--via", "vhost-user"][..], "--socket"),
        (&["attach", "mem:1m", "--via", "ublk", "--socket", "a"][..], "--socket is for --via vhost-user"),
        (&["attach", "mem:1m", "--socket", "/nowhere/a"][..], "cannot listen at /nowhere/a"),
        (&["info", "vhost-user:/nowhere/a"][..], "is the back end running?"),
    ] {
        let output = blockmux(words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_disk_of_a_daemon_is_detached_from_a_front_end_only_by_force() {
    let (directory, source) = with_source();
    let [socket, other] = ["disk", "other"].map(|name| path(&directory, name));
    let controlled = Controlled::serve(&["a=mem:4m", "b=mem:4m"]);
    assert_eq!(controlled.said(&["attach-disk", "a", "--socket", &socket]), format!("{socket}  a\n"));
    for (words, expected) in [
        (&["attach-disk", "a", "--socket", &other][..], "is there already"),
        (&["attach-disk", "b", "--socket", &socket][..], "another one has the socket "),
    ] {
        let said = controlled.refusal(words);
        assert!(said.contains(expected), "{said}");
    }
    let volume = format!("vhost-user:{socket}");
    succeed(Command::new(BLOCKMUX).args(["copy", "--overwrite", &format!("file:{source}"), &volume]));
    let attachment = controlled.status()["attachments"][0].clone();
    assert_eq!((&attachment["device"], &attachment["via"]), (&socket.as_str().into(), &"vhost-user".into()));
    assert!(attachment["written_bytes"].as_u64().unwrap() >= 4 << 20, "{attachment}");
    assert!(controlled.said(&["export"]).contains(&format!("socket = \"{socket}\"")));
    let front_end = Daemon::serve(&[&volume]);
    let said = controlled.refusal(&["detach-disk", "a"]);
    let user = format!("{socket} is in use by a front end, process {}", front_end.pid().as_raw_nonzero());
    assert!(said.contains(&user) && said.contains("or use --force"), "{said}");
    controlled.said(&["detach-disk", "a", "--force"]);
    assert!(!Path::new(&socket).exists());
    drop(front_end);
    controlled.said(&["attach-disk", "a", "--socket", &socket]);
    controlled.said(&["detach-disk", "a"]);
    assert!(!Path::new(&socket).exists());
}

#[test]
fn a_socket_that_cannot_be_made_is_the_fault_of_the_request() {
    let controlled = Controlled::serve(&["a=mem:4m"]);
    let body = json!({ "volume": "a", "socket": "/nowhere/a" }).to_string();
    let (status, said) = ask(&controlled.socket(), "POST", "/v1/attachments", "", &body);
    assert_eq!((status, &said["error"]["code"]), (422, &json!("invalid")), "{said}");
    let message = said["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("attachment `a`: cannot listen at /nowhere/a: No such file"), "{said}");
    assert_eq!(controlled.status()["attachments"], json!([]));
}

#[test]
fn a_relative_socket_of_a_command_is_the_one_that_the_config_has() {
    let (directory, _) = with_source();
    let relative = |name: &str| {
        // The test and the daemon have the same current directory.
        let own = std::env::current_dir().unwrap();
        let up: std::path::PathBuf = own.components().skip(1).map(|_| "..").collect();
        up.join(path(&directory, name).trim_start_matches('/')).display().to_string()
    };
    let controlled = Controlled::serve(&["a=mem:4m", "b=mem:4m"]);
    controlled.said(&["attach-disk", "a", "--socket", &relative("disk")]);
    let exported = controlled.said(&["export"]);
    let socket = std::env::current_dir().unwrap().join(relative("disk")).display().to_string();
    assert!(exported.contains(&format!("socket = \"{socket}\"")), "{exported}");
    for named in [&relative("disk"), &socket] {
        let said = controlled.refusal(&["attach-disk", "b", "--socket", named]);
        assert!(said.contains("another one has the socket "), "{said}");
    }
    controlled.said(&["detach-disk", "a"]);
}

#[test]
fn the_command_of_serve_finds_the_disks_of_its_volumes() {
    let (directory, source) = with_source();
    let [config, copy] = ["b.toml", "copy"].map(|name| path(&directory, name));
    let attachment = |volume: &str| {
        let socket = path(&directory, volume);
        format!(
            "[[volume]]\nname = '{volume}'\nspec = 'mem:4m'\n[[attachment]]\nvolume = '{volume}'\nsocket = '{socket}'\n"
        )
    };
    fs::write(&config, attachment("b") + &attachment("a")).unwrap();
    let commands = format!(
        "{BLOCKMUX} copy file:{source} vhost-user:$socket --verify --overwrite && {BLOCKMUX} copy \
         vhost-user:$BLOCKMUX_SOCKET file:{copy} --verify && echo \"$BLOCKMUX_SOCKETS\""
    );
    let said = succeed(Command::new(BLOCKMUX).args(["serve", "--config", &config, "--run", &commands]));
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
    let sockets = ["b", "a"].map(|name| path(&directory, name)).join(" ");
    assert_eq!(said.lines().last(), Some(sockets.as_str()));
}

#[test]
fn the_socket_of_an_attachment_is_for_vhost_user_alone() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    let volumes = "nbd = ['unix:n']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[volume]]\nname = 'b'\nspec = 'mem:1m'\n";
    for (keys, expected) in [
        ("via = 'vhost-user'", "vhost-user needs a socket"),
        ("via = 'ublk'\nsocket = '/a'", "a socket is for vhost-user; omit it, or omit ublk"),
        ("name = 'c'\nsocket = '/a'", "has no name on this machine"),
        ("socket = '/a'\n[[attachment]]\nvolume = 'b'\nsocket = '/a'", "another one has the socket /a"),
    ] {
        fs::write(&config, format!("{volumes}[[attachment]]\nvolume = 'a'\n{keys}\n")).unwrap();
        let output = blockmux(["check", config.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("b.toml:") && said.contains(expected), "{said}");
    }
}

#[test]
fn a_back_end_that_hangs_is_an_error_of_its_requests_and_a_stop_does_not_wait_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let socket = path(&directory, "disk");
    let mut back_end = Command::new(BLOCKMUX);
    back_end.args(["attach", "mem:1m", "--json", "--socket", &socket]).stdout(Stdio::piped());
    let back_end = BackEnd::started(&mut back_end, &socket);
    let mut daemon = Daemon::serve(&[&format!("vhost-user:{socket}?timeout=100ms&reconnect=0s")]);
    let mut client = RawClient::connect(&daemon.socket());
    assert_eq!(client.read(0, 512), [0; 512]);
    stop(&back_end.0);
    client.request(READ, 0, 0, 512);
    // What it does not answer is this request, or the start of the queue that has answered the
    // first one.
    let line = daemon.wait_for_line("; connecting again");
    assert!(line.contains("has not answered a request for 100 ms") || line.contains("does not answer"));
    daemon.wait_for_line("; requests fail from now on");
    assert_ne!(client.reply(), 0);
    daemon.signal(Signal::TERM);
    daemon.wait();
}

/// A back end in another process, as QEMU's storage daemon with an export.
struct BackEnd(Child);

impl BackEnd {
    fn export(image: &str, socket: &str) -> BackEnd {
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.arg("--blockdev").arg(format!("file,node-name=disk,filename={image}"));
        daemon.arg("--export").arg(format!(
            "vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={socket},num-queues=4,writable=on"
        ));
        BackEnd::started(&mut daemon, socket)
    }

    /// Starts a back end, and waits for its socket.
    fn started(command: &mut Command, socket: &str) -> BackEnd {
        let daemon = BackEnd(command.spawn().unwrap());
        kill_if_it_hangs(&daemon.0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !Path::new(socket).exists() {
            assert!(Instant::now() < deadline, "{command:?} does not listen");
            std::thread::yield_now();
        }
        daemon
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        ended(&mut self.0);
    }
}

#[test]
fn an_export_of_qemus_storage_daemon_is_a_volume() {
    if !has("qemu-storage-daemon") {
        return;
    }
    let (directory, source) = with_source();
    let (image, socket, copy) =
        (path(&directory, "image"), path(&directory, "disk"), path(&directory, "copy"));
    fs::write(&image, vec![0; 4 << 20]).unwrap();
    let _daemon = BackEnd::export(&image, &socket);
    let volume = format!("vhost-user:{socket}");
    copy_to_volume(&source, &volume);
    assert!(fs::read(&source).unwrap() == fs::read(&image).unwrap());
    copy_from_volume(&volume, &copy);
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
}

fn copy_to_volume(source: &str, volume: &str) {
    let source = format!("file:{source}");
    succeed(Command::new(BLOCKMUX).args(["copy", &source, volume, "--verify", "--overwrite"]));
}

fn copy_from_volume(volume: &str, copy: &str) {
    succeed(Command::new(BLOCKMUX).args(["copy", volume, &format!("file:{copy}"), "--verify"]));
}

#[test]
fn an_export_of_spdks_vhost_is_a_volume() {
    let Some(mut spdk) = Spdk::start("vhost", &["-S", "DIR"]) else { return };
    let (directory, source) = with_source();
    spdk.call("bdev_malloc_create", json!({"name": "ram", "num_blocks": 8192, "block_size": 512}));
    spdk.call("vhost_create_blk_controller", json!({"ctrlr": "disk", "dev_name": "ram"}));
    let [copy, report] = ["copy", "report"].map(|name| path(&directory, name));
    let volume = format!("vhost-user:{}", spdk.files.path().join("disk").display());
    copy_to_volume(&source, &volume);
    copy_from_volume(&volume, &copy);
    assert!(fs::read(&source).unwrap() == fs::read(&copy).unwrap());
    let jobs = ["--rw", "randrw", "--bs", "4k", "--iodepth", "32", "--runtime", "100ms", "--ramp_time", "0"];
    succeed(Command::new(BLOCKMUX).args(["bench", &volume, "--report", &report]).args(jobs));
    let counters = spdk.call("bdev_get_iostat", json!({}));
    assert!(counters["bdevs"][0]["num_write_ops"].as_u64().unwrap() > 0, "{counters}");
}
