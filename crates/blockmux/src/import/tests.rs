//! Imports the files of `samples/`, whole and damaged.

use super::format::{self, ForeignFormat};
use super::secrets::SecretFiles;
use super::source::SourceText;
use super::write::{self, WrittenConfig};
use std::path::{Path, PathBuf};

/// Each sample with its format; the config that it becomes has its name, with `.toml`.
const SAMPLES: [(&str, ForeignFormat); 8] = [
    ("lio.json", ForeignFormat::Lio),
    ("tgt.conf", ForeignFormat::Tgt),
    ("nvmet.json", ForeignFormat::Nvmet),
    ("nbd-server.conf", ForeignFormat::NbdServer),
    ("spdk.json", ForeignFormat::Spdk),
    ("scst.conf", ForeignFormat::Scst),
    ("ctl.conf", ForeignFormat::Ctld),
    ("ctl.ucl", ForeignFormat::Ctld),
];

pub(super) fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/import/samples")
}

fn import(bytes: &[u8]) -> Result<(ForeignFormat, WrittenConfig), String> {
    let convert = || {
        let source = SourceText::of_bytes(Path::new("file"), bytes)?;
        let (format, imported) = format::import(&source)?;
        let mut secrets = SecretFiles::new("secrets/".to_owned());
        Ok((format, write::write(&imported, "Imported", &mut secrets)?))
    };
    convert().map_err(|failure: crate::failure::Failure| failure.to_string())
}

/// `WRITE_SAMPLES=1` writes the configs.
#[test]
fn samples_become_these_configs() {
    for (name, expected) in SAMPLES {
        let sample = samples().join(name);
        let (format, written) = import(&std::fs::read(&sample).unwrap()).unwrap();
        assert_eq!(format, expected, "{name}");
        let golden = samples().join(format!("{name}.toml"));
        if std::env::var_os("WRITE_SAMPLES").is_some() {
            std::fs::write(&golden, &written.text).unwrap();
        }
        let before = std::fs::read_to_string(&golden).unwrap_or_default();
        assert!(written.text == before, "{name} becomes\n{}", written.text);
        let lines = written.text.lines().filter(|line| line.starts_with("# no counterpart: "));
        assert_eq!(written.lost, lines.count(), "{name}");
        assert!(!written.text.contains("hunter"), "{name}: a secret is printed");
    }
}

#[test]
fn damaged_files_are_errors_or_valid_configs() {
    for (name, _) in SAMPLES {
        let bytes = std::fs::read(samples().join(name)).unwrap();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        for round in 0..500 {
            let mut damaged = bytes.clone();
            if round % 4 == 0 {
                damaged.truncate(next(bytes.len()));
            }
            for _ in 0..=next(4) {
                let at = next(damaged.len().max(1));
                if let Some(byte) = damaged.get_mut(at) {
                    *byte = if round % 2 == 0 { b"{}<>\"\n #=0"[next(10)] } else { next(256) as u8 };
                }
            }
            match import(&damaged) {
                Ok((_, written)) => {
                    let parsed: Result<toml::Table, _> = written.text.parse();
                    assert!(parsed.is_ok(), "{name}: {}\n{parsed:?}", written.text);
                }
                Err(said) => assert!(said.starts_with("file:") && !said.contains('\n'), "{name}: {said}"),
            }
        }
    }
}

#[test]
fn deep_and_unknown_files_are_refused_with_advice() {
    for (text, expected) in [
        ("nbd = [':1']\n", "file: is no config that can be imported; give saveconfig.json of targetcli, "),
        ("", "file: is no config that can be imported; give saveconfig.json"),
        ("{}", "file: is no config that can be imported; give saveconfig.json"),
        ("{\n\"targets\": [\n}", "file:3: is not valid JSON: expected value"),
        (&"{\"a\":".repeat(100_000), "file:1: is not valid JSON: recursion limit exceeded"),
    ] {
        let said = import(text.as_bytes()).err().unwrap();
        assert!(said.starts_with(expected), "{said}");
    }
    assert_eq!(import(b"a\n\xff").err().unwrap(), "file:2: is not UTF-8; give a text file");
}

/// What cannot be expressed about initiators must keep everybody out.
#[test]
fn access_becomes_no_wider() {
    let device = "HANDLER vdisk_fileio {\nDEVICE d {\nfilename /d\n}\n}\n";
    let scst_user = |user: &str| {
        format!("{device}TARGET_DRIVER iscsi {{\nTARGET iqn.a {{\nenabled 1\nLUN 0 d\n{user}\n}}\n}}\n")
    };
    let srp = format!(
        "{device}TARGET_DRIVER ib_srpt {{\nTARGET fe80:0000:0000:0000:0002:c903:00a1:b2c3 {{\nenabled 0\nLUN 0 d\n}}\n}}"
    );
    let scst = "HANDLER vdisk_fileio {\nDEVICE d {\nfilename /d\n}\n}\nTARGET_DRIVER iscsi {\nTARGET iqn.a {\nenabled 1\n\
                LUN 0 d\nGROUP g {\nLUN 0 d\nINITIATOR iqn.b*\n}\n}\n}\n";
    let spdk = r#"{"subsystems": [{"subsystem": "iscsi", "config": [
        {"method": "bdev_null_create", "params": {"name": "d", "num_blocks": 8, "block_size": 512}},
        {"method": "iscsi_create_initiator_group", "params": {"tag": 1, "initiators": ["!iqn.b", "ANY"], "netmasks": ["ANY"]}},
        {"method": "iscsi_create_target_node", "params": {"name": "iqn.a", "pg_ig_maps": [{"pg_tag": 1, "ig_tag": 1}],
         "luns": [{"bdev_name": "d", "lun_id": 0}]}}]}]}"#;
    let lio = |attributes: &str, acls: &str| {
        format!(
            r#"{{"storage_objects": [{{"name": "d", "plugin": "ramdisk", "size": 4096}}], "targets": [{{"fabric": "iscsi",
             "wwn": "iqn.a", "tpgs": [{{"tag": 1, "attributes": {attributes}, "node_acls": {acls},
             "luns": [{{"index": 0, "storage_object": "/backstores/ramdisk/d"}}]}}]}}]}}"#
        )
    };
    let no_chap = r#"[{"node_wwn": "iqn.b", "mapped_luns": []}]"#;
    let open = r#"{"authentication": 0, "generate_node_acls": 1, "demo_mode_write_protect": 0}"#;
    let closed = "allow = []";
    for (text, expected, is_in) in [
        ("<target iqn.a>\nbacking-store /d\ninitiator-address a.example.com\n</target>", closed, true),
        ("<target iqn.a>\nbacking-store /d\n</target>", closed, false),
        ("[generic]\n[d]\nexportname = /d\nauthfile = /no/such/file\n", closed, true),
        (
            "portal-group pg0 {\nlisten 192.0.2.1\n}\ntarget iqn.a {\nportal-group pg0\nlun 0 {\npath /d\n}\n}",
            closed,
            true,
        ),
        ("<target iqn.a>\nbacking-store /d\nincominguser joe\n</target>", closed, true),
        ("<target iqn.a>\nbacking-store /d\nincominguser joe \"\"\n</target>", closed, true),
        (&scst_user("IncomingUser \"joe\""), closed, true),
        (&scst_user("IncomingUser3 \"joe\""), closed, true),
        (&scst_user("IncomingUser3 \"joe hunter-of-joe\""), "CHAP_N = \"joe\"", true),
        (&scst_user("IncomingUsers \"joe hunter-of-joe\""), closed, true),
        // A closed target is opened in the config, so its listener is there.
        (&scst_user("IncomingUser \"joe\""), "iscsi = [\"[::]:3260\"]", true),
        (&srp, closed, true),
        ("[generic]\nforce_tls = true\n[d]\nexportname = /d\n", "nbd_tls = \"require\"", true),
        (scst, closed, true),
        (spdk, closed, true),
        (&lio("{}", "[]"), closed, true),
        (&lio(r#"{"authentication": 1}"#, no_chap), closed, true),
        (&lio(open, "[]"), closed, false),
        (
            r#"{"ports": [{"portid": 1, "addr": {"trtype": "tcp", "traddr": "192.0.2.1"}, "subsystems": ["nqn.a"]}],
             "subsystems": [{"nqn": "nqn.a", "attr": {"allow_any_host": "0"},
             "namespaces": [{"nsid": 1, "device": {"path": "/d"}}]}]}"#,
            "hosts = []",
            true,
        ),
    ] {
        let (_, written) = import(text.as_bytes()).unwrap();
        assert!(!written.text.contains("hunter"), "{}", written.text);
        assert_eq!(written.text.contains(expected), is_in, "{text}\n{}", written.text);
    }
}
