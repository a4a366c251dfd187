//! The handle of a driver: starting it, and commands of operators.

use super::input::GroupInput;
use super::options::{ConnectToCluster, GroupOptions, GroupStatus};
use super::runner::Runner;
use super::volumes::GroupVolumes;
use blockmux_group::member::COMMAND_TIMEOUT;
use blockmux_group::{Command, Refusal};
use std::io;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A member of a group, on a thread. Dropping it ends all I/O of its volumes and closes its client
/// without telling the group, whose other members take its volumes over when they suspect it: so it
/// is drained first ([`Command::Drain`]).
pub struct GroupDriver {
    sender: Sender<GroupInput>,
    status: Arc<Mutex<Arc<GroupStatus>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl GroupDriver {
    /// Starts to be a member. It joins the group when it reaches the cluster.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        options: GroupOptions,
        connect: ConnectToCluster,
        volumes: Box<dyn GroupVolumes>,
    ) -> io::Result<GroupDriver> {
        let (sender, inputs) = mpsc::channel();
        let status = Arc::default();
        let runner = Runner::new(options, connect, volumes, &sender, &status);
        let thread = thread::Builder::new().name("group".to_owned()).spawn(move || runner.run(&inputs))?;
        Ok(GroupDriver { sender, status, thread: Mutex::new(Some(thread)) })
    }

    /// What the member knows now. Waits for nothing.
    #[must_use]
    pub fn status(&self) -> Arc<GroupStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has the group's table changed as an operator wants, and waits until it is, for some seconds
    /// at most. What follows from that, such as moves of volumes, comes later.
    ///
    /// # Errors
    /// If it is refused, or nobody knows whether it was done.
    pub fn command(&self, command: Command) -> Result<(), Refusal> {
        self.ask(command, false)
    }

    /// Does what [`GroupDriver::command`] does, before the member ends: if it does not belong to
    /// the group any longer, it does not join again.
    ///
    /// # Errors
    /// The errors of [`GroupDriver::command`].
    pub fn last_command(&self, command: Command) -> Result<(), Refusal> {
        self.ask(command, true)
    }

    fn ask(&self, command: Command, is_last: bool) -> Result<(), Refusal> {
        let (answer, answered) = mpsc::sync_channel(1);
        let sent = self.sender.send(GroupInput::Command { command, answer, is_last });
        sent.map_err(|_| Refusal::NotMember)?;
        answered.recv_timeout(COMMAND_TIMEOUT.saturating_add(LATE)).unwrap_or(Err(Refusal::Unconfirmed))
    }

    /// Ends what dropping it ends. Later commands are refused.
    pub fn end(&self) {
        // It has ended if nobody receives this.
        let _ = self.sender.send(GroupInput::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = thread.map(JoinHandle::join);
    }
}

impl Drop for GroupDriver {
    fn drop(&mut self) {
        self.end();
    }
}

/// How late the member's own answer to a command may come.
const LATE: Duration = Duration::from_secs(2);
