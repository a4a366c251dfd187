//! Volumes that wrap another volume and change how requests are processed.

use crate::io::IoError;
use crate::ready::Waker;
use crate::snapshots::Snapshots;
use crate::volume::{Channel, Core, LinkCounts, Populated, Resize, ResizeError, Volume, VolumeInfo};
use std::path::PathBuf;
use std::rc::Rc;

/// A wrapper of a volume. Every implementation of this trait is a [`Volume`].
pub(crate) trait Decorator: Send + Sync {
    /// The wrapped volume.
    fn inner(&self) -> &dyn Volume;

    /// Implements [`Volume::info`], but for registered buffers.
    fn info_over(&self) -> VolumeInfo {
        self.inner().info()
    }

    /// Whether requests reach the wrapped volume at once and with their own data, so that it may be
    /// in a registered buffer.
    fn passes_registered(&self) -> bool {
        false
    }

    /// Implements [`Volume::refresh_size`].
    fn refresh_size_over(&self) -> u64 {
        self.inner().refresh_size()
    }

    /// Implements [`Volume::resize`].
    fn resize_over(&self, to: Resize) -> Result<u64, ResizeError> {
        self.inner().resize(to)
    }

    /// Implements [`Volume::snapshots`].
    fn snapshots_over(&self) -> Option<&dyn Snapshots> {
        self.inner().snapshots()
    }

    /// Implements [`Volume::open`].
    fn open_over(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError>;
}

impl<D: Decorator> Volume for D {
    fn info(&self) -> VolumeInfo {
        let info = self.info_over();
        let registered_alignment = info.registered_alignment.filter(|_| self.passes_registered());
        VolumeInfo { registered_alignment, ..info }
    }

    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        self.inner().on_resize(call);
    }

    fn populated(&self) -> Option<Populated> {
        self.inner().populated()
    }

    fn links(&self) -> Option<LinkCounts> {
        self.inner().links()
    }

    fn deleted_file(&self) -> Option<PathBuf> {
        self.inner().deleted_file()
    }

    fn lost_path(&self) -> Option<PathBuf> {
        self.inner().lost_path()
    }

    fn refresh_size(&self) -> u64 {
        self.refresh_size_over()
    }

    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        self.resize_over(to)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.snapshots_over()
    }

    fn snapshots_in_use(&self) -> Vec<String> {
        self.inner().snapshots_in_use()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        self.open_over(core, depth, waker)
    }
}
