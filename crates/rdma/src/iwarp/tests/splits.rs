//! Both ends over streams that deliver any number of bytes at a time, and that are lost after any
//! byte.

use super::super::{Iwarp, IwarpConfig};
use super::{
    READ, RESPONSE, SEND, StreamPair, TestDriver, WRITE, ample, connected, fpdu, setup_frame, untagged,
};
use crate::queue_pair::Provider;
use blockmux_proto::rdma::{
    Endpoint, Event, MessageHead, Remote, RemoteRights, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::random::mix;
use blockmux_volume::{Memory, Pool, Seg, SgList};
use std::time::Instant;

fn bytes(salt: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| mix(mix(salt) ^ (at / 8)).to_le_bytes()[(at % 8) as usize]).collect()
}

fn seg(salt: u64, len: usize) -> Seg {
    Seg::from_slice(&bytes(salt, len))
}

/// Memory of the passive side, and the work that the active side has posted for it.
struct Traffic {
    written: Memory,
    fetched: Memory,
    posted: u64,
}

const LEN: usize = 20_000;

/// Posts work of every kind on the active side.
fn post_traffic(link: &mut StreamPair) -> Traffic {
    let [written, fetched] = [Memory::from_heap(LEN), Memory::from_heap(LEN)];
    let mut grant = |local: SgList, access| {
        link.ends[1].post(WorkRequest::Register { id: WorkId(0), local, access });
        match link.ends[1].iwarp.poll() {
            Some(Event::Registered { remote, .. }) => remote,
            other => panic!("{other:?}"),
        }
    };
    let target: Remote = grant(written.seg(0, LEN).into(), RemoteRights::RemoteWrite);
    let mut pieces = SgList::one(seg(5, LEN).slice(0, 777));
    pieces.push(seg(5, LEN).slice(777, LEN - 777));
    let source = grant(pieces, RemoteRights::RemoteRead);
    let send = |id, payload: SgList, invalidate, is_solicited| {
        let head = MessageHead::from_slice(b"head");
        WorkRequest::Send { id: WorkId(id), head, payload, invalidate, is_solicited }
    };
    let end = &mut link.ends[0];
    end.post(send(1, SgList::default(), None, false));
    end.post(WorkRequest::Write { id: WorkId(2), local: seg(4, LEN).into(), remote: target });
    end.post(WorkRequest::Read { id: WorkId(3), local: fetched.seg(0, LEN).into(), remote: source });
    end.post(send(4, seg(6, 9000).into(), Some(target.stag), true));
    let whole = Remote { len: 1, ..source };
    end.post(WorkRequest::Read {
        id: WorkId(5),
        local: Memory::from_heap(1).seg(0, 1).into(),
        remote: whole,
    });
    Traffic { written, fetched, posted: 5 }
}

fn check(traffic: &Traffic, all_events: &[Vec<Event>; 2]) {
    let mut done: Vec<u64> = all_events[0]
        .iter()
        .map(|event| match event {
            Event::Done { id, result: Ok(()) } => id.0,
            other => panic!("{other:?}"),
        })
        .collect();
    done.sort_unstable();
    assert_eq!(done, (1..=traffic.posted).collect::<Vec<_>>());
    let [Event::Received { message: first, .. }, Event::Received { message, invalidated: Some(_), .. }] =
        &all_events[1][..]
    else {
        panic!("{:?}", all_events[1])
    };
    assert_eq!(first.to_vec(), b"head");
    assert_eq!(message.to_vec(), [&b"head"[..], &bytes(6, 9000)].concat());
    assert!(traffic.written.seg(0, LEN).to_vec() == bytes(4, LEN));
    assert!(traffic.fetched.seg(0, LEN).to_vec() == bytes(5, LEN));
}

fn config(has_crc: bool, mss: usize) -> IwarpConfig {
    IwarpConfig { has_crc, mss, ..IwarpConfig::default() }
}

fn link(config: &IwarpConfig, step: usize) -> StreamPair {
    let endpoint = Endpoint { reads: 1, ..ample() };
    StreamPair::new([&endpoint, &endpoint], [config, config], step)
}

#[test]
fn traffic_is_the_same_however_its_bytes_are_split() {
    let steps = (1..40).chain([127, 500, 512, 1000, 1447, 4096, 8191, 30_000, usize::MAX]);
    for step in steps {
        for config in [config(false, [1448, 8948, 65_483][step % 3]), config(true, [0, 8948, 1448][step % 3])]
        {
            let mut link = link(&config, step);
            link.connect();
            let traffic = post_traffic(&mut link);
            check(&traffic, &link.settle());
        }
    }
}

#[test]
fn fpdus_of_every_size_work_with_and_without_crcs() {
    for mss in
        (128..700).step_by(37).chain([1448, 2048, 4096, 8948, 9000, 16_384, 40_000, 65_483, usize::MAX])
    {
        for has_crc in [false, true] {
            let mut link = link(&config(has_crc, mss), usize::MAX);
            link.connect();
            let traffic = post_traffic(&mut link);
            check(&traffic, &link.settle());
        }
    }
}

#[test]
fn the_size_of_fpdus_may_change_during_a_connection() {
    let mut link = link(&config(false, 0), usize::MAX);
    link.connect();
    for mss in [65_483, 1448, 536] {
        let traffic = post_traffic(&mut link);
        link.ends.iter_mut().for_each(|end| end.iwarp.set_mss(mss));
        check(&traffic, &link.settle());
    }
}

#[test]
fn long_payload_is_placed_and_short_payload_is_not() {
    for (mss, step, is_placed) in [(65_483, 1000, true), (1448, 1000, false), (65_483, usize::MAX, false)] {
        let mut link = link(&config(step == 1000, mss), step);
        link.connect();
        let traffic = post_traffic(&mut link);
        check(&traffic, &link.settle());
        assert_eq!(link.ends[1].places > 0, is_placed, "a write, with {mss} and {step}");
        assert_eq!(link.ends[0].places > 0, is_placed, "an answer to a read, with {mss} and {step}");
    }
}

/// All posted work completes once, flushed work in the order of posting, and then the end is
/// reported once.
#[test]
fn a_connection_lost_at_any_byte_completes_all_work_once() {
    for has_crc in [false, true] {
        let mut at = 0;
        loop {
            let mut link = link(&config(has_crc, 8948), 61);
            link.connect();
            let traffic = post_traffic(&mut link);
            let begin: usize = link.crossed.iter().sum();
            let mut all_events = Vec::new();
            let mut is_lost = false;
            loop {
                let has_moved = link.turn();
                if link.crossed.iter().sum::<usize>() - begin >= at {
                    is_lost = has_moved;
                    break;
                }
                let events = link.ends[0].events();
                drop(link.ends[1].events());
                if !has_moved && events.is_empty() {
                    break;
                }
                all_events.extend(events);
            }
            if !is_lost {
                assert!(at > 2 * LEN, "it was lost up to the end");
                break;
            }
            link.ends.iter_mut().for_each(|end| end.lose());
            all_events.extend(link.ends[0].events());
            assert!(matches!(all_events.pop(), Some(Event::Disconnected)));
            let ids: Vec<_> = all_events
                .iter()
                .map(|event| match event {
                    Event::Done { id, result } => (id.0, *result),
                    other => panic!("{other:?}"),
                })
                .collect();
            let flushed: Vec<_> = ids.iter().filter(|(_, result)| result.is_err()).collect();
            assert!(flushed.iter().all(|(_, result)| *result == Err(WorkError::Flushed)));
            assert!(flushed.is_sorted_by_key(|(id, _)| *id));
            let mut all: Vec<_> = ids.iter().map(|(id, _)| *id).collect();
            all.sort_unstable();
            assert_eq!(all, (1..=traffic.posted).collect::<Vec<_>>(), "lost after {at} bytes");
            let passive = link.ends[1].events();
            assert!(matches!(passive.last(), Some(Event::Disconnected)));
            assert_eq!(passive.iter().filter(|event| matches!(event, Event::Disconnected)).count(), 1);
            at += if at < 700 { 7 } else { 997 };
        }
    }
}

#[test]
fn the_outbox_is_bounded_whatever_is_posted_or_read() {
    let endpoint = Endpoint { regions: 4, ..ample() };
    let mut link = StreamPair::new([&endpoint, &endpoint], [&IwarpConfig::default(); 2], usize::MAX);
    link.connect();
    let memory = Memory::from_heap(1 << 20);
    let local = || SgList::one(memory.seg(0, 1 << 20));
    link.ends[1].post(WorkRequest::Register {
        id: WorkId(0),
        local: local(),
        access: RemoteRights::RemoteRead,
    });
    let Some(Event::Registered { remote, .. }) = link.ends[1].iwarp.poll() else { panic!() };
    link.ends[1].post(WorkRequest::Register {
        id: WorkId(0),
        local: local(),
        access: RemoteRights::RemoteWrite,
    });
    let Some(Event::Registered { remote: target, .. }) = link.ends[1].iwarp.poll() else { panic!() };
    for id in 0..8 {
        link.ends[0].post(WorkRequest::Read {
            id: WorkId(id),
            local: Memory::from_heap(1 << 20).seg(0, 1 << 20).into(),
            remote,
        });
        link.ends[0].post(WorkRequest::Write { id: WorkId(id), local: local(), remote: target });
    }
    let mut done = 0;
    loop {
        let mut has_moved = link.turn();
        for end in &mut link.ends {
            let events = end.events();
            has_moved |= !events.is_empty();
            done += events.len();
            let len = blockmux_proto::driver::session::StreamSession::outbox(&mut end.iwarp).len();
            assert!(len < super::super::OUTBOX_FULL + 70_000, "{len}");
        }
        if !has_moved {
            break;
        }
    }
    assert_eq!(done, 16);
}

/// Linux's software iWARP took a length below that of the header for the rest of a segment, and
/// parsed headers that had arrived in part (CVE-2026-64102, CVE-2026-98323).
#[test]
fn a_stream_cut_or_ended_at_every_byte_of_its_set_up_and_of_each_kind_of_fpdu_delivers_whole_messages_only() {
    let passive = || {
        let config = IwarpConfig { is_peer_to_peer: false, ..IwarpConfig::default() };
        let iwarp = Iwarp::passive(&ample(), config, Pool::new(1 << 20), [1; 32], Instant::now());
        TestDriver::new(iwarp, usize::MAX)
    };
    let run = |driver: &mut TestDriver, bytes: &[u8]| {
        driver.push(bytes);
        while driver.receive() {}
        driver.events()
    };
    let end = |driver: &mut TestDriver| {
        driver.peer_has_closed = true;
        while driver.receive() {}
        driver.events()
    };
    let request = setup_frame(b"q", 0x10, 2, &[0, 8, 0, 8, 1, 2, 3]);
    for cut in 0..request.len() {
        let mut driver = passive();
        assert!(run(&mut driver, &request[..cut]).is_empty(), "cut at {cut}");
        assert!(matches!(&run(&mut driver, &request[cut..])[..], [Event::Requested { .. }]), "cut at {cut}");
        let mut driver = passive();
        assert!(run(&mut driver, &request[..cut]).is_empty());
        assert!(matches!(&end(&mut driver)[..], [Event::Disconnected]), "ended at {cut}");
        assert!(driver.sent(usize::MAX).is_empty());
    }
    for has_crc in [false, true] {
        let message = fpdu(&untagged(SEND, 0, [0, 1, 0], &bytes(1, 90)), has_crc);
        for cut in 0..message.len() {
            let mut driver = connected(false, &ample(), has_crc);
            assert!(run(&mut driver, &message[..cut]).is_empty(), "cut at {cut}");
            let events = run(&mut driver, &message[cut..]);
            let [Event::Received { message, .. }] = &events[..] else { panic!("cut at {cut}: {events:?}") };
            assert_eq!(message.to_vec(), bytes(1, 90));
        }
        for cut in 0..message.len() {
            let mut driver = connected(false, &ample(), has_crc);
            run(&mut driver, &message[..cut]);
            assert!(matches!(&end(&mut driver)[..], [Event::Disconnected]), "ended at {cut}");
        }
        // A segment shorter than the header of its kind is refused, and nothing is taken for its
        // payload.
        for (control, header) in [(SEND, 18), (READ, 18), (WRITE, 14), (RESPONSE, 14)] {
            for len in 0..header {
                let mut segment = control.to_vec();
                segment.resize(len.max(2), 0);
                segment.truncate(len);
                let whole = fpdu(&segment, has_crc);
                for cut in 0..whole.len() {
                    let mut driver = connected(false, &ample(), has_crc);
                    let mut events = run(&mut driver, &whole[..cut]);
                    events.extend(run(&mut driver, &[&whole[cut..], &message[..]].concat()));
                    assert!(matches!(&events[..], [Event::Disconnected]), "{len} bytes: {events:?}");
                    assert!(driver.error.is_some());
                }
            }
        }
    }
}
