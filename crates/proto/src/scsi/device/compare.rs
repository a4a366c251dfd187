//! COMPARE AND WRITE and ORWRITE: atomic read-modify-write (SBC-4).

use super::task::{BlockRange, CommandContext, HandlerAction, MultiStepCommand, PIECE, TaskOutcome};
use crate::scsi::bytes::{first_difference, or};
use crate::scsi::sense::Sense;
use crate::volume_state::AtomicRange;
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::cdb::FUA;
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// MAXIMUM COMPARE AND WRITE LENGTH: limited by the one-byte field of the CDB.
pub(super) const MAX_COMPARE_BLOCKS: u8 = u8::MAX;

/// COMPARE AND WRITE: writes the second half of the data-out if the blocks equal the first half.
pub(super) fn compare_and_write(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let range = cx.range_of(cdb.u64(2), cdb.byte(13).into())?;
    cx.check_writable()?;
    if range.len == 0 {
        // An initiator that sends data means more blocks than the field can express.
        return if cx.command.data_out_len > 0 {
            Err(Sense::in_cdb(13).into())
        } else {
            Ok(HandlerAction::good())
        };
    }
    cx.work(ReadModifyWrite::new(cx, CompareKind::CompareAndWrite, &range));
    cx.exact_data_out(range.len.saturating_mul(2))
}

/// ORWRITE: combines the data-out with the blocks by OR.
pub(super) fn orwrite(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    cx.check_writable()?;
    if range.len == 0 {
        return Ok(HandlerAction::good());
    }
    cx.work(ReadModifyWrite::new(cx, CompareKind::Or, &range));
    cx.data_out(range.len)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CompareKind {
    CompareAndWrite,
    Or,
}

/// Locks the range, reads it and writes it; the lock ends with the command. The lock excludes other
/// access, so OR may proceed in pieces. Storage that can compares and writes in one step, so that
/// its other clients are excluded, too.
struct ReadModifyWrite {
    kind: CompareKind,
    range: AtomicRange,
    /// Number of bytes done.
    at: u64,
    fua: bool,
    data: SgList,
}

impl ReadModifyWrite {
    /// Starts at the beginning of a range.
    fn new(cx: &CommandContext<'_>, kind: CompareKind, range: &BlockRange) -> ReadModifyWrite {
        let fua = range.flags & FUA != 0;
        let range = AtomicRange::new(&cx.unit.unit.volume_state, range.offset, range.len);
        ReadModifyWrite { kind, range, at: 0, fua, data: SgList::default() }
    }

    /// Length of the next read and write, in bytes.
    fn piece(&self) -> u64 {
        match self.kind {
            CompareKind::CompareAndWrite => self.range.len(),
            CompareKind::Or => self.range.len().saturating_sub(self.at).min(PIECE),
        }
    }

    fn io(&self, op: Op, data: Option<SgList>) -> TaskOutcome {
        let offset = self.range.offset().saturating_add(self.at);
        Ok(HandlerAction::Io(op, offset, self.piece(), data))
    }

    /// Whether the storage itself compares and writes the range.
    fn is_native(&self, cx: &CommandContext<'_>) -> bool {
        let info = cx.unit.unit.volume_state.volume().info();
        self.kind == CompareKind::CompareAndWrite && info.compares(self.range.offset(), self.range.len())
    }

    fn modify(&self, read: &SgList) -> Result<SgList, Sense> {
        match self.kind {
            CompareKind::Or => {
                let data = self.data.slice(self.at as usize, read.len());
                Ok(Seg::from_slice(&or(read, &data)).into())
            }
            CompareKind::CompareAndWrite => match first_difference(read, &self.data) {
                Some(at) => Err(miscompare(at as u64)),
                None => Ok(self.data.slice(read.len(), read.len())),
            },
        }
    }
}

/// SBC-4, the COMPARE AND WRITE command: INFORMATION is the offset of the first differing byte.
fn miscompare(at: u64) -> Sense {
    Sense::new(SenseKey::MISCOMPARE, Asc::MISCOMPARE_DURING_VERIFY_OPERATION).with_information(at)
}

impl MultiStepCommand for ReadModifyWrite {
    fn on_data_out(&mut self, cx: &mut CommandContext<'_>, data: SgList) -> TaskOutcome {
        self.data = data;
        if self.is_native(cx) {
            return self.io(Op::CompareAndWrite { fua: self.fua }, Some(self.data.clone()));
        }
        self.io(Op::Read, None)
    }

    fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        Some(&mut self.range)
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome {
        match output {
            Output::Data(read) => {
                let data = self.modify(&read)?;
                self.io(Op::Write { fua: self.fua }, Some(data))
            }
            Output::Differs(at) => Err(miscompare(at).into()),
            Output::NotCompared => self.io(Op::Read, None),
            _ => {
                self.at = self.at.saturating_add(self.piece());
                if self.at == self.range.len() { Ok(HandlerAction::good()) } else { self.io(Op::Read, None) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, answer, command};
    use crate::scsi::{DeviceServer, Lun, ScsiStatus, TaskFailure, TaskStep};
    use crate::testing::ComparingVolume;
    use crate::volume_state::{NeededRange, NotAdmitted};
    use blockmux_volume::Cost;
    use std::sync::Arc;

    const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    const CAW: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];

    #[test]
    fn a_match_writes_and_a_miscompare_reports_its_offset() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&CAW, &[[0; 512], [7; 512]].concat()).good();
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [7; 512]);
        let mut wrong = [[7; 512], [9; 512]].concat();
        wrong[300] = 0;
        let (mut task, mut step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
        let mut sent = 0;
        let response = loop {
            match step {
                TaskStep::Done(response) => break response,
                next => step = client.turn(&mut task, next, &wrong, &mut sent),
            }
        };
        assert_eq!(response.sense.unwrap().information, Some(300));
        assert_eq!(answer(response).check(), (0xe, 0x1d00));
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [7; 512]);
    }

    #[test]
    fn storage_that_compares_by_itself_does_so_where_it_can() {
        for (is_able, block, expected) in [(true, 0, [1, 1]), (false, 0, [1, 0]), (true, 7, [0, 0])] {
            let volume = Arc::new(ComparingVolume::new(4096, is_able));
            let mut client = DeviceBench::over(volume.clone()).client("a");
            // Block 7 and the next are in two units.
            let caw = [0x89, 8, 0, 0, 0, 0, 0, 0, 0, block, 0, 0, 0, 2, 0, 0];
            client.run_with(&caw, &[[0; 1024], [7; 1024]].concat()).good();
            assert_eq!(client.run(&[0x28, 0, 0, 0, 0, block, 0, 0, 2, 0]).good(), [7; 1024]);
            assert_eq!(volume.counts(), expected, "asked, written");
            let mut wrong = [[7; 1024], [9; 1024]].concat();
            wrong[700] = 0;
            let response = client.run_with(&caw, &wrong);
            assert_eq!(response.sense, Some((0xe, 0x1d00)));
            assert_eq!(client.run(&[0x28, 0, 0, 0, 0, block, 0, 0, 2, 0]).good(), [7; 1024]);
        }
    }

    #[test]
    fn data_of_any_length_but_twice_the_blocks_is_rejected() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run_with(&CAW, &[0; 2048]).check(), (5, 0x0e03));
        assert_eq!(client.run_with(&CAW, &[0; 512]).check(), (5, 0x0e03));
        assert_eq!(client.run(&[0x89, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 1, 0, 0]).check(), (5, 0x2100));
    }

    /// The refusal of an I/O on the first block.
    const BLOCK_IS_LOCKED: NotAdmitted<TaskFailure> = NotAdmitted::Locked(NeededRange::of_io((0, 512)));

    #[test]
    fn concurrent_compare_and_writes_are_serialized() {
        let bench = DeviceBench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let data = [[0; 512], [7; 512]].concat();
        let begin = |client: &mut crate::scsi::device::testing::TestNexus| {
            let (mut task, step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
            let mut sent = 0;
            let step = client.turn(&mut task, step, &data, &mut sent);
            (task, step)
        };
        let (mut one, mut one_step) = begin(&mut first);
        let (mut two, two_step) = begin(&mut second);
        assert_eq!(first.admit(&mut one, &one_step), Ok(()));
        let needed = NeededRange::to_lock((0, 512));
        assert_eq!(second.admit(&mut two, &two_step), Err(NotAdmitted::Locked(needed)));
        // A write to the same block waits; a write to the next block does not.
        let write = |lba| [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
        second.run_with(&write(1), &[5; 512]).good();
        let (mut late, step) = second.server.begin(&command(Lun::new(0), &write(0), 512));
        let step = second.turn(&mut late, step, &[5; 512], &mut 0);
        assert_eq!(second.admit(&mut late, &step), Err(BLOCK_IS_LOCKED));
        drop(late);
        loop {
            let mut sent = 1024;
            match one_step {
                TaskStep::Done(response) => break assert_eq!(response.status, ScsiStatus::GOOD),
                next => one_step = first.turn(&mut one, next, &[], &mut sent),
            }
        }
        let TaskStep::Done(response) = second.turn(&mut two, two_step, &[], &mut 0) else {
            panic!("a read, then the end")
        };
        assert_eq!(answer(response).check(), (0xe, 0x1d00));
    }

    #[test]
    fn a_compare_waits_for_writes_that_started_before() {
        let bench = DeviceBench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let (mut write, step) = first.server.begin(&command(Lun::new(0), &WRITE, 512));
        let in_flight = first.turn(&mut write, step, &[5; 512], &mut 0);
        assert_eq!(first.admit(&mut write, &in_flight), Ok(()));
        let data = [[5; 512], [7; 512]].concat();
        let (mut compare, step) = second.server.begin(&command(Lun::new(0), &CAW, 1024));
        let mut step = second.turn(&mut compare, step, &data, &mut 0);
        for _ in 0..2 {
            assert_eq!(second.admit(&mut compare, &step), Err(NotAdmitted::Draining));
        }
        // A write that arrives now waits until the comparison is over.
        let (mut late, late_step) = first.server.begin(&command(Lun::new(0), &WRITE, 512));
        let late_step = first.turn(&mut late, late_step, &[6; 512], &mut 0);
        assert_eq!(first.admit(&mut late, &late_step), Err(BLOCK_IS_LOCKED));
        let TaskStep::Done(response) = first.turn(&mut write, in_flight, &[], &mut 0) else {
            panic!("it is done")
        };
        answer(response).good();
        while !matches!(step, TaskStep::Done(_)) {
            assert_eq!(first.admit(&mut late, &late_step), Err(BLOCK_IS_LOCKED));
            step = second.turn(&mut compare, step, &[], &mut 0);
        }
        let TaskStep::Done(response) = step else { unreachable!() };
        answer(response).good();
        drop(compare);
        assert_eq!(first.admit(&mut late, &late_step), Ok(()));
    }

    #[test]
    fn limits_throttle_a_compare_before_its_lock_and_charge_it_as_one_write() {
        let bench = DeviceBench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let data = [[5; 512], [7; 512]].concat();
        let (mut compare, step) = first.server.begin(&command(Lun::new(0), &CAW, 1024));
        let step = first.turn(&mut compare, step, &data, &mut 0);
        let TaskStep::Io { io, .. } = &step else { panic!("{step:?}") };
        assert_eq!(DeviceServer::cost(&mut compare, io), Some(Cost::write(512)));
        second.run_with(&WRITE, &[6; 512]).good();
        let (mut write, write_step) = second.server.begin(&command(Lun::new(0), &WRITE, 512));
        let in_flight = second.turn(&mut write, write_step, &[5; 512], &mut 0);
        assert_eq!(second.admit(&mut write, &in_flight), Ok(()));
        for _ in 0..2 {
            let admitted = first.admit_late(&mut compare, &step);
            assert!(matches!(admitted, Err(NotAdmitted::Draining)));
        }
        // Others wait for the lock.
        let (mut late, late_step) = second.server.begin(&command(Lun::new(0), &WRITE, 512));
        let late_step = second.turn(&mut late, late_step, &[8; 512], &mut 0);
        assert_eq!(second.admit(&mut late, &late_step), Err(BLOCK_IS_LOCKED));
        second.turn(&mut write, in_flight, &[], &mut 0);
        assert!(first.admit_late(&mut compare, &step).is_ok());
        let step = first.turn(&mut compare, step, &[], &mut 0);
        let TaskStep::Io { io, .. } = &step else { panic!("{step:?}") };
        assert_eq!(DeviceServer::cost(&mut compare, io), None);
        let TaskStep::Done(response) = first.turn(&mut compare, step, &[], &mut 0) else {
            panic!("it is done")
        };
        answer(response).good();
        assert_eq!(first.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [7; 512]);
    }

    #[test]
    fn commands_that_change_blocks_wait_for_locks() {
        let bench = DeviceBench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let (mut compare, step) = first.server.begin(&command(Lun::new(0), &CAW, 1024));
        let step = first.turn(&mut compare, step, &[0; 1024], &mut 0);
        assert_eq!(first.admit(&mut compare, &step), Ok(()));
        let unmap = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
        let changes: [(&[u8], &[u8]); 4] = [
            (&WRITE, &[1; 512]),
            (&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]),
            (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &unmap),
            (&[0x2e, 2, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]),
        ];
        for (cdb, data) in changes {
            let (mut task, mut step) = second.server.begin(&command(Lun::new(0), cdb, data.len()));
            if let TaskStep::DataOut { .. } = step {
                step = second.turn(&mut task, step, data, &mut 0);
            }
            assert_eq!(second.admit(&mut task, &step), Err(BLOCK_IS_LOCKED), "{cdb:x?}");
        }
    }

    #[test]
    fn a_task_that_is_dropped_gives_its_range_back() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
        let step = client.turn(&mut task, step, &[0; 1024], &mut 0);
        assert_eq!(client.admit(&mut task, &step), Ok(()));
        assert!(bench.unit.volume_state.is_locked(0, 512));
        drop(task);
        assert!(!bench.unit.volume_state.is_locked(0, 512));
    }

    #[test]
    fn orwrite_ors() {
        let mut client = DeviceBench::new().client("a");
        let cdb = [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0];
        client.run_with(&cdb, &[0xa5; 512]).good();
        client.run_with(&cdb, &[0x5a; 512]).good();
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 3, 0, 0, 1, 0]).good(), [0xff; 512]);
        assert_eq!(
            client.run_with(&[0x8b, 0x20, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0], &[0; 512]).check(),
            (5, 0x2400)
        );
    }

    #[test]
    fn write_atomic_enforces_its_maximum() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&[0x9c, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[3; 131_072]).good();
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 255, 0, 0, 1, 0]).good(), [3; 512]);
        assert_eq!(client.run(&[0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 1, 0, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0]).check(), (5, 0x2400));
        assert_eq!(
            client.run(&[0x9c, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 1, 0, 0]).check(),
            (5, 0x2100)
        );
    }
}
