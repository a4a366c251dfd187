//! A byte stream to a session, delivered as [`blockmux_proto::driver::session`] specifies.

use crate::choices::Choices;
use blockmux_proto::driver::session::{Demand, MAX_DEMAND, ProtocolError, SecuredBy, StreamSession};
use blockmux_volume::{Chunk, Memory};
use std::time::Instant;

/// The bytes that the peer has sent, and how many of them the session has consumed.
pub(crate) struct Wire {
    bytes: Vec<u8>,
    /// Number of received bytes: in the chunk, or in the memory of a `Demand::Place`.
    received: usize,
    chunk: Chunk,
    /// Received length and total length of the current
    /// [`Demand::Place`](blockmux_proto::driver::session::Demand::Place).
    placed: usize,
    placing: usize,
}

impl Wire {
    pub(crate) fn new(bytes: Vec<u8>) -> Wire {
        Wire {
            bytes,
            received: 0,
            chunk: Chunk::new(Memory::from_heap(SMALLEST_CHUNK)),
            placed: 0,
            placing: 0,
        }
    }

    /// Adds bytes that the peer sends.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// All bytes that the session has consumed.
    pub(crate) fn taken(&self) -> &[u8] {
        &self.bytes[..self.received - self.chunk.unread().len()]
    }

    /// All bytes that were passed to the session.
    pub(crate) fn shown(&self) -> &[u8] {
        &self.bytes[..self.received]
    }

    /// Whether all bytes of the peer were received.
    pub(crate) fn is_drained(&self) -> bool {
        self.received == self.bytes.len()
    }

    /// Meets the session's demand as far as possible, receiving at most once; returns whether there
    /// was progress.
    pub(crate) fn turn<S: StreamSession>(
        &mut self,
        session: &mut S,
        choices: &mut Choices<'_>,
    ) -> Result<bool, ProtocolError> {
        match session.demand() {
            Demand::Bytes(least) => self.show(session, least, choices),
            Demand::Place(list) => {
                assert!(!list.is_empty(), "the memory to place into is empty");
                assert!(
                    self.placed == 0 || self.placing == list.len(),
                    "calling `demand` changed the memory to place into"
                );
                self.placing = list.len();
                let from_chunk = self.chunk.unread().len().min(list.len() - self.placed);
                list.slice(self.placed, from_chunk).copy_from(&self.chunk.unread()[..from_chunk]);
                self.chunk.take(from_chunk);
                self.placed += from_chunk;
                let came = self.arriving(choices).min(list.len() - self.placed);
                list.slice(self.placed, came).copy_from(&self.bytes[self.received..self.received + came]);
                self.received += came;
                self.placed += came;
                if self.placed == list.len() {
                    self.placed = 0;
                    session.on_placed(Instant::now())?;
                    return Ok(true);
                }
                Ok(from_chunk + came > 0)
            }
            Demand::StartTls => {
                assert!(self.chunk.unread().is_empty(), "plaintext bytes remain when TLS starts");
                session.on_secured(SecuredBy::Psk(b"user"), Instant::now())?;
                Ok(true)
            }
            Demand::Nothing | Demand::Close => Ok(false),
        }
    }

    fn show<S: StreamSession>(
        &mut self,
        session: &mut S,
        least: usize,
        choices: &mut Choices<'_>,
    ) -> Result<bool, ProtocolError> {
        assert!(0 < least && least <= MAX_DEMAND, "demands {least} bytes");
        if self.chunk.unread().len() < least {
            self.make_room(least, choices);
            let came = self.arriving(choices).min(self.chunk.room());
            self.chunk.extend(&self.bytes[self.received..self.received + came]);
            self.received += came;
            if self.chunk.unread().len() < least {
                return Ok(came > 0);
            }
        }
        let taken = session.on_bytes(&self.chunk, Instant::now())?;
        assert!(taken <= self.chunk.unread().len(), "the session consumed more bytes than there are");
        self.chunk.take(taken);
        let wants_the_same = matches!(session.demand(), Demand::Bytes(n) if n <= self.chunk.unread().len());
        assert!(taken > 0 || !wants_the_same, "the session consumed none of the bytes that it demanded");
        Ok(true)
    }

    /// Number of bytes of the next receive, if there is room.
    fn arriving(&self, choices: &mut Choices<'_>) -> usize {
        let left = self.bytes.len() - self.received;
        let most = match choices.byte() {
            0..=95 => usize::MAX,
            byte @ 96..=223 => usize::from(byte) - 95,
            byte => usize::from(byte - 223) << 9,
        };
        left.min(most)
    }

    /// Provides a chunk with room for `least` bytes; sometimes a new one even if the old one has
    /// room.
    fn make_room(&mut self, least: usize, choices: &mut Choices<'_>) {
        self.chunk.recycle();
        let missing = least - self.chunk.unread().len();
        if self.chunk.room() >= missing && choices.byte() < 240 {
            return;
        }
        if choices.byte() < 128 && self.chunk.compact() && self.chunk.room() >= missing {
            return;
        }
        let capacity = choices.of(&[SMALLEST_CHUNK, SMALLEST_CHUNK, LARGEST_CHUNK]).max(least);
        let mut fresh = Chunk::new(Memory::from_heap(capacity.max(self.chunk.unread().len() + 1)));
        fresh.extend(self.chunk.unread());
        self.chunk = fresh;
    }
}

/// Size of the smallest chunk in bytes.
const SMALLEST_CHUNK: usize = 4096;
/// Size of the largest chunk in bytes: that of a real receive buffer.
const LARGEST_CHUNK: usize = 256 << 10;
