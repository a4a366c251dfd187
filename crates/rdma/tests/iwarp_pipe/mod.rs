//! Two ends of an iWARP connection in one thread, with a stream between them that allocates
//! nothing.

use crate::rounds::{ConnectedPair, endpoint};
use blockmux_proto::driver::outbox::OutboxPiece;
use blockmux_proto::driver::session::{Demand, StreamSession};
use blockmux_proto::rdma::{Event, QueuePair};
use blockmux_rdma::Provider;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use blockmux_volume::{Chunk, Memory, Pool};
use std::time::Instant;

/// An established connection.
pub(crate) struct Pipe {
    active: Iwarp,
    passive: Iwarp,
    /// Bytes in transit to the active side, and to the passive side.
    chunks: [Chunk; 2],
}

impl Pipe {
    pub(crate) fn new(config: &IwarpConfig) -> Pipe {
        let endpoint = endpoint();
        let (pool, now) = (Pool::new(64 << 20), Instant::now());
        let mut pipe = Pipe {
            active: Iwarp::active(&endpoint, config.clone(), pool.clone(), [1; 32], now),
            passive: Iwarp::passive(&endpoint, config.clone(), pool, [2; 32], now),
            chunks: [(); 2].map(|()| Chunk::new(Memory::from_heap(BUFFER))),
        };
        pipe.carry();
        assert!(matches!(pipe.passive.poll(), Some(Event::Requested { .. })));
        pipe.passive.accept(Vec::new());
        pipe.carry();
        for end in [&mut pipe.active, &mut pipe.passive] {
            assert!(matches!(end.poll(), Some(Event::Connected { .. })));
        }
        while pipe.carry() {}
        pipe
    }
}

impl ConnectedPair for Pipe {
    type End = Iwarp;

    fn active(&mut self) -> &mut Iwarp {
        &mut self.active
    }

    fn passive(&mut self) -> &mut Iwarp {
        &mut self.passive
    }

    /// Transports the bytes of both outboxes.
    fn carry(&mut self) -> bool {
        let moves = !self.active.outbox().is_empty() || !self.passive.outbox().is_empty();
        carry(&mut self.active, &mut self.passive, &mut self.chunks[1]);
        carry(&mut self.passive, &mut self.active, &mut self.chunks[0]);
        moves
    }
}

fn carry(from: &mut Iwarp, to: &mut Iwarp, chunk: &mut Chunk) {
    chunk.recycle();
    if chunk.room() < BUFFER / 2 {
        assert!(chunk.compact(), "the buffer is still borrowed");
    }
    let outbox = from.outbox();
    let mut sent = 0;
    for piece in outbox.pieces() {
        let spare = chunk.spare();
        let len = match piece {
            OutboxPiece::Head(head) => {
                let len = head.len().min(spare.len());
                spare[..len].copy_from_slice(&head[..len]);
                len
            }
            OutboxPiece::Payload(seg) => {
                let len = seg.len().min(spare.len());
                seg.slice(0, len).copy_to(&mut spare[..len]);
                len
            }
        };
        chunk.fill(len);
        sent += len;
    }
    outbox.consume(sent);
    loop {
        match to.demand() {
            Demand::Bytes(least) if chunk.unread().len() >= least => {
                let taken = to.on_bytes(chunk, Instant::now()).expect("a good peer");
                chunk.take(taken);
            }
            Demand::Place(list) => {
                // Placed only once all of it has arrived.
                let here = chunk.unread().len().min(list.len());
                if here < list.len() {
                    return;
                }
                list.copy_from(&chunk.unread()[..here]);
                chunk.take(here);
                to.on_placed(Instant::now()).expect("a good peer");
            }
            _ => return,
        }
    }
}

const BUFFER: usize = 1 << 20;
