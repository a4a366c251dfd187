//! INQUIRY (SPC-5 §6.6).

use super::Command;
use super::sense::Sense;
use super::task::{Context, Outcome, answer};
use blockmux_wire::scsi::cdb::{EVPD, Inquiry};
use blockmux_wire::scsi::inquiry::*;
use zerocopy::{IntoBytes, U16};

pub(super) fn inquiry(cx: &mut Context<'_>) -> Outcome {
    let (evpd, page, allocation_length) = fields(cx.command)?;
    if evpd {
        return Err(Sense::in_cdb(2).into());
    }
    // SPC-5 §6.6.1: a page code without EVPD is an error.
    if page != 0 {
        return Err(Sense::in_cdb(2).into());
    }
    let identity = &cx.unit.unit.identity;
    let mut data = standard(DEVICE_TYPE_BLOCK);
    data.t10_vendor_identification = identity.vendor;
    data.product_identification = identity.product;
    data.product_revision_level = identity.revision;
    answer(data.as_bytes(), allocation_length)
}

/// SPC-5 §6.6.2: a LUN where no logical unit can be says so in its peripheral qualifier.
pub(super) fn without_unit(command: &Command) -> Outcome {
    let (evpd, page, allocation_length) = fields(command)?;
    if evpd || page != 0 {
        return Err(Sense::in_cdb(2).into());
    }
    let device_type = if command.lun.is_report_luns() { DEVICE_TYPE_WELL_KNOWN } else { DEVICE_TYPE_NONE };
    answer(standard(device_type).as_bytes(), allocation_length)
}

fn fields(command: &Command) -> Result<(bool, u8, usize), Sense> {
    let cdb: &Inquiry = command.cdb.read().ok_or(Sense::in_cdb(0))?;
    // CMDDT of SPC-2 is gone.
    if cdb.flags & !EVPD != 0 {
        return Err(Sense::cdb_bit(1, 1));
    }
    Ok((cdb.flags & EVPD != 0, cdb.page_code, cdb.allocation_length.get().into()))
}

/// Standard INQUIRY data (SPC-5 §6.6.2).
fn standard(device_type: u8) -> StandardInquiry {
    let mut version_descriptors = [U16::ZERO; 8];
    for (place, descriptor) in version_descriptors.iter_mut().zip([
        VERSION_DESCRIPTOR_SAM_5,
        VERSION_DESCRIPTOR_ISCSI,
        VERSION_DESCRIPTOR_SPC_4,
        VERSION_DESCRIPTOR_SBC_3,
    ]) {
        *place = U16::new(descriptor);
    }
    StandardInquiry {
        peripheral: device_type,
        removable: 0,
        version: VERSION_SPC_4,
        response_data_format: HISUP | RESPONSE_DATA_FORMAT,
        additional_length: const { (size_of::<StandardInquiry>() - 5) as u8 },
        flags_5: TPGS_IMPLICIT_AND_EXPLICIT | THREE_PC,
        flags_6: MULTIP,
        flags_7: CMDQUE,
        t10_vendor_identification: *b"BLOCKMUX",
        product_identification: [b' '; 16],
        product_revision_level: [b' '; 4],
        vendor_specific: [0; 20],
        obsolete: 0,
        reserved: 0,
        version_descriptors,
        reserved_too: [0; 22],
    }
}
