//! The channels of a source of I/O: one for each volume that it uses, opened at the first I/O.
//!
//! They are the whole data path between an [`IoSource`] and its volumes, and need nothing else of
//! it: no peer, connection or session. What a task does with the channels of its source:
//!
//! ```text
//!   in every turn      move_io      counts, throttles, begins, submits and completes I/O
//!   it has a session   count_for    its I/O counts for this entry in the list of sessions, too
//!   it is to end       lift_limits  then move_io until is_idle
//!   its user is lost   orphan       in every turn until is_idle: it is an orphaned user
//! ```
//! A volume may be removed meanwhile: its requests in flight complete, further ones fail, and its
//! channel is closed once nothing is in flight.
//!
//! The I/O of one poll is bounded in rounds and in bytes. A command of several steps continues with
//! the next I/O after each completion, and a command of a few bytes may transfer gigabytes: WRITE
//! SAME, VERIFY with one block for all, EXTENDED COPY. Unbounded, such a command on a volume in RAM
//! would block all other sessions of the core until it ends.
//!
//! The order of a request: the source hands it out, limits throttle it (`Throttles`), the source
//! admits it ([`IoSource::begin`]), and it is submitted at once. A request whose range another user
//! has locked waits in `LockedIo` for its turn. So nobody waits for a request that does not run.
//!
//! Latency is the time between two polls, which is read anyway. I/O that completes in the poll that
//! submitted it would need another reading of the clock: one such request is timed every
//! `SAMPLE_EVERY_NS`, and its latency is counted for all others until the next one is timed.

use crate::core::reactor::Progress;
use crate::serve::locked::LockedIo;
use crate::serve::sessions::Session;
use crate::serve::throttles::Throttles;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::volume_state::{
    MAX_ORPHANS, Meter, NotAdmitted, Origin, OrphanedUser, RequestKind, VolumeState,
};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Output, Tag, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use tracing::warn;

/// A source's channels and their I/O in flight.
pub struct Channels {
    exports: Exports,
    open: Vec<OpenChannel>,
    core: Rc<dyn Core>,
    waker: Waker,
    /// Completions that the source has not taken.
    done: Vec<Completion>,
    /// I/O whose completion the source has not taken.
    in_flight: u32,
    submitted: u64,
    /// The last change of `exports` for which channels of removed volumes were closed.
    seen: u64,
    /// The session that I/O is counted for, after login.
    session: Option<Arc<Session>>,
    origin: Origin,
    clock: PollClock,
    /// Nothing is throttled, because the source ends.
    is_lifted: bool,
}

/// The clock for latencies: the time of each poll, and a sample of the time within a poll.
#[derive(Default)]
struct PollClock {
    /// The first poll.
    epoch: Option<Instant>,
    /// The current poll, in nanoseconds after the first.
    poll_ns: u64,
    /// When I/O that completes in its own poll was last timed.
    sampled_ns: Option<u64>,
    /// The latency of that I/O.
    sample_ns: u64,
}

impl PollClock {
    #[inline]
    fn begin(&mut self, now: Instant) {
        let epoch = *self.epoch.get_or_insert(now);
        self.poll_ns = now.saturating_duration_since(epoch).as_nanos() as u64;
    }

    /// Latency of an I/O that was submitted in the poll at `begun_ns` and has completed now.
    #[inline]
    fn latency_ns(&mut self, begun_ns: u64, core: &dyn Core) -> u64 {
        if begun_ns != self.poll_ns {
            return self.poll_ns.saturating_sub(begun_ns);
        }
        if self.sampled_ns.is_none_or(|sampled| self.poll_ns - sampled >= SAMPLE_EVERY_NS) {
            self.sample(core);
        }
        self.sample_ns
    }

    #[cold]
    fn sample(&mut self, core: &dyn Core) {
        let Some(epoch) = self.epoch else { return };
        let now_ns = core.now().saturating_duration_since(epoch).as_nanos() as u64;
        (self.sampled_ns, self.sample_ns) = (Some(self.poll_ns), now_ns.saturating_sub(self.poll_ns));
    }
}

/// The channel of one volume.
struct OpenChannel {
    volume: VolumeId,
    channel: Box<dyn Channel>,
    meter: Meter,
    /// Requests that have not completed.
    in_flight: u32,
    begun: BegunIo,
    throttles: Throttles,
    locked: LockedIo,
    volume_state: Arc<VolumeState>,
    /// Set once the source's user is lost with I/O in flight.
    orphan: Option<OrphanedChannel>,
}

/// The channel of a user that is lost with I/O in flight.
struct OrphanedChannel {
    /// Requests that have not begun are aborted.
    aborts_waiting: bool,
    _user: OrphanedUser,
}

impl OpenChannel {
    /// Admits and submits a request, or lets it wait for its range; returns it if it is denied.
    #[inline]
    fn begin(&mut self, source: &mut impl IoSource, io: Io, is_late: bool) -> Option<(Tag, IoError)> {
        match source.begin(self.volume, &io, is_late) {
            Ok(()) => self.channel.submit(io),
            Err(NotAdmitted::Denied(error)) => return Some((io.tag, error)),
            Err(why) => {
                self.locked.push(io, &self.volume_state, why);
                self.locked.arm();
            }
        }
        None
    }

    /// Begins the requests that waited for their range and may begin now; adds those that are
    /// denied to `denied`. Returns whether any has begun or ended.
    fn begin_locked(
        &mut self,
        source: &mut impl IoSource,
        now: Instant,
        budget: &mut u64,
        denied: &mut Vec<(Tag, IoError)>,
    ) -> bool {
        let mut has_begun = false;
        if !self.locked.begin_tries(now) {
            return false;
        }
        let mut next = 0;
        while *budget > 0
            && let Some(admitted) = self.locked.try_begin(next, |io| source.begin(self.volume, io, true))
        {
            match admitted {
                Err(NotAdmitted::Locked(_) | NotAdmitted::Draining) => {
                    next += 1;
                    continue;
                }
                Ok(()) => {
                    let Some(io) = self.locked.remove(next) else { break };
                    *budget = budget.saturating_sub(io.len);
                    self.channel.submit(io);
                }
                Err(NotAdmitted::Denied(error)) => {
                    let Some(io) = self.locked.remove(next) else { break };
                    denied.push((io.tag, error));
                }
            }
            has_begun = true;
        }
        if *budget == 0 {
            // Those that are left have not been tried.
            self.locked.wake();
        }
        has_begun
    }

    /// Counts completions.
    #[inline]
    fn count(&mut self, done: &[Completion], clock: &mut PollClock, core: &dyn Core) {
        self.in_flight -= done.len() as u32;
        for Completion { tag, result } in done {
            if let Some((begun_ns, kind)) = self.begun.of(*tag) {
                self.meter.complete(kind, clock.latency_ns(begun_ns, core));
            }
            if let Err(error) = result {
                self.meter.fail(error);
            }
        }
    }

    /// Counts the failure of a request that has not begun, and returns its completion.
    #[cold]
    fn fail(&mut self, tag: Tag, error: IoError, clock: &mut PollClock, core: &dyn Core) -> Completion {
        let failed = Completion { tag, result: Err(error) };
        self.count(std::slice::from_ref(&failed), clock, core);
        failed
    }

    /// Removes a request that has not begun; returns whether there is one with this tag.
    fn take_waiting(&mut self, tag: Tag, now: Instant) -> bool {
        self.throttles.cancel(tag, &self.meter, now).is_some() || self.locked.take(tag).is_some()
    }

    /// Removes some request that has not begun; returns its tag.
    fn take_any_waiting(&mut self, now: Instant) -> Option<Tag> {
        self.throttles.cancel_any(&self.meter, now).or_else(|| self.locked.remove(0).map(|io| io.tag))
    }
}

/// Submission time and kind of each I/O in flight, indexed by the slot number in its tag.
#[derive(Default)]
struct BegunIo(Vec<(u64, RequestKind)>);

impl BegunIo {
    #[inline]
    fn begin(&mut self, Tag(tag): Tag, poll_ns: u64, kind: RequestKind) {
        // The lower half of a tag is the slot; the upper half may be a generation.
        let slot = tag as u32 as usize;
        if let Some(begun) = self.0.get_mut(slot) {
            *begun = (poll_ns, kind);
        } else {
            self.grow(slot, (poll_ns, kind));
        }
    }

    #[cold]
    fn grow(&mut self, slot: usize, begun: (u64, RequestKind)) {
        if slot < MAX_SLOTS {
            self.0.resize((slot + 1).next_power_of_two(), (0, RequestKind::Other));
            self.0[slot] = begun;
        }
    }

    #[inline]
    fn of(&self, Tag(tag): Tag) -> Option<(u64, RequestKind)> {
        self.0.get(tag as u32 as usize).copied()
    }
}

impl Channels {
    /// Channels to volumes of `exports`, for a source whose volume ids are their indices.
    /// Completions wake `waker`. I/O is counted for `origin`.
    #[must_use]
    pub fn new(exports: Exports, core: Rc<dyn Core>, waker: Waker, origin: Origin) -> Channels {
        let seen = exports.changes();
        Channels {
            exports,
            open: Vec::new(),
            core,
            waker,
            done: Vec::new(),
            in_flight: 0,
            submitted: 0,
            seen,
            session: None,
            origin,
            clock: PollClock::default(),
            is_lifted: false,
        }
    }

    /// Counts I/O for this session, including I/O counted before this call, and applies the limits
    /// of each client to its client.
    pub fn count_for(&mut self, session: &Arc<Session>) {
        if self.session.is_none() {
            for open in &mut self.open {
                session.add(&open.meter);
                open.throttles.set_client(session.client());
            }
            self.session = Some(session.clone());
        }
    }

    /// Wakes the source's task.
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Whether nothing is in flight.
    #[inline]
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Number of requests that the source has submitted.
    #[inline]
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// The volume's name, empty if it was removed.
    pub(crate) fn name(&self, volume: VolumeId) -> String {
        self.exports.get(volume).map_or_else(String::new, |export| export.name.clone())
    }

    /// Throttles nothing from now on, because the source ends.
    pub fn lift_limits(&mut self) {
        if !std::mem::replace(&mut self.is_lifted, true) {
            self.open.iter_mut().for_each(|open| open.throttles.lift());
            self.waker.wake();
        }
    }

    /// Marks I/O in flight as orphaned until it completes, because the source's user is lost, as a
    /// peer that has disconnected. With `aborts_waiting`, requests that have not begun are aborted:
    /// a write that starts much later could undo what the user writes in another way. They are also
    /// aborted if many users have left some already: those would use up the number of orphaned
    /// users for as long as their requests are throttled. Call it in every turn until
    /// [`Channels::is_idle`].
    pub fn orphan(&mut self, aborts_waiting: bool) {
        self.session = None;
        let now = self.core.now();
        for open in &mut self.open {
            let aborts_waiting = match &open.orphan {
                Some(orphan) => orphan.aborts_waiting,
                None => aborts_waiting || open.volume_state.orphans() >= MAX_WAITING_ORPHANS,
            };
            while aborts_waiting && let Some(tag) = open.take_any_waiting(now) {
                self.done.push(open.fail(tag, IoError::Aborted, &mut self.clock, &*self.core));
                self.waker.wake();
            }
            if open.in_flight == 0 || open.orphan.is_some() {
                continue;
            }
            let (user, count) = open.volume_state.orphan();
            open.orphan = Some(OrphanedChannel { aborts_waiting, _user: user });
            if count == MAX_ORPHANS
                && let Some(export) = self.exports.get(open.volume)
            {
                let name = &export.name;
                warn!(
                    "{name}: {MAX_ORPHANS} lost connections still have I/O in flight; new users are refused until some of it completes"
                );
            }
        }
    }

    /// Submits the source's I/O to its channels and passes completions back. A completion may lead
    /// to the next I/O; after `ROUNDS_PER_TURN` rounds or `BYTES_PER_TURN` bytes the rest waits
    /// for the next poll, and `Progress::More` is returned.
    #[inline]
    pub fn move_io(&mut self, source: &mut impl IoSource, now: Instant) -> Progress {
        if self.exports.changes() != self.seen {
            self.close_removed();
        }
        self.clock.begin(now);
        let mut progress = Progress::Idle;
        let (mut to_submit, mut to_hand_back) = (BYTES_PER_TURN, BYTES_PER_TURN);
        for round in 0..ROUNDS_PER_TURN {
            // Requests that wait are older.
            let has_begun = self.begin_waiting(source, now, &mut to_submit);
            let submitted = self.submit_io(source, now, &mut to_submit);
            if has_begun || submitted {
                progress = Progress::Drained;
            } else if round > 0 && self.done.is_empty() {
                return progress;
            }
            if self.in_flight == 0 {
                return progress;
            }
            for open in &mut self.open {
                let before = self.done.len();
                open.channel.kick();
                open.channel.poll(&mut self.done);
                open.count(&self.done[before..], &mut self.clock, &*self.core);
            }
            if !self.done.is_empty() {
                progress = Progress::Drained;
                self.hand_back(source, now, &mut to_hand_back);
            } else if to_submit > 0 {
                return progress;
            }
            if to_submit == 0 || to_hand_back == 0 {
                return Progress::More;
            }
        }
        Progress::More
    }

    /// Closes the channels of removed volumes that have nothing in flight.
    #[cold]
    fn close_removed(&mut self) {
        let changes = self.exports.changes();
        let is_exported = |open: &OpenChannel| self.exports.get(open.volume).is_some();
        self.open.retain(|open| open.in_flight > 0 || is_exported(open));
        // The others are looked at again.
        if self.open.iter().all(is_exported) {
            self.seen = changes;
        }
    }

    /// Submits and cancels the I/O that the source requests; returns whether any was submitted.
    /// `budget` is the byte budget: a request that exceeds it is submitted whole, and is the last
    /// one.
    #[inline]
    fn submit_io(&mut self, source: &mut impl IoSource, now: Instant, budget: &mut u64) -> bool {
        let before = self.submitted;
        while *budget > 0
            && let Some((volume, mut io)) = source.poll_io()
        {
            self.submitted += 1;
            *budget = budget.saturating_sub(io.len);
            let (tag, poll_ns) = (io.tag, self.clock.poll_ns);
            let open = match self.channel(volume, source.depth()) {
                Ok(open) => open,
                Err(error) => {
                    // If the volume was removed, the source has a reason of its own.
                    let admitted = source.begin(volume, &io, false);
                    if !matches!(admitted, Err(NotAdmitted::Denied(_))) {
                        source.on_io(Completion { tag, result: Err(error) }, now);
                    }
                    continue;
                }
            };
            open.meter.count(&io);
            open.begun.begin(tag, poll_ns, RequestKind::of(io.op));
            open.in_flight += 1;
            if !open.throttles.is_free() {
                let charge = source.charge(&io);
                match open.throttles.admit(charge, io, &open.meter, now) {
                    Some(passed) => io = passed,
                    None => {
                        self.in_flight += 1;
                        continue;
                    }
                }
            }
            let denied = open.begin(source, io, false);
            self.in_flight += 1;
            if let Some((tag, error)) = denied {
                self.drop_denied(volume, tag, error);
            }
        }
        while let Some((volume, tag)) = source.poll_cancel() {
            let Some(open) = self.open.iter_mut().find(|open| open.volume == volume) else { continue };
            let waits = !open.throttles.is_empty() || !open.locked.is_empty();
            if waits && open.take_waiting(tag, now) {
                self.done.push(open.fail(tag, IoError::Aborted, &mut self.clock, &*self.core));
            } else {
                open.channel.cancel(tag);
            }
        }
        self.submitted > before
    }

    /// Begins the requests that wait and may begin now, within the byte budget `budget`; returns
    /// whether any has begun or ended.
    #[inline]
    fn begin_waiting(&mut self, source: &mut impl IoSource, now: Instant, budget: &mut u64) -> bool {
        let mut has_begun = false;
        for at in 0..self.open.len() {
            if self.open.get(at).is_some_and(|open| !open.throttles.is_empty() || open.locked.is_due(now)) {
                has_begun |= self.begin_waiting_of(at, source, now, budget);
            }
        }
        has_begun
    }

    #[cold]
    fn begin_waiting_of(
        &mut self,
        at: usize,
        source: &mut impl IoSource,
        now: Instant,
        budget: &mut u64,
    ) -> bool {
        let Some(open) = self.open.get_mut(at) else { return false };
        let (volume, mut denied) = (open.volume, Vec::new());
        let mut has_begun = open.begin_locked(source, now, budget, &mut denied);
        while *budget > 0
            && let Some(io) = open.throttles.peek_due(now)
        {
            let tag = io.tag;
            match source.begin(volume, io, true) {
                Err(NotAdmitted::Denied(error)) => {
                    // It returns its tokens.
                    open.throttles.cancel(tag, &open.meter, now);
                    denied.push((tag, error));
                }
                admitted => {
                    let Some(io) = open.throttles.start(tag, &open.meter, now) else { break };
                    match admitted {
                        Ok(()) => {
                            *budget = budget.saturating_sub(io.len);
                            open.channel.submit(io);
                        }
                        Err(why) => open.locked.push(io, &open.volume_state, why),
                    }
                }
            }
            has_begun = true;
        }
        open.throttles.arm();
        open.locked.arm();
        for (tag, error) in denied {
            self.drop_denied(volume, tag, error);
        }
        has_begun
    }

    /// Counts a request that was denied, which its source has ended.
    #[cold]
    fn drop_denied(&mut self, volume: VolumeId, tag: Tag, error: IoError) {
        self.in_flight -= 1;
        if let Some(open) = self.open.iter_mut().find(|open| open.volume == volume) {
            open.fail(tag, error, &mut self.clock, &*self.core);
        }
    }

    /// Passes completions to the source, the oldest first, until the byte budget `budget` is used
    /// up: the source spends CPU time on the data, for example to compare it.
    #[inline]
    fn hand_back(&mut self, source: &mut impl IoSource, now: Instant, budget: &mut u64) {
        let mut count = 0;
        for done in &self.done {
            count += 1;
            if let Ok(Output::Data(data)) = &done.result {
                *budget = budget.saturating_sub(data.len() as u64);
                if *budget == 0 {
                    break;
                }
            }
        }
        self.in_flight -= count as u32;
        for completion in self.done.drain(..count) {
            source.on_io(completion, now);
        }
    }

    #[inline]
    fn channel(&mut self, volume: VolumeId, depth: u32) -> Result<&mut OpenChannel, IoError> {
        match self.open.iter().position(|open| open.volume == volume) {
            Some(at) => Ok(&mut self.open[at]),
            None => self.open_channel(volume, depth),
        }
    }

    #[cold]
    #[inline(never)]
    fn open_channel(&mut self, volume: VolumeId, depth: u32) -> Result<&mut OpenChannel, IoError> {
        let volume_state = self.exports.volume_state(volume).ok_or(IoError::ShuttingDown)?;
        if !volume_state.takes_users() {
            return Err(IoError::NoMemory);
        }
        let channel = volume_state.volume().open(&self.core, depth, self.waker.clone())?;
        let meter = Meter::new(&volume_state, self.origin.clone());
        if let Some(session) = &self.session {
            session.add(&meter);
        }
        let client = self.session.as_ref().map(|session| session.client());
        let (core, waker) = (self.core.clone(), self.waker.clone());
        let locked = LockedIo::new(core.clone(), waker.clone());
        let mut throttles = Throttles::new(volume_state.limiter().clone(), client, core, waker);
        if self.is_lifted {
            throttles.lift();
        }
        let begun = BegunIo::default();
        self.open.push(OpenChannel {
            volume,
            channel,
            meter,
            in_flight: 0,
            begun,
            throttles,
            locked,
            volume_state,
            orphan: None,
        });
        self.open.last_mut().ok_or(IoError::PathLost)
    }
}

/// Rounds of dependent I/O in one poll.
const ROUNDS_PER_TURN: u32 = 16;
/// Bytes of I/O in one poll: a fraction of a millisecond at memory bandwidth, and more than a deep
/// queue of short requests transfers.
const BYTES_PER_TURN: u64 = 2 << 20;
/// Interval, in nanoseconds, at which I/O that completes in its own poll is timed.
const SAMPLE_EVERY_NS: u64 = 1_000_000;
/// Above this many orphaned users of a volume, requests of lost connections that have not begun are
/// aborted.
const MAX_WAITING_ORPHANS: usize = 64;
/// Maximum number of requests in flight on one channel whose latency is counted.
const MAX_SLOTS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::sessions::Sessions;
    use blockmux_proto::driver::audit_event::Login;
    use blockmux_proto::driver::frames::Mac;
    use blockmux_proto::driver::target::Charge;
    use blockmux_proto::exports::Export;
    use blockmux_proto::volume_state::{Epoch, NeededRange, error_kind};
    use blockmux_volume::conformance::TestCore;
    use blockmux_volume::{Cost, Io, Limit, Limits, MemVolume, Op, Volume, VolumeInfo, VolumeLimits};
    use std::collections::VecDeque;
    use std::num::NonZeroU64;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    /// A session with endless commands: each completion leads to the next read.
    struct Endless {
        queue: VecDeque<Io>,
        begun: u64,
        completed: u64,
        refused: u32,
        cancels: Vec<Tag>,
        /// Each command belongs to a station of its own.
        has_stations: bool,
        /// Whether requests are free of limits.
        is_free: bool,
        /// The results of the next admissions; those after them are admitted.
        admissions: VecDeque<Result<(), NotAdmitted<IoError>>>,
    }

    fn locked() -> Result<(), NotAdmitted<IoError>> {
        Err(NotAdmitted::Locked(NeededRange::of_io((0, 512))))
    }

    impl Endless {
        fn new(commands: u64, len: u64) -> Endless {
            let queue = (0..commands).map(|tag| Io::new(Tag(tag), Op::Read, 0, len)).collect();
            Endless {
                queue,
                begun: 0,
                completed: 0,
                refused: 0,
                cancels: Vec::new(),
                has_stations: false,
                is_free: false,
                admissions: VecDeque::new(),
            }
        }
    }

    impl IoSource for Endless {
        fn depth(&self) -> u32 {
            256
        }

        fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
            let io = self.queue.pop_front()?;
            self.begun += io.len;
            Some((VolumeId(0), io))
        }

        fn on_io(&mut self, done: Completion, _now: Instant) {
            let Ok(Output::Data(data)) = done.result else {
                self.refused += 1;
                return;
            };
            let len = data.len() as u64;
            self.completed += len;
            self.queue.push_back(Io::new(done.tag, Op::Read, 0, len));
        }

        fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
            Some((VolumeId(0), self.cancels.pop()?))
        }

        fn charge(&mut self, io: &Io) -> Charge {
            let station = self.has_stations.then_some(Mac([2, 0, 0, 0, 0, io.tag.0 as u8]));
            Charge { cost: Cost::of(io).filter(|_| !self.is_free), station }
        }

        fn begin(&mut self, _: VolumeId, _: &Io, _: bool) -> Result<(), NotAdmitted<IoError>> {
            let admitted = self.admissions.pop_front().unwrap_or(Ok(()));
            self.refused += u32::from(matches!(admitted, Err(NotAdmitted::Denied(_))));
            admitted
        }
    }

    /// Holds requests until they are released, then completes all of them at once.
    struct HoldingVolume {
        inner: MemVolume,
        is_released: Arc<AtomicBool>,
    }

    struct HoldingChannel {
        inner: Box<dyn Channel>,
        is_released: Arc<AtomicBool>,
        held: Vec<Io>,
    }

    impl Volume for HoldingVolume {
        fn info(&self) -> VolumeInfo {
            self.inner.info()
        }

        fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
            let inner = self.inner.open(core, depth, waker)?;
            Ok(Box::new(HoldingChannel { inner, is_released: self.is_released.clone(), held: Vec::new() }))
        }
    }

    impl Channel for HoldingChannel {
        fn submit(&mut self, io: Io) {
            self.held.push(io);
        }

        fn poll(&mut self, done: &mut Vec<Completion>) {
            if self.is_released.load(Ordering::Relaxed) {
                self.held.drain(..).for_each(|io| self.inner.submit(io));
                self.inner.poll(done);
            }
        }
    }

    fn exports(is_released: &Arc<AtomicBool>) -> Exports {
        let volume =
            Arc::new(HoldingVolume { inner: MemVolume::new(8 << 20), is_released: is_released.clone() });
        let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
        Exports::new(vec![export])
    }

    fn channels(is_released: &Arc<AtomicBool>) -> Channels {
        Channels::new(exports(is_released), TestCore::new().as_core(), Waker::idle(), Origin::default())
    }

    #[test]
    fn a_volume_with_too_many_orphaned_users_refuses_new_ones_until_one_ends() {
        let is_released = Arc::new(AtomicBool::new(false));
        let exports = exports(&is_released);
        let volume_state = exports.volume_state(VolumeId(0)).unwrap();
        let core = TestCore::new().as_core();
        let open = || Channels::new(exports.clone(), core.clone(), Waker::idle(), Origin::default());
        let mut early = (open(), Endless::new(1, 512));
        early.0.move_io(&mut early.1, Instant::now());
        let mut left: Vec<_> = (0..MAX_ORPHANS).map(|_| (open(), Endless::new(1, 512))).collect();
        for (channels, session) in &mut left {
            assert!(volume_state.takes_users());
            channels.move_io(session, Instant::now());
            channels.orphan(false);
            channels.orphan(false);
        }
        let mut refused = (open(), Endless::new(1, 512));
        refused.0.move_io(&mut refused.1, Instant::now());
        assert_eq!((volume_state.orphans(), refused.1.refused), (MAX_ORPHANS, 1));
        // A user that opened its channel earlier may continue.
        early.1.queue.push_back(Io::new(Tag(1), Op::Read, 0, 512));
        early.0.move_io(&mut early.1, Instant::now());
        assert_eq!((early.1.begun, early.1.refused), (1024, 0));
        left.pop();
        let mut taken = (open(), Endless::new(1, 512));
        taken.0.move_io(&mut taken.1, Instant::now());
        assert_eq!((taken.1.begun, taken.1.refused), (512, 0));
        drop(left);
        assert_eq!(volume_state.orphans(), 0);
    }

    #[test]
    fn a_turn_is_bounded_in_bytes_for_steps_of_any_length() {
        for (commands, len) in [(1, 8 << 20), (200, 1 << 20), (256, 64 << 10), (256, 512)] {
            let mut channels = channels(&Arc::new(AtomicBool::new(true)));
            let mut session = Endless::new(commands, len);
            for _ in 0..50 {
                let before = (session.begun, session.completed);
                assert_eq!(channels.move_io(&mut session, Instant::now()), Progress::More);
                assert!(
                    session.begun > before.0 && session.completed > before.1,
                    "every turn makes progress"
                );
                let most = BYTES_PER_TURN + len;
                assert!(session.begun - before.0 < most, "{commands} commands of {len}");
                assert!(session.completed - before.1 < most, "{commands} commands of {len}");
            }
        }
    }

    #[test]
    fn a_deep_queue_of_short_requests_completes_in_one_turn() {
        let mut channels = channels(&Arc::new(AtomicBool::new(true)));
        let mut session = Endless::new(256, 4096);
        channels.move_io(&mut session, Instant::now());
        assert!(session.completed >= 256 * 4096);
    }

    #[test]
    fn simultaneous_completions_are_delivered_over_several_turns() {
        let is_released = Arc::new(AtomicBool::new(false));
        let (mut channels, mut session) = (channels(&is_released), Endless::new(8, 1 << 20));
        while channels.move_io(&mut session, Instant::now()) == Progress::More {}
        assert_eq!((session.begun, session.completed), (8 << 20, 0));
        is_released.store(true, Ordering::Relaxed);
        for turn in 1..=4 {
            assert_eq!(channels.move_io(&mut session, Instant::now()), Progress::More);
            assert_eq!(session.completed, turn * BYTES_PER_TURN);
        }
        assert!(!channels.is_idle());
    }

    #[test]
    fn latencies_and_failures_are_counted_by_origin_and_remain_after_a_user_has_ended() {
        let is_released = Arc::new(AtomicBool::new(false));
        let exports = exports(&is_released);
        let volume_state = exports.volume_state(VolumeId(0)).unwrap();
        let origin = Origin { protocol: "nbd", listener: "127.0.0.1:10809".into() };
        let core = TestCore::new().as_core();
        let mut channels = Channels::new(exports.clone(), core, Waker::idle(), origin.clone());
        let mut session = Endless::new(0, 0);
        session.queue.push_back(Io::new(Tag(3), Op::Read, 0, 512));
        session.queue.push_back(Io::new(Tag(7 << 32), Op::Read, 8 << 20, 512));
        let start = Instant::now();
        channels.move_io(&mut session, start);
        let sums = volume_state.traffic_by_origin();
        assert_eq!((sums[0].traffic.reads, sums[0].latency.reads.count(), sums[0].traffic.users), (2, 0, 1));
        assert_eq!(sums[0].in_flight(), 2);
        is_released.store(true, Ordering::Relaxed);
        // The session submits another read, which completes in its own poll.
        channels.move_io(&mut session, start + Duration::from_millis(5));
        drop(channels);
        let [sum] = &volume_state.traffic_by_origin()[..] else { panic!("one origin") };
        assert_eq!((&sum.origin, sum.traffic.users, sum.traffic.failed), (&origin, 0, 1));
        assert_eq!(sum.failures.iter().sum::<u64>(), 1);
        assert_eq!(sum.failures[error_kind(&IoError::OutOfRange)], 1);
        let reads = sum.latency.reads;
        assert_eq!((reads.count(), sum.in_flight()), (sum.traffic.reads, 0));
        assert_eq!(reads.buckets[13], 2, "two took 5 ms: {reads:?}");
        assert_eq!(sum.latency.writes.count() + sum.latency.others.count(), 0);
    }

    /// A volume with limits in requests per second, and channels of its users.
    struct Limited {
        core: Rc<TestCore>,
        exports: Exports,
        volume_state: Arc<VolumeState>,
    }

    impl Limited {
        fn new(volume: u64, client: u64) -> Limited {
            let exports = exports(&Arc::new(AtomicBool::new(true)));
            let volume_state = exports.volume_state(VolumeId(0)).unwrap();
            let limited = Limited { core: TestCore::new(), exports, volume_state };
            limited.set(volume, client);
            limited
        }

        fn set(&self, volume: u64, client: u64) {
            let limits = |iops| {
                let total = Limit { iops: NonZeroU64::new(iops), bytes_per_s: None };
                Limits { total, ..Limits::default() }
            };
            let limits = VolumeLimits { volume: limits(volume), client: limits(client) };
            assert!(self.volume_state.limiter().set_limits(limits));
        }

        fn channels(&self) -> Channels {
            let waker = self.core.ready().waker(1);
            Channels::new(self.exports.clone(), self.core.as_core(), waker, Origin::default())
        }

        /// Requests that have completed after a turn, and those that are throttled.
        fn turn(&self, channels: &mut Channels, session: &mut Endless) -> (u64, u64) {
            channels.move_io(session, self.core.now());
            (session.completed / 512, self.volume_state.traffic().throttled_now)
        }
    }

    #[test]
    fn requests_beyond_a_limit_are_held_and_start_when_it_permits() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        for completed in 2..5 {
            assert_eq!(limited.core.ready().pop(), None);
            assert!(limited.core.jump());
            assert_eq!(limited.core.ready().pop(), Some(1), "woken when the next one may start");
            assert_eq!(limited.turn(&mut channels, &mut session), (completed, 3));
        }
        assert_eq!(limited.core.now(), limited.core.started() + Duration::from_millis(300));
        let traffic = limited.volume_state.traffic();
        assert_eq!((traffic.throttled, traffic.throttled_ns), (6, (100 + 200 + 300) * 1_000_000));
        limited.set(0, 0);
        let (completed, throttled) = limited.turn(&mut channels, &mut session);
        assert!(completed > 10 && throttled == 0, "{completed} completed, {throttled} throttled");
    }

    #[test]
    fn throttled_requests_start_at_once_while_the_limits_are_suspended() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        limited.volume_state.limiter().suspend(true);
        let (completed, throttled) = limited.turn(&mut channels, &mut session);
        assert!(completed > 10 && throttled == 0, "{completed} completed, {throttled} throttled");
        limited.volume_state.limiter().suspend(false);
        assert_eq!(limited.turn(&mut channels, &mut session).1, 3, "they hold again");
    }

    #[test]
    fn a_held_request_can_be_cancelled_and_completes_at_once() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        limited.turn(&mut channels, &mut session);
        session.cancels.push(Tag(2));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 2));
        let [sum] = &limited.volume_state.traffic_by_origin()[..] else { panic!("one origin") };
        assert_eq!(
            (session.refused, sum.failures[error_kind(&IoError::Aborted)], sum.in_flight()),
            (1, 1, 2)
        );
    }

    #[test]
    fn a_throttled_request_that_is_denied_returns_its_tokens_to_the_next() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        session.admissions = [Err(NotAdmitted::Denied(IoError::Reserved))].into();
        limited.core.advance(Duration::from_millis(100));
        assert_eq!(limited.turn(&mut channels, &mut session), (2, 2));
        assert_eq!(session.refused, 1);
        let [sum] = &limited.volume_state.traffic_by_origin()[..] else { panic!("one origin") };
        assert_eq!((sum.failures[error_kind(&IoError::Reserved)], sum.in_flight()), (1, 2));
    }

    #[test]
    fn a_request_whose_range_is_locked_has_paid_and_is_tried_again() {
        for is_cancelled in [false, true] {
            let limited = Limited::new(10, 0);
            let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
            assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
            session.admissions = [locked(), Err(NotAdmitted::Draining)].into();
            limited.core.advance(Duration::from_millis(100));
            assert_eq!(limited.turn(&mut channels, &mut session), (1, 2));
            if is_cancelled {
                session.cancels.push(Tag(1));
                assert_eq!(limited.turn(&mut channels, &mut session), (1, 2));
                assert_eq!(session.refused, 1);
                continue;
            }
            for expected in [(1, 2), (2, 3)] {
                assert!(limited.core.jump());
                assert_eq!(limited.turn(&mut channels, &mut session), expected);
            }
            assert_eq!(limited.core.now(), limited.core.started() + Duration::from_millis(102));
            assert_eq!(session.refused, 0);
        }
    }

    #[test]
    fn requests_that_wait_for_their_range_are_aborted_with_a_lost_connection() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(2, 512));
        session.is_free = true;
        session.admissions = [locked(); 8].into();
        limited.turn(&mut channels, &mut session);
        assert!(!channels.is_idle());
        channels.orphan(true);
        limited.turn(&mut channels, &mut session);
        assert!(channels.is_idle() && session.refused == 2 && limited.volume_state.orphans() == 0);
    }

    #[test]
    fn a_free_request_is_not_held_behind_others() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        session.queue.push_back(Io::new(Tag(3), Op::Read, 0, 512));
        session.is_free = true;
        let (completed, throttled) = limited.turn(&mut channels, &mut session);
        assert!(completed > 1 && throttled == 3, "{completed} completed, {throttled} throttled");
    }

    #[test]
    fn held_requests_of_a_lost_connection_are_aborted_and_those_of_a_closed_one_continue() {
        let limited = Limited::new(10, 0);
        let user = || (limited.channels(), Endless::new(3, 512));
        let (mut closed, mut lost) = (user(), user());
        limited.turn(&mut closed.0, &mut closed.1);
        limited.turn(&mut lost.0, &mut lost.1);
        closed.0.orphan(false);
        assert_eq!((limited.volume_state.orphans(), closed.1.refused), (1, 0));
        lost.0.orphan(true);
        assert_eq!(limited.core.ready().pop(), Some(1));
        assert_eq!(limited.turn(&mut lost.0, &mut lost.1), (0, 3));
        assert!(lost.0.is_idle() && lost.1.refused == 3 && limited.volume_state.orphans() == 1);
    }

    #[test]
    fn limits_hold_nothing_for_further_lost_connections_once_many_have_left_something() {
        let limited = Limited::new(10, 0);
        let mut left = Vec::new();
        for _ in 0..MAX_WAITING_ORPHANS + 10 {
            let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
            limited.turn(&mut channels, &mut session);
            channels.orphan(false);
            limited.turn(&mut channels, &mut session);
            left.push((channels, session));
        }
        // As in each of their turns.
        for (channels, session) in &mut left {
            channels.orphan(false);
            limited.turn(channels, session);
        }
        assert_eq!(limited.volume_state.traffic().throttled_now, 3 * MAX_WAITING_ORPHANS as u64);
        assert!(left.iter().skip(MAX_WAITING_ORPHANS).all(|(channels, _)| channels.is_idle()));
        left.retain(|(channels, _)| !channels.is_idle());
        assert_eq!((left.len(), limited.volume_state.orphans()), (MAX_WAITING_ORPHANS, MAX_WAITING_ORPHANS));
    }

    #[test]
    fn a_held_request_starts_however_much_else_its_session_requests() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        session.is_free = true;
        session.queue.extend((10..18).map(|tag| Io::new(Tag(tag), Op::Read, 0, 1 << 20)));
        limited.turn(&mut channels, &mut session);
        limited.core.advance(Duration::from_millis(100));
        assert_eq!(limited.turn(&mut channels, &mut session).1, 2);
    }

    #[test]
    fn limits_do_not_hold_requests_of_a_session_that_ends_or_of_a_removed_volume() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        limited.turn(&mut channels, &mut session);
        channels.lift_limits();
        assert_eq!(limited.core.ready().pop(), Some(1));
        assert_eq!(limited.turn(&mut channels, &mut session).1, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session).1, 3);
        limited.volume_state.retire();
        assert_eq!(limited.turn(&mut channels, &mut session).1, 0);
    }

    #[test]
    fn connections_of_one_client_share_its_limit_and_each_station_has_its_own() {
        let limited = Limited::new(0, 10);
        let sessions = Sessions::default();
        let completed = |initiator: &str, peer: &str| {
            let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
            let login = Login { initiator: initiator.to_owned(), ..Login::default() };
            channels.count_for(&sessions.begin(login, peer, Epoch::current()));
            limited.turn(&mut channels, &mut session).0
        };
        let peers = ["192.0.2.1:1", "192.0.2.1:2", "192.0.2.2:1"];
        assert_eq!(peers.map(|peer| completed("", peer)), [1, 0, 1]);
        assert_eq!(peers.map(|peer| completed("iqn.a", peer)), [1, 0, 0]);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        session.has_stations = true;
        assert_eq!(limited.turn(&mut channels, &mut session), (3, 3));
    }

    #[test]
    fn what_was_throttled_settles_however_much_is_throttled_later() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(3, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 3));
        let settling = limited.volume_state.settling();
        for completed in 2..5 {
            assert!(!settling.is_over());
            assert!(limited.core.jump());
            assert_eq!(limited.turn(&mut channels, &mut session), (completed, 3));
        }
        assert!(settling.is_over());
        let settling = limited.volume_state.settling();
        assert!(!settling.is_over());
        drop(channels);
        assert!(settling.is_over(), "its user has ended");
    }

    #[test]
    fn a_client_that_becomes_known_while_it_is_throttled_has_its_limit_afterwards() {
        let limited = Limited::new(10, 0);
        let (mut channels, mut session) = (limited.channels(), Endless::new(2, 512));
        assert_eq!(limited.turn(&mut channels, &mut session), (1, 2));
        let login = Login { initiator: "iqn.a".to_owned(), ..Login::default() };
        channels.count_for(&Sessions::default().begin(login, "192.0.2.1:1", Epoch::current()));
        limited.set(0, 10);
        // What was throttled before starts, and the next ones are limited.
        let (completed, throttled) = limited.turn(&mut channels, &mut session);
        assert!(completed < 10 && throttled == 2, "{completed} completed, {throttled} throttled");
    }

    /// Submits requests to several volumes.
    #[derive(Default)]
    struct Spread(VecDeque<(VolumeId, Io)>);

    impl IoSource for Spread {
        fn depth(&self) -> u32 {
            8
        }

        fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
            self.0.pop_front()
        }

        fn on_io(&mut self, _: Completion, _: Instant) {}

        fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
            None
        }

        fn charge(&mut self, io: &Io) -> Charge {
            Charge { cost: Cost::of(io), station: None }
        }

        fn begin(&mut self, _: VolumeId, _: &Io, _: bool) -> Result<(), NotAdmitted<IoError>> {
            Ok(())
        }
    }

    #[test]
    fn the_channel_of_a_removed_volume_is_closed_while_others_are_busy() {
        let is_released = Arc::new(AtomicBool::new(false));
        let busy = exports(&is_released).get(VolumeId(0)).unwrap();
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
        let idle = Arc::downgrade(&volume);
        let export = Export { name: "b".to_owned(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![(*busy).clone(), export]);
        let mut channels =
            Channels::new(exports.clone(), TestCore::new().as_core(), Waker::idle(), Origin::default());
        let io = |tag| Io::new(Tag(tag), Op::Read, 0, 512);
        let mut source = Spread([(VolumeId(0), io(0)), (VolumeId(1), io(1))].into());
        channels.move_io(&mut source, Instant::now());
        assert_eq!((channels.open.len(), channels.in_flight), (2, 1));
        drop(exports.remove("b"));
        channels.move_io(&mut source, Instant::now());
        assert!(channels.open.len() == 1 && idle.upgrade().is_none());
        // A volume with I/O in flight stays open until that is complete.
        drop(exports.remove("a"));
        channels.move_io(&mut source, Instant::now());
        assert_eq!(channels.open.len(), 1);
        is_released.store(true, Ordering::Relaxed);
        channels.move_io(&mut source, Instant::now());
        channels.move_io(&mut source, Instant::now());
        assert!(channels.open.is_empty() && channels.is_idle());
    }
}
