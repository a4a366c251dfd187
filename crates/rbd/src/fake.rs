//! An image in the memory of this process, for tests without a cluster: functions in the place of
//! librbd's, whose requests complete in the order that a test chooses.
#![expect(unsafe_code, reason = "stands in for a library in C, which uses memory by address")]

use crate::cluster::Cluster;
use crate::image::{Image, ImageDetails};
use crate::library::{
    Library, RadosFunctions, RbdFunctions, rados_ioctx_t, rados_t, rbd_callback_t, rbd_completion_t,
    rbd_image_t,
};
use std::convert::Infallible;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// An image, and what a test does to its requests.
#[derive(Clone)]
pub struct FakeImage(Arc<Mutex<FakeState>>);

#[derive(Default)]
struct FakeState {
    content: Vec<u8>,
    /// Requests wait until the test completes them.
    is_holding: bool,
    /// Requests that wait, oldest first.
    pending: Vec<PendingRequest>,
    /// Requests are refused with this error.
    refusal: Option<c_int>,
    is_closed: bool,
    lock: FakeLock,
}

/// The lock of an image.
#[derive(Default)]
struct FakeLock {
    owner: Option<&'static CStr>,
    owner_error: Option<c_int>,
    fails_release: bool,
    is_taken_at_once: bool,
}

/// A request that has not completed.
struct PendingRequest {
    completion: *mut FakeCompletion,
    kind: FakeRequest,
    offset: usize,
}
// SAFETY: its addresses are those of memory that its owner keeps until the request completes.
unsafe impl Send for PendingRequest {}

enum FakeRequest {
    Read(Vec<libc::iovec>),
    Write(Vec<libc::iovec>),
    Zero(usize),
    Nothing,
    Compare { len: usize, expected: *const u8, new: *const u8, difference: *mut u64 },
}

/// What is behind a completion.
struct FakeCompletion {
    call: rbd_callback_t,
    argument: *mut c_void,
    result: isize,
}

impl FakeImage {
    /// An image of so many bytes, all zero.
    #[must_use]
    pub fn new(size: usize) -> FakeImage {
        FakeImage(Arc::new(Mutex::new(FakeState { content: vec![0; size], ..FakeState::default() })))
    }

    /// Opens it; `has_cache`: completed writes are stable only after a flush.
    #[must_use]
    pub fn open(&self, has_cache: bool) -> Arc<Image> {
        let details = ImageDetails {
            size: self.state().content.len() as u64,
            read_only: false,
            has_cache,
            discard_granularity: 4096,
            compare_and_write_unit: 4096,
            stripe_unit: 8192,
            identity: "fake".to_owned(),
        };
        // Closing drops it.
        let handle = Arc::into_raw(self.0.clone()).cast_mut().cast();
        Arc::new(Image::of_handle(Arc::new(Cluster::of_library(library())), handle, details))
    }

    /// Requests wait from now on until [`FakeImage::complete`], or no longer.
    pub fn hold(&self, is_holding: bool) {
        self.state().is_holding = is_holding;
    }

    /// Refuses requests with this error number from now on, or no longer.
    pub fn refuse(&self, errno: Option<c_int>) {
        self.state().refusal = errno;
    }

    /// Fails the question who has the lock with this error number from now on, or no longer.
    pub fn fail_owner(&self, errno: Option<c_int>) {
        self.state().lock.owner_error = errno;
    }

    /// Does not release the lock from now on, or does.
    pub fn fail_release(&self, fails: bool) {
        self.state().lock.fails_release = fails;
    }

    /// Another client takes the lock as soon as this one has acquired it, or no longer does.
    pub fn take_at_once(&self, takes: bool) {
        self.state().lock.is_taken_at_once = takes;
    }

    /// Whether this client has the lock.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.state().lock.owner == Some(OWN)
    }

    /// The number of requests that wait.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.state().pending.len()
    }

    /// Whether the image was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// The content.
    #[must_use]
    pub fn content(&self) -> Vec<u8> {
        self.state().content.clone()
    }

    /// Completes a waiting request, by its place among them from the oldest on: does it, or fails
    /// it with this error number. A read of `most` bytes at most ends there.
    ///
    /// # Panics
    /// If no request waits there.
    pub fn complete(&self, nth: usize, errno: Option<c_int>, most: usize) {
        let request = self.state().pending.remove(nth);
        finish(&self.0, request, errno, most);
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        lock(&self.0)
    }
}

fn lock(state: &Mutex<FakeState>) -> MutexGuard<'_, FakeState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does a request, or fails it, and calls back, without holding the lock.
fn finish(state: &Mutex<FakeState>, request: PendingRequest, errno: Option<c_int>, most: usize) {
    let result = match errno {
        Some(errno) => -(errno as isize),
        None => lock(state).execute(&request, most),
    };
    let completion = request.completion;
    // SAFETY: the completion is released by the callback only.
    let (call, argument) = unsafe {
        (*completion).result = result;
        ((*completion).call, (*completion).argument)
    };
    // SAFETY: the queue has given both together, and expects one call.
    unsafe { call(completion.cast(), argument) };
}

impl FakeState {
    fn execute(&mut self, request: &PendingRequest, most: usize) -> isize {
        let mut at = request.offset;
        match &request.kind {
            FakeRequest::Read(iov) => {
                let mut left = most.min(self.content.len().saturating_sub(at));
                let mut done = 0;
                for part in iov {
                    let len = part.iov_len.min(left);
                    let from = &self.content[at..at + len];
                    // SAFETY: the memory of the request is valid until it completes.
                    unsafe { part.iov_base.cast::<u8>().copy_from(from.as_ptr(), len) };
                    (at, left, done) = (at + len, left - len, done + len);
                }
                done as isize
            }
            FakeRequest::Write(iov) => {
                for part in iov {
                    let to = &mut self.content[at..at + part.iov_len];
                    // SAFETY: the memory of the request is valid until it completes.
                    unsafe { part.iov_base.cast::<u8>().copy_to(to.as_mut_ptr(), part.iov_len) };
                    at += part.iov_len;
                }
                0
            }
            FakeRequest::Zero(len) => {
                self.content[at..at + len].fill(0);
                0
            }
            FakeRequest::Nothing => 0,
            FakeRequest::Compare { len, expected, new, difference } => {
                // SAFETY: the memory of the request is valid until it completes.
                let of = |bytes: *const u8| unsafe { std::slice::from_raw_parts(bytes, *len) };
                let range = &mut self.content[at..at + len];
                match range.iter().zip(of(*expected)).position(|(found, expected)| found != expected) {
                    Some(place) => {
                        // As librbd 16 does: the object's begin, and the offset in the range.
                        // SAFETY: as above.
                        unsafe { **difference = (at / 8192 * 8192 + place) as u64 };
                        -(libc::EILSEQ as isize)
                    }
                    None => {
                        range.copy_from_slice(of(*new));
                        0
                    }
                }
            }
        }
    }
}

/// Takes a request: does it at once, or lets it wait.
///
/// # Safety
/// `image` is a handle of an open image, and `completion` one of `create_completion`.
unsafe fn take(image: rbd_image_t, completion: rbd_completion_t, offset: u64, kind: FakeRequest) -> c_int {
    // SAFETY: as the caller promised.
    let state = unsafe { &*image.cast::<Mutex<FakeState>>() };
    let request = PendingRequest { completion: completion.cast(), kind, offset: offset as usize };
    let mut now = lock(state);
    if let Some(errno) = now.refusal {
        return -errno;
    }
    if now.is_holding {
        now.pending.push(request);
    } else {
        drop(now);
        finish(state, request, None, usize::MAX);
    }
    0
}

unsafe fn vector(iov: *const libc::iovec, count: c_int) -> Vec<libc::iovec> {
    // SAFETY: the queue gives so many.
    unsafe { std::slice::from_raw_parts(iov, usize::try_from(count).unwrap_or(0)) }.to_vec()
}

unsafe extern "C" fn readv(
    image: rbd_image_t,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    completion: rbd_completion_t,
) -> c_int {
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, offset, FakeRequest::Read(vector(iov, count))) }
}

unsafe extern "C" fn writev(
    image: rbd_image_t,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    completion: rbd_completion_t,
) -> c_int {
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, offset, FakeRequest::Write(vector(iov, count))) }
}

unsafe extern "C" fn discard(
    image: rbd_image_t,
    offset: u64,
    len: u64,
    completion: rbd_completion_t,
) -> c_int {
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, offset, FakeRequest::Zero(len as usize)) }
}

unsafe extern "C" fn write_zeroes(
    image: rbd_image_t,
    offset: u64,
    len: usize,
    completion: rbd_completion_t,
    _zero_flags: c_int,
    _op_flags: c_int,
) -> c_int {
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, offset, FakeRequest::Zero(len)) }
}

unsafe extern "C" fn flush(image: rbd_image_t, completion: rbd_completion_t) -> c_int {
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, 0, FakeRequest::Nothing) }
}

unsafe extern "C" fn compare_and_write(
    image: rbd_image_t,
    offset: u64,
    len: usize,
    expected: *const c_char,
    new: *const c_char,
    completion: rbd_completion_t,
    difference: *mut u64,
    _op_flags: c_int,
) -> c_int {
    let (expected, new) = (expected.cast(), new.cast());
    // SAFETY: the queue's arguments.
    unsafe { take(image, completion, offset, FakeRequest::Compare { len, expected, new, difference }) }
}

unsafe extern "C" fn create_completion(
    argument: *mut c_void,
    call: rbd_callback_t,
    place: *mut rbd_completion_t,
) -> c_int {
    let completion = Box::new(FakeCompletion { call, argument, result: 0 });
    // SAFETY: the queue gives a place.
    unsafe { *place = Box::into_raw(completion).cast() };
    0
}

unsafe extern "C" fn return_value(completion: rbd_completion_t) -> isize {
    // SAFETY: it was not released yet.
    unsafe { (*completion.cast::<FakeCompletion>()).result }
}

unsafe extern "C" fn release(completion: rbd_completion_t) {
    // SAFETY: it was a box, and is released once.
    drop(unsafe { Box::from_raw(completion.cast::<FakeCompletion>()) });
}

unsafe extern "C" fn size(image: rbd_image_t, place: *mut u64) -> c_int {
    // SAFETY: a handle of an open image, and a place.
    unsafe { *place = lock(&*image.cast::<Mutex<FakeState>>()).content.len() as u64 };
    0
}

unsafe fn fake_lock<R>(image: rbd_image_t, change: impl FnOnce(&mut FakeLock) -> R) -> R {
    // SAFETY: a handle of an open image.
    change(&mut lock(unsafe { &*image.cast::<Mutex<FakeState>>() }).lock)
}

unsafe extern "C" fn lock_acquire(image: rbd_image_t, _mode: c_int) -> c_int {
    // SAFETY: a handle of an open image.
    unsafe { fake_lock(image, |own| own.owner = Some(if own.is_taken_at_once { OTHER } else { OWN })) };
    0
}

unsafe extern "C" fn lock_release(image: rbd_image_t) -> c_int {
    // SAFETY: a handle of an open image.
    unsafe {
        fake_lock(image, |own| match (own.owner == Some(OWN), own.fails_release) {
            (false, _) => -libc::EINVAL,
            (true, true) => -libc::EIO,
            (true, false) => {
                own.owner = None;
                0
            }
        })
    }
}

unsafe extern "C" fn is_lock_owner(image: rbd_image_t, place: *mut c_int) -> c_int {
    // SAFETY: a handle of an open image, and a place.
    unsafe { *place = fake_lock(image, |own| own.owner == Some(OWN)).into() };
    0
}

unsafe extern "C" fn lock_owners(
    image: rbd_image_t,
    _mode: *mut c_int,
    places: *mut *mut c_char,
    count: *mut usize,
) -> c_int {
    // SAFETY: a handle of an open image.
    let (owner, error) = unsafe { fake_lock(image, |own| (own.owner, own.owner_error)) };
    match (owner, error) {
        (_, Some(errno)) => -errno,
        (None, None) => -libc::ENOENT,
        (Some(owner), None) => {
            // SAFETY: there is one place at least; the text is a constant.
            unsafe { (*places, *count) = (owner.as_ptr().cast_mut(), 1) };
            0
        }
    }
}

/// The texts are constants.
unsafe extern "C" fn lock_owners_cleanup(_places: *mut *mut c_char, _count: usize) {}

/// No image has any features or flags.
unsafe extern "C" fn zero(_image: rbd_image_t, place: *mut u64) -> c_int {
    // SAFETY: there is a place.
    unsafe { *place = 0 };
    0
}

/// Closes an image. Requests that wait fail first, as those of a client that is blocklisted.
unsafe extern "C" fn close(image: rbd_image_t) -> c_int {
    // SAFETY: opening has made the handle of it, and nobody uses that any longer.
    let state = unsafe { Arc::from_raw(image.cast_const().cast::<Mutex<FakeState>>()) };
    let pending = std::mem::take(&mut lock(&state).pending);
    for request in pending {
        finish(&state, request, Some(libc::ESHUTDOWN), 0);
    }
    lock(&state).is_closed = true;
    0
}

unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int, extra: *mut c_int) {
    for (place, number) in [(major, 1), (minor, 16), (extra, 0)] {
        // SAFETY: there are three places.
        unsafe { *place = number };
    }
}

unsafe extern "C" fn destroy_pool(_pool: rados_ioctx_t) {}

unsafe extern "C" fn shut_down(_cluster: rados_t) {}

/// In the place of functions that no test may call.
unsafe extern "C" fn unexpected() {
    unreachable!("a function that the fake image lacks");
}

/// The functions, by the names of those that they stand in for.
fn function(name: &str) -> *const () {
    match name.trim_end_matches('\0') {
        "rbd_version" => version as *const (),
        "rbd_close" => close as *const (),
        "rbd_get_size" => size as *const (),
        "rbd_lock_acquire" => lock_acquire as *const (),
        "rbd_lock_release" => lock_release as *const (),
        "rbd_lock_get_owners" => lock_owners as *const (),
        "rbd_lock_get_owners_cleanup" => lock_owners_cleanup as *const (),
        "rbd_is_exclusive_lock_owner" => is_lock_owner as *const (),
        "rbd_get_features" | "rbd_get_flags" => zero as *const (),
        "rbd_aio_create_completion" => create_completion as *const (),
        "rbd_aio_get_return_value" => return_value as *const (),
        "rbd_aio_release" => release as *const (),
        "rbd_aio_readv" => readv as *const (),
        "rbd_aio_writev" => writev as *const (),
        "rbd_aio_discard" => discard as *const (),
        "rbd_aio_write_zeroes" => write_zeroes as *const (),
        "rbd_aio_flush" => flush as *const (),
        "rbd_aio_compare_and_write" => compare_and_write as *const (),
        "rados_ioctx_destroy" => destroy_pool as *const (),
        "rados_shutdown" => shut_down as *const (),
        _ => unexpected as *const (),
    }
}

/// The functions of images.
#[cfg(test)]
pub(crate) fn functions() -> &'static RbdFunctions {
    &library().rbd
}

pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let find = |name: &'static str| {
        let address = NonNull::new(function(name).cast_mut().cast::<c_void>());
        Ok::<_, Infallible>(address.unwrap_or(NonNull::dangling()))
    };
    LIBRARY.get_or_init(|| {
        // SAFETY: each has the type of the function of its name.
        let Ok(rbd) = unsafe { RbdFunctions::find(find) };
        // SAFETY: as above.
        let Ok(rados) = unsafe { RadosFunctions::find(find) };
        Library { rados, rbd }
    })
}

/// The addresses of the client of the image, and of another one.
const OWN: &CStr = c"127.0.0.1:0/1";
const OTHER: &CStr = c"127.0.0.1:0/2";
