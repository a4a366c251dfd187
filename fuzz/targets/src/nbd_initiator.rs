//! A hostile server against the NBD initiator: every request completes exactly once.

use crate::choices::Choices;
use crate::nbd_client_stream::{ClientStream, Limits};
use crate::requests::{Requests, take_turns};
use crate::wire::Wire;
use blockmux_proto::driver::session::{Demand, Initiator, ProtocolError, StreamSession, Timed};
use blockmux_proto::nbd::client::{
    ExportInfo, HeaderFormat, NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
};
use blockmux_volume::Pool;
use std::time::Instant;

/// Reads `data` as choices and a server's stream.
pub(crate) fn nbd_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let config = NbdInitiatorConfig {
        export: "x".into(),
        mode: choices.of(&[
            NbdSessionMode::Go,
            NbdSessionMode::Go,
            NbdSessionMode::Info,
            NbdSessionMode::List,
        ]),
        features: choices.of(&FEATURES),
    };
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 64 << 20, 16 << 10]));
    let mut run = NbdInitiatorRun {
        session: NbdInitiatorSession::new(config, pool.clone(), Instant::now()),
        choices,
        wire: Wire::new(stream),
        pool,
        requests: Requests::default(),
        stream: ClientStream::default(),
        is_over: false,
    };
    take_turns(|| run.turn());
    run.finish();
}

struct NbdInitiatorRun<'a> {
    choices: Choices<'a>,
    session: NbdInitiatorSession,
    wire: Wire,
    pool: Pool,
    requests: Requests,
    stream: ClientStream,
    is_over: bool,
}

impl NbdInitiatorRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.submit();
        moved |= self.send();
        moved |= !self.is_over && self.receive();
        moved |= self.poll_done();
        if self.choices.byte() == 255 {
            self.session.on_stop();
        }
        moved
    }

    fn receive(&mut self) -> bool {
        match self.wire.turn(&mut self.session, &mut self.choices) {
            Ok(moved) => moved,
            Err(error) => self.on_error(error),
        }
    }

    fn on_error(&mut self, error: ProtocolError) -> bool {
        let text = error.to_string();
        assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
        self.is_over = true;
        true
    }

    fn submit(&mut self) -> bool {
        let info = self.session.export().map(ExportInfo::volume_info);
        !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices)
    }

    fn send(&mut self) -> bool {
        let bytes = self.session.outbox().take_bytes();
        let limits = self.session.export().map(|export| {
            let info = export.volume_info();
            Limits {
                size: info.size,
                block: info.logical_block.into(),
                max_payload: export.max_payload().into(),
                is_extended: export.headers == HeaderFormat::Extended,
                flags: export.flags.bits(),
            }
        });
        self.stream.on_sent(&bytes, limits.as_ref());
        !bytes.is_empty()
    }

    fn poll_done(&mut self) -> bool {
        let any = self.requests.poll_done(&mut self.session);
        let held = self.requests.read_buffers();
        assert!(
            self.pool.out_bytes() <= held,
            "{} bytes in use, at most {held} expected",
            self.pool.out_bytes()
        );
        any
    }

    /// Closes the connection, from the server's side or ours.
    fn finish(mut self) {
        let leaves = !self.is_over && self.wire.is_drained() && self.choices.byte() < 128;
        if leaves && let Err(error) = self.session.on_end(Instant::now()) {
            self.on_error(error);
        }
        self.send();
        self.stream.on_quiet();
        self.poll_done();
        if self.session.is_over() {
            assert!(matches!(self.session.demand(), Demand::Close) && self.session.room() == 0);
        }
        if let Some(refused) = self.session.refusal() {
            assert!(!refused.to_string().contains('\n'));
        }
        assert!(self.session.exports().len() <= 10_000);
        let is_handshaking = !self.session.is_ready() && !self.session.is_over();
        assert_eq!(self.session.poll_timeout().is_some(), is_handshaking);
        self.requests.take_back(&mut self.session);
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

const FEATURES: [NbdFeatures; 4] = [
    NbdFeatures { extended_headers: true, structured_replies: true },
    NbdFeatures { extended_headers: false, structured_replies: true },
    NbdFeatures { extended_headers: false, structured_replies: false },
    NbdFeatures { extended_headers: true, structured_replies: false },
];
