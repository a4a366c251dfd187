//! The removal of a kernel's device, by whichever thread comes first.

use std::sync::{Mutex, PoisonError};

/// Whether a device is removed. Its number may be another's then.
#[derive(Default)]
pub(super) struct Removal(Mutex<bool>);

impl Removal {
    /// Calls `remove` unless the device is removed, and no two at a time.
    ///
    /// # Errors
    /// If `remove` fails; the device stays then.
    pub(super) fn once<E>(&self, remove: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut is_removed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_removed {
            remove()?;
            *is_removed = true;
        }
        Ok(())
    }

    /// Whether the device is removed. Waits for a removal that is under way.
    pub(super) fn is_done(&self) -> bool {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_removed_once_and_again_only_if_that_failed() {
        let removal = Removal::default();
        assert_eq!(removal.once(|| Err("it is in use")), Err("it is in use"));
        assert!(!removal.is_done());
        let mut removed = 0;
        for _ in 0..2 {
            let remove = || {
                removed += 1;
                Ok::<(), ()>(())
            };
            removal.once(remove).unwrap();
            assert!(removal.is_done());
        }
        assert_eq!(removed, 1);
    }
}
