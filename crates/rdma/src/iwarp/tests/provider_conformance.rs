//! The conformance suite over streams of every kind.

use super::super::IwarpConfig;
use super::StreamPair;
use crate::conformance::{self, Side, Wire};
use crate::queue_pair::Provider;

impl Wire for StreamPair {
    fn end(&mut self, side: Side) -> &mut dyn Provider {
        &mut self.ends[usize::from(side == Side::Passive)].iwarp
    }

    fn turn(&mut self) -> bool {
        StreamPair::turn(self)
    }

    fn break_connection(&mut self) {
        self.ends.iter_mut().for_each(|end| end.lose());
    }
}

fn conform(active: &IwarpConfig, passive: &IwarpConfig, step: usize) {
    conformance::run(&mut |ours, theirs| Box::new(StreamPair::new([ours, theirs], [active, passive], step)));
}

fn config(has_crc: bool, mss: usize) -> IwarpConfig {
    IwarpConfig { has_crc, mss, ..IwarpConfig::default() }
}

#[test]
fn it_conforms_with_fpdus_of_every_size() {
    for mss in [0, 1448, 65483] {
        conform(&config(false, mss), &config(false, mss), usize::MAX);
    }
}

#[test]
fn it_conforms_with_crcs() {
    conform(&config(true, 1448), &config(false, 65483), usize::MAX);
    conform(&config(false, 0), &config(true, 8948), 1000);
}

#[test]
fn it_conforms_however_the_stream_is_cut() {
    conform(&config(false, 8948), &config(true, 1448), 61);
    conform(&config(false, 65483), &config(false, 65483), 4099);
}
