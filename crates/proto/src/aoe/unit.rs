//! One disk of a target, and what initiators set on it: config string, MAC mask list, reservation.
//!
//! All of that is rare, and read with every frame. So it is kept behind a lock with a number that changes with it, and a
//! session has its own copy, which it takes again when the number is another.

use super::Address;
use crate::exports::VolumeId;
use blockmux_wire::aoe::AOE_MAX_CONFIG;
use blockmux_wire::ethernet::Mac;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What initiators have set on a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// The config string, at most [`AOE_MAX_CONFIG`] bytes.
    pub config: Vec<u8>,
    /// Who is listened to; everybody if it is empty. At most [`MAX_MASKS`].
    pub masks: Vec<Mac>,
    /// Who may use it; everybody if it is empty. At most [`MAX_RESERVED`].
    pub reserved: Vec<Mac>,
}

/// Keeps what is set on one disk beyond the target's life.
pub trait UnitStore: Send + Sync {
    /// Replaces what is kept by `image`. Called on a core, and no change is acknowledged before: it is to be quick.
    /// `false` if that failed.
    fn save(&self, image: &[u8]) -> bool;
}

/// An image that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not what is kept of an AoE disk, or damaged")]
pub struct ImageError;

/// One disk; a clone is the same.
#[derive(Clone)]
pub struct Unit {
    /// Where it is.
    pub address: Address,
    /// What it is.
    pub volume: VolumeId,
    shared: Arc<Shared>,
}

struct Shared {
    /// Changes with what is kept.
    version: AtomicU32,
    kept: Mutex<Kept>,
    store: Option<Box<dyn UnitStore>>,
}

impl Unit {
    /// A disk on which `kept` is set already; without a store changes end with the process.
    #[must_use]
    pub fn new(address: Address, volume: VolumeId, kept: Kept, store: Option<Box<dyn UnitStore>>) -> Unit {
        let shared = Shared { version: AtomicU32::new(0), kept: Mutex::new(kept), store };
        Unit { address, volume, shared: Arc::new(shared) }
    }

    /// What is set now.
    #[must_use]
    pub fn kept(&self) -> Kept {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.shared.version.load(Ordering::Acquire)
    }

    /// Changes what is set, if `change` does not refuse; keeps it before it counts. `None` if it cannot be kept.
    pub(super) fn change<E>(&self, change: impl FnOnce(&mut Kept) -> Result<(), E>) -> Option<Result<(), E>> {
        let mut kept = self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = kept.clone();
        if let Err(refused) = change(&mut next) {
            return Some(Err(refused));
        }
        if next != *kept {
            if self.shared.store.as_ref().is_some_and(|store| !store.save(&next.to_image())) {
                return None;
            }
            *kept = next;
            self.shared.version.fetch_add(1, Ordering::Release);
        }
        Some(Ok(()))
    }
}

impl Kept {
    /// `magic 8 | config u16 | masks u16 | reserved u16 | the bytes of each`.
    #[must_use]
    pub fn to_image(&self) -> Vec<u8> {
        let mut image = MAGIC.to_vec();
        for count in [self.config.len(), self.masks.len(), self.reserved.len()] {
            image.extend((count as u16).to_be_bytes());
        }
        image.extend(&self.config);
        image.extend(self.masks.iter().chain(&self.reserved).flat_map(|mac| mac.0));
        image
    }

    /// What [`Kept::to_image`] made.
    ///
    /// # Errors
    /// If it did not.
    pub fn from_image(image: &[u8]) -> Result<Kept, ImageError> {
        let rest = image.strip_prefix(MAGIC).ok_or(ImageError)?;
        let (counts, rest) = rest.split_first_chunk::<6>().ok_or(ImageError)?;
        let [a, b, c, d, e, f] = *counts;
        let [config, masks, reserved] = [[a, b], [c, d], [e, f]].map(|n| usize::from(u16::from_be_bytes(n)));
        if config > AOE_MAX_CONFIG || masks > MAX_MASKS || reserved > MAX_RESERVED {
            return Err(ImageError);
        }
        let (config, rest) = rest.split_at_checked(config).ok_or(ImageError)?;
        let (macs, []) = rest.as_chunks::<6>() else { return Err(ImageError) };
        let (first, second) = macs.split_at_checked(masks).ok_or(ImageError)?;
        if second.len() != reserved {
            return Err(ImageError);
        }
        let list = |macs: &[[u8; 6]]| macs.iter().copied().map(Mac).collect();
        Ok(Kept { config: config.to_vec(), masks: list(first), reserved: list(second) })
    }
}

/// Entries of a MAC mask list: as many as the answer to one request holds in a frame of 1,500 bytes.
pub const MAX_MASKS: usize = 128;
/// Addresses that a disk is reserved for: as many as a frame of 1,500 bytes holds.
pub const MAX_RESERVED: usize = 240;

const MAGIC: &[u8] = b"BmxAoE01";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_holds_all_that_is_kept() {
        let kept = Kept {
            config: b"host:alpha".to_vec(),
            masks: vec![Mac([2, 0, 0, 0, 0, 1])],
            reserved: vec![Mac([2, 0, 0, 0, 0, 2]), Mac([2, 0, 0, 0, 0, 3])],
        };
        let image = kept.to_image();
        assert_eq!(Kept::from_image(&image), Ok(kept));
        assert_eq!(Kept::from_image(&Kept::default().to_image()), Ok(Kept::default()));
        for len in 0..image.len() {
            assert_eq!(Kept::from_image(&image[..len]), Err(ImageError), "{len} bytes");
        }
    }

    #[test]
    fn a_change_that_cannot_be_kept_is_none() {
        struct Full;
        impl UnitStore for Full {
            fn save(&self, _image: &[u8]) -> bool {
                false
            }
        }
        let address = Address { shelf: 0, slot: 0 };
        let unit = Unit::new(address, VolumeId(0), Kept::default(), Some(Box::new(Full)));
        let set = |kept: &mut Kept| {
            kept.config = b"x".to_vec();
            Ok::<(), ()>(())
        };
        assert_eq!((unit.change(set), unit.kept(), unit.version()), (None, Kept::default(), 0));
        let unit = Unit::new(address, VolumeId(0), Kept::default(), None);
        assert_eq!((unit.change(set), unit.version()), (Some(Ok(())), 1));
        assert_eq!((unit.change(set), unit.version()), (Some(Ok(())), 1), "nothing is new");
    }
}
