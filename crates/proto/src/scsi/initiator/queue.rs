//! I/O under way at one logical unit, and commands of the queue itself: those of the bring-up, and questions about what
//! has changed.

use super::access::Access;
use super::bring_up::{BringUp, MOST_DATA_IN};
use super::news::News;
use super::plan::{Kind, Plan, STATUS_LEN, Terms, UNMAP_LEN};
use super::unit::UnitInfo;
use crate::io_queue::{self, CommandSet, Transfer, Zeroes, memory};
use crate::job;
use crate::scsi::Lun;
use crate::slots::Key;
use blockmux_volume::{Extent, Io, IoError, Memory, Op, Pool, SgList};
use blockmux_wire::scsi::provisioning::{UnmapDescriptor, UnmapHeader};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// I/O under way at one logical unit. `T` is what a transport keeps beside each command.
pub(crate) type Queue<T> = io_queue::Queue<LogicalUnit, T>;
/// A command, whose CDB is padded with zeroes.
pub(crate) type Request = io_queue::Request<[u8; 16]>;
pub(super) type Command<T> = io_queue::Command<LogicalUnit, T>;
pub(super) type Job = job::Job<Kind>;
pub(super) type Piece = job::Piece<Kind>;

/// What is known of the unit, and what is to be asked.
pub(crate) struct LogicalUnit {
    pub(super) bring_up: Option<BringUp>,
    /// The bring-up's command is under way, or waits.
    pub(super) asked: bool,
    pub(super) unit: Option<UnitInfo>,
    pub(super) news: News,
    pub(super) access: Access,
    pub(super) luns: Vec<Lun>,
    pub(super) terms: Terms,
    zeroes: Zeroes,
    /// Commands to send again in a while.
    pub(super) later: VecDeque<Piece>,
    /// Nothing new is sent: what is left is for another session.
    is_draining: bool,
}

impl<T: Default> Queue<T> {
    /// For the unit `lun`, of which nothing is known yet.
    pub(crate) fn new(lun: Lun, pool: Pool) -> Queue<T> {
        let unknown = UnitInfo { block_len: 512, physical_block_len: 512, ..UnitInfo::default() };
        let unit = LogicalUnit {
            bring_up: Some(BringUp::new(lun)),
            asked: false,
            unit: None,
            news: News::default(),
            access: Access::default(),
            luns: Vec::new(),
            terms: Terms::new(&unknown),
            zeroes: Zeroes::default(),
            later: VecDeque::new(),
            is_draining: false,
        };
        Queue::of(unit, unknown.volume_info(), pool)
    }

    /// The unit, once it is known.
    pub(crate) fn unit(&self) -> Option<&UnitInfo> {
        self.set.unit.as_ref()
    }

    /// The target's logical units, as far as they were told.
    pub(crate) fn luns(&self) -> &[Lun] {
        self.set.bring_up.as_ref().map_or(&self.set.luns, |bring_up| bring_up.luns())
    }

    /// I/O of which no command was sent.
    #[inline]
    pub(crate) fn unsent(&self) -> usize {
        let asks = usize::from(self.set.news.has_questions());
        self.ready.len().saturating_add(self.again.len()).saturating_add(asks)
    }

    /// Whether no command is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether something is to be sent again in a while: then call [`Queue::resume`].
    pub(crate) fn has_later(&self) -> bool {
        !self.set.later.is_empty()
    }

    /// Sends again what met a busy unit.
    pub(crate) fn resume(&mut self) {
        self.again.append(&mut self.set.later);
    }

    /// As [`Initiator::look`](crate::session::Initiator::look).
    pub(crate) fn look(&mut self) -> u32 {
        if self.commands.is_empty() && self.set.later.is_empty() {
            // There is no command yet that could be answered: the target takes none.
            return self.jobs.look(|_| false);
        }
        self.jobs.look_away();
        self.commands.look(Command::is_long)
    }

    /// Sends nothing new; what is under way ends, the rest stays for [`Queue::take_unfinished`].
    pub(crate) fn drain(&mut self) {
        self.set.is_draining = true;
    }

    /// Sends again after all: there is no other session to come.
    pub(crate) fn undrain(&mut self) {
        self.set.is_draining = false;
    }

    /// All I/O that has not completed, oldest first.
    pub(crate) fn take_unfinished(&mut self) -> Vec<Io> {
        self.set.later.clear();
        let mut jobs = self.take_jobs();
        jobs.sort_unstable_by_key(|(age, _)| *age);
        jobs.into_iter().map(|(_, io)| io).collect()
    }

    /// The next command to send, if there is any.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Request> {
        if self.set.is_draining {
            return None;
        }
        if let Some(question) = self.set.news.next() {
            return Some(self.begin(Piece::of_the_queue(Kind::News(question))));
        }
        if self.set.bring_up.is_some() && self.again.is_empty() {
            let is_due = !std::mem::replace(&mut self.set.asked, true);
            return is_due.then(|| self.begin(Piece::of_the_queue(Kind::Question)));
        }
        self.next_of_jobs()
    }

    /// The commands under way that `is_meant` picks, in no order.
    pub(crate) fn keys_of(&self, is_meant: impl Fn(&T) -> bool) -> Vec<Key> {
        self.commands.keys_of(|command| is_meant(&command.transport))
    }

    /// A command under way, as it was when it was sent.
    pub(crate) fn request(&mut self, key: Key) -> Option<Request> {
        let command = self.commands.get_mut(key)?;
        Some(Request { key, command: command.kept, transfer: command.transfer })
    }

    /// The command that a peer names by the short form of its key.
    #[inline]
    pub(crate) fn find(&self, short: u32) -> Option<Key> {
        self.commands.find(short)
    }
}

impl CommandSet for LogicalUnit {
    type Kind = Kind;
    type Sent = [u8; 16];
    type Kept = [u8; 16];

    #[inline]
    fn is_open(&self) -> bool {
        self.unit.is_some() && !self.is_draining
    }

    #[inline]
    fn plan(&self, op: Op) -> Plan {
        self.terms.plan(op)
    }

    #[inline]
    fn command(&self, piece: &Piece) -> ([u8; 16], Transfer) {
        match (&self.bring_up, piece.job) {
            (Some(bring_up), None) => {
                let (cdb, len) = bring_up.command();
                (cdb, if len == 0 { Transfer::Nothing } else { Transfer::In(len) })
            }
            _ => self.terms.cdb(piece.kind, piece.offset, piece.len),
        }
    }

    #[inline]
    fn payload(&mut self, piece: &Piece, pool: &Pool) -> Option<SgList> {
        match piece.kind {
            Kind::Read | Kind::Write { .. } | Kind::Flush => None,
            _ => Some(self.data(piece, pool)),
        }
    }

    #[inline]
    fn keep(cdb: &[u8; 16]) -> [u8; 16] {
        *cdb
    }

    #[cold]
    fn do_otherwise(&mut self, piece: Piece, job: &mut Job) -> Option<Piece> {
        let terms = &mut self.terms;
        match piece.kind {
            Kind::WriteSame { .. } => {
                terms.write_same = None;
                match job.io.op {
                    Op::WriteZeroes { only_fast: false, fua, .. } => {
                        job.go_back(piece.offset, terms.written_zeroes(fua));
                    }
                    _ => job.fail(IoError::Unsupported),
                }
            }
            // What is no longer needed may stay.
            Kind::Unmap => {
                terms.unmap = None;
                job.issued = job.io.len;
            }
            Kind::Status => {
                terms.lba_status = false;
                job.extents = vec![Extent::data(job.io.len)];
            }
            Kind::Flush if terms.long_flush => {
                terms.long_flush = false;
                return Some(piece);
            }
            // A unit without cache needs no command to empty it.
            Kind::Flush if !terms.write_cache => {}
            _ => job.fail(IoError::Unsupported),
        }
        None
    }
}

impl LogicalUnit {
    /// Data of a command that is not the I/O's own.
    fn data(&mut self, piece: &Piece, pool: &Pool) -> SgList {
        match piece.kind {
            Kind::Zeroes => self.zeroes.list(piece.len),
            Kind::WriteSame { .. } => self.zeroes.list(self.terms.block_len.into()),
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
                let list = memory(pool, UNMAP_LEN as usize);
                let (head, tail) = (header.as_bytes(), descriptor.as_bytes());
                list.slice(0, head.len()).copy_from(head);
                list.slice(head.len(), tail.len()).copy_from(tail);
                list
            }
            Kind::Status => memory(pool, STATUS_LEN),
            _ => SgList::one(Memory::from_heap(MOST_DATA_IN).seg(0, MOST_DATA_IN)),
        }
    }
}
