//! What a side can do wrong, and the Terminate message that tells it so.

use crate::queue_pair::Violation;
use crate::regions::Refusal;
use blockmux_proto::session::ProtocolError;
use blockmux_wire::iwarp::ddp::{
    Control, DdpErrorType, QUEUE_READ, TAGGED_LEN, TaggedError, UNTAGGED_LEN, Untagged, UntaggedError,
};
use blockmux_wire::iwarp::mpa::MpaError;
use blockmux_wire::iwarp::rdmap::{
    Layer, READ_REQUEST_LEN, RdmapError, RdmapErrorType, RdmapOpcode, SegmentLength, TERMINATE_DDP,
    TERMINATE_LENGTH, TERMINATE_MAX, TERMINATE_RDMAP, Terminate,
};
use zerocopy::{FromBytes, IntoBytes};

/// Something that the peer did wrong: its name in a Terminate message, in ours, and in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    layer: Layer,
    etype: u8,
    code: u8,
    pub(super) violation: Violation,
    pub(super) error: ProtocolError,
}

/// What a Terminate message of the peer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accusation {
    pub(super) violation: Violation,
    /// The number of the RDMA Read Request that was refused, if it was one.
    pub(super) read_msn: Option<u32>,
}

impl Wrong {
    const fn mpa(code: MpaError, what: &'static str) -> Wrong {
        let error = ProtocolError { what, reference: "RFC 5044 §8" };
        Wrong { layer: Layer::LLP, etype: 0, code: code.0, violation: Violation::Other, error }
    }

    const fn untagged(code: UntaggedError, violation: Violation, what: &'static str) -> Wrong {
        let error = ProtocolError { what, reference: "RFC 5041 §7.1" };
        let etype = DdpErrorType::UNTAGGED_BUFFER.0;
        Wrong { layer: Layer::DDP, etype, code: code.0, violation, error }
    }

    const fn tagged(code: TaggedError, violation: Violation, what: &'static str) -> Wrong {
        let error = ProtocolError { what, reference: "RFC 5041 §7.1" };
        Wrong { layer: Layer::DDP, etype: DdpErrorType::TAGGED_BUFFER.0, code: code.0, violation, error }
    }

    const fn protection(code: RdmapError, refusal: Refusal, what: &'static str) -> Wrong {
        let error = ProtocolError { what, reference: "RFC 5040 §7.2" };
        let (etype, violation) = (RdmapErrorType::REMOTE_PROTECTION.0, Violation::Refused(refusal));
        Wrong { layer: Layer::RDMAP, etype, code: code.0, violation, error }
    }

    const fn operation(code: RdmapError, violation: Violation, what: &'static str) -> Wrong {
        let error = ProtocolError { what, reference: "RFC 5040 §7.2" };
        let etype = RdmapErrorType::REMOTE_OPERATION.0;
        Wrong { layer: Layer::RDMAP, etype, code: code.0, violation, error }
    }

    /// An RDMA Write to memory that was not granted. DDP has no word for access rights, so that
    /// RDMAP says it.
    pub(super) const fn write(refusal: Refusal) -> Wrong {
        const WHAT: &str = "wrote where it may not";
        match refusal {
            Refusal::InvalidStag | Refusal::CannotInvalidate => {
                Wrong::tagged(TaggedError::INVALID_STAG, Violation::Refused(refusal), WHAT)
            }
            Refusal::Bounds => Wrong::tagged(TaggedError::BASE_OR_BOUNDS, Violation::Refused(refusal), WHAT),
            Refusal::Wrap => Wrong::tagged(TaggedError::TO_WRAP, Violation::Refused(refusal), WHAT),
            Refusal::Access => Wrong::protection(RdmapError::ACCESS_RIGHTS, refusal, WHAT),
        }
    }

    /// An RDMA Read of memory that was not granted.
    pub(super) const fn read(refusal: Refusal) -> Wrong {
        let code = match refusal {
            Refusal::InvalidStag | Refusal::CannotInvalidate => RdmapError::INVALID_STAG,
            Refusal::Bounds => RdmapError::BASE_OR_BOUNDS,
            Refusal::Wrap => RdmapError::TO_WRAP,
            Refusal::Access => RdmapError::ACCESS_RIGHTS,
        };
        Wrong::protection(code, refusal, "asked for memory that it may not read")
    }

    /// The message that tells it, behind DDP's header. `ulpdu` is the segment that was wrong, as
    /// far as it is there, and `len` how long it was in all; none where nothing can be said of it.
    #[cold]
    pub(super) fn terminate(&self, ulpdu: &[u8], len: usize) -> Vec<u8> {
        let control = Control::read_from_prefix(ulpdu).ok().map(|(control, _)| control);
        // Of a header of another version nobody knows what it means.
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

impl Accusation {
    /// Reads a Terminate message, behind DDP's header.
    #[cold]
    pub(super) fn read(body: &[u8]) -> Accusation {
        let Ok((terminate, rest)) = Terminate::read_from_prefix(body) else {
            return Accusation { violation: Violation::Other, read_msn: None };
        };
        let length = if terminate.hdrct & TERMINATE_LENGTH != 0 { size_of::<SegmentLength>() } else { 0 };
        let header = rest.get(length..).filter(|_| terminate.hdrct & TERMINATE_DDP != 0);
        let read_msn = header
            .and_then(|header| Untagged::read_from_prefix(header).ok())
            .filter(|(header, _)| !header.control.is_tagged() && header.qn.get() == QUEUE_READ)
            .map(|(header, _)| header.msn.get());
        Accusation { violation: violation(&terminate, read_msn.is_some()), read_msn }
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

/// Of DDP.
fn header_len(control: Control) -> usize {
    if control.is_tagged() { TAGGED_LEN } else { UNTAGGED_LEN }
}

// The order of the tables is that of the layers; what a peer gets for what is tested in
// `tests/hostile.rs`.

pub(super) const SHORT_FRAME: Wrong =
    Wrong::mpa(MpaError::MARKER_MISMATCH, "sent a frame too short for its header");
pub(super) const BAD_MARKER: Wrong =
    Wrong::mpa(MpaError::MARKER_MISMATCH, "sent a marker that does not lead to its frame");
pub(super) const BAD_CRC: Wrong = Wrong::mpa(MpaError::CRC_MISMATCH, "sent a frame with a wrong CRC");
pub(super) const BAD_REPLY: Wrong =
    Wrong::mpa(MpaError::INVALID_REQ_REP, "answered with something that is no MPA reply");
pub(super) const MANY_READS_WANTED: Wrong =
    Wrong::mpa(MpaError::INSUFFICIENT_IRD, "would read more at a time than it was told that it can");
pub(super) const NO_RTR: Wrong =
    Wrong::mpa(MpaError::NO_MATCHING_RTR, "took none of the offered RTR messages");

pub(super) const TAGGED_VERSION: Wrong = Wrong::tagged(
    TaggedError::INVALID_VERSION,
    Violation::Other,
    "sent a tagged segment of another version of DDP",
);
pub(super) const SINK_STAG: Wrong = Wrong::tagged(
    TaggedError::INVALID_STAG,
    Violation::Refused(Refusal::InvalidStag),
    "answered a read under another steering tag",
);
pub(super) const SINK_BOUNDS: Wrong = Wrong::tagged(
    TaggedError::BASE_OR_BOUNDS,
    Violation::Refused(Refusal::Bounds),
    "answered a read with other data than it was asked for",
);

pub(super) const UNTAGGED_VERSION: Wrong = Wrong::untagged(
    UntaggedError::INVALID_VERSION,
    Violation::Other,
    "sent an untagged segment of another version of DDP",
);
pub(super) const BAD_QUEUE: Wrong =
    Wrong::untagged(UntaggedError::INVALID_QN, Violation::Other, "sent to a queue that there is not");
pub(super) const BAD_MSN: Wrong =
    Wrong::untagged(UntaggedError::MSN_RANGE, Violation::Other, "sent a message out of its turn");
pub(super) const BAD_OFFSET: Wrong =
    Wrong::untagged(UntaggedError::INVALID_MO, Violation::Other, "sent a segment out of its place");
pub(super) const NO_RECEIVE: Wrong = Wrong::untagged(
    UntaggedError::NO_BUFFER,
    Violation::NoReceive,
    "sent a message for which there is no receive buffer",
);
pub(super) const TOO_MANY_READS: Wrong = Wrong::untagged(
    UntaggedError::NO_BUFFER,
    Violation::TooManyReads,
    "asked for more reads at a time than were agreed on",
);
pub(super) const TOO_LONG: Wrong = Wrong::untagged(
    UntaggedError::TOO_LONG,
    Violation::TooLong,
    "sent a message longer than its receive buffer",
);

pub(super) const RDMAP_VERSION: Wrong = Wrong::operation(
    RdmapError::INVALID_VERSION,
    Violation::Other,
    "sent a message of another version of RDMAP",
);
pub(super) const BAD_OPCODE: Wrong = Wrong::operation(
    RdmapError::UNEXPECTED_OPCODE,
    Violation::Other,
    "sent an opcode where it does not belong",
);
pub(super) const SHORT_READ: Wrong =
    Wrong::operation(RdmapError::UNSPECIFIED, Violation::Other, "sent a Read Request that is not whole");
pub(super) const CANNOT_INVALIDATE: Wrong = Wrong::operation(
    RdmapError::CANNOT_INVALIDATE,
    Violation::Refused(Refusal::CannotInvalidate),
    "closed memory that was not open",
);

const VERSIONS: [Wrong; 3] = [TAGGED_VERSION, UNTAGGED_VERSION, RDMAP_VERSION];

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_that_is_told_is_understood() {
        let refusals = [Refusal::InvalidStag, Refusal::Bounds, Refusal::Access, Refusal::Wrap];
        for refusal in refusals {
            for wrong in [Wrong::write(refusal), Wrong::read(refusal)] {
                let accusation = Accusation::read(&wrong.terminate(&[], 0));
                assert_eq!(accusation, Accusation { violation: refusal.into(), read_msn: None });
            }
        }
        for wrong in [CANNOT_INVALIDATE, NO_RECEIVE, TOO_LONG, BAD_MSN, BAD_OPCODE, BAD_CRC, SINK_STAG] {
            assert_eq!(Accusation::read(&wrong.terminate(&[], 0)).violation, wrong.violation);
        }
        assert_eq!(Accusation::read(&[]).violation, Violation::Other);
    }

    #[test]
    fn a_read_that_was_refused_is_named() {
        let mut ulpdu = vec![0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0];
        ulpdu.extend([7; READ_REQUEST_LEN]);
        let body = Wrong::read(Refusal::Bounds).terminate(&ulpdu, ulpdu.len());
        assert_eq!((body[..6].to_vec(), body.len()), (vec![0x01, 0x01, 0xe0, 0, 0, 46], TERMINATE_MAX));
        assert_eq!(body[6..], ulpdu);
        assert_eq!(
            Accusation::read(&body),
            Accusation { violation: Refusal::Bounds.into(), read_msn: Some(9) }
        );
        let body = TOO_MANY_READS.terminate(&ulpdu, ulpdu.len());
        assert_eq!(Accusation::read(&body).violation, Violation::TooManyReads);
    }

    #[test]
    fn of_a_header_that_nobody_knows_nothing_is_said() {
        let ulpdu = [0xc2; 40];
        assert_eq!(TAGGED_VERSION.terminate(&ulpdu, 40).to_vec(), [0x11, 4, 0, 0]);
        assert_eq!(BAD_CRC.terminate(&ulpdu, 40).to_vec(), [0x20, 2, 0, 0]);
        let body = Wrong::write(Refusal::Wrap).terminate(&ulpdu, 40);
        assert_eq!(body[..6], [0x11, 3, 0xc0, 0, 0, 40]);
        assert_eq!(body.len(), 6 + TAGGED_LEN);
        assert_eq!(BAD_QUEUE.terminate(&[0x41], 1).len(), 4, "a header that is not all there");
    }
}
