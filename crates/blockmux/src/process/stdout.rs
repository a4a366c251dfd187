//! Standard output.

use crate::failure::Failure;
use crate::output::printable_json;
use serde::Serialize;
use std::io::{ErrorKind, Write as _};

/// Prints `text` and a newline, unbuffered. A closed pipe is not an error.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::run(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a value as one line of JSON, in which invisible characters of peers are escaped.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(printable_json(&serde_json::to_string(value).map_err(Failure::run)?))
}
