//! `blockmux top`: shows volumes, sessions and I/O rates of a daemon, refreshed each second.

mod screen;

use crate::api::client::{Call, CallError, Client};
use crate::api::history::History;
use crate::api::status::{SessionStatus, Status};
use crate::cli::ctl::DaemonArgs;
use crate::failure::Failure;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use screen::View;
use serde::de::DeserializeOwned;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Arguments of `blockmux top`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
}

/// The data of one refresh.
struct DaemonState {
    status: Status,
    sessions: Vec<SessionStatus>,
    history: History,
    at: Instant,
}

/// Refreshes the screen until `q` is pressed.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if !io::stdout().is_terminal() {
        return Err(Failure::request("top needs a terminal; `blockmux ctl ADDRESS status` prints to a pipe"));
    }
    let client = args.daemon.client()?;
    // A wrong address is reported before the terminal switches to the screen.
    let mut view = View::new(args.daemon.address()?.to_string(), query(&client)?);
    let cannot = |error: io::Error| Failure::run(format!("cannot draw on this terminal: {error}"));
    let mut terminal = ratatui::try_init().map_err(cannot)?;
    let shown = loop {
        if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
            break Err(cannot(error));
        }
        match next_key(Instant::now() + REFRESH_INTERVAL) {
            Ok(Some(KeyCode::Char('q') | KeyCode::Esc)) => break Ok(()),
            Ok(Some(key)) => view.on_key(key),
            Ok(None) => match query(&client) {
                Ok(state) => view.update(state),
                Err(failure) => view.fail(failure.to_string()),
            },
            Err(error) => break Err(cannot(error)),
        }
    };
    ratatui::restore();
    shown
}

/// Waits for a key until `end`; `None` if none was pressed. Ctrl-C counts as `q`.
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

fn query(client: &Client) -> Result<DaemonState, Failure> {
    let status: Status = get(client, "/v1/status")?;
    let mut sessions: Vec<SessionStatus> = get(client, "/v1/sessions")?;
    sessions.extend(status.attachments.iter().filter_map(SessionStatus::of_disk));
    Ok(DaemonState { status, sessions, history: get(client, "/v1/history")?, at: Instant::now() })
}

fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, Failure> {
    match client.call(&Call::new("GET", path)) {
        Ok(reply) => serde_json::from_value(reply.body)
            .map_err(|error| Failure::run(format!("{path}: {error}; the daemon may have another version"))),
        Err(CallError::Refused(error)) => Err(error.into()),
        Err(CallError::NoAnswer(failure)) => Err(failure),
    }
}

/// Interval of refreshes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Keys: Tab switches between volumes, sessions and limits, arrows scroll, q quits.

Examples:
  blockmux top unix:/run/blockmux/control";
