//! The calls to the ublk driver that name memory: commands in rings, descriptors of requests in
//! shared memory, and copies of their data.
#![expect(unsafe_code, reason = "the one module of attached disks that gives addresses to the kernel")]

use super::queue_task::RequestPort;
use crate::core::buffer_table::BufferEntries;
use crate::core::reactor::EngineCore;
use crate::core::ring::{Completer, Registration};
use blockmux_proto::ublk::MAX_BYTES;
use blockmux_proto::ublk::wire::{
    ControlOp, CtrlCmd, IoCmd, IoDesc, QueueOp, UBLK_IO_F_NEED_REG_BUF, UBLK_MAX_QUEUE_DEPTH, auto_buf_reg,
    data_position, descs_position,
};
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
    /// Set if the driver registers the pages of requests.
    buffers: Option<RequestBuffers>,
    /// Tags whose command has completed, with its result.
    arrived: RefCell<VecDeque<(u16, i32)>>,
    waker: Waker,
    /// Weak, because the core's ring owns this object and the registration owns the core's ring.
    registration: OnceCell<Weak<Registration>>,
}

impl QueueRing {
    /// Maps the queue's descriptors, and asks for the first request of each of its `depth` tags.
    /// `registers`: the driver registers the pages of requests with the ring.
    ///
    /// # Errors
    /// If the memory cannot be mapped.
    pub(super) fn open(
        core: &EngineCore,
        device: &Arc<File>,
        (queue, depth): (u16, u16),
        registers: bool,
        waker: &Waker,
    ) -> io::Result<(Rc<QueueRing>, Rc<Registration>)> {
        let ring = Rc::new(QueueRing {
            device: device.clone(),
            queue,
            descs: Descs::map(device, queue, depth)?,
            buffers: registers.then(|| RequestBuffers::reserve(core, depth)),
            arrived: RefCell::new(VecDeque::with_capacity(depth.into())),
            waker: waker.clone(),
            registration: OnceCell::new(),
        });
        let registration = Rc::new(core.register(ring.clone()));
        ring.registration.get_or_init(|| Rc::downgrade(&registration));
        (0..depth).for_each(|tag| ring.push(QueueOp::FETCH_REQ, tag, 0));
        Ok((ring, registration))
    }

    fn push(&self, op: QueueOp, tag: u16, result: i32) {
        let Some(registration) = self.registration.get().and_then(Weak::upgrade) else { return };
        let command = IoCmd { q_id: self.queue, tag, result, addr: 0 };
        let command: [u8; 16] = zerocopy::transmute!(command);
        let fd = types::Fd(self.device.as_raw_fd());
        let buffer = self.buffers.as_ref().map(|buffers| auto_buf_reg(buffers.index(tag)));
        let entry = opcode::UringCmd16::new(fd, op.0).cmd(command).addr(buffer).build();
        // SAFETY: the command names no memory, and this object, which owns the descriptor, is the
        // completer of `registration`.
        unsafe { registration.push_command(entry, tag.into()) }
    }
}

impl RequestPort for Rc<QueueRing> {
    #[inline]
    fn poll(&self) -> Option<(u16, i32)> {
        self.arrived.borrow_mut().pop_front()
    }

    #[inline]
    fn desc(&self, tag: u16) -> IoDesc {
        self.descs.read(tag)
    }

    #[inline]
    fn registered(&self, tag: u16, desc: &IoDesc) -> Option<Seg> {
        let buffers = self.buffers.as_ref().filter(|_| !desc.has(UBLK_IO_F_NEED_REG_BUF))?;
        buffers.memory.get(usize::from(tag)).map(|memory| memory.seg(0, memory.len()))
    }

    #[inline]
    fn copy_from_request(&self, tag: u16, data: &SgList) -> io::Result<()> {
        self.copy(tag, data, CopyDirection::FromRequest)
    }

    #[inline]
    fn copy_to_request(&self, tag: u16, data: &SgList) -> io::Result<()> {
        self.copy(tag, data, CopyDirection::ToRequest)
    }

    #[inline]
    fn commit(&self, tag: u16, result: i32) {
        self.push(QueueOp::COMMIT_AND_FETCH_REQ, tag, result);
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
