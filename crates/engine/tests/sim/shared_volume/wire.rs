//! A byte stream of a hand-written client.

use blockmux_engine::net::host::{ByteStream, Host};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{SimCore, SimStream};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_volume::{Chunk, Memory};
use std::io;
use std::rc::Rc;

pub(super) struct Wire {
    stream: SimStream,
    unsent: Outbox,
    chunk: Chunk,
    received: Vec<u8>,
}

impl Wire {
    pub(super) fn connect(core: &Rc<SimCore>, address: &Address) -> io::Result<Wire> {
        let stream = core.connect(address)?;
        let chunk = Chunk::new(Memory::from_heap(64 << 10));
        Ok(Wire { stream, unsent: Outbox::default(), chunk, received: Vec::new() })
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.unsent.push_head(bytes);
    }

    /// Sends and receives what is possible now.
    ///
    /// # Errors
    /// If the connection is lost.
    pub(super) fn turn(&mut self) -> io::Result<()> {
        let is_blocked = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        if !self.unsent.is_empty()
            && let Err(error) = self.stream.send(&mut self.unsent)
            && !is_blocked(&error)
        {
            return Err(error);
        }
        loop {
            match self.stream.receive(&mut self.chunk, usize::MAX) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => {
                    self.received.extend(self.chunk.unread());
                    self.chunk.take(len);
                }
                Err(error) if is_blocked(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a message whose length follows from its first `header` bytes.
    pub(super) fn take(&mut self, header: usize, len: impl Fn(&[u8]) -> usize) -> Option<Vec<u8>> {
        let len = len(self.received.get(..header)?);
        (len <= self.received.len()).then(|| self.received.drain(..len).collect())
    }

    pub(super) fn close(&self) {
        self.stream.close();
    }
}
