//! TLS under a connection: records on the socket's side, plain bytes on the session's.
//!
//! ```text
//!   socket ──▶ incoming ──Tls──▶ the connection's chunk ──▶ session
//!   socket ◀── outgoing ◀─Tls─── scratch ◀───────────────── the session's outbox
//! ```
//! A connection without it has nothing of this, and takes the same way as ever. With it, a session's bytes stay in its
//! outbox until the records that they are in are sent: whoever waits for an empty outbox waits for the socket. Memory that
//! a session lends is copied before it is encrypted, because it may change meanwhile.
//!
//! Whether a peer comes by TLS its first byte tells, where both may be: a record of a handshake begins with 16h, and no
//! protocol that is served so begins with that. NVMe/TCP's begins with 00h, the type of ICReq.
//!
//! Time is the session's to bound: until the handshake is done it hears nothing, and its own patience runs.

use crate::connection::Broken;
use crate::host::ByteStream;
use blockmux_proto::outbox::{Outbox, Piece};
use blockmux_tls::{Lookup, Psk, Tls, TlsError};
use blockmux_volume::{Chunk, Memory, Pool};
use std::io;

/// What secures one connection.
pub struct Secure {
    stage: Stage,
    /// Records that have come, while there are any.
    incoming: Option<Chunk>,
    /// Records to be sent.
    outgoing: Outbox,
    /// Bytes at the front of the session's outbox that are in `outgoing`.
    covered: usize,
    /// Where they are copied to.
    scratch: Vec<u8>,
    /// The session has been told.
    is_told: bool,
}

enum Stage {
    /// The peer's first byte has not come.
    Unknown {
        lookup: Lookup,
        may_be_plain: bool,
    },
    Tls(Box<Tls>),
}

/// What came of receiving.
pub(crate) enum Received {
    /// So many plain bytes; 0 at the end of the stream.
    Bytes(usize),
    /// The peer comes without TLS, and may: what it has sent is in the chunk, and nothing is secured.
    Plain,
}

impl Secure {
    /// For a connection to a server, with the keys that it may know, the best first.
    ///
    /// # Errors
    /// If the keys cannot be used.
    pub fn client(keys: &[Psk]) -> Result<Secure, TlsError> {
        Ok(Secure::new(Stage::Tls(Box::new(Tls::client(keys)?))))
    }

    /// For a client's connection, which has to be secured.
    #[must_use]
    pub fn server(lookup: Lookup) -> Secure {
        Secure::new(Stage::Unknown { lookup, may_be_plain: false })
    }

    /// For a client's connection, which may be secured.
    #[must_use]
    pub fn if_asked(lookup: Lookup) -> Secure {
        Secure::new(Stage::Unknown { lookup, may_be_plain: true })
    }

    fn new(stage: Stage) -> Secure {
        let outgoing = Outbox::default();
        Secure { stage, incoming: None, outgoing, covered: 0, scratch: Vec::new(), is_told: false }
    }

    /// The identity of the key, once: when the handshake is done.
    pub(crate) fn take_identity(&mut self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Tls(tls) if tls.is_open() && !self.is_told => {
                self.is_told = true;
                Some(tls.identity())
            }
            _ => None,
        }
    }

    /// Gives plain bytes to the chunk's spare part, which has room, receiving at most once.
    pub(crate) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        chunk: &mut Chunk,
        pool: &Pool,
    ) -> Result<Received, Broken> {
        if let Stage::Unknown { may_be_plain, .. } = &self.stage {
            let received = stream.receive(chunk, usize::MAX)?;
            if received == 0 {
                return Ok(Received::Bytes(0));
            }
            if chunk.unread().first() != Some(&HANDSHAKE) {
                return if *may_be_plain { Ok(Received::Plain) } else { Err(TlsError::Plain.into()) };
            }
            self.begin(chunk)?;
        }
        let given = self.advance(chunk)?;
        if given > 0 || self.has_ended() {
            return Ok(Received::Bytes(given));
        }
        let incoming = self.room_for_records(pool);
        if stream.receive(incoming, usize::MAX)? == 0 {
            return if self.is_open() { Ok(Received::Bytes(0)) } else { Err(TlsError::Left.into()) };
        }
        match self.advance(chunk)? {
            0 if !self.has_ended() => Err(io::Error::from(io::ErrorKind::WouldBlock).into()),
            given => Ok(Received::Bytes(given)),
        }
    }

    /// The same for bytes that somebody else has received; none: a client begins so.
    pub(crate) fn take(&mut self, bytes: &[u8], chunk: &mut Chunk) -> Result<usize, TlsError> {
        let Stage::Tls(tls) = &mut self.stage else { return Ok(0) };
        let result = tls.receive(bytes, chunk.spare());
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        let moved = result?;
        chunk.fill(moved.given);
        Ok(moved.taken)
    }

    /// Encrypts what it can of the session's outbox, if nothing is on its way.
    pub(crate) fn cover(&mut self, outbox: &Outbox) -> Result<(), TlsError> {
        let Stage::Tls(tls) = &mut self.stage else { return Ok(()) };
        if !tls.is_open() || !self.outgoing.is_empty() || self.covered > 0 || outbox.is_empty() {
            return Ok(());
        }
        self.scratch.clear();
        for piece in outbox.pieces() {
            let room = MOST_AT_ONCE - self.scratch.len();
            match piece {
                Piece::Head(head) => self.scratch.extend_from_slice(&head[..head.len().min(room)]),
                Piece::Payload(seg) => {
                    let (start, len) = (self.scratch.len(), seg.len().min(room));
                    self.scratch.resize(start + len, 0);
                    seg.slice(0, len).copy_to(&mut self.scratch[start..]);
                }
            }
            if self.scratch.len() == MOST_AT_ONCE {
                break;
            }
        }
        tls.send(&self.scratch)?;
        self.covered = self.scratch.len();
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        Ok(())
    }

    /// Records to be sent. When they are, [`Secure::sent`] has to be told.
    pub(crate) fn outgoing(&mut self) -> &mut Outbox {
        &mut self.outgoing
    }

    /// Takes out of the session's outbox what is sent whole.
    pub(crate) fn sent(&mut self, outbox: &mut Outbox) {
        if self.outgoing.is_empty() {
            outbox.consume(std::mem::take(&mut self.covered));
        }
    }

    /// Whether something is to be sent that can be.
    pub(crate) fn wants_output(&self, outbox: &Outbox) -> bool {
        !self.outgoing.is_empty() || (self.is_open() && !outbox.is_empty())
    }

    /// Gives back what an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        if self.incoming.as_ref().is_some_and(Chunk::is_idle) {
            self.incoming = None;
        }
        if self.outgoing.is_empty() {
            self.scratch = Vec::new();
            if let Stage::Tls(tls) = &mut self.stage {
                *tls.output() = Vec::new();
                tls.shrink();
            }
        }
    }

    /// Whether the handshake is done.
    pub(crate) fn is_open(&self) -> bool {
        matches!(&self.stage, Stage::Tls(tls) if tls.is_open())
    }

    /// Whether the peer has said that it sends nothing any more.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(&self.stage, Stage::Tls(tls) if tls.has_ended())
    }

    /// The peer has begun a handshake: what it has sent are records.
    fn begin(&mut self, chunk: &mut Chunk) -> Result<(), TlsError> {
        let Stage::Unknown { lookup, .. } = &self.stage else { return Ok(()) };
        let tls = Tls::server(lookup)?;
        self.incoming = Some(Chunk::from_slice(chunk.unread()));
        chunk.take(chunk.unread().len());
        self.stage = Stage::Tls(Box::new(tls));
        Ok(())
    }

    /// Goes on with the records that are here; how many plain bytes the chunk got.
    fn advance(&mut self, chunk: &mut Chunk) -> Result<usize, TlsError> {
        let room = chunk.room();
        let incoming = self.incoming.take();
        let result = self.take(incoming.as_ref().map_or(&[], Chunk::unread), chunk);
        self.incoming = incoming;
        if let (Some(incoming), Ok(taken)) = (&mut self.incoming, &result) {
            incoming.take(*taken);
        }
        result.map(|_| room - chunk.room())
    }

    /// A chunk for more records, in which there are none: all that had come is taken.
    fn room_for_records(&mut self, pool: &Pool) -> &mut Chunk {
        self.incoming.take_if(|chunk| chunk.room() < SMALL);
        self.incoming
            .get_or_insert_with(|| Chunk::new(pool.take(RECORDS).unwrap_or_else(|| Memory::from_heap(SMALL))))
    }
}

/// The content type of a handshake's records (RFC 8446 §5.1).
const HANDSHAKE: u8 = 0x16;
/// Plain bytes that are encrypted at a time: four of the longest records.
const MOST_AT_ONCE: usize = 64 << 10;
/// How much is received at a time.
const RECORDS: usize = 128 << 10;
/// When buffers are short: no less than some small records.
const SMALL: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;
    use crate::sim::{SimNet, SimStream, Weather, World};
    use crate::socket::Address;
    use blockmux_tls::Hash;
    use blockmux_volume::Seg;
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::Duration;

    /// One end: what it has to say, and what it has heard.
    struct End {
        stream: SimStream,
        secure: Option<Secure>,
        outbox: Outbox,
        chunk: Chunk,
        heard: Vec<u8>,
        failed: Option<String>,
    }

    /// A client's end and a server's, over a network that splits what is sent and holds little.
    struct Setting {
        world: World,
        client: End,
        server: End,
    }

    impl End {
        fn new(stream: SimStream, secure: Option<Secure>, room: usize) -> End {
            let chunk = Chunk::new(Memory::from_heap(room));
            End { stream, secure, outbox: Outbox::default(), chunk, heard: Vec::new(), failed: None }
        }

        fn turn(&mut self, pool: &Pool) {
            if self.failed.is_some() {
                // What is to be said of that is said whole.
                let _ = self.secure.as_mut().map(|secure| self.stream.send(secure.outgoing()));
            } else if let Err(error) = self.try_turn(pool) {
                self.failed = Some(error.to_string());
            }
        }

        fn try_turn(&mut self, pool: &Pool) -> Result<(), Broken> {
            let received = match &mut self.secure {
                Some(secure) => secure.receive(&mut self.stream, &mut self.chunk, pool),
                None => self
                    .stream
                    .receive(&mut self.chunk, usize::MAX)
                    .map(Received::Bytes)
                    .map_err(Broken::from),
            };
            if let Some(secure) = &mut self.secure {
                let _ = self.stream.send(secure.outgoing());
                secure.sent(&mut self.outbox);
            }
            match received {
                Ok(Received::Plain) => self.secure = None,
                Ok(Received::Bytes(_)) => {}
                Err(Broken::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            self.heard.extend(self.chunk.unread());
            self.chunk.take(self.chunk.unread().len());
            let result = match &mut self.secure {
                None => self.stream.send(&mut self.outbox),
                Some(secure) => {
                    secure.cover(&self.outbox)?;
                    let result = self.stream.send(secure.outgoing());
                    secure.sent(&mut self.outbox);
                    secure.shrink();
                    result
                }
            };
            match result {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.into()),
                _ => Ok(()),
            }
        }
    }

    impl Setting {
        fn new(seed: u64, client: Option<Secure>, server: Secure) -> Setting {
            let weather = Weather { window: 5000, most_per_call: 700, ..Weather::FAIR };
            let mut world = World::new(SimNet::new(seed, weather));
            let (clients, servers) = (world.add_core(1 << 20), world.add_core(1 << 20));
            let address = Address::Tcp("127.0.0.1:1".parse().unwrap());
            let accepted = Rc::new(RefCell::new(None));
            let place = accepted.clone();
            world.net().listen(&servers, &address, move |_, stream| *place.borrow_mut() = Some(stream));
            let stream = clients.connect(&address).unwrap();
            world.run_for(Duration::from_secs(1)).unwrap();
            let accepted = accepted.borrow_mut().take().unwrap();
            Setting {
                world,
                client: End::new(stream, client, 300),
                server: End::new(accepted, Some(server), 7000),
            }
        }

        /// Goes on for a while.
        fn run(&mut self, turns: usize) {
            let pool = Pool::new(1 << 20);
            for _ in 0..turns {
                self.client.turn(&pool);
                self.server.turn(&pool);
                self.world.run_for(Duration::from_millis(1)).unwrap();
            }
        }
    }

    fn key(fill: u8) -> Psk {
        Psk { identity: b"key".to_vec(), secret: vec![fill; 32], hash: Hash::Sha256 }
    }

    fn lookup() -> Lookup {
        Arc::new(|_| Some(key(7)))
    }

    #[test]
    fn sessions_on_both_ends_see_plain_bytes_and_their_outboxes_empty_when_all_is_sent() {
        for seed in 0..8 {
            let client = Secure::client(&[key(7)]).unwrap();
            let mut setting = Setting::new(seed, Some(client), Secure::server(lookup()));
            let said: Vec<u8> = (0..200_000u32).map(|at| (at / 251 + at) as u8).collect();
            setting.client.outbox.push_head(b"head");
            setting.client.outbox.push_seg(Seg::from_slice(&said));
            setting.server.outbox.push_seg(Seg::from_slice(&said[..100_000]));
            let len = setting.client.outbox.len();
            setting.run(30);
            assert!(setting.client.secure.as_ref().unwrap().is_open());
            assert_eq!(setting.client.outbox.len(), len, "what is not sent whole is there still");
            setting.run(4000);
            assert_eq!((&setting.client.failed, &setting.server.failed), (&None, &None));
            assert!(setting.server.heard == [&b"head"[..], &said].concat());
            assert!(setting.client.heard == said[..100_000]);
            assert!(setting.client.outbox.is_empty() && setting.server.outbox.is_empty());
            let identity = setting.server.secure.as_mut().unwrap();
            assert_eq!(identity.take_identity(), Some(&b"key"[..]));
            assert_eq!(identity.take_identity(), None, "it is told once");
        }
    }

    #[test]
    fn who_comes_without_tls_is_taken_so_only_where_that_may_be() {
        let said = Seg::from_slice(&[0; 128]);
        let mut setting = Setting::new(1, None, Secure::if_asked(lookup()));
        setting.client.outbox.push_seg(said.clone());
        setting.server.outbox.push_head(b"hello");
        setting.run(20);
        assert_eq!((setting.server.heard.len(), setting.client.heard.as_slice()), (128, &b"hello"[..]));
        let mut setting = Setting::new(1, None, Secure::server(lookup()));
        setting.client.outbox.push_seg(said);
        setting.run(20);
        assert_eq!(setting.server.failed.unwrap(), "peer has come without TLS, which is required here");
        assert!(setting.server.heard.is_empty());
    }

    #[test]
    fn both_ends_are_told_of_a_wrong_key() {
        let client = Secure::client(&[key(8)]).unwrap();
        let mut setting = Setting::new(1, Some(client), Secure::if_asked(lookup()));
        setting.client.outbox.push_head(b"secret");
        setting.run(50);
        let [client, server] = [setting.client.failed, setting.server.failed].map(Option::unwrap);
        assert!(server.contains("has another TLS key than the one that is here called key"), "{server}");
        assert!(client.contains("decrypt_error"), "{client}");
    }

    #[test]
    fn a_peer_that_leaves_within_the_handshake_has_left() {
        let client = Secure::client(&[key(7)]).unwrap();
        let mut setting = Setting::new(1, Some(client), Secure::server(lookup()));
        setting.client.turn(&Pool::new(1 << 20));
        setting.world.run_for(Duration::from_secs(1)).unwrap();
        setting.server.stream.close();
        setting.run(20);
        assert!(setting.client.failed.is_some());
    }
}
