//! Applying a config file to a running daemon: `ctl reload`, SIGHUP, `diff`, `save`, `export` and
//! `apply`.

use crate::api::ask;
use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, has, qemu_io, succeed, text};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RawIscsi};
use crate::raw_nvme::RawNvme;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What a reload says if the config is the same.
pub(crate) const UNCHANGED: &str = "no changes; secrets and certificates were read again\n";
const TARGET: &str = "iqn.2026-11.test:disks";
const SUBSYSTEM: &str = "nqn.2026-11.test:disks";
const HOST: &str = "nqn.2026-11.test:host.of.ours";
const OTHER: &str = "nqn.2026-11.test:host.of.others";

/// A daemon with a config file.
pub(crate) struct Configured {
    pub(crate) daemon: Daemon,
    files: TempDir,
}

impl Configured {
    pub(crate) fn serve(config: &str) -> Configured {
        Configured::serve_in(tempfile::tempdir().unwrap(), config)
    }

    /// Serves a config file in a directory that may have other files.
    pub(crate) fn serve_in(files: TempDir, config: &str) -> Configured {
        fs::write(files.path().join("b.toml"), config).unwrap();
        let control = format!("unix:{}", files.path().join("control").display());
        let config = files.path().join("b.toml").display().to_string();
        let daemon = Daemon::serve_only(&["--config", &config, "--control", &control]);
        Configured { daemon, files }
    }

    pub(crate) fn config_path(&self) -> PathBuf {
        self.files.path().join("b.toml")
    }

    pub(crate) fn config_text(&self) -> String {
        fs::read_to_string(self.config_path()).unwrap()
    }

    pub(crate) fn write(&self, config: &str) {
        fs::write(self.config_path(), config).unwrap();
    }

    pub(crate) fn ctl(&self, args: &[&str]) -> Output {
        let control = format!("unix:{}", self.files.path().join("control").display());
        blockmux([&["ctl", &control], args].concat())
    }

    /// Output of a command that succeeds.
    pub(crate) fn said(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Writes a new config and reloads it.
    pub(crate) fn reload(&self, config: &str) -> String {
        self.write(config);
        self.said(&["reload"])
    }

    /// Writes a new config whose reload fails; returns the message.
    pub(crate) fn refused(&self, config: &str) -> String {
        self.write(config);
        let output = self.ctl(&["reload"]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        text(&output.stderr)
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.said(&["status", "--json"])).unwrap()
    }

    fn volumes(&self) -> Vec<String> {
        let status = self.status();
        let volumes = status["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn nbd(&self, socket: &str) -> RawClient {
        RawClient::connect(&self.socket(socket))
    }

    /// The path of a socket beside the config file.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "not within time: {what}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn adding_and_removing_volumes_does_not_affect_clients_of_others() {
    let config = |volumes: &str| {
        format!(
            "nbd = ['unix:a.sock?volumes=a', 'unix:b.sock?volumes=b', 'unix:c.sock?volumes=c']\n{volumes}"
        )
    };
    let volume = |name: &str, rest: &str| format!("[[volume]]\nname = '{name}'\nspec = 'mem:8m'\n{rest}");
    let leaving = "[[volume]]\nname = 'b'\nspec = 'file:b.img?size=8m'\n";
    let served = Configured::serve(&config(&(volume("a", "") + leaving)));
    let (mut stays, mut goes) = (served.nbd("a.sock"), served.nbd("b.sock"));
    assert_eq!((stays.write(0, 4096, &[1; 4096]), goes.write(0, 0, &[2; 4096])), (0, 0));
    served.write(&config(&(volume("a", "description = 'x'\n") + &volume("c", ""))));
    let planned = served.said(&["diff"]);
    let lines: Vec<_> = planned.lines().collect();
    assert_eq!(lines[0], "+ volume a: description added: \"x\"", "{planned}");
    assert_eq!(lines[1], "- volume b", "{planned}");
    assert!(lines[2].starts_with("    affects nbd client ") && lines[2].ends_with(" of b"), "{planned}");
    assert_eq!((lines[3], lines.len()), ("+ volume c: mem:8m", 4), "{planned}");
    assert_eq!(served.volumes(), ["a", "b"], "that was a question");
    assert_eq!(goes.read(0, 4096), [2; 4096]);
    let done = served.said(&["reload"]);
    assert_eq!(done, planned.replace("affects", "affected"));
    assert!(goes.is_closed(), "the client of b is disconnected");
    assert_eq!(stays.read(4096, 4096), [1; 4096]);
    assert_eq!(served.volumes(), ["a", "c"]);
    assert_eq!(served.nbd("c.sock").read(0, 512), [0; 512]);
    assert_eq!(served.said(&["reload"]), UNCHANGED);
    if has("nbdinfo") {
        let url = format!("nbd+unix:///c?socket={}", served.files.path().join("c.sock").display());
        assert_eq!(succeed(Command::new("nbdinfo").args(["--size", &url])).trim(), (8 << 20).to_string());
    }
}

#[test]
fn sessions_over_a_withdrawn_protocol_are_named_and_those_over_others_continue() {
    let config = |protocols: &str| {
        format!(
            "nbd = ['unix:a.sock']\niscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{protocols}\n\
             [[volume]]\nname = 'b'\nspec = 'mem:1m'\n"
        )
    };
    let served = Configured::serve(&config(""));
    let mut nbd = RawClient::with_export(UnixStream::connect(served.socket("a.sock")).unwrap(), "a");
    let urls = served.daemon.urls_of("iscsi");
    let url = urls.iter().find(|url| url.contains("blockmux:a/")).unwrap();
    let mut iscsi = RawIscsi::login(url, "iqn.2026-11.i:one");
    for (protocols, is_nbd) in [("protocols = ['iscsi']", true), ("protocols = []", false)] {
        served.write(&config(protocols));
        let planned = served.said(&["diff"]);
        let affected: Vec<_> = planned.lines().filter(|line| line.starts_with("    affects ")).collect();
        let expected = if is_nbd { "nbd client " } else { "iscsi iqn.2026-11.i:one at " };
        assert_eq!(affected.len(), 1, "{planned}");
        assert!(affected[0].starts_with(&format!("    affects {expected}")), "{planned}");
        assert_eq!((is_nbd || nbd.is_closed(), iscsi.access()), (true, [GOOD, GOOD]));
        assert_eq!(served.said(&["reload"]), planned.replace("affects", "affected"));
    }
    assert!(nbd.is_closed());
}

#[test]
fn a_larger_size_keeps_the_data_and_another_spec_replaces_it() {
    let config = |spec: &str| format!("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = '{spec}'\n");
    let served = Configured::serve(&config("mem:8m"));
    let mut nbd = served.nbd("a.sock");
    assert_eq!(nbd.write(0, 0, &[5; 512]), 0);
    assert_eq!(served.reload(&config("mem:16m")), "~ volume a: spec: \"mem:8m\" -> \"mem:16m\"\n");
    assert_eq!(nbd.read(0, 512), [5; 512]);
    assert_eq!(served.status()["volumes"][0]["size"], 16 << 20);
    served.said(&["remove", "a", "--force"]);
    served.reload(&config("file:first.img?size=16m"));
    let mut nbd = served.nbd("a.sock");
    // Another file has other data, so the connection of the client ends.
    let done = served.reload(&config("file:disk.img?size=4m"));
    assert!(done.contains("    affected nbd client "), "{done}");
    assert!(nbd.is_closed());
    let url = format!("nbd+unix:///a?socket={}", served.files.path().join("a.sock").display());
    if has("qemu-io") {
        succeed(&mut qemu_io(&url, &["write -P 7 0 64k", "read -P 7 0 64k"]));
    }
    assert_eq!(fs::metadata(served.files.path().join("disk.img")).unwrap().len(), 4 << 20);
    // A volume with another block size is another disk.
    let done = served.reload(&config("mem:4m"));
    let replaced = served.reload(&config("mem:4m?block_size=4096"));
    assert_eq!(
        replaced,
        "~ volume a: spec: \"mem:4m\" -> \"mem:4m?block_size=4k\"; removed and added as another disk\n",
        "{done}"
    );
    assert!(served.said(&["export"]).contains("spec = \"mem:4m?block_size=4k\""));
    served.reload(&config("file:disk.img?size=4m"));
    // One file cannot be open for writing twice, under this name or another.
    let once = "one file cannot be open twice; remove the volume, reload, and add it again";
    for other in
        ["file:disk.img?size=4m&block_size=4096", "file:disk.img?direct=off", "delay:1ms:file:disk.img"]
    {
        let refused = served.refused(&config(other));
        let expected = format!("/disk.img is served by this daemon as `a`; {once}\n");
        assert!(refused.ends_with(&expected), "{refused}");
        let planned = served.said(&["diff"]);
        assert!(planned.contains(&format!("; refused: {once}\n")), "{planned}");
        assert!(!planned.contains("another disk"), "{planned}");
    }
    let refused = served.refused(&config("file:disk.img").replace("'a'", "'b'"));
    assert!(refused.contains("volume `b`: spec: ") && refused.contains(" as `a`; "), "{refused}");
    // The file has the size, whether the spec repeats it or not.
    let mut nbd = served.nbd("a.sock");
    for spec in ["file:disk.img", "file:disk.img?size=4m"] {
        let done = served.reload(&config(spec));
        assert!(!done.contains("another disk") && !done.contains("affected"), "{done}");
        assert_eq!(
            (nbd.read(0, 512).len(), served.status()["volumes"][0]["size"].as_u64()),
            (512, Some(4 << 20))
        );
    }
    served.reload(&config("file:disk.img?size=4m"));
    // The length of a slice is its size. A slice with another offset is another disk.
    served.reload(&config("slice:1m,1m:file:other.img?size=8m"));
    let mut nbd = served.nbd("a.sock");
    assert_eq!(nbd.write(0, 0, &[6; 512]), 0);
    let done = served.reload(&config("slice:1m,2m:file:other.img?size=8m"));
    assert!(!done.contains("another disk"), "{done}");
    assert_eq!(
        (nbd.read(0, 512), served.status()["volumes"][0]["size"].as_u64()),
        (vec![6; 512], Some(2 << 20))
    );
    let done = served.reload(&config("slice:2m,2m:file:other.img?size=8m"));
    assert!(done.contains("removed and added as another disk"), "{done}");
    assert_eq!(served.nbd("a.sock").read(0, 512), [0; 512]);
    served.reload(&config("file:disk.img?size=4m"));
    // Options for opening the same data take effect at the next start, which is reported.
    let read_only = config("file:disk.img?size=4m") + "read_only = true\n";
    let done = served.reload(&read_only);
    assert_eq!(done, "takes effect at the next start:\n  + volume a: read_only added: true\n");
    assert_eq!(served.nbd("a.sock").write(0, 0, &[1; 512]), 0);
}

#[test]
fn an_invalid_config_changes_nothing_and_is_reported_with_its_line() {
    let good = "nbd = ['unix:a.sock']\niscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let served = Configured::serve(good);
    let mut nbd = served.nbd("a.sock");
    let file = served.config_path().display().to_string();
    let target = "[[iscsi_target]]\nTargetName = 'iqn.a'\n";
    for (more, line, what) in [
        ("colour = 1\n[[volume]]\nname = 'b'\nspec = 'mem:1m'\n", 6, "unknown key `colour`; "),
        ("[[volume]]\nname = 'b'\nspec = 'mem:x'\n", 8, "in `mem:x`: `x` is not a size"),
        ("[[volume]]\nname = 'a'\nspec = 'mem:2m'\n", 6, "volume `a`: is also given in "),
        (&*format!("{target}luns = {{ 0 = 'b' }}\n"), 8, "iscsi_target `iqn.a`: no volume has the name `b`"),
        (
            &*format!("{target}luns = {{ 0 = 'a' }}\nMaxConnections = 0\n"),
            9,
            "iscsi_target `iqn.a`: MaxConnections 0 is out of range",
        ),
        (
            &*format!("{target}luns = {{ 0 = 'a' }}\nportals = ['127.0.0.9']\n"),
            9,
            "iscsi_target `iqn.a`: portals: 127.0.0.9:3260 is not a listener",
        ),
        ("[[volume]]\nname = 'b'\nspec = 'file:/nowhere/disk.img'\n", 8, "volume `b`: spec: "),
    ] {
        let more = more.strip_prefix("colour = 1\n").map_or(format!("{good}{more}"), |more| {
            // Top-level keys precede tables.
            format!("{}{more}", good.replace("[[volume]]", "\n\n\ncolour = 1\n[[volume]]"))
        });
        let said = served.refused(&more);
        let expected = format!("blockmux: {file}:{line}: {what}");
        assert!(said.starts_with(&expected), "{said} is not {expected}");
        assert_eq!(served.volumes(), ["a"]);
        assert_eq!(nbd.read(0, 512), [0; 512]);
    }
    // No volume is exported if another one cannot be opened.
    let two = format!(
        "{good}[[volume]]\nname = 'b'\nspec = 'mem:1m'\n[[volume]]\nname = 'c'\nspec = 'file:/nowhere/disk.img'\n"
    );
    served.refused(&two);
    assert_eq!(served.volumes(), ["a"]);
    // No listener is bound if another one cannot be.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let both = good.replace(
        "'unix:a.sock'",
        &format!("'unix:a.sock', 'unix:d.sock', '{}'", taken.local_addr().unwrap()),
    );
    let said = served.refused(&both);
    assert!(said.contains("another program listens there"), "{said}");
    assert!(!served.files.path().join("d.sock").exists());
    assert_eq!(served.reload(good), UNCHANGED);
}

#[test]
fn two_entries_with_one_name_are_refused_in_every_list_and_by_every_command() {
    let target = "[[iscsi_target]]\nTargetName = 'iqn.a'\n";
    let (subsystem, srp) = ("[[nvme_subsystem]]\nnqn = 'nqn.a'\n", "[[srp_target]]\nport_id = '0x1'\n");
    let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let token = "[[api_token]]\nname = 't'\nrole = 'read'\ntoken_file = 't'\n";
    let certificate = "[[api_certificate]]\nsubject = 'CN=a'\nrole = 'read'\n";
    let part = |owner: &str, entry: &str| format!("{owner}{entry}{entry}");
    let served = Configured::serve("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n");
    let before = served.said(&["export"]);
    let socket = served.socket("control");
    for (text, second, first, what) in [
        (volume.repeat(2), 4, 1, "volume `a`: "),
        ("[[attachment]]\nvolume = 'a'\n".repeat(2), 3, 1, "attachment `a`: "),
        (token.repeat(2), 5, 1, "api_token `t`: "),
        (certificate.repeat(2), 4, 1, "api_certificate `CN=a`: "),
        (target.repeat(2), 3, 1, "iscsi_target `iqn.a`: "),
        (subsystem.repeat(2), 3, 1, "nvme_subsystem `nqn.a`: "),
        (srp.repeat(2), 3, 1, "srp_target `0x1`: "),
        (
            part(target, "[[iscsi_target.acl]]\nInitiatorName = 'i'\n"),
            5,
            3,
            "iscsi_target `iqn.a`: acl `i`: ",
        ),
        (part(srp, "[[srp_target.acl]]\ninitiator_port = 'i'\n"), 5, 3, "srp_target `0x1`: acl `i`: "),
        (
            part(subsystem, "[[nvme_subsystem.host]]\nhostnqn = 'h'\n"),
            5,
            3,
            "nvme_subsystem `nqn.a`: host `h`: ",
        ),
        (
            part(subsystem, "[[nvme_subsystem.namespace]]\nnsid = 1\n"),
            5,
            3,
            "nvme_subsystem `nqn.a`: namespace `1`: ",
        ),
        (
            part(subsystem, "[[nvme_subsystem.ana_group]]\nANAGRPID = 1\n"),
            5,
            3,
            "nvme_subsystem `nqn.a`: ana_group `1`: ",
        ),
    ] {
        let file = served.socket("part.toml");
        fs::write(&file, &text).unwrap();
        let file = file.display().to_string();
        let expected =
            format!("{file}:{second}: {what}is also given in {file}:{first}; remove one, or merge the two");
        for output in [
            served.ctl(&["apply", &file]),
            blockmux(["check", &file]),
            blockmux(["serve", "--config", &file, "--run", "true"]),
        ] {
            let said = crate::program::text(&output.stderr);
            assert!(!output.status.success() && said.contains(&expected), "{said} is not {expected}");
        }
        let json: toml::Table = text.parse().unwrap();
        let json = serde_json::to_string(&json).unwrap();
        let (status, said) = ask(&socket, "POST", "/v1/config/apply", "", &json);
        let expected = format!("{what}entries 1 and 2 of the list have this name");
        assert_eq!((status, &said["error"]["message"]), (422, &expected.into()), "{said}");
        assert_eq!(served.said(&["export"]), before);
    }
    let (status, said) =
        ask(&socket, "POST", "/v1/config/apply", "", r#"{"nbd": ["127.0.0.1:7", "127.0.0.1:7"]}"#);
    assert!(status == 422 && said["error"]["message"] == "--nbd 127.0.0.1:7: given twice", "{said}");
}

#[test]
fn changes_of_a_target_keep_its_sessions_except_those_of_removed_initiators() {
    let config = |luns: &str, initiators: &[&str]| {
        let acl = initiators.iter().map(|name| format!("[[iscsi_target.acl]]\nInitiatorName = '{name}'\n"));
        format!(
            "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n[[volume]]\nname = 'b'\nspec = 'mem:4m'\n\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ {luns} }}\n{}",
            acl.collect::<String>()
        )
    };
    let (one, two) = ("iqn.2026-11.i:one", "iqn.2026-11.i:two");
    let served = Configured::serve(&config("0 = 'a'", &[one, two]));
    let url = served.daemon.urls_of("iscsi").remove(0);
    let url = url.split('?').next().unwrap();
    let (mut stays, mut goes) = (RawIscsi::login(url, one), RawIscsi::login(url, two));
    assert_eq!(stays.access(), [GOOD, GOOD]);
    let done = served.reload(&config("0 = 'a', 1 = 'b'", &[one, two]));
    assert_eq!(done, format!("+ iscsi_target {TARGET}: luns: 1 added: \"b\"\n"));
    // REPORTED LUNS DATA HAS CHANGED is reported once, then the new unit is usable.
    assert_eq!(stays.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!(stays.run(&[0; 6], &[], 0).0, GOOD);
    stays.lun = 1;
    let first = stays.run(&[0; 6], &[], 0).0;
    assert!([GOOD, CHECK_CONDITION].contains(&first));
    assert_eq!(stays.access(), [GOOD, GOOD]);
    assert_eq!(goes.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    let ends = std::thread::spawn(move || {
        // The target requests a logout.
        assert_eq!(goes.event().0, 1);
        assert_eq!(goes.log_out(), 0);
        assert!(goes.is_closed());
    });
    let done = served.reload(&config("0 = 'a', 1 = 'b'", &[one]));
    assert!(
        done.starts_with(&format!(
            "- iscsi_target {TARGET}: acl: {two} removed\n    affected iscsi {two} at "
        )),
        "{done}"
    );
    ends.join().unwrap();
    assert_eq!(stays.access(), [GOOD, GOOD]);
    let refused = blockmux(["info", &format!("{url}?initiator={two}")]);
    assert!(!refused.status.success());
    assert!(blockmux(["info", &format!("{url}?initiator={one}")]).status.success());
    if has("iscsi-ls") {
        let portal = url.split('/').take(3).collect::<Vec<_>>().join("/");
        let listed = succeed(Command::new("iscsi-ls").args(["-s", "-i", one, &portal]));
        assert!(listed.contains("Lun:1"), "{listed}");
    }
    // Removing a unit ends no session.
    served.reload(&config("0 = 'a'", &[one]));
    assert_eq!(stays.access()[0], CHECK_CONDITION);
    stays.lun = 0;
    let _ = stays.run(&[0; 6], &[], 0);
    assert_eq!(stays.access(), [GOOD, GOOD]);
}

#[test]
fn access_states_follow_the_config_and_ctl_changes_last_until_the_next_reload() {
    let config = |state: &str| {
        format!(
            "iscsi = ['127.0.0.1:23011', '127.0.0.1:23012']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n\
             [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\n\
             access_states = {{ '127.0.0.1:23012' = '{state}' }}\n"
        )
    };
    let served = Configured::serve(&config("active/optimized"));
    let url = format!("iscsi://127.0.0.1:23012/{TARGET}/0");
    let mut session = RawIscsi::login(&url, "iqn.2026-11.i:one");
    assert_eq!(session.access(), [GOOD, GOOD]);
    let done = served.reload(&config("standby"));
    let expected = "\"active/optimized\" -> \"standby\"";
    assert!(done.contains(expected), "{done}");
    assert_eq!(session.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "it hears of it");
    assert_eq!(session.access(), [CHECK_CONDITION; 2]);
    let note = text(&served.ctl(&["alua", TARGET, "active/optimized", "--at", "127.0.0.1:23012"]).stderr);
    assert!(note.contains("this change is not in the config file; 'ctl save' writes it there"), "{note}");
    let _ = session.run(&[0; 6], &[], 0);
    assert_eq!(session.access(), [GOOD, GOOD]);
    assert!(served.said(&["diff"]).contains("\"active/optimized\" -> \"standby\""));
    served.said(&["reload"]);
    let _ = session.run(&[0; 6], &[], 0);
    assert_eq!(session.access(), [CHECK_CONDITION; 2]);
}

#[test]
fn hosts_namespaces_and_secrets_follow_the_config_while_other_hosts_continue() {
    let config = |namespaces: &str, hosts: &str| {
        format!(
            "nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n[[volume]]\nname = 'b'\nspec = 'mem:4m'\n\
             [[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ {namespaces} }}\nhosts = [{hosts}]\n"
        )
    };
    let both = format!("'{HOST}', '{OTHER}'");
    let served = Configured::serve(&config("1 = 'a'", &both));
    let url = served.daemon.nvme_place();
    let [_admin, mut stays] = RawNvme::controller(&url, HOST);
    let [_other, mut goes] = RawNvme::controller(&url, OTHER);
    assert_eq!((stays.write(0, &[1; 4096], false), goes.write(4096, &[2; 4096], false)), (0, 0));
    let done = served.reload(&config("1 = 'a', 2 = 'b'", &both));
    assert_eq!(done, format!("+ nvme_subsystem {SUBSYSTEM}: namespaces: 2 added: \"b\"\n"));
    assert_eq!((stays.write(0, &[1; 4096], false), goes.write(4096, &[2; 4096], false)), (0, 0));
    let done = served.reload(&config("1 = 'a', 2 = 'b'", &format!("'{HOST}'")));
    assert!(done.contains(&format!("affected nvme-tcp {OTHER} at ")), "{done}");
    assert!(!done.contains(HOST), "{done}");
    assert_eq!(goes.status(), None, "it is disconnected");
    assert!(RawNvme::admin(&url, OTHER).is_err());
    assert_eq!(stays.write(0, &[3; 4096], false), 0);
    // A host that must authenticate now is disconnected.
    let key = served.files.path().join("host.secret");
    fs::write(&key, "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:").unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let proving = config("1 = 'a', 2 = 'b'", "")
        + &format!("[[nvme_subsystem.host]]\nhostnqn = '{HOST}'\ndhchap_secret_file = 'host.secret'\n");
    served.reload(&proving);
    assert_eq!(stays.status(), None);
    let with = format!("{url}?hostnqn={HOST}&dhchap_secret_file={}", key.display());
    assert!(blockmux(["info", &with]).status.success());
    assert!(!blockmux(["info", &format!("{url}?hostnqn={HOST}")]).status.success());
    // The subsystem is removed with all its controllers.
    let alone = "nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n";
    served.reload(alone);
    assert!(!blockmux(["info", &with]).status.success());
    let own = url.replace(SUBSYSTEM, "nqn.2026-11.blockmux:a");
    assert!(blockmux(["info", &own]).status.success(), "each volume has its own subsystem now");
}

#[test]
fn listeners_and_limits_follow_the_config() {
    let config = |listeners: &str, limit: u32| {
        format!("nbd = [{listeners}]\nmax_connections = {limit}\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n")
    };
    let served = Configured::serve(&config("'unix:a.sock', 'unix:b.sock'", 10));
    let (mut stays, mut goes) = (served.nbd("a.sock"), served.nbd("b.sock"));
    assert_eq!(goes.read(0, 512), [0; 512]);
    let done = served.reload(&config("'unix:a.sock', 'unix:c.sock'", 2));
    let expected = ["- nbd unix:", "    affected nbd client "];
    let lines: Vec<_> =
        done.lines().filter(|line| expected.iter().any(|begin| line.starts_with(begin))).collect();
    assert_eq!(lines.len(), 2, "{done}");
    assert!(done.contains("~ max_connections: 10 -> 2\n"), "{done}");
    assert!(goes.is_closed());
    assert_eq!(stays.read(0, 512), [0; 512]);
    assert!(UnixStream::connect(served.files.path().join("b.sock")).is_err());
    assert_eq!(served.nbd("c.sock").read(0, 512), [0; 512]);
    eventually("two connections are left", || served.status()["connections"] == 1);
    assert_eq!(served.status()["max_connections"], 2);
    // A further protocol is served.
    let done = served.reload(&(String::from("iscsi = ['127.0.0.1:23021']\n") + &config("'unix:a.sock'", 10)));
    assert!(done.contains("+ iscsi 127.0.0.1:23021\n"), "{done}");
    let mut iscsi = RawIscsi::login("iscsi://127.0.0.1:23021/iqn.2026-11.blockmux:a/0", "iqn.2026-11.i:one");
    assert_eq!(iscsi.access(), [GOOD, GOOD]);
    assert_eq!(stays.read(0, 512), [0; 512]);
    // The number of cores does not change, which is reported.
    let done = served.reload(&(String::from("cores = 1\n") + &config("'unix:a.sock'", 10)));
    assert!(done.contains("takes effect at the next start:\n  + cores: 1\n"), "{done}");
}

#[test]
fn sighup_reloads_the_config_and_an_invalid_one_changes_nothing() {
    let config = |name: &str| {
        format!(
            "nbd = ['unix:a.sock?volumes=a']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[volume]]\nname = '{name}'\nspec = 'mem:1m'\n"
        )
    };
    let mut served = Configured::serve(&config("b"));
    let mut nbd = served.nbd("a.sock");
    for name in ["c", "d"] {
        served.write(&config(name));
        served.daemon.signal(Signal::HUP);
        eventually("the volume is there", || served.volumes() == ["a", name]);
    }
    served.write("nbd = ");
    served.daemon.signal(Signal::HUP);
    served.daemon.wait_for_line("the config was not reloaded and nothing has changed: ");
    assert_eq!((served.volumes(), nbd.read(0, 512)), (vec!["a".to_owned(), "d".to_owned()], vec![0; 512]));
    drop(nbd);
    let said = text(&served.ctl(&["add", "x=mem:1m", "--protocols", "nbd"]).stderr);
    assert!(said.contains("no nbd listener exports it: their `?volumes=` lists lack `x`"), "{said}");
    served.daemon.signal(Signal::TERM);
    assert!(served.daemon.wait().success());
}

#[test]
fn ctl_warns_of_unsaved_changes_and_save_writes_them() {
    let config = format!(
        "# Ours.\nnbd = ['unix:a.sock'] # here\niscsi = ['127.0.0.1:0']\ninclude = 'more'\n\n[[volume]]\nname = 'a' # the first\n\
         spec = 'mem:8m'\nprotocols = ['iscsi', 'nbd']\n\n[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\n"
    );
    let files = tempfile::tempdir().unwrap();
    fs::create_dir(files.path().join("more")).unwrap();
    let more = files.path().join("more/b.toml");
    fs::write(&more, "# Of others.\n[[volume]]\nname = 'b'\nspec = 'mem:1m' # small\n").unwrap();
    fs::write(files.path().join("b.toml"), &config).unwrap();
    let control = format!("unix:{}", files.path().join("control").display());
    let path = files.path().join("b.toml").display().to_string();
    let daemon = Daemon::serve_only(&["--config", &path, "--control", &control]);
    let served = Configured { daemon, files };
    assert_eq!(served.said(&["save"]), "nothing to save: the config file is up to date\n");
    for args in [&["add", "c=mem:2m"][..], &["attach", "c", TARGET, "3"], &["resize", "b", "2m"]] {
        let output = served.ctl(args);
        let note = text(&output.stderr);
        assert!(
            output.status.success() && note.contains("this change is not in the config file"),
            "{args:?}: {note}"
        );
    }
    let differs = served.said(&["diff"]);
    for line in [
        &format!("- iscsi_target {TARGET}: luns: 3 removed"),
        "~ volume b: spec: \"mem:2m\" -> \"mem:1m\"",
        "- volume c",
    ] {
        assert!(differs.lines().any(|own| own.starts_with(line)), "{line}: {differs}");
    }
    assert_eq!(served.said(&["save"]), "3 changes saved\n");
    assert_eq!(served.said(&["diff"]), "no changes\n");
    let main = fs::read_to_string(served.config_path()).unwrap();
    for kept in [
        "# Ours.\n",
        "] # here\n",
        "name = 'a' # the first\n",
        "\n[[volume]]\nname = \"c\"\nspec = \"mem:2m\"\n",
    ] {
        assert!(main.contains(kept), "{kept}: {main}");
    }
    let more = fs::read_to_string(served.files.path().join("more/b.toml")).unwrap();
    assert!(more.contains("# Of others.\n") && more.contains("spec = \"mem:2m\" # small\n"), "{more}");
    assert!(blockmux(["check", served.config_path().to_str().unwrap()]).status.success());
    // An edited config file is not overwritten.
    served.said(&["remove", "c"]);
    served.write(&main.replace("mem:8m", "mem:16m"));
    let output = served.ctl(&["save"]);
    assert!(text(&output.stderr).contains("was changed since it was loaded"), "{}", text(&output.stderr));
}

#[test]
fn what_a_killed_save_has_left_is_removed_by_the_next_save_and_by_a_start() {
    let files = tempfile::tempdir().unwrap();
    let left = files.path().join(".b.toml.new");
    fs::write(&left, "of a save that was killed").unwrap();
    let served = Configured::serve_in(files, "nbd = ['unix:a.sock']\n[[volume]]\nspec = 'mem:1m'\n");
    assert!(!left.exists());
    fs::write(&left, "of a save that was killed").unwrap();
    assert_eq!(served.said(&["save"]), "nothing to save: the config file is up to date\n");
    assert!(!left.exists());
}

#[test]
fn a_reload_with_unreadable_credentials_of_the_api_changes_nothing() {
    let config = |keys: &str, volumes: &str| {
        format!("nbd = ['unix:a.sock']\n{keys}\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{volumes}")
    };
    let token = "api = '127.0.0.1:0'\napi_token_file = 'token'";
    let files = tempfile::tempdir().unwrap();
    fs::write(files.path().join("token"), "twelve-bytes").unwrap();
    fs::set_permissions(files.path().join("token"), fs::Permissions::from_mode(0o600)).unwrap();
    let served = Configured::serve_in(files, &config("", ""));
    let path = served.config_path().display().to_string();
    for (keys, problem) in [
        ("api = '127.0.0.1:0'".to_owned(), "2: --api: without a token, every client that can connect"),
        (token.replace("'token'", "'none'"), "3: --api-token-file "),
        (token.replace("'token'", "'b.toml'"), "others can read or write it; run chmod 600 on it"),
        (token.replace("token_file", "tls_certificates"), "3: api_tls_certificates: TLS certificate "),
        (format!("{token}\napi_tls_subject = ['CN=a']"), "4: api_tls_subject requires https; add"),
    ] {
        let volume = "[[volume]]\nname = 'b'\nspec = 'mem:1m'\n";
        let said = served.refused(&config(&keys, volume));
        assert!(said.contains(&format!("{path}:")) && said.contains(problem), "{said}");
        // The page compares in the same way.
        let said = text(&served.ctl(&["diff"]).stderr);
        assert!(said.contains(problem), "{said}");
    }
    assert_eq!(served.volumes(), ["a"]);
    let done = served.reload(&config(token, ""));
    assert!(done.contains("api_token_file"), "{done}");
}

#[test]
fn save_writes_no_file_that_a_start_would_refuse_or_read_differently() {
    let config = "nbd = ['unix:a.sock']\n[[volume]]\nspec = 'mem:1m'\n[[volume]]\nspec = 'mem:2m'\n";
    let served = Configured::serve(config);
    served.said(&["add", "c=mem:4m"]);
    // Without it, the other unnamed volume would be `disk0`.
    served.said(&["remove", "disk0"]);
    let output = served.ctl(&["save"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was saved") && said.contains("+ volume disk1: mem:2m"), "{said}");
    assert_eq!(fs::read_to_string(served.config_path()).unwrap(), config);
    assert_eq!(served.volumes(), ["disk1", "c"]);
}

#[test]
fn save_writes_no_volume_whose_password_would_be_lost() {
    let files = tempfile::tempdir().unwrap();
    let secret = files.path().join("secret");
    fs::write(&secret, "twelve bytes\n").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let far = Configured::serve(&format!(
        "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[iscsi_target]]\nTargetName = '{TARGET}'\n\
         luns = {{ 0 = 'a' }}\n[[iscsi_target.acl]]\nCHAP_N = 'u'\nsecret_file = '{}'\n",
        secret.display()
    ));
    let url = far.daemon.urls_of("iscsi").remove(0);
    let (_, place) = url.split_once("//").unwrap();
    let place = place.split('?').next().unwrap();
    let place = place.split_once('@').map_or(place, |(_, place)| place);
    let config = "nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    let served = Configured::serve(config);
    served.said(&["add", &format!("far=iscsi://u%twelve bytes@{place}")]);
    let said = text(&served.ctl(&["save"]).stderr);
    assert!(said.contains("volume far: the password of its URL; use one with secret_file"), "{said}");
    assert_eq!(fs::read_to_string(served.config_path()).unwrap(), config);
    served.said(&["remove", "far"]);
    served.said(&["add", &format!("far=iscsi://u@{place}?secret_file={}", secret.display())]);
    assert_eq!(served.said(&["save"]), "1 changes saved\n");
}

#[test]
fn the_running_config_is_exported_and_can_be_loaded_again() {
    let config = format!(
        "nbd = ['unix:a.sock']\niscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'file:disk.img?size=1m'\n\
         protocols = ['nbd', 'iscsi']\n[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\n\
         [[iscsi_target.acl]]\nInitiatorName = 'iqn.2026-11.i:one'\n"
    );
    let served = Configured::serve(&config);
    served.ctl(&["add", "b=mem:2m"]);
    let exported = served.said(&["export"]);
    let copy = served.files.path().join("copy.toml");
    fs::write(&copy, &exported).unwrap();
    let checked = blockmux(["check", copy.to_str().unwrap()]);
    assert_eq!(
        text(&checked.stdout),
        format!("{}: 1 file, 2 volumes, 2 listeners, 1 target, 0 attachments\n", copy.display())
    );
    // Loading the exported config changes nothing.
    served.write(&exported);
    assert_eq!(served.said(&["reload"]), UNCHANGED, "{exported}");
}

#[test]
fn a_fragment_adds_and_changes_only_its_own_entries() {
    let config = format!(
        "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n[[iscsi_target]]\nTargetName = '{TARGET}'\n\
         luns = {{ 0 = 'a' }}\n"
    );
    let served = Configured::serve(&config);
    let url = served.daemon.urls_of("iscsi").remove(0);
    let mut session = RawIscsi::login(&url, "iqn.2026-11.i:one");
    let there = tempfile::tempdir().unwrap();
    let fragment = |text: &str| {
        let path = there.path().join("part.toml");
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let part = format!(
        "[[volume]]\nname = 'b'\nspec = 'file:b.img?size=1m'\n[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 1 = 'b' }}\n"
    );
    let output = served.ctl(&["apply", &fragment(&part)]);
    let (done, note) = (text(&output.stdout), text(&output.stderr));
    assert!(note.contains("this change is not in the config file; 'ctl save' writes it there"), "{note}");
    assert!(done.contains("+ volume b: file:") && done.contains("luns: 1 added: \"b\""), "{done}");
    assert!(there.path().join("b.img").exists(), "paths in a fragment are relative to the fragment");
    assert_eq!(session.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "the initiator gets a unit attention");
    assert_eq!(session.access(), [GOOD, GOOD]);
    assert_eq!(served.said(&["apply", &fragment(&part)]), UNCHANGED);
    let wrong = fragment(&format!("[[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 2 = 'x' }}\n"));
    let output = served.ctl(&["apply", &wrong]);
    let said = text(&output.stderr);
    assert!(
        said.starts_with(&format!(
            "blockmux: {wrong}:3: iscsi_target `{TARGET}`: no volume has the name `x`"
        )),
        "{said}"
    );
    let control = format!("unix:{}", served.socket("control").display());
    let wrong = fs::File::open(there.path().join("part.toml")).unwrap();
    let mut apply = Command::new(BLOCKMUX);
    let output = apply.args(["ctl", &control, "apply", "-"]).stdin(wrong).output().unwrap();
    let said = text(&output.stderr);
    assert!(said.starts_with("blockmux: standard input:3: iscsi_target "), "{said}");
    let missing = there.path().join("nosuch.toml").display().to_string();
    let said = text(&served.ctl(&["apply", &missing]).stderr);
    assert!(said.contains(&format!("{missing}: No such file or directory")), "{said}");
    assert_eq!(served.volumes(), ["a", "b"]);
}

#[test]
fn a_config_is_checked_without_serving_it() {
    let files = tempfile::tempdir().unwrap();
    let check = |text: &str| {
        let path = files.path().join("b.toml");
        fs::write(&path, text).unwrap();
        let output = blockmux([Path::new("check"), &path]);
        (output.status.code(), crate::program::text(&output.stdout) + &crate::program::text(&output.stderr))
    };
    let path = files.path().join("b.toml").display().to_string();
    let good = "nbd = ['unix:a.sock']\n[[volume]]\nspec = 'file:new.img?size=1m'\n";
    let summary = format!("{path}: 1 file, 1 volume, 1 listener, 0 targets, 0 attachments\n");
    let new = files.path().join("new.img").display().to_string();
    let created = format!(" WARN volume `disk0`: {new} does not exist; a start creates it, without data\n");
    assert_eq!(check(good), (Some(0), summary + &created));
    assert!(!files.path().join("new.img").exists() && !files.path().join("a.sock").exists());
    let (status, said) = check("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'file:nosuch.img'\n");
    let missing = format!("volume `a`: {} does not exist\n", files.path().join("nosuch.img").display());
    assert!(status == Some(0) && said.contains(&missing), "{said}");
    let (status, said) =
        check("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'vhost-user:/nosuch/a.sock'\n");
    assert!(status == Some(0) && said.contains("volume `a`: /nosuch/a.sock does not exist\n"), "{said}");
    let target = "[[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'disk0' }\n[[iscsi_target.acl]]\nCHAP_N = 'u'\nsecret_file = 'none'\n";
    let (status, said) = check(&format!("iscsi = [':0']\n[[volume]]\nspec = 'mem:1m'\n{target}"));
    assert_eq!(status, Some(2));
    assert!(said.starts_with(&format!("blockmux: {path}:")) && said.contains("secret file "), "{said}");
}

#[test]
fn a_thousand_units_follow_the_config_while_their_sessions_continue() {
    // The volumes of 20 of 1,000 units are others in each config.
    let config = |others: u32| {
        let numbers: Vec<u32> = (0..980).chain(980 + others..1000 + others).collect();
        let volume = |number: &u32| format!("[[volume]]\nname = 'v{number}'\nspec = 'null:1m'\n");
        let units = |first: u32| {
            let units = numbers.iter().map(|number| format!("{} = 'v{number}'", number + first));
            units.collect::<Vec<_>>().join(", ")
        };
        format!(
            "iscsi = ['127.0.0.1:0']\nnvme_tcp = ['127.0.0.1:0']\n{}[[iscsi_target]]\nTargetName = '{TARGET}'\n\
             luns = {{ {} }}\n[[nvme_subsystem]]\nnqn = '{SUBSYSTEM}'\nnamespaces = {{ {} }}\n",
            numbers.iter().map(volume).collect::<String>(),
            units(0),
            units(1)
        )
    };
    let served = Configured::serve(&config(0));
    let place = |scheme: &str| {
        let url = served.daemon.urls_of(scheme).remove(0);
        url.split('?').next().unwrap().rsplit_once('/').unwrap().0.to_owned()
    };
    let (target, subsystem) = (place("iscsi"), place("nvme+tcp"));
    let mut scsi = RawIscsi::login(&format!("{target}/0"), "iqn.2026-11.i:one");
    let [_admin, mut queue] = RawNvme::controller(&subsystem, HOST);
    assert_eq!((scsi.access(), queue.write(0, &[1; 512], false)), ([GOOD, GOOD], 0));
    let is_there = |url: String| blockmux(["info", &url]).status.success();
    let has = |number: u32| {
        [is_there(format!("{target}/{number}")), is_there(format!("{subsystem}/{}", number + 1))]
    };
    assert_eq!((has(999), has(1019)), ([true, true], [false, false]));
    let done = served.reload(&config(20));
    assert_eq!(done.lines().filter(|line| line.starts_with(['+', '-'])).count(), 120, "{done}");
    assert_eq!((has(979), has(999), has(1019)), ([true, true], [false, false], [true, true]));
    // REPORTED LUNS DATA HAS CHANGED.
    assert_eq!(scsi.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
    assert_eq!((scsi.access(), queue.write(0, &[2; 512], false)), ([GOOD, GOOD], 0));
    assert_eq!(served.said(&["diff"]), "no changes\n");
}

#[test]
fn an_exported_config_means_the_same_in_every_directory() {
    let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(home.path().join("disk.img"), [7; 1 << 20]).unwrap();
    let config = "nbd = ['unix:a.sock']\nstate = 'state'\ncontrol = 'unix:control'\n[[volume]]\nname = 'a'\n\
                  spec = 'file:disk.img'\n[[volume]]\nname = 'sized'\nspec = 'file:sized.img?size=1m'\n";
    let in_home = |command: &mut Command| {
        command
            .current_dir(home.path())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
    };
    fs::write(home.path().join("b.toml"), config).unwrap();
    let mut command = Command::new(crate::program::BLOCKMUX);
    // All paths of the command line are relative, too.
    command.args(["serve", "--json", "--config", "b.toml", "--nbd", "unix:b.sock", "log=log:x.log:mem:1m"]);
    in_home(&mut command);
    let daemon = Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command);
    let socket = format!("unix:{}", home.path().join("control").display());
    let output = blockmux(["ctl", &socket, "add", "late=null:1m"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = |args: &[&str]| {
        let output = blockmux([&["ctl", &socket], args].concat());
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let exported = said(&["export"]);
    let begin = home.path().display().to_string();
    for path in ["a.sock", "b.sock", "state", "control", "disk.img", "x.log"] {
        assert!(exported.contains(&format!("{begin}/{path}")), "{path}: {exported}");
    }
    // The listeners are those that there are, and what was relative stays so.
    let fragment = home.path().join("f.toml");
    fs::write(&fragment, "[[volume]]\nname = 'z'\nspec = 'mem:1m'\n").unwrap();
    let fragment = fragment.display().to_string();
    assert_eq!(said(&["apply", &fragment]).lines().next(), Some("+ volume z: mem:1m"));
    said(&["resize", "sized", "2m"]);
    said(&["save"]);
    let saved = fs::read_to_string(home.path().join("b.toml")).unwrap();
    assert!(saved.contains("spec = \"file:sized.img?size=2m\"") && saved.contains("name = \"z\""), "{saved}");
    assert_eq!(said(&["reload"]), UNCHANGED);
    said(&["apply", &fragment]);
    drop(daemon);
    let copy = elsewhere.path().join("copy.toml");
    fs::write(&copy, exported).unwrap();
    let mut command = Command::new(crate::program::BLOCKMUX);
    command.args(["serve", "--json", "--config"]).arg(&copy).current_dir(elsewhere.path());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let _again = Daemon::spawn_in(tempfile::tempdir().unwrap(), &mut command);
    assert_eq!(RawClient::connect(&home.path().join("a.sock")).read(0, 512), [7; 512]);
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 1, "nothing was created beside the copy");
}
