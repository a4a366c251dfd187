//! Fixtures for tests of hosts: names, and a scripted controller.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::identify::*;
use blockmux_wire::nvme::opcode::AdminOpcode;
use blockmux_wire::nvme::status::StatusField;
use zerocopy::{FromZeros, IntoBytes};

pub(crate) fn names() -> Names {
    Names {
        host: Nqn::new("nqn.2026-11.test:host").unwrap(),
        host_id: [7; 16],
        subsystem: Nqn::new("nqn.2026-11.test:disk").unwrap(),
    }
}

pub(crate) fn namespace() -> NamespaceInfo {
    NamespaceInfo {
        nsid: 1,
        blocks: 1 << 20,
        block_len: 512,
        physical_block: 4096,
        write_cache: true,
        max_transfer: 128 << 10,
        max_zeroes_blocks: Some(256),
        zeroes_deallocate: true,
        max_deallocate_blocks: Some(1 << 16),
        deallocate_granularity: 4096,
        ..NamespaceInfo::default()
    }
}

pub(crate) fn controller() -> ControllerInfo {
    ControllerInfo { cntlid: 5, max_entries: 1024, in_capsule: 8192, ..ControllerInfo::default() }
}

/// A controller that completes admin commands by itself.
pub(crate) struct ScriptedSubsystem {
    pub(crate) blocks: u64,
    pub(crate) lbads: u8,
    pub(crate) metadata: u16,
    /// The value of every byte of the namespaces' UUIDs.
    pub(crate) uuid: u8,
    /// Number of reads of CSTS that report the controller as not ready.
    pub(crate) unready: u32,
    pub(crate) csts: u32,
    /// Opcode whose commands fail, and their status.
    pub(crate) fails: Option<(u8, StatusField)>,
    pub(crate) connect_result: u64,
    pub(crate) log: Vec<u8>,
    pub(crate) oaes: u32,
    /// Command Retry Delay Times, in units of 100 ms.
    pub(crate) crdt: [u16; 3],
    /// The Host Behavior Support data that was set.
    pub(crate) behavior: Option<Vec<u8>>,
    /// ANA group of the namespace, if there are groups.
    pub(crate) ana_group: u32,
    /// SGLS and ICDOFF of Identify Controller.
    pub(crate) sgls: u32,
    pub(crate) icdoff: u16,
    /// Whether Get Log Page is never completed.
    pub(crate) is_silent_about_logs: bool,
    /// CID of the outstanding Asynchronous Event Request.
    pub(crate) listening: Option<u16>,
}

/// ANATT, in seconds.
pub(crate) const ANATT_S: u8 = 20;

impl Default for ScriptedSubsystem {
    fn default() -> ScriptedSubsystem {
        ScriptedSubsystem {
            blocks: 1000,
            lbads: 12,
            metadata: 0,
            uuid: 0x5a,
            unready: 0,
            csts: 1,
            fails: None,
            connect_result: 5,
            log: Vec::new(),
            oaes: 0,
            crdt: [0; 3],
            behavior: None,
            ana_group: 0,
            sgls: SGLS_ALIGNED_ANY | SGLS_KEYED | SGLS_OFFSET,
            icdoff: 0,
            is_silent_about_logs: false,
            listening: None,
        }
    }
}

impl ScriptedSubsystem {
    /// Completes a command: data, status, result.
    pub(crate) fn answer(&mut self, sqe: &Sqe) -> (Vec<u8>, StatusField, u64) {
        let good = StatusField::default();
        if let Some((_, status)) = self.fails.filter(|(opcode, _)| *opcode == sqe.opcode) {
            return (Vec::new(), status, 0);
        }
        match (AdminOpcode(sqe.opcode), sqe.nsid.get(), sqe.cdw11.get()) {
            // Connect; Property Get of CAP, VS and CSTS; Property Set.
            (AdminOpcode::FABRICS, 1, _) => (Vec::new(), good, self.connect_result),
            (AdminOpcode::FABRICS, 4, 0) => (Vec::new(), good, 1 << 43 | 1 << 37 | 4 << 24 | 127),
            (AdminOpcode::FABRICS, 4, 8) => (Vec::new(), good, 0x1_0300),
            (AdminOpcode::FABRICS, 4, _) if self.unready > 0 => {
                self.unready -= 1;
                (Vec::new(), good, 0)
            }
            (AdminOpcode::FABRICS, 4, _) => (Vec::new(), good, self.csts.into()),
            (AdminOpcode::IDENTIFY, nsid, _) => (self.identify(sqe.cdw10.get(), nsid), good, 0),
            (AdminOpcode::GET_LOG_PAGE, ..) => {
                let from = sqe.cdw12.get() as usize;
                let len = ((sqe.cdw10.get() >> 16) as usize + 1) * 4;
                let mut page = self.log.get(from..).unwrap_or_default().to_vec();
                page.resize(len, 0);
                (page, good, 0)
            }
            _ => (Vec::new(), good, 0),
        }
    }

    fn identify(&self, cns: u32, nsid: u32) -> Vec<u8> {
        match Cns(cns as u8) {
            Cns::CONTROLLER => {
                let mut told = IdentifyController::new_zeroed();
                told.mn = [b' '; 40];
                told.mn[..5].copy_from_slice(b"MODEL");
                (told.mdts, told.vwc) = (5, VWC_PRESENT);
                told.oncs = (ONCS_WRITE_ZEROES | ONCS_DATASET_MANAGEMENT).into();
                told.oaes = self.oaes.into();
                told.crdt = self.crdt.map(Into::into);
                told.cmic = if self.ana_group > 0 { CMIC_ANA } else { 0 };
                (told.nanagrpid, told.anatt) = (1.into(), ANATT_S);
                told.ioccsz = ((64 + 8192) / 16).into();
                (told.sgls, told.icdoff) = (self.sgls.into(), self.icdoff.into());
                told.as_bytes().to_vec()
            }
            Cns::ACTIVE_NAMESPACE_LIST => {
                let mut list = vec![0; 4096];
                (list[0], list[4], list[8]) = (1, 3, 9);
                list
            }
            Cns::NAMESPACE if nsid == 1 || nsid == 9 => {
                let mut told = IdentifyNamespace::new_zeroed();
                (told.nsze, told.nsfeat, told.npwg) = (self.blocks.into(), NSFEAT_OPTPERF, 3.into());
                told.dlfeat = DLFEAT_ZEROES | DLFEAT_WRITE_ZEROES_DEALLOCATES;
                (told.lbaf[0].lbads, told.lbaf[0].ms) = (self.lbads, self.metadata.into());
                told.nguid = [0xab; 16];
                told.anagrpid = self.ana_group.into();
                told.as_bytes().to_vec()
            }
            Cns::NAMESPACE_IDENTIFICATION_DESCRIPTORS => {
                let mut list = vec![0; 4096];
                list[..4].copy_from_slice(&[1, 8, 0, 0]);
                list[12..16].copy_from_slice(&[3, 16, 0, 0]);
                list[16..32].copy_from_slice(&[self.uuid; 16]);
                list
            }
            _ => vec![0; 4096],
        }
    }
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}
