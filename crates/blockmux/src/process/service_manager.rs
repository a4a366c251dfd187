//! Notifications to a service manager such as systemd (sd_notify(3)): ready, stopping, and the
//! watchdog. Without `NOTIFY_SOCKET` in the environment they do nothing.

use crate::failure::Failure;
use crate::process::privileges;
use blockmux_engine::core::reactor::Inbox;
use sd_notify::NotifyState;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::{debug, error};

/// Notifies the service manager that the process does what it is for, and what that is.
pub(crate) fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Notifies the service manager that the process is stopping.
pub(crate) fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        debug!("cannot notify the service manager: {error}");
    }
}

/// Notifies the service manager regularly while all cores run tasks (`WatchdogSec=`). If a core
/// does not respond, the notification is omitted and the service manager restarts the daemon.
/// Dropping it ends its thread.
pub(crate) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread if the service manager requests watchdog notifications.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(cores: Vec<Inbox>) -> Result<Option<Watchdog>, Failure> {
        let Some(timeout) = sd_notify::watchdog_enabled() else { return Ok(None) };
        let interval = (timeout / 2).max(MIN_INTERVAL);
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            privileges::drop_all_capabilities();
            loop {
                match unresponsive(&cores, interval) {
                    None => notify(&[NotifyState::Watchdog]),
                    Some(core) => error!("core {core} has run no task for {interval:?}"),
                }
                match stopped.recv_timeout(interval) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = thread::Builder::new().name("watchdog".to_owned()).spawn(watch);
        let thread = thread.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
        Ok(Some(Watchdog { stop: Some(stop), thread: Some(thread) }))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            error!("the watchdog thread has panicked");
        }
    }
}

/// The first core that does not answer within `timeout`.
fn unresponsive(cores: &[Inbox], timeout: Duration) -> Option<usize> {
    let deadline = Instant::now() + timeout;
    let asked = cores.iter().map(|inbox| {
        let (sender, answer) = mpsc::channel();
        inbox.send(move |_| {
            let _ = sender.send(());
        });
        answer
    });
    let answers: Vec<_> = asked.collect();
    answers
        .iter()
        .position(|answer| answer.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_err())
}

/// Minimum interval of notifications, for a very short timeout of the service manager.
const MIN_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_engine::core::cores::{Cores, CoresConfig};

    #[test]
    fn a_core_that_is_stuck_in_a_task_is_detected_and_one_that_sleeps_is_not() {
        let cores = Cores::start(&CoresConfig { count: 2, ..CoresConfig::default() }).unwrap();
        assert_eq!(unresponsive(&cores.inboxes(), Duration::from_secs(60)), None);
        let (release, held) = mpsc::channel::<()>();
        cores.inboxes()[1].send(move |_| {
            let _ = held.recv();
        });
        assert_eq!(unresponsive(&cores.inboxes(), Duration::from_millis(50)), Some(1));
        drop(release);
        assert_eq!(unresponsive(&cores.inboxes(), Duration::from_secs(60)), None);
    }
}
