//! Access by network: programs connect from 127.0.0.1, raw clients from 127.0.0.2.

use crate::control::eventually;
use crate::daemon::Daemon;
use crate::program::{blockmux, has, succeed, text};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{GOOD, RawIscsi};
use crate::raw_nvme::RawNvme;
use crate::reload::Configured;
use socket2::{Domain, Socket, Type};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const TARGET: &str = "iqn.2026-11.test:disk";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
const HOST: &str = "nqn.2026-11.test:host.of.ours";
/// Connect Invalid Host, a command specific status.
const INVALID_HOST: u16 = 0x184;

/// Connects from a loopback address.
pub(crate) fn connect_from(client: [u8; 4], server: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((client, 0)).into()).unwrap();
    socket.connect(&server.into()).unwrap();
    socket.into()
}

/// The address of a URL's server.
pub(crate) fn server(url: &str) -> SocketAddr {
    let (_, rest) = url.split_once("://").unwrap();
    rest.split('/').next().unwrap().parse().unwrap()
}

/// Output of `blockmux info` for a URL; `Err` if it fails.
fn info(url: &str) -> Result<String, String> {
    let output = blockmux(["info", url]);
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A config with volume `a` for these networks and volume `b` for all.
fn two_volumes(listener: &str, networks: &str) -> String {
    format!(
        "nbd = ['127.0.0.1:0{listener}']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\nallow = [{networks}]\n\
         [[volume]]\nname = 'b'\nspec = 'mem:4m'\n"
    )
}

#[test]
fn a_listener_closes_connections_from_other_networks_before_any_byte() {
    let config = |networks: &str| {
        format!("nbd = ['127.0.0.1:0?allow={networks}']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n")
    };
    let mut served = Configured::serve(&config("127.0.0.2,192.0.2.0/24"));
    let url = served.daemon.url();
    let address = server(&url);
    // The announcement has only the address of the listener.
    assert!(!url.contains("allow"), "{url}");
    let mut outside = TcpStream::connect(address).unwrap();
    assert!(matches!(outside.read(&mut [0]), Ok(0) | Err(_)), "nothing was said");
    served
        .daemon
        .wait_for_line(&format!("this address protocol=\"nbd\" peer=\"{}\"", outside.local_addr().unwrap()));
    assert!(info(&url).is_err());
    let mut inside = RawClient::over(connect_from([127, 0, 0, 2], address));
    assert_eq!(inside.write(0, 0, &[7; 512]), 0);
    served.reload(&config("127.0.0.1"));
    assert!(inside.is_closed(), "its address is no longer allowed");
    info(&url).unwrap();
    if has("nbdinfo") {
        assert_eq!(succeed(Command::new("nbdinfo").args(["--size", &url])).trim(), (8 << 20).to_string());
    }
    assert!(matches!(connect_from([127, 0, 0, 2], address).read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn an_nbd_export_is_refused_by_policy_and_not_listed_in_other_networks() {
    let mut served = Configured::serve(&two_volumes("", "'127.0.0.2'"));
    let url = served.daemon.url();
    assert!(url.ends_with("/a"), "{url}");
    let refusal = info(&url).unwrap_err();
    assert!(refusal.contains("the export's `allow` list does not have the client's address"), "{refusal}");
    served
        .daemon
        .wait_for_line("login refused: the export's `allow` list does not have the client's address");
    let portal = url.strip_suffix('a').unwrap();
    // The default export is still the first, and not another one for other addresses.
    assert!(info(portal).unwrap_err().contains("`allow` list"));
    let found = text(&blockmux(["discover", portal]).stdout);
    assert!(found.contains("/b") && !found.contains("/a"), "{found}");
    if has("nbdinfo") {
        let listed = succeed(Command::new("nbdinfo").args(["--list", portal]));
        assert!(listed.contains("export=\"b\"") && !listed.contains("export=\"a\""), "{listed}");
        assert!(!Command::new("nbdinfo").arg(&url).output().unwrap().status.success());
    }
    let mut inside = RawClient::over(connect_from([127, 0, 0, 2], server(&url)));
    assert_eq!(inside.write(0, 0, &[7; 512]), 0);
    let mut other = blockmux_nbd_session(&url.replace("/a", "/b"));
    let allow = served.status()["volumes"][0]["allow"].clone();
    assert_eq!(allow, serde_json::json!(["127.0.0.2"]));
    served.write(&two_volumes("", "'127.0.0.0/31'"));
    let planned = served.said(&["diff"]);
    assert!(
        planned.starts_with(
            "~ volume a: allow: [\"127.0.0.2\"] -> [\"127.0.0.0/31\"]\n    affects nbd client 127.0.0.2:"
        ),
        "{planned}"
    );
    assert_eq!(planned.matches("affects").count(), 1, "{planned}");
    served.said(&["reload"]);
    assert!(inside.is_closed());
    assert_eq!(other.read(0, 512), [0; 512], "another volume's client goes on");
    info(&url).unwrap();
    assert!(served.said(&["export"]).contains("allow = [\"127.0.0.0/31\"]"));
}

/// A raw client with an export by its name.
fn blockmux_nbd_session(url: &str) -> RawClient {
    let (_, name) = url.rsplit_once('/').unwrap();
    RawClient::with_export(TcpStream::connect(server(url)).unwrap(), name)
}

#[test]
fn every_target_refuses_logins_from_other_networks_and_discovery_hides_it() {
    let config = |networks: &str| {
        format!(
            "iscsi = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']\nsrp = ['127.0.0.1:0']\n\
             [[volume]]\nname = 'a'\nspec = 'mem:8m'\n\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\nallow = [{networks}]\n\
             [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'a' }}\nallow = [{networks}]\n\
             [[srp_target]]\nport_id = '0x0123456789abcdef0123456789abcdef'\nluns = {{ 0 = 'a' }}\n\
             allow = [{networks}]\n"
        )
    };
    let mut served = Configured::serve(&config("'127.0.0.2'"));
    let urls: Vec<String> = ["iscsi", "iser", "nvme+tcp", "nvme+rdma", "srp"]
        .iter()
        .flat_map(|scheme| served.daemon.urls_of(scheme).into_iter().take(1))
        .collect();
    assert_eq!(urls.len(), 5, "{:?}", served.daemon.json);
    for url in &urls {
        assert!(info(url).is_err(), "{url}");
    }
    for part in [
        "has an address that is not in the target's `allow` list",
        "its name or its address is not in an allow-list",
        "has an address that is not in the target port's `allow` list",
    ] {
        served.daemon.wait_for_line(part);
    }
    let place = served.daemon.nvme_place();
    assert_eq!(RawNvme::admin(&place, HOST).err(), Some(INVALID_HOST));
    let portal_of = |url: &str| url.split('/').take(3).collect::<Vec<_>>().join("/");
    let discovered = |url: &str| text(&blockmux(["discover", &portal_of(url)]).stdout);
    assert!(!discovered(&urls[0]).contains(TARGET));
    assert!(!discovered(&place).contains(SUBSYSTEM));
    if has("iscsi-ls") {
        let listed = Command::new("iscsi-ls").arg(portal_of(&urls[0])).output().unwrap();
        assert!(!text(&listed.stdout).contains(TARGET));
    }
    served.reload(&config("'127.0.0.1'"));
    for url in &urls {
        info(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    }
    assert!(discovered(&urls[0]).contains(TARGET));
    assert!(discovered(&place).contains(SUBSYSTEM));
    if has("iscsi-ls") {
        assert!(succeed(Command::new("iscsi-ls").arg(portal_of(&urls[0]))).contains(TARGET));
    }
    // A removed address ends its sessions, as a removed initiator does.
    let mut iscsi = RawIscsi::login(urls[0].split('?').next().unwrap(), "iqn.2026-11.i:one");
    assert_eq!(iscsi.access(), [GOOD, GOOD]);
    let [_admin, mut queue] = RawNvme::controller(&place, HOST);
    assert_eq!(queue.write(0, &[1; 4096], false), 0);
    let ends = std::thread::spawn(move || {
        // The target requests a logout.
        assert_eq!(iscsi.event().0, 1);
        assert_eq!(iscsi.log_out(), 0);
        assert!(iscsi.is_closed());
    });
    let done = served.reload(&config("'127.0.0.2', '127.0.0.3'"));
    for who in
        ["affected iscsi iqn.2026-11.i:one at 127.0.0.1:", &format!("affected nvme-tcp {HOST} at 127.0.0.1:")]
    {
        assert!(done.contains(who), "{done}");
    }
    ends.join().unwrap();
    assert_eq!(queue.status(), None, "it is disconnected");
    for url in &urls {
        assert!(info(url).is_err(), "{url}");
    }
}

#[test]
fn the_networks_of_a_volume_apply_to_the_targets_that_have_it() {
    let config = |networks: &str| {
        format!(
            "iscsi = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']\nsrp = ['127.0.0.1:0']\n\
             [[volume]]\nname = 'a'\nspec = 'mem:8m'\nallow = [{networks}]\n\
             [[volume]]\nname = 'b'\nspec = 'mem:4m'\n\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'b', 1 = 'a' }}\n"
        )
    };
    let served = Configured::serve(&config("'127.0.0.2'"));
    let of_volume = |scheme: &str, volume: &str| {
        let urls = served.daemon.urls_of(scheme);
        urls.into_iter().find(|url| url.contains(&format!(":{volume}/"))).unwrap()
    };
    let (own, other) = (of_volume("nvme+tcp", "a"), of_volume("nvme+tcp", "b"));
    let iscsi = served.daemon.urls_of("iscsi").remove(0);
    assert!(info(&own).is_err() && info(&iscsi).is_err());
    info(&other).unwrap();
    let srp = served.daemon.urls_of("srp");
    assert_eq!(srp.iter().filter(|url| info(url).is_ok()).count(), 1, "that of b: {srp:?}");
    let attached = served.ctl(&["attach", "b", &format!("{SUBSYSTEM}x")]);
    assert!(!attached.status.success());
    // A volume with a list closes the target that it is attached to, which must not have sessions
    // from elsewhere.
    let of_other = RawNvme::controller(&other, HOST);
    let attach = ["attach", "a", "nqn.2026-11.blockmux:b"];
    let said = text(&served.ctl(&attach).stderr);
    assert!(said.contains("volume `a`: its `allow` list keeps out nvme-tcp "), "{said}");
    drop(of_other);
    eventually("the session has ended", || served.ctl(&attach).status.success());
    assert!(info(&other).is_err());
    served.reload(&config("'127.0.0.1'"));
    for url in [&own, &iscsi, &other] {
        info(url).unwrap();
    }
    // An added volume has its list from the beginning.
    served.said(&["add", "c=mem:1m", "--allow", "127.0.0.2,::1"]);
    let added = own.replace(":a/", ":c/");
    assert!(info(&added).is_err());
    assert!(served.said(&["export"]).contains("allow = [\"127.0.0.2\", \"::1\"]"));
    let said = text(&served.ctl(&["add", "d=mem:1m", "--allow", "10.0.0.1/8"]).stderr);
    assert!(said.contains("`10.0.0.1/8` has bits beyond its prefix; write 10.0.0.0/8"), "{said}");
}

#[test]
fn a_volume_with_networks_is_not_open_over_another_protocol() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("b.toml");
    let check = |config: &str| {
        fs::write(&path, config).unwrap();
        let output = blockmux(["serve", "--config", path.to_str().unwrap(), "--run", "true"]);
        if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
    };
    let target = |words: &str| {
        format!(
            "iscsi = ['127.0.0.1:0']\nnbd = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{words}\n\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\nallow = ['127.0.0.1']\n"
        )
    };
    let said = check(&target("")).unwrap_err();
    assert!(
        said.contains("restricts access to it (iscsi)") && said.contains("[\"iscsi\", \"nbd\"]"),
        "{said}"
    );
    check(&target("protocols = ['iscsi', 'nbd']")).unwrap();
    check(&target("allow = ['127.0.0.1']\nprotocols = ['iscsi', 'nbd']")).unwrap();
    for (config, line, what) in [
        (
            two_volumes("?allow=10.0.0.1/8", ""),
            1,
            "allow: `10.0.0.1/8` has bits beyond its prefix; write 10.0.0.0/8",
        ),
        (two_volumes("", "'10.0.0.0/33'"), 5, "`10.0.0.0/33` is no network; write it as 10.0.0.0/8"),
        (
            "nbd = ['unix:s?allow=::1']\n[[volume]]\nspec = 'mem:1m'".to_owned(),
            1,
            "have no IP addresses; remove `allow`",
        ),
    ] {
        let said = check(&config).unwrap_err();
        assert!(said.contains(&format!("b.toml:{line}: ")) && said.contains(what), "{said}");
    }
}

#[test]
fn the_api_serves_only_clients_in_its_networks() {
    let files = tempfile::tempdir().unwrap();
    let token = files.path().join("token");
    fs::write(&token, "secret-token").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let args =
        ["a=mem:1m", "--api", "127.0.0.1:0?allow=127.0.0.2", "--api-token-file", token.to_str().unwrap()];
    let mut daemon = Daemon::serve(&args);
    let api = daemon.json["api"].as_str().unwrap().to_owned();
    let ask = |mut stream: TcpStream| {
        let _ = stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        text(&answer)
    };
    assert_eq!(ask(TcpStream::connect(server(&api)).unwrap()), "");
    daemon.wait_for_line("connection refused: the `allow` list of the API does not have this address");
    assert!(ask(connect_from([127, 0, 0, 2], server(&api))).starts_with("HTTP/1.1 401 "));
}
