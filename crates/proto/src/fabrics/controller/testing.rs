//! Fixtures for tests of controllers: a node, and commands.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::node::{FabricsPort, NvmeNode};
use crate::exports::{Export, Exports, VolumeId};
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Namespace, Subsystem};
use blockmux_volume::{MemVolume, Volume};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Cqe, SglDescriptor, Sqe, property};
use blockmux_wire::nvmeof::fabrics::*;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub(crate) const NQN: &str = "nqn.2026-11.com.example:disk";
pub(crate) const PRIVATE: &str = "nqn.2026-11.com.example:private";
pub(crate) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
/// Size of a volume, in bytes.
pub(crate) const SIZE: u64 = 4 << 20;

/// An export with this name.
pub(crate) fn export(name: &str) -> Export {
    let volume = Arc::new(MemVolume::new(SIZE));
    Export { name: name.into(), description: String::new(), read_only: name == "b", volume }
}

/// A node with an open subsystem with namespaces 1 and 2, and a subsystem that is closed to the
/// test host.
pub(crate) fn node() -> (Arc<NvmeNode>, Exports) {
    serve(Exports::new(vec![export("a"), export("b")]))
}

/// A node as [`node`], whose first volume is this one.
pub(crate) fn node_of(volume: Arc<dyn Volume>) -> (Arc<NvmeNode>, Exports) {
    serve(Exports::new(vec![Export { volume, ..export("a") }, export("b")]))
}

pub(crate) fn serve(exports: Exports) -> (Arc<NvmeNode>, Exports) {
    let namespace = |nsid: u32| {
        let (id, volume_state) =
            (VolumeId(nsid - 1), exports.volume_state(VolumeId(nsid - 1)).unwrap().clone());
        Namespace::new(nsid, id, volume_state, nsid == 2, VolumeUuid::of_texts(&[&format!("volume {nsid}")]))
    };
    let nqn = |name| Nqn::new(name).unwrap();
    let open = Subsystem::new(nqn(NQN), "machine", vec![namespace(1), namespace(2)], Vec::new());
    let private = Subsystem::new(nqn(PRIVATE), "machine", vec![namespace(1)], vec![nqn("nqn.other")]);
    let ports = vec![FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
    (Arc::new(NvmeNode::new(vec![Arc::new(open), Arc::new(private)], ports, "machine")), exports)
}

pub(crate) fn connect(nqn: &str, qid: u16, cntlid: u16, cattr: u8) -> (Sqe, ConnectData) {
    let command = Connect {
        opcode: AdminOpcode::FABRICS.0,
        flags: 0x40,
        fctype: FabricsType::CONNECT.0,
        sgl1: SglDescriptor::in_capsule(0, 1024),
        qid: qid.into(),
        sqsize: 31.into(),
        cattr,
        kato: (if qid == 0 { 4000 } else { 0 }).into(),
        ..Connect::new_zeroed()
    };
    let data = ConnectData {
        hostid: [1; 16],
        cntlid: cntlid.into(),
        subnqn: Nqn::new(nqn).unwrap().to_field(),
        hostnqn: Nqn::new(HOST).unwrap().to_field(),
        ..ConnectData::new_zeroed()
    };
    (Sqe::read_from_bytes(command.as_bytes()).unwrap(), data)
}

/// Property Set of CC.
pub(crate) fn set_cc(value: u64) -> Sqe {
    let set = PropertyCommand {
        opcode: AdminOpcode::FABRICS.0,
        flags: 0x40,
        fctype: FabricsType::PROPERTY_SET.0,
        ofst: property::CC.into(),
        value: value.into(),
        ..PropertyCommand::new_zeroed()
    };
    Sqe::read_from_bytes(set.as_bytes()).unwrap()
}

/// The value of CC that enables a controller.
pub(crate) const CC_ENABLED: u64 = 0x0046_0061;

/// An I/O command for `blocks` blocks.
pub(crate) fn nvm(opcode: NvmOpcode, nsid: u32, slba: u64, blocks: u32) -> Sqe {
    let moves = matches!(opcode, NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE);
    Sqe {
        opcode: opcode.0,
        flags: 0x40,
        nsid: nsid.into(),
        dptr: SglDescriptor::transport(if moves { blocks * 512 } else { 0 }),
        cdw10: (slba as u32).into(),
        cdw11: ((slba >> 32) as u32).into(),
        cdw12: (blocks - 1).into(),
        ..Sqe::new_zeroed()
    }
}

/// An admin command that returns up to `room` bytes of data.
pub(crate) fn admin(opcode: AdminOpcode, nsid: u32, cdw10: u32, cdw11: u32, room: u32) -> Sqe {
    Sqe {
        opcode: opcode.0,
        flags: 0x40,
        nsid: nsid.into(),
        dptr: SglDescriptor::transport(room),
        cdw10: cdw10.into(),
        cdw11: cdw11.into(),
        ..Sqe::new_zeroed()
    }
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

/// The status of a failed command, which must have DNR set.
pub(crate) fn refusal(cqe: &Cqe) -> NvmeStatus {
    assert!(cqe.status.do_not_retry(), "{cqe:?}");
    cqe.status.status()
}
