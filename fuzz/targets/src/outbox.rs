//! The outbox against a model, a queue of bytes: all pushed bytes must be sent once and in order.

use arbitrary::{Arbitrary, Result, Unstructured};
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_volume::{Seg, SgList};
use std::collections::VecDeque;

/// Reads `data` as a list of operations and applies each to an outbox and to its model.
pub(crate) fn outbox(data: &[u8]) {
    // The end of the bytes ends the list, and is no error.
    let _ = run(&mut Unstructured::new(data));
}

#[derive(Debug, Arbitrary)]
enum OutboxOperation {
    Head { len: u16 },
    Payload { lens: [u8; 3] },
    Consume { len: u16 },
    ConsumeAll,
    TakeBytes,
    Clear,
}

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let (mut outbox, mut model) = (Outbox::default(), VecDeque::new());
    let mut fill = 0u8;
    while !input.is_empty() {
        match OutboxOperation::arbitrary(input)? {
            OutboxOperation::Head { len } => {
                let head = bytes(&mut fill, usize::from(len) % MAX_HEAD);
                outbox.push_head(&head);
                model.extend(head);
            }
            OutboxOperation::Payload { lens } => {
                let mut list = SgList::default();
                for len in lens {
                    let payload = bytes(&mut fill, len.into());
                    list.push(Seg::from_slice(&payload));
                    model.extend(payload);
                }
                outbox.push_payload(&list);
            }
            OutboxOperation::Consume { len } => consume(&mut outbox, &mut model, len.into()),
            OutboxOperation::ConsumeAll => consume(&mut outbox, &mut model, usize::MAX),
            OutboxOperation::TakeBytes => {
                assert!(model.drain(..).eq(outbox.take_bytes()));
            }
            OutboxOperation::Clear => {
                outbox.clear();
                model.clear();
            }
        }
        check(&outbox, &mut model);
        if model.len() > MAX_QUEUED {
            consume(&mut outbox, &mut model, MAX_QUEUED / 2);
        }
    }
    Ok(())
}

/// Consumes at most `len` bytes, like a system call.
fn consume(outbox: &mut Outbox, model: &mut VecDeque<u8>, len: usize) {
    let len = len.min(model.len());
    outbox.consume(len);
    model.drain(..len);
}

fn check(outbox: &Outbox, model: &mut VecDeque<u8>) {
    assert_eq!((outbox.len(), outbox.is_empty()), (model.len(), model.is_empty()));
    let mut expected = &*model.make_contiguous();
    for piece in outbox.pieces() {
        let piece = match piece {
            OutboxPiece::Head(head) => head.to_vec(),
            OutboxPiece::Payload(seg) => seg.to_vec(),
        };
        let here;
        (here, expected) = expected.split_at(piece.len());
        assert!(piece == here);
    }
    assert!(expected.is_empty());
}

/// `len` bytes that differ from their neighbours, so that a wrong order is detected.
fn bytes(fill: &mut u8, len: usize) -> Vec<u8> {
    let mut next = || {
        *fill = fill.wrapping_add(1);
        *fill
    };
    (0..len).map(|_| next()).collect()
}

/// Maximum length of a head, in bytes; a few such heads make the outbox compact its buffer.
const MAX_HEAD: usize = 6000;

/// Maximum queued bytes; above it half is consumed, so that checks stay cheap.
const MAX_QUEUED: usize = 32 << 10;
