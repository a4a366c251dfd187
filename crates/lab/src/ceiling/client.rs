//! The client: sends requests and measures.

use super::flow::{Inflow, IoDirection, Lengths, Messages, Outflow, RECEIVE_BUFFER, Received, receive};
use super::period::{CpuWatch, MeasuredPeriod};
use super::waiter::Waiter;
use super::{CeilingError, CeilingJob, sockets, system};
use crate::cpu::CpuUsage;
use crate::histogram::Histogram;
use crate::pattern::Random;
use crate::result::{Direction, Run};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

struct ClientConnection {
    socket: OwnedFd,
    inflow: Inflow,
    outflow: Outflow,
    /// Requests in flight, oldest first, which is the order of replies: time and direction.
    asked: VecDeque<(Instant, IoDirection)>,
}

/// Sends requests until the measured time is over, then closes the period and the connections.
pub(super) fn request(
    job: &CeilingJob,
    written: &[u8],
    sockets: Vec<OwnedFd>,
    period: &MeasuredPeriod,
) -> Result<Run, CeilingError> {
    sockets::pin(job.client_cpu)?;
    let (bs, depth, shape) = (job.bs as usize, job.iodepth as usize, job.shape);
    let reads = IoDirection::Read.heads(shape.read_request, depth);
    let writes = IoDirection::Write.heads(shape.write_request_head, depth);
    let mut client = Client {
        depth,
        bs: job.bs,
        lengths: Lengths { read: shape.read_reply_head + bs, write: shape.write_reply },
        requests: Messages::new(
            IoDirection::Write,
            (&writes, shape.write_request_head),
            (&reads, shape.read_request),
            written,
            bs,
        ),
        choice: RequestChooser {
            random: Random(SEED),
            percent_reads: job.percent_reads()?,
            bs,
            len: written.len(),
            at: 0,
        },
        buffer: vec![0; RECEIVE_BUFFER],
        reads: Histogram::new(),
        writes: Histogram::new(),
    };
    let mut waiter = Waiter::new(job.variant, &sockets).map_err(|error| system("use epoll", error))?;
    let mut connections: Vec<ClientConnection> = sockets
        .into_iter()
        .map(|socket| ClientConnection {
            socket,
            inflow: Inflow::new(),
            outflow: Outflow::new(depth),
            asked: VecDeque::with_capacity(depth),
        })
        .collect();

    let ramp_end = Instant::now() + job.ramp;
    client.work(&mut connections, &mut waiter, ramp_end)?;
    client.forget_results();
    let mut cpu = CpuWatch::default();
    period.open();
    cpu.watch(period);
    let begun = Instant::now();
    client.work(&mut connections, &mut waiter, begun + job.runtime)?;
    let runtime = begun.elapsed();
    period.close();
    cpu.watch(period);
    Ok(client.run(runtime, cpu.used))
}

struct Client<'a> {
    depth: usize,
    bs: u32,
    lengths: Lengths,
    requests: Messages<'a>,
    choice: RequestChooser,
    buffer: Vec<u8>,
    reads: Histogram,
    writes: Histogram,
}

impl Client<'_> {
    fn work(
        &mut self,
        connections: &mut [ClientConnection],
        waiter: &mut Waiter,
        until: Instant,
    ) -> Result<(), CeilingError> {
        loop {
            let now = Instant::now();
            if now >= until {
                return Ok(());
            }
            waiter.wait(Some(until - now)).map_err(|error| system("wait", error))?;
            for (index, connection) in connections.iter_mut().enumerate() {
                if waiter.is_ready(index) {
                    let more = self.turn(connection)?;
                    let blocked = !connection.outflow.is_empty();
                    let turned = waiter.turned(index, &connection.socket, more, blocked);
                    turned.map_err(|error| system("use epoll", error))?;
                }
            }
        }
    }

    /// Receives replies and sends as many new requests. Returns whether more replies may be there.
    #[inline]
    fn turn(&mut self, connection: &mut ClientConnection) -> Result<bool, CeilingError> {
        let received = receive(&connection.socket, &mut self.buffer);
        let mut more = false;
        match received.map_err(|error| system("receive", error))? {
            Received::Bytes(bytes, full) => {
                more = full;
                self.complete(connection, bytes)?;
            }
            Received::Nothing if connection.asked.len() == self.depth && connection.outflow.is_empty() => {
                return Ok(false);
            }
            Received::Nothing => {}
            Received::End => return Err(CeilingError::Ended("server")),
        }
        let missing = self.depth - connection.asked.len();
        if missing > 0 {
            let now = Instant::now();
            for _ in 0..missing {
                let (kind, at) = self.choice.next();
                connection.asked.push_back((now, kind));
                connection.outflow.push(kind, at);
            }
        }
        match self.requests.send(&connection.socket, &mut connection.outflow) {
            Ok(()) => Ok(more),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(CeilingError::Ended("server")),
            Err(error) => Err(system("send", error)),
        }
    }

    #[inline]
    fn complete(&mut self, connection: &mut ClientConnection, bytes: usize) -> Result<(), CeilingError> {
        let now = Instant::now();
        let mut in_step = true;
        let whole = |kind| match connection.asked.pop_front() {
            Some((asked, due)) if due == kind => {
                let histogram = if kind == IoDirection::Read { &mut self.reads } else { &mut self.writes };
                histogram.record((now - asked).as_nanos() as u64);
            }
            _ => in_step = false,
        };
        match connection.inflow.walk(&self.buffer[..bytes], self.lengths, whole) {
            Ok(()) if in_step => Ok(()),
            _ => Err(CeilingError::UnknownMessage("client")),
        }
    }

    fn forget_results(&mut self) {
        self.reads.clear();
        self.writes.clear();
    }

    fn run(&self, runtime: Duration, cpu: Option<CpuUsage>) -> Run {
        let direction = |histogram: &Histogram| Direction {
            ios: histogram.count(),
            bytes: histogram.count() * u64::from(self.bs),
            latency: histogram.latency(),
        };
        Run {
            runtime_ns: runtime.as_nanos() as u64,
            read: direction(&self.reads),
            write: direction(&self.writes),
            initiator_cpu_ns: cpu.map(|used| used.cpu_ns),
            initiator_system_ns: cpu.and_then(|used| used.system_ns),
            ..Run::default()
        }
    }
}

/// Chooses the next request.
struct RequestChooser {
    random: Random,
    percent_reads: u64,
    bs: usize,
    /// Bytes of the write buffers, which are used round-robin.
    len: usize,
    at: usize,
}

impl RequestChooser {
    #[inline]
    fn next(&mut self) -> (IoDirection, usize) {
        let is_read = match self.percent_reads {
            100 => true,
            0 => false,
            percent => self.random.below(100) < percent,
        };
        if is_read {
            return (IoDirection::Read, 0);
        }
        let at = self.at;
        self.at = if at + 2 * self.bs <= self.len { at + self.bs } else { 0 };
        (IoDirection::Write, at)
    }
}

const SEED: u64 = 0xA5;
