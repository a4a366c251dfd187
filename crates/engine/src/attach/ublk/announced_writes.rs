//! Writes on the device of a user other than root, whose data the driver copies (`NEED_GET_DATA`).
//!
//! The driver announces a write, and copies its data to the memory that a further command names. If
//! it cannot copy, the tag gets another request instead. It takes no answer to a write before it
//! has copied, so a write that is refused is copied to memory that nobody reads.

use super::queue_task::Arrival;
use blockmux_proto::ublk::MAX_BYTES;
use blockmux_proto::ublk::wire::{IoDesc, IoOp};
use blockmux_volume::{Memory, SgList};
use std::cell::RefCell;

/// The write of each tag of a queue.
pub(super) struct AnnouncedWrites(RefCell<Vec<WriteState>>);

/// What a tag's write waits for.
#[derive(Default)]
enum WriteState {
    /// Nothing, or the tag has another request.
    #[default]
    Nothing,
    /// The command that names memory for its data.
    Memory,
    /// Its data, which is copied to this memory until the command completes.
    Data(SgList),
    /// As `Data`, but it is answered with this error once the data is there.
    Refused(SgList, i32),
}

/// What the completion of a command means.
pub(super) enum CompletionMeaning {
    /// This has come for the queue.
    Arrived(Arrival),
    /// The data of a write that was refused is there: it is answered with this error.
    Refused(i32),
}

/// When a request is answered.
pub(super) enum AnswerTime {
    Now,
    /// Once its data was copied to this memory, which a command is to name.
    AfterCopyTo(SgList),
    /// Once its data is there, which is being copied.
    WithData,
}

impl AnnouncedWrites {
    /// No request, for `depth` tags.
    pub(super) fn new(depth: u16) -> AnnouncedWrites {
        AnnouncedWrites(RefCell::new((0..depth).map(|_| WriteState::default()).collect()))
    }

    /// Handles the completion of a tag's command. The tag has the request of `desc`, a write that
    /// is announced if `is_announced`.
    pub(super) fn on_completion(&self, tag: u16, is_announced: bool, desc: &IoDesc) -> CompletionMeaning {
        let now = if is_announced { WriteState::Memory } else { WriteState::Nothing };
        // Without an announcement, a write is the one whose data was copied.
        let has_data = !is_announced && desc.op() == IoOp::WRITE;
        CompletionMeaning::Arrived(match self.replace(tag, now) {
            // The driver has copied a part only if memory is short. It sends the rest again.
            WriteState::Data(data) if has_data => Arrival::Data(data.slice(0, data.len().min(bytes(desc)))),
            WriteState::Data(_) => Arrival::Replacement,
            WriteState::Refused(_, error) if has_data => return CompletionMeaning::Refused(error),
            WriteState::Refused(..) | WriteState::Nothing | WriteState::Memory => Arrival::Request,
        })
    }

    /// Keeps the memory of a write until its data is there; returns whether a command is to name
    /// it, because the write was announced.
    pub(super) fn begin_copy(&self, tag: u16, data: &SgList) -> bool {
        let waits = self.waits_for_memory(tag);
        if waits {
            self.replace(tag, WriteState::Data(data.clone()));
        }
        waits
    }

    /// When the request of `desc` is answered with `result`.
    pub(super) fn on_answer(&self, tag: u16, result: i32, desc: &IoDesc) -> AnswerTime {
        match self.replace(tag, WriteState::Nothing) {
            WriteState::Nothing => AnswerTime::Now,
            WriteState::Memory => {
                let len = bytes(desc);
                let nowhere = SgList::one(Memory::from_heap(len).seg(0, len));
                self.replace(tag, WriteState::Refused(nowhere.clone(), result));
                AnswerTime::AfterCopyTo(nowhere)
            }
            WriteState::Data(data) | WriteState::Refused(data, _) => {
                self.replace(tag, WriteState::Refused(data, result));
                AnswerTime::WithData
            }
        }
    }

    fn waits_for_memory(&self, tag: u16) -> bool {
        matches!(self.0.borrow().get(usize::from(tag)), Some(WriteState::Memory))
    }

    /// Sets the state of a tag; returns what it was.
    fn replace(&self, tag: u16, state: WriteState) -> WriteState {
        let mut writes = self.0.borrow_mut();
        writes.get_mut(usize::from(tag)).map_or_else(WriteState::default, |old| std::mem::replace(old, state))
    }
}

/// The length of a request's data.
fn bytes(desc: &IoDesc) -> usize {
    desc.nr_sectors.saturating_mul(512).min(MAX_BYTES) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Seg;

    const EIO: i32 = -5;

    fn desc(op: IoOp, nr_sectors: u32) -> IoDesc {
        IoDesc { op_flags: op.0.into(), nr_sectors, ..IoDesc::default() }
    }

    fn memory(len: usize) -> SgList {
        SgList::one(Seg::from_slice(&vec![1; len]))
    }

    /// A write of two sectors on tag 1, announced.
    fn announced() -> AnnouncedWrites {
        let writes = AnnouncedWrites::new(2);
        let meaning = writes.on_completion(1, true, &desc(IoOp::WRITE, 2));
        assert!(matches!(meaning, CompletionMeaning::Arrived(Arrival::Request)));
        writes
    }

    #[test]
    fn a_write_gets_its_data_and_is_answered_at_once() {
        let writes = announced();
        assert!(writes.begin_copy(1, &memory(1024)));
        let meaning = writes.on_completion(1, false, &desc(IoOp::WRITE, 2));
        assert!(
            matches!(meaning, CompletionMeaning::Arrived(Arrival::Data(data)) if data.to_vec() == [1; 1024])
        );
        assert!(matches!(writes.on_answer(1, 1024, &desc(IoOp::WRITE, 2)), AnswerTime::Now));
    }

    #[test]
    fn memory_is_named_for_announced_writes_only() {
        let writes = announced();
        assert!(!writes.begin_copy(0, &memory(512)) && !writes.begin_copy(7, &memory(512)));
        assert!(writes.begin_copy(1, &memory(1024)));
        assert!(!writes.begin_copy(1, &memory(1024)), "the driver may write to the first");
    }

    #[test]
    fn data_that_was_copied_in_part_is_shorter() {
        let writes = announced();
        writes.begin_copy(1, &memory(1024));
        let meaning = writes.on_completion(1, false, &desc(IoOp::WRITE, 1));
        assert!(matches!(meaning, CompletionMeaning::Arrived(Arrival::Data(data)) if data.len() == 512));
    }

    #[test]
    fn a_write_that_is_refused_is_copied_before_it_is_answered() {
        let writes = announced();
        let time = writes.on_answer(1, EIO, &desc(IoOp::WRITE, 2));
        assert!(matches!(time, AnswerTime::AfterCopyTo(nowhere) if nowhere.len() == 1024));
        let meaning = writes.on_completion(1, false, &desc(IoOp::WRITE, 2));
        assert!(matches!(meaning, CompletionMeaning::Refused(EIO)));
    }

    #[test]
    fn a_write_that_fails_while_it_is_copied_is_answered_with_its_data() {
        let writes = announced();
        let data = memory(1024);
        writes.begin_copy(1, &data);
        assert!(matches!(writes.on_answer(1, EIO, &desc(IoOp::WRITE, 2)), AnswerTime::WithData));
        let meaning = writes.on_completion(1, false, &desc(IoOp::WRITE, 2));
        assert!(matches!(meaning, CompletionMeaning::Refused(EIO)));
    }

    #[test]
    fn another_request_replaces_a_write_that_could_not_be_copied() {
        for (is_announced, next) in [(true, desc(IoOp::WRITE, 8)), (false, desc(IoOp::READ, 1))] {
            let writes = announced();
            writes.begin_copy(1, &memory(1024));
            let meaning = writes.on_completion(1, is_announced, &next);
            assert!(matches!(meaning, CompletionMeaning::Arrived(Arrival::Replacement)));
            // Its own answer does not wait for the data of the other.
            let waits = matches!(writes.on_answer(1, EIO, &next), AnswerTime::AfterCopyTo(_));
            assert_eq!(waits, is_announced);
            // A write that was refused has been answered, as far as the queue knows.
            let writes = announced();
            writes.on_answer(1, EIO, &desc(IoOp::WRITE, 2));
            let meaning = writes.on_completion(1, is_announced, &next);
            assert!(matches!(meaning, CompletionMeaning::Arrived(Arrival::Request)));
        }
    }
}
