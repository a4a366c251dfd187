//! A mounted file system allocates nothing per request.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::fuse::wire::{InHeader, Opcode, RangeIn};
use blockmux_proto::fuse::{FileAccess, FuseFile, FuseLimits, FuseQueue};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{MemVolume, Memory, SgList, Volume, Waker};
use std::sync::Arc;
use std::time::Instant;
use zerocopy::IntoBytes;

#[test]
fn requests_allocate_nothing() {
    const DEPTH: u16 = 32;
    let volume = Arc::new(MemVolume::new(1 << 20));
    let mut channel = volume.open(&TestCore::new().as_core(), DEPTH.into(), Waker::idle()).unwrap();
    let files = vec![FuseFile { name: "a".to_owned(), volume: VolumeId(0), info: volume.info() }];
    let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let access = FileAccess { uid: 0, gid: 0, time_s: 0 };
    let mut queue =
        FuseQueue::new(&exports, files, access, FuseLimits { depth: DEPTH, page_size: 4096 }).unwrap();
    let (memory, mut done) = (Memory::from_heap(4096), Vec::new());
    let mut round = || {
        for nth in 0..DEPTH {
            let opcode = [Opcode::FUSE_READ, Opcode::FUSE_WRITE, Opcode::FUSE_FSYNC, Opcode::FUSE_GETATTR]
                [usize::from(nth) % 4];
            let mut message = [0; 80];
            let header = InHeader { opcode: opcode.0, nodeid: 2, ..InHeader::default() };
            let range = RangeIn { offset: u64::from(nth) * 4096, size: 4096, ..RangeIn::default() };
            message[..40].copy_from_slice(header.as_bytes());
            message[40..].copy_from_slice(range.as_bytes());
            let data = (opcode == Opcode::FUSE_WRITE).then(|| SgList::one(memory.seg(0, 4096)));
            queue.on_request(&message, data);
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
            assert_eq!(reply.head()[4..8], [0; 4]);
            replies += 1;
        }
        assert_eq!(replies, DEPTH);
    };
    (0..3).for_each(|_| round());
    let before = counting::of_this_thread();
    (0..100).for_each(|_| round());
    assert_eq!(counting::of_this_thread(), before);
}
