//! The suite on volumes that are right, and on some that are wrong.

use super::*;
use crate::ready::Waker;
use crate::{
    Channel, Completion, DelayVolume, Delays, Extent, Io, IoError, MemVolume, NullVolume, Op, Output, Tag,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// A RAM volume that is wrong in one way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    ReadOnly,
    WritesElsewhere,
    LosesTheLastPiece,
    ZeroesTooMuch,
    DiscardsANeighbour,
    CompletesTwice,
    ForgetsOne,
    NeverWakes,
    BrokenTag,
    AnswersPastTheEnd,
    CallsDataZero,
    StatusBeyondTheRange,
    EmptyStatus,
    ReadsAnotherBuffer,
    StaleChannel,
}

struct WrongVolume(Arc<dyn Volume>, Wrong);

impl WrongVolume {
    fn over_mem(wrong: Wrong) -> Arc<dyn Volume> {
        Arc::new(WrongVolume(Arc::new(MemVolume::new(33 << 20)), wrong))
    }
}

impl Volume for WrongVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { read_only: self.1 == Wrong::ReadOnly, ..self.0.info() }
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let late =
            DelayVolume::new(self.0.clone(), Delays { read: Duration::from_millis(1), ..Delays::default() });
        let waker = if self.1 == Wrong::NeverWakes { Waker::idle() } else { waker };
        let inner = if self.1 == Wrong::NeverWakes { &late } else { &*self.0 as &dyn Volume };
        let inner = inner.open(core, depth, waker)?;
        Ok(Box::new(WrongChannel { inner, info: self.info(), wrong: self.1, count: 0, cached: None }))
    }
}

struct WrongChannel {
    inner: Box<dyn Channel>,
    info: VolumeInfo,
    wrong: Wrong,
    count: u64,
    cached: Option<(Tag, u64)>,
}

impl Channel for WrongChannel {
    fn submit(&mut self, mut io: Io) {
        self.count += 1;
        let block = 512;
        let fits = self.info.check(&io).is_ok() && io.len > block;
        match (self.wrong, io.op) {
            (Wrong::ReadOnly, op) if op.is_write() => io.offset = u64::MAX,
            (Wrong::WritesElsewhere, Op::Write { fua: true }) if fits => io.offset ^= block,
            (Wrong::LosesTheLastPiece, Op::Write { .. }) if fits => {
                if let Some(data) = io.data.as_mut().filter(|data| data.segs().len() > 1) {
                    let keep = (data.len() as u64 - 1) / block * block;
                    *data = data.slice(0, keep as usize);
                    io.len = keep;
                }
            }
            (Wrong::ZeroesTooMuch, Op::WriteZeroes { .. }) if fits => {
                io.len = io.len.next_multiple_of(8192).min(self.info.size - io.offset);
            }
            (Wrong::DiscardsANeighbour, Op::Discard { .. }) if fits => io.offset &= !4095,
            (Wrong::AnswersPastTheEnd, Op::Prefetch) => (io.offset, io.len) = (0, 0),
            (Wrong::ForgetsOne, _) if self.count == 50 => return,
            (Wrong::ReadsAnotherBuffer, Op::Read) => io.data = None,
            (Wrong::StaleChannel, Op::Read) if fits && self.cached.is_none() => {
                self.cached = Some((io.tag, io.offset));
            }
            _ => {}
        }
        self.inner.submit(io);
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let first = done.len();
        self.inner.poll(done);
        for at in first..done.len() {
            let tag = done[at].tag;
            match (self.wrong, &mut done[at].result) {
                (Wrong::ReadOnly, result @ Err(IoError::OutOfRange)) => *result = Err(IoError::ReadOnly),
                (Wrong::BrokenTag, _) => done[at].tag = Tag(tag.0 & 0xffff_ffff),
                (Wrong::CompletesTwice, Ok(Output::Extents(_))) => {
                    done.push(Completion { tag, result: Ok(Output::Nothing) });
                }
                (Wrong::CallsDataZero, Ok(Output::Extents(extents))) => {
                    extents.iter_mut().for_each(|extent| extent.zero = true);
                }
                (Wrong::StatusBeyondTheRange, Ok(Output::Extents(extents))) => {
                    extents.push(Extent { len: 512, hole: false, zero: false });
                }
                (Wrong::EmptyStatus, Ok(Output::Extents(extents))) => extents.clear(),
                (Wrong::StaleChannel, Ok(Output::Data(data)))
                    if self.cached.is_some_and(|it| it.0 == tag) =>
                {
                    // The first read of each channel comes from a cache that nobody filled.
                    *data = crate::Memory::from_heap(data.len()).seg(0, data.len()).into();
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_ram_volume_conforms() {
    run(&mut Harness::on_test_core(Arc::new(MemVolume::new(40 << 20))));
}

#[test]
fn the_smallest_volume_will_do() {
    run(&mut Harness::on_test_core(Arc::new(MemVolume::new(LEAST_SIZE))));
}

#[test]
fn a_null_volume_conforms_but_for_its_content() {
    let mut harness = Harness::on_test_core(Arc::new(NullVolume::new(40 << 20)));
    harness.keeps_data = false;
    run(&mut harness);
}

#[test]
fn a_read_only_volume_is_tested_too() {
    let below: Arc<dyn Volume> = Arc::new(MemVolume::new(LEAST_SIZE));
    let mut harness = Harness::on_test_core(below.clone());
    harness.read_only = Some(Arc::new(WrongVolume(below.clone(), Wrong::ReadOnly)));
    run(&mut harness);
    harness.read_only = Some(below);
    let error = cases::a_read_only_volume_refuses_writes(&mut harness).unwrap_err();
    assert!(error.0.contains("of a read-only volume"), "{error}");
}

#[test]
fn a_volume_that_is_wrong_in_one_way_is_found_by_the_case_for_it() {
    run(&mut Harness::on_test_core(WrongVolume::over_mem(Wrong::Nothing)));
    let expected = [
        (Wrong::WritesElsewhere, "every tag once"),
        (Wrong::LosesTheLastPiece, "scattered lists"),
        (Wrong::ZeroesTooMuch, "neighbours stay"),
        (Wrong::DiscardsANeighbour, "discards leave"),
        (Wrong::CompletesTwice, "every tag once"),
        (Wrong::ForgetsOne, "never complete"),
        (Wrong::NeverWakes, "nobody is woken"),
        (Wrong::BrokenTag, "not in flight"),
        (Wrong::AnswersPastTheEnd, "do not fit"),
        (Wrong::CallsDataZero, "tells the truth"),
        (Wrong::StatusBeyondTheRange, "tells the truth"),
        (Wrong::EmptyStatus, "tells the truth"),
        (Wrong::ReadsAnotherBuffer, "reads as"),
        (Wrong::StaleChannel, "reads as"),
    ];
    for (wrong, words) in expected {
        let volume = WrongVolume::over_mem(wrong);
        let caught = catch_unwind(AssertUnwindSafe(|| run(&mut Harness::on_test_core(volume))));
        let message = *caught.expect_err(&format!("{wrong:?} was not found")).downcast::<String>().unwrap();
        assert!(message.contains(words) && message.contains("seed 1"), "{wrong:?}: {message}");
    }
}

#[test]
fn the_pattern_of_a_part_is_a_part_of_the_pattern() {
    let whole = pattern(0, 100, 3);
    assert_eq!(pattern(13, 50, 3), whole[13..63]);
    assert_ne!(pattern(0, 100, 4), whole);
}
