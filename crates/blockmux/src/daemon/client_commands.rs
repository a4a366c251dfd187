//! Commands about the clients of the daemon: the secrets that they prove themselves with, and their
//! sessions.

use super::blocking_work::Awaited;
use super::config_audit::{self, Caller};
use super::control::{Changed, ControlServer};
use super::reload::{DRAIN_TIMEOUT, describe_session, edit, named_sessions, wait};
use crate::api::ApiError;
use crate::api::bodies::{SecretInfo, SecretText};
use crate::api::request::Answer;
use blockmux_engine::serve::sessions::SessionInfo;
use zeroize::Zeroizing;

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
        let guard = self.secrets.lock(&format!("a write of secret {name}"), caller)?;
        let (secrets, config) = (self.secrets.clone(), self.reloader.config_table());
        let (own, value) = (name.to_owned(), value.clone());
        // Also a write that was given up ends before the next one begins.
        let write = move |awaited: &Awaited| {
            let write = || {
                let kept = secrets.keep(&own)?;
                awaited.begin()?;
                secrets.write(&own, &value.0, &config).map(|written| (written, kept))
            };
            (write(), guard)
        };
        let effect = format!("~ secret {name}: new content");
        let late = late(caller, format!("write secret {name}"), effect.clone());
        let (written, _guard) =
            self.reloader.blocking.run_change(STATE, write, move |(written, guard)| {
                late(written.map(drop));
                drop(guard);
            })?;
        let (written, kept) = written?;
        let mut effects = vec![effect];
        if !written.used_by.is_empty() {
            let read = edit::read_secrets(&self.reloader, caller);
            effects.extend(read.map_err(|error| self.restore_secret(name, kept, error))?.lines());
        }
        Ok(Changed { answer: Answer::Secrets(vec![written]), effects })
    }

    /// Writes the value back that a secret had before; returns why.
    fn restore_secret(&self, name: &str, kept: Option<Zeroizing<String>>, why: ApiError) -> ApiError {
        let (secrets, own) = (self.secrets.clone(), name.to_owned());
        let restore = move |awaited: &Awaited| {
            awaited.begin()?;
            secrets.restore(&own, kept.as_ref())
        };
        let restored = self.reloader.blocking.run_change(STATE, restore, drop);
        match restored.map_err(ApiError::from).flatten() {
            Ok(()) => why,
            Err(also) => ApiError::failed(format!("{why}; and the secret before is lost: {also}")),
        }
    }

    /// Removes a secret that the config does not use, or any if that is forced.
    pub(super) fn remove_secret(
        &self,
        name: &str,
        force: bool,
        caller: &Caller,
    ) -> Result<Changed, ApiError> {
        let what = format!("a removal of secret {name}");
        // No edit begins to use it meanwhile.
        let guards = (self.secrets.lock(&what, caller)?, self.reloader.lock_edits(&what, caller)?);
        let (secrets, own, config) = (self.secrets.clone(), name.to_owned(), self.reloader.config_table());
        let remove = move |awaited: &Awaited| {
            let begun = awaited.begin().map_err(ApiError::from);
            (begun.and_then(|()| secrets.remove(&own, &config, force)), guards)
        };
        let effect = format!("- secret {name}");
        let late = late(caller, format!("remove secret {name}"), effect.clone());
        let (removed, _guards) =
            self.reloader.blocking.run_change(STATE, remove, move |(removed, guards)| {
                late(removed.map(drop));
                drop(guards);
            })?;
        let used_by = removed?;
        let note = (!used_by.is_empty()).then(|| {
            let users = used_by.join(", ");
            format!(
                "{users} still names it, and no change of the config is possible until it is written again"
            )
        });
        Ok(Changed { answer: Answer::Done.noted(note), effects: vec![effect] })
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
        wait(DRAIN_TIMEOUT, || draining.left().is_empty());
        draining.close();
        self.reloader.cores().wake_all();
        let effects = meant.iter().map(|session| format!("- session {session}")).collect();
        Ok(Changed { answer: Answer::Message(format!("disconnected {}", named_sessions(&meant))), effects })
    }
}

/// Logs what has happened after its command was given up.
fn late(caller: &Caller, what: String, effect: String) -> impl FnOnce(Result<(), ApiError>) + Send + 'static {
    let caller = caller.clone();
    move |done| {
        let effects = done.map(|()| [effect]);
        let effects = effects.as_ref().map(<[String; 1]>::as_slice);
        config_audit::log(&caller, &format!("{what}, given up before"), effects);
    }
}

/// Names the state directory in messages.
const STATE: &str = "the state directory";
/// Why a session ended that a command has disconnected, for the log.
const DISCONNECTED: &str = "disconnected by a command";
