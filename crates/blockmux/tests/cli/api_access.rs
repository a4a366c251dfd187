//! What clients of the API may request: everybody who can connect, and each role.

use crate::api::{TOKEN, Tcp, ask, exchange};
use crate::control::Controlled;
use crate::daemon::Daemon;
use serde_json::{Value, json};
use std::net::TcpStream;

/// Status and body of the response to a request with these headers over TCP.
fn send(tcp: &Tcp, method: &str, path: &str, headers: &str, body: &str) -> (u16, Value) {
    let len = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {len}\r\n\r\n{body}"
    );
    let (status, body) = exchange(tcp.connect(), request.as_bytes());
    (status, serde_json::from_str(&body).unwrap_or(Value::Null))
}

#[test]
fn probes_and_the_version_need_no_token_and_open_no_other_path() {
    let tcp = Tcp::serve(&["a=mem:1m"]);
    let serving = (200, json!({ "state": "serving" }));
    let version = (200, json!({ "name": "blockmux", "version": env!("CARGO_PKG_VERSION") }));
    for (path, expected) in [("/healthz", &serving), ("/readyz", &serving), ("/v1/version", &version)] {
        assert_eq!(send(&tcp, "GET", path, "", ""), *expected, "{path}");
        assert_eq!(send(&tcp, "GET", path, "Authorization: Bearer wrong\r\n", ""), *expected, "{path}");
        assert_eq!(send(&tcp, "HEAD", path, "", "").0, 200, "{path}");
        // Only reading is for everybody.
        assert_eq!(send(&tcp, "POST", path, "", "").0, 401, "{path}");
        let token = format!("Authorization: Bearer {TOKEN}\r\n");
        assert_eq!(send(&tcp, "POST", path, &token, "").0, 405, "{path}");
        // Nobody makes the daemon buffer data, and pages of other sites read nothing.
        assert_eq!(send(&tcp, "GET", path, "", "x").0, 413, "{path}");
        assert_eq!(send(&tcp, "GET", path, "Sec-Fetch-Site: cross-site\r\n", "").0, 403, "{path}");
    }
    for path in [
        "/healthz/",
        "/healthz/../v1/status",
        "/healthz%2f..%2fv1/status",
        "//healthz",
        "/%68ealthz",
        "/HEALTHZ",
        "/v1/version/",
        "/v1/status?/healthz",
        "/v1/status#/healthz",
        "http://x/v1/status",
    ] {
        assert_eq!(send(&tcp, "GET", path, "", "").0, 401, "{path}");
    }
}

#[test]
fn probes_are_answered_at_the_control_socket_and_only_in_allowed_networks() {
    let controlled = Controlled::serve(&["a=mem:1m"]);
    let state = ask(&controlled.socket(), "GET", "/readyz", "", "");
    assert_eq!(state, (200, json!({ "state": "serving" })));
    let files = tempfile::tempdir().unwrap();
    let token = crate::api::write_token(files.path(), TOKEN);
    let api = ["--api", "127.0.0.1:0?allow=192.0.2.0/24", "--api-token-file", &token];
    let daemon = Daemon::serve(&[&["a=mem:1m"], &api[..]].concat());
    let url = daemon.json["api"].as_str().unwrap();
    let place = url.trim_start_matches("http://").trim_end_matches('/');
    let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert_eq!(exchange(TcpStream::connect(place).unwrap(), request).0, 0, "disconnected without a response");
}
