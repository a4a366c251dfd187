//! SANITIZE (SBC-4 §5.31, §4.11): nothing that was on the volume can be read back.
//!
//! The operation belongs to the logical unit and not to the command that began it: when that is aborted, or its nexus is
//! lost, or the unit is reset, whoever asked for it ([`LogicalUnit::on_background`]) goes on with it
//! ([`DeviceServer::poll_background`]). Until it ends the unit is not ready for anyone, and who uses the volume over another
//! protocol is kept out as by a reservation. It begins when what they have in flight is over.
//!
//! [`DeviceServer::poll_background`]: super::DeviceServer::poll_background

use super::sense::{Sense, Specific};
use super::task::{Action, Context, Failure, Outcome, Work};
use super::unit::LogicalUnit;
use crate::served::RangeGuard;
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use std::time::Duration;

/// A sanitize operation of a logical unit.
pub(super) struct Sanitize {
    /// The pattern of an overwrite, inverted in every other pass; `None`: a block erase.
    pattern: Option<Arc<[u8]>>,
    inverts: bool,
    passes: u8,
    /// In bytes, over all passes.
    done: u64,
    /// In bytes, of one pass.
    size: u64,
    /// A task carries it on.
    is_driven: bool,
    has_failed: bool,
}

impl Sanitize {
    /// Why the unit is not ready.
    pub(super) fn sense(&self) -> Sense {
        if self.has_failed {
            return Sense::new(SenseKey::MEDIUM_ERROR, Asc::SANITIZE_COMMAND_FAILED);
        }
        let total = self.size.saturating_mul(self.passes.into());
        let progress = (u128::from(self.done) << 16).checked_div(total.into()).unwrap_or(0);
        let progress = u16::try_from(progress).unwrap_or(u16::MAX);
        let sense = Sense::new(SenseKey::NOT_READY, Asc::SANITIZE_IN_PROGRESS);
        Sense { specific: Some(Specific::Progress(progress)), ..sense }
    }

    /// Whether it waits for someone to carry it on.
    pub(super) fn is_abandoned(&self) -> bool {
        !self.is_driven && !self.has_failed
    }

    /// What comes next, in bytes: where, how much, and in which pass; `None` if all is done.
    fn next(&self) -> Option<(u64, u64, u64)> {
        let pass = self.done.checked_div(self.size)?;
        let at = self.done.checked_rem(self.size)?;
        let most = if self.pattern.is_some() { OVERWRITE_PIECE } else { ERASE_PIECE };
        (pass < self.passes.into()).then(|| (at, self.size.saturating_sub(at).min(most), pass))
    }

    /// What is written in even passes, and what in odd ones; `None` for a block erase.
    fn pieces(&self) -> Option<[SgList; 2]> {
        let block = self.pattern.as_deref()?;
        let copies = (OVERWRITE_PIECE as usize).checked_div(block.len())?.max(1);
        let plain = block.repeat(copies);
        let odd: Vec<u8> =
            if self.inverts { plain.iter().map(|byte| !byte).collect() } else { plain.clone() };
        Some([plain, odd].map(|bytes| SgList::one(Seg::from_slice(&bytes))))
    }
}

pub(super) fn block_erase(cx: &mut Context<'_>) -> Outcome {
    check(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    begin(cx, None, false, 1)
}

pub(super) fn overwrite(cx: &mut Context<'_>) -> Outcome {
    check(cx)?;
    let len = usize::from(cx.command.cdb.u16(7));
    let block_len = cx.unit.view.block_len as usize;
    // SBC-4 §5.31.2.2: 4 bytes, then a pattern of at most a block.
    if len < 5 || len > block_len.saturating_add(4) {
        return Err(Sense::in_cdb(7).into());
    }
    cx.parameters(len, 5, |cx, bytes| {
        let [flags, _, high, low, pattern @ ..] = bytes else { return Err(Sense::in_parameters(0).into()) };
        let passes = flags & 0x1f;
        if passes == 0 {
            return Err(Sense::in_parameters(0).into());
        }
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        let block_len = cx.unit.view.block_len as usize;
        if length == 0 || length > block_len {
            return Err(Sense::in_parameters(2).into());
        }
        let pattern = pattern.get(..length).ok_or(Sense::in_parameters(2))?;
        // Each block begins with the pattern.
        let block: Arc<[u8]> = pattern.iter().copied().cycle().take(block_len).collect();
        begin(cx, Some(block), flags & INVERT != 0, passes)
    })
}

/// Ends the state that a failed operation leaves.
pub(super) fn exit_failure_mode(cx: &mut Context<'_>) -> Outcome {
    check_bits(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    let is_over = cx.unit.unit.change(|state| {
        state.sanitize = state.sanitize.take().filter(|sanitize| !sanitize.has_failed);
        state.sanitize.is_none()
    });
    if is_over {
        cx.unit.unit.served.close(false);
    }
    Ok(Action::good())
}

fn check(cx: &Context<'_>) -> Result<(), Failure> {
    check_bits(cx)?;
    cx.check_writable()
}

/// ZNR and bytes 2 to 6 are reserved.
fn check_bits(cx: &Context<'_>) -> Result<(), Sense> {
    let cdb = &cx.command.cdb;
    if cdb.byte(1) & 0x40 != 0 {
        return Err(Sense::cdb_bit(1, 6));
    }
    match (2..7).find(|&at| cdb.byte(at) != 0) {
        Some(at) => Err(Sense::in_cdb(at as u16)),
        None => Ok(()),
    }
}

fn begin(cx: &mut Context<'_>, pattern: Option<Arc<[u8]>>, inverts: bool, passes: u8) -> Outcome {
    let is_immediate = cx.command.cdb.byte(1) & IMMED != 0;
    let size = cx.unit.view.blocks.saturating_mul(cx.unit.view.block_len.into());
    let in_the_way = cx.unit.unit.change(|state| match &state.sanitize {
        Some(other) if !other.has_failed => Some(other.sense()),
        _ => {
            state.sanitize = Some(Sanitize {
                pattern,
                inverts,
                passes,
                done: 0,
                size,
                is_driven: false,
                has_failed: false,
            });
            None
        }
    });
    if let Some(sense) = in_the_way {
        return Err(sense.into());
    }
    cx.unit.unit.served.close(true);
    match is_immediate {
        true => {
            cx.unit.unit.call_background();
            Ok(Action::good())
        }
        false => carry_on(cx),
    }
}

/// Makes the task that of the operation, which waits for one.
pub(super) fn carry_on(cx: &mut Context<'_>) -> Outcome {
    let claimed = cx.unit.unit.change(|state| match &mut state.sanitize {
        Some(sanitize) if sanitize.is_abandoned() => {
            sanitize.is_driven = true;
            true
        }
        _ => false,
    });
    if !claimed {
        return Ok(Action::good());
    }
    let pieces = cx.unit.unit.look(|state| state.sanitize.as_ref().and_then(Sanitize::pieces));
    let mut work = Driver { unit: cx.unit.unit.clone(), pieces, piece: 0, guard: None };
    let first = work.next();
    if !matches!(first, Ok(Action::Done(_))) {
        cx.work(work);
    }
    first
}

/// The task that carries a sanitize operation on; when it is dropped, the operation waits for another.
struct Driver {
    unit: Arc<LogicalUnit>,
    /// What is written in even passes, and what in odd ones.
    pieces: Option<[SgList; 2]>,
    /// Bytes that are being written.
    piece: u64,
    /// All of the volume: what others have in flight ends first, and what they were just about to begin is refused.
    guard: Option<RangeGuard>,
}

impl Driver {
    fn next(&mut self) -> Outcome {
        let (next, size) = self.unit.look(|state| match &state.sanitize {
            Some(sanitize) => (sanitize.next(), sanitize.size),
            None => (None, 0),
        });
        let Some((at, len, pass)) = next else {
            self.unit.change(|state| state.sanitize = None);
            self.unit.served.close(false);
            return Ok(Action::good());
        };
        if !RangeGuard::take(&mut self.guard, &self.unit.served, 0, size) {
            return Ok(Action::Wait);
        }
        self.piece = len;
        let Some([even, odd]) = &self.pieces else {
            let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
            return Ok(Action::IoAlone(op, at, len, None));
        };
        let data = if pass.is_multiple_of(2) { even } else { odd };
        Ok(Action::IoAlone(Op::Write { fua: false }, at, len, Some(data.slice(0, len as usize))))
    }
}

impl Work for Driver {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> Outcome {
        self.unit.change(|state| {
            if let Some(sanitize) = &mut state.sanitize {
                sanitize.done = sanitize.done.saturating_add(self.piece);
            }
        });
        Ok(Action::Pause(PAUSE))
    }

    fn on_resume(&mut self, _cx: &mut Context<'_>) -> Outcome {
        self.next()
    }

    fn on_error(&mut self, _cx: &mut Context<'_>) {
        self.unit.change(|state| {
            if let Some(sanitize) = &mut state.sanitize {
                sanitize.has_failed = true;
            }
        });
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let is_abandoned = self.unit.change(|state| {
            let Some(sanitize) = &mut state.sanitize else { return false };
            sanitize.is_driven = false;
            sanitize.is_abandoned()
        });
        if is_abandoned {
            self.unit.call_background();
        }
    }
}

const IMMED: u8 = 1 << 7;
const INVERT: u8 = 1 << 7;
/// Bytes that one turn overwrites: with the pause, 128 MiB in a second.
const OVERWRITE_PIECE: u64 = 4 << 20;
/// Bytes that one turn erases.
const ERASE_PIECE: u64 = 64 << 20;
/// After each turn, for whoever else uses the storage below.
const PAUSE: Duration = Duration::from_millis(32);

#[cfg(test)]
mod tests {
    use crate::scsi::testing::{Bench, Client, answer, command};
    use crate::scsi::{Lun, Status, Step, TaskManagement};

    const ERASE: [u8; 10] = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    const TUR: [u8; 6] = [0; 6];

    fn overwrite(
        client: &mut Client,
        flags: u8,
        length: u16,
        pattern: &[u8],
    ) -> crate::scsi::testing::Answer {
        let list = [&[flags, 0][..], &length.to_be_bytes(), pattern].concat();
        let [high, low] = (list.len() as u16).to_be_bytes();
        client.run_waiting(&[0x48, 1, 0, 0, 0, 0, 0, high, low, 0], &list)
    }

    fn ends(client: &mut Client) -> (Vec<u8>, Vec<u8>) {
        let first = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
        (first, client.run(&[0x28, 0, 0, 0, 0x3f, 0xff, 0, 0, 1, 0]).good())
    }

    #[test]
    fn everything_is_overwritten_with_the_pattern() {
        let mut client = Bench::new().client("a");
        overwrite(&mut client, 1, 2, &[1, 2]).good();
        assert_eq!(ends(&mut client), ([1, 2].repeat(256), [1, 2].repeat(256)));
        overwrite(&mut client, 0x82, 512, &[0xaa; 512]).good();
        assert_eq!(ends(&mut client), (vec![0x55; 512], vec![0x55; 512]));
    }

    #[test]
    fn a_block_erase_leaves_zeroes() {
        let mut client = Bench::new().client("a");
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]).good();
        client.run_waiting(&ERASE, &[]).good();
        assert_eq!(ends(&mut client), (vec![0; 512], vec![0; 512]));
    }

    #[test]
    fn wrong_parameters_are_refused() {
        let mut client = Bench::new().client("a");
        for (flags, length) in [(0, 512), (1, 0), (1, 516)] {
            assert_eq!(overwrite(&mut client, flags, length, &[0; 512]).check(), (5, 0x2600));
        }
        assert_eq!(overwrite(&mut client, 1, 513, &[0; 513]).check(), (5, 0x2400));
        assert_eq!(overwrite(&mut client, 1, 0, &[]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x48, 0x42, 0, 0, 0, 0, 0, 0, 0, 0]).check(), (5, 0x2400));
        for at in 2..7 {
            let mut cdb = ERASE;
            cdb[at] = 1;
            assert_eq!(client.run(&cdb).check(), (5, 0x2400));
        }
        assert_eq!(client.run(&[0x48, 3, 0, 0, 0, 0, 0, 0, 0, 0]).check(), (5, 0x2400));
        assert_eq!(client.run_with(&[0x48, 2, 0, 0, 0, 0, 0, 0, 8, 0], &[0; 8]).check(), (5, 0x2400));
        client.run(&[0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    }

    #[test]
    fn it_outlives_its_command_and_its_session() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let list = [&[1, 0, 2, 0][..], &[7; 512]].concat();
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &[0x48, 1, 0, 0, 0, 0, 0, 2, 4, 0], 516));
        let step = a.turn(&mut task, step, &list, &mut 0);
        assert!(matches!(step, Step::Io { .. }));
        assert_eq!(b.run(&TUR).check(), (2, 0x041b));
        assert_eq!(b.run(&[0x1b, 0, 0, 0, 0x10, 0]).check(), (2, 0x041b));
        assert_eq!(b.run(&ERASE).check(), (2, 0x041b));
        b.run(&[0x12, 0, 0, 0, 36, 0]).good();
        assert!(b.server.poll_background().is_none());
        b.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
        drop(task);
        drop(a);
        assert_eq!(b.run(&TUR).check(), (6, 0x2903));
        assert_eq!(b.run(&TUR).check(), (2, 0x041b));
        let (mut task, mut step) = b.server.poll_background().unwrap();
        assert!(b.server.poll_background().is_none());
        let response = loop {
            match step {
                Step::Done(response) => break response,
                next => step = b.turn(&mut task, next, &[], &mut 0),
            }
        };
        assert_eq!(answer(response).status, Status::GOOD);
        b.run(&TUR).good();
        assert_eq!(ends(&mut b), (vec![7; 512], vec![7; 512]));
    }

    #[test]
    fn an_immediate_one_answers_first() {
        let mut client = Bench::new().client("a");
        client.run(&[0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let sense = client.run(&[3, 0, 0, 0, 18, 0]).good();
        assert_eq!((sense[2], &sense[12..16]), (2, &[4, 0x1b, 0, 0x80][..]));
        assert!(client.server.poll_background().is_some());
    }
}
