//! `attach --probe`: the ways of attaching that this machine has.

use crate::failure::Failure;
use crate::process::stdout::{print, print_json};
use blockmux_engine::attach::ublk;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Prints each way, and why it is missing. The exit status is 1 if there is none.
pub(super) fn run(is_json: bool) -> Result<ExitCode, Failure> {
    let found = ublk::driver_features();
    let (is_usable, why) = match &found {
        Ok(_) => (true, "usable".to_owned()),
        Err(error) => (false, error.to_string()),
    };
    if is_json {
        print_json(&json!({ "ways": [way("ublk", is_usable, &why)] }))?;
    } else {
        print(format!("ublk  {why}"))?;
    }
    Ok(if is_usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn way(name: &str, is_usable: bool, why: &str) -> Value {
    let why_not = (!is_usable).then_some(why);
    json!({ "name": name, "usable": is_usable, "why_not": why_not })
}
