//! What ends the program early: one line that names the thing and says what to do, and the exit
//! status.

use crate::output::{masked, printable, shell_word, shortened};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::error::Error;
use std::io::Write;
use std::num::ParseIntError;
use std::process::ExitCode;

/// Why a command ended early. The text names the thing and says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// It could not begin: a wrong command line, configuration, URL or volume.
    #[error("{0}")]
    Request(String),
    /// It began, and failed.
    #[error("{0}")]
    Run(String),
}

impl Failure {
    /// What was asked for cannot be begun.
    pub(crate) fn request(text: impl ToString) -> Failure {
        Failure::Request(text.to_string())
    }

    /// What was begun has failed.
    pub(crate) fn run(text: impl ToString) -> Failure {
        Failure::Run(text.to_string())
    }

    /// Says it on standard error and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        let text = self.to_string();
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        // There is nobody left to tell if this fails.
        let _ = writeln!(std::io::stderr(), "blockmux: {}", shortened(&printable(&masked(&line))));
        match self {
            Failure::Request(_) => ExitCode::from(2),
            Failure::Run(_) => ExitCode::FAILURE,
        }
    }
}

/// The exit status of what a signal has ended, as a shell says it.
pub(crate) fn status_of_signal(signal: i32) -> ExitCode {
    ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
}

/// What is wrong with the command line, in one line.
pub(crate) fn from_command_line(error: &clap::Error) -> Failure {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Failure::request(format!("no command given; `{} --help` lists them", asked_of(error)));
    }
    if let Some(text) = wrong_value(error) {
        return Failure::request(text);
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let mut parts = text.split("\n\n").map(str::trim);
    let what = parts.next().unwrap_or_default();
    if matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        // It says what to write.
        return Failure::request(what);
    }
    // The usage and a word on help follow; in one line, only a similar name is of use.
    let similar = parts.find_map(|part| part.strip_prefix("tip: a similar"));
    let similar = similar.and_then(|tip| tip.lines().next());
    Failure::request(match similar {
        Some(tip) => format!("{what}; a similar{tip}"),
        None => match foreign(error) {
            Some(instead) => format!("{what}; {instead}"),
            None => format!("{what}; --help lists the options"),
        },
    })
}

/// What to write for an option that other servers have.
fn foreign(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    match option.as_str() {
        "--port" | "-p" => Some("the port belongs to the listener, as in --nbd :10809 or --iscsi :3260"),
        "--unix" | "-U" | "--socket" | "-k" => Some("write --nbd unix:PATH"),
        "--export-name" | "--exportname" | "-x" | "-e" => Some("write NAME=VOLUME"),
        _ => None,
    }
}

/// The command that wants another one, as its usage has it.
fn asked_of(error: &clap::Error) -> String {
    let help = error.to_string();
    let usage = help.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or("blockmux");
    let words = usage.split(' ').take_while(|word| !word.starts_with(['[', '<']));
    words.collect::<Vec<_>>().join(" ")
}

/// An option with its value, or a positional argument, and what is wrong with it; `None` if that is
/// another fault.
fn wrong_value(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let value = text(ContextKind::InvalidValue).filter(|value| !value.is_empty())?;
    let why = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) if source.is::<ParseIntError>() => "is not a whole number".to_owned(),
        (Some(source), _) => {
            let why = source.to_string();
            // clap writes a range as Rust does.
            match why.split_once(" is not in ").and_then(|(_, range)| range.split_once("..=")) {
                Some((least, most)) => format!("write a number from {least} to {most}"),
                None => why,
            }
        }
        (None, Some(ContextValue::Strings(known))) => {
            let argument = text(ContextKind::InvalidArg)?.split(' ').next().unwrap_or_default();
            let argument = argument.trim_matches(['[', ']', '<', '>', '.']);
            return Some(format!("{argument} {}: not one of {}", shell_word(value), known.join(", ")));
        }
        (None, _) => return None,
    };
    let option = text(ContextKind::InvalidArg)?.split(' ').next().filter(|name| name.starts_with('-'));
    Some(match option {
        Some(option) => format!("{option} {}: {why}", shell_word(value)),
        // A volume, and what is wrong with one names it.
        None => why,
    })
}
