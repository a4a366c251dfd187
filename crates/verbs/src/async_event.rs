//! Asynchronous events of devices: what happens to a device, a port or a queue, and not as the
//! result of work.
#![expect(unsafe_code, reason = "calls libibverbs, and reads what it says of objects")]

use crate::abi::*;
use crate::connection::set_nonblocking;
use crate::error::VerbsError;
use crate::memory::OpenDevice;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A device that is in use, with its events. All handles of a device have the same events, each of
/// which is read once.
#[derive(Clone)]
pub struct DeviceHandle {
    device: Arc<OpenDevice>,
}

/// By what events name a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueIdentity {
    /// The number of its queue pair.
    pub queue_pair: u32,
    /// Its completion queue.
    pub completion_queue: usize,
    /// The port of the device, from 1.
    pub port: u8,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A queue pair has failed.
    QueuePair {
        /// Its number.
        number: u32,
        /// Why.
        failure: QueuePairFailure,
    },
    /// A completion queue has failed, as [`QueueIdentity`] has it.
    CompletionQueue(usize),
    /// A port no longer transmits.
    PortDown(u8),
    /// A port transmits again.
    PortUp(u8),
    /// The device has failed, or is gone.
    DeviceFailed,
    /// Another event, which ends nothing.
    Other(c_int),
}

/// Why a queue pair has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueuePairFailure {
    /// The device cannot even report it as the result of work.
    #[error("a fatal error of the device")]
    Fatal,
    /// The peer has made a request that is not valid.
    #[error("an invalid request of the peer")]
    Request,
    /// The peer has accessed memory that is not open to it.
    #[error("an access of the peer to memory that is not open to it")]
    Access,
}

impl DeviceHandle {
    pub(crate) fn new(device: Arc<OpenDevice>) -> Result<DeviceHandle, VerbsError> {
        let handle = DeviceHandle { device };
        set_nonblocking(handle.as_fd())?;
        Ok(handle)
    }

    /// The kernel's name of the device.
    #[must_use]
    pub fn name(&self) -> String {
        self.device.name()
    }

    /// Whether both are of one device.
    #[must_use]
    pub fn is_of_same_device(&self, other: &DeviceHandle) -> bool {
        Arc::ptr_eq(&self.device, &other.device)
    }

    /// The next event; `None` if there is none now.
    ///
    /// # Errors
    /// If the device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let OpenDevice { library, device, .. } = &*self.device;
        let mut event = ibv_async_event { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: `OpenDevice` keeps it open, and its events do not block.
        if unsafe { (library.verbs.ibv_get_async_event)(device.as_ptr(), &raw mut event) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(VerbsError::Call { call: "ibv_get_async_event", error }),
            };
        }
        // SAFETY: a queue pair whose event is not acknowledged is not destroyed.
        let number = |queue_pair: *mut ibv_qp| unsafe { (*queue_pair).qp_num };
        let decoded = AsyncEvent::new(&event, number);
        // Destroying a queue waits for this.
        // SAFETY: acknowledged once.
        unsafe { (library.verbs.ibv_ack_async_event)(&raw mut event) };
        Ok(Some(decoded))
    }
}

impl AsFd for DeviceHandle {
    /// Readable when there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `OpenDevice` keeps it open, and so its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.device.device.as_ptr()).async_fd) }
    }
}

impl AsyncEvent {
    /// `number` reads the number of a queue pair, which the event names.
    fn new(event: &ibv_async_event, number: impl FnOnce(*mut ibv_qp) -> u32) -> AsyncEvent {
        let failed = |failure| AsyncEvent::QueuePair { number: number(event.element.cast()), failure };
        // SAFETY: the field is a union, of which the number of a port is the shortest member.
        let port = unsafe { (&raw const event.element).cast::<c_int>().read() } as u8;
        match event.event_type {
            IBV_EVENT_QP_FATAL => failed(QueuePairFailure::Fatal),
            IBV_EVENT_QP_REQ_ERR => failed(QueuePairFailure::Request),
            IBV_EVENT_QP_ACCESS_ERR => failed(QueuePairFailure::Access),
            IBV_EVENT_CQ_ERR => AsyncEvent::CompletionQueue(event.element.addr()),
            IBV_EVENT_PORT_ERR => AsyncEvent::PortDown(port),
            IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortUp(port),
            IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFailed,
            other => AsyncEvent::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null_mut, without_provenance_mut};

    fn decoded(event_type: c_int, element: *mut std::ffi::c_void) -> AsyncEvent {
        AsyncEvent::new(&ibv_async_event { element, event_type }, |queue_pair| queue_pair.addr() as u32 + 1)
    }

    #[test]
    fn events_name_what_they_concern() {
        let queue = without_provenance_mut(0x40);
        for (event, failure) in [
            (IBV_EVENT_QP_FATAL, QueuePairFailure::Fatal),
            (IBV_EVENT_QP_REQ_ERR, QueuePairFailure::Request),
            (IBV_EVENT_QP_ACCESS_ERR, QueuePairFailure::Access),
        ] {
            assert_eq!(decoded(event, queue), AsyncEvent::QueuePair { number: 0x41, failure });
        }
        assert_eq!(decoded(IBV_EVENT_CQ_ERR, queue), AsyncEvent::CompletionQueue(0x40));
        assert_eq!(decoded(IBV_EVENT_DEVICE_FATAL, null_mut()), AsyncEvent::DeviceFailed);
        let mut second: *mut std::ffi::c_void = null_mut();
        // SAFETY: the pointer is longer than the number.
        unsafe { (&raw mut second).cast::<c_int>().write(2) };
        assert_eq!(decoded(IBV_EVENT_PORT_ERR, second), AsyncEvent::PortDown(2));
        assert_eq!(decoded(IBV_EVENT_PORT_ACTIVE, second), AsyncEvent::PortUp(2));
    }

    #[test]
    fn other_events_name_no_queue_pair() {
        let never = |_| panic!("its element may be anything");
        for event_type in [IBV_EVENT_COMM_EST, IBV_EVENT_QP_LAST_WQE_REACHED, 99] {
            let event = ibv_async_event { element: null_mut(), event_type };
            assert_eq!(AsyncEvent::new(&event, never), AsyncEvent::Other(event_type));
        }
    }
}
