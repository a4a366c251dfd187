//! LUN maps of single initiators, write protection of their LUNs, and portal group tags.

use crate::program::{blockmux, has, succeed, text};
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RawIscsi};
use crate::reload::Configured;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

const TARGET: &str = "iqn.2026-11.com.example:storage";
const ONE: &str = "iqn.2026-11.i:one";
const TWO: &str = "iqn.2026-11.i:two";
const PROTECTED: &str = "0 = { volume = 'data', read_only = true }, 3 = 'root'";

/// A target with the LUNs 0 and 1 for one initiator, and others for a second one.
fn config(luns_of_two: &str) -> String {
    format!(
        "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'root'\nspec = 'mem:16m'\n[[volume]]\nname = 'data'\nspec = 'mem:32m'\n\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'root', 1 = 'data' }}\n\
         [[iscsi_target.acl]]\nInitiatorName = '{ONE}'\n\
         [[iscsi_target.acl]]\nInitiatorName = '{TWO}'\nluns = {{ {luns_of_two} }}\n"
    )
}

/// `iscsi://host:port`
fn portal(served: &Configured) -> String {
    served.daemon.urls_of("iscsi")[0].split('/').take(3).collect::<Vec<_>>().join("/")
}

#[test]
fn the_programs_of_libiscsi_see_the_luns_of_their_initiator() {
    if !has("iscsi-ls") {
        return;
    }
    let served = Configured::serve(&config(PROTECTED));
    let portal = portal(&served);
    let listed = |initiator: &str| {
        let list = succeed(Command::new("iscsi-ls").args(["-s", "-i", initiator, &portal]));
        let luns = list.lines().filter_map(|line| line.trim_start().strip_prefix("Lun:"));
        luns.map(|lun| lun.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        (listed(ONE), listed(TWO)),
        (["0", "1"].map(str::to_owned).into(), vec!["0".into(), "3".into()])
    );
    let size = |initiator: &str, lun: u8| {
        let url = format!("{portal}/{TARGET}/{lun}");
        let size = succeed(Command::new("iscsi-readcapacity16").args(["-s", "-i", initiator, &url]));
        size.trim().parse::<u64>().unwrap() >> 20
    };
    assert_eq!([size(ONE, 0), size(ONE, 1), size(TWO, 0), size(TWO, 3)], [16, 32, 32, 16]);
    let serial = |initiator: &str, lun: u8| {
        let url = format!("{portal}/{TARGET}/{lun}");
        succeed(Command::new("iscsi-inq").args(["-e", "1", "-c", "128", "-i", initiator, &url]))
    };
    assert_eq!((serial(ONE, 0), serial(ONE, 1)), (serial(TWO, 3), serial(TWO, 0)));
    let missing = Command::new("iscsi-readcapacity16")
        .args(["-i", TWO, &format!("{portal}/{TARGET}/1")])
        .output()
        .unwrap();
    assert!(!missing.status.success());
}

/// Runs commands of `qemu-io` as an initiator.
fn qemu_io_as(served: &Configured, initiator: &str, lun: u8, options: &[&str], commands: &[&str]) -> Output {
    let portal = portal(served).replace("iscsi://", "");
    let image = format!(
        r#"json:{{"driver": "raw", "file": {{"driver": "iscsi", "transport": "tcp", "portal": "{portal}", "target": "{TARGET}", "lun": {lun}, "initiator-name": "{initiator}"}}}}"#
    );
    let mut command = Command::new("qemu-io");
    command.args(options).arg("-t").arg("none").arg(image);
    for run in commands {
        command.args(["-c", run]);
    }
    command.output().unwrap()
}

#[test]
fn qemu_writes_a_lun_that_another_initiator_may_only_read() {
    let urls = "json:{\"driver\": \"iscsi\"}";
    if !has("qemu-io")
        || text(&Command::new("qemu-io").arg(urls).output().unwrap().stderr).contains("nknown driver")
    {
        return;
    }
    let served = Configured::serve(&config(PROTECTED));
    let written = qemu_io_as(&served, ONE, 1, &[], &["write -P 0x5a 1m 64k"]);
    assert!(written.status.success(), "{}", text(&written.stderr));
    let read = qemu_io_as(&served, TWO, 0, &["-r"], &["read -P 0x5a 1m 64k"]);
    assert!(
        read.status.success() && text(&read.stdout).contains("read 65536/65536"),
        "{}",
        text(&read.stdout)
    );
    let refused = qemu_io_as(&served, TWO, 0, &[], &["write -P 1 1m 64k"]);
    let said = text(&refused.stdout) + &text(&refused.stderr);
    assert!(said.contains("write protected") || said.contains("Read-only"), "{said}");
    let kept = qemu_io_as(&served, ONE, 1, &[], &["read -P 0x5a 1m 64k"]);
    assert!(!text(&kept.stdout).contains("Pattern verification failed"), "{}", text(&kept.stdout));
    let own = qemu_io_as(&served, TWO, 3, &[], &["write -P 7 0 64k"]);
    assert!(own.status.success(), "{}", text(&own.stderr));
}

#[test]
fn libiscsis_test_suite_finds_the_lun_write_protected() {
    if !has("iscsi-test-cu") {
        return;
    }
    let served = Configured::serve(&config(PROTECTED));
    let url = format!("{}/{TARGET}/0", portal(&served));
    let all = ["-i", TWO, "--dataloss", "-t", "SCSI.ReadOnly.*", &url];
    let output = Command::new("iscsi-test-cu").args(all).output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("ReadOnly") && !said.contains("[SKIPPED]"), "{said}");
    let asserts = said.lines().find(|line| line.trim_start().starts_with("asserts")).unwrap();
    let numbers: Vec<&str> = asserts.split_whitespace().collect();
    assert!(numbers[1] != "0" && numbers[1] == numbers[3], "{said}");
}

/// TEST UNIT READY: the status of each of several.
fn ready<const N: usize>(session: &mut RawIscsi) -> [u8; N] {
    [(); N].map(|()| session.run(&[0; 6], &[], 0).0)
}

#[test]
fn a_reload_changes_the_luns_of_one_initiator_and_tells_no_other() {
    let served = Configured::serve(&config(PROTECTED));
    let url = format!("{}/{TARGET}/0", portal(&served));
    let (mut one, mut two) = (RawIscsi::login(&url, ONE), RawIscsi::login(&url, TWO));
    assert_eq!((one.access(), two.access()), ([GOOD, GOOD], [GOOD, CHECK_CONDITION]));
    let done = served.reload(&config("0 = 'data', 3 = 'root'"));
    let protected = "{ read_only = true, volume = \"data\" }";
    let line = format!("~ iscsi_target {TARGET}: acl {TWO} luns: 0: {protected} -> \"data\"\n");
    assert!(done.starts_with(&line), "{done}");
    assert_eq!(ready(&mut two), [CHECK_CONDITION, GOOD], "its mode parameters have changed");
    assert_eq!(two.access(), [GOOD, GOOD]);
    let done = served.reload(&config("0 = 'data'"));
    let line = format!("- iscsi_target {TARGET}: acl {TWO} luns: 3 removed\n    affected iscsi {TWO} at ");
    assert!(done.starts_with(&line) && !done.contains(ONE), "{done}");
    assert_eq!(ready(&mut two), [CHECK_CONDITION, GOOD], "its LUNs have changed");
    served.reload(&config(PROTECTED));
    assert_eq!(ready(&mut two), [CHECK_CONDITION, CHECK_CONDITION, GOOD], "both");
    assert_eq!(two.access(), [GOOD, CHECK_CONDITION]);
    assert_eq!(ready(&mut one), [GOOD; 3]);
    assert_eq!(one.access(), [GOOD, GOOD]);
    // The running config is the file's, and may be applied as a fragment.
    assert!(served.said(&["export"]).contains("read_only = true"));
    assert_eq!(served.said(&["diff"]), "no changes\n");
}

#[test]
fn volumes_that_ctl_attaches_are_not_in_the_map_of_an_initiator() {
    let served = Configured::serve(&config(PROTECTED));
    let url = format!("{}/{TARGET}/0", portal(&served));
    let (mut one, mut two) = (RawIscsi::login(&url, ONE), RawIscsi::login(&url, TWO));
    served.said(&["add", "more=mem:1m"]);
    // LUN 3 is free in the target, and another volume in the map.
    assert_eq!(served.said(&["attach", "more", TARGET, "3"]), format!("{TARGET}  3\n"));
    let serial = |session: &mut RawIscsi, lun| {
        session.lun = lun;
        session.inquiry_page(0x80)
    };
    assert_eq!(serial(&mut one, 0), serial(&mut two, 3));
    assert_ne!(serial(&mut one, 3), serial(&mut two, 3));
    served.said(&["detach", "--force", TARGET, "3"]);
    assert_eq!(serial(&mut one, 0), serial(&mut two, 3), "the map keeps its LUN 3");
    // A removed volume leaves the map, too, and the file has what runs.
    served.said(&["remove", "--force", "data"]);
    assert_eq!(serial(&mut one, 0), serial(&mut two, 3));
    served.said(&["remove", "more"]);
    served.said(&["save"]);
    let file = served.config_text().replace(' ', "");
    assert!(file.contains("luns={0='root'}") && file.contains("luns={3='root'}"), "{file}");
    assert_eq!(served.said(&["diff"]), "no changes\n");
}

#[test]
fn a_map_belongs_to_whom_its_secret_proves() {
    if !has("iscsi-ls") {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let secret = files.path().join("two.secret");
    fs::write(&secret, "secret-of-two").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let with = config(PROTECTED) + "CHAP_N = 'two'\nsecret_file = 'two.secret'\n";
    let served = Configured::serve_in(files, &with);
    let portal = portal(&served);
    let inquire = |user: &str| {
        let url = format!("{}/{TARGET}/3", portal.replace("://", &format!("://{user}")));
        Command::new("iscsi-inq").args(["-i", TWO, &url]).output().unwrap()
    };
    assert!(inquire("two%secret-of-two@").status.success());
    for claim in ["", "two%another-secret@"] {
        let refused = inquire(claim);
        assert!(!refused.status.success(), "{}", text(&refused.stdout));
    }
}

/// A target with two portals that have these tags.
fn tagged(tags: &str) -> String {
    format!(
        "iscsi = ['127.0.0.1:0', '127.0.0.2:0']\n[[volume]]\nname = 'a'\nspec = 'mem:8m'\n\
         [[volume]]\nname = 'b'\nspec = 'mem:8m'\n\
         [[iscsi_target]]\nTargetName = '{TARGET}'\nluns = {{ 0 = 'a' }}\n{tags}\n\
         [[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:other'\nluns = {{ 0 = 'b' }}\nTargetPortalGroupTag = 9\n"
    )
}

/// The target port's name in the Device Identification VPD page.
fn port_name(session: &mut RawIscsi) -> String {
    let page = text(&session.inquiry_page(0x83));
    let at = page.find(&format!("{TARGET},t,0x")).unwrap();
    page[at..].split('\0').next().unwrap().to_owned()
}

#[test]
fn portals_have_the_configured_tags_of_each_target() {
    let served =
        Configured::serve(&tagged("TargetPortalGroupTag = { '127.0.0.1:0' = 3, '127.0.0.2:0' = 700 }"));
    let urls = served.daemon.urls_of("iscsi");
    let urls: Vec<_> = urls.iter().filter(|url| url.contains(TARGET)).collect();
    let [first, second] = urls[..] else { panic!("two portals: {urls:?}") };
    let [mut one, mut two] = [first, second].map(|url| RawIscsi::login(url, ONE));
    let names = [port_name(&mut one), port_name(&mut two)];
    assert_eq!(names, [format!("{TARGET},t,0x0003"), format!("{TARGET},t,0x02bc")]);
    let listener = |url: &str| url.split('/').nth(2).unwrap().to_owned();
    if has("iscsi-ls") {
        let portal = format!("iscsi://{}", listener(first));
        let list = succeed(Command::new("iscsi-ls").arg(portal));
        for (target, url, tag) in
            [(TARGET, first, 3), (TARGET, second, 700), ("iqn.2026-11.com.example:other", first, 9)]
        {
            let line = format!("Target:{target} Portal:{},{tag}\n", listener(url));
            assert!(list.contains(&line), "{list}");
        }
    }
    // Each group has its own access state.
    served.said(&["alua", TARGET, "standby", "--at", &listener(second)]);
    assert_eq!(ready::<1>(&mut one), [CHECK_CONDITION]);
    assert_eq!(ready::<1>(&mut two), [CHECK_CONDITION]);
    assert_eq!((one.access(), two.access()), ([GOOD, GOOD], [CHECK_CONDITION; 2]));
}

#[test]
fn sessions_of_a_portal_whose_tag_changes_log_in_again() {
    let config = |second: u16| {
        tagged(&format!("TargetPortalGroupTag = {{ '127.0.0.1:23071' = 3, '127.0.0.2:23071' = {second} }}"))
            .replace(":0'", ":23071'")
    };
    let served = Configured::serve(&config(3));
    let [first, second] = ["127.0.0.1", "127.0.0.2"].map(|ip| format!("iscsi://{ip}:23071/{TARGET}/0"));
    let (mut stays, mut goes) = (RawIscsi::login(&first, ONE), RawIscsi::login(&second, TWO));
    assert_eq!(
        [&mut stays, &mut goes].map(port_name),
        [format!("{TARGET},t,0x0003"), format!("{TARGET},t,0x0003")]
    );
    let ends = std::thread::spawn(move || {
        // The target requests a logout.
        assert_eq!(goes.event().0, 1);
        assert_eq!(goes.log_out(), 0);
        assert!(goes.is_closed());
    });
    let done = served.reload(&config(4));
    let line = format!(
        "~ iscsi_target {TARGET}: TargetPortalGroupTag: 127.0.0.2:23071: 3 -> 4\n    affected iscsi {TWO} at "
    );
    assert!(done.starts_with(&line) && !done.contains(ONE), "{done}");
    ends.join().unwrap();
    assert_eq!(stays.access(), [GOOD, GOOD]);
    assert_eq!(port_name(&mut RawIscsi::login(&second, TWO)), format!("{TARGET},t,0x0004"));
    // A listener without a tag is an error, before anything has changed.
    served.write(&config(4).replace(", '127.0.0.2:23071' = 4", ""));
    let refused = served.ctl(&["reload"]);
    let said = text(&refused.stderr);
    assert!(said.contains("has no entry for the listener 127.0.0.2:23071; add one"), "{said}");
    let checked = blockmux(["check", &served.config_path().display().to_string()]);
    assert!(
        text(&checked.stderr).contains("TargetPortalGroupTag: has no entry for"),
        "{}",
        text(&checked.stderr)
    );
}
