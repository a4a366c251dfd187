//! I/O under way at one logical unit: cut into commands, put together again.
//!
//! An I/O that the unit takes whole is one command; a longer one is cut into pieces, of which [`WINDOW`] are under way
//! at a time. The completion comes after the last, and after the flush that stands in for FUA where there is none.
//!
//! A long read that brought no memory gets some before it is sent, and waits for its turn while the pool has none. One
//! that is alone does not wait, but takes memory from the heap, so that there always is an end after which to ask the
//! pool again.

use super::bring_up::{BringUp, Learned, MOST_DATA_IN, UnitRefused};
use super::command::{Request, Transfer};
use super::plan::{Kind, Pieces, Plan, STATUS_LEN, Terms, UNMAP_LEN, ZEROES};
use super::sense::SenseCode;
use super::unit::UnitInfo;
use super::verdict::{self, Verdict};
use super::{DEPTH, extents};
use crate::scsi::{Lun, Status};
use crate::slots::{Key, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::scsi::provisioning::{UnmapDescriptor, UnmapHeader};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// I/O under way at one logical unit. `T` is what a transport keeps beside each command.
pub(crate) struct Queue<T> {
    bring_up: Option<BringUp>,
    /// The bring-up's command is under way, or waits.
    asked: bool,
    unit: Option<UnitInfo>,
    luns: Vec<Lun>,
    terms: Terms,
    info: VolumeInfo,
    pool: Pool,
    jobs: Slots<Job>,
    commands: Slots<Command<T>>,
    /// Jobs with more commands to send.
    ready: VecDeque<Key>,
    /// Jobs that wait for memory, first come first served; while there are any, something is under way.
    waiting: VecDeque<Key>,
    /// Commands to send again.
    again: VecDeque<Piece>,
    /// Commands to send again in a while.
    later: VecDeque<Piece>,
    done: VecDeque<Completion>,
    next_age: u64,
    zeroes: Option<Seg>,
    /// Nothing new is sent: what is left is for another session.
    is_draining: bool,
    /// Nothing new is taken.
    is_closed: bool,
}

/// How a command ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome<'a> {
    /// The status.
    pub(crate) status: Status,
    /// As it came; may be empty.
    pub(crate) sense: &'a [u8],
    /// How much data moved, in bytes.
    pub(crate) moved: u32,
}

/// One I/O from submission to completion.
struct Job {
    io: Io,
    /// Smaller is older.
    age: u64,
    pieces: Pieces,
    /// Bytes of the range that commands were made for.
    issued: u64,
    /// Commands under way, or to be sent again.
    in_flight: u32,
    is_ready: bool,
    /// The first error of any of its commands.
    error: Option<IoError>,
    /// Where read data is, when the I/O brought no memory.
    buffer: Option<SgList>,
    extents: Vec<Extent>,
}

/// A part of an I/O as a command.
#[derive(Clone, Copy)]
struct Piece {
    /// `None`: of the bring-up.
    job: Option<Key>,
    kind: Kind,
    /// In bytes.
    offset: u64,
    len: u64,
    /// How often it was sent again.
    tries: u32,
}

/// A command under way.
struct Command<T> {
    piece: Piece,
    transfer: Transfer,
    /// Data that is not the I/O's own.
    payload: Option<SgList>,
    transport: T,
}

impl<T: Default> Queue<T> {
    /// For the unit `lun`, of which nothing is known yet.
    pub(crate) fn new(lun: Lun, pool: Pool) -> Queue<T> {
        let unknown = UnitInfo { block_len: 512, physical_block_len: 512, ..UnitInfo::default() };
        Queue {
            bring_up: Some(BringUp::new(lun)),
            asked: false,
            unit: None,
            luns: Vec::new(),
            terms: Terms::new(&unknown),
            info: unknown.volume_info(),
            pool,
            jobs: Slots::default(),
            commands: Slots::default(),
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            later: VecDeque::new(),
            done: VecDeque::new(),
            next_age: 0,
            zeroes: None,
            is_draining: false,
            is_closed: false,
        }
    }

    /// The unit, once it is known.
    pub(crate) fn unit(&self) -> Option<&UnitInfo> {
        self.unit.as_ref()
    }

    /// The target's logical units, as far as they were told.
    pub(crate) fn luns(&self) -> &[Lun] {
        self.bring_up.as_ref().map_or(&self.luns, |bring_up| bring_up.luns())
    }

    /// How many more I/O it takes.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        if self.unit.is_none() || self.is_closed || self.is_draining {
            return 0;
        }
        DEPTH.saturating_sub(self.jobs.len()).saturating_sub(self.done.len())
    }

    /// I/O of which no command was sent.
    #[inline]
    pub(crate) fn unsent(&self) -> usize {
        self.ready.len().saturating_add(self.again.len())
    }

    /// Whether no command is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether everything that was submitted is complete.
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.commands.is_empty()
    }

    /// Whether something is to be sent again in a while: then call [`Queue::resume`].
    pub(crate) fn has_later(&self) -> bool {
        !self.later.is_empty()
    }

    /// Sends again what met a busy unit.
    pub(crate) fn resume(&mut self) {
        self.again.append(&mut self.later);
    }

    /// Takes nothing new.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Sends nothing new; what is under way ends, the rest stays for [`Queue::take_unfinished`].
    pub(crate) fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Sends again after all: there is no other session to come.
    pub(crate) fn undrain(&mut self) {
        self.is_draining = false;
    }

    #[inline]
    pub(crate) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    #[inline]
    pub(crate) fn submit(&mut self, io: Io) {
        let tag = io.tag;
        if let Err(error) = self.info.check(&io) {
            return self.done.push_back(Completion { tag, result: Err(error) });
        }
        if self.is_closed || self.is_draining {
            return self.done.push_back(Completion { tag, result: Err(IoError::ShuttingDown) });
        }
        let result = match self.terms.plan(io.op) {
            Plan::Done => Ok(Output::Nothing),
            Plan::Fails(error) => Err(error),
            Plan::AllData | Plan::Send(_) if io.len == 0 => Ok(empty_output(io)),
            Plan::AllData => Ok(Output::Extents(vec![all_data(io.len)])),
            Plan::Flush => return self.take(io, FLUSH),
            Plan::Send(pieces) => return self.take(io, pieces),
        };
        self.done.push_back(Completion { tag, result });
    }

    /// All I/O that has not completed, oldest first.
    pub(crate) fn take_unfinished(&mut self) -> Vec<Io> {
        self.is_closed = true;
        let mut jobs = self.jobs.take_all();
        self.commands.take_all();
        for queue in [&mut self.ready, &mut self.waiting] {
            queue.clear();
        }
        self.again.clear();
        self.later.clear();
        jobs.sort_unstable_by_key(|job| job.age);
        jobs.into_iter().map(|job| job.io).collect()
    }

    /// The next command to send, if there is any.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Request> {
        if self.is_draining {
            return None;
        }
        if let Some(piece) = self.again.pop_front() {
            return Some(self.begin(piece));
        }
        if self.bring_up.is_some() {
            if std::mem::replace(&mut self.asked, true) {
                return None;
            }
            let piece = Piece { job: None, kind: Kind::Question, offset: 0, len: 0, tries: 0 };
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

    /// What the transport keeps beside a command.
    #[inline]
    pub(crate) fn transport(&mut self, key: Key) -> Option<(&mut T, Transfer)> {
        self.commands.get_mut(key).map(|command| (&mut command.transport, command.transfer))
    }

    /// The command that a peer names by the short form of its key.
    #[inline]
    pub(crate) fn find(&self, short: u32) -> Option<Key> {
        self.commands.find(short)
    }

    /// The data-out of a command: a list, and where in it the command's data begins.
    #[inline]
    pub(crate) fn data_out(&mut self, key: Key) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        job.io.data.as_ref().map(|data| (data, base))
    }

    /// Where the data-in of a command goes: a list, and where in it the command's data begins. Only a short read can
    /// come here without memory.
    #[inline]
    pub(crate) fn data_in(&mut self, key: Key) -> Option<(&SgList, usize)> {
        let command = self.commands.get_mut(key)?;
        if command.payload.is_some() {
            return command.payload.as_ref().map(|payload| (payload, 0));
        }
        let piece = command.piece;
        let job = self.jobs.get_mut(piece.job?)?;
        let base = piece.offset.saturating_sub(job.io.offset) as usize;
        if job.io.data.is_none() && job.buffer.is_none() {
            let len = job.io.len as usize; // at most LEND_UP_TO
            job.buffer = Some(memory(&self.pool, len));
        }
        job.io.data.as_ref().or(job.buffer.as_ref()).map(|data| (data, base))
    }

    /// Whether `len` bytes are all that the command's I/O asked for, and it brought no memory: then they may be lent.
    #[inline]
    pub(crate) fn is_lendable(&mut self, key: Key, len: usize) -> bool {
        let piece = self.commands.get_mut(key).map(|command| command.piece);
        let Some(Piece { kind: Kind::Read, job: Some(job), .. }) = piece else { return false };
        self.jobs
            .get_mut(job)
            .is_some_and(|job| job.io.data.is_none() && job.io.len == len as u64 && job.buffer.is_none())
    }

    /// The data of a read, where [`Queue::is_lendable`] says so.
    #[inline]
    pub(crate) fn lend(&mut self, key: Key, data: Seg) {
        let job = self.commands.get_mut(key).and_then(|command| command.piece.job);
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
            job.buffer = Some(SgList::one(data));
        }
    }

    /// A command has ended.
    ///
    /// # Errors
    /// If the unit turns out to be no volume for us.
    #[inline]
    pub(crate) fn finish(&mut self, key: Key, outcome: Outcome<'_>) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.remove(key) else { return Ok(()) };
        let sense = match outcome.status {
            Status::CHECK_CONDITION => SenseCode::parse(outcome.sense),
            _ => None,
        };
        let mut verdict = verdict::of(outcome.status, sense);
        let Some(job) = command.piece.job else {
            return self.on_answer(verdict, sense, &command, outcome.moved);
        };
        if verdict == Verdict::Good && !command.is_whole(outcome.moved) {
            verdict = Verdict::Failed(IoError::Medium);
        }
        if verdict == Verdict::Good && command.piece.kind == Kind::Status {
            self.on_lba_status(&command, job, outcome.moved);
        }
        self.finish_piece(command.piece, job, verdict);
        if !self.waiting.is_empty() {
            self.give_memory();
        }
        Ok(())
    }

    /// Takes an I/O that needs commands.
    #[inline]
    fn take(&mut self, io: Io, pieces: Pieces) {
        let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > LEND_UP_TO;
        let age = self.next_age;
        self.next_age = self.next_age.wrapping_add(1);
        let key = self.jobs.insert(Job {
            io,
            age,
            pieces,
            issued: 0,
            in_flight: 0,
            is_ready: !needs_memory,
            error: None,
            buffer: None,
            extents: Vec::new(),
        });
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
            if let Some(job) = self.jobs.get_mut(key) {
                let len = job.io.len as usize; // checked: at most MAX_TRANSFER
                let is_alone = self.commands.is_empty() && self.ready.is_empty() && self.again.is_empty();
                let memory = self.pool.take_payload(len);
                let memory = memory.or_else(|| is_alone.then(|| Memory::from_heap(len)));
                let Some(memory) = memory else { return };
                job.buffer = Some(SgList::one(memory.seg(0, len)));
                job.is_ready = true;
                self.ready.push_back(key);
            }
            self.waiting.pop_front();
        }
    }

    /// Makes a command of a piece.
    #[inline]
    fn begin(&mut self, piece: Piece) -> Request {
        let (cdb, transfer) = match (&self.bring_up, piece.job) {
            (Some(bring_up), None) => {
                let (cdb, len) = bring_up.command();
                (cdb, if len == 0 { Transfer::Nothing } else { Transfer::In(len) })
            }
            _ => self.terms.cdb(piece.kind, piece.offset, piece.len),
        };
        let payload = match piece.kind {
            Kind::Read | Kind::Write { .. } | Kind::Flush => None,
            _ => Some(self.payload(piece)),
        };
        let key = self.commands.insert(Command { piece, transfer, payload, transport: T::default() });
        Request { key, cdb, transfer }
    }

    /// Data of a command that is not the I/O's own.
    fn payload(&mut self, piece: Piece) -> SgList {
        match piece.kind {
            Kind::Zeroes => SgList::one(self.zeroes().slice(0, piece.len as usize)),
            Kind::WriteSame { .. } => {
                let len = self.terms.block_len as usize;
                SgList::one(self.zeroes().slice(0, len))
            }
            Kind::Unmap => {
                let blocks = self.terms.blocks(piece.offset, piece.len);
                let header = UnmapHeader {
                    unmap_data_length: (UNMAP_LEN.saturating_sub(2) as u16).into(),
                    unmap_block_descriptor_data_length: (size_of::<UnmapDescriptor>() as u16).into(),
                    reserved: [0; 4],
                };
                let descriptor = UnmapDescriptor {
                    logical_block_address: blocks.lba.into(),
                    number_of_logical_blocks: blocks.count.into(),
                    reserved: [0; 4],
                };
                let list = memory(&self.pool, UNMAP_LEN as usize);
                let (head, tail) = (header.as_bytes(), descriptor.as_bytes());
                list.slice(0, head.len()).copy_from(head);
                list.slice(head.len(), tail.len()).copy_from(tail);
                list
            }
            Kind::Status => memory(&self.pool, STATUS_LEN),
            _ => SgList::one(Memory::from_heap(MOST_DATA_IN).seg(0, MOST_DATA_IN)),
        }
    }

    fn zeroes(&mut self) -> &Seg {
        self.zeroes.get_or_insert_with(|| Memory::from_heap(ZEROES).seg(0, ZEROES))
    }

    /// An answer to the bring-up.
    fn on_answer(
        &mut self,
        verdict: Verdict,
        sense: Option<SenseCode>,
        command: &Command<T>,
        moved: u32,
    ) -> Result<(), UnitRefused> {
        let Some(bring_up) = &mut self.bring_up else { return Ok(()) };
        let data = command.received(moved);
        match bring_up.on_done(verdict, sense, &data)? {
            Learned::More => self.asked = false,
            Learned::Later => self.later.push_back(command.piece),
            Learned::All => {
                if let Some(bring_up) = self.bring_up.take() {
                    let (unit, luns) = bring_up.into_parts();
                    (self.terms, self.info) = (Terms::new(&unit), unit.volume_info());
                    (self.unit, self.luns) = (Some(unit), luns);
                }
            }
        }
        Ok(())
    }

    fn on_lba_status(&mut self, command: &Command<T>, job: Key, moved: u32) {
        let data = command.received(moved);
        let Some(job) = self.jobs.get_mut(job) else { return };
        let blocks = self.terms.blocks(job.io.offset, job.io.len);
        let asked = job.io.len.wrapping_shr(self.terms.block_len.trailing_zeros());
        let (block_len, is_zero) = (self.terms.block_len, self.terms.unmapped_is_zero);
        job.extents = extents::parse(&data, blocks.lba, asked, block_len, is_zero);
    }

    /// A part of a job has ended: goes on with the job.
    #[inline]
    fn finish_piece(&mut self, piece: Piece, key: Key, verdict: Verdict) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match verdict {
            Verdict::Good => {}
            Verdict::Again | Verdict::Later if piece.tries < MAX_TRIES => {
                let piece = Piece { tries: piece.tries.saturating_add(1), ..piece };
                let queue = if verdict == Verdict::Again { &mut self.again } else { &mut self.later };
                return queue.push_back(piece);
            }
            Verdict::Again => job.fail(IoError::Aborted),
            Verdict::Later => job.fail(IoError::NoMemory),
            Verdict::Illegal(_) => {
                if let Some(again) = self.do_otherwise(piece, key) {
                    return self.again.push_back(again);
                }
            }
            Verdict::Failed(error) => job.fail(error),
        }
        let Some(job) = self.jobs.get_mut(key) else { return };
        job.in_flight = job.in_flight.saturating_sub(1);
        if job.error.is_none() && job.has_more() {
            if !std::mem::replace(&mut job.is_ready, true) {
                self.ready.push_back(key);
            }
        } else if job.in_flight == 0 {
            self.complete(key);
        }
    }

    /// The unit does not know a command: does the same with others that it may know, or fails the job. A piece that is
    /// returned is to be sent instead.
    #[cold]
    fn do_otherwise(&mut self, piece: Piece, key: Key) -> Option<Piece> {
        let job = self.jobs.get_mut(key)?;
        match piece.kind {
            Kind::WriteSame { .. } => {
                self.terms.write_same = None;
                match job.io.op {
                    Op::WriteZeroes { only_fast: false, fua, .. } => {
                        job.go_back(piece.offset, self.terms.written_zeroes(fua));
                    }
                    _ => job.fail(IoError::Unsupported),
                }
            }
            // What is no longer needed may stay.
            Kind::Unmap => {
                self.terms.unmap = None;
                job.issued = job.io.len;
            }
            Kind::Status => {
                self.terms.lba_status = false;
                job.extents = vec![all_data(job.io.len)];
            }
            Kind::Flush if self.terms.long_flush => {
                self.terms.long_flush = false;
                return Some(piece);
            }
            // A unit without cache needs no command to empty it.
            Kind::Flush if !self.terms.write_cache => {}
            _ => job.fail(IoError::Unsupported),
        }
        None
    }

    #[inline]
    fn complete(&mut self, key: Key) {
        let Some(job) = self.jobs.remove(key) else { return };
        let (tag, op) = (job.io.tag, job.io.op);
        let result = match job.error {
            Some(error) => Err(error),
            None => Ok(match op {
                Op::Read => Output::Data(job.io.data.or(job.buffer).unwrap_or_default()),
                // It is never wrong to take for data what the unit does not tell.
                Op::BlockStatus if job.extents.is_empty() => Output::Extents(vec![all_data(job.io.len)]),
                Op::BlockStatus => Output::Extents(job.extents),
                _ => Output::Nothing,
            }),
        };
        self.done.push_back(Completion { tag, result });
    }
}

impl Job {
    /// The next piece of this job, if one may be sent now.
    #[inline]
    fn carve(&mut self, key: Key) -> Option<Piece> {
        if self.in_flight >= WINDOW || self.error.is_some() {
            return None;
        }
        let job = Some(key);
        if self.pieces.kind == Kind::Flush || self.issued >= self.io.len {
            if self.in_flight > 0 || !std::mem::take(&mut self.pieces.then_flush) {
                return None;
            }
            self.in_flight = 1;
            return Some(Piece { job, kind: Kind::Flush, offset: 0, len: 0, tries: 0 });
        }
        let len = self.io.len.saturating_sub(self.issued).min(self.pieces.max);
        let offset = self.io.offset.saturating_add(self.issued);
        self.issued = self.issued.saturating_add(len);
        self.in_flight = self.in_flight.saturating_add(1);
        Some(Piece { job, kind: self.pieces.kind, offset, len, tries: 0 })
    }

    /// Whether there is a piece to send, as soon as others have ended.
    #[inline]
    fn has_more(&self) -> bool {
        self.issued < self.io.len || (self.in_flight == 0 && self.pieces.then_flush)
    }

    fn fail(&mut self, error: IoError) {
        self.error.get_or_insert(error);
    }

    /// Does again, in another way, what lies from `offset` on. What was done already is done twice then, which changes
    /// nothing.
    fn go_back(&mut self, offset: u64, pieces: Pieces) {
        self.pieces = pieces;
        self.issued = self.issued.min(offset.saturating_sub(self.io.offset));
    }
}

impl<T> Command<T> {
    /// Whether all the data moved that a successful command moves.
    #[inline]
    fn is_whole(&self, moved: u32) -> bool {
        match self.transfer {
            Transfer::Nothing => true,
            Transfer::In(len) => moved == len || self.piece.kind == Kind::Status,
            Transfer::Out(len) => moved == len,
        }
    }

    /// The data-in that came, of a command with a payload of its own.
    fn received(&self, moved: u32) -> Vec<u8> {
        let Some(payload) = &self.payload else { return Vec::new() };
        payload.slice(0, payload.len().min(moved as usize)).to_vec()
    }
}

fn memory(pool: &Pool, len: usize) -> SgList {
    SgList::one(pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len))
}

fn all_data(len: u64) -> Extent {
    Extent { len, hole: false, zero: false }
}

/// What a request of no length brings.
fn empty_output(io: Io) -> Output {
    match io.op {
        Op::Read => Output::Data(io.data.unwrap_or_default()),
        Op::BlockStatus => Output::Extents(Vec::new()),
        _ => Output::Nothing,
    }
}

/// The most commands that one I/O has under way.
const WINDOW: u32 = 4;

/// Unit attentions, aborts and busy answers that one command may meet. With the pauses of transports, a unit may be
/// busy for half a minute.
const MAX_TRIES: u32 = 64;

/// A read up to this many bytes may be lent memory by the transport, and takes none before its data comes.
pub(crate) const LEND_UP_TO: u64 = 64 << 10;

const FLUSH: Pieces = Pieces { kind: Kind::Flush, max: 0, then_flush: true };
