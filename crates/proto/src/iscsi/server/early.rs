//! Requests that came before their turn (RFC 7143 §4.2.2.1): another connection is slower, or one
//! before them was dropped because its digest was wrong. They are delivered in the order of CmdSN
//! when the gap is filled.
//!
//! What bounds this: there is at most one request for each number of the window, and 64 MiB of data
//! with them. What comes beyond that is as if it had never come.

use super::datamover::Remotes;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::Bhs;
use smallvec::SmallVec;

/// The requests of a session that wait for others.
#[derive(Default)]
pub(super) struct Early {
    requests: Vec<EarlyRequest>,
    /// Memory that they hold, in bytes.
    len: usize,
}

/// A PDU with everything that belongs to it.
pub(super) struct Whole {
    pub(super) bhs: Bhs,
    pub(super) ahs: SmallVec<[u8; 16]>,
    pub(super) data: Option<Seg>,
    /// Its data digest was right.
    pub(super) is_good: bool,
    /// Over RDMA: the memory that it names.
    pub(super) remotes: Remotes,
}

/// One of them.
struct EarlyRequest {
    cmd_sn: u32,
    /// Its connection.
    owner: u32,
    /// `None`: it was aborted, and its number counts as received (RFC 7143 §11.5.1).
    pdu: Option<Whole>,
    /// Unsolicited data that followed it.
    data: Vec<Whole>,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextRequest {
    /// The number counts as received.
    Nobody,
    /// A request of that connection, with room for so much data-in.
    Of(u32, Bhs),
}

impl Early {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Keeps a request, unless there is one of its number already or no room.
    pub(super) fn hold(&mut self, cmd_sn: u32, owner: u32, pdu: Whole) {
        if self.requests.iter().any(|request| request.cmd_sn == cmd_sn) || !self.takes(&pdu) {
            return;
        }
        self.requests.push(EarlyRequest { cmd_sn, owner, pdu: Some(pdu), data: Vec::new() });
    }

    /// Whether a connection has a command of that tag here.
    #[inline]
    pub(super) fn has_command(&self, owner: u32, itt: u32) -> bool {
        self.requests.iter().any(|request| request.is(owner, itt))
    }

    /// Keeps data that follows such a command.
    pub(super) fn add_data(&mut self, owner: u32, pdu: Whole) {
        let itt = pdu.bhs.initiator_task_tag.get();
        // It may have been aborted since the data's header came.
        if !self.has_command(owner, itt) || !self.takes(&pdu) {
            return;
        }
        if let Some(request) = self.requests.iter_mut().find(|request| request.is(owner, itt)) {
            request.data.push(pdu);
        }
    }

    /// Whose turn it is with that number; `None` if it has not come.
    pub(super) fn next(&self, cmd_sn: u32) -> Option<NextRequest> {
        let request = self.requests.iter().find(|request| request.cmd_sn == cmd_sn)?;
        Some(request.pdu.as_ref().map_or(NextRequest::Nobody, |pdu| NextRequest::Of(request.owner, pdu.bhs)))
    }

    /// Takes the request of that number with its data.
    pub(super) fn take(&mut self, cmd_sn: u32) -> Option<(Whole, Vec<Whole>)> {
        let at = self.requests.iter().position(|request| request.cmd_sn == cmd_sn)?;
        let request = self.requests.swap_remove(at);
        self.release(&request);
        Some((request.pdu?, request.data))
    }

    /// The request of that number counts as received and is never done.
    pub(super) fn cancel(&mut self, cmd_sn: u32) {
        let Some(at) = self.requests.iter().position(|request| request.cmd_sn == cmd_sn) else {
            self.requests.push(EarlyRequest { cmd_sn, owner: 0, pdu: None, data: Vec::new() });
            return;
        };
        let request = self.requests.swap_remove(at);
        self.release(&request);
        self.requests.push(EarlyRequest { pdu: None, data: Vec::new(), ..request });
    }

    /// Numbers of the requests that are so.
    pub(super) fn select(&self, is_so: impl Fn(&Bhs, u32) -> bool) -> SmallVec<[u32; 4]> {
        let meant = self.requests.iter().filter_map(|request| {
            let pdu = request.pdu.as_ref()?;
            is_so(&pdu.bhs, request.cmd_sn).then_some(request.cmd_sn)
        });
        meant.collect()
    }

    /// Forgets what a connection has sent: it is gone.
    pub(super) fn forget(&mut self, owner: u32) {
        let mut freed: usize = 0;
        self.requests.retain(|request| {
            let stays = request.owner != owner || request.pdu.is_none();
            freed = freed.saturating_add(if stays { 0 } else { request.size() });
            stays
        });
        self.len = self.len.saturating_sub(freed);
    }

    fn takes(&mut self, pdu: &Whole) -> bool {
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

impl Whole {
    /// In memory, in bytes.
    fn size(&self) -> usize {
        self.data.as_ref().map_or(0, Seg::len).saturating_add(size_of::<Whole>())
    }
}

/// Memory for requests that wait, in bytes: a whole window with 256 KiB of immediate data each.
const MAX_EARLY_BYTES: usize = 65 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn pdu(itt: u32, len: usize) -> Whole {
        let mut bhs = Bhs::new_zeroed();
        bhs.initiator_task_tag = itt.into();
        Whole {
            bhs,
            ahs: SmallVec::new(),
            data: Some(Seg::from_slice(&vec![0; len])),
            is_good: true,
            remotes: Remotes::default(),
        }
    }

    #[test]
    fn requests_are_taken_by_number_with_the_data_behind_them() {
        let mut early = Early::default();
        early.hold(7, 1, pdu(70, 10));
        early.hold(7, 2, pdu(71, 10));
        early.hold(6, 2, pdu(60, 10));
        assert!(early.has_command(1, 70) && !early.has_command(2, 70) && !early.has_command(2, 71));
        early.add_data(1, pdu(70, 5));
        assert!(early.next(5).is_none() && matches!(early.next(7), Some(NextRequest::Of(1, _))));
        let (whole, data) = early.take(7).unwrap();
        assert_eq!((whole.bhs.initiator_task_tag.get(), data.len()), (70, 1));
        early.forget(2);
        assert!(early.is_empty() && early.len == 0);
    }

    #[test]
    fn an_aborted_request_counts_as_received_whether_or_not_it_has_come() {
        let mut early = Early::default();
        early.hold(6, 1, pdu(60, 10));
        early.cancel(6);
        early.cancel(7);
        early.forget(1);
        assert_eq!(
            (early.next(6), early.next(7), early.len),
            (Some(NextRequest::Nobody), Some(NextRequest::Nobody), 0)
        );
        early.add_data(1, pdu(60, 5));
        assert!(early.take(6).is_none() && early.take(7).is_none() && early.is_empty() && early.len == 0);
    }

    #[test]
    fn there_is_room_for_so_much_data_and_no_more() {
        let mut early = Early::default();
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
