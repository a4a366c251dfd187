//! `cargo xtask release`: everything that a release consists of, in `release-artifacts` of cargo's
//! target directory. Nothing is published.

mod image;
mod program;

use crate::package;
use crate::process::{cargo, find, succeed, target_directory};
use anyhow::{Context, Result, bail};
use program::{Libc, PROGRAMS, Program};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the artifacts of these target triples, or of all; returns a line for each file, with its
/// size.
///
/// # Errors
/// If a tool is missing, a step fails, or a program is not what a release promises.
pub(crate) fn run(root: &Path, triples: &[String]) -> Result<Vec<String>> {
    let programs = chosen(triples)?;
    let missing = missing_tools(root, &programs);
    if !missing.is_empty() {
        bail!("a release needs what is missing here:\n{}", missing.join("\n"));
    }
    let out = target_directory(root).join("release-artifacts");
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| out.display().to_string())?;
    }
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let seconds = succeed(Command::new("git").current_dir(root).args(["log", "-1", "--format=%ct"]))?;
    let release = Release { root, out: &out, seconds: seconds.trim() };
    let mut in_image = Vec::new();
    for program in &programs {
        println!("{}", program.triple);
        let built = program.build(root)?;
        program.check(&built)?;
        release.archive(program, &built)?;
        release.bill_of_materials(program)?;
        match program.libc {
            Libc::Gnu => release.package(program, &built)?,
            Libc::Musl => in_image.push((program.architecture, built)),
        }
    }
    if !in_image.is_empty() {
        image::write(&release, &in_image)?;
    }
    finish(&out)
}

/// What all artifacts of a release have in common.
struct Release<'a> {
    root: &'a Path,
    out: &'a Path,
    /// The time of the commit in seconds since 1970: that of all files, so that a release can be
    /// made again.
    seconds: &'a str,
}

impl Release<'_> {
    /// A `tar.gz` of the program and what people read first.
    fn archive(&self, program: &Program, built: &Path) -> Result<()> {
        let name = program.artifact();
        let folder = self.scratch(&name)?;
        fs::copy(built, folder.join("blockmux")).with_context(|| built.display().to_string())?;
        for file in ARCHIVED {
            let path = self.root.join(file);
            let name = path.file_name().with_context(|| (*file).to_owned())?;
            fs::copy(&path, folder.join(name)).with_context(|| path.display().to_string())?;
        }
        let parent = folder.parent().context("a scratch folder has a parent")?;
        let archive = self.out.join(format!("{name}.tar"));
        succeed(self.tar(&archive).arg("-c").arg("-C").arg(parent).arg(&name))?;
        succeed(Command::new("gzip").args(["-n", "-9"]).arg(archive))?;
        Ok(())
    }

    /// The Debian package, whose manual pages and completions the program itself writes.
    fn package(&self, program: &Program, built: &Path) -> Result<()> {
        package::write_parts(self.root, &|| program.command(built))?;
        let options = format!("--target {} --profile dist", program.triple);
        let package = package::pack(self.root, &options)?;
        let name = package.file_name().context("a package has a name")?;
        fs::copy(&package, self.out.join(name)).with_context(|| package.display().to_string())?;
        Ok(())
    }

    /// The software bill of materials in the format CycloneDX: the crates in the program.
    fn bill_of_materials(&self, program: &Program) -> Result<()> {
        let options = format!("--format json --describe binaries --target {}", program.triple);
        succeed(&mut cargo(self.root, &format!("cyclonedx {options}")))?;
        let written = self.root.join("crates/blockmux/blockmux_bin.cdx.json");
        let bill = self.out.join(format!("{}.cdx.json", program.artifact()));
        fs::rename(&written, bill).with_context(|| written.display().to_string())
    }

    /// An empty folder beside the artifacts.
    fn scratch(&self, name: &str) -> Result<PathBuf> {
        let folder = self.out.with_file_name("release-scratch").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    }

    /// `tar` whose output depends on contents alone.
    fn tar(&self, archive: &Path) -> Command {
        let mut tar = Command::new("tar");
        tar.args(["--format=ustar", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
        tar.arg(format!("--mtime=@{}", self.seconds)).arg("-f").arg(archive);
        tar
    }
}

/// The programs of these triples; all without any.
fn chosen(triples: &[String]) -> Result<Vec<&'static Program>> {
    let known = || PROGRAMS.iter().map(|program| program.triple).collect::<Vec<_>>().join(", ");
    if let Some(unknown) = triples.iter().find(|t| PROGRAMS.iter().all(|program| program.triple != **t)) {
        bail!("{unknown} is not a target of a release; those are {}", known());
    }
    let is_chosen = |program: &&Program| triples.is_empty() || triples.iter().any(|t| t == program.triple);
    Ok(PROGRAMS.iter().filter(is_chosen).collect())
}

/// A line for each tool that is not installed, with the command that installs it.
fn missing_tools(root: &Path, programs: &[&Program]) -> Vec<String> {
    let mut missing = Vec::new();
    if std::env::consts::ARCH != "x86_64" {
        missing.push("a machine with x86-64, where releases are built".to_owned());
    }
    for command in ["deb", "cyclonedx"] {
        if succeed(&mut cargo(root, &format!("{command} --version"))).is_err() {
            missing.push(format!("cargo {command}: cargo install --locked cargo-{command}"));
        }
    }
    let targets = succeed(Command::new("rustup").args(["target", "list", "--installed"])).unwrap_or_default();
    for program in programs {
        if !targets.lines().any(|installed| installed == program.triple) {
            missing.push(format!("Rust's library: rustup target add {}", program.triple));
        }
        for (file, package) in program.tools {
            if find(file).is_none() && !Path::new(file).exists() {
                missing.push(format!("{file}: apt-get install {package}"));
            }
        }
    }
    let mut known = Vec::new();
    missing.retain(|line| {
        !known.contains(line) && {
            known.push(line.clone());
            true
        }
    });
    missing
}

/// Writes the checksums, and describes all files.
fn finish(out: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(out).with_context(|| out.display().to_string())? {
        let entry = entry?;
        files.push((entry.file_name(), entry.metadata()?.len()));
    }
    files.sort();
    let names = files.iter().map(|(name, _)| name);
    let sums = succeed(Command::new("sha256sum").current_dir(out).args(names))?;
    fs::write(out.join("SHA256SUMS"), sums).context("SHA256SUMS")?;
    let line = |(name, len): &(std::ffi::OsString, u64)| {
        let tenths = len * 10 / 1_000_000;
        format!("{:>5}.{} MB  {}", tenths / 10, tenths % 10, name.display())
    };
    Ok(files.iter().map(line).chain([format!("in {}", out.display())]).collect())
}

/// Files beside the program in its archive.
const ARCHIVED: &[&str] = &["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository;

    #[test]
    fn a_release_has_both_libraries_for_both_architectures_unless_targets_are_named() {
        assert_eq!(chosen(&[]).unwrap().len(), 4);
        let triple = "aarch64-unknown-linux-musl".to_owned();
        let one = chosen(std::slice::from_ref(&triple)).unwrap();
        assert_eq!(one.iter().map(|program| program.triple).collect::<Vec<_>>(), [triple]);
        let error = chosen(&["x86_64-pc-windows-gnu".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("not a target of a release; those are x86_64-unknown-linux-gnu, "), "{error}");
    }

    #[test]
    fn what_an_archive_has_is_in_the_repository() {
        for file in ARCHIVED {
            assert!(repository().join(file).is_file(), "{file}");
        }
    }

    #[test]
    fn the_checksums_cover_every_artifact_and_verify() {
        let out = tempfile::tempdir().unwrap();
        fs::write(out.path().join("a.deb"), vec![0; 2_340_000]).unwrap();
        fs::write(out.path().join("b.tar.gz"), "b").unwrap();
        let lines = finish(out.path()).unwrap();
        assert_eq!(lines[..2], ["    2.3 MB  a.deb", "    0.0 MB  b.tar.gz"]);
        let sums = fs::read_to_string(out.path().join("SHA256SUMS")).unwrap();
        assert_eq!(sums.lines().count(), 2, "{sums}");
        let verify = |out: &Path| {
            succeed(Command::new("sha256sum").current_dir(out).args(["--strict", "-c", "SHA256SUMS"]))
        };
        verify(out.path()).unwrap();
        fs::write(out.path().join("b.tar.gz"), "c").unwrap();
        assert!(verify(out.path()).is_err());
    }
}
