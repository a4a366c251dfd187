//! The server: answers requests.

use super::flow::{Inflow, IoDirection, Lengths, Messages, Outflow, RECEIVE_BUFFER, Received, receive};
use super::period::{CpuWatch, MeasuredPeriod};
use super::waiter::Waiter;
use super::{CeilingError, CeilingJob, sockets, system};
use crate::cpu::CpuUsage;
use crate::pattern::Random;
use rustix::io::Errno;
use std::os::fd::OwnedFd;

struct ServerConnection {
    /// `None` once the connection has ended.
    socket: Option<OwnedFd>,
    inflow: Inflow,
    outflow: Outflow,
}

/// Answers until every connection has ended. Returns the thread's CPU time within the period.
pub(super) fn serve(
    job: &CeilingJob,
    data: &[u8],
    sockets: Vec<OwnedFd>,
    period: &MeasuredPeriod,
) -> Result<CpuUsage, CeilingError> {
    sockets::pin(job.server_cpu)?;
    let (bs, depth, shape) = (job.bs as usize, job.iodepth as usize, job.shape);
    let reads = IoDirection::Read.heads(shape.read_reply_head, depth);
    let writes = IoDirection::Write.heads(shape.write_reply, depth);
    let mut replies = Messages::new(
        IoDirection::Read,
        (&reads, shape.read_reply_head),
        (&writes, shape.write_reply),
        data,
        bs,
    );
    let lengths = Lengths { read: shape.read_request, write: shape.write_request_head + bs };
    let mut blocks = Blocks { random: Random(SEED), count: (data.len() / bs) as u64, bs };
    let mut buffer = vec![0; RECEIVE_BUFFER];
    let mut waiter = Waiter::new(job.variant, &sockets).map_err(|error| system("use epoll", error))?;
    let mut connections: Vec<ServerConnection> = sockets
        .into_iter()
        .map(|socket| ServerConnection {
            socket: Some(socket),
            inflow: Inflow::new(),
            outflow: Outflow::new(depth),
        })
        .collect();
    let mut open = connections.len();
    let mut cpu = CpuWatch::default();
    while open > 0 {
        cpu.watch(period);
        waiter.wait(None).map_err(|error| system("wait", error))?;
        for (index, connection) in connections.iter_mut().enumerate() {
            let Some(socket) = &connection.socket else { continue };
            if !waiter.is_ready(index) {
                continue;
            }
            let more = match receive(socket, &mut buffer).map_err(|error| system("receive", error))? {
                Received::Bytes(bytes, more) => {
                    let outflow = &mut connection.outflow;
                    let whole = |kind| outflow.push(kind, blocks.next(kind));
                    let walked = connection.inflow.walk(&buffer[..bytes], lengths, whole);
                    walked.map_err(|_| CeilingError::UnknownMessage("server"))?;
                    more
                }
                Received::Nothing => false,
                Received::End => {
                    (connection.socket, open) = (None, open - 1);
                    waiter.forget(index);
                    continue;
                }
            };
            match replies.send(socket, &mut connection.outflow) {
                // The client closed without waiting for replies; the next receive reports it.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
                Err(error) => return Err(system("send", error)),
            }
            let blocked = !connection.outflow.is_empty();
            waiter.turned(index, socket, more, blocked).map_err(|error| system("use epoll", error))?;
        }
    }
    cpu.watch(period);
    cpu.used.ok_or(CeilingError::Ended("client"))
}

/// Chooses the data of replies.
struct Blocks {
    random: Random,
    count: u64,
    bs: usize,
}

impl Blocks {
    #[inline]
    fn next(&mut self, kind: IoDirection) -> usize {
        match kind {
            IoDirection::Read => self.random.below(self.count) as usize * self.bs,
            IoDirection::Write => 0,
        }
    }
}

const SEED: u64 = 0x5EED;
