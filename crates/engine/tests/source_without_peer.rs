//! `Channels` for a source without a peer, as a disk that is attached to a virtual machine: no
//! socket, session or permit.

use blockmux_engine::core::reactor::Progress;
use blockmux_engine::serve::channels::Channels;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::volume_state::{NotAdmitted, Origin, VolumeState};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Completion, Core, DelayVolume, Delays, Io, IoError, Limit, Limits, MemVolume, Op, Tag, VolumeLimits,
    Waker,
};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The queue of an attached disk.
#[derive(Default)]
struct AttachedDisk {
    submitted: VecDeque<Io>,
    /// Tags of the I/O that has begun.
    begun: Vec<Tag>,
    cancelled: VecDeque<Tag>,
    completed: Vec<(Tag, Result<(), IoError>)>,
}

impl IoSource for AttachedDisk {
    fn depth(&self) -> u32 {
        64
    }

    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        Some((VolumeId(0), self.submitted.pop_front()?))
    }

    fn begin(&mut self, _: VolumeId, io: &Io, _: bool) -> Result<(), NotAdmitted<IoError>> {
        self.begun.push(io.tag);
        Ok(())
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        Some((VolumeId(0), self.cancelled.pop_front()?))
    }

    fn on_io(&mut self, done: Completion, _: std::time::Instant) {
        self.completed.push((done.tag, done.result.map(|_| ())));
    }
}

/// A disk with a volume whose reads take [`READ_TIME`].
struct Attached {
    core: Rc<TestCore>,
    exports: Exports,
    volume_state: Arc<VolumeState>,
    channels: Channels,
    disk: AttachedDisk,
}

impl Attached {
    fn new() -> Attached {
        let core = TestCore::new();
        let delays = Delays { read: READ_TIME, ..Delays::default() };
        let volume = Arc::new(DelayVolume::new(Arc::new(MemVolume::new(1 << 20)), delays));
        let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let origin = Origin { protocol: "attached", listener: "disk0".into() };
        let channels = Channels::new(exports.clone(), core.as_core(), Waker::idle(), origin);
        let volume_state = exports.volume_state(VolumeId(0)).unwrap();
        Attached { core, exports, volume_state, channels, disk: AttachedDisk::default() }
    }

    /// Limits the volume to this many requests per second.
    fn limit(&self, iops: u64) {
        let total = Limit { iops: NonZeroU64::new(iops), bytes_per_s: None };
        let volume = Limits { total, ..Limits::default() };
        assert!(self.volume_state.limiter().set_limits(VolumeLimits { volume, ..VolumeLimits::default() }));
    }

    /// Submits reads with these tags, and runs a turn.
    fn read(&mut self, tags: std::ops::Range<u64>) {
        self.disk.submitted.extend(tags.map(|tag| Io::new(Tag(tag), Op::Read, 0, 512)));
        self.turn();
    }

    fn turn(&mut self) -> Progress {
        self.channels.move_io(&mut self.disk, self.core.now())
    }

    /// Runs a turn after `time`; returns the number of requests that have completed so far.
    fn turn_after(&mut self, time: Duration) -> usize {
        self.core.advance(time);
        self.turn();
        self.disk.completed.len()
    }
}

#[test]
fn its_io_is_counted_for_its_origin() {
    let mut attached = Attached::new();
    attached.read(0..3);
    assert_eq!((attached.disk.begun.len(), attached.channels.is_idle()), (3, false));
    assert_eq!(attached.turn_after(READ_TIME), 3);
    assert!(attached.channels.is_idle());
    let [sum] = &attached.volume_state.traffic_by_origin()[..] else { panic!("one origin") };
    assert_eq!((sum.origin.protocol, &*sum.origin.listener), ("attached", "disk0"));
    assert_eq!((sum.traffic.reads, sum.latency.reads.count()), (3, 3));
}

#[test]
fn limits_throttle_it_before_it_begins_and_a_throttled_request_can_be_cancelled() {
    let mut attached = Attached::new();
    attached.limit(10);
    attached.read(0..3);
    assert_eq!((&attached.disk.begun[..], attached.volume_state.traffic().throttled_now), (&[Tag(0)][..], 2));
    attached.disk.cancelled.push_back(Tag(1));
    attached.turn();
    assert_eq!(attached.disk.completed, [(Tag(1), Err(IoError::Aborted))]);
    attached.turn_after(Duration::from_millis(100));
    assert_eq!(attached.disk.begun, [Tag(0), Tag(2)]);
}

#[test]
fn once_drained_it_has_no_io_in_flight() {
    let mut attached = Attached::new();
    attached.limit(10);
    attached.read(0..3);
    attached.channels.lift_limits();
    attached.turn();
    assert_eq!(attached.disk.begun.len(), 3, "limits do not delay the end");
    assert_eq!(attached.turn_after(READ_TIME), 3);
    assert!(attached.channels.is_idle());
}

#[test]
fn a_removed_volume_fails_its_requests_and_frees_its_channel() {
    let mut attached = Attached::new();
    attached.read(0..1);
    let removed = attached.exports.remove("a").unwrap();
    assert_eq!(attached.turn_after(READ_TIME), 1, "it was in flight");
    assert_eq!(removed.volume_state.traffic().users, 1);
    attached.read(1..2);
    assert_eq!(attached.disk.completed[1..], [(Tag(1), Err(IoError::ShuttingDown))]);
    assert_eq!(removed.volume_state.traffic().users, 0);
}

#[test]
fn what_its_user_has_left_in_flight_is_an_orphan_until_it_completes() {
    let mut attached = Attached::new();
    attached.limit(10);
    attached.read(0..3);
    attached.channels.orphan(true);
    attached.turn();
    assert_eq!(attached.disk.completed, [1, 2].map(|tag| (Tag(tag), Err(IoError::Aborted))));
    assert_eq!(attached.volume_state.orphans(), 1);
    attached.turn_after(READ_TIME);
    assert!(attached.channels.is_idle());
    drop(attached.channels);
    assert_eq!(attached.volume_state.orphans(), 0);
}

const READ_TIME: Duration = Duration::from_millis(5);
