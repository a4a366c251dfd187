//! Rate limits of one session's requests to one volume: the seam between the sessions of all
//! protocols and their channels (`docs/decisions/0062-io-limits-between-sessions-and-channels.md`).
//!
//! Without limits a request costs one load of a number that changes with the limits.

use blockmux_proto::driver::frames::Mac;
use blockmux_proto::driver::target::Charge;
use blockmux_proto::volume_state::Meter;
use blockmux_volume::{Core, Io, Limiter, SgList, Tag, Throttle, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Throttles requests of a session to a volume until its limits permit them.
pub(crate) struct Throttles {
    limiter: Arc<Limiter>,
    /// The generation of the limits at which every request passes; [`NEVER`] if there may be
    /// limits.
    free_at: u64,
    /// The session's client, once it is known.
    client: Option<Arc<str>>,
    /// Requests that were throttled before the client was known wait in a throttle without it.
    has_unknown: bool,
    /// A throttle of each station, or a single one of the session's client.
    all: Vec<(Option<Mac>, Throttle)>,
    /// Number of throttled requests.
    throttled: usize,
    core: Rc<dyn Core>,
    waker: Waker,
}

impl Throttles {
    pub(crate) fn new(
        limiter: Arc<Limiter>,
        client: Option<Arc<str>>,
        core: Rc<dyn Core>,
        waker: Waker,
    ) -> Throttles {
        Throttles {
            limiter,
            free_at: NEVER,
            client,
            has_unknown: false,
            all: Vec::new(),
            throttled: 0,
            core,
            waker,
        }
    }

    /// Whether the next request passes without a check.
    #[inline]
    pub(crate) fn is_free(&self) -> bool {
        self.limiter.generation() == self.free_at
    }

    /// Whether no request is throttled.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.throttled == 0
    }

    /// Returns the request if it may start now, or throttles it. `station` is the one that it
    /// belongs to, if the session has several.
    #[cold]
    pub(crate) fn admit(
        &mut self,
        Charge { cost, station }: Charge,
        io: Io,
        meter: &Meter,
        now: Instant,
    ) -> Option<Io> {
        let bytes = write_bytes(&io);
        let admitted = self.throttle_of(station).admit_at_cost(io, cost, now);
        if admitted.is_none() {
            self.throttled += 1;
            self.core.pool().account().into_iter().for_each(|account| account.note_throttled(bytes));
            meter.throttle();
            self.arm();
        } else {
            self.update_free();
        }
        admitted
    }

    /// The next throttled request that may start now. It stays throttled.
    #[cold]
    pub(crate) fn peek_due(&mut self, now: Instant) -> Option<&Io> {
        // The earliest first, so that no station waits for the requests of others.
        let next = self.all.iter_mut().filter_map(|(_, throttle)| Some((throttle.next_due(now)?, throttle)));
        next.min_by_key(|(due, _)| *due)?.1.peek_due(now)
    }

    /// Removes a throttled request that may start; returns it.
    #[cold]
    pub(crate) fn start(&mut self, tag: Tag, meter: &Meter, now: Instant) -> Option<Io> {
        let (io, delay) = self.all.iter_mut().find_map(|(_, throttle)| throttle.start(tag, now))?;
        self.note_released(&io, delay, meter);
        Some(io)
    }

    /// Requests a wake-up for the next throttled request; called after some have started.
    #[cold]
    pub(crate) fn arm(&mut self) {
        self.all.iter_mut().for_each(|(_, throttle)| throttle.arm(&*self.core, &self.waker));
        self.update_free();
    }

    /// Removes the throttled request with this tag, and returns its tokens to others.
    #[cold]
    pub(crate) fn cancel(&mut self, tag: Tag, meter: &Meter, now: Instant) -> Option<Io> {
        let (io, delay) = self.all.iter_mut().find_map(|(_, throttle)| throttle.cancel(tag, now))?;
        self.note_released(&io, delay, meter);
        self.arm();
        Some(io)
    }

    /// Removes a throttled request; returns its tag.
    pub(crate) fn cancel_any(&mut self, meter: &Meter, now: Instant) -> Option<Tag> {
        let (io, delay) = self.all.iter_mut().find_map(|(_, throttle)| throttle.cancel_first(now))?;
        self.note_released(&io, delay, meter);
        Some(io.tag)
    }

    /// Throttles nothing from now on: all requests may start.
    pub(crate) fn lift(&mut self) {
        (self.limiter, self.free_at) = (Arc::default(), NEVER);
        self.all.iter_mut().for_each(|(_, throttle)| throttle.set_limiter(self.limiter.clone()));
    }

    /// The session's client is known: requests from now on are subject to the limits of each
    /// client, once those have started that are throttled.
    pub(crate) fn set_client(&mut self, client: Arc<str>) {
        (self.client, self.free_at, self.has_unknown) = (Some(client), NEVER, true);
    }

    fn throttle_of(&mut self, station: Option<Mac>) -> &mut Throttle {
        if self.has_unknown && self.is_empty() {
            self.all.clear();
            self.has_unknown = false;
        }
        let known = self.all.iter().position(|(own, _)| *own == station);
        let at = known.unwrap_or_else(|| {
            if self.all.len() >= MAX_STATIONS {
                self.all.retain(|(_, throttle)| !throttle.is_empty());
            }
            let client = station.map(|station| station.to_string().into()).or_else(|| self.client.clone());
            self.all.push((station, Throttle::new(self.limiter.clone(), client)));
            self.all.len() - 1
        });
        &mut self.all[at].1
    }

    fn note_released(&mut self, io: &Io, delay: Duration, meter: &Meter) {
        self.throttled -= 1;
        let bytes = write_bytes(io);
        self.core.pool().account().into_iter().for_each(|account| account.note_released(bytes));
        meter.release(delay.as_nanos() as u64);
    }

    fn update_free(&mut self) {
        let generation = self.limiter.generation();
        // Stations that have sent nothing since the limits changed would not notice that there are
        // none left.
        self.all.retain(|(_, throttle)| !throttle.is_empty() || throttle.generation() == Some(generation));
        let is_free =
            !self.has_unknown && self.all.iter().all(|(_, throttle)| throttle.free_at() == Some(generation));
        self.free_at = if is_free { generation } else { NEVER };
    }
}

/// Bytes of buffers that a write has.
fn write_bytes(io: &Io) -> usize {
    io.data.as_ref().filter(|_| io.op.is_write()).map_or(0, SgList::len)
}

/// No generation.
const NEVER: u64 = u64::MAX;
/// Above this many stations, drop those without throttled requests.
const MAX_STATIONS: usize = 256;
