//! A part of another volume, such as a partition, or a whole volume with other block sizes.

use crate::block_sizes::{BlockSizes, SmallBlock};
use crate::io::{Completion, Extent, Io, IoError, Op, Output, Tag};
use crate::ready::Waker;
use crate::snapshots::Snapshots;
use crate::volume::{Channel, Core, Resize, ResizeError, Volume, VolumeInfo};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A part of another volume. Both may be resized while in use.
pub struct SliceVolume {
    inner: Arc<dyn Volume>,
    /// Start of the part in `inner`, in bytes.
    offset: u64,
    /// Length in bytes; `None`: up to the end of `inner`.
    len: Option<Arc<AtomicU64>>,
    blocks: BlockSizes,
}

/// Why a part does not fit its volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SliceError(String);

impl SliceVolume {
    /// The `len` bytes of `inner` from byte `offset` on. Without `len` the part extends to the end
    /// of `inner` and changes size with it.
    ///
    /// # Errors
    /// If the range does not lie within `inner`, or is not a whole number of its blocks.
    pub fn new(inner: Arc<dyn Volume>, offset: u64, len: Option<u64>) -> Result<SliceVolume, SliceError> {
        let VolumeInfo { size, logical_block: block, .. } = inner.info();
        for (what, bytes) in [("offset", offset), ("length", len.unwrap_or(0))] {
            if !bytes.is_multiple_of(block.into()) {
                let next = bytes.checked_next_multiple_of(block.into());
                let next = next.unwrap_or(u64::MAX / u64::from(block) * u64::from(block));
                return Err(SliceError(format!(
                    "{what} {bytes} is not a multiple of its volume's block size of {block} bytes; write {next}"
                )));
            }
        }
        if offset >= size {
            return Err(SliceError(format!(
                "begins at byte {offset}, but its volume has only {size} bytes; write a lower offset"
            )));
        }
        let most = size - offset;
        match len {
            Some(0) => {
                let text = "has a length of 0; write another length, or leave it out to use the rest";
                return Err(SliceError(text.to_owned()));
            }
            Some(len) if len > most => {
                let remedy = format!("write a length of at most {most}, or leave it out to use the rest");
                let excess = len - most;
                return Err(SliceError(format!(
                    "ends {excess} bytes beyond its volume of {size} bytes; {remedy}"
                )));
            }
            _ => {}
        }
        let len = len.map(|len| Arc::new(AtomicU64::new(len)));
        Ok(SliceVolume { inner, offset, len, blocks: BlockSizes::default() })
    }

    /// All of `inner` with other block sizes. An incomplete block at the end is left out.
    ///
    /// # Errors
    /// If a block size is smaller than the logical block of `inner`.
    pub fn with_blocks(inner: Arc<dyn Volume>, blocks: BlockSizes) -> Result<SliceVolume, SmallBlock> {
        blocks.check(inner.info().logical_block)?;
        Ok(SliceVolume { inner, offset: 0, len: None, blocks })
    }
}

impl Volume for SliceVolume {
    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    fn info(&self) -> VolumeInfo {
        let whole = self.inner.info();
        let left = whole.size.saturating_sub(self.offset);
        let size = self.len.as_ref().map_or(left, |len| len.load(Ordering::Acquire).min(left));
        let info = self.blocks.shape(VolumeInfo { size, ..whole });
        // An aligned request is aligned in `inner`, too, only if the offset is a multiple of the
        // block.
        let alignment = 1 << self.offset.trailing_zeros().min(31);
        let aligned = |block: u32| block.min(alignment).max(info.logical_block);
        // A smaller aligned unit lies within one of `inner`.
        let compared = info.compare_and_write_unit.min(alignment);
        VolumeInfo {
            compare_and_write_unit: if compared < info.logical_block { 0 } else { compared },
            physical_block: aligned(info.physical_block),
            preferred_block: aligned(info.preferred_block),
            ..info
        }
    }

    fn refresh_size(&self) -> u64 {
        self.inner.refresh_size();
        self.info().size
    }

    /// A snapshot has the whole volume below, so a part of it has none.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        if self.offset == 0 && self.len.is_none() { self.inner.snapshots() } else { None }
    }

    /// Changes the part's own length if it has one; otherwise resizes `inner`.
    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        let VolumeInfo { logical_block: block, .. } = self.info();
        let whole_blocks = |size: u64| size / u64::from(block) * u64::from(block);
        match (to, &self.len) {
            (Resize::Own, _) => {
                self.inner.resize(Resize::Own)?;
            }
            (Resize::Bytes { size, .. }, _) if size == 0 || !size.is_multiple_of(block.into()) => {
                return Err(ResizeError::BadSize { size, block });
            }
            (Resize::Bytes { size, beyond }, Some(len)) => {
                let most = whole_blocks(self.inner.info().size.saturating_sub(self.offset));
                if size > most {
                    return Err(ResizeError::TooLarge { most });
                }
                beyond.check(self.info().size, size)?;
                len.store(size, Ordering::Release);
            }
            (Resize::Bytes { size, beyond }, None) => {
                let most = whole_blocks(u64::MAX - self.offset);
                let end = self.offset.checked_add(size).ok_or(ResizeError::TooLarge { most })?;
                beyond.check(self.info().size, size)?;
                self.inner.resize(Resize::Bytes { size: end, beyond }).map_err(|error| match error {
                    ResizeError::TooLarge { most } => {
                        ResizeError::TooLarge { most: whole_blocks(most.saturating_sub(self.offset)) }
                    }
                    other => other,
                })?;
            }
        }
        Ok(self.info().size)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let (info, own) = (self.info(), self.inner.info().logical_block);
        Ok(Box::new(SliceChannel {
            inner: self.inner.open(core, depth, waker)?,
            offset: self.offset,
            len: self.len.clone(),
            merges: info.logical_block > own,
            info,
            refused: Vec::with_capacity(depth as usize),
        }))
    }
}

struct SliceChannel {
    inner: Box<dyn Channel>,
    offset: u64,
    len: Option<Arc<AtomicU64>>,
    /// Block sizes and flags. Its `size` is not used: `len` and `inner` limit the range.
    info: VolumeInfo,
    /// Extents of `inner` may end within a block and must be merged.
    merges: bool,
    /// Completions of requests that were not passed to `inner`.
    refused: Vec<Completion>,
}

impl Channel for SliceChannel {
    #[inline]
    fn submit(&mut self, io: Io) {
        // Without a length of its own, the part relies on the check of `inner`, which has less than
        // one block of this size beyond the part's last block.
        let size = match &self.len {
            Some(len) => len.load(Ordering::Acquire),
            None => u64::MAX - self.offset,
        };
        match self.info.check_within(&io, size) {
            Ok(()) if io.op == Op::Flush => self.inner.submit(io),
            // `inner` checks its own size, and reports the wrong length.
            Ok(()) | Err(IoError::BadLength) => {
                self.inner.submit(Io { offset: io.offset + self.offset, ..io });
            }
            Err(error) => self.refused.push(Completion { tag: io.tag, result: Err(error) }),
        }
    }

    #[inline]
    fn kick(&mut self) {
        self.inner.kick();
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.refused);
        let first = done.len();
        self.inner.poll(done);
        if self.merges {
            for done in &mut done[first..] {
                if let Ok(Output::Extents(extents)) = &mut done.result {
                    merge_to_blocks(extents, self.info.logical_block.into());
                }
            }
        }
    }

    fn cancel(&mut self, tag: Tag) {
        self.inner.cancel(tag);
    }
}

/// Merges extents so that they end at block boundaries. A block with several extents is a hole only
/// if all of them are holes, and reads as zeroes only if all of them do. An incomplete block at the
/// end is left out.
fn merge_to_blocks(extents: &mut Vec<Extent>, block: u64) {
    if extents.iter().all(|extent| extent.len.is_multiple_of(block)) {
        return;
    }
    let mut merged: Vec<Extent> = Vec::with_capacity(extents.len());
    let mut push = |extent: Extent| match merged.last_mut() {
        Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => last.len += extent.len,
        _ => merged.push(extent),
    };
    // The block that is not complete yet.
    let mut open: Option<Extent> = None;
    for extent in extents.iter() {
        let mut left = extent.len;
        if let Some(begun) = &mut open {
            let part_len = left.min(block - begun.len);
            *begun = Extent {
                len: begun.len + part_len,
                hole: begun.hole && extent.hole,
                zero: begun.zero && extent.zero,
            };
            left -= part_len;
            if begun.len == block {
                open.take().into_iter().for_each(&mut push);
            }
        }
        let whole = left / block * block;
        if whole > 0 {
            push(Extent { len: whole, ..*extent });
        }
        if left > whole {
            open = Some(Extent { len: left - whole, ..*extent });
        }
    }
    // A result has at least one extent; the state of the rest of this block is unknown.
    if merged.is_empty() {
        merged.extend(open.map(|_| Extent::data(block)));
    }
    *extents = merged;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness};
    use crate::{DelayVolume, Delays, MemVolume, Pages, StripeVolume};
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    fn mem(size: u64) -> Arc<dyn Volume> {
        Arc::new(MemVolume::new(size))
    }

    fn slice(inner: &Arc<dyn Volume>, offset: u64, len: impl Into<Option<u64>>) -> Arc<dyn Volume> {
        Arc::new(SliceVolume::new(inner.clone(), offset, len.into()).unwrap())
    }

    fn large_blocks(inner: Arc<dyn Volume>) -> Arc<dyn Volume> {
        let blocks = BlockSizes { logical: Some(4096), physical: None };
        Arc::new(SliceVolume::with_blocks(inner, blocks).unwrap())
    }

    /// A volume that has only properties.
    struct Described(VolumeInfo);

    impl Volume for Described {
        fn info(&self) -> VolumeInfo {
            self.0.clone()
        }

        fn open(&self, _: &Rc<dyn Core>, _: u32, _: Waker) -> Result<Box<dyn Channel>, IoError> {
            Err(IoError::Unsupported)
        }
    }

    #[test]
    fn a_slice_conforms() {
        let whole = mem(64 * MIB);
        conformance::run(&mut Harness::on_test_core(slice(&whole, 8 * MIB, 40 * MIB)));
        conformance::run(&mut Harness::on_test_core(slice(&whole, 512, None)));
    }

    #[test]
    fn a_slice_compares_units_that_are_units_below() {
        let unit = |offset: u64, below: u32| {
            let info = VolumeInfo { compare_and_write_unit: below, ..VolumeInfo::new(64 * MIB) };
            let slice = SliceVolume::new(Arc::new(Described(info)), offset, None).unwrap();
            slice.info().compare_and_write_unit
        };
        assert_eq!([unit(MIB, 65536), unit(8192, 65536), unit(512, 65536)], [65536, 8192, 512]);
        assert_eq!([unit(MIB, 0), unit(512, 0)], [0, 0]);
    }

    #[test]
    fn a_slice_of_a_slow_volume_or_of_a_stripe_conforms() {
        let ms = Duration::from_millis(1);
        let slow = DelayVolume::new(mem(64 * MIB), Delays { read: ms, write: 3 * ms, flush: 2 * ms });
        let slow: Arc<dyn Volume> = Arc::new(slow);
        conformance::run(&mut Harness::on_test_core(slice(&slow, 8 * MIB, 40 * MIB)));
        let stripe: Arc<dyn Volume> =
            Arc::new(StripeVolume::new(64 << 10, vec![mem(32 * MIB), mem(32 * MIB)]).unwrap());
        conformance::run(&mut Harness::on_test_core(slice(&stripe, 3 * MIB + 512, 40 * MIB)));
    }

    #[test]
    fn a_volume_with_larger_blocks_conforms() {
        let volume = large_blocks(mem(40 * MIB + 512));
        assert_eq!((volume.info().size, volume.info().logical_block), (40 * MIB, 4096));
        conformance::run(&mut Harness::on_test_core(volume));
        // Extents of the stripe end at odd sectors.
        let stripe = StripeVolume::new(512, vec![mem(8 * MIB), mem(8 * MIB)]).unwrap();
        conformance::run(&mut Harness::on_test_core(large_blocks(Arc::new(stripe))));
    }

    #[test]
    fn data_outside_a_slice_is_not_changed() {
        let whole = mem(64 * MIB);
        conformance::run(&mut Harness::on_test_core(slice(&whole, 8 * MIB, 40 * MIB)));
        let mut client = Harness::on_test_core(whole).client(1).unwrap();
        for (offset, len) in [(0, 8 * MIB), (48 * MIB, 16 * MIB)] {
            assert!(client.read(offset, len).unwrap().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_slice_lies_within_its_volume_on_whole_blocks() {
        let refused = |offset, len| {
            let made = SliceVolume::new(mem(MIB), offset, len);
            made.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!((refused(0, None), refused(512, Some(MIB - 512))), (String::new(), String::new()));
        assert_eq!(
            refused(MIB, None),
            "begins at byte 1048576, but its volume has only 1048576 bytes; write a lower offset"
        );
        assert_eq!(
            refused(512, Some(MIB)),
            "ends 512 bytes beyond its volume of 1048576 bytes; write a length of at most 1048064, or leave it out to use the rest"
        );
        assert!(refused(512, Some(u64::MAX - 511)).contains("write a length of at most 1048064"));
        assert_eq!(
            refused(100, None),
            "offset 100 is not a multiple of its volume's block size of 512 bytes; write 512"
        );
        assert!(refused(0, Some(1000)).starts_with("length 1000 is not a multiple of"));
        assert_eq!(
            refused(0, Some(0)),
            "has a length of 0; write another length, or leave it out to use the rest"
        );
    }

    #[test]
    fn a_slice_has_the_largest_blocks_that_its_offset_is_a_multiple_of() {
        let whole = large_blocks(mem(MIB));
        assert!(SliceVolume::new(whole, 512, None).is_err());
        let whole = mem(MIB);
        let blocks = |offset| {
            let info = slice(&whole, offset, None).info();
            (info.logical_block, info.physical_block, info.preferred_block)
        };
        assert_eq!((blocks(0), blocks(8192)), ((512, 512, 4096), (512, 512, 4096)));
        assert_eq!((blocks(2048), blocks(512)), ((512, 512, 2048), (512, 512, 512)));
    }

    #[test]
    fn a_slice_without_a_length_has_the_size_of_the_rest() {
        let pages = Pages::from_heap(8 << 20);
        let whole: Arc<dyn Volume> = Arc::new(MemVolume::within(pages, 4 * MIB, BlockSizes::default()));
        let rest = slice(&whole, MIB, None);
        whole.resize(Resize::discard_beyond(6 * MIB)).unwrap();
        assert_eq!((rest.info().size, rest.refresh_size()), (5 * MIB, 5 * MIB));
        assert_eq!(rest.resize(Resize::discard_beyond(2 * MIB)).unwrap(), 2 * MIB);
        assert_eq!(whole.info().size, 3 * MIB);
        assert!(matches!(
            rest.resize(Resize::discard_beyond(8 * MIB)), Err(ResizeError::TooLarge { most }) if most == 7 * MIB
        ));
        assert!(rest.resize(Resize::discard_beyond(u64::MAX - 511)).is_err());
    }

    #[test]
    fn a_slice_with_a_length_is_resized_within_its_volume() {
        let whole = mem(4 * MIB);
        let part = slice(&whole, MIB, MIB);
        let mut client = Harness::on_test_core(part.clone()).client(1).unwrap();
        assert!(client.read(MIB, 512).is_err());
        assert_eq!(part.resize(Resize::discard_beyond(2 * MIB)).unwrap(), 2 * MIB);
        assert_eq!((part.info().size, whole.info().size), (2 * MIB, 4 * MIB));
        assert_eq!(client.read(MIB, 512).unwrap(), [0; 512], "channels see it at once");
        assert!(matches!(
            part.resize(Resize::discard_beyond(4 * MIB)), Err(ResizeError::TooLarge { most }) if most == 3 * MIB
        ));
        assert!(matches!(part.resize(Resize::discard_beyond(100)), Err(ResizeError::BadSize { .. })));
        // Shrinking `whole` shortens the part, too.
        whole.resize(Resize::discard_beyond(2 * MIB)).unwrap();
        assert_eq!((part.refresh_size(), part.resize(Resize::Own).unwrap()), (MIB, MIB));
        assert!(client.read(MIB, 512).is_err());
    }

    #[test]
    fn extents_are_merged_into_whole_blocks() {
        let hole = |len| Extent { len, hole: true, zero: true };
        let merged = |extents: &[Extent]| {
            let mut extents = extents.to_vec();
            merge_to_blocks(&mut extents, 4096);
            extents
        };
        let data = Extent::data;
        assert_eq!(merged(&[hole(4096), data(8192)]), [hole(4096), data(8192)]);
        assert_eq!(merged(&[hole(4608), data(7680)]), [hole(4096), data(8192)]);
        assert_eq!(
            merged(&[hole(512), data(512), hole(3072), hole(4096)]),
            [data(4096), hole(4096)],
            "a block with some data is data"
        );
        assert_eq!(merged(&[data(4096), hole(512)]), [data(4096)], "what is not known is left out");
        assert_eq!(merged(&[hole(512)]), [data(4096)], "but a result has at least one extent");
        let zero = Extent { len: 512, hole: false, zero: true };
        assert_eq!(merged(&[zero, hole(3584)]), [Extent { len: 4096, ..zero }]);
    }
}
