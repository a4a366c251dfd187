//! A volume with a write cache that a crash loses.
//!
//! Completed writes are in the cache. They reach stable storage one block at a time, in any order:
//! all of them at a flush, a FUA write at once, and others at random. A crash keeps a random part
//! of the rest.

use super::ledger::BLOCK;
use blockmux_volume::random::SplitMix;
use blockmux_volume::{
    Channel, Completion, Core, Extent, Io, IoError, Op, Output, SgList, Volume, VolumeInfo, Waker,
};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Called for every block that a request has changed, with the block's number and new content.
pub type Observer = Box<dyn FnMut(u64, &[u8]) + Send>;

/// A volume that may lose unflushed writes in a crash. Requests complete in any order.
pub struct CrashVolume {
    info: VolumeInfo,
    delay: Duration,
    medium: Arc<Mutex<Medium>>,
}

struct Medium {
    stable: Vec<u8>,
    /// Cached blocks, by block number.
    cache: BTreeMap<u64, Vec<u8>>,
    random: SplitMix,
    errors_per_million: u32,
    observer: Observer,
}

impl CrashVolume {
    /// A volume of zeroes with `blocks` blocks of [`BLOCK`] bytes. Each request takes up to
    /// `delay`, and this many of a million fail with a medium error and change nothing.
    #[must_use]
    pub fn new(
        blocks: u64,
        delay: Duration,
        errors_per_million: u32,
        seed: u64,
        observer: Observer,
    ) -> CrashVolume {
        let size = blocks * BLOCK as u64;
        CrashVolume {
            info: VolumeInfo {
                logical_block: BLOCK as u32,
                write_cache: true,
                discard_granularity: BLOCK as u32,
                fast_zeroes: true,
                ..VolumeInfo::new(size)
            },
            delay,
            medium: Arc::new(Mutex::new(Medium {
                stable: vec![0; size as usize],
                cache: BTreeMap::new(),
                random: SplitMix::new(seed),
                errors_per_million,
                observer,
            })),
        }
    }

    /// Simulates a power failure: a random part of what was not flushed is kept. Channels must have
    /// been dropped.
    pub fn crash(&self) {
        let mut medium = self.medium();
        let cache = std::mem::take(&mut medium.cache);
        for (block, bytes) in cache {
            if medium.random.below(2) == 0 {
                medium.settle(block, &bytes);
            }
        }
    }

    /// What a read of the block would return.
    #[must_use]
    pub fn content(&self, block: u64) -> Vec<u8> {
        self.medium().read(block)
    }

    fn medium(&self) -> MutexGuard<'_, Medium> {
        lock(&self.medium)
    }
}

impl Volume for CrashVolume {
    fn info(&self) -> VolumeInfo {
        self.info.clone()
    }

    fn open(&self, core: &Rc<dyn Core>, _depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(CrashChannel {
            info: self.info.clone(),
            delay: self.delay,
            medium: self.medium.clone(),
            core: core.clone(),
            waker,
            waiting: Vec::new(),
        }))
    }
}

struct CrashChannel {
    info: VolumeInfo,
    delay: Duration,
    medium: Arc<Mutex<Medium>>,
    core: Rc<dyn Core>,
    waker: Waker,
    /// Requests in flight, with their time of completion.
    waiting: Vec<(Instant, Io)>,
}

impl Channel for CrashChannel {
    fn submit(&mut self, io: Io) {
        let most = self.delay.as_nanos() as u64;
        let due = self.core.now() + Duration::from_nanos(lock(&self.medium).random.below(most + 1));
        if due > self.core.now() {
            self.core.wake_at(due, &self.waker);
        }
        self.waiting.push((due, io));
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let now = self.core.now();
        while let Some(at) = self.waiting.iter().position(|(due, _)| *due <= now) {
            let (_, io) = self.waiting.swap_remove(at);
            let tag = io.tag;
            let result = self.info.check(&io).and_then(|()| lock(&self.medium).execute(io));
            done.push(Completion { tag, result });
        }
    }
}

impl Medium {
    fn execute(&mut self, io: Io) -> Result<Output, IoError> {
        if self.random.below(1_000_000) < self.errors_per_million.into() {
            return Err(IoError::Medium);
        }
        let blocks = io.offset / BLOCK as u64..(io.offset + io.len) / BLOCK as u64;
        let fua = match io.op {
            Op::Write { fua } | Op::WriteZeroes { fua, .. } | Op::Discard { fua } => fua,
            Op::Read => {
                let bytes: Vec<u8> = blocks.flat_map(|block| self.read(block)).collect();
                let data = io.data.unwrap_or_else(|| SgList::one(blockmux_volume::Seg::from_slice(&bytes)));
                data.copy_from(&bytes);
                return Ok(Output::Data(data));
            }
            Op::BlockStatus => return Ok(Output::Extents(self.extents(blocks.collect()))),
            Op::Prefetch => return Ok(Output::Nothing),
            Op::CompareAndWrite { .. } => return Err(IoError::Unsupported),
            Op::Flush => {
                for (block, bytes) in std::mem::take(&mut self.cache) {
                    self.settle(block, &bytes);
                }
                return Ok(Output::Nothing);
            }
        };
        for (nth, block) in blocks.enumerate() {
            let bytes = match &io.data {
                Some(data) => data.slice(nth * BLOCK, BLOCK).to_vec(),
                None => vec![0; BLOCK],
            };
            (self.observer)(block, &bytes);
            self.write(block, bytes, fua);
        }
        Ok(Output::Nothing)
    }

    fn write(&mut self, block: u64, bytes: Vec<u8>, fua: bool) {
        if fua {
            self.cache.remove(&block);
            return self.settle(block, &bytes);
        }
        let older = self.cache.insert(block, bytes);
        // A cache may write back at any time.
        if let Some(older) = older.filter(|_| self.random.below(4) == 0) {
            self.settle(block, &older);
        }
    }

    fn settle(&mut self, block: u64, bytes: &[u8]) {
        let at = block as usize * BLOCK;
        self.stable[at..at + BLOCK].copy_from_slice(bytes);
    }

    fn read(&self, block: u64) -> Vec<u8> {
        let at = block as usize * BLOCK;
        self.cache.get(&block).cloned().unwrap_or_else(|| self.stable[at..at + BLOCK].to_vec())
    }

    /// The extents of these blocks; blocks of zeroes are holes.
    fn extents(&self, blocks: Vec<u64>) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for block in blocks {
            let hole = self.read(block).iter().all(|&byte| byte == 0);
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.len += BLOCK as u64,
                _ => extents.push(Extent { len: BLOCK as u64, hole, zero: hole }),
            }
        }
        extents
    }
}

fn lock(medium: &Mutex<Medium>) -> MutexGuard<'_, Medium> {
    medium.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::{NetworkConditions, SimNet, World};
    use super::*;
    use blockmux_volume::{Seg, Tag};

    fn done_at_once(volume: &CrashVolume, io: Io) {
        let mut world = World::new(SimNet::new(0, NetworkConditions::FAIR));
        let core: Rc<dyn Core> = world.add_core(1 << 20);
        let mut channel = volume.open(&core, 1, Waker::idle()).unwrap();
        let mut done = Vec::new();
        channel.submit(io);
        channel.poll(&mut done);
        assert!(done.pop().unwrap().result.is_ok());
    }

    fn write(block: u64, byte: u8, fua: bool) -> Io {
        let data = Some(SgList::one(Seg::from_slice(&[byte; BLOCK])));
        Io { data, ..Io::new(Tag(0), Op::Write { fua }, block * BLOCK as u64, BLOCK as u64) }
    }

    fn volume(seed: u64) -> CrashVolume {
        CrashVolume::new(64, Duration::ZERO, 0, seed, Box::new(|_, _| ()))
    }

    #[test]
    fn flushed_and_fua_writes_survive_a_crash() {
        for seed in 0..20 {
            let volume = volume(seed);
            done_at_once(&volume, write(0, 1, false));
            done_at_once(&volume, Io::new(Tag(0), Op::Flush, 0, 0));
            done_at_once(&volume, write(1, 2, true));
            volume.crash();
            assert_eq!((volume.content(0)[0], volume.content(1)[0]), (1, 2));
        }
    }

    #[test]
    fn a_crash_keeps_part_of_the_unflushed_writes() {
        let volume = volume(1);
        (0..64).for_each(|block| done_at_once(&volume, write(block, 7, false)));
        volume.crash();
        let kept = (0..64).filter(|&block| volume.content(block)[0] == 7).count();
        assert!((10..54).contains(&kept), "{kept} of 64 blocks were kept");
    }
}
