//! The cluster that `make test-cluster` starts, and images in it.

use blockmux_engine::volume::rbd::{ClusterOptions, ImageName, RbdVolume};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The cluster's config; `None`, with a note, if there is no cluster.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn conf() -> Option<PathBuf> {
    let conf = std::env::var_os("BLOCKMUX_CEPH_CONF").map(PathBuf::from);
    if conf.is_none() {
        println!("skipped: no Ceph cluster; 'make test-cluster' starts one");
    }
    conf
}

/// An image of a test; it stays until the whole cluster is thrown away.
pub(crate) struct TestImage {
    pub(crate) conf: PathBuf,
    pub(crate) name: String,
}

impl TestImage {
    /// A new image; `None` if there is no cluster. `options` are those of `rbd create`.
    pub(crate) fn new(name: &str, options: &[&str]) -> Option<TestImage> {
        let conf = conf()?;
        let image = TestImage { conf, name: format!("{name}-{}", std::process::id()) };
        image.rbd(&[&["create"], options, &[&image.name]].concat());
        Some(image)
    }

    /// Runs Ceph's program for images, which must succeed.
    pub(crate) fn rbd(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rbd {arguments:?}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs Ceph's program for images, which must fail; returns what it says.
    pub(crate) fn rbd_fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(!output.status.success(), "rbd {arguments:?} has succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new("rbd").arg("--conf").arg(&self.conf).args(arguments).output().unwrap()
    }

    pub(crate) fn image_name(&self) -> ImageName {
        ImageName { pool: POOL.to_owned(), namespace: None, image: self.name.clone(), snapshot: None }
    }

    pub(crate) fn cluster(&self) -> ClusterOptions {
        ClusterOptions { conf: Some(self.conf.clone()), ..ClusterOptions::new() }
    }

    pub(crate) fn open(&self, read_only: bool) -> RbdVolume {
        RbdVolume::open(&self.cluster(), &self.image_name(), read_only, || {}).unwrap()
    }
}

/// Runs Ceph's program for clusters.
pub(crate) fn ceph(conf: &Path, arguments: &[&str]) -> Output {
    Command::new("ceph").arg("--conf").arg(conf).args(arguments).output().unwrap()
}

pub(crate) const POOL: &str = "rbd";
