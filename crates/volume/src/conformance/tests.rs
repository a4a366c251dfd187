//! Tests of the suite with correct volumes and with defective ones.

use super::*;
use crate::ready::Waker;
use crate::{
    Channel, Completion, DelayVolume, Delays, Extent, Io, IoError, MemVolume, NullVolume, Op, Output, Tag,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// The defect of a RAM volume.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
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

struct DefectiveVolume(Arc<dyn Volume>, Defect);

impl DefectiveVolume {
    fn over_mem(defect: Defect) -> Arc<dyn Volume> {
        Arc::new(DefectiveVolume(Arc::new(MemVolume::new(33 << 20)), defect))
    }
}

impl Volume for DefectiveVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { read_only: self.1 == Defect::ReadOnly, ..self.0.info() }
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let late =
            DelayVolume::new(self.0.clone(), Delays { read: Duration::from_millis(1), ..Delays::default() });
        let waker = if self.1 == Defect::NeverWakes { Waker::idle() } else { waker };
        let inner = if self.1 == Defect::NeverWakes { &late } else { &*self.0 as &dyn Volume };
        let inner = inner.open(core, depth, waker)?;
        Ok(Box::new(DefectiveChannel { inner, info: self.info(), defect: self.1, count: 0, cached: None }))
    }
}

struct DefectiveChannel {
    inner: Box<dyn Channel>,
    info: VolumeInfo,
    defect: Defect,
    count: u64,
    cached: Option<(Tag, u64)>,
}

impl Channel for DefectiveChannel {
    fn submit(&mut self, mut io: Io) {
        self.count += 1;
        let block = 512;
        let fits = self.info.check(&io).is_ok() && io.len > block;
        match (self.defect, io.op) {
            (Defect::ReadOnly, op) if op.is_write() => io.offset = u64::MAX,
            (Defect::WritesElsewhere, Op::Write { fua: true }) if fits => io.offset ^= block,
            (Defect::LosesTheLastPiece, Op::Write { .. }) if fits => {
                if let Some(data) = io.data.as_mut().filter(|data| data.segs().len() > 1) {
                    let keep = (data.len() as u64 - 1) / block * block;
                    *data = data.slice(0, keep as usize);
                    io.len = keep;
                }
            }
            (Defect::ZeroesTooMuch, Op::WriteZeroes { .. }) if fits => {
                io.len = io.len.next_multiple_of(8192).min(self.info.size - io.offset);
            }
            (Defect::DiscardsANeighbour, Op::Discard { .. }) if fits => io.offset &= !4095,
            (Defect::AnswersPastTheEnd, Op::Prefetch) => (io.offset, io.len) = (0, 0),
            (Defect::ForgetsOne, _) if self.count == 50 => return,
            (Defect::ReadsAnotherBuffer, Op::Read) => io.data = None,
            (Defect::StaleChannel, Op::Read) if fits && self.cached.is_none() => {
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
            match (self.defect, &mut done[at].result) {
                (Defect::ReadOnly, result @ Err(IoError::OutOfRange)) => *result = Err(IoError::ReadOnly),
                (Defect::BrokenTag, _) => done[at].tag = Tag(tag.0 & 0xffff_ffff),
                (Defect::CompletesTwice, Ok(Output::Extents(_))) => {
                    done.push(Completion { tag, result: Ok(Output::Nothing) });
                }
                (Defect::CallsDataZero, Ok(Output::Extents(extents))) => {
                    extents.iter_mut().for_each(|extent| extent.zero = true);
                }
                (Defect::StatusBeyondTheRange, Ok(Output::Extents(extents))) => {
                    extents.push(Extent { len: 512, hole: false, zero: false });
                }
                (Defect::EmptyStatus, Ok(Output::Extents(extents))) => extents.clear(),
                (Defect::StaleChannel, Ok(Output::Data(data)))
                    if self.cached.is_some_and(|it| it.0 == tag) =>
                {
                    // The first read of each channel returns the content of an empty cache.
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
fn the_smallest_permitted_volume_passes() {
    run(&mut Harness::on_test_core(Arc::new(MemVolume::new(MIN_SIZE))));
}

#[test]
fn a_null_volume_conforms_except_for_its_content() {
    let mut harness = Harness::on_test_core(Arc::new(NullVolume::new(40 << 20)));
    harness.keeps_data = false;
    run(&mut harness);
}

#[test]
fn a_read_only_volume_is_tested_too() {
    let below: Arc<dyn Volume> = Arc::new(MemVolume::new(MIN_SIZE));
    let mut harness = Harness::on_test_core(below.clone());
    harness.read_only = Some(Arc::new(DefectiveVolume(below.clone(), Defect::ReadOnly)));
    run(&mut harness);
    harness.read_only = Some(below);
    let error = cases::a_read_only_volume_refuses_writes(&mut harness).unwrap_err();
    assert!(error.0.contains("of a read-only volume"), "{error}");
}

#[test]
fn each_defect_is_found_by_its_case() {
    run(&mut Harness::on_test_core(DefectiveVolume::over_mem(Defect::Nothing)));
    let expected = [
        (Defect::WritesElsewhere, "every tag once"),
        (Defect::LosesTheLastPiece, "scattered lists"),
        (Defect::ZeroesTooMuch, "neighbours stay"),
        (Defect::DiscardsANeighbour, "discards leave"),
        (Defect::CompletesTwice, "every tag once"),
        (Defect::ForgetsOne, "never complete"),
        (Defect::NeverWakes, "without waking the waker"),
        (Defect::BrokenTag, "not in flight"),
        (Defect::AnswersPastTheEnd, "invalid requests"),
        (Defect::CallsDataZero, "block status is correct"),
        (Defect::StatusBeyondTheRange, "block status is correct"),
        (Defect::EmptyStatus, "block status is correct"),
        (Defect::ReadsAnotherBuffer, "reads as"),
        (Defect::StaleChannel, "reads as"),
    ];
    for (defect, words) in expected {
        let volume = DefectiveVolume::over_mem(defect);
        let caught = catch_unwind(AssertUnwindSafe(|| run(&mut Harness::on_test_core(volume))));
        let message = *caught.expect_err(&format!("{defect:?} was not found")).downcast::<String>().unwrap();
        assert!(message.contains(words) && message.contains("seed 1"), "{defect:?}: {message}");
    }
}

#[test]
fn the_pattern_of_a_part_is_a_part_of_the_pattern() {
    let whole = pattern(0, 100, 3);
    assert_eq!(pattern(13, 50, 3), whole[13..63]);
    assert_ne!(pattern(0, 100, 4), whole);
}
