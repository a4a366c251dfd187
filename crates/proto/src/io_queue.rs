//! An initiator's queue: I/O under way at a volume that a peer has, cut into commands and put
//! together again. Which commands, and what their answers mean, a [`CommandSet`] knows (decision
//! 48).
//!
//! An I/O that the peer takes whole is one command; a longer one is cut into pieces, of which four
//! are under way at a time. The completion comes after the last, and after the flush that stands in
//! for FUA where there is none.
//!
//! A long read that brought no memory gets some before it is sent, and waits for its turn while the
//! pool has none. One that is alone does not wait, but takes memory from the heap, so that there
//! always is an end after which to ask the pool again.

use crate::job::{CommandKind, CommandPiece, CommandPieces, IoJob, JobNext};
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use std::collections::VecDeque;

/// What a protocol's commands are, and what the peer is known to understand of them.
pub(crate) trait CommandSet {
    /// What a command does.
    type Kind: CommandKind;
    /// A command as a transport sends it, without its data.
    type Sent;
    /// What is kept of that while the command is under way.
    type CommandState;

    /// Whether I/O is taken.
    fn is_open(&self) -> bool;

    /// How to do `op`.
    fn plan(&self, op: Op) -> IoPlan<Self::Kind>;

    /// The command for a piece.
    fn command(&self, piece: &CommandPiece<Self::Kind>) -> (Self::Sent, DataTransfer);

    /// Its data where that is not the I/O's own.
    fn payload(&mut self, piece: &CommandPiece<Self::Kind>, pool: &Pool) -> Option<SgList>;

    fn keep(command: &Self::Sent) -> Self::CommandState;

    /// The peer does not know a command after all: has `job` done with others, or fails it. A piece
    /// that is returned is to be sent instead.
    fn do_otherwise(
        &mut self,
        piece: CommandPiece<Self::Kind>,
        job: &mut IoJob<Self::Kind>,
    ) -> Option<CommandPiece<Self::Kind>>;
}

/// What becomes of an I/O.
pub(crate) enum IoPlan<K> {
    /// It is done: a hint that the peer does not take, or a flush without a cache.
    Done,
    /// The peer cannot do it.
    Fails(IoError),
    /// One extent of data, as nothing better is known.
    AllData,
    /// Commands for its range, or a flush.
    Send(CommandPieces<K>),
}

/// What becomes of a command that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionClass {
    /// It was done.
    Good,
    /// It was not done, for a reason that is over: send it again.
    Again,
    /// It was not done, for a reason that passes: send it again in a while, and say this if that
    /// never helps.
    Later(IoError),
    /// It was not done, as this path does not lead there now: another may.
    Elsewhere,
    /// It was lost on the way: another path may work at once.
    Astray,
    /// The peer does not know the command, or not so.
    Illegal,
    /// It was not done, and never will be.
    Failed(IoError),
}

/// The data of a command, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataTransfer {
    /// None.
    Nothing,
    /// To the initiator, up to so many.
    In(u32),
    /// To the target, so many.
    Out(u32),
}

/// One command for a transport to carry.
#[derive(Clone, Copy, Debug)]
pub struct CommandRequest<C> {
    /// Names it until it is finished.
    pub(crate) key: SlotKey,
    pub(crate) command: C,
    /// What moves.
    pub(crate) transfer: DataTransfer,
}

/// A command under way.
pub(crate) struct QueuedCommand<S: CommandSet, T> {
    pub(crate) piece: CommandPiece<S::Kind>,
    pub(crate) state: S::CommandState,
    pub(crate) transfer: DataTransfer,
    /// Data that is not the I/O's own.
    pub(crate) payload: Option<SgList>,
    /// What a transport keeps beside it.
    pub(crate) transport: T,
}

impl<S: CommandSet, T> QueuedCommand<S, T> {
    /// Whether it may take its time.
    pub(crate) fn is_long(&self) -> bool {
        self.piece.kind.is_long()
    }
}

/// I/O under way. `T` is what a transport keeps beside each command.
pub(crate) struct CommandQueue<S: CommandSet, T> {
    pub(crate) set: S,
    pub(crate) info: VolumeInfo,
    pub(crate) pool: Pool,
    pub(crate) jobs: Slots<IoJob<S::Kind>>,
    pub(crate) commands: Slots<QueuedCommand<S, T>>,
    /// Jobs with more commands to send.
    pub(crate) ready: VecDeque<SlotKey>,
    /// Jobs that wait for memory, first come first served; there never are others alone.
    waiting: VecDeque<SlotKey>,
    /// Commands to send again.
    pub(crate) again: VecDeque<CommandPiece<S::Kind>>,
    done: VecDeque<Completion>,
    /// I/O to be done again, by this path or another.
    returned: VecDeque<Io>,
    pub(crate) has_other_paths: bool,
    /// The age of the next I/O; what has a smaller one is older.
    pub(crate) next_age: u64,
    /// Nothing new is taken.
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
            has_other_paths: false,
            next_age: 0,
            is_closed: false,
        }
    }

    /// How many more I/O it takes.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        if !self.set.is_open() || self.is_closed {
            return 0;
        }
        DEPTH.saturating_sub(self.jobs.len()).saturating_sub(self.done.len())
    }

    /// Whether everything that was submitted is complete.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.commands.is_empty()
    }

    /// There are other paths to the volume: what cannot be done by this one now is handed back.
    pub(crate) fn set_other_paths(&mut self) {
        self.has_other_paths = true;
    }

    /// Takes nothing new.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    #[inline]
    pub(crate) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// The next I/O that is to be done again, by this path or another.
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

    /// Ends at once: all I/O that has not completed, with its age.
    pub(crate) fn take_jobs(&mut self) -> Vec<(u64, Io)> {
        self.is_closed = true;
        let jobs = self.jobs.take_all();
        self.commands.take_all();
        self.ready.clear();
        self.waiting.clear();
        self.again.clear();
        jobs.into_iter().map(|job| (job.age, job.io)).collect()
    }

    /// The next command of a job to send, if there is any.
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

    /// Makes a command of a piece.
    #[inline]
    pub(crate) fn begin(&mut self, piece: CommandPiece<S::Kind>) -> CommandRequest<S::Sent> {
        let (command, transfer) = self.set.command(&piece);
        let payload = self.set.payload(&piece, &self.pool);
        self.begin_with(piece, command, transfer, payload)
    }

    /// Begins a command with such data.
    #[inline]
    pub(crate) fn begin_with(
        &mut self,
        piece: CommandPiece<S::Kind>,
        command: S::Sent,
        transfer: DataTransfer,
        payload: Option<SgList>,
    ) -> CommandRequest<S::Sent> {
        let (kept, transport) = (S::keep(&command), T::default());
        let key = self.commands.insert(QueuedCommand { piece, state: kept, transfer, payload, transport });
        CommandRequest { key, command, transfer }
    }

    /// What the transport keeps beside a command.
    #[inline]
    pub(crate) fn transport(&mut self, key: SlotKey) -> Option<(&mut T, DataTransfer)> {
        self.commands.get_mut(key).map(|command| (&mut command.transport, command.transfer))
    }

    /// The data of a command that has some to send: a list, and where in it the command's data
    /// begins.
    #[inline]
    pub(crate) fn data_out(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        job.io.data.as_ref().map(|data| (data, base))
    }

    /// Where the data of a command goes that gets some: a list, and where in it the command's data
    /// begins. Only a short read can come here without memory.
    #[inline]
    pub(crate) fn data_in(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        if job.io.data.is_none() && job.buffer.is_none() {
            job.buffer = Some(memory(&self.pool, job.io.len as usize)); // at most LEND_UP_TO
        }
        job.io.data.as_ref().or(job.buffer.as_ref()).map(|data| (data, base))
    }

    /// Whether `len` bytes are all that the command's I/O asked for, and it brought no memory: then
    /// they may be lent.
    #[inline]
    pub(crate) fn is_lendable(&mut self, key: SlotKey, len: usize) -> bool {
        let piece = self.commands.get_mut(key).map(|command| command.piece);
        let Some(CommandPiece { kind, job: Some(job), .. }) = piece else { return false };
        let is_whole =
            |job: &mut IoJob<_>| job.io.data.is_none() && job.io.len == len as u64 && job.buffer.is_none();
        kind == S::Kind::READ && self.jobs.get_mut(job).is_some_and(is_whole)
    }

    /// The data of a read, where [`Queue::is_lendable`] says so.
    #[inline]
    pub(crate) fn lend(&mut self, key: SlotKey, data: Seg) {
        let job = self.commands.get_mut(key).and_then(|command| command.piece.job);
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
            job.buffer = Some(SgList::one(data));
        }
    }

    /// A command of a job has ended so: goes on with the job. A piece that is returned is to be
    /// sent again in a while.
    #[inline]
    pub(crate) fn finish_piece(
        &mut self,
        piece: CommandPiece<S::Kind>,
        key: SlotKey,
        verdict: CompletionClass,
    ) -> Option<CommandPiece<S::Kind>> {
        let job = self.jobs.get_mut(key)?;
        match verdict {
            CompletionClass::Good => {}
            CompletionClass::Again | CompletionClass::Later(_) if piece.tries < MAX_TRIES => {
                job.forget_borrowed();
                if verdict != CompletionClass::Again {
                    return Some(piece.again());
                }
                self.again.push_back(piece.again());
                return None;
            }
            CompletionClass::Again => job.fail(IoError::Aborted),
            CompletionClass::Elsewhere | CompletionClass::Astray => {
                job.is_returned |= self.has_other_paths || verdict == CompletionClass::Astray;
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

    /// A command of a job is over: sends more of it, or completes it.
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
        let Some(job) = self.jobs.remove(key) else { return };
        if job.is_returned && job.error == Some(IoError::PathLost) {
            return self.returned.push_back(job.io);
        }
        let result = match (job.error, job.io.op) {
            (Some(error), _) => Err(error),
            (None, Op::Read) => Ok(Output::Data(job.io.data.or(job.buffer).unwrap_or_default())),
            // It is never wrong to take for data what the peer does not tell.
            (None, Op::BlockStatus) if job.extents.is_empty() => {
                Ok(Output::Extents(vec![Extent::data(job.io.len)]))
            }
            (None, Op::BlockStatus) => Ok(Output::Extents(job.extents)),
            (None, _) => Ok(Output::Nothing),
        };
        self.done.push_back(Completion { tag: job.io.tag, result });
    }

    /// Takes an I/O that needs commands.
    fn take(&mut self, io: Io, pieces: CommandPieces<S::Kind>) {
        let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > LEND_UP_TO;
        let age = self.next_age;
        self.next_age = age.wrapping_add(1);
        let key = self.jobs.insert(IoJob::new(io, age, pieces, !needs_memory));
        if needs_memory {
            self.waiting.push_back(key);
            self.give_memory();
        } else {
            self.ready.push_back(key);
        }
    }

    /// Makes ready what waits for memory, as far as there is some.
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

/// Zeroes that are written out.
#[derive(Default)]
pub(crate) struct Zeroes(Option<Seg>);

impl Zeroes {
    /// At most [`ZEROES`] of them.
    pub(crate) fn list(&mut self, len: u64) -> SgList {
        let zeroes = self.0.get_or_insert_with(|| Memory::from_heap(ZEROES).seg(0, ZEROES));
        SgList::one(zeroes.slice(0, len as usize))
    }
}

/// A little memory, from the pool if it has some.
pub(crate) fn memory(pool: &Pool, len: usize) -> SgList {
    SgList::one(pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len))
}

/// The most I/O that a queue has under way.
pub const DEPTH: usize = 1024;
/// A read up to this many bytes may be lent memory by the transport, and takes none before its data
/// comes. It fits a receive buffer.
pub(crate) const LEND_UP_TO: u64 = 64 << 10;
/// Of one piece of zeroes that are written out, in bytes.
pub(crate) const ZEROES: usize = 256 << 10;
/// How often one command is sent again. With the pauses between them, a volume may be out of reach
/// for half a minute.
pub(crate) const MAX_TRIES: u32 = 64;
