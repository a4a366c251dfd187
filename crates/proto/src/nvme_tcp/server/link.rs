//! The transport of a controller's queue: encodes PDUs to the host.

use crate::digest;
use crate::driver::outbox::Outbox;
use crate::fabrics::controller::{CommandSlot, DataPlace, Descriptor, FabricsTransport};
use crate::nvme::NvmeOutcome;
use crate::nvme_tcp::pdu::{HostViolation, MAXH2CDATA, NvmeTcpDigests};
use blockmux_volume::{Crc32c, Pool, Seg, SgList};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{SglSubtype, SglType, Sqe};
use blockmux_wire::nvmeof::tcp::*;
use zerocopy::{FromZeros, IntoBytes};

/// The data of one H2CData.
#[derive(Clone, Copy)]
pub(super) struct ArrivingH2cData {
    pub(super) slot: usize,
    /// Length in bytes.
    pub(super) len: usize,
}

/// What the next bytes of the stream are.
pub(super) enum AwaitedNvmePdu {
    /// ICReq, of which this many bytes are needed.
    IcReq(usize),
    /// A PDU, of which this many contiguous bytes are needed.
    Head(usize),
    /// The data of an H2CData with its digest, contiguous in the receive buffer.
    Data(ArrivingH2cData),
    /// The data of an H2CData, received directly into its memory.
    Place(ArrivingH2cData, Seg),
    /// The digest of placed data.
    Tail(ArrivingH2cData, Crc32c),
}

/// A connection of a host: negotiated parameters, position in the host's byte stream, and PDUs to
/// the host.
pub struct TcpTargetLink {
    pub(super) outbox: Outbox,
    pub(super) digests: NvmeTcpDigests,
    pub(super) awaiting: AwaitedNvmePdu,
    /// Longest in-capsule data, in bytes.
    pub(super) in_capsule: usize,
    /// Alignment of data to the host (HPDA), in bytes.
    alignment: usize,
    /// Bytes of headers since the outbox was last empty.
    heads: usize,
    pool: Pool,
}

/// Progress of a command's data transfer.
#[derive(Clone, Copy, Default)]
pub struct DataProgress {
    /// Received data, in bytes.
    pub(super) received: usize,
    /// Whether a data digest was wrong.
    pub(super) is_damaged: bool,
}

impl TcpTargetLink {
    /// Creates the transport. `in_capsule` applies to I/O queues.
    pub(super) fn new(in_capsule: usize, pool: Pool) -> TcpTargetLink {
        TcpTargetLink {
            outbox: Outbox::default(),
            digests: NvmeTcpDigests::default(),
            awaiting: AwaitedNvmePdu::IcReq(COMMON_HEADER_LEN),
            in_capsule: in_capsule.max(ADMIN_IN_CAPSULE),
            alignment: 4,
            heads: 0,
            pool,
        }
    }

    /// Whether the host reads its completions, within the limit of [`UNREAD_HEADS`].
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        self.outbox.is_empty() || self.heads < UNREAD_HEADS
    }

    /// Whether the stream is between two PDUs, where it may end.
    pub(super) fn is_between_pdus(&self) -> bool {
        matches!(self.awaiting, AwaitedNvmePdu::Head(_) | AwaitedNvmePdu::IcReq(_))
    }

    /// Sends ICResp and sets the negotiated parameters.
    pub(super) fn ic_resp(&mut self, request: &IcReq) {
        let response = IcResp {
            common: head(PduType::IC_RESP, 0, IC_LEN, 0, IC_LEN),
            pfv: 0.into(),
            cpda: 0,
            dgst: request.dgst & (DGST_HEADER | DGST_DATA),
            maxh2cdata: MAXH2CDATA.into(),
            ..IcResp::new_zeroed()
        };
        self.outbox.push_head(response.as_bytes());
        self.digests =
            NvmeTcpDigests { header: response.dgst & DGST_HEADER != 0, data: response.dgst & DGST_DATA != 0 };
        self.alignment = usize::from(request.hpda).saturating_add(1).saturating_mul(4);
    }

    /// Sends C2HTermReq; `pdu` is as much of the offending PDU as was received.
    pub(super) fn termination(&mut self, violation: &HostViolation, pdu: &[u8]) {
        let most = TERM_REQ_MAX.saturating_sub(DATA_LEN);
        let begin = pdu.get(..most.min(pdu.len())).unwrap_or_default();
        let request = TermReq {
            common: head(PduType::C2H_TERM_REQ, 0, DATA_LEN, 0, DATA_LEN.saturating_add(begin.len())),
            fes: violation.status.0.into(),
            fei: violation.information.into(),
            reserved: [0; 10],
        };
        self.outbox.push_head(request.as_bytes());
        self.outbox.push_head(begin);
    }

    #[inline]
    fn data(&mut self, cid: u16, data: SgList, is_silent: bool) {
        let len = data.len();
        let head_len = DATA_LEN.saturating_add(self.digests.header_len());
        let pdo = head_len.checked_next_multiple_of(self.alignment).unwrap_or(head_len);
        let plen = pdo.saturating_add(len).saturating_add(self.digests.data_len());
        let flags = FLAG_LAST
            | if is_silent { FLAG_SUCCESS } else { 0 }
            | if self.digests.header { FLAG_HDGST } else { 0 }
            | if self.digests.data { FLAG_DDGST } else { 0 };
        let pdu = Data {
            common: head(PduType::C2H_DATA, flags, DATA_LEN, pdo, plen),
            cccid: cid.into(),
            ttag: 0.into(),
            datao: 0.into(),
            datal: (len as u32).into(),
            reserved: [0; 4],
        };
        self.push(pdu.as_bytes());
        if pdo > head_len {
            let padding = [0; 128];
            self.outbox.push_head(padding.get(..pdo.saturating_sub(head_len)).unwrap_or_default());
        }
        if !self.digests.data {
            return self.outbox.take_payload(data);
        }
        let crc = digest::push(&mut self.outbox, &self.pool, &data);
        self.outbox.push_head(&crc.to_le_bytes());
    }

    /// Flags and PLEN of a PDU without data.
    #[inline]
    fn plain(&self, hlen: usize) -> (u8, usize) {
        let flags = if self.digests.header { FLAG_HDGST } else { 0 };
        (flags, hlen.saturating_add(self.digests.header_len()))
    }

    /// Sends a header with its digest.
    #[inline]
    fn push(&mut self, header: &[u8]) {
        if self.outbox.is_empty() {
            self.heads = 0;
        }
        self.heads = self.heads.saturating_add(header.len());
        self.outbox.push_head(header);
        if self.digests.header {
            self.outbox.push_head(&digest::of(header));
        }
    }
}

impl FabricsTransport for TcpTargetLink {
    const NAME: &'static str = "nvme-tcp";

    type Transfer = DataProgress;

    #[inline]
    fn descriptor(sqe: &Sqe) -> Descriptor<DataProgress> {
        let dptr = &sqe.dptr;
        let place = match (dptr.kind(), dptr.subtype()) {
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => Ok(DataPlace::Capsule(dptr.address.get())),
            (SglType::TRANSPORT_DATA_BLOCK, SglSubtype::TRANSPORT) => Ok(DataPlace::Host),
            _ => Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        };
        Descriptor { len: dptr.length.get() as usize, place, transfer: DataProgress::default() }
    }

    #[inline]
    fn needs_memory(len: usize) -> bool {
        len > MAX_BORROWED_PAYLOAD
    }

    /// Requests all of a command's data by one R2T.
    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<DataProgress>) {
        let (flags, plen) = self.plain(DATA_LEN);
        let r2t = NvmeTcpR2t {
            common: head(PduType::R2T, flags, DATA_LEN, 0, plen),
            cccid: command.sqe.cid,
            ttag: (slot as u16).into(),
            r2to: 0.into(),
            r2tl: (command.data_out as u32).into(),
            reserved: [0; 4],
        };
        self.push(r2t.as_bytes());
    }

    /// Sends data and completion. A success may be implied by the last C2HData.
    #[inline]
    fn complete(&mut self, cid: u16, _transfer: DataProgress, mut outcome: NvmeOutcome, sqhd: Option<u16>) {
        // TCP Transport 1.0 §3.3.2.1: allowed only if the completion carries neither SQHD nor a
        // result.
        let is_silent = sqhd.is_none() && outcome.result == 0 && outcome.status.is_success();
        if !outcome.data.is_empty() {
            self.data(cid, std::mem::take(&mut outcome.data), is_silent);
            if is_silent {
                return;
            }
        }
        let (flags, len) = self.plain(CAPSULE_RESP_LEN);
        let common = head(PduType::CAPSULE_RESP, flags, CAPSULE_RESP_LEN, 0, len);
        self.push(CapsuleResp { common, cqe: outcome.cqe(cid, sqhd) }.as_bytes());
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.outbox.len()
    }
}

#[inline]
fn head(kind: PduType, flags: u8, hlen: usize, pdo: usize, plen: usize) -> CommonHeader {
    // All values are bounded: a header has at most 128 bytes, and so has PDO.
    CommonHeader { pdu_type: kind.0, flags, hlen: hlen as u8, pdo: pdo as u8, plen: (plen as u32).into() }
}

/// Most bytes of headers that a host may leave unread.
const UNREAD_HEADS: usize = 1 << 20;
/// Data of up to this many bytes is received into the receive buffer: one large receive for many
/// PDUs costs less than one for each. With its digest it is at most `MAX_DEMAND`.
pub(super) const MAX_BORROWED_PAYLOAD: usize = 64 << 10;
/// Longest in-capsule data on the admin queue, in bytes (TCP Transport 1.0 §3.3.1).
const ADMIN_IN_CAPSULE: usize = 8192;
