//! Random I/O, compared with a model of the volume's content.

use super::cases::scattered;
use super::client::data_of;
use super::ranges::check_extents;
use super::{CaseResult, Client, Failure, Harness, fail, mix, pattern};
use crate::buf::Memory;
use crate::io::{Completion, Io, Op, Tag};
use crate::random::SplitMix;
use crate::sg_list::SgList;
use std::collections::HashMap;

/// Submits random requests on two channels, up to [`WIDTH`] at a time on one of them. Requests in
/// flight overlap only if they read.
pub(super) fn agrees_with_a_model(harness: &mut Harness) -> CaseResult {
    let mut clients = [harness.client(WIDTH)?, harness.client(WIDTH)?];
    let mut walk = Walk::new(harness, &mut clients[0])?;
    for step in 0..harness.random_ops {
        // Every 257 steps the test switches to the other channel, once nothing is in flight.
        let which = (step / 257 % 2) as usize;
        let quiet = step % 257 == 0;
        walk.complete(harness, &mut clients[1 - which], if quiet { 0 } else { WIDTH })?;
        let allowed = walk.random.below(WIDTH.into()) as u32;
        walk.complete(harness, &mut clients[which], allowed)?;
        let request = walk.random_request(step);
        while walk.collides(&request) {
            let left = clients[which].in_flight() - 1;
            walk.complete(harness, &mut clients[which], left)?;
        }
        walk.submit(&mut clients[which], request);
    }
    for client in &mut clients {
        walk.complete(harness, client, 0)?;
    }
    let found = clients[1].read(0, walk.window)?;
    walk.compare(harness, 0, &found)
}

struct Walk {
    random: SplitMix,
    block: u64,
    window: u64,
    content: Vec<u8>,
    /// For each block: whether the volume must hold the content of the model.
    known: Vec<bool>,
    in_flight: HashMap<Tag, Request>,
    seed: u64,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    tag: Tag,
    op: Op,
    offset: u64,
    len: u64,
    /// Seed of a write's data.
    salt: u64,
}

impl Walk {
    fn new(harness: &Harness, client: &mut Client) -> CaseResult<Walk> {
        let info = harness.info();
        let block = u64::from(info.logical_block);
        let window = info.size.min(8 << 20);
        let known = vec![true; (window / block) as usize];
        let content = client.read(0, window)?;
        let random = harness.random();
        Ok(Walk { random, block, window, content, known, in_flight: HashMap::new(), seed: harness.seed })
    }

    fn random_request(&mut self, step: u32) -> Request {
        let random = &mut self.random;
        let fua = random.below(8) == 0;
        let op = match random.below(100) {
            0..40 => Op::Read,
            40..75 => Op::Write { fua },
            75..84 => Op::WriteZeroes { fua, may_unmap: random.below(2) == 0, only_fast: false },
            84..90 => Op::Discard { fua },
            90..95 => Op::BlockStatus,
            95..97 => Op::Prefetch,
            _ => Op::Flush,
        };
        // Mostly small, sometimes large; mostly at any block, sometimes at a boundary of units that
        // volumes use.
        let blocks = self.window / self.block;
        let large = if random.below(8) == 0 { 2048 } else { 256 };
        let most = [8, 32, 128, large][random.below(4) as usize].min(blocks);
        let mut len = 1 + random.below(most);
        let mut first = random.below(blocks - len + 1);
        if random.below(4) == 0 {
            let unit = (65536 / self.block).clamp(1, blocks);
            first = first / unit * unit;
            len = len.next_multiple_of(unit).min(blocks - first);
        }
        let tag = Tag(mix(self.seed ^ u64::from(step)));
        if op == Op::Flush {
            return Request { tag, op, offset: 0, len: 0, salt: 0 };
        }
        Request { tag, op, offset: first * self.block, len: len * self.block, salt: random.next() }
    }

    fn collides(&self, new: &Request) -> bool {
        self.in_flight.values().any(|old| {
            let apart = old.offset + old.len <= new.offset || new.offset + new.len <= old.offset;
            !apart && (old.op.is_write() || new.op.is_write())
        })
    }

    fn submit(&mut self, client: &mut Client, request: Request) {
        let Request { tag, op, offset, len, salt } = request;
        let pieces = 1 + self.random.below(5) as usize;
        let data = match op {
            Op::Write { .. } => {
                let list = scattered(&mut self.random, len as usize, pieces);
                list.copy_from(&pattern(offset, len, salt));
                Some(list)
            }
            Op::Read if self.random.below(3) == 0 => Some(scattered(&mut self.random, len as usize, pieces)),
            Op::Read if self.random.below(2) == 0 => {
                Some(SgList::one(Memory::from_heap(len as usize).seg(0, len as usize)))
            }
            _ => None,
        };
        self.in_flight.insert(tag, request);
        client.submit(Io { tag, op, offset, len, data });
    }

    /// Waits until at most `left` requests are in flight on `client`, and checks the completions.
    fn complete(&mut self, harness: &Harness, client: &mut Client, left: u32) -> CaseResult {
        while client.in_flight() > left || client.has_arrived() {
            let done = client.wait()?;
            let Some(request) = self.in_flight.remove(&done.tag) else {
                return fail!("{:?} is unknown", done.tag);
            };
            let checked = self.check(harness, request, done);
            checked.map_err(|Failure(what)| Failure(format!("{request:?}: {what}")))?;
        }
        Ok(())
    }

    fn check(&mut self, harness: &Harness, request: Request, done: Completion) -> CaseResult {
        let Request { op, offset, len, salt, .. } = request;
        let output = done.result.map_err(|error| Failure(format!("failed: {error}")))?;
        match op {
            Op::Read => {
                let found = data_of(output, len)?;
                self.compare(harness, offset, &found)?;
            }
            Op::BlockStatus => {
                let mut at = offset;
                for extent in check_extents(output, offset, len, self.block)? {
                    if extent.zero {
                        self.compare_zero(harness, at, extent.len)?;
                    }
                    at += extent.len;
                }
            }
            Op::Write { .. } => self.set(offset, &pattern(offset, len, salt)),
            Op::WriteZeroes { .. } => self.set(offset, &vec![0; len as usize]),
            Op::Discard { .. } => self.blocks(offset, len).fill(false),
            Op::Flush | Op::Prefetch | Op::CompareAndWrite { .. } => {}
        }
        Ok(())
    }

    fn blocks(&mut self, offset: u64, len: u64) -> &mut [bool] {
        &mut self.known[(offset / self.block) as usize..((offset + len) / self.block) as usize]
    }

    fn set(&mut self, offset: u64, bytes: &[u8]) {
        self.content[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        self.blocks(offset, bytes.len() as u64).fill(true);
    }

    /// Compares every block whose content is known.
    fn compare(&self, harness: &Harness, offset: u64, found: &[u8]) -> CaseResult {
        let block = self.block as usize;
        for (nth, found) in found.chunks(block).enumerate() {
            let at = offset as usize + nth * block;
            if self.known[at / block] {
                harness.compare(at as u64, found, &self.content[at..at + block])?;
            }
        }
        Ok(())
    }

    fn compare_zero(&self, harness: &Harness, offset: u64, len: u64) -> CaseResult {
        let compared = self.compare(harness, offset, &vec![0; len as usize]);
        compared.map_err(|Failure(what)| Failure(format!("an extent that should read as zeroes: {what}")))
    }
}

const WIDTH: u32 = 16;
