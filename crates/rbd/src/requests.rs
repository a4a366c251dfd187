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
//! number of a request goes to other threads. A queue that is dropped with requests in flight
//! leaves them to its core, which frees the memory of each once librbd has completed it: at the
//! latest when the image is closed, because librbd ends all requests then.
#![expect(unsafe_code, reason = "calls a library in C, which uses memory until it calls back")]

use crate::error::Errno;
use crate::image::Image;
use crate::library::{RBD_WRITE_ZEROES_FLAG_THICK_PROVISION, RbdFunctions, rbd_completion_t, rbd_image_t};
use blockmux_volume::{Seg, SgList, Slab};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use std::cell::RefCell;
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
    /// Write the second half of the data from this offset on, if the image equals the first half
    /// there; within one unit of [`ImageDetails::compare_and_write_unit`].
    ///
    /// [`ImageDetails::compare_and_write_unit`]: crate::image::ImageDetails::compare_and_write_unit
    CompareAndWrite {
        /// Where the range begins.
        offset: u64,
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
    /// The image ends within the range: it has become smaller. Or it cannot be compared there.
    BeyondEnd,
    /// The image differs from what was expected, first at this byte of the range.
    Differs(u64),
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
    /// Offset and length of a range that is compared, in bytes.
    compared: Option<(u64, u64)>,
}

/// What librbd has of a request: its address is the argument of the callback.
struct Node {
    next: *mut Node,
    /// The index of the request among those in flight.
    index: usize,
    result: isize,
    /// librbd reads it until the request completes.
    iov: Vec<libc::iovec>,
    /// What is compared, and then written: librbd takes no vector of it. Freed when the request has
    /// completed.
    compared: Vec<u8>,
    /// Where librbd writes where a difference is, in its way.
    difference: u64,
    completed: Arc<Completed>,
    rbd: &'static RbdFunctions,
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
        free_abandoned();
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
        let (image, rbd) = self.image.raw();
        let mut node = self.spare.pop().unwrap_or_else(|| Node::new(&self.completed, rbd));
        node.iov.clear();
        let iov = |seg: &Seg| libc::iovec { iov_base: seg.as_ptr().cast(), iov_len: seg.len() };
        node.iov.extend(data.segs().iter().map(iov));
        let mut compared = None;
        if let Command::CompareAndWrite { offset } = command {
            node.compared = data.to_vec();
            compared = Some((offset, data.len() as u64 / 2));
        }
        node.index = self.in_flight.insert(InFlight { token, data, expected, compared });
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
        let mut node = (!self.taken.is_null()).then(|| unsafe { Box::from_raw(self.taken) })?;
        self.taken = node.next;
        node.compared = Vec::new();
        let request = self.in_flight.remove(node.index)?;
        let result = match node.result {
            result if result == -(libc::EILSEQ as isize) && request.compared.is_some() => {
                let (offset, len) = request.compared.unwrap_or_default();
                let unit = self.image.details().stripe_unit;
                Err(RequestError::Differs(first_difference(node.difference, offset, len, unit)))
            }
            result if result < 0 => Err(errno_of(result)),
            result if result < request.expected => Err(RequestError::BeyondEnd),
            _ => Ok(()),
        };
        self.spare.push(node);
        Some(Finished { token: request.token, result, data: request.data })
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
            let abandoned = AbandonedRequests {
                in_flight: std::mem::take(&mut self.in_flight),
                completed: self.completed.clone(),
            };
            // A thread that ends has no such list any longer; then they are leaked.
            let _ = ABANDONED.try_with(move |all| all.borrow_mut().push(abandoned));
        }
        free_abandoned();
    }
}

/// Requests whose queue is dropped, but which librbd still has.
struct AbandonedRequests {
    in_flight: Slab<InFlight>,
    completed: Arc<Completed>,
}

impl AbandonedRequests {
    /// Frees the memory of those that have completed; returns whether librbd has any left.
    fn free_completed(&mut self) -> bool {
        let mut first = self.completed.take();
        while !first.is_null() {
            // SAFETY: the list holds nodes that were boxes, each once, and nobody else has them.
            let node = unsafe { Box::from_raw(first) };
            first = node.next;
            self.in_flight.remove(node.index);
        }
        !self.in_flight.is_empty()
    }
}

impl Drop for AbandonedRequests {
    fn drop(&mut self) {
        if self.free_completed() {
            // librbd may still use their memory.
            std::mem::forget(std::mem::take(&mut self.in_flight));
        }
    }
}

/// Frees the memory of requests of dropped queues of this core that have completed since. Queues
/// that begin or end do it, too.
pub fn free_abandoned() {
    // They are dropped while the list is not borrowed.
    let mut all = ABANDONED.try_with(RefCell::take).unwrap_or_default();
    all.retain_mut(AbandonedRequests::free_completed);
    if !all.is_empty() {
        let _ = ABANDONED.try_with(move |kept| kept.borrow_mut().append(&mut all));
    }
}

thread_local! {
    /// The requests of dropped queues of this core.
    static ABANDONED: RefCell<Vec<AbandonedRequests>> = const { RefCell::new(Vec::new()) };
}

impl Node {
    fn new(completed: &Arc<Completed>, rbd: &'static RbdFunctions) -> Box<Node> {
        let completed = completed.clone();
        Box::new(Node {
            next: ptr::null_mut(),
            index: 0,
            result: 0,
            iov: Vec::new(),
            compared: Vec::new(),
            difference: 0,
            completed,
            rbd,
        })
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
    let half = node.compared.len() / 2;
    let (expected, new) = node.compared.split_at(half);
    let (expected, new) = (expected.as_ptr().cast(), new.as_ptr().cast());
    let node = Box::into_raw(node);
    // SAFETY: the node was a box, and only librbd writes there.
    let difference = unsafe { &raw mut (*node).difference };
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
            Command::CompareAndWrite { offset } => {
                (rbd.rbd_aio_compare_and_write)(image, offset, half, expected, new, completion, difference, 0)
            }
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
    // SAFETY: the node of the request, which nobody else uses until it is on the list.
    let rbd = unsafe { (*node).rbd };
    // SAFETY: the completion has its result, and is not used after this.
    let result = unsafe {
        let result = (rbd.rbd_aio_get_return_value)(completion);
        (rbd.rbd_aio_release)(completion);
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

/// Where a range differs, from its beginning, in bytes. librbd 16 to 19 reports the beginning of
/// the object, plus the offset in the range; a version that reports the place in the image is
/// understood, too.
fn first_difference(reported: u64, offset: u64, len: u64, stripe_unit: u64) -> u64 {
    let in_object = reported.checked_rem(stripe_unit).unwrap_or(0);
    match reported.checked_sub(offset) {
        _ if in_object < len => in_object,
        Some(at) if at < len => at,
        _ => 0,
    }
}

fn errno_of(result: isize) -> RequestError {
    let errno = i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO);
    // The range was checked against the size that was known.
    if errno == libc::EINVAL { RequestError::BeyondEnd } else { RequestError::Errno(Errno(errno)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeImage;
    use blockmux_volume::{Memory, Pages};
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
        let mut node = Node::new(completed, crate::fake::functions());
        node.index = index;
        // SAFETY: the node was a box.
        unsafe { completed.push(Box::into_raw(node)) };
    }

    /// Whether any request has not been polled.
    fn has_requests(queue: &RequestQueue) -> bool {
        !queue.in_flight.is_empty() || !queue.refused.is_empty()
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

    /// A block with this content, and its memory, which knows whether anybody uses it.
    fn block(byte: u8) -> (SgList, Arc<Pages>) {
        let pages = Pages::from_heap(4096);
        let seg = Memory::from_pages(&pages).seg(0, 512);
        seg.copy_from(&[byte; 512]);
        (SgList::one(seg), pages)
    }

    fn is_free(memory: &Arc<Pages>) -> bool {
        Arc::strong_count(memory) == 1
    }

    #[test]
    fn requests_come_back_with_their_data_and_errors_in_the_order_of_their_completion() {
        let fake = FakeImage::new(8192);
        let mut queue = RequestQueue::new(fake.open(false)).unwrap();
        fake.hold(true);
        for nth in 0..4_u8 {
            let offset = u64::from(nth) * 512;
            assert!(queue.submit(nth.into(), Command::Write { offset }, block(nth + 1).0));
        }
        assert!(queue.submit(4, Command::Read { offset: 1024 }, block(0).0));
        assert!(queue.poll().is_none() && has_requests(&queue));
        // Third, first, then the read of what the third has written, and two failures.
        fake.complete(2, None, usize::MAX);
        fake.complete(0, None, usize::MAX);
        fake.complete(2, None, usize::MAX);
        fake.complete(0, Some(libc::ENOSPC), 0);
        fake.complete(0, Some(libc::EINVAL), 0);
        let mut finished: Vec<_> = std::iter::from_fn(|| queue.poll()).collect();
        finished.sort_by_key(|finished| finished.token);
        let results: Vec<_> = finished.iter().map(|finished| finished.result).collect();
        let no_space = Err(RequestError::Errno(Errno(libc::ENOSPC)));
        assert_eq!(results, [Ok(()), no_space, Ok(()), Err(RequestError::BeyondEnd), Ok(())]);
        assert_eq!(finished[4].data.to_vec(), [3; 512]);
        assert!(!has_requests(&queue));
        assert_eq!(fake.content()[..2048], [[1; 512], [0; 512], [3; 512], [0; 512]].concat());
    }

    #[test]
    fn a_read_that_ends_early_is_beyond_the_end_and_a_refused_request_comes_back_at_once() {
        let fake = FakeImage::new(8192);
        let mut queue = RequestQueue::new(fake.open(false)).unwrap();
        fake.hold(true);
        assert!(queue.submit(7, Command::Read { offset: 0 }, block(9).0));
        fake.complete(0, None, 511);
        assert_eq!(queue.poll().unwrap().result, Err(RequestError::BeyondEnd));
        fake.refuse(Some(libc::ENOMEM));
        let (data, memory) = block(1);
        assert!(!queue.submit(8, Command::Write { offset: 0 }, data));
        let refused = queue.poll().unwrap();
        assert_eq!((refused.token, refused.result), (8, Err(RequestError::Errno(Errno(libc::ENOMEM)))));
        drop(refused);
        assert!(is_free(&memory) && !has_requests(&queue) && fake.pending() == 0);
    }

    #[test]
    fn a_range_is_compared_and_where_it_differs_is_told() {
        let fake = FakeImage::new(16_384);
        let mut queue = RequestQueue::new(fake.open(false)).unwrap();
        let mut compare = |expected: [u8; 512], new: u8| {
            let data = SgList::one(Seg::from_slice(&[expected, [new; 512]].concat()));
            assert!(queue.submit(0, Command::CompareAndWrite { offset: 8192 + 1024 }, data));
            queue.poll().unwrap().result
        };
        assert_eq!(compare([0; 512], 5), Ok(()));
        let mut wrong = [5; 512];
        wrong[300] = 0;
        assert_eq!(compare(wrong, 6), Err(RequestError::Differs(300)));
        assert_eq!(fake.content()[9216..9728], [5; 512]);
    }

    #[test]
    fn memory_of_a_dropped_queue_stays_until_librbd_has_completed_its_requests() {
        let fake = FakeImage::new(8192);
        let image = fake.open(false);
        let mut queue = RequestQueue::new(image.clone()).unwrap();
        fake.hold(true);
        let all = [block(1), block(2)];
        for (nth, (data, _)) in all.iter().enumerate() {
            assert!(queue.submit(nth, Command::Write { offset: nth as u64 * 512 }, data.clone()));
        }
        let [first, second] = all.map(|(_, memory)| memory);
        drop(queue);
        free_abandoned();
        assert!(!is_free(&first) && !is_free(&second));
        fake.complete(1, None, usize::MAX);
        free_abandoned();
        assert!(!is_free(&first) && is_free(&second));
        assert_eq!(fake.content()[512..1024], [2; 512]);
        // Closing ends the other, on a thread.
        drop(image);
        while !fake.is_closed() {
            thread::yield_now();
        }
        // The next queue frees it, too.
        drop(RequestQueue::new(FakeImage::new(512).open(false)).unwrap());
        assert!(is_free(&first));
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
    fn a_difference_is_found_in_what_librbd_reports() {
        const UNIT: u64 = 4 << 20;
        // A range of 4096 bytes at 512 bytes behind the second object's begin differs at byte 700.
        assert_eq!(first_difference(UNIT + 700, UNIT + 8192, 4096, UNIT), 700);
        assert_eq!(first_difference(UNIT + 8192 + 700, UNIT + 8192, 4096, UNIT), 700);
        assert_eq!(first_difference(u64::MAX, UNIT, 512, UNIT), 0);
        assert_eq!(first_difference(5, 0, 512, 0), 0);
    }

    #[test]
    fn a_range_beyond_the_end_is_told_from_other_errors() {
        assert_eq!(errno_of(-(libc::EINVAL as isize)), RequestError::BeyondEnd);
        assert_eq!(errno_of(-(libc::EROFS as isize)), RequestError::Errno(Errno(libc::EROFS)));
        assert_eq!(errno_of(isize::MIN), RequestError::Errno(Errno(libc::EIO)));
    }
}
