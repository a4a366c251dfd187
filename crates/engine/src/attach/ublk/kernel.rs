//! The calls to the ublk driver that name memory: commands in rings, descriptors of requests in
//! shared memory, and copies of their data.
//!
//! Data is copied in one of two ways. A device of root lets the server do it by `pread` and
//! `pwrite` on the device. The driver does it for a device of another user, so that the user can
//! read no memory of the kernel: a command has the address. The driver copies on the thread that
//! serves the queue: the data of a read while the command is submitted, that of a write (before
//! Linux 6.16) by the time that the command completes.
#![expect(unsafe_code, reason = "the one module of attached disks that gives addresses to the kernel")]

use super::announced_writes::{AnnouncedWrites, AnswerTime, CompletionMeaning};
use super::queue_task::{Arrival, RequestPort};
use crate::core::buffer_table::BufferEntries;
use crate::core::reactor::EngineCore;
use crate::core::ring::{Completer, Registration};
use blockmux_proto::ublk::wire::{
    ControlOp, CtrlCmd, Features, IoCmd, IoDesc, IoOp, QueueOp, UBLK_IO_F_NEED_REG_BUF,
    UBLK_IO_RES_NEED_GET_DATA, UBLK_MAX_QUEUE_DEPTH, auto_buf_reg, data_position, descs_position,
};
use blockmux_proto::ublk::{MAX_BYTES, Reply};
use blockmux_volume::{Memory, Seg, SgList, Waker};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::param::page_size;
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use tracing::debug;
use zerocopy::{FromBytes, IntoBytes};

/// The ring for control commands, whose entries are longer than those of a core's ring.
pub(super) struct ControlRing {
    uring: IoUring<squeue::Entry128>,
    control: File,
}

impl ControlRing {
    /// A ring for the calling thread.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub(super) fn new(control: File) -> io::Result<ControlRing> {
        let uring = IoUring::<squeue::Entry128>::builder().build(4)?;
        Ok(ControlRing { uring, control })
    }

    /// Executes a command and waits for it, however long it takes. Its buffer is read and written.
    ///
    /// # Errors
    /// As the command; of the kind `Other` if the ring fails, which then cannot be used again.
    pub(super) fn execute(
        &mut self,
        op: ControlOp,
        command: CtrlCmd,
        buffer: Vec<u8>,
    ) -> io::Result<Vec<u8>> {
        let mut buffer = std::mem::ManuallyDrop::new(buffer);
        let len = u16::try_from(buffer.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let addr = if len == 0 { 0 } else { buffer.as_mut_ptr() as u64 };
        let mut bytes = [0; 80];
        let command = CtrlCmd { addr, len, ..command };
        bytes[..size_of::<CtrlCmd>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.control.as_raw_fd()), op.0).cmd(bytes).build();
        // SAFETY: the buffer is dropped only after the entry has completed.
        unsafe { self.uring.submission().push(&entry) }.map_err(io::Error::other)?;
        loop {
            match self.uring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(io::Error::other(error));
                }
                _ => {}
            }
            let Some(done) = self.uring.completion().next() else { continue };
            let buffer = std::mem::ManuallyDrop::into_inner(buffer);
            return match done.result() {
                result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                _ => Ok(buffer),
            };
        }
    }
}

/// One queue of a device: its commands in a core's ring, and the memory that describes its
/// requests.
pub(super) struct QueueRing {
    device: Arc<File>,
    queue: u16,
    descs: Descs,
    data: DataWay,
    /// Tags whose command has completed, with its result.
    arrived: RefCell<VecDeque<(u16, i32)>>,
    waker: Waker,
    /// Weak, because the core's ring owns this object and the registration owns the core's ring.
    registration: OnceCell<Weak<Registration>>,
}

impl QueueRing {
    /// Maps the queue's descriptors, and asks for the first request of each of its `depth` tags.
    /// The device has `features`.
    ///
    /// # Errors
    /// If the memory cannot be mapped.
    pub(super) fn open(
        core: &EngineCore,
        device: &Arc<File>,
        (queue, depth): (u16, u16),
        features: Features,
        waker: &Waker,
    ) -> io::Result<(Rc<QueueRing>, Rc<Registration>)> {
        let ring = Rc::new(QueueRing {
            device: device.clone(),
            queue,
            descs: Descs::map(device, queue, depth)?,
            data: DataWay::of(features, core, depth),
            arrived: RefCell::new(VecDeque::with_capacity(depth.into())),
            waker: waker.clone(),
            registration: OnceCell::new(),
        });
        let registration = Rc::new(core.register(ring.clone()));
        ring.registration.get_or_init(|| Rc::downgrade(&registration));
        let credentials = core.kept_credentials();
        for tag in 0..depth {
            let fetch = ring.command(QueueOp::FETCH_REQ, tag, 0, None);
            // The kernel looks for partitions only if those who serve the disk may administer it.
            let fetch = credentials.map_or(fetch.clone(), |own| fetch.personality(own));
            ring.push_entry(fetch, tag);
        }
        Ok((ring, registration))
    }

    /// Pushes a command. The driver copies to or from the first segment of `data`, as much as the
    /// request or `result` says. The caller keeps that memory for as long as the driver may copy.
    #[inline]
    fn push(&self, op: QueueOp, tag: u16, result: i32, data: Option<&SgList>) {
        self.push_entry(self.command(op, tag, result, data), tag);
    }

    #[inline]
    fn command(&self, op: QueueOp, tag: u16, result: i32, data: Option<&SgList>) -> squeue::Entry {
        let addr = data.and_then(|data| data.segs().first()).map_or(0, |seg| seg.as_ptr() as u64);
        let command = IoCmd { q_id: self.queue, tag, result, addr };
        let command: [u8; 16] = zerocopy::transmute!(command);
        let fd = types::Fd(self.device.as_raw_fd());
        let buffer = self.data.buffers().map(|buffers| auto_buf_reg(buffers.index(tag)));
        opcode::UringCmd16::new(fd, op.0).cmd(command).addr(buffer).build()
    }

    /// Pushes a command of a tag.
    #[inline]
    fn push_entry(&self, entry: squeue::Entry, tag: u16) {
        let Some(registration) = self.registration.get().and_then(Weak::upgrade) else { return };
        // SAFETY: this object, which owns the descriptor, is the completer of `registration`. The
        // driver copies on this thread only, and the memory is one of `CommandData` until then.
        unsafe { registration.push_command(entry, tag.into()) }
    }
}

impl RequestPort for Rc<QueueRing> {
    #[inline]
    fn poll(&self) -> Option<(u16, Arrival)> {
        loop {
            let (tag, result) = self.arrived.borrow_mut().pop_front()?;
            if result < 0 {
                return Some((tag, Arrival::Closed(io::Error::from_raw_os_error(-result))));
            }
            match &self.data {
                DataWay::ByCall { .. } => return Some((tag, Arrival::Request)),
                DataWay::ByCommand(data) => {
                    if let Some(arrival) = data.on_completion(self, tag, result) {
                        return Some((tag, arrival));
                    }
                }
            }
        }
    }

    #[inline]
    fn desc(&self, tag: u16) -> IoDesc {
        self.descs.read(tag)
    }

    #[inline]
    fn registered(&self, tag: u16, desc: &IoDesc) -> Option<Seg> {
        let buffers = self.data.buffers().filter(|_| !desc.has(UBLK_IO_F_NEED_REG_BUF))?;
        buffers.memory.get(usize::from(tag)).map(|memory| memory.seg(0, memory.len()))
    }

    #[inline]
    fn take_data(&self, tag: u16, data: &SgList) -> io::Result<bool> {
        match &self.data {
            DataWay::ByCall { .. } => self.copy(tag, data, CopyDirection::FromRequest).map(|()| true),
            DataWay::ByCommand(by_command) => {
                by_command.fetch(self, tag, data)?;
                Ok(false)
            }
        }
    }

    #[inline]
    fn answer(&self, Reply { tag, data, result }: Reply) {
        match (&self.data, data) {
            (DataWay::ByCall { .. }, None) => self.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, result, None),
            (DataWay::ByCall { .. }, Some(data)) => {
                let copied = self.copy(tag, &data, CopyDirection::ToRequest);
                let result = copied.map_or_else(
                    |error| {
                        debug!("the data of a read cannot be copied: {error}");
                        -libc::EIO
                    },
                    |()| result,
                );
                self.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, result, None);
            }
            (DataWay::ByCommand(by_command), data) => by_command.answer(self, tag, data, result),
        }
    }

    fn flush(&self) {
        if let DataWay::ByCommand(by_command) = &self.data {
            by_command.flush(self);
        }
    }
}

#[derive(Clone, Copy)]
enum CopyDirection {
    FromRequest,
    ToRequest,
}

impl QueueRing {
    /// Copies the data of a request. The call never waits for I/O, so it needs no ring.
    #[inline]
    fn copy(&self, tag: u16, data: &SgList, direction: CopyDirection) -> io::Result<()> {
        let mut at = data_position(self.queue, tag);
        for seg in data.segs() {
            let mut done = 0;
            while done < seg.len() {
                let (fd, position) = (self.device.as_raw_fd(), at as libc::off_t);
                let (start, len) = (seg.as_ptr().wrapping_add(done).cast(), seg.len() - done);
                // SAFETY: the segment lives during the call. The driver writes to it only in
                // `FromRequest`, for which the caller has allocated it.
                let copied = unsafe {
                    match direction {
                        CopyDirection::FromRequest => libc::pread(fd, start, len, position),
                        CopyDirection::ToRequest => libc::pwrite(fd, start, len, position),
                    }
                };
                match usize::try_from(copied) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(copied) => (done, at) = (done + copied, at + copied as u64),
                    Err(_) => {
                        let error = io::Error::last_os_error();
                        if error.kind() != io::ErrorKind::Interrupted {
                            return Err(error);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl Completer for QueueRing {
    #[inline]
    fn complete(&self, token: u32, result: i32) {
        if let Ok(tag) = u16::try_from(token) {
            self.arrived.borrow_mut().push_back((tag, result));
            self.waker.wake();
        }
    }
}

/// How the data of requests is moved.
enum DataWay {
    /// By calls of this process, unless the pages are registered with its ring.
    ByCall {
        /// Set if the driver registers them.
        buffers: Option<RequestBuffers>,
    },
    /// By the driver, as part of commands.
    ByCommand(CommandData),
}

impl DataWay {
    fn of(features: Features, core: &EngineCore, depth: u16) -> DataWay {
        if features.contains(Features::NEED_GET_DATA) {
            return DataWay::ByCommand(CommandData::new(depth));
        }
        let registers = features.contains(Features::AUTO_BUF_REG);
        DataWay::ByCall { buffers: registers.then(|| RequestBuffers::reserve(core, depth)) }
    }

    #[inline]
    fn buffers(&self) -> Option<&RequestBuffers> {
        match self {
            DataWay::ByCall { buffers } => buffers.as_ref(),
            DataWay::ByCommand(_) => None,
        }
    }
}

/// Data that commands name.
struct CommandData {
    /// Writes, with their memory until the driver has copied to it.
    writes: AnnouncedWrites,
    /// Memory of reads whose answers may not have been submitted.
    answers: RefCell<Vec<SgList>>,
    /// For reads that failed: the driver wants an address, of which it makes no use.
    nothing: SgList,
}

impl CommandData {
    fn new(depth: u16) -> CommandData {
        CommandData {
            writes: AnnouncedWrites::new(depth),
            answers: RefCell::new(Vec::with_capacity(depth.into())),
            nothing: SgList::one(Memory::from_heap(1).seg(0, 1)),
        }
    }

    /// Handles a command of a tag that has completed without an error.
    fn on_completion(&self, ring: &QueueRing, tag: u16, result: i32) -> Option<Arrival> {
        let is_announced = result == UBLK_IO_RES_NEED_GET_DATA;
        match self.writes.on_completion(tag, is_announced, &ring.descs.read(tag)) {
            CompletionMeaning::Arrived(arrival) => Some(arrival),
            CompletionMeaning::Refused(error) => {
                ring.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, error, None);
                None
            }
        }
    }

    /// Asks for the data of a write.
    fn fetch(&self, ring: &QueueRing, tag: u16, data: &SgList) -> io::Result<()> {
        if !self.writes.begin_copy(tag, data) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        ring.push(QueueOp::NEED_GET_DATA, tag, 0, Some(data));
        Ok(())
    }

    fn answer(&self, ring: &QueueRing, tag: u16, data: Option<SgList>, result: i32) {
        let desc = ring.descs.read(tag);
        match self.writes.on_answer(tag, result, &desc) {
            AnswerTime::Now if desc.op() == IoOp::READ => self.answer_read(ring, tag, data, result),
            AnswerTime::Now => ring.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, result, None),
            AnswerTime::AfterCopyTo(nowhere) => ring.push(QueueOp::NEED_GET_DATA, tag, 0, Some(&nowhere)),
            AnswerTime::WithData => {}
        }
    }

    fn answer_read(&self, ring: &QueueRing, tag: u16, data: Option<SgList>, result: i32) {
        let data = data.filter(|data| !data.is_empty());
        // The driver copies as many bytes as the result says. It takes 0 for an error.
        let result = result.min(data.as_ref().map_or(0, SgList::len) as i32);
        let data = data.map_or_else(|| self.nothing.clone(), in_one_piece);
        ring.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, result, Some(&data));
        self.answers.borrow_mut().push(data);
    }

    /// Submits the answers of reads, so that their memory can be used again.
    fn flush(&self, ring: &QueueRing) {
        let mut answers = self.answers.borrow_mut();
        if !answers.is_empty()
            && ring.registration.get().and_then(Weak::upgrade).is_some_and(|all| all.submit())
        {
            answers.clear();
        }
    }
}

/// Data as one segment, copied if it is several.
fn in_one_piece(data: SgList) -> SgList {
    if data.segs().len() == 1 {
        return data;
    }
    let whole = SgList::one(Memory::from_heap(data.len()).seg(0, data.len()));
    data.copy_to_list(&whole);
    whole
}

/// Where the driver registers the pages of a queue's requests.
struct RequestBuffers {
    /// `None`: the ring has no room, so the driver registers none.
    entries: Option<BufferEntries>,
    /// The buffer of each tag.
    memory: Vec<Memory>,
}

impl RequestBuffers {
    fn reserve(core: &EngineCore, depth: u16) -> RequestBuffers {
        let entries = core.reserve_buffers(depth);
        let indices = (0..depth).filter_map(|tag| entries.as_ref()?.index(tag));
        let memory = indices.map(|index| Memory::registered(index, MAX_BYTES as usize)).collect();
        RequestBuffers { entries, memory }
    }

    /// The ring's entry for a tag; one that no table has if there is no room.
    #[inline]
    fn index(&self, tag: u16) -> u16 {
        self.entries.as_ref().and_then(|entries| entries.index(tag)).unwrap_or(u16::MAX)
    }
}

/// The descriptors of a queue's requests, which the driver writes.
struct Descs {
    map: NonNull<u8>,
    len: usize,
    depth: u16,
}

impl Descs {
    fn map(device: &File, queue: u16, depth: u16) -> io::Result<Descs> {
        let depth = depth.min(UBLK_MAX_QUEUE_DEPTH);
        let len = (usize::from(depth) * size_of::<IoDesc>()).next_multiple_of(page_size());
        let position = descs_position(queue, page_size() as u64) as libc::off_t;
        let (access, kind) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: this creates a new mapping of that length; nothing else refers to it.
        let map =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, device.as_raw_fd(), position) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descs { map, len, depth })
    }

    /// The descriptor of a tag's request; one of no operation for a tag that does not exist.
    #[inline]
    fn read(&self, tag: u16) -> IoDesc {
        if tag >= self.depth {
            return IoDesc { op_flags: u32::MAX, ..IoDesc::default() };
        }
        let at = usize::from(tag) * size_of::<IoDesc>();
        let mut bytes = [0; size_of::<IoDesc>()];
        for (nth, word) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: within the mapping, and aligned: descriptors are whole words. The driver
            // wrote it before it completed the command of this tag.
            let value = unsafe { self.map.add(at + 8 * nth).cast::<u64>().read_volatile() };
            word.copy_from_slice(&value.to_ne_bytes());
        }
        IoDesc::read_from_bytes(&bytes).unwrap_or_default()
    }
}

impl Drop for Descs {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing refers to it any longer.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.len) };
    }
}
