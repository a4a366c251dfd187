//! The server of perftest's bandwidth tests with `-R`: `ib_send_bw`, `ib_read_bw`, `ib_write_bw`.
//!
//! A client opens two connections. Over the first, both sides tell each other versions, MTUs, keys
//! and results, in messages that the server answers with as long a message; what the client says is
//! a good answer to all of them, except where it asks for the memory of the test. The second is
//! that of the test: all sends, reads and writes are the client's.

use super::udp_port::Application;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, Remote, RemoteRights, WorkId};
use blockmux_rdma::roce::Roce;
use blockmux_volume::{Memory, SgList};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// What a test does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PerftestVerb {
    Send,
    Read,
    Write,
}

/// The port of a test; the first is perftest's own.
pub(crate) fn port(verb: PerftestVerb) -> u16 {
    match verb {
        PerftestVerb::Send => 18_515,
        PerftestVerb::Read => 18_516,
        PerftestVerb::Write => 18_517,
    }
}

/// The server of one verb.
pub(crate) struct PerftestServer {
    verb: PerftestVerb,
    receives: u32,
    /// The test whose second connection is still to come.
    begun: RefCell<Weak<SharedMemory>>,
}

/// The memory of a test, once it is registered.
#[derive(Default)]
struct SharedMemory {
    remote: Cell<Option<Remote>>,
}

impl PerftestServer {
    pub(crate) fn new(verb: PerftestVerb, receives: u32) -> PerftestServer {
        PerftestServer { verb, receives, begun: RefCell::default() }
    }

    /// The first or the second connection of a test.
    pub(crate) fn next_connection(&mut self) -> Box<dyn Application> {
        if let Some(memory) = self.begun.take().upgrade() {
            let receives = self.receives;
            return Box::new(TestConnection { verb: self.verb, receives, memory, messages: 0, bytes: 0 });
        }
        let memory = Rc::new(SharedMemory::default());
        self.begun = Rc::downgrade(&memory).into();
        Box::new(ControlConnection { memory, messages: 0 })
    }
}

/// The connection over which both sides prepare the test.
struct ControlConnection {
    memory: Rc<SharedMemory>,
    messages: u64,
}

impl Application for ControlConnection {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            receives: 4,
            receive_len: CONTROL_LEN,
            sends: 4,
            reads: 1,
            regions: 0,
            private_data: Vec::new(),
            without_invalidation: None,
        }
    }

    fn on_event(&mut self, event: Event, queue_pair: &mut Roce) -> Result<(), String> {
        match event {
            Event::Requested { .. } => queue_pair.accept(Vec::new()),
            Event::Received { message, .. } => {
                queue_pair.receive(1);
                self.messages += 1;
                let mut answer = message.to_vec();
                if let (DESTINATION_LEN, Some(remote)) = (answer.len(), self.memory.remote.get()) {
                    answer[16..20].copy_from_slice(&remote.stag.0.to_be_bytes());
                    answer[24..32].copy_from_slice(&remote.address.to_be_bytes());
                }
                queue_pair.send(&answer, &SgList::default(), None);
            }
            Event::Done { result, .. } => result.map_err(|error| format!("send: {error}"))?,
            _ => {}
        }
        Ok(())
    }

    fn result(&self) -> Result<String, String> {
        Ok(format!("{} messages of a test's preparation", self.messages))
    }
}

/// The connection that is measured.
struct TestConnection {
    verb: PerftestVerb,
    receives: u32,
    memory: Rc<SharedMemory>,
    messages: u64,
    bytes: u64,
}

impl Application for TestConnection {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            receives: self.receives,
            receive_len: MEMORY_LEN as u32,
            sends: 4,
            reads: 16,
            regions: 1,
            private_data: Vec::new(),
            without_invalidation: None,
        }
    }

    fn on_event(&mut self, event: Event, queue_pair: &mut Roce) -> Result<(), String> {
        match event {
            Event::Requested { .. } => {
                let mut memory = SgList::one(Memory::from_heap(MEMORY_LEN).seg(0, MEMORY_LEN));
                let rights = match self.verb {
                    PerftestVerb::Read => RemoteRights::RemoteRead,
                    PerftestVerb::Send | PerftestVerb::Write => RemoteRights::RemoteWrite,
                };
                self.memory.remote.set(queue_pair.register(WorkId(1), &mut memory, rights));
                queue_pair.accept(Vec::new());
            }
            Event::Received { message, .. } => {
                queue_pair.receive(1);
                (self.messages, self.bytes) = (self.messages + 1, self.bytes + message.len() as u64);
            }
            _ => {}
        }
        Ok(())
    }

    fn result(&self) -> Result<String, String> {
        Ok(match self.verb {
            PerftestVerb::Send => format!("{} messages with {} bytes", self.messages, self.bytes),
            PerftestVerb::Read | PerftestVerb::Write => format!("{:?} test", self.verb),
        })
    }
}

/// Longest message of the preparation, in bytes.
const CONTROL_LEN: u32 = 4096;
/// Length of the message with a side's key at offset 16 and its address at 24, in bytes.
const DESTINATION_LEN: usize = 56;
/// Longest message of a test, and the memory that is read and written, in bytes.
const MEMORY_LEN: usize = 1 << 20;
