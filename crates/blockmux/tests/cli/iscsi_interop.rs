//! Standard iSCSI initiators with the iSCSI target.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, PATTERNS, blockmux, half_empty_file, has, qemu_io, succeed, text};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn serve(args: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::serve_only(&[&["--iscsi", "127.0.0.1:0"], args].concat());
    let url = daemon.urls_of("iscsi").remove(0);
    (daemon, url)
}

/// `iscsi://host:port`
fn portal(url: &str) -> String {
    let authority = url.split('/').nth(2).unwrap();
    format!("iscsi://{}", authority.rsplit('@').next().unwrap())
}

#[test]
fn the_tools_of_libiscsi_describe_targets() {
    if !has("iscsi-ls") {
        return;
    }
    let (_daemon, url) = serve(&["a=mem:64m", "B2=null:1g"]);
    assert!(url.ends_with("/iqn.2026-11.blockmux:a/0"), "{url}");
    let list = succeed(Command::new("iscsi-ls").args(["--show-luns", &portal(&url)]));
    let mut targets: Vec<_> = list.lines().filter_map(|line| line.strip_prefix("Target:")).collect();
    targets.sort_unstable();
    let address = portal(&url).replace("iscsi://", "");
    let named = |name: &str| format!("iqn.2026-11.blockmux:{name} Portal:{address},1");
    assert_eq!(targets, [named("a"), named("b2")]);
    assert_eq!(list.lines().filter(|line| line.trim_start().starts_with("Lun:0 ")).count(), 2, "{list}");
    // With an unneeded secret, libiscsi sends its names in both stages of the login.
    let offering = portal(&url).replace("iscsi://", "iscsi://me%asecretoftwelve@");
    assert_eq!(succeed(Command::new("iscsi-ls").arg(offering)).lines().count(), 2);
    let inquiry = succeed(Command::new("iscsi-inq").arg(&url));
    assert!(inquiry.contains("BLOCKMUX"), "{inquiry}");
    let capacity = succeed(Command::new("iscsi-readcapacity16").arg(&url));
    assert!(capacity.contains("Total size:67108864"), "{capacity}");
}

#[test]
fn a_volume_has_the_same_identity_after_a_restart_and_another_than_its_neighbours() {
    if !has("iscsi-inq") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| format!("{name}=file:{}?size=1m", directory.path().join(name).display());
    let identities = || {
        let (daemon, _) = serve(&[&file("a"), &file("b")]);
        let inquire = |url: &String| succeed(Command::new("iscsi-inq").args(["-e", "1", "-c", "128", url]));
        daemon.urls_of("iscsi").iter().map(inquire).collect::<Vec<_>>()
    };
    let first = identities();
    assert_ne!(first[0], first[1]);
    assert_eq!(first, identities());
}

#[test]
fn qemu_img_converts_and_compares() {
    if !has_qemu_iscsi() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = half_empty_file(directory.path(), 16 << 20);
    let (_daemon, url) = serve(&["mem:16m"]);
    let info = succeed(Command::new("qemu-img").args(["info", &url]));
    assert!(info.contains("(16777216 bytes)"), "{info}");
    let formats = ["-n", "-f", "raw", "-O", "raw"];
    succeed(Command::new("qemu-img").arg("convert").args(formats).arg(&source).arg(&url));
    let formats = ["-f", "raw", "-F", "raw"];
    succeed(Command::new("qemu-img").arg("compare").args(formats).arg(&source).arg(&url));
    let map = succeed(Command::new("qemu-img").args(["map", "--output=json", "-f", "raw", &url]));
    let map: Value = serde_json::from_str(&map).unwrap();
    let zeroes: Vec<_> = map.as_array().unwrap().iter().map(|extent| extent["zero"] == true).collect();
    assert_eq!(zeroes, [false, true, false, true]);
}

#[test]
fn qemu_io_verifies_patterns() {
    if !has_qemu_iscsi() {
        return;
    }
    let (_daemon, url) = serve(&["mem:16m"]);
    let said = succeed(&mut qemu_io(&url, &PATTERNS));
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn a_read_only_volume_is_write_protected() {
    if !has_qemu_iscsi() {
        return;
    }
    let (_daemon, url) = serve(&["mem:1m", "--read-only"]);
    let mut qemu_io = Command::new("qemu-io");
    let output = qemu_io.args(["-f", "raw", "-c", "write 0 4k"]).arg(&url).output().unwrap();
    assert!(!output.status.success(), "{}", text(&output.stdout));
    let read = succeed(Command::new("qemu-io").args(["-r", "-f", "raw", "-c", "read -P 0 0 4k"]).arg(&url));
    assert!(!read.contains("failed"), "{read}");
}

#[test]
fn an_initiator_with_the_secret_logs_in_and_sees_its_luns() {
    if !has("iscsi-ls") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = guarded(directory.path());
    let (mut daemon, url) = serve(&["a=mem:1m", "b=mem:2m", "--config", config.to_str().unwrap()]);
    let target = "iqn.2026-11.com.example:guarded";
    assert!(url.starts_with("iscsi://user@") && url.contains(&format!("/{target}/0?")), "{url}");
    let inquire = |user: &[(&str, &str)], initiator: &str, lun: u16| {
        let url = format!("{}/{target}/{lun}", portal(&url));
        let mut inq = Command::new("iscsi-readcapacity16");
        inq.args(["-i", initiator, &url]).envs(user.iter().copied()).output().unwrap()
    };
    let user = [("LIBISCSI_CHAP_USERNAME", "user"), ("LIBISCSI_CHAP_PASSWORD", "initiator-secret")];
    let mutual = [
        user[0],
        user[1],
        ("LIBISCSI_CHAP_TARGET_USERNAME", "target"),
        ("LIBISCSI_CHAP_TARGET_PASSWORD", "the-target-secret"),
    ];
    let is_in = |output: &Output| output.status.success() && text(&output.stdout).contains("Total size:");
    assert!(is_in(&inquire(&user, "iqn.1993-08.org.debian:01:one", 0)));
    assert!(is_in(&inquire(&mutual, "iqn.1993-08.org.debian:01:one", 5)));
    assert!(!is_in(&inquire(&[], "iqn.1993-08.org.debian:01:one", 0)), "without a word");
    let wrong = [user[0], ("LIBISCSI_CHAP_PASSWORD", "another-secret-x")];
    assert!(!is_in(&inquire(&wrong, "iqn.1993-08.org.debian:01:one", 0)), "a wrong secret");
    daemon.wait_for_line("sent a wrong CHAP response");
    assert!(!is_in(&inquire(&user, "iqn.1993-08.org.debian:01:two", 0)), "another's secret");
    // The second initiator needs no authentication and sees one LUN.
    assert!(is_in(&inquire(&[], "iqn.1993-08.org.debian:01:three", 5)));
    assert!(!is_in(&inquire(&[], "iqn.1993-08.org.debian:01:three", 0)), "a masked LUN");
}

#[test]
fn discovery_requires_authentication_if_configured() {
    if !has("iscsi-ls") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let secret = secret(directory.path(), "discovery", "discovery-secret");
    let config = directory.path().join("blockmux.toml");
    let guard = format!("[iscsi_discovery]\nCHAP_N = 'looks'\nsecret_file = '{secret}'\n");
    std::fs::write(&config, guard).unwrap();
    let (mut daemon, url) = serve(&["a=mem:1m", "--config", config.to_str().unwrap()]);
    let list = |credentials: &str| {
        let portal = portal(&url).replace("iscsi://", &format!("iscsi://{credentials}"));
        Command::new("iscsi-ls").arg(portal).output().unwrap()
    };
    let found = list("looks%discovery-secret@");
    assert!(text(&found.stdout).contains("Target:iqn.2026-11.blockmux:a"), "{}", text(&found.stdout));
    assert!(!text(&list("").stdout).contains("Target:"), "without a word");
    assert!(!text(&list("looks%another-secret-x@").stdout).contains("Target:"), "a wrong secret");
    daemon.wait_for_line("sent a wrong CHAP response");
    // Blockmux's discovery authenticates as well; the target itself requires nothing.
    let ours = format!("{}?secret_file={secret}", portal(&url).replace("iscsi://", "iscsi://looks@"));
    assert!(text(&blockmux(["discover", &ours]).stdout).contains("iqn.2026-11.blockmux:a"));
    succeed(Command::new("iscsi-inq").arg(&url));
}

#[test]
fn initiators_follow_a_configured_redirect() {
    if !has("iscsi-readcapacity16") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, format!("[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:m'\n{text}"))
            .unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (_there, url) = serve(&["mem:3m", "--config", &config("there", "luns = { 0 = 'disk0' }")]);
    let there = portal(&url).replace("iscsi://", "");
    let cases = [("temporary", "Total size:3145728"), ("permanent", "Target moved permanently(258)")];
    for (kind, expected) in cases {
        let moved = format!(
            "luns = {{ 0 = 'disk0' }}\nredirect = '{there}'\nredirect_kind = '{kind}'\n\
             [[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:stays'\nluns = {{ 0 = 'disk0' }}"
        );
        let (_here, url) = serve(&["mem:1m", "--config", &config(kind, &moved)]);
        assert!(url.ends_with(":stays/0"), "{url}");
        let url = format!("{}/iqn.2026-11.com.example:m/0", portal(&url));
        let output = Command::new("iscsi-readcapacity16").arg(&url).output().unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        // libiscsi follows a temporary redirect, and reports a permanent one to its user.
        assert!(said.contains(expected), "{kind}: {said}");
    }
}

/// A file with a secret, and its path.
fn secret(directory: &Path, name: &str, secret: &str) -> String {
    let path = directory.join(format!("{name}.secret"));
    std::fs::write(&path, format!("{secret}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

/// A config with a target that requires CHAP of one initiator, none of another, and refuses all
/// others; writes the secret files.
fn guarded(directory: &Path) -> std::path::PathBuf {
    let config = directory.join("blockmux.toml");
    let text = format!(
        "
        [[iscsi_target]]
        TargetName = 'iqn.2026-11.com.example:guarded'
        luns = {{ 0 = 'a', 5 = 'b' }}
        [[iscsi_target.acl]]
        InitiatorName = 'iqn.1993-08.org.debian:01:one'
        CHAP_N = 'user'
        secret_file = '{}'
        target_CHAP_N = 'target'
        target_secret_file = '{}'
        [[iscsi_target.acl]]
        InitiatorName = 'iqn.1993-08.org.debian:01:three'
        luns = [5]
        ",
        secret(directory, "initiator", "initiator-secret"),
        secret(directory, "target", "the-target-secret")
    );
    std::fs::write(&config, text).unwrap();
    config
}

#[test]
fn a_secret_that_others_can_read_is_refused_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let config = guarded(directory.path());
    let secret = directory.path().join("initiator.secret");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = blockmux(["serve", "a=mem:1m", "b=mem:1m", "--config", config.to_str().unwrap()]);
    let expected = format!(
        "blockmux: {}:8: secret file {}: others can read or write it; run chmod 600 on it\n",
        config.display(),
        secret.display()
    );
    assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
}

#[test]
fn a_port_in_use_by_another_program_is_reported_with_advice() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = blockmux(["serve", "mem:1m", "--iscsi", &address]);
    let expected = format!(
        "blockmux: cannot listen on {address}: another program listens there; stop it, or use another port, such as \
         --iscsi 127.0.0.1:0\n"
    );
    assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
}

#[test]
fn a_command_gets_its_url_in_the_environment() {
    let script = format!("echo $BLOCKMUX_ISCSI_URL; {BLOCKMUX} --version");
    let output = blockmux(["serve", "a=mem:1m", "--run", &script]);
    let said = text(&output.stdout);
    assert!(said.starts_with("iscsi://127.0.0.1:") && said.contains("/iqn.2026-11.blockmux:a/0\n"), "{said}");
}

#[test]
fn a_new_login_of_an_initiator_ends_its_old_connection() {
    let (_daemon, url) = serve(&["a=mem:1m", "--cores", "2"]);
    let address = portal(&url).replace("iscsi://", "");
    let text = b"InitiatorName=iqn.1993-08.org.debian:01:a\0TargetName=iqn.2026-11.blockmux:a\0";
    // Logins from operational negotiation to full feature phase, each from the same initiator port.
    let mut login = vec![0x43, 0x87, 0, 0, 0, 0, 0, text.len() as u8, 0x80, 1, 2, 3, 4, 5];
    login.resize(48, 0);
    login.extend(text);
    login.resize(login.len().next_multiple_of(4), 0);
    let log_in = || {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(&login).unwrap();
        let mut header = [0; 48];
        stream.read_exact(&mut header).unwrap();
        assert_eq!((header[0], header[36]), (0x23, 0), "a login response of success");
        let len = usize::from(u16::from_be_bytes([header[6], header[7]])).next_multiple_of(4);
        stream.read_exact(&mut vec![0; len]).unwrap();
        (stream, u16::from_be_bytes([header[14], header[15]]))
    };
    let (mut first, first_tsih) = log_in();
    let (mut second, second_tsih) = log_in();
    assert_ne!(first_tsih, second_tsih);
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "the old connection has ended");
    // NOP-Out, immediate, with a tag.
    let mut ping = [0; 48];
    (ping[0], ping[1], ping[19]) = (0x40, 0x80, 9);
    ping[20..24].fill(0xff);
    second.write_all(&ping).unwrap();
    let mut pong = [0; 48];
    second.read_exact(&mut pong).unwrap();
    assert_eq!((pong[0], pong[19]), (0x20, 9));
}

/// Whether QEMU's iSCSI module, a separate package, is installed; if not, prints a skip.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn has_qemu_iscsi() -> bool {
    if !has("qemu-img") || !has("qemu-io") {
        return false;
    }
    let help = succeed(Command::new("qemu-img").arg("--help"));
    let speaks = help.split_whitespace().any(|word| word == "iscsi");
    if !speaks {
        println!("skipped: QEMU without its iSCSI module, Debian package qemu-block-extra");
    }
    speaks
}

#[test]
fn discovery_reports_that_a_target_requires_a_secret() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("blockmux.toml");
    let text = format!(
        "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:closed'\nluns = {{ 0 = 'a' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'user'\nsecret_file = '{}'\n",
        secret(directory.path(), "initiator", "initiator-secret")
    );
    std::fs::write(&config, text).unwrap();
    let (_daemon, url) = serve(&["a=mem:1m", "--config", config.to_str().unwrap()]);
    let said = |url: &str| text_of_discovery(url);
    let closed = said(&portal(&url));
    assert!(
        closed.ends_with("/iqn.2026-11.com.example:closed/0  requires a user and a secret\n"),
        "{closed}"
    );
    let user = |name: &str| {
        let file = directory.path().join("initiator.secret");
        format!("{}?secret_file={}", portal(&url).replace("://", &format!("://{name}@")), file.display())
    };
    assert!(said(&user("nobody")).contains("  requires another user or secret\n"));
    assert!(said(&user("user")).contains("  1 MiB  BLOCKMUX"));
}

/// libiscsi offers only MD5.
#[test]
fn a_target_refuses_chap_algorithms_that_are_not_configured() {
    let directory = tempfile::tempdir().unwrap();
    let secret = secret(directory.path(), "initiator", "initiator-secret");
    let config = directory.path().join("blockmux.toml");
    let text = format!(
        "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:closed'\nluns = {{ 0 = 'a' }}\n\
         CHAP_A = ['SHA3-256', 'SHA-256']\n[[iscsi_target.acl]]\nCHAP_N = 'user'\nsecret_file = '{secret}'\n"
    );
    std::fs::write(&config, text).unwrap();
    let (mut daemon, url) = serve(&["a=mem:1m", "--config", config.to_str().unwrap()]);
    let info = |more: &str| {
        let portal = portal(&url).replace("://", "://user@");
        blockmux(["info", &format!("{portal}/iqn.2026-11.com.example:closed/0?secret_file={secret}{more}")])
    };
    assert!(info("").status.success() && info("&chap_a=SHA-256").status.success());
    assert!(!info("&chap_a=SHA1,MD5").status.success());
    daemon.wait_for_line("offered no CHAP algorithm that this target accepts");
    if has("iscsi-readcapacity16") {
        let url = format!("{}/iqn.2026-11.com.example:closed/0", portal(&url));
        let user = [("LIBISCSI_CHAP_USERNAME", "user"), ("LIBISCSI_CHAP_PASSWORD", "initiator-secret")];
        assert!(!Command::new("iscsi-readcapacity16").arg(url).envs(user).output().unwrap().status.success());
        daemon.wait_for_line("offered no CHAP algorithm that this target accepts");
    }
}

fn text_of_discovery(url: &str) -> String {
    let output = blockmux(["discover", url]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn iscsi_perf_reads_for_a_second_without_an_error() {
    if !has("iscsi-perf") {
        return;
    }
    let (_daemon, url) = serve(&["mem:64m"]);
    for pattern in [&["-r"][..], &[]] {
        let said = succeed(
            Command::new("iscsi-perf").args(["-m", "32", "-b", "8", "-t", "1"]).args(pattern).arg(&url),
        );
        let average = said.split("iops average ").nth(1).and_then(|rest| rest.split_whitespace().next());
        assert!(average.is_some_and(|iops| iops.parse::<u64>().is_ok_and(|iops| iops > 0)), "{said}");
    }
}
