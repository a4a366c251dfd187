//! EXTENDED COPY (LID1) and RECEIVE COPY RESULTS (SPC-5): copies within the target.
//!
//! Source and destination are logical units of this target, identified by a designator of VPD page
//! 83h. The whole list is checked before the first copy; then data is read and written in pieces.
//! The nexus's access to both units is checked first and again for each piece, like that of
//! commands sent to these units.

use super::target::LunMapping;
use super::task::{CommandContext, HandlerAction, MultiStepCommand, PIECE, TaskFailure, TaskOutcome, answer};
use super::unit::LogicalUnit;
use super::units::AttachedUnit;
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use blockmux_volume::{MAX_TRANSFER, Op, Output};
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes, U16, U32};

/// MAXIMUM CSCD DESCRIPTOR COUNT.
pub(super) const MAX_CSCDS: u16 = 64;
/// MAXIMUM SEGMENT DESCRIPTOR COUNT.
pub(super) const MAX_SEGMENTS: u16 = 64;
/// MAXIMUM DESCRIPTOR LIST LENGTH, in bytes.
pub(super) const MAX_LIST: u32 = 64 * 32 + 64 * 28;
/// MAXIMUM CONCURRENT COPIES, per nexus and in total.
pub(super) const MAX_COPIES: u8 = 255;
/// DATA SEGMENT GRANULARITY, a power of two.
pub(super) const GRANULARITY: u8 = 9;
/// DESCRIPTOR TYPE CODEs, in ascending order.
pub(super) const IMPLEMENTED: [u8; 3] =
    [SEGMENT_BLOCK_TO_BLOCK, SEGMENT_OFFSET_TO_OFFSET, CSCD_IDENTIFICATION];

/// Result of a copy, retained until the next one with the same list identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyResult {
    list_identifier: u8,
    status: u8,
    segments: u16,
    bytes: u64,
}

pub(super) fn extended_copy(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let len = cx.command.cdb.u32(10) as usize;
    if len > MAX_PARAMETERS {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<ExtendedCopyHeader>(), begin_copy)
}

fn begin_copy(cx: &mut CommandContext<'_>, bytes: &[u8]) -> TaskOutcome {
    let too_long = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
    let (header, rest) = ExtendedCopyHeader::ref_from_prefix(bytes).map_err(|_| too_long)?;
    let cscd_len = u32::from(header.cscd_descriptor_list_length.get());
    let segment_len = header.segment_descriptor_list_length.get();
    if cscd_len.saturating_add(segment_len) > MAX_LIST || header.inline_data_length.get() != 0 {
        return Err(too_long.into());
    }
    let (cscds, rest) = rest.split_at_checked(cscd_len as usize).ok_or(too_long)?;
    let segments = rest.get(..segment_len as usize).ok_or(too_long)?;
    let retains_result = match header.flags & LIST_ID_USAGE {
        LIST_ID_HOLD | LIST_ID_DISCARD => true,
        LIST_ID_NONE if header.list_identifier == 0 => false,
        LIST_ID_NONE => return Err(Sense::in_parameters(0).into()),
        _ => return Err(Sense::in_parameters(1).into()),
    };
    let units = parse_cscds(cx, cscds)?;
    let segments_at = size_of::<ExtendedCopyHeader>().saturating_add(cscds.len());
    let segments = parse_segments(segments, &units, segments_at)?;
    check_access(cx, &units, &segments)?;
    let result =
        CopyResult { list_identifier: header.list_identifier, status: COPY_FAILED, segments: 0, bytes: 0 };
    let mut copy = ExtendedCopy { segments, at: 0, result, retains_result };
    let first = copy.read(cx);
    if !matches!(first, Ok(HandlerAction::Done(_))) {
        cx.work(copy);
    }
    first
}

/// A logical unit that is a copy source or destination.
struct CopyUnit {
    number: u16,
    volume: VolumeId,
    unit: Arc<LogicalUnit>,
    is_read_only: bool,
    block_len: u64,
    /// Size in bytes.
    size: u64,
}

fn parse_cscds(cx: &CommandContext<'_>, list: &[u8]) -> Result<Vec<CopyUnit>, Sense> {
    let (whole, _) = list.as_chunks::<32>();
    if whole.len() > MAX_CSCDS.into() {
        return Err(Sense::illegal(Asc::TOO_MANY_TARGET_DESCRIPTORS));
    }
    let mut units = Vec::with_capacity(whole.len());
    for bytes in whole {
        let cscd = IdentificationCscd::read_from_bytes(bytes).map_err(|_| TaskFailure::internal_sense())?;
        if cscd.descriptor_type != CSCD_IDENTIFICATION {
            return Err(Sense::illegal(Asc::UNSUPPORTED_TARGET_DESCRIPTOR_TYPE_CODE));
        }
        if cscd.device_type & PERIPHERAL_DEVICE_TYPE != 0 {
            return Err(aborted(Asc::INCORRECT_COPY_TARGET_DEVICE_TYPE));
        }
        let found = cx.target.find(|unit| is_named(unit, &cscd));
        let (number, mapping) = found.ok_or(aborted(Asc::COPY_TARGET_DEVICE_NOT_REACHABLE))?;
        let LunMapping { volume, unit, is_read_only } = mapping;
        let info = unit.info();
        let block_len = u64::from(info.logical_block.max(512));
        let size = info.size;
        units.push(CopyUnit { number, volume, unit, is_read_only, block_len, size });
    }
    Ok(units)
}

/// Whether the designator is one of the unit's in VPD page 83h.
fn is_named(unit: &LogicalUnit, cscd: &IdentificationCscd) -> bool {
    let Some(designator) = cscd.designator.get(..cscd.designator_length.into()) else { return false };
    let (kind, code_set) = (cscd.association_and_type & 0x3f, cscd.code_set & 0x0f);
    let own = unit.identity.designators.iter();
    let mut own = own.filter(|own| own.designator_type() == kind && own.code_set() == code_set);
    own.any(|own| own.bytes() == designator)
}

/// A segment in bytes; `from_unit` and `to_unit` are indexes of CSCD descriptors.
struct CopySegment {
    from: (VolumeId, u64),
    to: (VolumeId, u64),
    left: u64,
    to_unit: usize,
    from_unit: usize,
}

/// Parses segment descriptors; `at` is the offset of the list in the parameter list.
fn parse_segments(mut list: &[u8], units: &[CopyUnit], mut at: usize) -> Result<Vec<CopySegment>, Sense> {
    let mut segments = Vec::new();
    while let Some(&code) = list.first() {
        let (segment, rest) = match code {
            SEGMENT_BLOCK_TO_BLOCK => BlockSegment::ref_from_prefix(list)
                .ok()
                .map(|(segment, rest)| (block_segment(segment, units), rest)),
            SEGMENT_OFFSET_TO_OFFSET => OffsetSegment::ref_from_prefix(list)
                .ok()
                .map(|(segment, rest)| (offset_segment(segment, units), rest)),
            _ => return Err(Sense::illegal(Asc::UNSUPPORTED_SEGMENT_DESCRIPTOR_TYPE_CODE)),
        }
        .ok_or(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR))?;
        if segments.len() >= MAX_SEGMENTS.into() {
            return Err(Sense::illegal(Asc::TOO_MANY_SEGMENT_DESCRIPTORS));
        }
        let here = list.len().saturating_sub(rest.len());
        let length = list.get(2..4).and_then(|field| field.try_into().ok()).map_or(0, u16::from_be_bytes);
        if usize::from(length) != here.saturating_sub(4) {
            return Err(Sense::in_parameters(at.saturating_add(2) as u16));
        }
        segments.push(segment?);
        (list, at) = (rest, at.saturating_add(here));
    }
    Ok(segments)
}

fn block_segment(segment: &BlockSegment, units: &[CopyUnit]) -> Result<CopySegment, Sense> {
    let (from_unit, to_unit) = (segment.source.get().into(), segment.destination.get().into());
    let (from, to) = source_and_destination(units, from_unit, to_unit)?;
    let counted = if segment.flags & DC != 0 { to } else { from };
    let len = u64::from(segment.number_of_blocks.get()).saturating_mul(counted.block_len);
    Ok(CopySegment {
        from: place(from, segment.source_lba.get(), 0, len)?,
        to: place(to, segment.destination_lba.get(), 0, len)?,
        left: len,
        to_unit,
        from_unit,
    })
}

fn offset_segment(segment: &OffsetSegment, units: &[CopyUnit]) -> Result<CopySegment, Sense> {
    let (from_unit, to_unit) = (segment.source.get().into(), segment.destination.get().into());
    let (from, to) = source_and_destination(units, from_unit, to_unit)?;
    let len = u64::from(segment.number_of_bytes.get());
    if len > MAX_TRANSFER.into() {
        return Err(Sense::in_parameters(8));
    }
    Ok(CopySegment {
        from: place(from, segment.source_lba.get(), segment.source_offset.get(), len)?,
        to: place(to, segment.destination_lba.get(), segment.destination_offset.get(), len)?,
        left: len,
        to_unit,
        from_unit,
    })
}

/// SPC-5, the EXTENDED COPY command: an index without a CSCD descriptor is an unreachable device.
fn source_and_destination(
    units: &[CopyUnit],
    from: usize,
    to: usize,
) -> Result<(&CopyUnit, &CopyUnit), Sense> {
    units.get(from).zip(units.get(to)).ok_or(aborted(Asc::COPY_TARGET_DEVICE_NOT_REACHABLE))
}

/// Position of a segment in a volume, in bytes. Both sides copy whole blocks.
fn place(unit: &CopyUnit, lba: u64, offset: u16, len: u64) -> Result<(VolumeId, u64), Sense> {
    let start = lba.checked_mul(unit.block_len).and_then(|start| start.checked_add(offset.into()));
    let start = start.filter(|start| start.checked_add(len).is_some_and(|last| last <= unit.size));
    let start = start.ok_or(aborted(Asc::NO_ADDITIONAL_SENSE_INFORMATION))?;
    let is_whole = |bytes: u64| bytes.is_multiple_of(unit.block_len);
    if is_whole(start) && is_whole(len) { Ok((unit.volume, start)) } else { Err(Sense::in_parameters(8)) }
}

/// Checks the nexus's access to every source and destination, as for READ and WRITE commands. The
/// check is repeated for each piece.
fn check_access(
    cx: &CommandContext<'_>,
    units: &[CopyUnit],
    segments: &[CopySegment],
) -> Result<(), TaskFailure> {
    for segment in segments {
        let (from, to) = source_and_destination(units, segment.from_unit, segment.to_unit)?;
        for (unit, changes) in [(from, false), (to, true)] {
            let key = cx.unit.key.of_unit(unit.number);
            let (_, view) = unit.unit.view(key, cx.unit.nexus(), unit.is_read_only);
            view.check_blocks(changes)?;
        }
    }
    Ok(())
}

fn aborted(asc: Asc) -> Sense {
    Sense::new(SenseKey::COPY_ABORTED, asc)
}

/// Copies segment after segment, in pieces.
struct ExtendedCopy {
    segments: Vec<CopySegment>,
    at: usize,
    result: CopyResult,
    /// The copy has a list identifier, so its result is retained.
    retains_result: bool,
}

impl ExtendedCopy {
    fn read(&mut self, cx: &mut CommandContext<'_>) -> TaskOutcome {
        while let Some(segment) = self.segments.get(self.at) {
            if segment.left > 0 {
                let (volume, offset) = segment.from;
                return Ok(HandlerAction::IoOnVolume(
                    volume,
                    Op::Read,
                    offset,
                    segment.left.min(PIECE),
                    None,
                ));
            }
            self.at = self.at.saturating_add(1);
        }
        self.result.status = COPY_COMPLETED;
        self.end(cx);
        Ok(HandlerAction::good())
    }

    fn end(&mut self, cx: &mut CommandContext<'_>) {
        self.result.segments = self.at as u16;
        if self.retains_result {
            keep_result(&mut cx.unit.copies, self.result);
        }
    }
}

impl MultiStepCommand for ExtendedCopy {
    fn check(&self, unit: &AttachedUnit, op: Op) -> Result<(), TaskFailure> {
        unit.view.check_blocks(op.is_write())
    }

    fn on_io(&mut self, cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome {
        let Some(segment) = self.segments.get_mut(self.at) else { return Err(TaskFailure::internal()) };
        let here = segment.left.min(PIECE);
        match output {
            Output::Data(data) => {
                let (volume, offset) = segment.to;
                Ok(HandlerAction::IoOnVolume(volume, Op::Write { fua: false }, offset, here, Some(data)))
            }
            _ => {
                segment.left = segment.left.saturating_sub(here);
                segment.from.1 = segment.from.1.saturating_add(here);
                segment.to.1 = segment.to.1.saturating_add(here);
                self.result.bytes = self.result.bytes.saturating_add(here);
                self.read(cx)
            }
        }
    }

    fn on_error(&mut self, cx: &mut CommandContext<'_>) {
        self.end(cx);
    }
}

/// SPC-5, third-party copy commands: a reused list identifier replaces the old result; above the
/// limit the oldest result is dropped.
fn keep_result(copies: &mut Vec<CopyResult>, result: CopyResult) {
    copies.retain(|old| old.list_identifier != result.list_identifier);
    if copies.len() >= MAX_RESULTS {
        copies.remove(0);
    }
    copies.push(result);
}

pub(super) fn operating_parameters(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let mut data = OperatingParameters {
        maximum_cscd_count: U16::new(MAX_CSCDS),
        maximum_segment_count: U16::new(MAX_SEGMENTS),
        maximum_list_length: U32::new(MAX_LIST),
        maximum_segment_length: U32::new(MAX_TRANSFER),
        total_concurrent_copies: U16::new(MAX_COPIES.into()),
        maximum_concurrent_copies: MAX_COPIES,
        granularities: [GRANULARITY, 0, 0],
        implemented_list_length: IMPLEMENTED.len() as u8,
        ..OperatingParameters::new_zeroed()
    };
    let len = size_of::<OperatingParameters>().saturating_add(IMPLEMENTED.len()).saturating_sub(4);
    data.available_data = U32::new(len as u32);
    answer(&[data.as_bytes(), &IMPLEMENTED].concat(), cx.command.cdb.u32(10) as usize)
}

pub(super) fn copy_status(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let identifier = cx.command.cdb.byte(2);
    let found = cx.unit.copies.iter().find(|result| result.list_identifier == identifier);
    let result = found.ok_or(Sense::in_cdb(2))?;
    let kibibytes = u32::try_from(result.bytes >> 10).unwrap_or(u32::MAX);
    let data = CopyStatus {
        available_data: U32::new(8),
        status: result.status,
        segments_processed: U16::new(result.segments),
        transfer_count_units: 1,
        transfer_count: U32::new(kibibytes),
    };
    answer(data.as_bytes(), cx.command.cdb.u32(10) as usize)
}

/// LIST ID USAGE.
const LIST_ID_USAGE: u8 = 0b11 << 3;
const LIST_ID_HOLD: u8 = 0b00 << 3;
const LIST_ID_DISCARD: u8 = 0b10 << 3;
const LIST_ID_NONE: u8 = 0b11 << 3;
/// PERIPHERAL DEVICE TYPE in the second byte of a CSCD descriptor. LU ID TYPE and NUL are ignored,
/// because libiscsi's test suite expects that.
const PERIPHERAL_DEVICE_TYPE: u8 = 0x1f;
/// Maximum number of results per nexus.
const MAX_RESULTS: usize = 16;
/// Maximum length of the parameter list, in bytes; lists above [`MAX_LIST`] get another sense code.
const MAX_PARAMETERS: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use crate::exports::VolumeId;
    use crate::scsi::device::testing::{
        DeviceBench, TestNexus, TestResponse, answer, begin_io, command, port,
    };
    use crate::scsi::*;
    use blockmux_volume::{Completion, IoError, MemVolume, Output, Seg, Tag};
    use std::sync::Arc;

    /// The NAA designator of the unit with this name.
    fn naa(name: &str) -> Vec<u8> {
        UnitIdentity::of(name).designators[0].bytes().to_vec()
    }

    fn cscd() -> Vec<u8> {
        let mut cscd = vec![0xe4, 0, 0, 0, 1, 3, 0, 8];
        cscd.extend(naa("a"));
        cscd.resize(30, 0);
        cscd.extend([2, 0]);
        cscd
    }

    fn segment(source: u16, from: u64, to: u64, blocks: u16) -> Vec<u8> {
        let mut segment = vec![2, 0, 0, 0x18];
        segment.extend([source.to_be_bytes(), [0, 0], [0, 0], blocks.to_be_bytes()].concat());
        segment.extend([from.to_be_bytes(), to.to_be_bytes()].concat());
        segment
    }

    fn copy(client: &mut TestNexus, id: u8, cscds: &[u8], segments: &[u8]) -> TestResponse {
        let mut list = vec![id, 0];
        list.extend((cscds.len() as u16).to_be_bytes());
        list.extend([0; 4]);
        list.extend((segments.len() as u32).to_be_bytes());
        list.extend([0; 4]);
        list.extend([cscds, segments].concat());
        send(client, &list)
    }

    fn send(client: &mut TestNexus, list: &[u8]) -> TestResponse {
        let mut cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
        client.run_with(&cdb, list)
    }

    fn results(client: &mut TestNexus, action: u8, id: u8) -> TestResponse {
        client.run(&[0x84, action, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    }

    #[test]
    fn blocks_are_copied_and_receive_copy_results_reports_the_status() {
        let mut client = DeviceBench::new().client("a");
        let blocks: Vec<u8> = (0..4096 * 512).map(|i: u32| (i / 999) as u8).collect();
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0x10, 0, 0], &blocks).good();
        assert_eq!(results(&mut client, 0, 7).check(), (5, 0x2400));
        let mut segments = segment(0, 0, 8192, 4096);
        segments.extend([0x0a, 0, 0, 0x1c, 0, 0, 0, 0, 0, 0, 4, 0]);
        segments.extend([1_u64.to_be_bytes(), 16000_u64.to_be_bytes()].concat());
        segments.extend([0; 4]);
        copy(&mut client, 7, &cscd(), &segments).good();
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0x20, 0, 0, 0x10, 0, 0]).good(), blocks);
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0x3e, 0x80, 0, 0, 2, 0]).good(), blocks[512..1536]);
        let status = results(&mut client, 0, 7).good();
        assert_eq!(status, [0, 0, 0, 8, 1, 0, 2, 1, 0, 0, 8, 1]);
    }

    #[test]
    fn descriptors_are_read_to_the_last_field() {
        let mut client = DeviceBench::new().client("a");
        let good = (cscd(), segment(0, 0, 8, 1));
        copy(&mut client, 1, &good.0, &good.1).good();
        for (at, wrong, sense) in [(1, 1, (0xa, 0x0d03)), (4, 2, (0xa, 0x0d02))] {
            let mut cscd = good.0.clone();
            cscd[at] = wrong;
            assert_eq!(copy(&mut client, 1, &cscd, &good.1).check(), sense, "{at}");
        }
        let mut short = good.1.clone();
        short[3] = 0x17;
        assert_eq!(copy(&mut client, 1, &good.0, &short).check(), (5, 0x2600));
        let mut list = vec![2, 0x18, 0, 32, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
        list.extend([&good.0[..], &good.1].concat());
        assert_eq!(send(&mut client, &list).check(), (5, 0x2600), "a list identifier where none is allowed");
        list[0] = 0;
        send(&mut client, &list).good();
        assert_eq!(results(&mut client, 0, 0).check(), (5, 0x2400), "no result is retained");
        list[1] = 0x08;
        assert_eq!(send(&mut client, &list).check(), (5, 0x2600), "reserved");
    }

    /// A target with units `a` and `b`, and two sessions with it; a session that can eject the
    /// medium of `b`.
    fn two_units() -> (Arc<LogicalUnit>, DeviceServer, DeviceServer) {
        let removable = UnitIdentity { removable: true, ..UnitIdentity::of("b") };
        let units = [UnitIdentity::of("a"), removable]
            .map(|identity| LogicalUnit::new(identity, Arc::new(MemVolume::new(8 << 20))));
        let target = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1)]);
        let target = target.with_unit(0, VolumeId(0), units[0].clone());
        let target = Arc::new(target.with_unit(1, VolumeId(1), units[1].clone()));
        let [first, second] = ["i:a", "i:b"].map(|name| {
            let nexus = ItNexus::iscsi(name, [0, 0, 0, 0, 0, 1], port(1));
            let mut server = DeviceServer::new(target.clone(), nexus);
            (0..2).for_each(|lun| drop(server.begin(&command(Lun::new(lun), &[0; 6], 0))));
            server
        });
        let [_, unit] = units;
        (unit, first, second)
    }

    /// Makes `b` unavailable to a copy.
    type Take = fn(&LogicalUnit, &mut DeviceServer) -> Option<Task>;
    /// [`Take`], then the expected status and (sense key, ASC and ASCQ) of a copy.
    type Taken = (Take, ScsiStatus, Option<(u8, u16)>);

    fn begin(server: &mut DeviceServer, cdb: &[u8]) -> Option<Task> {
        Some(server.begin(&command(Lun::new(1), cdb, 0)).0)
    }

    #[test]
    fn a_copy_needs_access_to_its_source_and_to_its_destination() {
        let takes: [Taken; 4] = [
            (|_, other| begin(other, &[0x16, 0, 0, 0, 0, 0]), ScsiStatus::RESERVATION_CONFLICT, None),
            (|_, other| begin(other, &[0x1b, 0, 0, 0, 2, 0]), ScsiStatus::CHECK_CONDITION, Some((2, 0x3a00))),
            (
                |_, other| begin(other, &[0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0]),
                ScsiStatus::CHECK_CONDITION,
                Some((2, 0x041b)),
            ),
            (
                |unit, _| {
                    unit.set_access_state(1, AccessState::UNAVAILABLE);
                    None
                },
                ScsiStatus::CHECK_CONDITION,
                Some((2, 0x040c)),
            ),
        ];
        let other = [&cscd()[..8], &naa("b")[..], &cscd()[16..]].concat();
        let cscds = [cscd(), other].concat();
        for (take, status, sense) in takes {
            for [source, destination] in [[0, 1], [1, 0]] {
                let mut segment = segment(source, 0, 0, 1);
                segment[7] = destination as u8;
                let mut list = vec![1, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
                list.extend([&cscds[..], &segment].concat());
                let mut cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                cdb[13] = list.len() as u8;
                let copy = command(Lun::new(0), &cdb, list.len());
                let expect = |step: TaskStep| {
                    let TaskStep::Done(response) = step else { panic!("{step:?}") };
                    let response = answer(response);
                    assert_eq!((response.status, response.sense), (status, sense), "{source}");
                };
                let (unit, mut server, mut other) = two_units();
                let _taken = take(&unit, &mut other);
                let (mut task, _) = server.begin(&copy);
                let step = server.on_data_out(&mut task, Seg::from_slice(&list).into());
                expect(begin_io(&mut server, &mut task, step));
                // The unit becomes unavailable between two pieces of the copy.
                let (unit, mut server, mut other) = two_units();
                let (mut task, _) = server.begin(&copy);
                let step = server.on_data_out(&mut task, Seg::from_slice(&list).into());
                let step = begin_io(&mut server, &mut task, step);
                assert!(matches!(step, TaskStep::Io { .. }), "{step:?}");
                if destination == 1 {
                    let _taken = take(&unit, &mut other);
                    let read = Output::Data(Seg::from_slice(&[0; 512]).into());
                    let step = server.on_io(&mut task, Completion { tag: Tag(0), result: Ok(read) });
                    expect(begin_io(&mut server, &mut task, step));
                }
            }
        }
    }

    #[test]
    fn copy_limits_are_reported_and_enforced() {
        let mut client = DeviceBench::new().client("a");
        let limits = results(&mut client, 3, 0).good();
        assert_eq!((limits.len(), &limits[8..12]), (47, &[0, 64, 0, 64][..]));
        assert_eq!(limits[43..], [3, 2, 0x0a, 0xe4]);
        let one = segment(0, 0, 1, 1);
        assert_eq!(copy(&mut client, 0, &cscd().repeat(65), &one).check(), (5, 0x2606));
        assert_eq!(copy(&mut client, 0, &cscd(), &one.repeat(65)).check(), (5, 0x2608));
        assert_eq!(copy(&mut client, 0, &cscd().repeat(65), &one.repeat(65)).check(), (5, 0x1a00));
    }

    #[test]
    fn an_invalid_copy_is_rejected_without_effect() {
        let mut client = DeviceBench::new().client("a");
        let mut list = cscd();
        list[0] = 0xe0;
        assert_eq!(copy(&mut client, 0, &list, &segment(0, 0, 1, 1)).check(), (5, 0x2607));
        let mut unknown = segment(0, 0, 1, 1);
        unknown[0] = 3;
        assert_eq!(copy(&mut client, 0, &cscd(), &unknown).check(), (5, 0x2609));
        assert_eq!(copy(&mut client, 0, &cscd(), &segment(1, 0, 1, 1)).check(), (0xa, 0x0d02));
        assert_eq!(copy(&mut client, 0, &cscd(), &segment(0, 0, 16383, 2)).check(), (0xa, 0));
        list[0] = 0xe4;
        list[15] ^= 1;
        assert_eq!(copy(&mut client, 0, &list, &segment(0, 0, 1, 1)).check(), (0xa, 0x0d02));
        send(&mut client, &[]).good();
        assert_eq!(
            send(&mut client, &[0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0, 1]).check(),
            (5, 0x1a00)
        );
        assert_eq!(send(&mut client, &[0; 15]).check(), (5, 0x1a00));
    }

    #[test]
    fn a_failed_copy_reports_its_progress() {
        let mut client = DeviceBench::new().client("a");
        let list =
            [&[9, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0][..], &cscd(), &segment(0, 0, 1, 1)].concat();
        let cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0, 0];
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &cdb, list.len()));
        assert!(matches!(client.turn(&mut task, step, &list, &mut 0), TaskStep::Io { .. }));
        client.server.on_io(&mut task, Completion { tag: Tag(0), result: Err(IoError::Medium) });
        assert_eq!(results(&mut client, 0, 9).good()[4..7], [2, 0, 0]);
    }

    #[test]
    fn a_copy_respects_reservations() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let mut register = [0; 24];
        register[15] = 1;
        a.run_with(&[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &register).good();
        register.rotate_left(8);
        a.run_with(&[0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0], &register).good();
        assert_eq!(copy(&mut b, 0, &cscd(), &segment(0, 0, 1, 1)).status.0, 0x18);
        copy(&mut a, 0, &cscd(), &segment(0, 0, 1, 1)).good();
    }
}
