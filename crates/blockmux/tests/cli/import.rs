//! `blockmux import`: configs of other targets become configs that `check` accepts.

use crate::program::{blockmux, succeeds, text};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The foreign configs beside the readers.
fn samples() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/import/samples");
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end != "toml")).collect();
    files.sort();
    assert!(files.len() > 1);
    files
}

#[test]
fn an_imported_config_is_valid_and_its_secrets_are_only_for_their_owner() {
    for sample in samples() {
        let name = sample.display().to_string();
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("new");
        fs::create_dir(&output).unwrap();
        let there = output.display().to_string();
        let imported = blockmux(["import", &name, "--output", &there]);
        let said = text(&imported.stderr);
        assert!(imported.status.success() && !said.contains("hunter"), "{name}: {said}");
        let config = output.join("blockmux.toml");
        let secrets = output.join("secrets");
        let count = fs::read_dir(&secrets).into_iter().flatten().count();
        let wrote = text(&imported.stdout);
        let beside = if count == 1 { "1 secret" } else { &format!("{count} secrets") };
        let beside = format!(", {beside} in {}", secrets.display());
        let beside = if count == 0 { "" } else { &beside };
        assert_eq!(wrote, format!("wrote {}{beside}\n", config.display()));
        let written = fs::read_to_string(&config).unwrap();
        assert!(!written.contains("hunter"), "{name}: {written}");
        let lost = written.lines().filter(|line| line.starts_with("# no counterpart: ")).count();
        assert!(lost == 0 || said.contains(&format!("{lost} setting")), "{name}: {lost}: {said}");
        let checked = blockmux(["check", &config.display().to_string()]);
        assert!(checked.status.success(), "{name}: {}\n{written}", text(&checked.stderr));
        for file in fs::read_dir(output.join("secrets")).into_iter().flatten() {
            assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        // What was written is never overwritten.
        let again = blockmux(["import", &name, "--output", &there]);
        let said = text(&again.stderr);
        assert!(
            said.contains("exists, and import overwrites nothing") && again.status.code() == Some(2),
            "{said}"
        );
        assert_eq!(fs::read_to_string(&config).unwrap(), written);
    }
}

#[test]
fn check_names_the_program_whose_config_it_was_given() {
    for sample in samples() {
        let name = sample.display().to_string();
        let checked = blockmux(["check", &name]);
        let said = text(&checked.stderr);
        let expected = format!("blockmux: {name}: is a config of ");
        assert!(said.starts_with(&expected) && said.contains(&format!("'blockmux import {name}'")), "{said}");
        assert_eq!(checked.status.code(), Some(2));
    }
}

#[test]
fn without_a_directory_secrets_are_left_out_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("targets.conf");
    let text_of_file =
        "<target iqn.2026-11.com.example:a>\nbacking-store /srv/a\nincominguser joe hunter-of-joe\n</target>";
    fs::write(&file, text_of_file).unwrap();
    let name = file.display().to_string();
    let imported = blockmux(["import", &name]);
    let (out, said) = (text(&imported.stdout), text(&imported.stderr));
    assert!(out.contains("secret_file = \"secrets/chap-joe.secret\""), "{out}");
    assert!(said.contains("1 secret was not written; name a directory with --secrets"), "{said}");
    let secrets = directory.path().join("keys").display().to_string();
    let out = succeeds(&["import", &name, "--secrets", &secrets]);
    assert!(out.contains(&format!("secret_file = \"{secrets}/chap-joe.secret\"")), "{out}");
    assert_eq!(fs::read_to_string(format!("{secrets}/chap-joe.secret")).unwrap(), "hunter-of-joe\n");
    let said = text(&blockmux(["import", &name, "--secrets", &secrets]).stderr);
    assert!(said.contains("cannot write the secret") && !said.contains("hunter"), "{said}");
}
