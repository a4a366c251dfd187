//! The log pages (Base 2.0 §5.16).

use super::errors::ErrorLog;
use super::events::Events;
use super::subsystem::{NamespaceView, Subsystem};
use super::temperature::TEMPERATURE_K;
use super::{MAX_DATA, NvmeOutcome};
use blockmux_volume::Seg;
use blockmux_wire::nvme::feature::FeatureId;
use blockmux_wire::nvme::log::*;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{NSID_ALL, Sqe};
use zerocopy::{FromZeros, IntoBytes};

/// Whether a command addresses one namespace, and not the controller or all namespaces.
pub(super) fn is_for_one_namespace(sqe: &Sqe) -> bool {
    !matches!(sqe.nsid.get(), 0 | NSID_ALL)
}

/// The part of a page that a command requests. `discovery` creates the discovery log.
pub(super) fn part(
    (subsystem, view): (&Subsystem, &NamespaceView),
    (events, errors): (&mut Events, &ErrorLog),
    has_feature: &dyn Fn(FeatureId) -> bool,
    (port, sqe): (u16, &Sqe),
    discovery: &dyn Fn() -> Vec<u8>,
) -> NvmeOutcome {
    let wanted = wanted_len(sqe.cdw10.get(), sqe.cdw11.get());
    let offset = u64::from(sqe.cdw13.get()) << 32 | u64::from(sqe.cdw12.get());
    // No page is namespace specific.
    if is_for_one_namespace(sqe) || wanted > MAX_DATA as u64 || offset % 4 != 0 || sqe.cdw14.get() & OT != 0 {
        return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    // Bits 7:0.
    let lid = LogPage(sqe.cdw10.get() as u8);
    let page = match lid {
        LogPage::DISCOVERY if subsystem.is_discovery => Some(discovery()),
        _ if subsystem.is_discovery && lid != LogPage::SUPPORTED_LOG_PAGES => None,
        LogPage::ERROR_INFORMATION => Some(errors.page()),
        LogPage::SMART_HEALTH_INFORMATION => Some(smart(subsystem, events, errors).as_bytes().to_vec()),
        LogPage::CHANGED_NAMESPACE_LIST => Some(events.changed_namespaces()),
        LogPage::RESERVATION_NOTIFICATION => Some(events.reservation_notification()),
        LogPage::ASYMMETRIC_NAMESPACE_ACCESS if subsystem.ana.is_there() => {
            Some(subsystem.ana.log(view, port, sqe.cdw10.get()))
        }
        LogPage::FEATURE_IDENTIFIERS_SUPPORTED_AND_EFFECTS => Some(features(has_feature)),
        _ => page(subsystem, lid),
    };
    let Some(page) = page else {
        return NvmeOutcome::failure(NvmeStatus::INVALID_LOG_PAGE);
    };
    let begin = usize::try_from(offset).unwrap_or(usize::MAX);
    let Some(rest) = page.get(begin..) else {
        return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
    };
    if sqe.dptr.length_at_host().is_none_or(|len| u64::from(len) < wanted) {
        return NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID);
    }
    // Marked as read only now that the page is sent. Changes since the page was created are
    // reported as a new event.
    if sqe.cdw10.get() & RAE == 0 {
        events.is_read(lid);
    }
    let mut part = rest.to_vec();
    // At most `MAX_DATA`; beyond the end of the page there are zeroes.
    part.resize(wanted as usize, 0);
    NvmeOutcome::data(Seg::from_slice(&part).into(), 0)
}

/// A page that has no read state.
fn page(subsystem: &Subsystem, lid: LogPage) -> Option<Vec<u8>> {
    match lid {
        LogPage::SUPPORTED_LOG_PAGES => {
            let lids = (0..=u8::MAX).map(LogPage);
            let lids = lids.map(|lid| if is_supported(subsystem, lid) { LSUPP } else { 0 });
            Some(lids.flat_map(u32::to_le_bytes).collect())
        }
        LogPage::FIRMWARE_SLOT_INFORMATION => Some(firmware().as_bytes().to_vec()),
        LogPage::COMMANDS_SUPPORTED_AND_EFFECTS => Some(effects()),
        _ => None,
    }
}

fn is_supported(subsystem: &Subsystem, lid: LogPage) -> bool {
    if subsystem.is_discovery {
        return matches!(lid, LogPage::SUPPORTED_LOG_PAGES | LogPage::DISCOVERY);
    }
    lid == LogPage::ASYMMETRIC_NAMESPACE_ACCESS && subsystem.ana.is_there()
        || matches!(
            lid,
            LogPage::SUPPORTED_LOG_PAGES
                | LogPage::ERROR_INFORMATION
                | LogPage::SMART_HEALTH_INFORMATION
                | LogPage::FIRMWARE_SLOT_INFORMATION
                | LogPage::CHANGED_NAMESPACE_LIST
                | LogPage::COMMANDS_SUPPORTED_AND_EFFECTS
                | LogPage::FEATURE_IDENTIFIERS_SUPPORTED_AND_EFFECTS
                | LogPage::RESERVATION_NOTIFICATION
        )
}

/// Feature Identifiers Supported and Effects (Base 2.0 §5.16.1.18). Setting a feature has no
/// effects that hosts have to check.
fn features(has: &dyn Fn(FeatureId) -> bool) -> Vec<u8> {
    let effects = (0..=u8::MAX).map(FeatureId).map(|feature| match feature {
        _ if !has(feature) => 0,
        FeatureId::ERROR_RECOVERY
        | FeatureId::RESERVATION_NOTIFICATION_MASK
        | FeatureId::RESERVATION_PERSISTENCE => FSUPP | FSP_NAMESPACE,
        _ => FSUPP | FSP_CONTROLLER,
    });
    effects.flat_map(u32::to_le_bytes).collect()
}

fn smart(subsystem: &Subsystem, events: &Events, errors: &ErrorLog) -> SmartLog {
    let totals = subsystem.traffic.totals();
    let thousands = |bytes: u64| u128::from(bytes.div_ceil(512 * 1000)).into();
    SmartLog {
        data_units_read: thousands(totals.read_bytes),
        data_units_written: thousands(totals.written_bytes),
        host_read_commands: u128::from(totals.reads).into(),
        host_write_commands: u128::from(totals.writes).into(),
        media_errors: u128::from(totals.media_errors).into(),
        error_information_log_entries: u128::from(errors.count()).into(),
        critical_warning: if events.thresholds.is_exceeded() { CRITICAL_WARNING_TEMPERATURE } else { 0 },
        composite_temperature: TEMPERATURE_K.into(),
        available_spare: 100,
        available_spare_threshold: 10,
        ..SmartLog::new_zeroed()
    }
}

fn firmware() -> FirmwareSlotLog {
    let mut page = FirmwareSlotLog { afi: 1, ..FirmwareSlotLog::new_zeroed() };
    let version = env!("CARGO_PKG_VERSION").bytes().chain(std::iter::repeat(b' '));
    if let Some(slot) = page.frs.first_mut() {
        slot.iter_mut().zip(version).for_each(|(to, from)| *to = from);
    }
    page
}

fn effects() -> Vec<u8> {
    let admin = |opcode: u8| match AdminOpcode(opcode) {
        AdminOpcode::GET_LOG_PAGE
        | AdminOpcode::IDENTIFY
        | AdminOpcode::ABORT
        | AdminOpcode::SET_FEATURES
        | AdminOpcode::GET_FEATURES
        | AdminOpcode::ASYNC_EVENT_REQUEST
        | AdminOpcode::KEEP_ALIVE => EFFECT_CSUPP,
        _ => 0,
    };
    let io = |opcode: u8| match NvmOpcode(opcode) {
        NvmOpcode::FLUSH
        | NvmOpcode::READ
        | NvmOpcode::COMPARE
        | NvmOpcode::VERIFY
        | NvmOpcode::RESERVATION_REGISTER
        | NvmOpcode::RESERVATION_REPORT
        | NvmOpcode::RESERVATION_ACQUIRE
        | NvmOpcode::RESERVATION_RELEASE => EFFECT_CSUPP,
        NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES | NvmOpcode::DATASET_MANAGEMENT | NvmOpcode::COPY => {
            EFFECT_CSUPP | EFFECT_LBCC
        }
        _ => 0,
    };
    let (admin, io) = ((0..=u8::MAX).map(admin), (0..=u8::MAX).map(io));
    let mut page: Vec<u8> = admin.chain(io).flat_map(u32::to_le_bytes).collect();
    page.resize(EFFECTS_LEN, 0);
    page
}
