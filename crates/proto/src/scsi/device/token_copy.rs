//! POPULATE TOKEN, WRITE USING TOKEN, RECEIVE ROD TOKEN INFORMATION and COPY OPERATION ABORT (SBC-4,
//! SPC-5): an initiator asks for a token of some blocks, and has the data written wherever the token is
//! shown, on this unit or another one of the target.
//!
//! What a nexus has begun is kept by its list identifier, as long as the nexus lasts: how far a copy has come, how it has
//! ended, and the token that it made. A copy that is immediate goes on in the background like a sanitize operation. It
//! ends when its record goes: with the nexus, with a reset, or when it is told to.

mod clock;
mod driver;

pub(super) use clock::{TokenClock, count_seconds};
pub(super) use driver::carry_on;

use super::Status;
use super::task::{Action, Context, Failure, Outcome, Work, answer};
use super::tokens::{DEFAULT_TIMEOUT, MAX_TIMEOUT, Ranges, TokenBytes, is_zero_token, new_token};
use super::unit::{LogicalUnit, NexusKey};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::served::Watch;
use blockmux_volume::Output;
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::opcode::third_party_copy_out as out;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes, U32, U64};

/// MAXIMUM RANGE DESCRIPTORS.
pub(super) const MAX_DESCRIPTORS: u16 = 256;
/// MAXIMUM BYTES IN BLOCK ROD; a terabyte.
pub(super) const MAX_ROD: u64 = 1 << 40;
/// OPTIMAL BYTES IN BLOCK ROD TRANSFER.
pub(super) const OPTIMAL_ROD: u64 = 64 << 20;

/// What a nexus knows by a list identifier.
pub(super) struct Record {
    nexus: NexusKey,
    list_identifier: u32,
    /// RESPONSE TO SERVICE ACTION.
    action: u8,
    /// COPY OPERATION STATUS.
    status: u8,
    /// Bytes that were written, or that the token stands for.
    done: u64,
    sense: Option<Sense>,
    token: Option<Box<TokenBytes>>,
    /// A copy that is not over.
    job: Option<Job>,
}

struct Job {
    plan: Arc<Plan>,
    /// A task carries it on.
    is_driven: bool,
}

/// What is copied, as it was checked.
struct Plan {
    source: Source,
    /// From where on in what the token stands for, in bytes.
    offset: u64,
    /// How much there is of it; what is written beyond is zeroes.
    available: u64,
    /// Offset and length in bytes of what is written.
    ranges: Vec<(u64, u64)>,
    /// Less than was asked for.
    is_partial: bool,
    deletes: bool,
    in_background: bool,
}

enum Source {
    Zeroes,
    Token { unit: Arc<LogicalUnit>, volume: VolumeId, bytes: Box<TokenBytes>, ranges: Ranges },
}

impl Record {
    /// Whether a copy waits for someone to carry it on.
    pub(super) fn is_abandoned(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_driven)
    }

    pub(super) fn is_of(&self, nexus: NexusKey) -> bool {
        self.nexus == nexus
    }

    fn names(&self, nexus: NexusKey, list_identifier: u32) -> bool {
        self.nexus == nexus && self.list_identifier == list_identifier
    }

    /// Ends a copy that is not over.
    pub(super) fn terminate(&mut self) {
        if self.job.is_some() {
            self.end(COPY_TERMINATED, None);
        }
    }

    fn end(&mut self, status: u8, sense: Option<Sense>) {
        (self.status, self.sense, self.job) = (status, sense, None);
    }
}

pub(super) fn populate_token(cx: &mut Context<'_>) -> Outcome {
    let len = cx.command.cdb.u32(10) as usize;
    if len > MAX_PARAMETERS {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<PopulateToken>(), |cx, bytes| {
        let too_short = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
        let (head, rest) = PopulateToken::ref_from_prefix(bytes).map_err(|_| too_short)?;
        // A head without its first field, and a descriptor.
        if head.data_length.get() < 30 {
            return Err(Sense::in_parameters(0).into());
        }
        let timeout = match head.inactivity_timeout.get() {
            0 => DEFAULT_TIMEOUT,
            timeout if timeout <= MAX_TIMEOUT => timeout,
            _ => return Err(Sense::in_parameters(4).into()),
        };
        if head.flags & RTV != 0 && head.rod_type.get() != ROD_CHANGE_VULNERABLE {
            return Err(Sense::in_parameters(8).into());
        }
        let ranges = parse_ranges(cx, rest, head.descriptors_length.get(), 14)?;
        let len = total(&ranges);
        check_identifier(cx)?;
        let ranges: Ranges = ranges.into();
        let watch = Some(Watch::new(&cx.unit.unit.served, ranges.clone()));
        let mut populate = Populate { ranges, len, timeout, watch };
        let outcome = populate.on_resume(cx);
        if matches!(outcome, Ok(Action::Wait)) {
            cx.work(populate);
        }
        outcome
    })
}

/// Waits for what began to change the blocks before the token's point in time.
struct Populate {
    ranges: Ranges,
    len: u64,
    timeout: u32,
    watch: Option<Watch>,
}

impl Work for Populate {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> Outcome {
        Err(Failure::internal())
    }

    fn on_resume(&mut self, cx: &mut Context<'_>) -> Outcome {
        let Some(watch) = self.watch.take_if(|watch| watch.has_begun()) else { return Ok(Action::Wait) };
        let unit = &cx.unit.unit;
        let bytes = new_token(unit, cx.nexus, cx.unit.view.block_len, self.len);
        if unit.tokens.add(bytes.clone(), self.ranges.clone(), self.timeout, watch).is_none() {
            let asc = Asc::INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN;
            return Err(Sense::new(SenseKey::COPY_ABORTED, asc).into());
        }
        let record = new_record(cx, out::POPULATE_TOKEN, COPY_COMPLETED);
        if let Err(failure) = keep(cx, Record { done: self.len, token: Some(bytes.clone()), ..record }) {
            cx.unit.unit.tokens.delete(&bytes);
            return Err(failure);
        }
        // Somebody has to count its seconds.
        let begins = cx.unit.unit.change(|state| state.token_clock.begin());
        if begins {
            cx.unit.unit.call_background();
        }
        Ok(Action::good())
    }
}

pub(super) fn write_using_token(cx: &mut Context<'_>) -> Outcome {
    cx.check_writable()?;
    let len = cx.command.cdb.u32(10) as usize;
    if len > MAX_PARAMETERS {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<WriteUsingToken>(), |cx, bytes| {
        let plan = parse_write(cx, bytes)?;
        check_identifier(cx)?;
        let in_background = plan.in_background;
        let status = if in_background { COPY_IN_BACKGROUND } else { COPY_IN_FOREGROUND };
        let record = new_record(cx, out::WRITE_USING_TOKEN, status);
        let job = Some(Job { plan: Arc::new(plan), is_driven: false });
        keep(cx, Record { job, ..record })?;
        if in_background {
            cx.unit.unit.call_background();
            return Ok(Action::good());
        }
        let (nexus, list_identifier) = (cx.unit.key, cx.command.cdb.u32(6));
        carry_on(cx, |record| record.names(nexus, list_identifier))
    })
}

fn parse_write(cx: &Context<'_>, bytes: &[u8]) -> Result<Plan, Failure> {
    let too_short = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
    let (head, rest) = WriteUsingToken::ref_from_prefix(bytes).map_err(|_| too_short)?;
    let descriptors_length = head.descriptors_length.get();
    // A head without its first field, and a descriptor; and nothing behind the descriptors.
    let data_length = head.data_length.get();
    if data_length < 550 || u32::from(data_length) != u32::from(descriptors_length).saturating_add(534) {
        return Err(Sense::in_parameters(0).into());
    }
    let mut ranges = parse_ranges(cx, rest, descriptors_length, 534)?;
    let wanted = total(&ranges);
    let block_len = u64::from(cx.unit.view.block_len);
    let source = find_source(cx, &head.rod_token)?;
    let offset = head.offset_into_rod.get().checked_mul(block_len).ok_or(Sense::in_parameters(8))?;
    let available = match &source {
        Source::Zeroes => wanted,
        Source::Token { ranges, .. } => match total(ranges).checked_sub(offset) {
            None | Some(0) => return Err(Sense::in_parameters(8).into()),
            Some(rest) => rest.min(wanted),
        },
    };
    // SBC-4, the WRITE USING TOKEN command: whole blocks, the rest of the last one is zeroes.
    let len = available.checked_next_multiple_of(block_len).ok_or(Sense::in_parameters(8))?;
    truncate(&mut ranges, len);
    Ok(Plan {
        source,
        offset,
        available,
        ranges,
        is_partial: len < wanted,
        deletes: head.flags & DEL_TKN != 0,
        in_background: head.flags & IMMED != 0,
    })
}

/// Who has made the token: a unit that this nexus sees.
fn find_source(cx: &Context<'_>, token: &TokenBytes) -> Result<Source, Sense> {
    if !matches!(token, [_, _, _, _, _, _, 0x01, 0xf8, ..]) {
        return Err(Sense::illegal(Asc::INVALID_TOKEN_LENGTH));
    }
    if is_zero_token(token) {
        return Ok(Source::Zeroes);
    }
    let found = cx.target.units().find_map(|(_, volume, unit)| {
        let ranges = unit.tokens.find(token)?;
        Some((volume, unit, ranges))
    });
    match found {
        Some((volume, unit, Ok(ranges))) => {
            Ok(Source::Token { unit, volume, bytes: Box::new(*token), ranges })
        }
        Some((_, _, Err(why))) => Err(Sense::illegal(why)),
        None if token.starts_with(&ROD_CHANGE_VULNERABLE.to_be_bytes()) => {
            Err(Sense::illegal(Asc::TOKEN_UNKNOWN))
        }
        None => Err(Sense::illegal(Asc::UNSUPPORTED_TOKEN_TYPE)),
    }
}

/// The ranges of a list of descriptors, none twice; `field` is where its length was.
fn parse_ranges(cx: &Context<'_>, list: &[u8], length: u16, field: u16) -> Result<Vec<(u64, u64)>, Failure> {
    if length < 16 {
        return Err(Sense::in_parameters(field).into());
    }
    let list = list.get(..length.into()).unwrap_or(list);
    // SBC-4, the POPULATE TOKEN command: what is left of a descriptor that is not whole is ignored.
    let count = list.len().checked_div(size_of::<RangeDescriptor>()).unwrap_or(0);
    let (descriptors, _) = <[RangeDescriptor]>::ref_from_prefix_with_elems(list, count)
        .map_err(|_| Sense::in_parameters(field))?;
    if descriptors.len() > MAX_DESCRIPTORS.into() {
        return Err(Sense::illegal(Asc::TOO_MANY_SEGMENT_DESCRIPTORS).into());
    }
    let mut ranges = Vec::with_capacity(descriptors.len());
    for descriptor in descriptors {
        let lba = descriptor.logical_block_address.get();
        let range = cx.blocks(lba, descriptor.number_of_logical_blocks.get().into())?;
        if range.len > 0 {
            ranges.push((range.offset, range.len));
        }
    }
    let mut sorted = ranges.clone();
    sorted.sort_unstable();
    let mut pairs = sorted.iter().zip(sorted.iter().skip(1));
    let is_twice = pairs.any(|(one, next)| one.0.saturating_add(one.1) > next.0);
    if is_twice || total(&ranges) > MAX_ROD {
        return Err(Sense::in_parameters(field).into());
    }
    Ok(ranges)
}

fn total(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
}

fn truncate(ranges: &mut Vec<(u64, u64)>, mut len: u64) {
    for range in ranges.iter_mut() {
        range.1 = range.1.min(len);
        len = len.saturating_sub(range.1);
    }
    ranges.retain(|range| range.1 > 0);
}

/// SPC-5, third-party copy commands: what is in progress keeps its list identifier.
fn check_identifier(cx: &Context<'_>) -> Result<(), Failure> {
    let (key, list_identifier) = (cx.unit.key, cx.command.cdb.u32(6));
    let is_busy = cx.unit.unit.look(|state| {
        let mut records = state.copies.iter();
        records.any(|record| record.names(key, list_identifier) && record.job.is_some())
    });
    if is_busy { Err(Sense::illegal(Asc::OPERATION_IN_PROGRESS).into()) } else { Ok(()) }
}

fn new_record(cx: &Context<'_>, action: u16, status: u8) -> Record {
    Record {
        nexus: cx.unit.key,
        list_identifier: cx.command.cdb.u32(6),
        action: action as u8,
        status,
        done: 0,
        sense: None,
        token: None,
        job: None,
    }
}

/// Keeps a record in place of the one before; of too many, the oldest that is over goes.
fn keep(cx: &mut Context<'_>, record: Record) -> Result<(), Failure> {
    let key = record.nexus;
    cx.unit.unit.change(|state| {
        let records = &mut state.copies;
        records.retain(|old| !old.names(key, record.list_identifier));
        if records.iter().filter(|old| old.is_of(key)).count() >= MAX_RECORDS {
            let over = records.iter().position(|old| old.is_of(key) && old.job.is_none());
            let Some(over) = over else {
                return Err(Sense::new(SenseKey::COPY_ABORTED, Asc::INSUFFICIENT_RESOURCES));
            };
            records.remove(over);
        }
        records.push(record);
        Ok(())
    })?;
    Ok(())
}

pub(super) fn rod_token_information(cx: &mut Context<'_>) -> Outcome {
    let (key, list_identifier) = (cx.unit.key, cx.command.cdb.u32(2));
    let allocation_length = cx.command.cdb.u32(10) as usize;
    let block_len = u64::from(cx.unit.view.block_len);
    let found = cx.unit.unit.look(|state| {
        let record = state.copies.iter().find(|record| record.names(key, list_identifier))?;
        Some((information(record, block_len), record.token.is_some()))
    });
    let (bytes, has_token) = found.ok_or(Sense::in_cdb(2))?;
    // SPC-5, the RECEIVE ROD TOKEN INFORMATION command: a token is told once, or not at all to whoever has no room for
    // anything.
    if has_token && (allocation_length == 0 || allocation_length >= bytes.len()) {
        let unit = &cx.unit.unit;
        unit.change(|state| state.copies.retain(|record| !record.names(key, list_identifier)));
    }
    answer(&bytes, allocation_length)
}

fn information(record: &Record, block_len: u64) -> Vec<u8> {
    let is_over = record.job.is_none();
    let mut sense = record.sense.map(|sense| sense.to_bytes().to_vec()).unwrap_or_default();
    let sense_length = sense.len() as u8;
    sense.resize(sense.len().next_multiple_of(4), 0);
    let completion = match record.status {
        COPY_TERMINATED => Status::TASK_ABORTED,
        COPY_FAILED => Status::CHECK_CONDITION,
        _ => Status::GOOD,
    };
    let mut tokens = Vec::new();
    if let Some(token) = &record.token {
        tokens.extend([0, 0]);
        tokens.extend(token.iter());
    }
    let head = RodTokenInformation {
        service_action: record.action,
        status: record.status,
        update_delay: U32::new(if is_over { UPDATE_DELAY_OVER } else { UPDATE_DELAY }),
        completion_status: completion.0,
        sense_field_length: sense.len() as u8,
        sense_length,
        transfer_count_units: UNITS_BLOCKS,
        transfer_count: U64::new(record.done.checked_div(block_len).unwrap_or(0)),
        ..RodTokenInformation::new_zeroed()
    };
    let mut bytes = [head.as_bytes(), &sense, &(tokens.len() as u32).to_be_bytes(), &tokens].concat();
    let available = (bytes.len() as u32).saturating_sub(4).to_be_bytes();
    bytes.iter_mut().zip(available).for_each(|(place, byte)| *place = byte);
    bytes
}

/// Ends a copy of this nexus; what it has written stays.
pub(super) fn abort(cx: &mut Context<'_>) -> Outcome {
    let (key, list_identifier) = (cx.unit.key, cx.command.cdb.u32(2));
    let is_known = cx.unit.unit.change(|state| {
        let mut records = state.copies.iter_mut();
        let record = records.find(|record| record.names(key, list_identifier))?;
        if record.job.is_some() {
            record.end(COPY_TERMINATED, None);
        }
        Some(())
    });
    is_known.map(|()| Action::good()).ok_or_else(|| Sense::in_cdb(2).into())
}

/// The most records of one nexus.
const MAX_RECORDS: usize = 16;
/// ESTIMATED STATUS UPDATE DELAY of what is under way, in milliseconds.
const UPDATE_DELAY: u32 = 100;
/// The longest parameter list, in bytes.
const MAX_PARAMETERS: usize = 64 << 10;

#[cfg(test)]
mod tests;
