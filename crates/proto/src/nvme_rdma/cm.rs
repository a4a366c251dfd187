//! Private data of connection requests, accepts and rejects (RDMA Transport 1.0 §3.2).

use crate::driver::session::ProtocolError;
use crate::fabrics::host::QueueShape;
use crate::nvme::{MAX_IO_QUEUES, MQES};
use blockmux_wire::nvmeof::rdma::{CmAccept, CmReject, CmRequest, CmStatus, RECFMT};
use zerocopy::{FromBytes, IntoBytes};

/// Checks the private data of a host's connection request. Returns the number of commands that may
/// be in flight: the smaller of the host's send queue and receive queue.
pub(super) fn check_request(private_data: &[u8]) -> Result<u16, CmStatus> {
    let (request, _) = CmRequest::read_from_prefix(private_data).map_err(|_| CmStatus::INVALID_LENGTH)?;
    if request.recfmt.get() != RECFMT {
        return Err(CmStatus::INVALID_RECFMT);
    }
    if request.qid.get() > MAX_IO_QUEUES {
        return Err(CmStatus::INVALID_QID);
    }
    let (sends, receives) = (request.hsqsize.get(), request.hrqsize.get());
    if sends == 0 || sends > MQES {
        return Err(CmStatus::INVALID_HSQSIZE);
    }
    if receives == 0 {
        return Err(CmStatus::INVALID_HRQSIZE);
    }
    Ok(sends.saturating_add(1).min(receives))
}

/// Private data of a host's connection request.
pub(super) fn request(shape: QueueShape) -> Vec<u8> {
    let request = CmRequest {
        recfmt: RECFMT.into(),
        qid: shape.qid.into(),
        hrqsize: shape.entries.into(),
        hsqsize: shape.entries.saturating_sub(1).into(),
        cntlid: shape.cntlid.into(),
        ..CmRequest::default()
    };
    request.as_bytes().to_vec()
}

/// Reads the private data of a controller's accept. Returns the number of its receive buffers, or
/// `None` if the controller does not say.
pub(super) fn check_accept(private_data: &[u8]) -> Result<Option<u16>, ProtocolError> {
    let Ok((accept, _)) = CmAccept::read_from_prefix(private_data) else { return Ok(None) };
    if accept.recfmt.get() != RECFMT {
        return Err(refused("accepted the connection in an unknown record format"));
    }
    match accept.crqsize.get() {
        0 => Err(refused("accepted the connection without receive buffers")),
        receives => Ok(Some(receives)),
    }
}

/// The error for a controller's reject, by its status.
pub(super) fn rejection(private_data: &[u8]) -> ProtocolError {
    let status = CmReject::read_from_prefix(private_data).map(|(reject, _)| CmStatus(reject.sts.get()));
    refused(match status {
        Ok(CmStatus::INVALID_LENGTH) => "rejected the connection: the private data has the wrong length",
        Ok(CmStatus::INVALID_RECFMT) => "rejected the connection: unknown record format",
        Ok(CmStatus::INVALID_QID) => "rejected the connection: it has no such queue",
        Ok(CmStatus::INVALID_HSQSIZE) => "rejected the connection: the send queue has an impossible size",
        Ok(CmStatus::INVALID_HRQSIZE) => "rejected the connection: the receive queue has an impossible size",
        Ok(CmStatus::NO_RESOURCES) => "rejected the connection: it has no resources for it",
        Ok(CmStatus::INVALID_IRD) => "rejected the connection: it cannot use this number of RDMA Reads",
        Ok(CmStatus::INVALID_ORD) => "rejected the connection: too many RDMA Reads in flight",
        _ => "rejected the RDMA connection: check that an NVMe/RDMA target listens there",
    })
}

/// A protocol error that cites the section on private data.
pub(super) fn refused(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RDMA Transport 1.0 §3.2" }
}

/// Private data of a controller's accept, with the number of its receive buffers.
pub(super) fn accept(receives: u16) -> Vec<u8> {
    CmAccept { recfmt: RECFMT.into(), crqsize: receives.into(), ..CmAccept::default() }.as_bytes().to_vec()
}

/// Private data of a controller's reject.
pub(super) fn reject(status: CmStatus) -> Vec<u8> {
    CmReject { recfmt: RECFMT.into(), sts: status.0.into() }.as_bytes().to_vec()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::nvme_rdma) fn asking(qid: u16, hrqsize: u16, hsqsize: u16) -> Vec<u8> {
        let request = CmRequest {
            qid: qid.into(),
            hrqsize: hrqsize.into(),
            hsqsize: hsqsize.into(),
            ..CmRequest::default()
        };
        request.as_bytes().to_vec()
    }

    #[test]
    fn the_smaller_of_a_host_s_queues_bounds_its_commands() {
        assert_eq!(check_request(&asking(0, 32, 31)), Ok(32));
        assert_eq!(check_request(&asking(1, 16, 31)), Ok(16));
        assert_eq!(check_request(&asking(128, 2000, 1023)), Ok(1024));
        // InfiniBand fills private data up with zeroes.
        let mut padded = asking(0, 32, 31);
        padded.resize(56, 0);
        assert_eq!(check_request(&padded), Ok(32));
    }

    #[test]
    fn each_wrong_request_has_its_status() {
        assert_eq!(check_request(&[]), Err(CmStatus::INVALID_LENGTH));
        assert_eq!(check_request(&asking(0, 32, 31)[..31]), Err(CmStatus::INVALID_LENGTH));
        let mut other_format = asking(0, 32, 31);
        other_format[0] = 1;
        assert_eq!(check_request(&other_format), Err(CmStatus::INVALID_RECFMT));
        assert_eq!(check_request(&asking(129, 32, 31)), Err(CmStatus::INVALID_QID));
        assert_eq!(check_request(&asking(0, 32, 0)), Err(CmStatus::INVALID_HSQSIZE));
        assert_eq!(check_request(&asking(0, 32, 1024)), Err(CmStatus::INVALID_HSQSIZE));
        assert_eq!(check_request(&asking(0, 0, 31)), Err(CmStatus::INVALID_HRQSIZE));
    }

    #[test]
    fn each_side_reads_what_the_other_encodes() {
        let shape = QueueShape { qid: 3, entries: 128, cntlid: 7 };
        assert_eq!(check_request(&request(shape)), Ok(128));
        assert_eq!(check_accept(&accept(128)), Ok(Some(128)));
        assert_eq!(check_accept(&[]), Ok(None));
        assert!(check_accept(&accept(0)).is_err());
        assert!(check_accept(&[1; 32]).is_err());
        let messages: Vec<&str> = (1..=9).map(|sts| rejection(&reject(CmStatus(sts))).what).collect();
        assert!(
            (1..messages.len()).all(|at| !messages[..at].contains(&messages[at])),
            "each has its own message"
        );
        assert_eq!(rejection(&[]), rejection(&reject(CmStatus(9))));
    }

    #[test]
    fn answers_are_as_long_as_the_specification_says() {
        assert_eq!((accept(32).len(), &accept(32)[..4]), (32, &[0, 0, 32, 0][..]));
        assert_eq!(reject(CmStatus::NO_RESOURCES), [0, 0, 6, 0]);
    }
}
