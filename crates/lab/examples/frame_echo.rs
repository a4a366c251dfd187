//! The ceiling of ATA over Ethernet: an echo of bare frames with the protocol's sizes.
//!
//! ```text
//! frame_echo serve IFACE --size 268435456 [--spin]
//! frame_echo client IFACE --mtu 9000 --bs 65536 --iodepth 16 --runtime_ms 1000 [--write] [--spin]
//! ```
//! Both sides use the engine's ports, so batches, filters and system calls are those of the
//! protocol. There is no session, volume, tag or retransmit. Data is at random offsets in a region
//! of the volume's size, or of 128 MiB if the volume is larger. That is more than any cache holds,
//! so caches have the same effect as on the volume. The order of frames does not matter: an I/O is
//! complete when as many frames have arrived as its block size needs. Prints one line: I/O per
//! second.

use blockmux_engine::net::frames::{FramePort, PacketPort, ReceivedFrame, Share, Side};
use blockmux_engine::sys::memory::map_pages;
use blockmux_proto::driver::frames::{Frame, FrameOutbox, Mac, OutFrame, PortId, Station};
use blockmux_volume::{Chunk, Memory, Seg, SgList};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Write as _};
use std::time::{Duration, Instant};
use words::Words;

/// One side of the measurement.
struct End {
    port: PacketPort,
    chunk: Chunk,
    arrivals: Vec<ReceivedFrame>,
    outbox: FrameOutbox,
    spins: bool,
}

impl End {
    fn open(interface: &str, side: Side, spins: bool) -> Result<End, String> {
        let port = PacketPort::open(interface, side).map_err(|error| format!("{interface}: {error}"))?;
        let chunk = Chunk::new(Memory::from_heap(CHUNK));
        Ok(End { port, chunk, arrivals: Vec::new(), outbox: FrameOutbox::default(), spins })
    }

    /// Receives a batch and passes on each frame; `false` if there was none.
    fn receive(&mut self, mut on_frame: impl FnMut(Mac, &[u8], &mut FrameOutbox)) -> Result<bool, String> {
        self.chunk.recycle();
        match self.port.receive(&mut self.chunk, &mut self.arrivals) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(format!("receive: {error}")),
        }
        let stride = FramePort::stride(&self.port);
        for arrival in self.arrivals.drain(..) {
            let from = Station { port: PortId(0), mac: arrival.mac };
            on_frame(arrival.mac, Frame::new(from, &self.chunk, arrival.len).bytes(), &mut self.outbox);
            self.chunk.take(stride);
        }
        Ok(true)
    }

    /// Sends all queued frames.
    fn send(&mut self) -> Result<(), String> {
        while !self.outbox.is_empty() {
            match self.port.send(PortId(0), &mut self.outbox) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(PollFlags::OUT),
                Err(error) => return Err(format!("send: {error}")),
            }
        }
        Ok(())
    }

    fn wait(&self, what: PollFlags) {
        if !self.spins {
            // A timeout is harmless: the port is polled again.
            let _ = poll(&mut [PollFd::new(&self.port, what)], Some(&TIMEOUT));
        }
    }
}

/// Answers requests until it is killed. Data is at random offsets in `size` bytes.
fn serve(mut end: End, size: usize) -> Result<(), String> {
    let size = size.clamp(MAX_DATA, MAX_REGION).next_multiple_of(BLOCK);
    let data = Memory::from_pages(&map_pages(size).map_err(|error| format!("{size} bytes: {error}"))?);
    let block = [0xA5; BLOCK];
    (0..size / BLOCK).for_each(|nth| data.seg(nth * BLOCK, BLOCK).copy_from(&block));
    let mut state = 1_u32;
    let mut anywhere = |len: usize| {
        // The generator of Numerical Recipes: good enough to miss caches.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let blocks = (size - len) / BLOCK + 1;
        data.seg(((u64::from(state) * blocks as u64) >> 32) as usize * BLOCK, len)
    };
    loop {
        let came = end.receive(|mac, frame, outbox| {
            let Some((head, came)) = frame.split_first_chunk::<HEAD>() else { return };
            let mut head = *head;
            head[0] |= RESPONSE;
            let wanted = usize::from(u16::from_be_bytes([head[20], head[21]])).min(MAX_DATA);
            let payload = if wanted == 0 { SgList::default() } else { SgList::one(anywhere(wanted)) };
            let came = &came[..came.len().min(MAX_DATA)];
            anywhere(came.len()).copy_from(came);
            outbox.push_back(OutFrame::new(Station { port: PortId(0), mac }, &head, payload));
        })?;
        end.send()?;
        if !came {
            end.wait(PollFlags::IN);
        }
    }
}

/// The load to generate.
struct Load {
    /// Bytes of data in each frame of one I/O.
    frames: Vec<usize>,
    /// Frames in flight.
    window: usize,
    is_write: bool,
    runtime: Duration,
}

impl Load {
    fn new(mtu: usize, bs: usize, iodepth: usize, is_write: bool, runtime: Duration) -> Load {
        let most = ((mtu - HEAD) / SECTOR).max(1) * SECTOR;
        let frames = (0..bs).step_by(most).map(|at| most.min(bs - at)).collect::<Vec<_>>();
        Load { window: (iodepth * frames.len()).clamp(1, MAX_WINDOW), frames, is_write, runtime }
    }
}

/// Keeps the window full for the runtime; returns I/O per second.
fn request(mut end: End, load: &Load) -> Result<f64, String> {
    let data = Seg::from_slice(&vec![0x5A; MAX_DATA]);
    // The server's address is unknown until its first reply.
    let (mut server, mut next, mut outstanding, mut answers) = (Mac::BROADCAST, 0, 0, 0_u64);
    let mut begun = Instant::now();
    let (mut last, mut asked) = (begun, begun);
    loop {
        let is_known = server != Mac::BROADCAST;
        if !is_known && Instant::now() - asked >= RETRY_INTERVAL {
            // The server may not have been started yet.
            (outstanding, asked) = (0, Instant::now());
        }
        let window = if is_known { load.window } else { 1 };
        while outstanding < window {
            let len = load.frames[next % load.frames.len()];
            next += 1;
            let mut head = [0; HEAD];
            (head[0], head[6]) = (0x10, ID);
            let (wanted, payload) = match load.is_write {
                true => (0, SgList::one(data.slice(0, len))),
                false => (len as u16, SgList::default()),
            };
            head[20..22].copy_from_slice(&wanted.to_be_bytes());
            end.outbox.push_back(OutFrame::new(Station { port: PortId(0), mac: server }, &head, payload));
            outstanding += 1;
        }
        end.send()?;
        let mut count = 0;
        let came = end.receive(|mac, _, _| (server, count) = (mac, count + 1))?;
        let now = Instant::now();
        if came && !is_known {
            (outstanding, begun, last) = (0, now, now);
        } else if came {
            (outstanding, answers, last) =
                (outstanding - count.min(outstanding), answers + count as u64, now);
        } else if now - last > if is_known { STUCK } else { STARTS_WITHIN } {
            return Err("no answer".to_owned());
        } else {
            end.wait(PollFlags::IN);
        }
        if is_known && now - begun >= load.runtime {
            let seconds = (now - begun).as_secs_f64();
            return Ok(answers as f64 / load.frames.len() as f64 / seconds);
        }
    }
}

fn run() -> Result<(), String> {
    let words = Words::new();
    let (what, interface) = (words.at(0)?, words.at(1)?);
    let spins = words.has("--spin");
    if what == "serve" {
        return serve(End::open(interface, Side::Target(Share::ALL), spins)?, words.number("--size")?);
    }
    let runtime = Duration::from_millis(words.number("--runtime_ms")? as u64);
    let (mtu, bs, iodepth) = (words.number("--mtu")?, words.number("--bs")?, words.number("--iodepth")?);
    let load = Load::new(mtu, bs, iodepth, words.has("--write"), runtime);
    let iops = request(End::open(interface, Side::Initiator { id: ID }, spins)?, &load)?;
    writeln!(std::io::stdout(), "{iops:.1}").map_err(|error| error.to_string())
}

fn main() -> Result<(), String> {
    run()
}

/// Parses the example's command line.
mod words {
    pub(crate) struct Words(Vec<String>);

    impl Words {
        pub(crate) fn new() -> Words {
            Words(std::env::args().skip(1).collect())
        }

        pub(crate) fn at(&self, place: usize) -> Result<&str, String> {
            self.0.get(place).map(String::as_str).ok_or_else(|| {
                "an argument is missing; the top of crates/lab/examples/frame_echo.rs shows the usage"
                    .to_owned()
            })
        }

        pub(crate) fn has(&self, name: &str) -> bool {
            self.0.iter().any(|word| word == name)
        }

        pub(crate) fn number(&self, name: &str) -> Result<usize, String> {
            let at =
                self.0.iter().position(|word| word == name).ok_or_else(|| format!("{name} is missing"))?;
            self.at(at + 1)?.parse().map_err(|_| format!("{name} takes a number"))
        }
    }
}

/// AoE header and ATA registers, after the Ethernet header.
const HEAD: usize = 22;
/// AoE's response flag.
const RESPONSE: u8 = 0x08;
const SECTOR: usize = 512;
const MAX_DATA: usize = 16 << 10;
/// Larger than any CPU cache, and quickly filled.
const MAX_REGION: usize = 128 << 20;
/// Block size of the volume.
const BLOCK: usize = 4096;
/// The engine's receive buffer.
const CHUNK: usize = 1 << 20;
/// The initiator's largest window.
const MAX_WINDOW: usize = 111;
/// Upper byte of the tags.
const ID: u8 = 0xEC;
const TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Interval of retries until the first answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
const STUCK: Duration = Duration::from_secs(2);
const STARTS_WITHIN: Duration = Duration::from_secs(20);
