//! Tests with the Linux kernel itself as the peer: it runs on this machine in QEMU, emulated in
//! software, which needs neither root nor KVM.
//!
//! ```text
//!   tests/vm/NAME.sh runs in the guest                           on this machine
//!     check SENTENCE ──serial──▶ one line of ours, with its time
//!     host COMMAND ────serial──▶ host: that command, ──────────▶ blockmux, in a directory of this test
//!                                waits for its status               ▲
//!     open-iscsi, LIO, nbd, mkfs, fio ◀── TCP over QEMU's own network, the same addresses on both sides
//!     aoe, aoetools                   ◀── frames over a tap, if we are root
//! ```
//! `kernel` fetches Debian's kernel, `siw` builds a module that it lacks, `image` creates a guest's
//! file system from both and from programs of this machine, `boot` a disk from which firmware loads
//! them, which `source` serves, `guest` runs one script, `host` executes the script's requests, and
//! `log` records the output of both sides. `rxe` says what some scripts need of this machine.

mod boot;
mod guest;
mod host;
mod image;
mod kernel;
mod log;
mod rxe;
mod siw;
mod source;

use crate::peers::package;
use crate::process::{cargo, find, succeed, target_directory};
use anyhow::{Context, Result, bail};
use guest::Guest;
use source::KernelSource;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How Blockmux is built for the guests.
#[derive(Clone, Copy)]
pub(crate) enum Profile {
    Debug,
    Release,
}

impl Profile {
    /// Cargo's directory for its programs.
    fn directory(self) -> &'static str {
        match self {
            Profile::Debug => "debug",
            Profile::Release => "release",
        }
    }
}

/// Runs the scripts of [`SCRIPTS`] whose names are in `only`, or all, with Blockmux in this
/// profile; `say` gets a line for each check. Returns lines for the end of a report: the number of
/// checks, or why nothing could be run.
///
/// # Errors
/// If a check fails; the error contains the end of that guest's log.
pub(crate) fn run(
    root: &Path,
    profile: Profile,
    only: &[String],
    say: &mut dyn FnMut(&str),
) -> Result<Vec<String>> {
    let mut scripts = chosen(&scripts(root)?, only)?;
    if let Some(missing) = missing() {
        return Ok(vec![format!("skipped: tests with the Linux kernel ({missing})")]);
    }
    let (started, place) = (Instant::now(), target_directory(root).join("vm"));
    fs::create_dir_all(&place).with_context(|| place.display().to_string())?;
    let kernel = match kernel::fetch(&place) {
        Ok(kernel) => kernel,
        Err(error) => return Ok(vec![format!("skipped: tests with the Linux kernel ({error:#})")]),
    };
    build(root, profile, "--package blockmux")?;
    let mut lines = Vec::new();
    let any_over_siw = scripts.iter().any(|script| needs_siw(script));
    let siw = match any_over_siw.then(|| siw::build(&place, &kernel)).transpose() {
        Ok(module) => module,
        Err(error) => {
            let over_siw = scripts.extract_if(.., |script| needs_siw(script));
            lines.extend(over_siw.map(|script| format!("skipped: {script} ({error:#})")));
            None
        }
    };
    lines.extend(skip_lacking(&mut scripts));
    let programs = target_directory(root).join(profile.directory());
    let for_guest = match scripts.iter().any(|script| is_in_guest(script)) {
        true => build_for_guest(root, profile, &programs)?,
        false => Vec::new(),
    };
    let image = image::of_this_process(&place)?;
    image::build(&root.join(SCRIPTS), &kernel, siw.as_deref(), &for_guest, &image)?;
    let (mut checks, mut failed) = (0, Vec::new());
    for script in &scripts {
        if guest::needs_frames(script) && !rustix::process::geteuid().is_root() {
            lines.push(format!("skipped: {script} (a tap interface needs root)"));
            continue;
        }
        let log = place.join(script).with_extension("log");
        let guest = Guest { kernel: &kernel, image: &image, programs: &programs, log: &log };
        let mut outcome = guest.run(script, say).with_context(|| script.clone())?;
        if let Some(why) = outcome.no_end {
            let first = log.with_extension("first.log");
            fs::rename(&log, &first).with_context(|| first.display().to_string())?;
            let again = format!("{script}: {why}, so it ran twice; the first log is {}", first.display());
            say(&again);
            lines.push(again);
            outcome = guest.run(script, say).with_context(|| script.clone())?;
        }
        checks += outcome.checks;
        if !outcome.passed {
            failed.push(format!(
                "{script} failed, complete log in {}; its end:\n{}",
                log.display(),
                log::tail(&log)?
            ));
        }
    }
    if !failed.is_empty() {
        lines.append(&mut failed);
        bail!("{}", lines.join("\n"));
    }
    let seconds = started.elapsed().as_secs_f64();
    lines.push(format!("Linux {}: {checks} checks passed in {seconds:.0} s", kernel.release));
    Ok(lines)
}

/// Removes the scripts that need programs which this machine lacks; returns a line for each.
fn skip_lacking(scripts: &mut Vec<String>) -> Vec<String> {
    let mut lines = Vec::new();
    for (with, programs) in [(WITH_TLSHD, image::FOR_TLS), (WITH_STUDY, image::FOR_STUDY), (WITH_TGT, TGT)] {
        if let Some(program) = programs.iter().find(|program| find(program).is_none()) {
            let lacking = scripts.extract_if(.., |script| with.contains(&script.as_str()));
            lines.extend(lacking.map(|script| format!("skipped: {script} (no {program})")));
        }
    }
    scripts.retain(|script| {
        let lacking = KernelSource::of(script).missing();
        lines.extend(
            lacking.map(|(file, package)| format!("skipped: {script} (no {file}, Debian package {package})")),
        );
        lacking.is_none()
    });
    if let Some(lacking) = rxe::missing() {
        let over_rxe = scripts.extract_if(.., |script| rxe::is_used_by(script));
        lines.extend(over_rxe.map(|script| format!("skipped: {script} ({lacking})")));
    }
    if find("strip").is_none() {
        let in_guest = scripts.extract_if(.., |script| is_in_guest(script));
        lines.extend(in_guest.map(|script| format!("skipped: {script} (no strip)")));
    }
    lines
}

/// Builds what scripts run in the guest; returns the paths of the programs.
fn build_for_guest(root: &Path, profile: Profile, programs: &Path) -> Result<Vec<PathBuf>> {
    let mut built = vec![programs.join("blockmux")];
    for (package, example) in EXAMPLES {
        build(root, profile, &format!("--package {package} --example {example}"))?;
        built.push(programs.join("examples").join(example));
    }
    Ok(built)
}

fn build(root: &Path, profile: Profile, what: &str) -> Result<()> {
    let release = if let Profile::Release = profile { "--release " } else { "" };
    succeed(&mut cargo(root, &format!("build --quiet {release}{what}"))).map(drop)
}

/// The names of all scripts, in order.
fn scripts(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join(SCRIPTS)).context(SCRIPTS)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".sh") && name != LIBRARY {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// A script may be named with or without its directory and its ending.
fn chosen(scripts: &[String], only: &[String]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for name in only {
        let stem = Path::new(name).file_stem().unwrap_or_default();
        match scripts.iter().find(|script| Path::new(script).file_stem() == Some(stem)) {
            Some(script) => names.push(script.clone()),
            None => bail!("there is no script {name} in {SCRIPTS}; known are {}", scripts.join(", ")),
        }
    }
    let tests = scripts.iter().filter(|script| !MEASURES.contains(&script.as_str()));
    Ok(if only.is_empty() { tests.cloned().collect() } else { names })
}

/// The reason why no guest can run here, as half a sentence; `None` if one can.
fn missing() -> Option<String> {
    if std::env::consts::ARCH != "x86_64" {
        return Some("this machine is not x86_64, and its programs run in the guest".to_owned());
    }
    let program = image::PROGRAMS.iter().chain(NEEDED).find(|program| find(program).is_none())?;
    Some(match package(program) {
        Some(package) => format!("no {program}, Debian package {package}"),
        None => format!("no {program}"),
    })
}

fn is_in_guest(script: &str) -> bool {
    IN_GUEST.iter().any(|prefix| script.starts_with(prefix))
}

fn needs_siw(script: &str) -> bool {
    OVER_SIW.iter().any(|name| script.contains(name)) && !rxe::is_used_by(script)
}

/// Directory of the scripts and their common parts.
const SCRIPTS: &str = "tests/vm";
const LIBRARY: &str = "lib.sh";
/// Parts of the names of scripts that need siw, unless they use rxe.
const OVER_SIW: &[&str] = &["iser", "rdma", "siw", "srp"];
/// Scripts that need the TLS handshake helper (tlshd).
const WITH_TLSHD: &[&str] = &["ktls-linux.sh", "nvme-tls.sh"];
/// Scripts that run the file-system study.
const WITH_STUDY: &[&str] = &["attach-study.sh"];
/// Scripts that measure, and run only if they are named.
const MEASURES: &[&str] = &["roce-speed.sh"];

/// Scripts that start tgt on this machine.
const WITH_TGT: &[&str] = &["migrate-tgt.sh"];
const TGT: &[&str] = &["tgtd", "tgt-admin", "tgtadm"];

/// Name prefixes of scripts that run Blockmux in the guest, because this machine's kernel may lack
/// TLS, ublk or RDMA, or because both sides have to be on one network.
const IN_GUEST: &[&str] = &["attach", "ktls", "roce", "verbs"];
/// Examples that such scripts run, with their packages.
const EXAMPLES: &[(&str, &str)] =
    &[("blockmux-engine", "conforms"), ("blockmux-engine", "roce_peer"), ("blockmux-verbs", "verbs_peer")];
/// Programs that are used on this machine and not in the guest.
const NEEDED: &[&str] =
    &["qemu-system-x86_64", "apt-get", "apt-cache", "dpkg-deb", "depmod", "xz", "ldd", "timeout", "sh"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_may_be_named_by_path_file_or_stem() {
        let scripts = ["iscsi.sh".to_owned(), "lio.sh".to_owned(), MEASURES[0].to_owned()];
        assert_eq!(chosen(&scripts, &[]).unwrap(), scripts[..2]);
        for name in ["lio", "lio.sh", "tests/vm/lio.sh"] {
            assert_eq!(chosen(&scripts, &[name.to_owned()]).unwrap(), ["lio.sh"]);
        }
        let error = chosen(&scripts, &["nfs".to_owned()]).unwrap_err().to_string();
        assert_eq!(error, "there is no script nfs in tests/vm; known are iscsi.sh, lio.sh, roce-speed.sh");
    }

    #[test]
    fn every_script_of_the_repository_can_be_chosen() {
        let scripts = scripts(crate::repository()).unwrap();
        assert!(scripts.iter().any(|script| script == "iscsi.sh"));
        assert!(!scripts.iter().any(|script| script == LIBRARY));
        assert!(scripts.iter().any(|script| needs_siw(script)));
        assert!(scripts.iter().any(|script| script == "roce-iser.sh"));
        assert!(!needs_siw("roce-iser.sh"));
        assert!(needs_siw("verbs-siw.sh") && !needs_siw("verbs-storage.sh"));
    }

    #[test]
    fn each_program_of_the_guest_is_in_a_package_that_make_test_installs() {
        let always_there = ["dash", "bash", "mkfs.ext4", "e2fsck"];
        for program in image::PROGRAMS.iter().filter(|program| !always_there.contains(program)) {
            assert!(package(program).is_some(), "{program}");
        }
    }
}
