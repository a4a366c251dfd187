//! The task of one queue: moves requests of the kernel to the volume, and results back.
//!
//! Data is copied by system calls when a request comes and when it is answered. A read of a RAM
//! volume is copied once, from the volume to the pages of the reader. A write waits while the core
//! has no buffer for its data. From Linux 6.16 on, volumes that take registered buffers get the
//! pages of the request themselves, and nothing is copied here.

use crate::core::reactor::{Progress, Task};
use crate::serve::channels::Channels;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::ublk::wire::IoDesc;
use blockmux_proto::ublk::{NewRequest, Reply, UblkQueue};
use blockmux_proto::volume_state::Origin;
use blockmux_volume::{Core, IoError, Seg, SgList, Waker};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tracing::{debug, warn};

/// The kernel's side of a queue.
pub(super) trait RequestPort {
    /// A tag whose command has completed, and what has come.
    fn poll(&self) -> Option<(u16, Arrival)>;

    /// The request of a tag.
    fn desc(&self, tag: u16) -> IoDesc;

    /// The buffer of the ring as which the pages of a request are registered until it is
    /// completed; `None` if they are not.
    fn registered(&self, tag: u16, desc: &IoDesc) -> Option<Seg>;

    /// Copies the data of a write, which may take until [`Arrival::Data`] comes; returns whether it
    /// is there.
    ///
    /// # Errors
    /// If the kernel has aborted the request.
    fn take_data(&self, tag: u16, data: &SgList) -> io::Result<bool>;

    /// Completes a request, with the data of a read, and asks for the next one with its tag.
    fn answer(&self, reply: Reply);

    /// Called after the answers of a turn.
    fn flush(&self) {}
}

/// What has come for a tag.
pub(super) enum Arrival {
    /// A request.
    Request,
    /// A request, and the kernel has taken back the one before it, which has no answer yet.
    Replacement,
    /// The data of a write.
    Data(SgList),
    /// The tag gets no further request, because the disk was removed or for this error.
    Closed(io::Error),
}

/// Serves a queue until the disk is removed.
pub(super) struct QueueTask<P, R> {
    port: P,
    queue: UblkQueue,
    channels: Channels,
    core: Rc<dyn Core>,
    waker: Waker,
    /// The volume takes registered buffers.
    takes_registered: bool,
    /// A write whose data was not copied yet, and its length in bytes.
    waiting: Option<(u16, usize)>,
    /// Tags that may get further requests.
    open_tags: u32,
    order: Arc<QueueOrder>,
    /// Dropping it gives the queue up.
    _registration: R,
}

/// What a queue serves.
pub(super) struct QueueVolume {
    pub(super) exports: Exports,
    pub(super) volume: VolumeId,
    /// Refuse writes.
    pub(super) read_only: bool,
    /// The volume takes the pages of requests as registered buffers.
    pub(super) takes_registered: bool,
    pub(super) origin: Origin,
}

/// What the tasks of a disk are to do: serve its queues, until one of these orders comes.
#[derive(Default)]
pub(super) struct QueueOrder(AtomicU8);

impl QueueOrder {
    /// The disk stays without this process: takes no further requests, and ends. The kernel sends
    /// those that are not answered to the next process.
    pub(super) fn leave(&self) {
        self.0.fetch_max(LEAVE, Ordering::Relaxed);
    }

    /// The disk is removed although requests are in flight: fails all, now and from now on.
    pub(super) fn fail(&self) {
        self.0.fetch_max(FAIL, Ordering::Relaxed);
    }

    fn now(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

const LEAVE: u8 = 1;
const FAIL: u8 = 2;

impl<P: RequestPort, R> QueueTask<P, R> {
    /// A task for a queue whose port was opened for `depth` tags; `None` if the volume was removed.
    pub(super) fn new(
        (port, registration): (P, R),
        depth: u16,
        serves: QueueVolume,
        (core, waker): (Rc<dyn Core>, &Waker),
        order: Arc<QueueOrder>,
    ) -> Option<QueueTask<P, R>> {
        let QueueVolume { exports, volume, read_only, takes_registered, origin } = serves;
        let queue = UblkQueue::new(&exports, volume, depth, read_only)?;
        let channels = Channels::new(exports, core.clone(), waker.clone(), origin);
        Some(QueueTask {
            port,
            queue,
            channels,
            core,
            waker: waker.clone(),
            takes_registered,
            waiting: None,
            open_tags: depth.into(),
            order,
            _registration: registration,
        })
    }

    /// Takes new requests, until so many bytes of writes were copied that other tasks get their
    /// turn, or until there is no buffer for a write.
    #[inline]
    fn take_requests(&mut self) -> Progress {
        let (mut budget, mut progress) = (COPIED_PER_TURN, Progress::Idle);
        loop {
            self.waiting = self.waiting.or_else(|| self.queue.poll_refused());
            if let Some((tag, len)) = self.waiting {
                if budget == 0 {
                    return Progress::More;
                }
                if !self.take_data(tag, len) {
                    return progress;
                }
                self.waiting = None;
                budget = budget.saturating_sub(len);
            }
            let Some((tag, arrival)) = self.port.poll() else { return progress };
            progress = Progress::Drained;
            match arrival {
                Arrival::Request => self.take(tag),
                Arrival::Replacement => {
                    self.queue.withdraw(tag);
                    self.take(tag);
                }
                Arrival::Data(data) => self.queue.on_data(tag, Ok(data)),
                Arrival::Closed(error) => self.close(tag, &error),
            }
        }
    }

    #[inline]
    fn take(&mut self, tag: u16) {
        let desc = self.port.desc(tag);
        let registered = if self.takes_registered { self.port.registered(tag, &desc) } else { None };
        if let NewRequest::NeedsData(len) = self.queue.on_request(tag, &desc, registered) {
            self.waiting = Some((tag, len));
        }
    }

    /// Takes the data of a write; returns `false` if there is no buffer for it now.
    #[inline]
    fn take_data(&mut self, tag: u16, len: usize) -> bool {
        let pool = self.core.pool();
        let data = match pool.take_payload(len) {
            None if pool.could_hold(len) => {
                self.core.wake_at(self.core.now() + MEMORY_RETRY, &self.waker);
                return false;
            }
            None => Err(IoError::NoMemory),
            Some(memory) => {
                let data = SgList::one(memory.seg(0, len));
                match self.port.take_data(tag, &data) {
                    Ok(true) => Ok(data),
                    // It comes later.
                    Ok(false) => return true,
                    Err(error) => {
                        debug!("the data of a write cannot be copied: {error}");
                        Err(IoError::Aborted)
                    }
                }
            }
        };
        self.queue.on_data(tag, data);
        true
    }

    /// Notes that a tag gets no further request.
    #[cold]
    fn close(&mut self, tag: u16, error: &io::Error) {
        self.open_tags = self.open_tags.saturating_sub(1);
        if error.raw_os_error() != Some(libc::ENODEV) {
            warn!("ublk refuses a command of tag {tag}: {error}; detach the disk");
        }
    }

    /// Sends answers; returns whether there were any.
    #[inline]
    fn send_replies(&mut self) -> bool {
        let mut has_sent = false;
        while let Some(reply) = self.queue.poll_reply() {
            self.port.answer(reply);
            has_sent = true;
        }
        self.port.flush();
        has_sent
    }

    /// Fails what is in flight: the disk is removed by force.
    #[cold]
    fn fail(&mut self) {
        self.queue.fail();
        self.waiting = None;
        self.channels.orphan(true);
    }
}

impl<P: RequestPort, R> Task for QueueTask<P, R> {
    #[inline]
    fn run(&mut self) -> Progress {
        let order = self.order.now();
        if order == FAIL {
            self.fail();
        }
        let taken = if order == LEAVE { Progress::Idle } else { self.take_requests() };
        let moved = self.channels.move_io(&mut self.queue, self.core.now());
        let sent = if self.send_replies() { Progress::Drained } else { Progress::Idle };
        if (self.open_tags == 0 || order == LEAVE) && self.channels.is_idle() {
            return Progress::Done;
        }
        let takes_refused = order != LEAVE && self.waiting.is_none() && self.queue.has_refused();
        let refused = if takes_refused { Progress::More } else { Progress::Idle };
        taken.max(moved).max(sent).max(refused)
    }
}

/// Bytes of writes that are copied in one turn, at memory bandwidth a fraction of a millisecond.
const COPIED_PER_TURN: usize = 2 << 20;
/// Delay until a write is tried again for which the core had no buffer.
const MEMORY_RETRY: Duration = Duration::from_micros(500);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::exports::Export;
    use blockmux_proto::ublk::MAX_BYTES;
    use blockmux_proto::ublk::wire::IoOp;
    use blockmux_volume::conformance::TestCore;
    use blockmux_volume::{DelayVolume, Delays, MemVolume, Memory, Pool, Volume};
    use std::cell::RefCell;
    use std::collections::VecDeque;

    const DEPTH: u16 = 8;
    const READ_TIME: Duration = Duration::from_millis(5);

    /// The kernel's side as a test sees it.
    #[derive(Default)]
    struct FakeKernel {
        arrived: RefCell<VecDeque<(u16, Arrival)>>,
        descs: RefCell<[IoDesc; DEPTH as usize]>,
        /// Data of each tag: of a write before the request, of a read after it.
        data: RefCell<[Vec<u8>; DEPTH as usize]>,
        committed: RefCell<Vec<(u16, i32)>>,
        aborts_copies: std::cell::Cell<bool>,
        copies_later: std::cell::Cell<bool>,
    }

    impl FakeKernel {
        fn request(&self, tag: u16, op: IoOp, start_sector: u64, nr_sectors: u32) {
            let desc = IoDesc { op_flags: op.0.into(), nr_sectors, start_sector, addr: 0 };
            self.descs.borrow_mut()[usize::from(tag)] = desc;
            self.arrived.borrow_mut().push_back((tag, Arrival::Request));
        }

        fn write(&self, tag: u16, start_sector: u64, data: Vec<u8>) {
            self.request(tag, IoOp::WRITE, start_sector, (data.len() / 512) as u32);
            self.data.borrow_mut()[usize::from(tag)] = data;
        }

        /// The disk was removed.
        fn remove(&self) {
            let closed = || Arrival::Closed(io::Error::from_raw_os_error(libc::ENODEV));
            self.arrived.borrow_mut().extend((0..DEPTH).map(|tag| (tag, closed())));
        }

        fn checked_copy(&self) -> io::Result<()> {
            if self.aborts_copies.get() { Err(io::Error::from_raw_os_error(libc::EINVAL)) } else { Ok(()) }
        }
    }

    impl RequestPort for Rc<FakeKernel> {
        fn poll(&self) -> Option<(u16, Arrival)> {
            self.arrived.borrow_mut().pop_front()
        }

        fn desc(&self, tag: u16) -> IoDesc {
            self.descs.borrow()[usize::from(tag)]
        }

        fn registered(&self, tag: u16, _desc: &IoDesc) -> Option<Seg> {
            Some(Memory::registered(tag, MAX_BYTES as usize).seg(0, MAX_BYTES as usize))
        }

        fn take_data(&self, tag: u16, data: &SgList) -> io::Result<bool> {
            self.checked_copy()?;
            data.copy_from(&self.data.borrow()[usize::from(tag)]);
            if self.copies_later.get() {
                self.arrived.borrow_mut().push_back((tag, Arrival::Data(data.clone())));
            }
            Ok(!self.copies_later.get())
        }

        fn answer(&self, Reply { tag, data, result }: Reply) {
            let copied = data.map(|data| {
                self.checked_copy()?;
                self.data.borrow_mut()[usize::from(tag)] = data.to_vec();
                io::Result::Ok(())
            });
            let result = if matches!(copied, Some(Err(_))) { -libc::EIO } else { result };
            self.committed.borrow_mut().push((tag, result));
        }
    }

    /// A queue of a disk of 8 MiB, whose reads take [`READ_TIME`].
    struct Attached {
        kernel: Rc<FakeKernel>,
        core: Rc<TestCore>,
        task: QueueTask<Rc<FakeKernel>, ()>,
        order: Arc<QueueOrder>,
    }

    impl Attached {
        fn new(core: Rc<TestCore>) -> Attached {
            let delays = Delays { read: READ_TIME, ..Delays::default() };
            let volume: Arc<dyn Volume> =
                Arc::new(DelayVolume::new(Arc::new(MemVolume::new(8 << 20)), delays));
            let export =
                Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
            let (kernel, order) = (Rc::new(FakeKernel::default()), Arc::<QueueOrder>::default());
            let origin = Origin { protocol: "ublk", listener: "ublkb0".into() };
            let exports = Exports::new(vec![export]);
            let takes_registered = false;
            let serves =
                QueueVolume { exports, volume: VolumeId(0), read_only: false, takes_registered, origin };
            let own = (core.as_core(), &Waker::idle());
            let task = QueueTask::new((kernel.clone(), ()), DEPTH, serves, own, order.clone()).unwrap();
            Attached { kernel, core, task, order }
        }

        /// Runs turns until there is nothing to do; returns what was committed.
        fn turns(&mut self) -> Vec<(u16, i32)> {
            while self.task.run() == Progress::More {}
            std::mem::take(&mut self.kernel.committed.borrow_mut())
        }

        fn turns_after(&mut self, time: Duration) -> Vec<(u16, i32)> {
            self.core.advance(time);
            self.turns()
        }
    }

    #[test]
    fn data_that_was_written_is_read() {
        let mut attached = Attached::new(TestCore::new());
        attached.kernel.write(0, 8, vec![7; 1024]);
        assert_eq!(attached.turns(), [(0, 1024)]);
        attached.kernel.request(1, IoOp::READ, 9, 2);
        assert_eq!(attached.turns(), []);
        assert_eq!(attached.turns_after(READ_TIME), [(1, 1024)]);
        let expected = [[7; 512], [0; 512]].concat();
        assert!(attached.kernel.data.borrow()[1] == expected);
    }

    #[test]
    fn data_whose_registered_buffer_the_volume_refuses_is_copied() {
        let mut attached = Attached::new(TestCore::new());
        attached.task.takes_registered = true;
        attached.kernel.write(0, 8, vec![7; 1024]);
        assert_eq!(attached.turns(), [(0, 1024)]);
        attached.kernel.request(1, IoOp::READ, 8, 2);
        assert_eq!(attached.turns(), []);
        // It is read twice.
        assert_eq!(attached.turns_after(READ_TIME), []);
        assert_eq!(attached.turns_after(READ_TIME), [(1, 1024)]);
        assert!(attached.kernel.data.borrow()[1] == [7; 1024]);
    }

    #[test]
    fn a_write_waits_for_data_that_comes_later() {
        let mut attached = Attached::new(TestCore::new());
        attached.task.takes_registered = false;
        attached.kernel.copies_later.set(true);
        attached.kernel.write(0, 8, vec![7; 1024]);
        assert_eq!(attached.turns(), [(0, 1024)]);
        attached.kernel.request(1, IoOp::READ, 9, 1);
        attached.turns();
        assert_eq!(attached.turns_after(READ_TIME), [(1, 512)]);
        assert!(attached.kernel.data.borrow()[1] == [7; 512]);
    }

    #[test]
    fn a_request_that_the_kernel_has_aborted_fails_alone() {
        let mut attached = Attached::new(TestCore::new());
        attached.kernel.aborts_copies.set(true);
        attached.kernel.write(0, 0, vec![1; 512]);
        attached.kernel.request(1, IoOp::READ, 0, 1);
        assert_eq!(attached.turns(), [(0, -libc::EIO)]);
        assert_eq!(attached.turns_after(READ_TIME), [(1, -libc::EIO)]);
        attached.kernel.request(2, IoOp::FLUSH, 0, 0);
        assert_eq!(attached.turns(), [(2, 0)]);
    }

    #[test]
    fn garbled_requests_are_answered_with_errors() {
        let mut attached = Attached::new(TestCore::new());
        for (tag, op, start, sectors) in [
            (0, IoOp(77), 0, 1),
            (1, IoOp::READ, u64::MAX, u32::MAX),
            (2, IoOp::WRITE, 0, u32::MAX),
            (3, IoOp::READ, 1 << 40, 1),
            (4, IoOp::DISCARD, u64::MAX / 512, u32::MAX),
        ] {
            attached.kernel.request(tag, op, start, sectors);
        }
        let mut failed = attached.turns();
        failed.extend(attached.turns_after(READ_TIME));
        assert_eq!(failed.len(), 5);
        assert!(failed.iter().all(|(_, result)| *result < 0), "{failed:?}");
    }

    #[test]
    fn writes_wait_for_buffers_and_none_is_lost() {
        // Buffers for one write of 1 MiB.
        let mut attached = Attached::new(TestCore::with_pool(&Pool::new(4 << 20)));
        let held = attached.core.as_core().pool().take_payload(2 << 20);
        for tag in 0..DEPTH {
            attached.kernel.write(tag, u64::from(tag) * 2048, vec![tag as u8 + 1; 1 << 20]);
        }
        let mut committed = attached.turns();
        drop(held);
        for _ in 0..DEPTH {
            committed.extend(attached.turns_after(MEMORY_RETRY));
        }
        committed.sort_unstable();
        assert_eq!(committed, (0..DEPTH).map(|tag| (tag, 1 << 20)).collect::<Vec<_>>());
    }

    #[test]
    fn a_removed_disk_ends_its_task_once_its_io_is_complete() {
        let mut attached = Attached::new(TestCore::new());
        attached.kernel.request(0, IoOp::READ, 0, 1);
        attached.turns();
        attached.kernel.remove();
        assert_ne!(attached.task.run(), Progress::Done);
        attached.core.advance(READ_TIME);
        assert_eq!(attached.task.run(), Progress::Done);
    }

    #[test]
    fn a_queue_that_is_left_answers_what_it_has_taken_and_nothing_else() {
        let mut attached = Attached::new(TestCore::new());
        attached.kernel.request(0, IoOp::READ, 0, 1);
        assert_eq!(attached.turns(), []);
        attached.order.leave();
        attached.kernel.write(1, 0, vec![1; 512]);
        assert_eq!(attached.turns(), []);
        attached.core.advance(READ_TIME);
        assert_eq!(attached.task.run(), Progress::Done);
        assert_eq!(attached.turns(), [(0, 512)]);
    }

    #[test]
    fn a_disk_that_is_removed_by_force_answers_what_is_in_flight() {
        let mut attached = Attached::new(TestCore::new());
        attached.kernel.request(0, IoOp::READ, 0, 1);
        attached.turns();
        attached.order.fail();
        attached.kernel.write(1, 0, vec![1; 512]);
        assert_eq!(attached.turns(), [(0, -libc::EIO), (1, -libc::EIO)]);
        attached.kernel.remove();
        attached.core.advance(READ_TIME);
        assert_eq!(attached.task.run(), Progress::Done);
    }
}
