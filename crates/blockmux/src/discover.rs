//! `blockmux discover`: what a server exports.

use crate::failure::Failure;
use crate::output::{print, printable};
use crate::reach;
use blockmux_engine::connection::Broken;
use blockmux_engine::nbd::{self, ConnectError};
use blockmux_engine::socket::Address;
use blockmux_proto::nbd::initiator::{ExportInfo, ListedExport};
use blockmux_proto::nbd::uri::Uri;
use blockmux_volume::units::human_size;
use serde::Serialize;
use std::io::ErrorKind;
use std::panic::resume_unwind;
use std::thread;

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
    // A server may open what it exports only when asked for it, which takes time.
    let mut exports = Vec::with_capacity(listed.len());
    for some in listed.chunks(AT_A_TIME) {
        let described = describe_all(address, some);
        let is_silent = described.iter().any(is_no_answer);
        exports.extend(some.iter().zip(described).map(|(listed, answer)| found(uri, listed, answer.ok())));
        if is_silent {
            // It would take as long again for each of the others.
            break;
        }
    }
    let asked = exports.len();
    if asked < listed.len() {
        tracing::warn!("{address}: does not answer; {} exports were not asked for", listed.len() - asked);
    }
    exports.extend(listed[asked..].iter().map(|listed| found(uri, listed, None)));
    Ok(Found { url: uri.to_string(), exports, left_out })
}

/// All at the same time, each over a connection of its own; those that got none, as servers limit them, one by one.
fn describe_all(address: &Address, listed: &[ListedExport]) -> Vec<Result<ExportInfo, ConnectError>> {
    let described: Vec<_> = thread::scope(|scope| {
        let ask = |name| move || nbd::describe(address, name);
        let asked: Vec<_> = listed.iter().map(|export| scope.spawn(ask(&export.name))).collect();
        // A panic there is one here.
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let all = listed.iter().zip(described);
    all.map(|(listed, described)| {
        let described = match described {
            Err(ConnectError::Broken { .. }) if !is_no_answer(&described) => {
                nbd::describe(address, &listed.name)
            }
            described => described,
        };
        described.inspect_err(|error| tracing::warn!("export {:?}: {error}", listed.name))
    })
    .collect()
}

/// Whether the server was waited for in vain.
fn is_no_answer(described: &Result<ExportInfo, ConnectError>) -> bool {
    matches!(described, Err(ConnectError::Broken { broken: Broken::Socket(error), .. })
        if error.kind() == ErrorKind::TimedOut)
}

fn found(uri: &Uri, listed: &ListedExport, described: Option<ExportInfo>) -> FoundExport {
    FoundExport {
        url: Uri { export: listed.name.clone(), ..uri.clone() }.to_string(),
        name: listed.name.clone(),
        description: listed.description.clone(),
        size: described.map(|export| export.size),
    }
}

/// Connections to the server at a time.
const AT_A_TIME: usize = 16;

const EXAMPLES: &str = "\
Examples:
  blockmux discover nbd://192.0.2.7
  blockmux discover 'nbd+unix:///?socket=/run/nbd.sock' --json";
