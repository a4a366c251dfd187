//! Software iWARP allocates nothing for a message, write or read once it has reached its usual
//! depth.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod iwarp_pipe;
mod rounds;

use blockmux_rdma::iwarp::IwarpConfig;
use iwarp_pipe::Pipe;
use rounds::{DEPTH, Round, RoundKind};

#[test]
fn messages_writes_and_reads_allocate_nothing() {
    let kinds = [
        RoundKind::Sends,
        RoundKind::Writes,
        RoundKind::Reads,
        RoundKind::WritesAndClosings,
        RoundKind::Immediate,
    ];
    for (has_crc, mss, is_shared) in
        [(false, 65_483, true), (false, 1448, false), (true, 8948, false), (true, 8948, true)]
    {
        let config = IwarpConfig { has_crc, mss, ..IwarpConfig::default() };
        for kind in kinds {
            for len in [512, 4096, 60_000] {
                let mut round = Round::new(Pipe::new(&config), len, kind, is_shared);
                let mut allocations = 0;
                for turn in 0..60 {
                    let before = counting::of_this_thread();
                    round.run(kind);
                    if turn >= 20 {
                        allocations += counting::of_this_thread() - before;
                    }
                }
                let case =
                    format!("{kind:?} of {len} bytes, CRC {has_crc}, shared {is_shared}, segments of {mss}");
                assert_eq!(allocations, 0, "{case}");
                // Work of several FPDUs is queued, and so is later work until it is sent.
                let fits = matches!(kind, RoundKind::Immediate) && len < mss.min(10_000);
                assert!(!fits || round.immediate == 60 * 2 * DEPTH, "{case}: {} at once", round.immediate);
            }
        }
    }
}
