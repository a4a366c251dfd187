//! What the group's thread is told, and by which client.

use blockmux_group::{Client, Command, Event, Notice, Refusal, RequestId, Table};
use blockmux_rbd::cluster::Cluster;
use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::object::PoolObject;
use blockmux_rbd::watch::Watch;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, SyncSender};

pub(super) enum GroupInput {
    Connected(Result<GroupConnection, RbdError>),
    /// From the client with this number; too late if there is another one now.
    OfClient {
        client: u64,
        report: Report,
    },
    Command {
        command: Command,
        answer: SyncSender<Result<(), Refusal>>,
        /// The member ends then: it does not connect again.
        is_last: bool,
    },
    Stop,
}

/// A new client of the cluster.
pub(super) struct GroupConnection {
    pub(super) cluster: Arc<Cluster>,
    pub(super) address: Client,
    /// The object of the group's table.
    pub(super) object: Arc<PoolObject>,
}

/// A watch of the table, and its number among those of its client.
pub(super) struct NumberedWatch {
    pub(super) number: u64,
    pub(super) watch: Watch,
}

/// What has become of something that was asked of a client, or what it was told.
pub(super) enum Report {
    Read {
        request: RequestId,
        result: Result<Vec<u8>, RbdError>,
    },
    Proposed {
        request: RequestId,
        table: Table,
        result: Result<bool, RbdError>,
    },
    Watching(Result<NumberedWatch, RbdError>),
    /// A notification, which the sender has counted.
    Noticed(Notice),
    /// Notifications were lost, of this watch or because too many came.
    Interrupted {
        watch: Option<u64>,
    },
    /// A notification was not sent.
    NotNotified(Errno),
    Fenced {
        clients: Vec<Client>,
        result: Result<(), RbdError>,
    },
    FencedAgain(Result<(), RbdError>),
    LatestMap {
        call: u64,
        result: Result<(), RbdError>,
    },
    /// Of a volume, with what is wrong.
    Volume {
        event: Event,
        problem: Option<String>,
    },
}

/// Sends what is of one client. Does not block.
#[derive(Clone)]
pub(super) struct ClientSender {
    client: u64,
    sender: Sender<GroupInput>,
    /// Notifications that were not taken yet.
    noticed: Arc<AtomicUsize>,
}

impl ClientSender {
    pub(super) fn new(client: u64, sender: &Sender<GroupInput>) -> ClientSender {
        ClientSender { client, sender: sender.clone(), noticed: Arc::default() }
    }

    pub(super) fn number(&self) -> u64 {
        self.client
    }

    pub(super) fn send(&self, report: Report) {
        // If nobody receives it, the group has ended.
        let _ = self.sender.send(GroupInput::OfClient { client: self.client, report });
    }

    /// Sends a notification. Anybody who may use the pool can send any number of them; of too many,
    /// only that some were lost is told.
    pub(super) fn notice(&self, notice: Notice) {
        match self.noticed.fetch_add(1, Ordering::Relaxed) {
            before if before < MAX_NOTICED => self.send(Report::Noticed(notice)),
            MAX_NOTICED => self.send(Report::Interrupted { watch: None }),
            _ => {}
        }
    }

    /// A notification was taken. If some were lost, that comes last.
    pub(super) fn on_taken(&self, report: &Report) {
        match report {
            Report::Noticed(_) => {
                let fewer = |count: usize| if count > MAX_NOTICED { count } else { count.saturating_sub(1) };
                let _ = self
                    .noticed
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| Some(fewer(count)));
            }
            // All before it were taken.
            Report::Interrupted { watch: None } => self.noticed.store(0, Ordering::Relaxed),
            _ => {}
        }
    }
}

/// Maximum number of notifications that wait for the group's thread: those of 64 members in 3 s.
const MAX_NOTICED: usize = 1024;
