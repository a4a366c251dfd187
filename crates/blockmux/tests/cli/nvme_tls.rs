//! NVMe/TCP with TLS: initiator and target with each other and with OpenSSL's programs.

use crate::daemon::Daemon;
use crate::program::{blockmux, half_empty_file, has, succeed, text};
use blockmux_proto::nvme::auth::psk::{ConfiguredPsk, TlsPsk};
use blockmux_proto::nvme::nqn::Nqn;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

const HOST: &str = "nqn.2026-11.test:host";
const OTHER: &str = "nqn.2026-11.test:other";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
const KEY_256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const KEY_384: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

/// As nvme-cli makes them.
const SECRET: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const CTRL_SECRET: &str = "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:";

/// A daemon with a subsystem that one host reaches with a key, and another without.
struct Guarded {
    daemon: Daemon,
    files: TempDir,
}

impl Guarded {
    fn serve(key: &str, treq: &str) -> Guarded {
        let files = tempfile::tempdir().unwrap();
        let config = format!(
            "nvme_tcp = ['127.0.0.1:0']\nnvme_tcp_treq = '{treq}'\n\
             [[volume]]\nname = 'disk'\nspec = 'mem:16m'\n\
             [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'disk' }}\nhosts = ['{OTHER}']\n\
             [[nvme_subsystem.host]]\nhostnqn = '{HOST}'\ntls_key_file = '{}'\n",
            key_file(files.path(), "key", key).display()
        );
        let path = files.path().join("blockmux.toml");
        fs::write(&path, config).unwrap();
        Guarded { daemon: Daemon::serve_only(&["--config", path.to_str().unwrap()]), files }
    }

    /// Config for a host, optionally with a key.
    fn url(&self, host: &str, key: Option<&str>) -> String {
        let url = format!("{}?hostnqn={host}", self.daemon.nvme_place());
        match key {
            None => url,
            Some(key) => format!("{url}&tls_key_file={}", key_file(self.files.path(), "own", key).display()),
        }
    }

    fn address(&self) -> SocketAddr {
        address_in(&self.daemon.nvme_place())
    }
}

fn address_in(url: &str) -> SocketAddr {
    url.split('/').nth(2).unwrap().parse().unwrap()
}

fn key_file(directory: &Path, name: &str, key: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, key).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A daemon whose one host proves who it is; its URL, for that host and with its files.
fn proving(files: &Path, address: &str) -> (Daemon, String) {
    let [own, controllers] = [("own-secret", SECRET), ("ctrl-secret", CTRL_SECRET)]
        .map(|(name, secret)| key_file(files, name, secret).display().to_string());
    let config = format!(
        "nvme_tcp = ['{address}']\n[[volume]]\nname = 'disk'\nspec = 'mem:16m'\n\
         uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'\nshared = true\n\
         [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'disk' }}\n\
         [[nvme_subsystem.host]]\nhostnqn = '{HOST}'\ndhchap_secret_file = '{own}'\n\
         dhchap_ctrl_secret_file = '{controllers}'\ndhchap_dhgroup = 'ffdhe2048'\n"
    );
    let path = files.join("proving.toml");
    fs::write(&path, config).unwrap();
    let daemon = Daemon::serve_only(&["--config", path.to_str().unwrap()]);
    let url = format!("{}?hostnqn={HOST}&dhchap_secret_file={own}", daemon.nvme_place());
    (daemon, url)
}

/// What `blockmux info` says that fails.
fn complaint(url: &str) -> String {
    let output = blockmux(["info", url]);
    assert!(!output.status.success(), "{url}");
    text(&output.stderr)
}

#[test]
fn a_host_with_a_key_must_use_tls() {
    for key in [KEY_256, KEY_384] {
        let guarded = Guarded::serve(key, "not required");
        let url = guarded.url(HOST, Some(key));
        let source = half_empty_file(guarded.files.path(), 16 << 20);
        let back = guarded.files.path().join("back");
        succeed(&mut command(&["copy", &format!("file:{}", source.display()), &url]));
        succeed(&mut command(&["copy", &url, &format!("file:{}", back.display())]));
        assert!(fs::read(source).unwrap() == fs::read(back).unwrap());
        assert!(complaint(&guarded.url(HOST, None)).contains("and its TLS key, if any, as ?tls_key_file=PATH"));
        // A host without a key connects without TLS, and cannot use the key of another host.
        succeed(&mut command(&["info", &guarded.url(OTHER, None)]));
        assert!(complaint(&guarded.url(OTHER, Some(key))).contains("unknown_psk_identity"));
    }
}

#[test]
fn secure_channel_concatenation_generates_a_tls_key_again_after_a_restart_of_the_daemon() {
    let files = tempfile::tempdir().unwrap();
    let (daemon, url) = proving(files.path(), "127.0.0.1:0");
    let address = address_in(&url).to_string();
    let source = half_empty_file(files.path(), 16 << 20);
    let from = format!("file:{}", source.display());
    let mutual = format!("{url}&dhchap_ctrl_secret_file={}", files.path().join("ctrl-secret").display());
    for url in [&url, &mutual] {
        for more in ["", "&connections=3", "&dhchap_hash=hmac(sha256)&dhchap_dhgroup=ffdhe2048"] {
            succeed(&mut command(&["copy", "--verify", &from, &format!("{url}&concat=on{more}")]));
        }
    }
    let said = complaint(&format!("{url}&concat=on&dhchap_dhgroup=ffdhe3072"));
    assert!(said.contains("controller rejected this host in DH-HMAC-CHAP"), "{said}");
    // The channels of a gateway have the key of the previous daemon, which the new one lacks.
    let gateway = format!("gateway={mutual}&concat=on");
    let gateway = Daemon::serve(&[&gateway, "--nbd", "127.0.0.1:0"]);
    let nbd = &gateway.urls_of("nbd")[0];
    succeed(&mut command(&["copy", "--verify", &from, nbd]));
    drop(daemon);
    let (daemon, _) = proving(files.path(), &address);
    succeed(&mut command(&["copy", "--verify", &from, nbd]));
    drop(gateway);
    drop(daemon);
}

#[test]
fn without_authentication_secure_channel_concatenation_fails() {
    let files = tempfile::tempdir().unwrap();
    let open = Daemon::serve(&["mem:1m", "--nvme-tcp", "127.0.0.1:0"]);
    let secret = key_file(files.path(), "own-secret", SECRET);
    let url = &open.urls_of("nvme+tcp")[0];
    let said = complaint(&format!("{url}?concat=on&dhchap_secret_file={}", secret.display()));
    assert!(said.contains("no key for a secure channel") && said.contains("remove concat"), "{said}");
}

#[test]
fn both_sides_report_a_wrong_key() {
    let mut guarded = Guarded::serve(KEY_256, "not required");
    // Another key has another identity in version 1 and the same one in version 0.
    let other = KEY_256.replace(":01:", ":00:");
    let said = complaint(&guarded.url(HOST, Some(&other)));
    assert!(
        said.contains("decrypt_error: it has a different key of that name; check tls_key_file"),
        "{said}"
    );
    guarded.daemon.wait_for_line("has a TLS key different from ours named NVMe0R01");
    let said = complaint(&guarded.url(HOST, Some(KEY_384)));
    assert!(said.contains("unknown_psk_identity: it does not know the key"), "{said}");
    guarded.daemon.wait_for_line("offered TLS keys that are unknown here: NVMe1R02");
}

#[test]
fn a_connection_without_tls_is_refused_where_tls_is_required() {
    let mut guarded = Guarded::serve(KEY_256, "required");
    let url = guarded.url(HOST, Some(KEY_256));
    succeed(&mut command(&["info", &url]));
    let discovery = format!("nvme+tcp://{}?{}", guarded.address(), url.split_once('?').unwrap().1);
    assert!(succeed(&mut command(&["discover", &discovery])).contains(SUBSYSTEM));
    assert!(!complaint(&guarded.url(OTHER, None)).is_empty());
    guarded.daemon.wait_for_line("connected without TLS, which is required here");
}

#[test]
fn a_server_without_tls_is_reported() {
    let guarded = Guarded::serve(KEY_256, "not required");
    let plain = Daemon::serve(&["mem:1m", "--nvme-tcp", "127.0.0.1:0"]);
    let own = guarded.url(HOST, Some(KEY_256));
    let url = format!("{}?{}", plain.nvme_place(), own.split_once('?').unwrap().1);
    let said = complaint(&url);
    assert!(said.contains("TLS") && said.contains("check tls_key_file"), "{said}");
}

#[test]
fn an_incomplete_tls_handshake_does_not_block_others() {
    let guarded = Guarded::serve(KEY_256, "required");
    let mut silent: Vec<TcpStream> =
        (0..50).map(|_| TcpStream::connect(guarded.address()).unwrap()).collect();
    for (nth, stream) in silent.iter_mut().enumerate() {
        stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1][..nth % 9]).unwrap();
    }
    succeed(&mut command(&["info", &guarded.url(HOST, Some(KEY_256))]));
}

#[test]
fn openssl_as_a_client_initializes_a_connection() {
    if !has("openssl") {
        return;
    }
    let guarded = Guarded::serve(KEY_256, "required");
    for psk in psks(KEY_256) {
        let mut client = Command::new("openssl");
        client.args(["s_client", "-quiet", "-tls1_3", "-connect", &guarded.address().to_string()]);
        client.args(["-psk_identity", &psk.identity, "-psk", &hex(psk.secret())]);
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = client.stdin.take().unwrap();
        stdin.write_all(&IC_REQ).unwrap();
        let mut answer = [0; 128];
        client.stdout.take().unwrap().read_exact(&mut answer).unwrap();
        assert_eq!((answer[0], answer[2], answer[4]), (1, 128, 128), "{}", psk.identity);
        client.kill().unwrap();
        client.wait().unwrap();
    }
}

#[test]
fn the_initiator_uses_tls_with_openssl_as_the_server() {
    if !has("openssl") {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let key = key_file(files.path(), "key", KEY_256);
    for psk in psks(KEY_256) {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut server = Command::new("openssl");
        server.args(["s_server", "-quiet", "-tls1_3", "-nocert", "-accept", &address.to_string()]);
        server.args(["-psk_identity", &psk.identity, "-psk", &hex(psk.secret())]);
        let mut server = server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let url = format!("nvme+tcp://{address}/{SUBSYSTEM}?hostnqn={HOST}&tls_key_file={}", key.display());
        while TcpStream::connect(address).is_err() {
            std::thread::yield_now();
        }
        let mut client = command(&["info", &url]).stderr(Stdio::null()).spawn().unwrap();
        let mut request = [0; 128];
        server.stdout.take().unwrap().read_exact(&mut request).unwrap();
        assert_eq!((request[0], request[2], request[4]), (0, 128, 128), "{}", psk.identity);
        for child in [&mut client, &mut server] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(crate::program::BLOCKMUX);
    command.args(args);
    command
}

fn psks(key: &str) -> Vec<TlsPsk> {
    let (host, subsystem) = (Nqn::new(HOST).unwrap(), Nqn::new(SUBSYSTEM).unwrap());
    ConfiguredPsk::parse(key).unwrap().retained(&host).tls_psks(&host, &subsystem)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The PDU of that name, with nothing asked for.
const IC_REQ: [u8; 128] = {
    let mut pdu = [0; 128];
    (pdu[2], pdu[4]) = (128, 128);
    pdu
};
