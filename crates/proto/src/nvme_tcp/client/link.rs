//! The transport of one host queue: negotiated parameters and position in the controller's byte
//! stream.

use super::Digests;
use super::pdu::{self, ControllerViolation, PduHeader};
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError};
use crate::fabrics::host::{Commands, HostTransport, NvmeRequest};
use crate::slots::SlotKey;
use blockmux_volume::{Chunk, Crc32c, Pool, SgList};
use blockmux_wire::nvmeof::fabrics::CONNECT_DATA_LEN;
use blockmux_wire::nvmeof::tcp::{
    COMMON_HEADER_LEN, CommonHeader, DATA_LEN, DGST_DATA, DGST_HEADER, DIGEST_LEN, FatalError, IC_LEN, IcReq,
    IcResp, MAXH2CDATA_MIN, PDA_MAX, PduType, TermReq,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes, transmute_ref};

/// A connection of one queue.
pub struct TcpHostLink {
    pub(super) outbox: Outbox,
    pub(super) parameters: TcpConnectionParameters,
    pub(super) stream_state: NvmeStreamState,
    pub(super) pool: Pool,
    /// Whether ICResp was received.
    pub(super) is_open: bool,
    /// The header of the current PDU, for a H2CTermReq.
    pub(super) last_header: PduHeader,
}

/// Negotiated parameters of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TcpConnectionParameters {
    pub(super) digests: Digests,
    /// Alignment of data to the controller (CPDA), in bytes.
    pub(super) alignment: usize,
    /// Longest data of one H2CData (MAXH2CDATA), in bytes.
    pub(super) max_h2c_data: u32,
    /// Longest in-capsule data, in bytes.
    pub(super) in_capsule: u32,
}

/// Position in the controller's byte stream.
pub(super) enum NvmeStreamState {
    /// At the beginning of a PDU, of which this many contiguous bytes are needed.
    Head(usize),
    /// In a long C2HData, whose data is received into `place`.
    Placing { header: PduHeader, key: SlotKey, place: SgList },
    /// Behind that data, before its digest.
    Tail { header: PduHeader, key: SlotKey, crc: Crc32c },
}

impl TcpHostLink {
    #[inline]
    pub(super) fn demand(&self) -> Demand {
        match &self.stream_state {
            NvmeStreamState::Head(need) => Demand::Bytes(*need),
            NvmeStreamState::Placing { place, .. } => Demand::Place(place.clone()),
            NvmeStreamState::Tail { .. } => Demand::Bytes(DIGEST_LEN),
        }
    }

    /// Handles the PDUs in `input`; returns the number of consumed bytes.
    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        input: &Chunk,
        commands: &mut impl Commands,
    ) -> Result<usize, ProtocolError> {
        let mut at = 0;
        if !self.is_open {
            match self.open(input.unread()) {
                Ok(None) => return Ok(0),
                Ok(Some(len)) => at = len,
                Err(violation) => return Err(self.terminate(violation)),
            }
        }
        self.receive(input, at, commands).map_err(|violation| self.terminate(violation))
    }

    /// Handles the end of placed data ([`Demand::Place`]).
    pub(super) fn on_placed(&mut self, commands: &mut impl Commands) -> Result<(), ProtocolError> {
        self.placed(commands).map_err(|violation| self.terminate(violation))
    }

    /// Reads ICResp; returns its length in bytes, if it was received.
    fn open(&mut self, bytes: &[u8]) -> Result<Option<usize>, ControllerViolation> {
        let reference = "TCP Transport §3.6.2.3, ICResp";
        if let Some(header) = bytes.first_chunk() {
            self.last_header = *header;
        }
        match CommonHeader::read_from_prefix(bytes).map(|(common, _)| PduType(common.pdu_type)) {
            Ok(PduType::IC_RESP) | Err(_) => {}
            Ok(PduType::C2H_TERM_REQ) => return Err(pdu::ended(transmute_ref!(&self.last_header))),
            Ok(_) => {
                let fes = FatalError::PDU_SEQUENCE_ERROR;
                return Err(ControllerViolation::new("sent another PDU before ICResp", fes, reference));
            }
        }
        let Ok((response, _)) = IcResp::read_from_prefix(bytes) else {
            self.stream_state = NvmeStreamState::Head(IC_LEN);
            return Ok(None);
        };
        let common = response.common;
        if usize::from(common.hlen) != IC_LEN || common.plen.get() as usize != IC_LEN {
            return Err(ControllerViolation::field("sent an ICResp of a wrong length", 2, reference));
        }
        if response.pfv.get() != 0 {
            let fes = FatalError::UNSUPPORTED_PARAMETER;
            let what = "sent an ICResp of an unsupported PDU format version";
            return Err(ControllerViolation {
                fei: COMMON_HEADER_LEN as u32,
                ..ControllerViolation::new(what, fes, reference)
            });
        }
        let has = |bit| response.dgst & bit != 0;
        let digests = Digests { header: has(DGST_HEADER), data: has(DGST_DATA) };
        if digests != self.parameters.digests {
            return Err(ControllerViolation::field("did not accept the requested digests", 11, reference));
        }
        if response.cpda > PDA_MAX {
            return Err(ControllerViolation::field(
                "wants data aligned to more than 128 bytes",
                10,
                reference,
            ));
        }
        let max_h2c_data = response.maxh2cdata.get();
        if max_h2c_data < MAXH2CDATA_MIN || max_h2c_data & 3 != 0 {
            return Err(ControllerViolation::field(
                "has a MAXH2CDATA below 4096 bytes or not a multiple of 4",
                12,
                reference,
            ));
        }
        self.parameters.alignment = usize::from(response.cpda).saturating_add(1).saturating_mul(4);
        self.parameters.max_h2c_data = max_h2c_data;
        (self.is_open, self.stream_state) = (true, NvmeStreamState::Head(DATA_LEN));
        Ok(Some(IC_LEN))
    }

    /// Sends H2CTermReq as the last PDU, and returns the error.
    #[cold]
    pub(super) fn terminate(&mut self, violation: ControllerViolation) -> ProtocolError {
        if let Some(fes) = violation.fes {
            let len = DATA_LEN.saturating_add(self.last_header.len());
            let mut request = TermReq {
                common: common(PduType::H2C_TERM_REQ, DATA_LEN),
                fes: fes.0.into(),
                fei: violation.fei.into(),
                ..TermReq::new_zeroed()
            };
            request.common.plen = (len as u32).into();
            self.outbox.push_head(request.as_bytes());
            self.outbox.push_head(&self.last_header);
        }
        violation.error()
    }
}

impl HostTransport for TcpHostLink {
    type Options = Digests;

    const ERROR_HANDLING: &'static str = "TCP Transport §3.5, Error Handling Model";

    fn new(digests: Digests, in_capsule: Option<u32>, pool: Pool) -> TcpHostLink {
        // The data of Connect is always in the capsule (NVMe Base 2.0 §6.3).
        let in_capsule = in_capsule.map_or(ADMIN_IN_CAPSULE, |len| len.max(CONNECT_DATA_LEN as u32));
        TcpHostLink {
            outbox: Outbox::default(),
            parameters: TcpConnectionParameters {
                digests,
                alignment: 4,
                max_h2c_data: MAXH2CDATA_MIN,
                in_capsule,
            },
            stream_state: NvmeStreamState::Head(DATA_LEN),
            pool,
            is_open: false,
            last_header: [0; DATA_LEN],
        }
    }

    fn begin(&mut self) {
        let Digests { header, data } = self.parameters.digests;
        let request = IcReq {
            common: common(PduType::IC_REQ, IC_LEN),
            dgst: if header { DGST_HEADER } else { 0 } | if data { DGST_DATA } else { 0 },
            // No alignment beyond dwords, and one R2T of a command at a time.
            ..IcReq::new_zeroed()
        };
        self.outbox.push_head(request.as_bytes());
    }

    #[inline]
    fn is_open(&self) -> bool {
        self.is_open
    }

    #[inline]
    fn send(&mut self, request: &NvmeRequest, commands: &mut impl Commands) {
        self.send_command(request, commands);
    }

    fn may_end(&self) -> bool {
        self.is_open && matches!(self.stream_state, NvmeStreamState::Head(_))
    }

    fn discard(&mut self) {
        self.outbox.clear();
    }
}

/// The common header of a PDU of `len` bytes without data.
pub(super) fn common(kind: PduType, len: usize) -> CommonHeader {
    CommonHeader { pdu_type: kind.0, flags: 0, hlen: len as u8, pdo: 0, plen: (len as u32).into() }
}

/// In-capsule data that every controller supports on an admin queue, in bytes (TCP Transport 1.0
/// §3.3.1).
const ADMIN_IN_CAPSULE: u32 = 8192;
