//! A daemon under a service manager: readiness, watchdog, inherited sockets, the user that it runs
//! as, and its log for programs.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use crate::raw_client::RawClient;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::BufRead;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A daemon with these environment variables, at a Unix socket of its own.
fn serve_with(environment: &[(&str, &str)], args: &[&str]) -> Daemon {
    let directory = tempfile::tempdir().unwrap();
    let listener = format!("unix:{}", directory.path().join("socket").display());
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "--json", "--nbd", &listener]).args(args);
    command.env("XDG_STATE_HOME", directory.path().join("state")).envs(environment.iter().copied());
    Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn a_service_manager_gets_ready_watchdog_and_stopping_notifications() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000")];
    let mut daemon = serve_with(&environment, &["a=mem:1m", "b=mem:1m"]);
    let mut told = String::new();
    let mut wait_for = |part: &str| {
        while !told.contains(part) {
            let mut message = [0; 4096];
            let length = manager.recv(&mut message).unwrap();
            told += &format!("{}\n", text(&message[..length]));
        }
        std::mem::take(&mut told)
    };
    let told = wait_for("READY=1");
    assert!(told.contains("STATUS=serving 2 volumes"), "{told}");
    wait_for("WATCHDOG=1");
    wait_for("WATCHDOG=1");
    daemon.signal(Signal::TERM);
    wait_for("STOPPING=1");
    assert!(daemon.wait().success());
}

/// Starts a daemon as systemd does with `listener`, named `name`, as its third descriptor.
fn activated(listener: &TcpListener, name: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0";
    command.args(["-c", script, BLOCKMUX, "serve", "--json"]).args(args).env("LISTEN_FDNAMES", name);
    command.stdin(OwnedFd::from(listener.try_clone().unwrap()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn an_inherited_socket_is_used_by_its_address_or_its_protocol_name_or_for_nbd() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The client connects before the daemon starts, and is served afterwards.
    let waiting = TcpStream::connect(address).unwrap();
    for args in [&["mem:1m"][..], &["mem:1m", "--nbd", &address.to_string()]] {
        let mut command = activated(&listener, "nbd", args);
        let daemon = Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command);
        assert_eq!(daemon.json["exports"][0]["urls"].as_array().unwrap().len(), 1);
        assert_eq!(daemon.url(), format!("nbd://127.0.0.1:{}/disk0", address.port()));
        let info = blockmux(["info", &daemon.url()]);
        assert!(info.status.success(), "{}", text(&info.stderr));
    }
    drop(waiting);
    for unnamed in ["", "unknown"] {
        let mut command = activated(&listener, unnamed, &["mem:1m"]);
        let daemon = Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command);
        assert_eq!(daemon.url(), format!("nbd://127.0.0.1:{}/disk0", address.port()), "`{unnamed}`");
    }
    let refused = activated(&listener, "web", &["mem:1m"]).output().unwrap();
    let reason = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{reason}");
    assert!(reason.contains("with the name `web`"), "{reason}");
    assert!(reason.contains("set FileDescriptorName= to one of nbd, iscsi"), "{reason}");
}

#[test]
fn a_log_of_json_has_an_object_for_each_event_with_the_fields_of_the_audit_log() {
    let mut daemon = serve_with(&[], &["--log-format", "json", "disk0=mem:1m"]);
    let client = RawClient::connect(&daemon.socket());
    let mut line = String::new();
    daemon.stderr.read_line(&mut line).unwrap();
    let event: Value = serde_json::from_str(&line).unwrap();
    let expected = [("level", "info"), ("area", "audit"), ("message", "login"), ("target", "disk0")];
    for (name, value) in expected {
        assert_eq!(event[name], value, "{line}");
    }
    assert!(event["time"].as_str().unwrap().ends_with('Z') && event["peer"].is_string(), "{line}");
    drop(client);
}

#[test]
fn in_the_shipped_units_only_the_daemon_limits_its_lines() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd");
    let files =
        fs::read_dir(directory).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let units: Vec<_> = files.filter(|unit| unit.contains("\nExecStart=")).collect();
    assert_eq!(units.len(), 3);
    assert!(units.iter().all(|unit| unit.contains("\nLogRateLimitIntervalSec=0\n")));
}

#[test]
fn levels_of_the_log_change_while_the_daemon_runs() {
    let directory = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", directory.path().join("control").display());
    let mut daemon = serve_with(&[], &["--control", &control, "disk0=mem:1m", "--log", "audit=off"]);
    let ctl = |args: &[&str]| {
        let output = blockmux([&["ctl", &control, "log"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert!(ctl(&[]).contains("audit      off\n"));
    drop(RawClient::connect(&daemon.socket()));
    let said = ctl(&["audit=info,volume=debug"]);
    assert!(said.contains("audit      info\n") && said.contains("volume     debug\n"), "{said}");
    let _client = RawClient::connect(&daemon.socket());
    let mut lines = [String::new(), String::new()];
    for line in &mut lines {
        daemon.stderr.read_line(line).unwrap();
    }
    assert!(lines[0].contains(" INFO config changed: log audit=info,volume=debug "), "{lines:?}");
    assert!(lines[1].contains(" INFO login protocol=\"nbd\""), "the first client left no line: {lines:?}");
    let refused = blockmux(["ctl", &control, "log", "audit=loud"]);
    assert!(text(&refused.stderr).contains("`loud` is not a log level"));
}

#[test]
fn a_daemon_started_by_root_serves_as_another_user_who_owns_its_files() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (state, image) = (directory.path().join("state"), directory.path().join("image"));
    std::fs::write(&image, [7; 4096]).unwrap();
    let control = format!("unix:{}", directory.path().join("control").display());
    let volume = format!("file:{}", image.display());
    std::fs::create_dir(&state).unwrap();
    let args = ["--user", "nobody", "--state", state.to_str().unwrap(), "--control", &control, &volume];
    for _ in 0..2 {
        let daemon = serve_with(&[], &args);
        let tasks = format!("/proc/{}/task", daemon.pid().as_raw_nonzero());
        for task in std::fs::read_dir(tasks).unwrap() {
            let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
            assert_eq!(field("Uid:"), "65534\t65534\t65534\t65534", "{status}");
            assert_eq!(field("CapPrm:"), "0000000000000000", "{status}");
        }
        assert_eq!(std::fs::metadata(&state).unwrap().uid(), 65534);
        let status = blockmux(["ctl", &control, "status"]);
        assert!(status.status.success(), "{}", text(&status.stderr));
        let info = blockmux(["info", &daemon.url()]);
        assert!(info.status.success(), "{}", text(&info.stderr));
    }
    let unknown = blockmux(["serve", "mem:1m", "--user", "no-such-user"]);
    assert!(text(&unknown.stderr).contains("no user has the name `no-such-user`"));
}

#[test]
fn completions_and_manual_pages_cover_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&blockmux(["completions", shell]).stdout);
        assert!(script.contains("discover") && script.contains("log-format"), "{shell}");
    }
    let directory = tempfile::tempdir().unwrap();
    let written = blockmux(["man-pages", directory.path().to_str().unwrap()]);
    assert!(written.status.success(), "{}", text(&written.stderr));
    let page = std::fs::read_to_string(directory.path().join("blockmux-serve.1")).unwrap();
    assert!(page.contains(".TH blockmux-serve 1") || page.contains(".TH serve 1"), "{page}");
    assert!(directory.path().join("blockmux-ctl-resize.1").exists());
}
