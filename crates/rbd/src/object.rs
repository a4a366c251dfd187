//! A small object beside an image, in the same pool and namespace, which is replaced as a whole and
//! only if it still has the expected content.
//!
//! The calls here block for as long as the cluster does not answer, so cores do not make them.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::cluster::{c_string, text};
use crate::error::{Errno, RbdError};
use crate::image::Image;
use crate::library::{LIBRADOS_CREATE_EXCLUSIVE, RadosFunctions, rados_write_op_t};
use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

/// An object that belongs to an image. The image stays open, and its lock held, as long as this is
/// used.
pub struct ImageObject {
    image: Arc<Image>,
    name: CString,
}

impl ImageObject {
    /// The object whose name is `prefix` and the identifier of the image. It need not exist.
    ///
    /// # Errors
    /// If the cluster does not tell the identifier.
    pub fn new(image: &Arc<Image>, prefix: &str) -> Result<ImageObject, RbdError> {
        let mut id: [c_char; ID_LEN] = [0; ID_LEN];
        let (handle, rbd) = image.raw();
        // SAFETY: the image is open, and the length is that of the memory.
        let found = unsafe { (rbd.rbd_get_id)(handle, id.as_mut_ptr(), id.len()) };
        RbdError::check("rbd_get_id", found)?;
        let name = c_string("the image's identifier", &format!("{prefix}{}", text(&id)))?;
        Ok(ImageObject { image: image.clone(), name })
    }

    /// The object's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    /// The image that it belongs to.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The first `most` bytes of the content; `None` if there is no object.
    ///
    /// # Errors
    /// If the cluster does not tell it.
    pub fn read(&self, most: usize) -> Result<Option<Vec<u8>>, RbdError> {
        let (pool, rados) = self.image.pool();
        let mut content = vec![0; most];
        let place = content.as_mut_ptr().cast();
        // SAFETY: the pool is open; a text, and memory of that length.
        let read = unsafe { (rados.rados_read)(pool, self.name.as_ptr(), place, most, 0) };
        match Errno::check(read) {
            Ok(len) => {
                content.truncate(usize::try_from(len).unwrap_or(0));
                Ok(Some(content))
            }
            Err(error) if error.0 == libc::ENOENT => Ok(None),
            Err(error) => Err(RbdError::Call { call: "rados_read", error }),
        }
    }

    /// Replaces the content if it begins with `expected`, or creates the object if that is `None`
    /// and there is none. Returns whether it has; otherwise nothing was changed.
    ///
    /// # Errors
    /// If the cluster refuses it, or does not say whether it was done.
    pub fn replace(&self, expected: Option<&[u8]>, content: &[u8]) -> Result<bool, RbdError> {
        let (pool, rados) = self.image.pool();
        let operation = WriteOperation::new(rados);
        // librados looks at the result of the comparison when the operation ends.
        let mut compared = 0;
        match expected {
            None => operation.create_exclusively(),
            Some(expected) => {
                // SAFETY: the operation is used before the number is gone.
                unsafe { operation.compare(expected, &raw mut compared) };
            }
        }
        operation.write_full(content);
        // SAFETY: the pool is open; a text, and the time now.
        let done = unsafe {
            (rados.rados_write_op_operate)(operation.handle, pool, self.name.as_ptr(), ptr::null_mut(), 0)
        };
        match Errno::check(done) {
            Ok(_) => Ok(true),
            Err(error) if is_other_content(error) => Ok(false),
            Err(error) => Err(RbdError::Call { call: "rados_write_op_operate", error }),
        }
    }
}

/// Whether an operation has failed because the object is not as expected. Where a comparison fails,
/// the number is greater than all errors, by the offset of the first byte that differs.
fn is_other_content(error: Errno) -> bool {
    matches!(error.0, libc::EEXIST | libc::ENOENT | libc::ECANCELED) || error.0 >= MAX_ERRNO
}

/// What is to be done with one object, all or nothing.
struct WriteOperation<'a> {
    rados: &'a RadosFunctions,
    handle: rados_write_op_t,
}

impl WriteOperation<'_> {
    fn new(rados: &RadosFunctions) -> WriteOperation<'_> {
        // SAFETY: it has no arguments, and always returns an operation.
        let handle = unsafe { (rados.rados_create_write_op)() };
        WriteOperation { rados, handle }
    }

    fn create_exclusively(&self) {
        // SAFETY: the operation is valid; the category has no effect.
        unsafe {
            (self.rados.rados_write_op_create)(self.handle, LIBRADOS_CREATE_EXCLUSIVE, ptr::null());
        }
    }

    /// # Safety
    /// The place of the result is valid until the operation was operated.
    unsafe fn compare(&self, expected: &[u8], compared: *mut i32) {
        // SAFETY: the operation is valid and copies the bytes; an object that does not exist fails
        // the first step.
        unsafe {
            (self.rados.rados_write_op_assert_exists)(self.handle);
            let (bytes, len) = (expected.as_ptr().cast(), expected.len());
            (self.rados.rados_write_op_cmpext)(self.handle, bytes, len, 0, compared);
        }
    }

    fn write_full(&self, content: &[u8]) {
        // SAFETY: the operation is valid and copies the bytes.
        unsafe {
            (self.rados.rados_write_op_write_full)(self.handle, content.as_ptr().cast(), content.len());
        }
    }
}

impl Drop for WriteOperation<'_> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the operation.
        unsafe { (self.rados.rados_release_write_op)(self.handle) };
    }
}

/// An image's identifier is a text of some 14 characters.
const ID_LEN: usize = 256;
/// Greater than all error numbers.
const MAX_ERRNO: i32 = 4095;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_with_other_content_is_told_from_an_error() {
        for other in [libc::EEXIST, libc::ENOENT, MAX_ERRNO, MAX_ERRNO + 15] {
            assert!(is_other_content(Errno(other)), "{other}");
        }
        for error in [libc::ESHUTDOWN, libc::ETIMEDOUT, libc::EPERM, libc::ENOSPC] {
            assert!(!is_other_content(Errno(error)), "{error}");
        }
    }
}
