//! Requests of the kernel, and the I/O that they need.

use super::directory::{Directory, FileAccess, FuseFile, WRITABLE_HANDLE};
use super::reply::{Errno, FuseReply};
use crate::driver::target::{Charge, IoSource};
use crate::exports::{Exports, VolumeId};
use crate::multi_step::{ByteRequest, MultiStepRequest, RequestStep};
use crate::volume_state::{Admission, AtomicRange, Epoch, IoGuard, NotAdmitted, RequiredAccess};
use blockmux_volume::{Completion, Cost, Io, IoError, Op, Output, Seg, SgList, Slab, Tag};
use blockmux_wire::fuse::{
    FUSE_KERNEL_VERSION, FUSE_MINOR_VERSION, FUSE_OLDEST_MINOR_VERSION, FallocateIn, Features, HandleIn,
    InHeader, InitIn, InitOut, Opcode, OpenIn, OpenOut, RangeIn, SetattrIn, WriteOut,
};
use std::collections::VecDeque;
use std::time::Instant;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// A file system of volumes: the source of the I/O that its users request.
///
/// Every request that has a reply gets one, in any order.
pub struct FuseQueue {
    exports: Exports,
    directory: Directory,
    /// Access to the volume of each file.
    admissions: Vec<Admission>,
    limits: FuseLimits,
    pending: Slab<FuseRequest>,
    /// I/O that the driver has not taken.
    io: VecDeque<(VolumeId, Io)>,
    cancels: VecDeque<(VolumeId, Tag)>,
    replies: VecDeque<FuseReply>,
    /// The kernel takes no more replies.
    is_closed: bool,
}

/// Limits of a file system.
#[derive(Clone, Copy, Debug)]
pub struct FuseLimits {
    /// Maximum number of requests that need I/O.
    pub depth: u16,
    /// Length of a page of the kernel in bytes.
    pub page_size: u32,
}

/// A request that needs I/O.
struct FuseRequest {
    /// Identifies it for its reply.
    unique: u64,
    /// Index of its file.
    file: usize,
    volume: VolumeId,
    bytes: ByteRequest,
    guard: Option<IoGuard>,
    /// The progress of a request of several I/O.
    steps: Option<Box<MultiStepRequest>>,
}

/// Length of the data that follows the first [`HEAD_LEN`] bytes of a request; `None` if it is no
/// write, and is a message as a whole.
#[inline]
#[must_use]
pub fn data_len(head: &[u8]) -> Option<usize> {
    let (header, rest) = InHeader::read_from_prefix(head).ok()?;
    let is_write = Opcode(header.opcode) == Opcode::FUSE_WRITE;
    let range = is_write.then(|| RangeIn::read_from_prefix(rest).ok())?;
    range.map(|(range, _)| range.size as usize)
}

impl FuseQueue {
    /// A file system with these files; `None` if a volume was removed.
    #[must_use]
    pub fn new(
        exports: &Exports,
        files: Vec<FuseFile>,
        access: FileAccess,
        limits: FuseLimits,
    ) -> Option<FuseQueue> {
        let depth = limits.depth;
        let admission = |file: &FuseFile| {
            Some(Admission::new(&exports.volume_state(file.volume)?, None, Epoch::current()))
        };
        Some(FuseQueue {
            admissions: files.iter().map(admission).collect::<Option<_>>()?,
            exports: exports.clone(),
            directory: Directory::new(files, access),
            limits,
            pending: Slab::with_capacity(depth.into()),
            io: VecDeque::with_capacity(depth.into()),
            cancels: VecDeque::with_capacity(depth.into()),
            replies: VecDeque::with_capacity(depth.into()),
            is_closed: false,
        })
    }

    /// Whether it takes another request.
    #[inline]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.pending.len() < usize::from(self.limits.depth)
    }

    /// Takes a request of the kernel. `data` is that of a write.
    #[inline]
    pub fn on_request(&mut self, message: &[u8], data: Option<SgList>) {
        let Ok((header, body)) = InHeader::read_from_prefix(message) else { return };
        let done = match Opcode(header.opcode) {
            Opcode::FUSE_READ => parse(body).and_then(|range| self.read(&header, range)),
            Opcode::FUSE_WRITE => parse(body).and_then(|range| self.write(&header, range, data)),
            opcode => self.other(opcode, &header, body),
        };
        match done {
            Ok(reply) => self.replies.extend(reply),
            Err(errno) => self.replies.push_back(FuseReply::failure(header.unique, errno)),
        }
    }

    /// The next reply.
    #[inline]
    pub fn poll_reply(&mut self) -> Option<FuseReply> {
        self.replies.pop_front()
    }

    /// Looks at the sizes of all volumes, and tells the kernel which files have another one.
    #[cold]
    pub fn refresh_sizes(&mut self) {
        let size = |file: &FuseFile| {
            let now = self.exports.get(file.volume)?.volume.info().size;
            (now != file.info.size).then_some(now)
        };
        let sizes: Vec<_> = self.directory.files.iter().map(size).collect();
        for (index, size) in sizes.into_iter().enumerate() {
            let file = size.and_then(|size| self.directory.set_size(index, size));
            if let Some(file) = file.filter(|_| !self.is_closed) {
                self.replies.push_back(FuseReply::attributes_changed(file));
            }
        }
    }

    /// Drops all requests: the file system is unmounted, and nobody gets a reply.
    #[cold]
    pub fn close(&mut self) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        self.replies.clear();
        for (_, io) in self.io.drain(..) {
            self.pending.remove(io.tag.0 as usize);
        }
        let in_flight = (0..self.limits.depth).map(u64::from);
        let in_flight = in_flight.filter_map(|tag| Some((self.pending.get(tag as usize)?.volume, Tag(tag))));
        self.cancels.extend(in_flight);
    }

    fn read(&mut self, header: &InHeader, range: RangeIn) -> RequestResult {
        let (index, file) = self.directory.file(header.nodeid)?;
        if range.size > MAX_BYTES {
            return Err(Errno::EINVAL);
        }
        let length = file.info.size.saturating_sub(range.offset).min(range.size.into());
        if length == 0 {
            return Ok(Some(FuseReply::success(header.unique)));
        }
        let bytes = ByteRequest { op: Op::Read, offset: range.offset, length };
        Ok(self.begin_request(header, index, bytes, None))
    }

    /// A write beyond the end is written up to the end; there is no space after it.
    fn write(&mut self, header: &InHeader, range: RangeIn, data: Option<SgList>) -> RequestResult {
        let (index, file) = self.directory.file(header.nodeid)?;
        let data = data.ok_or(Errno::EINVAL)?;
        if data.len() != range.size as usize || range.size > MAX_BYTES {
            return Err(Errno::EINVAL);
        }
        let length = file.info.size.saturating_sub(range.offset).min(range.size.into());
        if length == 0 {
            let is_empty = range.size == 0;
            return if is_empty { Ok(Some(written(header.unique, 0))) } else { Err(Errno::ENOSPC) };
        }
        let data = if length < range.size.into() { data.slice(0, length as usize) } else { data };
        let op = Op::Write { fua: range.flags & O_DSYNC != 0 };
        let bytes = ByteRequest { op, offset: range.offset, length };
        Ok(self.begin_request(header, index, bytes, Some(data)))
    }

    fn other(&mut self, opcode: Opcode, header: &InHeader, body: &[u8]) -> RequestResult {
        let (unique, nodeid) = (header.unique, header.nodeid);
        let reply = match opcode {
            Opcode::FUSE_INIT => FuseReply::with(unique, &self.negotiate(body)?),
            Opcode::FUSE_LOOKUP => FuseReply::with(unique, &self.directory.look_up(body)?),
            Opcode::FUSE_FORGET | Opcode::FUSE_BATCH_FORGET => return Ok(None),
            Opcode::FUSE_GETATTR => FuseReply::with(unique, &self.directory.attributes(nodeid)?),
            Opcode::FUSE_SETATTR => {
                let set: SetattrIn = parse(body)?;
                FuseReply::with(unique, &self.directory.set_attributes(nodeid, set)?)
            }
            Opcode::FUSE_OPEN => {
                let open: OpenIn = parse(body)?;
                FuseReply::with(unique, &self.directory.open(nodeid, open)?)
            }
            Opcode::FUSE_OPENDIR => FuseReply::with(unique, &OpenOut::default()),
            Opcode::FUSE_READDIR => {
                let range: RangeIn = parse(body)?;
                let entries = self.directory.entries(range.offset, range.size);
                FuseReply::data(unique, Seg::from_slice(&entries).into())
            }
            Opcode::FUSE_STATFS => FuseReply::with(unique, &self.directory.statfs(nodeid)?),
            Opcode::FUSE_RELEASE | Opcode::FUSE_RELEASEDIR | Opcode::FUSE_FSYNCDIR => {
                FuseReply::success(unique)
            }
            // A close of a file that is open for reading only.
            Opcode::FUSE_FLUSH if parse::<HandleIn>(body)?.fh != WRITABLE_HANDLE => {
                FuseReply::success(unique)
            }
            Opcode::FUSE_FLUSH | Opcode::FUSE_FSYNC => {
                let (index, _) = self.directory.file(nodeid)?;
                let flush = ByteRequest { op: Op::Flush, offset: 0, length: 0 };
                return Ok(self.begin_request(header, index, flush, None));
            }
            Opcode::FUSE_FALLOCATE => {
                let range = parse(body)?;
                return self.allocate(header, range);
            }
            Opcode::FUSE_SYMLINK
            | Opcode::FUSE_MKNOD
            | Opcode::FUSE_MKDIR
            | Opcode::FUSE_UNLINK
            | Opcode::FUSE_RMDIR
            | Opcode::FUSE_RENAME
            | Opcode::FUSE_RENAME2
            | Opcode::FUSE_LINK
            | Opcode::FUSE_CREATE
            | Opcode::FUSE_TMPFILE => return Err(Errno::EPERM),
            // The kernel does not ask again.
            _ => return Err(Errno::ENOSYS),
        };
        Ok(Some(reply))
    }

    /// Agrees on a version and features.
    fn negotiate(&self, body: &[u8]) -> Result<InitOut, Errno> {
        let (init, rest) = InitIn::read_from_prefix(body).map_err(|_| Errno::EINVAL)?;
        if init.major != FUSE_KERNEL_VERSION || init.minor < FUSE_OLDEST_MINOR_VERSION {
            return Err(Errno::EPROTO);
        }
        let upper = match Features::from_bits_retain(init.flags.into()).contains(Features::INIT_EXT) {
            true => u32::read_from_prefix(rest).map_or(0, |(flags, _)| flags),
            false => 0,
        };
        let kernel = Features::from_bits_retain(u64::from(upper) << 32 | u64::from(init.flags));
        let features = kernel & Features::all();
        Ok(InitOut {
            major: FUSE_KERNEL_VERSION,
            minor: FUSE_MINOR_VERSION,
            max_readahead: init.max_readahead,
            flags: features.bits() as u32,
            max_background: self.limits.depth,
            congestion_threshold: self.limits.depth,
            max_write: MAX_BYTES,
            time_gran: 1_000_000_000,
            max_pages: MAX_BYTES.checked_div(self.limits.page_size).unwrap_or(1) as u16,
            flags2: (features.bits() >> 32) as u32,
            ..InitOut::default()
        })
    }

    /// Zeroes a range. A hole is punched only if that is fast: a loop device sends its discards so.
    fn allocate(&mut self, header: &InHeader, range: FallocateIn) -> RequestResult {
        let (index, file) = self.directory.file(header.nodeid)?;
        let (may_unmap, only_fast) = match range.mode & !FALLOC_FL_KEEP_SIZE {
            FALLOC_FL_PUNCH_HOLE if file.info.fast_zeroes => (true, true),
            FALLOC_FL_ZERO_RANGE => (false, false),
            _ => return Err(Errno::EOPNOTSUPP),
        };
        let length = file.info.size.saturating_sub(range.offset).min(range.length);
        if length < range.length && range.mode & FALLOC_FL_KEEP_SIZE == 0 {
            return Err(Errno::ENOSPC);
        }
        if length == 0 {
            return Ok(Some(FuseReply::success(header.unique)));
        }
        let op = Op::WriteZeroes { fua: false, may_unmap, only_fast };
        Ok(self.begin_request(header, index, ByteRequest { op, offset: range.offset, length }, None))
    }

    /// Starts the I/O of a request, which has its reply later.
    #[inline]
    fn begin_request(
        &mut self,
        header: &InHeader,
        file: usize,
        bytes: ByteRequest,
        data: Option<SgList>,
    ) -> Option<FuseReply> {
        let served = self.directory.file(header.nodeid).ok().map(|(_, served)| served);
        let (volume, block) = served.map(|served| (served.volume, u64::from(served.info.logical_block)))?;
        let is_one_io = (bytes.offset | bytes.length) & block.wrapping_sub(1) == 0;
        let mut request =
            FuseRequest { unique: header.unique, file, volume, bytes, guard: None, steps: None };
        if is_one_io {
            let ByteRequest { op, offset, length } = bytes;
            let tag = Tag(self.pending.insert(request) as u64);
            self.io.push_back((volume, Io { tag, op, offset, len: length, data }));
        } else if let Some(admission) = self.admissions.get(file) {
            request.steps = Some(Box::new(MultiStepRequest::new(&bytes, data, block, admission)));
            self.next_step(request);
        }
        None
    }

    /// Submits the next I/O of a request.
    #[cold]
    fn next_step(&mut self, mut request: FuseRequest) {
        let FuseRequest { file, volume, bytes, .. } = request;
        let (Some(steps), Some(admission)) = (&mut request.steps, self.admissions.get(file)) else { return };
        let io = steps.next(&bytes, admission);
        let tag = Tag(self.pending.insert(request) as u64);
        self.io.push_back((volume, Io { tag, ..io }));
    }

    /// Handles the completion of an I/O of a request with several.
    #[cold]
    fn advance(&mut self, mut request: FuseRequest, result: Result<Output, IoError>) {
        let Some(steps) = &mut request.steps else { return };
        match steps.on_io(&request.bytes, result) {
            RequestStep::Next => self.next_step(request),
            RequestStep::SendLast(_, data) => self.finish(&request, Ok(Output::Data(data))),
            RequestStep::Done(result) => self.finish(&request, result),
            // Requests are shorter than those that are read in pieces.
            RequestStep::SendPart(..) => self.finish(&request, Err(IoError::BadLength)),
        }
    }

    #[inline]
    fn finish(&mut self, request: &FuseRequest, result: Result<Output, IoError>) {
        let unique = request.unique;
        self.replies.push_back(match result {
            Ok(Output::Data(data)) => FuseReply::data(unique, data),
            Ok(_) if matches!(request.bytes.op, Op::Write { .. }) => {
                written(unique, request.bytes.length as u32)
            }
            Ok(_) => FuseReply::success(unique),
            Err(error) => FuseReply::failure(unique, error.into()),
        });
    }

    /// Takes a request whose I/O has ended out of the table, unless nobody waits for it.
    #[inline]
    fn end(&mut self, tag: Tag, result: Result<Output, IoError>) {
        let Some(mut request) = self.pending.remove(tag.0 as usize) else { return };
        if self.is_closed {
            return;
        }
        // The next I/O of the request may have to wait until this one is no longer counted.
        request.guard = None;
        match request.steps {
            None => self.finish(&request, result),
            Some(_) => self.advance(request, result),
        }
    }
}

impl IoSource for FuseQueue {
    fn depth(&self) -> u32 {
        self.limits.depth.into()
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.io.pop_front()
    }

    fn charge(&mut self, io: &Io) -> Charge {
        let range = self.pending.get_mut(io.tag.0 as usize).and_then(FuseRequest::locked_range);
        Charge { cost: range.map_or_else(|| Cost::of(io), |range| range.cost()), station: None }
    }

    #[inline]
    fn begin(&mut self, _volume: VolumeId, io: &Io, _is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let Some(request) = self.pending.get_mut(io.tag.0 as usize) else {
            return Err(NotAdmitted::Denied(IoError::Aborted));
        };
        let admission = self.admissions.get(request.file).ok_or(NotAdmitted::Denied(IoError::Aborted))?;
        let (needs, atomic) = (RequiredAccess::of(io.op), request.locked_range());
        match admission.admit(io.op, (io.offset, io.len), needs, atomic) {
            Ok(guard) => request.guard = guard,
            Err(NotAdmitted::Denied(error)) => {
                self.end(io.tag, Err(error));
                return Err(NotAdmitted::Denied(error));
            }
            Err(wait) => return Err(wait),
        }
        Ok(())
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    #[inline]
    fn on_io(&mut self, done: Completion, _now: Instant) {
        self.end(done.tag, done.result);
    }
}

impl FuseRequest {
    /// The blocks that are locked while its I/O is in flight.
    #[inline]
    fn locked_range(&mut self) -> Option<&mut AtomicRange> {
        self.steps.as_mut()?.locked_range()
    }
}

/// A reply, unless there is none or it comes later.
type RequestResult = Result<Option<FuseReply>, Errno>;

/// The structure at the start of a request's body.
#[inline]
fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body).map(|(parsed, _)| parsed).map_err(|_| Errno::EINVAL)
}

#[inline]
fn written(unique: u64, size: u32) -> FuseReply {
    FuseReply::with(unique, &WriteOut { size, padding: 0 })
}

/// Length of the longest read or write in bytes: the most that the kernel sends.
pub const MAX_BYTES: u32 = 1 << 20;
/// Length of a write before its data in bytes.
pub const HEAD_LEN: usize = size_of::<InHeader>() + size_of::<RangeIn>();
/// Length of the longest request without data that is understood, in bytes.
pub const MAX_MESSAGE: usize = 512;
const O_DSYNC: u32 = 0o10_000;
const FALLOC_FL_KEEP_SIZE: u32 = 1;
const FALLOC_FL_PUNCH_HOLE: u32 = 2;
const FALLOC_FL_ZERO_RANGE: u32 = 0x10;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use crate::exports::Export;
    use crate::fuse::wire::{
        AttrOut, FATTR_FH, FATTR_SIZE, FUSE_NOTIFY_INVAL_INODE, InvalInodeOut, OutHeader,
    };
    use blockmux_volume::conformance::TestCore;
    use blockmux_volume::random::SplitMix;
    use blockmux_volume::{BlockSizes, Channel, MemVolume, Pages, Resize, Volume, Waker};
    use std::sync::Arc;
    use zerocopy::IntoBytes;

    const LIMITS: FuseLimits = FuseLimits { depth: 8, page_size: 4096 };
    const FILE: u64 = 2;
    const SIZE: usize = 64 << 10;

    /// A file system with a file of 64 KiB on a volume with blocks of 4 KiB.
    struct Mounted {
        exports: Exports,
        queue: FuseQueue,
        channel: Box<dyn Channel>,
        /// Operations of the volume.
        ops: Vec<Op>,
    }

    impl Mounted {
        fn new() -> Mounted {
            let blocks = BlockSizes { logical: Some(4096), physical: None };
            let pages = Pages::from_heap(2 * SIZE);
            let volume: Arc<dyn Volume> = Arc::new(MemVolume::within(pages, SIZE as u64, blocks));
            let channel =
                volume.open(&TestCore::new().as_core(), LIMITS.depth.into(), Waker::idle()).unwrap();
            let info = volume.info();
            let export =
                Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
            let exports = Exports::new(vec![export]);
            let files = vec![FuseFile { name: "a".to_owned(), volume: VolumeId(0), info }];
            let access = FileAccess { uid: 0, gid: 0, time_s: 0 };
            let queue = FuseQueue::new(&exports, files, access, LIMITS).unwrap();
            Mounted { exports, queue, channel, ops: Vec::new() }
        }

        fn send(&mut self, opcode: Opcode, body: &[u8], data: Option<&[u8]>) {
            let header = InHeader { opcode: opcode.0, unique: 9, nodeid: FILE, ..InHeader::default() };
            let message = [header.as_bytes(), body].concat();
            self.queue.on_request(&message, data.map(|data| Seg::from_slice(data).into()));
        }

        /// Does the I/O of all requests.
        fn run(&mut self) {
            let mut done = Vec::new();
            while let Some((volume, io)) = self.queue.poll_io() {
                self.ops.push(io.op);
                if self.queue.begin(volume, &io, false).is_ok() {
                    self.channel.submit(io);
                }
                self.channel.kick();
                self.channel.poll(&mut done);
                done.drain(..).for_each(|done| self.queue.on_io(done, Instant::now()));
            }
        }

        /// The reply to the only request: its error, and what follows the header.
        fn reply(&mut self) -> Result<Vec<u8>, i32> {
            self.run();
            let reply = self.queue.poll_reply().expect("a reply");
            assert!(self.queue.poll_reply().is_none());
            let (header, body) = OutHeader::read_from_prefix(reply.head()).unwrap();
            let data = reply.data.as_ref().map_or_else(Vec::new, SgList::to_vec);
            let bytes = [body, &data].concat();
            assert_eq!((header.len as usize, header.unique), (16 + bytes.len(), 9));
            if header.error == 0 { Ok(bytes) } else { Err(-header.error) }
        }

        fn ask(&mut self, opcode: Opcode, body: &(impl IntoBytes + Immutable)) -> Result<Vec<u8>, i32> {
            self.send(opcode, body.as_bytes(), None);
            self.reply()
        }

        fn read(&mut self, offset: u64, size: u32) -> Result<Vec<u8>, i32> {
            self.ask(Opcode::FUSE_READ, &RangeIn { offset, size, ..RangeIn::default() })
        }

        fn write(&mut self, offset: u64, data: &[u8], flags: u32) -> Result<u32, i32> {
            let range = RangeIn { offset, size: data.len() as u32, flags, ..RangeIn::default() };
            self.send(Opcode::FUSE_WRITE, range.as_bytes(), Some(data));
            self.reply().map(|reply| u32::read_from_prefix(&reply).unwrap().0)
        }

        fn fallocate(&mut self, mode: u32, offset: u64, length: u64) -> Result<Vec<u8>, i32> {
            self.ask(Opcode::FUSE_FALLOCATE, &FallocateIn { offset, length, mode, ..FallocateIn::default() })
        }
    }

    #[test]
    fn the_kernel_gets_the_features_that_it_has() {
        let mut mounted = Mounted::new();
        let wanted = Features::all().bits();
        let mut ask = |major, minor, flags: u64| {
            let init = InitIn { major, minor, max_readahead: 7, flags: flags as u32 };
            let body = [init.as_bytes(), ((flags >> 32) as u32).as_bytes()].concat();
            mounted.send(Opcode::FUSE_INIT, &body, None);
            mounted.reply().map(|reply| InitOut::read_from_bytes(&reply).unwrap())
        };
        let agreed = ask(7, 45, u64::MAX).unwrap();
        assert_eq!(u64::from(agreed.flags2) << 32 | u64::from(agreed.flags), wanted);
        assert_eq!((agreed.major, agreed.max_write, agreed.max_pages), (7, 1 << 20, 256));
        assert_eq!((agreed.max_readahead, agreed.max_background), (7, LIMITS.depth));
        let old = ask(7, 31, !Features::INIT_EXT.bits()).unwrap();
        assert_eq!(old.flags2, 0);
        assert_eq!(ask(7, 22, 0), Err(71));
        assert_eq!(ask(8, 0, 0), Err(71));
    }

    #[test]
    fn the_kernel_counts_a_request_in_its_own_pages() {
        for (page_size, pages) in [(4096, 256), (16_384, 64), (65_536, 16)] {
            let mut mounted = Mounted::new();
            mounted.queue.limits.page_size = page_size;
            let init = InitIn { major: 7, minor: 45, ..InitIn::default() };
            let agreed = mounted.ask(Opcode::FUSE_INIT, &init).unwrap();
            assert_eq!(InitOut::read_from_bytes(&agreed).unwrap().max_pages, pages);
        }
    }

    #[test]
    fn a_new_size_is_that_of_the_file_and_the_kernel_is_told_once() {
        let mut mounted = Mounted::new();
        mounted.queue.refresh_sizes();
        assert!(mounted.queue.poll_reply().is_none(), "nothing has changed");
        assert_eq!(mounted.write(SIZE as u64, &[7; 100], 0), Err(28));
        let volume_state = mounted.exports.volume_state(VolumeId(0)).unwrap();
        volume_state.resize(Resize::grow(2 * SIZE as u64)).unwrap();
        mounted.queue.refresh_sizes();
        let told = mounted.queue.poll_reply().unwrap();
        let (header, changed) = OutHeader::read_from_prefix(told.head()).unwrap();
        assert_eq!((header.unique, header.error), (0, FUSE_NOTIFY_INVAL_INODE));
        assert_eq!(InvalInodeOut::read_from_bytes(changed).unwrap().ino, FILE);
        mounted.queue.refresh_sizes();
        assert!(mounted.queue.poll_reply().is_none());
        let attributes = mounted.ask(Opcode::FUSE_GETATTR, &[0_u8; 16]).unwrap();
        assert_eq!(AttrOut::read_from_bytes(&attributes).unwrap().attr.size, 2 * SIZE as u64);
        assert_eq!(mounted.write(SIZE as u64, &[7; 100], 0), Ok(100));
    }

    #[test]
    fn requests_of_any_range_act_on_exactly_their_bytes() {
        let mut mounted = Mounted::new();
        let mut expected = vec![0; SIZE];
        for (nth, (offset, len)) in
            [(0, SIZE), (1, 1), (4095, 2), (8192, 100), (12_000, 288), (16_001, 17_000)]
                .into_iter()
                .enumerate()
        {
            let data = vec![nth as u8 + 1; len];
            assert_eq!(mounted.write(offset, &data, 0), Ok(len as u32));
            expected[offset as usize..][..len].copy_from_slice(&data);
        }
        for (mode, offset, len) in [(0x10, 5, 6), (0x11, 20_479, 2), (3, 24_570, 9000), (3, 4096, 4096)] {
            assert_eq!(mounted.fallocate(mode, offset, len), Ok(vec![]));
            expected[offset as usize..][..len as usize].fill(0);
        }
        for (offset, len) in [(0, SIZE), (3, 39_000), (4095, 2), (39_999, 1)] {
            let read = mounted.read(offset as u64, len as u32).unwrap();
            assert!(read == expected[offset..][..len], "{len} bytes at {offset}");
        }
    }

    #[test]
    fn a_file_ends_with_its_volume() {
        let mut mounted = Mounted::new();
        let end = SIZE as u64;
        assert_eq!(mounted.read(end - 10, 100).map(|data| data.len()), Ok(10));
        assert_eq!(mounted.read(end, 100), Ok(vec![]));
        assert_eq!(mounted.read(u64::MAX, 100), Ok(vec![]));
        assert_eq!(mounted.write(end - 10, &[7; 100], 0), Ok(10));
        assert_eq!(mounted.write(end, &[7; 100], 0), Err(28));
        assert_eq!(mounted.read(end - 10, 10), Ok(vec![7; 10]));
        assert_eq!(mounted.fallocate(0x10, end - 10, 100), Err(28), "it would grow");
        assert_eq!(mounted.fallocate(0x11, end - 5, u64::MAX), Ok(vec![]));
        assert_eq!(mounted.fallocate(3, end, 100), Ok(vec![]));
        assert_eq!(mounted.read(end - 10, 10), Ok(vec![7, 7, 7, 7, 7, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn synchronous_writes_and_flushes_reach_the_volume() {
        let mut mounted = Mounted::new();
        mounted.write(0, &[1; 4096], O_DSYNC).unwrap();
        mounted.write(0, &[1; 10], O_DSYNC).unwrap();
        mounted.ask(Opcode::FUSE_FSYNC, &HandleIn::default()).unwrap();
        mounted.ask(Opcode::FUSE_FLUSH, &HandleIn { fh: WRITABLE_HANDLE }).unwrap();
        mounted.ask(Opcode::FUSE_FLUSH, &HandleIn::default()).unwrap();
        let fua = Op::Write { fua: true };
        assert_eq!(mounted.ops, [fua, Op::Read, fua, Op::Flush, Op::Flush]);
    }

    #[test]
    fn what_a_volume_cannot_do_is_refused() {
        let mut mounted = Mounted::new();
        assert_eq!(mounted.fallocate(0, 0, 4096), Err(95));
        let set = SetattrIn { valid: FATTR_SIZE | FATTR_FH, ..SetattrIn::default() };
        assert_eq!(mounted.ask(Opcode::FUSE_SETATTR, &set), Err(1));
        assert_eq!(mounted.ask(Opcode::FUSE_UNLINK, b"a\0"), Err(1));
        assert_eq!(mounted.ask(Opcode(22), &0_u32), Err(38));
        assert_eq!(mounted.ask(Opcode::FUSE_OPEN, &0_u16), Err(22), "too short");
        let range = RangeIn { size: 5, ..RangeIn::default() };
        mounted.send(Opcode::FUSE_WRITE, range.as_bytes(), Some(&[0; 4]));
        assert_eq!(mounted.reply(), Err(22));
        assert_eq!(mounted.read(0, MAX_BYTES + 1), Err(22));
    }

    #[test]
    fn a_removed_volume_fails_requests() {
        let mut mounted = Mounted::new();
        mounted.exports.remove("a").unwrap().volume_state.retire();
        assert_eq!(mounted.read(0, 4096), Err(19));
        assert_eq!(mounted.write(1, &[0; 10], 0), Err(19));
    }

    #[test]
    fn a_file_system_that_is_unmounted_cancels_what_is_in_flight() {
        let mut mounted = Mounted::new();
        let range = RangeIn { size: 4096, ..RangeIn::default() };
        (0..3).for_each(|_| mounted.send(Opcode::FUSE_READ, range.as_bytes(), None));
        let (volume, io) = mounted.queue.poll_io().unwrap();
        mounted.queue.begin(volume, &io, false).unwrap();
        mounted.queue.close();
        mounted.queue.close();
        assert!(mounted.queue.poll_io().is_none(), "what had not begun does not begin");
        assert_eq!(mounted.queue.poll_cancel(), Some((VolumeId(0), io.tag)));
        assert_eq!(mounted.queue.poll_cancel(), None);
        mounted.queue.on_io(Completion { tag: io.tag, result: Ok(Output::Nothing) }, Instant::now());
        assert!(mounted.queue.poll_reply().is_none() && mounted.queue.pending.is_empty());
    }

    #[test]
    fn whatever_the_kernel_sends_has_at_most_one_reply() {
        let silent = [Opcode::FUSE_FORGET, Opcode::FUSE_BATCH_FORGET];
        for seed in 0..2000 {
            let (mut random, mut mounted) = (SplitMix::new(seed), Mounted::new());
            let opcode = Opcode(random.below(55) as u32);
            let body: Vec<u8> = (0..random.below(80))
                .map(|_| if random.below(2) == 0 { 0 } else { random.next() as u8 })
                .collect();
            let header = InHeader { opcode: opcode.0, nodeid: random.below(4), ..InHeader::default() };
            let message = [header.as_bytes(), &body].concat();
            let data = (random.below(2) == 0).then(|| Seg::from_slice(&[1; 512]).into());
            mounted.queue.on_request(&message, data);
            mounted.run();
            let replies = std::iter::from_fn(|| mounted.queue.poll_reply()).count();
            assert_eq!(replies, usize::from(!silent.contains(&opcode)), "seed {seed}: {opcode}");
        }
        let mut mounted = Mounted::new();
        mounted.queue.on_request(&[0; 39], None);
        assert!(mounted.queue.poll_reply().is_none());
        assert_eq!(data_len(&[0; 80]), None);
    }
}
