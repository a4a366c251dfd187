//! Hostile frames against both sides of ATA over Ethernet. No frame may end a session or cause I/O
//! outside the disk.

use crate::choices::Choices;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::client::{AoeInitiatorConfig, AoeInitiatorSession};
use blockmux_proto::aoe::disks::AoeDisks;
use blockmux_proto::aoe::server::{AoeTargetSession, DEPTH};
use blockmux_proto::aoe::unit::{AoeUnit, DiskSettings};
use blockmux_proto::driver::frames::{Frame, FramePortInfo, PortId, Station};
use blockmux_proto::driver::session::{FrameSession, Timed};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Chunk, Io, MemVolume, Op, Pool, Seg, SgList, Tag, Volume, Waker};
use blockmux_wire::ethernet::Mac;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads `data` as frames to a target: each has its length, its sender and its bytes.
pub(crate) fn aoe_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let volume = Arc::new(MemVolume::new(SIZE));
    let core = TestCore::new().as_core();
    let mut channel = volume.open(&core, DEPTH, Waker::idle()).expect("a RAM volume opens");
    let exports = Exports::new(vec![Export {
        name: "disk".to_owned(),
        description: String::new(),
        read_only: choices.of(&[false, false, true]),
        volume,
    }]);
    let unit = AoeUnit::new(ADDRESS, VolumeId(0), DiskSettings::default(), None);
    let mut target = AoeTargetSession::new(exports, AoeDisks::everywhere(vec![unit]));
    let mut now = Instant::now();
    target.on_port(PortId(0), PORT, now);
    for bytes in frames(&stream) {
        let chunk = Chunk::from_slice(bytes);
        let from = Station {
            port: PortId(choices.of(&[0, 0, 0, 1])),
            mac: Mac([2, 0, 0, 0, 0, choices.of(&[1, 2])]),
        };
        target.on_frame(&Frame::new(from, &chunk, bytes.len()), now);
        while let Some((volume, io)) = target.poll_io() {
            target.begin(volume, &io, false).expect("nothing excludes it");
            assert!(io.op == Op::Flush || io.len <= 0xffff * 512, "{io:?}");
            let mut done = Vec::new();
            channel.submit(io);
            channel.poll(&mut done);
            done.into_iter().for_each(|done| target.on_io(done, Instant::now()));
        }
        let outbox = target.frames(now);
        while let Some(frame) = outbox.pop_front() {
            assert!(frame.len() <= PORT.mtu as usize, "an answer exceeds the MTU");
        }
        now += Duration::from_millis(choices.of(&[0, 1, 1000, 60_000]));
    }
    // The announcement of a new port may be the only frame.
    while target.frames(now).pop_front().is_some() {}
    assert!(target.is_idle());
}

/// Reads `data` as frames to an initiator with a few requests, each of which must complete exactly
/// once.
pub(crate) fn aoe_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let mut now = Instant::now();
    let config = AoeInitiatorConfig { address: ADDRESS, timeout: Duration::from_secs(5), id: 0, first: 0 };
    let mut session = AoeInitiatorSession::new(config, Pool::new(1 << 20), now);
    session.on_port(PortId(0), PORT, now);
    let (mut submitted, mut completed) = (0u64, 0);
    for bytes in frames(&stream) {
        let chunk = Chunk::from_slice(bytes);
        let from = Station { port: PortId(0), mac: Mac([2, 0, 0, 0, 0, choices.of(&[1, 1, 2])]) };
        session.on_frame(&Frame::new(from, &chunk, bytes.len()), now);
        if session.room() > 0 && submitted < 16 {
            let len = choices.of(&[512, 1024, 8192, 0]);
            let op = choices.of(&[Op::Read, Op::Write { fua: true }, Op::Discard { fua: false }, Op::Flush]);
            let mut io = Io::new(Tag(submitted), op, 0, if op == Op::Flush { 0 } else { len });
            io.data =
                matches!(op, Op::Write { .. }).then(|| SgList::one(Seg::from_slice(&vec![1; len as usize])));
            session.submit(io);
            submitted += 1;
        }
        now += Duration::from_millis(choices.of(&[0, 0, 1, 50]));
        session.on_timeout(now).expect("nothing breaks it");
        while session.frames(now).pop_front().is_some() {}
        completed += std::iter::from_fn(|| session.poll_done()).count() as u64;
    }
    for _ in 0..200 {
        now += Duration::from_millis(100);
        session.on_timeout(now).expect("nothing breaks it");
        while session.frames(now).pop_front().is_some() {}
        completed += std::iter::from_fn(|| session.poll_done()).count() as u64;
    }
    assert_eq!((completed, session.held()), (submitted, 0), "not every request completed exactly once");
}

/// Splits a stream into frames, each after its 16-bit length.
fn frames(stream: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = stream;
    std::iter::from_fn(move || {
        let (len, after) = rest.split_first_chunk::<2>()?;
        let len = usize::from(u16::from_be_bytes(*len) % 2048).min(after.len());
        let (frame, after) = after.split_at(len);
        rest = after;
        Some(frame)
    })
    .take(MAX_FRAMES)
}

const ADDRESS: AoeAddress = AoeAddress { shelf: 1, slot: 0 };
const PORT: FramePortInfo = FramePortInfo { mac: Mac([2; 6]), mtu: 1500, buffers: 64, is_up: true };
const SIZE: u64 = 64 << 10;
const MAX_FRAMES: usize = 64;
