//! Work that is executed immediately by the call, mixed with posted work.

use super::super::{IwarpConfig, OUTBOX_FULL};
use super::{StreamPair, ample};
use crate::queue_pair::Provider;
use blockmux_proto::rdma::{
    Endpoint, Event, MESSAGE, MessageHead, QueuePair, Remote, RemoteRights, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::{Memory, Seg, SgList};

fn link(config: &IwarpConfig) -> StreamPair {
    let mut link = StreamPair::new([&ample(), &ample()], [config, config], usize::MAX);
    link.connect();
    link
}

fn nothing() -> SgList {
    SgList::default()
}

#[test]
fn an_immediate_write_and_message_arrive_in_order_and_have_no_completion() {
    for config in [IwarpConfig::default(), IwarpConfig { has_crc: true, ..IwarpConfig::default() }] {
        let mut link = link(&config);
        let memory = Memory::from_heap(600);
        let passive = &mut link.ends[1].iwarp;
        let remote =
            passive.register(WorkId(1), &mut memory.seg(0, 600).into(), RemoteRights::RemoteWrite).unwrap();
        let active = &mut link.ends[0].iwarp;
        let mut pieces = SgList::one(Seg::from_slice(&[7; 501]));
        pieces.push(Seg::from_slice(&[8; 98]));
        assert!(!active.write(WorkId(2), pieces.clone(), remote), "it has no completion");
        active.send(b"done", &nothing(), Some(remote.stag));
        active.send(b"more", &SgList::one(Seg::from_slice(b" than that")), None);
        assert!(active.unsent() > 599 + 4 + 14);
        let all_events = link.settle();
        assert!(all_events[0].is_empty(), "{:?}", all_events[0]);
        assert_eq!(link.ends[0].iwarp.unsent(), 0);
        let [Event::Received { message: first, invalidated, .. }, Event::Received { message, .. }] =
            &all_events[1][..]
        else {
            panic!("{:?}", all_events[1])
        };
        assert_eq!((first.to_vec(), *invalidated), (b"done".to_vec(), Some(remote.stag)));
        assert_eq!(message.to_vec(), b"more than that");
        assert_eq!(memory.seg(0, 600).to_vec(), [&[7; 501][..], &[8; 98], &[0]].concat());
    }
}

#[test]
fn memory_that_the_caller_does_not_give_is_borrowed_from_the_receive_buffer() {
    for has_crc in [false, true] {
        let config = IwarpConfig { has_crc, mss: 9000, ..IwarpConfig::default() };
        for len in [1, 4095, 4096] {
            let mut link = link(&config);
            let remote = link.ends[1].iwarp.register_unbacked(len as u32).unwrap();
            let active = &mut link.ends[0].iwarp;
            assert!(!active.write(WorkId(2), SgList::one(Seg::from_slice(&vec![7; len])), remote));
            active.send(b"done", &nothing(), Some(remote.stag));
            let all_events = link.settle();
            let [Event::Received { written: Some(written), invalidated, .. }] = &all_events[1][..] else {
                panic!("{:?}", all_events[1])
            };
            assert_eq!((written.to_vec(), *invalidated), (vec![7; len], Some(remote.stag)));
            assert!(!written.is_writable() && link.ends[1].places == 0, "it is borrowed");
            assert!(link.ends[1].iwarp.invalidate(remote.stag).is_none());
        }
    }
}

#[test]
fn the_caller_gives_memory_where_data_would_be_copied_or_placed() {
    let config = |mss| IwarpConfig { mss, ..IwarpConfig::default() };
    for (mss, longest) in [(9000, 4096), (1448, 1428)] {
        let mut link = link(&config(mss));
        let passive = &mut link.ends[1].iwarp;
        assert!(passive.register_unbacked(longest + 1).is_none());
        let remote = passive.register_unbacked(longest).unwrap();
        // The peer may write it in parts nevertheless, and in another order.
        let active = &mut link.ends[0].iwarp;
        let part = |at: u64, byte: u8| {
            let len = longest / 2;
            let list = SgList::one(Seg::from_slice(&vec![byte; len as usize]));
            (list, Remote { address: remote.address + at, len, ..remote })
        };
        for (at, byte) in [(u64::from(longest / 2), 2), (0, 1)] {
            let (list, place) = part(at, byte);
            assert!(!active.write(WorkId(2), list.clone(), place));
        }
        link.settle();
        let half = longest as usize / 2;
        let written = link.ends[1].iwarp.invalidate(remote.stag).unwrap();
        assert_eq!(written.to_vec(), [vec![1; half], vec![2; half]].concat());
    }
}

#[test]
fn work_that_is_not_immediate_waits_in_order_and_completes() {
    let mut link = link(&IwarpConfig { mss: 1448, ..IwarpConfig::default() });
    let (sink, source) = (Memory::from_heap(1448), Memory::from_heap(1));
    let passive = &mut link.ends[1].iwarp;
    let sink_name =
        passive.register(WorkId(1), &mut sink.seg(0, 1448).into(), RemoteRights::RemoteWrite).unwrap();
    let source_name =
        passive.register(WorkId(1), &mut source.seg(0, 1).into(), RemoteRights::RemoteRead).unwrap();
    let active = &mut link.ends[0].iwarp;
    let room = active.room();
    let long = SgList::one(Seg::from_slice(&[1; 1448]));
    active.send(b"", &long, None);
    assert!(!active.write(WorkId(2), long.clone(), sink_name), "nothing is queued before it");
    // As many reads as may be in flight, and one that waits.
    let reads = u64::from(ample().reads) + 1;
    for id in (3..).take(reads as usize) {
        active.read(WorkId(id), Memory::from_heap(1).seg(0, 1).into(), source_name);
    }
    assert!(active.write(WorkId(100), nothing(), sink_name), "it would overtake a read");
    active.send(b"x", &nothing(), Some(sink_name.stag));
    assert_eq!(active.room(), room - 3 - reads as usize);
    let all_events = link.settle();
    let mut ids: Vec<_> = all_events[0]
        .iter()
        .map(|event| match event {
            Event::Done { id, result: Ok(()) } => *id,
            other => panic!("{other:?}"),
        })
        .collect();
    // A read may complete after work posted behind it.
    ids.retain(|id| !(3..3 + reads).contains(&id.0));
    assert_eq!(ids, [MESSAGE, WorkId(100), MESSAGE]);
    let [Event::Received { message: first, .. }, Event::Received { message, invalidated, .. }] =
        &all_events[1][..]
    else {
        panic!("{:?}", all_events[1])
    };
    assert_eq!((first.len(), message.to_vec(), *invalidated), (1448, b"x".to_vec(), Some(sink_name.stag)));
    assert_eq!(sink.seg(0, 1448).to_vec(), [1; 1448]);
    assert_eq!(link.ends[0].iwarp.room(), room);
}

#[test]
fn a_write_of_several_fpdus_arrives_complete_and_completes_only_if_it_had_to_wait() {
    const LEN: usize = 100_000;
    let data: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8).collect();
    for (config, comes_back) in [
        (IwarpConfig::default(), false),
        (IwarpConfig { mss: 65536, ..IwarpConfig::default() }, false),
        (IwarpConfig { has_crc: true, ..IwarpConfig::default() }, true),
    ] {
        let mut link = link(&config);
        let memory = Memory::from_heap(LEN);
        let passive = &mut link.ends[1].iwarp;
        let remote =
            passive.register(WorkId(1), &mut memory.seg(0, LEN).into(), RemoteRights::RemoteWrite).unwrap();
        let active = &mut link.ends[0].iwarp;
        let mut pieces = SgList::one(Seg::from_slice(&data[..70_001]));
        pieces.push(Seg::from_slice(&data[70_001..]));
        assert_eq!(active.write(WorkId(2), pieces.clone(), remote), comes_back);
        assert!(comes_back || active.unsent() > LEN);
        active.send(b"done", &nothing(), Some(remote.stag));
        let heard = link.settle();
        let dones =
            heard[0].iter().filter(|event| matches!(event, Event::Done { id: WorkId(2), .. })).count();
        assert_eq!((dones, link.ends[0].iwarp.unsent()), (usize::from(comes_back), 0));
        let [Event::Received { message, .. }] = &heard[1][..] else { panic!("{:?}", heard[1]) };
        assert_eq!(message.to_vec(), b"done");
        assert!(memory.seg(0, LEN).to_vec() == data);
    }
}

#[test]
fn a_write_that_the_outbox_has_no_room_for_waits() {
    let mut link = link(&IwarpConfig::default());
    let memory = Memory::from_heap(OUTBOX_FULL);
    let passive = &mut link.ends[1].iwarp;
    let mut local = memory.seg(0, OUTBOX_FULL).into();
    let remote = passive.register(WorkId(1), &mut local, RemoteRights::RemoteWrite).unwrap();
    let active = &mut link.ends[0].iwarp;
    let all = SgList::one(Seg::from_slice(&vec![7; OUTBOX_FULL]));
    active.send(b"first", &nothing(), None);
    assert!(active.write(WorkId(2), all.clone(), remote));
    let heard = link.settle();
    assert!(matches!(heard[0][..], [Event::Done { id: WorkId(2), result: Ok(()) }]), "{:?}", heard[0]);
    assert!(memory.seg(0, OUTBOX_FULL).to_vec().iter().all(|byte| *byte == 7));
}

#[test]
fn work_before_and_after_the_connection_is_refused_or_flushed() {
    let mut link = StreamPair::new([&ample(), &ample()], [&IwarpConfig::default(); 2], usize::MAX);
    let end = &mut link.ends[0].iwarp;
    assert_eq!(end.room(), 0);
    let mut local = Memory::from_heap(1).seg(0, 1).into();
    assert!(end.register(WorkId(1), &mut local, RemoteRights::RemoteRead).is_some());
    link.connect();
    link.ends[0].iwarp.post(WorkRequest::Disconnect);
    link.settle();
    let end = &mut link.ends[0].iwarp;
    assert_eq!(end.room(), 0);
    end.send(b"late", &nothing(), None);
    let mut local = Memory::from_heap(1).seg(0, 1).into();
    assert!(end.register(WorkId(2), &mut local, RemoteRights::RemoteRead).is_none());
    for expected in [MESSAGE, WorkId(2)] {
        let event = end.poll();
        let is_flushed =
            matches!(event, Some(Event::Done { id, result: Err(WorkError::Flushed) }) if id == expected);
        assert!(is_flushed, "{event:?}");
    }
}

#[test]
fn receive_buffers_of_one_call_are_counted() {
    let few = Endpoint { receives: 1, ..ample() };
    let mut link = StreamPair::new([&ample(), &few], [&IwarpConfig::default(); 2], usize::MAX);
    link.connect();
    link.ends[1].iwarp.receive(2);
    for _ in 0..3 {
        let (head, payload) = (MessageHead::from_slice(b"x"), nothing());
        link.ends[0].post(WorkRequest::Send {
            id: WorkId(1),
            head,
            payload,
            invalidate: None,
            is_solicited: false,
        });
    }
    let all_events = link.settle();
    assert_eq!(all_events[1].len(), 3);
}
