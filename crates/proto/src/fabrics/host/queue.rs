//! I/O under way at one namespace: cut into commands, put together again.
//!
//! An I/O that the controller takes whole is one command; a longer one is cut into pieces, of which four are under way
//! at a time. The completion comes after the last. Not more commands are under way than the queue has entries for; I/O
//! beyond that waits here.
//!
//! A long read that brought no memory gets some before it is sent, and waits for its turn while the pool has none. One
//! that is alone does not wait, but takes memory from the heap, so that there always is an end after which to ask the
//! pool again.

use super::access::Access;
use super::command;
use super::info::NamespaceInfo;
use super::job::{Command, Job, Piece};
use super::later::Later;
use super::plan::{Kind, Pieces, Plan, RANGE_LEN, Terms, ZEROES};
use super::prove::{self, Proving};
use super::transport::{Commands, DataTransfer, Request, TransferProgress};
use super::verdict::{self, Verdict};
use super::{DEPTH, Names, Refused};
use crate::job::Next;
use crate::nvme::auth::Credentials;
use crate::session::PathRank;
use crate::slots::{Key, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvme::status::StatusField;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// I/O under way at one namespace, over one I/O queue.
pub(crate) struct NamespaceQueue {
    pub(super) connecting: Connecting,
    pub(super) names: Names,
    pub(super) credentials: Option<Credentials>,
    pub(super) terms: Terms,
    info: VolumeInfo,
    pub(super) access: Access,
    pool: Pool,
    pub(super) jobs: Slots<Job>,
    pub(super) commands: Slots<Command>,
    /// The most commands under way.
    most_commands: usize,
    /// Jobs with more commands to send.
    pub(super) ready: VecDeque<Key>,
    /// Jobs that wait for memory, first come first served; while there are any, something is under way.
    pub(super) waiting: VecDeque<Key>,
    /// Commands to send again.
    pub(super) again: VecDeque<Piece>,
    /// Commands to send again in a while.
    pub(super) later: Later,
    /// How long each CRD of a status is; zero: the controller does not use it.
    pub(super) retry_delays: [Duration; 3],
    pub(super) done: VecDeque<Completion>,
    zeroes: Option<Seg>,
    /// Nothing new is taken.
    is_closed: bool,
}

/// How far the queue's own Connect is.
pub(super) enum Connecting {
    /// To be sent: the queue, its entries, and the data.
    Due(u16, u16, Box<SgList>),
    Sent,
    /// We are to prove who we are; whether a command for that is under way.
    Proving(Box<Proving>, bool),
    Connected,
    Refused(Refused),
}

impl NamespaceQueue {
    /// Queue `qid` with so many entries, at most [`DEPTH`], of a controller of this identifier.
    pub(crate) fn new(
        names: Names,
        credentials: Option<Credentials>,
        cntlid: u16,
        (qid, entries): (u16, u16),
        namespace: &NamespaceInfo,
        pool: Pool,
    ) -> NamespaceQueue {
        let data = command::connect_data(&names, cntlid);
        let data = SgList::one(Seg::from_slice(data.as_bytes()));
        NamespaceQueue {
            connecting: Connecting::Due(qid, entries, Box::new(data)),
            names,
            credentials,
            terms: Terms::new(namespace),
            info: namespace.volume_info(),
            access: Access::default(),
            pool,
            jobs: Slots::default(),
            commands: Slots::default(),
            // A full ring of so many entries has one free.
            most_commands: usize::from(entries).clamp(2, DEPTH).saturating_sub(1),
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            later: Later::default(),
            retry_delays: [Duration::ZERO; 3],
            done: VecDeque::new(),
            zeroes: None,
            is_closed: false,
        }
    }

    /// Whether the controller has the queue.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.connecting, Connecting::Connected)
    }

    /// Why it has it not, if it said no.
    pub(crate) fn refused(&self) -> Option<&Refused> {
        match &self.connecting {
            Connecting::Refused(refused) => Some(refused),
            _ => None,
        }
    }

    /// How many more I/O it takes.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        if !self.is_connected() || self.is_closed {
            return 0;
        }
        DEPTH.saturating_sub(self.jobs.len()).saturating_sub(self.done.len())
    }

    /// Whether everything that was submitted is complete.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.commands.is_empty()
    }

    /// When to call [`NamespaceQueue::on_timeout`]; `now` is the latest time that is known.
    #[inline]
    pub(crate) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let later = self.later.poll_timeout(now);
        let failing = self.access.failing.poll_timeout(now);
        later.into_iter().chain(failing).min()
    }

    /// Sends again what failed for a reason that passes, and tries the path again if it failed.
    pub(crate) fn on_timeout(&mut self, now: Instant) {
        self.later.on_timeout(now, &mut self.again);
        self.access.failing.on_timeout(now);
    }

    /// How long each CRD of a status is, as the controller tells.
    pub(crate) fn set_retry_delays(&mut self, delays: [Duration; 3]) {
        self.retry_delays = delays;
    }

    /// As [`Initiator::look`](crate::session::Initiator::look).
    pub(crate) fn look(&mut self) -> u32 {
        let is_short = |kind| matches!(kind, Kind::Read | Kind::Write { .. } | Kind::Zeroes { .. });
        self.commands.look(|command| !is_short(command.piece.kind))
    }

    /// The namespace is of this size now, in bytes.
    pub(crate) fn resize(&mut self, size: u64) {
        self.info.size = size;
    }

    /// Takes nothing new.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    #[inline]
    pub(crate) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Takes an I/O; what has a smaller `age` is older.
    #[inline]
    pub(crate) fn submit(&mut self, io: Io, age: u64) {
        let tag = io.tag;
        if let Err(error) = self.info.check(&io) {
            return self.done.push_back(Completion { tag, result: Err(error) });
        }
        if self.is_closed {
            return self.done.push_back(Completion { tag, result: Err(IoError::ShuttingDown) });
        }
        let result = match self.terms.plan(io.op) {
            Plan::Done => Ok(Output::Nothing),
            Plan::Fails(error) => Err(error),
            Plan::Send(pieces) if pieces.kind == Kind::Flush => return self.take(io, age, pieces),
            Plan::AllData | Plan::Send(_) if io.len == 0 => Ok(io.into_empty_output()),
            Plan::AllData => Ok(Output::Extents(vec![Extent::data(io.len)])),
            Plan::Send(pieces) => return self.take(io, age, pieces),
        };
        self.done.push_back(Completion { tag, result });
    }

    /// All I/O that has not completed, with its age.
    pub(crate) fn take_unfinished(&mut self) -> Vec<(u64, Io)> {
        self.is_closed = true;
        let jobs = self.jobs.take_all();
        self.commands.take_all();
        self.ready.clear();
        self.waiting.clear();
        self.again.clear();
        self.later.clear();
        jobs.into_iter().map(|job| (job.age, job.io)).collect()
    }

    /// The next command to send, if there is any and the queue has an entry for it.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Request> {
        if !self.is_connected() {
            return self.connect();
        }
        if self.commands.len() >= self.most_commands {
            return None;
        }
        if let Some(piece) = self.again.pop_front() {
            return Some(self.begin(piece));
        }
        loop {
            let &key = self.ready.front()?;
            if let Some(piece) = self.jobs.get_mut(key).and_then(|job| job.carve(key)) {
                return Some(self.begin(piece));
            }
            self.ready.pop_front();
            if let Some(job) = self.jobs.get_mut(key) {
                job.is_ready = false;
            }
        }
    }

    /// Connect, and what proves who we are.
    fn connect(&mut self) -> Option<Request> {
        let (sqe, transfer, payload) = match &mut self.connecting {
            Connecting::Due(qid, entries, data) => {
                let question = (command::connect(*qid, *entries, 0), DataTransfer::Out(data.len() as u32));
                let data = std::mem::take(&mut **data);
                self.connecting = Connecting::Sent;
                (question.0, question.1, data)
            }
            Connecting::Proving(proving, is_asked @ false) => {
                *is_asked = true;
                proving.question()?
            }
            _ => return None,
        };
        let piece = Piece::of_the_queue(Kind::Connect);
        let (payload, progress) = (Some(payload), TransferProgress::default());
        let key = self.commands.insert(Command { piece, transfer, payload, progress });
        Some(Request { key, sqe, transfer })
    }

    /// Takes an I/O that needs commands.
    #[inline]
    fn take(&mut self, io: Io, age: u64, pieces: Pieces) {
        let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > LEND_UP_TO;
        let key = self.jobs.insert(Job::new(io, age, pieces, !needs_memory));
        if needs_memory {
            self.waiting.push_back(key);
            self.give_memory();
        } else {
            self.ready.push_back(key);
        }
    }

    /// Makes ready what waits for memory, as far as there is some.
    pub(super) fn give_memory(&mut self) {
        while let Some(&key) = self.waiting.front() {
            if let Some(job) = self.jobs.get_mut(key) {
                let has_others = !(self.commands.is_empty() && self.ready.is_empty());
                let is_alone = !has_others && self.again.is_empty() && self.later.is_empty();
                if !job.give_memory(&self.pool, is_alone) {
                    return;
                }
                self.ready.push_back(key);
            }
            self.waiting.pop_front();
        }
    }

    /// Makes a command of a piece.
    #[inline]
    fn begin(&mut self, piece: Piece) -> Request {
        let (sqe, transfer) = self.terms.sqe(piece.kind, piece.offset, piece.len);
        let payload = match piece.kind {
            Kind::Zeroes { .. } => {
                let zeroes = self.zeroes.get_or_insert_with(|| Memory::from_heap(ZEROES).seg(0, ZEROES));
                Some(SgList::one(zeroes.slice(0, piece.len as usize)))
            }
            Kind::Deallocate => {
                let list = memory(&self.pool, RANGE_LEN);
                let range = command::range(self.terms.blocks(piece.offset, piece.len));
                list.copy_from(range.as_bytes());
                Some(list)
            }
            _ => None,
        };
        let progress = TransferProgress::default();
        let key = self.commands.insert(Command { piece, transfer, payload, progress });
        Request { key, sqe, transfer }
    }

    /// A command has ended.
    #[inline]
    pub(super) fn on_finished(&mut self, key: Key, cqe: &Cqe) {
        let Some(command) = self.commands.remove(key) else { return };
        let Some(job) = command.piece.job else {
            self.on_connecting(&command, cqe);
            return;
        };
        let mut verdict = verdict::of(cqe.status);
        if verdict == Verdict::Good && command.progress.is_corrupt {
            verdict = Verdict::Later(IoError::Medium);
        } else if verdict == Verdict::Good && !command.progress.is_whole(command.transfer) {
            verdict = Verdict::Failed(IoError::Medium);
        }
        match verdict {
            Verdict::Good => self.access.failing.on_good(),
            Verdict::Astray => self.access.failing.on_failure(),
            _ => {}
        }
        if verdict == Verdict::Elsewhere {
            // Whatever was told before, until the log page has been read again.
            self.access.rank = PathRank::Unusable;
            if !self.access.has_others {
                verdict = Verdict::Later(IoError::PathLost);
            }
        }
        let told = self.retry_delay(cqe.status);
        self.finish_piece(command.piece, job, verdict, told);
        if !self.waiting.is_empty() {
            self.give_memory();
        }
    }

    /// A command of the queue itself has ended: Connect, or one that proves who we are.
    #[cold]
    fn on_connecting(&mut self, command: &Command, cqe: &Cqe) {
        let next = match &mut self.connecting {
            Connecting::Proving(proving, is_asked) => {
                let is_whole = command.progress.is_whole(command.transfer) && !command.progress.is_corrupt;
                let data = match (command.transfer, &command.payload) {
                    (DataTransfer::In(_), Some(payload)) if is_whole => payload.to_vec(),
                    _ => Vec::new(),
                };
                *is_asked = false;
                proving.on_answer(cqe, &data).map(|is_done| is_done.then_some(Connecting::Connected))
            }
            _ if !cqe.status.is_success() => Err(Refused::Connect(cqe.status)),
            _ => {
                let asked = prove::asked_for(cqe.result.get(), self.credentials.as_ref(), &self.names);
                let connecting = |proving: Option<Box<_>>| match proving {
                    Some(proving) => Connecting::Proving(proving, false),
                    None => Connecting::Connected,
                };
                asked.map(|proving| Some(connecting(proving)))
            }
        };
        match next {
            Ok(None) => {}
            Ok(Some(next)) => self.connecting = next,
            Err(refused) => self.connecting = Connecting::Refused(refused),
        }
    }

    /// A part of a job has ended: goes on with the job.
    #[inline]
    fn finish_piece(&mut self, piece: Piece, key: Key, verdict: Verdict, told: Option<Duration>) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match verdict {
            Verdict::Good => {}
            Verdict::Later(_) if piece.tries < MAX_TRIES => {
                // Memory that was lent is not written to again.
                if job.io.len == piece.len && piece.kind == Kind::Read && is_lent(job) {
                    job.buffer = None;
                }
                let piece = piece.again();
                return self.later.push(piece, told);
            }
            Verdict::Elsewhere | Verdict::Astray => {
                job.is_misplaced = true;
                job.fail(IoError::PathLost);
            }
            Verdict::Illegal => self.do_otherwise(piece, key),
            Verdict::Later(error) | Verdict::Failed(error) => job.fail(error),
        }
        let Some(job) = self.jobs.get_mut(key) else { return };
        match job.end_piece() {
            Next::Send => self.ready.push_back(key),
            Next::Complete => self.complete(key),
            Next::Wait => {}
        }
    }

    /// How long the controller wants the command not to be sent again, if it says so.
    #[inline]
    fn retry_delay(&self, status: StatusField) -> Option<Duration> {
        let which = usize::from(status.retry_delay()).checked_sub(1)?;
        self.retry_delays.get(which).copied().filter(|delay| !delay.is_zero())
    }

    /// The controller does not know a command after all: does the same with others, or fails the job.
    #[cold]
    fn do_otherwise(&mut self, piece: Piece, key: Key) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match (piece.kind, job.io.op) {
            (Kind::WriteZeroes { .. }, Op::WriteZeroes { only_fast: false, fua, .. }) => {
                self.terms.write_zeroes = None;
                job.go_back(piece.offset, self.terms.written_zeroes(fua));
            }
            // What is no longer needed may stay.
            (Kind::Deallocate, _) => {
                self.terms.deallocate = None;
                job.issued = job.io.len;
            }
            _ => job.fail(IoError::Unsupported),
        }
    }

    #[inline]
    fn complete(&mut self, key: Key) {
        let Some(job) = self.jobs.remove(key) else { return };
        if job.is_misplaced && job.error == Some(IoError::PathLost) {
            return self.access.misplaced.push(job.io);
        }
        let result = match job.error {
            Some(error) => Err(error),
            None if job.io.op == Op::Read => Ok(Output::Data(job.io.data.or(job.buffer).unwrap_or_default())),
            None => Ok(Output::Nothing),
        };
        self.done.push_back(Completion { tag: job.io.tag, result });
    }
}

impl Commands for NamespaceQueue {
    #[inline]
    fn find(&self, cid: u16) -> Option<Key> {
        self.commands.find_narrow(cid)
    }

    #[inline]
    fn transport(&mut self, key: Key) -> Option<(&mut TransferProgress, DataTransfer)> {
        self.commands.get_mut(key).map(|command| (&mut command.progress, command.transfer))
    }

    #[inline]
    fn data_out(&mut self, key: Key) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        job.io.data.as_ref().map(|data| (data, base))
    }

    /// Only a short read can come here without memory.
    #[inline]
    fn data_in(&mut self, key: Key) -> Option<(&SgList, usize)> {
        let piece = self.commands.get_mut(key)?.piece;
        let Some(job) = piece.job else {
            return self.commands.get_mut(key)?.payload.as_ref().map(|payload| (payload, 0));
        };
        let job = self.jobs.get_mut(job)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        if job.io.data.is_none() && job.buffer.is_none() {
            let len = job.io.len as usize; // at most LEND_UP_TO
            job.buffer = Some(memory(&self.pool, len));
        }
        job.io.data.as_ref().or(job.buffer.as_ref()).map(|data| (data, base))
    }

    #[inline]
    fn is_lendable(&mut self, key: Key, len: usize) -> bool {
        let piece = self.commands.get_mut(key).map(|command| command.piece);
        let Some(Piece { kind: Kind::Read, job: Some(job), .. }) = piece else { return false };
        self.jobs
            .get_mut(job)
            .is_some_and(|job| job.io.data.is_none() && job.io.len == len as u64 && job.buffer.is_none())
    }

    #[inline]
    fn lend(&mut self, key: Key, data: Seg) {
        let job = self.commands.get_mut(key).and_then(|command| command.piece.job);
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
            job.buffer = Some(SgList::one(data));
        }
    }

    #[inline]
    fn finish(&mut self, key: Key, cqe: &Cqe) {
        self.on_finished(key, cqe);
    }
}

fn is_lent(job: &Job) -> bool {
    job.buffer.as_ref().is_some_and(|list| list.segs().iter().any(|seg| !seg.is_writable()))
}

/// A little memory, from the pool if it has some.
fn memory(pool: &Pool, len: usize) -> SgList {
    SgList::one(pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len))
}

/// A read up to this many bytes may be lent memory by the transport, and takes none before its data comes.
const LEND_UP_TO: u64 = 64 << 10;
/// How often one command is sent again. With the pauses between them, a namespace may be out of reach for half a
/// minute.
const MAX_TRIES: u32 = 64;
