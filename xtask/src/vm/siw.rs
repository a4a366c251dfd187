//! siw, Linux's software iWARP: built from the kernel's source, because Debian's kernels lack it.

use super::kernel::Kernel;
use crate::peers::install_if_permitted;
use crate::process::{find, succeed};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The module for `kernel`, built below `place` unless it exists there.
///
/// # Errors
/// If its source is missing, or it does not build; the first line says what to install.
pub(crate) fn build(place: &Path, kernel: &Kernel) -> Result<PathBuf> {
    if let Some(missing) = PROVIDER.iter().find(|file| !Path::new(file).exists()) {
        bail!("no {missing}, Debian package ibverbs-providers");
    }
    let module = place.join(format!("siw-{}.ko", kernel.release));
    if module.exists() {
        return Ok(module);
    }
    let headers_package = format!("linux-headers-{}", kernel.release);
    let headers = Path::new("/usr/src").join(&headers_package);
    let needed = [(headers.as_path(), headers_package.as_str()), (Path::new(SOURCE), SOURCE_PACKAGE)];
    let lacking: Vec<&str> =
        needed.iter().filter(|(path, _)| !path.exists()).map(|(_, package)| *package).collect();
    let installed = install_if_permitted(&lacking);
    if let Some((path, package)) = needed.iter().find(|(path, _)| !path.exists()) {
        let why = installed.err().map_or_else(String::new, |error| format!(": {error:#}"));
        bail!("no {}, Debian package {package}{why}", path.display());
    }
    if let Some(program) =
        ["make", "gcc", "strip", "tar", "xz"].iter().find(|program| find(program).is_none())
    {
        bail!("no {program}");
    }
    let work = tempfile::tempdir_in(place)?;
    succeed(Command::new("tar").arg("-xJf").arg(SOURCE).arg("-C").arg(work.path()).arg(DIRECTORY))?;
    let source = work.path().join(DIRECTORY);
    let mut make = Command::new("make");
    make.arg("-C").arg(&headers).arg(format!("M={}", source.display()));
    succeed(make.args(["CONFIG_RDMA_SIW=m", "modules"])).context("building siw")?;
    let built = source.join("siw.ko");
    succeed(Command::new("strip").arg("-g").arg(&built))?;
    fs::rename(&built, &module).with_context(|| module.display().to_string())?;
    Ok(module)
}

/// Kernel modules that siw depends on, which `modules.dep` does not list.
pub(crate) const NEEDS: &[&str] = &["ib_core", "ib_uverbs", "libcrc32c"];

/// libibverbs' provider of siw.
pub(crate) const PROVIDER: &[&str] =
    &["/etc/libibverbs.d/siw.driver", "/usr/lib/x86_64-linux-gnu/libibverbs/libsiw-rdmav34.so"];

const SOURCE: &str = "/usr/src/linux-source-6.12.tar.xz";
const SOURCE_PACKAGE: &str = "linux-source-6.12";
/// Path in the source archive.
const DIRECTORY: &str = "linux-source-6.12/drivers/infiniband/sw/siw";
