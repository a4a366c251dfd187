//! The driver's side of one queue of a block device.
//!
//! Requests of volumes are not in memory that the back end shares, so data is copied to and from
//! the queue's own memory: a descriptor table and rings, and for each command in flight a header
//! with its table of descriptors, and room for its data.

use super::driver_ring::{DriverRing, ring_len, ring_offsets, write_descs};
use super::virtqueue::Buffer;
use super::wire::Features;
use super::wire::blk::{Config, RANGE_F_UNMAP, RequestHeader, RequestType, SECTOR, SectorRange, Status};
use super::wire::ring::Desc;
use super::wire::vhost_user::VringAddr;
use crate::initiator::command_memory::CommandMemory;
use crate::initiator::command_queue::{
    CommandQueue, CommandRequest, CommandSet, CompletionClass, DataTransfer, QueuedCommand,
};
use crate::initiator::command_queue::{IoPlan, ZEROES, Zeroes};
use crate::initiator::job::{CommandKind, CommandPiece, CommandPieces, IoJob};
use crate::slots::SlotKey;
use blockmux_volume::{Completion, Io, IoError, Op, Pool, Seg, SgList, VolumeInfo};
use zerocopy::{FromBytes, IntoBytes};

/// A block device of a back end, as its configuration describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteDisk {
    /// As a volume.
    pub info: VolumeInfo,
    /// The features that the driver accepts.
    pub accepted: Features,
    /// Most bytes of one discard.
    max_discard: Option<u64>,
    /// Most bytes of one range of zeroes.
    max_zeroes: Option<u64>,
    zeroes_unmap: bool,
}

/// Why a back end cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteDiskError {
    /// It does not follow version 1 of virtio.
    #[error("the device is a legacy device (no VIRTIO_F_VERSION_1)")]
    Legacy,
    /// Its configuration is too short.
    #[error("the configuration space has only {0} bytes")]
    Config(usize),
    /// Its blocks have an impossible size.
    #[error("the device has blocks of {0} bytes")]
    Blocks(u32),
    /// It has returned a chain that it does not have.
    #[error("the back end has returned descriptor {0}, which it did not have")]
    NotInFlight(u32),
}

impl RemoteDisk {
    /// A device that offers these features and has this configuration.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn new(offered: Features, config: &[u8]) -> Result<RemoteDisk, RemoteDiskError> {
        if !offered.contains(Features::VERSION_1) {
            return Err(RemoteDiskError::Legacy);
        }
        let config = Config::read_from_prefix(config).map_err(|_| RemoteDiskError::Config(config.len()))?.0;
        let has = |feature| offered.contains(feature);
        let block = if has(Features::BLK_BLK_SIZE) { config.blk_size.get() } else { SECTOR as u32 };
        if !block.is_power_of_two() || !(SECTOR as u32..=MAX_BLOCK).contains(&block) {
            return Err(RemoteDiskError::Blocks(block));
        }
        let topology = has(Features::BLK_TOPOLOGY);
        let exp = if topology { u32::from(config.physical_block_exp) } else { 0 };
        let physical = block.checked_shl(exp).filter(|physical| (block..=MAX_BLOCK).contains(physical));
        let physical = physical.unwrap_or(block);
        let optimal = if topology { config.opt_io_size.get().saturating_mul(block) } else { 0 };
        let usual = physical.max(USUAL_BLOCK);
        let preferred = Some(optimal).filter(|bytes| bytes.is_power_of_two()).unwrap_or(usual).max(usual);
        let whole_blocks = |sectors: u32| {
            let bytes = u64::from(sectors).saturating_mul(SECTOR);
            Some(whole(bytes, block)).filter(|bytes| *bytes > 0)
        };
        let if_has = |feature, sectors: u32| whole_blocks(sectors).filter(|_| has(feature));
        let max_discard = if_has(Features::BLK_DISCARD, config.max_discard_sectors.get());
        let alignment = config.discard_sector_alignment.get().saturating_mul(SECTOR as u32);
        let granularity = Some(alignment).filter(|bytes| bytes.is_power_of_two()).unwrap_or(block).max(block);
        let max_zeroes = if_has(Features::BLK_WRITE_ZEROES, config.max_write_zeroes_sectors.get());
        let zeroes_unmap = config.write_zeroes_may_unmap != 0;
        let size = config.capacity.get().saturating_mul(SECTOR);
        let info = VolumeInfo {
            size: whole(size, block),
            logical_block: block,
            physical_block: physical,
            preferred_block: preferred,
            read_only: has(Features::BLK_RO),
            write_cache: has(Features::BLK_FLUSH),
            discard_granularity: if max_discard.is_some() { granularity } else { 0 },
            fast_zeroes: max_zeroes.is_some() && zeroes_unmap,
            ..VolumeInfo::new(0)
        };
        Ok(RemoteDisk { info, accepted: offered & UNDERSTOOD, max_discard, max_zeroes, zeroes_unmap })
    }

    fn is_cached(&self) -> bool {
        self.info.write_cache
    }
}

/// Kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlkCommandKind {
    Read,
    Write,
    /// A write of zeroes.
    Zeroes,
    WriteZeroes {
        may_unmap: bool,
    },
    Discard,
    Flush,
}

impl CommandKind for BlkCommandKind {
    const FLUSH: BlkCommandKind = BlkCommandKind::Flush;
    const READ: BlkCommandKind = BlkCommandKind::Read;

    fn is_long(self) -> bool {
        !matches!(self, BlkCommandKind::Read | BlkCommandKind::Write | BlkCommandKind::Zeroes)
    }
}

/// A command without its data.
struct BlkCommand {
    header: RequestHeader,
    range: Option<SectorRange>,
}

/// The commands of a device.
struct BlkCommands {
    disk: RemoteDisk,
    zeroes: Zeroes,
}

impl CommandSet for BlkCommands {
    type Kind = BlkCommandKind;
    type Sent = BlkCommand;
    type CommandState = ();

    fn is_open(&self) -> bool {
        true
    }

    #[inline]
    fn plan(&self, op: Op) -> IoPlan<BlkCommandKind> {
        let disk = &self.disk;
        let pieces =
            |kind, max, fua| IoPlan::Send(CommandPieces { kind, max, then_flush: fua && disk.is_cached() });
        match op {
            Op::Read => pieces(BlkCommandKind::Read, SLOT_DATA as u64, false),
            Op::Write { fua } => pieces(BlkCommandKind::Write, SLOT_DATA as u64, fua),
            Op::Flush if disk.is_cached() => IoPlan::Send(CommandPieces::FLUSH),
            Op::Flush | Op::Prefetch => IoPlan::Done,
            Op::BlockStatus => IoPlan::AllData,
            Op::CompareAndWrite { .. } => IoPlan::Fails(IoError::Unsupported),
            Op::Discard { fua } => match disk.max_discard {
                Some(max) => pieces(BlkCommandKind::Discard, max, fua),
                None => IoPlan::Done,
            },
            Op::WriteZeroes { fua, may_unmap, only_fast } => {
                let may_unmap = may_unmap && disk.zeroes_unmap;
                match disk.max_zeroes {
                    _ if only_fast && !may_unmap => IoPlan::Fails(IoError::Unsupported),
                    Some(max) => pieces(BlkCommandKind::WriteZeroes { may_unmap }, max, fua),
                    None if only_fast => IoPlan::Fails(IoError::Unsupported),
                    None => pieces(BlkCommandKind::Zeroes, SLOT_DATA.min(ZEROES) as u64, fua),
                }
            }
        }
    }

    #[inline]
    fn command(&self, piece: &CommandPiece<BlkCommandKind>) -> (BlkCommand, DataTransfer) {
        let (sector, len) = (piece.offset / SECTOR, piece.len as u32);
        let range = |flags: u32| {
            Some(SectorRange {
                sector: sector.into(),
                num_sectors: ((piece.len / SECTOR) as u32).into(),
                flags: flags.into(),
            })
        };
        let (kind, range, transfer) = match piece.kind {
            BlkCommandKind::Read => (RequestType::IN, None, DataTransfer::In(len)),
            BlkCommandKind::Write | BlkCommandKind::Zeroes => {
                (RequestType::OUT, None, DataTransfer::Out(len))
            }
            BlkCommandKind::WriteZeroes { may_unmap } => {
                let flags = if may_unmap { RANGE_F_UNMAP } else { 0 };
                (RequestType::WRITE_ZEROES, range(flags), DataTransfer::Nothing)
            }
            BlkCommandKind::Discard => (RequestType::DISCARD, range(0), DataTransfer::Nothing),
            BlkCommandKind::Flush => (RequestType::FLUSH, None, DataTransfer::Nothing),
        };
        let sector = if range.is_some() { 0 } else { sector };
        let header = RequestHeader { kind: kind.0.into(), reserved: 0.into(), sector: sector.into() };
        (BlkCommand { header, range }, transfer)
    }

    #[inline]
    fn payload(&mut self, piece: &CommandPiece<BlkCommandKind>, _: &Pool) -> Option<SgList> {
        (piece.kind == BlkCommandKind::Zeroes).then(|| self.zeroes.list(piece.len))
    }

    #[inline]
    fn keep(_: &BlkCommand) {}

    #[cold]
    fn do_otherwise(
        &mut self,
        piece: CommandPiece<BlkCommandKind>,
        job: &mut IoJob<BlkCommandKind>,
    ) -> Option<CommandPiece<BlkCommandKind>> {
        match (piece.kind, job.io.op) {
            (BlkCommandKind::WriteZeroes { .. }, Op::WriteZeroes { only_fast: false, fua, .. }) => {
                self.disk.max_zeroes = None;
                let (max, then_flush) = (SLOT_DATA.min(ZEROES) as u64, fua && self.disk.is_cached());
                job.go_back(piece.offset, CommandPieces { kind: BlkCommandKind::Zeroes, max, then_flush });
            }
            // A discard is a hint.
            (BlkCommandKind::Discard, _) => {
                self.disk.max_discard = None;
                job.issued = job.io.len;
            }
            _ => job.fail(IoError::Unsupported),
        }
        None
    }
}

/// The driver of one queue over one connection to its back end.
pub struct BlkDriver {
    queue: CommandQueue<BlkCommands, ()>,
    ring: DriverRing,
    has_indirect: bool,
    heads: Seg,
    data: Seg,
    /// The back end's address of `heads` and of `data`.
    heads_addr: u64,
    data_addr: u64,
    /// Slots without a command.
    free: Vec<u16>,
    /// The command of each slot.
    keys: Vec<Option<SlotKey>>,
}

impl BlkDriver {
    /// A driver in `memory` of [`BlkDriver::MEMORY_LEN`] bytes, page-aligned, which the back end
    /// has at the address `addr`.
    #[must_use]
    pub fn new(disk: RemoteDisk, memory: &Seg, addr: u64, pool: Pool) -> BlkDriver {
        let (heads, data) = offsets();
        let info = disk.info.clone();
        let has_event_idx = disk.accepted.contains(Features::RING_EVENT_IDX);
        let has_indirect = disk.accepted.contains(Features::RING_INDIRECT_DESC);
        let commands = BlkCommands { disk, zeroes: Zeroes::default() };
        BlkDriver {
            queue: CommandQueue::of(commands, info, pool),
            ring: DriverRing::new(&memory.slice(0, ring_len(RING_SIZE)), RING_SIZE, has_event_idx),
            has_indirect,
            heads: memory.slice(heads, usize::from(SLOTS).saturating_mul(HEAD_LEN)),
            data: memory.slice(data, usize::from(SLOTS).saturating_mul(SLOT_DATA)),
            heads_addr: addr.wrapping_add(heads as u64),
            data_addr: addr.wrapping_add(data as u64),
            free: (0..SLOTS).rev().collect(),
            keys: vec![None; SLOTS.into()],
        }
    }

    /// Length of the memory of a queue in bytes.
    pub const MEMORY_LEN: usize = (1 << 16) + SLOTS as usize * SLOT_DATA;

    /// The size of the virtqueue.
    pub const RING_SIZE: u16 = RING_SIZE;

    /// Where the virtqueue number `index` is, if the memory is at `addr`.
    #[must_use]
    pub fn vring_addr(index: u32, addr: u64) -> VringAddr {
        let (avail, used) = ring_offsets(RING_SIZE);
        VringAddr {
            index,
            flags: 0,
            descriptor: addr,
            available: addr.wrapping_add(avail as u64),
            used: addr.wrapping_add(used as u64),
            log: 0,
        }
    }

    /// Number of requests that [`BlkDriver::submit`] takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.queue.room()
    }

    /// Takes a request.
    #[inline]
    pub fn submit(&mut self, io: Io) {
        self.queue.submit(io);
    }

    /// The device has another size, in bytes.
    pub fn resize(&mut self, size: u64) {
        self.queue.info.size = size;
    }

    /// Sends what can be sent; returns whether the back end wants a notification.
    #[inline]
    pub fn send(&mut self) -> bool {
        while let Some(slot) = self.free.last().copied() {
            let Some(request) = self.queue.next_of_jobs() else { break };
            self.free.pop();
            self.put(slot, &request);
        }
        self.ring.publish()
    }

    /// Takes what the back end has answered; returns whether there was anything.
    ///
    /// # Errors
    /// If the back end makes no sense.
    #[inline]
    pub fn reap(&mut self) -> Result<bool, RemoteDiskError> {
        let mut has_any = false;
        for _ in 0..RING_SIZE {
            let Some((head, _)) = self.ring.pop_used() else { break };
            has_any = true;
            self.finish(head)?;
        }
        Ok(has_any)
    }

    /// The next completion.
    #[inline]
    pub fn poll_done(&mut self) -> Option<Completion> {
        self.queue.poll_done()
    }

    /// Tells the back end that it need not notify, because its answers are looked for.
    #[inline]
    pub fn suppress_calls(&mut self) {
        self.ring.suppress_calls();
    }

    /// Asks the back end for a notification of its next answer; returns whether there is one
    /// already.
    pub fn ask_for_calls(&mut self) -> bool {
        self.ring.ask_for_calls()
    }

    /// Whether the back end owes an answer.
    #[inline]
    #[must_use]
    pub fn owes_answer(&self) -> bool {
        self.free.len() < usize::from(SLOTS)
    }

    /// Ages the commands in flight; returns for how many consecutive calls the oldest has been in
    /// flight. One that takes long, such as a flush, counts a quarter.
    pub fn tick(&mut self) -> u32 {
        self.queue.commands.tick(QueuedCommand::is_long)
    }

    /// Removes and returns all requests that have not completed, oldest first.
    pub fn take_unfinished(&mut self) -> Vec<Io> {
        let mut jobs = self.queue.take_jobs();
        jobs.sort_by_key(|(age, _)| *age);
        jobs.into_iter().map(|(_, io)| io).collect()
    }

    /// Writes a command to its slot, and makes it available.
    #[inline]
    fn put(&mut self, slot: u16, request: &CommandRequest<BlkCommand>) {
        let at = usize::from(slot).saturating_mul(HEAD_LEN);
        let addr = self.heads_addr.wrapping_add(at as u64);
        let data_at = usize::from(slot).saturating_mul(SLOT_DATA);
        let head = self.heads.slice(at, HEAD_LEN);
        head.slice(0, size_of::<RequestHeader>()).copy_from(request.command.header.as_bytes());
        let buffer = |addr, len: usize, is_written| Buffer { addr, len: len as u32, is_written };
        let header = buffer(addr, size_of::<RequestHeader>(), false);
        let status = buffer(addr.wrapping_add(STATUS_AT as u64), 1, true);
        head.slice(STATUS_AT, 1).copy_from(&[NOT_ANSWERED]);
        let data_addr = self.data_addr.wrapping_add(data_at as u64);
        let data = match (&request.command.range, request.transfer) {
            (Some(range), _) => {
                head.slice(RANGE_AT, size_of::<SectorRange>()).copy_from(range.as_bytes());
                Some(buffer(addr.wrapping_add(RANGE_AT as u64), size_of::<SectorRange>(), false))
            }
            (None, DataTransfer::In(len)) => Some(buffer(data_addr, len as usize, true)),
            (None, DataTransfer::Out(len)) => {
                if let Some((list, base)) = self.queue.data_out(request.key) {
                    let to = SgList::one(self.data.slice(data_at, len as usize));
                    list.slice(base, len as usize).copy_to_list(&to);
                }
                Some(buffer(data_addr, len as usize, false))
            }
            (None, DataTransfer::Nothing) => None,
        };
        let first = slot.wrapping_mul(DESCS_PER_SLOT);
        let all = [header, data.unwrap_or(status), status];
        let buffers = if data.is_some() { &all[..] } else { &all[..2] };
        if self.has_indirect {
            let table = head.slice(TABLE_AT, TABLE_LEN);
            write_descs(&table, 0, buffers);
            let len = buffers.len().saturating_mul(size_of::<Desc>()) as u32;
            self.ring.write_indirect(first, addr.wrapping_add(TABLE_AT as u64), len);
        } else {
            self.ring.write_chain(first, buffers);
        }
        if let Some(key) = self.keys.get_mut(usize::from(slot)) {
            *key = Some(request.key);
        }
        self.ring.push(first);
    }

    /// Handles the answer to the command whose first descriptor is `head`.
    #[inline]
    fn finish(&mut self, head: u32) -> Result<(), RemoteDiskError> {
        let not_in_flight = RemoteDiskError::NotInFlight(head);
        let slot = u16::try_from(head / PER_SLOT).ok().filter(|_| head.is_multiple_of(PER_SLOT));
        let slot = slot.ok_or(not_in_flight)?;
        let key = self.keys.get_mut(usize::from(slot)).and_then(Option::take).ok_or(not_in_flight)?;
        let at = usize::from(slot).saturating_mul(HEAD_LEN).saturating_add(STATUS_AT);
        let status: u8 = self.heads.read_at(at);
        self.free.push(slot);
        let Some(command) = self.queue.commands.get_mut(key) else { return Ok(()) };
        let (piece, transfer) = (command.piece, command.transfer);
        let class = match Status(status) {
            Status::OK => CompletionClass::Good,
            Status::UNSUPP => CompletionClass::Illegal,
            _ => CompletionClass::Failed(IoError::Medium),
        };
        if let (CompletionClass::Good, DataTransfer::In(len)) = (class, transfer)
            && let Some((list, base)) = self.queue.data_in(key)
        {
            let from = self.data.slice(usize::from(slot).saturating_mul(SLOT_DATA), len as usize);
            SgList::one(from).copy_to_list(&list.slice(base, len as usize));
        }
        self.queue.commands.discard(key);
        if let Some(job) = piece.job {
            // No class of these is retried later.
            let _ = self.queue.finish_piece(piece, job, class);
        }
        Ok(())
    }
}

/// The largest number of whole blocks in so many bytes, in bytes.
fn whole(bytes: u64, block: u32) -> u64 {
    bytes & !u64::from(block.saturating_sub(1))
}

/// Offsets of the heads and of the data in the memory of a queue.
fn offsets() -> (usize, usize) {
    (ring_len(RING_SIZE), BlkDriver::MEMORY_LEN.saturating_sub(usize::from(SLOTS).saturating_mul(SLOT_DATA)))
}

/// The features that the driver accepts, if they are offered.
const UNDERSTOOD: Features = Features::BLK_SEG_MAX
    .union(Features::BLK_RO)
    .union(Features::BLK_BLK_SIZE)
    .union(Features::BLK_FLUSH)
    .union(Features::BLK_TOPOLOGY)
    .union(Features::BLK_MQ)
    .union(Features::BLK_DISCARD)
    .union(Features::BLK_WRITE_ZEROES)
    .union(Features::RING_INDIRECT_DESC)
    .union(Features::RING_EVENT_IDX)
    .union(Features::VHOST_USER_PROTOCOL_FEATURES)
    .union(Features::VERSION_1);

/// Number of commands in flight.
const SLOTS: u16 = 128;
/// Descriptors of a slot, of which an indirect table needs one.
const DESCS_PER_SLOT: u16 = 4;
const PER_SLOT: u32 = DESCS_PER_SLOT as u32;
/// Size of the virtqueue.
const RING_SIZE: u16 = SLOTS * DESCS_PER_SLOT;
/// Room for the data of a command, in bytes.
const SLOT_DATA: usize = 128 << 10;
/// A head: the header, the status, a range, a table of descriptors.
const HEAD_LEN: usize = 128;
const STATUS_AT: usize = 16;
const RANGE_AT: usize = 32;
const TABLE_AT: usize = 48;
const TABLE_LEN: usize = 3 * size_of::<Desc>();
/// A status that the standard does not have.
const NOT_ANSWERED: u8 = 0xff;
/// The preferred block of a device that names none, or a smaller one, in bytes.
const USUAL_BLOCK: u32 = 4096;
/// Largest block in bytes.
const MAX_BLOCK: u32 = 64 << 10;
const _: () = assert!(TABLE_AT + TABLE_LEN <= HEAD_LEN);

#[cfg(test)]
mod tests {
    use super::super::blk_queue::BlkQueue;
    use super::super::config::BlkDevice;
    use super::super::memory::{GuestMemory, GuestRegion};
    use super::super::virtqueue::RingAreas;
    use super::*;
    use crate::driver::target::IoSource;
    use crate::exports::{Export, Exports, VolumeId};
    use blockmux_volume::conformance::TestCore;
    use blockmux_volume::{Channel, MemVolume, Memory, Output, Tag, Volume, Waker};
    use std::sync::Arc;
    use std::time::Instant;

    const ADDR: u64 = 1 << 32;

    /// A driver, and a device of 1 MiB.
    struct Pair {
        driver: BlkDriver,
        memory: Memory,
        queue: BlkQueue,
        channel: Box<dyn Channel>,
        /// Operations of the volume, in order.
        seen: Vec<Op>,
    }

    impl Pair {
        fn new(info: &VolumeInfo, without: Features) -> Pair {
            let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
            let core = TestCore::new().as_core();
            let channel = volume.open(&core, RING_SIZE.into(), Waker::idle()).unwrap();
            let exports = Exports::new(vec![Export {
                name: "a".to_owned(),
                description: String::new(),
                read_only: false,
                volume,
            }]);
            let device = BlkDevice::new(info, 1, "");
            let disk = RemoteDisk::new(device.offered().difference(without), &device.config(0, 60)).unwrap();
            let state = device.state(disk.accepted);
            let memory = Memory::from_heap(BlkDriver::MEMORY_LEN);
            let seg = memory.seg(0, BlkDriver::MEMORY_LEN);
            let driver = BlkDriver::new(disk, &seg, ADDR, core.pool().clone());
            let region = GuestRegion { guest_addr: ADDR, user_addr: ADDR, memory: memory.clone() };
            let guest = GuestMemory::new(vec![region]);
            let at = BlkDriver::vring_addr(0, ADDR);
            let areas =
                RingAreas::of_user(&guest, RING_SIZE, (at.descriptor, at.available, at.used)).unwrap();
            let mut queue =
                BlkQueue::new((&exports, VolumeId(0)), state, guest, (areas, RING_SIZE, 0), None).unwrap();
            queue.enable(true);
            Pair { driver, memory, queue, channel, seen: Vec::new() }
        }

        /// Runs both sides until a request completes.
        fn run(&mut self, op: Op, offset: u64, len: u64, data: Option<&[u8]>) -> Result<Output, IoError> {
            let data = data.map(|data| SgList::one(Seg::from_slice(data)));
            self.driver.submit(Io { tag: Tag(7), op, offset, len, data });
            for _ in 0..100 {
                self.driver.send();
                self.serve();
                self.driver.reap().unwrap();
                if let Some(done) = self.driver.poll_done() {
                    assert_eq!(done.tag, Tag(7));
                    return done.result;
                }
            }
            panic!("{op:?} does not complete");
        }

        fn serve(&mut self) {
            self.queue.take_requests().unwrap();
            let mut done = Vec::new();
            while let Some((volume, io)) = self.queue.poll_io() {
                self.seen.push(io.op);
                self.queue.begin(volume, &io, false).unwrap();
                self.channel.submit(io);
            }
            self.channel.kick();
            self.channel.poll(&mut done);
            done.drain(..).for_each(|done| self.queue.on_io(done, Instant::now()));
            self.queue.publish();
        }
    }

    const WRITE: Op = Op::Write { fua: false };

    #[test]
    fn a_long_write_is_cut_into_commands_and_read_back() {
        for without in [Features::empty(), Features::RING_INDIRECT_DESC, Features::RING_EVENT_IDX] {
            let mut pair = Pair::new(&VolumeInfo::new(1 << 20), without);
            let bytes: Vec<u8> = (0..SLOT_DATA + 4096).map(|at| (at / 512) as u8).collect();
            let len = bytes.len() as u64;
            pair.run(WRITE, 512, len, Some(&bytes)).unwrap();
            assert_eq!(pair.seen, [WRITE, WRITE]);
            let read = pair.run(Op::Read, 512, len, None).unwrap().into_data();
            assert!(read.to_vec() == bytes, "without {without:?}");
        }
    }

    #[test]
    fn a_write_with_fua_is_followed_by_a_flush() {
        let info = VolumeInfo { write_cache: true, ..VolumeInfo::new(1 << 20) };
        let mut pair = Pair::new(&info, Features::empty());
        pair.run(Op::Write { fua: true }, 0, 512, Some(&[7; 512])).unwrap();
        assert_eq!(pair.seen, [WRITE, Op::Flush]);
        // Without a cache nothing is flushed.
        let mut pair = Pair::new(&VolumeInfo::new(1 << 20), Features::empty());
        pair.run(Op::Flush, 0, 0, None).unwrap();
        assert_eq!(pair.seen, [Op::Read; 0]);
    }

    #[test]
    fn zeroes_are_written_to_a_device_without_write_zeroes() {
        let zeroes = |only_fast| Op::WriteZeroes { fua: false, may_unmap: true, only_fast };
        let mut pair = Pair::new(&VolumeInfo::new(1 << 20), Features::BLK_WRITE_ZEROES);
        pair.run(WRITE, 0, 1024, Some(&[7; 1024])).unwrap();
        assert!(matches!(pair.run(zeroes(true), 0, 512, None), Err(IoError::Unsupported)));
        pair.run(zeroes(false), 0, 512, None).unwrap();
        assert_eq!(pair.seen, [WRITE; 2]);
        let read = pair.run(Op::Read, 0, 1024, None).unwrap().into_data().to_vec();
        assert!(read == [[0; 512], [7; 512]].concat());
        let info = VolumeInfo { discard_granularity: 4096, ..VolumeInfo::new(1 << 20) };
        let mut pair = Pair::new(&info, Features::empty());
        pair.run(zeroes(true), 0, 512, None).unwrap();
        pair.run(Op::Discard { fua: false }, 0, 4096, None).unwrap();
        let unmapped = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
        assert_eq!(pair.seen, [unmapped, Op::Discard { fua: false }]);
    }

    #[test]
    fn requests_that_have_not_completed_are_returned_in_order() {
        let mut pair = Pair::new(&VolumeInfo::new(1 << 20), Features::empty());
        for tag in 0..200 {
            pair.driver.submit(Io::new(Tag(tag), Op::Read, 0, 512));
        }
        pair.driver.send();
        pair.serve();
        pair.driver.reap().unwrap();
        let done = std::iter::from_fn(|| pair.driver.poll_done()).count() as u64;
        let left: Vec<_> = pair.driver.take_unfinished().into_iter().map(|io| io.tag.0).collect();
        assert_eq!(left, (done..200).collect::<Vec<_>>());
    }

    #[test]
    fn a_back_end_that_returns_what_it_does_not_have_makes_no_sense() {
        for head in [0, 1, DESCS_PER_SLOT.into(), u32::MAX] {
            let mut pair = Pair::new(&VolumeInfo::new(1 << 20), Features::empty());
            let used = ring_offsets(RING_SIZE).1;
            let used = pair.memory.seg(used, 16);
            used.store_u32(4, head);
            used.store_u16(2, 1);
            assert_eq!(pair.driver.reap(), Err(RemoteDiskError::NotInFlight(head)));
        }
    }

    #[test]
    fn a_device_is_described_by_its_configuration() {
        let info = VolumeInfo {
            logical_block: 4096,
            physical_block: 16_384,
            preferred_block: 65_536,
            write_cache: true,
            discard_granularity: 8192,
            fast_zeroes: true,
            ..VolumeInfo::new(1 << 30)
        };
        let device = BlkDevice::new(&info, 4, "");
        let disk = RemoteDisk::new(device.offered(), &device.config(0, 60)).unwrap();
        assert_eq!(disk.info, info);
        assert_eq!(RemoteDisk::new(Features::empty(), &[0; 60]), Err(RemoteDiskError::Legacy));
        assert_eq!(RemoteDisk::new(device.offered(), &[0; 20]), Err(RemoteDiskError::Config(20)));
        assert_eq!(RemoteDisk::new(device.offered(), &[0; 60]), Err(RemoteDiskError::Blocks(0)));
        assert_eq!(RemoteDisk::new(device.offered(), &[0xff; 60]), Err(RemoteDiskError::Blocks(u32::MAX)));
        let odd = Config {
            capacity: u64::MAX.into(),
            opt_io_size: 3.into(),
            physical_block_exp: 200,
            ..Config::default()
        };
        let disk = RemoteDisk::new(Features::VERSION_1 | Features::BLK_TOPOLOGY, odd.as_bytes()).unwrap();
        assert_eq!(
            (disk.info.logical_block, disk.info.physical_block, disk.info.preferred_block),
            (512, 512, 4096)
        );
    }
}
