//! The ceiling: the raw-socket baseline, which is the best that any protocol on plain sockets could
//! reach on this machine.
//!
//! Two threads exchange messages of a protocol's sizes and nothing else: there is no parsing beyond
//! a message's first byte, no session and no volume. Reports show a protocol's result as a share of
//! the ceiling.
//!
//! ```text
//!   client: iodepth in flight a connection            ──requests──▶   server: recv once, count whole requests,
//!   recv once, time, queue new requests, send once    ◀──replies───   send all replies with one sendmsg
//! ```
//! Reads are answered from random blocks of a region as large as a volume ([`Data`]), so caches
//! have the same effect as on a volume in RAM. Written data is received and dropped. The order of
//! offsets does not matter, so sequential jobs use random offsets too, which does not overstate any
//! protocol's share.
//!
//! # Measured choices
//! Medians and maxima of 5 to 14 short alternating runs on two cores that other programs used too.
//! Differences under 10% count as equal:
//! - A send is not limited in length. A limit of 64 KiB or less makes no difference for 4 KiB
//!   replies at depth 32, costs 10% at depth 128, and costs a quarter of the rate for 64 KiB
//!   replies.
//! - The receive buffer has 256 KiB on both sides. 64 KiB at the server makes no difference; at
//!   the client it costs CPU time with large replies.
//!
//! Other choices could not be measured here, because noise exceeded the differences:
//! - TCP's send buffer is the system's default. That of Unix sockets is fixed, so it is as large as
//!   in the engine.
//! - Data is in huge pages, as in volumes in RAM; otherwise the ceiling would be too low.
//! - EPOLLOUT is requested only while output waits for room: Unix sockets wake for each message
//!   that the peer takes.

use crate::job::{Job, MAX_BS, MAX_IODEPTH, MAX_NUMJOBS, Rw};
use crate::result;
use blockmux_engine::sys::congestion::Congestion;
use memmap2::{Advice, MmapMut};
use std::io;
use std::time::Duration;

mod client;
mod flow;
mod period;
mod server;
mod sockets;
mod waiter;

/// Bytes that a protocol adds to the data: one request and its reply, for each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageShape {
    /// Length of a read request in bytes.
    pub read_request: usize,
    /// Bytes before the data in a read reply.
    pub read_reply_head: usize,
    /// Bytes before the data in a write request.
    pub write_request_head: usize,
    /// Length of a write reply in bytes.
    pub write_reply: usize,
}

/// Behaviour of both sides when idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Sleep in epoll.
    Sleeping,
    /// Poll without sleeping.
    Spinning,
}

/// The kind of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP over loopback.
    Tcp,
    /// Unix stream sockets.
    Unix,
}

/// One measurement of the ceiling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CeilingJob {
    /// Message sizes.
    pub shape: MessageShape,
    /// Reads, writes or both; discards are not supported.
    pub rw: Rw,
    /// Per cent of reads in a mixed pattern.
    pub rwmixread: u8,
    /// Bytes of data in each message that has data.
    pub bs: u32,
    /// Requests in flight for each connection.
    pub iodepth: u32,
    /// Number of connections; one thread serves all of them, and a second thread is their client.
    pub connections: u32,
    /// Time before measuring starts.
    pub ramp: Duration,
    /// Measured time.
    pub runtime: Duration,
    /// Sleeping or spinning.
    pub variant: Variant,
    /// The kind of sockets.
    pub transport: Transport,
    /// Congestion control of TCP; `None`: the system's.
    pub congestion: Option<Congestion>,
    /// Bytes of the region that read data comes from.
    pub data_bytes: usize,
    /// CPU of the serving thread; `None`: not pinned.
    pub server_cpu: Option<usize>,
    /// CPU of the client thread; `None`: not pinned.
    pub client_cpu: Option<usize>,
}

/// Why the ceiling could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CeilingError {
    /// The job is invalid.
    #[error("ceiling: {0}")]
    Job(String),
    /// A system call failed.
    #[error("ceiling: cannot {what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The error.
        source: io::Error,
    },
    /// A thread cannot be pinned.
    #[error("ceiling: cannot pin a thread to CPU {cpu}: {source}")]
    Pin {
        /// The CPU.
        cpu: usize,
        /// The error.
        source: io::Error,
    },
    /// A message begins with an unknown kind.
    #[error("ceiling: the {0} received an unknown kind of message")]
    UnknownMessage(&'static str),
    /// One side closed its connections before the measured time was over.
    #[error("ceiling: the {0} ended before the measured time was over")]
    Ended(&'static str),
}

/// The region that read data comes from, faulted in at creation.
///
/// Creating one takes a fraction of a second for each GiB; several runs may share it.
pub struct Data {
    map: MmapMut,
}

impl CeilingJob {
    /// The ceiling of `job` with messages of `shape`: over TCP, data from [`DATA_BYTES`], threads
    /// not pinned.
    #[must_use]
    pub fn new(job: &Job, shape: MessageShape, variant: Variant) -> CeilingJob {
        CeilingJob {
            shape,
            rw: job.rw,
            rwmixread: job.rwmixread,
            bs: job.bs,
            iodepth: job.iodepth,
            connections: job.numjobs,
            ramp: Duration::from_millis(job.ramp_time_ms),
            runtime: Duration::from_millis(job.runtime_ms),
            variant,
            transport: Transport::Tcp,
            congestion: None,
            data_bytes: DATA_BYTES,
            server_cpu: None,
            client_cpu: None,
        }
    }

    /// Percentage of reads.
    fn percent_reads(&self) -> Result<u64, CeilingError> {
        match self.rw {
            Rw::Read | Rw::RandRead => Ok(100),
            Rw::Write | Rw::RandWrite => Ok(0),
            Rw::ReadWrite | Rw::RandRw => Ok(self.rwmixread.into()),
            Rw::Trim | Rw::RandTrim => {
                Err(CeilingError::Job(format!("rw={} transfers no data over a socket", self.rw.name())))
            }
        }
    }

    fn check(&self) -> Result<(), CeilingError> {
        let shape = self.shape;
        let messages =
            [shape.read_request, shape.read_reply_head, shape.write_request_head, shape.write_reply];
        let bounds = [
            ("bs", self.bs, MAX_BS),
            ("iodepth", self.iodepth, MAX_IODEPTH),
            ("numjobs", self.connections, MAX_NUMJOBS),
        ];
        for (name, value, max) in bounds {
            if !(1..=max).contains(&value) {
                return Err(CeilingError::Job(format!("{name}={value} is not between 1 and {max}")));
            }
        }
        if messages.iter().any(|bytes| !(1..=MAX_MESSAGE).contains(bytes)) {
            return Err(CeilingError::Job(format!("a message has between 1 and {MAX_MESSAGE} bytes")));
        }
        if self.rwmixread > 100 {
            return Err(CeilingError::Job(format!("rwmixread={} is more than 100", self.rwmixread)));
        }
        if self.runtime.is_zero() {
            return Err(CeilingError::Job("runtime=0 measures nothing".into()));
        }
        self.percent_reads().map(|_| ())
    }
}

impl Data {
    /// A region of `bytes`, in huge pages where available, as volumes in RAM are.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(bytes: usize) -> Result<Data, CeilingError> {
        let mut map = MmapMut::map_anon(bytes.max(1)).map_err(|source| system("get memory", source))?;
        // Only a hint: without huge pages the ceiling is slower.
        let _ = map.advise(Advice::HugePage);
        // Not zeroes: pages that were only read would all map to the shared zero page.
        map.fill(FILLING);
        Ok(Data { map })
    }

    fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Measures the ceiling once.
///
/// # Errors
/// If the job is invalid, or the system refuses memory, sockets, threads or pinning. Never hangs:
/// each side ends when the other one does.
pub fn run(job: &CeilingJob) -> Result<result::Run, CeilingError> {
    job.check()?;
    run_over(job, &Data::new(job.data_bytes)?)
}

/// Measures the ceiling once over `data`; ignores [`CeilingJob::data_bytes`].
///
/// # Errors
/// As [`run`].
pub fn run_over(job: &CeilingJob, data: &Data) -> Result<result::Run, CeilingError> {
    job.check()?;
    let bs = job.bs as usize;
    if data.bytes().len() < bs {
        return Err(CeilingError::Job(format!("data of {} bytes has no block of {bs}", data.bytes().len())));
    }
    // One write buffer for each request in flight, up to a total that no cache holds.
    let buffers = (job.iodepth as usize).min((MAX_WRITE_BUFFERS / bs).max(1));
    let written = Data::new(if job.percent_reads()? < 100 { buffers * bs } else { bs })?;
    let (server_sockets, client_sockets) = sockets::connect(job)?;
    let period = period::MeasuredPeriod::new();
    std::thread::scope(|scope| {
        let server = std::thread::Builder::new()
            .name("ceiling-server".into())
            .spawn_scoped(scope, || server::serve(job, data.bytes(), server_sockets, &period))
            .map_err(|source| system("start a thread", source));
        let client = std::thread::Builder::new()
            .name("ceiling-client".into())
            .spawn_scoped(scope, || client::request(job, written.bytes(), client_sockets, &period))
            .map_err(|source| system("start a thread", source));
        // A thread that fails to start or panics drops its sockets, which ends the other one.
        let client = client.and_then(|thread| thread.join().unwrap_or(Err(CeilingError::Ended("client"))));
        let server = server.and_then(|thread| thread.join().unwrap_or(Err(CeilingError::Ended("server"))));
        match (client, server) {
            (Ok(found), Ok(target_cpu)) => {
                let (target_cpu_ns, target_system_ns) = (Some(target_cpu.cpu_ns), target_cpu.system_ns);
                Ok(result::Run { target_cpu_ns, target_system_ns, ..found })
            }
            // If both sides fail, the error that only reports the end of the other side is less
            // useful.
            (Err(error), Ok(_))
            | (Err(CeilingError::Ended(_)) | Ok(_), Err(error))
            | (Err(error), Err(_)) => Err(error),
        }
    })
}

fn system(what: &'static str, source: impl Into<io::Error>) -> CeilingError {
    CeilingError::System { what, source: source.into() }
}

/// Size of the default data region: larger than any CPU cache.
pub const DATA_BYTES: usize = 1 << 30;
/// The longest header or reply; those of real protocols are below 256 bytes.
const MAX_MESSAGE: usize = 4096;
const MAX_WRITE_BUFFERS: usize = 64 << 20;
const FILLING: u8 = 0xA5;

#[cfg(test)]
mod tests;
