//! Errors that end the program: one line that names the thing and says what to do, and an exit
//! status. With `--json` the line is an object in the format of the API's errors.

use crate::output::{masked, printable, printable_json, shell_word, shortened};
use blockmux_volume::spec::with_hidden_secrets;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use serde_json::{Value, json};
use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Write};
use std::num::{IntErrorKind, ParseIntError};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// An error that ends a command. The text names the thing and says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command cannot start: the command line, configuration, URL or volume is invalid (exit
    /// status 2).
    #[error("{0}")]
    Request(String),
    /// The command has started and failed (exit status 1).
    #[error("{0}")]
    Run(String),
    /// A daemon has refused a request, or failed to execute it (exit status 1).
    #[error("{text}")]
    Refused {
        /// The code of the API.
        code: String,
        text: String,
    },
}

/// Whether errors are printed as JSON.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// Has errors of the whole process printed as JSON if the command line contains `--json`. It need
/// not be valid: what is wrong with it is an error, too.
pub(crate) fn print_as_json_if_asked(mut words: impl Iterator<Item = OsString>) {
    let is_asked = words.by_ref().take_while(|word| word != "--").any(|word| word == "--json");
    AS_JSON.store(is_asked, Ordering::Relaxed);
}

impl Failure {
    /// An error before the start of a command.
    pub(crate) fn request(text: impl ToString) -> Failure {
        Failure::Request(text.to_string())
    }

    /// A failure of a command that has started.
    pub(crate) fn run(text: impl ToString) -> Failure {
        Failure::Run(text.to_string())
    }

    /// Prints the error on standard error; returns the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        let text = self.to_string();
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let line = masked(&line);
        // A failure to print cannot be reported either.
        let _ = match AS_JSON.load(Ordering::Relaxed) {
            true => {
                writeln!(std::io::stderr(), "{}", printable_json(&self.json(&shortened(&line)).to_string()))
            }
            false => writeln!(std::io::stderr(), "blockmux: {}", shortened(&printable(&line))),
        };
        match self {
            Failure::Request(_) => ExitCode::from(2),
            Failure::Run(_) | Failure::Refused { .. } => ExitCode::FAILURE,
        }
    }

    /// The error in the format of the API, whose text is this one.
    fn json(&self, text: &str) -> Value {
        let code = match self {
            Failure::Request(_) => "invalid",
            Failure::Run(_) => "failed",
            Failure::Refused { code, .. } => code,
        };
        match text.split_once("; ") {
            Some((message, hint)) => json!({ "error": { "code": code, "message": message, "hint": hint } }),
            None => json!({ "error": { "code": code, "message": text } }),
        }
    }
}

/// The message that the cores of a command cannot start because of `error`, with advice.
pub(crate) fn cores_cannot_start(error: &io::Error) -> String {
    let what_to_do = match error.kind() {
        io::ErrorKind::OutOfMemory => {
            "raise the limit of locked memory (RLIMIT_MEMLOCK, `ulimit -l`, LimitMEMLOCK= of a service), which all \
             processes of this user share, or of address space (RLIMIT_AS, `ulimit -v`), or use fewer cores"
        }
        io::ErrorKind::WouldBlock => {
            "raise the limit of threads (RLIMIT_NPROC, `ulimit -u`) or of address space (RLIMIT_AS, `ulimit -v`)"
        }
        _ => "io_uring must be permitted here",
    };
    format!("cannot start the cores: {error}; {what_to_do}")
}

/// The exit status of a program that was killed by a signal, as shells report it.
pub(crate) fn status_of_signal(signal: i32) -> ExitCode {
    ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
}

/// Converts clap's error to one line.
pub(crate) fn from_command_line(error: &clap::Error) -> Failure {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Failure::request(format!("no command given; `{} --help` lists them", command_of(error)));
    }
    if let Some(text) = wrong_value(error) {
        return Failure::request(text);
    }
    let text = hidden_in(error, error.to_string());
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let mut parts = text.split("\n\n").map(str::trim);
    let what = parts.next().unwrap_or_default();
    if matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        // The text says what to write.
        return Failure::request(what);
    }
    // clap adds the usage and a tip; only the name of a similar argument is of use in one line.
    if let Some(instead) = foreign(error) {
        return Failure::request(format!("{what}; {instead}"));
    }
    let similar = parts.find_map(|part| part.strip_prefix("tip: a similar"));
    let similar = similar.and_then(|tip| tip.lines().next());
    Failure::request(match similar {
        Some(tip) => format!("{what}; a similar{tip}"),
        None => format!("{what}; --help lists the options"),
    })
}

/// The text of a clap error with hidden secrets: it quotes words of the command line.
fn hidden_in(error: &clap::Error, text: String) -> String {
    let words = error.context().filter_map(|(_, value)| match value {
        ContextValue::String(word) if !word.is_empty() => Some(word),
        _ => None,
    });
    words.fold(text, |text, word| text.replace(word, &with_hidden_secrets(word)))
}

/// Advice for an option that other programs have.
fn foreign(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_serve = command_of(error).ends_with("serve");
    match option.as_str() {
        "--port" | "-p" | "--host" if !is_serve => {
            Some("host and port are part of the URL, as in nbd://host:10809/export")
        }
        "--listen" | "--bind" | "--address" | "--host" | "-l" | "-b" if is_serve => {
            Some("name the protocol, as in --nbd ADDR or --iscsi ADDR")
        }
        "--port" | "-p" => Some("the port belongs to the listener, as in --nbd :10809 or --iscsi :3260"),
        "--unix" | "-U" | "--socket" | "-k" => Some("write --nbd unix:PATH"),
        "--export-name" | "--exportname" | "-x" | "-e" => Some("write NAME=VOLUME"),
        _ => None,
    }
}

/// The command with its subcommands, from its usage line.
fn command_of(error: &clap::Error) -> String {
    let help = error.to_string();
    let usage = help.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or("blockmux");
    // An option that clap suggests is part of the usage.
    let words = usage.split(' ').take_while(|word| !word.starts_with(['[', '<', '-']));
    words.collect::<Vec<_>>().join(" ")
}

/// Describes an invalid value with its option or argument; `None` if the error is of another kind.
fn wrong_value(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let value = text(ContextKind::InvalidValue).filter(|value| !value.is_empty())?;
    let argument = text(ContextKind::InvalidArg)?.split(' ').next().unwrap_or_default();
    let argument = argument.trim_matches(['[', ']', '<', '>', '.']);
    let named = |why: &str| format!("{argument} {}: {why}", shell_word(&with_hidden_secrets(value)));
    Some(match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) if source.is::<ParseIntError>() => {
            named(match source.downcast_ref::<ParseIntError>().map(ParseIntError::kind) {
                Some(IntErrorKind::Zero) => "write a whole number from 1 on",
                Some(IntErrorKind::PosOverflow) => "is too large",
                _ => "is not a whole number",
            })
        }
        (Some(source), _) => {
            let why = source.to_string();
            // clap writes a range as Rust does.
            match why.split_once(" is not in ").and_then(|(_, range)| range.split_once("..=")) {
                Some((least, most)) => named(&format!("write a number from {least} to {most}")),
                None if argument.starts_with('-') => named(&why),
                // The error of a volume names the volume.
                None => why,
            }
        }
        (None, Some(ContextValue::Strings(known))) => named(&format!("not one of {}", known.join(", "))),
        (None, _) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_as_json_has_a_code_and_the_advice_apart() {
        let failure = Failure::request("a: is missing; create it; or not");
        let expected = json!({ "code": "invalid", "message": "a: is missing", "hint": "create it; or not" });
        assert_eq!(failure.json(&failure.to_string())["error"], expected);
        let refused = Failure::Refused { code: "not_found".to_owned(), text: "no volume".to_owned() };
        let expected = json!({ "code": "not_found", "message": "no volume" });
        assert_eq!(refused.json(&refused.to_string())["error"], expected);
    }
}
