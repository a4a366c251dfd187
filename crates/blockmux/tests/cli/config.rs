//! Effects of config file and command line, and their warnings.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use rustix::process::{Pid, Signal};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn secret(directory: &Path, name: &str, content: &str) -> String {
    let path = directory.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

#[test]
fn relative_paths_in_a_config_file_are_relative_to_the_file() {
    let files = tempfile::tempdir().unwrap();
    let (there, here) = (files.path().join("etc"), files.path().join("cwd"));
    [&there, &here].into_iter().for_each(|directory| fs::create_dir(directory).unwrap());
    secret(&there, "secret", "a secret of twelve");
    let config = there.join("blockmux.toml");
    let content = "nbd = ['unix:nbd.sock']\niscsi = ['127.0.0.1:0']\nstate = 'state'\ncontrol = 'unix:run/control'\n\
                   [[volume]]\nname = 'a'\nspec = 'file:disk.img?size=1m'\nprotocols = ['nbd', 'iscsi']\n\
                   [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'a' }\n[[iscsi_target.acl]]\nCHAP_N = 'u'\n\
                   secret_file = 'secret'\n";
    fs::write(&config, content).unwrap();
    fs::create_dir(there.join("run")).unwrap();
    fs::set_permissions(there.join("run"), fs::Permissions::from_mode(0o700)).unwrap();
    let serve = || {
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "--config", "../etc/blockmux.toml", "--run", "echo $BLOCKMUX_NBD_URL"]);
        command.current_dir(&here).output().unwrap()
    };
    let output = serve();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("etc/nbd.sock"), "{}", text(&output.stdout));
    assert!(there.join("disk.img").exists() && !here.join("disk.img").exists());
    // A file that exists in the current directory only is not created again.
    fs::rename(there.join("disk.img"), here.join("disk.img")).unwrap();
    let output = serve();
    let said = text(&output.stderr);
    assert!(said.contains("but a disk.img in the current directory: paths in a config file"), "{said}");
    assert_eq!((output.status.code(), there.join("disk.img").exists()), (Some(2), false));
}

#[test]
fn naming_one_listener_warns_of_protocols_that_are_not_served() {
    let files = tempfile::tempdir().unwrap();
    let told = |args: &[&str]| {
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "mem:1m"]).args(args).env("XDG_STATE_HOME", files.path());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert_eq!(lines.filter(|line| line == "ready").take(1).count(), 1);
        // Standard error is complete when the process ends.
        rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        text(&child.wait_with_output().unwrap().stderr)
    };
    let said = told(&["--nbd", ":0"]);
    let expected = "not served: iSCSI, NVMe/TCP, because the command line names other listeners; add --iscsi or --nvme-tcp\n";
    assert!(said.ends_with(expected) && said.lines().count() == 1, "{said}");
    assert_eq!(told(&["--nbd", ":0", "--iser", ":0", "--nvme-tcp", ":0"]), "");
}

#[test]
fn a_server_without_exports_is_reported() {
    let files = tempfile::tempdir().unwrap();
    let control = format!("unix:{}", files.path().join("control").display());
    let daemon = Daemon::serve(&["a=mem:1m", "--control", &control]);
    let output = blockmux(["discover", &daemon.url()]);
    assert_eq!((text(&output.stdout).lines().count(), text(&output.stderr)), (1, String::new()));
    assert!(blockmux(["ctl", &control, "remove", "a"]).status.success());
    let output = blockmux(["discover", &daemon.url()]);
    let said = text(&output.stderr);
    assert!(
        output.status.success() && output.stdout.is_empty() && said.contains("lists no exports"),
        "{said}"
    );
}

#[test]
fn all_paths_are_found_with_a_separate_discovery_secret() {
    let files = tempfile::tempdir().unwrap();
    let (looks, comes) = (
        secret(files.path(), "looks", "secret of discovery"),
        secret(files.path(), "comes", "secret of the target"),
    );
    let config = files.path().join("blockmux.toml");
    let content = format!(
        "iscsi = ['127.0.0.1:0', '127.0.0.2:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n\
         [iscsi_discovery]\nCHAP_N = 'looks'\nsecret_file = '{looks}'\nCHAP_A = ['SHA-256']\n\
         [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = {{ 0 = 'a' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'comes'\nsecret_file = '{comes}'\n"
    );
    fs::write(&config, content).unwrap();
    let daemon = Daemon::serve_only(&["--config", config.to_str().unwrap()]);
    let url = daemon.urls_of("iscsi").remove(0);
    let plain = format!("{url}&paths=all");
    let output = blockmux(["info", &plain]);
    assert!(!output.status.success(), "discovery takes another secret");
    let with = format!("{plain}&discovery_user=looks&discovery_secret_file={looks}");
    let output = blockmux(["info", &with]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let portal = with.replace("/iqn.a/0", "");
    let found = blockmux(["discover", &portal]);
    assert!(text(&found.stdout).contains("1 MiB"), "{}{}", text(&found.stdout), text(&found.stderr));
    // Algorithms are restricted for discovery as for the target, also with discovery's user only.
    let (_, place) = url.split_once('@').unwrap();
    let host = place.split('/').next().unwrap();
    let discovery = format!("iscsi://{host}?discovery_user=looks&discovery_secret_file={looks}");
    for of_url in [discovery, with] {
        let succeeds = |chap_a: &str| {
            let url = format!("{of_url}&chap_a={chap_a}");
            let command = if url.contains("/iqn.a/0") { "info" } else { "discover" };
            blockmux([command, &url]).status.success()
        };
        assert_eq!((succeeds("SHA-256"), succeeds("MD5,SHA-256")), (true, true), "{of_url}");
        assert!(!succeeds("MD5"), "{of_url}: discovery takes SHA-256 alone");
    }
}

#[test]
fn a_ram_volume_larger_than_memory_is_exported_with_a_warning() {
    let installed = fs::read_to_string("/proc/meminfo").unwrap();
    let kib = installed.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = kib.trim().trim_end_matches(" kB").parse().unwrap();
    let said = |size: u64| {
        let output = blockmux(["serve", &format!("mem:{size}k"), "--nbd", ":0", "--run", "true"]);
        (output.status.code(), text(&output.stderr))
    };
    // A control group may allow less than the machine has.
    let (status, said_of_twice) = said(2 * kib);
    if status == Some(0) {
        assert!(said_of_twice.contains("is larger than this machine's memory"), "{said_of_twice}");
    } else {
        assert!(said_of_twice.contains(" of memory; use at most "), "{said_of_twice}");
    }
    assert_eq!(said(1024), (Some(0), String::new()));
}

#[test]
fn a_user_with_the_home_of_another_keeps_reservations_in_a_private_directory_with_a_warning() {
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "mem:1m", "--nbd", ":0", "--run", "true"]);
    command.env("HOME", "/").env_remove("XDG_STATE_HOME");
    let own = rustix::process::geteuid();
    // No directory is created before the first reservation.
    let user = if own.is_root() { 4_000_017 } else { own.as_raw() };
    if own.is_root() {
        command.uid(user).gid(user);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => panic!("{BLOCKMUX} has to be for every user to run: {error}"),
    };
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("/ is not the home of this user: reservations are kept in "), "{said}");
    assert!(said.contains(&format!("/blockmux-{user};")) && said.lines().count() == 1, "{said}");
}

#[test]
fn another_listening_program_is_reported_only_if_there_is_one() {
    let bound = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&bound, &"127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
    let address = SocketAddr::try_from(getsockname(&bound).unwrap()).unwrap();
    let said = |address: &str| text(&blockmux(["serve", "mem:1m", "--nbd", address, "--run", "true"]).stderr);
    let of_bound = said(&address.to_string());
    assert!(of_bound.contains("the port is in use, but no program listens there"), "{of_bound}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let listening = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listening.local_addr().unwrap().port();
    let of_any = said(&format!("0.0.0.0:{port}"));
    assert!(of_any.contains("maybe at one address only"), "{of_any}");
    assert!(of_any.contains(&format!("`ss -ltnp sport = :{port}` names it")), "{of_any}");
    let of_file = said(&format!("unix:{}", file.path().display()));
    assert!(of_file.contains("a file that is not a socket has this path; name another path"), "{of_file}");
    let daemon = Daemon::serve(&["mem:1m"]);
    let of_daemon = said(&format!("unix:{}", daemon.socket().display()));
    assert!(of_daemon.contains("another program listens there"), "{of_daemon}");
}

#[test]
fn check_names_absent_files_and_open_listeners_for_people_and_programs() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("b.toml");
    std::fs::write(
        &config,
        "nbd = ['0.0.0.0:10809', '127.0.0.1:10810', '0.0.0.0:10811?allow=192.0.2.0/24']\n\
         [[volume]]\nname = 'a'\nspec = 'slice:0:file:absent.img'\n\
         [[volume]]\nname = 'b'\nspec = 'file:new.img?size=1m'\n",
    )
    .unwrap();
    let config = config.display().to_string();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let output = blockmux(["check", &config]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    for expected in [
        "0.0.0.0:10809 can be reached from other machines without authentication; ",
        &format!("volume `a`: {} does not exist\n", path("absent.img")),
        &format!("volume `b`: {} does not exist; a start creates it, without data\n", path("new.img")),
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert_eq!(said.lines().count(), 3, "{said}");
    let output = blockmux(["check", "--json", &config]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["volumes"], &report["listeners"]), (&2.into(), &3.into()));
    assert_eq!(report["open_listeners"], serde_json::json!(["0.0.0.0:10809"]));
    assert_eq!(
        report["paths"],
        serde_json::json!([
            { "volume": "a", "path": path("absent.img"), "found": "absent" },
            { "volume": "b", "path": path("new.img"), "found": "absent" },
        ])
    );
    assert_eq!(report["warnings"].as_array().unwrap().len(), 3, "{report}");
    std::fs::write(&config, "ndb = []\n").unwrap();
    let output = blockmux(["check", "--json", &config]);
    let error: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["error"]["code"], "invalid");
    assert_eq!(output.status.code(), Some(2));
}
