//! Replays the corpus of every fuzz target, which contains the inputs of bugs that fuzzing found.

use blockmux_fuzz_targets::{TARGETS, Target, succeeded_io};
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

/// Inputs whose I/O succeeds. A session that fails to begin would hold for every input.
const WITH_IO: [(&str, &str); 15] = [
    ("iscsi_initiator", "all_good"),
    ("iscsi_target", "read_ahead"),
    ("iser_initiator", "good"),
    ("iser_initiator", "good-unbacked"),
    ("iser_target", "login-reads-writes"),
    ("nbd_initiator", "read_one_block_simple"),
    ("nbd_target", "captured_qemu_io_rw"),
    ("nvme_rdma_initiator", "good"),
    ("nvme_rdma_initiator", "good_unbacked"),
    ("nvme_rdma_target", "io_queue"),
    ("nvme_tcp_initiator", "queue_good"),
    ("nvme_tcp_target", "io_queue"),
    ("srp_initiator", "good"),
    ("srp_initiator", "good_unbacked"),
    ("srp_target", "commands"),
];

#[test]
fn sessions_get_as_far_as_io() {
    for (name, input) in WITH_IO {
        let bytes = fs::read(corpus().join(name).join(input)).unwrap();
        let before = succeeded_io();
        (Target::find(name).unwrap().run)(&bytes);
        assert!(succeeded_io() > before, "no I/O of {name}/{input} succeeds");
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
