//! A vhost-user volume over a disk of ours: the volume conformance suite, and what happens when the
//! back end restarts, does not come back, or has a new size.

mod back_ends;
mod conforms;
mod fake_back_end;

use back_ends::{BackEnds, LONG, options};
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::attach::{AttachedDisk, DetachError};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::{EngineCore, PollPolicy, Progress, Reactor, Task};
use blockmux_engine::volume::file::{FileOptions, FileVolume};
use blockmux_engine::volume::vhost_user::{BackEndError, VhostUserOptions, VhostUserVolume};
use blockmux_proto::virtio::MAX_QUEUES;
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Op, Output, ReadyList, Resize,
    Seg, SgList, Tag, Volume, Waker,
};
use blockmux_wire::virtio::vhost_user::{FrontendRequest, VringAddr};
use conforms::conforms;
use fake_back_end::{FakeBackEnd, Reaction};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use zerocopy::FromBytes;

/// Ends a disk whose front end may not have disconnected yet.
fn end(disk: &VhostUserDisk) {
    disk.leave();
    disk.detach().unwrap();
}

fn conforms_over_vhost_user(volume: Arc<dyn Volume>) {
    let back_ends = BackEnds::of(volume);
    let disks = ["disk", "frozen"].map(|name| back_ends.attach(name));
    let open = |name| Arc::new(back_ends.open(name, LONG).unwrap());
    conforms(open("disk"), Some(open("frozen")));
    disks.iter().for_each(end);
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
    /// What has completed and was not looked at.
    done: Vec<Completion>,
}

impl User {
    fn of(volume: &dyn Volume) -> User {
        let (reactor, _) = Reactor::new(PollPolicy::Never, 64 << 20).unwrap();
        let core: Rc<dyn Core> = reactor.core().clone();
        let channel = volume.open(&core, 8, Waker::idle()).unwrap();
        User { reactor, core, channel, done: Vec::new() }
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
        loop {
            // Several may complete together.
            if let Some(completion) = self.done.pop() {
                return completion;
            }
            self.turn();
            self.channel.poll(&mut self.done);
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

/// Writes once over a channel, and ends with it.
struct WriteOnce {
    channel: Box<dyn Channel>,
    done: Vec<Completion>,
    result: mpsc::Sender<bool>,
}

impl WriteOnce {
    fn spawn(core: &Rc<EngineCore>, volume: &dyn Volume, byte: u8, result: mpsc::Sender<bool>) {
        let write = |waker: &Waker| {
            let shared: Rc<dyn Core> = core.clone();
            let mut channel = volume.open(&shared, 1, waker.clone())?;
            let memory = SgList::one(Seg::from_slice(&[byte; 512]));
            channel.submit(Io { tag: Tag(0), op: WRITE, offset: 0, len: 512, data: Some(memory) });
            Ok::<_, IoError>(WriteOnce { channel, done: Vec::new(), result })
        };
        core.try_spawn(write).unwrap();
    }
}

impl Task for WriteOnce {
    fn run(&mut self) -> Progress {
        self.channel.kick();
        self.channel.poll(&mut self.done);
        let Some(completion) = self.done.pop() else { return Progress::Idle };
        self.result.send(completion.result.is_ok()).unwrap();
        Progress::Done
    }
}

#[test]
fn a_core_that_stops_ends_at_once_and_leaves_its_virtqueue_to_another() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let volume = Arc::new(back_ends.open("disk", LONG).unwrap());
    // One core after the other, and more of them than the back end has virtqueues.
    for byte in 0..=MAX_QUEUES as u8 {
        let config = CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        let (used, (sender, result)) = (volume.clone(), mpsc::channel());
        cores.ask(0, move |core| WriteOnce::spawn(core, &*used, byte, sender)).unwrap();
        assert!(result.recv().unwrap());
        assert!(cores.stop(LONG), "nothing is left on the core, although the volume is open");
    }
    let mut user = User::of(&*volume);
    user.submit(0, Op::Read, 0, &[0; 512]);
    assert_eq!(data(user.next()), [MAX_QUEUES as u8; 512]);
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
