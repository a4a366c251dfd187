//! NBD with TLS: client and server with each other and with nbdkit, QEMU, libnbd and nbd-client.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, PATTERNS, blockmux, half_empty_file, has, succeed, text};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A directory of certificates as nbdkit, libnbd and QEMU have it, and a file of keys.
pub(crate) struct Credentials {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

/// A flaw of a certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    Expired,
    OtherHost,
}

impl Credentials {
    /// Valid certificates.
    pub(crate) fn new() -> Credentials {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = named("Test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let credentials =
            Credentials { directory: tempfile::tempdir().unwrap(), issuer: Issuer::new(params, key) };
        fs::write(credentials.path("ca-cert.pem"), authority).unwrap();
        credentials.certify("server", "storage", Flaw::None);
        credentials.certify("client", "backup", Flaw::None);
        let keys = format!("alice:{ALICE}\nbob:{BOB}\n");
        private(&credentials.path("keys.psk"), keys.as_bytes());
        credentials
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn directory(&self) -> String {
        self.directory.path().display().to_string()
    }

    /// Replaces certificate and key of one side.
    pub(crate) fn certify(&self, side: &str, name: &str, flaw: Flaw) {
        let hosts = match flaw {
            Flaw::OtherHost => vec!["other.example".to_owned()],
            _ => vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "storage.example".to_owned()],
        };
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name = named(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![match side {
            "server" => ExtendedKeyUsagePurpose::ServerAuth,
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        if flaw == Flaw::Expired {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.path(&format!("{side}-cert.pem")), certificate.pem()).unwrap();
        private(&self.path(&format!("{side}-key.pem")), key.serialize_pem().as_bytes());
    }

    /// Parameters of a URL for a client with certificates.
    fn by_certificates(&self) -> String {
        format!("tls-certificates={}", self.directory())
    }

    /// Parameters of a URL for a client with a key.
    fn by_key(&self) -> String {
        format!("tls-psk-file={}", self.shown("keys.psk"))
    }

    /// Serves 16 MiB as `disk` on a loopback port, with these arguments.
    fn serve(&self, args: &[&str]) -> Daemon {
        Daemon::serve_only(&[&["disk=mem:16m", "--nbd", "127.0.0.1:0"], args].concat())
    }

    fn serve_by_certificates(&self, more: &[&str]) -> Daemon {
        self.serve(&[&["--nbd-tls-certificates", &self.directory()], more].concat())
    }

    fn serve_by_keys(&self, more: &[&str]) -> Daemon {
        self.serve(&[&["--nbd-tls-psk", &self.shown("keys.psk")], more].concat())
    }

    /// `--object` of a QEMU program with these certificates or keys.
    fn of_qemu(&self, kind: &str, endpoint: &str, more: &str) -> String {
        format!("tls-creds-{kind},id=tls0,endpoint={endpoint},dir={}{more}", self.directory())
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// Writes a file that other users cannot read.
fn private(path: &Path, content: &[u8]) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// `127.0.0.1:PORT` of a daemon.
fn place(daemon: &Daemon) -> String {
    let url = daemon.url();
    let authority = url.split('/').nth(2).unwrap();
    authority.rsplit('@').next().unwrap().to_owned()
}

fn port(daemon: &Daemon) -> String {
    place(daemon).split(':').next_back().unwrap().to_owned()
}

/// A URL of the daemon's export with other credentials.
fn url(daemon: &Daemon, user: &str, parameters: &str) -> String {
    format!("nbds://{user}{}/disk?{parameters}", place(daemon))
}

fn copy(from: &str, to: &str) -> Output {
    blockmux(["copy", "--overwrite", "--verify", from, to])
}

fn copies_there_and_back(url: &str) {
    let files = tempfile::tempdir().unwrap();
    let source = format!("file:{}", half_empty_file(files.path(), SIZE).display());
    let back = files.path().join("back.img");
    for (from, to) in [(&*source, url), (url, &format!("file:{}", back.display()))] {
        let output = copy(from, to);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{from} to {to}");
    }
    assert!(fs::read(back).unwrap() == fs::read(files.path().join("source.img")).unwrap());
}

/// The message of `blockmux info`, which must fail.
fn complaint(url: &str) -> String {
    let output = blockmux(["info", url]);
    assert!(!output.status.success(), "{url}");
    text(&output.stderr)
}

fn program(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(args);
    command
}

#[test]
fn client_and_server_use_tls_with_certificates_and_with_keys() {
    let credentials = Credentials::new();
    let mut daemon = credentials.serve_by_certificates(&["--nbd-tls-subject", "CN=backup"]);
    assert!(daemon.url().starts_with("nbds://127.0.0.1:"), "{}", daemon.url());
    for more in ["", "&connections=3", "&tls-hostname=storage.example", "&ktls=off"] {
        copies_there_and_back(&format!("{}{more}", daemon.url()));
    }
    daemon.wait_for_line("initiator=\"CN=backup\" target=\"disk\"");
    let listed =
        succeed(&mut program(BLOCKMUX, &["discover", &url(&daemon, "", &credentials.by_certificates())]));
    assert!(listed.contains("disk"), "{listed}");
    let mut daemon = credentials.serve_by_keys(&[]);
    assert!(daemon.url().starts_with("nbds://alice@127.0.0.1:"), "{}", daemon.url());
    copies_there_and_back(&daemon.url());
    daemon.wait_for_line("initiator=\"alice\" target=\"disk\"");
    copies_there_and_back(&url(&daemon, "bob@", &credentials.by_key()));
}

#[test]
fn at_a_unix_socket_the_certificate_is_for_localhost_or_the_given_name() {
    let credentials = Credentials::new();
    let daemon = Daemon::serve(&["disk=mem:16m", "--nbd-tls-certificates", &credentials.directory()]);
    assert!(daemon.url().starts_with("nbds+unix:///disk?socket="), "{}", daemon.url());
    copies_there_and_back(&daemon.url());
    copies_there_and_back(&format!("{}&tls-hostname=storage.example", daemon.url()));
    let said = complaint(&format!("{}&tls-hostname=other.example", daemon.url()));
    assert!(said.contains("it is for another host name"), "{said}");
}

#[test]
fn a_connection_without_tls_is_refused_where_tls_is_required() {
    let credentials = Credentials::new();
    let mut daemon = credentials.serve_by_keys(&[]);
    let plain = format!("nbd://{}/disk", place(&daemon));
    let said = complaint(&plain);
    assert!(said.contains("requires TLS") && said.contains("with tls-certificates=DIR"), "{said}");
    assert_eq!(said.matches("nbds:// instead of nbd://").count(), 1, "{said}");
    assert!(!blockmux(["discover", &format!("nbd://{}", place(&daemon))]).status.success());
    if has("nbdinfo") {
        assert!(!program("nbdinfo", &[&plain]).output().unwrap().status.success());
    }
    copies_there_and_back(&daemon.url());
    daemon.wait_for_line("login");
}

#[test]
fn where_tls_is_optional_both_urls_are_announced_and_work() {
    let credentials = Credentials::new();
    let daemon = credentials.serve_by_certificates(&["--nbd-tls", "on"]);
    let (by_tls, plain) = (daemon.urls_of("nbds"), daemon.urls_of("nbd"));
    assert_eq!((by_tls.len(), plain.len()), (1, 1));
    copies_there_and_back(&by_tls[0]);
    copies_there_and_back(&plain[0]);
}

#[test]
fn a_server_without_tls_is_refused_by_a_client_that_requires_tls() {
    let credentials = Credentials::new();
    let daemon = credentials.serve(&[]);
    let said = complaint(&url(&daemon, "", &credentials.by_certificates()));
    assert!(
        said.contains("server has no TLS") && said.contains("use nbd:// to connect without TLS"),
        "{said}"
    );
}

/// libnbd did not verify the certificate on some paths (CVE-2024-7383).
#[test]
fn an_invalid_server_certificate_is_refused() {
    for (flaw, expected) in
        [(Flaw::Expired, "it has expired"), (Flaw::OtherHost, "it is for another host name")]
    {
        let credentials = Credentials::new();
        credentials.certify("server", "storage", flaw);
        let daemon = credentials.serve_by_certificates(&[]);
        let by_certificates = credentials.by_certificates();
        let said = complaint(&url(&daemon, "", &by_certificates));
        assert!(said.contains(expected) && said.contains("check tls-certificates, tls-hostname"), "{said}");
        // The server verifies a client that does not verify it.
        copies_there_and_back(&url(&daemon, "", &format!("{by_certificates}&tls-verify-peer=0")));
    }
    let (credentials, stranger) = (Credentials::new(), Credentials::new());
    let daemon = credentials.serve_by_certificates(&[]);
    let said = complaint(&url(&daemon, "", &stranger.by_certificates()));
    assert!(said.contains("no authority that is trusted here signed it"), "{said}");
    let said = complaint(&url(&daemon, "", "tls-verify-peer=1"));
    assert!(said.contains("no authority that is trusted here signed it"), "the system's: {said}");
}

#[test]
fn an_invalid_client_certificate_is_refused_and_logged() {
    let (credentials, stranger) = (Credentials::new(), Credentials::new());
    // Clients without a certificate, and with one of another authority.
    fs::copy(credentials.path("ca-cert.pem"), stranger.path("ca-cert.pem")).unwrap();
    let mut daemon = credentials.serve_by_certificates(&["--nbd-tls-subject", "CN=backup"]);
    assert!(!complaint(&url(&daemon, "", &stranger.by_certificates())).is_empty());
    daemon.wait_for_line("has a certificate that is not accepted: no authority that is trusted here");
    fs::remove_file(stranger.path("client-cert.pem")).unwrap();
    assert!(!complaint(&url(&daemon, "", &stranger.by_certificates())).is_empty());
    daemon.wait_for_line("sent no certificate, which is required here");
    credentials.certify("client", "intruder", Flaw::None);
    let said = complaint(&url(&daemon, "", &credentials.by_certificates()));
    assert!(
        said.contains("NBD_REP_ERR_POLICY") && said.contains("not among those that are allowed"),
        "{said}"
    );
    daemon.wait_for_line("initiator=\"CN=intruder\"");
    credentials.certify("client", "backup", Flaw::None);
    copies_there_and_back(&url(&daemon, "", &credentials.by_certificates()));
    // Without verification every client is served.
    let daemon = credentials.serve_by_certificates(&["--nbd-tls-verify-peer", "false"]);
    copies_there_and_back(&url(&daemon, "", &stranger.by_certificates()));
}

#[test]
fn unknown_users_and_wrong_keys_are_refused_and_logged() {
    let credentials = Credentials::new();
    let mut daemon = credentials.serve_by_keys(&[]);
    private(&credentials.path("other.psk"), format!("mallory:{ALICE}\nalice:{BOB}\n").as_bytes());
    let by_key = format!("tls-psk-file={}", credentials.shown("other.psk"));
    let said = complaint(&url(&daemon, "mallory@", &by_key));
    assert!(said.contains("unknown_psk_identity") && said.contains("check tls-psk-file"), "{said}");
    daemon.wait_for_line("offered TLS keys that are unknown here: mallory");
    let said = complaint(&url(&daemon, "alice@", &by_key));
    assert!(said.contains("decrypt_error: it has a different key of that name"), "{said}");
    daemon.wait_for_line("has a TLS key different from ours named alice");
    let said = complaint(&url(&daemon, "carol@", &by_key));
    assert!(said.contains("has no key for user \"carol\""), "{said}");
    // A client with certificates, and one with a key of a server with certificates.
    assert!(!complaint(&url(&daemon, "", &credentials.by_certificates())).is_empty());
    daemon.wait_for_line("offered no TLS key");
    let daemon = credentials.serve_by_certificates(&[]);
    assert!(!complaint(&url(&daemon, "alice@", &credentials.by_key())).is_empty());
}

#[test]
fn readable_key_files_and_revocation_lists_are_refused() {
    let credentials = Credentials::new();
    let start = |args: &[&str]| {
        let output = blockmux([&["serve", "mem:1m", "--nbd", "127.0.0.1:0"], args].concat());
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let (keys, directory) = (credentials.shown("keys.psk"), credentials.directory());
    let readable = fs::Permissions::from_mode(0o640);
    fs::set_permissions(credentials.path("keys.psk"), readable.clone()).unwrap();
    assert!(
        start(&["--nbd-tls-psk", &keys]).contains("keys.psk: others can read or write it; run chmod 600")
    );
    fs::set_permissions(credentials.path("server-key.pem"), readable).unwrap();
    assert!(start(&["--nbd-tls-certificates", &directory]).contains("server-key.pem: others can read"));
    credentials.certify("server", "storage", Flaw::None);
    fs::set_permissions(credentials.path("ca-cert.pem"), fs::Permissions::from_mode(0o666)).unwrap();
    assert!(start(&["--nbd-tls-certificates", &directory]).contains("ca-cert.pem: others can write to it"));
    fs::set_permissions(credentials.path("ca-cert.pem"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(credentials.path("ca-crl.pem"), "").unwrap();
    assert!(
        start(&["--nbd-tls-certificates", &directory])
            .contains("certificate revocation lists are not supported")
    );
    assert!(start(&["--nbd-tls", "require"]).contains("there are no credentials"));
}

#[test]
fn the_config_file_has_the_tls_settings_and_protected_exports_are_open_nowhere_else() {
    let credentials = Credentials::new();
    let config = credentials.path("blockmux.toml");
    let serve = |more: &str| {
        let text = format!(
            "nbd = ['127.0.0.1:0']\nnbd_tls_certificates = ['.']\nnbd_tls_subject = ['CN=backup']\n{more}\
             \n[[volume]]\nname = 'disk'\nspec = 'mem:16m'\n"
        );
        fs::write(&config, text).unwrap();
        ["serve", "--json", "--config", config.to_str().unwrap()].map(str::to_owned)
    };
    let args = serve("");
    let daemon = Daemon::serve_only(&["--config", &args[3]]);
    assert_eq!(daemon.json["exports"][0]["urls"].as_array().unwrap().len(), 1, "NBD alone: {}", daemon.json);
    copies_there_and_back(&daemon.url());
    drop(daemon);
    let said = text(&blockmux(serve("iscsi = ['127.0.0.1:0']")).stderr);
    assert!(said.contains("nbd at 127.0.0.1:") && said.contains("restricts access to it"), "{said}");
    // Without verification everybody can connect, so access is not restricted.
    let both = "iscsi = ['127.0.0.1:0']\nnbd_tls_verify_peer = false";
    let text_of = fs::read_to_string(&config).unwrap();
    let open =
        text_of.replace("iscsi = ['127.0.0.1:0']", both).replace("nbd_tls_subject = ['CN=backup']\n", "");
    fs::write(&config, open).unwrap();
    let daemon = Daemon::serve_only(&["--config", &args[3]]);
    assert!(!daemon.urls_of("iscsi").is_empty() && !daemon.urls_of("nbds").is_empty());
}

#[test]
fn the_certificate_is_chosen_by_sni() {
    let (first, second) = (Credentials::new(), Credentials::new());
    second.certify("server", "other", Flaw::OtherHost);
    let daemon = first.serve(&[
        "--nbd-tls-certificates",
        &first.directory(),
        "--nbd-tls-certificates",
        &second.directory(),
        "--nbd-tls-verify-peer",
        "false",
    ]);
    copies_there_and_back(&url(
        &daemon,
        "",
        &format!("{}&tls-hostname=storage.example", first.by_certificates()),
    ));
    copies_there_and_back(&url(
        &daemon,
        "",
        &format!("{}&tls-hostname=other.example", second.by_certificates()),
    ));
}

// Clients of other projects.

/// Python of the system, which has libnbd's module.
fn nbdsh(script: &str) -> Command {
    let mut nbdsh = program("nbdsh", &["-c", script]);
    nbdsh.env("PATH", "/usr/bin:/bin");
    nbdsh
}

#[test]
fn libnbd_connects_with_tls() {
    if !has("nbdinfo") || !has("nbdcopy") {
        return;
    }
    let credentials = Credentials::new();
    let files = tempfile::tempdir().unwrap();
    let source = half_empty_file(files.path(), SIZE);
    for daemon in [credentials.serve_by_certificates(&[]), credentials.serve_by_keys(&[])] {
        let url = daemon.url();
        let info = succeed(&mut program("nbdinfo", &[&url]));
        assert!(info.contains("with TLS") && info.contains("structured packets"), "{info}");
        assert!(succeed(&mut program("nbdinfo", &["--list", &url])).contains("disk"));
        assert!(succeed(&mut program("nbdinfo", &["--map", &url])).contains("hole"));
        let back = files.path().join("back.img");
        succeed(&mut program("nbdcopy", &[source.to_str().unwrap(), &url]));
        succeed(&mut program("nbdcopy", &[&url, back.to_str().unwrap()]));
        assert!(fs::read(&back).unwrap() == fs::read(&source).unwrap());
    }
}

#[test]
fn libnbd_upgrades_to_optional_tls_and_is_refused_without_a_certificate() {
    if !has("nbdsh") {
        return;
    }
    let credentials = Credentials::new();
    let daemon = credentials.serve_by_certificates(&[]);
    let script = |tls: &str, certificates: &str| {
        format!(
            "h.set_tls(nbd.{tls})\nh.set_tls_certificates({certificates:?})\nh.set_export_name(\"disk\")\n\
             h.connect_tcp(\"127.0.0.1\", {:?})\nassert h.get_tls_negotiated()\nh.pwrite(b\"x\" * 512, 0)\n\
             assert h.pread(512, 0) == b\"x\" * 512\nh.shutdown()",
            port(&daemon)
        )
    };
    for tls in ["TLS_ALLOW", "TLS_REQUIRE"] {
        succeed(&mut nbdsh(&script(tls, &credentials.directory())));
    }
    let stranger = Credentials::new();
    fs::copy(credentials.path("ca-cert.pem"), stranger.path("ca-cert.pem")).unwrap();
    fs::remove_file(stranger.path("client-cert.pem")).unwrap();
    for (tls, directory) in [("TLS_DISABLE", &credentials), ("TLS_REQUIRE", &stranger)] {
        let output = nbdsh(&script(tls, &directory.directory())).output().unwrap();
        assert!(!output.status.success(), "{tls}");
    }
}

#[test]
fn qemu_connects_with_tls() {
    if !has("qemu-io") || !has("qemu-img") {
        return;
    }
    let credentials = Credentials::new();
    for (kind, more, daemon) in [
        ("x509", "", credentials.serve_by_certificates(&["--nbd-tls-subject", "CN=backup"])),
        ("psk", ",username=bob", credentials.serve_by_keys(&[])),
    ] {
        let object = credentials.of_qemu(kind, "client", more);
        let port = port(&daemon);
        let image = format!("driver=nbd,host=127.0.0.1,port={port},export=disk,tls-creds=tls0");
        let info = succeed(&mut program("qemu-img", &["info", "--object", &object, "--image-opts", &image]));
        assert!(info.contains("16 MiB"), "{info}");
        let mut qemu_io = program("qemu-io", &["--object", &object, "-t", "none"]);
        for pattern in PATTERNS {
            qemu_io.args(["-c", pattern]);
        }
        let said = succeed(qemu_io.args(["--image-opts", &image]));
        assert!(!said.contains("verification failed"), "{said}");
    }
}

#[test]
fn key_files_of_psktool_are_accepted() {
    if !has("psktool") {
        return;
    }
    let credentials = Credentials::new();
    let file = credentials.shown("psktool.psk");
    for user in ["carol", "dave"] {
        succeed(&mut program("psktool", &["-u", user, "-p", &file]));
    }
    let daemon = credentials.serve(&["--nbd-tls-psk", &file]);
    copies_there_and_back(&url(&daemon, "dave@", &format!("tls-psk-file={file}")));
}

#[test]
fn nbd_client_lists_exports_with_tls() {
    if !has("nbd-client") {
        return;
    }
    let credentials = Credentials::new();
    let daemon = credentials.serve_by_certificates(&[]);
    let [authority, certificate, key] =
        ["ca-cert.pem", "client-cert.pem", "client-key.pem"].map(|name| credentials.shown(name));
    let port = port(&daemon);
    let args = [
        "-l",
        "127.0.0.1",
        &port,
        "-x",
        "-cacertfile",
        &authority,
        "-certfile",
        &certificate,
        "-keyfile",
        &key,
        "-tlshostname",
        "localhost",
    ];
    let listed = succeed(&mut program("nbd-client", &args));
    assert!(listed.contains("disk"), "{listed}");
}

// Servers of other projects.

/// A server that runs in the background at a Unix socket; killed when dropped.
struct Server {
    directory: TempDir,
}

impl Server {
    fn nbdkit(tls: &[&str]) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.arg("-U").arg(path("socket")).arg("-P").arg(path("pid")).args(["-e", "disk"]).args(tls);
        succeed(nbdkit.args(["memory", "16m"]));
        Server { directory }
    }

    fn qemu_nbd(object: &str) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let disk = path("disk.img");
        fs::File::create(&disk).unwrap().set_len(SIZE as u64).unwrap();
        let mut qemu_nbd = program("qemu-nbd", &["--object", object, "--tls-creds", "tls0", "-x", "disk"]);
        qemu_nbd.args(["-f", "raw", "-t", "-e", "8", "--fork", "--pid-file"]).arg(path("pid"));
        // qemu-nbd keeps its output open after the fork.
        let output = Stdio::from(fs::File::create(path("log")).unwrap());
        let status =
            qemu_nbd.arg("-k").arg(path("socket")).arg(disk).stderr(output).stdout(Stdio::null()).status();
        let log = fs::read_to_string(path("log")).unwrap();
        assert!(status.unwrap().success(), "{log}");
        Server { directory }
    }

    fn url(&self, user: &str, parameters: &str) -> String {
        format!(
            "nbds+unix://{user}/disk?socket={}&{parameters}",
            self.directory.path().join("socket").display()
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.directory.path().join("pid")).ok();
        if let Some(pid) = pid.and_then(|text| Pid::from_raw(text.trim().parse().ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

#[test]
fn nbdkit_is_copied_to_and_from_with_tls() {
    if !has("nbdkit") {
        return;
    }
    let credentials = Credentials::new();
    let certificates = format!("--tls-certificates={}", credentials.directory());
    let server = Server::nbdkit(&["--tls=require", &certificates, "--tls-verify-peer"]);
    copies_there_and_back(&server.url("", &credentials.by_certificates()));
    let stranger = Credentials::new();
    let said = complaint(&server.url("", &stranger.by_certificates()));
    assert!(said.contains("no authority that is trusted here signed it"), "{said}");
    let plain = server.url("", "x").replace("nbds", "nbd").replace("&x", "");
    assert!(complaint(&plain).contains("requires TLS"));
    let server = Server::nbdkit(&["--tls=require", &format!("--tls-psk={}", credentials.shown("keys.psk"))]);
    copies_there_and_back(&server.url("bob@", &credentials.by_key()));
    private(&credentials.path("other.psk"), format!("mallory:{ALICE}\n").as_bytes());
    let by_key = format!("tls-psk-file={}", credentials.shown("other.psk"));
    assert!(!complaint(&server.url("", &by_key)).is_empty());
}

#[test]
fn qemu_nbd_is_copied_to_and_from_with_tls() {
    if !has("qemu-nbd") {
        return;
    }
    let credentials = Credentials::new();
    let server = Server::qemu_nbd(&credentials.of_qemu("x509", "server", ",verify-peer=on"));
    copies_there_and_back(&server.url("", &credentials.by_certificates()));
    let server = Server::qemu_nbd(&credentials.of_qemu("psk", "server", ""));
    copies_there_and_back(&server.url("alice@", &credentials.by_key()));
    // A peer without TLS 1.3.
    let old = ",verify-peer=on,priority=NORMAL:-VERS-TLS1.3";
    let server = Server::qemu_nbd(&credentials.of_qemu("x509", "server", old));
    copies_there_and_back(&server.url("", &credentials.by_certificates()));
}

// Hostile peers.

const FLAGS: [u8; 4] = [0, 0, 0, 3];

fn option(number: u32) -> Vec<u8> {
    [b"IHAVEOPT".as_slice(), &number.to_be_bytes(), &0u32.to_be_bytes()].concat()
}

/// A client that has sent `NBD_OPT_STARTTLS` and the bytes `behind` in plain text.
fn starts_tls(daemon: &Daemon, behind: &[u8]) -> UnixStream {
    let mut socket = UnixStream::connect(daemon.socket()).unwrap();
    socket.read_exact(&mut [0; 18]).unwrap();
    socket.write_all(&[&FLAGS, &*option(STARTTLS), behind].concat()).unwrap();
    let mut reply = [0; 20];
    socket.read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..16], 1u32.to_be_bytes(), "NBD_REP_ACK");
    socket
}

/// Reads until the server closes the connection.
fn rest(mut socket: UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest);
    rest
}

/// nbdkit executed such options over TLS (CVE-2021-3716).
#[test]
fn options_in_plain_text_after_starttls_are_never_executed() {
    let credentials = Credentials::new();
    let mut daemon = Daemon::serve(&["disk=mem:16m", "--nbd-tls-psk", &credentials.shown("keys.psk")]);
    // In one segment with STARTTLS.
    let socket = starts_tls(&daemon, &option(STRUCTURED_REPLY));
    assert!(rest(socket).is_empty(), "nothing is answered");
    daemon.wait_for_line("sent bytes in the clear where the TLS handshake should begin");
    // After the reply, instead of a handshake.
    let mut socket = starts_tls(&daemon, &[]);
    socket.write_all(&option(LIST)).unwrap();
    let said = rest(socket);
    assert!(!said.windows(4).any(|bytes| bytes == b"disk"), "{said:?}");
    daemon.wait_for_line("connected without TLS");
    copies_there_and_back(&daemon.url());
}

#[test]
fn aborted_and_endless_handshakes_do_not_block_other_clients() {
    let credentials = Credentials::new();
    let certificates = credentials.directory();
    let mut daemon = Daemon::serve(&["disk=mem:16m", "--nbd-tls-certificates", &certificates]);
    let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    let mut silent = Vec::new();
    for len in 0..1600 {
        let mut socket = starts_tls(&daemon, &[]);
        socket.write_all(&hello[..len % hello.len()]).unwrap();
        // Some disconnect, others stay silent.
        if len % 2 == 0 {
            silent.push(socket);
        }
    }
    // A handshake that does not end: a long message in records of one byte.
    let mut socket = starts_tls(&daemon, &[]);
    let mut bytes = vec![0x16, 3, 1, 0, 4, 1, 0, 0xf0, 0];
    (0..100_000).for_each(|_| bytes.extend([0x16, 3, 3, 0, 1, 0]));
    // The server may have closed before it is all sent.
    let _ = socket.write_all(&bytes);
    rest(socket);
    daemon.wait_for_line("violated TLS");
    copies_there_and_back(&daemon.url());
    drop(silent);
}

const SIZE: usize = 16 << 20;
const ALICE: &str = "058f48cec0b4a048af64d9f8ac88fe6649eafeb713db50cf6d5437004d8de4ab";
const BOB: &str = "f60d3c0f7f8a0e1f9d6b6b0c2f2e4a5c8e7d6c5b4a39281706f5e4d3c2b1a090";
const STARTTLS: u32 = 5;
const STRUCTURED_REPLY: u32 = 8;
const LIST: u32 = 3;
