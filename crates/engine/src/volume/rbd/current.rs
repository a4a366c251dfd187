//! The open image of a volume, and the queues of cores to it.

use super::of_turn::OfTurn;
use super::queue::RbdQueue;
use super::state::{CurrentInfo, ImageState};
use crate::core::reactor::EngineCore;
use crate::volume::core_queues::CoreQueues;
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::Image;
use blockmux_volume::{IoError, VolumeInfo};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::warn;

/// The open image of a volume. A client that the cluster has blocklisted stays so, and the volume
/// then needs an image of another client, to which its channels change with their next request.
pub(super) struct CurrentImage {
    state: Mutex<OfTurn<Arc<ImageState>>>,
    info: Arc<CurrentInfo>,
    /// [`ImageState::id`] of the image.
    id: AtomicU64,
}

impl CurrentImage {
    pub(super) fn new(state: Arc<ImageState>) -> Arc<CurrentImage> {
        let (id, info) = (AtomicU64::new(state.id), state.now.clone());
        Arc::new(CurrentImage { id, info, state: Mutex::new(OfTurn::new(state)) })
    }

    pub(super) fn get(&self) -> Arc<ImageState> {
        self.lock().get().clone()
    }

    /// The volume's properties.
    #[inline]
    pub(super) fn info(&self) -> VolumeInfo {
        self.info.info()
    }

    /// What images share that the volume has one after the other.
    pub(super) fn shared_info(&self) -> &Arc<CurrentInfo> {
        &self.info
    }

    /// Whether the image has this [`ImageState::id`].
    #[inline]
    pub(super) fn is(&self, id: u64) -> bool {
        self.id.load(Ordering::Acquire) == id
    }

    /// The image for a turn, which it has from now on, if that is right.
    ///
    /// # Errors
    /// If a later turn has it.
    pub(super) fn enter(
        &self,
        turn: u64,
        is_right: impl FnOnce(&Image) -> bool,
    ) -> Result<Option<Arc<Image>>, RbdError> {
        let mut own = self.lock();
        if !is_right(&own.get().image) {
            return Ok(None);
        }
        match own.enter(turn) {
            true => Ok(Some(own.get().image.clone())),
            false => Err(RbdError::GivenUp),
        }
    }

    /// Continues with another image.
    ///
    /// # Errors
    /// If a later turn has one.
    pub(super) fn set(&self, turn: u64, state: Arc<ImageState>) -> Result<(), RbdError> {
        let new = state.clone();
        let mut own = self.lock();
        let replaced = own.replace(turn, state);
        if replaced.is_ok() {
            self.info.set(&new.first);
            self.id.store(new.id, Ordering::Release);
        }
        drop(own);
        // Without the lock, because the last user closes the image.
        replaced.map(drop).map_err(|_| RbdError::GivenUp)
    }

    /// Nothing blocks while it is held, and no lock of the volume's state is taken.
    fn lock(&self) -> MutexGuard<'_, OfTurn<Arc<ImageState>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue of a core; its first channel makes it.
pub(super) fn queue_of(
    state: &Arc<ImageState>,
    core: &Rc<EngineCore>,
) -> Result<Rc<RefCell<RbdQueue>>, IoError> {
    let queues = core.local(CoreQueues::<RbdQueue>::default);
    if let Some(queue) = queues.find(state.id) {
        return Ok(queue);
    }
    let queue = RbdQueue::spawn(core, state).map_err(|error| {
        warn!("rbd:{}: cannot be used on this core: {error}", state.name);
        IoError::NoMemory
    })?;
    queues.add(state.id, &queue);
    Ok(queue)
}

#[cfg(test)]
mod tests {
    use super::super::volume::RbdVolume;
    use blockmux_rbd::error::RbdError;
    use blockmux_rbd::fake::FakeImage;
    use blockmux_rbd::image::ImageName;
    use blockmux_volume::Volume;
    use std::sync::Arc;

    #[test]
    fn the_properties_are_told_while_the_image_is_locked() {
        let (pool, name) = ("rbd".to_owned(), "fake".to_owned());
        let name = ImageName { pool, namespace: None, image: name, snapshot: None };
        let image = FakeImage::new(1 << 20);
        let volume = RbdVolume::of_image(image.open(false), &name, Arc::default());
        let (current, other) = (volume.current.clone(), FakeImage::new(1 << 21));
        let held = current.state.try_lock().unwrap();
        assert_eq!((volume.info().size, volume.info().write_cache), (1 << 20, false));
        drop(held);
        volume.replace_image(2, other.open(true), &name, Arc::default()).unwrap();
        assert_eq!((volume.info().size, volume.info().write_cache), (1 << 21, true));
        // The first turn gets its image late.
        let late = volume.replace_image(1, image.open(false), &name, Arc::default());
        assert!(matches!(late, Err(RbdError::GivenUp)));
        assert_eq!((volume.info().size, current.get().image.details().size), (1 << 21, 1 << 21));
        assert!(matches!(current.enter(1, |_| true), Err(RbdError::GivenUp)));
        assert!(current.enter(3, |_| false).unwrap().is_none());
        assert!(current.enter(2, |_| true).unwrap().is_some_and(|image| image.details().size == 1 << 21));
    }
}
