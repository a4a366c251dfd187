//! Requests that arrived ahead of ExpCmdSN (RFC 7143 §4.2.2.1): another connection is slower, or an
//! earlier request was dropped for a wrong digest. They are delivered in the order of CmdSN when
//! the gap is filled.
//!
//! *Limits.* At most one request for each number of the window, and 65 MiB of memory in all.
//! Requests above the limit are dropped as if they had never arrived.

use super::datamover::RemoteBuffers;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::Bhs;
use smallvec::SmallVec;

/// The early requests of a session.
#[derive(Default)]
pub(super) struct EarlyRequests {
    requests: Vec<EarlyRequest>,
    /// Memory that the requests occupy, in bytes.
    len: usize,
}

/// A PDU with its AHS and data.
pub(super) struct WholePdu {
    pub(super) bhs: Bhs,
    pub(super) ahs: SmallVec<[u8; 16]>,
    pub(super) data: Option<Seg>,
    /// The data digest was correct.
    pub(super) digest_ok: bool,
    /// Over RDMA: the initiator's memory that the iSER header names.
    pub(super) buffers: RemoteBuffers,
}

/// A request that waits for its CmdSN.
struct EarlyRequest {
    cmd_sn: u32,
    /// Key of the connection that received it.
    owner: u32,
    /// `None` if the request was aborted; its number counts as received (RFC 7143 §11.5.1).
    pdu: Option<WholePdu>,
    /// Unsolicited data that followed the request.
    data: Vec<WholePdu>,
}

/// The request with a given CmdSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextRequest {
    /// The request was aborted; its number counts as received.
    Canceled,
    /// A request that this connection received, with its header.
    Held(u32, Bhs),
}

impl EarlyRequests {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Holds a request, unless there is already one with its number or no room.
    pub(super) fn hold(&mut self, cmd_sn: u32, owner: u32, pdu: WholePdu) {
        if self.requests.iter().any(|request| request.cmd_sn == cmd_sn) || !self.takes(&pdu) {
            return;
        }
        self.requests.push(EarlyRequest { cmd_sn, owner, pdu: Some(pdu), data: Vec::new() });
    }

    /// Whether a connection holds a command with this task tag here.
    #[inline]
    pub(super) fn has_command(&self, owner: u32, itt: u32) -> bool {
        self.requests.iter().any(|request| request.is(owner, itt))
    }

    /// Holds data that follows a held command.
    pub(super) fn add_data(&mut self, owner: u32, pdu: WholePdu) {
        let itt = pdu.bhs.initiator_task_tag.get();
        // The command may have been aborted since the data's header arrived.
        if !self.has_command(owner, itt) || !self.takes(&pdu) {
            return;
        }
        if let Some(request) = self.requests.iter_mut().find(|request| request.is(owner, itt)) {
            request.data.push(pdu);
        }
    }

    /// The request with this CmdSN; `None` if it has not arrived.
    pub(super) fn next(&self, cmd_sn: u32) -> Option<NextRequest> {
        let request = self.requests.iter().find(|request| request.cmd_sn == cmd_sn)?;
        Some(
            request
                .pdu
                .as_ref()
                .map_or(NextRequest::Canceled, |pdu| NextRequest::Held(request.owner, pdu.bhs)),
        )
    }

    /// Takes the request with this CmdSN and its data.
    pub(super) fn take(&mut self, cmd_sn: u32) -> Option<(WholePdu, Vec<WholePdu>)> {
        let at = self.requests.iter().position(|request| request.cmd_sn == cmd_sn)?;
        let request = self.requests.swap_remove(at);
        self.release(&request);
        Some((request.pdu?, request.data))
    }

    /// Cancels the request with this CmdSN: the number counts as received and the request never
    /// executes.
    pub(super) fn cancel(&mut self, cmd_sn: u32) {
        let Some(at) = self.requests.iter().position(|request| request.cmd_sn == cmd_sn) else {
            self.requests.push(EarlyRequest { cmd_sn, owner: 0, pdu: None, data: Vec::new() });
            return;
        };
        let request = self.requests.swap_remove(at);
        self.release(&request);
        self.requests.push(EarlyRequest { pdu: None, data: Vec::new(), ..request });
    }

    /// CmdSNs of the requests that satisfy `predicate`.
    pub(super) fn select(&self, predicate: impl Fn(&Bhs, u32) -> bool) -> SmallVec<[u32; 4]> {
        let selected = self.requests.iter().filter_map(|request| {
            let pdu = request.pdu.as_ref()?;
            predicate(&pdu.bhs, request.cmd_sn).then_some(request.cmd_sn)
        });
        selected.collect()
    }

    /// Drops the requests of a connection that has ended.
    pub(super) fn forget(&mut self, owner: u32) {
        let mut freed: usize = 0;
        self.requests.retain(|request| {
            let stays = request.owner != owner || request.pdu.is_none();
            freed = freed.saturating_add(if stays { 0 } else { request.size() });
            stays
        });
        self.len = self.len.saturating_sub(freed);
    }

    fn takes(&mut self, pdu: &WholePdu) -> bool {
        let len = self.len.saturating_add(pdu.size());
        let fits = len <= MAX_EARLY_BYTES;
        if fits {
            self.len = len;
        }
        fits
    }

    fn release(&mut self, request: &EarlyRequest) {
        self.len = self.len.saturating_sub(request.size());
    }
}

impl EarlyRequest {
    fn is(&self, owner: u32, itt: u32) -> bool {
        self.owner == owner && self.pdu.as_ref().is_some_and(|pdu| pdu.bhs.initiator_task_tag.get() == itt)
    }

    fn size(&self) -> usize {
        self.pdu.iter().chain(&self.data).fold(0, |sum, pdu| sum.saturating_add(pdu.size()))
    }
}

impl WholePdu {
    /// Memory that the PDU occupies, in bytes.
    fn size(&self) -> usize {
        self.data.as_ref().map_or(0, Seg::len).saturating_add(size_of::<WholePdu>())
    }
}

/// Maximum memory for early requests, in bytes: a whole window with 256 KiB of immediate data each.
const MAX_EARLY_BYTES: usize = 65 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn pdu(itt: u32, len: usize) -> WholePdu {
        let mut bhs = Bhs::new_zeroed();
        bhs.initiator_task_tag = itt.into();
        WholePdu {
            bhs,
            ahs: SmallVec::new(),
            data: Some(Seg::from_slice(&vec![0; len])),
            digest_ok: true,
            buffers: RemoteBuffers::default(),
        }
    }

    #[test]
    fn early_requests_are_executed_in_cmd_sn_order_with_their_data() {
        let mut early = EarlyRequests::default();
        early.hold(7, 1, pdu(70, 10));
        early.hold(7, 2, pdu(71, 10));
        early.hold(6, 2, pdu(60, 10));
        assert!(early.has_command(1, 70) && !early.has_command(2, 70) && !early.has_command(2, 71));
        early.add_data(1, pdu(70, 5));
        assert!(early.next(5).is_none() && matches!(early.next(7), Some(NextRequest::Held(1, _))));
        let (whole, data) = early.take(7).unwrap();
        assert_eq!((whole.bhs.initiator_task_tag.get(), data.len()), (70, 1));
        early.forget(2);
        assert!(early.is_empty() && early.len == 0);
    }

    #[test]
    fn an_aborted_request_counts_as_received_whether_or_not_it_has_come() {
        let mut early = EarlyRequests::default();
        early.hold(6, 1, pdu(60, 10));
        early.cancel(6);
        early.cancel(7);
        early.forget(1);
        assert_eq!(
            (early.next(6), early.next(7), early.len),
            (Some(NextRequest::Canceled), Some(NextRequest::Canceled), 0)
        );
        early.add_data(1, pdu(60, 5));
        assert!(early.take(6).is_none() && early.take(7).is_none() && early.is_empty() && early.len == 0);
    }

    #[test]
    fn early_data_is_bounded() {
        let mut early = EarlyRequests::default();
        for cmd_sn in 0..70 {
            early.hold(cmd_sn, 1, pdu(cmd_sn, 1 << 20));
        }
        assert_eq!(early.requests.len(), 64);
        assert!(early.len <= MAX_EARLY_BYTES);
        for cmd_sn in 0..64 {
            early.take(cmd_sn);
        }
        assert_eq!(early.len, 0);
    }
}
