//! Either side of `rping` over an RDMA device: for tries of devices with programs of others.
//!
//! ```text
//! verbs_peer serve ADDRESS [--count 10] [--invalidate] [--trespass]
//!     serves one client: rping -c, or `verbs_peer ping`
//! verbs_peer ping PEER [--size 4096] [--count 10]
//!     is a client of rping -s, or of `verbs_peer serve`
//! ```
//! The client opens a buffer by a memory window and sends its address; the server reads it, says
//! so, and writes the data into another window, whose key comes with the client's next message.
//! With `--invalidate` the server's messages invalidate the window, otherwise the client does. Data
//! that does not come back is an error. A client whose queue pair is confined exposes buffers. With
//! `--trespass` the server reads behind the first buffer, which has to fail.
#![forbid(unsafe_code)]

use blockmux_verbs::connection::{Connection, ConnectionEvent, ConnectionOffer, Listener};
use blockmux_verbs::queue_pair::{Completion, QueuePair, QueueSizes, RemoteMemory, WindowAccess};
use blockmux_volume::{Memory, Seg};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsFd;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| match words.iter().position(|word| word == name) {
        Some(at) => words.get(at + 1).ok_or(USAGE)?.parse().map_err(Failure::from),
        None => Ok(default),
    };
    let address = SocketAddr::new(words.get(1).ok_or(USAGE)?.parse()?, PORT);
    let count = number("--count", 10)?;
    match words[0].as_str() {
        "serve" => {
            let is_given = |name| words.iter().any(|word| word == name);
            serve(address, count, is_given("--invalidate"), is_given("--trespass"))
        }
        "ping" => ping(address, count, number("--size", 4096)?),
        _ => Err(USAGE.into()),
    }
}

fn serve(address: SocketAddr, count: usize, invalidates: bool, trespasses: bool) -> Result<(), Failure> {
    let listener = Listener::bind(address)?;
    say("ready")?;
    let incoming = loop {
        match listener.accept()? {
            Some(incoming) => break incoming,
            None => wait(&[&listener])?,
        }
    };
    let (connection, request) = incoming.open();
    let queue_pair = QueuePair::new(connection, SIZES)?;
    let offer = ConnectionOffer { private_data: &[], reads: request.reads, peer_reads: request.peer_reads };
    queue_pair.connection().accept(offer)?;
    let mut peer = Peer::new(queue_pair);
    peer.until(|peer| peer.is_established)?;
    let whole = Memory::from_heap(MAX_LEN);
    for _ in 0..count {
        let (remote, len) = peer.buffer()?;
        let data = whole.seg(0, len);
        if trespasses {
            let behind = RemoteMemory { address: remote.address + MAX_LEN as u64, ..remote };
            return match peer.transfer(|queue_pair| queue_pair.read(TRANSFER, &[data], behind)) {
                Ok(()) => Err("memory behind the buffer could be read".into()),
                Err(why) => say(&format!("memory behind the buffer cannot be read: {why}")),
            };
        }
        // In two pieces, as scattered buffers are.
        let pieces = [data.slice(0, len / 2), data.slice(len / 2, len - len / 2)];
        peer.transfer(|queue_pair| queue_pair.read(TRANSFER, &pieces, remote))?;
        peer.send(&[0; MESSAGE_LEN], invalidates.then_some(remote.key))?;
        let (remote, _) = peer.buffer()?;
        peer.transfer(|queue_pair| queue_pair.write(TRANSFER, &pieces, remote))?;
        peer.send(&[0; MESSAGE_LEN], invalidates.then_some(remote.key))?;
    }
    peer.until(|peer| peer.has_ended)?;
    say(&format!("served {count} rounds"))
}

fn ping(address: SocketAddr, count: usize, len: usize) -> Result<(), Failure> {
    let connection = Connection::resolve(address)?;
    loop {
        match connection.next_event()? {
            Some(ConnectionEvent::RouteResolved) => break,
            Some(event) => return Err(format!("cannot connect: {event:?}").into()),
            None => wait(&[&connection])?,
        }
    }
    let queue_pair = QueuePair::new(connection, SIZES)?;
    let offer = ConnectionOffer { private_data: b"verbs_peer", reads: 1, peer_reads: 1 };
    queue_pair.connection().connect(offer)?;
    let mut peer = Peer::new(queue_pair);
    peer.until(|peer| peer.is_established)?;
    let mut remote_invalidations = 0;
    for round in 0..count {
        // Text that ends with a zero: rping writes back no more.
        let letter = |at: usize| if at + 1 == len { 0 } else { b'a' + ((at * 7 + round) % 26) as u8 };
        let data: Vec<u8> = (0..len).map(letter).collect();
        let (source, sink) = (Seg::from_slice(&data), Memory::from_heap(len).seg(0, len));
        for (memory, access) in [(&source, WindowAccess::Read), (&sink, WindowAccess::Write)] {
            let key = peer.open(memory, access)?;
            let mut message = (memory.as_ptr().addr() as u64).to_be_bytes().to_vec();
            message.extend(key.to_be_bytes());
            message.extend((len as u32).to_be_bytes());
            peer.send(&message, None)?;
            match peer.message()?.1 {
                Some(invalidated) if invalidated == key => remote_invalidations += 1,
                Some(other) => return Err(format!("{other:#x} was invalidated and not {key:#x}").into()),
                None if peer.is_confined => {}
                None => {
                    peer.is_closed = false;
                    peer.queue_pair.close(0)?;
                    peer.until(|peer| peer.is_closed)?;
                }
            }
            peer.queue_pair.conceal(0);
        }
        if sink.to_vec() != data {
            return Err(format!("round {round} came back with other data").into());
        }
    }
    peer.queue_pair.connection().disconnect()?;
    peer.until(|peer| peer.has_ended)?;
    say(&format!(
        "{count} rounds of {len} bytes came back, {remote_invalidations} windows invalidated by the peer"
    ))
}

/// A connection, and what has happened on it.
struct Peer {
    queue_pair: QueuePair,
    /// Messages, each with the key that it has invalidated.
    messages: VecDeque<(Vec<u8>, Option<u32>)>,
    done: usize,
    key: u32,
    is_confined: bool,
    is_established: bool,
    is_closed: bool,
    has_ended: bool,
}

impl Peer {
    fn new(queue_pair: QueuePair) -> Peer {
        let key = queue_pair.window_keys().next();
        Peer {
            is_confined: key.is_none(),
            queue_pair,
            messages: VecDeque::new(),
            done: 0,
            key: key.unwrap_or(0),
            is_established: false,
            is_closed: false,
            has_ended: false,
        }
    }

    /// Opens memory to the peer; returns its key.
    fn open(&mut self, memory: &Seg, access: WindowAccess) -> Result<u32, Failure> {
        if self.is_confined {
            return Ok(self.queue_pair.expose(0, memory)?);
        }
        // The low 8 bits are new with each use.
        self.key = self.key & !0xff | self.key.wrapping_add(1) & 0xff;
        self.queue_pair.bind(0, self.key, memory, access)?;
        Ok(self.key)
    }

    /// Sleeps until `is_so`, by file descriptors only.
    fn until(&mut self, is_so: impl Fn(&Peer) -> bool) -> Result<(), Failure> {
        loop {
            self.take()?;
            if is_so(self) {
                return Ok(());
            }
            if self.has_ended {
                return Err("the connection has ended".into());
            }
            self.queue_pair.notify()?;
            if !self.take()? {
                wait(&[self.queue_pair.connection(), &self.queue_pair.completion_fd()])?;
            }
        }
    }

    fn take(&mut self) -> Result<bool, Failure> {
        let Peer { queue_pair, messages, done, is_closed, key: current, .. } = self;
        let mut failure = None;
        let mut has_any = queue_pair.poll(|completion| match completion {
            Completion::Received { message, invalidated } => {
                messages.push_back((message.to_vec(), invalidated));
            }
            Completion::Done { result: Ok(()), .. } => *done += 1,
            Completion::Closed { key, .. } => (*is_closed, *current) = (true, key),
            Completion::Done { result: Err(why), .. } | Completion::Broken(why) => {
                failure.get_or_insert(why);
            }
        })?;
        while let Some(event) = queue_pair.connection().next_event()? {
            has_any = true;
            match event {
                ConnectionEvent::Established(_) => self.is_established = true,
                ConnectionEvent::Disconnected => self.has_ended = true,
                event => return Err(format!("{event:?}").into()),
            }
        }
        // Receive buffers are flushed when the connection ends.
        match failure {
            Some(why) if why != blockmux_verbs::queue_pair::WorkFailure::Flushed => {
                Err(format!("work has failed: {why:?}").into())
            }
            _ => Ok(has_any),
        }
    }

    fn transfer(
        &mut self,
        post: impl FnOnce(&mut QueuePair) -> Result<(), blockmux_verbs::error::VerbsError>,
    ) -> Result<(), Failure> {
        let before = self.done;
        post(&mut self.queue_pair)?;
        self.until(|peer| peer.done > before)
    }

    fn send(&mut self, message: &[u8], invalidate: Option<u32>) -> Result<(), Failure> {
        self.transfer(|queue_pair| queue_pair.send(TRANSFER, message, &[], invalidate, false))
    }

    fn message(&mut self) -> Result<(Vec<u8>, Option<u32>), Failure> {
        self.until(|peer| !peer.messages.is_empty())?;
        self.queue_pair.receive(1)?;
        Ok(self.messages.pop_front().ok_or("no message")?)
    }

    /// The buffer that a client opens.
    fn buffer(&mut self) -> Result<(RemoteMemory, usize), Failure> {
        let (message, _) = self.message()?;
        let (address, rest) = message.split_first_chunk().ok_or("a short message")?;
        let (key, rest) = rest.split_first_chunk().ok_or("a short message")?;
        let (len, _) = rest.split_first_chunk().ok_or("a short message")?;
        let len = u32::from_be_bytes(*len) as usize;
        if len > MAX_LEN {
            return Err("a buffer that is too long".into());
        }
        Ok((RemoteMemory { address: u64::from_be_bytes(*address), key: u32::from_be_bytes(*key) }, len))
    }
}

fn wait(descriptors: &[&dyn AsFd]) -> Result<(), Failure> {
    let mut polled: Vec<_> = descriptors
        .iter()
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN))
        .collect();
    poll(&mut polled, None)?;
    Ok(())
}

fn say(line: &str) -> Result<(), Failure> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// That of rping.
const PORT: u16 = 7174;
/// Address, key and length of a buffer.
const MESSAGE_LEN: usize = 16;
const MAX_LEN: usize = 1 << 20;
const SIZES: QueueSizes = QueueSizes { sends: 4, receives: 4, receive_len: 64, windows: 1 };
const TRANSFER: u64 = 1;
const USAGE: &str = "the top of crates/verbs/examples/verbs_peer.rs shows the usage";
