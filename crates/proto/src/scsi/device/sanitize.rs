//! SANITIZE (SBC-4): makes all previous data of the volume unrecoverable.
//!
//! The operation is complete when its writes are on stable storage. Meanwhile no other I/O is
//! admitted over any protocol ([`VolumeState`]): I/O in flight ends first, and admitted I/O that
//! has not started fails.
//!
//! The operation belongs to the logical unit, not to the command. After an abort, the loss of the
//! nexus or a reset, the registered callback ([`LogicalUnit::on_background`]) takes it over through
//! [`DeviceServer::poll_background`]. Until it ends the unit is not ready.
//!
//! An operation ends with the epoch of the session that has begun it: when the volume is lost to
//! another process, that one knows nothing of the operation, and may have data that must not be
//! erased.
//!
//! [`DeviceServer::poll_background`]: super::DeviceServer::poll_background

use super::task::{CommandContext, HandlerAction, MultiStepCommand, TaskFailure, TaskOutcome};
use super::unit::{FORMATTING, LogicalUnit, SANITIZING};
use super::units::AttachedUnit;
use crate::scsi::sense::{Sense, SenseKeySpecific};
use crate::volume_state::{Drain, Epoch, VolumeState};
use blockmux_volume::{Cost, Io, Op, Output, Seg, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use std::time::Duration;

/// Parameters of a SANITIZE or FORMAT UNIT command.
pub(super) struct SanitizeRequest {
    pub(super) command: EraseCommand,
    /// Overwrite pattern; `None` for a block erase.
    pub(super) pattern: Option<Arc<[u8]>>,
    /// The pattern is inverted between passes; the last pass writes it unchanged.
    pub(super) inverts: bool,
    pub(super) passes: u8,
}

/// The command that requested the operation, which its sense data names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EraseCommand {
    Sanitize,
    FormatUnit,
}

/// A sanitize operation of a logical unit.
pub(super) struct Sanitize {
    request: SanitizeRequest,
    /// The epoch of the session that has begun it, in which all of its I/O is admitted.
    pub(super) epoch: Epoch,
    /// Progress over all passes, in bytes.
    done: u64,
    /// Length of one pass, in bytes.
    size: u64,
    /// A task executes the operation.
    is_claimed: bool,
    has_failed: bool,
    /// AUSE: EXIT FAILURE MODE is permitted after a failure.
    allows_exit: bool,
}

/// Records a block erase: all blocks count as deallocated until the volume is written, zeroed or
/// discarded. The volume may not know, because a block device cannot report which blocks are
/// mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EraseRecord {
    /// Size in bytes.
    size: u64,
    /// Number of changing requests when it completed.
    changes: u64,
}

impl EraseRecord {
    /// Records a block erase of `size` bytes that has just completed.
    pub(super) fn now(volume_state: &VolumeState, size: u64) -> EraseRecord {
        let traffic = volume_state.traffic();
        EraseRecord { size, changes: traffic.writes.wrapping_add(traffic.cleared) }
    }

    /// Whether a unit of `size` bytes is unchanged since then.
    pub(super) fn holds(self, volume_state: &VolumeState, size: u64) -> bool {
        self == EraseRecord::now(volume_state, size)
    }
}

impl Sanitize {
    /// Sense data of the unit while the operation is not complete.
    pub(super) fn sense(&self) -> Sense {
        let (in_progress, failed) = match self.request.command {
            EraseCommand::Sanitize => (SANITIZING, Asc::SANITIZE_COMMAND_FAILED),
            EraseCommand::FormatUnit => (FORMATTING, Asc::MEDIUM_FORMAT_CORRUPTED),
        };
        if self.has_failed {
            return Sense::new(SenseKey::MEDIUM_ERROR, failed);
        }
        let total = self.size.saturating_mul(self.request.passes.into());
        let progress = (u128::from(self.done) << 16).checked_div(total.into()).unwrap_or(0);
        let progress = u16::try_from(progress).unwrap_or(u16::MAX);
        Sense { specific: Some(SenseKeySpecific::Progress(progress)), ..in_progress }
    }

    /// Whether no task executes the operation.
    pub(super) fn is_unclaimed(&self) -> bool {
        !self.is_claimed && !self.has_failed
    }

    /// The next request: offset, length in bytes, and number of passes that follow; `None` if all
    /// passes are written.
    fn next(&self) -> Option<(u64, u64, u64)> {
        let pass = self.done.checked_div(self.size)?;
        let at = self.done.checked_rem(self.size)?;
        let most = if self.request.pattern.is_some() { OVERWRITE_PIECE } else { ERASE_PIECE };
        let passes = u64::from(self.request.passes);
        (pass < passes).then(|| {
            let left = passes.saturating_sub(pass).saturating_sub(1);
            (at, self.size.saturating_sub(at).min(most), left)
        })
    }

    /// Data of the last pass and every second pass before it, and data of the other passes; `None`
    /// for a block erase.
    fn pieces(&self) -> Option<[SgList; 2]> {
        let block = self.request.pattern.as_deref()?;
        let copies = (OVERWRITE_PIECE as usize).checked_div(block.len())?.max(1);
        let plain = block.repeat(copies);
        let other: Vec<u8> =
            if self.request.inverts { plain.iter().map(|byte| !byte).collect() } else { plain.clone() };
        Some([plain, other].map(|bytes| SgList::one(Seg::from_slice(&bytes))))
    }
}

pub(super) fn block_erase(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    sanitize(cx, (None, false, 1))
}

pub(super) fn overwrite(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check(cx)?;
    let len = usize::from(cx.command.cdb.u16(7));
    let block_len = cx.unit.view.block_len as usize;
    // SBC-4, the SANITIZE command, OVERWRITE: 4 bytes, then a pattern of at most one block.
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
        sanitize(cx, (Some(block), flags & INVERT != 0, passes))
    })
}

/// EXIT FAILURE MODE: ends the state of a failed operation.
pub(super) fn exit_failure_mode(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check(cx)?;
    if cx.command.cdb.u16(7) != 0 {
        return Err(Sense::in_cdb(7).into());
    }
    let has_exited = cx.unit.unit.change(|state| match &state.sanitize {
        // No operation has failed.
        None => Ok(false),
        Some(sanitize) if sanitize.request.command == EraseCommand::FormatUnit => Err(sanitize.sense()),
        Some(sanitize) if !sanitize.has_failed => Err(sanitize.sense()),
        // SBC-4, the SANITIZE command: requires AUSE in the failed command.
        Some(sanitize) if !sanitize.allows_exit => Err(Sense::cdb_bit(1, 4)),
        Some(_) => {
            state.sanitize = None;
            Ok(true)
        }
    })?;
    if has_exited {
        cx.unit.unit.volume_state.open();
    }
    Ok(HandlerAction::good())
}

fn check(cx: &CommandContext<'_>) -> Result<(), TaskFailure> {
    check_bits(cx)?;
    cx.check_writable()
}

/// Rejects ZNR and non-zero reserved bytes.
fn check_bits(cx: &CommandContext<'_>) -> Result<(), Sense> {
    let cdb = &cx.command.cdb;
    if cdb.byte(1) & 0x40 != 0 {
        return Err(Sense::cdb_bit(1, 6));
    }
    match (2..7).find(|&at| cdb.byte(at) != 0) {
        Some(at) => Err(Sense::in_cdb(at as u16)),
        None => Ok(()),
    }
}

fn sanitize(
    cx: &mut CommandContext<'_>,
    (pattern, inverts, passes): (Option<Arc<[u8]>>, bool, u8),
) -> TaskOutcome {
    let flags = cx.command.cdb.byte(1);
    let request = SanitizeRequest { command: EraseCommand::Sanitize, pattern, inverts, passes };
    begin(cx, request, (flags & IMMED != 0, flags & AUSE != 0))
}

/// Begins an operation. The command answers before it ends if it `is_immediate`; `allows_exit` is
/// AUSE.
pub(super) fn begin(
    cx: &mut CommandContext<'_>,
    request: SanitizeRequest,
    (is_immediate, allows_exit): (bool, bool),
) -> TaskOutcome {
    let size = cx.unit.view.blocks.saturating_mul(cx.unit.view.block_len.into());
    // Before the unit's lock is taken. A concurrent second SANITIZE finds the operation of the
    // first.
    let epoch = cx.unit.epoch;
    let is_first = cx.unit.unit.volume_state.close(epoch)?;
    cx.unit.unit.change(|state| {
        if !state.is_served() {
            // It was lost since, which has opened it again.
            return Err(NOT_SERVED);
        }
        check_other(state.sanitize.as_ref(), is_first, (request.command, allows_exit))?;
        let (is_claimed, has_failed) = (false, false);
        state.sanitize =
            Some(Sanitize { request, epoch, done: 0, size, is_claimed, has_failed, allows_exit });
        Ok::<_, Sense>(())
    })?;
    if !is_immediate {
        return take_over(cx);
    }
    cx.unit.unit.notify_background();
    Ok(HandlerAction::good())
}

/// Checks that the unit's current or failed operation permits another one.
fn check_other(
    other: Option<&Sanitize>,
    is_first: bool,
    (command, allows_exit): (EraseCommand, bool),
) -> Result<(), Sense> {
    let Some(other) = other else { return if is_first { Ok(()) } else { Err(SANITIZING) } };
    if !other.has_failed {
        return Err(other.sense());
    }
    match (other.request.command, command) {
        // Each ends the state that a failed format leaves.
        (EraseCommand::FormatUnit, _) => Ok(()),
        // SBC-4, the SANITIZE command: only a SANITIZE ends the state that a failed one leaves.
        (EraseCommand::Sanitize, EraseCommand::FormatUnit) => Err(other.sense()),
        // AUSE: a second operation cannot permit EXIT FAILURE MODE if the failed one did not.
        (EraseCommand::Sanitize, EraseCommand::Sanitize) if allows_exit && !other.allows_exit => {
            Err(Sense::cdb_bit(1, 5))
        }
        (EraseCommand::Sanitize, EraseCommand::Sanitize) => Ok(()),
    }
}

/// Makes this task execute the operation if no other task does.
pub(super) fn take_over(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let claimed = cx.unit.unit.change(|state| match &mut state.sanitize {
        Some(sanitize) if sanitize.is_unclaimed() => {
            sanitize.is_claimed = true;
            Some((sanitize.epoch, sanitize.pieces()))
        }
        _ => None,
    });
    let Some((epoch, pieces)) = claimed else { return Ok(HandlerAction::good()) };
    cx.unit.enter(epoch);
    let drain = Some(Drain::new(&cx.unit.unit.volume_state));
    let unit = cx.unit.unit.clone();
    let mut work = SanitizeDriver { unit, epoch, drain, pieces, piece: 0, is_flushing: false };
    let first = work.next();
    if !matches!(first, Ok(HandlerAction::Done(_))) {
        cx.work(work);
    }
    first
}

/// Executes a sanitize operation. When dropped early, the operation waits for another task.
struct SanitizeDriver {
    unit: Arc<LogicalUnit>,
    /// [`Sanitize::epoch`] of the operation.
    epoch: Epoch,
    /// Waits for I/O that started before the operation.
    drain: Option<Drain>,
    /// Data of the last pass and every second pass before it, and of the other passes.
    pieces: Option<[SgList; 2]>,
    /// Length of the current write, in bytes.
    piece: u64,
    /// All passes are written; a flush is in flight.
    is_flushing: bool,
}

impl SanitizeDriver {
    /// Changes the operation, unless it has ended because the volume was lost.
    fn change<R>(&self, change: impl FnOnce(&mut Sanitize) -> R) -> Option<R> {
        let is_own = |sanitize: &&mut Sanitize| sanitize.epoch == self.epoch;
        self.unit.change(|state| state.sanitize.as_mut().filter(is_own).map(change))
    }

    fn next(&mut self) -> TaskOutcome {
        if self.drain.as_ref().is_some_and(|drain| !drain.is_over()) {
            return Ok(HandlerAction::Wait);
        }
        self.drain = None;
        let is_own = |sanitize: &&Sanitize| sanitize.epoch == self.epoch;
        let next = self.unit.read_state(|state| state.sanitize.as_ref().filter(is_own).map(Sanitize::next));
        let Some((at, len, left)) = next.ok_or(NOT_SERVED)? else {
            self.is_flushing = true;
            return Ok(HandlerAction::Io(Op::Flush, 0, 0, None));
        };
        self.piece = len;
        let Some([plain, other]) = &self.pieces else {
            let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
            return Ok(HandlerAction::Io(op, at, len, None));
        };
        let data = if left.is_multiple_of(2) { plain } else { other };
        Ok(HandlerAction::Io(Op::Write { fua: false }, at, len, Some(data.slice(0, len as usize))))
    }
}

impl MultiStepCommand for SanitizeDriver {
    fn cost(&mut self, _io: &Io) -> Option<Cost> {
        None
    }

    fn check(&self, _unit: &AttachedUnit, _op: Op) -> Result<(), TaskFailure> {
        Ok(())
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        if self.is_flushing {
            let epoch = self.epoch;
            let ended = self.unit.change(|state| {
                let ended = state.sanitize.take_if(|sanitize| sanitize.epoch == epoch)?;
                let erase = ended.request.pattern.is_none();
                // No other request has been admitted yet.
                state.erased = erase.then(|| EraseRecord::now(&self.unit.volume_state, ended.size));
                Some(())
            });
            ended.ok_or(NOT_SERVED)?;
            self.unit.volume_state.open();
            return Ok(HandlerAction::good());
        }
        self.change(|sanitize| sanitize.done = sanitize.done.saturating_add(self.piece));
        Ok(HandlerAction::Pause(STEP_PAUSE))
    }

    fn on_resume(&mut self, _cx: &mut CommandContext<'_>) -> TaskOutcome {
        self.next()
    }

    fn on_error(&mut self, _cx: &mut CommandContext<'_>) {
        self.change(|sanitize| sanitize.has_failed = true);
    }
}

impl Drop for SanitizeDriver {
    fn drop(&mut self) {
        let is_unclaimed = self.change(|sanitize| {
            sanitize.is_claimed = false;
            sanitize.is_unclaimed()
        });
        if is_unclaimed == Some(true) {
            self.unit.notify_background();
        }
    }
}

/// Another process serves the volume.
const NOT_SERVED: Sense = Sense::new(SenseKey::NOT_READY, Asc::TARGET_PORT_IN_STANDBY_STATE);
const IMMED: u8 = 1 << 7;
const AUSE: u8 = 1 << 5;
const INVERT: u8 = 1 << 7;
/// Bytes written per step: with the pause, 128 MiB per second.
const OVERWRITE_PIECE: u64 = 4 << 20;
/// Bytes erased per step.
const ERASE_PIECE: u64 = 64 << 20;
/// Pause after each step, for other users of the underlying storage.
const STEP_PAUSE: Duration = Duration::from_millis(32);

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, TestNexus, answer, command};
    use crate::scsi::device::unit::{LogicalUnit, UnitIdentity};
    use crate::scsi::{Lun, ScsiStatus, TaskManagement, TaskStep};
    use crate::volume_state::TestCluster;
    use blockmux_volume::{Completion, IoError, Op, Tag};

    const ERASE: [u8; 10] = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    const TUR: [u8; 6] = [0; 6];

    fn overwrite(
        client: &mut TestNexus,
        flags: u8,
        length: u16,
        pattern: &[u8],
    ) -> crate::scsi::device::testing::TestResponse {
        let list = [&[flags, 0][..], &length.to_be_bytes(), pattern].concat();
        let [high, low] = (list.len() as u16).to_be_bytes();
        client.run_waiting(&[0x48, 1, 0, 0, 0, 0, 0, high, low, 0], &list)
    }

    fn ends(client: &mut TestNexus) -> (Vec<u8>, Vec<u8>) {
        let first = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
        (first, client.run(&[0x28, 0, 0, 0, 0x3f, 0xff, 0, 0, 1, 0]).good())
    }

    #[test]
    fn everything_is_overwritten_with_the_pattern() {
        let mut client = DeviceBench::new().client("a");
        overwrite(&mut client, 1, 2, &[1, 2]).good();
        assert_eq!(ends(&mut client), ([1, 2].repeat(256), [1, 2].repeat(256)));
        overwrite(&mut client, 0x82, 512, &[0xaa; 512]).good();
        assert_eq!(ends(&mut client), (vec![0xaa; 512], vec![0xaa; 512]), "for any number of passes");
        overwrite(&mut client, 0x83, 512, &[0xaa; 512]).good();
        assert_eq!(ends(&mut client), (vec![0xaa; 512], vec![0xaa; 512]));
    }

    #[test]
    fn a_block_erase_leaves_zeroes() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]).good();
        client.run_waiting(&ERASE, &[]).good();
        assert_eq!(ends(&mut client), (vec![0; 512], vec![0; 512]));
    }

    #[test]
    fn wrong_parameters_are_refused() {
        let mut client = DeviceBench::new().client("a");
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
    fn a_sanitize_operation_outlives_its_command_and_session() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let list = [&[1, 0, 2, 0][..], &[7; 512]].concat();
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &[0x48, 1, 0, 0, 0, 0, 0, 2, 4, 0], 516));
        let step = a.turn(&mut task, step, &list, &mut 0);
        assert!(matches!(step, TaskStep::Io { .. }));
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
                TaskStep::Done(response) => break response,
                next => step = b.turn(&mut task, next, &[], &mut 0),
            }
        };
        assert_eq!(answer(response).status, ScsiStatus::GOOD);
        b.run(&TUR).good();
        assert_eq!(ends(&mut b), (vec![7; 512], vec![7; 512]));
    }

    /// Starts an operation and fails its first I/O.
    fn fails(client: &mut TestNexus, flags: u8) {
        let cdb = [0x48, 2 | flags, 0, 0, 0, 0, 0, 0, 0, 0];
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &cdb, 0));
        assert!(matches!(step, TaskStep::Io { .. }));
        let done = Completion { tag: Tag(0), result: Err(IoError::Medium) };
        let TaskStep::Done(response) = client.server.on_io(&mut task, done) else { panic!("it has failed") };
        assert_eq!(answer(response).check(), (3, 0x0c00));
    }

    #[test]
    fn exit_failure_mode_requires_ause_in_the_failed_command() {
        const EXIT: [u8; 10] = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
        const AUSE: u8 = 0x20;
        let bench = DeviceBench::new();
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
        assert_eq!(client.run(&EXIT).check(), (2, 0x041b), "no sanitize operation has failed");
        drop(task);
    }

    #[test]
    fn sanitize_waits_for_io_in_flight_and_blocks_admitted_io() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let write = command(Lun::new(0), &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512);
        let (mut begun, step) = a.server.begin(&write);
        let io = a.turn(&mut begun, step, &[7; 512], &mut 0);
        assert_eq!(a.admit(&mut begun, &io), Ok(()));
        let (mut admitted, wants_data) = a.server.begin(&write);
        let (mut erase, step) = b.server.begin(&command(Lun::new(0), &ERASE, 0));
        assert!(matches!(step, TaskStep::Wait) && matches!(b.server.resume(&mut erase), TaskStep::Wait));
        assert!(matches!(a.turn(&mut begun, io, &[], &mut 0), TaskStep::Done(_)));
        let step = b.server.resume(&mut erase);
        assert!(matches!(step, TaskStep::Io { .. }));
        let step = a.turn(&mut admitted, wants_data, &[7; 512], &mut 0);
        let step = a.turn(&mut admitted, step, &[], &mut 0);
        let TaskStep::Done(response) = step else { panic!("{step:?}") };
        assert_eq!(answer(response).check(), (2, 0x041b));
    }

    #[test]
    fn sanitize_ends_with_a_flush() {
        let mut client = DeviceBench::new().client("a");
        let (mut task, mut step) = client.server.begin(&command(Lun::new(0), &ERASE, 0));
        let mut ops = Vec::new();
        while !matches!(step, TaskStep::Done(_)) {
            if let TaskStep::Io { io, .. } = &step {
                ops.push(io.op);
            }
            step = client.turn(&mut task, step, &[], &mut 0);
        }
        assert!(ops.len() == 2 && ops[1] == Op::Flush, "{ops:?}");
    }

    #[test]
    fn immediate_sanitize_answers_before_it_ends() {
        let mut client = DeviceBench::new().client("a");
        client.run(&[0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let sense = client.run(&[3, 0, 0, 0, 18, 0]).good();
        assert_eq!((sense[2], &sense[12..16]), (2, &[4, 0x1b, 0, 0x80][..]));
        assert!(client.server.poll_background().is_some());
    }

    #[test]
    fn a_sanitize_operation_ends_with_a_volume_that_is_lost() {
        let cluster = TestCluster::default();
        let process = cluster.process();
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
        let bench = DeviceBench::around(unit, process.volume().clone());
        cluster.promote(&process);
        let (mut a, mut background) = (bench.client("a"), bench.client("background"));
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &ERASE, 0));
        assert!(matches!(step, TaskStep::Io { .. }));
        assert_eq!(a.admit(&mut task, &step), Ok(()));
        assert!(process.lose());
        assert!(!process.promote().unwrap().is_drained(), "its I/O is in flight");
        let step = a.turn(&mut task, step, &[], &mut 0);
        let TaskStep::Done(response) = a.turn(&mut task, step, &[], &mut 0) else { panic!("it ends") };
        assert_eq!(answer(response).check(), (2, 0x040b));
        drop(task);
        cluster.promote(&process);
        assert!(background.server.poll_background().is_none());
        let mut b = bench.client("b");
        b.run(&TUR).good();
        assert!(process.step_down().is_ok(), "no SANITIZE is in progress");
        // The next one is that of a session of the present epoch, also in the background.
        assert_eq!(b.run(&TUR).check(), (6, 0x2a06));
        b.run(&[0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let (mut task, mut step) = background.server.poll_background().unwrap();
        while !matches!(step, TaskStep::Done(_)) {
            step = background.turn(&mut task, step, &[], &mut 0);
        }
        b.run(&TUR).good();
    }

    #[test]
    fn no_sanitize_operation_begins_while_the_volume_steps_down() {
        let cluster = TestCluster::default();
        let process = cluster.process();
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
        let bench = DeviceBench::around(unit.clone(), process.volume().clone());
        cluster.promote(&process);
        let mut client = bench.client("a");
        let leaving = process.step_down().unwrap();
        assert_eq!(client.run(&TUR).check(), (6, 0x2a06));
        assert_eq!(client.run(&ERASE).check(), (2, 0x040a));
        assert!(leaving.is_drained() && unit.read_state(|state| state.sanitize.is_none()));
    }
}
