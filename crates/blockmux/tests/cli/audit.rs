//! The audit log: logins, refusals, changes of reservations, and logouts.

use crate::allow::{connect_from, server};
use crate::api::exchange;
use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{GOOD, RESERVATION_CONFLICT, RawIscsi};
use crate::reload::Configured;
use rustix::process::Signal;
use std::fs::{self, Permissions};
use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::thread;

const INITIATOR: &str = "iqn.2026-11.com.example:host";

impl Daemon {
    /// The next line of the log with `part` in it, without its time, which is checked.
    pub(crate) fn log_line(&mut self, part: &str) -> String {
        let mut line = String::new();
        while !line.contains(part) {
            line.clear();
            assert_ne!(self.stderr.read_line(&mut line).unwrap(), 0, "ended without a line with `{part}`");
        }
        let (time, rest) = line.split_once(' ').unwrap();
        let digits = |c: char| if c.is_ascii_digit() { '0' } else { c };
        assert_eq!(time.chars().map(digits).collect::<String>(), "0000-00-00T00:00:00.000Z", "{line}");
        rest.trim().to_owned()
    }
}

/// The target or subsystem that a URL names.
fn target_of(url: &str) -> &str {
    url.split('/').nth(3).unwrap()
}

#[test]
fn nbd_sessions_are_logged_with_time_export_address_and_reason() {
    let mut daemon = Daemon::serve(&["disk0=mem:1m"]);
    let client = RawClient::connect(&daemon.socket());
    let line = daemon.log_line("login");
    assert!(line.starts_with("INFO login protocol=\"nbd\" peer=\""), "{line}");
    assert!(line.ends_with("initiator=\"-\" target=\"disk0\""), "{line}");
    drop(client);
    let line = daemon.log_line("logout");
    assert!(line.starts_with("INFO logout: the client closed the connection"), "{line}");
    assert!(line.ends_with("target=\"disk0\""), "{line}");
    let unknown = daemon.url().replace("/disk0", "/other");
    assert!(!blockmux(["info", &unknown]).status.success());
    let line = daemon.log_line("refused");
    assert!(line.starts_with("WARN login refused: no such export protocol=\"nbd\""), "{line}");
    assert!(line.ends_with("target=\"other\""), "{line}");
}

#[test]
fn iscsi_sessions_and_reservations_are_logged_with_initiator_names() {
    let mut daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iscsi").remove(0);
    let mut session = RawIscsi::login(&url, INITIATOR);
    let target = target_of(&url);
    let who = format!("initiator=\"{INITIATOR}\" target=\"{target}\"");
    let line = daemon.log_line("login");
    assert!(line.starts_with("INFO login protocol=\"iscsi\" peer=\"127.0.0.1:"), "{line}");
    assert!(line.ends_with(&who), "{line}");
    assert_eq!(session.reserve_out(0, 0, [0, 7], 0), GOOD);
    let line = daemon.log_line("reservation");
    assert!(line.starts_with("INFO reservation changed: LUN 0: REGISTER protocol="), "{line}");
    assert!(line.ends_with(&who), "{line}");
    assert_eq!(session.reserve_out(1, 1, [8, 0], 0), RESERVATION_CONFLICT);
    let line = daemon.log_line("reservation");
    assert!(line.starts_with("WARN reservation change refused: LUN 0: PERSISTENT RESERVE"), "{line}");
    session.log_out();
    let line = daemon.log_line("logout");
    assert!(line.starts_with("INFO logout: the initiator logged out protocol=\"iscsi\""), "{line}");
    assert!(line.ends_with(&who), "{line}");
    assert!(!blockmux(["info", &url.replace("disk0", "other")]).status.success());
    let line = daemon.log_line("refused");
    let begin = "WARN login refused: peer requested an unknown target protocol=\"iscsi\"";
    assert!(line.starts_with(begin), "{line}");
    assert!(line.ends_with(&format!("target=\"{}\"", target.replace("disk0", "other"))), "{line}");
}

#[test]
fn iser_sessions_are_logged_with_their_own_protocol() {
    let mut daemon = Daemon::serve(&["mem:1m", "--iser", "127.0.0.1:0"]);
    let url = daemon.urls_of("iser").remove(0);
    assert!(blockmux(["info", &url]).status.success());
    let line = daemon.log_line("login");
    assert!(line.starts_with("INFO login protocol=\"iser\" peer=\"127.0.0.1:"), "{line}");
    let line = daemon.log_line("logout");
    assert!(line.starts_with("INFO logout: the initiator logged out protocol=\"iser\""), "{line}");
}

#[test]
fn nvme_sessions_are_logged_with_host_names() {
    let mut daemon = Daemon::serve(&["mem:1m", "--nvme-tcp", "127.0.0.1:0"]);
    let url = daemon.urls_of("nvme+tcp").remove(0);
    assert!(blockmux(["info", &url]).status.success());
    let line = daemon.log_line("login");
    assert!(line.starts_with("INFO login protocol=\"nvme-tcp\" peer=\"127.0.0.1:"), "{line}");
    assert!(line.contains("initiator=\"nqn."), "{line}");
    let target = target_of(&url);
    assert!(line.ends_with(&format!("target=\"{target}\"")), "{line}");
    let line = daemon.log_line("logout");
    assert!(line.starts_with("INFO logout: the host shut its controller down"), "{line}");
    assert!(!blockmux(["info", &url.replace("disk0", "other")]).status.success());
    let line = daemon.log_line("refused");
    assert!(line.starts_with("WARN login refused: Connect names no subsystem of this port"), "{line}");
    assert!(line.ends_with(&format!("target=\"{}\"", target.replace("disk0", "other"))), "{line}");
}

#[test]
fn a_connection_that_ends_before_its_login_is_logged_with_the_protocol_that_it_began() {
    for (listener, over_tcp, over_rdma) in
        [("--nvme-tcp", "nvme-tcp", "nvme-rdma"), ("--iscsi", "iscsi", "iser")]
    {
        let mut daemon = Daemon::serve(&["mem:1m", listener, "127.0.0.1:0"]);
        let scheme = over_tcp.replace('-', "+");
        let url = daemon.urls_of(&scheme).remove(0);
        let address = url.split('/').nth(2).unwrap();
        // A PDU of no known type; an MPA request of no known revision and too much private data.
        for (protocol, begin) in
            [(over_tcp, &[0xff; 128][..]), (over_rdma, b"MPA ID Req Frame\x40\xff\xff\xff")]
        {
            let mut peer = TcpStream::connect(address).unwrap();
            peer.write_all(begin).unwrap();
            let line = daemon.log_line("refused");
            assert!(line.contains(&format!("protocol=\"{protocol}\" peer=\"127.0.0.1:")), "{line}");
        }
    }
}

#[test]
fn sessions_are_listed_with_their_counters_until_they_end() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control").display().to_string();
    let args = ["mem:1m", "--iscsi", "127.0.0.1:0", "--control", &format!("unix:{socket}")];
    let mut daemon = Daemon::serve(&args);
    let sessions = |more: &[&str]| {
        let output = blockmux([&["ctl", &*socket, "sessions"], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(sessions(&[]), "no session is logged in\n");
    let mut iscsi = RawIscsi::login(&daemon.urls_of("iscsi")[0], INITIATOR);
    daemon.log_line("login");
    let mut nbd = RawClient::connect(&daemon.socket());
    assert_eq!(nbd.write(0, 0, &[1; 4096]), 0);
    let listed: serde_json::Value = serde_json::from_str(&sessions(&["--json"])).unwrap();
    let [first, second] = &listed.as_array().unwrap()[..] else { panic!("two: {listed}") };
    assert_eq!((&first["protocol"], &first["initiator"]), (&"iscsi".into(), &INITIATOR.into()));
    assert!(first["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{first}");
    assert_eq!((&second["protocol"], &second["target"]), (&"nbd".into(), &"disk0".into()));
    assert_eq!((&second["writes"], &second["written_bytes"]), (&1.into(), &4096.into()));
    let said = sessions(&[]);
    assert!(said.contains(&format!("  initiator  {INITIATOR}\n")), "{said}");
    assert!(said.contains("  writes     1 (4 KiB)\n"), "{said}");
    iscsi.log_out();
    drop((iscsi, nbd));
    daemon.log_line("logout");
    daemon.log_line("logout");
    assert_eq!(sessions(&[]), "no session is logged in\n");
}

#[test]
fn an_area_can_be_turned_off() {
    let mut daemon = Daemon::serve(&["mem:1m", "--log", "audit=off,protocol=debug"]);
    drop(RawClient::connect(&daemon.socket()));
    let mut line = String::new();
    daemon.stderr.read_line(&mut line).unwrap();
    assert!(line.contains("DEBUG connection closed"), "{line}");
    let refused =
        std::process::Command::new(BLOCKMUX).args(["--log", "x=y", "info", "mem:1m"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("`x` is not a log area"));
}

#[test]
fn a_login_has_its_line_beside_refusals_of_thousands_of_addresses() {
    let mut daemon = Daemon::serve(&["mem:1m", "--nbd", "127.0.0.1:0?allow=127.0.0.0/24"]);
    let portal = server(&daemon.urls_of("nbd")[0]);
    let pid = daemon.pid();
    let stderr = &mut daemon.stderr;
    let said = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut said = String::new();
            stderr.read_to_string(&mut said).map(|_| said)
        });
        for nth in 0..4200_u32 {
            let [_, _, high, low] = nth.to_be_bytes();
            let mut stranger = connect_from([127, 1 + high, low, 1], portal);
            assert_eq!(stranger.read(&mut [0]).unwrap_or(0), 0);
        }
        drop(RawClient::over(connect_from([127, 0, 0, 9], portal)));
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        reader.join().unwrap().unwrap()
    });
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(said.contains("INFO login protocol=\"nbd\" peer=\"127.0.0.9:"), "{said}");
    assert!(said.contains("WARN connection refused: "), "{said}");
    assert!(said.contains(" more like this in 10 seconds protocol=\"nbd\" peer=\"127."), "{said}");
}

#[test]
fn each_change_is_one_line_with_its_caller_and_what_it_changed_also_if_it_is_refused() {
    let mut controlled = Controlled::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let target = "iqn.2026-11.blockmux:a";
    let uid = rustix::process::getuid().as_raw();
    for (args, what, changes) in [
        (&["resize", "a", "16m"][..], "resize a to 16777216 bytes", "~ volume a: size: 8388608 -> 16777216"),
        (&["add", "b=mem:1m"], "add b=mem:1m", "+ volume b: mem:1m"),
        (&["limit", "b", "iops=100"], "limit b", "+ volume b: limits: iops added: 100"),
        (&["limit", "b", "iops=200"], "limit b", "~ volume b: limits: iops: 100 -> 200"),
        (&["attach", "b", target, "5"], &format!("attach b to {target}"), &format!("+ {target} 5: b")),
        (&["detach", target, "5"], &format!("detach 5 from {target}"), &format!("- {target} 5")),
        (&["alua", target, "standby"], &format!("change {target}"), "standby"),
        (&["remove", "b"], "remove b", "- volume b"),
    ] {
        controlled.said(args);
        let line = controlled.daemon.log_line("config change");
        let begin = format!("INFO config changed: {what} protocol=\"api\" peer=\"uid {uid}, process ");
        assert!(line.starts_with(&begin) && line.contains(" subject=\"-\" token=\"-\" changes=\""), "{line}");
        assert!(line.replace('\\', "").contains(changes), "{line}");
    }
    assert!(!controlled.ctl(&["remove", "b"]).status.success());
    let line = controlled.daemon.log_line("config change");
    assert!(line.starts_with("WARN config change refused: remove b protocol=\"api\" peer=\"uid "), "{line}");
    assert!(line.contains("reason=\"no volume has the name `b`"), "{line}");
    // A query is no change.
    controlled.status();
    controlled.said(&["remove", "a"]);
    assert!(controlled.daemon.log_line("config change").contains(": remove a "));
}

#[test]
fn reloads_are_lines_with_the_signal_or_the_address_of_the_client() {
    let files = tempfile::tempdir().unwrap();
    let token = files.path().join("token");
    fs::write(&token, "a-token-for-tests").unwrap();
    fs::set_permissions(&token, Permissions::from_mode(0o600)).unwrap();
    let config = |size: &str| {
        format!(
            "nbd = ['unix:a.sock']\napi = '127.0.0.1:0'\napi_token_file = 'token'\n[[volume]]\nname = 'a'\n\
             spec = 'mem:{size}'\n"
        )
    };
    let mut served = Configured::serve_in(files, &config("1m"));
    served.write(&config("2m"));
    served.daemon.signal(Signal::HUP);
    let line = served.daemon.log_line("config change");
    let change = "changes=\"~ volume a: spec: \\\"mem:1m\\\" -> \\\"mem:2m\\\"\"";
    assert_eq!(
        line,
        format!(
            "INFO config changed: reload protocol=\"api\" peer=\"SIGHUP\" subject=\"-\" token=\"-\" {change}"
        )
    );
    served.write(&config("2x"));
    served.daemon.signal(Signal::HUP);
    let line = served.daemon.log_line("config change");
    assert!(
        line.starts_with("WARN config change refused: reload protocol=\"api\" peer=\"SIGHUP\""),
        "{line}"
    );
    assert!(line.contains(" reason=\"the config was not reloaded and nothing has changed: "), "{line}");
    served.write(&config("4m"));
    let api = served.daemon.json["api"].as_str().unwrap().to_owned();
    let place = api.trim_start_matches("http://").trim_end_matches('/');
    let head = "Authorization: Bearer a-token-for-tests\r\nConnection: close\r\n";
    let request = format!("POST /v1/config/reload HTTP/1.1\r\nHost: x\r\n{head}\r\n");
    assert_eq!(exchange(TcpStream::connect(place).unwrap(), request.as_bytes()).0, 200);
    let line = served.daemon.log_line("config change");
    assert!(line.starts_with("INFO config changed: reload protocol=\"api\" peer=\"127.0.0.1:"), "{line}");
    assert!(line.contains(" token=\"default\" "), "{line}");
}
