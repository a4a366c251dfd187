//! What a volume shares with its channels.

use super::status::StatusQueries;
use blockmux_rbd::image::Image;
use blockmux_volume::{Io, IoError, VolumeInfo};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tracing::warn;

/// An image that is in use: by its volume, and by channels, which may outlive that.
pub(super) struct ImageState {
    pub(super) image: Arc<Image>,
    /// What it is called in messages.
    pub(super) name: String,
    /// Properties at opening.
    pub(super) first: VolumeInfo,
    /// Properties now, of all images that the volume has one after the other.
    pub(super) now: Arc<CurrentInfo>,
    /// The image has changed since its size was asked for.
    pub(super) has_changed: Arc<AtomicBool>,
    /// Identifies the volume on its cores.
    pub(super) id: u64,
    pub(super) status: Arc<StatusQueries>,
}

/// Properties of a volume, which are asked for with each request: no lock is taken for them.
pub(super) struct CurrentInfo {
    /// What is the same for every client that opens the image.
    fixed: VolumeInfo,
    /// Current size, in bytes.
    size: AtomicU64,
    /// Units that can be compared and written, in bytes: those of the image, or fewer bytes if
    /// librbd has refused them.
    pub(super) compared_unit: AtomicU32,
    has_cache: AtomicBool,
    /// See [`CurrentInfo::on_refused`].
    on_refused: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl CurrentInfo {
    pub(super) fn new(first: &VolumeInfo) -> CurrentInfo {
        CurrentInfo {
            fixed: first.clone(),
            size: AtomicU64::new(first.size),
            compared_unit: AtomicU32::new(first.compare_and_write_unit),
            has_cache: AtomicBool::new(first.write_cache),
            on_refused: OnceLock::new(),
        }
    }

    /// Has `call` called on a core when a request is refused because this client does not have the
    /// image's lock. Only the first call counts.
    pub(super) fn on_refused(&self, call: impl Fn() + Send + Sync + 'static) {
        // The first one stays.
        let _ = self.on_refused.set(Box::new(call));
    }

    /// A request was refused because this client does not have the image's lock.
    #[cold]
    pub(super) fn note_refused(&self) {
        self.on_refused.get().into_iter().for_each(|call| call());
    }

    /// Takes the properties of an image that another client has opened.
    pub(super) fn set(&self, first: &VolumeInfo) {
        self.size.store(first.size, Ordering::Relaxed);
        self.compared_unit.store(first.compare_and_write_unit, Ordering::Relaxed);
        self.has_cache.store(first.write_cache, Ordering::Relaxed);
    }

    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            size: self.size.load(Ordering::Relaxed),
            compare_and_write_unit: self.compared_unit.load(Ordering::Relaxed),
            write_cache: self.has_cache.load(Ordering::Relaxed),
            ..self.fixed.clone()
        }
    }
}

impl ImageState {
    /// Checks a request against the current size.
    #[inline]
    pub(super) fn check(&self, io: &Io) -> Result<(), IoError> {
        self.first.check_within(io, self.now.size.load(Ordering::Relaxed))
    }

    /// Whether completed writes may be in a cache of this process.
    pub(super) fn has_cache(&self) -> bool {
        self.first.write_cache
    }

    /// Asks for the size if it may have changed; returns it in bytes.
    pub(super) fn refresh(&self) -> u64 {
        // Cleared before the size is asked for, so that a later change is noticed.
        if self.has_changed.swap(false, Ordering::Relaxed) {
            match self.image.size() {
                Ok(size) => self.now.size.store(whole_blocks(size), Ordering::Relaxed),
                Err(error) => {
                    self.has_changed.store(true, Ordering::Relaxed);
                    warn!("rbd:{}: its size may have changed, but cannot be read: {error}", self.name);
                }
            }
        }
        self.now.size.load(Ordering::Relaxed)
    }
}

/// The size of the whole blocks of an image, which may have any size.
pub(super) fn whole_blocks(size: u64) -> u64 {
    size / BLOCK * BLOCK
}

/// Logical block in bytes.
pub(super) const BLOCK: u64 = 512;
