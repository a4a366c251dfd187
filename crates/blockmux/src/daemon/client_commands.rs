//! Commands about the clients of the daemon: the secrets that they prove themselves with, and their
//! sessions.

use super::config_audit::Caller;
use super::control::{Changed, ControlServer, REMOVE_TIMEOUT};
use super::reload::{describe_session, edit, named_sessions};
use crate::api::ApiError;
use crate::api::bodies::{SecretInfo, SecretText};
use crate::cli::ctl::Answer;
use blockmux_engine::serve::sessions::SessionInfo;
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

impl ControlServer {
    /// The secrets that were written through the API.
    pub(super) fn secrets(&self) -> Result<Vec<SecretInfo>, ApiError> {
        let (secrets, config) = (self.secrets.clone(), self.reloader.config_table());
        self.reloader.blocking.run(STATE, move || secrets.list(&config))?
    }

    /// Writes a secret; what uses it reads it again. If that is refused, the value before is back.
    pub(super) fn write_secret(
        &self,
        name: &str,
        value: &SecretText,
        caller: &Caller,
    ) -> Result<Changed, ApiError> {
        let _writing = self.writes_secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let (secrets, config) = (self.secrets.clone(), self.reloader.config_table());
        let (own, value) = (name.to_owned(), value.clone());
        let write = move || {
            let kept = secrets.keep(&own)?;
            secrets.write(&own, &value.0, &config).map(|written| (written, kept))
        };
        let (written, kept) = self.reloader.blocking.run(STATE, write)??;
        let mut effects = vec![format!("~ secret {name}: new content")];
        if !written.used_by.is_empty() {
            let read = edit::read_secrets(&self.reloader, caller);
            let refused = |error: ApiError| {
                let (secrets, own) = (self.secrets.clone(), name.to_owned());
                let restored =
                    self.reloader.blocking.run(STATE, move || secrets.restore(&own, kept.as_ref()));
                match restored.map_err(ApiError::from).flatten() {
                    Ok(()) => error,
                    Err(also) => ApiError::failed(format!("{error}; and the secret before is lost: {also}")),
                }
            };
            effects.extend(read.map_err(refused)?.lines());
        }
        Ok(Changed { answer: Answer::Secrets(vec![written]), effects })
    }

    /// Removes a secret that the config does not use.
    pub(super) fn remove_secret(&self, name: &str, caller: &Caller) -> Result<Changed, ApiError> {
        let _writing = self.writes_secrets.lock().unwrap_or_else(PoisonError::into_inner);
        // No edit begins to use it meanwhile.
        let _guard = self.reloader.lock_reloads_for(&format!("remove secret {name}"), caller)?;
        let (secrets, own, config) = (self.secrets.clone(), name.to_owned(), self.reloader.config_table());
        self.reloader.blocking.run(STATE, move || secrets.remove(&own, &config))??;
        Ok(Changed { answer: Answer::Done, effects: vec![format!("- secret {name}")] })
    }

    /// Ends the sessions of a client's address or of an initiator, as a stop does: I/O in flight
    /// completes. Most clients connect again.
    pub(super) fn disconnect(&self, session: &str) -> Result<Changed, ApiError> {
        let is_meant = |own: &SessionInfo| own.peer == session || own.login.initiator == session;
        let sessions = self.connection_limits.limit.sessions();
        let meant: Vec<_> =
            sessions.list().iter().filter(|own| is_meant(own)).map(describe_session).collect();
        if meant.is_empty() {
            let text =
                format!("no session has the address or the initiator `{session}`; 'ctl sessions' lists them");
            return Err(ApiError::not_found(text));
        }
        let draining = sessions.drain(DISCONNECTED, is_meant);
        self.reloader.cores().wake_all();
        let begun = Instant::now();
        while !draining.left().is_empty() && begun.elapsed() < REMOVE_TIMEOUT {
            thread::park_timeout(Duration::from_millis(1));
        }
        draining.close();
        self.reloader.cores().wake_all();
        let effects = meant.iter().map(|session| format!("- session {session}")).collect();
        Ok(Changed { answer: Answer::Message(format!("disconnected {}", named_sessions(&meant))), effects })
    }
}

/// Names the state directory in messages.
const STATE: &str = "the state directory";
/// Why a session ended that a command has disconnected, for the log.
const DISCONNECTED: &str = "disconnected by a command";
