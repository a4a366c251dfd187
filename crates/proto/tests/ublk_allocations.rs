//! A queue of an attached disk allocates nothing per request.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::ublk::{NewRequest, UblkQueue};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{MemVolume, Memory, SgList, Volume, Waker};
use blockmux_wire::ublk::{IoDesc, IoOp};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn requests_allocate_nothing() {
    const DEPTH: u16 = 32;
    let volume = Arc::new(MemVolume::new(1 << 20));
    let mut channel = volume.open(&TestCore::new().as_core(), DEPTH.into(), Waker::idle()).unwrap();
    let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let mut queue = UblkQueue::new(&exports, VolumeId(0), DEPTH, false).unwrap();
    let (memory, mut done) = (Memory::from_heap(4096), Vec::new());
    let mut round = || {
        for tag in 0..DEPTH {
            let op = [IoOp::READ, IoOp::WRITE, IoOp::FLUSH, IoOp::DISCARD][usize::from(tag) % 4];
            let desc =
                IoDesc { op_flags: op.0.into(), nr_sectors: 8, start_sector: u64::from(tag) * 8, addr: 0 };
            if let NewRequest::NeedsData(len) = queue.on_request(tag, &desc, None) {
                queue.on_data(tag, Ok(SgList::one(memory.seg(0, len))));
            }
        }
        while let Some((volume, io)) = queue.poll_io() {
            queue.begin(volume, &io, false).expect("nothing excludes it");
            channel.submit(io);
        }
        channel.kick();
        channel.poll(&mut done);
        done.drain(..).for_each(|done| queue.on_io(done, Instant::now()));
        let mut replies = 0;
        while let Some(reply) = queue.poll_reply() {
            assert!(reply.result >= 0, "{reply:?}");
            replies += 1;
        }
        assert_eq!(replies, DEPTH);
    };
    (0..3).for_each(|_| round());
    let before = counting::of_this_thread();
    (0..100).for_each(|_| round());
    assert_eq!(counting::of_this_thread(), before);
}
