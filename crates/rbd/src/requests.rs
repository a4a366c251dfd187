//! One core's requests to an image.
//!
//! ```text
//!   core: RequestQueue::submit ──▶ rbd_aio_... ──▶ threads of librbd
//!   core: RequestQueue::poll   ◀── Completed  ◀── on_complete
//!              ▲ woken by the eventfd, if it waits
//! ```
//! librbd has one descriptor for the events of an image, for the requests of all cores, and writes
//! to it with each completion. So each core has a list of completed requests and a descriptor of
//! its own, which is signalled only while the core waits.
//!
//! A request owns its memory until librbd has completed it. Memory belongs to a core, so only the
//! number of a request goes to other threads. A queue that is dropped with requests in flight leaks
//! their memory, because nothing else keeps it valid for librbd.
#![expect(unsafe_code, reason = "calls a library in C, which uses memory until it calls back")]

use crate::error::Errno;
use crate::image::Image;
use crate::library::{RBD_WRITE_ZEROES_FLAG_THICK_PROVISION, RbdFunctions, rbd_completion_t, rbd_image_t};
use blockmux_volume::{Seg, SgList, Slab};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// What a request does; offsets and lengths in bytes, within the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Fill the data from this offset on.
    Read {
        /// Where the data is.
        offset: u64,
    },
    /// Write the data from this offset on. Nobody changes the data meanwhile: it is not copied, and
    /// the cluster resets a connection whose checksums do not match.
    Write {
        /// Where the data goes.
        offset: u64,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Write zeroes, so that the range is allocated.
        is_thick: bool,
    },
    /// Free the whole units of a range.
    Discard {
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Make all writes stable that have completed.
    Flush,
}

/// A request that has completed.
#[derive(Debug)]
pub struct Finished {
    /// The number that the request was submitted with.
    pub token: usize,
    /// Whether all of it was done.
    pub result: Result<(), RequestError>,
    /// Its data.
    pub data: SgList,
}

/// Why a request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// The image ends within the range: it has become smaller.
    BeyondEnd,
    /// Another reason.
    Errno(Errno),
}

/// The requests of one core to an image.
pub struct RequestQueue {
    image: Arc<Image>,
    in_flight: Slab<InFlight>,
    completed: Arc<Completed>,
    /// Completed requests that were taken from `completed` and not polled.
    taken: *mut Node,
    /// Nodes for later requests; boxed, because librbd has their addresses.
    #[expect(clippy::vec_box, reason = "librbd has their addresses")]
    spare: Vec<Box<Node>>,
    /// Requests that librbd did not take.
    refused: Vec<Finished>,
}

/// A request that librbd has.
struct InFlight {
    token: usize,
    data: SgList,
    /// The result of a read that is complete, in bytes.
    expected: isize,
}

/// What librbd has of a request: its address is the argument of the callback.
struct Node {
    next: *mut Node,
    /// The index of the request among those in flight.
    index: usize,
    result: isize,
    /// librbd reads it until the request completes.
    iov: Vec<libc::iovec>,
    completed: Arc<Completed>,
}

/// Requests that have completed, as a list that threads of librbd push to and a core takes whole.
struct Completed {
    first: AtomicPtr<Node>,
    /// The core waits for the descriptor.
    is_armed: AtomicBool,
    event: OwnedFd,
}

impl RequestQueue {
    /// A queue for requests of this thread.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn new(image: Arc<Image>) -> io::Result<RequestQueue> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let first = AtomicPtr::new(ptr::null_mut());
        let completed = Arc::new(Completed { first, is_armed: AtomicBool::new(false), event });
        let (in_flight, spare, refused) = (Slab::default(), Vec::new(), Vec::new());
        Ok(RequestQueue { image, in_flight, completed, taken: ptr::null_mut(), spare, refused })
    }

    /// Submits a request; `token` comes back with its completion. `data` is what is written, or
    /// where to read to, and empty for other commands. Returns `false` if librbd refuses the
    /// request at once: then it is polled next, without a signal.
    ///
    /// # Panics
    /// If the data is in a registered buffer, or is read to and cannot be written.
    #[must_use]
    pub fn submit(&mut self, token: usize, command: Command, data: SgList) -> bool {
        assert!(!data.segs().iter().any(Seg::is_registered));
        let is_read = matches!(command, Command::Read { .. });
        assert!(!is_read || data.is_writable());
        let expected = if is_read { data.len() as isize } else { 0 };
        let mut node = self.spare.pop().unwrap_or_else(|| Node::new(&self.completed));
        node.iov.clear();
        let iov = |seg: &Seg| libc::iovec { iov_base: seg.as_ptr().cast(), iov_len: seg.len() };
        node.iov.extend(data.segs().iter().map(iov));
        node.index = self.in_flight.insert(InFlight { token, data, expected });
        let (image, rbd) = self.image.raw();
        // SAFETY: the image is open. Its memory is in `in_flight` until the node comes back, and
        // leaked otherwise.
        let Err((error, node)) = (unsafe { start(rbd, image, command, node) }) else { return true };
        if let Some(request) = self.in_flight.remove(node.index) {
            let result = Err(RequestError::Errno(error));
            self.refused.push(Finished { token: request.token, result, data: request.data });
        }
        self.spare.push(node);
        false
    }

    /// A request that has completed, in any order.
    pub fn poll(&mut self) -> Option<Finished> {
        if let Some(refused) = self.refused.pop() {
            return Some(refused);
        }
        if self.taken.is_null() {
            self.taken = self.completed.take();
        }
        // SAFETY: the list holds nodes that were boxes, each once, and nobody else has them.
        let node = (!self.taken.is_null()).then(|| unsafe { Box::from_raw(self.taken) })?;
        self.taken = node.next;
        let request = self.in_flight.remove(node.index)?;
        let result = match node.result {
            result if result < 0 => Err(errno_of(result)),
            result if result < request.expected => Err(RequestError::BeyondEnd),
            _ => Ok(()),
        };
        self.spare.push(node);
        Some(Finished { token: request.token, result, data: request.data })
    }

    /// Whether any request has not been polled.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        !self.in_flight.is_empty() || !self.refused.is_empty()
    }

    /// Signals the descriptor once when a request completes from now on. Returns whether one has
    /// completed already; then it may not be signalled for that.
    pub fn arm(&self) -> bool {
        // Cleared before the list is read, so that a later completion signals again.
        let _ = read(&self.completed.event, &mut [0; 8]);
        self.completed.is_armed.store(true, Ordering::SeqCst);
        !self.completed.first.load(Ordering::SeqCst).is_null()
            || !self.taken.is_null()
            || !self.refused.is_empty()
    }

    /// Signals the descriptor no more: the core polls for completions itself.
    pub fn disarm(&self) {
        self.completed.is_armed.store(false, Ordering::Relaxed);
    }
}

impl AsFd for RequestQueue {
    /// The descriptor that is readable after completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.completed.event.as_fd()
    }
}

impl Drop for RequestQueue {
    fn drop(&mut self) {
        while self.poll().is_some() {}
        if !self.in_flight.is_empty() {
            std::mem::forget(std::mem::take(&mut self.in_flight));
        }
    }
}

impl Node {
    fn new(completed: &Arc<Completed>) -> Box<Node> {
        let completed = completed.clone();
        Box::new(Node { next: ptr::null_mut(), index: 0, result: 0, iov: Vec::new(), completed })
    }
}

impl Completed {
    /// Adds a request.
    ///
    /// # Safety
    /// The node was a box, and nobody else uses it.
    unsafe fn push(&self, node: *mut Node) {
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: as the caller promised; it is not on the list yet.
            unsafe { (*node).next = first };
            // Sequentially consistent with `arm`: one of the two sees what the other has stored.
            match self.first.compare_exchange_weak(first, node, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => break,
                Err(found) => first = found,
            }
        }
        if self.is_armed.load(Ordering::SeqCst) && self.is_armed.swap(false, Ordering::SeqCst) {
            // It fails only if the counter is full, and then it is readable anyway.
            let _ = write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the whole list, whose last node has no next.
    fn take(&self) -> *mut Node {
        if self.first.load(Ordering::Relaxed).is_null() {
            return ptr::null_mut();
        }
        self.first.swap(ptr::null_mut(), Ordering::Acquire)
    }
}

/// Gives a request to librbd; returns the node if it does not take it.
///
/// # Safety
/// The image is open, and the memory of the node's vector is valid until the node is pushed to the
/// list of completed requests.
unsafe fn start(
    rbd: &RbdFunctions,
    image: rbd_image_t,
    command: Command,
    node: Box<Node>,
) -> Result<(), (Errno, Box<Node>)> {
    let (iov, count) = (node.iov.as_ptr(), node.iov.len() as c_int);
    let node = Box::into_raw(node);
    // SAFETY: the node was a box, and librbd has not taken it.
    let refuse = |errno| unsafe { (errno, Box::from_raw(node)) };
    let mut completion = ptr::null_mut();
    // SAFETY: the callback takes a node.
    let made = unsafe { (rbd.rbd_aio_create_completion)(node.cast(), on_complete, &raw mut completion) };
    Errno::check(made).map_err(refuse)?;
    // SAFETY: as the caller promised. librbd calls back if, and only if, the call succeeds.
    let taken = unsafe {
        match command {
            Command::Read { offset } => (rbd.rbd_aio_readv)(image, iov, count, offset, completion),
            Command::Write { offset } => (rbd.rbd_aio_writev)(image, iov, count, offset, completion),
            Command::WriteZeroes { offset, len, is_thick } => {
                let flags = if is_thick { RBD_WRITE_ZEROES_FLAG_THICK_PROVISION } else { 0 };
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                (rbd.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0)
            }
            Command::Discard { offset, len } => (rbd.rbd_aio_discard)(image, offset, len, completion),
            Command::Flush => (rbd.rbd_aio_flush)(image, completion),
        }
    };
    Errno::check(taken).map(drop).map_err(|errno| {
        // SAFETY: it was created, and librbd does not have it.
        unsafe { (rbd.rbd_aio_release)(completion) };
        refuse(errno)
    })
}

/// Called by a thread of librbd when it no longer uses the memory of a request.
unsafe extern "C" fn on_complete(completion: rbd_completion_t, argument: *mut c_void) {
    let node = argument.cast::<Node>();
    let Ok(library) = crate::library::Library::load() else { return };
    // SAFETY: the completion has its result, and is not used after this.
    let result = unsafe {
        let result = (library.rbd.rbd_aio_get_return_value)(completion);
        (library.rbd.rbd_aio_release)(completion);
        result
    };
    // SAFETY: the node of the request, which nobody else uses until it is on the list.
    let completed = unsafe {
        (*node).result = result;
        (*node).completed.clone()
    };
    // SAFETY: as above. The list is kept, as the core may free the node at once.
    unsafe { completed.push(node) };
}

fn errno_of(result: isize) -> RequestError {
    let errno = i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO);
    // The range was checked against the size that was known.
    if errno == libc::EINVAL { RequestError::BeyondEnd } else { RequestError::Errno(Errno(errno)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::thread;

    fn completed() -> Arc<Completed> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let first = AtomicPtr::new(ptr::null_mut());
        Arc::new(Completed { first, is_armed: AtomicBool::new(false), event })
    }

    /// Takes and frees everything that is on the list.
    fn drain(completed: &Completed) -> Vec<usize> {
        let (mut at, mut found) = (completed.take(), Vec::new());
        while !at.is_null() {
            // SAFETY: nodes on the list were boxes, and nobody else has them.
            let node = unsafe { Box::from_raw(at) };
            found.push(node.index);
            at = node.next;
        }
        found
    }

    fn push(completed: &Arc<Completed>, index: usize) {
        let mut node = Node::new(completed);
        node.index = index;
        // SAFETY: the node was a box.
        unsafe { completed.push(Box::into_raw(node)) };
    }

    fn is_signalled(completed: &Completed) -> bool {
        read(&completed.event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn each_completion_of_many_threads_is_taken_once() {
        let list = completed();
        let threads = (0..4).map(|thread| {
            let list = list.clone();
            thread::spawn(move || (0..1000).for_each(|nth| push(&list, thread * 1000 + nth)))
        });
        let threads: Vec<_> = threads.collect();
        let mut found = BTreeSet::new();
        while found.len() < 4000 {
            for index in drain(&list) {
                assert!(found.insert(index), "{index} came twice");
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(drain(&list).is_empty());
    }

    #[test]
    fn only_a_waiting_core_is_signalled_and_only_once() {
        let list = completed();
        push(&list, 0);
        assert!(!is_signalled(&list), "nobody waits");
        list.is_armed.store(true, Ordering::SeqCst);
        push(&list, 1);
        push(&list, 2);
        let mut count = [0; 8];
        read(&list.event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert_eq!(drain(&list), [2, 1, 0]);
    }

    #[test]
    fn a_range_beyond_the_end_is_told_from_other_errors() {
        assert_eq!(errno_of(-(libc::EINVAL as isize)), RequestError::BeyondEnd);
        assert_eq!(errno_of(-(libc::EROFS as isize)), RequestError::Errno(Errno(libc::EROFS)));
        assert_eq!(errno_of(isize::MIN), RequestError::Errno(Errno(libc::EIO)));
    }
}
