//! An NVMe/TCP target session allocates nothing per I/O once it has seen its usual depth.
#![allow(unsafe_code, reason = "a counting allocator")]
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvmeof::node::Node;
use blockmux_proto::nvmeof::tcp::target::TargetSession;
use blockmux_proto::session::{StreamSession, Target};
use blockmux_volume::{Chunk, Completion, MemVolume, Memory, Op, Output, Pool};
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

/// An I/O queue, and the admin queue of its controller.
fn queue(digests: u8) -> (TargetSession, TargetSession) {
    let export = Export {
        name: "a".into(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(MemVolume::new(1 << 20)),
    };
    let exports = Exports::new(vec![export]);
    let served = exports.served(VolumeId(0)).unwrap().clone();
    let namespace = Namespace::new(1, VolumeId(0), served, false, ("a", ""));
    let subsystem = Subsystem::new(Nqn::new("nqn.t").unwrap(), "", vec![namespace], Vec::new());
    let node = Arc::new(Node::new(vec![Arc::new(subsystem)], Vec::new(), ""));
    let connected = |qid: u16, cntlid: u16| {
        let mut session = TargetSession::new(node.clone(), Pool::new(16 << 20), Instant::now());
        let mut ic_req = [0; 128];
        (ic_req[2], ic_req[4], ic_req[11]) = (128, 128, digests);
        take(&mut session, &ic_req);
        let mut data = [0; 1024];
        data[0] = 1;
        data[16..18].copy_from_slice(&cntlid.to_le_bytes());
        data[256..261].copy_from_slice(b"nqn.t");
        data[512..517].copy_from_slice(b"nqn.h");
        let mut connect = command(0x7f, 0, 1024, true);
        (connect[4], connect[40], connect[42], connect[44]) = (1, 0, qid as u8, 63);
        let mut bytes = Vec::new();
        push(&mut bytes, &connect, &data, digests);
        take(&mut session, &bytes);
        session
    };
    let mut admin = connected(0, 0xffff);
    let mut enable = command(0x7f, 1, 0, false);
    (enable[4], enable[44], enable[48], enable[50]) = (0, 0x14, 0x61, 0x46);
    let mut bytes = Vec::new();
    push(&mut bytes, &enable, &[], digests);
    take(&mut admin, &bytes);
    (connected(1, 1), admin)
}

/// A command on 8 blocks from block 8 on that moves `len` bytes.
fn command(opcode: u8, cid: u16, len: u32, in_capsule: bool) -> [u8; 64] {
    let mut sqe = [0; 64];
    (sqe[0], sqe[1], sqe[4]) = (opcode, 0x40, 1);
    sqe[2..4].copy_from_slice(&cid.to_le_bytes());
    sqe[32..36].copy_from_slice(&len.to_le_bytes());
    sqe[39] = if in_capsule { 0x01 } else { 0x5a };
    (sqe[40], sqe[48]) = (8, 7);
    sqe
}

/// Adds a capsule with its digests.
fn push(batch: &mut Vec<u8>, sqe: &[u8; 64], data: &[u8], digests: u8) {
    push_pdu(batch, 4, 0, sqe, data, digests);
}

fn push_pdu(batch: &mut Vec<u8>, kind: u8, flags: u8, specific: &[u8], data: &[u8], digests: u8) {
    let header_digest = if digests & 1 != 0 { 4 } else { 0 };
    let data_digest = if digests & 2 != 0 && !data.is_empty() { 4 } else { 0 };
    let hlen = 8 + specific.len();
    let pdo = if data.is_empty() { 0 } else { hlen + header_digest };
    let plen = (hlen + header_digest + data.len() + data_digest) as u32;
    let begin = batch.len();
    let flags = flags | u8::from(header_digest > 0) | u8::from(data_digest > 0) << 1;
    batch.extend([kind, flags, hlen as u8, pdo as u8]);
    batch.extend(plen.to_le_bytes());
    batch.extend(specific);
    if header_digest > 0 {
        let digest = crc32c::crc32c(&batch[begin..]);
        batch.extend(digest.to_le_bytes());
    }
    batch.extend(data);
    if data_digest > 0 {
        batch.extend(crc32c::crc32c(data).to_le_bytes());
    }
}

/// Hands bytes in, and looks that they are answered with success.
fn take(session: &mut TargetSession, bytes: &[u8]) {
    assert_eq!(session.on_bytes(&Chunk::from_slice(bytes)), Ok(bytes.len()));
    let answer = session.outbox().take_bytes();
    assert!(answer[0] == 1 || answer[22..24] == [0, 0], "{answer:x?}");
}

#[test]
fn reads_and_writes_allocate_nothing() {
    const DEPTH: u16 = 16;
    for digests in [0, 3] {
        let (mut session, _admin) = queue(digests);
        let (data, lent) = (vec![7; 4096], Memory::from_heap(4096));
        let mut batch = Vec::with_capacity(1 << 20);
        let mut chunk = Chunk::new(Memory::from_heap(1 << 20));
        let mut tags = Vec::with_capacity(64);
        let mut allocations = 0;
        for turn in 0..200 {
            batch.clear();
            for cid in 0..DEPTH {
                push(&mut batch, &command(2, cid, 4096, false), &[], digests);
                push(&mut batch, &command(1, cid + DEPTH, 4096, true), &data, digests);
            }
            push(&mut batch, &command(0, 2 * DEPTH, 0, false), &[], digests);
            chunk.recycle();
            chunk.extend(&batch);
            let before = ALLOCATIONS.get();
            assert_eq!(session.on_bytes(&chunk), Ok(batch.len()));
            chunk.take(batch.len());
            while let Some((_, io)) = session.poll_io() {
                tags.push((io.tag, io.op));
            }
            assert_eq!(tags.len(), 2 * usize::from(DEPTH) + 1);
            for (tag, op) in tags.drain(..) {
                let read = op == Op::Read;
                let output = if read { Output::Data(lent.seg(0, 4096).into()) } else { Output::Nothing };
                session.on_io(Completion { tag, result: Ok(output) });
            }
            let sent = session.outbox().len();
            session.outbox().consume(sent);
            if turn >= 10 {
                allocations += ALLOCATIONS.get() - before;
            }
        }
        assert_eq!(allocations, 0, "digests {digests}");
    }
}

#[test]
fn writes_that_are_asked_for_allocate_nothing() {
    let (mut session, _admin) = queue(0);
    let data = vec![7; 4096];
    let mut allocations = 0;
    let mut chunk = Chunk::new(Memory::from_heap(64 << 10));
    let (mut capsule, mut h2c_data) = (Vec::with_capacity(128), Vec::with_capacity(8192));
    push(&mut capsule, &command(1, 9, 4096, false), &[], 0);
    for turn in 1..200_u32 {
        chunk.recycle();
        chunk.extend(&capsule);
        let before = ALLOCATIONS.get();
        assert_eq!(session.on_bytes(&chunk), Ok(capsule.len()));
        chunk.take(capsule.len());
        let asked = ALLOCATIONS.get() - before;
        let r2t = session.outbox().take_bytes();
        assert_eq!(r2t[0], 9);
        let mut specific = [0; 16];
        specific[..12].copy_from_slice(&r2t[8..20]);
        specific[8..12].copy_from_slice(&4096_u32.to_le_bytes());
        h2c_data.clear();
        push_pdu(&mut h2c_data, 6, 4, &specific, &data, 0);
        chunk.recycle();
        chunk.extend(&h2c_data);
        let before = ALLOCATIONS.get();
        assert_eq!(session.on_bytes(&chunk), Ok(h2c_data.len()));
        chunk.take(h2c_data.len());
        let (_, io) = session.poll_io().unwrap();
        session.on_io(Completion { tag: io.tag, result: Ok(Output::Nothing) });
        drop(io);
        let sent = session.outbox().len();
        session.outbox().consume(sent);
        if turn > 10 {
            allocations += asked + ALLOCATIONS.get() - before;
        }
    }
    assert_eq!(allocations, 0);
}
