//! The Debian package: the release build with its manual pages and completions.

use crate::process::{cargo, find, succeed, target_directory};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the package; returns its path.
///
/// # Errors
/// If a step fails, or `cargo deb` is not installed.
pub(crate) fn build(root: &Path) -> Result<PathBuf> {
    if succeed(&mut cargo(root, "deb --version")).is_err() {
        bail!("cargo deb is not installed; run `cargo install --locked cargo-deb`");
    }
    succeed(&mut cargo(root, "build --release --locked --package blockmux"))?;
    let target = target_directory(root);
    let program = target.join("release/blockmux");
    // These are the paths in `[package.metadata.deb]` of crates/blockmux/Cargo.toml.
    let parts = root.join("target/package");
    fs::create_dir_all(&parts).with_context(|| parts.display().to_string())?;
    succeed(Command::new(&program).arg("man-pages").arg(parts.join("man")))?;
    for (shell, file) in [("bash", "blockmux.bash"), ("zsh", "_blockmux"), ("fish", "blockmux.fish")] {
        let script = succeed(Command::new(&program).args(["completions", shell]))?;
        fs::write(parts.join(file), script).with_context(|| file.to_owned())?;
    }
    let date = succeed(Command::new("git").current_dir(root).args(["log", "-1", "--format=%aD"]))?;
    let version = env!("CARGO_PKG_VERSION");
    let changelog = format!(
        "blockmux ({version}-1) unstable; urgency=medium\n\n  * /usr/share/doc/blockmux/CHANGELOG.md lists the changes.\n\n \
         -- The Blockmux authors <>  {date}"
    );
    fs::write(parts.join("changelog"), changelog).context("changelog")?;
    pack(root, "")
}

/// Installs, starts, upgrades and purges the package with `tests/package.sh`.
///
/// # Errors
/// If a step fails, or a program that the test needs is not installed.
pub(crate) fn test(root: &Path) -> Result<()> {
    if find("debootstrap").is_none() {
        bail!("debootstrap is not installed; run `apt-get install debootstrap` on Debian, as root");
    }
    build(root)?;
    let directory = root.join("target/package/test");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    // `cargo deb` removes packages of other versions from its directory.
    let newer = directory.join("newer.deb");
    fs::rename(pack(root, "--fast --deb-version 999.0.0-1")?, &newer)?;
    let package = pack(root, "--fast")?;
    let script = root.join("tests/package.sh");
    let status = Command::new("sh").arg(script).args([package, newer, directory]).status()?;
    if !status.success() {
        bail!("the package does not behave; target/package/test/log has all output");
    }
    Ok(())
}

/// Makes a package of what is built.
fn pack(root: &Path, options: &str) -> Result<PathBuf> {
    let said = succeed(&mut cargo(root, &format!("deb --package blockmux --no-build --strip {options}")))?;
    let path = said.lines().last().map(PathBuf::from).filter(|path| path.is_file());
    path.with_context(|| format!("cargo deb names no package: {said}"))
}
