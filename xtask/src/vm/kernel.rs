//! Debian's kernel: downloaded and unpacked, not installed.

use crate::process::succeed;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An unpacked kernel.
pub(crate) struct Kernel {
    pub(crate) release: String,
    /// The kernel image that QEMU boots.
    pub(crate) image: PathBuf,
    /// Directory of the kernel's modules, with `modules.dep`.
    pub(crate) modules: PathBuf,
}

/// Returns the kernel unpacked below `place`, or downloads the newest one of Debian. Remove `place`
/// to download it again. If the environment names a package, its kernel is used instead.
///
/// # Errors
/// If there is none and none can be downloaded.
pub(crate) fn fetch(place: &Path) -> Result<Kernel> {
    let directory = match std::env::var_os(PACKAGE) {
        Some(package) => of_package(place, Path::new(&package))?,
        None => place.join("kernel"),
    };
    if !directory.exists() {
        download(place, &directory)?;
    }
    let releases = directory.join("lib/modules");
    let entry =
        fs::read_dir(&releases).ok().and_then(|mut entries| entries.next()).context("no kernel")??;
    let release = entry.file_name().to_string_lossy().into_owned();
    Ok(Kernel {
        image: directory.join(format!("boot/vmlinuz-{release}")),
        modules: releases.join(&release),
        release,
    })
}

fn download(place: &Path, directory: &Path) -> Result<()> {
    let mut packages = packages()?;
    if packages.is_empty() {
        // A new machine has no package lists; without permission to fetch them the error is clear
        // here.
        succeed(Command::new("apt-get").arg("update")).context("apt-get update")?;
        packages = self::packages()?;
    }
    if packages.is_empty() {
        bail!("apt has no package {PREFIX}*");
    }
    let work = tempfile::tempdir_in(place)?;
    // A listed package may be gone, since each security update replaces the last.
    let mut said = String::new();
    for package in packages.iter().take(MAX_TRIES) {
        match succeed(Command::new("apt-get").current_dir(&work).args(["download", package])) {
            Ok(_) => {
                let files = fs::read_dir(&work)?.collect::<std::io::Result<Vec<_>>>()?;
                let file =
                    files.first().with_context(|| format!("apt-get download {package} left no file"))?;
                return unpack(work.path(), &file.path(), package, directory);
            }
            Err(error) => said = error.to_string(),
        }
    }
    bail!("cannot download {}: {}", packages[0], said.lines().last().unwrap_or_default())
}

/// The directory of the kernel in a package file, which is unpacked unless it was before.
fn of_package(place: &Path, package: &Path) -> Result<PathBuf> {
    let name = package.file_stem().and_then(|name| name.to_str()).context("not a package file")?;
    let directory = place.join(name);
    if !directory.exists() {
        let release = name.split('_').next().unwrap_or(name);
        unpack(tempfile::tempdir_in(place)?.path(), package, release, &directory)?;
    }
    Ok(directory)
}

/// The packages with kernels of our version, newest first.
fn packages() -> Result<Vec<String>> {
    let names = succeed(Command::new("apt-cache").args(["pkgnames", PREFIX]))?;
    let mut packages: Vec<_> =
        names.lines().filter_map(|name| Some((patch(name)?, name.to_owned()))).collect();
    packages.sort();
    Ok(packages.into_iter().rev().map(|(_, name)| name).collect())
}

/// The third number of a kernel's version, if `package` is the generic kernel: names of other
/// flavours and of debug symbols have more words.
fn patch(package: &str) -> Option<u32> {
    let (patch, rest) = package.strip_prefix(PREFIX)?.split_once("+deb")?;
    let debian = rest.strip_suffix("-amd64")?;
    debian.chars().all(|c| c.is_ascii_digit()).then_some(())?;
    patch.parse().ok()
}

/// Unpacks a package file of the package with this name.
fn unpack(work: &Path, file: &Path, package: &str, directory: &Path) -> Result<()> {
    let root = work.join("root");
    succeed(Command::new("dpkg-deb").arg("--extract").arg(file).arg(&root))?;
    // Some packages have `/usr/lib` and no `/lib`.
    if !root.join("lib").exists() {
        fs::rename(root.join("usr/lib"), root.join("lib"))?;
    }
    let release = package.trim_start_matches("linux-image-");
    // Installing the package would do this.
    succeed(Command::new("depmod").arg("--basedir").arg(&root).arg(release))?;
    fs::rename(root, directory).with_context(|| directory.display().to_string())
}

/// Prefix of the packages' names, up to the third number of the version.
/// Environment variable with the file of a Debian package, to try another kernel.
const PACKAGE: &str = "VM_KERNEL_PACKAGE";
const PREFIX: &str = "linux-image-6.12.";
const MAX_TRIES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernels_for_most_machines_are_taken() {
        assert_eq!(patch("linux-image-6.12.117+deb12-amd64"), Some(117));
        assert_eq!(patch("linux-image-6.12.9+deb13-amd64"), Some(9));
        for other in ["-cloud-amd64", "-rt-amd64", "-amd64-dbg", "-amd64-unsigned", "-arm64"] {
            assert_eq!(patch(&format!("linux-image-6.12.9+deb13{other}")), None);
        }
        assert_eq!(patch("linux-image-6.1.0-50-amd64"), None);
    }
}
