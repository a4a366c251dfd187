//! An iSCSI target session allocates nothing per I/O once it is warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod counted_target;
#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::scsi::{LogicalUnit, ScsiTarget, UnitIdentity};
use blockmux_volume::{Chunk, Crc32c, MemVolume, Pool};
use counted_target::CountedTarget;
use std::sync::Arc;
use std::time::Instant;

/// A session in full feature phase with these operational keys.
fn session(keys: &str) -> IscsiTargetSession {
    let name = "iqn.2026-11.com.example:disk";
    let unit = LogicalUnit::new(UnitIdentity::of("disk0"), Arc::new(MemVolume::new(1 << 20)));
    let target = Arc::new(ScsiTarget::new(name, Vec::new()).with_unit(0, VolumeId(0), unit));
    let access = vec![IscsiAccess { initiator: None, chap: None, target }];
    let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
    let node = IscsiNode::new(vec![TargetNode::new(Name::new(name).unwrap(), portals, access)]);
    let pool = Pool::new(16 << 20);
    let mut session = IscsiTargetSession::new(Arc::new(node), 1, pool, [1; 32], Instant::now());
    let text = format!("InitiatorName=iqn.2026-11.com.example:me\0TargetName={name}\0{keys}");
    let mut login = pdu(0x43, 0x87, text.len(), 0, 0, [0; 16]);
    login.extend(text.bytes());
    login.resize(login.len().next_multiple_of(4), 0);
    take(&mut session, &login);
    session
}

/// A header: opcode, flags, DataSegmentLength, tag and CmdSN, CDB; a command transfers 4 KiB.
fn pdu(opcode: u8, flags: u8, data_len: usize, tag: u32, cmd_sn: u32, cdb: [u8; 16]) -> Vec<u8> {
    let mut bytes = vec![opcode, flags, 0, 0];
    bytes.extend((data_len as u32).to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend(tag.to_be_bytes());
    bytes.extend(4096_u32.to_be_bytes());
    bytes.extend(cmd_sn.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(cdb);
    bytes
}

/// READ(10) or WRITE(10) of 4 KiB at block 8.
fn command(opcode: u8) -> [u8; 16] {
    [opcode, 0, 0, 0, 0, 8, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]
}

fn take(session: &mut IscsiTargetSession, bytes: &[u8]) {
    assert_eq!(session.on_bytes(&Chunk::from_slice(bytes), Instant::now()), Ok(bytes.len()));
    drop(session.outbox().take_bytes());
}

/// Adds a header and data, each with a digest if `digests` is set.
fn push(batch: &mut Vec<u8>, header: &[u8], data: &[u8], digests: bool) {
    for part in [header, data] {
        batch.extend(part);
        if digests && !part.is_empty() {
            batch.extend(Crc32c::of(part).to_le_bytes());
        }
    }
}

#[test]
fn reads_and_writes_allocate_nothing() {
    const DEPTH: u32 = 16;
    let data = vec![7; 4096];
    for (keys, digests) in [("", false), ("HeaderDigest=CRC32C\0DataDigest=CRC32C\0", true)] {
        let mut session = session(keys);
        // Receives the unit attention of the first command.
        let mut first = Vec::new();
        push(&mut first, &pdu(1, 0x81, 0, 1, 0, [0; 16]), &[], digests);
        take(&mut session, &first);
        let mut cmd_sn = 0;
        let allocations = CountedTarget::new(session).run_batches(2 * DEPTH as usize, |batch| {
            for tag in 0..DEPTH {
                cmd_sn += 2;
                push(batch, &pdu(1, 0xc1, 0, tag, cmd_sn - 1, command(0x28)), &[], digests);
                push(batch, &pdu(1, 0xa1, 4096, tag + DEPTH, cmd_sn, command(0x2a)), &data, digests);
            }
        });
        assert_eq!(allocations, 0, "digests {digests}");
    }
}

#[test]
fn solicited_writes_allocate_nothing() {
    let mut session = session("ImmediateData=No\0");
    take(&mut session, &pdu(1, 0x81, 0, 1, 0, [0; 16]));
    let mut cmd_sn = 0;
    let allocations = CountedTarget::new(session).run_asked_for(
        |bytes| {
            cmd_sn += 1;
            bytes.extend(pdu(1, 0xa1, 0, 9, cmd_sn, command(0x2a)));
        },
        |r2t, bytes| {
            assert_eq!(r2t[0], 0x31);
            let mut data_out = pdu(5, 0x80, 4096, 9, 0, [0; 16]);
            data_out[20..24].copy_from_slice(&r2t[20..24]);
            bytes.extend(data_out);
            bytes.extend([7; 4096]);
        },
    );
    assert_eq!(allocations, 0);
}
