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
use super::setup::Setup;
use crate::failure::Failure;
use crate::import;
use crate::output::printable;
use crate::process::dead_paths::look_at_all;
use crate::process::privileges::ServiceUser;
use crate::process::stdout::print;
use crate::protocol::Frontends;
use crate::volume_kinds::open::unused_rest;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec, VhostUserSpec};
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
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
    let CheckArgs { file, user } = args;
    // Files of this user's, and files that this user cannot read, are as the daemon finds them.
    user.as_ref().map_or(Ok(()), |user| user.switch(None, &[], None))?;
    validate(file).map_err(|failure| match &user {
        Some(user) if is_about_rights(&failure.to_string()) => {
            Failure::request(format!("{failure} (checked as the user {}, who runs the daemon)", user.name()))
        }
        _ => failure,
    })
}

/// Whether a message may have its cause in the rights of the user who reads the files.
fn is_about_rights(message: &str) -> bool {
    ["Permission denied", "belongs to another user"].iter().any(|part| message.contains(part))
}

fn validate(file: PathBuf) -> Result<(), Failure> {
    let args = ServeArgs { config: Some(file.clone()), ..ServeArgs::empty(Frontends::default()) };
    let (file, path) = (file.display().to_string(), file);
    // A secret's file may be on a file system that does not answer.
    let gather = move || {
        let setup = Setup::gather(args, &InheritedListeners::default());
        setup.map_err(|failure| import::advice(&path).unwrap_or(failure))
    };
    let mut setup = BlockingWork::default().within(READ_TIMEOUT).run(&file, gather)??;
    let places = listen::places(&setup, None).map_err(|failure| setup.located(failure))?;
    let listeners = places.len();
    setup.settle_policy(places)?;
    setup.policy.idle_listeners().iter().for_each(|line| warn!("{line}"));
    let about = |leaf: &Spec, found: io::Result<Metadata>| match (leaf, found) {
        (Spec::File(file), Ok(found)) => unused_rest(file, &found)
            .map(|rest| format!("{rest}; a reload refuses to take them from a volume that serves them")),
        // Opening it creates it.
        (Spec::File(file), Err(_)) if file.size.is_some() && !file.read_only => None,
        (leaf, Err(error)) if error.kind() == ErrorKind::NotFound => {
            path_of(leaf).map(|path| format!("{} does not exist", path.display()))
        }
        _ => None,
    };
    look_at_volumes(&setup, about).iter().for_each(|line| warn!("{line}"));
    // The file does not say how the daemon is started.
    for failure in setup.attachments.iter().filter_map(|asked| disks::check_mounts(asked, false).err()) {
        warn!("{}", setup.located(failure));
    }
    let count = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    };
    let targets = setup.frontends.targets().len();
    let sources = setup.sources.as_ref().map_or(1, |sources| sources.files().count());
    let all = [
        count(sources, "file"),
        count(setup.volumes.len(), "volume"),
        count(listeners, "listener"),
        count(targets, "target"),
        count(setup.attachments.len(), "attachment"),
    ];
    print(format_args!("{}: {}", printable(&file), all.join(", ")))
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

/// Looks at the files and devices of all volumes; returns what `about` says about each, and a line
/// for each that does not answer.
pub(super) fn look_at_volumes(
    setup: &Setup,
    about: impl Fn(&Spec, io::Result<Metadata>) -> Option<String> + Send + Sync + 'static,
) -> Vec<String> {
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
    let line = |((name, path), said): ((String, PathBuf), Option<Option<String>>)| match said {
        Some(said) => said.map(|said| format!("volume `{name}`: {said}")),
        None => Some(format!(
            "volume `{name}`: {} does not answer; find out why its file system or its server does not",
            path.display()
        )),
    };
    names.into_iter().zip(said).filter_map(line).collect()
}

/// Time for a config and the files that it names to be read, without opening a volume.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Also reads secret and key files, with --user as that user. Opens no volume and
binds no listener. Paths of volumes that do not exist or do not answer are
warnings. The exit status is 0 if the file is valid and 2 if it is not.

Examples:
  blockmux check --user blockmux /etc/blockmux/blockmux.toml
  blockmux check new.toml && systemctl reload blockmux";
