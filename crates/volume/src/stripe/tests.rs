//! Tests of striping against its definition.

use super::*;
use crate::conformance::{self, Harness, TestCore};
use crate::{
    DelayVolume, Delays, Fault, FaultEffect, FaultVolume, MemVolume, MemoryAlignment, NullVolume, OpKind,
    OpSet,
};
use proptest::prelude::*;
use std::time::Duration;

fn mem(size: u64) -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(size))
}

fn stripe(chunk: u64, members: impl IntoIterator<Item = Arc<dyn Volume>>) -> Arc<dyn Volume> {
    Arc::new(StripeVolume::new(chunk, members.into_iter().collect()).unwrap())
}

/// A volume that reports other properties.
struct Described(Arc<dyn Volume>, VolumeInfo);

impl Volume for Described {
    fn info(&self) -> VolumeInfo {
        self.1.clone()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        self.0.open(core, depth, waker)
    }
}

#[test]
fn a_stripe_conforms() {
    for (chunk, members) in [(DEFAULT_CHUNK, 3), (4096, 2), (1536, 5), (64 << 10, 1)] {
        let volume = stripe(chunk, (0..members).map(|_| mem(9 << 20)));
        conformance::run(&mut Harness::on_test_core(volume));
    }
}

#[test]
fn a_stripe_of_slow_and_striped_members_conforms() {
    let delays = Delays { read: Duration::from_millis(1), ..Delays::default() };
    let slow = Arc::new(DelayVolume::new(mem(8 << 20), delays));
    let members: [Arc<dyn Volume>; 2] = [slow, stripe(4096, [mem(4 << 20), mem(5 << 20)])];
    conformance::run(&mut Harness::on_test_core(stripe(64 << 10, members)));
}

#[test]
fn unsuitable_members_are_refused() {
    let error = |chunk, members: Vec<Arc<dyn Volume>>| {
        StripeVolume::new(chunk, members).err().map(|error| error.to_string()).unwrap()
    };
    assert_eq!(error(4096, vec![]), "a stripe of 0 volumes: name 1 to 256");
    let multiple = "take a multiple of the members' logical block of 512 bytes";
    assert_eq!(error(0, vec![mem(8192)]), format!("a chunk of 0 bytes: {multiple}"));
    assert_eq!(error(1000, vec![mem(8192)]), format!("a chunk of 1000 bytes: {multiple}"));
    let small = "member 1 has 512 bytes, less than one chunk of 4096: take a smaller chunk";
    assert_eq!(error(4096, vec![mem(8192), mem(512)]), small);
    let huge = || Arc::new(NullVolume::new(1 << 63)) as Arc<dyn Volume>;
    assert_eq!(error(4096, vec![huge(), huge()]), "the members together are larger than 2^64 bytes");
}

#[test]
fn the_members_properties_are_combined() {
    let base = VolumeInfo { fast_zeroes: true, lends_reads: true, ..VolumeInfo::new(10 << 20) };
    let base = VolumeInfo { registered_alignment: Some(MemoryAlignment::of(512)), ..base };
    let other = VolumeInfo {
        size: (7 << 20) + 512,
        logical_block: 4096,
        physical_block: 16384,
        preferred_block: 16384,
        read_only: true,
        write_cache: true,
        volatile: true,
        discard_granularity: 8192,
        rotational: true,
        fast_zeroes: false,
        shared_flush: false,
        lends_reads: false,
        registered_alignment: None,
        compare_and_write_unit: 0,
    };
    let described = |info: &VolumeInfo| Arc::new(Described(mem(10 << 20), info.clone())) as Arc<dyn Volume>;
    let both = stripe(1 << 20, [described(&base), described(&other)]).info();
    assert_eq!(both, VolumeInfo { size: 14 << 20, ..other });
    let same = stripe(1 << 20, [described(&base), described(&base)]).info();
    assert_eq!(same, VolumeInfo { size: 20 << 20, ..base.clone() });
    let wider = VolumeInfo { registered_alignment: Some(MemoryAlignment::of(4096)), ..base.clone() };
    let mixed = stripe(1 << 20, [described(&base), described(&wider)]).info();
    assert_eq!(mixed.registered_alignment, wider.registered_alignment);
}

#[test]
fn chunks_are_distributed_round_robin() {
    let members = [mem(8192), mem(8192), mem(8192)];
    let mut whole = Harness::on_test_core(stripe(512, members.clone()));
    let content: Vec<u8> = (0..48).flat_map(|chunk| [chunk; 512]).collect();
    whole.client(1).unwrap().write(0, &content).unwrap();
    for (index, member) in (0..).zip(members) {
        let bytes = Harness::on_test_core(member).client(1).unwrap().read(0, 8192).unwrap();
        let expected: Vec<u8> = (0..16).flat_map(|row| [row * 3 + index; 512]).collect();
        assert_eq!(bytes, expected, "member {index}");
    }
}

#[test]
fn a_zero_copy_read_over_chunks_returns_the_members_memory() {
    let mut harness = Harness::on_test_core(stripe(4096, [mem(1 << 20), mem(1 << 20)]));
    let mut client = harness.client(1).unwrap();
    let content: Vec<u8> = (0..16384u32).map(|at| (at / 512) as u8).collect();
    client.write(2048, &content).unwrap();
    let output = client.call(Io::new(Tag(3), Op::Read, 2048, 16384)).unwrap().unwrap();
    let list = output.into_data();
    assert_eq!(list.to_vec(), content);
    assert_eq!(list.segs().iter().map(Seg::len).collect::<Vec<_>>(), [2048, 4096, 4096, 4096, 2048]);
}

#[test]
fn one_failing_member_fails_the_request_once_all_have_completed() {
    let fault = Fault { ops: OpSet::NONE.with(OpKind::Read).with(OpKind::Flush), ..Fault::default() };
    let bad = Arc::new(FaultVolume::new(mem(1 << 20), fault));
    let delays = Delays { read: Duration::from_millis(1), ..Delays::default() };
    let slow = Arc::new(DelayVolume::new(mem(1 << 20), delays));
    let core = TestCore::new();
    let volume = stripe(4096, [bad as Arc<dyn Volume>, slow]);
    let mut channel = volume.open(&core.as_core(), 4, core.ready().waker(0)).unwrap();
    let mut done = Vec::new();
    channel.submit(Io::new(Tag(1), Op::Read, 0, 8192));
    channel.kick();
    channel.poll(&mut done);
    assert!(done.is_empty(), "the slow member still owns its part");
    assert!(core.jump());
    channel.submit(Io::new(Tag(2), Op::Flush, 0, 0));
    channel.submit(Io::new(Tag(3), Op::Read, 4096, 4096));
    channel.kick();
    channel.poll(&mut done);
    assert!(core.jump());
    channel.poll(&mut done);
    let mut results: Vec<_> =
        done.iter().map(|done| (done.tag.0, done.result.as_ref().err().copied())).collect();
    results.sort_unstable_by_key(|result| result.0);
    assert_eq!(results, [(1, Some(IoError::Medium)), (2, Some(IoError::Medium)), (3, None)]);
}

#[test]
fn cancelling_reaches_every_member() {
    let stuck = || {
        let fault = Fault { effect: FaultEffect::Stuck, ..Fault::default() };
        Arc::new(FaultVolume::new(mem(1 << 20), fault)) as Arc<dyn Volume>
    };
    let core = TestCore::new();
    let mut channel =
        stripe(4096, [stuck(), stuck()]).open(&core.as_core(), 4, core.ready().waker(0)).unwrap();
    let mut done = Vec::new();
    channel.submit(Io::new(Tag(77), Op::Read, 0, 8192));
    channel.submit(Io::new(Tag(78), Op::Read, 0, 512));
    channel.kick();
    channel.cancel(Tag(77));
    channel.poll(&mut done);
    assert_eq!(done.iter().map(|done| done.tag).collect::<Vec<_>>(), [Tag(77)]);
    assert!(matches!(done[0].result, Err(IoError::Aborted)));
}

#[test]
fn fast_zeroes_need_the_support_of_every_member() {
    let slow = Described(mem(1 << 20), VolumeInfo::new(1 << 20));
    let mut harness = Harness::on_test_core(stripe(4096, [mem(1 << 20), Arc::new(slow)]));
    let mut client = harness.client(1).unwrap();
    client.write(0, &[5; 16384]).unwrap();
    let only_fast = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    assert_eq!(client.call(Io::new(Tag(0), only_fast, 0, 16384)).unwrap().unwrap_err(), IoError::Unsupported);
    assert_eq!(client.read(0, 16384).unwrap(), [5; 16384]);
}

#[test]
fn status_of_a_huge_range_is_bounded() {
    let null = || Arc::new(NullVolume::new(1 << 60)) as Arc<dyn Volume>;
    let mut harness = Harness::on_test_core(stripe(4096, [null(), null()]));
    let mut client = harness.client(1).unwrap();
    let output = client.call(Io::new(Tag(0), Op::BlockStatus, 512, (1 << 61) - 512)).unwrap().unwrap();
    let Output::Extents(extents) = output else { panic!("no extents: {output:?}") };
    let all = MAX_STATUS_CHUNKS * 4096 - 512;
    assert_eq!(extents, [Extent { len: all, hole: true, zero: true }]);
}

proptest! {
    #[test]
    fn a_range_is_one_range_on_each_member_made_of_its_pieces(
        blocks in 1u64..9, members in 1u64..7, offset in 0u64..10_000, len in 1u64..10_000,
    ) {
        let layout = Layout { chunk: blocks * 512, members };
        let parts: Vec<_> = (0..members as usize).map(|member| layout.part(member, offset, len)).collect();
        let mut next: Vec<_> = parts.iter().map(|part| part.0).collect();
        let mut at = offset;
        for piece in layout.pieces(offset, len) {
            prop_assert!(piece.len > 0 && at / layout.chunk == (at + piece.len - 1) / layout.chunk);
            // The definition: chunk c is chunk c / members of member c % members.
            let chunk = at / layout.chunk;
            prop_assert_eq!(piece.member as u64, chunk % members);
            prop_assert_eq!(next[piece.member], chunk / members * layout.chunk + at % layout.chunk);
            next[piece.member] += piece.len;
            at += piece.len;
        }
        prop_assert_eq!(at, offset + len);
        for (part, next) in parts.iter().zip(next) {
            prop_assert_eq!(part.0 + part.1, next);
        }
    }
}

#[test]
fn disjoint_ranges_of_a_stripe_are_disjoint_on_its_members() {
    let parts =
        |range: std::ops::Range<u64>| [0, 1].map(|member| range_on_member(4096, 2, member, range.clone()));
    assert_eq!(parts(0..8192), [0..4096, 0..4096]);
    assert_eq!(parts(0..5000), [0..4096, 0..904]);
    assert_eq!(parts(5000..9000), [4096..4904, 904..4096]);
    let [first, second] = parts(9000..u64::MAX);
    assert_eq!((first.start, second.start), (4904, 4096));
    assert!(first.end > 1 << 62 && second.end > 1 << 62);
    assert_eq!(range_on_member(1 << 63, 2, 1, 5..9), 5..9, "a chunk that no volume has");
}
