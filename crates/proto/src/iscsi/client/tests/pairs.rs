//! This crate's initiator with its target: the same bytes over iSCSI and in the RAM volume.

use super::script::{INITIATOR, TARGET, at_every_split, list, pattern};
use crate::driver::session::{Demand, Initiator, ProtocolError, StreamSession};
use crate::exports::{Export, Exports, VolumeId};
use crate::iscsi::client::{
    BurstSize, FoundTarget, IscsiDiscoverySession, IscsiInitiatorConfig, IscsiInitiatorSession, IscsiRefused,
    SessionPurpose, default_proposal,
};
use crate::iscsi::login::chap::{ChapAlgorithm, ChapCredentials, ChapSecret};
use crate::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use crate::iscsi::name::Name;
use crate::iscsi::node::{Chap, IscsiAccess, IscsiNode, Portal, TargetNode, offer};
use crate::iscsi::server::IscsiTargetSession;
use crate::scsi::{self, LogicalUnit, Lun, UnitIdentity};
use crate::testing::{Driver, Pump, Streams};
use blockmux_volume::{Extent, Io, IoError, MemVolume, Op, Output, Pool, SgList, Tag};
use blockmux_wire::iscsi::session::LoginStatus;
use std::sync::Arc;
use std::time::Instant;

const SIZE: u64 = 4 << 20;

/// Both sides and the bytes between them.
struct SessionPair<S> {
    node: Arc<IscsiNode>,
    pump: Pump<IscsiTargetSession>,
    client: Driver<S>,
}

impl<S: Streams> SessionPair<S> {
    fn new(client: S, offer: OperationalParameters, chap: Option<Chap>, step: usize) -> SessionPair<S> {
        let volume = Arc::new(MemVolume::new(SIZE));
        let export =
            Export { name: "a".into(), description: String::new(), read_only: false, volume: volume.clone() };
        let exports = Exports::new(vec![export]);
        let unit = LogicalUnit::new(UnitIdentity::of("a"), volume);
        let view = scsi::ScsiTarget::new(TARGET, Vec::new()).with_unit(0, VolumeId(0), unit);
        let access = IscsiAccess { initiator: None, chap, target: Arc::new(view) };
        let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
        let mut target = TargetNode::new(Name::new(TARGET).unwrap(), portals, vec![access]);
        target.offer = offer;
        let node = Arc::new(IscsiNode::new(vec![target]));
        let session =
            IscsiTargetSession::new(node.clone(), 1, Pool::new(usize::MAX), [3; 32], Instant::now());
        let pump = Pump::new(session, &exports).split_at(step);
        SessionPair { node, pump, client: Driver::of(client, step) }
    }

    /// Moves bytes in both directions until nothing changes.
    fn run(&mut self) -> Result<(), ProtocolError> {
        loop {
            let out = self.client.sent();
            let target = self.pump.client_sends(&out);
            let back = self.pump.sent();
            if out.is_empty() && back.is_empty() {
                return Ok(());
            }
            self.client.feed(&back)?;
            target?;
        }
    }
}

fn config(proposal: OperationalParameters, chap: Option<Chap>) -> IscsiInitiatorConfig {
    IscsiInitiatorConfig {
        initiator: Name::new(INITIATOR).unwrap(),
        target: Name::new(TARGET).unwrap(),
        lun: Lun::new(0),
        purpose: SessionPurpose::Use,
        chap,
        proposal,
        isid: [0x80, 0, 0, 0, 0, 1],
        burst: BurstSize::default(),
    }
}

fn initiator(proposal: OperationalParameters, chap: Option<Chap>) -> IscsiInitiatorSession {
    IscsiInitiatorSession::new(config(proposal, chap), Pool::new(64 << 20), [5; 32], Instant::now())
}

impl SessionPair<IscsiInitiatorSession> {
    fn ready(
        proposal: OperationalParameters,
        offer: OperationalParameters,
        step: usize,
    ) -> SessionPair<IscsiInitiatorSession> {
        let mut pair = SessionPair::new(initiator(proposal, None), offer, None, step);
        pair.run().unwrap();
        assert!(pair.client.session.is_ready(), "{:?}", pair.client.session.refused());
        pair
    }

    fn call(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Result<Output, IoError> {
        self.client.submit(offset, op, offset, len, data);
        self.run().unwrap();
        let (tag, result) = self.client.done();
        assert_eq!(tag, offset);
        result
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.call(Op::Write { fua: false }, offset, data.len() as u64, Some(list(data))).unwrap();
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.call(Op::Read, offset, len as u64, None).unwrap().into_data().to_vec()
    }
}

fn with_digests(parameters: OperationalParameters) -> OperationalParameters {
    parameters.with(OperationalKey::HeaderDigest, CRC32C).with(OperationalKey::DataDigest, CRC32C)
}

/// Combinations of an initiator's proposal and a target's offer.
fn ways() -> Vec<(&'static str, OperationalParameters, OperationalParameters)> {
    let plain = offer();
    vec![
        ("all at once", default_proposal(), plain),
        ("digests", with_digests(default_proposal()), plain),
        (
            "R2T for all",
            default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0),
            plain,
        ),
        ("immediate data and R2T", default_proposal().with(OperationalKey::InitialR2T, 1), plain),
        ("unsolicited, not immediate", default_proposal().with(OperationalKey::ImmediateData, 0), plain),
        (
            "short bursts and segments",
            with_digests(default_proposal()).with(OperationalKey::MaxRecvDataSegmentLength, 1024),
            plain
                .with(OperationalKey::MaxRecvDataSegmentLength, 512)
                .with(OperationalKey::MaxBurstLength, 4096)
                .with(OperationalKey::FirstBurstLength, 2048)
                .with(OperationalKey::MaxOutstandingR2T, 2),
        ),
    ]
}

#[test]
fn data_round_trips_split_at_every_byte() {
    at_every_split(|step| {
        for (name, proposal, offer) in ways() {
            let mut pair = SessionPair::ready(proposal, offer, step);
            for (offset, len) in [(0, 512), (4096, 4096), (8192, 20 * 512)] {
                let data = pattern(len);
                pair.write(offset, &data);
                assert!(pair.read(offset, len) == data, "{name}, {len} bytes, {step} at a time");
            }
        }
    });
}

#[test]
fn long_data_is_cut_into_bursts_and_placed() {
    for (name, proposal, offer) in ways() {
        let mut pair = SessionPair::ready(proposal, offer, 100_000);
        let data = pattern(3 << 20);
        pair.write(512, &data);
        assert!(pair.read(512, data.len()) == data, "{name}");
        let own = list(&vec![0; data.len()]);
        let output = pair.call(Op::Read, 512, data.len() as u64, Some(own.clone())).unwrap();
        assert!(own.to_vec() == data && output.into_data().len() == data.len(), "{name}");
        assert_eq!(pair.client.placed > 0, name != "short bursts and segments", "{name}");
    }
}

#[test]
fn every_operation_does_what_it_says() {
    let mut pair = SessionPair::ready(default_proposal(), offer(), usize::MAX);
    let zeroes = |fua, may_unmap, only_fast| Op::WriteZeroes { fua, may_unmap, only_fast };
    for op in [Op::Flush, Op::Prefetch, Op::Discard { fua: true }] {
        let len = if op == Op::Flush { 0 } else { 8192 };
        assert!(pair.call(op, 0, len, None).is_ok(), "{op:?}");
    }
    for fua in [false, true] {
        for may_unmap in [false, true] {
            pair.write(0, &pattern(1 << 20));
            assert!(pair.call(zeroes(fua, may_unmap, false), 512, 1 << 19, None).is_ok());
            assert_eq!(pair.read(0, 512), pattern(512));
            assert_eq!(pair.read(512, 1 << 19), vec![0; 1 << 19]);
            assert_eq!(pair.read(512 + (1 << 19), 512), pattern(1 << 20)[512 + (1 << 19)..][..512]);
        }
    }
    pair.call(Op::Write { fua: true }, 0, 512, Some(list(&pattern(512)))).unwrap();
    assert!(pair.call(zeroes(false, true, true), 0, 1 << 20, None).is_ok());
    let slow = pair.call(zeroes(false, false, true), 0, 1 << 20, None);
    assert_eq!(slow.err(), Some(IoError::Unsupported));
}

#[test]
fn block_status_distinguishes_holes_from_data() {
    let mut pair = SessionPair::ready(default_proposal(), offer(), 7);
    pair.write(1 << 20, &pattern(1 << 20));
    let Output::Extents(extents) = pair.call(Op::BlockStatus, 0, SIZE, None).unwrap() else { panic!() };
    let extent = |len, is_hole| Extent { len, hole: is_hole, zero: is_hole };
    assert_eq!(extents, [extent(1 << 20, true), extent(1 << 20, false), extent(2 << 20, true)]);
}

#[test]
fn requests_in_flight_may_end_in_any_order() {
    let mut pair = SessionPair::ready(default_proposal(), offer(), usize::MAX);
    pair.write(0, &pattern(64 << 10));
    pair.pump.holds_io = true;
    for n in 0..8 {
        pair.client.session.submit(Io::new(Tag(n), Op::Read, n * 4096, 4096));
    }
    pair.run().unwrap();
    pair.pump.submitted.make_contiguous().reverse();
    while !pair.pump.submitted.is_empty() {
        pair.pump.finish_one();
        pair.run().unwrap();
    }
    for n in (0..8).rev() {
        let done = pair.client.session.poll_done().unwrap();
        let expected = &pattern(64 << 10)[n as usize * 4096..][..4096];
        assert_eq!((done.tag, done.result.unwrap().into_data().to_vec()), (Tag(n), expected.to_vec()));
    }
}

#[test]
fn commands_beyond_the_window_wait() {
    let mut pair = SessionPair::ready(default_proposal(), offer(), usize::MAX);
    pair.pump.holds_io = true;
    let mut submitted = 0;
    while pair.client.session.room() > 0 {
        pair.client.session.submit(Io::new(Tag(submitted), Op::Read, 0, 512));
        submitted += 1;
    }
    pair.run().unwrap();
    assert_eq!((submitted, pair.pump.submitted.len()), (256, 256));
    pair.pump.finish_one();
    pair.run().unwrap();
    assert_eq!(pair.client.session.room(), 1);
}

#[test]
fn stopping_waits_for_what_is_in_flight_and_then_logs_out() {
    let mut pair = SessionPair::ready(default_proposal(), offer(), 1);
    pair.pump.holds_io = true;
    pair.client.session.submit(Io::new(Tag(1), Op::Read, 0, 4096));
    pair.run().unwrap();
    pair.client.session.on_stop();
    pair.client.session.on_stop();
    pair.run().unwrap();
    assert!(!pair.client.session.is_over() && pair.client.session.room() == 0);
    pair.pump.finish_one();
    pair.run().unwrap();
    assert!(pair.client.session.poll_done().unwrap().result.is_ok() && pair.client.session.is_over());
    assert!(matches!(pair.client.stream().demand(), Demand::Close));
    assert!(matches!(pair.pump.session.demand(), Demand::Close));
}

#[test]
fn commands_in_flight_complete_at_a_stopping_target_and_the_rest_is_returned() {
    use crate::driver::target::TargetLifecycle;
    let mut pair = SessionPair::ready(default_proposal(), offer(), usize::MAX);
    pair.pump.holds_io = true;
    for n in 0..3 {
        pair.client.session.submit(Io::new(Tag(n), Op::Read, 0, 4096));
    }
    pair.run().unwrap();
    pair.pump.session.on_stop(Instant::now());
    pair.run().unwrap();
    assert_eq!(pair.client.session.room(), 0);
    pair.pump.finish_one();
    pair.run().unwrap();
    assert!(pair.client.session.poll_done().unwrap().result.is_ok());
    assert!(pair.client.stream().on_end(Instant::now()).is_err(), "two commands are in flight");
    let tags: Vec<_> = pair.client.session.take_unfinished().into_iter().map(|io| io.tag).collect();
    assert_eq!(tags, [Tag(1), Tag(2)]);
}

fn chap(initiator: &str, target: Option<&str>) -> Chap {
    let credentials =
        |name, secret: &str| ChapCredentials::new(name, ChapSecret::new(secret.as_bytes()).unwrap()).unwrap();
    Chap {
        initiator: credentials("user", initiator),
        target: target.map(|secret| credentials("target", secret)),
        algorithms: ChapAlgorithm::ALL.to_vec(),
    }
}

#[test]
fn mutual_authentication_works_split_at_every_byte() {
    let there = chap("initiator-secret", Some("target-secret"));
    at_every_split(|step| {
        for target in [None, Some("target-secret")] {
            let here = chap("initiator-secret", target);
            let client = initiator(with_digests(default_proposal()), Some(here));
            let mut pair = SessionPair::new(client, offer(), Some(there.clone()), step);
            pair.run().unwrap();
            assert!(pair.client.session.is_ready());
        }
    });
    let here = chap("initiator-secret", Some("another-secret"));
    let mut pair =
        SessionPair::new(initiator(default_proposal(), Some(here)), offer(), Some(there.clone()), 9);
    pair.run().unwrap();
    assert_eq!(pair.client.session.refused(), Some(&IscsiRefused::MutualAuthFailed));
    for here in [None, Some(chap("wrong", None))] {
        let is_guess = here.is_some();
        let mut pair = SessionPair::new(initiator(default_proposal(), here), offer(), Some(there.clone()), 9);
        let ran = pair.run();
        // A wrong CHAP response is refused after a delay.
        let refused = Some(&IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE));
        assert!(is_guess || (ran.is_err() && pair.client.session.refused() == refused), "{ran:?}");
        assert!(!pair.client.session.is_ready());
    }
}

#[test]
fn discovery_with_mutual_chap_accepts_a_portal_that_does_not_authenticate() {
    let here = chap("initiator-secret", Some("target-secret"));
    let there = |target| Some(chap("initiator-secret", target));
    for (there, is_found) in [
        (None, true),
        (there(Some("target-secret")), true),
        // A proof that is given has to be right.
        (there(Some("another-secret")), false),
    ] {
        let discovery = IscsiDiscoverySession::new(
            Name::new(INITIATOR).unwrap(),
            Some(here.clone()),
            [0x80, 0, 0, 0, 0, 1],
            [5; 32],
            Instant::now(),
        );
        let mut pair = SessionPair::new(discovery, offer(), None, usize::MAX);
        pair.node.set_discovery_chap(there);
        let _ = pair.run();
        assert_eq!(pair.client.session.targets().len(), usize::from(is_found));
        assert_eq!(pair.client.session.refused().is_none(), is_found);
    }
}

#[test]
fn a_missing_target_is_reported_in_words() {
    let elsewhere = IscsiInitiatorConfig {
        target: Name::new("iqn.2026-11.com.example:none").unwrap(),
        ..config(default_proposal(), None)
    };
    let client = IscsiInitiatorSession::new(elsewhere, Pool::new(1 << 20), [5; 32], Instant::now());
    let mut pair = SessionPair::new(client, offer(), None, usize::MAX);
    assert!(pair.run().is_err(), "the target ends the connection");
    assert_eq!(pair.client.session.refused(), Some(&IscsiRefused::Login(LoginStatus::NOT_FOUND)));
    let nowhere = IscsiInitiatorConfig { lun: Lun::new(7), ..config(default_proposal(), None) };
    let client = IscsiInitiatorSession::new(nowhere, Pool::new(1 << 20), [5; 32], Instant::now());
    let mut pair = SessionPair::new(client, offer(), None, usize::MAX);
    pair.run().unwrap();
    assert_eq!(pair.client.session.refused().unwrap().to_string(), "target has no logical unit 7");
    assert_eq!(pair.client.session.luns(), [Lun::new(0)]);
    assert!(pair.client.session.is_over());
}

#[test]
fn discovery_finds_every_target_and_its_addresses() {
    at_every_split(|step| {
        let name = Name::new(INITIATOR).unwrap();
        let session = IscsiDiscoverySession::new(name, None, [0x80, 0, 0, 0, 0, 2], [5; 32], Instant::now());
        let mut pair = SessionPair::new(session, offer(), None, step);
        pair.run().unwrap();
        assert!(pair.client.session.is_over() && matches!(pair.client.stream().demand(), Demand::Close));
        let found = FoundTarget { name: TARGET.into(), addresses: vec!["192.0.2.1:3260,1".into()] };
        assert_eq!((pair.client.session.targets(), pair.client.session.left_out()), (&[found][..], 0));
    });
}
