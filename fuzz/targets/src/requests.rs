//! The requests that a fuzz target submits to an initiator: each must complete exactly once.

use crate::choices::Choices;
use crate::io_count::count_success;
use blockmux_proto::driver::session::Initiator;
use blockmux_volume::{Completion, Io, Op, Output, Seg, SgList, Tag, VolumeInfo};
use std::collections::HashMap;

/// Requests in flight.
#[derive(Default)]
pub(crate) struct Requests {
    in_flight: HashMap<Tag, Io>,
    next_tag: u64,
    /// Bytes written so far, which limits the time for one input.
    bytes: u64,
}

impl Requests {
    /// Submits a few requests, which the choices select, once the session is ready.
    pub(crate) fn submit<S: Initiator>(
        &mut self,
        session: &mut S,
        info: Option<VolumeInfo>,
        choices: &mut Choices<'_>,
    ) -> bool {
        if !session.is_ready() {
            assert_eq!(session.room(), 0);
            return false;
        }
        let info = info.expect("a session that is ready knows its volume");
        let before = self.next_tag;
        for _ in 0..choices.below(4) {
            if session.room() == 0 || self.next_tag >= MAX_REQUESTS {
                break;
            }
            let io = self.next(&info, choices);
            let former = self.in_flight.insert(io.tag, io.clone());
            assert!(former.is_none());
            session.submit(io);
        }
        self.next_tag > before
    }

    /// A request that usually fits the volume.
    fn next(&mut self, info: &VolumeInfo, choices: &mut Choices<'_>) -> Io {
        let (fua, flag) = (choices.byte() & 1 != 0, choices.byte());
        let op = match choices.below(12) {
            0..=4 => Op::Read,
            5..=6 => Op::Write { fua },
            7 => Op::Flush,
            8 => Op::WriteZeroes { fua, may_unmap: flag & 1 != 0, only_fast: flag & 2 != 0 },
            9 => Op::Discard { fua },
            10 => Op::Prefetch,
            _ => Op::BlockStatus,
        };
        let block = u64::from(info.logical_block);
        let mut offset = u64::from(choices.byte() & 15) * block;
        let mut len = match choices.byte() {
            0..=159 => block,
            byte @ 160..=223 => block * u64::from(byte - 160),
            byte @ 224..=251 => block * 16 * u64::from(byte - 224),
            252 => info.size.saturating_sub(offset),
            253 => 32 << 20,
            254 => 1,
            _ => u64::MAX,
        };
        if op == Op::Flush {
            (offset, len) = (0, 0);
        }
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let mut io = Io::new(tag, op, offset, len);
        let wants_data = matches!(op, Op::Write { .. }) || op == Op::Read && flag & 4 != 0;
        if wants_data && info.check(&Io { op: Op::Read, ..io.clone() }).is_ok() {
            self.bytes += len;
            let len = if self.bytes <= MAX_BYTES { len as usize } else { 0 };
            let mut data = SgList::default();
            // In two pieces, so that a mix-up is detected.
            for part in [len / 3, len - len / 3] {
                if part > 0 {
                    data.push(Seg::from_slice(&vec![flag; part]));
                }
            }
            io.data = Some(data);
        }
        io
    }

    /// Takes all completions of the session; returns whether there was any.
    pub(crate) fn poll_done<S: Initiator>(&mut self, session: &mut S) -> bool {
        let mut any = false;
        while let Some(done) = session.poll_done() {
            any = true;
            let io = self.in_flight.remove(&done.tag).expect("a completed request is in flight");
            check(&io, &done);
            if done.result.is_ok() {
                count_success();
            }
        }
        any
    }

    /// Takes all returned requests of the session; returns whether there was any.
    pub(crate) fn poll_returned<S: Initiator>(&mut self, session: &mut S) -> bool {
        let mut any = false;
        while let Some(io) = session.poll_returned() {
            any = true;
            assert!(self.in_flight.remove(&io.tag).is_some(), "a request was returned that is not in flight");
        }
        any
    }

    /// The maximum pool memory for reads in flight, in bytes.
    pub(crate) fn read_buffers(&self) -> usize {
        self.in_flight.values().filter(|io| io.op == Op::Read).map(buffer_len).sum()
    }

    /// Takes all unfinished requests back from the session.
    pub(crate) fn take_back<S: Initiator>(&mut self, session: &mut S) {
        let unfinished = session.take_unfinished();
        assert!(
            unfinished.is_sorted_by_key(|io| io.tag),
            "unfinished requests are not ordered from the oldest on"
        );
        for io in unfinished {
            let submitted = self.in_flight.remove(&io.tag).expect("an unfinished request is in flight");
            assert_eq!((io.op, io.offset, io.len), (submitted.op, submitted.offset, submitted.len));
            assert_eq!(io.data.map(|data| data.len()), submitted.data.map(|data| data.len()));
        }
        assert!(self.in_flight.is_empty(), "lost: {:?}", self.in_flight);
        assert!(session.poll_done().is_none() && session.take_unfinished().is_empty());
    }
}

/// Checks that a completion matches its request.
fn check(io: &Io, done: &Completion) {
    match (io.op, &done.result) {
        (_, Err(_)) => {}
        (Op::Read, Ok(Output::Data(data))) => {
            assert_eq!(data.len() as u64, io.len);
            if let Some(own) = &io.data {
                let address = |list: &SgList| list.segs().first().map(Seg::as_ptr);
                assert_eq!(address(data), address(own), "a read completed with other memory than its own");
            }
        }
        (Op::BlockStatus, Ok(Output::Extents(extents))) => {
            assert_eq!(extents.is_empty(), io.len == 0);
            assert!(extents.iter().all(|extent| extent.len > 0));
            assert!(extents.iter().map(|extent| extent.len).sum::<u64>() <= io.len);
        }
        (op, Ok(output)) => {
            assert!(matches!(output, Output::Nothing) && !matches!(op, Op::Read | Op::BlockStatus), "{op:?}");
        }
    }
}

/// The size of the pool's buffer for this read.
fn buffer_len(io: &Io) -> usize {
    if io.data.is_none() && io.len <= 32 << 20 { (io.len as usize).max(4096).next_power_of_two() } else { 0 }
}

/// Runs turns until two consecutive ones make no progress.
pub(crate) fn take_turns(mut turn: impl FnMut() -> bool) {
    let mut quiet = 0;
    for _ in 0..MAX_TURNS {
        quiet = if turn() { 0 } else { quiet + 1 };
        if quiet == 2 {
            break;
        }
    }
}

/// The maximum number of turns for one input.
pub(crate) const MAX_TURNS: usize = 4000;
const MAX_REQUESTS: u64 = 64;
/// The maximum number of bytes of all writes of an input.
const MAX_BYTES: u64 = 1 << 20;
