//! The Debian package: the release build with its manual pages and completions.

use crate::process::{cargo, succeed, target_directory};
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
    let said = succeed(&mut cargo(root, "deb --package blockmux --no-build"))?;
    let path = said.lines().last().map(PathBuf::from).filter(|path| path.is_file());
    path.with_context(|| format!("cargo deb names no package: {said}"))
}
