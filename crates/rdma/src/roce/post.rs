//! The session's side of software RoCEv2: posting work, and reporting events.

use super::cm::PRIVATE_DATA;
use super::requester::RequestedTransfer;
use super::{Roce, RocePhase};
use crate::queue_pair::{Caps, Fault, Provider};
use blockmux_proto::rdma::{Event, QueuePair, Remote, RemoteRights, WorkError, WorkId, WorkRequest};
use blockmux_volume::SgList;

impl QueuePair for Roce {
    #[inline]
    fn room(&self) -> usize {
        match self.phase {
            RocePhase::Connected => (self.endpoint.sends as usize).saturating_sub(self.requester.len()),
            _ => 0,
        }
    }

    #[inline]
    fn post(&mut self, work: WorkRequest) {
        match work {
            WorkRequest::Receive => self.responder.post_receives(1),
            WorkRequest::Invalidate { stag } => {
                let _ = self.regions.invalidate(stag);
            }
            WorkRequest::Register { id, local, access } => self.post_registration(id, local, access),
            WorkRequest::Accept { private_data } => self.answer(true, &private_data),
            WorkRequest::Reject { private_data } => self.answer(false, &private_data),
            WorkRequest::Send { id, head, payload, invalidate, is_solicited } => {
                let len = head.len().saturating_add(payload.len());
                let send = RequestedTransfer::Send { head, payload, invalidate, is_solicited };
                self.enqueue(id, send, len <= MAX_TRANSFER as usize);
            }
            WorkRequest::Read { id, local, remote } => {
                let fits = remote.len <= MAX_TRANSFER && remote.fills(&local);
                let is_possible = self.requester.reads > 0 && fits;
                self.enqueue(id, RequestedTransfer::Read { local, remote }, is_possible);
            }
            WorkRequest::Write { id, local, remote } => {
                let is_possible = remote.has_room_for(&local) && local.len() <= MAX_TRANSFER as usize;
                self.enqueue(id, RequestedTransfer::Write { local, remote }, is_possible);
            }
            WorkRequest::Disconnect if self.phase == RocePhase::Connected => {
                self.phase = RocePhase::Disconnecting;
            }
            WorkRequest::Disconnect if matches!(self.phase, RocePhase::Disconnecting | RocePhase::Closed) => {
            }
            WorkRequest::Disconnect => self.disconnect_now(),
        }
    }

    #[inline]
    fn receive(&mut self, count: u32) {
        self.responder.post_receives(count);
    }

    #[inline]
    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        if self.phase != RocePhase::Closed
            && let Ok(remote) = self.regions.take(local, access)
        {
            return Some(remote);
        }
        self.post_registration(id, std::mem::take(local), access);
        None
    }
}

impl Provider for Roce {
    fn caps(&self) -> Caps {
        Caps {
            private_data: PRIVATE_DATA,
            max_transfer: MAX_TRANSFER,
            reads: self.requester.reads,
            peer_reads: self.responder.max_reads,
            invalidates: true,
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn fault(&self) -> Option<Fault> {
        self.fault
    }
}

impl Roce {
    #[inline]
    fn enqueue(&mut self, id: WorkId, transfer: RequestedTransfer, is_possible: bool) {
        if matches!(self.phase, RocePhase::Disconnecting | RocePhase::Closed) {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        if !is_possible || self.room() == 0 {
            return self.fail(id);
        }
        self.requester.post(id, transfer);
    }

    fn post_registration(&mut self, id: WorkId, local: SgList, access: RemoteRights) {
        if self.phase == RocePhase::Closed {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        match self.regions.register(local, access) {
            Ok(remote) => self.events.push_back(Event::Registered { id, remote }),
            Err(_) => self.fail(id),
        }
    }

    /// Fails work that is not possible, which ends the connection.
    #[cold]
    fn fail(&mut self, id: WorkId) {
        self.events.push_back(Event::Done { id, result: Err(WorkError::Local) });
        self.disconnect_now();
    }
}

/// Longest transfer in bytes. With the smallest path MTU its packets use half of the sequence
/// numbers that may be in flight.
const MAX_TRANSFER: u32 = 1 << 30;
