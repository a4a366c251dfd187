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
    let program = target_directory(root).join("release/blockmux");
    write_parts(root, &|| Command::new(&program))?;
    pack(root, "--strip")
}

/// Writes what a program makes of itself for the package: manual pages, completions, the changelog.
pub(crate) fn write_parts(root: &Path, program: &dyn Fn() -> Command) -> Result<()> {
    // These are the paths in `[package.metadata.deb]` of crates/blockmux/Cargo.toml.
    let parts = root.join("target/package");
    fs::create_dir_all(&parts).with_context(|| parts.display().to_string())?;
    succeed(program().arg("man-pages").arg(parts.join("man")))?;
    for (shell, file) in [("bash", "blockmux.bash"), ("zsh", "_blockmux"), ("fish", "blockmux.fish")] {
        let script = succeed(program().args(["completions", shell]))?;
        fs::write(parts.join(file), script).with_context(|| file.to_owned())?;
    }
    let date = succeed(Command::new("git").current_dir(root).args(["log", "-1", "--format=%aD"]))?;
    let version = env!("CARGO_PKG_VERSION");
    let changelog = format!(
        "blockmux ({version}-1) unstable; urgency=medium\n\n  * /usr/share/doc/blockmux/CHANGELOG.md lists the changes.\n\n \
         -- The Blockmux authors <>  {date}"
    );
    fs::write(parts.join("changelog"), changelog).context("changelog")
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
    fs::rename(pack(root, "--strip --fast --deb-version 999.0.0-1")?, &newer)?;
    let package = pack(root, "--strip --fast")?;
    let script = root.join("tests/package.sh");
    let status = Command::new("sh").arg(script).args([package, newer, directory]).status()?;
    if !status.success() {
        bail!("the package does not behave; target/package/test/log has all output");
    }
    Ok(())
}

/// Makes a package of what is built; returns its path.
///
/// # Errors
/// If `cargo deb` fails.
pub(crate) fn pack(root: &Path, options: &str) -> Result<PathBuf> {
    let said = succeed(&mut cargo(root, &format!("deb --package blockmux --no-build {options}")))?;
    let path = said.lines().last().map(PathBuf::from).filter(|path| path.is_file());
    path.with_context(|| format!("cargo deb names no package: {said}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository;

    /// Each asset of the package: where it comes from, relative to the crate, and where it goes.
    fn assets() -> Vec<(String, String)> {
        let said = succeed(&mut cargo(repository(), "metadata --format-version 1 --no-deps --offline"));
        let metadata: serde_json::Value = serde_json::from_str(&said.unwrap()).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let package = packages.iter().find(|package| package["name"] == "blockmux").unwrap();
        let assets = package["metadata"]["deb"]["assets"].as_array().unwrap();
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        assets.iter().map(|asset| (text(&asset[0]), text(&asset[1]))).collect()
    }

    /// The files of the package that are in the repository.
    fn installed() -> Vec<String> {
        let mut files = Vec::new();
        for (from, to) in assets().iter().filter(|(from, _)| !from.contains("target/")) {
            let path = repository().join("crates/blockmux").join(from);
            let pattern = path.file_name().unwrap().to_str().unwrap();
            let suffix = pattern.strip_prefix('*');
            let folder = fs::read_dir(path.parent().unwrap()).unwrap();
            let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let is_it = |name: &String| suffix.map_or(name == pattern, |suffix| name.ends_with(suffix));
            let found: Vec<String> = names.filter(is_it).collect();
            assert!(!found.is_empty(), "{from} does not exist");
            files.extend(found.iter().map(|name| match to.strip_suffix('/') {
                Some(folder) => format!("{folder}/{name}"),
                None => to.clone(),
            }));
        }
        files
    }

    #[test]
    fn the_package_has_guides_alert_rules_dashboard_and_examples() {
        let files = installed();
        for expected in [
            "etc/blockmux/blockmux.toml",
            "usr/share/doc/blockmux/README.md",
            "usr/share/doc/blockmux/guides/service.md",
            "usr/share/doc/blockmux/operations/upgrades.md",
            "usr/share/doc/blockmux/reference/config.md",
            "usr/share/doc/blockmux/examples/blockmux@.service.example",
            "usr/share/doc/blockmux/examples/blockmux.rules.yml",
            "usr/share/doc/blockmux/examples/grafana-dashboard.json",
        ] {
            assert!(files.iter().any(|file| file == expected), "{expected} is not in {files:#?}");
        }
        let program = assets().into_iter().find(|(_, to)| to == "usr/bin/").unwrap();
        assert_eq!(program.0, "target/release/blockmux", "cargo deb knows this path for every profile");
    }

    #[test]
    fn every_guide_is_in_the_package() {
        let files = installed();
        for entry in fs::read_dir(repository().join("docs/guides")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(files.contains(&format!("usr/share/doc/blockmux/guides/{name}")), "{name}");
        }
    }
}
