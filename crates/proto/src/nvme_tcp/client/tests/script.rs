//! A scripted controller, whose bytes a driver delivers in pieces of any size.

use crate::digest;
use crate::driver::session::ProtocolError;
pub(super) use crate::fabrics::host::testing::*;
use crate::nvme_tcp::client::*;
use crate::testing::{Driver, Streams};
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::feature::FeatureId;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};
use blockmux_wire::nvme::{Cqe, SglDescriptor, Sqe};
use blockmux_wire::nvmeof::tcp::*;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes, transmute};

/// A PDU of a host.
#[derive(Debug, Clone)]
pub(super) struct HostPdu {
    pub(super) common: CommonHeader,
    pub(super) header: Vec<u8>,
    pub(super) data: Vec<u8>,
}

impl HostPdu {
    pub(super) fn kind(&self) -> PduType {
        PduType(self.common.pdu_type)
    }

    pub(super) fn as_a<T: FromBytes>(&self) -> T {
        T::read_from_bytes(&self.header).unwrap()
    }

    pub(super) fn sqe(&self) -> Sqe {
        assert_eq!(self.kind(), PduType::CAPSULE_CMD);
        self.as_a::<CapsuleCmd>().sqe
    }

    pub(super) fn cid(&self) -> u16 {
        self.sqe().cid.get()
    }

    pub(super) fn opcode(&self) -> NvmOpcode {
        NvmOpcode(self.sqe().opcode)
    }

    /// First block, number of blocks, and the other flags of CDW12.
    pub(super) fn range(&self) -> (u64, u32, u32) {
        let sqe = self.sqe();
        (sqe.slba(), (sqe.cdw12.get() & 0xffff) + 1, sqe.cdw12.get() & !0xffff)
    }
}

/// Negotiated parameters of the scripted controller, which encodes and decodes PDUs by them.
#[derive(Clone, Copy)]
pub(super) struct WireFormat {
    pub(super) digests: Digests,
    pub(super) cpda: u8,
    pub(super) maxh2cdata: u32,
}

pub(super) const PLAIN: WireFormat =
    WireFormat { digests: Digests { header: false, data: false }, cpda: 0, maxh2cdata: 4096 };
pub(super) const BOTH: WireFormat =
    WireFormat { digests: Digests { header: true, data: true }, cpda: 3, maxh2cdata: 4096 };

impl WireFormat {
    pub(super) fn ic_resp(self) -> Vec<u8> {
        let response = IcResp {
            common: common(PduType::IC_RESP, IC_LEN, IC_LEN),
            cpda: self.cpda,
            dgst: u8::from(self.digests.header) | u8::from(self.digests.data) << 1,
            maxh2cdata: self.maxh2cdata.into(),
            ..IcResp::new_zeroed()
        };
        response.as_bytes().to_vec()
    }

    /// A header with its digest.
    fn headed(self, header: &[u8]) -> Vec<u8> {
        let mut bytes = header.to_vec();
        if self.digests.header {
            bytes[1] |= FLAG_HDGST;
            let sum = digest::of(&bytes);
            bytes.extend(sum);
        }
        bytes
    }

    fn head_len(self) -> usize {
        DATA_LEN + if self.digests.header { 4 } else { 0 }
    }

    pub(super) fn response(self, cid: u16, status: StatusField, result: u64) -> Vec<u8> {
        let cqe = Cqe { result: result.into(), cid: cid.into(), status, ..Cqe::new_zeroed() };
        let len = self.head_len();
        self.headed(CapsuleResp { common: common(PduType::CAPSULE_RESP, DATA_LEN, len), cqe }.as_bytes())
    }

    pub(super) fn good(self, cid: u16) -> Vec<u8> {
        self.response(cid, StatusField::new(NvmeStatus::SUCCESSFUL_COMPLETION), 0)
    }

    pub(super) fn data(self, cid: u16, from: u32, data: &[u8], flags: u8) -> Vec<u8> {
        let tail = if self.digests.data { 4 } else { 0 };
        let mut head = Data {
            common: common(PduType::C2H_DATA, DATA_LEN, self.head_len() + data.len() + tail),
            cccid: cid.into(),
            datao: from.into(),
            datal: (data.len() as u32).into(),
            ..Data::new_zeroed()
        };
        head.common.flags = flags | if tail > 0 { FLAG_DDGST } else { 0 };
        head.common.pdo = self.head_len() as u8;
        let mut bytes = self.headed(head.as_bytes());
        bytes.extend(data);
        if tail > 0 {
            bytes.extend(digest::of(data));
        }
        bytes
    }

    pub(super) fn r2t(self, cid: u16, ttag: u16, from: u32, len: u32) -> Vec<u8> {
        let r2t = NvmeTcpR2t {
            common: common(PduType::R2T, DATA_LEN, self.head_len()),
            cccid: cid.into(),
            ttag: ttag.into(),
            r2to: from.into(),
            r2tl: len.into(),
            ..NvmeTcpR2t::new_zeroed()
        };
        self.headed(r2t.as_bytes())
    }

    /// Decodes a host's PDUs and checks their digests.
    pub(super) fn pdus(self, mut bytes: &[u8]) -> Vec<HostPdu> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let (common, _) = CommonHeader::read_from_prefix(bytes).unwrap();
            let (pdu, rest) = bytes.split_at(common.plen.get() as usize);
            bytes = rest;
            let (hlen, pdo) = (usize::from(common.hlen), usize::from(common.pdo));
            let header = pdu[..hlen].to_vec();
            let has_digests = !matches!(PduType(common.pdu_type), PduType::IC_REQ | PduType::H2C_TERM_REQ);
            if has_digests {
                assert_eq!(common.flags & FLAG_HDGST != 0, self.digests.header);
            }
            if has_digests && self.digests.header {
                assert_eq!(pdu[hlen..hlen + 4], digest::of(&header));
            }
            let mut data = Vec::new();
            if pdo > 0 {
                assert_eq!(pdo % (4 * (usize::from(self.cpda) + 1)), 0);
                let end = pdu.len() - if self.digests.data { 4 } else { 0 };
                data = pdu[pdo..end].to_vec();
                assert_eq!(common.flags & FLAG_DDGST != 0, self.digests.data);
                if self.digests.data {
                    assert_eq!(pdu[end..], digest::of(&data));
                }
            } else if !has_digests {
                data = pdu[hlen..].to_vec();
            }
            all.push(HostPdu { common, header, data });
        }
        all
    }
}

pub(super) fn common(kind: PduType, hlen: usize, plen: usize) -> CommonHeader {
    CommonHeader { pdu_type: kind.0, flags: 0, hlen: hlen as u8, pdo: 0, plen: (plen as u32).into() }
}

/// An I/O queue's session, its driver, and the scripted controller.
pub(super) struct ScriptedQueue {
    pub(super) driver: Driver<NvmeTcpQueueSession>,
    pub(super) format: WireFormat,
}

impl ScriptedQueue {
    /// A queue that has sent ICReq and received nothing.
    pub(super) fn fresh(format: WireFormat, namespace: NamespaceInfo, entries: u16) -> ScriptedQueue {
        ScriptedQueue::fresh_of(format, controller(), namespace, entries)
    }

    fn fresh_of(
        format: WireFormat,
        controller: ControllerInfo,
        namespace: NamespaceInfo,
        entries: u16,
    ) -> ScriptedQueue {
        let config =
            QueueConfig { names: names(), credentials: None, controller, namespace, queues: 1, entries };
        let session = NvmeTcpQueueSession::new(config, format.digests, Pool::new(64 << 20), Instant::now());
        ScriptedQueue { driver: Driver::of(session, usize::MAX), format }
    }

    /// A connected queue.
    pub(super) fn with(format: WireFormat, namespace: NamespaceInfo, entries: u16) -> ScriptedQueue {
        ScriptedQueue::of(format, controller(), namespace, entries)
    }

    /// A queue connected to this controller.
    pub(super) fn of(
        format: WireFormat,
        controller: ControllerInfo,
        namespace: NamespaceInfo,
        entries: u16,
    ) -> ScriptedQueue {
        let mut queue = ScriptedQueue::fresh_of(format, controller, namespace, entries);
        assert_eq!(queue.sent()[0].kind(), PduType::IC_REQ);
        queue.feed(&format.ic_resp()).unwrap();
        let [connect] = queue.sent().try_into().unwrap();
        assert_eq!(connect.data.len(), 1024);
        queue.feed(&format.response(connect.cid(), StatusField::default(), 5)).unwrap();
        queue
    }

    pub(super) fn ready(format: WireFormat) -> ScriptedQueue {
        ScriptedQueue::with(format, namespace(), 128)
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.driver.feed(bytes)
    }

    pub(super) fn sent(&mut self) -> Vec<HostPdu> {
        self.format.pdus(&self.driver.sent())
    }

    /// The only command that was sent.
    pub(super) fn command(&mut self) -> HostPdu {
        let [command] = self.sent().try_into().unwrap();
        command
    }

    pub(super) fn write(&mut self, tag: u64, offset: u64, data: &[u8]) {
        let op = blockmux_volume::Op::Write { fua: false };
        self.driver.submit(tag, op, offset, data.len() as u64, Some(SgList::one(Seg::from_slice(data))));
    }
}

/// Runs an admin queue against a controller until it sends no more commands; returns all opcodes.
pub(super) fn bring_up(
    driver: &mut Driver<NvmeTcpAdminSession>,
    format: WireFormat,
    subsystem: &mut ScriptedSubsystem,
) -> Vec<u8> {
    let mut opcodes = Vec::new();
    loop {
        let sent = format.pdus(&driver.sent());
        if sent.is_empty() {
            return opcodes;
        }
        for pdu in sent {
            if pdu.kind() == PduType::IC_REQ {
                driver.feed(&format.ic_resp()).unwrap();
                continue;
            }
            let sqe = pdu.sqe();
            opcodes.push(sqe.opcode);
            if sqe.opcode == AdminOpcode::FABRICS.0 && sqe.nsid.get() == 1 {
                assert_eq!((sqe.dptr, pdu.data.len()), (SglDescriptor::in_capsule(0, 1024), 1024));
            }
            if sqe.opcode == AdminOpcode::ASYNC_EVENT_REQUEST.0 {
                subsystem.listening = Some(sqe.cid.get());
                continue;
            }
            if sqe.opcode == AdminOpcode::GET_LOG_PAGE.0 && subsystem.is_silent_about_logs {
                continue;
            }
            if sqe.cdw10.get() == u32::from(FeatureId::HOST_BEHAVIOR_SUPPORT.0) {
                subsystem.behavior = Some(pdu.data.clone());
            }
            let (data, status, result) = subsystem.answer(&sqe);
            if !data.is_empty() {
                driver.feed(&format.data(sqe.cid.get(), 0, &data, FLAG_LAST)).unwrap();
            }
            // The shutdown at the end is not completed.
            if !driver.is_closing() {
                driver.feed(&format.response(sqe.cid.get(), status, result)).unwrap();
            }
        }
    }
}

/// Runs a trace with its bytes split in every relevant way.
pub(super) fn at_every_split(trace: impl Fn(usize)) {
    (1..=DATA_LEN + 8).for_each(&trace);
    trace(usize::MAX);
}

/// Fatal error status and information of the H2CTermReq that the session sent last.
pub(super) fn termination<S: Streams>(
    driver: &mut Driver<S>,
    format: WireFormat,
) -> Option<(FatalError, u32)> {
    let sent = format.pdus(&driver.sent());
    let last = sent.last().filter(|pdu| pdu.kind() == PduType::H2C_TERM_REQ)?;
    let head: [u8; DATA_LEN] = last.header.as_slice().try_into().unwrap();
    let request: TermReq = transmute!(head);
    assert_eq!(last.data.len(), DATA_LEN);
    Some((FatalError(request.fes.get()), request.fei.get()))
}
