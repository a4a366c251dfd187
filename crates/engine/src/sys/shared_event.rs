//! Event descriptors (eventfd) that another process has, too.
//!
//! Processes that have a descriptor share its flags and its counter. So the other one can clear
//! `O_NONBLOCK` at any time, after which a read waits while the counter is 0, and a write while it
//! is at its maximum. Nothing here relies on that flag.
#![expect(unsafe_code, reason = "pushes an entry without memory to a ring")]

use io_uring::{IoUring, opcode};
use rustix::io::{ReadWriteFlags, preadv2};
use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use tracing::warn;

/// An event descriptor that another process has, too.
pub(crate) struct SharedEvent(OwnedFd);

impl SharedEvent {
    /// Takes a descriptor of another process.
    ///
    /// # Errors
    /// If it is no event descriptor: a pipe or a terminal, for example, can block.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<SharedEvent> {
        let found = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        // A file of this name has a path that begins with a slash.
        if found.as_os_str() == "anon_inode:[eventfd]" {
            return Ok(SharedEvent(fd));
        }
        let why = format!("{} is no event descriptor (eventfd)", found.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    /// Clears the counter; never waits.
    pub(crate) fn clear(&self) {
        // It fails if the counter is 0. Linux 5.8 has the flag for event descriptors.
        let _ = preadv2(&self.0, &mut [IoSliceMut::new(&mut [0; 8])], CURRENT, ReadWriteFlags::NOWAIT);
    }

    /// What signals it.
    ///
    /// # Errors
    /// If the kernel forbids io_uring, or lacks memory.
    pub(crate) fn sender(&self) -> io::Result<EventSender> {
        let ring = IoUring::new(1)?;
        ring.submitter().register_eventfd(self.as_raw_fd())?;
        Ok(EventSender(ring))
    }
}

impl AsRawFd for SharedEvent {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Signals an event descriptor, and never waits.
///
/// write(2) can wait, and no flag of the call prevents that. But the kernel itself signals the
/// descriptor of a ring for each of its completions, without waiting. So each signal is an entry
/// that does nothing, in a ring that has no other use.
pub(crate) struct EventSender(IoUring);

impl EventSender {
    /// Adds 1 to the counter, unless it is at its maximum.
    #[inline]
    pub(crate) fn signal(&mut self) {
        // SAFETY: the entry names no memory and no descriptor.
        // There is no room only if the last one was not submitted, which is as good.
        let _ = unsafe { self.0.submission().push(&opcode::Nop::new().build()) };
        loop {
            match self.0.submit() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    warn!("a notification is delayed until the next one: {error}");
                    break;
                }
                Ok(_) => break,
            }
        }
        self.0.completion().for_each(drop);
    }
}

/// The offset of a call for a descriptor that has none: -1.
const CURRENT: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    /// Two descriptors of one counter, which block.
    fn shared() -> (SharedEvent, OwnedFd) {
        let of_peer = eventfd(0, EventfdFlags::empty()).unwrap();
        (SharedEvent::new(of_peer.try_clone().unwrap()).unwrap(), of_peer)
    }

    fn count(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_reaches_the_peer() {
        let (event, of_peer) = shared();
        let mut sender = event.sender().unwrap();
        for _ in 0..3 {
            sender.signal();
        }
        assert_eq!(count(&of_peer), 3);
        drop(event);
        sender.signal();
        assert_eq!(count(&of_peer), 1, "the sender does not need the descriptor");
    }

    #[test]
    fn a_signal_does_not_wait_while_the_counter_is_full() {
        let (event, of_peer) = shared();
        write(&of_peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let mut sender = event.sender().unwrap();
        sender.signal();
        sender.signal();
        assert_eq!(count(&of_peer), u64::MAX);
    }

    #[test]
    fn clearing_does_not_wait_while_the_counter_is_zero() {
        let (event, of_peer) = shared();
        event.clear();
        write(&of_peer, &5_u64.to_ne_bytes()).unwrap();
        event.clear();
        write(&of_peer, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!(count(&of_peer), 7);
    }

    #[test]
    fn a_descriptor_that_could_block_is_refused() {
        let (reader, writer) = io::pipe().unwrap();
        for fd in [OwnedFd::from(reader), writer.into(), fs::File::open("/dev/null").unwrap().into()] {
            assert_eq!(SharedEvent::new(fd).err().unwrap().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
