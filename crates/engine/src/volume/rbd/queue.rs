//! One core's requests to an image, which its channels share.

use super::errors::{io_error, lacks_lock};
use super::state::{BLOCK, ImageState};
use super::status::{StatusQuery, StatusResult};
use crate::core::reactor::{EngineCore, Progress, Task, WakeOnEvent};
use crate::core::ring::Registration;
use crate::volume::core_queues::{ChannelCompletions, CoreQueues};
use blockmux_rbd::error::Errno;
use blockmux_rbd::requests::{Command, Finished, RequestError, RequestQueue, free_abandoned};
use blockmux_volume::{Completion, Core, Io, IoError, Op, Output, Seg, SgList, Slab, Tag, Waker};
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The queue of a core.
pub(super) struct RbdQueue {
    queue: RequestQueue,
    requests: Slab<RbdRequest>,
    image: Arc<ImageState>,
    core: Rc<EngineCore>,
    waker: Waker,
    registration: Registration,
    armed: Rc<WakeOnEvent>,
    /// When to check next that requests complete; `None` while there are none.
    progress_check_at: Option<Instant>,
    /// A request has completed since the last check.
    has_completed: bool,
    /// A read that tells whether the cluster still serves this client is under way.
    is_probing: bool,
}

/// A request of a channel, which takes one command or several, one after the other.
struct RbdRequest {
    tag: Tag,
    of: Rc<ChannelCompletions>,
    op: Op,
    offset: u64,
    len: u64,
    /// Bytes that earlier commands have handled.
    done: u64,
    /// Bytes that the present command handles.
    part: u64,
    /// The data, while no command has it.
    data: SgList,
    /// Where data is copied to before it is written.
    bounce: Option<Seg>,
    /// The last command is a flush, and has been submitted.
    is_flushing: bool,
    /// It has failed for its channel, but librbd still has it.
    has_failed: bool,
}

impl RbdQueue {
    /// Starts the task of a queue on this core.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(super) fn spawn(core: &Rc<EngineCore>, image: &Arc<ImageState>) -> io::Result<Rc<RefCell<RbdQueue>>> {
        let queue = RequestQueue::new(image.image.clone())?;
        let mut made = None;
        core.spawn(|waker| {
            let armed = WakeOnEvent::new(waker);
            let queue = Rc::new(RefCell::new(RbdQueue {
                queue,
                requests: Slab::default(),
                image: image.clone(),
                core: core.clone(),
                waker: waker.clone(),
                registration: core.register(armed.clone()),
                armed,
                progress_check_at: None,
                has_completed: false,
                is_probing: false,
            }));
            made = Some(queue.clone());
            RbdQueueTask(queue)
        });
        Ok(made.expect("spawn calls its argument"))
    }

    /// Checks a request against the image's current size.
    #[inline]
    pub(super) fn check(&self, io: &Io) -> Result<(), IoError> {
        self.image.check(io)
    }

    /// Takes a request that was checked, with memory for its data if that can change meanwhile.
    pub(super) fn submit(&mut self, io: Io, bounce: Option<Seg>, of: &Rc<ChannelCompletions>) {
        let Io { tag, op, offset, len, data } = io;
        if self.image.image.cluster().is_blocklisted() {
            // librbd would wait for the lock, which it never gets, before it sends a write.
            return of.push(Completion { tag, result: Err(IoError::Fenced) }, Some(of));
        }
        let (of, data) = (of.clone(), data.unwrap_or_default());
        let (done, part, is_flushing, has_failed) = (0, 0, false, false);
        let index = self.requests.insert(RbdRequest {
            tag,
            of,
            op,
            offset,
            len,
            done,
            part,
            data,
            bounce,
            is_flushing,
            has_failed,
        });
        if self.progress_check_at.is_none() {
            self.schedule_progress_check(self.core.now());
        }
        self.advance(index, None, true);
    }

    /// Submits the next command of a request, or completes it. `is_submit`: the channel polls next.
    fn advance(&mut self, index: usize, own: Option<&Rc<ChannelCompletions>>, is_submit: bool) {
        let Some(request) = self.requests.get_mut(index) else { return };
        if request.has_failed {
            self.requests.discard(index);
            return;
        }
        match request.next_step(self.image.has_cache()) {
            NextStep::Command(command, data) => {
                if !self.queue.submit(index, command, data) {
                    self.waker.wake();
                }
            }
            NextStep::AskStatus => {
                let (offset, len, volume) = (request.offset, request.len, self.image.id);
                let core = self.core.inbox().clone();
                let answer =
                    Box::new(move |found| core.send(move |core| on_status(core, volume, index, found)));
                self.image.status.ask(&self.image.image, StatusQuery { offset, len, answer });
            }
            NextStep::Done(result) if is_submit => {
                // Its own channel is polled after the submission without being woken.
                let of = request.of.clone();
                self.complete(index, result, Some(&of));
            }
            NextStep::Done(result) => self.complete(index, result, own),
        }
    }

    fn complete(
        &mut self,
        index: usize,
        result: Result<Output, IoError>,
        own: Option<&Rc<ChannelCompletions>>,
    ) {
        if let Some(request) = self.requests.remove(index).filter(|request| !request.has_failed) {
            request.of.push(Completion { tag: request.tag, result }, own);
        }
    }

    /// Takes what has completed, and wakes the users of all channels but `own`. Returns whether
    /// anything has.
    #[inline]
    pub(super) fn turn(&mut self, own: Option<&Rc<ChannelCompletions>>) -> bool {
        let mut has_finished = false;
        while let Some(finished) = self.queue.poll() {
            has_finished = true;
            self.on_finished(finished, own);
        }
        self.has_completed |= has_finished;
        has_finished
    }

    fn schedule_progress_check(&mut self, now: Instant) {
        let when = now + PROGRESS_CHECK_INTERVAL;
        (self.progress_check_at, self.has_completed) = (Some(when), false);
        self.core.wake_at(when, &self.waker);
    }

    /// Checks that requests complete, if the check is due. A client that the cluster has
    /// blocklisted is not told so when it writes, because librbd first waits for the lock, for
    /// ever. It is told when it reads.
    fn check_progress(&mut self) {
        let Some(when) = self.progress_check_at else { return };
        let now = self.core.now();
        if now < when {
            return;
        }
        if !self.requests.iter_mut().any(|request| !request.has_failed) {
            self.progress_check_at = None;
            return;
        }
        if !self.has_completed && !self.is_probing {
            self.is_probing = true;
            let data = SgList::one(Seg::from_slice(&[0; BLOCK as usize]));
            if !self.queue.submit(PROBE, Command::Read { offset: 0 }, data) {
                self.waker.wake();
            }
        }
        free_abandoned();
        self.schedule_progress_check(now);
    }

    /// The cluster has blocklisted this client, so what librbd has not done by now it never does.
    /// Reads complete by themselves; until then, librbd may use the memory of their clients.
    #[cold]
    fn fail_pending(&mut self) {
        for request in self.requests.iter_mut() {
            let ends_itself = matches!(request.op, Op::Read | Op::BlockStatus);
            if !ends_itself && !std::mem::replace(&mut request.has_failed, true) {
                request.of.push(Completion { tag: request.tag, result: Err(IoError::Fenced) }, None);
            }
        }
    }

    fn on_finished(&mut self, finished: Finished, own: Option<&Rc<ChannelCompletions>>) {
        let index = finished.token;
        self.is_probing &= index != PROBE;
        if let Err(error) = finished.result {
            if let Some(output) = self.not_written(index, error) {
                return self.complete(index, Ok(output), own);
            }
            if lacks_lock(error) {
                self.image.now.note_refused();
            }
            let error = io_error(error, self.image.image.cluster());
            self.complete(index, Err(error), own);
            if self.image.image.cluster().is_blocklisted() {
                self.fail_pending();
            }
            return;
        }
        let Some(request) = self.requests.get_mut(index) else { return };
        request.done += request.part;
        if request.bounce.is_none() {
            request.data = finished.data;
        }
        self.advance(index, own, false);
    }

    /// What a compare and write has found that has not written; `None` for other requests, and for
    /// errors. Pools with erasure coding cannot compare, and librbd before Ceph 18 compares only
    /// within 512 bytes.
    fn not_written(&mut self, index: usize, error: RequestError) -> Option<Output> {
        let request = self.requests.get_mut(index)?;
        if !matches!(request.op, Op::CompareAndWrite { .. }) || request.done > 0 {
            return None;
        }
        let unit = match error {
            RequestError::Differs(at) => return Some(Output::Differs(at)),
            // The image has become shorter, which says nothing about what can be compared.
            RequestError::BeyondEnd if self.image.has_changed.load(Ordering::Relaxed) => return None,
            RequestError::BeyondEnd if request.len > BLOCK => BLOCK as u32,
            RequestError::BeyondEnd | RequestError::Errno(Errno(libc::EOPNOTSUPP)) => 0,
            RequestError::Errno(_) => return None,
        };
        self.image.now.compared_unit.fetch_min(unit, Ordering::Relaxed);
        Some(Output::NotCompared)
    }

    /// The answer of a query of the object map.
    fn on_status(&mut self, index: usize, result: StatusResult) {
        let cluster = self.image.image.cluster();
        let result = result.map(Output::Extents).map_err(|error| io_error(error, cluster));
        self.complete(index, result, None);
        // The task may have waited for it.
        self.waker.wake();
    }

    /// A channel is closed; the task ends with the last one.
    pub(super) fn on_channel_closed(&self) {
        self.waker.wake();
    }

    /// Waits for the next completion.
    fn park(&mut self) {
        let is_late = self.queue.arm();
        self.armed.arm(&self.registration, self.queue.as_fd().as_raw_fd(), libc::POLLIN, 0);
        if is_late {
            self.waker.wake();
        }
    }
}

impl Drop for RbdQueue {
    fn drop(&mut self) {
        // The descriptor is about to be closed.
        self.armed.disarm(&self.registration);
    }
}

/// The answer of a query. The queue is kept until all of its requests have completed.
fn on_status(core: &EngineCore, volume: u64, index: usize, found: StatusResult) {
    if let Some(queue) = core.local(CoreQueues::<RbdQueue>::default).find(volume) {
        queue.borrow_mut().on_status(index, found);
    }
}

/// What a request does next.
enum NextStep {
    Command(Command, SgList),
    AskStatus,
    Done(Result<Output, IoError>),
}

impl RbdRequest {
    fn next_step(&mut self, has_cache: bool) -> NextStep {
        let (offset, left) = (self.offset + self.done, self.len - self.done);
        match self.op {
            Op::Flush if has_cache && !self.is_flushing => self.flush(),
            // A completed write is stable on all of its storage daemons.
            Op::Flush | Op::Prefetch => NextStep::Done(Ok(Output::Nothing)),
            Op::BlockStatus => NextStep::AskStatus,
            Op::WriteZeroes { only_fast: true, may_unmap: false, .. } => {
                NextStep::Done(Err(IoError::Unsupported))
            }
            Op::Read if left == 0 => NextStep::Done(Ok(Output::Data(std::mem::take(&mut self.data)))),
            _ if left == 0 => {
                let is_forced = matches!(
                    self.op,
                    Op::Write { fua: true }
                        | Op::WriteZeroes { fua: true, .. }
                        | Op::Discard { fua: true }
                        | Op::CompareAndWrite { fua: true }
                );
                if is_forced && has_cache && !self.is_flushing {
                    self.flush()
                } else {
                    NextStep::Done(Ok(Output::Nothing))
                }
            }
            Op::Read => {
                self.part = left;
                NextStep::Command(Command::Read { offset }, std::mem::take(&mut self.data))
            }
            Op::Write { .. } => {
                let data = self.next_data(left);
                NextStep::Command(Command::Write { offset }, data)
            }
            Op::CompareAndWrite { .. } => {
                self.part = left;
                NextStep::Command(Command::CompareAndWrite { offset }, std::mem::take(&mut self.data))
            }
            Op::WriteZeroes { may_unmap, .. } => {
                let is_thick = !may_unmap;
                let len = self.begin_part(if is_thick { MAX_WRITTEN } else { MAX_FREED }, left);
                NextStep::Command(Command::WriteZeroes { offset, len, is_thick }, SgList::default())
            }
            Op::Discard { .. } => {
                let len = self.begin_part(MAX_FREED, left);
                NextStep::Command(Command::Discard { offset, len }, SgList::default())
            }
        }
    }

    fn flush(&mut self) -> NextStep {
        (self.is_flushing, self.part) = (true, 0);
        NextStep::Command(Command::Flush, SgList::default())
    }

    fn begin_part(&mut self, most: u64, left: u64) -> u64 {
        // Parts end at multiples of the largest part, so that they cut no object in two.
        let offset = self.offset + self.done;
        self.part = left.min(most - offset % most);
        self.part
    }

    /// The data of the next command, copied if it could change.
    fn next_data(&mut self, left: u64) -> SgList {
        let Some(bounce) = &self.bounce else {
            self.part = left;
            return std::mem::take(&mut self.data);
        };
        let len = (left as usize).min(bounce.len());
        let copy = SgList::one(bounce.slice(0, len));
        self.data.slice(self.done as usize, len).copy_to_list(&copy);
        self.part = len as u64;
        copy
    }
}

/// Whether others may change the data while it is written: then its checksum would be wrong, and
/// the cluster would reset the connection of all images.
pub(super) fn is_bounced(data: &SgList) -> bool {
    !data.segs().iter().all(Seg::is_private)
}

/// Polls for completions while no channel does. It ends when the queue has no channel left.
struct RbdQueueTask(Rc<RefCell<RbdQueue>>);

impl Task for RbdQueueTask {
    #[inline]
    fn run(&mut self) -> Progress {
        let mut queue = self.0.borrow_mut();
        // From now on until it is parked, this task polls for completions.
        queue.queue.disarm();
        let progress = if queue.turn(None) { Progress::Drained } else { Progress::Idle };
        queue.check_progress();
        let is_unused =
            Rc::strong_count(&self.0) == 1 && queue.requests.iter_mut().all(|request| request.has_failed);
        if is_unused { Progress::Done } else { progress }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.0.borrow_mut().park();
    }
}

/// Data that could change is copied in pieces of this many bytes, so that no request exhausts the
/// pool.
pub(super) const MAX_BOUNCE: usize = 1 << 20;
/// Requests that take longer make the queue ask whether the cluster still serves this client.
const PROGRESS_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The token of the read that asks.
const PROBE: usize = usize::MAX;
/// Bytes that one command frees: some 256 objects, each a request to the cluster.
const MAX_FREED: u64 = 1 << 30;
/// Zeroes that one command writes, in bytes.
const MAX_WRITTEN: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{Memory, Pages};

    fn request(op: Op, offset: u64, len: u64) -> RbdRequest {
        RbdRequest {
            tag: Tag(0),
            of: ChannelCompletions::new(1, Waker::idle()),
            op,
            offset,
            len,
            done: 0,
            part: 0,
            data: SgList::default(),
            bounce: None,
            is_flushing: false,
            has_failed: false,
        }
    }

    /// The commands of a request whose commands succeed, with the length of their data, and its
    /// result.
    fn commands(mut request: RbdRequest, has_cache: bool) -> (Vec<(Command, usize)>, Result<(), IoError>) {
        let mut all = Vec::new();
        loop {
            match request.next_step(has_cache) {
                NextStep::Command(command, data) => {
                    all.push((command, data.len()));
                    request.done += request.part;
                }
                NextStep::AskStatus => panic!("no command"),
                NextStep::Done(result) => return (all, result.map(drop)),
            }
        }
    }

    #[test]
    fn a_flush_and_forced_writes_flush_a_cache_only() {
        let write = Op::Write { fua: true };
        assert_eq!(commands(request(Op::Flush, 0, 0), false), (vec![], Ok(())));
        assert_eq!(commands(request(Op::Flush, 0, 0), true), (vec![(Command::Flush, 0)], Ok(())));
        let written = (Command::Write { offset: 512 }, 0);
        assert_eq!(commands(request(write, 512, 512), false), (vec![written], Ok(())));
        assert_eq!(commands(request(write, 512, 512), true), (vec![written, (Command::Flush, 0)], Ok(())));
        let plain = Op::Write { fua: false };
        assert_eq!(commands(request(plain, 512, 512), true), (vec![written], Ok(())));
    }

    #[test]
    fn a_large_range_is_freed_in_parts_that_cut_no_object() {
        let start = MAX_FREED - 4096;
        let (all, result) = commands(request(Op::Discard { fua: false }, start, MAX_FREED + 8192), false);
        let part = |offset, len| (Command::Discard { offset, len }, 0);
        assert_eq!(all, [part(start, 4096), part(MAX_FREED, MAX_FREED), part(2 * MAX_FREED, 4096)]);
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn provisioned_zeroes_are_written_and_are_not_fast() {
        let zeroes = |may_unmap, only_fast| {
            commands(
                request(Op::WriteZeroes { fua: false, may_unmap, only_fast }, 0, MAX_WRITTEN + 512),
                false,
            )
        };
        let (all, result) = zeroes(false, false);
        assert_eq!((all.len(), result), (2, Ok(())));
        assert!(matches!(all[1].0, Command::WriteZeroes { offset: MAX_WRITTEN, len: 512, is_thick: true }));
        assert_eq!(zeroes(false, true), (vec![], Err(IoError::Unsupported)));
        let (all, _) = zeroes(true, true);
        assert!(matches!(all[..], [(Command::WriteZeroes { is_thick: false, .. }, 0)]));
    }

    #[test]
    fn data_that_others_may_change_is_written_from_copies() {
        let shared = Memory::from_pages(&Pages::from_heap(3 * MAX_BOUNCE / 2)).seg(0, 3 * MAX_BOUNCE / 2);
        let data = SgList::one(shared.clone());
        assert!(is_bounced(&data) && !is_bounced(&SgList::one(Seg::from_slice(b"own"))));
        let mut write = request(Op::Write { fua: false }, 4096, data.len() as u64);
        (write.data, write.bounce) = (data, Some(Memory::from_heap(MAX_BOUNCE).seg(0, MAX_BOUNCE)));
        shared.slice(MAX_BOUNCE, 4).copy_from(b"half");
        for (offset, len) in [(4096, MAX_BOUNCE), (4096 + MAX_BOUNCE as u64, MAX_BOUNCE / 2)] {
            let NextStep::Command(command, copy) = write.next_step(false) else { panic!("it has ended") };
            assert_eq!((command, copy.len()), (Command::Write { offset }, len));
            assert!(!is_bounced(&copy));
            if len < MAX_BOUNCE {
                assert_eq!(copy.slice(0, 4).to_vec(), b"half");
            }
            write.done += write.part;
        }
        assert!(matches!(write.next_step(false), NextStep::Done(Ok(Output::Nothing))));
    }
}
