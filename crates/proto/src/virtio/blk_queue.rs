//! One queue of a block device.

use super::inflight::InflightRecord;
use super::memory::GuestMemory;
use super::virtqueue::{RingAreas, RingError, Virtqueue};
use super::wire::blk::{ID_LEN, RANGE_F_UNMAP, RequestHeader, RequestType, SECTOR, SectorRange, Status};
use crate::driver::target::IoSource;
use crate::exports::{Exports, VolumeId};
use crate::volume_state::{Admission, Epoch, IoGuard, NotAdmitted, RequiredAccess};
use blockmux_volume::{Completion, Io, IoError, MAX_TRANSFER, Op, Seg, SgList, Tag};
use std::collections::VecDeque;
use std::time::Instant;
use zerocopy::IntoBytes;

/// What the driver of a device has chosen, and what its requests depend on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceState {
    /// A completed write is on stable storage: the driver sends no flushes.
    pub writes_through: bool,
    /// Writes fail.
    pub is_read_only: bool,
    /// Both sides say at which index they want to be notified.
    pub has_event_idx: bool,
    /// Length of the longest discard in bytes, as the configuration says.
    pub max_discard: u64,
    /// Length of the longest range of zeroes in bytes, as the configuration says.
    pub max_zeroes: u64,
    /// The serial number.
    pub serial: [u8; ID_LEN],
}

/// Whether the guest's driver wants to be notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// It does not, or nothing has completed.
    Nothing,
    /// Requests have completed, and it waits for that.
    Driver,
}

/// A queue of a block device: the source of the I/O that a guest requests there.
pub struct BlkQueue {
    volume: VolumeId,
    admission: Admission,
    ring: Virtqueue,
    memory: GuestMemory,
    device: DeviceState,
    record: Option<InflightRecord>,
    /// First descriptors of requests that a process that has ended had not answered.
    unanswered: VecDeque<u16>,
    /// The request of each first descriptor.
    slots: Vec<BlkSlot>,
    /// I/O that the driver has not taken.
    io: VecDeque<Io>,
    /// Chains that were returned, but not shown to the guest.
    batch: Vec<u16>,
    parts: ChainParts,
    is_enabled: bool,
    /// Nobody reads answers any longer.
    is_lost: bool,
    error: Option<RingError>,
}

#[derive(Default)]
struct BlkSlot {
    /// Absent while the guest has not sent a request, and once it is answered.
    request: Option<BlkRequest>,
    /// The I/O of the request is counted.
    guard: Option<IoGuard>,
}

/// A request that was not answered.
struct BlkRequest {
    /// Absent if the guest has given no place for it.
    status: Option<Seg>,
    /// Bytes that a success writes before the status.
    read_len: u32,
}

/// What a request asks for.
enum Asked {
    Io { op: Op, offset: u64, len: u64, data: Option<SgList> },
    Id,
}

impl BlkQueue {
    /// A queue of `size`, a power of two, of a volume of `exports`, which continues at
    /// `next_avail`, or where its record says. `None` if the volume was removed.
    #[must_use]
    pub fn new(
        (exports, volume): (&Exports, VolumeId),
        device: DeviceState,
        memory: GuestMemory,
        (areas, size, next_avail): (RingAreas, u16, u16),
        mut record: Option<InflightRecord>,
    ) -> Option<BlkQueue> {
        let volume_state = exports.volume_state(volume)?;
        let used_idx = areas.used.load_u16(super::wire::ring::RING_IDX);
        let unanswered: VecDeque<u16> = match &mut record {
            Some(record) => record.recover(used_idx).into(),
            None => VecDeque::new(),
        };
        // Every request that was fetched is answered, or in flight.
        let next_avail = match record {
            Some(_) => used_idx.wrapping_add(unanswered.len() as u16),
            None => next_avail,
        };
        let depth = usize::from(size);
        let mut slots = Vec::with_capacity(depth);
        slots.resize_with(depth, BlkSlot::default);
        Some(BlkQueue {
            volume,
            admission: Admission::new(&volume_state, None, Epoch::current()),
            ring: Virtqueue::new(areas, size, next_avail, device.has_event_idx),
            memory,
            device,
            record,
            unanswered,
            slots,
            io: VecDeque::with_capacity(depth),
            batch: Vec::with_capacity(depth.saturating_mul(2)),
            parts: ChainParts::default(),
            is_enabled: false,
            is_lost: false,
            error: None,
        })
    }

    /// Whether no I/O waits to be taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.io.is_empty()
    }

    /// Number of requests that a process that has ended had not answered.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        self.unanswered.len()
    }

    /// Takes further requests, or none until this is called again.
    pub fn enable(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled && !self.is_lost;
    }

    /// Whether the queue takes what the guest makes available: it is enabled, and its rings have
    /// made sense so far.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.is_enabled && self.error.is_none()
    }

    /// The guest's memory has changed. Requests in flight keep theirs.
    pub fn set_memory(&mut self, memory: GuestMemory, areas: RingAreas) {
        self.memory = memory;
        self.ring.set_areas(areas);
    }

    /// The index at which the available ring continues.
    #[must_use]
    pub fn next_avail(&self) -> u16 {
        self.ring.next_avail()
    }

    /// Takes what the guest has made available, at most as many requests as the queue has
    /// descriptors; returns whether there was any.
    ///
    /// # Errors
    /// If the rings make no sense: the queue takes no further requests. The error is returned once.
    #[inline]
    pub fn take_requests(&mut self) -> Result<bool, RingError> {
        if !self.takes_requests() {
            return Ok(false);
        }
        let mut has_taken = false;
        for _ in 0..self.ring.size() {
            match self.take_request() {
                Ok(false) => break,
                Ok(true) => has_taken = true,
                Err(error) => {
                    self.error = Some(error);
                    return Err(error);
                }
            }
        }
        Ok(has_taken)
    }

    /// Shows answers to the guest; returns whether its driver wants to be notified.
    #[inline]
    pub fn publish(&mut self) -> Notify {
        if self.batch.is_empty() || self.is_lost {
            return Notify::Nothing;
        }
        let is_wanted = self.ring.publish();
        if let Some(record) = &self.record {
            record.end_batch(&self.batch, self.ring.used_idx());
        }
        self.batch.clear();
        if is_wanted { Notify::Driver } else { Notify::Nothing }
    }

    /// Asks the guest for a notification of its next request; returns whether one is available
    /// already.
    pub fn ask_for_kicks(&mut self) -> bool {
        !self.is_lost && self.ring.ask_for_kicks() && self.takes_requests()
    }

    /// Tells the guest that it need not notify, because its rings are looked at.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        if !self.is_lost {
            self.ring.suppress_kicks();
        }
    }

    /// Answers nothing from now on, and takes no requests: the front end is lost, or the device
    /// ends with requests in flight. Its memory is not touched any more except by I/O that has
    /// begun. The record keeps the requests for the next process.
    pub fn lose(&mut self) {
        (self.is_lost, self.is_enabled) = (true, false);
        self.io.clear();
    }

    #[inline]
    fn take_request(&mut self) -> Result<bool, RingError> {
        let head = match self.unanswered.pop_front() {
            Some(head) => head,
            None => match self.ring.pop()? {
                Some(head) => head,
                None => return Ok(false),
            },
        };
        match self.slots.get(usize::from(head)) {
            Some(BlkSlot { request: None, .. }) => {}
            Some(_) => return Err(RingError::Twice(head)),
            None => return Err(RingError::NoDescriptor(head)),
        }
        self.parts.collect(&self.ring, &self.memory, head)?;
        if let Some(record) = &mut self.record {
            record.begin(head);
        }
        let status = self.parts.take_status();
        let asked = if status.is_some() { self.parts.parse(&self.device) } else { Err(Status::IOERR) };
        let mut request = BlkRequest { status, read_len: 0 };
        let answer = match asked {
            Ok(Asked::Io { op, offset, len, data }) => {
                self.io.push_back(Io { tag: Tag(head.into()), op, offset, len, data });
                if op == Op::Read {
                    request.read_len = len as u32;
                }
                None
            }
            Ok(Asked::Id) => {
                request.read_len = self.parts.write_id(&self.device.serial);
                Some(Status::OK)
            }
            Err(status) => Some(status),
        };
        self.parts.clear();
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            slot.request = Some(request);
        }
        if let Some(status) = answer {
            self.finish(head, status);
        }
        Ok(true)
    }

    /// Answers a request.
    #[inline]
    fn finish(&mut self, head: u16, status: Status) {
        let slot = self.slots.get_mut(usize::from(head));
        let Some(request) = slot.and_then(|slot| slot.request.take()) else { return };
        if self.is_lost {
            return;
        }
        let mut written = if status == Status::OK { request.read_len } else { 0 };
        if let Some(place) = &request.status {
            place.copy_from(&[status.0]);
            written = written.saturating_add(1);
        }
        self.ring.push_used(head, written);
        if let Some(record) = &self.record {
            record.add_to_batch(head);
        }
        self.batch.push(head);
    }
}

impl IoSource for BlkQueue {
    fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        Some((self.volume, self.io.pop_front()?))
    }

    #[inline]
    fn begin(&mut self, _volume: VolumeId, io: &Io, _is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.admission.admit(io.op, (io.offset, io.len), RequiredAccess::of(io.op), None);
        match admitted {
            Ok(guard) => {
                if let Some(slot) = self.slots.get_mut(io.tag.0 as usize) {
                    slot.guard = guard;
                }
                Ok(())
            }
            Err(NotAdmitted::Denied(error)) => {
                self.finish(io.tag.0 as u16, status_of(error));
                Err(NotAdmitted::Denied(error))
            }
            Err(wait) => Err(wait),
        }
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        None
    }

    #[inline]
    fn on_io(&mut self, done: Completion, _now: Instant) {
        let head = done.tag.0 as u16;
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            slot.guard = None;
        }
        self.finish(head, done.result.map_or_else(status_of, |_| Status::OK));
    }
}

/// The buffers of a chain, reused for the next one.
#[derive(Default)]
struct ChainParts {
    readable: Vec<Seg>,
    writable: Vec<Seg>,
    /// A buffer is not in the guest's memory.
    is_outside: bool,
}

impl ChainParts {
    #[inline]
    fn collect(&mut self, ring: &Virtqueue, memory: &GuestMemory, head: u16) -> Result<(), RingError> {
        self.clear();
        ring.walk(memory, head, |buffer| {
            let parts = if buffer.is_written { &mut self.writable } else { &mut self.readable };
            let (mut addr, mut len) = (buffer.addr, buffer.len);
            while len > 0 {
                let Some(part) = memory.first_part(addr, len) else {
                    self.is_outside = true;
                    break;
                };
                addr = addr.wrapping_add(part.len() as u64);
                len = len.saturating_sub(part.len() as u32);
                parts.push(part);
            }
            Ok(())
        })
    }

    /// Drops the references to memory, which may go away.
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.is_outside = false;
    }

    /// Removes the place of the status, which is the last byte that the device writes.
    #[inline]
    fn take_status(&mut self) -> Option<Seg> {
        let last = self.writable.pop()?;
        let before = last.len().saturating_sub(1);
        if before > 0 {
            self.writable.push(last.slice(0, before));
        }
        Some(last.slice(before, 1))
    }

    /// What the request asks for, or the status of one that makes no sense.
    #[inline]
    fn parse(&self, device: &DeviceState) -> Result<Asked, Status> {
        let mut header = RequestHeader::default();
        if self.is_outside || !copy_out(&self.readable, 0, header.as_mut_bytes()) {
            return Err(Status::IOERR);
        }
        let kind = RequestType(header.kind.get());
        let offset = header.sector.get().checked_mul(SECTOR).ok_or(Status::IOERR);
        let io = |op, offset, data: SgList| {
            let len = data.len() as u64;
            let is_valid = len <= MAX_TRANSFER.into() && len.is_multiple_of(SECTOR);
            if is_valid { Ok(Asked::Io { op, offset, len, data: Some(data) }) } else { Err(Status::IOERR) }
        };
        match kind {
            RequestType::IN => io(Op::Read, offset?, list(&self.writable, 0)),
            RequestType::OUT | RequestType::DISCARD | RequestType::WRITE_ZEROES if device.is_read_only => {
                Err(Status::IOERR)
            }
            RequestType::OUT => {
                let fua = device.writes_through;
                io(Op::Write { fua }, offset?, list(&self.readable, size_of::<RequestHeader>()))
            }
            RequestType::FLUSH => Ok(Asked::Io { op: Op::Flush, offset: 0, len: 0, data: None }),
            RequestType::DISCARD | RequestType::WRITE_ZEROES => self.parse_range(kind, device),
            RequestType::GET_ID => Ok(Asked::Id),
            _ => Err(Status::UNSUPP),
        }
    }

    fn parse_range(&self, kind: RequestType, device: &DeviceState) -> Result<Asked, Status> {
        let mut range = SectorRange::default();
        let total: usize = self.readable.iter().map(Seg::len).sum();
        let is_one = total == size_of::<RequestHeader>().saturating_add(size_of::<SectorRange>());
        if !is_one || !copy_out(&self.readable, size_of::<RequestHeader>(), range.as_mut_bytes()) {
            return Err(Status::IOERR);
        }
        let (flags, fua) = (range.flags.get(), device.writes_through);
        let (op, max) = match kind {
            RequestType::DISCARD if flags == 0 => (Op::Discard { fua }, device.max_discard),
            RequestType::WRITE_ZEROES if flags & !RANGE_F_UNMAP == 0 => {
                (Op::WriteZeroes { fua, may_unmap: flags != 0, only_fast: false }, device.max_zeroes)
            }
            _ => return Err(Status::UNSUPP),
        };
        let offset = range.sector.get().checked_mul(SECTOR).ok_or(Status::IOERR)?;
        let len = u64::from(range.num_sectors.get()).wrapping_mul(SECTOR);
        if len > max { Err(Status::IOERR) } else { Ok(Asked::Io { op, offset, len, data: None }) }
    }

    /// Writes the serial number, as much as there is room for; returns the number of bytes.
    fn write_id(&self, serial: &[u8; ID_LEN]) -> u32 {
        let mut rest = serial.as_slice();
        for part in &self.writable {
            let (first, then) = rest.split_at(part.len().min(rest.len()));
            part.copy_from(first);
            rest = then;
        }
        ID_LEN.saturating_sub(rest.len()) as u32
    }
}

/// Copies bytes from `skip` on; returns whether there are enough.
#[inline]
fn copy_out(parts: &[Seg], mut skip: usize, mut to: &mut [u8]) -> bool {
    for part in parts {
        let len = part.len().saturating_sub(skip).min(to.len());
        let (now, later) = std::mem::take(&mut to).split_at_mut(len);
        if !now.is_empty() {
            part.slice(skip, now.len()).copy_to(now);
        }
        to = later;
        skip = skip.saturating_sub(part.len());
        if to.is_empty() {
            return true;
        }
    }
    false
}

/// The memory from `skip` on.
#[inline]
fn list(parts: &[Seg], mut skip: usize) -> SgList {
    let mut list = SgList::default();
    for part in parts {
        if skip == 0 {
            list.push(part.clone());
        } else if skip < part.len() {
            list.push(part.slice(skip, part.len().saturating_sub(skip)));
        }
        skip = skip.saturating_sub(part.len());
    }
    list
}

/// The status of a request that has failed.
fn status_of(error: IoError) -> Status {
    match error {
        IoError::Unsupported => Status::UNSUPP,
        IoError::OutOfRange
        | IoError::Misaligned
        | IoError::BadLength
        | IoError::ReadOnly
        | IoError::Reserved
        | IoError::NoSpace
        | IoError::Medium
        | IoError::NoMemory
        | IoError::PathLost
        | IoError::Aborted
        | IoError::ShuttingDown
        | IoError::Fenced => Status::IOERR,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::BlkDevice;
    use super::super::driver_ring::{DriverRing, ring_areas, ring_len, write_descs};
    use super::super::memory::GuestRegion;
    use super::super::virtqueue::Buffer;
    use super::super::wire::Features;
    use super::super::wire::ring::Desc;
    use super::super::wire::vhost_user::inflight_region;
    use super::*;
    use crate::exports::Export;
    use blockmux_volume::random::SplitMix;
    use blockmux_volume::{MemVolume, Memory, Output, Volume, VolumeInfo};
    use std::sync::Arc;

    const SIZE: u16 = 8;
    const SERIAL: &str = "0123456789";
    /// Where the requests' headers, their status and their data are.
    const HEADERS: u64 = 0x10_000;
    const STATUS: u64 = 0x11_000;
    const DATA: u64 = 0x12_000;

    /// A guest with 512 KiB of memory, and its device of 1 MiB.
    struct Guest {
        memory: Memory,
        driver: DriverRing,
        queue: BlkQueue,
        exports: Exports,
    }

    fn exports() -> Exports {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
        Exports::new(vec![Export {
            name: "a".to_owned(),
            description: String::new(),
            read_only: false,
            volume,
        }])
    }

    fn guest_memory(memory: &Memory) -> GuestMemory {
        GuestMemory::new(vec![GuestRegion { guest_addr: 0, user_addr: 1 << 40, memory: memory.clone() }])
    }

    fn areas(memory: &Memory) -> RingAreas {
        ring_areas(&memory.seg(0, ring_len(SIZE)), SIZE)
    }

    fn read(len: u32) -> Vec<Buffer> {
        vec![
            Buffer { addr: HEADERS, len: 16, is_written: false },
            Buffer { addr: DATA, len, is_written: true },
            Buffer { addr: STATUS, len: 1, is_written: true },
        ]
    }

    fn write(len: u32) -> Vec<Buffer> {
        let mut buffers = read(len);
        buffers[1].is_written = false;
        buffers
    }

    impl Guest {
        fn with(features: Features, info: &VolumeInfo, record: Option<InflightRecord>) -> Guest {
            let memory = Memory::from_heap(512 << 10);
            let has_event_idx = features.contains(Features::RING_EVENT_IDX);
            let driver = DriverRing::new(&memory.seg(0, ring_len(SIZE)), SIZE, has_event_idx);
            let (exports, state) = (exports(), BlkDevice::new(info, 1, SERIAL).state(features));
            let mut queue = BlkQueue::new(
                (&exports, VolumeId(0)),
                state,
                guest_memory(&memory),
                (areas(&memory), SIZE, 0),
                record,
            )
            .unwrap();
            queue.enable(true);
            Guest { memory, driver, queue, exports }
        }

        fn new() -> Guest {
            Guest::with(Features::RING_EVENT_IDX, &VolumeInfo::new(1 << 20), None)
        }

        fn header(&self, kind: RequestType, sector: u64) {
            let header = RequestHeader { kind: kind.0.into(), reserved: 0.into(), sector: sector.into() };
            self.memory.seg(HEADERS as usize, 16).copy_from(header.as_bytes());
            self.memory.seg(STATUS as usize, 1).copy_from(&[0xff]);
        }

        /// Makes a request available with the descriptors from `first` on.
        fn send(&mut self, first: u16, kind: RequestType, sector: u64, buffers: &[Buffer]) {
            self.header(kind, sector);
            self.driver.write_chain(first, buffers);
            self.driver.push(first);
            self.driver.publish();
        }

        /// Takes requests and begins the next I/O.
        fn begin(&mut self) -> Option<Io> {
            self.queue.take_requests().unwrap();
            let (volume, io) = self.queue.poll_io()?;
            self.queue.begin(volume, &io, false).unwrap();
            Some(io)
        }

        fn complete(&mut self, tag: u64, result: Result<Output, IoError>) {
            self.queue.on_io(Completion { tag: Tag(tag), result }, Instant::now());
        }

        /// The status and the length of the next answer.
        fn answer(&mut self) -> Option<(Status, u32)> {
            self.queue.publish();
            let (_, len) = self.driver.pop_used()?;
            Some((Status(self.memory.seg(STATUS as usize, 1).to_vec()[0]), len))
        }

        /// The answer to a request that needs no I/O.
        fn answer_to(&mut self, kind: RequestType, sector: u64, buffers: &[Buffer]) -> Option<(Status, u32)> {
            self.send(0, kind, sector, buffers);
            assert_eq!(self.queue.take_requests(), Ok(true));
            assert!(self.queue.poll_io().is_none());
            self.answer()
        }
    }

    #[test]
    fn a_read_goes_straight_into_the_guests_memory() {
        let mut guest = Guest::new();
        guest.send(3, RequestType::IN, 8, &read(4096));
        let io = guest.begin().unwrap();
        assert_eq!((io.tag, io.op, io.offset, io.len), (Tag(3), Op::Read, 4096, 4096));
        let data = io.data.unwrap();
        data.copy_from(&[7; 4096]);
        assert_eq!(guest.answer(), None);
        guest.complete(3, Ok(Output::Data(data)));
        assert_eq!(guest.answer(), Some((Status::OK, 4097)));
        assert_eq!(guest.memory.seg(DATA as usize, 4096).to_vec(), [7; 4096]);
    }

    #[test]
    fn a_write_is_taken_from_the_guests_memory_however_it_is_cut() {
        for cuts in [vec![], vec![10], vec![16, 100], vec![1, 2, 3, 16, 200, 528]] {
            let mut guest = Guest::new();
            guest.memory.seg(DATA as usize, 16).copy_from(&[0; 16]);
            // The header is directly before the data.
            let header = RequestHeader { kind: 1.into(), reserved: 0.into(), sector: 2.into() };
            guest.memory.seg(DATA as usize - 16, 16).copy_from(header.as_bytes());
            guest.memory.seg(DATA as usize, 512).copy_from(&[9; 512]);
            let mut buffers = Vec::new();
            let mut at = 0;
            for end in cuts.into_iter().chain([528]) {
                buffers.push(Buffer { addr: DATA - 16 + at, len: (end - at) as u32, is_written: false });
                at = end;
            }
            buffers.push(Buffer { addr: STATUS, len: 1, is_written: true });
            guest.driver.write_chain(0, &buffers);
            guest.driver.push(0);
            guest.driver.publish();
            let io = guest.begin().unwrap();
            assert_eq!((io.op, io.offset), (Op::Write { fua: false }, 1024));
            assert_eq!(io.data.unwrap().to_vec(), [9; 512]);
            guest.complete(0, Ok(Output::Nothing));
            assert_eq!(guest.answer(), Some((Status::OK, 1)));
        }
    }

    #[test]
    fn an_indirect_table_is_read_from_the_guests_memory() {
        let mut guest = Guest::new();
        guest.header(RequestType::IN, 0);
        let table = guest.memory.seg(0x8000, 3 * size_of::<Desc>());
        write_descs(&table, 0, &read(512));
        guest.driver.write_indirect(5, 0x8000, 48);
        guest.driver.push(5);
        guest.driver.publish();
        let io = guest.begin().unwrap();
        assert_eq!((io.tag, io.len), (Tag(5), 512));
    }

    #[test]
    fn other_requests_become_operations_of_the_volume() {
        let range = |flags| SectorRange { sector: 4.into(), num_sectors: 6.into(), flags: u32::into(flags) };
        let zeroes = |may_unmap| Op::WriteZeroes { fua: false, may_unmap, only_fast: false };
        for (kind, flags, expected) in [
            (RequestType::DISCARD, 0, Op::Discard { fua: false }),
            (RequestType::WRITE_ZEROES, 0, zeroes(false)),
            (RequestType::WRITE_ZEROES, 1, zeroes(true)),
        ] {
            let mut guest = Guest::new();
            guest.memory.seg(DATA as usize, 16).copy_from(range(flags).as_bytes());
            guest.send(0, kind, 0, &write(16));
            let io = guest.begin().unwrap();
            assert_eq!((io.op, io.offset, io.len), (expected, 2048, 3072));
        }
        let mut guest = Guest::new();
        let (header, status) = (read(0)[0], read(0)[2]);
        guest.send(0, RequestType::FLUSH, 77, &[header, status]);
        let io = guest.begin().unwrap();
        assert_eq!((io.op, io.offset, io.len), (Op::Flush, 0, 0));
        guest.complete(0, Err(IoError::Unsupported));
        assert_eq!(guest.answer(), Some((Status::UNSUPP, 1)));
    }

    #[test]
    fn the_serial_number_is_answered_at_once() {
        let mut guest = Guest::new();
        assert_eq!(guest.answer_to(RequestType::GET_ID, 0, &read(20)), Some((Status::OK, 21)));
        let id = guest.memory.seg(DATA as usize, 20).to_vec();
        assert_eq!(id, [SERIAL.as_bytes(), &[0; 10]].concat());
        assert_eq!(guest.answer_to(RequestType::GET_ID, 0, &read(3)), Some((Status::OK, 4)));
    }

    #[test]
    fn a_request_that_makes_no_sense_fails_alone() {
        let mut guest = Guest::new();
        let outside = |addr, len| vec![read(0)[0], Buffer { addr, len, is_written: true }, read(0)[2]];
        for (kind, sector, buffers, status) in [
            (RequestType(77), 0, read(512), Status::UNSUPP),
            (RequestType::IN, u64::MAX, read(512), Status::IOERR),
            (RequestType::IN, 0, read(511), Status::IOERR),
            (RequestType::IN, 0, outside(u64::MAX - 100, 512), Status::IOERR),
            (RequestType::IN, 0, outside(DATA, u32::MAX), Status::IOERR),
            (RequestType::IN, 0, vec![read(0)[2]], Status::IOERR),
            (RequestType::DISCARD, 0, write(32), Status::IOERR),
            (RequestType::DISCARD, 0, write(15), Status::IOERR),
        ] {
            let answer = guest.answer_to(kind, sector, &buffers);
            assert_eq!(answer, Some((status, 1)), "{kind} {sector} {buffers:?}");
        }
        // Without a place for the status.
        assert_eq!(guest.answer_to(RequestType::IN, 0, &read(0)[..1]).map(|(_, len)| len), Some(0));
        guest.memory.seg(DATA as usize, 16).copy_from(&[0xff; 16]);
        assert_eq!(guest.answer_to(RequestType::WRITE_ZEROES, 0, &write(16)), Some((Status::UNSUPP, 1)));
    }

    #[test]
    fn a_range_is_as_long_as_the_configuration_allows_at_most() {
        let sectors = |bytes: u64| (bytes / SECTOR) as u32;
        for (kind, max) in
            [(RequestType::DISCARD, sectors(1 << 30)), (RequestType::WRITE_ZEROES, sectors(32 << 20))]
        {
            let range = |sectors: u32| SectorRange { num_sectors: sectors.into(), ..SectorRange::default() };
            let mut guest = Guest::new();
            guest.memory.seg(DATA as usize, 16).copy_from(range(max + 1).as_bytes());
            assert_eq!(guest.answer_to(kind, 0, &write(16)), Some((Status::IOERR, 1)), "{kind}");
            guest.memory.seg(DATA as usize, 16).copy_from(range(max).as_bytes());
            guest.send(0, kind, 0, &write(16));
            guest.queue.take_requests().unwrap();
            // The volume decides about its end.
            assert_eq!(guest.queue.poll_io().map(|(_, io)| io.len), Some(u64::from(max) * SECTOR), "{kind}");
        }
    }

    #[test]
    fn a_read_only_device_refuses_what_changes_it() {
        let info = VolumeInfo { read_only: true, ..VolumeInfo::new(1 << 20) };
        let mut guest = Guest::with(Features::empty(), &info, None);
        for kind in [RequestType::OUT, RequestType::DISCARD, RequestType::WRITE_ZEROES] {
            assert_eq!(guest.answer_to(kind, 0, &write(512)), Some((Status::IOERR, 1)));
        }
    }

    #[test]
    fn a_driver_without_flushes_writes_through_the_cache() {
        let info = VolumeInfo { write_cache: true, ..VolumeInfo::new(1 << 20) };
        let mut guest = Guest::with(Features::empty(), &info, None);
        guest.send(0, RequestType::OUT, 0, &write(512));
        assert_eq!(guest.begin().unwrap().op, Op::Write { fua: true });
    }

    #[test]
    fn rings_that_make_no_sense_stop_the_queue() {
        let poke = |break_it: fn(&mut Guest)| {
            let mut guest = Guest::new();
            guest.send(0, RequestType::IN, 0, &read(512));
            break_it(&mut guest);
            let error = guest.queue.take_requests().unwrap_err();
            assert_eq!(guest.queue.take_requests(), Ok(false), "{error}");
            error
        };
        let avail = |guest: &Guest| areas(&guest.memory).avail;
        assert_eq!(poke(|guest| avail_idx(guest, 9)), RingError::TooManyAvailable(9));
        fn avail_idx(guest: &Guest, idx: u16) {
            areas(&guest.memory).avail.store_u16(2, idx);
        }
        assert_eq!(poke(|guest| areas(&guest.memory).avail.store_u16(4, 8)), RingError::NoDescriptor(8));
        let mut guest = Guest::new();
        guest.send(0, RequestType::IN, 0, &read(512));
        guest.begin().unwrap();
        guest.driver.push(0);
        guest.driver.publish();
        assert_eq!(guest.queue.take_requests(), Err(RingError::Twice(0)));
        let _ = avail(&guest);
        // The request in flight is answered.
        guest.complete(0, Ok(Output::Nothing));
        assert_eq!(guest.answer(), Some((Status::OK, 513)));
        // A chain with a cycle.
        let cycle = poke(|guest| {
            let desc = areas(&guest.memory).desc;
            desc.store_u16(16 + 12, 1);
            desc.store_u16(16 + 14, 1);
        });
        assert_eq!(cycle, RingError::LongChain(8));
        let table = |len: u32, addr: u64| {
            let mut guest = Guest::new();
            guest.driver.write_indirect(0, addr, len);
            guest.driver.push(0);
            guest.driver.publish();
            guest.queue.take_requests().unwrap_err()
        };
        assert_eq!(table(17, 0), RingError::BadTable(17));
        assert_eq!(table(0, 0), RingError::BadTable(0));
        assert_eq!(table(16 << 10 | 16, 0), RingError::BadTable(16 << 10 | 16));
        assert_eq!(table(64, (512 << 10) - 48), RingError::BadTable(64));
    }

    #[test]
    fn notifications_are_sent_only_if_they_are_wanted() {
        for features in [Features::RING_EVENT_IDX, Features::empty()] {
            let mut guest = Guest::with(features, &VolumeInfo::new(1 << 20), None);
            guest.header(RequestType::IN, 0);
            guest.driver.write_chain(0, &read(512));
            guest.driver.push(0);
            assert!(guest.driver.publish(), "a new queue waits for notifications");
            guest.begin().unwrap();
            guest.queue.suppress_kicks();
            guest.driver.write_chain(3, &read(512));
            guest.driver.push(3);
            assert!(!guest.driver.publish());
            assert!(guest.queue.ask_for_kicks(), "a request has come meanwhile");
            guest.begin().unwrap();
            assert!(!guest.queue.ask_for_kicks());
            assert!(!guest.driver.ask_for_calls());
            guest.complete(0, Ok(Output::Nothing));
            assert_eq!(guest.queue.publish(), Notify::Driver);
            assert_eq!(guest.queue.publish(), Notify::Nothing);
            assert!(guest.driver.ask_for_calls());
        }
        // With event indices the driver is notified once for what it has not looked at.
        let mut guest = Guest::new();
        guest.send(0, RequestType::IN, 0, &read(512));
        guest.send(3, RequestType::IN, 0, &read(512));
        guest.begin().unwrap();
        guest.begin().unwrap();
        guest.complete(0, Ok(Output::Nothing));
        assert_eq!(guest.queue.publish(), Notify::Driver);
        guest.complete(3, Ok(Output::Nothing));
        assert_eq!(guest.queue.publish(), Notify::Nothing);
    }

    #[test]
    fn a_next_process_goes_on_with_the_requests_that_were_not_answered() {
        let len = inflight_region::len(SIZE);
        let memory = Memory::from_heap(len).seg(0, len);
        let record = || InflightRecord::of_queue(&memory, 0, SIZE, SIZE);
        let mut guest = Guest::with(Features::RING_EVENT_IDX, &VolumeInfo::new(1 << 20), record());
        for first in [0, 3] {
            guest.send(first, RequestType::IN, u64::from(first), &read(512));
            guest.begin().unwrap();
        }
        guest.complete(0, Ok(Output::Nothing));
        assert_eq!(guest.answer(), Some((Status::OK, 513)));
        guest.send(0, RequestType::IN, 7, &read(512));
        // The next process.
        let state = BlkDevice::new(&VolumeInfo::new(1 << 20), 1, SERIAL).state(Features::RING_EVENT_IDX);
        let rings = (areas(&guest.memory), SIZE, 0);
        guest.queue =
            BlkQueue::new((&guest.exports, VolumeId(0)), state, guest_memory(&guest.memory), rings, record())
                .unwrap();
        assert_eq!(guest.queue.unanswered(), 1);
        guest.queue.enable(true);
        assert_eq!(guest.begin().map(|io| io.tag), Some(Tag(3)));
        assert_eq!(guest.begin().map(|io| io.tag), Some(Tag(0)));
        assert_eq!(guest.queue.next_avail(), 3);
    }

    #[test]
    fn a_queue_whose_front_end_is_lost_answers_nothing() {
        let mut guest = Guest::new();
        guest.send(0, RequestType::IN, 0, &read(512));
        guest.begin().unwrap();
        guest.queue.suppress_kicks();
        guest.queue.lose();
        let rings = guest.memory.seg(0, ring_len(SIZE));
        let before = rings.to_vec();
        guest.complete(0, Ok(Output::Nothing));
        assert_eq!(guest.answer(), None);
        guest.queue.enable(true);
        assert_eq!(guest.queue.take_requests(), Ok(false));
        // The next process has the rings.
        assert!(!guest.queue.ask_for_kicks());
        guest.queue.suppress_kicks();
        assert_eq!(rings.to_vec(), before);
    }

    #[test]
    fn a_removed_volume_fails_requests() {
        let mut guest = Guest::new();
        guest.exports.remove("a").unwrap().volume_state.retire();
        guest.send(0, RequestType::IN, 0, &read(512));
        guest.queue.take_requests().unwrap();
        let (volume, io) = guest.queue.poll_io().unwrap();
        assert!(matches!(
            guest.queue.begin(volume, &io, false),
            Err(NotAdmitted::Denied(IoError::ShuttingDown))
        ));
        assert_eq!(guest.answer(), Some((Status::IOERR, 1)));
    }

    #[test]
    fn whatever_the_guest_does_to_its_memory_stops_at_most_its_queue() {
        for seed in 0..300 {
            let mut random = SplitMix::new(seed);
            let len = inflight_region::len(SIZE);
            let record = Memory::from_heap(len).seg(0, len);
            let own = InflightRecord::of_queue(&record, 0, SIZE, SIZE);
            let mut guest = Guest::with(Features::RING_EVENT_IDX, &VolumeInfo::new(1 << 20), own);
            let mut begun = Vec::new();
            for _ in 0..60 {
                // Anything in the rings and the headers, and in the record.
                for _ in 0..random.below(4) {
                    let at = 2 * random.below(0x90) as usize;
                    guest.memory.seg(at, 2).copy_from(&(random.below(20) as u16).to_le_bytes());
                    let at = (random.below(len as u64)) as usize;
                    record.slice(at, 1).copy_from(&[random.next() as u8]);
                }
                guest.send(
                    random.below(6) as u16,
                    RequestType(random.below(14) as u32),
                    random.below(4),
                    &read(512),
                );
                let _ = guest.queue.take_requests();
                while let Some((volume, io)) = guest.queue.poll_io() {
                    if guest.queue.begin(volume, &io, false).is_ok() {
                        begun.push(io);
                    }
                }
                if !begun.is_empty() {
                    let io: Io = begun.swap_remove(random.below(begun.len() as u64) as usize);
                    guest.complete(io.tag.0, Ok(Output::Nothing));
                }
                guest.queue.publish();
                assert!(begun.len() <= usize::from(SIZE), "seed {seed}");
            }
        }
    }
}
