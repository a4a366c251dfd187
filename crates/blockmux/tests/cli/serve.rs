//! `blockmux serve`: output, listeners, signals and exit status.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, end_by, ended, succeed, text, unignore_signals};
use crate::raw_client::RawClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

#[test]
fn serve_prints_urls_commands_and_ready_and_stops_on_a_signal() {
    unignore_signals();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "a=mem:1m", "mem:2m?block_size=4096", "--nbd", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let mut lines: Vec<_> = lines.take_while(|line| line != "ready").collect();
        assert_eq!(lines.len(), 10);
        lines.iter_mut().for_each(|line| *line = line.trim().to_owned());
        let url = lines[1].clone();
        let port = url.strip_prefix("nbd://127.0.0.1:").unwrap().strip_suffix("/a").unwrap();
        assert_eq!(lines[0], "a  1 MiB");
        assert_eq!(lines[2], format!("nbdinfo {url}"));
        assert_eq!(lines[3], format!("qemu-img info {url}"));
        assert_eq!(lines[4], format!("nbd-client 127.0.0.1 {port} /dev/nbd0 -N a {FOR_LOST_CONNECTIONS}"));
        assert_eq!(lines[5], "disk0  2 MiB");
        // A block size of 512 bytes is its default.
        assert!(lines[9].contains(" /dev/nbd0 -N disk0 -block-size 4096 "), "{}", lines[9]);
        let info = blockmux(["info", &url]);
        assert!(text(&info.stdout).contains("\n  size         1048576 (1 MiB)\n"));
        assert_eq!(end_by(&mut child, signal).code(), Some(0));
    }
}

#[test]
fn many_volumes_are_printed_in_twenty_lines_or_in_full_or_not_at_all() {
    let volumes: Vec<String> = (0..30).map(|number| format!("v{number}=mem:1m")).collect();
    for (option, count) in [(None, 20), (Some("--verbose"), 150), (Some("--quiet"), 0)] {
        let mut command = Command::new(BLOCKMUX);
        command.arg("serve").args(&volumes).args(["--nbd", "127.0.0.1:0"]).args(option);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let lines: Vec<_> = lines.take_while(|line| line != "ready").collect();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(lines.len(), count, "{lines:?}");
    }
}

#[test]
fn json_output_is_one_object_with_all_exports() {
    let daemon = Daemon::serve(&["a=mem:1m"]);
    let url = format!("nbd+unix:///a?socket={}", daemon.socket().display());
    let commands = [
        format!("nbdinfo '{url}'"),
        format!("qemu-img info '{url}'"),
        format!("nbd-client -unix {} /dev/nbd0 -N a {FOR_LOST_CONNECTIONS}", daemon.socket().display()),
    ];
    let export = json!({"name": "a", "size": 1 << 20, "urls": [url], "commands": commands});
    assert_eq!(daemon.json, json!({"ready": true, "exports": [export]}));
}

#[test]
fn the_socket_is_removed_when_the_daemon_stops() {
    let mut daemon = Daemon::serve(&["mem:1m"]);
    let mut client = RawClient::connect(&daemon.socket());
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(client.is_closed());
    assert!(!daemon.socket().exists());
}

#[test]
fn an_ignored_sighup_does_not_stop_the_daemon() {
    // As under nohup.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" serve mem:1m --nbd 127.0.0.1:0", BLOCKMUX]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
    let lines: Vec<_> = lines.take_while(|line| line != "ready").collect();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::HUP).unwrap();
    assert!(blockmux(["info", lines[1].trim()]).status.success());
    assert_eq!(end_by(&mut child, Signal::TERM).code(), Some(0));
}

#[test]
fn a_second_signal_ends_the_daemon_at_once() {
    // A write with a long delay keeps the daemon from stopping at the first signal.
    let mut daemon = Daemon::serve(&["log:-:delay:0s,1h:mem:1m", "-v"]);
    let mut client = RawClient::connect(&daemon.socket());
    client.request(crate::raw_client::WRITE, 0, 0, 512);
    client.send(&[1; 512]);
    daemon.wait_for_line(" write ");
    daemon.signal(Signal::TERM);
    daemon.wait_for_line("stopping");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(1));
}

#[test]
fn a_command_gets_the_urls_and_determines_the_exit_status() {
    let script =
        "echo $BLOCKMUX_URL; echo $BLOCKMUX_URLS; echo $BLOCKMUX_NBD_URL; echo $uri; echo $nbd; exit 7";
    let output = blockmux(["serve", "a=mem:1m", "b=mem:1m", "--run", script]);
    assert_eq!(output.status.code(), Some(7));
    let out = text(&output.stdout);
    let lines: Vec<_> = out.lines().collect();
    let socket = lines[0].strip_prefix("nbd+unix:///a?socket=").unwrap();
    let urls: Vec<_> = lines[1].split(' ').collect();
    assert_eq!((urls.len(), urls[0], urls[5]), (10, lines[0], &*format!("nbd+unix:///b?socket={socket}")));
    assert!(urls[1].starts_with("iscsi://127.0.0.1:") && urls[1].ends_with("/iqn.2026-11.blockmux:a/0"));
    assert_eq!(urls[2], urls[1].replace("iscsi://", "iser://") + "?rdma=iwarp");
    assert!(urls[3].starts_with("nvme+tcp://127.0.0.1:") && urls[3].ends_with("/nqn.2026-11.blockmux:a/1"));
    assert_eq!(urls[4], urls[3].replace("nvme+tcp://", "nvme+rdma://") + "?rdma=iwarp");
    assert_eq!((lines[2], lines[3]), (lines[0], lines[0]));
    assert_eq!(lines[4], format!("nbd:unix:{socket}:exportname=a"));
    assert!(!std::path::Path::new(socket).exists(), "the private socket is removed");
    let killed = blockmux(["serve", "mem:1m", "--run", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(128 + 9));
}

#[test]
fn a_command_reaches_the_volume_while_it_runs() {
    let script = format!("{BLOCKMUX} info --json $uri");
    let output = blockmux(["serve", "a=mem:1m", "--run", &script, "--read-only"]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&info["export"], &info["size"], &info["read_only"]),
        (&json!("a"), &json!(1 << 20), &json!(true))
    );
    assert_eq!(info["headers"], "extended");
    assert_eq!(info["contexts"], json!(["base:allocation"]));
}

#[test]
fn a_signal_also_ends_the_command() {
    let mut command = Command::new(BLOCKMUX);
    // `exec`: the signal reaches the command and not only its shell.
    command.args(["serve", "mem:1m", "--run", "echo started; exec cat /dev/zero >/dev/null"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn config_file_and_command_line_are_combined() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blockmux.toml");
    let text =
        "poll = 'never'\nread_only = true\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\ndescription = 'of RAM'\n";
    std::fs::write(&path, text).unwrap();
    let daemon = Daemon::serve(&["--config", path.to_str().unwrap(), "b=mem:2m", "--poll", "adaptive"]);
    let found = blockmux(["discover", "--json", &daemon.url()]);
    let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
    let exports = found["exports"].as_array().unwrap();
    let told: Vec<_> =
        exports.iter().map(|export| (&export["name"], &export["size"], &export["description"])).collect();
    assert_eq!(
        told,
        [(&json!("a"), &json!(1 << 20), &json!("of RAM")), (&json!("b"), &json!(2 << 20), &json!(""))]
    );
    assert!(found["exports"][1]["url"].as_str().unwrap().starts_with("nbd+unix:///b?socket="));
}

#[test]
fn a_port_in_use_is_reported_with_advice() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = blockmux(["serve", "mem:1m", "--nbd", &address]);
    assert_eq!(output.status.code(), Some(2));
    let expected = format!(
        "blockmux: cannot listen on {address}: another program listens there; stop it, or use another port, such as \
         --nbd 127.0.0.1:0\n"
    );
    assert_eq!(text(&output.stderr), expected);
}

#[test]
fn by_default_every_protocol_listens_on_loopback_at_its_own_port() {
    // The ports may be in use, by this test or another program; then the message has advice.
    let taken = ["127.0.0.1:10809", "127.0.0.1:3260"].map(TcpListener::bind);
    let said = text(&blockmux(["serve", "mem:1m"]).stderr);
    let expected = "blockmux: cannot listen on 127.0.0.1:10809: another program listens there; ";
    assert!(said.starts_with(expected) && said.ends_with("such as --nbd 127.0.0.1:0\n"), "{said}");
    let [nbd, _iscsi] = taken;
    drop(nbd);
    let output = blockmux(["serve", "mem:1m"]);
    let said = text(&output.stderr);
    // Another program may use the port of NBD.
    let is_one = said.contains(" 127.0.0.1:3260: ") && said.ends_with("such as --iscsi 127.0.0.1:0\n");
    assert!(is_one || said.starts_with(expected), "{said}");
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)));
}

#[test]
fn a_file_that_another_daemon_exports_can_only_be_opened_read_only() {
    let directory = tempfile::tempdir().unwrap();
    let spec = format!("file:{}?size=1m", directory.path().join("disk.img").display());
    let first = Daemon::serve(&[&spec]);
    let output = blockmux(["serve", &spec, "--nbd", ":0"]);
    let said = text(&output.stderr);
    let holder = format!("process {} (blockmux); stop that program", first.pid());
    assert!(said.ends_with(&format!("is locked by {holder}, or give ?readonly=on\n")), "{said}");
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)));
    Daemon::serve(&[&spec, "--read-only"]);
}

#[test]
fn a_daemon_that_cannot_listen_creates_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let file = directory.path().join("disk.img");
    let spec = format!("file:{}?size=1m", file.display());
    let output = blockmux(["serve", &spec, "--nbd", &taken.local_addr().unwrap().to_string()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!file.exists());
}

#[test]
fn an_address_that_is_not_loopback_causes_a_warning() {
    let script = "echo $uri";
    let output = blockmux(["serve", "mem:1m", "--nbd", "0.0.0.0:0", "--run", script]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).starts_with("nbd://127.0.0.1:"));
    let warning = text(&output.stderr);
    assert_eq!(warning.lines().count(), 1);
    assert!(warning.contains("can be reached from other machines without authentication"), "{warning}");
}

#[test]
fn info_names_a_volume_as_serve_and_discover_do() {
    let daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iscsi").remove(0);
    let described = text(&blockmux(["info", url.strip_suffix("/0").unwrap()]).stdout);
    let found = text(&blockmux(["discover", &url]).stdout);
    assert!(described.starts_with(&format!("{url}\n")) && found.starts_with(&url), "{described}{found}");
}

#[test]
fn a_server_exports_volumes_of_another_server() {
    let first = Daemon::serve(&["mem:1m"]);
    let second = Daemon::serve(&[&first.url()]);
    let mut client = RawClient::connect(&second.socket());
    assert_eq!(client.write(0, 512, &[3; 512]), 0);
    assert_eq!(RawClient::connect(&first.socket()).read(512, 512), [3; 512]);
}

#[test]
fn connections_beyond_the_limit_are_refused_and_the_others_continue() {
    let daemon = Daemon::serve(&["mem:1m", "--max-connections", "1"]);
    let mut first = RawClient::connect(&daemon.socket());
    let mut second = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "closed without a word");
    assert_eq!(first.read(0, 512), [0; 512]);
}

#[test]
fn a_closed_standard_output_does_not_stop_the_daemon() {
    let daemon = Daemon::serve(&["mem:1m"]);
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!("{BLOCKMUX} info '{}'; echo $? >&2", daemon.url()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
    child.wait().unwrap();
    assert_eq!(said, "0\n");
}

#[test]
fn an_address_that_is_given_twice_is_reported() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let said = |args: &[&str]| {
        let output = blockmux([&["serve", "mem:1m"], args].concat());
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let twice = said(&["--nbd", &free, "--nbd", &free]);
    assert_eq!(twice, format!("blockmux: --nbd {free}: given twice; remove one\n"));
    let both = said(&["--nbd", &free, "--iscsi", &free]);
    assert_eq!(both, format!("blockmux: {free}: given for --nbd and for --iscsi; change one\n"));
    // Ports that the system chooses always differ.
    drop(Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"]));
}

#[test]
fn a_second_signal_removes_the_directory_of_the_command() {
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new(BLOCKMUX);
    unignore_signals();
    // The command ignores SIGTERM, so that the daemon waits for it.
    command.args(["serve", "mem:1m", "--run", "trap '' TERM; echo begun; cat"]);
    command.env("TMPDIR", place.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // This ends the command.
    let _stdin = child.stdin.take();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), place.path().read_dir().unwrap().count()), ("begun\n", 1));
    let pid = Pid::from_child(&child);
    // Pending signals of the same kind are merged.
    for signal in [Signal::TERM, Signal::INT] {
        kill_process(pid, signal).unwrap();
    }
    assert_eq!(ended(&mut child).code(), Some(1));
    assert_eq!(place.path().read_dir().unwrap().count(), 0);
}

#[test]
fn every_protocol_works_over_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        println!("skipped: no IPv6 on loopback");
        return;
    }
    let places = ["--nbd", "[::1]:0", "--iscsi", "[::1]:0", "--nvme-tcp", "[::1]:0"];
    let daemon = Daemon::serve(&[&["mem:1m"][..], &places].concat());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    for (seed, scheme) in (1..).zip(["nbd", "iscsi", "iser", "nvme+tcp"]) {
        let url = daemon.urls_of(scheme).remove(0);
        assert!(url.contains("://[::1]:"), "{url}");
        let host = url.split('/').nth(2).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512 * seed + at) as u8).collect();
        std::fs::write(file("from"), &bytes).unwrap();
        let local = |name: &str| format!("file:{}", file(name).display());
        succeed(Command::new(BLOCKMUX).args(["copy", "--overwrite", &local("from"), &url]));
        let to = format!("file:{}?size=1m", file(scheme).display());
        succeed(Command::new(BLOCKMUX).args(["copy", "--overwrite", &url, &to]));
        assert!(std::fs::read(file(scheme)).unwrap() == bytes, "{url}");
        succeed(Command::new(BLOCKMUX).args(["info", &url]));
        let found = succeed(Command::new(BLOCKMUX).args(["discover", &format!("{scheme}://{host}")]));
        assert!(found.contains("disk0"), "{found}");
    }
}

#[test]
fn after_the_start_no_thread_has_a_capability_or_can_gain_one() {
    let daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0"]);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid().as_raw_nonzero())).unwrap();
    for task in tasks.flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim_start_matches(':').trim().to_owned()
        };
        let all = (field("CapEff"), field("CapPrm"), field("NoNewPrivs"));
        let none = "0000000000000000".to_owned();
        assert_eq!(all, (none.clone(), none, "1".to_owned()), "{}", field("Name"));
    }
}

#[test]
fn a_daemon_with_secrets_leaves_no_core_dump() {
    unignore_signals();
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "twelve or more bytes\n").unwrap();
    std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let open = "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'disk'\nspec = 'mem:1m'\n";
    let target = "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:disk'\nluns = { 0 = 'disk' }\n\
        [[iscsi_target.acl]]\nInitiatorName = 'iqn.2026-11.com.example:host'\nluns = [0]\nCHAP_N = 'host'\n";
    let closed = format!("{open}{target}secret_file = '{}'\n", secret.display());
    let dumps_core = |config: &str| {
        std::fs::write(directory.path().join("config.toml"), config).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -c unlimited; exec \"$0\" serve --config config.toml", BLOCKMUX]);
        let mut child = command.current_dir(directory.path()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        assert!(lines.take_while(|line| line != "ready").count() > 1);
        end_by(&mut child, Signal::QUIT).core_dumped()
    };
    if !dumps_core(open) {
        println!("skipped: no process dumps core here");
        return;
    }
    assert!(!dumps_core(&closed));
}
const FOR_LOST_CONNECTIONS: &str = "-connections 4 -timeout 10";
