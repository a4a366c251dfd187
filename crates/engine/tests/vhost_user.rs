//! A vhost-user volume over a disk of ours: the volume conformance suite, and what happens when the
//! back end restarts, does not come back, or has a new size.

mod conforms;
mod fake_back_end;

use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::attach::{AttachedDisk, DetachError, DiskOptions};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::{PollPolicy, Reactor};
use blockmux_engine::volume::file::{FileOptions, FileVolume};
use blockmux_engine::volume::vhost_user::{BackEndError, VhostUserOptions, VhostUserVolume};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Op, Output, ReadyList, Resize,
    Seg, SgList, Tag, Volume, VolumeInfo, Waker,
};
use blockmux_wire::virtio::Features;
use blockmux_wire::virtio::ring::{Desc, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use blockmux_wire::virtio::vhost_user::{
    FrontendRequest, MemoryRegion, MemoryTableHeader, MessageHeader, VringAddr, VringState,
};
use conforms::{conforms, disk_and_frozen};
use fake_back_end::{FakeBackEnd, Reaction};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, connect, listen, sendmsg, socket_with,
};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

/// Disks of one volume at two sockets, the second one read-only.
struct BackEnds {
    cores: Cores,
    exports: Exports,
    folder: TempDir,
}

impl BackEnds {
    fn of(volume: Arc<dyn Volume>) -> BackEnds {
        let config = CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() };
        BackEnds {
            cores: Cores::start(&config).unwrap(),
            exports: disk_and_frozen(&volume),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn attach(&self, name: &str) -> VhostUserDisk {
        let (volume, _) = self.exports.find(name).unwrap();
        self.attach_volume(volume, name)
    }

    fn attach_volume(&self, volume: VolumeId, name: &str) -> VhostUserDisk {
        let options = DiskOptions {
            queues: 1,
            depth: 128,
            data: None,
            read_only: false,
            name: None,
            io: OwnIo::default(),
        };
        VhostUserDisk::attach(&self.cores, &self.exports, volume, options, &self.path(name)).unwrap()
    }

    fn open(&self, name: &str, reconnect_timeout: Duration) -> Result<VhostUserVolume, BackEndError> {
        VhostUserVolume::open(&self.path(name), options(reconnect_timeout))
    }
}

fn options(reconnect_timeout: Duration) -> VhostUserOptions {
    VhostUserOptions { read_only: false, reconnect_timeout, request_timeout: None }
}

fn conforms_over_vhost_user(volume: Arc<dyn Volume>) {
    let back_ends = BackEnds::of(volume);
    let disks = ["disk", "frozen"].map(|name| back_ends.attach(name));
    let open = |name| Arc::new(back_ends.open(name, LONG).unwrap());
    conforms(open("disk"), Some(open("frozen")));
    disks.iter().for_each(end);
}

/// Ends a disk whose front end may not have disconnected yet.
fn end(disk: &VhostUserDisk) {
    disk.leave();
    disk.detach().unwrap();
}

#[test]
fn a_ram_volume_conforms_over_vhost_user() {
    conforms_over_vhost_user(Arc::new(MemVolume::new(40 << 20)));
}

#[test]
fn a_file_conforms_over_vhost_user() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions { size: Some(40 << 20), create: true, ..FileOptions::default() };
    let file = FileVolume::open(folder.path().join("disk"), options).unwrap();
    conforms_over_vhost_user(Arc::new(file));
}

/// A user of a volume on a core of its own thread.
struct User {
    reactor: Reactor,
    core: Rc<dyn Core>,
    channel: Box<dyn Channel>,
}

impl User {
    fn of(volume: &dyn Volume) -> User {
        let (reactor, _) = Reactor::new(PollPolicy::Never, 64 << 20).unwrap();
        let core: Rc<dyn Core> = reactor.core().clone();
        let channel = volume.open(&core, 8, Waker::idle()).unwrap();
        User { reactor, core, channel }
    }

    fn submit(&mut self, tag: u64, op: Op, offset: u64, data: &[u8]) {
        let memory = SgList::one(Seg::from_slice(data));
        let io = Io { tag: Tag(tag), op, offset, len: data.len() as u64, data: Some(memory) };
        self.channel.submit(io);
        self.channel.kick();
    }

    fn turn(&mut self) {
        self.core.wake_at(self.core.now() + Duration::from_millis(1), &Waker::idle());
        let mut turns = 0..1;
        self.reactor.run_until(|| turns.next().is_none()).unwrap();
    }

    fn next(&mut self) -> Completion {
        let mut done = Vec::new();
        loop {
            self.channel.poll(&mut done);
            match done.pop() {
                Some(completion) => return completion,
                None => self.turn(),
            }
        }
    }
}

fn data(completion: Completion) -> Vec<u8> {
    match completion.result {
        Ok(Output::Data(data)) => data.to_vec(),
        other => panic!("{other:?}"),
    }
}

const WRITE: Op = Op::Write { fua: false };
const LONG: Duration = Duration::from_secs(600);

#[test]
fn requests_wait_for_a_back_end_that_restarts() {
    let delays = Delays { read: Duration::from_millis(50), ..Delays::default() };
    let back_ends = BackEnds::of(Arc::new(DelayVolume::new(Arc::new(MemVolume::new(1 << 20)), delays)));
    let disk = back_ends.attach("disk");
    let volume = back_ends.open("disk", LONG).unwrap();
    let mut user = User::of(&volume);
    user.submit(0, WRITE, 4096, &[7; 4096]);
    assert!(user.next().result.is_ok());
    user.submit(1, Op::Read, 4096, &[0; 4096]);
    for _ in 0..10 {
        user.turn();
    }
    // It ends without an answer to the read.
    disk.detach_by_force().unwrap();
    user.submit(2, Op::Read, 4096, &[0; 512]);
    user.turn();
    let disk = back_ends.attach("disk");
    let mut tags = [user.next(), user.next()].map(|completion| {
        let tag = completion.tag.0;
        assert!(data(completion).iter().all(|byte| *byte == 7));
        tag
    });
    tags.sort_unstable();
    assert_eq!(tags, [1, 2]);
    assert_eq!(volume.links().unwrap().reconnects, 1);
    drop(disk);
}

#[test]
fn requests_fail_if_the_back_end_does_not_come_back_in_time() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let disk = back_ends.attach("disk");
    let volume = back_ends.open("disk", Duration::ZERO).unwrap();
    let mut user = User::of(&volume);
    user.submit(0, WRITE, 0, &[7; 512]);
    assert!(user.next().result.is_ok());
    assert!(matches!(disk.detach(), Err(DetachError::Connected { .. })), "the volume uses it");
    end(&disk);
    user.submit(1, Op::Read, 0, &[0; 512]);
    assert!(matches!(user.next().result, Err(IoError::PathLost)));
    // It may come back later.
    let _disk = back_ends.attach("disk");
    let mut tag = 2;
    loop {
        user.submit(tag, Op::Read, 0, &[0; 512]);
        match user.next() {
            Completion { result: Err(IoError::PathLost), .. } => user.turn(),
            completion => {
                assert_eq!(data(completion), [7; 512]);
                break;
            }
        }
        tag += 1;
    }
}

#[test]
fn a_new_size_reaches_the_volume() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::within(
        blockmux_engine::sys::memory::map_pages(4 << 20).unwrap(),
        1 << 20,
        blockmux_volume::BlockSizes::default(),
    )));
    let _disk = back_ends.attach("disk");
    let volume = back_ends.open("disk", LONG).unwrap();
    let (disk, _) = back_ends.exports.find("disk").unwrap();
    back_ends.exports.volume_state(disk).unwrap().resize(Resize::grow(2 << 20)).unwrap();
    let mut user = User::of(&volume);
    while volume.info().size != 2 << 20 {
        user.turn();
    }
    user.submit(0, WRITE, (2 << 20) - 512, &[7; 512]);
    assert!(user.next().result.is_ok());
}

#[test]
fn an_answer_that_comes_before_a_kick_wakes_the_user() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let volume = back_ends.open("disk", LONG).unwrap();
    let mut user = User::of(&volume);
    let ready = ReadyList::new();
    user.channel = volume.open(&user.core, 8, ready.waker(1)).unwrap();
    for tag in 0..20 {
        user.submit(tag, Op::Read, 0, &[0; 512]);
        // The channel is polled only if it has woken its user.
        while ready.pop().is_none() {
            user.channel.kick();
            user.turn();
        }
        assert_eq!(data(user.next()), [0; 512]);
    }
}

#[test]
fn a_channel_outlives_its_volume() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let mut user = User::of(&back_ends.open("disk", LONG).unwrap());
    for tag in 0..10 {
        user.turn();
        user.submit(tag, WRITE, 0, &[7; 512]);
        assert!(user.next().result.is_ok());
    }
    drop(user);
    // The back end is free for the next front end.
    back_ends.open("disk", LONG).unwrap();
}

#[test]
fn a_socket_without_a_back_end_is_refused() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    assert!(matches!(back_ends.open("disk", LONG), Err(BackEndError::Connect(_))));
}

#[test]
fn a_back_end_that_returns_with_fewer_queues_than_cores_use_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let (seen, requests) = mpsc::channel();
    let _back_end = FakeBackEnd::listen(&path, move |message| {
        let _ = seen.send((message.connection, message.request));
        match (message.request, message.connection) {
            (FrontendRequest::GET_QUEUE_NUM, 1) => Reaction::Number(1),
            (FrontendRequest::GET_QUEUE_NUM, _) => Reaction::Number(2),
            (_, 0) if message.enables(1) => Reaction::Disconnect,
            _ => Reaction::Usual,
        }
    });
    let volume = VhostUserVolume::open(&path, options(LONG)).unwrap();
    let mut users = [User::of(&volume), User::of(&volume)];
    let mut enabled = 0;
    // The third connection has a queue for each core again.
    while enabled < 2 {
        users.iter_mut().for_each(User::turn);
        for (connection, request) in requests.try_iter() {
            assert!(connection != 1 || request != FrontendRequest::SET_MEM_TABLE, "it is refused");
            enabled += u32::from(connection == 2 && request == FrontendRequest::SET_VRING_ENABLE);
        }
    }
}

#[test]
fn requests_fail_if_a_back_end_takes_connections_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let _back_end = FakeBackEnd::listen(&path, |message| match message.request {
        // Anything but 0 refuses it.
        FrontendRequest::SET_MEM_TABLE => Reaction::Number(1),
        _ => Reaction::Usual,
    });
    let volume = VhostUserVolume::open(&path, options(Duration::ZERO)).unwrap();
    let mut user = User::of(&volume);
    user.submit(0, Op::Read, 0, &[0; 512]);
    assert!(matches!(user.next().result, Err(IoError::PathLost)));
}

#[test]
fn requests_outlive_an_answer_that_makes_no_sense() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let (seen, connections) = mpsc::channel();
    let (mut memory, mut used, mut call) = (None, 0, None);
    let fake = FakeBackEnd::listen(&back_ends.path("disk"), move |message| {
        let _ = seen.send(message.connection);
        match message.request {
            _ if message.connection > 0 => return Reaction::Disconnect,
            FrontendRequest::SET_MEM_TABLE => {
                memory = Some(File::from(message.fds[0].try_clone().unwrap()));
            }
            FrontendRequest::SET_VRING_ADDR => {
                let addr = VringAddr::read_from_bytes(&message.payload).unwrap();
                used = addr.used - addr.descriptor;
            }
            FrontendRequest::SET_VRING_CALL => {
                call = Some(File::from(message.fds[0].try_clone().unwrap()));
            }
            // Descriptor 1 begins no chain of the driver.
            FrontendRequest::SET_VRING_ENABLE => {
                let memory = memory.as_ref().unwrap();
                memory.write_all_at(&1_u32.to_le_bytes(), used + 4).unwrap();
                memory.write_all_at(&1_u16.to_le_bytes(), used + 2).unwrap();
                call.as_ref().unwrap().write_all(&1_u64.to_ne_bytes()).unwrap();
            }
            _ => {}
        }
        Reaction::Usual
    });
    let volume = back_ends.open("disk", LONG).unwrap();
    let mut user = User::of(&volume);
    user.submit(0, Op::Read, 0, &[0; 512]);
    while connections.try_iter().all(|connection| connection == 0) {
        user.turn();
    }
    drop(fake);
    let _disk = back_ends.attach("disk");
    assert_eq!(data(user.next()), [0; 512]);
}

#[test]
fn a_back_end_that_takes_no_connections_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket =
        || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    // Until as many wait as may.
    let mut waiting = Vec::new();
    let full = loop {
        let next = socket();
        match connect(&next, &address) {
            Ok(()) => waiting.push(next),
            Err(error) => break error,
        }
    };
    assert_eq!(full, Errno::AGAIN);
    let options = VhostUserOptions { request_timeout: Some(Duration::from_millis(1)), ..options(LONG) };
    assert!(matches!(VhostUserVolume::open(&path, options), Err(BackEndError::NoAnswer)));
}

fn message(request: FrontendRequest, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = MessageHeader { request: request.0, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}

/// A table of one region at address 0.
fn memory_table(len: u64) -> Vec<u8> {
    let region = MemoryRegion { guest_addr: 0, size: len, user_addr: 0, mmap_offset: 0 };
    [MemoryTableHeader { num_regions: 1, padding: 0 }.as_bytes(), region.as_bytes()].concat()
}

/// A front end whose guest has 64 KiB of memory, and one virtqueue that is served.
struct FrontEnd {
    socket: UnixStream,
    memory: File,
}

impl FrontEnd {
    fn connect(path: &Path) -> FrontEnd {
        let socket = UnixStream::connect(path).unwrap();
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY).unwrap();
        let front_end = FrontEnd { socket, memory };
        let accepted = Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
        front_end.tell(FrontendRequest::SET_FEATURES, accepted.bits().as_bytes());
        front_end.share_memory();
        front_end.begin_queue(QUEUE);
        front_end
    }

    fn tell(&self, request: FrontendRequest, payload: &[u8]) {
        (&self.socket).write_all(&message(request, 1, payload)).unwrap();
    }

    /// Whether the front end is still connected, and all its messages are handled.
    fn is_served(&self) -> bool {
        self.tell(FrontendRequest::GET_FEATURES, &[]);
        (&self.socket).read_exact(&mut [0; 20]).is_ok()
    }

    fn share_memory(&self) {
        let table = message(FrontendRequest::SET_MEM_TABLE, 1, &memory_table(MEMORY));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let memory_fd = [self.memory.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&memory_fd)));
        sendmsg(&self.socket, &[IoSlice::new(&table)], &mut control, SendFlags::empty()).unwrap();
    }

    /// Describes the virtqueue, starts it and enables it.
    fn begin_queue(&self, size: u32) {
        let state = |num| VringState { index: 0, num };
        self.tell(FrontendRequest::SET_VRING_NUM, state(size).as_bytes());
        self.tell(FrontendRequest::SET_VRING_ADDR, PLACE.as_bytes());
        self.tell(FrontendRequest::SET_VRING_BASE, state(0).as_bytes());
        // Nobody notifies, so the back end looks at the ring by itself.
        let no_event = 1_u64 << 8;
        self.tell(FrontendRequest::SET_VRING_KICK, no_event.as_bytes());
        self.tell(FrontendRequest::SET_VRING_ENABLE, state(1).as_bytes());
    }

    /// Makes a read of the first sector available, the first request of its virtqueue.
    fn request_read(&self) {
        let desc = |addr: u64, len: u32, flags: u16, next: u16| Desc {
            addr: addr.into(),
            len: len.into(),
            flags: flags.into(),
            next: next.into(),
        };
        let chain = [
            desc(HEADER, 16, VIRTQ_DESC_F_NEXT, 1),
            desc(DATA, 512, VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_WRITE, 2),
            desc(STATUS, 1, VIRTQ_DESC_F_WRITE, 0),
        ];
        self.memory.write_all_at(&[0; 16], HEADER).unwrap();
        self.memory.write_all_at(chain.as_bytes(), PLACE.descriptor).unwrap();
        self.memory.write_all_at(&[0; 2], PLACE.available + 4).unwrap();
        self.memory.write_all_at(&1_u16.to_le_bytes(), PLACE.available + 2).unwrap();
    }

    /// Number of answers.
    fn answered(&self) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read_exact_at(&mut bytes, PLACE.used + 2).unwrap();
        u16::from_le_bytes(bytes)
    }
}

const MEMORY: u64 = 1 << 16;
const QUEUE: u32 = 8;
const PLACE: VringAddr =
    VringAddr { index: 0, flags: 0, descriptor: 0, available: 0x2000, used: 0x3000, log: 0 };
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x6000;

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
fn a_front_end_that_takes_its_memory_away_is_disconnected_and_the_next_one_is_served() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let front_end = FrontEnd::connect(&back_ends.path("disk"));
    assert!(front_end.is_served());
    front_end.memory.set_len(0).unwrap();
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
        (FrontendRequest::SET_VRING_ADDR, PLACE.as_bytes()),
        (FrontendRequest::SET_VRING_BASE, state(7).as_bytes()),
    ] {
        let front_end = FrontEnd::connect(&back_ends.path("disk"));
        assert!(front_end.is_served());
        let ask = message(FrontendRequest::GET_FEATURES, 1, &[]);
        (&front_end.socket).write_all(&[message(request, 1, payload), ask].concat()).unwrap();
        // The end may be a reset, because not all was read.
        assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap_or(0), 0, "{request}");
    }
    // A queue that is disabled begins anew, as after a reset of the guest.
    let front_end = FrontEnd::connect(&back_ends.path("disk"));
    for size in [2 * QUEUE, QUEUE] {
        front_end.request_read();
        while front_end.answered() == 0 {
            assert!(front_end.is_served());
        }
        front_end.tell(FrontendRequest::SET_VRING_ENABLE, state(0).as_bytes());
        front_end.tell(FrontendRequest::SET_VRING_NUM, state(size).as_bytes());
        assert!(front_end.is_served());
        front_end.memory.write_all_at(&[0; 0x4000], 0).unwrap();
        front_end.share_memory();
        front_end.begin_queue(size);
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
    let front_end = FrontEnd::connect(&back_ends.path("disk"));
    front_end.request_read();
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
    assert_eq!(front_end.answered(), 0);
}
