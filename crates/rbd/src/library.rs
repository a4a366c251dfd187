//! librados and librbd, loaded at run time: the program also starts where they are not installed.
//!
//! Their interface is C's, with opaque handles and few structures, so that own declarations are
//! enough. Ceph 16 and later have all of the functions.
#![expect(unsafe_code, reason = "loads libraries in C, and gives their functions types")]
#![allow(clippy::type_complexity, reason = "the types of C's functions")]
#![allow(non_camel_case_types, reason = "the names of C's types")]

pub use blockmux_dynlib::LibraryError;
use blockmux_dynlib::functions;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The functions of Ceph's libraries.
#[derive(Clone, Copy)]
pub struct Library {
    /// Connections to clusters and pools.
    pub rados: RadosFunctions,
    /// Images.
    pub rbd: RbdFunctions,
}

impl Library {
    /// Loads the libraries, or returns them if they are loaded already. A later call finds what was
    /// installed after one that failed.
    ///
    /// # Errors
    /// If they are not installed; the message names the packages.
    pub fn load() -> Result<&'static Library, LibraryError> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        // librbd first: it is the one whose absence users know.
        let library = Library { rbd: RbdFunctions::load()?, rados: RadosFunctions::load()? };
        Ok(LOADED.get_or_init(|| library))
    }

    /// The version of librbd's interface, such as (1, 16) of Ceph 16.
    #[must_use]
    pub fn version(&self) -> (c_int, c_int) {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: three places for numbers.
        unsafe { (self.rbd.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        (major, minor)
    }
}

/// The packages of distributions that have the libraries.
pub const PACKAGES: &str = "librbd of Ceph 16 or later (Debian: librbd1, Fedora: librbd1)";

/// A connection to a cluster.
pub type rados_t = *mut c_void;
/// A pool, and a namespace in it.
pub type rados_ioctx_t = *mut c_void;
/// Steps of a change of one object.
pub type rados_write_op_t = *mut c_void;
/// A request of librados that completes later.
pub type rados_completion_t = *mut c_void;
/// What librados calls when a request has completed.
pub type rados_callback_t = unsafe extern "C" fn(rados_completion_t, *mut c_void);
/// What librados calls for a notification: its number, that of the watch, who sent it, and its
/// content.
pub type rados_watchcb2_t = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut c_void, usize);
/// What librados calls when a watch may have missed notifications: the watch, and an error number.
pub type rados_watcherrcb_t = unsafe extern "C" fn(*mut c_void, u64, c_int);
/// An open image.
pub type rbd_image_t = *mut c_void;
/// A request that completes later.
pub type rbd_completion_t = *mut c_void;
/// What librbd calls when a request has completed.
pub type rbd_callback_t = unsafe extern "C" fn(rbd_completion_t, *mut c_void);
/// What librbd calls when an image has changed.
pub type rbd_update_callback_t = unsafe extern "C" fn(*mut c_void);
/// What librbd calls for a run of blocks: its offset, its length, whether it exists.
pub type rbd_diff_callback_t = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;
/// What librbd calls while an operation goes on.
pub type librbd_progress_fn_t = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// An option that holds for an image.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rbd_config_option_t {
    /// Its name, in memory of librbd.
    pub name: *mut c_char,
    /// Its value, in memory of librbd.
    pub value: *mut c_char,
    /// Where it is set.
    pub source: c_int,
}

/// A snapshot of an image.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rbd_snap_info_t {
    /// Its number.
    pub id: u64,
    /// The size of the image then, in bytes.
    pub size: u64,
    /// Its name, in memory of librbd.
    pub name: *const c_char,
}

/// The image has an object map that shows which objects differ.
pub const RBD_FEATURE_FAST_DIFF: u64 = 1 << 4;
/// The image's blocks are not consecutive in its objects.
pub const RBD_FEATURE_STRIPINGV2: u64 = 1 << 1;
/// The object map or what it shows of differences is not valid.
pub const RBD_FLAGS_INVALID: u64 = 1 << 0 | 1 << 1;
/// A snapshot that was made by a user, not by the cluster for its own purposes.
pub const RBD_SNAP_NAMESPACE_TYPE_USER: c_int = 0;
/// A lock that one client has.
pub const RBD_LOCK_MODE_EXCLUSIVE: c_int = 0;
/// The object may exist.
pub const LIBRADOS_CREATE_IDEMPOTENT: c_int = 0;
/// The object must not exist.
pub const LIBRADOS_CREATE_EXCLUSIVE: c_int = 1;
/// The range is to be allocated.
pub const RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: c_int = 1;

functions! {
    /// Functions of librados.
    RadosFunctions of "librados.so.2\0" in (PACKAGES) {
        rados_create(*mut rados_t, *const c_char) -> c_int;
        rados_conf_read_file(rados_t, *const c_char) -> c_int;
        rados_conf_set(rados_t, *const c_char, *const c_char) -> c_int;
        rados_conf_get(rados_t, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(rados_t) -> c_int;
        rados_shutdown(rados_t);
        rados_cluster_fsid(rados_t, *mut c_char, usize) -> c_int;
        rados_mon_command(
            rados_t, *const *const c_char, usize, *const c_char, usize,
            *mut *mut c_char, *mut usize, *mut *mut c_char, *mut usize
        ) -> c_int;
        rados_buffer_free(*mut c_char);
        rados_getaddrs(rados_t, *mut *mut c_char) -> c_int;
        rados_blocklist_add(rados_t, *mut c_char, u32) -> c_int;
        rados_wait_for_latest_osdmap(rados_t) -> c_int;
        rados_ioctx_create(rados_t, *const c_char, *mut rados_ioctx_t) -> c_int;
        rados_ioctx_set_namespace(rados_ioctx_t, *const c_char);
        rados_ioctx_get_id(rados_ioctx_t) -> i64;
        rados_ioctx_destroy(rados_ioctx_t);
        rados_read(rados_ioctx_t, *const c_char, *mut c_char, usize, u64) -> c_int;
        rados_create_write_op() -> rados_write_op_t;
        rados_release_write_op(rados_write_op_t);
        rados_write_op_create(rados_write_op_t, c_int, *const c_char);
        rados_write_op_assert_exists(rados_write_op_t);
        rados_write_op_cmpext(rados_write_op_t, *const c_char, usize, u64, *mut c_int);
        rados_write_op_write_full(rados_write_op_t, *const c_char, usize);
        rados_write_op_operate(
            rados_write_op_t, rados_ioctx_t, *const c_char, *mut libc::time_t, c_int
        ) -> c_int;
        rados_watch3(
            rados_ioctx_t, *const c_char, *mut u64, rados_watchcb2_t, rados_watcherrcb_t, u32, *mut c_void
        ) -> c_int;
        rados_watch_check(rados_ioctx_t, u64) -> c_int;
        rados_unwatch2(rados_ioctx_t, u64) -> c_int;
        rados_watch_flush(rados_t) -> c_int;
        rados_notify_ack(rados_ioctx_t, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
        rados_aio_notify(
            rados_ioctx_t, *const c_char, rados_completion_t, *const c_char, c_int, u64, *mut *mut c_char, *mut usize
        ) -> c_int;
        rados_aio_create_completion2(*mut c_void, rados_callback_t, *mut rados_completion_t) -> c_int;
        rados_aio_get_return_value(rados_completion_t) -> c_int;
        rados_aio_release(rados_completion_t);
    }
}

functions! {
    /// Functions of librbd.
    RbdFunctions of "librbd.so.1\0" in (PACKAGES) {
        rbd_version(*mut c_int, *mut c_int, *mut c_int);
        rbd_open(rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char) -> c_int;
        rbd_open_read_only(rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char) -> c_int;
        rbd_close(rbd_image_t) -> c_int;
        rbd_get_size(rbd_image_t, *mut u64) -> c_int;
        rbd_get_id(rbd_image_t, *mut c_char, usize) -> c_int;
        rbd_get_features(rbd_image_t, *mut u64) -> c_int;
        rbd_get_flags(rbd_image_t, *mut u64) -> c_int;
        rbd_get_overlap(rbd_image_t, *mut u64) -> c_int;
        rbd_get_stripe_unit(rbd_image_t, *mut u64) -> c_int;
        rbd_config_image_list(rbd_image_t, *mut rbd_config_option_t, *mut c_int) -> c_int;
        rbd_config_image_list_cleanup(*mut rbd_config_option_t, c_int);
        rbd_resize2(rbd_image_t, u64, bool, librbd_progress_fn_t, *mut c_void) -> c_int;
        rbd_snap_set(rbd_image_t, *const c_char) -> c_int;
        rbd_snap_create(rbd_image_t, *const c_char) -> c_int;
        rbd_snap_remove(rbd_image_t, *const c_char) -> c_int;
        rbd_snap_protect(rbd_image_t, *const c_char) -> c_int;
        rbd_snap_unprotect(rbd_image_t, *const c_char) -> c_int;
        rbd_snap_is_protected(rbd_image_t, *const c_char, *mut c_int) -> c_int;
        rbd_snap_get_timestamp(rbd_image_t, u64, *mut libc::timespec) -> c_int;
        rbd_snap_get_namespace_type(rbd_image_t, u64, *mut c_int) -> c_int;
        rbd_snap_list(rbd_image_t, *mut rbd_snap_info_t, *mut c_int) -> c_int;
        rbd_snap_list_end(*mut rbd_snap_info_t);
        rbd_diff_iterate2(
            rbd_image_t, *const c_char, u64, u64, u8, u8, rbd_diff_callback_t, *mut c_void
        ) -> c_int;
        rbd_lock_acquire(rbd_image_t, c_int) -> c_int;
        rbd_lock_get_owners(rbd_image_t, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
        rbd_is_exclusive_lock_owner(rbd_image_t, *mut c_int) -> c_int;
        rbd_lock_release(rbd_image_t) -> c_int;
        rbd_lock_break(rbd_image_t, c_int, *const c_char) -> c_int;
        rbd_update_watch(rbd_image_t, *mut u64, rbd_update_callback_t, *mut c_void) -> c_int;
        rbd_update_unwatch(rbd_image_t, u64) -> c_int;
        rbd_aio_create_completion(*mut c_void, rbd_callback_t, *mut rbd_completion_t) -> c_int;
        rbd_aio_get_return_value(rbd_completion_t) -> isize;
        rbd_aio_release(rbd_completion_t);
        rbd_aio_readv(rbd_image_t, *const libc::iovec, c_int, u64, rbd_completion_t) -> c_int;
        rbd_aio_writev(rbd_image_t, *const libc::iovec, c_int, u64, rbd_completion_t) -> c_int;
        rbd_aio_discard(rbd_image_t, u64, u64, rbd_completion_t) -> c_int;
        rbd_aio_write_zeroes(rbd_image_t, u64, usize, rbd_completion_t, c_int, c_int) -> c_int;
        rbd_aio_flush(rbd_image_t, rbd_completion_t) -> c_int;
        rbd_aio_compare_and_write(
            rbd_image_t, u64, usize, *const c_char, *const c_char, rbd_completion_t, *mut u64, c_int
        ) -> c_int;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_in_the_libraries() {
        match Library::load() {
            Ok(library) => assert!(library.version() >= (1, 16)),
            Err(error @ LibraryError::NoFunction { .. }) => panic!("{error}"),
            Err(error) => println!("skipped: {error}"),
        }
    }
}
