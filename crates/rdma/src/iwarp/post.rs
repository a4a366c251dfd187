//! The session's side of software iWARP: posting work, executing it immediately where possible, and
//! reporting events.

use super::pending::PostedTransfer;
use super::receive::PLACED_PAYLOAD;
use super::{Iwarp, IwarpPhase, PRIVATE_DATA};
use crate::queue_pair::{Caps, Fault, Provider};
use blockmux_proto::rdma::{
    Event, MESSAGE, MessageHead, QueuePair, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::iwarp::ddp::TAGGED_LEN;

impl QueuePair for Iwarp {
    #[inline]
    fn room(&self) -> usize {
        self.room()
    }

    #[inline]
    fn post(&mut self, work: WorkRequest) {
        if self.phase == IwarpPhase::Connected && self.transmit_immediately(&work) {
            return;
        }
        match work {
            WorkRequest::Receive => self.receive_side.untagged.post_receives(1),
            WorkRequest::Invalidate { stag } => drop(self.invalidate(stag)),
            WorkRequest::Register { id, local, access } => self.post_registration(id, local, access),
            WorkRequest::Accept { private_data } => self.answer(true, &private_data),
            WorkRequest::Reject { private_data } => self.answer(false, &private_data),
            WorkRequest::Send { id, head, payload, invalidate, is_solicited } => {
                let is_possible = head.len().saturating_add(payload.len()) <= u32::MAX as usize;
                self.enqueue(
                    id,
                    PostedTransfer::Send { head, payload, invalidate, is_solicited },
                    is_possible,
                );
            }
            WorkRequest::Read { id, local, remote } => {
                let is_possible = self.negotiated.ord > 0 && remote.fills(&local);
                self.enqueue(id, PostedTransfer::Read { local, remote }, is_possible);
            }
            WorkRequest::Write { id, local, remote } => {
                let is_possible = remote.has_room_for(&local);
                self.enqueue(id, PostedTransfer::Write { local, remote }, is_possible);
            }
            WorkRequest::Disconnect if self.phase == IwarpPhase::Connected => {
                self.phase = IwarpPhase::Disconnecting
            }
            WorkRequest::Disconnect => self.end(None),
        }
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.outbox.len()
    }

    #[inline]
    fn receive(&mut self, count: u32) {
        self.receive_side.untagged.post_receives(count);
    }

    #[inline]
    fn send(&mut self, head: &[u8], payload: &SgList, invalidate: Option<Stag>) {
        if self.phase == IwarpPhase::Connected && self.send_whole(head, payload, invalidate, false) {
            return;
        }
        let is_possible = head.len().saturating_add(payload.len()) <= u32::MAX as usize;
        let (head, payload) = (MessageHead::from_slice(head), payload.clone());
        let send = PostedTransfer::Send { head, payload, invalidate, is_solicited: false };
        self.enqueue(MESSAGE, send, is_possible);
    }

    #[inline]
    fn write(&mut self, id: WorkId, mut local: SgList, remote: Remote) -> bool {
        if self.phase == IwarpPhase::Connected {
            match self.write_whole(local, remote) {
                Ok(()) => return false,
                Err(unsent) => local = unsent,
            }
        }
        let is_possible = remote.has_room_for(&local);
        self.enqueue(id, PostedTransfer::Write { local, remote }, is_possible);
        true
    }

    #[inline]
    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        if self.phase != IwarpPhase::Closed
            && let Ok(remote) = self.regions.take(local, access)
        {
            return Some(remote);
        }
        self.post_registration(id, std::mem::take(local), access);
        None
    }

    /// Longer data is received into its place, and an FPDU that is not all of the data is copied.
    #[inline]
    fn register_unbacked(&mut self, len: u32) -> Option<Remote> {
        let max = self.transmitter.framer.room(TAGGED_LEN).min(PLACED_PAYLOAD);
        if self.phase == IwarpPhase::Closed || len as usize > max {
            return None;
        }
        self.regions.register_unbacked(len).ok()
    }

    #[inline]
    fn invalidate(&mut self, stag: Stag) -> Option<Seg> {
        self.receive_side.revoke(stag);
        self.regions.invalidate(stag).ok().flatten()
    }
}

impl Provider for Iwarp {
    fn caps(&self) -> Caps {
        Caps {
            private_data: PRIVATE_DATA,
            max_transfer: u32::MAX,
            reads: self.negotiated.ord,
            peer_reads: self.negotiated.ird,
            invalidates: true,
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        self.transmit();
        let sent = self.transmitter.sent(&self.outbox);
        if let Some(id) = self.pending.pop_sent(sent) {
            return Some(Event::Done { id, result: Ok(()) });
        }
        if self.phase == IwarpPhase::Disconnecting && self.pending.is_empty() && self.transmitter.is_idle() {
            self.end(None);
        }
        self.events.pop_front()
    }

    fn fault(&self) -> Option<Fault> {
        self.fault
    }
}

impl Iwarp {
    #[inline]
    pub(super) fn room(&self) -> usize {
        match self.phase {
            IwarpPhase::Connected => (self.endpoint.sends as usize).saturating_sub(self.pending.len()),
            _ => 0,
        }
    }

    #[inline]
    fn enqueue(&mut self, id: WorkId, transfer: PostedTransfer, is_possible: bool) {
        if matches!(self.phase, IwarpPhase::Disconnecting | IwarpPhase::Closed) {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        if !is_possible || self.room() == 0 {
            return self.fail(id);
        }
        self.pending.post(id, transfer);
        self.transmit();
    }

    fn post_registration(&mut self, id: WorkId, local: SgList, access: RemoteRights) {
        if self.phase == IwarpPhase::Closed {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        match self.regions.register(local, access) {
            Ok(remote) => self.events.push_back(Event::Registered { id, remote }),
            Err(_) => self.fail(id),
        }
    }

    /// Fails work that is not possible, which ends the connection.
    #[cold]
    pub(super) fn fail(&mut self, id: WorkId) {
        self.events.push_back(Event::Done { id, result: Err(WorkError::Local) });
        self.end(None);
    }
}
