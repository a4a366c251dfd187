//! The I/O queue of an initiator: splits I/O into commands, and combines their results. A
//! [`CommandSet`] defines the commands of a protocol and the meaning of their status (decision 48).
//!
//! An I/O within the peer's limits is one command; a longer one is split into pieces, of which four
//! are in flight at a time. The I/O completes after the last piece, and after the flush that
//! replaces FUA where the peer has none.
//!
//! A long read that brought no memory gets memory from the pool before it is sent, and waits while
//! the pool is empty. If no other command is in flight, it takes memory from the heap instead, so
//! that there is always a completion after which the pool is tried again.

use crate::driver::session::RetryRules;
use crate::initiator::command_memory::CommandMemory;
use crate::initiator::job::{CommandKind, CommandPiece, CommandPieces, IoJob, JobNext};
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use std::collections::VecDeque;
use std::time::Duration;

/// The commands of a protocol, and the subset that the peer is known to support.
pub(crate) trait CommandSet {
    /// Kind of a command.
    type Kind: CommandKind;
    /// A command as the transport sends it, without its data.
    type Sent;
    /// State of a command in flight.
    type CommandState;

    /// Whether I/O is accepted.
    fn is_open(&self) -> bool;

    /// Plans the commands for `op`.
    fn plan(&self, op: Op) -> IoPlan<Self::Kind>;

    /// The command for a piece.
    fn command(&self, piece: &CommandPiece<Self::Kind>) -> (Self::Sent, DataTransfer);

    /// The data of a command, if it is not the I/O's own.
    fn payload(&mut self, piece: &CommandPiece<Self::Kind>, pool: &Pool) -> Option<SgList>;

    fn keep(command: &Self::Sent) -> Self::CommandState;

    /// The peer does not support a command: carries out `job` with other commands, or
    /// fails it. A returned piece is sent instead.
    fn do_otherwise(
        &mut self,
        piece: CommandPiece<Self::Kind>,
        job: &mut IoJob<Self::Kind>,
    ) -> Option<CommandPiece<Self::Kind>>;
}

/// How an I/O is carried out.
pub(crate) enum IoPlan<K> {
    /// It is complete without a command: a hint that the peer does not support, or a flush without
    /// a write cache.
    Done,
    /// It fails, because the peer does not support it.
    Fails(IoError),
    /// Its result is one extent of data, because the peer reports no status.
    AllData,
    /// Commands for the pieces of its range, or a flush.
    Send(CommandPieces<K>),
}

/// Class of a completion, which decides whether and where the command is retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionClass {
    /// The command succeeded.
    Good,
    /// It was not carried out, for a reason that has passed: retry now.
    Again,
    /// It was not carried out, for a temporary reason: retry later, and report this error if no
    /// retry succeeds.
    Later(IoError),
    /// It was not carried out, because this path is unusable now: retry on another path.
    Elsewhere,
    /// It was lost in transport: another path may work at once.
    Astray,
    /// The peer does not support the command or a field of it.
    Illegal,
    /// It failed, and a retry would not help.
    Failed(IoError),
}

/// Data transfer of a command; lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataTransfer {
    /// No data.
    Nothing,
    /// To the initiator, up to this length.
    In(u32),
    /// To the target, of this length.
    Out(u32),
}

/// A command for the transport to send.
#[derive(Clone, Copy, Debug)]
pub struct CommandRequest<C> {
    /// Identifies the command until it is complete.
    pub(crate) key: SlotKey,
    pub(crate) command: C,
    /// Its data transfer.
    pub(crate) transfer: DataTransfer,
}

/// A command in flight.
pub(crate) struct QueuedCommand<S: CommandSet, T> {
    pub(crate) piece: CommandPiece<S::Kind>,
    pub(crate) state: S::CommandState,
    pub(crate) transfer: DataTransfer,
    /// Data that is not the I/O's own.
    pub(crate) payload: Option<SgList>,
    /// State of the transport for this command.
    pub(crate) transport: T,
}

impl<S: CommandSet, T> QueuedCommand<S, T> {
    /// Whether it may take longer than commands that transfer data.
    pub(crate) fn is_long(&self) -> bool {
        self.piece.kind.is_long()
    }
}

/// The I/O in flight. `T` is the transport's state for each command.
pub(crate) struct CommandQueue<S: CommandSet, T> {
    pub(crate) set: S,
    pub(crate) info: VolumeInfo,
    pub(crate) pool: Pool,
    pub(crate) jobs: Slots<IoJob<S::Kind>>,
    pub(crate) commands: Slots<QueuedCommand<S, T>>,
    /// Jobs with more commands to send.
    pub(crate) ready: VecDeque<SlotKey>,
    /// Jobs that wait for memory, in order of arrival; never the only jobs.
    waiting: VecDeque<SlotKey>,
    /// Commands to retry.
    pub(crate) again: VecDeque<CommandPiece<S::Kind>>,
    done: VecDeque<Completion>,
    /// I/O to repeat, on this path or another.
    returned: VecDeque<Io>,
    pub(crate) retries: RetryRules,
    /// The sequence number of the next I/O; a smaller one is older.
    pub(crate) next_age: u64,
    /// Whether the queue accepts no further I/O.
    is_closed: bool,
}

impl<S: CommandSet, T: Default> CommandQueue<S, T> {
    pub(crate) fn of(set: S, info: VolumeInfo, pool: Pool) -> CommandQueue<S, T> {
        CommandQueue {
            set,
            info,
            pool,
            jobs: Slots::default(),
            commands: Slots::default(),
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            done: VecDeque::new(),
            returned: VecDeque::new(),
            retries: RetryRules::default(),
            next_age: 0,
            is_closed: false,
        }
    }

    /// The number of I/O that the queue accepts now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        if !self.set.is_open() || self.is_closed {
            return 0;
        }
        DEPTH.saturating_sub(self.jobs.len()).saturating_sub(self.done.len())
    }

    /// Whether all submitted I/O is complete.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.commands.is_empty()
    }

    /// Whether a command that was refused for a temporary reason is retried once more.
    pub(crate) fn may_retry(&self, piece: &CommandPiece<S::Kind>) -> bool {
        piece.waited < self.retries.busy_timeout.max(MIN_BUSY_TIMEOUT)
    }

    /// Stops accepting I/O.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    #[inline]
    pub(crate) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// The next I/O to repeat, on this path or another.
    #[inline]
    pub(crate) fn poll_returned(&mut self) -> Option<Io> {
        self.returned.pop_front()
    }

    #[inline]
    pub(crate) fn submit(&mut self, io: Io) {
        let tag = io.tag;
        if let Err(error) = self.info.check(&io) {
            return self.done.push_back(Completion { tag, result: Err(error) });
        }
        if self.is_closed || !self.set.is_open() {
            return self.done.push_back(Completion { tag, result: Err(IoError::ShuttingDown) });
        }
        let result = match self.set.plan(io.op) {
            IoPlan::Done => Ok(Output::Nothing),
            IoPlan::Fails(error) => Err(error),
            IoPlan::Send(pieces) if io.len > 0 || pieces.kind == S::Kind::FLUSH => {
                return self.take(io, pieces);
            }
            IoPlan::AllData if io.len > 0 => Ok(Output::Extents(vec![Extent::data(io.len)])),
            IoPlan::AllData | IoPlan::Send(_) => Ok(io.into_empty_output()),
        };
        self.done.push_back(Completion { tag, result });
    }

    /// Removes and returns all I/O that has not completed, with its sequence number.
    pub(crate) fn take_jobs(&mut self) -> Vec<(u64, Io)> {
        self.is_closed = true;
        let jobs = self.jobs.take_all();
        self.commands.take_all();
        self.ready.clear();
        self.waiting.clear();
        self.again.clear();
        jobs.into_iter().map(|job| (job.age, job.io)).collect()
    }

    /// The next command of a job, if one may be sent.
    #[inline]
    pub(crate) fn next_of_jobs(&mut self) -> Option<CommandRequest<S::Sent>> {
        if let Some(piece) = self.again.pop_front() {
            return Some(self.begin(piece));
        }
        loop {
            let &key = self.ready.front()?;
            let job = self.jobs.get_mut(key).map(|job| (job.carve(key), job.is_ready));
            let (piece, is_ready) = job.unwrap_or_default();
            if !is_ready {
                self.ready.pop_front();
            }
            if let Some(piece) = piece {
                return Some(self.begin(piece));
            }
        }
    }

    /// Creates the command for a piece.
    #[inline]
    pub(crate) fn begin(&mut self, piece: CommandPiece<S::Kind>) -> CommandRequest<S::Sent> {
        let (command, transfer) = self.set.command(&piece);
        let payload = self.set.payload(&piece, &self.pool);
        self.begin_with(piece, command, transfer, payload)
    }

    /// Creates the command for a piece with other data.
    #[inline]
    pub(crate) fn begin_with(
        &mut self,
        piece: CommandPiece<S::Kind>,
        command: S::Sent,
        transfer: DataTransfer,
        payload: Option<SgList>,
    ) -> CommandRequest<S::Sent> {
        let key = self.commands.insert_with(|| {
            let (state, transport) = (S::keep(&command), T::default());
            QueuedCommand { piece, state, transfer, payload, transport }
        });
        CommandRequest { key, command, transfer }
    }

    /// The transport's state for a command.
    #[inline]
    pub(crate) fn transport(&mut self, key: SlotKey) -> Option<(&mut T, DataTransfer)> {
        self.commands.get_mut(key).map(|command| (&mut command.transport, command.transfer))
    }

    /// Handles the completion of a command, and continues its job. A returned piece is to be
    /// retried later.
    #[inline]
    pub(crate) fn finish_piece(
        &mut self,
        piece: CommandPiece<S::Kind>,
        key: SlotKey,
        class: CompletionClass,
    ) -> Option<CommandPiece<S::Kind>> {
        let is_patient = self.may_retry(&piece);
        let job = self.jobs.get_mut(key)?;
        match class {
            CompletionClass::Good => {}
            CompletionClass::Again if piece.tries < MAX_TRIES => {
                job.forget_borrowed();
                self.again.push_back(piece.again());
                return None;
            }
            CompletionClass::Later(_) if is_patient => {
                job.forget_borrowed();
                return Some(piece.again());
            }
            CompletionClass::Again => job.fail(IoError::Aborted),
            CompletionClass::Elsewhere | CompletionClass::Astray => {
                job.is_returned |= self.retries.has_other_paths || class == CompletionClass::Astray;
                job.fail(IoError::PathLost);
            }
            CompletionClass::Illegal => {
                if let Some(again) = self.set.do_otherwise(piece, job) {
                    self.again.push_back(again);
                    return None;
                }
            }
            CompletionClass::Later(error) | CompletionClass::Failed(error) => job.fail(error),
        }
        self.end_piece(key);
        None
    }

    /// Continues or completes a job after one of its commands has ended.
    #[inline]
    pub(crate) fn end_piece(&mut self, key: SlotKey) {
        match self.jobs.get_mut(key).map(IoJob::end_piece) {
            Some(JobNext::Send) => self.ready.push_back(key),
            Some(JobNext::Complete) => self.complete(key),
            Some(JobNext::Wait) | None => {}
        }
        if !self.waiting.is_empty() {
            self.give_memory();
        }
    }

    #[inline]
    fn complete(&mut self, key: SlotKey) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        if job.is_returned && job.error == Some(IoError::PathLost) {
            return self.returned.extend(self.jobs.remove(key).map(|job| job.io));
        }
        let result = match (job.error, job.io.op) {
            (Some(error), _) => Err(error),
            (None, Op::Read) => {
                let data = job.io.data.take().or_else(|| job.buffer.take()).unwrap_or_default();
                // A set that reports success without the data has a fault.
                let is_whole = data.len() as u64 == job.io.len;
                if is_whole { Ok(Output::Data(data)) } else { Err(IoError::Aborted) }
            }
            // Reporting data is always correct for a range of unknown status.
            (None, Op::BlockStatus) if job.extents.is_empty() => {
                Ok(Output::Extents(vec![Extent::data(job.io.len)]))
            }
            (None, Op::BlockStatus) => Ok(Output::Extents(std::mem::take(&mut job.extents))),
            (None, _) => Ok(Output::Nothing),
        };
        self.done.push_back(Completion { tag: job.io.tag, result });
        self.jobs.discard(key);
    }

    /// Adds an I/O that needs commands.
    fn take(&mut self, io: Io, pieces: CommandPieces<S::Kind>) {
        let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > MAX_BORROWED;
        let age = self.next_age;
        self.next_age = age.wrapping_add(1);
        let key = self.jobs.insert_with(|| IoJob::new(io, age, pieces, !needs_memory));
        if needs_memory {
            self.waiting.push_back(key);
            self.give_memory();
        } else {
            self.ready.push_back(key);
        }
    }

    /// Gives memory to the jobs that wait for it, as far as the pool has memory.
    fn give_memory(&mut self) {
        while let Some(&key) = self.waiting.front() {
            let is_alone = self.jobs.len() == self.waiting.len();
            if let Some(job) = self.jobs.get_mut(key) {
                if !job.give_memory(&self.pool, is_alone) {
                    return;
                }
                self.ready.push_back(key);
            }
            self.waiting.pop_front();
        }
    }
}

impl<S: CommandSet, T> CommandQueue<S, T> {
    /// The payload of a command, or the data of its job, and the offset of the command's data
    /// there.
    #[inline]
    fn data(
        &mut self,
        key: SlotKey,
        of_job: impl for<'a> FnOnce(&'a mut IoJob<S::Kind>, &Pool) -> Option<&'a SgList>,
    ) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        of_job(job, &self.pool).map(|data| (data, base))
    }
}

impl<S: CommandSet, T> CommandMemory for CommandQueue<S, T> {
    #[inline]
    fn data_out(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        self.data(key, |job, _| job.io.data.as_ref())
    }

    #[inline]
    fn data_in(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        self.data(key, |job, pool| {
            if job.io.data.is_none() && job.buffer.is_none() {
                job.buffer = Some(memory(pool, job.io.len as usize)); // at most MAX_BORROWED
            }
            job.io.data.as_ref().or(job.buffer.as_ref())
        })
    }

    #[inline]
    fn can_borrow(&mut self, key: SlotKey, len: usize) -> bool {
        let piece = self.commands.get_mut(key).map(|command| command.piece);
        let Some(CommandPiece { kind, job: Some(job), .. }) = piece else { return false };
        let is_whole =
            |job: &mut IoJob<_>| job.io.data.is_none() && job.io.len == len as u64 && job.buffer.is_none();
        kind == S::Kind::READ && self.jobs.get_mut(job).is_some_and(is_whole)
    }

    #[inline]
    fn attach_borrowed(&mut self, key: SlotKey, data: Seg) {
        let job = self.commands.get_mut(key).and_then(|command| command.piece.job);
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
            job.buffer = Some(SgList::one(data));
        }
    }
}

/// A buffer of zeroes to write to a peer without write-zeroes command.
#[derive(Default)]
pub(crate) struct Zeroes(Option<Seg>);

impl Zeroes {
    /// `len` zero bytes, at most [`ZEROES`].
    pub(crate) fn list(&mut self, len: u64) -> SgList {
        let zeroes = self.0.get_or_insert_with(|| Memory::from_heap(ZEROES).seg(0, ZEROES));
        SgList::one(zeroes.slice(0, len as usize))
    }
}

/// Memory of `len` bytes, from the pool or else from the heap.
pub(crate) fn memory(pool: &Pool, len: usize) -> SgList {
    SgList::one(pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len))
}

/// The maximum number of I/O in flight of a queue.
pub const DEPTH: usize = 1024;
/// A read of up to this many bytes may borrow its data from the receive buffer, and gets no memory
/// before its data arrives. It fits a receive buffer.
pub(crate) const MAX_BORROWED: u64 = 64 << 10;
/// The maximum length of one write of zeroes, in bytes.
pub(crate) const ZEROES: usize = 256 << 10;
/// The maximum number of immediate retries of a command.
pub(crate) const MAX_TRIES: u32 = 64;
/// The minimum time for which a command is retried with delays.
const MIN_BUSY_TIMEOUT: Duration = Duration::from_secs(1);
