//! VERIFY and WRITE AND VERIFY (SBC-4).

use super::task::{BlockRange, CommandContext, HandlerAction, MultiStepCommand, PIECE, TaskOutcome};
use crate::scsi::bytes::first_difference;
use crate::scsi::sense::Sense;
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// VERIFY: with BYTCHK 00b the blocks must be readable; with 01b they must equal the data-out; with
/// 11b each must equal its single block.
pub(super) fn verify(cx: &mut CommandContext<'_>) -> TaskOutcome {
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
        return Ok(HandlerAction::good());
    }
    let mut work = Verify::new(&range, VerifyData::Anything);
    if data_len == 0 {
        let first = work.read();
        cx.work(work);
        return first;
    }
    if bytchk(range.flags) == 0b11 {
        work.expected = VerifyData::Each(SgList::default());
    }
    cx.work(work);
    cx.data_out(data_len)
}

/// WRITE AND VERIFY: writes, then reads back; with BYTCHK 01b the read data must equal the written
/// data. Only VERIFY supports 11b.
pub(super) fn write_and_verify(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    let compare = match bytchk(range.flags) {
        0b00 => false,
        0b01 => true,
        _ => return Err(Sense::cdb_bit(1, 2).into()),
    };
    let Some(len) = cx.begin_write(&range)? else { return Ok(HandlerAction::good()) };
    cx.work(WriteAndVerify { range: BlockRange { len, ..range }, compare, data: SgList::default() });
    cx.write_data_out(&range, len)
}

/// Reads and compares in pieces.
struct Verify {
    /// Offset of the range, in bytes.
    offset: u64,
    /// Length in bytes.
    len: u64,
    /// Number of bytes done.
    at: u64,
    /// Length of the current read, in bytes.
    reading: u64,
    expected: VerifyData,
}

/// Expected content of the blocks.
enum VerifyData {
    Anything,
    All(SgList),
    /// Copies of one block, to compare several blocks at once.
    Each(SgList),
}

impl Verify {
    fn new(range: &BlockRange, expected: VerifyData) -> Verify {
        Verify { offset: range.offset, len: range.len, at: 0, reading: 0, expected }
    }

    fn read(&mut self) -> TaskOutcome {
        self.reading = self.len.saturating_sub(self.at).min(PIECE);
        Ok(HandlerAction::Io(Op::Read, self.offset.saturating_add(self.at), self.reading, None))
    }

    fn compare(&self, read: &SgList) -> Result<(), Sense> {
        match &self.expected {
            VerifyData::Anything => Ok(()),
            VerifyData::All(data) => compare(read, &data.slice(self.at as usize, self.reading as usize)),
            VerifyData::Each(copies) => {
                let step = copies.len().max(1);
                let mut places = (0..read.len()).step_by(step);
                places.try_for_each(|at| {
                    compare(&read.slice(at, step.min(read.len().saturating_sub(at))), copies)
                })
            }
        }
    }
}

impl MultiStepCommand for Verify {
    fn on_data_out(&mut self, _cx: &mut CommandContext<'_>, data: SgList) -> TaskOutcome {
        self.expected = match self.expected {
            VerifyData::Each(_) => {
                let copies = COPIES.checked_div(data.len()).unwrap_or(0).max(1);
                VerifyData::Each(Seg::from_slice(&data.to_vec().repeat(copies)).into())
            }
            _ => VerifyData::All(data),
        };
        self.read()
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome {
        self.compare(&output.into_data())?;
        self.at = self.at.saturating_add(self.reading);
        if self.at == self.len { Ok(HandlerAction::good()) } else { self.read() }
    }
}

struct WriteAndVerify {
    range: BlockRange,
    compare: bool,
    /// The written data, once the write has completed.
    data: SgList,
}

impl MultiStepCommand for WriteAndVerify {
    fn on_data_out(&mut self, _cx: &mut CommandContext<'_>, data: SgList) -> TaskOutcome {
        self.data = data.clone();
        // The medium can be verified only after the data is on it.
        Ok(HandlerAction::Io(Op::Write { fua: true }, self.range.offset, self.range.len, Some(data)))
    }

    fn on_io(&mut self, cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        let data = std::mem::take(&mut self.data);
        let expected = if self.compare { VerifyData::All(data) } else { VerifyData::Anything };
        let mut verify = Verify::new(&self.range, expected);
        let first = verify.read();
        cx.work(verify);
        first
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

/// Length of the repeated block, in bytes.
const COPIES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::DeviceBench;

    #[test]
    fn every_form_of_verify_compares_only_if_bytchk_is_set() {
        let mut client = DeviceBench::new().client("a");
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
        let mut client = DeviceBench::new().client("a");
        client.run(&[0x2f, 6, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let cdb = [0x2f, 6, 0, 0, 0, 0, 0, 0x40, 0, 0];
        client.run_with(&cdb, &[0; 512]).good();
        client.run_with(&[0x2a, 0, 0, 0, 0x3f, 0xff, 0, 0, 1, 0], &[1; 512]).good();
        assert_eq!(client.run_with(&cdb, &[0; 512]).check(), (0xe, 0x1d00));
    }

    #[test]
    fn write_and_verify_writes() {
        let mut client = DeviceBench::new().client("a");
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
    fn write_and_verify_with_short_data_writes_whole_blocks() {
        let mut client = DeviceBench::new().client("a");
        for (len, status, expected) in [(0, 0, 0), (200, 2, 0), (512, 0, 512), (1023, 2, 0)] {
            client.run_with(&[0x41, 0, 0, 0, 0, 0, 0, 0, 2, 0], &[1; 512]).good();
            let short = client.run_with(&[0x2e, 2, 0, 0, 0, 0, 0, 0, 2, 0], &vec![2; len]);
            assert_eq!((short.status.0, short.transfer_len), (status, 1024));
            let read = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0]).good();
            assert_eq!(read.iter().filter(|&&byte| byte == 2).count(), expected);
        }
    }
}
