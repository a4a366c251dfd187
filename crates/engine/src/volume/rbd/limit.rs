//! Calls of the libraries that may block for ever.

use blockmux_rbd::error::RbdError;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Makes a call that may block for ever on a thread. After the limit nobody receives what it
/// returns, which is dropped then.
pub(super) fn within_limit<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
) -> Result<T, RbdError> {
    let (sender, result) = mpsc::channel();
    let no_answer = || RbdError::NoAnswer(LIMIT);
    let run = move || drop(sender.send(call()));
    thread::Builder::new().name("rbd call".to_owned()).spawn(run).map_err(|_| no_answer())?;
    result.recv_timeout(LIMIT).unwrap_or_else(|_| Err(no_answer()))
}

/// The cluster loses a killed client, which may have the lock, after half a minute.
pub(super) const LIMIT: Duration = Duration::from_secs(90);
