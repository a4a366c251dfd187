//! `blockmux discover`: what a server exports.

use crate::failure::Failure;
use crate::output::{print, printable};
use crate::reach;
use blockmux_engine::nbd::{self, ConnectError};
use blockmux_engine::socket::Address;
use blockmux_proto::nbd::initiator::ListedExport;
use blockmux_proto::nbd::uri::Uri;
use blockmux_volume::units::human_size;
use serde::Serialize;

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

#[derive(Serialize)]
struct Found {
    url: String,
    exports: Vec<FoundExport>,
    /// Listed by the server beyond what we keep.
    left_out: u64,
}

#[derive(Serialize)]
struct FoundExport {
    name: String,
    url: String,
    description: String,
    /// In bytes; `None` if the server did not tell.
    size: Option<u64>,
}

/// Lists a server's exports.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let uri = Uri { export: String::new(), ..reach::parse_url(&args.url)? };
    let found = reach::ask(&uri, |address| list(&uri, address))?;
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

fn list(uri: &Uri, address: &Address) -> Result<Found, ConnectError> {
    let (listed, left_out) = nbd::list(address)?;
    let exports = listed.into_iter().map(|export| describe(uri, address, export)).collect();
    Ok(Found { url: uri.to_string(), exports, left_out })
}

fn describe(uri: &Uri, address: &Address, listed: ListedExport) -> FoundExport {
    let described = nbd::describe(address, &listed.name);
    if let Err(error) = &described {
        tracing::warn!("export {:?}: {error}", listed.name);
    }
    FoundExport {
        url: Uri { export: listed.name.clone(), ..uri.clone() }.to_string(),
        name: listed.name,
        description: listed.description,
        size: described.ok().map(|export| export.size),
    }
}

const EXAMPLES: &str = "\
Examples:
  blockmux discover nbd://192.0.2.7
  blockmux discover 'nbd+unix:///?socket=/run/nbd.sock' --json";
