//! Protocol violations, and the Terminate messages that report them (RFC 5040 §4.8, RFC 5044 §8).

use crate::queue_pair::Violation;
use crate::regions::Refusal;
use blockmux_proto::driver::session::ProtocolError;
use blockmux_wire::iwarp::ddp::{
    Control, DdpErrorType, QUEUE_READ, TAGGED_LEN, TaggedError, UNTAGGED_LEN, Untagged, UntaggedError,
};
use blockmux_wire::iwarp::mpa::MpaError;
use blockmux_wire::iwarp::rdmap::{
    Layer, READ_REQUEST_LEN, RdmapError, RdmapErrorType, RdmapOpcode, SegmentLength, TERMINATE_DDP,
    TERMINATE_LEN, TERMINATE_LENGTH, TERMINATE_RDMAP, Terminate,
};
use zerocopy::{FromBytes, IntoBytes};

/// A violation by the peer: its codes in a Terminate message, and its description for this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TerminateReason {
    layer: Layer,
    etype: u8,
    code: u8,
    pub(super) violation: Violation,
    pub(super) error: ProtocolError,
}

/// The content of a Terminate message from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReceivedTerminate {
    pub(super) violation: Violation,
    /// MSN of the RDMA Read Request that was refused, if it was one.
    pub(super) read_msn: Option<u32>,
}

impl TerminateReason {
    const fn mpa(code: MpaError, what: &'static str) -> TerminateReason {
        let error = ProtocolError { what, reference: "RFC 5044 §8" };
        TerminateReason { layer: Layer::LLP, etype: 0, code: code.0, violation: Violation::Other, error }
    }

    const fn untagged(code: UntaggedError, violation: Violation, what: &'static str) -> TerminateReason {
        let error = ProtocolError { what, reference: "RFC 5041 §7.1" };
        let etype = DdpErrorType::UNTAGGED_BUFFER.0;
        TerminateReason { layer: Layer::DDP, etype, code: code.0, violation, error }
    }

    const fn tagged(code: TaggedError, violation: Violation, what: &'static str) -> TerminateReason {
        let error = ProtocolError { what, reference: "RFC 5041 §7.1" };
        TerminateReason {
            layer: Layer::DDP,
            etype: DdpErrorType::TAGGED_BUFFER.0,
            code: code.0,
            violation,
            error,
        }
    }

    const fn protection(code: RdmapError, refusal: Refusal, what: &'static str) -> TerminateReason {
        let error = ProtocolError { what, reference: "RFC 5040 §7.2" };
        let (etype, violation) = (RdmapErrorType::REMOTE_PROTECTION.0, Violation::Refused(refusal));
        TerminateReason { layer: Layer::RDMAP, etype, code: code.0, violation, error }
    }

    const fn operation(code: RdmapError, violation: Violation, what: &'static str) -> TerminateReason {
        let error = ProtocolError { what, reference: "RFC 5040 §7.2" };
        let etype = RdmapErrorType::REMOTE_OPERATION.0;
        TerminateReason { layer: Layer::RDMAP, etype, code: code.0, violation, error }
    }

    /// An RDMA Write to memory that was not granted. DDP has no code for access rights, so RDMAP's
    /// is used.
    pub(super) const fn write(refusal: Refusal) -> TerminateReason {
        const WHAT: &str = "wrote to memory that was not granted";
        match refusal {
            Refusal::InvalidStag | Refusal::CannotInvalidate => {
                TerminateReason::tagged(TaggedError::INVALID_STAG, Violation::Refused(refusal), WHAT)
            }
            Refusal::Bounds => {
                TerminateReason::tagged(TaggedError::BASE_OR_BOUNDS, Violation::Refused(refusal), WHAT)
            }
            Refusal::Wrap => TerminateReason::tagged(TaggedError::TO_WRAP, Violation::Refused(refusal), WHAT),
            Refusal::Access => TerminateReason::protection(RdmapError::ACCESS_RIGHTS, refusal, WHAT),
        }
    }

    /// An RDMA Read of memory that was not granted.
    pub(super) const fn read(refusal: Refusal) -> TerminateReason {
        let code = match refusal {
            Refusal::InvalidStag | Refusal::CannotInvalidate => RdmapError::INVALID_STAG,
            Refusal::Bounds => RdmapError::BASE_OR_BOUNDS,
            Refusal::Wrap => RdmapError::TO_WRAP,
            Refusal::Access => RdmapError::ACCESS_RIGHTS,
        };
        TerminateReason::protection(code, refusal, "read memory that was not granted")
    }

    /// Encodes the Terminate message after its DDP header. `ulpdu` is as much as was received of
    /// the offending segment, and `len` its whole length in bytes; both are empty if no segment is
    /// to be quoted.
    #[cold]
    pub(super) fn message(&self, ulpdu: &[u8], len: usize) -> Vec<u8> {
        let control = Control::read_from_prefix(ulpdu).ok().map(|(control, _)| control);
        // The fields of a header of another version cannot be interpreted.
        let is_known = self.layer != Layer::LLP && !VERSIONS.contains(self);
        let header_len = control.filter(|_| is_known).map(header_len);
        let (mut hdrct, mut copied) = (0, Vec::with_capacity(TERMINATE_MAX));
        if let (Some(control), Some(header)) = (control, header_len.and_then(|len| ulpdu.get(..len))) {
            hdrct |= TERMINATE_LENGTH | TERMINATE_DDP;
            // A ULPDU has a length of 16 bits.
            copied.extend_from_slice(SegmentLength::new(len as u16).as_bytes());
            copied.extend_from_slice(header);
            let request = ulpdu.get(header.len()..).and_then(|body| body.get(..READ_REQUEST_LEN));
            if let Some(request) = request
                && control.opcode() == RdmapOpcode::RDMA_READ_REQUEST
                && !control.is_tagged()
            {
                hdrct |= TERMINATE_RDMAP;
                copied.extend_from_slice(request);
            }
        }
        let mut body = Terminate::new(self.layer, self.etype, self.code, hdrct).as_bytes().to_vec();
        body.extend(copied);
        body
    }
}

impl ReceivedTerminate {
    /// Reads a Terminate message after its DDP header.
    #[cold]
    pub(super) fn read(body: &[u8]) -> ReceivedTerminate {
        let Ok((terminate, rest)) = Terminate::read_from_prefix(body) else {
            return ReceivedTerminate { violation: Violation::Other, read_msn: None };
        };
        let length = if terminate.hdrct & TERMINATE_LENGTH != 0 { size_of::<SegmentLength>() } else { 0 };
        let header = rest.get(length..).filter(|_| terminate.hdrct & TERMINATE_DDP != 0);
        let read_msn = header
            .and_then(|header| Untagged::read_from_prefix(header).ok())
            .filter(|(header, _)| !header.control.is_tagged() && header.qn.get() == QUEUE_READ)
            .map(|(header, _)| header.msn.get());
        ReceivedTerminate { violation: violation(&terminate, read_msn.is_some()), read_msn }
    }
}

fn violation(terminate: &Terminate, is_of_read: bool) -> Violation {
    let (protection, tagged) = (RdmapErrorType::REMOTE_PROTECTION.0, DdpErrorType::TAGGED_BUFFER.0);
    let (operation, untagged) = (RdmapErrorType::REMOTE_OPERATION.0, DdpErrorType::UNTAGGED_BUFFER.0);
    match (terminate.layer(), terminate.etype()) {
        (Layer::RDMAP, etype) if etype == protection || etype == operation => {
            match RdmapError(terminate.error_code) {
                RdmapError::CANNOT_INVALIDATE => Refusal::CannotInvalidate.into(),
                _ if etype == operation => Violation::Other,
                RdmapError::INVALID_STAG | RdmapError::STAG_NOT_ASSOCIATED => Refusal::InvalidStag.into(),
                RdmapError::BASE_OR_BOUNDS => Refusal::Bounds.into(),
                RdmapError::ACCESS_RIGHTS => Refusal::Access.into(),
                RdmapError::TO_WRAP => Refusal::Wrap.into(),
                _ => Violation::Other,
            }
        }
        (Layer::DDP, etype) if etype == tagged => match TaggedError(terminate.error_code) {
            TaggedError::INVALID_STAG | TaggedError::STAG_NOT_ASSOCIATED => Refusal::InvalidStag.into(),
            TaggedError::BASE_OR_BOUNDS => Refusal::Bounds.into(),
            TaggedError::TO_WRAP => Refusal::Wrap.into(),
            _ => Violation::Other,
        },
        (Layer::DDP, etype) if etype == untagged => match UntaggedError(terminate.error_code) {
            UntaggedError::NO_BUFFER if is_of_read => Violation::TooManyReads,
            UntaggedError::NO_BUFFER => Violation::NoReceive,
            UntaggedError::TOO_LONG => Violation::TooLong,
            _ => Violation::Other,
        },
        _ => Violation::Other,
    }
}

/// Length of a DDP header in bytes.
fn header_len(control: Control) -> usize {
    if control.is_tagged() { TAGGED_LEN } else { UNTAGGED_LEN }
}

// In the order of the layers. `tests/hostile.rs` tests which violation gets which Terminate
// message.

pub(super) const SHORT_FRAME: TerminateReason =
    TerminateReason::mpa(MpaError::MARKER_MISMATCH, "sent a frame too short for its header");
pub(super) const BAD_CRC: TerminateReason =
    TerminateReason::mpa(MpaError::CRC_MISMATCH, "sent a frame with a wrong CRC");
pub(super) const BAD_REPLY: TerminateReason =
    TerminateReason::mpa(MpaError::INVALID_REQ_REP, "sent bytes that are not an MPA reply");
pub(super) const WANTS_MARKERS: TerminateReason =
    TerminateReason::mpa(MpaError::INVALID_REQ_REP, "asked for MPA markers, which are not supported");
pub(super) const ORD_ABOVE_IRD: TerminateReason = TerminateReason::mpa(
    MpaError::INSUFFICIENT_IRD,
    "asked for more RDMA Reads in flight than the request allows",
);
pub(super) const NO_RTR: TerminateReason =
    TerminateReason::mpa(MpaError::NO_MATCHING_RTR, "chose none of the offered RTR messages");

pub(super) const TAGGED_VERSION: TerminateReason = TerminateReason::tagged(
    TaggedError::INVALID_VERSION,
    Violation::Other,
    "sent a tagged segment of another version of DDP",
);
pub(super) const SINK_STAG: TerminateReason = TerminateReason::tagged(
    TaggedError::INVALID_STAG,
    Violation::Refused(Refusal::InvalidStag),
    "answered an RDMA Read with another steering tag",
);
pub(super) const SINK_BOUNDS: TerminateReason = TerminateReason::tagged(
    TaggedError::BASE_OR_BOUNDS,
    Violation::Refused(Refusal::Bounds),
    "answered an RDMA Read with a range that was not requested",
);

pub(super) const UNTAGGED_VERSION: TerminateReason = TerminateReason::untagged(
    UntaggedError::INVALID_VERSION,
    Violation::Other,
    "sent an untagged segment of another version of DDP",
);
pub(super) const BAD_QUEUE: TerminateReason = TerminateReason::untagged(
    UntaggedError::INVALID_QN,
    Violation::Other,
    "sent to a DDP queue that does not exist",
);
pub(super) const BAD_MSN: TerminateReason = TerminateReason::untagged(
    UntaggedError::MSN_RANGE,
    Violation::Other,
    "sent a message with an MSN out of order",
);
pub(super) const BAD_OFFSET: TerminateReason = TerminateReason::untagged(
    UntaggedError::INVALID_MO,
    Violation::Other,
    "sent a segment with a message offset out of order",
);
pub(super) const NO_RECEIVE: TerminateReason = TerminateReason::untagged(
    UntaggedError::NO_BUFFER,
    Violation::NoReceive,
    "sent a message without a posted receive buffer",
);
pub(super) const TOO_MANY_READS: TerminateReason = TerminateReason::untagged(
    UntaggedError::NO_BUFFER,
    Violation::TooManyReads,
    "had more RDMA Reads in flight than negotiated",
);
pub(super) const TOO_LONG: TerminateReason = TerminateReason::untagged(
    UntaggedError::TOO_LONG,
    Violation::TooLong,
    "sent a message longer than its receive buffer",
);

pub(super) const RDMAP_VERSION: TerminateReason = TerminateReason::operation(
    RdmapError::INVALID_VERSION,
    Violation::Other,
    "sent a message of another version of RDMAP",
);
pub(super) const BAD_OPCODE: TerminateReason =
    TerminateReason::operation(RdmapError::UNEXPECTED_OPCODE, Violation::Other, "sent an unexpected opcode");
pub(super) const SHORT_READ: TerminateReason =
    TerminateReason::operation(RdmapError::UNSPECIFIED, Violation::Other, "sent an incomplete Read Request");
pub(super) const CANNOT_INVALIDATE: TerminateReason = TerminateReason::operation(
    RdmapError::CANNOT_INVALIDATE,
    Violation::Refused(Refusal::CannotInvalidate),
    "invalidated a steering tag that is not valid",
);

const VERSIONS: [TerminateReason; 3] = [TAGGED_VERSION, UNTAGGED_VERSION, RDMAP_VERSION];

/// Longest Terminate message after DDP's header, in bytes: with a Read Request.
const TERMINATE_MAX: usize = TERMINATE_LEN + 2 + UNTAGGED_LEN + READ_REQUEST_LEN;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_is_read_from_its_terminate_message() {
        let refusals = [Refusal::InvalidStag, Refusal::Bounds, Refusal::Access, Refusal::Wrap];
        for refusal in refusals {
            for reason in [TerminateReason::write(refusal), TerminateReason::read(refusal)] {
                let received = ReceivedTerminate::read(&reason.message(&[], 0));
                assert_eq!(received, ReceivedTerminate { violation: refusal.into(), read_msn: None });
            }
        }
        for reason in [CANNOT_INVALIDATE, NO_RECEIVE, TOO_LONG, BAD_MSN, BAD_OPCODE, BAD_CRC, SINK_STAG] {
            assert_eq!(ReceivedTerminate::read(&reason.message(&[], 0)).violation, reason.violation);
        }
        assert_eq!(ReceivedTerminate::read(&[]).violation, Violation::Other);
    }

    #[test]
    fn a_terminate_message_names_the_refused_read() {
        let mut ulpdu = vec![0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0];
        ulpdu.extend([7; READ_REQUEST_LEN]);
        let body = TerminateReason::read(Refusal::Bounds).message(&ulpdu, ulpdu.len());
        assert_eq!((body[..6].to_vec(), body.len()), (vec![0x01, 0x01, 0xe0, 0, 0, 46], TERMINATE_MAX));
        assert_eq!(body[6..], ulpdu);
        assert_eq!(
            ReceivedTerminate::read(&body),
            ReceivedTerminate { violation: Refusal::Bounds.into(), read_msn: Some(9) }
        );
        let body = TOO_MANY_READS.message(&ulpdu, ulpdu.len());
        assert_eq!(ReceivedTerminate::read(&body).violation, Violation::TooManyReads);
    }

    #[test]
    fn a_header_of_an_unknown_version_is_not_quoted() {
        let ulpdu = [0xc2; 40];
        assert_eq!(TAGGED_VERSION.message(&ulpdu, 40).to_vec(), [0x11, 4, 0, 0]);
        assert_eq!(BAD_CRC.message(&ulpdu, 40).to_vec(), [0x20, 2, 0, 0]);
        let body = TerminateReason::write(Refusal::Wrap).message(&ulpdu, 40);
        assert_eq!(body[..6], [0x11, 3, 0xc0, 0, 0, 40]);
        assert_eq!(body.len(), 6 + TAGGED_LEN);
        assert_eq!(BAD_QUEUE.message(&[0x41], 1).len(), 4, "an incomplete header");
    }
}
