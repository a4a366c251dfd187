//! The Identify data structures (Base 2.0 §5.17; NVM Command Set 1.0 §4.1.5).

use super::association::HostIdentity;
use super::errors::MAX_ERRORS;
use super::property::VERSION;
use super::ranges::COPY_MAX_RANGES;
use super::subsystem::{MAX_NAMESPACES, Namespace, NamespaceView, Subsystem};
use super::temperature::{CRITICAL_K, WARNING_K};
use super::{MAX_ABORTS, MAX_DATA, MAX_EVENT_REQUESTS, MDTS, MQES};
use blockmux_wire::nvme::feature::{AEC_ANA_CHANGE, AEC_DISCOVERY_CHANGE, AEC_NAMESPACE_ATTRIBUTE};
use blockmux_wire::nvme::identify::*;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{CSI_NVM, NSID_ALL, SQE_LEN, Sqe};
use zerocopy::{FromZeros, IntoBytes};

/// Properties of the controller, besides the subsystem, on which a page depends.
pub(super) struct IdentifyContext<'a> {
    pub(super) cntlid: u16,
    pub(super) host: &'a HostIdentity,
    /// Longest in-capsule data on I/O queues, in bytes.
    pub(super) in_capsule: usize,
    /// SGL support of the transport, as in the field SGLS.
    pub(super) sgls: u32,
}

/// The data structure that a command requests.
pub(super) fn page(
    subsystem: &Subsystem,
    view: &NamespaceView,
    context: &IdentifyContext<'_>,
    sqe: &Sqe,
) -> Result<Vec<u8>, NvmeStatus> {
    let (cdw10, csi, nsid) = (sqe.cdw10.get(), (sqe.cdw11.get() >> 24) as u8, sqe.nsid.get());
    // Bits 7:0.
    let cns = Cns(cdw10 as u8);
    let from = (cdw10 >> 16) as u16;
    if subsystem.is_discovery && !matches!(cns, Cns::CONTROLLER) {
        return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    let of_nvm = || if csi == CSI_NVM { Ok(()) } else { Err(NvmeStatus::INVALID_FIELD_IN_COMMAND) };
    match cns {
        Cns::CONTROLLER => Ok(controller(subsystem, view, context).as_bytes().to_vec()),
        Cns::NAMESPACE | Cns::ALLOCATED_NAMESPACE => match find(view, nsid) {
            // An inactive namespace has a zero-filled data structure, which is not an error.
            Err(_) if (1..=MAX_NAMESPACES as u32).contains(&nsid) => Ok(vec![0; IDENTIFY_LEN]),
            found => Ok(namespace(found?).as_bytes().to_vec()),
        },
        Cns::ACTIVE_NAMESPACE_LIST | Cns::ALLOCATED_NAMESPACE_LIST => list(view, nsid),
        Cns::IO_COMMAND_SET_ACTIVE_NAMESPACE_LIST => of_nvm().and_then(|()| list(view, nsid)),
        Cns::NAMESPACE_IDENTIFICATION_DESCRIPTORS => Ok(descriptors(find(view, nsid)?)),
        Cns::IO_COMMAND_SET_NAMESPACE => {
            of_nvm()?;
            find(view, nsid)?;
            Ok(vec![0; IDENTIFY_LEN])
        }
        Cns::IO_COMMAND_SET_CONTROLLER => {
            of_nvm()?;
            // MDTS also limits Verify; nothing else is limited.
            let page = IdentifyControllerNvm { vsl: MDTS, ..IdentifyControllerNvm::new_zeroed() };
            Ok(page.as_bytes().to_vec())
        }
        Cns::IO_COMMAND_SET_INDEPENDENT_NAMESPACE => Ok(independent(find(view, nsid)?).as_bytes().to_vec()),
        Cns::NAMESPACE_ATTACHED_CONTROLLER_LIST => {
            find(view, nsid)?;
            Ok(controllers(subsystem, from))
        }
        Cns::CONTROLLER_LIST => Ok(controllers(subsystem, from)),
        Cns::IO_COMMAND_SETS => {
            let mut page = vec![0; IDENTIFY_LEN];
            // One combination of command sets: the NVM Command Set alone.
            page.first_mut().into_iter().for_each(|first| *first = 1);
            Ok(page)
        }
        _ => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
    }
}

fn find(view: &NamespaceView, nsid: u32) -> Result<&Namespace, NvmeStatus> {
    view.namespace(nsid).ok_or(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT)
}

fn controller(
    subsystem: &Subsystem,
    view: &NamespaceView,
    context: &IdentifyContext<'_>,
) -> IdentifyController {
    let mut page = IdentifyController {
        sn: text(&subsystem.serial),
        mn: text(&subsystem.model),
        fr: text(env!("CARGO_PKG_VERSION")),
        cmic: CMIC_MULTI_PORT | CMIC_MULTI_CONTROLLER,
        mdts: MDTS,
        cntlid: context.cntlid.into(),
        ver: VERSION.into(),
        ctratt: CTRATT_HOST_ID_128.into(),
        cntrltype: ControllerType::IO.0,
        acl: MAX_ABORTS.saturating_sub(1) as u8,
        aerl: MAX_EVENT_REQUESTS.saturating_sub(1) as u8,
        // One firmware slot, which is read-only.
        frmw: 0b11,
        lpa: LPA_EXTENDED,
        elpe: MAX_ERRORS.saturating_sub(1) as u8,
        // One second.
        kas: 10.into(),
        maxcmd: MQES.saturating_add(1).into(),
        sgls: (SGLS_ALIGNED_ANY | SGLS_OFFSET | context.sgls).into(),
        subnqn: subsystem.nqn.to_field(),
        // In units of 16 bytes: a response is the completion entry alone.
        iorcsz: 1.into(),
        ioccsz: (SQE_LEN as u32 / 16).into(),
        msdbd: 1,
        ..IdentifyController::new_zeroed()
    };
    if subsystem.is_discovery {
        page.cntrltype = ControllerType::DISCOVERY.0;
        page.ioccsz = 0.into();
        page.iorcsz = 0.into();
        page.oaes = AEC_DISCOVERY_CHANGE.into();
        return page;
    }
    let has_cache = view.iter().any(|namespace| namespace.has_cache);
    page.lpa |= LPA_EFFECTS;
    page.ofcs = OFCS_DISCONNECT.into();
    page.oaes = AEC_NAMESPACE_ATTRIBUTE.into();
    if subsystem.ana.is_there() {
        let (count, last) = subsystem.ana.count_and_last();
        page.cmic |= CMIC_ANA;
        page.oaes = (AEC_NAMESPACE_ATTRIBUTE | AEC_ANA_CHANGE).into();
        page.anatt = ANA_TRANSITION_S;
        page.anacap = ANACAP_OPTIMIZED | ANACAP_NON_OPTIMIZED | ANACAP_INACCESSIBLE | ANACAP_FIXED_GROUPS;
        page.anagrpmax = last.into();
        page.nanagrpid = count.into();
    }
    page.wctemp = WARNING_K.into();
    page.cctemp = CRITICAL_K.into();
    page.sqes = 0x66;
    page.cqes = 0x44;
    // Includes namespaces that may be attached later.
    page.nn = (MAX_NAMESPACES as u32).into();
    page.mnan = page.nn;
    page.oncs = (ONCS_COMPARE
        | ONCS_DATASET_MANAGEMENT
        | ONCS_WRITE_ZEROES
        | ONCS_SAVE
        | ONCS_RESERVATIONS
        | ONCS_VERIFY
        | ONCS_COPY)
        .into();
    page.fuses = FUSES_COMPARE_AND_WRITE.into();
    // For the largest block size; each namespace reports its own value.
    page.acwu = (MAX_DATA.wrapping_shr(LARGEST_BLOCK_SHIFT).saturating_sub(1) as u16).into();
    page.vwc = VWC_FLUSH_ALL | if has_cache { VWC_PRESENT } else { 0 };
    page.cdfs = 1.into();
    page.ioccsz = (SQE_LEN.saturating_add(context.in_capsule) as u32 / 16).into();
    debug_assert!(subsystem.admits(&context.host.nqn), "only admitted hosts ask");
    page
}

/// An ASCII field, padded with spaces.
fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    field.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    field
}

fn namespace(namespace: &Namespace) -> IdentifyNamespace {
    let info = namespace.info();
    let blocks = info.size.wrapping_shr(namespace.block_shift);
    let mut page = IdentifyNamespace {
        nsze: blocks.into(),
        ncap: blocks.into(),
        nuse: blocks.into(),
        nmic: NMIC_SHARED,
        nvmcap: u128::from(info.size).into(),
        nsattr: if namespace.read_only { NSATTR_WRITE_PROTECTED } else { 0 },
        nguid: namespace.identity.nguid,
        eui64: namespace.identity.eui64.unwrap_or_default(),
        anagrpid: namespace.ana_group.into(),
        ..IdentifyNamespace::new_zeroed()
    };
    let per_block = |bytes: u32| u16::try_from(bytes.wrapping_shr(namespace.block_shift)).unwrap_or(u16::MAX);
    let less_one = |bytes: u32| per_block(bytes).saturating_sub(1).into();
    page.nsfeat = NSFEAT_OPTPERF | NSFEAT_ATOMICS;
    // Every command is atomic with respect to others.
    let largest = MAX_DATA.wrapping_shr(namespace.block_shift).saturating_sub(1);
    page.nacwu = u16::try_from(largest).unwrap_or(u16::MAX).into();
    page.rescap = rescap(namespace);
    page.npwg = less_one(info.preferred_block);
    page.npwa = page.npwg;
    // A host that derives a stripe from the optimal write size finds none.
    page.nows = page.npwg;
    page.npdg = less_one(info.discard_granularity.max(info.logical_block));
    page.npda = page.npdg;
    if namespace.zeroes_deallocated {
        page.dlfeat = DLFEAT_ZEROES | DLFEAT_WRITE_ZEROES_DEALLOCATES;
    }
    let longest = MAX_DATA.wrapping_shr(namespace.block_shift);
    page.mssrl = u16::try_from(longest).unwrap_or(u16::MAX).into();
    page.mcl = (longest.saturating_mul(COPY_MAX_RANGES) as u32).into();
    page.msrc = COPY_MAX_RANGES.saturating_sub(1) as u8;
    if let Some(format) = page.lbaf.first_mut() {
        format.lbads = namespace.block_shift as u8;
    }
    page
}

fn independent(namespace: &Namespace) -> IdentifyNamespaceIndependent {
    IdentifyNamespaceIndependent {
        nmic: NMIC_SHARED,
        rescap: rescap(namespace),
        anagrpid: namespace.ana_group.into(),
        nsattr: if namespace.read_only { NSATTR_WRITE_PROTECTED } else { 0 },
        nstat: NSTAT_READY,
        ..IdentifyNamespaceIndependent::new_zeroed()
    }
}

fn rescap(namespace: &Namespace) -> u8 {
    let persists = if namespace.volume_state.has_shared_state() { RESCAP_PTPL } else { 0 };
    RESCAP_ALL_TYPES | RESCAP_IEKEY_1_3 | persists
}

/// Active namespace identifiers above `nsid`.
fn list(view: &NamespaceView, nsid: u32) -> Result<Vec<u8>, NvmeStatus> {
    if nsid >= NSID_ALL.saturating_sub(1) {
        return Err(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT);
    }
    let above = view.iter().map(|namespace| namespace.nsid).filter(|&other| other > nsid);
    let mut page: Vec<u8> = above.take(NAMESPACE_LIST_MAX).flat_map(u32::to_le_bytes).collect();
    page.resize(IDENTIFY_LEN, 0);
    Ok(page)
}

fn descriptors(namespace: &Namespace) -> Vec<u8> {
    let mut page = Vec::with_capacity(IDENTIFY_LEN);
    let mut add = |kind: NamespaceIdType, id: &[u8]| {
        page.extend([kind.0, id.len() as u8, 0, 0]);
        page.extend(id);
    };
    let identity = &namespace.identity;
    if let Some(eui64) = &identity.eui64 {
        add(NamespaceIdType::EUI64, eui64);
    }
    add(NamespaceIdType::NGUID, &identity.nguid);
    add(NamespaceIdType::UUID, &identity.uuid);
    add(NamespaceIdType::CSI, &[CSI_NVM]);
    page.resize(IDENTIFY_LEN, 0);
    page
}

/// Controller identifiers from `from` on.
fn controllers(subsystem: &Subsystem, from: u16) -> Vec<u8> {
    let all = subsystem.associations.controllers();
    let chosen: Vec<u16> = all.into_iter().filter(|&id| id >= from).take(CONTROLLER_LIST_MAX).collect();
    let mut page = (chosen.len() as u16).to_le_bytes().to_vec();
    page.extend(chosen.into_iter().flat_map(u16::to_le_bytes));
    page.resize(IDENTIFY_LEN, 0);
    page
}

/// ANATT: longest ANA transition, in seconds.
const ANA_TRANSITION_S: u8 = 10;
/// log2 of the largest logical block, in bytes.
const LARGEST_BLOCK_SHIFT: u32 = 16;
