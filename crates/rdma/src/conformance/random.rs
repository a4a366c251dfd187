//! Random traffic in both directions, checked against a model.

use super::pair::{ConformancePair, Observed, ample, blank, memory, part, pattern};
use super::{CaseResult, Connect, Side, fail};
use blockmux_proto::rdma::{Endpoint, Remote, RemoteRights, WorkRequest};
use blockmux_volume::SgList;
use blockmux_volume::random::SplitMix;
use std::collections::{HashMap, VecDeque};

/// The model of one side's traffic.
struct SideModel {
    /// Memory of the peer to read, and its content.
    source: (Remote, Vec<u8>),
    /// Memory of the peer to write, the memory itself, and its expected final content.
    target: (Remote, SgList, Vec<u8>),
    /// Outstanding reads: their buffers, and the expected data.
    reads: HashMap<u64, (SgList, Vec<u8>)>,
    /// Messages in flight.
    messages: VecDeque<Vec<u8>>,
    in_flight: usize,
}

/// Each side posts random work, and every event is checked when it is reported.
pub(super) fn agrees_with_a_model(connect: &mut Connect) -> CaseResult {
    for seed in 0..4 {
        one_run(connect, seed).map_err(|error| format!("seed {seed}: {error}"))?;
    }
    Ok(())
}

fn one_run(connect: &mut Connect, seed: u64) -> CaseResult {
    let mut random = SplitMix::new(seed);
    let endpoint = Endpoint { receives: SENDS, sends: SENDS, reads: 1 + seed as u32, ..ample() };
    let mut pair = ConformancePair::connected(connect, &endpoint)?;
    let mut halves = Vec::new();
    for side in Side::BOTH {
        let content = pattern(seed, SIZE);
        let source = pair.register(side.other(), &memory(&content, 3), RemoteRights::RemoteRead)?;
        let memory = blank(SIZE, 2);
        let target = pair.register(side.other(), &memory, RemoteRights::RemoteWrite)?;
        let model = memory.to_vec();
        halves.push(SideModel {
            source: (source, content),
            target: (target, memory, model),
            reads: HashMap::new(),
            messages: VecDeque::new(),
            in_flight: 0,
        });
    }
    for _ in 0..STEPS {
        for (side, half) in Side::BOTH.into_iter().zip(&mut halves) {
            for _ in 0..random.below(6) {
                if pair.wire.end(side).room() != SENDS as usize - half.in_flight {
                    return fail!(
                        "room for {} with {} in flight",
                        pair.wire.end(side).room(),
                        half.in_flight
                    );
                }
                if pair.wire.end(side).room() > 0 && half.messages.len() < SENDS as usize {
                    half.post(&mut pair, side, &mut random);
                }
            }
        }
        pair.turn(random.below(4));
        check(&mut pair, &mut halves)?;
    }
    pair.settle()?;
    check(&mut pair, &mut halves)?;
    for half in &halves {
        if half.in_flight > 0 || !half.messages.is_empty() || half.target.1.to_vec() != half.target.2 {
            return fail!("{} left and {} messages, or not all written", half.in_flight, half.messages.len());
        }
    }
    Ok(())
}

impl SideModel {
    fn post(&mut self, pair: &mut ConformancePair, side: Side, random: &mut SplitMix) {
        self.in_flight += 1;
        let len = if random.below(4) == 0 { random.below(SIZE as u64) } else { random.below(600) } as usize;
        let at = random.below((SIZE - len) as u64) as usize;
        let pieces = 1 + random.below(4) as usize;
        match random.below(3) {
            0 => {
                let message = pattern(random.next(), len.min(MESSAGE));
                let (head, rest) = message.split_at(random.below(message.len() as u64 + 1) as usize);
                pair.send(side, head, memory(rest, pieces), None);
                self.messages.push_back(message);
            }
            1 => {
                let local = blank(len, pieces);
                let id = pair.read(side, &local, part(self.source.0, at as u64, len));
                self.reads.insert(id, (local, self.source.1[at..at + len].to_vec()));
            }
            _ => {
                let data = pattern(random.next(), len);
                pair.write(side, &memory(&data, pieces), part(self.target.0, at as u64, len));
                self.target.2[at..at + len].copy_from_slice(&data);
            }
        }
    }
}

/// Checks all recorded events.
fn check(pair: &mut ConformancePair, halves: &mut [SideModel]) -> CaseResult {
    for (at, side) in Side::BOTH.into_iter().enumerate() {
        for observed in pair.observed(side) {
            match observed {
                Observed::Done(id, Ok(())) => {
                    halves[at].in_flight -= 1;
                    if let Some((local, expected)) = halves[at].reads.remove(&id)
                        && local.to_vec() != expected
                    {
                        return fail!("a read of {} bytes returned wrong data", expected.len());
                    }
                }
                Observed::Received(message, None) => {
                    if halves[1 - at].messages.pop_front() != Some(message) {
                        return fail!("a message came that was not the next one");
                    }
                    pair.post(side, WorkRequest::Receive);
                }
                other => return fail!("{side:?} observed {other:?}"),
            }
        }
    }
    Ok(())
}

/// Length of each side's memory, in bytes.
const SIZE: usize = 40_000;
/// Longest message, in bytes.
const MESSAGE: usize = 4096;
const SENDS: u32 = 16;
const STEPS: u32 = 400;
