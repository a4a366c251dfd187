//! Standard output.

use crate::failure::Failure;
use crate::output::printable_json;
use serde::Serialize;
use std::io::{ErrorKind, Write as _};

/// Prints `text` and a newline, unbuffered. A closed pipe is not an error.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<(), Failure> {
    print_while_open(text).map(|_| ())
}

/// Prints `text` and a newline, unbuffered; returns whether somebody still reads the output.
pub(crate) fn print_while_open(text: impl std::fmt::Display) -> Result<bool, Failure> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(format!("cannot write to standard output: {error}"))),
    }
}

/// Prints a value as one line of JSON, in which invisible characters of peers are escaped.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print_json_while_open(value).map(|_| ())
}

/// Prints a value as [`print_json`] does; returns whether somebody still reads the output.
pub(crate) fn print_json_while_open(value: &impl Serialize) -> Result<bool, Failure> {
    print_while_open(printable_json(&serde_json::to_string(value).map_err(Failure::run)?))
}
