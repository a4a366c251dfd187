//! Messages from other threads to a core, signalled by an eventfd in its ring.

use super::core::EngineCore;
use super::readiness::WakeOnEvent;
use super::task::{Progress, Task};
use crate::core::ring::Registration;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::{Arc, mpsc};

/// A closure for a core to run.
pub type CoreMessage = Box<dyn FnOnce(&Rc<EngineCore>) + Send>;

/// Sends messages to a core from any thread; a clone sends to the same core.
#[derive(Clone)]
pub struct Inbox {
    sender: mpsc::Sender<CoreMessage>,
    event: Arc<OwnedFd>,
}

impl Inbox {
    /// Makes the core run `message` soon; if the core has ended, it is dropped without being run.
    pub fn send(&self, message: impl FnOnce(&Rc<EngineCore>) + Send + 'static) {
        if self.sender.send(Box::new(message)).is_ok() {
            // The write fails only if the counter is full, and then it is readable anyway.
            let _ = write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Runs `ask` on the core and waits for the result; `None` if the core has ended.
    pub fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Rc<EngineCore>) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::channel();
        self.send(move |core| {
            // The receiver may be gone.
            let _ = sender.send(ask(core));
        });
        receiver.recv().ok()
    }
}

/// Runs messages of other threads.
struct InboxTask {
    core: Weak<EngineCore>,
    receiver: mpsc::Receiver<CoreMessage>,
    event: Arc<OwnedFd>,
    registration: Registration,
    armed: Rc<WakeOnEvent>,
}

/// Starts the task on `core` that runs its messages.
pub(super) fn open(core: &EngineCore) -> io::Result<Inbox> {
    let (sender, receiver) = mpsc::channel();
    let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let inbox = Inbox { sender, event: event.clone() };
    core.spawn(|waker| {
        let armed = WakeOnEvent::new(waker);
        let registration = core.register(armed.clone());
        InboxTask { core: core.this.clone(), receiver, event, registration, armed }
    });
    Ok(inbox)
}

impl Task for InboxTask {
    fn run(&mut self) -> Progress {
        // Cleared before the queue is read, so that a later message signals again.
        let _ = read(&self.event, &mut [0; 8]);
        self.armed.arm(&self.registration, self.event.as_raw_fd(), libc::POLLIN, 0);
        let mut progress = Progress::Idle;
        while let (Some(core), Ok(message)) = (self.core.upgrade(), self.receiver.try_recv()) {
            message(&core);
            progress = Progress::Drained;
        }
        progress
    }
}
