//! The records between a [`DeviceQueuePair`](super::DeviceQueuePair) and the owner of the device's
//! queues.
//!
//! ```text
//!   DeviceQueuePair ──WorkRecord, its bytes, its memory──▶ owner ──ibv_post_send──▶ device
//!   DeviceQueuePair ◀──EventRecord, its bytes──────────── owner ◀──ibv_poll_cq──── device
//! ```
//! They never leave the process. A record has a head of a fixed length; bytes follow, and behind a
//! [`WorkRecord`] the memory of the work, as payload of the outbox: by reference.

/// What the owner is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRecord {
    /// The operation.
    pub verb: WorkVerb,
    /// Returned with [`DeviceEvent::Done`].
    pub id: u64,
    /// The number of bytes behind the record: a message's head, or private data.
    pub bytes: u16,
    /// The number of bytes of memory behind them.
    pub memory: u32,
}

/// An operation of a [`WorkRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkVerb {
    /// Makes the queue pair and requests the connection, with private data.
    Connect(DeviceQueues),
    /// Makes the queue pair and accepts the connection, with private data.
    Accept(DeviceQueues),
    /// Rejects the connection, with private data.
    Reject,
    /// Posts this many receive buffers.
    Receive(u32),
    /// Sends bytes and memory as one message.
    Send {
        /// The key that it invalidates at the peer.
        invalidate: Option<u32>,
        /// Whether it is a solicited event.
        is_solicited: bool,
    },
    /// Reads the peer's memory into the memory.
    Read(DeviceRemote),
    /// Writes the memory to the peer's.
    Write(DeviceRemote),
    /// Opens the memory, one segment, to the peer.
    Bind {
        /// The number of the window.
        window: u32,
        /// Its new key.
        key: u32,
        /// RDMA Write and not RDMA Read.
        is_write: bool,
    },
    /// Closes a window; [`DeviceEvent::Closed`] follows.
    Close {
        /// The number of the window.
        window: u32,
    },
    /// Exposes the memory, one segment of a block of its own, to the peer;
    /// [`DeviceEvent::Exposed`] follows.
    Expose {
        /// Its number.
        number: u32,
    },
    /// Ends that.
    Conceal {
        /// The number of the memory.
        number: u32,
    },
    /// Ends the connection.
    Disconnect,
}

/// Sizes of the queues, and reads in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceQueues {
    /// Messages, reads and writes in flight.
    pub sends: u32,
    /// Receive buffers.
    pub receives: u32,
    /// Length of each in bytes.
    pub receive_len: u32,
    /// Memory windows.
    pub windows: u32,
    /// RDMA Reads in flight, in each direction.
    pub reads: u32,
}

/// The peer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRemote {
    /// Its address.
    pub address: u64,
    /// Its key.
    pub key: u32,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// The event.
    pub event: DeviceEvent,
    /// The number of bytes behind the record: a message, private data, or keys.
    pub bytes: u32,
}

/// An event of an [`EventRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The device of the peer's address is known, and the connection can be requested.
    Resolved {
        /// The connection is confined: memory is exposed to the peer and not opened by windows.
        is_confined: bool,
    },
    /// The peer requests the connection, with private data.
    Requested {
        /// RDMA Reads that this side may have in flight.
        reads: u32,
        /// As in [`DeviceEvent::Resolved`].
        is_confined: bool,
    },
    /// The connection is established. The keys of the windows follow, then private data.
    Connected {
        /// The number of windows.
        windows: u32,
        /// RDMA Reads that this side may have in flight.
        reads: u32,
    },
    /// The peer has rejected the connection, with private data.
    Refused,
    /// A message, which follows.
    Received {
        /// The key of the window that it has invalidated.
        invalidated: Option<u32>,
    },
    /// Work has completed.
    Done {
        /// The id of its record.
        id: u64,
        /// Its result.
        result: Result<(), DeviceFailure>,
    },
    /// This side has closed a window.
    Closed {
        /// The number of the window.
        window: u32,
        /// Its new key.
        key: u32,
    },
    /// Memory is exposed.
    Exposed {
        /// Its number.
        number: u32,
        /// Its key.
        key: u32,
    },
    /// The queue pair has failed.
    Broken(DeviceFailure),
}

/// Why work has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFailure {
    /// This side's mistake, or that of its device.
    Local,
    /// A message was longer than its receive buffer.
    TooLong,
    /// The peer does not allow the access.
    RemoteAccess,
    /// The peer had no receive buffer.
    NoReceive,
    /// Flushed, because of an earlier failure or the end of the connection.
    Flushed,
}

/// Length of a [`WorkRecord`], in bytes.
pub const WORK_LEN: usize = 40;
/// Length of an [`EventRecord`], in bytes.
pub const EVENT_LEN: usize = 16;

impl WorkRecord {
    /// The record's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; WORK_LEN] {
        // Operation, flags, and up to five numbers; the address takes two.
        let address = |remote: &DeviceRemote| {
            let [high, low] = [remote.address >> 32, remote.address & u64::from(u32::MAX)];
            [high as u32, low as u32, remote.key, 0, 0]
        };
        let queues = |of: &DeviceQueues| [of.sends, of.receives, of.receive_len, of.windows, of.reads];
        let (verb, flags, numbers) = match &self.verb {
            WorkVerb::Connect(sizes) => (1, 0, queues(sizes)),
            WorkVerb::Accept(sizes) => (2, 0, queues(sizes)),
            WorkVerb::Reject => (3, 0, [0; 5]),
            WorkVerb::Receive(count) => (4, 0, [*count, 0, 0, 0, 0]),
            WorkVerb::Send { invalidate, is_solicited } => {
                let flags = u8::from(invalidate.is_some()) | u8::from(*is_solicited) << 1;
                (5, flags, [invalidate.unwrap_or(0), 0, 0, 0, 0])
            }
            WorkVerb::Read(remote) => (6, 0, address(remote)),
            WorkVerb::Write(remote) => (7, 0, address(remote)),
            WorkVerb::Bind { window, key, is_write } => (8, u8::from(*is_write), [*window, *key, 0, 0, 0]),
            WorkVerb::Close { window } => (9, 0, [*window, 0, 0, 0, 0]),
            WorkVerb::Disconnect => (10, 0, [0; 5]),
            WorkVerb::Expose { number } => (11, 0, [*number, 0, 0, 0, 0]),
            WorkVerb::Conceal { number } => (12, 0, [*number, 0, 0, 0, 0]),
        };
        let mut record = [0; WORK_LEN];
        let mut fields = RecordFields(&mut record);
        fields.put([verb, flags]);
        fields.put(self.bytes.to_be_bytes());
        fields.put(self.memory.to_be_bytes());
        fields.put(self.id.to_be_bytes());
        numbers.iter().for_each(|number| fields.put(number.to_be_bytes()));
        record
    }

    /// Reads a record; `None` if it is none.
    #[must_use]
    pub fn from_bytes(record: &[u8]) -> Option<WorkRecord> {
        let ([verb, flags], rest) = record.split_first_chunk().map(|(head, rest)| (*head, rest))?;
        let (bytes, rest) = rest.split_first_chunk()?;
        let (memory, rest) = rest.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let mut numbers = [0; 5];
        let (words, _) = rest.as_chunks();
        numbers.iter_mut().zip(words).for_each(|(number, word)| *number = u32::from_be_bytes(*word));
        let [first, second, third, fourth, fifth] = numbers;
        let queues = DeviceQueues {
            sends: first,
            receives: second,
            receive_len: third,
            windows: fourth,
            reads: fifth,
        };
        let remote = DeviceRemote { address: u64::from(first) << 32 | u64::from(second), key: third };
        let verb = match verb {
            1 => WorkVerb::Connect(queues),
            2 => WorkVerb::Accept(queues),
            3 => WorkVerb::Reject,
            4 => WorkVerb::Receive(first),
            5 => {
                WorkVerb::Send { invalidate: (flags & 1 != 0).then_some(first), is_solicited: flags & 2 != 0 }
            }
            6 => WorkVerb::Read(remote),
            7 => WorkVerb::Write(remote),
            8 => WorkVerb::Bind { window: first, key: second, is_write: flags & 1 != 0 },
            9 => WorkVerb::Close { window: first },
            10 => WorkVerb::Disconnect,
            11 => WorkVerb::Expose { number: first },
            12 => WorkVerb::Conceal { number: first },
            _ => return None,
        };
        let (bytes, memory) = (u16::from_be_bytes(*bytes), u32::from_be_bytes(*memory));
        Some(WorkRecord { verb, id: u64::from_be_bytes(*id), bytes, memory })
    }
}

impl EventRecord {
    /// The record's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; EVENT_LEN] {
        let (event, flag, value) = match &self.event {
            DeviceEvent::Requested { reads, is_confined } => (1, u8::from(*is_confined), u64::from(*reads)),
            DeviceEvent::Connected { windows, reads } => {
                (2, 0, u64::from(*windows) << 32 | u64::from(*reads))
            }
            DeviceEvent::Refused => (3, 0, 0),
            DeviceEvent::Received { invalidated } => {
                (4, u8::from(invalidated.is_some()), invalidated.unwrap_or(0).into())
            }
            DeviceEvent::Done { id, result } => (5, result.err().map_or(0, DeviceFailure::code), *id),
            DeviceEvent::Closed { window, key } => (6, 0, u64::from(*window) << 32 | u64::from(*key)),
            DeviceEvent::Broken(failure) => (7, failure.code(), 0),
            DeviceEvent::Resolved { is_confined } => (8, u8::from(*is_confined), 0),
            DeviceEvent::Exposed { number, key } => (9, 0, u64::from(*number) << 32 | u64::from(*key)),
        };
        let mut record = [0; EVENT_LEN];
        let mut fields = RecordFields(&mut record);
        fields.put([event, flag, 0, 0]);
        fields.put(self.bytes.to_be_bytes());
        fields.put(value.to_be_bytes());
        record
    }

    /// Reads a record; `None` if it is none, or not complete.
    #[must_use]
    pub fn from_bytes(record: &[u8]) -> Option<EventRecord> {
        let ([event, flag, ..], rest) = record.split_first_chunk::<4>()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        let value = u64::from_be_bytes(*rest.first_chunk()?);
        let low = value as u32;
        let event = match *event {
            1 => DeviceEvent::Requested { reads: low, is_confined: *flag != 0 },
            2 => DeviceEvent::Connected { windows: (value >> 32) as u32, reads: low },
            3 => DeviceEvent::Refused,
            4 => DeviceEvent::Received { invalidated: (*flag != 0).then_some(low) },
            5 => {
                let result = DeviceFailure::from_code(*flag).map_or(Ok(()), Err);
                DeviceEvent::Done { id: value, result }
            }
            6 => DeviceEvent::Closed { window: (value >> 32) as u32, key: low },
            7 => DeviceEvent::Broken(DeviceFailure::from_code(*flag)?),
            8 => DeviceEvent::Resolved { is_confined: *flag != 0 },
            9 => DeviceEvent::Exposed { number: (value >> 32) as u32, key: low },
            _ => return None,
        };
        Some(EventRecord { event, bytes: u32::from_be_bytes(*bytes) })
    }
}

impl DeviceFailure {
    fn code(self) -> u8 {
        match self {
            DeviceFailure::Local => 1,
            DeviceFailure::TooLong => 2,
            DeviceFailure::RemoteAccess => 3,
            DeviceFailure::NoReceive => 4,
            DeviceFailure::Flushed => 5,
        }
    }

    /// `None` for success.
    fn from_code(code: u8) -> Option<DeviceFailure> {
        Some(match code {
            0 => return None,
            2 => DeviceFailure::TooLong,
            3 => DeviceFailure::RemoteAccess,
            4 => DeviceFailure::NoReceive,
            5 => DeviceFailure::Flushed,
            _ => DeviceFailure::Local,
        })
    }
}

/// The rest of a record that is being written.
struct RecordFields<'a>(&'a mut [u8]);

impl RecordFields<'_> {
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        if let Some((place, rest)) = std::mem::take(&mut self.0).split_first_chunk_mut() {
            *place = bytes;
            self.0 = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_work_record_comes_back_from_its_bytes() {
        let queues = DeviceQueues { sends: 1, receives: 2, receive_len: 3, windows: 4, reads: 5 };
        let remote = DeviceRemote { address: 0x0102_0304_0506_0708, key: 9 };
        let verbs = [
            WorkVerb::Connect(queues),
            WorkVerb::Accept(queues),
            WorkVerb::Reject,
            WorkVerb::Receive(7),
            WorkVerb::Send { invalidate: Some(0), is_solicited: false },
            WorkVerb::Send { invalidate: None, is_solicited: true },
            WorkVerb::Read(remote),
            WorkVerb::Write(remote),
            WorkVerb::Bind { window: 1, key: 2, is_write: true },
            WorkVerb::Bind { window: 1, key: 2, is_write: false },
            WorkVerb::Close { window: 3 },
            WorkVerb::Disconnect,
            WorkVerb::Expose { number: 4 },
            WorkVerb::Conceal { number: 5 },
        ];
        for verb in verbs {
            let record = WorkRecord { verb, id: u64::MAX - 1, bytes: 12, memory: 1 << 20 };
            assert_eq!(WorkRecord::from_bytes(&record.to_bytes()), Some(record));
        }
        assert_eq!(WorkRecord::from_bytes(&[0; WORK_LEN]), None);
        assert_eq!(WorkRecord::from_bytes(&[1; 3]), None);
    }

    #[test]
    fn every_event_record_comes_back_from_its_bytes() {
        let failures = [
            DeviceFailure::Local,
            DeviceFailure::TooLong,
            DeviceFailure::RemoteAccess,
            DeviceFailure::NoReceive,
            DeviceFailure::Flushed,
        ];
        let failed = failures.map(|failure| DeviceEvent::Done { id: 3, result: Err(failure) });
        let events = [
            DeviceEvent::Resolved { is_confined: true },
            DeviceEvent::Requested { reads: 8, is_confined: false },
            DeviceEvent::Requested { reads: 8, is_confined: true },
            DeviceEvent::Exposed { number: 3, key: u32::MAX },
            DeviceEvent::Connected { windows: 128, reads: 4 },
            DeviceEvent::Refused,
            DeviceEvent::Received { invalidated: Some(0) },
            DeviceEvent::Received { invalidated: None },
            DeviceEvent::Done { id: u64::MAX, result: Ok(()) },
            DeviceEvent::Closed { window: 7, key: 0x1234 },
            DeviceEvent::Broken(DeviceFailure::NoReceive),
        ];
        for event in events.into_iter().chain(failed) {
            let record = EventRecord { event, bytes: 70_000 };
            assert_eq!(EventRecord::from_bytes(&record.to_bytes()), Some(record));
        }
        assert_eq!(EventRecord::from_bytes(&[0; EVENT_LEN]), None);
        assert_eq!(EventRecord::from_bytes(&[7; EVENT_LEN - 1]), None);
    }
}
