//! Encoders of the commands that a host sends.

use super::Names;
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::identify::Cns;
use blockmux_wire::nvme::log::LogPage;
use blockmux_wire::nvme::nvm::DsmRange;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvmeof::auth::SECURITY_PROTOCOL_NVME;
use blockmux_wire::nvmeof::fabrics::{ATTRIB_8_BYTES, Connect, ConnectData, FabricsType, PropertyCommand};
use zerocopy::{FromZeros, transmute};

/// A host identifier, usually a UUID.
pub type HostId = [u8; 16];

/// A range of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NamespaceBlocks {
    pub(super) slba: u64,
    pub(super) count: u32,
}

/// Read, Write or Write Zeroes, with flags in CDW12.
#[inline]
pub(super) fn of_blocks(opcode: NvmOpcode, nsid: u32, blocks: NamespaceBlocks, flags: u32) -> Sqe {
    Sqe {
        cdw10: (blocks.slba as u32).into(),
        cdw11: ((blocks.slba >> 32) as u32).into(),
        cdw12: (flags | blocks.count.saturating_sub(1)).into(),
        ..of_namespace(opcode, nsid)
    }
}

/// A command without fields other than opcode and namespace.
#[inline]
pub(super) fn of_namespace(opcode: NvmOpcode, nsid: u32) -> Sqe {
    Sqe { opcode: opcode.0, nsid: nsid.into(), ..Sqe::new_zeroed() }
}

/// Dataset Management (deallocate) of one range, which is its data.
pub(super) fn deallocate(nsid: u32) -> Sqe {
    let flags = blockmux_wire::nvme::nvm::DSM_DEALLOCATE;
    Sqe { cdw11: flags.into(), ..of_namespace(NvmOpcode::DATASET_MANAGEMENT, nsid) }
}

/// The range of Dataset Management.
pub(super) fn range(blocks: NamespaceBlocks) -> DsmRange {
    DsmRange { cattr: 0.into(), nlb: blocks.count.into(), slba: blocks.slba.into() }
}

/// Connect of queue `qid` with `entries` entries.
pub(super) fn connect(qid: u16, entries: u16, kato_ms: u32) -> Sqe {
    let connect = Connect {
        opcode: AdminOpcode::FABRICS.0,
        fctype: FabricsType::CONNECT.0,
        qid: qid.into(),
        sqsize: entries.saturating_sub(1).into(),
        kato: kato_ms.into(),
        ..Connect::new_zeroed()
    };
    transmute!(connect)
}

/// The data of Connect.
pub(super) fn connect_data(names: &Names, cntlid: u16) -> ConnectData {
    ConnectData {
        hostid: names.host_id,
        cntlid: cntlid.into(),
        subnqn: names.subsystem.to_field(),
        hostnqn: names.host.to_field(),
        ..ConnectData::new_zeroed()
    }
}

/// Property Get of a property of 8 bytes if `is_long`, else of 4.
pub(super) fn property_get(offset: u32, is_long: bool) -> Sqe {
    let get = PropertyCommand {
        opcode: AdminOpcode::FABRICS.0,
        fctype: FabricsType::PROPERTY_GET.0,
        attrib: if is_long { ATTRIB_8_BYTES } else { 0 },
        ofst: offset.into(),
        ..PropertyCommand::new_zeroed()
    };
    transmute!(get)
}

/// Property Set of a property of four bytes.
pub(super) fn property_set(offset: u32, value: u32) -> Sqe {
    let set = PropertyCommand {
        opcode: AdminOpcode::FABRICS.0,
        fctype: FabricsType::PROPERTY_SET.0,
        ofst: offset.into(),
        value: u64::from(value).into(),
        ..PropertyCommand::new_zeroed()
    };
    transmute!(set)
}

/// Authentication Send or Receive of a message of `len` bytes.
pub(super) fn authentication(kind: FabricsType, len: u32) -> Sqe {
    Sqe {
        nsid: u32::from(kind.0).into(),
        cdw10: (SECURITY_PROTOCOL_NVME << 8).into(),
        cdw11: len.into(),
        ..admin(AdminOpcode::FABRICS)
    }
}

/// Identify, with the NVM Command Set where a CNS requires one.
pub(super) fn identify(cns: Cns, nsid: u32) -> Sqe {
    Sqe { nsid: nsid.into(), cdw10: u32::from(cns.0).into(), ..admin(AdminOpcode::IDENTIFY) }
}

/// Get Log Page of `len` bytes, a multiple of four, from `offset` on.
pub(super) fn get_log_page(page: LogPage, offset: u64, len: u32) -> Sqe {
    let dwords = (len >> 2).saturating_sub(1);
    Sqe {
        cdw10: (dwords << 16 | u32::from(page.0)).into(),
        cdw11: (dwords >> 16).into(),
        cdw12: (offset as u32).into(),
        cdw13: ((offset >> 32) as u32).into(),
        ..admin(AdminOpcode::GET_LOG_PAGE)
    }
}

/// Set Features with CDW11.
pub(super) fn set_features(feature: u8, value: u32) -> Sqe {
    Sqe { cdw10: u32::from(feature).into(), cdw11: value.into(), ..admin(AdminOpcode::SET_FEATURES) }
}

/// An admin command without fields other than its opcode.
pub(super) fn admin(opcode: AdminOpcode) -> Sqe {
    Sqe { opcode: opcode.0, ..Sqe::new_zeroed() }
}
