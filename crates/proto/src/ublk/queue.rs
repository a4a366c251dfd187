//! One queue of a disk.

use super::params::{MAX_BYTES, SECTOR};
use crate::driver::target::IoSource;
use crate::exports::{Exports, VolumeId};
use crate::kernel_disk::errno;
use crate::volume_state::{Admission, Epoch, IoGuard, NotAdmitted, RequiredAccess};
use blockmux_volume::{Completion, Io, IoError, Op, Output, Seg, SgList, Tag};
use blockmux_wire::ublk::{IoDesc, IoOp, UBLK_IO_F_FUA, UBLK_IO_F_NOUNMAP};
use std::collections::VecDeque;
use std::time::Instant;

/// A queue of a disk: the source of the I/O that the kernel requests there.
///
/// The kernel has one request at a time for each tag. Its request is answered by one [`Reply`].
pub struct UblkQueue {
    volume: VolumeId,
    admission: Admission,
    /// The request of each tag.
    requests: Vec<QueueSlot>,
    /// I/O that the driver has not taken.
    io: VecDeque<Io>,
    cancels: VecDeque<Tag>,
    replies: VecDeque<Reply>,
    /// Writes of whose registered buffer the volume needs the bytes.
    refused: VecDeque<u16>,
    /// Writes are refused. The kernel's own write protection can be lifted.
    read_only: bool,
    /// Every request fails, because the disk is removed by force.
    is_failing: bool,
}

/// The request of a tag.
#[derive(Default)]
struct QueueSlot {
    /// Absent while the kernel has not sent one, and once it is answered.
    request: Option<Request>,
    /// The I/O of the request is counted. It may outlive a request that was failed.
    guard: Option<IoGuard>,
    is_in_flight: bool,
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    op: Op,
    offset: u64,
    len: u64,
    /// The volume uses the request's pages as a registered buffer, and nobody copies its data.
    is_registered: bool,
}

/// What the driver does with a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewRequest {
    /// Nothing: it is queued, or it is answered.
    Taken,
    /// It is a write: copies the data of this many bytes, and passes it to [`UblkQueue::on_data`].
    NeedsData(usize),
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    /// Tag of the request.
    pub tag: u16,
    /// The data of a read.
    pub data: Option<SgList>,
    /// Number of bytes, or an error number of Linux, negative.
    pub result: i32,
}

impl UblkQueue {
    /// A queue for up to `depth` requests to a volume of `exports`; `None` if it was removed.
    #[must_use]
    pub fn new(exports: &Exports, volume: VolumeId, depth: u16, read_only: bool) -> Option<UblkQueue> {
        let volume_state = exports.volume_state(volume)?;
        let depth = usize::from(depth);
        let mut requests = Vec::with_capacity(depth);
        requests.resize_with(depth, QueueSlot::default);
        Some(UblkQueue {
            volume,
            admission: Admission::new(&volume_state, None, Epoch::current()),
            requests,
            io: VecDeque::with_capacity(depth),
            cancels: VecDeque::with_capacity(depth),
            replies: VecDeque::with_capacity(depth),
            refused: VecDeque::with_capacity(depth),
            read_only,
            is_failing: false,
        })
    }

    /// Takes a request of the kernel. One that is invalid, or whose tag has a request, is answered
    /// with an error. `registered` is the buffer of its pages, at least [`MAX_BYTES`] long, if they
    /// are registered and the volume takes such buffers.
    #[inline]
    pub fn on_request(&mut self, tag: u16, desc: &IoDesc, registered: Option<Seg>) -> NewRequest {
        let request = match parse(desc) {
            _ if self.is_failing => Err(IoError::Aborted),
            Ok(_) if self.is_busy(tag) => Err(IoError::BadLength),
            Ok(request) if self.read_only && request.op.is_write() => Err(IoError::ReadOnly),
            request => request,
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                self.replies.push_back(Reply { tag, data: None, result: errno(error).saturating_neg() });
                return NewRequest::Taken;
            }
        };
        let registered = registered.filter(|_| request.op.moves_data());
        let request = Request { is_registered: registered.is_some(), ..request };
        if let Some(slot) = self.requests.get_mut(usize::from(tag)) {
            slot.request = Some(request);
        }
        if registered.is_none() && matches!(request.op, Op::Write { .. }) {
            return NewRequest::NeedsData(request.len as usize);
        }
        let data = registered.map(|seg| SgList::one(seg.slice(0, request.len as usize)));
        self.push_io(tag, request, data);
        NewRequest::Taken
    }

    /// The next write whose data is to be copied after all, with its length in bytes: the volume
    /// needs its bytes. It goes on with [`UblkQueue::on_data`].
    #[inline]
    pub fn poll_refused(&mut self) -> Option<(u16, usize)> {
        let tag = self.refused.pop_front()?;
        let request = self.requests.get(usize::from(tag))?.request?;
        Some((tag, request.len as usize))
    }

    /// Forgets the request of a tag without an answer: the kernel has taken it back.
    #[cold]
    pub fn withdraw(&mut self, tag: u16) {
        if let Some(slot) = self.requests.get_mut(usize::from(tag)) {
            slot.request = None;
        }
    }

    /// Whether [`UblkQueue::poll_refused`] has something.
    #[inline]
    #[must_use]
    pub fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Takes the data of a write, or the reason why there is none. The answer counts the bytes of
    /// `data`: if that is only the first part, the kernel sends the rest again.
    #[inline]
    pub fn on_data(&mut self, tag: u16, data: Result<SgList, IoError>) {
        let slot = self.requests.get_mut(usize::from(tag));
        // It may have been failed meanwhile.
        let Some(request) = slot.and_then(|slot| slot.request.as_mut()) else { return };
        match data {
            Ok(data) => {
                request.len = request.len.min(data.len() as u64);
                let request = *request;
                self.push_io(tag, request, Some(data));
            }
            Err(error) => self.finish(tag, Err(error)),
        }
    }

    /// The next answer.
    #[inline]
    pub fn poll_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }

    /// Fails all requests, now and from now on: the disk is removed although I/O is in flight.
    #[cold]
    pub fn fail(&mut self) {
        if std::mem::replace(&mut self.is_failing, true) {
            return;
        }
        self.io.clear();
        self.refused.clear();
        for tag in 0..self.requests.len() {
            let tag = tag as u16;
            let is_in_flight = self.requests.get(usize::from(tag)).is_some_and(|slot| slot.is_in_flight);
            if is_in_flight {
                self.cancels.push_back(Tag(tag.into()));
            }
            self.finish(tag, Err(IoError::Aborted));
        }
    }

    /// Whether the tag has a request, or is not one of this queue.
    #[inline]
    fn is_busy(&self, tag: u16) -> bool {
        self.requests.get(usize::from(tag)).is_none_or(|slot| slot.request.is_some())
    }

    #[inline]
    fn push_io(&mut self, tag: u16, request: Request, data: Option<SgList>) {
        let Request { op, offset, len, .. } = request;
        self.io.push_back(Io { tag: Tag(tag.into()), op, offset, len, data });
    }

    /// Begins a request again without its registered buffer, which the volume has refused.
    #[cold]
    fn begin_with_bytes(&mut self, tag: u16) {
        let slot = self.requests.get_mut(usize::from(tag));
        let Some(request) = slot.and_then(|slot| slot.request.as_mut()) else { return };
        request.is_registered = false;
        match *request {
            Request { op: Op::Write { .. }, .. } => self.refused.push_back(tag),
            request => self.push_io(tag, request, None),
        }
    }

    /// Answers a request that is not answered yet.
    #[inline]
    fn finish(&mut self, tag: u16, result: Result<Output, IoError>) {
        let slot = self.requests.get_mut(usize::from(tag));
        let Some(request) = slot.and_then(|slot| slot.request.take()) else { return };
        self.replies.push_back(match result {
            Ok(Output::Data(data)) if !request.is_registered => {
                Reply { tag, data: Some(data), result: request.len as i32 }
            }
            Ok(_) if request.op.moves_data() => Reply { tag, data: None, result: request.len as i32 },
            Ok(_) => Reply { tag, data: None, result: 0 },
            Err(error) => Reply { tag, data: None, result: errno(error).saturating_neg() },
        });
    }
}

impl IoSource for UblkQueue {
    fn depth(&self) -> u32 {
        self.requests.len() as u32
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        let io = self.io.pop_front()?;
        if let Some(slot) = self.requests.get_mut(io.tag.0 as usize) {
            slot.is_in_flight = true;
        }
        Some((self.volume, io))
    }

    #[inline]
    fn begin(&mut self, _volume: VolumeId, io: &Io, _is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.admission.admit(io.op, (io.offset, io.len), RequiredAccess::of(io.op), None);
        let slot = self.requests.get_mut(io.tag.0 as usize);
        match (admitted, slot) {
            (Ok(guard), Some(slot)) => slot.guard = guard,
            (Ok(_), None) => {}
            (Err(NotAdmitted::Denied(error)), slot) => {
                if let Some(slot) = slot {
                    slot.is_in_flight = false;
                }
                self.finish(io.tag.0 as u16, Err(error));
                return Err(NotAdmitted::Denied(error));
            }
            (Err(wait), _) => return Err(wait),
        }
        Ok(())
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        Some((self.volume, self.cancels.pop_front()?))
    }

    #[inline]
    fn on_io(&mut self, done: Completion, _now: Instant) {
        let tag = done.tag.0 as u16;
        let mut is_registered = false;
        if let Some(slot) = self.requests.get_mut(usize::from(tag)) {
            (slot.guard, slot.is_in_flight) = (None, false);
            is_registered = slot.request.is_some_and(|request| request.is_registered);
        }
        match done.result {
            Err(IoError::Unsupported) if is_registered => self.begin_with_bytes(tag),
            result => self.finish(tag, result),
        }
    }
}

/// The request that the kernel describes. It checks the range against the disk; the volume, which
/// may have become smaller, checks it once more.
#[inline]
fn parse(desc: &IoDesc) -> Result<Request, IoError> {
    let fua = desc.has(UBLK_IO_F_FUA);
    let op = match desc.op() {
        IoOp::READ => Op::Read,
        IoOp::WRITE => Op::Write { fua },
        // Its range means nothing: Linux sends the highest sector.
        IoOp::FLUSH => return Ok(Request { op: Op::Flush, offset: 0, len: 0, is_registered: false }),
        IoOp::DISCARD => Op::Discard { fua },
        IoOp::WRITE_ZEROES => {
            Op::WriteZeroes { fua, may_unmap: !desc.has(UBLK_IO_F_NOUNMAP), only_fast: false }
        }
        _ => return Err(IoError::Unsupported),
    };
    let bytes = |sectors: u64| sectors.checked_mul(SECTOR.into()).ok_or(IoError::OutOfRange);
    let (offset, len) = (bytes(desc.start_sector)?, bytes(desc.nr_sectors.into())?);
    if op.moves_data() && len > MAX_BYTES.into() {
        return Err(IoError::BadLength);
    }
    Ok(Request { op, offset, len, is_registered: false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::Export;
    use crate::kernel_disk::{EINVAL, EIO, ENODEV, ENOMEM, EOPNOTSUPP};
    use blockmux_volume::random::SplitMix;
    use blockmux_volume::{MemVolume, Memory};
    use std::sync::Arc;

    const DEPTH: u16 = 4;

    fn exports() -> Exports {
        let volume = Arc::new(MemVolume::new(1 << 20));
        let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
        Exports::new(vec![export])
    }

    fn queue() -> UblkQueue {
        UblkQueue::new(&exports(), VolumeId(0), DEPTH, false).unwrap()
    }

    fn desc(op: IoOp, flags: u32, start_sector: u64, nr_sectors: u32) -> IoDesc {
        IoDesc { op_flags: u32::from(op.0) | flags, nr_sectors, start_sector, addr: 0 }
    }

    /// Begins the next I/O.
    fn begin(queue: &mut UblkQueue) -> Io {
        let (volume, io) = queue.poll_io().unwrap();
        queue.begin(volume, &io, false).unwrap();
        io
    }

    fn complete(queue: &mut UblkQueue, tag: u64, result: Result<Output, IoError>) -> Reply {
        queue.on_io(Completion { tag: Tag(tag), result }, Instant::now());
        queue.poll_reply().unwrap()
    }

    #[test]
    fn a_queue_that_refuses_writes_reads_and_flushes() {
        let mut queue = UblkQueue::new(&exports(), VolumeId(0), DEPTH, true).unwrap();
        for op in [IoOp::WRITE, IoOp::DISCARD, IoOp::WRITE_ZEROES] {
            assert_eq!(queue.on_request(0, &desc(op, 0, 8, 2), None), NewRequest::Taken);
            assert_eq!(queue.poll_reply().unwrap().result, -EIO, "{op:?}");
        }
        for op in [IoOp::READ, IoOp::FLUSH] {
            queue.on_request(0, &desc(op, 0, 8, 2), None);
            begin(&mut queue);
            let output = if op == IoOp::READ { Output::Data(SgList::default()) } else { Output::Nothing };
            assert!(complete(&mut queue, 0, Ok(output)).result >= 0);
        }
    }

    #[test]
    fn a_read_is_answered_with_its_data_and_length() {
        let mut queue = queue();
        assert_eq!(queue.on_request(3, &desc(IoOp::READ, 0, 8, 2), None), NewRequest::Taken);
        let io = begin(&mut queue);
        assert_eq!(
            (io.tag, io.op, io.offset, io.len, io.data.is_none()),
            (Tag(3), Op::Read, 4096, 1024, true)
        );
        assert!(queue.poll_reply().is_none());
        let data = SgList::one(Seg::from_slice(&[7; 1024]));
        let reply = complete(&mut queue, 3, Ok(Output::Data(data)));
        assert_eq!((reply.tag, reply.result, reply.data.map(|data| data.len())), (3, 1024, Some(1024)));
    }

    #[test]
    fn a_write_begins_when_its_data_is_there() {
        let mut queue = queue();
        assert_eq!(
            queue.on_request(0, &desc(IoOp::WRITE, UBLK_IO_F_FUA, 0, 1), None),
            NewRequest::NeedsData(512)
        );
        assert!(queue.poll_io().is_none());
        queue.on_data(0, Ok(SgList::one(Seg::from_slice(&[1; 512]))));
        let io = begin(&mut queue);
        assert_eq!((io.op, io.data.map(|data| data.len())), (Op::Write { fua: true }, Some(512)));
        let reply = complete(&mut queue, 0, Ok(Output::Nothing));
        assert_eq!((reply.result, reply.data.is_none()), (512, true));
        // Without data it fails.
        queue.on_request(0, &desc(IoOp::WRITE, 0, 0, 1), None);
        queue.on_data(0, Err(IoError::NoMemory));
        assert_eq!(queue.poll_reply().unwrap().result, -ENOMEM);
    }

    #[test]
    fn a_write_whose_data_is_there_in_part_is_answered_in_part() {
        let mut queue = queue();
        queue.on_request(0, &desc(IoOp::WRITE, 0, 8, 4), None);
        queue.on_data(0, Ok(SgList::one(Seg::from_slice(&[1; 512]))));
        let io = begin(&mut queue);
        assert_eq!((io.offset, io.len, io.data.map(|data| data.len())), (4096, 512, Some(512)));
        assert_eq!(complete(&mut queue, 0, Ok(Output::Nothing)).result, 512);
    }

    #[test]
    fn a_registered_buffer_goes_to_the_volume_and_is_answered_without_data() {
        let mut queue = queue();
        let registered = || Some(Memory::registered(5, MAX_BYTES as usize).seg(0, MAX_BYTES as usize));
        for (tag, op) in [(0, IoOp::READ), (1, IoOp::WRITE)] {
            let taken = queue.on_request(tag, &desc(op, 0, 8, 2), registered());
            assert_eq!(taken, NewRequest::Taken);
            let io = begin(&mut queue);
            assert!(io.is_in_registered_buffer() && io.data.as_ref().is_some_and(|data| data.len() == 1024));
            let output = if tag == 0 { Output::Data(io.data.unwrap()) } else { Output::Nothing };
            let reply = complete(&mut queue, tag.into(), Ok(output));
            assert_eq!((reply.result, reply.data.is_none()), (1024, true));
        }
        queue.on_request(2, &desc(IoOp::FLUSH, 0, 0, 0), registered());
        assert!(begin(&mut queue).data.is_none());
    }

    #[test]
    fn a_request_whose_registered_buffer_is_refused_begins_again_with_bytes() {
        let mut queue = queue();
        let registered = || Some(Memory::registered(5, MAX_BYTES as usize).seg(0, MAX_BYTES as usize));
        let refuse = |queue: &mut UblkQueue, tag| {
            begin(queue);
            queue.on_io(Completion { tag: Tag(tag), result: Err(IoError::Unsupported) }, Instant::now());
            assert!(queue.poll_reply().is_none());
        };
        queue.on_request(0, &desc(IoOp::READ, 0, 8, 2), registered());
        refuse(&mut queue, 0);
        assert!(begin(&mut queue).data.is_none() && queue.poll_refused().is_none());
        let data = SgList::one(Seg::from_slice(&[7; 1024]));
        assert!(complete(&mut queue, 0, Ok(Output::Data(data))).data.is_some());
        queue.on_request(1, &desc(IoOp::WRITE, 0, 8, 2), registered());
        refuse(&mut queue, 1);
        assert_eq!((queue.poll_io().is_none(), queue.poll_refused()), (true, Some((1, 1024))));
        queue.on_data(1, Ok(SgList::one(Seg::from_slice(&[1; 1024]))));
        assert!(!begin(&mut queue).is_in_registered_buffer());
        // Without a registered buffer, the same error is an answer.
        assert_eq!(complete(&mut queue, 1, Err(IoError::Unsupported)).result, -EOPNOTSUPP);
        queue.on_request(2, &desc(IoOp::WRITE, 0, 8, 2), registered());
        refuse(&mut queue, 2);
        queue.fail();
        assert_eq!((queue.poll_refused(), queue.poll_reply().map(|reply| reply.tag)), (None, Some(2)));
    }

    #[test]
    fn other_operations_are_answered_without_a_length() {
        let zeroes = |may_unmap| Op::WriteZeroes { fua: false, may_unmap, only_fast: false };
        for (op, flags, start, expected) in [
            (IoOp::FLUSH, 0, u64::MAX, Op::Flush),
            (IoOp::DISCARD, 0, 0, Op::Discard { fua: false }),
            (IoOp::WRITE_ZEROES, 0, 0, zeroes(true)),
            (IoOp::WRITE_ZEROES, UBLK_IO_F_NOUNMAP, 0, zeroes(false)),
        ] {
            let mut queue = queue();
            assert_eq!(queue.on_request(1, &desc(op, flags, start, 2048), None), NewRequest::Taken);
            assert_eq!(begin(&mut queue).op, expected);
            assert_eq!(complete(&mut queue, 1, Ok(Output::Nothing)).result, 0, "{op}");
        }
    }

    #[test]
    fn an_invalid_request_is_answered_with_an_error_at_once() {
        for (tag, desc, result) in [
            (0, desc(IoOp(4), 0, 0, 1), -EOPNOTSUPP),
            (0, desc(IoOp(255), u32::MAX << 8, u64::MAX, u32::MAX), -EOPNOTSUPP),
            (0, desc(IoOp::READ, 0, u64::MAX, 1), -EIO),
            (0, desc(IoOp::WRITE, 0, 0, 2049), -EINVAL),
            (DEPTH, desc(IoOp::READ, 0, 0, 1), -EINVAL),
            (u16::MAX, desc(IoOp::READ, 0, 0, 1), -EINVAL),
        ] {
            let mut queue = queue();
            assert_eq!(queue.on_request(tag, &desc, None), NewRequest::Taken);
            assert_eq!(queue.poll_reply().map(|reply| (reply.tag, reply.result)), Some((tag, result)));
            assert!(queue.poll_io().is_none());
        }
    }

    #[test]
    fn a_second_request_with_a_tag_is_refused_until_the_first_is_answered() {
        let mut queue = queue();
        let read = desc(IoOp::READ, 0, 0, 1);
        queue.on_request(0, &read, None);
        queue.on_request(0, &read, None);
        assert_eq!(queue.poll_reply().unwrap().result, -EINVAL);
        begin(&mut queue);
        complete(&mut queue, 0, Err(IoError::Medium));
        queue.on_request(0, &read, None);
        assert!(queue.poll_reply().is_none());
    }

    #[test]
    fn a_request_that_the_kernel_has_taken_back_makes_room_for_the_next() {
        let mut queue = queue();
        queue.on_request(0, &desc(IoOp::WRITE, 0, 0, 1), None);
        queue.withdraw(0);
        queue.on_data(0, Ok(SgList::one(Seg::from_slice(&[1; 512]))));
        assert!(queue.poll_io().is_none() && queue.poll_reply().is_none());
        queue.on_request(0, &desc(IoOp::READ, 0, 0, 1), None);
        assert_eq!(begin(&mut queue).op, Op::Read);
    }

    #[test]
    fn a_disk_that_is_removed_by_force_answers_everything_once() {
        let mut queue = queue();
        queue.on_request(0, &desc(IoOp::READ, 0, 0, 1), None);
        queue.on_request(1, &desc(IoOp::WRITE, 0, 0, 1), None);
        queue.on_request(2, &desc(IoOp::FLUSH, 0, 0, 0), None);
        begin(&mut queue);
        queue.fail();
        queue.fail();
        let replies: Vec<_> = std::iter::from_fn(|| queue.poll_reply()).collect();
        assert_eq!(
            replies.iter().map(|reply| (reply.tag, reply.result)).collect::<Vec<_>>(),
            [(0, -EIO), (1, -EIO), (2, -EIO)]
        );
        assert_eq!((queue.poll_cancel(), queue.poll_cancel()), (Some((VolumeId(0), Tag(0))), None));
        assert!(queue.poll_io().is_none(), "what had not begun does not begin");
        queue.on_data(1, Ok(SgList::one(Seg::from_slice(&[1; 512]))));
        queue.on_io(Completion { tag: Tag(0), result: Ok(Output::Nothing) }, Instant::now());
        assert!(queue.poll_io().is_none() && queue.poll_reply().is_none());
        queue.on_request(0, &desc(IoOp::READ, 0, 0, 1), None);
        assert_eq!(queue.poll_reply().unwrap().result, -EIO);
    }

    #[test]
    fn whatever_the_kernel_describes_is_answered_once() {
        for seed in 0..200 {
            let (mut random, mut queue) = (SplitMix::new(seed), queue());
            let (mut asked, mut answered, mut begun) = ([0_u32; 8], [0_u32; 8], Vec::new());
            for _ in 0..200 {
                let tag = random.below(8) as u16;
                match random.below(4) {
                    0 if asked[usize::from(tag)] == answered[usize::from(tag)] => {
                        let desc = IoDesc {
                            op_flags: random.next() as u32 & if random.below(2) == 0 { 7 } else { u32::MAX },
                            nr_sectors: random.next() as u32 >> random.below(32),
                            start_sector: random.next() >> random.below(64),
                            addr: random.next(),
                        };
                        asked[usize::from(tag)] += 1;
                        if let NewRequest::NeedsData(_) = queue.on_request(tag, &desc, None) {
                            queue.on_data(tag, Err(IoError::NoMemory));
                        }
                    }
                    1 => begun.extend(
                        queue.poll_io().filter(|(volume, io)| queue.begin(*volume, io, false).is_ok()),
                    ),
                    2 if !begun.is_empty() => {
                        let (_, io) = begun.swap_remove(random.below(begun.len() as u64) as usize);
                        queue.on_io(Completion { tag: io.tag, result: Ok(Output::Nothing) }, Instant::now());
                    }
                    _ if random.below(1000) == 0 => queue.fail(),
                    _ => {}
                }
                while let Some(reply) = queue.poll_reply() {
                    answered[usize::from(reply.tag)] += 1;
                }
            }
            queue.fail();
            while let Some(reply) = queue.poll_reply() {
                answered[usize::from(reply.tag)] += 1;
            }
            assert_eq!(asked, answered, "seed {seed}");
        }
    }

    #[test]
    fn a_removed_volume_fails_requests() {
        let exports = exports();
        let mut queue = UblkQueue::new(&exports, VolumeId(0), DEPTH, false).unwrap();
        exports.remove("a").unwrap().volume_state.retire();
        queue.on_request(0, &desc(IoOp::READ, 0, 0, 1), None);
        let (volume, io) = queue.poll_io().unwrap();
        assert!(matches!(queue.begin(volume, &io, false), Err(NotAdmitted::Denied(IoError::ShuttingDown))));
        assert_eq!(queue.poll_reply().unwrap().result, -ENODEV);
        assert!(UblkQueue::new(&exports, VolumeId(0), DEPTH, false).is_none());
    }
}
