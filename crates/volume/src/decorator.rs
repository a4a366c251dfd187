//! Volumes over another volume that are as it is: of the same size, whatever it becomes, and only
//! do things otherwise.

use crate::io::IoError;
use crate::ready::Waker;
use crate::volume::{Channel, Core, Populated, Resize, ResizeError, Volume, VolumeInfo};
use std::rc::Rc;

/// One such volume: a [`Volume`] by this alone.
pub(crate) trait Decorator: Send + Sync {
    /// What it is over.
    fn inner(&self) -> &dyn Volume;

    /// Its own [`Volume::open`].
    fn open_over(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError>;
}

impl<D: Decorator> Volume for D {
    fn info(&self) -> VolumeInfo {
        self.inner().info()
    }

    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        self.inner().on_resize(call);
    }

    fn populated(&self) -> Option<Populated> {
        self.inner().populated()
    }

    fn look_at_size(&self) -> u64 {
        self.inner().look_at_size()
    }

    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        self.inner().resize(to)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        self.open_over(core, depth, waker)
    }
}
