//! MODE SENSE and MODE SELECT with the pages Caching, Control and Informational Exceptions Control
//! (SPC-5).
//!
//! Two bits are changeable, D_SENSE and SWP of the Control page. All nexuses share them; they last
//! until a reset and cannot be saved. WCE reflects the volume and is not changeable.

use super::task::{CommandContext, HandlerAction, TaskOutcome, answer};
use super::view::NexusView;
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::mode::*;
use blockmux_wire::scsi::sense::Asc;
use smallvec::SmallVec;
use zerocopy::{FromBytes, FromZeros, IntoBytes, U16, U32, U64};

pub(super) fn sense_6(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let request = ModeSenseRequest::of(cx)?;
    let descriptor =
        if request.descriptors { short_descriptor(&cx.unit.view).as_bytes().to_vec() } else { Vec::new() };
    let pages = request.pages(&cx.unit.view)?;
    let length = descriptor.len().saturating_add(pages.len()).saturating_add(3);
    let header = ModeHeader6 {
        // SPC-5, MODE DATA LENGTH: longer data would be truncated; these pages are shorter.
        mode_data_length: length as u8,
        medium_type: 0,
        device_specific_parameter: device_specific(&cx.unit.view),
        block_descriptor_length: descriptor.len() as u8,
    };
    answer(&[header.as_bytes(), &descriptor, &pages].concat(), cx.command.cdb.byte(4).into())
}

pub(super) fn sense_10(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let request = ModeSenseRequest::of(cx)?;
    let is_long = cx.command.cdb.byte(1) & LLBAA != 0 && request.descriptors;
    let descriptor = match request.descriptors {
        false => Vec::new(),
        true if is_long => long_descriptor(&cx.unit.view).as_bytes().to_vec(),
        true => short_descriptor(&cx.unit.view).as_bytes().to_vec(),
    };
    let pages = request.pages(&cx.unit.view)?;
    let length = descriptor.len().saturating_add(pages.len()).saturating_add(6);
    let header = ModeHeader10 {
        mode_data_length: U16::new(length as u16),
        device_specific_parameter: device_specific(&cx.unit.view),
        long_lba: if is_long { LONGLBA } else { 0 },
        block_descriptor_length: U16::new(descriptor.len() as u16),
        ..FromZeros::new_zeroed()
    };
    answer(&[header.as_bytes(), &descriptor, &pages].concat(), cx.command.cdb.u16(7).into())
}

pub(super) fn select_6(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check_select(cx)?;
    let len = cx.command.cdb.byte(4).into();
    cx.parameters(len, size_of::<ModeHeader6>(), |cx, bytes| {
        let (header, _) = ModeHeader6::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let list =
            ModeParameterList { bytes, head: size_of::<ModeHeader6>(), length_field: 3, is_long: false };
        change(cx, &list, header.block_descriptor_length.into())
    })
}

pub(super) fn select_10(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check_select(cx)?;
    let len = cx.command.cdb.u16(7).into();
    cx.parameters(len, size_of::<ModeHeader10>(), |cx, bytes| {
        let (header, _) = ModeHeader10::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let is_long = header.long_lba & LONGLBA != 0;
        let list = ModeParameterList { bytes, head: size_of::<ModeHeader10>(), length_field: 6, is_long };
        change(cx, &list, header.block_descriptor_length.get().into())
    })
}

/// Requires standard pages (PF) and rejects saving (SP).
fn check_select(cx: &CommandContext<'_>) -> Result<(), Sense> {
    let flags = cx.command.cdb.byte(1);
    match (flags & PF != 0, flags & SP != 0) {
        (true, false) => Ok(()),
        (false, _) => Err(Sense::cdb_bit(1, 4)),
        (true, true) => Err(Sense::cdb_bit(1, 0)),
    }
}

/// A parameter list of MODE SELECT.
struct ModeParameterList<'a> {
    bytes: &'a [u8],
    /// Length of the header, in bytes.
    head: usize,
    /// Offset of BLOCK DESCRIPTOR LENGTH in the header.
    length_field: u16,
    /// LONGLBA.
    is_long: bool,
}

/// Applies all pages of a parameter list, or none.
fn change(cx: &mut CommandContext<'_>, list: &ModeParameterList<'_>, descriptor_len: usize) -> TaskOutcome {
    let too_short = Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR);
    let mut at = list.head.saturating_add(descriptor_len);
    check_descriptor(&cx.unit.view, list, list.bytes.get(list.head..at).ok_or(too_short)?)?;
    let mut control = None;
    while let [code, length, ..] = *list.bytes.get(at..).unwrap_or_default() {
        let end = at.saturating_add(usize::from(length)).saturating_add(2);
        let page = list.bytes.get(at..end).ok_or(too_short)?;
        if let Some(invalid) = first_invalid_byte(&cx.unit.view, page) {
            return Err(Sense::in_parameters(at.saturating_add(invalid) as u16).into());
        }
        if code & PAGE_ALL == PAGE_CONTROL {
            control = ControlPage::read_from_bytes(page).ok();
        }
        at = end;
    }
    if at != list.bytes.len() {
        return Err(too_short.into());
    }
    if let Some(control) = control {
        let key = cx.unit.key;
        cx.unit.unit.change(|state| {
            let new = (control.flags_2 & D_SENSE != 0, control.flags_4 & SWP != 0);
            if new != (state.descriptor_sense, state.write_protected) {
                (state.descriptor_sense, state.write_protected) = new;
                state.establish_attention_for_all(Some(key), Asc::MODE_PARAMETERS_CHANGED);
            }
        });
        cx.unit.refresh();
    }
    Ok(HandlerAction::good())
}

/// The first invalid byte of a page: unknown page, wrong length, or a change of an unchangeable
/// bit.
fn first_invalid_byte(view: &NexusView, page: &[u8]) -> Option<usize> {
    let &[code, ..] = page else { return Some(0) };
    let current = page_of(code & PAGE_ALL, PageControl::Current, view);
    let changeable = page_of(code & PAGE_ALL, PageControl::Changeable, view);
    let (Some(current), Some(changeable)) = (current, changeable) else { return Some(0) };
    if code & SPF != 0 {
        return Some(0);
    }
    if page.len() != current.len() {
        return Some(1);
    }
    let mut bytes = page.iter().zip(&current).zip(&changeable).enumerate().skip(2);
    bytes.find(|(_, ((new, old), mask))| (*new ^ *old) & !*mask != 0).map(|(at, _)| at)
}

/// Checks that a block descriptor matches the volume's geometry, which cannot be changed.
fn check_descriptor(view: &NexusView, list: &ModeParameterList<'_>, descriptor: &[u8]) -> Result<(), Sense> {
    let (block_len, field) = match (descriptor.len(), list.is_long) {
        (0, _) => return Ok(()),
        (8, false) => {
            let descriptor = ShortBlockDescriptor::read_from_bytes(descriptor);
            (descriptor.map_or(0, |descriptor| descriptor.logical_block_length.get() & 0x00ff_ffff), 5)
        }
        (16, true) => {
            let descriptor = LongBlockDescriptor::read_from_bytes(descriptor);
            (descriptor.map_or(0, |descriptor| descriptor.logical_block_length.get()), 12)
        }
        _ => return Err(Sense::in_parameters(list.length_field)),
    };
    let field = list.head.saturating_add(field) as u16;
    if block_len == view.block_len || block_len == 0 { Ok(()) } else { Err(Sense::in_parameters(field)) }
}

/// PAGE CONTROL.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageControl {
    Current,
    Changeable,
    Default,
}

/// Parameters of a MODE SENSE command.
struct ModeSenseRequest {
    control: PageControl,
    code: u8,
    /// Block descriptors are requested (DBD is 0).
    descriptors: bool,
}

impl ModeSenseRequest {
    fn of(cx: &CommandContext<'_>) -> Result<ModeSenseRequest, Sense> {
        let cdb = &cx.command.cdb;
        let control = match cdb.byte(2) >> 6 {
            0 => PageControl::Current,
            1 => PageControl::Changeable,
            2 => PageControl::Default,
            _ => return Err(Sense::illegal(Asc::SAVING_PARAMETERS_NOT_SUPPORTED)),
        };
        // Subpages are not supported.
        if !matches!(cdb.byte(3), 0 | SUBPAGE_ALL) {
            return Err(Sense::in_cdb(3));
        }
        Ok(ModeSenseRequest { control, code: cdb.byte(2) & PAGE_ALL, descriptors: cdb.byte(1) & DBD == 0 })
    }

    fn pages(&self, view: &NexusView) -> Result<Vec<u8>, Sense> {
        if self.code == PAGE_ALL {
            let all = PAGES.iter().filter_map(|&code| page_of(code, self.control, view));
            return Ok(all.flatten().collect());
        }
        page_of(self.code, self.control, view).map(|page| page.to_vec()).ok_or(Sense::cdb_bit(2, 5))
    }
}

/// A page's bytes; `None` if it does not exist.
fn page_of(code: u8, control: PageControl, view: &NexusView) -> Option<SmallVec<[u8; 20]>> {
    let is_changeable = control == PageControl::Changeable;
    let is_current = control == PageControl::Current;
    match code {
        PAGE_CACHING => {
            let mut page = CachingPage { page_code: code, page_length: 18, flags: 0, rest: [0; 17] };
            if !is_changeable && view.info.write_cache {
                page.flags = WCE;
            }
            Some(SmallVec::from_slice(page.as_bytes()))
        }
        PAGE_CONTROL => {
            let mut page = ControlPage { page_code: code, page_length: 10, ..ControlPage::new_zeroed() };
            if is_changeable || is_current && view.descriptor_sense {
                page.flags_2 |= D_SENSE;
            }
            if is_changeable || is_current && view.write_protected {
                page.flags_4 |= SWP;
            }
            if !is_changeable {
                page.flags_3 = UNRESTRICTED_REORDERING;
                page.flags_5 = TAS;
                page.busy_timeout_period = U16::new(u16::MAX);
            }
            Some(SmallVec::from_slice(page.as_bytes()))
        }
        PAGE_INFORMATIONAL_EXCEPTIONS => {
            let mut page = InformationalExceptionsPage {
                page_code: code,
                page_length: 10,
                ..InformationalExceptionsPage::new_zeroed()
            };
            if !is_changeable {
                page.flags = DEXCPT;
            }
            Some(SmallVec::from_slice(page.as_bytes()))
        }
        _ => None,
    }
}

fn device_specific(view: &NexusView) -> u8 {
    DPOFUA | if view.info.read_only || view.write_protected { WP } else { 0 }
}

fn short_descriptor(view: &NexusView) -> ShortBlockDescriptor {
    ShortBlockDescriptor {
        number_of_logical_blocks: U32::new(u32::try_from(view.blocks).unwrap_or(u32::MAX)),
        logical_block_length: U32::new(view.block_len & 0x00ff_ffff),
    }
}

fn long_descriptor(view: &NexusView) -> LongBlockDescriptor {
    LongBlockDescriptor {
        number_of_logical_blocks: U64::new(view.blocks),
        reserved: [0; 4],
        logical_block_length: U32::new(view.block_len),
    }
}

/// Ordered by page code.
const PAGES: [u8; 3] = [PAGE_CACHING, PAGE_CONTROL, PAGE_INFORMATIONAL_EXCEPTIONS];

/// MODE SENSE: disable block descriptors.
const DBD: u8 = 1 << 3;
/// MODE SENSE (10): long block descriptors are accepted.
const LLBAA: u8 = 1 << 4;
/// MODE SELECT: page format of the standard.
const PF: u8 = 1 << 4;
/// MODE SELECT: save pages.
const SP: u8 = 1 << 0;
/// Page code flag: the page has a subpage code.
const SPF: u8 = 1 << 6;

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, command, shaped};
    use crate::scsi::sense::SenseKeySpecific;
    use crate::scsi::{Lun, TaskStep};
    use blockmux_volume::VolumeInfo;

    const CONTROL: [u8; 6] = [0x1a, 8, 0x0a, 0, 255, 0];

    #[test]
    fn all_pages_come_after_a_block_descriptor() {
        let mut client = DeviceBench::new().client("a");
        let all = client.run(&[0x1a, 0, 0x3f, 0, 255, 0]).good();
        assert_eq!(all[..12], [55, 0, 0x10, 8, 0, 0, 0x40, 0, 0, 0, 2, 0]);
        assert_eq!(all.len(), 56);
        assert_eq!([all[12], all[32], all[44]], [8, 0x0a, 0x1c]);
        assert_eq!(client.run(&[0x1a, 0, 0x3f, 0, 4, 0]).good(), all[..4]);
        let long = client.run(&[0x5a, 0x10, 0x3f, 0xff, 0, 0, 0, 0, 255, 0]).good();
        assert_eq!(long[..8], [0, 66, 0, 0x10, 1, 0, 0, 16]);
        assert_eq!(long[24..], all[12..]);
    }

    #[test]
    fn wce_reports_the_write_cache_of_the_volume() {
        let wce = |write_cache| {
            let info = VolumeInfo { write_cache, ..VolumeInfo::new(1 << 20) };
            let bench = DeviceBench::over(shaped(info));
            bench.client("a").run(&[0x1a, 8, 8, 0, 255, 0]).good()[6]
        };
        assert_eq!((wce(false), wce(true)), (0, 4));
    }

    #[test]
    fn software_write_protect_stops_writes_of_every_nexus() {
        let bench = DeviceBench::new();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        let mut page = first.run(&CONTROL).good();
        assert_eq!(first.run(&[0x1a, 8, 0x4a, 0, 255, 0]).good()[4..10], [0x0a, 10, 4, 0, 8, 0]);
        page[0] = 0;
        page[8] |= 8;
        first.run_with(&[0x15, 0x10, 0, 0, 16, 0], &page).good();
        let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        assert_eq!(first.run_with(&write, &[1; 512]).check(), (7, 0x2702));
        assert_eq!(first.run(&CONTROL).good()[2..9], [0x90, 0, 0x0a, 10, 0, 0x10, 8]);
        assert_eq!(second.run_with(&write, &[1; 512]).check(), (6, 0x2a01));
        assert_eq!(second.run_with(&write, &[1; 512]).check(), (7, 0x2702));
        page[8] &= !8;
        first.run_with(&[0x15, 0x10, 0, 0, 16, 0], &page).good();
        first.run_with(&write, &[1; 512]).good();
    }

    #[test]
    fn d_sense_selects_the_format_of_sense_data() {
        let mut client = DeviceBench::new().client("a");
        let mut list = vec![0; 8];
        list.extend([0x0a, 10, 4, 0x10, 0, 0x40, 0, 0, 255, 255, 0, 0]);
        client.run_with(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 20, 0], &list).good();
        let (_, step) =
            client.server.begin(&crate::scsi::device::testing::command(crate::scsi::Lun::new(0), &[0xff], 0));
        let crate::scsi::TaskStep::Done(response) = step else { panic!("{step:?}") };
        assert_eq!(response.sense.unwrap().to_bytes()[0], 0x72);
    }

    #[test]
    fn the_sense_points_at_the_first_byte_that_is_wrong() {
        let mut client = DeviceBench::new().client("a");
        let control = [0x0a, 10, 0, 0x10, 0, 0x40, 0, 0, 255, 255, 0, 1];
        let caching = [&[8, 18, 1][..], &[0; 17]].concat();
        let descriptor = |block_len| [0, 0, 0, 0, 0, 0, block_len, 0];
        let with = |descriptor: &[u8], page: &[u8]| {
            [&[0, 0, 0, 0, 0, 0, 0, descriptor.len() as u8][..], descriptor, page].concat()
        };
        for (list, byte) in [
            (with(&[], &caching), 10),
            (with(&descriptor(2), &control), 27),
            (with(&[], &[&caching[..2], &[0; 18], &control].concat()), 8 + 20 + 11),
            (with(&descriptor(4), &control), 13),
            (with(&[0; 7], &control), 6),
            (with(&[], &[0x0a, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 9),
            (with(&[], &[0x01, 0]), 8),
        ] {
            let cdb = [0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
            let (mut task, step) = client.server.begin(&command(Lun::new(0), &cdb, list.len()));
            let TaskStep::Done(response) = client.turn(&mut task, step, &list, &mut 0) else {
                panic!("{list:x?}")
            };
            let specific = SenseKeySpecific::Field { in_cdb: false, byte, bit: None };
            assert_eq!(response.sense.and_then(|sense| sense.specific), Some(specific), "{list:x?}");
        }
    }

    #[test]
    fn unchangeable_mode_parameters_are_rejected() {
        let mut client = DeviceBench::new().client("a");
        let page = client.run(&CONTROL).good();
        let select = |flags| [0x15, flags, 0, 0, 16, 0];
        for (at, invalid) in [(7, 0), (4, 0x4a), (5, 9), (3, 8)] {
            let mut page = page.clone();
            page[at] = invalid;
            assert_eq!(client.run_with(&select(0x10), &page).status.0, 2, "byte {at}");
        }
        assert_eq!(client.run_with(&select(0x11), &page).check(), (5, 0x2400));
        assert_eq!(client.run_with(&select(0), &page).check(), (5, 0x2400));
        assert_eq!(client.run_with(&[0x15, 0x10, 0, 0, 3, 0], &page).check(), (5, 0x1a00));
        assert_eq!(client.run(&[0x1a, 0, 0xca, 0, 255, 0]).check(), (5, 0x3900));
        assert_eq!(client.run(&[0x1a, 0, 0x01, 0, 255, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x1a, 0, 0x0a, 1, 255, 0]).check(), (5, 0x2400));
    }
}
