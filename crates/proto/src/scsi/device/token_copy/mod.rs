//! POPULATE TOKEN, WRITE USING TOKEN and RECEIVE ROD TOKEN INFORMATION (SBC-4, SPC-5): an initiator
//! obtains a token for blocks, and writes their data through the token, on this unit or another one
//! of the target.
//!
//! Each nexus keeps a record of every operation by list identifier: progress, result and token. A
//! copy is an ordinary command and ends with it. IMMED is ignored: the status follows the copy
//! (`docs/decisions/0047-write-uncorrectable-and-background-copies-were-removed.md`).

mod driver;

use super::ScsiStatus;
use super::task::{CommandContext, HandlerAction, MultiStepCommand, TaskFailure, TaskOutcome, answer};
use super::tokens::{DEFAULT_TIMEOUT, MAX_TIMEOUT, TokenBytes, TokenRanges, is_zero_token, new_token};
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::Watch;
use blockmux_volume::Output;
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::opcode::third_party_copy_out as out;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use driver::TokenCopyDriver;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes, U32, U64};

/// MAXIMUM RANGE DESCRIPTORS.
pub(super) const MAX_DESCRIPTORS: u16 = 256;
/// MAXIMUM BYTES IN BLOCK ROD: what one command can copy before initiators time out.
pub(super) const MAX_ROD: u64 = 16 << 30;
/// OPTIMAL BYTES IN BLOCK ROD TRANSFER.
pub(super) const OPTIMAL_ROD: u64 = 64 << 20;

/// Records of one nexus, oldest first. The task of a running copy shares its record.
pub(super) type TokenRecords = Vec<Rc<RefCell<TokenCopyRecord>>>;

/// Record of an operation, by list identifier.
pub(super) struct TokenCopyRecord {
    list_identifier: u32,
    /// RESPONSE TO SERVICE ACTION.
    action: u8,
    /// COPY OPERATION STATUS.
    status: u8,
    /// Number of bytes written or represented by the token.
    done: u64,
    sense: Option<Sense>,
    token: Option<Box<TokenBytes>>,
}

/// A checked WRITE USING TOKEN.
struct TokenCopyPlan {
    source: TokenSource,
    /// Start offset within the token's data, in bytes.
    offset: u64,
    /// Length of the token's data after `offset`, in bytes; beyond it zeroes are written.
    available: u64,
    /// Offset and length of the written ranges, in bytes.
    ranges: Vec<(u64, u64)>,
    /// Less than requested can be written.
    is_partial: bool,
    deletes: bool,
}

enum TokenSource {
    Zeroes,
    Token { unit: Arc<LogicalUnit>, volume: VolumeId, bytes: Box<TokenBytes>, ranges: TokenRanges },
}

/// Whether the operation has ended: no task shares the record.
fn is_over(record: &Rc<RefCell<TokenCopyRecord>>) -> bool {
    Rc::strong_count(record) == 1
}

pub(super) fn populate_token(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let len = cx.command.cdb.u32(10) as usize;
    if len > MAX_PARAMETERS {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<PopulateToken>(), |cx, bytes| {
        let too_short = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
        let (head, rest) = PopulateToken::ref_from_prefix(bytes).map_err(|_| too_short)?;
        // A header without its first field, and one descriptor.
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
        let ranges: TokenRanges = ranges.into();
        let watch = Some(Watch::new(&cx.unit.unit.volume_state, ranges.clone()));
        let mut populate = Populate { ranges, len, timeout, watch };
        let outcome = populate.on_resume(cx);
        if matches!(outcome, Ok(HandlerAction::Wait)) {
            cx.work(populate);
        }
        outcome
    })
}

/// Waits for changes of the blocks that started before the token's point in time.
struct Populate {
    ranges: TokenRanges,
    len: u64,
    timeout: u32,
    watch: Option<Watch>,
}

impl MultiStepCommand for Populate {
    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, cx: &mut CommandContext<'_>) -> TaskOutcome {
        let Some(watch) = self.watch.take_if(|watch| watch.has_begun()) else {
            return Ok(HandlerAction::Wait);
        };
        let unit = &cx.unit.unit;
        let bytes = new_token(unit, cx.unit.nexus(), cx.unit.view.block_len, self.len);
        if unit.tokens.add(bytes.clone(), self.ranges.clone(), self.timeout, watch).is_none() {
            let asc = Asc::INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN;
            return Err(Sense::new(SenseKey::COPY_ABORTED, asc).into());
        }
        let record = new_record(cx, out::POPULATE_TOKEN, COPY_COMPLETED);
        if let Err(failure) =
            add_record(cx, TokenCopyRecord { done: self.len, token: Some(bytes.clone()), ..record })
        {
            cx.unit.unit.tokens.delete(&bytes);
            return Err(failure);
        }
        if cx.unit.unit.tokens.needs_clock() {
            cx.unit.unit.notify_background();
        }
        Ok(HandlerAction::good())
    }
}

pub(super) fn write_using_token(cx: &mut CommandContext<'_>) -> TaskOutcome {
    cx.check_writable()?;
    let len = cx.command.cdb.u32(10) as usize;
    if len > MAX_PARAMETERS {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<WriteUsingToken>(), |cx, bytes| {
        let plan = parse_write(cx, bytes)?;
        check_identifier(cx)?;
        let record = add_record(cx, new_record(cx, out::WRITE_USING_TOKEN, COPY_IN_FOREGROUND))?;
        let mut driver = TokenCopyDriver::new(plan, record);
        let first = driver.next();
        if matches!(first, Ok(HandlerAction::Io(..) | HandlerAction::IoOnVolume(..))) {
            cx.work(driver);
        }
        first
    })
}

fn parse_write(cx: &CommandContext<'_>, bytes: &[u8]) -> Result<TokenCopyPlan, TaskFailure> {
    let too_short = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
    let (head, rest) = WriteUsingToken::ref_from_prefix(bytes).map_err(|_| too_short)?;
    let descriptors_length = head.descriptors_length.get();
    // A header without its first field, and one descriptor, with nothing after the descriptors.
    let data_length = head.data_length.get();
    if data_length < 550 || u32::from(data_length) != u32::from(descriptors_length).saturating_add(534) {
        return Err(Sense::in_parameters(0).into());
    }
    let mut ranges = parse_ranges(cx, rest, descriptors_length, 534)?;
    let requested = total(&ranges);
    let block_len = u64::from(cx.unit.view.block_len);
    let source = find_source(cx, &head.rod_token)?;
    let offset = head.offset_into_rod.get().checked_mul(block_len).ok_or(Sense::in_parameters(8))?;
    let available = match &source {
        TokenSource::Zeroes => requested,
        TokenSource::Token { ranges, .. } => match total(ranges).checked_sub(offset) {
            None | Some(0) => return Err(Sense::in_parameters(8).into()),
            Some(rest) => rest.min(requested),
        },
    };
    // SBC-4, the WRITE USING TOKEN command: whole blocks; the rest of the last one is zeroes.
    let len = available.checked_next_multiple_of(block_len).ok_or(Sense::in_parameters(8))?;
    truncate(&mut ranges, len);
    Ok(TokenCopyPlan {
        source,
        offset,
        available,
        ranges,
        is_partial: len < requested,
        deletes: head.flags & DEL_TKN != 0,
    })
}

/// Finds the unit that created the token, among those that this nexus can access.
fn find_source(cx: &CommandContext<'_>, token: &TokenBytes) -> Result<TokenSource, Sense> {
    if !matches!(token, [_, _, _, _, _, _, 0x01, 0xf8, ..]) {
        return Err(Sense::illegal(Asc::INVALID_TOKEN_LENGTH));
    }
    if is_zero_token(token) {
        return Ok(TokenSource::Zeroes);
    }
    let found = cx.target.units().find_map(|(_, volume, unit)| {
        let ranges = unit.tokens.find(token)?;
        Some((volume, unit, ranges))
    });
    match found {
        Some((volume, unit, Ok(ranges))) => {
            Ok(TokenSource::Token { unit, volume, bytes: Box::new(*token), ranges })
        }
        Some((_, _, Err(why))) => Err(Sense::illegal(why)),
        None if token.starts_with(&ROD_CHANGE_VULNERABLE.to_be_bytes()) => {
            Err(Sense::illegal(Asc::TOKEN_UNKNOWN))
        }
        None => Err(Sense::illegal(Asc::UNSUPPORTED_TOKEN_TYPE)),
    }
}

/// Parses a list of range descriptors without overlaps; `field` is the offset of its length field.
fn parse_ranges(
    cx: &CommandContext<'_>,
    list: &[u8],
    length: u16,
    field: u16,
) -> Result<Vec<(u64, u64)>, TaskFailure> {
    if length < 16 {
        return Err(Sense::in_parameters(field).into());
    }
    let list = list.get(..length.into()).unwrap_or(list);
    // SBC-4, the POPULATE TOKEN command: an incomplete descriptor at the end is ignored.
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

/// The record of this list identifier.
fn find_record<'a>(
    cx: &'a CommandContext<'_>,
    list_identifier: u32,
) -> Option<&'a Rc<RefCell<TokenCopyRecord>>> {
    cx.unit.token_records.iter().find(|record| record.borrow().list_identifier == list_identifier)
}

/// SPC-5, third-party copy commands: a list identifier in progress cannot be reused.
fn check_identifier(cx: &CommandContext<'_>) -> Result<(), TaskFailure> {
    match find_record(cx, cx.command.cdb.u32(6)) {
        Some(record) if !is_over(record) => Err(Sense::illegal(Asc::OPERATION_IN_PROGRESS).into()),
        _ => Ok(()),
    }
}

fn new_record(cx: &CommandContext<'_>, action: u16, status: u8) -> TokenCopyRecord {
    let list_identifier = cx.command.cdb.u32(6);
    TokenCopyRecord { list_identifier, action: action as u8, status, done: 0, sense: None, token: None }
}

/// Adds a record, replacing that with the same list identifier; above the limit, the oldest
/// finished one is dropped.
fn add_record(
    cx: &mut CommandContext<'_>,
    record: TokenCopyRecord,
) -> Result<Rc<RefCell<TokenCopyRecord>>, TaskFailure> {
    let records = &mut cx.unit.token_records;
    records.retain(|old| old.borrow().list_identifier != record.list_identifier);
    if records.len() >= MAX_RECORDS {
        let lacks_room = Sense::new(SenseKey::COPY_ABORTED, Asc::INSUFFICIENT_RESOURCES);
        records.remove(records.iter().position(is_over).ok_or(lacks_room)?);
    }
    let record = Rc::new(RefCell::new(record));
    records.push(record.clone());
    Ok(record)
}

pub(super) fn rod_token_information(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let list_identifier = cx.command.cdb.u32(2);
    let allocation_length = cx.command.cdb.u32(10) as usize;
    let record = find_record(cx, list_identifier).ok_or(Sense::in_cdb(2))?;
    let bytes = information(&record.borrow(), is_over(record), cx.unit.view.block_len.into());
    let has_token = record.borrow().token.is_some();
    // SPC-5, the RECEIVE ROD TOKEN INFORMATION command: a token is returned once, and discarded if
    // the allocation length is 0.
    if has_token && (allocation_length == 0 || allocation_length >= bytes.len()) {
        cx.unit.token_records.retain(|record| record.borrow().list_identifier != list_identifier);
    }
    answer(&bytes, allocation_length)
}

fn information(record: &TokenCopyRecord, is_over: bool, block_len: u64) -> Vec<u8> {
    let status = match record.status {
        COPY_IN_FOREGROUND if is_over => COPY_TERMINATED,
        status => status,
    };
    let mut sense = record.sense.map(|sense| sense.to_bytes().to_vec()).unwrap_or_default();
    let sense_length = sense.len() as u8;
    sense.resize(sense.len().next_multiple_of(4), 0);
    let completion = match status {
        COPY_TERMINATED => ScsiStatus::TASK_ABORTED,
        COPY_FAILED => ScsiStatus::CHECK_CONDITION,
        _ => ScsiStatus::GOOD,
    };
    let mut tokens = Vec::new();
    if let Some(token) = &record.token {
        tokens.extend([0, 0]);
        tokens.extend(token.iter());
    }
    let head = RodTokenInformation {
        service_action: record.action,
        status,
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

/// Maximum number of records per nexus.
const MAX_RECORDS: usize = 16;
/// ESTIMATED STATUS UPDATE DELAY of a running operation, in milliseconds.
const UPDATE_DELAY: u32 = 100;
/// Maximum length of the parameter list, in bytes.
const MAX_PARAMETERS: usize = 64 << 10;

#[cfg(test)]
mod tests;
