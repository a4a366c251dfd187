//! What is done while it is asked, among what is posted.

use super::super::Config;
use super::{Link, ample};
use crate::queue_pair::QueuePair;
use blockmux_proto::rdma::{Access, AtOnce, Endpoint, Event, Head, Stag, Work, WorkId};
use blockmux_volume::{Memory, Seg, SgList};

fn link(config: &Config) -> Link {
    let mut link = Link::new([&ample(), &ample()], [config, config], usize::MAX);
    link.connect();
    link
}

fn nothing() -> SgList {
    SgList::default()
}

#[test]
fn a_write_and_the_message_behind_it_arrive_in_order_and_come_back_as_nothing() {
    for config in [
        Config::default(),
        Config { has_crc: true, ..Config::default() },
        Config { wants_markers: true, ..Config::default() },
    ] {
        let mut link = link(&config);
        let memory = Memory::from_heap(600);
        let passive = &mut link.ends[1].iwarp;
        let remote = passive.register(&mut memory.seg(0, 600).into(), Access::RemoteWrite).unwrap();
        let active = &mut link.ends[0].iwarp;
        let mut pieces = SgList::one(Seg::from_slice(&[7; 501]));
        pieces.push(Seg::from_slice(&[8; 98]));
        assert!(active.write(&pieces, remote));
        assert!(active.send(b"done", &nothing(), Some(remote.stag)));
        assert!(active.send(b"more", &SgList::one(Seg::from_slice(b" than that")), None));
        assert!(active.unsent() > 599 + 4 + 14);
        let heard = link.settle();
        assert!(heard[0].is_empty(), "{:?}", heard[0]);
        assert_eq!(link.ends[0].iwarp.unsent(), 0);
        let [Event::Received { message: first, invalidated }, Event::Received { message, .. }] =
            &heard[1][..]
        else {
            panic!("{:?}", heard[1])
        };
        assert_eq!((first.to_vec(), *invalidated), (b"done".to_vec(), Some(remote.stag)));
        assert_eq!(message.to_vec(), b"more than that");
        assert_eq!(memory.seg(0, 600).to_vec(), [&[7; 501][..], &[8; 98], &[0]].concat());
    }
}

#[test]
fn what_cannot_be_done_at_once_is_declined_and_nothing_overtakes_what_waits() {
    let mut link = link(&Config { mss: 1448, ..Config::default() });
    let end = &mut link.ends[0].iwarp;
    let long = SgList::one(Seg::from_slice(&[1; 1448]));
    assert!(!end.send(b"", &long, None), "it takes two FPDUs");
    let remote = blockmux_proto::rdma::Remote { stag: Stag(5), address: 0, len: 3 };
    assert!(!end.write(&SgList::one(Seg::from_slice(b"four")), remote), "longer than its place");
    // As many reads as may be on their way, and one that waits.
    for id in 0..=u64::from(ample().reads) {
        let local = Memory::from_heap(3).seg(0, 3).into();
        end.post(Work::Read { id: WorkId(id), local, remote });
    }
    assert!(!end.send(b"x", &nothing(), None) && !end.write(&nothing(), remote));
}

#[test]
fn only_a_connection_sends_and_one_that_is_over_names_no_memory() {
    let mut link = Link::new([&ample(), &ample()], [&Config::default(); 2], usize::MAX);
    let end = &mut link.ends[0].iwarp;
    assert!(!end.send(b"early", &nothing(), None));
    assert!(end.register(&mut Memory::from_heap(1).seg(0, 1).into(), Access::RemoteRead).is_some());
    link.connect();
    link.ends[0].iwarp.post(Work::Disconnect);
    link.settle();
    let end = &mut link.ends[0].iwarp;
    assert!(!end.send(b"late", &nothing(), None));
    assert!(end.register(&mut Memory::from_heap(1).seg(0, 1).into(), Access::RemoteRead).is_none());
}

#[test]
fn receive_buffers_that_are_posted_at_once_count() {
    let few = Endpoint { receives: 1, ..ample() };
    let mut link = Link::new([&ample(), &few], [&Config::default(); 2], usize::MAX);
    link.connect();
    assert!(link.ends[1].iwarp.receive(2));
    for _ in 0..3 {
        let (head, payload) = (Head::from_slice(b"x"), nothing());
        link.ends[0].post(Work::Send { id: WorkId(1), head, payload, invalidate: None, is_solicited: false });
    }
    let heard = link.settle();
    assert_eq!(heard[1].len(), 3);
}
