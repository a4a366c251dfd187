//! Names of targets, subsystems, initiators and hosts that follow no standard.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, has, succeed, text};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const ODD: &str = "My Disks/50%_\u{e4}";
const ODD_ENCODED: &str = "My%20Disks%2F50%25_%C3%A4";

/// A daemon with iSCSI targets and NVMe subsystems that have these names; `more` is appended to
/// each, and lists who may use it.
fn serve(names: &[&str], more: [&str; 2]) -> Daemon {
    let directory = tempfile::tempdir().unwrap();
    let target = |name: &&str| {
        let [iscsi, nvme] = more;
        format!(
            "[[iscsi_target]]\nTargetName = \"{name}\"\nluns = {{ 0 = 'a' }}\n{iscsi}\n\
             [[nvme_subsystem]]\nnqn = \"{name}\"\nnamespaces = {{ 1 = 'a' }}\n{nvme}\n"
        )
    };
    let config = names.iter().map(target).collect::<String>();
    let path = directory.path().join("names.toml");
    std::fs::write(&path, config).unwrap();
    let args = ["a=mem:1m", "--iscsi", ":0", "--nvme-tcp", ":0", "--config", path.to_str().unwrap()];
    Daemon::serve_only(&args)
}

/// The URL of the portal of another URL.
fn portal(url: &str) -> String {
    url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/")
}

fn info(url: &str) -> Value {
    let output = blockmux(["info", "--json", url]);
    assert!(output.status.success(), "{url}: {}", text(&output.stderr));
    serde_json::from_str(&text(&output.stdout)).unwrap()
}

#[test]
fn any_name_of_a_target_or_subsystem_is_served_listed_and_used() {
    let names = ["blktests-subsystem-1", "iqn.2026-11.T:Disk_A", "nqn.2026-11.T:Disk_A", ODD];
    let daemon = serve(&names, ["", ""]);
    for (scheme, key) in [("iscsi", "target"), ("nvme+tcp", "subsystem")] {
        let urls = daemon.urls_of(scheme);
        assert_eq!(urls.len(), names.len());
        let found = succeed(Command::new(BLOCKMUX).args(["discover", &portal(&urls[0])]));
        for (url, name) in urls.iter().zip(names) {
            assert!(found.contains(&format!("{url}  1 MiB")), "{url}: {found}");
            assert_eq!(info(url)[key], name);
        }
        assert!(urls[3].contains(&format!("/{ODD_ENCODED}/")), "{}", urls[3]);
        let output = blockmux(["info", &urls[3]]);
        let warning = text(&output.stderr);
        assert!(warning.contains("the name does not begin with ") && warning.contains(ODD), "{warning}");
    }
}

#[test]
fn listed_initiators_and_hosts_may_have_any_name() {
    let who = "Backup Host/1";
    let daemon = serve(
        &["disks"],
        [
            &format!("[[iscsi_target.acl]]\nInitiatorName = '{who}'"),
            &format!("hosts = ['{who}', 'nqn.2026-11.T:Other']"),
        ],
    );
    let place = |scheme: &str| daemon.urls_of(scheme)[0].split('?').next().unwrap().to_owned();
    let (iscsi, nvme) = (place("iscsi"), place("nvme+tcp"));
    for url in [daemon.urls_of("iscsi").remove(0), daemon.urls_of("nvme+tcp").remove(0)] {
        assert!(url.contains("=Backup%20Host/1"), "{url}");
        info(&url);
    }
    // iSCSI names are compared without case, NQNs byte for byte.
    info(&format!("{iscsi}?initiator=backup%20HOST/1"));
    info(&format!("{nvme}?hostnqn=nqn.2026-11.T:Other"));
    for url in [format!("{nvme}?hostnqn=nqn.2026-11.t:other"), format!("{iscsi}?initiator=backup"), nvme] {
        assert_eq!(blockmux(["info", &url]).status.code(), Some(2), "{url}");
    }
}

#[test]
fn a_name_with_control_characters_is_logged_escaped() {
    let mut daemon = serve(&["disk"], ["", ""]);
    for (scheme, parameter) in [("iscsi", "initiator"), ("nvme+tcp", "hostnqn")] {
        let url = daemon.urls_of(scheme).remove(0);
        info(&format!("{url}?{parameter}=a%0Ab%1B[2J{scheme}"));
        daemon.wait_for_line(&format!("initiator=\"a\\nb\\u{{1b}}[2J{scheme}\""));
    }
}

#[test]
fn libiscsi_uses_a_target_and_an_initiator_with_unusual_names() {
    if !has("iscsi-ls") || !has("iscsi-inq") {
        return;
    }
    let daemon = serve(&["Disk_A"], ["", ""]);
    let url = daemon.urls_of("iscsi").remove(0);
    let listed = succeed(Command::new("iscsi-ls").args(["-i", "my host", &portal(&url)]));
    assert!(listed.contains("Target:Disk_A "), "{listed}");
    assert!(succeed(Command::new("iscsi-inq").args(["-i", "My Host", &url])).contains("Vendor:"));
    let other = url.replace("Disk_A", "disk_a");
    assert!(succeed(Command::new("iscsi-inq").arg(other)).contains("Vendor:"), "in another case");
}

#[test]
fn a_name_that_cannot_be_sent_is_refused_with_its_bounds() {
    let long = "x".repeat(224);
    for (url, why) in [
        (format!("iscsi://127.0.0.1:1/{long}/0"), "an iSCSI name has 1 to 223 bytes"),
        (format!("nvme+tcp://127.0.0.1:1/{long}/1"), "an NQN has 1 to 223 bytes"),
    ] {
        let output = blockmux(["info", &url]);
        assert!(text(&output.stderr).contains(why), "{}", text(&output.stderr));
    }
    for (text_of, key) in [("iscsi_target", "TargetName"), ("nvme_subsystem", "nqn")] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        std::fs::write(&path, format!("[[{text_of}]]\n{key} = '{long}'\n")).unwrap();
        assert!(!check(&path).status.success());
    }
}

fn check(config: &Path) -> std::process::Output {
    blockmux(["serve", "a=mem:1m", "--iscsi", ":0", "--check", "--config", config.to_str().unwrap()])
}
