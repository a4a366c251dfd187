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

fn samples() -> PathBuf {
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
