//! I/O under way at one logical unit: cut into commands, put together again.
//!
//! An I/O that the unit takes whole is one command; a longer one is cut into pieces, of which four are under way
//! at a time. The completion comes after the last, and after the flush that stands in for FUA where there is none.
//!
//! A long read that brought no memory gets some before it is sent, and waits for its turn while the pool has none. One
//! that is alone does not wait, but takes memory from the heap, so that there always is an end after which to ask the
//! pool again.

use super::DEPTH;
use super::abort::is_long;
use super::access::Access;
use super::bring_up::{BringUp, MOST_DATA_IN};
use super::command::{Request, Transfer};
use super::job::{Command, Job, Piece};
use super::news::News;
use super::plan::{Kind, Pieces, Plan, STATUS_LEN, Terms, UNMAP_LEN, ZEROES};
use super::unit::UnitInfo;
use crate::scsi::Lun;
use crate::slots::{Key, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::scsi::provisioning::{UnmapDescriptor, UnmapHeader};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// I/O under way at one logical unit. `T` is what a transport keeps beside each command.
pub(crate) struct Queue<T> {
    pub(super) bring_up: Option<BringUp>,
    /// The bring-up's command is under way, or waits.
    pub(super) asked: bool,
    pub(super) unit: Option<UnitInfo>,
    pub(super) news: News,
    pub(super) access: Access,
    pub(super) luns: Vec<Lun>,
    pub(super) terms: Terms,
    pub(super) info: VolumeInfo,
    pub(super) pool: Pool,
    pub(super) jobs: Slots<Job>,
    pub(super) commands: Slots<Command<T>>,
    /// Jobs with more commands to send.
    pub(super) ready: VecDeque<Key>,
    /// Jobs that wait for memory, first come first served; while there are any, something is under way.
    pub(super) waiting: VecDeque<Key>,
    /// Commands to send again.
    pub(super) again: VecDeque<Piece>,
    /// Commands to send again in a while.
    pub(super) later: VecDeque<Piece>,
    pub(super) done: VecDeque<Completion>,
    /// I/O with a command that the target was made to give up.
    pub(super) aborted: VecDeque<Io>,
    pub(super) next_age: u64,
    pub(super) zeroes: Option<Seg>,
    /// Nothing new is sent: what is left is for another session.
    pub(super) is_draining: bool,
    /// Nothing new is taken.
    pub(super) is_closed: bool,
}

impl<T: Default> Queue<T> {
    /// For the unit `lun`, of which nothing is known yet.
    pub(crate) fn new(lun: Lun, pool: Pool) -> Queue<T> {
        let unknown = UnitInfo { block_len: 512, physical_block_len: 512, ..UnitInfo::default() };
        Queue {
            bring_up: Some(BringUp::new(lun)),
            asked: false,
            unit: None,
            news: News::default(),
            access: Access::default(),
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
            aborted: VecDeque::new(),
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
        let asks = usize::from(self.news.has_questions());
        self.ready.len().saturating_add(self.again.len()).saturating_add(asks)
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

    /// As [`Initiator::look`](crate::session::Initiator::look).
    pub(crate) fn look(&mut self) -> u32 {
        if self.commands.is_empty() && self.later.is_empty() {
            // There is no command yet that could be answered: the target takes none.
            return self.jobs.look(|_| false);
        }
        self.jobs.look_away();
        self.commands.look(is_long)
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
            Plan::AllData | Plan::Send(_) if io.len == 0 => Ok(io.into_empty_output()),
            Plan::AllData => Ok(Output::Extents(vec![Extent::data(io.len)])),
            Plan::Flush => return self.take(io, Pieces::FLUSH),
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
        if let Some(question) = self.news.next() {
            let kind = Kind::News(question);
            return Some(self.begin(Piece::of_the_queue(kind)));
        }
        if let Some(piece) = self.again.pop_front() {
            return Some(self.begin(piece));
        }
        if self.bring_up.is_some() {
            if std::mem::replace(&mut self.asked, true) {
                return None;
            }
            let piece = Piece::of_the_queue(Kind::Question);
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

    /// The commands under way that `is_meant` picks, in no order.
    pub(crate) fn keys_of(&self, is_meant: impl Fn(&T) -> bool) -> Vec<Key> {
        self.commands.keys_of(|command| is_meant(&command.transport))
    }

    /// A command under way, as it was when it was sent.
    pub(crate) fn request(&mut self, key: Key) -> Option<Request> {
        let command = self.commands.get_mut(key)?;
        Some(Request { key, cdb: command.cdb, transfer: command.transfer })
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

    /// Takes an I/O that needs commands.
    #[inline]
    fn take(&mut self, io: Io, pieces: Pieces) {
        let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > LEND_UP_TO;
        let age = self.next_age;
        self.next_age = self.next_age.wrapping_add(1);
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
                let is_alone = self.commands.is_empty() && self.ready.is_empty() && self.again.is_empty();
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
        let key = self.commands.insert(Command { piece, cdb, transfer, payload, transport: T::default() });
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
}

/// A little memory for a command's own data, from the pool if it has some.
fn memory(pool: &Pool, len: usize) -> SgList {
    SgList::one(pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len))
}

/// A read up to this many bytes may be lent memory by the transport, and takes none before its data comes.
const LEND_UP_TO: u64 = 64 << 10;
