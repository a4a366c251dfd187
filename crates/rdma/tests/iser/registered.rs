//! Both sides over adapters that reach only registered memory.

use crate::bench::{ServedTarget, connect_on, initiator, pattern};
use blockmux_proto::driver::session::Initiator;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::node::offer;
use blockmux_rdma::loopback::LoopbackAdapter;
use blockmux_volume::{Io, Op, Tag};

#[test]
fn memory_is_registered_when_it_is_first_used_and_until_it_is_freed() {
    let adapters = [LoopbackAdapter::with_room(usize::MAX), LoopbackAdapter::with_room(usize::MAX)];
    let mut pair = connect_on(initiator(default_proposal()), &ServedTarget::new(offer(), None), &adapters);
    pair.run();
    assert!(pair.client.session().is_ready());
    let mut use_it = |rounds: u64| {
        for round in 0..rounds {
            let data = pattern(65_536);
            pair.write(round * 65_536, &data);
            assert_eq!(pair.read(round * 65_536, 65_536), data);
        }
    };
    // Memory in use by both sides, and memory cached by their pools.
    use_it(10);
    let blocks = adapters.each_ref().map(|adapter| adapter.len());
    use_it(90);
    assert_eq!(adapters.each_ref().map(|adapter| adapter.len()), blocks);
    assert!(blocks.iter().all(|&blocks| (1..8).contains(&blocks)), "{blocks:?}");
    drop(pair);
    assert!(adapters.iter().all(|adapter| adapter.is_empty()));
}

#[test]
fn a_failed_memory_registration_ends_the_connection_and_loses_no_command() {
    for side in 0..2 {
        let mut has_refused = false;
        for room in 0..4 {
            let mut adapters =
                [LoopbackAdapter::with_room(usize::MAX), LoopbackAdapter::with_room(usize::MAX)];
            adapters[side] = LoopbackAdapter::with_room(room);
            let mut pair =
                connect_on(initiator(default_proposal()), &ServedTarget::new(offer(), None), &adapters);
            pair.run();
            if !pair.client.session().is_ready() {
                has_refused = true;
                continue;
            }
            pair.client.submit(Io::new(Tag(7), Op::Read, 0, 65_536));
            pair.run();
            let done = pair.client.poll_done().map(|done| (done.tag, done.result.is_ok()));
            let unfinished: Vec<_> = pair.client.take_unfinished().iter().map(|io| io.tag).collect();
            match done {
                Some((tag, is_ok)) => assert!(tag == Tag(7) && is_ok && unfinished.is_empty()),
                None => assert_eq!(unfinished, [Tag(7)]),
            }
        }
        assert!(has_refused);
    }
}
