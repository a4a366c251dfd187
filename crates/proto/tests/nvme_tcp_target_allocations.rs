//! An NVMe/TCP target session allocates nothing per I/O once it is warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod counted_target;
#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_volume::{Chunk, Crc32c, MemVolume, Pool};
use counted_target::CountedTarget;
use std::sync::Arc;
use std::time::Instant;

/// An I/O queue, and the admin queue of its controller.
fn queue(digests: u8) -> (NvmeTcpTargetSession, NvmeTcpTargetSession) {
    let export = Export {
        name: "a".into(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(MemVolume::new(1 << 20)),
    };
    let exports = Exports::new(vec![export]);
    let volume_state = exports.volume_state(VolumeId(0)).unwrap().clone();
    let namespace = Namespace::new(1, VolumeId(0), volume_state, false, VolumeUuid::of_texts(&["a"]));
    let subsystem = Subsystem::new(Nqn::new("nqn.t").unwrap(), "", vec![namespace], Vec::new());
    let node = Arc::new(NvmeNode::new(vec![Arc::new(subsystem)], Vec::new(), ""));
    let connected = |qid: u16, cntlid: u16| {
        let mut session = NvmeTcpTargetSession::new(node.clone(), Pool::new(16 << 20), Instant::now());
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

/// A command for 8 blocks from block 8 on that transfers `len` bytes.
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
        let digest = Crc32c::of(&batch[begin..]);
        batch.extend(digest.to_le_bytes());
    }
    batch.extend(data);
    if data_digest > 0 {
        batch.extend(Crc32c::of(data).to_le_bytes());
    }
}

/// Passes bytes to the session, and checks that all replies report success.
fn take(session: &mut NvmeTcpTargetSession, bytes: &[u8]) {
    assert_eq!(session.on_bytes(&Chunk::from_slice(bytes), Instant::now()), Ok(bytes.len()));
    let answer = session.outbox().take_bytes();
    assert!(answer[0] == 1 || answer[22..24] == [0, 0], "{answer:x?}");
}

#[test]
fn reads_and_writes_allocate_nothing() {
    const DEPTH: u16 = 16;
    let data = vec![7; 4096];
    for digests in [0, 3] {
        let (session, _admin) = queue(digests);
        let ios = 2 * usize::from(DEPTH) + 1;
        let allocations = CountedTarget::new(session).run_batches(ios, |batch| {
            for cid in 0..DEPTH {
                push(batch, &command(2, cid, 4096, false), &[], digests);
                push(batch, &command(1, cid + DEPTH, 4096, true), &data, digests);
            }
            push(batch, &command(0, 2 * DEPTH, 0, false), &[], digests);
        });
        assert_eq!(allocations, 0, "digests {digests}");
    }
}

#[test]
fn solicited_writes_allocate_nothing() {
    let (session, _admin) = queue(0);
    let allocations = CountedTarget::new(session).run_asked_for(
        |bytes| push(bytes, &command(1, 9, 4096, false), &[], 0),
        |r2t, bytes| {
            assert_eq!(r2t[0], 9);
            let mut specific = [0; 16];
            specific[..12].copy_from_slice(&r2t[8..20]);
            specific[8..12].copy_from_slice(&4096_u32.to_le_bytes());
            push_pdu(bytes, 6, 4, &specific, &[7; 4096], 0);
        },
    );
    assert_eq!(allocations, 0);
}
