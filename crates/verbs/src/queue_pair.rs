//! Queue pairs with their completion queue: work is posted, executed by the device, and completes.
//!
//! Work owns its memory: the segments of a work request are kept until it completes, and the memory
//! of a window until the window is invalid. What is left is kept until the queue pair is destroyed,
//! after which the device touches none of it. So no caller can free memory that the device uses.
//!
//! A *confined* queue pair, whose device opens memory to peers by registrations, names only memory
//! of its own in its work: data is copied there and back, and what it exposes to the peer was made
//! for that ([`QueuePair::expose`]). So the peer reaches the data of its own connection and no
//! other.
//!
//! All work is signalled, and completes in its order, except behind reads over siw. A window that
//! the peer does not invalidate is closed by freeing it, once its bind has been executed: that
//! takes effect before the call returns, which an invalidation as work of the queue does not.
//! (Besides, rxe crashes the kernel if a window is invalidated by both sides: Linux 6.12,
//! `rxe_do_invalidate_mw`.)
#![expect(unsafe_code, reason = "calls libibverbs, and hands addresses of memory to the device")]

use crate::abi::*;
use crate::async_event::{DeviceHandle, QueueIdentity};
use crate::completion_queue::{BATCH, CompletionQueue, NO_COMPLETION};
use crate::connection::Connection;
use crate::error::VerbsError;
use crate::memory::{Domain, DomainUse, Window};
use crate::window_state::{WindowState, WindowStep};
use blockmux_volume::{Memory, Pool, ProtectionDomain, Seg};
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;
use std::sync::Arc;

/// How much work a queue pair takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Messages, reads and writes that may be in flight.
    pub sends: u32,
    /// Receive buffers.
    pub receives: u32,
    /// Length of each in bytes.
    pub receive_len: u32,
    /// Memory windows.
    pub windows: u32,
}

/// A queue pair of a reliable connection, with its completion queue and its memory.
pub struct QueuePair {
    windows: Vec<BoundWindow>,
    completions: CompletionQueue,
    /// Work in flight, and free places for it.
    works: Vec<PostedWork>,
    free_works: Vec<u32>,
    /// Memory of the heads of messages, a part for each place of `works`.
    heads: Memory,
    receives: ReceiveRing,
    /// Buffers for memory that work cannot name.
    copies: Pool,
    max_segments: usize,
    max_inline: usize,
    /// The flag of a message that has invalidated a window.
    invalidated_flag: u32,
    /// Windows that were closed by this side, to be reported.
    closed: Vec<u32>,
    /// If it is confined.
    exposed: Option<ExposedMemory>,
    domain: Arc<Domain>,
    as_protection_domain: Arc<dyn ProtectionDomain>,
    connection: Connection,
}

/// Memory of a confined queue pair that the peer may reach.
struct ExposedMemory {
    domain: Arc<Domain>,
    as_protection_domain: Arc<dyn ProtectionDomain>,
    /// Buffers that RDMA Reads fill, which on iWARP devices the peer may write.
    copies: Pool,
    /// By their numbers.
    buffers: Vec<Option<Seg>>,
}

/// A work request in flight.
#[derive(Default)]
struct PostedWork {
    work: u64,
    kind: PostedKind,
    memory: Vec<Seg>,
    /// What the device fills instead of more segments than it can.
    gathered: Option<Seg>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum PostedKind {
    #[default]
    Transfer,
    /// The bind of this window.
    Bind(u32),
}

struct BoundWindow {
    /// `None` only while it is replaced.
    window: Option<Window>,
    state: WindowState,
    /// The memory that a peer may reach.
    memory: Option<Seg>,
}

impl BoundWindow {
    fn key(&self) -> u32 {
        self.window.as_ref().map_or(0, Window::key)
    }
}

/// What a peer may do with the memory of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAccess {
    /// RDMA Read.
    Read,
    /// RDMA Write.
    Write,
}

/// The peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Its address there.
    pub address: u64,
    /// Its remote key.
    pub key: u32,
}

/// Work that has completed, or a message that has arrived.
#[derive(Debug)]
pub enum Completion<'a> {
    /// A message, read or write.
    Done {
        /// As it was posted.
        work: u64,
        /// Its result.
        result: Result<(), WorkFailure>,
    },
    /// A message has arrived. Its buffer is used again after the call.
    Received {
        /// The message.
        message: &'a Seg,
        /// The key of the window that it has invalidated.
        invalidated: Option<u32>,
    },
    /// A window was closed by this side.
    Closed {
        /// Its number.
        window: u32,
        /// Its new key.
        key: u32,
    },
    /// A receive buffer or bind has failed: the queue pair is in the error state.
    Broken(WorkFailure),
}

/// Why work has failed. Each of them has put the queue pair into the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkFailure {
    /// This side has made a mistake.
    Local,
    /// A message of the peer was longer than its receive buffer.
    TooLong,
    /// The peer does not allow the access.
    RemoteAccess,
    /// The peer had no receive buffer.
    NoReceive,
    /// The peer does not answer.
    Unreachable,
    /// The queue pair was in the error state before.
    Flushed,
    /// Another status of `ibv_poll_cq(3)`.
    Other(u32),
}

impl QueuePair {
    /// Makes the queue pair of a connection whose device is known, with all receive buffers posted.
    ///
    /// # Errors
    /// If the device has no room for it.
    pub fn new(connection: Connection, sizes: QueueSizes) -> Result<QueuePair, VerbsError> {
        let shared = Domain::of(&connection.id)?;
        let (domain, exposed) = match DomainUse::of(shared, sizes.windows > 0)? {
            DomainUse::Shared(domain) => (domain, None),
            DomainUse::Confined { local, exposed } => (local, Some(ExposedMemory::new(exposed))),
        };
        let attributes = domain.attributes();
        let sends = sizes.sends.saturating_add(sizes.windows).saturating_add(RESERVE);
        let sends = sends.min(attributes.queue_depth);
        let receives = sizes.receives.max(1).min(attributes.queue_depth);
        let max_segments = (attributes.segments as usize).clamp(1, MAX_SEGMENTS);
        let completions = CompletionQueue::new(&domain, sends.saturating_add(receives))?;
        let max_inline = create_queue(&connection, &domain, &completions, (sends, receives), max_segments)?;
        let invalidated_flag = if attributes.has_kernel_flags { IBV_WC_IP_CSUM_OK } else { IBV_WC_WITH_INV };
        let mut queue_pair = QueuePair {
            windows: Vec::new(),
            completions,
            works: (0..sends).map(|_| PostedWork::default()).collect(),
            free_works: (0..sends).rev().collect(),
            heads: Memory::from_heap(sends as usize * HEAD_LEN),
            receives: ReceiveRing::new(receives, sizes.receive_len),
            copies: Pool::new(MAX_COPIES),
            max_segments,
            max_inline,
            invalidated_flag,
            closed: Vec::new(),
            as_protection_domain: domain.clone(),
            exposed,
            domain,
            connection,
        };
        let windows = if queue_pair.exposed.is_some() { 0 } else { sizes.windows };
        for _ in 0..windows {
            let window = Some(Window::new(&queue_pair.domain)?);
            queue_pair.windows.push(BoundWindow { window, state: WindowState::default(), memory: None });
        }
        queue_pair.receive(receives)?;
        Ok(queue_pair)
    }

    /// Whether the queue pair of a connection, whose device is known, opens memory to the peer by
    /// [`QueuePair::expose`], because the device has no memory windows, or needs registrations with
    /// remote rights anyway. Otherwise it does so by [`QueuePair::bind`].
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn is_confined(connection: &Connection) -> Result<bool, VerbsError> {
        Ok(Domain::of(&connection.id)?.is_confining())
    }

    /// The connection.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The device, with its events.
    ///
    /// # Errors
    /// If its events would block.
    pub fn device(&self) -> Result<DeviceHandle, VerbsError> {
        DeviceHandle::new(self.domain.open_device().clone())
    }

    /// By what events of the device name this queue pair.
    ///
    /// # Errors
    /// If the queue pair no longer exists.
    pub fn identity(&self) -> Result<QueueIdentity, VerbsError> {
        // SAFETY: the queue pair and its identifier are valid.
        let (queue_pair, port) = unsafe { ((*self.raw()?).qp_num, (*self.connection.id.raw()).port_num) };
        Ok(QueueIdentity { queue_pair, completion_queue: self.completions.queue.as_ptr().addr(), port })
    }

    /// The device's protection domain.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// The keys of the windows; a confined queue pair has none. The next key of a window differs in
    /// the low 8 bits only.
    pub fn window_keys(&self) -> impl Iterator<Item = u32> {
        self.windows.iter().map(BoundWindow::key)
    }

    /// Posts further receive buffers; those that the queue has no place for are posted when others
    /// are used.
    ///
    /// # Errors
    /// As `ibv_post_recv(3)`, and if memory cannot be registered.
    pub fn receive(&mut self, count: u32) -> Result<(), VerbsError> {
        self.receives.owed = self.receives.owed.saturating_add(count);
        self.post_receives()
    }

    fn post_receives(&mut self) -> Result<(), VerbsError> {
        while self.receives.owed > 0
            && let Some(place) = self.receives.free.pop()
        {
            let mut segment = segment_of(&self.receives.buffer(place), &self.as_protection_domain)?;
            let mut request = ibv_recv_wr {
                wr_id: RECEIVE | u64::from(place),
                next: null_mut(),
                sg_list: &raw mut segment,
                num_sge: 1,
            };
            let post = self.operations().post_recv.ok_or(NO_OPERATION)?;
            let mut bad = null_mut();
            // SAFETY: the queue pair is valid, and so is the request for the call; the buffer
            // stays until the queue pair is destroyed.
            let failed = unsafe { post(self.raw()?, &raw mut request, &raw mut bad) };
            VerbsError::check_number("ibv_post_recv", failed)?;
            self.receives.owed -= 1;
        }
        Ok(())
    }

    /// Sends a message: `head`, which is copied, and `payload`. On arrival it invalidates the
    /// peer's memory with the key `invalidate`.
    ///
    /// # Errors
    /// As `ibv_post_send(3)`, and if memory cannot be registered.
    pub fn send(
        &mut self,
        work: u64,
        head: &[u8],
        payload: &[Seg],
        invalidate: Option<u32>,
        is_solicited: bool,
    ) -> Result<(), VerbsError> {
        let mut request = request(if invalidate.is_some() { IBV_WR_SEND_WITH_INV } else { IBV_WR_SEND });
        request.invalidate_rkey = invalidate.unwrap_or(0);
        // From here rdma-core's siw takes it, up to version 65; others ignore it.
        request.wr.rkey = request.invalidate_rkey;
        if is_solicited {
            request.send_flags |= IBV_SEND_SOLICITED;
        }
        let place = self.take_place(work, PostedKind::Transfer)?;
        let head = self.head(place, head);
        let memory = &mut self.works[place as usize].memory;
        memory.extend(head);
        memory.extend(payload.iter().filter(|seg| !seg.is_empty()).cloned());
        let has_payload = !payload.iter().all(Seg::is_empty);
        if !is_reachable(memory, self.max_segments)? || (self.exposed.is_some() && has_payload) {
            let whole = gathered(memory, &self.copies);
            *memory = vec![whole];
        }
        self.post_place(place, request)
    }

    /// RDMA Read of the peer's memory into `local`.
    ///
    /// # Errors
    /// As `ibv_post_send(3)`, if memory cannot be registered, and if it may not be written.
    pub fn read(&mut self, work: u64, local: &[Seg], remote: RemoteMemory) -> Result<(), VerbsError> {
        if !local.iter().all(Seg::is_writable) {
            return Err(READ_ONLY);
        }
        let mut request = request(IBV_WR_RDMA_READ);
        request.wr = remote.into();
        is_reachable(local, self.max_segments)?;
        let place = self.take_place(work, PostedKind::Transfer)?;
        let max_segments = self.max_segments;
        let posted = &mut self.works[place as usize];
        posted.memory.extend(local.iter().filter(|seg| !seg.is_empty()).cloned());
        let copies = self.exposed.as_ref().map(|exposed| &exposed.copies);
        if !is_reachable(&posted.memory, max_segments)? || copies.is_some() {
            posted.gathered = Some(whole_for(&posted.memory, copies.unwrap_or(&self.copies)));
        }
        self.post_place(place, request)
    }

    /// RDMA Write of `local` to the peer's memory.
    ///
    /// # Errors
    /// As `ibv_post_send(3)`, and if memory cannot be registered.
    pub fn write(&mut self, work: u64, local: &[Seg], remote: RemoteMemory) -> Result<(), VerbsError> {
        let mut request = request(IBV_WR_RDMA_WRITE);
        request.wr = remote.into();
        let place = self.take_place(work, PostedKind::Transfer)?;
        let max_segments = self.max_segments;
        let memory = &mut self.works[place as usize].memory;
        memory.extend(local.iter().filter(|seg| !seg.is_empty()).cloned());
        if !is_reachable(memory, max_segments)? || self.exposed.is_some() {
            let whole = gathered(memory, &self.copies);
            *memory = vec![whole];
        }
        self.post_place(place, request)
    }

    /// Exposes `memory` to the peer of a confined queue pair, for RDMA Reads and Writes; returns
    /// its key. All of its block is exposed, until [`QueuePair::conceal`] or the end of the queue
    /// pair: it was made for this connection, and has never held data of another.
    ///
    /// # Errors
    /// If the memory cannot be registered, and if the queue pair is not confined.
    pub fn expose(&mut self, number: u32, memory: &Seg) -> Result<u32, VerbsError> {
        let exposed = self.exposed.as_mut().ok_or(NOT_CONFINED)?;
        let local = memory.local_key(&exposed.as_protection_domain).map_err(|_| NO_REGISTRATION)?;
        let region = exposed.domain.region(local).ok_or(NO_REGISTRATION)?;
        let index = number as usize;
        if exposed.buffers.len() <= index {
            exposed.buffers.resize(index + 1, None);
        }
        exposed.buffers[index] = Some(memory.clone());
        // SAFETY: the block keeps its region, and `memory` the block.
        Ok(unsafe { region.as_ref() }.rkey)
    }

    /// Ends what [`QueuePair::expose`] has begun, once the caller has dropped the memory, too.
    pub fn conceal(&mut self, number: u32) {
        let exposed = self.exposed.as_mut();
        if let Some(buffer) = exposed.and_then(|exposed| exposed.buffers.get_mut(number as usize)) {
            *buffer = None;
        }
    }

    /// Opens `memory` to the peer by a window that is not in use. The device does so before it
    /// executes work that is posted later. `key` is the window's key with new low 8 bits.
    ///
    /// # Errors
    /// As `ibv_post_send(3)`, if the memory cannot be registered, and if window and key do not fit.
    pub fn bind(
        &mut self,
        window: u32,
        key: u32,
        memory: &Seg,
        access: WindowAccess,
    ) -> Result<(), VerbsError> {
        if access == WindowAccess::Write && !memory.is_writable() {
            return Err(READ_ONLY);
        }
        let local = memory.local_key(&self.as_protection_domain).map_err(|_| NO_REGISTRATION)?;
        let region = self.domain.region(local).ok_or(NO_REGISTRATION)?;
        let bound = self.windows.get(window as usize).filter(|bound| bound.state.is_free());
        let raw = bound.and_then(|bound| bound.window.as_ref()).ok_or(WRONG_WINDOW)?;
        if raw.key() >> 8 != key >> 8 || raw.key() == key {
            return Err(WRONG_WINDOW);
        }
        let mut request = request(IBV_WR_BIND_MW);
        request.bind_mw = ibv_send_wr_bind_mw {
            mw: raw.window.as_ptr(),
            rkey: key,
            bind_info: ibv_mw_bind_info {
                mr: region.as_ptr(),
                addr: memory.as_ptr().addr() as u64,
                length: memory.len() as u64,
                mw_access_flags: match access {
                    WindowAccess::Read => IBV_ACCESS_REMOTE_READ,
                    WindowAccess::Write => IBV_ACCESS_REMOTE_WRITE,
                },
            },
        };
        let place = self.take_place(0, PostedKind::Bind(window))?;
        self.post_place(place, request)?;
        if let Some(bound) = self.windows.get_mut(window as usize) {
            bound.memory = Some(memory.clone());
            bound.state.on_bind();
            bound.window.iter_mut().for_each(|raw| raw.set_key(key));
        }
        Ok(())
    }

    /// Closes a window to the peer, at once if its bind has been executed; the peer may have closed
    /// it already. [`Completion::Closed`] follows, until which its memory is kept.
    ///
    /// # Errors
    /// As `ibv_dealloc_mw(3)` and `ibv_alloc_mw(3)`, and if there is no such window.
    pub fn close(&mut self, window: u32) -> Result<(), VerbsError> {
        let bound = self.windows.get_mut(window as usize).ok_or(WRONG_WINDOW)?;
        let step = bound.state.close();
        self.step(window, step)
    }

    fn step(&mut self, window: u32, step: WindowStep) -> Result<(), VerbsError> {
        match step {
            WindowStep::Nothing => {}
            WindowStep::Report => self.closed.push(window),
            WindowStep::Replace => self.replace(window)?,
        }
        Ok(())
    }

    /// Frees a window, and makes another in its place.
    fn replace(&mut self, window: u32) -> Result<(), VerbsError> {
        let bound = self.windows.get_mut(window as usize).ok_or(WRONG_WINDOW)?;
        bound.window.take().map_or(Ok(()), Window::free)?;
        bound.window = Some(Window::new(&self.domain)?);
        (bound.state, bound.memory) = (WindowState::default(), None);
        self.closed.push(window);
        Ok(())
    }

    /// Takes what has completed since the last call; returns whether anything has.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn poll(&mut self, mut take: impl FnMut(Completion<'_>)) -> Result<bool, VerbsError> {
        let mut has_any = false;
        loop {
            let mut found = [NO_COMPLETION; BATCH];
            let count = self.completions.poll(&mut found)?;
            for completion in &found[..count] {
                self.complete(completion, &mut take)?;
            }
            has_any |= count > 0;
            if count < BATCH {
                break;
            }
        }
        // Behind messages that have invalidated a window before it was closed.
        self.report_closed(&mut take);
        if has_any && self.receives.owed > 0 {
            self.post_receives()?;
        }
        Ok(has_any)
    }

    fn report_closed(&mut self, take: &mut impl FnMut(Completion<'_>)) {
        for window in self.closed.drain(..) {
            let key = self.windows.get(window as usize).map_or(0, BoundWindow::key);
            take(Completion::Closed { window, key });
        }
    }

    fn complete(
        &mut self,
        completion: &ibv_wc,
        take: &mut impl FnMut(Completion<'_>),
    ) -> Result<(), VerbsError> {
        let result = failure(completion.status);
        let place = completion.wr_id as u32;
        if completion.wr_id & RECEIVE != 0 {
            match result {
                Ok(()) => self.on_message(place, completion, take)?,
                Err(failure) => take(Completion::Broken(failure)),
            }
            self.receives.free.push(place);
            return Ok(());
        }
        let Some(posted) = self.works.get_mut(place as usize) else { return Ok(()) };
        let (work, kind) = (posted.work, posted.kind);
        if let (Some(gathered), Ok(())) = (posted.gathered.take(), result) {
            scatter(&gathered, &posted.memory);
        }
        posted.memory.clear();
        self.free_works.push(place);
        match (kind, result) {
            (PostedKind::Transfer, result) => take(Completion::Done { work, result }),
            (PostedKind::Bind(_), Err(failure)) => take(Completion::Broken(failure)),
            (PostedKind::Bind(window), Ok(())) => {
                let Some(bound) = self.windows.get_mut(window as usize) else { return Ok(()) };
                let step = bound.state.on_bound();
                self.step(window, step)?;
            }
        }
        Ok(())
    }

    fn on_message(
        &mut self,
        place: u32,
        completion: &ibv_wc,
        take: &mut impl FnMut(Completion<'_>),
    ) -> Result<(), VerbsError> {
        let has_invalidated = completion.wc_flags & self.invalidated_flag != 0;
        let invalidated = has_invalidated.then_some(completion.invalidated_rkey);
        if let Some(key) = invalidated
            && let Some((window, bound)) =
                (0_u32..).zip(&mut self.windows).find(|(_, bound)| bound.key() == key)
        {
            bound.memory = None;
            let step = bound.state.on_invalidated();
            self.step(window, step)?;
        }
        let len = (completion.byte_len as usize).min(self.receives.len);
        let message = self.receives.buffer(place).slice(0, len);
        take(Completion::Received { message: &message, invalidated });
        Ok(())
    }

    /// Has the completion descriptor become readable with the next completion. What has completed
    /// before this call notifies nobody, so [`QueuePair::poll`] has to be called once more before
    /// anybody waits.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn notify(&mut self) -> Result<(), VerbsError> {
        self.completions.notify()
    }

    /// The descriptor of [`QueuePair::notify`].
    #[must_use]
    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        self.completions.as_fd()
    }

    fn raw(&self) -> Result<*mut ibv_qp, VerbsError> {
        // SAFETY: the identifier is valid, and its queue pair was made by `new`.
        let raw = unsafe { (*self.connection.id.raw()).qp };
        if raw.is_null() { Err(NO_OPERATION) } else { Ok(raw) }
    }

    fn operations(&self) -> &ibv_context_ops {
        // SAFETY: the domain keeps the device open.
        unsafe { &(*self.domain.device().as_ptr()).ops }
    }

    fn take_place(&mut self, work: u64, kind: PostedKind) -> Result<u32, VerbsError> {
        let place = self.free_works.pop().ok_or(FULL)?;
        let posted = &mut self.works[place as usize];
        posted.memory.clear();
        (posted.work, posted.kind, posted.gathered) = (work, kind, None);
        Ok(place)
    }

    /// Memory with a copy of a message's head.
    fn head(&self, place: u32, head: &[u8]) -> Option<Seg> {
        if head.is_empty() {
            return None;
        }
        let memory = match head.len() <= HEAD_LEN {
            true => self.heads.seg(place as usize * HEAD_LEN, head.len()),
            false => Memory::from_heap(head.len()).seg(0, head.len()),
        };
        memory.copy_from(head);
        Some(memory)
    }

    /// Posts a signalled request with the memory of its place, which becomes free if that fails.
    fn post_place(&mut self, place: u32, request: ibv_send_wr) -> Result<(), VerbsError> {
        let posted = self.try_post_place(place, request);
        if posted.is_err() {
            self.works[place as usize].memory.clear();
            self.free_works.push(place);
        }
        posted
    }

    fn try_post_place(&mut self, place: u32, mut request: ibv_send_wr) -> Result<(), VerbsError> {
        let mut segments = [NO_SEGMENT; MAX_SEGMENTS];
        let posted = &self.works[place as usize];
        let memory = posted.gathered.as_ref().map_or(&posted.memory[..], std::slice::from_ref);
        let domain = match &self.exposed {
            Some(exposed) if request.opcode == IBV_WR_RDMA_READ => &exposed.as_protection_domain,
            _ => &self.as_protection_domain,
        };
        let mut len = 0;
        for (segment, memory) in segments.iter_mut().zip(memory) {
            *segment = segment_of(memory, domain)?;
            len += memory.len();
        }
        let copies = matches!(request.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_INV | IBV_WR_RDMA_WRITE);
        if copies && len > 0 && len <= self.max_inline {
            request.send_flags |= IBV_SEND_INLINE;
        }
        request.sg_list = segments.as_mut_ptr();
        request.num_sge = memory.len() as c_int;
        request.wr_id = place.into();
        request.send_flags |= IBV_SEND_SIGNALED;
        self.post(&mut request)
    }

    fn post(&mut self, request: &mut ibv_send_wr) -> Result<(), VerbsError> {
        let post = self.operations().post_send.ok_or(NO_OPERATION)?;
        let mut bad = null_mut();
        // SAFETY: the queue pair is valid, and so are the request and its segments for the call.
        // The memory is kept until its completion, or until the queue pair is destroyed.
        let failed = unsafe { post(self.raw()?, request, &raw mut bad) };
        VerbsError::check_number("ibv_post_send", failed)
    }
}

impl ExposedMemory {
    fn new(domain: Arc<Domain>) -> ExposedMemory {
        ExposedMemory {
            as_protection_domain: domain.clone(),
            domain,
            copies: Pool::new(MAX_COPIES),
            buffers: Vec::new(),
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let library = self.domain.library();
        // Binds that are still in the queue are flushed, so none opens a window that is freed, or
        // another one that has its number then. There may be no connection, or no longer.
        let _ = self.connection.disconnect();
        // A window that is bound holds its queue pair, for which rxe would wait in vain, and its
        // memory, which could not be deregistered. Freeing it ends the peer's access.
        let opened: Vec<_> = self.windows.drain(..).filter_map(|bound| bound.memory).collect();
        // SAFETY: destroyed once. Afterwards the device uses none of the memory, which is dropped
        // behind it, even if a window could not be freed: its key holds for this queue pair only.
        unsafe { (library.cm.rdma_destroy_qp)(self.connection.id.raw()) };
        drop(opened);
    }
}

/// Makes the queue pair in its identifier; returns how many bytes a request can have inline.
fn create_queue(
    connection: &Connection,
    domain: &Domain,
    completions: &CompletionQueue,
    (sends, receives): (u32, u32),
    max_segments: usize,
) -> Result<usize, VerbsError> {
    let library = domain.library();
    let mut attributes = ibv_qp_init_attr {
        qp_context: null_mut(),
        send_cq: completions.queue.as_ptr(),
        recv_cq: completions.queue.as_ptr(),
        srq: null_mut(),
        cap: ibv_qp_cap {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: max_segments as u32,
            max_recv_sge: 1,
            max_inline_data: INLINE_LEN,
        },
        qp_type: IBV_QPT_RC,
        sq_sig_all: 0,
    };
    let mut create = |max_inline_data| {
        attributes.cap.max_inline_data = max_inline_data;
        // SAFETY: all that the attributes name is valid and outlives the queue pair.
        let failed =
            unsafe { (library.cm.rdma_create_qp)(connection.id.raw(), domain.raw(), &raw mut attributes) };
        VerbsError::check_errno("rdma_create_qp", failed)
    };
    match create(INLINE_LEN) {
        Ok(()) => Ok(INLINE_LEN as usize),
        // Some devices have none.
        Err(_) => create(0).map(|()| 0),
    }
}

/// Memory of receive buffers.
struct ReceiveRing {
    memory: Memory,
    /// Length of each in bytes.
    len: usize,
    /// Buffers that are not posted.
    free: Vec<u32>,
    /// Buffers to post.
    owed: u32,
}

impl ReceiveRing {
    fn new(count: u32, len: u32) -> ReceiveRing {
        let len = (len as usize).max(1);
        let memory = Memory::from_heap(len * count as usize);
        ReceiveRing { memory, len, free: (0..count).rev().collect(), owed: 0 }
    }

    fn buffer(&self, place: u32) -> Seg {
        self.memory.seg(place as usize * self.len, self.len)
    }
}

fn request(opcode: u32) -> ibv_send_wr {
    ibv_send_wr {
        wr_id: 0,
        next: null_mut(),
        sg_list: null_mut(),
        num_sge: 0,
        opcode,
        send_flags: 0,
        invalidate_rkey: 0,
        wr: ibv_send_wr_rdma { remote_addr: 0, rkey: 0, _other_members: [0; 5] },
        _remote_srqn: 0,
        bind_mw: ibv_send_wr_bind_mw {
            mw: null_mut(),
            rkey: 0,
            bind_info: ibv_mw_bind_info { mr: null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
        },
    }
}

fn segment_of(memory: &Seg, domain: &Arc<dyn ProtectionDomain>) -> Result<ibv_sge, VerbsError> {
    let key = memory.local_key(domain).map_err(|_| NO_REGISTRATION)?;
    Ok(ibv_sge {
        addr: memory.as_ptr().addr() as u64,
        length: u32::try_from(memory.len()).map_err(|_| NO_REGISTRATION)?,
        lkey: key.0,
    })
}

/// Whether work can name the memory. RAM volumes are not registered: they have address space to
/// grow, which would be pinned, and would return no discarded pages.
fn is_reachable(memory: &[Seg], max_segments: usize) -> Result<bool, VerbsError> {
    if memory.iter().any(Seg::is_registered) {
        return Err(NO_REGISTRATION);
    }
    Ok(memory.len() <= max_segments && memory.iter().all(Seg::is_private))
}

/// One segment for the bytes of several. Buffers of the pool stay registered.
fn whole_for(memory: &[Seg], copies: &Pool) -> Seg {
    let len = memory.iter().map(Seg::len).sum();
    copies.take(len).unwrap_or_else(|| Memory::from_heap(len)).seg(0, len)
}

/// A copy in one segment.
fn gathered(memory: &[Seg], copies: &Pool) -> Seg {
    let whole = whole_for(memory, copies);
    let mut at = 0;
    for seg in memory {
        seg.copy_to_seg(&whole.slice(at, seg.len()));
        at += seg.len();
    }
    whole
}

fn scatter(whole: &Seg, memory: &[Seg]) {
    let mut at = 0;
    for seg in memory {
        whole.slice(at, seg.len()).copy_to_seg(seg);
        at += seg.len();
    }
}

fn failure(status: u32) -> Result<(), WorkFailure> {
    Err(match status {
        IBV_WC_SUCCESS => return Ok(()),
        IBV_WC_LOC_LEN_ERR => WorkFailure::TooLong,
        IBV_WC_LOC_QP_OP_ERR | IBV_WC_LOC_PROT_ERR | IBV_WC_MW_BIND_ERR => WorkFailure::Local,
        IBV_WC_WR_FLUSH_ERR => WorkFailure::Flushed,
        IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_OP_ERR => WorkFailure::RemoteAccess,
        IBV_WC_RETRY_EXC_ERR => WorkFailure::Unreachable,
        IBV_WC_RNR_RETRY_EXC_ERR => WorkFailure::NoReceive,
        other => WorkFailure::Other(other),
    })
}

impl From<RemoteMemory> for ibv_send_wr_rdma {
    fn from(remote: RemoteMemory) -> ibv_send_wr_rdma {
        ibv_send_wr_rdma { remote_addr: remote.address, rkey: remote.key, _other_members: [0; 5] }
    }
}

/// In `wr_id`: a receive buffer.
const RECEIVE: u64 = 1 << 63;
/// Segments of a work request; more are copied into one.
const MAX_SEGMENTS: usize = 16;
/// Bytes that a device copies from the request, where it can: a capsule of NVMe, a command of iSER.
const INLINE_LEN: u32 = 128;
/// Heads of this length have registered memory in advance.
const HEAD_LEN: usize = 256;
/// Places beside those of transfers and windows.
const RESERVE: u32 = 8;
/// Bytes of buffers for copies that stay registered; others are registered for one transfer.
const MAX_COPIES: usize = 16 << 20;

const NO_SEGMENT: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };

const NO_OPERATION: VerbsError = VerbsError::Unsupported("the device lacks a function of queue pairs");
const NO_REGISTRATION: VerbsError = VerbsError::Unsupported(
    "memory cannot be registered with the device; raise LimitMEMLOCK= of the service, or `ulimit -l`",
);
const READ_ONLY: VerbsError = VerbsError::Unsupported("the device may not write to memory that is read-only");
const WRONG_WINDOW: VerbsError = VerbsError::Unsupported("the memory window has another key or is in use");
const NOT_CONFINED: VerbsError = VerbsError::Unsupported("memory of this queue pair is opened by windows");
const FULL: VerbsError = VerbsError::Unsupported("the send queue is full");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathered_memory_is_scattered_in_the_same_order() {
        let pieces = [&b"abc"[..], b"", b"defg"].map(Seg::from_slice);
        let whole = gathered(&pieces, &Pool::new(1 << 20));
        assert_eq!(whole.to_vec(), b"abcdefg");
        let (first, second) = (Memory::from_heap(5).seg(0, 5), Memory::from_heap(2).seg(0, 2));
        scatter(&whole, &[first.clone(), second.clone()]);
        assert_eq!((first.to_vec(), second.to_vec()), (b"abcde".to_vec(), b"fg".to_vec()));
    }

    #[test]
    fn each_status_has_a_meaning() {
        assert_eq!(failure(IBV_WC_SUCCESS), Ok(()));
        assert_eq!(failure(IBV_WC_REM_ACCESS_ERR), Err(WorkFailure::RemoteAccess));
        assert_eq!(failure(IBV_WC_WR_FLUSH_ERR), Err(WorkFailure::Flushed));
        assert_eq!(failure(200), Err(WorkFailure::Other(200)));
    }

    #[test]
    fn receive_buffers_do_not_overlap() {
        let ring = ReceiveRing::new(3, 64);
        let starts: Vec<_> = (0..3).map(|place| ring.buffer(place).as_ptr().addr()).collect();
        assert_eq!([starts[1] - starts[0], starts[2] - starts[1]], [64, 64]);
        assert_eq!(ring.free.len(), 3);
    }
}
