//! The HTTP API of a daemon, on its Unix socket and over TCP with a token.

use crate::control::{Controlled, eventually};
use crate::daemon::Daemon;
use crate::nbd_tls::{Credentials, Flaw};
use crate::program::{blockmux, has, text};
use crate::raw_client::{READ, RawClient};
use crate::reload::{Configured, UNCHANGED};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Sends the bytes of a request; returns status and body of the response.
pub(crate) fn exchange(mut stream: impl Read + Write, request: &[u8]) -> (u16, String) {
    // A request may be refused by its head or its length before all of it is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    // The response precedes a reset of the connection.
    let _ = stream.read_to_end(&mut answer);
    let answer = text(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), body.to_owned())
}

/// Sends a request to the API's socket.
pub(crate) fn ask(socket: &Path, method: &str, path: &str, headers: &str, body: &str) -> (u16, Value) {
    let (status, body) = ask_as("application/json", socket, (method, path), headers, body);
    (status, serde_json::from_str(&body).unwrap_or(Value::Null))
}

/// Sends a request with a body of this media type; returns the text of the response, too.
pub(crate) fn ask_as(
    kind: &str,
    socket: &Path,
    (method, path): (&str, &str),
    headers: &str,
    body: &str,
) -> (u16, String) {
    let len = body.len();
    let kind = if body.is_empty() { String::new() } else { format!("Content-Type: {kind}\r\n") };
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{kind}{headers}Content-Length: {len}\r\n\r\n{body}"
    );
    exchange(UnixStream::connect(socket).unwrap(), request.as_bytes())
}

/// The media type of a config file.
pub(crate) const TOML: &str = "application/toml";

#[test]
fn every_ctl_command_works_over_http_with_its_status() {
    let controlled = Controlled::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let socket = controlled.socket();
    let ask = |method, path: &str, body| ask(&socket, method, path, "", body);
    let (status, added) = ask("POST", "/v1/volumes", r#"{"volume": "b=mem:1m"}"#);
    assert_eq!((status, &added["name"]), (201, &json!("b")));
    assert!(added["urls"].as_array().unwrap().len() >= 2, "{added}");
    assert_eq!(ask("GET", "/v1/volumes/b", "").1["size"], 1 << 20);
    assert_eq!(ask("POST", "/v1/volumes/b/resize", r#"{"size": 2097152}"#), (200, json!({"size": 2 << 20})));
    let shrink = r#"{"size": 1048576, "shrink": true}"#;
    assert_eq!(ask("POST", "/v1/volumes/b/resize", shrink), (200, json!({"size": 1 << 20})));
    let units = "/v1/targets/iqn.2026-11.blockmux:a/units";
    assert_eq!(ask("POST", units, r#"{"volume": "b", "number": 5}"#), (201, json!({"number": 5})));
    assert_eq!(ask("DELETE", &format!("{units}/5"), ""), (200, json!({})));
    let alua = r#"{"protocol": "iscsi", "what": {"alua": {"target": "", "state": "standby", "at": null}}}"#;
    assert_eq!(ask("POST", "/v1/targets/iqn.2026-11.blockmux%3Aa/changes", alua), (200, json!({})));
    assert_eq!(ask("DELETE", "/v1/volumes/b", ""), (200, json!({})));
    let (status, volumes) = ask("GET", "/v1/volumes", "");
    assert_eq!((status, volumes.as_array().unwrap().len()), (200, 1));
    assert_eq!(ask("GET", "/v1/status", "").1, controlled.status());
    assert_eq!(ask("GET", "/v1/sessions", ""), (200, json!([])));
    // Every change is a recorded action.
    let (_, actions) = ask("GET", "/v1/actions", "");
    let actions: Vec<_> = actions.as_array().unwrap().iter().map(|action| action["action"].clone()).collect();
    assert_eq!(actions.len(), 7, "{actions:?}");
    assert_eq!((&actions[0], &actions[6]), (&json!("add b=mem:1m"), &json!("remove b")));
}

#[test]
fn every_error_has_the_same_format_and_the_status_of_its_kind() {
    let controlled = Controlled::serve(&["a=mem:8m", "null=null:1m"]);
    let long = "x".repeat(5 << 20);
    for (method, path, body, status, code) in [
        ("GET", "/nowhere", "", 404, "not_found"),
        ("GET", "/v1/volumes/b", "", 404, "not_found"),
        ("GET", "/v1/actions/77", "", 404, "not_found"),
        ("GET", "/v1/actions/x", "", 404, "not_found"),
        ("PUT", "/v1/status", "", 405, "method_not_allowed"),
        ("POST", "/v1/volumes", "{", 400, "malformed"),
        ("POST", "/v1/volumes", "", 415, "unsupported_media_type"),
        ("POST", "/v1/volumes", "{}", 422, "invalid"),
        ("POST", "/v1/volumes", r#"{"volume": "b=mem:1m", "sice": 1}"#, 422, "invalid"),
        ("POST", "/v1/volumes", r#"{"volume": "b=nothing:1m"}"#, 422, "invalid"),
        ("POST", "/v1/volumes", r#"{"volume": "a=mem:1m"}"#, 409, "conflict"),
        ("POST", "/v1/volumes", &long, 413, "too_large"),
        ("POST", "/v1/volumes/b/resize", "{}", 404, "not_found"),
        ("POST", "/v1/volumes/a/resize", r#"{"size": 7}"#, 422, "invalid"),
        ("POST", "/v1/volumes/null/resize", r#"{"size": 4096}"#, 409, "conflict"),
        ("POST", "/v1/volumes/a/resize", r#"{"size": 4096}"#, 409, "conflict"),
        ("POST", "/v1/volumes/a/resize", r#"{"size": 4096, "shrink": false}"#, 409, "conflict"),
        (
            "PUT",
            "/v1/objects/volume/b",
            r#"{"spec": "mem:1m", "limits": {"iops": 1, "iops": 2}}"#,
            422,
            "invalid",
        ),
        ("POST", "/v1/config/apply", r#"{"mdns": true, "mdns": false}"#, 422, "invalid"),
        ("DELETE", "/v1/volumes/b", "", 404, "not_found"),
        ("POST", "/v1/targets/t/units", r#"{"volume": "a"}"#, 404, "not_found"),
    ] {
        let (answered, answer) = ask(&controlled.socket(), method, path, "", body);
        let error = &answer["error"];
        assert_eq!((answered, &error["code"]), (status, &json!(code)), "{method} {path}: {answer}");
        assert!(
            error["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{method} {path}: {answer}"
        );
    }
    let (_, answer) = ask(&controlled.socket(), "POST", "/v1/volumes/a/resize", "", r#"{"size": 7}"#);
    assert_eq!(answer["error"]["hint"], "round it");
}

#[test]
fn a_long_request_becomes_an_action_with_progress() {
    let controlled = Controlled::serve(&["a=fault:op=read,error=stuck:mem:8m", "b=mem:1m"]);
    let mut nbd = RawClient::connect(&controlled.daemon.socket());
    assert_eq!(nbd.write(0, 0, &[1; 512]), 0);
    nbd.request(READ, 0, 0, 512);
    eventually("it is in flight", || controlled.status()["volumes"][0]["reads"] == 1);
    let socket = controlled.socket();
    let (status, refused) = ask(&socket, "DELETE", "/v1/volumes/a", "", "");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(status == 409 && message.starts_with("a: is in use by nbd client "), "{refused}");
    assert_eq!(ask(&socket, "DELETE", "/v1/volumes/a?force=yes", "", "").0, 400);
    let (status, action) =
        ask(&socket, "DELETE", "/v1/volumes/a?force=true", "Prefer: respond-async\r\n", "");
    assert_eq!((status, &action["state"], &action["action"]), (202, &json!("running"), &json!("remove a")));
    let path = format!("/v1/actions/{}", action["id"]);
    let look = || ask(&socket, "GET", &path, "", "").1;
    eventually("the action reports what it waits for", || look()["progress"] == "waiting for I/O in flight");
    // Other clients are served meanwhile.
    assert_eq!(controlled.said(&["resize", "b", "2m"]), "b  2097152 (2 MiB)\n");
    eventually("it is over", || look()["state"] == "done");
    let note = look()["result"]["note"].as_str().unwrap().to_owned();
    assert!(
        note.contains("a: I/O that was in flight when it was removed has not ended after 10 s"),
        "{note}"
    );
    // A client that waits without limit gets the result.
    let wait = "Prefer: respond-async, wait=30\r\n";
    assert_eq!(ask(&socket, "DELETE", "/v1/volumes/b", wait, ""), (200, json!({})));
    // A failed action has an error.
    let (status, failed) = ask(&socket, "DELETE", "/v1/volumes/b", "Prefer: respond-async\r\n", "");
    assert!(status == 202 || status == 404, "{failed}");
    let last = || ask(&socket, "GET", "/v1/actions", "", "").1.as_array().unwrap().last().unwrap().clone();
    eventually("it has failed", || last()["error"]["code"] == "not_found");
}

#[test]
fn a_client_that_sends_slowly_blocks_no_others_and_is_disconnected() {
    let controlled = Controlled::serve(&["a=mem:1m"]);
    let path = controlled.socket();
    // Single bytes do not extend the timeout.
    let drippers: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(b"GET /v1/status HTTP/1.1\r\nX: ").unwrap();
            std::thread::spawn(move || {
                while stream.write_all(b"x").is_ok() {
                    std::thread::park_timeout(Duration::from_millis(50));
                }
            })
        })
        .collect();
    for _ in 0..3 {
        assert_eq!(controlled.status()["volumes"][0]["name"], "a");
    }
    drippers.into_iter().for_each(|dripper| dripper.join().unwrap());
    controlled.said(&["resize", "a", "2m"]);
}

#[test]
fn bytes_that_are_no_request_are_refused_without_harm() {
    let controlled = Controlled::serve(&["mem:1m"]);
    let long_head = format!("GET /v1/status HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    let many_headers = format!("GET /v1/status HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(1000));
    for bytes in [
        &b"\xff\xfe\r\n\r\n"[..],
        b"{\"status\":null}\n",
        b"GET /v1/status HTTP/9.9\r\n\r\n",
        b"GET /v1/%ff%00 HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/volumes HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        long_head.as_bytes(),
        many_headers.as_bytes(),
    ] {
        let (status, _) = exchange(UnixStream::connect(controlled.socket()).unwrap(), bytes);
        assert!(
            status == 0 || (400..500).contains(&status),
            "{status}: {}",
            bytes[..20.min(bytes.len())].escape_ascii()
        );
    }
    assert_eq!(controlled.status()["volumes"][0]["size"], 1 << 20);
}

/// A daemon whose API takes TCP, and the file of its token.
pub(crate) struct Tcp {
    pub(crate) daemon: Daemon,
    _files: tempfile::TempDir,
    pub(crate) token_file: PathBuf,
}

pub(crate) const TOKEN: &str = "0123456789abcdef0123456789abcdef";

impl Tcp {
    pub(crate) fn serve(args: &[&str]) -> Tcp {
        let files = tempfile::tempdir().unwrap();
        let token_file = files.path().join("api.token");
        fs::write(&token_file, format!("{TOKEN}\n")).unwrap();
        fs::set_permissions(&token_file, Permissions::from_mode(0o600)).unwrap();
        let api = ["--api", "127.0.0.1:0", "--api-token-file", token_file.to_str().unwrap()];
        Tcp { daemon: Daemon::serve(&[args, &api].concat()), _files: files, token_file }
    }

    pub(crate) fn url(&self) -> String {
        self.daemon.json["api"].as_str().unwrap().trim_end_matches('/').to_owned()
    }

    /// Response to GET with the token.
    pub(crate) fn get(&self, path: &str) -> String {
        self.body(path, &format!("Authorization: Bearer {TOKEN}\r\n"))
    }

    /// Response to GET without a token.
    pub(crate) fn get_public(&self, path: &str) -> String {
        self.body(path, "")
    }

    fn body(&self, path: &str, header: &str) -> String {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n");
        let (status, body) = exchange(self.connect(), request.as_bytes());
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.url().strip_prefix("http://").unwrap()).unwrap()
    }
}

#[test]
fn every_request_over_tcp_requires_a_token() {
    let tcp = Tcp::serve(&["a=mem:1m"]);
    let get = |path: &str, header: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n");
        exchange(tcp.connect(), request.as_bytes())
    };
    for path in ["/v1/status", "/metrics", "/openapi.json", "/nowhere", "//"] {
        for header in
            ["", "Authorization: Basic x\r\n", "Authorization: Bearer 0123456789abcdef0123456789abcdee\r\n"]
        {
            let (status, body) = get(path, header);
            assert_eq!(status, 401, "{path} {header}");
            assert!(body.contains("\"code\":\"unauthorized\"") && !body.contains(TOKEN), "{body}");
        }
    }
    assert_eq!(get("/v1/status", &format!("Authorization: Bearer {TOKEN}\r\n")).0, 200);
    let (status, page) = get("/", "");
    assert!(status == 200 && !page.contains("mem:1m") && !page.contains(TOKEN), "{page}");
    let (url, file) = (tcp.url(), tcp.token_file.display().to_string());
    let said = blockmux(["ctl", &url, "--token-file", &file, "add", "b=mem:1m"]);
    assert!(said.status.success() && text(&said.stdout).starts_with("b\n"), "{said:?}");
    let refused = blockmux(["ctl", &url, "status"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("requires a token over TCP; add --token-file"), "{refused:?}");
}

#[test]
fn the_api_is_served_over_tcp_only_with_a_private_token() {
    let files = tempfile::tempdir().unwrap();
    let token = files.path().join("token");
    fs::write(&token, TOKEN).unwrap();
    fs::set_permissions(&token, Permissions::from_mode(0o644)).unwrap();
    let token = token.to_str().unwrap();
    let serve = |args: &[&str]| {
        let listener = format!("unix:{}", files.path().join("nbd").display());
        let output = blockmux([&["serve", "mem:1m", "--nbd", &listener], args].concat());
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let said = serve(&["--api", "127.0.0.1:0"]);
    assert!(
        said.contains("without a token, every client that can connect could control this daemon"),
        "{said}"
    );
    assert!(said.contains("openssl rand -hex 32"), "{said}");
    let said = serve(&["--api", "127.0.0.1:0", "--api-token-file", token]);
    assert!(said.contains("others can read or write it; run chmod 600 on it"), "{said}");
    let said = serve(&["--api", "unix:/x", "--api-token-file", token]);
    assert!(said.contains("--api: write host:port; --control takes unix:PATH"), "{said}");
}

#[test]
fn clients_without_a_token_do_not_keep_the_owner_out() {
    let files = tempfile::tempdir().unwrap();
    let control = files.path().join("control");
    let tcp = Tcp::serve(&["a=mem:1m", "--control", &format!("unix:{}", control.display())]);
    // All places of the API over TCP, and more.
    let clients: Vec<_> = (0..300).map(|_| tcp.connect()).collect();
    let request = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    for _ in 0..3 {
        assert_eq!(exchange(UnixStream::connect(&control).unwrap(), request).0, 200);
    }
    drop(clients);
    // A refused client has to connect again.
    let refused = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n";
    assert_eq!(exchange(tcp.connect(), refused).0, 401);
}

#[test]
fn pages_of_other_sites_cannot_use_the_api() {
    let tcp = Tcp::serve(&["a=mem:1m"]);
    let from = |site: &str| {
        let request = format!(
            "POST /v1/volumes/a/resize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\
             Authorization: Bearer {TOKEN}\r\nSec-Fetch-Site: {site}\r\n\r\n"
        );
        exchange(tcp.connect(), request.as_bytes()).0
    };
    assert_eq!((from("cross-site"), from("same-site")), (403, 403));
    assert_ne!((from("same-origin"), from("none")), (403, 403));
}

#[test]
fn check_reads_the_credentials_of_the_api() {
    let files = tempfile::tempdir().unwrap();
    let config = files.path().join("blockmux.toml");
    for (keys, problem) in [
        ("api = '127.0.0.1:0'", "without a token,"),
        ("api = '127.0.0.1:0'\napi_token_file = '/nowhere/token'", "/nowhere/token"),
        ("api = '127.0.0.1:0'\napi_tls_certificates = '/nowhere'", "/nowhere"),
    ] {
        fs::write(&config, format!("{keys}\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n")).unwrap();
        let output = blockmux(["check", config.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(problem), "{said}");
    }
}

/// The HTTP status that curl gets, which is 0 without an answer, and the body.
pub(crate) fn curl(url: &str, args: &[&str]) -> (u16, String) {
    let mut curl = Command::new("curl");
    let output = curl.args(["-sS", "--max-time", "30", "-w", "\n%{http_code}"]).args(args).arg(url).output();
    let said = text(&output.unwrap().stdout);
    let (body, status) = said.rsplit_once('\n').unwrap();
    (status.parse().unwrap(), body.to_owned())
}

/// Arguments for curl: the client certificate in a directory, and the authority of another one.
pub(crate) fn certificates(own: &Credentials, trusted: &Credentials) -> [String; 6] {
    let [certificate, key] = ["client-cert.pem", "client-key.pem"].map(|name| own.shown(name));
    ["--cert".into(), certificate, "--key".into(), key, "--cacert".into(), trusted.shown("ca-cert.pem")]
}

#[test]
fn with_mutual_tls_only_clients_with_a_listed_certificate_are_served() {
    if !has("curl") {
        return;
    }
    let (own, other) = (Credentials::new(), Credentials::new());
    let tls = ["--api-tls-certs", &own.directory(), "--api-tls-subject", "CN=backup"];
    let mut daemon = Daemon::serve(&[&["a=mem:1m", "--api", "127.0.0.1:0"], &tls[..]].concat());
    let url = daemon.json["api"].as_str().unwrap().trim_end_matches('/').to_owned();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let get = |path: &str, args: &[String]| {
        curl(&format!("{url}{path}"), &args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let listed = certificates(&own, &own);
    assert_eq!(get("/v1/status", &listed).0, 200);
    let (status, document) = get("/openapi.json", &listed);
    assert_eq!((status, document.len() > 20_000), (200, true));
    assert_eq!(serde_json::from_str::<Value>(&document).unwrap()["info"]["title"], "blockmux");
    assert!(get("/", &listed).1.contains("<title>blockmux</title>"));
    // A body of many records.
    let body = own.path("body.json");
    fs::write(&body, format!("{{\"volume\": \"{}\"}}", "x".repeat(1 << 20))).unwrap();
    let post = ["-H", "Content-Type: application/json", "--data-binary", &format!("@{}", body.display())];
    let posted = get("/v1/volumes", &[&listed[..], &post.map(str::to_owned)[..]].concat());
    assert_eq!(posted.0, 422, "{}", posted.1);
    // Without a certificate, with that of another authority, and without TLS.
    assert_eq!(get("/v1/status", &listed[4..]).0, 0);
    assert_eq!(get("/v1/status", &certificates(&other, &own)).0, 0);
    daemon.wait_for_line("connection refused: the peer has a certificate that is not accepted");
    assert_eq!(curl(&url.replacen("https", "http", 1), &[]).0, 0);
    daemon.wait_for_line("connection refused: the peer connected without TLS, which is required here");
    let ctl = |credentials: &Credentials| {
        let output = blockmux(["ctl", &url, "--tls-certs", &credentials.directory(), "status"]);
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = ctl(&own);
    assert!(code == Some(0) && said.contains("\na  "), "{said}");
    let (code, said) = ctl(&other);
    assert!(code == Some(2) && said.contains("the daemon has a certificate that is not accepted"), "{said}");
    own.certify("client", "intruder", Flaw::None);
    let (status, said) = get("/v1/status", &listed);
    assert!(
        status == 403 && said.contains("\"code\":\"forbidden\"") && said.contains("CN=intruder"),
        "{said}"
    );
    assert_eq!(get("/", &listed).0, 403);
    daemon.wait_for_line("login refused: the API does not allow the certificate `CN=intruder`");
    let (code, said) = ctl(&own);
    assert!(code == Some(1) && said.contains("add it to api_tls_subject"), "{said}");
    fs::remove_file(own.path("client-cert.pem")).unwrap();
    let (code, said) = ctl(&own);
    assert!(code == Some(2) && said.contains("closed the connection without an answer"), "{said}");
}

#[test]
fn over_tls_a_token_replaces_the_certificate_of_the_client() {
    if !has("curl") {
        return;
    }
    let own = Credentials::new();
    let tcp = Tcp::serve(&["a=mem:1m", "--api-tls-certs", &own.directory()]);
    let (url, trusted) = (tcp.url(), own.shown("ca-cert.pem"));
    let status = format!("{url}/v1/status");
    let header = format!("Authorization: Bearer {TOKEN}");
    assert_eq!(curl(&status, &["--cacert", &trusted]).0, 401);
    assert_eq!(curl(&status, &["--cacert", &trusted, "-H", &header]).0, 200);
    assert_eq!(curl(&url, &["--cacert", &trusted]).0, 200, "the page");
    let token_file = tcp.token_file.display().to_string();
    let ctl = ["ctl", &url, "--token-file", &token_file, "--tls-certs", &own.directory(), "status"];
    assert!(blockmux(ctl).status.success());
    let refused = |url: &str| {
        let ctl = ["ctl", url, "--token-file", &token_file, "--tls-certs", &own.directory(), "status"];
        text(&blockmux(ctl).stderr)
    };
    let plain = url.replacen("https", "http", 1);
    let said = text(&blockmux(["ctl", &plain, "--token-file", &token_file, "status"]).stderr);
    assert!(said.contains("if it serves the API with TLS, use https://127.0.0.1:"), "{said}");
    let without = Tcp::serve(&["a=mem:1m"]);
    let said = refused(&without.url().replacen("http", "https", 1));
    assert!(said.contains(&format!("the daemon answers without TLS; use {}", without.url())), "{said}");
}

/// The status of a response to GET on a connection that stays open.
fn status_on(stream: &mut TcpStream, token: &str) -> u16 {
    let request = format!("GET /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !(answer.ends_with(b"[]\n") || answer.ends_with(b"}\n")) && stream.read(&mut byte).unwrap() > 0 {
        answer.push(byte[0]);
    }
    text(&answer).split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

const NEXT_TOKEN: &str = "fedcba9876543210fedcba9876543210";

/// Writes the file of a token; returns its path.
pub(crate) fn write_token(files: &Path, token: &str) -> String {
    let path = files.join("api.token");
    fs::write(&path, token).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

/// The config of a daemon with one volume and these keys.
fn with_keys(keys: &str) -> String {
    format!("nbd = ['unix:nbd']\n{keys}\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n")
}

#[test]
fn a_reload_renews_the_token_and_ends_connections_of_the_old_one() {
    let files = tempfile::tempdir().unwrap();
    write_token(files.path(), TOKEN);
    let place = files.path().to_owned();
    let config = with_keys("api = '127.0.0.1:0'\napi_token_file = 'api.token'");
    let served = Configured::serve_in(files, &config);
    let address = served.daemon.json["api"].as_str().unwrap().to_owned();
    let address = address.strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
    let connect = || TcpStream::connect(&address).unwrap();
    let mut before = connect();
    assert_eq!(status_on(&mut before, TOKEN), 200);
    assert_eq!(served.said(&["reload"]), UNCHANGED);
    assert_eq!(status_on(&mut before, TOKEN), 200, "the connection stays");
    // Half of a request's head does not keep a connection open.
    let mut half = connect();
    half.write_all(b"GET /v1/sessions HTTP/1.1\r\nX: ").unwrap();
    write_token(&place, NEXT_TOKEN);
    assert_eq!(served.said(&["diff"]), "~ api_token_file: new content\n");
    assert_eq!(served.said(&["reload"]), "~ api_token_file: new content\n");
    assert_eq!((before.read(&mut [0]).unwrap(), half.read(&mut [0]).unwrap()), (0, 0));
    assert_eq!((status_on(&mut connect(), TOKEN), status_on(&mut connect(), NEXT_TOKEN)), (401, 200));
    // After a reload that fails, the token is the one before.
    fs::set_permissions(place.join("api.token"), Permissions::from_mode(0o644)).unwrap();
    let refused = text(&served.ctl(&["reload"]).stderr);
    assert!(refused.contains("others can read or write it; run chmod 600 on it"), "{refused}");
    assert_eq!((status_on(&mut connect(), TOKEN), status_on(&mut connect(), NEXT_TOKEN)), (401, 200));
    // The address and its credentials belong together.
    served.write(&with_keys(""));
    let said = served.said(&["reload"]);
    assert!(said.contains("at the next start") && said.contains("api_token_file"), "{said}");
    assert_eq!((status_on(&mut connect(), TOKEN), status_on(&mut connect(), NEXT_TOKEN)), (401, 200));
    assert!(!served.said(&["export"]).contains("api_token_file = "), "the next start has none");
}

#[test]
fn a_reload_renews_certificates_and_subjects() {
    if !has("curl") {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let place = files.path().to_owned();
    let (first, next) = (Credentials::new(), Credentials::new());
    let install = |own: &Credentials| {
        for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
            // Copies the permissions, too.
            fs::copy(own.path(name), place.join(name)).unwrap();
        }
    };
    install(&first);
    write_token(&place, TOKEN);
    let keys = |subject: &str| {
        with_keys(&format!(
            "api = '127.0.0.1:0'\napi_token_file = 'api.token'\napi_tls_certificates = '.'\napi_tls_subject = ['{subject}']"
        ))
    };
    let served = Configured::serve_in(files, &keys("CN=backup"));
    let url = served.daemon.json["api"].as_str().unwrap().trim_end_matches('/').to_owned();
    let get = |shown: &Credentials, trusted: &Credentials, token: &str| {
        let header = format!("Authorization: Bearer {token}");
        let args = certificates(shown, trusted);
        let args: Vec<_> = args.iter().map(String::as_str).chain(["-H", &header]).collect();
        curl(&format!("{url}/v1/status"), &args).0
    };
    assert_eq!((get(&first, &first, TOKEN), get(&next, &first, TOKEN)), (200, 0));
    install(&next);
    write_token(&place, NEXT_TOKEN);
    // The client whose credentials are replaced still gets the answer.
    let old = place.join("old.token");
    fs::write(&old, TOKEN).unwrap();
    fs::set_permissions(&old, Permissions::from_mode(0o600)).unwrap();
    let own = ["--tls-certs", &first.directory(), "--token-file", old.to_str().unwrap()];
    let said = text(&succeed_ctl(&url, &own, "reload"));
    assert_eq!(said, "~ api_token_file: new content\n~ api_tls_certificates: new content\n");
    assert_eq!((get(&first, &first, TOKEN), get(&first, &next, NEXT_TOKEN)), (0, 0));
    assert_eq!((get(&next, &next, TOKEN), get(&next, &next, NEXT_TOKEN)), (401, 200));
    let said = served.reload(&keys("CN=admin"));
    assert!(said.contains("api_tls_subject") && !said.contains("next start"), "{said}");
    assert_eq!(get(&next, &next, NEXT_TOKEN), 403);
    served.write(&keys("CN=backup"));
    served.daemon.signal(rustix::process::Signal::HUP);
    eventually("SIGHUP renews them, too", || get(&next, &next, NEXT_TOKEN) == 200);
    let plain = with_keys("api = '127.0.0.1:0'\napi_token_file = 'api.token'");
    served.reload(&plain);
    let header = format!("Authorization: Bearer {NEXT_TOKEN}");
    let plain = url.replacen("https", "http", 1) + "/v1/status";
    assert_eq!((get(&next, &next, NEXT_TOKEN), curl(&plain, &["-H", &header]).0), (0, 200));
}

/// Output of a command that succeeds over TCP.
fn succeed_ctl(url: &str, credentials: &[&str], command: &str) -> Vec<u8> {
    let output = blockmux([&["ctl", url], credentials, &[command]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    output.stdout
}

#[test]
fn a_stop_waits_for_requests_and_not_for_connections_without_one() {
    let mut controlled = Controlled::serve(&["a=mem:1m"]);
    let mut half = UnixStream::connect(controlled.socket()).unwrap();
    half.write_all(b"GET /v1/status HTTP/1.1\r\nX: ").unwrap();
    let mut request = UnixStream::connect(controlled.socket()).unwrap();
    let body = r#"{"size": 2097152}"#;
    let head = format!(
        "POST /v1/volumes/a/resize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    request.write_all(head.as_bytes()).unwrap();
    let mut proceed = [0; 25];
    request.read_exact(&mut proceed).unwrap();
    assert_eq!(text(&proceed), "HTTP/1.1 100 Continue\r\n\r\n");
    controlled.daemon.signal(rustix::process::Signal::TERM);
    // The request would end by its own timeout if this waited for the rest of the other head.
    assert_eq!(half.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(exchange(request, body.as_bytes()), (200, "{\"size\":2097152}\n".to_owned()));
    assert!(controlled.daemon.wait().success());
}
