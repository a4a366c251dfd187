//! Parses SRP_CMD: the SCSI command and the location of its data.

use crate::driver::session::ProtocolError;
use crate::rdma::{Remote, Stag};
use crate::scsi::{Cdb, Command, Lun, Sense, TaskAttribute};
use blockmux_volume::Seg;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use blockmux_wire::srp::{
    BufferFormat, DirectDescriptor, ImmediateDescriptor, IndirectDescriptor, SrpCommand,
};
use smallvec::SmallVec;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned, transmute};

/// A command whose information unit passed all checks.
#[derive(Debug)]
pub(super) struct CheckedCommand {
    pub(super) tag: u64,
    pub(super) command: Command,
    pub(super) buffer: DataBuffer,
}

/// Location of a command's data-out or data-in.
#[derive(Debug, Default)]
pub(super) enum DataBuffer {
    /// The command has no data.
    #[default]
    None,
    /// The data is in these ranges of the initiator's memory, in this order.
    Remote(RemoteRanges),
    /// The data is in ranges of the initiator's memory. The table of the ranges is in the
    /// initiator's memory too, and has to be read first.
    Table(Remote),
    /// The data is in the information unit.
    Immediate(Seg),
}

/// Ranges of the initiator's memory. Most commands have one.
pub(super) type RemoteRanges = SmallVec<[Remote; 1]>;

/// Reason for which a command cannot be executed.
#[derive(Debug)]
pub(super) enum CommandError {
    /// A protocol violation, which ends the channel.
    Violation(ProtocolError),
    /// The command with this tag fails.
    Refused(u64, Lun, Sense),
}

impl From<ProtocolError> for CommandError {
    fn from(error: ProtocolError) -> CommandError {
        CommandError::Violation(error)
    }
}

impl CheckedCommand {
    /// Parses an information unit. `immediate_offset` is the offset of immediate data, if the login
    /// negotiated immediate data.
    ///
    /// # Errors
    /// If lengths do not match, or the command uses an unsupported feature.
    #[inline]
    pub(super) fn read(
        message: &Seg,
        immediate_offset: Option<usize>,
    ) -> Result<CheckedCommand, CommandError> {
        let mut unit = [0; size_of::<SrpCommand>()];
        if message.len() < unit.len() {
            return Err(TOO_SHORT.into());
        }
        message.slice(0, unit.len()).copy_to(&mut unit);
        let unit: SrpCommand = transmute!(unit);
        // Immediate data itself is not copied.
        let has_immediate = unit.buffer_formats().0 == BufferFormat::IMMEDIATE;
        let end = immediate_offset.filter(|end| has_immediate && *end < message.len());
        let rest_len = end.unwrap_or(message.len()).saturating_sub(size_of_val(&unit));
        let mut rest: SmallVec<[u8; 64]> = SmallVec::from_elem(0, rest_len);
        message.slice(size_of_val(&unit), rest_len).copy_to(&mut rest);
        let (more_cdb, rest) = rest.split_at_checked(unit.additional_cdb_len()).ok_or(TOO_SHORT)?;
        let (tag, lun) = (unit.tag.get(), Lun(u64::from_be_bytes(unit.lun)));
        let refuse = |asc| CommandError::Refused(tag, lun, Sense::new(SenseKey::ILLEGAL_REQUEST, asc));
        let (out_format, in_format) = unit.buffer_formats();
        if out_format != BufferFormat::NONE && in_format != BufferFormat::NONE {
            return Err(refuse(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT));
        }
        let is_write = out_format != BufferFormat::NONE;
        let (format, count) = match is_write {
            true => (out_format, unit.data_out_desc_cnt),
            false => (in_format, unit.data_in_desc_cnt),
        };
        let (buffer, len) = match format {
            BufferFormat::NONE => (DataBuffer::None, 0),
            BufferFormat::DIRECT => {
                let remote = remote(read(rest)?.0);
                (DataBuffer::Remote(SmallVec::from_elem(remote, 1)), remote.len)
            }
            BufferFormat::INDIRECT => indirect(rest, count.into())?,
            BufferFormat::IMMEDIATE if is_write => {
                let (descriptor, _): (ImmediateDescriptor, _) = read(rest)?;
                let (begin, len) = (immediate_offset.ok_or(NOT_AGREED)?, descriptor.len.get());
                let end = begin.checked_add(len as usize).filter(|end| *end <= message.len());
                end.ok_or(TOO_SHORT)?;
                (DataBuffer::Immediate(message.slice(begin, len as usize)), len)
            }
            _ => return Err(refuse(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT)),
        };
        let attribute = match unit.task_attr & ATTRIBUTE_MASK {
            0 => TaskAttribute::Simple,
            1 => TaskAttribute::HeadOfQueue,
            2 => TaskAttribute::Ordered,
            4 => TaskAttribute::Aca,
            _ => return Err(refuse(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT)),
        };
        let cdb = if more_cdb.is_empty() {
            Cdb::new(&unit.cdb)
        } else {
            Cdb::new(&[&unit.cdb[..], more_cdb].concat())
        };
        let cdb = cdb.ok_or_else(|| refuse(Asc::INVALID_FIELD_IN_CDB))?;
        let (data_out_len, data_in_len) = if is_write { (len, 0) } else { (0, len) };
        let command = Command { lun, cdb, attribute, data_out_len, data_in_len };
        Ok(CheckedCommand { tag, command, buffer })
    }
}

/// Parses an indirect descriptor that is followed by `count` entries of its table. Returns the
/// location of the buffer and its length in bytes.
fn indirect(bytes: &[u8], count: usize) -> Result<(DataBuffer, u32), ProtocolError> {
    let (descriptor, entries): (IndirectDescriptor, _) = read(bytes)?;
    let (table, len) = (remote(descriptor.table), descriptor.len.get());
    if !(table.len as usize).is_multiple_of(ENTRY_LEN) || table.len > MAX_TABLE_LEN {
        return Err(WRONG_TABLE);
    }
    let total = (table.len as usize).checked_div(ENTRY_LEN).unwrap_or(0);
    if count < total {
        return Ok((DataBuffer::Table(table), len));
    }
    let listed = entries.get(..table.len as usize).ok_or(TOO_SHORT)?;
    Ok((DataBuffer::Remote(ranges(listed, len)?), len))
}

/// Parses the ranges of a table; together they have to be as long as the buffer.
///
/// # Errors
/// If they are shorter.
pub(super) fn ranges(table: &[u8], len: u32) -> Result<RemoteRanges, ProtocolError> {
    let entries =
        table.chunks_exact(ENTRY_LEN).filter_map(|entry| DirectDescriptor::read_from_bytes(entry).ok());
    let ranges: RemoteRanges = entries.map(remote).filter(|range| range.len > 0).collect();
    let listed: u64 = ranges.iter().map(|range| u64::from(range.len)).sum();
    if listed < u64::from(len) { Err(WRONG_TABLE) } else { Ok(ranges) }
}

/// The parts of `ranges` that hold `len` bytes from `offset` on, in order.
pub(super) fn slices(ranges: &[Remote], offset: usize, len: usize) -> impl Iterator<Item = Remote> + '_ {
    let (mut skip, mut left) = (offset, len);
    ranges.iter().filter_map(move |range| {
        let skipped = skip.min(range.len as usize);
        skip = skip.saturating_sub(skipped);
        let part = (range.len as usize).saturating_sub(skipped).min(left);
        left = left.saturating_sub(part);
        let address = range.address.wrapping_add(skipped as u64);
        (part > 0).then_some(Remote { stag: range.stag, address, len: part as u32 }) // at most `range.len`
    })
}

fn remote(descriptor: DirectDescriptor) -> Remote {
    let DirectDescriptor { va, key, len } = descriptor;
    Remote { stag: Stag(key.get()), address: va.get(), len: len.get() }
}

/// Parses a descriptor; returns it and the bytes after it.
fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    bytes: &[u8],
) -> Result<(T, &[u8]), ProtocolError> {
    T::read_from_prefix(bytes).map_err(|_| TOO_SHORT)
}

const ENTRY_LEN: usize = size_of::<DirectDescriptor>();

/// The longest table, in bytes: 2,048 entries, as many as Linux uses at most.
const MAX_TABLE_LEN: u32 = 32 << 10;

/// The task attribute's bits.
const ATTRIBUTE_MASK: u8 = 0x07;

const TOO_SHORT: ProtocolError =
    ProtocolError { what: "sent a command that is shorter than its fields say", reference: "SRP r16a §6.8" };

const WRONG_TABLE: ProtocolError = ProtocolError {
    what: "sent a memory descriptor table whose lengths do not match",
    reference: "SRP r16a §5.4.2",
};

const NOT_AGREED: ProtocolError = ProtocolError {
    what: "sent immediate data, which its login did not ask for",
    reference: "SRP2, SRP_CMD",
};
