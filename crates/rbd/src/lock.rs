//! The exclusive lock of an image, by which one client owns it.
//!
//! librbd by itself takes the lock with the first write and passes it to the client that writes.
//! After [`Image::acquire_lock`] it keeps the lock until the image is closed or
//! [`Image::release_lock`].
//!
//! The calls here block for as long as the cluster does not answer, so cores do not make them.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::cluster::c_string;
use crate::error::{Errno, RbdError};
use crate::image::Image;
use crate::library::RBD_LOCK_MODE_EXCLUSIVE;
use std::ffi::{CStr, c_char};
use std::ptr;

impl Image {
    /// Takes the lock until it is released, or the image is closed. A client that holds it by
    /// itself hands it over; one that the cluster has lost is blocklisted, after half a minute.
    ///
    /// # Errors
    /// If another client has acquired the lock and answers, or the image has none. Then this client
    /// does not have it, except after [`RbdError::NotReleased`].
    pub fn acquire_lock(&self) -> Result<(), RbdError> {
        let (image, rbd) = self.raw();
        // SAFETY: the image is open.
        let acquired = unsafe { (rbd.rbd_lock_acquire)(image, RBD_LOCK_MODE_EXCLUSIVE) };
        match Errno::check(acquired) {
            Ok(_) => self.note_own_lock().map_err(|error| match self.release_lock() {
                Ok(()) => error,
                // A client that the cluster refuses holds no lock.
                Err(why) if why.is_blocklisted() => why,
                Err(why) => RbdError::NotReleased { error: error.to_string(), why: why.to_string() },
            }),
            Err(error) if error.0 == libc::EINVAL => Err(RbdError::NoLock),
            Err(error) if matches!(error.0, libc::EROFS | libc::EBUSY) => {
                let owner = self.lock_owner()?.unwrap_or_else(|| "another client".to_owned());
                Err(RbdError::Owned { owner })
            }
            Err(error) => Err(RbdError::Call { call: "rbd_lock_acquire", error }),
        }
    }

    /// Notes the address of this client, which has just acquired the lock. Another one may have
    /// taken it since: the owner is this one only if it is the same before and after the cluster
    /// says so.
    fn note_own_lock(&self) -> Result<(), RbdError> {
        let before = self.lock_owner()?;
        let is_own = self.is_lock_owner()?;
        match self.lock_owner()? {
            Some(owner) if is_own && before.as_ref() == Some(&owner) => self.cluster().note_address(owner),
            _ => return Err(RbdError::Call { call: "rbd_lock_acquire", error: Errno(libc::EAGAIN) }),
        }
        Ok(())
    }

    /// Whether this client has the lock, as the cluster says.
    fn is_lock_owner(&self) -> Result<bool, RbdError> {
        let (image, rbd) = self.raw();
        let mut is_owner = 0;
        // SAFETY: the image is open; a place for the answer.
        let asked = unsafe { (rbd.rbd_is_exclusive_lock_owner)(image, &raw mut is_owner) };
        RbdError::check("rbd_is_exclusive_lock_owner", asked)?;
        Ok(is_owner != 0)
    }

    /// Releases the lock after all writes, and what is in a cache, are stable. Later writes would
    /// take it again.
    ///
    /// # Errors
    /// If the cluster refuses it. Whether this client still has the lock is unknown then.
    pub fn release_lock(&self) -> Result<(), RbdError> {
        let (image, rbd) = self.raw();
        // SAFETY: the image is open.
        let released = unsafe { (rbd.rbd_lock_release)(image) };
        match Errno::check(released) {
            // It does not have the lock.
            Err(error) if error.0 == libc::EINVAL => Ok(()),
            released => {
                released.map(drop).map_err(|error| RbdError::Call { call: "rbd_lock_release", error })
            }
        }
    }

    /// The address of the client that has the lock, which ends with a number of the client; `None`
    /// if nobody has it.
    ///
    /// # Errors
    /// If the cluster does not tell it, or the image has no lock.
    pub fn lock_owner(&self) -> Result<Option<String>, RbdError> {
        let (image, rbd) = self.raw();
        let (mut mode, mut count) = (0, MAX_OWNERS);
        let mut owners: [*mut c_char; MAX_OWNERS] = [ptr::null_mut(); MAX_OWNERS];
        // SAFETY: the image is open, and the count is that of the places.
        let found =
            unsafe { (rbd.rbd_lock_get_owners)(image, &raw mut mode, owners.as_mut_ptr(), &raw mut count) };
        match Errno::check(found) {
            Ok(_) => {}
            Err(error) if error.0 == libc::ENOENT => return Ok(None),
            Err(error) if error.0 == libc::EINVAL => return Err(RbdError::NoLock),
            Err(error) => return Err(RbdError::Call { call: "rbd_lock_get_owners", error }),
        }
        let first = owners.first().filter(|owner| count > 0 && !owner.is_null());
        // SAFETY: librbd has filled so many, with texts that it has allocated.
        let owner = first.map(|owner| unsafe { CStr::from_ptr(*owner) }.to_string_lossy().into_owned());
        // SAFETY: what it has allocated is freed once, and not used again.
        unsafe { (rbd.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(owner)
    }

    /// Takes the lock from the client at this address: has the cluster blocklist it, waits until
    /// this client knows that map of the cluster, and releases the lock. What that client still
    /// sends is refused.
    ///
    /// # Errors
    /// If the cluster refuses that.
    pub fn break_lock(&self, owner: &str) -> Result<(), RbdError> {
        let (image, rbd) = self.raw();
        let owner = c_string("the owner of the lock", owner)?;
        // SAFETY: the image is open; a text.
        let broken = unsafe { (rbd.rbd_lock_break)(image, RBD_LOCK_MODE_EXCLUSIVE, owner.as_ptr()) };
        match Errno::check(broken) {
            // The owner has released it, or another client has taken it over, meanwhile; or it is
            // this client's own (EINVAL). An image without a lock is found when the lock is
            // acquired.
            Err(error) if matches!(error.0, libc::ENOENT | libc::EBUSY | libc::EAGAIN | libc::EINVAL) => {
                Ok(())
            }
            broken => broken.map(drop).map_err(|error| RbdError::Call { call: "rbd_lock_break", error }),
        }
    }
}

/// The lock has one owner.
const MAX_OWNERS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeImage;

    #[test]
    fn a_lock_whose_owner_is_not_known_is_released() {
        let fake = FakeImage::new(1 << 20);
        let image = fake.open(false);
        fake.fail_owner(Some(libc::ETIMEDOUT));
        assert!(matches!(image.acquire_lock(), Err(RbdError::Call { call: "rbd_lock_get_owners", .. })));
        assert!(!fake.is_locked());
        fake.fail_release(true);
        assert!(matches!(image.acquire_lock(), Err(RbdError::NotReleased { .. })));
        assert!(fake.is_locked());
        fake.fail_release(false);
        fake.fail_owner(None);
        image.acquire_lock().unwrap();
        assert!(image.cluster().is_owner(&image.lock_owner().unwrap().unwrap()));
        image.release_lock().unwrap();
        assert_eq!(image.lock_owner().unwrap(), None);
    }

    #[test]
    fn a_client_that_takes_the_lock_at_once_is_not_believed_to_be_this_one() {
        let fake = FakeImage::new(1 << 20);
        let image = fake.open(false);
        fake.take_at_once(true);
        assert!(matches!(image.acquire_lock(), Err(RbdError::Call { error: Errno(libc::EAGAIN), .. })));
        assert!(!image.cluster().is_owner(&image.lock_owner().unwrap().unwrap()));
        fake.take_at_once(false);
        image.acquire_lock().unwrap();
        assert!(image.cluster().is_owner(&image.lock_owner().unwrap().unwrap()));
    }
}
