//! The client's transmission phase: I/O becomes requests, and replies (see [`super::reply`]) become
//! completions.
//!
//! An I/O within the server's limits is one request. A longer one is split into pieces, of which
//! [`WINDOW`] are in flight at a time, so at most `DEPTH * WINDOW` requests are in flight. The I/O
//! completes after its last piece, and after the flush that replaces FUA if the server offers none.
//!
//! A long read that brought no memory gets memory from the pool before it is sent, and waits while
//! the pool is empty: waiting when its data arrives would block all replies behind it. If no
//! request is in flight, the read takes memory from the heap instead, so that there is always a
//! reply after which the pool is tried again.

use super::DEPTH;
use super::export::ExportInfo;
use super::extents::ExtentCollector;
use super::reply::ReplyState;
use super::request::{ClientParams, NbdPieces, NbdPlan, ZEROES, push_disconnect};
use crate::driver::outbox::Outbox;
use crate::initiator::command_queue::{MAX_BORROWED, memory};
use crate::initiator::coverage::Coverage;
use crate::nbd::errno::to_io_error;
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Completion, Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::nbd::transmission::{Cmd, CmdFlags, Errno};
use std::collections::VecDeque;

/// State of the transmission phase with one server.
pub(super) struct ClientTransmission {
    pub(super) params: ClientParams,
    info: VolumeInfo,
    pool: Pool,
    pub(super) jobs: Slots<NbdJob>,
    pub(super) requests: Slots<SentRequest>,
    /// Jobs that wait for memory, in order of arrival; while there are any, a request is in flight.
    waiting: VecDeque<SlotKey>,
    pub(super) reading: ReplyState,
    /// Number of contiguous bytes that parsing needs next.
    pub(super) need: usize,
    done: VecDeque<Completion>,
    /// The sequence number of the next job.
    next_age: u64,
    /// Zeroes to send to a server without write-zeroes command.
    zeroes: Option<Seg>,
    ending: DisconnectState,
}

/// Progress of the end of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DisconnectState {
    No,
    /// The server is shutting down: the requests that it refused wait for the next session.
    ByServer,
    /// The client is stopping: the requests in flight complete in this session.
    ByUs,
    /// `NBD_CMD_DISC` is sent; nothing may follow it.
    Disconnected,
}

/// One I/O from submission to completion.
pub(super) struct NbdJob {
    pub(super) io: Io,
    /// Sequence number; a smaller one is older.
    age: u64,
    pieces: NbdPieces,
    /// Number of bytes of the range for which requests were sent.
    issued: u64,
    in_flight: u32,
    /// The first error of any of its requests.
    error: Option<IoError>,
    /// The read data of an I/O that brought no memory: borrowed from the receive buffer, or memory
    /// of the pool.
    pub(super) buffer: Option<SgList>,
    /// The extents that block status has described.
    pub(super) extents: Option<Box<ExtentCollector>>,
}

/// One request on the wire.
pub(super) struct SentRequest {
    pub(super) job: SlotKey,
    pub(super) cmd: Cmd,
    pub(super) flags: CmdFlags,
    /// In bytes.
    pub(super) offset: u64,
    /// In bytes.
    pub(super) len: u64,
    /// The parts of a read that have arrived.
    pub(super) coverage: Coverage,
    /// The first error that its reply reported.
    pub(super) error: Option<IoError>,
    /// Number of error chunks in its reply.
    pub(super) error_chunks: u32,
}

impl ClientTransmission {
    pub(super) fn new(export: &ExportInfo, allocation: Option<u32>, pool: Pool) -> ClientTransmission {
        let params = ClientParams {
            headers: export.headers,
            flags: export.flags,
            allocation,
            max_payload: export.max_payload(),
        };
        let reading = ReplyState::Head;
        ClientTransmission {
            need: reading.least(params.headers),
            params,
            info: export.volume_info(),
            pool,
            jobs: Slots::default(),
            requests: Slots::default(),
            waiting: VecDeque::new(),
            reading,
            done: VecDeque::new(),
            next_age: 0,
            zeroes: None,
            ending: DisconnectState::No,
        }
    }

    #[inline]
    pub(super) fn room(&self) -> usize {
        if self.ending == DisconnectState::No {
            DEPTH.saturating_sub(self.jobs.len()).saturating_sub(self.done.len())
        } else {
            0
        }
    }

    #[inline]
    pub(super) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Whether `NBD_CMD_DISC` has been sent.
    pub(super) fn is_disconnected(&self) -> bool {
        self.ending == DisconnectState::Disconnected
    }

    /// Whether no request waits for a reply or receives one.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io, outbox: &mut Outbox) {
        let tag = io.tag;
        if let Err(error) = self.info.check(&io) {
            return self.done.push_back(Completion { tag, result: Err(error) });
        }
        if self.ending != DisconnectState::No {
            return self.done.push_back(Completion { tag, result: Err(IoError::ShuttingDown) });
        }
        let result = match self.params.plan(io.op, io.len, io.data.is_none()) {
            NbdPlan::Done => Ok(Output::Nothing),
            NbdPlan::Fails(error) => Err(error),
            // Requests of 0 bytes are not allowed, and not needed.
            NbdPlan::AllData | NbdPlan::Send(_) if io.len == 0 => Ok(io.into_empty_output()),
            NbdPlan::AllData => Ok(Output::Extents(vec![Extent::data(io.len)])),
            NbdPlan::Flush => {
                let key = self.insert_job(io, FLUSH);
                return self.send_flush(key, outbox);
            }
            NbdPlan::Send(pieces) => {
                let needs_memory = io.op == Op::Read && io.data.is_none() && io.len > MAX_BORROWED;
                let key = self.insert_job(io, pieces);
                if needs_memory {
                    self.waiting.push_back(key);
                    return self.send_waiting(outbox);
                }
                return self.issue(key, outbox);
            }
        };
        self.done.push_back(Completion { tag, result });
    }

    /// Disconnects as soon as no request is in flight.
    pub(super) fn stop(&mut self, outbox: &mut Outbox) {
        if self.ending == DisconnectState::ByServer {
            self.ending = DisconnectState::ByUs;
            self.waiting.clear();
            // The jobs that waited for the next session fail, because there is none.
            for key in self.jobs.keys_of(|job| job.in_flight == 0) {
                if let Some(job) = self.jobs.get_mut(key) {
                    job.error.get_or_insert(IoError::ShuttingDown);
                }
                self.complete(key);
            }
        }
        if self.ending == DisconnectState::No {
            self.ending = DisconnectState::ByUs;
        }
        self.disconnect_when_idle(outbox);
    }

    /// Ages the requests in flight; see [`Overdue`](crate::driver::session::Overdue).
    pub(super) fn tick(&mut self) -> u32 {
        self.requests.tick(|request| !matches!(request.cmd, Cmd::NBD_CMD_READ | Cmd::NBD_CMD_WRITE))
    }

    /// Removes and returns all I/O that has not completed, oldest first.
    pub(super) fn take_unfinished(&mut self) -> Vec<Io> {
        let mut jobs = self.jobs.take_all();
        self.requests.take_all();
        self.waiting.clear();
        self.reading = ReplyState::Head;
        self.ending = DisconnectState::Disconnected;
        jobs.sort_unstable_by_key(|job| job.age);
        jobs.into_iter().map(|job| job.io).collect()
    }

    /// Handles the end of a reply: continues or completes the request's job.
    #[inline]
    pub(super) fn finish_request(&mut self, key: SlotKey, outbox: &mut Outbox) {
        let Some(request) = self.requests.remove(key) else { return };
        let Some(job) = self.jobs.get_mut(request.job) else { return };
        job.in_flight = job.in_flight.saturating_sub(1);
        match request.error {
            Some(error) if self.params.may_be_too_long(&request, error) => {
                job.go_back(&request, self.params.max_payload.into(), self.info.logical_block);
            }
            Some(error) => {
                job.error.get_or_insert(error);
                if error == IoError::ShuttingDown && self.ending == DisconnectState::No {
                    self.ending = DisconnectState::ByServer;
                }
            }
            None => {}
        }
        if job.error.is_none() {
            if job.issued < job.io.len {
                return self.issue(request.job, outbox);
            }
            if job.in_flight == 0 && job.pieces.then_flush {
                job.pieces.then_flush = false;
                return self.send_flush(request.job, outbox);
            }
        }
        if job.in_flight == 0 {
            self.complete(request.job);
        }
        if !self.waiting.is_empty() && self.ending != DisconnectState::ByServer {
            self.send_waiting(outbox);
        }
        if self.ending != DisconnectState::No {
            self.disconnect_when_idle(outbox);
        }
    }

    /// Sends the jobs that wait for memory, as far as the pool has memory.
    fn send_waiting(&mut self, outbox: &mut Outbox) {
        while let Some(&key) = self.waiting.front() {
            if let Some(job) = self.jobs.get_mut(key) {
                let len = job.io.len as usize; // checked: at most MAX_TRANSFER
                let memory = self.pool.take_payload(len);
                let memory = memory.or_else(|| self.requests.is_empty().then(|| Memory::from_heap(len)));
                let Some(memory) = memory else { return };
                job.buffer = Some(SgList::one(memory.seg(0, len)));
            }
            self.waiting.pop_front();
            self.issue(key, outbox);
        }
    }

    /// The destination of a job's data. Only a short read has no memory yet, if its data arrives in
    /// pieces.
    #[inline]
    pub(super) fn destination(&mut self, key: SlotKey) -> Option<&SgList> {
        let job = self.jobs.get_mut(key)?;
        if job.io.data.is_none() && job.buffer.is_none() {
            job.buffer = Some(memory(&self.pool, job.io.len as usize)); // at most MAX_BORROWED
        }
        job.io.data.as_ref().or(job.buffer.as_ref())
    }

    /// Records an error that a reply reported; the first one counts.
    pub(super) fn fail_request(&mut self, key: SlotKey, error: IoError) {
        if let Some(request) = self.requests.get_mut(key) {
            request.error.get_or_insert(error);
        }
    }

    /// Records an error value of the server.
    pub(super) fn fail_with_errno(&mut self, key: SlotKey, errno: u32) {
        self.fail_request(key, to_io_error(Errno(errno)));
    }

    fn insert_job(&mut self, io: Io, pieces: NbdPieces) -> SlotKey {
        let age = self.next_age;
        self.next_age = self.next_age.wrapping_add(1);
        let extents = (io.op == Op::BlockStatus)
            .then(|| Box::new(ExtentCollector::new(io.len.min(pieces.max), self.info.logical_block)));
        self.jobs.insert_with(|| NbdJob {
            io,
            age,
            pieces,
            issued: 0,
            in_flight: 0,
            error: None,
            buffer: None,
            extents,
        })
    }

    /// Sends the next requests of a job, up to its window.
    #[inline]
    fn issue(&mut self, key: SlotKey, outbox: &mut Outbox) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        while job.in_flight < WINDOW && job.issued < job.io.len {
            let NbdPieces { cmd, flags, max, zeroes, .. } = job.pieces;
            let at = job.issued;
            let len = job.io.len.saturating_sub(at).min(max);
            job.in_flight = job.in_flight.saturating_add(1);
            // A block status may cover less than its range, so one request is enough.
            job.issued = if cmd == Cmd::NBD_CMD_BLOCK_STATUS { job.io.len } else { at.saturating_add(len) };
            let offset = job.io.offset.saturating_add(at);
            let coverage = Coverage::default();
            let cookie = self.requests.insert_with(|| SentRequest {
                job: key,
                cmd,
                flags,
                offset,
                len,
                coverage,
                error: None,
                error_chunks: 0,
            });
            self.params.push(outbox, cmd, flags, cookie, offset, len);
            if zeroes {
                let zeroes = self
                    .zeroes
                    .get_or_insert_with(|| Memory::from_heap(ZEROES as usize).seg(0, ZEROES as usize));
                outbox.push_seg(zeroes.slice(0, len as usize));
            } else if cmd == Cmd::NBD_CMD_WRITE
                && let Some(data) = &job.io.data
            {
                if len == job.io.len {
                    outbox.push_payload(data);
                } else {
                    outbox.push_payload(&data.slice(at as usize, len as usize));
                }
            }
        }
    }

    fn send_flush(&mut self, key: SlotKey, outbox: &mut Outbox) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        job.in_flight = job.in_flight.saturating_add(1);
        let cmd = Cmd::NBD_CMD_FLUSH;
        let cookie = self.requests.insert(SentRequest {
            job: key,
            cmd,
            flags: CmdFlags::empty(),
            offset: 0,
            len: 0,
            coverage: Coverage::default(),
            error: None,
            error_chunks: 0,
        });
        self.params.push(outbox, cmd, CmdFlags::empty(), cookie, 0, 0);
    }

    #[inline]
    fn complete(&mut self, key: SlotKey) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        if job.error == Some(IoError::ShuttingDown) && self.ending == DisconnectState::ByServer {
            // The next session repeats it.
            return;
        }
        let (tag, op) = (job.io.tag, job.io.op);
        let result = match job.error {
            // A hint cannot fail: the server ignored it.
            Some(_) if op == Op::Prefetch => Ok(Output::Nothing),
            // Reporting data is always correct for a range of unknown status.
            Some(IoError::Unsupported | IoError::BadLength) if op == Op::BlockStatus => {
                Ok(Output::Extents(vec![Extent::data(job.io.len)]))
            }
            // A range that is too long for one request is not fast.
            Some(IoError::BadLength) if matches!(op, Op::WriteZeroes { only_fast: true, .. }) => {
                Err(IoError::Unsupported)
            }
            Some(error) => Err(error),
            None => Ok(match op {
                Op::Read => {
                    Output::Data(job.io.data.take().or_else(|| job.buffer.take()).unwrap_or_default())
                }
                Op::BlockStatus => {
                    Output::Extents(job.extents.take().map(|extents| extents.into_list()).unwrap_or_default())
                }
                _ => Output::Nothing,
            }),
        };
        self.done.push_back(Completion { tag, result });
        self.jobs.discard(key);
    }

    fn disconnect_when_idle(&mut self, outbox: &mut Outbox) {
        if self.requests.is_empty() && self.ending != DisconnectState::Disconnected {
            push_disconnect(outbox, self.params.headers);
            self.ending = DisconnectState::Disconnected;
        }
    }
}

impl NbdJob {
    /// Repeats the refused request and those after it, in pieces of at most `max` bytes. Pieces
    /// that have already succeeded are carried out twice, which is harmless: they are idempotent.
    #[cold]
    fn go_back(&mut self, request: &SentRequest, max: u64, block: u32) {
        self.pieces.max = max;
        self.issued = self.issued.min(request.offset.saturating_sub(self.io.offset));
        if self.extents.is_some() {
            self.extents = Some(Box::new(ExtentCollector::new(self.io.len.min(max), block)));
        }
    }
}

/// The maximum number of requests in flight for one I/O.
pub(super) const WINDOW: u32 = 4;

const FLUSH: NbdPieces =
    NbdPieces { cmd: Cmd::NBD_CMD_FLUSH, flags: CmdFlags::empty(), max: 0, then_flush: false, zeroes: false };
