//! Audit lines of changes: one for each, also if it fails, with who requested it.

use crate::api::ApiError;
use crate::output::{masked, shortened};
use blockmux_engine::serve::audit::AUDIT;
use blockmux_volume::spec::with_hidden_secrets;
use std::fmt;
use tracing::{info, warn};

/// Who requests a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// A process at the control socket, as the kernel identifies it.
    Process { uid: u32, pid: Option<i32> },
    /// A client of the API over TCP, with the subject of its certificate and the name of its token
    /// if it has them.
    Client { address: String, subject: Option<String>, token: Option<String> },
    /// A signal to the daemon.
    Signal(&'static str),
}

impl Caller {
    /// The subject of the client's certificate, for the log.
    pub(super) fn subject(&self) -> &str {
        match self {
            Caller::Client { subject: Some(subject), .. } => subject,
            _ => "-",
        }
    }

    /// The name of the client's token, for the log.
    pub(super) fn token(&self) -> &str {
        match self {
            Caller::Client { token: Some(token), .. } => token,
            _ => "-",
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Caller::Process { uid, pid: Some(pid) } => write!(f, "uid {uid}, process {pid}"),
            Caller::Process { uid, pid: None } => write!(f, "uid {uid}"),
            Caller::Client { address, .. } => f.write_str(address),
            Caller::Signal(name) => f.write_str(name),
        }
    }
}

/// Logs a change: `what` was requested, and its effects, one text for each, or the reason why there
/// are none.
pub(super) fn log(caller: &Caller, what: &str, outcome: Result<&[String], &ApiError>) {
    let what = shortened(&with_hidden_secrets(what)).into_owned();
    let (subject, token) = (caller.subject(), caller.token());
    match outcome {
        Ok(effects) => {
            let changes = masked(&effects.join("; "));
            let changes = if changes.is_empty() { "none" } else { &*shortened(&changes) };
            info!(target: AUDIT, protocol = "api", peer = %caller, subject, token, changes, "config changed: {what}");
        }
        Err(error) => {
            let reason = error.to_string();
            let reason = &*shortened(&reason);
            warn!(target: AUDIT, protocol = "api", peer = %caller, subject, token, reason, "config change refused: {what}");
        }
    }
}
