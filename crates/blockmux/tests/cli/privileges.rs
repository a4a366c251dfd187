//! A daemon that was started by root and has dropped its capabilities.
//!
//! The tests need root. Without it, every test here prints a line that begins with `skipped: ` and
//! ends.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, has, succeed, text};
use crate::raw_client::RawClient;
use rustix::fs::{Mode, chmod};
use std::os::unix::fs::chown;
use std::process::{Command, Stdio};

/// Whether root runs the tests; if not, prints that the test is skipped.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: needs root");
    }
    is_root
}

/// A server at a Unix socket that root can connect to without capabilities.
fn server() -> (Daemon, String) {
    let server = Daemon::serve(&["mem:1m"]);
    let url = format!("nbd+unix:///disk0?socket={}&reconnect=2s", server.socket().display());
    (server, url)
}

/// Gives a server's socket to another user.
fn leave_to_another(server: &Daemon) {
    chmod(server.socket(), Mode::RUSR | Mode::WUSR).unwrap();
    chown(server.socket(), Some(ANOTHER), Some(ANOTHER)).unwrap();
}

fn copy_from(daemon: &Daemon) -> std::process::Output {
    let to = format!("file:{}?size=1m", daemon.directory.path().join("copied").display());
    blockmux(["copy", "--overwrite", &daemon.url(), &to])
}

fn permitted(daemon: &Daemon) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid().as_raw_nonzero())).unwrap();
    status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap().trim().to_owned()
}

#[test]
fn a_volume_at_another_users_unix_socket_is_exported_with_the_one_required_capability() {
    if !is_root() {
        return;
    }
    let (server, url) = server();
    leave_to_another(&server);
    for volume in [url.clone(), format!("delay:1us:{url}")] {
        let gateway = Daemon::serve(&[&volume, "--iscsi", "127.0.0.1:0"]);
        let copied = copy_from(&gateway);
        assert!(copied.status.success(), "{volume}: {}", text(&copied.stderr));
        assert_eq!(permitted(&gateway), "0000000000000002", "CAP_DAC_OVERRIDE alone");
    }
}

#[test]
fn no_thread_has_a_capability_or_can_gain_one() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let daemon = Daemon::serve(&[&format!("log:{}:mem:64m", log.display())]);
    let tasks = format!("/proc/{}/task", daemon.pid().as_raw_nonzero());
    let mut names = Vec::new();
    for task in std::fs::read_dir(tasks).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let name = field("Name:");
        assert_eq!((field("CapPrm:"), field("NoNewPrivs:")), ("0".repeat(16), "1".into()), "{name}");
        names.push(name);
    }
    assert!(names.iter().any(|name| name == "records"), "{names:?}");
}

/// The lines that begin with `Seccomp:` in the status of all threads of a process.
fn filters(process: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("status")).unwrap()
    };
    let line = |status: String| status.lines().find(|line| line.starts_with("Seccomp:")).map(str::to_owned);
    tasks.map(status).filter_map(line).collect()
}

#[test]
fn the_soft_limit_of_locked_memory_does_not_keep_cores_without_capabilities_from_starting() {
    if !is_root() || !has("prlimit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let listener = format!("unix:{}", directory.path().join("socket").display());
    // Less than the rings of two cores; the hard limit stays.
    let mut command = Command::new("prlimit");
    command.args(["--memlock=65536:", BLOCKMUX, "serve", "--json", "mem:1m", "--cores", "2"]);
    command.args(["--nbd", &listener]).env("XDG_STATE_HOME", directory.path().join("state"));
    let daemon = Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(RawClient::connect(&daemon.socket()).read(0, 512), [0; 512]);
}

#[test]
fn every_thread_of_a_daemon_is_denied_unused_system_calls_and_a_command_of_run_is_not() {
    let own = filters("self");
    let Some(own) = own.first() else {
        println!("skipped: the kernel has no filters of system calls");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let daemon = Daemon::serve(&[&format!("log:{}:mem:64m", log.display())]);
    let all = filters(&daemon.pid().as_raw_nonzero().to_string());
    assert!(all.len() > 2 && all.iter().all(|line| line == "Seccomp:\t2"), "{all:?}");
    let of_command = blockmux(["serve", "mem:1m", "--run", "grep Seccomp: /proc/self/status"]);
    assert_eq!(text(&of_command.stdout).trim(), own);
}

#[test]
fn a_connection_that_is_not_permitted_is_logged_and_finally_fails_io() {
    if !is_root() || !has("setpriv") {
        return;
    }
    let (server, url) = server();
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("socket").display());
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-all", "--inh-caps", "-all", crate::program::BLOCKMUX]);
    command.args(["serve", "--json", "--nbd", &socket, &url]);
    let mut gateway = Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    leave_to_another(&server);
    let copied = copy_from(&gateway);
    assert!(!copied.status.success(), "{}", text(&copied.stdout));
    gateway.wait_for_line("cannot connect: Permission denied");
    gateway.wait_for_line("volume is out of reach: Permission denied");
}

#[test]
fn a_volume_that_needs_a_dropped_capability_is_refused_with_advice() {
    if !is_root() {
        return;
    }
    let (server, url) = server();
    leave_to_another(&server);
    let directory = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", directory.path().join("control").display());
    let _daemon = Daemon::serve(&["mem:1m", "--control", &control]);
    for volume in [&url, "aoe://lo/e0.1"] {
        let refused = blockmux(["ctl", &control, "add", volume]);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("--keep-privileges"), "{volume}: {said}");
    }
    let _daemon = Daemon::serve(&["mem:1m", "--control", &format!("{control}2"), "--keep-privileges"]);
    succeed(Command::new(crate::program::BLOCKMUX).args(["ctl", &format!("{control}2"), "add", &url]));
}

/// A user ID without a user.
const ANOTHER: u32 = 4_000_017;

#[test]
fn a_check_as_the_user_of_the_daemon_says_so_if_that_user_cannot_read_a_file() {
    if !is_root() {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    chmod(files.path(), Mode::from_raw_mode(0o755)).unwrap();
    let (config, token) = (files.path().join("b.toml"), files.path().join("token"));
    let text_of = "api = '127.0.0.1:0'\napi_token_file = 'token'\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    std::fs::write(&config, text_of).unwrap();
    std::fs::write(&token, "twelve-bytes").unwrap();
    chmod(&token, Mode::RUSR | Mode::WUSR).unwrap();
    let check = |user: &[&str]| {
        let output = blockmux([&["check"], user, &[config.to_str().unwrap()]].concat());
        text(&output.stdout) + &text(&output.stderr)
    };
    assert!(check(&[]).contains("1 volume"));
    let said = check(&["--user", "nobody"]);
    assert!(said.contains("b.toml:2: --api-token-file ") && said.contains("Permission denied"), "{said}");
    assert!(said.ends_with("(checked as the user nobody, who runs the daemon)\n"), "{said}");
    // What is wrong for every user is said as it is.
    std::fs::write(&config, text_of.replace("mem:1m", "mem:x")).unwrap();
    assert_eq!(check(&["--user", "nobody"]), check(&[]));
}
