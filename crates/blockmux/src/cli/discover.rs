//! `blockmux discover`: lists the exports of a server.

use crate::failure::Failure;
use crate::output::printable;
use crate::process::stdout::{print, print_json};
use crate::protocol::DiscoveredExport;
use crate::protocol::reach;
use crate::spec_text::SpecText;
use blockmux_volume::units::human_size;
use tracing::warn;

/// Arguments of `blockmux discover`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiscoverArgs {
    /// URL of the server; an export in it is ignored
    url: SpecText,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists a server's exports.
pub(crate) fn run(args: &DiscoverArgs) -> Result<(), Failure> {
    let found = reach::of_url(args.url.as_written())?.discover()?;
    if args.json {
        return print_json(&found);
    }
    if found.exports.is_empty() && found.left_out == 0 {
        warn!("{}: the server lists no exports; it may hide them from this host", printable(&found.url));
    }
    for export in &found.exports {
        print(printable(&line(export)))?;
    }
    if found.left_out > 0 {
        print(format!("and {} more", found.left_out))?;
    }
    Ok(())
}

/// Formats an export. If the size is unknown, the description may say why.
fn line(export: &DiscoveredExport) -> String {
    let DiscoveredExport { url, description, size, .. } = export;
    match size.map(human_size) {
        Some(size) => format!("{url}  {size}  {description}").trim_end().to_owned(),
        None if description.is_empty() => format!("{url}  size unknown"),
        None => format!("{url}  {description}"),
    }
}

const EXAMPLES: &str = "\
Examples:
  blockmux discover nbd://192.0.2.7
  blockmux discover 'nbd+unix:///?socket=/run/nbd.sock' --json";
