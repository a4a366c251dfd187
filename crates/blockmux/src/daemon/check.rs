//! `blockmux check`: validates a config file.
//!
//! It makes all checks of a start, including those of secret and key files, but opens no volume and
//! binds no listener.

use super::ServeArgs;
use super::inherited::InheritedListeners;
use super::listen;
use super::setup::Setup;
use crate::failure::Failure;
use crate::output::printable;
use crate::process::privileges::ServiceUser;
use crate::process::stdout::print;
use crate::protocol::Frontends;
use crate::volume_kinds::open::unused_rest;
use blockmux_volume::Spec;
use std::path::PathBuf;
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

/// Validates the file and prints how many files, volumes, listeners and targets it has.
///
/// # Errors
/// The first error of the file.
pub(crate) fn run(args: CheckArgs) -> Result<(), Failure> {
    let CheckArgs { file, user } = args;
    // Files of this user's, and files that this user cannot read, are as the daemon finds them.
    user.as_ref().map_or(Ok(()), |user| user.switch(None, None))?;
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
    let file = file.display().to_string();
    let mut setup = Setup::gather(args, &InheritedListeners::default())?;
    let places = listen::places(&setup, None).map_err(|failure| setup.located(failure))?;
    let listeners = places.len();
    setup.settle_policy(places)?;
    for named in &setup.volumes {
        let files = named.entry.spec.leaves().into_iter();
        let files = files.filter_map(|leaf| if let Spec::File(file) = leaf { Some(file) } else { None });
        for rest in files.filter_map(unused_rest) {
            warn!(
                "volume `{}`: {rest}; a reload refuses to take them from a volume that serves them",
                named.name
            );
        }
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
    ];
    print(format_args!("{}: {}", printable(&file), all.join(", ")))
}

const EXAMPLES: &str = "\
Also reads secret and key files, with --user as that user. Opens no volume and
binds no listener. The exit status is 0 if the file is valid and 2 if it is not.

Examples:
  blockmux check --user blockmux /etc/blockmux/blockmux.toml
  blockmux check new.toml && systemctl reload blockmux";
