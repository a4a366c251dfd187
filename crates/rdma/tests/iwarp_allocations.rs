//! Software iWARP allocates nothing for a message, write or read once it has reached its usual
//! depth.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod iwarp_pipe;
mod rounds;

use blockmux_rdma::iwarp::IwarpConfig;
use iwarp_pipe::Pipe;
use rounds::{DEPTH, Round, RoundKind, rounds_of_every_kind};

#[test]
fn messages_writes_and_reads_allocate_nothing() {
    for (has_crc, mss, is_shared) in
        [(false, 65_483, true), (false, 1448, false), (true, 8948, false), (true, 8948, true)]
    {
        let config = IwarpConfig { has_crc, mss, ..IwarpConfig::default() };
        for (kind, len) in rounds_of_every_kind() {
            let mut round = Round::new(Pipe::new(&config), len, kind, is_shared);
            let allocations = round.allocations(kind, 60);
            let case =
                format!("{kind:?} of {len} bytes, CRC {has_crc}, shared {is_shared}, segments of {mss}");
            assert_eq!(allocations, 0, "{case}");
            // Work of several FPDUs is queued, and so is later work until it is sent.
            let fits = matches!(kind, RoundKind::Immediate) && len < mss.min(10_000);
            assert!(!fits || round.immediate == 60 * 2 * DEPTH, "{case}: {} at once", round.immediate);
        }
    }
}
