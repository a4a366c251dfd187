//! An iSCSI initiator session allocates nothing per I/O once it has seen its usual depth.
#![allow(unsafe_code, reason = "a counting allocator")]
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::initiator::{Config, InitiatorSession, Mode, wishes};
use blockmux_proto::iscsi::login::operational::{CRC32C, Key, Parameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Node, Portal, TargetNode};
use blockmux_proto::iscsi::target::TargetSession;
use blockmux_proto::scsi::{Identity, LogicalUnit, Lun, Target as ScsiTarget};
use blockmux_proto::session::{Demand, Initiator, StreamSession, Target};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Chunk, Io, MemVolume, Memory, Op, Output, Pool, SgList, Tag, Volume, Waker};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NAME: &str = "iqn.2026-11.com.example:disk";

/// Both sides, the bytes between them, and a RAM volume behind.
struct Pair {
    initiator: InitiatorSession,
    target: TargetSession,
    channel: Box<dyn Channel>,
    /// What the initiator receives.
    chunk: Chunk,
    /// Allocations of the initiator.
    allocations: u64,
}

impl Pair {
    fn new(wishes: Parameters) -> Pair {
        let volume = Arc::new(MemVolume::new(1 << 20));
        let unit = LogicalUnit::new(Identity::of("disk0"), volume.clone());
        let view = Arc::new(ScsiTarget::new(NAME, Vec::new()).with_unit(0, VolumeId(0), unit));
        let access = vec![Access { initiator: None, chap: None, target: view }];
        let portals = vec![Portal { address: "192.0.2.1:3260".into(), group_tag: 1 }];
        let name = Name::new(NAME).unwrap();
        let node = Arc::new(Node::new(vec![TargetNode::new(name.clone(), portals, access)]));
        let target = TargetSession::new(node, 1, Pool::new(16 << 20), [1; 32], Instant::now());
        let config = Config {
            initiator: name.clone(),
            target: name,
            lun: Lun::new(0),
            mode: Mode::Use,
            chap: None,
            wishes,
            isid: [0x80; 6],
        };
        let initiator = InitiatorSession::new(config, Pool::new(16 << 20), [2; 32], Instant::now());
        let channel = volume.open(&TestCore::new().as_core(), 512, Waker::idle()).unwrap();
        let chunk = Chunk::new(Memory::from_heap(1 << 20));
        let mut pair = Pair { initiator, target, channel, chunk, allocations: 0 };
        while !pair.initiator.is_ready() {
            pair.exchange();
        }
        pair
    }

    /// What `f` does to the initiator counts.
    fn counted<R>(&mut self, f: impl FnOnce(&mut InitiatorSession, &Chunk) -> R) -> R {
        let before = ALLOCATIONS.get();
        let result = f(&mut self.initiator, &self.chunk);
        self.allocations += ALLOCATIONS.get() - before;
        result
    }

    /// Bytes there, what they cause, and bytes back.
    fn exchange(&mut self) {
        let sent = self.initiator.outbox().take_bytes();
        let sent = Chunk::from_slice(&sent);
        assert_eq!(self.target.on_bytes(&sent), Ok(sent.unread().len()));
        while let Some((_, io)) = self.target.poll_io() {
            let mut done = Vec::new();
            self.channel.submit(io);
            self.channel.poll(&mut done);
            done.into_iter().for_each(|done| self.target.on_io(done));
        }
        let back = self.target.outbox().take_bytes();
        self.chunk.recycle();
        self.chunk.extend(&back);
        while let Demand::Bytes(need) = self.initiator.demand() {
            if self.chunk.unread().len() < need {
                break;
            }
            let taken = self.counted(|initiator, chunk| initiator.on_bytes(chunk).unwrap());
            self.chunk.take(taken);
        }
    }

    /// Turns of I/O at depth 16, after some to get used to it.
    fn run(&mut self, io: impl Fn(u64) -> Io) -> u64 {
        for turn in 0..60 {
            if turn == 10 {
                self.allocations = 0;
            }
            for tag in 0..16 {
                let io = io(tag);
                self.counted(|initiator, _| initiator.submit(io));
            }
            let mut left = 16;
            while left > 0 {
                self.exchange();
                while let Some(done) = self.counted(|initiator, _| initiator.poll_done()) {
                    assert!(matches!(done.result, Ok(Output::Data(_) | Output::Nothing)));
                    left -= 1;
                }
            }
        }
        self.allocations
    }
}

#[test]
fn reads_writes_flushes_and_discards_allocate_nothing() {
    let digests = wishes().with(Key::HeaderDigest, CRC32C).with(Key::DataDigest, CRC32C);
    let asked_for = wishes().with(Key::InitialR2T, 1).with(Key::ImmediateData, 0);
    let pieces = wishes().with(Key::MaxRecvDataSegmentLength, 1024);
    for (name, wishes) in
        [("plain", wishes()), ("digests", digests), ("asked for", asked_for), ("in pieces", pieces)]
    {
        let mut pair = Pair::new(wishes);
        assert!(pair.allocations > 0, "login and bring-up allocate, and that is counted");
        let memory = SgList::one(Memory::from_heap(4096).seg(0, 4096));
        let lent = |tag| Io::new(Tag(tag), Op::Read, tag * 4096, 4096);
        assert_eq!(pair.run(lent), 0, "{name}, reads");
        assert_eq!(pair.run(|tag| Io { data: Some(memory.clone()), ..lent(tag) }), 0, "{name}, placed reads");
        let write = |tag| Io { op: Op::Write { fua: true }, data: Some(memory.clone()), ..lent(tag) };
        assert_eq!(pair.run(write), 0, "{name}, writes");
        assert_eq!(pair.run(|tag| Io::new(Tag(tag), Op::Flush, 0, 0)), 0, "{name}, flushes");
        let discard = |tag| Io { op: Op::Discard { fua: false }, ..lent(tag) };
        assert_eq!(pair.run(discard), 0, "{name}, discards");
    }
}
