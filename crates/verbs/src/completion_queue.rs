//! Completion queues with their channels, whose descriptors become readable.
#![expect(unsafe_code, reason = "calls libibverbs, and owns what it allocates")]

use crate::abi::*;
use crate::connection::set_nonblocking;
use crate::error::VerbsError;
use crate::memory::Domain;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A completion queue with its channel.
pub(crate) struct CompletionQueue {
    pub(crate) queue: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
    domain: Arc<Domain>,
}

impl CompletionQueue {
    pub(crate) fn new(domain: &Arc<Domain>, len: u32) -> Result<CompletionQueue, VerbsError> {
        let (library, device) = (domain.library(), domain.device().as_ptr());
        // SAFETY: the domain keeps the device open.
        let channel = unsafe { (library.verbs.ibv_create_comp_channel)(device) };
        let channel = NonNull::new(channel).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        let len = c_int::try_from(len).unwrap_or(c_int::MAX);
        // SAFETY: as above; the channel outlives the queue.
        let queue = unsafe { (library.verbs.ibv_create_cq)(device, len, null_mut(), channel.as_ptr(), 0) };
        let Some(queue) = NonNull::new(queue) else {
            let error = VerbsError::last("ibv_create_cq");
            // SAFETY: nothing uses the channel.
            unsafe { (library.verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = CompletionQueue { queue, channel, domain: domain.clone() };
        set_nonblocking(queue.as_fd())?;
        Ok(queue)
    }

    /// Returns how many were found.
    pub(crate) fn poll(&mut self, found: &mut [ibv_wc; BATCH]) -> Result<usize, VerbsError> {
        let poll = self.operations().poll_cq.ok_or(NO_OPERATION)?;
        // SAFETY: the queue is valid, and there is room for as many.
        let count = unsafe { poll(self.queue.as_ptr(), BATCH as c_int, found.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| VerbsError::last("ibv_poll_cq"))
    }

    pub(crate) fn notify(&mut self) -> Result<(), VerbsError> {
        let (mut queue, mut context) = (null_mut(), null_mut());
        let library = self.domain.library();
        // SAFETY: the channel is valid, and does not block.
        while unsafe {
            (library.verbs.ibv_get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut context)
        } == 0
        {
            // SAFETY: the queue is the channel's only one, and the event is acknowledged once.
            unsafe { (library.verbs.ibv_ack_cq_events)(queue, 1) };
        }
        let notify = self.operations().req_notify_cq.ok_or(NO_OPERATION)?;
        // SAFETY: the queue is valid.
        let failed = unsafe { notify(self.queue.as_ptr(), 0) };
        VerbsError::check_number("ibv_req_notify_cq", failed)
    }

    fn operations(&self) -> &ibv_context_ops {
        // SAFETY: the domain keeps the device open.
        unsafe { &(*self.domain.device().as_ptr()).ops }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns its descriptor, and `self` the channel.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let library = self.domain.library();
        // SAFETY: the queue pair is destroyed, all events are acknowledged, and the channel's only
        // queue is destroyed before it.
        unsafe {
            (library.verbs.ibv_destroy_cq)(self.queue.as_ptr());
            (library.verbs.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// Completions that are polled at a time.
pub(crate) const BATCH: usize = 16;
/// What a poll overwrites.
pub(crate) const NO_COMPLETION: ibv_wc = ibv_wc {
    wr_id: 0,
    status: 0,
    opcode: 0,
    vendor_err: 0,
    byte_len: 0,
    invalidated_rkey: 0,
    qp_num: 0,
    src_qp: 0,
    wc_flags: 0,
    pkey_index: 0,
    slid: 0,
    sl: 0,
    dlid_path_bits: 0,
};
const NO_OPERATION: VerbsError = VerbsError::Unsupported("the device lacks a function of completion queues");
