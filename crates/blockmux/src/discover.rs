//! `blockmux discover`: what a server exports.

use crate::failure::Failure;
use crate::output::{print, printable};
use crate::reach;
use blockmux_volume::units::human_size;

/// Which server.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The server's URL; an export in it is ignored
    url: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists a server's exports.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let found = reach::of_url(&args.url)?.discover()?;
    if args.json {
        return print(serde_json::to_string(&found).map_err(Failure::run)?);
    }
    for export in &found.exports {
        let size = export.size.map_or_else(|| "size unknown".to_owned(), human_size);
        let line = format!("{}  {size}  {}", export.url, export.description);
        print(printable(line.trim_end()))?;
    }
    if found.left_out > 0 {
        print(format!("and {} more", found.left_out))?;
    }
    Ok(())
}

const EXAMPLES: &str = "\
Examples:
  blockmux discover nbd://192.0.2.7
  blockmux discover 'nbd+unix:///?socket=/run/nbd.sock' --json";
