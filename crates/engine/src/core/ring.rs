//! One core's io_uring, and the owners of its entries.
//!
//! A [`Completer`] registers once and gets the result of each of its entries by a token of its
//! choice. The ring owns the completer, and so the memory that the kernel may access, until its
//! last entry has completed: dropping the [`Registration`] with I/O in flight is safe.
//!
//! Linux 5.15 is the minimum; features of newer kernels (single issuer, deferred task work) are
//! tried first.
#![expect(unsafe_code, reason = "submission queue entries carry addresses that the kernel will use")]

use crate::core::buffer_table::{BufferEntries, BufferTable};
use io_uring::{IoUring, squeue, types};
use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

/// Receives the results of its entries, on the core's own thread.
pub trait Completer {
    /// Handles the completion of the entry submitted with `token`. `result` is the system call's,
    /// negative for an error. Implementations ignore unknown tokens, such as those of
    /// cancellations.
    fn complete(&self, token: u32, result: i32);
}

/// A core's ring.
pub struct Ring {
    uring: RefCell<IoUring>,
    owners: RefCell<Vec<Option<Owner>>>,
    /// Completed entries on the way to their owners; empty otherwise, reused to avoid allocation.
    reaped: Cell<Vec<(u64, i32)>>,
    /// Entries whose memory the kernel may access until they complete: file I/O, but not socket
    /// polls.
    in_flight_io: Cell<u32>,
    /// The table of registered buffers, made at its first use; `None`: the kernel refuses it.
    buffers: OnceCell<Option<Rc<BufferTable>>>,
}

struct Owner {
    completer: Rc<dyn Completer>,
    in_flight: u32,
    /// The registration was dropped: remove the owner with its last entry.
    closed: bool,
}

/// A completer's registration with a ring.
pub struct Registration {
    ring: Rc<Ring>,
    index: u32,
}

impl Ring {
    /// A new ring for the calling thread, which alone may use it.
    ///
    /// # Errors
    /// If the kernel lacks io_uring or forbids it.
    pub fn new() -> io::Result<Rc<Ring>> {
        let uring = build()?;
        Ok(Rc::new(Ring {
            uring: RefCell::new(uring),
            owners: RefCell::default(),
            reaped: Cell::default(),
            in_flight_io: Cell::new(0),
            buffers: OnceCell::new(),
        }))
    }

    /// Registers a completer.
    pub fn register(self: &Rc<Ring>, completer: Rc<dyn Completer>) -> Registration {
        let owner = Some(Owner { completer, in_flight: 0, closed: false });
        let mut owners = self.owners.borrow_mut();
        let index = owners.iter().position(Option::is_none).unwrap_or_else(|| {
            owners.push(None);
            owners.len() - 1
        });
        owners[index] = owner;
        Registration { ring: self.clone(), index: index as u32 }
    }

    /// Reserves `count` consecutive entries of the ring's table of registered buffers, in which a
    /// driver can register memory of its own. `None` if there are not so many, or the kernel has no
    /// such tables.
    pub fn reserve_buffers(&self, count: u16) -> Option<BufferEntries> {
        let table = self.buffers.get_or_init(|| {
            let uring = self.uring.borrow();
            let made = uring.submitter().register_buffers_sparse(BUFFER_ENTRIES.into());
            made.ok().map(|()| BufferTable::new(BUFFER_ENTRIES))
        });
        table.as_ref()?.reserve(count)
    }

    /// Registers the credentials that the calling thread has now. Entries with the returned number
    /// (`personality`) are executed with them, also once the thread has dropped some.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn register_credentials(&self) -> io::Result<u16> {
        self.uring.borrow().submitter().register_personality()
    }

    /// Passes completed entries to their owners; returns their number.
    #[inline]
    pub fn reap(&self) -> usize {
        let mut reaped = self.reaped.take();
        {
            let mut uring = self.uring.borrow_mut();
            let completion = uring.completion();
            if completion.is_empty() {
                self.reaped.set(reaped);
                return 0;
            }
            reaped.extend(completion.map(|entry| (entry.user_data(), entry.result())));
        }
        let count = reaped.len();
        for (user_data, result) in reaped.drain(..) {
            self.finish(user_data, result);
        }
        self.reaped.set(reaped);
        count
    }

    /// Submits pushed entries and runs the kernel's deferred work, without waiting. Costs a system
    /// call only if there is something to do.
    ///
    /// # Errors
    /// If the ring fails.
    #[inline]
    pub fn submit(&self) -> io::Result<()> {
        let mut uring = self.uring.borrow_mut();
        let (pending, taskrun) = {
            let mut queue = uring.submission();
            queue.sync();
            (queue.len(), queue.taskrun() || queue.cq_overflow())
        };
        if pending == 0 && !taskrun {
            return Ok(());
        }
        enter(&uring, pending as u32)
    }

    /// Submits pushed entries and sleeps until a completion or the timeout.
    ///
    /// # Errors
    /// If the ring fails.
    pub fn submit_and_wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let uring = self.uring.borrow();
        let result = match timeout {
            None => uring.submit_and_wait(1),
            Some(timeout) => {
                let timespec = types::Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
                uring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&timespec))
            }
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether the kernel may still access memory of completers.
    fn has_io_in_flight(&self) -> bool {
        self.in_flight_io.get() > 0
    }

    fn finish(&self, user_data: u64, result: i32) {
        let (index, is_io, token) = unpack(user_data);
        if is_io {
            self.in_flight_io.set(self.in_flight_io.get() - 1);
        }
        let completer = {
            let mut owners = self.owners.borrow_mut();
            let Some(owner) = owners.get_mut(index as usize).and_then(Option::as_mut) else { return };
            owner.in_flight -= 1;
            let completer = owner.completer.clone();
            if owner.closed && owner.in_flight == 0 {
                owners[index as usize] = None;
            }
            completer
        };
        completer.complete(token, result);
    }
}

impl Registration {
    /// Polls `fd` once for `events` (`POLLIN`, `POLLOUT`); completes as `token`.
    pub fn poll_once(&self, fd: RawFd, events: u32, token: u32) {
        let entry = io_uring::opcode::PollAdd::new(types::Fd(fd), events).build();
        // SAFETY: the entry holds no address. Polling a descriptor that was closed meanwhile harms
        // only the caller.
        unsafe { self.push_as(entry, token, false) }
    }

    /// Cancels `poll_once`, which then completes with or without an event.
    pub fn cancel_poll(&self, token: u32) {
        let target = pack(self.index, false, token);
        // PollRemove would fail with EALREADY while the kernel handles an event. If that event is
        // over by then, the poll would stay, and would keep a closed socket open.
        let entry = io_uring::opcode::AsyncCancel::new(target).build();
        // SAFETY: the entry holds no address.
        unsafe { self.push_as(entry, CANCEL_TOKEN, false) }
    }

    /// Pushes I/O, which the next `submit` or `submit_and_wait` submits.
    ///
    /// # Safety
    /// Memory and descriptors that `entry` names must stay valid until the completer is notified of
    /// `token`. What the completer owns stays valid that long, because the ring owns the completer.
    #[inline]
    pub unsafe fn push(&self, entry: squeue::Entry, token: u32) {
        // SAFETY: as the caller promised.
        unsafe { self.push_as(entry, token, true) }
    }

    /// Pushes a command to a driver that may stay there for ever: a driver's next request ends it.
    /// Dropping the ring does not wait for it.
    ///
    /// # Safety
    /// The driver must access memory that `entry` names on this thread only, and that memory must
    /// stay valid until it no longer does: until [`Registration::submit`] has returned `true`, or
    /// until the completer is notified of `token`. The entry's descriptor must stay valid until the
    /// completer is notified, as what the completer owns does.
    #[inline]
    pub unsafe fn push_command(&self, entry: squeue::Entry, token: u32) {
        // SAFETY: as the caller promised.
        unsafe { self.push_as(entry, token, false) }
    }

    /// Submits what was pushed; returns whether the kernel has taken all of it.
    pub fn submit(&self) -> bool {
        self.ring.submit().is_ok() && self.ring.uring.borrow_mut().submission().is_empty()
    }

    /// Cancels the I/O submitted as `token`, best effort; it completes in any case.
    pub fn cancel(&self, token: u32) {
        let target = pack(self.index, true, token);
        let entry = io_uring::opcode::AsyncCancel::new(target).build();
        // SAFETY: the entry holds no address.
        unsafe { self.push_as(entry, CANCEL_TOKEN, false) }
    }

    /// # Safety
    /// As for `push`.
    unsafe fn push_as(&self, entry: squeue::Entry, token: u32, is_io: bool) {
        if let Some(owner) = &mut self.ring.owners.borrow_mut()[self.index as usize] {
            owner.in_flight += 1;
        }
        if is_io {
            self.ring.in_flight_io.set(self.ring.in_flight_io.get() + 1);
        }
        let entry = entry.user_data(pack(self.index, is_io, token));
        let mut uring = self.ring.uring.borrow_mut();
        loop {
            // SAFETY: as the caller promised.
            if unsafe { uring.submission().push(&entry) }.is_ok() {
                return;
            }
            // The queue is full: submitting empties it.
            let pending = uring.submission().len();
            if let Err(error) = enter(&uring, pending as u32) {
                panic!("io_uring took no more entries: {error}");
            }
        }
    }
}

impl Drop for Ring {
    /// Waits for I/O in flight, because the kernel may access the completers' memory until then. No
    /// registration is left, so nothing new is pushed.
    fn drop(&mut self) {
        while self.has_io_in_flight() && self.submit_and_wait(None).is_ok() {
            self.reap();
        }
        if self.has_io_in_flight() {
            // A failed ring reports no completions: leak the memory, since the kernel may still
            // write to it.
            std::mem::forget(self.owners.take());
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let forgotten = {
            let mut owners = self.ring.owners.borrow_mut();
            let slot = &mut owners[self.index as usize];
            match slot {
                Some(owner) if owner.in_flight > 0 => {
                    owner.closed = true;
                    None
                }
                _ => slot.take(),
            }
        };
        // Dropped only now: the completer may itself own registrations.
        drop(forgotten);
    }
}

fn build() -> io::Result<IoUring> {
    let deferred = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .setup_cqsize(CQ_ENTRIES)
        .build(SQ_ENTRIES);
    deferred
        .or_else(|_| {
            let mut builder = IoUring::builder();
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all().setup_cqsize(CQ_ENTRIES);
            builder.build(SQ_ENTRIES)
        })
        .or_else(|_| IoUring::builder().setup_cqsize(CQ_ENTRIES).build(SQ_ENTRIES))
}

/// Submits and runs deferred work, without waiting.
fn enter(uring: &IoUring, pending: u32) -> io::Result<()> {
    // SAFETY: no signal mask is passed, and the entries were pushed under `push`'s promise.
    let result = unsafe { uring.submitter().enter::<libc::sigset_t>(pending, 0, ENTER_GETEVENTS, None) };
    match result {
        Ok(_) => Ok(()),
        Err(error) if is_transient(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Timeout, interruption, or a full completion queue: the loop tries again.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

fn pack(index: u32, is_io: bool, token: u32) -> u64 {
    u64::from(index) << 33 | u64::from(is_io) << 32 | u64::from(token)
}

fn unpack(user_data: u64) -> (u32, bool, u32) {
    ((user_data >> 33) as u32, user_data >> 32 & 1 == 1, user_data as u32)
}

/// Token of a cancellation itself, which every completer ignores.
const CANCEL_TOKEN: u32 = u32::MAX;

/// Size of the submission queue. If it is full, its entries are submitted at once.
const SQ_ENTRIES: u32 = 256;
/// Size of the completion queue. Beyond it the kernel uses a slower overflow list.
const CQ_ENTRIES: u32 = 8192;
/// Size of the table of registered buffers, for which the kernel takes 8 bytes each: 64 queues of
/// the usual depth.
const BUFFER_ENTRIES: u16 = 8192;
/// `IORING_ENTER_GETEVENTS`.
const ENTER_GETEVENTS: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Recorder(RefCell<Vec<(u32, i32)>>);
    impl Completer for Recorder {
        fn complete(&self, token: u32, result: i32) {
            self.0.borrow_mut().push((token, result));
        }
    }

    #[test]
    fn more_entries_than_the_queue_holds_all_complete() {
        let ring = Ring::new().unwrap();
        let recorder = Rc::new(Recorder::default());
        let registration = ring.register(recorder.clone());
        for token in 0..3 * SQ_ENTRIES {
            // SAFETY: a no-op names no memory.
            unsafe { registration.push(io_uring::opcode::Nop::new().build(), token) }
        }
        while ring.has_io_in_flight() {
            ring.submit_and_wait(None).unwrap();
            ring.reap();
        }
        let mut tokens: Vec<u32> = recorder.0.borrow().iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..3 * SQ_ENTRIES).collect::<Vec<_>>());
    }

    #[test]
    fn entries_have_only_credentials_that_are_registered() {
        let ring = Ring::new().unwrap();
        let recorder = Rc::new(Recorder::default());
        let registration = ring.register(recorder.clone());
        let credentials = ring.register_credentials().unwrap();
        for (token, number) in [(0, credentials), (1, credentials + 1)] {
            let entry = io_uring::opcode::Nop::new().build().personality(number);
            // SAFETY: a no-op names no memory.
            unsafe { registration.push(entry, token) }
        }
        while ring.has_io_in_flight() {
            ring.submit_and_wait(None).unwrap();
            ring.reap();
        }
        recorder.0.borrow_mut().sort_unstable();
        assert_eq!(recorder.0.borrow().as_slice(), &[(0, 0), (1, -libc::EINVAL)][..]);
    }

    #[test]
    fn a_completer_outlives_its_registration_until_its_last_entry_is_done() {
        let ring = Ring::new().unwrap();
        let recorder = Rc::new(Recorder::default());
        let registration = ring.register(recorder.clone());
        // SAFETY: a no-op names no memory.
        unsafe { registration.push(io_uring::opcode::Nop::new().build(), 7) }
        drop(registration);
        assert_eq!(Rc::strong_count(&recorder), 2);
        ring.submit_and_wait(None).unwrap();
        ring.reap();
        assert_eq!((Rc::strong_count(&recorder), recorder.0.borrow().as_slice()), (1, &[(7, 0)][..]));
    }
}
