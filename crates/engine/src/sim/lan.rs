//! A simulated Ethernet segment, which loses, duplicates and delays frames.

use super::core::SimCore;
use super::net::{SimNet, SimWatch};
use crate::net::frames::{FrameHost, FramePort, QueueId, ReceivedFrame, Side};
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::driver::frames::Mac;
use blockmux_proto::driver::frames::{FrameOutbox, FramePortInfo, PortId};
use blockmux_volume::{Chunk, Waker};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Properties of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanConditions {
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub mtu: u32,
    /// Longest one-way delay; each frame draws its own, so frames are reordered.
    pub delay: Duration,
    /// How many of a thousand frames are lost.
    pub losses_per_thousand: u32,
    /// How many of a thousand frames are duplicated.
    pub doubles_per_thousand: u32,
    /// How many of a thousand frames are late, by up to [`LATEST`].
    pub late_per_thousand: u32,
    /// Receive buffers of a port, in frames; further frames are lost.
    pub buffers: u32,
}

impl LanConditions {
    /// A segment without faults.
    pub const FAIR: LanConditions = LanConditions {
        mtu: 9000,
        delay: Duration::from_micros(20),
        losses_per_thousand: 0,
        doubles_per_thousand: 0,
        late_per_thousand: 0,
        buffers: 64,
    };
}

/// Longest delay of a late frame.
pub const LATEST: Duration = Duration::from_millis(200);

/// The segment; a clone is another handle to it.
#[derive(Clone)]
pub struct SimLan(Rc<EthernetSegment>);

struct EthernetSegment {
    conditions: LanConditions,
    ports: RefCell<Vec<Rc<Station>>>,
    made: Cell<u32>,
    sent: Cell<u64>,
}

struct Station {
    mac: Mac,
    is_up: Cell<bool>,
    /// Arrival, sender and bytes of frames in flight and waiting.
    queue: RefCell<Vec<(Instant, Mac, Vec<u8>)>>,
    reader: RefCell<Option<Waker>>,
}

/// A core's port on the segment.
pub struct SimPort {
    net: SimNet,
    lan: SimLan,
    station: Rc<Station>,
}

impl SimLan {
    /// A segment without ports.
    #[must_use]
    pub fn new(conditions: LanConditions) -> SimLan {
        let (ports, made, sent) = (RefCell::default(), Cell::new(0), Cell::new(0));
        SimLan(Rc::new(EthernetSegment { conditions, ports, made, sent }))
    }

    /// Frames sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.0.sent.get()
    }

    /// Sets the link of all ports up or down.
    pub fn set_up(&self, is_up: bool) {
        self.0.ports.borrow().iter().for_each(|station| station.is_up.set(is_up));
    }

    fn join(&self, net: &SimNet) -> SimPort {
        let number = self.0.made.get() + 1;
        self.0.made.set(number);
        let [a, b, c, d] = number.to_be_bytes();
        let station = Rc::new(Station {
            mac: Mac([2, 0, a, b, c, d]),
            is_up: Cell::new(true),
            queue: RefCell::default(),
            reader: RefCell::default(),
        });
        self.0.ports.borrow_mut().push(station.clone());
        SimPort { net: net.clone(), lan: self.clone(), station }
    }
}

impl SimPort {
    fn deliver(&self, to: &Station, bytes: &[u8]) {
        let (conditions, chance) =
            (self.lan.0.conditions, |per_thousand: u32| self.net.below(1000) < u64::from(per_thousand));
        if chance(conditions.losses_per_thousand) || !to.is_up.get() {
            return;
        }
        for _ in 0..1 + u32::from(chance(conditions.doubles_per_thousand)) {
            let mut arrives = self.net.now() + self.net.up_to(conditions.delay);
            if chance(conditions.late_per_thousand) {
                arrives += self.net.up_to(LATEST);
            }
            let now = self.net.now();
            let mut queue = to.queue.borrow_mut();
            if queue.iter().filter(|(arrived, ..)| *arrived <= now).count() >= conditions.buffers as usize {
                return;
            }
            queue.push((arrives, self.station.mac, bytes.to_vec()));
            if let Some(reader) = &*to.reader.borrow() {
                self.net.wake_at(arrives, reader);
            }
        }
    }
}

impl FrameHost for SimCore {
    type Port = SimPort;

    /// All interface names lead to the segment that the core is attached to.
    fn open_port(&self, _interface: &str, _side: Side) -> io::Result<SimPort> {
        let lan = self.lan().ok_or(io::ErrorKind::NotFound)?;
        Ok(lan.join(self.net()))
    }

    /// Each port is a station of its own.
    fn queue_id(&self, _disk: AoeAddress) -> io::Result<QueueId> {
        Ok(QueueId::ALONE)
    }
}

impl FramePort for SimPort {
    type Watch = SimWatch;

    fn query_info(&mut self) -> io::Result<FramePortInfo> {
        let LanConditions { mtu, buffers, .. } = self.lan.0.conditions;
        Ok(FramePortInfo { mac: self.station.mac, mtu, buffers, is_up: self.station.is_up.get() })
    }

    fn stride(&self) -> usize {
        self.lan.0.conditions.mtu as usize
    }

    fn receive(&mut self, chunk: &mut Chunk, arrivals: &mut Vec<ReceivedFrame>) -> io::Result<()> {
        let (now, stride, mut any) = (self.net.now(), self.stride(), false);
        let mut queue = self.station.queue.borrow_mut();
        queue.sort_by_key(|(arrives, ..)| *arrives);
        while chunk.room() >= stride && queue.first().is_some_and(|(arrives, ..)| *arrives <= now) {
            let (_, mac, bytes) = queue.remove(0);
            chunk.spare()[..bytes.len()].copy_from_slice(&bytes);
            chunk.fill(stride);
            arrivals.push(ReceivedFrame { mac, len: bytes.len() });
            any = true;
        }
        if any { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn send(&mut self, id: PortId, outbox: &mut FrameOutbox) -> io::Result<usize> {
        if !self.station.is_up.get() {
            return Err(io::Error::from_raw_os_error(libc::ENETDOWN));
        }
        let mut sent = 0;
        while outbox.front().is_some_and(|frame| frame.to.port == id)
            && let Some(frame) = outbox.pop_front()
        {
            let bytes = frame.to_vec();
            let ports = self.lan.0.ports.borrow();
            let is_other = |station: &&Rc<Station>| !Rc::ptr_eq(station, &self.station);
            for station in ports.iter().filter(is_other) {
                if frame.to.mac == station.mac || frame.to.mac == Mac::BROADCAST {
                    self.deliver(station, &bytes);
                }
            }
            sent += 1;
        }
        self.lan.0.sent.set(self.lan.0.sent.get() + sent as u64);
        Ok(sent)
    }

    fn wake_when_readable(&self, watch: &SimWatch) {
        *self.station.reader.borrow_mut() = Some(watch.waker().clone());
        let next = self.station.queue.borrow().iter().map(|(arrives, ..)| *arrives).min();
        if let Some(when) = next {
            self.net.wake_at(when, watch.waker());
        }
    }

    fn wake_when_writable(&self, watch: &SimWatch) {
        watch.waker().wake();
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        self.lan.0.ports.borrow_mut().retain(|station| !Rc::ptr_eq(station, &self.station));
    }
}
