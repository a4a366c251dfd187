//! COMPARE AND WRITE and ORWRITE: reading and writing as one (SBC-4).

use super::task::{Action, BlockRange, Context, MultiStepCommand, PIECE, TaskOutcome};
use crate::scsi::bytes::{first_difference, or};
use crate::scsi::sense::Sense;
use crate::volume_state::RangeGuard;
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::cdb::FUA;
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// MAXIMUM COMPARE AND WRITE LENGTH: the CDB has one byte for it.
pub(super) const MAX_COMPARE_BLOCKS: u8 = u8::MAX;

/// Writes the second half of the data-out if the blocks are equal to the first.
pub(super) fn compare_and_write(cx: &mut Context<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let range = cx.range_of(cdb.u64(2), cdb.byte(13).into())?;
    cx.check_writable()?;
    if range.len == 0 {
        // Whoever sends data along means more blocks than the field can say.
        return if cx.command.data_out_len > 0 { Err(Sense::in_cdb(13).into()) } else { Ok(Action::good()) };
    }
    cx.work(ReadModifyWrite::of(CompareKind::CompareAndWrite, &range));
    cx.exact_data_out(range.len.saturating_mul(2))
}

/// Ors the data-out into the blocks.
pub(super) fn orwrite(cx: &mut Context<'_>) -> TaskOutcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    cx.check_writable()?;
    if range.len == 0 {
        return Ok(Action::good());
    }
    cx.work(ReadModifyWrite::of(CompareKind::Or, &range));
    cx.data_out(range.len)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CompareKind {
    CompareAndWrite,
    Or,
}

/// Locks the range, reads it, writes it; the lock goes with the work. Nobody else gets at the range
/// meanwhile, so that what is or-ed may be so a piece at a time.
struct ReadModifyWrite {
    kind: CompareKind,
    offset: u64,
    len: u64,
    /// How much of it is done.
    at: u64,
    fua: bool,
    data: SgList,
    guard: Option<RangeGuard>,
}

impl ReadModifyWrite {
    /// Of a range, from its beginning.
    fn of(kind: CompareKind, range: &BlockRange) -> ReadModifyWrite {
        let fua = range.flags & FUA != 0;
        let (offset, len) = (range.offset, range.len);
        ReadModifyWrite { kind, offset, len, at: 0, fua, data: SgList::default(), guard: None }
    }

    /// What is read and written next, in bytes.
    fn piece(&self) -> u64 {
        match self.kind {
            CompareKind::CompareAndWrite => self.len,
            CompareKind::Or => self.len.saturating_sub(self.at).min(PIECE),
        }
    }

    fn io(&self, op: Op, data: Option<SgList>) -> TaskOutcome {
        Ok(Action::IoAlone(op, self.offset.saturating_add(self.at), self.piece(), data))
    }

    fn modify(&self, read: &SgList) -> Result<SgList, Sense> {
        match self.kind {
            CompareKind::Or => {
                let data = self.data.slice(self.at as usize, read.len());
                Ok(Seg::from_slice(&or(read, &data)).into())
            }
            CompareKind::CompareAndWrite => match first_difference(read, &self.data) {
                // SBC-4, the COMPARE AND WRITE command: INFORMATION is the offset of the first byte
                // that differs.
                Some(at) => Err(Sense::new(SenseKey::MISCOMPARE, Asc::MISCOMPARE_DURING_VERIFY_OPERATION)
                    .with_information(at as u64)),
                None => Ok(self.data.slice(read.len(), read.len())),
            },
        }
    }
}

impl MultiStepCommand for ReadModifyWrite {
    fn on_data_out(&mut self, cx: &mut Context<'_>, data: SgList) -> TaskOutcome {
        self.data = data;
        self.on_resume(cx)
    }

    fn on_resume(&mut self, cx: &mut Context<'_>) -> TaskOutcome {
        if !RangeGuard::take(&mut self.guard, &cx.unit.unit.served, self.offset, self.len) {
            return Ok(Action::Wait);
        }
        self.io(Op::Read, None)
    }

    fn on_io(&mut self, _cx: &mut Context<'_>, output: Output) -> TaskOutcome {
        match output {
            Output::Data(read) => {
                let data = self.modify(&read)?;
                self.io(Op::Write { fua: self.fua }, Some(data))
            }
            _ => {
                self.at = self.at.saturating_add(self.piece());
                if self.at == self.len { Ok(Action::good()) } else { self.io(Op::Read, None) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{Bench, answer, command};
    use crate::scsi::{Lun, ScsiStatus, Step};

    const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    const CAW: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];

    #[test]
    fn a_match_writes_and_a_miscompare_says_where() {
        let mut client = Bench::new().client("a");
        client.run_with(&CAW, &[[0; 512], [7; 512]].concat()).good();
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [7; 512]);
        let mut wrong = [[7; 512], [9; 512]].concat();
        wrong[300] = 0;
        let (mut task, mut step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
        let mut sent = 0;
        let response = loop {
            match step {
                Step::Done(response) => break response,
                next => step = client.turn(&mut task, next, &wrong, &mut sent),
            }
        };
        assert_eq!(response.sense.unwrap().information, Some(300));
        assert_eq!(answer(response).check(), (0xe, 0x1d00));
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [7; 512]);
    }

    #[test]
    fn another_amount_of_data_than_two_times_the_blocks_is_refused() {
        let mut client = Bench::new().client("a");
        assert_eq!(client.run_with(&CAW, &[0; 2048]).check(), (5, 0x0e03));
        assert_eq!(client.run_with(&CAW, &[0; 512]).check(), (5, 0x0e03));
        assert_eq!(client.run(&[0x89, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 1, 0, 0]).check(), (5, 0x2100));
    }

    #[test]
    fn of_two_compares_one_waits_and_then_sees_the_other_s_write() {
        let bench = Bench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let data = [[0; 512], [7; 512]].concat();
        let begin = |client: &mut crate::scsi::device::testing::Client| {
            let (mut task, step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
            let mut sent = 0;
            let step = client.turn(&mut task, step, &data, &mut sent);
            (task, step)
        };
        let (mut one, mut one_step) = begin(&mut first);
        let (mut two, two_step) = begin(&mut second);
        assert!(matches!(one_step, Step::Io { .. }));
        assert!(matches!(two_step, Step::Wait));
        assert!(matches!(second.server.resume(&mut two), Step::Wait));
        // A write to the same block waits, too, one beside it does not.
        let write = |lba| [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
        second.run_with(&write(1), &[5; 512]).good();
        let (mut held, step) = second.server.begin(&command(Lun::new(0), &write(0), 512));
        let mut sent = 0;
        assert!(matches!(second.turn(&mut held, step, &[5; 512], &mut sent), Step::Wait));
        drop(held);
        loop {
            let mut sent = 1024;
            match one_step {
                Step::Done(response) => break assert_eq!(response.status, ScsiStatus::GOOD),
                next => one_step = first.turn(&mut one, next, &[], &mut sent),
            }
        }
        let step = second.server.resume(&mut two);
        let Step::Done(response) = second.turn(&mut two, step, &[], &mut 0) else {
            panic!("a read, then the end")
        };
        assert_eq!(answer(response).check(), (0xe, 0x1d00));
    }

    #[test]
    fn a_write_that_began_before_is_compared_with() {
        let bench = Bench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let (mut write, step) = first.server.begin(&command(Lun::new(0), &WRITE, 512));
        let in_flight = first.turn(&mut write, step, &[5; 512], &mut 0);
        assert!(matches!(in_flight, Step::Io { .. }));
        let data = [[5; 512], [7; 512]].concat();
        let (mut compare, step) = second.server.begin(&command(Lun::new(0), &CAW, 1024));
        assert!(matches!(second.turn(&mut compare, step, &data, &mut 0), Step::Wait));
        assert!(matches!(second.server.resume(&mut compare), Step::Wait));
        // One that comes now is held until the comparison is over.
        let (mut late, step) = first.server.begin(&command(Lun::new(0), &WRITE, 512));
        assert!(matches!(first.turn(&mut late, step, &[6; 512], &mut 0), Step::Wait));
        let Step::Done(response) = first.turn(&mut write, in_flight, &[], &mut 0) else {
            panic!("it is done")
        };
        answer(response).good();
        let mut step = second.server.resume(&mut compare);
        while !matches!(step, Step::Done(_)) {
            assert!(matches!(first.server.resume(&mut late), Step::Wait));
            step = second.turn(&mut compare, step, &[], &mut 0);
        }
        let Step::Done(response) = step else { unreachable!() };
        answer(response).good();
        assert!(matches!(first.server.resume(&mut late), Step::Io { .. }));
    }

    #[test]
    fn whatever_changes_blocks_waits_for_them() {
        let bench = Bench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let (mut compare, step) = first.server.begin(&command(Lun::new(0), &CAW, 1024));
        first.turn(&mut compare, step, &[0; 1024], &mut 0);
        let unmap = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
        let changes: [(&[u8], &[u8]); 4] = [
            (&WRITE, &[1; 512]),
            (&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]),
            (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &unmap),
            (&[0x2e, 2, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]),
        ];
        for (cdb, data) in changes {
            let (mut task, mut step) = second.server.begin(&command(Lun::new(0), cdb, data.len()));
            if let Step::DataOut { .. } = step {
                step = second.turn(&mut task, step, data, &mut 0);
            }
            assert!(matches!(step, Step::Wait), "{cdb:x?}");
        }
    }

    #[test]
    fn a_task_that_is_dropped_gives_its_range_back() {
        let bench = Bench::new();
        let mut client = bench.client("a");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
        client.turn(&mut task, step, &[0; 1024], &mut 0);
        assert!(bench.unit.served.is_locked(0, 512));
        drop(task);
        assert!(!bench.unit.served.is_locked(0, 512));
    }

    #[test]
    fn orwrite_ors() {
        let mut client = Bench::new().client("a");
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
    fn write_atomic_keeps_to_its_maximum() {
        let mut client = Bench::new().client("a");
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
