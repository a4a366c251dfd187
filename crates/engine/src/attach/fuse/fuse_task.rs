//! The task of a mounted file system: moves requests of the kernel to volumes, and replies back.
//!
//! The kernel has one queue of requests for a file system, and wakes whoever waits for it; so one
//! core reads it. A request is received with the data of a write, whose length is not known before:
//! the task has a buffer for the longest one. Short data is copied to memory of its own length;
//! long data keeps the buffer.

use crate::core::reactor::{Progress, Task, WakeOnEvent};
use crate::core::ring::Registration;
use crate::serve::channels::Channels;
use crate::sys;
use blockmux_proto::fuse::{FuseQueue, HEAD_LEN, MAX_BYTES, MAX_MESSAGE, data_len};
use blockmux_volume::{Core, Memory, SgList, Waker};
use rustix::fd::{AsRawFd, OwnedFd};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::{debug, warn};

/// The kernel's side of a file system.
pub(super) trait FusePort {
    /// Receives a request: its first bytes to `head`, the others to `rest`.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, and `ENODEV` if the file system is unmounted.
    fn receive(&self, head: &mut [u8], rest: &SgList) -> io::Result<usize>;

    /// Sends a reply.
    ///
    /// # Errors
    /// If nobody waits for it any longer.
    fn reply(&self, head: &[u8], data: &SgList) -> io::Result<()>;

    /// Wakes the task at the next request.
    fn arm(&self);
}

/// The device of a mounted file system, opened without blocking.
pub(super) struct FuseDevice {
    device: OwnedFd,
    readiness: Rc<WakeOnEvent>,
    registration: Registration,
}

impl FuseDevice {
    pub(super) fn new(
        device: OwnedFd,
        (readiness, registration): (Rc<WakeOnEvent>, Registration),
    ) -> FuseDevice {
        FuseDevice { device, readiness, registration }
    }
}

impl FusePort for FuseDevice {
    #[inline]
    fn receive(&self, head: &mut [u8], rest: &SgList) -> io::Result<usize> {
        sys::read_message(self.device.as_raw_fd(), head, rest)
    }

    #[inline]
    fn reply(&self, head: &[u8], data: &SgList) -> io::Result<()> {
        sys::write_message(self.device.as_raw_fd(), head, data).map(drop)
    }

    fn arm(&self) {
        self.readiness.arm(&self.registration, self.device.as_raw_fd(), libc::POLLIN, 0);
    }
}

impl Drop for FuseDevice {
    fn drop(&mut self) {
        self.readiness.disarm(&self.registration);
    }
}

/// What the task of a file system is to do, set by any thread that then wakes it.
#[derive(Default)]
pub(super) struct FuseOrders {
    /// The file system is given up although it is in use.
    pub(super) fails: AtomicBool,
    /// A volume may have another size.
    pub(super) has_new_size: AtomicBool,
}

/// Serves a file system until it is unmounted.
pub(super) struct FuseTask<P, G: FnMut()> {
    /// `None` once the file system is unmounted, or given up.
    port: Option<P>,
    queue: FuseQueue,
    channels: Channels,
    core: Rc<dyn Core>,
    waker: Waker,
    /// What is received after the head of a request.
    buffer: Option<Memory>,
    head: [u8; HEAD_LEN],
    /// Length of the data of a received write for which there was no memory, in bytes.
    waiting: Option<usize>,
    /// There was no memory: the timer wakes the task.
    lacks_memory: bool,
    orders: Arc<FuseOrders>,
    /// Called when the file system is unmounted.
    on_gone: G,
}

impl<P: FusePort, G: FnMut()> FuseTask<P, G> {
    pub(super) fn new(
        port: P,
        (queue, channels): (FuseQueue, Channels),
        (core, waker): (Rc<dyn Core>, &Waker),
        orders: Arc<FuseOrders>,
        on_gone: G,
    ) -> FuseTask<P, G> {
        FuseTask {
            port: Some(port),
            queue,
            channels,
            core,
            waker: waker.clone(),
            buffer: None,
            head: [0; HEAD_LEN],
            waiting: None,
            lacks_memory: false,
            orders,
            on_gone,
        }
    }

    /// Takes requests, until so many bytes of writes have come that other tasks get their turn, or
    /// until there is no memory.
    #[inline]
    fn take_requests(&mut self) -> Progress {
        let (mut budget, mut progress) = (COPIED_PER_TURN, Progress::Idle);
        self.lacks_memory = false;
        while self.queue.has_room() {
            if budget == 0 {
                return Progress::More;
            }
            if self.waiting.is_none() {
                let Some(len) = self.receive() else { return progress };
                progress = Progress::Drained;
                match data_len(&self.head[..len.min(HEAD_LEN)]) {
                    Some(data_len) if HEAD_LEN + data_len == len => self.waiting = Some(data_len),
                    _ => self.take_message(len),
                }
            }
            if let Some(len) = self.waiting {
                let Some(data) = self.take_data(len) else { return progress };
                self.waiting = None;
                self.queue.on_request(&self.head, Some(data));
                budget = budget.saturating_sub(len);
            }
        }
        progress
    }

    /// Receives a request; `None` if there is none, or no buffer for it. Returns its length.
    #[inline]
    fn receive(&mut self) -> Option<usize> {
        loop {
            let port = self.port.as_ref()?;
            if self.buffer.is_none() {
                self.buffer = self.core.pool().take_payload(MAX_BYTES as usize);
            }
            let Some(buffer) = &self.buffer else { return self.retry_later() };
            match port.receive(&mut self.head, &buffer.seg(0, MAX_BYTES as usize).into()) {
                Ok(len) => return Some(len),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return None,
                    // The process that waited for it was killed.
                    Some(libc::ENOENT | libc::EINTR) => {}
                    _ => return self.close(&error),
                },
            }
        }
    }

    /// Handles a request without data.
    fn take_message(&mut self, len: usize) {
        let mut message = [0; MAX_MESSAGE];
        message[..HEAD_LEN].copy_from_slice(&self.head);
        let rest = len.saturating_sub(HEAD_LEN).min(MAX_MESSAGE - HEAD_LEN);
        if let Some(buffer) = &self.buffer {
            buffer.seg(0, rest).copy_to(&mut message[HEAD_LEN..HEAD_LEN + rest]);
        }
        self.queue.on_request(&message[..len.min(HEAD_LEN + rest)], None);
    }

    /// The received data of a write; `None` if there is no memory to copy it to.
    #[inline]
    fn take_data(&mut self, len: usize) -> Option<SgList> {
        let data = self.buffer.as_ref()?.seg(0, len.min(MAX_BYTES as usize));
        if len >= KEEPS_BUFFER {
            self.buffer = None;
            return Some(data.into());
        }
        let Some(memory) = self.core.pool().take_payload(len) else { return self.retry_later() };
        let copy = SgList::one(memory.seg(0, len));
        SgList::one(data).copy_to_list(&copy);
        Some(copy)
    }

    #[cold]
    fn retry_later<T>(&mut self) -> Option<T> {
        self.lacks_memory = true;
        self.core.wake_at(self.core.now() + MEMORY_RETRY, &self.waker);
        None
    }

    /// Sends replies; returns whether there were any.
    #[inline]
    fn send_replies(&mut self) -> bool {
        let mut has_sent = false;
        while let Some(reply) = self.queue.poll_reply() {
            let Some(port) = &self.port else { continue };
            let none = SgList::default();
            if let Err(error) = port.reply(reply.head(), reply.data.as_ref().unwrap_or(&none)) {
                debug!("nobody takes a reply of the file system: {error}");
            }
            has_sent = true;
        }
        has_sent
    }

    /// The kernel sends no more requests, or gets no more replies.
    #[cold]
    fn close(&mut self, error: &io::Error) -> Option<usize> {
        if error.raw_os_error() != Some(libc::ENODEV) {
            warn!("the file system ends: {error}");
        }
        (self.port, self.buffer, self.waiting) = (None, None, None);
        self.queue.close();
        (self.on_gone)();
        None
    }
}

impl<P: FusePort, G: FnMut()> Task for FuseTask<P, G> {
    #[inline]
    fn run(&mut self) -> Progress {
        if self.port.is_some() && self.orders.fails.load(Ordering::Relaxed) {
            self.close(&io::Error::from_raw_os_error(libc::ENODEV));
        }
        let sizes = &self.orders.has_new_size;
        // A turn without news only reads it. It is cleared before the sizes are read.
        if sizes.load(Ordering::Relaxed) && sizes.swap(false, Ordering::Acquire) {
            self.queue.refresh_sizes();
        }
        let taken = self.take_requests();
        if self.port.is_none() {
            self.channels.orphan(true);
        }
        let moved = self.channels.move_io(&mut self.queue, self.core.now());
        let sent = if self.send_replies() { Progress::Drained } else { Progress::Idle };
        if self.port.is_none() && self.channels.is_idle() {
            return Progress::Done;
        }
        taken.max(moved).max(sent)
    }

    fn is_polled(&self) -> bool {
        self.port.is_some()
    }

    fn park(&mut self) {
        // Else a completion or the timer wakes the task.
        let takes_requests = self.queue.has_room() && !self.lacks_memory;
        if let Some(port) = self.port.as_ref().filter(|_| takes_requests) {
            self.buffer = None;
            port.arm();
        }
    }
}

/// Data of at least this many bytes keeps the buffer that it was received to.
const KEEPS_BUFFER: usize = 256 << 10;
/// Bytes of writes that are taken in one turn, at memory bandwidth a fraction of a millisecond.
const COPIED_PER_TURN: usize = 2 << 20;
/// Delay until memory is tried again.
const MEMORY_RETRY: Duration = Duration::from_micros(500);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::exports::{Export, Exports, VolumeId};
    use blockmux_proto::fuse::wire::{InHeader, Opcode, OutHeader, RangeIn};
    use blockmux_proto::fuse::{FileAccess, FuseFile, FuseLimits};
    use blockmux_proto::volume_state::Origin;
    use blockmux_volume::conformance::TestCore;
    use blockmux_volume::{DelayVolume, Delays, MemVolume, Pool, Volume};
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;
    use zerocopy::{FromBytes, IntoBytes};

    const LIMITS: FuseLimits = FuseLimits { depth: 4, page_size: 4096 };
    const READ_TIME: Duration = Duration::from_millis(5);

    /// The kernel's side as a test sees it.
    #[derive(Default)]
    struct FakeKernel {
        requests: RefCell<VecDeque<Vec<u8>>>,
        /// Error, identifier and data of each reply.
        replies: RefCell<Vec<(i32, u64, Vec<u8>)>>,
        is_unmounted: Cell<bool>,
    }

    impl FakeKernel {
        fn request(&self, unique: u64, opcode: Opcode, offset: u64, size: usize, data: &[u8]) {
            let header = InHeader { opcode: opcode.0, unique, nodeid: 2, ..InHeader::default() };
            let range = RangeIn { offset, size: size as u32, ..RangeIn::default() };
            let request = [header.as_bytes(), range.as_bytes(), data].concat();
            self.requests.borrow_mut().push_back(request);
        }

        fn read(&self, unique: u64, offset: u64, size: usize) {
            self.request(unique, Opcode::FUSE_READ, offset, size, &[]);
        }

        fn write(&self, unique: u64, offset: u64, data: &[u8]) {
            self.request(unique, Opcode::FUSE_WRITE, offset, data.len(), data);
        }
    }

    impl FusePort for Rc<FakeKernel> {
        fn receive(&self, head: &mut [u8], rest: &SgList) -> io::Result<usize> {
            if self.is_unmounted.get() {
                return Err(io::Error::from_raw_os_error(libc::ENODEV));
            }
            let request = self.requests.borrow_mut().pop_front().ok_or(io::ErrorKind::WouldBlock);
            let request = request.map_err(|_| io::Error::from_raw_os_error(libc::EAGAIN))?;
            let (start, end) = request.split_at(request.len().min(head.len()));
            head[..start.len()].copy_from_slice(start);
            rest.copy_from(end);
            Ok(request.len())
        }

        fn reply(&self, head: &[u8], data: &SgList) -> io::Result<()> {
            let (header, body) = OutHeader::read_from_prefix(head).unwrap();
            let bytes = [body, &data.to_vec()].concat();
            self.replies.borrow_mut().push((header.error, header.unique, bytes));
            Ok(())
        }

        fn arm(&self) {}
    }

    type FileTask = FuseTask<Rc<FakeKernel>, Box<dyn FnMut()>>;

    /// A file of 8 MiB, whose reads take [`READ_TIME`].
    struct Mounted {
        kernel: Rc<FakeKernel>,
        core: Rc<TestCore>,
        task: FileTask,
        orders: Arc<FuseOrders>,
        has_told: Rc<Cell<bool>>,
    }

    impl Mounted {
        fn new(core: Rc<TestCore>) -> Mounted {
            let delays = Delays { read: READ_TIME, ..Delays::default() };
            let volume: Arc<dyn Volume> =
                Arc::new(DelayVolume::new(Arc::new(MemVolume::new(8 << 20)), delays));
            let info = volume.info();
            let export =
                Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
            let exports = Exports::new(vec![export]);
            let files = vec![FuseFile { name: "a".to_owned(), volume: VolumeId(0), info }];
            let access = FileAccess { uid: 0, gid: 0, time_s: 0 };
            let queue = FuseQueue::new(&exports, files, access, LIMITS).unwrap();
            let origin = Origin { protocol: "fuse", listener: "/mnt".into() };
            let channels = Channels::new(exports, core.as_core(), Waker::idle(), origin);
            let (kernel, orders) = (Rc::new(FakeKernel::default()), Arc::<FuseOrders>::default());
            let has_told = Rc::new(Cell::new(false));
            let told = has_told.clone();
            let on_gone: Box<dyn FnMut()> = Box::new(move || told.set(true));
            let own = (core.as_core(), &Waker::idle());
            let task = FuseTask::new(kernel.clone(), (queue, channels), own, orders.clone(), on_gone);
            Mounted { kernel, core, task, orders, has_told }
        }

        /// Runs turns until there is nothing to do; returns the replies.
        fn turns(&mut self) -> Vec<(i32, u64, Vec<u8>)> {
            while self.task.run() == Progress::More {}
            std::mem::take(&mut self.kernel.replies.borrow_mut())
        }
    }

    fn written(unique: u64, len: usize) -> (i32, u64, Vec<u8>) {
        (0, unique, (len as u64).to_ne_bytes().to_vec())
    }

    #[test]
    fn data_that_was_written_is_read() {
        for len in [1, 4096, KEEPS_BUFFER - 1, KEEPS_BUFFER, 1 << 20] {
            let mut mounted = Mounted::new(TestCore::new());
            let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            mounted.kernel.write(1, 512, &data);
            let mut replies = mounted.turns();
            mounted.core.advance(READ_TIME);
            replies.extend(mounted.turns());
            mounted.core.advance(READ_TIME);
            replies.extend(mounted.turns());
            assert_eq!(replies, [written(1, len)], "{len}");
            mounted.kernel.read(2, 512, len);
            assert_eq!(mounted.turns(), []);
            mounted.core.advance(READ_TIME);
            assert!(mounted.turns() == [(0, 2, data)], "{len}");
        }
    }

    #[test]
    fn names_are_found_behind_the_head_of_a_request() {
        let mut mounted = Mounted::new(TestCore::new());
        let name = [&[b'x'; 200][..], &[0]].concat();
        let header = InHeader { opcode: 1, unique: 7, nodeid: 1, ..InHeader::default() };
        mounted.kernel.requests.borrow_mut().push_back([header.as_bytes(), &name].concat());
        mounted.kernel.requests.borrow_mut().push_back([header.as_bytes(), b"a\0"].concat());
        let replies = mounted.turns();
        assert_eq!((replies[0].0, replies[0].1), (-libc::ENOENT, 7));
        assert_eq!((replies[1].0, replies[1].2.len()), (0, 128));
    }

    #[test]
    fn the_kernel_keeps_requests_for_which_there_is_no_room() {
        let mut mounted = Mounted::new(TestCore::new());
        (0..6).for_each(|unique| mounted.kernel.read(unique, 0, 512));
        mounted.turns();
        assert_eq!(mounted.kernel.requests.borrow().len(), 2);
        mounted.core.advance(READ_TIME);
        assert_eq!(mounted.turns().len(), 4);
        mounted.turns();
        assert!(mounted.kernel.requests.borrow().is_empty());
        mounted.core.advance(READ_TIME);
        assert_eq!(mounted.turns().len(), 2);
    }

    #[test]
    fn writes_wait_for_memory_and_none_is_lost() {
        // Memory for the buffer and little more.
        let mut mounted = Mounted::new(TestCore::with_pool(&Pool::new(4 << 20)));
        let held = mounted.core.as_core().pool().take_payload(2 << 20);
        for unique in 0..8 {
            mounted.kernel.write(unique, unique << 20, &vec![unique as u8 + 1; 1 << 20]);
        }
        let mut replies = mounted.turns();
        drop(held);
        for _ in 0..8 {
            mounted.core.advance(MEMORY_RETRY);
            replies.extend(mounted.turns());
        }
        assert_eq!(replies, (0..8).map(|unique| written(unique, 1 << 20)).collect::<Vec<_>>());
    }

    #[test]
    fn the_task_of_an_unmounted_file_system_ends_once_its_io_is_complete() {
        for by_force in [false, true] {
            let mut mounted = Mounted::new(TestCore::new());
            mounted.kernel.read(1, 0, 512);
            mounted.turns();
            mounted.kernel.is_unmounted.set(!by_force);
            mounted.orders.fails.store(by_force, Ordering::Relaxed);
            assert!(!mounted.has_told.get());
            // The volume may end a canceled read at once.
            let is_done = mounted.task.run() == Progress::Done;
            assert!(mounted.has_told.get());
            mounted.core.advance(READ_TIME);
            assert!(is_done || mounted.task.run() == Progress::Done);
            assert_eq!(mounted.turns(), [], "nobody takes a reply");
        }
    }
}
