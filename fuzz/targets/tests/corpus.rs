//! Replays the corpus of every fuzz target, which contains the inputs of bugs that fuzzing found.

use blockmux_fuzz_targets::TARGETS;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn every_input_of_the_corpus_holds() {
    for target in TARGETS {
        let inputs = entries(&corpus().join(target.name));
        assert!(!inputs.is_empty(), "fuzz/corpus/{} has no inputs", target.name);
        for input in inputs {
            let bytes = fs::read(&input).unwrap();
            let held = std::panic::catch_unwind(|| (target.run)(&bytes)).is_ok();
            assert!(held, "{}", input.display());
        }
    }
}

#[test]
fn every_corpus_has_a_target() {
    let directories: Vec<String> = entries(&corpus())
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    let targets: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(directories, targets);
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus")
}

/// The entries of a directory in the order of their names.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}
