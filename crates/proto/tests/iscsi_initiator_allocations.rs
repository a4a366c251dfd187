//! An iSCSI initiator session allocates nothing per I/O once it is warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod counted_initiator;
#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::client::{
    BurstSize, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose, default_proposal,
};
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, UnitIdentity};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Chunk, MemVolume, Pool, Volume, Waker};
use counted_initiator::CountedInitiator;
use std::sync::Arc;
use std::time::Instant;

const NAME: &str = "iqn.2026-11.com.example:disk";

fn initiator(proposal: OperationalParameters) -> IscsiInitiatorSession {
    let name = Name::new(NAME).unwrap();
    let config = IscsiInitiatorConfig {
        initiator: name.clone(),
        target: name,
        lun: Lun::new(0),
        purpose: SessionPurpose::Use,
        chap: None,
        proposal,
        isid: [0x80; 6],
        burst: BurstSize::default(),
    };
    IscsiInitiatorSession::new(config, Pool::new(16 << 20), [2; 32], Instant::now())
}

/// A target with a RAM volume, as a function from received bytes to its reply.
fn target() -> impl FnMut(&[u8]) -> Vec<u8> {
    let volume = Arc::new(MemVolume::new(1 << 20));
    let unit = LogicalUnit::new(UnitIdentity::of("disk0"), volume.clone());
    let view = Arc::new(ScsiTarget::new(NAME, Vec::new()).with_unit(0, VolumeId(0), unit));
    let access = vec![IscsiAccess { initiator: None, chap: None, target: view }];
    let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
    let node = Arc::new(IscsiNode::new(vec![TargetNode::new(Name::new(NAME).unwrap(), portals, access)]));
    let mut target = IscsiTargetSession::new(node, 1, Pool::new(16 << 20), [1; 32], Instant::now());
    let mut channel = volume.open(&TestCore::new().as_core(), 512, Waker::idle()).unwrap();
    let mut done = Vec::new();
    move |sent| {
        let sent = Chunk::from_slice(sent);
        assert_eq!(target.on_bytes(&sent, Instant::now()), Ok(sent.unread().len()));
        while let Some((volume, io)) = target.poll_io() {
            target.begin(volume, &io, false).expect("nothing excludes it");
            channel.submit(io);
            channel.poll(&mut done);
            done.drain(..).for_each(|done| target.on_io(done, Instant::now()));
        }
        target.outbox().take_bytes()
    }
}

#[test]
fn reads_writes_flushes_and_discards_allocate_nothing() {
    let digests = default_proposal()
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C);
    let asked_for =
        default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0);
    let pieces = default_proposal().with(OperationalKey::MaxRecvDataSegmentLength, 1024);
    for (name, proposal) in
        [("plain", default_proposal()), ("digests", digests), ("asked for", asked_for), ("in pieces", pieces)]
    {
        let mut initiator = CountedInitiator::new(initiator(proposal), target());
        assert!(initiator.allocations > 0, "the counter counts: login and bring-up allocate");
        initiator.assert_io_allocates_nothing(name);
    }
}
