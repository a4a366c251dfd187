//! VERIFY and WRITE AND VERIFY (SBC-4).

use super::bytes::first_difference;
use super::sense::Sense;
use super::task::{Action, Context, Outcome, Work};
use blockmux_volume::{MAX_TRANSFER, Op, Output, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// With BYTCHK 00b the blocks must be readable, with 01b equal to the data-out, with 11b each equal to its one block.
pub(super) fn verify(cx: &mut Context<'_>) -> Outcome {
    let range = cx.range()?;
    let block_len = cx.unit.view.block_len.into();
    let data_len = match bytchk(range.flags) {
        0b00 => 0,
        0b01 => {
            cx.check_transfer(&range, cx.length_field())?;
            range.len
        }
        0b11 if range.len > 0 => block_len,
        0b11 => 0,
        _ => return Err(Sense::cdb_bit(1, 2).into()),
    };
    if range.len == 0 {
        return Ok(Action::good());
    }
    let mut work = Verify { offset: range.offset, left: range.len, reading: 0, data: SgList::default() };
    if data_len == 0 {
        let first = work.read();
        cx.work(work);
        return first;
    }
    cx.work(work);
    cx.data_out(data_len)
}

/// Writes, then reads back; with BYTCHK 01b what is read must be what was written. 11b is for VERIFY alone.
pub(super) fn write_and_verify(cx: &mut Context<'_>) -> Outcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    let compare = match bytchk(range.flags) {
        0b00 => false,
        0b01 => true,
        _ => return Err(Sense::cdb_bit(1, 2).into()),
    };
    let Some(len) = cx.begin_write(&range)? else { return Ok(Action::good()) };
    cx.work(WriteAndVerify { offset: range.offset, len, compare, data: SgList::default() });
    cx.write_data_out(&range, len)
}

struct Verify {
    /// What comes next, in bytes.
    offset: u64,
    left: u64,
    /// How much is being read.
    reading: u64,
    /// What to compare with: nothing, all of it, or one block.
    data: SgList,
}

impl Verify {
    fn read(&mut self) -> Outcome {
        self.reading = self.left.min(MAX_TRANSFER.into());
        Ok(Action::Io(Op::Read, self.offset, self.reading, None))
    }
}

impl Work for Verify {
    fn on_data_out(&mut self, _cx: &mut Context<'_>, data: SgList) -> Outcome {
        self.data = data;
        self.read()
    }

    fn on_io(&mut self, _cx: &mut Context<'_>, output: Output) -> Outcome {
        let read = output.into_data();
        if !self.data.is_empty() {
            let step = self.data.len();
            for at in (0..read.len()).step_by(step) {
                compare(&read.slice(at, step.min(read.len().saturating_sub(at))), &self.data)?;
            }
        }
        self.offset = self.offset.saturating_add(self.reading);
        self.left = self.left.saturating_sub(self.reading);
        if self.left == 0 { Ok(Action::good()) } else { self.read() }
    }
}

struct WriteAndVerify {
    offset: u64,
    len: u64,
    compare: bool,
    /// What was written, once it was.
    data: SgList,
}

impl Work for WriteAndVerify {
    fn on_data_out(&mut self, _cx: &mut Context<'_>, data: SgList) -> Outcome {
        self.data = data.clone();
        // To verify the medium, the data has to be there.
        Ok(Action::Io(Op::Write { fua: true }, self.offset, self.len, Some(data)))
    }

    fn on_io(&mut self, _cx: &mut Context<'_>, output: Output) -> Outcome {
        match output {
            Output::Data(read) => {
                if self.compare {
                    compare(&read, &self.data)?;
                }
                Ok(Action::good())
            }
            _ => Ok(Action::Io(Op::Read, self.offset, self.len, None)),
        }
    }
}

fn compare(medium: &SgList, data: &SgList) -> Result<(), Sense> {
    match first_difference(medium, data) {
        None => Ok(()),
        Some(_) => Err(Sense::new(SenseKey::MISCOMPARE, Asc::MISCOMPARE_DURING_VERIFY_OPERATION)),
    }
}

/// BYTCHK.
fn bytchk(flags: u8) -> u8 {
    (flags >> 1) & 0b11
}

#[cfg(test)]
mod tests {
    use crate::scsi::testing::Bench;

    #[test]
    fn every_form_of_verify_compares_with_bytchk_only() {
        let mut client = Bench::new().client("a");
        let blocks: Vec<u8> = (0..1024).map(|i| (i / 3) as u8).collect();
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0], &blocks).good();
        let mut other = blocks.clone();
        other[1000] ^= 1;
        for mut cdb in [
            vec![0x2f, 2, 0, 0, 0, 0, 0, 0, 2, 0],
            vec![0xaf, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0],
            vec![0x8f, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0],
        ] {
            client.run_with(&cdb, &blocks).good();
            assert_eq!(client.run_with(&cdb, &other).check(), (0xe, 0x1d00));
            cdb[1] = 0;
            client.run_with(&cdb, &other).good();
            cdb[1] = 4;
            assert_eq!(client.run_with(&cdb, &blocks).check(), (5, 0x2400));
        }
    }

    #[test]
    fn one_block_is_compared_with_each() {
        let mut client = Bench::new().client("a");
        client.run(&[0x2f, 6, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let cdb = [0x2f, 6, 0, 0, 0, 0, 0, 0x40, 0, 0];
        client.run_with(&cdb, &[0; 512]).good();
        client.run_with(&[0x2a, 0, 0, 0, 0x3f, 0xff, 0, 0, 1, 0], &[1; 512]).good();
        assert_eq!(client.run_with(&cdb, &[0; 512]).check(), (0xe, 0x1d00));
    }

    #[test]
    fn write_and_verify_writes() {
        let mut client = Bench::new().client("a");
        for (i, cdb) in [
            &[0x2e, 2, 0, 0, 0, 9, 0, 0, 1, 0][..],
            &[0xae, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0],
            &[0x8e, 2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0],
        ]
        .into_iter()
        .enumerate()
        {
            client.run_with(cdb, &[i as u8 + 1; 512]).good();
            assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0]).good(), [i as u8 + 1; 512]);
        }
        assert_eq!(client.run_with(&[0x2e, 6, 0, 0, 0, 9, 0, 0, 1, 0], &[0; 512]).check(), (5, 0x2400));
    }

    #[test]
    fn of_data_that_is_too_short_the_whole_blocks_are_written() {
        let mut client = Bench::new().client("a");
        for (len, status, expected) in [(0, 0, 0), (200, 2, 0), (512, 0, 512), (1023, 2, 0)] {
            client.run_with(&[0x41, 0, 0, 0, 0, 0, 0, 0, 2, 0], &[1; 512]).good();
            let short = client.run_with(&[0x2e, 2, 0, 0, 0, 0, 0, 0, 2, 0], &vec![2; len]);
            assert_eq!((short.status.0, short.transfer_len), (status, 1024));
            let read = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0]).good();
            assert_eq!(read.iter().filter(|&&byte| byte == 2).count(), expected);
        }
    }
}
