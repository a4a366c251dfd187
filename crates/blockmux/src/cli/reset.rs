//! `blockmux reset`: resets a target or a logical unit, or aborts its commands.

use crate::failure::Failure;
use crate::process::stdout::print;
use crate::protocol::{ResetFunction, reach};
use crate::spec_text::SpecText;

/// Arguments of `blockmux reset`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ResetArgs {
    /// URL of an iSCSI, iSER or SRP logical unit
    #[arg(value_name = "URL")]
    url: SpecText,
    /// Task management function
    #[arg(default_value = "lun")]
    function: ResetFunction,
}

/// Requests the function and waits for its completion.
pub(crate) fn run(args: &ResetArgs) -> Result<(), Failure> {
    print(reach::of_url(args.url.as_written())?.reset(args.function)?)
}

const EXAMPLES: &str = "\
Examples:
  blockmux reset iscsi://192.0.2.7/iqn.2026-11.com.example:disk/0
  blockmux reset iscsi://192.0.2.7/iqn.2026-11.com.example:disk/0 cold

Commands that other initiators have in flight are aborted, and their next
command gets a unit attention. Most initiators, Blockmux included, retry.";
