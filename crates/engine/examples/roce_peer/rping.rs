//! Both sides of `rping`, librdmacm's example. Each ping is:
//!
//! ```text
//!   client                                                server
//!     Send: where the data is          ──▶
//!                                      ◀── RDMA Read of the data
//!                                      ◀── Send: go ahead
//!     Send: where to write it          ──▶
//!                                      ◀── RDMA Write of the same data
//!                                      ◀── Send: go ahead
//! ```
//! All messages have 16 bytes: address, R_Key and length, which mean nothing in "go ahead".

use super::udp_port::Application;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, Remote, RemoteRights, Stag, WorkId};
use blockmux_rdma::roce::Roce;
use blockmux_volume::{Memory, Seg, SgList};

/// The port of rping unless it is told another.
pub(crate) const PORT: u16 = 7174;

/// The side that reads and writes.
pub(crate) struct RpingServer {
    receives: u32,
    /// What the last ping has brought.
    data: SgList,
    awaits: ServerAwaits,
    pings: u64,
    bytes: u64,
}

/// What the server waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerAwaits {
    Source,
    ReadData,
    Sink,
    WrittenData,
}

impl RpingServer {
    pub(crate) fn new(receives: u32) -> RpingServer {
        RpingServer { receives, data: SgList::default(), awaits: ServerAwaits::Source, pings: 0, bytes: 0 }
    }
}

impl Application for RpingServer {
    fn endpoint(&self) -> Endpoint {
        endpoint(self.receives)
    }

    fn on_event(&mut self, event: Event, queue_pair: &mut Roce) -> Result<(), String> {
        match (event, self.awaits) {
            (Event::Requested { .. }, _) => queue_pair.accept(Vec::new()),
            (Event::Received { message, .. }, ServerAwaits::Source) => {
                queue_pair.receive(1);
                let source = parse(&message)?;
                let len = source.len as usize;
                self.data = SgList::one(Memory::from_heap(len).seg(0, len));
                queue_pair.read(DATA, self.data.clone(), source);
                self.awaits = ServerAwaits::ReadData;
            }
            (Event::Done { id: DATA, result }, ServerAwaits::ReadData) => {
                result.map_err(|error| format!("read: {error}"))?;
                queue_pair.send(&GO_AHEAD, &SgList::default(), None);
                self.awaits = ServerAwaits::Sink;
            }
            (Event::Received { message, .. }, ServerAwaits::Sink) => {
                queue_pair.receive(1);
                queue_pair.write(DATA, self.data.clone(), parse(&message)?);
                self.awaits = ServerAwaits::WrittenData;
            }
            (Event::Done { id: DATA, result }, ServerAwaits::WrittenData) => {
                result.map_err(|error| format!("write: {error}"))?;
                queue_pair.send(&GO_AHEAD, &SgList::default(), None);
                self.awaits = ServerAwaits::Source;
                (self.pings, self.bytes) = (self.pings + 1, self.bytes + self.data.len() as u64);
            }
            (Event::Connected { .. } | Event::Done { .. } | Event::Disconnected, _) => {}
            (event, awaits) => return Err(format!("{event:?} while awaiting {awaits:?}")),
        }
        Ok(())
    }

    fn result(&self) -> Result<String, String> {
        match self.awaits {
            ServerAwaits::Source => Ok(format!("{} pings with {} bytes", self.pings, self.bytes)),
            awaits => Err(format!("ended while awaiting {awaits:?}")),
        }
    }
}

/// The side whose memory is read and written.
pub(crate) struct RpingClient {
    source: Seg,
    sink: Seg,
    /// Where the server finds both.
    exposed: Option<[Remote; 2]>,
    has_been_read: bool,
    pings: u32,
    count: u32,
}

impl RpingClient {
    pub(crate) fn new(size: usize, count: u32) -> RpingClient {
        let [source, sink] = [(); 2].map(|()| Memory::from_heap(size).seg(0, size));
        RpingClient { source, sink, exposed: None, has_been_read: false, pings: 0, count }
    }

    /// Begins the next ping, or ends the connection.
    fn ping(&mut self, queue_pair: &mut Roce) {
        if self.pings == self.count {
            return queue_pair.disconnect();
        }
        // Without a zero before the end, since rping writes back a string.
        let byte = |at: usize| (at as u32 * 7 + self.pings * 13) as u8 | 1;
        let mut data: Vec<u8> = (0..self.source.len()).map(byte).collect();
        if let Some(last) = data.last_mut() {
            *last = 0;
        }
        self.source.copy_from(&data);
        self.sink.fill_zero();
        self.has_been_read = false;
        self.tell(0, queue_pair);
    }

    /// Tells the server where the source is, or the sink.
    fn tell(&self, which: usize, queue_pair: &mut Roce) {
        if let Some(exposed) = &self.exposed {
            queue_pair.send(&message(exposed[which]), &SgList::default(), None);
        }
    }
}

impl Application for RpingClient {
    fn endpoint(&self) -> Endpoint {
        endpoint(4)
    }

    fn on_event(&mut self, event: Event, queue_pair: &mut Roce) -> Result<(), String> {
        match event {
            Event::Connected { .. } => {
                let mut expose = |memory: &Seg, rights| {
                    let remote = queue_pair.register(DATA, &mut SgList::one(memory.clone()), rights);
                    remote.ok_or("cannot register memory")
                };
                self.exposed = Some([
                    expose(&self.source, RemoteRights::RemoteRead)?,
                    expose(&self.sink, RemoteRights::RemoteWrite)?,
                ]);
                self.ping(queue_pair);
            }
            Event::Received { .. } => {
                queue_pair.receive(1);
                if !self.has_been_read {
                    self.has_been_read = true;
                    self.tell(1, queue_pair);
                } else if self.source.to_vec() == self.sink.to_vec() {
                    self.pings += 1;
                    self.ping(queue_pair);
                } else {
                    queue_pair.disconnect();
                    return Err(format!("ping {} came back with other data", self.pings));
                }
            }
            Event::Done { result, .. } => result.map_err(|error| format!("send: {error}"))?,
            _ => {}
        }
        Ok(())
    }

    fn result(&self) -> Result<String, String> {
        let done = format!("{} of {} pings with {} bytes each", self.pings, self.count, self.source.len());
        if self.pings == self.count { Ok(done) } else { Err(done) }
    }
}

fn endpoint(receives: u32) -> Endpoint {
    Endpoint {
        receives,
        receive_len: MESSAGE_LEN as u32,
        sends: 16,
        reads: 1,
        regions: 2,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

fn parse(message: &Seg) -> Result<Remote, String> {
    let bytes = message.to_vec();
    let message: &[u8; MESSAGE_LEN] =
        bytes.as_slice().try_into().map_err(|_| format!("a message of {} bytes", bytes.len()))?;
    let number = |from: usize, to: usize| {
        message[from..to].iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    Ok(Remote { address: number(0, 8), stag: Stag(number(8, 12) as u32), len: number(12, 16) as u32 })
}

fn message(remote: Remote) -> Vec<u8> {
    [&remote.address.to_be_bytes()[..], &remote.stag.0.to_be_bytes(), &remote.len.to_be_bytes()].concat()
}

const MESSAGE_LEN: usize = 16;
const GO_AHEAD: [u8; MESSAGE_LEN] = [0; MESSAGE_LEN];
/// The read or write of a ping.
const DATA: WorkId = WorkId(1);
