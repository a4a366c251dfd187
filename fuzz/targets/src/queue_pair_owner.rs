//! The owner of a queue pair under test: grants memory, posts work, and checks that each piece of
//! work completes once and that only granted memory is written.

use crate::choices::Choices;
use blockmux_proto::rdma::{
    Endpoint, Event, MESSAGE, MessageHead, Remote, RemoteRights, Stag, WorkId, WorkRequest,
};
use blockmux_rdma::Provider;
use blockmux_volume::{Memory, Seg, SgList};

/// The endpoint of a queue pair whose owner is a [`QueuePairOwner`].
pub(crate) fn endpoint() -> Endpoint {
    let private_data = vec![1; 8];
    Endpoint {
        receives: 3,
        receive_len: MAX_MESSAGE,
        sends: 4,
        reads: 2,
        regions: 4,
        private_data,
        without_invalidation: None,
    }
}

/// An address for an access of `len` bytes, which `offset` selects: a few bytes before or behind
/// the first or the last one at which that is in the granted memory, or an end of the address
/// space.
pub(crate) fn address_near_edge(granted: Remote, len: usize, offset: u8) -> u64 {
    let last = (granted.address + SIZE as u64).wrapping_sub(len as u64);
    let edges = [granted.address, last, 0, u64::MAX];
    edges[usize::from(offset & 3)]
        .wrapping_add(u64::from(offset >> 4))
        .wrapping_sub(u64::from(offset >> 2 & 3))
}

/// What the owner of a queue pair knows of it.
pub(crate) struct QueuePairOwner {
    /// Registered memory between memory that is not registered.
    whole: Memory,
    /// Memory that the peer may read, and memory that it may write.
    granted: Vec<Remote>,
    /// Destination of reads.
    sink: Seg,
    /// The number of the next work request; never that of [`MESSAGE`].
    posted: u64,
    /// Whether each work request has completed.
    back: Vec<bool>,
    /// Number of messages of [`QueuePair::send`](blockmux_proto::rdma::QueuePair::send) that may
    /// still complete.
    messages: u64,
    is_over: bool,
}

impl QueuePairOwner {
    /// Grants memory to the peer of a queue pair, which has room for two more registrations.
    pub(crate) fn new(pair: &mut impl Provider) -> QueuePairOwner {
        let whole = Memory::from_heap(3 * GAP + 2 * SIZE);
        whole.seg(0, whole.len()).copy_from(&vec![CLEAN; whole.len()]);
        let local = whole.seg(GAP, SIZE).into();
        pair.post(WorkRequest::Register { id: WorkId(0), local, access: RemoteRights::RemoteRead });
        let readable = match pair.poll() {
            Some(Event::Registered { remote, .. }) => remote,
            other => panic!("{other:?}"),
        };
        let mut local = whole.seg(2 * GAP + SIZE, SIZE).into();
        let writable = pair.register(WorkId(0), &mut local, RemoteRights::RemoteWrite);
        QueuePairOwner {
            whole,
            granted: vec![readable, writable.expect("there is room for it")],
            sink: Memory::from_heap(GAP + SIZE).seg(0, SIZE),
            posted: 1,
            back: vec![false; MAX_WORK as usize],
            messages: 0,
            is_over: false,
        }
    }

    /// Memory that the peer may read (0) or write (1), of [`SIZE`] bytes.
    pub(crate) fn granted(&self, index: usize) -> Remote {
        self.granted[index]
    }

    /// Posts a work request or calls a method, as the choices select, if there is room; returns
    /// whether it did.
    pub(crate) fn post(&mut self, pair: &mut impl Provider, choices: &mut Choices<'_>) -> bool {
        if pair.room() == 0 || self.posted >= MAX_WORK {
            return false;
        }
        let id = WorkId(self.posted);
        let len = choices.of(&[0, 10, 3000, SIZE]);
        let local: SgList = self.sink.slice(0, len).into();
        let remote = Remote { stag: Stag(77), address: 5, len: len as u32 };
        let work = match choices.below(5) {
            0 => WorkRequest::Send {
                id,
                head: MessageHead::from_slice(b"head"),
                payload: local,
                invalidate: (len == 10).then_some(remote.stag),
                is_solicited: true,
            },
            1 => WorkRequest::Read { id, local, remote },
            2 => WorkRequest::Write { id, local, remote },
            3 => WorkRequest::Receive,
            _ => return self.call(pair, choices, local, remote),
        };
        self.posted += u64::from(!matches!(work, WorkRequest::Receive));
        pair.post(work);
        true
    }

    /// Calls a method of the queue pair that takes no work request, as the choices select; returns
    /// whether it did.
    fn call(
        &mut self,
        pair: &mut impl Provider,
        choices: &mut Choices<'_>,
        mut local: SgList,
        remote: Remote,
    ) -> bool {
        let id = WorkId(self.posted);
        let comes_back = match choices.below(6) {
            choice @ (0 | 1) => {
                pair.send(b"head", &local, (choice == 1).then_some(remote.stag));
                self.messages += 1;
                false
            }
            2 => pair.write(id, local, remote),
            3 => {
                pair.receive(2);
                false
            }
            4 => {
                // The registration is not used, and is invalidated again.
                let is_empty = local.is_empty();
                let named = pair.register(id, &mut local, RemoteRights::RemoteWrite);
                if let Some(remote) = named {
                    pair.invalidate(remote.stag);
                }
                assert!(named.is_some() || self.is_over || is_empty, "there is room for two more");
                named.is_none()
            }
            _ => return false,
        };
        self.posted += u64::from(comes_back);
        true
    }

    /// Handles the events of the queue pair; returns whether there were any.
    pub(crate) fn poll_events(&mut self, pair: &mut impl Provider, choices: &mut Choices<'_>) -> bool {
        let mut moved = false;
        while let Some(event) = pair.poll() {
            moved = true;
            assert!(!self.is_over || matches!(event, Event::Done { .. }), "{event:?} after the end");
            match event {
                Event::Requested { private_data, .. } => {
                    assert!(private_data.len() <= MAX_PRIVATE_DATA);
                    let work = match choices.below(8) {
                        0 => WorkRequest::Reject { private_data: vec![1; 9] },
                        _ => WorkRequest::Accept { private_data: vec![2; 9] },
                    };
                    pair.post(work);
                }
                Event::Done { id: MESSAGE, .. } => {
                    assert!(self.messages > 0, "a message completed twice, or was never posted");
                    self.messages -= 1;
                }
                Event::Done { id, .. } => {
                    assert!(
                        id.0 < self.posted && !self.back[id.0 as usize],
                        "{id:?} completed twice, or was never posted"
                    );
                    self.back[id.0 as usize] = true;
                }
                Event::Received { message, .. } => assert!(message.len() <= MAX_MESSAGE as usize),
                Event::Disconnected | Event::Refused { .. } => self.is_over = true,
                Event::Connected { .. } => {}
                Event::Registered { .. } => panic!("a registration was reported twice"),
            }
        }
        moved
    }

    /// Number of messages that have not completed. A provider that sends them at once does not
    /// report them.
    pub(crate) fn messages(&self) -> u64 {
        self.messages
    }

    /// Checks what is left when the connection has ended.
    pub(crate) fn finish(&self, pair: &impl Provider) {
        assert!(self.is_over && pair.room() == 0, "the end was not reported");
        assert!(
            self.back.iter().take(self.posted as usize).skip(1).all(|back| *back),
            "a work request has not completed"
        );
        let bytes = self.whole.seg(0, self.whole.len()).to_vec();
        let (before, rest) = bytes.split_at(2 * GAP + SIZE);
        assert!(
            before.iter().chain(&rest[SIZE..]).all(|byte| *byte == CLEAN),
            "memory was written that may not be"
        );
    }
}

/// Length of the memory that is granted for each kind of access.
const SIZE: usize = 70_000;
const GAP: usize = 4096;
const CLEAN: u8 = 0xcc;
const MAX_WORK: u64 = 64;
/// Length of each receive buffer, in bytes.
const MAX_MESSAGE: u32 = 2000;
/// The longest private data of any provider, in bytes.
const MAX_PRIVATE_DATA: usize = 512;
