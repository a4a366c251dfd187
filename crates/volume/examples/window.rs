//! A part of another volume, like a partition: the worked example of
//! `docs/internals/write-a-volume.md`.
//!
//! `cargo run -p blockmux-volume --example window --features conformance` runs the conformance
//! suite on it, and prints nothing if it passes.

use blockmux_volume::conformance::{self, Harness};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, MemVolume, Tag, Volume, VolumeInfo, Waker};
use std::rc::Rc;
use std::sync::Arc;

/// A part of another volume.
pub struct Window {
    inner: Arc<dyn Volume>,
    /// Start of the part in `inner`, in bytes.
    start: u64,
    info: VolumeInfo,
}

impl Window {
    /// The `size` bytes of `inner` from `start` on.
    ///
    /// # Errors
    /// If the range does not lie within `inner`, or its start or size is misaligned.
    pub fn new(inner: Arc<dyn Volume>, start: u64, size: u64) -> Result<Window, IoError> {
        let whole = inner.info();
        if start.checked_add(size).is_none_or(|end| end > whole.size) {
            return Err(IoError::OutOfRange);
        }
        // Aligned requests are aligned in `inner` only if the start is a multiple of the preferred
        // block, which is a multiple of the physical block.
        let (logical, preferred) = (whole.logical_block.into(), whole.preferred_block.into());
        if !start.is_multiple_of(preferred) || !size.is_multiple_of(logical) {
            return Err(IoError::Misaligned);
        }
        Ok(Window { inner, start, info: VolumeInfo { size, ..whole } })
    }
}

impl Volume for Window {
    fn info(&self) -> VolumeInfo {
        self.info.clone()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(WindowChannel {
            inner: self.inner.open(core, depth, waker)?,
            start: self.start,
            info: self.info.clone(),
            refused: Vec::with_capacity(depth as usize),
        }))
    }
}

struct WindowChannel {
    inner: Box<dyn Channel>,
    start: u64,
    info: VolumeInfo,
    /// Completions of requests that were not passed on.
    refused: Vec<Completion>,
}

impl Channel for WindowChannel {
    fn submit(&mut self, io: Io) {
        match self.info.check(&io) {
            // Checked against the window, so the sum lies within `inner`.
            Ok(()) => self.inner.submit(Io { offset: io.offset + self.start, ..io }),
            Err(error) => self.refused.push(Completion { tag: io.tag, result: Err(error) }),
        }
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.refused);
        self.inner.poll(done);
    }

    fn cancel(&mut self, tag: Tag) {
        self.inner.cancel(tag);
    }
}

fn main() -> Result<(), IoError> {
    let whole = Arc::new(MemVolume::new(64 << 20));
    let window = Window::new(whole, 8 << 20, 40 << 20)?;
    conformance::run(&mut Harness::on_test_core(Arc::new(window)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{DelayVolume, Delays};
    use std::time::Duration;

    fn window(inner: Arc<dyn Volume>) -> Arc<Window> {
        Arc::new(Window::new(inner, 8 << 20, 40 << 20).unwrap())
    }

    #[test]
    fn a_window_conforms() {
        conformance::run(&mut Harness::on_test_core(window(Arc::new(MemVolume::new(64 << 20)))));
    }

    #[test]
    fn a_window_of_a_slow_volume_wakes_its_user() {
        let ms = Duration::from_millis(1);
        let delays = Delays { read: ms, write: 3 * ms, flush: 2 * ms };
        let slow = DelayVolume::new(Arc::new(MemVolume::new(64 << 20)), delays);
        conformance::run(&mut Harness::on_test_core(window(Arc::new(slow))));
    }

    #[test]
    fn data_outside_the_window_is_not_changed() {
        let whole: Arc<dyn Volume> = Arc::new(MemVolume::new(64 << 20));
        conformance::run(&mut Harness::on_test_core(window(whole.clone())));
        let mut client = Harness::on_test_core(whole).client(1).unwrap();
        for (offset, len) in [(0, 8 << 20), (48 << 20, 16 << 20)] {
            assert!(client.read(offset, len).unwrap().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_window_lies_within_its_volume_on_whole_blocks() {
        let refused = |start, size| Window::new(Arc::new(MemVolume::new(1 << 20)), start, size).err();
        assert_eq!(refused(0, 1 << 20), None);
        assert_eq!(refused(4096, 1 << 20), Some(IoError::OutOfRange));
        assert_eq!(refused(u64::MAX, 512), Some(IoError::OutOfRange));
        assert_eq!(refused(512, 512), Some(IoError::Misaligned));
        assert_eq!(refused(4096, 100), Some(IoError::Misaligned));
    }

    #[test]
    fn the_guide_quotes_this_file() {
        let page = include_str!("../../../docs/internals/write-a-volume.md");
        let quotes: Vec<&str> =
            page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert!(!quotes.is_empty());
        for quote in quotes {
            assert!(include_str!("window.rs").contains(quote), "no longer in this file:\n{quote}");
        }
    }
}
