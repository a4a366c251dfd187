//! ATA over Ethernet, whose frames are lost, duplicated, delayed and reordered.

use crate::seeds::{self, ms};
use blockmux_engine::sim::{FrameFault, FrameOutcome, FrameScenario, LanConditions};
use std::time::Duration;

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> FrameScenario) -> Vec<FrameOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run())
}

/// Of a thousand frames, this many are lost, as many are duplicated, and as many are late.
fn lossy(per_thousand: u32) -> LanConditions {
    LanConditions {
        losses_per_thousand: per_thousand,
        doubles_per_thousand: per_thousand,
        late_per_thousand: per_thousand,
        ..LanConditions::FAIR
    }
}

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    run_seeds(60, |seed| FrameScenario { ports: 1 + seed as usize % 3, ..FrameScenario::new(seed) });
}

#[test]
fn frames_of_any_size_carry_the_same_data() {
    run_seeds(40, |seed| FrameScenario {
        conditions: LanConditions { mtu: [1500, 4132, 4608, 9000][seed as usize % 4], ..lossy(10) },
        ..FrameScenario::new(seed)
    });
}

#[test]
fn nothing_is_lost_or_corrupted_with_1_percent_of_loss_duplication_and_late_frames() {
    run_seeds(60, |seed| FrameScenario { conditions: lossy(10), ..FrameScenario::new(seed) });
}

#[test]
fn nothing_is_lost_or_corrupted_with_5_percent_of_loss_duplication_and_late_frames() {
    run_seeds(60, |seed| FrameScenario { conditions: lossy(50), ..FrameScenario::new(seed) });
}

#[test]
fn nothing_is_lost_or_corrupted_with_20_percent_of_loss_duplication_and_late_frames() {
    run_seeds(60, |seed| FrameScenario {
        conditions: lossy(200),
        volume_delay: ms(seed % 5),
        ..FrameScenario::new(seed)
    });
}

#[test]
fn throughput_degrades_smoothly_with_loss() {
    let took = |per_thousand| -> Duration {
        let conditions = LanConditions { losses_per_thousand: per_thousand, ..LanConditions::FAIR };
        let all =
            run_seeds(20, |seed| FrameScenario { conditions, requests: 400, ..FrameScenario::new(seed) });
        all.iter().map(|outcome| outcome.took).sum()
    };
    let all = [0, 10, 50, 200].map(took);
    assert!(seeds::is_one() || all.is_sorted(), "{all:?}");
    // The time grows with the frames lost, and about as much again for retransmits that are lost
    // and for the smaller window. A lost frame costs some round trips, and never a stall of 50 ms:
    // with a fifth of all frames lost, there would be hundreds of those.
    let [fair, one, five, twenty] = all;
    assert!(seeds::is_one() || (one < fair * 8 && five < one * 8 && twenty < five * 12), "{all:?}");
    assert!(seeds::is_one() || twenty < Duration::from_secs(5), "{all:?}");
}

#[test]
fn a_target_and_initiator_that_share_a_cpu_transfer_a_window_per_time_slice_without_retransmits() {
    let run = |turn: Duration| {
        let scenario = |seed| FrameScenario {
            conditions: LanConditions { mtu: 1500, buffers: 256, ..LanConditions::FAIR },
            blocks: 2048,
            requests: 2000,
            depth: 32,
            turns: Some(turn),
            ..FrameScenario::new(seed)
        };
        run_seeds(10, scenario)
    };
    // Frames that arrive while the initiator has no CPU time are received when it has some again.
    // So the length of the time slice does not matter: at most a query or two are overdue.
    let (short, long) = (run(ms(4)), run(ms(30)));
    for (short, long) in short.iter().zip(&long) {
        assert!(short.frames.abs_diff(long.frames) < 10, "{short:?} {long:?}");
        // Each request of 32 takes two or three rounds, and the first rounds have a small window.
        for (outcome, turn) in [(short, ms(4)), (long, ms(30))] {
            let rounds = outcome.took.div_duration_f64(2 * turn);
            assert!(rounds < 145.0, "{rounds} in {outcome:?}");
        }
    }
}

#[test]
fn a_port_with_few_buffers_is_only_slower() {
    run_seeds(40, |seed| FrameScenario {
        conditions: LanConditions { buffers: 4, mtu: 1500, ..LanConditions::FAIR },
        depth: 32,
        ..FrameScenario::new(seed)
    });
}

#[test]
fn a_target_restart_is_transparent_to_the_client() {
    let outcomes = run_seeds(40, |seed| FrameScenario {
        conditions: lossy(5),
        fault: Some(FrameFault::TargetRestarts(ms(60))),
        volume_delay: ms(2),
        ..FrameScenario::new(seed)
    });
    let faults: u32 = outcomes.iter().map(|outcome| outcome.faults).sum();
    assert!(seeds::is_one() || faults > 10, "only {faults} stops");
}

#[test]
fn interfaces_that_go_down_and_up_only_cost_time() {
    let outcomes = run_seeds(40, |seed| FrameScenario {
        fault: Some(FrameFault::LinksDown(ms(200))),
        volume_delay: ms(2),
        ports: 1 + seed as usize % 2,
        ..FrameScenario::new(seed)
    });
    let faults: u32 = outcomes.iter().map(|outcome| outcome.faults).sum();
    assert!(seeds::is_one() || faults > 10, "only {faults} times");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let scenario = |seed| FrameScenario { conditions: lossy(100), requests: 80, ..FrameScenario::new(seed) };
    let (first, again) = (run_seeds(5, scenario), run_seeds(5, scenario));
    assert_eq!(first, again);
    assert!(seeds::is_one() || first.windows(2).any(|pair| pair[0].took != pair[1].took));
}
