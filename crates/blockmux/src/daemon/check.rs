//! `blockmux check`: validates a config file.
//!
//! It makes all checks of a start, including those of secret and key files, but opens no volume and
//! binds no listener.

use super::ServeArgs;
use super::blocking_work::BlockingWork;
use super::disks;
use super::inherited::InheritedListeners;
use super::listen;
use super::opening::NamedVolume;
use super::reload::interrupted_save;
use super::setup::Setup;
use crate::failure::Failure;
use crate::import;
use crate::output::printable;
use crate::process::dead_paths::look_at_all;
use crate::process::privileges::ServiceUser;
use crate::process::stdout::{print, print_json};
use crate::protocol::Frontends;
use crate::protocol::policy::PolicyListener;
use crate::volume_kinds::open::unused_rest;
use crate::volume_kinds::opened_twice;
use blockmux_engine::net::socket::Address;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec, VhostUserSpec};
use serde::Serialize;
use std::fmt;
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// Arguments of `blockmux check`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// Config file of `serve --config`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Check as the user who runs the daemon; for root
    #[arg(long, value_name = "NAME")]
    user: Option<ServiceUser>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CheckArgs {
    /// Prepares for `--user`, before any thread is started.
    pub(crate) fn prepare_user(&self) {
        self.user.iter().for_each(ServiceUser::prepare);
    }
}

/// Validates the file and prints how many files, volumes, listeners, targets and attachments it
/// has.
///
/// # Errors
/// The first error of the file.
pub(crate) fn run(args: CheckArgs) -> Result<(), Failure> {
    let CheckArgs { file, user, json } = args;
    // Files of this user's, and files that this user cannot read, are as the daemon finds them.
    user.as_ref().map_or(Ok(()), |user| user.switch(None, &[], None))?;
    let report = validate(file).map_err(|failure| match &user {
        Some(user) if is_about_rights(&failure.to_string()) => {
            Failure::request(format!("{failure} (checked as the user {}, who runs the daemon)", user.name))
        }
        _ => failure,
    })?;
    if json {
        return print_json(&report);
    }
    report.warnings.iter().for_each(|line| warn!("{line}"));
    print(printable(&report.summary()))
}

/// What a valid file has, and what a user may not have meant.
#[derive(Serialize)]
struct CheckReport {
    file: String,
    /// Number of files, with those of `include`.
    files: usize,
    volumes: usize,
    listeners: usize,
    targets: usize,
    attachments: usize,
    /// Addresses at which other machines reach volumes without authentication.
    open_listeners: Vec<String>,
    /// Files and devices of volumes with a warning.
    paths: Vec<PathNote>,
    /// All warnings, for people.
    warnings: Vec<String>,
}

impl CheckReport {
    fn summary(&self) -> String {
        let count = |number: usize, what: &str| match number {
            1 => format!("1 {what}"),
            number => format!("{number} {what}s"),
        };
        let all = [
            count(self.files, "file"),
            count(self.volumes, "volume"),
            count(self.listeners, "listener"),
            count(self.targets, "target"),
            count(self.attachments, "attachment"),
        ];
        format!("{}: {}", self.file, all.join(", "))
    }
}

/// A warning about a file or device of a volume.
#[derive(Serialize)]
pub(super) struct PathNote {
    volume: String,
    path: PathBuf,
    found: PathFinding,
    /// For people.
    #[serde(skip)]
    text: String,
}

impl fmt::Display for PathNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume `{}`: {}", self.volume, self.text)
    }
}

/// What is found at the path of a volume.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PathFinding {
    Absent,
    /// The volume uses only a part of the file.
    PartlyUsed,
    /// Its file system or its server does not answer.
    NoAnswer,
}

/// Whether a message may have its cause in the rights of the user who reads the files.
fn is_about_rights(message: &str) -> bool {
    ["Permission denied", "belongs to another user"].iter().any(|part| message.contains(part))
}

fn validate(file: PathBuf) -> Result<CheckReport, Failure> {
    let args = ServeArgs { config: Some(file.clone()), ..ServeArgs::empty(Frontends::default()) };
    let (file, path) = (file.display().to_string(), file);
    // A secret's file may be on a file system that does not answer.
    let gather = move || {
        let setup = Setup::gather(args, &InheritedListeners::default());
        let setup = setup.map_err(|failure| import::advice(&path).unwrap_or(failure));
        let interrupted = interrupted_save(&path);
        // The failure may be that of a file with the new text beside one with the old text.
        if setup.is_err() {
            interrupted.iter().for_each(|line| warn!("{line}"));
        }
        setup.map(|setup| (setup, interrupted))
    };
    let (mut setup, interrupted) = BlockingWork::default().within(READ_TIMEOUT).run(&file, gather)??;
    let mut places = listen::places(&setup, None).map_err(|failure| setup.located(failure))?;
    places.iter_mut().try_for_each(PolicyListener::look_up).map_err(|failure| setup.located(failure))?;
    let listeners = places.len();
    setup.settle_policy(places)?;
    let open = listen::open_places(&setup.policy);
    let about = |leaf: &Spec, found: io::Result<Metadata>| match (leaf, found) {
        (Spec::File(file), Ok(found)) => unused_rest(file, &found).map(|rest| {
            let text = format!("{rest}; a reload refuses to take them from a volume that serves them");
            (PathFinding::PartlyUsed, text)
        }),
        (leaf, Err(error)) if error.kind() == ErrorKind::NotFound => path_of(leaf).map(|path| {
            let creates = matches!(leaf, Spec::File(file) if file.size.is_some() && !file.read_only);
            let then = if creates { "; a start creates it, without data" } else { "" };
            (PathFinding::Absent, format!("{} does not exist{then}", path.display()))
        }),
        _ => None,
    };
    let paths = look_at_volumes(&setup, about);
    check_files(&setup)?;
    let mut warnings: Vec<String> = interrupted.into_iter().collect();
    warnings.extend(setup.policy.idle_listeners());
    warnings.extend(open.iter().map(listen::open_place_note));
    warnings.extend(paths.iter().map(PathNote::to_string));
    // The file does not say how the daemon is started.
    let disks = setup.attachments.iter().filter_map(|asked| disks::check_mounts(asked, false).err());
    warnings.extend(disks.map(|failure| setup.located(failure).to_string()));
    Ok(CheckReport {
        file,
        files: setup.sources.as_ref().map_or(1, |sources| sources.files().count()),
        volumes: setup.volumes.len(),
        listeners,
        targets: setup.frontends.targets().len(),
        attachments: setup.attachments.len(),
        open_listeners: open.iter().map(Address::to_string).collect(),
        paths,
        warnings,
    })
}

/// Checks that no file or device would be opened twice. A path that does not answer is a warning
/// of its own.
fn check_files(setup: &Setup) -> Result<(), Failure> {
    let files = Arc::new(setup.written_files());
    let (count, all) = (files.len(), files.clone());
    let found = look_at_all((0..count).collect(), move |nth: &usize| all.get(*nth)?.look_up());
    let checked = opened_twice::check(&files, found.into_iter().map(Option::flatten).collect());
    checked.map_err(|what| setup.located(Failure::request(what)))
}

/// The path of a volume that is a file, a device or a socket.
fn path_of(leaf: &Spec) -> Option<&Path> {
    match leaf {
        Spec::File(FileSpec { path, .. })
        | Spec::Block(BlockSpec { path, .. })
        | Spec::VhostUser(VhostUserSpec { path, .. }) => Some(path),
        _ => None,
    }
}

/// What is found at a path, and a text about it for people.
type FoundText = (PathFinding, String);

/// Looks at the files and devices of all volumes; returns what `about` says about each, and a note
/// for each that does not answer.
pub(super) fn look_at_volumes(
    setup: &Setup,
    about: impl Fn(&Spec, io::Result<Metadata>) -> Option<FoundText> + Send + Sync + 'static,
) -> Vec<PathNote> {
    let leaf = |named: &NamedVolume, leaf: &Spec| {
        Some((named.name.clone(), leaf.clone(), path_of(leaf)?.to_owned()))
    };
    let leaves = |named: &NamedVolume| {
        named.entry.spec.leaves().into_iter().filter_map(|own| leaf(named, own)).collect::<Vec<_>>()
    };
    let all: Vec<_> = setup.volumes.iter().flat_map(leaves).collect();
    let names: Vec<_> = all.iter().map(|(name, _, path)| (name.clone(), path.clone())).collect();
    // A server may be slow: it is asked once.
    let said = look_at_all(all, move |(_, leaf, path)| about(leaf, path.metadata()));
    let note = |((volume, path), said): ((String, PathBuf), Option<Option<FoundText>>)| {
        let (found, text) = said.unwrap_or_else(|| {
            let text = format!(
                "{} does not answer; find out why its file system or its server does not",
                path.display()
            );
            Some((PathFinding::NoAnswer, text))
        })?;
        Some(PathNote { volume, path, found, text })
    };
    names.into_iter().zip(said).filter_map(note).collect()
}

/// Time for a config and the files that it names to be read, without opening a volume.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Also reads secret and key files, with --user as that user. Opens no volume and
binds no listener. Warns of paths of volumes that do not exist or do not answer,
of listeners that export nothing, of those that other machines reach without
authentication, and of a save that was interrupted. The exit status is 0 if the
file is valid and 2 if it is not.

Examples:
  blockmux check --user blockmux /etc/blockmux/blockmux.toml
  blockmux check new.toml && systemctl reload blockmux";
