//! Front ends of a disk by vhost-user: those that make no sense, and the messages that programs of
//! others send, in their order.

mod back_ends;
mod fake_front_end;

use back_ends::{BackEnds, LONG};
use blockmux_engine::attach::AttachedDisk;
use blockmux_volume::{
    Channel, Completion, Core, Io, IoError, MemVolume, Op, Resize, Volume, VolumeInfo, Waker,
};
use blockmux_wire::virtio::Features;
use blockmux_wire::virtio::blk::Config;
use blockmux_wire::virtio::vhost_user::{
    BackendRequest, ConfigHeader, FrontendRequest, Inflight, MESSAGE_F_NEED_REPLY, MemoryRegion,
    MessageHeader, ProtocolFeatures, VringState,
};
use fake_front_end::{FrontEnd, Guest, MEMORY, QUEUE, SECTOR, memory_table, message};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// A front end with a guest, of which one virtqueue is served.
struct Connected {
    front_end: FrontEnd,
    guest: Guest,
}

impl Connected {
    fn to(path: &Path) -> Connected {
        let connected = Connected { front_end: FrontEnd::connect(path), guest: Guest::new() };
        let accepted = Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
        connected.front_end.tell(FrontendRequest::SET_FEATURES, accepted.bits().as_bytes());
        connected.share_memory();
        connected.begin_queue(QUEUE);
        connected
    }

    fn share_memory(&self) {
        self.front_end.tell_with(FrontendRequest::SET_MEM_TABLE, &memory_table(MEMORY), &self.guest.memory);
    }

    /// Describes the virtqueue, starts it and enables it.
    fn begin_queue(&self, size: u32) {
        begin_queue(&self.front_end, size);
    }
}

fn begin_queue(front_end: &FrontEnd, size: u32) {
    let state = |num| VringState { index: 0, num };
    front_end.tell(FrontendRequest::SET_VRING_NUM, state(size).as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_ADDR, Guest::place(0).as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_BASE, state(0).as_bytes());
    // Nobody notifies, so the back end looks at the ring by itself.
    let no_event = 1_u64 << 8;
    front_end.tell(FrontendRequest::SET_VRING_KICK, no_event.as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_ENABLE, state(1).as_bytes());
}

#[test]
fn a_front_end_that_makes_no_sense_is_disconnected_and_the_next_one_is_served() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let table = memory_table(1 << 20);
    for bytes in [
        message(FrontendRequest::GET_FEATURES, 2, &[]),
        message(FrontendRequest(77), 1, &[]),
        message(FrontendRequest::SET_FEATURES, 1, &u64::MAX.to_ne_bytes()),
        message(FrontendRequest::SET_MEM_TABLE, 1, &table),
        message(FrontendRequest::REM_MEM_REG, 1, &[0; 40]),
        message(FrontendRequest::SET_VRING_NUM, 1, &[0xff; 8]),
        message(FrontendRequest::SET_VRING_KICK, 1, &[0; 8]),
        vec![0xff; 4096],
    ] {
        let mut front_end = UnixStream::connect(back_ends.path("disk")).unwrap();
        front_end.write_all(&bytes).unwrap();
        // The end may be a reset, because not all was read.
        assert_eq!(front_end.read(&mut [0; 64]).unwrap_or(0), 0);
    }
    let mut front_end = UnixStream::connect(back_ends.path("disk")).unwrap();
    front_end.write_all(&message(FrontendRequest::GET_FEATURES, 1, &[])[..7]).unwrap();
    drop(front_end);
    assert_eq!(back_ends.open("disk", LONG).unwrap().info().size, 1 << 20);
}

#[test]
fn a_message_that_comes_in_pieces_is_handled_and_one_that_never_ends_holds_up_no_stop() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let disk = back_ends.attach("disk");
    let front_end = FrontEnd::connect(&back_ends.path("disk"));
    assert!(front_end.is_served());
    for byte in message(FrontendRequest::GET_FEATURES, 1, &[]) {
        (&front_end.socket).write_all(&[byte]).unwrap();
        std::thread::yield_now();
    }
    (&front_end.socket).read_exact(&mut [0; 20]).unwrap();
    (&front_end.socket).write_all(&message(FrontendRequest::SET_FEATURES, 1, &[0; 8])[..15]).unwrap();
    disk.leave();
    disk.detach().unwrap();
    assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap_or(0), 0);
}

#[test]
fn a_front_end_that_takes_its_memory_away_is_disconnected_and_the_next_one_is_served() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let Connected { front_end, guest } = Connected::to(&back_ends.path("disk"));
    assert!(front_end.is_served());
    guest.memory.set_len(0).unwrap();
    assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap(), 0);
    assert_eq!(back_ends.open("disk", LONG).unwrap().info().size, 1 << 20);
}

#[test]
fn a_queue_that_takes_requests_cannot_be_described_anew() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let state = |num| VringState { index: 0, num };
    for (request, payload) in [
        (FrontendRequest::SET_VRING_NUM, state(256).as_bytes()),
        (FrontendRequest::SET_VRING_ADDR, Guest::place(0).as_bytes()),
        (FrontendRequest::SET_VRING_BASE, state(7).as_bytes()),
    ] {
        let Connected { front_end, .. } = Connected::to(&back_ends.path("disk"));
        assert!(front_end.is_served());
        let ask = message(FrontendRequest::GET_FEATURES, 1, &[]);
        (&front_end.socket).write_all(&[message(request, 1, payload), ask].concat()).unwrap();
        // The end may be a reset, because not all was read.
        assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap_or(0), 0, "{request}");
    }
    // A queue that is disabled begins anew, as after a reset of the guest.
    let connected = Connected::to(&back_ends.path("disk"));
    let Connected { front_end, guest } = &connected;
    for size in [2 * QUEUE, QUEUE] {
        guest.request(0, 0, false, 0);
        while guest.answered(0) == 0 {
            assert!(front_end.is_served());
        }
        front_end.tell(FrontendRequest::SET_VRING_ENABLE, state(0).as_bytes());
        front_end.tell(FrontendRequest::SET_VRING_NUM, state(size).as_bytes());
        assert!(front_end.is_served());
        guest.reset(0);
        connected.share_memory();
        connected.begin_queue(size);
    }
    assert!(front_end.is_served());
}

/// A volume whose reads wait until they are let through.
struct HeldReads {
    below: MemVolume,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    /// Number of reads that have come.
    reads: AtomicUsize,
}

struct HeldChannel {
    below: Box<dyn Channel>,
    gate: Arc<Gate>,
    held: Vec<Io>,
    core: Rc<dyn Core>,
    waker: Waker,
}

impl Volume for HeldReads {
    fn info(&self) -> VolumeInfo {
        self.below.info()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let below = self.below.open(core, depth, waker.clone())?;
        let (gate, core) = (self.gate.clone(), core.clone());
        Ok(Box::new(HeldChannel { below, gate, held: Vec::new(), core, waker }))
    }
}

impl Channel for HeldChannel {
    fn submit(&mut self, io: Io) {
        if io.op == Op::Read {
            self.held.push(io);
            self.gate.reads.fetch_add(1, Ordering::Relaxed);
        } else {
            self.below.submit(io);
        }
    }

    fn kick(&mut self) {
        self.below.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.gate.is_open.load(Ordering::Relaxed) {
            self.held.drain(..).for_each(|io| self.below.submit(io));
            self.below.kick();
        } else if !self.held.is_empty() {
            self.core.wake_at(self.core.now() + Duration::from_millis(1), &self.waker);
        }
        self.below.poll(done);
    }
}

#[test]
fn a_disk_that_is_detached_by_force_keeps_its_front_end_until_the_memory_is_no_longer_written() {
    let gate = Arc::new(Gate::default());
    let below = MemVolume::new(1 << 20);
    let back_ends = BackEnds::of(Arc::new(HeldReads { below, gate: gate.clone() }));
    let disk = back_ends.attach("disk");
    let Connected { front_end, guest } = Connected::to(&back_ends.path("disk"));
    guest.request(0, 0, false, 0);
    while gate.reads.load(Ordering::Relaxed) == 0 {
        assert!(front_end.is_served());
    }
    disk.detach_by_force().unwrap();
    // Another back end listens, but the front end does not look for it.
    let _next = back_ends.attach("disk");
    front_end.socket.set_nonblocking(true).unwrap();
    let read = (&front_end.socket).read(&mut [0; 20]);
    assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock);
    gate.is_open.store(true, Ordering::Relaxed);
    front_end.socket.set_nonblocking(false).unwrap();
    assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap(), 0);
    assert_eq!(guest.answered(0), 0);
}

/// A volume of 1 MiB that may become larger.
fn growing() -> Arc<MemVolume> {
    let pages = blockmux_engine::sys::memory::map_pages(4 << 20).unwrap();
    Arc::new(MemVolume::within(pages, 1 << 20, blockmux_volume::BlockSizes::default()))
}

/// A front end that a back end may send requests to, as QEMU.
struct Notified {
    front_end: FrontEnd,
    guest: Guest,
    requests: UnixStream,
}

impl Notified {
    fn connect(path: &Path) -> Notified {
        let (front_end, guest) = (FrontEnd::connect(path), Guest::new());
        let (requests, of_back_end) = UnixStream::pair().unwrap();
        let accepted = Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
        let protocol = ProtocolFeatures::CONFIG | ProtocolFeatures::BACKEND_REQ;
        front_end.tell(FrontendRequest::SET_PROTOCOL_FEATURES, protocol.bits().as_bytes());
        front_end.tell_with(FrontendRequest::SET_BACKEND_REQ_FD, &[], of_back_end);
        front_end.tell(FrontendRequest::SET_FEATURES, accepted.bits().as_bytes());
        front_end.tell_with(FrontendRequest::SET_MEM_TABLE, &memory_table(MEMORY), &guest.memory);
        Notified { front_end, guest, requests }
    }

    fn capacity(&self) -> u64 {
        let asked = ConfigHeader { offset: 0, size: size_of::<Config>() as u32, flags: 0 };
        let payload = [asked.as_bytes(), Config::default().as_bytes()].concat();
        let (answer, _) = self.front_end.ask(FrontendRequest::GET_CONFIG, &payload);
        let config = Config::read_from_bytes(&answer[size_of::<ConfigHeader>()..]).unwrap();
        config.capacity.get() * SECTOR
    }

    /// Waits until the back end says that the configuration has changed.
    fn wait_for_change(&self) {
        let mut head = [0; size_of::<MessageHeader>()];
        (&self.requests).read_exact(&mut head).unwrap();
        let header = MessageHeader::read_from_bytes(&head).unwrap();
        assert_eq!((header.request, header.size), (BackendRequest::CONFIG_CHANGE_MSG.0, 0));
    }

    /// Whether the back end has said nothing when it has handled all messages.
    fn is_told_nothing(&self) -> bool {
        assert!(self.front_end.is_served());
        self.requests.set_nonblocking(true).unwrap();
        let read = (&self.requests).read(&mut [0; 1]);
        self.requests.set_nonblocking(false).unwrap();
        read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

#[test]
fn a_front_end_is_told_of_a_size_that_changed_while_it_was_disconnected() {
    let back_ends = BackEnds::of(growing());
    let _disk = back_ends.attach("disk");
    let (volume, _) = back_ends.exports.find("disk").unwrap();
    let volume_state = back_ends.exports.volume_state(volume).unwrap();
    let first = Notified::connect(&back_ends.path("disk"));
    assert_eq!(first.capacity(), 1 << 20);
    begin_queue(&first.front_end, QUEUE);
    assert!(first.is_told_nothing(), "it has read the size");
    drop(first);
    volume_state.resize(Resize::grow(2 << 20)).unwrap();
    // It keeps the configuration that it has read on its first connection.
    let again = Notified::connect(&back_ends.path("disk"));
    assert!(again.is_told_nothing(), "no queue is served");
    begin_queue(&again.front_end, QUEUE);
    again.wait_for_change();
    assert_eq!(again.capacity(), 2 << 20);
    again.guest.request(0, 0, false, (2 << 20) / SECTOR - 1);
    while again.guest.answered(0) == 0 {
        assert!(again.is_told_nothing(), "it was told once");
    }
}

#[test]
fn a_front_end_is_told_of_a_size_that_changes_between_its_connection_and_its_first_queue() {
    let back_ends = BackEnds::of(growing());
    let _disk = back_ends.attach("disk");
    let (volume, _) = back_ends.exports.find("disk").unwrap();
    let volume_state = back_ends.exports.volume_state(volume).unwrap();
    let connected = Notified::connect(&back_ends.path("disk"));
    assert_eq!(connected.capacity(), 1 << 20);
    volume_state.resize(Resize::grow(2 << 20)).unwrap();
    assert!(connected.is_told_nothing(), "it would ignore it");
    begin_queue(&connected.front_end, QUEUE);
    connected.wait_for_change();
    assert_eq!(connected.capacity(), 2 << 20);
    volume_state.resize(Resize::grow(3 << 20)).unwrap();
    connected.wait_for_change();
    assert_eq!(connected.capacity(), 3 << 20);
    assert!(connected.is_told_nothing());
}

/// What cloud-hypervisor 53 sends for `--disk vhost_user=true,socket=PATH,num_queues=2`, as its
/// `virtio-devices/src/vhost_user/blk.rs` and `vu_common_ctrl.rs` say. It has no requests of the
/// back end, and waits for an acknowledgement of each message once that is agreed on.
struct CloudHypervisor {
    front_end: FrontEnd,
    guest: Guest,
    /// Features that the guest's driver has accepted.
    accepted: Features,
    protocol: ProtocolFeatures,
    /// The record of requests in flight, which outlives connections.
    record: Option<(Inflight, OwnedFd)>,
    kicks: [OwnedFd; QUEUES as usize],
    calls: [OwnedFd; QUEUES as usize],
}

impl CloudHypervisor {
    /// Connects, and asks what the device is, which it keeps.
    fn new(path: &Path) -> (CloudHypervisor, Config) {
        const WRITABLE: u32 = 1;
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (mut front_end, offered) = CloudHypervisor::connect(path);
        let found = front_end.ask_number(FrontendRequest::GET_PROTOCOL_FEATURES);
        let protocol = ProtocolFeatures::from_bits_truncate(found & CLOUD_HYPERVISOR_PROTOCOL);
        front_end.tell(FrontendRequest::SET_PROTOCOL_FEATURES, protocol.bits().as_bytes());
        // Also on requests that have a reply anyway.
        front_end.flags = MESSAGE_F_NEED_REPLY;
        assert!(front_end.ask_number(FrontendRequest::GET_QUEUE_NUM) >= u64::from(QUEUES));
        let asked = ConfigHeader { offset: 0, size: size_of::<Config>() as u32, flags: WRITABLE };
        let payload = [asked.as_bytes(), Config::default().as_bytes()].concat();
        let (answer, _) = front_end.ask(FrontendRequest::GET_CONFIG, &payload);
        let (header, config) = ConfigHeader::read_from_prefix(&answer).unwrap();
        assert_eq!((header.offset, header.size as usize), (0, config.len()));
        let config = Config::read_from_bytes(config).unwrap();
        let own = CloudHypervisor {
            front_end,
            guest: Guest::new(),
            accepted: Features::from_bits_truncate(offered) & DRIVER,
            protocol,
            record: None,
            kicks: [event(), event()],
            calls: [event(), event()],
        };
        (own, config)
    }

    fn connect(path: &Path) -> (FrontEnd, u64) {
        let front_end = FrontEnd::connect(path);
        front_end.tell(FrontendRequest::SET_OWNER, &[]);
        let offered = front_end.ask_number(FrontendRequest::GET_FEATURES);
        (front_end, offered)
    }

    /// Connects to the next back end, with what the last one has agreed on.
    fn reconnect(&mut self, path: &Path) {
        (self.front_end, _) = CloudHypervisor::connect(path);
        self.front_end.tell(FrontendRequest::SET_PROTOCOL_FEATURES, self.protocol.bits().as_bytes());
        self.front_end.flags = MESSAGE_F_NEED_REPLY;
        self.activate();
    }

    /// The guest's driver begins with the device, or a back end goes on with it.
    fn activate(&mut self) {
        let tell = |request, payload: &[u8]| self.front_end.have_acknowledged(request, payload, None);
        tell(FrontendRequest::SET_FEATURES, self.accepted.bits().as_bytes());
        let memory = Some(self.guest.memory.as_fd());
        self.front_end.have_acknowledged(FrontendRequest::SET_MEM_TABLE, &memory_table(MEMORY), memory);
        for index in 0..QUEUES {
            tell(FrontendRequest::SET_VRING_NUM, VringState { index, num: QUEUE }.as_bytes());
        }
        if self.record.is_none() {
            let (num_queues, queue_size) = (QUEUES as u16, QUEUE as u16);
            let wanted = Inflight { num_queues, queue_size, ..Inflight::default() };
            let (answer, file) = self.front_end.ask(FrontendRequest::GET_INFLIGHT_FD, wanted.as_bytes());
            self.record = Some((Inflight::read_from_bytes(&answer).unwrap(), file.unwrap()));
        }
        let (record, file) = self.record.as_ref().unwrap();
        assert!(record.mmap_size > 0);
        let file = Some(file.as_fd());
        self.front_end.have_acknowledged(FrontendRequest::SET_INFLIGHT_FD, record.as_bytes(), file);
        for (index, (kick, call)) in (0..).zip(self.kicks.iter().zip(&self.calls)) {
            tell(FrontendRequest::SET_VRING_ADDR, Guest::place(index).as_bytes());
            // Also requests that no back end has fetched are before it.
            let num = self.guest.available(index).into();
            tell(FrontendRequest::SET_VRING_BASE, VringState { index, num }.as_bytes());
            for (request, event) in
                [(FrontendRequest::SET_VRING_CALL, call), (FrontendRequest::SET_VRING_KICK, kick)]
            {
                let number = u64::from(index);
                self.front_end.have_acknowledged(request, number.as_bytes(), Some(event.as_fd()));
            }
        }
        self.enable(true);
    }

    /// Pauses all virtqueues, or resumes them.
    fn enable(&self, is_enabled: bool) {
        for index in 0..QUEUES {
            let state = VringState { index, num: is_enabled.into() };
            self.front_end.have_acknowledged(FrontendRequest::SET_VRING_ENABLE, state.as_bytes(), None);
        }
    }

    /// The guest resets the device: as cloud-hypervisor 53 does, which asks where each queue has
    /// stopped, or as earlier ones. It forgets the record.
    fn reset(&mut self, asks_for_base: bool) {
        for index in 0..QUEUES {
            let state = VringState { index, num: 0 };
            self.front_end.have_acknowledged(FrontendRequest::SET_VRING_ENABLE, state.as_bytes(), None);
            if asks_for_base {
                let (answer, _) = self.front_end.ask(FrontendRequest::GET_VRING_BASE, state.as_bytes());
                let stopped = VringState::read_from_bytes(&answer).unwrap();
                assert_eq!(stopped, VringState { index, num: self.guest.available(index).into() });
            }
        }
        (0..QUEUES).for_each(|queue| self.guest.reset(queue));
        self.record = None;
    }

    /// Makes a request available and notifies the back end.
    fn request(&self, queue: u32, nth: u16, writes: bool, sector: u64) {
        self.guest.request(queue, nth, writes, sector);
        rustix::io::write(&self.kicks[queue as usize], &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits until so many requests of a virtqueue are answered.
    fn wait_for_answers(&self, queue: u32, count: u16) {
        while self.guest.answered(queue) < count {
            let call = &self.calls[queue as usize];
            poll(&mut [PollFd::new(call, PollFlags::IN)], None).unwrap();
            // The back end has made it one that does not block.
            let _ = rustix::io::read(call, &mut [0; 8]);
        }
        assert_eq!(self.guest.answered(queue), count);
        for nth in 0..count {
            assert_eq!(self.guest.status(queue, nth), 0, "request {nth} of virtqueue {queue}");
        }
    }

    /// Writes a sector by one virtqueue, and reads it by the other, with the next request of each.
    fn write_and_read(&self, nth: u16, sector: u64, byte: u8) {
        let (written, mut read) = ([byte; SECTOR as usize], [0; SECTOR as usize]);
        self.guest.memory.write_all_at(&written, Guest::data(0, nth)).unwrap();
        self.request(0, nth, true, sector);
        self.wait_for_answers(0, nth + 1);
        self.request(1, nth, false, sector);
        self.wait_for_answers(1, nth + 1);
        self.guest.memory.read_exact_at(&mut read, Guest::data(1, nth)).unwrap();
        assert_eq!(read, written);
    }
}

/// Virtqueues of a guest.
const QUEUES: u32 = 2;
/// Features that a driver of Linux accepts, without the event index.
const DRIVER: Features = Features::VERSION_1
    .union(Features::VHOST_USER_PROTOCOL_FEATURES)
    .union(Features::BLK_MQ)
    .union(Features::BLK_FLUSH)
    .union(Features::BLK_SEG_MAX);
/// CONFIG, MQ, CONFIGURE_MEM_SLOTS, REPLY_ACK, INFLIGHT_SHMFD, LOG_SHMFD and DEVICE_STATE.
const CLOUD_HYPERVISOR_PROTOCOL: u64 = 1 << 9 | 1 << 0 | 1 << 15 | 1 << 3 | 1 << 12 | 1 << 1 | 1 << 19;

#[test]
fn cloud_hypervisor_starts_pauses_and_resets_a_disk() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (mut hypervisor, config) = CloudHypervisor::new(&back_ends.path("disk"));
    assert_eq!(config.capacity.get() * SECTOR, 1 << 20);
    let needed = ProtocolFeatures::CONFIG | ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK;
    let kept = ProtocolFeatures::CONFIGURE_MEM_SLOTS | ProtocolFeatures::INFLIGHT_SHMFD;
    assert_eq!(hypervisor.protocol, needed | kept);
    assert!(hypervisor.accepted.contains(Features::BLK_MQ), "it has several virtqueues");
    hypervisor.activate();
    hypervisor.write_and_read(0, 7, 0xa5);
    hypervisor.enable(false);
    hypervisor.request(0, 1, false, 7);
    assert!(hypervisor.front_end.is_served());
    assert_eq!(hypervisor.guest.answered(0), 1, "it is paused");
    hypervisor.enable(true);
    hypervisor.wait_for_answers(0, 2);
    for asks_for_base in [true, false] {
        hypervisor.reset(asks_for_base);
        hypervisor.activate();
        hypervisor.write_and_read(0, 8, 0x5a + u8::from(asks_for_base));
    }
}

#[test]
fn cloud_hypervisor_adds_memory_to_its_guest() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (mut hypervisor, _) = CloudHypervisor::new(&back_ends.path("disk"));
    hypervisor.activate();
    let more = Guest::new();
    let region = MemoryRegion { guest_addr: MEMORY, size: MEMORY, user_addr: MEMORY, mmap_offset: 0 };
    let payload = [0_u64.as_bytes(), region.as_bytes()].concat();
    let file = Some(more.memory.as_fd());
    hypervisor.front_end.have_acknowledged(FrontendRequest::ADD_MEM_REG, &payload, file);
    more.memory.write_all_at(&[0xc3; SECTOR as usize], 0).unwrap();
    hypervisor.guest.request_with(0, 0, true, 3, MEMORY);
    rustix::io::write(&hypervisor.kicks[0], &1_u64.to_ne_bytes()).unwrap();
    hypervisor.wait_for_answers(0, 1);
    let mut read = [0; SECTOR as usize];
    hypervisor.request(1, 0, false, 3);
    hypervisor.wait_for_answers(1, 1);
    hypervisor.guest.memory.read_exact_at(&mut read, Guest::data(1, 0)).unwrap();
    assert_eq!(read, [0xc3; SECTOR as usize]);
}

/// It says that a virtqueue continues behind all requests of the guest, also those that no back end
/// has fetched.
#[test]
fn cloud_hypervisor_connects_again_and_no_request_is_lost() {
    let gate = Arc::new(Gate::default());
    let back_ends = BackEnds::of(Arc::new(HeldReads { below: MemVolume::new(1 << 20), gate: gate.clone() }));
    let disk = back_ends.attach("disk");
    let (mut hypervisor, _) = CloudHypervisor::new(&back_ends.path("disk"));
    hypervisor.activate();
    hypervisor.request(0, 0, true, 7);
    hypervisor.wait_for_answers(0, 1);
    hypervisor.request(0, 1, false, 7);
    while gate.reads.load(Ordering::Relaxed) == 0 {
        assert!(hypervisor.front_end.is_served());
    }
    disk.detach_by_force().unwrap();
    // Nobody fetches this one.
    hypervisor.request(0, 2, false, 7);
    gate.is_open.store(true, Ordering::Relaxed);
    assert_eq!((&hypervisor.front_end.socket).read(&mut [0; 20]).unwrap(), 0);
    assert_eq!(hypervisor.guest.answered(0), 1);
    let _next = back_ends.attach("disk");
    hypervisor.reconnect(&back_ends.path("disk"));
    hypervisor.wait_for_answers(0, 3);
    assert_eq!(gate.reads.load(Ordering::Relaxed), 3, "the read in flight was executed again");
}
