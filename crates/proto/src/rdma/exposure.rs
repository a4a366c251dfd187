//! The commands of an initiator on one queue pair, and the memory that the peer may access for
//! them.
//!
//! ```text
//!   push ──▶ `unsent` ──send──▶ Register ──Registered──▶ Send, with the key of the memory
//!   on_response, on_abort ──┬─ no memory, or the peer has invalidated it ──▶ the command has ended
//!                           └─ `closing` ──invalidate_next──▶ Invalidate ──▶ the command has ended
//! ```
//! A command's memory is exposed from before the command is sent until it has ended: until then the
//! peer may access it. Commands are sent in order, so one that waits for its registration delays
//! those behind it; a queue pair completes registrations in the same turn. A short read without
//! memory gets none where the queue pair can provide it ([`QueuePair::register_unbacked`]).

use super::{QueuePair, Remote, RemoteRights, Stag, WorkId};
use crate::initiator::command_memory::CommandMemory;
use crate::initiator::command_queue::DataTransfer;
use crate::slots::SlotKey;
use blockmux_volume::{Seg, SgList};
use std::collections::VecDeque;

/// A command as it is sent over a queue pair.
pub(crate) trait ExposedCommand {
    /// Sends the command with `payload`, which may be empty, and with the description of the memory
    /// that the peer may access.
    fn send(
        &mut self,
        payload: &SgList,
        exposed: Option<(Remote, RemoteRights)>,
        queue_pair: &mut impl QueuePair,
    );
}

/// The data of a command.
pub(crate) enum CommandData {
    None,
    /// It is sent with the command.
    Immediate(SgList),
    /// The peer transfers this many bytes by RDMA to a read without memory, and they have to be
    /// registered.
    Unbacked(u32),
    /// The peer transfers it by RDMA, and its memory has to be registered.
    Unregistered(SgList, RemoteRights),
    /// The registration was posted and has not completed.
    Registering(RemoteRights),
    Registered(Remote, RemoteRights),
}

impl CommandData {
    /// The data of a command. Up to `max_immediate` bytes are sent with the command.
    #[inline]
    pub(crate) fn new(
        key: SlotKey,
        transfer: DataTransfer,
        memory: &mut impl CommandMemory,
        max_immediate: u32,
    ) -> CommandData {
        match transfer {
            DataTransfer::Nothing | DataTransfer::In(0) | DataTransfer::Out(0) => CommandData::None,
            DataTransfer::In(len) if memory.can_borrow(key, len as usize) => CommandData::Unbacked(len),
            DataTransfer::In(len) => {
                CommandData::Unregistered(part(memory.data_in(key), len), RemoteRights::RemoteWrite)
            }
            DataTransfer::Out(len) => {
                let data = part(memory.data_out(key), len);
                match len <= max_immediate {
                    true => CommandData::Immediate(data),
                    false => CommandData::Unregistered(data, RemoteRights::RemoteRead),
                }
            }
        }
    }
}

/// The `len` bytes of a command's data, which begins at the given offset of a list.
#[inline]
fn part(list: Option<(&SgList, usize)>, len: u32) -> SgList {
    match list {
        Some((list, 0)) if list.len() == len as usize => list.clone(),
        Some((list, base)) => list.slice(base, len as usize),
        None => SgList::default(),
    }
}

/// The commands on one queue pair: `C` is a command, `R` the response to one.
pub(crate) struct ExposedCommands<C, R> {
    /// Commands that were not sent, oldest first.
    unsent: VecDeque<UnsentCommand<C>>,
    /// State of each command, by its slot.
    states: Vec<ExposureState>,
    /// Commands whose memory has to be invalidated.
    closing: VecDeque<ClosingCommand<R>>,
    /// Number of commands that were sent and have not ended.
    sent: u32,
}

struct ClosingCommand<R> {
    key: SlotKey,
    stag: Stag,
    /// It is a read without memory.
    is_unbacked: bool,
    /// The peer's response; `None` if the peer has aborted the command.
    response: Option<R>,
}

struct UnsentCommand<C> {
    key: SlotKey,
    command: C,
    data: CommandData,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExposureState {
    #[default]
    Unsent,
    /// The peer has the command, and access to the memory with this key if it needs any.
    Sent { stag: Option<Stag>, is_unbacked: bool },
    /// The peer has completed the command, and its memory has to be invalidated.
    Closing,
}

/// A command that has ended when its memory was invalidated.
pub(crate) struct EndedCommand<R> {
    pub(crate) key: SlotKey,
    /// The peer's response; `None` if the peer has aborted the command.
    pub(crate) response: Option<R>,
    /// The data of a read without memory.
    pub(crate) written: Option<Seg>,
}

/// How a peer's response contradicts the state of its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrongResponse {
    /// The command was not sent.
    Unsent,
    /// The command has been completed or aborted already.
    Repeated,
    /// It has invalidated other memory than the command's.
    OtherMemory,
}

impl<C, R> Default for ExposedCommands<C, R> {
    fn default() -> ExposedCommands<C, R> {
        ExposedCommands { unsent: VecDeque::new(), states: Vec::new(), closing: VecDeque::new(), sent: 0 }
    }
}

impl<C: ExposedCommand, R> ExposedCommands<C, R> {
    /// Queues a command.
    #[inline]
    pub(crate) fn push(&mut self, key: SlotKey, command: C, data: CommandData) {
        *self.state(key) = ExposureState::Unsent;
        self.unsent.push_back(UnsentCommand { key, command, data });
    }

    /// Handles a completed registration. One whose command does not wait for it is ignored.
    pub(crate) fn on_registered(&mut self, id: WorkId, remote: Remote) {
        if let Some(next) = self.unsent.front_mut()
            && let CommandData::Registering(access) = next.data
            && registration(next.key) == id
        {
            next.data = CommandData::Registered(remote, access);
        }
    }

    /// Registers memory and sends commands while there is room and the peer has fewer than
    /// `max_sent`. Returns whether there was progress.
    #[inline]
    pub(crate) fn send(
        &mut self,
        queue_pair: &mut impl QueuePair,
        max_sent: u32,
        memory: &mut impl CommandMemory,
    ) -> bool {
        let (mut has_moved, mut count) = (false, 0);
        while self.sent < max_sent
            && queue_pair.room() > 0
            && let Some(next) = self.unsent.get_mut(count)
        {
            let mut is_unbacked = false;
            if let CommandData::Unbacked(len) = next.data {
                let access = RemoteRights::RemoteWrite;
                let remote = queue_pair.register_unbacked(len);
                is_unbacked = remote.is_some();
                next.data = match remote {
                    Some(remote) => CommandData::Registered(remote, access),
                    None => CommandData::Unregistered(part(memory.data_in(next.key), len), access),
                };
            }
            if let CommandData::Unregistered(list, access) = &mut next.data {
                has_moved = true;
                let access = *access;
                next.data = match queue_pair.register(registration(next.key), list, access) {
                    Some(remote) => CommandData::Registered(remote, access),
                    None => CommandData::Registering(access),
                };
            }
            let nothing = SgList::default();
            let (payload, exposed) = match &next.data {
                CommandData::Unbacked(_) | CommandData::Unregistered(..) | CommandData::Registering(_) => {
                    break;
                }
                CommandData::None => (&nothing, None),
                CommandData::Immediate(payload) => (payload, None),
                CommandData::Registered(remote, access) => (&nothing, Some((*remote, *access))),
            };
            next.command.send(payload, exposed, queue_pair);
            let key = next.key;
            let stag = exposed.map(|(remote, _)| remote.stag);
            *self.state(key) = ExposureState::Sent { stag, is_unbacked };
            self.sent = self.sent.saturating_add(1);
            count = count.saturating_add(1);
        }
        // Dropped where they are: a command moved out of the queue is copied.
        drop(self.unsent.drain(..count));
        has_moved || count > 0
    }

    /// Handles the response to a command, with the memory that it has invalidated. Returns the
    /// command's memory if that is still valid: the command must not end before [`Self::close`] and
    /// [`Self::invalidate_next`].
    ///
    /// # Errors
    /// If the command cannot have this response.
    #[inline]
    pub(crate) fn on_response(
        &mut self,
        key: SlotKey,
        invalidated: Option<Stag>,
    ) -> Result<Option<Stag>, WrongResponse> {
        match (*self.state(key), invalidated) {
            (ExposureState::Sent { stag, .. }, _) if stag == invalidated => {
                self.sent = self.sent.saturating_sub(1);
                Ok(None)
            }
            (ExposureState::Sent { stag, .. }, None) => Ok(stag),
            (ExposureState::Sent { .. }, Some(_)) => Err(WrongResponse::OtherMemory),
            (ExposureState::Unsent, _) => Err(WrongResponse::Unsent),
            (ExposureState::Closing, _) => Err(WrongResponse::Repeated),
        }
    }

    /// Queues the invalidation of a command's memory. The command then ends with `response`;
    /// without one, it was aborted.
    pub(crate) fn close(&mut self, key: SlotKey, stag: Stag, response: Option<R>) {
        let before = std::mem::replace(self.state(key), ExposureState::Closing);
        let is_unbacked = matches!(before, ExposureState::Sent { is_unbacked: true, .. });
        self.closing.push_back(ClosingCommand { key, stag, is_unbacked, response });
    }

    /// The peer has aborted a command. Returns whether the command has ended. If it
    /// was not sent, it is sent nevertheless; otherwise it ends after [`Self::invalidate_next`].
    pub(crate) fn on_abort(&mut self, key: SlotKey) -> bool {
        match *self.state(key) {
            ExposureState::Unsent | ExposureState::Closing => return false,
            ExposureState::Sent { stag: Some(stag), .. } => self.close(key, stag, None),
            ExposureState::Sent { stag: None, .. } => {
                self.sent = self.sent.saturating_sub(1);
                return true;
            }
        }
        false
    }

    /// Invalidates the memory of the next command that ends thereby, and returns the command.
    ///
    /// A read without memory whose data is lost has not ended. Its connection has, because it lost
    /// the registration, and what ends the connection ends its commands.
    #[inline]
    pub(crate) fn invalidate_next(&mut self, queue_pair: &mut impl QueuePair) -> Option<EndedCommand<R>> {
        while let Some(ClosingCommand { key, stag, is_unbacked, response }) = self.closing.pop_front() {
            let written = queue_pair.invalidate(stag);
            self.sent = self.sent.saturating_sub(1);
            if written.is_some() || !is_unbacked {
                return Some(EndedCommand { key, response, written });
            }
        }
        None
    }

    /// Whether the peer has this command and has not completed it.
    pub(crate) fn is_sent(&mut self, key: SlotKey) -> bool {
        matches!(self.state(key), ExposureState::Sent { .. })
    }

    /// Number of commands that have not ended.
    #[inline]
    pub(crate) fn in_flight(&self) -> u32 {
        // The slots of the command table bound it, so it fits.
        self.sent.saturating_add(self.unsent.len() as u32)
    }

    /// Whether all commands were sent.
    #[inline]
    pub(crate) fn has_sent_all(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Whether memory of completed commands has to be invalidated.
    #[inline]
    pub(crate) fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// Drops the commands that were not sent.
    pub(crate) fn drop_unsent(&mut self) {
        self.unsent.clear();
    }

    /// The state of a command. The caller limits the number of slots.
    #[inline]
    fn state(&mut self, key: SlotKey) -> &mut ExposureState {
        let at = key.index();
        if self.states.len() <= at {
            self.states.resize(at.saturating_add(1), ExposureState::Unsent);
        }
        #[allow(clippy::indexing_slicing, reason = "it was made long enough above")]
        &mut self.states[at]
    }
}

/// The work request identifier of a command's registration.
#[inline]
fn registration(key: SlotKey) -> WorkId {
    WorkId(REGISTRATION | u64::from(key.short()))
}

/// Bit in the work request identifier of each registration, so that none is that of a message.
const REGISTRATION: u64 = 1 << 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::WorkRequest;
    use crate::rdma::testing::Recorder;
    use crate::slots::Slots;
    use blockmux_volume::Seg;

    /// A command that is one byte.
    impl ExposedCommand for u8 {
        fn send(
            &mut self,
            payload: &SgList,
            exposed: Option<(Remote, RemoteRights)>,
            queue_pair: &mut impl QueuePair,
        ) {
            assert!(payload.is_empty() || exposed.is_none());
            queue_pair.send(&[*self], payload, None);
        }
    }

    type Commands = ExposedCommands<u8, char>;

    /// Memory of four bytes for each command. A read of two bytes has none.
    struct Memory(SgList);

    impl Memory {
        fn new() -> Memory {
            Memory(SgList::one(Seg::from_slice(&[0; 4])))
        }
    }

    impl CommandMemory for Memory {
        fn data_out(&mut self, _key: SlotKey) -> Option<(&SgList, usize)> {
            Some((&self.0, 0))
        }

        fn data_in(&mut self, _key: SlotKey) -> Option<(&SgList, usize)> {
            Some((&self.0, 0))
        }

        fn can_borrow(&mut self, _key: SlotKey, len: usize) -> bool {
            len == 2
        }

        fn attach_borrowed(&mut self, _key: SlotKey, _data: Seg) {}
    }

    /// The memory that is given to the command `n`.
    fn memory(n: u8) -> Remote {
        Remote { stag: Stag(n.into()), address: 0, len: 4 }
    }

    /// Queues one command of each kind: with memory (0, 1), with immediate data (2), without (3).
    fn queued() -> (Commands, Vec<SlotKey>) {
        let transfers =
            [DataTransfer::In(4), DataTransfer::Out(4), DataTransfer::Out(2), DataTransfer::Nothing];
        let (mut commands, mut slots) = (Commands::default(), Slots::default());
        let mut push = |(n, transfer)| {
            let key = slots.insert(());
            commands.push(key, n, CommandData::new(key, transfer, &mut Memory::new(), 2));
            key
        };
        let keys = (0..).zip(transfers).map(&mut push).collect();
        (commands, keys)
    }

    /// Carries out the work that is posted; returns the commands that are sent.
    fn run(commands: &mut Commands, max_sent: u32) -> Vec<u8> {
        let (mut queue, mut sent) = (Recorder { room: 10, ..Recorder::default() }, Vec::new());
        let mut free = 0..;
        while commands.send(&mut queue, max_sent, &mut Memory::new()) {
            while let Some(work) = queue.works.pop_front() {
                match work {
                    WorkRequest::Register { id, .. } => {
                        commands.on_registered(WorkId(id.0 ^ 1 << 16), memory(99));
                        commands.on_registered(id, memory(free.next().unwrap()));
                    }
                    WorkRequest::Send { head, .. } => sent.push(head[0]),
                    other => panic!("{other:?}"),
                }
            }
        }
        sent
    }

    #[test]
    fn commands_are_sent_in_order_and_within_the_peers_limit() {
        let (mut commands, keys) = queued();
        assert_eq!(run(&mut commands, 0), []);
        assert_eq!(run(&mut commands, 3), [0, 1, 2]);
        assert!(!commands.is_sent(keys[3]) && !commands.has_sent_all());
        assert_eq!(commands.on_response(keys[2], None), Ok(None));
        assert_eq!(run(&mut commands, 3), [3]);
        assert!(commands.has_sent_all());
        // A command counts until its memory is invalid.
        assert_eq!(commands.on_response(keys[0], None), Ok(Some(Stag(0))));
        commands.close(keys[0], Stag(0), Some('a'));
        commands.push(keys[2], 4, CommandData::None);
        assert_eq!(run(&mut commands, 3), []);
        commands.invalidate_next(&mut Recorder::default()).unwrap();
        assert_eq!(run(&mut commands, 3), [4]);
    }

    #[test]
    fn a_command_ends_once_its_memory_is_invalid() {
        let (mut commands, keys) = queued();
        assert_eq!(commands.on_response(keys[0], None), Err(WrongResponse::Unsent));
        assert!(!commands.on_abort(keys[0]), "it is sent nevertheless");
        run(&mut commands, u32::MAX);
        assert_eq!(commands.on_response(keys[0], Some(Stag(1))), Err(WrongResponse::OtherMemory));
        assert_eq!(commands.on_response(keys[2], Some(Stag(1))), Err(WrongResponse::OtherMemory));
        assert_eq!(commands.on_response(keys[0], None), Ok(Some(Stag(0))));
        commands.close(keys[0], Stag(0), Some('a'));
        assert!(!commands.on_abort(keys[1]) && commands.on_abort(keys[3]));
        for key in &keys[..2] {
            assert_eq!(commands.on_response(*key, None), Err(WrongResponse::Repeated));
            assert!(!commands.on_abort(*key) && !commands.is_sent(*key));
        }
        let mut queue = Recorder::default();
        let ended = [(); 3].map(|()| commands.invalidate_next(&mut queue));
        let ended = ended.map(|ended| ended.map(|ended| (ended.key, ended.response)));
        assert_eq!(ended, [Some((keys[0], Some('a'))), Some((keys[1], None)), None]);
        let stags = queue.works.iter().map(|work| match work {
            WorkRequest::Invalidate { stag } => stag.0,
            other => panic!("{other:?}"),
        });
        assert_eq!(stags.collect::<Vec<_>>(), [0, 1]);
        assert!(!commands.is_closing());
    }

    /// Provides the memory of one registration.
    struct Lender {
        lends: bool,
        posted: Vec<WorkRequest>,
    }

    impl QueuePair for Lender {
        fn room(&self) -> usize {
            1
        }

        fn post(&mut self, work: WorkRequest) {
            self.posted.push(work);
        }

        fn register_unbacked(&mut self, len: u32) -> Option<Remote> {
            std::mem::take(&mut self.lends).then_some(Remote { len, ..memory(7) })
        }

        fn invalidate(&mut self, stag: Stag) -> Option<Seg> {
            (stag == Stag(7)).then(|| Seg::from_slice(b"ab"))
        }
    }

    #[test]
    fn a_read_without_memory_gets_some_only_if_the_queue_pair_has_none() {
        let (mut commands, mut slots) = (Commands::default(), Slots::default());
        let keys = [(); 2].map(|()| slots.insert(()));
        for key in keys {
            commands.push(key, 0, CommandData::new(key, DataTransfer::In(2), &mut Memory::new(), 0));
        }
        let mut queue = Lender { lends: true, posted: Vec::new() };
        assert!(commands.send(&mut queue, u32::MAX, &mut Memory::new()));
        let [WorkRequest::Send { .. }, WorkRequest::Register { id, local, .. }] = &queue.posted[..] else {
            panic!("{:?}", queue.posted)
        };
        assert_eq!((local.len(), *id), (2, registration(keys[1])));
        assert_eq!(commands.on_response(keys[0], None), Ok(Some(Stag(7))));
        commands.close(keys[0], Stag(7), Some('a'));
        let ended = commands.invalidate_next(&mut queue).unwrap();
        assert_eq!(ended.written.map(|data| data.to_vec()), Some(b"ab".to_vec()));
    }

    #[test]
    fn a_read_whose_data_is_lost_with_the_connection_does_not_end_with_its_response() {
        let (mut commands, mut slots) = (Commands::default(), Slots::default());
        let keys = [(); 2].map(|()| slots.insert(()));
        for key in keys {
            commands.push(key, 0, CommandData::new(key, DataTransfer::In(2), &mut Memory::new(), 0));
        }
        let mut queue = Lender { lends: true, posted: Vec::new() };
        commands.send(&mut queue, u32::MAX, &mut Memory::new());
        commands.on_registered(registration(keys[1]), memory(8));
        commands.send(&mut queue, u32::MAX, &mut Memory::new());
        for (key, stag) in keys.into_iter().zip([Stag(7), Stag(8)]) {
            assert_eq!(commands.on_response(key, None), Ok(Some(stag)));
            commands.close(key, stag, Some('a'));
        }
        // The end of a connection removes its registrations; memory of the session still has data.
        let ended = commands.invalidate_next(&mut Recorder::default()).unwrap();
        assert_eq!((ended.key, ended.response), (keys[1], Some('a')));
        assert!(commands.invalidate_next(&mut Recorder::default()).is_none() && !commands.is_closing());
    }
}
