//! Prints what bare UDP sockets reach with the packets and the system calls of RoCEv2, beside bare
//! TCP sockets: the bound of RoCEv2's share of iWARP on this machine. Medians of several runs,
//! alternating; both sides poll.
//!
//! `cargo run --release -p blockmux-lab --example udp_ceiling [runs] [milliseconds]`
//!
//! A packet that the kernel drops ends a run, because nobody sends it again; so no more is in
//! flight than in RoCEv2.

use blockmux_lab::ceiling::{CeilingJob, DATA_BYTES, Data, MessageShape, Variant, run_over};
use blockmux_lab::job::{Job, Rw};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Socket, Type};
use std::error::Error;
use std::io::{self, IoSliceMut, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |nth: usize, default| args.get(nth).map_or(Ok(default), |text| text.parse::<u64>());
    let (runs, runtime_ms) = (number(0, 5)?, number(1, 500)?);
    let data = Data::new(DATA_BYTES)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{:18} {:>9} {:>9} {:>6}", "thousand IOPS", "TCP", "UDP", "ratio")?;
    for (name, rw, bs, iodepth) in ROWS {
        let (mut tcp, mut udp) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            let job = Job { rw, bs, iodepth, runtime_ms, ramp_time_ms: runtime_ms / 5, ..Job::default() };
            let mut ceiling = CeilingJob::new(&job, SHAPE, Variant::Spinning);
            (ceiling.server_cpu, ceiling.client_cpu) = (Some(0), Some(1));
            tcp.push(run_over(&ceiling, &data)?.iops() / 1e3);
            let exchange = Exchange { reads: rw == Rw::RandRead, bs: bs as usize, depth: iodepth as usize };
            udp.push(exchange.run(Duration::from_millis(runtime_ms))? / 1e3);
        }
        let [tcp, udp] = [tcp, udp].map(median);
        writeln!(out, "{name:18} {tcp:9.1} {udp:9.1} {:6.2}", udp / tcp)?;
        out.flush()?;
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What both sides exchange: a message for each request and each reply, and the data in packets of
/// their own.
#[derive(Clone, Copy)]
struct Exchange {
    reads: bool,
    bs: usize,
    depth: usize,
}

impl Exchange {
    /// Requests per second.
    fn run(self, runtime: Duration) -> Result<f64, Box<dyn Error>> {
        let [client, server] = [Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3)].map(UdpEnd::open);
        let (mut client, mut server) = (client?, server?);
        (client.peer, server.peer) = (server.local, client.local);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| -> io::Result<()> {
                pin(0);
                while !is_over.load(Ordering::Relaxed) {
                    let arrived = server.receive()?;
                    let count = self.requests(&mut server, arrived);
                    self.reply(&server, count)?;
                }
                Ok(())
            });
            pin(1);
            let rate = self.ask(&mut client, runtime);
            is_over.store(true, Ordering::Relaxed);
            serving.join().map_err(|_| "the server has panicked")??;
            Ok(rate?)
        })
    }

    /// The client's side: requests per second.
    fn ask(self, client: &mut UdpEnd, runtime: Duration) -> io::Result<f64> {
        let limit = (IN_FLIGHT / self.bs).clamp(1, self.depth);
        let begin = Instant::now();
        let (mut sent, mut done) = (0, 0);
        while begin.elapsed() < runtime {
            self.request(client, limit - (sent - done))?;
            sent = done + limit;
            done += client.receive()?.messages;
        }
        Ok(done as f64 / begin.elapsed().as_secs_f64())
    }

    /// Requests that are complete, with what has arrived before.
    fn requests(self, server: &mut UdpEnd, arrived: Arrived) -> usize {
        if self.reads {
            return arrived.messages;
        }
        server.data += arrived.data;
        let count = server.data / self.bs;
        server.data %= self.bs;
        count
    }

    fn request(self, client: &UdpEnd, count: usize) -> io::Result<()> {
        if self.reads { client.send(count, MESSAGE) } else { self.send_data(client, count) }
    }

    fn reply(self, server: &UdpEnd, count: usize) -> io::Result<()> {
        if self.reads {
            self.send_data(server, count)?;
        }
        server.send(count, MESSAGE)
    }

    fn send_data(self, end: &UdpEnd, count: usize) -> io::Result<()> {
        end.send(count * self.bs.div_ceil(PAYLOAD), HEAD + self.bs.min(PAYLOAD))
    }
}

/// What a call has received.
#[derive(Default)]
struct Arrived {
    messages: usize,
    /// Bytes of data.
    data: usize,
}

/// One side.
struct UdpEnd {
    socket: Socket,
    state: UdpSocketState,
    local: SocketAddr,
    peer: SocketAddr,
    /// What is received into and sent from.
    received: Vec<u8>,
    to_send: Vec<u8>,
    /// Bytes of a request that has not arrived whole.
    data: usize,
}

impl UdpEnd {
    fn open(address: Ipv4Addr) -> io::Result<UdpEnd> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM.nonblocking(), None)?;
        socket.bind(&SocketAddr::from((address, 0)).into())?;
        let local = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let (received, to_send) = (vec![0; 1 << 16], vec![1; 1 << 16]);
        Ok(UdpEnd { socket, state, local, peer: local, received, to_send, data: 0 })
    }

    fn receive(&mut self) -> io::Result<Arrived> {
        let mut meta = [RecvMeta::default()];
        let mut buffer = [IoSliceMut::new(&mut self.received)];
        match self.state.recv(UdpSockRef::from(&self.socket), &mut buffer, &mut meta) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Arrived::default()),
            received => received?,
        };
        let mut arrived = Arrived::default();
        let (mut left, stride) = (meta[0].len, meta[0].stride.max(1));
        while left > 0 {
            match left.min(stride) {
                MESSAGE => arrived.messages += 1,
                len => arrived.data += len.saturating_sub(HEAD),
            }
            left = left.saturating_sub(stride);
        }
        Ok(arrived)
    }

    /// Sends packets of one length, as many in each call as the system joins.
    fn send(&self, mut count: usize, len: usize) -> io::Result<()> {
        while count > 0 {
            let joined = count.min(self.state.max_gso_segments()).min(MAX_JOINED / len);
            let transmit = Transmit {
                destination: self.peer,
                ecn: None,
                contents: &self.to_send[..joined * len],
                segment_size: Some(len),
                src_ip: None,
            };
            match self.state.try_send(UdpSockRef::from(&self.socket), &transmit) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    sent?;
                    count -= joined;
                }
            }
        }
        Ok(())
    }
}

fn pin(cpu: usize) {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu);
    // Without it the figures are less steady.
    let _ = rustix::thread::sched_setaffinity(None, &cpus);
}

/// Length of a command or a reply, with its headers.
const MESSAGE: usize = 80;
/// Most data of a packet, and the headers of one.
const PAYLOAD: usize = 8192;
const HEAD: usize = 32;
/// Most data in flight.
const IN_FLIGHT: usize = 256 << 10;
const MAX_JOINED: usize = 65_507;
const SHAPE: MessageShape =
    MessageShape { read_request: 48, read_reply_head: 48, write_request_head: 48, write_reply: 48 };
const ROWS: [(&str, Rw, u32, u32); 8] = [
    ("4k read QD1", Rw::RandRead, 4 << 10, 1),
    ("4k read QD32", Rw::RandRead, 4 << 10, 32),
    ("4k write QD1", Rw::RandWrite, 4 << 10, 1),
    ("4k write QD32", Rw::RandWrite, 4 << 10, 32),
    ("64k read QD1", Rw::RandRead, 64 << 10, 1),
    ("64k read QD32", Rw::RandRead, 64 << 10, 32),
    ("64k write QD1", Rw::RandWrite, 64 << 10, 1),
    ("64k write QD32", Rw::RandWrite, 64 << 10, 32),
];
