//! A resize of a volume behind an iSCSI target is seen by its initiator on every core.

use crate::sides::iscsi::{IscsiDialer, sessions};
use crate::sides::{address, disk0, listen};
use blockmux_engine::remote::RemoteVolume;
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_volume::{
    Channel, Core, Io, IoError, MemVolume, Op, Output, ReadyList, Tag, Volume, VolumeInfo, Waker,
};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SMALL: u64 = 1 << 20;
const LARGE: u64 = 2 << 20;

/// A volume that reports a smaller size than its storage.
struct Elastic {
    below: MemVolume,
    size: AtomicU64,
}

impl Volume for Elastic {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.size.load(Ordering::Relaxed), ..self.below.info() }
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        self.below.open(core, depth, waker)
    }
}

/// A world with clients of one volume, each on a core of its own.
struct Clients {
    world: World,
    channels: Vec<Box<dyn Channel>>,
}

impl Clients {
    fn open(&mut self, volume: &dyn Volume) {
        let core: Rc<dyn Core> = self.world.add_core(16 << 20);
        self.channels.push(volume.open(&core, 4, ReadyList::new().waker(0)).unwrap());
    }

    fn read(&mut self, channel: usize, offset: u64) -> Result<Output, IoError> {
        let channel = &mut self.channels[channel];
        channel.submit(Io::new(Tag(1), Op::Read, offset, 4096));
        channel.kick();
        self.world.run_for(Duration::from_secs(1)).unwrap();
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert_eq!(done.len(), 1);
        done.remove(0).result
    }
}

#[test]
fn a_resize_is_seen_on_every_core() {
    let elastic = Arc::new(Elastic { below: MemVolume::new(LARGE), size: AtomicU64::new(SMALL) });
    let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
    let (target, exports) = (world.add_core(16 << 20), disk0(elastic.clone()));
    listen(&world, &target, &address(), &exports, sessions(&exports));
    let dialer = IscsiDialer::new(&address(), "disk0", default_proposal());
    let info = VolumeInfo { lends_reads: true, ..VolumeInfo::new(SMALL) };
    let volume = RemoteVolume::<_, SimCore>::new(dialer, info, 2, Duration::from_secs(5));
    let notifications = Arc::new(AtomicU64::new(0));
    let counter = notifications.clone();
    volume.on_resize(Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    let mut clients = Clients { world, channels: Vec::new() };
    (0..2).for_each(|_| clients.open(&volume));
    for channel in [0, 1] {
        assert!(clients.read(channel, 0).is_ok());
        assert_eq!(clients.read(channel, SMALL).unwrap_err(), IoError::OutOfRange);
    }
    elastic.size.store(LARGE, Ordering::Relaxed);
    // A login queries the capacity, and so the target notices the new size.
    clients.open(&volume);
    clients.world.run_for(Duration::from_secs(1)).unwrap();
    assert!(clients.read(0, 0).is_ok());
    assert_eq!((volume.info().size, notifications.load(Ordering::Relaxed)), (LARGE, 1));
    // The target has not reported it to the other channel yet.
    for channel in [1, 0, 1, 0] {
        assert!(clients.read(channel, LARGE - 4096).is_ok(), "{channel}");
    }
    elastic.size.store(SMALL, Ordering::Relaxed);
    clients.open(&volume);
    clients.world.run_for(Duration::from_secs(1)).unwrap();
    assert!(clients.read(1, 0).is_ok());
    assert_eq!((volume.info().size, notifications.load(Ordering::Relaxed)), (SMALL, 2));
    for channel in [0, 1, 0, 1] {
        assert_eq!(clients.read(channel, SMALL).unwrap_err(), IoError::OutOfRange);
    }
}
