//! INQUIRY (SPC-5).

use super::Command;
use super::task::{CommandContext, TaskOutcome, answer};
use super::vpd;
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::cdb::{EVPD, Inquiry};
use blockmux_wire::scsi::inquiry::*;
use zerocopy::{FromZeros, IntoBytes, U16};

pub(super) fn inquiry(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let (evpd, page, allocation_length) = fields(cx.command)?;
    if evpd {
        let page = vpd::page(cx, page).ok_or(Sense::in_cdb(2))?;
        return answer(&page, allocation_length);
    }
    // SPC-5, the INQUIRY command: a page code without EVPD is an error.
    if page != 0 {
        return Err(Sense::in_cdb(2).into());
    }
    let identity = &cx.unit.unit.identity;
    let removable = cx.unit.unit.read_state(|state| state.removable);
    let mut data = standard(DEVICE_TYPE_BLOCK);
    if cx.unit.unit.is_owned() {
        // Initiators do not choose the process that serves the volume.
        data.flags_5 = TPGS_IMPLICIT | THREE_PC;
    }
    data.removable = if removable { RMB } else { 0 };
    data.t10_vendor_identification = identity.vendor;
    data.product_identification = identity.product;
    data.product_revision_level = identity.revision;
    answer(data.as_bytes(), allocation_length)
}

/// SPC-5, the INQUIRY command: for a missing logical unit, the peripheral qualifier reports that.
pub(super) fn without_unit(command: &Command) -> TaskOutcome {
    let (evpd, page, allocation_length) = fields(command)?;
    if evpd || page != 0 {
        return Err(Sense::in_cdb(2).into());
    }
    let device_type = if command.lun.is_report_luns() { DEVICE_TYPE_WELL_KNOWN } else { DEVICE_TYPE_NONE };
    answer(standard(device_type).as_bytes(), allocation_length)
}

fn fields(command: &Command) -> Result<(bool, u8, usize), Sense> {
    let cdb: &Inquiry = command.cdb.read().ok_or(Sense::in_cdb(0))?;
    // CMDDT of SPC-2 is obsolete.
    if cdb.flags & !EVPD != 0 {
        return Err(Sense::cdb_bit(1, 1));
    }
    Ok((cdb.flags & EVPD != 0, cdb.page_code, cdb.allocation_length.get().into()))
}

/// Standard INQUIRY data (SPC-5).
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
        version: VERSION_SPC_4,
        response_data_format: HISUP | RESPONSE_DATA_FORMAT,
        additional_length: const { (size_of::<StandardInquiry>() - 5) as u8 },
        flags_5: TPGS_IMPLICIT_AND_EXPLICIT | THREE_PC,
        flags_6: MULTIP,
        flags_7: CMDQUE,
        t10_vendor_identification: *b"BLOCKMUX",
        product_identification: [b' '; 16],
        product_revision_level: [b' '; 4],
        version_descriptors,
        ..FromZeros::new_zeroed()
    }
}

#[cfg(test)]
mod tests {
    use crate::scsi::Lun;
    use crate::scsi::device::testing::DeviceBench;

    #[test]
    fn standard_inquiry_data_identifies_the_unit() {
        let mut client = DeviceBench::new().client("a");
        let data = client.run(&[0x12, 0, 0, 1, 0, 0]).good();
        assert_eq!(data.len(), 96);
        assert_eq!(data[..5], [0, 0, 6, 0x12, 91]);
        assert_eq!(&data[8..36], b"BLOCKMUXVOLUME          0001");
        assert_eq!(client.run(&[0x12, 0, 0, 0, 36, 0]).good(), data[..36]);
        assert_eq!(client.run(&[0x12, 0, 0, 0, 0, 0]).good(), []);
        assert_eq!(DeviceBench::removable().client("a").run(&[0x12, 0, 0, 0, 36, 0]).good()[1], 0x80);
    }

    #[test]
    fn a_page_without_evpd_and_reserved_bits_are_refused() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run(&[0x12, 0, 0x83, 0, 255, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x12, 2, 0, 0, 255, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0x12, 0, 0, 0, 255, 4]).check(), (5, 0x2400));
    }

    #[test]
    fn a_lun_without_a_unit_answers_only_the_required_commands() {
        let mut client = DeviceBench::new().client("a");
        let mut run = |cdb: &[u8]| client.run_on(Lun::new(5), cdb, &[]);
        assert_eq!(run(&[0x12, 0, 0, 0, 36, 0]).good()[0], 0x7f);
        assert_eq!(run(&[0x03, 0, 0, 0, 18, 0]).good()[2..14], [5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x25, 0]);
        assert_eq!(run(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good().len(), 16);
        assert_eq!(run(&[0; 6]).check(), (5, 0x2500));
        assert_eq!(run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).check(), (5, 0x2500));
    }

    #[test]
    fn the_well_known_unit_lists_the_others() {
        let mut client = DeviceBench::new().client("a");
        let well_known = Lun(0xc101_0000_0000_0000);
        assert_eq!(client.run_on(well_known, &[0x12, 0, 0, 0, 36, 0], &[]).good()[0], 0x1e);
        client.run_on(well_known, &[0; 6], &[]).good();
        let mut list =
            |select| client.run_on(well_known, &[0xa0, 0, select, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[]).good();
        assert_eq!(list(0), [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(list(1)[8..], [0xc1, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(list(2).len(), 24);
        assert_eq!(client.run(&[0xa0, 0, 3, 0, 0, 0, 0, 0, 1, 0, 0, 0]).check(), (5, 0x2400));
        assert_eq!(client.run(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 15, 0, 0]).check(), (5, 0x2400));
    }
}
