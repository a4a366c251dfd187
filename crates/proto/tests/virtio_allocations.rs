//! Neither side of a virtqueue allocates anything per request of one buffer.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::virtio::{
    BlkDevice, BlkDriver, BlkQueue, GuestMemory, GuestRegion, InflightRecord, RemoteDisk, RingAreas,
};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Io, MemVolume, Memory, Op, SgList, Tag, Volume, Waker};
use blockmux_wire::virtio::vhost_user::inflight_region;
use std::sync::Arc;
use std::time::Instant;

#[test]
fn requests_allocate_nothing() {
    const DEPTH: u64 = 32;
    const ADDR: u64 = 1 << 32;
    let volume = Arc::new(MemVolume::new(1 << 20));
    let (info, core) = (volume.info(), TestCore::new().as_core());
    let mut channel = volume.open(&core, BlkDriver::RING_SIZE.into(), Waker::idle()).unwrap();
    let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let device = BlkDevice::new(&info, 1, "");
    let disk = RemoteDisk::new(device.offered(), &device.config(0, 60)).unwrap();
    let state = device.state(disk.accepted);
    let memory = Memory::from_heap(BlkDriver::MEMORY_LEN);
    let mut driver = BlkDriver::new(disk, &memory.seg(0, memory.len()), ADDR, core.pool().clone());
    let guest = GuestMemory::new(vec![GuestRegion { guest_addr: ADDR, user_addr: ADDR, memory }]);
    let at = BlkDriver::vring_addr(0, ADDR);
    let size = BlkDriver::RING_SIZE;
    let areas = RingAreas::of_user(&guest, size, (at.descriptor, at.available, at.used)).unwrap();
    let record = Memory::from_heap(inflight_region::len(size));
    let record = InflightRecord::of_queue(&record.seg(0, record.len()), 0, size, size);
    let mut queue = BlkQueue::new((&exports, VolumeId(0)), state, guest, (areas, size, 0), record).unwrap();
    queue.enable(true);
    let (buffer, mut done) = (Memory::from_heap(4096), Vec::new());
    let mut round = || {
        for tag in 0..DEPTH {
            let op = [Op::Read, Op::Write { fua: false }][tag as usize % 2];
            let data = Some(SgList::one(buffer.seg(0, 4096)));
            driver.submit(Io { tag: Tag(tag), op, offset: tag * 4096, len: 4096, data });
        }
        driver.send();
        queue.take_requests().unwrap();
        while let Some((volume, io)) = queue.poll_io() {
            queue.begin(volume, &io, false).expect("nothing excludes it");
            channel.submit(io);
        }
        channel.kick();
        channel.poll(&mut done);
        done.drain(..).for_each(|done| queue.on_io(done, Instant::now()));
        queue.publish();
        driver.reap().unwrap();
        let mut completed = 0;
        while let Some(completion) = driver.poll_done() {
            assert!(completion.result.is_ok(), "{completion:?}");
            completed += 1;
        }
        assert_eq!(completed, DEPTH);
    };
    (0..3).for_each(|_| round());
    let before = counting::of_this_thread();
    (0..100).for_each(|_| round());
    assert_eq!(counting::of_this_thread(), before);
}
