//! Small objects, which are replaced as a whole and only if they still have the expected content:
//! one beside an image, in its pool and namespace, and one of a pool.
//!
//! The calls here block for as long as the cluster does not answer, so cores do not make them.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::cluster::{c_string, text};
use crate::error::{Errno, RbdError};
use crate::image::Image;
use crate::library::{
    LIBRADOS_CREATE_EXCLUSIVE, LIBRADOS_CREATE_IDEMPOTENT, RadosFunctions, rados_write_op_t,
};
use crate::pool::Pool;
use std::ffi::{CStr, CString, c_char, c_int};
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
        read(self.image.pool(), &self.name, most)
    }

    /// Replaces the content if it begins with `expected`, or creates the object if that is `None`
    /// and there is none. Returns whether it has; otherwise nothing was changed.
    ///
    /// # Errors
    /// If the cluster refuses it, or does not say whether it was done.
    pub fn replace(&self, expected: Option<&[u8]>, content: &[u8]) -> Result<bool, RbdError> {
        let operation = WriteOperation::new(self.image.pool().rados());
        match expected {
            None => operation.create(LIBRADOS_CREATE_EXCLUSIVE),
            Some(_) => operation.assert_exists(),
        }
        operation.replace(self.image.pool(), &self.name, expected, content)
    }
}

/// An object of a pool that its users replace in turn. One that does not exist is the same as one
/// without content, so that it can be watched before there is any.
pub struct PoolObject {
    pub(crate) pool: Pool,
    pub(crate) name: CString,
}

impl PoolObject {
    /// The object of this name. It need not exist.
    ///
    /// # Errors
    /// If it is no name.
    pub fn new(pool: Pool, name: &str) -> Result<PoolObject, RbdError> {
        Ok(PoolObject { name: c_string("the object", name)?, pool })
    }

    /// The connection.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Creates it without content, if it does not exist.
    ///
    /// # Errors
    /// If the cluster refuses it, or does not say whether it was done.
    pub fn create(&self) -> Result<(), RbdError> {
        let operation = WriteOperation::new(self.pool.rados());
        operation.create(LIBRADOS_CREATE_IDEMPOTENT);
        operation.operate(&self.pool, &self.name).map_err(WriteOperation::failed)
    }

    /// The first `most` bytes of the content.
    ///
    /// # Errors
    /// If the cluster does not tell it.
    pub fn read(&self, most: usize) -> Result<Vec<u8>, RbdError> {
        read(&self.pool, &self.name, most).map(Option::unwrap_or_default)
    }

    /// Replaces the content if it begins with `expected`, where content that is shorter counts as
    /// followed by zeroes. Returns whether it has; otherwise nothing was changed.
    ///
    /// # Errors
    /// If the cluster refuses it, or does not say whether it was done.
    pub fn replace(&self, expected: &[u8], content: &[u8]) -> Result<bool, RbdError> {
        let operation = WriteOperation::new(self.pool.rados());
        operation.create(LIBRADOS_CREATE_IDEMPOTENT);
        operation.replace(&self.pool, &self.name, Some(expected), content)
    }
}

fn read(pool: &Pool, name: &CStr, most: usize) -> Result<Option<Vec<u8>>, RbdError> {
    let mut content = vec![0; most];
    let place = content.as_mut_ptr().cast();
    // SAFETY: the pool is open; a text, and memory of that length.
    let read = unsafe { (pool.rados().rados_read)(pool.handle(), name.as_ptr(), place, most, 0) };
    match Errno::check(read) {
        Ok(len) => {
            content.truncate(usize::try_from(len).unwrap_or(0));
            Ok(Some(content))
        }
        Err(error) if error.0 == libc::ENOENT => Ok(None),
        Err(error) => Err(RbdError::Call { call: "rados_read", error }),
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

    fn create(&self, flag: c_int) {
        // SAFETY: the operation is valid; the category has no effect.
        unsafe { (self.rados.rados_write_op_create)(self.handle, flag, ptr::null()) };
    }

    fn assert_exists(&self) {
        // SAFETY: the operation is valid; an object that does not exist fails its first step.
        unsafe { (self.rados.rados_write_op_assert_exists)(self.handle) };
    }

    /// Does it, and then writes the content, if what is there begins with `expected`.
    fn replace(
        self,
        pool: &Pool,
        name: &CStr,
        expected: Option<&[u8]>,
        content: &[u8],
    ) -> Result<bool, RbdError> {
        // librados looks at the result of the comparison when the operation ends.
        let mut compared = 0;
        if let Some(expected) = expected {
            let (bytes, len) = (expected.as_ptr().cast(), expected.len());
            // SAFETY: the operation is valid and copies the bytes. It ends before the place of the
            // result is gone.
            unsafe { (self.rados.rados_write_op_cmpext)(self.handle, bytes, len, 0, &raw mut compared) };
        }
        let (bytes, len) = (content.as_ptr().cast(), content.len());
        // SAFETY: the operation is valid and copies the bytes.
        unsafe { (self.rados.rados_write_op_write_full)(self.handle, bytes, len) };
        match self.operate(pool, name) {
            Ok(()) => Ok(true),
            Err(error) if is_other_content(error) => Ok(false),
            Err(error) => Err(WriteOperation::failed(error)),
        }
    }

    fn operate(&self, pool: &Pool, name: &CStr) -> Result<(), Errno> {
        // SAFETY: the pool is open; a text, and the time now.
        let done = unsafe {
            (self.rados.rados_write_op_operate)(self.handle, pool.handle(), name.as_ptr(), ptr::null_mut(), 0)
        };
        Errno::check(done).map(drop)
    }

    fn failed(error: Errno) -> RbdError {
        RbdError::Call { call: "rados_write_op_operate", error }
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
    use crate::fake_cluster::{FakeCluster, POOL};

    #[test]
    fn an_object_of_a_pool_is_replaced_only_if_it_begins_as_expected() {
        let fake = FakeCluster::default();
        let cluster = Arc::new(fake.connect());
        assert!(matches!(Pool::open(&cluster, "none", None), Err(RbdError::NoPool(pool)) if pool == "none"));
        let object = PoolObject::new(Pool::open(&cluster, POOL, None).unwrap(), "table").unwrap();
        assert_eq!(object.read(9).unwrap(), b"");
        assert!(!object.replace(b"0", b"1 first").unwrap());
        // Nothing is as good as zeroes, whether it exists or not.
        for is_there in [false, true] {
            fake.set_content("table", is_there.then_some(b""));
            assert!(object.replace(&[0; 4], b"1 first").unwrap());
        }
        assert!(!object.replace(&[0; 4], b"1 other").unwrap());
        assert!(object.replace(b"1", b"2 second").unwrap());
        object.create().unwrap();
        assert!(!object.replace(b"1", b"2 other").unwrap());
        assert_eq!(
            (object.read(3).unwrap(), object.read(99).unwrap()),
            (b"2 s".to_vec(), b"2 second".to_vec())
        );
    }

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
