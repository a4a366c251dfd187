//! Whole connections as packet traces: the PDUs of the host and those of the target.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod cuts;
mod hostile;
mod transfer;

use super::NvmeTcpTargetSession;
use crate::digest;
use crate::driver::session::{Demand, StreamSession};
use crate::exports::Exports;
use crate::fabrics::controller::node::NvmeNode;
use crate::fabrics::controller::testing::*;
use crate::testing::Pump;
use blockmux_volume::Pool;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Cqe, SglDescriptor, Sqe};
use blockmux_wire::nvmeof::fabrics::*;
use blockmux_wire::nvmeof::tcp::*;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A PDU of the target.
#[derive(Debug, Clone)]
struct ControllerPdu {
    common: CommonHeader,
    header: Vec<u8>,
    data: Vec<u8>,
}

impl ControllerPdu {
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

/// A scripted host: sends PDUs and decodes those of the target.
struct TcpTestHost {
    pump: Pump<NvmeTcpTargetSession>,
    digests: u8,
    cid: u16,
}

impl TcpTestHost {
    /// A host that is connected and has sent nothing.
    fn new((node, exports): &(Arc<NvmeNode>, Exports)) -> TcpTestHost {
        TcpTestHost::with_pool((node, exports), Pool::new(usize::MAX))
    }

    fn with_pool((node, exports): (&Arc<NvmeNode>, &Exports), pool: Pool) -> TcpTestHost {
        let now = Instant::now();
        let pump = Pump::new(NvmeTcpTargetSession::new(node.clone(), pool, now), exports);
        TcpTestHost { pump, digests: 0, cid: 0 }
    }

    /// A host on an initialized connection.
    fn initialized(node: &(Arc<NvmeNode>, Exports), digests: u8) -> TcpTestHost {
        let mut host = TcpTestHost::new(node);
        let answer = host.pump.exchange(ic_req(digests).as_bytes());
        let response = IcResp::read_from_bytes(&answer).unwrap();
        assert_eq!((response.dgst, response.maxh2cdata.get()), (digests, 1 << 20));
        host.digests = digests;
        host
    }

    /// A host with an enabled controller, and the controller's identifier.
    fn admin(node: &(Arc<NvmeNode>, Exports), digests: u8) -> (TcpTestHost, u16) {
        let mut host = TcpTestHost::initialized(node, digests);
        let cqe = host.connect(0, CNTLID_DYNAMIC, 0);
        assert!(cqe.status.is_success());
        host.enable();
        (host, cqe.result.get() as u16)
    }

    /// An I/O queue, and the admin queue of its controller.
    fn io(node: &(Arc<NvmeNode>, Exports), digests: u8) -> (TcpTestHost, TcpTestHost) {
        let (admin, cntlid) = TcpTestHost::admin(node, digests);
        let mut io = TcpTestHost::initialized(node, digests);
        assert!(io.connect(1, cntlid, 0).status.is_success());
        (io, admin)
    }

    fn enable(&mut self) {
        assert!(self.run(set_cc(CC_ENABLED), &[]).1.status.is_success());
    }

    fn connect(&mut self, qid: u16, cntlid: u16, cattr: u8) -> Cqe {
        let (command, data) = connect(NQN, qid, cntlid, cattr);
        self.run(command, data.as_bytes()).1
    }

    /// Sends a command with in-capsule data and takes its result: data and completion.
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

    /// Sends a command with in-capsule data.
    fn send(&mut self, sqe: &mut Sqe, data: &[u8]) {
        self.cid += 1;
        sqe.cid = self.cid.into();
        let bytes = self.capsule(sqe, data);
        self.pump.client_sends(&bytes).unwrap();
    }

    fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        pdu(self.digests, PduType::CAPSULE_CMD, 0, sqe.as_bytes(), data)
    }

    fn h2c_data(&self, r2t: &NvmeTcpR2t, offset: usize, data: &[u8], is_last: bool) -> Vec<u8> {
        let mut specific = Vec::new();
        specific.extend(r2t.cccid.get().to_le_bytes());
        specific.extend(r2t.ttag.get().to_le_bytes());
        specific.extend((offset as u32).to_le_bytes());
        specific.extend((data.len() as u32).to_le_bytes());
        specific.extend([0; 4]);
        pdu(self.digests, PduType::H2C_DATA, if is_last { FLAG_LAST } else { 0 }, &specific, data)
    }

    /// Decodes the PDUs that the target has sent, and checks their digests.
    fn received(&mut self) -> Vec<ControllerPdu> {
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
            pdus.push(ControllerPdu { common, header: rest[..hlen].to_vec(), data });
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

/// Encodes a PDU with its digests and without padding.
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
