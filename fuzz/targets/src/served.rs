//! The volumes of a fuzzed target session: they check its I/O, which fails when the input requests
//! it.

use crate::choices::Choices;
use crate::io_count::count_success;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::volume_state::NotAdmitted;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Completion, Io, IoError, Op, Output, Pool, Waker};
use std::time::Instant;

/// Volumes, and the I/O to them in flight.
pub(crate) struct Served {
    exports: Exports,
    channels: Vec<Box<dyn Channel>>,
    /// I/O in flight.
    in_flight: Vec<(VolumeId, Io)>,
    /// I/O that waits for its range.
    waiting: Vec<(VolumeId, Io)>,
    /// Remaining bytes that may be read, which limits the time for one input.
    budget: u64,
}

impl Served {
    /// Opens every export for a session of this depth.
    pub(crate) fn open(exports: Exports, pool: &Pool, depth: u32) -> Served {
        let core = TestCore::with_pool(pool).as_core();
        let open = |export: &Export| {
            export.volume.open(&core, depth, Waker::idle()).expect("a fuzz target's volume opens")
        };
        let channels = exports.iter().map(|(_, export)| open(&export)).collect();
        Served { exports, channels, in_flight: Vec::new(), waiting: Vec::new(), budget: READ_BUDGET }
    }

    /// Takes all I/O of the session; returns whether there was any.
    pub(crate) fn poll_io<S: IoSource>(&mut self, session: &mut S) -> bool {
        let before = self.in_flight.len();
        for (volume, io) in std::mem::take(&mut self.waiting) {
            self.begin(session, volume, io, true);
        }
        while let Some((volume, io)) = session.poll_io() {
            let export = self.exports.get(volume).expect("the volume exists");
            assert_eq!(export.volume.info().check(&io), Ok(()), "{io:?}");
            assert!(!(export.read_only && io.op.is_write()), "{io:?} of a read-only export");
            assert!(io.len > 0 || io.op == Op::Flush, "{io:?} has length 0");
            assert!(
                self.in_flight.iter().all(|(_, other)| other.tag != io.tag),
                "{io:?} has the tag of another I/O in flight"
            );
            self.begin(session, volume, io, false);
        }
        assert!(self.in_flight.len() + self.waiting.len() <= session.depth() as usize);
        while let Some((volume, tag)) = session.poll_cancel() {
            let is_it = |(on, io): &(VolumeId, Io)| *on == volume && io.tag == tag;
            if let Some(at) = self.waiting.iter().position(is_it) {
                self.waiting.remove(at);
                session.on_io(Completion { tag, result: Err(IoError::Aborted) }, Instant::now());
                continue;
            }
            assert!(self.in_flight.iter().any(is_it), "{tag:?} is to be cancelled but not in flight");
        }
        self.in_flight.len() > before
    }

    /// Begins an I/O, or lets it wait for its range.
    fn begin<S: IoSource>(&mut self, session: &mut S, volume: VolumeId, io: Io, is_late: bool) {
        match session.begin(volume, &io, is_late) {
            Ok(()) => self.in_flight.push((volume, io)),
            Err(NotAdmitted::Denied(_)) => {}
            Err(NotAdmitted::Locked(_) | NotAdmitted::Draining) => self.waiting.push((volume, io)),
        }
    }

    /// Completes I/O in number and order of the choices; returns whether there was any.
    pub(crate) fn complete_some<S: IoSource>(&mut self, session: &mut S, choices: &mut Choices<'_>) -> bool {
        let count = match choices.byte() {
            0..=127 => self.in_flight.len(),
            byte => usize::from(byte) % 4,
        };
        let count = count.min(self.in_flight.len());
        for _ in 0..count {
            let at = choices.below(self.in_flight.len().min(256));
            self.complete(at, session, choices);
        }
        count > 0
    }

    /// Completes all I/O in flight, oldest first.
    pub(crate) fn complete_all<S: IoSource>(&mut self, session: &mut S, choices: &mut Choices<'_>) {
        while !self.in_flight.is_empty() {
            self.complete(0, session, choices);
        }
    }

    /// Completes one I/O by its volume, or with an error that the input chooses.
    fn complete<S: IoSource>(&mut self, at: usize, session: &mut S, choices: &mut Choices<'_>) {
        let (volume, io) = self.in_flight.swap_remove(at);
        let tag = io.tag;
        let choice = choices.byte();
        let result = match choice {
            _ if io.op == Op::Read && io.len > self.budget => Err(IoError::NoMemory),
            224.. => Err(choices.of(&ERRORS)),
            // A result that no volume may return, which must not affect peers.
            222 => Ok(Output::Nothing),
            223 => Ok(Output::Extents(Vec::new())),
            _ => {
                self.budget -= if io.op == Op::Read { io.len } else { 0 };
                let (channel, mut done) = (&mut self.channels[volume.0 as usize], Vec::new());
                channel.submit(io);
                channel.kick();
                channel.poll(&mut done);
                let done = done.pop().expect("this volume completes at once");
                assert_eq!(done.tag, tag);
                if done.result.is_ok() {
                    count_success();
                }
                done.result
            }
        };
        session.on_io(Completion { tag, result }, Instant::now());
    }
}

const ERRORS: [IoError; 12] = [
    IoError::OutOfRange,
    IoError::Misaligned,
    IoError::BadLength,
    IoError::ReadOnly,
    IoError::Unsupported,
    IoError::NoSpace,
    IoError::Medium,
    IoError::NoMemory,
    IoError::PathLost,
    IoError::Aborted,
    IoError::ShuttingDown,
    IoError::Fenced,
];

/// Maximum number of bytes to read for one input: one read of full length.
const READ_BUDGET: u64 = 33 << 20;
