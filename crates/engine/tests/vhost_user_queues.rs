//! Virtqueues of a disk by vhost-user that cannot be served, take nothing, or keep much memory.

#[allow(dead_code, reason = "other tests use the rest")]
mod back_ends;
#[allow(dead_code, reason = "other tests use the rest")]
mod fake_front_end;

use back_ends::{BackEnds, disk_options};
use blockmux_engine::attach::vhost_user::VhostUserDisk;
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Volume, VolumeInfo, Waker,
};
use blockmux_wire::virtio::Features;
use blockmux_wire::virtio::vhost_user::{
    FrontendRequest, MESSAGE_F_NEED_REPLY, ProtocolFeatures, VringState,
};
use fake_front_end::{FrontEnd, Guest, MEMORY, QUEUE, memory_table, message};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{read, write};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use zerocopy::IntoBytes;

/// A front end that has agreed on features.
fn connect(path: &Path) -> FrontEnd {
    let front_end = FrontEnd::connect(path);
    // A test whose front end hears nothing fails.
    front_end.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let accepted = Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
    front_end.tell(FrontendRequest::SET_FEATURES, accepted.bits().as_bytes());
    front_end.tell(FrontendRequest::SET_PROTOCOL_FEATURES, ProtocolFeatures::REPLY_ACK.bits().as_bytes());
    front_end
}

fn share_memory(front_end: &FrontEnd, guest: &Guest) {
    front_end.tell_with(FrontendRequest::SET_MEM_TABLE, &memory_table(MEMORY), &guest.memory);
}

/// Describes a virtqueue except for how the guest notifies.
fn describe_queue(front_end: &FrontEnd, index: u32) {
    front_end.tell(FrontendRequest::SET_VRING_NUM, VringState { index, num: QUEUE }.as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_ADDR, Guest::place(index).as_bytes());
}

fn enable_queue(front_end: &FrontEnd, index: u32, is_enabled: bool) {
    let state = VringState { index, num: is_enabled.into() };
    front_end.tell(FrontendRequest::SET_VRING_ENABLE, state.as_bytes());
}

/// A virtqueue whose guest does not notify.
fn begin_polled_queue(front_end: &FrontEnd, index: u32) {
    describe_queue(front_end, index);
    let no_event = u64::from(index) | 1 << 8;
    front_end.tell(FrontendRequest::SET_VRING_KICK, no_event.as_bytes());
    enable_queue(front_end, index, true);
}

/// Sends an event descriptor for a virtqueue.
fn share_event(front_end: &FrontEnd, request: FrontendRequest, index: u32) -> OwnedFd {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    front_end.tell_with(request, u64::from(index).as_bytes(), &event);
    event
}

fn notify(event: &OwnedFd) {
    write(event, &1_u64.to_ne_bytes()).unwrap();
}

#[test]
fn a_front_end_is_disconnected_if_its_queue_is_not_in_its_memory() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    // Each of them has its end, and the next one is served.
    for _ in 0..2 {
        let front_end = connect(&back_ends.path("disk"));
        begin_polled_queue(&front_end, 0);
        assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap(), 0);
    }
}

#[test]
fn a_front_end_is_disconnected_if_its_volume_was_removed() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (front_end, guest) = (connect(&back_ends.path("disk")), Guest::new());
    share_memory(&front_end, &guest);
    assert!(front_end.is_served());
    drop(back_ends.exports.remove("disk").unwrap());
    begin_polled_queue(&front_end, 0);
    assert_eq!((&front_end.socket).read(&mut [0; 20]).unwrap(), 0);
}

#[test]
fn a_queue_that_was_refused_keeps_its_event_descriptors() {
    let back_ends = BackEnds::of(Arc::new(MemVolume::new(1 << 20)));
    let _disk = back_ends.attach("disk");
    let (front_end, guest) = (connect(&back_ends.path("disk")), Guest::new());
    describe_queue(&front_end, 0);
    let [call, kick] = [FrontendRequest::SET_VRING_CALL, FrontendRequest::SET_VRING_KICK]
        .map(|request| share_event(&front_end, request, 0));
    let enabled = VringState { index: 0, num: 1 };
    let flags = 1 | MESSAGE_F_NEED_REPLY;
    let ask = message(FrontendRequest::SET_VRING_ENABLE, flags, enabled.as_bytes());
    (&front_end.socket).write_all(&ask).unwrap();
    let mut reply = [0; 20];
    (&front_end.socket).read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..], 1_u64.to_ne_bytes(), "it has no memory yet");
    share_memory(&front_end, &guest);
    front_end.have_acknowledged(FrontendRequest::SET_VRING_ENABLE, enabled.as_bytes(), None);
    // The driver is notified when the queue begins, and of the answer.
    let mut count = [0; 8];
    assert!(is_signalled(&call), "the back end has no descriptor to notify the driver");
    read(&call, &mut count).unwrap();
    guest.request(0, 0, false, 0);
    notify(&kick);
    assert!(is_signalled(&call));
    assert_eq!(guest.status(0, 0), 0);
}

/// Whether an event descriptor is signalled, after which a test need not wait any longer.
fn is_signalled(event: &OwnedFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(event.as_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap() > 0
}

/// A volume that takes reads and never completes them.
#[derive(Default)]
struct Unanswered {
    /// Number of reads that it has taken.
    reads: Arc<AtomicUsize>,
}

struct UnansweredChannel {
    reads: Arc<AtomicUsize>,
    /// They use their memory for as long as the core has the channel.
    taken: Vec<Io>,
}

impl Volume for Unanswered {
    fn info(&self) -> VolumeInfo {
        MemVolume::new(1 << 20).info()
    }

    fn open(&self, _core: &Rc<dyn Core>, _depth: u32, _waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(UnansweredChannel { reads: self.reads.clone(), taken: Vec::new() }))
    }
}

impl Channel for UnansweredChannel {
    fn submit(&mut self, io: Io) {
        self.taken.push(io);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn kick(&mut self) {}

    fn poll(&mut self, _done: &mut Vec<Completion>) {}
}

#[test]
fn a_front_end_cannot_use_up_the_mappings_of_other_disks() {
    let reads = Arc::<AtomicUsize>::default();
    let back_ends = BackEnds::of(Arc::new(Unanswered { reads: reads.clone() }));
    let _disks = ["disk", "frozen"].map(|name| back_ends.attach(name));
    let (front_end, guest) = (connect(&back_ends.path("disk")), Guest::new());
    share_memory(&front_end, &guest);
    front_end.tell(FrontendRequest::SET_VRING_NUM, VringState { index: 0, num: 512 }.as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_ADDR, Guest::place(0).as_bytes());
    front_end.tell(FrontendRequest::SET_VRING_KICK, (1_u64 << 8).as_bytes());
    enable_queue(&front_end, 0, true);
    let socket = front_end.socket.try_clone().unwrap();
    let asking = FrontEnd { socket, flags: MESSAGE_F_NEED_REPLY };
    // Each table is a new mapping, and a read keeps the one before.
    let tables = (0..150).take_while(|nth| {
        guest.request_with(0, *nth, false, 0, Guest::data(0, 0));
        while reads.load(Ordering::Relaxed) <= usize::from(*nth) {
            std::thread::yield_now();
        }
        share_memory(&asking, &guest);
        let mut reply = [0; 20];
        (&front_end.socket).read_exact(&mut reply).unwrap();
        reply[12..] == [0; 8]
    });
    assert_eq!(tables.count(), 127, "with the first table, as many as a disk may have");
    let (of_other, guest) = (connect(&back_ends.path("frozen")), Guest::new());
    share_memory(&of_other, &guest);
    assert!(of_other.is_served());
}

/// A daemon with a core that never polls, and a disk whose reads take a while.
struct SlowDisk {
    cores: Cores,
    _disk: VhostUserDisk,
    folder: TempDir,
}

impl SlowDisk {
    fn attach() -> SlowDisk {
        let config = CoresConfig { count: 1, policy: PollPolicy::Never, ..CoresConfig::default() };
        let (cores, folder) = (Cores::start(&config).unwrap(), tempfile::tempdir().unwrap());
        let delays = Delays { read: READ_TIME, ..Delays::default() };
        let volume = Arc::new(DelayVolume::new(Arc::new(MemVolume::new(1 << 20)), delays));
        let (name, description) = ("disk".to_owned(), String::new());
        let exports = Exports::new(vec![Export { name, description, read_only: false, volume }]);
        let path = folder.path().join("disk");
        let disk = VhostUserDisk::attach(&cores, &exports, VolumeId(0), disk_options(), &path).unwrap();
        SlowDisk { cores, _disk: disk, folder }
    }

    /// Number of times that the core sleeps while the first virtqueue reads something.
    fn sleeps_during_a_read(&self, guest: &Guest, call: &OwnedFd, kick: &OwnedFd) -> u64 {
        let sleeps = || self.cores.stats()[0].sleeps();
        let (before, nth) = (sleeps(), guest.available(0));
        guest.request(0, nth, false, 0);
        notify(kick);
        while guest.answered(0) == nth {
            assert!(is_signalled(call));
            read(call, &mut [0; 8]).unwrap();
        }
        sleeps() - before
    }
}

#[test]
fn a_queue_that_takes_nothing_is_not_polled() {
    let slow = SlowDisk::attach();
    let (front_end, guest) = (connect(&slow.folder.path().join("disk")), Guest::new());
    share_memory(&front_end, &guest);
    describe_queue(&front_end, 0);
    let [call, kick] = [FrontendRequest::SET_VRING_CALL, FrontendRequest::SET_VRING_KICK]
        .map(|request| share_event(&front_end, request, 0));
    enable_queue(&front_end, 0, true);
    let error = share_event(&front_end, FrontendRequest::SET_VRING_ERR, 1);
    begin_polled_queue(&front_end, 1);
    enable_queue(&front_end, 1, false);
    assert!(front_end.is_served());
    // A queue that is polled wakes its core some thousand times in this time.
    let sleeps = slow.sleeps_during_a_read(&guest, &call, &kick);
    assert!(sleeps < 50, "it is disabled, and its core slept {sleeps} times");
    // More requests than the queue has descriptors.
    guest.memory.write_all_at(&[0xff; 2], Guest::place(1).available + 2).unwrap();
    enable_queue(&front_end, 1, true);
    assert!(is_signalled(&error));
    let sleeps = slow.sleeps_during_a_read(&guest, &call, &kick);
    assert!(sleeps < 50, "it is broken, and its core slept {sleeps} times");
}

/// Long for a queue that is polled.
const READ_TIME: Duration = Duration::from_millis(300);
