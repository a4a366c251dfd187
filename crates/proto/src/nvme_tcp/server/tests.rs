//! Whole connections as packet traces: what the host sends, what the target answers.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod ana;
mod authenticate;
mod changes;
mod commands;
mod connections;
mod events;
mod fused;
mod hostile;
mod reservations;

use super::TargetSession;
use crate::digest;
use crate::exports::{Export, Exports, VolumeId};
use crate::fabrics::controller::node::{Node, Port};
use crate::nvme::HangUp;
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Namespace, Subsystem};
use crate::session::{Demand, StreamSession};
use crate::testing::Pump;
use blockmux_volume::{MemVolume, Pool};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::Status;
use blockmux_wire::nvme::{Cqe, SglDescriptor, Sqe, property};
use blockmux_wire::nvmeof::fabrics::*;
use blockmux_wire::nvmeof::tcp::*;
use core::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const NQN: &str = "nqn.2026-11.com.example:disk";
const PRIVATE: &str = "nqn.2026-11.com.example:private";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
const SIZE: u64 = 4 << 20;

/// One PDU as it came.
#[derive(Debug, Clone)]
struct Pdu {
    common: CommonHeader,
    header: Vec<u8>,
    data: Vec<u8>,
}

impl Pdu {
    fn kind(&self) -> PduType {
        PduType(self.common.pdu_type)
    }

    fn as_a<T: FromBytes>(&self) -> T {
        T::read_from_bytes(&self.header).unwrap()
    }

    fn cqe(&self) -> Cqe {
        assert_eq!(self.kind(), PduType::CAPSULE_RESP);
        self.as_a::<CapsuleResp>().cqe
    }
}

/// A volume under that name.
fn export(name: &str) -> Export {
    let volume = Arc::new(MemVolume::new(SIZE));
    Export { name: name.into(), description: String::new(), read_only: name == "b", volume }
}

/// What is served: a subsystem with namespaces 1 and 2 for everybody, and one for nobody that is here.
fn node() -> (Arc<Node>, Exports) {
    serve(Exports::new(vec![export("a"), export("b")]))
}

fn serve(exports: Exports) -> (Arc<Node>, Exports) {
    let namespace = |nsid: u32| {
        let (id, served) = (VolumeId(nsid - 1), exports.served(VolumeId(nsid - 1)).unwrap().clone());
        Namespace::new(nsid, id, served, nsid == 2, (&format!("volume {nsid}"), "machine"))
    };
    let nqn = |name| Nqn::new(name).unwrap();
    let open = Subsystem::new(nqn(NQN), "machine", vec![namespace(1), namespace(2)], Vec::new());
    let private = Subsystem::new(nqn(PRIVATE), "machine", vec![namespace(1)], vec![nqn("nqn.other")]);
    let ports = vec![Port { id: 1, address: "0.0.0.0:4420".parse().unwrap() }];
    (Arc::new(Node::new(vec![Arc::new(open), Arc::new(private)], ports, "machine")), exports)
}

/// A host by hand: sends PDUs, takes the answers apart.
struct Host {
    pump: Pump<TargetSession>,
    digests: u8,
    cid: u16,
    /// Every byte of its identifier.
    id: u8,
    now: Instant,
}

impl Host {
    /// Connected to a socket, nothing said.
    fn new((node, exports): &(Arc<Node>, Exports)) -> Host {
        Host::with_pool((node, exports), Pool::new(usize::MAX))
    }

    fn with_pool((node, exports): (&Arc<Node>, &Exports), pool: Pool) -> Host {
        let now = Instant::now();
        let pump = Pump::new(TargetSession::new(node.clone(), pool, now), exports);
        Host { pump, digests: 0, cid: 0, id: 1, now }
    }

    /// Initialized.
    fn initialized(node: &(Arc<Node>, Exports), digests: u8) -> Host {
        let mut host = Host::new(node);
        let answer = host.pump.exchange(ic_req(digests).as_bytes());
        let response = IcResp::read_from_bytes(&answer).unwrap();
        assert_eq!((response.dgst, response.maxh2cdata.get()), (digests, 1 << 20));
        host.digests = digests;
        host
    }

    /// Over a connection that can be cut, to that address.
    fn with_hang_up(node: &(Arc<Node>, Exports), hang_up: HangUp, local_ip: Option<IpAddr>) -> Host {
        let mut host = Host::new(node);
        let (permit, _) = node.0.begin_connect(None, hang_up.clone());
        let session = TargetSession::new(node.0.clone(), Pool::new(usize::MAX), host.now);
        host.pump.session = session.admitted(permit, local_ip, hang_up);
        host.pump.exchange(ic_req(0).as_bytes());
        host
    }

    /// With an enabled controller, and its identifier.
    fn admin(node: &(Arc<Node>, Exports), digests: u8) -> (Host, u16) {
        Host::admin_of(node, digests, 1)
    }

    /// The same as another host.
    fn admin_of(node: &(Arc<Node>, Exports), digests: u8, id: u8) -> (Host, u16) {
        let mut host = Host::initialized(node, digests);
        host.id = id;
        let cqe = host.connect(0, CNTLID_DYNAMIC, 0);
        assert!(cqe.status.is_success());
        host.enable();
        (host, cqe.result.get() as u16)
    }

    /// An I/O queue, and the admin queue of its controller.
    fn io(node: &(Arc<Node>, Exports), digests: u8) -> (Host, Host) {
        Host::io_of(node, digests, 1)
    }

    /// The same as another host.
    fn io_of(node: &(Arc<Node>, Exports), digests: u8, id: u8) -> (Host, Host) {
        let (admin, cntlid) = Host::admin_of(node, digests, id);
        let mut io = Host::initialized(node, digests);
        io.id = id;
        assert!(io.connect(1, cntlid, 0).status.is_success());
        (io, admin)
    }

    fn enable(&mut self) {
        assert!(self.set_cc(0x0046_0061).status.is_success());
    }

    fn set_cc(&mut self, value: u64) -> Cqe {
        let set = PropertySet {
            opcode: AdminOpcode::FABRICS.0,
            flags: 0x40,
            fctype: FabricsType::PROPERTY_SET.0,
            ofst: property::CC.into(),
            value: value.into(),
            ..PropertySet::new_zeroed()
        };
        self.run(Sqe::read_from_bytes(set.as_bytes()).unwrap(), &[]).1
    }

    fn csts(&mut self) -> u64 {
        let get = PropertyGet {
            opcode: AdminOpcode::FABRICS.0,
            flags: 0x40,
            fctype: FabricsType::PROPERTY_GET.0,
            ofst: property::CSTS.into(),
            ..PropertyGet::new_zeroed()
        };
        self.run(Sqe::read_from_bytes(get.as_bytes()).unwrap(), &[]).1.result.get()
    }

    fn connect(&mut self, qid: u16, cntlid: u16, cattr: u8) -> Cqe {
        let (command, data) = connect(NQN, qid, cntlid, cattr);
        let data = ConnectData { hostid: [self.id; 16], ..data };
        self.run(command, data.as_bytes()).1
    }

    /// Sends a command with its data in its capsule and takes its end: data and completion.
    fn run(&mut self, mut sqe: Sqe, data: &[u8]) -> (Vec<u8>, Cqe) {
        if !data.is_empty() {
            sqe.dptr = SglDescriptor::in_capsule(0, data.len() as u32);
        }
        self.send(&mut sqe, data);
        self.end_of(sqe)
    }

    fn end_of(&mut self, sqe: Sqe) -> (Vec<u8>, Cqe) {
        let pdus = self.received();
        let mut data = Vec::new();
        for pdu in &pdus[..pdus.len() - 1] {
            assert_eq!(pdu.kind(), PduType::C2H_DATA);
            let head: Data = pdu.as_a();
            assert_eq!((head.cccid, head.datao.get() as usize), (sqe.cid, data.len()));
            data.extend(&pdu.data);
        }
        let cqe = pdus.last().unwrap().cqe();
        assert_eq!(cqe.cid, sqe.cid);
        (data, cqe)
    }

    /// Sends a command, with data in its capsule.
    fn send(&mut self, sqe: &mut Sqe, data: &[u8]) {
        self.cid += 1;
        sqe.cid = self.cid.into();
        let bytes = self.capsule(sqe, data);
        self.pump.client_sends(&bytes).unwrap();
    }

    fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        pdu(self.digests, PduType::CAPSULE_CMD, 0, sqe.as_bytes(), data)
    }

    fn h2c_data(&self, r2t: &R2t, offset: usize, data: &[u8], is_last: bool) -> Vec<u8> {
        let mut specific = Vec::new();
        specific.extend(r2t.cccid.get().to_le_bytes());
        specific.extend(r2t.ttag.get().to_le_bytes());
        specific.extend((offset as u32).to_le_bytes());
        specific.extend((data.len() as u32).to_le_bytes());
        specific.extend([0; 4]);
        pdu(self.digests, PduType::H2C_DATA, if is_last { FLAG_LAST } else { 0 }, &specific, data)
    }

    /// What the target has sent, taken apart; digests are checked.
    fn received(&mut self) -> Vec<Pdu> {
        let bytes = self.pump.sent();
        let (mut rest, mut pdus) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let (common, _) = CommonHeader::read_from_prefix(rest).unwrap();
            let (hlen, pdo, plen) = (common.hlen.into(), usize::from(common.pdo), common.plen.get() as usize);
            if common.flags & FLAG_HDGST != 0 {
                assert_eq!(digest::of(&rest[..hlen]), rest[hlen..hlen + 4]);
            }
            let mut data = if pdo > 0 { rest[pdo..plen].to_vec() } else { Vec::new() };
            if common.flags & FLAG_DDGST != 0 {
                let sent = data.split_off(data.len() - 4);
                assert_eq!(digest::of(&data)[..], sent);
            }
            pdus.push(Pdu { common, header: rest[..hlen].to_vec(), data });
            rest = &rest[plen..];
        }
        pdus
    }

    fn is_closed(&self) -> bool {
        matches!(self.pump.session.demand(), Demand::Close)
    }
}

fn ic_req(digests: u8) -> IcReq {
    let common = CommonHeader {
        pdu_type: PduType::IC_REQ.0,
        flags: 0,
        hlen: IC_LEN as u8,
        pdo: 0,
        plen: (IC_LEN as u32).into(),
    };
    IcReq { common, dgst: digests, ..IcReq::new_zeroed() }
}

fn connect(nqn: &str, qid: u16, cntlid: u16, cattr: u8) -> (Sqe, ConnectData) {
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

/// A PDU with its digests; data follows at once.
fn pdu(digests: u8, kind: PduType, flags: u8, specific: &[u8], data: &[u8]) -> Vec<u8> {
    let header_digest = if digests & DGST_HEADER != 0 { 4 } else { 0 };
    let data_digest = if digests & DGST_DATA != 0 && !data.is_empty() { 4 } else { 0 };
    let hlen = 8 + specific.len();
    let pdo = if data.is_empty() { 0 } else { hlen + header_digest };
    let common = CommonHeader {
        pdu_type: kind.0,
        flags: flags
            | if header_digest > 0 { FLAG_HDGST } else { 0 }
            | if data_digest > 0 { FLAG_DDGST } else { 0 },
        hlen: hlen as u8,
        pdo: pdo as u8,
        plen: ((hlen + header_digest + data.len() + data_digest) as u32).into(),
    };
    let mut bytes = common.as_bytes().to_vec();
    bytes.extend(specific);
    if header_digest > 0 {
        bytes.extend(digest::of(&bytes));
    }
    bytes.extend(data);
    if data_digest > 0 {
        bytes.extend(digest::of(data));
    }
    bytes
}

/// A command of an I/O queue on so many blocks.
fn nvm(opcode: NvmOpcode, nsid: u32, slba: u64, blocks: u32) -> Sqe {
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

/// A command of an admin queue that brings so much data.
fn admin(opcode: AdminOpcode, nsid: u32, cdw10: u32, cdw11: u32, room: u32) -> Sqe {
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

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

/// The status of what was refused, and that it is not worth another try.
fn refusal(cqe: &Cqe) -> Status {
    assert!(cqe.status.do_not_retry(), "{cqe:?}");
    cqe.status.status()
}
