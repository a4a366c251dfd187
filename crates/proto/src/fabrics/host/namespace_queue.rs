//! The commands of one I/O queue: I/O to a namespace, Connect and authentication.
//!
//! The number of outstanding commands is bounded by the queue's entries; further I/O waits here.

use super::access::PathFailures;
use super::authenticate::{self, QueueAuthentication};
use super::command;
use super::completion_class;
use super::delayed::DelayedCommands;
use super::info::NamespaceInfo;
use super::plan::{NamespaceCapabilities, NvmeCommandKind, NvmePlan, RANGE_LEN};
use super::transport::{Commands, NvmeRequest, TransferProgress};
use super::{DEPTH, Names, NvmeRefused};
use crate::driver::session::PathRank;
use crate::initiator::command_queue::{self, CommandSet, CompletionClass, DataTransfer, Zeroes, memory};
use crate::initiator::job;
use crate::nvme::auth::HostCredentials;
use crate::slots::SlotKey;
use blockmux_volume::{Io, IoError, Op, Pool, Seg, SgList};
use blockmux_wire::nvme::status::StatusField;
use blockmux_wire::nvme::{Cqe, Sqe};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The outstanding I/O to one namespace over one I/O queue.
pub(crate) type NamespaceQueue = command_queue::CommandQueue<RemoteNamespace, TransferProgress>;
pub(super) type NvmeQueuedCommand = command_queue::QueuedCommand<RemoteNamespace, TransferProgress>;
pub(super) type NvmeJob = job::IoJob<NvmeCommandKind>;
pub(super) type NvmePiece = job::CommandPiece<NvmeCommandKind>;

/// State of the namespace, of the path to it, and of the queue.
pub(crate) struct RemoteNamespace {
    connecting: Connecting,
    names: Names,
    credentials: Option<HostCredentials>,
    capabilities: NamespaceCapabilities,
    pub(super) rank: PathRank,
    pub(super) failing: PathFailures,
    zeroes: Zeroes,
    /// Most outstanding commands.
    max_commands_in_flight: usize,
    /// Commands to retry after a delay.
    later: DelayedCommands,
    /// Command Retry Delay Times 1 to 3; zero if the controller does not use them.
    retry_delays: [Duration; 3],
    /// Time of the latest call.
    now: Instant,
}

/// Progress of the queue's Connect.
enum Connecting {
    /// Connect has to be sent: QID, entries, and its data.
    Due(u16, u16, Box<SgList>),
    Sent,
    /// Authentication is in progress; the flag says whether one of its commands is outstanding.
    Authenticating(Box<QueueAuthentication>, bool),
    Connected,
    Refused(NvmeRefused),
}

impl NamespaceQueue {
    /// Creates queue `qid` with `entries` entries, at most [`DEPTH`], of controller `cntlid`.
    pub(crate) fn new(
        names: Names,
        credentials: Option<HostCredentials>,
        cntlid: u16,
        (qid, entries): (u16, u16),
        namespace: &NamespaceInfo,
        pool: Pool,
        now: Instant,
    ) -> NamespaceQueue {
        let data = command::connect_data(&names, cntlid);
        let data = SgList::one(Seg::from_slice(data.as_bytes()));
        let set = RemoteNamespace {
            connecting: Connecting::Due(qid, entries, Box::new(data)),
            names,
            credentials,
            capabilities: NamespaceCapabilities::new(namespace),
            rank: PathRank::Best,
            failing: PathFailures::default(),
            zeroes: Zeroes::default(),
            // A full ring has one unused entry.
            max_commands_in_flight: usize::from(entries).clamp(2, DEPTH).saturating_sub(1),
            later: DelayedCommands::default(),
            retry_delays: [Duration::ZERO; 3],
            now,
        };
        NamespaceQueue::of(set, namespace.volume_info(), pool)
    }

    /// Whether the queue is connected.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.set.is_open()
    }

    /// The refusal, if the queue could not be connected.
    pub(crate) fn refused(&self) -> Option<&NvmeRefused> {
        match &self.set.connecting {
            Connecting::Refused(refused) => Some(refused),
            _ => None,
        }
    }

    /// Time of the latest call.
    pub(super) fn now(&self) -> Instant {
        self.set.now
    }

    /// Sets the time of a call.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        self.set.now = now;
    }

    /// When to call [`NamespaceQueue::on_timeout`].
    #[inline]
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let later = self.set.later.poll_timeout();
        let failing = self.set.failing.poll_timeout();
        later.into_iter().chain(failing).min()
    }

    /// Sends delayed commands again, and ends the pause of a failing path.
    pub(crate) fn on_timeout(&mut self, now: Instant) {
        self.set.now = now;
        self.set.later.on_timeout(now, &mut self.again);
        self.set.failing.on_timeout(now);
    }

    /// Sets the Command Retry Delay Times.
    pub(crate) fn set_retry_delays(&mut self, delays: [Duration; 3]) {
        self.set.retry_delays = delays;
    }

    /// [`Overdue::tick`](crate::driver::session::Overdue::tick) for this queue.
    pub(crate) fn tick(&mut self) -> u32 {
        self.commands.tick(NvmeQueuedCommand::is_long)
    }

    /// Sets the size of the namespace, in bytes.
    pub(crate) fn resize(&mut self, size: u64) {
        self.info.size = size;
    }

    /// Takes all I/O that has not completed, with its age.
    pub(crate) fn take_unfinished(&mut self) -> Vec<(u64, Io)> {
        self.set.later.clear();
        self.take_jobs()
    }

    /// The next command to send, if there is one and the queue has a free entry.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<NvmeRequest> {
        if !self.is_connected() {
            return self.connect();
        }
        if self.commands.len() >= self.set.max_commands_in_flight { None } else { self.next_of_jobs() }
    }

    /// The next command of Connect and authentication.
    fn connect(&mut self) -> Option<NvmeRequest> {
        let (sqe, transfer, payload) = match &mut self.set.connecting {
            Connecting::Due(qid, entries, data) => {
                let connect = (command::connect(*qid, *entries, 0), DataTransfer::Out(data.len() as u32));
                let data = std::mem::take(&mut **data);
                self.set.connecting = Connecting::Sent;
                (connect.0, connect.1, data)
            }
            Connecting::Authenticating(authentication, is_asked @ false) => {
                *is_asked = true;
                authentication.next_command()?
            }
            _ => return None,
        };
        Some(self.begin_with(NvmePiece::of_the_queue(NvmeCommandKind::Connect), sqe, transfer, Some(payload)))
    }

    /// Handles the completion of an I/O command.
    #[inline]
    fn on_finished(&mut self, key: SlotKey, cqe: &Cqe) {
        let Some(command) = self.commands.get_mut(key) else { return };
        let piece = command.piece;
        let Some(job) = piece.job else { return self.on_connecting(key, cqe) };
        let mut class = completion_class::of(cqe.status);
        if class == CompletionClass::Good && command.transport.is_corrupt {
            class = CompletionClass::Later(IoError::Medium);
        } else if class == CompletionClass::Good && !command.transport.is_whole(command.transfer) {
            class = CompletionClass::Failed(IoError::Medium);
        }
        self.commands.discard(key);
        match class {
            CompletionClass::Good => self.set.failing.on_good(),
            CompletionClass::Astray => self.set.failing.on_failure(self.set.now),
            CompletionClass::Elsewhere => {
                // The path is unusable until the log page has been read again.
                self.set.rank = PathRank::Unusable;
                if !self.retries.has_other_paths {
                    class = CompletionClass::Later(IoError::PathLost);
                }
            }
            _ => {}
        }
        if let Some(piece) = self.finish_piece(piece, job, class) {
            let told = self.set.retry_delay(cqe.status);
            self.set.later.push(piece, told, (self.set.now, self.retries.busy_timeout));
        }
    }

    /// Handles the completion of Connect or of an authentication command.
    #[cold]
    fn on_connecting(&mut self, key: SlotKey, cqe: &Cqe) {
        let Some(command) = self.commands.remove(key) else { return };
        let next = match &mut self.set.connecting {
            Connecting::Authenticating(authentication, is_asked) => {
                let payload = command.payload.as_ref();
                let data = payload.and_then(|payload| command.transport.data(command.transfer, payload));
                *is_asked = false;
                let done = authentication.on_answer(cqe, &data.unwrap_or_default());
                done.map(|is_done| is_done.then_some(Connecting::Connected))
            }
            _ if !cqe.status.is_success() => Err(NvmeRefused::Connect(cqe.status)),
            _ => {
                let asked = authenticate::required_authentication(
                    cqe.result.get(),
                    self.set.credentials.as_ref(),
                    &self.set.names,
                    false,
                );
                let connecting = |authentication: Option<Box<_>>| match authentication {
                    Some(authentication) => Connecting::Authenticating(authentication, false),
                    None => Connecting::Connected,
                };
                asked.map(|authentication| Some(connecting(authentication)))
            }
        };
        match next {
            Ok(None) => {}
            Ok(Some(next)) => self.set.connecting = next,
            Err(refused) => self.set.connecting = Connecting::Refused(refused),
        }
    }
}

impl CommandSet for RemoteNamespace {
    type Kind = NvmeCommandKind;
    type Sent = Sqe;
    type CommandState = ();

    #[inline]
    fn is_open(&self) -> bool {
        matches!(self.connecting, Connecting::Connected)
    }

    #[inline]
    fn plan(&self, op: Op) -> NvmePlan {
        self.capabilities.plan(op)
    }

    #[inline]
    fn command(&self, piece: &NvmePiece) -> (Sqe, DataTransfer) {
        self.capabilities.sqe(piece.kind, piece.offset, piece.len)
    }

    #[inline]
    fn payload(&mut self, piece: &NvmePiece, pool: &Pool) -> Option<SgList> {
        match piece.kind {
            NvmeCommandKind::Zeroes { .. } => Some(self.zeroes.list(piece.len)),
            NvmeCommandKind::Deallocate => {
                let list = memory(pool, RANGE_LEN);
                let range = command::range(self.capabilities.blocks(piece.offset, piece.len));
                list.copy_from(range.as_bytes());
                Some(list)
            }
            _ => None,
        }
    }

    #[inline]
    fn keep(_: &Sqe) {}

    #[cold]
    fn do_otherwise(&mut self, piece: NvmePiece, job: &mut NvmeJob) -> Option<NvmePiece> {
        match (piece.kind, job.io.op) {
            (NvmeCommandKind::WriteZeroes { .. }, Op::WriteZeroes { only_fast: false, fua, .. }) => {
                self.capabilities.write_zeroes = None;
                job.go_back(piece.offset, self.capabilities.written_zeroes(fua));
            }
            // Deallocation is a hint, so nothing has to be done instead.
            (NvmeCommandKind::Deallocate, _) => {
                self.capabilities.deallocate = None;
                job.issued = job.io.len;
            }
            _ => job.fail(IoError::Unsupported),
        }
        None
    }
}

impl RemoteNamespace {
    /// The retry delay of a status, if the controller gives one.
    #[cold]
    fn retry_delay(&self, status: StatusField) -> Option<Duration> {
        let which = usize::from(status.retry_delay()).checked_sub(1)?;
        self.retry_delays.get(which).copied().filter(|delay| !delay.is_zero())
    }
}

impl Commands for NamespaceQueue {
    #[inline]
    fn find(&self, cid: u16) -> Option<SlotKey> {
        self.commands.find_narrow(cid)
    }

    #[inline]
    fn transport(&mut self, key: SlotKey) -> Option<(&mut TransferProgress, DataTransfer)> {
        NamespaceQueue::transport(self, key)
    }

    #[inline]
    fn finish(&mut self, key: SlotKey, cqe: &Cqe) {
        self.on_finished(key, cqe);
    }
}
