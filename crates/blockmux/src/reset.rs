//! `blockmux reset`: has a target reset itself or a logical unit, or end what is under way there.

use crate::failure::Failure;
use crate::output::print;
use crate::reach;

/// What to reset.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ResetArgs {
    /// A logical unit of iSCSI or iSER
    #[arg(value_name = "URL")]
    url: String,
    /// What the target is to do
    #[arg(default_value = "lun")]
    what: What,
}

/// What a target is asked to do: the task management functions of RFC 7143 that are about no single
/// task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// LOGICAL UNIT RESET: end all commands of everybody there
    Lun,
    /// TARGET WARM RESET: the same for all logical units
    Target,
    /// TARGET COLD RESET: the same, and end all sessions
    Cold,
    /// ABORT TASK SET: end the commands of the session that asks, which has none
    AbortTaskSet,
    /// CLEAR TASK SET: end the commands of all sessions with the logical unit
    ClearTaskSet,
}

/// Asks for it, and says when it is done.
pub(crate) fn run(args: &ResetArgs) -> Result<(), Failure> {
    print(reach::of_url(&args.url)?.reset(args.what)?)
}

const EXAMPLES: &str = "\
Examples:
  blockmux reset iscsi://192.0.2.7/iqn.2026-11.com.example:disk/0
  blockmux reset iscsi://192.0.2.7/iqn.2026-11.com.example:disk/0 cold

Others who use the unit notice: what they have under way there ends, and their
next command is told of a reset. Most do it again, and so does Blockmux.";
