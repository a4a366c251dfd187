//! `cargo xtask cluster`: tests with a cluster of Ceph, which runs on loopback while they do.
//!
//! `tests/ceph/cluster.sh` starts and ends the cluster's daemons. Tests find its config by the
//! variable `BLOCKMUX_CEPH_CONF`, and are skipped without it.

use crate::peers;
use crate::process::{cargo, find, succeed};
use anyhow::{Context, Result, bail};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Runs the tests whose names contain one of `names`, or all.
///
/// # Errors
/// If the cluster does not start, or a test fails.
pub(crate) fn run(root: &Path, names: &[String]) -> Result<()> {
    if !peers::install_ceph() {
        println!("skipped: tests with a Ceph cluster, because of the programs above");
        return Ok(());
    }
    for program in PROGRAMS {
        succeed(&mut cargo(root, &format!("test --quiet {program} --no-run")))?;
    }
    let cluster = Cluster::start(root)?;
    let mut failed = Vec::new();
    for (program, filter) in PROGRAMS.iter().zip(FILTERS) {
        let mut command = cargo(root, &format!("test --quiet {program} --"));
        let filters = names.iter().map(String::as_str).chain(names.is_empty().then_some(filter));
        command.env(CONF, cluster.conf()).arg("--show-output").args(filters);
        println!("{program}");
        if !command.status().context("cargo")?.success() {
            failed.push(*program);
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("tests failed in {}", failed.join(" and ")) }
}

/// A cluster in a temporary directory; dropping it ends its daemons.
struct Cluster {
    script: PathBuf,
    /// Removed after the daemons have ended.
    directory: TempDir,
}

impl Cluster {
    fn start(root: &Path) -> Result<Cluster> {
        let directory = tempfile::Builder::new().prefix("blockmux-ceph-").tempdir()?;
        // Ceph picks the other ports itself. Another program could take this one meanwhile, which
        // the monitor reports.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let cluster = Cluster { script: root.join("tests/ceph/cluster.sh"), directory };
        println!("starting a cluster in {}", cluster.directory.path().display());
        succeed(cluster.command("up").arg(port.to_string())).context("the cluster does not start")?;
        Ok(cluster)
    }

    fn command(&self, action: &str) -> Command {
        let mut command = Command::new(find("bash").unwrap_or_else(|| "bash".into()));
        command.arg(&self.script).arg(action).arg(self.directory.path());
        command
    }

    fn conf(&self) -> PathBuf {
        self.directory.path().join("ceph.conf")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = succeed(&mut self.command("down")) {
            println!("daemons of the cluster may still run: {error}");
        }
    }
}

/// Cargo's words for the test programs with tests of clusters, and what the names of these tests
/// contain.
const PROGRAMS: [&str; 3] = [
    "-p blockmux-engine --test rbd_volume",
    "-p blockmux-engine --test group_cluster",
    "-p blockmux --test cli",
];
const FILTERS: [&str; 3] = ["", "", "ceph::"];
const CONF: &str = "BLOCKMUX_CEPH_CONF";
