//! The access rule: a volume that only some initiators may use over one protocol is not open to all
//! over another, unless the config says so.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, text, without_notes};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const TARGET: &str = "iqn.2026-11.com.example:vault";
const OPEN_TARGET: &str = "iqn.2026-11.com.example:lobby";
const SUBSYSTEM: &str = "nqn.2026-11.com.example:disk";

fn in_place(directory: &Path, name: &str, content: &str) -> String {
    let path = directory.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

/// A config with the volume `vault`, which needs CHAP over iSCSI, and the volume `other`.
/// `listeners` are lines before the first table.
fn config(directory: &Path, listeners: &str, of_vault: &str, of_other: &str) -> String {
    let secret = in_place(directory, "secret", "a secret of twelve");
    let content = format!(
        "{listeners}\n[[volume]]\nname = 'vault'\nspec = 'mem:1m'\n{of_vault}\n\
         [[volume]]\nname = 'other'\nspec = 'mem:1m'\n{of_other}\n\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'vault' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{secret}'\n"
    );
    in_place(directory, "blockmux.toml", &content)
}

/// The error line of a daemon that does not start.
fn refusal(config: &str, more: &[&str]) -> String {
    let output = blockmux([&["serve", "--config", config, "--run", "true"], more].concat());
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    said
}

fn has(daemon: &Daemon, scheme: &str, volume: &str) -> bool {
    daemon.urls_of(scheme).iter().any(|url| url.ends_with(&format!("/{volume}")) || url.contains(volume))
}

#[test]
fn a_volume_with_chap_is_exported_over_nbd_only_if_its_protocols_name_nbd() {
    let files = tempfile::tempdir().unwrap();
    let both = "iscsi = ['127.0.0.1:0']\nnbd = ['127.0.0.1:0']";
    let said = refusal(&config(files.path(), both, "", ""), &[]);
    for part in [
        "volume `vault`: ",
        &format!("iscsi_target `{TARGET}` restricts access to it (iscsi)"),
        "nbd at 127.0.0.1:",
        "write protocols = [\"iscsi\"]",
        "write protocols = [\"iscsi\", \"nbd\"] in its [[volume]]",
    ] {
        assert!(said.contains(part), "no {part} in {said}");
    }

    let said = refusal(&config(files.path(), "iscsi = ['127.0.0.1:0']\naoe = ['lo']", "", ""), &[]);
    assert!(said.contains("aoe at lo (aoe)") && said.contains("[\"aoe\", \"iscsi\"]"), "{said}");

    // The restricted volume is exported by its target only, the other one over its protocols.
    let kept = config(files.path(), both, "protocols = ['iscsi']", "protocols = ['nbd']");
    let daemon = Daemon::serve_only(&["--config", &kept]);
    let urls = daemon.urls_of("nbd");
    assert!(urls.len() == 1 && urls[0].ends_with("/other"), "{urls:?}");
    let vault = urls[0].replace("/other", "/vault");
    let output = blockmux(["info", &vault]);
    assert!(text(&output.stderr).contains("server has no export \"vault\""), "{}", text(&output.stderr));
    let found = blockmux(["discover", &urls[0]]);
    assert_eq!(text(&found.stdout).lines().count(), 1, "{}", text(&found.stdout));
    let empty_name = blockmux(["info", urls[0].strip_suffix("other").unwrap()]);
    assert!(!text(&empty_name.stdout).contains("vault"));

    // It is exported openly where the config says so.
    let open = config(files.path(), both, "protocols = ['iscsi', 'nbd']", "");
    let daemon = Daemon::serve_only(&["--config", &open]);
    let urls = daemon.urls_of("nbd");
    assert!(urls.len() == 1 && urls[0].ends_with("/vault"), "{urls:?}");
    let named = config(
        files.path(),
        &both.replace("nbd = ['127.0.0.1:0", "nbd = ['127.0.0.1:0?volumes=vault"),
        "",
        "",
    );
    let daemon = Daemon::serve_only(&["--config", &named]);
    let urls = daemon.urls_of("nbd");
    assert!(urls.len() == 1 && urls[0].ends_with("/vault"), "{urls:?}");
}

#[test]
fn a_volume_with_chap_is_not_exported_to_every_nvme_host() {
    let files = tempfile::tempdir().unwrap();
    let both = "iscsi = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']";
    let said = refusal(&config(files.path(), both, "", ""), &[]);
    assert!(said.contains("nvme_tcp at 127.0.0.1:") && said.contains("[\"iscsi\", \"nvme_tcp\"]"), "{said}");
    // Without `protocols` of `other`, NVMe has no volume to export.
    let said = refusal(&config(files.path(), both, "protocols = ['iscsi']", ""), &[]);
    assert!(said.contains("exports no volume") && said.contains("protocols = [\"nvme_tcp\"]"), "{said}");
    let kept = config(files.path(), both, "protocols = ['iscsi']", "protocols = ['nvme-tcp']");
    let daemon = Daemon::serve_only(&["--config", &kept]);
    assert!(has(&daemon, "nvme+tcp", "other") && !has(&daemon, "nvme+tcp", "vault"));
    let url = daemon.urls_of("nvme+tcp").remove(0);
    let (portal, _) = url.split_once("/nqn.").unwrap();
    let found = text(&blockmux(["discover", portal]).stdout);
    assert!(found.contains(":other") && !found.contains(":vault"), "{found}");
    let output = blockmux(["info", &url.replace(":other", ":vault")]);
    assert!(!output.status.success());
}

#[test]
fn a_volume_of_a_subsystem_with_hosts_is_not_exported_over_iscsi_or_by_open_subsystems() {
    let files = tempfile::tempdir().unwrap();
    let with = |listeners: &str, volume: &str, more: &str| {
        let content = format!(
            "{listeners}\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{volume}\n[[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\n\
             namespaces = {{ 1 = 'a' }}\nhosts = ['nqn.h']\n{more}"
        );
        in_place(files.path(), "blockmux.toml", &content)
    };
    let nvme = "nvme_tcp = ['127.0.0.1:0']";
    let said = refusal(&with(&format!("{nvme}\niscsi = ['127.0.0.1:0']"), "", ""), &[]);
    assert!(said.contains("iscsi at 127.0.0.1:") && said.contains("[\"iscsi\", \"nvme_tcp\"]"), "{said}");

    let open = "[[nvme_subsystem]]\nnqn = 'nqn.open'\n[[nvme_subsystem.namespace]]\nnsid = 1\nvolume = 'a'\n";
    for words in ["", "protocols = ['nvme_tcp']"] {
        let said = refusal(&with(nvme, words, open), &[]);
        assert!(said.contains("nvme_subsystem `nqn.open`") && said.contains("\"nqn.open\""), "{said}");
    }
    Daemon::serve_only(&["--config", &with(nvme, "protocols = ['nvme_tcp', 'nqn.open']", open)]);

    let target = format!("[[iscsi_target]]\nTargetName = '{OPEN_TARGET}'\nluns = {{ 0 = 'a' }}\n");
    let both = format!("{nvme}\niscsi = ['127.0.0.1:0']");
    let said = refusal(&with(&both, "", &target), &[]);
    assert!(said.contains(&format!("iscsi_target `{OPEN_TARGET}`")), "{said}");
    let said = refusal(&with(&both, "protocols = ['nvme_tcp']", &target), &[]);
    assert!(said.contains("the volume's protocols do not name iscsi"), "{said}");
    Daemon::serve_only(&["--config", &with(&both, "protocols = ['nvme_tcp', 'iscsi']", &target)]);
    let said = refusal(&with(nvme, "protocols = ['smb']", ""), &[]);
    assert!(said.contains("`smb` is neither a protocol") && said.contains("nvme_tcp, srp, aoe"), "{said}");
}

#[test]
fn unrestricted_volumes_are_exported_by_all_listeners_or_according_to_their_lists() {
    let daemon = Daemon::serve_only(&[
        "a=mem:1m",
        "b=mem:1m",
        "--nbd",
        "127.0.0.1:0",
        "--nbd",
        "127.0.0.2:0?volumes=b",
        "--iscsi",
        "127.0.0.1:0?volumes=a",
        "--nvme-tcp",
        "127.0.0.1:0?volumes=b",
        "--nvme-tcp",
        "127.0.0.2:0",
    ]);
    assert_eq!(daemon.urls_of("nbd").len(), 3);
    assert!(has(&daemon, "iscsi", ":a/") && !has(&daemon, "iscsi", ":b/"));
    let nvme = daemon.urls_of("nvme+tcp");
    assert_eq!(nvme.iter().filter(|url| url.contains("127.0.0.1")).count(), 1, "{nvme:?}");
    for url in daemon.urls_of("nbd").into_iter().chain(daemon.urls_of("iscsi")).chain(nvme) {
        let output = blockmux(["info", &url]);
        assert!(output.status.success(), "{url}: {}", text(&output.stderr));
    }
    let second = daemon.urls_of("nbd").into_iter().find(|url| url.contains("127.0.0.2")).unwrap();
    assert!(!blockmux(["info", &second.replace("/b", "/a")]).status.success());
    let output = blockmux(["serve", "a=mem:1m", "--nbd", "127.0.0.1:0?volumes=x", "--run", "true"]);
    assert!(text(&output.stderr).contains("no volume has the name `x`"), "{}", text(&output.stderr));
}

#[test]
fn changes_at_run_time_obey_the_access_rule() {
    let files = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", files.path().join("control").display());
    let listeners = "iscsi = ['127.0.0.1:0']\nnbd = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']";
    let secret = in_place(files.path(), "secret", "a secret of twelve");
    let content = format!(
        "{listeners}\n[[volume]]\nname = 'vault'\nspec = 'mem:1m'\nprotocols = ['iscsi']\n\
         [[volume]]\nname = 'other'\nspec = 'mem:1m'\nprotocols = ['nbd']\n\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'vault' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{secret}'\n\
         [[iscsi_target]]\nTargetName = '{OPEN_TARGET}'\nredirect = '127.0.0.1:3260'\n\
         [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\n"
    );
    let path = in_place(files.path(), "blockmux.toml", &content);
    let daemon = Daemon::serve_only(&["--config", &path, "--control", &socket]);
    let ctl = |args: &[&str]| {
        let output = blockmux([&["ctl", &socket], args].concat());
        (output.status.success(), text(&output.stdout) + &without_notes(&output.stderr))
    };
    let refused = |args: &[&str], part: &str| {
        let (is_done, said) = ctl(args);
        assert!(!is_done && said.contains(part), "{args:?}: {said}");
    };
    refused(&["attach", "vault", SUBSYSTEM], "protocols do not name nvme_tcp");
    refused(&["attach", "vault", OPEN_TARGET], "would export it to everybody");
    refused(&["attach", "other", TARGET], "protocols do not name iscsi");
    let file = files.path().join("never");
    let volume = format!("bad=file:{}?size=1m", file.display());
    refused(&["add", &volume, "--protocols", "smb"], "`smb` is neither a protocol");
    assert!(!file.exists(), "the file was created before the protocols were checked");

    // An added volume is not exported until it is attached to a target.
    assert!(ctl(&["add", "late=mem:1m"]).0);
    let nbd = daemon.urls_of("nbd").remove(0);
    let late = nbd.replace("/other", "/late");
    assert!(!blockmux(["info", &late]).status.success());
    refused(&["attach", "late", TARGET], "write protocols = [\"iscsi\"]");
    assert!(ctl(&["set", "volume", "late", "protocols=[\"iscsi\"]"]).0);
    assert!(ctl(&["attach", "late", TARGET]).0);
    refused(&["attach", "late", SUBSYSTEM], "protocols do not name nvme_tcp");
    assert!(ctl(&["remove", "late"]).0);
    let (is_done, said) = ctl(&["add", "late=mem:1m", "--protocols", "nbd,nvme_tcp"]);
    assert!(is_done && said.contains("nbd://"), "{said}");
    assert!(blockmux(["info", &late]).status.success());
    assert!(ctl(&["attach", "late", SUBSYSTEM]).0);
    refused(&["attach", "late", TARGET], "protocols do not name iscsi");
}

#[test]
fn a_volume_attached_later_is_not_visible_to_initiators_with_listed_luns() {
    let files = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", files.path().join("control").display());
    let secret = in_place(files.path(), "secret", "a secret of twelve");
    let volume =
        |name: &str| format!("[[volume]]\nname = '{name}'\nspec = 'mem:1m'\nprotocols = ['iscsi']\n");
    let guest = "iqn.2026-11.com.example:guest";
    let content = format!(
        "iscsi = ['127.0.0.1:0']\n{}{}{}\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'root', 1 = 'data' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{secret}'\n\
         [[iscsi_target.acl]]\nInitiatorName = '{guest}'\nluns = [1]\n\
         [[iscsi_target]]\nTargetName = '{OPEN_TARGET}'\nluns = {{ 1 = 'data' }}\n\
         [[iscsi_target.acl]]\nInitiatorName = '{guest}'\nluns = [1]\n",
        volume("root"),
        volume("data"),
        volume("late"),
    );
    let path = in_place(files.path(), "blockmux.toml", &content);
    let daemon = Daemon::serve_only(&["--config", &path, "--control", &socket]);
    let ctl = |args: &[&str]| {
        let output = blockmux([&["ctl", &socket], args].concat());
        (output.status.success(), text(&output.stdout) + &without_notes(&output.stderr))
    };
    let url = daemon.urls_of("iscsi").remove(0);
    let address = url.split(['/', '@']).nth(3).unwrap();
    let is_seen = |lun: u8| {
        let url = format!("iscsi://{address}/{TARGET}/{lun}?initiator={guest}");
        blockmux(["info", &url]).status.success()
    };
    assert!(is_seen(1) && !is_seen(0));
    assert_eq!(ctl(&["attach", "late", TARGET]), (true, format!("{TARGET}  2\n")));
    assert!(!is_seen(2));
    // A LUN that is detached leaves the lists of those who saw it, so the next volume there is not
    // for them.
    assert!(ctl(&["detach", TARGET, "2"]).0 && ctl(&["detach", TARGET, "1"]).0);
    assert_eq!(ctl(&["attach", "late", TARGET]), (true, format!("{TARGET}  1\n")));
    assert!(!is_seen(1));
    assert!(ctl(&["set", "iscsi_target", TARGET, "acl", guest, "luns=[1]"]).0);
    assert!(is_seen(1) && !is_seen(0));
    let (is_done, said) = ctl(&["attach", "late", OPEN_TARGET]);
    assert!(!is_done && said.contains("nobody would see unit 0"), "{said}");
}

#[test]
fn only_protocols_with_a_volume_to_export_get_a_default_listener() {
    let files = tempfile::tempdir().unwrap();
    let path = config(files.path(), "", "", "");
    let said = Command::new(BLOCKMUX)
        .args(["serve", "--config", &path, "--run", "echo $BLOCKMUX_URLS"])
        .env("XDG_STATE_HOME", files.path())
        .output()
        .unwrap();
    let urls = text(&said.stdout);
    assert!(urls.contains("iscsi://") && !urls.contains("nbd") && !urls.contains("nvme"), "{urls}");
}

#[test]
fn discovery_need_not_prove_itself_where_the_targets_that_it_names_have_to() {
    let files = tempfile::tempdir().unwrap();
    let [own, theirs] = [("own", "a secret of twelve"), ("theirs", "another secret of twelve")]
        .map(|(name, secret)| in_place(files.path(), name, secret));
    let of_target = format!("target_CHAP_N = 'target'\ntarget_secret_file = '{theirs}'\n");
    let serve = |discovery: &str, of_target: &str| {
        let content = format!(
            "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'vault'\nspec = 'mem:1m'\n{discovery}\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'vault' }}\n\
             [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{own}'\n{of_target}"
        );
        let daemon = Daemon::serve_only(&["--config", &in_place(files.path(), "blockmux.toml", &content)]);
        let place = daemon.urls_of("iscsi")[0].split('/').nth(2).unwrap().replace("me@", "");
        let query = format!("secret_file={own}&mutual_user=target&mutual_secret_file={theirs}");
        (daemon, format!("iscsi://me@{place}"), query)
    };
    let proves = format!("[iscsi_discovery]\nCHAP_N = 'me'\nsecret_file = '{own}'\n");
    for discovery in ["", &proves, &format!("{proves}{of_target}")] {
        let (_daemon, portal, query) = serve(discovery, &of_target);
        let described = blockmux(["info", &format!("{portal}/{TARGET}/0?{query}&paths=all")]);
        assert!(described.status.success(), "{discovery}: {}", text(&described.stderr));
        let found = blockmux(["discover", &format!("{portal}?{query}")]);
        assert!(text(&found.stdout).contains("  1 MiB"), "{discovery}: {}", text(&found.stderr));
    }
    // A target that proves nothing is not used, whatever discovery says.
    let (_daemon, portal, query) = serve("", "");
    let refused = blockmux(["info", &format!("{portal}/{TARGET}/0?{query}&paths=all")]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("check the user and the secret"));
}

#[test]
fn a_wrong_secret_is_sent_once() {
    let files = tempfile::tempdir().unwrap();
    let [right, wrong] = [("right", "a secret of twelve"), ("wrong", "another secret of twelve")]
        .map(|(name, secret)| in_place(files.path(), name, secret));
    let content = format!(
        "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'vault'\nspec = 'mem:1m'\n\
         [iscsi_discovery]\nCHAP_N = 'me'\nsecret_file = '{right}'\n\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'vault' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{right}'\n"
    );
    let mut daemon = Daemon::serve_only(&["--config", &in_place(files.path(), "blockmux.toml", &content)]);
    let place = daemon.urls_of("iscsi")[0].split('/').nth(2).unwrap().replace("me@", "");
    let portal = format!("iscsi://me@{place}");
    let unit = format!("{portal}/{TARGET}/0");
    for (command, url, secret, line) in [
        ("info", &unit, &wrong, "WARN login refused"),
        ("discover", &portal, &wrong, "WARN login refused"),
        ("info", &unit, &right, "INFO login"),
    ] {
        let done = blockmux([command, &format!("{url}?secret_file={secret}")]);
        assert_eq!(done.status.success(), secret == &right, "{}", text(&done.stderr));
        let said = daemon.log_line(" login");
        assert!(said.starts_with(line), "{command}: {said}");
    }
}

#[test]
fn a_target_without_a_listener_is_refused() {
    let files = tempfile::tempdir().unwrap();
    let with = |content: &str| in_place(files.path(), "blockmux.toml", content);
    let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let target = format!("[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\n");
    let subsystem = format!("[[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ 1 = 'a' }}\n");
    let said = refusal(&with(&format!("nbd = ['127.0.0.1:0']\n{volume}{target}")), &[]);
    assert!(said.contains(&format!("iscsi_target `{TARGET}`: has no iscsi listener")), "{said}");
    let said = refusal(&with(&format!("nbd = ['127.0.0.1:0']\n{volume}{subsystem}")), &[]);
    assert!(said.contains(&format!("nvme_subsystem `{SUBSYSTEM}`: has no nvme_tcp listener")), "{said}");
    let target = format!("iscsi = ['127.0.0.1:0']\n{volume}{target}portals = ['127.0.0.9']\n");
    let said = refusal(&with(&target), &[]);
    assert!(said.contains("portals: 127.0.0.9:3260 is not a listener; use one of 127.0.0.1:"), "{said}");
    let here = format!("nvme_tcp = ['127.0.0.1:0']\n{volume}{subsystem}listeners = ['127.0.0.1:0']\n");
    Daemon::serve_only(&["--config", &with(&here)]);
    let said = refusal(&with(&here.replace("listeners = ['127.0.0.1", "listeners = ['127.0.0.9")), &[]);
    assert!(said.contains("listeners: 127.0.0.9:0 is not a listener; use one of 127.0.0.1:"), "{said}");
}

#[test]
fn a_file_with_chap_is_not_exported_by_a_second_volume() {
    let files = tempfile::tempdir().unwrap();
    let place = |name: &str| format!("file:{}", files.path().join(name).display());
    let (vault, other) = (place("vault.img"), place("other.img"));
    let secret = in_place(files.path(), "secret", "a secret of twelve");
    let volume = |name: &str, spec: &str, more: &str| {
        format!("[[volume]]\nname = '{name}'\nspec = '{spec}'\nprotocols = ['iscsi', 'nbd']\n{more}\n")
    };
    let targets = format!(
        "[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'vault' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{secret}'\n"
    );
    let content = |more: &str| {
        let own =
            volume("vault", &format!("{vault}?size=1m"), "uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'");
        let open = volume("other", &format!("{other}?size=1m"), "");
        format!("iscsi = ['127.0.0.1:0']\nnbd = ['127.0.0.1:0']\n{own}{open}{more}{targets}")
    };
    // Another path, a decorator or a configured UUID do not hide that the data are the same.
    std::os::unix::fs::symlink(files.path().join("vault.img"), files.path().join("link")).unwrap();
    let twin = volume("twin", &format!("delay:1us:{}?readonly=on", place("link")), "");
    let said = refusal(&in_place(files.path(), "twice.toml", &content(&twin)), &[]);
    assert!(
        said.contains("same file or device as `") && said.contains("restricts access to `vault`"),
        "{said}"
    );

    let path = in_place(files.path(), "blockmux.toml", &content(""));
    let socket = format!("unix:{}", files.path().join("control").display());
    let _daemon = Daemon::serve_only(&["--config", &path, "--control", &socket]);
    let ctl = |args: &[&str]| {
        let output = blockmux([&["ctl", &socket], args].concat());
        (output.status.success(), text(&output.stdout) + &without_notes(&output.stderr))
    };
    let twin = format!("twin={vault}?readonly=on");
    for _ in 0..2 {
        let (is_done, said) = ctl(&["add", &twin, "--protocols", "nbd"]);
        assert!(
            !is_done && said.contains("uses the same file or device as `") && said.contains("`twin`"),
            "{said}"
        );
    }
    // An unrestricted volume may share its data, and cannot be restricted while it does.
    let (is_done, said) = ctl(&["add", &format!("twin={other}?readonly=on"), "--protocols", "nbd"]);
    assert!(is_done, "{said}");
    let (is_done, said) = ctl(&["attach", "other", TARGET]);
    assert!(!is_done && said.contains("restricts access to `other`"), "{said}");
    assert!(ctl(&["remove", "twin"]).0);
    let (is_done, said) = ctl(&["attach", "other", TARGET]);
    assert!(is_done, "{said}");
    let (is_done, said) = ctl(&["add", &format!("twin={other}?readonly=on"), "--protocols", "nbd"]);
    assert!(!is_done && said.contains("restricts access to `other`"), "{said}");
}
