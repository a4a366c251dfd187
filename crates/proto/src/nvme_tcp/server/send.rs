//! PDUs to the host.

use crate::digest;
use crate::nvme::Outcome;
use crate::nvme_tcp::pdu::{Digests, MAXH2CDATA, Violation};
use crate::outbox::Outbox;
use blockmux_volume::{Pool, SgList};
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvmeof::tcp::*;
use zerocopy::{FromZeros, IntoBytes};

/// Makes PDUs as the connection has agreed on them.
pub(super) struct Sender {
    pub(super) digests: Digests,
    /// Data to the host begins at a multiple of so many bytes.
    alignment: usize,
    /// Entries of the submission queue.
    queue_size: u16,
    /// How far it was read; `None`: the host does not want to know.
    sqhd: Option<u16>,
    /// Bytes without payload since the outbox was last empty.
    heads: usize,
    pool: Pool,
}

impl Sender {
    pub(super) fn new(pool: Pool) -> Sender {
        let digests = Digests::default();
        Sender { digests, alignment: 4, queue_size: u16::MAX, sqhd: Some(0), heads: 0, pool }
    }

    /// The host reads its answers, more or less.
    #[inline]
    pub(super) fn has_room(&self, outbox: &Outbox) -> bool {
        outbox.is_empty() || self.heads < UNREAD_HEADS
    }

    /// The answer to ICReq, and all that follows from it.
    pub(super) fn ic_resp(&mut self, outbox: &mut Outbox, request: &IcReq) {
        let response = IcResp {
            common: head(PduType::IC_RESP, 0, IC_LEN, 0, IC_LEN),
            pfv: 0.into(),
            cpda: 0,
            dgst: request.dgst & (DGST_HEADER | DGST_DATA),
            maxh2cdata: MAXH2CDATA.into(),
            ..IcResp::new_zeroed()
        };
        outbox.push_head(response.as_bytes());
        self.digests =
            Digests { header: response.dgst & DGST_HEADER != 0, data: response.dgst & DGST_DATA != 0 };
        self.alignment = usize::from(request.hpda).saturating_add(1).saturating_mul(4);
    }

    /// A queue of that many entries is connected.
    pub(super) fn on_connected(&mut self, queue_size: u16, has_flow_control: bool) {
        self.queue_size = queue_size.max(1);
        self.sqhd = has_flow_control.then_some(0);
    }

    /// The end of a command: its data, and its completion unless success goes without saying.
    #[inline]
    pub(super) fn outcome(&mut self, outbox: &mut Outbox, cid: u16, outcome: &Outcome) {
        // TCP Transport 1.0 §3.3.2.1: only where SQHD is not told, and nothing else is.
        let is_silent = self.sqhd.is_none() && outcome.result == 0 && outcome.status.is_success();
        if !outcome.data.is_empty() {
            self.data(outbox, cid, &outcome.data, is_silent);
            if is_silent {
                return;
            }
        }
        let sqhd = match &mut self.sqhd {
            Some(sqhd) => {
                *sqhd = sqhd.wrapping_add(1).checked_rem(self.queue_size).unwrap_or_default();
                *sqhd
            }
            None => u16::MAX,
        };
        let cqe = Cqe {
            result: outcome.result.into(),
            sqhd: sqhd.into(),
            sqid: 0.into(),
            cid: cid.into(),
            status: outcome.status,
        };
        let (flags, len) = self.plain(CAPSULE_RESP_LEN);
        let common = head(PduType::CAPSULE_RESP, flags, CAPSULE_RESP_LEN, 0, len);
        self.push(outbox, CapsuleResp { common, cqe }.as_bytes());
    }

    /// Asks for all of a command's data.
    pub(super) fn r2t(&mut self, outbox: &mut Outbox, cid: u16, ttag: u16, len: usize) {
        let (flags, plen) = self.plain(DATA_LEN);
        let r2t = R2t {
            common: head(PduType::R2T, flags, DATA_LEN, 0, plen),
            cccid: cid.into(),
            ttag: ttag.into(),
            r2to: 0.into(),
            r2tl: (len as u32).into(),
            reserved: [0; 4],
        };
        self.push(outbox, r2t.as_bytes());
    }

    /// Ends the connection; `pdu` is what was wrong, as far as it has come.
    pub(super) fn termination(&self, outbox: &mut Outbox, violation: &Violation, pdu: &[u8]) {
        let most = TERM_REQ_MAX.saturating_sub(DATA_LEN);
        let begin = pdu.get(..most.min(pdu.len())).unwrap_or_default();
        let request = TermReq {
            common: head(PduType::C2H_TERM_REQ, 0, DATA_LEN, 0, DATA_LEN.saturating_add(begin.len())),
            fes: violation.status.0.into(),
            fei: violation.information.into(),
            reserved: [0; 10],
        };
        outbox.push_head(request.as_bytes());
        outbox.push_head(begin);
    }

    #[inline]
    fn data(&mut self, outbox: &mut Outbox, cid: u16, data: &SgList, is_silent: bool) {
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
        self.push(outbox, pdu.as_bytes());
        let padding = [0; 128];
        outbox.push_head(padding.get(..pdo.saturating_sub(head_len)).unwrap_or_default());
        if !self.digests.data {
            return outbox.push_payload(data);
        }
        let crc = digest::push(outbox, &self.pool, data);
        outbox.push_head(&crc.to_le_bytes());
    }

    /// Flags and PLEN of a PDU without data.
    #[inline]
    fn plain(&self, hlen: usize) -> (u8, usize) {
        let flags = if self.digests.header { FLAG_HDGST } else { 0 };
        (flags, hlen.saturating_add(self.digests.header_len()))
    }

    /// A header with its digest.
    #[inline]
    fn push(&mut self, outbox: &mut Outbox, header: &[u8]) {
        if outbox.is_empty() {
            self.heads = 0;
        }
        self.heads = self.heads.saturating_add(header.len());
        outbox.push_head(header);
        if self.digests.header {
            outbox.push_head(&digest::of(header));
        }
    }
}

#[inline]
fn head(kind: PduType, flags: u8, hlen: usize, pdo: usize, plen: usize) -> CommonHeader {
    // All of these have their bounds: a header is at most 128 bytes, and so is PDO.
    CommonHeader { pdu_type: kind.0, flags, hlen: hlen as u8, pdo: pdo as u8, plen: (plen as u32).into() }
}

/// Answers without data that a host may leave unread, in bytes.
const UNREAD_HEADS: usize = 1 << 20;
