//! A write that is longer than the volume accepts, of a client that did not request the block
//! sizes. Its payload is received in pieces, and each is written as soon as it is complete.
//!
//! Two pieces hold memory at a time: one is received while the other is written. After an error the
//! rest of the payload is discarded. The reply follows the last piece, so that no write of this
//! request is in flight when the client gets it.

use super::pending::PendingRequest;
use super::request::NbdRequestRefusal;
use crate::driver::session::Demand;
use crate::multi_step::piece_end;
use blockmux_volume::SgList;

/// A long write in progress.
pub(super) struct LongWrite {
    /// The request with the reply.
    pub(super) write: PendingRequest,
    /// The volume's block, in bytes.
    block: u64,
    /// Offset in the volume of the next byte to receive.
    at: u64,
    /// Memory of the piece that is being received.
    place: Option<SgList>,
    /// Pieces that are being written.
    in_flight: u32,
    /// Why the write fails.
    refusal: Option<NbdRequestRefusal>,
    /// The client has closed its side after the payload.
    pub(super) is_last: bool,
}

impl LongWrite {
    pub(super) fn new(write: PendingRequest, block: u64) -> LongWrite {
        let at = write.offset;
        LongWrite { write, block, at, place: None, in_flight: 0, refusal: None, is_last: false }
    }

    /// The piece whose payload comes next.
    pub(super) fn piece(&self) -> PendingRequest {
        let length = piece_end(self.at, &self.write.bytes(), self.block).saturating_sub(self.at);
        PendingRequest { offset: self.at, length, ..self.write }
    }

    /// Whether the next piece needs memory.
    pub(super) fn wants_memory(&self) -> bool {
        self.place.is_none()
            && self.refusal.is_none()
            && !self.is_received()
            && self.in_flight < MAX_IN_FLIGHT
    }

    /// Receives the next piece into this memory.
    pub(super) fn place(&mut self, memory: SgList) {
        self.place = Some(memory);
    }

    pub(super) fn demand(&self) -> Demand {
        match &self.place {
            Some(memory) => Demand::Place(memory.clone()),
            None if self.refusal.is_some() && !self.is_received() => Demand::Bytes(1),
            None => Demand::Nothing,
        }
    }

    /// Called when the memory is filled. Returns the piece to write, unless the write has failed.
    pub(super) fn on_placed(&mut self) -> Option<(PendingRequest, SgList)> {
        let (piece, memory) = (self.piece(), self.place.take()?);
        self.at = piece.end();
        if self.refusal.is_some() {
            return None;
        }
        self.in_flight = self.in_flight.saturating_add(1);
        Some((piece, memory))
    }

    /// Records the result of writing a piece.
    pub(super) fn on_written(&mut self, result: Result<(), NbdRequestRefusal>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Err(refusal) = result {
            self.fail(refusal);
        }
    }

    /// The write fails; further pieces are discarded. The first reason is reported.
    pub(super) fn fail(&mut self, refusal: NbdRequestRefusal) {
        self.refusal.get_or_insert(refusal);
    }

    /// Discards payload of a write that has failed; returns the number of bytes.
    pub(super) fn discard(&mut self, unread: usize) -> usize {
        if self.refusal.is_none() || self.place.is_some() {
            return 0;
        }
        let taken = self.write.end().saturating_sub(self.at).min(unread as u64);
        self.at = self.at.saturating_add(taken);
        taken as usize
    }

    /// Whether the payload has arrived.
    pub(super) fn is_received(&self) -> bool {
        self.at == self.write.end()
    }

    /// The result, once the payload has arrived and nothing is in flight.
    pub(super) fn result(&self) -> Option<Result<(), &NbdRequestRefusal>> {
        let is_over = self.is_received() && self.in_flight == 0;
        is_over.then(|| self.refusal.as_ref().map_or(Ok(()), Err))
    }
}

/// The maximum number of pieces that are being written while another one is received.
const MAX_IN_FLIGHT: u32 = 1;
