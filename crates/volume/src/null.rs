//! A volume that reads as zeroes and discards writes: the lower bound of every measurement.

use crate::block_sizes::BlockSizes;
use crate::buf::{Memory, Pages};
use crate::io::{Completion, Extent, Io, IoError, Op, Output};
use crate::ready::Waker;
use crate::sg_list::SgList;
use crate::volume::{Channel, Core, MAX_TRANSFER, Volume, VolumeInfo};
use std::rc::Rc;
use std::sync::Arc;

/// A volume that reads as zeroes and discards writes.
pub struct NullVolume {
    info: VolumeInfo,
    zeroes: Arc<Pages>,
}

impl NullVolume {
    /// A volume of `size` bytes, rounded down to a whole block.
    #[must_use]
    pub fn new(size: u64) -> NullVolume {
        NullVolume::with_blocks(size, BlockSizes::default())
    }

    /// A volume of `size` bytes with these block sizes, rounded down to a whole block.
    #[must_use]
    pub fn with_blocks(size: u64, blocks: BlockSizes) -> NullVolume {
        let info = VolumeInfo {
            physical_block: 512,
            volatile: true,
            discard_granularity: 512,
            fast_zeroes: true,
            lends_reads: true,
            ..VolumeInfo::new(size / 512 * 512)
        };
        NullVolume { info: blocks.shape(info), zeroes: Pages::from_heap(MAX_TRANSFER as usize) }
    }
}

impl Volume for NullVolume {
    fn info(&self) -> VolumeInfo {
        self.info.clone()
    }

    fn open(&self, _core: &Rc<dyn Core>, depth: u32, _waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(NullChannel {
            info: self.info.clone(),
            zeroes: Memory::from_pages(&self.zeroes),
            done: Vec::with_capacity(depth as usize),
        }))
    }
}

struct NullChannel {
    info: VolumeInfo,
    zeroes: Memory,
    done: Vec<Completion>,
}

impl Channel for NullChannel {
    fn submit(&mut self, io: Io) {
        let result = self.info.check(&io).map(|()| match (io.op, io.data) {
            (Op::Read, None) => Output::Data(SgList::one(self.zeroes.seg(0, io.len as usize))),
            (Op::Read, Some(data)) => {
                data.fill_zero();
                Output::Data(data)
            }
            // Extents must not be empty.
            (Op::BlockStatus, _) if io.len == 0 => Output::Extents(Vec::new()),
            (Op::BlockStatus, _) => Output::Extents(vec![Extent { len: io.len, hole: true, zero: true }]),
            _ => Output::Nothing,
        });
        self.done.push(Completion { tag: io.tag, result });
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }
}
