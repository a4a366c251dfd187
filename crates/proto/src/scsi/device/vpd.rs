//! Vital product data (SPC-5, SBC-4).

use super::compare::MAX_COMPARE_BLOCKS;
use super::extended_copy::{GRANULARITY, IMPLEMENTED, MAX_COPIES, MAX_CSCDS, MAX_LIST, MAX_SEGMENTS};
use super::nexus::ItNexus;
use super::provisioning::MAX_UNMAP_DESCRIPTORS;
use super::table::of_opcode;
use super::task::CommandContext;
use super::token_copy::{MAX_DESCRIPTORS, MAX_ROD, OPTIMAL_ROD};
use super::tokens::{DEFAULT_TIMEOUT, MAX_TIMEOUT};
use super::unit::UnitIdentity;
use super::view::NexusView;
use blockmux_volume::MAX_TRANSFER;
use blockmux_wire::scsi::copy::{
    ROD_CHANGE_VULNERABLE, ROD_ZERO, RodTokenFeatures, RodTokenLimits, RodTypeDescriptor, TOKEN_IN, TOKEN_OUT,
};
use blockmux_wire::scsi::opcode::ScsiOpcode;
use blockmux_wire::scsi::vpd::*;
use zerocopy::{FromZeros, IntoBytes, U16, U32, U64};

/// A complete page with its header; `None` if it does not exist.
pub(super) fn page(cx: &CommandContext<'_>, page_code: u8) -> Option<Vec<u8>> {
    let view = &cx.unit.view;
    let body = match page_code {
        PAGE_SUPPORTED => PAGES.to_vec(),
        PAGE_SERIAL => cx.unit.unit.identity.serial.as_bytes().to_vec(),
        PAGE_IDENTIFICATION => designators(&cx.unit.unit.identity, &cx.target.name, cx.unit.nexus()),
        PAGE_EXTENDED_INQUIRY => extended_inquiry(view).as_bytes().to_vec(),
        PAGE_THIRD_PARTY_COPY => third_party_copy(view),
        PAGE_BLOCK_LIMITS => block_limits(view).as_bytes().to_vec(),
        PAGE_CHARACTERISTICS => characteristics(view).as_bytes().to_vec(),
        PAGE_PROVISIONING => provisioning(view).as_bytes().to_vec(),
        _ => return None,
    };
    let header = VpdHeader { peripheral: 0, page_code, page_length: U16::new(body.len() as u16) };
    Some([header.as_bytes(), &body].concat())
}

/// Designators of the unit, the port and the target (SPC-5).
fn designators(identity: &UnitIdentity, target: &str, nexus: &ItNexus) -> Vec<u8> {
    let port = &nexus.target_port;
    let protocol = nexus.protocol();
    let mut bytes = Vec::new();
    let mut add = |code_set: u8, kind: u8, designator: &[u8]| {
        let is_unit = kind & 0x30 == ASSOCIATION_UNIT;
        let header = DesignatorHeader {
            protocol_and_code_set: code_set | if is_unit { 0 } else { protocol << 4 },
            association_and_type: kind | if is_unit { 0 } else { PIV },
            reserved: 0,
            designator_length: designator.len() as u8,
        };
        bytes.extend(header.as_bytes());
        bytes.extend(designator);
    };
    for own in &identity.designators {
        add(own.code_set(), ASSOCIATION_UNIT | own.designator_type(), own.bytes());
    }
    let relative = u32::from(port.relative_id).to_be_bytes();
    add(CODE_SET_BINARY, ASSOCIATION_PORT | DESIGNATOR_RELATIVE_PORT, &relative);
    let group = u32::from(port.group).to_be_bytes();
    add(CODE_SET_BINARY, ASSOCIATION_PORT | DESIGNATOR_PORT_GROUP, &group);
    add(CODE_SET_UTF8, ASSOCIATION_PORT | DESIGNATOR_NAME, &name_string(&port.name));
    add(CODE_SET_UTF8, ASSOCIATION_DEVICE | DESIGNATOR_NAME, &name_string(target));
    bytes
}

/// A SCSI name string designator (SPC-5): NUL-terminated and padded to 4 bytes. iSCSI names have at
/// most 223 bytes.
fn name_string(name: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = name.bytes().take(MAX_NAME).collect();
    bytes.resize(bytes.len().saturating_add(1).next_multiple_of(4), 0);
    bytes
}

fn extended_inquiry(view: &NexusView) -> ExtendedInquiry {
    ExtendedInquiry {
        task_attributes: SIMPSUP,
        caches: if view.info.write_cache { V_SUP } else { 0 },
        flags_7: LUICLR,
        ..ExtendedInquiry::new_zeroed()
    }
}

/// The Third-party Copy VPD page (SPC-5): commands, parameter list limits and supported
/// descriptors.
fn third_party_copy(view: &NexusView) -> Vec<u8> {
    let commands = |opcode: ScsiOpcode| {
        let actions: Vec<u8> =
            of_opcode(opcode).filter_map(|entry| entry.service_action).map(|sa| sa as u8).collect();
        [&[opcode.0, actions.len() as u8][..], &actions].concat()
    };
    let commands =
        [commands(ScsiOpcode::THIRD_PARTY_COPY_OUT), commands(ScsiOpcode::THIRD_PARTY_COPY_IN)].concat();
    let mut parameters = vec![0; 28];
    let limits =
        [&MAX_CSCDS.to_be_bytes()[..], &MAX_SEGMENTS.to_be_bytes(), &MAX_LIST.to_be_bytes()].concat();
    for (place, byte) in parameters.iter_mut().skip(4).zip(limits) {
        *place = byte;
    }
    let mut bytes = Vec::new();
    let mut add = |kind: u16, mut body: Vec<u8>| {
        body.resize(body.len().next_multiple_of(4), 0);
        bytes.extend(kind.to_be_bytes());
        bytes.extend((body.len() as u16).to_be_bytes());
        bytes.extend(body);
    };
    add(BLOCK_ROD_TOKEN_LIMITS, rod_token_limits(view).as_bytes().to_vec());
    // The list is preceded by its length and padded to 4 bytes.
    add(SUPPORTED_COMMANDS, [&[commands.len() as u8][..], &commands].concat());
    add(PARAMETER_DATA, parameters);
    add(SUPPORTED_DESCRIPTORS, [&[IMPLEMENTED.len() as u8][..], &IMPLEMENTED].concat());
    add(ROD_TOKEN_FEATURES, rod_token_features(view).as_bytes().to_vec());
    let types = [(ROD_CHANGE_VULNERABLE, TOKEN_IN | TOKEN_OUT), (ROD_ZERO, TOKEN_IN)];
    let types = types.map(|(rod_type, flags)| RodTypeDescriptor {
        rod_type: U32::new(rod_type),
        flags,
        ..RodTypeDescriptor::new_zeroed()
    });
    let length = (size_of_val(&types) as u16).to_be_bytes();
    add(SUPPORTED_ROD_TYPES, [&[0, 0][..], &length, types.as_bytes()].concat());
    // Values of RECEIVE COPY OPERATING PARAMETERS; no inline data.
    let copies = u32::from(MAX_COPIES).to_be_bytes();
    let mut general = [copies, copies, MAX_TRANSFER.to_be_bytes(), [GRANULARITY, 0, 0, 0]].concat();
    general.resize(32, 0);
    add(GENERAL_COPY_OPERATIONS, general);
    bytes
}

fn rod_token_limits(view: &NexusView) -> RodTokenLimits {
    let blocks = |bytes: u64| bytes.checked_div(view.block_len.into()).unwrap_or(0);
    RodTokenLimits {
        vendor_specific: [0; 6],
        maximum_range_descriptors: U16::new(MAX_DESCRIPTORS),
        maximum_inactivity_timeout: U32::new(MAX_TIMEOUT),
        default_inactivity_timeout: U32::new(DEFAULT_TIMEOUT),
        maximum_token_transfer_size: U64::new(blocks(MAX_ROD)),
        optimal_transfer_count: U64::new(blocks(OPTIMAL_ROD)),
    }
}

fn rod_token_features(view: &NexusView) -> RodTokenFeatures {
    let granularity = view.info.preferred_block.checked_div(view.block_len).unwrap_or(1).max(1);
    RodTokenFeatures {
        maximum_token_lifetime: U32::new(u32::MAX),
        maximum_token_inactivity_timeout: U32::new(MAX_TIMEOUT),
        descriptors_length: U16::new(48),
        descriptor_length: U16::new(44),
        optimal_granularity: U16::new(granularity as u16),
        maximum_bytes: U64::new(MAX_ROD),
        optimal_bytes: U64::new(OPTIMAL_ROD),
        optimal_bytes_to_token: U64::new(MAX_ROD),
        optimal_bytes_from_token: U64::new(OPTIMAL_ROD),
        ..RodTokenFeatures::new_zeroed()
    }
}

fn block_limits(view: &NexusView) -> BlockLimits {
    let blocks = |bytes: u32| bytes.checked_div(view.block_len).unwrap_or(0);
    let mut limits = BlockLimits {
        flags: WSNZ,
        maximum_compare_and_write_length: MAX_COMPARE_BLOCKS,
        optimal_transfer_length_granularity: U16::new(blocks(view.info.preferred_block).max(1) as u16),
        maximum_transfer_length: U32::new(view.max_transfer_blocks()),
        optimal_transfer_length: U32::new(blocks(OPTIMAL_TRANSFER)),
        maximum_atomic_transfer_length: U32::new(view.max_atomic_blocks()),
        ..BlockLimits::new_zeroed()
    };
    if view.is_thin() {
        limits.maximum_unmap_lba_count = U32::new(u32::MAX);
        limits.maximum_unmap_block_descriptor_count = U32::new(MAX_UNMAP_DESCRIPTORS);
        limits.optimal_unmap_granularity = U32::new(blocks(view.info.discard_granularity).max(1));
        limits.unmap_granularity_alignment = U32::new(UGAVALID);
    }
    limits
}

fn characteristics(view: &NexusView) -> BlockDeviceCharacteristics {
    let rate = if view.info.rotational { ROTATION_NOT_REPORTED } else { ROTATION_NONE };
    BlockDeviceCharacteristics {
        medium_rotation_rate: U16::new(rate),
        reads_after_erase: WABEREQ_READS,
        ..BlockDeviceCharacteristics::new_zeroed()
    }
}

fn provisioning(view: &NexusView) -> LogicalBlockProvisioning {
    let zeroes = if view.unmaps_to_zeroes() { LBPRZ_ZEROES } else { 0 };
    let thin = view.is_thin();
    LogicalBlockProvisioning {
        flags: if thin { LBPU | LBPWS | LBPWS10 | ANC_SUP | zeroes } else { 0 },
        provisioning_type: if thin { PROVISIONING_THIN } else { PROVISIONING_FULL },
        ..LogicalBlockProvisioning::new_zeroed()
    }
}

/// Ordered by page code, as SPC-5 requires.
const PAGES: [u8; 8] = [
    PAGE_SUPPORTED,
    PAGE_SERIAL,
    PAGE_IDENTIFICATION,
    PAGE_EXTENDED_INQUIRY,
    PAGE_THIRD_PARTY_COPY,
    PAGE_BLOCK_LIMITS,
    PAGE_CHARACTERISTICS,
    PAGE_PROVISIONING,
];
/// OPTIMAL TRANSFER LENGTH, in bytes; larger requests gain little.
const OPTIMAL_TRANSFER: u32 = 1 << 20;
/// Maximum length of a name, in bytes.
const MAX_NAME: usize = 250;

#[cfg(test)]
mod tests {
    use crate::names::unit_identity::{GivenUnitIdentity, UnitDesignator, UnitSerial, inquiry_field};
    use crate::names::volume_uuid::VolumeUuid;
    use crate::scsi::device::testing::{DeviceBench, shaped};
    use crate::scsi::{LogicalUnit, UnitIdentity};
    use blockmux_volume::{MemVolume, VolumeInfo};
    use std::sync::Arc;

    #[test]
    fn the_page_of_third_party_copies_has_each_descriptor_whole() {
        let page = DeviceBench::new().client("a").run(&[0x12, 1, 0x8f, 4, 0, 0]).good();
        let mut rest = &page[4..];
        let mut found = Vec::new();
        while let [kind_high, kind_low, high, low, ..] = *rest {
            let len = usize::from(u16::from_be_bytes([high, low]));
            assert_eq!(len % 4, 0);
            let (descriptor, after) = rest.split_at(4 + len);
            found.push((u16::from_be_bytes([kind_high, kind_low]), descriptor));
            rest = after;
        }
        let kinds: Vec<_> = found.iter().map(|(kind, _)| *kind).collect();
        assert_eq!((rest, &kinds[..]), (&[][..], &[0, 1, 4, 8, 0x106, 0x108, 0x8001][..]));
        let limits = found[0].1;
        assert_eq!((limits.len(), &limits[10..12], &limits[16..20]), (36, &[1, 0][..], &[0, 0, 0, 60][..]));
        assert_eq!(found[1].1[4..10], [10, 0x83, 3, 0, 0x10, 0x11]);
        let features = found[4].1;
        assert_eq!((features.len(), &features[46..52]), (96, &[0, 48, 0, 0, 0, 44][..]));
        let general = found[6].1;
        assert_eq!(
            (general.len(), &general[4..18]),
            (36, &[0, 0, 0, 255, 0, 0, 0, 255, 2, 0, 0, 0, 9, 0][..])
        );
        let types = found[5].1;
        assert_eq!(
            (types[7], &types[8..13], &types[72..77]),
            (128, &[0, 0x80, 0, 1, 3][..], &[0xff, 0xff, 0, 1, 2][..])
        );
    }

    #[test]
    fn every_listed_page_is_there_in_order() {
        let mut client = DeviceBench::new().client("a");
        let mut page = |code: u8| client.run(&[0x12, 1, code, 2, 0, 0]).good();
        let supported = page(0);
        assert_eq!(supported, [0, 0, 0, 8, 0, 0x80, 0x83, 0x86, 0x8f, 0xb0, 0xb1, 0xb2]);
        for &code in &supported[4..] {
            let page = page(code);
            let length = usize::from(u16::from_be_bytes([page[2], page[3]]));
            assert_eq!((page[1], page.len()), (code, length + 4));
        }
        assert_eq!(client.run(&[0x12, 1, 0x42, 1, 0, 0]).check(), (5, 0x2400));
    }

    #[test]
    fn a_unit_and_its_port_have_names() {
        let mut client = DeviceBench::new().client("a");
        let page = client.run(&[0x12, 1, 0x83, 1, 0, 0]).good();
        let mut rest = &page[4..];
        let mut kinds = Vec::new();
        while !rest.is_empty() {
            let len = usize::from(rest[3]);
            kinds.push((rest[0], rest[1], len));
            rest = &rest[4 + len..];
        }
        let expected =
            [(1, 3, 8), (2, 1, 40), (0x51, 0x94, 4), (0x51, 0x95, 4), (0x53, 0x98, 28), (0x53, 0xa8, 16)];
        assert_eq!(kinds, expected);
        assert_eq!(page[8] >> 4, 3);
    }

    #[test]
    fn a_configured_identity_is_on_all_pages_and_replaces_the_derived_designators() {
        let given = GivenUnitIdentity {
            vendor: inquiry_field("LIO-ORG"),
            product: inquiry_field("mail"),
            revision: inquiry_field("4.0"),
            serial: UnitSerial::new("5f7a9c1e-2b3d-4e5f-8a6b-7c8d9e0f1a2b"),
            designators: Vec::new(),
        };
        let designators: Vec<_> = [
            UnitDesignator::naa(&[
                0x60, 1, 0x40, 0x55, 0xf7, 0xa9, 0xc1, 0xe2, 0xb3, 0xd4, 0xe5, 0xf8, 0xa6, 0xb7, 0xc8, 0xd9,
            ]),
            UnitDesignator::t10_vendor(b"LIO-ORG mail:5f7a"),
            UnitDesignator::eui64(&[0, 0x14, 5, 1, 2, 3, 4, 5]),
        ]
        .into_iter()
        .flatten()
        .collect();
        let pages = |given: &GivenUnitIdentity| {
            let identity = UnitIdentity::given(VolumeUuid::of_texts(&["a"]), given);
            let volume = Arc::new(MemVolume::new(1 << 20));
            let mut client =
                DeviceBench::around(LogicalUnit::new(identity, volume.clone()), volume).client("a");
            [0, 0x80, 0x83].map(|page| client.run(&[0x12, u8::from(page != 0), page, 1, 0, 0]).good())
        };
        let [inquiry, serial, identification] = pages(&GivenUnitIdentity { designators, ..given.clone() });
        assert_eq!(inquiry[8..36], *b"LIO-ORG mail            4.0 ");
        assert_eq!(serial[..4], [0, 0x80, 0, 36]);
        assert_eq!(serial[4..], *b"5f7a9c1e-2b3d-4e5f-8a6b-7c8d9e0f1a2b");
        let naa = b"\x01\x03\x00\x10\x60\x01\x40\x55\xf7\xa9\xc1\xe2\xb3\xd4\xe5\xf8\xa6\xb7\xc8\xd9";
        let own = [
            &naa[..],
            b"\x02\x01\x00\x11LIO-ORG mail:5f7a",
            b"\x01\x02\x00\x08\x00\x14\x05\x01\x02\x03\x04\x05",
        ];
        let own = own.concat();
        assert_eq!(identification[4..4 + own.len()], own);
        let [.., derived] = pages(&GivenUnitIdentity::default());
        assert_eq!(identification[4 + own.len()..], derived[4 + 12 + 44..], "those of port and target stay");
        // Without configured designators, the derived ones have the configured texts.
        let [.., identification] = pages(&given);
        assert_eq!(identification[4..16], derived[4..16]);
        assert_eq!(identification[16..20], [2, 1, 0, 44]);
        assert_eq!(identification[20..64], *b"LIO-ORG 5f7a9c1e-2b3d-4e5f-8a6b-7c8d9e0f1a2b");
    }

    #[test]
    fn a_serial_number_that_is_too_long_for_a_designator_is_only_on_its_page() {
        let pages = |len: usize| {
            let given = GivenUnitIdentity {
                serial: UnitSerial::new(&"7".repeat(len)),
                ..GivenUnitIdentity::default()
            };
            let identity = UnitIdentity::given(VolumeUuid::of_texts(&["a"]), &given);
            let volume = Arc::new(MemVolume::new(1 << 20));
            let mut client =
                DeviceBench::around(LogicalUnit::new(identity, volume.clone()), volume).client("a");
            [0x80, 0x83].map(|page| client.run(&[0x12, 1, page, 2, 0, 0]).good())
        };
        let ([serial, fits], [longest, too_long]) = (pages(247), pages(251));
        assert_eq!((serial[3], longest[3], longest.len()), (247, 251, 255));
        assert_eq!(fits[16..20], [2, 1, 0, 255]);
        assert_eq!(too_long[16..18], [0x51, 0x94], "the port's designators are next");
    }

    #[test]
    fn limits_and_provisioning_come_from_the_volume() {
        let thick = VolumeInfo { write_cache: true, rotational: true, ..VolumeInfo::new(1 << 20) };
        let mut thick = DeviceBench::over(shaped(thick)).client("a");
        let mut thin = DeviceBench::new().client("a");
        let limits = thin.run(&[0x12, 1, 0xb0, 1, 0, 0]).good();
        assert_eq!(limits[4..12], [1, 255, 0, 8, 0, 1, 0, 0]);
        assert_eq!(limits[20..32], [255, 255, 255, 255, 0, 0, 1, 0, 0, 0, 0, 128]);
        assert_eq!(limits[44..48], [0, 0, 8, 0]);
        assert_eq!(thick.run(&[0x12, 1, 0xb0, 1, 0, 0]).good()[20..48], [0; 28]);
        assert_eq!(thin.run(&[0x12, 1, 0xb2, 1, 0, 0]).good(), [0, 0xb2, 0, 4, 0, 0xe6, 2, 0]);
        assert_eq!(thick.run(&[0x12, 1, 0xb2, 1, 0, 0]).good(), [0, 0xb2, 0, 4, 0, 0, 0, 0]);
        assert_eq!(thin.run(&[0x12, 1, 0xb1, 1, 0, 0]).good()[4..6], [0, 1]);
        assert_eq!(thick.run(&[0x12, 1, 0xb1, 1, 0, 0]).good()[4..6], [0, 0]);
        assert_eq!(thick.run(&[0x12, 1, 0x86, 1, 0, 0]).good()[6], 1);
        for cdb in
            [&[0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0][..], &[0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]]
        {
            assert_eq!(thick.run(cdb).check(), (5, 0x2000));
        }
        assert_eq!(thick.run_with(&[0x41, 8, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512]).check(), (5, 0x2400));
        assert_eq!(
            thin.run(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]).good()[8..16],
            [0, 0, 2, 0, 0, 0, 0xc0, 0]
        );
    }
}
