//! `blockmux import`: writes a config from that of another target.
//!
//! The format is recognized by the content of the file. Each format has a reader, which fills the
//! common form in [`model`]; [`mod@write`] writes that as our config. What our config cannot
//! express becomes a comment beside its object. Decision 106 describes what is carried over.

mod access;
mod ctld;
mod format;
mod lio;
mod listeners;
mod members;
mod model;
mod nbd_server;
mod notes;
mod nvmet;
mod parameters;
mod scsi_names;
mod scst;
mod secrets;
mod source;
mod spdk;
mod specs;
mod tgt;
mod tree;
mod ucl;
mod unit_identity;
mod write;

use crate::failure::Failure;
use crate::process::stdout::print;
use blockmux_engine::sys::safe_path;
use format::ForeignFormat;
use rustix::fs::{Mode, OFlags};
use secrets::SecretFiles;
use source::SourceText;
use std::io::Write;
use std::path::{Path, PathBuf, absolute};
use tracing::warn;

/// Arguments of `blockmux import`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ImportArgs {
    /// Config of another target; - for standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// File to write, or directory for blockmux.toml [default: standard output]
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Directory for secrets [default: `secrets` beside the written file]
    #[arg(long, value_name = "DIR")]
    secrets: Option<PathBuf>,
}

/// Where the config and its secrets are written.
struct Destination {
    /// `None`: standard output.
    file: Option<PathBuf>,
    /// `None`: secrets are not written.
    secrets: Option<PathBuf>,
    /// The directory of secrets, as the config names it.
    prefix: String,
}

impl ImportArgs {
    fn destination(&self) -> Destination {
        let is_directory = |path: &Path| path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/");
        let file = self.output.as_ref().map(|path| match is_directory(path) {
            true => path.join("blockmux.toml"),
            false => path.clone(),
        });
        let named = |directory: &PathBuf| absolute(directory).unwrap_or_else(|_| directory.clone());
        let beside = file.as_ref().map(|file| file.with_file_name(SECRETS));
        let prefix = match self.secrets.as_ref().map(named) {
            Some(directory) => format!("{}/", directory.display().to_string().trim_end_matches('/')),
            None => format!("{SECRETS}/"),
        };
        Destination { file, secrets: self.secrets.clone().or(beside), prefix }
    }
}

/// Runs the command.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    let source = SourceText::read(&args.file)?;
    let (format, imported) = format::import(&source)?;
    let Destination { file, secrets: directory, prefix } = args.destination();
    let mut secrets = SecretFiles::new(prefix);
    let origin = format!("Imported from {} of {}", format.file(), format.title());
    let written = write::write(&imported, &origin, &mut secrets)?;
    if let Some(file) = &file {
        make_config(file, || directory.iter().try_for_each(|there| secrets.write(there)), &written.text)?;
        print(wrote(file, directory.as_deref(), secrets.count()))?;
    } else {
        directory.iter().try_for_each(|there| secrets.write(there))?;
        print(written.text.trim_end())?;
    }
    if directory.is_none() && secrets.count() > 0 {
        warn!(
            "{} not written; name a directory with --secrets",
            count(secrets.count(), "secret was", "secrets were")
        );
    }
    if secrets.count_new() > 0 {
        warn!("{} new; see the comment beside each", count(secrets.count_new(), "secret is", "secrets are"));
    }
    if !imported.exports_any() {
        warn!("{}: no volume of it can be exported; the comments say why", args.file.display());
    }
    match written.lost {
        0 => {}
        1 => warn!("1 setting has no counterpart; it is a comment"),
        lost => warn!("{lost} settings have no counterpart; they are comments"),
    }
    Ok(())
}

/// What was written, for a person.
fn wrote(file: &Path, directory: Option<&Path>, secrets: usize) -> String {
    let file = file.display();
    match directory.filter(|_| secrets > 0) {
        Some(directory) => {
            format!("wrote {file}, {} in {}", count(secrets, "secret", "secrets"), directory.display())
        }
        None => format!("wrote {file}"),
    }
}

fn count(number: usize, one: &str, more: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {more}") }
}

/// Writes a new config, after what `first` writes.
fn make_config(path: &Path, first: impl FnOnce() -> Result<(), Failure>, text: &str) -> Result<(), Failure> {
    if safe_path::stat(path).is_ok() {
        return Err(Failure::request(format!(
            "{}: exists, and import overwrites nothing; remove it, or name another file",
            path.display()
        )));
    }
    let failure = |error: std::io::Error| {
        Failure::run(format!("{}: cannot write the config: {error}; name another file", path.display()))
    };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(failure)?;
    }
    first()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let mut file = safe_path::open(path, flags, Mode::from_raw_mode(0o666)).map_err(failure)?;
    file.write_all(text.as_bytes()).map_err(failure)
}

/// What to do with a file that is no config of ours, if it is one that can be imported.
pub(crate) fn advice(path: &Path) -> Option<Failure> {
    let source = SourceText::of_file(path).ok()?;
    let program = ForeignFormat::of(&source)?.title();
    let file = path.display();
    let what = format!("{file}: is a config of {program}; convert it with 'blockmux import {file}'");
    Some(Failure::request(what))
}

/// The directory of secrets beside a written config.
const SECRETS: &str = "secrets";

const EXAMPLES: &str = "\
Recognizes the format by the content of the file. What has no counterpart
becomes a comment beside its object. Secrets are written to files that only
their owner can read, and never printed. Nothing is overwritten.

Examples:
  blockmux import /etc/target/saveconfig.json
  blockmux import /etc/target/saveconfig.json --output /etc/blockmux/
  tgt-admin --dump | blockmux import - --output new.toml --secrets /etc/keys";

#[cfg(test)]
mod admission;
#[cfg(test)]
mod tests;
