//! This initiator with this target.

use crate::bench::{InitiatorAndTarget, SIZE, ServedTarget, TargetEnd, connect, initiator, list, pattern};
use blockmux_proto::driver::session::Initiator;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::iscsi::client::{FoundTarget, IscsiDiscoverySession, default_proposal};
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::offer;
use blockmux_proto::rdma::{
    Endpoint, Event, MessageHead, QueuePair, RdmaConnections, RdmaSession, WorkId, WorkRequest,
};
use blockmux_rdma::loopback;
use blockmux_rdma::{Driven, Fault, Provider, Violation};
use blockmux_volume::{Extent, Io, Op, Output, Seg, SgList, Tag};
use std::time::Instant;

/// Ways to transfer data: the initiator's and the target's parameters.
fn transfer_modes() -> Vec<(&'static str, OperationalParameters, OperationalParameters)> {
    vec![
        ("immediate data", default_proposal(), offer()),
        ("no immediate data", default_proposal().with(OperationalKey::ImmediateData, 0), offer()),
        (
            "R2T for all",
            default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0),
            offer(),
        ),
        ("little immediate data", default_proposal().with(OperationalKey::FirstBurstLength, 1024), offer()),
    ]
}

#[test]
fn written_data_is_read_at_every_length() {
    for (name, proposal, offer) in transfer_modes() {
        let mut pair = InitiatorAndTarget::ready(proposal, offer);
        for blocks in [1, 2, 3, 15, 16, 17, 127, 128, 2048, 6001] {
            let data = pattern(blocks * 512);
            pair.write(512, &data);
            assert!(pair.read(512, data.len()) == data, "{name}, {blocks} blocks");
            let own = list(&vec![0; data.len()]);
            let output = pair.call(Op::Read, 512, data.len() as u64, Some(own.clone())).unwrap();
            assert!(own.to_vec() == data && output.into_data().len() == data.len(), "{name}, {blocks}");
        }
    }
}

#[test]
fn segmented_buffers_are_transferred_directly() {
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    let data = pattern(96 << 10);
    let pieces = |bytes: &[u8]| {
        let mut list = SgList::default();
        bytes.chunks(7168).for_each(|piece| list.push(Seg::from_slice(piece)));
        list
    };
    let len = data.len() as u64;
    pair.call(Op::Write { fua: true }, 4096, len, Some(pieces(&data))).unwrap();
    let own = pieces(&vec![0; data.len()]);
    pair.call(Op::Read, 4096, len, Some(own.clone())).unwrap();
    assert!(own.to_vec() == data);
}

#[test]
fn the_negotiated_parameters_are_those_of_iser() {
    let pair = InitiatorAndTarget::ready(default_proposal().requiring(OperationalKey::HeaderDigest), offer());
    let agreed = pair.client.session().parameters().unwrap();
    let expected = [
        (OperationalKey::RDMAExtensions, 1),
        (OperationalKey::HeaderDigest, 0),
        (OperationalKey::DataDigest, 0),
        (OperationalKey::ErrorRecoveryLevel, 0),
        (OperationalKey::InitiatorRecvDataSegmentLength, 8192),
        (OperationalKey::TargetRecvDataSegmentLength, 8192),
        (OperationalKey::MaxRecvDataSegmentLength, 8192),
        (OperationalKey::FirstBurstLength, 8192),
    ];
    assert_eq!(expected.map(|(key, _)| (key, agreed.get(key))), expected);
    assert_eq!(agreed.max_send_data_segment_length(), 8192);
}

#[test]
fn every_operation_does_what_it_says() {
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    let zeroes = |fua, may_unmap| Op::WriteZeroes { fua, may_unmap, only_fast: false };
    for op in [Op::Flush, Op::Prefetch, Op::Discard { fua: true }] {
        let len = if op == Op::Flush { 0 } else { 8192 };
        assert!(pair.call(op, 0, len, None).is_ok(), "{op:?}");
    }
    for fua in [false, true] {
        pair.write(0, &pattern(1 << 20));
        assert!(pair.call(zeroes(fua, !fua), 512, 1 << 19, None).is_ok());
        assert_eq!(pair.read(0, 512), pattern(512));
        assert_eq!(pair.read(512, 1 << 19), vec![0; 1 << 19]);
    }
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    pair.write(1 << 20, &pattern(1 << 20));
    let Output::Extents(extents) = pair.call(Op::BlockStatus, 0, SIZE, None).unwrap() else { panic!() };
    let extent = |len, is_hole| Extent { len, hole: is_hole, zero: is_hole };
    assert_eq!(extents, [extent(1 << 20, true), extent(1 << 20, false), extent(6 << 20, true)]);
}

#[test]
fn requests_in_flight_may_end_in_any_order() {
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    let data = pattern(64 << 10);
    pair.write(0, &data);
    pair.server.holds_io = true;
    for n in 0..8 {
        pair.client.submit(Io::new(Tag(n), Op::Read, n * 4096, 4096));
    }
    pair.run();
    pair.server.submitted.make_contiguous().reverse();
    while !pair.server.submitted.is_empty() {
        pair.server.finish_one();
        pair.run();
    }
    for n in (0..8).rev() {
        let done = pair.client.poll_done().unwrap();
        let expected = data[n as usize * 4096..][..4096].to_vec();
        assert_eq!((done.tag, done.result.unwrap().into_data().to_vec()), (Tag(n), expected));
    }
}

#[test]
fn a_full_window_of_reads_and_writes_respects_the_credits() {
    for (name, proposal, offer) in transfer_modes() {
        let mut pair = InitiatorAndTarget::ready(proposal, offer);
        pair.server.holds_io = true;
        let mut submitted = 0;
        while pair.client.room() > 0 {
            let (tag, offset) = (Tag(submitted), submitted * 4096);
            let (op, data) = match submitted % 2 {
                0 => (Op::Read, None),
                _ => (Op::Write { fua: false }, Some(list(&pattern(16 << 10)))),
            };
            let len = if data.is_some() { 16 << 10 } else { 4096 };
            pair.client.submit(Io { tag, op, offset, len, data });
            submitted += 1;
        }
        pair.run();
        assert_eq!((submitted, pair.server.submitted.len()), (256, 256), "{name}");
        pair.server.holds_io = false;
        pair.run();
        let mut done = 0;
        while let Some(completion) = pair.client.poll_done() {
            assert!(completion.result.is_ok());
            done += 1;
        }
        assert_eq!(done, 256, "{name}");
        assert!(pair.client.broken().is_none() && pair.server.driven.broken().is_none());
    }
}

#[test]
fn a_stop_waits_for_outstanding_io_and_then_logs_out() {
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    pair.server.holds_io = true;
    pair.client.submit(Io::new(Tag(1), Op::Read, 0, 4096));
    pair.run();
    pair.client.on_stop();
    pair.run();
    assert!(!pair.client.session().is_over() && pair.client.room() == 0);
    pair.server.finish_one();
    pair.run();
    assert!(pair.client.poll_done().unwrap().result.is_ok());
    assert!(pair.client.session().is_over() && pair.server.driven.session().is_over());
    assert!(pair.client.broken().is_none() && pair.server.driven.broken().is_none());
}

#[test]
fn a_stopping_target_makes_its_initiator_log_out() {
    let mut pair = InitiatorAndTarget::ready(default_proposal(), offer());
    pair.server.holds_io = true;
    for n in 0..3 {
        pair.client.submit(Io::new(Tag(n), Op::Read, 0, 4096));
    }
    pair.run();
    pair.server.driven.on_stop(Instant::now());
    pair.run();
    assert_eq!(pair.client.room(), 0);
    pair.server.finish_one();
    pair.run();
    assert!(pair.client.poll_done().unwrap().result.is_ok());
    pair.server.finish_one();
    pair.server.finish_one();
    pair.run();
    assert!(
        pair.client.poll_done().unwrap().result.is_ok() && pair.client.poll_done().unwrap().result.is_ok()
    );
    assert!(pair.client.session().is_over() && pair.server.driven.session().is_over());
}

#[test]
fn more_messages_than_posted_buffers_end_the_connection() {
    let served = ServedTarget::new(offer(), None);
    for (count, fault) in [(560, None), (561, Some(Fault::Peer(Violation::NoReceive)))] {
        let endpoint = Endpoint { sends: 1000, ..initiator(default_proposal()).endpoint() };
        let (mut flood, passive) = loopback::pair(&endpoint, &served.session().endpoint(), [9; 32]);
        let mut server = TargetEnd::new(&served, Driven::new(served.session(), passive, Instant::now()));
        server.run();
        assert!(matches!(flood.poll(), Some(Event::Connected { .. })));
        // A login that never ends.
        for _ in 0..count {
            let (id, payload, mut head) = (WorkId(0), SgList::default(), MessageHead::from_slice(&[0; 76]));
            (head[0], head[28], head[29]) = (0x10, 0x43, 0x44);
            flood.post(WorkRequest::Send { id, head, payload, invalidate: None, is_solicited: false });
        }
        while flood.poll().is_some() {}
        server.run();
        assert!(server.driven.broken().is_some(), "more than 64 requests");
        assert_eq!(server.driven.queue_pair().fault(), fault, "{count} messages");
    }
}

#[test]
fn discovery_finds_every_target() {
    let name = Name::new(crate::bench::INITIATOR).unwrap();
    let session =
        IscsiDiscoverySession::over_rdma(name, None, [0x80, 0, 0, 0, 0, 2], [5; 32], Instant::now());
    assert_eq!(session.endpoint().regions, 1);
    let mut pair = connect(session, &ServedTarget::new(offer(), None));
    pair.run();
    let session = pair.client.session();
    let found = FoundTarget { name: crate::bench::TARGET.into(), addresses: vec!["192.0.2.1:3260,1".into()] };
    assert_eq!((session.targets(), session.left_out()), (&[found][..], 0));
    assert!(session.is_over() && pair.server.driven.session().is_over());
}

#[test]
fn an_initiator_that_logs_in_again_replaces_its_session() {
    let served = ServedTarget::new(offer(), None);
    let mut first = connect(initiator(default_proposal()), &served);
    first.run();
    assert!(first.client.is_ready());
    let mut second = connect(initiator(default_proposal()), &served);
    second.run();
    assert!(!second.client.is_ready(), "the first session still exists");
    drop(first);
    let later = Instant::now() + std::time::Duration::from_secs(1);
    blockmux_proto::driver::session::Timed::on_timeout(&mut second.server.driven, later).unwrap();
    second.run();
    assert!(second.client.is_ready(), "{:?}", second.client.session().refused());
}
