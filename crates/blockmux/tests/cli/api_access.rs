//! What clients of the API may request: everybody who can connect, and each role.

use crate::api::{TOKEN, Tcp, ask, certificates, curl, exchange};
use crate::control::Controlled;
use crate::daemon::Daemon;
use crate::nbd_tls::Credentials;
use crate::program::{has, text};
use crate::reload::Configured;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

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

/// The tokens of [`with_roles`].
const TOKENS: [(&str, &str); 4] = [
    ("default", "token-of-the-administrator"),
    ("prometheus", "token-of-prometheus"),
    ("resizer", "token-of-the-resizer"),
    ("deployer", "token-of-the-deployer"),
];

/// The config of a daemon with tokens of all roles, and more keys.
fn with_roles(more: &str) -> String {
    let entry = |name: &str, role: &str| {
        format!("[[api_token]]\nname = '{name}'\ntoken_file = '{name}.token'\nrole = '{role}'\n")
    };
    let roles = [("prometheus", "read"), ("resizer", "operate"), ("deployer", "administer")];
    let tokens: String = roles.iter().map(|(name, role)| entry(name, role)).collect();
    format!(
        "nbd = ['unix:nbd']\napi = '127.0.0.1:0'\napi_token_file = 'default.token'\n[[volume]]\nname = 'a'\n\
         spec = 'mem:1m'\n{tokens}{more}"
    )
}

/// Serves [`with_roles`]; returns also the address of the API.
fn serve_with_roles() -> (Configured, String) {
    let files = tempfile::tempdir().unwrap();
    for (name, token) in TOKENS {
        write_secret(&files.path().join(format!("{name}.token")), token);
    }
    let served = Configured::serve_in(files, &with_roles(""));
    let address = served.daemon.json["api"].as_str().unwrap().trim_start_matches("http://");
    let address = address.trim_end_matches('/').to_owned();
    (served, address)
}

fn write_secret(path: &Path, secret: &str) {
    fs::write(path, secret).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

/// Status and body of the response to a request with a token.
fn as_client(address: &str, token: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let len = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n{kind}\
         Content-Length: {len}\r\n\r\n{body}"
    );
    let (status, body) = exchange(TcpStream::connect(address).unwrap(), request.as_bytes());
    (status, serde_json::from_str(&body).unwrap_or(Value::Null))
}

#[test]
fn each_operation_is_permitted_to_its_role_and_those_above_it() {
    let (served, address) = serve_with_roles();
    let (status, document) = as_client(&address, TOKENS[1].1, "GET", "/openapi.json", "");
    assert_eq!(status, 200);
    let levels = ["none", "read", "operate", "administer"];
    let mut found = [0; 4];
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let level = levels.iter().position(|role| operation["x-role"] == *role).unwrap();
            found[level] += 1;
            // What is named does not exist, and the body is not JSON, so that nothing changes.
            let path = path.replace("{number}", "7").replace("{id}", "7").replace(['{', '}'], "");
            let is_change = *method != "get";
            for (own, (name, token)) in [(3, TOKENS[0]), (1, TOKENS[1]), (2, TOKENS[2]), (3, TOKENS[3])] {
                if is_change && own >= level && (path.ends_with("/reload") || path.ends_with("/save")) {
                    continue;
                }
                let (status, said) = as_client(&address, token, &method.to_uppercase(), &path, "");
                assert_eq!(status == 403, own < level, "{name}: {method} {path}: {status} {said}");
            }
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
    assert_eq!(served.status()["volumes"].as_array().unwrap().len(), 1);
}

#[test]
fn a_refused_request_and_a_change_are_lines_with_the_name_of_the_token() {
    let (mut served, address) = serve_with_roles();
    let limits = "/v1/volumes/a/limits";
    let body = r#"{"limits": {"iops": 500}}"#;
    let (status, said) = as_client(&address, TOKENS[1].1, "POST", limits, body);
    let error = &said["error"];
    assert_eq!((status, &error["code"]), (403, &json!("forbidden")), "{said}");
    let message = "POST /v1/volumes/a/limits: it requires the role operate, and the client has the role read";
    assert_eq!(error["message"], message);
    assert!(error["hint"].as_str().unwrap().contains("role = \"operate\""), "{said}");
    let mut lines = served.daemon.log_line("request refused");
    assert!(
        lines.starts_with(
            "WARN request refused: POST /v1/volumes/a/limits protocol=\"api\" peer=\"127.0.0.1:"
        ),
        "{lines}"
    );
    assert!(lines.contains(" subject=\"-\" token=\"prometheus\" reason="), "{lines}");
    assert_eq!(as_client(&address, TOKENS[2].1, "POST", limits, body).0, 200);
    let line = served.daemon.log_line("config changed");
    assert!(line.contains(" subject=\"-\" token=\"resizer\" changes="), "{line}");
    lines += &line;
    // Data is lost only with the highest role.
    let (resize, body) = ("/v1/volumes/a/resize", r#"{"size": 524288, "shrink": true}"#);
    let (status, said) = as_client(&address, TOKENS[2].1, "POST", resize, body);
    assert!(status == 403 && said["error"]["message"].as_str().unwrap().contains("administer"), "{said}");
    assert_eq!(as_client(&address, TOKENS[2].1, "POST", resize, r#"{"size": 2097152}"#).0, 200);
    assert_eq!(as_client(&address, TOKENS[3].1, "POST", resize, body).0, 200);
    // The values are nowhere.
    let exported = served.said(&["export"]);
    assert!(exported.contains("[[api_token]]") && exported.contains("role = \"operate\""), "{exported}");
    served.daemon.signal(Signal::TERM);
    served.daemon.stderr.read_to_string(&mut lines).unwrap();
    assert!(lines.contains("config changed: resize a"), "{lines}");
    for (name, token) in TOKENS {
        assert!(!exported.contains(token) && !lines.contains(token), "{name}");
    }
}

#[test]
fn a_token_is_replaced_while_the_other_one_works() {
    let (served, address) = serve_with_roles();
    let status = |token: &str| as_client(&address, token, "GET", "/v1/status", "").0;
    let file = |name: &str| served.config_path().with_file_name(format!("{name}.token"));
    let next = "next-token-of-prometheus";
    write_secret(&file("next"), next);
    let entry = "[[api_token]]\nname = 'next'\ntoken_file = 'next.token'\nrole = 'read'\n";
    assert_eq!(status(next), 401);
    assert_eq!(served.reload(&with_roles(entry)), "+ api_token next\n");
    assert_eq!((status(TOKENS[1].1), status(next)), (200, 200));
    let without = with_roles(entry).replacen(
        "[[api_token]]\nname = 'prometheus'\ntoken_file = 'prometheus.token'\nrole = 'read'\n",
        "",
        1,
    );
    assert_eq!(served.reload(&without), "- api_token prometheus\n");
    assert_eq!((status(TOKENS[1].1), status(next)), (401, 200));
    // A new content of a file, and a new role.
    write_secret(&file("next"), "another-token-of-prometheus");
    assert_eq!(served.said(&["reload"]), "~ api_token next: token_file: new content\n");
    assert_eq!((status(next), status("another-token-of-prometheus")), (401, 200));
    let save = || as_client(&address, TOKENS[2].1, "POST", "/v1/config/save", "").0;
    assert_eq!(save(), 200);
    served.reload(&without.replace("'operate'", "'read'"));
    assert_eq!(save(), 403);
    // After a reload that fails, all are as before.
    for (wrong, said) in [
        (without.replace("next.token", "resizer.token"), "it is the same as that of resizer; create another"),
        (without.replace("'operate'", "'root'"), "role: unknown value `root`, expected one of `read`"),
        (without.replace("name = 'next'", "name = 'resizer'"), "is also given in"),
        (without.replace("next.token", "nowhere.token"), "nowhere.token"),
    ] {
        served.write(&wrong);
        let refused = text(&served.ctl(&["reload"]).stderr);
        assert!(refused.contains(said) && refused.contains("b.toml:"), "{refused}");
        assert_eq!((status(TOKENS[0].1), status("another-token-of-prometheus")), (200, 200));
    }
}

#[test]
fn a_certificate_has_a_role_and_is_named_in_the_log() {
    if !has("curl") {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let own = Credentials::new();
    let keys = |role: &str| {
        let directory = own.directory();
        format!(
            "nbd = ['unix:nbd']\napi = '127.0.0.1:0'\napi_tls_certificates = '{directory}'\napi_tls_subject = ['CN=admin']\n\
             [[api_certificate]]\nsubject = 'CN=backup'\nrole = '{role}'\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n"
        )
    };
    let mut served = Configured::serve_in(files, &keys("read"));
    let url = served.daemon.json["api"].as_str().unwrap().trim_end_matches('/').to_owned();
    let arguments = certificates(&own, &own);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let get = || curl(&format!("{url}/v1/status"), &arguments).0;
    let resize = || {
        let body = ["-H", "Content-Type: application/json", "-d", r#"{"size": 2097152}"#];
        curl(&format!("{url}/v1/volumes/a/resize"), &[&arguments[..], &body].concat()).0
    };
    assert_eq!((get(), resize()), (200, 403));
    let line = served.daemon.log_line("request refused");
    assert!(line.contains(" subject=\"CN=backup\" token=\"-\" reason="), "{line}");
    assert_eq!(
        served.reload(&keys("operate")),
        "~ api_certificate CN=backup: role: \"read\" -> \"operate\"\n"
    );
    assert_eq!((get(), resize()), (200, 200));
    let line = served.daemon.log_line("config changed: resize");
    assert!(line.contains(" subject=\"CN=backup\" token=\"-\" changes="), "{line}");
    assert!(served.said(&["export"]).contains("[[api_certificate]]"));
}
