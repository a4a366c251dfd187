//! Installs the Python programs that tests of the HTTP API and of examples need, in a virtual
//! environment, because Debian has no packages of them.

use crate::process::{find, succeed};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs, which have the names of their packages, and the versions.
const PROGRAMS: [(&str, &str); 4] = [
    ("openapi-python-client", "0.29.1"),
    ("openapi-spec-validator", "0.9.0"),
    ("schemathesis", "4.32.5"),
    ("kubernetes-validate", "1.37.0"),
];

/// Installs missing programs if possible, and prints which tests are skipped otherwise. Never
/// fails.
pub(crate) fn install() {
    let Some(directory) = directory() else { return skipped("neither HOME nor XDG_CACHE_HOME is set") };
    let is_missing = |(program, _): &(&str, &str)| !directory.join("bin").join(program).exists();
    if !PROGRAMS.iter().any(is_missing) {
        return println!("Python programs: all installed");
    }
    match install_in(&directory) {
        Ok(()) => println!("Python programs: installed {}", requirements().join(" ")),
        Err(error) => {
            let error = format!("{error:#}");
            skipped(error.lines().last().unwrap_or_default());
        }
    }
}

/// The virtual environment. The tests look for it at the same place.
fn directory() -> Option<PathBuf> {
    let of_home = || Some(Path::new(&std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(of_home)?;
    Some(cache.join("blockmux/python"))
}

fn requirements() -> Vec<String> {
    PROGRAMS.iter().map(|(name, version)| format!("{name}=={version}")).collect()
}

fn install_in(directory: &Path) -> Result<()> {
    let python = find("python3").context("python3 is not installed")?;
    println!("Python programs: installing {} (a minute)", requirements().join(" "));
    succeed(Command::new(python).args(["-m", "venv"]).arg(directory))
        .context("cannot create a virtual environment; Debian package python3-venv")?;
    succeed(
        Command::new(directory.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"])
            .args(requirements()),
    )
    .context("pip cannot install them")?;
    Ok(())
}

fn skipped(why: &str) {
    for (program, _) in PROGRAMS {
        println!("skipped: tests with {program} ({why})");
    }
}
