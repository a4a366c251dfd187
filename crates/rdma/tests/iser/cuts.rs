//! Connections that are lost at every point.

use crate::bench::{InitiatorAndTarget, ServedTarget, connect, initiator, list, pattern};
use blockmux_proto::driver::session::Initiator;
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, default_proposal};
use blockmux_proto::iscsi::node::offer;
use blockmux_volume::{Io, Op, Tag};
use std::collections::BTreeMap;

/// Writes of various lengths, and reads.
fn all_io() -> Vec<Io> {
    let lens = [512, 8192, 8704, 65536, 300_032];
    let io = |nth: usize, op, len: usize, data| {
        let offset = (nth as u64) << 20;
        Io { tag: Tag(nth as u64), op, offset, len: len as u64, data }
    };
    let write =
        |(nth, len): (usize, &usize)| io(nth, Op::Write { fua: false }, *len, Some(list(&pattern(*len))));
    let mut all: Vec<Io> = lens.iter().enumerate().map(write).collect();
    all.push(io(5, Op::Read, 4096, None));
    all.push(io(6, Op::Read, 100_352, Some(list(&vec![1; 100_352]))));
    all
}

/// Counts completions by tag.
fn collect(pair: &mut InitiatorAndTarget<IscsiInitiatorSession>, done: &mut BTreeMap<u64, usize>) {
    while let Some(completion) = pair.client.poll_done() {
        assert!(completion.result.is_ok());
        *done.entry(completion.tag.0).or_default() += 1;
    }
}

/// Submits I/O, and runs both sides until there is no progress.
fn run(pair: &mut InitiatorAndTarget<IscsiInitiatorSession>, io: Vec<Io>, done: &mut BTreeMap<u64, usize>) {
    for io in io {
        assert!(pair.client.room() > 0);
        pair.client.submit(io);
    }
    pair.run();
    collect(pair, done);
}

#[test]
fn each_command_is_answered_or_replayed_once_wherever_the_connection_is_lost() {
    let mut is_cut = true;
    let (mut pieces, mut replayed) = (0, 0);
    while is_cut {
        let served = ServedTarget::new(offer(), None);
        let mut pair = connect(initiator(default_proposal()), &served);
        pair.client.queue_pair().break_after(pieces);
        pair.run();
        let mut done = BTreeMap::new();
        let mut left = all_io();
        if pair.client.is_ready() && pair.client.room() > 0 {
            run(&mut pair, std::mem::take(&mut left), &mut done);
        }
        is_cut = done.len() < all_io().len();
        left.extend(pair.client.take_unfinished());
        replayed += left.len();
        drop(pair);
        let mut pair = connect(initiator(default_proposal()), &served);
        pair.run();
        assert!(pair.client.is_ready(), "after {pieces}: {:?}", pair.client.session().refused());
        run(&mut pair, left, &mut done);
        let counts: Vec<_> = done.into_iter().collect();
        assert_eq!(counts, (0..7).map(|tag| (tag, 1)).collect::<Vec<_>>(), "after {pieces}");
        for (nth, len) in [512, 8192, 8704, 65536, 300_032].into_iter().enumerate() {
            assert!(pair.read((nth as u64) << 20, len) == pattern(len), "after {pieces}: write {nth}");
        }
        pieces += 1;
    }
    assert!(pieces > 40 && replayed > 100, "{pieces} points, {replayed} replays");
}

#[test]
fn io_that_is_in_flight_when_the_connection_is_lost_ends_at_the_volume() {
    let served = ServedTarget::new(offer(), None);
    let mut pair = connect(initiator(default_proposal()), &served);
    pair.run();
    pair.server.holds_io = true;
    for io in all_io() {
        pair.client.submit(io);
    }
    pair.run();
    assert_eq!(pair.server.submitted.len(), 7);
    pair.client.queue_pair().break_after(0);
    // A packet has to be sent for the loss to happen.
    pair.client.on_stop();
    pair.server.finish_one();
    pair.run();
    assert!(pair.server.driven.session().is_over());
    assert_eq!(pair.server.cancelled.len(), 6, "the volume is asked to cancel");
    while !pair.server.submitted.is_empty() {
        pair.server.finish_one();
    }
    pair.run();
    let tags: Vec<_> = pair.client.take_unfinished().into_iter().map(|io| io.tag.0).collect();
    assert_eq!(tags, [0, 1, 2, 3, 4, 5, 6]);
    drop(pair);
    let mut second = connect(initiator(default_proposal()), &served);
    second.run();
    assert!(second.client.is_ready());
}
