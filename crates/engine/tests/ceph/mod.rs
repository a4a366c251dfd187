//! The cluster that `make test-cluster` starts, and images in it, for the tests of the engine and
//! of the program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An image of a test; it stays until the whole cluster is thrown away.
pub(crate) struct TestImage {
    /// The cluster's config.
    pub(crate) conf: PathBuf,
    pub(crate) name: String,
}

impl TestImage {
    /// A new image; `None`, with a note, if there is no cluster. `options` are those of `rbd
    /// create`.
    #[expect(clippy::print_stdout, reason = "a skipped test says why")]
    pub(crate) fn new(name: &str, options: &[&str]) -> Option<TestImage> {
        let Some(conf) = std::env::var_os("BLOCKMUX_CEPH_CONF") else {
            println!("skipped: no Ceph cluster; 'make test-cluster' starts one");
            return None;
        };
        let image = TestImage { conf: conf.into(), name: format!("{name}-{}", std::process::id()) };
        image.rbd(&[&["create"], options, &[&image.name]].concat());
        Some(image)
    }

    /// Runs Ceph's program for images, which must succeed.
    pub(crate) fn rbd(&self, arguments: &[&str]) -> String {
        let output = self.run("rbd", arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rbd {arguments:?}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs Ceph's program for images, which must fail; returns what it says.
    pub(crate) fn rbd_fails(&self, arguments: &[&str]) -> String {
        let output = self.run("rbd", arguments);
        assert!(!output.status.success(), "rbd {arguments:?} has succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Has the cluster fence a client: its requests fail from now on. `address` is as `rbd status`
    /// shows it. Storage daemons learn of it one after the other.
    pub(crate) fn blocklist(&self, address: &str) {
        // The word was another one before Ceph 16.
        let add = |word: &&str| self.run("ceph", &["osd", word, "add", address]).status.success();
        assert!(["blocklist", "blacklist"].iter().any(add), "{address}");
    }

    /// The address of the only client that has the image open for writing.
    pub(crate) fn watcher(&self) -> String {
        let status = self.rbd(&["status", &self.name]);
        let mut watchers = status.split_whitespace().filter_map(|word| word.strip_prefix("watcher="));
        let only = watchers.next().filter(|_| watchers.next().is_none());
        only.unwrap_or_else(|| panic!("one watcher: {status}")).to_owned()
    }

    /// What `tests/ceph/cluster.sh` does to one storage daemon.
    pub(crate) fn osd(&self, action: &str, number: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ceph/cluster.sh");
        let directory = self.conf.parent().unwrap();
        let mut command = Command::new("bash");
        let done = command.arg(script).arg(action).arg(directory).arg(number).status().unwrap();
        assert!(done.success(), "{action} {number}");
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        Command::new(program).arg("--conf").arg(&self.conf).args(arguments).output().unwrap()
    }
}
