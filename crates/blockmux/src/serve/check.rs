//! `blockmux check`: whether a config file is right, without serving anything.
//!
//! Everything is checked as at a start, secrets and keys included, but no volume is opened and no
//! listener bound.

use super::ServeArgs;
use super::inherited::InheritedListeners;
use super::listen;
use super::setup::Setup;
use crate::failure::Failure;
use crate::output::{print, printable};
use crate::protocol::Frontends;
use std::path::PathBuf;

/// Which config file.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// Config file, as for serve --config
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Checks it, and says what it serves.
pub(crate) fn run(args: CheckArgs) -> Result<(), Failure> {
    let file = args.file.display().to_string();
    let args = ServeArgs { config: Some(args.file), ..ServeArgs::of(Frontends::default()) };
    let mut setup = Setup::gather(args, &InheritedListeners::default())?;
    let places = listen::places(&setup, None).map_err(|failure| setup.located(failure))?;
    let listeners = places.len();
    setup.settle_policy(places)?;
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
Reads the files of secrets and keys, too; opens no volume and listens nowhere.
The exit status is 0 if the file is right and 2 if it is not.

Examples:
  blockmux check /etc/blockmux/blockmux.toml
  blockmux check new.toml && systemctl reload blockmux";
