//! Copies of a file to volumes and back, also while their target is killed.

use crate::daemon::Daemon;
use crate::program::{blockmux, succeeds, text};
use rustix::process::Signal;
use std::fs;
use std::thread;
use tempfile::TempDir;

/// A file whose blocks all differ.
pub(crate) struct CopySource {
    directory: TempDir,
    content: Vec<u8>,
    mib: u32,
}

impl CopySource {
    /// Files of different seeds differ everywhere.
    pub(crate) fn new(mib: u32, seed: u32) -> CopySource {
        let words = 0..mib << 18;
        let content: Vec<u8> =
            words.flat_map(|word| (word.wrapping_mul(2_654_435_761) ^ seed).to_le_bytes()).collect();
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("from"), &content).unwrap();
        CopySource { directory, content, mib }
    }

    /// The file as a volume.
    pub(crate) fn spec(&self) -> String {
        format!("file:{}", self.path("from"))
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Copies the file to the URL `there`, and back from `back`, which names the same volume, and
    /// compares. The volume has zeroes afterwards.
    pub(crate) fn survives_there_and_back(&self, there: &str, back: &str, options: &[&str]) {
        let (to, nothing) = (self.path("to"), format!("null:{}m", self.mib));
        let copies =
            |from: &str, to: &str| succeeds(&[&["copy", "--overwrite"], options, &[from, to]].concat());
        copies(&self.spec(), there);
        copies(back, &format!("file:{to}?size={}m", self.mib));
        assert!(fs::read(&to).unwrap() == self.content, "there by {there} and back by {back}");
        fs::remove_file(&to).unwrap();
        succeeds(&["copy", "--overwrite", &nothing, there]);
    }
}

/// Copies to a target that is killed and started again meanwhile. `serve` starts it with a volume,
/// and names the URL to copy to; `listener` is its option for the same address.
pub(crate) fn a_copy_survives_a_kill(
    serve: impl FnOnce(&str) -> (Daemon, String),
    listener: impl FnOnce(&str) -> [String; 2],
) {
    let source = CopySource::new(8, 3);
    let disk = source.path("disk");
    // Slow enough that the copy is not done at the signal, which the second wait proves.
    let volume = format!("log:-:delay:5ms:file:{disk}?size=8m");
    let (mut daemon, url) = serve(&volume);
    let [option, address] = listener(url.split_once("://").unwrap().1.split('/').next().unwrap());
    let from = source.spec();
    let copy = thread::spawn(move || {
        blockmux(["copy", "--overwrite", "--verify", "--bs", "64k", "--iodepth", "8", &from, &url])
    });
    for _ in 0..20 {
        daemon.wait_for_line(" write ");
    }
    daemon.signal(Signal::KILL);
    daemon.wait();
    daemon.start_again(&[&volume, &option, &address]);
    daemon.wait_for_line(" write ");
    let output = copy.join().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.lines().all(|line| line.contains("trying again")), "{said}");
    assert!(fs::read(disk).unwrap() == source.content);
}
