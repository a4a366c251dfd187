//! SANITIZE (SBC-4): nothing that was on the volume can be read back.
//!
//! It is done when what it wrote is on stable storage. While it lasts nobody else reads or writes a
//! block, by whatever protocol, as if it were reserved ([`Served`]): what is in flight when it
//! begins ends first, and what was admitted and has not begun does not begin.
//!
//! The operation belongs to the logical unit and not to the command that began it: when that is
//! aborted, or its nexus is lost, or the unit is reset, whoever asked for it
//! ([`LogicalUnit::on_background`]) goes on with it ([`DeviceServer::poll_background`]). Until it
//! ends the unit is not ready for anyone.
//!
//! [`DeviceServer::poll_background`]: super::DeviceServer::poll_background
//! [`Served`]: crate::served::Served

use super::task::{Action, Context, MultiStepCommand, TaskFailure, TaskOutcome};
use super::unit::{LogicalUnit, SANITIZING};
use super::units::AttachedUnit;
use crate::scsi::sense::{Sense, Specific};
use crate::volume_state::{Drain, VolumeState};
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use std::time::Duration;

/// What a command asks for.
struct SanitizeRequest {
    /// The pattern of an overwrite; `None`: a block erase.
    pattern: Option<Arc<[u8]>>,
    /// Between passes the pattern is inverted, so that the last one leaves it as it is.
    inverts: bool,
    passes: u8,
}

/// A sanitize operation of a logical unit.
pub(super) struct Sanitize {
    what: SanitizeRequest,
    /// In bytes, over all passes.
    done: u64,
    /// In bytes, of one pass.
    size: u64,
    /// A task carries it on.
    is_driven: bool,
    has_failed: bool,
    /// AUSE: it may be left alone once it has failed.
    may_be_left: bool,
}

/// All blocks are deallocated since a block erase, as long as nothing on the volume was written,
/// zeroed or discarded. The volume may not know that: nobody can ask a block device which of its
/// blocks are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Erased {
    /// In bytes.
    size: u64,
    /// Requests that change the volume, when it was over.
    changes: u64,
}

impl Erased {
    /// After a block erase of `size` bytes that has just completed.
    fn now(served: &VolumeState, size: u64) -> Erased {
        let traffic = served.traffic();
        Erased { size, changes: traffic.writes.wrapping_add(traffic.cleared) }
    }

    /// Whether a unit of `size` bytes is still as it was then.
    pub(super) fn holds(self, served: &VolumeState, size: u64) -> bool {
        self == Erased::now(served, size)
    }
}

impl Sanitize {
    /// Why the unit is not ready.
    pub(super) fn sense(&self) -> Sense {
        if self.has_failed {
            return Sense::new(SenseKey::MEDIUM_ERROR, Asc::SANITIZE_COMMAND_FAILED);
        }
        let total = self.size.saturating_mul(self.what.passes.into());
        let progress = (u128::from(self.done) << 16).checked_div(total.into()).unwrap_or(0);
        let progress = u16::try_from(progress).unwrap_or(u16::MAX);
        Sense { specific: Some(Specific::Progress(progress)), ..SANITIZING }
    }

    /// Whether it waits for someone to carry it on.
    pub(super) fn is_abandoned(&self) -> bool {
        !self.is_driven && !self.has_failed
    }

    /// What comes next, in bytes: where, how much, and how many passes follow this one; `None` if
    /// all is written.
    fn next(&self) -> Option<(u64, u64, u64)> {
        let pass = self.done.checked_div(self.size)?;
        let at = self.done.checked_rem(self.size)?;
        let most = if self.what.pattern.is_some() { OVERWRITE_PIECE } else { ERASE_PIECE };
        let passes = u64::from(self.what.passes);
        (pass < passes).then(|| {
            let left = passes.saturating_sub(pass).saturating_sub(1);
            (at, self.size.saturating_sub(at).min(most), left)
        })
    }

    /// What is written in the last pass and every second one before it, and what in the others;
    /// `None` for a block erase.
    fn pieces(&self) -> Option<[SgList; 2]> {
        let block = self.what.pattern.as_deref()?;
        let copies = (OVERWRITE_PIECE as usize).checked_div(block.len())?.max(1);
        let plain = block.repeat(copies);
        let other: Vec<u8> =
            if self.what.inverts { plain.iter().map(|byte| !byte).collect() } else { plain.clone() };
        Some([plain, other].map(|bytes| SgList::one(Seg::from_slice(&bytes))))
    }
}

pub(super) fn block_erase(cx: &mut Context<'_>) -> TaskOutcome {
    check(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    begin(cx, SanitizeRequest { pattern: None, inverts: false, passes: 1 })
}

pub(super) fn overwrite(cx: &mut Context<'_>) -> TaskOutcome {
    check(cx)?;
    let len = usize::from(cx.command.cdb.u16(7));
    let block_len = cx.unit.view.block_len as usize;
    // SBC-4, the SANITIZE command, OVERWRITE: 4 bytes, then a pattern of at most a block.
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
        begin(cx, SanitizeRequest { pattern: Some(block), inverts: flags & INVERT != 0, passes })
    })
}

/// Ends the state that a failed operation leaves.
pub(super) fn exit_failure_mode(cx: &mut Context<'_>) -> TaskOutcome {
    check_bits(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    let is_left = cx.unit.unit.change(|state| match &state.sanitize {
        // There is nothing to leave.
        None => Ok(false),
        Some(sanitize) if !sanitize.has_failed => Err(sanitize.sense()),
        // SBC-4, the SANITIZE command: not without AUSE in the command that has failed.
        Some(sanitize) if !sanitize.may_be_left => Err(Sense::cdb_bit(1, 4)),
        Some(_) => {
            state.sanitize = None;
            Ok(true)
        }
    })?;
    if is_left {
        cx.unit.unit.served.close(false);
    }
    Ok(Action::good())
}

fn check(cx: &Context<'_>) -> Result<(), TaskFailure> {
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

fn begin(cx: &mut Context<'_>, what: SanitizeRequest) -> TaskOutcome {
    let flags = cx.command.cdb.byte(1);
    let may_be_left = flags & AUSE != 0;
    let size = cx.unit.view.blocks.saturating_mul(cx.unit.view.block_len.into());
    // Before the state of the unit is locked; who was second finds the first one's operation, here
    // or elsewhere.
    let is_first = cx.unit.unit.served.close(true);
    cx.unit.unit.change(|state| match &state.sanitize {
        Some(other) if !other.has_failed => Err(other.sense()),
        // SBC-4, the SANITIZE command, AUSE: what cannot be left alone is not made so by another
        // operation.
        Some(other) if may_be_left && !other.may_be_left => Err(Sense::cdb_bit(1, 5)),
        None if !is_first => Err(SANITIZING),
        _ => {
            let (is_driven, has_failed) = (false, false);
            state.sanitize = Some(Sanitize { what, done: 0, size, is_driven, has_failed, may_be_left });
            Ok(())
        }
    })?;
    if flags & IMMED == 0 {
        return carry_on(cx);
    }
    cx.unit.unit.call_background();
    Ok(Action::good())
}

/// Makes the task that of the operation, which waits for one.
pub(super) fn carry_on(cx: &mut Context<'_>) -> TaskOutcome {
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
    let drain = Some(Drain::new(&cx.unit.unit.served));
    let mut work = SanitizeDriver { unit: cx.unit.unit.clone(), drain, pieces, piece: 0, is_flushing: false };
    let first = work.next();
    if !matches!(first, Ok(Action::Done(_))) {
        cx.work(work);
    }
    first
}

/// The task that carries a sanitize operation on; when it is dropped, the operation waits for
/// another.
struct SanitizeDriver {
    unit: Arc<LogicalUnit>,
    /// I/O that began before the operation.
    drain: Option<Drain>,
    /// What is written in the last pass and every second one before it, and what in the others.
    pieces: Option<[SgList; 2]>,
    /// Bytes that are being written.
    piece: u64,
    /// All is written and becomes stable.
    is_flushing: bool,
}

impl SanitizeDriver {
    fn next(&mut self) -> TaskOutcome {
        if self.drain.as_ref().is_some_and(|drain| !drain.is_over()) {
            return Ok(Action::Wait);
        }
        self.drain = None;
        let next = self.unit.look(|state| state.sanitize.as_ref().and_then(Sanitize::next));
        let Some((at, len, left)) = next else {
            self.is_flushing = true;
            return Ok(Action::Io(Op::Flush, 0, 0, None));
        };
        self.piece = len;
        let Some([plain, other]) = &self.pieces else {
            let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
            return Ok(Action::Io(op, at, len, None));
        };
        let data = if left.is_multiple_of(2) { plain } else { other };
        Ok(Action::Io(Op::Write { fua: false }, at, len, Some(data.slice(0, len as usize))))
    }
}

impl MultiStepCommand for SanitizeDriver {
    fn check(&self, _end: &AttachedUnit, _op: Op) -> Result<(), TaskFailure> {
        Ok(())
    }

    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> TaskOutcome {
        if self.is_flushing {
            self.unit.change(|state| {
                let erase = state.sanitize.take().filter(|sanitize| sanitize.what.pattern.is_none());
                // Nobody else has begun anything yet.
                state.erased = erase.map(|erase| Erased::now(&self.unit.served, erase.size));
            });
            self.unit.served.close(false);
            return Ok(Action::good());
        }
        self.unit.change(|state| {
            if let Some(sanitize) = &mut state.sanitize {
                sanitize.done = sanitize.done.saturating_add(self.piece);
            }
        });
        Ok(Action::Pause(PAUSE))
    }

    fn on_resume(&mut self, _cx: &mut Context<'_>) -> TaskOutcome {
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

impl Drop for SanitizeDriver {
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
const AUSE: u8 = 1 << 5;
const INVERT: u8 = 1 << 7;
/// Bytes that one turn overwrites: with the pause, 128 MiB in a second.
const OVERWRITE_PIECE: u64 = 4 << 20;
/// Bytes that one turn erases.
const ERASE_PIECE: u64 = 64 << 20;
/// After each turn, for whoever else uses the storage below.
const PAUSE: Duration = Duration::from_millis(32);

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{Bench, Client, answer, command};
    use crate::scsi::{Lun, ScsiStatus, Step, TaskManagement};
    use blockmux_volume::{Completion, IoError, Op, Tag};

    const ERASE: [u8; 10] = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    const TUR: [u8; 6] = [0; 6];

    fn overwrite(
        client: &mut Client,
        flags: u8,
        length: u16,
        pattern: &[u8],
    ) -> crate::scsi::device::testing::Answer {
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
        assert_eq!(ends(&mut client), (vec![0xaa; 512], vec![0xaa; 512]), "whatever the number of passes");
        overwrite(&mut client, 0x83, 512, &[0xaa; 512]).good();
        assert_eq!(ends(&mut client), (vec![0xaa; 512], vec![0xaa; 512]));
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
        assert_eq!(answer(response).status, ScsiStatus::GOOD);
        b.run(&TUR).good();
        assert_eq!(ends(&mut b), (vec![7; 512], vec![7; 512]));
    }

    /// Begins an operation, and has its first I/O fail.
    fn fails(client: &mut Client, flags: u8) {
        let cdb = [0x48, 2 | flags, 0, 0, 0, 0, 0, 0, 0, 0];
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &cdb, 0));
        assert!(matches!(step, Step::Io { .. }));
        let done = Completion { tag: Tag(0), result: Err(IoError::Medium) };
        let Step::Done(response) = client.server.on_io(&mut task, done) else { panic!("it has failed") };
        assert_eq!(answer(response).check(), (3, 0x0c00));
    }

    #[test]
    fn one_that_has_failed_is_left_only_if_its_command_allowed_that() {
        const EXIT: [u8; 10] = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
        const AUSE: u8 = 0x20;
        let bench = Bench::new();
        let mut client = bench.client("a");
        fails(&mut client, AUSE);
        assert_eq!(client.run(&TUR).check(), (3, 0x3103));
        client.run(&EXIT).good();
        client.run(&TUR).good();
        fails(&mut client, 0);
        assert_eq!(client.run(&EXIT).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x48, 2 | AUSE, 0, 0, 0, 0, 0, 0, 0, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&TUR).check(), (3, 0x3103));
        client.run_waiting(&ERASE, &[]).good();
        client.run(&TUR).good();
        let (task, _step) = client.server.begin(&command(Lun::new(0), &ERASE, 0));
        assert_eq!(client.run(&EXIT).check(), (2, 0x041b), "it has not failed");
        drop(task);
    }

    #[test]
    fn it_waits_for_what_is_in_flight_and_what_was_admitted_before_never_begins() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let write = command(Lun::new(0), &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512);
        let (mut begun, step) = a.server.begin(&write);
        let io = a.turn(&mut begun, step, &[7; 512], &mut 0);
        assert!(matches!(io, Step::Io { .. }));
        let (mut admitted, wants_data) = a.server.begin(&write);
        let (mut erase, step) = b.server.begin(&command(Lun::new(0), &ERASE, 0));
        assert!(matches!(step, Step::Wait) && matches!(b.server.resume(&mut erase), Step::Wait));
        assert!(matches!(a.turn(&mut begun, io, &[], &mut 0), Step::Done(_)));
        let step = b.server.resume(&mut erase);
        assert!(matches!(step, Step::Io { .. }));
        let step = a.turn(&mut admitted, wants_data, &[7; 512], &mut 0);
        let Step::Done(response) = step else { panic!("{step:?}") };
        assert_eq!(answer(response).check(), (2, 0x041b));
    }

    #[test]
    fn the_last_it_does_is_to_make_all_of_it_stable() {
        let mut client = Bench::new().client("a");
        let (mut task, mut step) = client.server.begin(&command(Lun::new(0), &ERASE, 0));
        let mut ops = Vec::new();
        while !matches!(step, Step::Done(_)) {
            if let Step::Io { io, .. } = &step {
                ops.push(io.op);
            }
            step = client.turn(&mut task, step, &[], &mut 0);
        }
        assert!(ops.len() == 2 && ops[1] == Op::Flush, "{ops:?}");
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
