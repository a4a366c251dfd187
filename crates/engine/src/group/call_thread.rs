//! A thread for calls of librados that may block for ever, one at a time.

use super::input::{ClientSender, Report};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

/// Dropping it waits until its call has returned.
pub(super) struct CallThread {
    /// `None` when it ends.
    calls: Option<Sender<Call>>,
    is_busy: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

type Call = Box<dyn FnOnce() -> Report + Send>;

impl CallThread {
    /// A thread whose results are those of one client.
    pub(super) fn spawn(name: &str, sender: &ClientSender) -> io::Result<CallThread> {
        let (calls, received) = mpsc::channel::<Call>();
        let is_busy = Arc::new(AtomicBool::new(false));
        let (sender, busy) = (sender.clone(), is_busy.clone());
        let run = move || {
            for call in received {
                let report = call();
                // Who gets the report may make the next call.
                busy.store(false, Ordering::Release);
                sender.send(report);
            }
        };
        let thread = thread::Builder::new().name(format!("group {name}")).spawn(run)?;
        Ok(CallThread { calls: Some(calls), is_busy, thread: Some(thread) })
    }

    /// Makes a call. Returns `false`, and does not make it, while an earlier one has not returned.
    #[must_use]
    pub(super) fn call(&self, call: impl FnOnce() -> Report + Send + 'static) -> bool {
        let is_free = !self.is_busy.swap(true, Ordering::AcqRel);
        is_free && self.calls.as_ref().is_some_and(|calls| calls.send(Box::new(call)).is_ok())
    }
}

impl Drop for CallThread {
    fn drop(&mut self) {
        self.calls = None;
        // It fails only if the call has panicked.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
