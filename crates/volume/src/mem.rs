//! A volume in RAM.
//!
//! A read without a buffer borrows the volume's own memory. Blocks that were never written, or were
//! zeroed or discarded in whole units, are holes: they use no memory, and block status reports
//! them.
//!
//! Writes use streaming stores: a volume is larger than the CPU's caches, and fetching the
//! overwritten lines would double the time. One fence makes a batch of writes visible before any of
//! it is read or completes.
//!
//! A request to zero a long range is done in parts, so that other requests of the core are executed
//! in between.

use crate::block_sizes::BlockSizes;
use crate::buf::{Memory, Pages, Seg, settle_streams};
use crate::io::{Completion, Extent, Io, IoError, Op, Output};
use crate::ready::Waker;
use crate::sg_list::SgList;
use crate::volume::{Channel, Core, Populated, Resize, ResizeError, Volume, VolumeInfo};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use zerocopy::FromZeros;

/// A volume in RAM; its content is lost with the process.
pub struct MemVolume {
    shared: Arc<Shared>,
}

struct Shared {
    /// Properties at creation; `size` has the current size.
    info: VolumeInfo,
    /// Current size in bytes, at most that of the pages.
    size: AtomicU64,
    pages: Arc<Pages>,
    /// State of each [`UNIT`] bytes of the pages.
    states: Vec<AtomicU8>,
}

impl MemVolume {
    /// A volume of zeroes over heap memory, `size` bytes rounded down to a whole block.
    #[must_use]
    pub fn new(size: u64) -> MemVolume {
        MemVolume::from_pages(Pages::from_heap(size as usize))
    }

    /// A volume over zeroed `pages`.
    #[must_use]
    pub fn from_pages(pages: Arc<Pages>) -> MemVolume {
        let size = pages.len() as u64;
        MemVolume::within(pages, size, BlockSizes::default())
    }

    /// A volume of `size` bytes, rounded down to a whole block, with these block sizes. It can grow
    /// up to the size of the zeroed `pages`.
    #[must_use]
    pub fn within(pages: Arc<Pages>, size: u64, blocks: BlockSizes) -> MemVolume {
        let room = pages.len() as u64;
        let info = blocks.shape(VolumeInfo {
            // Single sectors are written and unmapped; libiscsi's GetLBAStatus.UnmapSingle fails
            // if several share a physical block.
            physical_block: SECTOR,
            volatile: true,
            discard_granularity: UNIT as u32,
            fast_zeroes: true,
            lends_reads: true,
            ..VolumeInfo::new(size.min(room) / u64::from(SECTOR) * u64::from(SECTOR))
        });
        // Zeroed by the system, and backed by memory when a unit is first written: a volume may
        // have room for much more than its size.
        const { assert!(HOLE == 0) }
        let states = AtomicU8::new_vec_zeroed(room.div_ceil(UNIT) as usize);
        let states = states.expect("the states of the units fit into memory");
        MemVolume { shared: Arc::new(Shared { size: AtomicU64::new(info.size), info, pages, states }) }
    }
}

impl Volume for MemVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.shared.size(), ..self.shared.info.clone() }
    }

    fn populated(&self) -> Option<Populated> {
        self.shared.pages.populated()
    }

    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        let Resize::Bytes { size, beyond } = to else { return Ok(self.shared.size()) };
        let block = self.shared.info.logical_block;
        let most = (self.shared.pages.len() as u64) / u64::from(block) * u64::from(block);
        if size == 0 || !size.is_multiple_of(block.into()) {
            return Err(ResizeError::BadSize { size, block });
        }
        if size > most {
            return Err(ResizeError::TooLarge { most });
        }
        beyond.check(self.shared.size(), size)?;
        let was = self.shared.size.swap(size, Ordering::AcqRel);
        if size < was {
            // The truncated part must read as zeroes if the volume grows again. It uses no memory
            // until then.
            self.shared.zero(size, was - size, true);
        }
        Ok(size)
    }

    fn open(&self, _core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(MemChannel {
            memory: Memory::from_pages(&self.shared.pages),
            shared: self.shared.clone(),
            pending: Vec::with_capacity(depth as usize),
            zeroing: VecDeque::new(),
            waker,
            refused: Vec::new(),
        }))
    }
}

struct MemChannel {
    shared: Arc<Shared>,
    /// This core's handle: reads borrow through it, so that cores share no reference count.
    memory: Memory,
    /// Requests submitted since the last poll.
    pending: Vec<Io>,
    /// The remaining parts of zeroing requests.
    zeroing: VecDeque<Io>,
    waker: Waker,
    /// Completions of invalid requests.
    refused: Vec<Completion>,
}

impl Channel for MemChannel {
    /// Queues the request: requests submitted together are executed together, by the next poll.
    #[inline]
    fn submit(&mut self, io: Io) {
        match self.shared.info.check_within(&io, self.shared.size()) {
            Ok(()) => {
                let zeroes = matches!(io.op, Op::WriteZeroes { .. } | Op::Discard { .. });
                if zeroes && io.len > ZEROED_AT_ONCE {
                    self.zeroing.push_back(io)
                } else {
                    self.pending.push(io)
                }
            }
            Err(error) => self.refused.push(Completion { tag: io.tag, result: Err(error) }),
        }
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut pending = std::mem::take(&mut self.pending);
        for io in pending.iter().filter(|io| matches!(io.op, Op::Read | Op::Write { .. })) {
            self.at(io).prefetch();
        }
        let mut streams = false;
        done.extend(pending.drain(..).map(|io| {
            let is_write = matches!(io.op, Op::Write { .. });
            if std::mem::replace(&mut streams, is_write) && !is_write {
                settle_streams();
            }
            Completion { tag: io.tag, result: Ok(self.execute(io)) }
        }));
        if streams {
            settle_streams();
        }
        self.pending = pending;
        if !self.zeroing.is_empty() {
            self.zero_part(done);
        }
        done.append(&mut self.refused);
    }
}

impl MemChannel {
    /// Zeroes the next part of the oldest zeroing request. If the volume has shrunk, the range
    /// beyond its end reads as zeroes already.
    #[cold]
    fn zero_part(&mut self, done: &mut Vec<Completion>) {
        let Some(io) = self.zeroing.front_mut() else { return };
        let may_unmap = !matches!(io.op, Op::WriteZeroes { may_unmap: false, .. });
        // Parts end at unit boundaries, so that whole units are freed.
        let end = (io.offset + ZEROED_AT_ONCE) / UNIT * UNIT;
        let len = io.len.min(end - io.offset);
        self.shared.zero(io.offset, len, may_unmap);
        (io.offset, io.len) = (io.offset + len, io.len - len);
        if io.len == 0 {
            done.push(Completion { tag: io.tag, result: Ok(Output::Nothing) });
            self.zeroing.pop_front();
        }
        if !self.zeroing.is_empty() {
            self.waker.wake();
        }
    }

    /// The memory of a read or a write.
    #[inline]
    fn at(&self, io: &Io) -> Seg {
        self.memory.seg(io.offset as usize, io.len as usize)
    }

    /// Executes a checked request; RAM cannot fail.
    #[inline]
    fn execute(&self, io: Io) -> Output {
        match io.op {
            Op::Read => {
                let content = SgList::one(self.at(&io));
                match io.data {
                    None => return Output::Data(content),
                    Some(data) => {
                        content.copy_to_list(&data);
                        return Output::Data(data);
                    }
                }
            }
            Op::Write { .. } => {
                self.shared.mark_data(io.offset, io.len);
                let content = SgList::one(self.at(&io));
                if let Some(data) = io.data {
                    data.stream_to_list(&content);
                }
                // Marked again, because a concurrent discard on another core may have replaced the
                // first mark.
                self.shared.mark_data(io.offset, io.len);
            }
            Op::WriteZeroes { may_unmap, .. } => self.shared.zero(io.offset, io.len, may_unmap),
            Op::Discard { .. } => self.shared.zero(io.offset, io.len, true),
            Op::BlockStatus => return Output::Extents(self.shared.extents(io.offset, io.len)),
            // The check refuses to compare.
            Op::Flush | Op::Prefetch | Op::CompareAndWrite { .. } => {}
        }
        Output::Nothing
    }
}

impl Shared {
    #[inline]
    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    #[inline]
    fn mark_data(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for state in &self.states[(offset / UNIT) as usize..=((offset + len - 1) / UNIT) as usize] {
            if state.load(Ordering::Acquire) != DATA {
                state.store(DATA, Ordering::Release);
            }
        }
    }

    fn zero(&self, offset: u64, len: u64, may_unmap: bool) {
        let (first, last) = (offset.next_multiple_of(UNIT), (offset + len) / UNIT * UNIT);
        if !may_unmap || first >= last {
            self.mark_data(offset, len);
            self.pages.zero(offset as usize, len as usize);
            return;
        }
        let whole = &self.states[(first / UNIT) as usize..(last / UNIT) as usize];
        whole.iter().for_each(|state| state.store(ZEROING, Ordering::Release));
        self.pages.zero(offset as usize, len as usize);
        for state in whole {
            // A concurrent write has set DATA, which stays.
            let _ = state.compare_exchange(ZEROING, HOLE, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let end = offset + len;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            let next = ((at / UNIT + 1) * UNIT).min(end);
            let hole = self.states[(at / UNIT) as usize].load(Ordering::Acquire) == HOLE;
            let full = extents.len() == MAX_EXTENTS;
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.len += next - at,
                _ if full => break,
                _ => extents.push(Extent { len: next - at, hole, zero: hole }),
            }
            at = next;
        }
        extents
    }
}

/// Smallest block, in bytes.
const SECTOR: u32 = 512;
/// Granularity of holes, in bytes.
const UNIT: u64 = 64 << 10;
/// Bytes zeroed at once: one huge page, which takes a fraction of a millisecond.
const ZEROED_AT_ONCE: u64 = 2 << 20;
/// Extents in one reply.
const MAX_EXTENTS: usize = 4096;
const HOLE: u8 = 0;
const DATA: u8 = 1;
/// Changing from data to hole; a write changes it back to data.
const ZEROING: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness};
    use crate::io::Tag;

    fn resized(sizes: &[u64]) -> Arc<dyn Volume> {
        let volume = MemVolume::within(Pages::from_heap(48 << 20), 40 << 20, BlockSizes::default());
        for &size in sizes {
            assert_eq!(volume.resize(Resize::discard_beyond(size)).unwrap(), size);
            assert_eq!((volume.info().size, volume.refresh_size()), (size, size));
        }
        Arc::new(volume)
    }

    #[test]
    fn a_resized_volume_conforms() {
        conformance::run(&mut Harness::on_test_core(resized(&[48 << 20])));
        conformance::run(&mut Harness::on_test_core(resized(&[5 << 20, 40 << 20])));
    }

    #[test]
    fn a_long_range_is_zeroed_in_parts_and_the_bytes_around_it_are_kept() {
        let (volume, core) = (MemVolume::new(40 << 20), conformance::TestCore::new());
        let waker = core.ready().waker(7);
        let mut channel = volume.open(&core.as_core(), 2, waker).unwrap();
        volume.shared.mark_data(0, 40 << 20);
        Memory::from_pages(&volume.shared.pages).seg(0, 40 << 20).copy_from(&[7; 40 << 20]);
        let (offset, len) = (512, (40 << 20) - 1024);
        let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
        channel.submit(Io::new(Tag(1), op, offset, len));
        channel.submit(Io::new(Tag(2), Op::Read, 39 << 20, 512));
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert_eq!(
            done.iter().map(|done| done.tag).collect::<Vec<_>>(),
            [Tag(2)],
            "other requests complete in between"
        );
        let mut parts = 1;
        while done.len() < 2 {
            assert_eq!(core.ready().pop(), Some(7), "the waiting user is woken");
            channel.poll(&mut done);
            parts += 1;
        }
        assert_eq!((parts, core.ready().pop()), ((40 << 20) / ZEROED_AT_ONCE, None));
        let bytes = Memory::from_pages(&volume.shared.pages).seg(0, 40 << 20).to_vec();
        assert!(bytes[..512].iter().chain(&bytes[(40 << 20) - 512..]).all(|&byte| byte == 7));
        assert!(bytes[512..(40 << 20) - 512].iter().all(|&byte| byte == 0));
        let holes = volume.shared.extents(0, 40 << 20);
        assert_eq!(holes.iter().map(|extent| extent.hole).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(holes[1].len, (40 << 20) - 2 * UNIT);
    }

    #[test]
    fn channels_see_the_new_size_with_their_next_request() {
        let volume = resized(&[]);
        let mut harness = Harness::on_test_core(volume.clone());
        let mut client = harness.client(1).unwrap();
        let (size, block) = (40 << 20, vec![7; 512]);
        client.write(size - 512, &block).unwrap();
        assert!(client.write(size, &block).is_err());
        volume.resize(Resize::discard_beyond(size + 512)).unwrap();
        client.write(size, &block).unwrap();
        volume.resize(Resize::discard_beyond(size)).unwrap();
        assert!(client.read(size, 512).is_err());
        assert_eq!(client.read(size - 512, 512).unwrap(), block);
        // The truncated part was lost, and is a hole.
        volume.resize(Resize::discard_beyond(1 << 20)).unwrap();
        volume.resize(Resize::discard_beyond(size)).unwrap();
        assert_eq!(client.read(size - 512, 512).unwrap(), [0; 512]);
    }

    #[test]
    fn an_invalid_size_changes_nothing() {
        let volume = resized(&[]);
        assert!(matches!(volume.resize(Resize::discard_beyond(0)), Err(ResizeError::BadSize { .. })));
        assert!(matches!(
            volume.resize(Resize::discard_beyond(1 << 20 | 1)),
            Err(ResizeError::BadSize { .. })
        ));
        let most = 48 << 20;
        assert!(
            matches!(volume.resize(Resize::discard_beyond(most + 512)), Err(ResizeError::TooLarge { most: reported }) if reported == most)
        );
        assert_eq!(volume.resize(Resize::Own).unwrap(), 40 << 20);
    }
}
