//! `blockmux reset`: resets a target or a logical unit, or aborts its commands.

use crate::failure::Failure;
use crate::output::print;
use crate::reach;
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

/// Task management functions of RFC 7143 that do not refer to a single task. SRP has those for one
/// logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ResetFunction {
    /// LOGICAL UNIT RESET: abort the commands of all initiators
    Lun,
    /// TARGET WARM RESET: abort all commands of all logical units of the target
    Target,
    /// TARGET COLD RESET: abort all commands of the target and close all sessions
    Cold,
    /// ABORT TASK SET: abort the commands of this session, which has none
    AbortTaskSet,
    /// CLEAR TASK SET: abort the commands of all sessions with the logical unit
    ClearTaskSet,
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
