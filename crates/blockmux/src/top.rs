//! `blockmux top`: what a daemon does, in a terminal, refreshed each second.

mod screen;

use crate::api::ApiAddress;
use crate::api::client::{Call, CallError, Client};
use crate::ctl::{History, SessionStatus, Status, client};
use crate::failure::Failure;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use screen::View;
use serde::de::DeserializeOwned;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Which daemon.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// Address of `serve --control`, or of `serve --api` as http://HOST:PORT
    #[arg(value_name = "unix:PATH")]
    address: ApiAddress,
    /// File with the token of `serve --api`
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// What a daemon has told.
struct Told {
    status: Status,
    sessions: Vec<SessionStatus>,
    history: History,
    at: Instant,
}

/// Shows it until `q` is pressed.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if !io::stdout().is_terminal() {
        return Err(Failure::request("top needs a terminal; `blockmux ctl ADDRESS status` prints to a pipe"));
    }
    let client = client(&args.address, args.token_file.as_deref())?;
    // Whatever is wrong with the address is said before the screen is taken.
    let mut view = View::new(args.address.to_string(), told(&client)?);
    let cannot = |error: io::Error| Failure::run(format!("cannot draw on this terminal: {error}"));
    let mut terminal = ratatui::try_init().map_err(cannot)?;
    let shown = loop {
        if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
            break Err(cannot(error));
        }
        match next_key(Instant::now() + EVERY) {
            Ok(Some(KeyCode::Char('q') | KeyCode::Esc)) => break Ok(()),
            Ok(Some(key)) => view.on_key(key),
            Ok(None) => match told(&client) {
                Ok(told) => view.update(told),
                Err(failure) => view.fail(failure.to_string()),
            },
            Err(error) => break Err(cannot(error)),
        }
    };
    ratatui::restore();
    shown
}

/// The key that was pressed before that time; Ctrl-C is `q`.
fn next_key(end: Instant) -> io::Result<Option<KeyCode>> {
    while event::poll(end.saturating_duration_since(Instant::now()))? {
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                let is_interrupt =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                return Ok(Some(if is_interrupt { KeyCode::Char('q') } else { key.code }));
            }
            Event::Resize(..) => return Ok(Some(KeyCode::Null)),
            _ => {}
        }
    }
    Ok(None)
}

fn told(client: &Client) -> Result<Told, Failure> {
    Ok(Told {
        status: get(client, "/v1/status")?,
        sessions: get(client, "/v1/sessions")?,
        history: get(client, "/v1/history")?,
        at: Instant::now(),
    })
}

fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, Failure> {
    match client.call(&Call::new("GET", path)) {
        Ok(reply) => serde_json::from_value(reply.body)
            .map_err(|error| Failure::run(format!("{path}: {error}; the daemon may be of another version"))),
        Err(CallError::Refused(error)) => Err(Failure::run(error)),
        Err(CallError::NoAnswer(failure)) => Err(failure),
    }
}

const EVERY: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Keys: Tab changes between volumes and sessions, arrows scroll, q ends.

Examples:
  blockmux top unix:/run/blockmux/control";
