//! The conformance suite over networks of every kind.

use super::{NetworkConditions, PERFECT, RocePair, reported};
use crate::conformance::{self, Side, Wire};
use crate::queue_pair::{Provider, Violation};

impl Wire for RocePair {
    fn end(&mut self, side: Side) -> &mut dyn Provider {
        &mut self.ends[usize::from(side == Side::Passive)]
    }

    fn turn(&mut self) -> bool {
        RocePair::turn(self)
    }

    fn break_connection(&mut self) {
        self.lose();
    }

    fn pads_private_data(&self) -> bool {
        true
    }

    fn reported(&self, violation: Violation) -> Violation {
        reported(violation)
    }
}

fn conform(mtu: u16, window: u32, conditions: NetworkConditions) {
    let mut seed = 0;
    conformance::run(&mut |active, passive| {
        seed += 1;
        Box::new(RocePair::new([active, passive], mtu, window, conditions, seed))
    });
}

#[test]
fn it_conforms_with_packets_of_every_size() {
    for mtu in [256, 512, 1024, 2048, 4096, 6001, 9000] {
        conform(mtu, 128, PERFECT);
    }
}

#[test]
fn it_conforms_with_windows_of_every_size() {
    for window in [1, 2, 5, 1 << 16] {
        conform(1024, window, PERFECT);
    }
}

#[test]
fn it_conforms_if_packets_are_lost() {
    conform(1024, 64, NetworkConditions { lost_per_mille: 10, ..PERFECT });
    conform(256, 16, NetworkConditions { lost_per_mille: 50, ..PERFECT });
}

#[test]
fn it_conforms_if_packets_are_duplicated_or_overtake_each_other() {
    conform(1024, 64, NetworkConditions { duplicated_per_mille: 50, ..PERFECT });
    conform(1024, 64, NetworkConditions { jitter_us: 300, ..PERFECT });
}

#[test]
fn it_conforms_if_everything_goes_wrong() {
    let conditions = NetworkConditions {
        lost_per_mille: 20,
        duplicated_per_mille: 20,
        damaged_per_mille: 10,
        jitter_us: 100,
    };
    conform(1024, 32, conditions);
    conform(4096, 128, conditions);
}
