//! `attach --probe`: the ways of attaching of this machine. `attach --owner`: whose a disk is.

use super::way::Way;
use crate::failure::Failure;
use crate::process::stdout::{print, print_json};
use blockmux_engine::attach::ublk;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// Prints each way, best first, and why it is missing. The exit status is 1 if there is none to a
/// disk of this machine: vhost-user, the last one, needs nothing.
pub(super) fn run(is_json: bool) -> Result<ExitCode, Failure> {
    let probed = |way: Way| (way.name(), way.probe().map_err(|error| error.to_string()));
    let own = Way::ALL.map(probed);
    let has_one = own.iter().any(|(_, found)| found.is_ok());
    let ways: Vec<_> = own.into_iter().chain([probed(Way::VhostUser)]).collect();
    if is_json {
        print_json(&json!({ "ways": ways.iter().map(object).collect::<Vec<_>>() }))?;
    } else {
        let line = |(name, found): &(&str, Result<(), String>)| match found {
            Ok(()) => format!("{name:10} usable"),
            Err(why) => format!("{name:10} {why}"),
        };
        print(ways.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    }
    Ok(if has_one { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints user and group of the user's disk at `node`.
pub(super) fn print_owner(node: &Path) -> Result<ExitCode, Failure> {
    match ublk::owner(node).map_err(Failure::request)? {
        Some((user, group)) => print(format!("{user} {group}")).map(|()| ExitCode::SUCCESS),
        None => Ok(ExitCode::FAILURE),
    }
}

fn object((name, found): &(&str, Result<(), String>)) -> Value {
    json!({ "name": name, "usable": found.is_ok(), "why_not": found.as_ref().err() })
}
