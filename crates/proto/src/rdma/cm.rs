//! Detects which protocol a connection request over RDMA is for, and rejects a protocol that the
//! port does not serve.
//!
//! The private data of connection requests has no common header. iSER's is empty or four bytes of
//! flags; that of the other protocols has non-zero fields after these.

use crate::rdma::MAX_PRIVATE_DATA;
use blockmux_wire::nvmeof::rdma::{CmReject, CmRequest, CmStatus, RECFMT};
use blockmux_wire::srp::{
    BUFFER_FORMAT_DIRECT, BUFFER_FORMAT_INDIRECT, LoginReject, LoginRejectReason, LoginRequestRdma, SrpOpcode,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A protocol other than iSER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherProtocol {
    NvmeRdma,
    Srp {
        /// Tag of the login request.
        tag: u64,
    },
}

impl OtherProtocol {
    /// Detects the protocol of private data; `None`: it may be iSER.
    pub(crate) fn of(private_data: &[u8]) -> Option<OtherProtocol> {
        // InfiniBand pads private data with zeroes, so NVMe/RDMA's may be as long as SRP's, with
        // zeroes at the end.
        if let Ok((login, _)) = LoginRequestRdma::read_from_prefix(private_data) {
            let formats = login.req_buf_fmt.get();
            let is_known = formats & !(BUFFER_FORMAT_DIRECT | BUFFER_FORMAT_INDIRECT) == 0;
            let is_login = SrpOpcode(login.opcode) == SrpOpcode::LOGIN_REQUEST;
            if is_login && formats != 0 && is_known && login.req_it_iu_len.get() != 0 {
                return Some(OtherProtocol::Srp { tag: login.tag.get() });
            }
        }
        let (request, _) = CmRequest::read_from_prefix(private_data).ok()?;
        let is_request =
            request.recfmt.get() == RECFMT && request.hrqsize.get() != 0 && request.hsqsize.get() != 0;
        is_request.then_some(OtherProtocol::NvmeRdma)
    }

    /// The private data of the rejection, in the format of the peer's protocol.
    pub(crate) fn rejection(self) -> Vec<u8> {
        match self {
            OtherProtocol::NvmeRdma => {
                let sts = CmStatus::NO_RESOURCES.0.into();
                CmReject { recfmt: RECFMT.into(), sts }.as_bytes().to_vec()
            }
            OtherProtocol::Srp { tag } => LoginReject {
                opcode: SrpOpcode::LOGIN_REJECT.0,
                reason: LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL.0.into(),
                tag: tag.into(),
                buf_fmt: (BUFFER_FORMAT_DIRECT | BUFFER_FORMAT_INDIRECT).into(),
                ..LoginReject::new_zeroed()
            }
            .as_bytes()
            .to_vec(),
        }
    }

    /// The reason, for the log of a port that serves iSER.
    pub(crate) fn what(self) -> &'static str {
        match self {
            OtherProtocol::NvmeRdma => "asked for NVMe/RDMA at a port that serves iSER",
            OtherProtocol::Srp { .. } => "asked for SRP at a port that serves iSER",
        }
    }
}

const _: () = assert!(size_of::<LoginReject>() <= MAX_PRIVATE_DATA);

#[cfg(test)]
mod tests {
    use super::*;

    /// Private data that Linux 6.12 sent over siw.
    const NVME: &[u8] = b"\0\0\0\0\x20\0\x1f\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    const SRP: &[u8] = b"\0\0\0\0\0\0\0\0\0\x06\x80\0\0\0\x20\x44\x52\x54\0\x77\0\x01\0\0\0\0\0\0\0\0\0\0\
        \x50\x54\0\xff\xfe\x77\0\x02\x50\x54\0\xff\xfe\x77\0\x02\0\x44\0\0\0\0\0\0";

    /// Pads private data to its length on InfiniBand.
    fn padded(private_data: &[u8]) -> Vec<u8> {
        let mut padded = private_data.to_vec();
        padded.resize(MAX_PRIVATE_DATA, 0);
        padded
    }

    #[test]
    fn nvme_rdma_and_srp_are_distinguished_from_iser_by_private_data() {
        for data in [NVME.to_vec(), padded(NVME)] {
            assert_eq!(OtherProtocol::of(&data), Some(OtherProtocol::NvmeRdma));
        }
        // An I/O queue of controller 512, whose CNTLID is where SRP's buffer formats are.
        let mut queue = padded(NVME);
        (queue[2], queue[9]) = (3, 2);
        assert_eq!(OtherProtocol::of(&queue), Some(OtherProtocol::NvmeRdma));
        assert_eq!(OtherProtocol::of(SRP), Some(OtherProtocol::Srp { tag: 0 }));
        for iser in [&b""[..], b"\0\0\0\0", b"\x80\0\0\0", b"\xc0\0\0\0"] {
            assert_eq!(OtherProtocol::of(iser), None);
            assert_eq!(OtherProtocol::of(&padded(iser)), None);
        }
        assert_eq!(OtherProtocol::of(&NVME[..31]), None);
    }

    #[test]
    fn a_rejection_has_the_format_of_the_peers_protocol() {
        assert_eq!(OtherProtocol::NvmeRdma.rejection(), [0, 0, 6, 0]);
        let rejection = OtherProtocol::Srp { tag: 7 }.rejection();
        assert_eq!(rejection[..16], [0xc2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!((rejection.len(), &rejection[24..26]), (32, &[0, 6][..]));
    }
}
