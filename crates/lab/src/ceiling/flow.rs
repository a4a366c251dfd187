//! Sends and receives messages without copying or allocating.
//!
//! A message is a header, followed by data in one direction: in replies to reads and in requests to
//! write. Its first byte is its kind, which determines its length; nothing else is parsed.

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;

/// The direction of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoDirection {
    Read,
    Write,
}

/// Lengths of the messages that one side receives.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    pub(super) read: usize,
    pub(super) write: usize,
}

/// State of one connection's input.
pub(super) struct Inflow {
    kind: IoDirection,
    /// Missing bytes of the current message; 0 between messages.
    missing: usize,
}

/// The messages that one side sends, shared by its connections.
pub(super) struct Messages<'a> {
    /// The direction whose messages have data after their header.
    data_kind: IoDirection,
    /// Headers of one kind, as many as are ever sent at once, back to back.
    data_heads: &'a [u8],
    data_head: usize,
    bare_heads: &'a [u8],
    bare_head: usize,
    data: &'a [u8],
    bs: usize,
    iovecs: Vec<IoSlice<'a>>,
}

/// One connection's unsent messages.
pub(super) struct Outflow {
    queue: VecDeque<OutgoingMessage>,
    /// Bytes of the first message already sent.
    sent: usize,
}

#[derive(Clone, Copy)]
struct OutgoingMessage {
    kind: IoDirection,
    /// Offset of its data, if it has any.
    at: usize,
}

/// Result of one receive.
pub(super) enum Received {
    /// Number of bytes, and whether the buffer was filled.
    Bytes(usize, bool),
    Nothing,
    /// The peer has closed the connection, in order or not.
    End,
}

/// A message began with an unknown kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownMessage;

impl IoDirection {
    /// `count` headers or whole messages of `len` bytes, back to back.
    pub(super) fn heads(self, len: usize, count: usize) -> Vec<u8> {
        let mut heads = vec![0; len * count];
        heads.chunks_exact_mut(len).for_each(|head| head[0] = self.mark());
        heads
    }

    fn mark(self) -> u8 {
        match self {
            IoDirection::Read => b'r',
            IoDirection::Write => b'w',
        }
    }
}

impl Lengths {
    fn of(self, kind: IoDirection) -> usize {
        match kind {
            IoDirection::Read => self.read,
            IoDirection::Write => self.write,
        }
    }
}

impl Inflow {
    pub(super) fn new() -> Inflow {
        Inflow { kind: IoDirection::Read, missing: 0 }
    }

    /// Parses received bytes and calls back for each message that ends in them.
    #[inline]
    pub(super) fn walk(
        &mut self,
        mut bytes: &[u8],
        lengths: Lengths,
        mut whole: impl FnMut(IoDirection),
    ) -> Result<(), UnknownMessage> {
        while let Some(first) = bytes.first() {
            if self.missing == 0 {
                self.kind = match first {
                    b'r' => IoDirection::Read,
                    b'w' => IoDirection::Write,
                    _ => return Err(UnknownMessage),
                };
                self.missing = lengths.of(self.kind);
            }
            let here = self.missing.min(bytes.len());
            self.missing -= here;
            bytes = &bytes[here..];
            if self.missing == 0 {
                whole(self.kind);
            }
        }
        Ok(())
    }
}

impl<'a> Messages<'a> {
    /// Messages of the first kind carry `bs` bytes of `data`. The headers are made by
    /// [`IoDirection::heads`], for as many messages as a connection ever has queued.
    pub(super) fn new(
        data_kind: IoDirection,
        data_heads: (&'a [u8], usize),
        bare_heads: (&'a [u8], usize),
        data: &'a [u8],
        bs: usize,
    ) -> Messages<'a> {
        Messages {
            data_kind,
            data_heads: data_heads.0,
            data_head: data_heads.1,
            bare_heads: bare_heads.0,
            bare_head: bare_heads.1,
            data,
            bs,
            iovecs: Vec::with_capacity(MAX_IOVECS),
        }
    }

    /// Sends as much as the socket takes.
    #[inline]
    pub(super) fn send(&mut self, socket: &OwnedFd, outflow: &mut Outflow) -> rustix::io::Result<()> {
        while !outflow.is_empty() {
            let offered = self.gather(outflow);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(socket, &self.iovecs, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => {
                    outflow.take(sent, |kind| self.length(kind));
                    if sent < offered {
                        break;
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills the iovecs from the front of `outflow`. Returns their total length.
    #[inline]
    fn gather(&mut self, outflow: &Outflow) -> usize {
        self.iovecs.clear();
        let (mut offered, mut skip) = (0, outflow.sent);
        // Consecutive headers without data are sent as one segment: their range in `bare_heads`.
        let (mut from, mut to) = (0, 0);
        let mut data_heads = self.data_heads.chunks_exact(self.data_head);
        for message in &outflow.queue {
            if message.kind == self.data_kind {
                let has_run = to > from;
                if self.iovecs.len() + usize::from(has_run) + 2 > MAX_IOVECS {
                    break;
                }
                if has_run {
                    self.iovecs.push(IoSlice::new(&self.bare_heads[from..to]));
                    from = to;
                }
                let head = data_heads.next().unwrap_or(self.data_heads);
                let data = &self.data[message.at..][..self.bs];
                if skip < head.len() {
                    self.iovecs.push(IoSlice::new(&head[skip..]));
                    self.iovecs.push(IoSlice::new(data));
                } else {
                    self.iovecs.push(IoSlice::new(&data[skip - head.len()..]));
                }
                offered += head.len() + data.len() - skip;
            } else {
                // The current run of headers needs a last entry.
                if self.iovecs.len() == MAX_IOVECS {
                    break;
                }
                from += skip;
                to += self.bare_head;
                offered += self.bare_head - skip;
            }
            skip = 0;
        }
        if to > from {
            self.iovecs.push(IoSlice::new(&self.bare_heads[from..to]));
        }
        offered
    }

    #[inline]
    fn length(&self, kind: IoDirection) -> usize {
        if kind == self.data_kind { self.data_head + self.bs } else { self.bare_head }
    }
}

impl Outflow {
    /// Room for `depth` messages, the most ever queued.
    pub(super) fn new(depth: usize) -> Outflow {
        Outflow { queue: VecDeque::with_capacity(depth), sent: 0 }
    }

    /// Queues a message; `at` is the offset of its data if its kind has any.
    #[inline]
    pub(super) fn push(&mut self, kind: IoDirection, at: usize) {
        self.queue.push_back(OutgoingMessage { kind, at });
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[inline]
    fn take(&mut self, bytes: usize, length: impl Fn(IoDirection) -> usize) {
        self.sent += bytes;
        while let Some(first) = self.queue.front() {
            let len = length(first.kind);
            if self.sent < len {
                break;
            }
            self.sent -= len;
            self.queue.pop_front();
        }
    }
}

/// Receives once.
#[inline]
pub(super) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> rustix::io::Result<Received> {
    let room = buffer.len();
    match recv(socket, buffer, RecvFlags::DONTWAIT) {
        Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(Received::End),
        Ok((_, bytes)) => Ok(Received::Bytes(bytes, bytes == room)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(error) => Err(error),
    }
}

/// Large enough for everything that a deep queue of small messages leaves in a socket.
pub(super) const RECEIVE_BUFFER: usize = 256 << 10;
/// Segments of one gathering call, as in the engine.
const MAX_IOVECS: usize = 256;
