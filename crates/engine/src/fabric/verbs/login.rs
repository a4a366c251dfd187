//! One connection on an ordinary thread, for a login.

use super::queues::ConnectionQueues;
use crate::net::login_stream::LoginStream;
use blockmux_proto::driver::outbox::Outbox;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The queues of a connection that no task has.
pub(super) struct LoginQueues {
    queues: ConnectionQueues,
    timeout: Cell<Duration>,
}

impl LoginQueues {
    pub(super) fn connect(address: SocketAddr, timeout: Duration) -> io::Result<LoginQueues> {
        let mut queues = ConnectionQueues::connect(address)?;
        let until = Instant::now() + timeout;
        loop {
            queues.look(true)?;
            if queues.is_known() {
                return Ok(LoginQueues { queues, timeout: Cell::new(timeout) });
            }
            if !wait(&mut queues, until)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Sleeps until something has happened; `false` if nothing has until then.
fn wait(queues: &mut ConnectionQueues, until: Instant) -> io::Result<bool> {
    queues.notify()?;
    if queues.events.len() > 0 || queues.has_ended {
        return Ok(true);
    }
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(false);
    }
    let (events, completions) = queues.descriptors();
    let descriptors = events.into_iter().chain(completions);
    let mut polled: Vec<_> =
        descriptors.map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN)).collect();
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    poll(&mut polled, Some(&left))?;
    Ok(true)
}

impl io::Read for LoginQueues {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let until = Instant::now() + self.timeout.get();
        loop {
            let looked = self.queues.look(true);
            let len = self.queues.events.take(bytes.len(), |from| bytes[..from.len()].copy_from_slice(from));
            if len > 0 {
                return Ok(len);
            }
            looked?;
            if self.queues.has_ended {
                return Ok(0);
            }
            if !wait(&mut self.queues, until)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
    }
}

impl io::Write for LoginQueues {
    /// Records name memory, so they cannot be written as bytes.
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LoginStream for LoginQueues {
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.timeout.set(timeout);
        Ok(())
    }

    fn send(&mut self, outbox: &mut Outbox) -> io::Result<()> {
        self.queues.post_all(outbox).map(drop)
    }
}
